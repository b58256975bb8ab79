"""MXFP8 against its definition in float64 and ml_dtypes' own types."""

import functools

import jax
import jax.numpy as jnp
import mx_oracle
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mx_oracle import POSITIVE, blocks_in_mx

import jax_mok
from jax_mok import codec
from jax_mok.quantize import BLOCK, MXArray, dequantize, quantize, rounded


def assert_as_defined(x: np.ndarray) -> None:
    """float32 [count, 32]."""
    found = jax.jit(quantize)(x)
    elements, scales = blocks_in_mx(x.astype(np.float64))
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
    want = mx_oracle.rounded(x, axis)
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


def bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def all_bfloat16() -> np.ndarray:
    """Each of the 2^16 beside others of all magnitudes."""
    codes = np.random.default_rng(5).permutation(2**16).astype(np.uint16)
    return codes.view(jnp.bfloat16).reshape(-1, BLOCK)


def any_float32() -> np.ndarray:
    """Random bits: subnormals, infinities and NaN among them; then blocks near a magnitude."""
    generator = np.random.default_rng(6)
    wild = generator.integers(0, 2**32, (2048, BLOCK), np.uint32).view(np.float32)
    tame = generator.standard_normal((2048, BLOCK)) * 2.0 ** generator.integers(
        -150, 120, (2048, 1)
    )
    return np.concatenate([wild, tame.astype(np.float32)])


@pytest.mark.parametrize("draw", [all_bfloat16, any_float32])
@pytest.mark.parametrize("axis", [-1, -2])
def test_custom_calls_have_the_same_bits(draw, axis):
    x = draw() if axis == -1 else draw().T
    want = jax.jit(functools.partial(quantize, axis=axis))(x)
    got = jax.jit(lambda x: codec.encode(x, axis, frozenset()))(jnp.asarray(x))
    np.testing.assert_array_equal(bits(got.elements), bits(want.elements))
    np.testing.assert_array_equal(bits(got.scales), bits(want.scales))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_custom_calls_have_the_same_bits_for_every_element_with_every_scale(dtype):
    codes = np.arange(256, dtype=np.uint8)
    elements = np.repeat(codes.reshape(1, 8, 32), 256, axis=0).reshape(256, 256)
    scales = np.repeat(codes, 8).reshape(256, 8)
    array = MXArray(
        jnp.asarray(elements.view(jnp.float8_e4m3fn)),
        jnp.asarray(scales.view(jnp.float8_e8m0fnu)),
        -1,
    )
    want = jax.jit(functools.partial(dequantize, dtype=dtype))(array)
    got = jax.jit(lambda array: codec.decode(array, dtype, frozenset()))(array)
    np.testing.assert_array_equal(bits(got), bits(want))
    exact = mx_oracle.CODES[elements] * np.ldexp(1.0, codes.astype(int) - 127)[:, None]
    exact = np.where(np.abs(exact) < 2.0**-126, np.copysign(0, exact), exact)
    exact[255] = np.nan
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.asarray(want, np.float32), exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("draw", [all_bfloat16, any_float32])
def test_what_custom_calls_round_has_the_same_bits(draw, dtype):
    x = jnp.asarray(draw().reshape(2, 32, -1))
    along, none = [dequantize(quantize(x, axis), dtype) for axis in (-2, -1)], frozenset()
    for axis, want in zip((-2, -1), along, strict=True):
        got = jax.jit(lambda x, axis=axis: codec.rounded(x, axis, dtype, none))(x)
        np.testing.assert_array_equal(bits(got), bits(want))
    both = jax.jit(lambda x: codec.rounded_along_both(x, dtype, none))(x)
    for got, want in zip(both, along, strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))


