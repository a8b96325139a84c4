//! `deuteron doctor`: looks at this machine, and says what is wrong and how to mend it.
//!
//! Every check is tried, not looked up: shared memory is shared by two processes, a socket is connected.

use crate::{status::exit, terminal, values::counted};
use deuteron_collective::{Group, GroupOptions, ReduceOp, Security, TcpRendezvous};
use deuteron_gang::{
    discovery::{Source, discover},
    supervisor::interfaces,
};
use rustix::process::{Resource, getrlimit};
use serde_json::json;
use std::{
    env,
    ffi::OsString,
    fs, io,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    os::linux::net::SocketAddrExt as _,
    os::unix::net as unix,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

/// The most that the two processes of the shared-memory check may take to meet, and then to compute.
const LIMIT: Duration = Duration::from_secs(10);
/// Fewer open files than this end jobs with many tasks or data loaders.
const FEW_FILES: u64 = 1024;
/// Fewer processes and threads than this end jobs whose tasks start thread pools.
const FEW_PROCESSES: u64 = 1024;
/// PyTorch's data loaders hand batches over in `/dev/shm`; a container's default of 64 MB is used up by one.
const SMALL_SHM: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Good,
    Warning,
    Problem,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    level: Level,
    subject: &'static str,
    text: String,
    /// How to mend it.
    remedy: Option<&'static str>,
}

impl Finding {
    fn good(subject: &'static str, text: impl Into<String>) -> Self {
        Self { level: Level::Good, subject, text: text.into(), remedy: None }
    }

    fn warning(subject: &'static str, text: impl Into<String>, remedy: &'static str) -> Self {
        Self { level: Level::Warning, subject, text: text.into(), remedy: Some(remedy) }
    }

    fn problem(subject: &'static str, text: impl Into<String>, remedy: &'static str) -> Self {
        Self { level: Level::Problem, subject, text: text.into(), remedy: Some(remedy) }
    }
}

/// Prints all findings. Fails when one of them is a problem. `program` starts this program again.
pub(crate) fn doctor(as_json: bool, program: &[OsString]) -> u8 {
    let mut findings = vec![slots()];
    findings.extend(accelerators());
    findings.extend(network());
    findings.extend([
        open_files(),
        processes(),
        locked_memory(),
        shm(),
        memfd(),
        pidfd(),
        sockets(),
    ]);
    findings.push(shared_memory(program));
    findings.push(ssh());
    let stdout = io::stdout();
    let text = if as_json {
        to_json(&findings)
    } else {
        to_text(&findings, terminal::has_colour(&stdout))
    };
    // Whoever closed standard output wants to see no more.
    let _ = stdout.lock().write_all(text.as_bytes());
    if findings.iter().any(|finding| finding.level == Level::Problem) { exit::FAILED } else { 0 }
}

fn to_json(findings: &[Finding]) -> String {
    let findings: Vec<_> = findings
        .iter()
        .map(|finding| {
            json!({
                "level": finding.level.word(),
                "subject": finding.subject,
                "text": finding.text,
                "remedy": finding.remedy,
            })
        })
        .collect();
    format!("{:#}\n", json!({ "version": env!("CARGO_PKG_VERSION"), "findings": findings }))
}

