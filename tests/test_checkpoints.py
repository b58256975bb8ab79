"""Checkpoints become the layer that their model has, by the papers; and weights go back."""

import json
import pathlib
import sys

import checkpoint_harness as harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_harness import CONFIGS, EXPERTS, HIDDEN, INNER, KINDS, LAYER
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from module_harness import mesh_of
from safetensors.numpy import load_file, save_file

import jax_mok
from jax_mok import equinox, flax
from jax_mok.checkpoints import files, load_moe_layer, save_moe_layer
from jax_mok.router import Router

DP_EP = dict(dp=2, ep=4)


def load(folder: pathlib.Path, layer: int = LAYER, dtype=None, **axes: int):
    return load_moe_layer(folder, layer, mesh=mesh_of(**axes or DP_EP), axis_name="ep", dtype=dtype)


def checkpoint(folder: pathlib.Path, kind: str = "mixtral", **config) -> pathlib.Path:
    return harness.write(folder, CONFIGS[kind] | config, harness.draw(kind))


def normal(seed: int, tokens: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, HIDDEN)).astype(np.float32)


def saved(folder: pathlib.Path) -> dict[str, np.ndarray]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stacked", "number", "axes"), [(False, 3, DP_EP), (True, 1, dict(ep=8))])
def test_a_layer_and_its_gradients_are_the_models(tmp_path, kind, number, stacked, axes):
    tensors = harness.draw(kind)
    stored = harness.stack(kind, tensors) if stacked else tensors
    folder = harness.write(tmp_path / "model", CONFIGS[kind], stored, number)
    x, dy = normal(1), normal(2)
    loaded = load(folder, **axes)
    y, gradients, dx = harness.run(loaded, mesh_of(**axes), x, dy)
    chosen = harness.choose(kind, tensors, x)
    want, pullback = jax.vjp(
        lambda tensors, x: harness.by_definition(kind, tensors, x, chosen), tensors, jnp.asarray(x)
    )
    want_gradients, want_dx = pullback(jnp.asarray(dy))
    harness.assert_close(y, want, "y")
    harness.assert_close(dx, want_dx, "dx")
    back = harness.write(tmp_path / "gradients", CONFIGS[kind], {}, 2)
    save_moe_layer(back, LAYER, gradients)
    found = saved(back)
    for name, value in want_gradients.items():
        harness.assert_close(found[name], value, name)
    for array in (loaded.weights.gate, loaded.weights.up, loaded.weights.down):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh_of(**axes), P("ep")), 3)


@pytest.mark.parametrize("module", [flax.MoE, equinox.MoE])
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_modules_are_made_of_loaded_weights_and_give_them_back(tmp_path, kind, module):
    loaded, mesh = load(checkpoint(tmp_path, kind)), mesh_of(**DP_EP)
    layer = module.from_weights(*loaded, mesh=mesh, axis_name="ep")
    x, tensors = normal(1), harness.draw(kind)
    want = harness.by_definition(kind, tensors, x, harness.choose(kind, tensors, x))
    harness.assert_close(layer(x).y, want)
    jax.tree.map(np.testing.assert_array_equal, layer.weights(), loaded.weights)


@pytest.mark.parametrize("module", [flax.MoE, equinox.MoE])
def test_modules_refuse_a_router_that_does_not_fit(tmp_path, module):
    weights = load(checkpoint(tmp_path)).weights
    with pytest.raises(jax_mok.MoEInputError, match=r"weights.bias is None and .*'sigmoid'"):
        module.from_weights(Router(2, "sigmoid"), weights, mesh=mesh_of(ep=4), axis_name="ep")


@pytest.mark.parametrize(
    ("kind", "router"),
    [
        ("mixtral", Router(2)),
        ("qwen3_moe", Router(3)),
        ("olmoe", Router(3, renormalise=False)),
        ("deepseek_v3", Router(3, "sigmoid", True, 2.5, 4, 2)),
    ],
)
def test_the_router_is_that_of_the_config(tmp_path, kind, router):
    assert load(checkpoint(tmp_path, kind)).router == router


