"""``deuteron.data``: from files and streams to tensors."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deuteron
import pytest
from deuteron.data import Loader
from deuteron.errors import DataError, InvalidError, TaskFailedError, TimedOutError
from ranks import devices

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.timeout(60)


def numbered(rows: int) -> Any:
    return pyarrow.table({"id": numpy.arange(rows), "half": (numpy.arange(rows) / 2).astype("float32")})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """1,000 rows in three files."""
    table = numbered(1000)
    for index, start in enumerate(range(0, 1000, 400)):
        parquet.write_table(table.slice(start, 400), tmp_path / f"{index}.parquet", row_group_size=150)
    return tmp_path


def flat(steps: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(steps))


def ids(loader: Loader) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def test_a_loader_hands_out_tensors_of_its_own(folder: Path) -> None:
    loader = Loader(folder, batch_size=100, shuffle="full", seed=1)
    assert (len(loader), loader.rows) == (10, 1000)
    assert loader.columns["half"].dtype == "float32"
    batches = list(loader)
    assert all(batch["id"].dtype == torch.int64 and batch["half"].shape == (100,) for batch in batches)
    assert all(torch.equal(batch["half"], batch["id"] / 2) for batch in batches)
    together = torch.cat([batch["id"] for batch in batches])
    assert not torch.equal(together, together.sort().values)
    assert torch.equal(together.sort().values, torch.arange(1000))
    # What is handed out stays, whatever the loader does afterwards, and belongs to whoever has it.
    first = batches[0]["id"].clone()
    del loader, together
    gc.collect()
    batches[0]["half"] += 1
    assert torch.equal(batches[0]["id"], first)


def test_numpy_sees_the_same(folder: Path) -> None:
    tensors, arrays = (
        list(Loader(folder, 100, shuffle="buffer", buffer=200, seed=5, library=library))
        for library in ("torch", "numpy")
    )
    assert isinstance(arrays[0]["id"], numpy.ndarray) and arrays[0]["id"].flags.writeable
    for tensor, array in zip(tensors, arrays, strict=True):
        assert numpy.array_equal(tensor["id"].numpy(), array["id"])


@pytest.mark.parametrize("shuffle", ["full", "buffer", None])
def test_ranks_share_the_rows(folder: Path, shuffle: Any) -> None:
    seen = [ids(Loader(folder, 25, shuffle=shuffle, rank=rank, size=4)) for rank in range(4)]
    assert {len(steps) for steps in seen} == {10}
    rows = [row for steps in seen for step in steps for row in step]
    assert sorted(rows) == list(range(1000))
    padded = [ids(Loader(folder, 64, shuffle=shuffle, rank=rank, size=40, rest="pad")) for rank in range(40)]
    assert {len(steps) for steps in padded} == {1}
    assert {row for steps in padded for step in steps for row in step} == set(range(1000))


def test_a_full_shuffle_is_the_same_for_any_number_of_ranks(folder: Path) -> None:
    alone = ids(Loader(folder, 100, shuffle="full", seed=9))
    for size in (2, 4):
        ranks = [ids(Loader(folder, 100 // size, shuffle="full", seed=9, rank=rank, size=size)) for rank in range(size)]
        assert [flat(step) for step in zip(*ranks, strict=True)] == alone


@pytest.mark.parametrize("shuffle", ["full", "buffer", None])
def test_an_epoch_goes_on_where_it_was(folder: Path, shuffle: Any) -> None:
    def make() -> Loader:
        return Loader(folder, 50, shuffle=shuffle, buffer=200, seed=2)

    loader = make()
    loader.set_epoch(3)
    whole = ids(loader)
    assert loader.epoch == 4
    loader.set_epoch(3)
    for step, _ in enumerate(loader, 1):
        if step == 7:
            state = loader.state_dict()
            break
    assert (state["epoch"], state["step"]) == (3, 7)
    other = make()
    other.load_state_dict(state)
    other.set_epoch(3)
    assert ids(other) == whole[7:]
    assert (ids(other) == whole) == (shuffle is None)
    # Who breaks off and asks again gets the whole epoch.
    again = make()
    again.set_epoch(3)
    next(iter(again))
    assert ids(again) == whole
    with pytest.raises(InvalidError, match="another order: its seed is 2, here it is 3"):
        Loader(folder, 50, shuffle=shuffle, buffer=200, seed=3).load_state_dict(state)
    other = Loader(folder, 50, shuffle=shuffle, buffer=300, seed=2)
    if shuffle == "buffer":
        with pytest.raises(InvalidError, match="another order: its buffer is 200, here it is 300"):
            other.load_state_dict(state)
    else:
        other.load_state_dict(state)
    with pytest.raises(InvalidError, match="there is no step 21 of 20 in epoch 3"):
        make().load_state_dict({**state, "step": 21})


def test_a_state_of_a_full_shuffle_fits_other_ranks(folder: Path) -> None:
    alone = Loader(folder, 100, shuffle="full")
    batches = iter(alone)
    for _ in range(4):
        next(batches)
    rest = [batch["id"].tolist() for batch in batches]
    alone.load_state_dict({**alone.state_dict(), "epoch": 0, "step": 4})
    halves = []
    for rank in range(2):
        half = Loader(folder, 50, shuffle="full", rank=rank, size=2)
        half.load_state_dict({**alone.state_dict()})
        halves.append(ids(half))
    assert [a + b for a, b in zip(*halves, strict=True)] == rest
    with pytest.raises(InvalidError, match="that of 1 ranks with 100 rows each, here it is 2 with 60"):
        Loader(folder, 60, shuffle="full", rank=0, size=2).load_state_dict(alone.state_dict())


def test_types_have_stated_rules() -> None:
    import datetime

    table = pyarrow.table(
        {
            "truth": [True, False, None],
            "day": [datetime.date(1970, 1, 2), None, datetime.date(1970, 1, 4)],
            "time": pyarrow.array([1, 2, 3], pyarrow.timestamp("ms")),
            "text": pyarrow.array(["b", "a", "b"]).dictionary_encode(),
            "list": pyarrow.array([[1, 2], [3, 4], [5, 6]], pyarrow.list_(pyarrow.int16(), 2)),
            "tensor": [numpy.full((2, 2), index, "float32").tobytes() for index in range(3)],
            "small": pyarrow.array([1.5, 2.5, None], pyarrow.float64()),
        }
    )
    loader = Loader(
        table,
        3,
        columns={**dict.fromkeys(table.column_names), "small": torch.float32},
        fill={"truth": True, "day": -1, "small": 0},
        tensors={"tensor": ("float32", (2, 2))},
    )
    (batch,) = loader
    assert {name: values.tolist() for name, values in batch.items()} == {
        "truth": [True, False, True],
        "day": [1, -1, 3],
        "time": [1, 2, 3],
        "text": [1, 0, 1],
        "list": [[1, 2], [3, 4], [5, 6]],
        "tensor": [[[value] * 2] * 2 for value in (0.0, 1.0, 2.0)],
        "small": [1.5, 2.5, 0.0],
    }
    assert (batch["truth"].dtype, batch["small"].dtype) == (torch.bool, torch.float32)
    assert (loader.columns["day"].unit, loader.columns["time"].unit) == ("day", "ms")
    assert loader.columns["text"].categories == ["a", "b"]


def test_streams_of_pandas_and_of_batches() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": range(10)})
    assert ids(Loader(frame, 5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    # A stream that Python makes piece by piece.
    table = numbered(10)
    pieces = (batch for batch in table.to_batches(max_chunksize=3))
    reader = pyarrow.RecordBatchReader.from_batches(table.schema, pieces)
    assert ids(Loader(reader, 5, columns=["id"])) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]

    def broken() -> Any:
        yield table.to_batches()[0]
        raise RuntimeError("the well has run dry")

    with pytest.raises(DataError, match="the well has run dry"):
        Loader(pyarrow.RecordBatchReader.from_batches(table.schema, broken()), 5)


def test_filters_and_transforms(folder: Path) -> None:
    loader = Loader(
        folder,
        10,
        columns=["id"],
        filters=[("half", ">=", 100), ("id", "in", [200, 201, *range(500, 518)])],
        shuffle="full",
        transform=lambda batch: batch["id"].sum().item(),
    )
    assert loader.rows == 20
    assert sum(loader) == 200 + 201 + sum(range(500, 518))


def test_csv_and_arrow_files(tmp_path: Path) -> None:
    from pyarrow import csv, feather

    csv.write_csv(numbered(100), tmp_path / "a.csv")
    feather.write_feather(numbered(100), tmp_path / "a.feather")
    for name in ("a.csv", "a.feather"):
        assert sorted(flat(ids(Loader(tmp_path / name, 10, shuffle="full")))) == list(range(100))
    with pytest.raises(DataError, match=r"a\.feather: it has another format than .*a\.csv"):
        Loader(tmp_path, 10)


def test_bad_input_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.parquet: there is no such file"):
        Loader(tmp_path / "none.parquet")
    with pytest.raises(InvalidError, match='there is no column "sales": there are id, half'):
        Loader(folder, columns=["sales"])
    with pytest.raises(InvalidError, match="1000 rows do not fill one step of 1 ranks with 1024 rows each"):
        Loader(folder)
    with pytest.raises(InvalidError, match='filter on column "id": it is Int64 and cannot be compared with "x"'):
        Loader(folder, 10, filters=[("id", "==", "x")])
    with pytest.raises(InvalidError, match="dict is no source of rows"):
        Loader({"id": [1]})
    with pytest.raises(InvalidError, match='there is no type "decimal" of tensors'):
        Loader(folder, 10, columns={"id": "decimal"})
    whole = (folder / "0.parquet").read_bytes()
    (folder / "1.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"1\.parquet: not a whole Parquet file .*: write it again"):
        Loader(folder, 10)
    parquet.write_table(numbered(10).drop_columns("half"), folder / "1.parquet")
    with pytest.raises(DataError, match=r'1\.parquet, column "half": it is missing, and the first file has it'):
        Loader(folder, 10)
    parquet.write_table(
        pyarrow.table({"half": [0.5], "id": ["a"]}).cast(
            pyarrow.schema([("half", pyarrow.float32()), ("id", pyarrow.string())])
        ),
        folder / "1.parquet",
    )
    with pytest.raises(DataError, match=r'1\.parquet, column "id": it is Utf8, and Int64 in the first file'):
        Loader(folder, 10)
    for shuffle in ("full", None):
        with pytest.raises(InvalidError, match="there are no rows: the source is empty, or its filters leave none"):
            Loader(numbered(0), 10, shuffle=shuffle)
    numbers = pyarrow.table({"x": [1.0, float("nan")]})
    with pytest.raises(DataError, match='column "x": row 1 is NaN: filter it out'):
        Loader(numbers, 2, nan="error")
    nulls = pyarrow.table({"x": [1, None, 3]})
    with pytest.raises(DataError, match='column "x": row 1 is null: name what stands in for it'):
        Loader(nulls, 3)
    lists = pyarrow.table({"x": [[1], [2, 3]]})
    with pytest.raises(InvalidError, match=r'column "x": it is List.*, which is no tensor'):
        Loader(lists, 1)
    with pytest.raises(DataError, match="cannot make a spool in /nowhere: name another folder"):
        Loader(numbered(10), 5, memory=0, spool="/nowhere")
    unseen = pyarrow.table({"x": ["a", "b"]})
    with pytest.raises(DataError, match='column "x": "b" is not among its categories'):
        Loader(unseen, 2, categories={"x": ["a"]})
    (batch,) = Loader(unseen, 2, categories={"x": ["a"]}, fill={"x": -1})
    assert batch["x"].tolist() == [0, -1]


def test_columns_in_the_names_of_folders_are_not_lost(tmp_path: Path) -> None:
    for year in (2023, 2024):
        (tmp_path / f"year={year}").mkdir()
        parquet.write_table(numbered(10), tmp_path / f"year={year}" / "a.parquet")
    with pytest.raises(DataError, match="year=2023: columns in the names of folders are not read"):
        Loader(tmp_path, 10)
    assert flat(ids(Loader(tmp_path / "year=2023", 10))) == list(range(10))
    dataset = pytest.importorskip("pyarrow.dataset")
    (batch, _) = Loader(dataset.dataset(tmp_path, partitioning="hive").scanner().to_reader(), 10)
    assert batch["year"].tolist() == [2023] * 10


@pytest.mark.parametrize("shuffle", ["full", "buffer", None])
def test_groups_are_matrices(folder: Path, shuffle: Any) -> None:
    rows = 1000
    text = [f"{row % 7}" for row in range(rows)]
    columns = {"a": numpy.arange(rows), "y": numpy.arange(rows) / 4, "text": text, "b": numpy.arange(rows) + 5}
    parquet.write_table(pyarrow.table(columns), folder / "0.parquet", row_group_size=300)
    for library in ("torch", "numpy"):
        loader = Loader(
            folder / "0.parquet", 100, shuffle=shuffle, groups={"x": ["b", "a", "text"]}, library=library, rest="pad"
        )
        assert list(loader.columns) == ["a", "y", "text", "b"]
        for batch in loader:
            assert list(batch) == ["x", "y"] and batch["x"].shape == (100, 3)
            b, a, numbers = batch["x"].T
            assert (b == a + 5).all() and (batch["y"] == a / 4).all() and (numbers == a % 7).all()
    wrong = {
        "y": (["a"], 'there are two tensors "y": name the group otherwise'),
        "x": (["a", "y"], 'group "x": column "y" is float64, and "a" is int64: name one type'),
        "z": (["a", "a"], 'group "z": column "a" can be in one group once'),
        "none": ([], 'group "none": it has no columns'),
        "other": (["c"], 'group "other": there is no column "c" among those that are wanted'),
    }
    for name, (members, message) in wrong.items():
        with pytest.raises(InvalidError, match=message):
            Loader(folder / "0.parquet", 100, groups={name: members})


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"compression": "zstd", "data_page_version": "2.0", "data_page_size": 5000},
        {"compression": "none", "use_dictionary": False, "data_page_size": 3000},
        {"dictionary_pagesize_limit": 2000, "data_page_size": 3000},
        {"use_dictionary": False, "use_byte_stream_split": True},
    ],
)
def test_numbers_are_read_however_they_are_written(tmp_path: Path, way: dict[str, Any]) -> None:
    rows = 30_000
    random = numpy.random.default_rng(0)
    types = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"]
    columns = {f"{kind}": random.integers(0, 100, rows).astype(kind) for kind in types}
    columns["runs"] = numpy.repeat(random.integers(-5, 5, rows // 100), 100)
    columns["many"] = random.integers(-(2**62), 2**62, rows)
    columns["id"] = numpy.arange(rows)
    holes = pyarrow.array(numpy.arange(rows), mask=numpy.arange(rows) == 20_001)
    for name, table in (("whole", pyarrow.table(columns)), ("holes", pyarrow.table({**columns, "holes": holes}))):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(table, path, row_group_size=14_000, **way)
        expected = {**columns, "holes": holes.fill_null(-1).to_numpy()}
        for shuffle, memory in (("full", 0), ("full", 1 << 30), ("buffer", 0), (None, 0)):
            seen = []
            fill = {"holes": -1} if name == "holes" else {}
            for batch in Loader(path, 1000, shuffle=shuffle, buffer=9000, memory=memory, fill=fill, library="numpy"):
                seen.append(batch["id"])
                for column, values in batch.items():
                    assert values.dtype == expected[column].dtype
                    assert numpy.array_equal(values, expected[column][batch["id"]]), (column, shuffle)
            assert numpy.array_equal(numpy.sort(numpy.concatenate(seen)), numpy.arange(rows))


def test_a_fork_does_not_wait_for_threads_that_it_does_not_have(folder: Path) -> None:
    batches = iter(Loader(folder, 10))
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except InvalidError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# Prints the memory that each epoch has needed at most, beyond what there was before.
_EPOCHS = """
import sys
from pathlib import Path
import torch
from deuteron.data import Loader

