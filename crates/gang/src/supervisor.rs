//! The owner of one job: launches agents, lets them in, and does what the state machine says.
//!
//! Everything runs on one thread but the sink, which may block (a paused terminal) without anybody noticing: agents stop
//! sending output when their credit is used up, and everything else goes on.

use crate::{
    Error, Event, Host, Job, Outcome, Result,
    identity::{Authority, Token, token},
    launch::{self, Launched, Tell},
    net::{
        Bound, Door, Duplex, Out, Spoken, accept_here, greet, listen_here, next, read, socket_name,
        speak,
    },
    protocol::{FromAgent, Hand, Invitation, Meeting, Pieces, ToAgent},
    state::{Action, Input, Machine, Terms},
};
use deuteron_collective::frame::{Hello, Purpose};
use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::ffi::OsStrExt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc as blocking},
    thread,
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::mpsc::{self, UnboundedReceiver, UnboundedSender},
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

/// How often the state machine learns that time has passed.
const TICK: Duration = Duration::from_millis(100);
/// Output that may be on its way from all agents together, and from one at least and at most.
const CREDIT: (u32, u32, u32) = (64 << 20, 128 << 10, 4 << 20);
/// How long agents may take to leave when the job is over.
const FAREWELL: Duration = Duration::from_secs(2);
/// Calls that the system keeps until they are taken.
const QUEUE: i32 = 4096;
/// After a connection has closed: how long the news of why its process ended may take.
const OBITUARY: Duration = Duration::from_millis(300);

/// A running job's reins, for signal handlers and other threads.
#[derive(Clone)]
pub struct Control {
    sender: UnboundedSender<Command>,
    receiver: Arc<Mutex<Option<UnboundedReceiver<Command>>>>,
}

enum Command {
    End(String),
    Pause(blocking::Sender<()>),
    Resume,
}

impl Default for Control {
    fn default() -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self { sender, receiver: Arc::new(Mutex::new(Some(receiver))) }
    }
}

impl Control {
    /// Ends the job: tasks are told, have their grace, and are killed.
    pub fn end(&self, reason: &str) {
        let _ = self.sender.send(Command::End(reason.to_owned()));
    }

    /// Stops every task where it stands. Returns when all have been, or at the limit.
    pub fn pause(&self, limit: Duration) {
        let (done, wait) = blocking::channel();
        if self.sender.send(Command::Pause(done)).is_ok() {
            let _ = wait.recv_timeout(limit);
        }
    }

    /// Lets stopped tasks go on.
    pub fn resume(&self) {
        let _ = self.sender.send(Command::Resume);
    }
}

/// Runs a job to its end. `sink` is called with what happens, in order, on a thread of its own.
///
/// ```no_run
/// use deuteron_gang::{Job, supervisor::{Control, run}};
/// let job = Job::local(4, ["python", "train.py"]);
/// let outcome = run(job, &Control::default(), |event| drop(event))?;
/// assert_eq!(outcome.results.len(), 4);
/// # Ok::<(), deuteron_gang::Error>(())
/// ```
pub fn run(
    job: Job,
    control: &Control,
    sink: impl FnMut(Event) + Send + 'static,
) -> Result<Outcome> {
    run_with(job, control, Box::new(Launched::start), sink)
}

/// The same where somebody else starts the agents: tasks of a Spark stage, say. `invite` is told the number of each agent
/// and the line that it has to find on its standard input, which then stays open for as long as the agent is wanted.
///
/// The line is the key to the job. It must travel as safely as the job's own secrets.
pub fn run_invited(
    job: Job,
    control: &Control,
    invite: impl Fn(usize, String) + Send + 'static,
    sink: impl FnMut(Event) + Send + 'static,
) -> Result<Outcome> {
    let launcher: Launcher = Box::new(move |_, _, invitation, _| {
        invite(invitation.agent as usize, launch::written(invitation)?);
        Ok(Launched::elsewhere())
    });
    run_with(job, control, launcher, sink)
}

/// The same, with another way to start agents.
fn run_with(
    job: Job,
    control: &Control,
    launcher: Launcher,
    sink: impl FnMut(Event) + Send + 'static,
) -> Result<Outcome> {
    job.check()?;
    let commands = control.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
    let commands = commands.ok_or_else(|| Error::Invalid("one control is for one job".into()))?;
    let (events, credits, viewer) = view(sink)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::system("no event loop", error))?;
    let outcome = runtime.block_on(async {
        let doors = Doors::open(&job).await?;
        let mut supervisor = Supervisor::new(job, events, launcher, doors);
        supervisor.serve(commands, credits).await
    });
    // What has been printed already is shown before the outcome is.
    drop(runtime);
    let _ = viewer.join();
    outcome
}

