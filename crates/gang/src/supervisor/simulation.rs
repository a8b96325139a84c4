//! Supervisor and agents on hosts of a simulated network: joining, signs of life and generations under delay, loss and
//! partition.
//!
//! Everything from the greeting on is the real code, over plain streams. Tasks are not processes, because those do not
//! run in simulated time; invitations arrive out of band, as over ssh. A link that is *held* delivers everything later,
//! like TCP after a short cut; one that is *cut* loses what is sent, which breaks every connection over it.

use super::*;
use crate::{
    Ending, agent,
    policy::Restarts,
    testing::{Limit, Tasks, hand},
};
use turmoil::{
    Builder, Sim,
    net::{TcpListener, TcpStream},
};

const PORT: u16 = 7000;
const SUPERVISOR: &str = "supervisor";

type Ended = Arc<Mutex<Vec<Duration>>>;

struct Cluster {
    sim: Sim<'static>,
    tasks: Vec<Tasks>,
    /// When agents of each host have left.
    left: Vec<Ended>,
    events: blocking::Receiver<Shown>,
    seen: Vec<Event>,
    outcome: Arc<Mutex<Option<Result<Outcome>>>>,
    _commands: UnboundedSender<Command>,
}

fn name(host: usize) -> String {
    format!("host{host}")
}

/// One agent after the other, as they are invited.
async fn invited(
    host: usize,
    invitations: Arc<tokio::sync::Mutex<UnboundedReceiver<Invitation>>>,
    tasks: Tasks,
    left: Ended,
) -> turmoil::Result {
    while let Some(invitation) = invitations.lock().await.recv().await {
        let (tasks, left) = (tasks.clone(), Arc::clone(&left));
        tokio::task::spawn_local(async move {
            let stream = loop {
                match TcpStream::connect((SUPERVISOR, PORT)).await {
                    Ok(stream) => break stream,
                    Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
                }
            };
            let hand = hand(&name(host), invitation.slots);
            // Tasks that talk need credit, of which the simulated sink gives none back.
            let starter = match invitation.slots {
                1 => tasks.starter(),
                _ => tasks.talking_starter(Duration::from_millis(1), || "x\n".to_owned()),
            };
            let gone = std::future::pending();
            let _ = agent::serve(stream, &invitation, hand, starter, gone).await;
            left.lock().unwrap().push(turmoil::sim_elapsed().unwrap());
        });
    }
    // A host goes on when the supervisor does not.
    std::future::pending().await
}

/// What [`Doors::open`] does, on a simulated port.
async fn doors() -> turmoil::Result<Doors> {
    let (report, news) = mpsc::channel(1024);
    let roster = Roster::default();
    let listener = TcpListener::bind(("0.0.0.0", PORT)).await?;
    let (known, told) = (Arc::clone(&roster), report.clone());
    let open = Bound::spawn(async move {
        let mut door = Door::default();
        while let Ok((stream, address)) = listener.accept().await {
            let (known, told) = (Arc::clone(&known), told.clone());
            door.admit(address.to_string(), crate::net::Spoken::default(), async move {
                welcome(stream, &known, told).await
            });
        }
    });
    Ok(Doors { roster, report, news, here: String::new(), there: None, _open: vec![open] })
}

impl Cluster {
    /// A supervisor and hosts with one slot each.
    fn new(hosts: usize, restarts: u32, slowest: Duration, seed: u64) -> Self {
        Self::with(&vec![1; hosts], restarts, slowest, seed)
    }

