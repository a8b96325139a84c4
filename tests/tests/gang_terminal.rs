//! The `deuteron` command and its user: keys on a terminal, and output in whatever amount to whomever reads it.
#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use deuteron_chaos::{Case, Directory, Hash, Launch, Stamp, Terminal, script};
use rustix::process::Signal;
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const DEUTERON: &str = env!("CARGO_BIN_EXE_launcher");
const TASK: &str = env!("CARGO_BIN_EXE_task");

fn deuteron(words: &[&str]) -> Command {
    let mut command = Command::new(DEUTERON);
    command.arg("run").args(words);
    command
}

/// The last tick that a rank has shown.
fn tick(text: &str, rank: usize) -> usize {
    let mark = format!("[{rank}] TICK ");
    // The last line may not be whole.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let last = whole.lines().rev().find_map(|line| line.trim().strip_prefix(&mark));
    last.map_or(0, |number| number.parse().unwrap())
}

fn stop_and_go() {
    let terminal = Terminal::new();
    terminal.keys(&format!("{DEUTERON} run -n 2 {TASK} tick\n"));
    (0..2).for_each(|rank| terminal.wait_for(&format!("[{rank}] TICK 10"), 1));
    terminal.keys("\u{1a}");
    terminal.wait_for("Stopped", 1);
    let tasks = || {
        let mut all = terminal.stamp().processes();
        all.retain(|process| process.words[0] == TASK);
        all
    };
    let end = Instant::now() + Duration::from_secs(2);
    while !tasks().iter().all(|process| process.state == 'T') {
        assert!(Instant::now() < end, "{:?}", tasks());
    }
    assert_eq!(tasks().len(), 2);
    // Longer than anybody may be silent who is not stopped.
    thread::sleep(Duration::from_millis(200));
    let before = terminal.text();
    thread::sleep(Duration::from_secs(6));
    assert_eq!(terminal.text(), before, "a stopped task has printed");
    terminal.keys("fg\n");
    for rank in 0..2 {
        let next = tick(&before, rank) + 50;
        terminal.wait_for(&format!("[{rank}] TICK {next}"), 1);
    }
    terminal.keys("\u{3}");
    terminal.wait_for("interrupted by SIGINT", 1);
    terminal.keys("echo CODE=$?\n");
    terminal.wait_for("CODE=130", 1);
    assert!(!terminal.text().contains("no sign of life"), "{}", terminal.text());
    assert_eq!(tasks().len(), 0);
}

/// Tasks that answer SIGTERM, or do not.
fn task_script(directory: &Directory, on_end: &str) -> String {
    let path = directory.path().join("task");
    let text =
        format!("#!/bin/sh\ntrap '{on_end}' TERM\necho READY\nwhile :; do sleep 0.05; done\n");
    script(&path, &text);
    path.display().to_string()
}

fn interrupt_once() {
    let (terminal, directory) = (Terminal::new(), Directory::new());
    let task = task_script(&directory, "sleep 0.3; echo CLEANED; exit 0");
    let file = directory.path().join("status.json");
    terminal.keys(&format!("{DEUTERON} run -n 2 --status-file {} {task}\n", file.display()));
    (0..2).for_each(|rank| terminal.wait_for(&format!("[{rank}] READY"), 1));
    terminal.keys("\u{3}");
    (0..2).for_each(|rank| terminal.wait_for(&format!("[{rank}] CLEANED"), 1));
    terminal.wait_for("interrupted by SIGINT", 1);
    terminal.keys("echo CODE=$?\n");
    terminal.wait_for("CODE=130", 1);
    let status: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!((&status["outcome"], &status["signal"]), (&"interrupted".into(), &2.into()));
    assert!(!left(&terminal, &task));
}

fn left(terminal: &Terminal, task: &str) -> bool {
    let all = terminal.stamp().processes();
    all.iter().any(|process| process.words.iter().any(|word| word == task || word == "agent"))
}

