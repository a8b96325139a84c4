//! A task as a process: how it is started, what it is told, how it is ended.
#![expect(unsafe_code, reason = "what a child does after fork is the caller's promise")]

use crate::{Ending, Error, Result, Stream, discovery::visible, protocol::Assignment};
use rustix::{
    fd::OwnedFd,
    pipe::{PipeFlags, pipe_with},
    process::{
        Pid, Resource, Rlimit, Signal, WaitOptions, getpid, getrlimit, kill_process_group,
        set_child_subreaper, set_parent_process_death_signal, setrlimit, setsid, wait,
    },
    stdio::{dup2_stderr, dup2_stdin, dup2_stdout},
};
use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read},
    os::unix::{ffi::OsStrExt, process::ExitStatusExt},
    path::Path,
    pin::Pin,
    process::Stdio,
    sync::OnceLock,
    time::{Duration, Instant},
};
use tokio::{io::AsyncRead, process::Command};

/// One of a task's outputs, and which.
pub(crate) type Output = (Stream, Box<dyn AsyncRead + Send + Unpin>);

/// What an agent can do to something that runs.
pub(crate) trait Handle: Send {
    /// Asks it to end, even if somebody has stopped it.
    fn terminate(&self);
    /// Ends it and everything of its group.
    fn kill(&self);
    fn pause(&self);
    fn resume(&self);
    /// Whether somebody has stopped it.
    fn is_stopped(&self) -> bool;
}

/// Something that runs.
pub(crate) struct Started {
    pub handle: Box<dyn Handle>,
    pub outputs: Vec<Output>,
    pub ending: Pin<Box<dyn Future<Output = Ending> + Send>>,
}

/// What to run, completely.
pub(crate) struct Program {
    words: Vec<OsString>,
    environment: Vec<(String, OsString)>,
    directory: Option<OsString>,
}

impl Program {
    pub fn of(rank: usize, socket: &str, cores: u32, assignment: &Assignment) -> Self {
        let info = &assignment.infos[rank];
        let size = assignment.infos.len();
        let mut environment: Vec<(String, OsString)> = Vec::new();
        // The agent's own variables are the lowest layer; what the user set stays.
        let threads = (cores as usize / info.local_size.max(1)).max(1);
        if std::env::var_os("OMP_NUM_THREADS").is_none() {
            environment.push(("OMP_NUM_THREADS".into(), threads.to_string().into()));
        }
        if let Some(kind) = &assignment.accelerator {
            let mine = visible(kind, &info.accelerators);
            environment.extend(mine.into_iter().map(|(name, value)| (name, value.into())));
        }
        let user = assignment.environment.iter();
        environment.extend(user.map(|(name, value)| (name.clone(), value.into())));
        let numbers = [
            ("RANK", rank),
            ("SIZE", size),
            ("LOCAL_RANK", info.local_rank),
            ("LOCAL_SIZE", info.local_size),
            ("CROSS_RANK", info.cross_rank),
            ("CROSS_SIZE", info.cross_size),
        ];
        for (name, value) in numbers {
            for prefix in ["DEUTERON", "HOROVOD"] {
                environment.push((format!("{prefix}_{name}"), value.to_string().into()));
            }
        }
        environment.push(("HOROVOD_HOSTNAME".into(), (&info.host).into()));
        environment.push(("DEUTERON_GENERATION".into(), assignment.generation.to_string().into()));
        environment.push(("DEUTERON_TASK".into(), socket.into()));
        let word = |bytes: &Vec<u8>| OsStr::from_bytes(bytes).to_owned();
        let directory = word(&assignment.directory);
        Self {
            words: assignment.command.iter().map(word).collect(),
            environment,
            directory: Some(directory).filter(|path| Path::new(path).is_dir()),
        }
    }

    /// Starts it. The future ends when the process does.
    pub fn start(self) -> Result<Started> {
        let [program, arguments @ ..] = &self.words[..] else {
            return Err(Error::Invalid("there is no command to run".into()));
        };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(self.environment)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        if let Some(directory) = self.directory {
            command.current_dir(directory);
        }
        let agent = getpid();
        let descriptors = DESCRIPTORS.get().copied();
        // SAFETY: a few system calls that are safe between fork and exec, and no memory is touched.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                if let Some(limit) = descriptors {
                    setrlimit(Resource::Nofile, limit)?;
                }
                // The agent may have died before the signal was asked for.
                if rustix::process::getppid() != Some(agent) {
                    return Err(std::io::ErrorKind::Interrupted.into());
                }
                Ok(())
            });
        }
        let mut child = command.spawn().map_err(|error| {
            Error::system(format!("{} cannot be run", program.to_string_lossy()), error)
        })?;
        let pid = child.id().and_then(|id| Pid::from_raw(id as i32));
        let pid = pid.ok_or_else(|| Error::Invalid("a process without a number".into()))?;
        let mut outputs: Vec<Output> = Vec::new();
        if let Some(pipe) = child.stdout.take() {
            outputs.push((Stream::Stdout, Box::new(pipe)));
        }
        if let Some(pipe) = child.stderr.take() {
            outputs.push((Stream::Stderr, Box::new(pipe)));
        }
        tell_warden(pid.as_raw_nonzero().get());
        let ending = async move {
            let ending = match child.wait().await {
                Ok(status) => match (status.code(), status.signal()) {
                    (Some(code), _) => Ending::Exited(code),
                    (None, signal) => Ending::Signalled(signal.unwrap_or_default()),
                },
                Err(error) => Ending::Lost(error.to_string()),
            };
            // Whatever it has started and left in its group.
            signal(pid, Signal::KILL);
            tell_warden(-pid.as_raw_nonzero().get());
            ending
        };
        Ok(Started { handle: Box::new(Process(pid)), outputs, ending: Box::pin(ending) })
    }
}

