//! TLS 1.3 on TCP, both sides authenticated.

use super::{Link, directions, not_now, tcp::prepare};
use crate::fork::Registered;
use rustix::{
    event::PollFlags,
    fd::{AsFd, BorrowedFd},
};
use rustls::Connection;
use std::{
    io::{self, IoSlice, Read, Write},
    net::TcpStream,
};

/// Sealed bytes that may wait for the socket: enough to write many records with one call.
const OUTBOX: usize = 256 << 10;

pub(crate) struct TlsLink {
    connection: Connection,
    _registered: Registered,
    stream: TcpStream,
    /// The last buffer was filled, or nobody has looked yet: opened bytes may be left that no poll would tell of.
    more: bool,
    /// The peer has closed its side of the socket.
    ended: bool,
}

impl TlsLink {
    /// `connection` has finished its handshake on `stream`.
    pub fn new(mut connection: Connection, stream: TcpStream) -> io::Result<Self> {
        let _registered = prepare(&stream)?;
        connection.set_buffer_limit(Some(OUTBOX));
        Ok(Self { connection, _registered, stream, more: true, ended: false })
    }

    /// Takes opened bytes that are there already.
    fn opened(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.connection.reader().read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if filled == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(filled)
    }
}

impl Link for TlsLink {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if !self.flush()? {
            return Ok(0);
        }
        let taken = self.connection.writer().write_vectored(parts)?;
        self.flush()?;
        Ok(taken)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        self.more = false;
        while filled < buffer.len() {
            let opened = self.opened(&mut buffer[filled..])?;
            filled += opened;
            if opened > 0 {
                continue;
            }
            if self.ended {
                return if filled > 0 {
                    Ok(filled)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
            match self.connection.read_tls(&mut self.stream) {
                Ok(0) => self.ended = true,
                Err(error) => {
                    let waiting = not_now(Err(error));
                    return if filled > 0 { Ok(filled) } else { waiting };
                }
                Ok(_) => {}
            }
            self.connection
                .process_new_packets()
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
        self.more = true;
        Ok(filled)
    }

    fn flush(&mut self) -> io::Result<bool> {
        while self.connection.wants_write() {
            if not_now(self.connection.write_tls(&mut self.stream))? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn interest(&mut self, receive: bool, send: bool) -> Option<(BorrowedFd<'_>, PollFlags)> {
        if receive && self.more {
            return None;
        }
        let send = send || self.connection.wants_write();
        Some((self.stream.as_fd(), directions(receive, send)))
    }
}

impl Drop for TlsLink {
    fn drop(&mut self) {
        self.connection.send_close_notify();
        let _ = self.flush();
    }
}
