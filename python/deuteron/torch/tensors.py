"""Tensors as the engine sees them: an address, a type and a shape.

The engine works on contiguous host memory of ten types. What is not like that is worked on in a copy: tensors with
gaps, and tensors of a device, which are staged through host memory here and nowhere else. Other types are passed off
as one of the ten wherever the result is the same, bit by bit:

=====================  =====================  ===========================================================
type                   passed off as          where
=====================  =====================  ===========================================================
complex                pairs of real numbers  gathered, broadcast, exchanged, added, averaged
uint16, uint32, uint64 signed integers        gathered, broadcast, exchanged, added, multiplied (unscaled)
float8 and the like    bytes                  gathered, broadcast, exchanged
=====================  =====================  ===========================================================

Everything else is refused with the name of the type. ``bool`` is one of the ten: its sum and maximum are true where
any rank's is, its average, product and minimum where all are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deuteron import _core
from deuteron.errors import InvalidError

#: Horovod's numbers for reductions.
AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
_WORDS = {AVERAGE: "averaged", SUM: "added", MIN: "compared", MAX: "compared", PRODUCT: "multiplied"}

#: The engine's numbers for types.
CODES: dict[torch.dtype, int] = {
    torch.bool: 0,
    torch.uint8: 1,
    torch.int8: 2,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.float16: 6,
    torch.bfloat16: 7,
    torch.float32: 8,
    torch.float64: 9,
}
_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: An address, a type's number, a shape.
Place = tuple[int, int, Sequence[int]]


def describe(tensor: Tensor) -> Place:
    """Where a native tensor lies and what it is.

    >>> address, code, shape = describe(torch.zeros(2, 3))
    >>> code, tuple(shape)
    (8, (2, 3))
    """
    return tensor.data_ptr(), CODES[tensor.dtype], tensor.shape


def native(tensor: Tensor, reduction: int | None = None, scaled: bool = False) -> Tensor:
    """The tensor itself if the engine can work on it, else a view or a copy of it that it can.

    >>> native(torch.tensor([1 + 2j])).tolist()
    [[1.0, 2.0]]
    """
    try:
        if (
            tensor.dtype in CODES
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            return tensor
    except AttributeError:
        raise InvalidError(f"a tensor was expected, not {type(tensor).__name__}") from None
    return _passed_off(tensor, reduction, scaled)


def copied(tensor: Tensor, reduction: int | None = None, scaled: bool = False) -> Tensor:
    """The same, but always memory of its own, apart from any graph."""
    work = native(tensor, reduction, scaled)
    if work.requires_grad:
        work = work.detach()
    return work.clone() if is_in(work, tensor) else work


def is_in(work: Tensor, tensor: Tensor) -> bool:
    """Whether what is done to ``work``, made of ``tensor``, is done to it."""
    return work is tensor or (tensor.is_cpu and work.data_ptr() == tensor.data_ptr())


def _passed_off(tensor: Tensor, reduction: int | None, scaled: bool) -> Tensor:
    dtype = tensor.dtype
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise InvalidError(f"a tensor of {kind} layout cannot be sent: make it dense first")
    if tensor.is_meta:
        raise InvalidError("a tensor of the meta device has no elements to send")
    refuse(dtype, reduction, scaled)
    work = tensor.detach().to("cpu").resolve_neg().resolve_conj().contiguous()
    if dtype in CODES:
        return work
    if dtype.is_complex:
        return torch.view_as_real(work)
    return work.view(_UNSIGNED.get(dtype) or _BY_SIZE[dtype.itemsize])


def refuse(dtype: torch.dtype, reduction: int | None, scaled: bool = False) -> None:
    """Refuses a reduction that would not be right for a type."""
    if dtype in CODES or reduction is None:
        return
    if dtype.is_complex and reduction in (AVERAGE, SUM):
        return
    if dtype in _UNSIGNED and reduction in (SUM, PRODUCT) and not scaled:
        return
    how = "scaled" if dtype in _UNSIGNED and reduction in (SUM, PRODUCT) else _WORDS[reduction]
    raise InvalidError(f"tensors of {dtype} cannot be {how} across ranks: convert them to another type first")


def as_type(work: Tensor, dtype: torch.dtype) -> Tensor:
    """What was passed off, as what it is.

    >>> as_type(torch.tensor([[1.0, 2.0]]), torch.complex64)
    tensor([1.+2.j])
    """
    if work.dtype is dtype:
        return work
    return torch.view_as_complex(work) if dtype.is_complex else work.view(dtype)


def finished(work: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The result for the caller: its type, on its device."""
    if work.dtype is not dtype:
        work = as_type(work, dtype)
    return work if device.type == "cpu" else work.to(device)


def require_writable(tensor: Tensor) -> None:
    """Refuses a tensor whose elements share memory: it cannot hold the result of an operation in place."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            raise InvalidError("an expanded tensor cannot be changed in place: clone it first")


def restore(tensor: Tensor, work: Tensor) -> Tensor:
    """Puts the result of an operation in place where the caller expects it, and tells autograd."""
    if not is_in(work, tensor):
        tensor.detach().copy_(as_type(work, tensor.dtype))
    elif not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor


def from_memory(memory: _core.Memory, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor that lies where the engine has put the result."""
    if len(memory) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def row(shape: Sequence[int]) -> int:
    """Elements of one row.

    >>> row((5, 3, 2))
    6
    """
    return math.prod(shape[1:])
