"""SwiGLU on stored pre-activations: silu(gate) ⊙ up, with an optional clamp.

Shazeer, "GLU Variants Improve Transformer", 2020; the clamp is that of gpt-oss (OpenAI, 2025).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def store(gate: jax.Array, up: jax.Array, dtype: jnp.dtype, clamp: float | None) -> jax.Array:
    """[2, ·, I] pre-activations in the dtype in which they are kept; gate and up are f32 [·, I].

    Every pass sees the rounded values, so that keeping them and replaying them give the same bits.
    Rounding never crosses the clamp: the gradient is cut off exactly where the f32 values are.
    """
    rounded_gate, rounded_up = gate.astype(dtype), up.astype(dtype)
    if clamp is not None:
        inside, outside = _neighbours(clamp, dtype)
        rounded_gate = jnp.where(
            gate < clamp, jnp.minimum(rounded_gate, inside), jnp.maximum(rounded_gate, outside)
        )
        magnitude = jnp.abs(rounded_up)
        magnitude = jnp.where(
            jnp.abs(up) < clamp, jnp.minimum(magnitude, inside), jnp.maximum(magnitude, outside)
        )
        rounded_up = jnp.copysign(magnitude, rounded_up)
    return jnp.stack([rounded_gate, rounded_up])


def swiglu(stored: jax.Array, clamp: float | None) -> jax.Array:
    """f32 [·, I] activation of the stored pre-activations."""
    stored_gate, stored_up = stored.astype(jnp.float32)
    gate, up = _clamped(stored_gate, stored_up, clamp)
    return jax.nn.silu(gate) * up


def swiglu_gradient(
    stored: jax.Array, d_hidden: jax.Array, clamp: float | None
) -> tuple[jax.Array, jax.Array]:
    """f32 gradients of gate and up [·, I] for the activation's gradient d_hidden [·, I]."""
    stored_gate, stored_up = stored.astype(jnp.float32)
    gate, up = _clamped(stored_gate, stored_up, clamp)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
    d_up = d_hidden * silu
    if clamp is not None:
        d_gate = jnp.where(stored_gate < clamp, d_gate, 0)
        d_up = jnp.where(jnp.abs(stored_up) < clamp, d_up, 0)
    return d_gate, d_up


def _clamped(gate: jax.Array, up: jax.Array, clamp: float | None) -> tuple[jax.Array, jax.Array]:
    if clamp is None:
        return gate, up
    return jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)


def _neighbours(clamp: float, dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The largest value of the dtype below the clamp, and the smallest not below it."""
    nearest = np.asarray(clamp, dtype)
    if np.float32(nearest) < np.float32(clamp):
        return nearest, np.nextafter(nearest, np.asarray(np.inf, dtype))
    return np.nextafter(nearest, np.asarray(-np.inf, dtype)), nearest
