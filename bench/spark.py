"""Spark's side of the benchmark: gangs in one warm session, with us and with what Spark brings itself.

usage: spark.py OUT FOLDER REPETITIONS ROWS

Writes OUT, one line of JSON for each contestant: what is measured, who, bytes, and nanoseconds by repetition. A wrong
result ends the run. The cluster is Spark's own standalone one on this machine: a master, and two workers with one
core each, so that the two ranks are in two executors. Contestants take turns in each repetition.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic_ns
from typing import Any

import deuteron.spark
import pyspark
from deuteron.errors import TaskFailedError
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import DataFrame, SparkSession

RANKS = 2
# Columns of `table`, with the lengths of text and tensor.
BYTES_OF_A_ROW = 8 + 8 + 4 + 32 + 512

Times = dict[tuple[str, str], list[int]]


def fail(what: str) -> None:
    """Ends the run."""
    raise SystemExit(f"spark: {what}")


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A master and its workers; their address."""
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    port = str(free_port())
    url = f"spark://127.0.0.1:{port}"
    common = ["--host", "127.0.0.1", "--webui-port", "0"]
    plans = [["master.Master", *common, "--port", port]]
    plans += [
        ["worker.Worker", *common, "-c", "1", "-m", "3g", "-d", str(folder / f"worker-{number}"), url]
        for number in range(RANKS)
    ]
    children = []
    try:
        for name, *words in plans:
            with (folder / f"{name}.log").open("ab") as log:
                argv = [str(program), f"org.apache.spark.deploy.{name}", *words]
                children.append(subprocess.Popen(argv, stdout=log, stderr=log))
        yield url
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()


@contextlib.contextmanager
def connected(url: str, folder: Path) -> Iterator[SparkSession]:
    """A session with both executors."""
    settings = {
        "spark.cores.max": RANKS,
        "spark.executor.cores": 1,
        "spark.executor.memory": "2g",
        "spark.local.dir": folder / "local",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.artifact.isolation.enabled": "false",
        "spark.sql.warehouse.dir": folder / "warehouse",
    }
    builder = SparkSession.builder.master(url).appName("bench")
    for name, value in settings.items():
        builder = builder.config(name, str(value))
    session = builder.getOrCreate()
    try:
        session.sparkContext.setLogLevel("ERROR")
        yield session
    finally:
        session.stop()


def timed(call: Callable[[], object]) -> int:
    """Nanoseconds that a call takes."""
    start = monotonic_ns()
    call()
    return monotonic_ns() - start


def with_us() -> float:
    """What both gangs do: start, one all-reduce, return."""
    import deuteron.torch as hvd
    import torch

    hvd.init()
    return float(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum))


def with_torch() -> float:
    """The same in PyTorch's words."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return float(value)


def run_us() -> None:
    """Our gang."""
    if (found := deuteron.spark.run(with_us, num_proc=RANKS, verbose=0)) != [3.0, 3.0]:
        fail(f"deuteron.spark.run has returned {found}")


def run_torch() -> None:
    """Spark's."""
    distributor = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
    if (found := distributor.run(with_torch)) != 3.0:
        fail(f"TorchDistributor has returned {found}")


def bare_stage(session: SparkSession) -> None:
    """A barrier stage that does nothing."""

    def nothing(batches: Iterable[Any]) -> Iterator[Any]:
        yield from batches

    frame = session.range(RANKS, numPartitions=RANKS).mapInArrow(nothing, "id long", barrier=True)
    if len(frame.collect()) != RANKS:
        fail("the barrier stage has lost its rows")


def imports() -> None:
    """What a rank that uses PyTorch cannot do without, on all ranks at once.

    They leave without Python's exit, which takes half a second with torch, since our ranks leave nearly so.
    """
    program = "import os, torch; os._exit(0)"
    children = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(RANKS)]
    if any([child.wait() for child in children]):
        fail("torch cannot be imported")


