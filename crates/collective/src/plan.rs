//! Which algorithm a call uses: one pure function, with its reason.

pub use crate::call::Kind;
use crate::shm::protocol::INLINE_WORDS;

/// A chunk holds at least a few elements of any type.
const MIN_CHUNK: usize = 64;

/// How a call is carried out. `docs/algorithms.md` has the steps and bytes of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// One rank: the result is there already.
    Alone,
    /// Shared memory: the elements travel in the cache line that carries the sequence number.
    Inline,
    /// Shared memory: each rank stages its elements and takes what it needs from everybody's.
    OneShot,
    /// Shared memory: each rank reduces its slice of every chunk, then takes the others' slices.
    TwoShot,
    /// Shared memory, registered: each rank reads and writes everybody's tensor where it lies.
    InPlace,
    /// Links: whole vectors with partners at distance 1, 2, 4 …
    RecursiveDoubling,
    /// Links: halves, quarters … with the same partners, then back.
    HalvingDoubling,
    /// Links: chunks around the ring, reduced on arrival.
    Ring,
    /// Links: from the root to its partners, from these to theirs.
    Tree,
    /// Links: halves, quarters … with partners at distance n/2, n/4 …, until each rank has its part.
    Halving,
    /// Links: at step k to the k-th rank on the right, from the k-th on the left.
    Pairwise,
    /// One stream between two ranks.
    Direct,
    /// Hosts with several ranks: each rank combines its host's tensors and exchanges whole vectors with its counterparts.
    TieredWhole,
    /// Hosts with several ranks: shared memory inside, and each rank carries its share between hosts.
    TieredShares,
}

/// What a plan depends on besides the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Ranks of the group.
    pub ranks: usize,
    /// Every pair of ranks shares memory.
    pub shared: bool,
    /// Cores that the ranks of a machine may use.
    pub cores: usize,
    /// There are several hosts, some of them with several ranks, and all pairs of a host share memory.
    pub tiered: bool,
}

/// Where one algorithm gives way to the next, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Most bytes in the line itself; there is room for 40.
    pub inline: usize,
    /// Everybody reduces everything up to this; above, every rank reduces its slice, in place if the memory is
    /// registered.
    pub one_shot: usize,
    /// The same when ranks share cores, where each exchange costs a switch of processes.
    pub one_shot_crowded: usize,
    /// Chunk of the copying algorithms when every rank has a core.
    pub chunk: usize,
    /// The same when ranks share cores.
    pub chunk_crowded: usize,
    /// Whole vectors between hosts up to this.
    pub doubling: usize,
    /// Halves between hosts up to this; the ring above.
    pub halving: usize,
    /// Tree for a broadcast up to this; around the ring above.
    pub tree: usize,
    /// Where hosts have several ranks, whole vectors between them up to this.
    pub tiered_whole: usize,
    /// What is divided among the ranks of a host goes at once up to this; 4 MiB at most.
    pub tiered_once: usize,
    /// Chunk of it above that; 2 MiB at most.
    pub tiered_chunk: usize,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            inline: 8 * INLINE_WORDS,
            one_shot: 2 << 10,
            one_shot_crowded: 8 << 10,
            chunk: 256 << 10,
            chunk_crowded: 512 << 10,
            doubling: 10 << 10,
            halving: 512 << 10,
            tree: 64 << 10,
            tiered_whole: 10 << 10,
            tiered_once: 4 << 20,
            tiered_chunk: 1 << 20,
        }
    }
}

/// An algorithm, its chunk, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// How.
    pub algorithm: Algorithm,
    /// Bytes that are staged or received at a time.
    pub chunk: usize,
    /// Why, in one sentence.
    pub reason: &'static str,
}

