//! How the command ends: its exit code, and the file that says what the code cannot.
//!
//! A task may exit with any code, so the code alone never tells whether the task or this command chose it; the status
//! file does.

use deuteron_gang::{Ending, Error, Outcome};
use serde_json::{Value, json};
use std::{
    fs, io,
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

/// Exit codes that are ours, most of them from sysexits.
pub(crate) mod exit {
    /// A task failed without an exit code of its own.
    pub(crate) const FAILED: u8 = 1;
    /// What was typed is wrong.
    pub(crate) const USAGE: u8 = 64;
    /// The gang failed in a way that is neither the user's nor a task's.
    pub(crate) const SOFTWARE: u8 = 70;
    /// The operating system refused something.
    pub(crate) const SYSTEM: u8 = 71;
    /// The output could not be written.
    pub(crate) const OUTPUT: u8 = 74;
    /// The gang did not assemble; trying again later may help.
    pub(crate) const NOT_ASSEMBLED: u8 = 75;
    /// A file or the environment is wrong.
    pub(crate) const CONFIGURATION: u8 = 78;
    /// A task could not be started.
    pub(crate) const NOT_STARTED: u8 = 126;
    /// Added to the number of a signal.
    pub(crate) const SIGNAL: u8 = 128;
}

/// What ended the job from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interruption {
    /// This signal.
    Signal(i32),
    /// Nobody reads the output any more.
    OutputClosed,
    /// The output could not be written.
    OutputFailed,
}

/// How the job ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Status {
    /// One word.
    pub outcome: &'static str,
    pub reason: String,
    pub exit_code: u8,
    /// The first task that failed.
    pub rank: Option<usize>,
    pub host: Option<String>,
    /// The last attempt, from zero; none when no task has been started.
    pub generation: Option<u64>,
    /// The signal that ended the task, or this command.
    pub signal: Option<i32>,
    pub tasks: usize,
    pub hosts: usize,
    pub ran_for: Duration,
}

impl Status {
    /// Nothing was started, because what was asked for makes no sense.
    pub(crate) fn invalid(error: &crate::error::Error) -> Self {
        Self {
            outcome: "invalid",
            reason: error.to_string(),
            exit_code: error.exit_code(),
            ..Self::default()
        }
    }

    /// From what the supervisor says, and what this command knows to have interrupted it.
    pub(crate) fn of(
        result: &Result<Outcome, Error>,
        interruption: Option<Interruption>,
        tasks: usize,
        hosts: usize,
    ) -> Self {
        let status = Self { tasks, hosts, ..Self::default() };
        let error = match result {
            Ok(outcome) => {
                return Self {
                    outcome: "succeeded",
                    generation: Some(outcome.generation),
                    ran_for: outcome.ran_for,
                    ..status
                };
            }
            Err(error) => error,
        };
        let status = Self { reason: error.to_string(), ..status };
        match error {
            Error::TaskFailed { rank, host, generation, ending, .. } => Self {
                outcome: "task-failed",
                exit_code: task_code(ending),
                rank: Some(*rank),
                host: Some(host.clone()),
                generation: Some(*generation),
                signal: if let Ending::Signalled(signal) = ending { Some(*signal) } else { None },
                ..status
            },
            Error::Interrupted(_) => match interruption {
                Some(Interruption::OutputClosed) => Self {
                    outcome: "interrupted",
                    reason: "nobody reads the output any more".into(),
                    exit_code: signal_code(signal_hook::consts::SIGPIPE),
                    signal: Some(signal_hook::consts::SIGPIPE),
                    ..status
                },
                Some(Interruption::Signal(signal)) => Self {
                    outcome: "interrupted",
                    exit_code: signal_code(signal),
                    signal: Some(signal),
                    ..status
                },
                Some(Interruption::OutputFailed) => Self {
                    outcome: "interrupted",
                    reason: "the output could not be written".into(),
                    exit_code: exit::OUTPUT,
                    ..status
                },
                None => Self { outcome: "interrupted", exit_code: exit::FAILED, ..status },
            },
            Error::NotAssembled(_) => {
                Self { outcome: "not-assembled", exit_code: exit::NOT_ASSEMBLED, ..status }
            }
            Error::NotPlaced(_) => {
                Self { outcome: "not-placed", exit_code: exit::NOT_ASSEMBLED, ..status }
            }
            Error::Invalid(_) => Self { outcome: "invalid", exit_code: exit::USAGE, ..status },
            Error::System { .. } => {
                Self { outcome: "system-error", exit_code: exit::SYSTEM, ..status }
            }
            _ => Self { outcome: "failed", exit_code: exit::SOFTWARE, ..status },
        }
    }

