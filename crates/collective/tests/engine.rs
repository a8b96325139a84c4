//! Named operations in any order, against what each of them computes alone.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

mod support;

use deuteron_collective::{
    Engine, EngineOptions, Error, Group, Handle, ReduceOp, Reduction, Together,
};
use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};
use support::{Over, all, reference::scatter, run};

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
