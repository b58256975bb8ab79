"""The collective composition on NVIDIA GPUs: run with `pytest -m gpu`."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_gpu
import test_gpu_plan
from gpu_harness import (
    MoEConfig,
    gpus,
    mesh_of,
    poison_memory,
    rank_counts,
    require_gpus,
    run_in_two_processes,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracle import Inputs
from routings import ROUTINGS
from test_gpu import assert_right, draw, mostly_masked, on_gpus, run

import jax_mok
from jax_mok import ffi

pytestmark = pytest.mark.gpu

Collective = functools.partial(MoEConfig, composition="collective")


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    poison_memory(np.float32(np.nan))


def as_dtype(inputs: Inputs, dtype: str) -> Inputs:
    """The inputs with x and the experts' weights in the dtype."""
    x, *routes = inputs[:3]
    floats = (a.astype(jnp.dtype(dtype)) for a in inputs[3:])
    return Inputs(x.astype(jnp.dtype(dtype)), *routes, *floats)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_it_is_right_for_every_routing_and_bit_equal_for_any_number_of_gpus(routing, dtype):
    inputs = as_dtype(draw(routing), dtype)
    results = []
    for ranks in rank_counts():
        results.append(run(inputs, ranks, Collective()))
        harness.expect_recorded_faults(inputs.expert_ids, 8)
    assert results[0].dtype == inputs.x.dtype
    assert_right(results[0], inputs)
    assert len({y.tobytes() for y in results}) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_float32_masters_give_the_bits_of_rounded_weights(dtype):
    inputs = as_dtype(draw(), dtype)
    masters = as_dtype(inputs, "float32")._replace(x=inputs.x)
    for ranks in rank_counts():
        want = run(inputs, ranks, Collective())
        assert run(masters, ranks, Collective()).tobytes() == want.tobytes()


@pytest.mark.parametrize("ring_rows", [64, 256, 4096])
def test_it_is_bit_equal_for_any_ring(ring_rows):
    inputs = draw("zipf", tokens=1000, choices=3)
    want = run(inputs, 1, Collective())
    assert_right(want, inputs)
    for ranks in rank_counts():
        got = run(inputs, ranks, Collective(ring_rows=ring_rows, chunk_rows=64))
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(192, 3, 5), (34, 100, 36), (64, 2880, 7)])
def test_it_takes_any_width(tokens, hidden, inner):
    inputs = draw(tokens=tokens, hidden=hidden, inner=inner)
    for ranks in rank_counts():
        assert_right(run(inputs, ranks, Collective()), inputs)


def test_a_clamp_is_applied():
    inputs = draw()
    for ranks in rank_counts():
        assert_right(run(inputs, ranks, Collective(clamp=0.3)), inputs, clamp=0.3)


def test_repeats_are_bit_equal():
    """XLA may capture the calls in a graph from the second run on."""
    inputs = mostly_masked(draw("zipf", tokens=1000, choices=4))
    for ranks in rank_counts():
        step, operands = test_gpu.forward(ranks, Collective()), on_gpus(inputs, mesh_of(ranks))
        assert len({np.asarray(step(*operands)).tobytes() for _ in range(10)}) == 1


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_groups_of_ranks_are_independent_and_may_need_different_numbers_of_waves(shape):
    require_gpus(2)
    inputs = draw(tokens=512)
    ids = inputs.expert_ids.copy()
    ids[:256] = -1
    inputs = inputs._replace(expert_ids=ids)
    config = Collective(ring_rows=64, chunk_rows=64)
    mesh = Mesh(np.array(gpus()[:2])[::-1].reshape(shape), ("dp", "ep"))
    layer = functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep", config=config)
    y = jax.jit(layer)(*on_gpus(inputs, mesh))
    assert np.asarray(y).tobytes() == run(inputs, 1, config).tobytes()


def test_the_fused_composition_is_what_auto_takes_on_gpus_that_reach_each_other():
    inputs = draw("zipf", tokens=600)
    for ranks in rank_counts():
        want = run(inputs, ranks, MoEConfig(composition="auto"))
        got = run(inputs, ranks, MoEConfig(composition="fused"))
        assert got.tobytes() == want.tobytes()


