//! The state machine against a model of agents and tasks, over random programs of what can happen to a gang.
//!
//! The model knows only what goes in and what comes out. It plays agents that join, fall silent and go, and tasks that
//! end, fail and meet, as the supervisor lets them: an agent that has been dismissed neither speaks nor goes.

use super::*;
use crate::testing::{Limit, hand};
use proptest::prelude::*;

const TICK: Duration = Duration::from_millis(100);
const GRACE: Duration = Duration::from_secs(1);
const START_LIMIT: Duration = Duration::from_secs(10);
const NAMES: [&str; 2] = ["", "group 0"];

/// Something happens; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    Join(usize),
    Lose(usize),
    Started(usize),
    Exit(usize, bool),
    Fail(usize),
    Gather(usize, usize),
    Abandon(usize, usize),
    /// A message of a generation that is not the current one.
    Stale(usize),
    End,
    Pause,
    Resume,
    /// So many ticks, with signs of life from everybody who is not mute.
    Wait(u32),
    Mute(usize),
    Oversleep(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let number = 0usize..12;
    prop_oneof![
        10 => number.clone().prop_map(Step::Join),
        2 => number.clone().prop_map(Step::Lose),
        3 => number.clone().prop_map(Step::Started),
        6 => (number.clone(), prop::bool::weighted(0.8)).prop_map(|(rank, well)| Step::Exit(rank, well)),
        2 => number.clone().prop_map(Step::Fail),
        20 => (number.clone(), 0..NAMES.len()).prop_map(|(rank, name)| Step::Gather(rank, name)),
        1 => (number.clone(), 0..NAMES.len()).prop_map(|(rank, name)| Step::Abandon(rank, name)),
        2 => number.clone().prop_map(Step::Stale),
        1 => Just(Step::End),
        1 => Just(Step::Pause),
        2 => Just(Step::Resume),
        8 => (1u32..80).prop_map(Step::Wait),
        2 => number.prop_map(Step::Mute),
        2 => (900u64..20_000).prop_map(Step::Oversleep),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Where {
    Away,
    Launched,
    Joined,
}

struct Agent {
    at: Where,
    mute: bool,
    heard: Instant,
    /// Silence that counts, up to the last tick.
    silence: Duration,
}

/// What the ranks of the current generation have said under one name.
#[derive(Clone, Default)]
struct Meeting {
    round: u64,
    said: BTreeMap<usize, Vec<u8>>,
    abandoned: bool,
}

/// What one step must make the machine tell everybody.
#[derive(Debug, PartialEq)]
enum Told {
    Gathered(Gathered),
    Abandoned(String),
}

struct World {
    machine: Machine,
    now: Instant,
    ticked: Instant,
    paused: bool,
    agents: Vec<Agent>,
    tasks: usize,
    most: u32,
    /// The generation that runs or ran last.
    generation: Option<u64>,
    running: bool,
    /// By rank.
    seats: Vec<usize>,
    alive: BTreeSet<usize>,
    /// The first failure of the generation.
    failure: Option<(usize, Ending)>,
    interrupted: bool,
    /// When everybody was told to end.
    ending_since: Option<Instant>,
    meetings: Vec<Meeting>,
    /// In this step: what must be told, who has been lost.
    expected: Vec<Told>,
    lost: BTreeSet<usize>,
    finished: usize,
}

impl World {
    fn new(slots: &[u32], tasks: usize, most: u32, pause: Duration) -> Self {
        let now = Instant::now();
        let name = |(i, slots): (usize, &u32)| Host { name: format!("h{i}"), slots: *slots };
        let terms = Terms {
            tasks,
            hosts: slots.iter().enumerate().map(name).collect(),
            request: None,
            first_generation: 0,
            restarts: Restarts { most, first_pause: pause, longest_pause: pause },
            start_limit: START_LIMIT,
            grace: GRACE,
            command: vec![b"true".to_vec()],
            environment: Vec::new(),
            directory: Vec::new(),
            payload: 0,
        };
        let (machine, first) = Machine::new(terms, now);
        let agent = |_| Agent { at: Where::Away, mute: false, heard: now, silence: Duration::ZERO };
        let mut world = Self {
            machine,
            now,
            ticked: now,
            paused: false,
            agents: (0..slots.len()).map(agent).collect(),
            tasks,
            most,
            generation: None,
            running: false,
            seats: Vec::new(),
            alive: BTreeSet::new(),
            failure: None,
            interrupted: false,
            ending_since: None,
            meetings: Vec::new(),
            expected: Vec::new(),
            lost: BTreeSet::new(),
            finished: 0,
        };
        world.check(first);
        assert!(world.agents.iter().all(|agent| agent.at == Where::Launched));
        world
    }

    fn at(&self, at: Where) -> impl Iterator<Item = usize> {
        (0..self.agents.len()).filter(move |agent| self.agents[*agent].at == at)
    }

    fn hand(&self, agent: usize) -> Hand {
        let host = &self.machine.terms.hosts[agent];
        hand(&host.name, host.slots)
    }

    fn step(&mut self, step: &Step) {
        let agents = self.agents.len();
        let (alive, count) = (&self.alive, self.alive.len().max(1));
        let living = |number: usize| alive.iter().copied().nth(number % count);
        // A rank that its agent can still speak of.
        let speaker = |number| living(number).filter(|rank| self.speaks(self.seats[*rank]));
        let generation = self.generation.unwrap_or_default();
        match *step {
            Step::Join(agent) => {
                if self.agents[agent % agents].at == Where::Launched {
                    self.join(agent % agents);
                }
            }
            Step::Lose(agent) => {
                let agent = agent % agents;
                if self.agents[agent].at != Where::Away {
                    self.gone(agent, "its agent has ended");
                    self.give(Input::Gone(agent, "has ended".into()));
                }
            }
            Step::Started(agent) => self.say(agent % agents, FromAgent::Started { generation }),
            Step::Exit(number, well) => {
                if let Some(rank) = speaker(number) {
                    self.exit(rank, Ending::Exited(if well { 0 } else { 3 }));
                }
            }
            Step::Fail(number) => {
                if let Some(rank) = speaker(number) {
                    let ending = Ending::Signalled(11);
                    self.failed(rank, ending.clone());
                    let message = FromAgent::Failed {
                        generation,
                        rank,
                        ending,
                        last: "x".into(),
                        by_itself: true,
                    };
                    self.say(self.seats[rank], message);
                }
            }
            Step::Gather(number, name) => {
                if let Some(rank) = speaker(number) {
                    self.gather(rank, name);
                }
            }
            Step::Abandon(number, name) => {
                if let Some(rank) = speaker(number) {
                    if self.running {
                        self.meetings[name] = Meeting { abandoned: true, ..Meeting::default() };
                        self.expected.push(Told::Abandoned(NAMES[name].into()));
                    }
                    let (name, reason) = (NAMES[name].into(), "no".into());
                    let message = FromAgent::Abandon { generation, rank, name, reason };
                    self.say(self.seats[rank], message);
                }
            }
            Step::Stale(number) => {
                // One generation off is the hardest to tell apart.
                let generation =
                    if number % 2 == 0 { generation + 1 } else { generation.wrapping_sub(1) };
                let rank = number % self.tasks;
                let name = NAMES[0].to_owned();
                let message = match number % 5 {
                    0 => FromAgent::Failed {
                        generation,
                        rank,
                        ending: Ending::Failed,
                        last: String::new(),
                        by_itself: true,
                    },
                    1 => FromAgent::Ended { generation, rank, ending: Ending::Exited(1) },
                    2 => FromAgent::Gather { generation, rank, name, round: 0, message: vec![9] },
                    3 => FromAgent::Abandon { generation, rank, name, reason: String::new() },
                    _ => FromAgent::Result { generation, rank, piece: vec![9] },
                };
                self.say(number % agents, message);
            }
            Step::End => {
                self.interrupted |= self.finished == 0;
                if self.running {
                    self.stop();
                }
                self.give(Input::End("the user".into()));
            }
            Step::Pause => {
                self.paused = true;
                self.give(Input::Pause);
                for agent in 0..agents {
                    self.say(agent, FromAgent::Paused);
                }
            }
            Step::Resume => self.resume(),
            Step::Wait(ticks) => {
                for number in 0..ticks {
                    self.pass(TICK, number % 5 == 0);
                }
            }
            Step::Mute(agent) => self.agents[agent % agents].mute ^= true,
            Step::Oversleep(time) => self.pass(Duration::from_millis(time), false),
        }
        self.expected.clear();
        self.lost.clear();
    }

    fn speaks(&self, agent: usize) -> bool {
        self.agents[agent].at == Where::Joined && !self.agents[agent].mute
    }

    fn join(&mut self, agent: usize) {
        let (heard, silence) = (self.now, Duration::ZERO);
        self.agents[agent] = Agent { at: Where::Joined, mute: false, heard, silence };
        self.give(Input::Joined(agent, self.hand(agent)));
    }

    fn say(&mut self, agent: usize, message: FromAgent) {
        if self.speaks(agent) {
            self.agents[agent].heard = self.now;
            self.agents[agent].silence = Duration::ZERO;
            self.give(Input::Said(agent, message));
        }
    }

    fn resume(&mut self) {
        if std::mem::take(&mut self.paused) {
            self.forgive();
        }
        self.give(Input::Resume);
    }

    /// Nobody is judged by the time since the last tick.
    fn forgive(&mut self) {
        let time = self.now - self.ticked;
        self.agents.iter_mut().for_each(|agent| agent.heard = self.now);
        self.ending_since = self.ending_since.map(|since| since + time);
        self.ticked = self.now;
    }

    /// Time passes, then comes a tick.
    fn pass(&mut self, time: Duration, beat: bool) {
        self.now += time;
        if beat {
            (0..self.agents.len()).for_each(|agent| self.say(agent, FromAgent::Beat));
        }
        if !self.paused {
            if self.now - self.ticked > OVERSLEPT {
                self.forgive();
            }
            self.ticked = self.now;
            for agent in &mut self.agents {
                agent.silence += self.now - agent.heard;
                agent.heard = self.now;
            }
            let silent: Vec<usize> =
                self.at(Where::Joined).filter(|i| self.agents[*i].silence > SILENCE).collect();
            for agent in silent {
                self.gone(agent, "its agent gave no sign of life for 5.0 s");
            }
        }
        self.give(Input::Tick);
        self.expected.clear();
        self.lost.clear();
    }

    /// An agent is lost, and its tasks with it.
    fn gone(&mut self, agent: usize, _why: &str) {
        self.agents[agent].at = Where::Away;
        self.lost.insert(agent);
        let first = self.alive.iter().copied().find(|rank| self.seats[*rank] == agent);
        if let Some(rank) = first {
            self.failed(rank, Ending::Lost(String::new()));
        }
        self.alive.retain(|rank| self.seats[*rank] != agent);
    }

    fn exit(&mut self, rank: usize, ending: Ending) {
        self.alive.remove(&rank);
        if ending != Ending::Exited(0) {
            self.failed(rank, ending.clone());
        } else if self.running && !self.alive.is_empty() {
            for (meeting, name) in self.meetings.iter_mut().zip(NAMES) {
                if !meeting.said.is_empty() && !meeting.said.contains_key(&rank) {
                    *meeting = Meeting { abandoned: true, ..Meeting::default() };
                    self.expected.push(Told::Abandoned(name.into()));
                }
            }
        }
        let generation = self.generation.unwrap_or_default();
        self.say(self.seats[rank], FromAgent::Ended { generation, rank, ending });
    }

    /// The first failure counts, and nothing else of the generation does after it.
    fn failed(&mut self, rank: usize, ending: Ending) {
        if self.running {
            self.failure = Some((rank, ending));
            self.stop();
        }
    }

    fn stop(&mut self) {
        self.running = false;
        self.ending_since = Some(self.now);
        self.meetings.clear();
    }

    fn gather(&mut self, rank: usize, name: usize) {
        let generation = self.generation.unwrap_or_default();
        let mut round = 0;
        let text = vec![rank as u8, name as u8];
        if self.running {
            let meeting = &mut self.meetings[name];
            if meeting.said.contains_key(&rank) {
                return; // It waits for the others.
            }
            round = meeting.round;
            meeting.said.insert(rank, text.clone());
            let gave_up = |r: usize| !self.alive.contains(&r) && !meeting.said.contains_key(&r);
            let told = NAMES[name].to_owned();
            if meeting.abandoned || (0..self.tasks).any(gave_up) {
                *meeting = Meeting { abandoned: true, ..Meeting::default() };
                self.expected.push(Told::Abandoned(told));
            } else if meeting.said.len() == self.tasks {
                let messages = std::mem::take(&mut meeting.said).into_values().collect();
                meeting.round += 1;
                let gathered = Gathered { generation, name: told, round, messages };
                self.expected.push(Told::Gathered(gathered));
            }
        }
        let (name, message) = (NAMES[name].to_owned(), text);
        self.say(self.seats[rank], FromAgent::Gather { generation, rank, name, round, message });
    }

    fn give(&mut self, input: Input) {
        let over = self.finished > 0;
        let actions = self.machine.handle(self.now, input);
        assert!(!over || actions.is_empty(), "after the end: {actions:?}");
        self.check(actions);
    }

    fn check(&mut self, actions: Vec<Action>) {
        let mut told: Vec<(usize, Told)> = Vec::new();
        let mut assigned = BTreeMap::new();
        let mut generations = BTreeSet::new();
        let mut ends = BTreeSet::new();
        for action in actions {
            match action {
                Action::Launch(agent) => {
                    assert_eq!(self.agents[agent].at, Where::Away, "agent {agent} is there");
                    self.agents[agent].at = Where::Launched;
                }
                Action::Dismiss(agent) => {
                    // Either it was silent, which the model has seen, or its tasks have outlived their grace.
                    if !self.lost.remove(&agent) {
                        let since = self.ending_since.expect("nothing is ending");
                        assert!(self.now - since > GRACE + SILENCE, "agent {agent} had time");
                        assert_eq!(self.agents[agent].at, Where::Joined);
                        self.agents[agent].at = Where::Away;
                        self.alive.retain(|rank| self.seats[*rank] != agent);
                    }
                }
                Action::Assign(agent, assignment) => {
                    assert_eq!(self.at(Where::Joined).count(), self.agents.len(), "GANG-1");
                    assert!(
                        self.alive.is_empty(),
                        "GANG-3: {:?} of the last are alive",
                        self.alive
                    );
                    assert!(!self.paused);
                    generations.insert(assignment.generation);
                    for task in &assignment.tasks {
                        assert_eq!(assigned.insert(task.rank, agent), None, "a rank twice");
                    }
                }
                Action::Send(agent, message) => {
                    let there =
                        self.agents[agent].at == Where::Joined || self.lost.contains(&agent);
                    assert!(there, "{message:?} to nobody");
                    match message {
                        ToAgent::Gathered(gathered) => {
                            told.push((agent, Told::Gathered((*gathered).clone())));
                        }
                        ToAgent::Abandoned { name, .. } => {
                            told.push((agent, Told::Abandoned(name)))
                        }
                        ToAgent::End { generation, .. } => {
                            assert_eq!(Some(generation), self.generation);
                            assert!(ends.insert(agent), "told twice to end");
                        }
                        _ => {}
                    }
                }
                Action::Finish(outcome) => {
                    self.finished += 1;
                    assert_eq!(self.finished, 1, "finished twice");
                    self.check_outcome(outcome);
                }
                Action::Emit(_) | Action::Show { .. } | Action::Paused => {}
            }
        }
        if !generations.is_empty() {
            self.check_assigned(&generations, &assigned);
        }
        // Everybody who has tasks and is there hears the same, once.
        let agents: BTreeSet<usize> = self.seats.iter().copied().collect();
        for agent in agents.into_iter().filter(|agent| self.agents[*agent].at == Where::Joined) {
            let heard: Vec<&Told> =
                told.iter().filter(|(i, _)| *i == agent).map(|(_, t)| t).collect();
            assert_eq!(heard, self.expected.iter().collect::<Vec<_>>(), "agent {agent}");
        }
        self.expected.clear();
    }

    fn check_assigned(&mut self, generations: &BTreeSet<u64>, assigned: &BTreeMap<usize, usize>) {
        let next = self.generation.map_or(0, |last| last + 1);
        assert_eq!(
            generations.iter().collect::<Vec<_>>(),
            [&next],
            "generations follow each other"
        );
        assert!(next <= self.most.into(), "more restarts than asked for");
        assert!(next == 0 || self.failure.is_some(), "nothing had failed");
        assert!(assigned.keys().copied().eq(0..self.tasks), "every rank once: {assigned:?}");
        self.generation = Some(next);
        self.running = true;
        self.seats = assigned.values().copied().collect();
        self.alive = (0..self.tasks).collect();
        self.failure = None;
        self.ending_since = None;
        self.meetings = vec![Meeting::default(); NAMES.len()];
    }

    fn check_outcome(&mut self, outcome: Result<Outcome, Error>) {
        match outcome {
            Ok(outcome) => {
                assert!(self.alive.is_empty() && self.failure.is_none() && !self.interrupted);
                assert_eq!(Some(outcome.generation), self.generation);
                assert!(outcome.results.iter().all(Option::is_none), "a stale result");
            }
            Err(Error::TaskFailed { rank, ending, generation, .. }) => {
                assert!(self.alive.is_empty(), "GANG-3");
                assert_eq!(Some(generation), self.generation);
                assert_eq!(generation, u64::from(self.most), "restarts are left");
                let (first, how) = self.failure.clone().expect("nothing failed");
                assert_eq!(rank, first, "GANG-2");
                match (&how, &ending) {
                    (Ending::Lost(_), Ending::Lost(_)) => {}
                    _ => assert_eq!(how, ending, "GANG-2"),
                }
            }
            Err(Error::Interrupted(_)) => assert!(self.interrupted),
            Err(Error::NotAssembled(reason)) => {
                assert!(!self.running && self.alive.is_empty());
                let late = reason.contains("no agent has joined from");
                assert!(late || reason.starts_with("the agent on h"), "{reason}");
            }
            Err(other) => panic!("{other}"),
        }
        self.running = false;
    }

    /// Nobody disturbs any more: it has to end.
    fn settle(&mut self) {
        self.resume();
        for _ in 0..1000 {
            if self.finished > 0 {
                break;
            }
            for agent in self.at(Where::Launched).collect::<Vec<_>>() {
                self.join(agent);
            }
            self.agents.iter_mut().for_each(|agent| agent.mute = false);
            for rank in self.alive.clone() {
                let ending = if self.running { Ending::Exited(0) } else { Ending::Signalled(15) };
                self.exit(rank, ending);
            }
            self.pass(TICK, true);
        }
        assert_eq!(self.finished, 1, "it goes on for ever");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_gang_stands_and_falls_together(
        slots in prop::collection::vec(1u32..=2, 1..=3),
        missing in 0u32..3,
        most in 0u32..3,
        pause in 0u64..2,
        assembled: bool,
        steps in prop::collection::vec(step(), 0..80),
    ) {
        let _limit = Limit::seconds(60);
        let tasks = (slots.iter().sum::<u32>() - missing.min(slots.len() as u32 - 1)) as usize;
        let mut world = World::new(&slots, tasks, most, Duration::from_secs(pause));
        if assembled {
            (0..slots.len()).for_each(|agent| world.join(agent));
        }
        for step in &steps {
            world.step(step);
        }
        world.settle();
        for step in &steps {
            world.step(step);
        }
        prop_assert_eq!(world.finished, 1);
    }
}

/// Two agents with one task each, running.
fn pair(most: u32) -> World {
    let mut world = World::new(&[1, 1], 2, most, Duration::from_secs(1));
    world.join(0);
    assert_eq!(world.generation, None, "GANG-1");
    world.join(1);
    assert_eq!(world.generation, Some(0));
    world
}

#[test]
fn silence_counts_from_the_last_sign_of_life() {
    let mut world = pair(0);
    world.step(&Step::Mute(0));
    world.step(&Step::Wait(50));
    assert_eq!(world.finished, 0, "five seconds are allowed");
    world.step(&Step::Wait(2));
    assert_eq!(world.failure, Some((0, Ending::Lost(String::new()))));
    world.settle();
}

#[test]
fn an_observer_that_overslept_or_was_paused_judges_nobody_by_it_and_forgets_nothing() {
    for asleep in [vec![Step::Oversleep(60_000)], vec![Step::Pause, Step::Wait(600), Step::Resume]]
    {
        let mut world = pair(0);
        asleep.iter().for_each(|step| world.step(step));
        assert_eq!((world.running, world.at(Where::Joined).count()), (true, 2));
        // Who spoke meanwhile and then falls silent has five seconds, not a minute.
        world.step(&Step::Mute(1));
        world.step(&Step::Wait(49));
        assert!(world.running);
        world.step(&Step::Wait(3));
        assert_eq!(world.failure, Some((1, Ending::Lost(String::new()))));
    }
}

#[test]
fn tasks_that_outlive_their_grace_are_given_up_with_their_agent() {
    let mut world = pair(1);
    world.step(&Step::Fail(0));
    world.exit(0, Ending::Signalled(11));
    world.step(&Step::Wait(60));
    assert_eq!((world.generation, world.at(Where::Joined).count()), (Some(0), 2));
    world.step(&Step::Wait(3));
    assert_eq!(world.at(Where::Launched).collect::<Vec<_>>(), [1], "a new agent instead");
    world.join(1);
    world.step(&Step::Wait(15));
    assert_eq!(world.generation, Some(1));
}

#[test]
fn an_agent_that_leaves_is_believed_before_its_tasks_have_ended() {
    let World { mut machine, now, .. } = pair(0);
    let (generation, reason) = (0, "its executor is gone".to_owned());
    let actions = machine.handle(now, Input::Said(1, FromAgent::Leaving { generation, reason }));
    let told = |agent| {
        let end = |action: &Action| matches!(action, Action::Send(to, ToAgent::End { .. }) if *to == agent);
        actions.iter().any(end)
    };
    assert!(told(0) && told(1), "{actions:?}");
    machine.handle(now, Input::Gone(1, "closed its connection".into()));
    let ending = Ending::Exited(0);
    let actions =
        machine.handle(now, Input::Said(0, FromAgent::Ended { generation, rank: 0, ending }));
    let Some(Action::Finish(Err(error))) = actions.last() else { panic!("{actions:?}") };
    assert_eq!(error.to_string(), "rank 1 on h1 was lost: its agent leaves: its executor is gone");
}

#[test]
fn a_rank_that_comes_late_to_an_abandoned_rendezvous_hears_of_it() {
    let mut world = pair(0);
    world.step(&Step::Abandon(0, 1));
    world.step(&Step::Gather(1, 1));
    world.step(&Step::Gather(0, 0));
    world.step(&Step::Gather(1, 0));
    assert_eq!((world.meetings[0].round, world.meetings[1].abandoned), (1, true));
}

#[test]
fn who_says_first_that_it_fails_is_blamed_even_if_another_ends_sooner() {
    let World { mut machine, now, .. } = pair(0);
    let generation = 0;
    let (rank, traceback) = (1, "ValueError: no".to_owned());
    machine.handle(now, Input::Said(1, FromAgent::Confessed { generation, rank, traceback }));
    // An agent can speak of its own tasks only.
    let ending = Ending::Exited(9);
    machine.handle(now, Input::Said(1, FromAgent::Ended { generation, rank: 0, ending }));
    let (rank, ending, last) = (0, Ending::Exited(1), "rank 1 has left".to_owned());
    machine.handle(
        now,
        Input::Said(0, FromAgent::Failed { generation, rank, ending, last, by_itself: true }),
    );
    let ended = |rank| FromAgent::Ended { generation, rank, ending: Ending::Exited(1) };
    machine.handle(now, Input::Said(0, ended(0)));
    let actions = machine.handle(now, Input::Said(1, ended(1)));
    let finished = actions.iter().find_map(|action| match action {
        Action::Finish(Err(error)) => Some(error.to_string()),
        _ => None,
    });
    let finished = finished.unwrap();
    assert!(finished.starts_with("rank 1 on ") && finished.contains("ValueError"), "{finished}");
}

#[test]
fn who_was_killed_is_blamed_even_if_another_gives_up_sooner() {
    for (signal, by_itself, blamed) in [(9, true, 1), (9, false, 0), (15, true, 0)] {
        let World { mut machine, now, .. } = pair(0);
        let (generation, last) = (0, String::new());
        let mut fail = |rank: usize, ending: Ending, by_itself: bool| {
            let last = last.clone();
            let failed = FromAgent::Failed { generation, rank, ending, last, by_itself };
            machine.handle(now, Input::Said(rank, failed));
        };
        fail(0, Ending::Exited(1), true);
        fail(1, Ending::Signalled(signal), by_itself);
        let ended = |rank| FromAgent::Ended { generation, rank, ending: Ending::Exited(1) };
        machine.handle(now, Input::Said(0, ended(0)));
        let actions = machine.handle(now, Input::Said(1, ended(1)));
        let first = actions.iter().find_map(|action| match action {
            Action::Finish(Err(Error::TaskFailed { rank, .. })) => Some(*rank),
            _ => None,
        });
        assert_eq!(first, Some(blamed), "signal {signal}, by itself {by_itself}");
    }
}

#[test]
fn machines_of_one_name_are_told_apart() {
    let World { mut machine, now, .. } = World::new(&[1, 1], 2, 0, Duration::from_secs(1));
    let hand = |machine: &str| Hand { machine: machine.into(), ..crate::testing::hand("node", 1) };
    machine.handle(now, Input::Joined(0, hand("a")));
    let actions = machine.handle(now, Input::Joined(1, hand("b")));
    let infos = actions.iter().find_map(|action| match action {
        Action::Assign(_, assignment) => Some(Arc::clone(&assignment.infos)),
        _ => None,
    });
    let infos = infos.unwrap();
    assert_ne!(infos[0].host, infos[1].host);
    assert!(infos.iter().all(|info| info.local_size == 1), "{infos:?}");
}
