"""The picture of `python -m jax_mok.bench scaling`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from jax_mok.bench.tables import passes_of

# Okabe and Ito's palette, told apart by the colour-blind.
_OURS_COLOUR, _BOUND_COLOUR = "#0072B2", "#D55E00"
_LABELS = {
    "tokens": "tokens of a GPU",
    "experts": "experts of two GPUs",
    "zipf exponent": "exponent of the experts' load",
    "ring rows": "rows of the ring",
}


def draw(path: Path, measured: dict[str, Any]) -> None:
    """A row a shape, a panel for each thing that is varied: the layer's time and the bound."""
    shapes = measured["shapes"]
    figure, rows = plt.subplots(
        len(shapes),
        len(_LABELS),
        figsize=(12, 0.5 + 2.6 * len(shapes)),
        squeeze=False,
        layout="constrained",
    )
    for (name, figures), panels in zip(shapes.items(), rows, strict=True):
        for (what, label), panel in zip(_LABELS.items(), panels, strict=True):
            points = figures[what]
            values = [point["value"] for point in points]
            milliseconds = [point["layer_s"]["median"] * 1e3 for point in points]
            panel.plot(values, milliseconds, color=_OURS_COLOUR, marker="o", label="jax_mok")
            if measured["shapes"][name][what][0]["bound_s"] is not None:
                bounds = [point["bound_s"] * 1e3 for point in points]
                panel.plot(values, bounds, color=_BOUND_COLOUR, linestyle="--", label="bound")
            if what != "zipf exponent":
                panel.set_xscale("log", base=2)
                panel.xaxis.set_major_formatter("{x:.0f}")
                panel.tick_params(axis="x", labelrotation=30)
            panel.set_ylim(0, None)
            panel.set_xlabel(label)
            panel.spines[["top", "right"]].set_visible(False)
        passes = passes_of(measured)
        panels[0].set_ylabel(f"{name}\n{passes}, ms")
    rows[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
