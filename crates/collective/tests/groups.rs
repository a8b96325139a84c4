//! Sub-groups: over every transport, several at once, nested, come and gone, and what their errors say.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

mod support;

use deuteron_collective::{Engine, EngineOptions, Error, Group, ReduceOp};
use std::{
    process::Command,
    sync::{Barrier, Mutex},
    thread,
    time::{Duration, Instant},
};
use support::{Limit, Over, all, run};

/// Adds up the ranks' numbers in the outermost group, in a tensor small or large.
fn sum(group: &Group, len: usize) -> Result<(), Error> {
    let outer = group.outer_ranks();
    let mut tensor = vec![outer[group.rank()] as i64; len];
    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
    let expected = outer.iter().sum::<usize>() as i64;
    assert!(tensor.iter().all(|value| *value == expected), "{:?} is {expected}", tensor.first());
    Ok(())
}

#[test]
fn members_are_numbered_in_order_and_others_get_none() {
    for over in Over::ALL {
        all(run(over, 5, |group| {
            let rank = group.rank();
            for (list, members) in [
                (&[3, 1, 4][..], &[1, 3, 4][..]),
                (&[2], &[2]),
                (&[0, 1, 2, 3, 4], &[0, 1, 2, 3, 4]),
                (&[4, 0], &[0, 4]),
            ] {
                let made = group.subgroup(list)?;
                assert_eq!(made.is_some(), members.contains(&rank), "{over:?} {list:?}");
                if let Some(made) = made {
                    assert_eq!((made.size(), made.parent_ranks()), (members.len(), members));
                    assert_eq!(made.outer_ranks()[made.rank()], rank);
                    assert_eq!(made.generation(), group.generation());
                    for len in [1, 700, 200_000] {
                        sum(&made, len)?;
                    }
                    let mut bucket = made.bucket::<f32>(5_000)?;
                    bucket.fill(1.0);
                    made.all_reduce(&mut bucket, ReduceOp::Sum)?;
                    assert!(bucket.iter().all(|value| *value == members.len() as f32));
                }
                sum(&group, 10)?;
            }
            Ok(())
        }));
    }
}

#[test]
fn colours_make_groups_and_some_ranks_want_none() {
    for over in Over::ALL {
        all(run(over, 6, |group| {
            let rank = group.rank();
            let colour = (rank != 5).then_some(rank as u32 % 2 * u32::MAX);
            let Some(half) = group.split(colour)? else {
                assert_eq!(rank, 5);
                return Ok(());
            };
            let expected: &[usize] = if rank % 2 == 0 { &[0, 2, 4] } else { &[1, 3] };
            assert_eq!(half.parent_ranks(), expected);
            sum(&half, 30_000)
        }));
    }
}

/// Ranks of the mixed transport that share memory do so in their sub-group too, whoever else is in the parent.
#[test]
fn a_subgroup_takes_the_best_way_for_its_own_members() {
    all(run(Over::Mixed, 5, |group| {
        assert!(!group.shares_memory());
        if let Some(near) = group.subgroup(&[0, 2, 3])? {
            assert!(near.shares_memory());
            sum(&near, 1_000)?;
        }
        Ok(())
    }));
}

/// Each rank is in two of three groups and uses them from two threads, in opposite orders. One executor a rank, or one
/// lock, would end in a ring of ranks that wait for each other.
#[test]
fn overlapping_groups_are_used_at_the_same_time() {
    for over in Over::ALL {
        all(run(over, 3, |group| {
            let mut mine = Vec::new();
            for pair in [[0, 1], [1, 2], [2, 0]] {
                mine.extend(group.subgroup(&pair)?);
            }
            drop(group);
            // Rank 0 has {0,1} and {2,0}, rank 1 {0,1} and {1,2}, rank 2 {1,2} and {2,0}: as long as the first is held
            // up, only the second can go on.
            thread::scope(|scope| {
                let threads: Vec<_> = mine
                    .iter()
                    .map(|pair| {
                        scope.spawn(move || {
                            (0..200).try_for_each(|round| sum(pair, 1 << (round % 15)))
                        })
                    })
                    .collect();
                threads.into_iter().try_for_each(|thread| thread.join().unwrap())
            })
        }));
    }
}

