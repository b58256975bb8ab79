"""The NNX module does what Flax's users do with modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from module_harness import EXPERTS, HIDDEN, INNER, SHARED, loss_of, mesh_of, plain, tokens

import jax_mok
from jax_mok.block import BlockWeights
from jax_mok.flax import MoE
from jax_mok.router import Router


def make(mesh: Mesh | None = None, *, seed: int = 0, **options) -> MoE:
    options = {"router": Router(2), "shared_inner": 0} | options
    chosen = options.pop("router")
    return MoE(
        HIDDEN,
        INNER,
        EXPERTS,
        chosen,
        mesh=mesh or mesh_of(ep=4),
        axis_name="ep",
        rngs=nnx.Rngs(seed),
        **options,
    )


def by_definition(layer: MoE, x: np.ndarray) -> np.ndarray:
    shared = layer.shared and {name: layer.shared[name][...] for name in ("gate", "up", "down")}
    bias = None if layer.router_bias is None else layer.router_bias[...]
    experts = (layer.gate[...], layer.up[...], layer.down[...])
    return plain(
        layer.block.router, BlockWeights(layer.router_kernel[...], bias, *experts, shared), x
    )


@pytest.mark.parametrize("shared_inner", [0, SHARED])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("axes", [dict(ep=1), dict(ep=4), dict(dp=2, ep=2)])
def test_the_module_is_the_layer(axes, kind, shared_inner):
    layer = make(mesh_of(**axes), router=Router(2, kind), shared_inner=shared_inner)
    x = tokens(4, 8)
    y, routing, logits = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(y, by_definition(layer, x), rtol=2e-4, atol=2e-5)
    assert (routing.ids.shape, logits.shape) == ((32, 2), (32, EXPERTS))


def test_weights_say_how_they_are_partitioned():
    mesh = mesh_of(dp=2, ep=2)
    layer = make(mesh, shared_inner=SHARED)
    specs = nnx.get_partition_spec(nnx.state(layer, nnx.Param))
    assert specs["gate"].get_value() == P("ep", None, None)
    assert specs["down"].get_value() == P("ep", None, None)
    assert specs["router_kernel"].get_value() in (P(), None)
    shardings = nnx.get_named_sharding(nnx.state(layer, nnx.Param), mesh)
    assert shardings["up"].get_value() == NamedSharding(mesh, P("ep", None, None))


def test_gradients_reach_every_parameter_and_training_lowers_the_loss():
    layer = make(shared_inner=SHARED)
    x = jnp.asarray(tokens(32))
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_of)(layer, x)
        optimizer.update(layer, gradients)
        return loss, gradients

    losses = []
    for _ in range(20):
        loss, gradients = step(layer, optimizer, x)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    for path, gradient in nnx.to_flat_state(gradients):
        assert np.abs(np.asarray(gradient[...])).max() > 0, path


def test_remat_gives_the_same_gradients():
    x = jnp.asarray(tokens(32))
    layer = make()
    plainly = nnx.grad(loss_of)(layer, x)
    again = nnx.grad(nnx.remat(loss_of))(layer, x)
    for (path, one), (_, other) in zip(
        nnx.to_flat_state(plainly), nnx.to_flat_state(again), strict=True
    ):
        np.testing.assert_array_equal(one[...], other[...], err_msg=str(path))


def test_layers_can_be_stacked_and_scanned():
    mesh = mesh_of(ep=4)

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make_stack(rngs: nnx.Rngs) -> MoE:
        return MoE(HIDDEN, INNER, EXPERTS, Router(2), mesh=mesh, axis_name="ep", rngs=rngs)

    stack = make_stack(nnx.Rngs(0))
    assert stack.gate[...].shape == (3, EXPERTS, HIDDEN, INNER)

    @nnx.jit
    def run(stack: MoE, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(layer: MoE, x: jax.Array) -> jax.Array:
            return x + layer(x).y

        return apply(stack, x)

    x = tokens(32)
    want = x
    graph, state = nnx.split(stack)
    for index in range(3):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=index: leaf[i], state))
        want = want + by_definition(layer, want)
    np.testing.assert_allclose(run(stack, jnp.asarray(x)), want, rtol=1e-3, atol=1e-4)


def test_float32_masters_of_bfloat16_compute():
    layer = make(dtype=jnp.bfloat16)
    x = tokens(32)
    y = layer(x).y
    assert y.dtype == jnp.bfloat16
    gradients = nnx.grad(lambda layer: jnp.sum(layer(x).y.astype(jnp.float32)))(layer)
    assert gradients["gate"][...].dtype == jnp.float32


def test_the_bias_is_no_parameter_and_steers_the_choice():
    layer = make(router=Router(2, "sigmoid"))
    assert "router_bias" not in nnx.state(layer, nnx.Param)
    layer.router_bias[...] = layer.router_bias[...].at[5].set(10.0)
    assert (np.asarray(layer(tokens(32)).routing.ids)[:, 0] == 5).all()


def test_checkpoints_bring_the_weights_back(tmp_path):
    mesh = mesh_of(ep=4)
    layer = make(mesh, router=Router(2, "sigmoid"), shared_inner=SHARED)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.to_pure_dict(nnx.state(layer)))
    other = make(mesh, router=Router(2, "sigmoid"), shared_inner=SHARED, seed=1)
    state = nnx.state(other)
    places = nnx.to_pure_dict(nnx.get_named_sharding(state, mesh))
    like = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        nnx.to_pure_dict(state),
        places,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / "layer", like))
    nnx.update(other, state)
    assert other.gate[...].sharding == NamedSharding(mesh, P("ep", None, None))
    x = tokens(32)
    np.testing.assert_array_equal(layer(x).y, other(x).y)


@pytest.mark.parametrize(
    ("axes", "axis_name", "message"),
    [
        (
            dict(ep=3),
            "ep",
            "8 experts .* among the 3 ranks of mesh axis 'ep': use a multiple of 3",
        ),
        (dict(dp=2), "ep", "axis_name='ep' is not an axis of the mesh; its axes are 'dp'"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(axes, axis_name, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        make(mesh_of(**axes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(router=2), r"router must be a jax_mok.router.Router, got int: use Router\(2\)"),
        (dict(router="softmax"), r"router must be .*, got str: use Router\(top_k\)"),
        (dict(rngs=0), r"rngs must be a flax.nnx.Rngs, got int: use rngs=nnx.Rngs\(0\)"),
        (dict(mesh=4), "mesh must be a jax.sharding.Mesh, got int: make one with jax.make_mesh"),
        (dict(mesh=None), "mesh must be a jax.sharding.Mesh, got NoneType"),
        (dict(experts=8.0), "the number of experts must be an integer, got 8.0"),
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
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(jax_mok.MoEInputError, match=message):
        MoE(**arguments | changes)
