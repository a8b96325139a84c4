"""Smaller forms in which gradients travel."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """What ``compression=`` takes: these two, as static methods of a class or methods of an object."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The form that travels, and whatever is needed to come back."""
        ...

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor again."""
        ...


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class _Narrow:
    """Floating-point tensors travel as a narrower type; others as they are."""

    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as the narrower type, and the type it had."""
        return (tensor.to(cls.wire) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as the type it had."""
        return tensor.to(ctx)


class FP16Compressor(_Narrow):
    """Travels as float16: 11 bits of precision, and beyond 65,504 it is infinite."""

    wire = torch.float16


class BF16Compressor(_Narrow):
    """Travels as bfloat16: the range of float32 with 8 bits of precision."""

    wire = torch.bfloat16


class Compression:
    """What there is to choose from; any class with ``compress`` and ``decompress`` does as well.

    >>> compressed, dtype = Compression.bf16.compress(torch.ones(2))
    >>> compressed.dtype, Compression.bf16.decompress(compressed, dtype).dtype
    (torch.bfloat16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def wire_type(compression: object, dtype: torch.dtype) -> torch.dtype | None:
    """The type in which a gradient travels under one of ours; ``None`` if only the user's own class knows."""
    if compression is NoneCompressor:
        return dtype
    if compression is FP16Compressor or compression is BF16Compressor:
        return compression.wire if dtype.is_floating_point else dtype
    return None
