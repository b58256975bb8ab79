"""What this layer is compared with is right, so that the comparison is fair."""

import functools

import harness
import jax
import numpy as np
import oracle
import pytest
from harness import mesh_of
from jax.sharding import PartitionSpec as P
from oracle import Inputs, Outputs
from routings import ROUTINGS

from jax_mok.bench import chains
from jax_mok.bench.peer_layers.capacity import capacity_layer, capacity_of, choices_kept
from jax_mok.bench.peer_layers.exchanged import exchanged_layer
from jax_mok.bench.peer_layers.gathered import gathered_layer
from jax_mok.bench.peer_layers.grouped import Layer, lax_product, with_product
from jax_mok.bench.peers_check import Check
from jax_mok.bench.shapes import TOY

TOKENS, CHOICES, EXPERTS = 32, 3, 8
LAYERS = {
    "gathered": with_product(gathered_layer, lax_product),
    "padded": functools.partial(
        with_product(exchanged_layer, lax_product),
        received_rows=4 * TOKENS * CHOICES,
        pair_rows=TOKENS * CHOICES,
    ),
    "capacity": functools.partial(capacity_layer, capacity=TOKENS * CHOICES),
}


def draw(ranks: int, routing: str = "uniform") -> Inputs:
    rng = np.random.default_rng(0)
    routes = ROUTINGS[routing](rng, ranks, TOKENS, CHOICES, EXPERTS)
    return harness.draw_inputs(rng, routes, hidden=24, inner=40, experts=EXPERTS)


def run(layer: Layer, inputs: Inputs, ranks: int) -> Outputs:
    mesh = mesh_of(ranks)

    def step(x, ids, router_weights, gate, up, down, dy):
        whole = jax.shard_map(
            functools.partial(layer, axis_name="ep"),
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
            check_vma=False,
        )
        y, pullback = jax.vjp(
            lambda x, *rest: whole(x, ids, *rest), x, router_weights, gate, up, down
        )
        return Outputs(y, *pullback(dy))

    return Outputs(*map(np.asarray, jax.jit(step)(*harness.shard(inputs, mesh))))


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one_expert"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_peer_and_its_gradients_are_right(name, ranks, routing):
    inputs = draw(ranks, routing)
    oracle.assert_close(run(LAYERS[name], inputs, ranks), oracle.layer(inputs, None), 1e-4)


def test_a_capacity_drops_the_last_choices_of_a_popular_expert():
    inputs = draw(2, "one_expert")
    capacity = capacity_of(1.25, TOKENS, CHOICES, EXPERTS)
    assert capacity == 15
    y = run(functools.partial(capacity_layer, capacity=capacity), inputs, 2).y
    kept = np.zeros((2, TOKENS * CHOICES), bool)
    kept[:, :capacity] = True
    weights = inputs.expert_weights * kept.reshape(-1, CHOICES)
    want = oracle.layer(inputs._replace(expert_weights=weights.astype(np.float32)), None).y
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    found = [choices_kept(ids, EXPERTS, capacity) for ids in np.split(inputs.expert_ids, 2)]
    np.testing.assert_array_equal(np.stack(found).reshape(kept.shape), kept)


def test_a_wrong_result_is_found():
    mesh = mesh_of(2)
    operands = chains.make_operands(TOY["toy"], "uniform", mesh, 1)
    queue = chains.layer_queue(
        operands, mesh, with_product(gathered_layer, lax_product), backward=True
    )
    check = Check(operands, mesh, backward=True)
    results = queue(1)
    assert max(check.errors_of(results).values()) < 2e-2
    names = [
        "outputs",
        *(f"gradients of {each}" for each in ("x", "router weights", "gate", "up", "down")),
    ]
    for place, name in list(enumerate(names))[1:]:  # the outputs are their own gradient too
        wrong = [r * 1.1 if i == place else r for i, r in enumerate(results)]
        found = check.errors_of(wrong)
        assert [each for each in names if found[each] > 2e-2] == [name]
    assert check.errors_of([results[0] * 1.1, *results[1:]])["outputs"] > 2e-2