@pytest.mark.parametrize("stacked", [False, True])
def test_every_matrix_is_read_once_and_alone(tmp_path, monkeypatch, stacked):
    """Also where two devices hold the same experts."""
    read, sizes = [], set()
    plainly = files.Tensors.read

    def reading(self, matrix):
        value = plainly(self, matrix)
        read.append(str(matrix))
        sizes.add(value.size)
        return value

    tensors = harness.draw("olmoe")
    tensors = harness.stack("olmoe", tensors) if stacked else tensors
    folder = harness.write(tmp_path, CONFIGS["olmoe"], tensors)
    monkeypatch.setattr(files.Tensors, "read", reading)
    load(folder)
    assert len(read) == len(set(read)) == 3 * EXPERTS + 1
    assert sizes == {HIDDEN * INNER, HIDDEN * EXPERTS}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_saved_and_loaded_has_the_same_bits(tmp_path, kind, dtype):
    tensors = {name: value.astype(dtype) for name, value in harness.draw(kind).items()}
    first = load(harness.write(tmp_path / "first", CONFIGS[kind], tensors, 2))
    assert first.weights.gate.dtype == dtype
    assert first.weights.router.dtype == np.float32
    back = harness.write(tmp_path / "back", CONFIGS[kind], {}, 2)
    save_moe_layer(back, LAYER + 1, first.weights)
    save_moe_layer(back, LAYER, first.weights)
    save_moe_layer(back, LAYER, first.weights)  # Again: over the same files.
    for layer in (LAYER, LAYER + 1):
        second = load(back, layer, ep=2)
        assert second.router == first.router
        jax.tree.map(np.testing.assert_array_equal, second.weights, first.weights)
    found = saved(back)
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_dtypes_are_converted(tmp_path, stored, wanted):
    tensors = {name: value.astype(stored) for name, value in harness.draw("deepseek_v3").items()}
    weights = load(harness.write(tmp_path, CONFIGS["deepseek_v3"], tensors), dtype=wanted).weights
    gate = tensors[f"{harness.block_name('deepseek_v3')}.experts.5.gate_proj.weight"]
    np.testing.assert_array_equal(weights.gate[5], gate.T.astype(wanted))
    assert {weights.down.dtype, weights.shared["up"].dtype} == {jnp.dtype(wanted)}
    assert {weights.router.dtype, weights.bias.dtype} == {np.dtype(np.float32)}


def test_checkpoints_of_bare_models_name_no_model(tmp_path):
    tensors = harness.draw("olmoe")
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    weights = load(harness.write(tmp_path, CONFIGS["olmoe"], bare)).weights
    want = tensors[f"{harness.block_name('olmoe')}.gate.weight"]
    np.testing.assert_array_equal(weights.router, want.T)