def test_custom_calls_are_batched():
    x = jnp.asarray(any_float32().reshape(2, 4, 64, -1))

    def convert(x):
        array = codec.encode(x, -2, frozenset())
        values = codec.decode(array, jnp.float32, frozenset())
        along = codec.rounded_along_both(x, jnp.float32, frozenset())
        return array.elements, array.scales, values, along

    want = jax.jit(convert)(x)
    got = jax.jit(jax.vmap(jax.vmap(convert)))(x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


def test_rows_come_back_from_what_is_moved():
    x = jnp.asarray(np.random.default_rng(7).standard_normal((8, 96)), jnp.bfloat16)
    rows = jax.jit(lambda x: codec.encode_rows(x, frozenset()))(x)
    assert (rows.shape, rows.dtype) == ((8, 99), np.uint8)
    back = jax.jit(lambda rows: codec.decode_rows(rows, jnp.bfloat16, frozenset()))(rows)
    np.testing.assert_array_equal(bits(back), bits(dequantize(quantize(x))))


def test_a_spec_that_cuts_the_blocks_axis_fits_elements_and_scales():
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    x = np.random.default_rng(8).standard_normal((2, 256, 32)).astype(np.float32)
    array = jax.device_put(quantize(x, 1), NamedSharding(mesh, P(None, "tp")))
    assert array.scales.addressable_shards[0].data.shape == (2, 2, 32)
    local = jax.shard_map(dequantize, mesh=mesh, in_specs=P(None, "tp"), out_specs=P(None, "tp"))
    np.testing.assert_array_equal(bits(jax.jit(local)(array)), bits(dequantize(array)))


def test_it_goes_through_scan_and_comes_back_from_checkpoints(tmp_path):
    x = np.random.default_rng(9).standard_normal((4, 64, 32)).astype(np.float32)
    array = quantize(x, 1)
    scanned = jax.lax.scan(lambda _, one: (None, dequantize(one)), None, array)[1]
    np.testing.assert_array_equal(bits(scanned), bits(dequantize(array)))

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "array", {"w": array})
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "array", {"w": array})["w"]
    assert isinstance(back, MXArray)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(array), strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))


def test_gradients_go_to_the_master_unrounded():
    x = jnp.asarray(np.random.default_rng(10).standard_normal((2, 64)), jnp.float32)
    direction = jnp.asarray(np.random.default_rng(11).standard_normal((2, 64)), jnp.float32)

    def loss(x):
        array = quantize(x, keep_master=True)
        return jnp.sum(dequantize(array, jnp.float32) * direction)

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.checkpoint(loss))):
        np.testing.assert_array_equal(gradient(x), direction)


def test_what_has_no_gradient_says_where_there_is_one():
    x = jnp.ones((2, 64))

    def sum_of(array):
        return jnp.sum(dequantize(array, jnp.float32))

    with pytest.raises(jax_mok.MoEError, match=r"no gradient.*keep_master=True"):
        jax.grad(lambda x: sum_of(quantize(x)))(x)
    with pytest.raises(jax_mok.MoEError, match=r"no gradient.*keep_master=True"):
        jax.grad(sum_of)(quantize(x))
    beside = jax.grad(lambda y, array: jnp.sum(y * dequantize(array, jnp.float32)))(x, quantize(x))
    np.testing.assert_array_equal(beside, 1)


def test_the_gradient_goes_straight_through():
    x = jnp.asarray(np.random.default_rng(4).standard_normal((4, 32)), jnp.float32)
    y, pullback = jax.vjp(rounded, x)
    np.testing.assert_array_equal(y, dequantize(quantize(x), jnp.float32))
    np.testing.assert_array_equal(pullback(x)[0], x)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_nothing_stays_nothing(shape):
    x = jnp.zeros(shape)
    for y in (rounded(x), jax.jit(lambda x: codec.rounded(x, -1, x.dtype, frozenset()))(x)):
        assert (y.shape, y.dtype) == (shape, x.dtype)


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
    with pytest.raises(jax_mok.MoEInputError, match="x has dtype int32; MXFP8 is made of floats"):
        quantize(np.zeros((4, 32), np.int32))
    other_master = MXArray(good.elements, good.scales, -1, jnp.zeros((4, 32)))
    with pytest.raises(jax_mok.MoEInputError, match=r"master has shape \[4, 32\]; .* \[4, 64\]"):
        dequantize(other_master)
    e5m2 = MXArray(good.elements.astype(jnp.float8_e5m2), good.scales, -1)
    with pytest.raises(jax_mok.MoEInputError, match=r"dtype float8_e5m2; .* float8_e4m3fn"):
        dequantize(e5m2)
