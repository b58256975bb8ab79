"""The layer on GPUs, as shares of what cuBLAS does in the same run, and of what no layer can beat.

A GPU under power limit is faster for some tens of milliseconds after a pause than in the long run,
so two times are reported, of the layer and of an 8192³ product by cuBLAS. Burst: a program of few
calls of one of them, after a pause. Sustained: programs of many calls of both in turn, without a
pause; with L the layer and P as many products as take about its time, the times of (L, L, P) and of
(L, P, P) repeated as often as (L, P), less that of (L, P), are those of L and of P in that mix.
`jax_mok.bench.bound` says what the bound is; the rates of link and memory are measured in the same
run. The plan's time is that of its kernels, and of those that list the work, as JAX's profiler
records them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress

import jax_mok.bench.session
from jax_mok.bench import bound, chains, kernels
from jax_mok.bench.bound import Bound
from jax_mok.bench.chains import Chain
from jax_mok.bench.report import report, summary
from jax_mok.bench.session import Rates, Session, measure_shapes, open_session
from jax_mok.bench.shapes import Shape
from jax_mok.bench.timing import Times
from jax_mok.config import Composition, MoEConfig
from jax_mok.faults import check
from jax_mok.memory import memory

flags.adopt_module_key_flags(jax_mok.bench.session)
_COMPOSITION = flags.DEFINE_enum(
    "composition",
    "auto",
    ["auto", "composed"],
    "composed: the moves and the products in launches of their own, instead of the fused kernel",
)
_APART = flags.DEFINE_bool(
    "apart",
    False,
    "every GPU is a rank by itself, with as many tokens and experts, all at once: what is left "
    "without communication, on the same GPUs",
)
_RESIDUALS = flags.DEFINE_enum(
    "residuals",
    "saved",
    ["saved", "replayed", "checkpointed"],
    "with --backward: pre-activations are saved, or computed again in the backward pass, or the "
    "whole layer is, by jax.checkpoint",
)


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    # Drawn between rounds only, so that nothing runs beside what is timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        session = open_session(argv, progress)
        if _RESIDUALS.value != "saved" and not session.backward:
            raise app.UsageError(f"--residuals={_RESIDUALS.value} is for --backward")
        measured: dict[str, Any] = {
            **session.description(),
            "composition": _COMPOSITION.value,
            "apart": _APART.value,
            "residuals": _RESIDUALS.value if session.backward else None,
            "not_measured": session.not_measured(),
        }
        rates = session.rates()
        for name, rate in rates._asdict().items():
            measured[f"{name}_bytes_per_s"] = rate and rate._asdict()
        if _APART.value:
            session = dataclasses.replace(session, mesh=chains.apart(session.mesh))
        measure_shapes(session, measured, functools.partial(measure, session, rates), summary)
    check()
    report(measured)


def measure(session: Session, rates: Rates, name: str, shape: Shape) -> dict[str, Any]:
    """The figures of one shape, per GPU.

    Returns:
      For "burst" and "sustained": seconds of the layer and of the product as median and quartiles,
      TFLOP/s of both and the layer's share of the product's; seconds of the bound and its parts,
      and the bound's share of the layer's time. On GPUs also, in a burst, the plan's seconds and
      share of the layer's, the layer's time over that of reading this GPU's experts once, and the
      bytes of memory that a call takes beside its operands.
    """
    mesh, scale = session.mesh, session.scale
    stopwatch = session.stopwatch(name, 2)
    operands = chains.make_operands(shape, session.routes, mesh, scale.product_width)
    config = MoEConfig(
        timeout_s=20.0,
        composition=cast(Composition, _COMPOSITION.value),
        saved_rows=0 if _RESIDUALS.value == "replayed" else None,
    )
    run = functools.partial(chains.run_in_order, operands, mesh, config)

    def repeat(kind: str, guess_s: float) -> Chain:
        return Chain(lambda calls: run((kind,) * calls), guess_s)

    kind = "layer"
    if session.backward:
        kind = "checkpointed" if _RESIDUALS.value == "checkpointed" else "gradients"
    layer_s = scale.call_s + session.flops(shape) / scale.flops_per_s
    product_s = scale.product_flops / scale.flops_per_s
    burst = stopwatch.burst({kind: repeat(kind, layer_s), "product": repeat("product", product_s)})
    sustained = stopwatch.sustained(run, kind, "product", (layer_s, product_s))
    figures = {}
    for mode, times in (("burst", burst), ("sustained", sustained)):
        least = session.bound(shape, np.asarray(operands.ids), times["product"], rates)
        figures[mode] = _figures(session, shape, times[kind], times["product"], least)
    if rates.memory:
        reading_s = bound.weight_bytes(shape) / rates.memory.median
        figures["burst"]["over_reading_weights"] = burst[kind].median / reading_s
        call = chains.run_in_order.lower(operands, mesh, config, (kind,))
        program = call.compile(kernels.NO_GRAPHS)
        plan_s = _plan_seconds(program, operands, mesh)
        figures["burst"] |= {"plan_s": plan_s, "plan_share": plan_s / burst[kind].median}
        figures["burst"]["memory_bytes"] = _memory_bytes(program, session, shape, config)
    return figures


def _memory_bytes(
    program: jax.stages.Compiled, session: Session, shape: Shape, config: MoEConfig
) -> int:
    """Of a GPU, for one call: XLA's beside the operands, and what ranks show each other."""
    analysis = program.memory_analysis()
    assert analysis is not None
    ranks = session.mesh.shape[chains.AXIS]
    shared = memory(
        config,
        ranks=ranks,
        tokens=shape.tokens,
        top_k=shape.top_k,
        experts=shape.experts_of(ranks),
        hidden=shape.hidden,
        inner=shape.inner,
        backward=session.backward,
    )
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes) + shared.arena_bytes


def _plan_seconds(
    program: jax.stages.Compiled, operands: chains.Operands, mesh: Mesh, calls: int = 8
) -> float:
    """Mean of a call and a GPU."""
    jax.block_until_ready(program(operands))
    events = kernels.record(lambda: program(operands), calls)
    return kernels.kernel_seconds(events, kernels.PLAN_KERNELS) / (calls * mesh.size)


def _figures(
    session: Session, shape: Shape, layer: Times, product: Times, least: Bound | None
) -> dict[str, Any]:
    rate = session.flops(shape) / layer.median
    product_rate = session.scale.product_flops / product.median
    return {
        "layer_s": layer._asdict(),
        "product_s": product._asdict(),
        "tflops": rate / 1e12,
        "product_tflops": product_rate / 1e12,
        "share": rate / product_rate,
        "compute_s": least and least.compute_s,
        "link_s": least and least.link_s,
        "bound_s": least and least.seconds,
        "share_of_bound": least and least.seconds / layer.median,
    }
