//! What supervisor, agents and tasks say to each other, after they have greeted.
//!
//! - MSG-1: a frame is a length of four bytes and a message (postcard). The length is checked before memory is taken, and
//!   nothing is decoded before the sender has been authenticated.
//! - MSG-2: whatever belongs to an attempt carries its generation; what arrives from another one is dropped.
//! - MSG-3: output needs credit, so that news of a failure never waits behind what a terminal has not shown yet.
//! - MSG-4: the payload goes to an agent once, after its first assignment, and from there to each task that asks for it.
//!   A piece is made when it can be sent, and goes after any other message: signs of life never wait behind it, and
//!   nobody holds the payload twice.

use crate::{
    Accelerator, Ending, Result, Stream, TaskInfo,
    discovery::Source,
    identity::{Credentials, Token},
};
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

/// Longest frame that is read: a gathered message of a thousand ranks.
pub(crate) const MAX_FRAME: usize = 128 << 20;
/// Longest piece of output, of a result or of the payload.
pub(crate) const PIECE: usize = 64 << 10;
/// Signs of life.
pub(crate) const BEAT: Duration = Duration::from_millis(500);
/// An agent or task without one for so long is lost.
pub(crate) const SILENCE: Duration = Duration::from_secs(5);
/// A supervisor without one for so long is lost.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Whoever was itself not scheduled for so long judges nobody by that time.
pub(crate) const OVERSLEPT: Duration = Duration::from_secs(1);

/// What an agent needs to join; it travels over its standard input, never in arguments or environment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Invitation {
    /// Number of the agent.
    pub agent: u32,
    /// What the user calls the host.
    pub name: String,
    pub slots: u32,
    pub token: Token,
    pub meeting: Meeting,
    pub discovery: Vec<Source>,
    /// Where other hosts reach this one, if that has been decided.
    pub address: Option<IpAddr>,
}

/// Where the supervisor is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Meeting {
    /// On this machine, at an abstract Unix socket.
    Here(String),
    /// At the first of these that answers, with TLS.
    There { addresses: Vec<SocketAddr>, credentials: Credentials },
}

/// What an agent has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hand {
    pub host: String,
    /// Its boot id: machines may have the same name.
    pub machine: String,
    pub slots: u32,
    pub cores: u32,
    pub address: IpAddr,
    pub accelerators: Vec<Accelerator>,
    /// What discovery could not do.
    pub problems: Vec<String>,
}

/// One task to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub rank: usize,
    /// Missing where the job stays on one machine.
    pub credentials: Option<Credentials>,
}

/// The tasks of one agent in one generation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Assignment {
    pub generation: u64,
    pub tasks: Vec<Start>,
    /// Of the whole gang, by rank.
    pub infos: Arc<Vec<TaskInfo>>,
    /// Program and arguments, as bytes: they need not be text.
    pub command: Vec<Vec<u8>>,
    pub environment: Vec<(String, String)>,
    /// Where tasks run, if there is such a folder on the host.
    pub directory: Vec<u8>,
    /// What kind of accelerator was asked for, if any was.
    pub accelerator: Option<String>,
    pub grace: Duration,
    /// Bytes of the payload, which follows if this agent does not have it.
    pub payload: u64,
}

/// From the supervisor to an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum ToAgent {
    Beat,
    Start(Assignment),
    /// End all tasks of this generation, and say so.
    End {
        generation: u64,
        reason: String,
    },
    Gathered(Arc<Gathered>),
    /// A task has given up its part in a rendezvous.
    Abandoned {
        generation: u64,
        name: String,
        reason: String,
    },
    /// So many more bytes of output may be sent.
    Credit(u32),
    Pause,
    Resume,
    /// The job is over.
    Leave,
    /// A piece of the payload.
    Payload(#[serde(with = "raw")] Vec<u8>),
}

/// From an agent to the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum FromAgent {
    Beat,
    Hand(Hand),
    Started {
        generation: u64,
    },
    Output {
        generation: u64,
        rank: usize,
        stream: Stream,
        #[serde(with = "raw")]
        lines: Vec<u8>,
    },
    /// A task says that it is about to fail, and why.
    Confessed {
        generation: u64,
        rank: usize,
        traceback: String,
    },
    /// A task has failed; what is left of its output still comes. Its agent may have asked it to end before.
    Failed {
        generation: u64,
        rank: usize,
        ending: Ending,
        last: String,
        by_itself: bool,
    },
    /// Nothing more comes from a task.
    Ended {
        generation: u64,
        rank: usize,
        ending: Ending,
    },
    Gather {
        generation: u64,
        rank: usize,
        name: String,
        round: u64,
        message: Vec<u8>,
    },
    Abandon {
        generation: u64,
        rank: usize,
        name: String,
        reason: String,
    },
    /// A piece of what a task returns.
    Result {
        generation: u64,
        rank: usize,
        #[serde(with = "raw")]
        piece: Vec<u8>,
    },
    Paused,
    /// It ends its tasks without being told to, and why; then it leaves.
    Leaving {
        generation: u64,
        reason: String,
    },
}

