"""The distributed optimizer on real ranks: it trains as one process does, by every recipe and optimizer of PyTorch.

Starting ranks costs seconds, so a gang runs many cases one after the other; each is a function that every rank calls.
"""

# mypy: allow-untyped-calls, no-warn-return-any
from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import pickle
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deuteron.torch as hvd
import pytest
import torch
from deuteron.errors import CollectiveError, InvalidError, MismatchError, PeerLostError, UnavailableError
from deuteron.torch import gradients
from ranks import on_ranks
from torch import Tensor, nn

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Runs on two ranks, with all the others."""
    CASES[function.__name__] = function
    return function


def run_cases(names: list[str]) -> list[str]:
    """What a rank does: the cases in order."""
    torch.set_num_threads(1)
    hvd.init()
    done = []
    for name in names:
        torch.manual_seed(7)
        try:
            CASES[name]()
        except BaseException as error:
            error.add_note(f"in case {name} on rank {hvd.rank()}")
            raise
        done.append(name)
    return done


# What the cases share


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )


class Words(nn.Module):
    """An embedding whose weight is the last layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 11)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(tokens).mean(1))))


def wide() -> nn.Module:
    """Parameters that have an operation of their own between some that share one."""
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))


BATCH = 24
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "mlp": (mlp, lambda generator: torch.randn(BATCH, 6, generator=generator)),
    "wide": (wide, lambda generator: torch.randn(BATCH, 6, generator=generator)),
    "convnet": (convnet, lambda generator: torch.randn(BATCH, 2, 6, 6, generator=generator)),
    "embedding": (Words, lambda generator: torch.randint(11, (BATCH, 5), generator=generator)),
}


