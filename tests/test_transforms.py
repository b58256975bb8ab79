"""The layer under JAX's transformations, meshes and compilation modes."""

import functools
import os
import re
import subprocess
import sys
import threading

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routings
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Inputs, Outputs

import jax_mok
from jax_mok.sharding import find_mesh

RANKS, TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 4, 24, 16, 24, 8, 2


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    rng = np.random.default_rng(5)
    routes = routings.uniform(rng, RANKS, TOKENS, TOP_K, EXPERTS)
    return harness.draw_inputs(rng, routes, hidden=HIDDEN, inner=INNER, experts=EXPERTS)


@pytest.fixture(scope="module")
def expected(inputs: Inputs) -> Outputs:
    return harness.run_layer(inputs, 1)


def primals(inputs: Inputs) -> tuple[np.ndarray, ...]:
    return inputs.x, inputs.expert_weights, inputs.w_gate, inputs.w_up, inputs.w_down


def layer_on(mesh, inputs, **shard_map_options):
    """The layer as a function of the differentiable operands, by an explicit shard_map."""
    tokens, experts = P(mesh.axis_names), P("ep")

    def body(x, expert_weights, w_gate, w_up, w_down, expert_ids):
        return jax_mok.moe_ffn(x, expert_ids, expert_weights, w_gate, w_up, w_down, axis_name="ep")

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(tokens, tokens, experts, experts, experts, tokens),
        out_specs=tokens,
        **shard_map_options,
    )
    return lambda *operands: mapped(*operands, inputs.expert_ids)


def outputs_of(layer, inputs, operands=None) -> Outputs:
    @jax.jit
    def step(*operands):
        y, gradients = jax.vjp(layer, *operands)
        return y, *gradients(jnp.asarray(inputs.dy))

    return Outputs(*map(np.asarray, step(*(operands or primals(inputs)))))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_type_checks_do_not_change_results(inputs, expected, check_vma):
    layer = layer_on(harness.mesh_of(RANKS), inputs, check_vma=check_vma)
    harness.assert_same_bits(outputs_of(layer, inputs), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_inside_shard_map_equals_gradient_outside(inputs, expected, check_vma):
    tokens, experts = P("ep"), P("ep")

    def body(x, expert_ids, expert_weights, w_gate, w_up, w_down, dy):
        def layer(*operands):
            return jax_mok.moe_ffn(operands[0], expert_ids, *operands[1:], axis_name="ep")

        y, gradients = jax.vjp(layer, x, expert_weights, w_gate, w_up, w_down)
        return y, *gradients(dy)

    mapped = jax.shard_map(
        body,
        mesh=harness.mesh_of(RANKS),
        in_specs=(tokens, tokens, tokens, experts, experts, experts, tokens),
        out_specs=(tokens, tokens, tokens, experts, experts, experts),
        check_vma=check_vma,
    )
    operands = (*primals(inputs)[:1], inputs.expert_ids, *primals(inputs)[1:], inputs.dy)
    harness.assert_same_bits(Outputs(*map(np.asarray, jax.jit(mapped)(*operands))), expected)


def test_eager_call_equals_compiled_call(inputs, expected):
    y = jax_mok.moe(
        inputs.x,
        inputs.expert_ids,
        *primals(inputs)[1:],
        mesh=harness.mesh_of(RANKS),
        axis_name="ep",
    )
    np.testing.assert_array_equal(np.asarray(y), expected.y)


POLICIES = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "shipped": jax_mok.remat_policy,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_checkpoint_gives_the_same_bits_with_any_policy(inputs, expected, policy):
    layer = jax.checkpoint(layer_on(harness.mesh_of(RANKS), inputs), policy=policy)
    harness.assert_same_bits(outputs_of(layer, inputs), expected)


def routed_loss(inputs, policy):
    """A loss through a router, so that recomputation could route differently."""
    mesh = harness.mesh_of(RANKS)

    def loss(x, router):
        weights, ids = jax.lax.top_k(jax.nn.softmax(x @ router), TOP_K)
        layer = functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep")
        y = layer(x, ids, weights, inputs.w_gate, inputs.w_up, inputs.w_down)
        return jnp.sum(y * inputs.dy)

    return jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1))


