"""Parquet to PyTorch mini-batches: ours beside what one writes with pyarrow and PyTorch alone, from one run.

Usage: data.py [ROWS]

Forty columns of small whole numbers and floats, shuffled, 1,024 rows at a time. Opening and reading the file counts.
The row-indexed Dataset is measured over fewer rows, because it is that slow.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import torch
from deuteron.data import Loader
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

BATCH = 1024
GROUP = 100_000


def write(path: Path, rows: int) -> None:
    random = numpy.random.default_rng(0)
    whole = {
        f"whole{index}": random.integers(0, 100, rows, dtype="int8" if index % 2 else "int64") for index in range(24)
    }
    floats = {f"float{index}": random.random(rows, dtype="float32") for index in range(16)}
    pyarrow.parquet.write_table(pyarrow.table({**whole, **floats}), path, row_group_size=GROUP)


def tensors(batch: Any) -> dict[str, torch.Tensor]:
    # A batch of a file is read-only, and a step may change it.
    return {name: torch.from_numpy(batch[name].to_numpy(zero_copy_only=False).copy()) for name in batch.schema.names}


class Rows(Dataset):  # type: ignore[type-arg]
    """One row at a time, as the first tutorial has it."""

    def __init__(self, path: Path) -> None:
        self.columns = {name: column.to_numpy() for name, column in zip_columns(pyarrow.parquet.read_table(path))}

    def __len__(self) -> int:
        return len(self.columns["whole0"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: column[row] for name, column in self.columns.items()}


def zip_columns(table: Any) -> Iterator[tuple[str, Any]]:
    return zip(table.column_names, table.columns, strict=True)


class Taken(Dataset):  # type: ignore[type-arg]
    """A mini-batch by its number: rows of one permutation, taken together."""

    def __init__(self, path: Path) -> None:
        self.table = pyarrow.parquet.read_table(path).combine_chunks()
        self.order = numpy.random.default_rng(0).permutation(self.table.num_rows)

    def __len__(self) -> int:
        return len(self.order) // BATCH

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        if step >= len(self):
            raise IndexError(step)
        batch = self.table.take(self.order[step * BATCH : (step + 1) * BATCH])
        return {name: torch.from_numpy(column.to_numpy()) for name, column in zip_columns(batch)}


class Arrays(Taken):
    """The same with NumPy's arrays."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.columns = {name: torch.from_numpy(column.to_numpy().copy()) for name, column in zip_columns(self.table)}
        self.places = torch.from_numpy(self.order)

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        if step >= len(self):
            raise IndexError(step)
        rows = self.places[step * BATCH : (step + 1) * BATCH]
        return {name: column[rows] for name, column in self.columns.items()}


class Groups(IterableDataset):  # type: ignore[type-arg]
    """Row groups in any order, the rows of each mixed, by ``iter_batches``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        file = pyarrow.parquet.ParquetFile(self.path)
        info = get_worker_info()
        first, workers = (info.id, info.num_workers) if info else (0, 1)
        random = numpy.random.default_rng(0)
        for group in random.permutation(file.num_row_groups)[first::workers]:
            for batch in file.iter_batches(GROUP, row_groups=[int(group)]):
                mixed = batch.take(pyarrow.array(random.permutation(batch.num_rows)))
                for start in range(0, mixed.num_rows - BATCH + 1, BATCH):
                    yield tensors(mixed.slice(start, BATCH))


def measured(make: Callable[[], Iterable[dict[str, torch.Tensor]]], most: int) -> float:
    """Rows per second."""
    start = time.perf_counter()
    rows = 0
    for batch in make():
        rows += len(batch["whole0"])
        if rows >= most:
            break
    return rows / (time.perf_counter() - start)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        write(path, rows)
        cases: dict[str, tuple[Callable[[], Any], int]] = {
            "row-indexed Dataset": (lambda: DataLoader(Rows(path), BATCH, shuffle=True), 20_000),
            "take by permutation": (lambda: Taken(path), rows),
            "take by permutation, 2 workers": (lambda: DataLoader(Taken(path), None, num_workers=2), rows),
            "tensors indexed by permutation": (lambda: Arrays(path), rows),
            "iter_batches": (lambda: Groups(path), rows),
            "iter_batches, 2 workers": (lambda: DataLoader(Groups(path), None, num_workers=2), rows),
            "deuteron, full": (lambda: Loader(path, BATCH, shuffle="full"), rows),
            "deuteron, buffer": (lambda: Loader(path, BATCH, shuffle="buffer"), rows),
        }
        for name, (make, most) in cases.items():
            best = max(measured(make, most) for _ in range(1 if most < rows else 3))
            print(f"{name:32} {best:12,.0f} rows/s", flush=True)


if __name__ == "__main__":
    main()
