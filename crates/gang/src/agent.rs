//! The supervisor's hand on a host: starts tasks, passes on what they say, ends them.
//!
//! - AGENT-1: a task never outlives its agent: it dies with it (death signal), has a process group that is killed as a
//!   whole, by a warden if the agent cannot, and what leaves the group comes to the agent (subreaper), which ends it.
//! - AGENT-2: without a supervisor (standard input ends, the connection closes, silence for 30 s) tasks are ended.

use crate::{
    Ending, Error, Result, TaskInfo,
    discovery::{assigned, discover},
    identity::Credentials,
    net::{
        Bound, Door, Duplex, Out, Spoken, accept_here, call, greet, listen_here, next, read,
        socket_name, speak, write,
    },
    output::{Last, forward},
    process::{Handle, Program, Started},
    protocol::{
        Assignment, FromAgent, FromTask, Gathered, Hand, Invitation, Meeting, OVERSLEPT, PATIENCE,
        Parcel, Pieces, SILENCE, ToAgent, ToTask,
    },
};
use deuteron_collective::{
    SERVER_NAME,
    frame::{Hello, Purpose},
};
use rustls::pki_types::ServerName;
use std::{
    collections::BTreeMap,
    future::poll_fn,
    io::{
        self, BufRead,
        ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof},
        Write,
    },
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::linux::net::SocketAddrExt,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpStream, UnixListener, UnixStream},
    sync::{
        Semaphore,
        mpsc::{self, UnboundedSender},
        watch,
    },
    task::JoinSet,
    time::{timeout, timeout_at},
};
use tokio_rustls::TlsConnector;

/// How often an agent looks at its tasks and at the time.
const TICK: Duration = Duration::from_millis(250);
/// The devices that an agent may use, as a discovery script would print them.
const ACCELERATORS: &str = "DEUTERON_AGENT_ACCELERATORS";
/// If it is set, an agent writes what its tasks print to its own standard error too.
const ECHO: &str = "DEUTERON_AGENT_ECHO";
/// How long one address of the supervisor may take to answer.
const DIAL: Duration = Duration::from_secs(5);

/// What `deuteron agent` does: reads an invitation from standard input, joins, and serves until the job is over.
pub fn serve_stdin() -> Result<()> {
    let mut line = String::new();
    let failed = |error| Error::system("no invitation on standard input", error);
    io::stdin().lock().read_line(&mut line).map_err(failed)?;
    let invitation: Invitation = serde_json::from_str(&line).map_err(|error| {
        Error::Invalid(format!(
            "standard input holds no invitation: {error}; agents are started by deuteron run"
        ))
    })?;
    crate::process::start_warden()?;
    crate::process::adopt_orphans()?;
    crate::process::open_more();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::system("no event loop", error))?;
    // A script may take its time; the supervisor does not wait for an agent that has not called.
    // Who has started this agent may have been given devices for it; then it has no others.
    let found = match std::env::var(ACCELERATORS) {
        Ok(text) if !invitation.discovery.is_empty() => assigned(&text),
        _ => discover(&invitation.discovery),
    };
    let hand = |address| Hand {
        host: host_name(),
        machine: boot_id(),
        slots: invitation.slots,
        cores: cores(),
        address,
        accelerators: found.accelerators,
        problems: found.problems,
    };
    let served = runtime.block_on(async {
        let gone = supervisor_gone()?;
        match &invitation.meeting {
            Meeting::Here(name) => {
                let address = invitation.address.unwrap_or(Ipv4Addr::LOCALHOST.into());
                serve(
                    dial_here(name).await?,
                    &invitation,
                    hand(address),
                    Box::new(Program::start),
                    gone,
                )
                .await
            }
            Meeting::There { addresses, credentials } => {
                let (stream, address) = dial(addresses, credentials).await?;
                let address = invitation.address.unwrap_or(address);
                serve(stream, &invitation, hand(address), Box::new(Program::start), gone).await
            }
        }
    });
    drop(runtime);
    crate::process::end_orphans();
    served
}

