//! Named operations in any order, against what each of them computes alone.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

mod support;

use deuteron_collective::{
    Bucket, DType, Engine, EngineOptions, Error, Group, GroupOptions, Handle, LocalRendezvous,
    ReduceOp, Reduction, Together,
};
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestRunner},
};
use std::{
    collections::BTreeMap,
    process::Command,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
use support::{
    Limit, Over, all,
    reference::{Sample, Style, digest, input, scatter, with_type},
    run, run_with,
};

/// Runs `body` on every rank's engine.
fn engines<R: Send>(
    over: Over,
    ranks: usize,
    options: EngineOptions,
    body: impl Fn(&Engine) -> Result<R, Error> + Sync,
) -> Vec<Result<R, Error>> {
    run(over, ranks, |group| {
        let engine = Engine::new(group, options)?;
        body(&engine)
    })
}

/// Numbers 0 to `count` in an order of its own for every seed.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|index| scatter(seed, 0, *index));
    order
}

/// A sum of one element.
fn sum(engine: &Engine, name: &str, value: f32) -> Result<f32, Error> {
    let mut tensor = [value];
    engine.all_reduce_now(name, &mut tensor, ReduceOp::Sum)?;
    Ok(tensor[0])
}

#[test]
fn memory_is_made_while_operations_are_on_their_way() {
    for over in Over::ALL {
        for ranks in 1..=4 {
            all(engines(over, ranks, EngineOptions::default(), |engine| {
                let early = engine.all_reduce("early", vec![1f32; 1000], ReduceOp::Sum)?;
                let parts = engine.bucket::<f32>(300)?.split([100, 200])?;
                assert!(parts.iter().all(|part| part.iter().all(|value| *value == 0.0)));
                let [mut one, other] = parts;
                one.fill(engine.rank() as f32);
                let one = engine.all_reduce("one", one, ReduceOp::Max)?;
                let other = engine.all_reduce("other", other, ReduceOp::Sum)?;
                assert_eq!(early.wait()?, vec![ranks as f32; 1000]);
                assert_eq!(*one.wait()?, [(ranks - 1) as f32; 100]);
                assert_eq!(*other.wait()?, [0.0; 200]);
                Ok(())
            }));
        }
    }
    let results = engines(Over::ALL[0], 2, EngineOptions::default(), |engine| {
        engine.bucket::<u8>(10 + engine.rank()).map(drop)
    });
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("disagree") && text.contains("11"), "{text}");
    }
}

#[test]
fn a_closed_engine_refuses_and_its_peers_are_told() {
    let results = engines(Over::ALL[0], 2, EngineOptions::default(), |engine| {
        if engine.rank() == 1 {
            engine.close();
            engine.close();
        }
        sum(engine, "after", 1.0)
    });
    let texts: Vec<String> =
        results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
    assert!(texts[0].contains("rank 1"), "{texts:?}");
    assert!(texts[1].contains("closed on this rank"), "{texts:?}");
}

#[test]
fn ranks_submit_in_different_orders() {
    for over in Over::ALL {
        for ranks in 1..=4 {
            all(engines(over, ranks, EngineOptions::default(), |engine| {
                for step in 0..8u64 {
                    let order = shuffled(50, step * 31 + engine.rank() as u64);
                    let handles = order
                        .iter()
                        .map(|index| {
                            let value = (engine.rank() + index) as f32;
                            engine.all_reduce(
                                format!("tensor {index}").as_str(),
                                vec![value; 1 + index * 7],
                                ReduceOp::Sum,
                            )
                        })
                        .collect::<Result<Vec<Handle<Vec<f32>>>, Error>>()?;
                    for (index, handle) in order.iter().zip(handles) {
                        let sum: usize = (0..ranks).map(|rank| rank + index).sum();
                        assert_eq!(handle.wait()?, vec![sum as f32; 1 + index * 7], "step {step}");
                    }
                }
                Ok(())
            }));
        }
    }
}

#[test]
fn synchronous_calls_match_by_name() {
    all(engines(Over::SharedMemory, 3, EngineOptions::default(), |engine| {
        for round in 0..500i64 {
            let mut tensor = [round, engine.rank() as i64];
            engine.all_reduce_now("pair", &mut tensor, ReduceOp::Sum)?;
            assert_eq!(tensor, [3 * round, 3]);
            engine.broadcast_now("root", &mut tensor, 2)?;
            engine.barrier(None)?;
        }
        Ok(())
    }));
}

/// What one operation of a program is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Reduce,
    /// In memory of the group's.
    Registered,
    Together,
    Broadcast,
    Gather,
    Scatter,
    Exchange,
}

/// One operation, as all ranks submit it.
#[derive(Clone, Debug)]
struct Operation {
    name: String,
    what: What,
    dtype: DType,
    count: usize,
    reduction: Reduction,
    style: Style,
    seed: u64,
}

/// Steps that are mostly the same, all of whose properties follow from a random number.
#[derive(Clone, Copy, Debug)]
struct Program {
    ranks: usize,
    operations: usize,
    steps: usize,
    threads: usize,
    deterministic: bool,
    seed: u64,
}

type Pending = Box<dyn FnOnce() -> Result<u64, Error> + Send>;

impl Program {
    fn choose(&self, what: usize, which: usize, choices: usize) -> usize {
        scatter(self.seed, what, which) as usize % choices
    }

