"""Process data, train on it in parallel and predict with the model, on the cluster you already have."""

from typing import TYPE_CHECKING, Any

from deuteron import errors
from deuteron._context import Context, context
from deuteron._core import Accelerator, TaskInfo, __version__

if TYPE_CHECKING:
    from deuteron import data
    from deuteron.data import barrier, map_batches
    from deuteron.launch import run

__all__ = [
    "Accelerator",
    "Context",
    "TaskInfo",
    "__version__",
    "barrier",
    "context",
    "data",
    "errors",
    "map_batches",
    "run",
]

#: Every rank imports this package when it starts, and few need these parts of it.
_LATER = {"barrier": "data", "data": "data", "map_batches": "data", "run": "launch"}

# Type checkers know these names from above, and are to miss all others.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module 'deuteron' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(f"deuteron.{_LATER[name]}")
        return getattr(module, name, module)


def __dir__() -> list[str]:
    return __all__
