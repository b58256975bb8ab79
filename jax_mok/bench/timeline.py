"""Who does what when inside the fused kernel, as the kernel itself records it.

One call of the layer, or of its gradients with --backward (then the backward kernel's), after some
that are not recorded: when each SM multiplies what, sends results on, and pulls tokens. Recording
takes a kernel of its own, so that nothing of it is in the one that is used otherwise.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_mok.bench.session
from jax_mok.bench import chains, kernels, records
from jax_mok.bench.session import Session, expect_writable, open_session, write_json
from jax_mok.bench.tables import open_console
from jax_mok.config import MoEConfig
from jax_mok.faults import check
from jax_mok.moe import moe_ffn

flags.adopt_module_key_flags(jax_mok.bench.session)
_PLOT = flags.DEFINE_string("plot", None, "draw the first GPU's timeline to this PNG")
_TRACE = flags.DEFINE_string(
    "trace", None, "write all records to this file, for Perfetto (ui.perfetto.dev) or Chrome"
)

_CALLS_BEFORE = 3


def main(argv: Sequence[str]) -> None:
    """Prints what share of its time an SM spends how."""
    if _PLOT.value:
        from jax_mok.bench import timeline_plot  # before all measuring, if Matplotlib is missing

        expect_writable("--plot", _PLOT.value)
    if _TRACE.value:
        expect_writable("--trace", _TRACE.value)
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        session = open_session(argv, progress)
        if not session.on_gpus:
            print("not measured: the timeline, which the kernel for NVIDIA GPUs records")
            return
        if len(session.shapes) != 1:
            raise app.UsageError(f"--shapes names {len(session.shapes)}; a timeline is of one")
        taken = record(session)
    check()
    states = records.spans(taken[0], session.backward)
    shares = records.shares(states)
    _report(session, shares)
    described = session.description()
    of_one_call = {key: described[key] for key in ("devices", "kind", "jax", "routes", "backward")}
    write_json(of_one_call | {"shapes": {name: {"shares": shares} for name in session.shapes}})
    if _TRACE.value:
        Path(_TRACE.value).write_text(json.dumps(records.trace(taken, session.backward)))
    if _PLOT.value:
        timeline_plot.draw(Path(_PLOT.value), states, _title(session))


def record(session: Session) -> list[Any]:
    """Of each GPU the records of one call of its kernel, the backward pass's with `backward`."""
    (shape,) = session.shapes.values()
    operands = chains.make_operands(
        shape, session.routes, session.mesh, session.scale.product_width
    )
    layer = functools.partial(moe_ffn, config=MoEConfig())
    # Without graphs, in which the kernel that records nothing would have been captured.
    call = chains.run_layer.lower(operands, session.mesh, layer, session.backward, 1)
    program = call.compile(kernels.NO_GRAPHS)
    for _ in range(_CALLS_BEFORE):
        jax.block_until_ready(program(operands))
    devices = list(session.mesh.devices.flat)
    records.start(devices)
    jax.block_until_ready(program(operands))
    taken = records.take(devices)
    return [records.of_last_kernel(each) if session.backward else each for each in taken]


def _title(session: Session) -> str:
    (name,) = session.shapes
    passes = "backward" if session.backward else "forward"
    return f"{name}, {passes}, GPU 0 of {session.mesh.size}, {session.mesh.devices[0].device_kind}"


def _report(session: Session, shares: dict[str, float]) -> None:
    console = open_console()
    console.print(_title(session))
    table = Table()
    table.add_column("an SM's")
    table.add_column("share of the kernel's time, mean over the SMs", justify="right")
    for state, share in shares.items():
        table.add_row(state, f"{share:.1%}")
    console.print(table)
