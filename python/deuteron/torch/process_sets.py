"""Process sets: some of the ranks, which have operations of their own.

Each set has its own engine, so no set's operation waits behind another's.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence

from deuteron import _core
from deuteron.errors import Error, InvalidError, NotInitializedError


class ProcessSet:
    """Ranks that communicate.

    It can be used once all ranks have passed it to ``init`` or ``add_process_set``.

    >>> ProcessSet([3, 1])
    ProcessSet(process_set_id=None, ranks=[1, 3])
    """

    #: Number of the set, the same on all ranks, while it is in use.
    process_set_id: int | None
    #: Its members in order.
    ranks: list[int]

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self.process_set_id = None
        self._engine: _core.Engine | None = None
        try:
            self.ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise InvalidError(
                f"a process set is made from a list of ranks, not from {ranks_or_comm!r}; MPI communicators mean "
                "nothing here"
            ) from None
        if len(set(self.ranks)) != len(self.ranks):
            raise InvalidError(f"a rank can be in a process set once: {self.ranks}")
        if self.ranks and self.ranks[0] < 0:
            raise InvalidError(f"there is no rank {self.ranks[0]}")

    def engine(self) -> _core.Engine:
        """What carries out the set's operations."""
        engine = self._engine
        if engine is None:
            raise self._unusable()
        return engine

    def size(self) -> int:
        """How many ranks it has."""
        self._require()
        return len(self.ranks)

    def rank(self) -> int:
        """Number of this process within the set."""
        self._require()
        if not self.included():
            raise self._not_member()
        return self.ranks.index(_world.rank)

    def included(self) -> bool:
        """Whether this process is a member."""
        self._require()
        return _world.rank in self.ranks

    def index(self, rank: int) -> int:
        """Number within the set of a rank among all."""
        try:
            return self.ranks.index(rank)
        except ValueError:
            raise InvalidError(f"rank {rank} is not in {self}") from None

    def _require(self) -> None:
        if not _world.initialized or self.process_set_id is None:
            raise self._unusable()

    def _unusable(self) -> Error:
        if not _world.initialized:
            return not_initialized()
        if self.process_set_id is None:
            return InvalidError(
                f"{self} is not in use: all ranks pass it to init() or add_process_set() first, and it ends with "
                "remove_process_set()"
            )
        if _world.forked:
            return InvalidError(forked())
        return self._not_member()

    def _not_member(self) -> InvalidError:
        return InvalidError(f"rank {_world.rank} is not in {self}: only its members take part in its operations")

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _World:
    """What this process is part of."""

    def __init__(self) -> None:
        self.initialized = False
        #: This process is a fork of the one that was initialized: it knows who it is, and can do no more.
        self.forked = False
        self.rank = 0
        self.task: _core.Task | None = None
        self.sets: dict[int, ProcessSet] = {}
        self.next = 0
        #: Engines that only the parent may end.
        self.parents: list[_core.Engine] = []


_world = _World()
_hooked = False

#: All ranks.
global_process_set = ProcessSet(())
global_process_set.process_set_id = 0


def not_initialized() -> NotInitializedError:
    """What a call before ``init()`` raises."""
    return NotInitializedError("deuteron.torch has not been initialized; use hvd.init() first.")


def forked() -> str:
    """What a fork of a rank is told."""
    return (
        f"process {os.getpid()} is a fork of rank {_world.rank}, and operations belong to the rank itself: let the "
        "fork prepare data only, or start it with the spawn method"
    )


def is_forked() -> bool:
    """Whether this process is a fork of one that was initialized."""
    return _world.forked


def _after_fork() -> None:
    if _world.initialized:
        _world.forked = True
        for process_set in _world.sets.values():
            if process_set._engine is not None:
                _world.parents.append(process_set._engine)
                process_set._engine = None


def open_all(task: _core.Task, process_sets: Sequence[ProcessSet]) -> None:
    """Connects all ranks, then the members of each set."""
    global _hooked
    for number, process_set in enumerate(process_sets):
        earlier = process_sets[:number]
        _check(process_set, task.size, [list(range(task.size)), *(other.ranks for other in earlier)], f"entry {number}")
    _world.task, _world.rank = task, task.rank
    _world.sets, _world.next = {}, 0
    try:
        global_process_set.ranks = list(range(task.size))
        _open(global_process_set, task.engine())
        for process_set in process_sets:
            _open(process_set, task.subengine(process_set.ranks))
    except BaseException:
        close_all()
        raise
    _world.initialized = True
    if not _hooked:
        os.register_at_fork(after_in_child=_after_fork)
        _hooked = True


def close_all() -> None:
    """Leaves every set. What is on its way fails."""
    sets = list(_world.sets.values())
    _world.initialized = False
    _world.sets = {}
    _world.task = None
    for process_set in reversed(sets):
        _close(process_set)
    global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Makes a process set usable. All ranks call it alike, members or not, and get the set.

    >>> import deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.add_process_set([0])
    Traceback (most recent call last):
    deuteron.errors.InvalidError: ProcessSet(process_set_id=None, ranks=[0]) has the ranks of ...
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if not _world.initialized or _world.task is None:
        raise not_initialized()
    if _world.forked:
        raise InvalidError(forked())
    _check(process_set, _world.task.size, [other.ranks for other in _world.sets.values()])
    _open(process_set, _world.task.subengine(process_set.ranks))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set on all ranks, which call it alike. False for the set of all ranks, or one not in use.

    Operations of the set that are on their way fail. The set can be added again.
    """
    number = process_set.process_set_id
    if number is None or number == 0 or _world.sets.get(number) is not process_set:
        return False
    del _world.sets[number]
    _close(process_set)
    return True


def _check(process_set: ProcessSet, size: int, taken: Sequence[Sequence[int]], what: str = "") -> None:
    if not isinstance(process_set, ProcessSet):
        raise InvalidError(f"a list of process sets was expected, with {process_set!r} in it")
    what = f"{process_set}, {what} of process_sets," if what else str(process_set)
    if process_set.process_set_id is not None:
        raise InvalidError(f"{what} is in use already")
    if not process_set.ranks:
        raise InvalidError(f"{what} has no ranks")
    if process_set.ranks[-1] >= size:
        raise InvalidError(f"{what} has a rank that is not there: there are {size}")
    if process_set.ranks in taken:
        raise InvalidError(f"{what} has the ranks of another set and is a duplicate: use that one")


def _open(process_set: ProcessSet, engine: _core.Engine | None) -> None:
    process_set._engine = engine
    process_set.process_set_id = _world.next
    _world.sets[_world.next] = process_set
    _world.next += 1


def _close(process_set: ProcessSet) -> None:
    engine, process_set._engine = process_set._engine, None
    process_set.process_set_id = None
    if engine is not None:
        engine.close()
