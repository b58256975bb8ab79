"""The layer with products in MXFP8: its definition, its bits, weights stored and prepared."""

import dataclasses
import functools
import re
from collections.abc import Callable

import harness
import jax
import jax.numpy as jnp
import mx_oracle
import numpy as np
import oracle
import pytest
import routings
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Inputs, Outputs

import jax_mok
from jax_mok.precision import PreparedWeight, Weights
from jax_mok.quantize import MXArray, quantize

EXPERTS, TOKENS, CHOICES, HIDDEN, INNER = 8, 192, 3, 96, 64
MXFP8 = jax_mok.MoEConfig(precision="mxfp8")
WEIGHTS = ("w_gate", "w_up", "w_down")


def draw(rng: np.random.Generator, dtype: str, **sizes: int) -> Inputs:
    routes = routings.zipf(rng, 1, TOKENS, CHOICES, EXPERTS)
    routes[rng.random(routes.shape) < 0.1] = -1
    sizes = {"hidden": HIDDEN, "inner": INNER} | sizes
    return harness.draw_inputs(rng, routes, experts=EXPERTS, dtype=jnp.dtype(dtype), **sizes)


@functools.cache
def batch(dtype: str = "float32") -> Inputs:
    return draw(np.random.default_rng(31), dtype)


@functools.cache
def on_one_rank(dtype: str = "float32") -> Outputs:
    return harness.run_layer(batch(dtype), 1, MXFP8)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    return np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected)


def cosine(actual: np.ndarray, expected: np.ndarray) -> float:
    actual = actual.astype(np.float64)
    return np.sum(actual * expected) / np.linalg.norm(actual) / np.linalg.norm(expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 6e-4), ("bfloat16", 6e-3)])
def test_every_result_is_that_of_the_definition(dtype, tolerance):
    want = mx_oracle.layer(batch(dtype))
    oracle.assert_close(on_one_rank(dtype), want, tolerance)


def test_every_result_is_that_of_the_definition_with_a_clamp():
    inputs = draw(np.random.default_rng(32), "float32")
    got = harness.run_layer(inputs, 2, dataclasses.replace(MXFP8, clamp=0.7, saved_rows=128))
    oracle.assert_close(got, mx_oracle.layer(inputs, clamp=0.7), 6e-4)


def test_rounding_costs_what_three_bits_of_mantissa_cost():
    """Each operand's error is 2.6 %; of independent errors the squares add up."""
    inputs = draw(np.random.default_rng(33), "bfloat16", hidden=256, inner=128)
    got, exact = harness.run_layer(inputs, 4, MXFP8), oracle.layer(inputs)
    matrices = {name: mx_oracle.rounded(getattr(inputs, name), -2) for name in WEIGHTS}
    of_rounded = oracle.layer(inputs._replace(x=mx_oracle.rounded(inputs.x, -1), **matrices))
    assert error(got.y, exact.y) < 7e-2
    for name in Outputs._fields:
        assert cosine(getattr(got, name), getattr(exact, name)) > 0.997, name
        assert cosine(getattr(got, name), getattr(of_rounded, name)) > 0.999, name


def test_tokens_of_many_magnitudes_are_as_good():
    inputs = batch()
    x = inputs.x * 2.0 ** (np.arange(TOKENS) // oracle.ERROR_BLOCK * -20)[:, None]
    inputs = inputs._replace(x=x.astype(np.float32))
    oracle.assert_close(harness.run_layer(inputs, 1, MXFP8), mx_oracle.layer(inputs), 6e-4)


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, "float32"), (4, "float32"), (8, "float32"), (8, "bfloat16")]
)
def test_results_are_bit_equal_for_any_number_of_ranks(ranks, dtype):
    harness.assert_same_bits(harness.run_layer(batch(dtype), ranks, MXFP8), on_one_rank(dtype))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"ring_rows": 64, "saved_rows": 0}),
        (4, {"ring_rows": 256, "chunk_rows": 64, "saved_rows": 128}),
        (2, {"ring_rows": 128, "dispatch": "push", "reverse_combine": "push"}),
        (2, {"composition": "collective", "ring_rows": 128}),
    ],
)
def test_results_are_bit_equal_for_any_ring_chunk_saved_rows_and_move(ranks, options):
    config = dataclasses.replace(MXFP8, **options)
    harness.assert_same_bits(harness.run_layer(batch(), ranks, config), on_one_rank())