fn interrupt_twice() {
    let (terminal, directory) = (Terminal::new(), Directory::new());
    let task = task_script(&directory, "");
    terminal.keys(&format!("{DEUTERON} run -n 2 --grace 2s {task}\n"));
    (0..2).for_each(|rank| terminal.wait_for(&format!("[{rank}] READY"), 1));
    terminal.keys("\u{3}");
    terminal.wait_for("once more ends this command", 1);
    let event = Instant::now();
    terminal.keys("\u{3}");
    terminal.wait_for("$ ", 2);
    assert!(event.elapsed() < Duration::from_millis(1500), "it took {:?}", event.elapsed());
    terminal.keys("echo CODE=$?\n");
    terminal.wait_for("CODE=130", 1);
    // The agent has seen it, and ends the tasks when their grace is over.
    let limit = event + Duration::from_secs(6);
    while left(&terminal, &task) {
        assert!(Instant::now() < limit, "{:?}", terminal.stamp().processes());
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn keys_on_a_terminal() {
    let _case = Case::within(60);
    // All at once: most of it is waiting.
    thread::scope(|scope| {
        for test in [stop_and_go, interrupt_once, interrupt_twice] {
            scope.spawn(test);
        }
    });
}

#[test]
fn a_terminal_has_colours_and_progress() {
    let _case = Case::within(30);
    let terminal = Terminal::new();
    terminal.keys(&format!("TERM=xterm {DEUTERON} run -n 2 echo hello\n"));
    (0..2).for_each(|rank| terminal.wait_for(&format!("m[{rank}]\u{1b}[0m hello\r\n"), 1));
    terminal.keys(&format!("{DEUTERON} run -n 2 --agent 'sleep 60' true\n"));
    terminal.wait_for("deuteron: waiting for localhost (0 of 1 host there", 1);
    terminal.keys("\u{3}");
    terminal.wait_for("interrupted by SIGINT", 1);
}

#[test]
fn a_signal_that_was_ignored_from_the_start_stays_so() {
    let _case = Case::within(30);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("trap '' HUP; exec {DEUTERON} run -n 2 {TASK} tick")]);
    let job = Launch::start(command);
    job.line("[1] TICK 1");
    job.signal(Signal::HUP);
    job.line("[1] TICK 30");
    job.signal(Signal::INT);
    job.end().expect(130, &[]);
}

#[test]
fn other_signals_end_the_job_too() {
    let _case = Case::within(30);
    for (signal, code, name) in [(Signal::TERM, 143, "SIGTERM"), (Signal::HUP, 129, "SIGHUP")] {
        let job = Launch::start(deuteron(&["-n", "2", TASK, "wait"]));
        (0..2).for_each(|rank| drop(job.line(&format!("[{rank}] READY"))));
        job.signal(signal);
        job.end().expect(code, &[&format!("interrupted by {name}")]);
    }
}

#[test]
fn an_interruption_while_the_gang_assembles_or_waits_to_start_again() {
    let _case = Case::within(30);
    let job = Launch::start(deuteron(&["-n", "2", "--agent", "sleep 60", "true"]));
    // It says so after two seconds.
    job.line("LOG deuteron: waiting for localhost");
    job.signal(Signal::INT);
    job.end().expect(130, &["interrupted by SIGINT"]);

    let job = Launch::start(deuteron(&["-n", "2", "--restarts", "9", "false"]));
    job.wait_until("a restart", |lines| {
        lines.iter().any(|line| line.contains("restart 2 of 9")).then_some(())
    });
    let event = Instant::now();
    job.signal(Signal::INT);
    job.end().expect(130, &["interrupted by SIGINT"]);
    assert!(event.elapsed() < Duration::from_secs(1), "it took {:?}", event.elapsed());
}

/// What came out of each rank: bytes and their hash.
type Printed = BTreeMap<u8, (usize, Hash)>;

/// Reads all output, after `pause` in the middle of it; returns what was printed, and what the ranks say they printed.
fn read_all(words: &[&str], pause: Duration) -> (Printed, Printed) {
    let mut command = deuteron(words);
    let stamp = Stamp::on(&mut command);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let complaints = thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        text
    });
    let mut printed = Printed::new();
    let mut reader = BufReader::with_capacity(1 << 20, stdout);
    let (mut line, mut lines) = (Vec::new(), 0u64);
    while reader.read_until(b'\n', &mut line).unwrap() > 0 {
        lines += 1;
        if lines == 1000 {
            thread::sleep(pause);
        }
        assert!(line.starts_with(b"[") && line[2..].starts_with(b"] "), "not a whole line");
        let (bytes, hash) = printed.entry(line[1] - b'0').or_default();
        *bytes += line.len() - 4;
        hash.add(&line[4..]);
        line.clear();
    }
    let said = complaints.join().unwrap();
    let code = child.wait().unwrap().code();
    assert_eq!(code, Some(0), "{said}");
    stamp.gone_within(Duration::from_millis(500));
    let told = said.lines().filter_map(|line| line.split_once("] PRINTED ")).map(|(rank, rest)| {
        let (bytes, hash) = rest.split_once(' ').unwrap();
        let rank = rank.trim_start_matches('[').parse().unwrap();
        (rank, (bytes.parse().unwrap(), Hash::from(hash.parse::<u64>().unwrap())))
    });
    (printed, told.collect())
}

