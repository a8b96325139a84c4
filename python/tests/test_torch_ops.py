"""Every operation, type and process set, compared with what one process computes of all ranks' tensors."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence

import deuteron.torch as hvd
import pytest
import torch
from cases import Checks, verify
from deuteron.errors import CollectiveError, InvalidError, MismatchError, UnavailableError
from torch import Tensor

CASES: dict[str, Callable[[Checks], None]] = {}


def case(function: Callable[[Checks], None]) -> Callable[[Checks], None]:
    CASES[function.__name__] = function
    return function


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test(name: str, ranks: int) -> None:
    verify(__file__, ranks, name)


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NATIVE = [torch.bool, *INTEGERS, *FLOATS]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
OPAQUE = [torch.float8_e4m3fn, torch.float8_e5m2]
MOVED = [*NATIVE, *COMPLEX, *UNSIGNED, *OPAQUE]
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (2, 0, 3)]
OPS = {"average": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def make(rank: int, dtype: torch.dtype, shape: Sequence[int], salt: int = 0) -> Tensor:
    """A rank's tensor. Whole numbers so small that no order of additions rounds."""
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    numbers = torch.randint(0, 12, tuple(shape), generator=generator)
    if dtype is torch.bool:
        return numbers > 5
    if dtype.is_complex:
        other = torch.randint(-6, 6, tuple(shape), generator=generator)
        return torch.complex((numbers - 6).double(), other.double()).to(dtype)
    if dtype.is_signed:
        numbers = numbers - 6
    return numbers.to(dtype)


