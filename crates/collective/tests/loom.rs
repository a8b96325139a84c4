//! Every interleaving of the shared-memory protocol, which x86 alone would never show, and of the engine's queue.
//!
//! Their own files are compiled here over loom's atomics and locks, a futex made of loom's condition variable, and a
//! bell made of the same.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]
#![expect(
    unsafe_code,
    reason = "loom's UnsafeCell hands out pointers, and checks every access through them"
)]

mod atomic {
    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

mod futex {
    use loom::sync::{Condvar, Mutex, atomic::AtomicU32, atomic::Ordering};

    // One bed for all words: a wake wakes everyone, who then look again, as after any futex wake.
    loom::lazy_static! {
        static ref BED: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    pub fn wait(word: &AtomicU32, seen: u32) {
        let guard = BED.0.lock().unwrap();
        // The kernel compares under the same lock that a wake takes.
        if word.load(Ordering::SeqCst) == seen {
            drop(BED.1.wait(guard).unwrap());
        }
    }

    pub fn wake(_: &AtomicU32) {
        let _guard = BED.0.lock().unwrap();
        BED.1.notify_all();
    }

    pub fn pause() {
        loom::thread::yield_now();
    }

    pub fn yield_now() {
        loom::thread::yield_now();
    }
}

#[path = "../src/shm/protocol.rs"]
mod protocol;
#[expect(dead_code, reason = "the engine uses more of it")]
#[path = "../src/engine/queue.rs"]
mod queue;

use loom::{
    cell::UnsafeCell,
    sync::{Arc, Condvar, Mutex},
    thread,
};
use protocol::{Board, Patience};
use queue::Queue;
use std::convert::Infallible;

/// Nobody spins: loom explores the sleeping path, which contains the others.
const ASLEEP: Patience = Patience { spins: 0, yields: 0 };

fn write(cell: &UnsafeCell<u32>, value: u32) {
    // SAFETY: loom fails the test if any other thread may access the cell at the same time.
    cell.with_mut(|slot| unsafe { *slot = value });
}

fn read(cell: &UnsafeCell<u32>) -> u32 {
    // SAFETY: loom fails the test if any other thread may write the cell at the same time.
    cell.with(|slot| unsafe { *slot })
}

/// Two ranks with a board and two payload buffers each.
#[derive(Default)]
struct Pair {
    boards: [Board; 2],
    buffers: [[UnsafeCell<u32>; 2]; 2],
}

impl Pair {
    /// One tick of rank `me`: write the buffer of this parity, publish, wait, read the peer's.
    fn tick(&self, me: usize, tick: u32) -> u32 {
        let parity = (tick & 1) as usize;
        // loom reports this write if the peer may still be reading the buffer (TICK-2).
        write(&self.buffers[me][parity], 10 * tick + me as u32);
        self.boards[me].line(tick).signature.store(u64::from(tick), atomic::Ordering::Relaxed);
        self.boards[me].publish(tick);
        let peer = 1 - me;
        let Ok(()) = self.boards[peer].wait(tick, ASLEEP, || Ok::<(), Infallible>(()));
        assert_eq!(
            self.boards[peer].line(tick).signature.load(atomic::Ordering::Relaxed),
            u64::from(tick)
        );
        read(&self.buffers[peer][parity])
    }
}

fn model(test: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_duration = Some(std::time::Duration::from_secs(120));
    builder.check(test);
}

/// Barrier, sequence lines and buffer reuse: the third tick writes the first one's buffer again.
#[test]
fn ticks_never_race_and_never_hang() {
    model(|| {
        let pair = Arc::new(Pair::default());
        let other = Arc::clone(&pair);
        let peer = thread::spawn(move || {
            for tick in 1..=3 {
                assert_eq!(other.tick(1, tick), 10 * tick);
            }
        });
        for tick in 1..=3 {
            assert_eq!(pair.tick(0, tick), 10 * tick + 1);
        }
        peer.join().unwrap();
    });
}

/// Poison wakes a waiter whose peer will never publish, and its cause is visible.
#[test]
fn poison_reaches_a_sleeper() {
    model(|| {
        let pair = Arc::new(Pair::default());
        let other = Arc::clone(&pair);
        let watcher = thread::spawn(move || {
            write(&other.buffers[1][0], 42);
            other.boards[0].set_poison(1);
            other.boards[1].ring();
        });
        let verdict = pair.boards[1].wait(1, ASLEEP, || match pair.boards[0].poison() {
            None => Ok(()),
            Some(by) => Err(by),
        });
        assert_eq!(verdict, Err(1));
        assert_eq!(read(&pair.buffers[1][0]), 42);
        watcher.join().unwrap();
    });
}

/// A rank that publishes and then dies has published: its peer gets the result, not the death.
#[test]
fn what_was_published_counts() {
    model(|| {
        let pair = Arc::new(Pair::default());
        let other = Arc::clone(&pair);
        let dying = thread::spawn(move || {
            other.boards[1].publish(1);
            other.boards[0].set_poison(1);
            other.boards[1].ring();
        });
        let verdict = pair.boards[1].wait(1, ASLEEP, || match pair.boards[0].poison() {
            None => Ok(()),
            Some(by) => Err(by),
        });
        assert_eq!(verdict, Ok(()));
        dying.join().unwrap();
    });
}

/// A bell that rings until somebody has heard it.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    heard: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.heard.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !std::mem::take(&mut *rung) {
            rung = self.heard.wait(rung).unwrap();
        }
    }
}

/// Nothing submitted is left lying while the thread sleeps (QUEUE-1).
#[test]
fn whoever_submits_wakes_the_thread() {
    model(|| {
        let shared = Arc::new((Mutex::new(Queue::default()), Bell::default()));
        let submitters: Vec<_> = (0..2u32)
            .map(|event| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let ring = shared.0.lock().unwrap().put(event);
                    if ring {
                        shared.1.ring();
                    }
                })
            })
            .collect();
        let (queue, bell) = &*shared;
        let (mut room, mut taken) = (Vec::new(), 0);
        loop {
            queue.lock().unwrap().take(&mut room);
            taken += room.len();
            if taken == 2 {
                break;
            }
            if queue.lock().unwrap().sleep() {
                bell.wait();
                queue.lock().unwrap().wake();
            }
        }
        for submitter in submitters {
            submitter.join().unwrap();
        }
    });
}
