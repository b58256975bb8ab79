"""MXFP8 by kernels on NVIDIA GPUs, bit for bit as defined: run with `pytest -m gpu`."""

import functools
from collections.abc import Callable

import harness
import jax
import jax.numpy as jnp
import mx_oracle
import numpy as np
import oracle
import pytest
import routings
from gpu_harness import MoEConfig, gpus, mesh_of, poison_memory, rank_counts
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import codec, ffi
from jax_mok.quantize import BLOCK, MXArray, dequantize, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ffi.cuda is None, reason="built without GPU kernels"),
]

DTYPES = [jnp.bfloat16, jnp.float32]
# Blocks along the second axis: contiguous ones, fewer than a warp has and more; then columns that
# fill no vector, no warp and no block of the other axis, and such that do.
SHAPES = [
    *((1, 32, 1), (5, 96, 1), (3, 2080, 1), (1, 2**20, 1)),
    *((1, 32, 2), (2, 64, 3), (3, 96, 31), (2, 32, 4), (1, 64, 8), (7, 32, 36), (3, 64, 40)),
    *((1, 32, 32), (5, 64, 96), (3, 32, 160), (2, 512, 2048), (1, 96, 4104)),
]
ALONG_BOTH = [shape for shape in SHAPES if shape[2] % BLOCK == 0]


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    poison_memory(np.int32(0x5EADBEEF))


def bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def assert_same_bits(got: object, want: object) -> None:
    """Of two trees of arrays."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(bits(one), bits(other))


def compare(calls: str, step: Callable, definition: Callable, *cases: object) -> None:
    """A step on a GPU that calls these kernels has the bits of plain JAX on a CPU."""
    on_gpu, on_cpu = (
        [jax.device_put(case, device) for case in cases]
        for device in (gpus()[0], jax.devices("cpu")[0])
    )
    compiled = jax.jit(step).lower(on_gpu[0]).compile()
    assert calls in compiled.as_text()
    define = jax.jit(definition)
    for operand, same in zip(on_gpu, on_cpu, strict=True):
        assert_same_bits(compiled(operand), define(same))


def tame(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Finite: blocks of all magnitudes, some numbers subnormal, some zero."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-148, 124, (*shape[:-1], 1))
    return np.where(rng.random(shape) < 0.1, np.copysign(0, x), x).astype(np.float32)


def wild(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits, NaN of both signs among them, and blocks with nothing finite."""
    words = rng.integers(0, 2**32, shape, np.uint32)
    x = words.view(np.float32).copy()
    x[rng.random(shape) < 0.05] = np.inf
    x[rng.random(shape) < 0.05] = -np.inf
    x.reshape(-1, BLOCK)[0] = np.nan
    x.reshape(-1, BLOCK)[-1] = -np.inf
    return x


