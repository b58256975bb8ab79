"""The fused forward pass on NVIDIA GPUs: run with `pytest -m gpu`."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import time
from collections.abc import Iterator

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from gpu_harness import (
    MoEConfig,
    expect_success,
    gpus,
    mesh_of,
    poison_memory,
    rank_counts,
    require_gpus,
    run_in_two_processes,
    start,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal
from oracle import Inputs
from routings import ROUTINGS

import jax_mok

pytestmark = pytest.mark.gpu

TOLERANCE = 6e-3


def pair_of_gpus() -> Mesh:
    require_gpus(2)
    return mesh_of(2)


@functools.cache
def forward(ranks: int, config: jax_mok.MoEConfig) -> jax.stages.Wrapped:
    mesh = mesh_of(ranks)
    return jax.jit(functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep", config=config))


def on_gpus(inputs: Inputs, mesh: Mesh) -> list[jax.Array]:
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    experts = NamedSharding(mesh, P("ep"))
    tokens = [jax.device_put(a, sharding) for a in inputs[:3]]
    return [*tokens, *(jax.device_put(a, experts) for a in inputs[3:6])]


def run(inputs: Inputs, ranks: int, config: jax_mok.MoEConfig | None = None) -> np.ndarray:
    y = forward(ranks, config or MoEConfig())(*on_gpus(inputs, mesh_of(ranks)))
    return np.asarray(y)


def draw(
    routing: str = "uniform",
    *,
    tokens: int = 200,
    hidden: int = 128,
    inner: int = 192,
    experts: int = 8,
    choices: int = 2,
    seed: int = 3,
) -> Inputs:
    rng = np.random.default_rng(seed)
    routes = ROUTINGS[routing](rng, 2, tokens // 2, choices, experts)
    return harness.draw_inputs(
        rng, routes, hidden=hidden, inner=inner, experts=experts, dtype=jnp.bfloat16
    )


def assert_right(y: np.ndarray, inputs: Inputs, clamp: float | None = None) -> None:
    want = oracle.layer(inputs, clamp).y
    for first in range(0, len(want), oracle.ERROR_BLOCK):
        block = slice(first, first + oracle.ERROR_BLOCK)
        error = np.linalg.norm(y[block].astype(np.float64) - want[block])
        assert error <= TOLERANCE * np.linalg.norm(want[block]), f"tokens from {first}"


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    poison_memory(np.float32(np.nan))


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_forward_is_right_for_every_routing_and_bit_equal_for_any_number_of_gpus(routing):
    inputs = draw(routing)
    results = [run(inputs, ranks) for ranks in rank_counts()]
    harness.expect_recorded_faults(inputs.expert_ids, 8)
    assert_right(results[0], inputs)
    assert len({y.tobytes() for y in results}) == 1


@pytest.mark.parametrize("tokens", [2, 34, 256, 2000])
def test_forward_is_right_for_any_token_count(tokens):
    inputs = draw(tokens=tokens)
    for ranks in rank_counts():
        assert_right(run(inputs, ranks), inputs)


@pytest.mark.parametrize(
    ("hidden", "inner"), [(64, 64), (2880, 64), (192, 320), (768, 1408), (8192, 64)]
)
def test_forward_is_right_for_any_width(hidden, inner):
    inputs = draw(tokens=64, hidden=hidden, inner=inner, experts=4)
    for ranks in rank_counts():
        assert_right(run(inputs, ranks), inputs)


@pytest.mark.parametrize("clamp", [0.3, 1.7])
def test_forward_is_right_with_a_clamp(clamp):
    inputs = draw()
    assert_right(run(inputs, 1, MoEConfig(clamp=clamp)), inputs, clamp)


@pytest.mark.parametrize("ring_rows", [64, 256, 512, 4096])
def test_results_are_bit_equal_for_any_ring(ring_rows):
    inputs = draw("zipf", tokens=1000, choices=3)
    want = run(inputs, 1)
    for ranks in rank_counts():
        config = MoEConfig(ring_rows=ring_rows, chunk_rows=64)
        assert run(inputs, ranks, config).tobytes() == want.tobytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_repeats_are_bit_equal(ranks):
    """XLA captures the calls in a graph from the second run on."""
    require_gpus(ranks)
    inputs = draw("zipf", tokens=1000, choices=4)
    step, operands = forward(ranks, MoEConfig()), on_gpus(inputs, mesh_of(ranks))
    assert len({np.asarray(step(*operands)).tobytes() for _ in range(20)}) == 1


WAYS = [
    dict(dispatch=dispatch, combine=combine, composition=composition)
    for composition in ("auto", "composed")
    for dispatch in ("pull", "push")
    for combine in ("pull", "push")
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))


def mostly_masked(inputs: Inputs, share: float = 0.4) -> Inputs:
    """That share of the choices is masked, of some tokens all."""
    masked = np.random.default_rng(11).random(inputs.expert_ids.shape) < share
    return inputs._replace(expert_ids=np.where(masked, np.int32(-1), inputs.expert_ids))


@every_way
@pytest.mark.parametrize("ring_rows", [None, 256, 1536])
def test_results_are_bit_equal_for_all_directions_and_compositions(way, ring_rows):
    inputs = mostly_masked(draw("zipf", tokens=1000, choices=5, hidden=192))
    want = run(inputs, 1)
    assert_right(want, inputs)
    config = MoEConfig(**way, ring_rows=ring_rows, chunk_rows=ring_rows and 64)
    for ranks in rank_counts():
        step, operands = forward(ranks, config), on_gpus(inputs, mesh_of(ranks))
        for _ in range(20):
            assert np.asarray(step(*operands)).tobytes() == want.tobytes()


@every_way
@pytest.mark.parametrize(
    "routing", ["one_rank", "silent_rank", "same_expert_twice", "all_masked", "out_of_range"]
)
def test_all_directions_and_compositions_take_every_load(way, routing):
    inputs = draw(routing, tokens=300, choices=3)
    want = run(inputs, 1)
    harness.expect_recorded_faults(inputs.expert_ids, 8)
    for ranks in rank_counts():
        assert run(inputs, ranks, MoEConfig(**way)).tobytes() == want.tobytes()
        harness.expect_recorded_faults(inputs.expert_ids, 8)


@pytest.mark.parametrize(("hidden", "inner"), [(64, 64), (2880, 64), (768, 1408), (8192, 64)])
def test_composed_is_bit_equal_to_fused_for_any_width(hidden, inner):
    inputs = draw("zipf", tokens=600, hidden=hidden, inner=inner, experts=4)
    for ranks in rank_counts():
        composed = run(inputs, ranks, MoEConfig(composition="composed", ring_rows=512))
        assert composed.tobytes() == run(inputs, ranks).tobytes()


@every_way
def test_calls_back_to_back_do_not_see_each_others_rows(way):
    """A row that the next call overwrites too early, or not at all, would show: tokens and routes
    of the two have nothing in common, and neither waits for the other's results."""
    first = mostly_masked(draw("zipf", tokens=1200, choices=4, seed=5))
    second = mostly_masked(draw("one_rank", tokens=1200, choices=4, seed=6))
    want = [run(inputs, 1).astype(np.float32) for inputs in (first, second)]
    config = MoEConfig(**way)
    for ranks in rank_counts():
        layer, mesh = forward(ranks, config), mesh_of(ranks)

        @jax.jit
        def step(a, b, layer=layer):
            # Powers of two, so that XLA does not make one call of equal ones.
            return [
                layer(x, ids, weights * 2.0**turn, *rest)
                for turn in range(10)
                for x, ids, weights, *rest in (a, b)
            ]

        for call, y in enumerate(step(on_gpus(first, mesh), on_gpus(second, mesh))):
            assert_array_equal(
                np.asarray(y).astype(np.float32), want[call % 2] * 2.0 ** (call // 2)
            )


def test_a_token_is_bit_equal_whatever_batch_is_around_it():
    inputs = draw("zipf", tokens=400)
    alone = inputs._replace(
        x=inputs.x[100:300],
        expert_ids=inputs.expert_ids[100:300],
        expert_weights=inputs.expert_weights[100:300],
    )
    assert run(alone, 1).tobytes() == run(inputs, 1)[100:300].tobytes()


def test_scan_over_layers_equals_single_layers():
    inputs = draw()
    for ranks in rank_counts():
        x, *rest = on_gpus(inputs, mesh_of(ranks))
        layer = forward(ranks, MoEConfig())
        scanned = jax.jit(
            lambda x, rest, layer=layer: jax.lax.scan(
                lambda x, _: (layer(x, *rest), None), x, length=3
            )[0]
        )(x, rest)
        for _ in range(3):
            x = layer(x, *rest)
        assert np.asarray(scanned).tobytes() == np.asarray(x).tobytes()


def test_neighbouring_collectives_do_not_disturb_the_layer():
    inputs = draw()
    ranks = rank_counts()[-1]
    mesh = mesh_of(ranks)
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "ep"), mesh=mesh, in_specs=P("ep"), out_specs=P()
    )
    layer = forward(ranks, MoEConfig())
    step = jax.jit(lambda *ops: (layer(*ops), total(ops[2]), total(layer(*ops))))
    want = run(inputs, 1)
    for _ in range(5):
        y, weights, _ = step(*on_gpus(inputs, mesh))
        assert np.asarray(y).tobytes() == want.tobytes()
        np.testing.assert_allclose(
            weights, inputs.expert_weights.reshape(ranks, -1, 2).sum(0), rtol=1e-5
        )


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_groups_of_ranks_are_independent(shape):
    pair_of_gpus()
    inputs = draw()
    mesh = Mesh(np.array(gpus()[:2])[::-1].reshape(shape), ("dp", "ep"))
    y = jax.jit(functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep"))(*on_gpus(inputs, mesh))
    assert np.asarray(y).tobytes() == run(inputs, 1).tobytes()


def test_a_tiny_call_after_a_huge_one_and_a_larger_one_after_it():
    for tokens in (4096, 2, 8192, 66):
        inputs = draw(tokens=tokens, seed=tokens)
        results = [run(inputs, ranks) for ranks in rank_counts()]
        assert len({y.tobytes() for y in results}) == 1
        assert_right(results[0][:64], inputs._replace(**first_tokens(inputs, 64)))


def first_tokens(inputs: Inputs, count: int) -> dict[str, np.ndarray]:
    return {
        name: getattr(inputs, name)[:count] for name in ("x", "expert_ids", "expert_weights", "dy")
    }


def sharded_step(body, mesh: Mesh) -> jax.stages.Wrapped:
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    )