    fn operation(&self, step: usize, index: usize) -> Operation {
        let what = match self.choose(1, index, 16) {
            0..7 => What::Reduce,
            7..11 => What::Registered,
            11 => What::Together,
            12 => What::Broadcast,
            13 => What::Gather,
            14 => What::Scatter,
            _ => What::Exchange,
        };
        let usual = self.choose(2, index, 3) != 0;
        let (dtype, reduction) = if usual || what == What::Registered {
            (DType::F32, ReduceOp::Sum.into())
        } else {
            let op = ReduceOp::ALL[self.choose(3, index, 5)];
            let factor = |what| [1.0, 1.0, 0.5][self.choose(what, index, 3)];
            let reduction = Reduction::from(op).prescale(factor(4)).postscale(factor(5));
            (DType::ALL[self.choose(6, index, DType::ALL.len())], reduction)
        };
        // Changes of shape stay.
        let changes = (0..=step).filter(|step| self.change(*step) == (6, index)).count();
        let grown = if what == What::Registered { 0 } else { changes };
        let style = if self.choose(7, index, 2) == 0 { Style::Exact } else { Style::Rough };
        Operation {
            name: format!("operation {index}"),
            what,
            dtype,
            count: [0, 1, 7, 100, 900][self.choose(8, index, 5)] + grown,
            reduction,
            style,
            seed: scatter(self.seed, step, index),
        }
    }

    /// What is different about a step, and for which operation.
    fn change(&self, step: usize) -> (usize, usize) {
        (self.choose(9, step, 9), self.choose(10, step, self.operations))
    }

    fn step(&self, step: usize) -> Vec<Operation> {
        let (change, which) = self.change(step);
        // The last one only comes when one is added.
        let comes = |index: &usize| match change {
            4 => *index != which && *index + 1 < self.operations,
            5 => true,
            _ => *index + 1 < self.operations,
        };
        let mut operations: Vec<Operation> =
            (0..self.operations).filter(comes).map(|index| self.operation(step, index)).collect();
        if change == 7 {
            // Memory changes for a step.
            operations
                .iter_mut()
                .filter(|operation| operation.what == What::Registered)
                .for_each(|operation| operation.what = What::Reduce);
        }
        operations
    }
}

impl Operation {
    fn input<T: Sample>(&self, rank: usize, part: usize, count: usize) -> Vec<T> {
        let seed = self.seed ^ part as u64;
        input(seed, rank, count, self.style, self.reduction.op).collect()
    }

    /// Elements of a rank where their numbers differ.
    fn varied(&self, from: usize, to: usize) -> usize {
        scatter(self.seed, from, 1000 + to) as usize % (self.count + 1)
    }

    fn judge(&self, engine: &Engine) -> bool {
        self.seed as usize % engine.size() == engine.rank()
    }

    fn check_reduced<T: Sample>(&self, result: &[T], ranks: usize, part: usize, start: usize) {
        let inputs: Vec<Vec<T>> =
            (0..ranks).map(|rank| self.input(rank, part, self.count)).collect();
        for (index, value) in result.iter().enumerate() {
            let values: Vec<T> = inputs.iter().map(|input| input[start + index]).collect();
            let right = match self.style {
                Style::Exact => value.bits() == T::reduce(&values, self.reduction).bits(),
                _ => T::is_near(*value, &values, self.reduction),
            };
            assert!(right, "{value:?} of {values:?} in {self:?}");
        }
    }

    fn begin<T: Sample>(&self, engine: &Engine) -> Result<Pending, Error> {
        let (rank, ranks) = (engine.rank(), engine.size());
        let (me, judge) = (self.clone(), self.judge(engine));
        let name = self.name.as_str();
        let tensor = self.input::<T>(rank, 0, self.count);
        Ok(match self.what {
            What::Reduce | What::Registered => {
                let handle = engine.all_reduce(name, tensor, self.reduction)?;
                Box::new(move || {
                    let result = handle.wait()?;
                    if judge {
                        me.check_reduced(&result, ranks, 0, 0);
                    }
                    Ok(digest(&result))
                })
            }
            What::Together => {
                let tensors = (0..3).map(|part| self.input::<T>(rank, part, self.count)).collect();
                let handle = engine.all_reduce(name, Together(tensors), self.reduction)?;
                Box::new(move || {
                    let Together(results) = handle.wait()?;
                    for (part, result) in results.iter().enumerate().filter(|_| judge) {
                        me.check_reduced(result, ranks, part, 0);
                    }
                    Ok(results.iter().map(|result| digest(result)).fold(0, u64::wrapping_add))
                })
            }
            What::Broadcast => {
                let root = self.seed as usize % ranks;
                let handle = engine.broadcast(name, tensor.into_boxed_slice(), root)?;
                Box::new(move || {
                    let result = handle.wait()?;
                    assert_eq!(digest(&result), digest(&me.input::<T>(root, 0, me.count)));
                    Ok(digest(&result))
                })
            }
            What::Gather => {
                let tensor = self.input::<T>(rank, 0, self.varied(rank, 0));
                let gathering = engine.all_gather(name, tensor)?;
                Box::new(move || {
                    let gathered = gathering.wait()?;
                    let parts: Vec<Vec<T>> =
                        (0..ranks).map(|rank| me.input(rank, 0, me.varied(rank, 0))).collect();
                    let counts: Vec<usize> = parts.iter().map(Vec::len).collect();
                    assert_eq!(gathered.counts, counts);
                    assert_eq!(digest(&gathered.values), digest(&parts.concat()));
                    Ok(digest(&gathered.values))
                })
            }
            What::Scatter => {
                let gathering = engine.reduce_scatter(name, tensor, self.reduction)?;
                Box::new(move || {
                    let result = gathering.wait()?;
                    let start = result.counts[..rank].iter().sum();
                    assert_eq!(result.values.len(), result.counts[rank]);
                    me.check_reduced(&result.values, ranks, 0, start);
                    Ok(0)
                })
            }
            What::Exchange => {
                let splits: Vec<usize> = (0..ranks).map(|to| self.varied(rank, to)).collect();
                let tensor = self.input::<T>(rank, 0, splits.iter().sum());
                let gathering = engine.all_to_all(name, tensor, &splits)?;
                Box::new(move || {
                    let result = gathering.wait()?;
                    let mut expected = Vec::new();
                    for from in 0..ranks {
                        let splits: Vec<usize> = (0..ranks).map(|to| me.varied(from, to)).collect();
                        let (start, all) =
                            (splits[..rank].iter().sum::<usize>(), splits.iter().sum());
                        let input = me.input::<T>(from, 0, all);
                        expected.extend_from_slice(&input[start..start + splits[rank]]);
                    }
                    assert_eq!(digest(&result.values), digest(&expected));
                    Ok(0)
                })
            }
        })
    }
}