@functools.cache
def stored(dtype: str = "float32", keep_master: bool = False) -> Inputs:
    """A batch with weights, float32 ones, as MXArrays."""
    arrays = {
        name: quantize(getattr(batch(), name), -2, keep_master=keep_master) for name in WEIGHTS
    }
    return batch(dtype)._replace(**arrays)


def layer(x, expert_weights, weights, *, ids, config=MXFP8, ranks=4) -> jax.Array:
    mesh = harness.mesh_of(ranks)
    return jax_mok.moe(
        x, ids, expert_weights, *weights, mesh=mesh, axis_name=harness.AXIS, config=config
    )


def weights_of(inputs: Inputs) -> Weights:
    return Weights(inputs.w_gate, inputs.w_up, inputs.w_down)


def gradients(inputs: Inputs, of_weights: Callable = lambda weights: weights) -> Outputs:
    """All results of the layer, whose weights are made of those of the inputs."""

    @jax.jit
    def step(inputs: Inputs) -> Outputs:
        def run(x, expert_weights, weights):
            return layer(x, expert_weights, of_weights(weights), ids=inputs.expert_ids)

        y, pullback = jax.vjp(run, inputs.x, inputs.expert_weights, weights_of(inputs))
        dx, d_expert_weights, d_weights = pullback(jnp.asarray(inputs.dy))
        return Outputs(y, dx, d_expert_weights, *d_weights)

    return Outputs(*map(np.asarray, step(inputs)))


@functools.cache
def with_masters() -> Inputs:
    """bfloat16 tokens and float32 weights."""
    half, whole = batch("bfloat16"), batch("float32")
    return half._replace(**{name: getattr(whole, name) for name in WEIGHTS})


@functools.cache
def of_masters() -> Outputs:
    return gradients(with_masters())


def test_masters_get_gradients_that_are_not_rounded():
    got = of_masters()
    assert (got.dx.dtype, got.d_w_gate.dtype) == (jnp.bfloat16, np.float32)
    assert np.any(got.d_w_gate != got.d_w_gate.astype(jnp.bfloat16).astype(np.float32))
    oracle.assert_close(got, mx_oracle.layer(with_masters()), 6e-3)


def test_quantised_outside_the_layer_has_the_same_bits_and_gradients_for_the_master():
    def in_mx(weights):
        return [quantize(weight, -2, keep_master=True) for weight in weights]

    harness.assert_same_bits(gradients(with_masters(), in_mx), of_masters())


@pytest.mark.parametrize(
    "dtypes", [("float16",) * 3, ("float16", "bfloat16", "bfloat16"), ("float8_e5m2",) * 3]
)
@pytest.mark.parametrize("prepare", [False, True])
def test_masters_of_any_float_dtype_have_the_bits_of_float32_copies(dtypes, prepare):
    def in_mx(weights):
        arrays = [quantize(weight, -2, keep_master=True) for weight in weights]
        return jax_mok.prepare_weights(*arrays, backward=True) if prepare else arrays

    weights = weights_of(with_masters())
    narrow = {n: w.astype(d) for n, w, d in zip(WEIGHTS, weights, dtypes, strict=True)}
    copies = {name: weight.astype(np.float32) for name, weight in narrow.items()}
    got = gradients(with_masters()._replace(**narrow), in_mx)
    want = gradients(with_masters()._replace(**copies), in_mx)
    cast = {f"d_{n}": getattr(want, f"d_{n}").astype(w.dtype) for n, w in narrow.items()}
    harness.assert_same_bits(got, want._replace(**cast))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_largest_float16_is_prepared(dtype):
    """65504 rounds to 65536, which float16 does not have."""
    shapes = (1, 32, 32), (1, 32, 32), (1, 32, 32)
    weights = [quantize(jnp.full(s, 65504, jnp.float16), -2, keep_master=True) for s in shapes]
    for weight in jax_mok.prepare_weights(*weights, dtype=dtype, backward=True):
        np.testing.assert_array_equal(weight.forward, 65536)
        np.testing.assert_array_equal(weight.backward, 65536)