/// An event on its way to the sink, and whose credit it uses.
type Shown = (Event, Option<(usize, u32)>);

/// The way to the sink, the way back of credit (agent and bytes), and the thread between.
type View = (blocking::Sender<Shown>, UnboundedReceiver<(usize, u32)>, thread::JoinHandle<()>);

/// Starts the thread that shows events; it hands back credit for output once it has been shown.
fn view(mut sink: impl FnMut(Event) + Send + 'static) -> Result<View> {
    let (events, shown) = blocking::channel::<Shown>();
    let (credit, credits) = mpsc::unbounded_channel();
    let viewer = thread::Builder::new()
        .name("deuteron-view".into())
        .spawn(move || {
            for (event, paid) in shown {
                sink(event);
                if let Some(paid) = paid {
                    let _ = credit.send(paid);
                }
            }
        })
        .map_err(|error| Error::system("no thread to show events", error))?;
    Ok((events, credits, viewer))
}

/// From connections and processes to the loop. The number tells incarnations of an agent apart.
enum News {
    Arrived { agent: usize, incarnation: u64, hand: Hand, line: Line },
    Said(usize, u64, FromAgent),
    Gone(usize, u64, String),
    Complaint(usize, String),
}

/// A connection to an agent that has joined.
struct Line {
    sender: UnboundedSender<Out<ToAgent>>,
    /// Whether the payload is on its way.
    supplied: bool,
    _tasks: [Bound; 2],
}

impl Line {
    fn say(&self, message: ToAgent) {
        // A line that is broken is reported by its reader.
        let _ = self.sender.send(Out::Say(message));
    }

    /// Sends the payload, once.
    fn supply(&mut self, payload: &Arc<[u8]>) {
        if !std::mem::replace(&mut self.supplied, true) && !payload.is_empty() {
            let pieces = Pieces::of(Arc::clone(payload)).map(ToAgent::Payload);
            let _ = self.sender.send(Out::Give(Box::new(pieces)));
        }
    }
}

/// Who may join: the token of each agent until it has been used, and its incarnation.
type Roster = Arc<Mutex<BTreeMap<usize, (Option<Token>, u64)>>>;

/// Starts an agent. The last argument hears what it complains of, and how it ended.
type Launcher = Box<dyn Fn(&Job, &Host, &Invitation, Tell) -> Result<Launched> + Send>;

/// Where agents come in.
struct Doors {
    roster: Roster,
    report: mpsc::Sender<News>,
    news: mpsc::Receiver<News>,
    /// The abstract socket for agents on this machine.
    here: String,
    /// The port for others, who need certificates.
    there: Option<(SocketAddr, Authority)>,
    _open: Vec<Bound>,
}

struct Supervisor {
    job: Job,
    machine: Machine,
    first: Vec<Action>,
    events: blocking::Sender<Shown>,
    launcher: Launcher,
    doors: Doors,
    lines: BTreeMap<usize, (u64, Line)>,
    processes: BTreeMap<usize, Launched>,
    complaints: BTreeMap<usize, String>,
    incarnations: u64,
    waiting_for_pause: Vec<blocking::Sender<()>>,
    outcome: Option<Result<Outcome>>,
}

impl Doors {
    async fn open(job: &Job) -> Result<Self> {
        let (report, news) = mpsc::channel(1024);
        let roster = Roster::default();
        let here = socket_name()?;
        let listener = listen_here(&here)
            .map_err(|error| Error::system("no socket for agents on this machine", error))?;
        let mut open =
            vec![Bound::spawn(local_door(listener, Arc::clone(&roster), report.clone()))];
        let mut there = None;
        if !job.hosts.iter().all(Host::is_here) {
            let authority = Authority::new()?;
            let listener = listen(job.interface.as_deref()).await?;
            // The usual queue of 128 would make most of a thousand agents wait for a second or more.
            rustix::net::listen(&listener, QUEUE)
                .map_err(|error| Error::system("no port", error))?;
            let local = listener.local_addr().map_err(|error| Error::system("no port", error))?;
            let acceptor = TlsAcceptor::from(authority.issue()?.identity()?.server());
            let door = remote_door(listener, acceptor, Arc::clone(&roster), report.clone());
            open.push(Bound::spawn(door));
            there = Some((local, authority));
        }
        Ok(Self { roster, report, news, here, there, _open: open })
    }

