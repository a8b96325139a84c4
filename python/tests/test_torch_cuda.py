"""Tensors of a GPU, where there is one: results come back on it."""

from __future__ import annotations

from collections.abc import Callable

import deuteron.torch as hvd
import pytest
import torch
from cases import Checks, verify

CASES: dict[str, Callable[[Checks], None]] = {}


def case(function: Callable[[Checks], None]) -> Callable[[Checks], None]:
    CASES[function.__name__] = function
    return function


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test(name: str, ranks: int) -> None:
    verify(__file__, ranks, name)


def own(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.arange(1, 1 + torch.Size(shape).numel(), device="cuda").reshape(shape).to(dtype) * (hvd.rank() + 1)


def on_gpu(checks: Checks, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    checks.true(actual.is_cuda, f"{what} is on {actual.device}")
    checks.equal(actual.cpu(), expected.cpu(), what)


@case
def operations(checks: Checks) -> None:
    size, me = hvd.size(), hvd.rank()
    total = sum(range(1, size + 1))
    for dtype in [torch.float32, torch.bfloat16, torch.int64, torch.complex64]:
        x = own(4, 3, dtype=dtype)
        base = x / (me + 1) if dtype != torch.int64 else x // (me + 1)
        base = base.to(dtype)
        on_gpu(checks, hvd.allreduce(x, op=hvd.Sum), base * total, f"allreduce of {dtype}")
        on_gpu(checks, hvd.allreduce(x.t(), op=hvd.Sum), (base * total).t(), f"transposed, {dtype}")
        on_gpu(checks, hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), base * total, "async")
        on_gpu(checks, hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], base * total, "grouped")
        changed = x.clone()
        checks.true(hvd.allreduce_(changed, op=hvd.Sum) is changed, "the same tensor")
        on_gpu(checks, changed, base * total, "in place")
        gathered = torch.cat([base * (rank + 1) for rank in range(size)])
        on_gpu(checks, hvd.allgather(x), gathered, "allgather")
        on_gpu(checks, hvd.broadcast(x, size - 1), base * size, "broadcast")
        changed = x.clone()
        hvd.broadcast_(changed, size - 1)
        on_gpu(checks, changed, base * size, "broadcast in place")
        result, counts = hvd.alltoall(x, torch.tensor([1] * size, device="cuda"))
        on_gpu(checks, result, torch.stack([base[me] * (rank + 1) for rank in range(size)]), "alltoall")
        on_gpu(checks, counts, torch.ones(size, dtype=torch.int32), "received splits")
        share = hvd.reducescatter(x, op=hvd.Sum)
        on_gpu(checks, share, (base * total).split(4 // size)[me], "reducescatter")


@case
def after_kernels(checks: Checks) -> None:
    """What was started on the GPU before is done first, and what follows sees the result."""
    x = own(1 << 20)
    for _ in range(20):
        x = hvd.allreduce(x * 2, op=hvd.Average) / 2
    wanted = torch.arange(1, 1 + (1 << 20)).float() * (sum(range(1, hvd.size() + 1)) / hvd.size())
    checks.close(x.cpu(), wanted)


@case
def gradients(checks: Checks) -> None:
    x = own(3).requires_grad_()
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    assert x.grad is not None
    on_gpu(checks, x.grad, torch.full((3,), float(hvd.size())), "gradient")


@case
def states(checks: Checks) -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2).to(own(1).device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        model(own(2, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    first = hvd.broadcast_object([parameter.detach().cpu() for parameter in model.parameters()], 0)
    for parameter, wanted in zip(model.parameters(), first, strict=True):
        on_gpu(checks, parameter.detach(), wanted, "parameter")
        state = optimizer.state[parameter]
        checks.true(state["exp_avg"].is_cuda and not state["step"].is_cuda, "where the root keeps them")
        checks.equal(float(state["step"]), 1.0)
    checks.equal(optimizer.param_groups[0]["lr"], 0.1)
