"""Rows go to their experts' ranks and back, by all-to-all of ragged or padded pieces."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_mok.bench.peer_layers.grouped import (
    Experts,
    GroupedProduct,
    apply_experts,
    counts_of,
    weighted_sum,
)


class Exchange(NamedTuple):
    """How rows sorted by destination travel.

    Attributes:
      axis_name: the mesh axis.
      counts: int32 [n, n], rows from rank to rank.
      received_rows: room for what a rank receives.
      pair_rows: room for what goes from one rank to another if pieces are padded; None: they are
        ragged.
    """

    axis_name: str
    counts: jax.Array
    received_rows: int
    pair_rows: int | None

    def there(self, rows: jax.Array) -> jax.Array:
        """[·, H] sorted by destination -> [received_rows, H] sorted by source."""
        return self._move(rows, self.counts, self.received_rows)

    def back(self, rows: jax.Array, own_rows: int) -> jax.Array:
        """What `there` has brought, to where it was: [own_rows, H]."""
        return self._move(rows, self.counts.T, own_rows)

    def _move(self, rows: jax.Array, counts: jax.Array, room: int) -> jax.Array:
        me = jax.lax.axis_index(self.axis_name)
        sent, received = counts[me], counts[:, me]
        first_sent, first_received = (jnp.cumsum(a) - a for a in (sent, received))
        if self.pair_rows is None:
            # Where this rank's piece begins at each receiver.
            first_there = (jnp.cumsum(counts, axis=0) - counts)[me]
            result = jnp.zeros((room, rows.shape[1]), rows.dtype)
            return jax.lax.ragged_all_to_all(
                rows, result, first_sent, sent, first_there, received, axis_name=self.axis_name
            )
        piece = jnp.arange(self.pair_rows)
        padded = rows.at[first_sent[:, None] + piece].get(mode="fill", fill_value=0)
        pieces = jax.lax.all_to_all(padded, self.axis_name, 0, 0)
        place = jnp.where(piece < received[:, None], first_received[:, None] + piece, room)
        result = jnp.zeros((room, rows.shape[1]), rows.dtype)
        return result.at[place].set(pieces, mode="drop")


def exchanged_layer(
    product: GroupedProduct,
    x: jax.Array,
    ids: jax.Array,
    router_weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    axis_name: str,
    received_rows: int,
    pair_rows: int | None = None,
) -> jax.Array:
    """As `jax_mok.moe_ffn`, for loads that fit the room; see `Exchange`."""
    ranks, local = jax.lax.axis_size(axis_name), gate.shape[0]
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # by expert, so by rank too
    sent = counts_of(flat, ranks * local)
    by_expert = jax.lax.all_gather(sent, axis_name).reshape(ranks, ranks, local)
    exchange = Exchange(axis_name, by_expert.sum(2), received_rows, pair_rows)
    rows = exchange.there(x[order // top_k])

    # What has come is sorted by source, then by expert.
    own = by_expert[:, jax.lax.axis_index(axis_name)]
    expert = jnp.repeat(
        jnp.tile(jnp.arange(local), ranks), own.reshape(-1), total_repeat_length=received_rows
    )
    expert = jnp.where(jnp.arange(received_rows) < own.sum(), expert, local)
    by_group = jnp.argsort(expert, stable=True)
    outputs = apply_experts(product, rows[by_group], Experts(gate, up, down), own.sum(0))
    home = exchange.back(outputs[jnp.argsort(by_group)], tokens * top_k)
    outputs = home[jnp.argsort(order)].reshape(tokens, top_k, -1)
    return weighted_sum(outputs, router_weights)
