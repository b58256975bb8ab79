"""The Equinox module does what Equinox's users do with modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from module_harness import EXPERTS, HIDDEN, INNER, SHARED, loss_of, mesh_of, plain, tokens

import jax_mok
from jax_mok.block import BlockWeights
from jax_mok.equinox import MoE
from jax_mok.router import Router


def make(
    mesh: Mesh | None = None, chosen: Router | None = None, *, seed: int = 0, **options
) -> MoE:
    return MoE(
        HIDDEN,
        INNER,
        EXPERTS,
        chosen or Router(2),
        mesh=mesh or mesh_of(ep=4),
        axis_name="ep",
        key=jax.random.key(seed),
        **options,
    )


def by_definition(layer: MoE, x: np.ndarray) -> np.ndarray:
    weights = BlockWeights(
        layer.router_kernel, layer.router_bias, layer.gate, layer.up, layer.down, layer.shared
    )
    return plain(layer.block.router, weights, x)


@pytest.mark.parametrize("shared_inner", [0, SHARED])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("axes", [dict(ep=1), dict(ep=4), dict(dp=2, ep=2)])
def test_the_module_is_the_layer(axes, kind, shared_inner):
    layer = make(mesh_of(**axes), Router(2, kind), shared_inner=shared_inner)
    x = tokens(4, 8)
    y, routing, logits = eqx.filter_jit(layer)(x)
    np.testing.assert_allclose(y, by_definition(layer, x), rtol=2e-4, atol=2e-5)
    assert (routing.ids.shape, logits.shape) == ((32, 2), (32, EXPERTS))


def test_weights_are_partitioned_as_they_say():
    mesh = mesh_of(dp=2, ep=2)
    layer = make(mesh, shared_inner=SHARED)
    assert layer.gate.sharding.is_equivalent_to(NamedSharding(mesh, P("ep")), 3)
    placed = jax.device_put(layer, layer.shardings())
    assert placed.down.sharding == NamedSharding(mesh, P("ep"))
    assert placed.shared["up"].sharding == NamedSharding(mesh, P())


def test_gradients_reach_every_weight_and_training_lowers_the_loss():
    layer = make(shared_inner=SHARED)
    layer = jax.device_put(layer, layer.shardings())
    optimizer = optax.adamw(1e-2)
    moments = optimizer.init(eqx.filter(layer, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(layer, moments, x):
        loss, gradients = eqx.filter_value_and_grad(loss_of)(layer, x)
        updates, moments = optimizer.update(gradients, moments, layer)
        return eqx.apply_updates(layer, updates), moments, loss, gradients

    losses = []
    for _ in range(20):
        layer, moments, loss, gradients = step(layer, moments, jnp.asarray(tokens(32)))
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    for path, gradient in jax.tree.leaves_with_path(gradients):
        assert np.abs(np.asarray(gradient)).max() > 0, path


def test_a_checkpointed_layer_gives_the_same_gradients():
    layer, x = make(), jnp.asarray(tokens(32))
    plainly = eqx.filter_grad(loss_of)(layer, x)
    again = eqx.filter_grad(eqx.filter_checkpoint(loss_of))(layer, x)
    for one, other in zip(jax.tree.leaves(plainly), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_layers_can_be_stacked_and_scanned():
    layers = [make(seed=seed) for seed in range(3)]
    arrays, static = zip(*(eqx.partition(layer, eqx.is_array) for layer in layers), strict=True)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)

    @jax.jit
    def run(stacked, x):
        def apply(x, arrays):
            return x + eqx.combine(arrays, static[0])(x).y, None

        return jax.lax.scan(apply, x, stacked)[0]

    want = tokens(32)
    for layer in layers:
        want = want + by_definition(layer, want)
    np.testing.assert_allclose(run(stacked, jnp.asarray(tokens(32))), want, rtol=1e-3, atol=1e-4)


def test_float32_masters_of_bfloat16_compute():
    layer, x = make(dtype=jnp.bfloat16), tokens(32)
    y = layer(x).y
    assert y.dtype == jnp.bfloat16
    gradients = eqx.filter_grad(lambda layer: jnp.sum(layer(x).y.astype(jnp.float32)))(layer)
    assert gradients.gate.dtype == jnp.float32


def test_serialised_weights_come_back(tmp_path):
    layer = make(chosen=Router(2, "sigmoid"), shared_inner=SHARED)
    eqx.tree_serialise_leaves(tmp_path / "layer.eqx", layer)
    other = make(chosen=Router(2, "sigmoid"), shared_inner=SHARED, seed=1)
    restored = eqx.tree_deserialise_leaves(tmp_path / "layer.eqx", other)
    restored = jax.device_put(restored, restored.shardings())
    x = tokens(32)
    np.testing.assert_array_equal(layer(x).y, restored(x).y)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            dict(ep=3),
            "8 experts .* among the 3 ranks of mesh axis 'ep': use a multiple of 3",
        ),
        (dict(dp=2), "axis_name='ep' is not an axis of the mesh; its axes are 'dp'"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(axes, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        make(mesh_of(**axes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(router=2), r"router must be a jax_mok.router.Router, got int: use Router\(2\)"),
        (dict(key=0), r"key must be a JAX key, got int: use key=jax.random.key\(0\)"),
        (dict(mesh=4), "mesh must be a jax.sharding.Mesh, got int: make one with jax.make_mesh"),
    ],
)
def test_arguments_of_other_types_are_named(changes, message):
    arguments = dict(
        hidden=HIDDEN,
        inner=INNER,
        experts=EXPERTS,
        router=Router(2),
        mesh=mesh_of(ep=4),
        axis_name="ep",
        key=jax.random.key(0),
    )
    with pytest.raises(jax_mok.MoEInputError, match=message):
        MoE(**arguments | changes)
