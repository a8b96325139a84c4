//! Ranks as processes of one host, and what may happen to one of them.

use deuteron_chaos::{Case, Failed, Plan, Rank, all_fail, now};
use rustix::process::{Signal, geteuid};
use std::{thread, time::Duration};

const RANK: &str = env!("CARGO_BIN_EXE_rank");
const AT_ONCE: (Duration, Duration) = (Duration::ZERO, Duration::from_secs(1));
/// Dead after 5 s of silence, counted from the last heartbeat, which may be half a second old.
const BY_HEARTBEAT: (Duration, Duration) = (Duration::from_millis(4400), Duration::from_secs(7));

/// Over shared memory, and over TCP on the same host.
const WAYS: [&str; 2] = ["share=yes", "share=no"];

fn lost(ranks: &[Rank], who: usize, why: &str) -> Vec<String> {
    vec![format!("rank {who} on {}", ranks[who].host), "was lost during".into(), why.into()]
}

#[test]
fn results_are_right_with_more_ranks_than_cores() {
    let _case = Case::within(60);
    for way in WAYS {
        for memory in ["bucket", "plain-memory"] {
            let plan = Plan::new(RANK, 4).with("cores=2").with("rounds=20").with(way).with(memory);
            let ranks = plan.start();
            for rank in &ranks {
                let memory = rank.line("READY");
                assert!(
                    memory.contains(&format!("shares_memory={}", way == "share=yes")),
                    "{memory}"
                );
                rank.done();
            }
        }
    }
}

#[test]
fn a_killed_rank_is_named_with_its_signal() {
    let _case = Case::within(60);
    for options in
        [["len=4096", "plain-memory"], ["len=2000000", "plain-memory"], ["len=2000000", "bucket"]]
    {
        let [len, memory] = options;
        let ranks = Plan::new(RANK, 4).with(len).with(memory).start_and_meet();
        ranks[2].round(16);
        let event = ranks[2].signal(Signal::KILL);
        all_fail(&ranks, &[2], event, AT_ONCE, |_| lost(&ranks, 2, "killed by signal 9"));
    }
}

/// In a sub-group the number that users know is that in the whole group; the other sub-group has nothing to do with it.
#[test]
fn a_rank_killed_in_a_subgroup_is_named_by_its_outer_rank_and_missed_nowhere_else() {
    let _case = Case::within(60);
    for way in WAYS {
        let plan = Plan::new(RANK, 6).with("split=2").with("len=1000").with(way);
        let ranks = plan.start_and_meet();
        ranks.iter().for_each(|rank| rank.round(8));
        let event = ranks[3].signal(Signal::KILL);
        let why = if way == "share=yes" { "killed by signal 9" } else { "was killed" };
        all_fail(&ranks, &[0, 2, 3, 4], event, AT_ONCE, |_| lost(&ranks, 3, why));
        for rank in [0, 2, 4].map(|rank| &ranks[rank]) {
            rank.round(rank.rounds() + 100);
            assert!(!rank.lines().iter().any(|line| line.starts_with("ERROR")));
        }
    }
}

#[test]
fn a_rank_is_killed_in_the_middle_of_a_huge_call() {
    let _case = Case::within(60);
    let ranks = Plan::new(RANK, 4).with("len=1000").with("mode=huge").start_and_meet();
    ranks.iter().for_each(|rank| drop(rank.line("STARTED")));
    let event = ranks[1].signal(Signal::KILL);
    let failed = all_fail(&ranks, &[1], event, AT_ONCE, |_| lost(&ranks, 1, "killed by signal 9"));
    assert!(failed.iter().all(|failed| failed.message.contains("all_reduce(f32 × 67108864, sum)")));
}

#[test]
fn a_killed_rank_is_named_though_its_child_lives_on() {
    let _case = Case::within(60);
    for way in WAYS {
        let ranks = Plan::new(RANK, 3).with("fork").with(way).start_and_meet();
        let child = ranks[1].line("CHILD ");
        ranks[1].round(8);
        let event = ranks[1].signal(Signal::KILL);
        let why = if way == "share=yes" { "killed by signal 9" } else { "was killed" };
        all_fail(&ranks, &[1], event, AT_ONCE, |_| lost(&ranks, 1, why));
        assert!(std::fs::exists(format!("/proc/{child}")).unwrap(), "the child has ended as well");
    }
}

