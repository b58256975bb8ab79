"""The picture of a run: the loss curve and one heat map of expert load per layer."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lm.history import History

# Okabe-Ito colours: distinct for every common kind of colour blindness.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#595959"
MAX_COLUMNS = 240  # of a heat map; longer runs are averaged over neighbouring steps


def draw(path: Path, history: History, *, entropy: float, title: str) -> None:
    """Writes the PNG; `entropy` is the unigram entropy in nats per byte."""
    shares = np.asarray(history.shares)
    steps, layers, _ = shares.shape
    figure = Figure(figsize=(8.5, 3.2 + 1.7 * layers), layout="constrained")
    axes = figure.subplots(
        1 + layers, 1, height_ratios=[3.2] + [1.7] * layers, sharex=True, squeeze=False
    )[:, 0]
    _draw_loss(axes[0], history, entropy)
    axes[0].set_title(title, loc="left", fontsize=11)
    for layer in range(layers):
        image = _draw_load(axes[1 + layer], shares[:, layer], layer)
    bar = figure.colorbar(image, ax=axes[1:], extend="max", pad=0.015, aspect=12 * layers)
    bar.set_label("expert load\n(1 = even share of choices)")
    axes[-1].set_xlabel("training step")
    axes[-1].set_xlim(0, steps)
    figure.savefig(path, dpi=150, format="png")


def _draw_loss(axis: Axes, history: History, entropy: float) -> None:
    steps = np.arange(1, len(history.losses) + 1)
    axis.plot(steps, history.losses, color=BLUE, linewidth=0.8, alpha=0.8, label="training loss")
    if history.measured()[0]:
        axis.plot(
            *history.measured(),
            color=ORANGE,
            marker="o",
            markersize=4,
            linewidth=1.5,
            clip_on=False,
            label="validation loss",
        )
    axis.axhline(
        entropy,
        color=GREY,
        linestyle="--",
        linewidth=1.2,
        label=f"unigram entropy of the corpus ({entropy:.2f})",
    )
    axis.set_ylabel("loss (nats per byte)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)


def _draw_load(axis: Axes, shares: np.ndarray, layer: int) -> QuadMesh:
    steps, experts = shares.shape
    columns = min(steps, MAX_COLUMNS)
    edges = np.linspace(0, steps, columns + 1).astype(int)
    load = np.add.reduceat(shares * experts, edges[:-1]) / np.diff(edges)[:, None]
    image = axis.pcolormesh(
        edges, np.arange(experts + 1) - 0.5, load.T, cmap="cividis", vmin=0, vmax=2, rasterized=True
    )
    axis.set_ylabel(f"layer {layer + 1}\nexpert")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    return image
