//! Collectives of the arena that give every rank another part: reduce-scatter and all-to-all.
//!
//! Nobody writes into another's memory here: a rank takes its own part from what the others stage, or from where
//! their tensors lie if these are registered.
#![expect(unsafe_code, reason = "reads memory that other processes share")]

use super::{Arena, Common};
use crate::{
    bucket::{BucketMemory, Location, Place},
    call::Call,
    chunk::part,
    error::Result,
    health::Ticket,
    kernel::{self, Steps},
    plan::Plan,
    shares::Shares,
    shm::segment::STAGE_BYTES,
};
use std::ops::Range;

impl Arena {
    /// Reduces this rank's part of everybody's `input` into `output`. `parts` are the elements of each rank.
    ///
    /// The parts are cut into as many pieces each as there are ticks, and a tick stages one piece of every part.
    ///
    /// # Safety
    /// `input` is valid for reads of the call's elements, `output` for writes of this rank's part, and they do not
    /// overlap; `parts` cover the call's elements in order; `place` is that of `input` or plain.
    pub unsafe fn reduce_scatter(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        input: *const u8,
        output: *mut u8,
        parts: &[Range<usize>],
        place: Place<'_>,
    ) -> Result<()> {
        self.location = place.location;
        let call = *ticket.call;
        let (me, size) = (self.me, call.dtype.size());
        let steps = Steps::whole(call.reduction, self.members.len());
        // Every piece may be an element longer than its share; half of the stage is room for that.
        let rounds = call.bytes().div_ceil(plan.chunk.min(STAGE_BYTES / 2)).max(1);
        let mut round = 0;
        while round < rounds {
            let piece = |rank: usize| {
                let range = part(parts[rank].len(), rounds, round, 1);
                parts[rank].start + range.start..parts[rank].start + range.end
            };
            let mut staged = 0;
            let mut own = 0;
            for rank in 0..parts.len() {
                let piece = piece(rank);
                if rank == me {
                    own = staged;
                } else if !self.location.is_registered() {
                    // SAFETY: a piece of the input; all pieces of a round fit the next stage, which is free (TICK-2).
                    unsafe {
                        let to = self.next_stage().add(staged);
                        kernel::hand_over(input.add(piece.start * size), to, piece.len() * size);
                    }
                }
                staged += piece.len() * size;
            }
            debug_assert!(staged <= STAGE_BYTES);
            self.tick(ticket)?;
            match self.common(place.buckets) {
                Common::Plain => {}
                Common::Mixed => {
                    self.location = Location::PLAIN;
                    continue;
                }
                Common::Bucket { memory, .. } => {
                    // SAFETY: every member published where in this memory its input lies, and waits.
                    unsafe { self.reduce_part(&call, &steps, &memory, &parts[me], output) };
                    return self.tick(ticket);
                }
            }
            let mine = piece(me);
            self.sources.clear();
            for (index, member) in self.members.iter().enumerate() {
                self.sources.push(match index == me {
                    true => input.wrapping_add(mine.start * size),
                    false => member.stage(self.tick).wrapping_add(own).cast_const(),
                });
            }
            let target = output.wrapping_add((mine.start - parts[me].start) * size);
            // SAFETY: every other member staged this piece at the same place for this tick; the rest is the caller's.
            unsafe { kernel::reduce(call.dtype, &steps, &self.sources, &[target], mine.len()) };
            round += 1;
        }
        Ok(())
    }

    /// Reduces `range` of everybody's tensor, wherever in the bucket it lies, into `output`.
    ///
    /// # Safety
    /// Every member's tensor lies in `memory` where its line says, and `output` has room for the range.
    unsafe fn reduce_part(
        &mut self,
        call: &Call,
        steps: &Steps,
        memory: &BucketMemory,
        range: &Range<usize>,
        output: *mut u8,
    ) {
        self.sources.clear();
        for member in 0..self.members.len() {
            let start = self.location_of(member).offset() + range.start * call.dtype.size();
            self.sources.push(memory.at(member, start).cast_const());
        }
        // SAFETY: the caller's contract.
        unsafe { kernel::reduce(call.dtype, steps, &self.sources, &[output], range.len()) };
    }

    /// Copies this rank's part of everybody's `input` into `output`.
    ///
    /// Every rank stages what it gives in turn, first to the rank after it: so in one tick all ranks have about as
    /// much to take, and the ticks are as many as the rank that gives most needs.
    ///
    /// # Safety
    /// `input` is valid for reads of what this rank gives, `output` for writes of what it takes, and they do not
    /// overlap; `place` is that of `input` or plain.
    pub unsafe fn all_to_all(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        input: *const u8,
        output: *mut u8,
        shares: &Shares,
        place: Place<'_>,
    ) -> Result<()> {
        self.location = place.location;
        let (me, ranks) = (self.me, self.members.len());
        let chunk = plan.chunk.min(STAGE_BYTES);
        let (own, total) = (shares.given(me, me), shares.total(me));
        let after = (0, own.end..total);
        let before = (total - own.end, 0..own.start);
        let longest =
            (0..ranks).map(|rank| shares.total(rank) - shares.bytes(rank, rank)).max().unwrap_or(0);
        let arrivals: Vec<(usize, Range<usize>, Range<usize>)> = self
            .others()
            .map(|peer| (peer, shares.in_turn(peer, me), shares.taken(peer, me)))
            .collect();
        let mut done = 0;
        loop {
            let window = done..done + chunk;
            if !self.location.is_registered() {
                for (at, part) in [&after, &before] {
                    let now = common_range(&window, &(*at..at + part.len()));
                    // SAFETY: inside the input; the window fits the next stage, which is free (TICK-2).
                    unsafe {
                        let from = input.add(part.start + (now.start - at).min(part.len()));
                        let to = self.next_stage().add((now.start - window.start).min(chunk));
                        kernel::hand_over(from, to, now.len());
                    }
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
                    for (peer, _, taken) in &arrivals {
                        let start = shares.given(*peer, me).start;
                        let from = memory.at(*peer, self.location_of(*peer).offset() + start);
                        // SAFETY: the peer published that its input lies there, and waits.
                        unsafe {
                            let to = output.add(taken.start);
                            std::ptr::copy_nonoverlapping(from, to, taken.len());
                        }
                    }
                    self.tick(ticket)?;
                    break;
                }
            }
            for (peer, turn, taken) in &arrivals {
                let now = common_range(&window, turn);
                if !now.is_empty() {
                    // SAFETY: the peer staged this window of what it gives for this tick.
                    unsafe {
                        let staged = self.members[*peer].stage(self.tick);
                        let from = staged.add(now.start - window.start);
                        let to = output.add(taken.start + now.start - turn.start);
                        std::ptr::copy_nonoverlapping(from, to, now.len());
                    }
                }
            }
            done += chunk;
            if done >= longest {
                break;
            }
        }
        // SAFETY: this rank's own part on both sides, which do not overlap.
        unsafe {
            let to = output.add(shares.taken(me, me).start);
            std::ptr::copy_nonoverlapping(input.add(own.start), to, own.len());
        }
        Ok(())
    }
}

/// What two ranges have in common; empty at the later start if nothing.
fn common_range(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let start = one.start.max(other.start);
    start..one.end.min(other.end).max(start)
}
