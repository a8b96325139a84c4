"""Parquet to PyTorch mini-batches: ours beside what one writes with pyarrow and PyTorch alone, from one run.

usage: data.py OUT FOLDER REPETITIONS ROWS

Writes OUT, one line of JSON for each contestant: what is measured, who, rows, and nanoseconds by repetition; of memory
the bytes of all rows, and those that an epoch needs by repetition. A wrong result ends the run. The columns are those
of Rossmann, prepared: 18 categories, 18 numbers and the sales, each with as many different values as there. An epoch is
everything from opening the file to the last mini-batch of 1,024 rows. Mini-batches come in two forms: one tensor for
each of the 37 columns ("columns"), and what the network takes, a matrix of categories, one of numbers and the sales
("matrices"). Everybody is written to be fast: whatever can be done once for many mini-batches is, and nothing is
converted twice.

Memory is measured in a process of its own, which loads ten times more than it may keep, three times.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
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
# Rows that are mixed with each other by those who do not mix all.
BUFFER = 65_536
# Several groups, because the peers' workers share groups among them.
GROUP = 131_072
# A row at a time is so slow that part of an epoch has to do.
FEW = 20_000
CATEGORICAL = {
    "Store": 1115,
    "State": 12,
    "DayOfWeek": 7,
    "Year": 3,
    "Month": 12,
    "Day": 31,
    "Week": 52,
    "CompetitionMonthsOpen": 25,
    "Promo2Weeks": 26,
    "StoreType": 4,
    "Assortment": 3,
    "PromoInterval": 4,
    "CompetitionOpenSinceYear": 23,
    "Promo2SinceYear": 8,
    "Events": 22,
    "Promo": 2,
    "StateHoliday": 2,
    "SchoolHoliday": 2,
}
CONTINUOUS = {
    "CompetitionDistance": 654,
    "Max_TemperatureC": 51,
    "Mean_TemperatureC": 45,
    "Min_TemperatureC": 42,
    "Max_Humidity": 53,
    "Mean_Humidity": 71,
    "Min_Humidity": 93,
    "Max_Wind_SpeedKm_h": 44,
    "Mean_Wind_SpeedKm_h": 29,
    "CloudCover": 9,
    "trend": 74,
    "trend_de": 45,
    "BeforePromo": 13,
    "AfterPromo": 13,
    "BeforeStateHoliday": 105,
    "AfterStateHoliday": 105,
    "BeforeSchoolHoliday": 100,
    "AfterSchoolHoliday": 100,
}
SALES = "Sales"
# Bytes of a row.
WIDTH = 4 * (len(CATEGORICAL) + len(CONTINUOUS) + 1)
EPOCHS = 3
MATRICES = {"categorical": list(CATEGORICAL), "continuous": list(CONTINUOUS)}

Batch = dict[str, torch.Tensor]
Batches = Iterable[Batch]


def fail(what: str) -> None:
    """Ends the run."""
    raise SystemExit(f"data: {what}")


def write(path: Path, rows: int) -> float:
    """Makes the file; the sum of all sales."""
    random = numpy.random.default_rng(0)
    categorical = {name: random.integers(0, count, rows, dtype="int32") for name, count in CATEGORICAL.items()}
    continuous = {name: random.integers(0, count, rows).astype("float32") for name, count in CONTINUOUS.items()}
    sales = numpy.round(numpy.exp(random.normal(8.7, 0.4, rows))).astype("float32")
    table = pyarrow.table({**categorical, **continuous, SALES: sales})
    pyarrow.parquet.write_table(table, path, row_group_size=GROUP)
    return float(sales.sum(dtype="float64"))


class Columns:
    """Mini-batches of one tensor for each column."""

    def of(self, table: Any) -> Batch:
        """The whole of a table or batch."""
        return {name: tensor(table[name]) for name in table.schema.names}


class Matrices(Columns):
    """Mini-batches of two matrices and the sales."""

    def of(self, table: Any) -> Batch:
        matrices = {
            name: torch.stack([tensor(table[column]) for column in columns], 1) for name, columns in MATRICES.items()
        }
        return {**matrices, SALES: tensor(table[SALES])}


def tensor(column: Any) -> torch.Tensor:
    return torch.from_numpy(column.to_numpy())


FORMS: dict[str, Columns] = {"columns": Columns(), "matrices": Matrices()}


def steps(tensors: Batch) -> Iterator[Batch]:
    """Tensors of many rows, cut into mini-batches; what does not fill one is dropped."""
    whole = len(tensors[SALES]) // BATCH
    parts = [tensor[: whole * BATCH].split(BATCH) for tensor in tensors.values()]
    for values in zip(*parts, strict=True):
        yield dict(zip(tensors, values, strict=True))


class Rows(Dataset):  # type: ignore[type-arg]
    """One row at a time, as the first tutorial has it."""

    def __init__(self, path: Path, form: Columns) -> None:
        self.tensors = form.of(pyarrow.parquet.read_table(path))

    def __len__(self) -> int:
        return len(self.tensors[SALES])

    def __getitem__(self, row: int) -> Batch:
        return {name: values[row] for name, values in self.tensors.items()}


class Taken(Dataset):  # type: ignore[type-arg]
    """A buffer by its number: rows of one permutation, taken together."""

    def __init__(self, path: Path, form: Columns) -> None:
        self.tensors = form.of(pyarrow.parquet.read_table(path))
        self.order = torch.randperm(len(self.tensors[SALES])).split(BUFFER)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> Batch:
        return {name: values.index_select(0, self.order[number]) for name, values in self.tensors.items()}


def taken_at_once(path: Path, form: Columns) -> Iterator[Batch]:
    """All rows in the order of one permutation: a second copy of everything, and mini-batches are views of it."""
    tensors = form.of(pyarrow.parquet.read_table(path))
    order = torch.randperm(len(tensors[SALES]))
    return steps({name: values.index_select(0, order) for name, values in tensors.items()})


def arrow_taken(path: Path, form: Columns) -> Iterator[Batch]:
    """pyarrow's own ``take``, a mini-batch at a time."""
    table = pyarrow.parquet.read_table(path).combine_chunks()
    order = numpy.random.default_rng(0).permutation(table.num_rows)
    for start in range(0, table.num_rows - BATCH + 1, BATCH):
        yield form.of(table.take(order[start : start + BATCH]))


