"""The network, and its training on every rank of a gang.

Ranks see disjoint shares of each batch and all do the same steps. What decides about the course (rate, end, best) is
computed from numbers of all ranks, so that all decide alike.
"""

from __future__ import annotations

import io
import math
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import deuteron
import deuteron.torch as hvd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from deuteron.data import Loader
from torch import Tensor, nn

from .files import write_whole
from .prepare import Prepared
from .tables import CATEGORICAL, CONTINUOUS

#: A tensor for each column.
Columns = dict[str, Tensor]

EMBEDDING = 10
# What Keras calls a kernel regularizer of 5e-5 adds twice that times the weight to its gradient.
WEIGHT_DECAY = 2 * 5e-5


@dataclass
class Options:
    """How to train; rate and batch are those of one rank."""

    epochs: int = 10
    batch_size: int = 100
    learning_rate: float = 1e-4
    warmup_epochs: int = 5
    plateau: int = 10
    patience: int = 20
    dropout: float = 0.5
    layers: tuple[int, ...] = (1000, 1000, 1000, 500)
    seed: int = 0


@dataclass
class Epoch:
    """What all ranks together have reached."""

    epoch: int
    learning_rate: float
    loss: float
    exp_rmspe: float
    val_loss: float
    val_exp_rmspe: float
    seconds: float


@dataclass
class Trained:
    """What rank 0 returns."""

    history: list[Epoch] = field(default_factory=list)
    best: int = 0
    ended: str = "all epochs are done"
    checkpoint: bytes = b""