def combined(tensors: list[Tensor], op: int) -> Tensor:
    """What one process computes."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        stacked = torch.stack(tensors)
        return stacked.any(0) if op in (hvd.Sum, hvd.Max) else stacked.all(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([tensor.to(wide) for tensor in tensors])
    if op == hvd.Sum:
        result = stacked.sum(0)
    elif op == hvd.Average:
        result = stacked.sum(0)
        mode = "trunc" if wide is torch.int64 else None
        result = torch.div(result, len(tensors), rounding_mode=mode)
    elif op == hvd.Product:
        result = stacked.prod(0)
    else:
        result = stacked.amin(0) if op == hvd.Min else stacked.amax(0)
    return result.to(dtype)


_sets: list[hvd.ProcessSet] = []


def sets() -> list[hvd.ProcessSet]:
    """Those that this rank is in."""
    if not _sets:
        size = hvd.size()
        _sets.append(hvd.global_process_set)
        for ranks in [[0, 2], [1, 2, 3], [1]]:
            if ranks[-1] < size and len(ranks) < size:
                _sets.append(hvd.add_process_set(ranks))
    return [process_set for process_set in _sets if process_set.included()]


def same(checks: Checks, dtype: torch.dtype, op: int, actual: Tensor, expected: Tensor, what: object) -> None:
    if op == hvd.Average and (dtype.is_floating_point or dtype.is_complex) and expected.numel():
        if dtype.is_complex:
            actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
        checks.close(actual, expected, what)
    else:
        checks.equal(actual, expected, what)


@case
def allreduce(checks: Checks) -> None:
    for process_set in sets():
        for dtype in NATIVE:
            for word, op in OPS.items():
                for salt, shape in enumerate(SHAPES):
                    tensors = [make(rank, dtype, shape, salt) for rank in process_set.ranks]
                    own = tensors[process_set.rank()]
                    before = own.clone()
                    result = hvd.allreduce(own, op=op, process_set=process_set)
                    what = f"{word} of {dtype} {shape} on {process_set.ranks}"
                    same(checks, dtype, op, result, combined(tensors, op), what)
                    checks.equal(own, before, f"{what}: the input")


@case
def allreduce_forms(checks: Checks) -> None:
    for process_set in sets():
        for dtype in [torch.float32, torch.bfloat16, torch.int64]:
            tensors = [make(rank, dtype, (4, 3)) for rank in process_set.ranks]
            own = tensors[process_set.rank()]
            expected = combined(tensors, hvd.Sum)
            handle = hvd.allreduce_async(own, name="async", op=hvd.Sum, process_set=process_set)
            checks.true(isinstance(handle, int), "a handle is a number")
            checks.equal(hvd.synchronize(handle), expected, "async")
            changed = own.clone()
            checks.true(hvd.allreduce_(changed, op=hvd.Sum, process_set=process_set) is changed, "the same tensor")
            checks.equal(changed, expected, "in place")
            changed = own.clone()
            handle = hvd.allreduce_async_(changed, op=hvd.Sum, process_set=process_set)
            checks.true(hvd.synchronize(handle) is changed, "the same tensor")
            checks.equal(changed, expected, "async in place")
            while not hvd.poll(handle := hvd.allreduce_async(own, op=hvd.Sum, process_set=process_set)):
                hvd.synchronize(handle)
                break


@case
def grouped_allreduce(checks: Checks) -> None:
    kinds = [(torch.float32, (3,)), (torch.float64, (2, 2)), (torch.int32, ()), (torch.complex64, (2,))]
    for process_set in sets():
        tensors = [[make(rank, *kind, salt) for salt, kind in enumerate(kinds)] for rank in process_set.ranks]
        own = tensors[process_set.rank()]
        expected = [combined([each[index] for each in tensors], hvd.Sum) for index in range(len(kinds))]
        forms = {
            "sync": lambda own, more: hvd.grouped_allreduce(own, **more),
            "async": lambda own, more: hvd.synchronize(hvd.grouped_allreduce_async(own, **more)),
            "in place": lambda own, more: hvd.grouped_allreduce_(own, **more),
            "async in place": lambda own, more: hvd.synchronize(hvd.grouped_allreduce_async_(own, **more)),
        }
        for word, form in forms.items():
            for name in [None, "group"]:
                copies = [tensor.clone() for tensor in own]
                results = form(copies, {"op": hvd.Sum, "process_set": process_set, "name": name})
                checks.true(len(results) == len(own), f"{word}: {len(results)}")
                for result, wanted, copy, tensor in zip(results, expected, copies, own, strict=True):
                    checks.equal(result, wanted, word)
                    checks.equal(copy, wanted if "place" in word else tensor, f"{word}: the input")
    checks.equal(hvd.grouped_allreduce([]), [], "none at all")


@case
def scales(checks: Checks) -> None:
    for process_set in sets():
        for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.int32]:
            tensors = [make(rank, dtype, (9,)) for rank in process_set.ranks]
            result = hvd.allreduce(
                tensors[process_set.rank()],
                op=hvd.Sum,
                prescale_factor=0.5,
                postscale_factor=4.0,
                process_set=process_set,
            )
            halves = [(tensor.double() * 0.5).to(dtype) for tensor in tensors]
            checks.equal(result, (combined(halves, hvd.Sum).double() * 4).to(dtype), dtype)


@case
def old_arguments(checks: Checks) -> None:
    tensor = torch.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks.equal(hvd.allreduce(tensor, average=False), tensor * hvd.size())
        checks.equal(hvd.synchronize(hvd.allreduce_async(tensor, average=True)), tensor)
    checks.equal([warning.category for warning in caught], [DeprecationWarning] * 2)
    checks.equal([warning.filename for warning in caught], [__file__] * 2)
    checks.raises(ValueError, lambda: hvd.allreduce(tensor, average=True, op=hvd.Sum), "not both")
    checks.raises(ValueError, lambda: hvd.allreduce(tensor, op=17), "17")
    checks.raises(NotImplementedError, lambda: hvd.allreduce(tensor, op=hvd.Adasum), "Adasum")
    checks.equal([hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product], list(range(6)))


@case
def allgather(checks: Checks) -> None:
    for process_set in sets():
        for dtype in MOVED:
            for tail in [(), (3,), (2, 2), (0,)]:
                tensors = [make(rank, dtype, (3 * rank % 4, *tail)) for rank in process_set.ranks]
                own = tensors[process_set.rank()]
                expected = torch.cat(tensors)
                what = f"{dtype} {tail} on {process_set.ranks}"
                checks.equal(hvd.allgather(own, process_set=process_set), expected, what)
                handle = hvd.allgather_async(own, name="rows", process_set=process_set)
                checks.equal(hvd.synchronize(handle), expected, f"{what}, async")
    checks.raises(InvalidError, lambda: hvd.allgather(torch.tensor(1)), "without dimensions")


@case
def grouped_allgather(checks: Checks) -> None:
    kinds = [(torch.float32, (3,)), (torch.bool, ()), (torch.complex64, (2,)), (torch.int64, (0,))]
    for process_set in sets():
        tensors = [
            [make(rank, dtype, (rank + index, *tail)) for index, (dtype, tail) in enumerate(kinds)]
            for rank in process_set.ranks
        ]
        own = tensors[process_set.rank()]
        expected = [torch.cat([each[index] for each in tensors]) for index in range(len(kinds))]
        results = hvd.grouped_allgather(own, process_set=process_set)
        later = hvd.synchronize(hvd.grouped_allgather_async(own, name="group", process_set=process_set))
        checks.true(len(results) == len(later) == len(kinds), "as many as were given")
        for result, late, wanted in zip(results, later, expected, strict=True):
            checks.equal(result, wanted)
            checks.equal(late, wanted)


@case
def broadcast(checks: Checks) -> None:
    for process_set in sets():
        for root in process_set.ranks:
            for dtype in MOVED:
                for shape in SHAPES:
                    own, wanted = make(hvd.rank(), dtype, shape), make(root, dtype, shape)
                    before = own.clone()
                    checks.equal(hvd.broadcast(own, root, process_set=process_set), wanted, (dtype, shape, root))
                    checks.equal(own, before, "the input")
            own, wanted = make(hvd.rank(), torch.float32, (5,)), make(root, torch.float32, (5,))
            handle = hvd.broadcast_async(own, root, name="async", process_set=process_set)
            checks.equal(hvd.synchronize(handle), wanted, "async")
            changed = own.clone()
            checks.true(hvd.broadcast_(changed, root, process_set=process_set) is changed, "the same tensor")
            checks.equal(changed, wanted, "in place")
            changed = own.clone()
            handle = hvd.broadcast_async_(changed, root, process_set=process_set)
            checks.true(hvd.synchronize(handle) is changed, "the same tensor")
            checks.equal(changed, wanted, "async in place")
    for root in [-1, hvd.size()]:
        checks.raises(InvalidError, lambda root=root: hvd.broadcast(torch.ones(1), root), f"rank {root} is not in")


def split(rank: int, others: Sequence[int]) -> list[int]:
    return [(rank + 2 * other) % 3 for other in others]


@case
def alltoall(checks: Checks) -> None:
    for process_set in sets():
        ranks, me = process_set.ranks, process_set.rank()
        for dtype in MOVED:
            for tail in [(), (2, 3), (0,)]:
                even = [make(rank, dtype, (2 * len(ranks), *tail)) for rank in ranks]
                expected = torch.cat([tensor[2 * me : 2 * me + 2] for tensor in even])
                checks.equal(hvd.alltoall(even[me], process_set=process_set), expected, (dtype, tail))
                # One row more than is given away.
                tensors = [make(rank, dtype, (sum(split(rank, ranks)) + 1, *tail)) for rank in ranks]
                parts = [
                    tensor[: sum(split(rank, ranks))].split(split(rank, ranks))[me]
                    for rank, tensor in zip(ranks, tensors, strict=True)
                ]
                received = torch.tensor([len(part) for part in parts], dtype=torch.int32)
                given = split(ranks[me], ranks)
                for splits in [given, torch.tensor(given), torch.tensor(given, dtype=torch.int32)]:
                    result, counts = hvd.alltoall(tensors[me], splits, process_set=process_set)
                    checks.equal(result, torch.cat(parts), (dtype, tail, splits))
                    checks.equal(counts, received, "received splits")
                handle = hvd.alltoall_async(tensors[me], given, name="rows", process_set=process_set)
                result, counts = hvd.synchronize(handle)
                checks.equal(result, torch.cat(parts), "async")
                checks.equal(counts, received, "received splits")
        checks.equal(hvd.synchronize(hvd.alltoall_async(even[me], process_set=process_set)), expected, "async, even")


@case
def bad_splits(checks: Checks) -> None:
    size = hvd.size()
    rows = torch.ones(2 * size + 1)
    checks.raises(InvalidError, lambda: hvd.alltoall(rows, [1] * (size + 1)), "splits for")
    checks.raises(InvalidError, lambda: hvd.alltoall(rows, [-1] + [1] * (size - 1)), "negative")
    checks.raises(InvalidError, lambda: hvd.alltoall(rows, [3] * size + []), "take") if size > 1 else None
    checks.raises(InvalidError, lambda: hvd.alltoall(rows, torch.ones(size)), "integers")
    checks.raises(InvalidError, lambda: hvd.alltoall(rows, torch.ones(1, size, dtype=torch.int32)), "integers")
    checks.raises(InvalidError, lambda: hvd.alltoall(torch.tensor(1)), "without dimensions")
    if size > 1:
        checks.raises(InvalidError, lambda: hvd.alltoall(rows), "evenly")


@case
def reducescatter(checks: Checks) -> None:
    for process_set in sets():
        ranks, me = process_set.ranks, process_set.rank()
        for dtype in [*NATIVE, torch.complex64]:
            for word, op in OPS.items():
                if dtype.is_complex and op not in (hvd.Sum, hvd.Average):
                    continue
                for rows in [0, 1, 2, 5, 8]:
                    tensors = [make(rank, dtype, (rows, 3), rows) for rank in ranks]
                    whole = combined(tensors, op)
                    shares = [rows // len(ranks) + (index < rows % len(ranks)) for index in range(len(ranks))]
                    result = hvd.reducescatter(tensors[me], op=op, process_set=process_set)
                    same(checks, dtype, op, result, whole.split(shares)[me], f"{word} of {dtype}, {rows} rows")
        tensors = [make(rank, torch.float32, (2 * len(ranks),)) for rank in ranks]
        expected = combined(tensors, hvd.Sum)[2 * me : 2 * me + 2]
        handle = hvd.reducescatter_async(tensors[me], name="rows", op=hvd.Sum, process_set=process_set)
        checks.equal(hvd.synchronize(handle), expected, "async")
        more = {"op": hvd.Sum, "process_set": process_set}
        for result in hvd.grouped_reducescatter([tensors[me]] * 2, **more):
            checks.equal(result, expected, "grouped")
        for result in hvd.synchronize(hvd.grouped_reducescatter_async([tensors[me]] * 2, name="group", **more)):
            checks.equal(result, expected, "grouped, async")
        scaled = hvd.reducescatter(tensors[me], prescale_factor=2.0, postscale_factor=0.25, **more)
        checks.equal(scaled, expected / 2, "scaled")
    checks.raises(InvalidError, lambda: hvd.reducescatter(torch.tensor(1.0)), "without dimensions")


@case
def other_types(checks: Checks) -> None:
    for process_set in sets():
        for dtype in [*COMPLEX, *UNSIGNED]:
            tensors = [make(rank, dtype, (2, 3)) for rank in process_set.ranks]
            own = tensors[process_set.rank()]
            allowed = [hvd.Sum, hvd.Average] if dtype.is_complex else [hvd.Sum, hvd.Product]
            for word, op in OPS.items():
                if op in allowed:
                    result = hvd.allreduce(own, op=op, process_set=process_set)
                    same(checks, dtype, op, result, combined(tensors, op), f"{word} of {dtype}")
                    changed = own.clone()
                    hvd.allreduce_(changed, op=op, process_set=process_set)
                    same(checks, dtype, op, changed, combined(tensors, op), f"{word} of {dtype} in place")
                else:
                    for call in [hvd.allreduce, hvd.allreduce_, hvd.reducescatter]:
                        checks.raises(InvalidError, lambda call=call, own=own, op=op: call(own, op=op), str(dtype))
        large = torch.tensor([2**64 - 5], dtype=torch.uint64)
        doubled = hvd.allreduce(large, op=hvd.Sum, process_set=process_set)
        checks.equal(int(doubled.item()), (2**64 - 5) * process_set.size() % 2**64, "unsigned integers wrap")
    for dtype in OPAQUE:
        for op in OPS.values():
            checks.raises(
                InvalidError, lambda dtype=dtype, op=op: hvd.allreduce(make(0, dtype, (2,)), op=op), str(dtype)
            )
    checks.raises(
        InvalidError, lambda: hvd.allreduce(make(0, torch.uint16, (2,)), op=hvd.Sum, prescale_factor=0.5), "scaled"
    )


@case
def not_tensors(checks: Checks) -> None:
    sparse = torch.eye(3).to_sparse()
    for call in [hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.reducescatter, lambda x: hvd.broadcast(x, 0)]:
        checks.raises(InvalidError, lambda call=call: call([1.0]), "not list")
        checks.raises(InvalidError, lambda call=call: call(None), "not NoneType")
        checks.raises(InvalidError, lambda call=call: call(sparse), "sparse")
        checks.raises(InvalidError, lambda call=call: call(torch.ones(2, device="meta")), "meta")


@case
def gaps(checks: Checks) -> None:
    """Tensors whose elements do not lie side by side, or not as they are."""
    for process_set in sets():
        ranks, me = process_set.ranks, process_set.rank()
        views = {
            "transposed": lambda rank: make(rank, torch.float32, (3, 4)).t(),
            "sliced": lambda rank: make(rank, torch.float32, (4, 6))[::2, 1::3],
            "channels last": lambda rank: make(rank, torch.float32, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
            "expanded": lambda rank: make(rank, torch.float32, (3, 1)).expand(3, 4),
            "conjugated": lambda rank: make(rank, torch.complex64, (3, 4)).conj(),
            "negated": lambda rank: make(rank, torch.complex64, (3, 4)).conj().imag,
            "complex, transposed": lambda rank: make(rank, torch.complex64, (3, 4)).t(),
            "unsigned, sliced": lambda rank: make(rank, torch.uint16, (8, 2))[::2],
        }
        for word, view in views.items():
            own, all_ = view(ranks[me]), [view(rank) for rank in ranks]
            expected = combined([tensor.clone() for tensor in all_], hvd.Sum)
            more = {"process_set": process_set}
            checks.equal(hvd.allreduce(own, op=hvd.Sum, **more), expected, word)
            checks.equal(hvd.allgather(own, **more), torch.cat([tensor.clone() for tensor in all_]), word)
            checks.equal(hvd.broadcast(own, ranks[-1], **more), all_[-1].clone(), word)
            if word == "expanded":
                checks.raises(InvalidError, lambda own=own: hvd.allreduce_(own), "expanded")
                checks.raises(InvalidError, lambda own=own: hvd.broadcast_(own, 0), "expanded")
                continue
            stride = own.stride()
            hvd.allreduce_(own, op=hvd.Sum, **more)
            checks.equal(own, expected, f"{word}, in place")
            checks.equal(own.stride(), stride, f"{word}, in place")
            own = view(ranks[me])
            hvd.broadcast_(own, ranks[-1], **more)
            checks.equal(own, all_[-1].clone(), f"{word}, in place")


@case
def large(checks: Checks) -> None:
    """More than any buffer holds."""
    count = (17 << 20) // 4
    own = torch.arange(count, dtype=torch.float32).remainder_(1000).add_(hvd.rank())
    size = hvd.size()
    base = torch.arange(count, dtype=torch.float32).remainder_(1000)
    checks.equal(hvd.allreduce(own, op=hvd.Sum).equal(base * size + sum(range(size))), True, "sum")
    checks.equal(hvd.broadcast(own, size - 1).equal(base + size - 1), True, "broadcast")
    gathered = hvd.allgather(own)
    whole = all(part.equal(base + rank) for rank, part in enumerate(gathered.split(count)))
    checks.equal((len(gathered), whole), (count * size, True), "gather")
    half = hvd.allreduce(own.half(), op=hvd.Max)
    checks.equal(half.equal((base + size - 1).half()), True, "max of float16")


@case
def gathered_memory_stays(checks: Checks) -> None:
    results = [hvd.allgather(torch.full((1000,), float(step))) for step in range(20)]
    for step, result in enumerate(results):
        checks.equal(result, torch.full((1000 * hvd.size(),), float(step)), step)
    results[0].add_(1)
    checks.equal(float(results[0][0]), 1.0, "it can be written")


def leaf(rank: int, *shape: int) -> Tensor:
    return make(rank, torch.float64, shape).requires_grad_()


@case
def gradients(checks: Checks) -> None:
    """Each rank's loss weighs what it got with its own weights."""
    for process_set in sets():
        ranks, me = process_set.ranks, process_set.rank()
        size = len(ranks)
        weights = [make(rank, torch.float64, (4, 3), salt=9) for rank in ranks]
        total = torch.stack(weights).sum(0)
        more = {"process_set": process_set}

        for op, factor in [(hvd.Sum, 1.0), (hvd.Average, 1.0 / size)]:
            x = leaf(ranks[me], 4, 3)
            y = hvd.allreduce(x, op=op, prescale_factor=0.5, name="x", **more)
            checks.true(y.requires_grad, "it has a gradient")
            (y * weights[me]).sum().backward()
            checks.close(x.grad, total * factor * 0.5, f"allreduce {op}")

        x, z = leaf(ranks[me], 4, 3), leaf(ranks[me], 4, 3)
        first, second = hvd.grouped_allreduce([x, z], op=hvd.Sum, **more)
        ((first + 2 * second) * weights[me]).sum().backward()
        checks.close(x.grad, total, "grouped")
        checks.close(z.grad, 2 * total, "grouped")

        for op, extreme in [(hvd.Min, torch.amin), (hvd.Max, torch.amax)]:
            leaves = [leaf(rank, 4, 3) for rank in ranks]
            (extreme(torch.stack(leaves), 0) * total * 2).sum().backward()
            x = leaf(ranks[me], 4, 3)
            y = hvd.allreduce(x, op=op, postscale_factor=2.0, **more)
            (y * weights[me]).sum().backward()
            checks.close(x.grad, leaves[me].grad, f"extreme {op}")
        leaves = [leaf(rank, 4, 3) for rank in ranks]
        (torch.stack(leaves).prod(0) * total).sum().backward()
        x = leaf(ranks[me], 4, 3)
        (hvd.allreduce(x, op=hvd.Product, **more) * weights[me]).sum().backward()
        checks.close(x.grad, leaves[me].grad, "product")

        # Other numbers of rows on every rank.
        rows = [rank + 1 for rank in ranks]
        x = leaf(ranks[me], rows[me], 2)
        weight = [make(rank, torch.float64, (sum(rows), 2), salt=5) for rank in ranks]
        (hvd.allgather(x, name="x", **more) * weight[me]).sum().backward()
        expected = torch.stack(weight).mean(0).split(rows)[me]
        checks.close(x.grad, expected, "allgather")
        x = leaf(ranks[me], rows[me], 2)
        one, _ = hvd.grouped_allgather([x, torch.ones(1)], **more)
        (one * weight[me]).sum().backward()
        checks.close(x.grad, expected, "grouped allgather")

        root = ranks[-1]
        x = leaf(ranks[me], 4, 3)
        (hvd.broadcast(x, root, **more) * weights[me]).sum().backward()
        checks.close(x.grad, total / size if ranks[me] == root else torch.zeros(4, 3).double(), "broadcast")

        given = split(ranks[me], ranks)
        x = leaf(ranks[me], sum(given) + 2, 2)
        y, received = hvd.alltoall(x, given, **more)
        checks.true(not received.requires_grad, "splits have no gradient")
        (y * (ranks[me] + 1)).sum().backward()
        expected = torch.cat([torch.full((count, 2), rank + 1.0) for count, rank in zip(given, ranks, strict=True)])
        checks.close(x.grad, torch.cat([expected, torch.zeros(2, 2)]).double(), "alltoall")
        x = leaf(ranks[me], size, 2)
        (hvd.alltoall(x, **more) * (ranks[me] + 1)).sum().backward()
        checks.close(x.grad, torch.tensor(ranks).add(1).double().unsqueeze(1).expand(size, 2), "alltoall, even")

        for op, factor in [(hvd.Sum, 1.0), (hvd.Average, 1.0 / size)]:
            x = leaf(ranks[me], size + 1, 2)
            (hvd.reducescatter(x, op=op, **more) * (ranks[me] + 1)).sum().backward()
            shares = [1 + (index < 1) for index in range(size)]
            expected = torch.cat(
                [torch.full((share, 2), rank + 1.0) for share, rank in zip(shares, ranks, strict=True)]
            )
            checks.close(x.grad, expected.double() * factor, f"reducescatter {op}")
        x = leaf(ranks[me], size, 2)
        for part in hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum, **more):
            part.sum().backward(retain_graph=True)
        checks.close(x.grad, torch.full((size, 2), 3.0).double(), "grouped reducescatter")


