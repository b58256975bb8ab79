"""Checksums of the layer's results for one batch on 1, 2, 3, ... devices: they are to be equal.

Forward and backward, y and the gradients of x, of the router weights and of all three matrices of
every expert. One process takes all devices, and those numbers of them in turn that there are; or
--processes of them take one each, all at once, each started with its own --process.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.bench.checksums import checksums, difference
from jax_mok.bench.routes import draw_routes
from jax_mok.bench.shapes import Shape
from jax_mok.config import MoEConfig
from jax_mok.faults import check
from jax_mok.moe import moe

_PLATFORM = flags.DEFINE_enum("platform", "cuda", ["cuda", "cpu"], "cpu: at toy size")
_PROCESSES = flags.DEFINE_integer("processes", 1, "that take part, a device each", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process", 0, "which of them this is", lower_bound=0)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "127.0.0.1:9731", "with --processes: address and free port of the first"
)
_JSON = flags.DEFINE_string("json", None, "also write the checksums to this file")

_COUNTS = (1, 2, 3, 4, 6, 8)
_AXIS = "ep"
# All of _COUNTS divide tokens and experts, which are those of all devices here.
_SHAPES = {
    "cuda": Shape(tokens=12288, hidden=2048, inner=768, experts=48, top_k=8),
    "cpu": Shape(tokens=48, hidden=64, inner=64, experts=24, top_k=3),
}
_CALLS = 3  # from the second on XLA replays them without the host


class _Batch(NamedTuple):
    """On the host, the same in every process; or on the devices."""

    x: Any
    ids: Any
    router: Any
    gate: Any
    up: Any
    down: Any
    dy: Any


def main(argv: Sequence[str]) -> None:
    """Prints them, and fails if they differ."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    if _PROCESS.value >= _PROCESSES.value:
        raise app.UsageError(
            f"--process={_PROCESS.value}: {_PROCESSES.value} processes have numbers from 0"
        )
    on_gpus = _PLATFORM.value == "cuda"
    if not on_gpus:
        jax.config.update("jax_platforms", "cpu")
    if _PROCESSES.value > 1:
        jax.distributed.initialize(
            _COORDINATOR.value,
            num_processes=_PROCESSES.value,
            process_id=_PROCESS.value,
            local_device_ids=[_PROCESS.value] if on_gpus else None,
        )
    devices = jax.devices(_PLATFORM.value)
    counts = [count for count in _COUNTS if count <= len(devices)]
    if _PROCESSES.value > 1:
        counts = [len(devices)]
    batch = _draw(_SHAPES[_PLATFORM.value])
    rows = []
    for count in counts:
        sums = _checksums(batch, Mesh(np.array(devices[:count]), (_AXIS,)))
        check()
        row = {"devices": count, "processes": _PROCESSES.value, "sums": sums}
        rows.append(row)
        if _PROCESS.value == 0:
            print(f"{count} devices, {_PROCESSES.value} processes:", *sums.values(), flush=True)
    if _JSON.value and _PROCESS.value == 0:
        Path(_JSON.value).write_text(json.dumps({"rows": rows}, indent=1))
    if problem := difference(rows):
        sys.exit(problem)


def _draw(shape: Shape) -> _Batch:
    rng = np.random.default_rng(0)

    def normal(*sizes: int, fan_in: int = 1) -> np.ndarray:
        values = rng.standard_normal(sizes, np.float32) / np.float32(fan_in**0.5)
        return values.astype(jnp.bfloat16)

    matrices = (shape.experts, shape.hidden, shape.inner)
    return _Batch(
        x=normal(shape.tokens, shape.hidden),
        ids=draw_routes("zipf", rng, shape.tokens, shape.experts, shape.top_k),
        router=rng.uniform(0.1, 1.0, (shape.tokens, shape.top_k)).astype(np.float32),
        gate=normal(*matrices, fan_in=shape.hidden),
        up=normal(*matrices, fan_in=shape.hidden),
        down=normal(shape.experts, shape.inner, shape.hidden, fan_in=shape.inner),
        dy=normal(shape.tokens, shape.hidden),
    )


@functools.partial(jax.jit, static_argnums=0)
def _step(mesh: Mesh, batch: _Batch) -> tuple[jax.Array, ...]:
    x, ids, router, *experts, dy = batch

    def layer(x: jax.Array, router: jax.Array, *experts: jax.Array) -> jax.Array:
        config = MoEConfig(timeout_s=20.0)
        return moe(x, ids, router, *experts, mesh=mesh, axis_name=_AXIS, config=config)

    y, pullback = jax.vjp(layer, x, router, *experts)
    return y, *pullback(dy)


def _checksums(batch: _Batch, mesh: Mesh) -> dict[str, str]:
    """Of the last of some calls."""
    split = NamedSharding(mesh, P(_AXIS))
    # Each process takes what its devices hold; `device_put` would compare all of it between them.
    placed = _Batch(
        *(jax.make_array_from_callback(array.shape, split, array.__getitem__) for array in batch)
    )
    for _ in range(_CALLS):
        results = jax.block_until_ready(_step(mesh, placed))
    if jax.process_count() > 1:
        results = multihost_utils.process_allgather(results, tiled=True)
    return checksums(map(np.asarray, results))