def own_part(batch: Tensor) -> Tensor:
    return batch.chunk(hvd.size())[hvd.rank()]


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def pair(make: Callable[[], nn.Module] = mlp, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A model for this rank, and the same for a process that sees the whole batch."""
    torch.manual_seed(3)
    model = make().to(dtype)
    return model, copy.deepcopy(model)


def batches(count: int, name: str = "mlp", dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        batch = MODELS[name][1](generator)
        yield batch.to(dtype) if batch.is_floating_point() else batch


def assert_same_everywhere(model: nn.Module) -> None:
    """Bit by bit."""
    for parameter in model.parameters():
        own = parameter.detach()
        assert torch.equal(hvd.broadcast(own, 0), own)


def assert_close(model: nn.Module, reference: nn.Module, **tolerance: Any) -> None:
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        say = partial("{}: {}".format, name)
        torch.testing.assert_close(one.detach(), other.detach(), msg=say, **tolerance)
    assert_same_everywhere(model)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def distributed(model: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), **options)


@contextlib.contextmanager
def raises_everywhere(kind: type[BaseException], match: str = "") -> Iterator[None]:
    with pytest.raises(kind, match=match):
        yield
    hvd.barrier()


# Cases


@case
def parity() -> None:
    for name, (make, _) in MODELS.items():
        for dtype in (torch.float32, torch.float64):
            for set_to_none in (True, False):
                model, reference = pair(make, dtype)
                ours, theirs = distributed(model), sgd(reference)
                for batch in batches(6, name, dtype):
                    ours.zero_grad(set_to_none=set_to_none)
                    loss_of(model(own_part(batch))).backward()
                    ours.step()
                    theirs.zero_grad()
                    loss_of(reference(batch)).backward()
                    theirs.step()
                assert_close(model, reference)


@case
def gradients_live_in_buckets() -> None:
    for set_to_none in (True, False):
        model, _ = pair()
        optimizer = distributed(model)
        parameters = list(model.parameters())
        places = None
        for batch in batches(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                assert all(parameter.grad is None for parameter in parameters)
            elif places:
                assert all(parameter.grad is not None and not parameter.grad.any() for parameter in parameters)
            loss_of(model(own_part(batch))).backward()
            optimizer.step()
            now = [parameter.grad.data_ptr() for parameter in parameters]
            # From the first step on, and side by side, the last parameter first.
            assert now == (places or now)
            places = now
            ends = [place + parameter.numel() * 8 for place, parameter in zip(now, parameters, strict=True)]
            assert ends[1:] == now[:-1]


@case
def every_optimizer() -> None:
    classes = {
        name: found
        for name, found in vars(torch.optim).items()
        if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
    }
    assert len(classes) > 10
    for name, kind in classes.items():
        known = inspect.signature(kind).parameters
        variants: list[dict[str, Any]] = [{}]
        variants += [{flag: True} for flag in ("foreach", "fused") if flag in known and name != "Adafactor"]
        for variant in variants:
            try_optimizer(name, kind, {"lr": 0.01, **variant})


def try_optimizer(name: str, kind: Any, options: dict[str, Any]) -> None:
    # It is for matrices only.
    matrices = name == "Muon"
    model, reference = pair(lambda: nn.Sequential(*(nn.Linear(6, 6, bias=not matrices) for _ in range(2))))

    def make(of: nn.Module) -> Any:
        try:
            return kind(of.parameters(), **options)
        except (RuntimeError, ValueError) as error:
            if options.get("fused"):
                return None
            raise error

    inner, theirs = make(model), make(reference)
    if inner is None:
        return
    ours = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert isinstance(ours, kind) and isinstance(ours, type(inner))
    for batch in batches(3):

        def closure(optimizer: Any, of: nn.Module, rows: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(of(rows))
            loss.backward()
            return loss

        own = partial(closure, ours, model, own_part(batch))
        whole = partial(closure, theirs, reference, batch)
        if name == "SparseAdam":
            with raises_everywhere(RuntimeError, "dense gradients"):
                ours.step(own)
            return
        if name == "LBFGS" or batch[0, 0] > 0:
            loss = ours.step(own)
            torch.testing.assert_close(loss, theirs.step(whole).detach())
        else:
            own()
            ours.step()
            whole()
            theirs.step()
    # Muon computes with 8 bits of precision.
    assert_close(model, reference, rtol=1e-6 if not matrices else 1e-1, atol=1e-7 if not matrices else 1e-3)


@case
def line_search_decides_alike() -> None:
    model, reference = pair()
    ours = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=7))
    theirs = torch.optim.LBFGS(reference.parameters(), line_search_fn="strong_wolfe", max_iter=7)
    calls = [0, 0]
    for batch in batches(3):

        def closure(which: int, rows: Tensor) -> Tensor:
            calls[which] += 1
            (ours, theirs)[which].zero_grad()
            loss = loss_of((model, reference)[which](rows))
            loss.backward()
            return loss

        ours.step(partial(closure, 0, own_part(batch)))
        theirs.step(partial(closure, 1, batch))
    assert calls[0] == calls[1] > 6
    assert_close(model, reference, rtol=1e-5, atol=1e-6)


@case
def closure_may_return_a_number_or_nothing() -> None:
    model, _ = pair()
    optimizer = distributed(model)
    batch = next(batches(1))

    def backward() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(own_part(batch)))
        loss.backward()
        return loss.item()

    whole = loss_of(model(batch)).item()
    assert optimizer.step(backward) == pytest.approx(whole)

    def silent() -> None:
        backward()

    assert optimizer.step(silent) is None
    assert_same_everywhere(model)


Step = Callable[[Tensor], None]


def train(model: nn.Module, reference: nn.Module, step: Step, whole: Step) -> None:
    for batch in batches(4):
        step(own_part(batch))
        whole(batch)
    assert_close(model, reference)


@case
def clipping() -> None:
    model, reference = pair()
    ours, theirs = distributed(model), sgd(reference)

    def step(rows: Tensor) -> None:
        ours.zero_grad()
        loss_of(model(rows)).backward()
        ours.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with ours.skip_synchronize():
            ours.step()

    def whole(rows: Tensor) -> None:
        theirs.zero_grad()
        loss_of(reference(rows)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        theirs.step()

    train(model, reference, step, whole)


@case
def step_after_synchronize_reduces_once() -> None:
    model, reference = pair()
    ours, theirs = distributed(model, op=hvd.Sum), sgd(reference)

    def step(rows: Tensor) -> None:
        ours.zero_grad()
        (loss_of(model(rows)) / hvd.size()).backward()
        ours.synchronize()
        ours.step()

    def whole(rows: Tensor) -> None:
        theirs.zero_grad()
        loss_of(reference(rows)).backward()
        theirs.step()

    train(model, reference, step, whole)


@case
def gradient_scaler() -> None:
    for fused in (False, True):
        for unscale in (False, True):
            model, reference = pair(dtype=torch.float32)
            ours = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
            theirs = torch.optim.AdamW(reference.parameters(), lr=0.01, fused=fused)
            scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
            for number, batch in enumerate(batches(5, dtype=torch.float32)):
                for scaler, optimizer, of, rows in (
                    (scalers[0], ours, model, own_part(batch)),
                    (scalers[1], theirs, reference, batch),
                ):
                    optimizer.zero_grad()
                    loss = loss_of(of(rows))
                    if number == 2 and (of is reference or hvd.rank() == 0):
                        # Of one rank only: all skip the step.
                        loss = loss * float("inf")
                    scaler.scale(loss).backward()
                    if unscale:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(of.parameters(), 0.1)
                    scaler.step(optimizer)
                    scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
            assert_close(model, reference, rtol=1e-4, atol=1e-5)


@case
def scaler_skips_and_model_zeroes() -> None:
    model, _ = pair(dtype=torch.float32)
    optimizer = distributed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number, batch in enumerate(batches(3, dtype=torch.float32)):
        model.zero_grad()
        loss = loss_of(model(own_part(batch))) * (float("inf") if number == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same_everywhere(model)


class Branches(nn.Module):
    """Ranks use different parameters, and nobody uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(6, 3) for _ in range(3))

    def forward(self, rows: Tensor, which: str) -> Tensor:
        both = self.first(rows) + self.second(rows)
        return {"first": self.first(rows), "second": self.second(rows), "both": both}[which]


