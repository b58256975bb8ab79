"""The layer in plain JAX on one device: a loop over experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def reference_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    clamp: float | None = None,
) -> jax.Array:
    """What `moe` computes, written for clarity: every expert is applied to every token.

    Computes in f32, or in f64 if an operand is f64. Needs no mesh; differentiable.

    Args:
      x: [T, H].
      expert_ids: [T, K] int32; ids outside 0..experts-1 are masked choices.
      expert_weights: [T, K].
      w_gate: [experts, H, I].
      w_up: [experts, H, I].
      w_down: [experts, I, H].
      clamp: as `MoEConfig.clamp`.

    Returns:
      y: [T, H] in x's dtype.
    """
    dtype = jnp.promote_types(jnp.result_type(x, w_gate, w_up, w_down), jnp.float32)
    tokens = x.astype(dtype)

    def add_expert(
        y: jax.Array, expert: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        index, gate_matrix, up_matrix, down_matrix = expert
        gate, up = tokens @ gate_matrix.astype(dtype), tokens @ up_matrix.astype(dtype)
        if clamp is not None:
            gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
        output = (jax.nn.silu(gate) * up) @ down_matrix.astype(dtype)
        weight = jnp.sum(jnp.where(expert_ids == index, expert_weights, 0), axis=1)
        return y + weight[:, None].astype(dtype) * output, None

    indices = jnp.arange(w_gate.shape[0], dtype=expert_ids.dtype)
    y, _ = jax.lax.scan(add_expert, jnp.zeros_like(tokens), (indices, w_gate, w_up, w_down))
    return y.astype(x.dtype)
