//! The `deuteron` command as its user starts it, and everything that it starts.
//!
//! - LAUNCH-1: every process of a job carries a mark in its environment, so that it is found in whatever process group,
//!   session or namespace it is. No job may leave one behind.

use crate::{Rank, end_process_group, unique};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    ops::Deref,
    os::unix::{ffi::OsStringExt, fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Stdio, id},
    thread,
    time::{Duration, Instant},
};

const MARK: &str = "CHAOS_MARK";

/// What the marks of this process start with.
pub(crate) fn own_mark() -> String {
    format!("{MARK}={}.", id())
}

/// A process of a job.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// Its program and arguments.
    pub words: Vec<String>,
    /// `R`, `S`, `T` and so on.
    pub state: char,
}

impl Process {
    /// Sends it a signal, if it is still there.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.pid) {
            let _ = kill_process(pid, signal);
        }
    }
}

/// Processes whose environment has a variable that starts with `mark`.
pub(crate) fn marked(mark: &str) -> Vec<Process> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let environment = fs::read(entry.path().join("environ")).ok()?;
        let is_marked = |variable: &[u8]| variable.starts_with(mark.as_bytes());
        environment.split(|byte| *byte == 0).any(is_marked).then_some(())?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let state = stat.rsplit_once(") ")?.1.chars().next()?;
        let words = fs::read(entry.path().join("cmdline")).ok()?;
        let words = words.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into());
        Some(Process { pid, words: words.collect(), state })
    })
    .collect()
}

/// Kills all of them, and those that they start meanwhile.
pub(crate) fn end_marked(mark: &str) {
    for _ in 0..100 {
        let left = marked(mark);
        if left.is_empty() {
            return;
        }
        left.iter().for_each(|process| process.signal(Signal::KILL));
        thread::sleep(Duration::from_millis(2));
    }
}

/// Marks what a command starts; all of it is ended when this is dropped.
pub struct Stamp(String);

impl Stamp {
    /// A new mark on a command.
    pub fn on(command: &mut Command) -> Self {
        let value = format!("{}.{}.", id(), unique());
        command.env(MARK, &value);
        Self(format!("{MARK}={value}"))
    }

    /// The mark as `NAME=VALUE`, for those who do not inherit an environment.
    pub fn variable(&self) -> &str {
        &self.0
    }

    /// Whoever carries it.
    pub fn processes(&self) -> Vec<Process> {
        marked(&self.0)
    }

    /// Fails when somebody still carries it after `limit`. Returns how long it took.
    pub fn gone_within(&self, limit: Duration) -> Duration {
        let start = Instant::now();
        loop {
            let left = self.processes();
            if left.is_empty() {
                return start.elapsed();
            }
            assert!(start.elapsed() < limit, "left after {limit:?}: {left:#?}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Stamp {
    fn drop(&mut self) {
        end_marked(&self.0);
    }
}

/// A running command; killed with all that it has started when dropped. What it says is in [`Rank::lines`], its standard
/// error with `LOG ` before every line.
pub struct Launch {
    stamp: Stamp,
    since: Instant,
    process: Rank,
}

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code, or 128 and its signal.
    pub code: i32,
    /// All that it said.
    pub lines: Vec<String>,
    /// From its start.
    pub took: Duration,
}

impl Launch {
    /// Starts a command in a process group of its own.
    pub fn start(mut command: Command) -> Self {
        for name in ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SSH_CONNECTION"] {
            // What the test itself has set stays.
            if !command.get_envs().any(|(set, _)| set == name) {
                command.env_remove(name);
            }
        }
        let stamp = Stamp::on(&mut command);
        Self::start_marked(command, stamp)
    }

    /// As [`Launch::start`], with a mark that it has already.
    pub fn start_marked(mut command: Command, stamp: Stamp) -> Self {
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let since = Instant::now();
        Self { stamp, since, process: Rank::start(command, 0, "this machine".into(), None) }
    }

    /// The agents of the job.
    pub fn agents(&self) -> Vec<Process> {
        let mut agents = self.stamp.processes();
        agents.retain(|process| process.words.get(1).is_some_and(|word| word == "agent"));
        // Each has a warden, a copy of it that has closed its standard input.
        let input = |process: &Process| fs::read_link(format!("/proc/{}/fd/0", process.pid));
        agents.retain(|process| input(process).is_ok_and(|path| path != Path::new("/dev/null")));
        agents
    }

    /// All processes of the job.
    pub fn processes(&self) -> Vec<Process> {
        self.stamp.processes()
    }

    /// Waits for its end. From then on nothing of the job may be left but for `patience`.
    pub fn end_within(&self, patience: Duration) -> Ended {
        use std::os::unix::process::ExitStatusExt;
        let status = self.process.status();
        let took = self.since.elapsed();
        let code = status.code().or(status.signal().map(|signal| 128 + signal));
        self.stamp.gone_within(patience);
        // What it said last may still be on its way here.
        while !self.process.readers.iter().all(thread::JoinHandle::is_finished) {
            thread::sleep(Duration::from_millis(1));
        }
        Ended { code: code.unwrap_or(-1), lines: self.lines(), took }
    }

    /// Waits for its end, when nothing of the job may be left.
    pub fn end(&self) -> Ended {
        // The kernel may still be at work on those that were killed.
        self.end_within(Duration::from_millis(500))
    }

    /// The error that it ended with.
    pub fn error(&self) -> String {
        self.wait_until("an error", |lines| {
            let first = lines.iter().position(|line| line.starts_with("LOG deuteron: error: "))?;
            Some(lines[first..].join("\n"))
        })
    }
}

impl Deref for Launch {
    type Target = Rank;

    fn deref(&self) -> &Rank {
        &self.process
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        end_process_group(self.process.pid as i32);
    }
}

impl Ended {
    /// What rank `rank` printed to its standard output.
    pub fn of(&self, rank: usize) -> Vec<&str> {
        let prefix = format!("[{rank}] ");
        self.lines.iter().filter_map(|line| line.strip_prefix(&prefix)).collect()
    }

    /// Fails unless it ended like this, and said every one of these.
    #[track_caller]
    pub fn expect(&self, code: i32, said: &[&str]) {
        let text = self.lines.join("\n");
        assert_eq!(self.code, code, "after {:?}:\n{text}", self.took);
        for words in said {
            assert!(text.contains(words), "it did not say {words:?}:\n{text}");
        }
    }
}

/// Whether a Unix socket with this abstract name is open.
pub fn has_socket(name: &str) -> bool {
    let sockets = fs::read("/proc/net/unix").unwrap();
    String::from_utf8_lossy(&sockets).lines().any(|line| line.ends_with(&format!("@{name}")))
}

/// Writes a program for the shell.
pub fn script(path: &Path, text: &str) {
    // A child that another thread forks meanwhile would hold the file open for writing, and it could not be run: so
    // somebody else writes it.
    let path_text = String::from_utf8(path.as_os_str().to_owned().into_vec()).unwrap();
    let written = Command::new("sh")
        .args(["-c", "printf '%s' \"$2\" > \"$1\"", "sh", &path_text, text])
        .status()
        .unwrap();
    assert!(written.success());
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Bytes in order: a sum that changes when one is lost, added or moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hash(u64);

impl Hash {
    /// Goes on with these.
    pub fn add(&mut self, bytes: &[u8]) {
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        let mix = |hash: u64, word: u64| {
            (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        };
        self.0 = words.fold(self.0, mix);
    }

    /// The sum.
    pub fn value(self) -> u64 {
        self.0
    }
}

impl From<u64> for Hash {
    fn from(value: u64) -> Self {
        Self(value)
    }
}
