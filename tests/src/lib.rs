//! Real processes, and hosts made of network namespaces: what the tests of this package stand on.
//!
//! - CASE-1: one [`Case`] at a time. It has a time limit that kills, and when it ends nothing may be left: no process,
//!   no descriptor, no shared memory, no namespace.
//! - CASE-2: whatever is started or made is ended by the drop of what stands for it, also when a test panics.
//! - CASE-3: tests wait for lines that ranks print, never for time to pass; times are the ranks' own, from one clock.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails loudly")]
#![expect(clippy::print_stderr, reason = "what the ranks of a failed test said")]

mod launch;
mod log;
mod terminal;

pub use launch::{Ended, Hash, Launch, Process, Stamp, has_socket, script};
pub use log::Log;
pub use terminal::Terminal;

use deuteron_collective::{Identity, SERVER_NAME};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio, id},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Time since the machine started; the same in all processes.
pub fn now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers that no other use in this process has.
fn unique() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What ranks have said, by their process groups; a child that a rank forked is in its rank's.
static STARTED: Mutex<BTreeMap<i32, Arc<Said>>> = Mutex::new(BTreeMap::new());

fn end_process_group(group: i32) {
    if let Some(group) = Pid::from_raw(group) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// One test, alone, under a time limit, with a look at what it left behind.
pub struct Case {
    descriptors: Vec<String>,
    ended: Option<mpsc::Sender<()>>,
    limit: Option<JoinHandle<()>>,
    _alone: MutexGuard<'static, ()>,
}

impl Case {
    /// Begins when no other case of this process runs. After `seconds` the whole process is ended.
    pub fn within(seconds: u64) -> Self {
        Self::after(|| (), seconds)
    }

    /// As [`Case::within`], after something that opens what stays open for the rest of this process.
    pub fn after(prepare: impl FnOnce(), seconds: u64) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = locked(&ALONE);
        prepare();
        let name = thread::current().name().unwrap_or("a test").to_owned();
        let descriptors = descriptors();
        let (ended, end) = mpsc::channel();
        let limit = thread::spawn(move || {
            let waited = end.recv_timeout(Duration::from_secs(seconds));
            if waited == Err(mpsc::RecvTimeoutError::Timeout) {
                // Not by a macro: the test's own output is held back and would be lost.
                let mut text = format!("{name} did not end within {seconds} s\n");
                for (group, said) in &*locked(&STARTED) {
                    text +=
                        &format!("process {group} said:\n  {}\n", locked(&said.lines).join("\n  "));
                    end_process_group(*group);
                }
                launch::end_marked(&launch::own_mark());
                let _ = std::io::stderr().write_all(text.as_bytes());
                own_namespaces().iter().for_each(|name| drop(ip(&["netns", "delete", name])));
                #[expect(
                    clippy::disallowed_methods,
                    reason = "a test that hangs cannot be unwound"
                )]
                std::process::abort();
            }
        });
        Self { descriptors, ended: Some(ended), limit: Some(limit), _alone: alone }
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        let patience = Instant::now() + Duration::from_secs(5);
        let left = loop {
            let left = left_over(&self.descriptors);
            if left.is_empty() || Instant::now() > patience {
                break left;
            }
            thread::sleep(Duration::from_millis(10));
        };
        locked(&STARTED).clear();
        drop(self.ended.take());
        self.limit.take().map(JoinHandle::join);
        if !thread::panicking() {
            assert!(left.is_empty(), "left behind: {left:#?}");
        }
    }
}

fn left_over(descriptors_before: &[String]) -> Vec<String> {
    let mut left: Vec<String> = own_namespaces();
    left.extend(launch::marked(&launch::own_mark()).iter().map(|process| format!("{process:?}")));
    let groups = locked(&STARTED);
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(stat) = fs::read_to_string(process.path().join("stat")) else { continue };
        let Some((name, fields)) = stat.rsplit_once(')') else { continue };
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let number = |index: usize| fields[index].parse::<i32>().unwrap_or(0);
        // A zombie that is not ours waits for its reaper only.
        let (state, parent, group) = (fields[0], number(1), number(2));
        if parent == id() as i32 || (groups.contains_key(&group) && state != "Z") {
            left.push(format!("process {name})"));
        }
    }
    let mut before = descriptors_before.to_vec();
    for descriptor in descriptors() {
        match before.iter().position(|known| *known == descriptor) {
            Some(known) => drop(before.remove(known)),
            None => left.push(format!("descriptor of {descriptor}")),
        }
    }
    let memory = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    left.extend(
        memory
            .map(|entry| entry.path().display().to_string())
            .filter(|path| path.contains("deuteron")),
    );
    left
}

