"""Inside a task: who it is, who the others are, and how they meet."""

from __future__ import annotations

import os
import threading
from typing import AnyStr

from deuteron import _core
from deuteron.errors import InvalidError, MismatchError

_lock = threading.Lock()
_task: tuple[int, _core.Task] | None = None

#: What kind of message it is goes before it, so that a rank that sent another kind is named.
_KINDS: dict[type, bytes] = {bytes: b"b", str: b"s"}


def task() -> _core.Task:
    """The task that this process is, or a gang of one if nobody has started it as a task."""
    global _task
    with _lock:
        if _task is None or _task[0] != os.getpid():
            started = "DEUTERON_TASK" in os.environ
            _task = (os.getpid(), _core.Task.from_environment() if started else _core.Task.alone())
        return _task[1]


def forget() -> None:
    """Leaves the gang, if nobody else holds the task."""
    global _task
    _task = None


class Context:
    """One member of a gang, seen from inside; the same words as those of Spark's ``BarrierTaskContext``."""

    def __init__(self, task: _core.Task) -> None:
        self._task = task
        self._own = task.infos[task.rank]

    @property
    def rank(self) -> int:
        """This task's number among all, from zero."""
        return self._task.rank

    @property
    def size(self) -> int:
        """How many tasks there are."""
        return self._task.size

    @property
    def local_rank(self) -> int:
        """Its number among those on its host."""
        return self._own.local_rank

    @property
    def local_size(self) -> int:
        """How many are on its host."""
        return self._own.local_size

    @property
    def cross_rank(self) -> int:
        """The number of its host among those that have a task with its local rank."""
        return self._own.cross_rank

    @property
    def cross_size(self) -> int:
        """How many hosts have a task with its local rank."""
        return self._own.cross_size

    @property
    def host(self) -> str:
        """The name of its host."""
        return self._own.host

    @property
    def generation(self) -> int:
        """Attempt number of the gang, from zero: how often it has been started again."""
        return self._task.generation

    def barrier(self, timeout: float | None = None) -> None:
        """Waits until every task has come here: as long as all are alive, or at most ``timeout`` seconds.

        A task that has given up waiting counts as having come.
        """
        self._task.barrier(timeout)

    def all_gather(self, message: AnyStr, timeout: float | None = None) -> list[AnyStr]:
        """Gives a small message to all tasks and returns everybody's, in rank order.

        For tensors there are collective operations; a message is at most some kilobytes.
        """
        kind = type(message) if type(message) in _KINDS else None
        if kind is None:
            raise InvalidError(f"a message is a str or bytes, not {type(message).__name__}")
        data = message.encode("utf-8", "surrogatepass") if isinstance(message, str) else message
        gathered = self._task.all_gather(_KINDS[kind] + data, timeout)
        for rank, other in enumerate(gathered):
            if other[:1] != _KINDS[kind]:
                own = f"rank {self.rank} gave {kind.__name__}"
                raise MismatchError(f"all_gather: {own}, and rank {rank} did not: all give the same kind")
        if isinstance(message, str):
            return [other[1:].decode("utf-8", "surrogatepass") for other in gathered]
        return [other[1:] for other in gathered]

    def task_infos(self) -> list[_core.TaskInfo]:
        """Every task's rank, host, address and accelerators, by rank."""
        return self._task.infos

    def accelerators(self) -> list[_core.Accelerator]:
        """The accelerators that are this task's own."""
        return self._own.accelerators

    def __repr__(self) -> str:
        return f"Context(rank {self.rank} of {self.size} on {self.host}, generation {self.generation})"


def context() -> Context:
    """The task that this process is; outside of any gang, a gang of one."""
    return Context(task())
