"""Which tiles of Pallas-Mosaic's grouped product are fastest for a shape."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp

from jax_mok.bench.chains import Chain, Operands, Programs, compile_side_by_side
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
    arrays = rows, grouped.Experts(*weights), sizes
    guess_s = shape.flops() / session.scale.flops_per_s
    programs = {
        tiles: Programs(_repeat_experts, arrays, (tiles,))
        for tiles in grouped.TILES
        if not any(
            width % (tiles.block_n * tiles.grid_block_n)
            for width in (2 * shape.inner, shape.hidden)
        )
    }
    watch = session.stopwatch(f"{name}, tiles", 1)
    compile_side_by_side(itertools.product(programs.values(), watch.counts(guess_s)))
    seconds = watch.burst({str(tiles): Chain(run, guess_s) for tiles, run in programs.items()})
    return min(programs, key=lambda tiles: seconds[str(tiles)].median)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _repeat_experts(
    rows: jax.Array, experts: grouped.Experts, sizes: jax.Array, tiles: Tiles, calls: int
) -> jax.Array:
    def call(_: jax.Array, rows: jax.Array) -> jax.Array:
        return grouped.apply_experts(grouped.mosaic_product(tiles), rows, experts, sizes)

    return jax.lax.fori_loop(0, calls, call, rows)
