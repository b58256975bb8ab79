"""What the products of the layer are made of: their operands as they are, or in MXFP8.

With `MoEConfig(precision="mxfp8")` every operand of a product over H or I is rounded to MXFP8 (OCP
Microscaling Formats (MX) Specification, version 1.0; the rule for scales is that of
`jax_mok.quantize`), its blocks lying along the contraction:

    product                            operands, and the axis of their blocks
    gate = x·Wg,  up = x·Wu            x: H             Wg, Wu: H
    y = hidden·Wd                      hidden: I        Wd: I
    d_hidden = dy·Wdᵀ                  dy: H            Wd: H
    dx = d_gate·Wgᵀ + d_up·Wuᵀ         d_gate, d_up: I  Wg, Wu: I
    dWg = xᵀ·d_gate,  dWu = xᵀ·d_up    the rounded x, d_gate and d_up of above
    dWd = (w·hidden)ᵀ·dy               the rounded hidden and dy of above; w is the router's weight

The contraction of the last two are rows: nothing is rounded to MXFP8 along them. The router
weight's gradient is ⟨hidden, d_hidden⟩ of the rounded hidden. x and dy are rounded once, on the
rank where they are, and travel as elements and scales; hidden, d_gate and d_up are rounded from
float32. Rounded values are exact in bfloat16, products accumulate in float32, and everything else
is as without MXFP8: gate and up are kept in x's dtype, w·hidden, rows of y and rows of dx too, and
combine moves those.

Each of Wg, Wu and Wd is thus rounded twice, in the backward pass along its last axis. That is done
from the array that was given, or of an `MXArray` from its master; if it has none, from its values.
Gradients are those of the rounded values and go straight through to what was rounded.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Generic, NamedTuple, TypeVar

import jax
from jax.typing import DTypeLike

from jax_mok import codec
from jax_mok.call import Call
from jax_mok.errors import MoEInputError
from jax_mok.quantize import MXArray, without_gradient
from jax_mok.transforms import refuse_derivative

FORWARD_AXIS = -2
"""Of the three weights [experts, contraction, columns], the contraction of the forward pass."""
BACKWARD_AXIS = -1

_NOT_MASTER = (
    "prepared weights have no gradient: prepare the arrays that are differentiated with "
    "jax_mok.prepare_weights(..., backward=True), inside the function of which jax.grad is taken"
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["forward", "backward", "master"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class PreparedWeight:
    """A weight of the layer as its products take it; a pytree. `jax_mok.prepare_weights` makes it.

    Attributes:
      forward: [experts, H, I] or [experts, I, H], rounded along the contraction of the forward
        pass.
      backward: the same, rounded along its last axis; or None, if there is no backward pass.
      master: what was rounded, to which gradients go; or None.
    """

    forward: jax.Array
    backward: jax.Array | None
    master: jax.Array | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.forward.shape

    @property
    def ndim(self) -> int:
        """Of the weight."""
        return self.forward.ndim


Weight = jax.Array | MXArray | PreparedWeight


_Of = TypeVar("_Of")


class Weights(NamedTuple, Generic[_Of]):
    """A rank's experts: gate and up [experts/n, H, I], down [experts/n, I, H].

    Or of one expert, without the first axis; or of all.
    """

    gate: _Of
    up: _Of
    down: _Of


def check_blocks(name: str, weight: MXArray) -> None:
    """Refuses an MXArray that is no weight of the layer."""
    weight.check(name)
    axis = weight.axis
    if axis != FORWARD_AXIS:
        raise MoEInputError(
            f"{name} has blocks along axis {axis}; the forward product contracts over "
            f"{FORWARD_AXIS}: use quantize({name}, axis={FORWARD_AXIS})"
        )


def constants(weight: Weight) -> Weight:
    """The weight, of which nothing but the master may be differentiated."""
    if isinstance(weight, MXArray):
        return dataclasses.replace(
            weight,
            elements=without_gradient(weight.elements),
            scales=without_gradient(weight.scales),
        )
    if isinstance(weight, PreparedWeight):
        backward = weight.backward
        if backward is not None:
            backward = refuse_derivative(backward, _NOT_MASTER)
        return PreparedWeight(
            refuse_derivative(weight.forward, _NOT_MASTER), backward, weight.master
        )
    return weight


def master_of(weight: Weight) -> jax.Array | None:
    """What gradients go to."""
    return weight.master if isinstance(weight, MXArray | PreparedWeight) else weight


def values_of(weight: Weight) -> jax.Array:
    """An array of the weight's shape that is placed as the weight is."""
    if isinstance(weight, MXArray):
        return weight.elements
    return weight.forward if isinstance(weight, PreparedWeight) else weight


def gradient_of(weight: Weight, gradient: jax.Array) -> Weight | None:
    """The gradient as JAX wants it: of the weight's structure, its master's in the master's dtype.

    None of the rest, and of a weight without master, stands for no gradient.
    """
    master = master_of(weight)
    if master is None:
        return None
    gradient = gradient.astype(master.dtype)
    if isinstance(weight, MXArray | PreparedWeight):
        return dataclasses.replace(jax.tree.map(lambda _: None, weight), master=gradient)
    return gradient


def for_forward(call: Call, weight: Weight, dtype: DTypeLike) -> jax.Array:
    """One expert's matrix [contraction, columns] for the forward pass."""
    if isinstance(weight, PreparedWeight):
        return weight.forward
    if isinstance(weight, MXArray):
        return codec.decode(weight, dtype, call.axes)
    if call.config.precision == "mxfp8":
        return codec.rounded(weight, FORWARD_AXIS, dtype, call.axes)
    return weight.astype(dtype)


def for_backward(call: Call, weight: Weight, dtype: DTypeLike) -> jax.Array:
    """The same matrix, for the products of the backward pass that contract over its columns."""
    if isinstance(weight, PreparedWeight):
        assert weight.backward is not None
        return weight.backward
    if isinstance(weight, MXArray):
        master = weight.master
        weight = codec.decode(weight, dtype, call.axes) if master is None else master
    if call.config.precision == "mxfp8":
        return codec.rounded(weight, BACKWARD_AXIS, dtype, call.axes)
    return weight.astype(dtype)


def activation(call: Call, values: jax.Array) -> jax.Array:
    """float32 values [·, I] as a product over I takes them."""
    if call.config.precision == "mxfp8":
        return codec.rounded(values, -1, values.dtype, call.axes)
    return values


def to_move(call: Call, values: jax.Array) -> jax.Array:
    """Rows [T, H] as they are moved to the experts."""
    return codec.encode_rows(values, call.axes) if call.config.precision == "mxfp8" else values


def moved(call: Call, rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows [·, H] as a product over H takes them, of those that were moved."""
    return codec.decode_rows(rows, dtype, call.axes) if call.config.precision == "mxfp8" else rows
