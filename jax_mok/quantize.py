"""OCP MXFP8: elements of 8 bits, and for every 32 of them along one axis a power of two.

The format is that of "OCP Microscaling Formats (MX) Specification", version 1.0: elements E4M3
(`jnp.float8_e4m3fn`: bias 7, no infinities, at most 448), scales E8M0 (`jnp.float8_e8m0fnu`: a
biased exponent, bias 127, 255 is NaN). The specification leaves the choice of the scale to the
implementation; here it is the least power of two with which no element of the block is beyond 448,
and 2⁻¹²⁷ for a block of zeros:

    exponent = max(⌈log₂(amax / 448)⌉, −127),  element = round(x / 2^exponent)

to the nearest, ties to the even one. What is not finite becomes NaN, alone: the block's scale is
that of its finite elements. Numbers below 2⁻¹²⁶ count as zeros. `cuda/core/mx.h` has the same bits.

Elements are no place for a gradient, which JAX would keep in their 8 bits. Rounding counts as the
identity (straight through), and gradients go to the array that was quantised, its master:
`quantize(x, axis, keep_master=True)` keeps it beside the elements. To differentiate an MXArray
without one, or its elements, raises.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_mok.errors import MoEInputError
from jax_mok.transforms import refuse_derivative

BLOCK = 32
"""Elements along the contraction that share a scale."""

_BIAS = 127  # of scales, and of float32
_MANTISSA_BITS = 23
_SIGN = 0x80000000
_INFINITY = 0x7F800000
_LEAST_NORMAL = 0x00800000
# 448 is 1.75 · 2^8: an amax with a larger mantissa than 1.75 needs the next power of two.
_LARGEST_EXPONENT = 8
_LARGEST_MANTISSA = 0x600000
_ELEMENT_BIAS, _ELEMENT_MANTISSA_BITS = 7, 3
_ELEMENT_NAN = 0x7F
_NO_GRADIENT = (
    "the elements of an MXArray have no gradient, which 8 bits could not hold: differentiate the "
    "array that is quantised, with quantize(x, axis, keep_master=True), or hold that constant with "
    "jax.lax.stop_gradient"
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["elements", "scales", "master"],
    meta_fields=["axis"],
)
@dataclasses.dataclass(frozen=True)
class MXArray:
    """An array in MXFP8; a pytree, so it goes through `jit`, `scan`, `device_put` and checkpoints.

    Where a tree of shardings or specs is asked for, one for the array is enough: it fits elements
    and scales, as long as it cuts the axis with the blocks between blocks. Zeros are no scales:
    float8_e8m0fnu has no zero, and JAX makes it NaN.

    Attributes:
      elements: float8_e4m3fn, of the array's shape.
      scales: float8_e8m0fnu; of the array's shape, but along `axis` a 32nd of it.
      axis: which axis has the blocks, an int counted from the end: −1 is the last one.
      master: the array that was quantised, of any float dtype, to which gradients go; or None,
        which is what to store.
    """

    elements: jax.Array
    scales: jax.Array
    axis: int
    master: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.elements.shape

    @property
    def ndim(self) -> int:
        """Of the array."""
        return self.elements.ndim

    @property
    def nbytes(self) -> int:
        """Of elements and scales."""
        return self.elements.nbytes + self.scales.nbytes

    def check(self, name: str = "MXArray") -> None:
        """Looks whether the parts belong together.

        Args:
          name: what messages call the array.

        Raises:
          MoEInputError: if they do not.
        """
        for part in ("elements", "scales", "master"):
            value = getattr(self, part)
            if not _is_array(value) and not (part == "master" and value is None):
                raise MoEInputError(
                    f"{name}.{part} must be an array, got {type(value).__name__}: make an MXArray "
                    "with jax_mok.quantize.quantize"
                )
        if self.elements.dtype != jnp.float8_e4m3fn:
            raise MoEInputError(
                f"{name}.elements have dtype {self.elements.dtype}; MXFP8 has float8_e4m3fn here: "
                "convert with jax_mok.quantize.quantize"
            )
        if not self.shape:
            raise MoEInputError(
                f"{name} is a scalar, which has no axis for blocks of {BLOCK}: give an array"
            )
        if type(self.axis) is not int or not -self.ndim <= self.axis < 0:
            raise MoEInputError(
                f"{name}.axis={self.axis!r} must be an int from {-self.ndim} to -1: it is counted "
                "from the end, so that it stays where axes are added in front"
            )
        _check_length(self.shape, self.axis)
        wanted = list(self.shape)
        wanted[self.axis] //= BLOCK
        if self.scales.dtype != jnp.float8_e8m0fnu or list(self.scales.shape) != wanted:
            advice = "make both with jax_mok.quantize.quantize"
            if self.scales.dtype == jnp.uint8:
                advice = (
                    "for biased exponents in uint8 use "
                    "jax.lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu)"
                )
            raise MoEInputError(
                f"{name}.scales are {self.scales.dtype}{list(self.scales.shape)}; elements "
                f"{list(self.shape)} in blocks of {BLOCK} along axis {self.axis} have "
                f"float8_e8m0fnu{wanted}: {advice}"
            )
        if self.master is None:
            return
        if not jnp.issubdtype(self.master.dtype, jnp.floating):
            raise MoEInputError(
                f"{name}.master has dtype {self.master.dtype}; gradients go to floats: give a "
                "float master, or None"
            )
        if self.master.shape != self.shape:
            raise MoEInputError(
                f"{name}.master has shape {list(self.master.shape)}; that of the elements is "
                f"{list(self.shape)}: give the array that was quantised, or None"
            )


def quantize(x: jax.Array | np.ndarray, axis: int = -1, *, keep_master: bool = False) -> MXArray:
    """To MXFP8, by the rule above.

    Args:
      x: of any shape and any float dtype up to float32; its length along the axis is a multiple
        of 32.
      axis: the contraction of the product that x will be in; of the array it is counted from the
        end.
      keep_master: x becomes the array's master, to which gradients go.

    Raises:
      MoEInputError: for another length or dtype, an axis that x does not have, or no array.
      MoEError: if x is differentiated, and is not kept.
    """
    if isinstance(x, MXArray):
        raise MoEInputError(
            "x is an MXArray, in MXFP8 already: give the float array, or for blocks along another "
            "axis jax_mok.quantize.dequantize(x)"
        )
    if not _is_array(x):
        raise MoEInputError(f"x must be an array, got {type(x).__name__}: use jnp.asarray")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise MoEInputError(
            f"x has dtype {x.dtype}; MXFP8 is made of floats up to float32: convert with "
            ".astype(jnp.float32)"
        )
    _check_length(x.shape, axis)
    return _quantize(x, _axis(axis, x.ndim) - x.ndim, keep_master=keep_master)


@functools.partial(jax.jit, static_argnames=("axis", "keep_master"))
def _quantize(master: jax.Array, axis: int, *, keep_master: bool) -> MXArray:
    fixed = jax.lax.stop_gradient(master) if keep_master else without_gradient(master)
    x = fixed.astype(jnp.float32)
    place = axis % x.ndim
    outside, length = _without(x.shape, place), x.shape[place]
    blocks = jnp.moveaxis(x, place, -1).reshape(*outside, length // BLOCK, BLOCK)
    bits = jax.lax.bitcast_convert_type(blocks, jnp.uint32)
    magnitudes = bits & ~jnp.uint32(_SIGN)
    is_finite = magnitudes < _INFINITY
    # Of floats that are not negative the bits have the same order.
    largest = jnp.max(jnp.where(is_finite, magnitudes, 0), axis=-1)
    scales = _scale_of(largest)
    # Not all devices flush what is below the least normal number.
    finite = jnp.where((magnitudes >= _LEAST_NORMAL) & is_finite, blocks, 0)
    codes = jnp.where(is_finite, _round(finite, scales[..., None]), _ELEMENT_NAN)
    signs = (bits >> 24 & 0x80).astype(jnp.uint8)
    elements = jax.lax.bitcast_convert_type(codes.astype(jnp.uint8) | signs, jnp.float8_e4m3fn)
    elements = jnp.moveaxis(elements.reshape(*outside, length), -1, place)
    scales = jax.lax.bitcast_convert_type(jnp.moveaxis(scales, -1, place), jnp.float8_e8m0fnu)
    return MXArray(elements, scales, axis, master if keep_master else None)


def dequantize(array: MXArray, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """The array in bfloat16 or float32: exact, but for numbers below 2⁻¹²⁶, which are zeros.

    Its gradient is that of the array's master (straight through).

    Args:
      array: of any shape.
      dtype: bfloat16, float32, or float16, which cannot hold all numbers of MXFP8.

    Returns:
      The values, of the array's shape.

    Raises:
      MoEInputError: if the array is no MXArray, its parts do not belong together, or for another
        dtype.
      MoEError: if elements or scales are differentiated.
    """
    if not isinstance(array, MXArray):
        raise MoEInputError(
            f"array must be an MXArray, got {type(array).__name__}: make one with "
            "jax_mok.quantize.quantize"
        )
    array.check()
    return _dequantize(array, check_dtype(dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(array: MXArray, dtype: np.dtype) -> jax.Array:
    elements, scales = without_gradient(array.elements), without_gradient(array.scales)
    place = array.axis % array.ndim
    scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    blocks = (*scales.shape[: place + 1], BLOCK, *scales.shape[place + 1 :])
    # Not jnp.repeat, which does not know how to shard its result.
    scales = jnp.broadcast_to(jnp.expand_dims(scales, place + 1), blocks)
    exponents = scales.reshape(array.shape).astype(jnp.int32) - _BIAS
    # By two factors, of which each is a normal number.
    half = exponents // 2
    values = elements.astype(jnp.float32) * _power_of_two(half)
    values = values * _power_of_two(exponents - half)
    least = jax.lax.bitcast_convert_type(jnp.uint32(_LEAST_NORMAL), jnp.float32)
    values = jnp.where(jnp.abs(values) < least, jnp.copysign(0, values), values)
    is_nan = (exponents == 255 - _BIAS) | jnp.isnan(values)
    values = jnp.where(is_nan, jnp.nan, values).astype(dtype)
    return values if array.master is None else _straight_through(array.master, values)


def rounded(x: jax.Array, axis: int = -1) -> jax.Array:
    """x as MXFP8 has it, in x's dtype; its gradient is that of x itself (straight through).

    Raises:
      MoEInputError: as `quantize`.
    """
    return dequantize(quantize(x, axis, keep_master=True), jnp.float32).astype(x.dtype)


def without_gradient(value: jax.Array) -> jax.Array:
    """The value; raises MoEError if it is differentiated."""
    return refuse_derivative(value, _NO_GRADIENT)


@jax.custom_jvp
def _straight_through(master: jax.Array, values: jax.Array) -> jax.Array:
    """values, with the derivative of master."""
    return values


@_straight_through.defjvp
def _straight_through_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    _, values = primals
    return values, tangents[0].astype(values.dtype)


def _scale_of(largest: jax.Array) -> jax.Array:
    """uint8 biased exponents, of the bits of finite magnitudes."""
    exponent = (largest >> _MANTISSA_BITS).astype(jnp.int32) - _LARGEST_EXPONENT
    exponent += (largest & 0x7FFFFF) > _LARGEST_MANTISSA
    return jnp.clip(exponent, 0, 254).astype(jnp.uint8)


def _round(values: jax.Array, scales: jax.Array) -> jax.Array:
    """int32 codes of |values| / scale in E4M3."""
    exponents = _BIAS - scales.astype(jnp.int32)
    half = exponents // 2
    scaled = jnp.abs(values) * _power_of_two(half) * _power_of_two(exponents - half)
    bits = jax.lax.bitcast_convert_type(scaled, jnp.uint32)
    exponent = (bits >> _MANTISSA_BITS).astype(jnp.int32) - _BIAS
    exponent = jnp.maximum(exponent, 1 - _ELEMENT_BIAS)  # below it all steps are equal
    steps = jnp.rint(scaled * _power_of_two(_ELEMENT_MANTISSA_BITS - exponent)).astype(jnp.int32)
    # Codes go on from one exponent to the next, so a carry needs no care.
    return ((exponent + _ELEMENT_BIAS - 1) << _ELEMENT_MANTISSA_BITS) + steps


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """float32, for exponents of normal numbers."""
    bits = (exponent + _BIAS).astype(jnp.uint32) << _MANTISSA_BITS
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _axis(axis: int, dimensions: int) -> int:
    if not dimensions:
        raise MoEInputError(
            f"axis={axis!r}, but a scalar has no axis for blocks of {BLOCK}: give an array"
        )
    is_whole = isinstance(axis, numbers.Integral) and not isinstance(axis, bool)
    if not is_whole or not -dimensions <= axis < dimensions:
        raise MoEInputError(
            f"axis={axis!r} must be an integer from {-dimensions} to {dimensions - 1}"
        )
    return int(axis) % dimensions


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def check_dtype(dtype: DTypeLike, allowed: Sequence[DTypeLike], why: str = "") -> np.dtype:
    """The dtype, if it is one of those allowed; refuses anything else."""
    # NumPy takes None for float64.
    name = repr(dtype)
    if dtype is not None:
        try:
            found = jnp.dtype(dtype)
        except (TypeError, ValueError):
            pass
        else:
            if found in [jnp.dtype(one) for one in allowed]:
                return found
            name = found.name
    *most, last = (jnp.dtype(one).name for one in allowed)
    raise MoEInputError(f"dtype={name} must be {', '.join(most)} or {last}{why}")


def _check_length(shape: tuple[int, ...], axis: int) -> None:
    """Refuses a length of which nothing is made."""
    length = shape[_axis(axis, len(shape))]
    if length % BLOCK:
        raise MoEInputError(
            f"shape {list(shape)} has {length} along axis {axis}; MXFP8 has blocks of {BLOCK} "
            f"there: use a multiple of {BLOCK}"
        )
