"""What the custom calls of NVIDIA GPUs have in common."""

from __future__ import annotations

import os

import jax
import numpy as np

from jax_mok import ffi
from jax_mok.call import Call
from jax_mok.config import TILE_ROWS, MoEConfig
from jax_mok.layout import Layout

LEAST_RING_ROWS = 256
"""Two blocks of 128 rows, a cluster's."""
WIDTH_MULTIPLE = 64
"""H and I are multiples of it."""
MOST_EXPERTS = (227 * 1024 // 4 - 4) // 19
"""Of all ranks: `cuda/sm90/plan.cu` places choices with 19 · experts + 4 int32 in shared memory."""
_HIDDEN_BYTES = 2
# The largest ring of the shapes that are measured, but for Mixtral's, is less.
_WANTED_RING_BYTES = 384 * 2**20
_COMPUTE_CAPABILITY = "9.0"
_CONCURRENT_CALLS = "xla_gpu_command_buffer_scheduling_mode=concurrent"


def why_not(layout: Layout, *, ranks_meet: bool = True) -> str | None:
    """Why no GPU call of this layout can run here, as a message to the user; None if it can.

    Without `ranks_meet` the ranks meet in XLA's collectives only.
    """
    if ffi.cuda is None:
        return (
            "this jax_mok was built without GPU kernels: reinstall it where nvcc is found with "
            "pip install --config-settings=cmake.define.JAX_MOK_CUDA=ON ."
        )
    meets = ranks_meet and layout.ranks > 1
    if meets and ffi.cuda_peers is None:
        return (
            f"the GPU kernels of {layout.ranks} ranks that reach each other need JAX "
            f"{'.'.join(map(str, ffi.FIRST_JAX_WITH_PEERS))} or newer (Python 3.12), found "
            f"{jax.__version__}: upgrade it, or use MoEConfig(composition='collective')"
        )
    if meets and _CONCURRENT_CALLS in os.environ.get("XLA_FLAGS", "").lower():
        # Ranks might take two calls without a common operand in different orders.
        return (
            f"XLA_FLAGS has {_CONCURRENT_CALLS}: ranks might not meet in the same call; remove it"
        )
    if not ffi.cuda.plan_fits(**arguments(plan_sizes(layout))):
        return (
            f"the plan of {layout.experts} experts does not fit a block's shared memory: use fewer"
        )
    return None


def has_kernels() -> bool:
    """Whether there are GPU kernels, for this process's GPUs if it has any.

    For what can be done without; the layer's calls say what is missing.
    """
    if ffi.cuda is None:
        return False
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # there is none: the program is lowered for others
        return True
    return all(device.compute_capability == _COMPUTE_CAPABILITY for device in devices)


def plan_sizes(layout: Layout) -> dict[str, np.generic]:
    """The attributes that give the size of a plan, those of `PlanShape` in `cuda/core/plan.h`."""
    return {
        "ranks": np.int32(layout.ranks),
        "tokens": np.int64(layout.tokens),
        "top_k": np.int32(layout.top_k),
        "experts": np.int32(layout.experts),
        "tile_rows": np.int32(TILE_ROWS),
        "chunk_rows": np.int64(layout.chunk_rows),
    }


def ring_rows(layout: Layout) -> int:
    """Rows of the ring of hidden rows."""
    return max(layout.ring_rows, LEAST_RING_ROWS)


def backward_ring_rows(config: MoEConfig, layout: Layout, inner: int) -> int:
    """Those of the backward pass, whose ring need not hold a load at once.

    Wide experts take a part of the forward pass's ring. It has room for any two experts of a
    balanced load, so that none needs more than a wave even if it has twice its share.
    """
    rows = ring_rows(layout)
    if config.ring_rows is not None or config.composition == "composed":
        return rows
    parts = -(-rows * inner * _HIDDEN_BYTES // _WANTED_RING_BYTES)
    parts = min(parts, max(1, layout.local_experts // 2))
    return max(-(-rows // parts // TILE_ROWS) * TILE_ROWS, LEAST_RING_ROWS)


def directions(config: MoEConfig) -> dict[str, np.generic]:
    """The attributes that say who moves rows, those of `cuda/core/directions.h`."""
    return {
        "dispatch_push": np.bool_(config.dispatch == "push"),
        "combine_push": np.bool_(config.combine == "push"),
        "reverse_combine_push": np.bool_(config.reverse_combine == "push"),
        "reverse_dispatch_push": np.bool_(config.reverse_dispatch == "push"),
    }


def precision(config: MoEConfig) -> dict[str, np.generic]:
    """The attribute that says what products are made of."""
    return {"mxfp8": np.bool_(config.precision == "mxfp8")}


def meeting(call: Call) -> dict[str, np.generic | np.ndarray]:
    """The attributes by which the ranks of a call find each other, and how long they wait."""
    return {
        "timeout_s": np.float64(call.config.timeout_s),
        "groups": np.array(call.position.groups, np.int64),
    }


def arguments(sizes: dict[str, np.generic]) -> dict[str, int | bool]:
    """Attributes as arguments for the functions of `jax_mok._cuda`."""
    return {name: size.item() for name, size in sizes.items()}
