"""The forward pass on up to 72 GPUs of one NVLink domain, simulated: there is none to measure on.

Plan, work lists and the order of pulls are those of the kernels, by the same code; rates are those
measured on two H200s, see `jax_mok.bench.rack_model`. Varied are the number of GPUs at constant
work per GPU, and on the most of them one thing at a time: who moves rows, the order of pulls and
their speed, tokens pulled again for each choice, the ring, the chunk, the experts' load, the bytes
of an element.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jax_mok.bench.rack_model import BIN_S, MACHINES, MXFP8_BYTES, Case, Outcome, simulate
from jax_mok.bench.shapes import SHAPES, TOY, Shape
from jax_mok.bench.tables import figure, open_console
from jax_mok.config import TILE_ROWS, MoEConfig
from jax_mok.layout import make_layout

_KNOWN = SHAPES | TOY
_SHAPES = flags.DEFINE_list(
    "shapes",
    ["qwen3-30b-a3b", "4096x1536", "deepseek-v3", "mixtral-8x7b"],
    f"some of {', '.join(_KNOWN)}",
)
_GPUS = flags.DEFINE_list("gpus", ["1", "2", "4", "8", "16", "36", "72"], "numbers of GPUs")
_MACHINE = flags.DEFINE_enum("machine", "h200", list(MACHINES), "gb200: as its data sheet has it")
_JSON = flags.DEFINE_string("json", None, "also write the figures to this file")
_PLOT = flags.DEFINE_string("plot", None, "also draw the curves and the link to this PNG")

_RINGS = {"an eighth": 1 / 8, "a quarter": 1 / 4, "half": 1 / 2}  # of the default's rows
_CHUNK_ROWS = (256, 4096)
_EXPONENTS = (0.3, 0.6, 0.9)
_PULL_SPEEDS = (2, 4)  # times the measured one
_ONE_HOST = 8  # GPUs: with so few, many tokens have several experts on one
_PERCENTILES = {"least": 0, "5th": 5, "median": 50, "most": 100}


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    unknown = sorted(set(_SHAPES.value) - set(_KNOWN))
    if unknown or not _SHAPES.value:
        raise app.UsageError(f"--shapes={','.join(_SHAPES.value)}; known: {', '.join(_KNOWN)}")
    gpus = _numbers_of_gpus()
    if _PLOT.value:
        from jax_mok.bench import rack_plot  # before all work, if Matplotlib is missing
    measured: dict[str, Any] = {"machine": _MACHINE.value, "shapes": {}}
    links = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name in _SHAPES.value:
            cases = list(cases_of(_KNOWN[name], gpus))
            points = measured["shapes"][name] = []
            for varied, value, case in progress.track(cases, description=name):
                outcome = simulate(case)
                points.append({"varied": varied, "value": value, **figures_of(case, outcome)})
                if (varied, value) == ("gpus", gpus[-1]):
                    links[name] = link_of(case, outcome)
            if _JSON.value:
                Path(_JSON.value).write_text(json.dumps(measured, indent=1))
    _report(measured)
    if _PLOT.value:
        rack_plot.draw(Path(_PLOT.value), measured, links)


def _numbers_of_gpus() -> list[int]:
    try:
        gpus = sorted({int(each) for each in _GPUS.value})
    except ValueError as error:
        raise app.UsageError(f"--gpus={','.join(_GPUS.value)}: {error}") from error
    if not gpus or gpus[0] < 1:
        raise app.UsageError("--gpus are positive numbers")
    return gpus


def cases_of(shape: Shape, gpus: Sequence[int]) -> Iterator[tuple[str, float | str, Case]]:
    """What is varied, its value, and the case."""
    machine, n = MACHINES[_MACHINE.value], gpus[-1]
    for count in gpus:
        yield "gpus", count, Case(shape, count, machine=machine)
    if n == 1:
        return
    usual = Case(shape, n, machine=machine)
    yield "pull order", "rows", dataclasses.replace(usual, pull_order="rows")
    layout = make_layout(
        MoEConfig(), ranks=n, tokens=shape.tokens, top_k=shape.top_k, experts=shape.experts_of(n)
    )
    for rows in _CHUNK_ROWS:
        config = MoEConfig(ring_rows=-(-layout.ring_rows // rows) * rows, chunk_rows=rows)
        case = dataclasses.replace(usual, pull_order="plan", config=config)
        yield "pull order", f"chunks of {rows}", case
    for times in _PULL_SPEEDS:
        faster = machine.with_pulls_as_fast(times)
        yield "pull speed", f"{times} times", dataclasses.replace(usual, machine=faster)
    for count in sorted({_ONE_HOST, n}.intersection(gpus)):
        case = Case(shape, count, machine=machine, repeats_tokens=True)
        yield "repeats", f"pulled, {count} GPUs", case
    pushed, pulled = MoEConfig(dispatch="push"), MoEConfig(combine="pull")
    yield "direction", "dispatch push", dataclasses.replace(usual, config=pushed)
    yield "direction", "combine pull", dataclasses.replace(usual, config=pulled)
    for name, part in _RINGS.items():
        rows = max(256, round(layout.ring_rows * part) // TILE_ROWS * TILE_ROWS)
        config = MoEConfig(ring_rows=rows, chunk_rows=TILE_ROWS)
        yield "ring", name, dataclasses.replace(usual, config=config)
    small = dataclasses.replace(usual, token_bytes=MXFP8_BYTES)
    yield "MXFP8", "tokens", small
    yield "MXFP8", "and output rows", dataclasses.replace(small, output_bytes=MXFP8_BYTES)
    for exponent in _EXPONENTS:
        yield "zipf exponent", exponent, dataclasses.replace(usual, exponent=exponent)


def figures_of(case: Case, outcome: Outcome) -> dict[str, Any]:
    """What the table shows, and more; seconds, and shares of the clusters' time."""
    kernel = outcome.kernel
    slowest = int(kernel["kernel_s"].argmax())
    waiting = kernel["waiting_s"][slowest] / kernel["kernel_s"][slowest]
    return {
        "gpus": case.gpus,
        "layer_s": outcome.seconds,
        "parts_s": outcome.parts,
        "compute_s": outcome.bound.compute_s,
        "link_s": outcome.bound.link_s,
        "tokens_s": float(kernel["tokens_s"].max()),
        "waiting": dict(zip(("tokens", "hidden", "ring", "link"), waiting.tolist(), strict=True)),
        "share_of_link": outcome.share_of_link(case.machine),
    }


