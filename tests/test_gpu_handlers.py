"""What XLA says to the GPU handlers, asked of the CPU's: it checks and decodes the same way.

A handler that the CPU's XLA calls gets no stream of a GPU and none of its ranks; all else is there.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import codec, ffi, quantize
from jax_mok.sharding import vary_all

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 64, 128, 64, 8, 2
MISSING_STREAM = r"bad operands at: 0\)"
MISSING_STREAM_AND_PEERS = r"bad operands at: 0, 2\)"

pytestmark = pytest.mark.skipif(ffi.cuda is None, reason="built without GPU kernels")
with_peers = pytest.mark.skipif(
    ffi.cuda_peers is None, reason="built without GPU kernels, or JAX too old for those of peers"
)


def register(module: types.ModuleType, suffix: str, *stages: str) -> None:
    """Hands the stages of all handlers of a module to the CPU's XLA, under names of their own."""
    jax.devices()  # before there are any, handlers are put aside unseen
    for name, handlers in module.registrations().items():
        chosen = {stage: handlers[stage] for stage in stages or handlers}
        jax.ffi.register_ffi_target(name + suffix, chosen, platform="cpu")


def test_this_xla_takes_the_handlers_without_peers():
    register(ffi.cuda, "_of_any_jax")


@with_peers
def test_this_xla_takes_the_handlers_with_peers():
    register(ffi.cuda_peers, "_of_any_jax")


@functools.cache
def register_launches() -> None:
    for module in (ffi.cuda, ffi.cuda_peers):
        if module is not None:
            register(module, "_on_cpu", "execute")


@pytest.fixture
def gpu_program_on_cpu(monkeypatch) -> None:
    """Takes every device for a GPU."""
    register_launches()
    call = ffi.call
    monkeypatch.setattr(
        ffi, "call", lambda target, *rest, **options: call(f"{target}_on_cpu", *rest, **options)
    )
    monkeypatch.setattr(
        jax.lax,
        "platform_dependent",
        lambda *operands, cuda=None, default=None, cpu=None: (cuda or default)(*operands),
    )


def leave_out(monkeypatch: pytest.MonkeyPatch, *beginnings: str) -> None:
    """Calls of these names, which would fail before others can, give zeros."""
    call = ffi.call

    def call_or_zeros(target, results, operands, attributes, axes, *given, **named):
        if not target.startswith(beginnings):
            return call(target, results, operands, attributes, axes, *given, **named)
        return vary_all([jnp.zeros(result.shape, result.dtype) for result in results], axes)

    monkeypatch.setattr(ffi, "call", call_or_zeros)


WAYS = [
    pytest.param("fused", 1, MISSING_STREAM),
    pytest.param("composed", 1, MISSING_STREAM),
    pytest.param("collective", 4, MISSING_STREAM),
    pytest.param("fused", 4, MISSING_STREAM_AND_PEERS, marks=with_peers),
]


@pytest.mark.usefixtures("gpu_program_on_cpu")
@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("precision", ["operands", "mxfp8"])
@pytest.mark.parametrize(("composition", "ranks", "missing"), WAYS)
def test_handlers_of_the_layer_decode_what_they_get(
    composition, ranks, missing, precision, derived, monkeypatch
):
    leave_out(monkeypatch, "jax_mok_round")
    config = jax_mok.MoEConfig(composition=composition, precision=precision)
    layer = functools.partial(jax_mok.moe, mesh=mesh_of(ranks), axis_name="ep", config=config)
    ids = jnp.zeros((TOKENS, TOP_K), jnp.int32)
    up = jnp.zeros((EXPERTS, HIDDEN, INNER), jnp.bfloat16)
    down = jnp.zeros((EXPERTS, INNER, HIDDEN), jnp.bfloat16)
    x, weights = jnp.zeros((TOKENS, HIDDEN), jnp.bfloat16), jnp.ones(ids.shape)

    def step(x, *rest):
        if derived:  # the forward pass under a gradient
            return jax.vjp(lambda x: layer(x, *rest), x)[0]
        return layer(x, *rest)

    with pytest.raises(Exception, match=missing):
        jax.block_until_ready(jax.jit(step)(x, ids, weights, up, up, down))


