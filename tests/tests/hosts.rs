//! Ranks on several hosts, which are network namespaces, over TCP and TLS.

use deuteron_chaos::{Case, Failed, Hosts, Plan, Rank, all_fail, now};
use rustix::process::Signal;
use std::{thread, time::Duration};

const RANK: &str = env!("CARGO_BIN_EXE_rank");
const AT_ONCE: (Duration, Duration) = (Duration::ZERO, Duration::from_secs(1));
/// Dead after 5 s of silence, counted from the last heartbeat, which may be half a second old.
const BY_HEARTBEAT: (Duration, Duration) = (Duration::from_millis(4400), Duration::from_secs(7));
/// With five ranks not every pair is connected, so news has to be passed on. On a host with more ranks than another
/// some have no counterpart there.
const LAYOUTS: [&[usize]; 6] =
    [&[0, 1], &[0, 0, 1, 1], &[0, 1, 2, 3], &[0, 1, 0, 1, 1], &[0, 1, 2, 3, 4], &[0, 0, 0, 1]];

fn hosts_of(layout: &[usize]) -> usize {
    layout.iter().max().map_or(0, |last| last + 1)
}

fn plan<'a>(hosts: &'a Hosts, layout: &'a [usize], tls: bool) -> Plan<'a> {
    let plan = Plan::new(RANK, layout.len()).on(hosts, layout);
    if tls { plan.tls() } else { plan }
}

fn lost(ranks: &[Rank], who: usize) -> Vec<String> {
    vec![format!("rank {who} on {}", ranks[who].host), "was lost during".into()]
}

#[test]
fn results_are_right_on_every_layout() {
    let _case = Case::within(100);
    for layout in LAYOUTS {
        let Some(hosts) = Hosts::new(hosts_of(layout)) else { return };
        for tls in [false, true] {
            let memory = if tls { "bucket" } else { "plain-memory" };
            let ranks = plan(&hosts, layout, tls).with("rounds=8").with(memory).start();
            for rank in &ranks {
                // Memory is never shared across hosts, though these are one machine.
                let ready = rank.line("READY");
                assert!(ready.contains("shares_memory=false"), "{ready}");
                rank.done();
                let in_clear = rank.lines().iter().any(|line| line.contains("in clear text"));
                assert_eq!(in_clear, !tls, "clear text is logged, and only clear text");
            }
        }
    }
}

#[test]
fn memory_is_mapped_from_neighbours_only() {
    let _case = Case::within(60);
    let layout = [0, 0, 1, 1];
    let Some(hosts) = Hosts::new(2) else { return };
    let ranks = plan(&hosts, &layout, true).with("len=1000").start_and_meet();
    let segments = |rank: &Rank| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", rank.pid)).unwrap();
        let mut inodes: Vec<String> = maps
            .lines()
            .filter(|line| line.contains("deuteron-segment"))
            .filter_map(|line| line.split_whitespace().nth(4).map(str::to_owned))
            .collect();
        inodes.sort();
        inodes.dedup();
        inodes
    };
    let all: Vec<Vec<String>> = ranks.iter().map(segments).collect();
    assert!(all.iter().all(|segments| segments.len() == 2), "{all:?}");
    assert!(all[0] == all[1] && all[2] == all[3], "{all:?}");
    assert!(all[0].iter().all(|segment| !all[2].contains(segment)), "{all:?}");
}

#[test]
fn a_killed_rank_is_known_to_all_hosts() {
    let _case = Case::within(100);
    for layout in LAYOUTS {
        let Some(hosts) = Hosts::new(hosts_of(layout)) else { return };
        for tls in [false, true] {
            for fork in ["fork", "no-fork"] {
                let ranks =
                    plan(&hosts, layout, tls).with(fork).with("len=200000").start_and_meet();
                ranks[1].round(4);
                let event = ranks[1].signal(Signal::KILL);
                all_fail(&ranks, &[1], event, AT_ONCE, |_| lost(&ranks, 1));
                if fork == "fork" {
                    let child = ranks[1].line("CHILD ");
                    assert!(std::fs::exists(format!("/proc/{child}")).unwrap());
                }
            }
        }
    }
}

/// Hosts with several ranks, tensors of many chunks, plain and registered, and every rank that can be lost: of a host's
/// first lane, of its second, without one, alone on its host.
#[test]
fn whoever_is_killed_on_hosts_with_several_ranks_is_named() {
    let _case = Case::within(100);
    for layout in [&[0, 0, 1, 1][..], &[0, 0, 0, 1]] {
        let Some(hosts) = Hosts::new(2) else { return };
        for victim in 0..layout.len() {
            let memory = if victim % 2 == 0 { "bucket" } else { "plain-memory" };
            let plan = plan(&hosts, layout, victim == 0).with(memory).with("len=1500000");
            let ranks = plan.start_and_meet();
            ranks[victim].round(4);
            let event = ranks[victim].signal(Signal::KILL);
            all_fail(&ranks, &[victim], event, AT_ONCE, |_| lost(&ranks, victim));
        }
    }
}

