//! What one rank of each host does for its host over links: it carries a share of everybody's tensor.
//!
//! - LANE-1: what goes over the wire follows from the call, the thresholds and the numbers of ranks on the hosts, not
//!   from where tensors lie: so a host with registered memory understands one without.
#![expect(unsafe_code, reason = "works on tensors of several processes")]

use super::{
    Mesh,
    flow::{Flow, Inside, Landing},
};
use crate::{chunk::part, error::Result, health::Ticket, kernel::Steps};
use std::ops::Range;

/// What a lane may do next.
pub(crate) struct Next {
    /// Chunks that may be touched, from the first one on.
    pub open: usize,
    /// Chunks that have to be done before the next is asked for; with all open, all are.
    pub due: usize,
    pub inside: Inside,
}

/// Where the tensors of a host come from, chunk by chunk.
pub(crate) trait Supply {
    /// Brings this rank's chunk along and tells the others of its host.
    fn announce(&mut self, ticket: &Ticket<'_>, chunk: usize);

    /// Whether all of the host have announced theirs.
    fn is_complete(&self) -> bool;

    /// Waits for them, and says what a lane may do next.
    fn complete(&mut self, ticket: &mut Ticket<'_>, chunk: usize) -> Result<Next>;
}

impl Mesh {
    /// Reduces this lane's share of every rank's tensor, chunk by chunk: `shares` are its bytes of each chunk. What is
    /// open moves on while the host's ranks bring the next chunk along.
    ///
    /// # Safety
    /// `tensor`, and what the supply says is inside, is valid for reads and writes of the shares that are open, aligned
    /// for the call's type, and nobody else uses these bytes before they are done.
    pub unsafe fn all_reduce_shares(
        &mut self,
        ticket: &mut Ticket<'_>,
        steps: &Steps,
        chunk: usize,
        tensor: *mut u8,
        shares: &[Range<usize>],
        supply: &mut impl Supply,
    ) -> Result<()> {
        let (me, hosts, dtype) = (self.me(), self.ranks(), ticket.call.dtype);
        let round = 2 * (hosts - 1);
        let range = |share: &Range<usize>, back: usize| {
            let index = (me + 2 * hosts - back) % hosts;
            let range = part(share.len() / dtype.size(), hosts, index, 1);
            share.start + range.start * dtype.size()..share.start + range.end * dtype.size()
        };
        let landing = |step: usize| match step + 2 {
            before if before < hosts => Landing::Combine(Steps::combine(steps.op)),
            last if last == hosts => Landing::Finish(*steps),
            _ => Landing::Store,
        };
        let messages = || shares.iter().flat_map(|share| (0..round).map(move |step| (share, step)));
        let out = messages().map(|(share, step)| range(share, step)).collect();
        let into =
            messages().map(|(share, step)| (range(share, step + 1), landing(step))).collect();
        let (right, left) = ((me + 1) % hosts, (me + hosts - 1) % hosts);
        let mut scratch = std::mem::take(&mut self.scratch);
        // SAFETY: the caller's contract; nothing is touched before it is opened.
        let mut flow =
            unsafe { Flow::over(tensor, dtype, out, into, Some(1), round, None, &mut scratch) };
        // Hosts that divide differently are told apart by it.
        let mark = 1 + (chunk / 64 % usize::from(u16::MAX - 1)) as u16;
        let mut passage = self.begin(ticket, mark, Some(right), Some(left), &flow);
        let mut supplied = || -> Result<()> {
            let mut done = 0;
            while done < shares.len() {
                supply.announce(ticket, done);
                while done > 0
                    && !supply.is_complete()
                    && self.step(ticket, &mut passage, &mut flow)?
                {}
                let Next { open, due, inside } = supply.complete(ticket, done)?;
                if open < shares.len() {
                    // Of the last chunk only what is on its way to be combined: results follow with the next.
                    flow.open(open * round - (hosts - 1), due * round, inside);
                } else {
                    // At the end nothing holds it back: the header may still be missing.
                    flow.open(usize::MAX, usize::MAX, inside);
                }
                self.advance(ticket, &mut passage, &mut flow)?;
                done = open;
            }
            Ok(())
        };
        let result = supplied();
        drop(flow);
        self.scratch = scratch;
        self.number += 1;
        result
    }

    /// Every host's ranges of `tensor` reach all, around the ring. All hosts have equally many, some of them empty.
    pub fn all_gather_lists(
        &mut self,
        ticket: &mut Ticket<'_>,
        ranges: &[Vec<Range<usize>>],
        tensor: &mut [u8],
    ) -> Result<()> {
        let (me, hosts) = (self.me(), self.ranks());
        let each = ranges.first().map_or(0, Vec::len);
        let of = |back: usize| ranges[(me + 2 * hosts - back) % hosts].iter().cloned();
        let out = (0..hosts - 1).flat_map(of).collect();
        let into = (1..hosts).flat_map(of).map(|range| (range, Landing::Store)).collect();
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut flow = Flow::new(tensor, ticket.call.dtype, out, into, Some(each), &mut scratch);
        let (right, left) = ((me + 1) % hosts, (me + hosts - 1) % hosts);
        let result = self.run(ticket, 0, Some(right), Some(left), &mut flow);
        self.scratch = scratch;
        self.number += 1;
        result
    }
}
