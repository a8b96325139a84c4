//! Which operations run when, and which are refused: the lowest rank's pure state machine.
//!
//! - MATCH-1: operations are matched by name. One runs when every rank that has not joined has asked for it, and
//!   not before; so whoever starts it knows that all others do.
//! - MATCH-2: every rank carries out the same decisions in the same order, so the calls of the group under the
//!   engine always agree.
//! - MATCH-3: a rank has at most one operation of a name on its way, and one round of a bucket.
//! - FREEZE-1: whether a rank tells the members of a bucket one by one (because some were on their way when the
//!   decision to freeze them reached it) or all at once makes no difference. In one round it does the one or the other.

use super::{
    layout::{Member, layout},
    message::{Decision, Doing, Item, Request, Word, differing},
};
use crate::{ReduceOp, Reduction, bucket::Location, call::Kind};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

/// Names that are known by number; more are matched as well, only with longer messages.
const MOST_NAMES: usize = 1 << 16;
/// Sets of operations whose repetition is watched.
const MOST_STEPS: usize = 64;
/// How often a step has to come, the first time included, before it is frozen.
const REPEATS: u32 = 2;

/// What the coordinator depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub ranks: usize,
    /// Bytes that are fused at most.
    pub most: usize,
    /// The plan depends on names and sizes only, never on time.
    pub deterministic: bool,
}

/// A name, and who has asked for it.
#[derive(Debug)]
struct Operation {
    name: String,
    /// Of the rank that came first.
    request: Request,
    /// Of the last run, which is what a rank means that says nothing else.
    last: Request,
    /// Ranks that want something else than `request`.
    odd: Vec<(usize, Request)>,
    ready: Vec<bool>,
    missing: usize,
    since: Duration,
    twice: Option<usize>,
    once: bool,
    /// It has run before, so the ranks know its number.
    told: bool,
    /// A rank has told in this round what it wants, instead of the same as before.
    fresh: bool,
    /// The last round was refused, so ranks may have something else in mind than what has run.
    refused: bool,
    /// It is about to run.
    queued: bool,
    bucket: Option<u32>,
}

/// Operations that run together.
#[derive(Debug)]
struct Bucket {
    members: Vec<u32>,
    /// Members that a rank has told one by one in this round; all of them when it has told the whole.
    told: Vec<Told>,
    missing: usize,
    round: u64,
    since: Option<Duration>,
    thawed: bool,
    step: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Told {
    Some(Vec<u32>),
    All,
}

/// A set of operations that the lowest rank had on their way at once.
#[derive(Debug)]
struct Step {
    signature: u64,
    seen: u32,
    needed: u32,
}

/// The state machine. It never reads a clock; whoever drives it says what time it is.
#[derive(Debug)]
pub(crate) struct Coordinator {
    rules: Rules,
    /// How ranks are called: by their numbers in the outermost group.
    called: Vec<usize>,
    names: HashMap<String, u32>,
    operations: Vec<Operation>,
    free: Vec<u32>,
    buckets: Vec<Bucket>,
    runnable: VecDeque<Runnable>,
    joined: Vec<bool>,
    last_joined: usize,
    era: u32,
    /// Operations of the era at hand, in the order in which they came.
    current: Vec<u32>,
    steps: VecDeque<Step>,
    decisions: Vec<Decision>,
    /// See [`Self::oldest`].
    oldest: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Runnable {
    Operation(u32),
    Bucket(u32),
}

impl Coordinator {
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            called: (0..rules.ranks).collect(),
            names: HashMap::new(),
            operations: Vec::new(),
            free: Vec::new(),
            buckets: Vec::new(),
            runnable: VecDeque::new(),
            joined: vec![false; rules.ranks],
            last_joined: 0,
            era: 0,
            current: Vec::new(),
            steps: VecDeque::new(),
            decisions: Vec::new(),
            oldest: None,
        }
    }

    /// The same, of ranks that are called something else.
    pub fn calling(self, called: Vec<usize>) -> Self {
        Self { called, ..self }
    }

