//! Collectives among ranks that all share memory, in ticks of their boards.
//!
//! What may be read or written when is TICK-1 and TICK-2 of `shm/protocol.rs`. Every tick waits for every
//! member, so a call that differs on one rank is seen by all before anybody touches a byte of it.
#![expect(unsafe_code, reason = "reads and writes memory that other processes share")]

mod exchange;

use crate::{
    bucket::{BucketMemory, Buckets, Location, Place},
    call::{Call, disagreement},
    chunk::{line_grain, part},
    error::{Error, FailureKind, Result},
    health::Ticket,
    kernel::{self, Steps},
    plan::{Algorithm, Plan},
    shm::{
        protocol::{INLINE_WORDS, Patience},
        segment::{STAGE_BYTES, Segment},
    },
};
use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

pub(crate) struct Arena {
    me: usize,
    /// The ranks of the group that the members are.
    names: Vec<usize>,
    members: Vec<Arc<Segment>>,
    tick: u32,
    /// Where the tensor of the call at hand lies.
    location: Location,
    patience: Patience,
    /// Room for the pointers of one kernel call.
    sources: Vec<*const u8>,
    targets: Vec<*mut u8>,
    lines: Vec<[u64; INLINE_WORDS]>,
}

// SAFETY: the pointers are only there during a call, which holds the arena mutably.
unsafe impl Send for Arena {}

/// What the members' locations have in common, known to all of them after one tick.
pub(crate) enum Common {
    /// Nobody's tensor is registered.
    Plain,
    /// Everybody's lies in one bucket, so everybody has it mapped.
    Bucket {
        /// Which.
        memory: Arc<BucketMemory>,
        /// At the same place in it.
        aligned: bool,
    },
    /// Some are registered, or in different buckets.
    Mixed,
}

impl Arena {
    /// Among the ranks `names`, of which this is the one at `me`; `crowded` if they share cores with each other or with
    /// others of the group.
    pub fn new(me: usize, names: Vec<usize>, members: Vec<Arc<Segment>>, crowded: bool) -> Self {
        // Pausing helps nobody when the peer needs this very core. With a core for each, a rank that has to wait
        // longer sleeps instead of yielding: two that have come to share a core would go on sharing it.
        let patience = if crowded {
            Patience { spins: 0, yields: 40 }
        } else {
            Patience { spins: 1000, yields: 0 }
        };
        let lines = vec![[0; INLINE_WORDS]; members.len()];
        Self {
            me,
            names,
            members,
            tick: 0,
            location: Location::PLAIN,
            patience,
            sources: Vec::new(),
            targets: Vec::new(),
            lines,
        }
    }

    fn own(&self) -> &Segment {
        &self.members[self.me]
    }