def test_shipped_policy_keeps_routes_plan_and_pre_activations(inputs):
    router = np.zeros((HIDDEN, EXPERTS), np.float32)

    def plan_calls(policy) -> int:
        jaxpr = jax.make_jaxpr(routed_loss(inputs, policy))(inputs.x, router)
        return str(jaxpr).count("target_name=jax_mok_plan")

    once = plan_calls(jax_mok.remat_policy)
    assert once > 0
    assert plan_calls(jax.checkpoint_policies.nothing_saveable) == 2 * once


def test_tied_scores_route_alike_when_recomputed(inputs):
    router = np.zeros((HIDDEN, EXPERTS), np.float32)
    kept = jax.jit(routed_loss(inputs, jax.checkpoint_policies.everything_saveable))
    recomputed = jax.jit(routed_loss(inputs, jax_mok.remat_policy))
    for a, b in zip(kept(inputs.x, router), recomputed(inputs.x, router), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers_equals_a_python_loop(inputs, remat):
    layer = layer_on(harness.mesh_of(RANKS), inputs)
    depth = 3
    stacked = tuple(jnp.stack([w * (1 + i) for i in range(depth)]) for w in primals(inputs)[2:])

    def scanned(x, stacked):
        def block(x, weights):
            return x + layer(x, inputs.expert_weights, *weights), None

        if remat:
            block = jax.checkpoint(block, policy=jax_mok.remat_policy)
        return jax.lax.scan(block, x, stacked)[0]

    def looped(x, stacked):
        for i in range(depth):
            x = x + layer(x, inputs.expert_weights, *(w[i] for w in stacked))
        return x

    def gradients(fn):
        loss = lambda x, stacked: jnp.sum(fn(x, stacked) * inputs.dy)  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(inputs.x, stacked))

    for a, b in zip(gradients(scanned), gradients(looped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_donated_operands_give_the_same_bits(inputs, expected):
    sharding = NamedSharding(harness.mesh_of(RANKS), P("ep"))
    donated = [jax.device_put(operand, sharding) for operand in primals(inputs)]
    layer = layer_on(harness.mesh_of(RANKS), inputs)

    @functools.partial(jax.jit, donate_argnums=(0, 2, 3, 4))
    def step(*operands):
        y, gradients = jax.vjp(layer, *operands)
        return y, *gradients(jnp.asarray(inputs.dy))

    got = Outputs(*map(np.asarray, step(*donated)))
    assert donated[2].is_deleted()
    harness.assert_same_bits(got, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_of_the_context_is_used(inputs, expected, kind):
    names = ("dp", "ep")
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), names, axis_types=(kind, kind))

    def layer(x, *others, **mesh):
        return jax_mok.moe(x, inputs.expert_ids, *others, axis_name="ep", **mesh)

    with jax.set_mesh(mesh):
        eager = layer(*primals(inputs), mesh=None)
        compiled = jax.jit(layer)(*primals(inputs))
        gradient = jax.grad(lambda *operands: jnp.sum(layer(*operands) * inputs.dy))
        dx = gradient(*primals(inputs)), jax.jit(gradient)(*primals(inputs))
    for y in (eager, compiled):
        np.testing.assert_array_equal(y, expected.y)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(names)), 2)
    for each in dx:
        np.testing.assert_array_equal(each, expected.dx)


def test_the_mesh_of_the_context_tells_its_devices_but_to_compiled_functions():
    mesh = harness.mesh_of(RANKS)
    with jax.set_mesh(mesh):
        assert find_mesh(None) == mesh
        found = []
        jax.jit(lambda: found.append(find_mesh(None)))()
    assert found == [mesh.abstract_mesh]


