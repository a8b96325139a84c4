"""The words of the package: all of Horovod's are there, documented, and their examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import deuteron.torch as hvd
import pytest

#: What scripts that import ``horovod.torch`` may use.
WORDS = [
    "init",
    "shutdown",
    "is_initialized",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
    "start_timeline",
    "stop_timeline",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "gloo_built",
    "gloo_enabled",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "Compression",
    "HorovodInternalError",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "alltoall",
    "alltoall_async",
    "reducescatter",
    "reducescatter_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "sparse_allreduce_async",
    "join",
    "barrier",
    "poll",
    "synchronize",
    "ProcessSet",
    "global_process_set",
    "add_process_set",
    "remove_process_set",
    "DistributedOptimizer",
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "broadcast_object",
    "broadcast_object_fn",
    "allgather_object",
    "SyncBatchNorm",
    "elastic",
]

MODULES = [f"deuteron.torch.{module.name}" for module in pkgutil.iter_modules(hvd.__path__)]


def test_all_words() -> None:
    assert set(WORDS) <= set(hvd.__all__)
    for word in hvd.__all__:
        value = getattr(hvd, word)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert value.__doc__, word


@pytest.mark.parametrize("name", ["deuteron.torch", *MODULES])
def test_module_says_what_it_is(name: str) -> None:
    assert (importlib.import_module(name).__doc__ or "").strip()


@pytest.mark.timeout(120)
def test_examples() -> None:
    """In one process of their own, since they initialise it."""
    script = (
        "import doctest, importlib, sys\n"
        f"flags = {doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL}\n"
        "results = [doctest.testmod(importlib.import_module(name), optionflags=flags) for name in sys.argv[1:]]\n"
        "print(sum(result.attempted for result in results))\n"
        "sys.exit(sum(result.failed for result in results))\n"
    )
    command = [sys.executable, "-c", script, "deuteron.torch", *MODULES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(ended.stdout) > 30


@pytest.mark.timeout(60)
def test_import_starts_nothing() -> None:
    script = (
        "import os, deuteron.torch as hvd\n"
        "assert not hvd.is_initialized()\n"
        "names = {open(f'/proc/self/task/{task}/comm').read().strip() for task in os.listdir('/proc/self/task')}\n"
        "assert not any(name.startswith('deuteron') for name in names), names\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
