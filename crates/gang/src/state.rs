//! The life of a gang as a pure state machine: what happens goes in, what to do comes out.
//!
//! - GANG-1: all or nothing. Nothing of the user's starts before every agent has joined and every task has a place.
//! - GANG-2: one failure ends the whole attempt. The first one heard of is the job's error.
//! - GANG-3: attempt n + 1 starts only after every task of attempt n has ended, or its agent has been given up.
//! - GANG-4: an observer that was not scheduled for a second judges nobody by that time.

use crate::{
    Ending, Error, Event, Host, Outcome, Request, Stream, TaskInfo,
    error::seconds,
    placement::{Offer, place},
    policy::{Decision, Restarts, after_failure},
    protocol::{Assignment, FromAgent, Gathered, Hand, OVERSLEPT, SILENCE, Start, ToAgent},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

/// When a failure is told although tasks are still ending; mostly they have ended by then.
const AT_ONCE: Duration = Duration::from_millis(300);

/// What the machine is told.
#[derive(Debug)]
pub(crate) enum Input {
    /// An agent has proved who it is, and says what it has.
    Joined(usize, Hand),
    /// An agent's process or connection has ended.
    Gone(usize, String),
    Said(usize, FromAgent),
    /// Somebody wants the job to end.
    End(String),
    Pause,
    Resume,
    /// Time has passed.
    Tick,
}

/// What the machine wants done.
#[derive(Debug)]
pub(crate) enum Action {
    /// Start this agent.
    Launch(usize),
    /// End this agent, whatever it does.
    Dismiss(usize),
    Send(usize, ToAgent),
    /// Send an assignment, with credentials for its tasks if the job spans machines.
    Assign(usize, Assignment),
    Emit(Event),
    /// Show output; the agent gets credit for it once it has been shown.
    Show {
        agent: usize,
        rank: usize,
        stream: Stream,
        lines: Vec<u8>,
    },
    /// Every agent has stopped its tasks.
    Paused,
    Finish(Result<Outcome, Error>),
}

/// What the machine needs to know of the job.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub tasks: usize,
    pub hosts: Vec<Host>,
    pub request: Option<Request>,
    pub first_generation: u64,
    pub restarts: Restarts,
    pub start_limit: Duration,
    pub grace: Duration,
    pub command: Vec<Vec<u8>>,
    pub environment: Vec<(String, String)>,
    pub directory: Vec<u8>,
    /// Bytes of the payload.
    pub payload: u64,
}

#[derive(Debug)]
struct Member {
    hand: Option<Hand>,
    heard: Instant,
    paused: bool,
}

/// One generation of the gang.
#[derive(Debug)]
struct Attempt {
    generation: u64,
    since: Instant,
    /// By rank.
    agents: Vec<usize>,
    infos: Arc<Vec<TaskInfo>>,
    /// Agents whose tasks have not all been started.
    unstarted: BTreeSet<usize>,
    alive: BTreeSet<usize>,
    results: Vec<Option<Vec<u8>>>,
    rounds: BTreeMap<(String, u64), Vec<Option<Vec<u8>>>>,
    /// The first task that said it is about to fail, and why: others may be quicker to fail because of it.
    confessed: Option<(usize, String)>,
    /// Names of rendezvous that somebody gave up, and why.
    abandoned: BTreeMap<String, String>,
}

#[derive(Debug)]
enum Phase {
    Assembling {
        generation: u64,
        since: Instant,
        not_before: Instant,
        /// What ended the attempt before.
        cause: Option<String>,
    },
    Running(Attempt),
    /// At `tell` the user learns of a failure, if its error has not come first.
    Ending {
        attempt: Attempt,
        error: Error,
        again: bool,
        until: Instant,
        tell: Option<Instant>,
    },
    Over,
}

pub(crate) struct Machine {
    terms: Terms,
    members: Vec<Member>,
    phase: Phase,
    ticked: Instant,
    paused: bool,
    actions: Vec<Action>,
}