    /// Takes in what a rank says. Words about the report and the timeline are not for this machine.
    pub fn hear(&mut self, from: usize, word: Word, now: Duration) {
        self.oldest.get_or_insert(now);
        match word {
            Word::Ready { name, request, once } => self.ready(from, &name, request, once, now),
            Word::Again(number) => self.again(from, number, now),
            Word::Full { bucket, round } => self.full(from, bucket, round, now),
            Word::Open { bucket, round } => self.open(bucket, round, now),
            Word::Joined => self.join(from),
            Word::Twice(name) => self.twice(from, &name),
            Word::Ask | Word::Doing { .. } | Word::Timeline(_) | Word::Trace { .. } => {}
        }
    }

    /// Notes that the lowest rank has waited for something since its last submission: what it submits from now on
    /// belongs to the next step.
    ///
    /// `locate` says where an operation's tensors lie on that rank.
    pub fn next_era(&mut self, era: u32, locate: impl Fn(&str) -> Location) {
        if era == self.era {
            return;
        }
        self.era = era;
        let mut step = std::mem::take(&mut self.current);
        let mut seen = HashSet::new();
        step.retain(|number| {
            let operation = &self.operations[*number as usize];
            operation.told
                && !operation.refused
                && operation.bucket.is_none()
                && seen.insert(*number)
        });
        if step.len() > 1 {
            self.repeat(step, &locate);
        }
    }

    /// What to do now, in this order.
    pub fn decide(&mut self) -> Vec<Decision> {
        while let Some(next) = self.runnable.pop_front() {
            match next {
                Runnable::Bucket(bucket) => self.decisions.push(Decision::RunBucket(bucket)),
                Runnable::Operation(number) => self.run(number),
            }
        }
        std::mem::take(&mut self.decisions)
    }

    fn ready(&mut self, from: usize, name: &str, request: Request, once: bool, now: Duration) {
        let number = match self.names.get(name) {
            Some(number) => *number,
            None => self.add(name, &request, once),
        };
        self.note(from, number, Some(request), now);
    }

    fn again(&mut self, from: usize, number: u32, now: Duration) {
        if (number as usize) < self.operations.len() {
            self.note(from, number, None, now);
        }
    }

    fn add(&mut self, name: &str, request: &Request, once: bool) -> u32 {
        let once = once || self.names.len() >= MOST_NAMES;
        let operation = Operation {
            name: name.to_owned(),
            request: request.clone(),
            last: request.clone(),
            odd: Vec::new(),
            ready: vec![false; self.rules.ranks],
            missing: self.rules.ranks,
            since: Duration::ZERO,
            twice: None,
            once,
            told: false,
            fresh: false,
            refused: false,
            queued: false,
            bucket: None,
        };
        let number = match self.free.pop() {
            Some(number) => {
                self.operations[number as usize] = operation;
                number
            }
            None => {
                self.operations.push(operation);
                self.operations.len() as u32 - 1
            }
        };
        self.names.insert(name.to_owned(), number);
        number
    }

    /// A rank has an operation ready. Without a request it is that of the last run.
    fn note(&mut self, from: usize, number: u32, request: Option<Request>, now: Duration) {
        if from == 0 {
            self.current.push(number);
        }
        if let Some(bucket) = self.operations[number as usize].bucket {
            if request.is_none() {
                // Told one by one because the rank did not know of the bucket yet (FREEZE-1).
                return self.told_one(from, bucket, number, now);
            }
            let round = self.buckets[bucket as usize].round;
            self.open(bucket, round, now);
        }
        let operation = &mut self.operations[number as usize];
        if operation.ready[from] || operation.queued {
            return; // MATCH-3 makes this impossible for an honest rank.
        }
        let first = operation.missing == self.rules.ranks;
        if first {
            operation.since = now;
        }
        operation.fresh |= request.is_some();
        match request {
            Some(request) if first => operation.request = request,
            Some(request) if !operation.request.agrees(&request) => {
                operation.odd.push((from, request));
            }
            None if operation.fresh && !operation.request.agrees(&operation.last) => {
                operation.odd.push((from, operation.last.clone()));
            }
            _ => {}
        }
        operation.ready[from] = true;
        operation.missing -= 1;
        self.settle(number);
    }

