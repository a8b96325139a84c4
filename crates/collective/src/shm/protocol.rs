//! The order of things in shared memory: lines with sequence numbers, sleepers, poison.
//!
//! Every rank owns a [`Board`] that its peers on the host can read. Time runs in *ticks*: at tick `t` a rank
//! first writes what it has to say, then stores `t` into its line of parity `t & 1`, then waits until every
//! peer's line of that parity holds `t`.
//!
//! Invariants, which the code and `tests/loom.rs` cite:
//! - TICK-1: a rank publishes `t + 1` only after it has seen `t` from every peer. So a line never runs more
//!   than one tick ahead of a reader, and waiting for equality is enough.
//! - TICK-2: memory that belongs to parity `t & 1` is read by peers only between seeing `t` and publishing
//!   `t + 1`. So its owner may overwrite it once it has seen `t + 1` from every peer: two alternating buffers
//!   need no barrier at the end.
//! - WAKE-1: a waiter announces itself in `sleepers` and notes the `bell` before it looks a last time; whoever
//!   changes something (a line, poison) does so before it looks at `sleepers` and rings; a full fence stands
//!   between on both sides. So either the waiter sees the change, or the bell it noted has moved on and its
//!   sleep ends at once.
//! - POISON-1: what has been published counts even if its writer is dead: a waiter looks at the line first and
//!   at poison only when the line is not there yet.
//!
//! The file names its atomics and futex through `super`, so that the loom test can compile it over loom's.

use super::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use super::futex;

/// Payload words that travel in the line itself.
pub const INLINE_WORDS: usize = 5;

/// One cache line: the sequence number and what fits beside it.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Line {
    sequence: AtomicU32,
    /// Fingerprint of the call, equal on all ranks that agree.
    pub signature: AtomicU64,
    /// Where the caller's tensor lies if it is registered memory, else zero.
    pub location: AtomicU64,
    /// The tensor itself when it is tiny.
    pub inline: [AtomicU64; INLINE_WORDS],
}

/// What sleepers wait on, on a line of its own so that a publisher that nobody sleeps on keeps it in its cache.
#[derive(Default)]
#[repr(C, align(128))]
struct Bed {
    sleepers: AtomicU32,
    bell: AtomicU32,
}

/// The words of one rank that its peers watch.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Board {
    /// Written by the owner, one per parity.
    lines: [Line; 2],
    bed: Bed,
    /// Zero, or one more than the index of the member that ended the group. Written by anyone, once.
    poison: AtomicU32,
}

/// How long to try before sleeping.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Looks with a pause between them: for ranks that have a core each.
    pub spins: u32,
    /// Looks with a yield between them: for ranks that share cores.
    pub yields: u32,
}

impl Board {
    /// The line of a tick.
    #[inline]
    pub fn line(&self, tick: u32) -> &Line {
        &self.lines[(tick & 1) as usize]
    }

    /// Makes everything written before visible to whoever sees `tick`, and wakes sleepers.
    #[inline]
    pub fn publish(&self, tick: u32) {
        self.line(tick).sequence.store(tick, Ordering::Release);
        self.ring();
    }

    /// Wakes sleepers, so that they look again.
    #[inline]
    pub fn ring(&self) {
        fence(Ordering::SeqCst); // WAKE-1
        if self.bed.sleepers.load(Ordering::Relaxed) != 0 {
            self.bed.bell.fetch_add(1, Ordering::Relaxed);
            futex::wake(&self.bed.bell);
        }
    }

    /// True once the owner has published `tick`.
    #[inline]
    pub fn has(&self, tick: u32) -> bool {
        self.line(tick).sequence.load(Ordering::Acquire) == tick
    }

    /// Waits until the owner has published `tick`, or `check` says why to stop waiting.
    #[inline]
    pub fn wait<E>(
        &self,
        tick: u32,
        patience: Patience,
        mut check: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        for _ in 0..patience.spins {
            if self.has(tick) {
                return Ok(());
            }
            futex::pause();
        }
        for _ in 0..patience.yields {
            if self.has(tick) {
                return Ok(());
            }
            futex::yield_now();
        }
        self.sleep(tick, &mut check)
    }

    #[cold]
    fn sleep<E>(&self, tick: u32, check: &mut dyn FnMut() -> Result<(), E>) -> Result<(), E> {
        loop {
            self.bed.sleepers.fetch_add(1, Ordering::Relaxed);
            let noted = self.bed.bell.load(Ordering::Relaxed);
            fence(Ordering::SeqCst); // WAKE-1
            let verdict = if self.has(tick) { Ok(true) } else { check().map(|()| false) };
            if matches!(verdict, Ok(false)) {
                futex::wait(&self.bed.bell, noted);
            }
            self.bed.sleepers.fetch_sub(1, Ordering::Relaxed);
            match verdict {
                Ok(false) => {}
                Ok(true) => return Ok(()),
                // Published between the look and the verdict: it counts (POISON-1).
                Err(_) if self.has(tick) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Records that member `by` ended the group, unless somebody did before, and wakes the owner's waiters.
    pub fn set_poison(&self, by: usize) {
        let _ =
            self.poison.compare_exchange(0, by as u32 + 1, Ordering::Release, Ordering::Relaxed);
    }

    /// The member that ended the group; what it wrote before is visible.
    pub fn poison(&self) -> Option<usize> {
        match self.poison.load(Ordering::Acquire) {
            0 => None,
            by => Some(by as usize - 1),
        }
    }
}
