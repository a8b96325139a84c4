//! The engine as Python sees it: tensors come as addresses, and whoever submits one keeps it alive.
#![expect(unsafe_code, reason = "tensors are addresses of memory that Python owns")]

use crate::{
    errors::{collective, invalid, timed_out},
    task::{GLANCE, deadline, interruptible},
};
use deuteron_collective::{
    self as room, DType, Kind, Prepared, RawTensor, Receipt, ReduceOp, Reduction, Shape, Submission,
};
use pyo3::{exceptions::PyIndexError, ffi, prelude::*};
use std::{
    any::Any,
    ffi::c_int,
    mem::take,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// Copies from here on let other Python threads run meanwhile.
const LONG_COPY: usize = 256 << 10;

/// A tensor: address, type, shape.
type Place = (usize, u8, Vec<usize>);

fn dtype(code: u8) -> PyResult<DType> {
    let unknown = || invalid(format!("there is no type {code}"));
    DType::ALL.get(usize::from(code)).copied().ok_or_else(unknown)
}

fn raw((address, code, shape): &Place) -> PyResult<RawTensor> {
    let (data, dtype, shape) = (*address as *mut u8, dtype(*code)?, Shape::new(shape));
    if shape.count() > 0 && (data.is_null() || !address.is_multiple_of(dtype.size())) {
        return Err(invalid(format!("a tensor of {} cannot lie at {address:#x}", dtype.name())));
    }
    Ok(RawTensor { data, dtype, shape })
}

/// Horovod's numbers.
fn reduction(code: u8, prescale: f64, postscale: f64) -> PyResult<Reduction> {
    let op = match code {
        0 => ReduceOp::Mean,
        1 => ReduceOp::Sum,
        3 => ReduceOp::Min,
        4 => ReduceOp::Max,
        5 => ReduceOp::Product,
        _ => return Err(invalid(format!("there is no reduction {code}"))),
    };
    Ok(Reduction::from(op).prescale(prescale).postscale(postscale))
}

/// Named operations in any order from any thread, matched across ranks, fused and overlapped.
#[pyclass(frozen, module = "deuteron._core")]
pub(crate) struct Engine(Arc<room::Engine>);

impl Engine {
    pub(crate) fn new(engine: room::Engine) -> Self {
        Self(Arc::new(engine))
    }

    /// `now`: the caller waits for it next.
    fn submit(&self, submission: &Submission<'_>, now: bool) -> PyResult<Operation> {
        // SAFETY: whoever calls from Python keeps the tensors until the operation is done; it is part of the contract
        // of this module, which only the package's own front uses.
        let receipt = unsafe {
            match now {
                true => self.0.submit_to_wait(submission),
                false => self.0.submit(submission),
            }
        };
        let receipt = receipt.map_err(|error| collective(&error))?;
        Ok(Operation { engine: Arc::clone(&self.0), receipt })
    }

    fn start(&self, wanted: Submission<'_>, tensors: &[Place], now: bool) -> PyResult<Operation> {
        let tensors = tensors.iter().map(raw).collect::<PyResult<Vec<_>>>()?;
        self.submit(&Submission { tensors: &tensors, ..wanted }, now)
    }
}

/// An operation with nothing special about it.
fn wanted(name: Option<&str>, kind: Kind) -> Submission<'_> {
    let reduction = ReduceOp::Sum.into();
    Submission { name, kind, reduction, root: 0, tensors: &[], splits: &[] }
}

#[pymethods]
impl Engine {
    #[getter]
    fn rank(&self) -> usize {
        self.0.rank()
    }

    #[getter]
    fn size(&self) -> usize {
        self.0.size()
    }

    #[pyo3(signature = (name, tensors, reduction=1, prescale=1.0, postscale=1.0, now=false))]
    fn all_reduce(
        &self,
        name: Option<&str>,
        tensors: Vec<Place>,
        reduction: u8,
        prescale: f64,
        postscale: f64,
        now: bool,
    ) -> PyResult<Operation> {
        let reduction = self::reduction(reduction, prescale, postscale)?;
        self.start(Submission { reduction, ..wanted(name, Kind::AllReduce) }, &tensors, now)
    }

    #[pyo3(signature = (name, tensors, now=false))]
    fn all_gather(
        &self,
        name: Option<&str>,
        tensors: Vec<Place>,
        now: bool,
    ) -> PyResult<Operation> {
        self.start(wanted(name, Kind::AllGather), &tensors, now)
    }