def test_ahead_of_time_compilation(inputs, expected):
    layer = layer_on(harness.mesh_of(RANKS), inputs)
    compiled = jax.jit(layer).lower(*primals(inputs)).compile()
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(compiled(*primals(inputs))), expected.y)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis_types"),
    [
        ((4,), (AUTO,)),
        ((4,), (EXPLICIT,)),
        ((2, 4), (AUTO, AUTO)),
        ((3, 2), (EXPLICIT, EXPLICIT)),
        ((2, 4), (EXPLICIT, AUTO)),
        ((2, 2), (AUTO, EXPLICIT)),
    ],
)
def test_any_mesh_gives_the_same_bits(inputs, expected, shape, axis_types, permuted):
    names = ("dp", "ep")[-len(shape) :]
    devices = np.array(jax.devices()[: np.prod(shape)])
    if permuted:
        devices = np.random.default_rng(0).permutation(devices)
    mesh = Mesh(devices.reshape(shape), names, axis_types=axis_types)
    tokens, experts = NamedSharding(mesh, P(names)), NamedSharding(mesh, P("ep"))
    operands = [
        jax.device_put(operand, sharding)
        for operand, sharding in zip(
            primals(inputs), (tokens, tokens, experts, experts, experts), strict=True
        )
    ]
    ids = jax.device_put(inputs.expert_ids, tokens)
    layer = lambda *ops: jax_mok.moe(ops[0], ids, *ops[1:], mesh=mesh, axis_name="ep")  # noqa: E731

    @jax.jit
    def step(dy, *operands):
        y, gradients = jax.vjp(layer, *operands)
        return y, *gradients(dy)

    got = Outputs(*map(np.asarray, step(jax.device_put(inputs.dy, tokens), *operands)))
    np.testing.assert_array_equal(got.y, expected.y)
    np.testing.assert_array_equal(got.dx, expected.dx)
    np.testing.assert_array_equal(got.d_expert_weights, expected.d_expert_weights)
    # Each group of ranks sums its own tokens; the sum over groups is XLA's.
    for name in ("d_w_gate", "d_w_up", "d_w_down"):
        np.testing.assert_allclose(
            getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("composition", ["composed", "collective"])
def test_replicated_tokens_get_the_sum_of_their_gradients(inputs, composition):
    """x is the same along "dp", its output is weighted differently there."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "ep"))
    scale = np.array([2.0, 3.0], np.float32)
    layer = functools.partial(
        jax_mok.moe_ffn, axis_name="ep", config=jax_mok.MoEConfig(composition=composition)
    )

    def loss(x, w_gate):
        def body(x, ids, weights, w_gate, w_up, w_down, dy, scale):
            y = layer(x, ids, weights, w_gate, w_up, w_down)
            return jax.lax.psum(jnp.sum(y * dy) * scale[0], ("dp", "ep"))

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(*(P("ep"),) * 7, P("dp")),
            out_specs=P(),
        )(
            x,
            inputs.expert_ids,
            inputs.expert_weights,
            w_gate,
            inputs.w_up,
            inputs.w_down,
            inputs.dy,
            scale,
        )

    dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(inputs.x, inputs.w_gate)
    want = harness.run_layer(inputs, RANKS)
    np.testing.assert_allclose(dx, scale.sum() * want.dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, scale.sum() * want.d_w_gate, rtol=1e-5, atol=1e-5)


def test_masters_of_several_dtypes_need_no_implicit_promotion(inputs):
    x, weights, gate, *others = (jnp.asarray(operand) for operand in primals(inputs))
    half = [operand.astype(jnp.bfloat16) for operand in (x, *others)]
    layer = layer_on(harness.mesh_of(RANKS), inputs)
    operands = half[0], weights, gate, *half[1:]
    with jax.numpy_dtype_promotion("strict"):
        gradients = jax.jit(jax.grad(lambda *o: jnp.sum(layer(*o)), argnums=range(5)))(*operands)
    assert [g.dtype for g in gradients] == [operand.dtype for operand in operands]


def test_layers_of_one_program_do_not_meet_each_other(inputs, expected):
    """Independent layers, which ranks may run in any order: an equal pair, and other sizes."""
    rng = np.random.default_rng(6)
    routes = routings.zipf(rng, 8, TOKENS, 3, 16)
    others = harness.draw_inputs(rng, routes, hidden=8, inner=40, experts=16)
    config = jax_mok.MoEConfig(ring_rows=64, dispatch="push")
    mesh = harness.mesh_of(8)
    layer = layer_on(mesh, inputs)

    @jax.jit
    def program(operands, other_operands):
        first = layer(*operands)
        x, *weights = other_operands
        other = jax_mok.moe(
            x, others.expert_ids, *weights, mesh=mesh, axis_name="ep", config=config
        )
        return first, other, layer(*operands)

    want = harness.run_layer(others, 1).y
    for _ in range(5):
        first, other, again = program(primals(inputs), primals(others))
        np.testing.assert_array_equal(first, expected.y)
        np.testing.assert_array_equal(other, want)
        np.testing.assert_array_equal(again, expected.y)


@pytest.mark.parametrize("composition", ["composed", "collective"])
def test_groups_of_ranks_may_need_different_numbers_of_waves(inputs, composition):
    """Tokens of one group go to one rank, those of the other nowhere."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "ep"))
    ids = np.zeros_like(inputs.expert_ids)
    ids[len(ids) // 2 :] = -1
    config = jax_mok.MoEConfig(ring_rows=64, composition=composition)

    def layer(x, *weights):
        return jax_mok.moe(x, ids, *weights, mesh=mesh, axis_name="ep", config=config)

    got = outputs_of(layer, inputs)
    want = harness.run_layer(inputs._replace(expert_ids=ids), 1)
    for name in ("y", "dx", "d_expert_weights", "d_w_gate"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


def test_neighbouring_collectives_do_not_disturb_the_layer(inputs, expected):
    mesh = harness.mesh_of(8)
    layer = layer_on(mesh, inputs)
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "ep"), mesh=mesh, in_specs=P("ep"), out_specs=P()
    )

    @jax.jit
    def step(*operands):
        before = total(operands[0])
        y = layer(*operands)
        return y, before, total(y)

    for _ in range(5):
        y, before, after = step(*primals(inputs))
        np.testing.assert_array_equal(y, expected.y)
        np.testing.assert_allclose(before, inputs.x.reshape(8, -1, HIDDEN).sum(0), rtol=1e-4)
        np.testing.assert_allclose(after, expected.y.reshape(8, -1, HIDDEN).sum(0), atol=1e-4)


def test_threads_may_call_the_layer_at_the_same_time(inputs, expected):
    layer = jax.jit(layer_on(harness.mesh_of(8), inputs))
    layer(*primals(inputs)).block_until_ready()
    wrong = []

    def call_often():
        for _ in range(20):
            if not np.array_equal(layer(*primals(inputs)), expected.y):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=call_often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not wrong


def test_threads_do_not_multiply_when_cores_are_busy(inputs):
    """Workers are as many as tasks at one time, also while others take their cores."""
    layer = layer_on(harness.mesh_of(2), inputs)

    @jax.jit
    def many(x):
        return jax.lax.scan(lambda x, _: (layer(x, *primals(inputs)[1:]), None), x, length=300)[0]

    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        many(inputs.x).block_until_ready()
        before = threads_of_this_process()
        for _ in range(5):
            many(inputs.x).block_until_ready()
        assert threads_of_this_process() <= before + 8
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_double_precision_mode_changes_nothing(inputs, expected):
    with jax.enable_x64(True):
        layer = layer_on(harness.mesh_of(RANKS), inputs)
        got = outputs_of(layer, inputs)
    assert got.y.dtype == np.float32
    harness.assert_same_bits(got, expected)


def test_vmap_says_to_fold_the_batch_into_the_tokens(inputs):
    layer = layer_on(harness.mesh_of(RANKS), inputs)
    stacked = np.stack([inputs.x] * 2)
    with pytest.raises(jax_mok.MoEError, match="fold the batch into the tokens"):
        jax.vmap(lambda x: layer(x, *primals(inputs)[1:]))(stacked)
    y, gradients = jax.vjp(layer, *primals(inputs))
    with pytest.raises(jax_mok.MoEError, match="fold the batch into the tokens"):
        jax.vmap(gradients)(jnp.stack([y, y]))


def test_second_derivatives_are_refused(inputs):
    layer = layer_on(harness.mesh_of(RANKS), inputs)
    loss = lambda x: jnp.sum(layer(x, *primals(inputs)[1:]))  # noqa: E731
    with pytest.raises(jax_mok.MoEError, match="first derivatives in reverse mode only"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(inputs.x)


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit, jax.checkpoint])
def test_forward_mode_is_refused(inputs, wrap):
    layer = wrap(layer_on(harness.mesh_of(RANKS), inputs))
    x, *others = map(jnp.asarray, primals(inputs))
    of_x = lambda x: layer(x, *others)  # noqa: E731
    refused = pytest.raises(jax_mok.MoEError, match="first derivatives in reverse mode only")
    with refused:
        jax.jvp(of_x, (x,), (x,))
    with refused:
        jax.linearize(of_x, x)[1](x)
    with refused:
        jax.jacfwd(of_x)(x)