impl Machine {
    /// A machine that wants its agents launched.
    pub fn new(terms: Terms, now: Instant) -> (Self, Vec<Action>) {
        let generation = terms.first_generation;
        let member = |_: &Host| Member { hand: None, heard: now, paused: false };
        let machine = Self {
            members: terms.hosts.iter().map(member).collect(),
            terms,
            phase: Phase::Assembling { generation, since: now, not_before: now, cause: None },
            ticked: now,
            paused: false,
            actions: Vec::new(),
        };
        let missing = machine.terms.hosts.iter().map(|host| host.name.clone()).collect();
        let waiting = Event::Assembling { joined: Vec::new(), missing };
        let launches = (0..machine.members.len()).map(Action::Launch);
        let actions = launches.chain([Action::Emit(waiting)]).collect();
        (machine, actions)
    }

    /// One step.
    pub fn handle(&mut self, now: Instant, input: Input) -> Vec<Action> {
        if matches!(self.phase, Phase::Over) {
            return Vec::new();
        }
        match input {
            Input::Joined(agent, hand) => self.joined(now, agent, hand),
            Input::Gone(agent, reason) => self.gone(now, agent, &reason),
            Input::Said(agent, message) => {
                self.members[agent].heard = now;
                self.said(now, agent, message);
            }
            Input::End(reason) => self.interrupt(now, reason),
            Input::Pause => self.pause(),
            Input::Resume => self.resume(now),
            Input::Tick => self.tick(now),
        }
        std::mem::take(&mut self.actions)
    }

    fn joined(&mut self, now: Instant, agent: usize, hand: Hand) {
        if self.terms.request.is_some() {
            for problem in &hand.problems {
                self.note(format!("{}: {problem}", hand.host));
            }
        }
        self.members[agent] = Member { hand: Some(hand), heard: now, paused: false };
        if matches!(self.phase, Phase::Assembling { .. }) {
            let (here, missing): (Vec<_>, Vec<_>) =
                self.terms.hosts.iter().zip(&self.members).partition(|(_, m)| m.hand.is_some());
            let names =
                |of: Vec<(&Host, &Member)>| of.iter().map(|(h, _)| h.name.clone()).collect();
            let event = Event::Assembling { joined: names(here), missing: names(missing) };
            self.actions.push(Action::Emit(event));
            self.start_if_ready(now);
        }
    }

    fn missing(&self) -> Vec<&str> {
        let missing = self.terms.hosts.iter().zip(&self.members).filter(|(_, m)| m.hand.is_none());
        missing.map(|(host, _)| host.name.as_str()).collect()
    }

    fn start_if_ready(&mut self, now: Instant) {
        let Phase::Assembling { generation, not_before, .. } = self.phase else { return };
        let hands: Vec<&Hand> = self.members.iter().filter_map(|m| m.hand.as_ref()).collect();
        if now < not_before || hands.len() < self.members.len() || self.paused {
            return;
        }
        // Machines that have the same name are told apart by what the user calls them.
        let name = |agent: usize, hand: &Hand| {
            let alike = |other: &&Hand| other.host == hand.host && other.machine != hand.machine;
            let own = || self.terms.hosts[agent].name.clone();
            if hands.iter().any(alike) { own() } else { hand.host.clone() }
        };
        let offers: Vec<Offer> = hands
            .iter()
            .enumerate()
            .map(|(agent, hand)| Offer {
                host: name(agent, hand),
                slots: hand.slots,
                accelerators: hand.accelerators.clone(),
            })
            .collect();
        let placement = match place(&offers, self.terms.tasks, self.terms.request.as_ref()) {
            Ok(placement) => placement,
            Err(reason) => return self.finish(Err(Error::NotPlaced(reason))),
        };
        let info = |seat: &crate::placement::Seat| TaskInfo {
            rank: seat.rank,
            local_rank: seat.local_rank,
            local_size: seat.local_size,
            cross_rank: seat.cross_rank,
            cross_size: seat.cross_size,
            host: offers[seat.offer].host.clone(),
            address: hands[seat.offer].address,
            accelerators: seat.accelerators.clone(),
        };
        let infos = Arc::new(placement.seats.iter().map(info).collect::<Vec<_>>());
        let agents: Vec<usize> = placement.seats.iter().map(|seat| seat.offer).collect();
        let needed: BTreeSet<usize> = agents.iter().copied().collect();
        placement.notes.into_iter().for_each(|note| self.note(note));
        for &agent in &needed {
            let mine = (0..agents.len()).filter(|rank| agents[*rank] == agent);
            let assignment = Assignment {
                generation,
                tasks: mine.map(|rank| Start { rank, credentials: None }).collect(),
                infos: Arc::clone(&infos),
                command: self.terms.command.clone(),
                environment: self.terms.environment.clone(),
                directory: self.terms.directory.clone(),
                accelerator: self.terms.request.as_ref().map(|r| r.path.kind().to_owned()),
                grace: self.terms.grace,
                payload: self.terms.payload,
            };
            self.actions.push(Action::Assign(agent, assignment));
        }
        self.phase = Phase::Running(Attempt {
            generation,
            since: now,
            alive: (0..agents.len()).collect(),
            results: vec![None; agents.len()],
            agents,
            infos,
            unstarted: needed,
            rounds: BTreeMap::new(),
            confessed: None,
            abandoned: BTreeMap::new(),
        });
    }

