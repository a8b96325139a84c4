//! What a caller chooses when a group is made.

use crate::{plan::Thresholds, security::Security, tune::Tuning, watch::Heartbeat};
use std::{net::IpAddr, time::Duration};

/// How a group is made.
///
/// ```
/// use deuteron_collective::GroupOptions;
/// use std::time::Duration;
/// let options = GroupOptions::default().limit(Duration::from_secs(600)).host("node-1");
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct GroupOptions {
    pub(crate) security: Security,
    pub(crate) address: Option<IpAddr>,
    pub(crate) host: Option<String>,
    pub(crate) share_memory: bool,
    pub(crate) memory_domain: Option<String>,
    pub(crate) flat: bool,
    pub(crate) limit: Option<Duration>,
    pub(crate) start_limit: Duration,
    pub(crate) heartbeat: Heartbeat,
    pub(crate) thresholds: Thresholds,
    pub(crate) tuning: Option<Tuning>,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            security: Security::default(),
            address: None,
            host: None,
            share_memory: true,
            memory_domain: None,
            flat: false,
            limit: None,
            start_limit: Duration::from_secs(60),
            heartbeat: Heartbeat::default(),
            thresholds: Thresholds::default(),
            tuning: None,
        }
    }
}

impl GroupOptions {
    /// How connections between hosts are protected.
    pub fn security(self, security: Security) -> Self {
        Self { security, ..self }
    }

    /// The address of this host at which others reach it; by default the one that the rendezvous knows.
    pub fn address(self, address: IpAddr) -> Self {
        Self { address: Some(address), ..self }
    }

    /// The name of this host in messages; by default its own.
    pub fn host(self, name: impl Into<String>) -> Self {
        Self { host: Some(name.into()), ..self }
    }

    /// Whether to look for ranks on this host to share memory with. Off, everything goes over TCP.
    pub fn share_memory(self, share_memory: bool) -> Self {
        Self { share_memory, ..self }
    }

    /// Shares memory only with ranks of the same domain: one host taken for several.
    pub fn memory_domain(self, name: impl Into<String>) -> Self {
        Self { memory_domain: Some(name.into()), ..self }
    }

    /// Treats all ranks alike even where hosts have several each, if any rank asks for it: for comparison.
    pub fn flat(self, flat: bool) -> Self {
        Self { flat, ..self }
    }

    /// The most that a call may wait. By default it waits as long as every rank is alive.
    pub fn limit(self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// The most that making the group may take; a minute by default.
    pub fn start_limit(self, start_limit: Duration) -> Self {
        Self { start_limit, ..self }
    }

    /// How fast a silent rank is given up.
    pub fn heartbeat(self, heartbeat: Heartbeat) -> Self {
        Self { heartbeat, ..self }
    }

    /// Where one algorithm gives way to the next; the same on every rank. Turns tuning off.
    pub fn thresholds(self, thresholds: Thresholds) -> Self {
        Self { thresholds, tuning: Some(Tuning::Off), ..self }
    }

    /// Whether thresholds are measured on this machine; the same on every rank. Off by default, so that how a call is
    /// carried out depends on the call and the topology only.
    pub fn tuning(self, tuning: Tuning) -> Self {
        Self { tuning: Some(tuning), ..self }
    }

    /// The same, unless tuning or thresholds have been chosen already.
    pub fn tuning_unless_chosen(self, tuning: Tuning) -> Self {
        Self { tuning: self.tuning.or(Some(tuning)), ..self }
    }
}
