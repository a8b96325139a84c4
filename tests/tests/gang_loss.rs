//! A task, an agent, the supervisor or the way between them is lost: everybody learns of it in time, and nothing is left.
#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use deuteron_chaos::{Case, Directory, Hosts, Launch, Process, script};
use rustix::process::Signal;
use std::{
    fs,
    ops::Range,
    process::Command,
    thread,
    time::{Duration, Instant},
};

const DEUTERON: &str = env!("CARGO_BIN_EXE_launcher");
const TASK: &str = env!("CARGO_BIN_EXE_task");
const AT_ONCE: Range<f64> = 0.0..1.0;
/// Dead after 5 s of silence, counted from the last sign of life, which may be half a second old.
const BY_SILENCE: Range<f64> = 4.4..7.5;
/// As above, with the 30 s that a supervisor has.
const BY_PATIENCE: Range<f64> = 29.0..35.0;

fn deuteron(words: &[&str]) -> Command {
    let mut command = Command::new(DEUTERON);
    command.arg("run").args(words);
    command
}

/// Starts tasks that wait, and returns their processes when all are ready.
fn start_waiting(command: Command, size: usize) -> (Launch, Vec<Process>) {
    let job = Launch::start(command);
    let pids: Vec<String> = (0..size)
        .map(|rank| job.line(&format!("[{rank}] READY ")).split(' ').next().unwrap().to_owned())
        .collect();
    let all = job.processes();
    let find = |pid: &String| all.iter().find(|process| process.pid.to_string() == *pid).cloned();
    let tasks = pids.iter().map(|pid| find(pid).unwrap()).collect();
    (job, tasks)
}

fn waiting(options: &[&str]) -> (Launch, Vec<Process>) {
    start_waiting(deuteron(&[options, &["-n", "3", TASK, "wait"]].concat()), 3)
}

#[track_caller]
fn in_time(event: Instant, limits: Range<f64>) {
    let took = event.elapsed().as_secs_f64();
    assert!(limits.contains(&took), "it took {took:.2} s and not {limits:?}");
}

/// Waits for the command's error, which comes in time and says all of this.
fn fails(job: &Launch, event: Instant, limits: Range<f64>, said: &[&str]) {
    job.error();
    in_time(event, limits);
    job.wait_until(&format!("{said:?}"), |lines| {
        let error: Vec<&String> =
            lines.iter().skip_while(|line| !line.starts_with("LOG deuteron: error: ")).collect();
        let has = |words: &&str| error.iter().any(|line| line.contains(*words));
        said.iter().all(has).then_some(())
    });
}

fn a_stopped_task() {
    let (job, tasks) = waiting(&[]);
    let event = Instant::now();
    tasks[1].signal(Signal::STOP);
    fails(&job, event, BY_SILENCE, &["rank 1 on ", "was stopped and gave no sign of life for 5 s"]);
    job.end().expect(1, &[]);
}

fn a_task_that_was_stopped_for_a_short_time() {
    let (job, tasks) = waiting(&[]);
    tasks[1].signal(Signal::STOP);
    thread::sleep(Duration::from_secs(3));
    tasks[1].signal(Signal::CONT);
    thread::sleep(Duration::from_secs(4));
    assert_eq!(job.processes().len(), 6, "a supervisor, an agent, its warden and three tasks");
    job.signal(Signal::INT);
    job.end().expect(130, &[]);
}

fn a_killed_agent() {
    let (job, _) = waiting(&[]);
    let event = Instant::now();
    job.agents()[0].signal(Signal::KILL);
    fails(&job, event, AT_ONCE, &["rank 0 on ", "its agent was killed by signal 9"]);
    job.end().expect(1, &[]);
}

fn a_stopped_agent() {
    let (job, _) = waiting(&[]);
    let event = Instant::now();
    job.agents()[0].signal(Signal::STOP);
    fails(&job, event, BY_SILENCE, &["rank 0 on ", "its agent gave no sign of life for 5"]);
    job.end().expect(1, &[]);
}

fn an_agent_that_is_asked_to_end() {
    let (job, _) = waiting(&[]);
    let event = Instant::now();
    job.agents()[0].signal(Signal::TERM);
    fails(&job, event, 0.0..1.5, &["rank "]);
    job.end();
}

