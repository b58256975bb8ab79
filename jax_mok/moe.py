"""The public operation and its gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok import fused, layer, precision, reach
from jax_mok.call import Call, warn_once
from jax_mok.choices import ChoiceCounts, count_choices
from jax_mok.config import MoEConfig, config_or_default
from jax_mok.errors import MoEInputError
from jax_mok.faults import check
from jax_mok.layout import make_layout
from jax_mok.plan import Plan, gather_plan_on_gpu, make_plan
from jax_mok.precision import Weight, Weights
from jax_mok.sharding import (
    check_axis,
    check_committed,
    check_partitioned,
    find_mesh,
    find_position,
    sum_replicas,
    vary,
    varying_axes,
)
from jax_mok.transforms import guard, refuse_forward_mode, refuse_when_lowered
from jax_mok.validate import check_derivable, check_experts, check_operands

_ROUTES_NAME = "jax_mok_routes"
_PLAN_NAME = "jax_mok_plan"
_PRE_ACTIVATIONS_NAME = "jax_mok_pre_activations"
_NO_CPU_KERNEL = "composition='fused' is the GPU kernel: on CPU devices use composition='auto'"

remat_policy = jax.checkpoint_policies.save_only_these_names(
    _ROUTES_NAME, _PLAN_NAME, _PRE_ACTIVATIONS_NAME
)
"""For `jax.checkpoint(..., policy=jax_mok.remat_policy)`: keeps the routes (so that recomputed
scores cannot route differently), the plan and the saved pre-activations of each layer."""


@overload
def moe_ffn(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: Weight,
    w_up: Weight,
    w_down: Weight,
    *,
    axis_name: str,
    config: MoEConfig | None = None,
    counts: Literal[False] = False,
) -> jax.Array: ...


@overload
def moe_ffn(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: Weight,
    w_up: Weight,
    w_down: Weight,
    *,
    axis_name: str,
    config: MoEConfig | None = None,
    counts: Literal[True],
) -> tuple[jax.Array, ChoiceCounts]: ...


def moe_ffn(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: Weight,
    w_up: Weight,
    w_down: Weight,
    *,
    axis_name: str,
    config: MoEConfig | None = None,
    counts: bool = False,
) -> jax.Array | tuple[jax.Array, ChoiceCounts]:
    """Mixture-of-Experts feed-forward layer with experts partitioned over a mesh axis.

    y[t] = Σ_k w[t, k] · down(silu(x[t]·W_gate) ⊙ (x[t]·W_up)) with the matrices of expert
    `expert_ids[t, k]` (SwiGLU: Shazeer, "GLU Variants Improve Transformer", 2020). Products
    accumulate in f32; the sum over k is in f32, k ascending. Results do not depend on the number of
    ranks, bit for bit.

    Call it inside `jax.shard_map` over a mesh with the axis; shapes are those of one device.
    Differentiable in x, expert_weights and the three weights.

    Args:
      x: [T, H] this device's tokens, float32 or bfloat16.
      expert_ids: [T, K] int32, expert of each choice among all ranks' experts; -1 is a masked
        choice. Other ids out of range are masked too, and reported by `jax_mok.check`.
      expert_weights: [T, K] float32, router weight of each choice.
      w_gate: [experts/n, H, I] this device's experts, n being the size of the axis; of x's dtype,
        or float32 (then rounded to x's dtype, and its gradient comes back float32, unrounded). With
        precision "mxfp8" also an `MXArray` with blocks along axis −2, or of `prepare_weights`.
      w_up: as w_gate.
      w_down: [experts/n, I, H].
      axis_name: mesh axis over which experts are partitioned, in blocks.
      config: options.
      counts: whether to return a `ChoiceCounts` of this device's choices too.

    Returns:
      y: [T, H] in x's dtype; with `counts` a pair of y and them.

    Raises:
      MoEInputError: outside `shard_map`, or for operands that do not fit each other or the mesh.
      MoEError: under `jax.vmap`; or what `jax_mok.check` would raise for earlier calls.
    """
    check()
    config = config_or_default(config)
    position = find_position(axis_name, "moe_ffn")
    weights = Weights(w_gate, w_up, w_down)
    check_operands(x, expert_ids, expert_weights, weights, config)
    values = Weights(*map(precision.values_of, weights))
    check_partitioned(axis_name, w_gate=values.gate, w_up=values.up, w_down=values.down)
    num_experts = w_gate.shape[0] * position.ranks
    tokens, top_k = expert_ids.shape
    operands = (x, expert_weights, *values)
    call = Call(
        config=config,
        layout=make_layout(
            config, ranks=position.ranks, tokens=tokens, top_k=top_k, experts=num_experts
        ),
        position=position,
        operand_axes=tuple(map(varying_axes, operands)),
        axes=frozenset({axis_name}).union(*map(varying_axes, (*operands, expert_ids))),
    )
    expert_ids = checkpoint_name(expert_ids, _ROUTES_NAME)
    expert_weights = checkpoint_name(expert_weights, _ROUTES_NAME)
    weights = Weights(*map(precision.constants, weights))
    operands = jax.tree.map(refuse_forward_mode, (x, expert_weights, weights))
    y = _moe(call, *operands, expert_ids) if tokens else vary(x, call.axes)
    return (y, count_choices(expert_ids, num_experts)) if counts else y


@overload
def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: Weight,
    w_up: Weight,
    w_down: Weight,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: str,
    config: MoEConfig | None = None,
    counts: Literal[False] = False,
) -> jax.Array: ...


@overload
def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: Weight,
    w_up: Weight,
    w_down: Weight,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: str,
    config: MoEConfig | None = None,
    counts: Literal[True],
) -> tuple[jax.Array, ChoiceCounts]: ...


def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: Weight,
    w_up: Weight,
    w_down: Weight,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: str,
    config: MoEConfig | None = None,
    counts: bool = False,
) -> jax.Array | tuple[jax.Array, ChoiceCounts]:
    """`moe_ffn` on global arrays: tokens are sharded over all mesh axes, experts over one.

    Args:
      x: [T, H] all tokens; T is a multiple of the number of devices.
      expert_ids: [T, K] int32.
      expert_weights: [T, K] float32.
      w_gate: [experts, H, I]; experts is a multiple of the axis' size.
      w_up: [experts, H, I].
      w_down: [experts, I, H].
      mesh: the mesh; None: that of `jax.set_mesh`. In a function that is compiled the latter does
        not tell its devices, with what that means for `MoEConfig.composition`.
      axis_name: mesh axis over which experts are partitioned; each position along the other axes
        is a group of ranks of its own, with the same weights.
      config: options.
      counts: whether to return a `ChoiceCounts` of all choices too.

    Returns:
      y: [T, H], sharded as the tokens; with `counts` a pair of y and them.

    Raises:
      MoEInputError: as `moe_ffn`, without a mesh, for an axis that it lacks, tokens it cannot share
        out, GPUs that cannot do what `MoEConfig.composition` insists on, or, outside `jax.jit`,
        operands that are committed to other devices.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise MoEInputError(
            "moe was called inside jax.shard_map: call moe_ffn there, on this device's arrays"
        )
    mesh = find_mesh(mesh)
    check_axis(mesh, axis_name)
    config = config_or_default(config)
    check_operands(x, expert_ids, expert_weights, Weights(w_gate, w_up, w_down), config)
    if x.shape[0] % mesh.size:
        padded = -(-x.shape[0] // mesh.size) * mesh.size
        raise MoEInputError(
            f"{x.shape[0]} tokens cannot be divided among {mesh.size} devices: pad x to "
            f"{padded} tokens, with expert_ids -1 for the padding"
        )
    check_experts(w_gate.shape[0], mesh.shape[axis_name], axis_name)
    if config.composition == "composed" and not _ranks_share_a_process(mesh, axis_name):
        raise MoEInputError(
            "composition='composed' needs ranks that share memory, and along mesh axis "
            f"{axis_name!r} there are devices of several processes: use composition='auto'"
        )
    config = _replace_if_apart(config, mesh, axis_name)
    tokens, experts = P(mesh.axis_names), P(axis_name)
    specs = (tokens, tokens, tokens, experts, experts, experts)
    operands = (x, expert_ids, expert_weights, w_gate, w_up, w_down)
    names = ("x", "expert_ids", "expert_weights", "w_gate", "w_up", "w_down")
    check_committed(mesh, dict(zip(names, zip(operands, specs, strict=True), strict=True)))
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    ]
    if explicit:
        operands = tuple(
            jax.sharding.reshard(operand, NamedSharding(mesh, _only(spec, explicit)))
            for operand, spec in zip(operands, specs, strict=True)
        )
    body = functools.partial(moe_ffn, axis_name=axis_name, config=config)
    y = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=tokens)(*operands)
    return (y, count_choices(expert_ids, w_gate.shape[0])) if counts else y


