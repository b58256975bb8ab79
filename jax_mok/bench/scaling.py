"""How the layer's time goes with its sizes, beside the bound: one of them varied at a time.

Varied are the tokens of a GPU, the number of experts, how unequal their load is (the exponent of a
Zipf distribution), and the rows of the ring. Times are those of a burst, see `jax_mok.bench.layer`;
the bound is that of `jax_mok.bench.bound`, its arithmetic that of the GPU with most rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_mok.bench.session
from jax_mok.bench import chains
from jax_mok.bench.chains import Chain
from jax_mok.bench.session import (
    Rates,
    Session,
    expect_writable,
    measure_shapes,
    open_session,
)
from jax_mok.bench.shapes import Shape
from jax_mok.bench.tables import open_report, passes_of, plus_minus, print_not_measured
from jax_mok.config import TILE_ROWS, MoEConfig
from jax_mok.faults import check
from jax_mok.layout import make_layout
from jax_mok.moe import moe_ffn

flags.adopt_module_key_flags(jax_mok.bench.session)
_PLOT = flags.DEFINE_string("plot", None, "also draw the curves to this PNG")

_TOKENS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)  # times those of the shape
_EXPERTS = (1 / 4, 1 / 2, 1, 2, 4)  # likewise
_EXPONENTS = (0.0, 0.3, 0.6, 0.9, 1.2)
_RING_ROWS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # times those of the default


class Point(NamedTuple):
    """What is measured: `value` of what is varied, and the rest."""

    value: float
    shape: Shape
    config: MoEConfig
    exponent: float


def main(argv: Sequence[str]) -> None:
    """Prints the tables."""
    if _PLOT.value:
        from jax_mok.bench import scaling_plot  # before all measuring, if Matplotlib is missing

        expect_writable("--plot", _PLOT.value)
    # Drawn between rounds only, so that nothing runs beside what is timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        session = open_session(argv, progress)
        measured: dict[str, Any] = {
            **session.description(),
            "not_measured": session.not_measured(),
        }
        rates = session.rates()
        scale = session.scale
        product = chains.product_chain(
            session.mesh, scale.product_width, scale.product_flops / scale.flops_per_s
        )
        run = functools.partial(measure, session, rates, product)
        measure_shapes(session, measured, run, _summary)
    check()
    _report(measured)
    if _PLOT.value:
        scaling_plot.draw(Path(_PLOT.value), measured)


def measure(
    session: Session, rates: Rates, product: Chain, name: str, shape: Shape
) -> dict[str, Any]:
    """By what is varied, a list of points: its value, seconds of the layer and of the bound."""
    return {
        what: [
            _measure_point(session, rates, product, f"{name}, {what} {p.value:g}", p)
            for p in points
        ]
        for what, points in sweeps(shape, session.mesh.size).items()
    }


def sweeps(shape: Shape, gpus: int) -> dict[str, list[Point]]:
    """The points, by what is varied."""

    def of_shapes(what: str, factors: Sequence[float], least: int) -> Iterator[Point]:
        values = {max(least, round(getattr(shape, what) * factor)) for factor in factors}
        for value in sorted(values):
            yield Point(value, shape._replace(**{what: value}), MoEConfig(), 0.0)

    layout = make_layout(
        MoEConfig(),
        ranks=gpus,
        tokens=shape.tokens,
        top_k=shape.top_k,
        experts=shape.experts_of(gpus),
    )
    rings = {
        max(TILE_ROWS, round(layout.ring_rows * factor) // TILE_ROWS * TILE_ROWS)
        for factor in _RING_ROWS
    }
    return {
        "tokens": list(of_shapes("tokens", _TOKENS, 1)),
        # Of two GPUs; a GPU cannot have fewer than the choices of a token need.
        "experts": list(of_shapes("experts", _EXPERTS, 2 * shape.top_k)),
        "zipf exponent": [Point(each, shape, MoEConfig(), each) for each in _EXPONENTS],
        "ring rows": [
            Point(rows, shape, MoEConfig(ring_rows=rows, chunk_rows=TILE_ROWS), 0.0)
            for rows in sorted(rings)
        ],
    }


def _measure_point(
    session: Session, rates: Rates, product: Chain, name: str, point: Point
) -> dict[str, Any]:
    session.say(name)
    mesh, scale, shape = session.mesh, session.scale, point.shape
    operands = chains.make_operands(shape, "zipf", mesh, 1, exponent=point.exponent)
    layer = functools.partial(moe_ffn, config=point.config)
    seconds = session.stopwatch(name, 1).burst(
        {
            "layer": Chain(
                functools.partial(chains.run_layer, operands, mesh, layer, session.backward),
                scale.call_s + session.flops(shape) / scale.flops_per_s,
            ),
            "product": product,
        }
    )
    least = session.bound(shape, np.asarray(operands.ids), seconds["product"], rates)
    return {
        "value": point.value,
        "layer_s": seconds["layer"]._asdict(),
        "compute_s": least and least.compute_s,
        "link_s": least and least.link_s,
        "bound_s": least and least.seconds,
    }


def _summary(name: str, figures: dict[str, Any]) -> str:
    return f"{name}: {sum(map(len, figures.values()))} points"


def _report(measured: dict[str, Any]) -> None:
    console = open_report(measured, passes_of(measured))
    table = Table(caption="bound: the larger of arithmetic and link", caption_justify="left")
    for column in ("shape", "varied", "value", "ms", "bound, ms", "of it"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, figures in measured["shapes"].items():
        for what, points in figures.items():
            for point in points:
                seconds, bound_s = point["layer_s"], point["bound_s"]
                table.add_row(
                    name,
                    what,
                    f"{point['value']:g}",
                    plus_minus(seconds),
                    "" if bound_s is None else f"{bound_s * 1e3:.3f}",
                    "" if bound_s is None else f"{bound_s / seconds['median']:.3f}",
                )
    console.print(table)
    print_not_measured(console, measured)
