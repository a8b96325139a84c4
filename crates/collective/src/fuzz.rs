//! Fuzzing on stable: valid frames are damaged at random and fed to every decoder of bytes from strangers.
//!
//! All targets together run for `DEUTERON_FUZZ_SECONDS` (2 by default); `make fuzz` runs them longer. Another
//! `DEUTERON_FUZZ_SEED` makes other frames.
#![expect(unsafe_code, reason = "an allocator that takes note of sizes")]

use crate::{
    DType, ReduceOp, Reduction,
    bootstrap::Member,
    call::{Call, Kind},
    error::{Failure, FailureKind},
    frame::{Answer, Control, FrameError, Header, Hello, Purpose},
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    env, io,
    time::{Duration, Instant},
};

/// Takes note of the largest block that this thread has asked for.
struct Noting;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static NOTING: Noting = Noting;

// SAFETY: everything is the system's allocator; the note allocates nothing and is never dropped.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(size));
        // SAFETY: the caller's contract.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(block, layout) }
    }
}

/// What `decode` returns, after a check that it asked for no block over `bound`.
fn within<R>(bound: usize, decode: impl FnOnce() -> R) -> R {
    LARGEST.set(0);
    let result = decode();
    assert!(LARGEST.get() <= bound, "a block of {} bytes, over {bound}", LARGEST.get());
    result
}

/// xorshift64*: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        (0..self.below(most + 1)).map(|_| self.next() as u8).collect()
    }

    /// Letters of one to four bytes, so that cuts may fall inside one.
    fn text(&mut self, most: usize) -> String {
        (0..self.below(most + 1)).map(|_| self.pick(&['a', 'ö', '€', '🦀', '\0'])).collect()
    }
}