def _ranks_share_a_process(mesh: Mesh | AbstractMesh, axis_name: str) -> bool:
    if isinstance(mesh, AbstractMesh):
        return True
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    axis = mesh.axis_names.index(axis_name)
    return bool(np.all(processes == processes.take([0], axis)))


def _replace_if_apart(config: MoEConfig, mesh: Mesh | AbstractMesh, axis_name: str) -> MoEConfig:
    """The config, or one of the collective composition for GPUs that cannot do without."""
    if isinstance(mesh, AbstractMesh) or config.composition == "collective":
        return config
    axis = mesh.axis_names.index(axis_name)
    ranks = mesh.devices.shape[axis]
    apart = reach.out_of_reach(np.moveaxis(mesh.devices, axis, -1).reshape(-1, ranks))
    if apart is None:
        return config
    which = f"ranks of mesh axis {axis_name!r} cannot reach each other's memory: {apart}"
    if config.composition != "auto":
        raise MoEInputError(
            f"composition={config.composition!r} is not possible, since {which}; keep the axis "
            "inside an NVLink domain, or use composition='auto'"
        )
    warn_once(
        f"{which}. Rows move through XLA's collectives, which is slower; "
        "MoEConfig(composition='fused') makes this an error"
    )
    return dataclasses.replace(config, composition="collective")