    fn roster(&self) -> MutexGuard<'_, BTreeMap<usize, (Option<Token>, u64)>> {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Supervisor {
    fn new(job: Job, events: blocking::Sender<Shown>, launcher: Launcher, doors: Doors) -> Self {
        let terms = Terms {
            tasks: job.tasks,
            hosts: job.hosts.clone(),
            request: job.request.clone(),
            first_generation: job.first_generation,
            restarts: job.restarts.clone(),
            start_limit: job.start_limit,
            grace: job.grace,
            command: job.command.iter().map(|word| word.as_bytes().to_vec()).collect(),
            environment: job.environment.clone(),
            directory: std::env::current_dir().unwrap_or_default().as_os_str().as_bytes().to_vec(),
            payload: job.payload.len() as u64,
        };
        let (machine, first) = Machine::new(terms, now());
        Self {
            job,
            machine,
            first,
            events,
            launcher,
            doors,
            lines: BTreeMap::new(),
            processes: BTreeMap::new(),
            complaints: BTreeMap::new(),
            incarnations: 0,
            waiting_for_pause: Vec::new(),
            outcome: None,
        }
    }

    async fn serve(
        &mut self,
        mut commands: UnboundedReceiver<Command>,
        mut credits: UnboundedReceiver<(usize, u32)>,
    ) -> Result<Outcome> {
        let first = std::mem::take(&mut self.first);
        self.perform(first)?;
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let outcome = loop {
            if let Some(outcome) = self.outcome.take() {
                break outcome;
            }
            let input = tokio::select! {
                Some(news) = self.doors.news.recv() => self.hear(news),
                Some(command) = commands.recv() => Some(match command {
                    Command::End(reason) => Input::End(reason),
                    Command::Pause(done) => {
                        self.waiting_for_pause.push(done);
                        Input::Pause
                    }
                    Command::Resume => Input::Resume,
                }),
                Some((agent, bytes)) = credits.recv() => {
                    self.send(agent, ToAgent::Credit(bytes));
                    None
                }
                _ = ticks.tick() => Some(Input::Tick),
            };
            if let Some(input) = input {
                let actions = self.machine.handle(now(), input);
                self.perform(actions)?;
            }
        };
        self.dismiss_all().await;
        outcome
    }

    fn hear(&mut self, news: News) -> Option<Input> {
        match news {
            News::Arrived { agent, incarnation, hand, line } => {
                if !self.is_current(agent, incarnation) {
                    return None;
                }
                let agents = self.job.hosts.len() as u32;
                let credit = (CREDIT.0 / agents.max(1)).clamp(CREDIT.1, CREDIT.2);
                line.say(ToAgent::Credit(credit));
                self.lines.insert(agent, (incarnation, line));
                Some(Input::Joined(agent, hand))
            }
            News::Said(agent, incarnation, message) => {
                let current = self.lines.get(&agent).is_some_and(|(now, _)| *now == incarnation);
                current.then_some(Input::Said(agent, message))
            }
            News::Gone(agent, incarnation, reason) => {
                if !self.is_current(agent, incarnation) {
                    return None;
                }
                self.forget(agent);
                let complaint = self.complaints.remove(&agent);
                let complaint = complaint.map_or(String::new(), |text| format!(": {text}"));
                Some(Input::Gone(agent, reason + &complaint))
            }
            News::Complaint(agent, text) => {
                let name = &self.job.hosts[agent].name;
                let _ = self.events.send((Event::Note(format!("{name}: {text}")), None));
                self.complaints.insert(agent, text);
                None
            }
        }
    }

    /// Whether news is of the agent that is expected now, not of one that was forgotten.
    fn is_current(&self, agent: usize, incarnation: u64) -> bool {
        self.doors.roster().get(&agent).is_some_and(|(_, now)| *now == incarnation)
    }

    /// An agent that is forgotten can neither speak nor come back.
    fn forget(&mut self, agent: usize) {
        self.doors.roster().remove(&agent);
        self.lines.remove(&agent);
        self.processes.remove(&agent);
    }

