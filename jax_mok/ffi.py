"""The custom calls: registration with XLA, and calling them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jax_mok import _native
from jax_mok.sharding import vary_all

_TARGETS = _native.registrations()


def register() -> None:
    """Makes the CPU custom calls known to XLA."""
    for name, stages in _TARGETS.items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")


def call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    attributes: Mapping[str, np.generic],
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
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _TARGETS]