class Groups(IterableDataset):  # type: ignore[type-arg]
    """Buffers of row groups in any order, the rows of each mixed, by ``iter_batches``."""

    def __init__(self, path: Path, form: Columns) -> None:
        self.path, self.form = path, form

    def __iter__(self) -> Iterator[Batch]:
        file = pyarrow.parquet.ParquetFile(self.path)
        info = get_worker_info()
        first, workers = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(file.num_row_groups, generator=torch.Generator().manual_seed(0))
        for batch in file.iter_batches(BUFFER, row_groups=order[first::workers].tolist()):
            tensors = self.form.of(batch)
            mixed = torch.randperm(batch.num_rows)
            yield {name: values.index_select(0, mixed) for name, values in tensors.items()}


def ours(path: Path, form: str, shuffle: Any) -> Loader:
    return Loader(path, BATCH, shuffle=shuffle, buffer=BUFFER, groups=MATRICES if form == "matrices" else None)


def cut(buffers: Iterable[Batch]) -> Iterator[Batch]:
    for buffer in buffers:
        yield from steps(buffer)


def workers(data: Any) -> Any:
    """Made by two processes. What goes from process to process are buffers, because each tensor on its way costs."""
    return cut(DataLoader(data, None, num_workers=2))


def contestants(path: Path, form: str) -> dict[str, Callable[[], Batches]]:
    """Everybody whose mini-batches have this form."""
    way = FORMS[form]
    return {
        "deuteron, full": lambda: ours(path, form, "full"),
        "deuteron, buffer": lambda: ours(path, form, "buffer"),
        "take by permutation": lambda: cut(Taken(path, way)),
        "take by permutation, 2 workers": lambda: workers(Taken(path, way)),
        "take by permutation, all at once": lambda: taken_at_once(path, way),
        "take by permutation, pyarrow": lambda: arrow_taken(path, way),
        "iter_batches": lambda: cut(Groups(path, way)),
        "iter_batches, 2 workers": lambda: workers(Groups(path, way)),
    }


def epoch(make: Callable[[], Batches]) -> int:
    """Nanoseconds."""
    start = time.monotonic_ns()
    for _ in make():
        pass
    return time.monotonic_ns() - start


