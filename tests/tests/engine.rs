//! Engines of a job that runs: who waits for whom, as its user asks, and its timeline.
#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use deuteron_chaos::{Case, Directory, Launch};
use rustix::process::{Pid, Signal, kill_process};
use std::{collections::BTreeSet, fs, process::Command};

const DEUTERON: &str = env!("CARGO_BIN_EXE_launcher");
const TASK: &str = env!("CARGO_BIN_EXE_task");

/// Starts three tasks that train and then wait for rank 1, with their process numbers.
fn start(options: &[&str], folder: &Directory) -> (Launch, [i32; 3]) {
    let mut command = Command::new(DEUTERON);
    command.args(["run", "-n", "3"]).args(options).args([TASK, "train"]).arg(folder.path());
    let launch = Launch::start(command);
    let process = |rank: usize| -> i32 {
        let line = launch.line(&format!("[{rank}] READY "));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let processes = [0, 1, 2].map(process);
    (launch, processes)
}

fn go(folder: &Directory) {
    fs::write(folder.path().join("go"), "").unwrap();
}

fn report(words: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(DEUTERON).arg("report").args(words).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn a_running_job_says_who_waits_for_whom() {
    let _case = Case::within(60);
    let folder = Directory::new();
    let (launch, processes) = start(&["--stall-report", "300ms"], &folder);
    // By itself, after the setting; the lowest rank logs it.
    launch.wait_until("a report in the log", |lines| {
        let waits = |line: &&String| line.contains("last, all_reduce(i64 [1], sum), has waited");
        lines.iter().find(waits).filter(|line| line.contains("for rank 1")).map(|_| ())
    });
    // Asked of any of its processes, by the command.
    for process in processes {
        let (code, text) = report(&[&process.to_string()]);
        assert_eq!(code, Some(0), "{text}");
        for words in [
            ", one of 3 (process ",
            "last, all_reduce(i64 [1], sum), has waited",
            "for rank 1",
            ": in its own code since layer ",
        ] {
            assert!(text.contains(words), "{words:?} is not in {text}");
        }
    }
    let (code, text) = report(&[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        processes.iter().all(|process| text.contains(&format!("(process {process})"))),
        "{text}"
    );
    // By a signal, in the log of the rank that gets it.
    kill_process(Pid::from_raw(processes[2]).unwrap(), Signal::USR2).unwrap();
    launch.wait_until("a report of rank 2", |lines| {
        lines.iter().find(|line| line.contains(", one of 3: ")).map(|_| ())
    });
    go(&folder);
    let ended = launch.end();
    ended.expect(0, &["[0] LAST 3", "[1] LAST 3", "[2] LAST 3"]);
    let (code, text) = report(&[&processes[0].to_string()]);
    assert_eq!(code, Some(1), "{text}");
}

#[test]
fn every_rank_is_in_the_timeline() {
    let _case = Case::within(60);
    let folder = Directory::new();
    let path = folder.path().join("timeline.json");
    let (launch, _) = start(&["--timeline", path.to_str().unwrap()], &folder);
    go(&folder);
    launch.end().expect(0, &["[0] LAST 3"]);
    let events: Vec<serde_json::Value> =
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    for rank in 0..3 {
        let of_rank = || events.iter().filter(|event| event["pid"] == rank);
        let phases: BTreeSet<&str> = of_rank().filter_map(|event| event["ph"].as_str()).collect();
        assert_eq!(phases, BTreeSet::from(["M", "X", "b", "e"]), "rank {rank}");
        assert!(
            of_rank().any(|event| event["name"].as_str() == Some("all_reduce.layer 7")),
            "rank {rank}"
        );
        // Steps that repeat are carried out together.
        assert!(of_rank().any(|event| event["args"]["operations"] == 20), "rank {rank}");
    }
}
