"""``deuteron.context()`` inside real tasks, and alone."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import deuteron
import pytest
from deuteron import errors

pytestmark = pytest.mark.timeout(60)

HOST = os.uname().nodename


def test_who_everybody_is() -> None:
    def tell() -> tuple[Any, ...]:
        context = deuteron.context()
        own = (context.rank, context.size, context.local_rank, context.local_size, context.cross_rank)
        infos = [(info.rank, info.local_rank, info.host, info.address) for info in context.task_infos()]
        return *own, context.cross_size, context.host, context.generation, infos, context.accelerators(), repr(context)

    infos = [(rank, rank, HOST, "127.0.0.1") for rank in range(3)]
    for rank, told in enumerate(deuteron.run(tell, num_proc=3)):
        text = f"Context(rank {rank} of 3 on {HOST}, generation 0)"
        assert told == (rank, 3, rank, 3, 0, 1, HOST, 0, infos, [], text)


def test_messages_of_both_kinds() -> None:
    def gather() -> tuple[list[str], list[bytes], list[str]]:
        context = deuteron.context()
        texts = context.all_gather(f"é{context.rank}", timeout=30)
        data = context.all_gather(bytes([context.rank, 0, 255]), timeout=30)
        return texts, data, context.all_gather("")

    expected = (["é0", "é1", "é2"], [b"\0\0\xff", b"\1\0\xff", b"\2\0\xff"], ["", "", ""])
    assert deuteron.run(gather, num_proc=3) == [expected] * 3


def test_many_rounds_keep_their_order() -> None:
    def rounds() -> bool:
        context = deuteron.context()
        for number in range(200):
            if context.all_gather(f"{number}.{context.rank}") != [f"{number}.{rank}" for rank in range(context.size)]:
                return False
            context.barrier()
        return True

    assert deuteron.run(rounds, num_proc=3) == [True] * 3


def test_a_barrier_waits_for_the_last() -> None:
    def meet() -> tuple[float, float]:
        context = deuteron.context()
        context.barrier()
        if context.rank == 1:
            time.sleep(0.5)
        came = time.monotonic()
        context.barrier()
        return came, time.monotonic()

    came, left = zip(*deuteron.run(meet, num_proc=2), strict=True)
    assert min(left) >= max(came)


def test_time_limits() -> None:
    def late() -> str:
        context = deuteron.context()
        if context.rank == 1:
            time.sleep(1.5)
            context.barrier()
            return "late"
        start = time.monotonic()
        try:
            context.barrier(timeout=0.3)
        except TimeoutError as error:
            assert isinstance(error, errors.TimedOutError)
            assert 0.3 <= time.monotonic() - start < 1.4
            return str(error)
        return "no limit"

    text, other = deuteron.run(late, num_proc=2)
    assert "not all tasks have come within 0.3 s" in text
    # Whoever has given up counts as having come.
    assert other == "late"


def test_what_is_no_message() -> None:
    def wrong() -> list[str]:
        context = deuteron.context()
        told = []
        for message in (5, None, bytearray(b"x"), "x" * 70_000):
            try:
                context.all_gather(message)  # type: ignore[type-var]
            except errors.InvalidError as error:
                told.append(str(error))
        for limit in (-1, float("nan")):
            try:
                context.barrier(timeout=limit)
            except errors.InvalidError as error:
                told.append(str(error))
        return told

    (told,) = deuteron.run(wrong, num_proc=1)
    assert told[:3] == [f"a message is a str or bytes, not {kind}" for kind in ("int", "NoneType", "bytearray")]
    assert "over the bound" in told[3]
    assert len(told) == 6


def test_kinds_that_differ_are_named() -> None:
    def differ() -> str:
        context = deuteron.context()
        try:
            context.all_gather("text" if context.rank == 0 else b"bytes")  # type: ignore[type-var]
        except errors.MismatchError as error:
            return str(error)
        return "nothing"

    first, second = deuteron.run(differ, num_proc=2)
    assert first == "all_gather: rank 0 gave str, and rank 1 did not: all give the same kind"
    assert second == "all_gather: rank 1 gave bytes, and rank 0 did not: all give the same kind"


def test_a_rendezvous_with_one_that_has_ended() -> None:
    def leaves() -> None:
        context = deuteron.context()
        if context.rank == 0:
            context.barrier()

    with pytest.raises(errors.TaskFailedError) as raised:
        deuteron.run(leaves, num_proc=2)
    assert raised.value.rank == 0
    assert "GangEndedError" in str(raised.value)
    assert "rank 1 has ended" in str(raised.value)


def test_alone() -> None:
    context = deuteron.context()
    assert (context.rank, context.size, context.local_size, context.cross_size, context.generation) == (0, 1, 1, 1, 0)
    assert context.host == HOST
    assert context.all_gather("me", timeout=1) == ["me"]
    context.barrier(timeout=1)
    assert [info.rank for info in context.task_infos()] == [0]


def test_a_forked_child_is_no_task() -> None:
    def fork() -> int:
        context = deuteron.context()
        child = os.fork()
        if child == 0:
            try:
                context.barrier(timeout=5)
            except errors.InvalidError:
                os._exit(42)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        context.barrier()
        return os.waitstatus_to_exitcode(status)

    assert deuteron.run(fork, num_proc=2) == [42, 42]


def test_errors_survive_pickling() -> None:
    error = errors.TaskFailedError("rank 1 failed", 1, "host", 2, "exited", "Traceback ...\nValueError: x")
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.host, again.generation, again.ending) == (1, "host", 2, "exited")
    assert str(again) == "rank 1 failed: ValueError: x"
    assert isinstance(again.__cause__, errors.RemoteTraceback)
    lost = pickle.loads(pickle.dumps(errors.PeerLostError("rank 3 was lost", 3, "host", 1)))
    assert (lost.rank, lost.host, lost.generation) == (3, "host", 1)
