"""Forward and backward of the layer as waves of dispatch, expert products and combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_mok import collective, composed, experts, ffi, precision
from jax_mok.call import Call, Operation
from jax_mok.config import TILE_ROWS
from jax_mok.plan import Plan
from jax_mok.precision import Weight, Weights
from jax_mok.sharding import vary


class Routed(NamedTuple):
    """A call's plan, and where this device stands.

    Attributes:
      plan: this rank's plan.
      place: from `Position.place`.
    """

    plan: Plan
    place: jax.Array


class Gradients(NamedTuple):
    """Gradients of x [T, H], the router weights [T, K] and, in f32, the experts' weights."""

    x: jax.Array
    router_weights: jax.Array
    weights: Weights[jax.Array]


def forward(
    call: Call,
    routed: Routed,
    x: jax.Array,
    router_weights: jax.Array,
    weights: Weights[Weight],
    *,
    keep_pre_activations: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """y [T, H], and the pre-activations of the first `saved_rows` rows if they are to be kept."""
    pre_activations = None
    if keep_pre_activations:
        kept = experts.pre_activations_type(call, x.dtype, weights.gate.shape[-1])
        pre_activations = vary(jnp.zeros(kept.shape, kept.dtype), call.axes)
    slots = vary(jnp.zeros((call.layout.choices, x.shape[1]), x.dtype), call.axes)
    tokens = precision.to_move(call, x)

    def run_wave(
        wave: jax.Array, carry: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        slots, kept = carry
        rows = _dispatch(call, Operation.DISPATCH, tokens, routed, wave)
        rows = precision.moved(call, rows, x.dtype)
        rows, kept = experts.forward(call, rows, weights, routed.plan, wave, kept)
        return _combine(call, Operation.COMBINE, rows, slots, routed, wave), kept

    slots, pre_activations = _for_each_wave(call, routed, run_wave, (slots, pre_activations))
    return _weighted_sum(call, slots, router_weights, routed), pre_activations


def backward(
    call: Call,
    routed: Routed,
    x: jax.Array,
    router_weights: jax.Array,
    weights: Weights[Weight],
    pre_activations: jax.Array,
    dy: jax.Array,
) -> Gradients:
    """Gradients of everything for the output gradient dy [T, H]; the arguments of `forward`."""
    choices = call.layout.choices
    dx_slots = vary(jnp.zeros((choices, x.shape[1]), x.dtype), call.axes)
    dw_slots = vary(jnp.zeros((choices, 1), jnp.float32), call.axes)
    sums = Weights(*(vary(jnp.zeros(w.shape, jnp.float32), call.axes) for w in weights))
    tokens, gradients = precision.to_move(call, x), precision.to_move(call, dy)

    def run_wave(
        wave: jax.Array, carry: tuple[jax.Array, jax.Array, Weights[jax.Array]]
    ) -> tuple[jax.Array, jax.Array, Weights[jax.Array]]:
        dx_slots, dw_slots, sums = carry
        x_rows = _dispatch(call, Operation.DISPATCH, tokens, routed, wave)
        rows = experts.BackwardRows(
            precision.moved(call, x_rows, x.dtype),
            _dispatch(
                call, Operation.REVERSE_COMBINE, router_weights.reshape(choices, 1), routed, wave
            ),
        )
        dy_rows = _dispatch(call, Operation.REVERSE_COMBINE, gradients, routed, wave)
        dy_rows = precision.moved(call, dy_rows, x.dtype)
        rows, sums = experts.backward(
            call, rows, dy_rows, weights, sums, routed.plan, wave, pre_activations
        )
        back = Operation.REVERSE_DISPATCH
        dx_slots = _combine(call, back, rows.value, dx_slots, routed, wave)
        dw_slots = _combine(call, back, rows.router_weight, dw_slots, routed, wave)
        return dx_slots, dw_slots, sums

    dx_slots, dw_slots, sums = _for_each_wave(call, routed, run_wave, (dx_slots, dw_slots, sums))
    ones = vary(jnp.ones(router_weights.shape, jnp.float32), call.axes)
    dx = _weighted_sum(call, dx_slots, ones, routed)
    return Gradients(dx, dw_slots.reshape(router_weights.shape), sums)


_Carry = TypeVar("_Carry")


def _for_each_wave(
    call: Call,
    routed: Routed,
    run_wave: Callable[[jax.Array, _Carry], _Carry],
    carry: _Carry,
) -> _Carry:
    """Every rank runs the waves of the fullest one, because all of them meet in each."""
    most_tiles = routed.plan.most_tiles
    if call.position.other_axes and not call.ranks_share_memory:
        # XLA's collectives are one meeting of all groups of ranks.
        most_tiles = vary(lax.pmax(most_tiles, call.position.other_axes), call.axes)
    ring_tiles = call.layout.ring_rows // TILE_ROWS
    waves = (most_tiles + ring_tiles - 1) // ring_tiles
    first = vary(jnp.int32(0), call.axes)
    return lax.while_loop(
        lambda state: state[0] < waves,
        lambda state: (state[0] + 1, run_wave(*state)),
        (first, carry),
    )[1]


def _dispatch(
    call: Call, operation: Operation, values: jax.Array, routed: Routed, wave: jax.Array
) -> jax.Array:
    if call.ranks_share_memory:
        return composed.dispatch(call, operation, values, routed.plan, wave, routed.place)
    return collective.dispatch(call, values, routed.plan, wave)


def _combine(
    call: Call,
    operation: Operation,
    ring: jax.Array,
    slots: jax.Array,
    routed: Routed,
    wave: jax.Array,
) -> jax.Array:
    if call.ranks_share_memory:
        return composed.combine(call, operation, ring, slots, routed.plan, wave, routed.place)
    return collective.combine(call, ring, slots, routed.plan, wave)


def _weighted_sum(
    call: Call, slots: jax.Array, router_weights: jax.Array, routed: Routed
) -> jax.Array:
    """[T, H]: the home slots' rows, weighted and summed over the unmasked choices in k order."""
    result = jax.ShapeDtypeStruct((call.layout.tokens, slots.shape[1]), slots.dtype)
    operands = (slots, routed.plan.slot_rank, router_weights)
    return ffi.call("jax_mok_weighted_sum", [result], operands, {}, call.axes)[0]
