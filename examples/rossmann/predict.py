"""Sales of the test rows, by all ranks at once, and the submission file; and the baseline to be better than.

A category that the model has not seen (a new store, another weather) has the embedding zero: the prediction rests on
the other columns.
"""

from __future__ import annotations

from pathlib import Path

import deuteron
import numpy as np
import pyarrow.parquet as pq
import torch

from .data import Rows, in_order
from .train import load, write_whole

#: Who sells when: what the median is taken over.
GROUP = ["Store", "DayOfWeek", "Promo"]


def score(folder: str, checkpoint: bytes) -> tuple[np.ndarray, np.ndarray]:
    """What every rank calls: ids and sales of its share of the rows in ``folder``."""
    task = deuteron.context()
    rows = Rows.load(Path(folder), task.rank, task.size)
    return rows.ids, sales(checkpoint, rows)


def sales(checkpoint: bytes, rows: Rows) -> np.ndarray:
    """What the model expects."""
    model = load(checkpoint)
    with torch.no_grad():
        parts = [
            model(categorical, continuous).exp().numpy()
            for categorical, continuous, _ in in_order(rows, batch_size=4096)
        ]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def write_submission(path: Path, parts: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """Id and Sales, sorted by Id; whole or not at all. Returns the number of rows."""
    ids, predicted = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(ids, kind="stable")
    lines = [f"{number},{value:.2f}\n" for number, value in zip(ids[order], predicted[order], strict=True)]
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
