//! The task that this process is, as Python sees it.

use crate::{
    engine::Engine,
    errors::{gang, invalid},
};
use deuteron_collective::{Group, GroupOptions};
use deuteron_gang as room;
use pyo3::{prelude::*, types::PyBytes};
use std::{
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

/// How long a wait lasts before the user's wish to interrupt it is seen.
pub(crate) const GLANCE: Duration = Duration::from_millis(100);

/// One device of a host.
#[pyclass(frozen, module = "deuteron._core")]
#[derive(Clone)]
pub(crate) struct Accelerator(room::Accelerator);

#[pymethods]
impl Accelerator {
    #[getter]
    fn kind(&self) -> &str {
        &self.0.kind
    }

    #[getter]
    fn model(&self) -> &str {
        &self.0.model
    }

    #[getter]
    fn index(&self) -> u32 {
        self.0.index
    }

    #[getter]
    fn uuid(&self) -> &str {
        &self.0.uuid
    }

    /// In bytes.
    #[getter]
    fn memory(&self) -> u64 {
        self.0.memory
    }

    fn __repr__(&self) -> String {
        format!("Accelerator(/{}, {:?}, index {})", self.0.kind, self.0.model, self.0.index)
    }
}

/// What every task of a gang may know about each.
#[pyclass(frozen, module = "deuteron._core")]
#[derive(Clone)]
pub(crate) struct TaskInfo(pub(crate) room::TaskInfo);

#[pymethods]
impl TaskInfo {
    #[getter]
    fn rank(&self) -> usize {
        self.0.rank
    }

    #[getter]
    fn local_rank(&self) -> usize {
        self.0.local_rank
    }

    #[getter]
    fn local_size(&self) -> usize {
        self.0.local_size
    }

    #[getter]
    fn cross_rank(&self) -> usize {
        self.0.cross_rank
    }

    #[getter]
    fn cross_size(&self) -> usize {
        self.0.cross_size
    }

    #[getter]
    fn host(&self) -> &str {
        &self.0.host
    }

    #[getter]
    fn address(&self) -> String {
        self.0.address.to_string()
    }

    #[getter]
    fn accelerators(&self) -> Vec<Accelerator> {
        self.0.accelerators.iter().cloned().map(Accelerator).collect()
    }

    fn __repr__(&self) -> String {
        format!(
            "TaskInfo(rank {}, host {:?}, address {})",
            self.0.rank, self.0.host, self.0.address
        )
    }
}

/// One member of a gang, seen from inside.
#[pyclass(frozen, module = "deuteron._core")]
pub(crate) struct Task {
    task: Arc<room::Task>,
    /// What groups of some ranks are made on; made when the first is.
    maker: Arc<Mutex<Option<Group>>>,
}

impl Task {
    fn new(task: room::Result<room::Task>) -> PyResult<Self> {
        let task = Arc::new(task.map_err(|error| gang(&error))?);
        Ok(Self { task, maker: Arc::default() })
    }

    fn gather(
        &self,
        py: Python<'_>,
        message: &[u8],
        timeout: Option<f64>,
    ) -> PyResult<Vec<Vec<u8>>> {
        let limit = timeout.map(limit).transpose()?;
        let (task, message) = (Arc::clone(&self.task), message.to_vec());
        interruptible(py, move || task.all_gather(&message, limit))?.map_err(|error| gang(&error))
    }
}

#[pymethods]
impl Task {
    /// The task that this process is, if an agent has started it.
    #[staticmethod]
    fn from_environment(py: Python<'_>) -> PyResult<Self> {
        Self::new(py.detach(room::Task::from_environment))
    }

    /// A gang of one, for a process that nobody has started as a task.
    #[staticmethod]
    fn alone() -> PyResult<Self> {
        Self::new(room::Task::alone())
    }

    #[getter]
    fn rank(&self) -> usize {
        self.task.rank()
    }

    #[getter]
    fn size(&self) -> usize {
        self.task.size()
    }

    #[getter]
    fn generation(&self) -> u64 {
        self.task.generation()
    }

    #[getter]
    fn infos(&self) -> Vec<TaskInfo> {
        self.task.infos().iter().cloned().map(TaskInfo).collect()
    }

    #[pyo3(signature = (timeout=None))]
    fn barrier(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.gather(py, &[], timeout).map(drop)
    }

    #[pyo3(signature = (message, timeout=None))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        message: &[u8],
        timeout: Option<f64>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let all = self.gather(py, message, timeout)?;
        Ok(all.iter().map(|message| PyBytes::new(py, message)).collect())
    }

    /// What whoever started the gang gives to every task.
    fn payload<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let task = Arc::clone(&self.task);
        let payload = interruptible(py, move || task.payload())?.map_err(|error| gang(&error))?;
        Ok(PyBytes::new(py, &payload))
    }

    fn set_result(&self, py: Python<'_>, result: &[u8]) -> PyResult<()> {
        py.detach(|| self.task.set_result(result)).map_err(|error| gang(&error))
    }

    fn set_failure(&self, py: Python<'_>, traceback: &str) -> PyResult<()> {
        py.detach(|| self.task.set_failure(traceback)).map_err(|error| gang(&error))
    }

    /// Connects all tasks for named operations; all call it the same number of times.
    fn engine(&self, py: Python<'_>) -> PyResult<Engine> {
        let task = Arc::clone(&self.task);
        let engine = interruptible(py, move || task.engine(GroupOptions::default()))?;
        Ok(Engine::new(engine.map_err(|error| gang(&error))?))
    }

    /// The same for some of the tasks; all call it, and those that are not among them get `None`.
    fn subengine(&self, py: Python<'_>, ranks: Vec<usize>) -> PyResult<Option<Engine>> {
        let (task, maker) = (Arc::clone(&self.task), Arc::clone(&self.maker));
        let made = interruptible(py, move || {
            let mut maker = maker.lock().unwrap_or_else(PoisonError::into_inner);
            let parent = match &mut *maker {
                Some(parent) => parent,
                none => none.insert(task.group(GroupOptions::default())?),
            };
            parent.subgroup(&ranks)?.map(|group| task.engine_on(group)).transpose()
        })?;
        Ok(made.map_err(|error: room::Error| gang(&error))?.map(Engine::new))
    }
}

/// A number of seconds that is one.
pub(crate) fn limit(seconds: f64) -> PyResult<Duration> {
    let wrong = |_| {
        invalid(format!("a time limit of {seconds} s: it must be a number that is not negative"))
    };
    Duration::try_from_secs_f64(seconds).map_err(wrong)
}

/// Waits for what another thread does, and lets the user interrupt that (GIL-1); then the thread goes on by itself.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (done, mut result) = mpsc::sync_channel(1);
    let builder = thread::Builder::new().name("deuteron-wait".into());
    let spawned = builder.spawn(move || drop(done.send(work())));
    spawned.map_err(|error| invalid(format!("no thread to wait on: {error}")))?;
    loop {
        let received;
        (result, received) = py.detach(move || {
            let received = result.recv_timeout(GLANCE);
            (result, received)
        });
        match received {
            Ok(value) => return Ok(value),
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(error) => return Err(invalid(format!("the waiting thread is gone: {error}"))),
        }
    }
}

/// The moment a number of seconds from now, if it can be told.
pub(crate) fn deadline(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let after = timeout.map(limit).transpose()?;
    Ok(after.and_then(|after| Instant::now().checked_add(after)))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Accelerator>()?;
    module.add_class::<TaskInfo>()?;
    module.add_class::<Task>()
}
