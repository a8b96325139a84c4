//! The thread that watches: heartbeats, exits of processes, goodbyes and bad news.
//!
//! It never touches a tensor and never waits for one, so it speaks for the rank however long a call takes. A
//! neighbour's exit is seen at its pidfd at once; a stop or a cut cable by the missing heartbeat.

use crate::{error::seconds, frame::Control, health::Health, link::Link, process::Process};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fd::OwnedFd,
    time::Timespec,
};
use std::{
    io::{self, IoSlice},
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// How fast a silent rank is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Time between two signs of life.
    pub interval: Duration,
    /// Silence after which a rank is dead.
    pub dead_after: Duration,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { interval: Duration::from_millis(500), dead_after: Duration::from_secs(5) }
    }
}

/// Poison by a neighbour is passed on to other hosts at most this much later.
const ROUND: Duration = Duration::from_millis(100);
/// An observer that was not scheduled for this long judges nobody by the time in between.
const OWN_GAP: Duration = Duration::from_secs(1);
/// How long the last words may take.
const FAREWELL: Duration = Duration::from_millis(500);

/// A rank of another host, at the other end of a control connection.
pub(crate) struct Remote {
    rank: usize,
    link: Box<dyn Link>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    heard: Instant,
    ended: bool,
}

impl Remote {
    pub fn new(rank: usize, link: Box<dyn Link>) -> Self {
        let (inbox, outbox) = (Vec::new(), Vec::new());
        Self { rank, link, inbox, outbox, heard: Instant::now(), ended: false }
    }

    fn say(&mut self, frame: &Control) {
        self.outbox.extend(frame.encode());
        self.flush();
    }

    fn flush(&mut self) {
        while !self.outbox.is_empty() && !self.ended {
            match self.link.send(&[IoSlice::new(&self.outbox)]) {
                Ok(0) => break,
                Ok(sent) => drop(self.outbox.drain(..sent)),
                // The reading side finds out why.
                Err(_) => break,
            }
        }
        let _ = self.link.flush();
    }

    /// Takes what has arrived, frame by frame.
    fn listen(&mut self, mut heard: impl FnMut(Control)) -> io::Result<()> {
        let mut bytes = [0; 4096];
        loop {
            let read = self.link.receive(&mut bytes)?;
            if read == 0 {
                return Ok(());
            }
            self.inbox.extend(&bytes[..read]);
            let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
            while let Some((frame, length)) = Control::decode(&self.inbox).map_err(invalid)? {
                self.inbox.drain(..length);
                self.heard = Instant::now();
                heard(frame);
            }
        }
    }
}

/// A rank that shares memory with this one: its process if it is another, and its last sign of life.
pub(crate) struct Near {
    pub rank: usize,
    pub process: Option<Process>,
    pub beat: u64,
    pub heard: Instant,
}

/// The running thread; stops when dropped, with a goodbye.
pub(crate) struct Watch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub fn start(
        health: Arc<Health>,
        heartbeat: Heartbeat,
        near: Vec<Near>,
        remote: Vec<Remote>,
    ) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let watcher =
            Watcher { health, heartbeat, near, remote, stop: Arc::clone(&stop), announced: false };
        let thread = std::thread::Builder::new()
            .name("deuteron-watch".into())
            .spawn(move || watcher.run())?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Watcher {
    health: Arc<Health>,
    heartbeat: Heartbeat,
    near: Vec<Near>,
    remote: Vec<Remote>,
    stop: Arc<OwnedFd>,
    announced: bool,
}

impl Watcher {
    fn run(mut self) {
        let mut last = Instant::now();
        let mut next_beat = last;
        loop {
            if last >= next_beat {
                self.beat();
                next_beat = last + self.heartbeat.interval;
            }
            let stopped = self.sleep(ROUND.min(self.heartbeat.interval));
            let now = Instant::now();
            if now - last > OWN_GAP {
                self.near.iter_mut().for_each(|near| near.heard = now);
                self.remote.iter_mut().for_each(|remote| remote.heard = now);
            }
            last = now;
            self.listen();
            self.look_at_neighbours(now);
            self.judge(now);
            self.announce();
            if stopped {
                return self.farewell();
            }
        }
    }

