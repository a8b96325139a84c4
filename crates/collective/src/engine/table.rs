//! This rank's operations by name, from submission to result.
//!
//! - TABLE-1: a name has at most one operation on its way. Its tensors belong to the engine from submission until
//!   the table says that it is done, and nobody is told so before the last byte of them has been touched.
//! - TABLE-2: the members of a frozen bucket are counted, not queued: the last one makes the bucket full, and when
//!   the bucket's round is over all of them are done at once.
//! - TABLE-3: the coordinator is told of an operation once: by itself or with its whole bucket, never both. So a
//!   bucket that is frozen while some of its members are on their way is told member by member in its first round.
#![expect(unsafe_code, reason = "keeps pointers to the tensors of operations on their way")]

use super::{
    message::{Doing, Event as Traced, MAX_NAME, Phase, Request, Shape, Tensor, Word},
    output::Output,
    queue::Queue,
};
use crate::{
    DType, Reduction,
    call::Kind,
    error::{Error, Result},
};
use hashbrown::HashTable;
use rustc_hash::{FxBuildHasher, FxHashMap};
use std::{
    any::Any,
    hash::BuildHasher,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

/// A tensor where it lies.
#[derive(Clone, Copy, Debug)]
pub struct RawTensor {
    /// Its first element, aligned as its type asks.
    pub data: *mut u8,
    /// Of its elements.
    pub dtype: DType,
    /// How many elements there are.
    pub shape: Shape,
}

/// What is wanted, under which name.
#[derive(Clone, Copy, Debug)]
pub struct Submission<'a> {
    /// The same on all ranks. Operations without one are matched by the order in which they are submitted.
    pub name: Option<&'a str>,
    /// Which operation.
    pub kind: Kind,
    /// For operations that reduce.
    pub reduction: Reduction,
    /// For a broadcast.
    pub root: usize,
    /// What it works on; several tensors are done together.
    pub tensors: &'a [RawTensor],
    /// For an all-to-all, the rows that go to each rank; none for equal shares.
    pub splits: &'a [usize],
}

/// An operation that is submitted again and again: it is looked up once. What a submission reads comes first, in one
/// cache line.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Prepared {
    /// Fingerprints of name and request.
    prints: (u64, u64),
    /// The only tensor, where there is one.
    data: *mut u8,
    /// Where the name was found last.
    entry: AtomicU32,
    kind: Kind,
    root: usize,
    reduction: Reduction,
    tensors: Vec<RawTensor>,
    splits: Vec<usize>,
    name: String,
}

// SAFETY: the pointers are not used here; who submits it answers for them, as with any submission.
unsafe impl Send for Prepared {}
// SAFETY: as above.
unsafe impl Sync for Prepared {}

impl Prepared {
    pub(super) fn new(submission: &Submission<'_>) -> Result<Self> {
        let name = submission.name.unwrap_or_default();
        check_name(name)?;
        let tensors = submission.tensors.to_vec();
        Ok(Self {
            prints: (names(name.as_bytes()).1, fingerprint(submission)),
            data: if let [one] = &tensors[..] { one.data } else { ptr::null_mut() },
            entry: AtomicU32::new(u32::MAX),
            kind: submission.kind,
            root: submission.root,
            reduction: submission.reduction,
            tensors,
            splits: submission.splits.to_vec(),
            name: name.to_owned(),
        })
    }

    /// Its only tensor and the bytes of that; nothing if it has several.
    pub(super) fn place(&self) -> (*mut u8, usize) {
        match &self.tensors[..] {
            [one] => (one.data, one.shape.count() * one.dtype.size()),
            _ => (ptr::null_mut(), 0),
        }
    }

    fn submission(&self) -> Submission<'_> {
        Submission {
            name: Some(&self.name),
            kind: self.kind,
            reduction: self.reduction,
            root: self.root,
            tensors: &self.tensors,
            splits: &self.splits,
        }
    }
}

/// Stands for one submitted operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Receipt {
    pub(super) entry: u32,
    /// The bucket it was submitted into, or [`NO_BUCKET`].
    pub(super) bucket: u32,
    /// How many operations of the entry there have been, and rounds of the bucket: the lower halves, so that a
    /// receipt fits into two registers.
    epoch: u32,
    round: u32,
}

/// Stands for no bucket.
pub(super) const NO_BUCKET: u32 = u32::MAX;

