"""Names of Horovod that are not there yet: each says so when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from deuteron.errors import UnavailableError
from deuteron.torch.process_sets import ProcessSet, global_process_set


def unavailable(what: str, instead: str) -> UnavailableError:
    """What using it raises."""
    return UnavailableError(f"{what} is not available yet: {instead}")


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> NoReturn:
    """Not available yet."""
    raise unavailable(
        "sparse_allreduce_async", "reduce tensor.to_dense(), or pass sparse_as_dense=True to the optimizer"
    )


def join(device: int = -1) -> NoReturn:
    """Not available yet."""
    raise unavailable("join", "give every rank the same number of batches")


class SyncBatchNorm:
    """Not available yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise unavailable("SyncBatchNorm", "use torch.nn.BatchNorm, whose statistics are of each rank's own batches")


class _Elastic:
    """Not available yet."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unavailable(f"elastic.{name}", "restart the whole gang with deuteron run --restarts, from a checkpoint")

    def __repr__(self) -> str:
        return "<deuteron.torch.elastic, not available yet>"


#: Not available yet.
elastic = _Elastic()
