"""The picture of `python -m jax_mok.bench rack`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by the colour-blind.
_LAYER, _ARITHMETIC, _LINK, _DISPATCH, _COMBINE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#56B4E9",
    "#E69F00",
)
_MARKERS = "os^Dvx"


def draw(path: Path, measured: dict[str, Any], links: dict[str, Any]) -> None:
    """A row a shape: time by GPUs, the ports by time, pairs by time, one GPU's sources by time.

    Below them what one change does to the time, if any was simulated.
    """
    shapes = measured["shapes"]
    changes = [point for point in next(iter(shapes.values())) if point["varied"] != "gpus"]
    heights = [2.7] * len(shapes) + ([1 + 0.22 * len(changes)] if changes else [])
    figure = plt.figure(figsize=(14, 0.5 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 4, height_ratios=heights)
    for row, (name, points) in enumerate(shapes.items()):
        panels = [figure.add_subplot(grid[row, column]) for column in range(4)]
        _draw_curve(panels[0], name, [point for point in points if point["varied"] == "gpus"])
        _draw_ports(panels[1], links[name])
        _draw_pairs(panels[2], links[name])
        _draw_sources(panels[3], links[name])
        for panel in panels[:3]:
            panel.spines[["top", "right"]].set_visible(False)
            if row == 0:
                panel.legend(frameon=False, fontsize=8, loc="upper left")
    if changes:
        _draw_changes(figure.add_subplot(grid[-1, :]), shapes)
    figure.suptitle(f"simulated: forward pass on {measured['machine'].upper()}s", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_curve(panel: Axes, name: str, points: list[dict[str, Any]]) -> None:
    gpus = [point["gpus"] for point in points]
    for key, label, colour, line in (
        ("layer_s", "layer", _LAYER, "o-"),
        ("compute_s", "bound: arithmetic", _ARITHMETIC, "--"),
        ("link_s", "bound: link", _LINK, ":"),
    ):
        panel.plot(gpus, [point[key] * 1e3 for point in points], line, color=colour, label=label)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.set_ylim(0, 1.6e3 * max(point["layer_s"] for point in points))  # room for the legend
    panel.set_xlabel("GPUs, equal work for each")
    panel.set_ylabel(f"{name}\nms")


def _draw_ports(panel: Axes, link: dict[str, Any]) -> None:
    incoming = {name: each.mean(1) for name, each in link["incoming"].items()}
    times = (np.arange(len(incoming["dispatch"])) + 0.5) * link["bin_s"] * 1e3
    panel.stackplot(
        times,
        incoming["dispatch"],
        incoming["combine"],
        colors=(_DISPATCH, _COMBINE),
        labels=("tokens", "output rows"),
    )
    panel.set_ylim(0, 1.4)
    panel.set_xlabel("ms since the kernel's start")
    panel.set_ylabel("share of the ports' rate, mean")


def _draw_pairs(panel: Axes, link: dict[str, Any]) -> None:
    pairs = link["pairs"]
    times = (np.arange(len(pairs["median"])) + 0.5) * link["window_s"] * 1e3
    panel.fill_between(
        times, pairs["least"], pairs["most"], color=_DISPATCH, alpha=0.4, label="least to most"
    )
    panel.plot(times, pairs["5th"], color=_ARITHMETIC, linestyle="--", label="5th percentile")
    panel.plot(times, pairs["median"], color=_LAYER, label="median")
    panel.set_ylim(0, 2.4)
    panel.set_xlabel("ms since the kernel's start")
    panel.set_ylabel("pairs, of their part of the port")


def _draw_sources(panel: Axes, link: dict[str, Any]) -> None:
    first = link["first"].T
    ranks, bins = first.shape
    image = panel.imshow(
        first * max(1, ranks - 1),
        aspect="auto",
        origin="lower",
        cmap="cividis",
        vmin=0,
        vmax=3,
        interpolation="nearest",
        extent=(0, bins * link["bin_s"] * 1e3, -0.5, ranks - 0.5),
    )
    panel.set_xlabel("ms since the kernel's start")
    panel.set_ylabel("to GPU 0 from")
    panel.figure.colorbar(image, ax=panel, label="of its part of the port")


def _draw_changes(panel: Axes, shapes: dict[str, Any]) -> None:
    """Of each shape, times the layer as it is on as many GPUs."""
    for at, (name, points) in enumerate(shapes.items()):
        usual = {point["gpus"]: point["layer_s"] for point in points if point["varied"] == "gpus"}
        changed = [point for point in points if point["varied"] != "gpus"]
        panel.plot(
            [point["layer_s"] / usual[point["gpus"]] for point in changed],
            [f"{point['varied']}: {point['value']}" for point in changed],
            _MARKERS[at % len(_MARKERS)],
            color=f"C{at}",
            fillstyle="none",
            label=name,
        )
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("times the layer as it is")
    panel.invert_yaxis()
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, loc="upper right")
