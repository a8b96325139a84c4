"""Mini-batches of a prepared data set, in an order that does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from .tables import CATEGORICAL, CONTINUOUS

#: Categories, numbers, ln(Sales).
MiniBatch = tuple[Tensor, Tensor, Tensor]


@dataclass
class Rows:
    """A data set in memory: rows by columns of categories and numbers, and ln(Sales) where there are sales."""

    categorical: np.ndarray
    continuous: np.ndarray
    log_sales: np.ndarray
    ids: np.ndarray

    @staticmethod
    def load(folder: Path, part: int = 0, parts: int = 1) -> Rows:
        """One of so many equal parts of the rows, in their order."""
        table = pq.read_table(folder)
        first, last = (table.num_rows * edge // parts for edge in (part, part + 1))
        table = table.slice(first, last - first)
        sales = table["Sales"].to_numpy() if "Sales" in table.column_names else np.ones(table.num_rows, np.float32)
        return Rows(
            np.stack([table[column].to_numpy() for column in CATEGORICAL], axis=1),
            np.stack([table[column].to_numpy() for column in CONTINUOUS], axis=1),
            np.log(sales).astype(np.float32),
            table["Id"].to_numpy() if "Id" in table.column_names else np.arange(table.num_rows),
        )

    @property
    def sales(self) -> np.ndarray:
        """Of the rows that have them."""
        return np.exp(self.log_sales)

    def __len__(self) -> int:
        return len(self.log_sales)

    def take(self, order: np.ndarray) -> MiniBatch:
        """These rows as tensors."""
        return (
            torch.from_numpy(self.categorical.take(order, axis=0)),
            torch.from_numpy(self.continuous.take(order, axis=0)),
            torch.from_numpy(self.log_sales.take(order)),
        )


def steps(rows: int, batch_size: int, size: int) -> int:
    """Of an epoch, on every rank: whole batches of all ranks together. What is left over differs in each epoch."""
    return rows // (batch_size * size)


def mini_batches(rows: Rows, batch_size: int, seed: int, epoch: int, rank: int, size: int) -> Iterator[MiniBatch]:
    """What a rank sees in an epoch: its share of each batch, all of which are cut from one order of all rows."""
    order = np.random.default_rng((seed, epoch)).permutation(len(rows))
    for step in range(steps(len(rows), batch_size, size)):
        start = (step * size + rank) * batch_size
        yield rows.take(order[start : start + batch_size])


def in_order(rows: Rows, batch_size: int) -> Iterator[MiniBatch]:
    """All rows once."""
    for start in range(0, len(rows), batch_size):
        yield rows.take(np.arange(start, min(start + batch_size, len(rows))))
