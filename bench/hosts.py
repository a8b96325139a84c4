"""Children that never outlive us, and two hosts made of network namespaces."""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "dt-bench-"
DEVICE = "veth0"
# For everybody the same on every machine. BBR, the default on some, paces by round trips, and a cable without length
# has none: all contestants are half as fast with it.
CONGESTION = "net.ipv4.tcp_congestion_control=reno"
ADDRESSES = ("10.213.57.1", "10.213.57.2")

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Failed(Exception):
    """A contestant could not run or gave a wrong result."""


@dataclass(frozen=True)
class Command:
    """One process to start."""

    argv: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()

    def prepare(self) -> None:
        """In the new process: die with the parent."""
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes grandchildren our children when their parent dies, so that `kill_children` finds all of them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> list[int]:
    """Every process below this one."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [os.getpid()]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_children() -> None:
    """Ends every process below this one: politely, so that mpirun cleans up, then for good."""
    deadline = time.monotonic() + 3
    while children := _children():
        final = time.monotonic() > deadline
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if final else signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def run_together(commands: Sequence[Command], limit: float) -> None:
    """Runs all commands at once and waits for them; the first failure, or the limit, ends all.

    Sleeps until a process ends: a parent that polls would take time from the ranks it measures.
    """
    deadline = time.monotonic() + limit
    processes = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command.argv,
                    env=os.environ | command.environment,
                    pass_fds=command.descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    preexec_fn=command.prepare,
                )
            )
        # What a process says goes with the error; it ends when the last holder of its stderr does.
        said = {process: b"" for process in processes}
        open_pipes = {process.stderr.fileno(): process for process in processes if process.stderr}
        while open_pipes:
            left = deadline - time.monotonic()
            ready = select.select(list(open_pipes), [], [], max(left, 0))[0]
            if not ready:
                raise Failed(f"not done after {limit:.0f} s: {_brief(commands[0].argv)}")
            for pipe in ready:
                process = open_pipes[pipe]
                text = os.read(pipe, 65536)
                said[process] += text
                if not text:
                    del open_pipes[pipe]
                    if process.wait(timeout=5):
                        words = said[process].decode(errors="replace").strip()
                        raise Failed(f"{_brief(process.args)} ended with {process.returncode}: {words}")
    except BaseException:
        kill_children()
        raise
    finally:
        for process in processes:
            if process.stderr:
                process.stderr.close()


def _brief(argv: object) -> str:
    """A command for an error message, without its long list of blocks."""
    words = [str(word) for word in argv] if isinstance(argv, (list, tuple)) else [str(argv)]
    return " ".join(words[:12])


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces with a cable between them."""

    names: tuple[str, str]
    agent: Path

    def inside(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on one of the hosts, under a host name of its own."""
        rename = f'hostname {self.names[host]} && exec "$@"'
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", rename, "sh", *argv]


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def remove_leftovers() -> None:
    """Removes the namespaces and folders of runs that were killed before they could."""

    def abandoned(folder: Path) -> Iterator[Path]:
        for path in folder.glob(f"{PREFIX}*"):
            if not Path("/proc", path.name.removeprefix(PREFIX).partition("-")[0]).exists():
                yield path

    _remove([path.name for path in abandoned(Path("/run/netns"))])
    for path in abandoned(Path(tempfile.gettempdir())):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary folder that tells whose it is."""
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def two_hosts(folder: Path, rate: str | None = None) -> Iterator[Hosts]:
    """Makes the two hosts, with the cable's rate limited on both ends if asked, and always removes them."""
    names = (f"{PREFIX}{os.getpid()}-a", f"{PREFIX}{os.getpid()}-b")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", DEVICE, "up")
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", CONGESTION], check=True)
            if rate:
                shaper = f"tc qdisc add dev {DEVICE} root tbf rate {rate} burst 256kb latency 50ms"
                subprocess.run(["ip", "netns", "exec", name, *shaper.split()], check=True)
        # mpirun starts its daemon on the second host through this, in the place of ssh.
        agent = folder / "agent"
        agent.write_text(
            f'#!/bin/sh\nshift\nexec ip netns exec {names[1]} unshare --uts sh -c "hostname {names[1]} && $*"\n'
        )
        agent.chmod(0o700)
        yield Hosts(names, agent)
    finally:
        kill_children()
        _remove(names)


def on_signals(handler: Callable[[int, object], None]) -> None:
    """Calls the handler when someone wants us to end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)