BLOCK = harness.block_name("mixtral")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "gpt_oss"}, "'gpt_oss': its router and its experts have biases.*activatio"),
        ({"model_type": "dbrx"}, "'dbrx', which is not one of 'deepseek_v3', 'mixtral', 'olmoe', "),
        ({"model_type": None}, "config.json has no 'model_type': the model's own config.json"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; the layer computes 'silu' only"),
        ({"hidden_size": 0}, "'hidden_size' 0; it must be an integer of at least 1"),
        ({"num_local_experts": None}, "no 'num_experts' or 'num_local_experts'"),
        ({"num_experts_per_tok": "2"}, "'num_experts_per_tok' '2'; it must be an integer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'.*convert the checkpoint to bf"),
        ({"num_local_experts": 12}, "lacks .*experts.10.w1.weight'.* and 8 more; config.json and"),
        ({"num_local_experts": 4}, "has also .*experts.4.w1.weight'.* and 8 more"),
        ({"intermediate_size": 32}, r"w1.weight has shape \[24, 16\]; \[32, 16\] fits what config"),
    ],
)
def test_a_config_that_does_not_fit_is_named(tmp_path, entries, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        load(checkpoint(tmp_path, **entries))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'; the layer computes 'sigmoid' only"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'; the layer computes 'noaux_tc' only"),
        ({"n_shared_experts": None}, "has also .*shared_experts.down_proj.weight"),
        ({"n_shared_experts": 3}, r"shared_experts.gate_proj.weight has shape \[48, 16\]"),
        ({"n_group": None}, "config.json has no 'n_group'"),
        ({"n_group": 2, "topk_group": 3}, "groups_per_token=3 is more than Router.groups=2"),
    ],
)
def test_a_config_of_deepseek_v3_that_does_not_fit_is_named(tmp_path, entries, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        load(checkpoint(tmp_path, "deepseek_v3", **entries))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("experts.2.w3.weight", None, f"lacks '{BLOCK}.experts.2.w3.weight'; config.json and"),
        ("gate.weight", None, f"lacks '{BLOCK}.gate.weight'"),
        ("experts.2.w4.weight", np.zeros(1), f"has also '{BLOCK}.experts.2.w4.weight'"),
        ("gate.weight", np.zeros((9, 16)), r"gate.weight has shape \[9, 16\]; \[8, 16\] fits"),
        ("gate.bias", np.zeros(8), f"has biases, '{BLOCK}.gate.bias', and the layer has none"),
        ("experts.1.w1.bias", np.zeros(8), "has biases, .*only models without them"),
        ("experts.0.w1.weight_scale_inv", np.zeros(1), "are fp8 with scales .*w1.weight_scale_inv"),
        (
            "experts.1.w1.weight",
            np.zeros((INNER, HIDDEN), ml_dtypes.float8_e4m3fn),
            "has dtype F8_E4M3; weights must be F32, BF16, F16: convert",
        ),
        (
            "experts.1.w1.weight",
            np.zeros((INNER, HIDDEN), ml_dtypes.bfloat16),
            "have dtype bfloat16, float32; .* choose one with dtype=",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, value, message):
    tensors = harness.draw("mixtral")
    if value is None:
        del tensors[f"{BLOCK}.{name}"]
    else:
        tensors[f"{BLOCK}.{name}"] = value
    folder = harness.write(tmp_path, CONFIGS["mixtral"], tensors)
    with pytest.raises(jax_mok.MoEInputError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(ep=3),
            "8 experts .* among the 3 ranks of mesh axis 'ep': use a multiple of 3",
        ),
        (dict(dp=2), "axis_name='ep' is not an axis of the mesh; its axes are 'dp'"),
        (dict(layer=4), "no experts of layer=4 under the names of 'mixtral': it has layer 3$"),
        (dict(dtype=jnp.float16), "dtype=float16 must be float32, bfloat16, or None"),
    ],
)
def test_arguments_that_do_not_fit_are_named(tmp_path, arguments, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        load(checkpoint(tmp_path), **arguments)


def test_layers_that_are_there_are_listed(tmp_path):
    folder = harness.write(tmp_path / "back", CONFIGS["mixtral"], {}, 2)
    weights = load(checkpoint(tmp_path / "model")).weights
    for layer in (1, 2, 5):
        save_moe_layer(folder, layer, weights)
    with pytest.raises(jax_mok.MoEInputError, match=r"it has layers 1-2, 5$"):
        load(folder, 3)


@pytest.mark.parametrize(
    ("path", "command"),
    [
        (
            "mistralai/Mixtral-8x7B-v0.1",
            "mistralai/Mixtral-8x7B-v0.1 --local-dir Mixtral-8x7B-v0.1",
        ),
        ("no/such/folder", "ORGANISATION/MODEL --local-dir MODEL"),
    ],
)
def test_what_is_no_folder_is_to_be_downloaded_first(tmp_path, monkeypatch, path, command):
    monkeypatch.chdir(tmp_path)
    message = f"path='{path}' is no local folder: download it first, .*`hf download {command}`, and"
    with pytest.raises(jax_mok.MoEInputError, match=message):
        load(path)


def test_a_folder_to_save_in_must_be_there(tmp_path):
    weights = load(checkpoint(tmp_path)).weights
    with pytest.raises(
        jax_mok.MoEInputError, match="is no local folder: make it, and copy the mod"
    ):
        save_moe_layer(tmp_path / "none", LAYER, weights)


def test_experts_under_another_models_names_are_not_found(tmp_path):
    folder = harness.write(tmp_path, CONFIGS["qwen3_moe"], harness.draw("mixtral"))
    with pytest.raises(jax_mok.MoEInputError, match="under the names of 'qwen3_moe': it has none"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json cannot be read .*: fetch it again"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "config.json has no JSON object but a list"),
        ("model.safetensors.index.json", "{}", "index.json has no object 'weight_map'"),
        ("model.safetensors.index.json", None, "has neither model.safetensors.index.json nor mode"),
        ("model-1.safetensors", None, "model-1.safetensors cannot be read as a safetensors file"),
        ("model-1.safetensors", "no", "model-1.safetensors cannot be read as a safetensors file"),
    ],
)
def test_files_that_are_missing_or_broken_are_named(tmp_path, file, content, message):
    harness.write(tmp_path, CONFIGS["mixtral"], harness.draw("mixtral"), 2)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(jax_mok.MoEInputError, match=message):
        load(tmp_path)