class BatchNorm(nn.Module):
    """Batch normalisation of inputs by the moments of the batches of all ranks.

    Inputs need no gradient, so that moments are just averaged: the same numbers whatever the number of ranks.
    """

    def __init__(self, columns: int, momentum: float = 0.1, epsilon: float = 1e-3) -> None:
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight, self.bias = nn.Parameter(torch.ones(columns)), nn.Parameter(torch.zeros(columns))
        self.register_buffer("mean", torch.zeros(columns, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(columns, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        """Rows by columns."""
        exact = rows.double()
        if self.training:
            moments = hvd.allreduce(torch.stack([exact.mean(0), exact.square().mean(0)]), name="moments")
            mean, variance = moments[0], (moments[1] - moments[0].square()).clamp(min=0)
            self.mean.lerp_(mean, self.momentum)
            self.variance.lerp_(variance, self.momentum)
        else:
            mean, variance = self.mean, self.variance
        return ((exact - mean) / (variance + self.epsilon).sqrt()).float() * self.weight + self.bias


class Network(nn.Module):
    """ln(Sales) from categories, each with its embedding, and numbers."""

    def __init__(self, sizes: dict[str, int], max_sales: float, options: Options) -> None:
        super().__init__()
        # The last one stands for what was not seen in training: it stays zero, and adds nothing.
        self.embeddings = nn.ModuleDict(
            {column: nn.Embedding(size + 1, EMBEDDING, padding_idx=size) for column, size in sizes.items()}
        )
        self.norm = BatchNorm(len(CONTINUOUS))
        widths = [EMBEDDING * len(sizes) + len(CONTINUOUS), *options.layers]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.dropout = nn.Dropout(options.dropout)
        self.output = nn.Linear(widths[-1], 1)
        self.most = math.log(max_sales) * 1.2
        for column, size in sizes.items():
            nn.init.uniform_(self.embeddings[column].weight[:size], -0.05, 0.05)
        for layer in [*self.hidden, self.output]:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, columns: Columns) -> Tensor:
        """One number for each row."""
        categories = [embedding(columns[column]) for column, embedding in self.embeddings.items()]
        numbers = torch.stack([columns[column] for column in CONTINUOUS], 1)
        rows = torch.cat([*categories, self.norm(numbers)], 1)
        for layer in self.hidden:
            rows = torch.relu(layer(rows))
        return torch.sigmoid(self.output(self.dropout(rows)).squeeze(1)) * self.most


def squares_of_errors(predicted: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squared relative errors of sales, and of how many: rows that have sales."""
    counted = actual > 0.001
    errors = (1 - (predicted - actual).exp())[counted]
    return errors.square().sum(), counted.sum()


class Sums:
    """Loss and exp_rmspe over many batches, then over all ranks."""

    def __init__(self) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64)

    def add(self, predicted: Tensor, actual: Tensor) -> None:
        """A batch."""
        squares, counted = squares_of_errors(predicted, actual)
        absolute = (predicted - actual).abs().sum()
        self.sums += torch.stack([absolute, torch.ones_like(actual).sum(), squares, counted]).double().cpu()

    def of_all_ranks(self, name: str) -> tuple[float, float]:
        """Loss and exp_rmspe."""
        absolute, rows, squares, counted = hvd.allreduce(self.sums, op=hvd.Sum, name=name).tolist()
        return absolute / rows, math.sqrt(squares / counted)


def network(prepared: Prepared, options: Options) -> Network:
    """A new one for this data."""
    sizes = {column: len(prepared.vocabulary[column]) for column in CATEGORICAL}
    return Network(sizes, prepared.max_sales, options)


def load(checkpoint: bytes) -> Network:
    """The network of a checkpoint, to predict with."""
    saved = torch.load(io.BytesIO(checkpoint), weights_only=True, map_location="cpu")
    options = Options(**saved["options"] | {"layers": tuple(saved["options"]["layers"])})
    model = Network(saved["sizes"], saved["max_sales"], options)
    model.load_state_dict(saved["model"])
    return model.eval()


def train(prepared: Prepared, options: Options, checkpoint: str | None = None) -> Trained | None:
    """What every rank calls; rank 0 returns the course and the best model, kept in the file ``checkpoint`` too."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = torch.device("cuda" if deuteron.context().accelerators() and torch.cuda.is_available() else "cpu")
    folder = Path(prepared.folder)
    loader = Loader(
        folder / "train",
        options.batch_size,
        columns=[*CATEGORICAL, *CONTINUOUS, "Sales"],
        shuffle="full",
        seed=options.seed,
        transform=lambda batch: {column: tensor.to(device) for column, tensor in batch.items()},
    )
    validation = share(pq.read_table(folder / "validation"), rank, size)
    count = len(loader)
    torch.manual_seed(options.seed)
    model = network(prepared, options).to(device)
    # Every rank drops other units.
    torch.manual_seed(options.seed * 1000 + rank)
    optimizer = _optimizer(model, options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=options.plateau)
    trained = Trained()
    best, told = math.inf, 0.0
    for epoch in range(options.epochs):
        start, sums, finite = time.perf_counter(), Sums(), True
        model.train()
        for step, batch in enumerate(loader):
            _warm_up(optimizer, options, epoch + (step + 1) / count, size)
            finite = _step(model, optimizer, batch, sums)
            if not finite:
                break
            if rank == 0 and (step + 1 == count or time.perf_counter() - told > 0.5):
                told = time.perf_counter()
                print(f"progress {epoch * count + step + 1} of {options.epochs * count}", flush=True)
        if not finite:
            trained.ended = f"the loss is not a number in step {step + 1} of epoch {epoch + 1}"
            break
        loss, exp_rmspe = sums.of_all_ranks("training")
        val_loss, val_exp_rmspe = evaluate(model, validation, device)
        rate = optimizer.param_groups[0]["lr"]
        seconds = time.perf_counter() - start
        trained.history.append(Epoch(epoch + 1, rate, loss, exp_rmspe, val_loss, val_exp_rmspe, seconds))
        if rank == 0:
            print(
                f"epoch {epoch + 1}: loss {loss:.4f}, exp_rmspe {exp_rmspe:.4f}; validation: loss {val_loss:.4f}, "
                f"exp_rmspe {val_exp_rmspe:.4f} ({seconds:.1f} s)",
                flush=True,
            )
        if val_exp_rmspe < best:
            best, trained.best = val_exp_rmspe, epoch + 1
            if rank == 0:
                trained.checkpoint = _saved(model, prepared, options, trained.history[-1])
                if checkpoint is not None:
                    write_whole(Path(checkpoint), trained.checkpoint)
        if epoch + 1 >= options.warmup_epochs:
            plateau.step(val_exp_rmspe)
        if epoch + 1 - trained.best >= options.patience:
            trained.ended = f"nothing has improved for {options.patience} epochs"
            break
    return trained if rank == 0 else None


def share(rows: pa.Table, rank: int, size: int) -> pa.Table:
    """The rows that a rank validates on: each is one rank's."""
    first, last = (rows.num_rows * edge // size for edge in (rank, rank + 1))
    return rows.slice(first, last - first)


def tensors(batch: pa.RecordBatch, device: torch.device) -> Columns:
    """What the network sees of a batch, and its sales where it has them."""
    columns = [*CATEGORICAL, *CONTINUOUS, *({"Sales"} & set(batch.schema.names))]
    return {column: torch.tensor(batch[column].to_numpy(), device=device) for column in columns}


def evaluate(model: Network, rows: pa.Table, device: torch.device) -> tuple[float, float]:
    """Loss and exp_rmspe over the rows of all ranks."""
    sums = Sums()
    model.eval()
    with torch.no_grad():
        for batch in rows.to_batches(4096):
            columns = tensors(batch, device)
            sums.add(model(columns), columns["Sales"].log())
    return sums.of_all_ranks("validation")


def _optimizer(model: Network, options: Options) -> torch.optim.Optimizer:
    kernels = [layer.weight for layer in model.hidden]
    others = [parameter for parameter in model.parameters() if all(parameter is not kernel for kernel in kernels)]
    groups = [{"params": kernels, "weight_decay": WEIGHT_DECAY}, {"params": others}]
    # In one pass over the weights: on a CPU a step takes about seven tenths of the time.
    adam = torch.optim.Adam(groups, lr=options.learning_rate, eps=1e-3, fused=True)
    if not options.warmup_epochs:
        for group in adam.param_groups:
            group["lr"] *= hvd.size()
    return hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())


def _warm_up(optimizer: torch.optim.Optimizer, options: Options, epochs: float, size: int) -> None:
    """The rate goes from one rank's to that of all ranks together."""
    if epochs > options.warmup_epochs:
        return
    for group in optimizer.param_groups:
        group["lr"] = options.learning_rate * (1 + (size - 1) * epochs / options.warmup_epochs)


def _step(model: Network, optimizer: torch.optim.Optimizer, batch: Columns, sums: Sums) -> bool:
    """One step; whether it was one of numbers."""
    log_sales = batch["Sales"].log()
    predicted = model(batch)
    optimizer.zero_grad()
    nn.functional.l1_loss(predicted, log_sales).backward()
    optimizer.step()
    sums.add(predicted.detach(), log_sales)
    # This gradient is the mean over all ranks, so that all of them see what one has met.
    gradient = model.output.bias.grad
    return gradient is not None and bool(gradient.isfinite())


def _saved(model: Network, prepared: Prepared, options: Options, epoch: Epoch) -> bytes:
    stream = io.BytesIO()
    saved: dict[str, Any] = {
        "model": model.state_dict(),
        "options": asdict(options),
        "sizes": {column: embedding.num_embeddings - 1 for column, embedding in model.embeddings.items()},
        "max_sales": prepared.max_sales,
        "vocabulary": prepared.vocabulary,
        "epoch": asdict(epoch),
    }
    torch.save(saved, stream)
    return stream.getvalue()
