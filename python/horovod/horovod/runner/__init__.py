"""``horovod.run``: a function on processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import deuteron
from deuteron.errors import InvalidError

T = TypeVar("T")

#: What has no counterpart, and why.
_LEFT_OUT = {
    "min_np": "a gang has one size",
    "max_np": "a gang has one size",
    "slots": "a gang has one size",
    "cooldown_range": "a gang has one size",
    "hosts": "functions run on this machine: start a script on several hosts with deuteron run --hosts",
    "hostfile": "functions run on this machine: start a script on several hosts with deuteron run --hosts",
    "ssh_port": "functions run on this machine",
    "ssh_identity_file": "functions run on this machine",
    "use_mpi": "MPI is not used",
    "mpi_args": "MPI is not used",
}
#: What may be left as it is: there is nothing to choose.
_WITHOUT_MEANING = ("disable_cache", "use_gloo", "network_interfaces", "network_interface")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    start_timeout: float | None = None,
    verbose: int | None = None,
    executable: str | None = None,
    reset_limit: int | None = None,
    output_filename: str | None = None,
    **others: Any,
) -> list[T]:
    """Runs ``func`` on ``np`` processes and returns their results in rank order.

    >>> import horovod
    >>> horovod.run(lambda x: x + 1, args=(41,), np=2)
    [42, 42]
    """
    for name, value in others.items():
        if name in _LEFT_OUT:
            if value:
                raise InvalidError(f"{name} of horovod.run has no counterpart, leave it out: {_LEFT_OUT[name]}")
        elif name not in _WITHOUT_MEANING:
            raise TypeError(f"run() got an unexpected keyword argument {name!r}")
    return deuteron.run(
        func,
        args=args,
        kwargs=kwargs,
        num_proc=np,
        start_timeout=start_timeout,
        verbose=1 if verbose is None else verbose,
        executable=executable,
        restarts=reset_limit or 0,
        output=output_filename,
    )


__all__ = ["run"]