@case
def unused_parameters() -> None:
    for set_to_none in (True, False):
        model, reference = pair(Branches)
        ours = distributed(model)
        theirs = sgd(reference)
        for number, batch in enumerate(batches(4)):
            uses = ["both" if number == 2 else ("first", "second")[(rank + number) % 2] for rank in range(hvd.size())]
            ours.zero_grad(set_to_none=set_to_none)
            loss_of(model(own_part(batch), uses[hvd.rank()])).backward()
            ours.step()
            theirs.zero_grad()
            parts = batch.chunk(hvd.size())
            losses = [loss_of(reference(rows, use)) for rows, use in zip(parts, uses, strict=True)]
            torch.stack(losses).mean().backward()
            for parameter in reference.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            theirs.step()
        assert not model.never.weight.grad.any()
        assert_close(model, reference)


@case
def some_ranks_have_no_gradients_at_all() -> None:
    model, _ = pair()
    before = copy.deepcopy(model)
    optimizer = distributed(model)
    if hvd.rank() == 0:
        loss_of(model(next(batches(1)))).backward()
    optimizer.step()
    assert_same_everywhere(model)
    assert not torch.equal(next(model.parameters()), next(before.parameters()))


@case
def gradients_that_change_on_their_way() -> None:
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)

    def replace(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    for make in (mlp, wide):
        for compression in (hvd.Compression.none, hvd.Compression.bf16, Halved):
            for change in (clip, replace):
                model, _ = pair(make)
                optimizer = distributed(model, compression=compression)
                loss_of(model(own_part(next(batches(1))))).backward()
                with raises_everywhere(AssertionError, "zero_grad"):
                    optimizer.zero_grad()
                with raises_everywhere(InvalidError, "skip_synchronize"), optimizer.skip_synchronize():
                    optimizer.step()
                change(model)
                with raises_everywhere(InvalidError, "synchronize"):
                    optimizer.step()


@case
def ranks_may_meet_before_the_step() -> None:
    # One rank has all gradients and the other has not; neither waits for the other before both have met.
    model, _ = pair(Branches)
    optimizer = distributed(model)
    for batch in batches(3):
        optimizer.zero_grad()
        loss = loss_of(model(own_part(batch), "both" if hvd.rank() == 0 else "first"))
        (loss + (model.never(own_part(batch)).sum() if hvd.rank() == 0 else 0)).backward()
        hvd.allreduce(loss.detach(), name="loss")
        optimizer.step()
    assert_same_everywhere(model)


@case
def ranks_use_parameters_at_random() -> None:
    # Every rank draws the same numbers, so each knows what all have done.
    for options in ({}, {"groups": 5}, {"compression": hvd.Compression.bf16}, {"backward_passes_per_step": 2}):
        draw = random.Random(5)
        shapes, types = [(3,), (50, 7), (300, 100), (), (128, 256)], [torch.float32, torch.float64, torch.bfloat16]
        parameters = [nn.Parameter(torch.zeros(draw.choice(shapes), dtype=draw.choice(types))) for _ in range(30)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), op=hvd.Sum, **options)
        passes = optimizer.backward_passes_per_step
        for step in range(60):
            often, drop = draw.choice([0.7, 1.0, 1.0]), draw.choice([True, False, None])
            used = [[[draw.random() < often for _ in parameters] for _ in range(passes)] for _ in range(hvd.size())]
            meet, early = draw.random() < 0.3, draw.random() < 0.3
            if drop is None:
                for parameter in parameters:
                    parameter.grad = None
            else:
                optimizer.zero_grad(set_to_none=drop)
            for use in used[hvd.rank()]:
                chosen = [index for index, is_used in enumerate(use) if is_used]
                random.shuffle(chosen)
                sums = [parameters[index].sum().double() * ((step + index) % 5 + hvd.rank()) for index in chosen]
                torch.stack(sums).sum().backward()
                if meet:
                    hvd.allreduce(torch.ones(1), name="meet")
            if early:
                optimizer.synchronize()
            optimizer.step()
            for index, parameter in enumerate(parameters):
                uses = [rank for rank, of_rank in enumerate(used) for use in of_rank if use[index]]
                expected = sum((step + index) % 5 + rank for rank in uses)
                assert parameter.grad is not None
                assert bool((parameter.grad == expected).all()), (options, step, index)


