//! Links that misbehave on purpose, and what the algorithms make of them.

use super::Link;
use rustix::{event::PollFlags, fd::BorrowedFd};
use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    time::{Duration, Instant},
};

/// Breaks with an error once so many bytes have gone through it, both directions together.
pub(crate) struct Faulty {
    inner: Box<dyn Link>,
    left: usize,
    kind: io::ErrorKind,
}

impl Faulty {
    pub fn after(bytes: usize, kind: io::ErrorKind, inner: Box<dyn Link>) -> Self {
        Self { inner, left: bytes, kind }
    }

    fn whole(&self) -> io::Result<()> {
        if self.left == 0 { Err(self.kind.into()) } else { Ok(()) }
    }
}

impl Link for Faulty {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.whole()?;
        let sent = send_at_most(&mut *self.inner, parts, self.left)?;
        self.left -= sent;
        Ok(sent)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.whole()?;
        let most = buffer.len().min(self.left);
        let read = self.inner.receive(&mut buffer[..most])?;
        self.left -= read;
        Ok(read)
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.whole()?;
        self.inner.flush()
    }

    fn interest(&mut self, receive: bool, send: bool) -> Option<(BorrowedFd<'_>, PollFlags)> {
        if self.left == 0 { None } else { self.inner.interest(receive, send) }
    }
}

/// Shows what arrives, and the end, only some time after it has come.
pub(crate) struct Delayed {
    inner: Box<dyn Link>,
    delay: Duration,
    arrived: VecDeque<(Instant, Vec<u8>)>,
    end: Option<(Instant, io::ErrorKind)>,
}

impl Delayed {
    /// Arrivals that are held back; what is sent faster waits in the link below.
    const ROOM: usize = 16;

    pub fn by(delay: Duration, inner: Box<dyn Link>) -> Self {
        Self { inner, delay, arrived: VecDeque::new(), end: None }
    }

    /// Takes what the link below has.
    fn take(&mut self) {
        let mut bytes = [0; 16 << 10];
        while self.end.is_none() && self.arrived.len() < Self::ROOM {
            let due = Instant::now() + self.delay;
            match self.inner.receive(&mut bytes) {
                Ok(0) => return,
                Ok(read) => self.arrived.push_back((due, bytes[..read].to_vec())),
                Err(error) => self.end = Some((due, error.kind())),
            }
        }
    }
}

impl Link for Delayed {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.inner.send(parts)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.take();
        let now = Instant::now();
        let mut filled = 0;
        while let Some((due, bytes)) = self.arrived.front_mut() {
            let len = bytes.len().min(buffer.len() - filled);
            if *due > now || len == 0 {
                return Ok(filled);
            }
            buffer[filled..filled + len].copy_from_slice(&bytes[..len]);
            filled += len;
            bytes.drain(..len);
            if bytes.is_empty() {
                self.arrived.pop_front();
            }
        }
        match self.end {
            Some((due, kind)) if due <= now && filled == 0 && !buffer.is_empty() => {
                Err(kind.into())
            }
            _ => Ok(filled),
        }
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.inner.flush()
    }

    fn interest(&mut self, receive: bool, send: bool) -> Option<(BorrowedFd<'_>, PollFlags)> {
        // No descriptor becomes ready when time has passed.
        if receive && (!self.arrived.is_empty() || self.end.is_some()) {
            return None;
        }
        self.inner.interest(receive, send)
    }
}

/// Moves few bytes with each call, and no more than so many in a millisecond, each way.
pub(crate) struct Throttled {
    inner: Box<dyn Link>,
    per_call: usize,
    per_millisecond: usize,
    since: Instant,
    sent: usize,
    received: usize,
}

impl Throttled {
    pub fn to(per_call: usize, per_millisecond: usize, inner: Box<dyn Link>) -> Self {
        Self { inner, per_call, per_millisecond, since: Instant::now(), sent: 0, received: 0 }
    }

    /// What may go now of a direction in which `moved` bytes have gone.
    fn allowance(&self, moved: usize) -> usize {
        let milliseconds = self.since.elapsed().as_millis() as usize + 1;
        (milliseconds * self.per_millisecond).saturating_sub(moved).min(self.per_call)
    }
}

impl Link for Throttled {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let most = self.allowance(self.sent);
        let sent = send_at_most(&mut *self.inner, parts, most)?;
        self.sent += sent;
        Ok(sent)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = self.allowance(self.received).min(buffer.len());
        let read = self.inner.receive(&mut buffer[..most])?;
        self.received += read;
        Ok(read)
    }

    fn flush(&mut self) -> io::Result<bool> {
        self.inner.flush()
    }

    fn interest(&mut self, receive: bool, send: bool) -> Option<(BorrowedFd<'_>, PollFlags)> {
        // No descriptor becomes ready when time has passed.
        let held = (receive && self.allowance(self.received) == 0)
            || (send && self.allowance(self.sent) == 0);
        if held { None } else { self.inner.interest(receive, send) }
    }
}