    /// The members' indices but this one's, starting after it so that not all read the same memory first.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, ranks) = (self.me, self.members.len());
        (1..ranks).map(move |distance| (me + distance) % ranks)
    }

    /// The next tick's own staging buffer.
    pub fn next_stage(&self) -> *mut u8 {
        self.own().stage(self.tick.wrapping_add(1))
    }

    /// Publishes what this rank has staged and waits for everybody's.
    fn tick(&mut self, ticket: &mut Ticket<'_>) -> Result<()> {
        self.publish(ticket);
        self.complete(ticket)
    }

    fn publish(&self, ticket: &Ticket<'_>) {
        let tick = self.tick.wrapping_add(1);
        let own = self.own();
        let line = own.board().line(tick);
        line.signature.store(ticket.call.signature(), Ordering::Relaxed);
        line.location.store(self.location.word(), Ordering::Relaxed);
        own.set_call(tick, ticket.call.words());
        own.board().publish(tick);
    }

    /// The first half of [`Self::meet`]: tells the others that this rank is there, and does not wait.
    pub fn announce(&mut self, ticket: &Ticket<'_>, location: Location) {
        self.location = location;
        self.publish(ticket);
    }

    /// Whether all have announced themselves.
    pub fn is_complete(&self) -> bool {
        let tick = self.tick.wrapping_add(1);
        self.members.iter().all(|member| member.board().has(tick))
    }

    /// The second half of [`Self::meet`]: waits for everybody.
    pub fn complete(&mut self, ticket: &mut Ticket<'_>) -> Result<()> {
        let tick = self.tick.wrapping_add(1);
        let signature = ticket.call.signature();
        let mut agreed = true;
        for peer in self.others() {
            let board = self.members[peer].board();
            board.wait(tick, self.patience, || ticket.check_near(|| self.missing(tick)))?;
            agreed &= board.line(tick).signature.load(Ordering::Relaxed) == signature;
        }
        self.tick = tick;
        if agreed { Ok(()) } else { Err(self.disagree(ticket)) }
    }

    fn missing(&self, tick: u32) -> Vec<usize> {
        let missing = self.others().filter(|peer| !self.members[*peer].board().has(tick));
        missing.map(|peer| self.names[peer]).collect()
    }

    #[cold]
    fn disagree(&self, ticket: &Ticket<'_>) -> Error {
        let names = self.names.iter().map(|rank| ticket.health.name(*rank));
        let calls: Vec<(usize, String)> =
            names.zip(self.members.iter().map(|member| member.call(self.tick))).collect();
        ticket.fail(FailureKind::Mismatch, disagreement(&calls))
    }

    fn location_of(&self, member: usize) -> Location {
        let line = self.members[member].board().line(self.tick);
        Location::from_word(line.location.load(Ordering::Relaxed))
    }

    pub fn common(&self, buckets: &Buckets) -> Common {
        let own = self.location_of(self.me);
        let all = |same: &dyn Fn(Location) -> bool| {
            self.others().all(|peer| same(self.location_of(peer)))
        };
        if !own.is_registered() {
            return if all(&|other| !other.is_registered()) {
                Common::Plain
            } else {
                Common::Mixed
            };
        }
        let shared = all(&|other| other.is_registered() && other.id() == own.id());
        match buckets.get(own.id()).filter(|_| shared) {
            Some(memory) => Common::Bucket { memory, aligned: all(&|other| other == own) },
            None => Common::Mixed,
        }
    }

    pub fn barrier(&mut self, ticket: &mut Ticket<'_>) -> Result<()> {
        self.meet(ticket, Location::PLAIN)
    }

    /// One tick: everybody is there, has called the same, and tells where its tensor lies.
    pub fn meet(&mut self, ticket: &mut Ticket<'_>, location: Location) -> Result<()> {
        self.location = location;
        self.tick(ticket)
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The member that this rank is.
    pub fn me(&self) -> usize {
        self.me
    }

    /// A member's staging buffer of the last tick.
    pub fn stage(&self, member: usize) -> *mut u8 {
        self.members[member].stage(self.tick)
    }

    /// Both staging buffers of a member, one after the other.
    pub fn stages(&self, member: usize) -> *mut u8 {
        self.members[member].stage(0)
    }

    /// Which of them is that of the next tick.
    pub fn next_parity(&self) -> usize {
        (self.tick.wrapping_add(1) & 1) as usize
    }

    /// Where a member's part of a bucket is, from the place on that this rank's tensor has in it.
    pub fn registered(&self, memory: &BucketMemory, member: usize) -> *mut u8 {
        memory.at(self.names[member], self.location.offset())
    }

    /// Combines everybody's tensor into this rank's, whole, on every rank, in one exchange if it fits a stage.
    ///
    /// # Safety
    /// As [`Self::all_reduce`].
    pub unsafe fn combine_whole(
        &mut self,
        ticket: &mut Ticket<'_>,
        steps: &Steps,
        tensor: *mut u8,
    ) -> Result<()> {
        self.location = Location::PLAIN;
        if ticket.call.bytes() <= 8 * INLINE_WORDS {
            // SAFETY: the caller's contract.
            return unsafe { self.all_reduce_inline(ticket, steps, tensor) };
        }
        let (count, elements) = (ticket.call.count, STAGE_BYTES / ticket.call.dtype.size());
        let chunks: Vec<Range<usize>> = (0..count.div_ceil(elements))
            .map(|index| index * elements..((index + 1) * elements).min(count))
            .collect();
        // SAFETY: the caller's contract.
        unsafe { self.all_reduce_staged(ticket, steps, &chunks, tensor, false, false) }
    }

    /// Reduces `call.count` elements at `tensor`, on every rank. Registered tensors are tried in place first;
    /// whether the others' tensors are registered too is known after the first tick, on all ranks alike.
    ///
    /// # Safety
    /// `tensor` is valid for reads and writes of the call's elements, and nobody else uses it meanwhile;
    /// `place` is its own or plain.
    pub unsafe fn all_reduce(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        tensor: *mut u8,
        place: Place<'_>,
    ) -> Result<()> {
        self.location = place.location;
        let call = *ticket.call;
        let steps = Steps::whole(call.reduction, self.members.len());
        if plan.algorithm == Algorithm::Inline {
            // SAFETY: the caller's contract.
            return unsafe { self.all_reduce_inline(ticket, &steps, tensor) };
        }
        let elements = plan.chunk.min(STAGE_BYTES) / call.dtype.size();
        let chunks: Vec<Range<usize>> = (0..call.count.div_ceil(elements))
            .map(|index| index * elements..((index + 1) * elements).min(call.count))
            .collect();
        let sliced = plan.algorithm == Algorithm::TwoShot;
        if !self.location.is_registered() {
            // SAFETY: the caller's contract, and the next stage is free (TICK-2).
            unsafe { self.stage_chunk(&call, &chunks[0], tensor, sliced) };
        }
        self.tick(ticket)?;
        let staged = match self.common(place.buckets) {
            Common::Bucket { memory, aligned: true } => {
                let offset = self.location.offset();
                // SAFETY: every member published that its tensor lies at this place, and waits.
                unsafe { self.reduce_in_place(&call, &steps, &memory, offset) };
                return self.tick(ticket);
            }
            Common::Plain => true,
            Common::Bucket { .. } | Common::Mixed => false,
        };
        // SAFETY: the caller's contract; `staged` says truly whether everybody's first chunk is.
        unsafe { self.all_reduce_staged(ticket, &steps, &chunks, tensor, sliced, staged) }
    }

    /// # Safety
    /// As [`Self::all_reduce`], with at most as many bytes as the line holds.
    unsafe fn all_reduce_inline(
        &mut self,
        ticket: &mut Ticket<'_>,
        steps: &Steps,
        tensor: *mut u8,
    ) -> Result<()> {
        let (dtype, count, bytes) = (ticket.call.dtype, ticket.call.count, ticket.call.bytes());
        let mut words = [0u64; INLINE_WORDS];
        // SAFETY: the plan is inline only up to the size of the line.
        unsafe { std::ptr::copy_nonoverlapping(tensor, words.as_mut_ptr().cast(), bytes) };
        for (slot, word) in
            self.own().board().line(self.tick.wrapping_add(1)).inline.iter().zip(words)
        {
            slot.store(word, Ordering::Relaxed);
        }
        self.tick(ticket)?;
        self.sources.clear();
        for (line, member) in self.lines.iter_mut().zip(&self.members) {
            let published = &member.board().line(self.tick).inline;
            for (word, slot) in line.iter_mut().zip(published) {
                *word = slot.load(Ordering::Relaxed);
            }
            self.sources.push(line.as_ptr().cast());
        }
        // SAFETY: every line holds the call's elements, aligned to a word; the tensor is the caller's contract.
        unsafe { kernel::reduce(dtype, steps, &self.sources, &[tensor], count) };
        Ok(())
    }

    /// Copies a chunk into the next tick's stage; without the own slice if every rank reduces its own.
    ///
    /// # Safety
    /// `tensor` holds the call's elements, and `chunk` is a range of them that fits a stage.
    unsafe fn stage_chunk(
        &self,
        call: &Call,
        chunk: &Range<usize>,
        tensor: *const u8,
        sliced: bool,
    ) {
        let size = call.dtype.size();
        let stage = self.next_stage();
        let mine = if sliced { self.slice(call, chunk, self.me) } else { chunk.end..chunk.end };
        for range in [chunk.start..mine.start, mine.end..chunk.end] {
            // SAFETY: inside the chunk on both sides.
            unsafe {
                let from = tensor.add(range.start * size);
                let to = stage.add((range.start - chunk.start) * size);
                std::ptr::copy_nonoverlapping(from, to, range.len() * size);
            }
        }
    }

    /// The elements of a chunk that `member` reduces.
    fn slice(&self, call: &Call, chunk: &Range<usize>, member: usize) -> Range<usize> {
        let grain = line_grain(call.dtype.size());
        let range = part(chunk.len(), self.members.len(), member, grain);
        chunk.start + range.start..chunk.start + range.end
    }

    /// Reduces `range` of the chunk from everybody's stage and, for this rank's share, from the tensor itself. The
    /// result goes into the tensor, and into the others' stages if this rank is the one that reduces the range.
    ///
    /// # Safety
    /// As [`Self::all_reduce`]; the stages of this tick hold `range`, and if `sliced` only this rank uses it.
    unsafe fn reduce_stages(
        &mut self,
        call: &Call,
        steps: &Steps,
        chunk: &Range<usize>,
        range: &Range<usize>,
        tensor: *mut u8,
        sliced: bool,
    ) {
        let size = call.dtype.size();
        let offset = (range.start - chunk.start) * size;
        let target = tensor.wrapping_add(range.start * size);
        self.targets.clear();
        for (index, member) in self.members.iter().enumerate() {
            let staged = member.stage(self.tick).wrapping_add(offset);
            self.targets.push(if index == self.me { target } else { staged });
        }
        self.sources.clear();
        self.sources.extend(self.targets.iter().map(|target| target.cast_const()));
        let targets = if sliced { &self.targets[..] } else { &[target] };
        // SAFETY: the owners do not touch their stages before this rank's next tick (TICK-2); the tensor is ours.
        unsafe { kernel::reduce(call.dtype, steps, &self.sources, targets, range.len()) };
    }

    /// One-shot or two-shot through the stages. In the two-shot form the results of a chunk are published with
    /// the input of the next, so both take one tick per chunk.
    ///
    /// # Safety
    /// As [`Self::all_reduce`]; `staged`: the first chunk is staged and this tick has published it.
    unsafe fn all_reduce_staged(
        &mut self,
        ticket: &mut Ticket<'_>,
        steps: &Steps,
        chunks: &[Range<usize>],
        tensor: *mut u8,
        sliced: bool,
        staged: bool,
    ) -> Result<()> {
        let call = *ticket.call;
        let mut reduced: Option<&Range<usize>> = None;
        for (index, chunk) in chunks.iter().enumerate() {
            if index > 0 || !staged {
                // SAFETY: the caller's contract, and the next stage is free (TICK-2).
                unsafe { self.stage_chunk(&call, chunk, tensor, sliced) };
                self.tick(ticket)?;
            }
            // SAFETY: the caller's contract; this tick published what is used here.
            unsafe {
                if let Some(before) = reduced {
                    self.take_results(&call, before, tensor);
                }
                if sliced {
                    let mine = self.slice(&call, chunk, self.me);
                    self.reduce_stages(&call, steps, chunk, &mine, tensor, true);
                    reduced = Some(chunk);
                } else {
                    self.reduce_stages(&call, steps, chunk, chunk, tensor, false);
                }
            }
        }
        if let Some(last) = reduced {
            self.tick(ticket)?;
            // SAFETY: as above.
            unsafe { self.take_results(&call, last, tensor) };
        }
        Ok(())
    }

    /// Copies what the others have reduced, out of this rank's own stage of the tick before.
    ///
    /// # Safety
    /// As [`Self::all_reduce`]; the tick before was that of `chunk`.
    unsafe fn take_results(&self, call: &Call, chunk: &Range<usize>, tensor: *mut u8) {
        let size = call.dtype.size();
        let stage = self.own().stage(self.tick.wrapping_sub(1));
        let mine = self.slice(call, chunk, self.me);
        for range in [chunk.start..mine.start, mine.end..chunk.end] {
            // SAFETY: inside the chunk on both sides; the others have left this stage with their last tick (TICK-2).
            unsafe {
                let from = stage.add((range.start - chunk.start) * size);
                kernel::take_over(from, tensor.add(range.start * size), range.len() * size);
            }
        }
    }

    /// Reduces this rank's slice from everybody's tensor into everybody's tensor.
    ///
    /// # Safety
    /// Every member's tensor lies at `offset` of `memory`, and nobody uses another slice than its own.
    unsafe fn reduce_in_place(
        &mut self,
        call: &Call,
        steps: &Steps,
        memory: &BucketMemory,
        offset: usize,
    ) {
        let mine = self.slice(call, &(0..call.count), self.me);
        let start = offset + mine.start * call.dtype.size();
        self.targets.clear();
        self.targets.extend(self.names.iter().map(|name| memory.at(*name, start)));
        self.sources.clear();
        self.sources.extend(self.targets.iter().map(|target| target.cast_const()));
        // SAFETY: the caller's contract.
        unsafe { kernel::reduce(call.dtype, steps, &self.sources, &self.targets, mine.len()) };
    }

    /// Copies what the members hold into `output`, where `ranges` are the bytes of each: of everybody in an
    /// all-gather, of the root alone in a broadcast.
    ///
    /// # Safety
    /// `input` is valid for as many bytes as this rank's range, `output` for all ranges, and they are the same
    /// memory or do not overlap; `place` is that of `input` (of `output` on a rank whose own range is empty)
    /// or plain.
    pub unsafe fn gather(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        input: *const u8,
        output: *mut u8,
        ranges: &[Range<usize>],
        place: Place<'_>,
    ) -> Result<()> {
        self.location = place.location;
        let chunk = plan.chunk.min(STAGE_BYTES);
        let longest = ranges.iter().map(Range::len).max().unwrap_or(0);
        let own = ranges[self.me].clone();
        let mut done = 0;
        loop {
            let len = own.len().saturating_sub(done).min(chunk);
            if !self.location.is_registered() && len > 0 {
                // SAFETY: inside this rank's range; the next stage is free (TICK-2).
                unsafe {
                    let from = input.add(done);
                    kernel::hand_over(from, self.next_stage(), len);
                }
            }
            self.tick(ticket)?;
            match self.common(place.buckets) {
                Common::Plain => {}
                Common::Mixed => {
                    self.location = Location::PLAIN;
                    continue;
                }
                Common::Bucket { memory, .. } => {
                    for peer in self.others() {
                        let from = memory.at(self.names[peer], self.location_of(peer).offset());
                        // SAFETY: the peer published that its range lies there, and waits.
                        unsafe {
                            let to = output.add(ranges[peer].start);
                            std::ptr::copy_nonoverlapping(from, to, ranges[peer].len());
                        }
                    }
                    self.tick(ticket)?;
                    break;
                }
            }
            for peer in self.others() {
                let left = ranges[peer].len().saturating_sub(done).min(chunk);
                if left > 0 {
                    // SAFETY: the peer staged that many bytes of its range for this tick.
                    unsafe {
                        let from = self.members[peer].stage(self.tick);
                        let to = output.add(ranges[peer].start + done);
                        std::ptr::copy_nonoverlapping(from, to, left);
                    }
                }
            }
            done += chunk;
            if done >= longest {
                break;
            }
        }
        let target = output.wrapping_add(own.start);
        if !own.is_empty() && target.cast_const() != input {
            // SAFETY: this rank's range on both sides, which do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(input, target, own.len()) };
        }
        Ok(())
    }
}
