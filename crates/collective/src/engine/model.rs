//! Ranks without sockets: real tables and a real coordinator, with words and decisions that take any time.
//!
//! Every operation has to run once on all ranks that asked for it, in the same order everywhere, with the same sizes;
//! nothing may be lost, and nobody may take part in what it has not asked for unless it has joined.
//!
//! `DEUTERON_MODEL_CASES` makes more of them.

use super::{
    coordinator::{Coordinator, Rules},
    message::{Decision, Item, Shape, Word},
    table::{Event, RawTensor, Receipt, Submission, Table},
};
use crate::{DType, Error, ReduceOp, bucket::Location, call::Kind};
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestRunner},
};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// Names that programs use.
const NAMES: usize = 6;

/// One operation of a step.
#[derive(Clone, Copy, Debug)]
struct Wish {
    name: usize,
    elements: usize,
    /// This rank asks for one element more.
    odd: Option<usize>,
}

#[derive(Clone, Debug)]
struct Step {
    wishes: Vec<Wish>,
    /// The last one is not waited for before the next step begins.
    lingers: bool,
}

#[derive(Clone, Debug)]
struct Program {
    ranks: usize,
    deterministic: bool,
    steps: Vec<Step>,
    /// How many steps fewer a rank makes before it joins.
    fewer: Vec<usize>,
    seed: u64,
}

/// What a rank did because of one decision: each operation's number in the program, or none if it had not asked,
/// and its bytes.
#[derive(Clone, Debug, PartialEq)]
enum Did {
    Ran(Vec<(Option<usize>, usize)>),
    Refused,
    AllJoined(u32),
    Other,
}

#[derive(Default)]
struct Rank {
    table: Table,
    /// To the coordinator.
    words: VecDeque<Word>,
    /// From the coordinator.
    decisions: VecDeque<Decision>,
    step: usize,
    left: Option<Vec<Wish>>,
    /// Submitted in this step.
    begun: Vec<Receipt>,
    /// What the user's thread sleeps for.
    waits: Vec<Receipt>,
    lingering: Option<Receipt>,
    waited: bool,
    opened: Option<u32>,
    joined: bool,
    over: bool,
    did: Vec<Did>,
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        ((self.0 >> 33) as usize) % bound
    }
}

fn name(index: usize) -> String {
    format!("tensor {index}")
}

/// The place of an operation in the program stands for its memory.
fn place(step: usize, name: usize) -> usize {
    (step + 1) * NAMES + name
}

impl Rank {
    /// Differs when anything has moved.
    fn progress(&self) -> (usize, usize, usize, usize, bool) {
        (self.step, self.did.len(), self.words.len(), self.begun.len(), self.over)
    }

    /// The next thing that the user's thread does, if it can do anything.
    fn live(&mut self, rank: usize, program: &Program, random: &mut Random) {
        let mut waits = std::mem::take(&mut self.waits);
        waits.retain(|receipt| !self.collect(*receipt));
        self.waits = waits;
        if let Some(receipt) = self.waits.first() {
            // Patience ends after any time.
            let held_up = self.table.is_held_up(*receipt);
            let held_up = held_up.filter(|bucket| Some(*bucket) != self.opened);
            if let Some(bucket) = held_up.filter(|_| random.below(8) == 0) {
                self.opened = Some(bucket);
                self.table.queue.leave(Event::Open(bucket));
            }
            return;
        }
        self.opened = None;
        if self.joined {
            self.over |= self.table.last_joined.is_some();
            assert!(!self.over || !self.table.is_busy(), "something begun is not done");
            return;
        }
        let steps = program.steps.len().saturating_sub(program.fewer[rank]);
        if self.step == steps {
            // What was begun before is done even if nobody waits for it.
            if program.seed.is_multiple_of(2) {
                self.waits.extend(self.lingering.take());
            }
            if self.waits.is_empty() {
                self.joined = true;
                self.table.join(Duration::ZERO);
            }
            return;
        }
        let step = &program.steps[self.step];
        let left = self.left.get_or_insert_with(|| step.wishes.clone());
        if left.is_empty() {
            self.left = None;
            self.step += 1;
            self.waited = true;
            self.waits = std::mem::take(&mut self.begun);
            if step.lingers {
                let lingering = self.waits.pop();
                self.waits.extend(std::mem::replace(&mut self.lingering, lingering));
            }
            return;
        }
        let index = random.below(left.len());
        let wish = left[index];
        let entry = self.table.entry_named(&name(wish.name));
        if let Some(receipt) = self.lingering.filter(|receipt| entry == Some(receipt.entry)) {
            self.lingering = None;
            self.waits.push(receipt);
            return;
        }
        left.swap_remove(index);
        let receipt = self.submit(rank, wish);
        self.begun.push(receipt);
    }

