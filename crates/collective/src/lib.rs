//! Ranks exchange tensors at the speed of memory or wire.
//!
//! A [`Group`] is made from a [`Rendezvous`], an all-gather of small messages. Ranks of one host share memory,
//! ranks of different hosts talk over TCP with mutual TLS. Every call is checked to be the same on all ranks,
//! every wait watches its peers, and every failure has a name.
//!
//! | module | one sentence |
//! |---|---|
//! | `group`, `options` | the calls that users make, and how a group is made |
//! | `engine` | named operations in any order, fused and overlapped |
//! | `subgroup` | groups of some of a group's ranks, made while it runs |
//! | `plan` | which algorithm a call uses, and why |
//! | `tune` | thresholds for the machine at hand, and why |
//! | `arena`, `shm` | collectives in shared memory, and the protocol under them |
//! | `mesh`, `link` | collectives over streams of bytes, and the streams |
//! | `pair` | links between two ranks, made when they are first needed |
//! | `tiers`, `layout` | collectives among hosts with several ranks: shared memory inside, links between |
//! | `kernel` | the arithmetic |
//! | `bootstrap`, `accept`, `security`, `rendezvous` | how ranks meet and come to trust each other |
//! | `health`, `watch`, `process`, `fork` | who is alive, and how everybody learns who is not |

mod accept;
mod arena;
mod bell;
mod bootstrap;
mod bucket;
mod call;
mod chunk;
mod dtype;
mod engine;
mod error;
mod fork;
#[doc(hidden)]
pub mod frame;
#[cfg(test)]
mod fuzz;
mod group;
mod health;
mod kernel;
mod layout;
mod link;
mod mesh;
mod options;
mod pair;
pub mod plan;
mod process;
mod reduction;
mod rendezvous;
mod security;
mod shares;
mod shm;
mod subgroup;
mod tiers;
pub mod tune;
mod watch;

pub use bucket::Bucket;
pub use dtype::{DType, Element};
pub use engine::{
    Buffer, DESK, Engine, EngineOptions, Gathering, Handle, Output, Prepared, RawTensor, Receipt,
    Shape, Submission, Together,
};
pub use error::{Error, Result};
pub use group::{Gathered, Group};
pub use options::GroupOptions;
pub use plan::Kind;
pub use reduction::{ReduceOp, Reduction};
pub use rendezvous::{LocalRendezvous, MAX_MESSAGE, Rendezvous, TcpRendezvous};
pub use security::{Identity, SERVER_NAME, Security};
pub use tune::Tuning;
pub use watch::Heartbeat;
