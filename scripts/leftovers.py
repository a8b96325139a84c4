#!/usr/bin/env python3
"""Runs a command and fails when it leaves processes, shared memory or network namespaces behind.

Usage: leftovers.py SECONDS COMMAND...

1. The command has SECONDS to end. Then it and all its descendants are asked to end, and killed 10 seconds later.
2. A process that outlives the command is left over, whatever its name, group, session or environment: this script is
   the reaper of all orphans below it, so every one of them becomes its child.
3. A file in /dev/shm, a network namespace `dt-*` or an interface `dt*` that was not there before is left over, unless
   a process of somebody else holds the file. Do not run two suites with namespaces at the same time.
4. What is left over has 5 seconds to disappear. Then it is listed, and processes are ended.

Descriptors are not seen from outside: the Rust tests count their own.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
KILL_AFTER = 10
GRACE = 5
# Daemons that a compiler wrapper of the user starts to stay.
NOT_OURS = {"sccache"}


def parents() -> dict[int, int]:
    """The parent of every living process; a zombie is not living."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything, so the fields are counted from the last one.
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            found[int(stat.parent.name)] = int(parent)
    return found


def descendants() -> dict[int, str]:
    """The command line of every living process below this one."""
    tree = parents()
    below: set[int] = {os.getpid()}
    while more := {pid for pid, parent in tree.items() if parent in below} - below:
        below |= more
    below.discard(os.getpid())
    lines = {}
    for pid in sorted(below):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if name not in NOT_OURS:
            lines[pid] = arguments.strip() or name
    return lines


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap() -> None:
    """Forgets all children that ended meanwhile."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all() -> None:
    """Ends every descendant, politely first; also those that they start meanwhile."""
    start = time.monotonic()
    send(descendants(), signal.SIGTERM)
    while (below := descendants()) and time.monotonic() < start + 2 * KILL_AFTER:
        if time.monotonic() > start + KILL_AFTER:
            send(below, signal.SIGKILL)
        time.sleep(0.05)
        reap()
    reap()


def ip(*arguments: str) -> list[str]:
    try:
        answer = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        return []
    return answer.stdout.splitlines()


def held_by_others(path: str, ours: set[int]) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in ours:
            continue
        try:
            if path in (process / "maps").read_text(errors="replace"):
                return True
            if any(os.readlink(link) == path for link in (process / "fd").iterdir()):
                return True
        except OSError:
            continue
    return False


def traces() -> set[tuple[str, str]]:
    """What outlives processes: pairs of kind and name."""
    memory = {("shared memory", str(path)) for path in Path("/dev/shm").rglob("*") if not path.is_dir()}
    names = [line.split()[0] for line in ip("netns", "list") if line.strip()]
    namespaces = {("network namespace", name) for name in names if name.startswith("dt-")}
    links = [line.split()[1].rstrip(":").split("@")[0] for line in ip("-o", "link") if line.strip()]
    return memory | namespaces | {("network interface", name) for name in links if name.startswith("dt")}


def left_over(before: set[tuple[str, str]]) -> list[str]:
    processes = descendants()
    found = [f"process {pid}: {line}" for pid, line in processes.items()]
    for kind, name in sorted(traces() - before):
        if kind != "shared memory" or not held_by_others(name, {os.getpid(), *processes}):
            found.append(f"{kind} {name}")
    return found


def run(command: list[str], seconds: float) -> int:
    """The exit status of the command, as a shell would give it; 124 when it had to be ended."""

    def expire(*_: object) -> None:
        raise TimeoutError

    # Waiting blocks, with a timer: polling would disturb what a benchmark measures.
    signal.signal(signal.SIGALRM, expire)
    # What a shell starts in the background ignores SIGINT, which tests send.
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        while child.returncode is None:
            pid, status = os.waitpid(-1, 0)
            if pid == child.pid:
                child.returncode = os.waitstatus_to_exitcode(status)
    except TimeoutError:
        print(f"leftovers: still running after {seconds:g} s, so all of this is ended:", flush=True)
        for pid, line in descendants().items():
            print(f"  process {pid}: {line}", flush=True)
        end_all()
        return 124
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if child.returncode < 0:
        print(f"leftovers: {command[0]} died by {signal.Signals(-child.returncode).name}", flush=True)
        return 128 - child.returncode
    return child.returncode


def main() -> int:
    seconds, command = float(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGHUP, lambda number, _: sys.exit(128 + number))
    before = traces()
    try:
        status = run(command, seconds)
        patience = time.monotonic() + GRACE
        while (found := left_over(before)) and time.monotonic() < patience:
            reap()
            time.sleep(0.1)
    except KeyboardInterrupt:
        return 130
    finally:
        end_all()
    if found:
        print(f"leftovers: {' '.join(command)} left behind:", *found, sep="\n  ", flush=True)
    return status or bool(found)


if __name__ == "__main__":
    sys.exit(main())
