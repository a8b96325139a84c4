//! Whether another process of this host still runs, and how it ended: a pidfd.
#![expect(unsafe_code, reason = "the ioctl that tells an exit status has no safe wrapper")]

use rustix::{
    fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ioctl::{self, Opcode, Updater},
    process::{Pid, PidfdFlags, pidfd_open},
};
use std::{fmt, fs, io, mem::MaybeUninit, os::unix::net::UnixStream, time::Duration};

/// Who is at the other end of a Unix socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub user: u32,
    /// `None` if it lives in a pid namespace that this process cannot see.
    pub pid: Option<Pid>,
}

impl Peer {
    pub fn of(socket: &UnixStream) -> io::Result<Self> {
        let libc::ucred { uid, pid, .. } = option(socket, libc::SO_PEERCRED)?;
        Ok(Self { user: uid, pid: Pid::from_raw(pid) })
    }
}

/// Reads a socket option that is plain old data.
fn option<T: Copy>(socket: &UnixStream, name: libc::c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, and the caller asks for an option of this type, for which
    // zeros are valid too.
    unsafe {
        let result = libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            value.as_mut_ptr().cast(),
            &raw mut length,
        );
        if result == 0 { Ok(value.assume_init()) } else { Err(io::Error::last_os_error()) }
    }
}

/// A process that is watched.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Option<Pid>,
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
    /// The process at the other end of a socket. The kernel hands out its descriptor since Linux 6.5; before,
    /// its number has to do.
    pub fn behind(socket: &UnixStream) -> io::Result<Self> {
        let pid = Peer::of(socket)?.pid;
        let fd = match (option::<RawFd>(socket, libc::SO_PEERPIDFD), pid) {
            // SAFETY: the kernel has just made this descriptor for us.
            (Ok(fd), _) => unsafe { OwnedFd::from_raw_fd(fd) },
            (Err(_), Some(pid)) => pidfd_open(pid, PidfdFlags::empty())?,
            (Err(error), None) => return Err(error),
        };
        Ok(Self { pid, fd })
    }

    /// How it ended, in words. Call once the descriptor is readable.
    pub fn ending(&self) -> String {
        match self.wait_status() {
            Some(status) if status & 0x7f == 0 => {
                format!("its process{self} exited with status {}", (status >> 8) & 0xff)
            }
            Some(status) => format!("its process{self} was killed by signal {}", status & 0x7f),
            None => format!("its process{self} is gone"),
        }
    }

    /// Procfs tells the status until the parent has reaped the process, the kernel afterwards (Linux 6.15). Where
    /// procfs does not show the process, a moment passes until it is reaped.
    fn wait_status(&self) -> Option<i32> {
        for _ in 0..20 {
            if let Some(status) = self.status_of_zombie().or_else(|| self.status_of_reaped()) {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    fn status_of_reaped(&self) -> Option<i32> {
        let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
        // SAFETY: the opcode carries the size of the struct, and the kernel writes no more than that.
        let asked = unsafe { ioctl::ioctl(&self.fd, Updater::<PIDFD_GET_INFO, _>::new(&mut info)) };
        (asked.is_ok() && info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code)
    }

    fn status_of_zombie(&self) -> Option<i32> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid?)).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let dead = matches!(*fields.first()?, "Z" | "X");
        fields.last()?.parse().ok().filter(|_| dead)
    }
}

/// Its number, where it has one here.
impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pid.map_or(Ok(()), |pid| write!(f, " {pid}"))
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
        let pid = Pid::from_child(&child);
        let process = Process { pid: Some(pid), fd: pidfd_open(pid, PidfdFlags::empty()).unwrap() };
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
        let before = process.ending();
        child.wait().unwrap();
        if let Some(after) = process.status_of_reaped() {
            assert_eq!(Some(after), child_status(&before));
        }
        before
    }

    fn child_status(ending: &str) -> Option<i32> {
        let (words, number) = ending.rsplit_once(' ')?;
        let number: i32 = number.parse().ok()?;
        Some(if words.ends_with("status") { number << 8 } else { number })
    }

    #[test]
    fn the_other_end_of_a_socket_is_known() {
        let (one, _other) = UnixStream::pair().unwrap();
        let me = rustix::process::getpid();
        assert_eq!(Peer::of(&one).unwrap().pid, Some(me));
        assert_eq!(Process::behind(&one).unwrap().pid, Some(me));
    }

    #[test]
    fn an_ending_has_a_status_or_a_signal() {
        assert!(ending_of("exit 7").ends_with("exited with status 7"));
        assert!(ending_of("kill -9 $$").ends_with("was killed by signal 9"));
    }
}