def _only(spec: P, names: list[str]) -> P:
    """The one-dimensional spec without the axes that are not named."""
    axes = (spec[0],) if isinstance(spec[0], str) else spec[0]
    return P(tuple(axis for axis in axes if axis in names))


class _Operands(NamedTuple):
    x: jax.Array
    expert_ids: jax.Array
    router_weights: jax.Array
    weights: Weights[Weight]


class _Residuals(NamedTuple):
    routed: layer.Routed
    x: jax.Array
    router_weights: jax.Array
    weights: Weights[Weight]
    pre_activations: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(
    call: Call,
    x: jax.Array,
    router_weights: jax.Array,
    weights: Weights[Weight],
    expert_ids: jax.Array,
) -> jax.Array:
    operands = _vary(call, _Operands(x, expert_ids, router_weights, weights))
    return _forward(call, operands, keep=False)[0]


_Forward = tuple[jax.Array, Plan | None, jax.Array | None]


def _forward(call: Call, operands: _Operands, *, keep: bool) -> _Forward:
    """y, and if they are to be kept the plan and the pre-activations of the first rows.

    The platform is known only when the program is lowered: both ways are traced.
    """

    def in_waves(plan_of: Callable[[Call, jax.Array, jax.Array], Plan]) -> Callable[..., _Forward]:
        def run(operands: _Operands) -> _Forward:
            x, ids, router_weights, weights = operands
            place = vary(call.position.place(), call.axes)
            routed = layer.Routed(plan_of(call, ids, place), place)
            y, kept = layer.forward(
                call, routed, x, router_weights, weights, keep_pre_activations=keep
            )
            return y, routed.plan if keep else None, kept

        return run

    def in_one_call(operands: _Operands) -> _Forward:
        if keep:
            return fused.forward_and_keep(call, *operands)
        return fused.forward(call, *operands), None, None

    def refused(reason: str) -> Callable[..., _Forward]:
        return lambda operands: on_cpu(operands._replace(x=refuse_when_lowered(operands.x, reason)))

    on_cpu = in_waves(make_plan)
    composition = call.config.composition
    return jax.lax.platform_dependent(
        operands,
        cpu=refused(_NO_CPU_KERNEL) if composition == "fused" else on_cpu,
        cuda=in_waves(gather_plan_on_gpu) if composition == "collective" else in_one_call,
        default=refused("the MoE layer runs on CPU devices and on NVIDIA GPUs only"),
    )