def link_of(case: Case, outcome: Outcome) -> dict[str, Any]:
    """Shares of the ports' rate by time: what comes in at all GPUs, and at the first by source.

    `pairs` has, in windows of some bins, percentiles over pairs of what goes from one GPU to
    another, in shares of its fair part of the port.
    """
    n = case.gpus
    moves = [outcome.kernel[move]["binned"] for move in ("dispatch", "combine")]
    bins = max(len(move) for move in moves)
    moves = [np.pad(move, ((0, bins - len(move)), (0, 0), (0, 0))) for move in moves]
    port = case.machine.link_bytes_per_s * BIN_S
    together = moves[0] + moves[1]
    window = 10
    whole = together[: bins // window * window].reshape(-1, window, n, n).sum(1)
    of_pairs = whole[:, ~np.eye(n, dtype=bool)] / (window * port / max(1, n - 1))
    return {
        "bin_s": BIN_S,
        "incoming": {
            name: move.sum(1) / port
            for name, move in zip(("dispatch", "combine"), moves, strict=True)
        },
        "first": together[:, :, 0] / port,
        "window_s": window * BIN_S,
        "pairs": {
            name: np.percentile(of_pairs, at, axis=1) if of_pairs.size else np.zeros(0)
            for name, at in _PERCENTILES.items()
        },
    }


def _report(measured: dict[str, Any]) -> None:
    console = open_console()
    console.print(
        f"simulated, not measured: forward pass on {measured['machine'].upper()}s; waits in shares "
        "of the slowest GPU's kernel"
    )
    table = Table(
        caption="ms of the layer, of the bound's arithmetic and link, and until the last token is "
        "pulled; waits for tokens, for other clusters and for the link; what the link is used",
        caption_justify="left",
    )
    for column in ("shape", "varied", "value", "ms", "arithmetic", "link", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("for tokens", "for others", "for link", "of link"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, points in measured["shapes"].items():
        for point in points:
            waiting = point["waiting"]
            table.add_row(
                name,
                point["varied"],
                str(point["value"]),
                *(figure(point[key] * 1e3, ".3f") for key in ("layer_s", "compute_s", "link_s")),
                figure(point["tokens_s"] * 1e3, ".2f"),
                f"{waiting['tokens']:.1%}",
                f"{waiting['hidden'] + waiting['ring']:.1%}",
                f"{waiting['link']:.1%}",
                f"{point['share_of_link']:.0%}",
            )
    console.print(table)
