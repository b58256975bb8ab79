"""Which tiles of Pallas-Mosaic's grouped product are fastest for a shape."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_mok.bench.chains import Chain, Operands
from jax_mok.bench.peer_layers import grouped
from jax_mok.bench.peer_layers.grouped import Tiles
from jax_mok.bench.session import Session
from jax_mok.bench.shapes import Shape


def best_tiles(session: Session, name: str, shape: Shape, operands: Operands) -> Tiles:
    """Those with which the experts alone are fastest, for the balanced load."""
    local = shape.experts_of(1)
    x, *weights = (operands[i].addressable_shards[0].data for i in (0, 3, 4, 5))
    rows = jnp.tile(x, (shape.top_k, 1))
    sizes = jnp.full((local,), len(rows) // local, jnp.int32)
    experts = grouped.Experts(*weights)
    guess_s = shape.flops() / session.scale.flops_per_s
    chains_of = {
        tiles: Chain(functools.partial(_repeat_experts, tiles, rows, experts, sizes), guess_s)
        for tiles in grouped.TILES
        if not any(
            width % (tiles.block_n * tiles.grid_block_n)
            for width in (2 * shape.inner, shape.hidden)
        )
    }
    watch = session.stopwatch(f"{name}, tiles", 1)
    seconds = watch.burst({str(tiles): chain for tiles, chain in chains_of.items()})
    return min(chains_of, key=lambda tiles: seconds[str(tiles)].median)


@functools.partial(jax.jit, static_argnums=0)
def _repeat_experts(
    tiles: Tiles, rows: jax.Array, experts: grouped.Experts, sizes: jax.Array, calls: int
) -> jax.Array:
    """One program for all numbers of calls: these kernels take seconds to compile."""

    def call(_: jax.Array, rows: jax.Array) -> jax.Array:
        return grouped.apply_experts(grouped.mosaic_product(tiles), rows, experts, sizes)

    return jax.lax.fori_loop(0, calls, call, rows)