    /// The same with more slots; where there are several, tasks talk.
    fn with(slots: &[u32], restarts: u32, slowest: Duration, seed: u64) -> Self {
        let hosts = slots.len();
        let mut builder = Builder::new();
        builder
            .enable_tokio_io()
            .simulation_duration(Duration::from_secs(600))
            .tick_duration(Duration::from_millis(10))
            .max_message_latency(slowest)
            .rng_seed(seed);
        let mut sim = builder.build();
        let mut job = Job::local(slots.iter().sum::<u32>() as usize, ["true"]);
        let host = |(host, slots): (usize, &u32)| Host { name: name(host), slots: *slots };
        job.hosts = slots.iter().enumerate().map(host).collect();
        job.start_limit = Duration::from_secs(30);
        job.restarts = Restarts { most: restarts, ..Restarts::default() };
        let (mut tasks, mut left, mut invite) = (Vec::new(), Vec::new(), Vec::new());
        for host in 0..hosts {
            let (sender, receiver) = mpsc::unbounded_channel::<Invitation>();
            invite.push(sender);
            let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
            let (own, ended) = (Tasks::default(), Ended::default());
            tasks.push(own.clone());
            left.push(Arc::clone(&ended));
            sim.host(name(host), move || {
                invited(host, Arc::clone(&receiver), own.clone(), Arc::clone(&ended))
            });
        }
        let launcher: Launcher = Box::new(move |_, _, invitation, _| {
            let _ = invite[invitation.agent as usize].send(invitation.clone());
            Ok(Launched::elsewhere())
        });
        let (sender, events) = blocking::channel();
        let (commands, orders) = mpsc::unbounded_channel();
        let outcome = Arc::new(Mutex::new(None));
        let told = Arc::clone(&outcome);
        sim.client(SUPERVISOR, async move {
            let doors = doors().await?;
            let mut supervisor = Supervisor::new(job, sender, launcher, doors);
            let credits = mpsc::unbounded_channel().1;
            *told.lock().unwrap() = Some(supervisor.serve(orders, credits).await);
            Ok(())
        });
        Self { sim, tasks, left, events, seen: Vec::new(), outcome, _commands: commands }
    }

    /// Lets simulated time pass until something is so, and says how much has.
    fn until(&mut self, limit: u64, what: impl Fn(&mut Self) -> bool) -> Duration {
        let start = self.sim.elapsed();
        let limit = start + Duration::from_secs(limit);
        while !what(self) {
            assert!(self.sim.elapsed() < limit, "not within {limit:?}; seen: {:?}", self.seen);
            self.sim.step().unwrap();
            self.seen.extend(self.events.try_iter().map(|(event, _)| event));
        }
        self.sim.elapsed() - start
    }

    fn pass(&mut self, seconds: u64) {
        let end = self.sim.elapsed() + Duration::from_secs(seconds);
        self.until(seconds + 1, |cluster| cluster.sim.elapsed() >= end);
    }

    fn until_running(&mut self, generation: u64) -> Duration {
        self.until(60, |cluster| {
            let started = |event: &Event| matches!(event, Event::Started { generation: g, .. } if *g == generation);
            cluster.seen.iter().any(started)
        })
    }

    fn is_over(&self) -> bool {
        self.outcome.lock().unwrap().is_some()
    }

    fn outcome(&self) -> Result<Outcome> {
        self.outcome.lock().unwrap().take().unwrap()
    }

    /// How many tasks run on each host.
    fn running(&self) -> Vec<usize> {
        self.tasks.iter().map(Tasks::running).collect()
    }

    fn hold(&self, host: usize) {
        self.sim.hold(SUPERVISOR, name(host));
    }

    fn release(&self, host: usize) {
        self.sim.release(SUPERVISOR, name(host));
    }

    /// Every task ends well, and so must the job.
    fn finish(&mut self, generation: u64) {
        self.tasks.iter().for_each(|tasks| tasks.end(&Ending::Exited(0)));
        self.until(20, |cluster| cluster.is_over());
        assert_eq!(self.outcome().unwrap().generation, generation);
    }
}

fn between(time: Duration, least: u64, most: u64) {
    assert!(time >= Duration::from_secs(least) && time <= Duration::from_secs(most), "{time:?}");
}

#[test]
fn all_start_together_however_late_one_joins() {
    let _limit = Limit::seconds(60);
    for seed in 0..5 {
        let mut cluster = Cluster::new(4, 0, Duration::from_millis(1500), seed);
        cluster.hold(2);
        cluster.pass(20);
        let started: usize = cluster.tasks.iter().map(Tasks::started).sum();
        assert_eq!(started, 0, "GANG-1");
        cluster.release(2);
        cluster.until_running(0);
        assert_eq!(cluster.running(), [1, 1, 1, 1]);
        // A slow network is no silence.
        cluster.pass(60);
        assert_eq!(cluster.running(), [1, 1, 1, 1]);
        cluster.finish(0);
    }
}

#[test]
fn a_host_that_is_cut_off_before_it_joins_is_named_and_nothing_has_run() {
    let _limit = Limit::seconds(60);
    for held in [true, false] {
        let mut cluster = Cluster::new(3, 2, Duration::from_millis(100), 1);
        if held {
            cluster.hold(1);
        } else {
            cluster.sim.partition(SUPERVISOR, name(1));
        }
        let time = cluster.until(60, |cluster| cluster.is_over());
        between(time, 30, 33);
        let error = cluster.outcome().unwrap_err();
        assert!(
            matches!(&error, Error::NotAssembled(why) if why.contains("joined from host1;")),
            "{error}"
        );
        assert!(cluster.tasks.iter().all(|tasks| tasks.started() == 0));
    }
}