    /// Runs or refuses an operation once everybody has asked for it.
    fn settle(&mut self, number: u32) {
        let operation = &mut self.operations[number as usize];
        let joined = self.joined.iter().filter(|joined| **joined).count();
        if operation.missing == self.rules.ranks || operation.missing > joined || operation.queued {
            return;
        }
        let absent = (0..self.rules.ranks).filter(|rank| !operation.ready[*rank]);
        let (gone, awaited): (Vec<usize>, Vec<usize>) = absent.partition(|rank| self.joined[*rank]);
        if !awaited.is_empty() {
            return;
        }
        let refusal = if let Some(rank) = operation.twice {
            Some(format!(
                "rank {} submitted it again before it was done; give every operation its own name",
                self.called[rank]
            ))
        } else if !operation.odd.is_empty() {
            let first = operation.ready.iter().enumerate().filter(|(rank, ready)| {
                **ready && operation.odd.iter().all(|(odd, _)| odd != rank)
            });
            let requests = first
                .map(|(rank, _)| (rank, &operation.request))
                .chain(operation.odd.iter().map(|(rank, request)| (*rank, request)));
            Some(differing(requests.map(|(rank, request)| (self.called[rank], request))))
        } else {
            gone.first().and_then(|rank| without(self.called[*rank], &operation.request))
        };
        match refusal {
            Some(reason) => {
                let name = operation.name.clone();
                self.decisions.push(Decision::Refuse { name, reason });
                self.forget(number, false);
            }
            None => {
                operation.queued = true;
                self.runnable.push_back(Runnable::Operation(number));
            }
        }
    }

    /// The operation is over; its name may come again.
    fn forget(&mut self, number: u32, ran: bool) {
        let operation = &mut self.operations[number as usize];
        operation.ready.fill(false);
        operation.missing = self.rules.ranks;
        operation.odd.clear();
        operation.twice = None;
        if operation.fresh {
            let (to, from) = match ran {
                true => (&mut operation.last, &operation.request),
                false => (&mut operation.request, &operation.last),
            };
            to.clone_from(from);
        }
        (operation.fresh, operation.queued, operation.refused) = (false, false, !ran);
        operation.told |= ran && !operation.once;
        if !operation.told {
            self.names.remove(&operation.name);
            self.free.push(number);
        }
    }

    /// Runs an operation, together with others that are ready and fit.
    fn run(&mut self, first: u32) {
        let mut batch = vec![first];
        let of = |number: u32| &self.operations[number as usize].request;
        if let Some(kind) = of(first).fuses_as().filter(|_| !self.rules.deterministic) {
            let mut bytes = of(first).bytes();
            self.runnable.retain(|next| {
                let Runnable::Operation(number) = *next else { return true };
                let request = &self.operations[number as usize].request;
                let fits =
                    request.fuses_as() == Some(kind) && bytes + request.bytes() <= self.rules.most;
                if fits {
                    bytes += request.bytes();
                    batch.push(number);
                }
                !fits
            });
        }
        let joined = self.joined.contains(&true);
        let item = |number: &u32| {
            let operation = &self.operations[*number as usize];
            // Whoever has joined may not know what the others want now.
            if operation.told && !(joined && operation.fresh) {
                return Item::Known(*number);
            }
            let (name, request) = (operation.name.clone(), operation.request.clone());
            Item::New { number: Some(*number).filter(|_| !operation.once), name, request }
        };
        self.decisions.push(Decision::Run(batch.iter().map(item).collect()));
        for number in batch {
            self.forget(number, true);
        }
    }

    fn twice(&mut self, from: usize, name: &str) {
        let Some(number) = self.names.get(name).copied() else { return };
        let operation = &mut self.operations[number as usize];
        if let Some(bucket) = operation.bucket {
            let (round, since) = (self.buckets[bucket as usize].round, operation.since);
            self.open(bucket, round, since);
        }
        let operation = &mut self.operations[number as usize];
        if operation.ready[from] {
            operation.twice.get_or_insert(from);
        }
    }

