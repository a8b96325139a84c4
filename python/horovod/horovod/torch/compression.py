"""Compression of gradients."""

from deuteron.torch.compression import Compression

__all__ = ["Compression"]