def kill(folder: Path) -> int:
    """Nanoseconds from the end of a rank to the exception in this process."""
    note = folder / "killed"

    def work(note: str) -> None:
        context = deuteron.context()
        context.barrier()
        if context.rank == 1:
            Path(note).write_text(str(time.monotonic_ns()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    try:
        deuteron.spark.run(work, args=(str(note),), num_proc=RANKS, verbose=0)
    except TaskFailedError as error:
        took = monotonic_ns() - int(note.read_text())
        if error.rank != 1 or "signal 9" not in str(error):
            fail(f"the wrong rank is named: {error}")
        return took
    fail("nobody has missed a rank that was killed")
    return 0


def table(session: SparkSession, rows: int) -> DataFrame:
    """Numbers, texts and tensors in the executors' memory."""
    frame = session.range(0, rows, 1, 4 * RANKS).selectExpr(
        "id",
        "sqrt(id) as label",
        "cast(id % 10 as int) as class",
        "md5(cast(id as string)) as text",
        "cast(repeat(md5(cast(id as string)), 16) as binary) as tensor",
    )
    frame = frame.persist()
    if frame.count() != rows:
        fail("the table has lost rows")
    return frame


def read(batches: Iterable[Any]) -> tuple[int, int]:
    """Looks at every byte; how many rows there are, and the sum of their numbers."""
    import numpy

    rows, numbers, bits = 0, 0, 0
    for batch in batches:
        for column in batch.columns:
            for buffer in column.buffers():
                if buffer is not None:
                    bits ^= int(numpy.bitwise_xor.reduce(numpy.frombuffer(buffer, "u8", buffer.size // 8)))
        rows += batch.num_rows
        # Arrow's own `to_numpy` imports pandas, which would be what is measured in a process that has just begun.
        numbers += int(numpy.from_dlpack(batch.column("id")).sum())
    return rows, numbers


def drain(frame: DataFrame) -> list[tuple[int, int]]:
    """Spark's own way to show rows to Python, in equally many tasks."""

    def work(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow

        rows, numbers = read(batches)
        yield pyarrow.RecordBatch.from_pydict({"rows": [rows], "numbers": [numbers]})

    frame = frame.repartition(RANKS).mapInArrow(work, "rows long, numbers long")
    return [(row.rows, row.numbers) for row in frame.collect()]


def epochs(partition: deuteron.spark.Partition) -> tuple[int, int, int, int]:
    """Rows, the sum of their numbers, when the first epoch has ended, and nanoseconds of the second."""
    found = read(partition)
    first = time.monotonic_ns()
    if read(partition) != found:
        raise ValueError("the second epoch has seen other rows than the first")
    return *found, first, time.monotonic_ns() - first


def check(frame: DataFrame, rows: int, found: list[tuple[int, int]]) -> None:
    """All rows have been seen, once."""
    if [sum(each) for each in zip(*found, strict=True)] != [rows, rows * (rows - 1) // 2]:
        fail(f"of {rows} rows the tasks have seen {found}: {frame}")


def measure(session: SparkSession, folder: Path, repetitions: int, rows: int) -> Times:
    """All repetitions of all contestants."""
    times: Times = {}

    def note(what: str, who: str, took: int) -> None:
        times.setdefault((what, who), []).append(took)
        print(f"{what}, {who}: {took / 1e9:.3f} s", flush=True)

    gangs: list[tuple[str, Callable[[], object]]] = [
        ("ours", run_us),
        ("bare stage", lambda: bare_stage(session)),
        ("imports", imports),
        ("TorchDistributor", run_torch),
    ]
    # Workers of Python are started, and classes loaded; a single repetition only checks that everything works.
    for _, call in gangs[:3] if repetitions > 1 else gangs[1:2]:
        call()
    for repetition in range(repetitions):
        # Back and forth, so that nobody always runs after the same neighbour.
        for who, call in gangs if repetition % 2 == 0 else reversed(gangs):
            note("gang", who, timed(call))
        note("kill", "ours", kill(folder))

    frame = table(session, rows)

    def ours() -> None:
        start = monotonic_ns()
        found = deuteron.spark.barrier(frame, RANKS).map_partitions(epochs, verbose=0)
        note("rows", "ours", monotonic_ns() - start - max(second for *_, second in found))
        note("rows", "first epoch", max(first for *_, first, _ in found) - start)
        note("rows", "second epoch", max(second for *_, second in found))
        check(frame, rows, [(count, numbers) for count, numbers, *_ in found])

    def theirs() -> None:
        start = monotonic_ns()
        found = drain(frame)
        note("rows", "mapInArrow", monotonic_ns() - start)
        check(frame, rows, found)

    if repetitions > 1:
        theirs()
        ours()
        for who in [who for who in times if who[0] == "rows"]:
            del times[who]
    for repetition in range(repetitions):
        for each in (ours, theirs) if repetition % 2 == 0 else (theirs, ours):
            each()
    frame.unpersist()
    return times


def main() -> None:
    """One session, everything in it."""
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    repetitions, rows = map(int, sys.argv[3:])
    folder.mkdir(exist_ok=True)
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    with cluster(folder) as url, connected(url, folder) as session:
        times = measure(session, folder, repetitions, rows)
    sizes = {"rows": rows * BYTES_OF_A_ROW}
    lines = [json.dumps([what, who, sizes.get(what, 0), found]) for (what, who), found in times.items()]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