/// Memory of the group's for each operation that wants it.
type Shelf = Vec<Mutex<Option<Bucket<f32>>>>;

fn begin(engine: &Engine, operation: &Operation, shelf: &Arc<Shelf>) -> Result<Pending, Error> {
    let index: usize = operation.name.rsplit(' ').next().unwrap().parse().unwrap();
    if operation.what == What::Registered {
        let mut bucket = shelf[index].lock().unwrap().take().unwrap();
        bucket.copy_from_slice(&operation.input::<f32>(engine.rank(), 0, operation.count));
        let handle = engine.all_reduce(operation.name.as_str(), bucket, operation.reduction)?;
        let (shelf, judge) = (Arc::clone(shelf), operation.judge(engine));
        let (operation, ranks) = (operation.clone(), engine.size());
        return Ok(Box::new(move || {
            let bucket = handle.wait()?;
            if judge {
                operation.check_reduced(&bucket, ranks, 0, 0);
            }
            let digest = digest(&bucket);
            *shelf[index].lock().unwrap() = Some(bucket);
            Ok(digest)
        }));
    }
    with_type!(operation.dtype, T => operation.begin::<T>(engine))
}

/// Runs a program; every rank must end up with the same bits.
fn perform(over: Over, program: Program) -> Vec<u64> {
    let options = EngineOptions::default().bucket_bytes(6000).deterministic(program.deterministic);
    let results = run(over, program.ranks, |group| {
        let lengths: Vec<usize> = (0..program.operations)
            .map(|index| match program.operation(0, index) {
                Operation { what: What::Registered, count, .. } => count,
                _ => 0,
            })
            .collect();
        let whole = group.bucket::<f32>(lengths.iter().sum())?;
        let shelf: Arc<Shelf> = Arc::new(
            whole.split_all(&lengths)?.into_iter().map(|part| Mutex::new(Some(part))).collect(),
        );
        let engine = Engine::new(group, options)?;
        let mut digests = Vec::new();
        for step in 0..program.steps {
            let operations = program.step(step);
            let part = |thread: usize| {
                let (engine, shelf, operations) = (&engine, &shelf, &operations);
                move || -> Result<Vec<(usize, u64)>, Error> {
                    let order = shuffled(operations.len(), scatter(step as u64, engine.rank(), 0));
                    let own = order.into_iter().filter(|index| index % program.threads == thread);
                    let pending = own
                        .map(|index| Ok((index, begin(engine, &operations[index], shelf)?)))
                        .collect::<Result<Vec<_>, Error>>()?;
                    pending.into_iter().map(|(index, wait)| Ok((index, wait()?))).collect()
                }
            };
            let mut done = thread::scope(|scope| -> Result<Vec<(usize, u64)>, Error> {
                let others: Vec<_> =
                    (1..program.threads).map(|thread| scope.spawn(part(thread))).collect();
                let mut done = part(0)()?;
                for other in others {
                    done.extend(other.join().unwrap()?);
                }
                Ok(done)
            })?;
            done.sort_unstable();
            digests.extend(done.into_iter().map(|(_, digest)| digest));
            if program.choose(11, step, 3) == 0 {
                assert_eq!(sum(&engine, "loss", 1.0)?, program.ranks as f32);
            }
            if program.choose(12, step, 4) == 0 {
                engine.barrier(None)?;
            }
        }
        Ok(digests)
    });
    let results = all(results);
    for other in &results {
        assert_eq!(*other, results[0], "{program:?}");
    }
    results.into_iter().next().unwrap()
}

fn random_programs(over: Over, cases: u32) {
    let config = Config {
        cases,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(over as u64),
        max_shrink_iters: 30,
        ..Config::default()
    };
    let programs = (1usize..=8, 2usize..12, 1usize..20, 1usize..4, any::<bool>(), any::<u64>());
    let programs = programs.prop_map(|(ranks, operations, steps, threads, deterministic, seed)| {
        Program { ranks, operations, steps, threads, deterministic, seed }
    });
    TestRunner::new(config)
        .run(&programs, |program| {
            perform(over, program);
            Ok(())
        })
        .unwrap();
}

#[test]
fn programs_over_shared_memory() {
    random_programs(Over::SharedMemory, 40);
}

#[test]
fn programs_over_tcp() {
    random_programs(Over::Tcp, 25);
}

#[test]
fn programs_over_tls() {
    random_programs(Over::Tls, 12);
}

#[test]
fn programs_over_pipes_and_tcp() {
    random_programs(Over::Mixed, 25);
}

/// With one thread the plan follows from names and sizes, and so do the bits.
#[test]
fn the_deterministic_mode_repeats_itself() {
    for over in Over::ALL {
        let program = |seed| Program {
            ranks: 3,
            operations: 9,
            steps: 12,
            threads: 1,
            deterministic: true,
            seed,
        };
        for seed in 0..3 {
            assert_eq!(perform(over, program(seed)), perform(over, program(seed)));
        }
    }
}

