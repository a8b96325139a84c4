"""PyTorch's side of the benchmark: training with us and with DistributedDataParallel over Gloo, in the same processes.

usage: training.py times OUT ADDRESS ROUNDS     on each of two ranks that `deuteron run` starts; 1 leaves some ways out
       training.py memory OUT ADDRESS WHO       the same, WHO = ours or ddp; or in a process by itself, WHO = single

Every rank writes OUT.RANK, one line of JSON for each contestant: what is measured, who, bytes, and nanoseconds of each
call or bytes of memory. A wrong result ends the run. Contestants take turns every few steps, so that what disturbs the
machine disturbs all of them. All start a step together.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import perf_counter_ns

import deuteron.torch as hvd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# Ten million parameters, and few enough rows for communication to matter.
LAYERS, WIDTH, ROWS = 10, 1000, 32
TENSORS, ELEMENTS = 1000, 256
# Steps of one contestant before it is the next one's turn.
TURN = 3
CALLS = 100


@dataclass
class Contestant:
    """Somebody's way of doing a step, and the times it took."""

    who: str
    step: Callable[[int], object]
    model: nn.Module
    times: list[int] = field(default_factory=list)
    steps: int = 0

    def run(self, count: int, timed: bool) -> None:
        """So many steps."""
        for _ in range(count):
            hvd.barrier()
            start = perf_counter_ns()
            self.step(self.steps)
            took = perf_counter_ns() - start
            self.steps += 1
            if timed:
                self.times.append(took)


def fail(what: str) -> None:
    """Ends the run."""
    raise SystemExit(f"training: rank {hvd.rank()}: {what}")


def mlp() -> nn.Module:
    """The same on all ranks, at each call."""
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Small(nn.Module):
    """A thousand tensors of a kibibyte."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(TENSORS))

    def forward(self, factor: Tensor) -> Tensor:
        """Its gradient is the factor, in every element."""
        return torch.cat(list(self.tensors)).sum() * factor


def batch(step: int, rank: int) -> Tensor:
    """What a rank sees in a step."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))


def variants(make: Callable[[], nn.Module], quick: bool) -> Iterator[tuple[str, nn.Module, object, bool]]:
    """Everybody, with models and optimizers of their own: name, model, optimizer, whether gradients are dropped."""

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    for drops in (True, False):
        way = "none" if drops else "zero"
        model = make()
        yield f"base, {way}", model, sgd(model), drops
        model = make()
        yield f"ours, {way}", model, hvd.DistributedOptimizer(sgd(model), model.named_parameters()), drops
        for view in (True, False):
            for static in (False,) if quick else (False, True):
                model = make()
                wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view, static_graph=static)
                words = [*(["view"] if view else []), *(["static"] if static else []), way]
                yield f"DDP, {', '.join(words)}", wrapped, sgd(model), drops


def steps_of_mlp(quick: bool) -> list[Contestant]:
    """Whole steps: zero_grad, forward, backward, step."""
    target = torch.zeros(ROWS, WIDTH)
    batches = [batch(step, hvd.rank()) for step in range(8)]

    def contestant(who: str, model: nn.Module, optimizer: object, drops: bool) -> Contestant:
        def step(number: int) -> None:
            optimizer.zero_grad(set_to_none=drops)
            nn.functional.mse_loss(model(batches[number % 8]), target).backward()
            optimizer.step()

        return Contestant(who, step, model)

    return [contestant(*variant) for variant in variants(mlp, quick)]


def backwards_of_many(quick: bool) -> list[Contestant]:
    """Gradients only: zero_grad, forward, backward, until they are those of all ranks."""

    def contestant(who: str, model: nn.Module, optimizer: object, drops: bool) -> Contestant:
        wait = getattr(optimizer, "synchronize", lambda: None)

        def step(number: int) -> None:
            optimizer.zero_grad(set_to_none=drops)
            model(torch.tensor(float(number % 7 + hvd.rank()))).backward()
            wait()

        return Contestant(who, step, model)

    return [contestant(*variant) for variant in variants(Small, quick)]


