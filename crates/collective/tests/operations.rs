//! Every operation on every transport against a sequential reference.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

mod support;

use deuteron_collective::{
    Bucket, DType, Error, Group, Kind, ReduceOp, Reduction,
    plan::{Algorithm, Thresholds},
};
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestRunner},
};
use std::{
    collections::BTreeSet,
    process::Command,
    sync::{Barrier, Mutex},
    thread,
};
use support::{
    Limit, Over, all,
    reference::{Sample, Style, digest, input, scatter, with_type},
    run, run_with,
};

/// Where the ranks' tensors lie.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Plain,
    /// At the start of a bucket.
    Bucket,
    /// At the same place inside a bucket.
    Inside,
    /// At different places of a bucket.
    Shifted,
    /// The ranks with a bit in a bucket, the others not.
    Mixed(u8),
    /// In different buckets.
    Scattered,
}

/// One call as all ranks make it.
#[derive(Clone, Debug)]
struct Step {
    kind: Kind,
    dtype: DType,
    count: usize,
    reduction: Reduction,
    style: Style,
    root: usize,
    place: Place,
    seed: u64,
}

/// Memory for one tensor, inside more memory that must not change.
struct Room<T> {
    plain: Vec<T>,
    buckets: Vec<Bucket<T>>,
    registered: Option<usize>,
    start: usize,
    len: usize,
}

impl<T: Sample> Room<T> {
    const MARGIN: usize = 32;

    fn new(group: &Group, place: Place, len: usize) -> Result<Self, Error> {
        let rank = group.rank();
        let (buckets, registered, start) = match place {
            Place::Plain => (0, None, 1 + rank % 3),
            Place::Bucket => (1, Some(0), 0),
            Place::Inside => (1, Some(0), 5),
            Place::Shifted => (1, Some(0), 3 + 2 * rank),
            Place::Mixed(mask) => (1, Some(0).filter(|_| mask >> rank & 1 == 1), 7),
            Place::Scattered => (2, Some(rank % 2), 2),
        };
        let buckets = (0..buckets)
            .map(|_| group.bucket(len + Self::MARGIN))
            .collect::<Result<Vec<_>, _>>()?;
        let plain = if registered.is_none() { len + Self::MARGIN } else { 0 };
        let plain = vec![T::default(); plain];
        let mut room = Self { plain, buckets, registered, start, len };
        room.memory().fill(Self::mark());
        Ok(room)
    }

    fn mark() -> T {
        T::sample(0x5a5a, Style::Exact, ReduceOp::Sum)
    }

    fn memory(&mut self) -> &mut [T] {
        match self.registered {
            Some(index) => &mut self.buckets[index],
            None => &mut self.plain,
        }
    }

    fn tensor(&mut self) -> &mut [T] {
        let range = self.start..self.start + self.len;
        &mut self.memory()[range]
    }

    /// The tensor once more, after a look at what lies around it.
    fn checked(&mut self) -> &mut [T] {
        let (start, end) = (self.start, self.start + self.len);
        let memory = self.memory();
        let around = memory[..start].iter().chain(&memory[end..]);
        assert!(around.into_iter().all(|value| value.bits() == Self::mark().bits()));
        self.tensor()
    }
}

impl Step {
    /// Whose job it is to compare with the reference; the others' bits have to be the same as its.
    fn judge(&self, group: &Group) -> bool {
        group.rank() == self.seed as usize % group.size()
    }

    /// Elements of a rank where their numbers differ.
    fn varied(&self, rank: usize) -> usize {
        match scatter(self.seed, rank, 0) % 4 {
            0 => 0,
            1 => self.count,
            _ => scatter(self.seed, rank, 1) as usize % (self.count + 1),
        }
    }

    /// Elements from one rank to another where their numbers differ.
    fn share(&self, from: usize, to: usize) -> usize {
        match scatter(self.seed, from, 1 + to) % 4 {
            0 => 0,
            1 => self.count / 2,
            _ => scatter(self.seed, from, 100 + to) as usize % (self.count / 2 + 1),
        }
    }

    fn input<T: Sample>(&self, rank: usize, count: usize) -> impl Iterator<Item = T> + use<T> {
        input(self.seed, rank, count, self.style, self.reduction.op)
    }

    fn fill<T: Sample>(&self, tensor: &mut [T], rank: usize) {
        let values = self.input(rank, tensor.len());
        for (slot, value) in tensor.iter_mut().zip(values) {
            *slot = value;
        }
    }

