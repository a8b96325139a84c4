//! Messages between two ranks: order, many at once, and what the two get when one errs, differs, leaves or dies.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

mod support;

use deuteron_collective::{DType, Error, Group, ReduceOp, Security, TcpRendezvous};
use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr as UnixAddress, UnixStream},
    },
    process::{Child, Command},
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use support::{
    Limit, Over, all,
    reference::{Sample, Style, digest, input, scatter, with_type},
};

/// No error may take longer to reach everybody.
const SOON: Duration = Duration::from_secs(3);

/// Runs `body` on every rank once all have their group: an error finds nobody still on the way into it.
fn run<R: Send>(
    over: Over,
    ranks: usize,
    body: impl Fn(Group) -> Result<R, Error> + Sync,
) -> Vec<R> {
    let connected = Barrier::new(ranks);
    all(support::run(over, ranks, |group| {
        connected.wait();
        body(group)
    }))
}

/// What a rank sends in its `index`-th message to another.
fn values<T: Sample>(from: usize, to: usize, index: usize, count: usize) -> Vec<T> {
    let seed = scatter(100 * from as u64 + to as u64, 0, index);
    input(seed, from, count, Style::Special, ReduceOp::Sum).collect()
}

fn send<T: Sample>(group: &Group, to: usize, index: usize, count: usize) -> Result<(), Error> {
    group.send(&values::<T>(group.rank(), to, index, count), to)
}

fn receive<T: Sample>(group: &Group, from: usize, index: usize, count: usize) -> Result<(), Error> {
    let mut tensor = vec![T::default(); count];
    group.receive(&mut tensor, from)?;
    let expected = values::<T>(from, group.rank(), index, count);
    assert_eq!(digest(&tensor), digest(&expected), "message {index} from {from}");
    Ok(())
}

/// Every type and many lengths, none and more than fits any buffer among them.
#[test]
fn messages_arrive_whole_and_in_order() {
    const LENGTHS: [usize; 8] = [0, 1, 7, 64, 1_000, 65_536, 300_000, 3];
    for over in Over::ALL {
        for (ranks, from, to) in [(2, 0, 1), (2, 1, 0), (5, 4, 1), (5, 1, 4)] {
            run(over, ranks, |group| {
                for index in 0..40 {
                    let (dtype, count) = (DType::ALL[index % 10], LENGTHS[index / 3 % 8]);
                    with_type!(dtype, T => match group.rank() {
                        rank if rank == from => send::<T>(&group, to, index, count),
                        rank if rank == to => receive::<T>(&group, from, index, count),
                        _ => Ok(()),
                    })?;
                }
                group.barrier()
            });
        }
    }
}

/// Everybody sends first, to whomever: no circle of small messages stands still, not even the first one, for which
/// ranks have yet to meet.
#[test]
fn circles_of_sends_get_on() {
    for over in Over::ALL {
        for ranks in [2, 3, 5, 6] {
            for distance in 1..ranks {
                run(over, ranks, |group| {
                    let rank = group.rank();
                    for index in 0..3 {
                        send::<f32>(&group, (rank + distance) % ranks, index, 100)?;
                        receive::<f32>(&group, (rank + ranks - distance) % ranks, index, 100)?;
                    }
                    // And around through everybody, one after the other.
                    let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                    let mut token = [0u8];
                    if rank > 0 {
                        group.receive(&mut token, last)?;
                    }
                    token[0] += 1;
                    group.send(&token, next)?;
                    if rank == 0 {
                        group.receive(&mut token, last)?;
                        assert_eq!(usize::from(token[0]), ranks);
                    }
                    Ok(())
                });
            }
        }
    }
}

