//! Starting an agent: a process on this machine, ssh to another one, or somebody else who starts it.
//!
//! The invitation goes through standard input, which then stays open: its end tells the agent that the supervisor is gone.

use crate::{Error, Host, Job, Result, net::Bound, protocol::Invitation};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    ffi::OsString,
    os::unix::ffi::OsStrExt,
    os::unix::process::ExitStatusExt,
    pin::Pin,
    process::{ExitStatus, Stdio},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::Command,
    sync::watch,
};

/// Hears every line that a launched process complains with, and in the end how it ended.
pub(crate) type Tell =
    Box<dyn Fn(Result<String, String>) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send>;

/// A process that is, or leads to, an agent. Dropping it ends the process.
pub(crate) struct Launched {
    pid: Option<Pid>,
    ended: watch::Receiver<bool>,
    _task: Bound,
}

impl Launched {
    /// Starts it.
    pub fn start(job: &Job, host: &Host, invitation: &Invitation, tell: Tell) -> Result<Self> {
        let mut words = command(job, host);
        let program = words.remove(0);
        let line = written(invitation)?.into_bytes();
        let mut child = Command::new(&program)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // What the terminal sends (Ctrl-C, Ctrl-Z) is for the supervisor, which tells the agents.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| {
                let program = program.to_string_lossy();
                Error::NotAssembled(format!(
                    "{program}, which starts the agent on {}, does not: {error}",
                    host.name
                ))
            })?;
        let pid = child.id().and_then(|id| Pid::from_raw(id as i32));
        let (done, ended) = watch::channel(false);
        let task = Bound::spawn(async move {
            let mut stdin = child.stdin.take();
            if let Some(stdin) = &mut stdin {
                // If it has ended already, its status says why.
                let _ = stdin.write_all(&line).await;
                let _ = stdin.flush().await;
            }
            if let Some(stderr) = child.stderr.take() {
                let mut lines = BufReader::new(stderr).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    tell(Ok(line)).await;
                }
            }
            let status = child.wait().await;
            drop(stdin);
            let _ = done.send(true);
            let how = status.map_or_else(|error| error.to_string(), describe);
            tell(Err(how)).await;
        });
        Ok(Self { pid, ended, _task: task })
    }

    /// What stands for a process that somebody else has started.
    pub fn elsewhere() -> Self {
        Self { pid: None, ended: watch::channel(true).1, _task: Bound::spawn(async {}) }
    }

    /// Waits until the process has ended.
    pub async fn ended(&mut self) {
        let _ = self.ended.wait_for(|ended| *ended).await;
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        if let Some(pid) = self.pid.filter(|_| !*self.ended.borrow()) {
            // It may be stopped; the end of its standard input would not wake it.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// An invitation as an agent reads it from its standard input.
pub(crate) fn written(invitation: &Invitation) -> Result<String> {
    let line = serde_json::to_string(invitation);
    let bad = |error| Error::Invalid(format!("an invitation cannot be written: {error}"));
    line.map(|line| line + "\n").map_err(bad)
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// The words that start the agent of a host.
fn command(job: &Job, host: &Host) -> Vec<OsString> {
    if host.is_here() {
        return job.agent.clone();
    }
    let mut words = vec![job.ssh.program.clone()];
    // Nobody is there to answer a question, and an unknown host key is one. A connection that hangs is given up.
    for option in ["BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=10"] {
        words.extend(["-o".into(), option.into()]);
    }
    if let Some(port) = job.ssh.port {
        words.extend(["-p".into(), port.to_string().into()]);
    }
    if let Some(identity) = &job.ssh.identity {
        words.extend(["-i".into(), identity.into()]);
    }
    words.extend(job.ssh.options.iter().cloned());
    words.extend(["-T".into(), "--".into(), host.name.clone().into()]);
    let quoted: Vec<Vec<u8>> = job.agent.iter().map(|word| quote(word.as_bytes())).collect();
    words.push(std::os::unix::ffi::OsStringExt::from_vec(quoted.join(&b' ')));
    words
}

/// For the shell at the other end of ssh.
fn quote(word: &[u8]) -> Vec<u8> {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-./=:@%+,".contains(byte);
    if !word.is_empty() && word.iter().all(plain) {
        return word.to_vec();
    }
    let mut quoted = vec![b'\''];
    for &byte in word {
        if byte == b'\'' {
            quoted.extend(b"'\\''");
        } else {
            quoted.push(byte);
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ssh_asks_nothing_and_the_shell_changes_nothing() {
        let mut job = Job::local(1, ["true"]);
        job.agent = vec!["/opt/my tools/deuteron".into(), "it's".into(), "agent".into()];
        job.ssh.port = Some(2222);
        job.ssh.identity = Some("/keys/id".into());
        let words = command(&job, &Host { name: "h1".into(), slots: 1 });
        let text: Vec<String> =
            words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(
            text.join(" "),
            "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=10 -p 2222 -i /keys/id -T -- h1 \
             '/opt/my tools/deuteron' 'it'\\''s' agent"
        );
        assert_eq!(command(&job, &Host::here(1)), job.agent);
    }
}