@case
def gradients_of_gradients(checks: Checks) -> None:
    x = leaf(hvd.rank(), 3)
    y = hvd.allreduce(x * x, op=hvd.Sum)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    checks.close(first.detach(), 2 * x.detach() * hvd.size(), "first")
    checks.close(second, torch.full((3,), 2.0 * hvd.size()).double(), "second")


@case
def without_gradients(checks: Checks) -> None:
    x = leaf(hvd.rank(), 3)
    with torch.no_grad():
        checks.true(not hvd.allreduce(x).requires_grad, "no_grad")
    with torch.inference_mode():
        y = torch.ones(2)
        hvd.allreduce_(y, op=hvd.Sum)
        checks.equal(y, torch.full((2,), float(hvd.size())), "inference mode")
    for result in [
        hvd.synchronize(hvd.allreduce_async(x)),
        hvd.synchronize(hvd.broadcast_async(x, 0)),
        hvd.synchronize(hvd.allgather_async(x)),
    ]:
        checks.true(not result.requires_grad, "asynchronous")
    parameter = torch.nn.Parameter(torch.full((2,), float(hvd.rank())))
    hvd.broadcast_(parameter, hvd.size() - 1)
    checks.equal(parameter.data, torch.full((2,), hvd.size() - 1.0), "a leaf in place")
    a = torch.ones(2, requires_grad=True)
    b = a * 2
    c = b * b
    hvd.allreduce_(b)
    checks.raises(RuntimeError, lambda: c.sum().backward(), "modified by an inplace operation")


