"""Which tiles of Pallas-Mosaic's grouped product are fastest for a shape."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax_mok.bench.chains import Chain, Operands, Queue, compile_side_by_side
from jax_mok.bench.peer_layers import grouped
from jax_mok.bench.peer_layers.grouped import Tiles
from jax_mok.bench.session import Session
from jax_mok.bench.shapes import Shape

_ROUNDS = 5  # the best is looked for, its time is not reported


def candidates(shape: Shape) -> list[Tiles]:
    """Tiles that divide the widths of all products, of the gradients' too."""
    fit = [
        tiles
        for tiles in grouped.TILES
        if not any(
            width % block
            for width in (shape.hidden, shape.inner)
            for block in (tiles.block_m, tiles.block_n)
        )
    ]
    return fit[:-1] or fit  # the smallest are for widths that no others fit


def best_tiles(session: Session, name: str, shape: Shape, operands: Operands) -> Tiles:
    """Those with which the forward pass of the experts of one device is fastest, without the rest
    of a layer, for the balanced load."""
    local = shape.experts_of(1)
    x, *weights = (operands[i].addressable_shards[0].data for i in (0, 3, 4, 5))
    rows = jnp.tile(x, (shape.top_k, 1))
    sizes = jnp.full((local,), len(rows) // local, jnp.int32)
    arrays = rows, grouped.Experts(*weights), sizes
    guess_s = shape.flops() / session.scale.flops_per_s
    programs = {
        tiles: Queue(
            functools.partial(grouped.apply_experts, grouped.mosaic_product(tiles)), [arrays]
        )
        for tiles in candidates(shape)
    }
    session.say(f"{name}: compiles the experts with {len(programs)} tiles")
    compile_side_by_side(programs.values())
    session.say(f"{name}: times them")
    watch = session.stopwatch(f"{name}, tiles", 1, rounds=_ROUNDS, warm_up=1)
    seconds = watch.burst({str(tiles): Chain(run, guess_s) for tiles, run in programs.items()})
    return min(programs, key=lambda tiles: seconds[str(tiles)].median)
