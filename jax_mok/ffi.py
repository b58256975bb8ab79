"""The custom calls: registration with XLA, and calling them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType

import jax
import numpy as np

from jax_mok import _native
from jax_mok.sharding import vary_all

cuda: ModuleType | None
"""The module of the GPU kernels, if this package was built with them."""
try:
    cuda = importlib.import_module("jax_mok._cuda")
except ModuleNotFoundError:
    cuda = None

_CPU_TARGETS = _native.registrations()
# The GPU handlers are built with the headers of the first JAX whose FFI reaches peers; older ones
# would refuse them, and with them every program.
FIRST_JAX_WITH_GPU_KERNELS = (0, 11, 2)
_CUDA_TARGETS = (
    cuda.registrations() if cuda and jax.__version_info__ >= FIRST_JAX_WITH_GPU_KERNELS else {}
)


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
) -> list[jax.Array]:
    """A pure custom call whose results differ along the mesh axes.

    Purity lets `jax.checkpoint` repeat the call. XLA merges or drops pure calls alike on all ranks,
    so the ranks still meet.
    """
    pure_call = jax.ffi.ffi_call(
        target, tuple(results), input_output_aliases=dict(aliases or {}), has_side_effect=False
    )
    return vary_all(pure_call(*vary_all(operands, axes), **attributes), axes)


def export_safety_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs to let this package's calls through.

    The custom calls' names and attributes are stable within a minor version of this package.
    """
    names = [*_CPU_TARGETS, *_CUDA_TARGETS]
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
