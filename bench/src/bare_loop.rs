//! The limit inside a host: each rank sums its slice of all buffers and writes it to all, with nothing else.
//!
//! Memory is one memfd that `run.py` makes and every rank inherits: 2 MiB for the barrier and the clocks,
//! then one buffer a rank. Only the barriers around the timed part synchronise.
#![expect(unsafe_code, reason = "memory shared by processes, and loops compiled for one processor")]

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::sched_yield;

use crate::measure::{Block, Contestant, Failure, Job, Mode, Number, measure};

const HEADER: usize = ALIGNMENT;
const ALIGNMENT: usize = 1 << 21;
const RANKS: usize = 16;
// Elements summed at once: four registers of 512 bits, enough to hide the latency of an addition.
const LANES: usize = 64;
const CACHE_LINE: usize = 64;
const SPINS: u32 = 10_000;
const LIMIT: Duration = Duration::from_secs(60);

/// Maps the memory and measures every block.
pub fn run(job: &Job) -> Result<(), Failure> {
    let stride = job.largest().next_multiple_of(ALIGNMENT);
    let shared = Shared::map(job.meeting.parse()?, HEADER + job.ranks * stride)?;
    let crowded = std::thread::available_parallelism()?.get() < job.ranks;
    job.run(&mut BareLoop { shared, stride, round: 0, crowded })
}

/// The barrier and the clocks of all ranks.
#[repr(C)]
struct Header {
    arrived: AtomicU64,
    start: [AtomicU64; RANKS],
    end: [AtomicU64; RANKS],
}

struct Shared {
    memory: NonNull<u8>,
    bytes: usize,
}

impl Shared {
    fn map(descriptor: i32, bytes: usize) -> Result<Self, Failure> {
        // SAFETY: the descriptor was inherited and stays open as long as the process runs.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address the kernel chooses disturbs no other memory.
        let memory =
            unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0)? };
        Ok(Self { memory: NonNull::new(memory.cast()).ok_or("mapped at zero")?, bytes })
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is page-aligned, longer than the header, zeroed, and only atomics live there.
        unsafe { self.memory.cast().as_ref() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nothing borrowed from it outlives it. An error
        // would only leave the mapping until the process ends.
        let _ = unsafe { munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}

struct BareLoop {
    shared: Shared,
    stride: usize,
    round: u64,
    crowded: bool,
}

impl Mode for BareLoop {
    fn measure<T: Number>(&mut self, job: &Job, block: &Block) -> Result<Vec<u64>, Failure> {
        let count = block.count::<T>();
        let buffers = (0..job.ranks)
            // SAFETY: `run` mapped the header and a stride for each rank.
            .map(|rank| unsafe {
                self.shared.memory.add(HEADER + rank * self.stride).cast::<T>().as_ptr()
            })
            .collect();
        measure(job, block, &mut Loop { mode: self, rank: job.rank, buffers, count })
    }
}

struct Loop<'a, T> {
    mode: &'a mut BareLoop,
    rank: usize,
    buffers: Vec<*mut T>,
    count: usize,
}

impl<T> Loop<'_, T> {
    fn wait_for_all(&mut self) -> Result<(), Failure> {
        self.mode.round += self.buffers.len() as u64;
        let arrived = &self.mode.shared.header().arrived;
        arrived.fetch_add(1, Ordering::AcqRel);
        let (mut spins, mut since) = (0, None);
        while arrived.load(Ordering::Acquire) < self.mode.round {
            // Ranks may share a core even where there is one for each.
            if self.mode.crowded || spins > SPINS {
                sched_yield();
                if since.get_or_insert_with(Instant::now).elapsed() > LIMIT {
                    return Err("another rank has not come".into());
                }
            }
            spins += 1;
            std::hint::spin_loop();
        }
        Ok(())
    }
}