    /// Makes the call and returns the bits of its result in a word.
    fn perform<T: Sample>(&self, group: &Group) -> Result<u64, Error> {
        let (rank, ranks) = (group.rank(), group.size());
        match self.kind {
            Kind::AllReduce => {
                let mut room = Room::<T>::new(group, self.place, self.count)?;
                self.fill(room.tensor(), rank);
                group.all_reduce(room.tensor(), self.reduction)?;
                let result = room.checked();
                if self.judge(group) {
                    self.check_reduced(result, group);
                }
                Ok(digest(result))
            }
            Kind::AllGather => {
                let mut from = Room::<T>::new(group, self.place, self.count)?;
                let place = if self.seed.is_multiple_of(3) { Place::Inside } else { Place::Plain };
                let mut to = Room::<T>::new(group, place, self.count * ranks)?;
                self.fill(from.tensor(), rank);
                let before = digest(from.tensor());
                group.all_gather(from.tensor(), to.tensor())?;
                assert_eq!(digest(from.checked()), before);
                let counts = vec![self.count; ranks];
                Ok(self.check_gathered(to.checked(), &counts, group))
            }
            Kind::AllGatherVaried => {
                let mut from = Room::<T>::new(group, self.place, self.count)?;
                let count = self.varied(rank);
                self.fill(&mut from.tensor()[..count], rank);
                let gathered = group.all_gather_varied(&from.tensor()[..count])?;
                let counts: Vec<usize> = (0..ranks).map(|rank| self.varied(rank)).collect();
                assert_eq!(gathered.counts, counts);
                Ok(self.check_gathered(&gathered.values, &counts, group))
            }
            Kind::Broadcast => {
                let mut room = Room::<T>::new(group, self.place, self.count)?;
                self.fill(room.tensor(), rank);
                let root = self.root % ranks;
                group.broadcast(room.tensor(), root)?;
                let mut counts = vec![0; ranks];
                counts[root] = self.count;
                Ok(self.check_gathered(room.checked(), &counts, group))
            }
            Kind::ReduceScatter | Kind::ReduceScatterVaried => {
                let equal = self.kind == Kind::ReduceScatter;
                let counts: Vec<usize> = (0..ranks)
                    .map(|rank| if equal { self.count / ranks } else { self.varied(rank) })
                    .collect();
                let mut from = Room::<T>::new(group, self.place, counts.iter().sum())?;
                let place = if self.seed.is_multiple_of(3) { Place::Inside } else { Place::Plain };
                let longest = counts.iter().copied().max().unwrap_or(0);
                let mut to = Room::<T>::new(group, place, longest)?;
                self.fill(from.tensor(), rank);
                let before = digest(from.tensor());
                let output = &mut to.tensor()[..counts[rank]];
                if equal {
                    group.reduce_scatter(from.tensor(), output, self.reduction)?;
                } else {
                    group.reduce_scatter_varied(from.tensor(), &counts, output, self.reduction)?;
                }
                assert_eq!(digest(from.checked()), before);
                let parts = group.all_gather_varied(&to.checked()[..counts[rank]])?;
                assert_eq!(parts.counts, counts);
                if self.judge(group) {
                    self.check_reduced(&parts.values, group);
                }
                Ok(digest(&parts.values))
            }
            Kind::AllToAll | Kind::AllToAllVaried => {
                let equal = self.kind == Kind::AllToAll;
                let share =
                    |from, to| if equal { self.count / ranks } else { self.share(from, to) };
                let given = |from| (0..ranks).map(|to| share(from, to)).sum::<usize>();
                let longest = (0..ranks).map(given).max().unwrap_or(0);
                let mut from = Room::<T>::new(group, self.place, longest)?;
                self.fill(from.tensor(), rank);
                let before = digest(from.tensor());
                let values = if equal {
                    let mut to = Room::<T>::new(group, Place::Plain, longest)?;
                    group.all_to_all(from.tensor(), to.tensor())?;
                    to.checked().to_vec()
                } else {
                    let counts: Vec<usize> = (0..ranks).map(|to| share(rank, to)).collect();
                    let received =
                        group.all_to_all_varied(&from.tensor()[..given(rank)], &counts)?;
                    let counts: Vec<usize> = (0..ranks).map(|from| share(from, rank)).collect();
                    assert_eq!(received.counts, counts);
                    received.values
                };
                assert_eq!(digest(from.checked()), before);
                let mut values = values.iter();
                for from in 0..ranks {
                    let start = (0..rank).map(|to| share(from, to)).sum::<usize>();
                    let theirs = self.input::<T>(from, longest).skip(start);
                    for (index, expected) in theirs.take(share(from, rank)).enumerate() {
                        let value = values.next().unwrap();
                        assert_eq!(value.bits(), expected.bits(), "element {index} of rank {from}");
                    }
                }
                assert!(values.next().is_none());
                Ok(self.seed)
            }
            _ => group.barrier().map(|()| 0),
        }
    }

