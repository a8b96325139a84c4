//! Measures a group by its own calls, on all ranks together, in about a tenth of a second.
//!
//! The algorithm that is measured is forced by thresholds. All trials are made in turn, several times over, and the best
//! pass of each counts: ranks that have just started may share a core for a while, and whatever else runs on the machine
//! makes a call slower, never faster. All ranks agree on every time (the slowest rank's) and with it on how often to
//! repeat and when to stop, so that they make the same calls.

use super::{Constants, Contest, Cost};
use crate::{
    Group, Kind, ReduceOp,
    error::Result,
    plan::{Algorithm, Thresholds, Topology},
};
use std::time::{Duration, Instant};

/// No pass begins after this, and nothing in the first; what is missing stays unknown.
const BUDGET: Duration = Duration::from_millis(100);
/// How often everything is tried.
const PASSES: usize = 5;
/// About how long one trial takes in one pass, in nanoseconds.
const EACH: f64 = 0.5e6;
/// Bounds of how often its call is made.
const REPEATS: (f64, f64) = (2.0, 12.0);

/// The smallest tensor, in bytes.
const TINY: usize = 8;
/// Several chunks.
const LARGE: usize = 2 << 20;
/// Around where one-shot gives way to two-shot.
const SHOTS: [usize; 2] = [1 << 10, 16 << 10];
/// Around where whole vectors give way to halves, or for two ranks to the ring.
const VECTORS: [usize; 2] = [2 << 10, 32 << 10];
/// Around where halves give way to the ring.
const HALVES: [usize; 2] = [64 << 10, 512 << 10];
/// Around where the tree gives way to the ring.
const TREES: [usize; 2] = [8 << 10, 256 << 10];

/// A call that is tried.
#[derive(Clone, Copy)]
struct Trial {
    kind: Kind,
    bytes: usize,
    algorithm: Algorithm,
    /// What makes the group use it.
    thresholds: Thresholds,
    time: f64,
}

pub(crate) fn measure(group: &Group) -> Result<Constants> {
    if group.size() == 1 {
        return Ok(Constants::UNKNOWN);
    }
    let mut trials = match group.topology() {
        Topology { shared: true, .. } => in_memory(),
        Topology { tiered: true, .. } => over_tiers(),
        Topology { ranks, .. } => over_links(*ranks),
    };
    let mut memory = vec![0f32; LARGE / size_of::<f32>()];
    let start = Instant::now();
    for pass in 0..PASSES {
        for trial in &mut trials {
            let elapsed = start.elapsed().as_nanos() as f64;
            let Some(time) = timed(group, trial, &mut memory, (pass > 0, elapsed))? else {
                return Ok(constants(group, &trials));
            };
            trial.time = trial.time.min(time);
        }
    }
    Ok(constants(group, &trials))
}

impl Trial {
    fn new(kind: Kind, bytes: usize, algorithm: Algorithm, thresholds: Thresholds) -> Self {
        Self { kind, bytes, algorithm, thresholds, time: f64::NAN }
    }
}

/// An algorithm below the threshold, and above it.
const ALWAYS: usize = usize::MAX;
const NEVER: usize = 0;

fn in_memory() -> Vec<Trial> {
    let shots = |bytes| Thresholds {
        inline: NEVER,
        one_shot: bytes,
        one_shot_crowded: bytes,
        ..Thresholds::default()
    };
    let mut trials =
        vec![Trial::new(Kind::AllReduce, TINY, Algorithm::Inline, Thresholds::default())];
    for bytes in SHOTS {
        for (algorithm, until) in [(Algorithm::OneShot, ALWAYS), (Algorithm::TwoShot, NEVER)] {
            trials.push(Trial::new(Kind::AllReduce, bytes, algorithm, shots(until)));
        }
        trials.push(Trial::new(Kind::AllGather, bytes, Algorithm::OneShot, shots(ALWAYS)));
    }
    for chunk in Constants::CHUNKS {
        let thresholds = Thresholds { chunk, chunk_crowded: chunk, ..shots(NEVER) };
        trials.push(Trial::new(Kind::AllReduce, LARGE, Algorithm::TwoShot, thresholds));
    }
    trials
}

fn over_links(ranks: usize) -> Vec<Trial> {
    let all_reduce = |doubling, halving| Thresholds { doubling, halving, ..Thresholds::default() };
    let doubling = (Algorithm::RecursiveDoubling, all_reduce(ALWAYS, ALWAYS));
    let halving = (Algorithm::HalvingDoubling, all_reduce(NEVER, ALWAYS));
    let ring = (Algorithm::Ring, all_reduce(NEVER, NEVER));
    let second = if ranks > 2 { halving } else { ring };
    let mut trials = Vec::new();
    let mut add = |kind, bytes, (algorithm, thresholds)| {
        trials.push(Trial::new(kind, bytes, algorithm, thresholds));
    };
    add(Kind::AllReduce, TINY, doubling);
    for bytes in VECTORS {
        add(Kind::AllReduce, bytes, doubling);
        add(Kind::AllReduce, bytes, second);
    }
    let [_, large] = HALVES;
    if ranks == 2 {
        add(Kind::AllReduce, large, ring);
        return trials;
    }
    for bytes in HALVES {
        add(Kind::AllReduce, bytes, halving);
        add(Kind::AllReduce, bytes, ring);
    }
    for bytes in TREES {
        for (algorithm, tree) in [(Algorithm::Tree, ALWAYS), (Algorithm::Ring, NEVER)] {
            let thresholds = Thresholds { tree, ..Thresholds::default() };
            add(Kind::Broadcast, bytes, (algorithm, thresholds));
        }
    }
    trials
}