/// Each rank sends to and receives from each other rank, in a thread for every pair and direction, while yet another
/// thread is in collectives.
#[test]
fn nobody_waits_for_anybody_else() {
    const RANKS: usize = 4;
    for over in Over::ALL {
        run(over, RANKS, |group| {
            let rank = group.rank();
            let count = |from: usize, to: usize, index| {
                scatter(7 * from as u64 + to as u64, 3, index) as usize % 30_000
            };
            let (group, count) = (&group, &count);
            thread::scope(|scope| {
                let mut threads = Vec::new();
                for other in (0..RANKS).filter(|other| *other != rank) {
                    threads.push(scope.spawn(move || {
                        (0..30).try_for_each(|index| {
                            send::<i64>(group, other, index, count(rank, other, index))
                        })
                    }));
                    threads.push(scope.spawn(move || {
                        (0..30).try_for_each(|index| {
                            receive::<i64>(group, other, index, count(other, rank, index))
                        })
                    }));
                }
                threads.push(scope.spawn(move || {
                    for index in 0..30 {
                        let mut tensor = vec![rank as f32; 1 + 2_000 * (index % 4)];
                        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
                        assert!(tensor.iter().all(|value| *value == 6.0));
                        let mut output = [0; RANKS];
                        group.all_to_all(&[rank; RANKS].map(|rank| rank as u8), &mut output)?;
                        assert_eq!(output, [0, 1, 2, 3]);
                    }
                    Ok(())
                }));
                threads.into_iter().try_for_each(|thread| thread.join().unwrap())
            })
        });
    }
}

/// A collective that waits does not hold up messages, nor the other way around.
#[test]
fn messages_pass_a_collective_that_waits() {
    for over in Over::ALL {
        let passed = AtomicUsize::new(0);
        run(over, 3, |group| {
            let rank = group.rank();
            thread::scope(|scope| {
                // Rank 2 comes to the barrier after the messages; rank 0 waits for a message that comes after it.
                let barrier = scope.spawn(|| {
                    while rank == 2 && passed.load(Ordering::Relaxed) < 2 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    group.barrier()
                });
                if rank < 2 {
                    let other = 1 - rank;
                    send::<i32>(&group, other, 0, 10)?;
                    receive::<i32>(&group, other, 0, 10)?;
                    passed.fetch_add(1, Ordering::Relaxed);
                }
                let waits = scope.spawn(|| match rank {
                    0 => receive::<i32>(&group, 2, 0, 5),
                    _ => Ok(()),
                });
                barrier.join().unwrap()?;
                if rank == 2 {
                    send::<i32>(&group, 0, 0, 5)?;
                }
                waits.join().unwrap()
            })
        });
    }
}

/// Both at once, from two threads of each rank: 64 MiB together.
#[test]
fn large_messages_go_both_ways_at_once() {
    const COUNT: usize = 8 << 20;
    for over in Over::ALL {
        run(over, 2, |group| {
            let (rank, other) = (group.rank(), 1 - group.rank());
            let value = |rank: usize, index: usize| (index * (rank + 3)) as f32;
            thread::scope(|scope| {
                let sending = scope.spawn(|| {
                    let tensor: Vec<f32> = (0..COUNT).map(|index| value(rank, index)).collect();
                    group.send(&tensor, other)
                });
                let mut tensor = vec![0f32; COUNT];
                group.receive(&mut tensor, other)?;
                assert!(tensor.iter().enumerate().all(|(index, got)| *got == value(other, index)));
                sending.join().unwrap()
            })
        });
    }
}

#[test]
fn a_mistake_is_refused_and_harms_nobody() {
    for over in Over::ALL {
        run(over, 2, |group| {
            let (rank, other) = (group.rank(), 1 - group.rank());
            for (error, text) in [
                (group.send(&[1u8], rank), "itself"),
                (group.receive(&mut [1u8], rank), "itself"),
                (group.send(&[1u8], 2), "no rank 2 among 2"),
                (group.receive(&mut [1u8], 7), "no rank 7 among 2"),
            ] {
                let error = error.unwrap_err();
                assert!(matches!(&error, Error::Invalid(why) if why.contains(text)), "{error}");
            }
            send::<u8>(&group, other, 0, 10)?;
            receive::<u8>(&group, other, 0, 10)
        });
    }
}

