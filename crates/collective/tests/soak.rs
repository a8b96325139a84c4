//! Many mixed calls in a row, every result checked: what goes wrong once in ten thousand times.
//!
//! `DEUTERON_SOAK_SEED` makes other calls; the seed of a run is printed.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]
#![expect(clippy::print_stdout, reason = "the seed of a run that fails")]

mod support;

use deuteron_collective::{
    Bucket, DType, Engine, EngineOptions, Error, Group, ReduceOp, Reduction,
};
use std::{any::Any, collections::BTreeMap, thread};
use support::{
    Over, all,
    reference::{Sample, Style, digest, input, scatter, with_type},
    run,
};

const RANKS: usize = 4;
/// Longest tensor.
const LONGEST: usize = 40_000;

/// Memory for tensors of one type.
struct Shelf<T> {
    bucket: Bucket<T>,
    plain: Vec<T>,
    output: Vec<T>,
}

impl<T: Sample> Shelf<T> {
    fn new(group: &Group) -> Result<Self, Error> {
        let bucket = group.bucket(LONGEST + 64)?;
        let [plain, output] = [1, RANKS].map(|times| vec![T::default(); times * LONGEST + 64]);
        Ok(Self { bucket, plain, output })
    }
}

/// One call, all of whose properties follow from a random number; returns the bits of its result in a word.
fn call<T: Sample>(group: &Group, shelf: &mut Shelf<T>, random: u64) -> Result<u64, Error> {
    let rank = group.rank();
    let choose = |what: usize, choices: usize| scatter(random, 100, what) as usize % choices;
    let count = match choose(0, 200) {
        0 => choose(1, LONGEST),
        1..20 => choose(1, 5_000),
        20..80 => choose(1, 600),
        _ => choose(1, 64),
    };
    let op = ReduceOp::ALL[choose(2, 5)];
    let factor = |what| [1.0, 1.0, 0.5][choose(what, 3)];
    let reduction = Reduction::from(op).prescale(factor(3)).postscale(factor(4));
    let values = |rank: usize, count| input::<T>(random, rank, count, Style::Exact, op);
    // Everybody in the bucket at one place or at different ones, some in it, or nobody.
    let (registered, start) = match choose(5, 5) {
        0 | 1 => (true, 0),
        2 => (true, rank),
        3 => (choose(6 + rank, 2) == 0, 3),
        _ => (false, 1),
    };
    let memory = if registered { &mut *shelf.bucket } else { &mut shelf.plain[..] };
    let tensor = &mut memory[start..start + count];
    tensor.iter_mut().zip(values(rank, count)).for_each(|(slot, value)| *slot = value);
    let judge = rank == choose(20, RANKS);
    let expect = |result: &[T], counts: &[usize]| {
        assert_eq!(result.len(), counts.iter().sum::<usize>());
        let mut result = result.iter();
        for (rank, count) in counts.iter().enumerate().filter(|_| judge) {
            assert!(values(rank, *count).zip(result.by_ref()).all(|(a, b)| a.bits() == b.bits()));
        }
    };
    match choose(21, 13) {
        10 => {
            let each = count / RANKS;
            let output = &mut shelf.output[..each];
            group.reduce_scatter(&tensor[..each * RANKS], output, reduction)?;
            let part = |from| values(from, count).skip(rank * each);
            let mut inputs: Vec<_> = (0..RANKS).map(part).collect();
            for (index, value) in output.iter().enumerate().filter(|_| judge) {
                let all: Vec<T> = inputs.iter_mut().filter_map(Iterator::next).collect();
                assert_eq!(value.bits(), T::reduce(&all, reduction).bits(), "{index} of {all:?}");
            }
            Ok(0)
        }
        11 => {
            let each = count / RANKS;
            let output = &mut shelf.output[..each * RANKS];
            group.all_to_all(&tensor[..each * RANKS], output)?;
            for (from, part) in output.chunks(each.max(1)).enumerate().filter(|_| judge) {
                let theirs = values(from, count).skip(rank * each);
                assert!(theirs.zip(part).all(|(a, b)| a.bits() == b.bits()));
            }
            Ok(0)
        }
        12 => {
            let (right, left) = ((rank + 1) % RANKS, (rank + RANKS - 1) % RANKS);
            // Small enough to fit into any link before it is received.
            let count = count.min(1_000);
            group.send(&tensor[..count], right)?;
            let output = &mut shelf.output[..count];
            group.receive(output, left)?;
            assert!(values(left, count).zip(&*output).all(|(a, b)| a.bits() == b.bits()));
            Ok(0)
        }
        0 => group.barrier().map(|()| 0),
        1 => {
            let output = &mut shelf.output[..RANKS * count];
            group.all_gather(tensor, output)?;
            expect(output, &[count; RANKS]);
            Ok(digest(output))
        }
        2 => {
            let counts: Vec<usize> = (0..RANKS).map(|rank| choose(30 + rank, count + 1)).collect();
            let gathered = group.all_gather_varied(&tensor[..counts[rank]])?;
            assert_eq!(gathered.counts, counts);
            expect(&gathered.values, &counts);
            Ok(digest(&gathered.values))
        }
        3 => {
            let root = choose(22, RANKS);
            group.broadcast(tensor, root)?;
            let mut counts = [0; RANKS];
            counts[root] = count;
            expect(tensor, &counts);
            Ok(digest(tensor))
        }
        _ => {
            group.all_reduce(tensor, reduction)?;
            if judge {
                let mut inputs: Vec<_> = (0..RANKS).map(|rank| values(rank, count)).collect();
                for (index, value) in tensor.iter().enumerate() {
                    let each: Vec<T> = inputs.iter_mut().filter_map(Iterator::next).collect();
                    let expected = T::reduce(&each, reduction);
                    assert_eq!(value.bits(), expected.bits(), "{index}: {value:?} of {each:?}");
                }
            }
            Ok(digest(tensor))
        }
    }
}

