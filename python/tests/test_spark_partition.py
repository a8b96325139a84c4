"""The file of a partition by itself: whole, or why not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deuteron.errors import LaunchError

if os.environ.get("CI") != "true":
    pytest.importorskip("pyarrow")

import pyarrow
from deuteron.partition import FILE, Partition, wait
from deuteron.spark._spool import Spool

pytestmark = pytest.mark.timeout(60)

BATCH = pyarrow.RecordBatch.from_pydict({"id": [1, 2, 3]})


def test_what_is_written_can_be_read_by_who_inherits_it(tmp_path: Path) -> None:
    spool = Spool(["", str(tmp_path)])
    told = os.dup(spool.descriptors[1])
    assert spool.write([BATCH, BATCH], BATCH.schema, lambda: True) is None
    wait(told)
    assert Partition(spool.environment[FILE]).to_table().num_rows == 6
    spool.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_to_task_and_rank(tmp_path: Path) -> None:
    def fills() -> Iterator[Any]:
        yield BATCH
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spool = Spool([str(tmp_path)])
    told = os.dup(spool.descriptors[1])
    failure = spool.write(fills(), BATCH.schema, lambda: True)
    assert failure is not None and f"no space left for the rows of this rank in {tmp_path} on" in failure
    assert "spark.local.dir" in failure
    with pytest.raises(LaunchError, match="no space left"):
        wait(told)
    spool.close()


def test_rows_that_nobody_wants_are_not_written(tmp_path: Path) -> None:
    spool = Spool([str(tmp_path)])
    assert "ended before all rows were there" in (spool.write([BATCH], BATCH.schema, lambda: False) or "")
    spool.close()


def test_a_rank_does_not_wait_for_a_worker_that_is_gone() -> None:
    told, tell = os.pipe()
    os.close(tell)
    with pytest.raises(LaunchError, match="has ended before all rows of this rank were there"):
        wait(told)