    fn submit(&mut self, rank: usize, wish: Wish) -> Receipt {
        if std::mem::take(&mut self.waited) {
            self.table.next_era();
        }
        let elements = wish.elements + usize::from(wish.odd == Some(rank));
        let data = std::ptr::without_provenance_mut(place(self.step, wish.name));
        let tensor = RawTensor { data, dtype: DType::F32, shape: Shape::new(&[elements]) };
        let submission = Submission {
            name: Some(&name(wish.name)),
            kind: Kind::AllReduce,
            reduction: ReduceOp::Sum.into(),
            root: 0,
            tensors: &[tensor],
            splits: &[],
        };
        self.table.submit(&submission, false, || 0, &mut None).0
    }

    fn collect(&mut self, receipt: Receipt) -> bool {
        let done = self.table.is_done(receipt);
        if done {
            // Whether it was refused stands in `did`.
            let _ = self.table.collect(receipt);
        }
        done
    }

    /// Tells what has happened: to the coordinator itself on the lowest rank, else on the way.
    fn talk(&mut self, coordinator: Option<&mut Coordinator>, now: Duration) {
        let mut events = Vec::new();
        self.table.queue.take(&mut events);
        let mut own = coordinator;
        for event in events {
            let Some((word, era)) = self.table.word(event, now) else { continue };
            match &mut own {
                Some(coordinator) => {
                    if let Some(era) = era {
                        coordinator.next_era(era, |_| Location::PLAIN);
                    }
                    coordinator.hear(0, word, now);
                }
                None => self.words.push_back(word),
            }
        }
    }

    fn carry_out(&mut self) {
        let Some(decision) = self.decisions.pop_front() else { return };
        let table = &mut self.table;
        let did = match decision {
            Decision::Run(items) => {
                let mut ran = Vec::new();
                for item in items {
                    let (number, entry) = match item {
                        Item::Known(number) => {
                            (Some(number), table.entry_numbered(number).unwrap())
                        }
                        Item::New { number, name, request } => {
                            (number, table.entry_of(&name, &request))
                        }
                    };
                    let data = table.pointers(entry).map(|pointers| pointers[0].addr());
                    ran.push((data, table.entries[entry as usize].request.bytes()));
                    assert!(table.finish(entry, number, Ok(Vec::new())).is_empty());
                }
                Did::Ran(ran)
            }
            Decision::RunBucket(bucket) => {
                let state = &table.buckets[bucket as usize];
                let members = state.members.iter().zip(state.sizes.as_ref().unwrap());
                let ran = members
                    .map(|(member, bytes)| {
                        let entry = &table.entries[*member as usize];
                        (entry.is_in(bucket, state.round).then(|| entry.data().addr()), *bytes)
                    })
                    .collect();
                table.finish_round(bucket);
                Did::Ran(ran)
            }
            Decision::Refuse { name, reason } => {
                // Whoever has joined may not have heard of it.
                if let Some(entry) = table.entry_named(&name) {
                    let error = Error::Mismatch { operation: name, details: reason };
                    table.finish(entry, None, Err(error));
                }
                Did::Refused
            }
            Decision::Freeze { members, .. } => {
                let members =
                    members.iter().map(|number| table.entry_numbered(*number).unwrap()).collect();
                table.freeze(members);
                Did::Other
            }
            Decision::Thaw(bucket) => {
                table.thaw(bucket);
                Did::Other
            }
            Decision::AllJoined(last) => {
                table.all_joined(last as usize);
                Did::AllJoined(last)
            }
            _ => Did::Other,
        };
        self.did.push(did);
    }
}