@case
def user_drops_gradients() -> None:
    for drop in ("none", "model", "model zeroes", "optimizer zeroes"):
        model, reference = pair()
        ours, theirs = distributed(model), sgd(reference)

        def step(rows: Tensor, ours: Any = ours, model: nn.Module = model, drop: str = drop) -> None:
            if drop == "none":
                for parameter in model.parameters():
                    parameter.grad = None
            elif drop == "optimizer zeroes":
                ours.zero_grad(set_to_none=False)
            else:
                model.zero_grad(set_to_none=drop == "model")
            loss_of(model(rows)).backward()
            ours.step()

        def whole(rows: Tensor, theirs: Any = theirs, reference: nn.Module = reference) -> None:
            theirs.zero_grad()
            loss_of(reference(rows)).backward()
            theirs.step()

        train(model, reference, step, whole)


@case
def gradients_of_the_users_own() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    parameter.grad = torch.full((3,), float(hvd.rank()))
    optimizer.step()
    mean = (hvd.size() - 1) / 2
    assert parameter.tolist() == [-mean] * 3
    # Nothing was dropped: the same once more.
    optimizer.step()
    assert parameter.tolist() == [-2 * mean] * 3


@case
def accumulation() -> None:
    model, reference = pair()
    ours, theirs = distributed(model, backward_passes_per_step=3), sgd(reference)
    assert ours.backward_passes_per_step == 3

    def step(rows: Tensor) -> None:
        ours.zero_grad()
        for part in rows.chunk(3):
            (loss_of(model(part)) / 3).backward()
        ours.step()

    def whole(rows: Tensor) -> None:
        theirs.zero_grad()
        loss_of(reference(rows)).backward()
        theirs.step()

    train(model, reference, step, whole)
    with raises_everywhere(AssertionError, "backward_passes_per_step"):
        for _ in range(4):
            loss_of(model(own_part(next(batches(1))))).backward()
    model, _ = pair()
    ours = distributed(model, backward_passes_per_step=3)
    # Fewer than announced.
    loss_of(model(own_part(next(batches(1))))).backward()
    ours.step()
    assert_same_everywhere(model)
    ours.set_backward_passes_per_step(1)
    ours.zero_grad()
    loss_of(model(own_part(next(batches(1))))).backward()
    with raises_everywhere(AssertionError, "backward_passes_per_step"):
        loss_of(model(own_part(next(batches(1))))).backward()
    with raises_everywhere(ValueError, "greater than 0"):
        ours.set_backward_passes_per_step(0)


@case
def two_losses_one_step() -> None:
    model, _ = pair(Branches)
    optimizer = distributed(model)
    expected = copy.deepcopy(model)
    batch = next(batches(1))
    # Ranks run backward in different orders; each parameter is used once.
    for use in ("first", "second") if hvd.rank() == 0 else ("second", "first"):
        loss_of(model(own_part(batch), use)).backward()
        loss_of(expected(batch, use)).backward()
    optimizer.synchronize()
    torch.testing.assert_close(model.first.weight.grad, expected.first.weight.grad)
    torch.testing.assert_close(model.second.weight.grad, expected.second.weight.grad)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_same_everywhere(model)