impl FromAgent {
    /// The task that it is about.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Beat
            | Self::Hand(_)
            | Self::Started { .. }
            | Self::Paused
            | Self::Leaving { .. } => None,
            Self::Output { rank, .. }
            | Self::Confessed { rank, .. }
            | Self::Failed { rank, .. }
            | Self::Ended { rank, .. }
            | Self::Gather { rank, .. }
            | Self::Abandon { rank, .. }
            | Self::Result { rank, .. } => Some(*rank),
        }
    }
}

/// Everybody's message of one round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gathered {
    pub generation: u64,
    pub name: String,
    pub round: u64,
    pub messages: Vec<Vec<u8>>,
}

/// From an agent to one of its tasks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum ToTask {
    Welcome {
        generation: u64,
        rank: usize,
        infos: Arc<Vec<TaskInfo>>,
        credentials: Option<Credentials>,
    },
    Gathered(Arc<Gathered>),
    Abandoned {
        name: String,
        reason: String,
    },
    /// The gang is ending, and why.
    Ended(String),
    /// What was sent so far has been passed on.
    Taken,
    /// A piece of the payload, which has so many bytes in all.
    Payload {
        total: u64,
        #[serde(with = "raw")]
        piece: Vec<u8>,
    },
    /// The payload cannot be had, and why.
    NoPayload(String),
}

/// From a task to its agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum FromTask {
    Gather {
        name: String,
        round: u64,
        message: Vec<u8>,
    },
    Abandon {
        name: String,
        reason: String,
    },
    /// A piece of what it returns; the last one is empty and is answered.
    Result(#[serde(with = "raw")] Vec<u8>),
    /// Why it cannot go on: a traceback, say.
    Failed(String),
    /// It wants the job's payload.
    Payload,
}

/// Bytes as one run, which is copied whole; on the wire it looks like a list of them.
mod raw {
    use serde::{
        Deserializer, Serializer,
        de::{Error, Visitor},
    };
    use std::fmt;

    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Vec<u8>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

/// Cuts a payload as it is sent. An empty one is a single empty piece.
#[derive(Debug)]
pub(crate) struct Pieces<B: ?Sized> {
    next: Option<usize>,
    bytes: Arc<B>,
}

impl<B: AsRef<[u8]> + ?Sized> Pieces<B> {
    pub fn of(bytes: Arc<B>) -> Self {
        Self { next: Some(0), bytes }
    }
}

impl<B: AsRef<[u8]> + ?Sized> Iterator for Pieces<B> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let (start, bytes) = (self.next?, (*self.bytes).as_ref());
        let end = bytes.len().min(start + PIECE);
        self.next = (end < bytes.len()).then_some(end);
        Some(bytes[start..end].to_vec())
    }
}

/// What has come of a payload. Memory is taken for it once its length is known, and for no more than that.
#[derive(Debug)]
pub(crate) struct Parcel {
    bytes: Vec<u8>,
    total: usize,
}

impl Parcel {
    pub fn new(total: u64) -> std::result::Result<Self, String> {
        let mut bytes = Vec::new();
        let total = usize::try_from(total)
            .ok()
            .filter(|total| bytes.try_reserve_exact(*total).is_ok())
            .ok_or_else(|| format!("there is no memory for a payload of {total} bytes"))?;
        Ok(Self { bytes, total })
    }

    /// Adds a piece; the last one gives the whole.
    pub fn add(&mut self, piece: &[u8]) -> Option<Vec<u8>> {
        let room = self.total - self.bytes.len();
        self.bytes.extend_from_slice(&piece[..piece.len().min(room)]);
        (self.bytes.len() == self.total).then(|| std::mem::take(&mut self.bytes))
    }
}

/// A message as a frame.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let bad = |error: postcard::Error| {
        crate::Error::Invalid(format!("a message cannot be sent: {error}"))
    };
    let mut frame = postcard::to_extend(message, vec![0; 4]).map_err(bad)?;
    let length = frame.len() - 4;
    if length > MAX_FRAME {
        return Err(crate::Error::Invalid(format!(
            "a message of {length} bytes is over the bound of {MAX_FRAME}"
        )));
    }
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_cut_and_put_together() {
        for bytes in [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let payload: Arc<[u8]> = (0..bytes).map(|index| index as u8).collect();
            let pieces: Vec<Vec<u8>> = Pieces::of(Arc::clone(&payload)).collect();
            assert_eq!(pieces.len(), bytes.div_ceil(PIECE).max(1));
            let mut parcel = Parcel::new(bytes as u64).unwrap();
            let (last, first) = pieces.split_last().unwrap();
            assert!(first.iter().all(|piece| parcel.add(piece).is_none()));
            assert!(parcel.add(last).unwrap() == payload[..]);
        }
    }

    #[test]
    fn no_more_is_taken_than_was_announced() {
        assert!(Parcel::new(u64::MAX).unwrap_err().contains("no memory for a payload of"));
        let mut parcel = Parcel::new(3).unwrap();
        assert_eq!(parcel.add(b"ab"), None);
        assert_eq!(parcel.add(b"cdef").unwrap(), b"abc");
    }

    #[test]
    fn raw_bytes_look_like_a_list() {
        let frame = encode(&FromTask::Result(vec![1, 200, 3])).unwrap();
        assert_eq!(frame[4..], [2, 3, 1, 200, 3]);
        let FromTask::Result(bytes) = postcard::from_bytes(&frame[4..]).unwrap() else {
            panic!("another message");
        };
        assert_eq!(bytes, [1, 200, 3]);
    }
}
