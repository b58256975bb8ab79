"""The picture of `python -m jax_mok.bench peers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from jax_mok.bench.peers import OURS
from jax_mok.bench.tables import passes_of

# Okabe and Ito's palette, told apart by the colour-blind.
_OURS_COLOUR, _PEERS_COLOUR = "#0072B2", "#999999"


def draw(path: Path, measured: dict[str, Any]) -> None:
    """A panel a shape, a bar a layer: its speed as a share of the plain product's."""
    shapes = measured["shapes"]
    rows = max(len(figures["layers"]) for figures in shapes.values())
    figure, panels = plt.subplots(
        len(shapes),
        1,
        figsize=(8, 0.6 + len(shapes) * (0.5 + 0.28 * rows)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for (name, figures), panel in zip(shapes.items(), panels[:, 0], strict=True):
        layers = figures["layers"]
        names = list(layers)
        shares = [layers[peer]["share"] for peer in names]
        colours = [_OURS_COLOUR if peer == OURS else _PEERS_COLOUR for peer in names]
        bars = panel.barh(names, shares, color=colours)
        labels = [f"{layers[peer]['layer_s']['median'] * 1e3:.2f} ms" for peer in names]
        panel.bar_label(bars, labels, padding=3)
        if figures["bound_share"]:
            panel.axvline(figures["bound_share"], color="black", linestyle="--", label="bound")
            panel.legend(loc="lower right", frameon=False)
        panel.invert_yaxis()
        panel.set_title(name, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    passes = passes_of(measured)
    panels[-1, 0].set_xlabel(f"share of the speed of {measured['product']}, {passes}")
    widest = max(
        max([figures["bound_share"] or 0, *(row["share"] for row in figures["layers"].values())])
        for figures in shapes.values()
    )
    panels[-1, 0].set_xlim(0, 1.2 * widest)  # with room for the labels
    figure.savefig(path, dpi=150)
    plt.close(figure)
