//! The state machine by itself, word by word.

use super::*;
use crate::{
    DType,
    engine::message::{Shape, Tensor},
};

const NOW: Duration = Duration::from_secs(7);

fn tensor(dtype: DType, elements: usize) -> Tensor {
    Tensor { dtype, shape: Shape::new(&[elements]) }
}

fn request(kind: Kind, op: ReduceOp, tensors: Vec<Tensor>) -> Request {
    Request { kind, reduction: op.into(), root: 0, tensors }
}

/// A sum of 32-bit floats.
fn sum(elements: usize) -> Request {
    request(Kind::AllReduce, ReduceOp::Sum, vec![tensor(DType::F32, elements)])
}

fn machine(ranks: usize) -> Coordinator {
    Coordinator::new(Rules { ranks, most: 400, deterministic: false })
}

fn ready(machine: &mut Coordinator, from: usize, name: &str, request: &Request) {
    let word = Word::Ready { name: name.into(), request: request.clone(), once: false };
    machine.hear(from, word, NOW);
}

/// What is decided, in short.
fn decided(machine: &mut Coordinator) -> Vec<String> {
    let item = |item: &Item| match item {
        Item::Known(number) => number.to_string(),
        Item::New { name, .. } => name.clone(),
    };
    machine
        .decide()
        .iter()
        .map(|decision| match decision {
            Decision::Run(items) => {
                format!("run {}", items.iter().map(item).collect::<Vec<_>>().join(" "))
            }
            Decision::Refuse { name, reason } => format!("refuse {name}: {reason}"),
            Decision::Freeze { bucket, members } => format!("freeze {bucket}: {members:?}"),
            Decision::RunBucket(bucket) => format!("run bucket {bucket}"),
            Decision::Thaw(bucket) => format!("thaw {bucket}"),
            Decision::AllJoined(last) => format!("all joined, {last} last"),
            other => format!("{other:?}"),
        })
        .collect()
}

/// Two ranks that know "a" as 0 and "b" as 1, and have made the step often enough to freeze it at the next era.
fn about_to_freeze() -> Coordinator {
    let mut machine = machine(2);
    for rank in 0..2 {
        ready(&mut machine, rank, "a", &sum(4));
        ready(&mut machine, rank, "b", &sum(4));
    }
    assert_eq!(decided(&mut machine), ["run a b"]);
    machine.next_era(1, |_| Location::PLAIN);
    for (rank, number) in [(0, 0), (0, 1), (1, 1), (1, 0)] {
        machine.hear(rank, Word::Again(number), NOW);
    }
    assert_eq!(decided(&mut machine), ["run 1 0"]);
    machine
}

fn frozen() -> Coordinator {
    let mut machine = about_to_freeze();
    machine.next_era(2, |_| Location::PLAIN);
    assert_eq!(decided(&mut machine), ["freeze 0: [0, 1]"]);
    machine
}

fn full(machine: &mut Coordinator, from: usize, bucket: u32, round: u64) {
    machine.hear(from, Word::Full { bucket, round }, NOW);
}

#[test]
fn names_are_matched_in_any_order() {
    let mut machine = machine(3);
    for (rank, name) in [(2, "b"), (0, "a"), (1, "b"), (1, "a"), (2, "a")] {
        ready(&mut machine, rank, name, &sum(1));
    }
    assert_eq!(decided(&mut machine), ["run a"]);
    ready(&mut machine, 0, "b", &sum(1));
    assert_eq!(decided(&mut machine), ["run b"]);
    // By number from now on, and once a rank at a time.
    for rank in [2, 1, 0] {
        assert!(decided(&mut machine).is_empty());
        machine.hear(rank, Word::Again(0), NOW);
    }
    assert_eq!(decided(&mut machine), ["run 0"]);
}

