//! Collectives among hosts with several ranks: shared memory inside a host, links between counterparts on all hosts.
//!
//! - TIER-1: every rank of a host makes the same ticks in the same order, whatever its lane.
//! - TIER-2: between two ticks a rank touches its own share of everybody's memory inside the host, nobody else's.
//! - TIER-3: an element is combined between hosts by one rank of each host, which hands the result to the others; or by
//!   all of them alike. So all ranks have the same bits.
#![expect(unsafe_code, reason = "works on tensors that other processes read and write")]

use crate::{
    arena::{Arena, Common},
    bucket::{BucketMemory, Location, Place},
    chunk::{line_grain, part},
    error::Result,
    health::Ticket,
    kernel::{self, Steps},
    layout::Layout,
    mesh::{Inside, Mesh, Next, Slots, Supply, View},
    plan::{Algorithm, Plan, Thresholds},
    shm::segment::STAGE_BYTES,
};
use std::{ops::Range, sync::Arc};

/// Chunks that are staged at a time: one whose results are taken, one whose results arrive, one on its way out; a power
/// of two divides both stages.
const SLOTS: usize = 4;
/// The largest chunk of several.
const SLOT_BYTES: usize = 2 * STAGE_BYTES / SLOTS;
/// Bytes that are handed around a host at a time; a larger part of a stage would not stay in the cache.
const WINDOW: usize = 1 << 20;

pub(crate) struct Tiered {
    arena: Arena,
    /// To the counterparts on other hosts, and what treats all ranks alike needs.
    mesh: Mesh,
    /// The counterparts; none beyond the last lane.
    lane: Option<View>,
    layout: Layout,
    host: usize,
}

impl Tiered {
    /// This rank's part of `layout`, with its host's `arena` and its links.
    pub fn new(rank: usize, layout: Layout, arena: Arena, mesh: Mesh) -> Self {
        let (host, place) = layout.place(rank);
        let lane = (place < layout.lanes()).then(|| View { me: host, members: layout.lane(place) });
        Self { arena, mesh, lane, layout, host }
    }

    /// For calls that treat all ranks alike. The host's ranks agree on the call first: one that waits for them here, and
    /// not for a message, would not be found out otherwise.
    pub fn mesh(&mut self, ticket: &mut Ticket<'_>) -> Result<&mut Mesh> {
        self.arena.barrier(ticket)?;
        Ok(&mut self.mesh)
    }

    /// Runs messages of one call among the counterparts, if this rank has any.
    fn on_lane(&mut self, run: impl FnOnce(&mut Mesh) -> Result<()>) -> Result<()> {
        match &mut self.lane {
            Some(lane) => self.mesh.among(lane, run),
            None => Ok(()),
        }
    }

    fn has_extras(&self) -> bool {
        self.arena.size() > self.layout.lanes()
    }

    pub fn barrier(&mut self, ticket: &mut Ticket<'_>) -> Result<()> {
        self.arena.barrier(ticket)?;
        self.on_lane(|mesh| mesh.barrier(ticket))?;
        self.mesh.count();
        // Who has no lane hears from the others that all hosts have come.
        if self.has_extras() { self.arena.barrier(ticket) } else { Ok(()) }
    }

