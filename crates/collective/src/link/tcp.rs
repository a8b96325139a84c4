//! A plain TCP connection: for networks that are trusted on purpose.

use super::{Link, directions, not_now, read_or_end};
use crate::fork::Registered;
use rustix::{
    event::PollFlags,
    fd::{AsFd, BorrowedFd},
};
use std::{
    io::{self, IoSlice, Read, Write},
    net::TcpStream,
};

pub(crate) struct TcpLink {
    _registered: Registered,
    stream: TcpStream,
}

impl TcpLink {
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        Ok(Self { _registered: prepare(&stream)?, stream })
    }
}

/// Non-blocking, no waiting for more bytes to fill a segment, and not for forked children.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<Registered> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    Ok(Registered::new(stream))
}

impl Link for TcpLink {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        not_now(self.stream.write_vectored(parts))
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        read_or_end(self.stream.read(buffer))
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn interest(&mut self, receive: bool, send: bool) -> Option<(BorrowedFd<'_>, PollFlags)> {
        Some((self.stream.as_fd(), directions(receive, send)))
    }
}
