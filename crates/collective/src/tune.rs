//! Thresholds for the machine at hand: measured once, kept per host, the same on all ranks.
//!
//! Measuring (`measure`), keeping (`cache`) and deciding are apart: [`decide`] is a pure
//! function from constants and topology to thresholds, each with its reason.
//!
//! - TUNE-1: all ranks decide from the same constants: those that rank 0 has kept, or those that all have measured
//!   together, where the slowest rank's time counts.
//! - TUNE-2: a threshold that is not measured, or measured to nonsense, is the default. Others are powers of two near it,
//!   so that noise moves none of them far and runs on the same machine mostly decide the same.
//! - TUNE-3: a cache that cannot be read or written is measured anew and never an error.

pub(crate) mod cache;
pub(crate) mod measure;

use crate::{
    Group,
    error::Result,
    plan::{Thresholds, Topology},
};
use std::{fmt, path::PathBuf};

/// Where a group's thresholds come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tuning {
    /// From [`crate::GroupOptions::thresholds`]: the plan is a function of the call and the topology only.
    #[default]
    Off,
    /// From what was measured on the host of rank 0 before and lies in this folder; if nothing does, it is measured now
    /// and put there. Every rank passes this variant; only rank 0's folder is used.
    Cached(PathBuf),
    /// Measured now, in about a tenth of a second, and kept nowhere.
    Measured,
}

impl Tuning {
    /// [`Tuning::Cached`] in the user's folder for such things, `$XDG_CACHE_HOME/deuteron` or `~/.cache/deuteron`;
    /// [`Tuning::Measured`] where there is none.
    pub fn automatic() -> Self {
        let absolute = |name: &str| {
            std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
        };
        absolute("XDG_CACHE_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
            .map_or(Self::Measured, |folder| Self::Cached(folder.join("deuteron")))
    }
}

/// What an algorithm's time is made of, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// However small the tensor.
    pub fixed: f64,
    /// For each byte of it.
    pub byte: f64,
}

impl Cost {
    /// The line through two measured times.
    pub(crate) fn through((small, short): (usize, f64), (large, long): (usize, f64)) -> Self {
        let byte = (long - short) / (large as f64 - small as f64);
        Self { fixed: short - byte * small as f64, byte }
    }

    fn makes_sense(&self) -> bool {
        self.fixed.is_finite() && self.byte.is_finite() && self.byte > 0.0
    }
}

/// Two algorithms for the same call, around the size where one gives way to the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contest {
    /// The one for small tensors.
    pub small: Cost,
    /// The one for large tensors.
    pub large: Cost,
}

/// What is measured of a machine and a group on it. What was not measured is not a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// The smallest call, one exchange among all ranks, in nanoseconds.
    pub exchange: f64,
    /// Bytes that a rank copies from and to shared memory in a nanosecond, while all do.
    pub copy: f64,
    /// Bytes that a rank reads and combines in a nanosecond.
    pub reduce: f64,
    /// One message between partners over links, in nanoseconds.
    pub latency: f64,
    /// Bytes that a link carries each way in a nanosecond.
    pub bandwidth: f64,
    /// One-shot against two-shot.
    pub one_shot: Contest,
    /// Whole vectors against halves, or against the ring if there are two ranks.
    pub doubling: Contest,
    /// Halves against the ring.
    pub halving: Contest,
    /// Tree against relay.
    pub tree: Contest,
    /// The two-shot of a large tensor in chunks of [`Constants::CHUNKS`] bytes, in nanoseconds.
    pub chunks: [f64; 4],
}

impl Constants {
    /// Chunks that are tried.
    pub const CHUNKS: [usize; 4] = [128 << 10, 256 << 10, 512 << 10, 1 << 20];

    const UNKNOWN_COST: Cost = Cost { fixed: f64::NAN, byte: f64::NAN };
    const UNKNOWN_CONTEST: Contest =
        Contest { small: Self::UNKNOWN_COST, large: Self::UNKNOWN_COST };

    /// Nothing is known yet.
    pub const UNKNOWN: Self = Self {
        exchange: f64::NAN,
        copy: f64::NAN,
        reduce: f64::NAN,
        latency: f64::NAN,
        bandwidth: f64::NAN,
        one_shot: Self::UNKNOWN_CONTEST,
        doubling: Self::UNKNOWN_CONTEST,
        halving: Self::UNKNOWN_CONTEST,
        tree: Self::UNKNOWN_CONTEST,
        chunks: [f64::NAN; 4],
    };

