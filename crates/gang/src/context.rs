//! Inside a task: who it is, who the others are, and how they meet.

use crate::{
    Accelerator, Error, Gang, Result, TaskInfo,
    identity::Credentials,
    protocol::{FromTask, Gathered, PIECE, Parcel, ToTask, encode},
};
use deuteron_collective::{
    Engine, EngineOptions, Group, GroupOptions, LocalRendezvous, MAX_MESSAGE, Rendezvous, Security,
    Tuning,
    frame::{Answer, Hello, Purpose},
};
use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{IpAddr, Shutdown},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How long the agent may take to answer a greeting.
const GREETING: Duration = Duration::from_secs(10);
/// The rendezvous of [`Task::all_gather`] and [`Task::barrier`].
const MAIN: &str = "";

/// One member of a gang, seen from inside.
///
/// ```
/// # use deuteron_gang::Gang;
/// let greetings = Gang::local(2).run(|task| {
///     let all = task.all_gather(format!("rank {}", task.rank()).as_bytes(), None)?;
///     Ok(all.len())
/// })?;
/// assert_eq!(greetings, [2, 2]);
/// # Ok::<(), deuteron_gang::Error>(())
/// ```
pub struct Task {
    rank: usize,
    generation: u64,
    infos: Arc<Vec<TaskInfo>>,
    link: Link,
    /// How many groups have been made.
    groups: Mutex<u64>,
    /// How many engines have been made.
    engines: Mutex<u64>,
}

enum Link {
    Threads(LocalRendezvous),
    Agent { agent: Arc<Agent>, credentials: Option<Credentials> },
}

impl Task {
    /// The task that this process is, if an agent has started it (`DEUTERON_TASK`).
    pub fn from_environment() -> Result<Self> {
        let name = std::env::var("DEUTERON_TASK").map_err(|_| {
            Error::Invalid(
                "this process is not a task of a gang (DEUTERON_TASK is not set): start it with deuteron run".into(),
            )
        })?;
        let (agent, welcome) = Agent::connect(&name)?;
        let ToTask::Welcome { generation, rank, infos, credentials } = welcome else {
            return Err(Error::Ended("the agent did not welcome this task".into()));
        };
        let link = Link::Agent { agent, credentials };
        Ok(Self {
            rank,
            generation,
            infos,
            link,
            groups: Mutex::default(),
            engines: Mutex::default(),
        })
    }

    /// A gang of one, for a process that nobody has started as a task.
    ///
    /// ```
    /// let task = deuteron_gang::Task::alone()?;
    /// assert_eq!((task.rank(), task.size()), (0, 1));
    /// # Ok::<(), deuteron_gang::Error>(())
    /// ```
    pub fn alone() -> Result<Self> {
        let infos = Gang::local(1).infos()?;
        let rendezvous = LocalRendezvous::group(1).pop();
        let rendezvous = rendezvous.ok_or_else(|| Error::Invalid("one is none".into()))?;
        Ok(Self::of_thread(Arc::new(infos), rendezvous))
    }

    /// A thread of this process.
    pub(crate) fn of_thread(infos: Arc<Vec<TaskInfo>>, rendezvous: LocalRendezvous) -> Self {
        let rank = rendezvous.rank();
        let link = Link::Threads(rendezvous);
        Self {
            rank,
            generation: 0,
            infos,
            link,
            groups: Mutex::default(),
            engines: Mutex::default(),
        }
    }

    /// This task's number, from zero.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many tasks there are.
    pub fn size(&self) -> usize {
        self.infos.len()
    }

    /// Attempt number of the gang, from zero: how often it has been restarted.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Every task's rank, host, address and accelerators.
    pub fn infos(&self) -> &[TaskInfo] {
        &self.infos
    }

    /// This task's own entry in [`Task::infos`].
    pub fn info(&self) -> &TaskInfo {
        &self.infos[self.rank]
    }

    /// The accelerators that are this task's own.
    pub fn accelerators(&self) -> &[Accelerator] {
        &self.info().accelerators
    }

    /// Waits until every task has come here, as long as all are alive, or at most for `limit`.
    pub fn barrier(&self, limit: Option<Duration>) -> Result<()> {
        self.all_gather(&[], limit).map(drop)
    }

    /// Gives a small message to all tasks and returns everybody's, in rank order.
    pub fn all_gather(&self, message: &[u8], limit: Option<Duration>) -> Result<Vec<Vec<u8>>> {
        match &self.link {
            Link::Threads(local) => {
                let limit = limit.unwrap_or(Duration::from_secs(u64::from(u32::MAX)));
                Ok(local.all_gather(message, limit)?)
            }
            Link::Agent { agent, .. } => agent.all_gather(MAIN, message, limit),
        }
    }