/// The error of every rank, which must all be disagreements, in words.
fn disagreements<R: std::fmt::Debug>(results: Vec<Result<R, Error>>) -> Vec<String> {
    let text = |result: Result<R, Error>| match result {
        Err(Error::Mismatch { details, .. }) => details,
        other => format!("not a disagreement: {other:?}"),
    };
    results.into_iter().map(text).collect()
}

/// Runs `body`, whose operation must be refused everywhere in the same words; the engine goes on.
fn refused(body: impl Fn(&Engine) -> Result<(), Error> + Sync) -> String {
    let mut said = Vec::new();
    for over in [Over::SharedMemory, Over::Tcp] {
        let results = all(engines(over, 3, EngineOptions::default(), |engine| {
            let refusal = body(engine);
            for round in 0..5 {
                assert_eq!(sum(engine, "after", round as f32)?, 3.0 * round as f32);
            }
            Ok(refusal)
        }));
        said.extend(disagreements(results));
    }
    assert!(said.iter().all(|text| *text == said[0]), "{said:?}");
    said.swap_remove(0)
}

#[test]
fn who_differs_is_named_and_the_engine_goes_on() {
    let odd = |engine: &Engine| engine.rank() == 1;
    let shape = refused(|engine| {
        let count = if odd(engine) { 5 } else { 4 };
        engine.all_reduce("x", vec![0f32; count], ReduceOp::Sum)?.wait().map(drop)
    });
    assert_eq!(
        shape,
        "ranks 0, 2 called all_reduce(f32 [4], sum); rank 1 called all_reduce(f32 [5], sum)"
    );
    let again = refused(|engine| {
        for _ in 0..6 {
            for handle in [("x", 4), ("y", 2)]
                .map(|(name, count)| engine.all_reduce(name, vec![0f32; count], ReduceOp::Sum))
            {
                handle?.wait()?;
            }
        }
        let count = if odd(engine) { 5 } else { 4 };
        engine.all_reduce("x", vec![0f32; count], ReduceOp::Sum)?.wait().map(drop)
    });
    assert_eq!(again, shape, "after the step was frozen");
    let dtype = refused(|engine| match odd(engine) {
        true => engine.all_reduce("x", vec![0f64; 4], ReduceOp::Sum)?.wait().map(drop),
        false => engine.all_reduce("x", vec![0f32; 4], ReduceOp::Sum)?.wait().map(drop),
    });
    assert!(dtype.ends_with("rank 1 called all_reduce(f64 [4], sum)"), "{dtype}");
    let reduction = refused(|engine| {
        let op = if odd(engine) { ReduceOp::Max } else { ReduceOp::Sum };
        engine.all_reduce("x", vec![0f32; 4], op)?.wait().map(drop)
    });
    assert!(reduction.ends_with("rank 1 called all_reduce(f32 [4], max)"), "{reduction}");
    let root = refused(|engine| {
        engine.broadcast("x", vec![0f32; 4], usize::from(odd(engine)))?.wait().map(drop)
    });
    assert!(root.ends_with("rank 1 called broadcast(f32 [4], root 1)"), "{root}");
    let tensors = refused(|engine| {
        let together = Together(vec![vec![0f32; 4]; if odd(engine) { 1 } else { 2 }]);
        engine.all_reduce("x", together, ReduceOp::Sum)?.wait().map(drop)
    });
    assert!(tensors.ends_with("rank 1 called all_reduce(f32 [4], sum)"), "{tensors}");
    let kind = refused(|engine| match odd(engine) {
        true => engine.all_gather("x", vec![0f32; 4])?.wait().map(drop),
        false => engine.all_reduce("x", vec![0f32; 4], ReduceOp::Sum)?.wait().map(drop),
    });
    assert!(kind.ends_with("rank 1 called all_gather(f32 [4])"), "{kind}");
}

#[test]
fn a_name_given_twice_is_refused() {
    let told = Barrier::new(3);
    let refusal = refused(|engine| {
        let second = engine.rank() == 2;
        let first = second.then(|| engine.all_reduce("x", vec![1f32; 4], ReduceOp::Sum));
        if second {
            let twice = engine.all_reduce("x", vec![1f32; 4], ReduceOp::Sum);
            assert!(matches!(twice, Err(Error::Invalid(ref text)) if text.contains("\"x\"")));
            // What was said before this has been heard.
            engine.report()?;
        }
        told.wait();
        match first {
            Some(first) => first?.wait().map(drop),
            None => engine.all_reduce("x", vec![1f32; 4], ReduceOp::Sum)?.wait().map(drop),
        }
    });
    assert_eq!(
        refusal,
        "rank 2 submitted it again before it was done; give every operation its own name"
    );
}

#[test]
fn what_cannot_be_right_is_said_at_once() {
    all(engines(Over::SharedMemory, 2, EngineOptions::default(), |engine| {
        for name in ["", &"n".repeat(1025)] {
            let result = engine.all_reduce(name, vec![1f32], ReduceOp::Sum);
            assert!(matches!(result, Err(Error::Invalid(_))), "{result:?}");
        }
        assert!(matches!(engine.broadcast("b", vec![1f32], 2), Err(Error::Invalid(_))));
        assert_eq!(sum(engine, &"n".repeat(1024), 1.0)?, 2.0);
        Ok(())
    }));
}

