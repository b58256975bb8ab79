"""Products of operands in MXFP8 on NVIDIA GPUs: run with `pytest -m gpu`."""

import functools
from collections.abc import Callable

import harness
import jax
import jax.numpy as jnp
import mx_oracle
import numpy as np
import oracle
import pytest
from gpu_harness import mesh_of, poison_memory, rank_counts
from oracle import Inputs, Outputs
from routings import ROUTINGS
from test_gpu import draw, forward, mostly_masked, on_gpus
from test_gpu_gradients import WAYS
from test_gpu_saved import TILE, keep, rows_of

import jax_mok
from jax_mok.precision import Weights
from jax_mok.quantize import quantize

pytestmark = pytest.mark.gpu

TOLERANCE = 6e-3
WEIGHTS = ("w_gate", "w_up", "w_down")
MoEConfig = functools.partial(jax_mok.MoEConfig, timeout_s=10.0, precision="mxfp8")


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    poison_memory(np.float32(np.nan))


def run(inputs: Inputs, ranks: int, **options: object) -> Outputs:
    return harness.run_layer_on(mesh_of(ranks), inputs, MoEConfig(**options))


def run_forward(inputs: Inputs, ranks: int, **options: object) -> np.ndarray:
    """Of the program that derives nothing."""
    return np.asarray(forward(ranks, MoEConfig(**options))(*on_gpus(inputs, mesh_of(ranks))))


def assert_right(inputs: Inputs, **options: object) -> Outputs:
    """For any number of GPUs, with the same bits."""
    results = [run(inputs, ranks, **options) for ranks in rank_counts()]
    for result in results[1:]:
        harness.assert_same_bits(result, results[0])
    for ranks in rank_counts():
        assert run_forward(inputs, ranks, **options).tobytes() == results[0].y.tobytes()
    want = mx_oracle.layer(inputs, options.get("clamp"))
    oracle.assert_close(results[0], want, TOLERANCE)
    return results[0]


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_every_result_is_that_of_the_definition_for_every_routing(routing):
    inputs = draw(routing)
    assert_right(inputs)
    harness.expect_recorded_faults(inputs.expert_ids, 8)


@pytest.mark.parametrize("tokens", [2, 34, 256, 1000])
def test_every_result_is_that_of_the_definition_for_any_token_count(tokens):
    assert_right(draw("zipf", tokens=tokens))


@pytest.mark.parametrize(
    ("hidden", "inner"), [(64, 64), (2880, 64), (192, 320), (320, 192), (768, 1408), (8192, 64)]
)
def test_every_result_is_that_of_the_definition_for_any_width(hidden, inner):
    assert_right(draw(tokens=64, hidden=hidden, inner=inner, experts=4))


@pytest.mark.parametrize("clamp", [0.3, 1.7])
def test_every_result_is_that_of_the_definition_with_a_clamp(clamp):
    assert_right(draw(), clamp=clamp)


