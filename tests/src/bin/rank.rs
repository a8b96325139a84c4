//! One rank of a test: joins a group over TCP, does what its mode says, and prints what happens to it.
//!
//! Arguments are `key=value`:
//!
//! | key | meaning |
//! |---|---|
//! | `rank`, `size`, `at` | who this is, and where rank 0 listens |
//! | `host`, `share=no`, `tls=DIR`, `plain` | options of the group |
//! | `flat` | the rank that asks for all ranks to be treated alike |
//! | `mode`, `who`, `for` | what rank `who` does after its third round, and for how many milliseconds |
//! | `groups` | how many groups to make, one after the other |
//! | `split=K` | use a sub-group of every K-th rank instead, and drop the group that it was made from |
//! | `len`, `rounds`, `limit` | elements of the tensor, rounds before it ends (0: never), milliseconds a call may wait |
//! | `bucket`, `fork`, `cores=N` | use registered memory, have a child that sleeps, run on the first N cores |
//! | `patience` | milliseconds for the ranks to meet |
//! | `memory`, `descriptors` | the most bytes of address space and descriptors that rank `who` may have |
//! | `hold=K` | rank `who` waits for a line on standard input when the K-th gathering of the rendezvous is done |
//!
//! Lines on standard output: `READY`, `ROUND n`, `ODD`, `CHILD pid`, `HELD ..`, `ERROR microseconds message`,
//! `AGAIN microseconds message`, `END microseconds
//! message` or `DONE`; `LEAK ..` if a group has left something. The log goes to standard error.
#![expect(unsafe_code, reason = "fork and alarm are C's")]
#![expect(clippy::print_stdout, reason = "a program that tells its test what it sees")]
#![expect(clippy::panic, reason = "panicking is one of the things that happen to a rank")]

use deuteron_chaos::{now, read_identity};
use deuteron_collective::{
    Error, Group, GroupOptions, ReduceOp, Rendezvous, Result, Security, TcpRendezvous,
};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::{
    cell::Cell,
    collections::BTreeMap,
    fmt::Write as _,
    io::Write as _,
    net::IpAddr,
    path::Path,
    process::ExitCode,
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

/// Whatever goes wrong, no rank and no child of one lives longer than this.
const LIFETIME_SECONDS: u32 = 150;

type Mode = fn(&Rank, &Group) -> Result<()>;

/// What the odd rank does once, after its third round. The others go on.
const MODES: &[(&str, Mode)] = &[
    ("loop", |_, _| Ok(())),
    // Computes, or so it seems: no call for a while.
    ("quiet", |rank, _| {
        thread::sleep(rank.time("for"));
        Ok(())
    }),
    ("busy", |rank, _| {
        let end = Instant::now() + rank.time("for");
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| while Instant::now() < end {});
            }
        });
        Ok(())
    }),
    // SAFETY: it never returns; nothing is dropped, which is the point.
    ("exit", |_, _| unsafe { libc::_exit(3) }),
    ("panic", |_, _| panic!("this rank panics on purpose")),
    ("leave", |_, _| Err(leave())),
    ("abort", |_, group| {
        group.abort("the loss is not a number");
        Ok(())
    }),
    ("size", |rank, group| group.all_reduce(&mut vec![1f32; rank.len + 1], ReduceOp::Sum)),
    ("dtype", |rank, group| group.all_reduce(&mut vec![1i32; rank.len], ReduceOp::Sum)),
    ("operation", |rank, group| group.all_reduce(&mut vec![1f32; rank.len], ReduceOp::Max)),
    ("kind", |_, group| group.barrier()),
    // In these all ranks take part, and the odd one differs in an argument.
    ("root", |rank, group| group.broadcast(&mut vec![1f32; rank.len], usize::from(rank.is_odd()))),
    ("varied", |rank, group| match rank.is_odd() {
        false => group.all_gather_varied(&vec![1f32; rank.len]).map(drop),
        true => group.all_gather_varied(&vec![1i16; rank.len]).map(drop),
    }),
    ("huge", |rank, group| {
        let mut tensor = vec![1f32; 64 << 20];
        rank.say("STARTED");
        group.all_reduce(&mut tensor, ReduceOp::Sum)
    }),
    ("in-child", |_, group| {
        in_child(|| match group.barrier() {
            Ok(()) => println!("CHILD-CALL went through"),
            Err(error) => println!("CHILD-CALL {error}"),
        });
        Ok(())
    }),
];
const FOR_ALL: [&str; 3] = ["root", "varied", "huge"];

struct Rank {
    options: BTreeMap<String, String>,
    rank: usize,
    len: usize,
}