    fn join(&mut self, from: usize) {
        self.joined[from] = true;
        self.last_joined = from;
        for number in 0..self.operations.len() as u32 {
            self.settle(number);
        }
        for bucket in 0..self.buckets.len() as u32 {
            self.settle_bucket(bucket);
        }
        if self.joined.iter().all(|joined| *joined) {
            // Of a bucket that nobody fills any more, each member counts for itself.
            for bucket in 0..self.buckets.len() as u32 {
                let state = &self.buckets[bucket as usize];
                if let Some(since) = state.since {
                    self.open(bucket, state.round, since);
                }
            }
            // Whatever is ready everywhere runs before.
            let mut before = self.decide();
            before.push(Decision::AllJoined(self.last_joined as u32));
            self.decisions = before;
            self.joined.fill(false);
        }
    }

    fn told_one(&mut self, from: usize, bucket: u32, number: u32, now: Duration) {
        let state = &mut self.buckets[bucket as usize];
        let Told::Some(members) = &mut state.told[from] else { return };
        if members.is_empty() {
            state.since.get_or_insert(now);
        }
        members.push(number);
        if members.len() == state.members.len() {
            let round = state.round;
            self.full(from, bucket, round, now);
        }
    }

    fn full(&mut self, from: usize, bucket: u32, round: u64, now: Duration) {
        let Some(state) = self.buckets.get_mut(bucket as usize) else { return };
        if round != state.round || state.told[from] == Told::All {
            return; // FREEZE-1 makes this impossible for an honest rank.
        }
        if state.thawed {
            // It was on its way when the bucket ceased to be.
            state.told[from] = Told::All;
            for number in state.members.clone() {
                self.note(from, number, None, now);
            }
            return;
        }
        state.since.get_or_insert(now);
        state.told[from] = Told::All;
        state.missing -= 1;
        self.settle_bucket(bucket);
    }

    fn settle_bucket(&mut self, bucket: u32) {
        let state = &mut self.buckets[bucket as usize];
        let all = || {
            state.told.iter().zip(&self.joined).all(|(told, joined)| *told == Told::All || *joined)
        };
        if state.thawed || state.missing == self.rules.ranks || !all() {
            return;
        }
        // Members that a joined rank cannot stand in for are refused one by one.
        let gone = (0..self.rules.ranks).find(|rank| state.told[*rank] != Told::All);
        let round = state.round;
        let hopeless = gone.is_some_and(|rank| {
            let member = |number: &u32| without(rank, &self.operations[*number as usize].request);
            state.members.iter().any(|number| member(number).is_some())
        });
        if hopeless {
            let since = state.since.unwrap_or_default();
            return self.open(bucket, round, since);
        }
        state.next_round(self.rules.ranks);
        self.runnable.push_back(Runnable::Bucket(bucket));
    }

    /// Takes a bucket apart; what its ranks have told so far counts for the members.
    fn open(&mut self, bucket: u32, round: u64, now: Duration) {
        let Some(state) = self.buckets.get_mut(bucket as usize) else { return };
        if state.thawed || state.round != round {
            return;
        }
        state.thawed = true;
        let (members, told, step) = (state.members.clone(), state.told.clone(), state.step);
        let since = state.since.unwrap_or(now);
        if let Some(step) = self.steps.iter_mut().find(|known| known.signature == step) {
            (step.seen, step.needed) = (0, step.needed.saturating_mul(2));
        }
        self.decisions.push(Decision::Thaw(bucket));
        for number in &members {
            self.operations[*number as usize].bucket = None;
        }
        for (rank, told) in told.into_iter().enumerate() {
            let ready = if told == Told::All {
                &members
            } else if let Told::Some(some) = &told {
                some
            } else {
                continue;
            };
            for number in ready {
                self.note(rank, *number, None, since);
            }
        }
    }

