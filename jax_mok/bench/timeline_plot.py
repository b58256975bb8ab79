"""The picture of `python -m jax_mok.bench timeline`."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.patches import Patch

from jax_mok.bench.records import IDLE, PULLING, SENDING

_BINS = 1200
# Okabe and Ito's palette, told apart by the colour-blind.
_PRODUCT_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7")
_COLOURS = {SENDING: "#E69F00", PULLING: "#D55E00", IDLE: "#FFFFFF"}


def draw(path: Path, states: dict[str, np.ndarray], title: str) -> None:
    """What every SM's multiplying warps do over time, and how many SMs pull or send meanwhile."""
    products = [name for name in states if name not in _COLOURS]
    colours = dict(zip(products, _PRODUCT_COLOURS, strict=False)) | _COLOURS
    last = max(each[:, 2].max() for each in states.values() if len(each))
    sms = np.unique(np.concatenate([each[:, 0] for each in states.values()]))
    shown = [*products, SENDING]
    image = np.zeros((len(sms), _BINS), np.int32)  # 0 is idle
    for number, name in enumerate(shown, start=1):
        for sm, begin, end in states[name]:
            row = np.searchsorted(sms, sm)
            image[row, _bin(begin, last) : max(_bin(end, last), _bin(begin, last) + 1)] = number
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(10, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    palette = ListedColormap([to_rgb(colours[name]) for name in (IDLE, *shown)])
    top.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        cmap=palette,
        vmin=-0.5,
        vmax=len(shown) + 0.5,
        extent=(0, last, len(sms), 0),
    )
    top.set_ylabel("SM")
    top.set_title(title, loc="left")
    for name in (PULLING, SENDING):
        times = np.linspace(0, last, _BINS)
        begun = np.searchsorted(np.sort(states[name][:, 1]), times, side="right")
        ended = np.searchsorted(np.sort(states[name][:, 2]), times, side="right")
        bottom.plot(times, begun - ended, color=colours[name], linewidth=1)
    bottom.set_ylabel("SMs at once")
    bottom.set_ylim(0, len(sms))
    bottom.set_xlabel("µs since the kernel's first work")
    bottom.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colours[name], label=name) for name in (*shown, PULLING)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bin(time: float, last: float) -> int:
    return min(int(time / last * _BINS), _BINS - 1)