fn main() -> ExitCode {
    // SAFETY: no handler is set; the signal ends the process.
    unsafe { libc::alarm(LIFETIME_SECONDS) };
    let options: BTreeMap<String, String> = std::env::args()
        .skip(1)
        .map(|argument| match argument.split_once('=') {
            Some((key, value)) => (key.to_owned(), value.to_owned()),
            None => (argument, String::new()),
        })
        .collect();
    let mut rank = Rank { options, rank: 0, len: 0 };
    (rank.rank, rank.len) = (rank.number("rank", 0), rank.number("len", 1 << 20));
    let log = tracing::subscriber::set_global_default(deuteron_chaos::Log);
    if log.is_err() {
        return ExitCode::FAILURE;
    }
    match rank.run() {
        Ok(()) => {
            rank.say("DONE");
            ExitCode::SUCCESS
        }
        Err(error) if error.to_string() == leave().to_string() => {
            // The group is dropped; the process stays.
            rank.say("LEFT");
            thread::sleep(Duration::from_secs(u64::from(LIFETIME_SECONDS)));
            ExitCode::SUCCESS
        }
        Err(error) => {
            // Already told, unless the group could not be made.
            rank.say(&format!("END {} {error}", now().as_micros()));
            ExitCode::from(7)
        }
    }
}

fn leave() -> Error {
    Error::Invalid("leaves".into())
}

impl Rank {
    fn run(&self) -> Result<()> {
        if let Some(cores) = self.options.get("cores") {
            let mut set = rustix::thread::CpuSet::new();
            (0..cores.parse().unwrap_or(1)).for_each(|core| set.set(core));
            rustix::thread::sched_setaffinity(None, &set)
                .map_err(|error| Error::Invalid(error.to_string()))?;
        }
        for (key, resource) in [("memory", Resource::As), ("descriptors", Resource::Nofile)] {
            if let Some(most) = self.options.get(key).filter(|_| self.is_odd()) {
                let most = most.parse().ok();
                setrlimit(resource, Rlimit { current: most, maximum: most })
                    .map_err(|error| Error::Invalid(error.to_string()))?;
            }
        }
        for generation in 0..self.number("groups", 1) {
            let before = held();
            let result = self.one_group(generation);
            // A thread that has been joined is still listed for a moment.
            let patience = Instant::now() + Duration::from_secs(1);
            while held() != before && Instant::now() < patience {
                thread::sleep(Duration::from_millis(1));
            }
            if held() != before {
                self.say(&format!("LEAK {} instead of {before}", held()));
            }
            result?;
        }
        Ok(())
    }

    /// One group from its making to its end.
    fn one_group(&self, generation: u64) -> Result<()> {
        let mut group = self.connect(generation)?;
        if let Some(groups) =
            self.options.get("split").and_then(|groups| groups.parse::<u32>().ok())
        {
            let part = group.split(Some(self.rank as u32 % groups.max(1)))?;
            group = part.unwrap_or(group);
        }
        let memory = group.shares_memory();
        self.say(&format!("READY shares_memory={memory} pid={}", std::process::id()));
        if self.options.contains_key("fork") {
            in_child(|| thread::sleep(Duration::from_secs(u64::from(LIFETIME_SECONDS))));
        }
        let result = self.rounds(&group);
        if let Err(error) = &result
            && error.to_string() != leave().to_string()
        {
            self.say(&format!("ERROR {} {error}", now().as_micros()));
            let start = Instant::now();
            let again = group.barrier();
            let took = start.elapsed().as_micros();
            self.say(&match again {
                Ok(()) => format!("AGAIN {took} it went through"),
                Err(error) => format!("AGAIN {took} {error}"),
            });
        }
        result
    }

    fn connect(&self, generation: u64) -> Result<Group> {
        let text = |key: &str| self.options.get(key).map(String::as_str);
        let security = match text("tls") {
            Some(directory) => Security::Tls(read_identity(Path::new(directory))?),
            None if text("plain").is_some() && text("default").is_none() => Security::Plain,
            None => Security::Local,
        };
        let at = text("at").and_then(|at| at.parse().ok());
        let at = at.ok_or_else(|| Error::Invalid("at=ADDRESS is missing".into()))?;
        let limit = Duration::from_millis(self.number("patience", 30_000));
        let size = self.number("size", 1);
        let inner = TcpRendezvous::connect(at, self.rank, size, generation, &security, limit)?;
        let hold = if self.is_odd() { self.number("hold", 0) } else { 0 };
        let held = Held { inner, hold, gathered: Cell::new(0) };
        let mut options = GroupOptions::default().security(security).start_limit(limit);
        if let Some(host) = text("host") {
            options = options.host(host);
        }
        if let Some(limit) = text("limit") {
            options = options.limit(Duration::from_millis(limit.parse().unwrap_or(0)));
        }
        let flat = text("flat").is_some_and(|who| who == self.rank.to_string());
        Group::connect(&held, options.share_memory(text("share") != Some("no")).flat(flat))
    }