    /// All numbers with their names, in the order of [`Constants::numbers_mut`].
    pub(crate) const NAMES: [&'static str; 25] = [
        "exchange",
        "copy",
        "reduce",
        "latency",
        "bandwidth",
        "one-shot.small.fixed",
        "one-shot.small.byte",
        "one-shot.large.fixed",
        "one-shot.large.byte",
        "doubling.small.fixed",
        "doubling.small.byte",
        "doubling.large.fixed",
        "doubling.large.byte",
        "halving.small.fixed",
        "halving.small.byte",
        "halving.large.fixed",
        "halving.large.byte",
        "tree.small.fixed",
        "tree.small.byte",
        "tree.large.fixed",
        "tree.large.byte",
        "chunk.131072",
        "chunk.262144",
        "chunk.524288",
        "chunk.1048576",
    ];

    pub(crate) fn numbers_mut(&mut self) -> [&mut f64; 25] {
        let Self { one_shot, doubling, halving, tree, chunks: [a, b, c, d], .. } = self;
        [
            &mut self.exchange,
            &mut self.copy,
            &mut self.reduce,
            &mut self.latency,
            &mut self.bandwidth,
            &mut one_shot.small.fixed,
            &mut one_shot.small.byte,
            &mut one_shot.large.fixed,
            &mut one_shot.large.byte,
            &mut doubling.small.fixed,
            &mut doubling.small.byte,
            &mut doubling.large.fixed,
            &mut doubling.large.byte,
            &mut halving.small.fixed,
            &mut halving.small.byte,
            &mut halving.large.fixed,
            &mut halving.large.byte,
            &mut tree.small.fixed,
            &mut tree.small.byte,
            &mut tree.large.fixed,
            &mut tree.large.byte,
            a,
            b,
            c,
            d,
        ]
    }

    pub(crate) fn numbers(mut self) -> [f64; 25] {
        self.numbers_mut().map(|number| *number)
    }

    pub(crate) fn from_numbers(numbers: &[f64; 25]) -> Self {
        let mut constants = Self::UNKNOWN;
        for (slot, number) in constants.numbers_mut().into_iter().zip(numbers) {
            *slot = *number;
        }
        constants
    }
}

/// One threshold, and why it is what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The field of [`Thresholds`].
    pub name: &'static str,
    /// Its value.
    pub bytes: usize,
    /// Why, in one sentence.
    pub reason: String,
}

/// What a group's tuning came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// What was measured.
    pub constants: Constants,
    /// The file that it was read from, if it was, or that it was written to.
    pub file: Option<PathBuf>,
    /// Whether it was measured for this group.
    pub fresh: bool,
    /// What follows for the group.
    pub thresholds: Thresholds,
    /// The thresholds that matter to the group, with their reasons.
    pub decisions: Vec<Decision>,
}

/// The thresholds for a machine of which `constants` are known. A pure function.
///
/// ```
/// use deuteron_collective::{plan::{Thresholds, Topology}, tune::{Constants, decide}};
/// let topology = Topology { ranks: 4, shared: true, cores: 8, tiered: false };
/// let (thresholds, decisions) = decide(&Constants::UNKNOWN, &topology);
/// assert_eq!(thresholds, Thresholds::default());
/// assert!(decisions.iter().all(|decision| decision.reason.contains("the default")));
/// ```
pub fn decide(constants: &Constants, topology: &Topology) -> (Thresholds, Vec<Decision>) {
    let defaults = Thresholds::default();
    let mut thresholds = defaults;
    let mut decisions = Vec::new();
    let mut note = |name, (bytes, reason): (usize, String)| {
        decisions.push(Decision { name, bytes, reason });
        bytes
    };
    let Topology { ranks, shared, cores, .. } = *topology;
    if ranks == 1 {
        return (thresholds, decisions);
    }
    if shared {
        let crowded = ranks > cores;
        let (default_shot, default_chunk) = match crowded {
            true => (defaults.one_shot_crowded, defaults.chunk_crowded),
            false => (defaults.one_shot, defaults.chunk),
        };
        let names = ["reading everything", "a second exchange"];
        let one_shot = note(
            "one_shot",
            crossing(&constants.one_shot, default_shot, constants.exchange, names),
        );
        let chunk = note("chunk", quickest_chunk(&constants.chunks, default_chunk));
        if crowded {
            (thresholds.one_shot_crowded, thresholds.chunk_crowded) = (one_shot, chunk);
        } else {
            (thresholds.one_shot, thresholds.chunk) = (one_shot, chunk);
        }
        return (thresholds, decisions);
    }
    if topology.tiered {
        let names = ["sending whole vectors", "sending shares"];
        let whole = crossing(&constants.doubling, defaults.tiered_whole, f64::NAN, names);
        thresholds.tiered_whole = note("tiered_whole", whole);
        return (thresholds, decisions);
    }
    let names = ["sending whole vectors", if ranks > 2 { "sending halves" } else { "the ring" }];
    thresholds.doubling = note(
        "doubling",
        crossing(&constants.doubling, defaults.doubling, constants.exchange, names),
    );
    if ranks > 2 {
        let names = ["sending halves", "the ring"];
        let (bytes, reason) = crossing(&constants.halving, defaults.halving, f64::NAN, names);
        thresholds.halving = note("halving", (bytes.max(thresholds.doubling), reason));
        let names = ["the tree", "the ring"];
        thresholds.tree = note("tree", crossing(&constants.tree, defaults.tree, f64::NAN, names));
    }
    (thresholds, decisions)
}

