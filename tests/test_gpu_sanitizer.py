"""The kernels under `compute-sanitizer`, which comes with nvcc: run with `pytest -m gpu`."""

import shutil

import pytest
from gpu_harness import expect_success, require_gpus, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer"),
]

# Both compositions and passes, on one GPU: ranks that wait for each other are too slow for a tool.
# Operands come from the host, and no result is looked at: the tools see no other kernels, so what
# those write is to initcheck memory that nobody has written.
CALLS = """
import gpu_harness, jax, numpy, test_gpu, test_gpu_mx
import jax_mok

inputs = test_gpu.draw("zipf", tokens=130, hidden=64, inner=64, experts=4)
x, ids, *rest = test_gpu.on_gpus(inputs, gpu_harness.mesh_of(1))
for composition in ("auto", "composed"):
    config = jax_mok.MoEConfig(composition=composition, ring_rows=256, timeout_s=600.0)

    @jax.jit
    def step(x, rest, dy, config=config):
        def layer(x, *rest):
            mesh = gpu_harness.mesh_of(1)
            return jax_mok.moe(x, ids, *rest, mesh=mesh, axis_name="ep", config=config)

        y, pull_back = jax.vjp(layer, x, *rest)
        return y, *pull_back(dy)

    jax.block_until_ready(step(x, rest, inputs.dy))
jax_mok.check()

# Conversions to MXFP8, of something that is not finite in a warp of several.
for shape in ((5, 64, 96), (3, 32, 32)):
    drawn = numpy.random.default_rng(0).standard_normal(shape, numpy.float32)
    drawn[0, 1, 2] = numpy.nan
    jax.block_until_ready(jax.jit(test_gpu_mx.convert_all)(drawn))
jax.block_until_ready(jax.jit(test_gpu_mx.encoded)(numpy.ones((2, 64, 33), numpy.float32)))
"""


def test_nothing_is_found_in_small_calls():
    require_gpus(1)
    # Of this package's kernels alone, launched one by one, in memory of each array's own.
    options = ["--kernel-regex", "kns=mok", "--error-exitcode", "9"]
    tools = [
        start(
            CALLS,
            command=["compute-sanitizer", "--tool", tool, *options],
            XLA_PYTHON_CLIENT_ALLOCATOR="platform",
            XLA_FLAGS="--xla_gpu_enable_command_buffer=",
        )
        for tool in ("memcheck", "racecheck", "synccheck", "initcheck")
    ]
    expect_success(*tools, within_s=300)
