//! From errors of the rooms below to exceptions of `deuteron.errors`.

use deuteron_collective::Error as Collective;
use deuteron_exchange::Error as Exchange;
use deuteron_gang::Error as Gang;
use pyo3::{call::PyCallArgs, exceptions::PyKeyboardInterrupt, prelude::*};

/// An exception of `deuteron.errors` with these arguments.
fn raise<'py>(py: Python<'py>, class: &str, arguments: impl PyCallArgs<'py>) -> PyErr {
    let class = py.import("deuteron.errors").and_then(|errors| errors.getattr(class));
    class.and_then(|class| class.call1(arguments)).map_or_else(|error| error, PyErr::from_value)
}

pub(crate) fn invalid(message: impl Into<String>) -> PyErr {
    Python::attach(|py| raise(py, "InvalidError", (message.into(),)))
}

pub(crate) fn timed_out(message: impl Into<String>) -> PyErr {
    Python::attach(|py| raise(py, "TimedOutError", (message.into(),)))
}

pub(crate) fn collective(error: &Collective) -> PyErr {
    let message = error.to_string();
    Python::attach(|py| match error {
        Collective::Invalid(_) => raise(py, "InvalidError", (message,)),
        Collective::Mismatch { .. } => raise(py, "MismatchError", (message,)),
        Collective::TimedOut { .. } => raise(py, "TimedOutError", (message,)),
        Collective::PeerLost { rank, host, generation, .. } => {
            raise(py, "PeerLostError", (message, *rank, host, *generation))
        }
        Collective::Aborted { rank, host, .. } => raise(py, "AbortedError", (message, *rank, host)),
        _ => raise(py, "CollectiveError", (message,)),
    })
}

pub(crate) fn gang(error: &Gang) -> PyErr {
    let message = error.to_string();
    Python::attach(|py| match error {
        Gang::Collective(error) => collective(error),
        Gang::Invalid(_) => raise(py, "InvalidError", (message,)),
        Gang::NotAssembled(_) | Gang::NotPlaced(_) => raise(py, "LaunchError", (message,)),
        Gang::Ended(_) => raise(py, "GangEndedError", (message,)),
        Gang::TaskFailed { rank, host, generation, ending, last } => {
            let ending = ending.to_string();
            let first = format!("rank {rank} on {host} {ending}");
            raise(py, "TaskFailedError", (first, *rank, host, *generation, ending, last))
        }
        Gang::Interrupted(_) => PyKeyboardInterrupt::new_err(message),
        _ => raise(py, "Error", (message,)),
    })
}

pub(crate) fn exchange(error: &Exchange) -> PyErr {
    let message = error.to_string();
    Python::attach(|py| match error {
        Exchange::Invalid(_) => raise(py, "InvalidError", (message,)),
        _ => raise(py, "DataError", (message,)),
    })
}