def rarely_wild(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Warps with something that is not finite beside warps without."""
    x = tame(rng, shape)
    places = rng.integers(0, x.size, 1 + x.size // 20000)
    x.ravel()[places] = rng.choice([np.nan, -np.nan, np.inf, -np.inf], len(places))
    return x


def drawn(draw: Callable, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """In bfloat16 the upper halves: rounding would leave fewer subnormal and other odd numbers."""
    x = draw(np.random.default_rng(np.prod(shape)), shape)
    if dtype == jnp.float32:
        return x
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(jnp.bfloat16)


def all_drawn(shape: tuple[int, ...], dtype: object) -> list[np.ndarray]:
    return [drawn(draw, shape, dtype) for draw in (tame, wild, rarely_wild)]


def encoded(x: jax.Array) -> MXArray:
    return codec.encode(x, -2, frozenset())


def defined(x: jax.Array) -> MXArray:
    return quantize(x, -2)


def decoded(array: MXArray, dtype: object) -> jax.Array:
    return codec.decode(array, dtype, frozenset())


def rounded(x: jax.Array, dtype: object) -> jax.Array:
    return codec.rounded(x, -2, dtype, frozenset())


def defined_rounding(x: jax.Array, dtype: object, axis: int = -2) -> jax.Array:
    return dequantize(quantize(x, axis), dtype)


def of(step: Callable, **options: object) -> Callable:
    return functools.partial(step, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_arrays_are_as_defined(shape, dtype):
    compare("jax_mok_quantize", encoded, defined, *all_drawn(shape, dtype))


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_is_quantising_and_back(shape, dtype, to):
    steps = of(rounded, dtype=to), of(defined_rounding, dtype=to)
    compare("jax_mok_round", *steps, *all_drawn(shape, dtype))


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ALONG_BOTH)
def test_rounding_along_both_axes_is_rounding_along_each(shape, dtype, to):
    compare(
        "jax_mok_round",
        lambda x: codec.rounded_along_both(x, to, frozenset()),
        lambda x: (defined_rounding(x, to), defined_rounding(x, to, axis=-1)),
        *all_drawn(shape, dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 256, 1), (256, 32, 8), (256, 32, 40), (256, 32, 11)])
def test_every_element_comes_back_with_every_scale(shape, dtype):
    scales = np.zeros((shape[0], shape[1] // BLOCK, shape[2]), np.uint8)
    scales[:] = np.arange(256)[:, None, None]
    elements = np.resize(np.arange(256, dtype=np.uint8), shape[1:])
    elements = np.broadcast_to(elements, shape)
    # Once with NaN in every warp, once without any.
    arrays = [
        MXArray(
            np.ascontiguousarray(codes).view(jnp.float8_e4m3fn),
            np.ascontiguousarray(powers).view(jnp.float8_e8m0fnu),
            -2,
        )
        for codes, powers in ((elements, scales), (elements & 0xBF, np.minimum(scales, 254)))
    ]
    steps = of(decoded, dtype=dtype), of(dequantize, dtype=dtype)
    compare("jax_mok_dequantize", *steps, *arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_elements_come_back(shape, dtype):
    rng = np.random.default_rng(1)
    elements = rng.integers(0, 256, shape, np.uint8)
    elements[rng.random(shape) < 0.9] &= 0xBF
    scales = rng.integers(0, 255, (shape[0], shape[1] // BLOCK, shape[2]), np.uint8)
    array = MXArray(elements.view(jnp.float8_e4m3fn), scales.view(jnp.float8_e8m0fnu), -2)
    steps = of(decoded, dtype=dtype), of(dequantize, dtype=dtype)
    compare("jax_mok_dequantize", *steps, array)


def beside_every_step(axis: int) -> np.ndarray:
    """With every scale: codes, ties between them and the floats next to both, of both signs.

    Rounding grows with the magnitude, so what is right here is right for all that is finite.
    """
    codes = np.arange(0x7F, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    numbers = np.concatenate([codes, (codes[:-1] + codes[1:]) / 2])
    numbers = np.resize(numbers, (-(-len(numbers) // 9), 9))
    scaled = numbers * np.ldexp(1.0, np.arange(248) - 127)[:, None, None]
    scaled = np.minimum(scaled, np.finfo(np.float32).max).astype(np.float32)
    largest = scaled.max(axis=(1, 2))[:, None, None]  # of which the scale is that of the block
    with np.errstate(over="ignore"):
        near = [np.nextafter(scaled, to) for to in (np.float32(0), np.float32(np.inf))]
    near = [np.minimum(part, largest) for part in (scaled, *near)]
    blocks = np.concatenate([largest + 0 * scaled[..., :1], *near], axis=-1)
    blocks = np.pad(blocks, ((0, 0), (0, 0), (0, BLOCK - blocks.shape[-1])))
    blocks = np.concatenate([blocks, -blocks]).reshape(-1, BLOCK)
    return blocks[None, :, :, None] if axis == 1 else np.ascontiguousarray(blocks.T)[None, :, None]


@pytest.mark.parametrize("axis", [1, 0])
def test_floats_on_both_sides_of_every_step_are_as_defined(axis):
    x = beside_every_step(axis)
    x = x.reshape(1, -1, 1) if axis == 1 else x.reshape(1, BLOCK, -1)
    assert np.all(np.isfinite(x))
    compare("jax_mok_quantize", encoded, defined, x)
    steps = of(rounded, dtype=x.dtype), of(defined_rounding, dtype=x.dtype)
    compare("jax_mok_round", *steps, x)
    scales = np.asarray(jax.jit(defined)(x).scales)
    assert len(np.unique(scales.view(np.uint8))) == 248


@pytest.mark.parametrize("shape", [(2**16, 1), (32, 2**11)])
def test_every_bfloat16_is_as_defined(shape):
    rng = np.random.default_rng(2)
    cases = []
    for _ in range(4):  # beside others each time
        x = rng.permutation(2**16).astype(np.uint16).view(jnp.bfloat16).reshape(1, *shape)
        finite = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
        cases += [x, finite]
    compare("jax_mok_quantize", encoded, defined, *cases)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_slices_of_which_xla_may_hand_out_the_middle_are_as_defined(first, dtype):
    """A slice that begins in an odd place is not where vectors can be read."""
    x = drawn(tame, (5, 32, 33), dtype).ravel()

    def part(x):
        return jax.lax.dynamic_slice(x, (first * 33,), (32 * 64,)).reshape(1, 32, 64)

    compare(
        "jax_mok_round",
        lambda x: codec.rounded_along_both(part(x), dtype, frozenset()),
        lambda x: tuple(defined_rounding(part(x), dtype, axis) for axis in (-2, -1)),
        x,
    )


@pytest.mark.parametrize("shape", [(0, 32, 8), (2, 0, 8), (2, 32, 0)])
def test_nothing_stays_nothing(shape):
    x = np.zeros(shape, np.float32)
    step = jax.jit(of(rounded, dtype=jnp.bfloat16))
    y = step(jax.device_put(x, gpus()[0]))
    assert (y.shape, y.dtype) == (shape, jnp.bfloat16)


def convert_all(x: jax.Array) -> object:
    """By each of the kernels; x is [..., ·, ·]."""
    axes = frozenset(jax.typeof(x).manual_axis_type.varying)
    array = codec.encode(x, -2, axes)
    rows = codec.encode_rows(x.reshape(-1, x.shape[-1]), axes)
    return (
        (array.elements, array.scales),
        codec.decode(array, x.dtype, axes),
        codec.rounded(x, -1, jnp.bfloat16, axes),
        codec.rounded_along_both(x, jnp.bfloat16, axes),
        codec.decode_rows(rows, jnp.bfloat16, axes).reshape(x.shape),
    )


def test_kernels_run_in_shard_map_vmap_and_scan_and_again():
    x = drawn(rarely_wild, (4, 96, 160), jnp.float32)

    def scanned(x):
        return jax.lax.scan(lambda _, one: (None, convert_all(one)), None, x)[1]

    for step in (convert_all, jax.vmap(convert_all), scanned):
        compare("jax_mok_round", step, convert_all, x)
    want = jax.jit(convert_all)(jax.device_put(x, jax.devices("cpu")[0]))
    for ranks in rank_counts():
        mesh = mesh_of(ranks)
        mapped = jax.jit(jax.shard_map(convert_all, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("ep")))
        for _ in range(5):  # XLA may capture the calls in a graph from the second run on
            assert_same_bits(mapped(placed), want)


def test_plain_jax_on_gpus_has_the_same_bits():
    x = drawn(wild, (3, 64, 96), jnp.float32)
    compare("", defined, defined, x)
    step = of(defined_rounding, dtype=jnp.float32)
    compare("", step, step, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_prepared_with_the_bits_of_the_definition(dtype):
    rng = np.random.default_rng(3)
    weights = [
        rng.standard_normal(shape).astype(np.float32)
        for shape in [(8, 64, 96), (8, 64, 96), (8, 96, 64)]
    ]
    prepare = functools.partial(jax_mok.prepare_weights, dtype=dtype, backward=True)
    want = jax.jit(prepare)(*jax.device_put(weights, jax.devices("cpu")[0]))
    for ranks in rank_counts():
        mesh = mesh_of(ranks)
        mapped = jax.shard_map(prepare, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        placed = jax.device_put(weights, jax.sharding.NamedSharding(mesh, P("ep")))
        compiled = jax.jit(mapped).lower(*placed).compile()
        assert compiled.as_text().count("jax_mok_round") >= len(weights)
        assert_same_bits(compiled(*placed), want)


def test_the_collective_layer_in_mxfp8_is_as_defined():
    rng = np.random.default_rng(4)
    routes = routings.zipf(rng, 1, 192, 3, 8)
    bfloat16 = jnp.dtype(jnp.bfloat16)
    inputs = harness.draw_inputs(rng, routes, experts=8, dtype=bfloat16, hidden=96, inner=64)
    config = MoEConfig(precision="mxfp8", composition="collective")
    want = mx_oracle.layer(inputs)
    for ranks in rank_counts():
        oracle.assert_close(harness.run_layer_on(mesh_of(ranks), inputs, config), want, 8e-3)