/// What the open descriptors of this process refer to.
fn descriptors() -> Vec<String> {
    let directory = PathBuf::from(format!("/proc/{}/fd", id()));
    let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets
        .filter(|target| *target != directory)
        .map(|target| target.display().to_string())
        .collect()
}

/// A directory that everybody may read, gone when dropped.
pub struct Directory(PathBuf);

impl Directory {
    /// Empty, in the system's place for such things.
    #[expect(clippy::new_without_default, reason = "it makes something")]
    pub fn new() -> Self {
        let path = std::env::temp_dir().join(format!("dt-{}-{}", id(), unique()));
        fs::create_dir(&path).unwrap();
        open_to_all(&path);
        Self(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

/// Whatever the mask of this process, a test may run its ranks as another user.
fn open_to_all(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A job's certificate authority.
pub struct Authority(rcgen::CertifiedIssuer<'static, rcgen::KeyPair>);

impl Authority {
    /// A new one, known to nobody.
    #[expect(clippy::new_without_default, reason = "every one is different")]
    pub fn new() -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        Self(rcgen::CertifiedIssuer::self_signed(params, key).unwrap())
    }

    /// Writes a new member's certificate and key into a new directory.
    pub fn write_member(&self, directory: &Path) {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        fs::create_dir(directory).unwrap();
        open_to_all(directory);
        let texts = [self.0.pem(), certificate.pem(), key.serialize_pem()];
        for (name, text) in IDENTITY.iter().zip(texts) {
            fs::write(directory.join(name), text).unwrap();
        }
    }
}

/// The files of a member: the authority's certificate, its own, and its key.
pub const IDENTITY: [&str; 3] = ["authority.pem", "certificate.pem", "key.pem"];

/// What [`Authority::write_member`] wrote.
pub fn read_identity(directory: &Path) -> deuteron_collective::Result<Identity> {
    let [authority, chain, key] =
        IDENTITY.map(|name| fs::read(directory.join(name)).unwrap_or_default());
    Identity::from_pem(&authority, &chain, &key)
}

/// Says why a test is skipped, or fails with `CI=true`, where that would hide a failure.
pub fn skip(why: &str) {
    assert!(!std::env::var("CI").is_ok_and(|ci| ci == "true"), "{why}");
    eprintln!("skipped: {why}");
}

fn ip(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn own_namespaces() -> Vec<String> {
    let prefix = format!("dt-{}-", id());
    let names = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    names
        .map(|name| name.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with(&prefix))
        .collect()
}

/// Hosts on one switch: a network namespace each, with a cable (veth) to the switch, which is one as well.
pub struct Hosts {
    prefix: String,
    count: usize,
}

impl Hosts {
    /// Makes `count` hosts. Where namespaces cannot be had, says why and returns nothing, or fails with `CI=true`.
    pub fn new(count: usize) -> Option<Self> {
        let hosts = Self { prefix: format!("dt-{}-{}", id(), unique()), count };
        let made = hosts.make();
        match made {
            Ok(()) => Some(hosts),
            Err(why) => {
                skip(&format!("no network namespaces: {why}"));
                None
            }
        }
    }

    fn make(&self) -> Result<(), String> {
        let switch = self.switch();
        ip(&["netns", "add", &switch])?;
        self.at(&switch, "link add switch type bridge")?;
        self.at(&switch, "link set switch up")?;
        for host in 0..self.count {
            let (name, port, address) = (self.name(host), Self::port(host), self.address(host));
            ip(&["netns", "add", &name])?;
            self.at(&switch, &format!("link add {port} type veth peer name cable netns {name}"))?;
            self.at(&switch, &format!("link set {port} master switch up"))?;
            self.at(&name, &format!("address add {address}/24 dev cable"))?;
            self.at(&name, "link set cable up")?;
            self.at(&name, "link set lo up")?;
        }
        Ok(())
    }

    fn at(&self, namespace: &str, words: &str) -> Result<String, String> {
        let arguments: Vec<&str> = ["-n", namespace].into_iter().chain(words.split(' ')).collect();
        ip(&arguments)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.prefix)
    }

    fn port(host: usize) -> String {
        format!("port{host}")
    }

    /// The name of a host: its namespace, and what its ranks call themselves.
    pub fn name(&self, host: usize) -> String {
        format!("{}-host{host}", self.prefix)
    }

    /// The address of a host on the switch.
    pub fn address(&self, host: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, host as u8 + 1)
    }

    /// Pulls a host's cable out of the switch. The host itself only sees that nothing comes any more.
    pub fn cut(&self, host: usize) {
        self.at(&self.switch(), &format!("link set {} down", Self::port(host))).unwrap();
    }

    /// Puts the cable back.
    pub fn mend(&self, host: usize) {
        self.at(&self.switch(), &format!("link set {} up", Self::port(host))).unwrap();
    }

    /// Takes the interface of a host down, on the host.
    pub fn take_down(&self, host: usize) {
        self.at(&self.name(host), "link set cable down").unwrap();
    }

    /// Makes a host's cable slow, so that a large call surely takes long.
    pub fn slow_down(&self, host: usize, rate: &str) {
        let words =
            ["-n", &self.name(host), "qdisc", "add", "dev", "cable", "root", "tbf", "rate", rate]
                .map(str::to_owned);
        let more = ["burst", "256kb", "latency", "100ms"].map(str::to_owned);
        let done = Command::new("tc").args(words).args(more).output().unwrap();
        assert!(done.status.success(), "tc: {}", String::from_utf8_lossy(&done.stderr));
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let names = (0..self.count).map(|host| self.name(host)).chain([self.switch()]);
        names.for_each(|name| drop(ip(&["netns", "delete", &name])));
    }
}

/// How ranks are to be started.
pub struct Plan<'a> {
    program: PathBuf,
    size: usize,
    options: Vec<String>,
    hosts: Option<(&'a Hosts, &'a [usize])>,
    certificates: Option<Arc<Directory>>,
    user: Option<u32>,
    contained: bool,
    at: SocketAddr,
}

impl<'a> Plan<'a> {
    /// `size` ranks of `program` on this host, which meet at an address of their own.
    pub fn new(program: impl Into<PathBuf>, size: usize) -> Self {
        // All of 127.0.0.0/8 is this machine.
        let [_, _, high, low] = id().to_be_bytes();
        let address = Ipv4Addr::new(127, high | 128, low, unique() as u8);
        Self {
            program: program.into(),
            size,
            options: Vec::new(),
            hosts: None,
            certificates: None,
            user: None,
            contained: false,
            at: SocketAddr::new(IpAddr::V4(address), 4711),
        }
    }

    /// Gives every rank an option; see `src/bin/rank.rs`.
    #[must_use]
    pub fn with(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    /// Puts every rank on the host that `layout` has in its place.
    #[must_use]
    pub fn on(self, hosts: &'a Hosts, layout: &'a [usize]) -> Self {
        assert_eq!(layout.len(), self.size, "one host for each rank");
        let at = SocketAddr::new(IpAddr::V4(hosts.address(layout[0])), 4711);
        Self { hosts: Some((hosts, layout)), at, ..self }
    }

    /// Encrypts, with a new authority and a certificate for each rank.
    #[must_use]
    pub fn tls(self) -> Self {
        let (directory, authority) = (Directory::new(), Authority::new());
        (0..self.size)
            .for_each(|rank| authority.write_member(&directory.path().join(rank.to_string())));
        Self { certificates: Some(Arc::new(directory)), ..self }
    }

    /// Runs the ranks as another user.
    #[must_use]
    pub fn user(self, user: u32) -> Self {
        Self { user: Some(user), ..self }
    }

    /// Gives each rank a process namespace of its own, as in containers that share their host's network.
    #[must_use]
    pub fn contained(self) -> Self {
        Self { contained: true, ..self }
    }

    /// Where the ranks meet.
    pub fn at(&self) -> SocketAddr {
        self.at
    }

    /// Where the certificates of the ranks are, a directory for each.
    pub fn certificates(&self) -> &Path {
        self.certificates.as_ref().unwrap().path()
    }

    /// Starts all ranks.
    pub fn start(&self) -> Vec<Rank> {
        (0..self.size).map(|rank| self.start_one(rank)).collect()
    }

    /// Starts all ranks and waits until they have become a group.
    pub fn start_and_meet(&self) -> Vec<Rank> {
        let ranks = self.start();
        ranks.iter().for_each(|rank| drop(rank.line("READY")));
        ranks
    }

    /// Starts one rank.
    pub fn start_one(&self, rank: usize) -> Rank {
        let mut host = None;
        let mut command = match self.hosts {
            None if self.contained => {
                let mut command = Command::new("unshare");
                command.args(["--pid", "--fork", "--kill-child"]).arg(&self.program);
                command
            }
            None => Command::new(&self.program),
            Some((hosts, layout)) => {
                let name = hosts.name(layout[rank]);
                let mut command = Command::new("ip");
                command
                    .args(["netns", "exec", &name])
                    .arg(&self.program)
                    .arg(format!("host={name}"));
                host = Some(name);
                command
            }
        };
        command
            .args([
                format!("rank={rank}"),
                format!("size={}", self.size),
                format!("at={}", self.at),
            ])
            .args(&self.options)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        match &self.certificates {
            Some(directory) => {
                command.arg(format!("tls={}", directory.path().join(rank.to_string()).display()));
            }
            None if self.hosts.is_some() => drop(command.arg("plain")),
            None => {}
        }
        if let Some(user) = self.user {
            command.uid(user).gid(user).current_dir("/");
        }
        let host = host
            .unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
        Rank::start(command, rank, host, self.certificates.clone())
    }
}

/// What a rank has printed.
#[derive(Default)]
struct Said {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

/// A failure, as a rank told it.
#[derive(Clone, Debug)]
pub struct Failed {
    /// On the clock of [`now`].
    pub at: Duration,
    /// The error.
    pub message: String,
}

/// A running rank; killed with all its children when dropped.
pub struct Rank {
    /// Its number.
    pub rank: usize,
    /// The name of its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    child: Mutex<Child>,
    stdin: Mutex<Option<ChildStdin>>,
    said: Arc<Said>,
    readers: Vec<JoinHandle<()>>,
    _certificates: Option<Arc<Directory>>,
}

impl Rank {
    fn start(
        mut command: Command,
        rank: usize,
        host: String,
        certificates: Option<Arc<Directory>>,
    ) -> Self {
        let mut child = command.spawn().unwrap();
        let pid = child.id();
        let said = Arc::new(Said::default());
        locked(&STARTED).insert(pid as i32, Arc::clone(&said));
        let outputs: [(&'static str, Option<Box<dyn Read + Send>>); 2] = [
            ("", child.stdout.take().map(|pipe| Box::new(pipe) as _)),
            ("LOG ", child.stderr.take().map(|pipe| Box::new(pipe) as _)),
        ];
        let readers = outputs
            .into_iter()
            .filter_map(|(mark, pipe)| {
                let (pipe, said) = (pipe?, Arc::clone(&said));
                Some(thread::spawn(move || {
                    for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                        locked(&said.lines).push(format!("{mark}{line}"));
                        said.more.notify_all();
                    }
                }))
            })
            .collect();
        let stdin = Mutex::new(child.stdin.take());
        let child = Mutex::new(child);
        Self { rank, host, pid, child, stdin, said, readers, _certificates: certificates }
    }

    /// All that it has said.
    pub fn lines(&self) -> Vec<String> {
        locked(&self.said.lines).clone()
    }

    /// The rest of the first line that starts with `start`; waits until there is one.
    pub fn line(&self, start: &str) -> String {
        self.wait_until(start, |lines| {
            lines
                .iter()
                .find_map(|line| line.strip_prefix(start))
                .map(|rest| rest.trim().to_owned())
        })
    }

    /// Waits until what it has said makes `found` find something; fails when the rank has ended without it.
    pub fn wait_until<R>(&self, what: &str, found: impl Fn(&[String]) -> Option<R>) -> R {
        let mut ended = None;
        let mut lines = locked(&self.said.lines);
        loop {
            if let Some(result) = found(&lines) {
                return result;
            }
            // Its last words may still be on their way.
            let over = ended.is_some_and(|end: Instant| end.elapsed() > Duration::from_secs(2));
            assert!(!over, "rank {} ended and never said {what}", self.rank);
            let nap = Duration::from_millis(20);
            lines =
                self.said.more.wait_timeout(lines, nap).unwrap_or_else(PoisonError::into_inner).0;
            if ended.is_none() && locked(&self.child).try_wait().unwrap().is_some() {
                ended = Some(Instant::now());
            }
        }
    }

    /// Waits until it has done `number` rounds.
    pub fn round(&self, number: usize) {
        self.wait_until("a round", |lines| (rounds(lines) >= number).then_some(()));
    }

    /// How many rounds it has told of.
    pub fn rounds(&self) -> usize {
        rounds(&self.lines())
    }

    /// Waits for it to end well.
    pub fn done(&self) {
        self.line("DONE");
        assert!(self.status().success(), "rank {}", self.rank);
    }

    /// Waits for the error of a call.
    pub fn error(&self) -> Failed {
        Failed::parse(&self.line("ERROR "))
    }

    /// Waits for the error of the call after that: how long it took, and what it says.
    pub fn again(&self) -> Failed {
        Failed::parse(&self.line("AGAIN "))
    }

    /// Waits for its end by an error.
    pub fn end(&self) -> Failed {
        Failed::parse(&self.line("END "))
    }

    /// Sends it a signal and tells when.
    pub fn signal(&self, signal: Signal) -> Duration {
        let ended = locked(&self.child).try_wait().unwrap();
        assert!(ended.is_none(), "rank {} has ended: {ended:?}", self.rank);
        let at = now();
        kill_process(Pid::from_raw(self.pid as i32).unwrap(), signal).unwrap();
        at
    }

    /// Lets it go on where it holds.
    pub fn release(&self) {
        if let Some(stdin) = &mut *locked(&self.stdin) {
            stdin.write_all(b"\n").unwrap();
        }
    }

    /// Waits for its end.
    pub fn status(&self) -> ExitStatus {
        locked(&self.child).wait().unwrap()
    }
}

impl Failed {
    fn parse(line: &str) -> Self {
        let (micros, message) = line.split_once(' ').unwrap_or((line, ""));
        let at = Duration::from_micros(micros.parse().unwrap());
        Self { at, message: message.to_owned() }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        end_process_group(self.pid as i32);
        let _ = locked(&self.child).wait();
        self.readers.drain(..).for_each(|reader| drop(reader.join()));
        let lines = self.lines();
        if thread::panicking() {
            eprintln!("rank {} on {} said:\n  {}", self.rank, self.host, lines.join("\n  "));
        } else if let Some(wrong) = lines.iter().find(|line| is_wrong(line)) {
            panic!("rank {}: {wrong}", self.rank);
        }
    }
}

fn rounds(lines: &[String]) -> usize {
    let last = lines.iter().rev().find_map(|line| line.strip_prefix("ROUND "));
    last.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// What no rank may ever say, whatever happens to it.
fn is_wrong(line: &str) -> bool {
    line.contains("WRONG RESULT") || line.starts_with("LEAK")
}

/// All ranks but those of `without` fail between `least` and `most` after `event`, each naming what `names` gives for
/// it; and their next call fails at once with the same cause.
pub fn all_fail(
    ranks: &[Rank],
    without: &[usize],
    event: Duration,
    (least, most): (Duration, Duration),
    names: impl Fn(&Rank) -> Vec<String>,
) -> Vec<Failed> {
    let others = ranks.iter().filter(|rank| !without.contains(&rank.rank));
    others
        .map(|rank| {
            let (failed, again) = (rank.error(), rank.again());
            let took = failed.at.saturating_sub(event);
            let message = &failed.message;
            assert!(took >= least && took <= most, "rank {} after {took:?}: {message}", rank.rank);
            for name in names(rank) {
                assert!(
                    message.contains(&name),
                    "rank {} does not say {name:?}: {message}",
                    rank.rank
                );
            }
            let cause = |text: &str| text.rsplit(": ").next().unwrap_or_default().to_owned();
            assert!(again.at < Duration::from_millis(50), "the next call took {:?}", again.at);
            assert_eq!(cause(&again.message), cause(message), "the next call has another cause");
            assert_eq!(rank.status().code(), Some(7), "rank {}", rank.rank);
            eprintln!("rank {} after {took:?}: {message}", rank.rank);
            failed
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_behind_is_seen() {
        let before = descriptors();
        assert_eq!(left_over(&before), Vec::<String>::new());
        let file = fs::File::open("/proc/self/stat").unwrap();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let mut far = Command::new("setsid");
        let stamp = Stamp::on(&mut far);
        assert!(far.args(["--fork", "sleep", "61"]).status().unwrap().success());
        let left = left_over(&before);
        drop(stamp);
        child.kill().unwrap();
        child.wait().unwrap();
        drop(file);
        assert!(left.iter().any(|line| line.contains("61") || line.contains("setsid")), "{left:?}");
        assert!(
            left.iter().any(|line| line.contains("descriptor of") && line.contains("stat")),
            "{left:?}"
        );
        assert!(left.iter().any(|line| line.contains("(sleep)")), "{left:?}");
        assert_eq!(left_over(&before), Vec::<String>::new());
    }
}
