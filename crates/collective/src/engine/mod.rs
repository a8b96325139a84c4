//! The engine: named operations in any order from any thread, matched across ranks, fused and overlapped.
//!
//! Training frameworks hand over gradients one by one, in whatever order. The engine matches them by name, puts
//! what is ready everywhere into few large reductions, and freezes the layout of a step that repeats: from then on
//! a bucket starts when its last member is ready, with one small message for each rank.
//!
//! | module | one sentence |
//! |---|---|
//! | `table`, `queue`, `output` | this rank's operations, from submission to result |
//! | `coordinator`, `layout` | which operations run when, decided by the lowest rank: pure functions |
//! | `message` | the words between them |
//! | `progress` | what moves operations on, on whichever thread waits |
//! | `desk` | where a running process is asked what its ranks wait for |
//! | `timeline` | what every rank did when, in one file |
#![expect(unsafe_code, reason = "operations on their way hold pointers to their tensors")]

mod buffer;
mod coordinator;
mod desk;
mod layout;
pub(crate) mod message;
#[cfg(test)]
mod model;
mod output;
mod progress;
mod queue;
mod table;
mod timeline;

pub use buffer::{Buffer, Together};
pub use desk::DESK;
pub use message::Shape;
pub use output::Output;
pub use table::{Prepared, RawTensor, Receipt, Submission};

use crate::{
    Bucket, Element, Gathered, Group, ReduceOp, Reduction,
    call::Kind,
    error::{Error, FailureKind, Result, seconds},
    fork,
    health::Health,
    kernel,
};
use progress::{Progress, Watched};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fd::{BorrowedFd, OwnedFd},
    time::{
        ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec,
        clock_gettime, timerfd_create, timerfd_settime,
    },
};
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    ptr,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};
use table::{Callback, Event, Next, Table};

/// How long a bucket waits for members that this rank has not submitted while somebody waits for one that it has.
const GRACE: Duration = Duration::from_millis(2);

/// How long the thread leaves to a user's thread what is ready to run.
const HEAD_START: Duration = Duration::from_micros(50);

/// From here on what is copied goes past the cache.
const LONG_COPY: usize = 256 << 10;

/// How long a report may take.
const REPORT_TIME: Duration = Duration::from_secs(3);

/// Buckets whose end is seen without the table's lock.
const ROUNDS: usize = 256;

/// How an engine works.
///
/// ```
/// use deuteron_collective::EngineOptions;
/// use std::time::Duration;
/// let options = EngineOptions::default().bucket_bytes(4 << 20).stall(Duration::from_secs(10));
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EngineOptions {
    pub(crate) bucket_bytes: usize,
    pub(crate) stall: Duration,
    pub(crate) deterministic: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { bucket_bytes: 8 << 20, stall: Duration::from_secs(60), deterministic: false }
    }
}

impl EngineOptions {
    /// The most that is fused into one reduction; 8 MiB by default. The same on every rank.
    pub fn bucket_bytes(self, bucket_bytes: usize) -> Self {
        Self { bucket_bytes, ..self }
    }

    /// After how long a wait is reported; a minute by default.
    pub fn stall(self, stall: Duration) -> Self {
        Self { stall, ..self }
    }

    /// Makes what is fused a function of names and sizes only, so that results over links are the same in every
    /// run, bit by bit. Before a step is frozen nothing is fused at all.
    pub fn deterministic(self, deterministic: bool) -> Self {
        Self { deterministic, ..self }
    }
}

/// What user threads and the engine's own share.
pub(crate) struct Shared {
    health: Arc<Health>,
    table: Mutex<Table>,
    /// Something has ended.
    done: Condvar,
    /// Threads that sleep until then.
    sleepers: AtomicUsize,
    /// Rounds of the first buckets that are over.
    rounds: [AtomicU64; ROUNDS],
    /// Somebody has waited since the last submission.
    waited: AtomicBool,
    /// Gone when the engine is.
    progress: Mutex<Option<Progress>>,
    bell: OwnedFd,
    timer: Timer,
    /// Until when the thread sleeps, in nanoseconds of the coarse clock.
    sleeps_until: AtomicU64,
    traced: AtomicBool,
    timeline_path: Mutex<Option<PathBuf>>,
    stopping: AtomicBool,
    patience: Patience,
    forks: u32,
}

#[derive(Clone, Copy)]
struct Patience {
    /// How often a waiting thread looks before it sleeps.
    looks: u32,
    /// How often it looks before it wakes the others: they may be about to look themselves.
    quiet: u32,
    crowded: bool,
}