#[test]
fn a_time_limit_names_who_is_missing() {
    let (over, limit) = (Over::Tcp, Duration::from_millis(300));
    let done = Barrier::new(3);
    let results = run_with(
        over,
        3,
        |options| options.limit(limit),
        |group| {
            let engine = Engine::new(group, EngineOptions::default())?;
            sum(&engine, "together", 1.0)?;
            let result = if engine.rank() == 2 { Ok(0.0) } else { sum(&engine, "alone", 1.0) };
            done.wait();
            Ok(result)
        },
    );
    for result in all(results).into_iter().take(2) {
        let error = result.unwrap_err();
        assert!(error.is_timeout(), "{error}");
        let text = error.to_string();
        assert!(text.contains("alone, all_reduce(f32 [1], sum), has waited"), "{text}");
        assert!(text.contains("for rank 2"), "{text}");
    }
}

/// Every rank makes other numbers of steps; zeros stand for those that have joined.
#[test]
fn joined_ranks_contribute_zeros() {
    for over in Over::ALL {
        let last = all(engines(over, 3, EngineOptions::default(), |engine| {
            let mut last = Vec::new();
            for era in 0..3usize {
                let steps = |rank: usize| 4 + (5 * rank + 3 * era) % 11;
                for step in 0..steps(engine.rank()) {
                    // The shape changes when some have joined.
                    let count = if step > 8 { 6 + era } else { 3 };
                    let handles = ["a", "b", "c"].map(|name| {
                        let op = if name == "c" { ReduceOp::Mean } else { ReduceOp::Sum };
                        engine.all_reduce(name, vec![6.0f32; count], op)
                    });
                    let here = (0..3).filter(|rank| step < steps(*rank)).count() as f32;
                    for (handle, expected) in handles.into_iter().zip([6.0, 6.0, 2.0]) {
                        assert_eq!(handle?.wait()?, vec![expected * here; count], "step {step}");
                    }
                    if step % 3 == 0 {
                        let mut nameless = [1i32];
                        engine.all_reduce_now(None, &mut nameless, ReduceOp::Sum)?;
                        assert_eq!(nameless[0], here as i32);
                    }
                    if here < 3.0 {
                        let refusal = engine.all_gather("d", vec![1u8])?.wait().unwrap_err();
                        assert!(refusal.to_string().contains("has joined and takes no part"));
                        let refusal = engine.all_reduce("e", vec![1u8], ReduceOp::Max)?.wait();
                        assert!(matches!(refusal, Err(Error::Mismatch { .. })));
                    }
                }
                last.push(engine.join()?);
                // Everybody goes on as before.
                assert_eq!(
                    engine.all_gather(None, vec![engine.rank() as u8])?.wait()?.values,
                    [0, 1, 2]
                );
            }
            Ok(last)
        }));
        assert!(last.iter().all(|other| *other == last[0]), "{last:?}");
    }
}

/// What was submitted before it joined is done, whether or not it lies in a frozen bucket that is not full.
#[test]
fn a_rank_that_joins_gets_what_it_has_begun() {
    all(engines(Over::SharedMemory, 2, EngineOptions::default(), |engine| {
        for _ in 0..5 {
            let handles =
                ["a", "b"].map(|name| engine.all_reduce(name, vec![1f32; 2], ReduceOp::Sum));
            for handle in handles {
                assert_eq!(handle?.wait()?, [2.0; 2]);
            }
        }
        let begun = match engine.rank() {
            1 => Some(engine.all_reduce("a", vec![1f32; 2], ReduceOp::Sum)?),
            _ => None,
        };
        engine.join()?;
        if let Some(begun) = begun {
            assert!(begun.is_done());
            assert_eq!(begun.wait()?, [1.0; 2]);
        }
        Ok(())
    }));
}

/// Every way of ending in the middle; the others' error names the rank.
#[test]
fn whoever_leaves_is_named() {
    for over in Over::ALL {
        for (leaver, way) in [(0, 0), (1, 0), (2, 0), (1, 1), (0, 1), (2, 2)] {
            let results = engines(over, 3, EngineOptions::default(), |engine| {
                for _ in 0..3 {
                    let handles = ["a", "b"]
                        .map(|name| engine.all_reduce(name, vec![1f32; 50], ReduceOp::Sum));
                    for handle in handles {
                        handle?.wait()?;
                    }
                }
                if engine.rank() == leaver {
                    match way {
                        0 => {}
                        1 => engine.group().abort("enough"),
                        _ => drop(engine.all_reduce("a", vec![1f32; 50], ReduceOp::Sum)?),
                    }
                    return Ok(());
                }
                let handles =
                    ["a", "b"].map(|name| engine.all_reduce(name, vec![1f32; 50], ReduceOp::Sum));
                for handle in handles {
                    handle?.wait()?;
                }
                Ok(())
            });
            for (rank, result) in results.into_iter().enumerate() {
                match result {
                    Ok(()) => assert_eq!(rank, leaver),
                    Err(Error::PeerLost { rank, .. } | Error::Aborted { rank, .. }) => {
                        assert_eq!(rank, leaver, "{over:?}");
                    }
                    Err(other) => unreachable!("{over:?}, {leaver}, {way}: {other:?}"),
                }
            }
        }
    }
}

/// A rank that waits for the others to join does not wait for one that has left.
#[test]
fn whoever_leaves_is_named_to_those_that_have_joined() {
    for over in [Over::SharedMemory, Over::Tcp] {
        for leaver in 0..3 {
            let results = engines(over, 3, EngineOptions::default(), |engine| {
                sum(engine, "together", 1.0)?;
                if engine.rank() == leaver { Ok(0) } else { engine.join() }
            });
            for (rank, result) in
                results.into_iter().enumerate().filter(|(rank, _)| *rank != leaver)
            {
                let Err(Error::PeerLost { rank: lost, .. }) = result else {
                    unreachable!("{rank}: {result:?}")
                };
                assert_eq!(lost, leaver);
            }
        }
    }
}