fn send_at_most(link: &mut dyn Link, parts: &[IoSlice<'_>], mut most: usize) -> io::Result<usize> {
    let mut fitting = Vec::new();
    for part in parts {
        let len = part.len().min(most);
        fitting.push(IoSlice::new(&part[..len]));
        most -= len;
    }
    link.send(&fitting)
}

/// The mesh over bad links: right results where bytes only come late, an error that names a peer where they end.
mod tests {
    use super::{
        super::conformance::{Pair, pipe, tcp, tls},
        *,
    };
    use crate::{
        DType, Error, ReduceOp,
        call::{Call, Kind},
        error::Result,
        health::{Health, Ticket},
        mesh::{Mesh, Peer, algorithms::peers_of},
        plan::{Algorithm, Plan},
    };
    use std::{io::ErrorKind, sync::atomic::Ordering, thread};

    /// A rank whose links were made by hand. Nobody watches it: what it learns, it learns from its links.
    struct Rank {
        mesh: Mesh,
        health: Health,
    }

    impl Rank {
        fn call(
            &mut self,
            call: &Call,
            run: impl FnOnce(&mut Mesh, &mut Ticket<'_>) -> Result<()>,
        ) -> Result<()> {
            let mut ticket = Ticket::new(&self.health, call, Some(Duration::from_secs(30)));
            run(&mut self.mesh, &mut ticket)
        }

        fn ranks(&self) -> i32 {
            self.health.hosts.len() as i32
        }

        /// The sum over all ranks of `rank + index`.
        fn all_reduce(&mut self, algorithm: Algorithm, count: usize) -> Result<()> {
            let (me, ranks) = (self.health.rank as i32, self.ranks());
            let call = Call {
                reduction: ReduceOp::Sum.into(),
                ..Call::new(Kind::AllReduce, DType::I32, count)
            };
            let mut tensor = Tensor::new(count, |index| me + index);
            self.call(&call, |mesh, ticket| {
                mesh.all_reduce(ticket, &plan(algorithm), tensor.bytes())
            })?;
            tensor.expect(|index| ranks * (ranks - 1) / 2 + ranks * index);
            Ok(())
        }

        fn all_gather(&mut self, count: usize) -> Result<()> {
            let (me, ranks) = (self.health.rank, self.ranks() as usize);
            let call = Call::new(Kind::AllGather, DType::I32, count);
            let mut tensor =
                Tensor::new(
                    count * ranks,
                    |index| {
                        if index as usize / count == me { index } else { -1 }
                    },
                );
            let ranges: Vec<_> =
                (0..ranks).map(|rank| rank * 4 * count..(rank + 1) * 4 * count).collect();
            self.call(&call, |mesh, ticket| mesh.all_gather(ticket, &ranges, tensor.bytes()))?;
            tensor.expect(|index| index);
            Ok(())
        }

        fn broadcast(&mut self, algorithm: Algorithm, count: usize, root: usize) -> Result<()> {
            let me = self.health.rank;
            let call = Call { root, ..Call::new(Kind::Broadcast, DType::I32, count) };
            let mut tensor = Tensor::new(count, |index| if me == root { 3 * index } else { -1 });
            self.call(&call, |mesh, ticket| {
                mesh.broadcast(ticket, &plan(algorithm), tensor.bytes())
            })?;
            tensor.expect(|index| 3 * index);
            Ok(())
        }
    }

    fn plan(algorithm: Algorithm) -> Plan {
        Plan { algorithm, chunk: 1024, reason: "the test says so" }
    }

    /// Whole `i32` elements as the mesh wants them: bytes, aligned.
    struct Tensor {
        memory: Vec<u8>,
        start: usize,
    }

    impl Tensor {
        fn new(count: usize, value: impl Fn(i32) -> i32) -> Self {
            let mut memory = vec![0; 4 * count + 8];
            let start = memory.as_ptr().align_offset(8);
            for (index, chunk) in memory[start..].chunks_exact_mut(4).take(count).enumerate() {
                chunk.copy_from_slice(&value(index as i32).to_ne_bytes());
            }
            memory.truncate(start + 4 * count);
            Self { memory, start }
        }

        fn bytes(&mut self) -> &mut [u8] {
            &mut self.memory[self.start..]
        }

        fn expect(&mut self, value: impl Fn(i32) -> i32) {
            for (index, chunk) in self.bytes().chunks_exact(4).enumerate() {
                assert_eq!(chunk, value(index as i32).to_ne_bytes(), "element {index}");
            }
        }
    }

    /// Runs `body` on every rank, with both ends of every link given to `decorate` first.
    fn run<R: Send>(
        ranks: usize,
        pair: fn() -> Pair,
        decorate: impl Fn(usize, usize, Box<dyn Link>) -> Box<dyn Link>,
        body: impl Fn(Rank) -> R + Sync,
    ) -> Vec<R> {
        let mut peers: Vec<Vec<Option<Peer>>> =
            (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
        let pairs = (0..ranks)
            .flat_map(|low| peers_of(low, ranks).into_iter().map(move |high| (low, high)))
            .filter(|(low, high)| low < high);
        for (low, high) in pairs {
            let (here, there) = pair();
            peers[low][high] = Some(Peer::new(decorate(low, high, here)));
            peers[high][low] = Some(Peer::new(decorate(high, low, there)));
        }
        let hosts: Vec<String> = (0..ranks).map(|rank| format!("host-{rank}")).collect();
        thread::scope(|scope| {
            let threads: Vec<_> = peers
                .into_iter()
                .enumerate()
                .map(|(rank, peers)| {
                    let nobody = (0..ranks).map(|_| None).collect();
                    let health =
                        Health::new(rank, (0..ranks).collect(), hosts.clone(), 0, nobody).unwrap();
                    let rank = Rank { mesh: Mesh::new(rank, peers), health };
                    let body = &body;
                    scope.spawn(move || body(rank))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn everything(mut rank: Rank) -> Result<()> {
        use Algorithm::{HalvingDoubling, RecursiveDoubling, Ring, Tree};
        for count in [1, 3, 100, 5_000] {
            for algorithm in [RecursiveDoubling, HalvingDoubling, Ring] {
                rank.all_reduce(algorithm, count)?;
            }
            rank.all_gather(count)?;
            for root in 0..rank.health.hosts.len() {
                rank.broadcast(Tree, count, root)?;
                rank.broadcast(Ring, count, root)?;
            }
        }
        Ok(())
    }

    #[test]
    fn late_bytes_are_waited_for() {
        for (ranks, pair) in [(2, tls as fn() -> Pair), (3, pipe), (4, tcp)] {
            // Some links slower than others, so that ranks run ahead of each other.
            let decorate = |from: usize, to: usize, link| -> Box<dyn Link> {
                let delay = Duration::from_micros(100 * (1 + (2 * from + to) % 5) as u64);
                Box::new(Delayed::by(delay, link))
            };
            for result in run(ranks, pair, decorate, everything) {
                result.unwrap();
            }
        }
    }

    /// Few bytes at a time: headers and elements come in pieces.
    #[test]
    fn few_bytes_at_a_time_are_enough() {
        for (ranks, pair, bytes) in [(2, tcp as fn() -> Pair, 1), (3, pipe, 3), (5, tls, 61)] {
            let decorate = |_, _, link| -> Box<dyn Link> {
                Box::new(Throttled::to(bytes, 2_000 * bytes, link))
            };
            for result in run(ranks, pair, decorate, everything) {
                result.unwrap();
            }
        }
    }

    /// Wherever a link breaks, every rank that goes on gets an error that names one of its own peers.
    #[test]
    fn a_broken_link_is_an_error_everywhere() {
        let breaks = [0, 1, 63, 64, 65, 1_000, 50_000, 300_000];
        thread::scope(|scope| {
            for (index, bytes) in breaks.into_iter().enumerate() {
                scope.spawn(move || {
                    let pair = [pipe, tcp, tls][index % 3];
                    let ranks = 2 + index % 4;
                    let decorate = |from: usize, to: usize, link| -> Box<dyn Link> {
                        if (from, to) == (1, 0) {
                            Box::new(Faulty::after(bytes, ErrorKind::ConnectionReset, link))
                        } else {
                            link
                        }
                    };
                    let until_it_breaks = |mut rank: Rank| loop {
                        if let Err(error) = (|| {
                            rank.all_reduce(Algorithm::Ring, 1_000)?;
                            rank.all_reduce(Algorithm::RecursiveDoubling, 100)?;
                            rank.broadcast(Algorithm::Tree, 700, 0)
                        })() {
                            return error;
                        }
                    };
                    let errors = run(ranks, pair, decorate, until_it_breaks);
                    for (rank, error) in errors.into_iter().enumerate() {
                        let Error::PeerLost { rank: lost, host, cause, .. } = &error else {
                            panic!("rank {rank} of {ranks}: {error}");
                        };
                        assert!(peers_of(rank, ranks).contains(lost), "{error}");
                        assert_eq!(*host, format!("host-{lost}"));
                        assert!(cause.contains("broke"), "{error}");
                    }
                });
            }
        });
    }

    /// The goodbye of a rank comes over another connection than its last bytes.
    #[test]
    fn a_goodbye_does_not_overtake_what_was_sent() {
        let decorate = |_, _, link| -> Box<dyn Link> {
            Box::new(Delayed::by(Duration::from_millis(150), link))
        };
        let results = run(2, pipe, decorate, |mut rank| {
            rank.health.left.iter().for_each(|left| left.store(true, Ordering::Release));
            rank.broadcast(Algorithm::Tree, 1_000, 0)?;
            // What has left is missed only now.
            match rank.health.rank {
                0 => Ok::<_, Error>(None),
                _ => Ok(Some(rank.all_gather(1))),
            }
        });
        for result in results {
            let Some(next) = result.unwrap() else { continue };
            assert!(next.unwrap_err().to_string().contains("rank 0 on host-0 was lost"));
        }
    }
}