/// Wakes the thread after a while.
struct Timer {
    fd: OwnedFd,
    set: AtomicBool,
}

impl Timer {
    fn new() -> rustix::io::Result<Self> {
        let fd = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?;
        Ok(Self { fd, set: AtomicBool::new(false) })
    }

    fn set(&self, after: Duration) {
        self.set.store(true, Ordering::Relaxed);
        self.settle(after);
    }

    /// Also makes it unreadable again.
    fn stop(&self) {
        if self.set.load(Ordering::Relaxed) && self.set.swap(false, Ordering::Relaxed) {
            self.settle(Duration::ZERO);
        }
    }

    fn settle(&self, after: Duration) {
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let after = Timespec { tv_nsec: i64::from(after.subsec_nanos()), ..never };
        let time = Itimerspec { it_interval: never, it_value: after };
        // It cannot fail: the descriptor is a timer, and the time is one.
        let _ = timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &time);
    }
}

/// Nanoseconds of the clock that ranks of a host have in common.
fn clock() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Calls back. Whoever drives has other things to do than to die of somebody else's panic.
fn call(callback: Callback, result: Result<()>) {
    let call = AssertUnwindSafe(|| callback(result));
    if catch_unwind(call).is_err() {
        tracing::error!("a callback of an operation panicked");
    }
}

