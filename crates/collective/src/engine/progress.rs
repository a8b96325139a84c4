//! What moves operations on: takes what was submitted, talks to the coordinator, carries out its decisions.
//!
//! Whoever holds [`Progress`] drives: a user's thread that waits, or the engine's own thread when nobody does.
//!
//! - DRIVE-1: whoever stops driving arms the links first, so that the sleeping thread is woken by the next word.
//! - DRIVE-2: a decision is on its way to every rank before the lowest rank carries it out.
//! - DRIVE-3: it waits for links that are full only when nobody at their other ends waits for it: few decisions are
//!   sent before their turn, because a rank does not read while it is in an operation.
#![expect(unsafe_code, reason = "hands tensors to the group as slices")]

use super::{
    Shared,
    coordinator::{Coordinator, Rules, report, title},
    message::{
        Decision, Doing, Event as Traced, Item, Phase, Request, Shape, Word, decode, encode,
    },
    output::Output,
    table::Event,
    timeline::Timeline,
};
use crate::{
    Bucket, DType, Gathered, Group, Reduction,
    bucket::Location,
    call::Kind,
    dtype::with_element,
    error::{Error, FailureKind, Result, seconds},
    link::Link,
};
use rustix::{
    event::PollFlags,
    fd::{AsRawFd, RawFd},
};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    cell::LazyCell,
    collections::VecDeque,
    io::{self, IoSlice},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

/// How long ranks have to say what they are doing.
const ANSWER_TIME: Duration = Duration::from_secs(1);
/// Events of a timeline that a rank collects before it sends them.
const TRACE_BATCH: usize = 8192;
/// How long the last words may take.
const FAREWELL: Duration = Duration::from_millis(500);
/// Bytes of decisions that are sent before their turn. Any link holds them while the other end is busy with an
/// operation that needs this rank.
const AHEAD: usize = 8 << 10;
/// Bytes that are read at a time.
const INBOX: usize = 16 << 10;

/// The link to one rank, with what is on its way.
struct Line {
    link: Box<dyn Link>,
    /// What has arrived lies at its start.
    inbox: Vec<u8>,
    arrived: usize,
    outbox: Vec<u8>,
    /// The other side has not been woken for what was sent.
    unrung: bool,
    ended: Option<io::Error>,
}

impl Line {
    fn say(&mut self, message: &impl Serialize) -> io::Result<()> {
        encode(message, &mut self.outbox)
    }

    /// Sends what fits; whether all of it has left. Whoever sleeps at the other end is not woken before [`Self::ring`].
    fn flush(&mut self) -> bool {
        let mut sent = 0;
        while sent < self.outbox.len() && self.ended.is_none() {
            match self.link.send_quietly(&[IoSlice::new(&self.outbox[sent..])]) {
                Ok(0) => break,
                Ok(more) => sent += more,
                Err(error) => self.ended = Some(error),
            }
        }
        self.unrung |= sent > 0;
        self.outbox.drain(..sent);
        match self.link.flush() {
            Ok(flushed) => self.outbox.is_empty() && flushed,
            Err(error) => {
                self.ended.get_or_insert(error);
                false
            }
        }
    }

    /// Wakes the other side for what was sent; if it is patient, only when somebody here is about to sleep.
    fn ring(&mut self, urgent: bool) {
        if self.unrung {
            self.unrung = !self.link.ring(urgent);
        }
    }

    /// Takes what has arrived, message by message.
    fn listen<M: DeserializeOwned>(&mut self, mut heard: impl FnMut(M)) -> bool {
        let before = self.arrived;
        while self.ended.is_none() {
            if self.arrived == self.inbox.len() {
                self.inbox.resize(self.arrived + INBOX, 0);
            }
            match self.link.receive(&mut self.inbox[self.arrived..]) {
                Ok(0) => break,
                Ok(read) => self.arrived += read,
                Err(error) => self.ended = Some(error),
            }
        }
        if self.arrived == before {
            return false;
        }
        let mut taken = 0;
        loop {
            match decode(&self.inbox[taken..self.arrived]) {
                Ok(Some((message, length))) => {
                    taken += length;
                    heard(message);
                }
                Ok(None) => break,
                Err(error) => {
                    self.ended.get_or_insert(error);
                    break;
                }
            }
        }
        self.inbox.copy_within(taken..self.arrived, 0);
        self.arrived -= taken;
        if self.arrived == 0 {
            self.inbox.truncate(INBOX);
        }
        true
    }
}

