"""Checks of shapes, dtypes and sizes when a call is traced. No JAX computation here."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok.errors import MoEInputError

_ACTIVATIONS = (jnp.float32, jnp.bfloat16)


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
        raise MoEInputError(f"num_experts must be an integer, got {num_experts!r}")
    if num_experts < 1 or num_experts % ranks:
        raise MoEInputError(
            f"{num_experts} experts cannot be divided among the {ranks} ranks of mesh "
            f"axis {axis_name!r}: use a multiple of {ranks}"
        )


def check_operands(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
) -> None:
    """Refuses operands of the layer that do not fit each other."""
    _check_array("x", x, ("T", "H"), _ACTIVATIONS)
    check_ids(expert_ids)
    _check_array("expert_weights", expert_weights, ("T", "K"), (jnp.float32,))
    tokens, width = x.shape
    _check_shape("expert_ids", expert_ids, (tokens, expert_ids.shape[1]), "one row for each token")
    _check_shape("expert_weights", expert_weights, expert_ids.shape, "one weight for each choice")
    allowed = (x.dtype,) if x.dtype == jnp.float32 else (x.dtype, jnp.float32)
    as_x = f", since x is {x.dtype}"
    _check_array("w_gate", w_gate, ("experts", "H", "I"), allowed, as_x)
    _check_array("w_up", w_up, ("experts", "H", "I"), allowed, as_x)
    _check_array("w_down", w_down, ("experts", "I", "H"), allowed, as_x)
    experts, _, inner = w_gate.shape
    if math.prod(w_gate.shape) == 0 or width == 0:
        raise MoEInputError(
            f"x has width {width} and w_gate has shape {list(w_gate.shape)}: "
            "experts, H and I must be at least 1"
        )
    _check_shape("w_gate", w_gate, (experts, width, inner), "H as in x")
    _check_shape("w_up", w_up, (experts, width, inner), "the shape of w_gate")
    _check_shape("w_down", w_down, (experts, inner, width), "w_gate's with H and I exchanged")


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
        fold = dimensions[0] == "T" and value.ndim > len(dimensions)
        advice = ": fold its leading dimensions into the tokens with .reshape" if fold else ""
        raise MoEInputError(
            f"{name} has shape {list(value.shape)}; it must have dimensions {wanted}{advice}"
        )
    if value.dtype not in [jnp.dtype(dtype) for dtype in dtypes]:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise MoEInputError(
            f"{name} has dtype {value.dtype}; it must be {names}{why}: convert it with .astype"
        )


def _check_shape(name: str, value: jax.Array, wanted: tuple[int, ...], why: str) -> None:
    if value.shape != wanted:
        raise MoEInputError(f"{name} has shape {list(value.shape)}; {list(wanted)} fits ({why})")
