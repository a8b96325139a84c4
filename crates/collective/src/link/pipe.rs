//! A link through shared memory: one ring of bytes in each direction, and a socket to wake a sleeping peer.
//!
//! - PIPE-1: `written` is stored only by the producer and `read` only by the consumer, each with release after
//!   it has touched the bytes, so the other side's acquire makes them its own.
//! - PIPE-2: a side that is about to poll says so, then looks again; the other side moves its counter, then looks
//!   whether anybody sleeps; a full fence stands between on both sides. So no wake-up is lost.
#![expect(unsafe_code, reason = "memory that another process writes cannot be a Rust reference")]

use super::{Link, not_now};
use crate::shm::mapping::Mapping;
use rustix::{
    event::PollFlags,
    fd::{AsFd, BorrowedFd, OwnedFd},
};
use std::{
    io::{self, IoSlice, Read, Write},
    os::unix::net::UnixStream,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

/// Bytes of one ring.
const RING: usize = 256 << 10;
const HEAD: usize = 512;
/// How often a side gets ready to sleep before it looks whether the peer is gone although nobody rang.
const LOOKS: u32 = 16;

/// How a side sleeps.
const AWAKE: u32 = 0;
const EAGER: u32 = 1;
const PATIENT: u32 = 2;

#[repr(C, align(128))]
struct Written {
    count: AtomicU64,
    closed: AtomicU32,
    sleeps: AtomicU32,
    /// How often the producer has rung the doorbell.
    rings: AtomicU32,
}

#[repr(C, align(128))]
struct Taken {
    count: AtomicU64,
    sleeps: AtomicU32,
}

#[repr(C)]
struct RingHead {
    written: Written,
    taken: Taken,
}

const _: () = assert!(size_of::<RingHead>() <= HEAD);

pub(crate) struct PipeLink {
    memory: Mapping,
    doorbell: UnixStream,
    /// 0 for the side that made the memory: it produces into the first ring.
    side: usize,
    ended: bool,
    /// Rings of the peer that have been heard.
    heard: u32,
    looks: u32,
    patient: bool,
}

impl PipeLink {
    const BYTES: usize = 2 * (HEAD + RING);

    /// This side's end, and what the other side needs for its own.
    pub fn create() -> io::Result<(Self, [OwnedFd; 2])> {
        let (fd, memory) = Mapping::create("deuteron-pipe", Self::BYTES)?;
        let (doorbell, theirs) = UnixStream::pair()?;
        doorbell.set_nonblocking(true)?;
        Ok((
            Self { memory, doorbell, side: 0, ended: false, heard: 0, looks: 0, patient: false },
            [fd, theirs.into()],
        ))
    }

    /// The other side's end.
    pub fn open([fd, doorbell]: [OwnedFd; 2]) -> io::Result<Self> {
        let memory = Mapping::of_neighbour(&fd, Self::BYTES)?;
        let doorbell = UnixStream::from(doorbell);
        doorbell.set_nonblocking(true)?;
        Ok(Self { memory, doorbell, side: 1, ended: false, heard: 0, looks: 0, patient: false })
    }

    fn half(&self, index: usize) -> (&RingHead, *mut u8) {
        let base = self.memory.base().wrapping_add(index * (HEAD + RING));
        // SAFETY: both rings lie inside the mapping, aligned to 512 bytes; the head is all atomics.
        (unsafe { &*base.cast() }, base.wrapping_add(HEAD))
    }

    fn outgoing(&self) -> (&RingHead, *mut u8) {
        self.half(self.side)
    }

    fn incoming(&self) -> (&RingHead, *mut u8) {
        self.half(1 - self.side)
    }

    /// Bytes in the ring, refusing counters that no honest peer writes.
    fn filled(head: &RingHead) -> io::Result<usize> {
        let taken = head.taken.count.load(Ordering::Acquire);
        let written = head.written.count.load(Ordering::Acquire);
        match usize::try_from(written.wrapping_sub(taken)) {
            Ok(filled) if filled <= RING => Ok(filled),
            _ => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "the ring's counters make no sense"))
            }
        }
    }

    /// Wakes a peer that sleeps; a patient one only if it is urgent. False if it sleeps on.
    fn wake(&self, sleeps: &AtomicU32, urgent: bool) -> bool {
        fence(Ordering::SeqCst); // PIPE-2
        match sleeps.load(Ordering::Relaxed) {
            AWAKE => true,
            PATIENT if !urgent => false,
            _ => {
                self.outgoing().0.written.rings.fetch_add(1, Ordering::Relaxed);
                // A full socket buffer holds wake-ups enough.
                let _ = (&self.doorbell).write(&[1]);
                true
            }
        }
    }

    /// Empties the doorbell; at its end the peer is gone. Most of the time nobody has rung, and nothing is read.
    fn drain(&mut self) {
        let rings = self.incoming().0.written.rings.load(Ordering::Relaxed);
        self.looks = self.looks.wrapping_add(1);
        if rings == self.heard && !self.looks.is_multiple_of(LOOKS) {
            return;
        }
        let mut bytes = [0; 64];
        while let Ok(read) = (&self.doorbell).read(&mut bytes) {
            self.heard = rings;
            if read == 0 {
                self.ended = true;
                break;
            }
        }
    }
}