#[inline]
fn refused_or(receipt: Receipt, refusal: Option<Error>) -> Result<Receipt> {
    match refusal {
        Some(error) if receipt.is_refused() => Err(error),
        _ => Ok(receipt),
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A few milliseconds exact, and cheap.
    fn now(&self) -> Duration {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    }

    /// For the timeline; zero while none is recorded.
    fn clock(&self) -> u64 {
        if self.is_traced() { clock() } else { 0 }
    }

    fn is_traced(&self) -> bool {
        self.traced.load(Ordering::Relaxed)
    }

    fn trace(&self, on: bool) {
        self.table().trace = on.then(Vec::new);
        self.traced.store(on, Ordering::Relaxed);
    }

    fn timeline_path(&self) -> Option<PathBuf> {
        self.timeline_path.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn ring(&self) {
        // It can only be full, and then it rings already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Wakes who waits, and calls who wants to be called.
    fn completed(&self, callbacks: Vec<(Callback, Result<()>)>) {
        // Who sleeps has said so under the table's lock, which has been held since to write the result.
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.done.notify_all();
        }
        for (callback, result) in callbacks {
            call(callback, result);
        }
    }

    /// Ends everything that is on its way.
    fn fail(&self, progress: &Progress, error: &Error) {
        progress.end_group(error);
        let callbacks = self.table().fail();
        self.done.notify_all();
        for (callback, receipt) in callbacks {
            call(callback, Err(self.failure(Some(receipt))));
        }
    }

    /// What an operation that the group's end has cut off fails with.
    fn failure(&self, receipt: Option<Receipt>) -> Error {
        if self.health.failure().is_none() {
            return Error::Invalid("the engine has been closed on this rank".into());
        }
        let table = self.table();
        let entry = receipt.and_then(|receipt| table.entries.get(receipt.entry as usize));
        let title = entry.map(|entry| coordinator::title(&entry.request, &entry.name));
        drop(table);
        self.health.error(&title.unwrap_or_else(|| "the engine".into()))
    }

    fn refuse_forks(&self) -> Result<()> {
        if self.forks != fork::forks() {
            return Err(Error::Invalid(
                "this process is a fork of the rank that made the engine; only the rank may use it"
                    .into(),
            ));
        }
        Ok(())
    }

    #[inline]
    fn submit(&self, submission: &Submission<'_>, waits: bool) -> Result<Receipt> {
        let mut refusal = None;
        let receipt = self.take_in(waits, &mut refusal, |table, refusal| {
            table.submit(submission, waits, || self.clock(), refusal)
        });
        refused_or(receipt, refusal)
    }

    #[inline]
    fn submit_prepared(&self, prepared: &Prepared) -> Result<Receipt> {
        let mut refusal = None;
        let receipt = self.take_in(false, &mut refusal, |table, refusal| {
            table.submit_prepared(prepared, || self.clock(), refusal)
        });
        refused_or(receipt, refusal)
    }

    #[inline]
    fn take_in(
        &self,
        waits: bool,
        refusal: &mut Option<Error>,
        submit: impl FnOnce(&mut Table, &mut Option<Error>) -> (Receipt, Next),
    ) -> Receipt {
        let mut table = self.table();
        if table.failed || self.forks != fork::forks() {
            drop(table);
            *refusal = Some(self.refuse_forks().err().unwrap_or_else(|| self.failure(None)));
            return Receipt::REFUSED;
        }
        if self.waited.load(Ordering::Relaxed) {
            self.waited.store(false, Ordering::Relaxed);
            table.next_era();
        }
        let (receipt, next) = submit(&mut table, refusal);
        drop(table);
        match next {
            Next::Ring => self.ring(),
            Next::Tell if !waits => self.nudge(),
            _ => {}
        }
        receipt
    }

    /// Passes on what was submitted without carrying anything out. If there is more to do, the thread does it in a
    /// moment, unless this one comes back and waits: as a rule that is sooner than anybody can be woken.
    fn nudge(&self) {
        match self.progress.try_lock() {
            Ok(mut guard) => {
                if let Some(progress) = guard.as_mut() {
                    match progress.drive(self, false) {
                        Ok(more) => {
                            self.rest(progress, false);
                            if more {
                                self.timer.set(HEAD_START);
                            }
                        }
                        Err(error) => self.fail(progress, &error),
                    }
                }
            }
            // Who drives may have looked before the submission.
            Err(_) => self.ring(),
        }
    }

    /// Leaves driving to the thread (DRIVE-1).
    fn rest(&self, progress: &mut Progress, urgent: bool) {
        let mut watched = Watched::default();
        let idle = progress.arm(self, &mut watched, urgent);
        let until = watched.until.map_or(u64::MAX, |until| until.as_nanos() as u64);
        let late = until < self.sleeps_until.load(Ordering::Relaxed);
        if !idle || late || watched.sends() || !self.table().queue.is_empty() {
            self.ring();
        }
    }

    /// Waits until `ready`, driving as long as that may help. False if `deadline` has come first.
    fn wait_for(
        &self,
        receipt: Option<Receipt>,
        deadline: Option<Instant>,
        mut ready: impl FnMut(&mut Table) -> bool,
    ) -> Result<bool> {
        let mut table = self.table();
        if ready(&mut table) {
            return Ok(true);
        }
        if table.failed {
            drop(table);
            return Err(self.failure(receipt));
        }
        drop(table);
        self.timer.stop();
        match self.progress.try_lock() {
            Ok(mut guard) => {
                if let Some(progress) = guard.as_mut() {
                    let mut over = false;
                    for look in 0..self.patience.looks {
                        if look == self.patience.quiet {
                            progress.ring(false);
                        }
                        if let Err(error) = progress.drive(self, true) {
                            self.fail(progress, &error);
                            break;
                        }
                        over = ready(&mut self.table());
                        if over {
                            break;
                        }
                        if self.patience.crowded {
                            std::thread::yield_now();
                        } else {
                            std::hint::spin_loop();
                        }
                    }
                    self.rest(progress, !over);
                }
            }
            Err(TryLockError::WouldBlock) => self.ring(),
            Err(TryLockError::Poisoned(_)) => {}
        }
        self.sleep(receipt, deadline, ready)
    }

    fn sleep(
        &self,
        receipt: Option<Receipt>,
        deadline: Option<Instant>,
        mut ready: impl FnMut(&mut Table) -> bool,
    ) -> Result<bool> {
        let mut table = self.table();
        let mut since = None;
        let mut opened = None;
        let mut start = 0;
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let outcome = loop {
            if ready(&mut table) {
                break Ok(true);
            }
            if table.failed {
                break Err(());
            }
            if since.is_none() {
                let now = self.now();
                since = Some(now);
                start = self.clock();
                table.waits.extend(receipt.map(|receipt| (receipt, now)));
            }
            let held_up = receipt.and_then(|receipt| table.is_held_up(receipt));
            let held_up = held_up.filter(|bucket| opened != Some(*bucket));
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break Ok(false);
            }
            let limit = held_up.map(|_| GRACE).into_iter().chain(left).min();
            let Some(limit) = limit else {
                table = self.done.wait(table).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let (woken, waited) =
                self.done.wait_timeout(table, limit).unwrap_or_else(PoisonError::into_inner);
            table = woken;
            let still = receipt.and_then(|receipt| table.is_held_up(receipt));
            if let Some(bucket) = held_up.filter(|_| waited.timed_out() && limit == GRACE)
                && still == held_up
            {
                opened = held_up;
                if table.queue.put(Event::Open(bucket)) {
                    self.ring();
                }
            }
        };
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        if since.is_some()
            && let Some(receipt) = receipt
        {
            if let Some(index) = table.waits.iter().position(|(known, _)| *known == receipt) {
                table.waits.swap_remove(index);
            }
            table.record(message::Phase::Wait, receipt.entry, start, clock());
        }
        drop(table);
        outcome.map_err(|()| self.failure(receipt))
    }

    #[inline]
    fn wait(&self, receipt: Receipt) -> Result<Vec<Output>> {
        if self.is_over(receipt) { Ok(Vec::new()) } else { self.wait_long(receipt) }
    }

    /// Whether it is done: the usual case after the first of a bucket, with no lock and nothing to clean up (TABLE-2).
    #[inline]
    fn is_over(&self, receipt: Receipt) -> bool {
        self.waited.store(true, Ordering::Relaxed);
        let round = self.rounds.get(receipt.bucket as usize);
        round.is_some_and(|round| receipt.is_over(round.load(Ordering::Acquire)))
    }

    fn wait_long(&self, receipt: Receipt) -> Result<Vec<Output>> {
        self.refuse_forks()?;
        self.wait_for(Some(receipt), None, |table| table.is_done(receipt))?;
        self.table().collect(receipt)
    }

    /// The engine's own thread: drives when nobody else does.
    fn run(&self) {
        let mut watched = Watched::default();
        loop {
            {
                let mut guard = self.take_over();
                let Some(progress) = guard.as_mut() else { return };
                let driven = progress.keep_time(self).and_then(|()| progress.drive(self, true));
                if let Err(error) = driven {
                    return self.fail(progress, &error);
                }
                if !progress.arm(self, &mut watched, false) {
                    continue;
                }
                let until = watched.until.map_or(u64::MAX, |until| until.as_nanos() as u64);
                self.sleeps_until.store(until, Ordering::Relaxed);
            }
            if self.stopping.load(Ordering::Acquire) {
                return;
            }
            if !self.table().queue.sleep() {
                continue;
            }
            self.doze(&watched);
            self.table().queue.wake();
        }
    }

    /// Takes the lock, but leaves a user's thread that drives in peace for a while: it is likely to do everything.
    fn take_over(&self) -> MutexGuard<'_, Option<Progress>> {
        for _ in 0..20 {
            match self.progress.try_lock() {
                Ok(guard) => return guard,
                Err(TryLockError::Poisoned(error)) => return error.into_inner(),
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(50)),
            }
        }
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until the bell rings, a word comes, the group fails or it is time.
    fn doze(&self, watched: &Watched) {
        let mut fds = vec![
            PollFd::new(&self.bell, PollFlags::IN),
            PollFd::new(&self.timer.fd, PollFlags::IN),
            PollFd::new(&self.health.alarm, PollFlags::IN),
        ];
        for (fd, flags) in &watched.fds {
            // SAFETY: links live until the thread has ended: the engine takes them away only after that.
            fds.push(PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(*fd) }, *flags));
        }
        let left = watched
            .until
            .map(|until| until.saturating_sub(self.now()).max(Duration::from_millis(1)));
        let left = left.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        let _ = poll(&mut fds, left.as_ref());
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        self.timer.stop();
    }
}