    #[pyo3(signature = (name, tensors, root, now=false))]
    fn broadcast(
        &self,
        name: Option<&str>,
        tensors: Vec<Place>,
        root: usize,
        now: bool,
    ) -> PyResult<Operation> {
        self.start(Submission { root, ..wanted(name, Kind::Broadcast) }, &tensors, now)
    }

    #[pyo3(signature = (name, tensors, reduction=1, prescale=1.0, postscale=1.0, now=false))]
    fn reduce_scatter(
        &self,
        name: Option<&str>,
        tensors: Vec<Place>,
        reduction: u8,
        prescale: f64,
        postscale: f64,
        now: bool,
    ) -> PyResult<Operation> {
        let reduction = self::reduction(reduction, prescale, postscale)?;
        self.start(Submission { reduction, ..wanted(name, Kind::ReduceScatter) }, &tensors, now)
    }

    #[pyo3(signature = (name, tensor, splits=Vec::new(), now=false))]
    fn all_to_all(
        &self,
        name: Option<&str>,
        tensor: Place,
        splits: Vec<usize>,
        now: bool,
    ) -> PyResult<Operation> {
        self.start(Submission { splits: &splits, ..wanted(name, Kind::AllToAll) }, &[tensor], now)
    }

    #[pyo3(signature = (name=None, now=false))]
    fn barrier(&self, name: Option<&str>, now: bool) -> PyResult<Operation> {
        self.start(wanted(name, Kind::Barrier), &[], now)
    }

    fn bucket(&self, py: Python<'_>, bytes: usize) -> PyResult<Memory> {
        let engine = Arc::clone(&self.0);
        let made = interruptible(py, move || engine.bucket::<u8>(bytes))?;
        let mut bucket = made.map_err(|error| collective(&error))?;
        let (address, bytes) = (bucket.as_mut_ptr() as usize, bucket.len());
        Ok(Memory { address, bytes, counts: Vec::new(), _owner: Mutex::new(Box::new(bucket)) })
    }

    fn report(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.0.report()).map_err(|error| collective(&error))
    }

    fn start_timeline(&self, py: Python<'_>, path: std::path::PathBuf) -> PyResult<()> {
        py.detach(|| self.0.start_timeline(path)).map_err(|error| collective(&error))
    }

    fn stop_timeline(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.stop_timeline()).map_err(|error| collective(&error))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// Waits for an operation, and lets the user interrupt that (GIL-1). Whether it is over by `until`.
fn wait(
    py: Python<'_>,
    engine: &room::Engine,
    receipt: Receipt,
    until: Option<Instant>,
) -> PyResult<bool> {
    loop {
        let glance = Instant::now() + GLANCE;
        let end = until.map_or(glance, |until| until.min(glance));
        if py.detach(|| engine.wait_until(receipt, end)) {
            return Ok(true);
        }
        py.check_signals()?;
        if until.is_some_and(|until| until <= Instant::now()) {
            return Ok(false);
        }
    }
}

/// An operation on its way.
#[pyclass(frozen, module = "deuteron._core")]
pub(crate) struct Operation {
    engine: Arc<room::Engine>,
    receipt: Receipt,
}

#[pymethods]
impl Operation {
    fn done(&self) -> bool {
        self.engine.is_done(self.receipt)
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Vec<Memory>> {
        if !wait(py, &self.engine, self.receipt, deadline(timeout)?)? {
            let seconds = timeout.unwrap_or_default();
            return Err(timed_out(format!("the operation is not done after {seconds} s")));
        }
        let outputs = self.engine.wait(self.receipt).map_err(|error| collective(&error))?;
        Ok(outputs.into_iter().map(Memory::new).collect())
    }
}

/// Bytes of the native side, writable, for as long as anybody looks at them.
#[pyclass(frozen, module = "deuteron._core")]
pub(crate) struct Memory {
    address: usize,
    bytes: usize,
    counts: Vec<usize>,
    /// Whose memory it is; never locked, only dropped.
    _owner: Mutex<Box<dyn Any + Send>>,
}

impl Memory {
    fn new(output: room::Output) -> Self {
        let (address, bytes) = (output.data() as usize, output.len() * output.dtype().size());
        let counts = output.counts().to_vec();
        Self { address, bytes, counts, _owner: Mutex::new(Box::new(output)) }
    }
}

#[pymethods]
impl Memory {
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    #[getter]
    fn counts(&self) -> Vec<usize> {
        self.counts.clone()
    }

