"""The layer on CPU devices against the same FLOPs done by plain `jnp.dot`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.bench.timing import Times, time_interleaved
from jax_mok.moe import moe
from jax_mok.plan import build_plan

_TOKENS = flags.DEFINE_integer("tokens", 2048, "tokens of all ranks", lower_bound=1)
_HIDDEN = flags.DEFINE_integer("hidden", 512, "width H of a token", lower_bound=1)
_INNER = flags.DEFINE_integer("inner", 1024, "width I of an expert", lower_bound=1)
_EXPERTS = flags.DEFINE_integer("experts", 16, "experts of all ranks", lower_bound=1)
_TOP_K = flags.DEFINE_integer("top_k", 2, "experts per token", lower_bound=1)
_RANKS = flags.DEFINE_integer("ranks", 8, "forced host devices", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "activations and weights")
_ROUNDS = flags.DEFINE_integer("rounds", 30, "timed rounds", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "also write the figures to this file")


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    if _TOKENS.value % _RANKS.value or _EXPERTS.value % _RANKS.value:
        raise app.UsageError("--tokens and --experts must be multiples of --ranks")
    flag = f"--xla_force_host_platform_device_count={_RANKS.value}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    jax.config.update("jax_platforms", "cpu")
    times = measure()
    report(times)


def measure() -> dict[str, Times]:
    """Times the layer, its plan alone and the plain products, side by side."""
    tokens, hidden, inner = _TOKENS.value, _HIDDEN.value, _INNER.value
    experts, top_k, dtype = _EXPERTS.value, _TOP_K.value, jnp.dtype(_DTYPE.value)
    mesh = jax.make_mesh((_RANKS.value,), ("ep",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, P("ep"))
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        values = generator.standard_normal(shape, np.float32) / np.sqrt(shape[-2])
        return jax.device_put(jnp.asarray(values, dtype), sharded)

    x = normal(tokens, hidden)
    weights = (
        normal(experts, hidden, inner),
        normal(experts, hidden, inner),
        normal(experts, inner, hidden),
    )
    # Fresh routes every round: repeated ones would keep some experts' weights in cache.
    routes = [
        jax.device_put(_random_routes(generator, tokens, experts, top_k), sharded)
        for _ in range(_ROUNDS.value + 1)
    ]
    router_weights = jax.device_put(np.full((tokens, top_k), 1 / top_k, np.float32), sharded)
    layer = jax.jit(functools.partial(moe, mesh=mesh, axis_name="ep"))
    plan = jax.jit(
        jax.shard_map(
            functools.partial(build_plan, num_experts=experts, axis_name="ep"),
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
        )
    )
    one = jax.devices()[0]
    rows = jax.device_put(jnp.repeat(x, top_k, axis=0), one)
    matrices = [jax.device_put(weight[0], one) for weight in weights]
    return time_interleaved(
        {
            "layer": lambda turn: layer(x, routes[turn], router_weights, *weights),
            "plan alone": lambda turn: plan(routes[turn]),
            "jnp.dot": lambda _: _plain_products(rows, *matrices),
        },
        _ROUNDS.value,
    )


def report(times: dict[str, Times]) -> None:
    """Prints the figures, and writes them to --json."""
    products, layer, plan = times["jnp.dot"], times["layer"], times["plan alone"]
    flops = 6 * _TOKENS.value * _TOP_K.value * _HIDDEN.value * _INNER.value
    print(
        f"T={_TOKENS.value} H={_HIDDEN.value} I={_INNER.value} E={_EXPERTS.value} "
        f"K={_TOP_K.value}, {_RANKS.value} ranks, {_DTYPE.value}, {flops / 1e9:.2f} GFLOP, "
        f"{os.cpu_count()} cores; median (quartiles) of {_ROUNDS.value} rounds"
    )
    for name, each in times.items():
        print(
            f"{name:>12}  {each.median * 1e3:8.2f} ms  "
            f"({each.low * 1e3:.2f} .. {each.high * 1e3:.2f})"
        )
    figures: dict[str, Any] = {
        "layer_over_dot": layer.median / products.median,
        "plan_share": plan.median / layer.median,
    }
    print(f"layer / jnp.dot = {figures['layer_over_dot']:.2f}")
    print(f"plan / layer    = {figures['plan_share']:.2%}")
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(figures | {name: each._asdict() for name, each in times.items()}, file)


def _random_routes(
    generator: np.random.Generator, tokens: int, experts: int, top_k: int
) -> np.ndarray:
    scores = generator.random((tokens, experts))
    return np.argsort(scores, axis=1)[:, :top_k].astype(np.int32)


@jax.jit
def _plain_products(
    rows: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    """The layer's FLOPs on all rows with one expert's matrices."""
    return jnp.dot(jax.nn.silu(jnp.dot(rows, w_gate)) * jnp.dot(rows, w_up), w_down)
