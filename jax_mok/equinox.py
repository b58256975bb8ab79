"""The layer as an Equinox module: router, experts and, if wanted, a shared expert."""

from __future__ import annotations

import functools

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError(
        "jax_mok.equinox needs Equinox: run `pip install equinox`, or install the package with its "
        "extra `equinox`"
    ) from error
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_mok.block import ROUTER_SCALE, Block, BlockWeights, MoEOutput
from jax_mok.config import MoEConfig
from jax_mok.errors import MoEInputError
from jax_mok.router import Router


class MoE(eqx.Module):
    """Router and expert-parallel SwiGLU experts: [..., H] -> [..., H].

    The experts' weights are made partitioned over the mesh axis, all else the same everywhere; see
    `shardings`. Works under `eqx.filter_jit`, `eqx.filter_grad`, `eqx.filter_checkpoint` and in
    stacks that are scanned.

        layer = MoE(1024, 512, 64, Router(8), mesh=mesh, axis_name="ep", key=jax.random.key(0))
        y, routing, logits = layer(x)
        loss = task_loss(y) + 0.01 * jax_mok.router.load_balancing_loss(routing)

    Attributes:
      router_kernel: float32 [H, E].
      router_bias: float32 [E] if the router's kind is "sigmoid", else None. It has no gradient; set
        it after a step with `eqx.tree_at` to `jax_mok.router.update_bias(bias, counts)`.
      gate: [E, H, I].
      up: [E, H, I].
      down: [E, I, H].
      shared: gate and up [H, S], down [S, H] of the expert that every token goes to, by name; or
        None.
      block: what is no array.
    """

    router_kernel: jax.Array
    router_bias: jax.Array | None
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    shared: dict[str, jax.Array] | None
    block: Block = eqx.field(static=True)

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        router: Router,
        *,
        mesh: Mesh,
        axis_name: str,
        key: jax.Array,
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
          key: makes the weights.
          shared_inner: width S of a shared expert; 0: there is none.
          config: options of the layer.
          dtype: of the experts' products and of y; None: that of x.
          param_dtype: of the weights, but for the router's.

        Raises:
          MoEInputError: if the mesh has no such axis, or it does not divide the experts; or for a
            router or a key of another type.
        """
        self.block = Block(router, mesh, axis_name, config, dtype)
        self.block.check(experts)
        if not hasattr(key, "dtype"):
            raise MoEInputError(
                f"key must be a JAX key, got {type(key).__name__}: use key=jax.random.key(0)"
            )
        keys = iter(jax.random.split(key, 7))
        by_expert = jax.nn.initializers.lecun_normal(batch_axis=(0,))
        plain = jax.nn.initializers.lecun_normal()
        split = NamedSharding(mesh, PartitionSpec(axis_name))

        def partitioned(*shape: int) -> jax.Array:
            weights = by_expert(next(keys), (experts, *shape), param_dtype)
            return jax.lax.with_sharding_constraint(weights, split)

        normal = jax.nn.initializers.normal(ROUTER_SCALE)
        self.router_kernel = normal(next(keys), (hidden, experts), jnp.float32)
        self.router_bias = jnp.zeros(experts) if router.kind == "sigmoid" else None
        self.gate, self.up = partitioned(hidden, inner), partitioned(hidden, inner)
        self.down = partitioned(inner, hidden)
        self.shared = None
        if shared_inner:
            shapes = dict(
                gate=(hidden, shared_inner), up=(hidden, shared_inner), down=(shared_inner, hidden)
            )
            self.shared = {
                name: plain(next(keys), shape, param_dtype) for name, shape in shapes.items()
            }

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
        module: MoE = eqx.filter_eval_shape(lambda: make(key=jax.random.key(0)))
        return eqx.tree_at(MoE.weights, module, weights, is_leaf=lambda node: node is None)

    def __call__(self, x: jax.Array) -> MoEOutput:
        """Applies the chosen experts, and the shared one, to tokens [..., H] over all mesh axes."""
        return self.block(x, self.weights())

    def weights(self) -> BlockWeights:
        """The weights, with the names that the module for Flax gives them too."""
        return BlockWeights(
            router=self.router_kernel,
            bias=self.router_bias,
            gate=self.gate,
            up=self.up,
            down=self.down,
            shared=self.shared,
        )

    def shardings(self) -> MoE:
        """The module with shardings for arrays: where `jax.device_put` should place it."""
        mesh, axis_name = self.block.mesh, self.block.axis_name
        everywhere = NamedSharding(mesh, PartitionSpec())
        split = NamedSharding(mesh, PartitionSpec(axis_name))
        placed: MoE = jax.tree.map(lambda _: everywhere, self)
        return eqx.tree_at(lambda m: (m.gate, m.up, m.down), placed, (split,) * 3)
