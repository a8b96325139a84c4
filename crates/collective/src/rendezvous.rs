//! How ranks find each other: one primitive, an all-gather of small messages.

use crate::{
    accept::{self, Caller},
    error::{Error, Result, seconds},
    frame::{Hello, Purpose},
    security::{Authenticated, Security},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    time::Timespec,
};
use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener},
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

/// How long a message that has begun may take to arrive.
const MESSAGE_TIME: Duration = Duration::from_secs(5);
/// Longest message of one rank.
pub const MAX_MESSAGE: usize = 64 << 10;

/// The tasks of one gang, able to tell each other something small.
pub trait Rendezvous {
    /// This rank.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn size(&self) -> usize;

    /// Attempt number of the gang; ranks of different generations never talk.
    fn generation(&self) -> u64;

    /// Gives `message` to all ranks and returns everybody's in rank order. Every rank calls it the same number
    /// of times. Fails when not all have come within `limit`.
    fn all_gather(&self, message: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>>;

    /// Whether all ranks are still there, as far as is known without asking them. Called now and then by a rank
    /// that waits for others outside [`Rendezvous::all_gather`].
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Tells the other ranks that this one gives up, and why: what they wait for here will not come.
    fn abandon(&self, _reason: &str) {}

    /// The address at which other hosts reach this one, if the rendezvous knows it.
    fn address(&self) -> Option<IpAddr> {
        None
    }

    /// The number under which users know `rank`, for messages: a rank of a sub-group has that of the outermost group.
    fn name(&self, rank: usize) -> usize {
        rank
    }
}

/// Among threads of one process.
pub struct LocalRendezvous {
    rank: usize,
    shared: Arc<(Mutex<Round>, Condvar)>,
}

struct Round {
    /// Messages of the round that is filling.
    messages: Vec<Option<Vec<u8>>>,
    /// The last complete round and its number.
    complete: Arc<Vec<Vec<u8>>>,
    number: u64,
    gone: Vec<usize>,
    /// What the first rank that gave up has said.
    abandoned: Option<String>,
}

impl LocalRendezvous {
    /// One for each of `size` threads.
    ///
    /// ```
    /// use deuteron_collective::{LocalRendezvous, Rendezvous};
    /// let one = LocalRendezvous::group(1).remove(0);
    /// let gathered = one.all_gather(b"hello", std::time::Duration::from_secs(1))?;
    /// assert_eq!(gathered, [b"hello"]);
    /// # Ok::<(), deuteron_collective::Error>(())
    /// ```
    pub fn group(size: usize) -> Vec<Self> {
        let round = Round {
            messages: vec![None; size],
            complete: Arc::default(),
            number: 0,
            gone: Vec::new(),
            abandoned: None,
        };
        let shared = Arc::new((Mutex::new(round), Condvar::new()));
        (0..size).map(|rank| Self { rank, shared: Arc::clone(&shared) }).collect()
    }

    fn round(&self) -> MutexGuard<'_, Round> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rendezvous for LocalRendezvous {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.round().messages.len()
    }

    fn generation(&self) -> u64 {
        0
    }

    fn all_gather(&self, message: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + limit;
        let mut round = self.round();
        let number = round.number + 1;
        round.messages[self.rank] = Some(message.to_vec());
        if round.messages.iter().all(Option::is_some) {
            round.complete = Arc::new(round.messages.iter_mut().filter_map(Option::take).collect());
            round.number = number;
            self.shared.1.notify_all();
        }
        while round.number < number {
            if let Some(reason) = &round.abandoned {
                return Err(Error::Bootstrap(reason.clone()));
            }
            let missing: Vec<usize> =
                (0..round.messages.len()).filter(|rank| round.messages[*rank].is_none()).collect();
            if let Some(rank) = missing.iter().find(|rank| round.gone.contains(rank)) {
                return Err(Error::Bootstrap(format!("rank {rank} has left before all had come")));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late(&missing, limit));
            }
            let waited = self.shared.1.wait_timeout(round, left);
            round = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(round.complete.to_vec())
    }

    fn check(&self) -> Result<()> {
        self.round().abandoned.clone().map_or(Ok(()), |reason| Err(Error::Bootstrap(reason)))
    }