fn to_text(findings: &[Finding], colour: bool) -> String {
    let mut text = String::new();
    for finding in findings {
        let (number, word) = match finding.level {
            Level::Good => (32, "ok"),
            Level::Warning => (33, "warning"),
            Level::Problem => (31, "problem"),
        };
        let word = format!("{word:<8}");
        let word = if colour { format!("\x1b[{number}m{word}\x1b[0m") } else { word };
        text.push_str(&format!("{word} {}: {}\n", finding.subject, finding.text));
        if let Some(remedy) = finding.remedy {
            text.push_str(&format!("         → {remedy}\n"));
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    text.push_str(&match (count(Level::Problem), count(Level::Warning)) {
        (0, 0) => "deuteron: everything is in order\n".to_owned(),
        (problems, warnings) => {
            format!(
                "deuteron: {}, {}\n",
                counted(problems, "problem"),
                counted(warnings, "warning")
            )
        }
    });
    text
}

fn slots() -> Finding {
    let slots = match thread::available_parallelism() {
        Ok(slots) => usize::from(slots),
        Err(error) => {
            return Finding::warning("slots", error.to_string(), "say --tasks or --hosts");
        }
    };
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let is_core = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let cores = stat.lines().filter(is_core).count();
    let mut text = format!("{} on {}", counted(slots, "slot"), counted(cores.max(slots), "core"));
    match quota() {
        Some(quota) => text.push_str(&format!(", a control group allows the time of {quota:.1}")),
        None if cores > slots => text.push_str(", the others are not for this process (affinity)"),
        None => {}
    }
    Finding::good("slots", text)
}

/// The cores' worth of time that this process's control group may use.
fn quota() -> Option<f64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mut folder = Path::new("/sys/fs/cgroup").join(path);
    let mut least: Option<f64> = None;
    while folder.starts_with("/sys/fs/cgroup") {
        if let Some(quota) =
            fs::read_to_string(folder.join("cpu.max")).ok().and_then(|text| cores_of(&text))
        {
            least = Some(least.map_or(quota, |least| least.min(quota)));
        }
        folder.pop();
    }
    least
}

fn cores_of(cpu_max: &str) -> Option<f64> {
    let (quota, period) = cpu_max.trim().split_once(' ')?;
    Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
}

fn accelerators() -> Vec<Finding> {
    const SUBJECT: &str = "accelerators";
    let found = discover(&[Source::Nvml]);
    let mut findings: Vec<Finding> = found
        .accelerators
        .iter()
        .map(|device| {
            let memory = device.memory as f64 / f64::from(1 << 30);
            Finding::good(
                SUBJECT,
                format!(
                    "{} {}: {}, {memory:.1} GiB, {}",
                    device.kind, device.index, device.model, device.uuid
                ),
            )
        })
        .collect();
    // Without a driver there is nothing to be discovered, and nothing to mend.
    let driver = Path::new("/proc/driver/nvidia").exists() || Path::new("/dev/nvidiactl").exists();
    if driver {
        findings.extend(found.problems.into_iter().map(|problem| {
            Finding::warning(
                SUBJECT,
                problem,
                "see whether nvidia-smi works here; in a container, start it with --gpus all",
            )
        }));
    }
    if findings.is_empty() {
        findings
            .push(Finding::good(SUBJECT, "no GPU is found; other kinds need a discovery script"));
    }
    findings
}

fn network() -> Vec<Finding> {
    const SUBJECT: &str = "network";
    let found = match interfaces() {
        Ok(found) => found,
        Err(error) => {
            return vec![Finding::problem(
                SUBJECT,
                error.to_string(),
                "see whether `ip address` works here",
            )];
        }
    };
    let mut findings: Vec<Finding> = found
        .iter()
        .map(|(name, address)| Finding::good(SUBJECT, format!("{name} has {address}")))
        .collect();
    if found.iter().all(|(_, address)| address.is_loopback()) {
        findings.push(Finding::warning(
            SUBJECT,
            "no other machine can reach this one",
            "this is fine for jobs on this machine; otherwise bring up an interface",
        ));
    }
    if !found.iter().any(|(_, address)| address.is_loopback()) {
        findings.push(Finding::warning(
            SUBJECT,
            "there is no loopback interface",
            "ip link set lo up",
        ));
    }
    findings
}

fn shown(limit: Option<u64>) -> String {
    limit.map_or("unlimited".into(), |limit| limit.to_string())
}

/// `None` is without limit, and so more than any number.
fn is_below(limit: Option<u64>, least: u64) -> bool {
    limit.is_some_and(|limit| limit < least)
}

fn open_files() -> Finding {
    let limit = getrlimit(Resource::Nofile);
    let text = format!("at most {} ({} if raised)", shown(limit.current), shown(limit.maximum));
    if is_below(limit.current, FEW_FILES) {
        return Finding::warning(
            "open files",
            text,
            "ulimit -n 65536, or LimitNOFILE= of the service",
        );
    }
    Finding::good("open files", text)
}

fn processes() -> Finding {
    let limit = getrlimit(Resource::Nproc);
    let text = format!("at most {} of this user", shown(limit.current));
    if is_below(limit.current, FEW_PROCESSES) {
        return Finding::warning("processes", text, "ulimit -u 65536, or TasksMax= of the service");
    }
    Finding::good("processes", text)
}

fn locked_memory() -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let text = match limit {
        None => "unlimited".to_owned(),
        Some(bytes) => format!("at most {} KiB", bytes >> 10),
    };
    let has_devices = Path::new("/dev/nvidiactl").exists() || Path::new("/dev/infiniband").exists();
    if has_devices && limit.is_some() {
        return Finding::warning(
            "locked memory",
            text,
            "GPUs and InfiniBand pin memory: ulimit -l unlimited; for a container --ulimit memlock=-1",
        );
    }
    Finding::good("locked memory", text)
}