/// Waits until the group has failed, and returns why.
fn failure(group: &Group) -> Error {
    let start = Instant::now();
    loop {
        // Nobody else calls it: it waits, and fails with the group.
        let error = group.within(SOON).barrier();
        assert!(start.elapsed() < SOON, "nobody told this rank: {error:?}");
        match error {
            Err(error) => return error,
            Ok(()) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Other types or numbers of elements are an error on both ranks, in this call or the next.
#[test]
fn a_difference_is_an_error_on_both() {
    type Call = fn(&Group, usize) -> Result<(), Error>;
    const CASES: [(Call, Call, &str, &str); 4] = [
        (
            |g, to| g.send(&[1f32; 4], to),
            |g, from| g.receive(&mut [1f32; 5], from),
            "send(f32 × 4, to ",
            "receive(f32 × 5, from ",
        ),
        (
            |g, to| g.send(&[1f32; 4], to),
            |g, from| g.receive(&mut [1i32; 4], from),
            "send(f32 × 4, to ",
            "receive(i32 × 4, from ",
        ),
        (
            |g, to| g.send(&vec![1f64; 3 << 20], to),
            |g, from| g.receive(&mut [1f64; 1], from),
            "send(f64 × 3145728, to ",
            "receive(f64 × 1, from ",
        ),
        (
            |g, to| g.send::<u8>(&[], to),
            |g, from| g.receive(&mut [1u8; 1], from),
            "send(u8 × 0, to ",
            "receive(u8 × 1, from ",
        ),
    ];
    for over in Over::ALL {
        for (from, to) in [(0, 1), (1, 0), (2, 0)] {
            for (sends, receives, sent, received) in CASES {
                let errors = run(over, 3, |group| {
                    // A message before it is not harmed.
                    Ok(match group.rank() {
                        rank if rank == from => {
                            send::<i16>(&group, to, 0, 3)?;
                            sends(&group, to).err().unwrap_or_else(|| failure(&group))
                        }
                        rank if rank == to => {
                            receive::<i16>(&group, from, 0, 3)?;
                            receives(&group, from).unwrap_err()
                        }
                        _ => failure(&group),
                    })
                });
                for error in errors {
                    let Error::Mismatch { details, .. } = &error else { panic!("{error}") };
                    for text in [
                        format!("rank {from} called {sent}{to})"),
                        format!("rank {to} called {received}{from})"),
                    ] {
                        assert!(details.contains(&text), "{over:?}: {details}, not {text}");
                    }
                }
            }
        }
    }
}

/// Whoever waits for a rank that leaves is told so, whether they have talked before or not, and whether the two are
/// connected for collectives or not.
#[test]
fn who_leaves_is_named() {
    for over in Over::ALL {
        for (ranks, absent, waits) in [(2, 0, 1), (2, 1, 0), (8, 3, 0), (8, 0, 3), (8, 6, 0)] {
            for talked in [false, true] {
                let over_with = Barrier::new(ranks - 1);
                run(over, ranks, |group| {
                    let rank = group.rank();
                    if rank == absent {
                        if talked {
                            send::<u8>(&group, waits, 0, 100_000)?;
                        }
                        thread::sleep(Duration::from_millis(20));
                        return Ok(());
                    }
                    if rank == waits {
                        if talked {
                            receive::<u8>(&group, absent, 0, 100_000)?;
                        }
                        let start = Instant::now();
                        let error = group.receive(&mut [0f32; 9], absent).unwrap_err();
                        let context = format!("{over:?}, {absent} of {ranks}, {talked}: {error}");
                        assert!(start.elapsed() < SOON, "{context}");
                        let Error::PeerLost { rank: lost, operation, .. } = &error else {
                            panic!("{context}");
                        };
                        assert_eq!(*lost, absent, "{context}");
                        assert_eq!(*operation, format!("receive(f32 × 9, from {absent})"));
                    }
                    over_with.wait();
                    Ok(())
                });
            }
        }
    }
}

/// Without a limit a rank is waited for as long as it lives, also by ranks that have yet to meet it, whether it comes
/// late or is busy with somebody else.
#[test]
fn a_slow_rank_is_waited_for() {
    const PAUSE: Duration = Duration::from_millis(700);
    thread::scope(|scope| {
        for over in Over::ALL {
            scope.spawn(move || {
                run(over, 8, |group| {
                    match group.rank() {
                        0 => receive::<i32>(&group, 3, 0, 10)?,
                        7 => send::<i32>(&group, 3, 0, 10)?,
                        5 => {
                            thread::sleep(2 * PAUSE);
                            send::<i32>(&group, 3, 0, 10)?;
                        }
                        3 => {
                            thread::sleep(PAUSE);
                            receive::<i32>(&group, 5, 0, 10)?;
                            send::<i32>(&group, 0, 0, 10)?;
                            receive::<i32>(&group, 7, 0, 10)?;
                        }
                        _ => {}
                    }
                    group.barrier()
                });
            });
        }
    });
}

/// What was sent before its sender left is received.
#[test]
fn the_last_message_is_whole() {
    for over in Over::ALL {
        for (from, to) in [(0, 1), (1, 0), (3, 1), (1, 3)] {
            run(over, 4, |group| {
                if group.rank() == from {
                    return send::<f64>(&group, to, 0, 9_000);
                }
                if group.rank() == to {
                    receive::<f64>(&group, from, 0, 9_000)?;
                }
                Ok(())
            });
        }
    }
}

#[test]
fn an_abort_and_a_limit_end_the_wait() {
    for over in Over::ALL {
        for (ranks, from, to) in [(2, 0, 1), (2, 1, 0), (6, 0, 3), (6, 3, 0)] {
            for limited in [false, true] {
                let errors = run(over, ranks, |group| {
                    let start = Instant::now();
                    let error = if group.rank() == to {
                        let limit = if limited { Duration::from_millis(100) } else { SOON };
                        group.within(limit).receive(&mut [0u8; 3], from).unwrap_err()
                    } else {
                        if group.rank() == from {
                            thread::sleep(Duration::from_millis(50));
                            if !limited {
                                group.abort("no more rows");
                            }
                        }
                        failure(&group)
                    };
                    assert!(start.elapsed() < SOON, "{:?}: {error}", start.elapsed());
                    Ok(error)
                });
                for error in errors {
                    if limited {
                        assert!(error.is_timeout(), "{error}");
                        let waited =
                            format!("waited 0.1 s in receive(u8 × 3, from {from}) for rank {from}");
                        assert!(error.to_string().contains(&waited), "{error}");
                    } else {
                        let aborted =
                            matches!(&error, Error::Aborted { rank, .. } if *rank == from);
                        assert!(aborted, "{error}");
                    }
                }
            }
        }
    }
}

/// A limit of a thread that waits for another thread of its own rank to be done with the same peer.
#[test]
fn a_limit_holds_behind_another_thread() {
    for over in Over::ALL {
        run(over, 2, |group| {
            if group.rank() == 1 {
                assert!(failure(&group).is_timeout());
                return Ok(());
            }
            thread::scope(|scope| {
                let first = scope.spawn(|| group.receive(&mut [0u8; 3], 1).unwrap_err());
                let limited = group.within(Duration::from_millis(200));
                assert!(limited.receive(&mut [0u8; 3], 1).unwrap_err().is_timeout());
                assert!(first.join().unwrap().is_timeout());
            });
            Ok(())
        });
    }
}

/// Kills the process that it holds.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Rank 1 is a process of its own that is killed while rank 0 waits for its message.
#[test]
fn who_is_killed_is_named() {
    const RANK: &str = "DEUTERON_TEST_KILLED";
    let connect = |address: SocketAddr, rank, over: Over| {
        let limit = Duration::from_secs(30);
        let security = Security::default();
        TcpRendezvous::connect(address, rank, 2, 0, &security, limit)
            .and_then(|rendezvous| Group::connect(&rendezvous, over.options(rank)))
    };
    let _limit = Limit::seconds(100);
    if let Ok(text) = std::env::var(RANK) {
        let (address, over) = text.split_once('/').unwrap();
        let over = if over == "tcp" { Over::Tcp } else { Over::SharedMemory };
        let group = connect(address.parse().unwrap(), 1, over).unwrap();
        group.send(&[1u8], 0).unwrap();
        thread::sleep(Duration::from_secs(90));
        return;
    }
    for (name, over) in [("shared", Over::SharedMemory), ("tcp", Over::Tcp)] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let mut child = Killed(
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", thread::current().name().unwrap()])
                .env(RANK, format!("{address}/{name}"))
                .spawn()
                .unwrap(),
        );
        let group = connect(address, 0, over).unwrap();
        group.receive(&mut [0u8], 1).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| group.receive(&mut [0u8], 1).unwrap_err());
            thread::sleep(Duration::from_millis(100));
            child.0.kill().unwrap();
            let killed = Instant::now();
            let error = waiting.join().unwrap();
            assert!(killed.elapsed() < SOON, "{:?}", killed.elapsed());
            assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
        });
    }
}

