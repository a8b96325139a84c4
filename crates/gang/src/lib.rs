//! Tasks start together, know each other, fail together and restart together, on the right accelerators.
//!
//! A [`supervisor`] owns one job. It starts an [`agent`] on every host, waits until all have joined, places the tasks
//! ([`placement`]), and decides what a failure means ([`policy`]). An agent starts tasks, forwards their output and ends
//! them. Inside a task, [`Task`] is the barrier context; [`Gang`] runs closures on threads of one process.

pub mod accelerator;
pub mod agent;
mod context;
pub mod discovery;
mod error;
mod identity;
mod job;
mod launch;
mod local;
mod net;
mod output;
pub mod placement;
pub mod policy;
mod process;
mod protocol;
mod state;
pub mod supervisor;
#[cfg(test)]
mod testing;

pub use accelerator::{Accelerator, AcceleratorPath, Request};
pub use context::Task;
pub use error::{Ending, Error, Result};
pub use job::{Event, Host, Job, Outcome, Ssh, Stream, TaskInfo};
pub use local::Gang;
