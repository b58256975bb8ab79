"""All tokens go to all ranks; each rank's experts take theirs; the outputs are summed across ranks.

The least to write, and the simplest communication: all-gather and reduce-scatter of whole batches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_mok.bench.peer_layers.grouped import Experts, GroupedProduct, apply_experts, counts_of


def gathered_layer(
    product: GroupedProduct,
    x: jax.Array,
    ids: jax.Array,
    router_weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """As `jax_mok.moe_ffn`."""
    local = gate.shape[0]
    all_x, all_ids, all_weights = (
        jax.lax.all_gather(a, axis_name, tiled=True) for a in (x, ids, router_weights)
    )
    top_k = ids.shape[1]
    expert = all_ids.reshape(-1) - jax.lax.axis_index(axis_name) * local
    expert = jnp.where((expert >= 0) & (expert < local), expert, local)  # of others: behind
    order = jnp.argsort(expert, stable=True)
    token = order // top_k
    sizes = counts_of(expert, local + 1)[:local]
    outputs = apply_experts(product, all_x[token], Experts(gate, up, down), sizes)
    weighted = outputs.astype(jnp.float32) * all_weights.reshape(-1)[order][:, None]
    total = jnp.zeros(all_x.shape, jnp.float32).at[token].add(weighted)
    return jax.lax.psum_scatter(total.astype(x.dtype), axis_name, tiled=True)
