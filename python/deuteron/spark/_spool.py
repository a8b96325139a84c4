"""The partition of a task of Spark's: its rows are written while the rank starts, which is told when all are there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deuteron import partition
from deuteron.errors import LaunchError

_REMEDY = "have Spark use a larger folder (spark.local.dir, or SPARK_LOCAL_DIRS on the workers)"


class Spool:
    """The file of a partition, and the pipe to the rank."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._spool = partition.Spool(next((folder for folder in folders if os.access(folder, os.W_OK)), None))
        self._told, self._tell = os.pipe()
        #: What a rank is to inherit.
        self.descriptors = (self._spool.descriptor, self._told)
        self.environment = {
            partition.FILE: f"/proc/self/fd/{self._spool.descriptor}",
            partition.TOLD: str(self._told),
        }

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
            os.write(self._tell, partition.WHOLE if failure is None else failure.encode()[:4096])
            os.close(self._told)
            os.close(self._tell)
        return failure

    def close(self) -> None:
        # To free a large file takes the system tens of milliseconds, for which nobody needs to wait.
        threading.Thread(target=self._spool.close).start()
