"""Both passes on NVIDIA GPUs, fused or composed: one custom call each."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok import experts, ffi, gpu, memory_parts, plan, precision
from jax_mok.call import Call
from jax_mok.layer import Gradients
from jax_mok.plan import Plan
from jax_mok.precision import Weight, Weights
from jax_mok.sharding import vary
from jax_mok.transforms import refuse_when_lowered


def forward(
    call: Call,
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    weights: Weights[Weight],
) -> jax.Array:
    """y [T, H], as `layer.forward`; the program is refused when lowered if no kernel fits it.

    It is traced on every platform, so it may not raise while it is traced.
    """
    reason = _why_not(call, x, weights)
    if reason is not None:
        return refuse_when_lowered(x, reason)
    return _call_kernel(call, x, expert_ids, router_weights, weights, keep=[])[0]


def forward_and_keep(
    call: Call,
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    weights: Weights[Weight],
) -> tuple[jax.Array, Plan, jax.Array]:
    """As `forward`, and what the backward pass needs of it.

    Returns:
      y, the plan, and the pre-activations of the first `saved_rows` rows: of
      `experts.pre_activations_type`, each tile in the order of `cuda/sm90/forward.h`.
    """
    kept = experts.pre_activations_type(call, x.dtype, weights.gate.shape[2])
    reason = _why_not(call, x, weights)
    if reason is not None:
        refused = refuse_when_lowered(x, reason)
        nothing = vary(jnp.zeros(kept.shape, kept.dtype), call.axes)
        return (
            refused,
            plan.refused_plan(call, reason),
            refuse_when_lowered(nothing, reason),
        )
    y, pre_activations, *tables = _call_kernel(
        call, x, expert_ids, router_weights, weights, keep=[kept, *plan.tables(call.layout)]
    )
    return y, Plan(*tables), pre_activations


_SAVED, _SPENT = 6, 5  # operand and result that share memory: the kernel works in it


def backward(
    call: Call,
    routed_plan: Plan,
    x: jax.Array,
    router_weights: jax.Array,
    weights: Weights[Weight],
    pre_activations: jax.Array,
    dy: jax.Array,
    weight_dtype: jnp.dtype,
) -> Gradients:
    """As `layer.backward`, the gradients of the experts' weights in `weight_dtype`.

    `pre_activations` are those of `forward_and_keep`. The program is refused when lowered if no
    kernel fits it.
    """
    shapes = (x, router_weights, *weights)
    layout = call.layout
    hidden, inner = x.shape[1], weights.gate.shape[2]
    ring_rows = gpu.backward_ring_rows(call.config, layout, inner)
    counts = memory_parts.backward_counts(
        M=layout.max_rows, R=ring_rows, e=layout.local_experts, H=hidden, I=inner
    )
    reason = _why_not(call, x, weights) or memory_parts.too_many(**counts)
    if reason is not None:
        zeros = [
            refuse_when_lowered(vary(jnp.zeros(a.shape, dtype), call.axes), reason)
            for a, dtype in zip(shapes, (x.dtype, jnp.float32, *[weight_dtype] * 3), strict=True)
        ]
        return Gradients(zeros[0], zeros[1], Weights(*zeros[2:]))
    sizes: dict[str, np.generic] = {
        **gpu.plan_sizes(layout),
        "ring_rows": np.int64(ring_rows),
        "saved_rows": np.int64(layout.saved_rows),
        "hidden": np.int64(hidden),
        "inner": np.int64(inner),
        **gpu.directions(call.config),
        "composed": np.bool_(call.config.composition == "composed"),
        **gpu.precision(call.config),
    }
    assert ffi.cuda is not None
    workspace_bytes = ffi.cuda.backward_workspace_bytes(**gpu.arguments(sizes))
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(router_weights.shape, jnp.float32),
        *(jax.ShapeDtypeStruct(weight.shape, weight_dtype) for weight in weights),
        jax.ShapeDtypeStruct(pre_activations.shape, pre_activations.dtype),
        jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8),
    ]
    attributes = {**sizes, **gpu.meeting(call), "clamp": _clamp(call)}
    target = "jax_mok_backward_alone" if layout.ranks == 1 else "jax_mok_backward_peers"
    operands = (
        x,
        dy,
        router_weights,
        *(precision.for_backward(call, weight, x.dtype) for weight in weights),
        pre_activations,
        routed_plan.row_source,
        routed_plan.expert_tile,
        routed_plan.slot_rank,
        routed_plan.slot_row,
    )
    may_replay = memory_parts.may_replay(
        M=layout.max_rows, P=layout.saved_rows, R=ring_rows, I=inner, **counts
    )
    if call.config.precision == "mxfp8" and may_replay:
        forward_weights = (weights.gate, weights.up)
        operands += tuple(precision.for_forward(call, w, x.dtype) for w in forward_weights)
    dx, d_router_weights, *d_weights, _, _ = ffi.call(
        target, results, operands, attributes, call.axes, aliases={_SAVED: _SPENT}
    )
    return Gradients(dx, d_router_weights, Weights(*d_weights))


def _clamp(call: Call) -> np.generic:
    return np.float32(math.inf if call.config.clamp is None else call.config.clamp)


def _call_kernel(
    call: Call,
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    weights: Weights[Weight],
    *,
    keep: list[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """y, and results of the types `keep`: none, or the pre-activations and the plan."""
    layout = call.layout
    sizes: dict[str, np.generic] = {
        **gpu.plan_sizes(layout),
        "ring_rows": np.int64(gpu.ring_rows(layout)),
        "hidden": np.int64(x.shape[1]),
        "inner": np.int64(weights.gate.shape[2]),
        **gpu.directions(call.config),
        "composed": np.bool_(call.config.composition == "composed"),
        "keeps_plan": np.bool_(bool(keep)),
        **gpu.precision(call.config),
    }
    assert ffi.cuda is not None
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((ffi.cuda.workspace_bytes(**gpu.arguments(sizes)),), jnp.uint8),
        *keep,
    ]
    attributes = {**sizes, **gpu.meeting(call), "clamp": _clamp(call)}
    target = "jax_mok_forward_alone" if layout.ranks == 1 else "jax_mok_forward_peers"
    operands = (
        x,
        expert_ids,
        router_weights,
        *(precision.for_forward(call, weight, x.dtype) for weight in weights),
    )
    y, _, *rest = ffi.call(target, results, operands, attributes, call.axes)
    return [y, *rest]


def _why_not(call: Call, x: jax.Array, weights: Weights[Weight]) -> str | None:
    if (reason := gpu.why_not(call.layout)) is not None:
        return reason
    hidden, inner = x.shape[1], weights.gate.shape[2]
    if x.dtype != jnp.bfloat16:
        return f"x has dtype {x.dtype}; the GPU kernels take bfloat16: convert it with .astype"
    if hidden % gpu.WIDTH_MULTIPLE or inner % gpu.WIDTH_MULTIPLE:
        return (
            f"H={hidden} and I={inner}; the GPU kernels take multiples of {gpu.WIDTH_MULTIPLE}: "
            "pad x and the weights with zeros"
        )
    return None
