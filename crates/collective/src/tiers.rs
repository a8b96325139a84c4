//! Collectives among hosts with several ranks each: shared memory inside a host, links between those that have the same
//! place on their hosts.
//!
//! - TIER-1: every rank of a host makes the same steps in the same order, and so does every rank of the same place.
//! - TIER-2: each rank carries its share of what goes between hosts, so that no byte crosses twice and all links are used.
#![expect(unsafe_code, reason = "works on tensors that the arena reads and writes")]

use crate::{
    arena::Arena,
    bootstrap::Tiers,
    bucket::{Buckets, Location, Place},
    chunk::{line_grain, part},
    error::Result,
    health::Ticket,
    kernel::Steps,
    mesh::Mesh,
    plan::{self, Kind, Plan, Thresholds, Topology},
};
use std::ops::Range;

pub(crate) struct Tiered {
    arena: Arena,
    mesh: Mesh,
    tiers: Tiers,
    me: usize,
    thresholds: Thresholds,
    cores: usize,
}

impl Tiered {
    pub fn new(
        arena: Arena,
        mesh: Mesh,
        tiers: Tiers,
        me: usize,
        thresholds: Thresholds,
        cores: usize,
    ) -> Self {
        Self { arena, mesh, tiers, me, thresholds, cores }
    }

    /// Ranks of a host.
    fn locals(&self) -> usize {
        self.tiers.local.len()
    }

    fn hosts(&self) -> usize {
        self.tiers.cross.len()
    }

    fn local_rank(&self) -> usize {
        self.me % self.locals()
    }

    fn host(&self) -> usize {
        self.me / self.locals()
    }

    fn plan(&self, kind: Kind, bytes: usize, shared: bool) -> Plan {
        let ranks = if shared { self.locals() } else { self.hosts() };
        let topology = Topology { ranks, shared, cores: self.cores, tiered: false };
        plan::choose(kind, bytes, false, &topology, &self.thresholds)
    }

    pub fn barrier(&mut self, ticket: &mut Ticket<'_>) -> Result<()> {
        self.arena.barrier(ticket)?;
        self.mesh.barrier(ticket)?;
        // Nobody goes on before all places have heard from their hosts.
        self.arena.barrier(ticket)
    }

    /// Inside the host each rank reduces its part of everybody's tensor; the parts are reduced between hosts; then every
    /// rank takes the other parts from its neighbours.
    pub fn all_reduce(
        &mut self,
        ticket: &mut Ticket<'_>,
        tensor: &mut [u8],
        buckets: &Buckets,
    ) -> Result<()> {
        let (dtype, reduction) = (ticket.call.dtype, ticket.call.reduction);
        let (count, size) = (ticket.call.count, dtype.size());
        let parts: Vec<Range<usize>> = (0..self.locals())
            .map(|index| part(count, self.locals(), index, line_grain(size)))
            .collect();
        let inside = Steps { prescale: reduction.prescale, ..Steps::combine(reduction.op) };
        // SAFETY: the tensor is borrowed mutably, and the parts divide its elements.
        unsafe { self.arena.reduce_parts(ticket, &inside, tensor.as_mut_ptr(), &parts)? };
        let ranges: Vec<Range<usize>> =
            parts.iter().map(|part| part.start * size..part.end * size).collect();
        let own = ranges[self.local_rank()].clone();
        // Every rank of this place has as many.
        if !own.is_empty() {
            let ranks = self.locals() * self.hosts();
            let between = Steps { prescale: 1.0, ..Steps::whole(reduction, ranks) };
            let algorithm = self.plan(Kind::AllReduce, own.len(), false).algorithm;
            self.mesh.all_reduce(ticket, algorithm, &between, &mut tensor[own])?;
        }
        self.gather_inside(ticket, tensor, &ranges, buckets)
    }

    /// Every rank's own range of `tensor` is there, and reaches all ranks. Ranges follow each other in rank order.
    pub fn all_gather(
        &mut self,
        ticket: &mut Ticket<'_>,
        ranges: &[Range<usize>],
        tensor: &mut [u8],
        buckets: &Buckets,
    ) -> Result<()> {
        let locals = self.locals();
        let block = |host: usize| {
            let ranks = &ranges[host * locals..(host + 1) * locals];
            ranks[0].start..ranks[locals - 1].end
        };
        let (host, local) = (self.host(), self.local_rank());
        let inside: Vec<Range<usize>> = ranges[host * locals..(host + 1) * locals].to_vec();
        self.gather_inside(ticket, tensor, &inside, buckets)?;
        let slices: Vec<Vec<Range<usize>>> =
            (0..self.hosts()).map(|host| slices_of(block(host), locals)).collect();
        let mine: Vec<Range<usize>> = slices.iter().map(|slices| slices[local].clone()).collect();
        self.mesh.all_gather(ticket, &mine, tensor)?;
        for other in (0..self.hosts()).filter(|other| *other != host) {
            self.gather_inside(ticket, tensor, &slices[other], buckets)?;
        }
        Ok(())
    }

    /// The root's tensor reaches all ranks: whole, through the ranks of its place, if it is small; in parts, through all
    /// ranks, if it is large.
    pub fn broadcast(
        &mut self,
        ticket: &mut Ticket<'_>,
        tensor: &mut [u8],
        buckets: &Buckets,
    ) -> Result<()> {
        let (locals, root) = (self.locals(), ticket.call.root);
        let (root_host, root_local) = (root / locals, root % locals);
        let all = 0..tensor.len();
        let of_root: Vec<Range<usize>> =
            (0..locals).map(|local| if local == root_local { all.clone() } else { 0..0 }).collect();
        let plan = self.plan(Kind::Broadcast, tensor.len(), false);
        if plan.algorithm == plan::Algorithm::Tree {
            if self.local_rank() == root_local {
                self.mesh.broadcast(ticket, plan.algorithm, root_host, tensor)?;
            }
            return self.gather_inside(ticket, tensor, &of_root, buckets);
        }
        if self.host() == root_host {
            self.gather_inside(ticket, tensor, &of_root, buckets)?;
        }
        let slices = slices_of(all, locals);
        let mine = slices[self.local_rank()].clone();
        self.mesh.broadcast(ticket, plan.algorithm, root_host, &mut tensor[mine])?;
        if self.host() != root_host {
            self.gather_inside(ticket, tensor, &slices, buckets)?;
        }
        Ok(())
    }

    /// Every rank of this host gets the others' ranges of the tensor.
    fn gather_inside(
        &mut self,
        ticket: &mut Ticket<'_>,
        tensor: &mut [u8],
        ranges: &[Range<usize>],
        buckets: &Buckets,
    ) -> Result<()> {
        let plan = self.plan(Kind::AllGather, tensor.len(), true);
        let place = Place { location: Location::PLAIN, buckets };
        let output = tensor.as_mut_ptr();
        let own = &ranges[self.local_rank()];
        // SAFETY: the tensor is borrowed mutably, holds all ranges, and input and output are the same memory.
        unsafe { self.arena.gather(ticket, &plan, output.add(own.start), output, ranges, place) }
    }
}

/// A range of bytes in as many parts as a host has ranks.
fn slices_of(range: Range<usize>, parts: usize) -> Vec<Range<usize>> {
    let slice = |index| {
        let part = part(range.len(), parts, index, 64);
        range.start + part.start..range.start + part.end
    };
    (0..parts).map(slice).collect()
}
