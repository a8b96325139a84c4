//! A call to another rank, step by step, so that nobody is kept waiting by it.

use super::SHORT_NAP;
use crate::{
    accept::not_oneself,
    bootstrap::{self, Directory},
    frame::{Answer, Purpose},
    link::{Link, pipe::PipeLink},
    security::Authenticated,
    shm::handover::Channel,
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::AsFd,
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt},
    time::Timespec,
};
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

/// Why a call cannot succeed.
pub(super) enum Trouble {
    /// Nobody listens there any more.
    Nobody,
    /// The one who is called does not want it.
    Refused(String),
    /// The connection, in a way that trying again does not mend.
    Broken(io::Error),
    /// This rank itself cannot call.
    Here(String),
}

enum State {
    /// Nothing under way until then.
    Waiting(Instant),
    Connecting(TcpStream),
    Shaking(Authenticated),
    /// The greeting is on its way.
    Far(Authenticated, Vec<u8>),
    /// The greeting is on its way, with the other end of the pipe.
    Near(Channel, PipeLink, Vec<u8>),
    /// It is held to notice its end.
    Held(Box<dyn Link>),
}

pub(super) struct Visit {
    rank: usize,
    purpose: Purpose,
    state: State,
}

impl Visit {
    pub fn new(rank: usize, purpose: Purpose) -> Self {
        Self { rank, purpose, state: State::Waiting(Instant::now()) }
    }

    /// Nothing to poll for: it has to be advanced again in a moment.
    pub fn tries_again(&self) -> bool {
        matches!(self.state, State::Waiting(_))
    }

    pub fn interest(&self) -> Option<PollFd<'_>> {
        match &self.state {
            State::Waiting(_) | State::Held(_) => None,
            State::Connecting(stream) => Some(PollFd::new(stream, PollFlags::OUT)),
            State::Shaking(stream) | State::Far(stream, _) => {
                Some(PollFd::new(stream.socket(), PollFlags::IN))
            }
            State::Near(channel, ..) => Some(PollFd::new(channel, PollFlags::IN)),
        }
    }

    /// Holds the connection as long as it lasts, instead of using it. Whoever is called need not come to answer: if it
    /// leaves, nobody listens any more.
    pub fn listen(&mut self, directory: &Directory) -> Result<(), Trouble> {
        if let State::Held(link) = &mut self.state {
            if link.receive(&mut [0]).is_err() {
                self.state = State::Waiting(Instant::now());
            }
            return Ok(());
        }
        if let Some(link) = self.advance(directory)? {
            self.state = State::Held(link);
        }
        Ok(())
    }

    /// Goes on as far as it can now; the link, once the other side has let it in.
    ///
    /// A connection that ends before the answer is tried again: the waiting room was crowded. If the other rank has left,
    /// the next try finds nobody.
    pub fn advance(&mut self, directory: &Directory) -> Result<Option<Box<dyn Link>>, Trouble> {
        loop {
            let pause = Duration::from_nanos(SHORT_NAP.tv_nsec as u64);
            let later = State::Waiting(Instant::now() + pause);
            let state = std::mem::replace(&mut self.state, later);
            match self.step(state, directory) {
                Ok(Step::On(state)) => self.state = state,
                Ok(Step::NotYet(state)) => {
                    self.state = state;
                    return Ok(None);
                }
                Ok(Step::Done(link)) => return Ok(Some(link)),
                Err(Trouble::Broken(error)) if passes(&error) => return Ok(None),
                Err(trouble) => return Err(trouble),
            }
        }
    }

    fn step(&self, state: State, directory: &Directory) -> Result<Step, Trouble> {
        match state {
            State::Waiting(until) if Instant::now() < until => Ok(Step::NotYet(state)),
            State::Waiting(_) if directory.neighbours[self.rank] => self.call_near(directory),
            State::Waiting(_) => self.call_far(directory),
            State::Connecting(stream) => {
                if !is_connected(&stream)? {
                    return Ok(Step::NotYet(State::Connecting(stream)));
                }
                let stream = not_oneself(stream).map_err(|_| Trouble::Nobody)?;
                let stream = directory.security.begin_connect(stream)?;
                Ok(Step::On(State::Shaking(stream)))
            }
            State::Shaking(mut stream) => {
                match stream.shake() {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return Ok(Step::NotYet(State::Shaking(stream)));
                    }
                    other => other?,
                }
                if stream.certificate() != directory.members[self.rank].certificate {
                    return Err(Trouble::Broken(io::Error::new(
                        io::ErrorKind::PermissionDenied,
                        "who answers at its address does not have its certificate",
                    )));
                }
                stream.write_all(&self.hello(directory))?;
                stream.flush()?;
                Ok(Step::On(State::Far(stream, Vec::new())))
            }
            State::Far(mut stream, mut answer) => {
                let read = |bytes: &mut [u8]| match stream.read(bytes) {
                    Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                    other => other,
                };
                match heard(&mut answer, read)? {
                    false => Ok(Step::NotYet(State::Far(stream, answer))),
                    true => Ok(Step::Done(stream.into_link()?)),
                }
            }
            State::Near(channel, link, mut answer) => {
                match heard(&mut answer, |bytes| channel.try_receive(bytes, &mut Vec::new()))? {
                    false => Ok(Step::NotYet(State::Near(channel, link, answer))),
                    true => Ok(Step::Done(Box::new(link))),
                }
            }
            State::Held(link) => Ok(Step::Done(link)),
        }
    }

    fn hello(&self, directory: &Directory) -> Vec<u8> {
        let Directory { me, generation, members, .. } = directory;
        bootstrap::hello(members, *generation, *me, self.rank, self.purpose).encode()
    }

    fn call_near(&self, directory: &Directory) -> Result<Step, Trouble> {
        let channel = match Channel::try_connect(&directory.members[self.rank].socket) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(Trouble::Nobody);
            }
            other => other?,
        };
        let (link, descriptors) = PipeLink::create().map_err(|error| {
            Trouble::Here(format!("a pipe to a neighbour cannot be made: {error}"))
        })?;
        let [memory, doorbell] = descriptors.each_ref().map(AsFd::as_fd);
        channel.send(&self.hello(directory), &[memory, doorbell])?;
        Ok(Step::On(State::Near(channel, link, Vec::new())))
    }

    fn call_far(&self, directory: &Directory) -> Result<Step, Trouble> {
        let address = directory.far.as_ref().map(|(_, addresses)| addresses[self.rank]);
        let address: SocketAddr =
            address.ok_or_else(|| Trouble::Here("it has no address, which is a bug".into()))?;
        directory
            .security
            .admits(address.ip())
            .map_err(|error| Trouble::Here(error.to_string()))?;
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let no_socket = |error| Trouble::Here(format!("no socket for a connection: {error}"));
        let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(no_socket)?;
        match connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {
                let stream = TcpStream::from(socket);
                stream.set_nodelay(true)?;
                Ok(Step::On(State::Connecting(stream)))
            }
            Err(Errno::CONNREFUSED) => Err(Trouble::Nobody),
            Err(error) => Err(Trouble::Broken(error.into())),
        }
    }
}