    fn perform(&mut self, actions: Vec<Action>) -> Result<()> {
        for action in actions {
            match action {
                Action::Launch(agent) => self.launch(agent)?,
                Action::Dismiss(agent) => self.forget(agent),
                Action::Send(agent, message) => self.send(agent, message),
                Action::Assign(agent, mut assignment) => {
                    if let Some((_, authority)) = &self.doors.there {
                        for task in &mut assignment.tasks {
                            task.credentials = Some(authority.issue()?);
                        }
                    }
                    self.send(agent, ToAgent::Start(assignment));
                    if let Some((_, line)) = self.lines.get_mut(&agent) {
                        line.supply(&self.job.payload);
                    }
                }
                Action::Emit(event) => {
                    let _ = self.events.send((event, None));
                }
                Action::Show { agent, rank, stream, lines } => {
                    let paid = Some((agent, lines.len() as u32));
                    let _ = self.events.send((Event::Output { rank, stream, lines }, paid));
                }
                Action::Paused => {
                    self.waiting_for_pause.drain(..).for_each(|done| {
                        let _ = done.send(());
                    });
                }
                Action::Finish(outcome) => self.outcome = Some(outcome),
            }
        }
        Ok(())
    }

    fn send(&self, agent: usize, message: ToAgent) {
        if let Some((_, line)) = self.lines.get(&agent) {
            line.say(message);
        }
    }

    fn launch(&mut self, agent: usize) -> Result<()> {
        self.incarnations += 1;
        let incarnation = self.incarnations;
        let token = token()?;
        self.doors.roster().insert(agent, (Some(token), incarnation));
        let host = &self.job.hosts[agent];
        let (meeting, address) = match &self.doors.there {
            Some((door, authority)) if !host.is_here() => {
                let credentials = authority.issue()?;
                (Meeting::There { addresses: addresses(*door)?, credentials }, None)
            }
            there => {
                let address = there.as_ref().and_then(|(door, _)| self.address_here(door.ip()));
                (Meeting::Here(self.doors.here.clone()), address)
            }
        };
        let invitation = Invitation {
            agent: agent as u32,
            name: host.name.clone(),
            slots: host.slots,
            token,
            meeting,
            discovery: if self.job.request.is_some() {
                self.job.discovery.clone()
            } else {
                Vec::new()
            },
            address,
        };
        let report = self.doors.report.clone();
        let tell: Tell = Box::new(move |news| {
            let news = match news {
                Ok(line) => News::Complaint(agent, line),
                Err(end) => News::Gone(agent, incarnation, end),
            };
            let report = report.clone();
            Box::pin(async move {
                let _ = report.send(news).await;
            })
        });
        self.processes.insert(agent, (self.launcher)(&self.job, host, &invitation, tell)?);
        Ok(())
    }

    /// Where other hosts reach tasks on this machine, whose door is at `bound`.
    fn address_here(&self, bound: IpAddr) -> Option<IpAddr> {
        if !bound.is_unspecified() {
            return Some(bound);
        }
        self.job.hosts.iter().filter(|host| !host.is_here()).find_map(|host| route_to(&host.name))
    }

    /// Lets agents go, and ends those that do not.
    async fn dismiss_all(&mut self) {
        for (_, line) in self.lines.values() {
            line.say(ToAgent::Leave);
        }
        let all = async {
            for launched in self.processes.values_mut() {
                launched.ended().await;
            }
        };
        let _ = timeout(FAREWELL, all).await;
        self.lines.clear();
        self.processes.clear();
    }
}

/// The time, which a simulation may have set.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Where agents on other hosts may find a door of this machine. TLS tells them when they have found it.
fn addresses(door: SocketAddr) -> Result<Vec<SocketAddr>> {
    if !door.ip().is_unspecified() {
        return Ok(vec![door]);
    }
    let all = interfaces()?.into_iter();
    Ok(all.map(|(_, address)| SocketAddr::new(address, door.port())).collect())
}

async fn local_door(listener: UnixListener, roster: Roster, report: mpsc::Sender<News>) {
    let mut door = Door::default();
    loop {
        let stream = accept_here(&listener).await;
        let (roster, report) = (Arc::clone(&roster), report.clone());
        door.admit("this machine".into(), Spoken::default(), async move {
            welcome(stream, &roster, report).await
        });
    }
}