    /// Reduces the call's elements at `tensor`, on every rank.
    ///
    /// # Safety
    /// `tensor` is valid for reads and writes of the call's elements, and nobody else uses it meanwhile;
    /// `place` is its own or plain.
    pub unsafe fn all_reduce(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        thresholds: &Thresholds,
        tensor: *mut u8,
        place: Place<'_>,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe {
            match plan.algorithm {
                Algorithm::TieredWhole => self.all_reduce_whole(ticket, tensor)?,
                _ => self.all_reduce_shares(ticket, plan, thresholds, tensor, place)?,
            }
        }
        self.mesh.count();
        Ok(())
    }

    /// Everybody combines the tensors of its host and exchanges the outcome with its counterparts: nothing has to be
    /// handed on inside the host afterwards.
    ///
    /// # Safety
    /// As [`Self::all_reduce`].
    unsafe fn all_reduce_whole(&mut self, ticket: &mut Ticket<'_>, tensor: *mut u8) -> Result<()> {
        let (reduction, bytes) = (ticket.call.reduction, ticket.call.bytes());
        let inside = Steps { prescale: reduction.prescale, ..Steps::combine(reduction.op) };
        // SAFETY: the caller's contract.
        unsafe { self.arena.combine_whole(ticket, &inside, tensor)? };
        let between = Steps { prescale: 1.0, ..Steps::whole(reduction, self.layout.ranks()) };
        // SAFETY: the caller's contract.
        let whole = unsafe { std::slice::from_raw_parts_mut(tensor, bytes) };
        let algorithm = Algorithm::RecursiveDoubling;
        self.on_lane(|mesh| mesh.all_reduce_part(ticket, algorithm, &between, whole))?;
        if !self.has_extras() {
            return Ok(());
        }
        let first = self.only(0, 0..bytes);
        // SAFETY: the caller's contract.
        unsafe { self.spread(ticket, tensor, &first) }
    }

    /// Each rank with a lane reduces its share of all tensors: what it sends is combined inside its host just before, what
    /// arrives is combined with the host's on arrival, and results are written to everybody. Tensors in a bucket are used
    /// where they lie; others are staged chunk by chunk.
    ///
    /// # Safety
    /// As [`Self::all_reduce`].
    unsafe fn all_reduce_shares(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        thresholds: &Thresholds,
        tensor: *mut u8,
        place: Place<'_>,
    ) -> Result<()> {
        let reduction = ticket.call.reduction;
        let (bytes, size) = (ticket.call.bytes(), ticket.call.dtype.size());
        // What goes at once needs no slots beside it: it may have a whole stage.
        let (slots, most) = match bytes {
            ..=STAGE_BYTES if bytes <= plan.chunk => (2, STAGE_BYTES),
            _ => (SLOTS, plan.chunk.min(SLOT_BYTES)),
        };
        let chunk = (most / size).max(1) * size;
        let chunks: Vec<Range<usize>> = (0..bytes.div_ceil(chunk))
            .map(|index| index * chunk..((index + 1) * chunk).min(bytes))
            .collect();
        let Self { arena, mesh, lane, layout, .. } = self;
        let (me, lanes) = (arena.me(), layout.lanes());
        let share = |chunk: &Range<usize>| {
            if me >= lanes {
                return chunk.end..chunk.end;
            }
            let range = part(chunk.len() / size, lanes, me, line_grain(size));
            chunk.start + range.start * size..chunk.start + range.end * size
        };
        let shares: Vec<Range<usize>> = chunks.iter().map(share).collect();
        let slots = Slots { chunk, bytes: 2 * STAGE_BYTES / slots, count: slots, first: 0 };
        let (chunks, prescale, memory) = (&chunks, reduction.prescale, None);
        let mut host =
            Host { arena, tensor, place, chunks, shares: &shares, slots, prescale, memory };
        let between = Steps { prescale: 1.0, ..Steps::whole(reduction, layout.ranks()) };
        let few = layout.hosts() > 2 && shares.len() == 1;
        match lane {
            Some(lane) if few && shares[0].len() <= thresholds.halving => {
                host.announce(ticket, 0);
                let Next { inside, .. } = host.complete(ticket, 0)?;
                let everybody: Vec<*mut u8> = inside.at(0, shares[0].start).collect();
                let sources: Vec<*const u8> =
                    everybody.iter().map(|tensor| tensor.cast_const()).collect();
                let (own, len) = (everybody[me], shares[0].len());
                let combine = Steps { prescale, ..Steps::combine(reduction.op) };
                // SAFETY: the caller's contract inside the host, and only this rank uses its share (TIER-2).
                unsafe {
                    kernel::reduce(ticket.call.dtype, &combine, &sources, &[own], len / size);
                    let share = std::slice::from_raw_parts_mut(own, len);
                    let algorithm = Algorithm::HalvingDoubling;
                    mesh.among(lane, |mesh| {
                        mesh.all_reduce_part(ticket, algorithm, &between, share)
                    })?;
                    for other in everybody.into_iter().filter(|other| *other != own) {
                        std::ptr::copy_nonoverlapping(own, other, len);
                    }
                }
            }
            // SAFETY: the caller's contract inside the host, and only this rank uses its shares (TIER-2).
            Some(lane) => mesh.among(lane, |mesh| unsafe {
                mesh.all_reduce_shares(ticket, &between, chunk, tensor, &shares, &mut host)
            })?,
            None => {
                let mut done = 0;
                while done < chunks.len() {
                    host.announce(ticket, done);
                    done = host.complete(ticket, done)?.open;
                }
            }
        }
        host.finish(ticket)
    }

    /// Every rank's own range of `tensor` is there, and reaches all ranks.
    pub fn all_gather(
        &mut self,
        ticket: &mut Ticket<'_>,
        ranges: &[Range<usize>],
        tensor: &mut [u8],
    ) -> Result<()> {
        let lanes = self.layout.lanes();
        let output = tensor.as_mut_ptr();
        if self.has_extras() {
            let here = self.layout.host(self.host).iter().enumerate();
            let extras: Vec<Vec<Range<usize>>> = here
                .map(
                    |(place, rank)| {
                        if place < lanes { vec![] } else { vec![ranges[*rank].clone()] }
                    },
                )
                .collect();
            // SAFETY: the tensor is borrowed mutably and holds all ranges.
            unsafe { self.spread(ticket, output, &extras)? };
        }
        let carried: Vec<Vec<Vec<Range<usize>>>> =
            (0..lanes).map(|lane| self.layout.carried(lane, ranges)).collect();
        let place = self.arena.me();
        self.on_lane(|mesh| mesh.all_gather_lists(ticket, &carried[place], tensor))?;
        self.mesh.count();
        let mut lists: Vec<Vec<Range<usize>>> = carried
            .into_iter()
            .map(|mut hosts| {
                // The ranges of extras here are known to all by now.
                hosts[self.host].truncate(1);
                hosts.concat()
            })
            .collect();
        lists.resize(self.arena.size(), Vec::new());
        // SAFETY: as above.
        unsafe { self.spread(ticket, output, &lists) }
    }

    /// The root's tensor reaches all ranks.
    pub fn broadcast(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        thresholds: &Thresholds,
        tensor: &mut [u8],
    ) -> Result<()> {
        self.broadcast_chunks(ticket, plan, thresholds, tensor)?;
        self.mesh.count();
        Ok(())
    }

    fn broadcast_chunks(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        thresholds: &Thresholds,
        tensor: &mut [u8],
    ) -> Result<()> {
        let (root_host, root_place) = self.layout.place(ticket.call.root);
        let here = self.host == root_host;
        let start = tensor.as_mut_ptr();
        let few = self.layout.hosts() == 2 || tensor.len() <= thresholds.tree;
        let algorithm = if few { Algorithm::Tree } else { Algorithm::Ring };
        if plan.algorithm == Algorithm::TieredWhole {
            // SAFETY: the tensor is borrowed mutably and holds all ranges; the same below.
            unsafe {
                if here {
                    let lists = self.only(root_place, 0..tensor.len());
                    self.spread(ticket, start, &lists)?;
                }
                self.on_lane(|mesh| mesh.broadcast_part(ticket, algorithm, root_host, tensor))?;
                if !here && self.has_extras() {
                    let lists = self.only(0, 0..tensor.len());
                    self.spread(ticket, start, &lists)?;
                }
            }
            return Ok(());
        }
        let (bytes, lanes) = (tensor.len(), self.layout.lanes());
        let chunk = plan.chunk.min(WINDOW);
        for begin in (0..bytes).step_by(chunk) {
            let chunk = begin..(begin + chunk).min(bytes);
            let mut shares: Vec<Vec<Range<usize>>> = (0..lanes)
                .map(|lane| {
                    let range = part(chunk.len(), lanes, lane, 64);
                    let share = chunk.start + range.start..chunk.start + range.end;
                    std::iter::once(share).collect()
                })
                .collect();
            shares.resize(self.arena.size(), Vec::new());
            if here {
                let lists = self.only(root_place, chunk);
                // SAFETY: as above.
                unsafe { self.spread(ticket, start, &lists)? };
            }
            if let Some(own) = shares[self.arena.me()].first().cloned() {
                let share = &mut tensor[own];
                self.on_lane(|mesh| mesh.broadcast_part(ticket, algorithm, root_host, share))?;
            }
            if !here {
                // SAFETY: as above.
                unsafe { self.spread(ticket, start, &shares)? };
            }
        }
        Ok(())
    }

    /// Lists for [`Self::spread`] with one range from one member.
    fn only(&self, member: usize, range: Range<usize>) -> Vec<Vec<Range<usize>>> {
        let mut lists = vec![Vec::new(); self.arena.size()];
        lists[member].push(range);
        lists
    }

    /// Every rank of this host gets the others' ranges of the tensor; `lists` are those of each member.
    ///
    /// # Safety
    /// `tensor` is valid for reads and writes of all ranges, and nobody else uses it meanwhile.
    unsafe fn spread(
        &mut self,
        ticket: &mut Ticket<'_>,
        tensor: *mut u8,
        lists: &[Vec<Range<usize>>],
    ) -> Result<()> {
        let arena = &mut self.arena;
        if arena.size() == 1 {
            return Ok(());
        }
        let total = |list: &Vec<Range<usize>>| list.iter().map(Range::len).sum::<usize>();
        let longest = lists.iter().map(total).max().unwrap_or(0);
        let mut done = 0;
        loop {
            for (at, range) in window(&lists[arena.me()], done, WINDOW) {
                // SAFETY: inside the tensor and the next stage, which is free (TICK-2).
                unsafe {
                    kernel::hand_over(
                        tensor.add(range.start),
                        arena.next_stage().add(at),
                        range.len(),
                    );
                }
            }
            arena.meet(ticket, Location::PLAIN)?;
            for peer in arena.others() {
                for (at, range) in window(&lists[peer], done, WINDOW) {
                    // SAFETY: the peer has staged it for this tick, and leaves it until this rank's next.
                    unsafe {
                        let from = arena.stage(peer).add(at);
                        std::ptr::copy_nonoverlapping(from, tensor.add(range.start), range.len());
                    }
                }
            }
            done += WINDOW;
            if done >= longest {
                return Ok(());
            }
        }
    }
}

