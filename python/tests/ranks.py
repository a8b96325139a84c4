"""Functions of tests on real ranks."""

from __future__ import annotations

import faulthandler
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import deuteron

TESTS = Path(__file__).parent
# The one that is tested: installed, or on the path.
PACKAGE = Path(deuteron.__file__).resolve().parents[1]


class RankError(AssertionError):
    """A rank has raised."""


def until(found: Callable[[], Any], seconds: float = 20) -> Any:
    """What is found, as soon as it is."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
    return value


def devices(folder: Path, count: int) -> Path:
    """A discovery script, as Spark has them."""
    path = folder / "discover"
    addresses = ", ".join(f'"{index}"' for index in range(count))
    path.write_text(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": [{addresses}]}}\'\n')
    path.chmod(0o755)
    return path


def on_ranks(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 120,
    survivors: bool = False,
    flags: tuple[str, ...] = (),
) -> list[Any]:
    """Calls a function on so many processes, and returns what it returned on each.

    What a rank raises is raised. With ``survivors`` ranks may end without a result, which is ``None`` then.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(_pickled(function, args))
        child = f"import ranks; ranks._call({folder!r}, {seconds})"
        command = [sys.executable, "-m", "deuteron", "run", "-n", str(ranks), *flags, "--", sys.executable, "-c", child]
        path = os.pathsep.join([str(PACKAGE), str(TESTS), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as job:
            try:
                output, _ = job.communicate(timeout=seconds + 10)
            except subprocess.TimeoutExpired:
                job.terminate()
                output, _ = job.communicate()
                raise TimeoutError(f"{ranks} ranks are not done after {seconds} s\n{output}") from None
        results = []
        for rank in range(ranks):
            file = Path(folder, str(rank))
            raised, value = pickle.loads(file.read_bytes()) if file.exists() else (None, None)
            if raised:
                raise RankError(f"rank {rank} of {ranks}: {raised}\n{output}")
            if not file.exists() and not survivors:
                raise RankError(f"rank {rank} of {ranks} ended without a result\n{output}")
            results.append(value)
        return results


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    module = sys.modules[function.__module__]
    if not module.__name__.split(".")[-1].startswith("test_"):
        return bytes(cloudpickle.dumps((function, args)))
    # Ranks may not find the module under the name that pytest has given it.
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps((function, args)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _call(folder: str, seconds: float) -> None:
    """What every rank runs."""
    # faulthandler's own timer would keep a forked child from ending.
    dump = threading.Timer(seconds, faulthandler.dump_traceback)
    dump.daemon = True
    dump.start()
    function, args = pickle.loads(Path(folder, "call").read_bytes())
    raised, value, process = "", None, os.getpid()
    try:
        value = function(*args)
    except BaseException:
        if os.getpid() != process:
            # A fork that ends: nothing below is its own.
            raise
        raised = traceback.format_exc()
    dump.cancel()
    rank = os.environ["DEUTERON_RANK"]
    part = Path(folder, f"{rank}.part")
    part.write_bytes(cloudpickle.dumps((raised, value)))
    part.rename(Path(folder, rank))
    if raised:
        sys.exit(1)