/// How often the things happened that the model is about.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    frozen: usize,
    thawed: usize,
    bucket_runs: usize,
    refused: usize,
}

impl Seen {
    fn talk(
        &mut self,
        index: usize,
        all: &mut [Rank],
        coordinator: &mut Coordinator,
        now: Duration,
    ) {
        all[index].talk(Some(&mut *coordinator).filter(|_| index == 0), now);
        self.decide(all, coordinator);
    }

    fn decide(&mut self, all: &mut [Rank], coordinator: &mut Coordinator) {
        for decision in coordinator.decide() {
            match &decision {
                Decision::Freeze { .. } => self.frozen += 1,
                Decision::Thaw(_) => self.thawed += 1,
                Decision::RunBucket(_) => self.bucket_runs += 1,
                Decision::Refuse { .. } => self.refused += 1,
                _ => {}
            }
            all.iter_mut().for_each(|rank| rank.decisions.push_back(decision.clone()));
        }
    }
}

/// Runs a program with words and decisions that take any time.
fn simulate(program: &Program) -> Result<Seen, String> {
    let Program { ranks, deterministic, .. } = *program;
    let mut coordinator = Coordinator::new(Rules { ranks, most: 400, deterministic });
    let mut all: Vec<Rank> = (0..ranks).map(|_| Rank::default()).collect();
    let mut random = Random(program.seed);
    let mut seen = Seen::default();
    // Some ranks are slower than others.
    let speed: Vec<usize> = (0..ranks).map(|_| 1 + random.below(6)).collect();
    let mut idle = 0;
    for turn in 0.. {
        if all.iter().all(|rank| rank.over) {
            break;
        }
        let now = Duration::from_millis(turn);
        let index = random.below(ranks);
        let before = all[index].progress();
        let times = 1 + random.below(speed[index]);
        match random.below(5) {
            0 | 1 => all[index].live(index, program, &mut random),
            2 => seen.talk(index, &mut all, &mut coordinator, now),
            3 => {
                let rank = &mut all[index];
                for word in rank.words.drain(..times.min(rank.words.len())) {
                    coordinator.hear(index, word, now);
                }
                seen.decide(&mut all, &mut coordinator);
            }
            _ => {
                for _ in 0..times {
                    seen.talk(index, &mut all, &mut coordinator, now);
                    all[index].carry_out();
                }
            }
        }
        idle = if before == all[index].progress() { idle + 1 } else { 0 };
        if idle > 5_000 {
            let states: Vec<_> =
                all.iter().map(|rank| (rank.step, &rank.waits, rank.joined)).collect();
            return Err(format!("nothing moves any more: {states:?}; {coordinator:?}"));
        }
    }
    check(program, &all)?;
    Ok(seen)
}

