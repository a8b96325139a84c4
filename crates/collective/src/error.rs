//! The one error type: what happened, to whom, and what to do about it.

use std::{fmt, io, sync::Arc, time::Duration};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call did not succeed.
///
/// [`Error::Invalid`] is the caller's mistake and leaves the group usable. After any other error the group
/// is dead: every rank's pending and next call fails, and a new group of a new generation has to be made.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank exited, was killed, stopped, or can no longer be reached.
    #[error("rank {rank} on {host} was lost during {operation} (generation {generation}): {cause}")]
    PeerLost {
        /// The lost rank.
        rank: usize,
        /// Its host.
        host: String,
        /// What this rank was doing when it noticed.
        operation: String,
        /// Attempt number of the gang.
        generation: u64,
        /// What is known of the reason.
        cause: String,
    },
    /// Ranks called different operations, or the same one with other sizes, types or scales.
    #[error("{operation}: the ranks disagree: {details}")]
    Mismatch {
        /// What this rank was doing when it noticed.
        operation: String,
        /// Which rank called what.
        details: String,
    },
    /// A time limit that the caller set has passed on some rank.
    #[error("{operation} ran out of time: {details}")]
    TimedOut {
        /// What this rank was doing.
        operation: String,
        /// Who gave up, after how long, waiting for whom.
        details: String,
    },
    /// A rank ended the group on purpose.
    #[error("{operation}: rank {rank} on {host} ended the group: {reason}")]
    Aborted {
        /// The rank that ended it.
        rank: usize,
        /// Its host.
        host: String,
        /// What this rank was doing when it noticed.
        operation: String,
        /// The reason given.
        reason: String,
    },
    /// The arguments cannot be right, whatever the other ranks do.
    #[error("{0}")]
    Invalid(String),
    /// The ranks did not come together.
    #[error("the group could not be made: {0}")]
    Bootstrap(String),
    /// The operating system refused something.
    #[error("{context}: {source}")]
    System {
        /// What was tried.
        context: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
}

impl Error {
    pub(crate) fn system(context: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { context: context.into(), source: Arc::new(source.into()) }
    }

    /// True when a time limit has passed.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }
}

/// The sort of a failure, as it travels between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum FailureKind {
    Lost = 0,
    Mismatch = 1,
    TimedOut = 2,
    Aborted = 3,
}

/// What ended a group, in the words of the rank that noticed it first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub kind: FailureKind,
    /// The rank at fault.
    pub rank: usize,
    pub host: String,
    pub cause: String,
}

impl Failure {
    /// Longest encoded failure: host and cause are cut to fit.
    pub const MAX_BYTES: usize = 1024;
    const MAX_HOST: usize = 128;

    pub fn lost(rank: usize, host: &str, cause: impl Into<String>) -> Self {
        Self { kind: FailureKind::Lost, rank, host: host.to_owned(), cause: cause.into() }
    }

    /// The error that a call on this rank returns because of it.
    pub fn during(&self, operation: &dyn fmt::Display, generation: u64) -> Error {
        let operation = operation.to_string();
        let (rank, host, cause) = (self.rank, self.host.clone(), self.cause.clone());
        match self.kind {
            FailureKind::Lost => Error::PeerLost { rank, host, operation, generation, cause },
            FailureKind::Mismatch => Error::Mismatch { operation, details: cause },
            FailureKind::TimedOut => Error::TimedOut { operation, details: cause },
            FailureKind::Aborted => Error::Aborted { rank, host, operation, reason: cause },
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let host = cut(&self.host, Self::MAX_HOST);
        let cause = cut(&self.cause, Self::MAX_BYTES - Self::MAX_HOST - 6);
        let mut bytes = vec![self.kind as u8];
        bytes.extend((self.rank as u32).to_le_bytes());
        bytes.push(host.len() as u8);
        bytes.extend(host.as_bytes());
        bytes.extend(cause.as_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        let kind = match kind {
            0 => FailureKind::Lost,
            1 => FailureKind::Mismatch,
            2 => FailureKind::TimedOut,
            3 => FailureKind::Aborted,
            _ => return None,
        };
        let (rank, rest) = rest.split_first_chunk::<4>()?;
        let (&host_len, rest) = rest.split_first()?;
        let (host, cause) = rest.split_at_checked(usize::from(host_len))?;
        Some(Self {
            kind,
            rank: u32::from_le_bytes(*rank) as usize,
            host: String::from_utf8_lossy(host).into_owned(),
            cause: String::from_utf8_lossy(cause).into_owned(),
        })
    }
}

/// The longest prefix of at most `max` bytes that ends between characters.
fn cut(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// Seconds with one decimal, for messages.
pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_survive_the_wire_and_are_cut_to_size() {
        let short = Failure::lost(7, "node-7", "killed by signal 9");
        assert_eq!(Failure::decode(&short.encode()), Some(short));
        let long = Failure::lost(7, &"h".repeat(500), "ö".repeat(5000));
        assert!(long.encode().len() <= Failure::MAX_BYTES);
        assert_eq!(Failure::decode(&long.encode()).map(|failure| failure.rank), Some(7));
        assert_eq!(Failure::decode(&[9, 0, 0]), None);
    }
}
