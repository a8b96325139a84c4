"""x + 1 over longs through a Python function in another process: batches with us, rows as engines have long sent them.

usage: maps.py OUT FOLDER REPETITIONS LONGS

Writes OUT, one line of JSON for each contestant: what is measured, who, bytes of the input, and nanoseconds by
repetition. FOLDER is not needed, and the start of processes is not counted. The row-at-a-time path is Spark's for
functions without Arrow: pickled lists of a hundred rows through a pipe, and a call for each row; it is measured over
fewer rows, and its time is scaled to all.
"""

import json
import multiprocessing
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deuteron
import pyarrow
import pyarrow.compute

#: Rows that are pickled together.
PICKLED = 100
#: Of how many longs one goes the slow way.
FEWER = 20


def plus_one(batch: Any) -> Any:
    """The function on batches."""
    return pyarrow.record_batch({"x": pyarrow.compute.add(batch["x"], 1)})


def plus_one_row(row: int) -> int:
    """The function on rows."""
    return row + 1


def serve(connection: Any) -> None:
    """The other process of the row-at-a-time path."""
    while rows := pickle.loads(connection.recv_bytes()):
        connection.send_bytes(pickle.dumps([plus_one_row(row) for row in rows]))


def batches(table: Any) -> int:
    """Nanoseconds of ours: from the first result, which shows that processes have started, on."""
    first = table.slice(0, 1)
    reader = pyarrow.RecordBatchReader.from_batches(table.schema, iter([*first.to_batches() * 2, *table.to_batches()]))
    results = iter(deuteron.map_batches(plus_one, reader, num_proc=2, progress=False))
    for _ in range(2):
        next(results)
    start = time.monotonic_ns()
    total = rows = 0
    for batch in results:
        rows += batch.num_rows
        total += pyarrow.compute.sum(batch["x"]).as_py()
    took = time.monotonic_ns() - start
    check(total, rows, table.num_rows)
    return took


def rows(table: Any) -> int:
    """Nanoseconds of the row-at-a-time path, for as many rows."""
    fewer = table.num_rows // FEWER
    longs = table["x"].slice(0, fewer).to_pylist()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    child.start()
    ours.send_bytes(pickle.dumps([0]))
    ours.recv_bytes()

    def answers() -> Iterator[list[int]]:
        for start in range(0, fewer, PICKLED):
            ours.send_bytes(pickle.dumps(longs[start : start + PICKLED]))
            # One list ahead, so that both processes work.
            if start:
                yield pickle.loads(ours.recv_bytes())
        yield pickle.loads(ours.recv_bytes())

    start = time.monotonic_ns()
    total = count = 0
    for answer in answers():
        count += len(answer)
        total += sum(answer)
    took = time.monotonic_ns() - start
    ours.send_bytes(pickle.dumps([]))
    child.join()
    check(total, count, fewer)
    return took * table.num_rows // fewer


def check(total: int, rows: int, expected: int) -> None:
    """All rows have come back, one larger."""
    if (rows, total) != (expected, expected * (expected + 1) // 2):
        raise SystemExit(f"maps: of {expected} rows {rows} have come back, with the sum {total}")


def main() -> None:
    """Both ways, in turns."""
    out = Path(sys.argv[1])
    repetitions, longs = map(int, sys.argv[3:])
    table = pyarrow.table({"x": pyarrow.array(range(longs))})
    times: dict[str, list[int]] = {"ours": [], "row at a time": []}
    batches(table)
    for _ in range(repetitions):
        for who, measure in (("ours", batches), ("row at a time", rows)):
            times[who].append(measure(table))
            print(f"map, {who}: {8 * longs / times[who][-1]:.3f} GB/s", flush=True)
    lines = [json.dumps(["map", who, 8 * longs, found]) for who, found in times.items()]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
