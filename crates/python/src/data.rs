//! Data as Python sees it: mini-batches are memory of the native side, handed out by DLPack or as buffers.
#![expect(unsafe_code, reason = "streams come and tensors go as C structures")]

use crate::{
    errors::{exchange, invalid},
    task::{GLANCE, interruptible},
};
use arrow_array::ffi_stream::{FFI_ArrowArrayStream, RecordBatchStreamReader};
use deuteron_exchange::{
    self as room, DType, Fill, Filter, Group, Operator, Options, Request, Source, Value,
    plan::{Order, Rest, Shuffle},
};
use pyo3::{ffi, prelude::*, types::PyCapsule};
use std::{
    ffi::{CStr, c_int, c_void},
    path::PathBuf,
    process,
    ptr::{NonNull, null_mut},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

const STREAM: &CStr = c"arrow_array_stream";
const TENSOR: &CStr = c"dltensor";
/// DLPack's number of the main memory.
const CPU: i32 = 1;

/// Name, type, tensor, fill, categories.
type Described =
    (String, Option<String>, Option<(String, Vec<usize>)>, Option<Literal>, Option<Vec<String>>);

/// A value that the user wrote. The order matters: a bool is an int to Python, and an int a float.
#[derive(FromPyObject)]
enum Literal {
    #[pyo3(transparent)]
    Bool(bool),
    #[pyo3(transparent)]
    Int(i64),
    #[pyo3(transparent)]
    Float(f64),
    #[pyo3(transparent)]
    Text(String),
}

impl From<Literal> for Value {
    fn from(literal: Literal) -> Self {
        match literal {
            Literal::Bool(value) => Self::Bool(value),
            Literal::Int(value) => Self::Int(value),
            Literal::Float(value) => Self::Float(value),
            Literal::Text(value) => Self::Text(value),
        }
    }
}

impl From<Literal> for Fill {
    fn from(literal: Literal) -> Self {
        match literal {
            Literal::Bool(value) => Self::Int(value.into()),
            Literal::Int(value) => Self::Int(value),
            Literal::Float(value) => Self::Float(value),
            Literal::Text(value) => Self::Text(value),
        }
    }
}

fn request((name, dtype, tensor, fill, categories): Described) -> room::Result<Request> {
    let dtype = dtype.map(|dtype| DType::named(&dtype)).transpose()?;
    let tensor = tensor.map(|(dtype, shape)| DType::named(&dtype).map(|dtype| (dtype, shape)));
    Ok(Request { name, dtype, tensor: tensor.transpose()?, fill: fill.map(Fill::from), categories })
}

fn filter((column, operator, values): (String, String, Vec<Literal>)) -> room::Result<Filter> {
    let operator = Operator::named(&operator)?;
    Ok(Filter { column, operator, values: values.into_iter().map(Value::from).collect() })
}

/// The stream in a capsule of the Arrow interface.
fn stream(capsule: &Bound<'_, PyCapsule>) -> PyResult<RecordBatchStreamReader> {
    let stream = capsule.pointer_checked(Some(STREAM))?.cast::<FFI_ArrowArrayStream>();
    // SAFETY: a capsule of this name holds such a structure, which is ours to take and is empty afterwards.
    let stream = unsafe { FFI_ArrowArrayStream::from_raw(stream.as_ptr()) };
    RecordBatchStreamReader::try_new(stream)
        .map_err(|error| invalid(format!("the stream: {error}")))
}

/// A source, opened for one rank.
#[pyclass(frozen, module = "deuteron._core")]
pub(crate) struct Dataset(Arc<room::Dataset>);

#[pymethods]
impl Dataset {
    #[new]
    #[pyo3(signature = (
        paths, stream, *, batch_size, rank, size, shuffle, buffer, seed, rest, columns, described, groups, filters,
        refuse_nan, prefetch, threads, memory, spool
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "all by name, and only the package's own front calls it"
    )]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        stream: Option<&Bound<'_, PyCapsule>>,
        batch_size: u64,
        rank: u64,
        size: u64,
        shuffle: Option<&str>,
        buffer: u64,
        seed: u64,
        rest: &str,
        columns: Option<Vec<String>>,
        described: Vec<Described>,
        groups: Vec<(String, Vec<String>)>,
        filters: Vec<(String, String, Vec<Literal>)>,
        refuse_nan: bool,
        prefetch: usize,
        threads: Option<usize>,
        memory: u64,
        spool: Option<PathBuf>,
    ) -> PyResult<Self> {
        let shuffle = match shuffle {
            None => Shuffle::None,
            Some("buffer") => Shuffle::Buffer(buffer),
            Some("full") => Shuffle::Full,
            Some(other) => {
                return Err(invalid(format!(
                    "shuffle is \"full\", \"buffer\" or None, not {other:?}"
                )));
            }
        };
        let rest = match rest {
            "drop" => Rest::Drop,
            "pad" => Rest::Pad,
            other => return Err(invalid(format!("rest is \"drop\" or \"pad\", not {other:?}"))),
        };
        let requests = described.into_iter().map(request).collect::<room::Result<_>>();
        let filters = filters.into_iter().map(filter).collect::<room::Result<_>>();
        let options = Options {
            order: Order { ranks: size, batch: batch_size, shuffle, rest, seed },
            rank,
            columns,
            requests: requests.map_err(|error| exchange(&error))?,
            groups: groups.into_iter().map(|(name, columns)| Group { name, columns }).collect(),
            filters: filters.map_err(|error| exchange(&error))?,
            refuse_nan,
            prefetch,
            threads,
            memory,
            folder: spool,
        };
        let opened = match stream {
            // On this thread, because whoever makes the stream may need Python for it (GIL-2).
            Some(capsule) => {
                let source = Source::Stream(Box::new(self::stream(capsule)?));
                py.detach(|| room::Dataset::open(source, options))
            }
            None => interruptible(py, move || {
                room::Dataset::open(Source::Files(room::files(&paths)?), options)
            })?,
        };
        Ok(Self(Arc::new(opened.map_err(|error| exchange(&error))?)))
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.0.plan().rows()
    }

    #[getter]
    fn steps(&self) -> u64 {
        self.0.plan().steps()
    }

    /// Name, type, shape, unit and categories of each.
    #[getter]
    #[expect(clippy::type_complexity, reason = "the front makes something with names of it")]
    fn columns(
        &self,
    ) -> Vec<(&str, &'static str, &[usize], Option<&'static str>, Option<&[String]>)> {
        let columns = self.0.layout().columns().iter();
        columns
            .map(|column| {
                let (name, dtype) = (column.name(), column.dtype().name());
                (name, dtype, column.shape(), column.unit(), column.categories())
            })
            .collect()
    }

    /// Name, type and shape of each tensor of a mini-batch.
    #[getter]
    fn tensors(&self) -> Vec<(&str, &'static str, &[usize])> {
        let fields = self.0.layout().fields().iter();
        fields.map(|field| (field.name(), field.dtype().name(), field.shape())).collect()
    }

    fn epoch(&self, epoch: u64, step: u64) -> PyResult<Batches> {
        let batches = self.0.epoch(epoch, step).map_err(|error| exchange(&error))?;
        Ok(Batches { batches: Mutex::new(batches), process: process::id() })
    }
}