fn a_killed_agent_comes_back_with_the_next_generation() {
    let text = "echo GENERATION $DEUTERON_GENERATION; [ $DEUTERON_GENERATION = 1 ] || sleep 60";
    let job = Launch::start(deuteron(&["-n", "2", "--restarts", "1", "--", "sh", "-c", text]));
    (0..2).for_each(|rank| drop(job.line(&format!("[{rank}] GENERATION 0"))));
    let agents = job.agents();
    agents[0].signal(Signal::KILL);
    job.end().expect(0, &["restart 1 of 1 follows", "[0] GENERATION 1", "[1] GENERATION 1"]);
}

fn a_killed_supervisor() {
    let (job, tasks) = waiting(&[]);
    let event = Instant::now();
    job.signal(Signal::KILL);
    job.end_within(Duration::from_secs(2)).expect(137, &[]);
    in_time(event, 0.0..2.0);
    assert_eq!(tasks.len(), 3);
}

fn a_killed_supervisor_of_tasks_that_ignore_it() {
    let text = "trap '' TERM; echo READY; while :; do sleep 0.05; done";
    let job = Launch::start(deuteron(&["-n", "2", "--grace", "1s", "--", "sh", "-c", text]));
    (0..2).for_each(|rank| drop(job.line(&format!("[{rank}] READY"))));
    let event = Instant::now();
    job.signal(Signal::KILL);
    job.end_within(Duration::from_secs(5)).expect(137, &[]);
    in_time(event, 0.9..4.0);
}

fn a_killed_supervisor_that_had_been_paused() {
    let (job, tasks) = waiting(&[]);
    job.signal(Signal::TSTP);
    let paused = || job.processes().iter().filter(|process| process.state == 'T').count();
    while paused() < tasks.len() + 1 {
        thread::sleep(Duration::from_millis(20));
    }
    job.signal(Signal::KILL);
    job.end_within(Duration::from_secs(2)).expect(137, &[]);
}

fn a_stopped_supervisor() {
    let (job, tasks) = waiting(&[]);
    let event = Instant::now();
    job.signal(Signal::STOP);
    while job.processes().len() > 1 {
        thread::sleep(Duration::from_millis(20));
    }
    in_time(event, BY_PATIENCE);
    job.signal(Signal::CONT);
    let event = Instant::now();
    fails(&job, event, 0.0..2.0, &["rank 0 on "]);
    job.end().expect(1, &[]);
    assert_eq!(tasks.len(), 3);
}

fn a_supervisor_that_was_stopped_for_a_while() {
    let (job, _) = waiting(&[]);
    job.signal(Signal::STOP);
    thread::sleep(Duration::from_secs(8));
    job.signal(Signal::CONT);
    thread::sleep(Duration::from_secs(2));
    assert_eq!(
        job.processes().len(),
        6,
        "a supervisor, an agent, its warden and three tasks: {:?}",
        job.lines()
    );
    job.signal(Signal::INT);
    job.end().expect(130, &[]);
}

#[test]
fn whoever_is_lost_on_one_machine() {
    let _case = Case::within(75);
    // All at once: most of it is waiting.
    thread::scope(|scope| {
        for test in [
            a_stopped_task,
            a_task_that_was_stopped_for_a_short_time,
            a_killed_agent,
            a_stopped_agent,
            an_agent_that_is_asked_to_end,
            a_killed_agent_comes_back_with_the_next_generation,
            a_killed_supervisor,
            a_killed_supervisor_of_tasks_that_ignore_it,
            a_killed_supervisor_that_had_been_paused,
            a_stopped_supervisor,
            a_supervisor_that_was_stopped_for_a_while,
            a_cut_cable,
            a_cable_cut_during_an_all_reduce,
        ] {
            scope.spawn(test);
        }
    });
}

/// Two hosts, the command on the first, and an `ssh` that only knows these two. It writes down the invitations.
struct Site {
    hosts: Hosts,
    directory: Directory,
}

