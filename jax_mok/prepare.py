"""Weights of the layer in MXFP8 as its products take them, rounded once for many calls.

A device's own, inside `jax.shard_map`, by the codec's custom calls; global arrays in plain JAX: XLA
partitions that over their devices, but no custom call.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_mok import codec
from jax_mok.precision import BACKWARD_AXIS, FORWARD_AXIS, PreparedWeight, Weights
from jax_mok.quantize import MXArray, dequantize, quantize, without_gradient
from jax_mok.sharding import is_in_shard_map, varying_axes
from jax_mok.validate import check_preparable


def prepare_weights(
    w_gate: jax.Array | MXArray,
    w_up: jax.Array | MXArray,
    w_down: jax.Array | MXArray,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    backward: bool = False,
) -> Weights[PreparedWeight]:
    """Rounds weights to MXFP8 once, for many calls of the layer with `precision="mxfp8"`.

    For inference, or the steps of one gradient accumulation: calls with what is returned have the
    same bits as with the weights themselves, and do not convert them again.

        prepared = jax_mok.prepare_weights(w_gate, w_up, w_down)
        y = jax_mok.moe(x, ids, weights, *prepared, mesh=mesh, axis_name="ep", config=config)

    It works on global arrays, and on a device's own inside `jax.shard_map`, where it is fastest.

    Args:
      w_gate: [experts, H, I], float32 or bfloat16, or an MXArray with blocks along its axis −2. H
        and I are multiples of 32.
      w_up: as w_gate.
      w_down: [experts, I, H].
      dtype: that of the layer's x; memory of that dtype is taken, twice with `backward`.
      backward: the backward pass is prepared too. Gradients go to arrays given as float32 or
        bfloat16, and to the masters of MXArrays.

    Returns:
      The three, each of its weight's shape and of `dtype`.

    Raises:
      MoEInputError: for weights of other dtypes or numbers of dimensions, or that do not fit each
        other; for H or I that is no multiple of 32; for MXArrays with other blocks, or whose parts
        do not belong together; for weights that were prepared already; for another dtype.
    """
    weights = Weights(w_gate, w_up, w_down)
    check_preparable(weights, dtype)
    return Weights(*(_prepared(weight, dtype, backward=backward) for weight in weights))


def _prepared(weight: jax.Array | MXArray, dtype: DTypeLike, *, backward: bool) -> PreparedWeight:
    if not backward:
        return PreparedWeight(_for_forward(weight, dtype), None, None)
    if not isinstance(weight, MXArray):
        return PreparedWeight(*_rounded_along_both(weight, dtype), weight)
    forward, master = _for_forward(weight, dtype), weight.master
    source = forward if master is None else master
    return PreparedWeight(forward, _rounded(source, BACKWARD_AXIS, dtype), master)


def _for_forward(weight: jax.Array | MXArray, dtype: DTypeLike) -> jax.Array:
    if isinstance(weight, MXArray):
        return _decoded(dataclasses.replace(weight, master=None), dtype)
    return _rounded(weight, FORWARD_AXIS, dtype)


def _decoded(array: MXArray, dtype: DTypeLike) -> jax.Array:
    if not is_in_shard_map():
        return dequantize(array, dtype)
    array = dataclasses.replace(
        array,
        elements=without_gradient(array.elements),
        scales=without_gradient(array.scales),
    )
    return codec.decode(array, dtype, varying_axes(array.elements))


def _rounded(x: jax.Array, axis: int, dtype: DTypeLike) -> jax.Array:
    x = jax.lax.stop_gradient(x)
    if not is_in_shard_map():
        return dequantize(quantize(x.astype(jnp.float32), axis), dtype)
    return codec.rounded(x, axis, dtype, varying_axes(x))


def _rounded_along_both(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    if not is_in_shard_map():
        return _rounded(x, FORWARD_AXIS, dtype), _rounded(x, BACKWARD_AXIS, dtype)
    return codec.rounded_along_both(jax.lax.stop_gradient(x), dtype, varying_axes(x))