enum Step {
    On(State),
    NotYet(State),
    Done(Box<dyn Link>),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

/// Whether a connection that ended so may do better the next time.
fn passes(error: &io::Error) -> bool {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, Interrupted, UnexpectedEof, WouldBlock,
    };
    matches!(
        error.kind(),
        BrokenPipe | ConnectionAborted | ConnectionReset | Interrupted | UnexpectedEof | WouldBlock
    )
}

fn is_connected(stream: &TcpStream) -> Result<bool, Trouble> {
    let mut fds = [PollFd::new(stream, PollFlags::OUT)];
    if !poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
        return Ok(false);
    }
    match sockopt::socket_error(stream).map_err(io::Error::from)? {
        Ok(()) => Ok(true),
        Err(Errno::CONNREFUSED) => Err(Trouble::Nobody),
        Err(error) => Err(Trouble::Broken(error.into())),
    }
}

/// Reads on in the answer and not a byte beyond it; true when it is whole and a welcome.
fn heard(
    answer: &mut Vec<u8>,
    mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
) -> Result<bool, Trouble> {
    loop {
        let length = match answer[..] {
            [_, low, high, ..] => 3 + usize::from(u16::from_le_bytes([low, high])),
            _ => 3,
        };
        if answer.len() >= 3 && (answer.len() == length || length > 3 + Answer::MAX_BYTES) {
            return match Answer::read(&mut &answer[..]) {
                Ok(()) => Ok(true),
                Err(error) => Err(Trouble::Refused(error.to_string())),
            };
        }
        let filled = answer.len();
        answer.resize(length, 0);
        let now = read(&mut answer[filled..]);
        answer.truncate(filled + now.as_ref().map_or(0, |now| *now));
        if now? == 0 {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However the bytes come, the answer is read to its end and no further.
    #[test]
    fn an_answer_is_read_to_its_end() {
        for (refusal, step) in
            [(None, 1), (None, 9), (Some("no"), 1), (Some("no"), 2), (Some(""), 9)]
        {
            let bytes = [&Answer::encode(refusal)[..], b"what follows"].concat();
            let (mut answer, mut at, mut turn) = (Vec::new(), 0, 0);
            let verdict = loop {
                let verdict = heard(&mut answer, |buffer| {
                    turn += 1;
                    let now = if turn % 3 == 0 { 0 } else { buffer.len().min(step) };
                    buffer[..now].copy_from_slice(&bytes[at..at + now]);
                    at += now;
                    Ok(now)
                });
                if !matches!(verdict, Ok(false)) {
                    break verdict;
                }
            };
            assert_eq!(at, Answer::encode(refusal).len());
            match (refusal, verdict) {
                (None, Ok(true)) => {}
                (Some(why), Err(Trouble::Refused(told))) => assert_eq!(why, told),
                (refusal, _) => panic!("{refusal:?} was misread"),
            }
        }
    }
}
