"""Forward and gradients against the float64 oracle, where other systems broke."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import draw_inputs, expect_recorded_faults, run_layer
from oracle import Inputs, Outputs
from routings import ROUTINGS, group_sizes

import jax_mok

pytestmark = pytest.mark.usefixtures("poisoned_memory")

STEPS = 3
TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}
both_dtypes = pytest.mark.parametrize("dtype", sorted(TOLERANCE))


def check_steps(
    routes: list[np.ndarray],
    *,
    hidden: int,
    inner: int,
    experts: int,
    dtype: str = "float32",
    clamp: float | None = None,
) -> None:
    """One call for each element of `routes`, on fresh data, each held to the oracle."""
    rng = np.random.default_rng(7)
    config = jax_mok.MoEConfig(clamp=clamp)
    for step, ids in enumerate(routes):
        inputs = draw_inputs(
            rng, ids, hidden=hidden, inner=inner, experts=experts, dtype=jnp.dtype(dtype)
        )
        outputs = run_layer(inputs, ids.shape[0], config)
        expect_recorded_faults(ids, experts)
        for name, array in outputs._asdict().items():
            wanted = "float32" if name == "d_expert_weights" else dtype
            assert array.dtype == jnp.dtype(wanted), f"{name} is {array.dtype}"
        oracle.assert_close(outputs, oracle.layer(inputs, clamp), TOLERANCE[dtype], f"step {step}")


def draw_routes(
    name: str, ranks: int, tokens: int, choices: int, experts: int, steps: int = STEPS
) -> list[np.ndarray]:
    rng = np.random.default_rng(11)
    return [ROUTINGS[name](rng, ranks, tokens, choices, experts) for _ in range(steps)]


@both_dtypes
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_layer_is_right_for_every_routing(routing: str, dtype: str) -> None:
    routes = draw_routes(routing, ranks=3, tokens=50, choices=3, experts=18)
    check_steps(routes, hidden=32, inner=24, experts=18, dtype=dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_layer_is_right_for_any_number_of_ranks(ranks: int) -> None:
    routes = draw_routes("zipf", ranks, tokens=192 // ranks, choices=2, experts=24)
    check_steps(routes, hidden=24, inner=16, experts=24)


@pytest.mark.parametrize("ranks", [1, 6])
def test_layer_is_right_with_one_local_expert(ranks: int) -> None:
    routes = draw_routes("uniform", ranks, tokens=40, choices=2, experts=ranks)
    check_steps(routes, hidden=24, inner=16, experts=ranks)


@both_dtypes
@pytest.mark.parametrize(
    "sizes", [[1, 63, 65, 127, 257, 0], [8, 0, 8, 0, 2, 0], [0, 0, 0, 0, 0, 6]]
)
def test_layer_is_right_for_any_group_size(sizes: list[int], dtype: str) -> None:
    rng = np.random.default_rng(3)
    check_steps(
        [group_sizes(rng, 3, sizes) for _ in range(STEPS)],
        hidden=32,
        inner=24,
        experts=len(sizes),
        dtype=dtype,
    )


def test_layer_is_right_for_any_token_count_and_after_a_larger_call() -> None:
    routes = [
        draw_routes("uniform", 2, tokens, 2, 4, steps=1)[0]
        for tokens in (1000, 1, 128, 17, 1000, 1)
    ]
    check_steps(routes, hidden=8, inner=4, experts=4)


@pytest.mark.parametrize("ranks", [1, 3])
def test_layer_takes_no_tokens_at_all(ranks: int) -> None:
    check_steps([np.empty((ranks, 0, 2), np.int32)], hidden=8, inner=4, experts=6)


@pytest.mark.parametrize("choices", [1, 5, 8])
def test_layer_is_right_for_any_number_of_choices(choices: int) -> None:
    routes = draw_routes("uniform", 2, 20, choices, 10)
    check_steps(routes, hidden=8, inner=12, experts=10)


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype"),
    [
        (2880, 48, "float32"),
        (2880, 48, "bfloat16"),
        (7, 5, "float32"),
        (7, 5, "bfloat16"),
        (1, 16, "float32"),
        (16, 1, "float32"),
        (48, 1408, "float32"),
        (768, 33, "float32"),
        (33, 768, "bfloat16"),
        (8192, 4, "float32"),
    ],
)
def test_layer_is_right_for_any_width(hidden: int, inner: int, dtype: str) -> None:
    routes = draw_routes("zipf", 2, tokens=19, choices=2, experts=4)
    check_steps(routes, hidden=hidden, inner=inner, experts=4, dtype=dtype)


@both_dtypes
@pytest.mark.parametrize("clamp", [0.3, 0.501, 1.7])
def test_layer_is_right_with_a_clamp(clamp: float, dtype: str) -> None:
    routes = draw_routes("uniform", 2, tokens=40, choices=2, experts=4)
    check_steps(routes, hidden=24, inner=16, experts=4, dtype=dtype, clamp=clamp)


def test_f32_weights_with_bf16_tokens_get_an_unrounded_gradient() -> None:
    ids = draw_routes("zipf", 2, tokens=64, choices=2, experts=4)[0]
    rounded = draw_inputs(
        np.random.default_rng(5), ids, hidden=24, inner=16, experts=4, dtype=jnp.bfloat16
    )
    weights = ("w_gate", "w_up", "w_down")
    master = rounded._replace(**{w: getattr(rounded, w).astype(np.float32) for w in weights})
    outputs, outputs_bf16 = run_layer(master, 2), run_layer(rounded, 2)
    oracle.assert_close(outputs, oracle.layer(master), TOLERANCE["bfloat16"])
    assert outputs.y.tobytes() == outputs_bf16.y.tobytes()
    for name in ("d_w_gate", "d_w_up", "d_w_down"):
        gradient = getattr(outputs, name)
        assert gradient.dtype == np.float32, name
        rounded_gradient = gradient.astype(jnp.bfloat16)
        assert np.mean(rounded_gradient.astype(np.float32) != gradient) > 0.9, name
        assert rounded_gradient.tobytes() == getattr(outputs_bf16, name).tobytes(), name


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_router_weight_touches_only_its_own_token(value: float) -> None:
    ids = draw_routes("zipf", 2, tokens=64, choices=2, experts=4)[0]
    clean = draw_inputs(np.random.default_rng(5), ids, hidden=24, inner=16, experts=4)
    bad_weights = clean.expert_weights.copy()
    bad_token = 70
    bad_weights[bad_token, 1] = value
    before = run_layer(clean, 2)
    after = run_layer(clean._replace(expert_weights=bad_weights), 2)
    for name in ("y", "dx"):
        assert not np.isfinite(getattr(after, name)[bad_token]).any(), name
    for name in ("y", "dx", "d_expert_weights"):
        others = [np.delete(getattr(o, name), bad_token, axis=0) for o in (before, after)]
        assert others[0].tobytes() == others[1].tobytes(), name
    untouched = np.setdiff1d(np.arange(4), clean.expert_ids[bad_token])
    for name in ("d_w_gate", "d_w_up", "d_w_down"):
        others = [getattr(o, name)[untouched] for o in (before, after)]
        assert others[0].tobytes() == others[1].tobytes(), name


def test_the_router_weight_of_a_masked_choice_is_never_read() -> None:
    ids = draw_routes("masked_middle", 2, tokens=64, choices=3, experts=4)[0]
    clean = draw_inputs(np.random.default_rng(5), ids, hidden=24, inner=16, experts=4)
    masked = clean.expert_ids < 0
    weights = np.where(masked, np.float32(np.nan), clean.expert_weights)
    before, after = run_layer(clean, 2), run_layer(clean._replace(expert_weights=weights), 2)
    for name in Outputs._fields:
        assert getattr(before, name).tobytes() == getattr(after, name).tobytes(), name
    assert not np.any(after.d_expert_weights[masked])


def test_tied_scores_go_to_the_lower_expert_id() -> None:
    scores = jnp.zeros((40, 10))
    expert_weights, ids = jax.lax.top_k(jax.nn.softmax(scores), 3)
    assert np.array_equal(ids, np.tile([0, 1, 2], (40, 1)))
    inputs = draw_inputs(
        np.random.default_rng(5), np.asarray(ids)[None], hidden=8, inner=4, experts=10
    )
    inputs = inputs._replace(expert_weights=np.asarray(expert_weights))
    oracle.assert_close(run_layer(inputs, 2), oracle.layer(inputs), TOLERANCE["float32"])


def reference_step(inputs: Inputs, clamp: float | None) -> Outputs:
    def reference(
        x: jax.Array, weights: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
    ) -> jax.Array:
        return jax_mok.reference_moe(
            x, inputs.expert_ids, weights, w_gate, w_up, w_down, clamp=clamp
        )

    primals = (inputs.x, inputs.expert_weights, inputs.w_gate, inputs.w_up, inputs.w_down)
    y, gradients = jax.vjp(reference, *map(jnp.asarray, primals))
    return Outputs(*map(np.asarray, (y, *gradients(jnp.asarray(inputs.dy)))))


@both_dtypes
@pytest.mark.parametrize("clamp", [None, 0.7])
@pytest.mark.parametrize("routing", ["zipf", "same_expert_twice", "out_of_range"])
def test_reference_is_right(routing: str, clamp: float | None, dtype: str) -> None:
    ids = draw_routes(routing, 1, tokens=100, choices=3, experts=6)[0]
    inputs = draw_inputs(
        np.random.default_rng(5), ids, hidden=24, inner=16, experts=6, dtype=jnp.dtype(dtype)
    )
    expected = oracle.layer(inputs, clamp)
    oracle.assert_close(reference_step(inputs, clamp), expected, TOLERANCE[dtype])