/// An answer that is being put together on the lowest rank.
struct Asked {
    number: u32,
    until: Duration,
    answers: Vec<Option<Doing>>,
    /// Nobody asked; it is time for a report.
    stalled: bool,
}

/// Everything that moves operations on.
pub(super) struct Progress {
    group: Group,
    /// On the lowest rank to all others, on the others to the lowest.
    lines: Vec<Option<Line>>,
    coordinator: Option<Coordinator>,
    decisions: VecDeque<Decision>,
    /// On the lowest rank: the length of each decision that has been sent and not carried out, and those after them.
    said: VecDeque<usize>,
    unsaid: VecDeque<Vec<u8>>,
    events: Vec<Event>,
    /// Memory in which tensors are put together.
    fusion: Option<Bucket<u8>>,
    asked: Option<Asked>,
    reports: u32,
    /// When ranks were last asked because operations waited too long.
    reported: Duration,
    stall: Duration,
    limit: Option<Duration>,
    timeline: Option<Timeline>,
    most: usize,
}

/// What the thread has to watch.
#[derive(Default)]
pub(super) struct Watched {
    pub fds: Vec<(RawFd, PollFlags)>,
    pub until: Option<Duration>,
}

impl Watched {
    /// Whether a link is full and has to be sent through later.
    pub fn sends(&self) -> bool {
        self.fds.iter().any(|(_, flags)| flags.contains(PollFlags::OUT))
    }
}

