//! Collectives over links: for ranks on different hosts, or that cannot share memory.
//!
//! One non-blocking loop owns both directions of every link, so two ranks that send to each other never
//! deadlock. While a call waits for one peer it also looks at the headers that other peers send: a rank that
//! called something else is found out whoever it talks to.

pub(crate) mod algorithms;
mod exchange;
mod flow;
mod lanes;

use crate::{
    call::disagreement,
    error::{Error, FailureKind, Result},
    frame::{FrameError, Header},
    health::Ticket,
    link::Link,
};
use flow::{Flow, Line};
pub(crate) use flow::{Inside, Slots};
pub(crate) use lanes::{Next, Supply};
use rustix::{
    event::{PollFd, PollFlags, poll},
    time::Timespec,
};
use std::io::{self, IoSlice};

/// Looks without progress before the rank goes to sleep in `poll`.
const LOOKS: u32 = 100;

/// A link with the header that has arrived on it and waits for its call.
pub(crate) struct Peer {
    link: Box<dyn Link>,
    partial: [u8; Header::BYTES],
    filled: usize,
    pending: Option<Header>,
    broken: Option<io::Error>,
}

impl Peer {
    pub fn new(link: Box<dyn Link>) -> Self {
        Self { link, partial: [0; Header::BYTES], filled: 0, pending: None, broken: None }
    }

    pub fn into_link(self) -> Box<dyn Link> {
        self.link
    }

    /// Reads on until a header is whole.
    fn look(&mut self) -> Result<Option<&Header>, Trouble> {
        while self.pending.is_none() {
            match self.link.receive(&mut self.partial[self.filled..]).map_err(Trouble::Io)? {
                0 => return Ok(None),
                read => self.filled += read,
            }
            if self.filled == Header::BYTES {
                self.filled = 0;
                self.pending = Some(Header::decode(&self.partial).map_err(Trouble::Frame)?);
            }
        }
        Ok(self.pending.as_ref())
    }
}

/// What a peer's link can do wrong.
enum Trouble {
    Io(io::Error),
    Frame(FrameError),
}

/// The ranks that take part in a call, and this one's place among them.
pub(crate) struct View {
    pub me: usize,
    pub members: Vec<usize>,
}

pub(crate) struct Mesh {
    view: View,
    /// Of all ranks of the group.
    peers: Vec<Option<Peer>>,
    /// Calls made so far.
    number: u64,
    scratch: Vec<Line>,
    /// What a call works on that may not change its input.
    copy: Vec<Line>,
    /// Every pair has a link: the first all-to-all has opened those that no other algorithm needs.
    complete: bool,
}

#[cold]
fn in_trouble(ticket: &Ticket<'_>, peer: usize, trouble: &Trouble) -> Error {
    match trouble {
        Trouble::Io(error) => ticket.broken(peer, error),
        Trouble::Frame(error) => ticket.lost(peer, format!("it sent what is not a frame: {error}")),
    }
}

/// A message in each direction on its way.
struct Passage {
    out: Option<Side>,
    into: Option<Side>,
    payload: usize,
    expected: Header,
}

/// One direction of a message.
struct Side {
    peer: usize,
    header: [u8; Header::BYTES],
    /// Of header and payload.
    left: usize,
}

impl Mesh {
    pub fn new(me: usize, peers: Vec<Option<Peer>>) -> Self {
        let view = View { me, members: (0..peers.len()).collect() };
        Self { view, peers, number: 0, scratch: Vec::new(), copy: Vec::new(), complete: false }
    }

    /// Runs one call's messages among some of the ranks, as if they were all. Whoever does not take part counts the call
    /// by [`Self::count`].
    pub fn among<R>(&mut self, view: &mut View, run: impl FnOnce(&mut Self) -> R) -> R {
        let number = self.number;
        std::mem::swap(&mut self.view, view);
        let result = run(self);
        std::mem::swap(&mut self.view, view);
        self.number = number;
        result
    }

    /// Notes that a call was made among some of the ranks.
    pub fn count(&mut self) {
        self.number += 1;
    }

    /// This rank's place among those that take part.
    fn me(&self) -> usize {
        self.view.me
    }

    /// How many ranks take part.
    fn ranks(&self) -> usize {
        self.view.members.len()
    }

