//! What one message carries: ranges of a tensor that go out, ranges that come in, and which waits for which.
//!
//! - FLOW-1: only bytes inside the ranges of a flow are touched, of this rank's tensor and of its neighbours'.
#![expect(unsafe_code, reason = "calls the reduction kernels, also on memory of other processes")]

use crate::{
    DType, ReduceOp,
    kernel::{self, Steps},
};
use std::{marker::PhantomData, ops::Range};

/// A cache line of scratch memory: the kernel copies to the start of one up to twice as fast as to elsewhere.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
#[expect(dead_code, reason = "used as bytes")]
pub(super) struct Line([u64; 8]);

/// Bytes received at a time when they are to be combined: small enough to stay in the cache.
pub(super) const SEGMENT: usize = 512 << 10;

/// Bytes that are combined inside the host at a time, just before they go out.
const PREPARED: usize = 256 << 10;

/// Where incoming bytes go.
#[derive(Clone, Copy, Debug)]
pub(super) enum Landing {
    /// Into the tensor.
    Store,
    /// Combined with the tensor, as they arrive.
    Combine(Steps),
    /// The same, and what comes out is the result.
    Finish(Steps),
    /// Beside the tensor, because the same range is on its way out.
    Aside,
}

/// One direction's ranges (in bytes) and how far they have come.
struct Track<R> {
    ranges: Vec<R>,
    index: usize,
    offset: usize,
}

impl<R> Track<R> {
    fn new(ranges: Vec<R>) -> Self {
        Self { ranges, index: 0, offset: 0 }
    }

    fn advance(&mut self, by: usize, range: impl Fn(&R) -> &Range<usize>) {
        self.offset += by;
        while self.ranges.get(self.index).is_some_and(|current| range(current).len() <= self.offset)
        {
            self.offset -= range(&self.ranges[self.index]).len();
            self.index += 1;
        }
    }
}

/// The tensors of all ranks of a host, of which this rank carries the flow's ranges between hosts: what goes out and
/// what arrives is combined with everybody's, and results go to everybody.
pub(crate) struct Inside {
    /// The start of each rank's tensor, or of the memory that its chunks are staged in.
    pub tensors: Vec<*mut u8>,
    /// Which of them is the flow's own tensor.
    pub me: usize,
    /// The others are staged.
    pub staged: Option<Slots>,
    /// Factor on every rank's elements.
    pub prescale: f64,
}

/// Where chunks lie in memory that holds a few of them at a time.
#[derive(Clone, Copy)]
pub(crate) struct Slots {
    /// Bytes of a chunk in the tensor.
    pub chunk: usize,
    /// Bytes of a slot.
    pub bytes: usize,
    /// How many there are.
    pub count: usize,
    /// That of the first chunk.
    pub first: usize,
}

impl Slots {
    /// Where a chunk's slot starts.
    pub fn start(&self, chunk: usize) -> usize {
        (self.first + chunk) % self.count * self.bytes
    }
}

impl Inside {
    /// Where the byte at `offset`, which is of a chunk, is in each rank's memory.
    pub fn at(&self, chunk: usize, offset: usize) -> impl Iterator<Item = *mut u8> + Clone {
        let staged = self.staged.map(|slots| slots.start(chunk) + offset - chunk * slots.chunk);
        self.tensors.iter().enumerate().map(move |(member, tensor)| {
            let offset = staged.filter(|_| member != self.me).unwrap_or(offset);
            tensor.wrapping_add(offset)
        })
    }
}

/// A message in each direction over one tensor.
pub(super) struct Flow<'a> {
    start: *mut u8,
    tensor: PhantomData<&'a mut [u8]>,
    /// Where outgoing ranges lie, if not in the tensor.
    source: Option<&'a [u8]>,
    dtype: DType,
    out: Track<Range<usize>>,
    into: Track<(Range<usize>, Landing)>,
    /// The k-th outgoing range is sent as the one `lag` before it in the other direction comes in.
    lag: Option<usize>,
    /// That many ranges belong together: the first ones of each round wait for nothing.
    round: usize,
    /// That many ranges of each direction may be touched yet.
    open: usize,
    /// That many have to have come and gone before it pauses.
    due: usize,
    inside: Option<Inside>,
    /// Bytes of the outgoing range that have been combined inside.
    prepared: usize,
    /// Received, not yet combined; or everything that lands aside.
    scratch: &'a mut Vec<Line>,
    held: usize,
}

impl<'a> Flow<'a> {
    pub fn new(
        tensor: &'a mut [u8],
        dtype: DType,
        out: Vec<Range<usize>>,
        into: Vec<(Range<usize>, Landing)>,
        lag: Option<usize>,
        scratch: &'a mut Vec<Line>,
    ) -> Self {
        let whole = |range: &Range<usize>| range.end <= tensor.len();
        debug_assert!(into.iter().all(|(range, _)| whole(range)));
        let round = out.len().max(1);
        // SAFETY: the tensor is borrowed mutably and holds all ranges.
        unsafe { Self::over(tensor.as_mut_ptr(), dtype, out, into, lag, round, None, scratch) }
    }

