//! Sleeping and waking between processes: the non-private futex, with a time-out that makes poison visible.

use rustix::thread::futex::{Flags, Timespec};
use std::sync::atomic::AtomicU32;

/// The longest sleep: poison set between a waiter's look and its sleep is seen this much later.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Sleeps while `word` is `seen`, at most [`NAP`]. Spurious returns are fine.
pub fn wait(word: &AtomicU32, seen: u32) {
    // Every outcome (woken, changed, timed out, interrupted) means the same: look again.
    let _ = rustix::thread::futex::wait(word, Flags::empty(), seen, Some(&NAP));
}

/// Wakes everyone who sleeps on `word`.
pub fn wake(word: &AtomicU32) {
    let _ = rustix::thread::futex::wake(word, Flags::empty(), i32::MAX as u32);
}

#[inline]
pub fn pause() {
    std::hint::spin_loop();
}

#[inline]
pub fn yield_now() {
    std::thread::yield_now();
}