/// Named operations of one group, in any order, from any thread.
///
/// Ranks may submit in different orders; what has the same name belongs together. Every rank makes its engine from
/// the same group at the same time, and uses the group through the engine only from then on.
///
/// ```
/// use deuteron_collective::{Engine, EngineOptions, Group, GroupOptions, LocalRendezvous, ReduceOp};
///
/// let threads: Vec<_> = LocalRendezvous::group(2)
///     .into_iter()
///     .map(|rendezvous| {
///         std::thread::spawn(move || {
///             let group = Group::connect(&rendezvous, GroupOptions::default())?;
///             let engine = Engine::new(group, EngineOptions::default())?;
///             // In whatever order the ranks come to them.
///             let names = if engine.rank() == 0 { ["weights", "bias"] } else { ["bias", "weights"] };
///             let first = engine.all_reduce(names[0], vec![1.0f32; 4], ReduceOp::Sum)?;
///             let second = engine.all_reduce(names[1], vec![2.0f32; 4], ReduceOp::Sum)?;
///             Ok::<_, deuteron_collective::Error>([first.wait()?, second.wait()?])
///         })
///     })
///     .collect();
/// for thread in threads {
///     assert_eq!(thread.join().unwrap()?, [vec![3.0; 4], vec![3.0; 4]]);
/// }
/// # Ok::<(), deuteron_collective::Error>(())
/// ```
pub struct Engine {
    shared: Arc<Shared>,
    group: Group,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine(rank {} of {})", self.rank(), self.size())
    }
}

