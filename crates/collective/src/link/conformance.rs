//! One suite for every link: LINK-1 to LINK-3 on each implementation, and on decorators over them.

use super::{
    Link,
    faults::{Delayed, Faulty, Throttled},
    pipe::PipeLink,
};
use crate::security::{Identity, SERVER_NAME, Security};
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestRunner},
};
use rustix::{
    event::{PollFd, poll},
    time::Timespec,
};
use std::{
    io::{ErrorKind, IoSlice},
    net::{TcpListener, TcpStream},
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

pub(crate) type Pair = (Box<dyn Link>, Box<dyn Link>);

macro_rules! conformance {
    ($($link:ident)+ => $tests:tt) => {$(
        mod $link {
            use super::$link as pair;
            conformance!(@each $tests);
        }
    )+};
    (@each { $($test:ident)+ }) => {$(
        #[test]
        fn $test() {
            super::$test(&pair);
        }
    )+};
}

conformance! {
    pipe tcp tls delayed throttled faultless => {
        bytes_arrive_whole_and_in_order
        both_directions_at_once_never_deadlock
        a_full_link_takes_nothing_and_recovers
        parts_are_sent_one_after_the_other
        nothing_is_nothing
        what_was_sent_before_the_end_is_read_first
        an_end_with_bytes_unread_is_an_end
        nobody_can_send_to_the_dead
        what_is_left_in_the_link_needs_no_sleep
        no_wake_up_is_lost
        two_threads_stream_to_each_other
        room_wakes_a_sender
        the_end_wakes_a_sleeper
    }
}

pub(crate) fn pipe() -> Pair {
    let (here, descriptors) = PipeLink::create().unwrap();
    (Box::new(here), Box::new(PipeLink::open(descriptors).unwrap()))
}

pub(crate) fn tcp() -> Pair {
    connected(&Security::Local, &Security::Local)
}

pub(crate) fn tls() -> Pair {
    static MEMBERS: LazyLock<[Security; 2]> = LazyLock::new(members);
    connected(&MEMBERS[0], &MEMBERS[1])
}

fn delayed() -> Pair {
    let delay = |link| Box::new(Delayed::by(Duration::from_micros(300), link));
    let (here, there) = tls();
    (delay(here), delay(there))
}

fn throttled() -> Pair {
    let throttle = |link| Box::new(Throttled::to(9_973, 100_000, link));
    let (here, there) = pipe();
    (throttle(here), throttle(there))
}

fn faultless() -> Pair {
    let (here, there) = tcp();
    (Box::new(Faulty::after(usize::MAX, ErrorKind::ConnectionReset, here)), there)
}

/// Two members of one job.
fn members() -> [Security; 2] {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let authority = rcgen::CertifiedIssuer::self_signed(params, key).unwrap();
    [0, 1].map(|_| {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
        let chain = params.signed_by(&key, &authority).unwrap().pem();
        let (authority, key) = (authority.pem(), key.serialize_pem());
        Security::Tls(
            Identity::from_pem(authority.as_bytes(), chain.as_bytes(), key.as_bytes()).unwrap(),
        )
    })
}

/// A connection over loopback, greeted as its two sides' security asks.
fn connected(calling: &Security, called: &Security) -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    thread::scope(|scope| {
        let there = scope.spawn(|| {
            let (stream, _) = listener.accept().unwrap();
            called.accept(stream).unwrap().into_link().unwrap()
        });
        let here = calling.connect(stream).unwrap().into_link().unwrap();
        (here, there.join().unwrap())
    })
}

/// Sleeps until the link has something to say. Nobody may have to wait that long.
fn sleep(link: &mut dyn Link, receive: bool, send: bool) {
    sleep_on([link.interest(receive, send)]);
}

fn sleep_on<const N: usize>(
    interests: [Option<(rustix::fd::BorrowedFd<'_>, rustix::event::PollFlags)>; N],
) {
    let fds: Option<Vec<PollFd<'_>>> = interests
        .into_iter()
        .map(|interest| interest.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)))
        .collect();
    let Some(mut fds) = fds else { return thread::yield_now() };
    let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_ne!(poll(&mut fds, Some(&limit)), Ok(0), "nothing has woken the sleeper");
}

