"""Rossmann Store Sales from end to end: prepare, train in parallel, predict, submission file.

usage: python examples/rossmann                         on generated data of 100 stores, on this machine
       python examples/rossmann --data DIR              on your copy of the competition's seven files
       python examples/rossmann --spark 'local[2]'      prepare, train and predict in Spark
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import deuteron
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from rossmann import generate, plot, predict
from rossmann.engines import DataFusion, Engine, Spark
from rossmann.prepare import STEPS, Prepared, prepare
from rossmann.tables import TABLES, BadInputError, headers
from rossmann.train import Options, Trained, load, train

#: Stores of the demo: a few minutes on two cores.
DEMO = 100


def main() -> None:
    """The command."""
    arguments = parse()
    try:
        pipeline(arguments)
    except (BadInputError, deuteron.errors.InvalidError, OSError) as error:
        sys.exit(f"rossmann: {error}")
    except KeyboardInterrupt:
        # As the shell has it: 128 and the number of the signal.
        sys.exit(130)


def pipeline(arguments: argparse.Namespace) -> None:
    """All parts, one after the other."""
    times: dict[str, float] = {}
    # Ranks need not be in this folder.
    out: Path = arguments.out.absolute()
    if arguments.data is not None:
        headers(arguments.data)
    out.mkdir(parents=True, exist_ok=True)
    engine, run = places(arguments.spark)
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data
        if data is None:
            data = Path(folder)
            with timed("generate", times), bar("generate", len(TABLES), "file") as moved:
                generate.generate(data, arguments.size, seed=arguments.seed, told=lambda _: moved(1))
        with timed("prepare", times), bar("prepare", len(STEPS), "step") as moved:
            prepared = prepare(engine, data, out / "features", told=lambda _: moved(1))
    print(", ".join(f"{part}: {rows:,} rows" for part, rows in prepared.rows.items()))

    step = arguments.batch_size * arguments.num_proc
    if prepared.rows["train"] < step:
        raise BadInputError(
            f"{prepared.rows['train']:,} rows are less than one step of {step:,}: give a smaller --batch-size"
        )
    options = Options(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        warmup_epochs=arguments.warmup_epochs,
        plateau=arguments.epochs // 10,
        patience=max(2, arguments.epochs // 5),
        seed=arguments.seed,
    )
    with timed("train", times):
        trained = train_on(run, arguments.num_proc, prepared, options, out / "checkpoint.pt")
    if not trained.checkpoint:
        sys.exit(f"rossmann: {trained.ended}: try a smaller --learning-rate")
    with timed("predict", times), bar("predict", prepared.rows["test"], "row") as moved:
        place = (out / "features" / "test", trained.checkpoint, arguments.num_proc)
        scored = predict.here(*place) if isinstance(engine, DataFusion) else predict.on_spark(engine.session, *place)
        rows = predict.write_submission(out / "submission.csv", scored, moved)
    with timed("plot", times):
        validation = pq.read_table(out / "features" / "validation")
        predicted = predict.sales(validation, load(trained.checkpoint))
        median = predict.baseline(out / "features")
        plot.learning_curve(out / "learning_curve", trained.history, median)
        plot.predicted_against_actual(out / "predicted", predicted, validation["Sales"].to_numpy())
    summary(arguments.out, times, trained, median, rows)


def places(spark: str | None) -> tuple[Engine, Callable[..., list[Any]]]:
    """Where data is prepared, and what starts ranks there."""
    if spark is None:
        # One accelerator for each rank, if there are so many.
        wanted = {"accelerator": "/gpu", "required": False} if torch.cuda.is_available() else {}
        return DataFusion(), partial(deuteron.run, **wanted)
    import cloudpickle
    from deuteron.spark import run

    # Executors need not have these files.
    cloudpickle.register_pickle_by_value(sys.modules["rossmann"])
    return Spark(spark), run


def train_on(
    run: Callable[..., list[Any]], num_proc: int, prepared: Prepared, options: Options, checkpoint: Path
) -> Trained:
    """Trains on so many ranks behind one bar."""
    with Progress() as progress:
        arguments = (prepared, options, str(checkpoint))
        trained: Trained = run(train, args=arguments, num_proc=num_proc, stdout=progress)[0]
    return trained


class Progress:
    """A stream for what ranks print: the lines of rank 0 that count steps move a bar, others are shown above it."""

    def __init__(self) -> None:
        self.bar = tqdm(total=1, unit="step", desc="train", dynamic_ncols=True, disable=None)
        self.rest = ""

    def write(self, text: str) -> int:
        """What has come: not always whole lines."""
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            if found := re.search(r"progress (\d+) of (\d+)$", line):
                self.bar.total = int(found[2])
                self.bar.update(int(found[1]) - self.bar.n)
            else:
                self.bar.write(line)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back but half a line."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.rest:
            self.bar.write(self.rest)
        self.bar.close()


@contextmanager
def bar(part: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """A bar of a part; what it gives moves it by so many."""
    with tqdm(total=total, unit=unit, desc=part, dynamic_ncols=True, disable=None) as progress:
        yield progress.update


@contextmanager
def timed(part: str, times: dict[str, float]) -> Iterator[None]:
    """Notes how long a part takes."""
    start = time.perf_counter()
    yield
    times[part] = time.perf_counter() - start


def summary(out: Path, times: dict[str, float], trained: Trained, median: float, rows: int) -> None:
    """The last lines: how long each part took, and how good the result is."""
    best = trained.history[trained.best - 1]
    print(f"\n{'part':<12}{'seconds':>9}")
    for part, seconds in times.items():
        print(f"{part:<12}{seconds:>9.1f}")
    print(f"{'all':<12}{sum(times.values()):>9.1f}\n")
    print(f"{'validation':<34}{'exp_rmspe':>10}")
    print(f"{'median of store, weekday, promo':<34}{median:>10.4f}")
    print(f"{f'network, epoch {best.epoch}':<34}{best.val_exp_rmspe:>10.4f}  ({best.val_exp_rmspe / median:.2f} x)")
    print(f"\ntraining ended: {trained.ended}")
    print(f"{out / 'submission.csv'}: {rows:,} rows; pictures beside it: learning_curve.png, predicted.png (and .svg)")


def at_least(least: int) -> Callable[[str], int]:
    """A whole number on the command line."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: it must be at least {least}")
        return int(text)

    return number


