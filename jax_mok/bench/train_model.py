"""A decoder with MoE layers and its training step, around any layer with `moe_ffn`'s arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.bench.chains import AXIS, CUBLAS
from jax_mok.bench.peer_layers.grouped import Layer
from jax_mok.bench.shapes import Shape
from jax_mok.router import Router

_LEARNING_RATE = 1e-4
_ROTARY_BASE = 1e6  # Qwen3's

State = dict[str, Any]
"""{"params": ..., "moments": ...}, float32, of Adam."""


class Decoder(NamedTuple):
    """Sizes of a decoder whose layers are attention and experts, those of Qwen3's.

    Attributes:
      shape: of the experts; its tokens are those of a GPU and a step.
      layers: how many.
      heads: of queries.
      kv_heads: of keys and values, each for as many heads of queries.
      head_width: of a head.
      vocabulary: tokens there are.
      length: of a sequence.
    """

    shape: Shape
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    length: int


def qwen3(shape: Shape, layers: int) -> Decoder:
    """Attention of Qwen3-30B-A3B, https://huggingface.co/Qwen/Qwen3-30B-A3B, of fewer layers and a
    smaller vocabulary."""
    return Decoder(shape, layers, 32, 4, 128, 32768, 4096)


def toy(shape: Shape, layers: int) -> Decoder:
    """To try a measurement where its figures mean nothing."""
    return Decoder(shape, layers, 2, 1, 16, 64, 16)


class Programs(NamedTuple):
    """What is timed.

    Attributes:
      init: seed -> state, on the mesh.
      step: (state, tokens) -> (state, loss); the state is donated.
      tokens: what a step takes, int32 [sequences, length + 1].
    """

    init: jax.stages.Wrapped
    step: jax.stages.Wrapped | jax.stages.Compiled
    tokens: jax.ShapeDtypeStruct

    def compiled(self) -> Programs:
        """The same, with its step compiled."""
        assert isinstance(self.step, jax.stages.Wrapped)
        lowered = self.step.lower(jax.eval_shape(self.init, 0), self.tokens)
        return self._replace(step=lowered.compile())


def build(decoder: Decoder, mesh: Mesh, layers: Mapping[str, Layer]) -> dict[str, Programs]:
    """By name the programs of a decoder with each layer, experts partitioned over the mesh axis."""
    optimizer = optax.adam(_LEARNING_RATE)

    def init(seed: jax.Array) -> State:
        params = _draw(decoder, mesh.size, jax.random.key(seed))
        return {"params": params, "moments": optimizer.init(params)}

    def step(layer: Layer, state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits = _apply(decoder, mesh, layer, params, tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return jnp.mean(losses)

        loss, gradient = jax.value_and_grad(loss_of)(state["params"])
        updates, moments = optimizer.update(gradient, state["moments"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    # Adam's moments have the paths of their weights, so one rule places both.
    shardings = jax.tree.map_with_path(
        lambda path, _: split if "['experts']" in jax.tree_util.keystr(path) else everywhere,
        jax.eval_shape(init, 0),
    )
    sequences = max(1, decoder.shape.tokens // decoder.length) * mesh.size
    length = decoder.shape.tokens * mesh.size // sequences
    init_all = jax.jit(init, out_shardings=shardings)
    return {
        name: Programs(
            init=init_all,
            step=jax.jit(
                functools.partial(step, layer),
                in_shardings=(shardings, split),
                out_shardings=(shardings, everywhere),
                donate_argnums=0,
                compiler_options=CUBLAS,
            ),
            tokens=jax.ShapeDtypeStruct((sequences, length + 1), jnp.int32, sharding=split),
        )
        for name, layer in layers.items()
    }


def without_experts(
    x: jax.Array,
    ids: jax.Array,
    router_weights: jax.Array,
    *experts: jax.Array,
    axis_name: str,
) -> jax.Array:
    """What costs nothing in the place of a layer: what remains of a step is not the layer's.

    Every operand is used, so that the rest of the step stays as it is.
    """
    used = jnp.sum(router_weights, 1, keepdims=True) + sum(w[0, 0, 0] for w in experts)
    return x * used.astype(x.dtype)


def _draw(decoder: Decoder, gpus: int, key: jax.Array) -> dict[str, Any]:
    hidden, inner = decoder.shape.hidden, decoder.shape.inner
    experts = decoder.shape.experts_of(gpus)
    queries = decoder.heads * decoder.head_width
    keys = decoder.kv_heads * decoder.head_width
    numbers = iter(range(1 + 7 * decoder.layers))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        drawn = jax.random.normal(jax.random.fold_in(key, next(numbers)), shape, jnp.float32)
        return drawn / fan_in**0.5

    return {
        "embed": normal(decoder.vocabulary, hidden, fan_in=1),
        "norm": jnp.ones(hidden),
        "layers": [
            {
                "norms": jnp.ones((2, hidden)),
                "attention": {
                    "qkv": normal(hidden, queries + 2 * keys, fan_in=hidden),
                    "out": normal(queries, hidden, fan_in=queries),
                },
                "router": normal(hidden, experts, fan_in=hidden),
                "experts": {
                    "gate": normal(experts, hidden, inner, fan_in=hidden),
                    "up": normal(experts, hidden, inner, fan_in=hidden),
                    "down": normal(experts, inner, hidden, fan_in=inner),
                },
            }
            for _ in range(decoder.layers)
        ],
    }


def _apply(
    decoder: Decoder, mesh: Mesh, layer: Layer, params: dict[str, Any], tokens: jax.Array
) -> jax.Array:
    """f32 logits [B, S, vocabulary]; activations are bf16."""
    split, whole = P(AXIS), P()
    experts = jax.shard_map(
        functools.partial(_route, Router(decoder.shape.top_k), layer),
        mesh=mesh,
        in_specs=(split, whole, split, split, split),
        out_specs=split,
        check_vma=False,
    )

    @jax.jit  # traced and lowered once for all layers: Pallas's kernels take long
    def add_layer(x: jax.Array, params: dict[str, Any]) -> jax.Array:
        x = x + _attend(decoder, params["attention"], _normed(x, params["norms"][0]))
        weights = params["experts"]
        normed = _normed(x, params["norms"][1])
        return x + experts(
            normed, params["router"], weights["gate"], weights["up"], weights["down"]
        )

    x = params["embed"].astype(jnp.bfloat16)[tokens]
    for each in params["layers"]:
        x = add_layer(x, each)
    x = _normed(x, params["norm"])
    scale = decoder.shape.hidden**-0.5  # the rows of the embedding have unit variance
    return (x @ params["embed"].astype(jnp.bfloat16).T).astype(jnp.float32) * scale


def _route(
    router: Router, layer: Layer, x: jax.Array, kernel: jax.Array, *experts: jax.Array
) -> jax.Array:
    """One GPU's sequences [B/n, S, H] through the experts of all."""
    tokens = x.reshape(-1, x.shape[-1])
    routing = router(tokens.astype(jnp.float32) @ kernel)
    y = layer(tokens, routing.ids, routing.weights, *experts, axis_name=AXIS)
    return y.reshape(x.shape)


def _attend(decoder: Decoder, weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    batch, length, _ = x.shape
    widths = (decoder.heads, decoder.kv_heads, decoder.kv_heads)
    qkv = x @ weights["qkv"].astype(x.dtype)
    ends = [decoder.heads * decoder.head_width, (decoder.heads + decoder.kv_heads)]
    ends[1] *= decoder.head_width
    query, key, value = (
        part.reshape(batch, length, heads, decoder.head_width)
        for part, heads in zip(jnp.split(qkv, ends, axis=-1), widths, strict=True)
    )
    on_gpus = jax.default_backend() == "gpu"
    mixed = jax.nn.dot_product_attention(
        _rotated(query),
        _rotated(key),
        value,
        is_causal=True,
        implementation="cudnn" if on_gpus else None,
    )
    return mixed.reshape(batch, length, -1) @ weights["out"].astype(x.dtype)


def _normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale * weight).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [B, S, heads, width]."""
    half = x.shape[-1] // 2
    frequency = _ROTARY_BASE ** (-jnp.arange(half) / half)
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[:, None]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
