//! Memory that ranks of one host share: segments, their layout, and how descriptors reach the neighbours.

pub(crate) mod handover;
pub(crate) mod mapping;
pub(crate) mod protocol;
pub(crate) mod segment;

/// The atomics that [`protocol`] is written over; its loom test puts others here.
mod atomic {
    pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}
mod futex;
