"""Random shapes, meshes, configs, routes and values: the oracle's answer, or an error when traced.

Programs come from a small pool, because compiling one takes much longer than running it; what they
run on is hypothesis's choice, the same in every run.
"""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_plan
from harness import AXIS, draw_inputs, expect_recorded_faults, run_layer_on
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from oracle import Inputs, Outputs
from routings import ROUTINGS

import jax_mok
from jax_mok.layout import make_layout

fuzz = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    database=None,
    # The fixture changes how new memory looks, and nothing between examples.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
seeds = st.integers(0, 2**32 - 1)

# Of operands and results of about unit size, or else of the largest result.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
# A rank that did not come would fail the test long before pytest's patience ends.
TIMEOUT_S = 30.0
DIRECTIONS = ("dispatch", "combine", "reverse_combine", "reverse_dispatch")


@dataclasses.dataclass(frozen=True)
class Program:
    """All that is static of a step of the layer."""

    groups: int  # positions along the other mesh axis; 1 for a mesh of one axis
    ranks: int
    tokens: int  # of each device
    choices: int
    experts: int
    hidden: int
    inner: int
    dtype: str
    weight_dtype: str
    config: jax_mok.MoEConfig

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.groups, self.ranks)


@functools.cache
def mesh_of(groups: int, ranks: int) -> Mesh:
    devices = np.array(jax.devices()[: groups * ranks])
    if groups == 1:
        return Mesh(devices, (AXIS,))
    return Mesh(devices.reshape(groups, ranks), ("dp", AXIS))


