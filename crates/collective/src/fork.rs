//! What a forked child must not keep: connections that would make a dead rank look alive.
//!
//! A data-loader worker is a fork of its rank and inherits the rank's sockets. If the rank dies, its peers on
//! other hosts would never see the connections close. So every socket of a group is registered here, and the
//! child replaces it with `/dev/null`, keeping the number taken so that nothing else is closed by mistake.
#![expect(unsafe_code, reason = "the fork handler is C's")]

use rustix::fd::{AsRawFd, RawFd};
use std::sync::{
    Once,
    atomic::{AtomicI32, AtomicU32, Ordering},
};

/// Sockets beyond this many are not replaced; heartbeats notice their rank's death all the same, later.
const SLOTS: usize = 4096;
static SOCKETS: [AtomicI32; SLOTS] = [const { AtomicI32::new(-1) }; SLOTS];
static FORKS: AtomicU32 = AtomicU32::new(0);
static HANDLER: Once = Once::new();

/// How many forks lie between the first process and this one: a group of another count is not ours.
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: open, dup2 and close may be called between fork and exec, and the path is a C string.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        for slot in &SOCKETS {
            let fd = slot.swap(-1, Ordering::Relaxed);
            if fd >= 0 && null >= 0 {
                libc::dup2(null, fd);
            }
        }
        if null >= 0 {
            libc::close(null);
        }
    }
}

/// Makes forks count from now on.
pub(crate) fn watch() {
    // SAFETY: the handler only calls functions that are allowed in a forked child.
    HANDLER.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// A registered socket; taken off the list when dropped, which must happen before the socket closes.
#[derive(Debug)]
pub(crate) struct Registered(Option<&'static AtomicI32>);

impl Registered {
    pub fn new(socket: &impl AsRawFd) -> Self {
        watch();
        let fd: RawFd = socket.as_raw_fd();
        Self(SOCKETS.iter().find(|slot| {
            slot.compare_exchange(-1, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        }))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.store(-1, Ordering::Relaxed);
        }
    }
}
