//! A thousand agents join one supervisor: how long it takes, and how the supervisor grows.
//!
//! The test runs itself again in two more processes: one is the supervisor, whose memory is then its own, and one plays
//! all agents. They meet over TCP on loopback with certificates on both sides. Tasks are not processes.

use super::*;
use crate::{
    Ending, agent,
    testing::{Limit, Tasks, hand, raise_descriptors},
};
use std::{
    io::{BufRead, Write},
    process::{Child, Command as Process, Stdio},
};

const NAME: &str = "supervisor::scale::a_thousand_agents_join_in_seconds_and_cost_little_memory";
const ROLE: &str = "DEUTERON_TEST_ROLE";
/// What the agents are told when all run.
const END: &str = "end";

/// This test again, in another role.
fn again(role: &str) -> Process {
    let mut process = Process::new(std::env::current_exe().unwrap());
    process.args([NAME, "--exact", "--nocapture"]).env(ROLE, role);
    process
}

/// A line of this process's status, in MB.
fn memory(what: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    let kilobytes: f64 =
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap();
    kilobytes / 1024.0
}

/// Prints seconds until all have joined and until all tasks run; memory before, then, and at most.
fn supervise(agents: usize) {
    let mut child = again("agents").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut job = Job::local(agents, ["true"]);
    job.hosts = (0..agents).map(|i| Host { name: format!("node{i}"), slots: 1 }).collect();
    job.interface = Some("127.0.0.1".into());
    job.start_limit = Duration::from_secs(25);
    let stdin = Arc::new(Mutex::new(child.stdin.take().unwrap()));
    let invite = Arc::clone(&stdin);
    let launcher: Launcher = Box::new(move |_, _, invitation, _| {
        let line = serde_json::to_string(invitation).unwrap();
        writeln!(invite.lock().unwrap(), "{line}").unwrap();
        Ok(Launched::elsewhere())
    });
    let before = memory("VmRSS");
    let start = Instant::now();
    let mut assembled = None;
    let outcome = run_with(job, &Control::default(), launcher, move |event| match event {
        Event::Assembling { missing, .. } if missing.is_empty() => {
            assembled = Some(start.elapsed())
        }
        Event::Started { tasks, .. } => {
            assert_eq!(tasks.len(), agents);
            let (joined, started) =
                (assembled.unwrap().as_secs_f64(), start.elapsed().as_secs_f64());
            println!(
                "figures {joined:.3} {started:.3} {before:.1} {:.1} {:.1}",
                memory("VmRSS"),
                memory("VmHWM")
            );
            writeln!(stdin.lock().unwrap(), "{END}").unwrap();
        }
        _ => {}
    });
    assert_eq!(outcome.unwrap().results.len(), agents);
    assert!(child.wait().unwrap().success());
}

/// Plays every agent that is invited on standard input, until that ends.
fn play_agents() {
    let (sender, mut invitations) = mpsc::unbounded_channel();
    let tasks = Tasks::default();
    let running = tasks.clone();
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let line = line.unwrap();
            if line == END {
                running.end(&Ending::Exited(0));
            } else {
                sender.send(serde_json::from_str::<Invitation>(&line).unwrap()).unwrap();
            }
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let mut agents = tokio::task::JoinSet::new();
        while let Some(invitation) = invitations.recv().await {
            let tasks = tasks.clone();
            agents.spawn_local(async move {
                let Meeting::There { addresses, credentials } = &invitation.meeting else {
                    panic!("{invitation:?}")
                };
                let (stream, _) = agent::dial(addresses, credentials).await.unwrap();
                let hand = hand(&invitation.name, invitation.slots);
                let gone = std::future::pending();
                agent::serve(stream, &invitation, hand, tasks.starter(), gone).await.unwrap();
            });
        }
        while let Some(served) = agents.join_next().await {
            served.unwrap();
        }
    });
}

/// Seconds to join and to start, and MB before, after and at most, in a process of its own.
fn measure(agents: usize) -> [f64; 5] {
    let mut child: Child =
        again(&agents.to_string()).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut figures = None;
    for line in io::BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        // The test harness may have begun the line.
        if let Some((_, numbers)) = line.split_once("figures ") {
            let numbers: Vec<f64> = numbers.split(' ').map(|n| n.parse().unwrap()).collect();
            figures = Some(numbers.try_into().unwrap());
        }
    }
    assert!(child.wait().unwrap().success(), "the supervisor of {agents} agents failed");
    figures.expect("no figures")
}

#[test]
fn a_thousand_agents_join_in_seconds_and_cost_little_memory() {
    let role = std::env::var(ROLE).unwrap_or_default();
    raise_descriptors();
    // Whoever has started this process has a longer limit.
    let _limit = Limit::seconds(if role.is_empty() { 100 } else { 45 });
    if role == "agents" {
        return play_agents();
    }
    if let Ok(agents) = role.parse() {
        return supervise(agents);
    }
    for agents in [10, 100, 1000] {
        let [joined, started, before, after, most] = measure(agents);
        println!(
            "{agents} agents: joined after {joined:.2} s, tasks started after {started:.2} s; \
             supervisor {before:.1} MB before, {after:.1} MB after, {most:.1} MB at most"
        );
        let limit = if cfg!(debug_assertions) { 25.0 } else { 5.0 };
        assert!(joined < limit, "{agents} agents joined after {joined} s");
        assert!(most < 100.0, "the supervisor of {agents} agents took {most} MB");
    }
}