#[test]
fn a_host_that_is_cut_off_is_lost_after_five_seconds_and_ends_its_tasks_after_thirty() {
    let _limit = Limit::seconds(60);
    let mut cluster = Cluster::new(3, 0, Duration::from_millis(100), 2);
    cluster.until_running(0);
    cluster.hold(1);
    let lost = cluster.until(20, |cluster| cluster.running() == [0, 1, 0]);
    between(lost, 4, 6);
    cluster.until(5, |cluster| cluster.is_over());
    let error = cluster.outcome().unwrap_err();
    let Error::TaskFailed { rank: 1, host, ending: Ending::Lost(why), .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(
        (host.as_str(), why.as_str()),
        ("host1", "its agent gave no sign of life for 5.0 s")
    );
    let alone = cluster.until(60, |cluster| cluster.running() == [0, 0, 0]);
    between(lost + alone, 29, 33);
    cluster.until(5, |cluster| cluster.left.iter().all(|left| left.lock().unwrap().len() == 1));
}

#[test]
fn a_cut_of_three_seconds_does_no_harm() {
    let _limit = Limit::seconds(60);
    let mut cluster = Cluster::new(3, 0, Duration::from_millis(100), 3);
    cluster.until_running(0);
    for host in [0, 1, 2, 1] {
        cluster.hold(host);
        cluster.pass(3);
        cluster.release(host);
        cluster.pass(3);
    }
    assert_eq!(cluster.running(), [1, 1, 1]);
    cluster.finish(0);
}

#[test]
fn after_a_partition_the_next_generation_starts_and_hears_nothing_of_the_last() {
    let _limit = Limit::seconds(60);
    for held in [true, false] {
        let mut cluster = Cluster::new(3, 1, Duration::from_millis(100), 4);
        cluster.until_running(0);
        if held {
            cluster.hold(1);
        } else {
            cluster.sim.partition(SUPERVISOR, name(1));
        }
        let lost = cluster.until(20, |cluster| cluster.running() == [0, 1, 0]);
        between(lost, 0, 6);
        // A failure of generation 0, which arrives, if at all, when generation 1 is already there.
        cluster.tasks[1].end(&Ending::Exited(7));
        cluster.pass(5);
        assert_eq!(cluster.tasks[0].started(), 1, "nothing starts without host1");
        if held {
            cluster.release(1);
        } else {
            cluster.sim.repair(SUPERVISOR, name(1));
        }
        cluster.until_running(1);
        cluster.pass(10);
        assert_eq!(cluster.running(), [1, 1, 1]);
        assert!(cluster.tasks.iter().all(|tasks| tasks.started() == 2));
        cluster.finish(1);
    }
}

#[test]
fn an_agent_that_hears_nothing_ends_its_tasks_after_thirty_seconds_though_it_is_heard() {
    let _limit = Limit::seconds(60);
    let mut cluster = Cluster::new(2, 0, Duration::from_millis(100), 5);
    cluster.until_running(0);
    cluster.sim.partition_oneway(SUPERVISOR, name(1));
    cluster.pass(25);
    assert_eq!(cluster.running(), [1, 1]);
    cluster.until(10, |cluster| cluster.running()[1] == 0);
    cluster.until(10, |cluster| cluster.is_over());
    let error = cluster.outcome().unwrap_err();
    assert!(
        matches!(&error, Error::TaskFailed { rank: 1, ending: Ending::Lost(_), .. }),
        "{error}"
    );
    assert_eq!(cluster.running(), [0, 0]);
}

#[test]
fn an_agent_that_cannot_get_rid_of_its_news_ends_its_tasks_all_the_same() {
    let _limit = Limit::seconds(60);
    let mut cluster = Cluster::with(&[1, 2], 0, Duration::from_millis(100), 6);
    cluster.until_running(0);
    cluster.hold(1);
    // Whatever lies between the tasks and the network fills up.
    cluster.pass(4);
    cluster.tasks[1].end_first(&Ending::Exited(3));
    cluster.pass(22);
    assert_eq!(cluster.running(), [0, 1]);
    cluster.until(10, |cluster| cluster.running() == [0, 0]);
    cluster.until(10, |cluster| !cluster.left[1].lock().unwrap().is_empty());
}
