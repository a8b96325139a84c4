"""Operations as they are given to the engine: tensors in, and how the result is made of what it hands back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deuteron import _core
from deuteron.errors import InvalidError
from deuteron.torch.handles import Pending
from deuteron.torch.process_sets import ProcessSet
from deuteron.torch.tensors import (
    copied,
    describe,
    finished,
    from_memory,
    native,
    require_writable,
    restore,
    row,
)

#: A tensor, and how many of its rows are of each rank.
Gathered = tuple[Tensor, list[int]]


def label(kind: str, name: str | None) -> str | None:
    """What an operation is called among ranks; the engine numbers those without a name."""
    return None if name is None else f"{kind}.{name}"


def reduce(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    now: bool = False,
) -> Pending[list[Tensor]]:
    """Into new tensors."""
    engine = process_set.engine()
    scaled = prescale != 1.0 or postscale != 1.0
    works = [copied(tensor, op, scaled) for tensor in tensors]
    operation = engine.all_reduce(label(kind, name), [describe(work) for work in works], op, prescale, postscale, now)
    wanted = [(tensor.dtype, tensor.device) for tensor in tensors]

    def finish(_: list[_core.Memory]) -> list[Tensor]:
        return [finished(work, *type_and_device) for work, type_and_device in zip(works, wanted, strict=True)]

    return Pending(operation, works, finish)


def reduce_in_place(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    now: bool = False,
) -> Pending[list[Tensor]]:
    engine = process_set.engine()
    scaled = prescale != 1.0 or postscale != 1.0
    works = [native(tensor, op, scaled) for tensor in tensors]
    for tensor, work in zip(tensors, works, strict=True):
        if work is not tensor:
            require_writable(tensor)
    operation = engine.all_reduce(label(kind, name), [describe(work) for work in works], op, prescale, postscale, now)

    def finish(_: list[_core.Memory]) -> list[Tensor]:
        return [restore(tensor, work) for tensor, work in zip(tensors, works, strict=True)]

    return Pending(operation, [*tensors, *works], finish)


def scatter(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    now: bool = False,
) -> Pending[list[Tensor]]:
    engine = process_set.engine()
    scaled = prescale != 1.0 or postscale != 1.0
    works = [native(tensor, op, scaled) for tensor in tensors]
    if any(tensor.dim() == 0 for tensor in tensors):
        raise InvalidError("a tensor without dimensions has no rows to scatter: use tensor.reshape(1)")
    operation = engine.reduce_scatter(
        label(kind, name), [describe(work) for work in works], op, prescale, postscale, now
    )
    wanted = [(tensor.dtype, tensor.device) for tensor in tensors]

    def finish(made: list[_core.Memory]) -> list[Tensor]:
        outputs = []
        for work, memory, type_and_device in zip(works, made, wanted, strict=True):
            each, rest = divmod(work.shape[0], engine.size)
            shape = (each + (engine.rank < rest), *work.shape[1:])
            outputs.append(finished(from_memory(memory, work.dtype, shape), *type_and_device))
        return outputs

    return Pending(operation, works, finish)


def _require_rows(tensor: Tensor, what: str) -> None:
    if tensor.dim() == 0:
        raise InvalidError(f"a tensor without dimensions has no rows to {what}: use tensor.reshape(1)")


def gather(
    kind: str, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, now: bool = False
) -> Pending[list[Gathered]]:
    engine = process_set.engine()
    works = [native(tensor) for tensor in tensors]
    for tensor in tensors:
        _require_rows(tensor, "gather")
    # Rows without elements leave nothing to count them by: their number itself is gathered.
    sent = [work if row(work.shape) else torch.tensor([work.shape[0]]) for work in works]
    operation = engine.all_gather(label(kind, name), [describe(work) for work in sent], now)
    wanted = [(tensor.dtype, tensor.device) for tensor in tensors]

    def finish(made: list[_core.Memory]) -> list[Gathered]:
        outputs = []
        for work, memory, type_and_device in zip(works, made, wanted, strict=True):
            elements = row(work.shape)
            if elements:
                rows = [count // elements for count in memory.counts]
                output = from_memory(memory, work.dtype, (sum(rows), *work.shape[1:]))
            else:
                rows = torch.frombuffer(memory, dtype=torch.int64).tolist()
                output = work.new_empty((sum(rows), *work.shape[1:]))
            outputs.append((finished(output, *type_and_device), rows))
        return outputs

    return Pending(operation, sent, finish)


def spread(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, now: bool = False
) -> Pending[Tensor]:
    engine = process_set.engine()
    root = process_set.index(root_rank)
    work = copied(tensor)
    operation = engine.broadcast(label("broadcast", name), (describe(work),), root, now)
    dtype, device = tensor.dtype, tensor.device
    return Pending(operation, (work,), lambda _: finished(work, dtype, device))


def spread_in_place(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, now: bool = False
) -> Pending[Tensor]:
    engine = process_set.engine()
    root = process_set.index(root_rank)
    work = native(tensor)
    if work is not tensor:
        require_writable(tensor)
    operation = engine.broadcast(label("broadcast", name), (describe(work),), root, now)
    return Pending(operation, (tensor, work), lambda _: restore(tensor, work))


def _split(splits: Tensor | Sequence[int] | None, ranks: int, rows: int) -> list[int]:
    """How many rows each rank gets."""
    if splits is None:
        if rows % ranks:
            raise InvalidError(f"{rows} rows cannot be shared out evenly among {ranks} ranks: pass splits")
        return [rows // ranks] * ranks
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.is_floating_point() or splits.is_complex() or splits.dtype is torch.bool:
            raise InvalidError(f"splits are a row of integers, not {splits.dtype} of shape {list(splits.shape)}")
        splits = splits.tolist()
    counts = [int(count) for count in splits]
    if len(counts) != ranks:
        raise InvalidError(f"{len(counts)} splits for {ranks} ranks: there is one for each")
    if any(count < 0 for count in counts):
        raise InvalidError(f"splits are numbers of rows, which cannot be negative: {counts}")
    if sum(counts) > rows:
        raise InvalidError(f"the splits take {sum(counts)} rows of {rows}")
    return counts


def exchange(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet, now: bool = False
) -> Pending[Gathered]:
    engine = process_set.engine()
    work = native(tensor)
    _require_rows(tensor, "exchange")
    counts = _split(splits, engine.size, work.shape[0])
    dtype, device, shape = tensor.dtype, tensor.device, work.shape
    elements = row(shape)
    if elements:
        sent = work
        operation = engine.all_to_all(label("alltoall", name), describe(sent), counts, now)
    else:
        # As for gathering, the numbers of rows go instead of the rows.
        sent = torch.tensor(counts)
        operation = engine.all_to_all(label("alltoall", name), describe(sent), [1] * engine.size, now)

    def finish(made: list[_core.Memory]) -> Gathered:
        memory = made[0]
        if elements:
            rows = [count // elements for count in memory.counts]
            output = from_memory(memory, work.dtype, (sum(rows), *shape[1:]))
        else:
            rows = torch.frombuffer(memory, dtype=torch.int64).tolist()
            output = work.new_empty((sum(rows), *shape[1:]))
        return finished(output, dtype, device), rows

    return Pending(operation, (sent,), finish)
