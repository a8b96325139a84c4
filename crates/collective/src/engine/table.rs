//! This rank's operations by name, from submission to result.
//!
//! - TABLE-1: a name has at most one operation on its way. Its tensors belong to the engine from submission until
//!   the table says that it is done, and nobody is told so before the last byte of them has been touched.
//! - TABLE-2: the members of a frozen bucket are counted, not queued: the last one makes the bucket full, and when
//!   the bucket's round is over all of them are done at once.
#![expect(unsafe_code, reason = "keeps pointers to the tensors of operations on their way")]

use super::{
    message::{Doing, Event as Traced, MAX_NAME, Phase, Request, Shape, Tensor},
    output::Output,
    queue::Queue,
};
use crate::{
    DType, Reduction,
    call::Kind,
    error::{Error, Result},
};
use rustc_hash::FxHashMap;
use std::{any::Any, sync::Arc, time::Duration};

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
}

/// Stands for one submitted operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Receipt {
    pub(super) entry: u32,
    pub(super) epoch: u64,
}

/// What the engine has to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Submitted { entry: u32, era: u64 },
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

pub(super) struct Entry {
    pub name: Arc<str>,
    pub request: Request,
    pub pointers: Vec<*mut u8>,
    /// Memory whose owner has stopped waiting.
    orphan: Option<Box<dyn Any + Send>>,
    /// Known to the coordinator by this number.
    pub number: Option<u32>,
    /// The coordinator knows `request` as that of the last run.
    pub agreed: bool,
    /// The coordinator has been told of the operation on its way.
    pub announced: bool,
    once: bool,
    epoch: u64,
    done: u64,
    bucket: Option<u32>,
    /// The operation on its way belongs to this round of this bucket.
    in_round: Option<(u32, u64)>,
    era: u64,
    pub submitted_at: u64,
}

impl Entry {
    pub fn is_once(&self) -> bool {
        self.once
    }

    pub fn is_in(&self, bucket: u32, round: u64) -> bool {
        self.in_round == Some((bucket, round))
    }
}

/// A frozen bucket as this rank sees it.
pub(super) struct Bucket {
    /// Entries in the order of their elements.
    pub members: Vec<u32>,
    left: usize,
    pub round: u64,
    pub thawed: bool,
}

type Callback = Box<dyn FnOnce(Result<()>) + Send>;

#[derive(Default)]
pub(super) struct Table {
    names: FxHashMap<Arc<str>, u32>,
    pub entries: Vec<Entry>,
    free: Vec<u32>,
    /// Entry of each number.
    numbers: FxHashMap<u32, u32>,
    pub buckets: Vec<Bucket>,
    pub queue: Queue<Event>,
    /// Somebody has waited since the last submission.
    waited: bool,
    era: u64,
    nameless: u64,
    /// The group is dead; what it died of says its health.
    pub failed: bool,
    failures: FxHashMap<Receipt, Error>,
    outputs: FxHashMap<Receipt, Vec<Output>>,
    callbacks: FxHashMap<Receipt, Vec<Callback>>,
    /// What threads wait for, and since when.
    pub waits: Vec<(Receipt, Duration)>,
    /// When this rank last submitted or got something, and what.
    active: (Duration, u32),
    pub joined: Option<Duration>,
    pub last_joined: Option<usize>,
    pub report: Option<String>,
    pub timeline_ended: bool,
    /// Stretches of time for the timeline, when one is recorded.
    pub trace: Option<Vec<Traced>>,
}

// SAFETY: the pointers are those of tensors that their owners have handed over (TABLE-1).
unsafe impl Send for Table {}

impl Table {
    /// Takes an operation in. `clock` is the nanosecond for the timeline, zero if none is recorded. `waits`: the
    /// caller is going to wait for it and drives, so nobody has to be woken.
    pub fn submit(
        &mut self,
        submission: &Submission<'_>,
        waits: bool,
        now: Duration,
        clock: u64,
    ) -> (Result<Receipt>, Next) {
        let found = match submission.name {
            Some(name) => match self.names.get(name) {
                Some(entry) => Ok(*entry),
                None => self.add(name, submission, false),
            },
            None => {
                let name = format!("{}.noname.{}", submission.kind.name(), self.nameless);
                self.nameless += 1;
                self.add(&name, submission, true)
            }
        };
        let entry = match found {
            Ok(entry) => entry,
            Err(error) => return (Err(error), Next::Nothing),
        };
        let index = entry as usize;
        if !self.is_idle(entry) {
            let name = &self.entries[index].name;
            let text = format!(
                "an operation named {name:?} is on its way already: wait for it, or give this one another name"
            );
            let next = if self.queue.put(Event::Twice(entry)) { Next::Ring } else { Next::Nothing };
            return (Err(Error::Invalid(text)), next);
        }
        let known = &mut self.entries[index];
        if std::mem::take(&mut self.waited) || known.era == self.era {
            self.era += 1;
        }
        known.era = self.era;
        known.epoch += 1;
        known.announced = false;
        known.submitted_at = clock;
        known.pointers.clear();
        known.pointers.extend(submission.tensors.iter().map(|tensor| tensor.data));
        let receipt = Receipt { entry, epoch: known.epoch };
        self.active = (now, entry);
        let same = is_same(&known.request, submission);
        if !same {
            known.request = request(submission);
            known.agreed = false;
        }
        let next = match known.bucket {
            Some(number) if same => {
                let bucket = &mut self.buckets[number as usize];
                known.in_round = Some((number, bucket.round));
                bucket.left -= 1;
                if bucket.left > 0 {
                    Next::Nothing
                } else {
                    self.queue.leave(Event::Full(number));
                    Next::Tell
                }
            }
            other => {
                let event = match other {
                    Some(bucket) => Event::Open(bucket),
                    None => Event::Submitted { entry, era: self.era },
                };
                if waits {
                    self.queue.leave(event);
                    Next::Tell
                } else if self.queue.put(event) {
                    Next::Ring
                } else {
                    Next::Nothing
                }
            }
        };
        (Ok(receipt), next)
    }