def test_an_index_that_promises_too_much_is_named(tmp_path):
    harness.write(tmp_path, CONFIGS["mixtral"], harness.draw("mixtral"), 2)
    save_file({"other": np.zeros(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(jax_mok.MoEInputError, match=r"model-1.safetensors has no tensor 'model\."):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "mixtral",
            dict(up=(8, 16, 25)),
            r"weights' up is of shape \[8, 16, 25\]; of shape \[8, 16",
        ),
        ("mixtral", dict(bias=(8,)), r"weights' bias is of shape \[8\]; none fits"),
        ("deepseek_v3", dict(bias=None), r"weights' bias is none; of shape \[8\] fits"),
        ("deepseek_v3", dict(shared=None), r"weights' shared gate is none; of shape \[16, 48\]"),
    ],
)
def test_weights_that_are_not_the_models_are_not_saved(tmp_path, kind, changes, message):
    weights = load(checkpoint(tmp_path, kind)).weights
    changes = {name: shape and jnp.zeros(shape) for name, shape in changes.items()}
    with pytest.raises(jax_mok.MoEInputError, match=message):
        save_moe_layer(tmp_path, LAYER, weights._replace(**changes))


@pytest.mark.parametrize("spec", [P(), P("ep", "dp"), P("dp")])
def test_weights_that_are_partitioned_otherwise_are_not_saved(tmp_path, spec):
    weights = load(checkpoint(tmp_path)).weights
    up = jax.device_put(weights.up, NamedSharding(mesh_of(**DP_EP), spec))
    with pytest.raises(jax_mok.MoEInputError, match="must be partitioned over experts"):
        save_moe_layer(tmp_path, LAYER, weights._replace(up=up))


@pytest.mark.parametrize("number", [1, 2])
def test_old_weights_do_not_stay_beside_those_saved(tmp_path, number):
    harness.write(tmp_path, CONFIGS["mixtral"], harness.draw("mixtral"), number)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(
        jax_mok.MoEInputError, match=r"has a checkpoint already, in model.*: delete them, or save"
    ):
        save_moe_layer(tmp_path, LAYER, load(tmp_path).weights)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_safetensors_is_asked_for(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jax_mok.checkpoints")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="needs safetensors: run `pip install safetensors`"):
        import jax_mok.checkpoints  # noqa: F401


def test_the_index_names_every_tensor(tmp_path):
    weights = load(checkpoint(tmp_path / "model", "deepseek_v3")).weights
    back = harness.write(tmp_path / "back", CONFIGS["deepseek_v3"], {}, 2)
    save_moe_layer(back, LAYER, weights)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) >= set(harness.draw("deepseek_v3"))
    for name, file in index["weight_map"].items():
        assert name in load_file(back / file)
