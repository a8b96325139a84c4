//! Where a running process can be asked what its ranks wait for: by a signal, or by `deuteron report`.
//!
//! A process has one desk, opened with its first engine: a thread that sleeps until somebody asks. Only the user who
//! runs the process, or root, gets an answer.
#![expect(unsafe_code, reason = "a signal handler rings a bell, which is all that it may do")]

use super::Shared;
use crate::{process::Peer, shm::handover};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fd::{AsFd, OwnedFd},
    process::geteuid,
};
use std::{
    io::{self, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{Arc, Mutex, Once, OnceLock, PoisonError, Weak},
    time::Duration,
};

/// The abstract Unix socket of a process's desk is called this and its number.
pub const DESK: &str = "deuteron-report-";
/// The signal that makes a rank log what it waits for, unless the program uses it itself.
const SIGNAL: i32 = libc::SIGUSR2;
/// How long whoever asks may take to read the answer.
const READING_TIME: Duration = Duration::from_secs(1);

static ENGINES: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
static OPENED: Once = Once::new();
static BELL: OnceLock<OwnedFd> = OnceLock::new();

/// Makes an engine answer. What cannot be had (a name, a thread, the signal) is logged, and missed only when asked.
pub(super) fn register(engine: &Arc<Shared>) {
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    engines.retain(|known| known.strong_count() > 0);
    engines.push(Arc::downgrade(engine));
    drop(engines);
    OPENED.call_once(|| {
        if let Err(error) = open() {
            tracing::warn!("this process will not answer `deuteron report`: {error}");
        }
    });
}

fn open() -> io::Result<()> {
    let listener = handover::listen(&format!("{DESK}{}", std::process::id()))?;
    let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let bell: &'static OwnedFd = BELL.get_or_init(|| bell);
    if is_unused(SIGNAL) {
        let ring = move || {
            // It can only be full, and then it rings already.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        };
        // SAFETY: the handler only writes to a descriptor that is never closed.
        unsafe { signal_hook_registry::register(SIGNAL, ring)? };
    }
    std::thread::Builder::new()
        .name("deuteron-report".into())
        .spawn(move || serve(&listener, bell))?;
    Ok(())
}

/// Whether the program leaves a signal as it is.
fn is_unused(signal: i32) -> bool {
    // SAFETY: sigaction only writes the present action into memory of its type, for which zeros are valid.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_DFL
    }
}

fn serve(listener: &UnixListener, bell: &OwnedFd) {
    loop {
        let mut fds = [
            PollFd::new(bell, PollFlags::IN),
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
        ];
        let _ = poll(&mut fds, None);
        if rustix::io::read(bell, &mut [0; 8]).is_ok() {
            for (who, text) in reports() {
                tracing::warn!("{who}: {text}");
            }
        }
        if !fds[1].revents().is_empty()
            && let Ok((stream, _)) = listener.accept()
            && let Err(error) = answer(stream)
        {
            tracing::debug!("a report could not be given: {error}");
        }
    }
}

fn answer(mut stream: UnixStream) -> io::Result<()> {
    let Peer { user, .. } = Peer::of(&stream)?;
    if user != geteuid().as_raw() && user != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("user {user} asked")));
    }
    stream.set_write_timeout(Some(READING_TIME))?;
    for (who, text) in reports() {
        stream.write_all(format!("{who}\n{text}\0").as_bytes())?;
    }
    Ok(())
}

/// Of every engine of this process: whose it is, and its report.
fn reports() -> Vec<(String, String)> {
    let engines: Vec<Arc<Shared>> = ENGINES
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .iter()
        .filter_map(Weak::upgrade)
        .collect();
    let report = |engine: &Arc<Shared>| {
        let health = &engine.health;
        let (rank, host) = (health.name(health.rank), health.host(health.rank));
        let who = format!("rank {rank} on {host}, one of {}", health.hosts.len());
        (who, engine.report().unwrap_or_else(|error| error.to_string()))
    };
    engines.iter().map(report).collect()
}
