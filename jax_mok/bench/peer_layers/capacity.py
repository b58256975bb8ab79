"""Every rank sends each expert the same number of rows, and drops those beyond.

The classical layer (Lepikhin et al., "GShard", 2020): static shapes throughout, and wrong wherever
an expert is more popular than its capacity.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok.bench.peer_layers.grouped import weighted_sum


def capacity_of(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """Rows that a rank of so many tokens may send to an expert: `factor` times the even share."""
    return max(1, math.ceil(factor * tokens * top_k / experts))


def places_of(ids: jax.Array, experts: int) -> jax.Array:
    """int32 [T·K]: how many choices of the same expert come before each, on this rank."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    ranked = flat[order]
    place = jnp.arange(len(flat)) - jnp.searchsorted(ranked, ranked, side="left")
    return jnp.zeros_like(flat).at[order].set(place.astype(flat.dtype))


def choices_kept(ids: np.ndarray, experts: int, capacity: int) -> np.ndarray:
    """bool [T, K]: those of this rank's choices that are not dropped, found without JAX."""
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    ranked = flat[order]
    place = np.empty_like(order)
    place[order] = np.arange(len(flat)) - np.searchsorted(ranked, ranked, side="left")
    return (place < capacity).reshape(ids.shape)


def capacity_layer(
    x: jax.Array,
    ids: jax.Array,
    router_weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    axis_name: str,
    capacity: int,
) -> jax.Array:
    """As `jax_mok.moe_ffn`, less the choices beyond `capacity` rows of a rank for an expert."""
    ranks, local = jax.lax.axis_size(axis_name), gate.shape[0]
    tokens, top_k = ids.shape
    width = x.shape[1]
    experts = ranks * local
    flat, place = ids.reshape(-1), places_of(ids, experts)
    slot = jnp.where(place < capacity, flat * capacity + place, experts * capacity)
    buffer = jnp.zeros((experts * capacity, width), x.dtype)
    sent = buffer.at[slot].set(jnp.repeat(x, top_k, axis=0), mode="drop")
    # [rank, local expert, capacity] of each source -> rows of each local expert.
    there = jax.lax.all_to_all(sent.reshape(ranks, local, capacity, width), axis_name, 0, 0)
    rows = there.transpose(1, 0, 2, 3).reshape(local, ranks * capacity, width)
    hidden = jax.nn.silu(jnp.einsum("erh,ehi->eri", rows, gate)) * jnp.einsum(
        "erh,ehi->eri", rows, up
    )
    outputs = jnp.einsum("eri,eih->erh", hidden, down)
    back = outputs.reshape(local, ranks, capacity, width).transpose(1, 0, 2, 3)
    home = jax.lax.all_to_all(back, axis_name, 0, 0).reshape(experts * capacity, width)
    gathered = home.at[slot].get(mode="fill", fill_value=0)
    return weighted_sum(gathered.reshape(tokens, top_k, width), router_weights)