/// Ends when standard input does, or when someone asks this process to end.
fn supervisor_gone() -> Result<impl Future<Output = String>> {
    use tokio::signal::unix::{SignalKind, signal};
    let failed = |error| Error::system("no signal handler", error);
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let (closed, ended) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("deuteron-stdin".into())
        .spawn(move || {
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            let _ = closed.send(());
        })
        .map_err(failed)?;
    Ok(async move {
        tokio::select! {
            _ = ended => "the process that has started the agent is gone".to_owned(),
            _ = terminate.recv() => "somebody has asked the agent to end (SIGTERM)".to_owned(),
            _ = interrupt.recv() => "somebody has asked the agent to end (SIGINT)".to_owned(),
        }
    })
}

async fn dial_here(name: &str) -> Result<UnixStream> {
    let failed = |error| Error::system("the supervisor cannot be reached on this machine", error);
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).map_err(failed)?;
    let stream = std::os::unix::net::UnixStream::connect_addr(&address).map_err(failed)?;
    stream.set_nonblocking(true).map_err(failed)?;
    UnixStream::from_std(stream).map_err(failed)
}

/// Tries every address; the one that ssh came from is the best guess. Also returns this host's own address.
pub(crate) async fn dial(
    addresses: &[SocketAddr],
    credentials: &Credentials,
) -> Result<(tokio_rustls::client::TlsStream<TcpStream>, IpAddr)> {
    let from = std::env::var("SSH_CONNECTION").unwrap_or_default();
    let from: Option<IpAddr> = from.split(' ').next().and_then(|address| address.parse().ok());
    let port = addresses.first().map_or(0, SocketAddr::port);
    let guess = from.map(|address| SocketAddr::new(address, port));
    let connector = TlsConnector::from(credentials.identity()?.client());
    let name =
        ServerName::try_from(SERVER_NAME).map_err(|error| Error::Invalid(error.to_string()))?;
    let until = now() + DIAL;
    let mut tried = Vec::new();
    loop {
        let mut crowded = false;
        tried.clear();
        for address in guess.iter().chain(addresses) {
            let attempt = async {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                let own = stream.local_addr()?.ip();
                io::Result::Ok((connector.connect(name.clone(), stream).await?, own))
            };
            match timeout(DIAL, attempt).await {
                Ok(Ok(connected)) => return Ok(connected),
                Ok(Err(error)) => {
                    crowded |= matches!(error.kind(), ConnectionReset | UnexpectedEof | BrokenPipe);
                    tried.push(format!("{address}: {error}"));
                }
                Err(_) => tried.push(format!("{address}: no answer")),
            }
        }
        // A door with too many callers drops some (DOOR-1).
        if !crowded || now() > until {
            break;
        }
        tokio::time::sleep(TICK).await;
    }
    Err(Error::NotAssembled(format!(
        "the supervisor cannot be reached ({}): name an interface that this host can reach (--interface)",
        tried.join("; ")
    )))
}

/// What happens on the agent's own host.
enum Local {
    /// A task has failed; what is left of its output still comes.
    Failed {
        rank: usize,
        ending: Ending,
        by_itself: bool,
    },
    Ended {
        rank: usize,
        ending: Ending,
    },
    Connected {
        rank: usize,
        line: UnboundedSender<Out<ToTask>>,
    },
    Said {
        rank: usize,
        line: UnboundedSender<Out<ToTask>>,
        message: FromTask,
    },
}

const NOT_ASKED: u8 = 0;
const ASKED: u8 = 1;
const KILLED: u8 = 2;

struct Running {
    handle: Box<dyn Handle>,
    last: Last,
    traceback: Option<String>,
    lines: Vec<UnboundedSender<Out<ToTask>>>,
    stopped: Option<Instant>,
    /// Reported as stopped.
    given_up: bool,
    _tasks: Vec<Bound>,
}

/// What the supervisor gives to all tasks, as far as it has come.
enum Payload {
    /// No assignment has said how long it is.
    Unknown,
    Coming(Parcel),
    Whole(Arc<Vec<u8>>),
    /// It cannot be held, and why.
    Missing(String),
}