/// More decisions than links have room for, at once.
#[test]
fn thousands_of_operations_at_once() {
    for over in Over::ALL {
        const COUNT: usize = 12_000;
        let submitted = Barrier::new(2);
        all(engines(over, 2, EngineOptions::default(), |engine| {
            if engine.rank() == 0 {
                submitted.wait();
            }
            let handles = (0..COUNT)
                .map(|index| {
                    let name = format!("{index:0100}");
                    engine.broadcast(name.as_str(), vec![engine.rank() as u8], 1)
                })
                .collect::<Result<Vec<_>, Error>>()?;
            if engine.rank() == 1 {
                submitted.wait();
            }
            for handle in handles {
                assert_eq!(handle.wait()?, [1]);
            }
            Ok(())
        }));
    }
}

#[test]
fn handles_wait_and_call_back() {
    let meet = Barrier::new(2);
    all(engines(Over::SharedMemory, 2, EngineOptions::default(), |engine| {
        let (sender, called) = mpsc::channel();
        let soon = || Instant::now() + Duration::from_millis(30);
        if engine.rank() == 0 {
            let handle = engine.all_reduce("x", vec![1f32], ReduceOp::Sum)?;
            let start = Instant::now();
            assert!(!handle.wait_until(start + Duration::from_millis(30)) && !handle.is_done());
            assert!(start.elapsed() >= Duration::from_millis(30));
            let before = sender.clone();
            handle.when_done(move |result| before.send(result.is_ok()).unwrap());
            meet.wait();
            assert!(called.recv().unwrap());
            assert!(handle.is_done() && handle.wait_until(soon()));
            handle.when_done(move |result| sender.send(result.is_ok()).unwrap());
            assert!(called.try_recv().unwrap(), "at once");
            assert_eq!(handle.wait()?, [2.0]);
        } else {
            meet.wait();
            assert_eq!(sum(engine, "x", 1.0)?, 2.0);
        }
        // Of a refusal, before and after.
        let (sender, called) = mpsc::channel();
        let handle = engine.all_reduce("y", vec![1f32; 1 + engine.rank()], ReduceOp::Sum)?;
        let before = sender.clone();
        handle.when_done(move |result| before.send(result.unwrap_err().to_string()).unwrap());
        assert!(called.recv().unwrap().contains("rank 1 called all_reduce(f32 [2], sum)"));
        handle.when_done(move |result| sender.send(result.unwrap_err().to_string()).unwrap());
        assert!(called.recv().unwrap().contains("rank 1 called all_reduce(f32 [2], sum)"));
        assert!(handle.wait().is_err());
        // In frozen buckets.
        let count = Arc::new(AtomicUsize::new(0));
        for _ in 0..20 {
            let handles = ["a", "b"].map(|name| engine.all_reduce(name, vec![1f32], ReduceOp::Sum));
            for handle in handles {
                let (handle, count) = (handle?, Arc::clone(&count));
                handle.when_done(move |result| {
                    count.fetch_add(usize::from(result.is_ok()), Ordering::Relaxed);
                });
                handle.wait()?;
            }
        }
        // Who waits may be faster than who calls back.
        let start = Instant::now();
        while count.load(Ordering::Relaxed) < 40 && start.elapsed().as_secs() < 20 {
            thread::yield_now();
        }
        assert_eq!(count.load(Ordering::Relaxed), 40);
        engine.barrier(None)
    }));
}

#[test]
fn a_callback_that_panics_does_not_stop_the_engine() {
    all(engines(Over::SharedMemory, 2, EngineOptions::default(), |engine| {
        let handle = engine.all_reduce("x", vec![1f32], ReduceOp::Sum)?;
        handle.when_done(|_| unreachable!("on purpose"));
        assert_eq!(handle.wait()?, [2.0]);
        for round in 0..50 {
            assert_eq!(sum(engine, "after", round as f32)?, 2.0 * round as f32);
        }
        Ok(())
    }));
}

#[test]
fn an_engine_dropped_ends_what_is_on_its_way() {
    let results = all(run(Over::SharedMemory, 2, |group| {
        let engine = Engine::new(group, EngineOptions::default())?;
        let name = format!("only rank {}", engine.rank());
        let handle = engine.all_reduce(name.as_str(), vec![1f32; 9], ReduceOp::Sum)?;
        let (sender, called) = mpsc::channel();
        handle.when_done(move |result| sender.send(result.is_err()).unwrap());
        let waiting = thread::spawn(move || handle.wait());
        thread::sleep(Duration::from_millis(20));
        drop(engine);
        assert!(called.recv().unwrap());
        Ok(waiting.join().unwrap().unwrap_err().to_string())
    }));
    assert!(
        results.iter().all(|text| text.contains("closed") || text.contains("left")),
        "{results:?}"
    );
}

fn buckets_mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("deuteron")).count()
}

fn entries(path: &str) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

/// Runs the test of this name in a process of its own, where nobody else opens anything; true in there.
fn alone() -> bool {
    const ALONE: &str = "DEUTERON_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let _limit = Limit::seconds(120);
    let name = thread::current().name().unwrap().to_owned();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    false
}

