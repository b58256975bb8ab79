"""Calls of all sizes and on many meshes in one process: right, and nothing is left behind.

Run with `pytest -m gpu`.
"""

import functools
import gc
import itertools
import random

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_harness import (
    MoEConfig,
    expect_success,
    gpus,
    mesh_of,
    rank_counts,
    require_gpus,
    start,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Inputs
from test_gpu import draw, on_gpus, run

import jax_mok

pytestmark = pytest.mark.gpu

CALLS = 10_000
ROUTES = 4  # of each program
KINDS = ("zipf", "uniform", "one_expert", "all_masked")
POOL_BLOCK = 2**25  # XLA's pool may take one more
# Host memory that JAX and the driver may keep of thousands of calls.
MOST_HOST_GROWTH = 2**26


def two_layers(mesh: Mesh, config: jax_mok.MoEConfig):
    """Two calls and a collective that has nothing to do with them; with gradients."""
    layer = functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep", config=config)

    def loss(x, weights, ids, others):
        y = layer(x, ids, *weights)
        return jnp.sum(layer(y, others, *weights).astype(jnp.float32) ** 2) * 1e-3

    @jax.jit
    def step(x, weights, ids, others):
        value, gradients = jax.value_and_grad(loss, (0, 1))(x, weights, ids, others)
        beside = jax.shard_map(
            lambda a: jax.lax.psum(a, "ep"), mesh=mesh, in_specs=P("ep"), out_specs=P()
        )(jnp.ones((mesh.size, 8)))
        return value, gradients, beside

    return step


def programs() -> list[functools.partial]:
    """Calls without arguments, of all sizes and options; each gives the same bits always."""
    calls = []
    generator = random.Random(0)
    for ranks, tokens in itertools.product(rank_counts(), (2, 130, 1000, 4096)):
        mesh = mesh_of(ranks)
        config = MoEConfig(
            ring_rows=generator.choice([None, 256, 1024]),
            chunk_rows=generator.choice([None, 64]),
            saved_rows=generator.choice([None, 0, 640]),
            dispatch=generator.choice(["pull", "push"]),
            combine=generator.choice(["pull", "push"]),
            reverse_combine=generator.choice(["pull", "push"]),
            reverse_dispatch=generator.choice(["pull", "push"]),
            composition=generator.choice(["auto", "auto", "composed"]),
        )
        step = two_layers(mesh, config)
        split = NamedSharding(mesh, P("ep"))
        drawn = [draw(KINDS[i % len(KINDS)], tokens=tokens) for i in range(ROUTES)]
        first: Inputs = drawn[0]
        x = jax.device_put(first.x, split)
        weights = tuple(
            jax.device_put(each, split)
            for each in (first.expert_weights, first.w_gate, first.w_up, first.w_down)
        )
        ids = [jax.device_put(each.expert_ids, split) for each in drawn]
        for one, other in zip(ids, ids[1:] + ids[:1], strict=True):
            calls.append(functools.partial(step, x, weights, one, other))
    return calls


def bits(results) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results))


def memory_in_use() -> list[tuple[int, int]]:
    """Bytes, of each GPU: all that is taken of it, and what JAX's arrays hold, if that is known."""
    import cupy

    gc.collect()
    used = []
    for number, gpu in enumerate(gpus()):
        with cupy.cuda.Device(number):
            free, total = cupy.cuda.runtime.memGetInfo()
        used.append((total - free, (gpu.memory_stats() or {}).get("bytes_in_use", 0)))
    return used


def assert_nothing_was_added(before: list[tuple[int, int]]) -> None:
    for (taken, held), (taken_before, held_before) in zip(memory_in_use(), before, strict=True):
        assert held <= held_before
        assert taken <= taken_before + POOL_BLOCK


def make_calls(count: int) -> None:
    """So many, of all kinds in turns: right to the end, and nothing is left behind."""
    calls = programs()
    want = [bits(call()) for call in calls]
    choose = random.Random(1)

    def make(times: int) -> None:
        for number in range(times):
            index = choose.randrange(len(calls))
            results = calls[index]()
            if number % 50 == 0:
                assert bits(results) == want[index]
        jax.block_until_ready(results)

    make(5 * len(calls))  # until XLA replays graphs, and its pool is as large as it has to be
    before, host_before = memory_in_use(), harness.memory_of_this_process()
    make(count // 2)  # of two layers each
    jax_mok.check()
    assert_nothing_was_added(before)
    assert harness.memory_of_this_process() <= host_before + MOST_HOST_GROWTH
    assert [bits(call()) for call in calls] == want


def test_ten_thousand_calls_are_right_and_leave_nothing_behind():
    make_calls(CALLS)


@pytest.mark.parametrize(
    "variables",
    [
        {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
        {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="},  # no graphs
    ],
    ids=["allocated_anew_each_time", "without_graphs"],
)
def test_calls_of_a_process_with_other_ways_of_running_them(variables):
    code = "import test_gpu_stress; test_gpu_stress.make_calls(1000)"
    expect_success(start(code, XLA_PYTHON_CLIENT_PREALLOCATE="false", **variables))


def run_on_a_new_mesh(inputs: Inputs, turn: int) -> bytes:
    """The two GPUs in either order, by a program that nobody keeps."""
    mesh = Mesh(np.array(gpus()[:2])[:: (-1) ** turn], ("ep",))
    config = MoEConfig()
    layer = jax.jit(
        lambda *operands: jax_mok.moe(*operands, mesh=mesh, axis_name="ep", config=config)
    )
    return np.asarray(layer(*on_gpus(inputs, mesh))).tobytes()


def test_many_meshes_made_and_dropped_leave_nothing_behind():
    require_gpus(2)
    inputs = draw("zipf")
    want = run(inputs, 1).tobytes()
    for turn in range(4):
        assert run_on_a_new_mesh(inputs, turn) == want
    before = memory_in_use()
    for turn in range(10):
        assert run_on_a_new_mesh(inputs, turn) == want
    assert_nothing_was_added(before)
    jax_mok.check()


def test_a_larger_shape_takes_its_memory_once_and_the_smaller_ones_stay_right():
    """What ranks show each other is of one size of calls, and is kept."""
    require_gpus(2)
    small, large = draw("zipf", tokens=142), draw("zipf", tokens=200_006)
    want = {id(inputs): run(inputs, 1).tobytes() for inputs in (small, large)}

    def turn() -> None:
        for inputs in (small, large, small):
            assert run(inputs, 2).tobytes() == want[id(inputs)]

    assert run(small, 2).tobytes() == want[id(small)]
    before = memory_in_use()
    turn()
    sizes = dict(ranks=2, tokens=100_003, top_k=2, experts=8, hidden=128, inner=192)
    arena_bytes = jax_mok.memory(MoEConfig(), **sizes).arena_bytes
    assert arena_bytes > 2**25
    after = memory_in_use()
    for (taken, _), (taken_before, _) in zip(after[:2], before[:2], strict=True):
        assert taken >= taken_before + arena_bytes
    for _ in range(5):
        turn()
    assert_nothing_was_added(after)
    jax_mok.check()
