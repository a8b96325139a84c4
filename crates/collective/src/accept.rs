//! Connections before they are trusted: greetings on a listener that anybody may call.
//!
//! A caller has five seconds to prove who it is. Until then it has a thread and a few bytes, never more, and at
//! most [`WAITING_ROOM`] callers are in that state at once; the oldest makes room for the newest.

use crate::{
    bell::Bell,
    error::{Error, Result},
    frame::{Answer, Hello, Purpose},
    rendezvous::late,
    security::{Authenticated, Security},
};
use std::{
    collections::BTreeSet,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

/// How long a caller may take to say who it is.
pub(crate) const GREETING_TIME: Duration = Duration::from_secs(5);
/// How many callers may be at it at once.
pub(crate) const WAITING_ROOM: usize = 64;

/// How often a rank that waits for callers looks whether it should go on.
pub(crate) const NAP: Duration = Duration::from_millis(50);

/// Who has come, and what for.
pub(crate) struct Caller {
    pub rank: usize,
    pub purpose: Purpose,
    pub stream: Authenticated,
}

/// Whether a greeting is meant for this rank of this generation.
pub(crate) fn for_me(hello: &Hello, me: usize, generation: u64) -> Result<(), String> {
    if hello.generation != generation {
        return Err(format!("you are of generation {}, this is {generation}", hello.generation));
    }
    if hello.to as usize != me {
        return Err(format!("you called rank {}, this is rank {me}", hello.to));
    }
    Ok(())
}

/// Accepts until everyone in `expected` has come. `admit` judges a greeting and the certificate behind it.
/// Whoever is refused is told why, and logged. Asks `go_on` now and then whether it still makes sense to wait. `name` is
/// the number under which users know a rank.
pub(crate) fn all(
    listener: &TcpListener,
    security: &Security,
    expected: BTreeSet<(usize, Purpose)>,
    deadline: Instant,
    go_on: impl Fn() -> Result<()>,
    admit: impl Fn(&Hello, &[u8]) -> Result<(), String> + Sync,
    name: impl Fn(usize) -> usize,
) -> Result<Vec<Caller>> {
    let start = Instant::now();
    let system = |error| Error::system("the listener failed", error);
    listener.set_nonblocking(true).map_err(system)?;
    let total = expected.len();
    let expected = &Mutex::new(expected);
    let missing = || expected.lock().unwrap_or_else(PoisonError::into_inner);
    let mut callers = Vec::new();
    let mut waiting: Vec<(u64, Instant, TcpStream)> = Vec::new();
    let (report, reports) = mpsc::channel();
    let (admit, mut number) = (&admit, 0u64);
    let bell = &Bell::new().map_err(|error| Error::system("no bell", error))?;
    thread::scope(|scope| {
        let result = loop {
            for (number, outcome) in reports.try_iter() {
                waiting.retain(|(known, ..)| *known != number);
                let (hello, stream): (Hello, Authenticated) = match outcome {
                    Ok(admitted) => admitted,
                    Err(Refused { address, why }) => {
                        tracing::warn!("refused a connection from {address}: {why}");
                        continue;
                    }
                };
                callers.push(Caller { rank: hello.from as usize, purpose: hello.purpose, stream });
            }
            if callers.len() == total {
                break Ok(());
            }
            if Instant::now() > deadline {
                let ranks: BTreeSet<usize> =
                    missing().iter().map(|(rank, _)| name(*rank)).collect();
                break Err(late(&ranks.into_iter().collect::<Vec<_>>(), deadline - start));
            }
            if let Err(error) = go_on() {
                break Err(error);
            }
            waiting.retain(|(_, since, stream)| {
                let in_time = since.elapsed() < GREETING_TIME;
                if !in_time {
                    let _ = stream.shutdown(Shutdown::Both);
                }
                in_time
            });
            match listener.accept() {
                Ok((stream, address)) => {
                    let handle = match stream.try_clone() {
                        Ok(handle) => handle,
                        Err(error) => {
                            tracing::warn!(
                                "no descriptor for a connection from {address}: {error}"
                            );
                            continue;
                        }
                    };
                    number += 1;
                    if waiting.len() == WAITING_ROOM {
                        let (.., oldest) = waiting.remove(0);
                        let _ = oldest.shutdown(Shutdown::Both);
                    }
                    waiting.push((number, Instant::now(), handle));
                    let report = report.clone();
                    scope.spawn(move || {
                        let outcome = greet(stream, security, admit, expected)
                            .map_err(|why| Refused { address, why: why.to_string() });
                        // The receiver lives until every thread of this scope has ended.
                        let _ = report.send((number, outcome));
                        bell.ring();
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    bell.wait(listener, NAP);
                    bell.silence();
                }
                Err(error) => {
                    tracing::warn!("a connection could not be accepted: {error}");
                    thread::sleep(Duration::from_millis(100));
                }
            }
        };
        for (.., stream) in waiting {
            let _ = stream.shutdown(Shutdown::Both);
        }
        result
    })?;
    Ok(callers)
}

struct Refused {
    address: SocketAddr,
    why: String,
}

/// The called side of a greeting.
fn greet(
    stream: TcpStream,
    security: &Security,
    admit: impl Fn(&Hello, &[u8]) -> Result<(), String>,
    expected: &Mutex<BTreeSet<(usize, Purpose)>>,
) -> io::Result<(Hello, Authenticated)> {
    let expected = || expected.lock().unwrap_or_else(PoisonError::into_inner);
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING_TIME))?;
    stream.set_write_timeout(Some(GREETING_TIME))?;
    let mut stream = security.accept(stream)?;
    let mut bytes = [0; Hello::MAX_BYTES];
    let mut filled = 0;
    let verdict = loop {
        match stream.read(&mut bytes[filled..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => filled += read,
        }
        match Hello::decode(&bytes[..filled]) {
            Ok(None) => {}
            Ok(Some((hello, length))) if length == filled => {
                let seat = (hello.from as usize, hello.purpose);
                break admit(&hello, stream.certificate()).and_then(|()| {
                    match expected().remove(&seat) {
                        true => Ok(hello),
                        false => {
                            Err(format!("rank {} is not expected, or has come already", seat.0))
                        }
                    }
                });
            }
            Ok(Some(_)) => break Err("bytes follow the greeting".to_owned()),
            Err(error) => break Err(error.to_string()),
        }
    };
    let answered = stream
        .write_all(&Answer::encode(verdict.as_ref().err().map(String::as_str)))
        .and_then(|()| stream.flush());
    if let (Err(error), Ok(hello)) = (answered, &verdict) {
        // It has not heard that it is welcome, and may call again.
        expected().insert((hello.from as usize, hello.purpose));
        return Err(error);
    }
    verdict.map(|hello| (hello, stream)).map_err(io::Error::other)
}

/// The calling side: connects (again and again if `patient`, while nobody listens yet), greets, waits for the answer.
pub(crate) fn call(
    address: SocketAddr,
    security: &Security,
    hello: &Hello,
    deadline: Instant,
    patient: bool,
) -> io::Result<Authenticated> {
    let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let stream = loop {
        match TcpStream::connect_timeout(&address, left()).and_then(not_oneself) {
            Err(error) if patient && error.kind() == io::ErrorKind::ConnectionRefused => {
                if Instant::now() >= deadline {
                    return Err(error);
                }
                thread::sleep(Duration::from_millis(10));
            }
            other => break other?,
        }
    };
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(left()))?;
    stream.set_write_timeout(Some(left()))?;
    let mut stream = security.connect(stream)?;
    stream.write_all(&hello.encode())?;
    stream.flush()?;
    Answer::read(&mut stream)?;
    Ok(stream)
}

/// Refuses a connection that met itself: while nobody listens on a port, the kernel may give that very port to the
/// caller, and the two ends are one.
pub(crate) fn not_oneself(stream: TcpStream) -> io::Result<TcpStream> {
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketType, bind, connect, getsockname, socket};
    use std::net::{Ipv4Addr, TcpListener};

    #[test]
    fn a_connection_to_itself_counts_as_nobody_there() {
        let end = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&end, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        connect(&end, &getsockname(&end).unwrap()).unwrap();
        let refused = not_oneself(TcpStream::from(end)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);

        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(not_oneself(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).is_ok());
    }
}
