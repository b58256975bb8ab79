"""An identity that refuses the transformations and platforms that the layer does not support."""

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
        "x.reshape(-1, x.shape[-1]), and likewise expert_ids and expert_weights"
    )


def _refuse_derivative(*_: Any) -> NoReturn:
    raise MoEError(
        "the MoE layer has first derivatives in reverse mode only: use jax.grad or jax.vjp once"
    )


def _refuse_platform(*_: Any) -> NoReturn:
    raise MoEError(
        "this version of jax_mok has kernels for CPU devices only: build the mesh from "
        "jax.devices('cpu'), or set JAX_PLATFORMS=cpu"
    )


mlir.register_lowering(_guard_p, _refuse_platform)
mlir.register_lowering(_guard_p, lambda _, value: [value], platform="cpu")
batching.primitive_batchers[_guard_p] = _refuse_vmap
ad.primitive_jvps[_guard_p] = _refuse_derivative


def guard(value: jax.Array) -> jax.Array:
    """Returns value; raises MoEError under `jax.vmap`, a second derivative, or off the CPU."""
    return _guard_p.bind(value)