class Many(nn.Module):
    """Types, sizes and shapes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        types = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64, torch.complex128)
        self.kinds = nn.ParameterList(nn.Parameter(torch.ones(3, 2, dtype=dtype)) for dtype in types)
        self.number = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.ones(4, 3).t())
        self.gaps = nn.Parameter(torch.ones(4, 6)[:, ::2])

    def forward(self, factor: float) -> Tensor:
        total = self.number * factor + self.empty.sum()
        total = total + (self.turned * torch.arange(12.0).view(3, 4) * factor).sum()
        total = total + (self.gaps.t() * torch.arange(12.0).view(3, 4) * factor).sum()
        for parameter in self.kinds:
            weights = torch.arange(6.0).view(3, 2).to(parameter.dtype)
            total = total + (parameter * weights * factor).abs().sum().to(torch.float32)
        return total


@case
def all_kinds_of_parameters() -> None:
    for compression in (hvd.Compression.none, hvd.Compression.bf16, hvd.Compression.fp16, Halved):
        model: Any = Many()
        mean = (1 + hvd.size()) / 2
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
        )
        expected: Any = Many()
        expected(1.0).backward()
        for set_to_none in (False, True, False):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(hvd.rank() + 1.0).backward()
            optimizer.synchronize()
            for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
                if parameter.numel():
                    assert parameter.grad.dtype == parameter.dtype
                    torch.testing.assert_close(parameter.grad, other.grad * mean, rtol=1e-2, atol=1e-2, msg=name)
        if compression is hvd.Compression.none:
            assert model.turned.grad.stride() == model.turned.stride()


class Halved:
    """A compression of the user's own: half of everything travels."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor / 2, 2

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor * ctx


@case
def channels_last() -> None:
    model, reference = pair(convnet, torch.float32)
    model, reference = (each.to(memory_format=torch.channels_last) for each in (model, reference))
    ours, theirs = distributed(model), sgd(reference)
    for batch in batches(4, "convnet", torch.float32):
        batch = batch.to(memory_format=torch.channels_last)
        ours.zero_grad()
        loss_of(model(own_part(batch))).backward()
        ours.step()
        for parameter in model.parameters():
            assert parameter.grad.is_contiguous(memory_format=torch.channels_last) or parameter.dim() < 4
            assert parameter.grad.stride() == parameter.stride()
        theirs.zero_grad()
        loss_of(reference(batch)).backward()
        theirs.step()
    assert_close(model, reference)


@case
def sparse_gradients() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(11, 3, sparse=True), nn.Linear(3, 2))

    for set_to_none in (True, False):
        model, reference = pair(make)
        ours, theirs = distributed(model, sparse_as_dense=True), sgd(reference)
        for batch in batches(3, "embedding"):
            ours.zero_grad(set_to_none=set_to_none)
            loss_of(model(own_part(batch))).backward()
            ours.step()
            theirs.zero_grad()
            loss_of(reference(batch)).backward()
            theirs.step()
        assert_close(model, reference)
    model, _ = pair(make)
    optimizer = distributed(model)
    with raises_everywhere(UnavailableError, "sparse_as_dense"):
        loss_of(model(own_part(next(batches(1, "embedding"))))).backward()
    del optimizer


@case
def groups_and_factors() -> None:
    variants: list[Callable[[Any], dict[str, Any]]] = [
        lambda _: {"groups": 2},
        lambda _: {"groups": 100},
        lambda model: {"groups": [[model[4].weight, model[0].weight], [model[2].bias, model[2].weight]]},
        lambda _: {"gradient_predivide_factor": 4.0},
        lambda _: {"groups": 2, "gradient_predivide_factor": 4.0},
        lambda _: {"groups": 1, "compression": hvd.Compression.none, "backward_passes_per_step": 1},
    ]
    for variant in variants:
        for set_to_none in (True, False):
            model, reference = pair()
            ours, theirs = distributed(model, **variant(model)), sgd(reference)
            for batch in batches(3):
                ours.zero_grad(set_to_none=set_to_none)
                loss_of(model(own_part(batch))).backward()
                ours.step()
                theirs.zero_grad()
                loss_of(reference(batch)).backward()
                theirs.step()
            assert_close(model, reference)
    # A group of which some members have no gradient.
    model, _ = pair(Branches)
    optimizer = distributed(model, groups=1)
    loss_of(model(own_part(next(batches(1))), ("first", "second")[hvd.rank() % 2])).backward()
    optimizer.step()
    assert_same_everywhere(model)