/// All ranks treated alike give the same results, and a rank that asks for it decides for all.
#[test]
fn one_rank_makes_the_group_flat() {
    let _case = Case::within(60);
    let layout = [0, 0, 1, 1];
    let Some(hosts) = Hosts::new(2) else { return };
    let plan = plan(&hosts, &layout, false).with("rounds=8").with("flat=3");
    for rank in &plan.start() {
        rank.line("READY");
        rank.done();
    }
}

#[test]
fn a_rank_is_killed_while_bytes_crawl_over_a_slow_cable() {
    let _case = Case::within(60);
    let layout = [0, 0, 1, 1];
    let Some(hosts) = Hosts::new(2) else { return };
    // The call would take ten seconds.
    (0..2).for_each(|host| hosts.slow_down(host, "200mbit"));
    for tls in [false, true] {
        let ranks = plan(&hosts, &layout, tls).with("mode=huge").with("len=1000").start_and_meet();
        ranks.iter().for_each(|rank| drop(rank.line("STARTED")));
        let event = ranks[3].signal(Signal::KILL);
        let failed = all_fail(&ranks, &[3], event, AT_ONCE, |_| lost(&ranks, 3));
        let huge = "all_reduce(f32 × 67108864, sum)";
        assert!(failed.iter().all(|failed| failed.message.contains(huge)), "{failed:?}");
    }
}

#[test]
fn an_exit_and_a_leave_are_known_to_all_hosts() {
    let _case = Case::within(60);
    let layout = [0, 0, 1, 1];
    let Some(hosts) = Hosts::new(2) else { return };
    for tls in [false, true] {
        for (mode, why) in [("exit", ""), ("leave", "left the group"), ("panic", "left the group")]
        {
            let plan = plan(&hosts, &layout, tls).with(format!("mode={mode}")).with("who=2");
            let ranks = plan.with("len=1000").start_and_meet();
            ranks[2].line("ODD");
            let names = |_: &Rank| [lost(&ranks, 2), vec![why.into()]].concat();
            all_fail(&ranks, &[2], now(), AT_ONCE, names);
        }
    }
}

/// Stops a rank of each gang, and hears what the others say about it.
#[test]
fn a_stopped_rank_is_given_up_by_its_silence_and_learns_of_it() {
    let _case = Case::within(60);
    let layouts: [(&[usize], bool); 3] = [(&[0, 1], false), (&[0, 1], true), (&[0, 0, 1, 1], true)];
    let Some(hosts) = layouts.iter().map(|_| Hosts::new(2)).collect::<Option<Vec<_>>>() else {
        return;
    };
    let gangs: Vec<Vec<Rank>> = layouts
        .iter()
        .zip(&hosts)
        .map(|((layout, tls), hosts)| plan(hosts, layout, *tls).with("len=1000").start_and_meet())
        .collect();
    let stop = |ranks: &Vec<Rank>| {
        ranks[1].round(8);
        ranks[1].signal(Signal::STOP)
    };
    let events: Vec<Duration> = gangs.iter().map(stop).collect();
    for (ranks, event) in gangs.iter().zip(events) {
        all_fail(ranks, &[1], event, BY_HEARTBEAT, |_| lost(ranks, 1));
        let event = ranks[1].signal(Signal::CONT);
        let others: Vec<usize> = (0..ranks.len()).filter(|rank| *rank != 1).collect();
        all_fail(ranks, &others, event, AT_ONCE, |_| vec!["was lost during".into()]);
    }
}