    fn gone(&mut self, now: Instant, agent: usize, reason: &str) {
        self.members[agent].hand = None;
        let name = self.terms.hosts[agent].name.clone();
        match &mut self.phase {
            Phase::Assembling { .. } => self.not_assembled(format!("the agent on {name} {reason}")),
            Phase::Running(attempt) => {
                if let Some(rank) = attempt.first_of(agent) {
                    self.fail(
                        now,
                        rank,
                        Ending::Lost(format!("its agent {reason}")),
                        String::new(),
                    );
                    self.bury(now, agent);
                }
            }
            Phase::Ending { .. } => self.bury(now, agent),
            Phase::Over => {}
        }
    }

    fn not_assembled(&mut self, mut reason: String) {
        if let Phase::Assembling { cause: Some(cause), .. } = &self.phase {
            reason = format!("{reason}; it was to start again after {cause}");
        }
        self.finish(Err(Error::NotAssembled(reason)));
    }

    /// Counts every task of an agent that is gone as ended.
    fn bury(&mut self, now: Instant, agent: usize) {
        if let Phase::Ending { attempt, .. } = &mut self.phase {
            let agents = &attempt.agents;
            attempt.alive.retain(|rank| agents[*rank] != agent);
            self.conclude_if_ended(now);
        }
    }

