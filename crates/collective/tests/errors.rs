//! What every rank gets when one of them errs, differs, leaves, sleeps or gives up.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

mod support;

use deuteron_collective::{Error, Group, ReduceOp, Reduction};
use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};
use support::{Over, all};

/// No error may take longer to reach everybody.
const SOON: Duration = Duration::from_secs(3);

/// Runs `body` on every rank once all have their group: an error finds nobody still on the way into it.
fn run<R: Send>(
    over: Over,
    ranks: usize,
    body: impl Fn(Group) -> Result<R, Error> + Sync,
) -> Vec<R> {
    let connected = Barrier::new(ranks);
    all(support::run(over, ranks, |group| {
        connected.wait();
        body(group)
    }))
}

#[test]
fn a_mistake_is_refused_and_harms_nobody() {
    for over in Over::ALL {
        run(over, 3, |group| {
            if group.rank() == 1 {
                let error = group.all_gather(&[1u8; 4], &mut [0; 11]).unwrap_err();
                assert!(matches!(&error, Error::Invalid(why) if why.contains("12, not 11")));
                let error = group.broadcast(&mut [1u8; 4], 3).unwrap_err();
                assert!(matches!(&error, Error::Invalid(why) if why.contains("no rank 3")));
                let sum = ReduceOp::Sum;
                for (result, text) in [
                    (
                        group.reduce_scatter(&[1u8; 7], &mut [0; 2], sum),
                        "needs an input of 6, not 7",
                    ),
                    (
                        group.reduce_scatter_varied(&[1u8; 6], &[1, 5], &mut [0; 5], sum),
                        "among 3 ranks needs as many counts, not 2",
                    ),
                    (
                        group.reduce_scatter_varied(&[1u8; 6], &[1, 3, 3], &mut [0; 3], sum),
                        "input of 6 elements: [1, 3, 3]",
                    ),
                    (
                        group.reduce_scatter_varied(&[1u8; 6], &[1, 3, 2], &mut [0; 2], sum),
                        "gives rank 1 3 elements, and its output has 2",
                    ),
                    (group.all_to_all(&[1u8; 7], &mut [0; 7]), "multiple of 3, not 7 and 7"),
                    (group.all_to_all(&[1u8; 6], &mut [0; 3]), "multiple of 3, not 6 and 3"),
                    (
                        group.all_to_all_varied(&[1u8; 6], &[1, 2, 3, 0]).map(drop),
                        "needs as many counts, not 4",
                    ),
                    (
                        group.all_to_all_varied(&[1u8; 6], &[1, 2, usize::MAX]).map(drop),
                        "input of 6 elements",
                    ),
                ] {
                    let error = result.unwrap_err();
                    assert!(matches!(&error, Error::Invalid(why) if why.contains(text)), "{error}");
                }
            }
            let mut tensor = [group.rank() as i32 + 1];
            group.all_reduce(&mut tensor, ReduceOp::Product)?;
            assert_eq!(tensor, [6]);
            Ok(())
        });
    }
}

type Call = fn(&Group) -> Result<(), Error>;

fn reduce<const N: usize>(group: &Group, reduction: impl Into<Reduction>) -> Result<(), Error> {
    group.all_reduce(&mut vec![1f32; N], reduction)
}

fn cast<const N: usize>(group: &Group, root: usize) -> Result<(), Error> {
    group.broadcast(&mut vec![1i16; N], root)
}

fn scatter<const N: usize>(group: &Group, reduction: impl Into<Reduction>) -> Result<(), Error> {
    group.reduce_scatter(&vec![1f32; N * group.size()], &mut [0.0; N], reduction)
}

/// Parts of `N` elements but for rank 0, whose last element may be rank 1's.
fn scatter_varied<const N: usize>(group: &Group, moved: bool) -> Result<(), Error> {
    let mut counts = vec![N; group.size()];
    counts[0] -= usize::from(moved);
    counts[1] += usize::from(moved);
    let mut output = vec![0f32; counts[group.rank()]];
    let input = vec![1f32; N * group.size()];
    group.reduce_scatter_varied(&input, &counts, &mut output, ReduceOp::Sum)
}

