"""Sizes and programs that broke other systems, on NVIDIA GPUs: run with `pytest -m gpu`."""

import functools
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_harness import HERE, MoEConfig, gpus, mesh_of, rank_counts, require_gpus
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_gpu import assert_right, draw, forward, on_gpus, run

import jax_mok
from jax_mok import ffi

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("tokens", "hidden", "choices", "combine"),
    [
        # More than 262,144 rows, and more than 2**31 elements of output rows.
        (32_832, 8192, 8, "push"),
        (32_832, 8192, 8, "pull"),
        (131_072, 64, 1, "push"),
    ],
)
def test_sizes_beyond_32_bits(tokens, hidden, choices, combine):
    experts = 8
    sample = np.r_[0:32, tokens // 2 - 16 : tokens // 2 + 16, tokens - 32 : tokens]
    inputs = draw(tokens=64, hidden=hidden, inner=64, experts=experts)
    ids = np.random.default_rng(7).integers(0, experts, (tokens, choices), np.int32)
    weights = np.full((tokens, choices), 0.5, np.float32)
    results = []
    for ranks in rank_counts():
        sharded = NamedSharding(mesh_of(ranks), P("ep"))
        x = jax.jit(
            lambda: jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16),
            out_shardings=sharded,
        )()
        operands = [jax.device_put(a, sharded) for a in (ids, weights, *inputs[3:6])]
        y = np.asarray(forward(ranks, MoEConfig(combine=combine))(x, *operands))
        results.append(y.tobytes())
        assert_right(
            y[sample],
            inputs._replace(
                x=np.asarray(x)[sample],
                expert_ids=ids[sample],
                expert_weights=weights[sample],
                dy=np.zeros((len(sample), hidden), inputs.dy.dtype),
            ),
        )
    assert len(set(results)) == 1


def test_more_choices_than_a_thread_sums_at_once():
    inputs = draw(tokens=200, experts=32, choices=19)
    results = [run(inputs, ranks) for ranks in rank_counts()]
    assert_right(results[0], inputs)
    assert len({y.tobytes() for y in results}) == 1


def test_two_layers_of_different_sizes_in_one_program():
    first, second = draw(hidden=128, inner=192), draw("zipf", hidden=128, inner=64, choices=3)
    for ranks in rank_counts():
        mesh = mesh_of(ranks)
        one, two = on_gpus(first, mesh), on_gpus(second, mesh)
        layer = forward(ranks, MoEConfig())
        both = jax.jit(lambda one, two, layer=layer: (layer(*one), layer(layer(*one), *two[1:])))
        for _ in range(5):
            y, z = both(one, two)
        assert np.asarray(y).tobytes() == run(first, 1).tobytes()
        assert_right(np.asarray(z), second._replace(x=np.asarray(y)))


def test_ahead_of_time_donated_and_exported_programs_give_the_same_bits():
    inputs = draw("zipf", tokens=300)
    want = run(inputs, 1)
    for ranks in rank_counts():
        layer, operands = forward(ranks, MoEConfig()), on_gpus(inputs, mesh_of(ranks))
        compiled = layer.lower(*operands).compile()
        assert np.asarray(compiled(*operands)).tobytes() == want.tobytes()
        checks = jax_mok.export_safety_checks()
        exported = jax.export.export(layer, disabled_checks=checks)(*operands)
        loaded = jax.export.deserialize(exported.serialize())
        assert np.asarray(jax.jit(loaded.call)(*operands)).tobytes() == want.tobytes()
        donated = jax.jit(lambda x, *rest, layer=layer: layer(x, *rest), donate_argnums=0)
        assert np.asarray(donated(*operands)).tobytes() == want.tobytes()


def test_threads_do_not_disturb_each_other():
    inputs = [draw("zipf", tokens=300 + 10 * i, seed=i) for i in range(2)]
    want = [run(each, 1) for each in inputs]
    wrong = []

    def work(index):
        operands = on_gpus(inputs[index], mesh_of(1))
        for _ in range(50):
            y = forward(1, MoEConfig())(*operands)
            if np.asarray(y).tobytes() != want[index].tobytes():
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_replayed_graphs_need_no_host():
    inputs = draw(tokens=256)
    for ranks in rank_counts():
        layer, operands = forward(ranks, MoEConfig()), on_gpus(inputs, mesh_of(ranks))

        @jax.jit
        def step(x, *rest, layer=layer):
            for _ in range(12):
                x = layer(x, *rest)
            return x

        for _ in range(6):
            y = step(*operands)
        y.block_until_ready()
        before = ffi.cuda.launched_calls()
        for _ in range(10):
            y = step(*operands)
        y.block_until_ready()
        assert ffi.cuda.launched_calls() == before


WITHOUT_GRAPHS = """
import sys
import gpu_harness, numpy as np, test_gpu
ranks = int(sys.argv[1])
step = test_gpu.forward(ranks, gpu_harness.MoEConfig())
operands = test_gpu.on_gpus(test_gpu.draw("zipf", tokens=600), gpu_harness.mesh_of(ranks))
results = {np.asarray(step(*operands)).tobytes() for _ in range(6)}
assert len(results) == 1
print(results.pop().hex())
"""


def test_results_are_bit_equal_without_graphs(monkeypatch):
    ranks = rank_counts()[-1]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_GRAPHS, str(ranks)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    want = run(draw("zipf", tokens=600), 1)
    assert bytes.fromhex(result.stdout.split()[-1]) == want.tobytes()


def test_a_gpu_alone_beside_others_is_a_mesh_of_its_own():
    require_gpus(2)
    inputs = draw()
    mesh = jax.sharding.Mesh(np.array(gpus()[1:2]), ("ep",))
    layer = jax.jit(functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep"))
    assert np.asarray(layer(*on_gpus(inputs, mesh))).tobytes() == run(inputs, 1).tobytes()
