"""A task's share of the rows: Arrow batches in a file that is mapped into memory and can be read again and again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from deuteron.errors import InvalidError

#: Where a task finds its file.
VARIABLE = "DEUTERON_PARTITION"


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
    """Calls ``fn`` with the partition of the task that this process is."""
    path = os.environ.get(VARIABLE)
    if path is None:
        raise InvalidError("this task has no partition: it was not started by barrier(df).map_partitions")
    return fn(Partition(path), *args, **kwargs)


class Spool:
    """The file of a partition while it is written.

    It has no name, so that it cannot be left behind; who inherits its descriptor can open it.
    """

    def __init__(self, batches: Iterable[Any], schema: Any, folders: Sequence[str]) -> None:
        import pyarrow

        folder = next((folder for folder in folders if os.access(folder, os.W_OK)), None)
        self._file = tempfile.TemporaryFile(prefix="deuteron-", dir=folder, buffering=0)  # noqa: SIM115
        writer = None
        for batch in batches:
            if writer is None:
                writer = pyarrow.ipc.new_file(self._file, batch.schema)
            writer.write_batch(batch)
        if writer is None:
            writer = pyarrow.ipc.new_file(self._file, schema)
        writer.close()

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