    fn peer(&mut self, rank: usize) -> Result<&mut Peer> {
        let me = self.view.members[self.view.me];
        self.peers[rank].as_mut().ok_or_else(|| {
            Error::Bootstrap(format!("ranks {me} and {rank} are not connected, which is a bug"))
        })
    }

    fn header(&self, ticket: &Ticket<'_>, step: u16, length: usize) -> Header {
        Header {
            generation: ticket.health.generation,
            number: self.number,
            step,
            length: length as u64,
            call: *ticket.call,
        }
    }

    /// Sends `flow`'s outgoing bytes to one peer while its incoming bytes come from another (or the same).
    fn run(
        &mut self,
        ticket: &mut Ticket<'_>,
        step: u16,
        to: Option<usize>,
        from: Option<usize>,
        flow: &mut Flow<'_>,
    ) -> Result<()> {
        let mut passage = self.begin(ticket, step, to, from, flow);
        self.advance(ticket, &mut passage, flow)
    }

    fn begin(
        &self,
        ticket: &Ticket<'_>,
        step: u16,
        to: Option<usize>,
        from: Option<usize>,
        flow: &Flow<'_>,
    ) -> Passage {
        let (payload, in_bytes) = (flow.bytes_out(), flow.bytes_in());
        let [to, from] = [to, from].map(|place| place.map(|place| self.view.members[place]));
        let header = self.header(ticket, step, payload).encode();
        let out = to.map(|peer| Side { peer, header, left: Header::BYTES + payload });
        let expected = self.header(ticket, step, in_bytes);
        let header = expected.encode();
        let into = from.map(|peer| Side { peer, header, left: Header::BYTES + in_bytes });
        Passage { out, into, payload, expected }
    }

    /// Moves bytes until all have come and gone, or those that the flow lets go for now.
    fn advance(
        &mut self,
        ticket: &mut Ticket<'_>,
        passage: &mut Passage,
        flow: &mut Flow<'_>,
    ) -> Result<()> {
        let mut idle = 0;
        loop {
            let moved = self.step(ticket, passage, flow)?;
            let Passage { out, into, payload, .. } = passage;
            if out.is_none() && into.is_none() {
                return Ok(());
            }
            if !moved && flow.is_paused() {
                // What was taken must leave: nobody looks after it meanwhile.
                let peer = out.as_ref().map(|side| side.peer);
                if peer.map_or(Ok(true), |peer| self.flush(ticket, peer))? {
                    return Ok(());
                }
            }
            idle = if moved { 0 } else { idle + 1 };
            if idle > LOOKS {
                self.park(ticket, out.as_ref(), into.as_ref(), *payload, flow)?;
            } else if idle > 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Moves what can be moved at once; whether there was anything.
    fn step(
        &mut self,
        ticket: &Ticket<'_>,
        passage: &mut Passage,
        flow: &mut Flow<'_>,
    ) -> Result<bool> {
        let Passage { out, into, payload, expected } = passage;
        let mut moved = false;
        if let Some(side) = out {
            let sent = self.push(ticket, side, *payload, flow)?;
            moved |= sent > 0;
            side.left -= sent;
            let peer = side.peer;
            if side.left == 0 && self.flush(ticket, peer)? {
                *out = None;
            }
        }
        if let Some(side) = into {
            let received = self.pull(ticket, side, expected, flow)?;
            moved |= received > 0;
            side.left -= received;
            if side.left == 0 {
                *into = None;
            }
        }
        Ok(moved)
    }

    fn push(
        &mut self,
        ticket: &Ticket<'_>,
        side: &Side,
        payload: usize,
        flow: &mut Flow<'_>,
    ) -> Result<usize> {
        let unsent = side.left.saturating_sub(payload);
        let header = &side.header[Header::BYTES - unsent..];
        let ready = flow.outgoing();
        if header.is_empty() && ready.is_empty() {
            return Ok(0);
        }
        let parts = [IoSlice::new(header), IoSlice::new(ready)];
        match self.peer(side.peer)?.link.send(&parts) {
            Ok(sent) => {
                flow.sent(sent.saturating_sub(unsent));
                Ok(sent)
            }
            Err(error) => Err(ticket.broken(side.peer, &error)),
        }
    }

    fn flush(&mut self, ticket: &Ticket<'_>, peer: usize) -> Result<bool> {
        self.peer(peer)?.link.flush().map_err(|error| ticket.broken(peer, &error))
    }

    fn pull(
        &mut self,
        ticket: &Ticket<'_>,
        side: &Side,
        expected: &Header,
        flow: &mut Flow<'_>,
    ) -> Result<usize> {
        let peer = self.peer(side.peer)?;
        if let Some(error) = peer.broken.take() {
            return Err(ticket.broken(side.peer, &error));
        }
        let payload = expected.length as usize;
        let mut received = 0;
        if side.left > payload {
            match peer.look() {
                Ok(None) => return Ok(0),
                Ok(Some(header)) if header == expected => {
                    peer.pending = None;
                    received = Header::BYTES;
                }
                Ok(Some(header)) => return Err(unexpected(ticket, side.peer, header, expected)),
                Err(trouble) => return Err(in_trouble(ticket, side.peer, &trouble)),
            }
        }
        while side.left > received {
            let room = flow.incoming();
            if room.is_empty() {
                break; // The rest may not be touched yet.
            }
            let read = match peer.link.receive(room) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) => return Err(ticket.broken(side.peer, &error)),
            };
            flow.received(read);
            received += read;
            if flow.is_ready() {
                break; // Something can go out because of it: keep both directions busy.
            }
        }
        Ok(received)
    }