fn exchange<const N: usize>(group: &Group) -> Result<(), Error> {
    group.all_to_all(&vec![1u8; N * group.size()], &mut vec![0; N * group.size()])
}

fn exchange_varied(group: &Group) -> Result<(), Error> {
    group.all_to_all_varied(&vec![1u8; group.size()], &vec![1; group.size()]).map(drop)
}

/// Once in agreement before.
fn twice(group: &Group, last: Call) -> Result<(), Error> {
    exchange::<1>(group).and_then(|()| last(group))
}

/// What most ranks call, what one calls instead, and how a message names that.
const DIFFERENCES: &[(Call, Call, &str)] = &[
    (
        |g| reduce::<8>(g, ReduceOp::Sum),
        |g| reduce::<9>(g, ReduceOp::Sum),
        "all_reduce(f32 × 9, sum)",
    ),
    (
        |g| reduce::<5_000>(g, ReduceOp::Sum),
        |g| reduce::<5_001>(g, ReduceOp::Sum),
        "all_reduce(f32 × 5001, sum)",
    ),
    (
        |g| reduce::<300_000>(g, ReduceOp::Sum),
        |g| reduce::<7>(g, ReduceOp::Sum),
        "all_reduce(f32 × 7, sum)",
    ),
    (
        |g| reduce::<8>(g, ReduceOp::Sum),
        |g| g.all_reduce(&mut [1i32; 8], ReduceOp::Sum),
        "all_reduce(i32 × 8, sum)",
    ),
    (
        |g| reduce::<5_000>(g, ReduceOp::Sum),
        |g| reduce::<5_000>(g, ReduceOp::Max),
        "all_reduce(f32 × 5000, max)",
    ),
    (
        |g| reduce::<8>(g, ReduceOp::Mean),
        |g| reduce::<8>(g, Reduction::from(ReduceOp::Mean).prescale(0.5)),
        "all_reduce(f32 × 8, mean, prescale 0.5)",
    ),
    (
        |g| reduce::<300_000>(g, ReduceOp::Mean),
        |g| reduce::<300_000>(g, Reduction::from(ReduceOp::Mean).postscale(2.0)),
        "all_reduce(f32 × 300000, mean, postscale 2)",
    ),
    (|g| cast::<10>(g, 0), |g| cast::<10>(g, 1), "broadcast(i16 × 10, root 1)"),
    (|g| cast::<100_000>(g, 0), |g| cast::<100_000>(g, 1), "broadcast(i16 × 100000, root 1)"),
    (|g| cast::<10>(g, 1), |g| cast::<11>(g, 1), "broadcast(i16 × 11, root 1)"),
    (|g| cast::<10>(g, 0), Group::barrier, "barrier()"),
    (Group::barrier, |g| cast::<100_000>(g, 1), "broadcast(i16 × 100000, root 1)"),
    (|g| reduce::<300_000>(g, ReduceOp::Sum), Group::barrier, "barrier()"),
    (
        |g| g.all_gather(&[1u8; 3], &mut vec![0; 3 * g.size()]),
        |g| g.all_gather(&[1u8; 4], &mut vec![0; 4 * g.size()]),
        "all_gather(u8 × 4)",
    ),
    (
        |g| g.all_gather_varied(&[1f32; 2]).map(drop),
        |g| g.all_gather_varied(&[1f64; 2]).map(drop),
        "all_gather_varied(f64 × ",
    ),
    (|g| g.bucket::<u8>(10).map(drop), |g| g.bucket::<u8>(11).map(drop), "bucket(u8 × 11)"),
    (|g| g.bucket::<u8>(10).map(drop), Group::barrier, "barrier()"),
    (
        |g| scatter::<2>(g, ReduceOp::Sum),
        |g| scatter::<2>(g, ReduceOp::Max),
        "reduce_scatter(f32 × ",
    ),
    (
        |g| scatter::<60_000>(g, ReduceOp::Sum),
        |g| scatter::<60_001>(g, ReduceOp::Sum),
        "reduce_scatter(f32 × ",
    ),
    (|g| scatter::<60_000>(g, ReduceOp::Sum), Group::barrier, "barrier()"),
    (
        |g| scatter_varied::<4>(g, false),
        |g| scatter_varied::<4>(g, true),
        "reduce_scatter_varied(f32 × ",
    ),
    (
        |g| scatter_varied::<90_000>(g, false),
        |g| scatter_varied::<90_000>(g, true),
        "reduce_scatter_varied(f32 × ",
    ),
    (
        |g| scatter_varied::<4>(g, false),
        |g| scatter::<4>(g, ReduceOp::Sum),
        "reduce_scatter(f32 × ",
    ),
    (exchange::<3>, exchange::<4>, "all_to_all(u8 × "),
    (exchange::<3>, Group::barrier, "barrier()"),
    (|g| twice(g, exchange::<3>), |g| twice(g, exchange::<4>), "all_to_all(u8 × "),
    (|g| twice(g, exchange::<300_000>), |g| twice(g, exchange::<5>), "all_to_all(u8 × "),
    (|g| twice(g, exchange::<3>), |g| twice(g, Group::barrier), "barrier()"),
    (|g| twice(g, Group::barrier), |g| twice(g, exchange::<3>), "all_to_all(u8 × "),
    (exchange_varied, exchange::<1>, "all_to_all(u8 × "),
];

