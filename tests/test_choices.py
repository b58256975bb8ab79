"""Masked and out-of-range choices, counted as an output of the call."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routings
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from oracle import Inputs

import jax_mok

RANKS, TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 4, 24, 16, 24, 8, 2


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    rng = np.random.default_rng(23)
    routes = routings.out_of_range(rng, RANKS, TOKENS, TOP_K, EXPERTS)
    masked = rng.random(routes.shape) < 0.2
    routes = np.where(masked, np.int32(-1), routes)
    return harness.draw_inputs(rng, routes, hidden=HIDDEN, inner=INNER, experts=EXPERTS)


def counts_of(ids: np.ndarray) -> tuple[int, int]:
    return np.sum(ids == -1), np.sum((ids < -1) | (ids >= EXPERTS))


def mesh(*, is_explicit: bool) -> Mesh:
    kind = AxisType.Explicit if is_explicit else AxisType.Auto
    return jax.make_mesh((2, RANKS), ("dp", "ep"), axis_types=(kind, kind))


@pytest.mark.parametrize("is_explicit", [False, True])
@pytest.mark.parametrize("composition", ["auto", "collective"])
def test_counts_of_a_global_call_are_of_all_choices(inputs, composition, is_explicit):
    layer = functools.partial(
        jax_mok.moe,
        mesh=mesh(is_explicit=is_explicit),
        axis_name="ep",
        config=jax_mok.MoEConfig(composition=composition),
    )
    want = np.asarray(jax.jit(layer)(*inputs[:6]))
    harness.expect_recorded_faults(inputs.expert_ids, EXPERTS)
    y, counts = jax.jit(functools.partial(layer, counts=True))(*inputs[:6])
    np.testing.assert_array_equal(y, want)
    assert tuple(map(int, counts)) == counts_of(inputs.expert_ids)
    assert min(counts) > 0
    harness.expect_recorded_faults(inputs.expert_ids, EXPERTS)


@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_counts_inside_shard_map_are_the_devices_and_those_of_its_plan(inputs, tokens):
    def body(x, ids, *rest):
        _, counts = jax_mok.moe_ffn(x, ids, *rest, axis_name="ep", counts=True)
        plan = jax_mok.build_plan(ids, num_experts=EXPERTS, axis_name="ep")
        return jnp.stack(counts)[None], jnp.stack([plan.masked, plan.out_of_range])[None]

    operands = [a[: RANKS * tokens] for a in inputs[:3]]
    step = jax.shard_map(body, mesh=harness.mesh_of(RANKS), in_specs=P("ep"), out_specs=P("ep"))
    counts, of_plan = jax.jit(step)(*operands, *inputs[3:6])
    ids = operands[1].reshape(RANKS, tokens, TOP_K)
    np.testing.assert_array_equal(counts, [counts_of(part) for part in ids])
    np.testing.assert_array_equal(counts, of_plan)
    harness.expect_recorded_faults(operands[1], EXPERTS)


def test_counts_beside_a_gradient_leave_its_bits(inputs):
    def loss(x, counts):
        y = jax_mok.moe(x, *inputs[1:6], mesh=harness.mesh_of(RANKS), axis_name="ep", counts=counts)
        return (jnp.sum(y[0] ** 2), y[1]) if counts else jnp.sum(y**2)

    want = jax.jit(jax.grad(functools.partial(loss, counts=False)))(inputs.x).block_until_ready()
    harness.expect_recorded_faults(inputs.expert_ids, EXPERTS)
    dx, counts = jax.jit(jax.grad(functools.partial(loss, counts=True), has_aux=True))(inputs.x)
    np.testing.assert_array_equal(dx, want)
    assert tuple(map(int, counts)) == counts_of(inputs.expert_ids)
    harness.expect_recorded_faults(inputs.expert_ids, EXPERTS)