#[test]
fn a_rank_that_exits_is_named_with_its_status() {
    let _case = Case::within(60);
    for (way, why) in [("share=yes", "exited with status 3"), ("share=no", "its process has ended")]
    {
        let ranks = Plan::new(RANK, 4).with("mode=exit").with("who=3").with(way).start_and_meet();
        ranks[3].line("ODD");
        let event = now();
        assert_eq!(ranks[3].status().code(), Some(3));
        all_fail(&ranks, &[3], event, AT_ONCE, |_| lost(&ranks, 3, why));
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    let _case = Case::within(60);
    for way in WAYS {
        for mode in ["leave", "panic"] {
            let plan = Plan::new(RANK, 3).with(format!("mode={mode}")).with("who=1").with(way);
            let ranks = plan.start_and_meet();
            ranks[1].line("ODD");
            let event = now();
            all_fail(&ranks, &[1], event, AT_ONCE, |_| lost(&ranks, 1, "left the group"));
            if mode == "panic" {
                assert_eq!(ranks[1].status().code(), Some(101));
            }
        }
    }
}

#[test]
fn a_stopped_rank_is_given_up_by_its_silence_and_learns_of_it() {
    let _case = Case::within(60);
    // Both ways at once: most of it is waiting.
    let gangs = WAYS.map(|way| Plan::new(RANK, 3).with("len=1000").with(way).start_and_meet());
    let events = gangs.each_ref().map(|ranks| {
        ranks[1].round(8);
        ranks[1].signal(Signal::STOP)
    });
    for (ranks, event) in gangs.iter().zip(events) {
        all_fail(ranks, &[1], event, BY_HEARTBEAT, |_| lost(ranks, 1, "no sign of life for"));
        let event = ranks[1].signal(Signal::CONT);
        all_fail(ranks, &[0, 2], event, AT_ONCE, |_| lost(ranks, 1, "no sign of life for"));
    }
}

#[test]
fn a_rank_may_compute_for_long() {
    let _case = Case::within(60);
    // Four gangs at once, one of them keeping all cores busy.
    let modes = [
        ["mode=quiet", "share=yes"],
        ["mode=quiet", "share=no"],
        ["mode=busy", "share=yes"],
        ["mode=busy", "share=no"],
    ];
    let gangs = modes.map(|[mode, way]| {
        Plan::new(RANK, 4)
            .with(mode)
            .with("for=8000")
            .with("who=1")
            .with(way)
            .with("rounds=6")
            .start_and_meet()
    });
    for rank in gangs.iter().flatten() {
        rank.done();
    }
}

#[test]
fn a_call_that_differs_is_an_error_on_all_ranks_that_says_who() {
    let _case = Case::within(120);
    for (mode, ours, theirs) in [
        ("size", "all_reduce(f32 × 50000, sum)", "all_reduce(f32 × 50001, sum)"),
        ("dtype", "all_reduce(f32 × 50000, sum)", "all_reduce(i32 × 50000, sum)"),
        ("operation", "all_reduce(f32 × 50000, sum)", "all_reduce(f32 × 50000, max)"),
        ("kind", "all_reduce(f32 × 50000, sum)", "barrier()"),
        ("root", "broadcast(f32 × 50000, root 0)", "broadcast(f32 × 50000, root 1)"),
        ("varied", "all_gather_varied(f32 × 200000)", "all_gather_varied(i16 × 200000)"),
    ] {
        for way in WAYS {
            let plan =
                Plan::new(RANK, 4).with(format!("mode={mode}")).with("who=2").with("len=50000");
            let ranks = plan.with(way).start_and_meet();
            ranks[2].line("ODD");
            all_fail(&ranks, &[], now(), AT_ONCE, |_| {
                vec![ours.into(), format!("rank 2 called {theirs}"), "disagree".into()]
            });
        }
    }
}

#[test]
fn a_time_limit_ends_the_call_on_all_ranks() {
    let _case = Case::within(60);
    for way in WAYS {
        let plan =
            Plan::new(RANK, 3).with("mode=quiet").with("for=1500").with("who=1").with("limit=500");
        let ranks = plan.with(way).start_and_meet();
        ranks[1].line("ODD");
        let event = now();
        let soon = (Duration::from_millis(400), Duration::from_millis(1500));
        let awaited = format!("rank 1 on {}", ranks[1].host);
        let names =
            |_: &Rank| vec!["ran out of time".into(), "waited 0.5 s".into(), awaited.clone()];
        all_fail(&ranks, &[1], event, soon, names);
        // The one that they waited for hears of it when it comes.
        let late = (Duration::from_millis(1400), Duration::from_millis(2500));
        all_fail(&ranks, &[0, 2], event, late, names);
    }
}

#[test]
fn one_rank_ends_the_group_for_all() {
    let _case = Case::within(60);
    for way in WAYS {
        let ranks = Plan::new(RANK, 4).with("mode=abort").with("who=3").with(way).start_and_meet();
        ranks[3].line("ODD");
        let named =
            format!("rank 3 on {} ended the group: the loss is not a number", ranks[3].host);
        all_fail(&ranks, &[], now(), AT_ONCE, |_| vec![named.clone()]);
    }
}

#[test]
fn a_forked_child_may_not_use_the_group_and_does_not_disturb_it() {
    let _case = Case::within(60);
    for way in WAYS {
        let plan =
            Plan::new(RANK, 3).with("mode=in-child").with("who=1").with("rounds=40").with(way);
        let ranks = plan.start_and_meet();
        let refusal = ranks[1].line("CHILD-CALL ");
        assert!(refusal.contains("only the rank may use it"), "{refusal}");
        for rank in &ranks {
            rank.done();
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let _case = Case::within(60);
    let plan = Plan::new(RANK, 3).with("patience=500");
    let ranks = [plan.start_one(0), plan.start_one(2)];
    let end = ranks[0].line("END ");
    assert!(end.contains("rank 1 had not come"), "{end}");
    assert_eq!(ranks[0].status().code(), Some(7));
    // Rank 0 was the meeting point, so the other has nobody left to ask.
    assert_eq!(ranks[1].status().code(), Some(7));
}

#[test]
fn groups_come_and_go_and_leave_nothing_in_their_process() {
    let _case = Case::within(60);
    for way in WAYS {
        for tls in [false, true] {
            let plan =
                Plan::new(RANK, 3).with("groups=20").with("rounds=2").with("bucket").with(way);
            let plan = if tls { plan.tls() } else { plan };
            plan.with("len=10000").start().iter().for_each(Rank::done);
        }
        for tls in [false, true] {
            let plan = Plan::new(RANK, 4).with("groups=20").with("rounds=2").with("split=2");
            let plan = if tls { plan.tls() } else { plan };
            plan.with(way).with("len=10000").start().iter().for_each(Rank::done);
        }
    }
}

#[test]
fn several_ranks_die_at_once() {
    let _case = Case::within(60);
    for way in WAYS {
        let ranks = Plan::new(RANK, 4).with("len=1000").with(way).start_and_meet();
        ranks[3].round(8);
        // Else it may have ended of the other's death before its own.
        ranks[3].signal(Signal::STOP);
        let event = ranks[0].signal(Signal::KILL);
        ranks[3].signal(Signal::KILL);
        for failed in all_fail(&ranks, &[0, 3], event, AT_ONCE, |_| vec!["was lost during".into()])
        {
            let message = failed.message;
            assert!(message.contains("rank 0 on") || message.contains("rank 3 on"), "{message}");
        }
    }
}

/// A rank is stopped for less than it takes to be given up; all ranks are stopped for longer, as when a machine sleeps.
#[test]
fn a_pause_is_not_a_death() {
    let _case = Case::within(60);
    let gang = |way: &str| Plan::new(RANK, 3).with("len=1000").with(way).start_and_meet();
    let (one_of, all_of) = (WAYS.map(gang), WAYS.map(gang));
    let stopped = || one_of.iter().map(|ranks| &ranks[1]).chain(all_of.iter().flatten());
    stopped().for_each(|rank| rank.round(8));
    stopped().for_each(|rank| _ = rank.signal(Signal::STOP));
    thread::sleep(Duration::from_millis(3500));
    one_of.iter().for_each(|ranks| _ = ranks[1].signal(Signal::CONT));
    thread::sleep(Duration::from_millis(3500));
    all_of.iter().flatten().for_each(|rank| _ = rank.signal(Signal::CONT));
    let woken = now();
    for rank in one_of.iter().chain(&all_of).flatten() {
        // Long enough for whoever judges wrongly to do so.
        rank.wait_until("rounds after the pause", |_| {
            (now() - woken > Duration::from_secs(1)).then_some(())
        });
        rank.round(rank.rounds() + 1000);
        let lines = rank.lines();
        assert!(!lines.iter().any(|line| line.starts_with("ERROR")), "{lines:?}");
    }
}

#[test]
fn a_rank_without_memory_for_a_bucket_tells_all() {
    let _case = Case::within(60);
    let plan = Plan::new(RANK, 3).with("bucket").with("len=50000000").with("who=1");
    let ranks = plan.with("memory=100000000").start_and_meet();
    all_fail(&ranks, &[], now(), AT_ONCE, |_| {
        vec!["no memory for a bucket of 200000000 bytes".into()]
    });
}

/// Killed between two gatherings of the rendezvous, or after the last one.
#[test]
fn a_rank_that_dies_while_the_ranks_meet_is_named() {
    let _case = Case::within(60);
    for (way, gatherings) in [("share=yes", 2), ("share=no", 4)] {
        for gathering in 1..=gatherings {
            let plan = Plan::new(RANK, 4).with(way).with("who=1");
            let ranks = plan.with(format!("hold={gathering}")).start();
            ranks[1].line("HELD");
            let event = ranks[1].signal(Signal::KILL);
            for rank in [0, 2, 3].map(|rank| &ranks[rank]) {
                let Failed { at, message: end } = rank.end();
                assert!(end.contains("rank 1"), "rank {} does not name rank 1: {end}", rank.rank);
                assert!(at - event < AT_ONCE.1, "rank {} after {:?}: {end}", rank.rank, at - event);
                assert_eq!(rank.status().code(), Some(7));
            }
        }
    }
}

/// Too few descriptors to share memory, and then enough for that but not for a bucket.
#[test]
fn a_rank_without_descriptors_names_itself() {
    let _case = Case::within(60);
    for descriptors in 6..=14 {
        let plan =
            Plan::new(RANK, 3).with("bucket").with("len=100000").with("rounds=5").with("who=1");
        let ranks = plan.with(format!("descriptors={descriptors}")).start();
        let codes: Vec<Option<i32>> = ranks.iter().map(|rank| rank.status().code()).collect();
        if codes.iter().all(|code| *code == Some(0)) {
            continue;
        }
        assert!(codes.iter().all(|code| *code == Some(7)), "{codes:?}");
        let ends = ranks.iter().map(|rank| rank.end().message).collect::<Vec<_>>();
        assert!(ends[0].contains("rank 1") && ends[2].contains("rank 1"), "{ends:?}");
        assert!(ends[1].contains("open files") || ends[1].contains("descriptors"), "{ends:?}");
    }
}

/// A sub-group that one rank has no descriptors for ends the group that it is made from, on all ranks, with the reason.
#[test]
fn a_subgroup_that_cannot_be_made_says_why() {
    let _case = Case::within(60);
    let mut refused = 0;
    for descriptors in 12..=22 {
        let plan = Plan::new(RANK, 3).with("split=1").with("len=1000").with("rounds=5");
        let plan = plan.with("who=1").with(format!("descriptors={descriptors}"));
        let ranks = plan.start();
        let codes: Vec<Option<i32>> = ranks.iter().map(|rank| rank.status().code()).collect();
        if codes.iter().all(|code| *code == Some(0)) {
            continue;
        }
        assert!(codes.iter().all(|code| *code == Some(7)), "{codes:?}");
        let ends = ranks.iter().map(|rank| rank.end().message).collect::<Vec<_>>();
        assert!(ends[0].contains("rank 1") && ends[2].contains("rank 1"), "{ends:?}");
        assert!(ends[1].contains("open files") || ends[1].contains("descriptors"), "{ends:?}");
        refused += usize::from(ends[0].contains("a sub-group could not be made"));
    }
    assert!(refused > 0);
}

#[test]
fn ranks_in_containers_that_share_a_network_share_memory_and_know_who_died() {
    let _case = Case::within(60);
    if !geteuid().is_root() {
        return;
    }
    for way in WAYS {
        let ranks = Plan::new(RANK, 3).with("len=1000").with(way).contained().start_and_meet();
        assert!(ranks[0].line("READY").contains(&format!("shares_memory={}", way == "share=yes")));
        ranks[1].round(8);
        let event = ranks[1].signal(Signal::KILL);
        // Only its own namespace sees the signal before its parent has reaped it.
        all_fail(&ranks, &[1], event, AT_ONCE, |_| lost(&ranks, 1, "its process"));
    }
}
