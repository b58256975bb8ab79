"""The experts' products over one wave of rows, tile by tile.

A tile is 64 rows of one expert. Every product has a tile's shape whatever the load, the ring and
the number of ranks, so the bits of a row depend on nothing but the row and the expert's weights.
Products accumulate in f32. What they are made of, as given or in MXFP8, is `precision`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_mok import precision
from jax_mok.activation import store, swiglu, swiglu_gradient
from jax_mok.call import Call
from jax_mok.config import TILE_ROWS
from jax_mok.plan import Plan
from jax_mok.precision import Weight, Weights


class BackwardRows(NamedTuple):
    """Per row of the ring: value [·, H] and router weight [·, 1].

    On the way in `value` is x; on the way out it is the gradient of x, and likewise for the weight.
    """

    value: jax.Array
    router_weight: jax.Array


def saved_tiles(call: Call) -> int:
    """Tiles whose pre-activations are kept."""
    return call.layout.saved_rows // TILE_ROWS


def pre_activations_type(call: Call, dtype: jnp.dtype, inner: int) -> jax.ShapeDtypeStruct:
    """[saved tiles + 1, 2, 64, I] gate and up; later tiles are written to the spare last entry."""
    return jax.ShapeDtypeStruct((saved_tiles(call) + 1, 2, TILE_ROWS, inner), dtype)


def forward(
    call: Call,
    rows: jax.Array,
    weights: Weights[Weight],
    plan: Plan,
    wave: jax.Array,
    pre_activations: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """down(silu(gate) ⊙ up) for each row of a wave.

    Args:
      call: the call.
      rows: [ring_rows, H] dispatched tokens, as products take them.
      weights: this rank's experts.
      plan: this rank's plan.
      wave: int32 scalar.
      pre_activations: zeros of `pre_activations_type` if they are to be kept.

    Returns:
      [ring_rows, H] outputs, and the pre-activations with those of this wave filled in.
    """

    def run_tile(
        tile: jax.Array, expert: Weights[jax.Array], carry: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        rows, kept = carry
        x = _tile_rows(call, rows, tile)
        pre_activations = _pre_activations(call, x, expert)
        if kept is not None:
            kept = kept.at[jnp.minimum(tile, saved_tiles(call))].set(pre_activations)
        hidden = precision.activation(call, swiglu(pre_activations, call.config.clamp))
        y = _product(hidden.astype(x.dtype), expert.down).astype(x.dtype)
        return _set_tile_rows(call, rows, tile, y), kept

    def run_expert(
        run: _ExpertRun, carry: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        expert = run.select(weights, _for_forward(call, rows.dtype))
        return _loop(run.tiles, lambda tile, carry: run_tile(tile, expert, carry), carry)

    return _for_each_expert(call, plan, wave, run_expert, (rows, pre_activations))


def backward(
    call: Call,
    rows: BackwardRows,
    dy: jax.Array,
    weights: Weights[Weight],
    weight_gradients: Weights[jax.Array],
    plan: Plan,
    wave: jax.Array,
    pre_activations: jax.Array,
) -> tuple[BackwardRows, Weights[jax.Array]]:
    """Gradients of one wave of rows, and their share of the weights' gradients.

    Args:
      call: the call.
      rows: dispatched x, as products take it, and router weights.
      dy: [ring_rows, H] the output gradient of each row's token, not yet weighted; as x.
      weights: this rank's experts.
      weight_gradients: f32 sums of the earlier waves.
      plan: this rank's plan.
      wave: int32 scalar.
      pre_activations: kept by `forward` for the first `saved_rows` rows.

    Returns:
      The gradients of the rows, and the sums with this wave added, row tiles in ascending order.
    """

    def run_tile(
        tile: jax.Array,
        expert: Weights[jax.Array],
        replayed: Weights[jax.Array],
        carry: tuple[BackwardRows, Weights[jax.Array]],
    ) -> tuple[BackwardRows, Weights[jax.Array]]:
        rows, sums = carry
        x = _tile_rows(call, rows.value, tile)
        router_weight = _tile_rows(call, rows.router_weight, tile)
        dy_tile = _tile_rows(call, dy, tile)

        clamp = call.config.clamp
        stored = lax.cond(
            tile < saved_tiles(call),
            lambda: pre_activations[jnp.minimum(tile, saved_tiles(call))],
            lambda: _pre_activations(call, x, replayed),
        )
        hidden = precision.activation(call, swiglu(stored, clamp))
        d_hidden = _product(dy_tile, expert.down, contract=(1, 1))
        d_router_weight = jnp.sum(hidden * d_hidden, axis=1, keepdims=True)
        d_gate, d_up = swiglu_gradient(stored, router_weight * d_hidden, clamp)
        d_gate = precision.activation(call, d_gate).astype(x.dtype)
        d_up = precision.activation(call, d_up).astype(x.dtype)
        dx = _product(d_gate, expert.gate, contract=(1, 1)) + _product(
            d_up, expert.up, contract=(1, 1)
        )
        weighted_hidden = (router_weight * hidden).astype(x.dtype)
        sums = Weights(
            gate=sums.gate + _product(x, d_gate, contract=(0, 0)),
            up=sums.up + _product(x, d_up, contract=(0, 0)),
            down=sums.down + _product(weighted_hidden, dy_tile, contract=(0, 0)),
        )
        rows = BackwardRows(
            _set_tile_rows(call, rows.value, tile, dx.astype(x.dtype)),
            _set_tile_rows(call, rows.router_weight, tile, d_router_weight),
        )
        return rows, sums

    def run_expert(
        run: _ExpertRun, carry: tuple[BackwardRows, Weights[jax.Array]]
    ) -> tuple[BackwardRows, Weights[jax.Array]]:
        rows, gradients = carry
        expert = replayed = run.select(weights, _for_backward(call, dy.dtype))
        if call.config.precision == "mxfp8":
            replayed = lax.cond(
                run.tiles[1] > saved_tiles(call),
                lambda: run.select(weights, _for_forward(call, dy.dtype)),
                lambda: expert,  # no tile of the run is replayed
            )
        rows, sums = _loop(
            run.tiles,
            lambda tile, carry: run_tile(tile, expert, replayed, carry),
            (rows, run.select(gradients, lambda matrix: matrix)),
        )
        gradients = jax.tree.map(lambda all_, one: all_.at[run.expert].set(one), gradients, sums)
        return rows, gradients

    return _for_each_expert(call, plan, wave, run_expert, (rows, weight_gradients))


_Carry = TypeVar("_Carry")
_Of = TypeVar("_Of")


class _ExpertRun(NamedTuple):
    """The tiles of one expert in one wave: tiles[0] up to, not including, tiles[1]."""

    expert: jax.Array
    tiles: tuple[jax.Array, jax.Array]

    def select(
        self, weights: Weights[_Of], convert: Callable[[_Of], jax.Array]
    ) -> Weights[jax.Array]:
        experts = jax.tree.map(lambda array: array[self.expert], weights)
        return Weights(*map(convert, experts))


def _for_forward(call: Call, dtype: jnp.dtype) -> Callable[[Weight], jax.Array]:
    return lambda matrix: precision.for_forward(call, matrix, dtype)


def _for_backward(call: Call, dtype: jnp.dtype) -> Callable[[Weight], jax.Array]:
    return lambda matrix: precision.for_backward(call, matrix, dtype)


def _for_each_expert(
    call: Call,
    plan: Plan,
    wave: jax.Array,
    run_expert: Callable[[_ExpertRun, _Carry], _Carry],
    carry: _Carry,
) -> _Carry:
    """Runs the experts that have tiles in the wave, each once, so its weights are read once."""
    ring_tiles = call.layout.ring_rows // TILE_ROWS
    first = wave * ring_tiles
    last = jnp.minimum(first + ring_tiles, plan.tiles)

    def body(state: tuple[jax.Array, _Carry]) -> tuple[jax.Array, _Carry]:
        tile, carry = state
        expert = plan.tile_expert[tile]
        end = jnp.minimum(plan.expert_tile[expert + 1], last)
        return end, run_expert(_ExpertRun(expert, (tile, end)), carry)

    return lax.while_loop(lambda state: state[0] < last, body, (first, carry))[1]


def _loop(
    tiles: tuple[jax.Array, jax.Array],
    run_tile: Callable[[jax.Array, _Carry], _Carry],
    carry: _Carry,
) -> _Carry:
    first, last = tiles
    return lax.while_loop(
        lambda state: state[0] < last,
        lambda state: (state[0] + 1, run_tile(*state)),
        (first, carry),
    )[1]


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """f32 product of two matrices over the given axis of each."""
    axes = (((contract[0],), (contract[1],)), ((), ()))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)

    def product_alone(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.optimization_barrier(product(*lax.optimization_barrier((a, b))))

    # XLA tunes products on GPUs together with what it fuses into them, slices of arrays whose sizes
    # depend on the number of ranks among it; alone they are the same kernels for any number.
    return lax.platform_dependent(a, b, cuda=product_alone, default=product)


def _pre_activations(call: Call, x: jax.Array, expert: Weights[jax.Array]) -> jax.Array:
    """[2, 64, I] gate and up of a tile."""
    gate, up = _product(x, expert.gate), _product(x, expert.up)
    return store(gate, up, x.dtype, call.config.clamp)


def _ring_row(call: Call, tile: jax.Array) -> jax.Array:
    return tile * TILE_ROWS % call.layout.ring_rows


def _tile_rows(call: Call, rows: jax.Array, tile: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(rows, _ring_row(call, tile), TILE_ROWS)


def _set_tile_rows(call: Call, rows: jax.Array, tile: jax.Array, values: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(rows, values, _ring_row(call, tile), 0)
