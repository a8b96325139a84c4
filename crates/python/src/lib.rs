//! The native module of the Python package: `deuteron._core`.
//!
//! - GIL-1: whatever may wait lets other Python threads run, and comes back every now and then to see whether the user
//!   wants to interrupt it.
//! - GIL-2: no native thread attaches to Python.

mod data;
mod engine;
mod errors;
mod launch;
mod task;

use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs the `deuteron` command with these arguments, the first being its own name, and returns its exit code.
/// `program` starts it again.
#[pyfunction]
fn main(py: Python<'_>, program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| deuteron_cli::main_of(program, arguments))
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    task::register(module)?;
    engine::register(module)?;
    data::register(module)?;
    launch::register(module)
}