def check_mlp(contestants: list[Contestant]) -> None:
    """Everybody has taken the same steps, so all but the base are at the same place, and bit by bit on all ranks."""
    reference = next(each for each in contestants if each.who.startswith("DDP"))
    for each in contestants:
        if each.who.startswith("base"):
            continue
        for (name, one), other in zip(each.model.named_parameters(), reference.model.parameters(), strict=True):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
                fail(f"{each.who}: {name} is off by {(one - other).abs().max().item()}")
            if not torch.equal(hvd.broadcast(one.detach(), 0), one):
                fail(f"{each.who}: {name} differs between ranks")


def check_many(contestants: list[Contestant]) -> None:
    """Gradients are the mean of all ranks' factors."""
    for each in contestants:
        mean = (each.steps - 1) % 7 + (hvd.rank() if each.who.startswith("base") else (hvd.size() - 1) / 2)
        for name, parameter in each.model.named_parameters():
            if parameter.grad is None or not bool((parameter.grad == mean).all()):
                fail(f"{each.who}: the gradient of {name} is not {mean}")


def take_turns(what: str, size: int, contestants: list[Contestant], rounds: int) -> list[str]:
    """Warms everybody up, then lets them run in turns; a line of the output for each."""
    for each in contestants:
        each.run(6, timed=False)
    for number in range(rounds):
        # Back and forth, so that nobody always runs after the same neighbour.
        for each in contestants if number % 2 == 0 else reversed(contestants):
            each.run(TURN, timed=True)
    return [json.dumps([what, each.who, size, each.times]) for each in contestants]


def small_allreduces(rounds: int) -> list[str]:
    """Synchronous calls on one number."""
    number, total = torch.zeros(1), hvd.size() * (hvd.size() - 1) / 2
    results: dict[str, list[int]] = {"hvd.allreduce": [], "hvd.allreduce_": [], "torch.distributed": []}
    calls: dict[str, Callable[[], Tensor]] = {
        "hvd.allreduce": lambda: hvd.allreduce(number, op=hvd.Sum),
        "hvd.allreduce_": lambda: hvd.allreduce_(number, op=hvd.Sum),
        "torch.distributed": lambda: dist.all_reduce(number) or number,
    }
    for turn in range(-1, rounds):
        for who, call in calls.items():
            for _ in range(CALLS):
                number.fill_(hvd.rank())
                hvd.barrier()
                start = perf_counter_ns()
                result = call()
                took = perf_counter_ns() - start
                if result.item() != total:
                    fail(f"{who}: {result.item()} instead of {total}")
                if turn >= 0:
                    results[who].append(took)
    return [json.dumps(["allreduce", who, 4, times]) for who, times in results.items()]


def times(out: str, address: str, rounds: int) -> None:
    """Everything that is a time."""
    hvd.init()
    join(address)
    quick = rounds == 1
    lines = small_allreduces(rounds)
    many = backwards_of_many(quick)
    lines += take_turns("backward", TENSORS * ELEMENTS * 4, many, rounds * 4)
    check_many(many)
    del many
    large = steps_of_mlp(quick)
    size = sum(parameter.numel() for parameter in large[0].model.parameters()) * 4
    lines += take_turns("step", size, large, rounds)
    check_mlp(large)
    Path(f"{out}.{hvd.rank()}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    hvd.barrier()
    dist.destroy_process_group()


def join(address: str) -> None:
    """Connects with Gloo too."""
    rank, ranks = int(os.environ["DEUTERON_RANK"]), int(os.environ["DEUTERON_SIZE"])
    limit = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=ranks, timeout=limit)


def memory(out: str, address: str, who: str) -> None:
    """What a process has of its own after backward, with an equal share of what it has together with others."""
    model: nn.Module = mlp()
    plain = model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if who == "ours":
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    elif who == "ddp":
        join(address)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    most = 0
    for step in range(6):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch(step, 0)), torch.zeros(ROWS, WIDTH)).backward()
        found = re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
        most = max(most, sum(map(int, found)) << 10)
        optimizer.step()
    size = sum(parameter.numel() for parameter in plain.parameters()) * 4
    line = json.dumps(["memory", who, size, [most]])
    Path(f"{out}.{os.environ.get('DEUTERON_RANK', '0')}").write_text(line + "\n", encoding="utf-8")


def main() -> None:
    """One of the two."""
    torch.set_num_threads(1)
    what, out, address, last = sys.argv[1:]
    if what == "times":
        times(out, address, int(last))
    else:
        memory(out, address, last)


if __name__ == "__main__":
    main()