/// Waits until there is no more of anything than before.
fn settles<T: PartialOrd + std::fmt::Debug>(before: [T; 3], now: impl Fn() -> [T; 3]) {
    let start = Instant::now();
    loop {
        let after = now();
        if after.iter().zip(&before).all(|(after, before)| after <= before) {
            return;
        }
        assert!(start.elapsed().as_secs() < 10, "{before:?} became {after:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn engines_leave_nothing_behind() {
    if !alone() {
        return;
    }
    let everything = || [entries("/proc/self/fd"), buckets_mapped(), entries("/proc/self/task")];
    let round = |over| {
        all(run(over, 3, |group| {
            let memory = group.bucket::<f32>(3000)?;
            let parts = memory.split([1000; 3])?;
            let engine = Engine::new(group, EngineOptions::default())?;
            let handles = parts
                .into_iter()
                .zip(["a", "b", "c"])
                .map(|(part, name)| engine.all_reduce(name, part, ReduceOp::Sum))
                .collect::<Result<Vec<_>, Error>>()?;
            for (index, handle) in handles.into_iter().enumerate() {
                if index > 0 {
                    handle.wait()?;
                }
            }
            engine.barrier(None)?;
            // Nobody waits for it any more, and it is not done when the engine is dropped, here or elsewhere.
            let name = engine.rank().to_string();
            drop(engine.all_reduce(name.as_str(), vec![1f32], ReduceOp::Sum));
            Ok(())
        }));
    };
    Over::ALL.into_iter().for_each(round);
    let before = everything();
    (0..100).for_each(|index| round(Over::ALL[index % Over::ALL.len()]));
    settles(before, everything);
}

/// Memory of a handle that nobody waits for is kept while the operation is on its way, and freed then.
#[test]
fn dropped_handles_leak_nothing() {
    if !alone() {
        return;
    }
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    all(run(Over::SharedMemory, 2, |group| {
        let memory = group.bucket::<f32>(64)?;
        let engine = Engine::new(group, EngineOptions::default())?;
        drop(engine.all_reduce("registered", memory, ReduceOp::Sum)?);
        let round = |round: usize| -> Result<(), Error> {
            drop(engine.all_reduce("reduced", vec![1u8; 100_000], ReduceOp::Sum)?);
            drop(engine.all_gather("gathered", vec![1u8; 50_000])?);
            drop(engine.all_gather(None, vec![1u8; 50_000])?);
            let odd = vec![1u8; 1 + engine.rank()];
            drop(engine.all_reduce(format!("refused {round}").as_str(), odd, ReduceOp::Sum)?);
            // What was asked for before it is done when it is.
            engine.barrier(None)
        };
        (0..50).try_for_each(round)?;
        let before = resident();
        (0..1000).try_for_each(round)?;
        engine.barrier(None)?;
        let grown = resident().saturating_sub(before);
        assert!(grown < 20 << 20, "{grown} bytes more");
        engine.barrier(None)
    }));
}

#[test]
fn a_report_says_who_waits_for_whom() {
    for over in [Over::SharedMemory, Over::Tcp] {
        let asked = Barrier::new(3);
        all(engines(over, 3, EngineOptions::default(), |engine| {
            assert_eq!(sum(engine, "together", 1.0)?, 3.0);
            let handle = match engine.rank() {
                2 => None,
                _ => Some(engine.all_reduce("gradient", vec![1f32; 5], ReduceOp::Sum)?),
            };
            asked.wait();
            let start = Instant::now();
            let report = loop {
                let report = engine.report()?;
                if report.contains("for rank 2") || start.elapsed().as_secs() > 20 {
                    break report;
                }
            };
            assert!(
                report.starts_with("gradient, all_reduce(f32 [5], sum), has waited 0"),
                "{report}"
            );
            assert!(report.contains("rank 2 on "), "{report}");
            assert!(report.contains(": in its own code since together for 0"), "{report}");
            asked.wait();
            match handle {
                Some(handle) => assert_eq!(handle.wait()?, [3.0; 5]),
                None => drop(engine.all_reduce("gradient", vec![1f32; 5], ReduceOp::Sum)?.wait()?),
            }
            engine.barrier(None)?;
            assert_eq!(engine.report()?, "no operation waits for a rank");
            asked.wait();
            Ok(())
        }));
    }
}

#[test]
fn several_threads_may_ask_for_a_report() {
    all(engines(Over::SharedMemory, 2, EngineOptions::default(), |engine| {
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..50).for_each(|_| drop(engine.report().unwrap())));
            }
        });
        engine.barrier(None)
    }));
}

/// Three engines whose groups overlap in a ring: one executor for all of a rank's groups would wait for itself.
#[test]
fn groups_in_a_ring_do_not_wait_for_each_other() {
    let _limit = Limit::seconds(60);
    let mut seats: Vec<Vec<(usize, LocalRendezvous)>> = (0..3).map(|_| Vec::new()).collect();
    for pair in 0..3usize {
        for (seat, rendezvous) in LocalRendezvous::group(2).into_iter().enumerate() {
            seats[(pair + seat) % 3].push((pair, rendezvous));
        }
    }
    let ready = Barrier::new(6);
    thread::scope(|scope| {
        for (rank, seats) in seats.into_iter().enumerate() {
            for (place, (pair, rendezvous)) in seats.into_iter().enumerate() {
                let ready = &ready;
                scope.spawn(move || {
                    let options = GroupOptions::default().limit(Duration::from_secs(30));
                    let group = Group::connect(&rendezvous, options).unwrap();
                    let engine = Engine::new(group, EngineOptions::default()).unwrap();
                    ready.wait();
                    for round in 0..200 {
                        let name = format!("{} of pair {pair}", round % 7);
                        let value = (rank + place + round) as f32;
                        let handle =
                            engine.all_reduce(name.as_str(), vec![value; 10], ReduceOp::Max);
                        assert!(handle.unwrap().wait().unwrap()[0] >= value);
                    }
                });
            }
        }
    });
}