/// A difference is an error on all ranks that says who differs. A broadcast over links may reach ranks before it
/// is found out; these learn of it in their next call.
#[test]
fn a_difference_is_an_error_everywhere() {
    for (index, (usual, odd, text)) in DIFFERENCES.iter().enumerate() {
        for over in Over::ALL {
            for (ranks, stranger) in [(2, 1), (3 + index % 2, 0), (5 - index % 2, 2), (4, 3)] {
                let context = format!("difference {index} over {over:?}, {stranger} of {ranks}");
                let may_return = (7..12).contains(&index) && over != Over::SharedMemory;
                let results = run(over, ranks, |group| {
                    let start = Instant::now();
                    let call = if group.rank() == stranger { odd } else { usual };
                    let first = call(&group);
                    assert!(first.is_err() || may_return, "{context}: {} got by", group.rank());
                    let next = group.barrier().unwrap_err();
                    assert!(start.elapsed() < SOON, "{context}: it took {:?}", start.elapsed());
                    Ok([first.err(), Some(next)])
                });
                for (rank, errors) in results.into_iter().enumerate() {
                    for error in errors.into_iter().flatten() {
                        let Error::Mismatch { details, .. } = &error else {
                            panic!("{context}, on rank {rank}: {error}");
                        };
                        let named = format!("rank {stranger} called {text}");
                        assert!(details.contains(&named), "{context}, on rank {rank}: {details}");
                    }
                }
            }
        }
    }
}

/// Runs `last` on one rank while the others wait for it, and returns what they get, in this call and the next.
fn without(
    over: Over,
    ranks: usize,
    absent: usize,
    last: impl Fn(Group) + Sync,
) -> Vec<(usize, [Error; 2])> {
    let results = run(over, ranks, |group| {
        let rank = group.rank();
        if rank == absent {
            last(group);
            return Ok(None);
        }
        let start = Instant::now();
        let first = group.all_reduce(&mut vec![1f32; 20_000], ReduceOp::Sum).unwrap_err();
        assert!(start.elapsed() < SOON, "{over:?}: it took {:?}", start.elapsed());
        Ok(Some((rank, [first, group.barrier().unwrap_err()])))
    });
    results.into_iter().flatten().collect()
}

