"""What the modules for Flax and Equinox share: router, experts and shared expert as functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_mok.config import MoEConfig
from jax_mok.errors import MoEInputError
from jax_mok.moe import moe
from jax_mok.router import Router, Routing
from jax_mok.sharding import check_axis, check_mesh
from jax_mok.validate import check_experts

ROUTER_SCALE = 0.02
"""Deviation of a new router's weights: small, so that no expert begins ahead of the others."""


class MoEOutput(NamedTuple):
    """What a module returns.

    Attributes:
      y: [..., H].
      routing: of the tokens, [T, K] and [T, E]: what the losses of `jax_mok.router` take.
      logits: float32 [T, E].
    """

    y: jax.Array
    routing: Routing
    logits: jax.Array


class BlockWeights(NamedTuple):
    """Of a module.

    Attributes:
      router: float32 [H, E].
      bias: float32 [E], or None.
      gate: [E, H, I].
      up: [E, H, I].
      down: [E, I, H].
      shared: gate and up [H, S], down [S, H], by name; or None.
    """

    router: jax.Array
    bias: jax.Array | None
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    shared: Mapping[str, jax.Array] | None

    def constructor_arguments(self, router: Router) -> dict[str, Any]:
        """What a module's constructor takes for such weights, beside mesh and options.

        Raises:
          MoEInputError: if the router is none for these weights.
        """
        if (router.kind == "sigmoid") != (self.bias is not None):
            given = "None" if self.bias is None else f"of shape {list(self.bias.shape)}"
            raise MoEInputError(
                f'weights.bias is {given} and router.kind={router.kind!r}: "sigmoid" takes a bias '
                '[E], which may be zeros, and "softmax" None'
            )
        experts, hidden, inner = self.gate.shape
        return {
            "hidden": hidden,
            "inner": inner,
            "experts": experts,
            "router": router,
            "shared_inner": 0 if self.shared is None else self.shared["down"].shape[0],
            "param_dtype": self.gate.dtype,
        }


@dataclasses.dataclass(frozen=True)
class Block:
    """What of a module is no array.

    Attributes:
      router: how experts are chosen.
      mesh: the devices that the layer runs on.
      axis_name: the mesh axis over which experts are partitioned.
      config: options of the layer.
      dtype: of the experts' products and of y; None: that of x.
    """

    router: Router
    mesh: Mesh
    axis_name: str
    config: MoEConfig | None
    dtype: DTypeLike | None

    def check(self, experts: int) -> None:
        """Looks whether so many experts fit, and whether router and mesh are such.

        Raises:
          MoEInputError: if they are not, the mesh has no such axis, or it does not divide the
            experts.
        """
        if not isinstance(self.router, Router):
            example = self.router if isinstance(self.router, int) else "top_k"
            raise MoEInputError(
                f"router must be a jax_mok.router.Router, got {type(self.router).__name__}: use "
                f"Router({example})"
            )
        check_mesh(self.mesh)
        check_axis(self.mesh, self.axis_name)
        check_experts(experts, self.mesh.shape[self.axis_name], self.axis_name)

    def __call__(self, x: jax.Array, weights: BlockWeights) -> MoEOutput:
        """Applies the chosen experts, and the shared one, to tokens [..., H]."""
        dtype = self.dtype or x.dtype
        tokens = x.reshape(-1, x.shape[-1]).astype(dtype)
        # f32 logits whatever the products are, so that rounding does not decide the routes.
        logits = tokens.astype(jnp.float32) @ weights.router
        routing = self.router(logits, weights.bias)
        y = moe(
            tokens,
            routing.ids,
            routing.weights,
            weights.gate,
            weights.up,
            weights.down,
            mesh=self.mesh,
            axis_name=self.axis_name,
            config=self.config,
        )
        if weights.shared is not None:
            gate, up, down = (weights.shared[name].astype(dtype) for name in ("gate", "up", "down"))
            y = y + (jax.nn.silu(tokens @ gate) * (tokens @ up)) @ down
        return MoEOutput(y.reshape(x.shape), routing, logits)
