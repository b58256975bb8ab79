"""Gradients on NVIDIA GPUs: run with `pytest -m gpu`."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from gpu_harness import (
    MoEConfig,
    expect_success,
    mesh_of,
    poison_memory,
    rank_counts,
    require_gpus,
    run_in_two_processes,
    start,
)
from oracle import Inputs, Outputs
from routings import ROUTINGS
from test_gpu import draw, mostly_masked

import jax_mok

pytestmark = pytest.mark.gpu

TOLERANCE = 8e-3


def run(inputs: Inputs, ranks: int, config: jax_mok.MoEConfig | None = None) -> Outputs:
    return harness.run_layer_on(mesh_of(ranks), inputs, config or MoEConfig())


def assert_right(outputs: Outputs, inputs: Inputs, clamp: float | None = None) -> None:
    oracle.assert_close(outputs, oracle.layer(inputs, clamp), TOLERANCE)


def assert_bit_equal_for_any_number_of_gpus(
    inputs: Inputs, config: jax_mok.MoEConfig | None = None
) -> Outputs:
    results = [run(inputs, ranks, config) for ranks in rank_counts()]
    for result in results[1:]:
        harness.assert_same_bits(result, results[0])
    return results[0]


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    poison_memory(np.float32(np.nan))


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_gradients_are_right_for_every_routing(routing):
    inputs = draw(routing)
    outputs = assert_bit_equal_for_any_number_of_gpus(inputs)
    harness.expect_recorded_faults(inputs.expert_ids, 8)
    assert_right(outputs, inputs)


@pytest.mark.parametrize("tokens", [2, 34, 256, 1000])
def test_gradients_are_right_for_any_token_count(tokens):
    inputs = draw("zipf", tokens=tokens)
    assert_right(assert_bit_equal_for_any_number_of_gpus(inputs), inputs)


@pytest.mark.parametrize(
    ("hidden", "inner"), [(64, 64), (2880, 64), (192, 320), (320, 192), (768, 1408)]
)
def test_gradients_are_right_for_any_width(hidden, inner):
    inputs = draw(tokens=64, hidden=hidden, inner=inner, experts=4)
    assert_right(assert_bit_equal_for_any_number_of_gpus(inputs), inputs)


@pytest.mark.parametrize("clamp", [0.3, 1.7])
def test_gradients_are_right_with_a_clamp(clamp):
    inputs = draw()
    outputs = assert_bit_equal_for_any_number_of_gpus(inputs, MoEConfig(clamp=clamp))
    assert_right(outputs, inputs, clamp)


@pytest.mark.parametrize("ring_rows", [256, 512, 4096])
@pytest.mark.parametrize("saved_rows", [0, 320, None])
def test_gradients_are_bit_equal_for_any_ring_and_saved_rows(ring_rows, saved_rows):
    inputs = mostly_masked(draw("zipf", tokens=1000, choices=3), share=0.1)
    want = run(inputs, 1)
    config = MoEConfig(ring_rows=ring_rows, chunk_rows=64, saved_rows=saved_rows)
    for ranks in rank_counts():
        harness.assert_same_bits(run(inputs, ranks, config), want)


@pytest.mark.parametrize("composition", ["auto", "composed"])
@pytest.mark.parametrize("saved_rows", [0, 4032, 4096, 4416, 8192, 16384])
def test_gradients_may_replace_what_is_saved_of_several_rings(saved_rows, composition):
    inputs = draw("zipf", tokens=6000, hidden=128, inner=192)
    ways = dict(ring_rows=4096, chunk_rows=64, composition=composition)
    for ranks in rank_counts():
        got = run(inputs, ranks, MoEConfig(saved_rows=saved_rows, **ways))
        harness.assert_same_bits(got, run(inputs, 1, MoEConfig(ring_rows=16384)))


def test_a_pullback_can_be_applied_again():
    """The kernel works in the memory of the residuals; XLA must copy what is still needed."""
    inputs = draw("zipf", tokens=600)
    want = run(inputs, 1)
    for ranks in rank_counts():
        x, ids, *operands, dy = harness.shard(inputs, mesh_of(ranks))
        layer = functools.partial(
            jax_mok.moe, mesh=mesh_of(ranks), axis_name="ep", config=MoEConfig()
        )

        def pull_twice(x, *operands, layer=layer, ids=ids, dy=dy):
            y, pullback = jax.vjp(lambda x, *rest: layer(x, ids, *rest), x, *operands)
            first = pullback(dy)
            return Outputs(y, *first), Outputs(y, *pullback(dy + 0 * first[0]))

        for step in (pull_twice, jax.jit(pull_twice)):
            for got in step(x, *operands):
                harness.assert_same_bits(Outputs(*map(np.asarray, got)), want)


@pytest.mark.parametrize("composition", ["auto", "composed"])
@pytest.mark.parametrize("masters", ["bfloat16", "float32"])
@pytest.mark.parametrize("saved_rows", [0, 256, 2048])
@pytest.mark.parametrize("routing", ["one_expert", "zipf"])
def test_experts_larger_than_the_ring_get_the_same_gradients(
    routing, saved_rows, masters, composition
):
    """Of 2048 saved rows some make room for partial sums, of fewer none."""
    inputs = draw(routing, tokens=1000, hidden=320, inner=192)
    inputs = inputs._replace(
        **{name: getattr(inputs, name).astype(masters) for name in ("w_gate", "w_up", "w_down")}
    )
    want = run(inputs, 1)
    config = MoEConfig(ring_rows=256, chunk_rows=64, saved_rows=saved_rows, composition=composition)
    for ranks in rank_counts():
        harness.assert_same_bits(run(inputs, ranks, config), want)


def test_a_weight_gradient_over_many_waves_is_as_close_as_over_one():
    inputs = draw("one_expert", tokens=4000, hidden=64, inner=64, choices=2)
    config = MoEConfig(ring_rows=256, chunk_rows=64)
    for ranks in rank_counts():
        outputs = run(inputs, ranks, config)
        harness.assert_same_bits(outputs, run(inputs, 1))
        assert_right(outputs, inputs)


def test_repeats_are_bit_equal():
    inputs = draw("zipf", tokens=1000, choices=4)
    for ranks in rank_counts():
        want = run(inputs, ranks)
        for _ in range(19):
            harness.assert_same_bits(run(inputs, ranks), want)


def test_float32_masters_get_unrounded_gradients():
    inputs = draw("zipf")
    masters = inputs._replace(
        w_gate=inputs.w_gate.astype(np.float32),
        w_up=inputs.w_up.astype(np.float32),
        w_down=inputs.w_down.astype(np.float32),
    )
    for ranks in rank_counts():
        rounded, unrounded = run(inputs, ranks), run(masters, ranks)
        for name in ("d_w_gate", "d_w_up", "d_w_down"):
            wide = getattr(unrounded, name)
            assert wide.dtype == np.float32
            assert wide.astype(jnp.bfloat16).tobytes() == getattr(rounded, name).tobytes()


def test_a_bad_gradient_harms_its_own_token_and_experts_only():
    inputs = draw(tokens=256)
    want = run(inputs, 1)
    dy = inputs.dy.copy()
    dy[100] = np.inf
    for ranks in rank_counts():
        outputs = run(inputs._replace(dy=dy), ranks)
        others = np.arange(256) != 100
        assert outputs.dx[others].tobytes() == want.dx[others].tobytes()
        spared = np.setdiff1d(np.arange(8), inputs.expert_ids[100])
        assert outputs.d_w_down[spared].tobytes() == want.d_w_down[spared].tobytes()


@pytest.mark.parametrize("policy", [jax_mok.remat_policy, None])
def test_checkpointed_layers_give_the_same_bits(policy):
    inputs = draw("zipf", tokens=400)
    for ranks in rank_counts():
        mesh = mesh_of(ranks)
        operands = harness.shard(inputs, mesh)

        def loss(x, checkpointed, mesh=mesh, operands=operands):
            def layer(x):
                _, ids, weights, *experts, _ = operands
                y = jax_mok.moe(x, ids, weights, *experts, mesh=mesh, axis_name="ep")
                return jnp.sum(y.astype(jnp.float32) * operands.dy.astype(jnp.float32))

            return (jax.checkpoint(layer, policy=policy) if checkpointed else layer)(x)

        step = jax.jit(jax.grad(loss), static_argnums=1)
        plain, again = (np.asarray(step(operands.x, flag)) for flag in (False, True))
        assert plain.tobytes() == again.tobytes()


PROCESS = """
import gpu_harness, harness, test_gpu, jax_mok
from jax.experimental import multihost_utils
from oracle import Outputs
inputs = test_gpu.draw("zipf", tokens=600)
mesh = gpu_harness.mesh_of(2)
step = harness.layer_step(mesh, gpu_harness.MoEConfig())
for _ in range(3):
    outputs = step(harness.shard(inputs, mesh))