/// Hosts with several ranks: whole vectors or shares between them.
fn over_tiers() -> Vec<Trial> {
    let until = |tiered_whole| Thresholds { tiered_whole, ..Thresholds::default() };
    let whole = |bytes| Trial::new(Kind::AllReduce, bytes, Algorithm::TieredWhole, until(ALWAYS));
    let shares = |bytes| Trial::new(Kind::AllReduce, bytes, Algorithm::TieredShares, until(NEVER));
    let vectors = VECTORS.into_iter().flat_map(|bytes| [whole(bytes), shares(bytes)]);
    std::iter::once(whole(TINY)).chain(vectors).collect()
}

/// What the times say.
fn constants(group: &Group, trials: &[Trial]) -> Constants {
    let time = |kind, bytes, algorithm| {
        let same =
            |trial: &&Trial| (trial.kind, trial.bytes, trial.algorithm) == (kind, bytes, algorithm);
        trials.iter().find(same).map_or(f64::NAN, |trial| trial.time)
    };
    let contest = |kind, [short, long]: [usize; 2], first, second| {
        let cost = |algorithm| {
            let point = |bytes| (bytes, time(kind, bytes, algorithm));
            Cost::through(point(short), point(long))
        };
        Contest { small: cost(first), large: cost(second) }
    };
    let ranks = group.size() as f64;
    let mut constants = Constants::UNKNOWN;
    if group.shares_memory() {
        constants.exchange = time(Kind::AllReduce, TINY, Algorithm::Inline);
        constants.one_shot =
            contest(Kind::AllReduce, SHOTS, Algorithm::OneShot, Algorithm::TwoShot);
        // A byte is copied into the stage, and those of all ranks out of it; or those of all ranks are combined.
        let [short, long] = SHOTS;
        let gathered = |bytes| (bytes, time(Kind::AllGather, bytes, Algorithm::OneShot));
        let copied = Cost::through(gathered(short), gathered(long)).byte / (1.0 + ranks);
        constants.copy = positive(1.0 / copied);
        constants.reduce = positive(ranks / (constants.one_shot.small.byte - copied));
        let chunks = trials.iter().filter(|trial| trial.bytes == LARGE);
        for (slot, trial) in constants.chunks.iter_mut().zip(chunks) {
            *slot = trial.time;
        }
        return constants;
    }
    if group.topology().tiered {
        let [whole, shares] = [Algorithm::TieredWhole, Algorithm::TieredShares];
        constants.exchange = time(Kind::AllReduce, TINY, whole);
        constants.doubling = contest(Kind::AllReduce, VECTORS, whole, shares);
        return constants;
    }
    let doubling = Algorithm::RecursiveDoubling;
    constants.exchange = time(Kind::AllReduce, TINY, doubling);
    constants.latency =
        constants.exchange / f64::from(group.size().next_power_of_two().ilog2().max(1));
    let [_, large] = HALVES;
    let sent = 2.0 * (ranks - 1.0) / ranks * large as f64;
    constants.bandwidth = positive(sent / time(Kind::AllReduce, large, Algorithm::Ring));
    let halving = Algorithm::HalvingDoubling;
    let second = if group.size() > 2 { halving } else { Algorithm::Ring };
    constants.doubling = contest(Kind::AllReduce, VECTORS, doubling, second);
    constants.halving = contest(Kind::AllReduce, HALVES, halving, Algorithm::Ring);
    constants.tree = contest(Kind::Broadcast, TREES, Algorithm::Tree, Algorithm::Ring);
    constants
}

/// A speed that makes sense, or not a number.
fn positive(speed: f64) -> f64 {
    if speed.is_finite() && speed > 0.0 { speed } else { f64::NAN }
}

/// The lower quartile of a trial's times in nanoseconds, on the slowest rank; not a number if the group would carry the
/// call out in another way. `None` when the time is used up: `late` says whether it may be, and how much of it is.
fn timed(
    group: &Group,
    trial: &Trial,
    memory: &mut Vec<f32>,
    (late, elapsed): (bool, f64),
) -> Result<Option<f64>> {
    let group = &group.with_thresholds(trial.thresholds);
    if group.explain(trial.kind, trial.bytes, false).algorithm != trial.algorithm {
        return Ok(Some(f64::NAN));
    }
    let first = once(group, trial, memory)?;
    let mut agreed = [first, elapsed];
    group.all_reduce(&mut agreed, ReduceOp::Max)?;
    let [first, elapsed] = agreed;
    // The first pass may take longer, for there is nothing without it, but not for ever.
    let budget = BUDGET.as_nanos() as f64;
    if elapsed > if late { budget } else { 2.0 * budget } {
        return Ok(None);
    }
    let repeats = (EACH / first).clamp(REPEATS.0, REPEATS.1) as usize;
    let mut times =
        (0..repeats).map(|_| once(group, trial, memory)).collect::<Result<Vec<f64>>>()?;
    times.sort_by(f64::total_cmp);
    let mut quartile = [times[repeats / 4]];
    group.all_reduce(&mut quartile, ReduceOp::Max)?;
    Ok(Some(quartile[0]))
}

fn once(group: &Group, trial: &Trial, memory: &mut Vec<f32>) -> Result<f64> {
    let len = trial.bytes / size_of::<f32>();
    let needed = len * (group.size() + 1);
    if trial.kind == Kind::AllGather && memory.len() < needed {
        memory.resize(needed, 0.0);
    }
    group.barrier()?;
    let start = Instant::now();
    match trial.kind {
        Kind::AllGather => {
            let (input, output) = memory.split_at_mut(len);
            group.all_gather(input, &mut output[..len * group.size()])?;
        }
        Kind::Broadcast => group.broadcast(&mut memory[..len], 0)?,
        _ => group.all_reduce(&mut memory[..len], ReduceOp::Sum)?,
    }
    Ok(start.elapsed().as_nanos() as f64)
}
