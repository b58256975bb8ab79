"""MXFP8 against its definition in float64 and ml_dtypes' own types."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import mx_oracle
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mx_oracle import POSITIVE, blocks_in_mx

import jax_mok
from jax_mok import codec
from jax_mok.quantize import BLOCK, MXArray, dequantize, quantize, rounded
from jax_mok.sharding import varying_axes


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


def converted(x: jax.Array) -> list[jax.Array]:
    """By every call that takes x."""
    array = codec.encode(x, -1, frozenset())
    along = codec.rounded(x, -2, jnp.float32, frozenset())
    both = codec.rounded_along_both(x, jnp.bfloat16, frozenset())
    return [array.elements, array.scales, along, *both]


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "float8_e4m3fn", "float64"])
def test_custom_calls_read_any_float_dtype(dtype):
    x = np.random.default_rng(12).standard_normal((64, 96)).astype(dtype)
    want = converted(jnp.asarray(x.astype(np.float32)))
    with jax.enable_x64(True):
        got = jax.jit(converted)(jnp.asarray(x))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


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


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("spec", [P("ep"), P(None, "ep"), P(None, None, "ep")])
def test_an_explicitly_sharded_array_keeps_its_sharding(spec, axis):
    x = np.random.default_rng(13).standard_normal((128, 128, 128)).astype(np.float32)
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Explicit,))
    want = quantize(x, axis)
    with jax.set_mesh(mesh):
        array = quantize(jax.device_put(x, NamedSharding(mesh, spec)), axis)
        back = dequantize(array)
    for part in (array.elements, array.scales, back):
        assert jax.typeof(part).sharding.spec == P(*spec, *[None] * (3 - len(spec)))
    np.testing.assert_array_equal(bits(array.scales), bits(want.scales))
    np.testing.assert_array_equal(bits(back), bits(dequantize(want)))


@pytest.mark.parametrize("axis", [np.int64(-2), np.uint8(0), -2])
def test_the_axis_is_an_int_counted_from_the_end(axis):
    array = quantize(np.zeros((64, 3), np.float32), axis)
    assert (type(array.axis), array.axis) == (int, -2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2])
def test_what_is_rounded_keeps_its_dtype(dtype):
    x = jnp.asarray(np.random.default_rng(14).standard_normal((4, 64)), dtype)
    want = mx_oracle.rounded(np.asarray(x, np.float64), -1)
    y, pullback = jax.vjp(rounded, x)
    np.testing.assert_array_equal(bits(y), bits(want.astype(np.float32).astype(dtype)))
    np.testing.assert_array_equal(bits(pullback(x)[0]), bits(x))


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


@pytest.mark.parametrize("shape", [(0, 64, 32), (4, 0, 32), (4, 64, 0)])
def test_nothing_stays_nothing_inside_shard_map(shape):
    def convert(x):
        axes = varying_axes(x)
        array = codec.encode(x, -2, axes)
        # Scales that are the same everywhere, beside elements that are not.
        ones = jax.lax.bitcast_convert_type(
            jnp.full(array.scales.shape, 127, jnp.uint8), jnp.float8_e8m0fnu
        )
        same = codec.decode(dataclasses.replace(array, scales=ones), x.dtype, frozenset())
        return (
            (array.elements, codec.decode(array, jnp.bfloat16, axes), same),
            (codec.rounded(x, -1, x.dtype, axes), *codec.rounded_along_both(x, x.dtype, axes)),
        )

    mesh = Mesh(np.array(jax.devices()[:4]), ("ep",))
    mapped = jax.shard_map(convert, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    found = jax.tree.leaves(jax.jit(mapped)(jnp.zeros(shape)))
    assert [y.shape for y in found] == [shape] * len(found)


def mx(**changes) -> MXArray:
    """Of zeros [4, 64], with other parts."""
    return dataclasses.replace(quantize(np.zeros((4, 64), np.float32)), **changes)


@pytest.mark.parametrize(
    ("x", "axis", "message"),
    [
        (np.zeros((4, 48), np.float32), 1, r"has 48 along axis 1; .* use a multiple of 32"),
        (np.zeros((4, 64), np.float32), 2, "axis=2 must be an integer from -2 to 1"),
        (np.zeros((4, 64), np.float32), -3, "axis=-3 must be an integer from -2 to 1"),
        (np.zeros((4, 64), np.float32), 1.0, r"axis=1\.0 must be an integer from -2 to 1"),
        (np.zeros((4, 64), np.float32), True, "axis=True must be an integer from -2 to 1"),
        (np.zeros((4, 64), np.float32), None, "axis=None must be an integer from -2 to 1"),
        (np.zeros((4, 64), np.float32), [1], r"axis=\[1\] must be an integer from -2 to 1"),
        (np.float32(1), -1, "a scalar has no axis for blocks of 32: give an array"),
        (np.zeros((4, 32), np.int32), -1, r"x has dtype int32; .*floats up.*astype\(jnp.float32\)"),
        (np.zeros((4, 32)), -1, r"x has dtype float64; .*floats up to float32: convert"),
        (np.zeros((4, 32), bool), -1, "x has dtype bool; MXFP8 is made of floats"),
        ([0.0] * 32, -1, r"x must be an array, got list: use jnp\.asarray"),
        (None, -1, "x must be an array, got NoneType"),
        (mx(), -1, r"x is an MXArray, in MXFP8 already: .*dequantize\(x\)"),
    ],
)
@pytest.mark.parametrize("convert", [quantize, rounded])
def test_what_cannot_be_quantised_is_named(convert, x, axis, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        convert(x, axis)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda: {"scales": mx().scales[:, :1]}, r"\[4, 1\]; .* float8_e8m0fnu\[4, 2\]: make both"),
        (
            lambda: {"scales": np.zeros((4, 2), np.uint8)},
            r"scales are uint8\[4, 2\]; .*: for biased exponents in uint8 use "
            r"jax\.lax\.bitcast_convert_type\(scales, jnp\.float8_e8m0fnu\)",
        ),
        (
            lambda: {"master": jnp.zeros((4, 32))},
            r"master has shape \[4, 32\]; .* \[4, 64\]: give the array that was quantised, or None",
        ),
        (
            lambda: {"master": jnp.zeros((4, 64), jnp.int32)},
            "MXArray.master has dtype int32; .* give a float master, or None",
        ),
        (lambda: {"master": [0.0]}, "MXArray.master must be an array, got list: make an MXArray"),
        (lambda: {"scales": None}, "MXArray.scales must be an array, got NoneType"),
        (lambda: {"elements": 1.0}, "MXArray.elements must be an array, got float"),
        (
            lambda: {"elements": mx().elements.astype(jnp.float8_e5m2)},
            "dtype float8_e5m2; .* float8_e4m3fn",
        ),
        (lambda: {"elements": mx().elements[:, :48]}, "has 48 along axis -1; .* multiple of 32"),
        (lambda: {"elements": mx().elements[0, 0]}, "MXArray is a scalar, which has no axis"),
        (lambda: {"axis": 1}, r"MXArray\.axis=1 must be an int from -2 to -1: it is counted from"),
        (lambda: {"axis": -3}, r"MXArray\.axis=-3 must be an int from -2 to -1"),
        (lambda: {"axis": -1.0}, r"MXArray\.axis=-1\.0 must be an int from -2 to -1"),
        (lambda: {"axis": np.int64(-1)}, r"MXArray\.axis=.*-1.* must be an int from -2 to -1"),
        (lambda: {"axis": None}, r"MXArray\.axis=None must be an int from -2 to -1"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(changes, message):
    array = mx(**changes())
    with pytest.raises(jax_mok.MoEInputError, match=message):
        dequantize(array)
    with pytest.raises(jax_mok.MoEInputError, match=message.replace("MXArray", "w", 1)):
        array.check("w")


@pytest.mark.parametrize("array", [np.zeros((4, 64), np.float32), None, "array"])
def test_only_an_mxarray_is_dequantised(array):
    with pytest.raises(jax_mok.MoEInputError, match=r"array must be an MXArray, got \w+: make one"):
        dequantize(array)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
        (np.float64, "float64"),
        ("int32", "int32"),
        (None, "None"),
        ("float31", "'float31'"),
    ],
)
def test_dtypes_there_are(dtype, name):
    with pytest.raises(
        jax_mok.MoEInputError, match=f"dtype={name} must be float32, bfloat16 or float16"
    ):
        dequantize(mx(), dtype)