def test_stored_weights_are_half_of_bfloat16_and_are_rounded_again_from_their_values():
    inputs = stored("bfloat16")
    assert all(w.nbytes <= 0.52 * 2 * w.elements.size for w in weights_of(inputs))

    def values_and_gradients(inputs):
        def run(x, expert_weights):
            return layer(x, expert_weights, weights_of(inputs), ids=inputs.expert_ids)

        y, pullback = jax.vjp(run, inputs.x, inputs.expert_weights)
        return y, *pullback(jnp.asarray(inputs.dy))

    y, *others = map(np.asarray, jax.jit(values_and_gradients)(inputs))
    assert y.tobytes() == of_masters().y.tobytes()
    values = {name: mx_oracle.rounded(getattr(with_masters(), name), -2) for name in WEIGHTS}
    want = mx_oracle.layer(with_masters()._replace(**values))
    for got, name in zip(others, ("dx", "d_expert_weights"), strict=True):
        assert error(got, getattr(want, name)) < 6e-3, name


@pytest.mark.parametrize("keep_master", [False, True])
def test_prepared_weights_have_the_bits_of_those_they_are_made_of(keep_master):
    inputs = stored("bfloat16", keep_master)
    prepared = jax_mok.prepare_weights(*weights_of(inputs))
    run = jax.jit(functools.partial(layer, ids=inputs.expert_ids))
    y = run(inputs.x, inputs.expert_weights, prepared)
    assert np.asarray(y).tobytes() == of_masters().y.tobytes()


def test_prepared_weights_take_gradients_to_the_masters():
    prepare = functools.partial(jax_mok.prepare_weights, backward=True)
    harness.assert_same_bits(gradients(with_masters(), lambda w: prepare(*w)), of_masters())


@pytest.mark.parametrize("store", [lambda w: w, lambda w: quantize(w, -2, keep_master=True)])
def test_weights_prepared_inside_shard_map_have_the_same_bits_and_gradients(store):
    inputs = with_masters()
    operands = (inputs.x, inputs.expert_ids, inputs.expert_weights, *weights_of(inputs))

    def body(x, ids, expert_weights, *weights):
        stored = [store(weight) for weight in weights]
        prepared = jax_mok.prepare_weights(*stored, backward=True)
        operands = (x, ids, expert_weights, *prepared)
        return jax_mok.moe_ffn(*operands, axis_name="ep", config=MXFP8)

    mapped = jax.shard_map(body, mesh=harness.mesh_of(4), in_specs=P("ep"), out_specs=P("ep"))

    @jax.jit
    def step(x, ids, expert_weights, *weights):
        y, pullback = jax.vjp(lambda *ws: mapped(x, ids, expert_weights, *ws), *weights)
        return y, *pullback(jnp.asarray(inputs.dy))

    results = step(*operands)
    want = of_masters()
    for got, expected in zip(results, (want.y, *want[3:]), strict=True):
        assert np.asarray(got).tobytes() == expected.tobytes()


def test_weights_prepared_for_the_forward_pass_inside_shard_map_have_the_same_bits():
    prepare = jax.shard_map(
        lambda *weights: jax_mok.prepare_weights(*weights),
        mesh=harness.mesh_of(4),
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    for weights in (weights_of(with_masters()), weights_of(stored())):
        got = jax.tree.leaves(jax.jit(prepare)(*weights))
        want = jax.tree.leaves(jax_mok.prepare_weights(*weights))
        assert [a.tobytes() for a in map(np.asarray, got)] == [
            a.tobytes() for a in map(np.asarray, want)
        ]
    with pytest.raises(jax_mok.MoEInputError, match=r"has H=48 and I=64; .* multiples of 32"):
        prepare(*[jnp.zeros((EXPERTS, *sizes)) for sizes in ((48, 64), (48, 64), (64, 48))])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("store", [lambda w: w, lambda w: quantize(w, -2, keep_master=True)])
def test_no_experts_are_prepared_inside_shard_map(store, backward):
    prepare = jax.shard_map(
        lambda *weights: jax_mok.prepare_weights(*map(store, weights), backward=backward),
        mesh=harness.mesh_of(4),
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    shapes = (0, HIDDEN, INNER), (0, HIDDEN, INNER), (0, INNER, HIDDEN)
    prepared = jax.jit(prepare)(*map(jnp.zeros, shapes))
    for weight, shape in zip(prepared, shapes, strict=True):
        assert (weight.shape, weight.forward.dtype) == (shape, jnp.bfloat16)
        assert (weight.backward is not None) == backward


@pytest.mark.parametrize("spec", [P("ep"), P(None, "ep"), P(None, None, "ep")])
def test_explicitly_sharded_weights_are_prepared(spec):
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Explicit,))
    rng = np.random.default_rng(34)
    shapes = (4, 128, 256), (4, 128, 256), (4, 256, 128)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    with jax.set_mesh(mesh):
        placed = jax.device_put(weights, NamedSharding(mesh, spec))
        got = jax_mok.prepare_weights(
            *[quantize(w, -2, keep_master=True) for w in placed[:1]], *placed[1:], backward=True
        )
    want = jax_mok.prepare_weights(*weights, backward=True)
    assert [a.tobytes() for a in map(np.asarray, jax.tree.leaves(got))] == [
        a.tobytes() for a in map(np.asarray, jax.tree.leaves(want))
    ]


