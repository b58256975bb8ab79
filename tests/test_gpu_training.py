"""The model of the training example on NVIDIA GPUs: run with `pytest -m gpu`."""

import pathlib

import numpy as np
import pytest
from gpu_harness import expect_success, require_gpus, run_in_two_processes, start

pytestmark = pytest.mark.gpu

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
STEPS = 1000
# XLA picks its own products by timing them, so that another process may get other bits.
FIXED_PRODUCTS = {"XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"}

TRAIN = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import jax, jax.numpy as jnp, numpy as np
from lm import corpus, model, training
import jax_mok

mesh = jax.make_mesh((2,), (model.AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
config = model.ModelConfig(
    d_model=128, layers=2, experts=16, top_k=2, expert_width=128, dtype=jnp.dtype("bfloat16")
)
programs = training.build(config, mesh, learning_rate=3e-3, steps={STEPS})
data = corpus.load(None, context=128)
state = programs.init(0)
losses = []
for number in range({STEPS}):
    batch = data.batch(number, seed=0, batch=16, context=128)
    sequences = jax.make_array_from_callback(
        batch.shape, programs.batch_sharding, lambda index: batch[index]
    )
    state, loss, _ = programs.step(state, sequences)
    losses.append(loss)
jax_mok.check()
if jax.process_index() == 0:
    np.save(sys.argv[-1], np.array([np.asarray(loss) for loss in losses]))
"""


def test_a_thousand_steps_have_the_same_losses_in_one_process_two_and_again(tmp_path):
    require_gpus(2)
    for name in ("one", "again"):
        expect_success(start(TRAIN, tmp_path / f"{name}.npy", **FIXED_PRODUCTS), within_s=600)
    run_in_two_processes(TRAIN, tmp_path / "two.npy", within_s=600, **FIXED_PRODUCTS)
    one, again, two = (np.load(tmp_path / f"{name}.npy") for name in ("one", "again", "two"))
    assert len(one) == STEPS and np.isfinite(one).all()
    assert one[-20:].mean() < 0.6 * one[0]
    assert again.tobytes() == one.tobytes()
    assert two.tobytes() == one.tobytes()