impl Progress {
    pub fn new(
        group: Group,
        links: Vec<Option<Box<dyn Link>>>,
        options: &super::EngineOptions,
    ) -> Self {
        let line = |link| Line {
            link,
            inbox: Vec::new(),
            arrived: 0,
            outbox: Vec::new(),
            unrung: false,
            ended: None,
        };
        let rules = Rules {
            ranks: group.size(),
            most: options.bucket_bytes,
            deterministic: options.deterministic,
        };
        let coordinator = (group.rank() == 0)
            .then(|| Coordinator::new(rules).calling(group.outer_ranks().to_vec()));
        Self {
            limit: group.limit(),
            group,
            lines: links.into_iter().map(|link| link.map(line)).collect(),
            coordinator,
            decisions: VecDeque::new(),
            said: VecDeque::new(),
            unsaid: VecDeque::new(),
            events: Vec::new(),
            fusion: None,
            asked: None,
            reports: 0,
            reported: Duration::ZERO,
            stall: options.stall,
            timeline: None,
            most: options.bucket_bytes,
        }
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Ends the group because of an error, unless that has happened.
    pub fn end_group(&self, error: &Error) {
        if self.group.health().failure().is_none() {
            self.group.abort(&error.to_string());
        }
    }

    /// Wakes whoever sleeps at the other end of a line on which something was sent.
    pub fn ring(&mut self, urgent: bool) {
        self.lines.iter_mut().flatten().for_each(|line| line.ring(urgent));
    }

    /// Does everything that can be done now. Without `carry_out` it only talks, and says whether there is more.
    pub fn drive(&mut self, shared: &Shared, carry_out: bool) -> Result<bool> {
        let mut moved = false;
        loop {
            let talked = self.talk(shared)?;
            moved |= talked;
            if !carry_out {
                return Ok(!self.decisions.is_empty());
            }
            match self.decisions.pop_front() {
                Some(decision) => self.carry_out(shared, decision)?,
                None if !talked => return Ok(moved),
                None => {}
            }
            moved = true;
        }
    }

    /// Takes what was submitted and what has arrived, decides, and sends. Never waits.
    fn talk(&mut self, shared: &Shared) -> Result<bool> {
        if shared.health.failure().is_some() {
            return Err(shared.health.error(&"the engine"));
        }
        let mut events = std::mem::take(&mut self.events);
        shared.table().queue.take(&mut events);
        let mut moved = !events.is_empty();
        for event in events.drain(..) {
            self.pass_on(shared, event)?;
        }
        self.events = events;
        if let Some(mut coordinator) = self.coordinator.take() {
            let now = LazyCell::new(|| shared.now());
            let mut others = Vec::new();
            for (rank, line) in self.lines.iter_mut().enumerate() {
                let Some(line) = line else { continue };
                moved |= line.listen(|word| match word {
                    Word::Ask | Word::Doing { .. } | Word::Timeline(_) | Word::Trace { .. } => {
                        others.push((rank, word));
                    }
                    _ => coordinator.hear(rank, word, *now),
                });
            }
            let decisions = coordinator.decide();
            self.coordinator = Some(coordinator);
            for (rank, word) in others {
                self.answer(shared, rank, word, *now)?;
            }
            moved |= !decisions.is_empty();
            for decision in decisions {
                self.announce(decision)?;
            }
        } else if let Some(line) = &mut self.lines[0] {
            let decisions = &mut self.decisions;
            moved |= line.listen(|decision| decisions.push_back(decision));
        }
        self.say_ahead();
        for line in self.lines.iter_mut().flatten() {
            if !line.outbox.is_empty() {
                line.flush();
            }
        }
        self.look_after(shared)?;
        if self.lines.iter().flatten().any(|line| line.ended.is_some()) {
            self.see_who_left(shared)?;
            // What they sent before has been taken.
            if let Some(timeline) = self.timeline.as_mut().filter(|_| !shared.is_traced()) {
                for (rank, line) in self.lines.iter().enumerate() {
                    if line.as_ref().is_some_and(|line| line.ended.is_some()) {
                        timeline.has_left(rank);
                    }
                }
                self.end_timeline(shared);
            }
        }
        Ok(moved)
    }

    /// Tells the coordinator what has happened here.
    fn pass_on(&mut self, shared: &Shared, event: Event) -> Result<()> {
        let now = shared.now();
        let Some((word, era)) = shared.table().word(event, now) else { return Ok(()) };
        let (group, rank) = (&self.group, self.group.rank());
        match &mut self.coordinator {
            Some(coordinator) => {
                if let Some(era) = era {
                    coordinator.next_era(era, |name| locate(shared, group, name));
                }
                match word {
                    Word::Ask | Word::Timeline(_) => self.answer(shared, rank, word, now)?,
                    _ => coordinator.hear(rank, word, now),
                }
            }
            None => {
                if let Some(line) = &mut self.lines[0] {
                    line.say(&word).map_err(|error| self.unsayable(&error))?;
                }
            }
        }
        Ok(())
    }

    fn unsayable(&self, error: &io::Error) -> Error {
        let text = format!("a word to the other ranks could not be written: {error}");
        self.group.abort(&text);
        Error::Invalid(text)
    }

    /// Decides for everybody: puts it into the own queue, and sends it to all ranks before its turn comes.
    fn announce(&mut self, decision: Decision) -> Result<()> {
        let mut bytes = Vec::new();
        encode(&decision, &mut bytes).map_err(|error| self.unsayable(&error))?;
        self.unsaid.push_back(bytes);
        self.decisions.push_back(decision);
        Ok(())
    }

    /// Sends the next decision, and those after it as far as links hold them whatever the others do (DRIVE-3).
    fn say_ahead(&mut self) {
        if self.unsaid.is_empty() {
            return;
        }
        let mut ahead: usize = self.said.iter().sum();
        while let Some(bytes) = self.unsaid.pop_front() {
            if !self.said.is_empty() && ahead + bytes.len() > AHEAD {
                return self.unsaid.push_front(bytes);
            }
            ahead += bytes.len();
            self.said.push_back(bytes.len());
            for line in self.lines.iter_mut().flatten() {
                line.outbox.extend(&bytes);
            }
        }
    }

    /// Words to the lowest rank that are not about operations.
    fn answer(&mut self, shared: &Shared, from: usize, word: Word, now: Duration) -> Result<()> {
        match word {
            Word::Ask => self.ask(shared, now, false),
            Word::Doing { number, doing } => {
                if let Some(asked) = self.asked.as_mut().filter(|asked| asked.number == number) {
                    asked.answers[from] = Some(doing);
                }
                Ok(())
            }
            Word::Timeline(on) => self.announce(Decision::Timeline(on)),
            Word::Trace { events, clock, more } => {
                if let Some(timeline) = &mut self.timeline {
                    timeline.take(from, events, clock, super::clock(), more);
                }
                self.end_timeline(shared);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn ask(&mut self, shared: &Shared, now: Duration, stalled: bool) -> Result<()> {
        if self.asked.is_none() {
            self.reports += 1;
            let mut answers = vec![None; self.group.size()];
            answers[0] = Some(shared.table().doing(now));
            let (number, until) = (self.reports, now + ANSWER_TIME);
            self.asked = Some(Asked { number, until, answers, stalled });
            self.announce(Decision::Tell(number))?;
        }
        Ok(())
    }

    /// Sends the report when everybody has answered, or has had the time to.
    fn look_after(&mut self, shared: &Shared) -> Result<()> {
        let (Some(coordinator), Some(asked)) = (&self.coordinator, &self.asked) else {
            return Ok(());
        };
        let now = shared.now();
        if now < asked.until && asked.answers.iter().any(Option::is_none) {
            return Ok(());
        }
        let text =
            report(coordinator, &asked.answers, |rank| self.group.host(rank).to_owned(), now);
        if asked.stalled {
            tracing::warn!("operations wait:\n{text}");
        }
        self.asked = None;
        self.announce(Decision::Report(text))
    }

    fn out_of_time(&self, shared: &Shared, limit: Duration, now: Duration) -> Error {
        let none = vec![None; self.group.size()];
        let text = self.coordinator.as_ref().map_or_else(String::new, |coordinator| {
            report(coordinator, &none, |rank| self.group.host(rank).to_owned(), now)
        });
        let cause = format!(
            "after {}: {text}; see what these ranks are doing, or give a longer limit",
            seconds(limit)
        );
        shared.health.fail(shared.health.own(FailureKind::TimedOut, cause));
        shared.health.error(&"the engine")
    }

    /// A rank whose line has ended is missed once something waits for it.
    fn see_who_left(&self, shared: &Shared) -> Result<()> {
        for (rank, line) in self.lines.iter().enumerate() {
            let Some(error) = line.as_ref().and_then(|line| line.ended.as_ref()) else { continue };
            let missed = match &self.coordinator {
                Some(coordinator) => coordinator.waits_for(rank),
                None => self.decisions.is_empty() && shared.table().is_busy(),
            };
            if missed {
                return Err(shared.health.broken(rank, error, &"an operation of the engine"));
            }
        }
        Ok(())
    }

    /// Sends everything, waiting for links that are full. They empty: whoever is at the other end either reads or
    /// ends the group (DRIVE-3).
    fn flush(&mut self, shared: &Shared) -> Result<()> {
        loop {
            let mut left = false;
            for line in self.lines.iter_mut().flatten() {
                left |= line.ended.is_none() && !line.flush();
            }
            if !left {
                return Ok(());
            }
            if shared.health.failure().is_some() {
                return Err(shared.health.error(&"the engine"));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn carry_out(&mut self, shared: &Shared, decision: Decision) -> Result<()> {
        if self.coordinator.is_some() {
            self.flush(shared)?; // DRIVE-2
            self.ring(true);
            self.said.pop_front();
        }
        match decision {
            Decision::Run(items) => self.run(shared, items)?,
            Decision::RunBucket(bucket) => self.run_bucket(shared, bucket)?,
            Decision::Refuse { name, reason } => {
                let mut table = shared.table();
                if let Some(entry) = table.entry_named(&name) {
                    let operation = title(&table.entries[entry as usize].request, &name);
                    let error = Error::Mismatch { operation, details: reason };
                    let callbacks = table.finish(entry, None, Err(error));
                    drop(table);
                    shared.completed(callbacks);
                }
            }
            Decision::Freeze { members, .. } => {
                let mut table = shared.table();
                let entries =
                    members.iter().filter_map(|number| table.entry_numbered(*number)).collect();
                table.freeze(entries);
            }
            Decision::Thaw(bucket) => shared.table().thaw(bucket),
            Decision::AllJoined(last) => {
                shared.table().all_joined(last as usize);
                shared.completed(Vec::new());
            }
            Decision::Tell(number) => {
                let doing = shared.table().doing(shared.now());
                if self.coordinator.is_none()
                    && let Some(line) = &mut self.lines[0]
                {
                    line.say(&Word::Doing { number, doing })
                        .map_err(|error| self.unsayable(&error))?;
                }
            }
            Decision::Report(text) => {
                let mut table = shared.table();
                table.report = text;
                table.reports += 1;
                drop(table);
                shared.completed(Vec::new());
            }
            Decision::Timeline(on) => self.switch_timeline(shared, on)?,
        }
        Ok(())
    }

    fn run(&mut self, shared: &Shared, items: Vec<Item>) -> Result<()> {
        let start = shared.clock();
        let mut table = shared.table();
        let mut operations = Vec::with_capacity(items.len());
        for item in items {
            let (number, entry) = match item {
                Item::Known(number) => (Some(number), table.entry_numbered(number)),
                Item::New { number, name, request } => {
                    (number, Some(table.entry_of(&name, &request)))
                }
            };
            let Some(entry) = entry else {
                return Err(self.bug("an operation that nobody has heard of"));
            };
            let request = table.entries[entry as usize].request.clone();
            let pointers = match table.pointers(entry) {
                Some(pointers) => pointers.to_vec(),
                None => vec![std::ptr::null_mut(); request.tensors.len()],
            };
            let submitted = table.entries[entry as usize].submitted_at();
            table.record(Phase::Negotiate, entry, submitted, start);
            operations.push((number, entry, request, pointers));
        }
        drop(table);
        let mut outputs = Vec::new();
        let fused = operations.len() > 1
            || operations.iter().any(|(_, _, request, _)| request.kind == Kind::AllReduce);
        if fused {
            let mut pieces = Pieces::default();
            for (_, _, request, pointers) in &operations {
                pieces.add(request, pointers);
            }
            self.reduce(&pieces)?;
        } else {
            for (_, entry, request, pointers) in &operations {
                let splits = shared.table().entries[*entry as usize].splits.clone();
                outputs = self.exchange(request, pointers, &splits)?;
            }
        }
        let mut callbacks = Vec::new();
        let mut table = shared.table();
        if start != 0 {
            let name = match &operations[..] {
                [(_, _, request, _)] => {
                    title(request, &table.entries[operations[0].1 as usize].name)
                }
                _ => format!("{} of {}", Kind::AllReduce.name(), operations.len()),
            };
            let bytes = operations.iter().map(|(_, _, request, _)| request.bytes() as u64).sum();
            let fused = operations.len() as u32;
            if let Some(trace) = &mut table.trace {
                trace.push(Traced {
                    phase: Phase::Run,
                    name,
                    start,
                    end: super::clock(),
                    bytes,
                    fused,
                });
            }
        }
        let now = shared.now();
        for (number, entry, ..) in operations {
            table.active = (now, entry);
            callbacks.extend(table.finish(entry, number, Ok(std::mem::take(&mut outputs))));
        }
        drop(table);
        shared.completed(callbacks);
        self.send_trace(shared, false)
    }

    fn run_bucket(&mut self, shared: &Shared, bucket: u32) -> Result<()> {
        let start = shared.clock();
        let whole = shared.table().whole(bucket);
        let whole =
            whole.filter(|(data, bytes, ..)| self.group.locate(*data, *bytes).is_registered());
        if let Some((data, bytes, dtype, reduction)) = whole {
            self.make_room(bytes)?;
            // SAFETY: the members' tensors, side by side in one mapping (TABLE-1).
            unsafe { self.reduce_at(dtype, reduction, data, bytes / dtype.size())? };
        } else {
            let pieces = self.pieces(shared, bucket)?;
            self.reduce(&pieces)?;
        }
        let mut table = shared.table();
        if start != 0 {
            table.record_bucket(bucket, start, super::clock());
        }
        let callbacks = table.finish_round(bucket);
        let state = &table.buckets[bucket as usize];
        if let Some(over) = shared.rounds.get(bucket as usize) {
            over.store(state.round, Ordering::Release);
        }
        table.active = (shared.now(), state.members.last().copied().unwrap_or_default());
        drop(table);
        shared.completed(callbacks);
        self.send_trace(shared, false)
    }

    /// The members' tensors one by one.
    fn pieces(&self, shared: &Shared, bucket: u32) -> Result<Pieces> {
        let mut pieces = Pieces::default();
        let table = shared.table();
        let Some(state) = table.buckets.get(bucket as usize) else {
            return Err(self.bug("a bucket that nobody has heard of"));
        };
        let (members, round) = (&state.members, state.round);
        let entry = |member: &u32| &table.entries[*member as usize];
        match (&state.sizes, state.fuses_as) {
            (Some(sizes), Some((dtype, reduction))) => {
                let data = |member: &u32| {
                    let entry = entry(member);
                    if entry.is_in(bucket, round) { entry.data() } else { std::ptr::null_mut() }
                };
                let piece = |(member, bytes): (&u32, &usize)| {
                    let (data, bytes) = (data(member), *bytes);
                    Piece { data, bytes, dtype, reduction }
                };
                pieces
                    .all
                    .extend(members.iter().zip(sizes).map(piece).filter(|piece| piece.bytes > 0));
            }
            _ => {
                for entry in members.iter().map(entry) {
                    let nothing = vec![std::ptr::null_mut(); entry.request.tensors.len()];
                    let here = entry.is_in(bucket, round);
                    pieces.add(&entry.request, if here { entry.tensors() } else { &nothing });
                }
            }
        }
        drop(table);
        Ok(pieces)
    }

    #[cold]
    fn bug(&self, what: &str) -> Error {
        let text = format!("the engine was told of {what}, which is a bug");
        self.group.abort(&text);
        Error::Invalid(text)
    }

    /// Reduces pieces of memory, each run of one type as one tensor.
    fn reduce(&mut self, pieces: &Pieces) -> Result<()> {
        for run in pieces
            .all
            .chunk_by(|one, next| one.dtype == next.dtype && one.reduction == next.reduction)
        {
            let (dtype, reduction) = (run[0].dtype, run[0].reduction);
            let bytes: usize = run.iter().map(|piece| piece.bytes).sum();
            let count = bytes / dtype.size();
            let first = run[0].data;
            if run.len() > 1 {
                // Whether or not this rank needs it: all ranks make it together.
                self.make_room(bytes)?;
            }
            let beside = |pair: &[Piece]| pair[0].data.wrapping_add(pair[0].bytes) == pair[1].data;
            let whole = run.len() == 1
                || (run.windows(2).all(beside) && self.group.locate(first, bytes).is_registered());
            if whole && !first.is_null() {
                // SAFETY: one tensor of the submitter's, or several side by side in one mapping (TABLE-1).
                unsafe { self.reduce_at(dtype, reduction, first, count)? };
                continue;
            }
            let mut zeros = vec![0u64; if run.len() == 1 { bytes.div_ceil(8) } else { 0 }];
            let base = match &mut self.fusion {
                Some(room) if run.len() > 1 => room.as_mut_ptr(),
                _ => zeros.as_mut_ptr().cast(),
            };
            let mut offset = 0;
            for piece in run {
                // SAFETY: inside memory of the engine's, and inside the submitter's tensor (TABLE-1).
                unsafe {
                    match piece.data.is_null() {
                        true => std::ptr::write_bytes(base.add(offset), 0, piece.bytes),
                        false => {
                            std::ptr::copy_nonoverlapping(piece.data, base.add(offset), piece.bytes)
                        }
                    }
                }
                offset += piece.bytes;
            }
            // SAFETY: the memory is aligned for any type, holds as many bytes, and nobody else uses it.
            unsafe { self.reduce_at(dtype, reduction, base, count)? };
            let mut offset = 0;
            for piece in run {
                if !piece.data.is_null() {
                    // SAFETY: as above.
                    unsafe {
                        std::ptr::copy_nonoverlapping(base.add(offset), piece.data, piece.bytes)
                    };
                }
                offset += piece.bytes;
            }
        }
        Ok(())
    }

    /// Sees to it that the fusion memory holds `bytes`. All ranks ask for the same, so they make it together.
    fn make_room(&mut self, bytes: usize) -> Result<()> {
        if self.fusion.as_ref().is_none_or(|room| room.len() < bytes) {
            self.fusion = None;
            let wanted = bytes.next_power_of_two().min(self.most.max(bytes)).max(64 << 10);
            self.fusion = Some(self.group.bucket(wanted)?);
        }
        Ok(())
    }

    /// # Safety
    /// `data` holds `count` elements, aligned, and nobody else uses them.
    unsafe fn reduce_at(
        &self,
        dtype: DType,
        reduction: Reduction,
        data: *mut u8,
        count: usize,
    ) -> Result<()> {
        with_element!(dtype, T => {
            // SAFETY: the caller's contract; a null pointer comes with no elements only.
            let tensor = unsafe { slice_mut::<T>(data, count) };
            self.group.all_reduce(tensor, reduction)
        })
    }

    /// Everything but reductions of all.
    fn exchange(
        &self,
        request: &Request,
        pointers: &[*mut u8],
        splits: &[usize],
    ) -> Result<Vec<Output>> {
        let mut outputs = Vec::new();
        if request.kind == Kind::Barrier {
            self.group.barrier()?;
        }
        for (tensor, data) in request.tensors.iter().zip(pointers) {
            let count = tensor.shape.count();
            if request.kind == Kind::Bucket {
                let made =
                    with_element!(tensor.dtype, T => Output::of(self.group.bucket::<T>(count)?));
                outputs.push(made);
                continue;
            }
            with_element!(tensor.dtype, T => {
                // SAFETY: the submitter's tensor (TABLE-1).
                let elements = unsafe { slice_mut::<T>(*data, count) };
                match request.kind {
                    Kind::Broadcast => self.group.broadcast(elements, request.root as usize)?,
                    Kind::AllGather => outputs.push(Output::new(self.group.all_gather_varied(elements)?)),
                    Kind::ReduceScatter => {
                        let counts = shares(&tensor.shape, self.group.size());
                        let mut values = vec![T::default(); counts[self.rank()]];
                        self.group.reduce_scatter_varied(elements, &counts, &mut values, request.reduction)?;
                        outputs.push(Output::new(Gathered { values, counts }));
                    }
                    Kind::AllToAll => {
                        let row = tensor.shape.row();
                        let counts: Vec<usize> = match splits {
                            [] => vec![count / self.group.size(); self.group.size()],
                            rows => rows.iter().map(|rows| rows * row).collect(),
                        };
                        // What no rank is given stays here.
                        let given = &elements[..counts.iter().sum()];
                        outputs.push(Output::new(self.group.all_to_all_varied(given, &counts)?));
                    }
                    _ => {}
                }
            });
        }
        Ok(outputs)
    }

    fn switch_timeline(&mut self, shared: &Shared, on: bool) -> Result<()> {
        if on {
            shared.trace(true);
            if self.rank() == 0 && self.timeline.is_none() {
                self.timeline = shared.timeline_path().and_then(|path| {
                    let hosts = (0..self.group.size())
                        .map(|rank| self.group.host(rank).to_owned())
                        .collect();
                    let near =
                        (0..self.group.size()).map(|rank| self.group.is_near(rank)).collect();
                    Timeline::start(path, hosts, near, self.group.outer_ranks().to_vec())
                });
            }
            shared.completed(Vec::new());
            return Ok(());
        }
        self.send_trace(shared, true)?;
        shared.trace(false);
        self.end_timeline(shared);
        Ok(())
    }

    /// Closes the file when every rank has sent its last events.
    fn end_timeline(&mut self, shared: &Shared) {
        if self.timeline.as_ref().is_some_and(Timeline::is_complete) {
            self.timeline = None;
        }
        if self.timeline.is_none() && !shared.is_traced() {
            shared.table().timeline_ended = true;
            shared.completed(Vec::new());
        }
    }

    /// Sends this rank's share of the timeline when there is enough of it, or all of it at the end.
    fn send_trace(&mut self, shared: &Shared, last: bool) -> Result<()> {
        if !shared.is_traced() {
            return Ok(());
        }
        let mut table = shared.table();
        let Some(trace) = table.trace.as_mut().filter(|trace| last || trace.len() >= TRACE_BATCH)
        else {
            return Ok(());
        };
        let events = std::mem::take(trace);
        drop(table);
        let clock = super::clock();
        if self.coordinator.is_some() {
            if let Some(timeline) = &mut self.timeline {
                timeline.take(0, events, clock, clock, !last);
            }
        } else if let Some(line) = &mut self.lines[0] {
            let mut batches = events.chunks(TRACE_BATCH).peekable();
            loop {
                let batch = batches.next().unwrap_or_default().to_vec();
                let more = !last || batches.peek().is_some();
                line.say(&Word::Trace { events: batch, clock, more }).map_err(|error| {
                    let text = format!("the timeline could not be sent: {error}");
                    self.group.abort(&text);
                    Error::Invalid(text)
                })?;
                if batches.peek().is_none() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Readies the links to wake the thread (DRIVE-1). False if there is more to take at once.
    ///
    /// As long as the lowest rank has nothing on its way, nothing can run, and what others tell it can lie until it
    /// has, or until one of them has to sleep (`urgent`).
    pub fn arm(&mut self, shared: &Shared, watched: &mut Watched, urgent: bool) -> bool {
        watched.fds.clear();
        let patient = self.coordinator.is_some() && !shared.table().is_busy();
        let mut idle = true;
        self.ring(urgent);
        for line in self.lines.iter_mut().flatten() {
            line.link.be_patient(patient);
            if line.ended.is_some() {
                continue;
            }
            match line.link.interest(true, !line.outbox.is_empty()) {
                Some((fd, flags)) => watched.fds.push((fd.as_raw_fd(), flags)),
                None => idle = false,
            }
        }
        watched.until = self.deadline();
        idle
    }

    /// When something has to be looked at even if nothing happens.
    fn deadline(&self) -> Option<Duration> {
        let oldest = self.coordinator.as_ref()?.oldest();
        let stall = oldest.map(|oldest| self.reported.max(oldest) + self.stall);
        let limit = self.limit.and_then(|limit| Some(oldest? + limit));
        let asked = self.asked.as_ref().map(|asked| asked.until);
        stall.into_iter().chain(limit).chain(asked).min()
    }

    /// What only time brings, on the thread that sleeps until then: reports and limits.
    pub fn keep_time(&mut self, shared: &Shared) -> Result<()> {
        let Some(until) = self.deadline() else { return Ok(()) };
        let now = shared.now();
        if now < until {
            return Ok(());
        }
        let Some(oldest) = self.coordinator.as_mut().and_then(Coordinator::look_for_oldest) else {
            return Ok(());
        };
        if let Some(limit) = self.limit.filter(|limit| now.saturating_sub(oldest) >= *limit) {
            return Err(self.out_of_time(shared, limit, now));
        }
        if now >= self.reported.max(oldest) + self.stall {
            self.reported = now;
            self.ask(shared, now, true)?;
        }
        Ok(())
    }
}

impl Progress {
    /// The last words: the rest of the timeline, and whatever has not been sent.
    pub fn leave(&mut self, shared: &Shared) {
        // Who does not hear it any more does not need it.
        let _ = self.send_trace(shared, true);
        let start = Instant::now();
        loop {
            let mut left = false;
            for line in self.lines.iter_mut().flatten() {
                left |= line.ended.is_none() && !line.flush();
                line.ring(true);
            }
            if !left || start.elapsed() > FAREWELL || shared.health.failure().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Where the tensor of an operation lies on this rank.
fn locate(shared: &Shared, group: &Group, name: &str) -> Location {
    let table = shared.table();
    let Some(entry) = table.entry_named(name) else { return Location::PLAIN };
    let entry = &table.entries[entry as usize];
    match (entry.tensors(), &entry.request.tensors[..]) {
        ([data], [tensor]) => group.locate(*data, tensor.bytes()),
        _ => Location::PLAIN,
    }
}

/// Memory to be reduced together.
#[derive(Default)]
struct Pieces {
    all: Vec<Piece>,
}

struct Piece {
    data: *mut u8,
    bytes: usize,
    dtype: DType,
    reduction: Reduction,
}

impl Pieces {
    /// A null pointer stands for zeros.
    fn add(&mut self, request: &Request, pointers: &[*mut u8]) {
        for (tensor, data) in request.tensors.iter().zip(pointers) {
            let (data, bytes, dtype) = (*data, tensor.bytes(), tensor.dtype);
            if bytes > 0 {
                self.all.push(Piece { data, bytes, dtype, reduction: request.reduction });
            }
        }
    }
}

/// How many elements of a scattered tensor are each rank's: whole rows, one more for the first ranks if they do not
/// come out even.
fn shares(shape: &Shape, ranks: usize) -> Vec<usize> {
    let (each, rest) = (shape.rows() / ranks, shape.rows() % ranks);
    (0..ranks).map(|rank| (each + usize::from(rank < rest)) * shape.row()).collect()
}

/// # Safety
/// `data` holds `count` elements, aligned, and nobody else uses them.
unsafe fn slice_mut<'a, T>(data: *mut u8, count: usize) -> &'a mut [T] {
    if count == 0 {
        return &mut [];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(data.cast(), count) }
}