    /// Connects all tasks for collective operations. Every task calls it the same number of times; between hosts the
    /// connections are encrypted with the job's own certificates, whatever `options` say.
    ///
    /// Unless `options` choose thresholds or tuning, the group is tuned as `DEUTERON_TUNING` (`deuteron run --tuning`)
    /// says: by default with what was measured on this kind of machine before, or is now.
    pub fn group(&self, options: GroupOptions) -> Result<Group> {
        let tuning = tuning(std::env::var("DEUTERON_TUNING").ok().as_deref())?;
        let mut options = options.tuning_unless_chosen(tuning);
        match &self.link {
            Link::Threads(local) => Ok(Group::connect(local, options)?),
            Link::Agent { agent, credentials } => {
                if let Some(credentials) = credentials {
                    options = options.security(Security::Tls(credentials.identity()?));
                }
                let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
                let meeting = Meeting { task: self, agent, name: format!("group {groups}") };
                *groups += 1;
                drop(groups);
                Ok(Group::connect(&meeting, options)?)
            }
        }
    }

    /// Connects all tasks for named operations in any order: a group of its own, and an engine on it as the settings
    /// of `deuteron run` ask for. Every task calls it the same number of times. The first engine records the timeline,
    /// if one is wanted.
    pub fn engine(&self, options: GroupOptions) -> Result<Engine> {
        let mut made = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = self.engine_on(self.group(options)?)?;
        if let Some(path) = variable("DEUTERON_TIMELINE").filter(|_| *made == 0) {
            engine.start_timeline(path)?;
        }
        *made += 1;
        Ok(engine)
    }

    /// An engine on a group of some of the tasks, as the settings ask for.
    pub fn engine_on(&self, group: Group) -> Result<Engine> {
        Ok(Engine::new(group, engine_options(variable)?)?)
    }

    /// What whoever started the gang gives to every task ([`crate::Job::payload`]). Each call fetches it from the agent.
    pub fn payload(&self) -> Result<Vec<u8>> {
        match &self.link {
            Link::Agent { agent, .. } => agent.payload(),
            Link::Threads(_) => Err(Error::Invalid("a closure has what it captures".into())),
        }
    }

    /// What this task returns to whoever started the gang.
    pub fn set_result(&self, result: &[u8]) -> Result<()> {
        let Link::Agent { agent, .. } = &self.link else {
            return Err(Error::Invalid("a closure returns its result".into()));
        };
        for piece in result.chunks(PIECE).chain([&[][..]]) {
            agent.send(&FromTask::Result(piece.to_vec()))?;
        }
        agent.taken()
    }

    /// Tells why this task is about to fail (a traceback), for the error message.
    pub fn set_failure(&self, traceback: &str) -> Result<()> {
        let Link::Agent { agent, .. } = &self.link else {
            return Err(Error::Invalid("a closure fails by its error, or by a panic".into()));
        };
        agent.send(&FromTask::Failed(traceback.to_owned()))?;
        agent.taken()
    }
}

/// A setting from the environment.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// What the settings ask of an engine.
fn engine_options(variable: impl Fn(&str) -> Option<String>) -> Result<EngineOptions> {
    let mut options = EngineOptions::default();
    let wrong = |name: &str, value: &str, what: &str| {
        Error::Invalid(format!("{name} is {value:?}, and should be {what}"))
    };
    let name = "DEUTERON_BUCKET_SIZE";
    if let Some(text) = variable(name) {
        let bytes = text.parse().map_err(|_| wrong(name, &text, "a number of bytes"))?;
        options = options.bucket_bytes(bytes);
    }
    let name = "DEUTERON_STALL_REPORT";
    if let Some(text) = variable(name) {
        let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        options = options.stall(time.ok_or_else(|| wrong(name, &text, "a number of seconds"))?);
    }
    let name = "DEUTERON_DETERMINISTIC";
    match variable(name).as_deref() {
        None | Some("0") => Ok(options),
        Some("1") => Ok(options.deterministic(true)),
        Some(other) => Err(wrong(name, other, "0 or 1")),
    }
}

/// What `DEUTERON_TUNING` asks for.
fn tuning(word: Option<&str>) -> Result<Tuning> {
    match word {
        None | Some("" | "auto") => Ok(Tuning::automatic()),
        Some("off") => Ok(Tuning::Off),
        Some("measure") => Ok(Tuning::Measured),
        Some(other) => Err(Error::Invalid(format!(
            "DEUTERON_TUNING is {other:?}, and should be auto, off or measure"
        ))),
    }
}

/// One group's rendezvous through the agent.
struct Meeting<'a> {
    task: &'a Task,
    agent: &'a Agent,
    name: String,
}

