//! What supervisor, agents and tasks say to each other, after they have greeted.
//!
//! - MSG-1: a frame is a length of four bytes and a message (postcard). The length is checked before memory is taken, and
//!   nothing is decoded before the sender has been authenticated.
//! - MSG-2: whatever belongs to an attempt carries its generation; what arrives from another one is dropped.
//! - MSG-3: output needs credit, so that news of a failure never waits behind what a terminal has not shown yet.

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
/// Longest piece of output or of a result.
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
        lines: Vec<u8>,
    },
    /// A task says that it is about to fail, and why.
    Confessed {
        generation: u64,
        rank: usize,
        traceback: String,
    },
    /// A task has failed; what is left of its output still comes.
    Failed {
        generation: u64,
        rank: usize,
        ending: Ending,
        last: String,
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
        piece: Vec<u8>,
    },
    Paused,
}

impl FromAgent {
    /// The task that it is about.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Beat | Self::Hand(_) | Self::Started { .. } | Self::Paused => None,
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
    Result(Vec<u8>),
    /// Why it cannot go on: a traceback, say.
    Failed(String),
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
