"""The plan on NVIDIA GPUs, table by table against its definition: run with `pytest -m gpu`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from gpu_harness import MoEConfig, mesh_of, poison_memory, rank_counts, require_gpus
from harness import expect_recorded_faults
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from routings import ROUTINGS, group_sizes

import jax_mok

pytestmark = pytest.mark.gpu

TILE_ROWS = 64


@functools.cache
def planner(
    ranks: int, experts: int, chunk_rows: int = 256, check_vma: bool = True
) -> jax.stages.Wrapped:
    config = MoEConfig(chunk_rows=chunk_rows)
    build = functools.partial(
        jax_mok.build_plan, num_experts=experts, axis_name="ep", config=config
    )
    spec = P("ep")
    mesh = mesh_of(ranks)
    return jax.jit(
        jax.shard_map(build, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    )


def on_gpus(ids: np.ndarray, ranks: int) -> jax.Array:
    return jax.device_put(ids, NamedSharding(mesh_of(ranks), P("ep")))


def draw(
    routing: str, ranks: int, tokens: int, choices: int, experts: int, seed: int = 0
) -> np.ndarray:
    """Routes [ranks, tokens, choices]."""
    return ROUTINGS[routing](np.random.default_rng(seed), ranks, tokens, choices, experts)


def assert_plans_are_right(
    routes: np.ndarray, experts: int, chunk_rows: int = 256, check_vma: bool = True
) -> None:
    ranks, _, choices = routes.shape
    build = planner(ranks, experts, chunk_rows, check_vma)
    compare(build(on_gpus(routes.reshape(-1, choices), ranks)), routes, experts, chunk_rows)
    expect_recorded_faults(routes, experts)


def compare(plans: jax_mok.Plan, routes: np.ndarray, experts: int, chunk_rows: int = 256) -> None:
    ranks = len(routes)
    for rank in range(ranks):
        plan = jax.tree.map(lambda a, r=rank: np.split(np.asarray(a), ranks)[r], plans)
        expected = oracle.plan(routes, rank, experts, TILE_ROWS, chunk_rows)
        for name, table in expected.items():
            got = getattr(plan, name)
            assert got.dtype == np.int32, name
            np.testing.assert_array_equal(got, table, err_msg=f"rank {rank}: {name}", strict=True)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    poison_memory(np.int32(0x5EADBEEF))


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_plan_is_its_definition_for_every_routing(routing):
    for ranks in rank_counts():
        assert_plans_are_right(draw(routing, ranks, 300, 4, 12), 12, chunk_rows=128)


@pytest.mark.parametrize("routing", ["zipf", "out_of_range"])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts"),
    [
        (1, 1, 2),
        (1, 16, 32),
        (2, 3, 4),
        (17, 16, 64),
        (63, 1, 6),
        (64, 8, 8),
        (129, 2, 2),
        (1000, 16, 256),
        (777, 5, 1024),
    ],
)
def test_plan_is_its_definition_for_any_size(tokens, choices, experts, routing):
    for ranks in rank_counts():
        assert_plans_are_right(draw(routing, ranks, tokens, choices, experts), experts)


@pytest.mark.parametrize("chunk_rows", [64, 192, 512, 8192])
def test_pull_order_follows_any_chunk(chunk_rows):
    for ranks in rank_counts():
        assert_plans_are_right(draw("silent_rank", ranks, 500, 6, 10), 10, chunk_rows)
        assert_plans_are_right(draw("uniform", ranks, 500, 6, 10), 10, chunk_rows)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one_rank"])
def test_plan_of_8192_tokens_is_its_definition(routing):
    for ranks in rank_counts():
        assert_plans_are_right(draw(routing, ranks, 8192, 8, 128), 128, chunk_rows=4096)


def test_experts_of_awkward_sizes_and_none():
    for ranks in rank_counts():
        routes = group_sizes(np.random.default_rng(0), ranks, [1, 63, 65, 127, 258, 0])
        assert_plans_are_right(routes, 6)


def test_types_of_the_mesh_need_not_be_checked():
    for ranks in rank_counts():
        assert_plans_are_right(draw("zipf", ranks, 90, 3, 8), 8, check_vma=False)


def test_repeats_with_new_routes_never_see_the_routes_before():
    """XLA captures the calls in a graph from the second run on; nothing waits between the runs."""
    experts = 16
    for ranks in rank_counts():
        build = planner(ranks, experts)
        routes = [draw("uniform", ranks, 640, 4, experts, seed) for seed in range(12)]
        ids = [on_gpus(each.reshape(-1, 4), ranks) for each in routes]
        plans = [build(each) for each in ids]
        for plan, each in zip(plans, routes, strict=True):
            compare(plan, each, experts)


def test_calls_of_one_program_and_of_a_loop_do_not_meet_each_other():
    experts = 8
    for ranks in rank_counts():
        build = planner(ranks, experts)
        routes = np.stack([draw("zipf", ranks, 200, 2, experts, seed) for seed in range(4)])
        ids = jax.device_put(routes.reshape(4, -1, 2), NamedSharding(mesh_of(ranks), P(None, "ep")))
        looped = jax.jit(lambda ids, build=build: jax.lax.map(build, ids))
        unrolled = jax.jit(lambda ids, build=build: [build(each) for each in ids])
        for _ in range(3):
            by_loop, one_by_one = looped(ids), unrolled(ids)
        for turn in range(4):
            compare(jax.tree.map(lambda a, t=turn: a[t], by_loop), routes[turn], experts)
            compare(one_by_one[turn], routes[turn], experts)


def test_program_is_one_call_and_gathers_nothing():
    for ranks, target in ((1, "jax_mok_plan_alone"), (2, "jax_mok_plan_peers")):
        if ranks not in rank_counts():
            continue
        ids = on_gpus(np.zeros((64 * ranks, 2), np.int32), ranks)
        text = planner(ranks, 8).lower(ids).compile().as_text()
        assert re.findall(r'custom_call_target="(jax_mok\w+)"', text) == [target]
        assert "all-gather" not in text


def test_ranks_that_miss_each_other_get_empty_plans_and_a_fault():
    """Sizes that no other test uses: ranks that have missed each other never meet again."""
    require_gpus(2)
    tokens, choices, experts = 77, 3, 4
    config = jax_mok.MoEConfig(timeout_s=1e-3)

    def late_on_rank_1(ids, square):
        turns = jnp.where(jax.lax.axis_index("ep") == 1, 2000, 0)
        square = jax.lax.fori_loop(0, turns, lambda _, a: a @ a / 64, square)
        ids += (0 * square[0, 0]).astype(np.int32)
        return jax_mok.build_plan(ids, num_experts=experts, axis_name="ep", config=config)

    spec = P("ep")
    run = jax.jit(jax.shard_map(late_on_rank_1, mesh=mesh_of(2), in_specs=spec, out_specs=spec))
    routes = draw("uniform", 2, tokens, choices, experts)
    plans = jax.block_until_ready(
        run(
            on_gpus(routes.reshape(-1, choices), 2),
            on_gpus(np.full((2 * 2048, 2048), 1 / 32, np.float32), 2),
        )
    )
    with pytest.raises(jax_mok.MoETimeoutError, match=r"rank 0 waited in vain for rank 1"):
        jax_mok.check()
    for table in ("row_source", "pull_order", "tile_expert", "slot_rank", "slot_row"):
        assert np.all(np.asarray(getattr(plans, table)) == -1), table
    assert not np.any(plans.expert_tile)
    assert not np.any(plans.expert_rows)
    masked = [0, 0, 0, tokens * choices, 0]
    np.testing.assert_array_equal(np.asarray(plans.counts).reshape(2, -1), [masked, masked])
