//! What one message carries: ranges of a tensor that go out, ranges that come in, and which waits for which.
#![expect(unsafe_code, reason = "calls the reduction kernels")]

use crate::{
    DType,
    kernel::{self, Steps},
};
use std::ops::Range;

/// Bytes received at a time when they are to be combined: small enough to stay in the cache.
pub(super) const SEGMENT: usize = 512 << 10;

/// Where incoming bytes go.
#[derive(Clone, Copy, Debug)]
pub(super) enum Landing {
    /// Into the tensor.
    Store,
    /// Combined with the tensor, as they arrive.
    Combine(Steps),
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

/// A message in each direction over one tensor.
pub(super) struct Flow<'a> {
    tensor: &'a mut [u8],
    /// Where outgoing ranges lie, if not in the tensor.
    source: Option<&'a [u8]>,
    dtype: DType,
    out: Track<Range<usize>>,
    into: Track<(Range<usize>, Landing)>,
    /// The k-th outgoing range is sent as the one `lag` before it in the other direction comes in.
    lag: Option<usize>,
    /// Received, not yet combined; or everything that lands aside.
    scratch: &'a mut Vec<u64>,
    held: usize,
}

impl<'a> Flow<'a> {
    pub fn new(
        tensor: &'a mut [u8],
        dtype: DType,
        out: Vec<Range<usize>>,
        into: Vec<(Range<usize>, Landing)>,
        lag: Option<usize>,
        scratch: &'a mut Vec<u64>,
    ) -> Self {
        let room = |(range, landing): &(Range<usize>, Landing)| match landing {
            Landing::Store => 0,
            Landing::Combine(_) => range.len().min(SEGMENT),
            Landing::Aside => range.len(),
        };
        let words = into.iter().map(room).max().unwrap_or(0).div_ceil(8);
        if scratch.len() < words {
            scratch.resize(words, 0);
        }
        let mut flow = Self {
            tensor,
            source: None,
            dtype,
            out: Track::new(out),
            into: Track::new(into),
            lag,
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

    /// What may go out now.
    pub fn outgoing(&self) -> &[u8] {
        let Track { ranges, index, offset } = &self.out;
        let Some(range) = ranges.get(*index) else { return &[] };
        let landed = match self.lag.and_then(|lag| index.checked_sub(lag)) {
            None => range.len(),
            Some(needed) if self.into.index > needed => range.len(),
            Some(needed) if self.into.index == needed => self.into.offset,
            Some(_) => 0,
        };
        let source = self.source.unwrap_or(self.tensor);
        &source[range.start + offset..range.start + landed.max(*offset)]
    }

    pub fn sent(&mut self, bytes: usize) {
        self.out.advance(bytes, |range| range);
    }

    /// Where the next bytes go.
    pub fn incoming(&mut self) -> &mut [u8] {
        let Track { ranges, index, offset } = &self.into;
        let Some((range, landing)) = ranges.get(*index) else { return &mut [] };
        let left = range.len() - offset;
        match landing {
            Landing::Store => &mut self.tensor[range.start + offset..range.end],
            Landing::Aside => &mut bytes_of(self.scratch)[*offset..range.len()],
            Landing::Combine(_) => &mut bytes_of(self.scratch)[self.held..left.min(SEGMENT)],
        }
    }

    /// Takes note of bytes that [`Self::incoming`] was filled with.
    pub fn received(&mut self, bytes: usize) {
        let Track { ranges, index, offset } = &self.into;
        let Some((range, Landing::Combine(steps))) = ranges.get(*index) else {
            return self.into.advance(bytes, |(range, _)| range);
        };
        let size = self.dtype.size();
        self.held += bytes;
        let (count, rest) = (self.held / size, self.held % size);
        let start = range.start + offset;
        combine(self.dtype, steps, &mut self.tensor[start..start + count * size], self.scratch);
        if rest > 0 {
            bytes_of(self.scratch).copy_within(count * size..self.held, 0);
        }
        self.held = rest;
        self.into.advance(count * size, |(range, _)| range);
    }

    /// Combines what landed aside, once the outgoing bytes have left.
    pub fn combine_aside(self, steps: &Steps) {
        combine(self.dtype, steps, self.tensor, self.scratch);
    }
}

/// Combines a whole number of elements of the tensor with those at the start of the scratch memory.
fn combine(dtype: DType, steps: &Steps, tensor: &mut [u8], scratch: &[u64]) {
    debug_assert!(tensor.len() <= scratch.len() * 8);
    let sources = [tensor.as_ptr(), scratch.as_ptr().cast()];
    let count = tensor.len() / dtype.size();
    // SAFETY: both hold `count` elements (the scratch is as long as the longest range that lands there), aligned
    // because tensors are and ranges start at elements; the destination is the first source.
    unsafe { kernel::reduce(dtype, steps, &sources, &[tensor.as_mut_ptr()], count) };
}

pub(super) fn bytes_of(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: any byte of initialised words is an initialised byte.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len() * 8) }
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
