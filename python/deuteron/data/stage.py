"""A barrier stage on this machine: the rows of a stream on the ranks of a gang."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from deuteron.errors import InvalidError
from deuteron.partition import Partition, deal

Result = TypeVar("Result")


def barrier(data: Any, num_tasks: int | None = None) -> Barrier:
    """The rows of ``data``, whatever speaks the Arrow stream interface, for ``num_tasks`` tasks that start together: as
    many as there are cores if not said.
    """
    if not hasattr(data, "__arrow_c_stream__"):
        wanted = "something with __arrow_c_stream__, such as a pyarrow.Table"
        raise InvalidError(f"{type(data).__name__} is no stream of batches: give {wanted}")
    if num_tasks is None:
        num_tasks = len(os.sched_getaffinity(0))
    if num_tasks < 1:
        raise InvalidError(f"num_tasks must be at least 1, not {num_tasks}")
    return Barrier(data, num_tasks)


class Barrier:
    """Rows and tasks that are to meet."""

    def __init__(self, data: Any, num_tasks: int) -> None:
        self._data, self._tasks = data, num_tasks
        self._wanted: dict[str, Any] = {}

    def accelerated(
        self, by: str, per_task: int = 1, required: bool = True, memory: int | str | None = None
    ) -> Barrier:
        """The same with accelerators for each task: ``/gpu``, ``/gpu/h200``."""
        other = Barrier(self._data, self._tasks)
        other._wanted = {"accelerator": by, "per_task": per_task, "required": required, "memory": memory}
        return other

    def map_partitions(
        self,
        fn: Callable[..., Result],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Result]:
        """Calls ``fn(partition, *args, **kwargs)`` in every task, with its share of the rows as a ``Partition``;
        returns what each has returned, by rank.

        Rows are dealt out evenly and in no order. A share is whole before the function is called, and lies in a file
        that can be read again in every epoch. Other arguments are those of ``run``.
        """
        from deuteron.launch import run

        if not callable(fn):
            raise InvalidError(f"fn is a {type(fn).__name__}, which cannot be called")
        spools = deal(self._data, self._tasks)
        try:
            paths = [spool.path for spool in spools]
            call = _Call(fn, tuple(args), dict(kwargs or {}))
            return run(call, (paths,), num_proc=self._tasks, **self._wanted, **options)
        finally:
            for spool in spools:
                spool.close()


class _Call:
    """The function, in a task."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs

    def __call__(self, paths: list[str]) -> Any:
        from deuteron._context import task

        return self._fn(Partition(paths[task().rank]), *self._args, **self._kwargs)
