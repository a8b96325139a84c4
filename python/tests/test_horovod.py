"""The distribution deuteron-horovod: scripts written for Horovod run as they are."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import deuteron.torch
import horovod
import horovod.torch as hvd
import pytest
from deuteron.errors import CollectiveError, InvalidError
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import allreduce_async

SCRIPT = """
    import os
    import horovod.torch as hvd
    import torch

    hvd.init()
    assert int(os.environ["HOROVOD_RANK"]) == hvd.rank() and int(os.environ["HOROVOD_SIZE"]) == hvd.size()
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
    )
    model(torch.full((4, 2), float(hvd.rank()))).sum().backward()
    optimizer.step()
    weights = hvd.allgather(model.weight.detach())
    assert (weights == weights[0]).all()
    print(f"trained {hvd.size()}")
"""


def test_names_are_ours() -> None:
    """Nothing is missing, nothing is a copy."""
    assert {name: getattr(hvd, name) for name in hvd.__all__} == {
        name: getattr(deuteron.torch, name) for name in deuteron.torch.__all__
    }
    assert HorovodInternalError is CollectiveError and issubclass(HorovodInternalError, RuntimeError)
    assert allreduce_async is hvd.allreduce_async and Compression is hvd.Compression and ProcessSet is hvd.ProcessSet


@pytest.mark.timeout(60)
def test_run() -> None:
    """``horovod.run`` with its own names of arguments."""
    assert horovod.run(lambda a, b: a * b, args=(6,), kwargs={"b": 7}, np=2, use_gloo=True, verbose=1) == [42, 42]
    with pytest.raises(InvalidError, match=r"hosts of horovod\.run has no counterpart"):
        horovod.run(print, np=2, hosts="a:1,b:1")
    with pytest.raises(TypeError, match="unexpected keyword argument 'nps'"):
        horovod.run(print, nps=2)


@pytest.mark.timeout(60)
def test_horovodrun(tmp_path: Path) -> None:
    """The command, with its own flags, and a script that knows nothing of us."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", "-H", "localhost:2"]
    ended = subprocess.run([*command, sys.executable, str(script)], capture_output=True, text=True, timeout=50)
    assert sorted(ended.stdout.splitlines()) == ["[0] trained 2", "[1] trained 2"], ended.stdout + ended.stderr
    ended = subprocess.run([*command, "--autotune", "true"], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 64 and "--autotune of horovodrun has no counterpart" in ended.stderr