#[test]
fn who_differs_is_named() {
    let gather = request(Kind::AllGather, ReduceOp::Sum, vec![tensor(DType::F32, 4)]);
    let broadcast = request(Kind::Broadcast, ReduceOp::Sum, vec![tensor(DType::F32, 4)]);
    let from_one = Request { root: 1, ..broadcast.clone() };
    let scaled = Request { reduction: Reduction::from(ReduceOp::Sum).prescale(0.5), ..sum(4) };
    let cases = [
        (sum(4), sum(5), "all_reduce(f32 [5], sum)"),
        (
            sum(4),
            request(Kind::AllReduce, ReduceOp::Sum, vec![tensor(DType::F64, 4)]),
            "all_reduce(f64 [4], sum)",
        ),
        (
            sum(4),
            request(Kind::AllReduce, ReduceOp::Max, vec![tensor(DType::F32, 4)]),
            "all_reduce(f32 [4], max)",
        ),
        (sum(4), scaled, "all_reduce(f32 [4], sum, prescale 0.5)"),
        (sum(4), gather, "all_gather(f32 [4])"),
        (broadcast, from_one, "broadcast(f32 [4], root 1)"),
        (
            sum(4),
            request(Kind::AllReduce, ReduceOp::Sum, vec![tensor(DType::F32, 4); 6]),
            "all_reduce(f32 [4], f32 [4], f32 [4], f32 [4] and 2 more, sum)",
        ),
    ];
    for (usual, odd, text) in cases {
        for odd_rank in 0..3 {
            let mut machine = machine(3);
            for rank in [2, 1, 0] {
                ready(&mut machine, rank, "x", if rank == odd_rank { &odd } else { &usual });
            }
            let [one, other] = [[1, 2], [0, 2], [0, 1]][odd_rank];
            let decided = decided(&mut machine);
            assert_eq!(decided.len(), 1);
            assert!(decided[0].starts_with(&format!("refuse x: ranks {one}, {other} called ")));
            assert!(
                decided[0].ends_with(&format!("; rank {odd_rank} called {text}")),
                "{decided:?}"
            );
            // The name may come again.
            (0..3).for_each(|rank| ready(&mut machine, rank, "x", &usual));
            assert_eq!(super::tests::decided(&mut machine), ["run x"]);
        }
    }
}

/// A rank that says "as before" does not agree with one that has changed its mind, whoever comes first.
#[test]
fn as_before_means_the_last_run() {
    for order in [[0, 1], [1, 0]] {
        let mut machine = about_to_freeze();
        for rank in order {
            match rank {
                0 => ready(&mut machine, 0, "a", &sum(9)),
                _ => machine.hear(1, Word::Again(0), NOW),
            }
        }
        let decided = decided(&mut machine);
        assert!(decided[0].contains("rank 0 called all_reduce(f32 [9], sum)"), "{decided:?}");
        assert!(decided[0].contains("rank 1 called all_reduce(f32 [4], sum)"), "{decided:?}");
    }
}

#[test]
fn rows_of_a_gathering_may_differ() {
    let mut machine = machine(2);
    for rank in 0..2 {
        let rows = vec![tensor(DType::U8, 3 + rank)];
        ready(&mut machine, rank, "x", &request(Kind::AllGather, ReduceOp::Sum, rows));
    }
    assert_eq!(decided(&mut machine), ["run x"]);
}

#[test]
fn twice_is_refused_once_all_have_come() {
    let mut machine = machine(2);
    machine.hear(1, Word::Twice("x".into()), NOW);
    ready(&mut machine, 1, "x", &sum(1));
    machine.hear(1, Word::Twice("x".into()), NOW);
    assert!(decided(&mut machine).is_empty());
    ready(&mut machine, 0, "x", &sum(1));
    assert_eq!(
        decided(&mut machine),
        [
            "refuse x: rank 1 submitted it again before it was done; give every operation its own name"
        ]
    );
}

#[test]
fn sums_and_means_go_on_without_those_that_joined() {
    let mut machine = machine(3);
    machine.hear(1, Word::Joined, NOW);
    let of = |kind, op| request(kind, op, vec![tensor(DType::F32, 1)]);
    let barrier = request(Kind::Barrier, ReduceOp::Sum, Vec::new());
    let zeros =
        [("sum", sum(1)), ("mean", of(Kind::AllReduce, ReduceOp::Mean)), ("barrier", barrier)];
    for (name, request) in &zeros {
        ready(&mut machine, 0, name, request);
        assert!(decided(&mut machine).is_empty());
        ready(&mut machine, 2, name, request);
        assert_eq!(decided(&mut machine), [format!("run {name}")]);
    }
    let others = [
        of(Kind::AllReduce, ReduceOp::Max),
        of(Kind::AllReduce, ReduceOp::Product),
        of(Kind::AllGather, ReduceOp::Sum),
        of(Kind::Broadcast, ReduceOp::Sum),
        of(Kind::ReduceScatter, ReduceOp::Sum),
    ];
    for request in &others {
        ready(&mut machine, 0, "x", request);
        ready(&mut machine, 2, "x", request);
        let text = format!(
            "refuse x: rank 1 has joined and takes no part: only sums and means go on without it, not {request}"
        );
        assert_eq!(decided(&mut machine), [text]);
    }
    // What waits when the last ones join runs before everybody has.
    ready(&mut machine, 2, "late", &sum(1));
    machine.hear(0, Word::Joined, NOW);
    assert_eq!(decided(&mut machine), ["run late"]);
    ready(&mut machine, 2, "later", &sum(1));
    machine.hear(2, Word::Joined, NOW);
    assert_eq!(decided(&mut machine), ["run later", "all joined, 2 last"]);
    // And then everybody is awaited again.
    ready(&mut machine, 0, "sum", &sum(1));
    assert!(decided(&mut machine).is_empty());
    assert!(machine.waits_for(1));
}