/// A threshold is at most this many times the default, and at least that part of it.
const REACH: usize = 4;
/// The same where one algorithm seems to win at any size: what was measured ends somewhere.
const STEP: usize = 2;
/// Lines whose bytes cost nearly the same cross anywhere.
const PARALLEL: f64 = 0.03;
/// How many times more or less than it should the second may cost to begin with.
const PLAUSIBLE: f64 = 4.0;

/// The size up to which the first costs less than the second, which should cost about `extra` more to begin with.
fn crossing(
    contest: &Contest,
    default: usize,
    extra: f64,
    [small, large]: [&str; 2],
) -> (usize, String) {
    let Contest { small: first, large: second } = contest;
    let usual = |why: String| (default, format!("{why}: {} is the default", Bytes(default)));
    if !first.makes_sense() || !second.makes_sense() {
        return usual("it could not be measured".into());
    }
    let gain = first.byte - second.byte;
    let behind = second.fixed - first.fixed;
    let plausible = extra / PLAUSIBLE..=extra * PLAUSIBLE;
    if (extra.is_finite() && !plausible.contains(&behind)) || (behind < 0.0 && gain < 0.0) {
        return usual("the measurements contradict each other".into());
    }
    if gain.abs() < PARALLEL * first.byte {
        return usual(format!("{small} and {large} cost the same"));
    }
    let wins = |winner: &str, loser: &str| {
        format!("{winner} costs less than {loser} at any size that was measured")
    };
    if gain < 0.0 {
        return (default * STEP, wins(small, large));
    }
    if behind <= 0.0 {
        return (default / STEP, wins(large, small));
    }
    let rounded = 2f64.powi((behind / gain).log2().round() as i32);
    let (least, most) = (default / REACH, default * REACH);
    let bytes = (rounded.min(most as f64) as usize).clamp(least, most);
    let text = format!(
        "{large} costs {} more to begin with and {gain:.3} ns less a byte than {small}",
        Time(behind)
    );
    (bytes, text)
}

/// A chunk that is at least this much quicker than the default.
const QUICKER: f64 = 0.95;

fn quickest_chunk(times: &[f64; 4], default: usize) -> (usize, String) {
    let sense = |time: &f64| time.is_finite() && *time > 0.0;
    let known = Constants::CHUNKS.iter().position(|chunk| *chunk == default);
    let (true, Some(usual)) = (times.iter().all(sense), known.map(|index| times[index])) else {
        return (default, format!("it could not be measured: {} is the default", Bytes(default)));
    };
    let pairs = Constants::CHUNKS.iter().zip(times);
    match pairs.min_by(|one, other| one.1.total_cmp(other.1)) {
        Some((chunk, time)) if *time < QUICKER * usual => {
            let gain = (1.0 - time / usual) * 100.0;
            (*chunk, format!("large tensors take {gain:.0} % less than with {}", Bytes(default)))
        }
        _ => {
            (default, format!("no other chunk is much quicker: {} is the default", Bytes(default)))
        }
    }
}