/// The listening sockets of this process: ports, and names of abstract Unix sockets.
fn listeners() -> (Vec<u16>, BTreeSet<String>) {
    let own: BTreeSet<String> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()?.to_str().map(str::to_owned))
        .filter_map(|link| Some(link.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = |path: &str| -> Vec<Vec<String>> {
        let text = fs::read_to_string(path).unwrap();
        text.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
    let ports = table("/proc/self/net/tcp")
        .iter()
        .filter(|row| row[3] == "0A" && own.contains(&row[9]))
        .map(|row| u16::from_str_radix(row[1].rsplit_once(':').unwrap().1, 16).unwrap())
        .collect();
    let names = table("/proc/self/net/unix")
        .iter()
        .filter(|row| row.len() > 7 && own.contains(&row[6]))
        .filter_map(|row| row[7].strip_prefix('@').map(str::to_owned))
        .collect();
    (ports, names)
}

/// Strangers call before and while ranks do, with garbage, with nothing, and more than there is room for.
///
/// In a process of its own: the strangers call at every door.
#[test]
fn strangers_disturb_nobody() {
    const ALONE: &str = "DEUTERON_TEST_STRANGERS";
    if std::env::var_os(ALONE).is_none() {
        let _limit = Limit::seconds(120);
        let name = thread::current().name().unwrap().to_owned();
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let output =
            alone.args(["--exact", &name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    }
    for over in Over::ALL {
        let (stop, called) = (AtomicBool::new(false), Barrier::new(6));
        thread::scope(|scope| {
            let strangers = scope.spawn(|| {
                called.wait();
                let (ports, names) = listeners();
                assert!(!ports.is_empty() || !names.is_empty());
                let mut silent: Vec<Box<dyn Send>> = Vec::new();
                let mut call = |index: usize| {
                    for port in &ports {
                        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
                        let limit = Duration::from_millis(20);
                        let Ok(mut stream) = TcpStream::connect_timeout(&address, limit) else {
                            continue;
                        };
                        if index.is_multiple_of(4) {
                            let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
                        } else if index.is_multiple_of(3) {
                            let _ = stream.write_all(b"DEUTERON");
                        }
                        silent.push(Box::new(stream));
                    }
                    for name in &names {
                        let address = UnixAddress::from_abstract_name(name).unwrap();
                        let Ok(mut stream) = UnixStream::connect_addr(&address) else { continue };
                        stream.set_nonblocking(true).unwrap();
                        if index.is_multiple_of(4) {
                            let _ = stream.write_all(&[7; 200]);
                        }
                        silent.push(Box::new(stream));
                    }
                };
                (0..120).for_each(&mut call);
                called.wait();
                for index in 0..400 {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    call(index);
                    thread::sleep(Duration::from_millis(20));
                }
            });
            let start = Longest::default();
            run(over, 5, |group| {
                called.wait();
                called.wait();
                let (rank, begin) = (group.rank(), Instant::now());
                for distance in 1..5 {
                    send::<f32>(&group, (rank + distance) % 5, 0, 1_000)?;
                    receive::<f32>(&group, (rank + 5 - distance) % 5, 0, 1_000)?;
                }
                let mut output = [0; 5];
                group.all_to_all(&[rank as u8; 5], &mut output)?;
                assert_eq!(output, [0, 1, 2, 3, 4]);
                start.note(begin.elapsed());
                Ok(())
            });
            stop.store(true, Ordering::Relaxed);
            strangers.join().unwrap();
            // Less than the time that a single stranger may take to say who it is.
            assert!(
                start.longest() < Duration::from_millis(4_500),
                "{over:?}: {:?}",
                start.longest()
            );
        });
    }
}

/// The longest of some times.
#[derive(Default)]
struct Longest(std::sync::Mutex<Duration>);

impl Longest {
    fn note(&self, time: Duration) {
        let mut longest = self.0.lock().unwrap();
        *longest = longest.max(time);
    }

    fn longest(&self) -> Duration {
        *self.0.lock().unwrap()
    }
}