def test_weights_are_prepared_once_for_an_accumulated_gradient():
    inputs, parts = batch("float32"), 4

    def split(array):
        return jnp.asarray(array).reshape(parts, -1, array.shape[-1])

    micro_batches = tuple(map(split, (inputs.x, inputs.expert_weights, inputs.expert_ids)))
    directions = split(inputs.dy)

    def total(weights):
        prepared = jax_mok.prepare_weights(*weights, dtype=jnp.float32, backward=True)

        def add(sum_, part):
            (x, router_weights, ids), dy = part
            return sum_ + jnp.sum(layer(x, router_weights, prepared, ids=ids, ranks=2) * dy), None

        return jax.lax.scan(add, jnp.float32(0), (micro_batches, directions))[0]

    program = jax.jit(jax.grad(total))
    for got, name in zip(program(weights_of(inputs)), WEIGHTS, strict=True):
        want = getattr(on_one_rank(), f"d_{name}")
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    # Beside rows, which are encoded in every part, nothing is converted there.
    text = program.lower(weights_of(inputs)).as_text()
    wide = re.findall(rf"jax_mok_(?:quantize|round)\(.*tensor<1x{HIDDEN}x{INNER}x", text)
    assert not wide


def test_layers_of_stored_weights_are_scanned_and_recomputed():
    inputs = batch()
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[weights_of(stored())] * 2)

    def loss(x, recompute):
        def block(x, weights):
            assert isinstance(weights.gate, MXArray)
            return x + layer(x, inputs.expert_weights, weights, ids=inputs.expert_ids), None

        body = jax.checkpoint(block, policy=jax_mok.remat_policy) if recompute else block
        return jnp.sum(jax.lax.scan(body, x, stack)[0] * inputs.dy)

    want, got = (jax.jit(jax.grad(functools.partial(loss, recompute=r)))(inputs.x) for r in (0, 1))
    np.testing.assert_array_equal(got, want)


def test_stored_weights_go_through_shard_map_by_one_spec():
    inputs = stored()

    def body(x, ids, expert_weights, gate, up, down):
        operands = (x, ids, expert_weights, gate, up, down)
        return jax_mok.moe_ffn(*operands, axis_name="ep", config=MXFP8)

    mapped = jax.shard_map(body, mesh=harness.mesh_of(4), in_specs=P("ep"), out_specs=P("ep"))
    y = jax.jit(mapped)(*inputs[:-1])
    assert np.asarray(y).tobytes() == on_one_rank().y.tobytes()


def test_groups_of_ranks_on_an_explicit_mesh_have_the_same_bits():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("dp", "ep"), axis_types=(AxisType.Explicit, AxisType.Auto))
    inputs = batch()

    def loss(weights, x):
        weights = [quantize(weight, -2, keep_master=True) for weight in weights]
        y = jax_mok.moe(
            x,
            inputs.expert_ids,
            inputs.expert_weights,
            *weights,
            mesh=mesh,
            axis_name="ep",
            config=MXFP8,
        )
        return jnp.sum(y * jnp.asarray(inputs.dy, out_sharding=jax.typeof(y).sharding)), y

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (d_weights, dx), y = step(list(weights_of(inputs)), inputs.x)
    want = on_one_rank()
    np.testing.assert_array_equal(y, want.y)
    np.testing.assert_array_equal(dx, want.dx)
    for got, name in zip(d_weights, WEIGHTS, strict=True):
        np.testing.assert_allclose(got, getattr(want, f"d_{name}"), rtol=1e-5, atol=1e-5)


