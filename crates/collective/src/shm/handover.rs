//! Descriptors on their way to a neighbour: a Unix socket on which both sides have checked credentials.

use crate::{
    error::{Error, Result},
    process::{Peer, Process},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType, connect, recvmsg, sendmsg, socket_with,
    },
    process::{geteuid, getpid},
    time::Timespec,
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    time::{Duration, Instant},
};

/// Descriptors that one message can carry.
const MAX_DESCRIPTORS: usize = 2;

/// Listens in the abstract name space, which is the network namespace's: who can connect is on the same host.
pub(crate) fn listen(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// A connection to one neighbour whose credentials are right.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: UnixStream,
    /// The neighbour is a thread of this process.
    same_process: bool,
}

impl Channel {
    /// Connects, or says `WouldBlock` while too many others are waiting there.
    pub fn try_connect(name: &str) -> io::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        Self::checked(socket.into())
    }

    pub fn connect(name: &str) -> io::Result<Self> {
        UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?).and_then(Self::checked)
    }

    /// Refuses a neighbour that runs as another user: shared memory would let it change our tensors.
    pub fn checked(stream: UnixStream) -> io::Result<Self> {
        let Peer { user: theirs, pid } = Peer::of(&stream)?;
        let ours = geteuid().as_raw();
        if theirs != ours {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("it runs as user {theirs}, this rank as user {ours}"),
            ));
        }
        stream.set_nonblocking(true)?;
        Ok(Self { stream, same_process: pid == Some(getpid()) })
    }

    /// The neighbour's process, unless it is this one.
    pub fn process(&self) -> Option<Process> {
        if self.same_process { None } else { Process::behind(&self.stream).ok() }
    }

    /// Sends bytes with descriptors attached; the message is small enough to fit at once.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space =
            [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors))
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::NOSIGNAL;
        match sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut ancillary, flags)? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Receives exactly `bytes.len()` bytes and the descriptors that came with them. While it waits, `check`
    /// is asked every now and then whether to go on.
    pub fn receive<E: From<io::Error>>(
        &self,
        bytes: &mut [u8],
        mut check: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Vec<OwnedFd>, E> {
        let mut descriptors = Vec::new();
        let mut filled = 0;
        while filled < bytes.len() {
            match self.try_receive(&mut bytes[filled..], &mut descriptors)? {
                0 => {
                    check()?;
                    let nap = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                    let mut fds = [PollFd::new(&self.stream, PollFlags::IN)];
                    let _ = poll(&mut fds, Some(&nap));
                }
                read => filled += read,
            }
        }
        Ok(descriptors)
    }

    /// Takes what has arrived, if anything has, and says how many bytes.
    pub fn try_receive(
        &self,
        bytes: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> io::Result<usize> {
        let mut space =
            [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(bytes)];
        match recvmsg(&self.stream, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.flags.contains(ReturnFlags::CTRUNC) => Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                "this process may not open more descriptors: raise its limit (ulimit -n)",
            )),
            Ok(message) if message.bytes == 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(message) => {
                for part in ancillary.drain() {
                    if let RecvAncillaryMessage::ScmRights(fds) = part {
                        descriptors.extend(fds);
                    }
                }
                Ok(message.bytes)
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    /// The same with a time limit.
    pub fn receive_within(&self, bytes: &mut [u8], limit: Duration) -> io::Result<Vec<OwnedFd>> {
        let start = Instant::now();
        self.receive(bytes, || {
            if start.elapsed() > limit { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
        })
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The one descriptor that was promised.
pub(crate) fn single(mut descriptors: Vec<OwnedFd>) -> Result<OwnedFd> {
    match (descriptors.pop(), descriptors.is_empty()) {
        (Some(fd), true) => Ok(fd),
        _ => Err(Error::Bootstrap("a neighbour sent the wrong number of descriptors".into())),
    }
}