def test_auto_is_collective_on_gpus_that_do_not_reach_each_other(monkeypatch):
    require_gpus(2)
    inputs, mesh = draw(tokens=128), mesh_of(2)
    monkeypatch.setattr(ffi.cuda, "can_reach", lambda device, peer: False)
    layer = functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep", config=MoEConfig())
    compiled = jax.jit(layer).lower(*on_gpus(inputs, mesh)).compile()
    assert "jax_mok_plan_of_gathered_routes" in compiled.as_text()
    y = np.asarray(compiled(*on_gpus(inputs, mesh)))
    assert y.tobytes() == run(inputs, 2, Collective()).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ["zipf", "one_expert", "all_masked"])
def test_gradients_are_right_and_bit_equal_for_any_number_of_gpus(routing, dtype):
    inputs = draw(routing, tokens=400)
    inputs = as_dtype(inputs, dtype)._replace(dy=inputs.dy.astype(dtype))
    one, *others = (
        harness.run_layer_on(mesh_of(ranks), inputs, Collective()) for ranks in rank_counts()
    )
    for other in others:
        harness.assert_same_bits(other, one)
    oracle.assert_close(one, oracle.layer(inputs, None), 8e-3)


@pytest.mark.parametrize(
    ("routing", "tokens", "choices", "experts"),
    [*((routing, 300, 4, 12) for routing in sorted(ROUTINGS)), ("zipf", 777, 5, 1024)],
)
def test_plan_of_gathered_routes_is_its_definition(routing, tokens, choices, experts):
    config = Collective(chunk_rows=128)
    build = functools.partial(
        jax_mok.build_plan, num_experts=experts, axis_name="ep", config=config
    )
    for ranks in rank_counts():
        poison_memory(np.int32(0x5EADBEEF))
        routes = test_gpu_plan.draw(routing, ranks, tokens, choices, experts)
        step = jax.shard_map(build, mesh=mesh_of(ranks), in_specs=P("ep"), out_specs=P("ep"))
        ids = test_gpu_plan.on_gpus(routes.reshape(-1, choices), ranks)
        test_gpu_plan.compare(jax.jit(step)(ids), routes, experts, chunk_rows=128)
        harness.expect_recorded_faults(routes, experts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("tokens", "choices", "width"), [(1, 1, 1), (77, 3, 129), (300, 16, 8), (64, 9, 2880)]
)
def test_weighted_sum_has_the_bits_of_the_cpu(tokens, choices, width, dtype):
    rng = np.random.default_rng(tokens)
    operands = (
        rng.standard_normal((tokens * choices, width)).astype(jnp.dtype(dtype)),
        rng.integers(-1, 3, (tokens, choices)).astype(np.int32),
        rng.standard_normal((tokens, choices)).astype(np.float32),
    )

    @jax.jit
    def weighted_sum(*operands):
        result = jax.ShapeDtypeStruct((tokens, width), dtype)
        return ffi.call("jax_mok_weighted_sum", [result], operands, {}, frozenset())[0]

    on_each = [
        np.asarray(weighted_sum(*jax.device_put(operands, jax.devices(platform)[0])))
        for platform in ("cpu", "cuda")
    ]
    assert on_each[0].tobytes() == on_each[1].tobytes()


PROCESS = """
import gpu_harness, numpy as np, test_gpu
from jax.experimental import multihost_utils
inputs = test_gpu.draw("zipf", tokens=600)
step = test_gpu.forward(2, gpu_harness.MoEConfig(composition="collective"))
for _ in range(3):
    y = step(*test_gpu.on_gpus(inputs, gpu_harness.mesh_of(2)))
y = multihost_utils.process_allgather(y, tiled=True)
test_gpu.assert_right(np.asarray(y), inputs)
"""


def test_it_is_right_in_two_processes():
    require_gpus(2)
    run_in_two_processes(PROCESS)
