"""What must hold across processes: distributed jobs, the compilation cache, exported programs."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import checkpoint_harness as checkpoints
import harness
import jax
import numpy as np
import pytest
import routings
from oracle import Outputs

import jax_mok
from jax_mok.checkpoints import load_moe_layer

RANKS, TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 4, 40, 32, 64, 8, 2
HERE = pathlib.Path(__file__).parent

PRELUDE = """
import sys
import numpy as np
import jax
import harness
from oracle import Inputs
inputs = Inputs(**np.load(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def inputs_file(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("processes") / "inputs.npz"
    np.savez(path, **make_inputs()._asdict())
    return path


def make_inputs():
    rng = np.random.default_rng(11)
    routes = routings.zipf(rng, RANKS, TOKENS, TOP_K, EXPERTS)
    return harness.draw_inputs(rng, routes, hidden=HIDDEN, inner=INNER, experts=EXPERTS)


@pytest.fixture
def start():
    """Starts Python processes, and leaves none behind."""
    processes = []

    def start(code: str, *arguments: object, devices: int = RANKS, **variables: object):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PYTHONPATH": str(HERE),
            **{name: str(value) for name, value in variables.items()},
        }
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def finish(process) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def load_outputs(path: pathlib.Path) -> Outputs:
    return Outputs(**np.load(path))


DISTRIBUTED = """
port, process = int(sys.argv[3]), int(sys.argv[4])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
assert jax.device_count() == 2 * jax.local_device_count()
from jax.experimental import multihost_utils
import jax_mok
config = jax_mok.MoEConfig(ring_rows=int(sys.argv[5]) or None, precision=sys.argv[6])
mesh = harness.mesh_of(jax.device_count())
outputs = harness.layer_step(mesh, config)(harness.shard(inputs, mesh))
outputs = multihost_utils.process_allgather(outputs, tiled=True)
if process == 0:
    np.savez(sys.argv[2], **outputs._asdict())
"""


@pytest.mark.parametrize(
    ("ring_rows", "precision"), [(0, "operands"), (64, "operands"), (64, "mxfp8")]
)
def test_two_processes_get_the_bits_of_one(start, inputs_file, tmp_path, ring_rows, precision):
    """No memory is shared: the collective composition takes over."""
    port = free_port()
    result = tmp_path / "outputs.npz"
    processes = [
        start(DISTRIBUTED, inputs_file, result, port, process, ring_rows, precision, devices=2)
        for process in range(2)
    ]
    for process in processes:
        finish(process)
    config = jax_mok.MoEConfig(precision=precision)
    harness.assert_same_bits(load_outputs(result), harness.run_layer(make_inputs(), 1, config))


def test_two_processes_of_thirty_six_devices_get_the_bits_of_one(start, tmp_path):
    rng = np.random.default_rng(36)
    routes = routings.zipf(rng, 72, 2, TOP_K, 72)
    inputs = harness.draw_inputs(rng, routes, hidden=HIDDEN, inner=8, experts=72)
    given, result, port = tmp_path / "inputs.npz", tmp_path / "outputs.npz", free_port()
    np.savez(given, **inputs._asdict())
    processes = [
        start(DISTRIBUTED, given, result, port, process, 0, "operands", devices=36)
        for process in range(2)
    ]
    for process in processes:
        finish(process)
    harness.assert_same_bits(load_outputs(result), harness.run_layer(inputs, 1))


APART = """
import types, unittest.mock
from jax_mok import ffi, reach
ask = reach.out_of_reach

def as_gpu(device):
    return types.SimpleNamespace(
        id=device.id, platform="gpu", local_hardware_id=device.local_hardware_id,
        process_index=device.process_index, partition_index=device.process_index,
    )

def as_gpus_of_two_domains(groups):
    kernels = types.SimpleNamespace(can_reach=lambda device, peer: True)
    with unittest.mock.patch.object(ffi, "cuda", kernels):
        return ask(np.vectorize(as_gpu)(groups))

reach.out_of_reach = as_gpus_of_two_domains
"""

INSIST = """
try:
    harness.layer_step(mesh, jax_mok.MoEConfig(composition="fused"))(harness.shard(inputs, mesh))
except jax_mok.MoEInputError as error:
    print("refused:", error)
"""


def test_processes_of_different_nvlink_domains_say_so_and_get_the_bits_of_one(
    start, inputs_file, tmp_path
):
    """Devices of the CPU that say to be GPUs of a domain for each process."""
    port = free_port()
    result = tmp_path / "outputs.npz"
    code = APART + DISTRIBUTED + INSIST
    processes = [
        start(code, inputs_file, result, port, process, 0, "operands", devices=2)
        for process in range(2)
    ]
    which = "ranks of mesh axis 'ep' cannot reach each other's memory: 0-1 not that of 2-3"
    for process in processes:
        output = finish(process)
        assert output.count(f"jax_mok: {which}") == 1
        assert f"refused: composition='fused' is not possible, since {which}" in output
    harness.assert_same_bits(load_outputs(result), harness.run_layer(make_inputs(), 1))


CHECKPOINT = """
port, process = int(sys.argv[4]), int(sys.argv[5])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
from jax_mok.checkpoints import files, load_moe_layer, save_moe_layer
names, read = [], files.Tensors.read
files.Tensors.read = lambda self, matrix: names.append(matrix.tensor) or read(self, matrix)
loaded = load_moe_layer(sys.argv[2], 3, mesh=harness.mesh_of(4), axis_name="ep")
save_moe_layer(sys.argv[3], 3, loaded.weights)
print("read:", *names)
"""


def test_a_process_reads_and_writes_its_own_experts(start, inputs_file, tmp_path):
    config, tensors = checkpoints.CONFIGS["mixtral"], checkpoints.draw("mixtral")
    stored = checkpoints.write(tmp_path / "stored", config, tensors)
    saved = checkpoints.write(tmp_path / "saved", config, {}, files=2)
    port = free_port()
    processes = [
        start(CHECKPOINT, inputs_file, stored, saved, port, process, devices=2)
        for process in range(2)
    ]
    block = checkpoints.block_name("mixtral")
    for process, experts in zip(processes, (range(0, 4), range(4, 8)), strict=True):
        names = re.search("read: (.*)", finish(process))[1].split()
        weights = {f"{block}.experts.{e}.{w}.weight" for e in experts for w in ("w1", "w2", "w3")}
        assert sorted(names) == sorted(weights | {f"{block}.gate.weight"})
    loaded = [
        load_moe_layer(folder, 3, mesh=harness.mesh_of(1), axis_name="ep").weights
        for folder in (stored, saved)
    ]
    jax.tree.map(np.testing.assert_array_equal, *loaded)


CACHED = """
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
jax.config.update("jax_raise_persistent_cache_errors", True)
hits = []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(name) if name == "/jax/compilation_cache/cache_hits" else None
)
mesh = harness.mesh_of(4)
outputs = harness.layer_step(mesh, harness.DEFAULTS)(harness.shard(inputs, mesh))
np.savez(sys.argv[2], **{k: np.asarray(v) for k, v in outputs._asdict().items()})
print("hits", len(hits))
"""


def test_a_new_process_runs_the_cached_program(start, inputs_file, tmp_path):
    expected = harness.run_layer(make_inputs(), 1)
    hits = []
    for turn in range(2):
        result = tmp_path / f"{turn}.npz"
        cache = tmp_path / "cache"
        output = finish(start(CACHED, inputs_file, result, JAX_COMPILATION_CACHE_DIR=cache))
        hits.append(int(output.split("hits")[-1]))
        harness.assert_same_bits(load_outputs(result), expected)
    assert hits[0] == 0
    assert hits[1] > 0


EXPORT = """
import pathlib
import jax_mok
step = harness.layer_step(harness.mesh_of(4), harness.DEFAULTS)
exported = jax.export.export(step, disabled_checks=jax_mok.export_safety_checks())(
    harness.shard(inputs, harness.mesh_of(4))
)
jax.export.register_namedtuple_serialization(Inputs, serialized_name="Inputs")
from oracle import Outputs
jax.export.register_namedtuple_serialization(Outputs, serialized_name="Outputs")
pathlib.Path(sys.argv[2]).write_bytes(exported.serialize())
"""

IMPORT = """
import pathlib
import jax.export
import jax_mok
from oracle import Outputs
jax.export.register_namedtuple_serialization(Inputs, serialized_name="Inputs")
jax.export.register_namedtuple_serialization(Outputs, serialized_name="Outputs")
exported = jax.export.deserialize(pathlib.Path(sys.argv[2]).read_bytes())
outputs = jax.jit(exported.call)(harness.shard(inputs, harness.mesh_of(4)))
np.savez(sys.argv[3], **{k: np.asarray(v) for k, v in outputs._asdict().items()})
"""


def test_a_new_process_runs_the_exported_program(start, inputs_file, tmp_path):
    program, result = tmp_path / "program", tmp_path / "outputs.npz"
    finish(start("import jax.export\n" + EXPORT, inputs_file, program))
    finish(start(IMPORT, inputs_file, program, result))
    harness.assert_same_bits(load_outputs(result), harness.run_layer(make_inputs(), 1))


FORK = """
import os
import jax_mok

def save(path):
    mesh = harness.mesh_of(4)
    outputs = harness.layer_step(mesh, harness.DEFAULTS)(harness.shard(inputs, mesh))
    np.savez(path, **{k: np.asarray(v) for k, v in outputs._asdict().items()})

def fork(act):
    child = os.fork()
    if child == 0:
        act()
        os._exit(0)
    return child

early = fork(lambda: save(sys.argv[2]))  # before there are devices, and threads
save(sys.argv[3])
late = fork(lambda: None)
save(sys.argv[4])
for child in (early, late):
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_may_fork_before_it_has_devices_and_goes_on_if_it_forks_later(
    start, inputs_file, tmp_path
):
    results = [tmp_path / f"{who}.npz" for who in ("child", "parent", "parent_later")]
    finish(start(FORK, inputs_file, *results))
    expected = harness.run_layer(make_inputs(), 1)
    for result in results:
        harness.assert_same_bits(load_outputs(result), expected)


def test_the_benchmark_prints_and_writes_its_ratios(tmp_path):
    figures = tmp_path / "figures.json"
    sizes = ["--tokens=64", "--hidden=32", "--inner=32", "--rounds=2", "--ranks=4"]
    command = [sys.executable, "-m", "jax_mok.bench", "cpu", *sizes, f"--json={figures}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "layer / jnp.dot" in output
    assert "plan / layer" in output
    written = json.loads(figures.read_text())
    assert written["layer_over_dot"] > 0
    assert written["plan_share"] > 0
    assert set(written["layer"]) == {"median", "low", "high"}
