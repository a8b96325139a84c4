"""A task's share of the rows: Arrow batches in a file that is mapped into memory and can be read again and again.

Ranks import it while they start, so it imports little itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deuteron.errors import DataError, InvalidError, LaunchError

#: Where a rank whose rows are still on their way finds its file.
FILE = "DEUTERON_PARTITION"
#: The pipe that tells it that all are there, or why they will not be.
TOLD = "DEUTERON_PARTITION_TOLD"
WHOLE = b"whole"

_PIECE = 1 << 20


class Partition:
    """The rows of this task, as ``pyarrow.RecordBatch``es; each iteration begins at the first.

    Nothing is read before it is looked at, and what is looked at is the system's own copy of the file: memory does not
    grow with the number of rows.
    """

    def __init__(self, path: str) -> None:
        import pyarrow  # type: ignore[import-untyped]

        self._path = path
        self._file = pyarrow.ipc.open_file(pyarrow.memory_map(path))
        self._rows: int | None = None

    @property
    def schema(self) -> Any:
        """The ``pyarrow.Schema``, the same in every task."""
        return self._file.schema

    @property
    def num_rows(self) -> int:
        """How many rows there are; tasks may have different numbers, or none."""
        if self._rows is None:
            self._rows = sum(batch.num_rows for batch in self)
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._file.num_record_batches):
            yield self._file.get_batch(index)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow

        reader = pyarrow.RecordBatchReader.from_batches(self.schema, self)
        return reader.__arrow_c_stream__(requested_schema)

    def to_table(self) -> Any:
        """All rows as one ``pyarrow.Table`` that lies in the file."""
        import pyarrow

        return pyarrow.Table.from_batches(self, self.schema)

    def __reduce__(self) -> tuple[object, ...]:
        # A child that was not forked has not inherited the file, but may open it as long as this process lives.
        return Partition, (self._path.replace("/proc/self/", f"/proc/{os.getpid()}/"),)

    def __repr__(self) -> str:
        return f"Partition({self.num_rows} rows of {self.schema.names})"


def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls ``fn`` with the partition of the task that this process is, once all its rows are there."""
    path = os.environ.get(FILE)
    if path is None:
        raise InvalidError("this task has no partition: it was not started by barrier(df).map_partitions")
    import pyarrow  # noqa: F401  while rows are on their way

    wait(int(os.environ[TOLD]))
    return fn(Partition(path), *args, **kwargs)


def wait(pipe: int) -> None:
    """Until all rows are there."""
    # It is open as long as whoever writes them lives.
    with open(pipe, "rb") as file:
        said = file.read()
    if said != WHOLE:
        raise LaunchError(said.decode() or "the task of Spark's has ended before all rows of this rank were there")


class Spool:
    """The file of a partition while it is written; it has no name, so that it cannot be left behind."""

    def __init__(self, folder: str | None = None) -> None:
        import tempfile

        import pyarrow

        self._folder = folder or tempfile.gettempdir()
        self._file = tempfile.TemporaryFile(prefix="deuteron-", dir=folder, buffering=0)  # noqa: SIM115
        self._sink = pyarrow.PythonFile(_Pieces(self.descriptor), "w")
        self._writer: Any = None

    @property
    def descriptor(self) -> int:
        """Who inherits it can open the file."""
        return self._file.fileno()

    @property
    def path(self) -> str:
        """Where processes of this user find it, as long as this one lives and it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def write(self, batch: Any) -> None:
        self._begin(batch.schema)
        self._writer.write_batch(batch)

    def finish(self, schema: Any) -> None:
        """All rows are there; the schema counts if there were none."""
        self._begin(schema)
        self._writer.close()
        self._sink.close()

    def _begin(self, schema: Any) -> None:
        import pyarrow

        if self._writer is None:
            self._writer = pyarrow.ipc.new_file(self._sink, schema)

    def explain(self, error: Exception, remedy: str) -> str:
        """Why rows could not be written; ``remedy`` is for a full disk."""
        where = f"{self._folder} on {os.uname().nodename}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            written = os.fstat(self.descriptor).st_size
            return (
                f"there is no space left for the rows of this rank in {where}, after {written} bytes: free some, or "
                f"{remedy}"
            )
        return f"the rows of this rank cannot be written to {where}: {type(error).__name__}: {error}"

    def close(self) -> None:
        self._writer = None
        with contextlib.suppress(OSError):
            self._sink.close()
        self._file.close()


class _Pieces:
    """Writes to a descriptor, whole and in pieces.

    For one large write the system takes its largest pages, and those a virtual machine has often given back to its
    host: 480 MB took 0.85 s at once and 0.12 s in pieces.
    """

    closed = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest[:_PIECE]) :]
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """The file belongs to somebody else."""


def deal(data: Any, shares: int) -> list[Spool]:
    """Deals the rows of a stream evenly to as many spools, each of which is whole."""
    import pyarrow

    reader = pyarrow.RecordBatchReader.from_stream(data)
    spools = [Spool() for _ in range(shares)]
    try:
        next_one = 0
        for batch in reader:
            # Who got one row more has its turn last in the next batch: shares differ by at most one row.
            least, more = divmod(batch.num_rows, shares)
            start = 0
            for place in range(shares):
                rows = least + (place < more)
                if rows:
                    _write(spools[(next_one + place) % shares], batch.slice(start, rows))
                start += rows
            next_one = (next_one + more) % shares
        for spool in spools:
            spool.finish(reader.schema)
    except BaseException:
        for spool in spools:
            spool.close()
        raise
    return spools


def _write(spool: Spool, batch: Any) -> None:
    try:
        spool.write(batch)
    except OSError as error:
        raise DataError(spool.explain(error, "name a larger folder with TMPDIR")) from error