def test_tokens_and_gradients_travel_in_half_the_bytes_of_bfloat16():
    step = harness.layer_step(harness.mesh_of(4), MXFP8)
    text = step.lower(batch("bfloat16")).as_text()
    moved = re.findall(r"custom_call @jax_mok_dispatch\(.*?: \(tensor<(\w+)>", text)
    packed = f"{TOKENS // 4}x{HIDDEN // 32 * 33}xui8"
    router_weights = f"{TOKENS // 4 * CHOICES}x1xf32"
    assert sorted(moved) == sorted([packed, packed, packed, router_weights])
    assert HIDDEN // 32 * 33 <= 0.52 * 2 * HIDDEN


def run(**changes) -> None:
    operands = batch()._asdict() | changes
    del operands["dy"]
    config = operands.pop("config", MXFP8)
    jax_mok.moe(**operands, mesh=harness.mesh_of(4), axis_name="ep", config=config)


def no_blocks(*shape: int) -> dict[str, np.ndarray]:
    hidden, inner = shape
    up, down = np.zeros((EXPERTS, hidden, inner), np.float32), np.zeros((EXPERTS, inner, hidden))
    x = np.zeros((TOKENS, hidden), np.float32)
    return {"x": x, "w_gate": up, "w_up": up, "w_down": down.astype(np.float32)}


