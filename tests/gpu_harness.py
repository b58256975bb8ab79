"""What the tests on NVIDIA GPUs share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_mok

MoEConfig = functools.partial(jax_mok.MoEConfig, timeout_s=10.0)


def gpus() -> list[jax.Device]:
    return jax.devices("cuda")


def rank_counts() -> list[int]:
    return [1, 2] if len(gpus()) > 1 else [1]


def require_gpus(count: int) -> None:
    if len(gpus()) < count:
        pytest.fail(f"needs {count} GPUs")


@functools.cache
def mesh_of(ranks: int) -> Mesh:
    return Mesh(np.array(gpus()[:ranks]), ("ep",))


def poison_memory(value: np.generic) -> None:
    """What the next arrays are placed in holds the value."""
    for gpu in gpus():
        here = jax.sharding.SingleDeviceSharding(gpu)
        jax.jit(lambda: jnp.full(2**26, value), out_shardings=here)().block_until_ready()
