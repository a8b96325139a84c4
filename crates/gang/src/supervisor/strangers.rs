//! Strangers at the supervisor's port while a job runs: all are refused and logged, and nobody else notices.

use super::*;
use crate::{
    Ending, agent,
    identity::Credentials,
    net::call,
    policy::Restarts,
    testing::{Limit, Log, Tasks, hand, raise_descriptors},
};
use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::TcpStream,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    task::AbortHandle,
};

const STRANGERS: usize = 10_000;

/// What happened when.
#[derive(Default)]
struct Seen {
    dialled: Vec<Instant>,
    assembled: Vec<Instant>,
    started: u64,
    restarted: u64,
    /// Lines shown, and how long the slowest took from its task.
    lines: usize,
    slowest: Duration,
}

/// A job of two agents on other hosts, each with a task that says what time it is.
struct Running {
    log: Log,
    tasks: Tasks,
    seen: Arc<Mutex<Seen>>,
    invitations: Arc<Mutex<Vec<Invitation>>>,
    agents: Arc<Mutex<Vec<AbortHandle>>>,
    supervisor: thread::JoinHandle<Result<Outcome>>,
    hosts: thread::JoinHandle<()>,
}

impl Running {
    fn start() -> Self {
        let mut job = Job::local(2, ["true"]);
        job.hosts = (0..2).map(|i| Host { name: format!("node{i}"), slots: 1 }).collect();
        job.interface = Some("127.0.0.1".into());
        job.restarts = Restarts { most: 1, first_pause: Duration::ZERO, ..Restarts::default() };
        let (log, tasks) = (Log::default(), Tasks::default());
        let seen = Arc::new(Mutex::new(Seen::default()));
        let invitations = Arc::new(Mutex::new(Vec::new()));
        let agents = Arc::new(Mutex::new(Vec::new()));
        let (invite, invited) = mpsc::unbounded_channel();
        let clock = Instant::now();
        let kept = Arc::clone(&invitations);
        let launcher: Launcher = Box::new(move |_, _, invitation, _| {
            kept.lock().unwrap().push(invitation.clone());
            let _ = invite.send(invitation.clone());
            Ok(Launched::elsewhere())
        });
        let hosts = {
            let (tasks, seen, agents) = (tasks.clone(), Arc::clone(&seen), Arc::clone(&agents));
            thread::spawn(move || serve_hosts(invited, &tasks, clock, &seen, &agents))
        };
        let (told, noted) = (log.clone(), Arc::clone(&seen));
        let supervisor = thread::spawn(move || {
            tracing::subscriber::with_default(told, || {
                run_with(job, &Control::default(), launcher, move |event| {
                    noted.lock().unwrap().note(event, clock);
                })
            })
        });
        Self { log, tasks, seen, invitations, agents, supervisor, hosts }
    }