@case
def compression(checks: Checks) -> None:
    tensor = make(hvd.rank(), torch.float32, (5,))
    expected = combined([make(rank, torch.float32, (5,)) for rank in range(hvd.size())], hvd.Sum)
    for kind in [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16]:
        checks.equal(hvd.allreduce(tensor, compression=kind, op=hvd.Sum), expected, kind)
        checks.equal(hvd.grouped_allreduce([tensor], compression=kind, op=hvd.Sum)[0], expected, kind)
    x = leaf(hvd.rank(), 4)
    hvd.allreduce(x, compression=hvd.Compression.bf16, op=hvd.Sum).sum().backward()
    checks.close(x.grad, torch.full((4,), float(hvd.size())).double(), "gradient")


@case
def any_order(checks: Checks) -> None:
    """Names are matched, not the order."""
    size, count = hvd.size(), 30
    order = list(range(count))
    if hvd.rank() % 2:
        order.reverse()
    handles = {}
    for number in order:
        tensor = torch.full((number + 1,), float(number + hvd.rank()))
        match number % 3:
            case 0:
                handles[number] = hvd.allreduce_async(tensor, name=f"n{number}", op=hvd.Sum)
            case 1:
                handles[number] = hvd.allgather_async(tensor, name=f"n{number}")
            case _:
                handles[number] = hvd.broadcast_async(tensor, 0, name=f"n{number}")
    for number in reversed(order):
        result = hvd.synchronize(handles[number])
        values = [float(number + rank) for rank in range(size)]
        expected = [sum(values), values, values[0]][number % 3]
        if number % 3 == 1:
            checks.equal(result.view(size, -1)[:, 0].tolist(), expected, number)
        else:
            checks.equal(result, torch.full((number + 1,), expected), number)


