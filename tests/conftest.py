"""Settings every test shares: enough host devices, and new memory that is never clean."""

import ctypes
import os
import pathlib
from collections.abc import Iterator

import pytest

HOST_DEVICES = 72
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

# XLA reads it when its first client starts, so it is set before any test imports jax.
if _DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT_FLAG}={HOST_DEVICES}".strip()
    )


def pytest_configure(config: pytest.Config) -> None:
    """GPU tests see GPUs and leave memory to the processes they start; others see none."""
    on_gpus = config.getoption("markexpr") == "gpu"
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if on_gpus else "cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """The GPU tests, all in `test_gpu*.py`, run where the libraries of the others are missing."""
    is_file = collection_path.suffix == ".py"
    on_gpus = config.getoption("markexpr") == "gpu"
    return True if on_gpus and is_file and not collection_path.match("test_gpu*.py") else None


@pytest.fixture(autouse=True)
def no_fault_is_left() -> Iterator[None]:
    """A recorded fault would be raised by another test's call."""
    yield
    import jax_mok

    jax_mok.check()


_M_PERTURB = -6  # glibc's number for mallopt(M_PERTURB, ...)
# glibc fills new memory with the low byte of (value ^ 0xff): 0x100 gives 0xff in every byte, which
# is NaN in float32 and bfloat16 and -1 in int32.
_NAN_FILL = 0x100


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills memory with NaN as it is allocated (glibc), so that a value nobody wrote shows up."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_PERTURB, _NAN_FILL)
    yield
    mallopt(_M_PERTURB, 0)