/// Starts a task.
pub(crate) type Starter = Box<dyn Fn(Program) -> Result<Started> + Send>;

struct Agent {
    starter: Starter,
    out: mpsc::Sender<FromAgent>,
    credit: Arc<Semaphore>,
    local: mpsc::Sender<(u64, Local)>,
    generation: u64,
    infos: Arc<Vec<TaskInfo>>,
    credentials: BTreeMap<usize, Option<Credentials>>,
    running: BTreeMap<usize, Running>,
    grace: Duration,
    kill_at: Option<Instant>,
    /// Whether this attempt's tasks have been asked to end, or killed.
    asked: Arc<AtomicU8>,
    paused: bool,
    payload: Payload,
    /// Tasks that want it before it is there.
    hungry: Vec<UnboundedSender<Out<ToTask>>>,
}

/// Joins over `stream` and serves until the job is over or the supervisor is.
pub(crate) async fn serve(
    mut stream: impl Duplex,
    invitation: &Invitation,
    hand: Hand,
    starter: Starter,
    gone: impl Future<Output = String>,
) -> Result<()> {
    let lost = |error: io::Error| Error::system("the supervisor did not let this agent in", error);
    let hello = Hello {
        generation: 0,
        from: invitation.agent,
        to: 0,
        purpose: Purpose::Agent,
        token: invitation.token,
    };
    call(&mut stream, &hello).await.map_err(lost)?;
    write(&mut stream, &FromAgent::Hand(hand)).await.map_err(lost)?;

    let (mut incoming, outgoing) = tokio::io::split(stream);
    let (out, mut messages) = mpsc::channel::<FromAgent>(256);
    let (heard, mut orders) = mpsc::channel::<ToAgent>(256);
    let _reader = Bound::spawn(async move {
        while let Ok(Some(order)) = read(&mut incoming).await {
            if heard.send(order).await.is_err() {
                return;
            }
        }
    });
    let beat = FromAgent::Beat;
    let writer = Bound::spawn(speak(outgoing, move |cx| messages.poll_recv(cx), beat));

    let (local, mut events) = mpsc::channel(256);
    let mut agent = Agent {
        starter,
        out,
        credit: Arc::new(Semaphore::new(0)),
        local,
        generation: 0,
        infos: Arc::default(),
        credentials: BTreeMap::new(),
        running: BTreeMap::new(),
        grace: Duration::ZERO,
        kill_at: None,
        asked: Arc::default(),
        paused: false,
        payload: Payload::Unknown,
        hungry: Vec::new(),
    };
    let silence = || format!("no sign of life from the supervisor for {} s", PATIENCE.as_secs());
    let mut gone = std::pin::pin!(gone);
    let (mut heard, mut ticked) = (now(), now());
    let mut ticks = tokio::time::interval(TICK);
    let reason = loop {
        tokio::select! {
            order = orders.recv() => {
                heard = now();
                match order {
                    Some(ToAgent::Leave) => break None,
                    Some(order) => {
                        // What cannot be said for so long has nobody to hear it.
                        if timeout(PATIENCE, agent.obey(order)).await.is_err() {
                            break Some(silence());
                        }
                    }
                    None => break Some("the connection to the supervisor is gone".to_owned()),
                }
            }
            Some((generation, event)) = events.recv() => {
                if timeout_at((heard + PATIENCE).into(), agent.note(generation, event)).await.is_err() {
                    break Some(silence());
                }
            }
            reason = &mut gone => break Some(reason),
            _ = ticks.tick() => {
                let slept = now() - ticked;
                ticked = now();
                if slept > OVERSLEPT || agent.paused {
                    heard = ticked.min(heard + slept);
                    agent.forgive(slept);
                }
                let looked = timeout_at((heard + PATIENCE).into(), agent.look()).await;
                if looked.is_err() || (now() - heard) > PATIENCE {
                    break Some(silence());
                }
            }
        }
    };
    // Nobody reads output any more; tasks must not block on it.
    agent.credit.close();
    if agent.out.capacity() == 0 {
        drop(writer);
    }
    if let Some(reason) = reason {
        // The supervisor need not wait until they have ended to know that they do.
        let leaving = FromAgent::Leaving { generation: agent.generation, reason: reason.clone() };
        let _ = agent.out.try_send(leaving);
        agent.end(&reason);
        while !agent.running.is_empty() {
            tokio::select! {
                Some((generation, event)) = events.recv() => agent.note_quietly(generation, event),
                _ = ticks.tick() => agent.kill_if_due(),
            }
        }
    }
    agent.running.clear();
    Ok(())
}

