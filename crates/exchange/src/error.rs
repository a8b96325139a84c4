//! What can go wrong with data, and where.

use arrow_schema::ArrowError;
use parquet::errors::ParquetError;
use std::{io, path::Path};

/// The result of anything that touches data.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why data did not become tensors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller did something wrong.
    #[error("{0}")]
    Invalid(String),
    /// The data is not what it should be.
    #[error("{place}: {what}")]
    Data {
        /// The file, the column, or both.
        place: String,
        /// What is wrong there, and what to do.
        what: String,
    },
    /// The operating system refused something.
    #[error("{what}: {error}")]
    System {
        /// What was attempted.
        what: String,
        /// Its answer.
        #[source]
        error: io::Error,
    },
    /// Our own mistake.
    #[error("{0}; this is a bug of Deuteron")]
    Internal(&'static str),
}

impl Error {
    pub(crate) fn data(place: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Data { place: place.into(), what: what.into() }
    }

    /// The same, in this file.
    pub(crate) fn of(self, file: &str) -> Self {
        match self {
            Self::Data { place, what } if !file.is_empty() && !place.starts_with(file) => {
                Self::Data { place: format!("{file}, {place}"), what }
            }
            other => other,
        }
    }

    pub(crate) fn system(what: impl Into<String>, error: impl Into<io::Error>) -> Self {
        Self::System { what: what.into(), error: error.into() }
    }

    /// A file that cannot be opened.
    pub(crate) fn open(path: &Path, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => {
                Self::data(path.display().to_string(), "there is no such file or folder")
            }
            _ => Self::system(format!("cannot open {}", path.display()), error),
        }
    }

    pub(crate) fn parquet(file: &str, error: &ParquetError) -> Self {
        Self::data(file, format!("not a whole Parquet file ({error}): write it again"))
    }

    pub(crate) fn arrow(place: &str, error: &ArrowError) -> Self {
        Self::data(place, error.to_string())
    }
}