def draw_program(number: int) -> Program:
    """Programs of consecutive numbers have every composition, dtype and kind of mesh."""
    rng = random.Random(number)
    ring_rows = rng.choice((None, 64, 64, 128, 192))
    groups = (1, 2)[number % 2]
    ranks = rng.choice((1, 2, 3, 5)) if groups == 1 else rng.choice((1, 2, 3))
    dtype, weight_dtype = (
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("bfloat16", "float32"),
    )[number // 2 % 4]
    return Program(
        groups=groups,
        ranks=ranks,
        tokens=rng.choice((1, 7, 30, 64)),
        choices=rng.choice((1, 2, 3, 6)),
        experts=ranks * rng.choice((1, 2, 3)),
        hidden=rng.choice((1, 5, 16, 40)),
        inner=rng.choice((1, 4, 24, 33)),
        dtype=dtype,
        weight_dtype=weight_dtype,
        config=jax_mok.MoEConfig(
            ring_rows=ring_rows,
            chunk_rows=None if ring_rows is None else rng.choice((None, 64, ring_rows)),
            saved_rows=rng.choice((None, 0, 64)),
            composition=("composed", "auto", "collective")[number % 3],
            clamp=rng.choice((None, None, 0.6)),
            timeout_s=TIMEOUT_S,
            **{name: rng.choice(("pull", "push")) for name in DIRECTIONS},
        ),
    )


PROGRAMS = [draw_program(number) for number in range(18)]


def draw_finite_inputs(program: Program, routing: str, seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    routes = ROUTINGS[routing](
        rng, program.ranks, program.groups * program.tokens, program.choices, program.experts
    )
    inputs = draw_inputs(
        rng,
        routes,
        hidden=program.hidden,
        inner=program.inner,
        experts=program.experts,
        dtype=jnp.dtype(program.dtype),
    )
    weights = ("w_gate", "w_up", "w_down")
    return inputs._replace(**{w: getattr(inputs, w).astype(program.weight_dtype) for w in weights})


def run(program: Program, inputs: Inputs) -> Outputs:
    outputs = run_layer_on(program.mesh, inputs, program.config)
    expect_recorded_faults(inputs.expert_ids, program.experts)
    return outputs


def assert_close(
    program: Program, actual: Outputs, expected: Outputs, touched: Outputs | None = None
) -> None:
    """Compares all rows, less those touched by a value that is not finite."""
    for name, want in expected._asdict().items():
        got = getattr(actual, name)
        assert got.shape == want.shape, name
        rows = np.ones(len(want), bool) if touched is None else ~getattr(touched, name)
        got, want = got[rows].astype(np.float64), want[rows]
        assert not np.any(got[want == 0]), f"{name} is not zero where nothing was added"
        allowed = TOLERANCE[program.dtype] * max(1.0, np.max(np.abs(want), initial=0.0))
        np.testing.assert_allclose(got, want, rtol=0.0, atol=allowed, err_msg=name)


@pytest.mark.usefixtures("poisoned_memory")
@fuzz(max_examples=150)
@given(st.sampled_from(PROGRAMS), st.sampled_from(sorted(ROUTINGS)), seeds)
def test_any_program_gives_the_oracles_answer(program: Program, routing: str, seed: int) -> None:
    inputs = draw_finite_inputs(program, routing, seed)
    assert_close(program, run(program, inputs), oracle.layer(inputs, program.config.clamp))


def touched_by(inputs: Inputs, operand: str, place: tuple[int, ...]) -> Outputs:
    """Which rows of each result, bool, one element of an operand may change.

    A masked choice reads nothing, and no expert is read for the sake of nobody.
    """
    ids, experts = inputs.expert_ids, len(inputs.w_gate)
    if operand.startswith("w_"):
        tokens = np.any(ids == place[0], axis=1)
        named = np.full(int(tokens.any()), place[0])
    else:
        named = np.atleast_1d(ids[place if operand == "expert_weights" else place[0]])
        named = named[(named >= 0) & (named < experts)]
        tokens = (np.arange(len(ids)) == place[0]) & (len(named) > 0)
    weights = np.isin(np.arange(experts), named)
    return Outputs(tokens & (operand != "dy"), tokens, tokens, weights, weights, weights)


OPERANDS = ("x", "expert_weights", "w_gate", "w_up", "w_down", "dy")


@pytest.mark.usefixtures("poisoned_memory")
@fuzz(max_examples=300)
@given(
    st.sampled_from(PROGRAMS),
    st.sampled_from(sorted(ROUTINGS)),
    seeds,
    st.sampled_from(OPERANDS),
    st.sampled_from((np.nan, np.inf, -np.inf)),
)
def test_values_that_are_not_finite_stay_where_they_belong(
    program: Program, routing: str, seed: int, operand: str, value: float
) -> None:
    clean = draw_finite_inputs(program, routing, seed)
    array = getattr(clean, operand).copy()
    place = tuple(map(int, np.random.default_rng(seed).integers(array.shape)))
    array[place] = value
    actual = run(program, clean._replace(**{operand: array}))
    touched = touched_by(clean, operand, place)
    assert_close(program, actual, oracle.layer(clean, program.config.clamp), touched)
    if np.isnan(value):
        assert np.isnan(actual.y[touched.y].astype(np.float32)).any(axis=1).all()


IDS = st.integers(-1, 11) | st.sampled_from((-(2**31), -2, 12, 2**31 - 1))


@fuzz(max_examples=300)
@given(st.data())
def test_any_routes_give_the_plan_of_the_definition(data: st.DataObject) -> None:
    """Of all ranks, from ids one by one; `test_plan.py` has larger loads, as routers make them."""
    ranks = data.draw(st.sampled_from((1, 2, 3, 4, 6, 12)), "ranks")
    tokens, choices = data.draw(st.integers(0, 5), "tokens"), data.draw(st.integers(1, 4), "K")
    tile_rows = data.draw(st.sampled_from((1, 2, 4, 64)), "tile rows")
    chunk_rows = tile_rows * data.draw(st.integers(1, 4), "tiles of a chunk")
    slots = ranks * tokens * choices
    ids = data.draw(st.lists(IDS, min_size=slots, max_size=slots), "ids")
    routes = np.array(ids, np.int32).reshape(ranks, tokens, choices)
    sizes = (12, tile_rows, chunk_rows)
    for rank, plan in enumerate(test_plan.all_plans(routes, *sizes)):
        test_plan.assert_same_plan(plan, oracle.plan(routes, rank, *sizes))


DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint32", "bool")
Operands = dict[str, jax.ShapeDtypeStruct]


@st.composite
def operands_that_may_fit(draw: st.DrawFn) -> Operands:
    """Those of a small layer, of which some were given other sizes or dtypes."""
    dtype = draw(st.sampled_from(("float32", "bfloat16")))
    tokens, choices, experts, hidden, inner = 12, 2, 6, 8, 4
    shapes = {
        "x": (tokens, hidden),
        "expert_ids": (tokens, choices),
        "expert_weights": (tokens, choices),
        "w_gate": (experts, hidden, inner),
        "w_up": (experts, hidden, inner),
        "w_down": (experts, inner, hidden),
    }
    dtypes = dict.fromkeys(shapes, dtype) | {"expert_ids": "int32", "expert_weights": "float32"}
    # A size that changes wherever it stands fits again, or is one that the mesh cannot divide.
    old, new = (
        draw(st.sampled_from((tokens, choices, experts, hidden, inner))),
        draw(st.integers(0, 13)),
    )
    shapes = {name: tuple(new if n == old else n for n in shape) for name, shape in shapes.items()}
    for name in draw(st.lists(st.sampled_from(sorted(shapes)), max_size=2)):
        sizes = list(shapes[name])
        match draw(st.sampled_from(("dtype", "size", "more", "less"))):
            case "dtype":
                dtypes[name] = draw(st.sampled_from(DTYPES))
            case "size" if sizes:
                sizes[draw(st.integers(0, len(sizes) - 1))] = draw(st.integers(0, 13))
            case "more":
                sizes.insert(draw(st.integers(0, len(sizes))), draw(st.integers(0, 2)))
            case _:
                sizes = sizes[:-1]
        shapes[name] = tuple(sizes)
    return {name: jax.ShapeDtypeStruct(shapes[name], dtypes[name]) for name in shapes}


def fits(operands: Operands, groups: int, ranks: int) -> bool:
    """What README.md says of sizes and dtypes."""
    x, ids, expert_weights, *weights = operands.values()
    if [len(operand.shape) for operand in operands.values()] != [2, 2, 2, 3, 3, 3]:
        return False
    (tokens, hidden), (experts, _, inner) = x.shape, weights[0].shape
    up = (experts, hidden, inner)
    return (
        x.dtype in (jnp.float32, jnp.bfloat16)
        and ids.dtype == jnp.int32
        and expert_weights.dtype == jnp.float32
        and all(w.dtype in (x.dtype, jnp.float32) for w in weights)
        and ids.shape == expert_weights.shape
        and ids.shape[0] == tokens
        and [w.shape for w in weights] == [up, up, (experts, inner, hidden)]
        and min(ids.shape[1], *up) > 0
        and tokens % (groups * ranks) == 0
        and experts % ranks == 0
    )


@fuzz(max_examples=150)
@given(operands_that_may_fit(), st.sampled_from(((1, 1), (1, 3), (2, 2))))
def test_operands_that_do_not_fit_raise_when_traced(
    operands: Operands, sizes: tuple[int, int]
) -> None:
    def layer(floats: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
        return jax_mok.moe(**floats, expert_ids=ids, mesh=mesh_of(*sizes), axis_name=AXIS)

    def step(
        floats: dict[str, jax.Array], ids: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        y, pullback = jax.vjp(lambda floats: layer(floats, ids), floats)
        return y, pullback(y)[0]

    floats = dict(operands)
    ids = floats.pop("expert_ids")
    if not fits(operands, *sizes):
        with pytest.raises(jax_mok.MoEError):
            jax.eval_shape(layer, floats, ids)
    else:
        y, gradients = jax.eval_shape(step, floats, ids)
        assert (y.shape, y.dtype) == (floats["x"].shape, floats["x"].dtype)
        types = {name: (a.shape, a.dtype) for name, a in floats.items()}
        assert {name: (a.shape, a.dtype) for name, a in gradients.items()} == types


MOST_ROWS = 2**31 - 64
ROWS = (None, 64, 128, 192, 4096, 2**30 + 64, MOST_ROWS - 64, MOST_ROWS, np.int64(64))
NOT_ROWS = (-64, -1, 1, 63, 65, 2**31, 2**40, 64.0, "64", True, [64], np.nan)
SIDES, NOT_SIDES = ("pull", "push"), ("", "Push", None, 0, ("pull",))
COMPOSITIONS = ("auto", "fused", "composed", "collective")
# What each field takes, and what it does not.
FIELDS = {
    "ring_rows": (ROWS, (*NOT_ROWS, 0)),
    "chunk_rows": (ROWS, (*NOT_ROWS, 0)),
    "saved_rows": ((*ROWS, 0), NOT_ROWS),
    **dict.fromkeys(DIRECTIONS, (SIDES, NOT_SIDES)),
    "composition": (COMPOSITIONS, ("AUTO", None, 1)),
    "clamp": ((None, 1, 7.0, 1e-30, np.float32(0.5)), (0, -1.0, np.inf, np.nan, 1e39, "1", True)),
    "timeout_s": ((1, 0.01, 86400, np.float64(3)), (0, -1, 86401, np.nan, np.inf, None, "3", True)),
}


@fuzz(max_examples=300)
@given(st.data())
def test_configs_with_bad_fields_are_refused(data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=1), "bad fields")
    fields = data.draw(st.sets(st.sampled_from(sorted(FIELDS))), "fields") | bad
    values = {name: data.draw(st.sampled_from(FIELDS[name][name in bad]), name) for name in fields}
    ring_rows, chunk_rows = values.get("ring_rows"), values.get("chunk_rows")
    if bad or (ring_rows and chunk_rows and ring_rows % chunk_rows):
        with pytest.raises(jax_mok.MoEInputError):
            jax_mok.MoEConfig(**values)
    else:
        config = jax_mok.MoEConfig(**values)
        assert {name: getattr(config, name) for name in values} == values


@fuzz(max_examples=1000)
@given(
    st.sampled_from(ROWS),
    st.sampled_from(ROWS),
    st.sampled_from((*ROWS, 0)),
    st.sampled_from((1, 2, 3, 128)),
    st.sampled_from((0, 1, 100, 2**13, 2**28, 2**30, 2**31 - 200)),
    st.integers(1, 8),
    st.integers(1, 300),
)
def test_sizes_of_a_call_fit_each_other_and_their_numbers(
    ring_rows: int | None,
    chunk_rows: int | None,
    saved_rows: int | None,
    ranks: int,
    most_choices: int,
    top_k: int,
    local_experts: int,
) -> None:
    assume(not (ring_rows and chunk_rows and ring_rows % chunk_rows))
    config = jax_mok.MoEConfig(ring_rows=ring_rows, chunk_rows=chunk_rows, saved_rows=saved_rows)
    tokens = most_choices // (ranks * top_k)
    choices = ranks * tokens * top_k
    most_rows = (choices + min(local_experts, choices) * 63) // 64 * 64
    sizes = dict(ranks=ranks, tokens=tokens, top_k=top_k, experts=ranks * local_experts)
    if most_rows > MOST_ROWS:
        with pytest.raises(jax_mok.MoEInputError):
            make_layout(config, **sizes)
        return
    layout = make_layout(config, **sizes)
    assert layout.max_rows == most_rows
    assert 64 <= layout.chunk_rows <= layout.ring_rows <= MOST_ROWS
    assert layout.chunk_rows % 64 == layout.ring_rows % layout.chunk_rows == 0
    assert 0 <= layout.saved_rows <= most_rows
    assert layout.saved_rows % 64 == 0