/// Chooses the plan for a call of `bytes` per rank.
///
/// ```
/// use deuteron_collective::plan::{Algorithm, Kind, Thresholds, Topology, choose};
/// let laptop = Topology { ranks: 4, shared: true, cores: 2, tiered: false };
/// let plan = choose(Kind::AllReduce, 1 << 20, true, &laptop, &Thresholds::default());
/// assert_eq!(plan.algorithm, Algorithm::InPlace);
/// ```
pub fn choose(
    kind: Kind,
    bytes: usize,
    registered: bool,
    topology: &Topology,
    thresholds: &Thresholds,
) -> Plan {
    let Topology { ranks, shared, cores, tiered } = *topology;
    let crowded = ranks > cores;
    let (one_shot, chunk) = if tiered {
        (0, if bytes <= thresholds.tiered_once { bytes } else { thresholds.tiered_chunk })
    } else if crowded {
        (thresholds.one_shot_crowded, thresholds.chunk_crowded)
    } else {
        (thresholds.one_shot, thresholds.chunk)
    };
    let chunk = chunk.max(MIN_CHUNK);
    let inline = thresholds.inline.min(8 * INLINE_WORDS);
    let (algorithm, reason) = match (shared, kind) {
        _ if ranks == 1 => (Algorithm::Alone, "there is one rank"),
        (_, Kind::Send | Kind::Receive) => {
            (Algorithm::Direct, "two ranks have a link of their own")
        }
        (
            true,
            Kind::ReduceScatter | Kind::ReduceScatterVaried | Kind::AllToAll | Kind::AllToAllVaried,
        ) if !registered || bytes <= one_shot => {
            (Algorithm::OneShot, "shared memory: each rank takes its part of what the others stage")
        }
        (true, _) if bytes <= inline => {
            (Algorithm::Inline, "it fits in the line that carries the sequence number")
        }
        (true, _) if registered && bytes > one_shot => {
            (Algorithm::InPlace, "the memory is registered: nothing has to be copied in or out")
        }
        (true, _) if kind != Kind::AllReduce => {
            (Algorithm::OneShot, "shared memory: one copy in, one copy out")
        }
        (true, _) if bytes <= one_shot => {
            (Algorithm::OneShot, "small: reading everything costs less than a second exchange")
        }
        (true, _) => (
            Algorithm::TwoShot,
            "large: each rank reduces one slice, so that nothing is read twice",
        ),
        (false, Kind::Barrier | Kind::Bucket | Kind::Subgroup) if tiered => {
            (Algorithm::TieredWhole, "one exchange inside each host, one between hosts")
        }
        (false, Kind::AllReduce | Kind::Broadcast)
            if tiered && bytes <= thresholds.tiered_whole =>
        {
            (Algorithm::TieredWhole, "small: one exchange inside each host, one between hosts")
        }
        (false, Kind::AllReduce | Kind::AllGather | Kind::AllGatherVaried | Kind::Broadcast)
            if tiered =>
        {
            (
                Algorithm::TieredShares,
                "hosts have several ranks: each byte crosses between them once",
            )
        }
        (false, Kind::AllReduce | Kind::Barrier | Kind::Bucket | Kind::Subgroup)
            if bytes <= thresholds.doubling =>
        {
            (Algorithm::RecursiveDoubling, "small: the fewest messages")
        }
        (false, Kind::Broadcast) if bytes <= thresholds.tree => {
            (Algorithm::Tree, "small: the fewest messages in a row")
        }
        (false, Kind::AllReduce) if ranks > 2 && bytes <= thresholds.halving => {
            (Algorithm::HalvingDoubling, "medium: few messages, each byte sent about twice")
        }
        (false, Kind::AllToAll | Kind::AllToAllVaried) => {
            (Algorithm::Pairwise, "each byte is sent once, straight to where it belongs")
        }
        (false, Kind::ReduceScatter | Kind::ReduceScatterVaried)
            if ranks > 2 && ranks.is_power_of_two() && bytes <= thresholds.halving =>
        {
            (Algorithm::Halving, "small: the fewest messages, each byte sent about once")
        }
        (false, Kind::ReduceScatter | Kind::ReduceScatterVaried) => {
            (Algorithm::Ring, "all links busy in both directions, each byte sent about once")
        }
        (false, _) => (
            Algorithm::Ring,
            "large: all links busy in both directions, each byte sent about twice",
        ),
    };
    Plan { algorithm, chunk, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Algorithm::{
        Alone, Direct, Halving, HalvingDoubling, InPlace, Inline, OneShot, Pairwise,
        RecursiveDoubling, Ring, TieredShares, TieredWhole, Tree, TwoShot,
    };

    #[test]
    fn every_band_has_its_algorithm() {
        let host = |ranks| Topology { ranks, shared: true, cores: 8, tiered: false };
        let hosts = |ranks| Topology { ranks, shared: false, cores: 8, tiered: false };
        let tiered = Topology { tiered: true, ..hosts(4) };
        let cases = [
            (Kind::AllReduce, 1 << 30, false, host(1), Alone),
            (Kind::AllReduce, 40, true, host(2), Inline),
            (Kind::AllReduce, 41, true, host(2), OneShot),
            (Kind::AllReduce, 2 << 10, true, host(2), OneShot),
            (Kind::AllReduce, (2 << 10) + 1, true, host(2), InPlace),
            (Kind::AllReduce, (2 << 10) + 1, false, host(2), TwoShot),
            (Kind::AllReduce, 8 << 10, true, host(9), OneShot),
            (Kind::AllReduce, (8 << 10) + 1, true, host(9), InPlace),
            (Kind::AllReduce, (8 << 10) + 1, false, host(9), TwoShot),
            (Kind::AllGather, 1 << 20, false, host(8), OneShot),
            (Kind::AllGather, 1 << 20, true, host(8), InPlace),
            (Kind::Broadcast, 1 << 20, true, host(8), InPlace),
            (Kind::Barrier, 0, false, host(8), Inline),
            (Kind::Barrier, 0, false, hosts(8), RecursiveDoubling),
            (Kind::AllReduce, 10 << 10, true, hosts(8), RecursiveDoubling),
            (Kind::AllReduce, 512 << 10, false, hosts(8), HalvingDoubling),
            (Kind::AllReduce, 512 << 10, false, hosts(2), Ring),
            (Kind::AllReduce, 1 << 20, false, hosts(8), Ring),
            (Kind::AllGather, 4, false, hosts(8), Ring),
            (Kind::Broadcast, 4, false, hosts(8), Tree),
            (Kind::Broadcast, 1 << 20, false, hosts(8), Ring),
            (Kind::ReduceScatter, 4, false, host(8), OneShot),
            (Kind::ReduceScatter, 1 << 20, true, host(8), InPlace),
            (Kind::ReduceScatter, 512 << 10, true, hosts(8), Halving),
            (Kind::ReduceScatterVaried, 4, false, hosts(6), Ring),
            (Kind::ReduceScatterVaried, 1 << 20, false, hosts(8), Ring),
            (Kind::AllToAll, 2 << 10, true, host(8), OneShot),
            (Kind::AllToAllVaried, 1 << 20, true, host(8), InPlace),
            (Kind::AllToAllVaried, 4, false, hosts(8), Pairwise),
            (Kind::Send, 4, false, host(8), Direct),
            (Kind::Receive, 4, false, hosts(8), Direct),
            (Kind::AllReduce, 10 << 10, true, tiered, TieredWhole),
            (Kind::AllReduce, (10 << 10) + 1, true, tiered, TieredShares),
            (Kind::AllReduce, 1 << 20, false, tiered, TieredShares),
            (Kind::AllGather, 4, false, tiered, TieredShares),
            (Kind::Broadcast, 4, false, tiered, TieredWhole),
            (Kind::Broadcast, 1 << 20, false, tiered, TieredShares),
            (Kind::Barrier, 0, false, tiered, TieredWhole),
            (Kind::ReduceScatter, 1 << 20, false, tiered, Ring),
            (Kind::AllToAll, 1 << 20, false, tiered, Pairwise),
        ];
        for (kind, bytes, registered, topology, expected) in cases {
            let plan = choose(kind, bytes, registered, &topology, &Thresholds::default());
            assert_eq!(
                plan.algorithm, expected,
                "{kind:?} of {bytes} on {topology:?}: {}",
                plan.reason
            );
        }
    }

    #[test]
    fn thresholds_that_cannot_work_are_corrected() {
        let silly = Thresholds { inline: 1000, chunk: 0, ..Thresholds::default() };
        let topology = Topology { ranks: 2, shared: true, cores: 2, tiered: false };
        let plan = choose(Kind::AllReduce, 41, false, &topology, &silly);
        assert_eq!((plan.algorithm, plan.chunk), (OneShot, MIN_CHUNK));
    }

    #[test]
    fn crowded_ranks_exchange_less_often() {
        let chunk = |cores| {
            let topology = Topology { ranks: 4, shared: true, cores, tiered: false };
            choose(Kind::AllReduce, 1 << 20, false, &topology, &Thresholds::default()).chunk
        };
        assert!(chunk(2) > chunk(4));
    }
}
