"""``horovod.spark``: a function on the ranks of the active Spark session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TypeVar

import deuteron.spark
from deuteron.errors import InvalidError, UnavailableError

T = TypeVar("T")

__all__ = ["run", "run_elastic"]


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[T]:
    """Runs ``fn`` in ``num_proc`` ranks and returns their results in rank order; see ``deuteron.spark.run``."""
    for name, value in (("use_mpi", use_mpi), ("extra_mpi_args", extra_mpi_args)):
        if value:
            raise InvalidError(f"{name} of horovod.spark.run has no counterpart, leave it out: MPI is not used")
    return deuteron.spark.run(
        fn,
        args=args,
        kwargs=kwargs,
        num_proc=num_proc,
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
    )


def run_elastic(*args: Any, **kwargs: Any) -> Any:
    """Not there: a gang has one size."""
    raise UnavailableError(
        "horovod.spark.run_elastic: a gang has one size; use run, or deuteron.spark.run with restarts"
    )