impl Receipt {
    /// Stands for a submission that was refused.
    pub(super) const REFUSED: Self =
        Self { entry: u32::MAX, bucket: NO_BUCKET, epoch: 0, round: 0 };

    pub(super) fn is_refused(self) -> bool {
        self == Self::REFUSED
    }

    fn key(self) -> Key {
        (self.entry, self.epoch)
    }

    fn loose(entry: u32, epoch: u64) -> Self {
        Self { entry, bucket: NO_BUCKET, epoch: epoch as u32, round: 0 }
    }

    /// Whether its bucket's round is over, if so many are.
    pub(super) fn is_over(self, rounds: u64) -> bool {
        (rounds as u32).wrapping_sub(self.round) as i32 > 0
    }

    /// Whether it is done, if so many operations of its entry are.
    fn is_among(self, done: u64) -> bool {
        (done as u32).wrapping_sub(self.epoch) as i32 >= 0
    }
}

/// What the engine has to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Submitted { entry: u32, era: u32 },
    Full(u32),
    Open(u32),
    Twice(u32),
    Joined,
    Ask,
    Timeline(bool),
}

/// What has to happen after a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Nothing,
    /// A bucket has become full: tell the coordinator, without waking anybody if possible.
    Tell,
    /// Wake the thread.
    Ring,
}

/// What every submission touches, in one cache line: with a thousand operations in a random order each line is a miss.
#[repr(C, align(64))]
struct Flight {
    /// Fingerprint of the name: with the hash that found it, 128 bits that stand for the name.
    name: u64,
    /// Fingerprint of the request.
    fingerprint: u64,
    /// The only tensor, where there is one.
    data: *mut u8,
    epoch: u64,
    done: u64,
    /// The operation on its way belongs to this round of `in_bucket`.
    round: u64,
    in_bucket: u32,
    /// The bucket that the name belongs to.
    bucket: u32,
    era: u32,
    /// The coordinator has been told of the operation on its way.
    announced: bool,
}

pub(super) struct Entry {
    flight: Flight,
    pub name: Arc<str>,
    pub request: Request,
    /// The tensors, where there are none or several.
    pointers: Vec<*mut u8>,
    pub splits: Vec<usize>,
    /// Memory whose owner has stopped waiting.
    orphan: Option<Box<dyn Any + Send>>,
    /// Known to the coordinator by this number.
    pub number: Option<u32>,
    /// The coordinator knows `request` as that of the last run.
    pub agreed: bool,
    /// When the operation on its way was submitted, for the timeline; not known while it is in a bucket.
    submitted_at: u64,
    once: bool,
}

impl Entry {
    pub fn is_in(&self, bucket: u32, round: u64) -> bool {
        (self.flight.in_bucket, self.flight.round) == (bucket, round)
    }

    pub fn submitted_at(&self) -> u64 {
        self.submitted_at
    }

    /// Where its only tensor lies.
    pub fn data(&self) -> *mut u8 {
        self.flight.data
    }

    /// Where its tensors lie.
    pub fn tensors(&self) -> &[*mut u8] {
        if self.request.tensors.len() == 1 {
            std::slice::from_ref(&self.flight.data)
        } else {
            &self.pointers
        }
    }
}

/// A frozen bucket as this rank sees it.
pub(super) struct Bucket {
    /// Entries in the order of their elements.
    pub members: Vec<u32>,
    /// Bytes of each of their tensors, in that order, if each member has one.
    pub sizes: Option<Vec<usize>>,
    pub fuses_as: Option<(DType, Reduction)>,
    /// The tensors lie side by side, from here on.
    pub whole: Option<*mut u8>,
    /// A member lies elsewhere than when `whole` was found out.
    pub moved: bool,
    left: usize,
    /// When the first member of this round was submitted, for the timeline, and which came last.
    first_at: u64,
    last: u32,
    /// The members of this round are told one by one (TABLE-3).
    singly: bool,
    pub round: u64,
    pub thawed: bool,
}

pub(super) type Callback = Box<dyn FnOnce(Result<()>) + Send>;

/// Entry and epoch of an operation.
type Key = (u32, u32);

