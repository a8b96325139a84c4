//! Links between two ranks that are made when they are first needed, and the messages on them.
//!
//! - PAIR-1: of two ranks the higher calls and the lower is called, so a pair never has two links for one purpose.
//! - PAIR-2: whoever waits here lets in every member that calls meanwhile, whatever for, and files its link until
//!   somebody asks for it. So ranks that wait for each other in a circle get on.
//! - PAIR-3: each direction of a pair has a link and a lock of its own: messages of different pairs and directions, and
//!   collectives, never wait for each other.
//! - PAIR-4: nothing blocks but `poll`, and that never without the group's alarm. A stranger takes a place in the
//!   waiting room for a while, never anybody's time.

mod reception;
mod visit;

use crate::{
    bootstrap::Directory,
    call::{Call, Kind, disagreement},
    error::{Error, FailureKind, Result},
    frame::{Header, Purpose},
    health::Ticket,
    link::Link,
};
use reception::Reception;
use rustix::{
    event::{PollFd, PollFlags, poll},
    time::Timespec,
};
use std::{
    collections::BTreeMap,
    io::{self, IoSlice},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError},
    thread,
    time::{Duration, Instant},
};
use visit::{Trouble, Visit};

/// Looks without progress before the rank goes to sleep in `poll`.
const LOOKS: u32 = 100;
/// The longest sleep.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// The longest sleep of a rank that is about to try something again.
const SHORT_NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// A rank that waits this long to be called asks whether anybody is there to call it.
const KNOCK_AFTER: Duration = Duration::from_millis(300);

/// Which link: the rank at its other end, and what the higher of the two calls for.
type Seat = (usize, Purpose);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    Out,
    In,
}

/// One direction of a pair.
#[derive(Default)]
struct Lane {
    link: Option<Box<dyn Link>>,
    /// Messages so far.
    number: u64,
}

type Lanes = BTreeMap<(usize, Direction), Arc<Mutex<Lane>>>;

pub(crate) struct Pairs {
    directory: Directory,
    reception: OnceLock<Reception>,
    lanes: Mutex<Lanes>,
}

impl Pairs {
    pub fn new(directory: Directory) -> Self {
        Self { directory, reception: OnceLock::new(), lanes: Mutex::default() }
    }

    /// Sends a message to `to`.
    pub fn send(&self, ticket: &mut Ticket<'_>, to: usize, bytes: &[u8]) -> Result<()> {
        let lane = self.lane(to, Direction::Out);
        let mut lane = take(ticket, &lane, to)?;
        let Lane { link, number } = &mut *lane;
        let link = self.ready(ticket, link, to, Direction::Out)?;
        let header = self.header(*number, *ticket.call, bytes.len()).encode();
        let total = header.len() + bytes.len();
        let (mut sent, mut idle) = (0, 0);
        loop {
            let mut now = 0;
            if sent < total {
                let rest = &header[sent.min(header.len())..];
                let parts =
                    [IoSlice::new(rest), IoSlice::new(&bytes[sent.saturating_sub(header.len())..])];
                now = link.send(&parts).map_err(|error| ticket.broken(to, &error))?;
                sent += now;
            }
            if sent == total && link.flush().map_err(|error| ticket.broken(to, &error))? {
                *number += 1;
                return Ok(());
            }
            self.pause(ticket, link, (to, Direction::Out), now, &mut idle)?;
        }
    }

    /// Fills `bytes` with the next message of `from`.
    pub fn receive(&self, ticket: &mut Ticket<'_>, from: usize, bytes: &mut [u8]) -> Result<()> {
        let lane = self.lane(from, Direction::In);
        let mut lane = take(ticket, &lane, from)?;
        let Lane { link, number } = &mut *lane;
        let link = self.ready(ticket, link, from, Direction::In)?;
        let theirs = Call { kind: Kind::Send, root: self.directory.me, ..*ticket.call };
        let expected = self.header(*number, theirs, bytes.len());
        let mut header = [0; Header::BYTES];
        self.fill(ticket, link, from, &mut header)?;
        match Header::decode(&header) {
            Ok(header) if header == expected => {}
            Ok(header) => return Err(unexpected(ticket, from, &header, &expected)),
            Err(error) => {
                return Err(ticket.lost(from, format!("it sent what is not a frame: {error}")));
            }
        }
        self.fill(ticket, link, from, bytes)?;
        *number += 1;
        Ok(())
    }