/// The mini-batches of an epoch, made by threads in the background.
#[pyclass(frozen, module = "deuteron._core")]
pub(crate) struct Batches {
    batches: Mutex<room::Batches>,
    process: u32,
}

impl Batches {
    /// Waits for the next, and lets the user interrupt that (GIL-1).
    fn wait(&self, py: Python<'_>) -> PyResult<Option<room::Batch>> {
        if self.process != process::id() {
            return Err(invalid(
                "this epoch was begun by another process, and its threads are there: begin one here",
            ));
        }
        loop {
            let got = py.detach(|| {
                let mut batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
                batches.next_until(Instant::now() + GLANCE)
            });
            match got {
                Some(next) => return next.transpose().map_err(|error| exchange(&error)),
                None => py.check_signals()?,
            }
        }
    }
}

#[pymethods]
impl Batches {
    /// The tensors of the next mini-batch as DLPack capsules; nothing after the last.
    fn capsules<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<Bound<'py, PyCapsule>>>> {
        let Some(batch) = self.wait(py)? else { return Ok(None) };
        batch.into_tensors().map(|tensor| capsule(py, tensor)).collect::<PyResult<_>>().map(Some)
    }

    /// The tensors of the next mini-batch as buffers of bytes; nothing after the last.
    fn buffers(&self, py: Python<'_>) -> PyResult<Option<Vec<Bytes>>> {
        Ok(self.wait(py)?.map(|batch| batch.into_tensors().map(Bytes).collect()))
    }
}

