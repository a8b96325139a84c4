//! Links: a two-way stream of bytes to one peer that never blocks.
//!
//! Everything above is written against [`Link`]; one conformance suite runs over every implementation.

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod faults;
pub(crate) mod pipe;
pub(crate) mod tcp;
pub(crate) mod tls;

use rustix::{event::PollFlags, fd::BorrowedFd};
use std::io::{self, IoSlice};

/// A two-way stream of bytes to one peer.
///
/// - LINK-1: bytes arrive whole, once and in order, or the link fails.
/// - LINK-2: nothing blocks. "Not now" is zero bytes, never an error.
/// - LINK-3: after the peer has closed its end, what it sent before can still be read; then `UnexpectedEof`.
pub(crate) trait Link: Send {
    /// Takes as many of the bytes as fit now. They are on their way once [`Link::flush`] says so.
    fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// The same, but whoever sleeps at the other end need not be woken before [`Link::ring`].
    fn send_quietly(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send(parts)
    }

    /// Wakes whoever sleeps at the other end; not a patient one if it is not urgent. False if one sleeps on.
    fn ring(&mut self, _urgent: bool) -> bool {
        true
    }

    /// Says whether this end, when it sleeps, has to be woken by urgent things only.
    fn be_patient(&mut self, _patient: bool) {}

    /// Fills `buffer` with what has arrived and says how much.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Pushes out what `send` took; true when nothing is left.
    fn flush(&mut self) -> io::Result<bool>;

    /// What to poll before trying again: to receive, to send, or both. `None` means try at once.
    fn interest(&mut self, receive: bool, send: bool) -> Option<(BorrowedFd<'_>, PollFlags)>;
}

/// Maps "would block" and "interrupted" to zero, as LINK-2 asks.
fn not_now(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
        {
            Ok(0)
        }
        other => other,
    }
}

/// A read of zero bytes from a stream socket is its end.
fn read_or_end(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        other => not_now(other),
    }
}

fn directions(receive: bool, send: bool) -> PollFlags {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, receive);
    flags.set(PollFlags::OUT, send);
    flags
}