/// Copies between a ring, from `position` on, and a plain buffer, in at most two pieces.
fn pieces(position: u64, len: usize) -> [(usize, usize, usize); 2] {
    let start = (position % RING as u64) as usize;
    let first = len.min(RING - start);
    [(start, 0, first), (0, first, len - first)]
}

impl Link for PipeLink {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let sent = self.send_quietly(parts)?;
        if sent > 0 {
            self.ring(true);
        }
        Ok(sent)
    }

    fn ring(&mut self, urgent: bool) -> bool {
        let head = self.outgoing().0;
        // Nobody needs to be woken for what has been read.
        Self::filled(head).is_ok_and(|left| left == 0) || self.wake(&head.taken.sleeps, urgent)
    }

    fn be_patient(&mut self, patient: bool) {
        self.patient = patient;
    }

    fn send_quietly(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let (head, bytes) = self.outgoing();
        head.written.sleeps.store(AWAKE, Ordering::Relaxed);
        let mut free = RING - Self::filled(head)?;
        let start = head.written.count.load(Ordering::Relaxed);
        let mut position = start;
        for part in parts {
            let len = part.len().min(free);
            for (at, from, len) in pieces(position, len) {
                // SAFETY: inside the ring, in bytes that the consumer has given back (PIPE-1).
                unsafe { std::ptr::copy_nonoverlapping(part[from..].as_ptr(), bytes.add(at), len) };
            }
            position += len as u64;
            free -= len;
        }
        if position != start {
            head.written.count.store(position, Ordering::Release);
        } else if self.ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok((position - start) as usize)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (head, bytes) = self.incoming();
        head.taken.sleeps.store(AWAKE, Ordering::Relaxed);
        // Looked at before the counter: what was written before the close is read first (LINK-3).
        let closed = head.written.closed.load(Ordering::Acquire) != 0;
        let len = Self::filled(head)?.min(buffer.len());
        if len == 0 {
            let over = (closed || self.ended) && !buffer.is_empty();
            return if over { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(0) };
        }
        let position = head.taken.count.load(Ordering::Relaxed);
        for (at, to, len) in pieces(position, len) {
            // SAFETY: inside the ring, in bytes that the producer has written (PIPE-1).
            unsafe { std::ptr::copy_nonoverlapping(bytes.add(at), buffer[to..].as_mut_ptr(), len) };
        }
        head.taken.count.store(position + len as u64, Ordering::Release);
        self.wake(&head.written.sleeps, true);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn interest(&mut self, receive: bool, send: bool) -> Option<(BorrowedFd<'_>, PollFlags)> {
        self.drain();
        let (incoming, outgoing) = (self.incoming().0, self.outgoing().0);
        let receives = if self.patient { PATIENT } else { EAGER };
        incoming.taken.sleeps.store(if receive { receives } else { AWAKE }, Ordering::Relaxed);
        outgoing.written.sleeps.store(if send { EAGER } else { AWAKE }, Ordering::Relaxed);
        fence(Ordering::SeqCst); // PIPE-2
        let readable = || {
            Self::filled(incoming).map_or(true, |filled| filled > 0)
                || incoming.written.closed.load(Ordering::Acquire) != 0
        };
        let writable = || Self::filled(outgoing).map_or(true, |filled| filled < RING);
        if self.ended || (receive && readable()) || (send && writable()) {
            return None;
        }
        Some((self.doorbell.as_fd(), PollFlags::IN))
    }
}

impl Drop for PipeLink {
    fn drop(&mut self) {
        let head = self.outgoing().0;
        head.written.closed.store(1, Ordering::Release);
        let _ = not_now((&self.doorbell).write(&[1]));
    }
}