fn seed() -> u64 {
    let seed = std::env::var("DEUTERON_SOAK_SEED").ok().and_then(|text| text.parse().ok());
    seed.unwrap_or(20_261_115)
}

fn soak(over: Over, calls: usize) {
    let seed = seed();
    println!("{calls} calls over {over:?}, seed {seed}");
    let digests = all(run(over, RANKS, |group| {
        let mut shelves: BTreeMap<u8, Box<dyn Any>> = BTreeMap::new();
        let mut digests = Vec::with_capacity(calls);
        for index in 0..calls {
            let random = scatter(seed, 0, index);
            let dtype = DType::ALL[random as usize % DType::ALL.len()];
            digests.push(with_type!(dtype, T => {
                // Now and then a type gets new memory, while the old goes away.
                if random >> 32 & 1023 == 0 || !shelves.contains_key(&(dtype as u8)) {
                    shelves.insert(dtype as u8, Box::new(Shelf::<T>::new(&group)?));
                }
                let shelf = shelves.get_mut(&(dtype as u8)).and_then(|shelf| shelf.downcast_mut());
                call::<T>(&group, shelf.unwrap(), random)
            })?);
        }
        Ok(digests)
    }));
    for (rank, others) in digests.iter().enumerate().skip(1) {
        let differs = others.iter().zip(&digests[0]).position(|(other, first)| other != first);
        assert_eq!(differs, None, "the first call of which ranks 0 and {rank} have other results");
    }
}

#[test]
fn a_hundred_thousand_calls_over_shared_memory() {
    soak(Over::SharedMemory, 100_000);
}

#[test]
fn ten_thousand_calls_over_tls() {
    soak(Over::Tls, 10_000);
}

#[test]
fn ten_thousand_calls_over_pipes_and_tcp() {
    soak(Over::Mixed, 10_000);
}

#[test]
fn ten_thousand_calls_over_hosts_with_two_ranks() {
    soak(Over::Hosts, 10_000);
}

#[test]
fn ten_thousand_calls_over_unequal_hosts() {
    soak(Over::Unequal, 10_000);
}