#[test]
fn a_cut_cable_is_known_on_both_sides() {
    let _case = Case::within(60);
    // All at once: most of it is waiting.
    let gangs: [(&[usize], bool, &str); 5] = [
        (&[0, 1], false, "loop"),
        (&[0, 1], true, "loop"),
        (&[0, 0, 1, 1], true, "loop"),
        (&[0, 1, 2, 3], false, "loop"),
        (&[0, 1], true, "huge"),
    ];
    let hosts = gangs.iter().map(|(layout, ..)| Hosts::new(hosts_of(layout)));
    let Some(hosts) = hosts.collect::<Option<Vec<_>>>() else { return };
    let start = |((layout, tls, mode), hosts): (&(&'static [usize], bool, &str), &'_ Hosts)| {
        if *mode == "huge" {
            (0..2).for_each(|host| hosts.slow_down(host, "200mbit"));
        }
        let plan = plan(hosts, layout, *tls).with(format!("mode={mode}")).with("len=10000");
        let ranks = plan.start_and_meet();
        for rank in &ranks {
            if *mode == "huge" { drop(rank.line("STARTED")) } else { rank.round(4) }
        }
        ranks
    };
    let ranks: Vec<Vec<Rank>> = gangs.iter().zip(&hosts).map(start).collect();
    let cut = |(number, hosts): (usize, &Hosts)| {
        let event = now();
        if number % 2 == 0 {
            hosts.cut(1)
        } else {
            hosts.take_down(1)
        }
        event
    };
    let events: Vec<Duration> = hosts.iter().enumerate().map(cut).collect();
    for (((layout, _, mode), ranks), event) in gangs.iter().zip(&ranks).zip(events) {
        let call = if *mode == "huge" { "all_reduce(f32 × 67108864, sum)" } else { "" };
        let names = |_: &Rank| vec!["was lost during".into(), call.into()];
        let failed = all_fail(ranks, &[], event, BY_HEARTBEAT, names);
        for (rank, Failed { message, .. }) in failed.iter().enumerate() {
            let cut_off = layout[rank] == 1;
            let mut others = ranks.iter().filter(|other| (layout[other.rank] == 1) != cut_off);
            let named = others
                .any(|other| message.contains(&format!("rank {} on {}", other.rank, other.host)));
            assert!(named, "rank {rank}: {message}");
        }
    }
}

#[test]
fn a_cable_that_is_put_back_in_time_does_no_harm() {
    let _case = Case::within(60);
    let layout = [0, 0, 1, 1];
    let Some(hosts) = Hosts::new(2) else { return };
    let ranks = plan(&hosts, &layout, true).with("len=100000").start_and_meet();
    ranks.iter().for_each(|rank| rank.round(4));
    hosts.cut(1);
    thread::sleep(Duration::from_secs(2));
    hosts.mend(1);
    ranks.iter().for_each(|rank| rank.round(rank.rounds() + 32));
}

#[test]
fn one_rank_ends_the_group_on_all_hosts() {
    let _case = Case::within(60);
    let layout = [0, 1, 2, 3, 4];
    let Some(hosts) = Hosts::new(5) else { return };
    let plan = plan(&hosts, &layout, true).with("mode=abort").with("who=1").with("len=1000");
    let ranks = plan.start_and_meet();
    ranks[1].line("ODD");
    let named = format!("rank 1 on {} ended the group: the loss is not a number", ranks[1].host);
    all_fail(&ranks, &[], now(), AT_ONCE, |_| vec![named.clone()]);
}

#[test]
fn a_whole_host_is_killed() {
    let _case = Case::within(60);
    let layout = [0, 0, 1, 1];
    let Some(hosts) = Hosts::new(2) else { return };
    let ranks = plan(&hosts, &layout, true).with("fork").with("len=1000").start_and_meet();
    ranks[1].round(8);
    // Else it may have ended of its neighbour's death before its own.
    ranks[1].signal(Signal::STOP);
    let event = ranks[0].signal(Signal::KILL);
    ranks[1].signal(Signal::KILL);
    let host = format!(" on {}", ranks[0].host);
    all_fail(&ranks, &[0, 1], event, AT_ONCE, |_| vec![host.clone(), "was lost during".into()]);
}

#[test]
fn a_rank_may_compute_for_long() {
    let _case = Case::within(60);
    let layout = [0, 0, 1, 1];
    let Some(hosts) = Hosts::new(2) else { return };
    let plan = plan(&hosts, &layout, true).with("mode=quiet").with("for=7000").with("who=1");
    for rank in &plan.with("rounds=6").with("len=1000").start_and_meet() {
        rank.done();
    }
}

#[test]
fn a_call_that_differs_is_an_error_on_all_hosts_that_says_who() {
    let _case = Case::within(60);
    let layout = [0, 0, 1, 1];
    let Some(hosts) = Hosts::new(2) else { return };
    for tls in [false, true] {
        for mode in ["size", "dtype", "operation", "kind", "root", "varied"] {
            let plan = plan(&hosts, &layout, tls).with(format!("mode={mode}")).with("who=2");
            let ranks = plan.with("len=50000").start_and_meet();
            ranks[2].line("ODD");
            all_fail(&ranks, &[], now(), AT_ONCE, |_| {
                vec!["rank 2 called".into(), "disagree".into()]
            });
        }
    }
}

#[test]
fn a_group_without_an_identity_stays_on_its_machine() {
    let _case = Case::within(60);
    let Some(hosts) = Hosts::new(1) else { return };
    let rank = Plan::new(RANK, 1).on(&hosts, &[0]).with("default").start_one(0);
    let end = rank.line("END ");
    assert!(end.contains("no identity was given"), "{end}");
}