/// The leader of a process group. Dropping it kills the group.
struct Process(Pid);

fn signal(group: Pid, signal: Signal) {
    // A group that has ended needs no signal.
    let _ = kill_process_group(group, signal);
}

impl Handle for Process {
    fn terminate(&self) {
        signal(self.0, Signal::TERM);
        signal(self.0, Signal::CONT);
    }

    fn kill(&self) {
        signal(self.0, Signal::KILL);
    }

    fn pause(&self) {
        signal(self.0, Signal::STOP);
    }

    fn resume(&self) {
        signal(self.0, Signal::CONT);
    }

    fn is_stopped(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.as_raw_nonzero()));
        let state = stat.ok().and_then(|text| {
            text.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next())
        });
        matches!(state, Some('T' | 't'))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What this process could open before [`open_more`].
static DESCRIPTORS: OnceLock<Rlimit> = OnceLock::new();

/// Lets this process have as many descriptors as it may: a task takes three. Tasks keep the limit of before.
pub(crate) fn open_more() {
    let limit = *DESCRIPTORS.get_or_init(|| getrlimit(Resource::Nofile));
    // Where it is refused, a task that cannot be started says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// The way to the warden: a process that kills the groups of tasks when this one has died.
static WARDEN: OnceLock<OwnedFd> = OnceLock::new();

/// Starts the warden (AGENT-1). The kernel kills a task whose agent dies, but not what the task has started.
///
/// This process must have one thread only: the warden is a copy of it.
pub(crate) fn start_warden() -> Result<()> {
    let failed = |error: io::Error| Error::system("the warden of tasks cannot be started", error);
    let (orders, way) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
    // SAFETY: there is one thread, so nothing is locked or half done in the copy.
    match unsafe { libc::fork() } {
        -1 => Err(failed(io::Error::last_os_error())),
        0 => {
            drop(way);
            keep_watch(orders);
            // SAFETY: ends the copy at once, without what its original has to do at its end.
            unsafe { libc::_exit(0) }
        }
        _ => {
            let _ = WARDEN.set(way);
            Ok(())
        }
    }
}

/// Learns which groups there are (a number begins one, its negative ends it) until its agent is gone, and kills those left.
fn keep_watch(orders: OwnedFd) {
    // The agent's terminal and group are not its own, and the agent's streams must end with the agent.
    let _ = setsid();
    if let Ok(nothing) = fs::File::options().read(true).write(true).open("/dev/null") {
        let _ = dup2_stdin(&nothing);
        let _ = dup2_stdout(&nothing);
        let _ = dup2_stderr(&nothing);
    }
    let mut groups = BTreeSet::new();
    let mut orders = fs::File::from(orders);
    let mut order = [0; 4];
    while orders.read_exact(&mut order).is_ok() {
        match i32::from_ne_bytes(order) {
            group if group > 0 => groups.insert(group),
            group => groups.remove(&-group),
        };
    }
    for group in groups.into_iter().filter_map(Pid::from_raw) {
        signal(group, Signal::KILL);
    }
}

fn tell_warden(order: i32) {
    if let Some(way) = WARDEN.get() {
        // Without a warden the kernel still kills the task itself.
        let _ = rustix::io::write(way, &order.to_ne_bytes());
    }
}

/// Makes what tasks leave behind children of this process (AGENT-1).
pub(crate) fn adopt_orphans() -> Result<()> {
    set_child_subreaper(Some(getpid()))
        .map_err(|error| Error::system("orphans cannot be adopted", error))
}

/// Ends every child of this process, and theirs, which come to it as orphans.
pub(crate) fn end_orphans() {
    let deadline = Instant::now() + Duration::from_secs(2);
    while Instant::now() < deadline {
        let children = children();
        if children.is_empty() {
            return;
        }
        for child in children {
            let _ = rustix::process::kill_process(child, Signal::KILL);
        }
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn children() -> Vec<Pid> {
    let me = getpid().as_raw_nonzero().to_string();
    let is_mine = |stat: &str| {
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.split_whitespace().nth(1) == Some(&me))
    };
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| is_mine(&stat))
        })
        .filter_map(Pid::from_raw)
        .collect()
}
