"""Checks of shapes, dtypes and sizes when a call is traced. No JAX computation here."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_mok.config import MoEConfig
from jax_mok.errors import MoEInputError
from jax_mok.precision import PreparedWeight, Weight, Weights, check_blocks
from jax_mok.quantize import BLOCK, MXArray, check_dtype

_ACTIVATIONS = (jnp.float32, jnp.bfloat16)
_DIMENSIONS = Weights(("experts", "H", "I"), ("experts", "H", "I"), ("experts", "I", "H"))._asdict()
_EXCHANGED = "w_gate's with H and I exchanged"


def check_ids(expert_ids: jax.Array) -> None:
    """Refuses expert ids that are not int32 [T, K] with K at least 1."""
    _check_array("expert_ids", expert_ids, ("T", "K"), (jnp.int32,))
    if expert_ids.shape[1] == 0:
        raise MoEInputError(
            f"expert_ids has shape {list(expert_ids.shape)}: each token needs at least one choice"
        )


def check_experts(num_experts: int, ranks: int, axis_name: str) -> None:
    """Refuses a number of experts that the mesh axis cannot share out."""
    if not isinstance(num_experts, numbers.Integral) or isinstance(num_experts, bool):
        raise MoEInputError(f"the number of experts must be an integer, got {num_experts!r}")
    if num_experts < 1 or num_experts % ranks:
        raise MoEInputError(
            f"{num_experts} experts cannot be divided among the {ranks} ranks of mesh "
            f"axis {axis_name!r}: use a multiple of {ranks}"
        )


def check_operands(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    weights: Weights[Weight],
    config: MoEConfig,
) -> None:
    """Refuses operands of the layer that do not fit each other, or the config."""
    _check_array("x", x, ("T", "H"), _ACTIVATIONS)
    check_ids(expert_ids)
    _check_array("expert_weights", expert_weights, ("T", "K"), (jnp.float32,))
    tokens, width = x.shape
    _check_shape("expert_ids", expert_ids, (tokens, expert_ids.shape[1]), "one row for each token")
    _check_shape("expert_weights", expert_weights, expert_ids.shape, "one weight for each choice")
    for field, dimensions in _DIMENSIONS.items():
        _check_weight(f"w_{field}", getattr(weights, field), dimensions, x, config)
    w_gate, w_up, w_down = weights
    experts, _, inner = w_gate.shape
    if math.prod(w_gate.shape) == 0 or width == 0:
        raise MoEInputError(
            f"x has width {width} and w_gate has shape {list(w_gate.shape)}: "
            "experts, H and I must be at least 1"
        )
    _check_shape("w_gate", w_gate, (experts, width, inner), "H as in x")
    _check_shape("w_up", w_up, (experts, width, inner), "the shape of w_gate")
    _check_shape("w_down", w_down, (experts, inner, width), _EXCHANGED)
    if config.precision == "mxfp8" and (width % BLOCK or inner % BLOCK):
        raise MoEInputError(
            f"H={width} and I={inner}; MXFP8 has blocks of {BLOCK} along both: use multiples of "
            f"{BLOCK}, or pad x and the weights with zeros"
        )


def check_preparable(weights: Weights[jax.Array | MXArray], dtype: DTypeLike) -> None:
    """Refuses what `prepare_weights` cannot round, or what the layer would not take then."""
    check_dtype(dtype, _ACTIVATIONS, ", that of the layer's x: use dtype=x.dtype")
    for field, dimensions in _DIMENSIONS.items():
        name, weight = f"w_{field}", getattr(weights, field)
        if isinstance(weight, PreparedWeight):
            raise MoEInputError(
                f"{name} was prepared already: give the layer what prepare_weights returned, or "
                "prepare_weights the arrays or MXArrays it was made of"
            )
        if isinstance(weight, MXArray):
            _check_mx(name, weight, dimensions)
        else:
            _check_array(name, weight, dimensions, _ACTIVATIONS)
    experts, width, inner = weights.gate.shape
    _check_shape("w_up", weights.up, (experts, width, inner), "the shape of w_gate")
    _check_shape("w_down", weights.down, (experts, inner, width), _EXCHANGED)
    if width % BLOCK or inner % BLOCK:
        raise MoEInputError(
            f"w_gate has H={width} and I={inner}; MXFP8 has blocks of {BLOCK} along both: use "
            f"multiples of {BLOCK}, or pad x and the weights with zeros"
        )


def check_derivable(weights: Weights[Weight]) -> None:
    """Refuses weights that were prepared without a backward pass."""
    for name, weight in weights._asdict().items():
        if isinstance(weight, PreparedWeight) and weight.backward is None:
            raise MoEInputError(
                f"w_{name} was prepared for the forward pass only: use prepare_weights(..., "
                "backward=True)"
            )


def _check_weight(
    name: str, weight: Weight, dimensions: Sequence[str], x: jax.Array, config: MoEConfig
) -> None:
    as_x = f", since x is {x.dtype}"
    if isinstance(weight, MXArray | PreparedWeight) and config.precision != "mxfp8":
        raise MoEInputError(
            f"{name} is in MXFP8, and precision={config.precision!r}: use "
            "MoEConfig(precision='mxfp8')"
        )
    if isinstance(weight, MXArray):
        _check_mx(name, weight, dimensions)
    elif isinstance(weight, PreparedWeight):
        for values in (weight.forward, weight.backward):
            if values is not None and values.dtype != x.dtype:
                raise MoEInputError(
                    f"{name} was prepared in {values.dtype}; it must be {x.dtype}{as_x}: use "
                    f"prepare_weights(..., dtype={x.dtype.name!r})"
                )
        _check_array(name, weight.forward, dimensions, (x.dtype,))
    else:
        allowed = (x.dtype,) if x.dtype == jnp.float32 else (x.dtype, jnp.float32)
        _check_array(name, weight, dimensions, allowed, as_x)


def _check_mx(name: str, weight: MXArray, dimensions: Sequence[str]) -> None:
    if getattr(weight.elements, "ndim", len(dimensions)) == len(dimensions):
        check_blocks(name, weight)
    _check_array(name, weight.elements, dimensions, (jnp.float8_e4m3fn,))


def _check_array(
    name: str,
    value: jax.Array,
    dimensions: Sequence[str],
    dtypes: Sequence[np.typing.DTypeLike],
    why: str = "",
) -> None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise MoEInputError(f"{name} must be an array, got {type(value).__name__}")
    wanted = f"[{', '.join(dimensions)}]"
    if value.ndim != len(dimensions):
        advice = ""
        if dimensions[0] == "T" and value.ndim > len(dimensions):
            advice = ": fold its leading dimensions into the tokens with .reshape"
        elif tuple(dimensions) == ("T", "K") and value.ndim == 1:
            advice = f": for one choice use {name}[:, None]"
        raise MoEInputError(
            f"{name} has shape {list(value.shape)}; it must have dimensions {wanted}{advice}"
        )
    if value.dtype not in [jnp.dtype(dtype) for dtype in dtypes]:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise MoEInputError(
            f"{name} has dtype {value.dtype}; it must be {names}{why}: convert it with .astype"
        )


def _check_shape(name: str, value: Weight, wanted: tuple[int, ...], why: str) -> None:
    if value.shape != wanted:
        raise MoEInputError(f"{name} has shape {list(value.shape)}; {list(wanted)} fits ({why})")
