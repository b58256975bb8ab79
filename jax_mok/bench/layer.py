"""The layer on GPUs, as shares of what cuBLAS does in the same run, and of what no layer can beat.

A GPU under power limit is faster for some tens of milliseconds after a pause than in the long run,
so two times are reported, of the layer and of an 8192³ product by cuBLAS. Burst: a program of few
calls of one of them, after a pause. Sustained: programs of many calls of both in turn, without a
pause; with L the layer and P the product, the times of (L, L, P) and of (L, P, P) repeated as often
as (L, P), less that of (L, P), are those of L and of P in that mix. `jax_mok.bench.bound` says what
the bound is; the rates of link and memory are measured in the same run. The plan's time is
that of its kernels, and of those that list the work, as JAX's profiler records them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress

from jax_mok.bench import bound, chains, kernels
from jax_mok.bench.chains import Chain
from jax_mok.bench.report import report, summary
from jax_mok.bench.routes import KINDS
from jax_mok.bench.shapes import SHAPES, TOY, Shape
from jax_mok.bench.stopwatch import Stopwatch
from jax_mok.bench.timing import Times
from jax_mok.config import Composition, MoEConfig
from jax_mok.faults import check

_KNOWN = SHAPES | TOY
_PLATFORM = flags.DEFINE_enum(
    "platform", "cuda", ["cuda", "cpu"], "cpu only tries the measurement: use --shapes=toy"
)
_GPUS = flags.DEFINE_integer("gpus", None, "devices to use; default: all", lower_bound=1)
_SHAPES = flags.DEFINE_list("shapes", list(SHAPES), f"some of {', '.join(_KNOWN)}")
_ROUNDS = flags.DEFINE_integer("rounds", 30, "timed rounds", lower_bound=2)
_ROUTES = flags.DEFINE_enum("routes", "uniform", KINDS, "load of experts")
_COMPOSITION = flags.DEFINE_enum(
    "composition",
    "auto",
    ["auto", "composed"],
    "composed: the moves and the products in launches of their own, instead of the fused kernel",
)
_BACKWARD = flags.DEFINE_bool("backward", False, "forward and backward, for all gradients")
_JSON = flags.DEFINE_string("json", None, "also write the figures to this file")


class Scale(NamedTuple):
    """What a platform's measurements are made of.

    Attributes:
      product: the name of what does the plain product,
      product_width: and the width of its matrices.
      flops_per_s: a guess, which sets how many calls a program has.
      call_s: likewise, of what a call of the layer takes beside its products.
      burst_s: see `Stopwatch`.
      sustained_s: see `Stopwatch`.
    """

    product: str
    product_width: int
    flops_per_s: float
    call_s: float
    burst_s: float
    sustained_s: float

    @property
    def product_flops(self) -> int:
        """Of one plain product."""
        return 2 * self.product_width**3


_SCALES = {
    "cuda": Scale("cuBLAS", 8192, 5e14, 3e-4, burst_s=0.02, sustained_s=0.12),
    "cpu": Scale("jnp.dot", 128, 1e10, 4e-3, burst_s=0.01, sustained_s=0.01),
}
_LINK_BYTES = 2**29  # sent by each GPU at a time
_MEMORY_BYTES = 2**30  # read by each GPU at a time


class Rates(NamedTuple):
    """Bytes per second of each GPU, None where they were not measured.

    Attributes:
      link: each way, both ways busy.
      memory: read and written.
    """

    link: Times | None
    memory: Times | None


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    unknown = sorted(set(_SHAPES.value) - set(_KNOWN))
    if unknown:
        raise app.UsageError(f"unknown --shapes {', '.join(unknown)}; known: {', '.join(_KNOWN)}")
    if _PLATFORM.value == "cpu":
        jax.config.update("jax_platforms", "cpu")
    # cuBLAS is the yardstick, not XLA's own generated products.
    cublas = "--xla_gpu_enable_triton_gemm=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {cublas}"
    try:
        devices = jax.devices(_PLATFORM.value)
    except RuntimeError as error:
        raise app.UsageError(
            f"JAX finds no NVIDIA GPU ({error}): --platform=cpu --shapes=toy tries the measurement "
            "without"
        ) from error
    if _GPUS.value and _GPUS.value > len(devices):
        raise app.UsageError(f"--gpus={_GPUS.value}, and this machine has {len(devices)}")
    mesh = Mesh(np.array(devices[: _GPUS.value]), (chains.AXIS,))
    scale = _SCALES[_PLATFORM.value]
    stopwatch = Stopwatch(scale.burst_s, scale.sustained_s, _ROUNDS.value)
    measured: dict[str, Any] = {
        "devices": mesh.size,
        "kind": devices[0].device_kind,
        "jax": jax.__version__,
        "routes": _ROUTES.value,
        "composition": _COMPOSITION.value,
        "backward": _BACKWARD.value,
        "rounds": _ROUNDS.value,
        "product": scale.product,
        "not_measured": _not_measured(mesh),
    }
    # Drawn between rounds only, so that nothing runs beside what is timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        rates = measure_rates(mesh, _watched(stopwatch, progress, "link and memory", 1))
        for name, rate in rates._asdict().items():
            measured[f"{name}_bytes_per_s"] = rate and rate._asdict()
        measured["shapes"] = {}
        for name in _SHAPES.value:
            watched = _watched(stopwatch, progress, name, 2)
            measured["shapes"][name] = measure(_KNOWN[name], mesh, scale, rates, watched)
            progress.console.print(summary(name, measured["shapes"][name]))
            if _JSON.value:
                with open(_JSON.value, "w") as file:
                    json.dump(measured, file, indent=1)
    check()
    report(measured)


def measure_rates(mesh: Mesh, stopwatch: Stopwatch) -> Rates:
    """What moving bytes takes on these devices, if they are GPUs."""
    if _PLATFORM.value == "cpu":
        return Rates(None, None)
    repeated = {"memory": chains.memory_chain(mesh, _MEMORY_BYTES)}
    if mesh.size > 1:
        repeated["link"] = chains.link_chain(mesh, _LINK_BYTES)
    seconds = stopwatch.burst(repeated)
    moved = {"memory": 2 * _MEMORY_BYTES, "link": _LINK_BYTES}
    rates = {
        name: Times(*(moved[name] / s for s in (each.median, each.high, each.low)))
        for name, each in seconds.items()
    }
    return Rates(rates.get("link"), rates["memory"])


def measure(
    shape: Shape, mesh: Mesh, scale: Scale, rates: Rates, stopwatch: Stopwatch
) -> dict[str, Any]:
    """The figures of one shape, per GPU.

    Returns:
      For "burst" and "sustained": seconds of the layer and of the product as median and quartiles,
      TFLOP/s of both and the layer's share of the product's; seconds of the bound and its parts,
      and the bound's share of the layer's time. On GPUs also, in a burst, the plan's seconds and
      share of the layer's, and the layer's time over that of reading this GPU's experts once.
    """
    operands = chains.make_operands(shape, _ROUTES.value, mesh, scale.product_width)
    config = MoEConfig(timeout_s=20.0, composition=cast(Composition, _COMPOSITION.value))
    run = functools.partial(chains.run_in_order, operands, mesh, config)

    def repeat(kind: str, guess_s: float) -> Chain:
        return Chain(lambda calls: run((kind,) * calls), guess_s)

    kind = "gradients" if _BACKWARD.value else "layer"
    layer_s = scale.call_s + _flops(shape) / scale.flops_per_s
    product_s = scale.product_flops / scale.flops_per_s
    burst = stopwatch.burst(
        {
            kind: repeat(kind, layer_s),
            "product": repeat("product", product_s),
        }
    )
    sustained = stopwatch.sustained(run, kind, "product", layer_s + product_s)
    link_s = 0.0
    if rates.link:
        ids = np.asarray(operands.ids)
        link_bytes = bound.link_bytes(shape, ids, mesh.size, backward=_BACKWARD.value)
        link_s = link_bytes / rates.link.median
    figures = {
        mode: _figures(shape, scale, times[kind], times["product"], link_s)
        for mode, times in (("burst", burst), ("sustained", sustained))
    }
    if rates.memory:
        reading_s = bound.weight_bytes(shape) / rates.memory.median
        figures["burst"]["over_reading_weights"] = burst[kind].median / reading_s
        plan_s = _plan_seconds(operands, mesh, config, kind)
        figures["burst"] |= {"plan_s": plan_s, "plan_share": plan_s / burst[kind].median}
    return figures


def _plan_seconds(
    operands: chains.Operands, mesh: Mesh, config: MoEConfig, kind: str, calls: int = 8
) -> float:
    """Mean of a call and a GPU."""
    program = chains.run_in_order.lower(operands, mesh, config, (kind,)).compile(kernels.NO_GRAPHS)
    jax.block_until_ready(program(operands))
    events = kernels.record(lambda: program(operands), calls)
    return kernels.kernel_seconds(events, kernels.PLAN_KERNELS) / (calls * mesh.size)


def _flops(shape: Shape) -> int:
    """Of one GPU; a backward pass has twice the products of a forward pass."""
    return (3 if _BACKWARD.value else 1) * shape.flops()


def _figures(
    shape: Shape, scale: Scale, layer: Times, product: Times, link_s: float
) -> dict[str, Any]:
    layer_s, product_s = layer.median, product.median
    compute_s = _flops(shape) * product_s / scale.product_flops
    bound_s = None if _PLATFORM.value == "cpu" else max(compute_s, link_s)
    return {
        "layer_s": layer._asdict(),
        "product_s": product._asdict(),
        "tflops": _flops(shape) / layer_s / 1e12,
        "product_tflops": scale.product_flops / product_s / 1e12,
        "share": compute_s / layer_s,
        "compute_s": compute_s,
        "link_s": link_s,
        "bound_s": bound_s,
        "share_of_bound": bound_s and bound_s / layer_s,
    }


def _not_measured(mesh: Mesh) -> list[str]:
    if _PLATFORM.value == "cpu":
        return [
            "link and memory, which CPU devices do not have to themselves, and so the bound and "
            "the reading of weights; the plan, which has no kernels there",
            "anything of use: sizes and repeats are too small for that on CPU devices",
        ]
    return ["the link, which one GPU has no use for"] if mesh.size == 1 else []


def _watched(stopwatch: Stopwatch, progress: Progress, name: str, times: int) -> Stopwatch:
    """The stopwatch, whose rounds of so many measurements are shown under this name."""
    task = progress.add_task(name, total=times * stopwatch.all_rounds)
    advance = functools.partial(progress.update, task, advance=1, refresh=True)
    return dataclasses.replace(stopwatch, after_round=advance)