@pytest.mark.parametrize("argument", range(5))
def test_forward_mode_is_refused_for_any_operand(inputs, argument):
    layer = layer_on(harness.mesh_of(RANKS), inputs)
    operands = [*map(jnp.asarray, primals(inputs))]

    def of_one(value):
        return layer(*operands[:argument], value, *operands[argument + 1 :])

    value = operands[argument]
    with pytest.raises(jax_mok.MoEError, match="first derivatives in reverse mode only"):
        jax.jit(lambda value: jax.jvp(of_one, (value,), (value,)))(value)


def test_whole_jacobians_name_the_vmap_within_them(inputs):
    layer = layer_on(harness.mesh_of(RANKS), inputs)
    message = r"into the tokens, .* \(jax.jacrev and jax.jacfwd use vmap\)"
    with pytest.raises(jax_mok.MoEError, match=message):
        jax.jit(jax.jacrev(layer))(*primals(inputs))


def test_platforms_without_kernels_are_refused_when_lowered(inputs):
    layer = layer_on(harness.mesh_of(RANKS), inputs)

    def lower(function, platform):
        return jax.jit(function).trace(*primals(inputs)).lower(lowering_platforms=(platform,))

    with pytest.raises(
        jax_mok.MoEError, match=r"without GPU kernels|GPU kernels (take bfloat16|need)"
    ):
        lower(layer, "cuda")
    with pytest.raises(jax_mok.MoEError, match="CPU devices and on NVIDIA GPUs only"):
        lower(layer, "tpu")
    with pytest.raises(
        jax_mok.MoEError, match=r"without GPU kernels|GPU kernels (take bfloat16|need)"
    ):
        lower(jax.grad(lambda *ops: jnp.sum(layer(*ops))), "cuda")