    /// Notes that a step has come again, and freezes it when that has happened often enough.
    fn repeat(&mut self, step: Vec<u32>, locate: &dyn Fn(&str) -> Location) {
        let mut numbers = step.clone();
        numbers.sort_unstable();
        numbers.dedup();
        let signature = numbers.iter().fold(0x9e37_79b9_7f4a_7c15u64, |hash, number| {
            let mixed = (hash ^ u64::from(*number)).wrapping_mul(0xd6e8_feb8_6659_fd93);
            mixed ^ (mixed >> 32)
        });
        let known = match self.steps.iter_mut().position(|known| known.signature == signature) {
            Some(index) => index,
            None => {
                if self.steps.len() == MOST_STEPS {
                    self.steps.pop_front();
                }
                self.steps.push_back(Step { signature, seen: 0, needed: REPEATS });
                self.steps.len() - 1
            }
        };
        self.steps[known].seen += 1;
        if self.steps[known].seen < self.steps[known].needed {
            return;
        }
        let mut ordered = step;
        if self.rules.deterministic {
            ordered.sort_by(|one, other| self.name(*one).cmp(self.name(*other)));
        }
        let members: Vec<Member> =
            ordered.iter().filter_map(|number| self.member(*number, locate)).collect();
        for plan in layout(&members, self.rules.most) {
            if plan.members.len() > 1 {
                tracing::debug!(
                    "{} operations are one bucket from now on: {}",
                    plan.members.len(),
                    plan.reason
                );
                self.freeze(plan.members, signature);
            }
        }
    }

    fn name(&self, number: u32) -> &str {
        &self.operations[number as usize].name
    }

    fn member(&self, number: u32, locate: &dyn Fn(&str) -> Location) -> Option<Member> {
        let Operation { name, request, .. } = &self.operations[number as usize];
        // Nothing is nothing: it would make a bucket that lies side by side look like one that does not.
        let bytes = Some(request.bytes()).filter(|bytes| *bytes > 0)?;
        let fuses_as = request.fuses_as()?;
        Some(Member { number, fuses_as, bytes, location: locate(name) })
    }

    fn freeze(&mut self, members: Vec<u32>, step: u64) {
        // One that is about to run has been counted already, and one that changes is not the same as before.
        let busy = |number: &u32| {
            let operation = &self.operations[*number as usize];
            operation.fresh || operation.queued || operation.twice.is_some()
        };
        if members.iter().any(busy) {
            return;
        }
        let bucket = self.buckets.len() as u32;
        let mut told = vec![Told::Some(Vec::new()); self.rules.ranks];
        let mut since = None;
        for number in &members {
            let operation = &mut self.operations[*number as usize];
            operation.bucket = Some(bucket);
            for (rank, told) in told.iter_mut().enumerate() {
                if let Told::Some(some) = told
                    && std::mem::take(&mut operation.ready[rank])
                {
                    since = Some(since.unwrap_or(operation.since).min(operation.since));
                    some.push(*number);
                }
            }
            operation.missing = self.rules.ranks;
        }
        self.decisions.push(Decision::Freeze { bucket, members: members.clone() });
        let mut missing = self.rules.ranks;
        for told in &mut told {
            if matches!(told, Told::Some(some) if some.len() == members.len()) {
                *told = Told::All;
                missing -= 1;
            }
        }
        self.buckets.push(Bucket { members, told, missing, round: 0, since, thawed: false, step });
        self.settle_bucket(bucket);
    }

    /// No operation that waits was asked for before this; none waits if there is nothing.
    pub fn oldest(&self) -> Option<Duration> {
        self.oldest
    }

    /// When the operation that waits longest was asked for first.
    pub fn look_for_oldest(&mut self) -> Option<Duration> {
        self.oldest = self.waits().map(|wait| wait.since).min();
        self.oldest
    }

