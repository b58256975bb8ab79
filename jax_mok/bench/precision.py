"""The layer with its products in MXFP8, beside itself in bfloat16: what it costs on these GPUs.

Weights are bfloat16 arrays, converted in every call; or stored in MXFP8, expanded in every call; or
prepared before, by `jax_mok.prepare_weights`. Times are those of a burst, see
`jax_mok.bench.layer`, every call a program of its own: within one, XLA would convert the weights
once for all calls. With --backward only the arrays are measured, to which gradients go.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_mok.bench.session
from jax_mok.bench import chains
from jax_mok.bench.chains import Chain, Operands
from jax_mok.bench.session import NOTHING_OF_USE, Session, measure_shapes, open_session
from jax_mok.bench.shapes import Shape
from jax_mok.bench.tables import open_report, passes_of, plus_minus, print_not_measured
from jax_mok.config import MoEConfig
from jax_mok.faults import check
from jax_mok.moe import moe_ffn
from jax_mok.precision import FORWARD_AXIS
from jax_mok.prepare import prepare_weights
from jax_mok.quantize import quantize

flags.adopt_module_key_flags(jax_mok.bench.session)

BFLOAT16 = "bfloat16"


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    # Drawn between rounds only, so that nothing runs beside what is timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        session = open_session(argv, progress)
        measured: dict[str, Any] = {
            **session.description(),
            "not_measured": [] if session.on_gpus else [NOTHING_OF_USE],
        }
        measure_shapes(session, measured, functools.partial(measure, session), _summary)
    check()
    _report(measured)


def measure(session: Session, name: str, shape: Shape) -> dict[str, Any]:
    """By precision and form of the weights, seconds of a call and how many times bfloat16's."""
    operands = chains.make_operands(shape, session.routes, session.mesh, 1)
    guess_s = session.scale.call_s + session.flops(shape) / session.scale.flops_per_s
    repeated = {}
    for form, of_form in forms(operands, session.backward).items():
        config = MoEConfig(precision="operands" if form == BFLOAT16 else "mxfp8")
        layer = functools.partial(moe_ffn, config=config)
        queue = chains.layer_queue(of_form, session.mesh, layer, session.backward)
        repeated[form] = Chain(queue, guess_s)
    seconds = session.stopwatch(name, 1).burst(repeated)
    return {
        form: {"layer_s": each._asdict(), "over_bfloat16": each.median / seconds[BFLOAT16].median}
        for form, each in seconds.items()
    }


def forms(operands: Operands, backward: bool) -> dict[str, Operands]:
    """The same layer's operands, by the form of its weights."""
    arrays = {BFLOAT16: operands, "mxfp8, converted": operands}
    if backward:
        return arrays
    weights = (operands.gate, operands.up, operands.down)
    store = jax.jit(functools.partial(quantize, axis=FORWARD_AXIS))
    stored = [store(weight) for weight in weights]
    prepared = jax.jit(prepare_weights)(*weights)
    return arrays | {
        form: operands._replace(gate=gate, up=up, down=down)
        for form, (gate, up, down) in {"mxfp8, stored": stored, "mxfp8, prepared": prepared}.items()
    }


def _summary(name: str, figures: dict[str, Any]) -> str:
    parts = [f"{form} {row['layer_s']['median'] * 1e3:.3f} ms" for form, row in figures.items()]
    return f"{name}: {'; '.join(parts)}"


def _report(measured: dict[str, Any]) -> None:
    console = open_report(measured, f"{measured['routes']} routes, {passes_of(measured)}")
    table = Table()
    for column in ("shape", "products", "ms", "times bfloat16"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, figures in measured["shapes"].items():
        for form, row in figures.items():
            table.add_row(name, form, plus_minus(row["layer_s"]), f"{row['over_bfloat16']:.3f}")
    console.print(table)
    print_not_measured(console, measured)
