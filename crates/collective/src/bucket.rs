//! Buckets: memory of the group that tensors live in and are reduced in, without a copy.
#![expect(unsafe_code, reason = "a bucket hands out memory that peers write during a call")]

use crate::{
    Element,
    error::{Error, Result},
    shm::mapping::Mapping,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    sync::{Arc, Weak},
};

/// A bucket's memory on every rank that this one shares memory with.
#[derive(Debug)]
pub(crate) struct BucketMemory {
    pub id: u32,
    own: Mapping,
    /// In rank order; `None` for this rank and for ranks that do not share memory.
    neighbours: Vec<Option<Mapping>>,
}

impl BucketMemory {
    pub fn new(id: u32, own: Mapping, neighbours: Vec<Option<Mapping>>) -> Self {
        Self { id, own, neighbours }
    }

    /// Where `offset` lies in the memory of `rank`.
    pub fn at(&self, rank: usize, offset: usize) -> *mut u8 {
        let mapping = self.neighbours.get(rank).and_then(Option::as_ref).unwrap_or(&self.own);
        mapping.base().wrapping_add(offset)
    }

    pub fn len(&self) -> usize {
        self.own.len()
    }
}

/// A tensor's place in registered memory, in one word: zero is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Location(u64);

impl Location {
    pub const PLAIN: Self = Self(0);
    const OFFSET_BITS: u32 = 40;

    /// A bucket beyond 2²⁴ or an offset beyond a tebibyte cannot be told, and is treated as plain memory.
    pub fn new(id: u32, offset: usize) -> Self {
        let (id, offset) = (u64::from(id) + 1, offset as u64);
        if id >> (64 - Self::OFFSET_BITS) != 0 || offset >> Self::OFFSET_BITS != 0 {
            return Self::PLAIN;
        }
        Self(id << Self::OFFSET_BITS | offset)
    }

    pub fn from_word(word: u64) -> Self {
        Self(word)
    }

    pub fn word(self) -> u64 {
        self.0
    }

    pub fn is_registered(self) -> bool {
        self != Self::PLAIN
    }

    pub fn offset(self) -> usize {
        (self.0 & ((1 << Self::OFFSET_BITS) - 1)) as usize
    }

    pub fn id(self) -> u32 {
        (self.0 >> Self::OFFSET_BITS).saturating_sub(1) as u32
    }

    /// Whether `next` is where `bytes` from here end, in the same bucket.
    pub fn is_followed_by(self, bytes: u64, next: Self) -> bool {
        self.id() == next.id() && self.0 + bytes == next.0
    }
}

/// The buckets of a group, by address.
#[derive(Default)]
pub(crate) struct Buckets {
    by_address: BTreeMap<usize, Weak<BucketMemory>>,
    made: u32,
}

impl Buckets {
    pub fn next_id(&mut self) -> u32 {
        self.made += 1;
        self.made - 1
    }

    pub fn add(&mut self, memory: &Arc<BucketMemory>) {
        self.by_address.retain(|_, known| known.strong_count() > 0);
        self.by_address.insert(memory.own.base() as usize, Arc::downgrade(memory));
    }

    /// Where `bytes` at `start` lie, if they lie in one bucket.
    pub fn locate(&self, start: *const u8, bytes: usize) -> Location {
        let found = self.by_address.range(..=start as usize).next_back();
        let Some((base, memory)) = found.and_then(|(base, known)| Some((base, known.upgrade()?)))
        else {
            return Location::PLAIN;
        };
        let offset = start as usize - base;
        if offset + bytes > memory.len() {
            return Location::PLAIN;
        }
        Location::new(memory.id, offset)
    }

    pub fn get(&self, id: u32) -> Option<Arc<BucketMemory>> {
        self.by_address.values().filter_map(Weak::upgrade).find(|memory| memory.id == id)
    }
}

/// Where the tensor of a call lies, and the buckets it may lie in.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub location: Location,
    pub buckets: &'a Buckets,
}

/// Elements in memory of the group, the same number on every rank. Use it as a slice.
///
/// Its memory stays valid after the group has ended, for as long as the bucket lives.
///
/// ```
/// # use deuteron_collective::{Group, GroupOptions, LocalRendezvous, ReduceOp};
/// # let rendezvous = LocalRendezvous::group(1).remove(0);
/// let group = Group::connect(&rendezvous, GroupOptions::default())?;
/// let mut gradients = group.bucket::<f32>(1000)?;
/// gradients.fill(1.0);
/// group.all_reduce(&mut gradients, ReduceOp::Mean)?; // in place, nothing is copied
/// # Ok::<(), deuteron_collective::Error>(())
/// ```
pub struct Bucket<T> {
    memory: Arc<BucketMemory>,
    /// The first element's place in the memory.
    start: usize,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Bucket<T> {
    /// `memory` is zeroed, holds `len` elements, and no other bucket is made of it.
    pub(crate) fn new(memory: Arc<BucketMemory>, len: usize) -> Self {
        Self { memory, start: 0, len, element: PhantomData }
    }

    fn base(&self) -> *mut T {
        self.memory.own.base().cast::<T>().wrapping_add(self.start)
    }

    /// Divides it into tensors of these lengths, side by side in the same memory. What is left over is given up.
    ///
    /// ```
    /// # use deuteron_collective::{Group, GroupOptions, LocalRendezvous, ReduceOp};
    /// # let rendezvous = LocalRendezvous::group(1).remove(0);
    /// let group = Group::connect(&rendezvous, GroupOptions::default())?;
    /// let [weights, bias] = group.bucket::<f32>(110)?.split([100, 10])?;
    /// assert_eq!((weights.len(), bias.len()), (100, 10));
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn split<const N: usize>(self, lengths: [usize; N]) -> Result<[Self; N]> {
        let parts = self.split_all(&lengths)?;
        <[Self; N]>::try_from(parts).map_err(|_| Error::Invalid("parts are missing".into()))
    }

    /// The same for a number of lengths that is not known beforehand.
    pub fn split_all(self, lengths: &[usize]) -> Result<Vec<Self>> {
        let wanted = lengths.iter().fold(0usize, |all, length| all.saturating_add(*length));
        if wanted > self.len {
            return Err(Error::Invalid(format!(
                "tensors of {wanted} elements together do not fit into a bucket of {}",
                self.len
            )));
        }
        let mut start = self.start;
        let part = |len: &usize| {
            let (memory, at) = (Arc::clone(&self.memory), start);
            start += len;
            Self { memory, start: at, len: *len, element: PhantomData }
        };
        Ok(lengths.iter().map(part).collect())
    }
}

impl<T: Element> Deref for Bucket<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping is page aligned, holds `start + len` elements, was zeroed at the start and is written by
        // peers only during a call that holds it mutably.
        unsafe { std::slice::from_raw_parts(self.base(), self.len) }
    }
}

impl<T: Element> DerefMut for Bucket<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.len) }
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Bucket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&&**self).finish()
    }
}
