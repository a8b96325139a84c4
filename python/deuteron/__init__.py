"""Process data, train on it in parallel and predict with the model, on the cluster you already have."""

from deuteron import errors
from deuteron._context import Context, context
from deuteron._core import Accelerator, TaskInfo, __version__
from deuteron.launch import run

__all__ = ["Accelerator", "Context", "TaskInfo", "__version__", "context", "errors", "run"]
