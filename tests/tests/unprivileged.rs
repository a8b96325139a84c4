//! Ranks as an ordinary user, and as two users.
#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use deuteron_chaos::{Case, Directory, Plan, Rank, all_fail};
use rustix::process::{Signal, geteuid};
use std::{fs, path::PathBuf, time::Duration};

const NOBODY: u32 = 65534;

/// The program where everybody may run it: the build's own directory may be closed to others.
fn program(directory: &Directory) -> PathBuf {
    let copy = directory.path().join("rank");
    fs::copy(env!("CARGO_BIN_EXE_rank"), &copy).unwrap();
    copy
}

/// As nobody, unless this is an ordinary user already.
fn unprivileged(plan: Plan<'_>) -> Plan<'_> {
    if geteuid().is_root() { plan.user(NOBODY) } else { plan }
}

#[test]
fn an_ordinary_user_shares_memory_and_knows_who_died() {
    let _case = Case::within(60);
    let directory = Directory::new();
    for tls in [false, true] {
        for memory in ["bucket", "plain-memory"] {
            let mut plan = Plan::new(program(&directory), 4).with(memory);
            if tls {
                plan = plan.tls();
            }
            let ranks = unprivileged(plan).start();
            let shares = |rank: &Rank| rank.line("READY").contains("shares_memory=true");
            assert!(ranks.iter().all(shares));
            ranks[3].line("ROUND 16");
            let event = ranks[3].signal(Signal::KILL);
            let soon = (Duration::ZERO, Duration::from_secs(1));
            let named = format!("rank 3 on {}", ranks[3].host);
            all_fail(&ranks, &[3], event, soon, |_| {
                vec![named.clone(), format!("its process {} was killed by signal 9", ranks[3].pid)]
            });
        }
    }
}

#[test]
fn two_users_of_a_host_share_no_memory_and_are_told_why() {
    let _case = Case::within(60);
    if !geteuid().is_root() {
        return;
    }
    let directory = Directory::new();
    let plan = Plan::new(program(&directory), 2).with("rounds=5");
    let first = plan.start_one(0);
    let second = plan.user(NOBODY).start_one(1);
    for rank in [&first, &second] {
        assert!(rank.line("READY").contains("shares_memory=false"));
        rank.line("DONE");
        assert!(rank.status().success());
    }
    let reasons = [first.lines(), second.lines()].concat();
    assert!(reasons.iter().any(|line| line.contains("runs as user")), "{reasons:?}");
}