#[test]
fn who_has_joined_is_told_what_has_changed() {
    let mut machine = about_to_freeze();
    machine.hear(1, Word::Joined, NOW);
    ready(&mut machine, 0, "a", &sum(9));
    let Some(Decision::Run(items)) = machine.decide().pop() else { unreachable!() };
    assert_eq!(items, [Item::New { number: Some(0), name: "a".into(), request: sum(9) }]);
    assert!(machine.waits_for(0), "until it joins");
}

#[test]
fn what_fits_is_fused() {
    let mut machine = machine(1);
    let max = request(Kind::AllReduce, ReduceOp::Max, vec![tensor(DType::F32, 1)]);
    // Of 400 bytes.
    for (name, elements) in [("a", 60), ("b", 50), ("c", 30), ("d", 10), ("e", 200)] {
        ready(&mut machine, 0, name, &sum(elements));
        if name == "b" {
            ready(&mut machine, 0, "max", &max);
        }
    }
    assert_eq!(decided(&mut machine), ["run a c d", "run b", "run max", "run e"]);
    let mut machine = Coordinator::new(Rules { ranks: 1, most: 400, deterministic: true });
    ready(&mut machine, 0, "a", &sum(1));
    ready(&mut machine, 0, "b", &sum(1));
    assert_eq!(decided(&mut machine), ["run a", "run b"]);
}

#[test]
fn a_step_that_repeats_is_frozen() {
    let mut machine = frozen();
    for round in 0..3 {
        full(&mut machine, 1, 0, round);
        assert!(decided(&mut machine).is_empty());
        full(&mut machine, 1, 0, round);
        full(&mut machine, 0, 0, round);
        assert_eq!(decided(&mut machine), ["run bucket 0"]);
    }
}

/// What is told one by one because the decision to freeze has not arrived counts as the whole (FREEZE-1).
#[test]
fn single_words_count_for_a_bucket() {
    let mut machine = about_to_freeze();
    // One of them before, the other after.
    machine.hear(1, Word::Again(1), NOW);
    machine.next_era(2, |_| Location::PLAIN);
    assert_eq!(decided(&mut machine), ["freeze 0: [0, 1]"]);
    full(&mut machine, 0, 0, 0);
    assert!(decided(&mut machine).is_empty());
    machine.hear(1, Word::Again(0), NOW);
    assert_eq!(decided(&mut machine), ["run bucket 0"]);
}

#[test]
fn one_that_changes_opens_its_bucket() {
    let mut machine = frozen();
    full(&mut machine, 1, 0, 0);
    ready(&mut machine, 0, "a", &sum(9));
    let decided = decided(&mut machine);
    assert_eq!(decided[0], "thaw 0");
    assert!(decided[1].starts_with("refuse a: "), "{decided:?}");
    // The other rank has said that it is ready for the other one too.
    machine.hear(0, Word::Again(1), NOW);
    assert_eq!(super::tests::decided(&mut machine), ["run 1"]);
}

#[test]
fn a_thaw_loses_no_words() {
    let mut machine = frozen();
    machine.hear(0, Word::Open { bucket: 0, round: 0 }, NOW);
    assert_eq!(decided(&mut machine), ["thaw 0"]);
    // Both of these were on their way.
    machine.hear(1, Word::Open { bucket: 0, round: 0 }, NOW);
    full(&mut machine, 1, 0, 0);
    assert!(decided(&mut machine).is_empty());
    machine.hear(0, Word::Again(0), NOW);
    assert_eq!(decided(&mut machine), ["run 0"]);
    machine.hear(0, Word::Again(1), NOW);
    assert_eq!(decided(&mut machine), ["run 1"]);
}