def by_row(path: Path, form: str, rows: int) -> int:
    """Nanoseconds of an epoch, one row at a time: of opening, and of all rows as some of them take."""
    start = time.monotonic_ns()
    data = Rows(path, FORMS[form])
    opened = time.monotonic_ns()
    seen = 0
    for batch in DataLoader(data, BATCH, shuffle=True):
        seen += len(batch[SALES])
        if seen >= FEW:
            break
    return opened - start + (time.monotonic_ns() - opened) * rows // seen


def check(who: str, form: str, make: Callable[[], Batches], rows: int, sales: float) -> None:
    """All rows but those of a last, smaller mini-batch of somebody's parts are seen, in the form that was asked for."""
    seen, total = 0, 0.0
    names = [*MATRICES, SALES] if form == "matrices" else [*CATEGORICAL, *CONTINUOUS, SALES]
    for batch in make():
        if list(batch) != names or any(len(values) != BATCH for values in batch.values()):
            fail(f"{who} has made a mini-batch of { ({name: values.shape for name, values in batch.items()}) }")
        seen += BATCH
        total += float(batch[SALES].sum(dtype=torch.float64))
    missing = rows - seen
    if not 0 <= missing < BATCH * (-(-rows // BUFFER) + 2) or abs(total / seen - sales / rows) > 0.05 * sales / rows:
        fail(f"{who} has seen {seen} of {rows} rows, with sales of {total} of {sales}")


def anonymous() -> int:
    """Memory of this process that no file backs, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))


def load(path: str, shuffle: Any, rows: int) -> None:
    """Prints the bytes of memory that each of three epochs has needed at most, where a tenth of all may be kept."""
    limit = rows * WIDTH // 10
    before = anonymous()
    loader = Loader(path, BATCH, shuffle=shuffle, buffer=rows // 10, memory=limit, groups=MATRICES)
    for _ in range(EPOCHS):
        most = anonymous()
        for step, _ in enumerate(loader):
            if step % 16 == 0:
                most = max(most, anonymous())
        print(most - before)


def needed(path: Path, shuffle: str, rows: int) -> list[int]:
    """The same, by a process of its own."""
    argv = [sys.executable, __file__, "memory", str(path), shuffle, str(rows)]
    found = subprocess.run(argv, stdout=subprocess.PIPE, check=True, text=True).stdout
    return [int(line) for line in found.split()]


def measure(folder: Path, repetitions: int, rows: int) -> dict[tuple[str, str, int], list[int]]:
    """All repetitions of all contestants."""
    times: dict[tuple[str, str, int], list[int]] = {}

    def note(what: str, who: str, took: int) -> None:
        times.setdefault((what, who, rows), []).append(took)
        print(f"{what}, {who}: {took / 1e9:.3f} s, {rows / took * 1e3:.2f} million rows/s", flush=True)

    path = folder / "rossmann.parquet"
    sales = write(path, rows)
    for form in FORMS:
        everybody = list(contestants(path, form).items())
        for who, make in everybody:
            check(who, form, make, rows, sales)
        for repetition in range(repetitions):
            # Back and forth, so that nobody always runs after the same neighbour.
            for who, make in everybody if repetition % 2 == 0 else reversed(everybody):
                note(form, who, epoch(make))
            note(form, "row-indexed Dataset", by_row(path, form, rows))
    many = 4 * rows
    write(path, many)
    for _ in range(repetitions):
        for shuffle in ("full", "buffer"):
            for number, most in enumerate(needed(path, shuffle, many), 1):
                times.setdefault(("memory", f"{shuffle}, epoch {number}", many * WIDTH), []).append(most)
                print(f"memory, {shuffle}, epoch {number}: {most / 1e6:.1f} of {many * WIDTH / 1e6:.1f} MB", flush=True)
    path.unlink()
    return times


def main() -> None:
    if sys.argv[1] == "memory":
        path, shuffle, rows = sys.argv[2:]
        load(path, shuffle, int(rows))
        return
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    repetitions, rows = map(int, sys.argv[3:])
    folder.mkdir(exist_ok=True)
    # What pyarrow has read cannot be written, and nobody here does.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    times = measure(folder, repetitions, rows)
    lines = [json.dumps([what, who, size, found]) for (what, who, size), found in times.items()]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