def test_tokens_of_many_magnitudes_are_as_good():
    inputs = draw(tokens=192)
    powers = 2.0 ** (np.arange(192) // oracle.ERROR_BLOCK * -20)
    assert_right(inputs._replace(x=(inputs.x * powers[:, None]).astype(inputs.x.dtype)))


@pytest.mark.parametrize("ring_rows", [256, None])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_results_are_bit_equal_for_all_directions_and_compositions(way, ring_rows):
    inputs = mostly_masked(draw("zipf", tokens=600, choices=3), share=0.2)
    want = run(inputs, 1)
    options = dict(ring_rows=ring_rows, chunk_rows=ring_rows and 64)
    for ranks in rank_counts():
        got = run(inputs, ranks, **way, **options, saved_rows=ring_rows and 128)
        harness.assert_same_bits(got, want)
        assert run_forward(inputs, ranks, **way, **options).tobytes() == want.y.tobytes()


@pytest.mark.parametrize("composition", ["auto", "composed"])
@pytest.mark.parametrize("ring_rows", [256, 512, 4096])
@pytest.mark.parametrize("saved_rows", [0, 320, None])
def test_results_are_bit_equal_for_any_ring_and_saved_rows(ring_rows, saved_rows, composition):
    inputs = mostly_masked(draw("zipf", tokens=1000, choices=3), share=0.1)
    want = run(inputs, 1)
    options = dict(ring_rows=ring_rows, chunk_rows=64, saved_rows=saved_rows)
    for ranks in rank_counts():
        got = run(inputs, ranks, composition=composition, **options)
        harness.assert_same_bits(got, want)


@pytest.mark.parametrize("masters", ["bfloat16", "float32"])
@pytest.mark.parametrize("saved_rows", [0, 2048, 1 << 20])
def test_experts_larger_than_the_ring_get_the_same_gradients(saved_rows, masters):
    """Of 2048 saved rows some make room for partial sums, and are replayed."""
    inputs = draw("one_expert", tokens=1000, hidden=320, inner=192)
    inputs = inputs._replace(**{name: getattr(inputs, name).astype(masters) for name in WEIGHTS})
    want = run(inputs, 1)
    for ranks in rank_counts():
        got = run(inputs, ranks, ring_rows=256, chunk_rows=64, saved_rows=saved_rows)
        harness.assert_same_bits(got, want)


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_repeats_are_bit_equal(direction):
    inputs = draw("zipf", tokens=1000, choices=4, hidden=2048)
    options = dict(dispatch=direction, reverse_combine=direction)
    want = run(inputs, 1)
    for ranks in rank_counts():
        for _ in range(20):
            harness.assert_same_bits(run(inputs, ranks, **options), want)


def test_calls_of_both_precisions_take_turns():
    inputs = draw("zipf", tokens=600)
    want = {precision: run(inputs, 1, precision=precision) for precision in ("operands", "mxfp8")}
    assert want["operands"].y.tobytes() != want["mxfp8"].y.tobytes()
    for _ in range(5):
        for precision, outputs in want.items():
            for ranks in rank_counts():
                harness.assert_same_bits(run(inputs, ranks, precision=precision), outputs)


def identities(x: np.ndarray) -> Inputs:
    """A layer of one expert a rank whose gate and up are the tokens, and y the hidden rows."""
    tokens, width = x.shape
    one = np.broadcast_to(np.eye(width, dtype=x.dtype), (2, width, width)).copy()
    ids = np.arange(tokens, dtype=np.int32)[:, None] % 2
    return Inputs(x, ids, np.ones((tokens, 1), np.float32), one, one, one, np.zeros_like(x))


def of_all_magnitudes(tokens: int, width: int) -> np.ndarray:
    """Blocks of large and small exponents, ties and subnormal numbers among them."""
    rng = np.random.default_rng(41)
    exponents = rng.integers(-126, 118, (tokens, width // 32, 1)) - rng.integers(
        0, 14, (tokens, width // 32, 32)
    )
    mantissas = 1 + rng.integers(0, 128, exponents.shape) / 128
    x = np.ldexp(mantissas, exponents) * rng.choice([-1, 1, 1, 1, 0], exponents.shape)
    return x.reshape(tokens, width).astype(jnp.bfloat16)


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("width", [64, 320, 2048])
def test_tokens_are_rounded_to_the_bit(width, direction):
    inputs = identities(of_all_magnitudes(256, width))
    want = mx_oracle.rounded(inputs.x, -1)
    for ranks in rank_counts():
        _, kept, sources, tile_experts = keep(inputs, ranks, MoEConfig(dispatch=direction))
        compared = 0
        for rank in range(ranks):
            for tile, values in enumerate(kept[rank][:-1]):
                rows = sources[rank][tile * TILE : (tile + 1) * TILE]
                if tile_experts[rank][tile] < 0:
                    continue
                for got in rows_of(values):
                    real = got[rows >= 0].astype(np.float64)
                    np.testing.assert_array_equal(real, want[rows[rows >= 0]])
                    compared += len(real)
        assert compared == 2 * len(want)


@pytest.mark.parametrize("exponent", [-60, 0, 30, 58])
def test_hidden_rows_are_rounded_from_float32(exponent):
    rng = np.random.default_rng(42)
    x = np.abs(rng.standard_normal((256, 256))) * 2.0 ** (exponent - np.arange(256) % 9)
    inputs = identities(x.astype(jnp.bfloat16))
    gate = mx_oracle.rounded(inputs.x, -1)
    with np.errstate(over="ignore"):
        hidden = (gate / (1 + np.exp(-gate)) * gate).astype(np.float32)
    want = mx_oracle.rounded(hidden, -1)
    for ranks in rank_counts():
        y = run_forward(inputs, ranks).astype(np.float64)
        np.testing.assert_array_equal(y, mx_oracle.rounded(y, -1))
        # The sigmoid's approximation may lie on the other side of a tie.
        assert np.mean(y == want) > 0.999


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_harms_its_own_token_and_experts_only(bad):
    inputs = draw(tokens=256)
    want = run(inputs, 1)
    x, dy = inputs.x.copy(), inputs.dy.copy()
    x[50, 3], dy[100, 7] = bad, bad
    others = ~np.isin(np.arange(256), [50, 100])
    spared = np.setdiff1d(np.arange(8), inputs.expert_ids[[50, 100]])
    for ranks in rank_counts():
        outputs = run(inputs._replace(x=x, dy=dy), ranks)
        assert np.isnan(outputs.y[50].astype(np.float32)).all()
        assert np.isnan(outputs.dx[100].astype(np.float32)).all()
        for name in ("y", "dx", "d_expert_weights"):
            got, exact = getattr(outputs, name)[others], getattr(want, name)[others]
            assert got.tobytes() == exact.tobytes(), name
        for name in ("d_w_gate", "d_w_up", "d_w_down"):
            got, exact = getattr(outputs, name)[spared], getattr(want, name)[spared]
            assert got.tobytes() == exact.tobytes(), name


def weights_of(inputs: Inputs) -> Weights:
    return Weights(inputs.w_gate, inputs.w_up, inputs.w_down)


def with_masters() -> Inputs:
    """bfloat16 tokens and float32 weights."""
    inputs = draw("zipf", tokens=600)
    rng = np.random.default_rng(43)

    def noisy(weights: np.ndarray) -> np.ndarray:
        noise = 1 + 1e-3 * rng.standard_normal(weights.shape)
        return (weights.astype(np.float64) * noise).astype(np.float32)

    return inputs._replace(**{name: noisy(getattr(inputs, name)) for name in WEIGHTS})


def gradients(inputs: Inputs, ranks: int, of_weights: Callable) -> Outputs:
    """All results of the layer, whose weights are made of those of the inputs."""

    @jax.jit
    def step(inputs: Inputs) -> Outputs:
        def layer(x, expert_weights, weights):
            return jax_mok.moe(
                x,
                inputs.expert_ids,
                expert_weights,
                *of_weights(weights),
                mesh=mesh_of(ranks),
                axis_name="ep",
                config=MoEConfig(saved_rows=128),
            )

        y, pullback = jax.vjp(layer, inputs.x, inputs.expert_weights, weights_of(inputs))
        dx, d_expert_weights, d_weights = pullback(inputs.dy)
        return Outputs(y, dx, d_expert_weights, *d_weights)

    return Outputs(*map(np.asarray, step(harness.shard(inputs, mesh_of(ranks)))))


def in_mx(weights: Weights) -> list:
    return [quantize(weight, -2, keep_master=True) for weight in weights]


def prepared(weights: Weights) -> Weights:
    return jax_mok.prepare_weights(*weights, backward=True)


@pytest.mark.parametrize("of_weights", [in_mx, prepared])
def test_stored_and_prepared_weights_have_the_bits_of_their_masters(of_weights):
    inputs = with_masters()
    want = run(inputs, 1)
    assert want.d_w_gate.dtype == np.float32
    oracle.assert_close(want, mx_oracle.layer(inputs), TOLERANCE)
    for ranks in rank_counts():
        harness.assert_same_bits(gradients(inputs, ranks, of_weights), want)


def test_weights_stored_without_masters_serve_inference_and_the_gradients_of_tokens():
    inputs = with_masters()
    stored = Weights(*(quantize(weight, -2) for weight in weights_of(inputs)))
    values = {name: mx_oracle.rounded(getattr(inputs, name), -2) for name in WEIGHTS}
    want = mx_oracle.layer(inputs._replace(**values))

    for ranks in rank_counts():
        mesh = mesh_of(ranks)

        @jax.jit
        def step(inputs, stored, mesh=mesh):
            def layer(x):
                operands = (x, inputs.expert_ids, inputs.expert_weights, *stored)
                return jax_mok.moe(*operands, mesh=mesh, axis_name="ep", config=MoEConfig())

            y, pullback = jax.vjp(layer, inputs.x)
            return y, *pullback(inputs.dy)

        y, dx = map(np.asarray, step(*harness.shard((inputs, stored), mesh)))
        assert y.tobytes() == run_forward(inputs, 1).tobytes()
        error = np.linalg.norm(dx.astype(np.float64) - want.dx)
        assert error <= TOLERANCE * np.linalg.norm(want.dx)


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype", "message"),
    [
        (96, 64, "bfloat16", "H=96 and I=64; the GPU kernels take multiples of 64"),
        (64, 96, "bfloat16", "H=64 and I=96; the GPU kernels take multiples of 64"),
        (64, 64, "float32", "x has dtype float32; the GPU kernels take bfloat16"),
        (48, 64, "bfloat16", "H=48 and I=64; MXFP8 has blocks of 32 along both"),
    ],
)
def test_what_no_kernel_takes_is_named(hidden, inner, dtype, message):
    inputs = draw(tokens=64, hidden=hidden, inner=inner)
    inputs = inputs._replace(
        x=inputs.x.astype(dtype),
        **{name: getattr(inputs, name).astype(dtype) for name in WEIGHTS},
    )
    with pytest.raises(jax_mok.MoEError, match=message):
        run_forward(inputs, 1)
