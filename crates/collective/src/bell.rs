//! A bell that wakes a thread which waits for callers.

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fd::{AsFd, OwnedFd},
    time::Timespec,
};
use std::time::Duration;

pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub fn new() -> rustix::io::Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    pub fn ring(&self) {
        // It can only be full, and then it rings already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Stops ringing; whether it was.
    pub fn silence(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }

    /// Sleeps until it rings, somebody calls at `listener`, or the limit.
    pub fn wait(&self, listener: impl AsFd, limit: Duration) {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
        let limit =
            Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        // An interrupted sleep is a short one.
        let _ = poll(&mut fds, Some(&limit));
    }
}