    /// # Safety
    /// As long as the flow lives, `start`, and each of the tensors inside, is valid for reads and writes of the ranges
    /// that are open, aligned for the type, and nobody else uses these ranges.
    #[expect(clippy::too_many_arguments, reason = "a message has two directions and a tensor")]
    pub unsafe fn over(
        start: *mut u8,
        dtype: DType,
        out: Vec<Range<usize>>,
        into: Vec<(Range<usize>, Landing)>,
        lag: Option<usize>,
        round: usize,
        inside: Option<Inside>,
        scratch: &'a mut Vec<Line>,
    ) -> Self {
        let room = |(range, landing): &(Range<usize>, Landing)| match landing {
            Landing::Store => 0,
            Landing::Combine(_) | Landing::Finish(_) => range.len().min(SEGMENT),
            Landing::Aside => range.len(),
        };
        grow(scratch, into.iter().map(room).max().unwrap_or(0));
        let mut flow = Self {
            start,
            tensor: PhantomData,
            source: None,
            dtype,
            out: Track::new(out),
            into: Track::new(into),
            lag,
            round,
            open: usize::MAX,
            due: usize::MAX,
            inside,
            prepared: 0,
            scratch,
            held: 0,
        };
        flow.out.advance(0, |range| range);
        flow.into.advance(0, |(range, _)| range);
        flow
    }

    /// The same with outgoing ranges of other memory than the incoming ones'.
    pub fn out_of(self, source: &'a [u8]) -> Self {
        Self { source: Some(source), ..self }
    }

    pub fn bytes_out(&self) -> usize {
        self.out.ranges.iter().map(Range::len).sum()
    }

    pub fn bytes_in(&self) -> usize {
        self.into.ranges.iter().map(|(range, _)| range.len()).sum()
    }

    /// Lets the first `ranges` of both directions go; `due` are those that have to before a pause.
    pub fn open(&mut self, ranges: usize, due: usize, inside: Inside) {
        (self.open, self.due) = (ranges, due);
        self.inside = Some(inside);
    }

    /// Whether everything that is due has come and gone.
    pub fn is_paused(&self) -> bool {
        self.out.index >= self.due && self.into.index >= self.due
    }

    /// Whether bytes that have arrived could be taken.
    pub fn is_waiting(&self) -> bool {
        self.into.index < self.open
    }

    /// How far the outgoing range may be sent, not counting what has to be combined inside first.
    fn landed(&self) -> usize {
        let Track { ranges, index, .. } = &self.out;
        let Some(range) = ranges.get(*index).filter(|_| *index < self.open) else { return 0 };
        let within = index % self.round;
        match self.lag.and_then(|lag| within.checked_sub(lag)).map(|back| index - within + back) {
            None => range.len(),
            Some(needed) if self.into.index > needed => range.len(),
            Some(needed) if self.into.index == needed => self.into.offset,
            Some(_) => 0,
        }
    }

    /// Whether anything may go out now.
    pub fn is_ready(&self) -> bool {
        self.landed() > self.out.offset
    }

    /// What may go out now.
    pub fn outgoing(&mut self) -> &[u8] {
        let mut landed = self.landed();
        let offset = self.out.offset;
        if landed <= offset {
            return &[];
        }
        let range = self.out.ranges[self.out.index].clone();
        if self.out.index.is_multiple_of(self.round) && self.inside.is_some() {
            if self.prepared <= offset {
                let end = landed.min(offset + PREPARED);
                self.prepare(self.out.index / self.round, range.start + offset, end - offset);
                self.prepared = end;
            }
            landed = self.prepared;
        }
        if let Some(source) = self.source {
            return &source[range.start + offset..range.start + landed];
        }
        // SAFETY: inside a range of the tensor (FLOW-1).
        unsafe { std::slice::from_raw_parts(self.start.add(range.start + offset), landed - offset) }
    }

    pub fn sent(&mut self, bytes: usize) {
        let before = self.out.index;
        self.out.advance(bytes, |range| range);
        if self.out.index != before {
            self.prepared = 0;
        }
    }

    /// Where the next bytes go.
    pub fn incoming(&mut self) -> &mut [u8] {
        let Track { ranges, index, offset } = &self.into;
        let Some((range, landing)) = ranges.get(*index).filter(|_| *index < self.open) else {
            return &mut [];
        };
        let left = range.len() - offset;
        match landing {
            // SAFETY: inside a range of the tensor (FLOW-1).
            Landing::Store => unsafe {
                std::slice::from_raw_parts_mut(self.start.add(range.start + offset), left)
            },
            Landing::Aside => &mut bytes_of(self.scratch)[*offset..range.len()],
            Landing::Combine(_) | Landing::Finish(_) => {
                &mut bytes_of(self.scratch)[self.held..left.min(SEGMENT)]
            }
        }
    }

