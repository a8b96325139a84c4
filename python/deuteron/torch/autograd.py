"""Gradients of operations.

Those of reductions are, by Horovod's convention, of the sum of all ranks' losses: a sum has the sum of all ranks'
gradients, an average their average. Minimum and maximum pass it on to where the value came from, in equal shares if it
came from several ranks; a product multiplies it with what the others had. What ``alltoall`` moved is moved back.

Those of ``allgather`` and ``broadcast`` are averages over the ranks, by the same convention: a loss that is the same on
every rank has the gradient that one process would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import InvalidError
from deuteron.torch import operations
from deuteron.torch.operations import Gathered
from deuteron.torch.process_sets import ProcessSet
from deuteron.torch.tensors import AVERAGE, PRODUCT, SUM

_LINEAR = (AVERAGE, SUM)


def gradient_of(name: str | None) -> str | None:
    """Name of the operation that computes the gradient of another."""
    return None if name is None else f"{name}.gradient"


def is_traced(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd follows any of them."""
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.arguments = kind, gradient_of(name), op, prescale, postscale, process_set
        outputs = tuple(operations.reduce(kind, tensors, name, op, prescale, postscale, process_set, now=True).result())
        if op not in _LINEAR:
            ctx.save_for_backward(*tensors, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        kind, name, op, prescale, postscale, process_set = ctx.arguments
        if op in _LINEAR:
            reduced = reduce(kind, gradients, name, op, prescale, postscale, process_set)
        else:
            saved = ctx.saved_tensors
            count = len(gradients)
            sums = reduce(kind, gradients, name, SUM, 1.0, 1.0, process_set)
            shares = [
                _share(op, tensor, output, process_set)
                for tensor, output in zip(saved[:count], saved[count:], strict=True)
            ]
            reduced = [gradient * share for gradient, share in zip(sums, shares, strict=True)]
        return None, None, None, None, None, None, *reduced


def _share(op: int, tensor: Tensor, output: Tensor, process_set: ProcessSet) -> Tensor:
    """By how much a rank's tensor moves the minimum, maximum or product."""
    if op == PRODUCT:
        everybody = gather("allgather", (tensor.detach().unsqueeze(0),), None, process_set)[0]
        own = process_set.rank()
        return torch.cat([everybody[:own], everybody[own + 1 :]]).prod(0)
    mine = (tensor == output).to(output.dtype)
    return mine / reduce("allreduce", (mine,), None, SUM, 1.0, 1.0, process_set)[0]


def reduce(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Sequence[Tensor]:
    """Into new tensors, through autograd if anybody asks for gradients."""
    if not is_traced(tensors):
        return operations.reduce(kind, tensors, name, op, prescale, postscale, process_set, now=True).result()
    if op not in _LINEAR and (prescale != 1.0 or postscale != 1.0):
        scaled = [tensor * prescale for tensor in tensors]
        return [output * postscale for output in reduce(kind, scaled, name, op, 1.0, 1.0, process_set)]
    outputs: tuple[Tensor, ...] = _AllReduce.apply(kind, name, op, prescale, postscale, process_set, *tensors)
    return outputs


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        if op not in _LINEAR:
            raise InvalidError("only a sum or an average that is scattered has a gradient here")
        factor = prescale * postscale / (process_set.size() if op == AVERAGE else 1)
        ctx.arguments = gradient_of(name), factor, process_set
        return tuple(operations.scatter(kind, tensors, name, op, prescale, postscale, process_set, now=True).result())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        name, factor, process_set = ctx.arguments
        scaled = [gradient * factor for gradient in gradients]
        gathered = gather("grouped_allgather", scaled, name, process_set)
        return None, None, None, None, None, None, *gathered


def scatter(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Sequence[Tensor]:
    """The same for this rank's rows only."""
    if not is_traced(tensors):
        return operations.scatter(kind, tensors, name, op, prescale, postscale, process_set, now=True).result()
    outputs: tuple[Tensor, ...] = _ReduceScatter.apply(kind, name, op, prescale, postscale, process_set, *tensors)
    return outputs


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        gathered = operations.gather(kind, tensors, name, process_set, now=True).result()
        ctx.arguments = gradient_of(name), process_set
        ctx.rows = [rows for _, rows in gathered]
        return tuple(tensor for tensor, _ in gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        name, process_set = ctx.arguments
        own = process_set.rank()
        averages = reduce("grouped_allreduce", gradients, name, AVERAGE, 1.0, 1.0, process_set)
        parts = [
            average.narrow(0, sum(rows[:own]), rows[own]) for average, rows in zip(averages, ctx.rows, strict=True)
        ]
        return None, None, None, *parts


def gather(kind: str, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet) -> list[Tensor]:
    """One after the other, through autograd if anybody asks for gradients."""
    if not is_traced(tensors):
        return [tensor for tensor, _ in operations.gather(kind, tensors, name, process_set, now=True).result()]
    return list(_AllGather.apply(kind, name, process_set, *tensors))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.arguments = root_rank, gradient_of(name), process_set
        return operations.spread(tensor, root_rank, name, process_set, now=True).result()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        root_rank, name, process_set = ctx.arguments
        reduced = reduce("allreduce", gradients, name, AVERAGE, 1.0, 1.0, process_set)[0]
        if process_set.rank() != process_set.index(root_rank):
            reduced = reduced * 0
        return reduced, None, None, None


def spread(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    """From one rank to all, through autograd if anybody asks for gradients."""
    if not is_traced((tensor,)):
        return operations.spread(tensor, root_rank, name, process_set, now=True).result()
    output: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return output


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor]:
        gathered = operations.exchange(tensor, splits, name, process_set, now=True).result()
        ctx.arguments = tensor.shape[0], gathered[1], gradient_of(name), process_set
        output, received = with_splits(gathered)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        size, rows, name, process_set = ctx.arguments
        gradient, _ = exchange(gradients[0], rows, name, process_set)
        # Rows that were given to nobody.
        missing = size - gradient.shape[0]
        if missing:
            gradient = torch.cat([gradient, gradient.new_zeros((missing, *gradient.shape[1:]))])
        return gradient, None, None, None


def exchange(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    """Between all ranks, through autograd if anybody asks for gradients; with how many rows came from each."""
    if is_traced((tensor,)):
        output, received = _AllToAll.apply(tensor, splits, name, process_set)
        return output, received
    return with_splits(operations.exchange(tensor, splits, name, process_set, now=True).result())


def with_splits(gathered: Gathered) -> tuple[Tensor, Tensor]:
    """Numbers of rows as users get them."""
    output, rows = gathered
    return output, torch.tensor(rows, dtype=torch.int32, device=output.device)