async fn remote_door(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    roster: Roster,
    report: mpsc::Sender<News>,
) {
    let mut door = Door::default();
    loop {
        door.room().await;
        // Out of descriptors, say: strangers will have gone after a while.
        let Ok((stream, address)) = listener.accept().await else {
            tokio::time::sleep(TICK).await;
            continue;
        };
        let (acceptor, roster, report) = (acceptor.clone(), Arc::clone(&roster), report.clone());
        let spoken = Spoken::default();
        door.admit(address.to_string(), spoken.clone(), async move {
            stream.peek(&mut [0]).await?;
            spoken.set();
            stream.set_nodelay(true)?;
            welcome(acceptor.accept(stream).await?, &roster, report).await
        });
    }
}

/// Lets an agent in that is on the roster, and listens to it from then on.
async fn welcome(
    mut stream: impl Duplex,
    roster: &Roster,
    report: mpsc::Sender<News>,
) -> io::Result<()> {
    let admit = |hello: &Hello| {
        let mut roster = roster.lock().unwrap_or_else(PoisonError::into_inner);
        match roster.get_mut(&(hello.from as usize)) {
            Some((token, incarnation))
                if hello.purpose == Purpose::Agent
                    && token.is_some_and(|token| same(&token, &hello.token)) =>
            {
                *token = None;
                Ok(*incarnation)
            }
            _ => Err("its token is wrong or used, or it is no longer expected".to_owned()),
        }
    };
    let (hello, incarnation) = greet(&mut stream, admit).await?;
    let agent = hello.from as usize;
    let Some(FromAgent::Hand(hand)) = read(&mut stream).await? else {
        return Err(io::Error::other("it does not say what it has"));
    };
    let (mut incoming, outgoing) = tokio::io::split(stream);
    let (sender, messages) = mpsc::unbounded_channel();
    let told = report.clone();
    let reader = Bound::spawn(async move {
        let why = loop {
            match read(&mut incoming).await {
                Ok(Some(message)) => {
                    if told.send(News::Said(agent, incarnation, message)).await.is_err() {
                        return;
                    }
                }
                Ok(None) => break "closed its connection".to_owned(),
                Err(error) => break format!("lost its connection: {error}"),
            }
        };
        tokio::time::sleep(OBITUARY).await;
        let _ = told.send(News::Gone(agent, incarnation, why)).await;
    });
    let beat = ToAgent::Beat;
    let writer = Bound::spawn(speak(outgoing, next(messages), beat));
    let line = Line { sender, supplied: false, _tasks: [reader, writer] };
    let _ = report.send(News::Arrived { agent, incarnation, hand, line }).await;
    Ok(())
}

/// Compares without telling by its time where two tokens differ.
fn same(a: &Token, b: &Token) -> bool {
    a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

/// At the interface or address that the user named, or at every address.
async fn listen(interface: Option<&str>) -> Result<TcpListener> {
    let Some(wanted) = interface else {
        // A socket for version 6 takes calls of version 4 too; not every machine has it.
        let every = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
        let every = every.map(|address| SocketAddr::new(address, 0));
        return TcpListener::bind(&every[..])
            .await
            .map_err(|error| Error::system("no port", error));
    };
    let address = match wanted.parse() {
        Ok(address) => address,
        Err(_) => interface_address(wanted)?,
    };
    let failed = |error| Error::system(format!("no port on {address}"), error);
    TcpListener::bind((address, 0)).await.map_err(failed)
}

fn interface_address(wanted: &str) -> Result<IpAddr> {
    let all = interfaces()?;
    all.iter().find(|(name, _)| name == wanted).map(|(_, address)| *address).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        Error::Invalid(format!("there is no interface {wanted}; there are {}", names.join(", ")))
    })
}

/// Interfaces that are up, and their addresses; loopback is last.
pub fn interfaces() -> Result<Vec<(String, IpAddr)>> {
    let mut found: Vec<(String, IpAddr)> = if_addrs::get_if_addrs()
        .map_err(|error| Error::system("the interfaces cannot be listed", error))?
        .into_iter()
        .filter(|interface| interface.is_oper_up() && !interface.is_link_local())
        .map(|interface| (interface.name.clone(), interface.ip()))
        .collect();
    found.sort_by_key(|(_, address)| (address.is_loopback(), address.is_ipv6()));
    Ok(found)
}

/// The address from which this machine would talk to a host.
fn route_to(host: &str) -> Option<IpAddr> {
    let target = std::net::ToSocketAddrs::to_socket_addrs(&(host, 9)).ok()?.next()?;
    let any: IpAddr =
        if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = std::net::UdpSocket::bind((any, 0)).ok()?;
    socket.connect(target).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod scale;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod strangers;