#[test]
fn an_old_round_opens_nothing() {
    let mut machine = frozen();
    full(&mut machine, 0, 0, 0);
    full(&mut machine, 1, 0, 0);
    machine.hear(1, Word::Open { bucket: 0, round: 0 }, NOW);
    assert_eq!(decided(&mut machine), ["run bucket 0"]);
}

/// A step whose bucket was opened is frozen again only after it has come twice as often.
#[test]
fn freezing_backs_off() {
    let mut machine = frozen();
    machine.hear(0, Word::Open { bucket: 0, round: 0 }, NOW);
    decided(&mut machine);
    let mut frozen_after = Vec::new();
    let mut bucket = 0;
    for step in 1..=12 {
        for (rank, number) in [(0, 0), (0, 1), (1, 1), (1, 0)] {
            machine.hear(rank, Word::Again(number), NOW);
        }
        assert_eq!(decided(&mut machine), ["run 1 0"]);
        machine.next_era(2 + step, |_| Location::PLAIN);
        if !decided(&mut machine).is_empty() {
            frozen_after.push(step);
            bucket += 1;
            machine.hear(1, Word::Open { bucket, round: 0 }, NOW);
            assert_eq!(decided(&mut machine), [format!("thaw {bucket}")]);
        }
    }
    assert_eq!(frozen_after, [4, 12]);
}

/// Members that nobody fills their bucket with any more run by themselves when all have joined.
#[test]
fn joining_empties_buckets() {
    let mut machine = frozen();
    machine.hear(1, Word::Again(1), NOW);
    machine.hear(1, Word::Joined, NOW);
    assert!(decided(&mut machine).is_empty());
    machine.hear(0, Word::Joined, NOW);
    assert_eq!(decided(&mut machine), ["thaw 0", "run 1", "all joined, 0 last"]);
    let mut machine = frozen();
    machine.hear(1, Word::Joined, NOW);
    full(&mut machine, 0, 0, 0);
    assert_eq!(decided(&mut machine), ["run bucket 0"]);
}

#[test]
fn names_beyond_the_bound_are_matched_too() {
    let mut machine = machine(1);
    for index in 0..MOST_NAMES + 10 {
        ready(&mut machine, 0, &index.to_string(), &sum(1));
        machine.decide();
    }
    assert_eq!(machine.names.len(), MOST_NAMES);
    for _ in 0..3 {
        ready(&mut machine, 0, "beyond", &sum(1));
        let Some(Decision::Run(items)) = machine.decide().pop() else { unreachable!() };
        assert_eq!(items, [Item::New { number: None, name: "beyond".into(), request: sum(1) }]);
    }
    assert!(machine.operations.len() <= MOST_NAMES + 1);
}

#[test]
fn a_report_names_everything() {
    let mut machine = frozen();
    let text = |machine: &Coordinator, doing: &[Option<Doing>]| {
        report(machine, doing, |rank| format!("host-{rank}"), NOW + Duration::from_millis(2500))
    };
    assert_eq!(text(&machine, &[None, None]), "no operation waits for a rank");
    assert!(!machine.waits_for(0) && machine.look_for_oldest().is_none());
    full(&mut machine, 1, 0, 0);
    ready(&mut machine, 0, "x", &sum(3));
    assert!(machine.waits_for(0) && machine.waits_for(1));
    assert_eq!(machine.look_for_oldest(), Some(NOW));
    let doing = Doing { what: "waits for x".into(), milliseconds: 1200 };
    assert_eq!(
        text(&machine, &[Some(doing), None]),
        "x, all_reduce(f32 [3], sum), has waited 2.5 s for rank 1\n\
         a and 1 more in its bucket, all_reduce(f32 [4], sum), has waited 2.5 s for rank 0\n\
         rank 0 on host-0: waits for x for 1.2 s\n\
         rank 1 on host-1: it has not answered"
    );
    for index in 0..30 {
        ready(&mut machine, 0, &format!("more {index}"), &sum(3));
    }
    assert!(text(&machine, &[None, None]).contains("\n12 more operations wait\n"));
}