    fn abandon(&self, reason: &str) {
        let text = format!("rank {} gave up: {reason}", self.rank);
        self.round().abandoned.get_or_insert(text);
        self.shared.1.notify_all();
    }
}

impl Drop for LocalRendezvous {
    fn drop(&mut self) {
        self.round().gone.push(self.rank);
        self.shared.1.notify_all();
    }
}

pub(crate) fn late(missing: &[usize], limit: Duration) -> Error {
    let ranks: Vec<String> = missing.iter().map(usize::to_string).collect();
    Error::Bootstrap(format!(
        "after {} rank{} {} had not come; see whether it has started and can reach this host",
        seconds(limit),
        if missing.len() == 1 { "" } else { "s" },
        ranks.join(", ")
    ))
}

/// Over TCP, or TLS on TCP, to rank 0: small, for tests and programs that start their ranks themselves.
pub struct TcpRendezvous {
    rank: usize,
    size: usize,
    generation: u64,
    address: IpAddr,
    /// Rank 0 holds everybody by rank; the others hold rank 0.
    lines: Mutex<BTreeMap<usize, Line>>,
    /// What ended it, if anything has.
    failure: OnceLock<Error>,
}

/// A connection and what has arrived on it before it was asked for.
struct Line {
    stream: Authenticated,
    inbox: VecDeque<Vec<u8>>,
}

/// Set in a length: not a message follows, but why the sender gives up.
const GAVE_UP: u32 = 1 << 31;
/// Longest reason.
const MAX_REASON: usize = 512;

impl TcpRendezvous {
    /// Meets at `address`, where rank 0 listens. Returns when this rank is connected (rank 0: when all are).
    pub fn connect(
        address: SocketAddr,
        rank: usize,
        size: usize,
        generation: u64,
        security: &Security,
        limit: Duration,
    ) -> Result<Self> {
        security.admits(address.ip())?;
        let deadline = Instant::now() + limit;
        let mut own = address.ip();
        let streams = if rank == 0 {
            let listener = TcpListener::bind(address).map_err(|error| {
                Error::system(format!("rank 0 cannot listen on {address}"), error)
            })?;
            let expected = (1..size).map(|rank| (rank, Purpose::Rendezvous)).collect();
            let admit = |hello: &Hello, _: &[u8]| accept::for_me(hello, 0, generation);
            let callers = accept::all(
                &listener,
                security,
                expected,
                deadline,
                || Ok(()),
                admit,
                |rank| rank,
            )?;
            callers.into_iter().map(|Caller { rank, stream, .. }| (rank, stream)).collect()
        } else {
            let (purpose, token) = (Purpose::Rendezvous, [0; 16]);
            let hello = Hello { generation, from: rank as u32, to: 0, purpose, token };
            let stream =
                accept::call(address, security, &hello, deadline, true).map_err(|error| {
                    Error::system(format!("rank {rank} cannot reach {address}"), error)
                })?;
            own = stream.socket().local_addr().map_or(own, |local| local.ip());
            vec![(0, stream)]
        };
        let lines = streams
            .into_iter()
            .map(|(rank, stream)| (rank, Line { stream, inbox: VecDeque::new() }))
            .collect();
        Ok(Self {
            rank,
            size,
            generation,
            address: own,
            lines: Mutex::new(lines),
            failure: OnceLock::new(),
        })
    }

    fn lines(&self) -> MutexGuard<'_, BTreeMap<usize, Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what has arrived, and passes on bad news.
    fn collect(&self, lines: &mut BTreeMap<usize, Line>) -> Result<()> {
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        let mut failed = None;
        for (rank, line) in lines.iter_mut() {
            while failed.is_none() && line.stream.has_arrived() {
                match read_message(&mut line.stream) {
                    Ok(message) => line.inbox.push_back(message),
                    Err(error) => failed = Some(lost(*rank, &error)),
                }
            }
        }
        failed.map_or(Ok(()), |error| {
            self.tell(lines, &error);
            Err(error)
        })
    }

    /// Keeps what ended it, and rank 0 tells everybody. Who is gone does not hear it.
    fn tell(&self, lines: &mut BTreeMap<usize, Line>, error: &Error) {
        let _ = self.failure.set(error.clone());
        if self.rank == 0 {
            let reason = error.to_string();
            for line in lines.values_mut() {
                let _ = write_message(&mut line.stream, reason.as_bytes(), GAVE_UP);
            }
        }
    }

