"""The layer on every number of NVIDIA GPUs: run with `pytest -m gpu`.

Other tests take one GPU and two. Here is what more of them make different, and what there are not
GPUs for is skipped; `python -m jax_mok.bench gpus` runs each number on GPUs of its own.
"""

import functools

import harness
import jax
import jax.numpy as jnp
import mx_oracle
import numpy as np
import oracle
import pytest
import test_gpu_plan
from gpu_harness import MoEConfig, gpus, mesh_of, poison_memory, run_in_processes
from jax.sharding import Mesh
from oracle import Inputs, Outputs
from routings import ROUTINGS
from test_gpu import mostly_masked, on_gpus, sharded_step

import jax_mok

pytestmark = pytest.mark.gpu

COUNTS = (1, 2, 3, 4, 6, 8)
EXPERTS, TOKENS = 24, 240  # which all of them divide
TOLERANCE, MX_TOLERANCE = 8e-3, 6e-3
"""Those of the tests on one GPU and two, of gradients and of MXFP8."""


def name(count: int) -> str:
    return f"{count}gpus"


@pytest.fixture(params=COUNTS, ids=name)
def ranks(request) -> int:
    if len(gpus()) < request.param:
        pytest.skip(f"needs {request.param} GPUs, there are {len(gpus())}")
    return request.param


several = pytest.mark.parametrize("ranks", COUNTS[1:], ids=name, indirect=True)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    poison_memory(np.float32(np.nan))