    fn said(&mut self, now: Instant, agent: usize, message: FromAgent) {
        if message.rank().is_some_and(|rank| !self.is_of(rank, agent)) {
            return;
        }
        match message {
            FromAgent::Beat | FromAgent::Hand(_) => {}
            FromAgent::Paused => {
                self.members[agent].paused = true;
                if self.paused && self.members.iter().all(|m| m.paused || m.hand.is_none()) {
                    self.actions.push(Action::Paused);
                }
            }
            FromAgent::Started { generation } => {
                let Some(attempt) = self.running(generation) else { return };
                let was_waiting = attempt.unstarted.remove(&agent);
                if was_waiting && attempt.unstarted.is_empty() {
                    let tasks = attempt.infos.to_vec();
                    self.actions.push(Action::Emit(Event::Started { generation, tasks }));
                }
            }
            FromAgent::Output { generation: _, rank, stream, lines } => {
                self.actions.push(Action::Show { agent, rank, stream, lines });
            }
            FromAgent::Confessed { generation, rank, traceback } => {
                if let Some(attempt) = self.running(generation) {
                    attempt.confessed.get_or_insert((rank, traceback));
                }
            }
            FromAgent::Failed { generation, rank, ending, last, by_itself } => {
                if let Phase::Ending { error, attempt, .. } = &mut self.phase {
                    let Error::TaskFailed { rank: first, ending: known, .. } = error else {
                        return;
                    };
                    let current = attempt.generation == generation;
                    if *first == rank && *known == Ending::Failed {
                        // How the one that confessed has ended, now that it has.
                        if let Ending::Exited(_) = ending {
                            *known = ending;
                        }
                    } else if let (Ending::Exited(_), Ending::Signalled(9), true) =
                        (&*known, &ending, by_itself && current)
                    {
                        // Nobody is killed because another has failed, but others give up because one was killed, and
                        // news of them may be quicker.
                        let host = attempt.infos[rank].host.clone();
                        *error = Error::TaskFailed { rank, host, generation, ending, last };
                    }
                    return;
                }
                if self.running(generation).is_some_and(|attempt| rank < attempt.infos.len()) {
                    self.fail(now, rank, ending, last);
                }
            }
            FromAgent::Ended { generation, rank, ending } => {
                self.ended(now, generation, rank, ending)
            }
            FromAgent::Gather { generation, rank, name, round, message } => {
                self.gather(generation, rank, name, round, message);
            }
            FromAgent::Abandon { generation, rank, name, reason } => {
                let reason = format!("rank {rank} gave up: {reason}");
                self.abandon(generation, &name, &reason);
            }
            FromAgent::Leaving { generation, reason } => {
                if let Some(rank) = self.running(generation).and_then(|a| a.first_of(agent)) {
                    let ending = Ending::Lost(format!("its agent leaves: {reason}"));
                    self.fail(now, rank, ending, String::new());
                }
            }
            FromAgent::Result { generation, rank, piece } => {
                if let Some(result) = self.running(generation).and_then(|a| a.results.get_mut(rank))
                {
                    result.get_or_insert_default().extend(piece);
                }
            }
        }
    }

    /// Whether an agent has started a rank, now or in the attempt that is ending.
    fn is_of(&self, rank: usize, agent: usize) -> bool {
        match &self.phase {
            Phase::Running(attempt) | Phase::Ending { attempt, .. } => {
                attempt.agents.get(rank) == Some(&agent)
            }
            // The last output of an attempt.
            Phase::Assembling { .. } | Phase::Over => rank < self.terms.tasks,
        }
    }

    fn running(&mut self, of: u64) -> Option<&mut Attempt> {
        match &mut self.phase {
            Phase::Running(attempt) if attempt.generation == of => Some(attempt),
            _ => None,
        }
    }

    fn ended(&mut self, now: Instant, of: u64, rank: usize, ending: Ending) {
        match &mut self.phase {
            Phase::Running(attempt) if attempt.generation == of => {
                if !attempt.alive.remove(&rank) {
                    return;
                }
                if ending != Ending::Exited(0) {
                    return self.fail(now, rank, ending, String::new());
                }
                if attempt.alive.is_empty() {
                    let results = std::mem::take(&mut attempt.results);
                    let ran_for = now.saturating_duration_since(attempt.since);
                    return self.finish(Ok(Outcome { generation: of, results, ran_for }));
                }
                let open = |(_, messages): &(&(String, u64), &Vec<Option<Vec<u8>>>)| {
                    messages[rank].is_none()
                };
                let names: BTreeSet<String> =
                    attempt.rounds.iter().filter(open).map(|((name, _), _)| name.clone()).collect();
                for name in names {
                    self.abandon(of, &name, &format!("rank {rank} has ended"));
                }
            }
            Phase::Ending { attempt, .. } if attempt.generation == of => {
                attempt.alive.remove(&rank);
                self.conclude_if_ended(now);
            }
            _ => {}
        }
    }

    fn gather(&mut self, of: u64, rank: usize, name: String, round: u64, message: Vec<u8>) {
        let Some(attempt) = self.running(of) else { return };
        // A rank that was not there yet when it was abandoned would wait for ever.
        if let Some(reason) = attempt.abandoned.get(&name).cloned() {
            return self.abandon(of, &name, &reason);
        }
        let size = attempt.agents.len();
        let messages =
            attempt.rounds.entry((name.clone(), round)).or_insert_with(|| vec![None; size]);
        let Some(place) = messages.get_mut(rank) else { return };
        *place = Some(message);
        let ended = (0..size).find(|r| messages[*r].is_none() && !attempt.alive.contains(r));
        if let Some(ended) = ended {
            return self.abandon(of, &name, &format!("rank {ended} has ended"));
        }
        if messages.iter().all(Option::is_some) {
            let messages = messages.iter_mut().filter_map(Option::take).collect();
            attempt.rounds.remove(&(name.clone(), round));
            let gathered = Arc::new(Gathered { generation: of, name, round, messages });
            self.tell_all(|| ToAgent::Gathered(Arc::clone(&gathered)));
        }
    }