/// The tensors of a host on their way through its stages, or where they lie in a bucket.
struct Host<'a> {
    arena: &'a mut Arena,
    tensor: *mut u8,
    place: Place<'a>,
    chunks: &'a [Range<usize>],
    /// What this rank carries of each chunk.
    shares: &'a [Range<usize>],
    slots: Slots,
    prescale: f64,
    /// The bucket that everybody's tensor lies in, at the same place.
    memory: Option<Arc<BucketMemory>>,
}

impl Host<'_> {
    /// What others carry of a chunk, and where that is in this rank's slot.
    fn others(&self, index: usize) -> [(*mut u8, Range<usize>); 2] {
        let (chunk, own) = (&self.chunks[index], &self.shares[index]);
        let slot = self.arena.stages(self.arena.me()).wrapping_add(self.slots.start(index));
        [chunk.start..own.start, own.end..chunk.end]
            .map(|range| (slot.wrapping_add(range.start - chunk.start), range))
    }

    /// The first chunk goes where the next tick's stage is, which is free (TICK-2).
    fn stage_first(&mut self) {
        self.slots.first = self.arena.next_parity() * self.slots.count / 2;
        self.stage(0);
    }

    fn stage(&self, index: usize) {
        for (slot, range) in self.others(index) {
            // SAFETY: inside the tensor, and inside a slot that everybody has left: the chunk that was there before was
            // taken after the last tick or earlier.
            unsafe {
                let from = self.tensor.add(range.start);
                std::ptr::copy_nonoverlapping(from, slot, range.len());
            }
        }
    }

    fn take(&self, index: usize) {
        // Of several chunks others were worked on since this one was staged.
        let copy = if self.chunks.len() > 1 { kernel::take_far } else { kernel::take_over };
        for (slot, range) in self.others(index) {
            // SAFETY: as above; all results of the chunk were there before the last tick.
            unsafe { copy(slot, self.tensor.add(range.start), range.len()) };
        }
    }

    /// Waits until everybody has delivered everything, and takes what has not been taken.
    fn finish(&mut self, ticket: &mut Ticket<'_>) -> Result<()> {
        self.arena.barrier(ticket)?;
        if self.memory.is_none() {
            let last = self.chunks.len() - 1;
            (last.saturating_sub(1)..=last).for_each(|index| self.take(index));
        }
        Ok(())
    }
}