outputs = Outputs(*(multihost_utils.process_allgather(a, tiled=True) for a in outputs))
jax_mok.check()
with open(f"{sys.argv[3]}/{process}", "wb") as file:
    for array in outputs:
        file.write(array.tobytes())
"""


WITHOUT_GRAPHS = """
import sys
import gpu_harness, harness, test_gpu
ranks = gpu_harness.rank_counts()[-1]
inputs = test_gpu.draw("zipf", tokens=600)
want = harness.run_layer_on(gpu_harness.mesh_of(ranks), inputs, gpu_harness.MoEConfig())
with open(sys.argv[1], "wb") as file:
    for array in want:
        file.write(array.tobytes())
"""


def test_gradients_are_bit_equal_without_graphs(tmp_path):
    result = tmp_path / "gradients"
    flags = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    expect_success(start(WITHOUT_GRAPHS, result, **flags, XLA_PYTHON_CLIENT_ALLOCATOR="platform"))
    want = b"".join(array.tobytes() for array in run(draw("zipf", tokens=600), 1))
    assert result.read_bytes() == want


def test_two_processes_get_the_bits_of_one(tmp_path):
    require_gpus(2)
    run_in_two_processes(PROCESS, tmp_path)
    want = b"".join(array.tobytes() for array in run(draw("zipf", tokens=600), 1))
    assert [(tmp_path / f"{process}").read_bytes() == want for process in range(2)] == [True] * 2


WAYS = [
    dict(
        dispatch=dispatch,
        reverse_combine=reverse_combine,
        reverse_dispatch=reverse_dispatch,
        composition=composition,
    )
    for dispatch in ("pull", "push")
    for reverse_combine in ("pull", "push")
    for reverse_dispatch in ("pull", "push")
    for composition in ("auto", "composed")
]


@pytest.mark.parametrize("ring_rows", [256, None])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_gradients_are_bit_equal_for_all_directions_and_compositions(way, ring_rows):
    inputs = mostly_masked(draw("zipf", tokens=600, choices=3), share=0.2)
    want = run(inputs, 1)
    config = MoEConfig(
        **way, ring_rows=ring_rows, chunk_rows=ring_rows and 64, saved_rows=ring_rows and 128
    )
    for ranks in rank_counts():
        harness.assert_same_bits(run(inputs, ranks, config), want)


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("way", [WAYS[1], WAYS[-2]], ids=lambda way: "-".join(way.values()))
def test_all_compositions_give_the_gradients_of_every_load(way, routing):
    inputs = draw(routing)
    want = run(inputs, 1)
    for ranks in rank_counts():
        harness.assert_same_bits(run(inputs, ranks, MoEConfig(**way)), want)
    harness.expect_recorded_faults(inputs.expert_ids, 8)


def test_a_late_rank_spoils_the_gradients_of_its_call_only():
    require_gpus(2)
    inputs = draw(tokens=190)
    want = run(inputs, 2)
    config = MoEConfig(timeout_s=1e-6)
    outputs = run(inputs, 2, config)
    assert np.isnan(outputs.dx.astype(np.float32)).all()
    with pytest.raises(jax_mok.MoETimeoutError):
        jax_mok.check()
    harness.assert_same_bits(run(inputs, 2), want)