    /// Takes note of bytes that [`Self::incoming`] was filled with.
    pub fn received(&mut self, bytes: usize) {
        let Track { ranges, index, offset } = &self.into;
        let Some((range, landing)) = ranges.get(*index) else { return };
        let (chunk, start) = (index / self.round, range.start + offset);
        let (steps, last) = match *landing {
            Landing::Combine(steps) => (steps, false),
            Landing::Finish(steps) => (steps, true),
            Landing::Store => {
                self.deliver(chunk, start, bytes);
                return self.into.advance(bytes, |(range, _)| range);
            }
            Landing::Aside => return self.into.advance(bytes, |(range, _)| range),
        };
        let size = self.dtype.size();
        self.held += bytes;
        let (count, rest) = (self.held / size, self.held % size);
        self.combine(&steps, last, chunk, start, count);
        if rest > 0 {
            bytes_of(self.scratch).copy_within(count * size..self.held, 0);
        }
        self.held = rest;
        self.into.advance(count * size, |(range, _)| range);
    }

    /// Combines everybody's bytes inside the host into this rank's.
    fn prepare(&self, chunk: usize, start: usize, bytes: usize) {
        let Some(inside) = &self.inside else { return };
        let steps = Steps { prescale: inside.prescale, ..Steps::combine(self.op()) };
        let sources: Vec<*const u8> =
            inside.at(chunk, start).map(|tensor| tensor.cast_const()).collect();
        let target = self.start.wrapping_add(start);
        let count = bytes / self.dtype.size();
        // SAFETY: inside a range of all tensors (FLOW-1), aligned because ranges start at elements.
        unsafe { kernel::reduce(self.dtype, &steps, &sources, &[target], count) };
    }

    /// The operation of the flow; any, if nothing is combined.
    fn op(&self) -> ReduceOp {
        let op = self.into.ranges.iter().find_map(|(_, landing)| match landing {
            Landing::Combine(steps) | Landing::Finish(steps) => Some(steps.op),
            Landing::Store | Landing::Aside => None,
        });
        op.unwrap_or(ReduceOp::Sum)
    }

    /// Combines elements of the tensor, or of everybody's inside the host, with those at the start of the scratch
    /// memory.
    fn combine(&self, steps: &Steps, last: bool, chunk: usize, start: usize, count: usize) {
        debug_assert!(count * self.dtype.size() <= size_of_val(self.scratch.as_slice()));
        let own = self.start.wrapping_add(start);
        let arrived: *const u8 = self.scratch.as_ptr().cast();
        let (mut sources, mut targets) = (vec![own.cast_const()], vec![own]);
        if let Some(inside) = &self.inside {
            let everybody = inside.at(chunk, start);
            if inside.prescale == 1.0 {
                sources = everybody.clone().map(|tensor| tensor.cast_const()).collect();
            } else {
                // What arrives is scaled already.
                self.prepare(chunk, start, count * self.dtype.size());
            }
            if last {
                targets = everybody.collect();
            }
        }
        sources.push(arrived);
        // SAFETY: inside a range of all tensors (FLOW-1), and the scratch is as long as what lands there; aligned
        // because ranges start at elements; the destinations are sources or apart from them.
        unsafe { kernel::reduce(self.dtype, steps, &sources, &targets, count) };
    }

    /// Copies a result to everybody inside the host.
    fn deliver(&self, chunk: usize, start: usize, bytes: usize) {
        let own = self.start.wrapping_add(start);
        let everybody = self.inside.iter().flat_map(|inside| inside.at(chunk, start));
        for target in everybody.filter(|target| *target != own) {
            // SAFETY: inside a range of both tensors (FLOW-1), which are of different ranks.
            unsafe { std::ptr::copy_nonoverlapping(own, target, bytes) };
        }
    }

    /// Combines what landed aside, once the outgoing bytes have left.
    pub fn combine_aside(self, steps: &Steps) {
        let Some((range, _)) = self.into.ranges.first() else { return };
        self.combine(steps, true, 0, range.start, range.len() / self.dtype.size());
    }
}

/// Makes sure that there are `bytes` at least.
pub(super) fn grow(lines: &mut Vec<Line>, bytes: usize) {
    let needed = bytes.div_ceil(size_of::<Line>());
    if lines.len() < needed {
        lines.resize(needed, Line::default());
    }
}

pub(super) fn bytes_of(lines: &mut [Line]) -> &mut [u8] {
    let bytes = size_of_val(lines);
    // SAFETY: any byte of initialised lines is an initialised byte.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), bytes) }
}

/// Scales every element before anything else.
pub(super) fn prescale(dtype: DType, factor: f64, tensor: &mut [u8]) {
    // SAFETY: the tensor is whole elements, aligned as its type asks.
    unsafe { kernel::prescale(dtype, factor, tensor.as_mut_ptr(), tensor.len() / dtype.size()) };
}

/// Divides and scales every element after everything else.
pub(super) fn finish(dtype: DType, steps: &Steps, tensor: &mut [u8]) {
    // SAFETY: as above.
    unsafe { kernel::finish(dtype, steps, tensor.as_mut_ptr(), tensor.len() / dtype.size()) };
}
