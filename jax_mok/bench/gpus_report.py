"""The tables of `python -m jax_mok.bench gpus`, made of the files in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jax_mok.bench.checksums import RESULTS, difference
from jax_mok.bench.gpus_jobs import CUT_OFF, LEFT_OUT, PASSED, Outcome
from jax_mok.bench.routes import draw_routes
from jax_mok.bench.shapes import SHAPES, TOY
from jax_mok.bench.tables import open_console, plus_minus

_OURS = "jax_mok"
_TORCH = "torch"
_PASSES = ("forward", "gradients")
_FIGURES = """\
gradients: forward and backward. share: of the plain product's TFLOP/s in the same mode; bound: the
larger of arithmetic and link, as a share of the layer's time; x fewest: times as long as on the
fewest GPUs, each with as many tokens and experts; peers: times as long as ours in the same run"""


def report(
    folder: Path, shapes: Sequence[str], counts: Sequence[int], outcomes: Sequence[Outcome]
) -> bool:
    """Prints all tables.

    Args:
      folder: of the files, those of earlier calls among them.
      shapes: whose repeats of tokens are counted.
      counts: on so many devices.
      outcomes: of this call.

    Returns:
      Whether results have different bits.
    """
    console = open_console()
    figures = list(_rows_of_layers(folder, counts))
    if figures:
        console.print(_table_of_layers(figures))
    _print_precision(console, folder, counts)
    _print_repeats(console, shapes, counts)
    different = _print_bits(console, folder)
    _print_jobs(console, folder, outcomes)
    return different


def _read(path: Path) -> dict[str, Any]:
    """What a job wrote; nothing if it did not come to that, or was ended while it wrote."""
    try:
        figures: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return figures


def _rows_of_layers(folder: Path, counts: Sequence[int]) -> Iterator[list[str]]:
    """Shape by shape, of each pass and number of devices what the jobs found out."""
    for name in SHAPES | TOY:
        for passes in _PASSES:
            fewest_s: dict[str, float] = {}
            for count in sorted(counts):
                of_layer = _read(folder / f"layer-{count}-{passes}.json")
                of_peers = _read(folder / f"peers-{count}-{passes}-{name}.json")
                modes = of_layer.get("shapes", {}).get(name, {})
                if beside := of_peers.get("shapes", {}).get(name):
                    modes = {**modes, "burst beside peers": beside["layers"][_OURS] | beside}
                for mode, row in modes.items():
                    seconds = row["layer_s"]["median"]
                    bound = f"{row['bound_s'] / seconds:.3f}" if row["bound_s"] else ""
                    times = f"{seconds / fewest_s.setdefault(mode, seconds):.2f}"
                    figures = [plus_minus(row["layer_s"]), f"{row['share']:.3f}", bound, times]
                    peers = _cells_of_peers(row.get("layers", {}))
                    yield [name, passes, str(count), mode, *figures, *peers]


def _cells_of_peers(layers: dict[str, dict[str, Any]]) -> list[str]:
    torch = [row["times_ours"] for peer, row in layers.items() if peer.startswith(_TORCH)]
    of_jax = {
        peer: row["times_ours"]
        for peer, row in layers.items()
        if peer != _OURS and not peer.startswith(_TORCH)
    }
    fastest = min(of_jax, key=lambda peer: of_jax[peer], default="")
    return [
        f"{of_jax[fastest]:.2f} {fastest}" if fastest else "",
        f"{torch[0]:.2f}" if torch else "",
    ]


def _table_of_layers(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(caption=_FIGURES, caption_justify="left")
    for column in ("shape", "passes", "GPUs", "mode", "ms", "share", "bound", "x fewest"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fastest JAX peer")
    table.add_column("torch", justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _print_precision(console: Console, folder: Path, counts: Sequence[int]) -> None:
    table = Table(caption="forward, in a burst", caption_justify="left")
    for column in ("shape", "GPUs", "products", "ms", "times bfloat16"):
        table.add_column(column, justify="right", no_wrap=True)
    for count in sorted(counts):
        for name, forms in _read(folder / f"precision-{count}.json").get("shapes", {}).items():
            for form, row in forms.items():
                times = f"{row['over_bfloat16']:.3f}"
                table.add_row(name, str(count), form, plus_minus(row["layer_s"]), times)
    if table.row_count:
        console.print(table)


def _print_repeats(console: Console, shapes: Sequence[str], counts: Sequence[int]) -> None:
    """A token goes to a GPU once, however many of its experts it chose: there is no other way."""
    table = Table(
        caption="uniform routes of one GPU's tokens; repeats are never sent", caption_justify="left"
    )
    for column in ("shape", "GPUs", "choices to others, a token", "others that get it", "repeats"):
        table.add_column(column, justify="right")
    for name in shapes:
        for count in sorted(counts):
            choices, sent = repeats(name, count)
            share = f"{1 - sent / choices:.1%}" if choices else ""
            table.add_row(name, str(count), f"{choices:.2f}", f"{sent:.2f}", share)
    console.print(table)


def repeats(name: str, count: int) -> tuple[float, float]:
    """Of a token of a shape, how many choices are other GPUs' experts, and how many GPUs' they are.

    Uniform routes, drawn for the tokens of the first of `count` GPUs.
    """
    shape = (SHAPES | TOY)[name]
    experts = shape.experts_of(count)
    generator = np.random.default_rng(0)
    ids = draw_routes("uniform", generator, shape.tokens, experts, shape.top_k)
    chosen = ids[..., None] // (experts // count) == np.arange(1, count)
    return float(chosen.sum((1, 2)).mean()), float(chosen.any(1).sum(1).mean())


def _print_bits(console: Console, folder: Path) -> bool:
    rows = [
        row
        for name in ("bits", "bits-processes")
        for row in _read(folder / f"{name}.json").get("rows", [])
    ]
    if not rows:
        return False
    table = Table(caption="SHA-256 of the results for one batch", caption_justify="left")
    for column in ("devices", "processes", *RESULTS):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row["devices"]), str(row["processes"]), *row["sums"].values())
    console.print(table)
    different = difference(rows)
    if different:
        console.print(f"[red]{different}[/red]")
    return bool(different)


def _print_jobs(console: Console, folder: Path, outcomes: Sequence[Outcome]) -> None:
    table = Table(caption=f"logs and figures: {folder}", caption_justify="left")
    for column in ("step", "job", "devices", "", "s", "note"):
        table.add_column(column, justify="right" if column in ("devices", "s") else "left")
    for outcome in outcomes:
        job = outcome.job
        # What pytest says last is its summary; of the others it is any line.
        says = outcome.state != PASSED or job.step == "tests"
        table.add_row(
            job.step,
            job.name,
            str(job.devices),
            outcome.state,
            f"{outcome.seconds:.0f}" if outcome.seconds else "",
            outcome.note if says else "",
        )
    console.print(table)
    ended_early = [each for each in outcomes if each.state in (CUT_OFF, LEFT_OUT)]
    if ended_early:
        names = ", ".join(each.job.name for each in ended_early)
        steps = ",".join(dict.fromkeys(each.job.step for each in ended_early))
        console.print(f"for want of time not run to the end: {names}; --steps={steps} runs them")