#[test]
fn nothing_is_lost_or_mixed_of_a_hundred_megabytes_from_each_task() {
    let _case = Case::within(90);
    let start = Instant::now();
    let (printed, told) = read_all(&["-n", "3", TASK, "print", "100"], Duration::ZERO);
    let took = start.elapsed().as_secs_f64();
    eprintln!("3 × 100 MB in {took:.1} s: {:.0} MB/s", 300.0 / took);
    assert_eq!(printed, told);
    assert!(told.len() == 3 && told.values().all(|(bytes, _)| *bytes >= 100 << 20), "{told:?}");
}

#[test]
fn a_slow_reader_does_no_harm() {
    let _case = Case::within(60);
    // Longer than anybody may be silent.
    let (printed, told) = read_all(&["-n", "3", TASK, "print", "20"], Duration::from_secs(7));
    assert_eq!(printed, told);
    assert_eq!(told.len(), 3);
}

#[test]
fn a_reader_that_leaves_ends_the_job() {
    let _case = Case::within(30);
    let mut command = Command::new("bash");
    let text = format!("{DEUTERON} run -n 2 yes | head -n 3; echo CODE=${{PIPESTATUS[0]}}");
    command.args(["-c", &text]);
    let ended = Launch::start(command).end();
    ended.expect(0, &["CODE=141"]);
    assert_eq!(ended.lines.iter().filter(|line| line.ends_with("] y")).count(), 3, "{ended:?}");
    let complaint = |line: &&String| line.starts_with("LOG ");
    assert_eq!(ended.lines.iter().find(complaint), None);
    assert!(ended.took < Duration::from_secs(10), "it took {:?}", ended.took);
}

#[test]
fn output_that_cannot_be_written_ends_the_job() {
    let _case = Case::within(30);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec {DEUTERON} run -n 2 yes >/dev/full")]);
    let ended = Launch::start(command).end();
    ended.expect(74, &["cannot write to standard output", "No space left"]);
}

fn is_time(text: &str) -> bool {
    let pattern = "0000-00-00T00:00:00.000Z";
    text.len() == pattern.len()
        && text.chars().zip(pattern.chars()).all(|(found, wanted)| match wanted {
            '0' => found.is_ascii_digit(),
            other => found == other,
        })
}

#[test]
fn output_goes_to_files_with_its_time() {
    let _case = Case::within(30);
    let directory = Directory::new();
    let folder = directory.path().join("logs/today");
    let text = "echo out $DEUTERON_RANK; echo error $DEUTERON_RANK >&2; printf unfinished";
    let options = ["-n", "2", "--timestamps", "--output", folder.to_str().unwrap()];
    let ended = Launch::start(deuteron(&[&options[..], &["sh", "-c", text]].concat())).end();
    ended.expect(0, &["[0] out 0", "[1] out 1", "[1] error 1", "[1] unfinished"]);
    let shown = ended.lines.iter().filter(|line| line.contains("] out "));
    assert!(shown.map(|line| line.split_once(' ').unwrap().0).all(is_time), "{ended:?}");
    let read = |path: &Path| -> Vec<String> {
        let text = fs::read_to_string(folder.join(path)).unwrap();
        let lines = text.lines().map(|line| line.split_once(' ').unwrap());
        lines
            .map(|(time, line)| if is_time(time) { line.to_owned() } else { String::new() })
            .collect()
    };
    for rank in 0..2 {
        assert_eq!(
            read(Path::new(&format!("rank.{rank}/stdout"))),
            [format!("out {rank}"), "unfinished".into()]
        );
        assert_eq!(read(Path::new(&format!("rank.{rank}/stderr"))), [format!("error {rank}")]);
    }
}