def test_program_has_one_plan_no_gathered_operand_and_no_pointer(inputs):
    layer = layer_on(harness.mesh_of(RANKS), inputs)

    def step(*operands):
        y, gradients = jax.vjp(layer, *operands)
        return y, *gradients(jnp.asarray(inputs.dy))

    sharding = NamedSharding(harness.mesh_of(RANKS), P("ep"))
    lowered = jax.jit(step, in_shardings=sharding).lower(*primals(inputs))
    text = lowered.compile().as_text()
    assert text.count('custom_call_target="jax_mok_plan"') == 1
    assert "all-gather" not in text
    attributes = re.findall(r"mhlo.backend_config = (\{[^}]*\})", lowered.as_text())
    assert attributes
    numbers = [int(n) for each in attributes for n in re.findall(r"= (-?\d+) :", each)]
    assert numbers
    assert max(numbers) < 2**31


def test_no_tokens_give_no_outputs_and_zero_weight_gradients(inputs):
    empty = inputs._replace(
        x=inputs.x[:0],
        expert_ids=inputs.expert_ids[:0],
        expert_weights=inputs.expert_weights[:0],
        dy=inputs.dy[:0],
    )
    got = harness.run_layer(empty, RANKS)
    assert got.y.shape == (0, HIDDEN)
    assert not np.any(got.d_w_gate)
    assert not np.any(got.d_w_down)
