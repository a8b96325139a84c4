//! Jobs that Python starts: a function on processes of this machine.
//!
//! The supervisor and what shows its events run on threads of their own (GIL-2). What is to be shown waits in memory, as
//! much as [`ROOM`], until Python takes it: a program that does not look makes its tasks wait, not its memory grow.

use crate::{
    errors::{gang, invalid},
    task::{GLANCE, limit},
};
use deuteron_cli::embedded::{self, Screen};
use deuteron_gang::{
    Error, Outcome, Result, Stream,
    supervisor::{self, Control},
};
use pyo3::{prelude::*, types::PyBytes};
use std::{
    collections::VecDeque,
    ffi::OsString,
    io::{self, Write},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Bytes that may wait for Python to show them.
const ROOM: usize = 4 << 20;

/// A job on its way.
#[pyclass(frozen, module = "deuteron._core")]
struct Job {
    /// A child made by `fork` has no threads that do anything.
    process: u32,
    control: Control,
    show: Arc<Mutex<embedded::Show>>,
    shown: Arc<Shown>,
    running: Mutex<Option<JoinHandle<Result<Outcome>>>>,
    invitations: Mutex<mpsc::Receiver<(usize, String)>>,
}

/// What Python is to show.
#[derive(Default)]
struct Shown {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    pieces: VecDeque<(Stream, Vec<u8>)>,
    bytes: usize,
    /// Nothing more comes.
    over: bool,
    /// Nobody takes anything any more.
    left: bool,
}

impl Shown {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is room for more.
    fn wait_for_room(&self) {
        let full = |state: &mut State| state.bytes > ROOM && !state.left;
        drop(self.changed.wait_while(self.lock(), full));
    }

    fn is_over_within(&self, time: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), time, |state| !state.over);
        waited.unwrap_or_else(PoisonError::into_inner).0.over
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

/// One of the two streams, for the printer.
struct Surface(Stream, Arc<Shown>);

impl Write for Surface {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.set(|state| {
            if !state.left {
                state.bytes += bytes.len();
                state.pieces.push_back((self.0, bytes.to_vec()));
            }
        });
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What to show, and whether it goes to standard error.
type Piece<'py> = (bool, Bound<'py, PyBytes>);

#[pymethods]
impl Job {
    /// Starts what `settings`, the words of `deuteron run`, ask for: `command` in every task, with `payload` for all.
    /// With `invited`, the number of the first attempt, agents come by themselves: see `invitation`.
    #[new]
    #[pyo3(signature = (settings, command, agent, payload, stdout_is_terminal=false, stderr_width=None, invited=None))]
    fn new(
        settings: Vec<OsString>,
        command: Vec<OsString>,
        agent: Vec<OsString>,
        payload: &[u8],
        stdout_is_terminal: bool,
        stderr_width: Option<usize>,
        invited: Option<u64>,
    ) -> PyResult<Self> {
        let shown = Arc::<Shown>::default();
        let screen = Screen {
            stdout: Box::new(Surface(Stream::Stdout, Arc::clone(&shown))),
            stderr: Box::new(Surface(Stream::Stderr, Arc::clone(&shown))),
            stdout_is_terminal,
            stderr_width,
            starter: invited.map(|_| "Spark"),
        };
        let (mut job, show) = embedded::job(agent, &settings, &command, screen).map_err(invalid)?;
        job.payload = payload.into();
        job.first_generation = invited.unwrap_or_default();
        let (invite, invitations) = mpsc::channel();
        if invited.is_some() {
            job.hosts = deuteron_gang::Job::invited(job.tasks, [""]).hosts;
        }
        let (control, show) = (Control::default(), Arc::new(Mutex::new(show)));
        let (reins, printer, way, end) =
            (control.clone(), Arc::clone(&show), Arc::clone(&shown), Arc::clone(&shown));
        let supervise = move || {
            let sink = move |event| {
                way.wait_for_room();
                printer.lock().unwrap_or_else(PoisonError::into_inner).event(event);
            };
            let outcome = match invited.is_some() {
                true => {
                    let tell = move |agent, line| drop(invite.send((agent, line)));
                    supervisor::run_invited(job, &reins, tell, sink)
                }
                false => supervisor::run(job, &reins, sink),
            };
            end.set(|state| state.over = true);
            outcome
        };
        let running = thread::Builder::new()
            .name("deuteron-supervisor".into())
            .spawn(supervise)
            .map_err(|error| invalid(format!("no thread to supervise the job: {error}")))?;
        let (running, invitations) = (Mutex::new(Some(running)), Mutex::new(invitations));
        Ok(Self { process: std::process::id(), control, show, shown, running, invitations })
    }

    /// The next agent that is wanted, by its number, and the line that it has to find on its standard input, which then
    /// stays open. It is the key to the job. `None` after a while without one, or when the job is over.
    fn invitation(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<(usize, String)>> {
        let limit = limit(timeout)?;
        Ok(py.detach(|| {
            let invitations = self.invitations.lock().unwrap_or_else(PoisonError::into_inner);
            invitations.recv_timeout(limit).ok()
        }))
    }

    /// What is to be shown: as soon as there is something, or after a while nothing. `None` when the job is over.
    fn output<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Option<Vec<Piece<'py>>>> {
        if self.process != std::process::id() {
            return Err(invalid("this job belongs to the process that has started it"));
        }
        let until = Instant::now() + limit(timeout)?;
        let (over, pieces) = py.detach(|| {
            let mut state = self.shown.lock();
            loop {
                let left = until.saturating_duration_since(Instant::now());
                if state.over || !state.pieces.is_empty() || left.is_zero() {
                    state.bytes = 0;
                    let pieces = std::mem::take(&mut state.pieces);
                    let over = state.over && pieces.is_empty();
                    drop(state);
                    self.shown.changed.notify_all();
                    return (over, pieces);
                }
                let waited = self.shown.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        });
        if over {
            return Ok(None);
        }
        if pieces.is_empty()
            && let Ok(mut show) = self.show.try_lock()
        {
            show.tick();
        }
        let piece =
            |(stream, text): (Stream, Vec<u8>)| (stream == Stream::Stderr, PyBytes::new(py, &text));
        Ok(Some(pieces.into_iter().map(piece).collect()))
    }

    /// Ends the job: tasks are told, have their grace, and are killed.
    fn end(&self, reason: &str) {
        self.control.end(reason);
    }

    /// Says something among what is shown.
    fn note(&self, py: Python<'_>, text: &str) {
        py.detach(|| self.show.lock().unwrap_or_else(PoisonError::into_inner).note(text));
    }

    /// Waits for the end, and returns what each rank has returned, once; raises why it failed.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Vec<Option<Bound<'py, PyBytes>>>> {
        // Whoever waits for the end shows nothing any more, and tasks must not wait for that.
        self.shown.set(|state| state.left = true);
        while !py.detach(|| self.shown.is_over_within(GLANCE)) {
            py.check_signals()?;
        }
        let outcome = py.detach(|| {
            let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
            running.map(JoinHandle::join)
        });
        let outcome = match outcome {
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(Error::Invalid("the supervisor of the job panicked".into())),
            None => Err(Error::Invalid("this job has been finished already".into())),
        };
        let results = outcome.map_err(|error| gang(&error))?.results;
        // One after the other, so that not all are held twice.
        Ok(results.into_iter().map(|result| Some(PyBytes::new(py, &result?))).collect())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Whoever held a lock when this child was forked does not run here.
        if self.process != std::process::id() {
            return;
        }
        self.control.end("its owner, which has dropped it");
        self.shown.set(|state| {
            state.left = true;
            state.pieces.clear();
        });
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Job>()
}