    fn check_reduced<T: Sample>(&self, result: &[T], group: &Group) {
        let ranks = group.size();
        let reduction = self.reduction;
        let scaled = reduction.prescale != 1.0 || reduction.postscale != 1.0;
        let picks = matches!(reduction.op, ReduceOp::Min | ReduceOp::Max) && !scaled;
        // Inside a host everything is combined in rank order and rounded once.
        let exact = self.style != Style::Rough || group.shares_memory() || picks;
        let mut inputs: Vec<_> =
            (0..ranks).map(|rank| self.input::<T>(rank, result.len())).collect();
        for (index, value) in result.iter().enumerate() {
            let values: Vec<T> = inputs.iter_mut().filter_map(Iterator::next).collect();
            let expected = T::reduce(&values, reduction);
            let right = match exact {
                true => value.bits() == expected.bits(),
                false => T::is_near(*value, &values, reduction),
            };
            assert!(right, "element {index}: {value:?}, not {expected:?}, from {values:?}");
        }
    }

    /// Compares with what each rank brought along, bit by bit.
    fn check_gathered<T: Sample>(&self, values: &[T], counts: &[usize], group: &Group) -> u64 {
        if self.judge(group) {
            assert_eq!(values.len(), counts.iter().sum::<usize>());
            let mut values = values.iter();
            for (rank, count) in counts.iter().enumerate() {
                for (index, expected) in self.input::<T>(rank, *count).enumerate() {
                    let value = values.next().unwrap();
                    assert_eq!(value.bits(), expected.bits(), "element {index} of rank {rank}");
                }
            }
        }
        digest(values)
    }

    fn algorithm(&self, group: &Group) -> Algorithm {
        let registered = matches!(self.place, Place::Bucket | Place::Inside);
        group.explain(self.kind, self.count * self.dtype.size(), registered).algorithm
    }
}

/// Makes all calls one after another; every rank must end up with the same bits. Says which algorithms it used.
fn perform(
    over: Over,
    ranks: usize,
    thresholds: Thresholds,
    steps: &[Step],
) -> (Vec<u64>, Vec<(Kind, Algorithm)>) {
    let current = Mutex::new(None);
    let options = |options: deuteron_collective::GroupOptions| options.thresholds(thresholds);
    let results = run_with(over, ranks, options, |group| {
        let mut digests = Vec::new();
        let mut algorithms = Vec::new();
        for step in steps {
            if step.judge(&group) {
                *current.lock().unwrap() = Some(step.clone());
            }
            digests.push(with_type!(step.dtype, T => step.perform::<T>(&group))?);
            algorithms.push((step.kind, step.algorithm(&group)));
        }
        Ok((digests, algorithms))
    });
    assert!(results.iter().all(Result::is_ok), "{results:?} in {current:?}");
    let mut results = all(results);
    let first = results.swap_remove(0);
    for (digests, _) in &results {
        for (index, step) in steps.iter().enumerate() {
            assert_eq!(digests[index], first.0[index], "ranks differ after {step:?}");
        }
    }
    first
}

/// Thresholds that small tensors reach, so that one call goes through many chunks.
fn tiny() -> Thresholds {
    Thresholds {
        inline: 24,
        one_shot: 300,
        one_shot_crowded: 400,
        chunk: 200,
        chunk_crowded: 264,
        doubling: 160,
        halving: 900,
        tree: 260,
        tiered_whole: 200,
        tiered_once: 528,
        tiered_chunk: 264,
    }
}

/// Around each of them, in bytes.
const TINY: &[usize] =
    &[0, 1, 8, 24, 40, 64, 160, 200, 260, 264, 300, 400, 528, 792, 900, 1_000, 2_640, 7_000];

/// The same for the thresholds that everybody has.
const LARGE: &[usize] = &[0, 1, 40, 2 << 10, 10 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20];