def anonymous():
    status = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))

path, shuffle, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
before = anonymous()
loader = Loader(path, 1024, shuffle=shuffle, buffer=rows // 10, memory=rows * 8, threads=2)
for _ in range(5):
    most = anonymous()
    for step, batch in enumerate(loader):
        if step % 20 == 0:
            most = max(most, anonymous())
    assert step + 1 == len(loader) == rows // 1024
    print(most - before)
"""


@pytest.mark.parametrize("shuffle", ["full", "buffer"])
def test_memory_is_bounded_and_flat(tmp_path: Path, shuffle: Any) -> None:
    # Ten numbers a row: ten times what may be kept, be it by bytes or by rows.
    rows = 2_000_000
    schema = pyarrow.schema([(f"x{index}", pyarrow.float64()) for index in range(10)])
    with parquet.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for group in range(20):
            values = numpy.random.default_rng(group).integers(0, 1000, (10, rows // 20)).astype("float64")
            writer.write_table(pyarrow.Table.from_arrays(list(values), schema=schema))
    argv = [sys.executable, "-c", _EPOCHS, str(tmp_path), shuffle, str(rows)]
    child = subprocess.run(argv, capture_output=True, text=True, timeout=55)
    assert child.returncode == 0, child.stderr
    most = [int(line) for line in child.stdout.split()]
    limit = rows * 8
    # Each of two threads has a row group's pages and some packed parts, and the allocator keeps something for each.
    assert len(most) == 5 and max(most) < limit + (40 << 20) < rows * 80 / 2, most
    assert max(most[2:]) < max(most[:2]) + (8 << 20), most


def on_a_small_disk(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python where ``folder`` is a file system of its own with room for a megabyte."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    mount = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    argv = ["unshare", "-rm", "sh", "-c", mount, "sh", str(folder), sys.executable, code]
    return subprocess.run(argv, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("source", ["files", "stream"])
def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, source: str) -> None:
    small, files = tmp_path / "small", tmp_path / "files"
    small.mkdir()
    files.mkdir()
    parquet.write_table(numbered(500_000), files / "a.parquet")
    opened = repr(str(files)) if source == "files" else f"parquet.read_table({str(files)!r})"
    code = f"""
import os, sys
from pyarrow import parquet
from deuteron.data import Loader
from deuteron.errors import DataError

def free():
    about = os.statvfs(sys.argv[1])
    return about.f_bfree

before = free()
try:
    Loader({opened}, 1000, shuffle="full", memory=0, spool=sys.argv[1])
except DataError as error:
    print(error)
assert os.listdir(sys.argv[1]) == [] and free() == before
list(Loader({opened}, 1000, shuffle="full", spool=sys.argv[1]))
"""
    child = on_a_small_disk(code, small)
    assert child.returncode == 0, child.stderr
    wanted = f"the spool in {small}: No space left on device (os error 28): name a folder with room for all rows"
    assert wanted in child.stdout


def test_importing_is_light() -> None:
    code = "import sys, deuteron.data; print([name for name in ('torch', 'numpy', 'pyarrow') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def _rows_of_this_rank(folder: str) -> list[int]:
    return flat(ids(Loader(folder, 100, shuffle="full")))


def test_ranks_of_a_gang_know_their_share(folder: Path) -> None:
    shares = deuteron.run(_rows_of_this_rank, args=(str(folder),), num_proc=2)
    assert sorted(shares[0] + shares[1]) == list(range(1000))


def _plus_one(batch: Any) -> Any:
    import pyarrow.compute

    return pyarrow.RecordBatch.from_arrays([pyarrow.compute.add(batch["id"], 1)], ["id"])


def _scaled(batch: Any, factor: int) -> Any:
    return pyarrow.table({"id": [value * factor for value in batch["id"].to_pylist()]})


def _fails_at_30(batch: Any) -> Any:
    if 30 in batch["id"].to_pylist():
        raise ValueError("thirty")
    return batch


def _dies_at_30(batch: Any) -> Any:
    if 30 in batch["id"].to_pylist():
        os.kill(os.getpid(), 9)
    return batch


def test_a_map_keeps_the_order() -> None:
    results = deuteron.map_batches(_plus_one, numbered(1000), num_proc=2, batch_size=10)
    assert pyarrow.table(results)["id"].to_pylist() == list(range(1, 1001))
    scaled = deuteron.map_batches(_scaled, numbered(20), num_proc=2, batch_size=3, setup=lambda: 7)
    assert flat(batch["id"].to_pylist() for batch in scaled) == list(range(0, 140, 7))


def test_a_map_reads_no_faster_than_its_results_are_taken() -> None:
    table = numbered(1000)
    read = 0

    def pieces() -> Any:
        nonlocal read
        for batch in table.to_batches(max_chunksize=10):
            read += 1
            yield batch

    results = iter(deuteron.map_batches(_plus_one, pyarrow.RecordBatchReader.from_batches(table.schema, pieces()), 2))
    next(results)
    assert read <= 6
    results.close()


def test_an_error_of_a_map_names_the_batch() -> None:
    with pytest.raises(TaskFailedError, match=r"batch 3 failed in process \d: ValueError: thirty"):
        list(deuteron.map_batches(_fails_at_30, numbered(100), num_proc=2, batch_size=10))
    with pytest.raises(TaskFailedError, match=r"process \d was killed by signal 9; it had batches .*3"):
        list(deuteron.map_batches(_dies_at_30, numbered(100), num_proc=2, batch_size=10))


def _renames_at_30(batch: Any) -> Any:
    return batch.rename_columns(["other"]) if 30 in batch["id"].to_pylist() else batch


def test_a_map_that_cannot_be_set_up_or_changes_its_columns_says_so() -> None:
    def fails() -> None:
        raise OSError("no model here")

    with pytest.raises(TaskFailedError, match="process 0 could not be set up: OSError: no model here"):
        list(deuteron.map_batches(_scaled, numbered(100), num_proc=1, batch_size=10, setup=fails))
    with pytest.raises(DataError, match="other columns for batch 3 than before: other: int64; not id: int64"):
        list(deuteron.map_batches(_renames_at_30, numbered(100).select(["id"]), num_proc=2, batch_size=10))


_kept: list[Any] = []


def _keeps(batch: Any) -> Any:
    _kept.append(batch)
    return pyarrow.table({"total": [sum(sum(one["id"].to_pylist()) for one in _kept)]})


def test_batches_that_are_kept_stay_as_they_are() -> None:
    """Memory is written again only when nobody looks at it, on either side."""
    results = list(deuteron.map_batches(_keeps, numbered(1000), num_proc=1, batch_size=10))
    totals = [end * (end - 1) // 2 for end in range(10, 1001, 10)]
    assert flat(batch["total"].to_pylist() for batch in results) == totals
    same = list(deuteron.map_batches(lambda batch: batch, numbered(1000), num_proc=2, batch_size=10))
    assert flat(batch["id"].to_pylist() for batch in same) == list(range(1000))


def _sleeps(batch: Any) -> Any:
    time.sleep(60)
    return batch


def test_a_map_can_be_given_a_limit() -> None:
    with pytest.raises(TimedOutError, match=r"no batch has come back for 1 s: process 0 has batches 0 and 1"):
        list(deuteron.map_batches(_sleeps, numbered(100), num_proc=1, batch_size=10, timeout=1))


def test_a_map_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    list(deuteron.map_batches(_plus_one, numbered(100), num_proc=1, batch_size=10, progress=True))
    assert "100/100" in capsys.readouterr().err


def _of_this_task(partition: Any, factor: int) -> tuple[int, list[int]]:
    loaded = flat(batch["id"].tolist() for batch in Loader(partition, 1, rank=0, size=1))
    assert sorted(loaded) == sorted(partition.to_table()["id"].to_pylist())
    return deuteron.context().rank, [factor * value for value in loaded]


def test_a_barrier_stage_has_all_rows() -> None:
    table = pyarrow.Table.from_batches(numbered(100).to_batches(max_chunksize=7))
    results = deuteron.barrier(table, num_tasks=3).map_partitions(_of_this_task, args=(2,))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert sorted(len(rows) for _, rows in results) == [33, 33, 34]
    assert sorted(flat(rows for _, rows in results)) == list(range(0, 200, 2))


def _rows_and_devices(partition: Any) -> tuple[int, list[int]]:
    return partition.num_rows, [device.index for device in deuteron.context().accelerators()]


def test_a_barrier_stage_has_accelerators(tmp_path: Path) -> None:
    stage = deuteron.barrier(numbered(100), num_tasks=2).accelerated(by="/gpu", per_task=2)
    results = stage.map_partitions(_rows_and_devices, discovery_script=devices(tmp_path, 4))
    assert results == [(50, [0, 1]), (50, [2, 3])]