impl Site {
    /// With `deaf`, the far side does not learn that the command is gone, as after a cut.
    fn new(deaf: bool) -> Option<Self> {
        let (hosts, directory) = (Hosts::new(2)?, Directory::new());
        let text = format!(
            "#!/bin/sh
            # ssh OPTIONS -- HOST COMMAND: the agent's standard input is a pipe that somebody else feeds.
            while [ \"$1\" != -- ]; do shift; done
            host=$2; shift 2
            case $host in {} | one) name={} ;; {} | two) name={} ;; *) echo unknown host $host >&2; exit 255 ;; esac
            exec 3<&0
            read -r line
            printf '%s\\n' \"$line\" > {dir}/invitation.$host
            mkfifo {dir}/feed.$host.$$
            {{ printf '%s\\n' \"$line\"; cat; {} }} <&3 >{dir}/feed.$host.$$ 2>/dev/null &
            feeder=$!
            unshare --uts sh -c 'hostname \"$0\"; exec ip netns exec \"$0\" sh -c \"exec $1\"' $name \"$*\" \\
                3<&- <{dir}/feed.$host.$$
            status=$?
            exec 2>/dev/null
            kill $feeder
            exit $status\n",
            hosts.address(0),
            hosts.name(0),
            hosts.address(1),
            hosts.name(1),
            if deaf { "exec sleep 60;" } else { "" },
            dir = directory.path().display(),
        );
        script(&directory.path().join("ssh"), &text);
        Some(Self { hosts, directory })
    }

    fn deuteron(&self, words: &[&str]) -> Command {
        let mut command = Command::new("ip");
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .args(["netns", "exec", &self.hosts.name(0), DEUTERON, "run"])
            .args(words)
            .env("PATH", format!("{}:{path}", self.directory.path().display()));
        command
    }
}

fn a_cut_cable() {
    let Some(site) = Site::new(true) else { return };
    let words = ["--hosts", "localhost:1,10.77.0.2:2", TASK, "wait"];
    let (job, tasks) = start_waiting(site.deuteron(&words), 3);
    let event = Instant::now();
    site.hosts.cut(1);
    let far = site.hosts.name(1);
    fails(&job, event, BY_SILENCE, &[&format!("rank 1 on {far}"), "gave no sign of life for 5"]);
    assert_eq!(job.status().code(), Some(1));
    // Its own side ends at once; the other side hears nothing any more, and waits.
    let alive = |pids: &[Process]| {
        let all = job.processes();
        pids.iter().filter(|task| all.iter().any(|known| known.pid == task.pid)).count()
    };
    assert_eq!(alive(&tasks[..1]), 0);
    assert_eq!(alive(&tasks[1..]), 2);
    while alive(&tasks) > 0 || !job.agents().is_empty() {
        thread::sleep(Duration::from_millis(20));
    }
    in_time(event, BY_PATIENCE);
}

fn a_cable_cut_during_an_all_reduce() {
    let Some(site) = Site::new(false) else { return };
    let words = ["--hosts", "10.77.0.1:2,10.77.0.2:2", TASK, "reduce", "0"];
    let job = Launch::start(site.deuteron(&words));
    (0..4).for_each(|rank| drop(job.line(&format!("[{rank}] REDUCED"))));
    let event = Instant::now();
    site.hosts.cut(1);
    // Either a task on this side or the supervisor is first to give the others up.
    fails(&job, event, BY_SILENCE, &["rank ", "no sign of life for 5"]);
    let ended = job.end_within(Duration::from_secs(3));
    assert!([1, 3].contains(&ended.code), "{ended:?}");
}

#[test]
fn tasks_of_two_hosts_meet() {
    let _case = Case::within(60);
    let Some(site) = Site::new(false) else { return };
    let here = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let names = [site.hosts.name(0), site.hosts.name(1)];
    for (list, first) in
        [("localhost:2,10.77.0.2:2", here.as_str()), ("10.77.0.1:2,10.77.0.2:2", &names[0])]
    {
        let ended = Launch::start(site.deuteron(&["--hosts", list, TASK, "meet"])).end();
        ended.expect(0, &["4 tasks on 2 hosts succeeded"]);
        let info = |rank: usize| {
            let host = [first, &names[1]][rank / 2];
            let address = site.hosts.address(rank / 2);
            format!(
                "INFO rank={rank} local={}/2 cross={}/2 host={host} address={address} devices=",
                rank % 2,
                rank / 2
            )
        };
        for rank in 0..4 {
            let said = ended.of(rank);
            assert_eq!(said[..4], [info(0), info(1), info(2), info(3)]);
            assert_eq!(said[7..], ["REDUCED shares_memory=false"; 2], "{said:?}");
        }
        let barrier = ended.of(0)[6].strip_prefix("BARRIER ").unwrap().to_owned();
        eprintln!("the median barrier of 4 tasks on 2 hosts takes {barrier} µs");
    }
}