fn step(sizes: &'static [usize]) -> impl Strategy<Value = Step> {
    let kind = prop_oneof![
        8 => Just(Kind::AllReduce),
        2 => Just(Kind::AllGather),
        2 => Just(Kind::AllGatherVaried),
        2 => Just(Kind::Broadcast),
        1 => Just(Kind::Barrier),
        3 => Just(Kind::ReduceScatter),
        3 => Just(Kind::ReduceScatterVaried),
        2 => Just(Kind::AllToAll),
        2 => Just(Kind::AllToAllVaried),
    ];
    let place = prop_oneof![
        3 => Just(Place::Plain),
        1 => Just(Place::Bucket),
        2 => Just(Place::Inside),
        1 => Just(Place::Shifted),
        1 => any::<u8>().prop_map(Place::Mixed),
        1 => Just(Place::Scattered),
    ];
    let style =
        prop_oneof![3 => Just(Style::Exact), 3 => Just(Style::Rough), 1 => Just(Style::Special)];
    let count = (prop::sample::select(sizes), -1isize..=1);
    let dtype = prop::sample::select(&DType::ALL[..]);
    let reduction = (prop::sample::select(&ReduceOp::ALL[..]), 0usize..8, 0usize..8);
    (kind, dtype, count, reduction, style, 0usize..8, place, any::<u64>()).prop_map(
        |(kind, dtype, (bytes, more), (op, prescale, postscale), style, root, place, seed)| {
            let count = (bytes.div_ceil(dtype.size())).saturating_add_signed(more);
            // Exact results need exact factors.
            let factors = match style {
                Style::Rough => [0.5, 3.0, 1.0 / 3.0, -1.5],
                _ => [0.5, 0.5, 0.25, 1.0],
            };
            let factor = |index: usize| *factors.get(index).unwrap_or(&1.0);
            let reduction =
                Reduction::from(op).prescale(factor(prescale)).postscale(factor(postscale));
            Step { kind, dtype, count, reduction, style, root, place, seed }
        },
    )
}

/// Random calls, the same in every run. Returns the algorithms that were used.
fn random_calls(
    over: Over,
    cases: u32,
    steps: usize,
    sizes: &'static [usize],
    thresholds: Thresholds,
) -> BTreeSet<String> {
    let seen = Mutex::new(BTreeSet::new());
    let config = Config {
        cases,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(over as u64),
        max_shrink_iters: 40,
        ..Config::default()
    };
    let calls = (1usize..=8, prop::collection::vec(step(sizes), steps));
    TestRunner::new(config)
        .run(&calls, |(ranks, steps)| {
            let (_, algorithms) = perform(over, ranks, thresholds, &steps);
            let names =
                algorithms.iter().map(|(kind, algorithm)| format!("{kind:?} {algorithm:?}"));
            seen.lock().unwrap().extend(names);
            Ok(())
        })
        .unwrap();
    seen.into_inner().unwrap()
}

fn small_tensors(over: Over, cases: u32, algorithms: &[&str]) {
    let seen = random_calls(over, cases, 24, TINY, tiny());
    for algorithm in algorithms {
        assert!(seen.contains(*algorithm), "{algorithm} is not in {seen:?}");
    }
}

const SHARED: &[&str] = &[
    "AllGather InPlace",
    "AllGather Inline",
    "AllGather OneShot",
    "AllReduce Alone",
    "AllReduce InPlace",
    "AllReduce Inline",
    "AllReduce OneShot",
    "AllReduce TwoShot",
    "AllToAll InPlace",
    "AllToAll OneShot",
    "AllToAllVaried InPlace",
    "AllToAllVaried OneShot",
    "Broadcast InPlace",
    "Broadcast OneShot",
    "ReduceScatter Alone",
    "ReduceScatter InPlace",
    "ReduceScatter OneShot",
    "ReduceScatterVaried InPlace",
    "ReduceScatterVaried OneShot",
];

const LINKED: &[&str] = &[
    "AllGather Ring",
    "AllGatherVaried Ring",
    "AllReduce Alone",
    "AllReduce HalvingDoubling",
    "AllReduce RecursiveDoubling",
    "AllReduce Ring",
    "AllToAll Alone",
    "AllToAll Pairwise",
    "AllToAllVaried Pairwise",
    "Barrier RecursiveDoubling",
    "Broadcast Ring",
    "Broadcast Tree",
    "ReduceScatter Halving",
    "ReduceScatter Ring",
    "ReduceScatterVaried Halving",
    "ReduceScatterVaried Ring",
];

