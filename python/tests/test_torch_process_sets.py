"""Process sets: who is in, who is not, and what happens when they come and go."""

from __future__ import annotations

from collections.abc import Callable

import deuteron.torch as hvd
import pytest
import torch
from cases import Checks, verify
from deuteron.errors import InvalidError

CASES: dict[str, Callable[[Checks], None]] = {}


def case(function: Callable[[Checks], None]) -> Callable[[Checks], None]:
    CASES[function.__name__] = function
    return function


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test(name: str, ranks: int) -> None:
    verify(__file__, ranks, name)


def test_before_init() -> None:
    unused = hvd.ProcessSet([2, 0])
    assert unused.ranks == [0, 2]
    assert unused.process_set_id is None
    for call in [unused.size, unused.rank, unused.included, unused.engine, hvd.global_process_set.size]:
        with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
            call()
    with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
        hvd.add_process_set([0])
    assert not hvd.remove_process_set(unused)


@pytest.mark.parametrize("ranks", [[0, 0], [-1, 2], ["a"], 3, None, [0.5]])
def test_impossible(ranks: object) -> None:
    with pytest.raises(InvalidError):
        hvd.ProcessSet(ranks)  # type: ignore[arg-type]


@case
def the_set_of_all(checks: Checks) -> None:
    every = hvd.global_process_set
    checks.equal((every.process_set_id, every.ranks), (0, list(range(hvd.size()))))
    checks.equal((every.size(), every.rank(), every.included()), (hvd.size(), hvd.rank(), True))
    checks.equal(hvd.remove_process_set(every), False, "it stays")
    checks.raises(InvalidError, lambda: hvd.add_process_set(range(hvd.size())), "duplicate")
    checks.raises(InvalidError, lambda: hvd.add_process_set([hvd.size()]), "not there")
    checks.raises(InvalidError, lambda: hvd.add_process_set([]), "no ranks")


@case
def come_and_go(checks: Checks) -> None:
    if hvd.size() == 1:
        return
    ids = []
    for round_ in range(5):
        some = hvd.add_process_set([hvd.size() - 1, 0] if hvd.size() > 2 else [1])
        ids.append(some.process_set_id)
        checks.equal(some.size(), len(some.ranks), "size")
        checks.equal(some.included(), hvd.rank() in some.ranks, "included")
        if some.included():
            checks.equal(some.rank(), some.ranks.index(hvd.rank()), "rank")
            result = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum, process_set=some)
            checks.equal(float(result), float(sum(some.ranks)), round_)
        checks.raises(InvalidError, lambda some=some: hvd.add_process_set(some), "in use already")
        checks.raises(InvalidError, lambda some=some: hvd.add_process_set(some.ranks), "duplicate")
        checks.equal(hvd.remove_process_set(some), True, "removed")
        checks.equal(hvd.remove_process_set(some), False, "removed before")
        checks.equal(some.process_set_id, None, "no longer in use")
        checks.raises(InvalidError, lambda some=some: hvd.allreduce(torch.ones(1), process_set=some), "not in use")
        checks.raises(InvalidError, some.size, "not in use")
    checks.equal(len(set(ids)), len(ids), "new numbers")
    again = hvd.add_process_set(some)
    checks.true(again is some, "it can be added again")
    if some.included():
        hvd.barrier(some)
    hvd.remove_process_set(some)


