"""Identities that refuse the transformations and platforms that the layer does not support."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_mok.errors import MoEError

_guard_p = Primitive("jax_mok_guard")
_guard_p.def_impl(lambda value: value)
_guard_p.def_abstract_eval(lambda value: value)


def _refuse_vmap(*_: Any) -> NoReturn:
    raise MoEError(
        "jax.vmap of the MoE layer is not supported: fold the batch into the tokens, "
        "x.reshape(-1, x.shape[-1]), and likewise expert_ids and expert_weights (jax.jacrev and "
        "jax.jacfwd use vmap)"
    )


def _refuse_derivative(*_: Any) -> NoReturn:
    raise MoEError(
        "the MoE layer has first derivatives in reverse mode only, so not those of jax.jvp, "
        "jax.jacfwd and jax.hessian: use jax.grad or jax.vjp once"
    )


batching.primitive_batchers[_guard_p] = _refuse_vmap
ad.primitive_jvps[_guard_p] = _refuse_derivative
mlir.register_lowering(_guard_p, lambda _, value: [value])


def guard(value: jax.Array) -> jax.Array:
    """Returns value; raises MoEError under `jax.vmap` or a second derivative."""
    return _guard_p.bind(value)


# Tangents go through a primitive that can be transposed, which is all that reverse mode does to it,
# but not computed: JAX's own refusal of forward mode names the wrong thing if it is called eagerly.
_tangent_p = Primitive("jax_mok_tangent")
_tangent_p.def_impl(_refuse_derivative)
_tangent_p.def_abstract_eval(lambda value: value)
ad.primitive_jvps[_tangent_p] = _refuse_derivative
ad.primitive_transposes[_tangent_p] = lambda cotangent, _: [cotangent]
batching.primitive_batchers[_tangent_p] = _refuse_derivative
mlir.register_lowering(_tangent_p, _refuse_derivative)

_reverse_p = Primitive("jax_mok_reverse")
_reverse_p.def_impl(lambda value: value)
_reverse_p.def_abstract_eval(lambda value: value)


def _pass_tangent(values: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
    (tangent,) = tangents
    is_zero = isinstance(tangent, ad.Zero)
    return _reverse_p.bind(*values), tangent if is_zero else _tangent_p.bind(tangent)


ad.primitive_jvps[_reverse_p] = _pass_tangent
batching.primitive_batchers[_reverse_p] = _refuse_vmap
mlir.register_lowering(_reverse_p, lambda _, value: [value])


def refuse_forward_mode(value: jax.Array) -> jax.Array:
    """Returns value; raises MoEError if its tangent is computed, as `jax.jvp` does."""
    return _reverse_p.bind(value)


_constant_p = Primitive("jax_mok_constant")
_constant_p.def_impl(lambda value, *, reason: value)
_constant_p.def_abstract_eval(lambda value, *, reason: value)


def _refuse_tangent(*_: Any, reason: str) -> NoReturn:
    raise MoEError(reason)


def _batch_constant(
    values: tuple[jax.Array], axes: tuple[int], *, reason: str
) -> tuple[jax.Array, int]:
    return refuse_derivative(values[0], reason), axes[0]


batching.primitive_batchers[_constant_p] = _batch_constant
ad.primitive_jvps[_constant_p] = _refuse_tangent
mlir.register_lowering(_constant_p, lambda _, value, *, reason: [value])


def refuse_derivative(value: jax.Array, reason: str) -> jax.Array:
    """Returns value; raises MoEError with the reason if it is differentiated."""
    return _constant_p.bind(value, reason=reason)


_refusal_p = Primitive("jax_mok_refusal")
_refusal_p.def_abstract_eval(lambda value, *, reason, except_on: value)


def _refuse_eagerly(value: jax.Array, *, reason: str, except_on: str | None) -> jax.Array:
    if {device.platform for device in value.devices()} != {except_on}:
        raise MoEError(reason)
    return value


def _refuse_lowering(*_: Any, reason: str, except_on: str | None) -> NoReturn:
    raise MoEError(reason)


def _lower_on_cpu(_: Any, value: Any, *, reason: str, except_on: str | None) -> list[Any]:
    if except_on != "cpu":
        raise MoEError(reason)
    return [value]


_refusal_p.def_impl(_refuse_eagerly)
mlir.register_lowering(_refusal_p, _refuse_lowering)
mlir.register_lowering(_refusal_p, _lower_on_cpu, platform="cpu")


def refuse_when_lowered(value: jax.Array, reason: str, except_on: str | None = None) -> jax.Array:
    """Value's shape and type; raises MoEError with the reason when a program with it is lowered.

    The platform is known only then. On the platform `except_on` ("cpu") it returns value.
    """
    return _refusal_p.bind(value, reason=reason, except_on=except_on)
