"""The plan, against its definition and for what the layer relies on."""

import functools

import jax
import numpy as np
import oracle
import pytest
from harness import AXIS, expect_recorded_faults, mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from routings import ROUTINGS, group_sizes

import jax_mok
from jax_mok import _native

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 72)


@st.composite
def plan_arguments(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int]:
    """Routes [ranks, T, K], number of experts, tile rows, chunk rows."""
    ranks = draw(st.sampled_from(RANKS))
    choices = draw(st.integers(1, 8))
    tokens = draw(st.integers(0, max(2, 600 // (ranks * choices))))
    experts = ranks * draw(st.integers(1, 5))
    routing = ROUTINGS[draw(st.sampled_from(sorted(ROUTINGS)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tile_rows = draw(st.sampled_from((4, 64, 128)))
    chunk_rows = tile_rows * draw(st.integers(1, 9))
    return routing(rng, ranks, tokens, choices, experts), experts, tile_rows, chunk_rows


def assert_same_plan(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == np.int32, name
        np.testing.assert_array_equal(actual[name], array, err_msg=name, strict=True)


def native_plan(
    routes: np.ndarray, rank: int, experts: int, tile_rows: int, chunk_rows: int
) -> dict[str, np.ndarray]:
    """The plan from the code of the custom call, without XLA, so that no example compiles."""
    plan = _native.build_plan(routes, rank, experts, tile_rows, chunk_rows)
    for name in ("slot_rank", "slot_row"):
        plan[name] = plan[name].reshape(routes.shape[1:])
    return plan


def all_plans(
    routes: np.ndarray, experts: int, tile_rows: int, chunk_rows: int
) -> list[dict[str, np.ndarray]]:
    return [
        native_plan(routes, rank, experts, tile_rows, chunk_rows) for rank in range(len(routes))
    ]


@settings(max_examples=300, deadline=None)
@given(plan_arguments(), st.data())
def test_plan_is_its_definition(
    arguments: tuple[np.ndarray, int, int, int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(arguments[0]) - 1), label="rank")
    routes, *sizes = arguments
    assert_same_plan(native_plan(routes, rank, *sizes), oracle.plan(routes, rank, *sizes))


@settings(max_examples=100, deadline=None)
@given(plan_arguments())
def test_every_choice_has_exactly_one_row_on_the_rank_that_owns_its_expert(
    arguments: tuple[np.ndarray, int, int, int],
) -> None:
    routes, experts, tile_rows, _ = arguments
    plans = all_plans(*arguments)
    local = experts // len(routes)
    flat = routes.reshape(-1)
    wanted = np.flatnonzero((flat >= 0) & (flat < experts))
    filled = np.concatenate([p["row_source"][p["row_source"] >= 0] for p in plans])
    np.testing.assert_array_equal(np.sort(filled), wanted)
    for owner, plan in enumerate(plans):
        rows = np.flatnonzero(plan["row_source"] >= 0)
        experts_of_rows = owner * local + plan["tile_expert"][rows // tile_rows]
        np.testing.assert_array_equal(flat[plan["row_source"][rows]], experts_of_rows)


@settings(max_examples=100, deadline=None)
@given(plan_arguments())
def test_slot_rank_and_slot_row_invert_row_source(
    arguments: tuple[np.ndarray, int, int, int],
) -> None:
    routes, experts, _, _ = arguments
    plans = all_plans(*arguments)
    slot_rank = np.stack([p["slot_rank"] for p in plans]).reshape(-1)
    slot_row = np.stack([p["slot_row"] for p in plans]).reshape(-1)
    flat = routes.reshape(-1)
    for slot in range(len(flat)):
        if 0 <= flat[slot] < experts:
            assert plans[slot_rank[slot]]["row_source"][slot_row[slot]] == slot
        else:
            assert (slot_rank[slot], slot_row[slot]) == (-1, -1)


@settings(max_examples=100, deadline=None)
@given(plan_arguments(), st.data())
def test_pull_order_of_a_chunk_is_a_permutation_of_its_rows(
    arguments: tuple[np.ndarray, int, int, int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(arguments[0]) - 1), label="rank")
    plan = native_plan(arguments[0], rank, *arguments[1:])
    chunk_rows = arguments[3]
    for start in range(0, len(plan["row_source"]), chunk_rows):
        order = plan["pull_order"][start : start + chunk_rows]
        rows = start + np.flatnonzero(plan["row_source"][start : start + chunk_rows] >= 0)
        np.testing.assert_array_equal(np.sort(order[: len(rows)]), rows)
        assert np.all(order[len(rows) :] == -1)


@settings(max_examples=100, deadline=None)
@given(plan_arguments(), st.data())
def test_every_source_is_pulled_from_in_every_round_until_it_is_exhausted(
    arguments: tuple[np.ndarray, int, int, int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(arguments[0]) - 1), label="rank")
    routes, _, _, chunk_rows = arguments
    ranks, tokens, choices = routes.shape
    plan = native_plan(routes, rank, *arguments[1:])
    for start in range(0, len(plan["pull_order"]), chunk_rows):
        order = plan["pull_order"][start : start + chunk_rows]
        sources = plan["row_source"][order[order >= 0]] // (tokens * choices)
        left = np.bincount(sources, minlength=ranks)
        while left.any():
            round_sources = sources[: np.count_nonzero(left)]
            # Distinct, every one that has rows left, and the right neighbour before the others.
            distance = (round_sources - rank - 1) % ranks
            assert np.all(np.diff(distance) > 0)
            assert np.all(left[round_sources] > 0)
            left[round_sources] -= 1
            sources = sources[len(round_sources) :]


def test_tables_of_known_group_sizes() -> None:
    routes = group_sizes(np.random.default_rng(0), 3, [1, 63, 65, 127, 257, 0])
    plans = all_plans(routes, 6, 64, 128)
    assert [p["expert_rows"].tolist() for p in plans] == [[1, 63], [65, 127], [257, 0]]
    assert [p["expert_tile"].tolist() for p in plans] == [[0, 1, 2], [0, 2, 4], [0, 5, 5]]
    assert plans[1]["tile_expert"].tolist() == [0, 0, 1, 1] + [-1] * 5
    assert [p["counts"].tolist() for p in plans] == [
        [64, 2, 5, 0, 0],
        [192, 4, 5, 0, 0],
        [257, 5, 5, 0, 0],
    ]


@given(
    chunk_rows=st.integers(1, 5).map(lambda tiles: 64 * tiles),
    chunks=st.integers(1, 6),
    waves=st.integers(1, 4),
)
@settings(max_examples=30, deadline=None)
def test_a_wave_fills_the_ring_once_and_waves_take_the_rows_in_order(
    chunk_rows: int, chunks: int, waves: int
) -> None:
    ring_rows = chunks * chunk_rows
    positions = [
        _native.ring_position(row, ring_rows, chunk_rows) for row in range(waves * ring_rows)
    ]
    expected = [
        (wave, slot, slot * chunk_rows + row)
        for wave in range(waves)
        for slot in range(chunks)
        for row in range(chunk_rows)
    ]
    assert positions == expected


@functools.cache
def traced_build_plan(ranks: int, experts: int, chunk_rows: int) -> jax.stages.Wrapped:
    build = functools.partial(
        jax_mok.build_plan,
        num_experts=experts,
        axis_name=AXIS,
        config=jax_mok.MoEConfig(chunk_rows=chunk_rows),
    )
    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(build, mesh=mesh_of(ranks), in_specs=spec, out_specs=spec))


@pytest.mark.parametrize("routing", ["zipf", "one_rank", "silent_rank", "out_of_range"])
@pytest.mark.parametrize(
    ("ranks", "tokens", "choices", "local", "chunk_rows"),
    [(1, 1, 1, 1, 64), (3, 65, 2, 2, 64), (8, 40, 8, 3, 128), (72, 3, 2, 1, 192)],
)
def test_plan_built_inside_shard_map_is_its_definition(
    ranks: int, tokens: int, choices: int, local: int, chunk_rows: int, routing: str
) -> None:
    experts = ranks * local
    routes = ROUTINGS[routing](np.random.default_rng(5), ranks, tokens, choices, experts)
    plans = traced_build_plan(ranks, experts, chunk_rows)(routes.reshape(-1, choices))
    for rank in range(ranks):
        plan = jax.tree.map(lambda a, r=rank: np.split(np.asarray(a), ranks)[r], plans)
        expected = oracle.plan(routes, rank, experts, 64, chunk_rows)
        assert_same_plan({name: getattr(plan, name) for name in expected}, expected)
        properties = (plan.rows, plan.tiles, plan.most_tiles, plan.masked, plan.out_of_range)
        np.testing.assert_array_equal(properties, expected["counts"])
    expect_recorded_faults(routes, experts)