impl Rendezvous for Meeting<'_> {
    fn rank(&self) -> usize {
        self.task.rank
    }

    fn size(&self) -> usize {
        self.task.size()
    }

    fn generation(&self) -> u64 {
        self.task.generation
    }

    fn all_gather(
        &self,
        message: &[u8],
        limit: Duration,
    ) -> deuteron_collective::Result<Vec<Vec<u8>>> {
        self.agent.all_gather(&self.name, message, Some(limit)).map_err(bootstrap)
    }

    fn check(&self) -> deuteron_collective::Result<()> {
        self.agent.inbox().failure(&self.name).map_or(Ok(()), |error| Err(bootstrap(error)))
    }

    fn abandon(&self, reason: &str) {
        let (name, reason) = (self.name.clone(), reason.to_owned());
        // Without an agent the others learn it from theirs.
        let _ = self.agent.send(&FromTask::Abandon { name, reason });
    }

    fn address(&self) -> Option<IpAddr> {
        Some(self.task.info().address)
    }
}

fn bootstrap(error: Error) -> deuteron_collective::Error {
    deuteron_collective::Error::Bootstrap(error.to_string())
}

/// The connection to the agent; a thread of its own listens to it.
struct Agent {
    /// A child made by `fork` has no such thread, and must not write into its parent's connection.
    process: u32,
    stream: UnixStream,
    sending: Mutex<()>,
    /// Held by whoever is being sent the payload.
    fetching: Mutex<()>,
    shared: Arc<(Mutex<Inbox>, Condvar)>,
}

#[derive(Default)]
struct Inbox {
    rounds: BTreeMap<String, u64>,
    gathered: BTreeMap<(String, u64), Arc<Gathered>>,
    abandoned: BTreeMap<String, String>,
    ended: Option<String>,
    taken: bool,
    parcel: Option<Parcel>,
    payload: Option<Result<Vec<u8>, String>>,
}

impl Inbox {
    fn failure(&self, name: &str) -> Option<Error> {
        self.ended.as_ref().or(self.abandoned.get(name)).map(|reason| Error::Ended(reason.clone()))
    }
}

impl Agent {
    fn connect(name: &str) -> Result<(Arc<Self>, ToTask)> {
        let failed =
            |error: io::Error| Error::system("the agent of this task cannot be reached", error);
        let address = SocketAddr::from_abstract_name(name).map_err(failed)?;
        let mut stream = UnixStream::connect_addr(&address).map_err(failed)?;
        stream.set_read_timeout(Some(GREETING)).map_err(failed)?;
        let hello = Hello { generation: 0, from: 0, to: 0, purpose: Purpose::Task, token: [0; 16] };
        stream.write_all(&hello.encode()).map_err(failed)?;
        Answer::read(&mut stream).map_err(failed)?;
        let welcome = read(&mut stream).map_err(failed)?;
        stream.set_read_timeout(None).map_err(failed)?;
        let shared = Arc::<(Mutex<Inbox>, Condvar)>::default();
        let mut listener = stream.try_clone().map_err(failed)?;
        let inbox = Arc::clone(&shared);
        thread::Builder::new()
            .name("deuteron-context".into())
            .spawn(move || {
                loop {
                    let message = read(&mut listener);
                    let mut inbox_now = inbox.0.lock().unwrap_or_else(PoisonError::into_inner);
                    let ended = message.is_err();
                    match message {
                        Ok(message) => inbox_now.take(message),
                        Err(_) => {
                            inbox_now.ended.get_or_insert("the agent of this task is gone".into());
                        }
                    }
                    inbox.1.notify_all();
                    if ended {
                        return;
                    }
                }
            })
            .map_err(failed)?;
        let agent = Self {
            process: std::process::id(),
            stream,
            sending: Mutex::default(),
            fetching: Mutex::default(),
            shared,
        };
        Ok((Arc::new(agent), welcome))
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: &FromTask) -> Result<()> {
        if self.process != std::process::id() {
            return Err(Error::Invalid(
                "this task belongs to the process that made it, not to a child that it forked"
                    .into(),
            ));
        }
        let frame = encode(message)?;
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        (&self.stream)
            .write_all(&frame)
            .map_err(|error| Error::Ended(format!("the agent of this task is gone: {error}")))
    }