impl Supply for Host<'_> {
    fn announce(&mut self, ticket: &Ticket<'_>, chunk: usize) {
        if chunk > 0 {
            self.stage(chunk);
            return self.arena.announce(ticket, Location::PLAIN);
        }
        if !self.place.location.is_registered() {
            self.stage_first();
        }
        self.arena.announce(ticket, self.place.location);
    }

    fn is_complete(&self) -> bool {
        self.arena.is_complete()
    }

    /// The results of a chunk are there before the tick after the next, and taken then.
    fn complete(&mut self, ticket: &mut Ticket<'_>, chunk: usize) -> Result<Next> {
        self.arena.complete(ticket)?;
        if chunk > 1 {
            self.take(chunk - 2);
        }
        if chunk == 0 {
            match self.arena.common(self.place.buckets) {
                Common::Bucket { memory, aligned: true } => self.memory = Some(memory),
                Common::Plain => {}
                Common::Bucket { .. } | Common::Mixed => {
                    self.stage_first();
                    self.arena.meet(ticket, Location::PLAIN)?;
                }
            }
        }
        let me = self.arena.me();
        let at = |member: usize| match &self.memory {
            Some(memory) => self.arena.registered(memory, member),
            None if member == me => self.tensor,
            None => self.arena.stages(member),
        };
        let tensors = (0..self.arena.size()).map(at).collect();
        let staged = Some(self.slots).filter(|_| self.memory.is_none());
        let open = if self.memory.is_some() { self.chunks.len() } else { chunk + 1 };
        let inside = Inside { tensors, me, staged, prescale: self.prescale };
        Ok(Next { open, due: chunk, inside })
    }
}

/// The bytes from `done` on, `room` at most, of ranges put one after another: where each piece lies among them.
fn window(list: &[Range<usize>], done: usize, room: usize) -> Vec<(usize, Range<usize>)> {
    let mut before = 0;
    let mut found = Vec::new();
    for range in list {
        let (start, end) = (before.max(done), (before + range.len()).min(done + room));
        if start < end {
            let from = range.start + (start - before);
            found.push((start - done, from..from + (end - start)));
        }
        before += range.len();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_lists_piece_by_piece() {
        let list = [10..20, 0..0, 5..8, 40..100];
        assert_eq!(window(&list, 0, 12), [(0, 10..20), (10, 5..7)]);
        assert_eq!(window(&list, 12, 12), [(0, 7..8), (1, 40..51)]);
        assert_eq!(window(&list, 72, 12), [(0, 99..100)]);
        assert_eq!(window(&list, 73, 12), []);
    }
}