    fn json(&self) -> Value {
        json!({
            "outcome": self.outcome,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "rank": self.rank,
            "host": self.host,
            "generation": self.generation,
            "signal": self.signal,
            "tasks": self.tasks,
            "hosts": self.hosts,
            "seconds": (self.ran_for.as_secs_f64() * 1e3).round() / 1e3,
            "version": env!("CARGO_PKG_VERSION"),
        })
    }

    /// Whole or not at all: a reader never sees half of it.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let mut name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_owned();
        name.push(format!(".{}", std::process::id()));
        let temporary: PathBuf = path.with_file_name(name);
        let written = fs::File::create(&temporary).and_then(|mut file| {
            writeln!(file, "{:#}", self.json())?;
            file.sync_all()?;
            fs::rename(&temporary, path)
        });
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }
}

fn task_code(ending: &Ending) -> u8 {
    match ending {
        // A task that left with 0 although it was needed has failed all the same.
        Ending::Exited(status) => match u8::try_from(*status) {
            Ok(0) | Err(_) => exit::FAILED,
            Ok(code) => code,
        },
        Ending::Signalled(signal) => signal_code(*signal),
        Ending::NotStarted(_) => exit::NOT_STARTED,
        Ending::Failed | Ending::Stopped | Ending::Lost(_) => exit::FAILED,
    }
}

pub(crate) fn signal_code(signal: i32) -> u8 {
    u8::try_from(signal).map_or(exit::FAILED, |signal| exit::SIGNAL.saturating_add(signal))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(ending: Ending) -> Result<Outcome, Error> {
        Err(Error::TaskFailed {
            rank: 3,
            host: "b".into(),
            generation: 1,
            ending,
            last: "oh no\n".into(),
        })
    }

    #[test]
    fn exit_codes() {
        let interrupted = || Err(Error::Interrupted("SIGINT".into()));
        let outcome = Outcome { generation: 0, results: vec![], ran_for: Duration::ZERO };
        for (result, interruption, outcome, code) in [
            (Ok(outcome), None, "succeeded", 0),
            (failed(Ending::Exited(75)), None, "task-failed", 75),
            (failed(Ending::Exited(0)), None, "task-failed", 1),
            (failed(Ending::Exited(256)), None, "task-failed", 1),
            (failed(Ending::Signalled(9)), None, "task-failed", 137),
            (failed(Ending::Failed), None, "task-failed", 1),
            (failed(Ending::NotStarted("no".into())), None, "task-failed", 126),
            (interrupted(), Some(Interruption::Signal(2)), "interrupted", 130),
            (interrupted(), Some(Interruption::Signal(15)), "interrupted", 143),
            (interrupted(), Some(Interruption::Signal(1)), "interrupted", 129),
            (interrupted(), Some(Interruption::OutputClosed), "interrupted", 141),
            (interrupted(), Some(Interruption::OutputFailed), "interrupted", 74),
            (Err(Error::NotAssembled("b".into())), None, "not-assembled", 75),
            (Err(Error::NotPlaced("no".into())), None, "not-placed", 75),
            (Err(Error::Invalid("no".into())), None, "invalid", 64),
            (Err(Error::Ended("no".into())), None, "failed", 70),
        ] {
            let status = Status::of(&result, interruption, 4, 2);
            assert_eq!((status.outcome, status.exit_code), (outcome, code), "{result:?}");
        }
    }

    #[test]
    fn a_tasks_own_75_is_not_ours() {
        let status = Status::of(&failed(Ending::Exited(75)), None, 4, 2);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status.json");
        fs::write(&path, "old").unwrap();
        status.write(&path).unwrap();
        let read: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(
            read,
            json!({
                "outcome": "task-failed",
                "reason": "rank 3 on b exited with status 75 in generation 1\n  | oh no",
                "exit_code": 75,
                "rank": 3,
                "host": "b",
                "generation": 1,
                "signal": null,
                "tasks": 4,
                "hosts": 2,
                "seconds": 0.0,
                "version": env!("CARGO_PKG_VERSION"),
            })
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_status_that_cannot_be_written_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Status::default().write(&folder.path().join("missing/status.json")).is_err());
        fs::create_dir(folder.path().join("taken")).unwrap();
        assert!(Status::default().write(&folder.path().join("taken")).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