fn shm() -> Finding {
    const SUBJECT: &str = "/dev/shm";
    const REMEDY: &str = "PyTorch's data loaders need it, deuteron does not: for a container --shm-size=8g, else remount it larger";
    match rustix::fs::statvfs("/dev/shm") {
        Ok(stat) => {
            let bytes = stat.f_blocks * stat.f_frsize;
            let text =
                format!("{} MiB, {} MiB free", bytes >> 20, (stat.f_bavail * stat.f_frsize) >> 20);
            if bytes < SMALL_SHM {
                Finding::warning(SUBJECT, text, REMEDY)
            } else {
                Finding::good(SUBJECT, text)
            }
        }
        Err(error) => Finding::warning(SUBJECT, error.to_string(), REMEDY),
    }
}

fn memfd() -> Finding {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let tried = memfd_create("deuteron-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .and_then(|file| {
            ftruncate(&file, 1 << 20)?;
            fcntl_add_seals(&file, SealFlags::SHRINK)?;
            rustix::io::write(&file, b"deuteron")
        });
    match tried {
        Ok(_) => Finding::good("memory files", "they can be made and sealed"),
        Err(error) => Finding::problem(
            "memory files",
            format!("memfd_create: {error}"),
            "ranks of this machine share memory this way: allow memfd_create in the sandbox, or run Linux 4.14 or newer",
        ),
    }
}

fn pidfd() -> Finding {
    use rustix::process::{PidfdFlags, getpid, pidfd_open};
    match pidfd_open(getpid(), PidfdFlags::empty()) {
        Ok(_) => Finding::good("process watching", "ends of processes are seen at once"),
        Err(error) => Finding::problem(
            "process watching",
            format!("pidfd_open: {error}"),
            "allow pidfd_open in the sandbox, or run Linux 5.3 or newer",
        ),
    }
}

fn sockets() -> Finding {
    let name = format!("deuteron-doctor/{}", std::process::id());
    let tried = unix::SocketAddr::from_abstract_name(name).and_then(|address| {
        let listener = unix::UnixListener::bind_addr(&address)?;
        let _caller = unix::UnixStream::connect_addr(&address)?;
        listener.accept()
    });
    match tried {
        Ok(_) => Finding::good("local sockets", "abstract Unix sockets work"),
        Err(error) => Finding::problem(
            "local sockets",
            format!("abstract Unix sockets do not work: {error}"),
            "agents and tasks meet at them: allow AF_UNIX in the sandbox",
        ),
    }
}

fn shared_memory(program: &[OsString]) -> Finding {
    const SUBJECT: &str = "shared memory";
    match two_processes(program) {
        Ok(true) => Finding::good(SUBJECT, "two processes added numbers in it"),
        Ok(false) => Finding::warning(
            SUBJECT,
            "two processes of this machine do not share it, and use TCP instead",
            "it is slower; allow memory files, abstract Unix sockets and pidfds to this user",
        ),
        Err(problem) => Finding::problem(
            SUBJECT,
            problem,
            "see the problems above; if there are none, whether a sandbox keeps processes apart",
        ),
    }
}

