"""Handles: numbers that stand for operations on their way.

An operation works on memory of its tensors until it is done. So whatever happens to the caller meanwhile, even an
interrupt, the tensors are kept here until then (HANDLE-1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from deuteron import _core
from deuteron.errors import InvalidError

Result = TypeVar("Result")
Other = TypeVar("Other")


class Pending(Generic[Result]):
    """An operation, the tensors it works on, and how its result is made."""

    __slots__ = ("finish", "operation", "tensors")

    def __init__(
        self,
        operation: _core.Operation,
        tensors: Sequence[Tensor],
        finish: Callable[[list[_core.Memory]], Result],
    ) -> None:
        self.operation = operation
        self.tensors = tensors
        self.finish = finish

    def result(self) -> Result:
        """Waits for it."""
        return self.finish(wait(self.operation, self.tensors))

    def then(self, change: Callable[[Result], Other]) -> Pending[Other]:
        """The same with another result."""
        finish = self.finish
        return Pending(self.operation, self.tensors, lambda made: change(finish(made)))


_pending: dict[int, Pending[Any]] = {}
_numbers = itertools.count()
_interrupted: list[tuple[_core.Operation, Any]] = []


def wait(operation: _core.Operation, tensors: Any) -> list[_core.Memory]:
    """Waits for an operation. If that is interrupted, its tensors stay (HANDLE-1)."""
    try:
        return operation.wait()
    except BaseException:
        _interrupted[:] = [kept for kept in _interrupted if not kept[0].done()]
        if not operation.done():
            _interrupted.append((operation, tensors))
        raise


def start(pending: Pending[Any]) -> int:
    """A handle for it."""
    handle = next(_numbers)
    _pending[handle] = pending
    return handle


def _find(handle: int) -> Pending[Any]:
    try:
        return _pending[handle]
    except (KeyError, TypeError):
        raise InvalidError(
            f"there is no operation with handle {handle!r}: it comes from an asynchronous call, can be synchronized "
            "once, and ends with shutdown()"
        ) from None


def poll(handle: int) -> bool:
    """Whether the operation is done or has failed, so that ``synchronize`` would not wait.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> handle = hvd.allreduce_async(torch.ones(2))
    >>> hvd.synchronize(handle)
    tensor([1., 1.])
    >>> hvd.poll(handle)
    Traceback (most recent call last):
    deuteron.errors.InvalidError: there is no operation with handle ...
    """
    return _find(handle).operation.done()


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation and returns its result, once; raises what it has failed with.

    A handle that was synchronized already, or never given out, is an ``InvalidError``, which is a ``ValueError``.
    """
    pending = _find(handle)
    try:
        made = pending.operation.wait()
    finally:
        if pending.operation.done():
            _pending.pop(handle, None)
    return pending.finish(made)


def clear() -> None:
    """Forgets all of them; the engines they were given to are closed."""
    _pending.clear()
    _interrupted.clear()
