//! A job as its user describes it, and what the user gets to see of it.

use crate::{Accelerator, Error, Request, Result, discovery::Source, policy::Restarts};
use rustix::system::uname;
use serde::{Deserialize, Serialize};
use std::{ffi::OsString, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

/// What to run, where, and what to do when it fails.
#[derive(Clone, Debug)]
pub struct Job {
    /// How many tasks.
    pub tasks: usize,
    /// Program and arguments of every task.
    pub command: Vec<OsString>,
    /// Added to every task's environment, over what is inherited.
    pub environment: Vec<(String, String)>,
    /// What every task can ask for with [`crate::Task::payload`]; any number of bytes.
    pub payload: Arc<[u8]>,
    /// Where tasks may run, in the order that ranks follow.
    pub hosts: Vec<Host>,
    /// Accelerators for each task.
    pub request: Option<Request>,
    /// How each host finds its accelerators.
    pub discovery: Vec<Source>,
    /// The number of the first attempt: not zero if an earlier job was one of the same gang.
    pub first_generation: u64,
    /// When to start the gang again.
    pub restarts: Restarts,
    /// How long the gang may take to assemble.
    pub start_limit: Duration,
    /// How long a task has between being told to end and being killed.
    pub grace: Duration,
    /// Address or interface at which other hosts reach this one, instead of the one that the route to them says.
    pub interface: Option<String>,
    /// How agents on other hosts are started.
    pub ssh: Ssh,
    /// Program and arguments that start an agent, here and on other hosts.
    pub agent: Vec<OsString>,
}

impl Job {
    /// A job on this machine, whose agent is the `deuteron` command.
    pub fn local<W: Into<OsString>>(tasks: usize, command: impl IntoIterator<Item = W>) -> Self {
        Self {
            tasks,
            command: command.into_iter().map(Into::into).collect(),
            environment: Vec::new(),
            payload: Arc::default(),
            hosts: vec![Host::here(tasks as u32)],
            request: None,
            discovery: vec![Source::Nvml],
            first_generation: 0,
            restarts: Restarts::default(),
            start_limit: Duration::from_secs(60),
            grace: Duration::from_secs(5),
            interface: None,
            ssh: Ssh::default(),
            agent: vec!["deuteron".into(), "agent".into()],
        }
    }

    /// A job whose agents come by themselves, one for each task, from wherever they are.
    pub fn invited<W: Into<OsString>>(tasks: usize, command: impl IntoIterator<Item = W>) -> Self {
        let hosts = (0..tasks).map(|task| Host { name: format!("task {task}"), slots: 1 });
        Self { hosts: hosts.collect(), ..Self::local(tasks, command) }
    }

    /// What can be known to be wrong before anything starts.
    pub(crate) fn check(&self) -> Result<()> {
        let slots: u64 = self.hosts.iter().map(|host| u64::from(host.slots)).sum();
        let wrong = if self.tasks == 0 {
            "a job needs at least one task".to_owned()
        } else if self.command.is_empty() {
            "there is no command to run".to_owned()
        } else if self.agent.is_empty() {
            "there is no command that starts an agent".to_owned()
        } else if slots < self.tasks as u64 {
            format!(
                "{} tasks do not fit in {slots} slots: name more hosts, or fewer tasks",
                self.tasks
            )
        } else {
            return Ok(());
        };
        Err(Error::Invalid(wrong))
    }
}

/// A host and how many tasks it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Its name; `localhost`, and this machine's own name, are this machine.
    pub name: String,
    /// Most tasks on it.
    pub slots: u32,
}

impl Host {
    /// This machine.
    pub fn here(slots: u32) -> Self {
        Self { name: "localhost".into(), slots }
    }

    /// Whether it is this machine, so that its agent needs no ssh.
    pub fn is_here(&self) -> bool {
        self.name == "localhost" || self.name.as_bytes() == uname().nodename().to_bytes()
    }
}

/// How ssh is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ssh {
    /// The program.
    pub program: OsString,
    /// Its `-p`.
    pub port: Option<u16>,
    /// Its `-i`.
    pub identity: Option<PathBuf>,
    /// More arguments.
    pub options: Vec<OsString>,
}

impl Default for Ssh {
    fn default() -> Self {
        Self { program: "ssh".into(), port: None, identity: None, options: Vec::new() }
    }
}

/// One of a task's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// What every task of a gang may know about each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskInfo {
    /// Number among all.
    pub rank: usize,
    /// Number among those on its host.
    pub local_rank: usize,
    /// How many are on its host.
    pub local_size: usize,
    /// Number of its host among those that have a task with its local rank.
    pub cross_rank: usize,
    /// How many hosts have a task with its local rank.
    pub cross_size: usize,
    /// Its host's name.
    pub host: String,
    /// Where other hosts reach it.
    pub address: IpAddr,
    /// Which are its own.
    pub accelerators: Vec<Accelerator>,
}

/// What happens to a job, as it happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// Agents are joining.
    Assembling {
        /// Hosts that are there.
        joined: Vec<String>,
        /// Hosts that are not.
        missing: Vec<String>,
    },
    /// Something the user should know.
    Note(String),
    /// All tasks of a generation have been started.
    Started {
        /// Attempt number, from zero.
        generation: u64,
        /// By rank.
        tasks: Vec<TaskInfo>,
    },
    /// Whole lines of one task.
    Output {
        /// Whose.
        rank: usize,
        /// Which.
        stream: Stream,
        /// Each ends with a newline.
        lines: Vec<u8>,
    },
    /// The gang failed and will start again.
    Restarting {
        /// The attempt that comes.
        generation: u64,
        /// How long it waits.
        after: Duration,
        /// What failed, and why it is tried again.
        reason: String,
    },
}

/// How a job that ended well went.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The attempt that succeeded, from zero.
    pub generation: u64,
    /// What each rank returned, if it returned anything.
    pub results: Vec<Option<Vec<u8>>>,
    /// From the start of the tasks to the end of the last.
    pub ran_for: Duration,
}
