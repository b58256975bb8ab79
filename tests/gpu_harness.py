"""What the tests on NVIDIA GPUs share."""

import functools
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_mok

HERE = pathlib.Path(__file__).parent
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


@functools.cache
def _filling(gpu: jax.Device) -> jax.stages.Wrapped:
    here = jax.sharding.SingleDeviceSharding(gpu)
    return jax.jit(lambda value: jnp.full(2**26, value), in_shardings=here, out_shardings=here)


def poison_memory(value: np.generic) -> None:
    """What the next arrays are placed in holds the value."""
    for gpu in gpus():
        _filling(gpu)(value).block_until_ready()


def start(
    code: str, *arguments: object, command: Sequence[str] = (), **variables: str
) -> subprocess.Popen:
    """A Python process, under a command if one is given, that finds the modules of the tests."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cuda",
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        **variables,
    }
    return subprocess.Popen(
        [*command, sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def expect_success(*processes: subprocess.Popen, within_s: float = 240) -> None:
    try:
        for process in processes:
            output, _ = process.communicate(timeout=within_s)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()


def join(count: int) -> str:
    """What code begins with that is one of so many processes, one GPU each: its `process`."""
    return f"""
import sys
import jax
process = int(sys.argv[2])
jax.distributed.initialize(
    "127.0.0.1:" + sys.argv[1],
    num_processes={count},
    process_id=process,
    local_device_ids=[process],
)
"""


def run_in_processes(
    count: int, code: str, *arguments: object, within_s: float = 240, **variables: str
) -> None:
    """The code of all, one GPU each, knows its `process` and finds the arguments in argv[3:]."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    expect_success(
        *(
            start(join(count) + code, port, process, *arguments, **variables)
            for process in range(count)
        ),
        within_s=within_s,
    )


run_in_two_processes = functools.partial(run_in_processes, 2)