    /// Waits until all of `ranks` have said something, and returns what, in their order.
    fn hear(
        &self,
        lines: &mut BTreeMap<usize, Line>,
        ranks: Range<usize>,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        loop {
            self.collect(lines)?;
            let silent = |rank: &usize| lines.get(rank).is_none_or(|line| line.inbox.is_empty());
            let missing: Vec<usize> = ranks.clone().filter(silent).collect();
            if missing.is_empty() {
                return Ok(ranks
                    .filter_map(|rank| lines.get_mut(&rank)?.inbox.pop_front())
                    .collect());
            }
            if Instant::now() > deadline {
                let error = late(&missing, limit);
                self.tell(lines, &error);
                return Err(error);
            }
            let sockets = lines.values().map(|line| line.stream.socket());
            let mut fds: Vec<PollFd<'_>> =
                sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
            let nap = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let _ = poll(&mut fds, Some(&nap));
        }
    }
}

/// The error for a rank whose line is no longer usable.
fn lost(rank: usize, error: &io::Error) -> Error {
    Error::Bootstrap(match error.kind() {
        // What it said itself, or what rank 0 passes on.
        io::ErrorKind::ConnectionAborted => error.to_string(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            format!(
                "rank {rank} is gone: its connection closed, its process has ended or was killed"
            )
        }
        _ => format!("the rendezvous with rank {rank} broke: {error}"),
    })
}

fn write_message(stream: &mut Authenticated, message: &[u8], mark: u32) -> io::Result<()> {
    let bound = if mark == GAVE_UP { MAX_REASON } else { MAX_MESSAGE };
    let message = &message[..message.len().min(bound)];
    let mut bytes = (message.len() as u32 | mark).to_le_bytes().to_vec();
    bytes.extend(message);
    stream.write_all(&bytes)?;
    stream.flush()
}

/// Reads a message of which the first byte is there. A reason to give up is an error of kind `ConnectionAborted`.
fn read_message(stream: &mut Authenticated) -> io::Result<Vec<u8>> {
    stream.socket().set_read_timeout(Some(MESSAGE_TIME))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    let (gave_up, length) = (length & GAVE_UP != 0, (length & !GAVE_UP) as usize);
    let bound = if gave_up { MAX_REASON } else { MAX_MESSAGE };
    if length > bound {
        let text = format!("a message of {length} bytes is over the bound of {bound}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message)?;
    if gave_up {
        let text = String::from_utf8_lossy(&message).into_owned();
        return Err(io::Error::new(io::ErrorKind::ConnectionAborted, text));
    }
    Ok(message)
}

impl Rendezvous for TcpRendezvous {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn all_gather(&self, message: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        if message.len() > MAX_MESSAGE {
            let length = message.len();
            return Err(Error::Invalid(format!(
                "a message of {length} bytes is over the rendezvous' bound of {MAX_MESSAGE}"
            )));
        }
        let deadline = Instant::now() + limit;
        let mut lines = self.lines();
        if self.rank > 0 {
            for line in lines.values_mut() {
                write_message(&mut line.stream, message, 0).map_err(|error| lost(0, &error))?;
            }
            return (0..self.size)
                .map(|_| self.hear(&mut lines, 0..1, deadline, limit).map(|mut one| one.remove(0)))
                .collect();
        }
        let mut messages = self.hear(&mut lines, 1..self.size, deadline, limit)?;
        messages.insert(0, message.to_vec());
        let mut failed = Ok(());
        for (rank, line) in lines.iter_mut() {
            for message in &messages {
                failed = failed.and(
                    write_message(&mut line.stream, message, 0)
                        .map_err(|error| lost(*rank, &error)),
                );
            }
        }
        failed.inspect_err(|error| self.tell(&mut lines, error))?;
        Ok(messages)
    }

    fn check(&self) -> Result<()> {
        self.collect(&mut self.lines())
    }

    fn abandon(&self, reason: &str) {
        let text = format!("rank {} gave up: {reason}", self.rank);
        for line in self.lines().values_mut() {
            let _ = write_message(&mut line.stream, text.as_bytes(), GAVE_UP);
        }
    }

    fn address(&self) -> Option<IpAddr> {
        Some(self.address)
    }
}