impl Agent {
    async fn obey(&mut self, order: ToAgent) {
        match order {
            ToAgent::Beat | ToAgent::Leave => {}
            ToAgent::Credit(bytes) => self.credit.add_permits(bytes as usize),
            ToAgent::Start(assignment) => self.start(assignment).await,
            ToAgent::End { generation, reason } if generation == self.generation => {
                self.end(&reason)
            }
            ToAgent::Gathered(gathered) if gathered.generation == self.generation => {
                self.tell_tasks(|| ToTask::Gathered(Arc::<Gathered>::clone(&gathered)));
            }
            ToAgent::Abandoned { generation, name, reason } if generation == self.generation => {
                self.tell_tasks(|| ToTask::Abandoned {
                    name: name.clone(),
                    reason: reason.clone(),
                });
            }
            ToAgent::End { .. } | ToAgent::Gathered(_) | ToAgent::Abandoned { .. } => {}
            ToAgent::Payload(piece) => {
                if let Payload::Coming(parcel) = &mut self.payload
                    && let Some(whole) = parcel.add(&piece)
                {
                    self.payload = Payload::Whole(Arc::new(whole));
                    std::mem::take(&mut self.hungry).into_iter().for_each(|line| self.feed(line));
                }
            }
            ToAgent::Pause => {
                self.paused = true;
                self.running.values().for_each(|task| task.handle.pause());
                let _ = self.out.send(FromAgent::Paused).await;
            }
            ToAgent::Resume => {
                self.paused = false;
                self.running.values_mut().for_each(|task| {
                    task.stopped = None;
                    task.handle.resume();
                });
            }
        }
    }

    async fn start(&mut self, assignment: Assignment) {
        self.generation = assignment.generation;
        self.asked = Arc::default();
        self.infos = Arc::clone(&assignment.infos);
        self.grace = assignment.grace;
        self.kill_at = None;
        if let Payload::Unknown = self.payload {
            self.payload = match (assignment.payload, Parcel::new(assignment.payload)) {
                (0, _) => Payload::Whole(Arc::default()),
                (_, Ok(parcel)) => Payload::Coming(parcel),
                (_, Err(why)) => Payload::Missing(why),
            };
        }
        let generation = assignment.generation;
        let mut failed = Vec::new();
        for task in &assignment.tasks {
            self.credentials.insert(task.rank, task.credentials.clone());
            match self.start_task(task.rank, &assignment) {
                Ok(running) => {
                    self.running.insert(task.rank, running);
                }
                Err(error) => failed.push((task.rank, error.to_string())),
            }
        }
        let _ = self.out.send(FromAgent::Started { generation }).await;
        for (rank, reason) in failed {
            let ending = Ending::NotStarted(reason);
            let _ = self.out.send(FromAgent::Ended { generation, rank, ending }).await;
        }
    }