#[test]
fn no_secret_is_seen_in_arguments_or_environments() {
    let _case = Case::within(60);
    let Some(site) = Site::new(false) else { return };
    let words = ["--hosts", "localhost:1,10.77.0.2:1", TASK, "wait"];
    let (job, _) = start_waiting(site.deuteron(&words), 2);
    let text = fs::read_to_string(site.directory.path().join("invitation.10.77.0.2")).unwrap();
    let invitation: serde_json::Value = serde_json::from_str(&text).unwrap();
    let token: Vec<u8> = serde_json::from_value(invitation["token"].clone()).unwrap();
    let hex: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
    let list = serde_json::to_string(&token).unwrap();
    let key = text.split_once("BEGIN PRIVATE KEY-----\\n").unwrap().1;
    let key = key.split("\\n").next().unwrap().to_owned();
    assert!(token.len() == 16 && key.len() > 40, "{text}");
    let secrets = [hex, list, key, "PRIVATE KEY".to_owned()];
    let mut seen = 0;
    for process in fs::read_dir("/proc").unwrap().flatten() {
        for file in ["cmdline", "environ"] {
            let Ok(bytes) = fs::read(process.path().join(file)) else { continue };
            let text = String::from_utf8_lossy(&bytes);
            seen += usize::from(text.contains(TASK));
            let told = secrets.iter().find(|secret| text.contains(*secret));
            assert_eq!(told, None, "in {:?}: {text}", process.path().join(file));
        }
    }
    assert!(seen >= 2, "the tasks were not looked at");
    job.signal(Signal::INT);
    job.end().expect(130, &[]);
}

#[test]
fn what_happens_on_another_host_is_known_at_once() {
    let _case = Case::within(60);
    let Some(site) = Site::new(false) else { return };
    let words = ["--hosts", "10.77.0.1:2,10.77.0.2:2", TASK, "wait"];
    let far = site.hosts.name(1);

    let (job, tasks) = start_waiting(site.deuteron(&words), 4);
    let event = Instant::now();
    tasks[3].signal(Signal::KILL);
    fails(&job, event, AT_ONCE, &[&format!("rank 3 on {far}"), "was killed by signal 9"]);
    job.end().expect(137, &[]);

    let (job, tasks) = start_waiting(site.deuteron(&words), 4);
    let agents = job.agents();
    let parent = |process: &Process| {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid)).unwrap();
        stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().to_owned()
    };
    let agent = agents.iter().find(|agent| agent.pid.to_string() == parent(&tasks[2])).unwrap();
    let event = Instant::now();
    agent.signal(Signal::KILL);
    fails(&job, event, AT_ONCE, &[&format!("rank 2 on {far}"), "its agent"]);
    job.end().expect(1, &[]);

    let (job, _) = start_waiting(site.deuteron(&words), 4);
    job.signal(Signal::KILL);
    job.end_within(Duration::from_secs(3)).expect(137, &[]);

    let ended = Launch::start(site.deuteron(&["--hosts", "10.77.0.1:2,10.77.0.9:2", "true"])).end();
    ended.expect(75, &["10.77.0.9", "unknown host"]);
}

#[test]
fn an_all_reduce_between_hosts_ends_when_a_task_is_killed() {
    let _case = Case::within(60);
    let Some(site) = Site::new(false) else { return };
    let job =
        Launch::start(site.deuteron(&["--hosts", "10.77.0.1:2,10.77.0.2:2", TASK, "reduce", "0"]));
    (0..4).for_each(|rank| drop(job.line(&format!("[{rank}] REDUCED"))));
    let all = job.processes();
    let victim =
        all.iter().filter(|process| process.words[0] == TASK).max_by_key(|p| p.pid).unwrap();
    let event = Instant::now();
    victim.signal(Signal::KILL);
    fails(&job, event, AT_ONCE, &["was killed by signal 9"]);
    job.end().expect(137, &[]);
}