/// A call that waits in one group keeps no thread of another group waiting.
#[test]
fn a_group_that_waits_holds_up_no_other() {
    for over in Over::ALL {
        let gate = Barrier::new(3);
        all(run(over, 3, |group| {
            let all_three = group.subgroup(&[0, 1, 2])?.unwrap();
            let pair = group.subgroup(&[0, 1])?;
            let Some(pair) = pair else {
                // Comes to the call that the others wait in only when they have done everything else.
                gate.wait();
                return sum(&all_three, 5_000);
            };
            thread::scope(|scope| {
                let waiting = scope.spawn(|| sum(&all_three, 5_000));
                thread::sleep(Duration::from_millis(20));
                (0..50).try_for_each(|_| sum(&pair, 5_000))?;
                // Groups can be made meanwhile, too.
                sum(&pair.subgroup(&[0, 1])?.unwrap(), 100)?;
                gate.wait();
                waiting.join().unwrap()
            })
        }));
    }
}

#[test]
fn subgroups_of_subgroups_and_of_groups_that_are_gone() {
    for over in Over::ALL {
        all(run(over, 6, |group| {
            let Some(upper) = group.subgroup(&[2, 3, 4, 5])? else { return Ok(()) };
            drop(group);
            let Some(inner) = upper.subgroup(&[1, 3])? else { return sum(&upper, 100) };
            assert_eq!((inner.parent_ranks(), inner.outer_ranks()), (&[1, 3][..], &[3, 5][..]));
            sum(&inner, 10_000)?;
            sum(&upper, 100)?;
            drop(upper);
            let last = inner.split(Some(inner.rank() as u32))?.unwrap();
            assert_eq!(last.outer_ranks(), [inner.outer_ranks()[inner.rank()]]);
            sum(&last, 10)
        }));
    }
}

#[test]
fn a_list_that_cannot_be_right_harms_nobody() {
    all(run(Over::SharedMemory, 3, |group| {
        if group.rank() == 1 {
            for (list, why) in [
                (&[0, 3][..], "there is no rank 3 among 3"),
                (&[1, 0, 1], "rank 1 is named twice"),
                (&[], "at least one rank"),
            ] {
                let error = group.subgroup(list).unwrap_err();
                assert!(matches!(&error, Error::Invalid(text) if text.contains(why)), "{error}");
            }
        }
        let made = group.subgroup(&[2, 1])?;
        made.map_or(Ok(()), |made| sum(&made, 5))
    }));
}

#[test]
fn different_lists_are_an_error_that_says_who_differs() {
    type Make = fn(&Group) -> Result<Option<Group>, Error>;
    let other: [(Make, &str); 3] = [
        (|group| group.subgroup(&[0, 2]), "rank 2 called subgroup([0, 2])"),
        (|group| group.split(Some(1)), "rank 2 called split()"),
        (|group| group.barrier().map(|()| None), "rank 2 called barrier()"),
    ];
    for over in Over::ALL {
        for (odd, named) in other {
            for error in all(run(over, 4, |group| {
                let start = Instant::now();
                let made = match group.rank() {
                    2 => odd(&group),
                    _ => group.subgroup(&[0, 1]),
                };
                assert!(start.elapsed() < Duration::from_secs(3));
                Ok(made.unwrap_err())
            })) {
                let Error::Mismatch { details, .. } = &error else { panic!("{over:?}: {error}") };
                assert!(details.contains(named), "{over:?}: {details}");
            }
        }
    }
}

/// A rank that leaves one group is named by its outer number there, and missed nowhere else.
#[test]
fn who_leaves_a_subgroup_is_named_by_its_outer_rank() {
    for over in Over::ALL {
        let (connected, tried) = (Barrier::new(6), Barrier::new(5));
        all(run(over, 6, |group| {
            let rank = group.rank();
            let half = group.split(Some(rank as u32 % 2))?.unwrap();
            let inner = half.subgroup(&[1, 2])?;
            drop(group);
            connected.wait();
            // The odd half is 1, 3, 5; rank 3 is its rank 1, and rank 0 of the inner group.
            if rank == 3 {
                return Ok(());
            }
            let both = [inner.map_or(Ok(()), |inner| sum(&inner, 20_000)), sum(&half, 20_000)];
            tried.wait();
            if rank % 2 == 0 {
                return both.into_iter().collect();
            }
            // Rank 1 is not in the inner group.
            let errors: Vec<Error> = both.into_iter().filter_map(Result::err).collect();
            assert_eq!(errors.len(), if rank == 1 { 1 } else { 2 });
            for error in errors {
                let text = format!("{over:?}, rank {rank}: {error}");
                let Error::PeerLost { rank: lost, cause, .. } = error else { panic!("{text}") };
                assert!(lost == 3 && cause.contains("left"), "{text}");
            }
            Ok(())
        }));
    }
}