def halves(y: jax.typing.ArrayLike) -> list[np.ndarray]:
    return np.split(np.asarray(y).astype(np.float32), 2)


def test_a_rank_that_does_not_come_is_named_and_other_layers_go_on():
    mesh, config, inputs = pair_of_gpus(), MoEConfig(timeout_s=2.0), draw(tokens=132)

    def body(*args):
        def come(x, *rest):
            return jax_mok.moe_ffn(x, *rest, axis_name="ep", config=config)

        return jax.lax.cond(jax.lax.axis_index("ep") == 1, lambda x, *_: x, come, *args)

    start = time.monotonic()
    waited, absent = halves(sharded_step(body, mesh)(*on_gpus(inputs, mesh)))
    assert time.monotonic() - start < 60
    assert np.isnan(waited).all()
    np.testing.assert_array_equal(absent, inputs.x[66:].astype(np.float32))
    with pytest.raises(jax_mok.MoETimeoutError, match="rank 0 waited in vain for rank 1"):
        jax_mok.check()

    other = draw(tokens=148)
    assert run(other, 2).tobytes() == run(other, 1).tobytes()

    # The ranks have counted different numbers of calls, so they never meet again.
    for _ in range(2):
        assert np.isnan(run(inputs, 2, config).astype(np.float32)).all()
        with pytest.raises(jax_mok.MoETimeoutError, match="has left a call out: restart"):
            jax_mok.check()


