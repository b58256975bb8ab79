"""MXFP8 against its definition in float64 and ml_dtypes' own types."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok.quantize import BLOCK, MXArray, dequantize, quantize, rounded

CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
POSITIVE = np.unique(CODES[np.isfinite(CODES) & (CODES >= 0)])  # in the order of their codes


def definition(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elements and scales of float64 [count, 32], both as numbers."""
    finite = np.isfinite(blocks)
    flushed = np.where(np.abs(blocks) < 2.0**-126, 0, blocks)
    largest = np.max(np.where(finite, np.abs(flushed), 0), axis=1)
    scales = np.full(len(blocks), 2.0**-127)
    for exponent in range(-126, 128):
        scales = np.where(largest > 448 * scales, 2.0**exponent, scales)
    values = np.abs(np.where(finite, flushed, 0)) / scales[:, None]
    above = np.searchsorted(POSITIVE, values).clip(1, len(POSITIVE) - 1)
    low, high = POSITIVE[above - 1], POSITIVE[above]
    middle = (low + high) / 2
    low_is_even = (above - 1) % 2 == 0
    nearest = np.where((values > middle) | ((values == middle) & ~low_is_even), high, low)
    nearest = np.where(values == high, high, nearest)
    return np.where(finite, np.copysign(nearest, blocks), np.nan), scales


def assert_as_defined(x: np.ndarray) -> None:
    """float32 [count, 32]."""
    found = jax.jit(quantize)(x)
    elements, scales = definition(x.astype(np.float64))
    np.testing.assert_array_equal(np.asarray(found.scales)[:, 0].astype(np.float64), scales)
    got = np.asarray(found.elements).astype(np.float64)
    np.testing.assert_array_equal(got, elements)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x), "zeros keep their sign")


def test_random_numbers_of_all_magnitudes():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2000, BLOCK)) * 2.0 ** generator.uniform(-140, 120, (2000, 1))
    assert_as_defined(x.astype(np.float32))
    assert_as_defined((x * 2.0 ** generator.integers(-20, 8, x.shape)).astype(np.float32))


@pytest.mark.parametrize("exponent", [-127, -126, -100, -1, 0, 1, 60, 119])
def test_every_code_comes_back_and_ties_go_to_the_even_one(exponent):
    numbers = np.concatenate([POSITIVE, -POSITIVE, (POSITIVE[:-1] + POSITIVE[1:]) / 2])
    blocks = np.zeros((len(numbers), BLOCK))
    blocks[:, 0], blocks[:, 1] = 448, numbers  # the first sets the scale
    x = (blocks * 2.0**exponent).astype(np.float32)
    assert_as_defined(x)
    if exponent > -110:
        back = np.asarray(dequantize(quantize(x), jnp.float32))
        codes = np.abs(numbers)[: 2 * len(POSITIVE)] * 2.0**exponent
        np.testing.assert_array_equal(np.abs(back[: 2 * len(POSITIVE), 1]), codes)


def test_every_scale_is_used_and_no_element_is_beyond_the_largest():
    largest = np.ldexp(1.0, np.arange(-126, 128)).astype(np.float32)
    for factor in (1.0, 1.75, np.nextafter(np.float32(1.75), np.float32(2)), 1.9999999):
        x = np.zeros((len(largest), BLOCK), np.float32)
        x[:, 5] = largest * np.float32(factor)
        assert_as_defined(x)


def test_zeros_and_numbers_that_are_flushed():
    x = np.zeros((4, BLOCK), np.float32)
    x[1], x[2, 3], x[3, 4] = -0.0, 1e-40, 2.0**-126
    assert_as_defined(np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x))
    assert np.asarray(quantize(x).scales)[:3].view(np.uint8).tolist() == [[0]] * 3
    assert not np.any(np.asarray(dequantize(quantize(x[:3]))).astype(np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_nan_alone(value):
    x = np.random.default_rng(1).standard_normal((3, BLOCK)).astype(np.float32)
    want = np.asarray(dequantize(quantize(x))).astype(np.float32)
    spoilt = x.copy()
    spoilt[1, np.argmin(np.abs(x[1]))] = value
    back = np.asarray(dequantize(quantize(spoilt))).astype(np.float32)
    assert np.count_nonzero(np.isnan(back)) == 1
    np.testing.assert_array_equal(back[np.isfinite(spoilt)], want[np.isfinite(spoilt)])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_blocks_lie_along_the_axis_and_bfloat16_holds_all(axis, dtype):
    x = np.random.default_rng(2).standard_normal((64, 96, 32)).astype(dtype)
    array = quantize(x, axis)
    array.check()
    moved = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    elements, scales = definition(moved.reshape(-1, BLOCK).astype(np.float64))
    want = np.moveaxis((elements * scales[:, None]).reshape(moved.shape), -1, axis)
    for back in (dequantize(array), dequantize(array, jnp.float32)):
        np.testing.assert_array_equal(np.asarray(back, np.float64), want)
    assert array.nbytes * 32 == x.size * 33


def test_it_is_a_pytree_that_shards_and_its_axis_stays_when_axes_are_added():
    mesh = Mesh(np.array(jax.devices()[:4]), ("ep",))
    x = np.random.default_rng(3).standard_normal((8, 64, 32)).astype(np.float32)
    array = jax.device_put(quantize(x, 1), NamedSharding(mesh, P("ep")))
    assert len(array.scales.addressable_shards) == 4
    whole = np.asarray(dequantize(array))
    by_expert = jax.vmap(dequantize)(array)
    np.testing.assert_array_equal(np.asarray(by_expert, np.float32), whole.astype(np.float32))
    assert jax.tree.map(lambda leaf: leaf, array) == array


def test_the_gradient_goes_straight_through():
    x = jnp.asarray(np.random.default_rng(4).standard_normal((4, 32)), jnp.float32)
    y, pullback = jax.vjp(rounded, x)
    np.testing.assert_array_equal(y, dequantize(quantize(x), jnp.float32))
    np.testing.assert_array_equal(pullback(x)[0], x)


def test_what_does_not_fit_is_named():
    x = np.zeros((4, 48), np.float32)
    with pytest.raises(jax_mok.MoEInputError, match=r"has 48 along axis 1; .* a multiple of 32"):
        quantize(x, 1)
    with pytest.raises(jax_mok.MoEInputError, match="axis=2 is none of the 2"):
        quantize(x, 2)
    good = quantize(np.zeros((4, 64), np.float32))
    bad_scales = MXArray(good.elements, good.scales[:, :1], -1)
    with pytest.raises(
        jax_mok.MoEInputError, match=r"scales are \w+\[4, 1\]; .* float8_e8m0fnu\[4, 2\]"
    ):
        dequantize(bad_scales)
    e5m2 = MXArray(good.elements.astype(jnp.float8_e5m2), good.scales, -1)
    with pytest.raises(jax_mok.MoEInputError, match=r"dtype float8_e5m2; .* float8_e4m3fn"):
        dequantize(e5m2)
