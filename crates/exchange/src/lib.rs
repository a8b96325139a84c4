//! Record batches reach tasks, and tensors, without rows and without copies.
//!
//! A [`Source`] names the rows, [`Dataset`] opens it for one rank, and [`Batches`] are its mini-batches of one epoch.
//! Which rank sees which row at which step is a pure function ([`plan`]). A tensor of a mini-batch is one stretch of
//! memory that whoever gets it owns ([`Tensor`]).
//!
//! ```
//! use deuteron_exchange::{Dataset, Options, Source, files};
//!
//! # let path = std::env::temp_dir().join(format!("deuteron-example-{}.csv", std::process::id()));
//! # std::fs::write(&path, "x,y\n1,2\n3,4\n5,6\n")?;
//! let (rank, ranks) = (0, 1);
//! let rows = Dataset::open(Source::Files(files(&[path.clone()])?), Options::new(2, rank, ranks))?;
//! for batch in rows.epoch(0, 0)? {
//!     let shapes: Vec<_> = batch?.into_tensors().map(|tensor| tensor.shape).collect();
//!     assert_eq!(shapes, [[2], [2]]); // two columns of two rows
//! }
//! # std::fs::remove_file(path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - EX-1: a row whose columns all have a fixed width is kept as that many bytes ([`Layout`]): to draw a row at random is
//!   to copy one stretch of memory, not one value per column.
//! - EX-2: memory is bounded by the buffer, by what is prefetched, and by a number of bytes that the user names: rows that
//!   take more lie in a file without a name, of which only what is looked at is in memory.
//! - EX-3: threads of this room know nothing of Python, and end when nobody waits for what they make.

mod deal;
mod error;
mod filter;
mod layout;
mod loader;
mod memory;
mod pages;
pub mod plan;
mod source;
mod spool;

pub use error::{Error, Result};
pub use filter::{Filter, Operator, Value};
pub use layout::{Column, DType, Field, Fill, Group, Layout, Request};
pub use loader::{Batch, Batches, Dataset, Options, Tensor};
pub use source::{Source, files};
