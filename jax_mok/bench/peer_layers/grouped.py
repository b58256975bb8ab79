"""Products of rows sorted by group with a matrix of each group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(rows [M, A], matrices [E, A, B], rows of each group [E]) -> [M, B]; rows beyond are free."""


def lax_product(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """`jax.lax.ragged_dot`, on any platform."""
    return jax.lax.ragged_dot(rows, matrices, sizes)


def zeros_beyond(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """The rows of the groups, and zeros for those beyond."""
    is_there = jnp.arange(len(rows)) < jnp.sum(sizes)
    return jnp.where(is_there[:, None], rows, 0)


class Tiles(NamedTuple):
    """Options of Pallas-Mosaic's kernels for Hopper."""

    block_m: int
    block_n: int
    grid_block_n: int
    block_k: int = 64
    max_concurrent_steps: int = 4


TILES = (
    Tiles(128, 128, 1),
    Tiles(128, 128, 4),
    Tiles(128, 128, 4, max_concurrent_steps=6),
    Tiles(64, 256, 4),
    Tiles(64, 64, 1),
)
"""Those to choose from: a warpgroup's registers hold the sums of no more, and shared memory the
operands of no more. Each takes seconds to compile; the last fits all multiples of 64."""


def mosaic_product(tiles: Tiles) -> GroupedProduct:
    """`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`, and its transposes for the gradients.

    The kernels leave result rows beyond the groups as they were, and multiply such operand rows by
    zero, which does not rid them of NaN: hence zeros there before and after.
    """
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    options = tiles._asdict()

    @jax.custom_vjp
    def product(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        result = ragged_dot_mgpu.ragged_dot(rows, matrices, group_sizes=sizes, **options)
        return zeros_beyond(result, sizes)

    def forward(
        rows: jax.Array, matrices: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        return product(rows, matrices, sizes), (rows, matrices, sizes)

    def backward(
        kept: tuple[jax.Array, jax.Array, jax.Array], d_result: jax.Array
    ) -> tuple[jax.Array, jax.Array, None]:
        rows, matrices, sizes = kept
        rows, d_result = zeros_beyond(rows, sizes), zeros_beyond(d_result, sizes)
        d_rows = ragged_dot_mgpu.ragged_dot(
            d_result, matrices, group_sizes=sizes, transpose_rhs=True, **options
        )
        d_matrices = transposed_ragged_dot_mgpu.transposed_ragged_dot(
            rows, d_result, group_sizes=sizes, **options
        )
        return zeros_beyond(d_rows, sizes), d_matrices, None

    product.defvjp(forward, backward)
    return product


class Experts(NamedTuple):
    """Weights of this device's experts: gate and up [E/n, H, I], down [E/n, I, H]."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


def apply_experts(
    product: GroupedProduct, rows: jax.Array, experts: Experts, sizes: jax.Array
) -> jax.Array:
    """SwiGLU experts on rows sorted by expert, zeros for the rows beyond; gate and up at once."""
    both = product(rows, jnp.concatenate([experts.gate, experts.up], axis=2), sizes)
    gate, up = jnp.split(both, 2, axis=1)
    output = product(jax.nn.silu(gate) * up, experts.down, sizes)
    return zeros_beyond(output, sizes)


Layer = Callable[..., jax.Array]
"""(x [T, H], ids [T, K], router_weights [T, K], gate, up, down, *, axis_name) -> y [T, H]."""


def weighted_sum(outputs: jax.Array, router_weights: jax.Array) -> jax.Array:
    """[T, K, H] and [T, K] -> [T, H], summed in f32."""
    weighted = outputs.astype(jnp.float32) * router_weights[..., None]
    return jnp.sum(weighted, axis=1).astype(outputs.dtype)


def counts_of(ids: jax.Array, length: int) -> jax.Array:
    """How often each of so many numbers is there, int32."""
    return jnp.bincount(ids.reshape(-1), length=length).astype(jnp.int32)


def with_product(layer: Callable[..., jax.Array], product: GroupedProduct) -> Layer:
    """The layer with that product."""
    return functools.partial(layer, product)
