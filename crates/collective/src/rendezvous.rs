//! How ranks find each other: one primitive, an all-gather of small messages.

use crate::{
    accept::{self, Caller},
    error::{Error, Result, seconds},
    frame::{Hello, Purpose},
    security::{Authenticated, Security},
};
use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
    time::{Duration, Instant},
};

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

    /// The address at which other hosts reach this one, if the rendezvous knows it.
    fn address(&self) -> Option<IpAddr> {
        None
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
    streams: Mutex<BTreeMap<usize, Authenticated>>,
}

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
        let greet = |to: usize| Hello {
            generation,
            from: rank as u32,
            to: to as u32,
            purpose: Purpose::Rendezvous,
            token: [0; 16],
        };
        let mut own = address.ip();
        let streams = if rank == 0 {
            let listener = TcpListener::bind(address).map_err(|error| {
                Error::system(format!("rank 0 cannot listen on {address}"), error)
            })?;
            let expected = (1..size).map(|rank| (rank, Purpose::Rendezvous)).collect();
            let callers = accept::all(
                &listener,
                security,
                expected,
                deadline,
                &AtomicBool::new(false),
                |hello, _| accept::for_me(hello, 0, generation),
            )?;
            callers.into_iter().map(|Caller { rank, stream, .. }| (rank, stream)).collect()
        } else {
            let stream =
                accept::call(address, security, &greet(0), deadline, true).map_err(|error| {
                    Error::system(format!("rank {rank} cannot reach {address}"), error)
                })?;
            own = stream.socket().local_addr().map_or(own, |local| local.ip());
            BTreeMap::from([(0, stream)])
        };
        Ok(Self { rank, size, generation, address: own, streams: Mutex::new(streams) })
    }

    /// Rank 0 collects and hands out; every message has its length before it.
    fn exchange(&self, message: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Instant::now() + limit;
        let failed = |rank: usize| {
            move |error: io::Error| match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => late(&[rank], limit),
                _ => Error::Bootstrap(format!("the rendezvous with rank {rank} broke: {error}")),
            }
        };
        if self.rank > 0 {
            let stream = streams.get_mut(&0).ok_or_else(|| late(&[0], limit))?;
            write_message(stream, message).map_err(failed(0))?;
            return (0..self.size)
                .map(|_| read_message(stream, deadline))
                .collect::<io::Result<_>>()
                .map_err(failed(0));
        }
        let mut messages = vec![message.to_vec()];
        for rank in 1..self.size {
            let stream = streams.get_mut(&rank).ok_or_else(|| late(&[rank], limit))?;
            messages.push(read_message(stream, deadline).map_err(failed(rank))?);
        }
        for (rank, stream) in streams.iter_mut() {
            for message in &messages {
                write_message(stream, message).map_err(failed(*rank))?;
            }
        }
        Ok(messages)
    }
}

fn write_message(stream: &mut Authenticated, message: &[u8]) -> io::Result<()> {
    let mut bytes = (message.len() as u32).to_le_bytes().to_vec();
    bytes.extend(message);
    stream.write_all(&bytes)
}

fn read_message(stream: &mut Authenticated, deadline: Instant) -> io::Result<Vec<u8>> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.socket().set_read_timeout(Some(left))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_MESSAGE {
        let text = format!("a message of {length} bytes is over the bound of {MAX_MESSAGE}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message)?;
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
        self.exchange(message, limit)
    }

    fn address(&self) -> Option<IpAddr> {
        Some(self.address)
    }
}
