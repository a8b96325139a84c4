"""Beginnings, ends and forks; and ranks that do not come back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deuteron.torch as hvd
import pytest
import torch
from deuteron.errors import CollectiveError, InvalidError, NotInitializedError, PeerLostError
from ranks import PACKAGE, on_ranks

MESSAGE = r"has not been initialized; use hvd.init\(\)"


def test_before_init() -> None:
    tensor = torch.ones(2)
    calls: list[Callable[[], Any]] = [
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
        hvd.is_homogeneous,
        hvd.barrier,
        hvd.stop_timeline,
        lambda: hvd.start_timeline("timeline.json"),
        lambda: hvd.allreduce(tensor),
        lambda: hvd.allreduce(tensor.requires_grad_()),
        lambda: hvd.allreduce_async(tensor),
        lambda: hvd.allreduce_(tensor),
        lambda: hvd.grouped_allreduce([tensor]),
        lambda: hvd.allgather(tensor),
        lambda: hvd.broadcast(tensor, 0),
        lambda: hvd.alltoall(tensor),
        lambda: hvd.reducescatter(tensor),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        lambda: hvd.broadcast_parameters({"a": tensor}, 0),
    ]
    assert not hvd.is_initialized()
    for call in calls:
        with pytest.raises(NotInitializedError, match=MESSAGE):
            call()
    hvd.shutdown()


def test_what_was_built() -> None:
    assert [hvd.mpi_built(), hvd.mpi_enabled(), hvd.mpi_threads_supported()] == [False] * 3
    assert [hvd.gloo_built(), hvd.gloo_enabled()] == [True] * 2
    assert [hvd.nccl_built(), hvd.ddl_built(), hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built()] == [0] * 5


def python(script: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """A process that nobody has started as a task."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def test_alone() -> None:
    """Without a launcher a process is rank 0 of 1, and ends as it should with operations on their way."""
    done = python(
        "import torch, deuteron.torch as hvd\n"
        "hvd.init()\n"
        "assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)\n"
        "assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]\n"
        "assert hvd.is_homogeneous()\n"
        "for _ in range(100):\n"
        "    hvd.shutdown(); assert not hvd.is_initialized(); hvd.init(); hvd.init()\n"
        "    assert hvd.allgather(torch.ones(2)).tolist() == [1.0, 1.0]\n"
        "handles = [hvd.allreduce_async(torch.ones(100000)) for _ in range(50)]\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def _rounds(folder: str) -> tuple[int, ...]:
    for number in range(100):
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        total = hvd.allreduce(torch.tensor([number + hvd.rank()]), op=hvd.Sum)
        assert total.item() == 2 * number + 1
        some = hvd.add_process_set([number % 2]) if number % 10 == 0 else hvd.global_process_set
        if some.included():
            hvd.barrier(some)
        # Unnamed operations are counted from the beginning again, even if ranks were not at the same number.
        handle = hvd.allreduce_async(torch.ones(1)) if number % 3 == hvd.rank() else None
        # Who has its result leaves at once, and the others still get theirs.
        given = hvd.broadcast(torch.full((1 << 16,), float(hvd.rank())), number % 2, name="last")
        assert given.eq(number % 2).all()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        if handle is not None:
            with pytest.raises(InvalidError, match="no operation with handle"):
                hvd.synchronize(handle)
        with pytest.raises(NotInitializedError, match=MESSAGE):
            hvd.rank()
    hvd.init()
    timeline = Path(folder, "timeline.json")
    hvd.start_timeline(timeline, mark_cycles=True)
    hvd.barrier()
    hvd.allreduce(torch.ones(3), name="in the timeline")
    hvd.stop_timeline()
    if hvd.rank() == 0:
        assert any("allreduce.in the timeline" in str(event) for event in json.loads(timeline.read_text()))
    identity = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    hvd.shutdown()
    return identity


@pytest.mark.timeout(180)
def test_100_rounds(tmp_path: Path) -> None:
    assert on_ranks(2, _rounds, str(tmp_path)) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


def _in_fork(body: Callable[[], str]) -> str:
    """What a forked child says, or how it ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        text = body()
        os.write(write, text.encode())
        os.close(write)
        # As a script's end: with everything that is to run at exit.
        sys.exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    return text


def _refusal(call: Callable[[], Any]) -> str:
    try:
        return f"it returned {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, reduces: bool = False) -> None:
        self.reduces = reduces

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.tensor([float(index + 100 * hvd.rank())])
        return hvd.allreduce(row) if self.reduces else row


def _forks() -> None:
    hvd.init()
    in_flight = hvd.allreduce_async(torch.ones(3), name="in flight", op=hvd.Sum) if hvd.rank() == 0 else None
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.allreduce_async(torch.ones(1)),
        hvd.barrier,
        lambda: hvd.add_process_set([0]),
        hvd.init,
        lambda: hvd.shutdown() or hvd.init(),
    ]
    told = _in_fork(lambda: "\n".join([f"{hvd.rank()} of {hvd.size()}", *map(_refusal, calls)])).splitlines()
    assert told[0] == f"{hvd.rank()} of {hvd.size()}"
    assert len(told) == 7
    for line in told[1:]:
        assert line.startswith("InvalidError") and f"is a fork of rank {hvd.rank()}" in line, told
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for number, batch in enumerate(loader):
            total = hvd.allreduce(batch, op=hvd.Sum)
            rows = torch.arange(4 * number, 4 * number + 4).float().unsqueeze(1)
            assert total.equal(rows * 2 + 100), (number, total)
    with pytest.raises(Exception, match=f"is a fork of rank {hvd.rank()}"):
        list(torch.utils.data.DataLoader(Rows(True), num_workers=2, multiprocessing_context="fork"))
    if in_flight is None:
        in_flight = hvd.allreduce_async(torch.ones(3), name="in flight", op=hvd.Sum)
    assert hvd.synchronize(in_flight).tolist() == [2.0] * 3


@pytest.mark.timeout(120)
def test_forks() -> None:
    """A forked child knows its rank, is refused operations, and ends without disturbing anybody."""
    on_ranks(2, _forks, seconds=90)


def _leave_in_flight(kind: str) -> str:
    hvd.init()
    hvd.barrier()
    size = 4 << 20
    if kind == "unmatched":
        hvd.allreduce_async(torch.ones(3), name=f"only on {hvd.rank()}")
        hvd.allgather_async(torch.ones(size), name=f"gather only on {hvd.rank()}")
        # Nobody is gone before the other has begun.
        hvd.barrier()
    elif kind == "matched":
        # The other rank may be gone before the last of them.
        with contextlib.suppress(PeerLostError):
            for number in range(8):
                hvd.allreduce_async(torch.ones(size), name=f"both {number}")
    elif kind == "thread":
        handle = hvd.allreduce_async(torch.ones(3), name=f"waited for on {hvd.rank()}")
        threading.Thread(target=lambda: hvd.synchronize(handle), daemon=True).start()
        time.sleep(0.1)
        hvd.barrier()
    return kind


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["unmatched", "matched", "thread"])
def test_exit_in_flight(kind: str) -> None:
    """The interpreter ends, whatever is on its way, and the gang has succeeded."""
    assert on_ranks(2, _leave_in_flight, kind, seconds=60) == [kind] * 2


def _leave_early() -> str:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        return "left"
    try:
        hvd.allreduce(torch.ones(3), name="alone")
    except CollectiveError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.timeout(90)
def test_a_rank_that_leaves() -> None:
    """Who waits for it is told."""
    told, left = on_ranks(2, _leave_early, seconds=60)
    assert left == "left"
    assert "rank 1" in told, told


def _shut_down_in_flight() -> str:
    hvd.init()
    waiting = hvd.allreduce_async(torch.ones(3), name=f"only on {hvd.rank()}")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            hvd.synchronize(waiting)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    hvd.barrier()
    hvd.shutdown()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(raised[0], hvd.HorovodInternalError | ValueError), raised
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    return str(raised[0])


@pytest.mark.timeout(90)
def test_shutdown_in_flight() -> None:
    """A thread that waits is told, and everything can begin anew."""
    on_ranks(2, _shut_down_in_flight, seconds=60)


def _die(when: str) -> tuple[str, int, float] | None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hvd.init()
    tensor = torch.ones(1 << 20)
    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
    workers = iter(loader)
    next(workers)
    hvd.barrier()
    begin = time.monotonic()
    if hvd.rank() == 1:
        if when == "operating":
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            while True:
                hvd.allreduce_(tensor, name="again")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            hvd.allreduce_(tensor, name="again")
    except PeerLostError as error:
        outcome = str(error), error.rank, time.monotonic() - begin
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(tensor)
    return outcome


@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["operating", "elsewhere"])
def test_a_rank_that_is_killed(when: str) -> None:
    """All others are told which one, even though its data-loader workers live on for a while."""
    results = on_ranks(3, _die, when, seconds=60, survivors=True)
    assert results[1] is None
    for survivor in [0, 2]:
        assert results[survivor] is not None, results
        text, rank, seconds = results[survivor]
        assert rank == 1
        assert "rank 1" in text
        assert seconds < 5


def _interrupt() -> None:
    hvd.init()
    tensor = torch.full((5,), float(hvd.rank()))
    if hvd.rank() == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce(tensor, name="interrupted", op=hvd.Sum)
        assert time.monotonic() - begin < 5
        handle = hvd.allreduce_async_(tensor, name="waited for", op=hvd.Sum)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            hvd.synchronize(handle)
        # The handle is still good.
        assert not hvd.poll(handle)
    hvd.barrier()
    if hvd.rank() == 1:
        assert hvd.allreduce(tensor, name="interrupted", op=hvd.Sum).tolist() == [1.0] * 5
        handle = hvd.allreduce_async_(tensor, name="waited for", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [1.0] * 5
    assert hvd.allreduce(torch.ones(1), name="interrupted", op=hvd.Sum).item() == 2


@pytest.mark.timeout(90)
def test_interrupt() -> None:
    """Waiting can be interrupted; the operation goes on, and its memory stays as long."""
    on_ranks(2, _interrupt, seconds=60)