/// What was logged by anybody in this process.
static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps messages in [`LOGGED`].
struct Log;

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut keep = |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            if field.name() == "message" {
                LOGGED.lock().unwrap().push(format!("{value:?}"));
            }
        };
        event.record(&mut keep);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_long_wait_is_reported() {
    tracing::subscriber::set_global_default(Log).unwrap();
    let options = EngineOptions::default().stall(Duration::from_millis(100));
    let logged = || {
        let logged = LOGGED.lock().unwrap();
        logged.iter().find(|text| text.contains("a gradient nobody else has")).cloned()
    };
    let said = Barrier::new(2);
    all(engines(Over::Tcp, 2, options, |engine| {
        assert_eq!(sum(engine, "warm", 1.0)?, 2.0);
        let handle = match engine.rank() {
            0 => {
                Some(engine.all_reduce("a gradient nobody else has", vec![1f32], ReduceOp::Sum)?)
            }
            _ => None,
        };
        let start = Instant::now();
        while logged().is_none() && start.elapsed().as_secs() < 20 {
            thread::sleep(Duration::from_millis(10));
        }
        said.wait();
        match handle {
            Some(handle) => handle.wait().map(drop),
            None => sum(engine, "a gradient nobody else has", 1.0).map(drop),
        }
    }));
    let text = logged().unwrap();
    assert!(text.starts_with("operations wait:\n"), "{text}");
    assert!(text.contains("for rank 1\nrank 1 on "), "{text}");
    assert!(text.contains(": in its own code since warm for "), "{text}");
}

/// A timeline as its events, after a look at whether they make sense: what each rank's engine did, by category.
fn timeline(path: &std::path::Path, ranks: usize) -> Vec<[usize; 3]> {
    let text = std::fs::read_to_string(path).unwrap();
    let events: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let mut counts = vec![[0; 3]; ranks];
    let mut open: BTreeMap<String, f64> = BTreeMap::new();
    for event in &events {
        let rank = event["pid"].as_u64().unwrap() as usize;
        let category = ["run", "negotiate", "wait"].iter().position(|cat| event["cat"] == *cat);
        let time = event["ts"].as_f64();
        match event["ph"].as_str().unwrap() {
            "M" => continue,
            "X" => {
                assert_eq!(event["cat"], "run");
                assert!(event["dur"].as_f64().unwrap() >= 0.0);
                assert!(event["args"]["operations"].as_u64().unwrap() >= 1);
                counts[rank][0] += 1;
            }
            "b" => {
                let id = event["id"].as_str().unwrap().to_owned();
                assert!(open.insert(id, time.unwrap()).is_none(), "{event} begins twice");
                counts[rank][category.unwrap()] += 1;
            }
            "e" => {
                let began = open.remove(event["id"].as_str().unwrap()).unwrap();
                assert!(began <= time.unwrap(), "{event} ends before it begins");
            }
            other => unreachable!("{other}"),
        }
    }
    assert!(open.is_empty(), "{open:?}");
    counts
}

fn timeline_path(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("deuteron-{name}-{}.json", std::process::id()))
}

#[test]
fn a_timeline_tells_what_every_rank_did() {
    const STEPS: usize = 1000;
    for over in Over::ALL {
        let paths = ["first", "second"].map(|name| timeline_path(&format!("{name}-{over:?}")));
        all(engines(over, 3, EngineOptions::default(), |engine| {
            let nowhere = engine.start_timeline("/nowhere/at/all.json");
            assert_eq!(nowhere.is_err(), engine.rank() == 0, "{nowhere:?}");
            for path in &paths {
                engine.start_timeline(path)?;
                engine.barrier(None)?;
                if engine.rank() == 2 {
                    while !engine.report()?.contains("for rank 2") {}
                    // The others have certainly fallen asleep by then.
                    thread::sleep(Duration::from_millis(300));
                }
                for step in 0..STEPS {
                    let handles = ["a \"quoted\" name", "b\\n\n"]
                        .map(|name| engine.all_reduce(name, vec![step as f32; 3], ReduceOp::Sum));
                    for handle in handles {
                        assert_eq!(handle?.wait()?, [3.0 * step as f32; 3]);
                    }
                }
                engine.barrier(None)?;
                engine.stop_timeline()?;
                engine.barrier(None)?;
            }
            Ok(())
        }));
        for path in &paths {
            let counts = timeline(path, 3);
            for [run, negotiate, wait] in &counts {
                // Most are carried out, and told, together.
                assert!(*run > STEPS / 2 && *negotiate >= STEPS, "{over:?}: {counts:?}");
                assert!(*wait > 0 || counts[0][2] > 0, "{over:?}: {counts:?}");
            }
            std::fs::remove_file(path).unwrap();
        }
    }
}

/// The lowest rank writes the file when the others have gone home, with what they did.
#[test]
fn a_timeline_does_not_wait_for_those_who_left() {
    for over in [Over::SharedMemory, Over::Tcp] {
        let path = timeline_path(&format!("left-{over:?}"));
        let home = Barrier::new(3);
        all(run(over, 3, |group| {
            let engine = Engine::new(group, EngineOptions::default())?;
            engine.start_timeline(&path)?;
            engine.barrier(None)?;
            for step in 0..20 {
                assert_eq!(sum(&engine, "x", step as f32)?, 3.0 * step as f32);
            }
            if engine.rank() > 0 {
                drop(engine);
                home.wait();
                return Ok(());
            }
            home.wait();
            engine.stop_timeline()
        }));
        assert!(timeline(&path, 3).iter().all(|[run, ..]| *run >= 20));
        std::fs::remove_file(path).unwrap();
    }
}
