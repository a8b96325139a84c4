//! Sealed memfds and their mappings.
#![expect(unsafe_code, reason = "memory that another process writes cannot be a Rust reference")]

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{self, FallocateFlags, MemfdFlags, SealFlags},
    io,
    mm::{self, Advice, MapFlags, ProtFlags},
};
use std::ptr::NonNull;

/// A shared mapping of a whole memfd. Unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that stays where it is until dropped; who may touch which part when is
// the business of the protocol above it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// New zeroed memory, touched first by this process and sealed so that no holder of the descriptor can
    /// shrink it under a reader. Pages are reserved at once: a full memory is an error here, not a signal later.
    pub fn create(name: &str, len: usize) -> io::Result<(OwnedFd, Self)> {
        let fd = fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        fs::ftruncate(&fd, len as u64)?;
        fs::fcntl_add_seals(&fd, SealFlags::SHRINK)?;
        let mapping = Self::map(&fd, len)?;
        mapping.advise(Advice::LinuxHugepage);
        fs::fallocate(&fd, FallocateFlags::empty(), 0, len as u64)?;
        mapping.advise(Advice::LinuxPopulateWrite);
        Ok((fd, mapping))
    }

    /// A neighbour's memory, if it is as long as promised and cannot shrink.
    pub fn of_neighbour(fd: &OwnedFd, len: usize) -> io::Result<Self> {
        let size = fs::fstat(fd)?.st_size;
        if u64::try_from(size).unwrap_or(0) < len as u64
            || !fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK)
        {
            return Err(io::Errno::PERM);
        }
        let mapping = Self::map(fd, len)?;
        mapping.advise(Advice::LinuxPopulateWrite);
        Ok(mapping)
    }

    fn map(fd: impl AsFd, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let base =
            unsafe { mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) }?;
        NonNull::new(base.cast()).map(|base| Self { base, len }).ok_or(io::Errno::NOMEM)
    }

    /// Hints only: older kernels know neither, and nothing depends on them but speed.
    fn advise(&self, advice: Advice) {
        // SAFETY: the range is exactly this mapping, and both hints keep its content.
        let _ = unsafe { mm::madvise(self.base.as_ptr().cast(), self.len, advice) };
    }

    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is exactly this mapping, and whoever hands out its memory keeps it alive.
        let _ = unsafe { mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
