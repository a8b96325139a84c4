//! Whether another process of this host still runs, and how it ended: a pidfd.
#![expect(unsafe_code, reason = "the ioctl that tells an exit status has no safe wrapper")]

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    ioctl::{self, Opcode, Updater},
    process::{Pid, PidfdFlags, pidfd_open},
};
use std::{fs, io};

/// A process that is watched.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    fd: OwnedFd,
}

/// `struct pidfd_info` of linux/pidfd.h, first version.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit_code: i32,
}

const PIDFD_GET_INFO: Opcode = ioctl::opcode::read_write::<PidfdInfo>(0xff, 11);
const PIDFD_INFO_EXIT: u64 = 1 << 3;

impl Process {
    pub fn watch(pid: Pid) -> io::Result<Self> {
        Ok(Self { pid, fd: pidfd_open(pid, PidfdFlags::empty())? })
    }

    /// How it ended, in words. Call once the descriptor is readable.
    pub fn ending(&self) -> String {
        match self.wait_status() {
            Some(status) if status & 0x7f == 0 => {
                format!("its process {} exited with status {}", self.pid, (status >> 8) & 0xff)
            }
            Some(status) => {
                format!("its process {} was killed by signal {}", self.pid, status & 0x7f)
            }
            None => format!("its process {} is gone", self.pid),
        }
    }

    /// The kernel tells a stranger the status after the parent has reaped the process (Linux 6.15), and
    /// procfs before.
    fn wait_status(&self) -> Option<i32> {
        let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
        // SAFETY: the opcode carries the size of the struct, and the kernel writes no more than that.
        let asked = unsafe { ioctl::ioctl(&self.fd, Updater::<PIDFD_GET_INFO, _>::new(&mut info)) };
        if asked.is_ok() && info.mask & PIDFD_INFO_EXIT != 0 {
            return Some(info.exit_code);
        }
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let dead = matches!(*fields.first()?, "Z" | "X");
        fields.last()?.parse().ok().filter(|_| dead)
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};
    use std::process::Command;

    fn ending_of(script: &str) -> String {
        let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let process = Process::watch(Pid::from_child(&child)).unwrap();
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
        let before = process.ending();
        child.wait().unwrap();
        assert!(before.contains("status") || before.contains("signal"), "{before}");
        before
    }

    #[test]
    fn an_ending_has_a_status_or_a_signal() {
        assert!(ending_of("exit 7").ends_with("exited with status 7"));
        assert!(ending_of("kill -9 $$").ends_with("was killed by signal 9"));
    }
}