#[test]
fn small_tensors_over_shared_memory() {
    small_tensors(Over::SharedMemory, 100, SHARED);
}

#[test]
fn small_tensors_over_tcp() {
    small_tensors(Over::Tcp, 80, LINKED);
}

#[test]
fn small_tensors_over_tls() {
    small_tensors(Over::Tls, 40, LINKED);
}

#[test]
fn small_tensors_over_pipes_and_tcp() {
    small_tensors(Over::Mixed, 80, LINKED);
}

const TIERED: &[&str] = &[
    "AllGather TieredShares",
    "AllGatherVaried TieredShares",
    "AllReduce TieredShares",
    "AllReduce TieredWhole",
    "Barrier TieredWhole",
    "Broadcast TieredShares",
    "Broadcast TieredWhole",
];

#[test]
fn small_tensors_over_hosts_with_two_ranks() {
    small_tensors(Over::Hosts, 100, TIERED);
}

#[test]
fn small_tensors_over_unequal_hosts() {
    small_tensors(Over::Unequal, 100, TIERED);
}

#[test]
fn large_tensors() {
    for (over, cases) in [
        (Over::SharedMemory, 16),
        (Over::Tcp, 10),
        (Over::Tls, 8),
        (Over::Mixed, 10),
        (Over::Hosts, 12),
        (Over::Unequal, 12),
    ] {
        random_calls(over, cases, 8, LARGE, Thresholds::default());
    }
}

/// Every type with every operation, plain and in place, on each transport.
#[test]
fn every_type_and_operation() {
    for over in Over::ALL {
        let mut steps = Vec::new();
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                for (style, place) in [
                    (Style::Exact, Place::Plain),
                    (Style::Rough, Place::Bucket),
                    (Style::Special, Place::Inside),
                ] {
                    let seed = scatter(dtype as u64, op as usize, steps.len());
                    let count = 1 + seed as usize % 150;
                    let reduction = Reduction::from(op);
                    for kind in [Kind::AllReduce, Kind::ReduceScatter, Kind::ReduceScatterVaried] {
                        let root = 0;
                        steps.push(Step {
                            kind,
                            dtype,
                            count,
                            reduction,
                            style,
                            root,
                            place,
                            seed,
                        });
                    }
                }
            }
        }
        perform(over, 3, tiny(), &steps);
        perform(over, 4, tiny(), &steps);
    }
}

/// The order in which messages arrive does not show in the result.
#[test]
fn two_runs_give_the_same_bits() {
    for over in Over::ALL {
        for ranks in [3, 4, 7] {
            let step = |index: usize| Step {
                kind: [Kind::AllReduce, Kind::ReduceScatter][index % 2],
                dtype: [DType::F16, DType::Bf16, DType::F32, DType::F64][index / 2 % 4],
                count: 1 + scatter(9, ranks, index) as usize % 600,
                reduction: ReduceOp::Mean.into(),
                style: Style::Rough,
                root: 0,
                place: [Place::Plain, Place::Bucket, Place::Mixed(2)][index % 3],
                seed: scatter(1, ranks, index),
            };
            let steps: Vec<Step> = (0..24).map(step).collect();
            let runs = [0, 1].map(|_| perform(over, ranks, tiny(), &steps).0);
            assert_eq!(runs[0], runs[1], "{over:?} with {ranks} ranks");
        }
    }
}

/// A rank may drop its group as soon as its last call has returned: the others' last calls are whole.
#[test]
fn the_last_call_is_whole_for_everybody() {
    for over in Over::ALL {
        for round in 0..16u64 {
            let kinds = [Kind::AllReduce, Kind::Broadcast, Kind::AllGather, Kind::AllToAll];
            let kind = kinds[round as usize % kinds.len()];
            let last = Step {
                kind,
                dtype: DType::I32,
                count: [10, 5_000, 300_000][scatter(round, 0, 0) as usize % 3],
                reduction: ReduceOp::Sum.into(),
                style: Style::Exact,
                root: round as usize,
                place: Place::Plain,
                seed: round,
            };
            perform(over, 2 + round as usize % 5, Thresholds::default(), &[last]);
        }
    }
}