#[test]
fn who_leaves_early_is_named() {
    for over in Over::ALL {
        for (ranks, absent) in [(2, 0), (3, 2), (4, 1), (6, 5)] {
            for (rank, errors) in without(over, ranks, absent, drop) {
                let context = format!("{over:?}, rank {rank} without {absent} of {ranks}");
                for error in &errors {
                    let Error::PeerLost { rank: lost, cause, .. } = error else {
                        panic!("{context}: {error}");
                    };
                    assert_eq!(*lost, absent, "{context}: {error}");
                    assert!(cause.contains("left"), "{context}: {error}");
                }
                let Error::PeerLost { operation, .. } = &errors[0] else { unreachable!() };
                assert_eq!(operation, "all_reduce(f32 × 20000, sum)");
            }
        }
    }
}

/// A function that panics drops its group on the way.
#[test]
fn who_panics_is_named() {
    for over in Over::ALL {
        let panics = |group: Group| {
            let caught = thread::scope(|scope| {
                let thread = thread::Builder::new().name("a rank that panics on purpose".into());
                thread.spawn_scoped(scope, move || panic!("{group:?}")).unwrap().join()
            });
            assert!(caught.is_err());
        };
        for (_, [first, _]) in without(over, 3, 1, panics) {
            assert!(matches!(first, Error::PeerLost { rank: 1, .. }), "{first}");
        }
    }
}

#[test]
fn an_abort_reaches_everybody_with_its_reason() {
    for over in Over::ALL {
        for (ranks, absent) in [(2, 1), (5, 0)] {
            let gives_up = |group: Group| {
                thread::sleep(Duration::from_millis(20));
                group.abort("no rows left");
                let error = group.barrier().unwrap_err();
                assert!(
                    matches!(&error, Error::Aborted { reason, .. } if reason == "no rows left")
                );
            };
            for (rank, errors) in without(over, ranks, absent, gives_up) {
                for error in errors {
                    let Error::Aborted { rank: by, reason, .. } = &error else {
                        panic!("{over:?}, rank {rank}: {error}");
                    };
                    assert_eq!((*by, reason.as_str()), (absent, "no rows left"));
                }
            }
        }
    }
}

/// The limit of one rank ends the group for all; the message says who waited for whom.
#[test]
fn a_limit_ends_the_wait() {
    for over in Over::ALL {
        let results = run(over, 4, |group| {
            let start = Instant::now();
            let error = if group.rank() == 2 {
                thread::sleep(Duration::from_millis(400));
                group.barrier().unwrap_err()
            } else {
                let limited = group.within(Duration::from_millis(100));
                limited.all_gather(&[1u8], &mut [0; 4]).unwrap_err()
            };
            assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
            assert!(error.is_timeout(), "{over:?}: {error}");
            Ok(error.to_string())
        });
        for error in results {
            assert!(error.contains("waited 0.1 s in all_gather(u8 × 1) for"), "{error}");
        }
    }
}

/// Without a limit a call waits as long as everybody lives.
#[test]
fn a_slow_rank_is_waited_for() {
    thread::scope(|scope| {
        for over in Over::ALL {
            scope.spawn(move || {
                run(over, 3, |group| {
                    if group.rank() == 1 {
                        thread::sleep(Duration::from_millis(1_500));
                    }
                    let mut tensor = [group.rank() as i64];
                    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
                    assert_eq!(tensor, [3]);
                    Ok(())
                });
            });
        }
    });
}

/// Tensors stay what they were when their group ends, well or badly.
#[test]
fn a_bucket_outlives_its_group() {
    for over in Over::ALL {
        let reduced = Barrier::new(2);
        let buckets = run(over, 2, |group| {
            let mut bucket = group.bucket::<i32>(10_000)?;
            bucket.fill(7);
            group.all_reduce(&mut bucket, ReduceOp::Sum)?;
            reduced.wait();
            if group.rank() == 1 {
                group.abort("enough");
            }
            Ok(bucket)
        });
        for bucket in buckets {
            assert!(bucket.iter().all(|value| *value == 14));
        }
    }
}
