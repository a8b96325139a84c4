//! Agents over a real ssh server on the loopback.
#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use deuteron_chaos::{Case, Directory, Ended, Launch, Stamp, skip};
use rustix::process::{Signal, geteuid};
use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

const DEUTERON: &str = env!("CARGO_BIN_EXE_launcher");
const TASK: &str = env!("CARGO_BIN_EXE_task");
const SSHD: &str = "/usr/sbin/sshd";

/// A server with a host key of its own that lets one user key in.
struct Server {
    daemon: Launch,
    directory: Directory,
    port: u16,
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

fn make_key(path: &Path) {
    let mut command = Command::new("ssh-keygen");
    command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path);
    assert!(command.status().unwrap().success());
}

impl Server {
    /// Where there is no ssh server, says so and returns nothing, or fails with `CI=true`.
    fn new() -> Option<Self> {
        if !Path::new(SSHD).exists() {
            skip(&format!("there is no {SSHD}: install openssh-server"));
            return None;
        }
        if geteuid().is_root() {
            // What an init system makes.
            fs::create_dir_all("/run/sshd").unwrap();
        }
        let (directory, port) = (Directory::new(), free_port());
        let path = directory.path();
        for name in ["host", "user", "stranger"] {
            make_key(&path.join(name));
        }
        let host_key = fs::read_to_string(path.join("host.pub")).unwrap();
        fs::write(path.join("known"), format!("[127.0.0.1]:{port} {host_key}")).unwrap();
        let strange_key = fs::read_to_string(path.join("stranger.pub")).unwrap();
        fs::write(path.join("changed"), format!("[127.0.0.1]:{port} {strange_key}")).unwrap();
        fs::write(path.join("empty"), "").unwrap();
        let mut command = Command::new(SSHD);
        let stamp = Stamp::on(&mut command);
        // Its sessions carry the mark of the server.
        let text = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {0}/host\nAuthorizedKeysFile {0}/user.pub\nPidFile none\n\
             StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
             PermitRootLogin prohibit-password\nSetEnv {1}\n",
            path.display(),
            stamp.variable()
        );
        fs::write(path.join("config"), text).unwrap();
        command.args(["-D", "-e", "-f"]).arg(path.join("config"));
        let daemon = Launch::start_marked(command, stamp);
        daemon.line("LOG Server listening on 127.0.0.1");
        Some(Self { daemon, directory, port })
    }

    /// `deuteron run` on the server's host, which is known by the file `known`, with the key `user`.
    fn start(&self, (known, user, port): (&str, &str, u16), words: &[&str]) -> Launch {
        let path = |name: &str| self.directory.path().join(name).display().to_string();
        let mut command = Command::new(DEUTERON);
        command
            .args(["run", "--hosts", "127.0.0.1:2", "--ssh-port", &port.to_string()])
            .args(["--ssh-identity-file", &path(user)])
            .args(["--ssh-option", &format!("UserKnownHostsFile={}", path(known))])
            .args(["--ssh-option", "GlobalKnownHostsFile=/dev/null"])
            .args(["--ssh-option", "IdentitiesOnly=yes"])
            .args(words);
        Launch::start(command)
    }

    fn run(&self, words: &[&str]) -> Ended {
        let ended = self.start(("known", "user", self.port), words).end();
        self.is_idle();
        ended
    }

    /// Fails when something that was started through the server is still there.
    fn is_idle(&self) {
        let end = Instant::now() + Duration::from_secs(3);
        loop {
            let mut left = self.daemon.processes();
            left.retain(|process| process.pid != self.daemon.pid as i32);
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "left on the host: {left:#?}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn tasks_run_over_ssh() {
    let _case = Case::within(60);
    let Some(server) = Server::new() else { return };
    let ended = server.run(&[TASK, "meet"]);
    ended.expect(0, &["2 tasks on 1 host succeeded", "GATHERED 0 of 2, 1 of 2", "REDUCED"]);
    eprintln!("two tasks over ssh: {:?}", ended.took);
    server.run(&["sh", "-c", "exit 3"]).expect(3, &["exited with status 3"]);
    server.run(&["no-such-program"]).expect(126, &["could not be started", "no-such-program"]);
    // The words of the command arrive as they were typed, whatever a shell would make of them.
    let odd = "a  b'c\"d $HOME *";
    server.run(&["printf", "%s|", odd]).expect(0, &[&format!("[0] {odd}|")]);
}

#[test]
fn tasks_on_the_host_end_with_the_supervisor() {
    let _case = Case::within(60);
    let Some(server) = Server::new() else { return };
    for (signal, code) in [(Signal::INT, 130), (Signal::KILL, 137)] {
        let job = server.start(("known", "user", server.port), &[TASK, "wait"]);
        (0..2).for_each(|rank| drop(job.line(&format!("[{rank}] READY"))));
        assert!(server.daemon.processes().iter().any(|process| process.words[0] == TASK));
        job.signal(signal);
        job.end_within(Duration::from_secs(3)).expect(code, &[]);
        server.is_idle();
    }
    // Somebody ends the connection instead.
    let job = server.start(("known", "user", server.port), &[TASK, "wait"]);
    (0..2).for_each(|rank| drop(job.line(&format!("[{rank}] READY"))));
    let all = job.processes();
    let ssh = all.iter().find(|process| process.words[0] == "ssh").unwrap();
    let event = Instant::now();
    ssh.signal(Signal::KILL);
    let error = job.error();
    assert!(error.contains("rank 0 on "), "{error}");
    assert!(event.elapsed() < Duration::from_secs(2), "it took {:?}", event.elapsed());
    job.end().expect(1, &[]);
    server.is_idle();
}

#[test]
fn a_host_that_cannot_be_reached_is_named_with_the_reason() {
    let _case = Case::within(60);
    let Some(server) = Server::new() else { return };
    let port = server.port;
    for (how, said) in [
        (("empty", "user", port), "Host key verification failed"),
        (("changed", "user", port), "Host key verification failed"),
        (("known", "stranger", port), "Permission denied"),
        (("known", "user", free_port()), "Connection refused"),
    ] {
        let ended = server.start(how, &["true"]).end();
        ended.expect(75, &["did not assemble", "127.0.0.1", said]);
        assert!(ended.took < Duration::from_secs(10), "{how:?} took {:?}", ended.took);
    }
    let ended = server
        .start(("known", "user", port), &["--agent", "/nowhere/deuteron agent", "true"])
        .end();
    ended.expect(75, &["did not assemble", "/nowhere/deuteron"]);
    server.is_idle();
}