def parse() -> argparse.Namespace:
    """What was said on the command line."""
    usage = (__doc__ or "").split("usage:")[1]
    parser = argparse.ArgumentParser(
        usage=usage.strip(), description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="the folder of train.csv and the six other files; if not said, generated",
    )
    add("--out", type=Path, default=Path("rossmann-out"), metavar="DIR", help="where results go (%(default)s)")
    add("--num-proc", type=at_least(1), default=min(2, os.cpu_count() or 1), help="ranks (%(default)s)")
    add("--epochs", type=at_least(1), default=8, help="at most so many (%(default)s)")
    add("--batch-size", type=at_least(1), default=128, help="rows of a step on each rank (%(default)s)")
    add("--learning-rate", type=float, default=5e-4, help="of one rank; it is scaled by their number (%(default)s)")
    add("--warmup-epochs", type=int, default=1, help="over which the rate grows to that (%(default)s)")
    add("--seed", type=int, default=0, help="of data, weights and order (%(default)s)")
    add(
        "--size",
        type=at_least(2),
        default=DEMO,
        metavar="STORES",
        help=f"stores to generate (%(default)s; really {generate.STORES})",
    )
    add("--spark", metavar="MASTER", help="prepare, train and predict in Spark: local[2], spark://…, yarn")
    return parser.parse_args()


if __name__ == "__main__":
    main()