def draw(
    routing: str,
    ranks: int,
    *,
    tokens: int = TOKENS,
    hidden: int = 128,
    inner: int = 192,
    choices: int = 3,
    seed: int = 3,
) -> Inputs:
    rng = np.random.default_rng(seed)
    routes = ROUTINGS[routing](rng, ranks, tokens // ranks, choices, EXPERTS)
    return harness.draw_inputs(
        rng, routes, hidden=hidden, inner=inner, experts=EXPERTS, dtype=jnp.bfloat16
    )


def run(inputs: Inputs, ranks: int, **options: object) -> Outputs:
    return harness.run_layer_on(mesh_of(ranks), inputs, MoEConfig(**options))


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_every_routing_is_right_and_has_the_bits_of_one_gpu(ranks, routing):
    inputs = draw(routing, ranks)
    outputs = run(inputs, ranks)
    harness.assert_same_bits(outputs, run(inputs, 1))
    harness.expect_recorded_faults(inputs.expert_ids, EXPERTS)
    oracle.assert_close(outputs, oracle.layer(inputs), TOLERANCE)


DIRECTIONS = {
    "default": {},
    "turned_round": dict(
        dispatch="push", combine="pull", reverse_combine="push", reverse_dispatch="pull"
    ),
}
each_composition = pytest.mark.parametrize("composition", ["fused", "composed"])


@each_composition
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("ring_rows", [256, None])
def test_directions_and_compositions_have_the_bits_of_one_gpu(
    ranks, ring_rows, directions, composition
):
    inputs = mostly_masked(draw("zipf", ranks, tokens=1200), share=0.2)
    want = run(inputs, 1)
    for _ in range(5):
        got = run(
            inputs,
            ranks,
            **DIRECTIONS[directions],
            composition=composition,
            ring_rows=ring_rows,
            chunk_rows=ring_rows and 64,
            saved_rows=ring_rows and 128,
        )
        harness.assert_same_bits(got, want)


@each_composition
@pytest.mark.parametrize("routing", ["one_rank", "starved_rank"])
def test_uneven_loads_of_wide_rows_have_the_bits_of_one_gpu(ranks, routing, composition):
    inputs = draw(routing, ranks, tokens=480, hidden=2880, inner=64)
    outputs = run(inputs, ranks, composition=composition)
    harness.assert_same_bits(outputs, run(inputs, 1))


@each_composition
def test_mxfp8_is_its_definition_and_has_the_bits_of_one_gpu(ranks, composition):
    inputs = draw("zipf", ranks)
    outputs = run(inputs, ranks, precision="mxfp8", composition=composition)
    harness.assert_same_bits(outputs, run(inputs, 1, precision="mxfp8"))
    oracle.assert_close(outputs, mx_oracle.layer(inputs), MX_TOLERANCE)


def test_collective_is_right(ranks):
    inputs = draw("zipf", ranks)
    outputs = run(inputs, ranks, composition="collective")
    oracle.assert_close(outputs, oracle.layer(inputs), TOLERANCE)


def test_steps_back_to_back_do_not_see_each_others_rows(ranks):
    """None waits for another's results, and from the second on XLA replays graphs."""
    batches = [draw(routing, ranks, tokens=1200) for routing in ("zipf", "one_rank")]
    want = [run(inputs, 1) for inputs in batches]
    mesh = mesh_of(ranks)
    step = harness.layer_step(mesh, MoEConfig())
    placed = [harness.shard(inputs, mesh) for inputs in batches]
    for turn, outputs in enumerate([step(placed[turn % 2]) for turn in range(20)]):
        harness.assert_same_bits(Outputs(*map(np.asarray, outputs)), want[turn % 2])


@pytest.mark.parametrize("ranks", [4, 6, 8], ids=name, indirect=True)
@pytest.mark.parametrize("groups", [2, None])
def test_groups_of_ranks_are_independent(ranks, groups):
    """Of two, and two of them."""
    shape = (groups or ranks // 2, -1)
    mesh = Mesh(np.array(gpus()[:ranks])[::-1].reshape(shape), ("dp", "ep"))
    inputs = draw("zipf", ranks)
    layer = functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep", config=MoEConfig())
    y = jax.jit(layer)(*on_gpus(inputs, mesh))
    assert np.asarray(y).tobytes() == run(inputs, 1).y.tobytes()


@pytest.mark.parametrize("routing", ["zipf", "silent_rank", "out_of_range"])
def test_plans_are_their_definition(ranks, routing):
    routes = test_gpu_plan.draw(routing, ranks, 300, 4, EXPERTS)
    test_gpu_plan.assert_plans_are_right(routes, EXPERTS, chunk_rows=128)


@several
def test_a_rank_that_does_not_come_is_named_and_other_layers_go_on(ranks):
    """Tokens as in no other test: ranks that have missed each other never meet again."""
    mesh, config = mesh_of(ranks), MoEConfig(timeout_s=2.0)
    inputs = draw("uniform", ranks, tokens=264)

    def body(*args):
        def come(x, *rest):
            return jax_mok.moe_ffn(x, *rest, axis_name="ep", config=config)

        absent = jax.lax.axis_index("ep") == ranks - 1
        return jax.lax.cond(absent, lambda x, *_: x, come, *args)

    *waited, absent = parts(sharded_step(body, mesh)(*on_gpus(inputs, mesh)), ranks)
    assert np.isnan(waited).all()
    np.testing.assert_array_equal(absent, parts(inputs.x, ranks)[-1])
    with pytest.raises(jax_mok.MoETimeoutError, match=f"waited in vain for rank {ranks - 1}"):
        jax_mok.check()
    other = draw("zipf", ranks, tokens=288)
    harness.assert_same_bits(run(other, ranks), run(other, 1))


def parts(y: jax.typing.ArrayLike, ranks: int) -> list[np.ndarray]:
    return np.split(np.asarray(y).astype(np.float32), ranks)


PROCESS = """
import gpu_harness, harness, jax_mok, test_gpu_many
from jax.experimental import multihost_utils
ranks, folder = int(sys.argv[3]), sys.argv[4]
mesh = gpu_harness.mesh_of(ranks)
inputs = harness.shard(test_gpu_many.draw("zipf", ranks, tokens=1200), mesh)
step = harness.layer_step(mesh, gpu_harness.MoEConfig(composition="fused"))
for _ in range(5):
    outputs = step(inputs)
jax_mok.check()
outputs = [multihost_utils.process_allgather(array, tiled=True) for array in outputs]
with open(f"{folder}/{process}", "wb") as file:
    for array in outputs:
        file.write(array.tobytes())
"""


def test_a_process_for_each_gpu_gets_the_bits_of_one_gpu(ranks, tmp_path):
    run_in_processes(ranks, PROCESS, ranks, tmp_path)
    outputs = run(draw("zipf", ranks, tokens=1200), 1)
    want = b"".join(array.tobytes() for array in outputs)
    found = {file.name: file.read_bytes() == want for file in tmp_path.iterdir()}
    assert found == dict.fromkeys(map(str, range(ranks)), True)
