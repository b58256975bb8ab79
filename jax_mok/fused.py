"""The fused forward pass on NVIDIA GPUs: one custom call."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok import ffi
from jax_mok.call import Call
from jax_mok.config import TILE_ROWS
from jax_mok.experts import Weights
from jax_mok.transforms import refuse_when_lowered

_LEAST_RING_ROWS = 256  # a cluster's two blocks of 128 rows
_WIDTH_MULTIPLE = 64


def forward(
    call: Call,
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    weights: Weights,
) -> jax.Array:
    """y [T, H], as `layer.forward`; the program is refused when lowered if no kernel fits it.

    It is traced on every platform, so it may not raise while it is traced.
    """
    reason = _why_not(call, x, weights)
    if reason is not None:
        return refuse_when_lowered(x, reason)
    layout, ranks = call.layout, call.layout.ranks
    hidden, inner = x.shape[1], weights.gate.shape[2]
    ring_rows = max(layout.ring_rows, _LEAST_RING_ROWS)
    sizes: dict[str, np.generic] = {
        "ranks": np.int32(ranks),
        "tokens": np.int64(layout.tokens),
        "top_k": np.int32(layout.top_k),
        "experts": np.int32(layout.experts),
        "tile_rows": np.int32(TILE_ROWS),
        "chunk_rows": np.int64(layout.chunk_rows),
        "ring_rows": np.int64(ring_rows),
        "hidden": np.int64(hidden),
        "inner": np.int64(inner),
    }
    workspace_bytes = _workspace_bytes({name: int(v) for name, v in sizes.items()})
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8),
    ]
    clamp = math.inf if call.config.clamp is None else call.config.clamp
    attributes: dict[str, np.generic | np.ndarray] = {
        **sizes,
        "clamp": np.float32(clamp),
        "timeout_s": np.float64(call.config.timeout_s),
        "groups": np.array(call.position.groups, np.int64),
    }
    target = "jax_mok_forward_alone" if ranks == 1 else "jax_mok_forward_peers"
    operands = (x, expert_ids, router_weights, *(weight.astype(x.dtype) for weight in weights))
    return ffi.call(target, results, operands, attributes, call.axes)[0]


def _workspace_bytes(sizes: dict[str, int]) -> int:
    assert ffi.cuda is not None
    return int(ffi.cuda.workspace_bytes(**sizes))


def _why_not(call: Call, x: jax.Array, weights: Weights) -> str | None:
    config, hidden, inner = call.config, x.shape[1], weights.gate.shape[2]
    if ffi.cuda is None:
        return (
            "this jax_mok was built without GPU kernels: reinstall it where nvcc is found with "
            "pip install --config-settings=cmake.define.JAX_MOK_CUDA=ON ."
        )
    if jax.__version_info__ < ffi.FIRST_JAX_WITH_GPU_KERNELS:
        return f"the GPU kernels need JAX 0.11.2 or newer (Python 3.12), found {jax.__version__}"
    if x.dtype != jnp.bfloat16:
        return f"x has dtype {x.dtype}; the GPU kernels take bfloat16: convert it with .astype"
    if hidden % _WIDTH_MULTIPLE or inner % _WIDTH_MULTIPLE:
        return (
            f"H={hidden} and I={inner}; the GPU kernels take multiples of {_WIDTH_MULTIPLE}: pad "
            "x and the weights with zeros"
        )
    if config.composition != "auto":
        return f"composition={config.composition!r} has no GPU kernels yet: use 'auto'"
    if (config.dispatch, config.combine) != ("pull", "push"):
        return (
            f"dispatch={config.dispatch!r} with combine={config.combine!r} has no GPU kernel yet: "
            "use 'pull' and 'push'"
        )
    layout = call.layout
    if not ffi.cuda.plan_fits(
        ranks=layout.ranks,
        tokens=layout.tokens,
        top_k=layout.top_k,
        experts=layout.experts,
        tile_rows=TILE_ROWS,
        chunk_rows=layout.chunk_rows,
    ):
        return (
            f"the plan of {layout.experts} experts does not fit a block's shared memory: use fewer"
        )
    return None