@case
def threads(checks: Checks) -> None:
    def work(thread: int) -> None:
        for step in range(50):
            value = float(thread + step)
            result = hvd.allreduce(torch.full((thread + 1,), value), name=f"thread{thread}", op=hvd.Sum)
            checks.equal(result, torch.full((thread + 1,), value * hvd.size()), (thread, step))

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@case
def handles(checks: Checks) -> None:
    handle = hvd.allreduce_async(torch.ones(1))
    hvd.synchronize(handle)
    for wrong in [handle, 10**9, -1, None, "x", []]:
        checks.raises(ValueError, lambda wrong=wrong: hvd.synchronize(wrong), "no operation with handle")
        checks.raises(ValueError, lambda wrong=wrong: hvd.poll(wrong), "no operation with handle")
    many = [hvd.allreduce_async(torch.full((3,), float(number)), op=hvd.Sum) for number in range(200)]
    checks.equal(len(set(many)), 200, "all different")
    for number, handle in enumerate(many):
        checks.equal(hvd.synchronize(handle), torch.full((3,), float(number * hvd.size())), number)


@case
def same_name_at_once(checks: Checks) -> None:
    size = hvd.size()
    first = hvd.allreduce_async(torch.ones(1), name="once") if hvd.rank() == 0 else None
    if size > 1 and hvd.rank() == 0:
        checks.raises(InvalidError, lambda: hvd.allreduce_async(torch.ones(1), name="once"), "once", "already")
    hvd.barrier()
    if hvd.rank() != 0:
        first = hvd.allreduce_async(torch.ones(1), name="once")
    if size == 1:
        hvd.synchronize(first)
    else:
        checks.raises(CollectiveError, lambda: hvd.synchronize(first), "once")
    checks.equal(hvd.allreduce(torch.ones(1), name="once"), torch.ones(1), "afterwards")


