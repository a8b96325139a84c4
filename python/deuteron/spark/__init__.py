"""Gangs on Spark: a function, a program, or the rows of a DataFrame on the ranks of a barrier stage.

Ranks start together on the executors of the session that there is, one process in each task of a barrier stage, and
fail together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TypeVar

from deuteron.errors import InvalidError
from deuteron.launch import _payload, _results
from deuteron.partition import Partition, call
from deuteron.spark import _gang, _session

__all__ = ["Barrier", "Partition", "barrier", "run", "run_command"]

Result = TypeVar("Result")


def run(
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    verbose: bool | int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    restarts: int = 0,
    accelerators: str | None = None,
    per_task: int = 1,
    memory: int | str | None = None,
    required: bool = True,
    grace: float | None = None,
    output: str | os.PathLike[str] | None = None,
) -> list[Result]:
    """Calls ``fn(*args, **kwargs)`` in ``num_proc`` ranks on the active Spark session; returns what each has returned,
    by rank.

    Ranks are numbered by host, and on a host by accelerator; the host of the first task of Spark's comes first. What
    they print appears here as it comes, with the rank before it, and in the executors' logs. If one fails all are
    ended, and ``TaskFailedError`` says which it was, where, and with its traceback. Ctrl-C ends all of them.

    :param num_proc: how many; if not said, as many as Spark can run at once: cores ÷ ``spark.task.cpus``, or
        accelerators ÷ ``per_task``
    :param start_timeout: seconds that executors and ranks may take to be there; if not said,
        ``DEUTERON_SPARK_START_TIMEOUT`` or ``HOROVOD_SPARK_START_TIMEOUT``, else 600
    :param env: more environment variables for the ranks, which have their executor's
    :param stdout: where their standard output is written to, ``sys.stdout`` if not said
    :param stderr: the same for standard error
    :param verbose: 0 says nothing, 2 says where each rank runs
    :param nics: the interface or address of this machine that executors can reach, if it is not found
    :param prefix_output_with_timestamp: put the time (UTC) before every line
    :param executable: the Python of the ranks, the executor's if not said
    :param restarts: how often all are started again, as a new stage, after one has failed
    :param accelerators: what kind each rank gets: ``/gpu``, ``/gpu/h200``; if not said, what the session gives to tasks
    :param per_task: how many of them
    :param memory: the least memory of each, in bytes or as in ``"80GB"``
    :param required: whether there must be enough of them; else ranks run without
    :param grace: seconds between the signal to end (SIGTERM) and the kill
    :param output: a folder for what each rank prints: ``rank.N/stdout`` and ``rank.N/stderr``
    """
    cluster = _cluster(_session.active(), accelerators, per_task, memory, required)
    work = _gang.Work(
        name=getattr(fn, "__name__", type(fn).__name__),
        payload=lambda: _payload(fn, args, kwargs, show_failures=bool(restarts), elsewhere=True),
    )
    options = _gang.Options(
        num_proc=num_proc,
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
        restarts=restarts,
        grace=grace,
        output=output,
    )
    return _results(_gang.run(cluster, work, options))


def run_command(
    command: Sequence[str],
    num_proc: int | None = None,
    *,
    accelerators: str | None = None,
    per_task: int = 1,
    memory: int | str | None = None,
    required: bool = True,
    **options: Any,
) -> None:
    """Runs a program with its arguments in ``num_proc`` ranks on the active Spark session, until all have ended well.

    Each finds who it is in its environment (``DEUTERON_RANK``, ``DEUTERON_SIZE`` …). Other arguments are those of
    ``run``.
    """
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        raise InvalidError('command: give the program and its arguments as a list, as in ["train", "--epochs", "3"]')
    cluster = _cluster(_session.active(), accelerators, per_task, memory, required)
    # Through a shell: the program need not be on this machine.
    work = _gang.Work(name=command[0], command=["/bin/sh", "-c", 'exec "$0" "$@"', *command])
    _gang.run(cluster, work, _gang.Options(num_proc=num_proc, **options))


def barrier(df: Any, num_tasks: int | None = None) -> Barrier:
    """The rows of a Spark DataFrame for ``num_tasks`` tasks that start together or not at all; if not said, as many as
    Spark can run at once.

    >>> deuteron.spark.barrier(df).accelerated(by="/gpu/h200").map_partitions(train)  # doctest: +SKIP
    """
    if not hasattr(df, "mapInArrow"):
        raise InvalidError(f"df is a {type(df).__name__}: give a DataFrame of Spark's")
    return Barrier(df, num_tasks)


class Barrier:
    """Rows and tasks that are to meet."""

    def __init__(self, df: Any, num_tasks: int | None) -> None:
        self._frame, self._tasks = df, num_tasks
        self._wanted: tuple[str | None, int, int | str | None, bool] = (None, 1, None, True)

    def accelerated(
        self, by: str, per_task: int = 1, required: bool = True, memory: int | str | None = None
    ) -> Barrier:
        """The same with accelerators for each task: ``/gpu``, ``/gpu/h200``."""
        other = Barrier(self._frame, self._tasks)
        other._wanted = (by, per_task, memory, required)
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
        cluster = _cluster(self._frame.sparkSession, *self._wanted)
        show_failures = bool(options.get("restarts"))
        if not callable(fn):
            raise InvalidError(f"fn is a {type(fn).__name__}, which cannot be called")
        if unknown := options.keys() - _gang.Options.__dataclass_fields__.keys():
            raise TypeError(f"map_partitions() got an unexpected keyword argument {min(unknown)!r}")
        work = _gang.Work(
            name=getattr(fn, "__name__", type(fn).__name__),
            payload=lambda: _payload(
                call, (fn, args, dict(kwargs or {})), None, show_failures=show_failures, elsewhere=True
            ),
            rows=self._frame,
            schema=_arrow_schema(self._frame),
        )
        return _results(_gang.run(cluster, work, _gang.Options(num_proc=self._tasks, **options)))


def _cluster(
    session: Any, accelerators: str | None, per_task: int, memory: int | str | None, required: bool
) -> _session.Cluster:
    wanted = None if accelerators is None else _session.Accelerators(accelerators, per_task, memory, required)
    return _session.Cluster(session, wanted)


def _arrow_schema(frame: Any) -> bytes:
    """The schema of a share without rows, for which Spark sends none."""
    import inspect

    from pyspark.sql.pandas.types import to_arrow_schema

    options = {}
    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        options["timezone"] = frame.sparkSession.conf.get("spark.sql.session.timeZone")
    return bytes(to_arrow_schema(frame.schema, **options).serialize())
