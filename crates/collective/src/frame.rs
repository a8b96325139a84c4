//! The bytes between hosts: greetings, call headers and control frames, all of bounded size.
//!
//! Decoders are pure functions over bytes that may come from anyone. They allocate only after the length has
//! been checked against its bound, and every refusal says what was wrong.

use crate::call::{Call, CallWords};
use crate::error::Failure;
use std::io;

/// Goes up when the bytes of a later frame change meaning.
pub const PROTOCOL: u16 = 1;
/// Of this package.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

const GREETING: &[u8; 8] = b"DEUTERON";
const DATA: u32 = u32::from_le_bytes(*b"DTDA");
const CONTROL: u16 = u16::from_le_bytes(*b"DC");

/// Why bytes are not a frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Not our protocol at all.
    #[error("the bytes are not Deuteron's protocol")]
    Garbage,
    /// Another version of it.
    #[error(
        "the peer speaks protocol {protocol} (package {version}), this rank speaks protocol {PROTOCOL} \
         (package {VERSION}): install the same version everywhere"
    )]
    Version {
        /// The peer's protocol.
        protocol: u16,
        /// The peer's package, with anything unprintable replaced.
        version: String,
    },
    /// A length that no sender of ours would write.
    #[error("a length of {length} is over the bound of {bound}")]
    TooLong {
        /// The length found.
        length: u64,
        /// The most that is allowed.
        bound: u64,
    },
    /// A field with a value that means nothing.
    #[error("the field {0} has no valid value")]
    Field(&'static str),
}

/// Takes fixed-size fields off the front of a slice.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Purpose {
    /// Payloads of collective calls.
    Data = 0,
    /// Heartbeats, failures, goodbyes.
    Control = 1,
    /// Messages of the rendezvous.
    Rendezvous = 2,
    /// Descriptors of shared memory, on a Unix socket.
    Memory = 3,
    /// An agent joins its supervisor.
    Agent = 4,
    /// A task talks to its agent, on a Unix socket.
    Task = 5,
    /// Messages of the caller to the rank that it calls.
    Send = 6,
    /// Messages of the rank that is called to the caller.
    Receive = 7,
    /// The caller waits to be called back, and wants to know if that can no longer be.
    Knock = 8,
}

/// The first frame on every connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Attempt number of the gang.
    pub generation: u64,
    /// Who speaks.
    pub from: u32,
    /// Who is meant.
    pub to: u32,
    /// Why it connects.
    pub purpose: Purpose,
    /// The secret that the rank which is meant has told its group, and nobody else.
    pub token: [u8; 16],
}

impl Hello {
    /// Longest greeting that is read.
    pub const MAX_BYTES: usize = 12 + Self::MAX_VERSION + Self::FIXED;
    const MAX_VERSION: usize = 32;
    const FIXED: usize = 8 + 4 + 4 + 1 + 16;

    /// As bytes. Protocol and version come first and keep their place in every later protocol.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = GREETING.to_vec();
        bytes.extend(PROTOCOL.to_le_bytes());
        bytes.push(VERSION.len() as u8);
        bytes.push(0);
        bytes.extend(VERSION.as_bytes());
        bytes.extend(self.generation.to_le_bytes());
        bytes.extend(self.from.to_le_bytes());
        bytes.extend(self.to.to_le_bytes());
        bytes.push(self.purpose as u8);
        bytes.extend(self.token);
        bytes
    }

    /// The greeting at the start of `bytes` and its length, or `None` while it is not whole.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let seen = bytes.len().min(GREETING.len());
        if bytes[..seen] != GREETING[..seen] {
            return Err(FrameError::Garbage);
        }
        let mut reader = Reader(&bytes[seen..]);
        let Some([low, high, version_len, reserved]) = reader.take::<4>() else { return Ok(None) };
        let version_len = usize::from(version_len);
        if version_len > Self::MAX_VERSION {
            let (length, bound) = (version_len as u64, Self::MAX_VERSION as u64);
            return Err(FrameError::TooLong { length, bound });
        }
        let Some((version, rest)) = reader.0.split_at_checked(version_len) else { return Ok(None) };
        let protocol = u16::from_le_bytes([low, high]);
        if protocol != PROTOCOL || version != VERSION.as_bytes() {
            let version = String::from_utf8_lossy(version)
                .chars()
                .map(|c| if c.is_control() { '�' } else { c })
                .collect();
            return Err(FrameError::Version { protocol, version });
        }
        if reserved != 0 {
            return Err(FrameError::Field("reserved"));
        }
        let Some(fixed) = Reader(rest).take::<{ Self::FIXED }>() else { return Ok(None) };
        let mut reader = Reader(&fixed);
        let (Some(generation), Some(from), Some(to), Some([purpose]), Some(token)) =
            (reader.take(), reader.take(), reader.take(), reader.take::<1>(), reader.take())
        else {
            return Ok(None);
        };
        let purpose = match purpose {
            0 => Purpose::Data,
            1 => Purpose::Control,
            2 => Purpose::Rendezvous,
            3 => Purpose::Memory,
            4 => Purpose::Agent,
            5 => Purpose::Task,
            6 => Purpose::Send,
            7 => Purpose::Receive,
            8 => Purpose::Knock,
            _ => return Err(FrameError::Field("purpose")),
        };
        let hello = Self {
            generation: u64::from_le_bytes(generation),
            from: u32::from_le_bytes(from),
            to: u32::from_le_bytes(to),
            purpose,
            token,
        };
        Ok(Some((hello, 12 + version_len + Self::FIXED)))
    }
}