/// Whether all ranks did the same, each operation once.
fn check(program: &Program, all: &[Rank]) -> Result<(), String> {
    let mut count: BTreeMap<usize, usize> = BTreeMap::new();
    let mut refused = 0;
    for at in 0..all[0].did.len() {
        let did: Vec<&Did> = all.iter().filter_map(|rank| rank.did.get(at)).collect();
        let lengths: Vec<_> = did
            .iter()
            .map(|did| match did {
                Did::Ran(ran) => ran.iter().map(|(_, bytes)| *bytes).collect(),
                Did::Refused => vec![usize::MAX],
                Did::AllJoined(last) => vec![usize::MAX - 1, *last as usize],
                Did::Other => Vec::new(),
            })
            .collect();
        if did.len() != all.len() || lengths.iter().any(|other| *other != lengths[0]) {
            return Err(format!("decision {at} is not the same everywhere: {did:?}"));
        }
        refused += usize::from(matches!(did[0], Did::Refused));
        let Did::Ran(first) = did[0] else { continue };
        for member in 0..first.len() {
            let asked: Vec<Option<usize>> = did
                .iter()
                .map(|did| match did {
                    Did::Ran(ran) => ran[member].0,
                    _ => None,
                })
                .collect();
            let Some(operation) = asked.iter().flatten().next() else {
                return Err(format!("decision {at} runs what nobody asked for: {did:?}"));
            };
            let step = operation / NAMES - 1;
            for (rank, other) in asked.iter().enumerate() {
                let steps = program.steps.len().saturating_sub(program.fewer[rank]);
                if *other != Some(*operation).filter(|_| step < steps) {
                    return Err(format!("rank {rank} takes {other:?} for {operation} in {at}"));
                }
            }
            *count.entry(*operation).or_default() += 1;
        }
    }
    let most = all.iter().map(|rank| rank.step).max().unwrap_or_default();
    let mut wrong = 0;
    for (step, wishes) in program.steps.iter().map(|step| &step.wishes).enumerate().take(most) {
        for wish in wishes {
            // An odd one is refused, unless whoever is odd has joined, or all others have.
            let here = |rank: usize| step < program.steps.len().saturating_sub(program.fewer[rank]);
            let odd = wish.odd.filter(|rank| *rank < all.len() && here(*rank));
            let others = (0..all.len()).any(|rank| here(rank) && Some(rank) != odd);
            let times = count.get(&place(step, wish.name)).copied().unwrap_or_default();
            let expected = usize::from(odd.is_none() || !others);
            wrong += 1 - expected;
            if times != expected {
                return Err(format!("{wish:?} of step {step} ran {times} times"));
            }
        }
    }
    if wrong != refused {
        return Err(format!("{refused} refusals instead of {wrong}"));
    }
    Ok(())
}

/// Steps that are mostly the same.
fn programs() -> impl Strategy<Value = Program> {
    let change = prop_oneof![
        12 => Just((0u8, 0usize, 0usize)),
        4 => (1u8..6, 0..NAMES, 0usize..4),
    ];
    let steps = prop::collection::vec((change, any::<bool>()), 1..24);
    let sizes = prop::collection::vec(1usize..40, NAMES);
    let fewer = prop::collection::vec(prop_oneof![2 => Just(0usize), 1 => 0usize..8], 4);
    (1usize..=4, any::<bool>(), sizes, steps, fewer, any::<u64>()).prop_map(
        |(ranks, deterministic, mut sizes, changes, fewer, seed)| {
            let steps = changes
                .into_iter()
                .map(|((change, which, rank), lingers)| {
                    if change == 1 {
                        sizes[which] += 1;
                    }
                    // The last name only comes when one is added.
                    let comes = |name: &usize| match change {
                        2 => *name != which && *name + 1 < NAMES,
                        3 => *name < NAMES,
                        _ => *name + 1 < NAMES,
                    };
                    let wish = |name: usize| {
                        let odd = (change == 4 && name == which && ranks > 1).then_some(rank);
                        Wish { name, elements: sizes[name], odd: odd.filter(|odd| *odd < ranks) }
                    };
                    Step { wishes: (0..NAMES).filter(comes).map(wish).collect(), lingers }
                })
                .collect();
            Program { ranks, deterministic, steps, fewer, seed }
        },
    )
}

#[test]
fn every_operation_runs_once_whatever_the_delays() {
    let config = Config {
        cases: std::env::var("DEUTERON_MODEL_CASES")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(2000),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(7),
        max_shrink_iters: 3000,
        ..Config::default()
    };
    let total = std::cell::RefCell::new(Seen::default());
    TestRunner::new(config)
        .run(&programs(), |program| {
            let seen = simulate(&program).map_err(TestCaseError::fail)?;
            let mut total = total.borrow_mut();
            total.frozen += seen.frozen;
            total.thawed += seen.thawed;
            total.bucket_runs += seen.bucket_runs;
            total.refused += seen.refused;
            Ok(())
        })
        .unwrap();
    let Seen { frozen, thawed, bucket_runs, refused } = total.into_inner();
    assert!([frozen, thawed, bucket_runs, refused].iter().all(|times| *times > 100));
}