/// Steps of an engine from several threads whose operations, sizes and memory change all the time; most of them come
/// often enough to be frozen, and none of them for long.
fn soak_engine(over: Over, steps: usize) {
    const NAMES: usize = 24;
    const THREADS: usize = 3;
    let seed = seed();
    println!("{steps} steps over {over:?}, seed {seed}");
    all(run(over, RANKS, |group| {
        let lengths = vec![40; NAMES];
        let mut parts: Vec<Option<Bucket<f32>>> =
            group.bucket(40 * NAMES)?.split_all(&lengths)?.into_iter().map(Some).collect();
        let engine = Engine::new(group, EngineOptions::default().bucket_bytes(2000))?;
        let rank = engine.rank();
        let mut start = 0;
        while start < steps {
            // A time in which steps are much the same.
            let choose = |what: usize, which: usize, choices: usize| {
                scatter(seed, what + 100 * start, which) as usize % choices
            };
            let length = 3 + choose(0, 0, 25);
            for step in start..start + length {
                let odd = choose(1, step, 6);
                let names = (0..NAMES).filter(|name| choose(2, *name, 3) > 0);
                // One is missing now and then.
                let names: Vec<usize> =
                    names.filter(|name| odd > 0 || choose(3, *name, 4) > 0).collect();
                let value = |rank: usize, name: usize| ((7 * rank + name + step) % 50) as f32;
                let submit = |name: usize, part: Option<Bucket<f32>>| {
                    let text = format!("tensor {name}");
                    let count = 1 + choose(4, name, 39);
                    Ok::<_, Error>(match part {
                        Some(mut part) => {
                            part.fill(value(rank, name));
                            Ok(engine.all_reduce(text.as_str(), part, ReduceOp::Sum)?)
                        }
                        None => {
                            let tensor = vec![value(rank, name); count];
                            Err(engine.all_reduce(text.as_str(), tensor, ReduceOp::Sum)?)
                        }
                    })
                };
                let mut own: Vec<Vec<(usize, Option<Bucket<f32>>)>> =
                    (0..THREADS).map(|_| Vec::new()).collect();
                for name in &names {
                    let registered = choose(5, *name, 2) == 0;
                    let part = if registered { parts[*name].take() } else { None };
                    own[(name + rank) % THREADS].push((*name, part));
                }
                let work = |mut own: Vec<(usize, Option<Bucket<f32>>)>| {
                    own.sort_by_key(|(name, _)| scatter(step as u64, rank, *name));
                    let begun = own
                        .into_iter()
                        .map(|(name, part)| Ok((name, submit(name, part)?)))
                        .collect::<Result<Vec<_>, Error>>()?;
                    let mut back = Vec::new();
                    for (name, handle) in begun {
                        let sum: f32 = (0..RANKS).map(|rank| value(rank, name)).sum();
                        match handle {
                            Ok(part) => {
                                let part = part.wait()?;
                                assert!(part.iter().all(|value| *value == sum), "step {step}");
                                back.push((name, part));
                            }
                            Err(plain) => {
                                let plain = plain.wait()?;
                                assert!(plain.iter().all(|value| *value == sum), "step {step}");
                            }
                        }
                    }
                    Ok::<_, Error>(back)
                };
                let back = thread::scope(|scope| {
                    let threads: Vec<_> =
                        own.into_iter().map(|own| scope.spawn(|| work(own))).collect();
                    let joined = threads.into_iter().map(|thread| thread.join().unwrap());
                    joined.collect::<Result<Vec<_>, Error>>()
                })?;
                for (name, part) in back.into_iter().flatten() {
                    parts[name] = Some(part);
                }
            }
            start += length;
        }
        Ok(())
    }));
}

#[test]
fn three_thousand_steps_of_an_engine_over_shared_memory() {
    soak_engine(Over::SharedMemory, 3_000);
}

#[test]
fn a_thousand_steps_of_an_engine_over_tcp() {
    soak_engine(Over::Tcp, 1_000);
}