/// Whether a group of this process and another shares memory.
fn two_processes(program: &[OsString]) -> Result<bool, String> {
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let free = TcpListener::bind((here, 0)).and_then(|listener| listener.local_addr());
    let address = free.map_err(|error| format!("no port on loopback: {error}"))?;
    let (name, rest) = program.split_first().ok_or("this program does not know its own name")?;
    let mut child = Command::new(name)
        .args(rest)
        .args(["doctor", "--peer", &address.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("a second process does not start: {error}"))?;
    let result = meet(address, 0);
    if result.is_err() {
        // It may still wait for this one.
        let _ = child.kill();
    }
    let said = finish(&mut child);
    match (result, said) {
        (Ok(shares), None) => Ok(shares),
        (Ok(_), Some(said)) => Err(format!("the second process failed: {said}")),
        (Err(error), said) => {
            Err([Some(error), said].into_iter().flatten().collect::<Vec<_>>().join("; "))
        }
    }
}

/// What the process complained about, if it did.
fn finish(child: &mut Child) -> Option<String> {
    let mut said = String::new();
    if let Some(stderr) = &mut child.stderr {
        let _ = stderr.take(4096).read_to_string(&mut said);
    }
    let status = child.wait();
    let said = said.trim().to_owned();
    match status {
        Ok(status) if status.success() => None,
        Ok(status) if said.is_empty() => Some(status.to_string()),
        Ok(_) => Some(said),
        Err(error) => Some(error.to_string()),
    }
}

/// One of two ranks that meet at `address` and add; whether they shared memory.
fn meet(address: SocketAddr, rank: usize) -> Result<bool, String> {
    match add(address, rank) {
        Ok((shares, [3.0, 3.0])) => Ok(shares),
        Ok((_, [sum, _])) => Err(format!("1 + 2 was {sum} in it")),
        Err(error) => Err(error.to_string()),
    }
}

fn add(address: SocketAddr, rank: usize) -> deuteron_collective::Result<(bool, [f32; 2])> {
    let rendezvous = TcpRendezvous::connect(address, rank, 2, 0, &Security::Local, LIMIT)?;
    let group =
        Group::connect(&rendezvous, GroupOptions::default().start_limit(LIMIT).limit(LIMIT))?;
    let mut numbers = [rank as f32 + 1.0; 2];
    group.all_reduce(&mut numbers, ReduceOp::Sum)?;
    group.barrier()?;
    Ok((group.shares_memory(), numbers))
}

/// The second process of the check.
pub(crate) fn peer(address: SocketAddr) -> u8 {
    match meet(address, 1) {
        Ok(_) => 0,
        Err(problem) => {
            let _ = writeln!(io::stderr().lock(), "{problem}");
            exit::FAILED
        }
    }
}

fn ssh() -> Finding {
    let path = env::var_os("PATH").unwrap_or_default();
    match env::split_paths(&path).map(|folder| folder.join("ssh")).find(|file| file.is_file()) {
        Some(file) => Finding::good("ssh", format!("{}", file.display())),
        None => Finding::warning(
            "ssh",
            "not found in PATH",
            "it is needed for --hosts with other machines only: install OpenSSH's client",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas() {
        assert_eq!(cores_of("max 100000\n"), None);
        assert_eq!(cores_of("150000 100000\n"), Some(1.5));
        assert_eq!(cores_of(""), None);
    }

    #[test]
    fn findings_are_read_by_people_and_programs() {
        let findings = [
            Finding::good("slots", "2 slots"),
            Finding::warning("ssh", "not found", "install it"),
            Finding::problem("memory files", "refused", "allow it"),
        ];
        assert_eq!(
            to_text(&findings, false),
            "ok       slots: 2 slots\n\
             warning  ssh: not found\n         → install it\n\
             problem  memory files: refused\n         → allow it\n\
             deuteron: 1 problem, 1 warning\n"
        );
        assert!(to_text(&findings, true).starts_with("\x1b[32mok      \x1b[0m slots"));
        assert!(to_text(&findings[..1], false).ends_with("everything is in order\n"));
        let read: serde_json::Value = serde_json::from_str(&to_json(&findings)).unwrap();
        assert_eq!(read["findings"][2]["level"], "problem");
        assert_eq!(read["findings"][0]["remedy"], serde_json::Value::Null);
    }

    #[test]
    fn two_ranks_meet() {
        let free =
            TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap();
        let other = thread::spawn(move || meet(free, 1));
        assert_eq!(meet(free, 0), Ok(true));
        assert_eq!(other.join().unwrap(), Ok(true));
    }

    #[test]
    fn a_process_that_never_comes_is_a_problem() {
        let finding = shared_memory(&["/nowhere/deuteron".into()]);
        assert_eq!(finding.level, Level::Problem);
        assert!(finding.text.contains("does not start"));
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        for finding in [slots(), memfd(), pidfd(), sockets()] {
            assert_eq!(finding.level, Level::Good, "{finding:?}");
        }
    }
}
