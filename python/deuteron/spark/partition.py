"""A task's share of the rows: Arrow batches in a file that is mapped into memory and can be read again and again."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from deuteron.errors import InvalidError, LaunchError

#: Where a task finds its file.
VARIABLE = "DEUTERON_PARTITION"
#: The pipe that tells it that all rows are there, or why they will not be.
_TOLD = "DEUTERON_PARTITION_TOLD"
_WHOLE = b"whole"


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
    import pyarrow  # noqa: F401  while rows are on their way

    _wait(int(os.environ[_TOLD]))
    return fn(Partition(path), *args, **kwargs)


def _wait(pipe: int) -> None:
    """Until all rows are there."""
    # It is open as long as Spark's worker lives.
    with open(pipe, "rb") as file:
        said = file.read()
    if said != _WHOLE:
        raise LaunchError(said.decode() or "the task of Spark's has ended before all rows of this rank were there")


class Spool:
    """The file of a partition while it is written.

    It has no name, so that it cannot be left behind; who inherits its descriptor can open it.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        folder = next((folder for folder in folders if os.access(folder, os.W_OK)), None)
        self._folder = folder or tempfile.gettempdir()
        self._file = tempfile.TemporaryFile(prefix="deuteron-", dir=folder, buffering=0)  # noqa: SIM115
        self._told, self._tell = os.pipe()
        #: What a rank is to inherit.
        self.descriptors = (self._file.fileno(), self._told)
        self.environment = {VARIABLE: f"/proc/self/fd/{self._file.fileno()}", _TOLD: str(self._told)}

    def write(self, batches: Iterable[Any], schema: Any, is_wanted: Callable[[], bool]) -> str | None:
        """Writes all batches and tells the rank, which learns of a failure too; stops when nobody wants them.

        Returns why it has failed.
        """
        failure = None
        try:
            self._write(batches, schema, is_wanted)
        except Exception as error:
            failure = self._explain(error)
        finally:
            os.write(self._tell, _WHOLE if failure is None else failure.encode()[:4096])
            os.close(self._told)
            os.close(self._tell)
        return failure

    def _write(self, batches: Iterable[Any], schema: Any, is_wanted: Callable[[], bool]) -> None:
        import pyarrow

        # By its path: what pyarrow opens itself it writes without Python, and whole.
        with pyarrow.OSFile(f"/proc/self/fd/{self._file.fileno()}", "wb") as sink:
            writer = None
            for batch in batches:
                if not is_wanted():
                    raise LaunchError("the gang has ended before all rows were there")
                if writer is None:
                    writer = pyarrow.ipc.new_file(sink, batch.schema)
                writer.write_batch(batch)
            if writer is None:
                writer = pyarrow.ipc.new_file(sink, schema)
            writer.close()

    def _explain(self, error: Exception) -> str:
        host = os.uname().nodename
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"there is no space left for the rows of this rank in {self._folder} on {host}, after "
                f"{os.fstat(self._file.fileno()).st_size} bytes: free some, or have Spark use a larger folder "
                "(spark.local.dir, or SPARK_LOCAL_DIRS on the workers)"
            )
        return f"the rows of this rank cannot be written to {self._folder} on {host}: {type(error).__name__}: {error}"

    def close(self) -> None:
        self._file.close()
