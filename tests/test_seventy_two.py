"""Seventy-two ranks, the GPUs of one NVLink domain: results, sizes and programs."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_same_bits, draw_inputs, run_layer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Inputs, Outputs
from routings import ROUTINGS

import jax_mok
from jax_mok import ffi
from jax_mok.layout import make_layout

RANKS, EXPERTS = 72, 72
MESHES = [dict(ep=72), dict(dp=2, ep=36), dict(dp=9, ep=8), dict(ep=3, rest=24)]
RATE = 0.5

with_gpu_kernels = pytest.mark.skipif(ffi.cuda is None, reason="built without GPU kernels")


@functools.cache
def batch() -> Inputs:
    rng = np.random.default_rng(7)
    routes = ROUTINGS["zipf"](rng, RANKS, 2, 3, EXPERTS)
    return draw_inputs(rng, routes, hidden=16, inner=8, experts=EXPERTS)


def train(axes: dict[str, int]) -> tuple[Outputs, tuple[np.ndarray, ...]]:
    """Result and gradients of a step on a mesh of these axes, and the weights after it."""
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    mesh = Mesh(devices.reshape(*axes.values()), tuple(axes))
    tokens, experts = (NamedSharding(mesh, P(names)) for names in (tuple(axes), "ep"))
    x, ids, weights, *layers, target = batch()

    @jax.jit
    def step(x, ids, weights, target, *layers):
        def layer(x, weights, *layers):
            return jax_mok.moe(x, ids, weights, *layers, mesh=mesh, axis_name="ep")

        y, pullback = jax.vjp(layer, x, weights, *layers)
        gradients = pullback(y - target)
        after = [w - RATE * d for w, d in zip(layers, gradients[2:], strict=True)]
        return Outputs(y, *gradients), after

    outputs, after = step(
        *jax.device_put((x, ids, weights, target), tokens), *jax.device_put(layers, experts)
    )
    return Outputs(*map(np.asarray, outputs)), tuple(map(np.asarray, after))


@functools.cache
def train_alone() -> tuple[Outputs, tuple[np.ndarray, ...]]:
    return train(dict(ep=1))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_training_step_is_bit_equal_to_that_of_one_rank(axes):
    expected, expected_after = train_alone()
    got, after = train(axes)
    if axes == dict(ep=RANKS):
        assert_same_bits(got, expected)
        for mine, others in zip(after, expected_after, strict=True):
            assert mine.tobytes() == others.tobytes()
        return
    # Each group of ranks sums its own tokens; the sum over groups is XLA's.
    for name in ("y", "dx", "d_expert_weights"):
        assert getattr(got, name).tobytes() == getattr(expected, name).tobytes(), name
    for mine, others in zip((*got[3:], *after), (*expected[3:], *expected_after), strict=True):
        np.testing.assert_allclose(mine, others, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        jax_mok.MoEConfig(ring_rows=64, chunk_rows=64, saved_rows=64),
        jax_mok.MoEConfig(
            dispatch="push", combine="pull", reverse_combine="push", reverse_dispatch="pull"
        ),
        jax_mok.MoEConfig(composition="collective"),
    ],
    ids=["smallest ring", "directions turned round", "collective"],
)
def test_results_of_seventy_two_ranks_are_bit_equal_with_any_config(config):
    assert_same_bits(run_layer(batch(), RANKS, config), run_layer(batch(), 1))


LARGEST = dict(ranks=RANKS, tokens=131_072, top_k=8, experts=576)
WIDTHS = dict(hidden=7168, inner=2048)


def test_sizes_of_the_largest_calls_are_numbered_in_32_bits():
    """Row, tile, choice and item numbers are int32 in the kernels' tables."""
    layout = make_layout(jax_mok.MoEConfig(), **LARGEST)
    rows = RANKS * 131_072 * 8
    assert rows < layout.max_rows <= rows + 8 * 64 < 2**31
    for backward in (False, True):
        memory = jax_mok.memory(**LARGEST, **WIDTHS, backward=backward)
        assert memory.sizes["M"] == layout.max_rows
        assert memory.sizes["W"] < 2**31
        assert memory.total_bytes > 2**32  # in Python's integers, and int64_t in the kernels


def lowered(ranks: int, derive: bool) -> str:
    """The text of the GPU program of so many devices, of which none need exist."""
    mesh = AbstractMesh((ranks,), ("ep",), axis_types=(AxisType.Auto,))
    tokens, hidden, inner = 64 * ranks, 128, 64
    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
    weights = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    up = jax.ShapeDtypeStruct((2 * ranks, hidden, inner), jnp.bfloat16)
    down = jax.ShapeDtypeStruct((2 * ranks, inner, hidden), jnp.bfloat16)
    layer = functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep")

    def loss(x, ids, *rest):
        return layer(x, ids, *rest).astype(jnp.float32).sum()

    step = jax.grad(loss, argnums=(0, 2, 3, 4, 5)) if derive else layer
    traced = jax.jit(lambda *operands: step(*operands)).trace(x, ids, weights, up, up, down)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@with_gpu_kernels
@pytest.mark.parametrize("derive", [False, True])
def test_a_gpu_program_has_one_call_per_pass_and_one_size_for_any_number_of_ranks(
    derive, monkeypatch
):
    if ffi.cuda_peers is None:  # JAX is too old to run the program, not to lower it
        monkeypatch.setattr(ffi, "cuda_peers", ffi.cuda)
    few, many = lowered(2, derive), lowered(RANKS, derive)
    passes = ["jax_mok_forward_peers", "jax_mok_backward_peers"]
    expected = passes if derive else passes[:1]
    for program in (few, many):
        assert re.findall(r"custom_call @(jax_mok_\w+)", program) == expected
    assert few.count("\n") == many.count("\n")


def sizes_on_cpu(ranks: int) -> tuple[int, int]:
    """Equations of the traced program of gradients, and lines of the lowered one."""
    mesh = AbstractMesh((ranks,), ("ep",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((2 * ranks, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((2 * ranks, 3), jnp.int32)
    weights = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    up = jax.ShapeDtypeStruct((ranks, 16, 8), jnp.float32)
    down = jax.ShapeDtypeStruct((ranks, 8, 16), jnp.float32)
    layer = functools.partial(jax_mok.moe, mesh=mesh, axis_name="ep")
    loss = lambda *ops: layer(*ops).sum()  # noqa: E731
    traced = jax.jit(jax.grad(lambda *ops: loss(*ops))).trace(x, ids, weights, up, up, down)
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    return len(traced.jaxpr.jaxpr.eqns), text.count("\n")


def test_a_cpu_program_has_one_size_for_any_number_of_ranks():
    assert sizes_on_cpu(2) == sizes_on_cpu(RANKS)