    fn beat(&mut self) {
        if let Some(own) = &self.health.neighbours[self.health.rank] {
            own.beat();
        }
        for remote in self.remote.iter_mut().filter(|remote| remote.outbox.is_empty()) {
            remote.say(&Control::Heartbeat);
        }
    }

    /// Until something happens or `limit` has passed; true when the group is dropped.
    fn sleep(&mut self, limit: Duration) -> bool {
        let mut fds = vec![PollFd::new(&*self.stop, PollFlags::IN)];
        if !self.announced {
            fds.push(PollFd::new(&self.health.alarm, PollFlags::IN));
        }
        for process in self.near.iter().filter_map(|near| near.process.as_ref()) {
            fds.push(PollFd::new(process, PollFlags::IN));
        }
        let mut ready = false;
        for remote in self.remote.iter_mut().filter(|remote| !remote.ended) {
            match remote.link.interest(true, !remote.outbox.is_empty()) {
                Some((fd, flags)) => fds.push(PollFd::from_borrowed_fd(fd, flags)),
                None => ready = true,
            }
        }
        let limit = if ready { Duration::ZERO } else { limit };
        let time = Timespec { tv_sec: 0, tv_nsec: i64::from(limit.subsec_nanos()) };
        let _ = poll(&mut fds, Some(&time));
        !fds[0].revents().is_empty()
    }

    fn listen(&mut self) {
        let health = &self.health;
        for remote in self.remote.iter_mut().filter(|remote| !remote.ended) {
            let rank = remote.rank;
            let result = remote.listen(|frame| match frame {
                Control::Heartbeat => {}
                Control::Bye => health.left[rank].store(true, Ordering::Release),
                Control::Failed(failure) => health.fail(failure),
            });
            remote.flush();
            let Err(error) = result else { continue };
            remote.ended = true;
            if !health.has_left(rank) {
                let cause = if error.kind() == io::ErrorKind::UnexpectedEof
                    || error.kind() == io::ErrorKind::ConnectionReset
                {
                    "its connection closed without a goodbye: its process has ended or was killed"
                        .into()
                } else {
                    format!("the connection to it broke: {error}")
                };
                health.fail(health.lost(rank, cause));
            }
        }
    }

    fn look_at_neighbours(&mut self, now: Instant) {
        let health = &self.health;
        for near in &mut self.near {
            let Some(segment) = &health.neighbours[near.rank] else { continue };
            let beat = segment.heartbeat();
            if beat != near.beat {
                (near.beat, near.heard) = (beat, now);
            }
            let Some(process) = &near.process else { continue };
            let mut fd = [PollFd::new(process, PollFlags::IN)];
            if poll(&mut fd, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
                if !segment.has_left() {
                    health.fail(health.lost(near.rank, process.ending()));
                }
                near.process = None;
            }
        }
    }

    /// Gives up whoever has been silent for too long.
    fn judge(&self, now: Instant) {
        let near = self.near.iter().map(|near| (near.rank, near.heard));
        let remote = self.remote.iter().filter(|remote| !remote.ended);
        for (rank, heard) in near.chain(remote.map(|remote| (remote.rank, remote.heard))) {
            let silence = now - heard;
            if silence > self.heartbeat.dead_after && !self.health.has_left(rank) {
                let cause = format!(
                    "no sign of life for {}: its process is stopped, or its host cannot be reached",
                    seconds(silence)
                );
                self.health.fail(self.health.lost(rank, cause));
            }
        }
    }

    /// Tells other hosts what ended the group, once.
    fn announce(&mut self) {
        if self.announced {
            return;
        }
        if let Some(failure) = self.health.failure() {
            let frame = Control::Failed(failure.clone());
            self.remote.iter_mut().for_each(|remote| remote.say(&frame));
            self.announced = true;
        }
    }

    /// The last words: the failure if there is one, then a goodbye.
    fn farewell(mut self) {
        let start = Instant::now();
        self.remote.iter_mut().for_each(|remote| remote.say(&Control::Bye));
        while start.elapsed() < FAREWELL
            && self.remote.iter().any(|remote| !remote.ended && !remote.outbox.is_empty())
        {
            std::thread::sleep(Duration::from_millis(1));
            self.remote.iter_mut().for_each(Remote::flush);
        }
    }
}
