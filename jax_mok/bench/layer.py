"""The layer on GPUs, as shares of what cuBLAS does in the same run.

A GPU under power limit is faster for some tens of milliseconds after a pause than in the long run,
so two times are reported. Burst: a program of few calls after a pause. Sustained: programs of many
calls without a pause, the layer's and cuBLAS's in turn. Both are differences between programs that
chain more and fewer calls, so what starting a program costs on the host drops out.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.bench.shapes import SHAPES, Shape
from jax_mok.config import MoEConfig
from jax_mok.faults import check
from jax_mok.moe import moe

_GPUS = flags.DEFINE_integer("gpus", None, "GPUs to use; default: all", lower_bound=1)
_SHAPES = flags.DEFINE_list("shapes", list(SHAPES), f"some of {', '.join(SHAPES)}")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "timed rounds", lower_bound=3)
_ROUTES = flags.DEFINE_enum("routes", "uniform", ["uniform", "balanced", "zipf"], "load of experts")
_JSON = flags.DEFINE_string("json", None, "also write the figures to this file")

_PAUSE_S = 0.015
_BURST_S = 0.02  # what the longer program of a burst takes, at most about
_SUSTAINED_S = 0.12
_PRODUCT_WIDTH = 8192
_ZIPF_EXPONENT = 0.9


class Program(NamedTuple):
    """A computation that can be chained: `run(operands, n)` runs it n times in a row."""

    run: Callable[[Any, int], jax.Array]
    operands: Any
    guess_s: float  # of one computation


def main(argv: Sequence[str]) -> None:
    """Prints a line for each shape."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    unknown = sorted(set(_SHAPES.value) - set(SHAPES))
    if unknown:
        raise app.UsageError(f"unknown --shapes {', '.join(unknown)}; known: {', '.join(SHAPES)}")
    # cuBLAS is the yardstick, not XLA's own generated products.
    cublas = "--xla_gpu_enable_triton_gemm=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {cublas}"
    devices = jax.devices("cuda")
    if _GPUS.value and _GPUS.value > len(devices):
        raise app.UsageError(f"--gpus={_GPUS.value}, and this machine has {len(devices)}")
    devices = devices[: _GPUS.value]
    mesh = Mesh(np.array(devices), ("ep",))
    kind = devices[0].device_kind
    print(f"{len(devices)} x {kind}, JAX {jax.__version__}, {_ROUTES.value} routes")
    print(f"{'shape':>18} {'':>9} {'ms':>8} {'TFLOP/s':>8} {'cuBLAS':>8} {'share':>6}")
    figures = {}
    for name in _SHAPES.value:
        figures[name] = measure(SHAPES[name], mesh)
        for mode, row in figures[name].items():
            print(
                f"{name:>18} {mode:>9} {row['ms']:8.3f} {row['tflops']:8.0f} "
                f"{row['cublas_tflops']:8.0f} {row['share']:6.3f}",
                flush=True,
            )
    check()
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(figures, file, indent=1)


def measure(shape: Shape, mesh: Mesh) -> dict[str, dict[str, float]]:
    """Milliseconds and rates per GPU, in a burst and sustained."""
    layer, product = layer_program(shape, mesh), product_program(mesh)
    rows = {}
    for mode, seconds in (("burst", burst), ("sustained", sustained)):
        layer_s, product_s = seconds([layer, product])
        tflops = shape.flops() / layer_s / 1e12
        cublas = 2 * _PRODUCT_WIDTH**3 / product_s / 1e12
        rows[mode] = {
            "ms": layer_s * 1e3,
            "tflops": tflops,
            "cublas_tflops": cublas,
            "share": tflops / cublas,
        }
    return rows


def burst(programs: list[Program]) -> list[float]:
    """Seconds of one computation of each program, after a pause."""
    return [_seconds_per_call([program], _BURST_S, _PAUSE_S)[0] for program in programs]


def sustained(programs: list[Program]) -> list[float]:
    """Seconds of one computation of each program, run in turn without pauses."""
    return _seconds_per_call(programs, _SUSTAINED_S, 0.0)


