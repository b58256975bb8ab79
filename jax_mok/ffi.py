"""The custom calls: registration with XLA, and calling them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType

import jax
import numpy as np

from jax_mok import _native
from jax_mok.sharding import vary_all

FIRST_JAX_WITH_PEERS = (0, 11, 2)
"""The first whose FFI lends handlers XLA's communicator, through which ranks reach each other."""


def _module_if_built(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


cuda = _module_if_built("jax_mok._cuda")
"""The GPU calls in which no ranks meet, and sizes and faults; None without GPU kernels."""

# Built with that JAX's headers; older ones would refuse its handlers, and with them every program.
cuda_peers = (
    _module_if_built("jax_mok._cuda_peers")
    if jax.__version_info__ >= FIRST_JAX_WITH_PEERS
    else None
)
"""The GPU calls in which ranks meet; None without GPU kernels, or if JAX is too old for them."""

_CPU_TARGETS = _native.registrations()
_CUDA_TARGETS = {
    name: stages
    for module in (cuda, cuda_peers)
    if module is not None
    for name, stages in module.registrations().items()
}


def register() -> None:
    """Makes the custom calls known to XLA."""
    for platform, targets in (("cpu", _CPU_TARGETS), ("CUDA", _CUDA_TARGETS)):
        for name, stages in targets.items():
            jax.ffi.register_ffi_target(name, stages, platform=platform)


def call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    attributes: Mapping[str, np.generic | np.ndarray],
    axes: frozenset[str],
    aliases: Mapping[int, int] | None = None,
    *,
    vmap_method: str | None = None,
) -> list[jax.Array]:
    """A pure custom call whose results differ along the mesh axes; `vmap_method` is `ffi_call`'s.

    Purity lets `jax.checkpoint` repeat the call. XLA merges or drops pure calls alike on all ranks,
    so the ranks still meet.
    """
    pure_call = jax.ffi.ffi_call(
        target,
        tuple(results),
        input_output_aliases=dict(aliases or {}),
        has_side_effect=False,
        vmap_method=vmap_method,
    )
    return vary_all(pure_call(*vary_all(operands, axes), **attributes), axes)


def export_safety_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs to let this package's calls through.

    The custom calls' names and attributes are stable within a minor version of this package.
    """
    names = [*_CPU_TARGETS, *_CUDA_TARGETS]
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
