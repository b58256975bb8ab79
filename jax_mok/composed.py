"""Moves of rows through memory that the ranks share, by custom calls at which the ranks meet."""

from __future__ import annotations

import jax
import numpy as np

from jax_mok import ffi
from jax_mok.call import Call, Operation
from jax_mok.config import TILE_ROWS, Direction
from jax_mok.plan import Plan


def dispatch(
    call: Call,
    operation: Operation,
    values: jax.Array,
    plan: Plan,
    wave: jax.Array,
    place: jax.Array,
) -> jax.Array:
    """Brings home ranks' rows into the experts' rings.

    Args:
      call: the call.
      operation: DISPATCH or REVERSE_COMBINE.
      values: [T, W] one row a token, or [T·K, W] one row a choice.
      plan: this rank's plan.
      wave: int32 scalar.
      place: from `Position.place`.

    Returns:
      [ring_rows, W]; padding rows of tiles are zero, rows past the last tile are undefined.
    """
    result = jax.ShapeDtypeStruct((call.layout.ring_rows, values.shape[1]), values.dtype)
    operands = (values, *_tables(plan), wave, place)
    attributes = _attributes(call, operation)
    return ffi.call("jax_mok_dispatch", [result], operands, attributes, call.axes)[0]


def combine(
    call: Call,
    operation: Operation,
    ring: jax.Array,
    slots: jax.Array,
    plan: Plan,
    wave: jax.Array,
    place: jax.Array,
) -> jax.Array:
    """Brings the rows of the experts' rings into their home slots.

    Args:
      call: the call.
      operation: COMBINE or REVERSE_DISPATCH.
      ring: [ring_rows, W].
      slots: [T·K, W] the home slots, filled by earlier waves.
      plan: this rank's plan.
      wave: int32 scalar.
      place: from `Position.place`.

    Returns:
      [T·K, W] slots with those of this wave filled.
    """
    result = jax.ShapeDtypeStruct(slots.shape, slots.dtype)
    operands = (ring, slots, *_tables(plan), wave, place)
    attributes = _attributes(call, operation)
    return ffi.call("jax_mok_combine", [result], operands, attributes, call.axes, {1: 0})[0]


def _tables(plan: Plan) -> tuple[jax.Array, ...]:
    return plan.row_source, plan.pull_order, plan.slot_rank, plan.slot_row, plan.counts


def _attributes(call: Call, operation: Operation) -> dict[str, np.generic]:
    layout = call.layout
    direction: Direction = getattr(call.config, operation.name.lower())
    return {
        "operation": np.int32(operation),
        "push": np.bool_(direction == "push"),
        "ranks": np.int32(layout.ranks),
        "choices": np.int64(layout.choices),
        "tile_rows": np.int32(TILE_ROWS),
        "ring_rows": np.int64(layout.ring_rows),
        "chunk_rows": np.int64(layout.chunk_rows),
        "timeout_s": np.float64(call.config.timeout_s),
    }
