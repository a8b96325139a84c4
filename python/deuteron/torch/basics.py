"""Beginning and end, and who this process is."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from deuteron import _core
from deuteron._context import task
from deuteron.errors import InvalidError
from deuteron.torch import handles
from deuteron.torch.process_sets import (
    ProcessSet,
    close_all,
    forked,
    global_process_set,
    is_forked,
    not_initialized,
    open_all,
)

_lock = threading.Lock()
_infos: list[_core.TaskInfo] | None = None
_own: _core.TaskInfo | None = None
_at_exit = False


def init(
    comm: Iterable[int] | None = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Connects this process with the others of its gang; alone if nobody has started it as a task.

    Called again it does nothing, and after ``shutdown`` it connects anew. ``process_sets`` can be used from the start;
    others can always be added later, so ``"dynamic"`` means nothing. ``comm`` may list all ranks.

    >>> import deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.rank(), hvd.size()
    (0, 1)
    """
    global _infos, _own, _at_exit
    with _lock:
        if is_forked():
            raise InvalidError(forked())
        sets = _listed(process_sets)
        if _own is not None:
            if any(process_set.process_set_id is None for process_set in sets):
                raise InvalidError("init() was called before: use add_process_set() for more process sets")
            return
        this = task()
        _check(comm, this.size)
        open_all(this, sets)
        _infos = this.infos
        _own = _infos[this.rank]
        if not _at_exit:
            atexit.register(shutdown)
            os.register_at_fork(after_in_child=_after_fork)
            _at_exit = True


def shutdown() -> None:
    """Leaves. Operations on their way fail, and their handles mean nothing afterwards."""
    global _infos, _own
    with _lock:
        if _own is None:
            return
        _infos = _own = None
        close_all()
        handles.clear()


def _after_fork() -> None:
    global _lock
    # Another thread may have held it, and that thread is not in the child.
    _lock = threading.Lock()


def _listed(process_sets: Sequence[ProcessSet] | str | None) -> Sequence[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return ()
    if isinstance(process_sets, str):
        raise InvalidError(f'process_sets is a list of process sets or "dynamic", not {process_sets!r}')
    return list(process_sets)


def _check(comm: Any, size: int) -> None:
    if comm is None:
        return
    if not isinstance(comm, Iterable):
        raise InvalidError("init() knows no MPI communicators: start ranks with deuteron, and use process sets")
    ranks = sorted(comm)
    if ranks and ranks != list(range(size)):
        raise InvalidError(f"init() connects all {size} ranks, not only {ranks}: use process sets for some of them")


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` not since."""
    return _own is not None


def _self() -> _core.TaskInfo:
    if _own is None:
        raise not_initialized()
    return _own


def rank() -> int:
    """Number of this process among all."""
    return _self().rank


def size() -> int:
    """How many processes there are."""
    return len(_all())


def local_rank() -> int:
    """Number of this process among those of its host."""
    return _self().local_rank


def local_size() -> int:
    """How many processes this host has."""
    return _self().local_size


def cross_rank() -> int:
    """Number of this host among those that have a process with this local rank."""
    return _self().cross_rank


def cross_size() -> int:
    """How many hosts have a process with this local rank."""
    return _self().cross_size


def _all() -> list[_core.TaskInfo]:
    if _infos is None:
        raise not_initialized()
    return _infos


def is_homogeneous() -> bool:
    """Whether all hosts have as many processes."""
    return len({info.local_size for info in _all()}) == 1


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Records what every rank does into a file of rank 0, for Perfetto. There are no cycles to mark."""
    global_process_set.engine().start_timeline(os.fspath(file_path))


def stop_timeline() -> None:
    """Ends that. On rank 0 the file is complete when it returns."""
    global_process_set.engine().stop_timeline()


def mpi_built() -> bool:
    """False: MPI is not needed."""
    return False


def mpi_enabled() -> bool:
    """False: MPI is not needed."""
    return False


def mpi_threads_supported() -> bool:
    """False: there is no MPI. Operations can be submitted from any thread all the same."""
    return False


def gloo_built() -> bool:
    """True: what scripts ask for with it is that ranks can talk without MPI."""
    return True


def gloo_enabled() -> bool:
    """True: what scripts ask for with it is that ranks can talk without MPI."""
    return True


def nccl_built() -> int:
    """0: tensors of a GPU go through host memory."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """False: tensors of a GPU go through host memory."""
    return False


def rocm_built() -> bool:
    """False: tensors of a GPU go through host memory."""
    return False
