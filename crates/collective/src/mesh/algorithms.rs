//! Which ranges go to whom: the algorithms over links, as sequences of messages.

use super::{
    Mesh,
    flow::{self, Flow, Landing},
};
use crate::{
    chunk::part,
    error::Result,
    health::Ticket,
    kernel::Steps,
    plan::{Algorithm, Plan},
};
use std::{collections::BTreeSet, ops::Range};

/// The pairs of ranks that the algorithms below use, as the peers of `me`: its neighbours in the ring and its
/// partners at powers of two. They grow with the logarithm of the number of ranks.
pub(crate) fn peers_of(me: usize, ranks: usize) -> BTreeSet<usize> {
    let core = core(ranks);
    let mut peers = BTreeSet::from([(me + 1) % ranks, (me + ranks - 1) % ranks]);
    if me < core {
        peers.extend(distances(core).map(|distance| me ^ distance));
        peers.extend([me + core].into_iter().filter(|extra| *extra < ranks));
    } else {
        peers.insert(me - core);
    }
    peers.remove(&me);
    peers
}

/// The ranks that take part in power-of-two algorithms; the rest send to and hear from `rank - core`.
fn core(ranks: usize) -> usize {
    1 << ranks.ilog2()
}

fn distances(core: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..core.ilog2()).map(|bit| 1 << bit)
}

impl Mesh {
    /// Reduces the tensor on every rank.
    pub fn all_reduce(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        tensor: &mut [u8],
    ) -> Result<()> {
        let (dtype, reduction) = (ticket.call.dtype, ticket.call.reduction);
        flow::prescale(dtype, reduction.prescale, tensor);
        let steps = Steps { prescale: 1.0, ..Steps::whole(reduction, self.ranks()) };
        self.all_reduce_part(ticket, plan.algorithm, &steps, tensor)
    }

    /// Reduces a part of the call's tensor on every rank; it is scaled already.
    pub fn all_reduce_part(
        &mut self,
        ticket: &mut Ticket<'_>,
        algorithm: Algorithm,
        steps: &Steps,
        tensor: &mut [u8],
    ) -> Result<()> {
        match algorithm {
            Algorithm::Ring => self.ring_all_reduce(ticket, steps, tensor)?,
            Algorithm::HalvingDoubling => self.folded(ticket, steps, tensor, Self::halving)?,
            _ => self.folded(ticket, steps, tensor, Self::doubling)?,
        }
        self.number += 1;
        Ok(())
    }

    pub fn barrier(&mut self, ticket: &mut Ticket<'_>) -> Result<()> {
        let steps = Steps::combine(ticket.call.reduction.op);
        self.folded(ticket, &steps, &mut [], Self::doubling)?;
        self.number += 1;
        Ok(())
    }

    /// Every rank's range of `tensor` reaches all ranks, around the ring.
    pub fn all_gather(
        &mut self,
        ticket: &mut Ticket<'_>,
        ranges: &[Range<usize>],
        tensor: &mut [u8],
    ) -> Result<()> {
        let steps = self.ranks() - 1;
        self.ring(ticket, ranges, steps, tensor, |_| Landing::Store)?;
        self.number += 1;
        Ok(())
    }

    /// The root's tensor reaches all ranks. Parents send at once and children tell their parents that they are
    /// there: so a rank that thinks of another root is found out whoever it waits for, and nobody returns before
    /// its own children have come.
    pub fn broadcast(
        &mut self,
        ticket: &mut Ticket<'_>,
        plan: &Plan,
        tensor: &mut [u8],
    ) -> Result<()> {
        self.broadcast_part(ticket, plan.algorithm, ticket.call.root, tensor)
    }

    /// The same for a part of the call's tensor, from the rank of this mesh that is `root`.
    pub fn broadcast_part(
        &mut self,
        ticket: &mut Ticket<'_>,
        algorithm: Algorithm,
        root: usize,
        tensor: &mut [u8],
    ) -> Result<()> {
        if algorithm == Algorithm::Tree {
            self.tree(ticket, root, tensor)?;
        } else {
            self.relay(ticket, root, tensor)?;
        }
        self.number += 1;
        Ok(())
    }