/// Tunes a group that has just been made. Every rank calls it with the same variant.
pub(crate) fn tune(group: &Group, tuning: &Tuning) -> Result<Option<Tuned>> {
    let topology = &group.inner.topology;
    let place = match tuning {
        Tuning::Off => return Ok(None),
        Tuning::Cached(folder) if group.rank() == 0 => {
            Some(cache::Place::new(folder, &cache::key(group)))
        }
        Tuning::Cached(_) | Tuning::Measured => None,
    };
    let kept = place.as_ref().and_then(cache::Place::read);
    // TUNE-1: whether rank 0 knows, and what.
    let mut told = [0f64; 26];
    if let Some(kept) = &kept {
        told[0] = 1.0;
        told[1..].copy_from_slice(&kept.numbers());
    }
    group.broadcast(&mut told, 0)?;
    let (known, numbers) =
        told.split_first_chunk::<1>().map_or((0.0, &[][..]), |(first, rest)| (first[0], rest));
    let (constants, fresh) = match <&[f64; 25]>::try_from(numbers) {
        Ok(numbers) if known == 1.0 => (Constants::from_numbers(numbers), false),
        _ => (measure::measure(group)?, true),
    };
    if let Some(place) = place.as_ref().filter(|_| fresh) {
        place.write(&constants);
    }
    let (thresholds, decisions) = decide(&constants, topology);
    let file = place.map(|place| place.file().to_owned());
    Ok(Some(Tuned { constants, file, fresh, thresholds, decisions }))
}

/// Bytes in words.
struct Bytes(usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => {
                write!(f, "{} MiB", bytes >> 20)
            }
            bytes if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => {
                write!(f, "{} KiB", bytes >> 10)
            }
            bytes => write!(f, "{bytes} B"),
        }
    }
}