    /// Whom the operations wait for, oldest first.
    pub fn waits(&self) -> impl Iterator<Item = Wait<'_>> {
        let operations =
            self.operations.iter().filter(|operation| operation.missing < self.rules.ranks);
        let single =
            operations.filter(|operation| operation.bucket.is_none()).map(|operation| Wait {
                name: &operation.name,
                others: 0,
                request: &operation.request,
                missing: self.awaited(|rank| operation.ready[rank]),
                since: operation.since,
            });
        let buckets = self.buckets.iter().filter(|bucket| !bucket.thawed);
        let together = buckets.filter_map(|bucket| {
            let first = &self.operations[*bucket.members.first()? as usize];
            Some(Wait {
                name: &first.name,
                others: bucket.members.len() - 1,
                request: &first.request,
                missing: self.awaited(|rank| bucket.told[rank] == Told::All),
                since: bucket.since?,
            })
        });
        single.chain(together).filter(|wait| !wait.missing.is_empty())
    }

    fn awaited(&self, ready: impl Fn(usize) -> bool) -> Vec<usize> {
        (0..self.rules.ranks).filter(|rank| !ready(*rank) && !self.joined[*rank]).collect()
    }

    /// Whether anything waits for this rank: an operation, or others to join.
    pub fn waits_for(&self, rank: usize) -> bool {
        let join = self.joined.contains(&true) && !self.joined[rank];
        join || self.waits().any(|wait| wait.missing.contains(&rank))
    }
}

impl Bucket {
    fn next_round(&mut self, ranks: usize) {
        self.round += 1;
        self.told.fill(Told::Some(Vec::new()));
        self.missing = ranks;
        self.since = None;
    }
}

/// An operation that somebody waits for.
pub(crate) struct Wait<'a> {
    pub name: &'a str,
    /// How many more are in its bucket.
    pub others: usize,
    pub request: &'a Request,
    pub missing: Vec<usize>,
    pub since: Duration,
}

/// Why an operation cannot run without a rank that has joined; zeros stand in for it where they can.
fn without(rank: usize, request: &Request) -> Option<String> {
    let zeros = matches!(request.reduction, Reduction { op: ReduceOp::Sum | ReduceOp::Mean, .. });
    match request.kind {
        Kind::AllReduce if zeros => None,
        Kind::Barrier => None,
        _ => Some(format!(
            "rank {rank} has joined and takes no part: only sums and means go on without it, not {request}"
        )),
    }
}

/// The report: which operation waits for which ranks, and what these are doing.
pub(crate) fn report(
    coordinator: &Coordinator,
    doing: &[Option<Doing>],
    host: impl Fn(usize) -> String,
    now: Duration,
) -> String {
    const MOST: usize = 20;
    let mut waits: Vec<Wait<'_>> = coordinator.waits().collect();
    if waits.is_empty() {
        return "no operation waits for a rank".into();
    }
    waits.sort_by_key(|wait| wait.since);
    let mut lines = Vec::new();
    let mut absent: Vec<usize> = Vec::new();
    for wait in waits.iter().take(MOST) {
        let more = match wait.others {
            0 => String::new(),
            more => format!(" and {more} more in its bucket"),
        };
        let called = |rank: &usize| coordinator.called[*rank].to_string();
        let ranks: Vec<String> = wait.missing.iter().map(called).collect();
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        let (name, request) = (wait.name, wait.request);
        let time = crate::error::seconds(now.saturating_sub(wait.since));
        lines.push(format!(
            "{name}{more}, {request}, has waited {time} for {word} {}",
            ranks.join(", ")
        ));
        absent.extend(&wait.missing);
    }
    if waits.len() > MOST {
        lines.push(format!("{} more operations wait", waits.len() - MOST));
    }
    absent.sort_unstable();
    absent.dedup();
    for rank in absent {
        let said = match &doing[rank] {
            Some(Doing { what, milliseconds }) => {
                format!(
                    "{what} for {}",
                    crate::error::seconds(Duration::from_millis(*milliseconds))
                )
            }
            None => "it has not answered".into(),
        };
        lines.push(format!("rank {} on {}: {said}", coordinator.called[rank], host(rank)));
    }
    lines.join("\n")
}

/// How an operation is called in a timeline: its kind and name.
pub(crate) fn title(request: &Request, name: &str) -> String {
    format!("{}.{name}", request.kind.name())
}

#[cfg(test)]
mod tests;