def _vary(call: Call, operands: _Operands) -> _Operands:
    """The operands typed as differing along the call's axes, and refused under `jax.vmap`."""
    return jax.tree.map(lambda array: vary(guard(array), call.axes), operands)


def _moe_forward(
    call: Call,
    x: jax.Array,
    router_weights: jax.Array,
    weights: Weights[Weight],
    expert_ids: jax.Array,
) -> tuple[jax.Array, _Residuals]:
    check_derivable(weights)
    operands = _vary(call, _Operands(x, expert_ids, router_weights, weights))
    y, plan, pre_activations = _forward(call, operands, keep=True)
    plan = checkpoint_name(plan, _PLAN_NAME)
    pre_activations = checkpoint_name(pre_activations, _PRE_ACTIVATIONS_NAME)
    x, _, router_weights, weights = operands
    routed = layer.Routed(plan, vary(call.position.place(), call.axes))
    return y, _Residuals(routed, x, router_weights, weights, pre_activations)


def _moe_backward(
    call: Call, residuals: _Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array, Weights[Weight | None], None]:
    dy = vary(guard(dy), call.axes)
    weights = residuals.weights
    # What is summed over replicas is summed in float32.
    summed_axes = {axis for axes in call.operand_axes[2:] for axis in varying_axes(dy) - axes}
    is_summed = any(jax.lax.axis_size(axis) > 1 for axis in summed_axes)
    masters = [master for w in weights if (master := precision.master_of(w)) is not None]
    # Masters may be of any float dtype, the kernels write these two; `gradient_of` converts.
    dtypes = {master.dtype for master in masters} or {dy.dtype}
    is_half = not is_summed and dtypes == {jnp.dtype(jnp.bfloat16)}
    weight_dtype = jnp.dtype(jnp.bfloat16 if is_half else jnp.float32)

    def in_waves(dy: jax.Array, residuals: _Residuals) -> layer.Gradients:
        gradients = layer.backward(call, *residuals, dy=dy)
        return gradients._replace(
            weights=Weights(*(d.astype(weight_dtype) for d in gradients.weights))
        )

    def in_one_call(dy: jax.Array, residuals: _Residuals) -> layer.Gradients:
        return fused.backward(
            call,
            residuals.routed.plan,
            residuals.x,
            residuals.router_weights,
            residuals.weights,
            residuals.pre_activations,
            dy,
            weight_dtype,
        )

    def elsewhere(dy: jax.Array, residuals: _Residuals) -> layer.Gradients:
        reason = "the MoE layer runs on CPU devices and on NVIDIA GPUs only"
        return in_waves(refuse_when_lowered(dy, reason), residuals)

    gradients = jax.lax.platform_dependent(
        dy,
        residuals,
        cpu=in_waves,
        cuda=in_waves if call.config.composition == "collective" else in_one_call,
        default=elsewhere,
    )
    dx, d_router_weights, *d_weights = (
        sum_replicas(gradient, axes)
        for gradient, axes in zip(
            (gradients.x, gradients.router_weights, *gradients.weights),
            call.operand_axes,
            strict=True,
        )
    )
    return dx, d_router_weights, Weights(*map(precision.gradient_of, weights, d_weights)), None


_moe.defvjp(_moe_forward, _moe_backward)