impl Engine {
    /// Makes the engine of a group, on all of its ranks together.
    pub fn new(group: Group, options: EngineOptions) -> Result<Self> {
        let links = match group.size() {
            1 => vec![None],
            _ => group.star()?,
        };
        let failed = |error: rustix::io::Errno| Error::system("the engine cannot start", error);
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let crowded = group.is_crowded();
        let patience = match crowded {
            true => Patience { looks: 20, quiet: 0, crowded },
            false => Patience { looks: 2000, quiet: 30, crowded },
        };
        let shared = Arc::new(Shared {
            health: Arc::clone(group.health()),
            table: Mutex::default(),
            done: Condvar::new(),
            sleepers: AtomicUsize::new(0),
            rounds: [const { AtomicU64::new(0) }; ROUNDS],
            waited: AtomicBool::new(false),
            progress: Mutex::new(Some(Progress::new(group.clone(), links, &options))),
            bell,
            timer: Timer::new().map_err(failed)?,
            sleeps_until: AtomicU64::new(0),
            traced: AtomicBool::new(false),
            timeline_path: Mutex::default(),
            stopping: AtomicBool::new(false),
            patience,
            forks: fork::forks(),
        });
        shared.table().active.0 = shared.now();
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("deuteron-engine".into())
            .spawn(move || own.run())
            .map_err(|error| Error::system("the engine's thread cannot start", error))?;
        desk::register(&shared);
        Ok(Self { shared, group, thread: Mutex::new(Some(thread)) })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// The group under the engine, to ask it things.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Replaces every rank's elements with the combination of all ranks', some time between now and
    /// [`Handle::wait`].
    pub fn all_reduce<'a, B: Buffer>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: B,
        reduction: impl Into<Reduction>,
    ) -> Result<Handle<B>> {
        self.start(name.into(), Kind::AllReduce, reduction.into(), 0, tensor)
    }

