"""A function over the batches of an Arrow stream, in several processes.

- Results come in the order of the batches. Only a few batches per process are on their way at a time, and the stream is
  read no faster than results are taken.
- A process ends when whoever started it is gone.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from deuteron.data._line import Line
from deuteron.errors import DataError, InvalidError, TaskFailedError, TimedOutError

FUNCTION, BATCH, RESULT, FAILURE = b"f", b"b", b"r", b"e"
#: Batches that a process has: the one that it works on, and the next.
_AHEAD = 2


def map_batches(
    fn: Callable[..., Any],
    data: Any,
    num_proc: int | None = None,
    *,
    setup: Callable[[], Any] | None = None,
    batch_size: int = 65_536,
    progress: bool | None = None,
    timeout: float | None = None,
) -> Mapped:
    """Calls ``fn`` with every batch of ``data`` in ``num_proc`` processes; what it returns comes in the order of the
    batches.

    ``data`` is whatever speaks the Arrow stream interface. ``fn`` gets a ``pyarrow.RecordBatch`` of at most
    ``batch_size`` rows and returns one, a table, or several in a list. ``setup`` is called once in each process, and
    what it returns is the second argument of ``fn``: a model that is loaded once, for instance. ``progress`` shows a
    bar (needs tqdm); if not said, on a terminal that has one.

    If ``fn`` raises, or a process ends, ``TaskFailedError`` says at which batch, with the traceback. If nothing comes
    back for ``timeout`` seconds, ``TimedOutError`` names the batches. All results have one schema, or ``DataError``
    says which has not. Iterate over the result, or give it to whatever takes an Arrow stream: once.
    """
    from deuteron.launch import _payload

    if num_proc is None:
        num_proc = len(os.sched_getaffinity(0))
    if num_proc < 1 or batch_size < 1:
        raise InvalidError("num_proc and batch_size must be at least 1")
    if not hasattr(data, "__arrow_c_stream__"):
        wanted = "something with __arrow_c_stream__, such as a pyarrow.Table"
        raise InvalidError(f"{type(data).__name__} is no stream of batches: give {wanted}")
    payload = _payload(fn, (setup,), None, show_failures=False)
    bar = _bar(progress, getattr(data, "num_rows", None))
    return Mapped(_mapped(payload, data, num_proc, batch_size, bar, timeout))


class Mapped:
    """What ``map_batches`` gives: ``pyarrow.RecordBatch``es, or an Arrow stream, once."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow  # type: ignore[import-untyped]

        first = next(self._batches, None)
        if first is None:
            raise InvalidError("there is no batch, and so no schema of results")

        def all_of_them() -> Iterator[Any]:
            yield first
            yield from self._batches

        reader = pyarrow.RecordBatchReader.from_batches(first.schema, all_of_them())
        return reader.__arrow_c_stream__(requested_schema)


def _bar(progress: bool | None, rows: int | None) -> Any:
    """Something that counts rows, or ``None``."""
    if progress is False:
        return None
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        if progress:
            raise InvalidError("progress=True needs tqdm: pip install tqdm") from None
        return None
    return tqdm(total=rows, unit=" rows", unit_scale=True, disable=None if progress is None else False)


class _Mapper:
    """A process that maps batches."""

    def __init__(self, payload: bytes, rank: int, of: int) -> None:
        self.rank = rank
        end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line = Line(end)
        command = [sys.executable, "-m", "deuteron.data._mapper", str(other.fileno())]
        environment = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // of)), **os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        with other:
            # Its own group, so that Ctrl-C reaches only whoever asked for the results.
            self.process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment, process_group=0)
        self.numbers: list[int] = []
        self.line.send_bytes(FUNCTION, 0, payload)

    def give(self, number: int, batch: Any) -> None:
        self.numbers.append(number)
        try:
            self.line.send_batches(BATCH, number, [batch])
        except (BrokenPipeError, ConnectionResetError):
            # What it said before it ended comes first.
            while True:
                self.take()

    def take(self) -> tuple[int, list[Any]]:
        """The number of a batch, and its results."""
        message = self.line.receive()
        if message is None:
            raise self._lost()
        if message.kind == FAILURE:
            raise _failed(self.rank, message.number, bytes(message.content).decode())
        self.numbers.remove(message.number)
        return message.number, message.batches()

    def end(self) -> None:
        self.line.close()
        self.process.kill()
        self.process.wait()

    def _lost(self) -> TaskFailedError:
        status = self.process.wait()
        ending = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        numbers = " and ".join(map(str, self.numbers)) or "none"
        message = f"process {self.rank} {ending}; it had batches {numbers}"
        return TaskFailedError(message, self.rank, os.uname().nodename, 0, ending)


def _parts(data: Any, most: int) -> Iterator[Any]:
    import pyarrow

    for batch in pyarrow.RecordBatchReader.from_stream(data):
        for start in range(0, batch.num_rows, most):
            yield batch.slice(start, most)


def _mapped(
    payload: bytes, data: Any, num_proc: int, batch_size: int, bar: Any, timeout: float | None
) -> Iterator[Any]:
    parts = enumerate(_parts(data, batch_size))
    mappers: list[_Mapper] = []
    # What has come and not been taken, and how many rows the batches had that have not.
    done: dict[int, list[Any]] = {}
    rows: dict[int, int] = {}
    given = taken = 0
    more = True
    schema = None
    with selectors.DefaultSelector() as selector:
        try:
            while more or taken < given:
                # What is done and not taken counts too: the stream is read no faster than results are.
                while more and given - taken < _AHEAD * num_proc:
                    part = next(parts, None)
                    if part is None:
                        more = False
                        break
                    if len(mappers) < num_proc:
                        mappers.append(_Mapper(payload, len(mappers), num_proc))
                        selector.register(mappers[-1].line, selectors.EVENT_READ, mappers[-1])
                    given += 1
                    rows[part[0]] = part[1].num_rows
                    min(mappers, key=lambda mapper: len(mapper.numbers)).give(*part)
                if taken < given and taken not in done:
                    ready = selector.select(timeout)
                    if not ready:
                        raise _late(mappers, timeout)
                    done.update(key.data.take() for key, _ in ready)
                while taken in done:
                    if bar is not None:
                        bar.update(rows.pop(taken))
                    for result in done.pop(taken):
                        schema = schema or result.schema
                        if result.schema != schema:
                            raise _different(taken, schema, result.schema)
                        yield result
                    taken += 1
        finally:
            if bar is not None:
                bar.close()
            for mapper in mappers:
                mapper.end()


def _failed(rank: int, number: int, traceback: str) -> TaskFailedError:
    where = f"batch {number} failed in process {rank}" if number >= 0 else f"process {rank} could not be set up"
    return TaskFailedError(where, rank, os.uname().nodename, 0, "failed", traceback)


def _different(number: int, first: Any, other: Any) -> DataError:
    columns = [", ".join(f"{field.name}: {field.type}" for field in schema) for schema in (first, other)]
    return DataError(
        f"the function returned other columns for batch {number} than before: {columns[1]}; not {columns[0]}: name "
        "their types"
    )


def _late(mappers: list[_Mapper], timeout: float | None) -> TimedOutError:
    busy = "; ".join(f"process {one.rank} has batches {' and '.join(map(str, one.numbers))}" for one in mappers)
    return TimedOutError(f"no batch has come back for {timeout} s: {busy}")
