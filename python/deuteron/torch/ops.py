"""Collective operations: synchronous, asynchronous, in place, grouped.

Ranks are matched by ``name``, whatever the order of their calls; calls without a name are matched by their order within
a process set.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, overload

from torch import Tensor

from deuteron.errors import InvalidError
from deuteron.torch import autograd, operations
from deuteron.torch.compression import Compression
from deuteron.torch.handles import start, wait
from deuteron.torch.later import unavailable
from deuteron.torch.operations import label
from deuteron.torch.process_sets import ProcessSet, global_process_set
from deuteron.torch.tensors import ADASUM, AVERAGE, CODES, MAX, MIN, PRODUCT, SUM, copied, describe, native

#: The sum divided by the number of ranks. Integers are cut off towards zero.
Average = AVERAGE
#: The sum; of ``bool``, whether any is true. Integers wrap around.
Sum = SUM
#: Not available yet.
Adasum = ADASUM
#: The smallest; a NaN wins.
Min = MIN
#: The largest; a NaN wins.
Max = MAX
#: The product. Integers wrap around.
Product = PRODUCT

_ALL = frozenset((Average, Sum, Min, Max, Product))
_first = itemgetter(0)


def reduction(op: int | None, average: bool | None = None) -> int:
    """The number of a reduction, from today's argument or the deprecated one."""
    if average is not None:
        if op is not None:
            raise InvalidError("pass op or average, not both: average is deprecated, and op says the same")
        warnings.warn("average is deprecated: pass op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    if op == Adasum:
        raise unavailable("Adasum", "use op=Average")
    if op not in _ALL:
        raise InvalidError(f"there is no reduction {op!r}: use Average, Sum, Min, Max or Product")
    return op


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """All ranks' tensors combined, as a new tensor on every rank.

    Ranks are matched by ``name``, or by the order of their calls without one. Every input is multiplied with
    ``prescale_factor`` first, the result with ``postscale_factor`` last. Differentiable.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Sum)
    tensor([1., 2.])
    """
    op = reduction(op, average)
    if compression is not Compression.none:
        tensor, context = compression.compress(tensor)
        reduced = allreduce(
            tensor,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        restored: Tensor = compression.decompress(reduced, context)
        return restored
    # The shortest way for what is by far the most frequent.
    try:
        if tensor.dtype in CODES and tensor.is_cpu and not tensor.requires_grad:
            work = copied(tensor)
            place = (describe(work),)
            wait(
                process_set.engine().all_reduce(
                    label("allreduce", name), place, op, prescale_factor, postscale_factor, now=True
                ),
                work,
            )
            return work
    except AttributeError:
        native(tensor)
        raise
    return autograd.reduce("allreduce", (tensor,), name, op, prescale_factor, postscale_factor, process_set)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The same, returning a handle at once. Not differentiable.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> handle = hvd.allreduce_async(torch.ones(2), name="ones")
    >>> hvd.synchronize(handle)
    tensor([1., 1.])
    """
    op = reduction(op, average)
    return start(
        operations.reduce("allreduce", (tensor,), name, op, prescale_factor, postscale_factor, process_set).then(_first)
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The same in place. Not differentiable."""
    op = reduction(op, average)
    return operations.reduce_in_place(
        "allreduce", (tensor,), name, op, prescale_factor, postscale_factor, process_set, now=True
    ).result()[0]


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The same in place, returning a handle at once; the tensor is left alone until it is synchronized."""
    op = reduction(op, average)
    return start(
        operations.reduce_in_place(
            "allreduce", (tensor,), name, op, prescale_factor, postscale_factor, process_set
        ).then(_first)
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Several tensors in one operation: all are done together. Differentiable."""
    op = reduction(op, average)
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = autograd.reduce(
        "grouped_allreduce",
        [tensor for tensor, _ in compressed],
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, compressed, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The same, returning one handle at once. Not differentiable."""
    op = reduction(op, average)
    return start(
        operations.reduce("grouped_allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """The same in place. Not differentiable."""
    op = reduction(op, average)
    return operations.reduce_in_place(
        "grouped_allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set, now=True
    ).result()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The same in place, returning one handle at once."""
    op = reduction(op, average)
    return start(
        operations.reduce_in_place(
            "grouped_allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set
        )
    )


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of all ranks' tensors combined; the first ranks get one row more if they do not come out even.

    The gradient is that of the sum of all ranks' losses.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.reducescatter(torch.tensor([[1.0], [2.0]]), op=hvd.Sum)
    tensor([[1.],
            [2.]])
    """
    op = reduction(op)
    compressed, context = compression.compress(tensor)
    output = autograd.scatter("reducescatter", (compressed,), name, op, prescale_factor, postscale_factor, process_set)[
        0
    ]
    restored: Tensor = compression.decompress(output, context)
    return restored


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """The same, returning a handle at once. Not differentiable."""
    op = reduction(op)
    return start(
        operations.scatter("reducescatter", (tensor,), name, op, prescale_factor, postscale_factor, process_set).then(
            _first
        )
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Several tensors in one operation: all are done together. Differentiable."""
    op = reduction(op)
    compressed = [compression.compress(tensor) for tensor in tensors]
    outputs = autograd.scatter(
        "grouped_reducescatter",
        [tensor for tensor, _ in compressed],
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return [compression.decompress(output, context) for output, (_, context) in zip(outputs, compressed, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """The same, returning one handle at once. Not differentiable."""
    op = reduction(op)
    return start(
        operations.scatter("grouped_reducescatter", tensors, name, op, prescale_factor, postscale_factor, process_set)
    )


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' tensors one after the other along the first dimension, in which they may differ. Differentiable.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.allgather(torch.tensor([[1, 2]]))
    tensor([[1, 2]])
    """
    return autograd.gather("allgather", (tensor,), name, process_set)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """The same, returning a handle at once. Not differentiable."""
    return start(operations.gather("allgather", (tensor,), name, process_set).then(lambda gathered: gathered[0][0]))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Several tensors in one operation: all are done together. Differentiable."""
    return autograd.gather("grouped_allgather", tensors, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The same, returning one handle at once. Not differentiable."""
    pending = operations.gather("grouped_allgather", tensors, name, process_set)
    return start(pending.then(lambda gathered: [tensor for tensor, _ in gathered]))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, as a new tensor on every rank. Differentiable.

    ``root_rank`` is a rank among all, also for a process set. Tensors of the same shape and type on all ranks say
    what is to come.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.broadcast(torch.tensor(3), root_rank=0)
    tensor(3)
    """
    return autograd.spread(tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The same, returning a handle at once. Not differentiable."""
    return start(operations.spread(tensor, root_rank, name, process_set))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The same in place. Not differentiable."""
    return operations.spread_in_place(tensor, root_rank, name, process_set, now=True).result()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The same in place, returning a handle at once; the tensor is left alone until it is synchronized."""
    return start(operations.spread_in_place(tensor, root_rank, name, process_set))


@overload
def alltoall(
    tensor: Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor: ...
@overload
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, Tensor]: ...
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Gives rows to each rank, and returns those that the ranks have given to this one. Differentiable.

    ``splits`` says how many rows each rank gets, in order; then the result comes with how many came from each. Without
    it all get as many. Rows that are left over stay.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.alltoall(torch.tensor([1, 2]))
    tensor([1, 2])
    >>> hvd.alltoall(torch.tensor([1, 2]), splits=[1])
    (tensor([1]), tensor([1], dtype=torch.int32))
    """
    output, received = autograd.exchange(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The same, returning a handle at once. Not differentiable."""
    pending = operations.exchange(tensor, splits, name, process_set)
    if splits is None:
        return start(pending.then(lambda gathered: gathered[0]))
    return start(pending.then(autograd.with_splits))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks are here.

    >>> import deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.barrier()
    """
    process_set.engine().barrier(now=True).wait()