    fn until(&self, what: &str, is_so: impl Fn(&Seen) -> bool) {
        let limit = Instant::now() + Duration::from_secs(20);
        while !is_so(&self.seen.lock().unwrap()) {
            assert!(Instant::now() < limit, "not {what}; the log: {:#?}", self.log.lines());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Where the supervisor is, and credentials of one of its agents.
    fn door(&self) -> (SocketAddr, Credentials) {
        match &self.invitations.lock().unwrap()[0].meeting {
            Meeting::There { addresses, credentials } => (addresses[0], credentials.clone()),
            Meeting::Here(_) => panic!("the agent is here"),
        }
    }

    /// Every refusal is logged, with who it was and why.
    fn logged(&self, from: SocketAddr, why: &str) {
        let who = format!("refused a connection from {from}: ");
        let limit = Instant::now() + Duration::from_secs(10);
        let is_there =
            || self.log.lines().iter().any(|line| line.contains(&who) && line.contains(why));
        while !is_there() {
            assert!(Instant::now() < limit, "no {who}{why}: {:#?}", self.log.lines());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Every task ends well, and so does the job.
    fn finish(self, generation: u64) -> Seen {
        self.tasks.end(&Ending::Exited(0));
        assert_eq!(self.supervisor.join().unwrap().unwrap().generation, generation);
        self.hosts.join().unwrap();
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

impl Seen {
    fn note(&mut self, event: Event, clock: Instant) {
        match event {
            Event::Assembling { missing, .. } if missing.is_empty() => {
                self.assembled.push(Instant::now());
            }
            Event::Started { .. } => self.started += 1,
            Event::Restarting { .. } => self.restarted += 1,
            Event::Output { lines, .. } => {
                for line in String::from_utf8(lines).unwrap().lines() {
                    let said = Duration::from_micros(line.parse().unwrap());
                    self.slowest = self.slowest.max(clock.elapsed().saturating_sub(said));
                    self.lines += 1;
                }
            }
            _ => {}
        }
    }
}

/// Plays every agent that is invited.
fn serve_hosts(
    mut invited: UnboundedReceiver<Invitation>,
    tasks: &Tasks,
    clock: Instant,
    seen: &Arc<Mutex<Seen>>,
    agents: &Mutex<Vec<AbortHandle>>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let mut serving = tokio::task::JoinSet::new();
        while let Some(invitation) = invited.recv().await {
            let seen = Arc::clone(seen);
            let time = move || format!("{}\n", clock.elapsed().as_micros());
            let talking = tasks.talking_starter(Duration::from_millis(20), time);
            let agent = serving.spawn_local(async move {
                let Meeting::There { addresses, credentials } = &invitation.meeting else { return };
                seen.lock().unwrap().dialled.push(Instant::now());
                let (stream, _) = agent::dial(addresses, credentials).await.unwrap();
                let hand = hand(&invitation.name, invitation.slots);
                let gone = std::future::pending();
                agent::serve(stream, &invitation, hand, talking, gone).await.unwrap();
            });
            agents.lock().unwrap().push(agent);
        }
        while let Some(served) = serving.join_next().await {
            assert!(served.as_ref().err().is_none_or(|error| error.is_cancelled()), "{served:?}");
        }
    });
}

/// Greets with some bytes over TLS, and returns what the supervisor answers.
async fn greet_with(
    running: &Running,
    credentials: &Credentials,
    bytes: &[u8],
) -> (SocketAddr, String) {
    let (mut stream, _) = agent::dial(&[running.door().0], credentials).await.unwrap();
    let from = stream.get_ref().0.local_addr().unwrap();
    let mut answer = Vec::new();
    let _ = stream.write_all(bytes).await;
    let _ = stream.read_to_end(&mut answer).await;
    (from, String::from_utf8_lossy(answer.get(3..).unwrap_or_default()).into_owned())
}

/// Credentials of an agent of the job, but signed by somebody else.
fn forged(of: &Credentials) -> Credentials {
    let other = Authority::new().unwrap().issue().unwrap();
    let mut forged = serde_json::to_value(other).unwrap();
    forged["authority"] = serde_json::to_value(of).unwrap()["authority"].take();
    serde_json::from_value(forged).unwrap()
}

#[test]
fn whoever_does_not_belong_is_refused_and_logged() {
    let _limit = Limit::seconds(60);
    let running = Running::start();
    running.until("running", |seen| seen.started == 1);
    let (door, credentials) = running.door();

    // No TLS at all.
    for garbage in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 1024], b"DEUTERON", &[0x16, 3, 1, 0xff, 0xff, 1]]
    {
        let mut stream = TcpStream::connect(door).unwrap();
        stream.write_all(garbage).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let from = stream.local_addr().unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
        running.logged(from, "");
    }

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // An authority that is not the job's: the caller refuses the supervisor, and the supervisor the caller.
        let other = Authority::new().unwrap().issue().unwrap();
        assert!(agent::dial(&[door], &other).await.is_err());
        let (from, answer) = greet_with(&running, &forged(&credentials), b"x").await;
        assert_eq!(answer, "");
        running.logged(from, "invalid peer certificate");

        // Members of the job that are not who they say.
        let token = |agent: usize| running.invitations.lock().unwrap()[agent].token;
        let hello = |from, purpose, token| Hello { generation: 0, from, to: 0, purpose, token };
        let wrong = "its token is wrong or used, or it is no longer expected";
        for hello in [
            hello(0, Purpose::Agent, [7; 16]),
            hello(1, Purpose::Agent, token(0)),
            hello(2, Purpose::Agent, token(0)),
            hello(u32::MAX, Purpose::Agent, token(0)),
            hello(0, Purpose::Task, token(0)),
            // The same again, though the agent is there already.
            hello(0, Purpose::Agent, token(0)),
        ] {
            let (from, answer) = greet_with(&running, &credentials, &hello.encode()).await;
            assert_eq!(answer, wrong, "{hello:?}");
            running.logged(from, wrong);
        }
        let (mut stream, _) = agent::dial(&[door], &credentials).await.unwrap();
        let refused = call(&mut stream, &hello(0, Purpose::Agent, [0; 16])).await.unwrap_err();
        assert_eq!(refused.to_string(), wrong);

        // Another version, and no greeting at all.
        let hello = hello(0, Purpose::Agent, token(0)).encode();
        let mut protocol = hello.clone();
        protocol[8] += 1;
        let mut package = hello.clone();
        package[12] = b'9';
        for (bytes, why) in [
            (&protocol[..], "the peer speaks protocol 2"),
            (&package, "install the same version everywhere"),
            (b"GET / HTTP/1.1", "not Deuteron's protocol"),
            (&[hello, vec![0]].concat(), "bytes follow the greeting"),
        ] {
            let (from, answer) = greet_with(&running, &credentials, bytes).await;
            assert!(answer.contains(why), "{answer}");
            running.logged(from, why);
        }
    });