    fn add(&mut self, name: &str, submission: &Submission<'_>, once: bool) -> Result<u32> {
        if name.len() > MAX_NAME || name.is_empty() {
            let length = name.len();
            return Err(Error::Invalid(format!("a name has 1 to {MAX_NAME} bytes, not {length}")));
        }
        Ok(self.insert(name, request(submission), once))
    }

    fn insert(&mut self, name: &str, request: Request, once: bool) -> u32 {
        let name: Arc<str> = name.into();
        let mut entry = Entry {
            name: Arc::clone(&name),
            request,
            pointers: Vec::new(),
            orphan: None,
            number: None,
            agreed: false,
            announced: false,
            once,
            epoch: 0,
            done: 0,
            bucket: None,
            in_round: None,
            era: u64::MAX,
            submitted_at: 0,
        };
        let index = match self.free.pop() {
            Some(index) => {
                let slot = &mut self.entries[index as usize];
                // Receipts of the slot's last owner stay distinct.
                (entry.epoch, entry.done) = (slot.epoch, slot.epoch);
                *slot = entry;
                index
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.names.insert(name, index);
        index
    }

    fn is_idle(&mut self, entry: u32) -> bool {
        let epoch = self.entries[entry as usize].epoch;
        self.is_done(Receipt { entry, epoch })
    }

    pub fn is_done(&mut self, receipt: Receipt) -> bool {
        let Some(entry) = self.entries.get_mut(receipt.entry as usize) else { return true };
        if let Some((bucket, round)) = entry.in_round
            && self.buckets[bucket as usize].round > round
        {
            entry.in_round = None;
            entry.done = entry.epoch;
            entry.orphan = None;
        }
        entry.done >= receipt.epoch
    }

    /// Whether it waits for members of its bucket that have not been submitted here.
    pub fn is_held_up(&self, receipt: Receipt) -> Option<u32> {
        let (bucket, round) = self.entries[receipt.entry as usize].in_round?;
        let state = &self.buckets[bucket as usize];
        (state.round == round && state.left > 0 && !state.thawed).then_some(bucket)
    }

    /// Whether the operation is on its way, and not in a bucket.
    pub fn is_loose(&self, entry: u32) -> bool {
        let entry = &self.entries[entry as usize];
        entry.done < entry.epoch && entry.in_round.is_none()
    }

    /// Whether any operation is on its way here.
    pub fn is_busy(&mut self) -> bool {
        (0..self.entries.len() as u32).any(|entry| !self.is_idle(entry))
    }

    /// The result of an operation that is done.
    pub fn collect(&mut self, receipt: Receipt, now: Duration) -> Result<Vec<Output>> {
        self.waited = true;
        self.active = (now, receipt.entry);
        let failure = if self.failures.is_empty() { None } else { self.failures.remove(&receipt) };
        let outputs = if self.outputs.is_empty() { None } else { self.outputs.remove(&receipt) };
        self.release(receipt);
        failure.map_or(Ok(outputs.unwrap_or_default()), Err)
    }

    /// Forgets names that will not come again, once nobody waits for them.
    fn release(&mut self, receipt: Receipt) {
        let entry = &self.entries[receipt.entry as usize];
        let over = entry.done >= receipt.epoch && entry.epoch == receipt.epoch;
        if over && entry.number.is_none() && entry.bucket.is_none() {
            let name = Arc::clone(&entry.name);
            if self.names.remove(&name).is_some() {
                self.free.push(receipt.entry);
            }
        }
    }

    /// Nobody waits for it any more; `memory` is kept for as long as it is on its way.
    pub fn abandon(&mut self, receipt: Receipt, memory: Option<Box<dyn Any + Send>>) {
        if self.is_done(receipt) {
            self.failures.remove(&receipt);
            self.outputs.remove(&receipt);
            self.release(receipt);
        } else {
            let entry = &mut self.entries[receipt.entry as usize];
            entry.orphan = memory;
            let once = entry.once;
            if once {
                self.callbacks.entry(receipt).or_default();
            }
        }
    }

    /// Calls `callback` when the operation is done; hands it back if it is already.
    pub fn when_done(&mut self, receipt: Receipt, callback: Callback) -> Option<Callback> {
        if self.is_done(receipt) {
            return Some(callback);
        }
        self.callbacks.entry(receipt).or_default().push(callback);
        None
    }

    /// How an operation that is done has ended.
    pub fn outcome(&self, receipt: Receipt) -> Option<Result<()>> {
        Some(self.failures.get(&receipt).map_or(Ok(()), |error| Err(error.clone())))
    }

    /// The entry of an operation in a decision; a rank that has joined may not have heard of it.
    pub fn entry_of(&mut self, name: &str, request: &Request) -> u32 {
        match self.names.get(name) {
            Some(entry) => *entry,
            None => self.insert(name, request.clone(), false),
        }
    }

    pub fn entry_named(&self, name: &str) -> Option<u32> {
        self.names.get(name).copied()
    }

    pub fn entry_numbered(&self, number: u32) -> Option<u32> {
        self.numbers.get(&number).copied()
    }

    /// The pointers of the operation on its way under an entry; none if this rank has not submitted it.
    pub fn pointers(&mut self, entry: u32) -> Option<&[*mut u8]> {
        if self.is_idle(entry) { None } else { Some(&self.entries[entry as usize].pointers) }
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
            return Vec::new();
        }
        state.done = state.epoch;
        state.in_round = None;
        state.orphan = None;
        let receipt = Receipt { entry, epoch: state.epoch };
        let outcome = result.as_ref().map(|_| ()).map_err(Clone::clone);
        match result {
            Ok(outputs) if outputs.is_empty() => {}
            Ok(outputs) => drop(self.outputs.insert(receipt, outputs)),
            Err(error) => drop(self.failures.insert(receipt, error)),
        }
        self.called(receipt, &outcome)
    }

    fn called(&mut self, receipt: Receipt, outcome: &Result<()>) -> Vec<(Callback, Result<()>)> {
        let Some(callbacks) = self.callbacks.remove(&receipt) else { return Vec::new() };
        if callbacks.is_empty() {
            // Abandoned on its way.
            self.abandon(receipt, None);
        }
        callbacks.into_iter().map(|callback| (callback, outcome.clone())).collect()
    }

    /// A round of a bucket has ended well.
    pub fn finish_round(&mut self, bucket: u32) -> Vec<(Callback, Result<()>)> {
        let state = &mut self.buckets[bucket as usize];
        let round = state.round;
        state.round += 1;
        state.left = state.members.len();
        if self.callbacks.is_empty() {
            return Vec::new();
        }
        let members = self.buckets[bucket as usize].members.clone();
        let of_round =
            |entry: &&u32| self.entries[**entry as usize].in_round == Some((bucket, round));
        let receipts: Vec<Receipt> = members
            .iter()
            .filter(of_round)
            .map(|entry| Receipt { entry: *entry, epoch: self.entries[*entry as usize].epoch })
            .collect();
        receipts
            .into_iter()
            .flat_map(|receipt| {
                self.is_done(receipt);
                self.called(receipt, &Ok(()))
            })
            .collect()
    }

    /// These are one bucket from now on. Returns whether all of them are on their way here already.
    pub fn freeze(&mut self, members: Vec<u32>) {
        let bucket = self.buckets.len() as u32;
        let mut left = members.len();
        for member in &members {
            let idle = self.is_idle(*member);
            let entry = &mut self.entries[*member as usize];
            entry.bucket = Some(bucket);
            if !idle {
                entry.in_round = Some((bucket, 0));
                left -= 1;
            }
        }
        self.buckets.push(Bucket { members, left, round: 0, thawed: false });
        if left == 0 {
            self.queue.leave(Event::Full(bucket));
        }
    }

    /// The bucket is no more; its members on their way are told one by one, unless the whole has been told.
    pub fn thaw(&mut self, bucket: u32) {
        let Some(state) = self.buckets.get_mut(bucket as usize) else { return };
        state.thawed = true;
        let (told, round) = (state.left == 0, state.round);
        let members = state.members.clone();
        for member in members {
            let idle = self.is_idle(member);
            let era = self.era;
            let entry = &mut self.entries[member as usize];
            entry.bucket = None;
            let counted = entry.in_round.take_if(|of| *of == (bucket, round)).is_some();
            if idle || entry.announced {
                continue;
            }
            if counted && told {
                entry.announced = true;
            } else {
                self.queue.leave(Event::Submitted { entry: member, era });
            }
        }
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
            .flat_map(|(receipt, callbacks)| {
                callbacks.into_iter().map(move |callback| (callback, receipt))
            })
            .collect()
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

fn is_same(request: &Request, submission: &Submission<'_>) -> bool {
    let Submission { kind, reduction, root, tensors, .. } = submission;
    let mut pairs = request.tensors.iter().zip(*tensors);
    request.kind == *kind
        && request.reduction == *reduction
        && request.root as usize == *root
        && request.tensors.len() == tensors.len()
        && pairs.all(|(known, new)| known.dtype == new.dtype && known.shape == new.shape)
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
