"""MXFP8 inside the layer: the codec of `jax_mok.quantize` by custom calls, where there are any.

There are some on CPU devices, and on GPUs for which kernels were built. All have the same bits. All
is for arrays that nobody differentiates, on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_mok import ffi, gpu, quantize
from jax_mok.quantize import BLOCK, MXArray
from jax_mok.sharding import vary, vary_all, varying_axes


def encode(x: jax.Array, axis: int, axes: frozenset[str]) -> MXArray:
    """x, of any float dtype, in MXFP8; `axis` is counted from the end, `axes` as for `ffi.call`."""

    def by_call(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        outer, length, inner = _around(x.shape, axis)
        results = [
            jax.ShapeDtypeStruct((outer, length, inner), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((outer, length // BLOCK, inner), jnp.float8_e8m0fnu),
        ]
        operand = x.reshape(outer, length, inner)
        elements, scales = _call("jax_mok_quantize", results, [operand], axes)
        return elements.reshape(x.shape), scales.reshape(_scales_shape(x.shape, axis))

    def in_jax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        array = quantize.quantize(x, axis)
        return array.elements, array.scales

    elements, scales = _where_built(by_call, in_jax, vary(_readable(x), axes))
    return MXArray(elements, scales, axis)


def decode(array: MXArray, dtype: DTypeLike, axes: frozenset[str]) -> jax.Array:
    """The array in float32 or bfloat16."""

    def by_call(elements: jax.Array, scales: jax.Array) -> jax.Array:
        outer, length, inner = _around(array.shape, array.axis)
        operands = [
            elements.reshape(outer, length, inner),
            scales.reshape(outer, length // BLOCK, inner),
        ]
        result = jax.ShapeDtypeStruct((outer, length, inner), dtype)
        values = _call("jax_mok_dequantize", [result], operands, axes)[0]
        return values.reshape(array.shape)

    def in_jax(elements: jax.Array, scales: jax.Array) -> jax.Array:
        return quantize.dequantize(MXArray(elements, scales, array.axis), dtype)

    operands = vary(array.elements, axes), vary(array.scales, axes)
    return _where_built(by_call, in_jax, *operands)


def rounded(x: jax.Array, axis: int, dtype: DTypeLike, axes: frozenset[str]) -> jax.Array:
    """x, of any float dtype, as MXFP8 has it, in float32 or bfloat16."""

    def by_call(x: jax.Array) -> jax.Array:
        operand = x.reshape(_around(x.shape, axis))
        result = jax.ShapeDtypeStruct(operand.shape, dtype)
        return _call("jax_mok_round", [result], [operand], axes)[0].reshape(x.shape)

    def in_jax(x: jax.Array) -> jax.Array:
        return quantize.dequantize(quantize.quantize(x, axis), dtype)

    return _where_built(by_call, in_jax, vary(_readable(x), axes))


def rounded_along_both(
    x: jax.Array, dtype: DTypeLike, axes: frozenset[str]
) -> tuple[jax.Array, jax.Array]:
    """`rounded` of x along axis −2 and along axis −1, for which x is read once."""

    def by_call(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        operand = x.reshape(_around(x.shape, -2))
        results = [jax.ShapeDtypeStruct(operand.shape, dtype)] * 2
        forward, backward = _call("jax_mok_round", results, [operand], axes)
        return forward.reshape(x.shape), backward.reshape(x.shape)

    def in_jax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        forward, backward = (
            quantize.dequantize(quantize.quantize(x, axis), dtype) for axis in (-2, -1)
        )
        return forward, backward

    return _where_built(by_call, in_jax, vary(_readable(x), axes))


def encode_rows(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """uint8 [T, H + H/32] of x [T, H]: to be moved, each row's elements and then its scales."""
    array = encode(x, -1, axes)
    parts = [lax.bitcast_convert_type(part, jnp.uint8) for part in (array.elements, array.scales)]
    return jnp.concatenate(parts, axis=1)


def decode_rows(rows: jax.Array, dtype: DTypeLike, axes: frozenset[str]) -> jax.Array:
    """What `encode_rows` was given, rounded."""
    hidden = rows.shape[1] * BLOCK // (BLOCK + 1)
    elements = lax.bitcast_convert_type(rows[:, :hidden], jnp.float8_e4m3fn)
    scales = lax.bitcast_convert_type(rows[:, hidden:], jnp.float8_e8m0fnu)
    return decode(MXArray(elements, scales, -1), dtype, axes)


def _call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    axes: frozenset[str],
) -> list[jax.Array]:
    """Of arrays [outer, length, inner].

    `vmap` puts its axes before those of all operands and results, which are then [..., outer,
    length, inner]: the handlers multiply what comes before `length`.
    """
    return ffi.call(target, results, operands, {}, axes, vmap_method="broadcast_all")


_Results = TypeVar("_Results")


def _where_built(
    by_call: Callable[..., _Results],
    in_jax: Callable[..., _Results],
    *operands: jax.Array,
) -> _Results:
    """Of the two, what the platform has."""
    axes = frozenset[str]().union(*map(varying_axes, operands))

    def typed_alike(convert: Callable[..., _Results]) -> Callable[..., _Results]:
        # Of an empty array JAX makes constants, which are typed as the same on all devices; all
        # branches must have one type.
        return lambda *parts: jax.tree.map(lambda y: vary(y, axes), convert(*parts))

    platforms = {"cpu": typed_alike(by_call)}
    if gpu.has_kernels():
        platforms["cuda"] = typed_alike(by_call)
    return lax.platform_dependent(
        *vary_all(operands, axes), default=typed_alike(in_jax), **platforms
    )


def _readable(x: jax.Array) -> jax.Array:
    """x as the handlers can read it: they take for bfloat16 whatever is not float32."""
    return x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)


def _around(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """Sizes before the axis, of it, and after it."""
    place = axis % len(shape)
    return math.prod(shape[:place]), shape[place], math.prod(shape[place + 1 :])


def _scales_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    place = axis % len(shape)
    return (*shape[:place], shape[place] // BLOCK, *shape[place + 1 :])