/// Nanoseconds in words.
struct Time(f64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} µs", self.0 / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOST: Topology = Topology { ranks: 4, shared: true, cores: 8, tiered: false };
    const HOSTS: Topology = Topology { ranks: 4, shared: false, cores: 8, tiered: false };

    fn contest(small: (f64, f64), large: (f64, f64)) -> Contest {
        let cost = |(fixed, byte)| Cost { fixed, byte };
        Contest { small: cost(small), large: cost(large) }
    }

    #[test]
    fn a_threshold_lies_where_the_costs_cross() {
        // A second exchange of 1 µs, and a quarter of a nanosecond a byte to gain: 4000 bytes.
        let one_shot = contest((1000.0, 0.5), (2000.0, 0.25));
        let constants = Constants { one_shot, ..Constants::UNKNOWN };
        let (thresholds, decisions) = decide(&constants, &HOST);
        assert_eq!(thresholds, Thresholds { one_shot: 4 << 10, ..Thresholds::default() });
        assert_eq!(decisions[0].name, "one_shot");
        assert_eq!(
            decisions[0].reason,
            "a second exchange costs 1.0 µs more to begin with and 0.250 ns less a byte than reading everything"
        );
        let crowded = Topology { cores: 2, ..HOST };
        let (thresholds, _) = decide(&constants, &crowded);
        assert_eq!(thresholds, Thresholds { one_shot_crowded: 4 << 10, ..Thresholds::default() });
    }

    #[test]
    fn links_have_three_thresholds_in_order() {
        let constants = Constants {
            doubling: contest((10e3, 3.0), (20e3, 2.0)),
            halving: contest((20e3, 2.0), (120e3, 1.5)),
            tree: contest((10e3, 2.0), (30e3, 1.0)),
            ..Constants::UNKNOWN
        };
        let (thresholds, decisions) = decide(&constants, &HOSTS);
        let Thresholds { doubling, halving, tree, .. } = thresholds;
        assert_eq!((doubling, halving, tree), (8 << 10, 256 << 10, 16 << 10));
        assert_eq!(decisions.len(), 3);
        let (pair, decisions) = decide(&constants, &Topology { ranks: 2, ..HOSTS });
        assert_eq!((pair.doubling, pair.halving), (8 << 10, Thresholds::default().halving));
        assert!(decisions[0].reason.starts_with("the ring costs 10.0 µs more"));
        // Halving never begins before doubling ends.
        let late = Constants {
            doubling: contest((10e3, 3.0), (400e3, 2.0)),
            halving: contest((20e3, 2.0), (10e3, 1.5)),
            ..constants
        };
        let (thresholds, _) = decide(&late, &HOSTS);
        assert_eq!((thresholds.doubling, thresholds.halving), (40 << 10, 256 << 10));
    }

    #[test]
    fn nonsense_is_the_default_and_extremes_are_bounded() {
        let cases = [
            (contest((1e3, -1.0), (2e3, 0.5)), 2 << 10, "could not be measured"),
            (contest((f64::NAN, 1.0), (2e3, 0.5)), 2 << 10, "could not be measured"),
            (contest((1e3, 1.0), (2e3, 0.99)), 2 << 10, "cost the same"),
            (contest((2e3, 0.5), (1e3, 1.0)), 2 << 10, "contradict"),
            (contest((1e3, 0.5), (2e3, 1.0)), 4 << 10, "reading everything costs less"),
            (contest((2e3, 1.0), (1e3, 0.5)), 1 << 10, "a second exchange costs less"),
            (contest((1.0, 1.0), (1e300, 0.5)), 8 << 10, "more to begin with"),
        ];
        for (one_shot, expected, reason) in cases {
            let (thresholds, decisions) =
                decide(&Constants { one_shot, ..Constants::UNKNOWN }, &HOST);
            assert_eq!(thresholds.one_shot, expected, "{one_shot:?}");
            assert!(decisions[0].reason.contains(reason), "{}", decisions[0].reason);
        }
    }

    /// A second exchange costs about an exchange, or nothing can be concluded.
    #[test]
    fn what_cannot_be_is_not_believed() {
        let decided = |exchange| {
            let one_shot = contest((1000.0, 0.5), (2000.0, 0.25));
            decide(&Constants { exchange, one_shot, ..Constants::UNKNOWN }, &HOST).0.one_shot
        };
        assert_eq!([900.0, 300.0, 3000.0].map(decided), [4 << 10; 3]);
        assert_eq!([100.0, 10_000.0].map(decided), [2 << 10; 2]);
    }

    #[test]
    fn another_chunk_has_to_be_worth_it() {
        let chunk = |chunks| decide(&Constants { chunks, ..Constants::UNKNOWN }, &HOST).0.chunk;
        assert_eq!(chunk([100.0, 98.0, 97.0, 96.0]), 256 << 10);
        assert_eq!(chunk([100.0, 98.0, 97.0, 60.0]), 1 << 20);
        assert_eq!(chunk([50.0, 98.0, 97.0, 60.0]), 128 << 10);
        assert_eq!(chunk([50.0, 0.0, 97.0, 60.0]), 256 << 10);
        assert_eq!(chunk([50.0, f64::NAN, 97.0, 60.0]), 256 << 10);
    }

    #[test]
    fn one_rank_has_nothing_to_tune() {
        let (thresholds, decisions) = decide(
            &Constants::UNKNOWN,
            &Topology { ranks: 1, shared: true, cores: 1, tiered: false },
        );
        assert_eq!((thresholds, decisions), (Thresholds::default(), Vec::new()));
    }

    #[test]
    fn a_line_goes_through_its_points() {
        let line = Cost::through((1000, 3000.0), (5000, 11000.0));
        assert_eq!(line, Cost { fixed: 1000.0, byte: 2.0 });
    }

    proptest! {
        #[test]
        fn whatever_is_measured_gives_thresholds_within_bounds(
            numbers in prop::collection::vec(prop::num::f64::ANY, 25),
            ranks in 1usize..70,
            cores in 1usize..70,
            shared: bool,
        ) {
            let numbers = <[f64; 25]>::try_from(numbers).unwrap();
            let constants = Constants::from_numbers(&numbers);
            let same = constants.numbers().map(f64::to_bits) == numbers.map(f64::to_bits);
            prop_assert!(same);
            let (thresholds, _) = decide(&constants, &Topology { ranks, shared, cores, tiered: false });
            let defaults = Thresholds::default();
            let pairs = [
                (thresholds.one_shot, defaults.one_shot),
                (thresholds.one_shot_crowded, defaults.one_shot_crowded),
                (thresholds.doubling, defaults.doubling),
                (thresholds.halving, defaults.halving),
                (thresholds.tree, defaults.tree),
            ];
            for (found, default) in pairs {
                prop_assert!((default / REACH..=default * REACH).contains(&found));
            }
            for chunk in [thresholds.chunk, thresholds.chunk_crowded] {
                prop_assert!(Constants::CHUNKS.contains(&chunk));
            }
            prop_assert!(thresholds.doubling <= thresholds.halving);
        }
    }
}
