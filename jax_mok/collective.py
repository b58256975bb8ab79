"""Moves of rows through XLA's own collectives, for ranks that share no memory.

Every rank's array travels once around the ring of ranks, and each rank takes the rows it needs as
they pass. Slower than `composed`, but of bounded memory, and the rows are the same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_mok.call import Call
from jax_mok.plan import Plan
from jax_mok.sharding import vary


def dispatch(call: Call, values: jax.Array, plan: Plan, wave: jax.Array) -> jax.Array:
    """As `composed.dispatch`; every row is pulled."""
    layout = call.layout
    rows = wave * layout.ring_rows + jnp.arange(layout.ring_rows, dtype=jnp.int32)
    source = plan.row_source.at[rows].get(mode="fill", fill_value=-1)
    choices_a_row = layout.choices // values.shape[0]
    return _take_as_they_pass(
        call,
        values,
        ranks=jnp.where(source < 0, -1, source // layout.choices),
        rows=source % layout.choices // choices_a_row,
        initial=jnp.zeros((layout.ring_rows, values.shape[1]), values.dtype),
    )


def combine(
    call: Call,
    ring: jax.Array,
    slots: jax.Array,
    plan: Plan,
    wave: jax.Array,
) -> jax.Array:
    """As `composed.combine`; every row is pulled."""
    layout = call.layout
    slot_rank, slot_row = plan.slot_rank.reshape(-1), plan.slot_row.reshape(-1)
    in_wave = slot_row // layout.ring_rows == wave
    return _take_as_they_pass(
        call,
        ring,
        ranks=jnp.where(in_wave, slot_rank, -1),
        rows=slot_row % layout.ring_rows,
        initial=slots,
    )


def _take_as_they_pass(
    call: Call,
    values: jax.Array,
    *,
    ranks: jax.Array,
    rows: jax.Array,
    initial: jax.Array,
) -> jax.Array:
    """[M, W]: values[rows[m]] of rank ranks[m], or initial[m] where ranks[m] is -1."""
    axis_name, size = call.position.axis_name, call.layout.ranks
    own_rank = jax.lax.axis_index(axis_name)
    to_left = [(rank, (rank - 1) % size) for rank in range(size)]

    def visit(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        passing, taken = carry
        here = ranks == (own_rank + step) % size
        taken = jnp.where(here[:, None], passing[rows], taken)
        return jax.lax.ppermute(passing, axis_name, to_left), taken

    start = (vary(values, call.axes), vary(initial, call.axes))
    return jax.lax.fori_loop(0, size, visit, start)[1]