    /// Sleeps until a link is ready, the group fails or a nap is over, then looks at what the other peers say.
    fn park(
        &mut self,
        ticket: &mut Ticket<'_>,
        out: Option<&Side>,
        into: Option<&Side>,
        payload: usize,
        flow: &Flow<'_>,
    ) -> Result<()> {
        let waits_for = || out.into_iter().chain(into).map(|side| side.peer).collect();
        ticket.check(waits_for)?;
        let mut ready = false;
        let mut watched = Vec::new();
        let mut fds = vec![PollFd::new(&ticket.health.alarm, PollFlags::IN)];
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            let sends = out.is_some_and(|side| {
                side.peer == rank && (side.left > payload || flow.is_ready() || side.left == 0)
            });
            let needed = into.is_some_and(|side| side.peer == rank);
            let receives = match needed {
                true => flow.is_waiting(),
                false => peer.pending.is_none() && peer.broken.is_none(),
            };
            if !sends && !receives {
                continue;
            }
            match peer.link.interest(receives, sends) {
                Some((fd, flags)) => fds.push(PollFd::from_borrowed_fd(fd, flags)),
                None => ready = true,
            }
            if receives && !needed {
                watched.push(rank);
            }
        }
        if !ready {
            let nap = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            let _ = poll(&mut fds, Some(&nap));
        }
        drop(fds);
        for rank in watched {
            let peer = self.peer(rank)?;
            match peer.look() {
                Ok(None) => {}
                Ok(Some(header)) => {
                    let header = *header;
                    // Of a later call: the peer is ahead. Of an earlier one: nobody would have sent it if all had
                    // agreed on that call.
                    let odd = header.generation != ticket.health.generation
                        || header.number < self.number
                        || (header.number == self.number && header.call != *ticket.call);
                    if odd {
                        let expected = self.header(ticket, header.step, header.length as usize);
                        return Err(unexpected(ticket, rank, &header, &expected));
                    }
                }
                // A peer that has done its part may close; it matters once this rank needs it.
                Err(Trouble::Io(error)) => peer.broken = Some(error),
                Err(trouble) => return Err(in_trouble(ticket, rank, &trouble)),
            }
        }
        Ok(())
    }
}

/// The error for a header that does not belong where it arrived.
#[cold]
fn unexpected(ticket: &Ticket<'_>, peer: usize, got: &Header, expected: &Header) -> Error {
    let (me, peer) = (ticket.health.name(ticket.health.rank), ticket.health.name(peer));
    let cause = if got.generation != expected.generation {
        let (theirs, ours) = (got.generation, expected.generation);
        format!("rank {peer} is of generation {theirs}, rank {me} of generation {ours}")
    } else if got.number != expected.number || got.call != expected.call {
        let name = |header: &Header| {
            if got.number == expected.number {
                header.call.to_string()
            } else {
                format!("{} as call number {}", header.call, header.number)
            }
        };
        disagreement(&[(me, name(expected)), (peer, name(got))])
    } else {
        format!(
            "rank {peer} carries out {} in another way (message {} of {} bytes instead of {} of {}): give all \
             ranks the same thresholds",
            got.call, got.step, got.length, expected.step, expected.length
        )
    };
    ticket.fail(FailureKind::Mismatch, cause)
}