/// Limits, disagreements and aborts of a sub-group name outer ranks as well.
#[test]
fn every_kind_of_error_names_outer_ranks() {
    for over in Over::ALL {
        for kind in 0..3 {
            let errors = all(run(over, 4, |group| {
                let Some(pair) = group.subgroup(&[1, 3])? else { return Ok(None) };
                let odd = pair.rank() == 1;
                let result = match (kind, odd) {
                    (0, true) => pair.barrier(),
                    (1, true) => {
                        pair.abort("enough");
                        pair.barrier()
                    }
                    (2, true) => {
                        thread::sleep(Duration::from_millis(300));
                        pair.barrier()
                    }
                    _ => pair.within(Duration::from_millis(100)).broadcast(&mut [0u8; 9], 0),
                };
                Ok(Some(result.and_then(|()| pair.barrier()).unwrap_err().to_string()))
            }));
            let named = ["rank 3 called barrier()", "rank 3 on ", "rank 1 on "][kind];
            let awaits = ["rank 1 called broadcast", "enough", " for rank 3 on "][kind];
            for error in errors.into_iter().flatten() {
                assert!(
                    error.contains(named) && error.contains(awaits),
                    "{over:?} {kind}: {error}"
                );
            }
        }
    }
}

/// Messages and engines are a sub-group's own too, and a message of another type names outer ranks.
#[test]
fn messages_and_engines_work_in_subgroups() {
    for over in Over::ALL {
        all(run(over, 4, |group| {
            let Some(part) = group.subgroup(&[0, 2, 3])? else { return Ok(()) };
            let (rank, size) = (part.rank(), part.size());
            let mut got = [0i32; 3];
            thread::scope(|scope| {
                let sending = scope.spawn(|| part.send(&[7 + rank as i16; 3], (rank + 1) % size));
                let from = (rank + size - 1) % size;
                let mut numbers = [0i16; 3];
                part.receive(&mut numbers, from)?;
                assert_eq!(numbers, [7 + from as i16; 3]);
                sending.join().unwrap()
            })?;
            let engine = Engine::new(part.clone(), EngineOptions::default())?;
            let mut tensor = [1f32; 100];
            engine.all_reduce_now("gradients", &mut tensor, ReduceOp::Sum)?;
            assert_eq!(tensor, [3.0; 100]);
            part.barrier()?;
            let error = match rank {
                0 => part.send(&[1i16; 3], 1).and_then(|()| part.barrier()).unwrap_err(),
                1 => part.receive(&mut got, 0).unwrap_err(),
                _ => part.barrier().unwrap_err(),
            };
            let text = error.to_string();
            assert!(text.contains("rank 0 called send(i16"), "{over:?}, {rank}: {text}");
            assert!(text.contains("rank 2 called receive(i32"), "{over:?}, {rank}: {text}");
            Ok(())
        }));
    }
}

/// A hundred sub-groups leave nothing behind. In a process of its own, where nobody else opens anything.
#[test]
fn subgroups_leave_nothing_behind() {
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
    let everything = || [entries("/proc/self/fd"), mappings(), entries("/proc/self/task")];
    for over in Over::ALL {
        let (gate, seen) = (Barrier::new(4), Mutex::new([0; 3]));
        all(run(over, 4, |group| {
            let once = || {
                let half = group.split(Some(group.rank() as u32 % 2))?.unwrap();
                sum(&half, 2_000)?;
                let most = group.subgroup(&[0, 1, 3])?;
                drop(half);
                most.map_or(Ok(()), |most| sum(&most, 10))
            };
            // What one of them sees while nobody does anything, for all to judge alike.
            let settled = || {
                gate.wait();
                if group.rank() == 0 {
                    *seen.lock().unwrap() = everything();
                }
                gate.wait();
                *seen.lock().unwrap()
            };
            // What is made once per process.
            once()?;
            let mut before = settled();
            // A goodbye may still be on its way.
            for _ in 0..20 {
                thread::sleep(Duration::from_millis(5));
                let now = settled();
                before = std::array::from_fn(|index| before[index].min(now[index]));
            }
            (0..50).try_for_each(|_| once())?;
            let start = Instant::now();
            loop {
                let after = settled();
                if (0..3).all(|index| after[index] <= before[index]) {
                    return Ok(());
                }
                assert!(start.elapsed().as_secs() < 10, "{over:?}: {before:?} became {after:?}");
                thread::sleep(Duration::from_millis(10));
            }
        }));
    }
}
