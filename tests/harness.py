"""Runs one step of the layer, forward and backward, on global arrays over the first n devices."""

import ctypes
import functools
import gc
import os
import pathlib
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from oracle import Inputs, Outputs

import jax_mok

AXIS = "ep"
DEFAULTS = jax_mok.MoEConfig()


@functools.cache
def mesh_of(ranks: int) -> Mesh:
    """A one-axis mesh over the first `ranks` devices."""
    devices = jax.devices()
    assert ranks <= len(devices), f"this test needs {ranks} devices, the process has {len(devices)}"
    return Mesh(np.array(devices[:ranks]), (AXIS,))


def draw_inputs(
    rng: np.random.Generator,
    routes: np.ndarray,
    *,
    hidden: int,
    inner: int,
    experts: int,
    dtype: DTypeLike = np.float32,
) -> Inputs:
    """Inputs for routes [ranks, T, K]: x, dy and the pre-activations have unit variance."""
    ids = routes.reshape(-1, routes.shape[-1])
    tokens, choices = ids.shape

    def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(fan_in)).astype(dtype)

    return Inputs(
        x=normal(tokens, hidden),
        expert_ids=ids,
        expert_weights=rng.uniform(0.1, 1.0, (tokens, choices)).astype(np.float32),
        w_gate=normal(experts, hidden, inner, fan_in=hidden),
        w_up=normal(experts, hidden, inner, fan_in=hidden),
        w_down=normal(experts, inner, hidden, fan_in=inner),
        dy=normal(tokens, hidden),
    )


@functools.cache
def layer_step(mesh: Mesh, config: jax_mok.MoEConfig) -> jax.stages.Wrapped:
    """The compiled step Inputs -> Outputs; shared, so that cases of one shape compile once."""

    def step(inputs: Inputs) -> Outputs:
        def layer(
            x: jax.Array,
            expert_weights: jax.Array,
            w_gate: jax.Array,
            w_up: jax.Array,
            w_down: jax.Array,
        ) -> jax.Array:
            return jax_mok.moe(
                x,
                inputs.expert_ids,
                expert_weights,
                w_gate,
                w_up,
                w_down,
                mesh=mesh,
                axis_name=AXIS,
                config=config,
            )

        y, gradients = jax.vjp(
            layer,
            inputs.x,
            inputs.expert_weights,
            inputs.w_gate,
            inputs.w_up,
            inputs.w_down,
        )
        return Outputs(y, *gradients(inputs.dy))

    return jax.jit(step)


def shard(inputs: Inputs, mesh: Mesh) -> Inputs:
    """The same arrays on the mesh, every one split along its first axis."""
    return jax.device_put(inputs, NamedSharding(mesh, PartitionSpec(AXIS)))


def run_layer(inputs: Inputs, ranks: int, config: jax_mok.MoEConfig = DEFAULTS) -> Outputs:
    """Forward and backward on `ranks` CPU devices, as NumPy arrays."""
    return run_layer_on(mesh_of(ranks), inputs, config)


def run_layer_on(mesh: Mesh, inputs: Inputs, config: jax_mok.MoEConfig) -> Outputs:
    """Forward and backward on the mesh, as NumPy arrays."""
    outputs = layer_step(mesh, config)(shard(inputs, mesh))
    return Outputs(*(np.asarray(a) for a in outputs))


def expect_recorded_faults(expert_ids: np.ndarray, experts: int) -> None:
    """Takes the record of finished calls: out-of-range ids exactly if these routes have some."""
    if np.any((expert_ids < -1) | (expert_ids >= experts)):
        with pytest.raises(jax_mok.MoEInputError, match="outside"):
            jax_mok.check()
    else:
        jax_mok.check()


def assert_same_bits(actual: Outputs, expected: Outputs) -> None:
    """Compares bytes: -0 is not 0, and a NaN is only that NaN."""
    for name, array in expected._asdict().items():
        got = getattr(actual, name)
        assert (got.shape, got.dtype) == (array.shape, array.dtype), name
        same = got.tobytes() == array.tobytes()
        assert same, f"{name}: {np.count_nonzero(got != array)} of {array.size} values differ"


def memory_of_this_process() -> int:
    """Resident bytes, without what Python and malloc keep for later."""
    gc.collect()
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