/// Two groups of the same threads, and groups of other threads at the same time, do not disturb each other.
#[test]
fn groups_are_independent() {
    let all_at_once = Barrier::new(Over::ALL.len());
    thread::scope(|scope| {
        for (index, over) in Over::ALL.into_iter().enumerate() {
            let all_at_once = &all_at_once;
            scope.spawn(move || {
                let steps: Vec<Step> = (0..40)
                    .map(|step| Step {
                        kind: [Kind::AllReduce, Kind::AllGather][step % 2],
                        dtype: DType::I64,
                        count: 17 * step + index,
                        reduction: ReduceOp::Sum.into(),
                        style: Style::Exact,
                        root: 0,
                        place: Place::Plain,
                        seed: (100 * index + step) as u64,
                    })
                    .collect();
                all_at_once.wait();
                perform(over, 2 + index % 2, tiny(), &steps);
            });
        }
    });
    let [one, other] = [0, 1].map(|_| deuteron_collective::LocalRendezvous::group(3));
    let _limit = Limit::seconds(60);
    thread::scope(|scope| {
        for (rank, (one, other)) in one.into_iter().zip(other).enumerate() {
            scope.spawn(move || {
                let options = Over::SharedMemory.options(rank);
                let one = Group::connect(&one, options.clone()).unwrap();
                let other = Group::connect(&other, options.share_memory(false)).unwrap();
                for round in 0..50i64 {
                    let (mut first, mut second) = ([round; 100], [rank as i64; 3]);
                    one.all_reduce(&mut first, ReduceOp::Sum).unwrap();
                    other.all_reduce(&mut second, ReduceOp::Max).unwrap();
                    assert_eq!((first, second), ([3 * round; 100], [2; 3]));
                }
            });
        }
    });
}

/// A hundred groups leave nothing behind. In a process of its own, where nobody else opens anything.
#[test]
fn groups_leave_nothing_behind() {
    const ALONE: &str = "DEUTERON_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let _limit = Limit::seconds(120);
        let name = thread::current().name().unwrap().to_owned();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
    let mappings = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("deuteron")).count()
    };
    let everything = || (entries("/proc/self/fd"), mappings(), entries("/proc/self/task"));
    let round = |over| {
        all(run(over, 3, |group| {
            let mut bucket = group.bucket::<f32>(1_000)?;
            bucket.fill(1.0);
            group.all_reduce(&mut bucket, ReduceOp::Sum)?;
            group.broadcast(&mut bucket[..10], 1)?;
            let mut output = [0.0; 300];
            group.all_to_all(&bucket[..300], &mut output)?;
            group.send(&output, (group.rank() + 1) % 3)?;
            group.receive(&mut output, (group.rank() + 2) % 3)
        }));
    };
    // What is made once per process.
    Over::ALL.into_iter().for_each(round);
    let before = everything();
    (0..100).for_each(|index| round(Over::ALL[index % Over::ALL.len()]));
    let start = std::time::Instant::now();
    // The threads of the time limits end on their own, a moment later.
    let grown = || {
        let after = everything();
        Some(after).filter(|_| after.0 > before.0 || after.1 > before.1 || after.2 > before.2)
    };
    while let Some(after) = grown() {
        assert!(start.elapsed().as_secs() < 10, "{before:?} became {after:?}");
        thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
#[ignore = "needs 10 GiB of memory; make test-large"]
fn more_elements_than_32_bits_count() {
    const COUNT: usize = (1 << 31) + 4_099;
    let value = |rank: usize, index: usize| (index % 251 + 3 * rank) as u8;
    all(run(Over::SharedMemory, 2, |group| {
        let (rank, group) = (group.rank(), group.within(std::time::Duration::from_secs(600)));
        let mut tensor: Vec<u8> = (0..COUNT).map(|index| value(rank, index)).collect();
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
        let sum = |index| value(0, index).wrapping_add(value(1, index));
        assert!(tensor.iter().enumerate().all(|(index, got)| *got == sum(index)));
        tensor.fill(rank as u8);
        if rank == 1 {
            tensor.iter_mut().enumerate().for_each(|(index, slot)| *slot = value(7, index));
        }
        group.broadcast(&mut tensor, 1)?;
        assert!(tensor.iter().enumerate().all(|(index, got)| *got == value(7, index)));
        let half = COUNT.div_ceil(2);
        let (input, mut output) = (&tensor[..half], vec![0u8; 2 * half]);
        group.all_gather(input, &mut output)?;
        assert!(output[..half] == *input && output[half..] == *input);
        Ok(())
    }));
}