    fn abandon(&mut self, of: u64, name: &str, reason: &str) {
        let Some(attempt) = self.running(of) else { return };
        attempt.rounds.retain(|(other, _), _| other != name);
        let (name, reason) = (name.to_owned(), reason.to_owned());
        attempt.abandoned.insert(name.clone(), reason.clone());
        self.tell_all(|| ToAgent::Abandoned {
            generation: of,
            name: name.clone(),
            reason: reason.clone(),
        });
    }

    /// To every agent that has tasks in the current attempt.
    fn tell_all(&mut self, message: impl Fn() -> ToAgent) {
        let (Phase::Running(attempt) | Phase::Ending { attempt, .. }) = &self.phase else { return };
        let agents: BTreeSet<usize> = attempt.agents.iter().copied().collect();
        let there = agents.into_iter().filter(|agent| self.members[*agent].hand.is_some());
        self.actions.extend(there.map(|agent| Action::Send(agent, message())));
    }

    /// Ends the attempt because of one rank (GANG-2).
    fn fail(&mut self, now: Instant, rank: usize, ending: Ending, last: String) {
        let Phase::Running(attempt) = &self.phase else { return };
        let (rank, ending, last) = match &attempt.confessed {
            Some((first, traceback)) if *first != rank => {
                (*first, Ending::Failed, traceback.clone())
            }
            _ => (rank, ending, last),
        };
        let host = attempt.infos[rank].host.clone();
        let generation = attempt.generation;
        let error = Error::TaskFailed { rank, host, generation, ending, last };
        self.end(now, error, true);
    }

    fn end(&mut self, now: Instant, error: Error, again: bool) {
        let phase = std::mem::replace(&mut self.phase, Phase::Over);
        let Phase::Running(attempt) = phase else { return self.finish(Err(error)) };
        let generation = attempt.generation;
        let reason = error.to_string();
        let until = now + self.terms.grace + SILENCE;
        let tell = again.then(|| now + AT_ONCE);
        self.phase = Phase::Ending { attempt, error, again, until, tell };
        self.tell_all(|| ToAgent::End { generation, reason: reason.clone() });
        self.conclude_if_ended(now);
    }

    /// Names a failure while the other tasks take their time to end.
    fn tell(&mut self, now: Instant) {
        let Phase::Ending { attempt, error, tell, .. } = &mut self.phase else { return };
        if tell.take_if(|at| now >= *at).is_some() {
            let what = error.to_string();
            let what = what.lines().next().unwrap_or_default();
            let text = format!("{what}; waiting for {} more to end", attempt.alive.len());
            self.note(text);
        }
    }

    fn interrupt(&mut self, now: Instant, reason: String) {
        self.tell(now + AT_ONCE);
        if let Phase::Ending { again, error, .. } = &mut self.phase {
            *again = false;
            *error = Error::Interrupted(reason);
            return;
        }
        self.end(now, Error::Interrupted(reason), false);
    }