/// Bytes of which every position is known, and how far they have come.
struct Stream {
    seed: u64,
    sent: usize,
    received: usize,
    start: Instant,
}

impl Stream {
    fn new(seed: u64) -> Self {
        Self { seed, sent: 0, received: 0, start: Instant::now() }
    }

    fn byte(&self, position: usize) -> u8 {
        ((position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ self.seed << 32) >> 40) as u8
    }

    /// Offers the next `len` bytes, in three parts.
    fn send(&mut self, link: &mut dyn Link, len: usize) -> usize {
        self.in_time();
        let bytes: Vec<u8> = (self.sent..self.sent + len).map(|at| self.byte(at)).collect();
        let (first, rest) = bytes.split_at(len / 5);
        let (second, third) = rest.split_at(rest.len() / 2);
        let sent = link.send(&[first, second, third].map(IoSlice::new)).unwrap();
        assert!(sent <= len);
        self.sent += sent;
        sent
    }

    /// Takes at most `len` bytes, which have to be the right ones.
    fn receive(&mut self, link: &mut dyn Link, len: usize) -> usize {
        self.in_time();
        let mut buffer = vec![0xee; len + 1];
        let read = link.receive(&mut buffer[..len]).unwrap();
        for (index, byte) in buffer[..read].iter().enumerate() {
            assert_eq!(*byte, self.byte(self.received + index), "at {}", self.received + index);
        }
        assert_eq!(buffer[len], 0xee);
        self.received += read;
        read
    }