    let seen = running.finish(0);
    assert_eq!((seen.started, seen.restarted, seen.assembled.len()), (1, 0, 1));
}

#[test]
fn ten_thousand_that_say_nothing_keep_nobody_out() {
    let _limit = Limit::seconds(60);
    let most = raise_descriptors() as usize;
    let running = Running::start();
    running.until("running", |seen| seen.started == 1);
    let (door, _) = running.door();

    // As many at once as there are descriptors for. Soon after the first one agent is lost, and another comes instead.
    let at_once = STRANGERS.min(most.saturating_sub(2000));
    let mut strangers = VecDeque::new();
    let first_called = Instant::now();
    for number in 0..STRANGERS {
        // Who comes when the system's own queue is full gets in later than those who come after it.
        let waiting = || number.saturating_sub(running.log.count() + 256);
        let limit = Instant::now() + Duration::from_secs(10);
        while waiting() > 500 {
            assert!(Instant::now() < limit, "{} wait at the door", waiting());
            thread::sleep(Duration::from_millis(1));
        }
        if strangers.len() == at_once {
            strangers.pop_front();
        }
        let stream = TcpStream::connect(door).unwrap();
        stream.set_nonblocking(true).unwrap();
        strangers.push_back((number, stream));
        if number == 1000 {
            running.agents.lock().unwrap()[1].abort();
        }
        if number % 500 == 499 {
            thread::sleep(Duration::from_millis(50));
        }
    }
    let all_called = Instant::now();
    let calling = all_called - first_called;
    running.until("running again", |seen| seen.started == 2);

    thread::sleep(Duration::from_millis(500));
    let is_open = |(_, stream): &&(usize, TcpStream)| {
        stream.peek(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    };
    let open: Vec<usize> = strangers.iter().filter(is_open).map(|(number, _)| *number).collect();
    assert!(all_called.elapsed() < Duration::from_secs(4), "too slow to see anything");
    assert!(!open.is_empty() && open.len() <= 256, "{} are open", open.len());
    assert!(open[0] >= STRANGERS - 256, "older ones are open: {open:?}");

    while strangers.iter().any(|stranger| is_open(&stranger)) {
        assert!(all_called.elapsed() < Duration::from_secs(15), "strangers are still there");
        thread::sleep(Duration::from_millis(50));
    }
    let silent = all_called.elapsed();
    let refused = running.log.count();
    let seen = running.finish(1);
    assert_eq!(seen.restarted, 1, "only the agent that was ended");
    assert!(refused >= STRANGERS, "only {refused} refusals were logged");
    let joined = *seen.assembled.last().unwrap() - *seen.dialled.last().unwrap();
    println!(
        "{STRANGERS} strangers within {calling:.1?}, {} of them there at the end: the last was refused after {silent:.1?}; an agent joined after \
         {joined:.1?}; {} lines were shown, the slowest after {:.1?}",
        open.len(),
        seen.lines,
        seen.slowest
    );
    assert!(joined < Duration::from_secs(1), "an agent joined after {joined:?}");
    assert!(seen.lines > 100 && seen.slowest < Duration::from_secs(3), "{:?}", seen.slowest);
}