    /// Restarts or finishes once nothing of the attempt is left (GANG-3).
    fn conclude_if_ended(&mut self, now: Instant) {
        if !matches!(&self.phase, Phase::Ending { attempt, .. } if attempt.alive.is_empty()) {
            return;
        }
        let phase = std::mem::replace(&mut self.phase, Phase::Over);
        let Phase::Ending { attempt, error, again, .. } = phase else { return };
        if !again {
            return self.finish(Err(error));
        }
        let ran_for = now.saturating_duration_since(attempt.since);
        // The last lines of the task follow the first one, and have been shown already.
        let what = error.to_string();
        let what = what.lines().next().unwrap_or_default();
        match after_failure(&self.terms.restarts, attempt.generation, what, ran_for) {
            Decision::Stop { reason } => {
                if attempt.generation > 0 {
                    self.note(reason);
                }
                self.finish(Err(error));
            }
            Decision::Restart { after, reason } => {
                let generation = attempt.generation + 1;
                self.actions.push(Action::Emit(Event::Restarting { generation, after, reason }));
                let not_before = now + after;
                let cause = Some(what.to_owned());
                self.phase = Phase::Assembling { generation, since: not_before, not_before, cause };
                let gone = (0..self.members.len()).filter(|i| self.members[*i].hand.is_none());
                self.actions.extend(gone.map(Action::Launch));
            }
        }
    }

    fn pause(&mut self) {
        self.paused = true;
        for agent in 0..self.members.len() {
            self.members[agent].paused = false;
            if self.members[agent].hand.is_some() {
                self.actions.push(Action::Send(agent, ToAgent::Pause));
            }
        }
        if self.members.iter().all(|member| member.hand.is_none()) {
            self.actions.push(Action::Paused);
        }
    }

    fn resume(&mut self, now: Instant) {
        if !std::mem::take(&mut self.paused) {
            return;
        }
        self.forgive(now);
        self.ticked = now;
        for agent in 0..self.members.len() {
            if self.members[agent].hand.is_some() {
                self.actions.push(Action::Send(agent, ToAgent::Resume));
            }
        }
    }

    /// Takes the time since the last tick, in which nobody could be judged, out of all deadlines.
    fn forgive(&mut self, now: Instant) {
        let time = now.saturating_duration_since(self.ticked);
        // Whoever spoke meanwhile has no more time than others.
        self.members.iter_mut().for_each(|member| member.heard = now.min(member.heard + time));
        match &mut self.phase {
            Phase::Assembling { since, .. } => *since += time,
            Phase::Ending { until, .. } => *until += time,
            Phase::Running(_) | Phase::Over => {}
        }
    }

    fn tick(&mut self, now: Instant) {
        if self.paused {
            return;
        }
        if now.saturating_duration_since(self.ticked) > OVERSLEPT {
            self.forgive(now);
        }
        self.ticked = now;
        let silent: Vec<usize> = (0..self.members.len())
            .filter(|agent| self.members[*agent].hand.is_some())
            .filter(|agent| now.saturating_duration_since(self.members[*agent].heard) > SILENCE)
            .collect();
        for agent in silent {
            self.actions.push(Action::Dismiss(agent));
            self.gone(now, agent, &format!("gave no sign of life for {}", seconds(SILENCE)));
        }
        self.tell(now);
        match &mut self.phase {
            Phase::Assembling { since, .. }
                if now.saturating_duration_since(*since) > self.terms.start_limit =>
            {
                let missing = self.missing().join(", ");
                let reason = format!(
                    "after {} no agent has joined from {missing}; see whether the host is up, whether the same \
                     version of deuteron is installed there, and whether it can reach this machine (--interface)",
                    seconds(self.terms.start_limit)
                );
                self.not_assembled(reason);
            }
            Phase::Assembling { .. } => self.start_if_ready(now),
            Phase::Ending { attempt, until, .. } if now > *until => {
                let left: BTreeSet<usize> =
                    attempt.alive.iter().map(|rank| attempt.agents[*rank]).collect();
                for agent in left {
                    self.actions.push(Action::Dismiss(agent));
                    self.members[agent].hand = None;
                    self.bury(now, agent);
                }
            }
            _ => {}
        }
    }

    fn finish(&mut self, outcome: Result<Outcome, Error>) {
        self.phase = Phase::Over;
        self.actions.push(Action::Finish(outcome));
    }

    fn note(&mut self, text: String) {
        self.actions.push(Action::Emit(Event::Note(text)));
    }
}

impl Attempt {
    fn first_of(&self, agent: usize) -> Option<usize> {
        self.alive.iter().copied().find(|rank| self.agents[*rank] == agent)
    }
}

#[cfg(test)]
mod tests;
