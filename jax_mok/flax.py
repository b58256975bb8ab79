"""The layer as a Flax NNX module: router, experts and, if wanted, a shared expert."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        "jax_mok.flax needs Flax: run `pip install flax`, or install the package with its extra "
        "`flax`"
    ) from error
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_mok.block import ROUTER_SCALE, Block, BlockWeights, MoEOutput
from jax_mok.config import MoEConfig
from jax_mok.errors import MoEInputError
from jax_mok.router import Router


class RouterBias(nnx.Variable[jax.Array]):
    """What a "sigmoid" router adds to the scores for its choice; not trained by gradients.

    Set it after a step to `jax_mok.router.update_bias(bias, counts)`.
    """


class MoE(nnx.Module):
    """Router and expert-parallel SwiGLU experts: [..., H] -> [..., H].

    The experts' weights are partitioned over the mesh axis, and say so in their metadata
    (`nnx.get_partition_spec`); all else is the same everywhere. Works under `nnx.jit`, `nnx.grad`,
    `nnx.remat`, `nnx.scan` and `nnx.vmap` of the constructor.

        layer = MoE(1024, 512, 64, Router(8), mesh=mesh, axis_name="ep", rngs=nnx.Rngs(0))
        y, routing, logits = layer(x)
        loss = task_loss(y) + 0.01 * jax_mok.router.load_balancing_loss(routing)

    Attributes:
      router_kernel: float32 [H, E].
      router_bias: float32 [E] if the router's kind is "sigmoid", else None.
      gate: [E, H, I].
      up: [E, H, I].
      down: [E, I, H].
      shared: gate and up [H, S], down [S, H] of the expert that every token goes to, or None.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        router: Router,
        *,
        mesh: Mesh,
        axis_name: str,
        rngs: nnx.Rngs,
        shared_inner: int = 0,
        config: MoEConfig | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
    ):
        """Makes the weights.

        Args:
          hidden: width H of a token.
          inner: width I of an expert.
          experts: how many, E; the mesh axis divides them.
          router: how they are chosen.
          mesh: the devices that the layer will run on.
          axis_name: the mesh axis over which experts are partitioned.
          rngs: `params` makes the weights.
          shared_inner: width S of a shared expert; 0: there is none.
          config: options of the layer.
          dtype: of the experts' products and of y; None: that of x.
          param_dtype: of the weights, but for the router's.

        Raises:
          MoEInputError: if the mesh has no such axis, or it does not divide the experts; or for a
            router or random numbers of another type.
        """
        self.block = Block(router, mesh, axis_name, config, dtype)
        self.block.check(experts)
        if not isinstance(rngs, nnx.Rngs):
            raise MoEInputError(
                f"rngs must be a flax.nnx.Rngs, got {type(rngs).__name__}: use rngs=nnx.Rngs(0)"
            )

        normal = nnx.initializers.normal(ROUTER_SCALE)
        self.router_kernel = nnx.Param(normal(rngs.params(), (hidden, experts), jnp.float32))
        is_biased = router.kind == "sigmoid"
        self.router_bias = RouterBias(jnp.zeros(experts)) if is_biased else None

        by_expert = nnx.with_partitioning(
            nnx.initializers.lecun_normal(batch_axis=(0,)), (axis_name, None, None), mesh=mesh
        )

        def weights(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(by_expert(rngs.params(), (experts, *shape), param_dtype))

        self.gate, self.up = weights(hidden, inner), weights(hidden, inner)
        self.down = weights(inner, hidden)
        self.shared = (
            _shared_expert(hidden, shared_inner, param_dtype, rngs) if shared_inner else None
        )

    @classmethod
    def from_weights(
        cls,
        router: Router,
        weights: BlockWeights,
        *,
        mesh: Mesh,
        axis_name: str,
        config: MoEConfig | None = None,
        dtype: DTypeLike | None = None,
    ) -> MoE:
        """Makes the module of weights that are there, as of `jax_mok.checkpoints.load_moe_layer`.

        Args:
          router: how experts are chosen; of the kind "sigmoid" if there is a bias.
          weights: become the module's, where they are.
          mesh: as for the constructor, as are the others.
          axis_name: see there.
          config: see there.
          dtype: see there.

        Raises:
          MoEInputError: as the constructor, and if router and bias do not fit.
        """
        make = functools.partial(
            cls,
            **weights.constructor_arguments(router),
            mesh=mesh,
            axis_name=axis_name,
            config=config,
            dtype=dtype,
        )
        # Nothing is drawn: the weights may be all that fits.
        module = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        arrays = weights._asdict()
        arrays["router_kernel"], arrays["router_bias"] = arrays.pop("router"), arrays.pop("bias")
        nnx.update(module, {name: array for name, array in arrays.items() if array is not None})
        return module

    def __call__(self, x: jax.Array) -> MoEOutput:
        """Applies the chosen experts, and the shared one, to tokens [..., H] over all mesh axes."""
        return self.block(x, self.weights())

    def weights(self) -> BlockWeights:
        """The weights, without what Flax knows of them."""
        shared = None
        if self.shared is not None:
            shared = {name: self.shared[name][...] for name in ("gate", "up", "down")}
        return BlockWeights(
            router=self.router_kernel[...],
            bias=None if self.router_bias is None else self.router_bias[...],
            gate=self.gate[...],
            up=self.up[...],
            down=self.down[...],
            shared=shared,
        )


def _shared_expert(
    hidden: int, inner: int, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Dict[nnx.Param[jax.Array]]:
    init = nnx.initializers.lecun_normal()

    def weights(*shape: int) -> nnx.Param[jax.Array]:
        return nnx.Param(init(rngs.params(), shape, dtype))

    return nnx.Dict(
        gate=weights(hidden, inner), up=weights(hidden, inner), down=weights(inner, hidden)
    )
