//! Memory of mini-batches, aligned and used again, and files as memory.
#![expect(unsafe_code, reason = "lines are bytes, and a file is mapped")]

use crate::{Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::{
    fs::File,
    mem::take,
    ptr::{null_mut, slice_from_raw_parts, slice_from_raw_parts_mut},
    sync::{Arc, Mutex, PoisonError},
};

/// Where a column may begin: what vector units and caches like.
pub(crate) const LINE: usize = 64;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// Bytes that begin at a multiple of 64. When nobody needs them any more, the next mini-batch gets them.
pub struct Buffer {
    lines: Vec<Line>,
    pool: Arc<Pool>,
}

impl Buffer {
    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        let bytes = slice_from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * LINE);
        // SAFETY: a line is 64 bytes without padding, and lines follow each other.
        unsafe { &*bytes }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes =
            slice_from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * LINE);
        // SAFETY: as above, and it is borrowed for as long.
        unsafe { &mut *bytes }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.pool.most {
            free.push(take(&mut self.lines));
        }
    }
}

/// Asks for memory that will be looked at soon: without, every row drawn at random waits for its own.
pub(crate) fn ask_for(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every processor of this kind has the instruction, and it changes nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Memory that was a mini-batch and will be one again: pages that the system need not clear once more.
pub(crate) struct Pool {
    free: Mutex<Vec<Vec<Line>>>,
    most: usize,
}

impl Pool {
    /// Keeps at most so many buffers that nobody uses.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::new(Vec::new()), most })
    }

    /// At least so many bytes, with any content.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Buffer {
        let mut lines =
            self.free.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        lines.resize(bytes.div_ceil(LINE), Line([0; LINE]));
        Buffer { lines, pool: Arc::clone(self) }
    }
}

/// A file as memory, to be read. What is not looked at costs nothing, and the system takes it back when it needs room.
pub(crate) struct Mapping {
    address: usize,
    bytes: usize,
    /// Nobody else can open it, so that it stays as long as it is.
    _file: File,
}

impl Mapping {
    /// Maps the first `bytes` of a file that has no name and that nobody writes any more.
    pub(crate) fn new(file: File, bytes: usize, random: bool) -> Result<Self> {
        if bytes == 0 {
            return Ok(Self { address: 0, bytes, _file: file });
        }
        // SAFETY: a new mapping, wherever the system wants it.
        let mapped =
            unsafe { mmap(null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
        let address = mapped.map_err(|error| Error::system("cannot map a spool", error))?;
        // Without order, what lies beside a row is not needed. An advice that is refused costs speed only.
        let advice = if random { Advice::Random } else { Advice::Normal };
        // SAFETY: the range was mapped above; an advice changes no content.
        let _ = unsafe { madvise(address, bytes, advice) };
        Ok(Self { address: address as usize, bytes, _file: file })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        let bytes = slice_from_raw_parts(self.address as *const u8, self.bytes);
        // SAFETY: mapped for as long as `self`, and nobody writes to the file.
        unsafe { &*bytes }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: mapped by `new`, and every borrow of it has ended.
            let _ = unsafe { munmap(self.address as *mut _, self.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_used_again() {
        let pool = Pool::new(1);
        let buffer = pool.take(100);
        let address = buffer.bytes().as_ptr();
        assert!(buffer.bytes().len() >= 100 && (address as usize).is_multiple_of(LINE));
        drop(buffer);
        assert_eq!(pool.take(100).bytes().as_ptr(), address);
    }
}
