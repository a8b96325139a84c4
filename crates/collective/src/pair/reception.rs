//! Where callers wait until it is known who they are, and the links of those who were let in.
//!
//! Anybody may call. A caller has five seconds to greet, and at most [`WAITING_ROOM`] are waiting at once: if more come,
//! whoever has been there for longest makes room, after it has had a moment. All of it happens in the calls of ranks
//! that wait anyway; between these, callers wait in the kernel.

use super::Seat;
use crate::{
    accept::{GREETING_TIME, NAP, WAITING_ROOM},
    bootstrap::{self, Directory},
    frame::{Answer, Hello, Purpose},
    link::{Link, pipe::PipeLink},
    security::Authenticated,
    shm::handover::Channel,
};
use rustix::{
    event::epoll,
    fd::{AsFd, BorrowedFd, OwnedFd},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How long a caller keeps its place when the waiting room is full.
const MOMENT: Duration = Duration::from_millis(250);
/// What members may call for.
const PURPOSES: [Purpose; 4] = [Purpose::Data, Purpose::Send, Purpose::Receive, Purpose::Knock];

pub(super) struct Reception {
    /// Readable when somebody calls or a guest has said something: what all waiting threads can poll.
    epoll: OwnedFd,
    room: Mutex<Room>,
}

#[derive(Default)]
struct Room {
    guests: Vec<Guest>,
    /// Let in, and not asked for yet.
    arrived: BTreeMap<Seat, Box<dyn Link>>,
    /// Everybody who was ever let in.
    known: BTreeSet<Seat>,
    /// Ranks that wait to be called by this one.
    knocking: BTreeMap<usize, Box<dyn Link>>,
}

/// A caller that has not greeted yet.
struct Guest {
    since: Instant,
    from: String,
    state: State,
    greeting: [u8; Hello::MAX_BYTES],
    filled: usize,
}

enum State {
    Far(Authenticated),
    Near(Channel, Vec<OwnedFd>),
}

/// Who was let in, and the link to it.
type Admitted = (Seat, Box<dyn Link>);

impl AsFd for Reception {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Reception {
    pub fn new(directory: &Directory) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        watch(&epoll, &directory.near.socket)?;
        if let Some((listener, _)) = &directory.far {
            watch(&epoll, &listener.socket)?;
        }
        Ok(Self { epoll, room: Mutex::default() })
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The link of a member that has called, if it has.
    pub fn take(&self, seat: Seat) -> Option<Box<dyn Link>> {
        self.room().arrived.remove(&seat)
    }

    /// Lets in whoever has called, as far as that goes without waiting.
    pub fn serve(&self, directory: &Directory) {
        let room = &mut *self.room();
        room.listen(&self.epoll, directory);
        let mut index = 0;
        while let Some(guest) = room.guests.get_mut(index) {
            match guest.advance(directory, &room.known) {
                Ok(None) if guest.since.elapsed() < GREETING_TIME => index += 1,
                Ok(None) => {
                    let guest = room.guests.remove(index);
                    refused(&guest.from, "it did not say who it is");
                }
                Ok(Some(hello)) => {
                    let guest = room.guests.remove(index);
                    let from = guest.from.clone();
                    match guest.welcome(&self.epoll, &hello) {
                        Ok((seat, link)) if seat.1 == Purpose::Knock => {
                            room.knocking.insert(seat.0, link);
                        }
                        Ok((seat, link)) => {
                            room.known.insert(seat);
                            room.arrived.insert(seat, link);
                        }
                        Err(error) => refused(&from, &error.to_string()),
                    }
                }
                Err(error) => {
                    let guest = room.guests.remove(index);
                    refused(&guest.from, &error.to_string());
                }
            }
        }
    }
}

/// Makes the epoll readable when the socket is.
fn watch(epoll: &OwnedFd, socket: impl AsFd) -> io::Result<()> {
    epoll::add(epoll, socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    Ok(())
}

fn refused(from: &str, why: &str) {
    tracing::warn!("refused a connection from {from}: {why}");
}

impl Room {
    /// Whether another caller may come in; if need be, the one who has been there for longest goes.
    fn has_place(&mut self) -> bool {
        if self.guests.len() >= WAITING_ROOM {
            if self.guests.first().is_some_and(|oldest| oldest.since.elapsed() < MOMENT) {
                return false;
            }
            let oldest = self.guests.remove(0);
            refused(&oldest.from, "it was slow to say who it is, and others are waiting");
        }
        true
    }

    /// Takes new callers from the listeners.
    fn listen(&mut self, epoll: &OwnedFd, directory: &Directory) {
        while self.has_place() {
            let Some((stream, _)) = next(directory.near.socket.accept()) else { break };
            self.seat("this host".into(), |from| Guest::near(stream, from, epoll));
        }
        let Some((listener, _)) = &directory.far else { return };
        while self.has_place() {
            let Some((stream, from)) = next(listener.socket.accept()) else { break };
            self.seat(from.to_string(), |from| Guest::far(stream, from, epoll, directory));
        }
    }

    fn seat(&mut self, from: String, guest: impl FnOnce(String) -> io::Result<Guest>) {
        match guest(from.clone()) {
            Ok(guest) => self.guests.push(guest),
            Err(error) => refused(&from, &error.to_string()),
        }
    }
}

/// Who has come, if anybody has.
fn next<S>(accepted: io::Result<S>) -> Option<S> {
    match accepted {
        Ok(accepted) => Some(accepted),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(error) => {
            tracing::warn!("a connection could not be accepted: {error}");
            thread::sleep(NAP);
            None
        }
    }
}

impl Guest {
    fn new(from: String, state: State) -> Self {
        let (greeting, filled) = ([0; Hello::MAX_BYTES], 0);
        Self { since: Instant::now(), from, state, greeting, filled }
    }

    fn near(stream: UnixStream, from: String, epoll: &OwnedFd) -> io::Result<Self> {
        let channel = Channel::checked(stream)?;
        watch(epoll, &channel)?;
        Ok(Self::new(from, State::Near(channel, Vec::new())))
    }

    fn far(
        stream: TcpStream,
        from: String,
        epoll: &OwnedFd,
        directory: &Directory,
    ) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        watch(epoll, &stream)?;
        Ok(Self::new(from, State::Far(directory.security.begin_accept(stream)?)))
    }

    /// Goes on as far as it can now; the greeting, once it is whole and a member's. Whoever is not welcome is told why.
    fn advance(
        &mut self,
        directory: &Directory,
        known: &BTreeSet<Seat>,
    ) -> io::Result<Option<Hello>> {
        if let State::Far(stream) = &mut self.state {
            match stream.shake() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                other => other?,
            }
        }
        let verdict = loop {
            match Hello::decode(&self.greeting[..self.filled]) {
                Ok(None) => {}
                Ok(Some((hello, length))) if length == self.filled => {
                    break self.judge(&hello, directory, known).map(|()| hello);
                }
                Ok(Some(_)) => break Err("bytes follow the greeting".to_owned()),
                Err(error) => break Err(error.to_string()),
            }
            let rest = &mut self.greeting[self.filled..];
            let read = match &mut self.state {
                State::Far(stream) => match stream.read(rest) {
                    Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                    other => other,
                },
                State::Near(channel, descriptors) => channel.try_receive(rest, descriptors),
            };
            match read {
                Ok(0) => return Ok(None),
                Ok(read) => self.filled += read,
                Err(error) if error.kind() == io::ErrorKind::QuotaExceeded => {
                    break Err(error.to_string());
                }
                Err(error) => return Err(error),
            }
        };
        match verdict {
            Ok(hello) => Ok(Some(hello)),
            Err(why) => {
                let _ = self.answer(Some(&why));
                Err(io::Error::other(why))
            }
        }
    }

    fn judge(
        &self,
        hello: &Hello,
        directory: &Directory,
        known: &BTreeSet<Seat>,
    ) -> Result<(), String> {
        let Directory { me, generation, members, .. } = directory;
        let from = bootstrap::admit(members, *generation, *me, hello, &PURPOSES)?;
        if let State::Far(stream) = &self.state
            && stream.certificate() != members[from].certificate
        {
            return Err(format!(
                "your certificate is not the one that rank {from} has told its group"
            ));
        }
        // PAIR-1
        let in_order = if hello.purpose == Purpose::Knock { from < *me } else { from > *me };
        if !in_order || known.contains(&(from, hello.purpose)) {
            return Err(format!("rank {from} is not expected, or has come already"));
        }
        Ok(())
    }

    /// The answer fits a connection that has carried nothing yet; one that does not take it at once is of no use.
    fn answer(&mut self, refusal: Option<&str>) -> io::Result<()> {
        let answer = Answer::encode(refusal);
        match &mut self.state {
            State::Near(channel, _) => channel.send(&answer, &[]),
            State::Far(stream) => {
                stream.write_all(&answer)?;
                stream.flush()
            }
        }
    }

    /// Tells the guest that it is welcome, and makes its connection a link.
    fn welcome(mut self, epoll: &OwnedFd, hello: &Hello) -> io::Result<Admitted> {
        let seat = (hello.from as usize, hello.purpose);
        // What it says from now on is for whoever uses the link.
        let unwatch = |socket: BorrowedFd<'_>| epoll::delete(epoll, socket);
        let pipe = match &mut self.state {
            State::Far(stream) => unwatch(stream.socket().as_fd()).map(|()| None)?,
            State::Near(channel, descriptors) => {
                unwatch(channel.as_fd())?;
                let descriptors = <[OwnedFd; 2]>::try_from(std::mem::take(descriptors))
                    .map_err(|_| io::Error::other("the wrong number of descriptors"));
                Some(descriptors.and_then(PipeLink::open))
            }
        };
        let refusal = pipe.as_ref().and_then(|pipe| pipe.as_ref().err()).map(io::Error::to_string);
        self.answer(refusal.as_deref())?;
        match (self.state, pipe) {
            (State::Far(stream), _) => Ok((seat, stream.into_link()?)),
            (State::Near(..), Some(pipe)) => Ok((seat, Box::new(pipe?))),
            (State::Near(..), None) => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}