    fn fill(
        &self,
        ticket: &mut Ticket<'_>,
        link: &mut dyn Link,
        from: usize,
        bytes: &mut [u8],
    ) -> Result<()> {
        let (mut filled, mut idle) = (0, 0);
        while filled < bytes.len() {
            let now =
                link.receive(&mut bytes[filled..]).map_err(|error| ticket.broken(from, &error))?;
            filled += now;
            if now == 0 {
                self.pause(ticket, link, (from, Direction::In), now, &mut idle)?;
            } else {
                idle = 0;
            }
        }
        Ok(())
    }

    fn header(&self, number: u64, call: Call, length: usize) -> Header {
        let generation = self.directory.generation;
        Header { generation, number, step: 0, length: length as u64, call }
    }

    fn lane(&self, rank: usize, direction: Direction) -> Arc<Mutex<Lane>> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(lanes.entry((rank, direction)).or_default())
    }

    /// The lane's link, opened if this is its first message.
    fn ready<'a>(
        &self,
        ticket: &mut Ticket<'_>,
        link: &'a mut Option<Box<dyn Link>>,
        rank: usize,
        direction: Direction,
    ) -> Result<&'a mut dyn Link> {
        let opened = match link.take() {
            Some(open) => open,
            None => {
                let purpose = match (rank < self.directory.me, direction) {
                    (true, Direction::Out) | (false, Direction::In) => Purpose::Send,
                    (true, Direction::In) | (false, Direction::Out) => Purpose::Receive,
                };
                let mut opened = self.open(ticket, &[(rank, purpose)])?;
                opened.pop().ok_or_else(|| Error::Bootstrap("no link, which is a bug".into()))?
            }
        };
        Ok(&mut **link.insert(opened))
    }

    fn reception(&self, ticket: &Ticket<'_>) -> Result<&Reception> {
        if let Some(reception) = self.reception.get() {
            return Ok(reception);
        }
        let made = Reception::new(&self.directory).map_err(|error| {
            ticket.fail(FailureKind::Aborted, format!("no callers can be let in: {error}"))
        })?;
        Ok(self.reception.get_or_init(|| made))
    }

    /// Links to all that are wanted, in their order. Everybody who is wanted wants the same of this rank.
    pub fn open(&self, ticket: &mut Ticket<'_>, wanted: &[Seat]) -> Result<Vec<Box<dyn Link>>> {
        let (directory, start) = (&self.directory, Instant::now());
        let reception = self.reception(ticket)?;
        let mut wanted: Vec<Wanted> = wanted.iter().map(|seat| Wanted::new(*seat)).collect();
        loop {
            // Looked at before the links: whoever has been let in and then left is not missing.
            for one in &mut wanted {
                one.has_left = ticket.health.has_left(one.seat.0);
            }
            reception.serve(directory);
            for one in wanted.iter_mut().filter(|one| one.link.is_none()) {
                let rank = one.seat.0;
                one.link = if rank > directory.me {
                    reception.take(one.seat)
                } else {
                    let advanced = one.visit(one.seat.1).advance(directory);
                    advanced.map_err(|trouble| failed(ticket, rank, trouble))?
                };
            }
            if wanted.iter().all(|one| one.link.is_some()) {
                return Ok(wanted.into_iter().filter_map(|one| one.link).collect());
            }
            let missing = || wanted.iter().filter(|one| one.link.is_none());
            ticket.check(|| missing().map(|one| one.seat.0).collect())?;
            for one in wanted.iter_mut().filter(|one| one.link.is_none()) {
                let rank = one.seat.0;
                if rank < directory.me {
                    continue;
                }
                if one.has_left {
                    ticket.check_near(|| vec![rank])?;
                }
                // A neighbour's memory tells when it leaves, and nobody leaves in a collective; of others only some
                // say goodbye to this rank.
                let may_leave = !directory.neighbours[rank] && one.seat.1 != Purpose::Data;
                if may_leave && start.elapsed() > KNOCK_AFTER {
                    let heard = one.visit(Purpose::Knock).listen(directory);
                    heard.map_err(|trouble| failed(ticket, rank, trouble))?;
                }
            }
            let missing = wanted.iter().filter(|one| one.link.is_none());
            let visits = || missing.clone().filter_map(|one| one.visit.as_ref());
            let nap = if visits().any(Visit::tries_again) { SHORT_NAP } else { NAP };
            let mut fds = vec![PollFd::new(&ticket.health.alarm, PollFlags::IN)];
            fds.push(PollFd::new(reception, PollFlags::IN));
            fds.extend(visits().filter_map(Visit::interest));
            let _ = poll(&mut fds, Some(&nap));
        }
    }

    /// Between two looks at a link: at once after progress, then after a yield, then after a sleep.
    fn pause(
        &self,
        ticket: &mut Ticket<'_>,
        link: &mut dyn Link,
        (rank, direction): (usize, Direction),
        moved: usize,
        idle: &mut u32,
    ) -> Result<()> {
        *idle = if moved > 0 { 0 } else { *idle + 1 };
        if *idle == 0 {
            return Ok(());
        }
        if *idle <= LOOKS {
            thread::yield_now();
            return Ok(());
        }
        ticket.check(|| vec![rank])?;
        let reception = self.reception(ticket)?;
        let interest = link.interest(direction == Direction::In, direction == Direction::Out);
        let Some((fd, flags)) = interest else { return Ok(()) };
        let mut fds = [
            PollFd::new(reception, PollFlags::IN),
            PollFd::new(&ticket.health.alarm, PollFlags::IN),
            PollFd::from_borrowed_fd(fd, flags),
        ];
        let _ = poll(&mut fds, Some(&NAP));
        let called = !fds[0].revents().is_empty();
        if called {
            reception.serve(&self.directory); // PAIR-2
        }
        Ok(())
    }
}