    /// One message each way between this rank and `peer`.
    #[expect(
        clippy::too_many_arguments,
        reason = "a message has two directions and a place in the call"
    )]
    fn message(
        &mut self,
        ticket: &mut Ticket<'_>,
        step: usize,
        to: Option<usize>,
        from: Option<usize>,
        tensor: &mut [u8],
        out: Range<usize>,
        into: (Range<usize>, Landing),
    ) -> Result<()> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let dtype = ticket.call.dtype;
        let steps = match into.1 {
            Landing::Combine(steps)
                if out == into.0 && !out.is_empty() && to.is_some() && from.is_some() =>
            {
                Some(steps)
            }
            _ => None,
        };
        let into = if steps.is_some() { (into.0, Landing::Aside) } else { into };
        let out = to.map(|_| out).into_iter().collect();
        let into = from.map(|_| into).into_iter().collect();
        let mut flow = Flow::new(tensor, dtype, out, into, None, &mut scratch);
        let result = self.run(ticket, step as u16, to, from, &mut flow);
        if let (Ok(()), Some(steps)) = (&result, steps) {
            flow.combine_aside(&steps);
        }
        self.scratch = scratch;
        result
    }

    /// Runs `algorithm` among a power of two of ranks, with the others folded into it.
    fn folded(
        &mut self,
        ticket: &mut Ticket<'_>,
        steps: &Steps,
        tensor: &mut [u8],
        algorithm: impl Fn(&mut Self, &mut Ticket<'_>, &Steps, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let (me, ranks, core) = (self.me(), self.ranks(), core(self.ranks()));
        let all = 0..tensor.len();
        // The first and the last step of every link between a folded rank and its partner.
        let (first, last) = (0, usize::from(u16::MAX));
        if me >= core {
            let partner = Some(me - core);
            self.message(
                ticket,
                first,
                partner,
                None,
                tensor,
                all.clone(),
                (0..0, Landing::Store),
            )?;
            return self.message(ticket, last, None, partner, tensor, 0..0, (all, Landing::Store));
        }
        let folded = Some(me + core).filter(|extra| *extra < ranks);
        if folded.is_some() {
            let landing = Landing::Combine(Steps::combine(steps.op));
            self.message(ticket, first, None, folded, tensor, 0..0, (all.clone(), landing))?;
        }
        algorithm(self, ticket, steps, tensor)?;
        if folded.is_some() {
            self.message(ticket, last, folded, None, tensor, all, (0..0, Landing::Store))?;
        }
        Ok(())
    }

    /// Whole vectors with partners at growing distances: log₂ n messages of everything.
    fn doubling(
        &mut self,
        ticket: &mut Ticket<'_>,
        steps: &Steps,
        tensor: &mut [u8],
    ) -> Result<()> {
        let all = 0..tensor.len();
        for (step, distance) in distances(core(self.ranks())).enumerate() {
            let partner = Some(self.me() ^ distance);
            let landing = Landing::Combine(Steps::combine(steps.op));
            self.message(
                ticket,
                1 + step,
                partner,
                partner,
                tensor,
                all.clone(),
                (all.clone(), landing),
            )?;
        }
        flow::finish(ticket.call.dtype, steps, tensor);
        Ok(())
    }

    /// Halves with the farthest partner, quarters with the next …, then the reduced pieces back the same way.
    fn halving(&mut self, ticket: &mut Ticket<'_>, steps: &Steps, tensor: &mut [u8]) -> Result<()> {
        let core = core(self.ranks());
        let size = ticket.call.dtype.size();
        let (me, count) = (self.me(), tensor.len() / size);
        let bytes = |pieces: &Range<usize>| {
            let start = part(count, core, pieces.start, 1).start;
            start * size..part(count, core, pieces.end - 1, 1).end * size
        };
        let kept = self.halve(ticket, steps, tensor, bytes)?;
        for (step, distance) in distances(core).enumerate() {
            let (own, wider) = (&kept[kept.len() - 1 - step], &kept[kept.len() - 2 - step]);
            let theirs =
                if own.start == wider.start { own.end..wider.end } else { wider.start..own.start };
            let partner = Some(me ^ distance);
            let into = (bytes(&theirs), Landing::Store);
            self.message(ticket, 1 + core + step, partner, partner, tensor, bytes(own), into)?;
        }
        Ok(())
    }

    /// Halves with the farthest partner, quarters with the next …, until rank r of a power of two has piece r
    /// reduced. `bytes` says where pieces lie. Returns the pieces that were this rank's after each step.
    pub(super) fn halve(
        &mut self,
        ticket: &mut Ticket<'_>,
        steps: &Steps,
        tensor: &mut [u8],
        bytes: impl Fn(&Range<usize>) -> Range<usize>,
    ) -> Result<Vec<Range<usize>>> {
        let (me, core) = (self.me(), core(self.ranks()));
        let mut kept: Vec<Range<usize>> = std::iter::once(0..core).collect();
        for (step, distance) in distances(core).rev().enumerate() {
            let now = kept[step].clone();
            let middle = now.start.midpoint(now.end);
            let (low, high) = (now.start..middle, middle..now.end);
            let (keep, give) = if me & distance == 0 { (low, high) } else { (high, low) };
            let partner = Some(me ^ distance);
            let combine = if distance == 1 { *steps } else { Steps::combine(steps.op) };
            let into = (bytes(&keep), Landing::Combine(combine));
            self.message(ticket, 1 + step, partner, partner, tensor, bytes(&give), into)?;
            kept.push(keep);
        }
        Ok(kept)
    }

    fn ring_all_reduce(
        &mut self,
        ticket: &mut Ticket<'_>,
        steps: &Steps,
        tensor: &mut [u8],
    ) -> Result<()> {
        let (ranks, size) = (self.ranks(), ticket.call.dtype.size());
        let ranges: Vec<Range<usize>> = (0..ranks)
            .map(|index| part(tensor.len() / size, ranks, index, 1))
            .map(|range| range.start * size..range.end * size)
            .collect();
        self.ring(ticket, &ranges, 2 * (ranks - 1), tensor, |step| match step + 2 {
            before if before < ranks => Landing::Combine(Steps::combine(steps.op)),
            last if last == ranks => Landing::Finish(*steps),
            _ => Landing::Store,
        })
    }

    /// Ranges travel to the right: at step k this rank sends range `me - k` and receives range `me - k - 1`,
    /// which it sends on at the next step, as it comes in.
    pub(super) fn ring(
        &mut self,
        ticket: &mut Ticket<'_>,
        ranges: &[Range<usize>],
        steps: usize,
        tensor: &mut [u8],
        landing: impl Fn(usize) -> Landing,
    ) -> Result<()> {
        let (me, ranks) = (self.me(), self.ranks());
        let index = |back: usize| (me + 2 * ranks - back) % ranks;
        let out = (0..steps).map(|step| ranges[index(step)].clone()).collect();
        let into =
            (0..steps).map(|step| (ranges[index(step + 1)].clone(), landing(step))).collect();
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut flow = Flow::new(tensor, ticket.call.dtype, out, into, Some(1), &mut scratch);
        let (right, left) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let result = self.run(ticket, 0, Some(right), Some(left), &mut flow);
        self.scratch = scratch;
        result
    }

    /// From the root around the ring, each rank passing on what has come in.
    fn relay(&mut self, ticket: &mut Ticket<'_>, root: usize, tensor: &mut [u8]) -> Result<()> {
        let (me, ranks) = (self.me(), self.ranks());
        let (right, left) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let parent = Some(left).filter(|_| me != root);
        let child = Some(right).filter(|right| *right != root);
        self.message(ticket, 1, parent, None, tensor, 0..0, (0..0, Landing::Store))?;
        let all = 0..tensor.len();
        let out = child.map(|_| all.clone()).into_iter().collect();
        let into = parent.map(|_| (all, Landing::Store)).into_iter().collect();
        let lag = parent.map(|_| 0);
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut flow = Flow::new(tensor, ticket.call.dtype, out, into, lag, &mut scratch);
        let result = self.run(ticket, 0, child, parent, &mut flow);
        self.scratch = scratch;
        result?;
        self.message(ticket, 1, None, child, tensor, 0..0, (0..0, Landing::Store))
    }

    /// A binomial tree over the power-of-two ranks, relabelled by exclusive or so that every root uses the same
    /// connections; the remaining ranks hang on their partners.
    fn tree(&mut self, ticket: &mut Ticket<'_>, root: usize, tensor: &mut [u8]) -> Result<()> {
        let (me, ranks) = (self.me(), self.ranks());
        let core = core(ranks);
        let top = if root >= core { root - core } else { root };
        let (parent, mut children) = if me >= core {
            (Some(me - core).filter(|_| me != root), Vec::new())
        } else {
            let label = me ^ top;
            let lowest = if label == 0 { core } else { 1 << label.trailing_zeros() };
            let children: Vec<usize> =
                distances(core).rev().filter(|bit| *bit < lowest).map(|bit| me ^ bit).collect();
            let above = if label != 0 { Some(me ^ lowest) } else { None };
            (above.or(Some(root).filter(|_| root >= core && me == top)), children)
        };
        if me >= core && me == root {
            children.push(top);
        } else if me < core && me + core < ranks && me + core != root {
            children.push(me + core);
        }
        let all = 0..tensor.len();
        let nothing = (0..0, Landing::Store);
        if parent.is_some() {
            self.message(ticket, 0, parent, parent, tensor, 0..0, (all.clone(), Landing::Store))?;
        }
        for child in children.into_iter().map(Some) {
            self.message(ticket, 0, child, child, tensor, all.clone(), nothing.clone())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_mutual_and_grow_with_the_logarithm() {
        for ranks in 1..=300usize {
            let mut total = 0;
            for me in 0..ranks {
                let peers = peers_of(me, ranks);
                assert!(
                    peers.iter().all(|peer| *peer < ranks && peers_of(*peer, ranks).contains(&me))
                );
                total += peers.len();
            }
            assert!(total <= ranks * (ranks.ilog2() as usize + 3), "{ranks} ranks: {total}");
        }
    }
}
