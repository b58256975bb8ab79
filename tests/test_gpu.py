"""The fused forward pass on NVIDIA GPUs: run with `pytest -m gpu`."""

import functools
import os
import pathlib
import socket
import subprocess
import sys

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Inputs
from routings import ROUTINGS

import jax_mok

pytestmark = pytest.mark.gpu

TOLERANCE = 6e-3
MoEConfig = functools.partial(jax_mok.MoEConfig, timeout_s=10.0)
HERE = pathlib.Path(__file__).parent


def gpus() -> list[jax.Device]:
    return jax.devices("cuda")


def rank_counts() -> list[int]:
    return [1, 2] if len(gpus()) > 1 else [1]


@functools.cache
def mesh_of(ranks: int) -> Mesh:
    return Mesh(np.array(gpus()[:ranks]), ("ep",))


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
    for start in range(0, len(want), oracle.ERROR_BLOCK):
        block = slice(start, start + oracle.ERROR_BLOCK)
        error = np.linalg.norm(y[block].astype(np.float64) - want[block])
        assert error <= TOLERANCE * np.linalg.norm(want[block]), f"tokens from {start}"


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """What the next arrays are placed in holds NaN."""
    for gpu in gpus():
        jax.device_put(np.full(2**26, np.nan, np.float32), gpu).block_until_ready()


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
    if ranks > len(gpus()):
        pytest.fail(f"needs {ranks} GPUs")
    inputs = draw("zipf", tokens=1000, choices=4)
    step, operands = forward(ranks, MoEConfig()), on_gpus(inputs, mesh_of(ranks))
    assert len({np.asarray(step(*operands)).tobytes() for _ in range(20)}) == 1


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
    if len(gpus()) < 2:
        pytest.fail("needs 2 GPUs")
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


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"hidden": 96}, {}, "multiples of 64"),
        ({"inner": 100}, {}, "multiples of 64"),
        ({}, {"composition": "composed"}, "no GPU kernels yet"),
        ({}, {"dispatch": "push"}, "no GPU kernel yet"),
    ],
)
def test_what_the_kernels_do_not_take_is_named(changes, config, message):
    with pytest.raises(jax_mok.MoEError, match=message):
        run(draw(**changes), 1, MoEConfig(**config))


def test_float32_and_gradients_are_refused():
    inputs = draw()
    with pytest.raises(jax_mok.MoEError, match="the GPU kernels take bfloat16"):
        run(Inputs(*(a if a.dtype == np.int32 else a.astype(np.float32) for a in inputs)), 1)
    layer = forward(1, MoEConfig())
    x, *rest = on_gpus(inputs, mesh_of(1))
    with pytest.raises(jax_mok.MoEError, match=r"gradients .* run on CPU devices only"):
        jax.jit(jax.grad(lambda x: layer(x, *rest).astype(jnp.float32).sum()))(x)


PROCESS = """
import sys
port, process, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import jax, numpy as np
jax.distributed.initialize(
    f"127.0.0.1:{port}", num_processes=2, process_id=process, local_device_ids=[process]
)
import test_gpu
from jax.experimental import multihost_utils
inputs = test_gpu.draw("zipf", tokens=600)
step = test_gpu.forward(2, test_gpu.MoEConfig())
for _ in range(5):
    y = step(*test_gpu.on_gpus(inputs, test_gpu.mesh_of(2)))
y = multihost_utils.process_allgather(y, tiled=True)
if process == 0:
    np.save(result, np.asarray(y).view(np.uint16))
"""


def test_two_processes_get_the_bits_of_one(tmp_path):
    if len(gpus()) < 2:
        pytest.fail("needs 2 GPUs")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    result = tmp_path / "y.npy"
    environment = os.environ | {
        "JAX_PLATFORMS": "cuda",
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(port), str(process), str(result)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    want = run(draw("zipf", tokens=600), 1)
    assert np.load(result).tobytes() == want.view(np.uint16).tobytes()
