"""A byte-level transformer whose feed-forward layers are expert-parallel MoE layers."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import jax_mok
from jax_mok import router

BYTES = 256
HEAD_WIDTH = 32
AXIS = "ep"  # the mesh axis that splits the batch and the experts


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `dtype` is that of the activations, weights are always f32.

    `precision` is that of the experts' products, as in `jax_mok.MoEConfig`.
    """

    d_model: int
    layers: int
    experts: int
    top_k: int
    expert_width: int
    dtype: jnp.dtype
    precision: jax_mok.config.Precision = "operands"


class Attention(nnx.Module):
    """Causal self-attention with rotary positions: [B, S, H] -> [B, S, H]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Makes the weights."""
        width = config.d_model
        self.qkv = _linear(width, 3 * width, config.dtype, rngs)
        self.out = _linear(width, width, config.dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mixes the positions of each sequence."""
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = (qkv[:, :, part] for part in range(3))
        mixed = jax.nn.dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
        return self.out(mixed.reshape(batch, length, width))


class MoE(nnx.Module):
    """Top-k softmax router and its experts: [B, S, H] -> [B, S, H]."""

    def __init__(self, config: ModelConfig, mesh: Mesh, *, rngs: nnx.Rngs):
        """Makes the weights; `mesh` is the one the layer will run on."""
        experts, width, inner = config.experts, config.d_model, config.expert_width
        init = nnx.initializers.lecun_normal(batch_axis=(0,))
        # Small at first, so that no expert begins ahead of the others.
        self.router = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (width, experts)))
        self.experts = nnx.Dict(
            gate=nnx.Param(init(rngs.params(), (experts, width, inner))),
            up=nnx.Param(init(rngs.params(), (experts, width, inner))),
            down=nnx.Param(init(rngs.params(), (experts, inner, width))),
        )
        self.mesh = mesh
        self.top_k = config.top_k
        self.layer_config = jax_mok.MoEConfig(precision=config.precision)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the output, the load-balancing loss and each expert's share of the choices."""
        split, whole = PartitionSpec(AXIS), PartitionSpec()
        layer = jax.shard_map(
            functools.partial(_route_and_mix, top_k=self.top_k, config=self.layer_config),
            mesh=self.mesh,
            in_specs=(split, whole, split, split, split),
            out_specs=(split, whole, whole),
        )
        experts = self.experts
        return layer(x, self.router[...], experts.gate[...], experts.up[...], experts.down[...])


def _route_and_mix(
    x: jax.Array,
    kernel: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    top_k: int,
    config: jax_mok.MoEConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One device's sequences [B/n, S, H] through the experts of all devices."""
    tokens = x.reshape(-1, x.shape[-1])
    # f32 logits whatever the activations are, so that rounding does not decide the routing.
    routing = router.Router(top_k, renormalise=False)(tokens.astype(jnp.float32) @ kernel)
    y = jax_mok.moe_ffn(
        tokens, routing.ids, routing.weights, gate, up, down, axis_name=AXIS, config=config
    )
    load = router.load_of(routing.ids, kernel.shape[-1], AXIS)
    return y.reshape(x.shape), router.load_balancing_loss(routing, AXIS), load.shares


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, mesh: Mesh, *, rngs: nnx.Rngs):
        """Makes the sublayers."""
        self.attention_norm = nnx.RMSNorm(config.d_model, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.d_model, dtype=config.dtype, rngs=rngs)
        self.moe = MoE(config, mesh, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the output, the balancing loss and the expert shares of `MoE`."""
        x = x + self.attention(self.attention_norm(x))
        y, balance, share = self.moe(self.moe_norm(x))
        return x + y, balance, share


class Transformer(nnx.Module):
    """Next-byte model: int32 bytes [B, S] -> f32 logits [B, S, 256]."""

    def __init__(self, config: ModelConfig, mesh: Mesh, *, rngs: nnx.Rngs):
        """Makes the layers."""
        self.embed = nnx.Embed(BYTES, config.d_model, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, mesh, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.d_model, dtype=config.dtype, rngs=rngs)
        self.head = _linear(config.d_model, BYTES, config.dtype, rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns logits, the layers' mean balancing loss, and expert shares [layers, E]."""
        x = self.embed(tokens)
        balances, shares = [], []
        for block in self.blocks:
            x, balance, share = block(x)
            balances.append(balance)
            shares.append(share)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return logits, jnp.stack(balances).mean(), jnp.stack(shares)


def _linear(inputs: int, outputs: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [B, S, heads, HEAD_WIDTH]."""
    half = HEAD_WIDTH // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[:, None]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
