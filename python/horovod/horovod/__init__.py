"""Horovod's words on Deuteron."""

from deuteron import __version__

from horovod.runner import run

__all__ = ["__version__", "run"]