/// Damages a frame; now and then not at all, or beyond recognition.
fn damage(random: &mut Random, frame: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..random.pick(&[0, 1, 1, 2, 5]) {
        // Mostly near the front, where lengths stand.
        let reach = random.pick(&[16, 64, usize::MAX]).min(frame.len() + 1);
        let at = random.below(reach);
        match random.below(8) {
            0 => frame.truncate(at),
            1 => {
                let most = random.pick(&[20, 2_000]);
                frame.extend(random.bytes(most));
            }
            2 => drop(frame.splice(at..at, random.bytes(8))),
            3 => drop(frame.drain(at..(at + random.below(8)).min(frame.len()))),
            // The head of one frame, the tail of another.
            4 => {
                frame.truncate(at);
                frame.extend(&other[random.below(other.len())..]);
            }
            // Extremes where a length may stand, in every width.
            5 => {
                let width = random.pick(&[1, 2, 4, 8]);
                let extreme = random.pick(&[0, 1, 0x7f, 0xff, 1024, 1025, u64::MAX / 2, u64::MAX]);
                for (slot, byte) in frame.iter_mut().skip(at).zip(&extreme.to_le_bytes()[..width]) {
                    *slot = *byte;
                }
            }
            6 => *frame = random.bytes(2_000),
            _ => {
                if let Some(byte) = frame.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
        }
    }
}

/// How many decoders share the time.
const TARGETS: u32 = 6;

/// Damaged frames go into `check` until the time is over.
fn fuzz(name: &str, valid: impl Fn(&mut Random) -> Vec<u8>, check: impl Fn(&mut Random, &[u8])) {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let time = Duration::from_secs(number("DEUTERON_FUZZ_SECONDS").unwrap_or(2)) / TARGETS;
    let seed = number("DEUTERON_FUZZ_SEED").unwrap_or(0x2026_1115);
    let mut random = Random(seed | 1);
    let start = Instant::now();
    let mut frames = 0u64;
    while start.elapsed() < time {
        for _ in 0..200 {
            let (mut frame, other) = (valid(&mut random), valid(&mut random));
            damage(&mut random, &mut frame, &other);
            check(&mut random, &frame);
            frames += 1;
        }
    }
    println!("{name}: {frames} frames, seed {seed}");
}

/// A decoder that is fed byte by byte says the same as one that has everything: not yet, then a verdict that
/// later bytes do not change.
fn is_incremental<T: PartialEq + std::fmt::Debug>(
    random: &mut Random,
    bytes: &[u8],
    decode: impl Fn(&[u8]) -> Result<Option<(T, usize)>, FrameError>,
) {
    let whole = decode(bytes);
    if let Ok(Some((_, length))) = &whole {
        assert!(*length <= bytes.len());
        assert_eq!(decode(&bytes[..*length]), whole, "what follows a frame is not looked at");
        assert_eq!(decode(&bytes[..length - 1]), Ok(None), "it was whole before its end");
    }
    let cut = random.below(bytes.len() + 1);
    match decode(&bytes[..cut]) {
        Ok(None) => {}
        // A version may be named only in part: the kind of the verdict stands.
        verdict => assert_eq!(verdict, whole, "the verdict changed after {cut} bytes"),
    }
}

fn a_hello(random: &mut Random) -> Hello {
    Hello {
        generation: random.next(),
        from: random.next() as u32,
        to: random.next() as u32,
        purpose: random.pick(&[
            Purpose::Data,
            Purpose::Control,
            Purpose::Rendezvous,
            Purpose::Memory,
            Purpose::Send,
            Purpose::Receive,
            Purpose::Knock,
        ]),
        token: std::array::from_fn(|_| random.next() as u8),
    }
}

#[test]
fn fuzz_hello() {
    fuzz(
        "hello",
        |random| a_hello(random).encode(),
        |random, bytes| {
            let hello = a_hello(random);
            assert_eq!(
                Hello::decode(&hello.encode()),
                Ok(Some((hello.clone(), hello.encode().len())))
            );
            assert!(hello.encode().len() <= Hello::MAX_BYTES);
            // The only thing on the heap is the version in an error, whose replaced characters may be three bytes.
            let decoded = within(8 * Hello::MAX_BYTES, || Hello::decode(bytes));
            if let Ok(Some((hello, length))) = &decoded {
                assert_eq!(hello.encode(), bytes[..*length]);
            }
            if bytes.len() >= Hello::MAX_BYTES {
                assert_ne!(
                    decoded,
                    Ok(None),
                    "more than the longest greeting, and still no verdict"
                );
            }
            is_incremental(random, bytes, Hello::decode);
        },
    );
}

fn a_header(random: &mut Random) -> Header {
    let scale = |random: &mut Random| random.pick(&[1.0, 0.5, -3.0, f64::INFINITY, f64::MIN]);
    let (prescale, postscale) = (scale(random), scale(random));
    Header {
        generation: random.next(),
        number: random.next(),
        step: random.next() as u16,
        length: random.next(),
        call: Call {
            kind: random.pick(&Kind::ALL),
            dtype: random.pick(&DType::ALL),
            reduction: Reduction { op: random.pick(&ReduceOp::ALL), prescale, postscale },
            root: random.next() as u32 as usize,
            count: random.next() as usize,
        },
    }
}

#[test]
fn fuzz_header() {
    fuzz(
        "header",
        |random| a_header(random).encode().to_vec(),
        |random, bytes| {
            let header = a_header(random);
            assert_eq!(Header::decode(&header.encode()), Ok(header));
            let Some(bytes) = bytes.first_chunk() else { return };
            if let Ok(header) = within(0, || Header::decode(bytes)) {
                assert_eq!(header.encode(), *bytes);
                // It goes into messages as it is.
                assert!(header.call.to_string().len() < 2_000);
            }
        },
    );
}

fn a_failure(random: &mut Random) -> Failure {
    let kind = random.pick(&[
        FailureKind::Lost,
        FailureKind::Mismatch,
        FailureKind::TimedOut,
        FailureKind::Aborted,
    ]);
    // Now and then longer than fits.
    let (host, cause) = (random.pick(&[10, 100]), random.pick(&[100, 200, 2_000]));
    let rank = random.next() as u32 as usize;
    Failure { kind, rank, host: random.text(host), cause: random.text(cause) }
}

#[test]
fn fuzz_control() {
    let frame = |random: &mut Random| match random.below(4) {
        0 => Control::Heartbeat,
        1 => Control::Bye,
        _ => Control::Failed(a_failure(random)),
    };
    fuzz(
        "control",
        |random| frame(random).encode(),
        |random, bytes| {
            let sent = frame(random);
            let encoded = sent.encode();
            let Ok(Some((received, length))) = Control::decode(&encoded) else {
                panic!("{sent:?} is not understood");
            };
            assert_eq!(length, encoded.len());
            match (&sent, &received) {
                (Control::Failed(sent), Control::Failed(received)) => {
                    assert_eq!((sent.kind, sent.rank), (received.kind, received.rank));
                    assert!(sent.host.starts_with(&received.host));
                    assert!(sent.cause.starts_with(&received.cause));
                    assert_eq!(received.encode(), sent.encode());
                }
                _ => assert_eq!(sent, received),
            }
            // Bytes that are no text become characters of three.
            let decoded = within(4 * Failure::MAX_BYTES, || Control::decode(bytes));
            if bytes.len() >= 8 + Failure::MAX_BYTES {
                assert_ne!(decoded, Ok(None), "more than the longest frame, and still no verdict");
            }
            if let Ok(Some((frame, _))) = decoded {
                // Whatever it says is passed on in bounds.
                assert!(frame.encode().len() <= 8 + Failure::MAX_BYTES);
            }
            is_incremental(random, bytes, Control::decode);
        },
    );
}

#[test]
fn fuzz_failure() {
    fuzz(
        "failure",
        |random| a_failure(random).encode(),
        |random, bytes| {
            let failure = a_failure(random);
            assert!(failure.encode().len() <= Failure::MAX_BYTES);
            let decoded = Failure::decode(&failure.encode()).unwrap();
            assert_eq!(Failure::decode(&decoded.encode()), Some(decoded));
            if let Some(failure) = within(4 * bytes.len() + 64, || Failure::decode(bytes)) {
                assert!(failure.encode().len() <= Failure::MAX_BYTES);
                assert!(!failure.during(&"fuzz", 0).to_string().is_empty());
            }
        },
    );
}

fn a_member(random: &mut Random) -> Member {
    Member {
        host: random.text(40),
        place: random.text(60),
        socket: random.text(60),
        token: std::array::from_fn(|_| random.next() as u8),
        certificate: random.bytes(1_000),
        cores: random.bytes(40),
        quota: random.next() as u32,
        flat: random.next() % 2 == 1,
    }
}

#[test]
fn fuzz_member() {
    fuzz(
        "member",
        |random| a_member(random).encode(),
        |random, bytes| {
            let member = a_member(random);
            assert_eq!(Member::decode(&member.encode()), Some(member));
            if let Some(member) = within(bytes.len(), || Member::decode(bytes)) {
                let encoded = member.encode();
                assert_eq!(encoded, bytes[..encoded.len()]);
            }
        },
    );
}

#[test]
fn fuzz_answer() {
    let refusal = |random: &mut Random| random.pick(&[None, Some(5), Some(600)]);
    fuzz(
        "answer",
        |random| {
            let text = refusal(random).map(|most| random.text(most));
            Answer::encode(text.as_deref())
        },
        |random, bytes| {
            let text = refusal(random).map(|most| random.text(most));
            let read = Answer::read(&mut &Answer::encode(text.as_deref())[..]);
            match (text, read) {
                (None, Ok(())) => {}
                (Some(text), Err(error)) => {
                    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
                    let told = error.to_string();
                    let whole = told.trim_end_matches(char::REPLACEMENT_CHARACTER);
                    assert!(text.starts_with(whole), "{told:?} instead of {text:?}");
                }
                (text, read) => panic!("{text:?} was read as {read:?}"),
            }
            let refused = within(4 * Answer::MAX_BYTES, || Answer::read(&mut &bytes[..]));
            if let Ok(()) = refused {
                assert_eq!(bytes[0], 0);
            }
        },
    );
}