@pytest.mark.parametrize(("dispatch", "combine"), [("pull", "push"), ("push", "pull")])
@pytest.mark.parametrize("late_rank", [0, 1])
def test_calls_after_one_to_which_a_rank_came_too_late_are_right(late_rank, dispatch, combine):
    mesh = pair_of_gpus()
    config = MoEConfig(timeout_s=0.5, dispatch=dispatch, combine=combine)
    inputs = draw("zipf", tokens=164 + 2 * late_rank)

    def sleep(x):
        time.sleep(1.5)
        return np.asarray(x)

    def body(late, x, *rest):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.lax.cond(late[0], lambda x: jax.pure_callback(sleep, shape, x), lambda x: x, x)
        return jax_mok.moe_ffn(x, *rest, axis_name="ep", config=config)

    step, operands, want = sharded_step(body, mesh), on_gpus(inputs, mesh), run(inputs, 1)

    def call(*late_ranks):
        late = np.isin(np.arange(2), late_ranks)
        return step(jax.device_put(late, NamedSharding(mesh, P("ep"))), *operands)

    for _ in range(2):
        assert np.asarray(call()).tobytes() == want.tobytes()
        for half in halves(call(late_rank)):
            assert np.isnan(half).all()
        with pytest.raises(jax_mok.MoETimeoutError, match=f"waited in vain for rank {late_rank}"):
            jax_mok.check()
    # Those that are dispatched while the rank is late may fail too, but none is wrong.
    ys = [call(late_rank), *(call() for _ in range(5))]
    for y in ys:
        for got, right in zip(halves(y), halves(want), strict=True):
            assert np.isnan(got).all() or got.tobytes() == right.tobytes()
    with pytest.raises(jax_mok.MoETimeoutError):
        jax_mok.check()
    assert np.asarray(call()).tobytes() == want.tobytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kernel_that_takes_longer_than_the_time_out_ends(ranks):
    """Waits within the kernel expire then, all of them, and calls with more time are right.

    Those of the composed path are too short for that.
    """
    require_gpus(ranks)
    inputs = draw(tokens=8192, hidden=1024, inner=1024, choices=4)
    in_time = MoEConfig(ring_rows=256, chunk_rows=64)
    want = run(inputs, ranks, in_time)  # which also sets up what is set up once
    assert np.isfinite(want.astype(np.float32)).all()
    start = time.monotonic()
    config = dataclasses.replace(in_time, timeout_s=1e-4)
    for _ in range(3):
        assert np.isnan(run(inputs, ranks, config).astype(np.float32)).all()
        with pytest.raises(jax_mok.MoETimeoutError):
            jax_mok.check()
    assert time.monotonic() - start < 60
    assert run(inputs, ranks, in_time).tobytes() == want.tobytes()