@case
def other_reductions() -> None:
    for op, expected in ((hvd.Min, 1.0), (hvd.Max, float(hvd.size())), (hvd.Sum, hvd.size() * (hvd.size() + 1) / 2)):
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=op)
        (parameter * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        assert parameter.tolist() == [-expected] * 3


@case
def schedulers_and_hooks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for early in (True, False):
            model, _ = pair()
            inner = sgd(model)
            scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5) if early else None
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
            scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            calls: list[str] = []
            optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
            optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
            for batch in batches(2):
                optimizer.zero_grad()
                loss_of(model(own_part(batch))).backward()
                optimizer.step()
                scheduler.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
            assert calls == ["before", "after"] * 2
            assert_same_everywhere(model)


@case
def states_and_copies() -> None:
    model, _ = pair()
    optimizer = distributed(model)

    def train_once() -> None:
        optimizer.zero_grad()
        loss_of(model(own_part(next(batches(1))))).backward()
        optimizer.step()

    train_once()
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    train_once()
    after = [parameter.detach().clone() for parameter in model.parameters()]
    saved.seek(0)
    weights, state = torch.load(saved)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train_once()
    for one, other in zip(model.parameters(), after, strict=True):
        assert torch.equal(one, other)
    # Copies are optimizers of the user's own class, apart from any engine.
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(made) is torch.optim.SGD
        assert len(made.state) == len(optimizer.state)
        assert made.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
        made.zero_grad()
        made.step()
    both = copy.deepcopy((model, sgd(model)))
    loss_of(both[0](own_part(next(batches(1))))).backward()
    both[1].step()
    # What was there before is taken over.
    inner = sgd(model)
    inner.load_state_dict(state)
    assert len(hvd.DistributedOptimizer(inner).state) == len(inner.state) > 0


@case
def odd_optimizers() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, rate: float, /, *, of: nn.Module, note: str) -> None:
            super().__init__(of.parameters(), lr=rate)
            self.note = note

        def step(self) -> str:  # type: ignore[override]
            super().step()
            return self.note

    model, reference = pair()
    ours = hvd.DistributedOptimizer(Odd(0.1, of=model, note="done"))
    theirs = Odd(0.1, of=reference, note="done")
    assert isinstance(ours, Odd)
    for batch in batches(2):
        ours.zero_grad()
        loss_of(model(own_part(batch))).backward()
        assert ours.step() == "done"
        theirs.zero_grad()
        loss_of(reference(batch)).backward()
        theirs.step()
    assert_close(model, reference)


@case
def more_parameters_later() -> None:
    for compression in (hvd.Compression.none, hvd.Compression.bf16):
        model, reference = pair(dtype=torch.float32)
        ours = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), compression=compression)
        theirs = torch.optim.SGD(reference[0].parameters(), lr=0.1)
        for number, batch in enumerate(batches(4, dtype=torch.float32)):
            if number == 2:
                ours.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
                theirs.add_param_group({"params": list(reference[2].parameters()), "lr": 0.2})
            for optimizer, of, rows in ((ours, model, own_part(batch)), (theirs, reference, batch)):
                of.zero_grad()
                loss_of(of(rows)).backward()
                optimizer.step()
        exact = compression is hvd.Compression.none
        assert_close(model, reference, rtol=1e-4 if exact else 0.1, atol=1e-6 if exact else 1e-2)


@case
def frozen_and_unfrozen() -> None:
    model, reference = pair()
    for of in (model, reference):
        of[0].requires_grad_(False)
    ours, theirs = distributed(model), sgd(reference, weight_decay=0.0)
    for number, batch in enumerate(batches(8)):
        for of in (model, reference):
            if number == 2:
                of[0].requires_grad_(True)
            if number == 4:
                of[2].requires_grad_(False)
            if number == 6:
                of[2].requires_grad_(True)
        for optimizer, of, rows in ((ours, model, own_part(batch)), (theirs, reference, batch)):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            loss_of(of(rows)).backward()
            optimizer.step()
        assert_close(model, reference)


@case
def two_optimizers_with_the_same_names() -> None:
    pairs = [pair() for _ in range(2)]
    ours = [distributed(model) for model, _ in pairs]
    theirs = [sgd(reference) for _, reference in pairs]
    for batch in batches(3):
        for optimizer in (*ours, *theirs):
            optimizer.zero_grad()
        # One backward pass through both.
        (loss_of(pairs[0][0](own_part(batch))) + 2 * loss_of(pairs[1][0](own_part(batch)))).backward()
        (loss_of(pairs[0][1](batch)) + 2 * loss_of(pairs[1][1](batch))).backward()
        for optimizer in (*(ours if hvd.rank() else reversed(ours)), *theirs):
            optimizer.step()
    for model, reference in pairs:
        assert_close(model, reference)