    /// Sends until nothing has gone for a while.
    fn fill(&mut self, link: &mut dyn Link) {
        let mut last = Instant::now();
        while last.elapsed() < Duration::from_millis(40) {
            if self.send(link, 60_000) > 0 {
                last = Instant::now();
            } else {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Receives until `len` bytes have come in all.
    fn receive_up_to(&mut self, link: &mut dyn Link, len: usize) {
        while self.received < len {
            if self.receive(link, (len - self.received).min(70_000)) == 0 {
                sleep(link, true, false);
            }
        }
    }

    fn send_up_to(&mut self, link: &mut dyn Link, len: usize) {
        while self.sent < len {
            if self.send(link, len - self.sent) == 0 {
                sleep(link, false, true);
            }
        }
        flush(link);
    }

    fn in_time(&self) {
        assert!(self.start.elapsed() < Duration::from_secs(60), "the link is stuck");
    }
}

fn flush(link: &mut dyn Link) {
    while !link.flush().unwrap() {
        sleep(link, false, true);
    }
}

/// Moves both streams on from one thread until everything sent has arrived.
fn settle((here, there): &mut Pair, right: &mut Stream, left: &mut Stream) {
    loop {
        let flushed = here.flush().unwrap() & there.flush().unwrap();
        let moved = right.receive(&mut **there, 50_000) + left.receive(&mut **here, 50_000);
        if right.received == right.sent && left.received == left.sent {
            return;
        }
        if moved == 0 {
            sleep_on([here.interest(true, !flushed), there.interest(true, !flushed)]);
        }
    }
}

/// LINK-1, with any sizes in any order.
fn bytes_arrive_whole_and_in_order(pair: &dyn Fn() -> Pair) {
    let size = prop_oneof![0usize..3, 60usize..70, 0usize..5_000, 100_000usize..400_000];
    let steps = prop::collection::vec((any::<bool>(), any::<bool>(), size), 1..40);
    let config = Config { failure_persistence: None, ..Config::with_cases(16) };
    let config = Config { rng_seed: RngSeed::Fixed(2), ..config };
    TestRunner::new(config)
        .run(&steps, |steps| {
            let (mut ends, mut right, mut left) = (pair(), Stream::new(1), Stream::new(2));
            for (rightwards, sends, size) in steps {
                match (rightwards, sends) {
                    (true, true) => right.send(&mut *ends.0, size),
                    (true, false) => right.receive(&mut *ends.1, size),
                    (false, true) => left.send(&mut *ends.1, size),
                    (false, false) => left.receive(&mut *ends.0, size),
                };
            }
            settle(&mut ends, &mut right, &mut left);
            Ok(())
        })
        .unwrap();
}

/// More than any buffer holds, both ways, from one thread: LINK-2.
fn both_directions_at_once_never_deadlock(pair: &dyn Fn() -> Pair) {
    const BYTES: usize = 12 << 20;
    let ((mut here, mut there), mut right, mut left) = (pair(), Stream::new(1), Stream::new(2));
    while right.received < BYTES || left.received < BYTES {
        let mut moved = right.send(&mut *here, (BYTES - right.sent).min(300_000));
        moved += left.send(&mut *there, (BYTES - left.sent).min(300_000));
        moved += right.receive(&mut *there, 200_000) + left.receive(&mut *here, 200_000);
        let (more_right, more_left) = (
            right.sent < BYTES || !here.flush().unwrap(),
            left.sent < BYTES || !there.flush().unwrap(),
        );
        if moved == 0 {
            sleep_on([here.interest(true, more_right), there.interest(true, more_left)]);
        }
    }
}

fn a_full_link_takes_nothing_and_recovers(pair: &dyn Fn() -> Pair) {
    let ((mut here, mut there), mut stream) = (pair(), Stream::new(1));
    for _ in 0..3 {
        stream.fill(&mut *here);
        while stream.received < stream.sent {
            let flushed = here.flush().unwrap();
            if stream.receive(&mut *there, 100_000) == 0 {
                sleep_on([there.interest(true, false), here.interest(false, !flushed)]);
            }
        }
    }
}

fn parts_are_sent_one_after_the_other(pair: &dyn Fn() -> Pair) {
    let (mut here, mut there) = pair();
    let parts = [&b"ab"[..], b"", b"c", b"defg", b""].map(IoSlice::new);
    assert_eq!(here.send(&parts).unwrap(), 7);
    flush(&mut *here);
    let mut all: Vec<u8> = Vec::new();
    while all.len() < 7 {
        let mut bytes = [0; 3];
        let read = there.receive(&mut bytes).unwrap();
        all.extend(&bytes[..read]);
    }
    assert_eq!(all, b"abcdefg");
}

/// Empty buffers, and no bytes on their way.
fn nothing_is_nothing(pair: &dyn Fn() -> Pair) {
    let (mut here, mut there) = pair();
    let mut buffer = [7; 8];
    for _ in 0..3 {
        assert_eq!(here.receive(&mut buffer).unwrap(), 0);
        assert_eq!(here.send(&[]).unwrap(), 0);
        assert_eq!(here.send(&[IoSlice::new(&[]), IoSlice::new(&[])]).unwrap(), 0);
        assert!(here.flush().unwrap());
    }
    assert_eq!(buffer, [7; 8]);
    assert_eq!(there.send(&[IoSlice::new(b"x")]).unwrap(), 1);
    flush(&mut *there);
    assert_eq!(here.receive(&mut []).unwrap(), 0);
    while here.receive(&mut buffer[..1]).unwrap() == 0 {
        sleep(&mut *here, true, false);
    }
    assert_eq!(&buffer[..2], b"x\x07");
    drop(there);
    assert_eq!(here.receive(&mut []).unwrap(), 0);
}

/// LINK-3.
fn what_was_sent_before_the_end_is_read_first(pair: &dyn Fn() -> Pair) {
    for bytes in [0, 1, 1000, 200_000] {
        let ((mut here, mut there), mut stream) = (pair(), Stream::new(1));
        stream.send_up_to(&mut *here, bytes);
        drop(here);
        stream.receive_up_to(&mut *there, bytes);
        for _ in 0..3 {
            assert_eq!(end_of(&mut *there), ErrorKind::UnexpectedEof);
        }
    }
}

/// TCP resets such a connection.
fn an_end_with_bytes_unread_is_an_end(pair: &dyn Fn() -> Pair) {
    let ((mut here, mut there), mut right, mut left) = (pair(), Stream::new(1), Stream::new(2));
    right.send_up_to(&mut *here, 500);
    left.send_up_to(&mut *there, 1000);
    left.receive_up_to(&mut *here, 1);
    drop(here);
    let kind = loop {
        match there.receive(&mut [0; 100]) {
            Ok(0) => sleep(&mut *there, true, false),
            Ok(_) => {}
            Err(error) => break error.kind(),
        }
    };
    assert!(matches!(kind, ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset), "{kind:?}");
}

/// The error that ends the stream, which nothing precedes any more.
fn end_of(link: &mut dyn Link) -> ErrorKind {
    loop {
        match link.receive(&mut [0; 100]) {
            Ok(0) => sleep(link, true, false),
            Ok(read) => panic!("{read} bytes that nobody has sent"),
            Err(error) => return error.kind(),
        }
    }
}

fn nobody_can_send_to_the_dead(pair: &dyn Fn() -> Pair) {
    let (mut here, there) = pair();
    drop(there);
    let start = Instant::now();
    while here.send(&[IoSlice::new(&[1; 1000])]).is_ok() && here.flush().is_ok() {
        assert!(start.elapsed() < Duration::from_secs(10), "nobody noticed");
        sleep(&mut *here, false, true);
    }
}

/// A buffer that was filled may leave bytes inside the link, where no descriptor tells of them.
fn what_is_left_in_the_link_needs_no_sleep(pair: &dyn Fn() -> Pair) {
    let ((mut here, mut there), mut stream) = (pair(), Stream::new(1));
    stream.send_up_to(&mut *here, 1000);
    while stream.received < 1000 {
        sleep(&mut *there, true, false);
        stream.receive(&mut *there, 10);
    }
}

/// Both sleep between any two bytes, and wake each other.
fn no_wake_up_is_lost(pair: &dyn Fn() -> Pair) {
    const ROUNDS: usize = 1500;
    let (mut here, mut there) = pair();
    let echo = thread::spawn(move || {
        let (mut right, mut left) = (Stream::new(1), Stream::new(2));
        for round in 1..=ROUNDS {
            right.receive_up_to(&mut *there, round);
            // Now and then the other side is already asleep, or about to be.
            (0..round * 7919 % 300).for_each(|_| std::hint::spin_loop());
            left.send_up_to(&mut *there, round);
        }
        there
    });
    let (mut right, mut left) = (Stream::new(1), Stream::new(2));
    for round in 1..=ROUNDS {
        right.send_up_to(&mut *here, round);
        left.receive_up_to(&mut *here, round);
    }
    echo.join().unwrap();
}

/// As the mesh does it: one loop for both directions, asleep when neither moves.
fn two_threads_stream_to_each_other(pair: &dyn Fn() -> Pair) {
    const BYTES: usize = 5 << 20;
    fn side(mut link: Box<dyn Link>, mut out: Stream, mut into: Stream) -> Box<dyn Link> {
        loop {
            let sent = out.send(&mut *link, (BYTES - out.sent).min(100_000));
            // With the last bytes here, the other side may be gone as soon as it has ours.
            let left = (BYTES - into.received).min(90_000);
            let received = if left > 0 { into.receive(&mut *link, left) } else { 0 };
            let more = out.sent < BYTES || !link.flush().unwrap();
            if !more && into.received == BYTES {
                return link;
            }
            if sent + received == 0 {
                sleep(&mut *link, into.received < BYTES, more);
            }
        }
    }
    let (here, there) = pair();
    let other = thread::spawn(move || side(there, Stream::new(2), Stream::new(1)));
    side(here, Stream::new(1), Stream::new(2));
    other.join().unwrap();
}

fn room_wakes_a_sender(pair: &dyn Fn() -> Pair) {
    let ((mut here, mut there), mut right, mut left) = (pair(), Stream::new(1), Stream::new(1));
    right.fill(&mut *here);
    let filled = right.sent;
    let more = filled + 100_000;
    let reader = thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        left.receive_up_to(&mut *there, more);
    });
    right.send_up_to(&mut *here, more);
    reader.join().unwrap();
}

fn the_end_wakes_a_sleeper(pair: &dyn Fn() -> Pair) {
    let (here, mut there) = pair();
    let leaver = thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        drop(here);
    });
    let start = Instant::now();
    assert_eq!(end_of(&mut *there), ErrorKind::UnexpectedEof);
    assert!(start.elapsed() < Duration::from_secs(5));
    leaver.join().unwrap();
}
