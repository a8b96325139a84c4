//! A pseudo-terminal with an interactive shell on it, and somebody who types.

use crate::{Said, Stamp, locked};
use rustix::{
    fs::{Mode, OFlags},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
};
use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::{Arc, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// An interactive bash; it and all that it started are ended when this is dropped.
pub struct Terminal {
    stamp: Stamp,
    keyboard: File,
    shell: Child,
    said: Arc<Said>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    /// Opens one.
    #[expect(clippy::new_without_default, reason = "it starts a shell")]
    pub fn new() -> Self {
        let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&main).unwrap();
        unlockpt(&main).unwrap();
        let name = ptsname(&main, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let side = File::from(rustix::fs::open(name, flags, Mode::empty()).unwrap());
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", "--wait", "bash", "--norc", "--noprofile", "--noediting", "-i"])
            .env("PS1", "$ ")
            .env("TERM", "dumb")
            .stdin(Stdio::from(side.try_clone().unwrap()))
            .stdout(Stdio::from(side.try_clone().unwrap()))
            .stderr(Stdio::from(side));
        let stamp = Stamp::on(&mut command);
        let shell = command.spawn().unwrap();
        // The command holds the other side open, which would hide its end.
        drop(command);
        let keyboard = File::from(main);
        let mut screen = keyboard.try_clone().unwrap();
        let said = Arc::new(Said::default());
        let shown = Arc::clone(&said);
        let reader = thread::spawn(move || {
            let (mut bytes, mut held) = ([0; 4096], Vec::new());
            while let Ok(read @ 1..) = screen.read(&mut bytes) {
                held.extend_from_slice(&bytes[..read]);
                // One text, in one line: a prompt has no end of line.
                *locked(&shown.lines) = vec![String::from_utf8_lossy(&held).into_owned()];
                shown.more.notify_all();
            }
        });
        let terminal = Self { stamp, keyboard, shell, said, reader: Some(reader) };
        terminal.wait_for("$ ", 1);
        terminal
    }

    /// Types; `\u{3}` is Ctrl-C, `\u{1a}` is Ctrl-Z.
    pub fn keys(&self, keys: &str) {
        (&self.keyboard).write_all(keys.as_bytes()).unwrap();
    }

    /// All that the terminal has shown.
    pub fn text(&self) -> String {
        locked(&self.said.lines).concat()
    }

    /// Waits until `text` has been shown so many times; fails after 20 s.
    pub fn wait_for(&self, text: &str, times: usize) {
        let end = Instant::now() + Duration::from_secs(20);
        let mut lines = locked(&self.said.lines);
        while lines.concat().matches(text).count() < times {
            assert!(Instant::now() < end, "{text:?} was not shown:\n{}", lines.concat());
            let nap = Duration::from_millis(50);
            lines =
                self.said.more.wait_timeout(lines, nap).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What runs in it.
    pub fn stamp(&self) -> &Stamp {
        &self.stamp
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        crate::launch::end_marked(self.stamp.variable());
        let _ = self.shell.wait();
        self.reader.take().map(JoinHandle::join);
    }
}
