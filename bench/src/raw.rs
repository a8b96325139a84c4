//! The limit between two hosts: the bytes of an all-reduce both ways at once over one connection, bare.
//!
//! An all-reduce among n ranks sends and receives 2(n-1)/n of the buffer per rank: among two, all of it.
#![expect(unsafe_code, reason = "a slice of numbers is seen as bytes")]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deuteron_collective::SERVER_NAME;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::sched_yield;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};

use crate::identity;
use crate::measure::{Block, Contestant, Failure, Job, Mode, Number, measure};

const START: Duration = Duration::from_secs(30);
// How long to try again before sleeping: short waits end sooner than a sleeper wakes, and a sleeper is often
// woken on the core of its peer.
const PATIENCE: Duration = Duration::from_millis(10);
// Plain text waiting inside rustls: a few records, so that they are encrypted while in the cache.
const TLS_BUFFER: usize = 1 << 18;

/// Connects the two ranks and measures every block.
pub fn run(job: &Job, tls: Option<&Path>) -> Result<(), Failure> {
    if job.ranks != 2 {
        return Err("raw is between two ranks".into());
    }
    let stream = connect(job.rank, job.meeting.parse()?)?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let tls = match tls {
        None => None,
        Some(directory) => {
            let (client, server) = identity::bare(directory)?;
            let mut connection: Connection = if job.rank == 0 {
                ServerConnection::new(Arc::new(server))?.into()
            } else {
                let name = ServerName::try_from(SERVER_NAME)?;
                ClientConnection::new(Arc::new(client), name)?.into()
            };
            connection.set_buffer_limit(Some(TLS_BUFFER));
            Some(connection)
        }
    };
    job.run(&mut Raw { stream, tls })
}

/// Rank 0 listens, rank 1 calls until it does.
fn connect(rank: usize, address: SocketAddr) -> Result<TcpStream, Failure> {
    if rank == 0 {
        return Ok(TcpListener::bind(address)?.accept()?.0);
    }
    let deadline = Instant::now() + START;
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

struct Raw {
    stream: TcpStream,
    tls: Option<Connection>,
}

impl Raw {
    /// Sends one buffer and fills the other, both at once.
    fn exchange(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), Failure> {
        let (mut sent, mut received) = (0, 0);
        let mut idle = None;
        loop {
            let (more_sent, more_received) = match &mut self.tls {
                None => (
                    progress(sent < send.len(), || self.stream.write(&send[sent..]))?,
                    progress(received < receive.len(), || {
                        self.stream.read(&mut receive[received..])
                    })?,
                ),
                Some(tls) => (
                    encrypt(tls, &mut self.stream, &send[sent..])?,
                    decrypt(tls, &mut self.stream, &mut receive[received..])?,
                ),
            };
            sent += more_sent;
            received += more_received;
            let pending = self.tls.as_ref().is_some_and(|tls| tls.wants_write());
            if sent == send.len() && received == receive.len() && !pending {
                return Ok(());
            }
            if more_sent + more_received > 0 {
                idle = None;
                continue;
            }
            sched_yield();
            if idle.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                let mut events = PollFlags::empty();
                events.set(PollFlags::IN, received < receive.len());
                events.set(PollFlags::OUT, sent < send.len() || pending);
                poll(&mut [PollFd::new(&self.stream, events)], None)?;
            }
        }
    }
}

/// Does one step if it is wanted; zero bytes if it would have to wait.
fn progress(wanted: bool, step: impl FnOnce() -> std::io::Result<usize>) -> Result<usize, Failure> {
    if !wanted {
        return Ok(0);
    }
    match step() {
        Ok(0) => Err("the other rank left".into()),
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error.into()),
    }
}

fn encrypt(tls: &mut Connection, stream: &mut TcpStream, data: &[u8]) -> Result<usize, Failure> {
    let taken = if data.is_empty() { 0 } else { tls.writer().write(data)? };
    while tls.wants_write() && progress(true, || tls.write_tls(stream))? > 0 {}
    Ok(taken)
}

fn decrypt(
    tls: &mut Connection,
    stream: &mut TcpStream,
    data: &mut [u8],
) -> Result<usize, Failure> {
    if data.is_empty() {
        return Ok(0);
    }
    let got = progress(true, || tls.reader().read(data))?;
    if got == 0 && progress(true, || tls.read_tls(stream))? > 0 {
        tls.process_new_packets()?;
        return progress(true, || tls.reader().read(data));
    }
    Ok(got)
}

impl Mode for Raw {
    fn measure<T: Number>(&mut self, job: &Job, block: &Block) -> Result<Vec<u64>, Failure> {
        let count = block.count::<T>();
        let (input, output) = (vec![T::ZERO; count], vec![T::ZERO; count]);
        measure(job, block, &mut Exchange { raw: self, peer: 1 - job.rank, input, output })
    }
}

struct Exchange<'a, T> {
    raw: &'a mut Raw,
    peer: usize,
    input: Vec<T>,
    output: Vec<T>,
}

impl<T: Number> Contestant<T> for Exchange<'_, T> {
    fn input(&mut self) -> &mut [T] {
        &mut self.input
    }
    fn output(&self) -> &[T] {
        &self.output
    }
    fn summed(&self) -> Range<usize> {
        self.peer..self.peer + 1
    }
    fn barrier(&mut self) -> Result<(), Failure> {
        self.raw.exchange(&[0], &mut [0])
    }
    fn call(&mut self) -> Result<(), Failure> {
        let bytes = size_of_val(&self.input[..]);
        // SAFETY: numbers are plain memory without padding.
        let send = unsafe { std::slice::from_raw_parts(self.input.as_ptr().cast(), bytes) };
        // SAFETY: as above, and every bit pattern is a number; the lengths are equal.
        let receive =
            unsafe { std::slice::from_raw_parts_mut(self.output.as_mut_ptr().cast(), bytes) };
        self.raw.exchange(send, receive)
    }
}
