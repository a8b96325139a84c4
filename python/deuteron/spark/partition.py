"""The partition of a task of Spark's: its rows are written while the rank starts, which is told when all are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deuteron.data import partition
from deuteron.data.partition import Partition
from deuteron.errors import InvalidError, LaunchError

#: Where a task finds its file.
VARIABLE = "DEUTERON_PARTITION"
#: The pipe that tells it that all rows are there, or why they will not be.
_TOLD = "DEUTERON_PARTITION_TOLD"
_WHOLE = b"whole"
_REMEDY = "have Spark use a larger folder (spark.local.dir, or SPARK_LOCAL_DIRS on the workers)"


def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls ``fn`` with the partition of the task that this process is."""
    path = os.environ.get(VARIABLE)
    if path is None:
        raise InvalidError("this task has no partition: it was not started by barrier(df).map_partitions")
    import pyarrow  # type: ignore[import-untyped]  # noqa: F401  while rows are on their way

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
    """The file of a partition, and the pipe to the rank."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._spool = partition.Spool(next((folder for folder in folders if os.access(folder, os.W_OK)), None))
        self._told, self._tell = os.pipe()
        #: What a rank is to inherit.
        self.descriptors = (self._spool.descriptor, self._told)
        self.environment = {VARIABLE: f"/proc/self/fd/{self._spool.descriptor}", _TOLD: str(self._told)}

    def write(self, batches: Iterable[Any], schema: Any, is_wanted: Callable[[], bool]) -> str | None:
        """Writes all batches and tells the rank, which learns of a failure too; stops when nobody wants them.

        Returns why it has failed.
        """
        failure = None
        try:
            for batch in batches:
                if not is_wanted():
                    raise LaunchError("the gang has ended before all rows were there")
                self._spool.write(batch)
            self._spool.finish(schema)
        except Exception as error:
            failure = self._spool.explain(error, _REMEDY)
        finally:
            os.write(self._tell, _WHOLE if failure is None else failure.encode()[:4096])
            os.close(self._told)
            os.close(self._tell)
        return failure

    def close(self) -> None:
        self._spool.close()