def gate(**changes) -> dict[str, MXArray]:
    return {"w_gate": dataclasses.replace(quantize(batch().w_gate, -2), **changes)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda: no_blocks(48, 64), r"H=48 and I=64; .* blocks of 32 along both.*multiples of 32"),
        (lambda: no_blocks(64, 48), r"H=64 and I=48; .* pad x and the weights with zeros"),
        (
            lambda: {"w_gate": quantize(batch().w_gate, -1)},
            r"w_gate has blocks along axis -1; .* use quantize\(w_gate, axis=-2\)",
        ),
        (
            lambda: gate() | {"config": jax_mok.MoEConfig()},
            r"w_gate is in MXFP8, and precision='operands': use MoEConfig\(precision='mxfp8'\)",
        ),
        (
            lambda: gate(scales=quantize(batch().w_gate, -1).scales),
            r"w_gate.scales are float8_e8m0fnu\[8, 96, 2\]; .* float8_e8m0fnu\[8, 3, 64\]",
        ),
        (
            lambda: gate(elements=jnp.zeros((8, 96, 64), jnp.float8_e5m2)),
            r"w_gate.elements have dtype float8_e5m2; MXFP8 has float8_e4m3fn",
        ),
        (
            lambda: {"w_gate": jnp.zeros((8, 96, 64), jnp.float8_e5m2)},
            r"w_gate has dtype float8_e5m2; it must be float32",
        ),
        (
            lambda: {"w_up": quantize(np.zeros((8, 64, 64), np.float32), -2)},
            r"w_up has shape \[8, 64, 64\]; \[8, 96, 64\] fits",
        ),
        (
            lambda: {"w_up": quantize(np.zeros((96, 64), np.float32), -2)},
            r"w_up has shape \[96, 64\]; .*\[experts, H, I\]",
        ),
        (
            lambda: {"w_down": jax_mok.prepare_weights(*weights_of(batch())).down},
            r"w_down was prepared in bfloat16; it must be float32, since x is float32: use "
            r"prepare_weights\(..., dtype='float32'\)",
        ),
        (
            lambda: gate(master=np.zeros((8, 96, 64), np.int32)),
            "w_gate.master has dtype int32; .* give a float master, or None",
        ),
        (lambda: gate(axis=1), r"w_gate\.axis=1 must be an int from -3 to -1"),
        (lambda: gate(elements=[0.0]), r"w_gate\.elements must be an array, got list"),
    ],
)
def test_operands_that_do_not_fit_are_named(changes, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        run(**changes())


def raw(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_gate": [0.0]}, "w_gate must be an array, got list"),
        ({"w_down": None}, "w_down must be an array, got NoneType"),
        ({"w_up": raw(2, 64, 96, dtype=np.int32)}, "w_up has dtype int32; .*float32 or bfloat16"),
        ({"w_up": raw(2, 64, 96, dtype=np.float16)}, "w_up has dtype float16; .*convert it with"),
        ({"w_gate": raw(64, 96)}, r"w_gate has shape \[64, 96\]; .*\[experts, H, I\]"),
        ({"w_down": raw(1, 2, 96, 64)}, r"w_down has shape \[1, 2, .*\[experts, I, H\]"),
        ({"w_up": raw(2, 64, 64)}, r"w_up has shape \[2, 64, 64\]; \[2, 64, 96\] fits \(the shape"),
        ({"w_down": raw(2, 64, 96)}, r"w_down has shape .*; \[2, 96, 64\] fits \(w_gate's with"),
        ({"w_down": raw(4, 96, 64)}, r"w_down has shape \[4, 96, 64\]; \[2, 96, 64\] fits"),
        (
            {"w_gate": raw(2, 40, 96), "w_up": raw(2, 40, 96), "w_down": raw(2, 96, 40)},
            "w_gate has H=40 and I=96; .* use multiples of 32, or pad x and the weights",
        ),
        (
            {"w_gate": raw(2, 64, 40), "w_up": raw(2, 64, 40), "w_down": raw(2, 40, 64)},
            "w_gate has H=64 and I=40; .* use multiples of 32, or pad x and the weights",
        ),
        ({"w_up": quantize(raw(2, 64, 96), -1)}, r"w_up has blocks along axis -1; .*axis=-2\)"),
        ({"w_up": quantize(raw(64, 96), -2)}, r"w_up has shape \[64, 96\]; .*\[experts, H, I\]"),
        (
            {"w_up": dataclasses.replace(quantize(raw(2, 64, 96), -2), axis=1)},
            r"w_up\.axis=1 must be an int from -3 to -1",
        ),
        (
            {"w_gate": PreparedWeight(raw(2, 64, 96), None, None)},
            "w_gate was prepared already: give the layer what prepare_weights returned, or",
        ),
        ({"dtype": "float16"}, "dtype=float16 must be float32 or bfloat16, that of the layer's x"),
        ({"dtype": np.int8}, "dtype=int8 must be float32 or bfloat16.*use dtype=x.dtype"),
        ({"dtype": None}, "dtype=None must be float32 or bfloat16"),
        ({"dtype": "bf16"}, "dtype='bf16' must be float32 or bfloat16"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_weights_that_cannot_be_prepared_are_named(changes, message, backward):
    weights = {"w_gate": raw(2, 64, 96), "w_up": raw(2, 64, 96), "w_down": raw(2, 96, 64)}
    with pytest.raises(jax_mok.MoEInputError, match=message):
        jax_mok.prepare_weights(**weights | changes, backward=backward)


@pytest.mark.parametrize("precision", ["bf16", None, 8])
def test_precisions_there_are(precision):
    with pytest.raises(jax_mok.MoEInputError, match=r"precision=.* one of operands, mxfp8"):
        jax_mok.MoEConfig(precision=precision)


def test_weights_without_a_master_say_where_gradients_can_go():
    inputs = batch()

    @jax.jit
    def loss(weights, x=inputs.x):
        return jnp.sum(layer(x, inputs.expert_weights, weights, ids=inputs.expert_ids))

    with pytest.raises(jax_mok.MoEError, match=r"elements of an MXArray.*keep_master=True"):
        jax.grad(loss)(weights_of(stored()))
    prepare = functools.partial(jax_mok.prepare_weights, *weights_of(inputs), dtype=jnp.float32)
    with pytest.raises(jax_mok.MoEError, match="prepared weights have no gradient"):
        jax.grad(loss)(prepare(backward=True))
    with pytest.raises(jax_mok.MoEInputError, match=r"w_gate was prepared for the forward pass"):
        jax.grad(lambda x: loss(prepare(), x))(inputs.x)
