"""Two pictures of a run, as PNG and SVG: the learning curve, and predicted against actual sales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from .train import Epoch

OURS, OTHER, BASELINE = "#0b6e99", "#c9752d", "#777777"


def learning_curve(path: Path, history: list[Epoch], baseline: float) -> None:
    """exp_rmspe by epoch."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    epochs = [epoch.epoch for epoch in history]
    axes.plot(epochs, [epoch.exp_rmspe for epoch in history], color=OTHER, label="training, with dropout")
    axes.plot(epochs, [epoch.val_exp_rmspe for epoch in history], color=OURS, marker="o", label="validation")
    axes.axhline(baseline, color=BASELINE, linestyle="--", label="median of store, weekday and promotion")
    highest = max([baseline, *(epoch.val_exp_rmspe for epoch in history)])
    axes.set(xlabel="epoch", ylabel="exp_rmspe", ylim=(0, 1.3 * min(highest, 3 * baseline)), title="Learning curve")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="lower left")
    _save(figure, path)


def predicted_against_actual(path: Path, predicted: np.ndarray, actual: np.ndarray) -> None:
    """A point for each day of a store in the validation period."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    shown = np.random.default_rng(0).permutation(len(actual))[:3000]
    axes.scatter(actual[shown], predicted[shown], s=4, alpha=0.3, color=OURS, linewidths=0, rasterized=True)
    edges = [min(actual.min(), predicted.min()), max(actual.max(), predicted.max())]
    axes.plot(edges, edges, color=BASELINE, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="actual sales", ylabel="predicted sales", title="Validation period")
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_minor_locator(NullLocator())
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_suffix(".png"), dpi=120)
    # Points are an image in it, and letters are letters: small enough for a page.
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path.with_suffix(".svg"), dpi=100)