#[derive(Default)]
pub(super) struct Table {
    /// Entries by name.
    names: HashTable<u32>,
    pub entries: Vec<Entry>,
    free: Vec<u32>,
    /// Entry of each number.
    numbers: FxHashMap<u32, u32>,
    pub buckets: Vec<Bucket>,
    /// Operations on their way.
    flying: usize,
    pub queue: Queue<Event>,
    era: u32,
    nameless: u64,
    /// How often all ranks have joined: afterwards they count operations without a name anew.
    joins: u64,
    /// The group is dead; what it died of says its health.
    pub failed: bool,
    failures: FxHashMap<Key, Error>,
    outputs: FxHashMap<Key, Vec<Output>>,
    callbacks: FxHashMap<Key, Vec<Callback>>,
    /// What threads wait for, and since when.
    pub waits: Vec<(Receipt, Duration)>,
    /// When something last began or ended here, and what.
    pub active: (Duration, u32),
    pub joined: Option<Duration>,
    pub last_joined: Option<usize>,
    /// The last report, and how many there have been.
    pub report: String,
    pub reports: u64,
    pub timeline_ended: bool,
    /// Stretches of time for the timeline, when one is recorded.
    pub trace: Option<Vec<Traced>>,
}

// SAFETY: the pointers are those of tensors that their owners have handed over (TABLE-1).
unsafe impl Send for Table {}

impl Table {
    /// What is submitted from now on belongs to the next step.
    pub fn next_era(&mut self) {
        self.era = self.era.wrapping_add(1);
    }

    /// Takes an operation in. `clock` gives the nanosecond for the timeline, zero if none is recorded. `waits`: the
    /// caller is going to wait for it and drives, so nobody has to be woken. Why it is refused goes into `refusal`: a
    /// result with an error in it would not fit into registers.
    #[inline(always)]
    pub fn submit(
        &mut self,
        submission: &Submission<'_>,
        waits: bool,
        clock: impl Fn() -> u64,
        refusal: &mut Option<Error>,
    ) -> (Receipt, Next) {
        let found = match submission.name {
            Some(name) => match self.entry_named(name) {
                Some(entry) => Ok(entry),
                None => self.add(name, submission, false),
            },
            None => {
                let kind = submission.kind.name();
                let name = match self.joins {
                    0 => format!("{kind}.noname.{}", self.nameless),
                    joins => format!("{kind}.noname.{joins}.{}", self.nameless),
                };
                self.nameless += 1;
                self.add(&name, submission, true)
            }
        };
        let entry = match found {
            Ok(entry) => entry,
            Err(error) => {
                *refusal = Some(error);
                return (Receipt::REFUSED, Next::Nothing);
            }
        };
        let only = if let [one] = submission.tensors { Some(one.data) } else { None };
        let submission = || *submission;
        self.take_in(entry, fingerprint(&submission()), only, submission, waits, clock, refusal)
    }

    /// The same for what has been looked up before.
    #[inline(always)]
    pub fn submit_prepared(
        &mut self,
        prepared: &Prepared,
        clock: impl Fn() -> u64,
        refusal: &mut Option<Error>,
    ) -> (Receipt, Next) {
        let entry = prepared.entry.load(Ordering::Relaxed);
        let (name, fingerprint) = prepared.prints;
        if self.entries.get(entry as usize).is_none_or(|known| known.flight.name != name) {
            let (receipt, next) = self.submit(&prepared.submission(), false, clock, refusal);
            prepared.entry.store(receipt.entry, Ordering::Relaxed);
            return (receipt, next);
        }
        let only = if prepared.data.is_null() { None } else { Some(prepared.data) };
        let submission = || prepared.submission();
        self.take_in(entry, fingerprint, only, submission, false, clock, refusal)
    }

