"""A process per GPU, one of which dies, stops, comes late or does something else.

The other is told which rank did not come, within the time-out, keeps its CUDA context, and gets
right results once both have made the same calls again. Run with `pytest -m gpu`.
"""

import pathlib
import signal
import socket
import time

import pytest
from gpu_harness import join, require_gpus, run_in_two_processes, start

pytestmark = pytest.mark.gpu

BOTH = """
import faulthandler, os, pathlib, signal, time
import gpu_harness, jax.numpy as jnp, numpy as np, pytest, test_gpu
import jax_mok

faulthandler.dump_traceback_later(60, exit=True)
TIMEOUT_S = 3.0
happens, folder = sys.argv[3], pathlib.Path(sys.argv[4])
config = gpu_harness.MoEConfig(timeout_s=TIMEOUT_S)
mesh = gpu_harness.mesh_of(2)
# Once for all calls: to place them, JAX asks the other process whether it has the same.
inputs, others = (
    test_gpu.on_gpus(test_gpu.draw("zipf", tokens=tokens), mesh) for tokens in (364, 412)
)

def run(operands):
    y = test_gpu.forward(2, config)(*operands)
    return np.asarray(y.addressable_data(0)).astype(np.float32)

def meet(name):
    (folder / f"{name}{process}").touch()
    while not (folder / f"{name}{1 - process}").exists():
        time.sleep(0.01)

want, want_others = run(inputs), run(others)
assert np.isfinite(want).all()
meet("ready")
"""

# Makes the call alone, and the calls after it with rank 1 if that goes on.
RANK_0 = """
time.sleep(0.5)
begin = time.monotonic()
assert np.isnan(run(inputs)).all()
told = "rank 0 waited in vain for rank 1 .*: epoch .*, seen .*;"
with pytest.raises(jax_mok.MoETimeoutError, match=told):
    jax_mok.check()
assert time.monotonic() - begin < TIMEOUT_S + 2
assert float(jnp.arange(5.0).sum()) == 10, "the context is of use"
(folder / "told").touch()
if happens in ("killed", "raising"):
    os._exit(0)
if happens == "elsewhere":
    assert np.isnan(run(others)).all()
    with pytest.raises(jax_mok.MoETimeoutError):
        jax_mok.check()
"""

RANK_1 = """
if happens == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if happens == "raising":
    raise RuntimeError("on purpose")
if happens == "elsewhere":
    assert np.isnan(run(others)).all()
    with pytest.raises(jax_mok.MoETimeoutError):
        jax_mok.check()
    while not (folder / "told").exists():
        time.sleep(0.01)
if happens == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
if happens == "late":
    time.sleep(2 * TIMEOUT_S)
assert np.isnan(run(inputs)).all(), "rank 0 has given up"
with pytest.raises(jax_mok.MoETimeoutError):
    jax_mok.check()
"""

# Both, if they go on.
AGAIN = """
meet("again")
for _ in range(3):
    assert run(inputs).tobytes() == want.tobytes()
    assert run(others).tobytes() == want_others.tobytes()
jax_mok.check()
os._exit(0)
"""


@pytest.mark.parametrize("happens", ["killed", "raising", "elsewhere", "stopped", "late"])
def test_the_other_process_is_told_and_goes_on(happens: str, tmp_path: pathlib.Path):
    require_gpus(2)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    processes = [
        start(join(2) + BOTH + own + AGAIN, port, process, happens, tmp_path)
        for process, own in enumerate((RANK_0, RANK_1))
    ]
    try:
        deadline = time.monotonic() + 120
        while happens == "stopped" and time.monotonic() < deadline:
            if (tmp_path / "told").exists() or processes[0].poll() is not None:
                processes[1].send_signal(signal.SIGCONT)
                break
            time.sleep(0.05)
        output, _ = processes[0].communicate(timeout=120)
        assert processes[0].returncode == 0, output
        if happens not in ("killed", "raising"):
            output, _ = processes[1].communicate(timeout=120)
            assert processes[1].returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()


ALONE = """
import faulthandler
import gpu_harness, numpy as np, pytest, test_gpu
import jax_mok

faulthandler.dump_traceback_later(60, exit=True)
config = gpu_harness.MoEConfig(timeout_s=20.0)
split = jax.NamedSharding(gpu_harness.mesh_of(2), jax.P("ep"))

def draw(**sizes):
    inputs = test_gpu.draw("zipf", **sizes)
    # Not by device_put, which asks the other process whether it has the same.
    return [jax.make_array_from_callback(a.shape, split, a.__getitem__) for a in inputs[:6]]

def run(operands):
    y = test_gpu.forward(2, config)(*operands)
    return np.asarray(y.addressable_data(0)).astype(np.float32)
"""

DIFFERENT = """
same = draw()
own = draw(**(dict(experts=12), dict(inner=256))[process])
want = run(same)
assert np.isfinite(want).all()
assert np.isnan(run(own)).all()
told = f"rank {process} came to a call, and rank {1 - process} to one of other"
with pytest.raises(jax_mok.MoEError, match=told):
    jax_mok.check()
for _ in range(3):
    assert run(same).tobytes() == want.tobytes()
jax_mok.check()
"""

FIRST = """
told = f"rank {1 - process} sets up memory for calls of other sizes"
with pytest.raises(jax.errors.JaxRuntimeError, match=told):
    run(draw(tokens=(364, 412)[process]))
assert np.isfinite(run(draw())).all()
jax_mok.check()
"""

LATE = """
import time
step = test_gpu.forward(2, gpu_harness.MoEConfig(timeout_s=2.0))
operands = draw()
time.sleep(5 * process)
for _ in range(3):
    y = step(*operands).addressable_data(0)
    assert np.isfinite(np.asarray(y).astype(np.float32)).all()
jax_mok.check()
"""

# Else XLA's processes tune one program together.
APART = "--xla_gpu_shard_autotuning=false"


def test_calls_that_differ_in_what_memory_does_not_show_are_told_apart():
    """As many bytes of tokens, choices and rows, so the calls meet."""
    require_gpus(2)
    run_in_two_processes(ALONE + DIFFERENT, within_s=120, XLA_FLAGS=APART)


def test_first_calls_of_different_sizes_are_told_apart():
    require_gpus(2)
    run_in_two_processes(ALONE + FIRST, within_s=120, XLA_FLAGS=APART)


def test_a_process_late_to_the_first_call_is_waited_for():
    """By XLA, which connects the GPUs then, and for longer than the call's time-out."""
    require_gpus(2)
    run_in_two_processes(ALONE + LATE, within_s=120, XLA_FLAGS=APART)
