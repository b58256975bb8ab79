"""The picture of `python -m jax_mok.bench link`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from jax_mok.bench.link_moves import HOWS, WAYS

# Okabe and Ito's palette, told apart by the colour-blind; ways also differ in their markers.
_COLOURS = {"loads": "#0072B2", "bulk copies": "#D55E00"}
_MARKERS = {"pull": "o", "push": "s"}


def draw(path: Path, measured: dict[str, Any]) -> None:
    """Rates by blocks and by length of a row; dashed where both directions are busy."""
    rates = measured["link"]["rates"]
    blocks = max(rate["blocks"] for rate in rates)
    row_bytes = next(rate["row_bytes"] for rate in rates if rate["blocks"] == 1)
    ways = (
        ("blocks", "row_bytes", row_bytes, f"blocks of the kernel, rows of {row_bytes} bytes"),
        ("row_bytes", "blocks", blocks, f"bytes of a row, {blocks} blocks"),
    )
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for panel, (by, other, usual, label) in zip(panels, ways, strict=True):
        for both_ways in (False, True):
            for how in HOWS:
                for way in WAYS:
                    chosen = sorted(
                        (rate[by], rate["bytes_per_s"]["median"] * 1e-9)
                        for rate in rates
                        if (rate["both_ways"], rate["how"], rate["way"]) == (both_ways, how, way)
                        and rate[other] == usual
                    )
                    panel.plot(
                        *zip(*chosen, strict=True),
                        color=_COLOURS[how],
                        marker=_MARKERS[way],
                        markersize=4,
                        linestyle="--" if both_ways else "-",
                        label=f"{way}, {how}, {'both ways' if both_ways else 'one way'}",
                    )
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set_xlabel(label)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("GB/s of each busy direction")
    panels[0].set_ylim(0, None)
    panels[1].legend(fontsize=7, frameon=False, handlelength=4)
    figure.savefig(path, dpi=150)
    plt.close(figure)