    fn start_task(&self, rank: usize, assignment: &Assignment) -> Result<Running> {
        let generation = assignment.generation;
        let socket = socket_name()?;
        let listener =
            listen_here(&socket).map_err(|error| Error::system("no socket for a task", error))?;
        let door = Bound::spawn(task_door(listener, generation, rank, self.local.clone()));
        let (last, out) = (Last::default(), self.out.clone());
        let program = Program::of(rank, &socket, cores(), assignment);
        let Started { handle, outputs, ending } = (self.starter)(program)?;
        let (over, ended) = watch::channel(false);
        let mut pumps = JoinSet::new();
        for (stream, pipe) in outputs {
            let (last, credit, out) = (last.clone(), Arc::clone(&self.credit), out.clone());
            let echo = std::env::var_os(ECHO).is_some();
            let send = move |lines: Vec<u8>| {
                if echo {
                    let _ = io::stderr().write_all(&lines);
                }
                let out = out.clone();
                async move {
                    let _ = out.send(FromAgent::Output { generation, rank, stream, lines }).await;
                }
            };
            pumps.spawn(forward(pipe, stream, last, credit, ended.clone(), send));
        }
        let (local, asked) = (self.local.clone(), Arc::clone(&self.asked));
        let waiter = Bound::spawn(async move {
            let ending = ending.await;
            let by_itself = match asked.load(Ordering::Relaxed) {
                NOT_ASKED => true,
                // Somebody else has killed it.
                ASKED => ending == Ending::Signalled(9),
                _ => false,
            };
            let _ = over.send(true);
            if ending != Ending::Exited(0) {
                // Its last words are worth a moment; a terminal that shows nothing is not.
                let _ = timeout(TICK, drain(&mut pumps)).await;
                let failed = Local::Failed { rank, ending: ending.clone(), by_itself };
                let _ = local.send((generation, failed)).await;
            }
            drain(&mut pumps).await;
            let _ = local.send((generation, Local::Ended { rank, ending })).await;
        });
        Ok(Running {
            handle,
            last,
            traceback: None,
            lines: Vec::new(),
            stopped: None,
            given_up: false,
            _tasks: vec![door, waiter],
        })
    }

    async fn note(&mut self, generation: u64, event: Local) {
        if generation != self.generation {
            return;
        }
        match event {
            Local::Failed { rank, ending, by_itself } => {
                self.report(rank, ending, by_itself).await;
            }
            Local::Ended { rank, ending } => {
                self.running.remove(&rank);
                let _ = self.out.send(FromAgent::Ended { generation, rank, ending }).await;
            }
            Local::Connected { rank, line } => {
                let welcome = ToTask::Welcome {
                    generation,
                    rank,
                    infos: Arc::clone(&self.infos),
                    credentials: self.credentials.get(&rank).cloned().flatten(),
                };
                let _ = line.send(Out::Say(welcome));
                if let Some(task) = self.running.get_mut(&rank) {
                    task.lines.retain(|line| !line.is_closed());
                    task.lines.push(line);
                }
            }
            Local::Said { rank, line, message } => {
                let message = match message {
                    FromTask::Gather { name, round, message } => {
                        FromAgent::Gather { generation, rank, name, round, message }
                    }
                    FromTask::Abandon { name, reason } => {
                        FromAgent::Abandon { generation, rank, name, reason }
                    }
                    FromTask::Failed(text) => {
                        if let Some(task) = self.running.get_mut(&rank) {
                            task.traceback = Some(text.clone());
                        }
                        let _ = line.send(Out::Say(ToTask::Taken));
                        FromAgent::Confessed { generation, rank, traceback: text }
                    }
                    FromTask::Result(piece) => {
                        if piece.is_empty() {
                            let _ = line.send(Out::Say(ToTask::Taken));
                        }
                        FromAgent::Result { generation, rank, piece }
                    }
                    FromTask::Payload => return self.feed(line),
                };
                let _ = self.out.send(message).await;
            }
        }
    }

    /// Gives a task the payload, now or when it has come.
    fn feed(&mut self, line: UnboundedSender<Out<ToTask>>) {
        match &self.payload {
            Payload::Unknown | Payload::Coming(_) => self.hungry.push(line),
            Payload::Whole(payload) => {
                let total = payload.len() as u64;
                let message = move |piece| ToTask::Payload { total, piece };
                let pieces = Pieces::of(Arc::clone(payload)).map(message);
                let _ = line.send(Out::Give(Box::new(pieces)));
            }
            Payload::Missing(why) => {
                let _ = line.send(Out::Say(ToTask::NoPayload(why.clone())));
            }
        }
    }

    /// After the supervisor has gone: only endings matter.
    fn note_quietly(&mut self, generation: u64, event: Local) {
        if let (true, Local::Ended { rank, .. }) = (generation == self.generation, event) {
            self.running.remove(&rank);
        }
    }

