"""Who should move rows: the rank that needs them (pull), or the one that has them (push).

Two measurements. Between two GPUs, how many bytes a second kernels of this project's kind move, by
number of blocks and by length of a row, with plain loads or with bulk copies, one GPU at a time or
both at once; and how long a signal takes. And of the layer itself, forward and backward, how long
it takes with each of the four moves turned round. The second decides: it recommends a direction for
each move, and keeps it for `MoEConfig.auto`.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_mok.bench.session
from jax_mok import directions
from jax_mok.bench import chains, link_moves
from jax_mok.bench.chains import Chain
from jax_mok.bench.link_moves import HOWS, WAYS, Link, Move
from jax_mok.bench.session import Session, expect_writable, measure_shapes, open_session
from jax_mok.bench.shapes import Shape
from jax_mok.bench.tables import open_report, plus_minus, print_not_measured
from jax_mok.config import MoEConfig
from jax_mok.faults import check
from jax_mok.moe import moe_ffn

flags.adopt_module_key_flags(jax_mok.bench.session)
_PLOT = flags.DEFINE_string("plot", None, "also draw the rates of the link to this PNG")

BLOCKS = (1, 2, 4, 8, 16, 32, 64, 132)
ROW_BYTES = (128, 512, 2048, 4096, 14336, 65536)
_MOST_BLOCKS, _USUAL_ROW_BYTES = 132, 4096
_LEAST_GAIN = 0.01  # of the layer's time, below which a direction stays what it is by default


def main(argv: Sequence[str]) -> None:
    """Prints the tables."""
    if _PLOT.value:
        from jax_mok.bench import link_plot  # before all measuring, if Matplotlib is missing

        expect_writable("--plot", _PLOT.value)
    # Drawn between rounds only, so that nothing runs beside what is timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        session = dataclasses.replace(open_session(argv, progress), backward=True)
        measured: dict[str, Any] = {**session.description(), "not_measured": _not_measured(session)}
        measured["link"] = _measure_link(session) if _has_link(session) else None
        measure_shapes(session, measured, functools.partial(measure, session), _summary)
    check()
    measured["recommended"] = recommend(measured["shapes"])
    _report(measured)
    if _has_link(session):
        kind = session.mesh.devices[0].device_kind
        path = directions.remember(kind, measured["recommended"])
        print(f"kept for MoEConfig.auto(): {path}")
    if _PLOT.value and measured["link"]:
        link_plot.draw(Path(_PLOT.value), measured)


def measure(session: Session, name: str, shape: Shape) -> dict[str, Any]:
    """By move, seconds of the layer with that move turned round; "default", as it is."""
    mesh, scale = session.mesh, session.scale
    operands = chains.make_operands(shape, session.routes, mesh, scale.product_width)
    guess_s = scale.call_s + session.flops(shape) / scale.flops_per_s
    repeated = {}
    for move in ("default", *directions.MOVES):
        config = turned_round(move) if move != "default" else MoEConfig()
        layer = functools.partial(moe_ffn, config=config)
        run = functools.partial(chains.run_layer, operands, mesh, layer, True)
        repeated[move] = Chain(run, guess_s)
    seconds = session.stopwatch(name, 1).burst(repeated)
    return {move: each._asdict() for move, each in seconds.items()}


def turned_round(move: str) -> MoEConfig:
    """The default, with the other direction for one move."""
    turned: Any = {move: "push" if getattr(MoEConfig(), move) == "pull" else "pull"}
    return MoEConfig(**turned)


def recommend(shapes: dict[str, Any]) -> dict[str, str]:
    """The direction of each move that took the least time, over all shapes.

    That of the default, unless turning it round gains more than a hundredth and more than the
    measurements scatter.
    """
    recommended = {}
    for move in directions.MOVES:
        gains, scatter = [], _LEAST_GAIN
        for seconds in shapes.values():
            default, turned = seconds["default"], seconds[move]
            gains.append(1 - turned["median"] / default["median"])
            for each in (default, turned):
                scatter = max(scatter, (each["high"] - each["low"]) / 2 / each["median"])
        config = turned_round(move) if statistics.median(gains) > scatter else MoEConfig()
        recommended[move] = getattr(config, move)
    return recommended


def _has_link(session: Session) -> bool:
    return session.on_gpus and session.mesh.size > 1


def _not_measured(session: Session) -> list[str]:
    if _has_link(session):
        return []
    few = "one GPU has no link" if session.on_gpus else "CPU devices have no link"
    return [
        f"rates and signals between GPUs: {few}; the layer's moves stay within one memory, so what "
        "is recommended here is not kept"
    ]


def _measure_link(session: Session) -> dict[str, Any]:
    first, second = (device.local_hardware_id for device in session.mesh.devices[:2])
    link = Link(first, second)
    moves = [
        Move(way, how, blocks, row_bytes, both_ways)
        for both_ways in (False, True)
        for how in HOWS
        for way in WAYS
        for blocks, row_bytes in (
            *((blocks, _USUAL_ROW_BYTES) for blocks in BLOCKS),
            *((_MOST_BLOCKS, each) for each in ROW_BYTES if each != _USUAL_ROW_BYTES),
        )
    ]
    task = session.progress.add_task("link", total=len(moves))
    rates = []
    for move in moves:
        rate = link.rate(move, session.rounds)
        rates.append({**move._asdict(), "bytes_per_s": rate._asdict()})
        session.progress.update(task, advance=1, refresh=True)
    signals = {way: link.signal(way, session.rounds)._asdict() for way in link_moves.WAYS}
    return {"rates": rates, "signal_s": signals}


def _summary(name: str, seconds: dict[str, Any]) -> str:
    parts = [f"{move} {each['median'] * 1e3:.3f} ms" for move, each in seconds.items()]
    return f"{name}: {', '.join(parts)}"


def _report(measured: dict[str, Any]) -> None:
    console = open_report(measured, f"{measured['routes']} routes")
    if measured["link"]:
        console.print(_rates_table(measured["link"]["rates"]))
        for way, each in measured["link"]["signal_s"].items():
            console.print(f"a signal by {way}: {plus_minus(each, 1e6, '.2f')} µs one way")
    table = Table(
        title="forward and backward with one move turned round, and the default, ms", min_width=60
    )
    for column in ("shape", "default", *map(_turned_name, directions.MOVES)):
        table.add_column(column, justify="right", no_wrap=True)
    for name, seconds in measured["shapes"].items():
        table.add_row(name, *map(plus_minus, seconds.values()))
    console.print(table)
    recommended = ", ".join(f"{move} {way}" for move, way in measured["recommended"].items())
    console.print(f"recommended: {recommended}")
    print_not_measured(console, measured)


def _turned_name(move: str) -> str:
    return f"{move}: {getattr(turned_round(move), move)}"


def _rates_table(rates: list[dict[str, Any]]) -> Table:
    """GB/s each way, a row for each number of blocks and length of a row."""
    table = Table(title="rows between two GPUs, GB/s of each direction that is busy")
    kinds = [(both, way, how) for both in (False, True) for way in WAYS for how in HOWS]
    table.add_column("blocks", justify="right")
    table.add_column("bytes a row", justify="right")
    for both, way, how in kinds:
        table.add_column(f"{way}, {how}, {'both ways' if both else 'one way'}", justify="right")
    cells: dict[tuple[int, int], dict[tuple[bool, str, str], str]] = {}
    for rate in rates:
        row = cells.setdefault((rate["blocks"], rate["row_bytes"]), {})
        kind = rate["both_ways"], rate["way"], rate["how"]
        row[kind] = f"{rate['bytes_per_s']['median'] * 1e-9:.0f}"
    for (blocks, row_bytes), row in cells.items():
        table.add_row(str(blocks), str(row_bytes), *(row[kind] for kind in kinds))
    return table