    /// Checked calls, and the odd thing after the third round.
    fn rounds(&self, group: &Group) -> Result<()> {
        let rounds = self.number("rounds", 0);
        let (mut plain, mut bucket) = (Vec::new(), None);
        if self.options.contains_key("bucket") {
            bucket = Some(group.bucket::<f32>(self.len)?);
        } else {
            plain = vec![0f32; self.len];
        }
        let mode = self.options.get("mode").map_or("loop", String::as_str);
        let odd = MODES.iter().find(|(name, _)| *name == mode);
        let (_, odd) = odd.ok_or_else(|| Error::Invalid(format!("there is no mode {mode}")))?;
        for round in 1.. {
            let tensor = bucket.as_deref_mut().unwrap_or(&mut plain);
            check_all_reduce(group, tensor, round)?;
            check_others(group, round)?;
            if round.is_power_of_two() || round % 16 == 0 {
                self.say(&format!("ROUND {round}"));
            }
            if round == 3 && (self.is_odd() || FOR_ALL.contains(&mode)) {
                self.say("ODD");
                odd(self, group)?;
            }
            if round == rounds {
                break;
            }
        }
        group.barrier()
    }

    fn is_odd(&self) -> bool {
        self.rank == self.number("who", 0)
    }

    fn number<N: FromStr>(&self, key: &str, otherwise: N) -> N {
        self.options.get(key).and_then(|value| value.parse().ok()).unwrap_or(otherwise)
    }

    fn time(&self, key: &str) -> Duration {
        Duration::from_millis(self.number(key, 0))
    }

    fn say(&self, line: &str) {
        // One write, so that lines of a rank and its child do not mix; a test that has gone does not matter.
        let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
    }
}

/// What a group must not leave behind in its process.
fn held() -> String {
    let count = |path: &str| std::fs::read_dir(path).map_or(0, Iterator::count);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mappings = maps.lines().filter(|line| line.contains("deuteron-")).count();
    let (descriptors, threads) = (count("/proc/self/fd"), count("/proc/self/task"));
    format!("{descriptors} descriptors, {threads} threads, {mappings} mappings")
}

fn check(right: bool, what: &str, round: usize) {
    assert!(right, "WRONG RESULT of {what} in round {round}");
}

fn check_all_reduce(group: &Group, tensor: &mut [f32], round: usize) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let value = |rank: usize, index: usize| ((index + round) % 61 + 3 * rank) as f32;
    for (index, element) in tensor.iter_mut().enumerate() {
        *element = value(rank, index);
    }
    group.all_reduce(tensor, ReduceOp::Sum)?;
    let ranks = (size * (size - 1) / 2 * 3) as f32;
    let right = tensor
        .iter()
        .enumerate()
        .all(|(index, element)| *element == value(0, index) * size as f32 + ranks);
    check(right, "all_reduce", round);
    Ok(())
}

fn check_others(group: &Group, round: usize) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let mut small = [rank as i64, round as i64];
    group.all_reduce(&mut small, ReduceOp::Max)?;
    check(small == [size as i64 - 1, round as i64], "a small all_reduce", round);
    let root = round % size;
    let mut text = vec![(rank + round) as u8; 1000];
    group.broadcast(&mut text, root)?;
    check(text.iter().all(|byte| *byte == (root + round) as u8), "broadcast", round);
    let gathered = group.all_gather_varied(&vec![rank as i32; rank * 100 + round % 7])?;
    let counts: Vec<usize> = (0..size).map(|rank| rank * 100 + round % 7).collect();
    let values: Vec<i32> =
        counts.iter().enumerate().flat_map(|(rank, count)| vec![rank as i32; *count]).collect();
    check(gathered.counts == counts && gathered.values == values, "all_gather_varied", round);
    Ok(())
}

/// Forks; the child does `what` and ends without dropping anything.
fn in_child(what: impl FnOnce()) {
    // SAFETY: glibc's allocator and the standard library's locks are usable in a child of a thread that holds
    // none of them, and the only other thread, which watches, does not print.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: as in main; alarms are not inherited.
            unsafe { libc::alarm(LIFETIME_SECONDS) };
            what();
            let _ = std::io::stdout().flush();
            // SAFETY: ends the child here.
            unsafe { libc::_exit(0) }
        }
        child => println!("CHILD {child}"),
    }
}

/// A rendezvous that stops after one of its gatherings, so that a test can step in between.
struct Held {
    inner: TcpRendezvous,
    hold: usize,
    gathered: Cell<usize>,
}

impl Rendezvous for Held {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn generation(&self) -> u64 {
        self.inner.generation()
    }

    fn address(&self) -> Option<IpAddr> {
        self.inner.address()
    }

    fn check(&self) -> Result<()> {
        self.inner.check()
    }

    fn abandon(&self, reason: &str) {
        self.inner.abandon(reason);
    }

    fn all_gather(&self, message: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let all = self.inner.all_gather(message, limit)?;
        self.gathered.set(self.gathered.get() + 1);
        if self.hold > 0 && self.gathered.get() <= self.hold {
            let hex: Vec<String> = all.iter().map(|bytes| hex(bytes)).collect();
            println!("GATHERED {}", hex.join(" "));
        }
        if self.gathered.get() == self.hold {
            println!("HELD");
            let _ = std::io::stdin().read_line(&mut String::new());
        }
        Ok(all)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