@case
def not_members(checks: Checks) -> None:
    if hvd.size() == 1:
        return
    some = hvd.add_process_set([0])
    tensor = torch.ones(2)
    calls = [
        lambda: hvd.allreduce(tensor, process_set=some),
        lambda: hvd.allreduce_(tensor, process_set=some),
        lambda: hvd.allreduce_async(tensor, process_set=some),
        lambda: hvd.grouped_allreduce([tensor], process_set=some),
        lambda: hvd.allgather(tensor, process_set=some),
        lambda: hvd.broadcast(tensor, 0, process_set=some),
        lambda: hvd.alltoall(tensor, process_set=some),
        lambda: hvd.reducescatter(tensor, process_set=some),
        lambda: hvd.broadcast_object(1, 0, process_set=some),
        lambda: hvd.allgather_object(1, process_set=some),
        lambda: hvd.barrier(some),
        some.rank,
    ]
    for call in calls:
        if hvd.rank() == 0:
            call()
        else:
            checks.raises(InvalidError, call, f"rank {hvd.rank()} is not in", "ranks=[0]")
    if hvd.rank() == 0:
        checks.raises(InvalidError, lambda: hvd.broadcast(tensor, 1, process_set=some), "rank 1 is not in")
    hvd.remove_process_set(some)


@case
def independent(checks: Checks) -> None:
    """A set does not wait for what ranks outside are doing, nor for its own operations in another set."""
    if hvd.size() < 4:
        return
    low, high = hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])
    own = low if low.included() else high
    waiting = hvd.allreduce_async(torch.ones(1), name="all", op=hvd.Sum) if hvd.rank() != 3 else None
    for step in range(3 if own is low else 30):
        result = hvd.allreduce(torch.full((2,), float(hvd.rank())), op=hvd.Sum, process_set=own, name="same name")
        checks.equal(float(result[0]), float(sum(own.ranks)), step)
    if waiting is not None:
        checks.equal(hvd.poll(waiting), False, "rank 3 has not come yet") if hvd.rank() == 2 else None
    hvd.barrier(own)
    if waiting is None:
        waiting = hvd.allreduce_async(torch.ones(1), name="all", op=hvd.Sum)
    checks.equal(float(hvd.synchronize(waiting)), 4.0, "all")
    hvd.remove_process_set(low)
    hvd.remove_process_set(high)


@case
def from_the_start(checks: Checks) -> None:
    size = hvd.size()
    hvd.shutdown()
    first = hvd.ProcessSet([0])
    checks.raises(InvalidError, lambda: hvd.init(process_sets=[first, hvd.ProcessSet([0])]), "duplicate")
    checks.raises(InvalidError, lambda: hvd.init(process_sets=[hvd.ProcessSet([size])]), "not there")
    checks.raises(InvalidError, lambda: hvd.init(process_sets="static"), "static")
    checks.raises(InvalidError, lambda: hvd.init(comm=[size]), "process sets")
    checks.raises(InvalidError, lambda: hvd.init(comm=object()), "MPI")
    checks.equal(hvd.is_initialized(), False)
    if size == 1:
        hvd.init(process_sets="dynamic")
        return
    second = hvd.ProcessSet(range(1, size))
    for comm in [None, range(size)]:
        hvd.init(comm, process_sets=[first, second])
        checks.equal([first.process_set_id, second.process_set_id], [1, 2], "numbers")
        own = first if first.included() else second
        result = hvd.allgather(torch.tensor([hvd.rank()]), process_set=own)
        checks.equal(result.tolist(), own.ranks, "its ranks")
        hvd.init(process_sets=[first])
        checks.raises(InvalidError, lambda: hvd.init(process_sets=[hvd.ProcessSet([0, 1])]), "add_process_set")
        hvd.shutdown()
        checks.equal([first.process_set_id, second.process_set_id], [None, None], "over")
    hvd.init()


@case
def crossed_gradients(checks: Checks) -> None:
    """A graph through two sets."""
    if hvd.size() < 4:
        return
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    own = pairs[hvd.rank() // 2]
    x = torch.full((2,), float(hvd.rank()), requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Sum, process_set=own)
    z = hvd.allreduce(y, op=hvd.Average)
    (z * (hvd.rank() + 1)).sum().backward()
    # The average of 1 to 4, added up over the pair.
    checks.equal(x.grad, torch.full((2,), 5.0))
    for pair in pairs:
        hvd.remove_process_set(pair)