/// A link on its way.
struct Wanted {
    seat: Seat,
    link: Option<Box<dyn Link>>,
    /// The call to the other rank, or the knock at its door.
    visit: Option<Visit>,
    has_left: bool,
}

impl Wanted {
    fn new(seat: Seat) -> Self {
        Self { seat, link: None, visit: None, has_left: false }
    }

    fn visit(&mut self, purpose: Purpose) -> &mut Visit {
        self.visit.get_or_insert_with(|| Visit::new(self.seat.0, purpose))
    }
}

/// The lane, when no other thread has it any more.
fn take<'a>(
    ticket: &mut Ticket<'_>,
    lane: &'a Mutex<Lane>,
    rank: usize,
) -> Result<MutexGuard<'a, Lane>> {
    loop {
        match lane.try_lock() {
            Ok(lane) => return Ok(lane),
            Err(TryLockError::Poisoned(lane)) => return Ok(lane.into_inner()),
            Err(TryLockError::WouldBlock) => {
                ticket.check(|| vec![rank])?;
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

#[cold]
fn failed(ticket: &Ticket<'_>, rank: usize, trouble: Trouble) -> Error {
    match trouble {
        Trouble::Broken(error) => ticket.broken(rank, &error),
        Trouble::Nobody => {
            let why = "nobody listens at its address any more: it has left the group or ended";
            ticket.broken(rank, &io::Error::other(why))
        }
        Trouble::Refused(why) => ticket.lost(rank, format!("it refused a connection: {why}")),
        Trouble::Here(why) => ticket.fail(FailureKind::Aborted, why),
    }
}

/// The error for a message that is not the one which was to be received.
#[cold]
fn unexpected(ticket: &Ticket<'_>, from: usize, got: &Header, expected: &Header) -> Error {
    let me = ticket.health.rank;
    if got.call == expected.call {
        let cause = format!(
            "it sent message {} of generation {} ({} bytes), not message {} of generation {} ({} bytes)",
            got.number,
            got.generation,
            got.length,
            expected.number,
            expected.generation,
            expected.length
        );
        return ticket.lost(from, cause);
    }
    let name = |rank| ticket.health.name(rank);
    let calls = [(name(from), got.call.to_string()), (name(me), ticket.call.to_string())];
    ticket.fail(FailureKind::Mismatch, disagreement(&calls))
}