    /// Replaces every rank's elements with the root's.
    pub fn broadcast<'a, B: Buffer>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: B,
        root: usize,
    ) -> Result<Handle<B>> {
        self.check_root(root)?;
        self.start(name.into(), Kind::Broadcast, ReduceOp::Sum.into(), root, tensor)
    }

    /// Every rank's elements in rank order, as many as each has.
    pub fn all_gather<'a, B: Buffer>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: B,
    ) -> Result<Gathering<B>> {
        self.start(name.into(), Kind::AllGather, ReduceOp::Sum.into(), 0, tensor).map(Gathering)
    }

    /// This rank's rows of the combination of all ranks' tensors: rows are shared out evenly, one more to the first
    /// ranks if they do not come out even.
    pub fn reduce_scatter<'a, B: Buffer>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: B,
        reduction: impl Into<Reduction>,
    ) -> Result<Gathering<B>> {
        self.start(name.into(), Kind::ReduceScatter, reduction.into(), 0, tensor).map(Gathering)
    }

    /// What every rank has for this one, in rank order. Of this rank's elements as many go to each rank as `splits`
    /// says; without any, equal shares.
    pub fn all_to_all<'a, B: Buffer>(
        &self,
        name: impl Into<Option<&'a str>>,
        mut tensor: B,
        splits: &[usize],
    ) -> Result<Gathering<B>> {
        let reduction = ReduceOp::Sum.into();
        let receipt = tensor.with_tensors(|tensors| {
            let submission = Submission {
                name: name.into(),
                kind: Kind::AllToAll,
                reduction,
                root: 0,
                tensors,
                splits,
            };
            self.check(&submission)?;
            self.shared.submit(&submission, false)
        })?;
        Ok(Gathering(Handle { shared: Arc::clone(&self.shared), receipt, buffer: Some(tensor) }))
    }

    /// [`Self::all_reduce`] of borrowed memory that returns when it is done. With nothing else on its way it runs
    /// on this thread.
    pub fn all_reduce_now<'a, T: Element>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: &mut [T],
        reduction: impl Into<Reduction>,
    ) -> Result<()> {
        self.now(name.into(), Kind::AllReduce, reduction.into(), 0, tensor).map(drop)
    }

    /// [`Self::broadcast`] of borrowed memory that returns when it is done.
    pub fn broadcast_now<'a, T: Element>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: &mut [T],
        root: usize,
    ) -> Result<()> {
        self.check_root(root)?;
        self.now(name.into(), Kind::Broadcast, ReduceOp::Sum.into(), root, tensor).map(drop)
    }

    /// Makes memory of the group, zeroed: tensors in it are reduced in place. Every rank calls it with the same
    /// length, in the same order as other operations without a name.
    ///
    /// ```
    /// # use deuteron_collective::{Engine, EngineOptions, Group, GroupOptions, LocalRendezvous, ReduceOp};
    /// # let rendezvous = LocalRendezvous::group(1).remove(0);
    /// # let group = Group::connect(&rendezvous, GroupOptions::default())?;
    /// let engine = Engine::new(group, EngineOptions::default())?;
    /// let [weights, bias] = engine.bucket::<f32>(110)?.split([100, 10])?;
    /// let weights = engine.all_reduce("weights", weights, ReduceOp::Mean)?;
    /// let bias = engine.all_reduce("bias", bias, ReduceOp::Mean)?;
    /// let (weights, bias) = (weights.wait()?, bias.wait()?);
    /// # assert_eq!((weights.len(), bias.len()), (100, 10));
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn bucket<T: Element>(&self, len: usize) -> Result<Bucket<T>> {
        let tensor =
            RawTensor { data: ptr::null_mut(), dtype: T::DTYPE, shape: Shape::new(&[len]) };
        let submission = Submission {
            name: None,
            kind: Kind::Bucket,
            reduction: ReduceOp::Sum.into(),
            root: 0,
            tensors: &[tensor],
            splits: &[],
        };
        let mut outputs = self.shared.wait(self.shared.submit(&submission, true)?)?;
        let missing = || Error::Invalid("no memory was made, which is a bug".into());
        outputs.pop().ok_or_else(missing)?.into_bucket()
    }

    /// Returns when every rank has called it with the same name.
    pub fn barrier<'a>(&self, name: impl Into<Option<&'a str>>) -> Result<()> {
        self.now::<u8>(name.into(), Kind::Barrier, ReduceOp::Sum.into(), 0, &mut []).map(drop)
    }

    /// Says that this rank has no more data and waits until all ranks have said so. Until then it takes part in
    /// the others' sums and means with zeros; anything else that they try fails. Returns the rank that came last.
    pub fn join(&self) -> Result<usize> {
        self.shared.refuse_forks()?;
        let now = self.shared.now();
        let mut table = self.shared.table();
        table.join(now);
        drop(table);
        let limit = self.group.limit();
        let deadline = limit.map(|limit| Instant::now() + limit);
        if !self.shared.wait_for(None, deadline, |table| table.last_joined.is_some())? {
            let cause =
                format!("not all ranks have joined after {}", seconds(limit.unwrap_or_default()));
            let health = &self.shared.health;
            health.fail(health.own(FailureKind::TimedOut, cause));
            return Err(health.error(&"join"));
        }
        Ok(self.shared.table().last_joined.unwrap_or_default())
    }

    /// Which operations wait for which ranks, what each of these is doing, and for how long.
    pub fn report(&self) -> Result<String> {
        self.shared.report()
    }

    /// Starts to record what every rank does, into a file that the lowest rank writes. On other ranks it does
    /// nothing.
    pub fn start_timeline(&self, path: impl AsRef<Path>) -> Result<()> {
        if self.rank() == 0 {
            if self.shared.is_traced() {
                return Err(Error::Invalid(
                    "a timeline is being recorded already: stop it first".into(),
                ));
            }
            let path = path.as_ref();
            std::fs::File::create(path).map_err(|error| {
                Error::system(format!("no timeline in {}", path.display()), error)
            })?;
            *self.shared.timeline_path.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(path.to_owned());
            self.shared.table().queue.leave(Event::Timeline(true));
            self.shared.nudge();
            self.shared.wait_for(None, None, |table| table.trace.is_some())?;
        }
        Ok(())
    }

    /// Stops recording. On the lowest rank it returns when the file is complete.
    pub fn stop_timeline(&self) -> Result<()> {
        if self.rank() == 0 {
            let mut table = self.shared.table();
            table.timeline_ended = false;
            table.queue.leave(Event::Timeline(false));
            drop(table);
            self.shared.wait_for(None, None, |table| table.timeline_ended)?;
        }
        Ok(())
    }

    /// Leaves, as dropping it does. What is on its way fails, here and elsewhere.
    pub fn close(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.shared.forks != fork::forks() {
            // A forked child: thread and links are its parent's.
            std::mem::forget(thread);
            if let Ok(mut progress) = self.shared.progress.try_lock() {
                std::mem::forget(progress.take());
            }
            return;
        }
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.ring();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        let progress = self.shared.progress.lock().unwrap_or_else(PoisonError::into_inner).take();
        let progress = progress.map(|mut progress| {
            progress.leave(&self.shared);
            progress
        });
        let callbacks = self.shared.table().fail();
        self.shared.done.notify_all();
        for (callback, receipt) in callbacks {
            call(callback, Err(self.shared.failure(Some(receipt))));
        }
        drop(progress);
    }

    /// What cannot be right, whatever the other ranks do.
    fn check(&self, submission: &Submission<'_>) -> Result<()> {
        if submission.kind == Kind::Broadcast {
            self.check_root(submission.root)?;
        }
        if submission.kind != Kind::AllToAll {
            return Ok(());
        }
        for tensor in submission.tensors {
            let (rows, ranks) = (tensor.shape.rows(), self.size());
            let split: usize = submission.splits.iter().sum();
            let problem = match submission.splits.len() {
                0 if rows.is_multiple_of(ranks) => continue,
                0 => format!(
                    "{rows} rows cannot be shared out evenly among {ranks} ranks: pass splits"
                ),
                length if length != ranks => format!("{length} splits for {ranks} ranks"),
                _ if split > rows => format!("the splits take {split} rows of {rows}"),
                _ => continue,
            };
            return Err(Error::Invalid(problem));
        }
        Ok(())
    }

    fn check_root(&self, root: usize) -> Result<()> {
        if root >= self.size() {
            return Err(Error::Invalid(format!("there is no rank {root} among {}", self.size())));
        }
        Ok(())
    }

    fn start<B: Buffer>(
        &self,
        name: Option<&str>,
        kind: Kind,
        reduction: Reduction,
        root: usize,
        mut buffer: B,
    ) -> Result<Handle<B>> {
        let receipt = buffer.with_tensors(|tensors| {
            self.shared
                .submit(&Submission { name, kind, reduction, root, tensors, splits: &[] }, false)
        })?;
        Ok(Handle { shared: Arc::clone(&self.shared), receipt, buffer: Some(buffer) })
    }

    fn now<T: Element>(
        &self,
        name: Option<&str>,
        kind: Kind,
        reduction: Reduction,
        root: usize,
        tensor: &mut [T],
    ) -> Result<Vec<Output>> {
        let raw = buffer::raw(tensor);
        let tensors = if kind == Kind::Barrier { &[][..] } else { std::slice::from_ref(&raw) };
        let receipt = self
            .shared
            .submit(&Submission { name, kind, reduction, root, tensors, splits: &[] }, true)?;
        self.shared.wait(receipt)
    }

    /// Submits an operation on memory that the caller looks after: for bindings to other languages.
    ///
    /// # Safety
    /// Every tensor is aligned, holds as many elements as its shape says, and nobody else uses or frees it before
    /// the operation is done or has failed.
    #[inline]
    pub unsafe fn submit(&self, submission: &Submission<'_>) -> Result<Receipt> {
        self.check(submission)?;
        self.shared.submit(submission, false)
    }

    /// The same for a caller that waits for it next: nobody else is woken to move it on.
    ///
    /// # Safety
    /// As for [`Self::submit`].
    #[inline]
    pub unsafe fn submit_to_wait(&self, submission: &Submission<'_>) -> Result<Receipt> {
        self.check(submission)?;
        self.shared.submit(submission, true)
    }

    /// Prepares an operation that is going to be submitted again and again, with the same tensors.
    pub fn prepare(&self, submission: &Submission<'_>) -> Result<Prepared> {
        self.check(submission)?;
        Prepared::new(submission)
    }

    /// Submits what has been prepared. Its name need not be looked up again.
    ///
    /// # Safety
    /// As for [`Self::submit`].
    #[inline]
    pub unsafe fn submit_prepared(&self, prepared: &Prepared) -> Result<Receipt> {
        self.shared.submit_prepared(prepared)
    }

    /// Copies elements into the only tensor of what has been prepared, and submits it.
    ///
    /// # Safety
    /// As for [`Self::submit`]; and `from` is valid for reads of as many elements, somewhere else.
    #[inline]
    pub unsafe fn fill(&self, prepared: &Prepared, from: *const u8) -> Result<Receipt> {
        let (to, bytes) = prepared.place();
        // SAFETY: the caller's contract.
        unsafe {
            match bytes {
                // Peers read it next, and this core does not soon.
                LONG_COPY.. => kernel::hand_over(from, to, bytes),
                1.. => ptr::copy_nonoverlapping(from, to, bytes),
                0 => {}
            }
        }
        self.shared.submit_prepared(prepared)
    }

    /// Whether an operation is done or has failed.
    pub fn is_done(&self, receipt: Receipt) -> bool {
        self.shared.is_done(receipt)
    }

    /// Waits until an operation is done, and returns what it has made, if it makes anything.
    #[inline]
    pub fn wait(&self, receipt: Receipt) -> Result<Vec<Output>> {
        self.shared.wait(receipt)
    }

    /// Waits until an operation is done or has failed, but not longer than `deadline`. Whether it is.
    pub fn wait_until(&self, receipt: Receipt, deadline: Instant) -> bool {
        self.shared.wait_until(receipt, deadline)
    }

    /// Calls `callback` when an operation is done or has failed, on whatever thread finds that out; at once if it is.
    /// It must not wait for an operation: nobody else might move it on.
    pub fn when_done(&self, receipt: Receipt, callback: impl FnOnce(Result<()>) + Send + 'static) {
        self.shared.when_done(receipt, Box::new(callback));
    }
}

