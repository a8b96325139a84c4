"""Inside a task: who it is, who the others are, and how they meet."""

from __future__ import annotations

import os
import threading

from deuteron import _core

_lock = threading.Lock()
_task: tuple[int, _core.Task] | None = None


def task() -> _core.Task:
    """The task that this process is, or a gang of one if nobody has started it as a task."""
    global _task
    with _lock:
        if _task is None or _task[0] != os.getpid():
            started = "DEUTERON_TASK" in os.environ
            _task = (os.getpid(), _core.Task.from_environment() if started else _core.Task.alone())
        return _task[1]