impl<T: Number> Contestant<T> for Loop<'_, T> {
    fn input(&mut self) -> &mut [T] {
        // SAFETY: the buffer is `count` elements of the mapping, and between the last barrier of a call
        // and the first of the next only its own rank touches it.
        unsafe { std::slice::from_raw_parts_mut(self.buffers[self.rank], self.count) }
    }
    fn output(&self) -> &[T] {
        // SAFETY: as for `input`.
        unsafe { std::slice::from_raw_parts(self.buffers[self.rank], self.count) }
    }
    fn summed(&self) -> Range<usize> {
        0..self.buffers.len()
    }
    fn barrier(&mut self) -> Result<(), Failure> {
        self.wait_for_all()
    }
    fn call(&mut self) -> Result<(), Failure> {
        // Slices begin on cache lines, so that no two ranks write to the same one.
        let line = CACHE_LINE / size_of::<T>();
        let border = |rank: usize| {
            (self.count * rank / self.buffers.len()).next_multiple_of(line).min(self.count)
        };
        // SAFETY: all buffers have `count` elements, and every rank has its own slice of all of them.
        unsafe { sum_slice(&self.buffers, border(self.rank)..border(self.rank + 1)) };
        Ok(())
    }
    /// From the first start to the last end: ranks that share a core do not run at the same time, and
    /// nothing in the timed part makes one wait for another.
    fn elapsed(&mut self, start: u64, end: u64) -> Result<u64, Failure> {
        let header = self.mode.shared.header();
        header.start[self.rank].store(start, Ordering::Relaxed);
        header.end[self.rank].store(end, Ordering::Relaxed);
        self.wait_for_all()?;
        let header = self.mode.shared.header();
        let of = |clocks: &[AtomicU64]| -> Vec<u64> {
            clocks[..self.buffers.len()].iter().map(|clock| clock.load(Ordering::Relaxed)).collect()
        };
        let (starts, ends) = (of(&header.start), of(&header.end));
        let first = starts.iter().min().ok_or("no ranks")?;
        let last = ends.iter().max().ok_or("no ranks")?;
        Ok(last - first)
    }
}

/// Sums the slice of all buffers and writes it to all, with the widest registers there are.
///
/// # Safety
/// Every pointer is valid for reads and writes of the slice, and nothing else touches the slice meanwhile.
unsafe fn sum_slice<T: Number>(buffers: &[*mut T], slice: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
            // SAFETY: as the caller promises, and the processor has the features.
            return unsafe { sum_slice_avx512(buffers, slice) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as the caller promises, and the processor has the feature.
            return unsafe { sum_slice_avx2(buffers, slice) };
        }
    }
    // SAFETY: as the caller promises.
    unsafe { sum_slice_of_any(buffers, slice) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn sum_slice_avx512<T: Number>(buffers: &[*mut T], slice: Range<usize>) {
    // SAFETY: as the caller promises.
    unsafe { sum_slice_of_any(buffers, slice) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_slice_avx2<T: Number>(buffers: &[*mut T], slice: Range<usize>) {
    // SAFETY: as the caller promises.
    unsafe { sum_slice_of_any(buffers, slice) }
}

#[inline(always)]
unsafe fn sum_slice_of_any<T: Number>(buffers: &[*mut T], slice: Range<usize>) {
    let whole = slice.start + slice.len() / LANES * LANES;
    for at in (slice.start..whole).step_by(LANES) {
        // SAFETY: as the caller promises; the lanes lie inside the slice.
        unsafe { sum_lanes::<T, LANES>(buffers, at) };
    }
    for at in whole..slice.end {
        // SAFETY: as the caller promises.
        unsafe { sum_lanes::<T, 1>(buffers, at) };
    }
}

#[inline(always)]
unsafe fn sum_lanes<T: Number, const N: usize>(buffers: &[*mut T], at: usize) {
    let mut sum = [0.0f32; N];
    for buffer in buffers {
        // SAFETY: as the caller promises; the buffers are aligned to pages and `at` to elements.
        let lanes: [T; N] = unsafe { buffer.add(at).cast::<[T; N]>().read() };
        for (sum, lane) in sum.iter_mut().zip(lanes) {
            *sum += lane.widen();
        }
    }
    let result: [T; N] = sum.map(T::narrow);
    for buffer in buffers {
        // SAFETY: as above.
        unsafe { buffer.add(at).cast::<[T; N]>().write(result) };
    }
}