impl Shared {
    fn report(&self) -> Result<String> {
        self.refuse_forks()?;
        let mut table = self.table();
        let before = table.reports;
        table.queue.leave(Event::Ask);
        drop(table);
        let deadline = Instant::now() + REPORT_TIME;
        if !self.wait_for(None, Some(deadline), |table| table.reports > before)? {
            return Ok("rank 0 has not answered: it is in an operation that has begun".into());
        }
        Ok(self.table().report.clone())
    }

    fn is_done(&self, receipt: Receipt) -> bool {
        let mut table = self.table();
        table.failed || table.is_done(receipt)
    }

    fn wait_until(&self, receipt: Receipt, deadline: Instant) -> bool {
        self.is_over(receipt)
            || self
                .wait_for(Some(receipt), Some(deadline), |table| table.is_done(receipt))
                .unwrap_or(true)
    }

    fn when_done(&self, receipt: Receipt, callback: Callback) {
        let mut table = self.table();
        let failed = table.failed;
        let Some(callback) =
            (if failed { Some(callback) } else { table.when_done(receipt, callback) })
        else {
            return;
        };
        let result = if table.is_done(receipt) { table.outcome(receipt) } else { None };
        drop(table);
        call(callback, result.unwrap_or_else(|| Err(self.failure(Some(receipt)))));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

/// An operation on its way, and the memory it works on.
///
/// Dropped before it is done, it lets the operation go on: the memory is freed afterwards.
#[must_use = "the tensor comes back from `wait`"]
pub struct Handle<B: Buffer> {
    shared: Arc<Shared>,
    receipt: Receipt,
    buffer: Option<B>,
}

impl<B: Buffer> fmt::Debug for Handle<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle(done: {})", self.is_done())
    }
}