@case
def a_second_optimizer_takes_over() -> None:
    model, _ = pair()
    first = distributed(model)
    second = distributed(model)
    loss_of(model(own_part(next(batches(1))))).backward()
    second.step()
    with raises_everywhere(InvalidError, "taken over"):
        first.step()
    del first
    with raises_everywhere(InvalidError, "already"):
        hvd.DistributedOptimizer(second)
    del second
    # Without an optimizer there is nothing left of it.
    for _ in range(2):
        loss_of(model(own_part(next(batches(1))))).backward()
    distributed(model).step()
    assert_same_everywhere(model)


@case
def arguments_that_mean_nothing() -> None:
    model, _ = pair()
    names = list(model.named_parameters())
    wrong: list[tuple[dict[str, Any], type[BaseException], str]] = [
        ({"named_parameters": [name for name, _ in names]}, ValueError, "pairs"),
        ({"named_parameters": [("same", parameter) for _, parameter in names]}, ValueError, "unique.*same"),
        ({"named_parameters": names[1:]}, ValueError, "no name"),
        ({"backward_passes_per_step": 0}, ValueError, "greater than 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, "Average"),
        ({"groups": -1}, ValueError, "groups"),
        ({"groups": [model[0].weight]}, ValueError, "groups"),
        ({"groups": [["weight"]]}, ValueError, "groups"),
        ({"groups": [[model[0].weight], [model[0].weight]]}, ValueError, "once"),
        ({"groups": [[torch.ones(2)]]}, ValueError, "not one of the optimizer's"),
        ({"op": hvd.Adasum}, UnavailableError, "Adasum"),
    ]
    for options, kind, match in wrong:
        with raises_everywhere(kind, match):
            hvd.DistributedOptimizer(sgd(model), **options)
    with raises_everywhere(ValueError, "optimizer of PyTorch"):
        hvd.DistributedOptimizer(model)
    with raises_everywhere(DeprecationWarning, "groups"), warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.DistributedOptimizer(sgd(model), num_groups=2)
    loss = loss_of(model(own_part(next(batches(1)))))
    optimizer = distributed(model)
    with raises_everywhere(InvalidError, "create_graph"):
        loss.backward(create_graph=True)
    del optimizer


@case
def ranks_that_differ() -> None:
    def differ(match: str, rows: int = 2, dtype: torch.dtype = torch.float32, name: str = "a", count: int = 1) -> None:
        parameters = [(f"{name}{number}", nn.Parameter(torch.zeros(rows, dtype=dtype))) for number in range(count)]
        with raises_everywhere(MismatchError, match):
            hvd.DistributedOptimizer(torch.optim.SGD([each for _, each in parameters], lr=0.1), parameters)

    last = hvd.rank() == hvd.size() - 1
    differ(r"rank 0 has 'a0' \(float32, \[2\]\), where rank \d has 'a0' \(float32, \[3\]\)", rows=3 if last else 2)
    differ("float64", dtype=torch.float64 if last else torch.float32)
    differ("'b0'", name="b" if last else "a")
    differ("nothing more", count=2 if last else 1)
    parameter = nn.Parameter(torch.zeros(2))
    with raises_everywhere(CollectiveError, "op=1"):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), op=hvd.Sum if last else hvd.Average)


@case
def beginning_again() -> None:
    model, _ = pair()
    optimizer = distributed(model)
    loss_of(model(own_part(next(batches(1))))).backward()
    optimizer.step()
    gradient = next(model.parameters()).grad
    before = gradient.clone()
    hvd.shutdown()
    # The memory outlives the engine.
    assert torch.equal(gradient, before)
    with pytest.raises(InvalidError, match="initialized"):
        optimizer.step()
    hvd.init()
    with raises_everywhere(InvalidError, "before the last init"):
        optimizer.step()
    optimizer = distributed(model)
    optimizer.zero_grad()
    loss_of(model(own_part(next(batches(1))))).backward()
    optimizer.step()
    assert_same_everywhere(model)