def _seconds_per_call(programs: list[Program], longer_s: float, pause_s: float) -> list[float]:
    counts = [max(2, round(longer_s / program.guess_s)) for program in programs]
    samples: list[list[float]] = [[] for _ in programs]
    for turn in range(_ROUNDS.value + 2):
        for program, count, sample in zip(programs, counts, samples, strict=True):
            # A third of the calls, so that the shorter program runs in the same state of the chip.
            fewer = max(1, count // 3)
            seconds = {}
            for calls in (fewer, count):
                time.sleep(pause_s)
                start = time.perf_counter()
                jax.block_until_ready(program.run(program.operands, calls))
                seconds[calls] = time.perf_counter() - start
            if turn >= 2:
                sample.append((seconds[count] - seconds[fewer]) / (count - fewer))
    return [statistics.median(sample) for sample in samples]


def layer_program(shape: Shape, mesh: Mesh) -> Program:
    """The layer, one call after the other, with routes of its own in each of eight."""
    gpus = mesh.size
    experts = max(1, shape.experts * gpus // 2)
    sharded = NamedSharding(mesh, P("ep"))

    @functools.partial(jax.jit, static_argnums=(0, 1), out_shardings=sharded)
    def normal(seed: int, sizes: tuple[int, ...]) -> jax.Array:
        scale = sizes[-2] ** -0.5
        return scale * jax.random.normal(jax.random.key(seed), sizes, jnp.bfloat16)

    x = normal(0, (gpus * shape.tokens, shape.hidden)) * shape.tokens**0.5
    weights = (
        normal(1, (experts, shape.hidden, shape.inner)),
        normal(2, (experts, shape.hidden, shape.inner)),
        normal(3, (experts, shape.inner, shape.hidden)),
    )
    generator = np.random.default_rng(0)
    routes = np.stack([draw_routes(generator, x.shape[0], experts, shape.top_k) for _ in range(8)])
    ids = jax.device_put(routes, NamedSharding(mesh, P(None, "ep")))
    router_weights = jax.device_put(np.ones(routes.shape[1:], np.float32), sharded)
    layer = functools.partial(moe, mesh=mesh, axis_name="ep", config=MoEConfig(timeout_s=20.0))

    @functools.partial(jax.jit, static_argnums=1)
    def run(operands: Any, calls: int) -> jax.Array:
        x, ids, router_weights, weights = operands
        y, after_last_call = x, jnp.int32(0)
        for call in range(calls):
            y = layer(x, ids[call % len(ids)] + after_last_call, router_weights, *weights)
            after_last_call = (0 * y[0, 0]).astype(jnp.int32)
        return y

    guess_s = shape.flops() / 4e14 + 3e-4
    return Program(run, (x, ids, router_weights, weights), guess_s)


def product_program(mesh: Mesh) -> Program:
    """An 8192³ product of random bf16 matrices on every GPU at once."""
    width = _PRODUCT_WIDTH
    sharded = NamedSharding(mesh, P("ep"))
    sizes = (mesh.size, width, width)
    operands = [
        jax.jit(
            lambda key: jax.random.normal(key, sizes, jnp.bfloat16) / width**0.5,
            out_shardings=sharded,
        )(jax.random.key(seed))
        for seed in range(2)
    ]

    @functools.partial(jax.jit, static_argnums=1)
    def run(operands: Any, calls: int) -> jax.Array:
        def body(a: jax.Array, b: jax.Array) -> jax.Array:
            product = a[0]
            for _ in range(calls):
                product = product @ b[0]
            return product[None]

        return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(*operands)

    return Program(run, operands, 2 * width**3 / 7e14)


def draw_routes(
    generator: np.random.Generator, tokens: int, experts: int, top_k: int
) -> np.ndarray:
    """int32 [tokens, top_k]: distinct experts per token, by --routes."""
    if _ROUTES.value == "balanced":
        first = np.arange(tokens) * top_k % experts
        columns = (first[:, None] + np.arange(top_k)) % experts
        return generator.permutation(experts)[columns].astype(np.int32)
    scores = generator.gumbel(size=(tokens, experts))
    if _ROUTES.value == "zipf":
        scores -= _ZIPF_EXPONENT * np.log(1 + generator.permutation(experts))
    return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32)