@contextlib.contextmanager
def little_memory(gpu: jax.Device, left: int) -> Iterator[None]:
    """Takes the memory of a GPU outside XLA's pool, all but `left` bytes."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def call(name, *args):
        assert getattr(cuda, name)(*args) == 0, name

    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu.local_hardware_id)
    call("cuCtxPushCurrent_v2", context)
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(free.value - left))
    try:
        yield
    finally:
        call("cuMemFree_v2", memory)
        call("cuCtxPopCurrent_v2", ctypes.byref(context))
        call("cuDevicePrimaryCtxRelease_v2", gpu.local_hardware_id)


def test_all_ranks_fail_together_if_one_lacks_memory_and_can_try_again():
    mesh = pair_of_gpus()
    inputs = draw(tokens=4096, hidden=8192, inner=64, choices=16)
    config = MoEConfig(ring_rows=4096)
    operands = on_gpus(inputs, mesh)
    step = forward(2, config).lower(*operands).compile()
    start = time.monotonic()
    with (
        little_memory(gpus()[1], 2**28),
        pytest.raises(jax.errors.JaxRuntimeError, match=r"out of memory: |rank 1 could not go on"),
    ):
        jax.block_until_ready(step(*operands))
    assert time.monotonic() - start < 10
    assert np.asarray(step(*operands)).tobytes() == run(inputs, 1, config).tobytes()


def test_concurrent_command_buffers_are_refused(monkeypatch):
    mode = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {mode}")
    inputs, mesh = draw(tokens=180), pair_of_gpus()
    with pytest.raises(jax_mok.MoEError, match="might not meet in the same call"):
        forward(2, MoEConfig()).lower(*on_gpus(inputs, mesh))


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"hidden": 96}, {}, "multiples of 64"),
        ({"inner": 100}, {}, "multiples of 64"),
    ],
)
def test_what_the_kernels_do_not_take_is_named(changes, config, message):
    with pytest.raises(jax_mok.MoEError, match=message):
        run(draw(**changes), 1, MoEConfig(**config))


def test_float32_is_refused():
    inputs = draw()
    with pytest.raises(jax_mok.MoEError, match="the GPU kernels take bfloat16"):
        run(Inputs(*(a if a.dtype == np.int32 else a.astype(np.float32) for a in inputs)), 1)


WITHOUT_PEER_MEMORY = """
import gpu_harness, jax, pytest, test_gpu
inputs = test_gpu.draw("zipf", tokens=64)
operands = test_gpu.on_gpus(inputs, gpu_harness.mesh_of(2))
for _ in range(2):
    with pytest.raises(jax.errors.JaxRuntimeError, match="no access to the peers.*'collective'"):
        test_gpu.forward(2, gpu_harness.MoEConfig())(*operands).block_until_ready()
config = gpu_harness.MoEConfig(composition="collective")
test_gpu.assert_right(test_gpu.run(inputs, 2, config), inputs)
"""


@pytest.mark.parametrize("setting", ["NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE"])
def test_peers_without_access_are_refused(setting):
    require_gpus(2)
    expect_success(start(WITHOUT_PEER_MEMORY, **{setting: "0"}))


PROCESS = """
import gpu_harness, numpy as np, test_gpu
from jax.experimental import multihost_utils
inputs = test_gpu.draw("zipf", tokens=600)
step = test_gpu.forward(2, gpu_harness.MoEConfig())
for _ in range(5):
    y = step(*test_gpu.on_gpus(inputs, gpu_harness.mesh_of(2)))
y = multihost_utils.process_allgather(y, tiled=True)
if process == 0:
    np.save(sys.argv[3], np.asarray(y).view(np.uint16))
"""


def test_two_processes_get_the_bits_of_one(tmp_path):
    require_gpus(2)
    result = tmp_path / "y.npy"
    run_in_two_processes(PROCESS, result)
    want = run(draw("zipf", tokens=600), 1)
    assert np.load(result).tobytes() == want.view(np.uint16).tobytes()
