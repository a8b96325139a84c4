"""Models, optimizers and objects that one rank gives to others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import deuteron.torch as hvd
import pytest
import torch
from cases import Checks, verify
from deuteron.errors import CollectiveError, InvalidError
from torch import Tensor

CASES: dict[str, Callable[[Checks], None]] = {}


def case(function: Callable[[Checks], None]) -> Callable[[Checks], None]:
    CASES[function.__name__] = function
    return function


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test(name: str, ranks: int) -> None:
    verify(__file__, ranks, name)


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(2 * 4, 3)]
    made = torch.nn.Sequential(*layers)
    made.register_buffer("mask", torch.arange(4) % (seed + 1) == 0)
    return made


@case
def parameters(checks: Checks) -> None:
    root = hvd.size() - 1
    wanted = model(root).state_dict()
    forms: dict[str, Callable[[torch.nn.Module], Any]] = {
        "state dict": lambda own: own.state_dict(),
        "pairs": lambda own: list(own.state_dict().items()),
        "generator": lambda own: iter(own.state_dict().items()),
        "tensors": lambda own: list(own.state_dict().values()),
    }
    for word, form in forms.items():
        own = model(hvd.rank())
        hvd.broadcast_parameters(form(own), root_rank=root)
        for name, tensor in own.state_dict().items():
            checks.equal(tensor, wanted[name], f"{word}: {name}")
    own = model(hvd.rank())
    hvd.broadcast_parameters(own.named_parameters(), root_rank=root)
    for name, parameter in own.named_parameters():
        checks.equal(parameter.detach(), wanted[name], name)
        checks.true(parameter.requires_grad and parameter.is_leaf, "it is still a parameter")
    hvd.broadcast_parameters({"a": None}, 0)
    checks.raises(InvalidError, lambda: hvd.broadcast_parameters({"a": 3}, 0), "'a'", "int")
    checks.raises(InvalidError, lambda: hvd.broadcast_parameters(3, 0), "int")
    checks.raises(InvalidError, lambda: hvd.broadcast_parameters(torch.ones(2), 0), "Tensor")


@case
def parameters_that_disagree(checks: Checks) -> None:
    if hvd.size() == 1:
        return
    tensors = {"same": torch.full((2,), float(hvd.rank())), "other": torch.ones(2 + (hvd.rank() == 1))}
    checks.raises(CollectiveError, lambda: hvd.broadcast_parameters(tensors, 0), "broadcast.other")
    checks.equal(tensors["same"], torch.zeros(2), "the others arrive all the same")


def optimizers() -> dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]:
    """Every one that the installed PyTorch has, and some with more state."""
    found: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {}
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            found[name] = lambda parameters, kind=kind: kind(parameters, lr=0.01)
    found["SGD with momentum"] = lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    found["Adam with amsgrad"] = lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True)
    found["Adam with a tensor as rate"] = lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01))
    found["two groups"] = lambda parameters: torch.optim.AdamW(
        [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]
    )
    return found


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return {path: tree}
    return {key: leaf for name, value in items for key, leaf in leaves(value, f"{path}/{name}").items()}


def trained(name: str, seed: int, steps: int, rate: float | None = None) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    # Some take nothing but matrices.
    shapes = [(4, 3), (3, 2)]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = optimizers()[name](parameters)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((parameter**2).sum() for parameter in parameters)
        assert isinstance(loss, Tensor)
        loss.backward()
        if name == "SparseAdam":
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.to_sparse()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
    return optimizer


def alike(checks: Checks, own: Any, wanted: Any, what: str) -> None:
    own, wanted = leaves(own), leaves(wanted)
    checks.equal(sorted(own), sorted(wanted), f"{what}: keys")
    for key in wanted:
        if key in own:
            checks.equal(own[key], wanted[key], f"{what}: {key}")


@case
def optimizer_state(checks: Checks) -> None:
    """Whatever state other ranks have, or none, they get the root's, and go on as it does."""
    root = hvd.size() - 1
    for name in optimizers():
        for steps in [0, 2]:
            is_root = hvd.rank() == root
            own = trained(name, root, 3, rate=0.125) if is_root else trained(name, root, steps)
            wanted = trained(name, root, 3, rate=0.125)
            hvd.broadcast_optimizer_state(own, root_rank=root)
            alike(checks, own.state_dict(), wanted.state_dict(), f"{name} after {steps} steps")
            for group, other in zip(own.param_groups, wanted.param_groups, strict=True):
                for parameter, value in zip(group["params"], other["params"], strict=True):
                    parameter.data.copy_(value.data)
                    grad = torch.ones_like(value)
                    parameter.grad = grad.to_sparse() if name == "SparseAdam" else grad.clone()
                    value.grad = grad.to_sparse() if name == "SparseAdam" else grad.clone()
            own.step(lambda: torch.tensor(0.5))
            wanted.step(lambda: torch.tensor(0.5))
            alike(checks, own.state_dict(), wanted.state_dict(), f"{name}, one step further")


@case
def optimizer_state_of_other_types(checks: Checks) -> None:
    """Numbers that an optimizer keeps wider than its parameters stay as wide."""

    class Wide(torch.optim.SGD):
        def keep(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["master"] = parameter.detach().float() + 2**-20
                    self.state[parameter]["words"] = {"any": [1, "two", None]}

    parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    own = Wide(parameters, lr=0.1)
    if hvd.rank() == 0:
        own.keep()
    hvd.broadcast_optimizer_state(own, 0, model=torch.nn.Linear(1, 1))
    state = own.state[parameters[0]]
    checks.equal(state["master"], torch.full((3,), 1 + 2**-20), "float32")
    checks.equal(state["words"], {"any": [1, "two", None]}, "words")


@case
def objects(checks: Checks) -> None:
    size, me = hvd.size(), hvd.rank()
    large = bytes(range(256)) * 40_000
    for root in range(size):
        for value in [None, 0, "word", {"a": [1, 2.5]}, torch.arange(5), lambda x, root=root: x + root, large, ()]:
            got = hvd.broadcast_object(value if me == root else "mine", root)
            if callable(value):
                checks.equal(got(1), root + 1, "a function")
            else:
                checks.equal(got, value, "an object")
    checks.equal(hvd.broadcast_object_fn(root_rank=size - 1, name="fn")(me), size - 1, "function")
    checks.equal(hvd.broadcast_object(me, size - 1, name="named"), size - 1, "named")
    checks.equal(hvd.allgather_object(("x" * me, me)), [("x" * rank, rank) for rank in range(size)])
    checks.equal(hvd.allgather_object(large[me:], name="large"), [large[rank:] for rank in range(size)], "large")
    checks.equal(hvd.allgather_object(None), [None] * size)
    if size > 1:
        some = hvd.add_process_set([0, size - 1])
        if some.included():
            checks.equal(hvd.allgather_object(me, process_set=some), some.ranks, "some ranks")
            checks.equal(hvd.broadcast_object(me, size - 1, process_set=some), size - 1, "some ranks")
        hvd.remove_process_set(some)


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


@case
def objects_that_cannot_be_pickled(checks: Checks) -> None:
    """All ranks are told, and go on."""
    value = Stubborn() if hvd.rank() == 0 else 1
    kind = RuntimeError if hvd.rank() == 0 else CollectiveError
    checks.raises(kind, lambda: hvd.broadcast_object(value, 0), "not me")
    checks.raises(kind, lambda: hvd.allgather_object(value), "not me")
    checks.equal(hvd.broadcast_object(hvd.rank(), 0), 0)
