//! Frames over any stream, greetings on both sides, and a door that strangers cannot block.
//!
//! - DOOR-1: until a caller has proved who it is it costs one bounded buffer, has five seconds, and is one of at most 256;
//!   the oldest makes room for the newest.
//! - DOOR-2: those who have said nothing make room first. While all are busy greeting (a thousand agents at once) the
//!   next one waits up to a second.

use crate::protocol::{BEAT, MAX_FRAME};
use deuteron_collective::frame::{Answer, Hello};
use rustix::{net::sockopt::socket_peercred, process::geteuid};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    io,
    os::{linux::net::SocketAddrExt, unix::net::SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::mpsc::UnboundedReceiver,
    task::{AbortHandle, JoinHandle},
    time::Instant,
};

/// How long a caller may take to greet.
pub(crate) const GREETING: Duration = Duration::from_secs(5);
/// Most callers that have not greeted yet.
const STRANGERS: usize = 256;
/// While others wait: how long one may be busy, and how long it may say nothing.
const BUSY: Duration = Duration::from_secs(1);
const QUIET: Duration = Duration::from_millis(50);

/// Both directions of a connection.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> Duplex for S {}

/// Reads one message. `None` at the end of the stream.
pub(crate) async fn read<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match stream.read_exact(&mut length).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    };
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_FRAME {
        return Err(garbage(format!("a frame of {length} bytes is over the bound of {MAX_FRAME}")));
    }
    let mut frame = Vec::with_capacity(length.min(1 << 20));
    stream.take(length as u64).read_to_end(&mut frame).await?;
    if frame.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    postcard::from_bytes(&frame).map(Some).map_err(garbage)
}

/// Writes one message.
pub(crate) async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> io::Result<()> {
    let frame = crate::protocol::encode(message).map_err(io::Error::other)?;
    stream.write_all(&frame).await?;
    stream.flush().await
}

fn garbage(error: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("garbage: {}", error.to_string()))
}

/// The called side: reads the greeting, lets `admit` judge it, and answers.
pub(crate) async fn greet<T>(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    admit: impl FnOnce(&Hello) -> Result<T, String>,
) -> io::Result<(Hello, T)> {
    let mut bytes = [0; Hello::MAX_BYTES];
    let mut filled = 0;
    let verdict = loop {
        match stream.read(&mut bytes[filled..]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => filled += read,
        }
        match Hello::decode(&bytes[..filled]) {
            Ok(None) => {}
            Ok(Some((hello, length))) if length == filled => {
                break admit(&hello).map(|admitted| (hello, admitted));
            }
            Ok(Some(_)) => break Err("bytes follow the greeting".to_owned()),
            Err(error) => break Err(error.to_string()),
        }
    };
    stream.write_all(&Answer::encode(verdict.as_ref().err().map(String::as_str))).await?;
    stream.flush().await?;
    verdict.map_err(io::Error::other)
}

/// The calling side: greets and waits for the answer.
pub(crate) async fn call(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    hello: &Hello,
) -> io::Result<()> {
    stream.write_all(&hello.encode()).await?;
    stream.flush().await?;
    let mut answer = vec![0; 3];
    stream.read_exact(&mut answer).await?;
    let length = usize::from(u16::from_le_bytes([answer[1], answer[2]])).min(Answer::MAX_BYTES);
    answer.resize(3 + length, 0);
    stream.read_exact(&mut answer[3..]).await?;
    Answer::read(&mut &answer[..])
}