    /// `only` is the only tensor, where there is one.
    #[inline(always)]
    #[expect(
        clippy::too_many_arguments,
        reason = "inlined twice; a struct of them would be built each time"
    )]
    fn take_in<'a>(
        &mut self,
        entry: u32,
        fingerprint: u64,
        only: Option<*mut u8>,
        submission: impl Fn() -> Submission<'a>,
        waits: bool,
        clock: impl Fn() -> u64,
        refusal: &mut Option<Error>,
    ) -> (Receipt, Next) {
        let index = entry as usize;
        if !self.is_idle(entry) {
            let name = &self.entries[index].name;
            let text = format!(
                "an operation named {name:?} is on its way already: wait for it, or give this one another name"
            );
            let next = self.put(Event::Twice(entry), false);
            *refusal = Some(Error::Invalid(text));
            return (Receipt::REFUSED, next);
        }
        let known = &mut self.entries[index];
        let flight = &mut known.flight;
        if flight.era == self.era {
            self.era = self.era.wrapping_add(1);
        }
        flight.era = self.era;
        self.flying += 1;
        flight.epoch += 1;
        flight.announced = false;
        let mut moved = false;
        match only {
            Some(data) => {
                moved = flight.data != data;
                flight.data = data;
            }
            None => {
                known.pointers.clear();
                known.pointers.extend(submission().tensors.iter().map(|tensor| tensor.data));
            }
        }
        let mut receipt = Receipt::loose(entry, flight.epoch);
        let same = flight.fingerprint == fingerprint;
        if !same {
            flight.fingerprint = fingerprint;
            known.request = request(&submission());
            known.agreed = false;
        }
        if submission().kind == Kind::AllToAll {
            known.splits = submission().splits.to_vec();
        }
        let next = match flight.bucket {
            NO_BUCKET => {
                known.submitted_at = clock();
                self.put(Event::Submitted { entry, era: self.era }, waits)
            }
            bucket if !same => self.put(Event::Open(bucket), waits),
            number => {
                let bucket = &mut self.buckets[number as usize];
                (flight.in_bucket, flight.round) = (number, bucket.round);
                (receipt.bucket, receipt.round) = (number, bucket.round as u32);
                bucket.moved |= moved;
                if bucket.left == bucket.members.len() {
                    bucket.first_at = clock();
                }
                bucket.last = entry;
                bucket.left -= 1;
                if bucket.singly {
                    self.put(Event::Submitted { entry, era: self.era }, waits)
                } else if bucket.left > 0 {
                    Next::Nothing
                } else {
                    self.queue.leave(Event::Full(number));
                    Next::Tell
                }
            }
        };
        (receipt, next)
    }

    fn put(&mut self, event: Event, waits: bool) -> Next {
        if waits {
            self.queue.leave(event);
            Next::Tell
        } else if self.queue.put(event) {
            Next::Ring
        } else {
            Next::Nothing
        }
    }

    fn add(&mut self, name: &str, submission: &Submission<'_>, once: bool) -> Result<u32> {
        check_name(name)?;
        Ok(self.insert(name, request(submission), fingerprint(submission), once))
    }

    fn insert(&mut self, name: &str, request: Request, fingerprint: u64, once: bool) -> u32 {
        let name: Arc<str> = name.into();
        let flight = Flight {
            name: names(name.as_bytes()).1,
            fingerprint,
            data: std::ptr::null_mut(),
            epoch: 0,
            done: 0,
            round: 0,
            in_bucket: NO_BUCKET,
            bucket: NO_BUCKET,
            era: u32::MAX,
            announced: false,
        };
        let mut entry = Entry {
            flight,
            name: Arc::clone(&name),
            request,
            pointers: Vec::new(),
            splits: Vec::new(),
            orphan: None,
            number: None,
            agreed: false,
            submitted_at: 0,
            once,
        };
        let index = match self.free.pop() {
            Some(index) => {
                let slot = &mut self.entries[index as usize];
                // Receipts of the slot's last owner stay distinct.
                let epoch = slot.flight.epoch;
                (entry.flight.epoch, entry.flight.done) = (epoch, epoch);
                *slot = entry;
                index
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        let entries = &self.entries;
        let hash = |index: &u32| names(entries[*index as usize].name.as_bytes()).0;
        self.names.insert_unique(hash(&index), index, hash);
        index
    }

    fn is_idle(&mut self, entry: u32) -> bool {
        let epoch = self.entries[entry as usize].flight.epoch;
        self.is_done(Receipt::loose(entry, epoch))
    }

    pub fn is_done(&mut self, receipt: Receipt) -> bool {
        let Some(entry) = self.entries.get_mut(receipt.entry as usize) else { return true };
        let flight = &mut entry.flight;
        if flight.in_bucket != NO_BUCKET
            && self.buckets[flight.in_bucket as usize].round > flight.round
        {
            flight.in_bucket = NO_BUCKET;
            flight.done = flight.epoch;
            entry.orphan = None;
        }
        receipt.is_among(entry.flight.done)
    }

    /// Whether it waits for members of its bucket that have not been submitted here.
    pub fn is_held_up(&self, receipt: Receipt) -> Option<u32> {
        let Flight { in_bucket: bucket, round, .. } = self.entries[receipt.entry as usize].flight;
        let state = self.buckets.get(bucket as usize)?;
        (state.round == round && state.left > 0 && !state.thawed).then_some(bucket)
    }

    /// Whether the operation is on its way, and told by itself.
    fn is_single(&self, entry: u32) -> bool {
        let Flight { done, epoch, in_bucket, round, .. } = self.entries[entry as usize].flight;
        let told_so = |state: &Bucket| state.singly && state.round == round;
        done < epoch && self.buckets.get(in_bucket as usize).is_none_or(told_so)
    }

    /// This rank has no more data. What it has begun in buckets that it does not fill is told one by one.
    pub fn join(&mut self, now: Duration) {
        (self.joined, self.last_joined) = (Some(now), None);
        for bucket in 0..self.buckets.len() as u32 {
            let state = &mut self.buckets[bucket as usize];
            let begun = state.left > 0 && state.left < state.members.len();
            if !begun || state.thawed || std::mem::replace(&mut state.singly, true) {
                continue;
            }
            for entry in state.members.iter().copied() {
                if self.entries[entry as usize].is_in(bucket, state.round) {
                    self.queue.leave(Event::Submitted { entry, era: self.era });
                }
            }
        }
        self.queue.leave(Event::Joined);
    }

    /// Everybody has joined, this rank last.
    pub fn all_joined(&mut self, last: usize) {
        (self.joined, self.last_joined) = (None, Some(last));
        (self.joins, self.nameless) = (self.joins + 1, 0);
    }

    /// What the coordinator has to be told of an event, and the era of a submission.
    pub fn word(&mut self, event: Event, now: Duration) -> Option<(Word, Option<u32>)> {
        let round = |bucket: u32| self.buckets[bucket as usize].round;
        let word = match event {
            Event::Submitted { entry, era } => {
                if !self.is_single(entry) {
                    return None;
                }
                self.active = (now, entry);
                let known = &mut self.entries[entry as usize];
                if std::mem::replace(&mut known.flight.announced, true) {
                    return None;
                }
                let word = match known.number {
                    Some(number) if known.agreed => Word::Again(number),
                    _ => Word::Ready {
                        name: known.name.to_string(),
                        request: known.request.clone(),
                        once: known.once,
                    },
                };
                return Some((word, Some(era)));
            }
            Event::Full(bucket) => Word::Full { bucket, round: round(bucket) },
            Event::Open(bucket) => Word::Open { bucket, round: round(bucket) },
            Event::Twice(entry) => Word::Twice(self.entries[entry as usize].name.to_string()),
            Event::Joined => Word::Joined,
            Event::Ask => Word::Ask,
            Event::Timeline(on) => Word::Timeline(on),
        };
        Some((word, None))
    }

    /// Whether this rank waits for others: an operation is on its way here, or it has joined.
    pub fn is_busy(&self) -> bool {
        self.joined.is_some() || self.flying > 0
    }

    /// The result of an operation that is done.
    pub fn collect(&mut self, receipt: Receipt) -> Result<Vec<Output>> {
        let failure =
            if self.failures.is_empty() { None } else { self.failures.remove(&receipt.key()) };
        let outputs =
            if self.outputs.is_empty() { None } else { self.outputs.remove(&receipt.key()) };
        self.release(receipt);
        failure.map_or(Ok(outputs.unwrap_or_default()), Err)
    }

    /// Forgets names that will not come again, once nobody waits for them.
    fn release(&mut self, receipt: Receipt) {
        let entry = &self.entries[receipt.entry as usize];
        let over =
            receipt.is_among(entry.flight.done) && entry.flight.epoch as u32 == receipt.epoch;
        if over && entry.number.is_none() {
            self.forget(receipt.entry);
        }
    }

    fn forget(&mut self, entry: u32) {
        let (hash, _) = names(self.entries[entry as usize].name.as_bytes());
        if let Ok(known) = self.names.find_entry(hash, |index| *index == entry) {
            known.remove();
            self.free.push(entry);
            // Whoever remembers the entry has to look for the name again.
            self.entries[entry as usize].flight.name = 0;
        }
    }

    /// Nobody waits for it any more; `memory` is kept for as long as it is on its way.
    pub fn abandon(&mut self, receipt: Receipt, memory: Option<Box<dyn Any + Send>>) {
        if self.failed || self.is_done(receipt) {
            self.failures.remove(&receipt.key());
            self.outputs.remove(&receipt.key());
            self.release(receipt);
        } else {
            self.entries[receipt.entry as usize].orphan = memory;
        }
    }

    /// Calls `callback` when the operation is done; hands it back if it is already.
    pub fn when_done(&mut self, receipt: Receipt, callback: Callback) -> Option<Callback> {
        if self.is_done(receipt) {
            return Some(callback);
        }
        self.callbacks.entry(receipt.key()).or_default().push(callback);
        None
    }

    /// How an operation that is done has ended.
    pub fn outcome(&self, receipt: Receipt) -> Option<Result<()>> {
        Some(self.failures.get(&receipt.key()).map_or(Ok(()), |error| Err(error.clone())))
    }

    /// The entry of an operation in a decision; a rank that has joined may not have heard of it.
    pub fn entry_of(&mut self, name: &str, request: &Request) -> u32 {
        let Some(entry) = self.entry_named(name) else {
            return self.insert(name, request.clone(), 0, false);
        };
        if self.is_idle(entry) {
            let known = &mut self.entries[entry as usize];
            known.request.clone_from(request);
            // No submission has this one, so the next is told in full.
            known.flight.fingerprint = 0;
        }
        entry
    }

    pub fn entry_named(&self, name: &str) -> Option<u32> {
        let (hash, fingerprint) = names(name.as_bytes());
        let is_it = |index: &u32| self.entries[*index as usize].flight.name == fingerprint;
        self.names.find(hash, is_it).copied()
    }

    pub fn entry_numbered(&self, number: u32) -> Option<u32> {
        self.numbers.get(&number).copied()
    }

    /// The pointers of the operation on its way under an entry; none if this rank has not submitted it.
    pub fn pointers(&mut self, entry: u32) -> Option<&[*mut u8]> {
        if self.is_idle(entry) { None } else { Some(self.entries[entry as usize].tensors()) }
    }

    /// An operation has ended. Returns what to call without the table's lock.
    pub fn finish(
        &mut self,
        entry: u32,
        number: Option<u32>,
        result: Result<Vec<Output>>,
    ) -> Vec<(Callback, Result<()>)> {
        let idle = self.is_idle(entry);
        let state = &mut self.entries[entry as usize];
        if number.is_some() {
            state.number = number;
        }
        if let Some(number) = state.number {
            self.numbers.insert(number, entry);
        }
        state.agreed = result.is_ok() && state.number.is_some();
        if idle {
            if state.number.is_none() && result.is_ok() {
                // This rank has joined, and has heard of the name in this decision only.
                self.forget(entry);
            }
            return Vec::new();
        }
        state.flight.done = state.flight.epoch;
        state.flight.in_bucket = NO_BUCKET;
        let orphan = state.orphan.take();
        self.flying = self.flying.saturating_sub(1);
        let receipt = Receipt::loose(entry, state.flight.epoch);
        let outcome = result.as_ref().map(|_| ()).map_err(Clone::clone);
        match result {
            Ok(outputs) if outputs.is_empty() => {}
            Ok(outputs) => drop(self.outputs.insert(receipt.key(), outputs)),
            Err(error) => drop(self.failures.insert(receipt.key(), error)),
        }
        if orphan.is_some() {
            // Nobody asks for the result.
            self.abandon(receipt, None);
        }
        self.called(receipt, &outcome)
    }

    fn called(&mut self, receipt: Receipt, outcome: &Result<()>) -> Vec<(Callback, Result<()>)> {
        let Some(callbacks) = self.callbacks.remove(&receipt.key()) else { return Vec::new() };
        callbacks.into_iter().map(|callback| (callback, outcome.clone())).collect()
    }

    /// A round of a bucket has ended well.
    pub fn finish_round(&mut self, bucket: u32) -> Vec<(Callback, Result<()>)> {
        let state = &mut self.buckets[bucket as usize];
        let round = state.round;
        state.round += 1;
        self.flying = self.flying.saturating_sub(state.members.len() - state.left);
        state.left = state.members.len();
        state.singly = false;
        if self.callbacks.is_empty() {
            return Vec::new();
        }
        let members = self.buckets[bucket as usize].members.clone();
        let of_round = |entry: &&u32| self.entries[**entry as usize].is_in(bucket, round);
        let receipts: Vec<Receipt> = members
            .iter()
            .filter(of_round)
            .map(|entry| Receipt::loose(*entry, self.entries[*entry as usize].flight.epoch))
            .collect();
        receipts
            .into_iter()
            .flat_map(|receipt| {
                self.is_done(receipt);
                self.called(receipt, &Ok(()))
            })
            .collect()
    }

    /// These are one bucket from now on.
    pub fn freeze(&mut self, members: Vec<u32>) {
        let bucket = self.buckets.len() as u32;
        let mut left = members.len();
        for member in &members {
            let idle = self.is_idle(*member);
            let entry = &mut self.entries[*member as usize];
            entry.flight.bucket = bucket;
            if !idle {
                (entry.flight.in_bucket, entry.flight.round) = (bucket, 0);
                left -= 1;
            }
        }
        let singly = left < members.len();
        let request = |member: &u32| &self.entries[*member as usize].request;
        let size = |member: &u32| match &request(member).tensors[..] {
            [one] => Some(one.bytes()),
            _ => None,
        };
        let sizes = members.iter().map(size).collect();
        let fuses_as = members.first().and_then(|member| request(member).fuses_as());
        self.buckets.push(Bucket {
            members,
            sizes,
            fuses_as,
            whole: None,
            moved: true,
            left,
            first_at: 0,
            last: 0,
            singly,
            round: 0,
            thawed: false,
        });
    }

    /// The bucket is no more; its members on their way are told one by one, unless the whole has been told.
    pub fn thaw(&mut self, bucket: u32) {
        let Some(state) = self.buckets.get_mut(bucket as usize) else { return };
        state.thawed = true;
        let (told, round) = (state.left == 0 && !state.singly, state.round);
        let first_at = state.first_at;
        let members = state.members.clone();
        for member in members {
            let idle = self.is_idle(member);
            let era = self.era;
            let entry = &mut self.entries[member as usize];
            entry.flight.bucket = NO_BUCKET;
            let counted = entry.is_in(bucket, round);
            entry.flight.in_bucket = NO_BUCKET;
            if counted {
                entry.submitted_at = first_at;
            }
            if idle || entry.flight.announced {
                continue;
            }
            if counted && told {
                entry.flight.announced = true;
            } else {
                self.queue.leave(Event::Submitted { entry: member, era });
            }
        }
    }

    /// Where all members of a bucket lie side by side, with their bytes, type and reduction, if they do and all of
    /// them are on their way here.
    pub fn whole(&mut self, bucket: u32) -> Option<(*mut u8, usize, DType, Reduction)> {
        let state = self.buckets.get_mut(bucket as usize)?;
        let (sizes, (dtype, reduction)) = (state.sizes.as_ref()?, state.fuses_as?);
        if std::mem::take(&mut state.moved) {
            let data = |member: &u32| self.entries[*member as usize].flight.data;
            let mut next = data(state.members.first()?);
            state.whole = Some(next);
            for (member, bytes) in state.members.iter().zip(sizes) {
                if data(member) != next {
                    state.whole = None;
                    break;
                }
                next = next.wrapping_add(*bytes);
            }
        }
        let whole = state.whole.filter(|_| state.left == 0)?;
        Some((whole, sizes.iter().sum(), dtype, reduction))
    }

    /// What this rank is doing.
    pub fn doing(&self, now: Duration) -> Doing {
        let name = |entry: u32| self.entries.get(entry as usize).map_or("", |entry| &*entry.name);
        let oldest = self.waits.iter().min_by_key(|(_, since)| *since);
        let (what, since) = match (oldest, self.joined) {
            (Some((receipt, since)), _) => (format!("waits for {}", name(receipt.entry)), *since),
            (None, Some(since)) => ("has joined and waits for the others".into(), since),
            (None, None) if self.entries.is_empty() => {
                ("in its own code, before its first operation,".into(), self.active.0)
            }
            (None, None) => {
                (format!("in its own code since {}", name(self.active.1)), self.active.0)
            }
        };
        let milliseconds = now.saturating_sub(since).as_millis() as u64;
        Doing { what, milliseconds }
    }

    /// Ends everything that is on its way: the group is dead.
    pub fn fail(&mut self) -> Vec<(Callback, Receipt)> {
        self.failed = true;
        let callbacks = std::mem::take(&mut self.callbacks);
        for entry in &mut self.entries {
            entry.orphan = None;
        }
        callbacks
            .into_iter()
            .flat_map(|((entry, epoch), callbacks)| {
                let receipt = Receipt::loose(entry, epoch.into());
                callbacks.into_iter().map(move |callback| (callback, receipt))
            })
            .collect()
    }

    /// Notes the negotiation of a bucket, with the member that it waited for here, and its run.
    pub fn record_bucket(&mut self, bucket: u32, start: u64, end: u64) {
        let (Some(state), Some(trace)) = (self.buckets.get(bucket as usize), &mut self.trace)
        else {
            return;
        };
        let of = |member: &u32| &self.entries[*member as usize];
        let bytes = state.members.iter().map(|member| of(member).request.bytes() as u64).sum();
        let fused = state.members.len() as u32;
        if state.first_at != 0 {
            let name = format!("bucket {bucket}, {} last", of(&state.last).name);
            trace.push(Traced {
                phase: Phase::Negotiate,
                name,
                start: state.first_at,
                end: start,
                bytes,
                fused,
            });
        }
        trace.push(Traced {
            phase: Phase::Run,
            name: format!("bucket {bucket}"),
            start,
            end,
            bytes,
            fused,
        });
    }

    /// Notes a stretch of time for the timeline.
    pub fn record(&mut self, phase: Phase, entry: u32, start: u64, end: u64) {
        let Some(trace) = &mut self.trace else { return };
        let Some(known) = self.entries.get(entry as usize) else { return };
        if start != 0 {
            let name = super::coordinator::title(&known.request, &known.name);
            let bytes = known.request.bytes() as u64;
            trace.push(Traced { phase, name, start, end, bytes, fused: 1 });
        }
    }
}

/// A hash of a name, and a fingerprint that has nothing to do with it.
fn names(name: &[u8]) -> (u64, u64) {
    let mut fingerprint = name.len() as u64 ^ 0x2545_f491_4f6c_dd1d;
    let mut mix = |word: [u8; 8]| {
        let mixed = (fingerprint ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        fingerprint = mixed ^ (mixed >> 29);
    };
    let (words, _) = name.as_chunks::<8>();
    words.iter().for_each(|word| mix(*word));
    match name.last_chunk::<8>() {
        // With what has been mixed already, if its length is not a multiple of eight.
        Some(last) => mix(*last),
        None => mix(std::array::from_fn(|index| name.get(index).copied().unwrap_or(0))),
    }
    (FxBuildHasher.hash_one(name), fingerprint)
}

fn check_name(name: &str) -> Result<()> {
    if name.len() > MAX_NAME || name.is_empty() {
        let length = name.len();
        return Err(Error::Invalid(format!("a name has 1 to {MAX_NAME} bytes, not {length}")));
    }
    Ok(())
}

/// A word that differs when requests do, but for one case in 2⁶⁴.
fn fingerprint(submission: &Submission<'_>) -> u64 {
    let Submission { kind, reduction, root, tensors, .. } = submission;
    let mix = |hash: u64, word: u64| {
        let mixed = (hash ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed ^ (mixed >> 32)
    };
    let first = *kind as u64
        | (reduction.op as u64) << 8
        | (tensors.len() as u64) << 16
        | (*root as u64) << 32;
    let scaled = mix(mix(first, reduction.prescale.to_bits()), reduction.postscale.to_bits());
    tensors.iter().fold(scaled, |hash, tensor| {
        let sizes = tensor.shape.sizes();
        let start = mix(hash, tensor.dtype as u64 | (sizes.len() as u64) << 8);
        sizes.iter().fold(start, |hash, size| mix(hash, *size))
    })
}

fn request(submission: &Submission<'_>) -> Request {
    let tensors = submission
        .tensors
        .iter()
        .map(|raw| Tensor { dtype: raw.dtype, shape: raw.shape })
        .collect();
    let Submission { kind, reduction, root, .. } = *submission;
    Request { kind, reduction, root: root as u32, tensors }
}