impl<B: Buffer> Handle<B> {
    /// Whether the operation is done or has failed.
    pub fn is_done(&self) -> bool {
        self.shared.is_done(self.receipt)
    }

    /// Waits until it is done and gives the memory back. After an error the memory is gone with its content.
    pub fn wait(mut self) -> Result<B> {
        let result = self.shared.wait(self.receipt);
        let buffer = self.buffer.take();
        result?;
        buffer.ok_or_else(|| Error::Invalid("the memory is gone".into()))
    }

    /// Waits until it is done or has failed, but not longer than `deadline`. Whether it is.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        self.shared.wait_until(self.receipt, deadline)
    }

    /// Calls `callback` when it is done or has failed, on whatever thread finds that out; at once if it is. It must not
    /// wait for an operation: nobody else might move it on.
    pub fn when_done(&self, callback: impl FnOnce(Result<()>) + Send + 'static) {
        self.shared.when_done(self.receipt, Box::new(callback));
    }
}

impl<B: Buffer> Drop for Handle<B> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.shared.table().abandon(self.receipt, Some(Box::new(buffer)));
        }
    }
}

/// A gathering on its way.
#[must_use = "what was gathered comes from `wait`"]
#[derive(Debug)]
pub struct Gathering<B: Buffer>(Handle<B>);

impl<B: Buffer> Gathering<B> {
    /// Whether the operation is done or has failed.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// Waits until it is done, and returns what has been gathered.
    pub fn wait(mut self) -> Result<Gathered<B::Element>> {
        let mut outputs = self.0.shared.wait(self.0.receipt)?;
        self.0.buffer = None;
        let missing = || Error::Invalid("nothing was gathered, which is a bug".into());
        outputs.pop().ok_or_else(missing)?.into_gathered()
    }
}