@case
def process_sets() -> None:
    if hvd.size() < 4:
        return
    some = hvd.add_process_set([1, 3])
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=some)
    (parameter * float(hvd.rank())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    assert parameter.tolist() == [-2.0 if hvd.rank() in (1, 3) else -float(hvd.rank())] * 2
    hvd.remove_process_set(some)


@case
def alone() -> None:
    # With one rank there is nothing to reduce, and everything is there all the same.
    model, _ = pair()
    optimizer = distributed(model, backward_passes_per_step=2, groups=2)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    if hvd.size() == 1:
        for _ in range(3):
            loss_of(model(next(batches(1)))).backward()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert type(copy.deepcopy(optimizer)) is torch.optim.SGD


def on_a_gpu() -> None:
    """Gradients stay on the device and travel through host memory."""
    torch.set_num_threads(1)
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    for compression in (hvd.Compression.none, hvd.Compression.bf16, Halved):
        for fused in (False, True):
            model, reference = pair(dtype=torch.float32)
            # Some of it stays on the CPU.
            model[0].to("cuda")
            model[2].to("cuda")
            inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
            ours = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)
            theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
            for number, batch in enumerate(batches(4, dtype=torch.float32)):
                ours.zero_grad(set_to_none=number % 2 == 0)
                hidden = model[1](model[0](own_part(batch).cuda()))
                loss_of(model[4](model[3](model[2](hidden)).cpu())).backward()
                ours.step()
                assert all(parameter.grad.device == parameter.device for parameter in model.parameters())
                theirs.zero_grad()
                loss_of(reference(batch)).backward()
                theirs.step()
            exact = compression is not hvd.Compression.bf16
            assert_close(model.cpu(), reference, rtol=1e-3 if exact else 0.2, atol=1e-4 if exact else 2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.timeout(200)
def test_on_a_gpu() -> None:
    on_ranks(2, on_a_gpu)


def test_parcels_keep_the_order_and_small_ones_are_together() -> None:
    rules = gradients.Rules(hvd.global_process_set, hvd.Compression.none, hvd.Average, 1.0, False)

    def parcels(sizes: list[int], groups: Any = 0) -> list[list[str]]:
        places = [
            gradients._Resident(str(number), nn.Parameter(torch.empty(size << 8)), rules, torch.float32)
            for number, size in enumerate(sizes)
        ]
        if callable(groups):
            groups = groups([place.parameter for place in places])
        return [[place.name for place in parcel.members] for parcel in gradients.make_parcels(places, groups)]

    # In KiB.
    assert parcels([]) == []
    assert parcels([1, 2, 3]) == [["0", "1", "2"]]
    assert parcels([64, 64]) == [["0"], ["1"]]
    assert parcels([60, 60, 60, 60, 60, 60]) == [["0", "1", "2", "3", "4"], ["5"]]
    # A large one in between does not part them, unless it is very large.
    assert parcels([1, 64, 1]) == [["1"], ["0", "2"]]
    assert parcels([1, 256, 1]) == [["1"], ["0"], ["2"]]
    assert parcels([1, 1, 1], groups=2) == [["0", "1"], ["2"]]
    assert parcels([1, 1, 1], groups=5) == [["0"], ["1"], ["2"]]
    assert parcels([1, 1, 1, 1], groups=lambda all_: [[all_[3], all_[1]]]) == [["1", "3"], ["0", "2"]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cases(ranks: int) -> None:
    names = list(CASES)
    if ranks == 1:
        names = ["parity", "all_kinds_of_parameters", "clipping", "gradient_scaler", "every_optimizer", "alone"]
    if ranks == 4:
        names = ["process_sets", "unused_parameters", "groups_and_factors", "ranks_that_differ", "parity"]
    assert on_ranks(ranks, run_cases, names, seconds=240) == [names] * ranks


def die_in_backward(folder: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    model, _ = pair()
    optimizer = distributed(model)
    rows = torch.utils.data.TensorDataset(torch.randn(64, 6, dtype=torch.float64))
    loader = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=2, persistent_workers=True)
    died = Path(folder, "died")

    def die(_: Tensor) -> None:
        died.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    for number, (batch,) in enumerate(loader):
        if number == 3 and hvd.rank() == 1:
            # After some gradients, and with loader processes that hold open whatever the rank has.
            model[0].weight.register_hook(die)
        try:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()
        except PeerLostError as error:
            took = time.time() - float(died.read_text())
            Path(folder, f"survivor-{hvd.rank()}").write_text(f"{error.rank} {took} {error}")
            return
    raise AssertionError("nobody died")


@pytest.mark.timeout(120)
def test_a_rank_killed_in_backward_has_a_name(tmp_path: Path) -> None:
    on_ranks(3, die_in_backward, str(tmp_path), survivors=True)
    for rank in (0, 2):
        lost, took, message = (tmp_path / f"survivor-{rank}").read_text().split(maxsplit=2)
        assert int(lost) == 1
        assert "rank 1" in message
        assert float(took) < 5
