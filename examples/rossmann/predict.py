"""Sales of the test rows, by several processes at once, and the submission file; and the baseline to be better than.

A category that the model has not seen (a new store, another weather) has the embedding zero: the prediction rests on
the other columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deuteron
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from .files import write_whole
from .train import Network, load, tensors

#: Who sells when: what the median is taken over.
GROUP = ["Store", "DayOfWeek", "Promo"]
#: Rows that are scored at a time.
BATCH = 4096


def score(batch: pa.RecordBatch, model: Network) -> pa.RecordBatch:
    """Id and sales of every row."""
    return pa.RecordBatch.from_pydict({"Id": batch["Id"], "Sales": sales(batch, model)})


def sales(batch: pa.RecordBatch, model: Network) -> np.ndarray:
    """What the model expects."""
    with torch.no_grad():
        return model(tensors(batch, torch.device("cpu"))).exp().numpy()


def here(folder: Path, checkpoint: bytes, num_proc: int) -> Iterator[pa.RecordBatch]:
    """Ids and sales of the rows in ``folder``, by processes of this machine, each of which loads the model once."""
    rows = pq.read_table(folder)
    model = partial(load, checkpoint)
    return iter(deuteron.map_batches(score, rows, num_proc, setup=model, batch_size=BATCH, progress=False))


def on_spark(session: Any, folder: Path, checkpoint: bytes, num_proc: int) -> Iterator[pa.RecordBatch]:
    """The same by tasks of Spark's."""
    import deuteron.spark

    rows = session.read.parquet(str(folder))
    for part in deuteron.spark.barrier(rows, num_proc).map_partitions(score_partition, args=(checkpoint,)):
        yield from part


def score_partition(partition: Iterable[pa.RecordBatch], checkpoint: bytes) -> list[pa.RecordBatch]:
    """What each of them does with its share."""
    model = load(checkpoint)
    return [score(batch, model) for batch in partition]


def write_submission(path: Path, scored: Iterable[pa.RecordBatch], told: Callable[[int], object] | None = None) -> int:
    """Id and Sales, sorted by Id; whole or not at all. Returns the number of rows.

    :param told: is called with the number of rows of each batch that has come
    """
    found: list[tuple[int, float]] = []
    for batch in scored:
        found += zip(batch["Id"].to_pylist(), batch["Sales"].to_pylist(), strict=True)
        if told is not None:
            told(batch.num_rows)
    lines = [f"{number},{value:.2f}\n" for number, value in sorted(found)]
    write_whole(path, "".join(["Id,Sales\n", *lines]).encode())
    return len(lines)


def exp_rmspe(predicted: np.ndarray, actual: np.ndarray) -> float:
    """The root of the mean squared relative error."""
    return float(np.sqrt(np.mean(((actual - predicted) / actual) ** 2)))


def baseline(folder: Path) -> float:
    """exp_rmspe on the validation rows of the median for store, weekday and promotion; of the store if that is new."""
    table = pq.read_table(folder / "train", columns=[*GROUP, "Sales"])
    held_out = pq.read_table(folder / "validation", columns=[*GROUP, "Sales"])
    everything = _medians(table, [])
    by_store, by_group = _medians(table, GROUP[:1]), _medians(table, GROUP)
    predicted = [
        by_group.get(key, by_store.get(key[:1], everything.get((), 0.0)))
        for key in zip(*(held_out[column].to_pylist() for column in GROUP), strict=True)
    ]
    return exp_rmspe(np.array(predicted), held_out["Sales"].to_numpy())


def _medians(table: object, keys: list[str]) -> dict[tuple[int, ...], float]:
    if not keys:
        return {(): float(np.median(table["Sales"].to_numpy()))}
    lists = table.group_by(keys).aggregate([("Sales", "list")])
    columns = zip(*(lists[key].to_pylist() for key in keys), strict=True)
    return {
        key: float(np.median(values.values.to_numpy()))
        for key, values in zip(columns, lists["Sales_list"], strict=True)
    }