@pytest.mark.usefixtures("gpu_program_on_cpu")
@pytest.mark.parametrize("masters", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize(
    ("precision", "saved_rows"), [("operands", None), ("mxfp8", None), ("mxfp8", 0)]
)
@pytest.mark.parametrize(("composition", "ranks", "missing"), [WAYS[0], WAYS[1], WAYS[3]])
def test_handlers_of_gradients_decode_what_they_get(
    composition, ranks, missing, precision, saved_rows, direction, masters, monkeypatch
):
    leave_out(monkeypatch, "jax_mok_forward", "jax_mok_round")
    config = jax_mok.MoEConfig(
        composition=composition,
        reverse_combine=direction,
        reverse_dispatch=direction,
        precision=precision,
        saved_rows=saved_rows,
    )
    layer = functools.partial(jax_mok.moe, mesh=mesh_of(ranks), axis_name="ep", config=config)
    ids = jnp.zeros((TOKENS, TOP_K), jnp.int32)
    up = jnp.zeros((EXPERTS, HIDDEN, INNER), masters)
    down = jnp.zeros((EXPERTS, INNER, HIDDEN), masters)
    x, weights = jnp.zeros((TOKENS, HIDDEN), jnp.bfloat16), jnp.ones(ids.shape)

    def step(x, weights, *experts):
        y, pullback = jax.vjp(lambda *ops: layer(ops[0], ids, *ops[1:]), x, weights, *experts)
        return pullback(y)

    with pytest.raises(Exception, match=missing):
        jax.block_until_ready(jax.jit(step)(x, weights, up, up, down))


@pytest.mark.usefixtures("gpu_program_on_cpu")
@pytest.mark.parametrize(("composition", "ranks", "missing"), WAYS)
def test_handlers_of_plans_decode_what_they_get(composition, ranks, missing):
    config = jax_mok.MoEConfig(composition=composition)
    build = functools.partial(
        jax_mok.build_plan, num_experts=EXPERTS, axis_name="ep", config=config
    )
    step = jax.shard_map(build, mesh=mesh_of(ranks), in_specs=P("ep"), out_specs=P("ep"))
    with pytest.raises(Exception, match=missing):
        jax.block_until_ready(jax.jit(step)(jnp.zeros((TOKENS, TOP_K), jnp.int32)))


@pytest.mark.usefixtures("gpu_program_on_cpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weighted_sum_decodes_what_it_gets(dtype):
    result = jax.ShapeDtypeStruct((TOKENS, HIDDEN), dtype)
    ranks = jnp.zeros((TOKENS, TOP_K), jnp.int32)
    slots, weights = jnp.zeros((TOKENS * TOP_K, HIDDEN), dtype), jnp.ones(ranks.shape)
    with pytest.raises(Exception, match=MISSING_STREAM):
        np.asarray(
            ffi.call("jax_mok_weighted_sum", [result], (slots, ranks, weights), {}, frozenset())[0]
        )


def encode(x: jax.Array, axis: int) -> jax.Array:
    return codec.encode(x, axis, frozenset()).elements


def decode(x: jax.Array, axis: int) -> jax.Array:
    return codec.decode(quantize.quantize(jnp.zeros(x.shape), axis), x.dtype, frozenset())


def rounded(x: jax.Array, axis: int) -> jax.Array:
    return codec.rounded(x, axis, jnp.bfloat16, frozenset())


def rounded_along_both(x: jax.Array, axis: int) -> jax.Array:
    return codec.rounded_along_both(x, jnp.bfloat16, frozenset())[axis]


@pytest.mark.usefixtures("gpu_program_on_cpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("convert", [encode, decode, rounded, rounded_along_both])
def test_handlers_of_mxfp8_decode_what_they_get(convert, axis, dtype):
    x = jnp.zeros((2, HIDDEN, INNER), dtype)
    for step in (convert, jax.vmap(convert, in_axes=(0, None))):
        with pytest.raises(Exception, match=MISSING_STREAM):
            jax.block_until_ready(jax.jit(step, static_argnums=1)(x, axis))
