"""Process data, train on it in parallel and predict with the model, on the cluster you already have."""

from deuteron import data, errors
from deuteron._context import Context, context
from deuteron._core import Accelerator, TaskInfo, __version__
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
