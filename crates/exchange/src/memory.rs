//! Memory of mini-batches, aligned and used again, and files as memory.
#![expect(unsafe_code, reason = "lines are bytes, parts of them have owners, and a file is mapped")]

use crate::{Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::{
    fs::File,
    ops::Range,
    ptr::{NonNull, null_mut, slice_from_raw_parts, slice_from_raw_parts_mut},
    sync::{Arc, Mutex, PoisonError},
};

/// Where a column may begin: what vector units and caches like.
pub(crate) const LINE: usize = 64;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// Bytes that begin at a multiple of 64. When nobody needs them any more, the next mini-batch gets them.
///
/// It keeps a pointer and no slice: whoever is given a part of it may write there while others have theirs.
pub(crate) struct Buffer {
    start: NonNull<Line>,
    lines: usize,
    pool: Arc<Pool>,
}

// SAFETY: it owns its memory as a box does.
unsafe impl Send for Buffer {}
// SAFETY: as above, and through a shared one nothing is written here.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A part of it, to be read or written as long as the buffer is there.
    pub(crate) fn pointer(&self, place: &Range<usize>) -> NonNull<[u8]> {
        assert!(place.start <= place.end && place.end <= self.lines * LINE);
        // SAFETY: it was just checked that it lies within.
        let start = unsafe { self.start.cast::<u8>().add(place.start) };
        NonNull::slice_from_raw_parts(start, place.len())
    }

    pub(crate) fn bytes(&self, place: &Range<usize>) -> &[u8] {
        // SAFETY: a line is 64 bytes without padding, and lines follow each other. Whoever writes through a pointer sees to
        // it that nobody looks at the same part meanwhile.
        unsafe { self.pointer(place).as_ref() }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and it is borrowed for as long.
        unsafe { self.pointer(&(0..self.lines * LINE)).as_mut() }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let lines = slice_from_raw_parts_mut(self.start.as_ptr(), self.lines);
        // SAFETY: it was such a box, and nobody has a part of it any more.
        let lines = unsafe { Box::from_raw(lines) };
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.pool.most {
            free.push(lines);
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
    free: Mutex<Vec<Box<[Line]>>>,
    most: usize,
}

impl Pool {
    /// Keeps at most so many buffers that nobody uses.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::new(Vec::new()), most })
    }

    /// At least so many bytes, with any content.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Buffer {
        let wanted = bytes.div_ceil(LINE);
        let used = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let lines = used.filter(|lines| lines.len() == wanted);
        let lines = lines.unwrap_or_else(|| vec![Line([0; LINE]); wanted].into());
        Buffer {
            start: NonNull::from(Box::leak(lines)).cast(),
            lines: wanted,
            pool: Arc::clone(self),
        }
    }
}

/// Memory of this process alone, zeroed when it is first looked at, and given back whole.
pub(crate) struct Region(Mapping);

impl Region {
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Ok(Self(Mapping { address: 0, bytes, _file: None }));
        }
        let (may, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping, wherever the system wants it.
        let mapped = unsafe { mmap_anonymous(null_mut(), bytes, may, flags) };
        let address =
            mapped.map_err(|error| Error::system("cannot have memory for rows", error))?;
        Ok(Self(Mapping { address: address as usize, bytes, _file: None }))
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.0.bytes == 0 {
            return &mut [];
        }
        let bytes = slice_from_raw_parts_mut(self.0.address as *mut u8, self.0.bytes);
        // SAFETY: mapped to be written for as long as `self`, and borrowed for as long.
        unsafe { &mut *bytes }
    }

    /// From now on it is only read.
    pub(crate) fn keep(self) -> Mapping {
        self.0
    }
}

/// Memory to be read, of a file or of a region. Of a file, what is not looked at costs nothing, and the system takes it
/// back when it needs room.
pub(crate) struct Mapping {
    address: usize,
    bytes: usize,
    /// Nobody else can open it, so that it stays as long as it is.
    _file: Option<File>,
}

impl Mapping {
    /// Maps the first `bytes` of a file that has no name and that nobody writes any more.
    pub(crate) fn new(file: File, bytes: usize, random: bool) -> Result<Self> {
        if bytes == 0 {
            return Ok(Self { address: 0, bytes, _file: Some(file) });
        }
        // SAFETY: a new mapping, wherever the system wants it.
        let mapped =
            unsafe { mmap(null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
        let address = mapped.map_err(|error| Error::system("cannot map a spool", error))?;
        // Without order, what lies beside a row is not needed. An advice that is refused costs speed only.
        let advice = if random { Advice::Random } else { Advice::Normal };
        // SAFETY: the range was mapped above; an advice changes no content.
        let _ = unsafe { madvise(address, bytes, advice) };
        Ok(Self { address: address as usize, bytes, _file: Some(file) })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        let bytes = slice_from_raw_parts(self.address as *const u8, self.bytes);
        // SAFETY: mapped for as long as `self`, and nobody writes to the file or region.
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
        let mut buffer = pool.take(100);
        let address = buffer.bytes_mut().as_ptr();
        assert!(buffer.bytes_mut().len() >= 100 && (address as usize).is_multiple_of(LINE));
        drop(buffer);
        assert_eq!(pool.take(100).bytes_mut().as_ptr(), address);
    }
}
