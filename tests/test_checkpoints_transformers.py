"""Loaded layers against the modules of `transformers`, whose checkpoints they are.

Not in the extra `test`: torch with its CUDA libraries is some gigabytes. `pip install torch
'transformers>=5'` brings it.
"""

import json
import pathlib

import checkpoint_harness as harness
import jax
import numpy as np
import pytest
from checkpoint_harness import CONFIGS, EXPERTS, HIDDEN, INNER, KINDS
from module_harness import mesh_of
from safetensors.numpy import load_file, save_file

from jax_mok.checkpoints import load_moe_layer, save_moe_layer

torch = pytest.importorskip("torch", reason="torch and transformers are installed by hand")
transformers = pytest.importorskip("transformers", minversion="5", reason="as torch")

LAYER, TOKENS = 1, 128
MESH = dict(dp=2, ep=4)
SMALL = dict(vocab_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
SMALL_LATENTS = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4)


def make(kind: str):
    """A small model with weights of a size at which no part of the output vanishes."""
    extra = SMALL_LATENTS | dict(v_head_dim=8, first_k_dense_replace=1)
    options = CONFIGS[kind] | SMALL | (extra if kind == "deepseek_v3" else {})
    config = transformers.AutoConfig.for_model(**options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in moe_of(model).parameters():
            weight.normal_(0, weight.shape[-1] ** -0.5)
        for bias in moe_of(model).buffers():
            bias.uniform_(0, 0.5)
    return model


def moe_of(model):
    return model.model.layers[LAYER].mlp


def load(folder: pathlib.Path):
    return load_moe_layer(folder, LAYER, mesh=mesh_of(**MESH), axis_name="ep")


def normal(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((TOKENS, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", ["20KB", "1GB"])
def test_outputs_and_gradients_are_those_of_transformers(tmp_path, kind, size):
    model = make(kind)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors").exists() == (size == "1GB")
    x, dy = normal(1), normal(2)
    y, gradients, dx = harness.run(load(tmp_path), mesh_of(**MESH), x, dy)

    moe, theirs = moe_of(model), torch.tensor(x, requires_grad=True)
    output = moe(theirs[None])[0]
    output.backward(torch.tensor(dy))
    harness.assert_close(y, output.detach(), "y")
    harness.assert_close(dx, theirs.grad, "dx")
    harness.assert_close(gradients.router, moe.gate.weight.grad.T, "router")
    gate, up = moe.experts.gate_up_proj.grad.mT.split(INNER, dim=-1)
    harness.assert_close(gradients.gate, gate, "gate")
    harness.assert_close(gradients.up, up, "up")
    harness.assert_close(gradients.down, moe.experts.down_proj.grad.mT, "down")
    if kind == "deepseek_v3":
        for name in ("gate", "up", "down"):
            weight = getattr(moe.shared_experts, f"{name}_proj").weight
            harness.assert_close(gradients.shared[name], weight.grad.T, f"shared {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_by_the_modules_names_are_those_on_the_hub(tmp_path, kind):
    model = make(kind)
    model.save_pretrained(tmp_path / "hub")
    own = {name: value.numpy() for name, value in model.state_dict().items()}
    assert own[f"model.layers.{LAYER}.mlp.experts.down_proj"].shape == (EXPERTS, HIDDEN, INNER)
    folder = harness.write(tmp_path / "own", model.config.to_dict(), own)
    of_hub, of_modules = load(tmp_path / "hub"), load(folder)
    assert of_hub.router == of_modules.router
    jax.tree.map(np.testing.assert_array_equal, of_hub.weights, of_modules.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_was_saved(tmp_path, kind):
    model = make(kind)
    model.save_pretrained(tmp_path / "hub")
    tuned = jax.tree.map(lambda weight: 2 * weight, load(tmp_path / "hub").weights)

    moved = tmp_path / "tuned"
    moved.mkdir()
    (moved / "config.json").write_bytes((tmp_path / "hub" / "config.json").read_bytes())
    prefix = f"{harness.block_name(kind).replace(f'.{harness.LAYER}.', f'.{LAYER}.')}."
    stored = load_file(tmp_path / "hub" / "model.safetensors")
    rest = {name: value for name, value in stored.items() if not name.startswith(prefix)}
    save_file(rest, moved / "rest.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(rest, "rest.safetensors")}
    (moved / "model.safetensors.index.json").write_text(json.dumps(index))
    save_moe_layer(moved, LAYER, tuned)

    again = transformers.AutoModelForCausalLM.from_pretrained(moved)
    for name, weight in moe_of(again).state_dict().items():
        np.testing.assert_array_equal(weight, 2 * moe_of(model).state_dict()[name], name)
    for name, weight in again.state_dict().items():
        if f".{LAYER}.mlp." not in name:
            np.testing.assert_array_equal(weight, model.state_dict()[name], name)
