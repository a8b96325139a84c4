//! Whether the group is alive, and if not, what ended it. Every wait asks here.
//!
//! The first failure wins. Setting it reaches the ranks of this host at once through their boards; the watch
//! thread sends it on to other hosts.

use crate::{
    call::Call,
    error::{Error, Failure, FailureKind, Result, seconds},
    shm::segment::Segment,
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::OwnedFd,
};
use std::{
    fmt::Display,
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How often a wait that takes long is reported.
const STALL: Duration = Duration::from_secs(60);

/// How long a broken connection may stay without a better explanation.
pub(crate) const EXPLANATION: Duration = Duration::from_millis(700);

/// The ranks of this host that share memory with this one, itself included.
pub(crate) type Neighbours = Vec<Option<Arc<Segment>>>;

pub(crate) struct Health {
    pub rank: usize,
    /// The number under which users know each rank: of a sub-group, that in the outermost group. Whatever is shown
    /// uses it, and so does [`Failure::rank`].
    pub names: Vec<usize>,
    pub hosts: Vec<String>,
    pub generation: u64,
    pub neighbours: Neighbours,
    /// Ranks of other hosts that have said goodbye.
    pub left: Vec<AtomicBool>,
    failure: OnceLock<Failure>,
    /// Readable once the group has failed; nobody ever empties it.
    pub alarm: OwnedFd,
}

impl Health {
    pub fn new(
        rank: usize,
        names: Vec<usize>,
        hosts: Vec<String>,
        generation: u64,
        neighbours: Neighbours,
    ) -> rustix::io::Result<Self> {
        let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let left = hosts.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Self {
            rank,
            names,
            hosts,
            generation,
            neighbours,
            left,
            failure: OnceLock::new(),
            alarm,
        })
    }

    /// Ends the group, unless it has ended before.
    pub fn fail(&self, failure: Failure) {
        if self.failure.set(failure).is_err() {
            return;
        }
        if let (Some(failure), Some(own)) = (self.failure.get(), &self.neighbours[self.rank]) {
            own.set_cause(failure);
        }
        for segment in self.neighbours.iter().flatten() {
            segment.board().set_poison(self.rank);
        }
        // Waiters sleep on the board of whom they wait for, so every board rings.
        for segment in self.neighbours.iter().flatten() {
            segment.board().ring();
        }
        let _ = rustix::io::write(&self.alarm, &1u64.to_ne_bytes());
    }

    /// What ended the group, if anything has.
    pub fn failure(&self) -> Option<&Failure> {
        if self.failure.get().is_none() {
            let by = self.neighbours[self.rank].as_ref()?.board().poison()?;
            let cause = self.neighbours.get(by).and_then(Option::as_ref).and_then(|s| s.cause());
            self.fail(
                cause.unwrap_or_else(|| self.lost(by, "it ended the group without saying why")),
            );
        }
        self.failure.get()
    }

    pub fn host(&self, rank: usize) -> &str {
        self.hosts.get(rank).map_or("an unknown host", String::as_str)
    }

    /// The number under which users know a rank.
    pub fn name(&self, rank: usize) -> usize {
        self.names.get(rank).copied().unwrap_or(rank)
    }

    /// The failure of a rank that can no longer take part.
    pub fn lost(&self, rank: usize, cause: impl Into<String>) -> Failure {
        Failure::lost(self.name(rank), self.host(rank), cause)
    }

    /// A failure that this rank found or wanted.
    pub fn own(&self, kind: FailureKind, cause: String) -> Failure {
        let host = self.host(self.rank).to_owned();
        Failure { kind, rank: self.name(self.rank), host, cause }
    }

    /// The error of a call that cannot go on.
    pub fn error(&self, operation: &dyn Display) -> Error {
        match self.failure() {
            Some(failure) => failure.during(operation, self.generation),
            None => Error::Bootstrap("the group ended without a failure, which is a bug".into()),
        }
    }

    /// The error for a broken connection. Why it broke is better known to whoever watches the process behind
    /// it: give it a moment.
    #[cold]
    pub fn broken(&self, rank: usize, error: &io::Error, operation: &dyn Display) -> Error {
        let start = Instant::now();
        while start.elapsed() < EXPLANATION {
            if self.failure().is_some() {
                return self.error(operation);
            }
            if self.has_left(rank) {
                return self.missed(rank, operation);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.fail(self.lost(rank, format!("the connection to it broke: {error}")));
        self.error(operation)
    }

    /// The error for a rank that dropped its group while others still wait for it.
    fn missed(&self, rank: usize, operation: &dyn Display) -> Error {
        let cause =
            "it left the group before this call (its function returned, or it dropped the group)";
        self.fail(self.lost(rank, cause));
        self.error(operation)
    }

    /// Whether a rank has dropped its group in good order.
    pub fn has_left(&self, rank: usize) -> bool {
        self.left[rank].load(Ordering::Acquire)
            || self.neighbours[rank].as_ref().is_some_and(|segment| segment.has_left())
    }
}

/// One call on its way: what it is, and how long it may wait.
pub(crate) struct Ticket<'a> {
    pub call: &'a Call,
    pub health: &'a Health,
    limit: Option<Duration>,
    /// Set at the first check, so that a call that never has to wait reads no clock.
    start: Option<Instant>,
    next_report: Duration,
}

impl<'a> Ticket<'a> {
    pub fn new(health: &'a Health, call: &'a Call, limit: Option<Duration>) -> Self {
        Self { call, health, limit, start: None, next_report: STALL }
    }

    /// Whether to go on waiting for `ranks`; asked whenever a wait is about to sleep, and after each nap.
    pub fn check(&mut self, ranks: impl Fn() -> Vec<usize>) -> Result<()> {
        if self.health.failure().is_some() {
            return Err(self.health.error(self.call));
        }
        let waited = self.start.get_or_insert_with(Instant::now).elapsed();
        if let Some(limit) = self.limit.filter(|limit| waited > *limit) {
            let cause = format!(
                "rank {} on {} waited {} in {} for {}; see what it is doing there, or give the call a longer limit",
                self.health.name(self.health.rank),
                self.health.host(self.health.rank),
                seconds(limit),
                self.call,
                self.names(&ranks())
            );
            return Err(self.fail(FailureKind::TimedOut, cause));
        }
        if waited > self.next_report {
            self.next_report += STALL;
            tracing::warn!(
                "rank {} has waited {} in {} for {}",
                self.health.name(self.health.rank),
                seconds(waited),
                self.call,
                self.names(&ranks())
            );
        }
        Ok(())
    }

    /// The same for ranks that share memory: one that has left will not publish any more. (Over links its last
    /// bytes may still be on the way after its goodbye; there the end of the link tells.)
    pub fn check_near(&mut self, ranks: impl Fn() -> Vec<usize>) -> Result<()> {
        match ranks().into_iter().find(|rank| self.health.has_left(*rank)) {
            Some(rank) if self.health.failure().is_none() => {
                Err(self.health.missed(rank, self.call))
            }
            _ => self.check(ranks),
        }
    }

    /// Ends the group because of something that this rank found.
    pub fn fail(&self, kind: FailureKind, cause: String) -> Error {
        self.health.fail(self.health.own(kind, cause));
        self.health.error(self.call)
    }

    /// Ends the group because `rank` can no longer take part.
    pub fn lost(&self, rank: usize, cause: impl Into<String>) -> Error {
        self.health.fail(self.health.lost(rank, cause));
        self.health.error(self.call)
    }

    pub fn broken(&self, rank: usize, error: &io::Error) -> Error {
        self.health.broken(rank, error, self.call)
    }

    fn names(&self, ranks: &[usize]) -> String {
        let names: Vec<String> = ranks
            .iter()
            .map(|rank| format!("rank {} on {}", self.health.name(*rank), self.health.host(*rank)))
            .collect();
        names.join(", ")
    }
}
