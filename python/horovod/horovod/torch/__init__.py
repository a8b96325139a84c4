"""PyTorch."""

from deuteron.torch import *  # noqa: F403
from deuteron.torch import __all__ as __all__
