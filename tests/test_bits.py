"""Bit equality: what may never change a result, not even in its last bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import AXIS, assert_same_bits, draw_inputs, mesh_of, run_layer, shard
from oracle import Inputs, Outputs
from routings import ROUTINGS

import jax_mok

EXPERTS = 24
TOKENS = 240  # of all ranks
CHOICES = 3
MoEConfig = jax_mok.MoEConfig

both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# One width that fills vector registers evenly and one that leaves a remainder everywhere.
both_widths = pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (37, 19)])


@functools.cache
def batch(dtype: str = "float32", hidden: int = 64, inner: int = 32) -> Inputs:
    """A global batch of uneven load, with masked choices and experts named twice."""
    rng = np.random.default_rng(21)
    routes = ROUTINGS["zipf"](rng, 1, TOKENS, CHOICES, EXPERTS)
    routes[rng.random(routes.shape) < 0.1] = -1
    return draw_inputs(
        rng, routes, hidden=hidden, inner=inner, experts=EXPERTS, dtype=jnp.dtype(dtype)
    )


@functools.cache
def default_result(
    ranks: int, dtype: str = "float32", hidden: int = 64, inner: int = 32
) -> Outputs:
    return run_layer(batch(dtype, hidden, inner), ranks)


@both_widths
@both_dtypes
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_results_are_bit_equal_for_any_number_of_ranks(
    ranks: int, dtype: str, hidden: int, inner: int
) -> None:
    assert_same_bits(
        default_result(ranks, dtype, hidden, inner), default_result(1, dtype, hidden, inner)
    )


@pytest.mark.parametrize("dtype_ring", [("float32", 64), ("float32", 256), ("bfloat16", 128)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_results_are_bit_equal_for_any_ring(ranks: int, dtype_ring: tuple[str, int]) -> None:
    dtype, ring_rows = dtype_ring
    config = MoEConfig(ring_rows=ring_rows, chunk_rows=64)
    assert_same_bits(run_layer(batch(dtype), ranks, config), default_result(1, dtype))


@pytest.mark.parametrize("chunk_rows", [64, 128, 512])
def test_results_are_bit_equal_for_any_chunk(chunk_rows: int) -> None:
    config = MoEConfig(ring_rows=512, chunk_rows=chunk_rows)
    assert_same_bits(run_layer(batch(), 3, config), default_result(1))


# Rank 0 of 2 has more than 12 tiles of this batch; 384 rows are a part of them.
@both_dtypes
@pytest.mark.parametrize("ring_rows", [None, 128])
@pytest.mark.parametrize("saved_rows", [0, 384, 64 * 64])
def test_results_are_bit_equal_for_any_number_of_saved_rows(
    saved_rows: int, ring_rows: int | None, dtype: str
) -> None:
    config = MoEConfig(saved_rows=saved_rows, ring_rows=ring_rows, chunk_rows=64)
    assert_same_bits(run_layer(batch(dtype), 2, config), default_result(1, dtype))


OPPOSITE = {"pull": "push", "push": "pull"}
OPERATIONS = ("dispatch", "combine", "reverse_combine", "reverse_dispatch")


@pytest.mark.parametrize("turned", [*((o,) for o in OPERATIONS), OPERATIONS])
def test_results_are_bit_equal_for_any_direction(turned: tuple[str, ...]) -> None:
    config = MoEConfig(ring_rows=128, chunk_rows=64)
    directions = {o: OPPOSITE[getattr(config, o)] for o in turned}
    config = dataclasses.replace(config, **directions)
    assert_same_bits(run_layer(batch(), 4, config), default_result(1))


@both_dtypes
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_collective_composition_is_bit_equal_to_the_composed_one(ranks: int, dtype: str) -> None:
    collective = run_layer(batch(dtype), ranks, MoEConfig(composition="collective"))
    assert_same_bits(collective, default_result(1, dtype))


def test_collective_composition_with_a_small_ring_is_bit_equal() -> None:
    config = MoEConfig(composition="collective", ring_rows=128, chunk_rows=64, saved_rows=192)
    assert_same_bits(run_layer(batch(), 3, config), default_result(1))


@both_dtypes
def test_wide_results_are_bit_equal_for_any_number_of_ranks_and_in_repeats(dtype: str) -> None:
    # Wide enough for XLA to split one product among threads.
    rng = np.random.default_rng(4)
    routes = ROUTINGS["zipf"](rng, 1, 96, 2, 4)
    inputs = draw_inputs(rng, routes, hidden=1024, inner=512, experts=4, dtype=jnp.dtype(dtype))
    expected = run_layer(inputs, 1)
    for _ in range(3):
        assert_same_bits(run_layer(inputs, 4), expected)


@both_dtypes
def test_three_repeats_are_bit_equal(dtype: str) -> None:
    first, *repeats = (run_layer(batch(dtype), 8) for _ in range(3))
    for repeat in repeats:
        assert_same_bits(repeat, first)


@both_dtypes
def test_a_token_is_bit_equal_whatever_batch_is_around_it(dtype: str) -> None:
    shared, first = 40, 133
    alone = batch(dtype)
    rng = np.random.default_rng(77)
    other_routes = ROUTINGS["uniform"](rng, 1, 2 * TOKENS, CHOICES, EXPERTS)
    around = draw_inputs(
        rng, other_routes, hidden=64, inner=32, experts=EXPERTS, dtype=jnp.dtype(dtype)
    )._replace(w_gate=alone.w_gate, w_up=alone.w_up, w_down=alone.w_down)
    per_token = ("x", "expert_ids", "expert_weights", "dy")
    for name in per_token:
        getattr(around, name)[first : first + shared] = getattr(alone, name)[:shared]

    for ranks in (1, 4):
        result = run_layer(around, ranks)
        for name in ("y", "dx", "d_expert_weights"):
            expected = getattr(default_result(1, dtype), name)[:shared]
            actual = getattr(result, name)[first : first + shared]
            assert actual.tobytes() == expected.tobytes(), f"{name} on {ranks} ranks"


@pytest.mark.parametrize("used", ["y", "dx", "d_expert_weights", "d_w_gate", "d_w_up", "d_w_down"])
def test_a_result_is_bit_equal_when_it_is_the_only_one_used(used: str) -> None:
    primal = {"dx": "x", "d_expert_weights": "expert_weights"}.get(used, used.removeprefix("d_"))

    @jax.jit
    def only(inputs: Inputs) -> jax.Array:
        def layer(value: jax.Array) -> jax.Array:
            i = inputs if used == "y" else inputs._replace(**{primal: value})
            return jax_mok.moe(*i[:-1], mesh=mesh_of(4), axis_name=AXIS)

        if used == "y":
            return layer(inputs.x)
        return jax.vjp(layer, getattr(inputs, primal))[1](inputs.dy)[0]

    actual = np.asarray(only(shard(batch(), mesh_of(4))))
    assert actual.tobytes() == getattr(default_result(1), used).tobytes()


@both_dtypes
@pytest.mark.parametrize("routing", ["zipf", "one_rank"])
def test_seventy_two_ranks_are_right_and_bit_equal_to_one(routing: str, dtype: str) -> None:
    rng = np.random.default_rng(72)
    routes = ROUTINGS[routing](rng, 72, 2, 3, 72)
    inputs = draw_inputs(rng, routes, hidden=16, inner=8, experts=72, dtype=jnp.dtype(dtype))
    world = run_layer(inputs, 72)
    tolerance = {"float32": 1e-5, "bfloat16": 8e-3}[dtype]
    oracle.assert_close(world, oracle.layer(inputs), tolerance)
    assert_same_bits(world, run_layer(inputs, 1))