    fn __len__(&self) -> usize {
        self.bytes
    }

    /// # Safety
    /// Python calls it with a buffer to fill in.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let memory = slf.get();
        let (start, length) = (memory.address as *mut _, memory.bytes as ffi::Py_ssize_t);
        // SAFETY: the memory belongs to the object, which the view holds.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, length, 0, flags) };
        if filled < 0 { Err(PyErr::fetch(slf.py())) } else { Ok(()) }
    }
}

struct Slot {
    prepared: Prepared,
    bytes: usize,
}

/// Tensors at fixed places in a bucket that are reduced again and again: gradients.
#[pyclass(frozen, module = "deuteron._core")]
pub(crate) struct Slots {
    engine: Arc<room::Engine>,
    slots: Vec<Slot>,
    /// Submitted since the last wait.
    waiting: Mutex<Vec<Receipt>>,
    /// Keeps the memory.
    _memory: Py<Memory>,
}

impl Slots {
    fn waiting(&self) -> MutexGuard<'_, Vec<Receipt>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self, slot: usize) -> PyResult<&Slot> {
        self.slots
            .get(slot)
            .ok_or_else(|| PyIndexError::new_err(format!("there is no slot {slot}")))
    }

    fn note(&self, receipt: room::Result<Receipt>) -> PyResult<()> {
        self.waiting().push(receipt.map_err(|error| collective(&error))?);
        Ok(())
    }
}

#[pymethods]
impl Slots {
    #[new]
    #[pyo3(signature = (engine, memory, slots, reduction=1, prescale=1.0, postscale=1.0))]
    fn new(
        engine: &Engine,
        memory: Py<Memory>,
        slots: Vec<(String, usize, u8, Vec<usize>)>,
        reduction: u8,
        prescale: f64,
        postscale: f64,
    ) -> PyResult<Self> {
        let reduction = self::reduction(reduction, prescale, postscale)?;
        let (start, bytes) = (memory.get().address, memory.get().bytes);
        let place = |(name, offset, code, shape): (String, usize, u8, Vec<usize>)| {
            let tensor = raw(&(start + offset, code, shape))?;
            let length = tensor.shape.count().saturating_mul(tensor.dtype.size());
            if offset.saturating_add(length) > bytes {
                return Err(invalid(format!("{name} ends beyond the memory of {bytes} bytes")));
            }
            let prepared = engine.0.prepare(&Submission {
                reduction,
                tensors: &[tensor],
                ..wanted(Some(&name), Kind::AllReduce)
            });
            let prepared = prepared.map_err(|error| collective(&error))?;
            Ok(Slot { prepared, bytes: length })
        };
        let slots = slots.into_iter().map(place).collect::<PyResult<Vec<_>>>()?;
        let (engine, waiting) = (Arc::clone(&engine.0), Mutex::default());
        Ok(Self { engine, slots, waiting, _memory: memory })
    }

    fn submit(&self, slot: usize) -> PyResult<()> {
        // SAFETY: the slot lies in memory that this object keeps, and Python leaves it alone until it has waited.
        self.note(unsafe { self.engine.submit_prepared(&self.slot(slot)?.prepared) })
    }

    fn fill(&self, py: Python<'_>, slot: usize, address: usize) -> PyResult<()> {
        let Slot { prepared, bytes } = self.slot(slot)?;
        // SAFETY: as above, and the caller's tensor has the slot's type and shape and lies elsewhere.
        let fill = || unsafe { self.engine.fill(prepared, address as *const u8) };
        self.note(if *bytes < LONG_COPY { fill() } else { py.detach(fill) })
    }

    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let receipts = take(&mut *self.waiting());
        let mut failed = None;
        for (index, receipt) in receipts.iter().enumerate() {
            if let Err(interrupted) = wait(py, &self.engine, *receipt, None) {
                self.waiting().splice(..0, receipts[index..].iter().copied());
                return Err(interrupted);
            }
            if let Err(error) = self.engine.wait(*receipt) {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(()), |error| Err(collective(&error)))
    }

    #[pyo3(name = "waiting")]
    fn count(&self) -> usize {
        self.waiting().len()
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()?;
    module.add_class::<Operation>()?;
    module.add_class::<Memory>()?;
    module.add_class::<Slots>()
}