    /// Tells that a task has failed, and what it said last.
    async fn report(&self, rank: usize, ending: Ending, by_itself: bool) {
        let Some(task) = self.running.get(&rank) else { return };
        let last = task.traceback.clone().unwrap_or_else(|| task.last.text());
        let generation = self.generation;
        let failed = FromAgent::Failed { generation, rank, ending, last, by_itself };
        let _ = self.out.send(failed).await;
    }

    fn tell_tasks(&self, message: impl Fn() -> ToTask) {
        for line in self.running.values().flat_map(|task| &task.lines) {
            let _ = line.send(Out::Say(message()));
        }
    }

    /// Tells all tasks to end; they have their grace.
    fn end(&mut self, reason: &str) {
        self.tell_tasks(|| ToTask::Ended(reason.to_owned()));
        // One that has said why it fails is on its way out, and keeps its exit status.
        let surprised = self.running.values().filter(|task| task.traceback.is_none());
        self.asked.fetch_max(ASKED, Ordering::Relaxed);
        surprised.for_each(|task| task.handle.terminate());
        self.kill_at.get_or_insert(now() + self.grace);
    }

    fn kill_if_due(&mut self) {
        if self.kill_at.is_some_and(|at| now() >= at) {
            self.asked.store(KILLED, Ordering::Relaxed);
            self.running.values().for_each(|task| task.handle.kill());
        }
    }

    fn forgive(&mut self, time: Duration) {
        self.kill_at = self.kill_at.map(|at| at + time);
        self.running.values_mut().for_each(|task| task.stopped = task.stopped.map(|at| at + time));
    }

    /// Kills what is overdue, and gives up tasks that somebody has stopped.
    async fn look(&mut self) {
        self.kill_if_due();
        if self.paused || self.kill_at.is_some() {
            return;
        }
        let mut lost = Vec::new();
        for (&rank, task) in &mut self.running {
            if !task.handle.is_stopped() {
                task.stopped = None;
                continue;
            }
            let since = *task.stopped.get_or_insert_with(now);
            if (now() - since) >= SILENCE && !task.given_up {
                task.given_up = true;
                lost.push(rank);
            }
        }
        for rank in lost {
            self.report(rank, Ending::Stopped, true).await;
        }
    }
}

/// Waits until all output has been passed on.
async fn drain(pumps: &mut JoinSet<()>) {
    while pumps.join_next().await.is_some() {}
}

/// Lets a task in, at a socket whose name only it was told.
async fn task_door(
    listener: UnixListener,
    generation: u64,
    rank: usize,
    local: mpsc::Sender<(u64, Local)>,
) {
    let mut door = Door::default();
    loop {
        let mut stream = accept_here(&listener).await;
        let local = local.clone();
        door.admit("this machine".into(), Spoken::default(), async move {
            let admit = |hello: &Hello| match hello.purpose {
                Purpose::Task => Ok(()),
                _ => Err("it is no task".to_owned()),
            };
            greet(&mut stream, admit).await?;
            tokio::spawn(talk(stream, generation, rank, local));
            Ok(())
        });
    }
}

/// Carries messages between one task and the agent until the task closes.
async fn talk(stream: UnixStream, generation: u64, rank: usize, local: mpsc::Sender<(u64, Local)>) {
    let (mut incoming, mut outgoing) = tokio::io::split(stream);
    let (line, messages) = mpsc::unbounded_channel::<Out<ToTask>>();
    let _writer = Bound::spawn(async move {
        let mut next = next(messages);
        while let Some(message) = poll_fn(&mut next).await {
            if write(&mut outgoing, &message).await.is_err() {
                return;
            }
        }
    });
    let connected = Local::Connected { rank, line: line.clone() };
    if local.send((generation, connected)).await.is_err() {
        return;
    }
    while let Ok(Some(message)) = read(&mut incoming).await {
        let said = Local::Said { rank, line: line.clone(), message };
        if local.send((generation, said)).await.is_err() {
            return;
        }
    }
}

/// The time, which a simulation may have set.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// What only this machine has, until it starts again.
fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32)
}
