"""What the tests of the modules for Flax and Equinox share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_mok
from jax_mok import router
from jax_mok.block import BlockWeights
from jax_mok.router import Router

HIDDEN, INNER, EXPERTS, SHARED = 16, 24, 8, 40


def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((*shape, HIDDEN)).astype(np.float32)


def plain(choose: Router, weights: BlockWeights, x: np.ndarray) -> np.ndarray:
    """A module by its definition."""
    kernel, bias, gate, up, down, shared = jax.tree.map(np.asarray, weights)
    flat = np.asarray(x).reshape(-1, HIDDEN)
    ids, router_weights, _ = choose(flat @ kernel, bias)
    y = jax_mok.reference_moe(flat, ids, router_weights, gate, up, down)
    if shared is not None:
        y = y + (jax.nn.silu(flat @ shared["gate"]) * (flat @ shared["up"])) @ shared["down"]
    return np.asarray(y).reshape(x.shape)


def loss_of(layer: Any, x: jax.Array) -> jax.Array:
    y, routing, logits = layer(x)
    balance, z = router.load_balancing_loss(routing), router.z_loss(logits)
    return jnp.mean((y - 1) ** 2) + 0.01 * balance + 0.001 * z