/// A tensor of a mini-batch, writable, for as long as anybody looks at it.
#[pyclass(frozen, module = "deuteron._core")]
pub(crate) struct Bytes(room::Tensor);

#[pymethods]
impl Bytes {
    fn __len__(&self) -> usize {
        self.0.pointer().len()
    }

    /// # Safety
    /// Python calls it with a buffer to fill in.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bytes = slf.get().0.pointer();
        let (start, length) = (bytes.cast().as_ptr(), bytes.len() as ffi::Py_ssize_t);
        // SAFETY: the memory belongs to the object, which the view holds, and the native side does not look at it again.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, length, 0, flags) };
        if filled < 0 { Err(PyErr::fetch(slf.py())) } else { Ok(()) }
    }
}

/// DLPack's structures, as its header has them.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: [i32; 2],
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    release: Option<unsafe extern "C" fn(*mut Managed)>,
    /// Shape, then strides, to which the structure points; behind it, so that others do not see it.
    sizes: Vec<i64>,
    _tensor: room::Tensor,
}

/// # Safety
/// Called once, with what `capsule` has made.
unsafe extern "C" fn release(managed: *mut Managed) {
    // SAFETY: it was a box, and whoever was given it is done with it.
    drop(unsafe { Box::from_raw(managed) });
}

/// # Safety
/// Python calls it with a capsule that `capsule` has made.
unsafe extern "C" fn forget(capsule: *mut ffi::PyObject) {
    // SAFETY: it is a capsule. Whoever takes what it holds gives it another name, and releases it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, TENSOR.as_ptr()) == 1 {
            release(ffi::PyCapsule_GetPointer(capsule, TENSOR.as_ptr()).cast());
        }
    }
}

/// A tensor for whoever takes it.
fn capsule(py: Python<'_>, tensor: room::Tensor) -> PyResult<Bound<'_, PyCapsule>> {
    let (code, bits) = match tensor.dtype {
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => (0, tensor.dtype.size() * 8),
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => (1, tensor.dtype.size() * 8),
        DType::F16 | DType::F32 | DType::F64 => (2, tensor.dtype.size() * 8),
        DType::Bool => (6, 8),
    };
    let data = tensor.pointer().cast().as_ptr();
    let dimensions = tensor.shape.len();
    let mut sizes = vec![1; 2 * dimensions];
    for index in (0..dimensions).rev() {
        sizes[index] = tensor.shape[index] as i64;
        if index > 0 {
            sizes[dimensions + index - 1] = sizes[dimensions + index] * sizes[index];
        }
    }
    let mut managed = Box::new(Managed {
        tensor: DlTensor {
            data,
            device: [CPU, 0],
            dimensions: dimensions as i32,
            code,
            bits: bits as u8,
            lanes: 1,
            shape: null_mut(),
            strides: null_mut(),
            offset: 0,
        },
        context: null_mut(),
        release: Some(release),
        sizes,
        _tensor: tensor,
    });
    let (shape, strides) = managed.sizes.split_at_mut(dimensions);
    (managed.tensor.shape, managed.tensor.strides) = (shape.as_mut_ptr(), strides.as_mut_ptr());
    let pointer = NonNull::from(Box::leak(managed)).cast();
    // SAFETY: the capsule owns what it points to until somebody takes it, and `forget` knows the difference.
    unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, TENSOR, Some(forget)) }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Dataset>()?;
    module.add_class::<Batches>()?;
    module.add_class::<Bytes>()
}
