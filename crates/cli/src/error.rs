//! Why the command did not do what it was asked to.

use crate::status::exit;

/// What went wrong, sorted by who can mend it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// What was typed is wrong.
    #[error("{0}")]
    Usage(String),
    /// What was typed is fine; a file or the environment is wrong.
    #[error("{0}")]
    Configuration(String),
}

impl Error {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => exit::USAGE,
            Self::Configuration(_) => exit::CONFIGURATION,
        }
    }
}