@case
def disagreements(checks: Checks) -> None:
    """Every rank is told who asked for what, and everything goes on."""
    if hvd.size() == 1:
        return
    odd = hvd.rank() == hvd.size() - 1
    others = str(hvd.size() - 1)
    calls = {
        "shape": lambda: hvd.allreduce(torch.ones(3 if odd else 2), name="a"),
        "dimensions": lambda: hvd.allreduce(torch.ones((2, 1) if odd else (2,)), name="a"),
        "type": lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32), name="a"),
        "op": lambda: hvd.allreduce(torch.ones(2), name="a", op=hvd.Max if odd else hvd.Sum),
        "scale": lambda: hvd.allreduce(torch.ones(2), name="a", prescale_factor=2.0 if odd else 1.0),
        "root": lambda: hvd.broadcast(torch.ones(2), 1 if odd else 0, name="a"),
        "broadcast": lambda: hvd.broadcast(torch.ones(3 if odd else 2), 0, name="a"),
        "rows": lambda: hvd.allgather(torch.ones(2, 3 if odd else 2), name="a"),
        "no elements": lambda: hvd.allgather(torch.ones(2, 0 if odd else 2), name="a"),
        "exchange": lambda: hvd.alltoall(torch.ones(hvd.size(), 3 if odd else 2), name="a"),
        "scatter": lambda: hvd.reducescatter(torch.ones(3 if odd else 2), name="a"),
        "number": lambda: hvd.grouped_allreduce([torch.ones(1)] * (2 if odd else 1), name="a"),
        "unnamed": lambda: hvd.allreduce(torch.ones(3 if odd else 2)),
        "in place": lambda: hvd.allreduce_(torch.ones(3 if odd else 2), name="a"),
        "async": lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(3 if odd else 2), name="a")),
    }
    for word, call in calls.items():
        checks.raises(MismatchError, call, others)
        checks.raises(hvd.HorovodInternalError, call, others)
        checks.equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.full((1,), float(hvd.size())), word)


@case
def barrier(checks: Checks) -> None:
    for process_set in sets():
        hvd.barrier(process_set)
        hvd.barrier(process_set=process_set)


@case
def names(checks: Checks) -> None:
    for name in ["é", "a b/c", "x" * 900]:
        checks.equal(hvd.allreduce(torch.ones(1), name=name), torch.ones(1), name)
    checks.raises(InvalidError, lambda: hvd.allreduce(torch.ones(1), name="x" * 2000), "name")


@case
def later(checks: Checks) -> None:
    checks.raises(UnavailableError, hvd.join, "join")
    checks.raises(UnavailableError, lambda: hvd.sparse_allreduce_async(torch.ones(1)), "sparse_allreduce_async")
    checks.raises(UnavailableError, lambda: hvd.SyncBatchNorm(3), "SyncBatchNorm")
    checks.raises(UnavailableError, lambda: hvd.elastic.TorchState(), "elastic.TorchState")