/// Writes messages as they come, and a sign of life whenever it is time for one, until either end is gone.
pub(crate) async fn speak<T: Serialize>(
    mut outgoing: impl AsyncWrite + Unpin,
    mut next: impl FnMut(&mut Context<'_>) -> Poll<Option<T>>,
    beat: T,
) {
    let mut beats = tokio::time::interval(BEAT);
    loop {
        let written = tokio::select! {
            message = poll_fn(&mut next) => match message {
                Some(message) => write(&mut outgoing, &message).await,
                None => return,
            },
            _ = beats.tick() => write(&mut outgoing, &beat).await,
        };
        if written.is_err() {
            return;
        }
    }
}

/// What goes out on a line.
pub(crate) enum Out<T> {
    Say(T),
    /// Something long, cut into messages; each is made when there is nothing else to say (MSG-4).
    Give(Box<dyn Iterator<Item = T> + Send>),
}

/// The next message for [`speak`], from what has been put on a line.
pub(crate) fn next<T>(
    mut line: UnboundedReceiver<Out<T>>,
) -> impl FnMut(&mut Context<'_>) -> Poll<Option<T>> {
    let mut given: VecDeque<Box<dyn Iterator<Item = T> + Send>> = VecDeque::new();
    move |cx| loop {
        match line.poll_recv(cx) {
            Poll::Ready(Some(Out::Say(message))) => return Poll::Ready(Some(message)),
            Poll::Ready(Some(Out::Give(messages))) => given.push_back(messages),
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Pending => {
                let Some(first) = given.front_mut() else { return Poll::Pending };
                if let Some(message) = first.next() {
                    return Poll::Ready(Some(message));
                }
                given.pop_front();
            }
        }
    }
}

/// An abstract Unix socket, which leaves no file behind.
pub(crate) fn listen_here(name: &str) -> io::Result<UnixListener> {
    let address = SocketAddr::from_abstract_name(name)?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// A new name for one.
pub(crate) fn socket_name() -> crate::Result<String> {
    Ok(format!("deuteron/{:032x}", u128::from_le_bytes(crate::identity::token()?)))
}

/// The next caller of the same user; others are turned away.
pub(crate) async fn accept_here(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => match socket_peercred(&stream) {
                Ok(peer) if peer.uid == geteuid() => return stream,
                _ => tracing::warn!("refused a connection from another user of this machine"),
            },
            // Out of descriptors, say: strangers will have gone after a while.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Greetings in progress, the oldest first (DOOR-1, DOOR-2).
#[derive(Default)]
pub(crate) struct Door {
    waiting: VecDeque<Caller>,
}

struct Caller {
    from: String,
    since: Instant,
    spoken: Spoken,
    greeting: JoinHandle<()>,
}

impl Caller {
    fn is_quiet(&self) -> bool {
        !self.spoken.0.load(Relaxed) && self.since.elapsed() >= QUIET
    }
}

/// Whether a caller has said anything.
#[derive(Clone, Default)]
pub(crate) struct Spoken(Arc<AtomicBool>);

impl Spoken {
    pub fn set(&self) {
        self.0.store(true, Relaxed);
    }
}

impl Door {
    /// Waits while everybody is busy greeting, but not for long.
    pub async fn room(&mut self) {
        loop {
            self.waiting.retain(|caller| !caller.greeting.is_finished());
            let oldest = self.waiting.front().map_or(BUSY, |caller| caller.since.elapsed());
            let quiet = self.waiting.iter().any(Caller::is_quiet);
            if self.waiting.len() < STRANGERS || quiet || oldest >= BUSY {
                return;
            }
            tokio::time::sleep(QUIET / 4).await;
        }
    }

    /// Lets one more caller try, under the time limit.
    pub fn admit(
        &mut self,
        from: String,
        spoken: Spoken,
        greeting: impl Future<Output = io::Result<()>> + Send + 'static,
    ) {
        self.waiting.retain(|caller| !caller.greeting.is_finished());
        while self.waiting.len() >= STRANGERS {
            let quiet = self.waiting.iter().position(Caller::is_quiet);
            if let Some(oldest) = self.waiting.remove(quiet.unwrap_or(0)) {
                oldest.greeting.abort();
                refuse(&oldest.from, "others came after it");
            }
        }
        let name = from.clone();
        let greeting = tokio::spawn(async move {
            match tokio::time::timeout(GREETING, greeting).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => refuse(&name, &error.to_string()),
                Err(_) => refuse(&name, "it has not said who it is"),
            }
        });
        self.waiting.push_back(Caller { from, since: Instant::now(), spoken, greeting });
    }
}

fn refuse(from: &str, why: &str) {
    tracing::warn!("refused a connection from {from}: {why}");
}

impl Drop for Door {
    fn drop(&mut self) {
        self.waiting.iter().for_each(|caller| caller.greeting.abort());
    }
}

/// Ends a task of the runtime with whoever holds this.
pub(crate) struct Bound(AbortHandle);

impl Bound {
    pub fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(future).abort_handle())
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_go_before_what_is_long() {
        let (line, messages) = tokio::sync::mpsc::unbounded_channel();
        let mut next = next(messages);
        let mut poll = || next(&mut Context::from_waker(std::task::Waker::noop()));
        let say = |number| line.send(Out::Say(number)).unwrap();
        line.send(Out::Give(Box::new(10..12))).unwrap();
        line.send(Out::Give(Box::new(20..21))).unwrap();
        say(1);
        assert_eq!(poll(), Poll::Ready(Some(1)));
        assert_eq!(poll(), Poll::Ready(Some(10)));
        say(2);
        assert_eq!(poll(), Poll::Ready(Some(2)));
        assert_eq!(poll(), Poll::Ready(Some(11)));
        assert_eq!(poll(), Poll::Ready(Some(20)));
        assert_eq!(poll(), Poll::Pending);
    }
}
