"""Routers choose what their definitions say, on any device alike."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import router
from jax_mok.router import Router

TOKENS, EXPERTS = 40, 16


def logits_of(seed: int = 0, tokens: int = TOKENS, experts: int = EXPERTS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, experts)).astype(np.float32)


def chosen_by_definition(
    options: Router, logits: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One token and expert after the other, in float64."""
    all_ids, all_weights = [], []
    for row in logits.astype(np.float64):
        exponentials = np.exp(row - row.max())
        scores = exponentials / exponentials.sum()
        if options.kind == "sigmoid":
            scores = 1 / (1 + np.exp(-row))
        wanted = scores + bias
        size = len(row) // options.groups
        groups = [range(group * size, (group + 1) * size) for group in range(options.groups)]
        best = 1 if options.kind == "softmax" else 2
        value = [sum(sorted(wanted[list(group)])[-best:]) for group in groups]
        ranked = sorted(range(options.groups), key=lambda group: (-value[group], group))
        allowed = [e for group in ranked[: options.groups_per_token] for e in groups[group]]
        ids = sorted(allowed, key=lambda expert: (-wanted[expert], expert))[: options.top_k]
        weights = scores[ids]
        if options.renormalise:
            weights = weights / weights.sum()
        all_ids.append(ids)
        all_weights.append(options.scale * weights)
    return np.array(all_ids), np.array(all_weights)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_choices_and_weights_are_those_of_the_definition(kind, renormalise, groups):
    options = Router(4, kind, renormalise, 2.5, *groups)
    logits = logits_of()
    bias = 0.3 * logits_of(1, tokens=1)[0] * (kind == "sigmoid")
    routing = jax.jit(options)(logits, jnp.asarray(bias))
    ids, weights = chosen_by_definition(options, logits, bias)
    np.testing.assert_array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-6)
    assert (routing.ids.dtype, routing.weights.dtype) == (jnp.int32, jnp.float32)
    assert routing.scores.shape == logits.shape


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_router_chooses_distinct_experts_of_its_groups(data):
    groups = data.draw(st.integers(1, 4))
    experts = groups * data.draw(st.integers(1, 5))
    per_token = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, experts // groups * per_token))
    kind = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    value = st.sampled_from([-50.0, -1.0, 0.0, 0.5, 50.0])
    row = st.lists(value, min_size=experts, max_size=experts)
    logits = np.array(data.draw(st.lists(row, min_size=1, max_size=5)), np.float32)
    routing = Router(top_k, kind, groups=groups, groups_per_token=per_token)(logits)
    ids = np.asarray(routing.ids)
    assert 0 <= ids.min() <= ids.max() < experts
    for row in ids:
        assert len(set(row)) == top_k
        assert len(set(row // (experts // groups))) <= per_token
    assert np.isfinite(routing.weights).all()
    np.testing.assert_allclose(np.sum(routing.weights, axis=1), 1, rtol=1e-5)


def test_of_equal_scores_the_lower_ids_win():
    routing = Router(3)(np.zeros((2, 8), np.float32))
    np.testing.assert_array_equal(routing.ids, [[0, 1, 2]] * 2)
    grouped = Router(2, groups=4, groups_per_token=2)(np.zeros((1, 8), np.float32))
    np.testing.assert_array_equal(grouped.ids, [[0, 1]])


def test_a_bias_changes_choices_but_no_weights_and_has_no_gradient():
    logits = logits_of()
    options = Router(2, "sigmoid", renormalise=False)
    bias = jnp.zeros(EXPERTS).at[3].set(10.0)
    routing = options(logits, bias)
    assert (np.asarray(routing.ids)[:, 0] == 3).all()
    np.testing.assert_allclose(routing.weights[:, 0], 1 / (1 + np.exp(-logits[:, 3])), rtol=1e-6)
    slope = jax.grad(lambda bias: options(logits, bias).weights.sum())(bias)
    np.testing.assert_array_equal(slope, 0)


def test_gradients_flow_through_the_weights():
    logits = logits_of(tokens=3)
    options = Router(3, scale=2.0)
    slope = jax.grad(lambda z: jnp.sum(options(z).weights[:, 0]))(jnp.asarray(logits))
    step = 1e-3
    for token, expert in ((0, 0), (1, 7), (2, 15)):
        moved = np.zeros_like(logits)
        moved[token, expert] = step
        up, down = (options(logits + sign * moved) for sign in (1, -1))
        np.testing.assert_array_equal(up.ids, down.ids)
        want = (up.weights - down.weights)[:, 0].sum() / (2 * step)
        np.testing.assert_allclose(slope[token, expert], want, atol=2e-3)


def test_routes_are_ready_for_the_layer():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, 8)).astype(np.float32)
    up = rng.standard_normal((EXPERTS, 8, 12)).astype(np.float32)
    down = rng.standard_normal((EXPERTS, 12, 8)).astype(np.float32)
    ids, weights, _ = Router(2)(logits_of())
    y = jax_mok.moe(x, ids, weights, up, up, down, mesh=mesh_of(2), axis_name="ep")
    want = jax_mok.reference_moe(x, ids, weights, up, up, down)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="argmax"), "kind='argmax' is not one of 'softmax', 'sigmoid'"),
        (dict(top_k=0), "top_k=0 must be at least 1"),
        (dict(groups=2, groups_per_token=3), "groups_per_token=3 is more than Router.groups=2"),
        (dict(groups=3), "16 experts cannot be divided into Router.groups=3"),
        (dict(top_k=5, groups=4), "top_k=5 is more than the 4 experts that a token can choose"),
    ],
)
def test_what_no_router_can_do_is_named(options, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        Router(**{"top_k": 2} | options)(logits_of())


def test_routers_are_static_arguments():
    options = Router(2)
    assert hash(options) == hash(Router(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.top_k = 3


def test_jitter_stays_within_its_bounds():
    x = np.ones((50, 60), np.float32)
    noisy = np.asarray(router.jitter(x, jax.random.key(0), 0.1))
    assert 0.9 <= noisy.min() < 0.91 and 1.09 < noisy.max() <= 1.1


def test_load_counts_what_is_not_masked():
    load = router.load_of(jnp.array([[0, 2], [2, -1], [2, 7]]), 4)
    np.testing.assert_array_equal(load.counts, [1, 0, 3, 0])
    np.testing.assert_allclose(load.shares, [0.25, 0, 0.75, 0])
    assert float(load.peak) == 3.0 and int(load.idle) == 2


def test_losses_are_those_of_their_equations():
    logits = logits_of().astype(np.float64)
    routing = Router(2)(logits.astype(np.float32))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    shares = np.bincount(np.asarray(routing.ids).ravel(), minlength=EXPERTS) / (2 * TOKENS)
    balance = EXPERTS * np.sum(shares * probabilities.mean(0))
    np.testing.assert_allclose(router.load_balancing_loss(routing), balance, rtol=1e-5)
    z = np.mean(np.log(np.exp(logits).sum(1)) ** 2)
    np.testing.assert_allclose(router.z_loss(logits.astype(np.float32)), z, rtol=1e-5)


def test_an_even_load_has_the_least_balancing_loss():
    even = Router(1)(np.tile(np.eye(4, dtype=np.float32), (5, 1)))
    np.testing.assert_allclose(router.load_balancing_loss(even), 1.0, rtol=1e-6)
    crowded = Router(1)(np.tile(np.eye(4, dtype=np.float32)[:1], (20, 1)))
    assert float(router.load_balancing_loss(crowded)) > 1.5


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_partitioned_tokens_have_the_losses_and_load_of_all(kind):
    logits = jnp.asarray(logits_of())
    options = Router(2, kind)

    def losses(logits, axis_name=()):
        routing = options(logits)
        return (
            router.load_balancing_loss(routing, axis_name),
            router.z_loss(logits, axis_name),
            *router.load_of(routing.ids, EXPERTS, axis_name),
        )

    apart = jax.shard_map(
        functools.partial(losses, axis_name="ep"), mesh=mesh_of(4), in_specs=P("ep"), out_specs=P()
    )
    for got, want in zip(jax.jit(apart)(logits), losses(logits), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_bias_evens_the_load_out():
    """Without any loss, as Wang et al. promise, although the logits prefer few experts."""
    rng = np.random.default_rng(0)
    preference = rng.standard_normal(EXPERTS)
    options = Router(2, "sigmoid")

    @jax.jit
    def step(bias, key):
        logits = jnp.asarray(preference) + jax.random.normal(key, (512, EXPERTS))
        load = router.load_of(options(logits, bias).ids, EXPERTS)
        return router.update_bias(bias, load.counts, 0.02), load.peak

    bias, peaks = jnp.zeros(EXPERTS), []
    for key in jax.random.split(jax.random.key(0), 120):
        bias, peak = step(bias, key)
        peaks.append(float(peak))
    assert peaks[0] > 2.0
    assert np.mean(peaks[-20:]) < 1.4