/// The answer to a greeting: nothing, or why it is refused.
pub struct Answer;

impl Answer {
    /// Longest reason that is read.
    pub const MAX_BYTES: usize = 512;

    /// As bytes; no refusal is a welcome.
    pub fn encode(refusal: Option<&str>) -> Vec<u8> {
        let text =
            refusal.map_or(&[][..], |text| &text.as_bytes()[..text.len().min(Self::MAX_BYTES)]);
        let mut bytes = vec![u8::from(refusal.is_some())];
        bytes.extend((text.len() as u16).to_le_bytes());
        bytes.extend(text);
        bytes
    }

    /// Reads it; the refusal is an error of kind `ConnectionRefused`.
    pub fn read(stream: &mut impl io::Read) -> io::Result<()> {
        let mut head = [0; 3];
        stream.read_exact(&mut head)?;
        let [refused, low, high] = head;
        let length = usize::from(u16::from_le_bytes([low, high]));
        if length > Self::MAX_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its answer is too long"));
        }
        let mut text = vec![0; length];
        stream.read_exact(&mut text)?;
        if refused == 0 {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&text).into_owned();
        Err(io::Error::new(io::ErrorKind::ConnectionRefused, text))
    }
}

/// What precedes the payload of one step of a call on a data connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Header {
    pub generation: u64,
    /// How many calls the sender's group had made before this one.
    pub number: u64,
    /// Which message of the call on this connection.
    pub step: u16,
    /// Bytes that follow.
    pub length: u64,
    pub call: Call,
}

impl Header {
    pub const BYTES: usize = 64;

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let first = u64::from(DATA) | u64::from(self.step) << 48;
        let words = [first, self.generation, self.number, self.length];
        for (slot, word) in
            bytes.chunks_exact_mut(8).zip(words.into_iter().chain(self.call.words()))
        {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, FrameError> {
        let mut words = [0u64; 8];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = chunk.try_into().map(u64::from_le_bytes).unwrap_or_default();
        }
        let [first, generation, number, length, ref call @ ..] = words;
        if first as u32 != DATA || (first >> 32) as u16 != 0 {
            return Err(FrameError::Garbage);
        }
        let call: CallWords = *call;
        let call = Call::from_words(call).ok_or(FrameError::Field("call"))?;
        Ok(Self { generation, number, step: (first >> 48) as u16, length, call })
    }
}

/// A frame on a control connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    Heartbeat,
    /// The sender has dropped its group; nothing more comes.
    Bye,
    /// The group is dead.
    Failed(Failure),
}

impl Control {
    pub fn encode(&self) -> Vec<u8> {
        let (kind, payload) = match self {
            Self::Heartbeat => (0, Vec::new()),
            Self::Bye => (1, Vec::new()),
            Self::Failed(failure) => (2, failure.encode()),
        };
        let mut bytes = CONTROL.to_le_bytes().to_vec();
        bytes.extend([kind, 0]);
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    /// The frame at the start of `bytes` and its length, or `None` while it is not whole.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let mut reader = Reader(bytes);
        let Some([low, high, kind, reserved]) = reader.take::<4>() else { return Ok(None) };
        if u16::from_le_bytes([low, high]) != CONTROL || reserved != 0 {
            return Err(FrameError::Garbage);
        }
        let Some(length) = reader.take::<4>().map(u32::from_le_bytes) else { return Ok(None) };
        if length as usize > Failure::MAX_BYTES {
            let (length, bound) = (u64::from(length), Failure::MAX_BYTES as u64);
            return Err(FrameError::TooLong { length, bound });
        }
        let Some((payload, _)) = reader.0.split_at_checked(length as usize) else {
            return Ok(None);
        };
        let frame = match (kind, payload) {
            (0, []) => Self::Heartbeat,
            (1, []) => Self::Bye,
            (2, _) => Self::Failed(Failure::decode(payload).ok_or(FrameError::Field("failure"))?),
            _ => return Err(FrameError::Field("kind")),
        };
        Ok(Some((frame, 8 + payload.len())))
    }
}