    fn all_gather(
        &self,
        name: &str,
        message: &[u8],
        limit: Option<Duration>,
    ) -> Result<Vec<Vec<u8>>> {
        if message.len() > MAX_MESSAGE {
            return Err(Error::Invalid(format!(
                "a message of {} bytes is over the bound of {MAX_MESSAGE}: use a collective operation",
                message.len()
            )));
        }
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut inbox = self.inbox();
        if let Some(error) = inbox.failure(name) {
            return Err(error);
        }
        let next = inbox.rounds.entry(name.to_owned()).or_default();
        let round = *next;
        *next += 1;
        drop(inbox);
        self.send(&FromTask::Gather { name: name.to_owned(), round, message: message.to_vec() })?;
        let key = (name.to_owned(), round);
        let gathered =
            self.wait(deadline, |inbox| match (inbox.gathered.remove(&key), inbox.failure(name)) {
                (Some(gathered), _) => Some(Ok(gathered)),
                (None, Some(error)) => Some(Err(error)),
                (None, None) => None,
            });
        match gathered {
            Some(gathered) => {
                let gathered = gathered?;
                Ok(Arc::try_unwrap(gathered)
                    .map_or_else(|shared| shared.messages.clone(), |own| own.messages))
            }
            None => Err(Error::Collective(deuteron_collective::Error::TimedOut {
                operation: "the rendezvous".into(),
                details: format!(
                    "not all tasks have come within {}",
                    crate::error::seconds(limit.unwrap_or_default())
                ),
            })),
        }
    }

    fn payload(&self) -> Result<Vec<u8>> {
        let _fetching = self.fetching.lock().unwrap_or_else(PoisonError::into_inner);
        self.send(&FromTask::Payload)?;
        let payload = self.wait(None, |inbox| match (inbox.payload.take(), &inbox.ended) {
            (Some(payload), _) => Some(payload.map_err(Error::Invalid)),
            (None, Some(reason)) => Some(Err(Error::Ended(reason.clone()))),
            (None, None) => None,
        });
        payload.unwrap_or_else(|| Err(Error::Ended("the payload has not come".into())))
    }

    /// Waits until what was sent has been passed on.
    fn taken(&self) -> Result<()> {
        let answer = self.wait(None, |inbox| match (inbox.taken, inbox.failure(MAIN)) {
            (true, _) => {
                inbox.taken = false;
                Some(Ok(()))
            }
            (false, failure) => failure.map(Err),
        });
        answer.unwrap_or(Ok(()))
    }

    /// Waits until `look` finds something, or the deadline.
    fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut look: impl FnMut(&mut Inbox) -> Option<T>,
    ) -> Option<T> {
        let mut inbox = self.inbox();
        loop {
            if let Some(found) = look(&mut inbox) {
                return Some(found);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            inbox = match left {
                None => self.shared.1.wait(inbox).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return None,
                Some(left) => {
                    self.shared
                        .1
                        .wait_timeout(inbox, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}

impl Inbox {
    fn take(&mut self, message: ToTask) {
        match message {
            ToTask::Gathered(gathered) => {
                let key = (gathered.name.clone(), gathered.round);
                self.gathered.insert(key, gathered);
            }
            ToTask::Abandoned { name, reason } => {
                self.abandoned.entry(name).or_insert(reason);
            }
            ToTask::Ended(reason) => {
                self.ended.get_or_insert(reason);
            }
            ToTask::Taken => self.taken = true,
            ToTask::Payload { total, piece } => {
                let parcel = self.parcel.take().map_or_else(|| Parcel::new(total), Ok);
                match parcel {
                    Ok(mut parcel) => match parcel.add(&piece) {
                        Some(whole) => self.payload = Some(Ok(whole)),
                        None => self.parcel = Some(parcel),
                    },
                    Err(why) => self.payload = Some(Err(why)),
                }
            }
            ToTask::NoPayload(why) => self.payload = Some(Err(why)),
            ToTask::Welcome { .. } => {}
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

/// Reads one message of the agent.
fn read(stream: &mut UnixStream) -> io::Result<ToTask> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > crate::protocol::MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame is too long"));
    }
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame)?;
    postcard::from_bytes(&frame).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_set_by_numbers() {
        let options = |name: &'static str, value: &'static str| {
            engine_options(move |asked| (asked == name).then(|| value.to_owned()))
        };
        assert!(options("DEUTERON_BUCKET_SIZE", "4096").is_ok());
        assert!(options("DEUTERON_STALL_REPORT", "0.5").is_ok());
        for (name, value) in [
            ("DEUTERON_BUCKET_SIZE", "4KiB"),
            ("DEUTERON_STALL_REPORT", "-1"),
            ("DEUTERON_DETERMINISTIC", "yes"),
        ] {
            assert!(options(name, value).unwrap_err().to_string().contains(name));
        }
    }

    #[test]
    fn tuning_has_three_words() {
        assert_eq!(tuning(Some("off")).unwrap(), Tuning::Off);
        assert_eq!(tuning(Some("measure")).unwrap(), Tuning::Measured);
        assert_eq!(tuning(None).unwrap(), tuning(Some("auto")).unwrap());
        assert!(tuning(Some("fast")).unwrap_err().to_string().contains("auto, off or measure"));
    }
}
