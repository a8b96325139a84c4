//! Collectives over links that give every rank another part: reduce-scatter and all-to-all.

use super::{
    Mesh, Peer,
    flow::{self, Flow, Landing},
};
use crate::{
    error::Result,
    health::Ticket,
    kernel::Steps,
    link::Link,
    plan::{Algorithm, Plan},
    shares::Shares,
};
use std::ops::Range;

impl Mesh {
    /// Reduces this rank's part of everybody's `input` into `output`. `parts` are the bytes of each rank.
    pub fn reduce_scatter(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        input: &[u8],
        output: &mut [u8],
        parts: &[Range<usize>],
    ) -> Result<()> {
        let (dtype, reduction) = (ticket.call.dtype, ticket.call.reduction);
        let mut copy = std::mem::take(&mut self.copy);
        flow::grow(&mut copy, input.len());
        let tensor = &mut flow::bytes_of(&mut copy)[..input.len()];
        tensor.copy_from_slice(input);
        flow::prescale(dtype, reduction.prescale, tensor);
        let steps = Steps { prescale: 1.0, ..Steps::whole(reduction, self.ranks()) };
        let result = match plan.algorithm {
            Algorithm::Halving => {
                let bytes =
                    |pieces: &Range<usize>| parts[pieces.start].start..parts[pieces.end - 1].end;
                self.halve(ticket, &steps, tensor, bytes).map(drop)
            }
            _ => self.ring_reduce_scatter(ticket, &steps, tensor, parts),
        };
        if result.is_ok() {
            output.copy_from_slice(&tensor[parts[self.me()].clone()]);
            self.number += 1;
        }
        self.copy = copy;
        result
    }

    /// The first half of a ring all-reduce. The range that comes in last is the one on the right, so every rank's
    /// part counts as its right neighbour's.
    fn ring_reduce_scatter(
        &mut self,
        ticket: &mut Ticket<'_>,
        steps: &Steps,
        tensor: &mut [u8],
        parts: &[Range<usize>],
    ) -> Result<()> {
        let ranks = self.ranks();
        let ranges: Vec<Range<usize>> =
            (0..ranks).map(|index| parts[(index + ranks - 1) % ranks].clone()).collect();
        self.ring(ticket, &ranges, ranks - 1, tensor, |step| {
            let last = step + 2 == ranks;
            Landing::Combine(if last { *steps } else { Steps::combine(steps.op) })
        })
    }

    /// The ranks to which an all-to-all needs links that are not there yet. The first time all ranks meet first:
    /// one that has called something else would otherwise be waited for where nobody looks at its headers.
    pub fn missing(&mut self, ticket: &mut Ticket<'_>) -> Result<Vec<usize>> {
        if self.complete {
            return Ok(Vec::new());
        }
        self.barrier(ticket)?;
        Ok((0..self.ranks())
            .filter(|rank| *rank != self.me() && self.peers[*rank].is_none())
            .collect())
    }

    /// Takes links to all ranks that were missing.
    pub fn add(&mut self, links: impl IntoIterator<Item = (usize, Box<dyn Link>)>) {
        for (rank, link) in links {
            self.peers[rank] = Some(Peer::new(link));
        }
        self.complete = true;
    }

    /// Every rank's part of `input` reaches it: at step k to the k-th rank on the right, from the k-th on the left.
    pub fn all_to_all(
        &mut self,
        ticket: &mut Ticket<'_>,
        input: &[u8],
        output: &mut [u8],
        shares: &Shares,
    ) -> Result<()> {
        let (me, ranks) = (self.me(), self.ranks());
        output[shares.taken(me, me)].copy_from_slice(&input[shares.given(me, me)]);
        for step in 1..ranks {
            let (to, from) = ((me + step) % ranks, (me + ranks - step) % ranks);
            let out = vec![shares.given(me, to)];
            let into = vec![(shares.taken(from, me), Landing::Store)];
            let mut scratch = std::mem::take(&mut self.scratch);
            let mut flow =
                Flow::new(output, ticket.call.dtype, out, into, None, &mut scratch).out_of(input);
            let result = self.run(ticket, step as u16, Some(to), Some(from), &mut flow);
            self.scratch = scratch;
            result?;
        }
        self.number += 1;
        Ok(())
    }
}
