//! What can go wrong with a gang, and to whom.

use std::{fmt, io, time::Duration};

/// The result of anything that a gang does.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a task ended.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Ending {
    /// With this exit status.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
    /// It said itself that it cannot go on (a panic, an exception).
    Failed,
    /// It was stopped for so long that it counts as lost.
    Stopped,
    /// It could not be started, for this reason.
    NotStarted(String),
    /// Its agent is gone, for this reason.
    Lost(String),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "exited with status {status}"),
            Self::Signalled(signal) => write!(f, "was killed by signal {signal}"),
            Self::Failed => f.write_str("failed"),
            Self::Stopped => f.write_str("was stopped and gave no sign of life for 5 s"),
            Self::NotStarted(reason) => write!(f, "could not be started: {reason}"),
            Self::Lost(reason) => write!(f, "was lost: {reason}"),
        }
    }
}

/// Why a job did not end well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The gang never stood: nothing of the user's has run.
    #[error("the gang did not assemble: {0}")]
    NotAssembled(String),
    /// There is no way to place the tasks on what the hosts offer.
    #[error("the tasks cannot be placed: {0}")]
    NotPlaced(String),
    /// A task failed, and with it the gang.
    #[error("rank {rank} on {host} {ending}{}{}", in_generation(*generation), quoted(last))]
    TaskFailed {
        /// The first that failed.
        rank: usize,
        /// Where.
        host: String,
        /// Attempt number of the gang.
        generation: u64,
        /// How.
        ending: Ending,
        /// Its traceback if it told one, else its last lines.
        last: String,
    },
    /// Somebody wanted it to end.
    #[error("interrupted by {0}")]
    Interrupted(String),
    /// Another task failed, or the supervisor is gone; seen inside a task.
    #[error("the gang has ended: {0}")]
    Ended(String),
    /// The caller did something wrong.
    #[error("{0}")]
    Invalid(String),
    /// A collective operation failed.
    #[error(transparent)]
    Collective(#[from] deuteron_collective::Error),
    /// The operating system refused something.
    #[error("{what}: {error}")]
    System {
        /// What was attempted.
        what: String,
        /// Its answer.
        #[source]
        error: io::Error,
    },
}

impl Error {
    /// Whether another task's failure may be behind it.
    pub(crate) fn may_follow(&self) -> bool {
        matches!(self, Self::Collective(_) | Self::Ended(_))
    }

    pub(crate) fn system(what: impl Into<String>, error: impl Into<io::Error>) -> Self {
        Self::System { what: what.into(), error: error.into() }
    }
}

pub(crate) fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

fn in_generation(generation: u64) -> String {
    if generation == 0 { String::new() } else { format!(" in generation {generation}") }
}

fn quoted(last: &str) -> String {
    let lines: Vec<String> = last.lines().map(|line| format!("\n  | {line}")).collect();
    lines.concat()
}
