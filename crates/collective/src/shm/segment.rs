//! One rank's segment: the board its neighbours watch, the cause of a failure, and staging buffers.
#![expect(unsafe_code, reason = "memory that another process writes cannot be a Rust reference")]

use super::{mapping::Mapping, protocol::Board};
use crate::{
    call::{Call, CallWords},
    error::Failure,
};
use rustix::{fd::OwnedFd, io};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Bytes of one staging buffer; the largest chunk that the copying algorithms use. Pages that are never used are never
/// there.
pub(crate) const STAGE_BYTES: usize = 4 << 20;

/// At the start of the mapping. All zeros is its initial state.
#[repr(C)]
struct Head {
    board: Board,
    /// The call that the line of each parity stands for, for the case that signatures differ.
    calls: [[AtomicU64; 4]; 2],
    heartbeat: AtomicU64,
    /// Not zero once the owner has dropped its group.
    left: AtomicU32,
    cause_len: AtomicU32,
    cause: [AtomicU8; Failure::MAX_BYTES],
}

const HEAD_BYTES: usize = 4096;
const _: () = assert!(size_of::<Head>() <= HEAD_BYTES);

/// A mapping with this layout: a rank's own, or a neighbour's.
#[derive(Debug)]
pub(crate) struct Segment {
    mapping: Mapping,
}

impl Segment {
    pub const BYTES: usize = HEAD_BYTES + 2 * STAGE_BYTES;

    pub fn create() -> io::Result<(OwnedFd, Self)> {
        Mapping::create("deuteron-segment", Self::BYTES).map(|(fd, mapping)| (fd, Self { mapping }))
    }

    pub fn of_neighbour(fd: &OwnedFd) -> io::Result<Self> {
        Mapping::of_neighbour(fd, Self::BYTES).map(|mapping| Self { mapping })
    }

    #[inline]
    fn head(&self) -> &Head {
        // SAFETY: the mapping is at least BYTES long and page aligned, lives as long as `self`, and every field
        // of Head is an atomic for which all bit patterns are valid.
        unsafe { &*self.mapping.base().cast::<Head>() }
    }

    #[inline]
    pub fn board(&self) -> &Board {
        &self.head().board
    }

    /// The staging buffer of a tick; who may touch it when is TICK-2.
    #[inline]
    pub fn stage(&self, tick: u32) -> *mut u8 {
        // SAFETY: two stages follow the head inside the mapping.
        unsafe { self.mapping.base().add(HEAD_BYTES + (tick & 1) as usize * STAGE_BYTES) }
    }

    /// Notes the call that the owner is about to publish.
    #[inline]
    pub fn set_call(&self, tick: u32, words: CallWords) {
        for (slot, word) in self.head().calls[(tick & 1) as usize].iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
    }

    /// The call that the owner has published, in words for a message.
    pub fn call(&self, tick: u32) -> String {
        let words = self.head().calls[(tick & 1) as usize].each_ref();
        Call::from_words(words.map(|word| word.load(Ordering::Relaxed)))
            .map_or_else(|| "something unreadable".to_owned(), |call| call.to_string())
    }

    pub fn beat(&self) {
        self.head().heartbeat.fetch_add(1, Ordering::Relaxed);
    }

    pub fn heartbeat(&self) -> u64 {
        self.head().heartbeat.load(Ordering::Relaxed)
    }

    pub fn leave(&self) {
        self.head().left.store(1, Ordering::Release);
        self.board().ring();
    }

    pub fn has_left(&self) -> bool {
        self.head().left.load(Ordering::Acquire) != 0
    }

    /// Written once by the owner before it poisons anyone.
    pub fn set_cause(&self, failure: &Failure) {
        let bytes = failure.encode();
        for (slot, byte) in self.head().cause.iter().zip(&bytes) {
            slot.store(*byte, Ordering::Relaxed);
        }
        self.head().cause_len.store(bytes.len() as u32, Ordering::Release);
    }

    pub fn cause(&self) -> Option<Failure> {
        let head = self.head();
        let len = (head.cause_len.load(Ordering::Acquire) as usize).min(Failure::MAX_BYTES);
        let bytes: Vec<u8> = head.cause[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        Failure::decode(&bytes)
    }
}
