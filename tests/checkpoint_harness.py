"""Small checkpoints as they are on the Hub, and what their layers compute by the papers."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jax_mok.block import Block, BlockWeights
from jax_mok.checkpoints import MoELayerWeights

HIDDEN, INNER, EXPERTS, LAYER = 16, 24, 8, 3

_COMMON = dict(hidden_size=HIDDEN, hidden_act="silu")
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": _COMMON
    | dict(intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2),
    "qwen3_moe": _COMMON
    | dict(intermediate_size=7 * INNER, moe_intermediate_size=INNER, num_experts=EXPERTS)
    | dict(num_experts_per_tok=3, norm_topk_prob=True),
    "olmoe": _COMMON
    | dict(intermediate_size=INNER, num_experts=EXPERTS)
    | dict(num_experts_per_tok=3, norm_topk_prob=False),
    "deepseek_v3": _COMMON
    | dict(intermediate_size=7 * INNER, moe_intermediate_size=INNER, n_routed_experts=EXPERTS)
    | dict(n_shared_experts=2, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True)
    | dict(routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc"),
}
KINDS = tuple(CONFIGS)
for _kind, _config in CONFIGS.items():
    _config["model_type"] = _kind


def block_name(kind: str) -> str:
    block = "block_sparse_moe" if kind == "mixtral" else "mlp"
    return f"model.layers.{LAYER}.{block}"


def expert_names(kind: str) -> tuple[str, str, str]:
    """Gate, up, down."""
    return ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")


def draw(kind: str) -> dict[str, np.ndarray]:
    """The tensors of a layer, [out, in], float32."""
    rng, block = np.random.default_rng(5), block_name(kind)

    def linear(outputs: int, inputs: int) -> np.ndarray:
        return (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)

    def mlp(prefix: str, names: tuple[str, str, str], width: int) -> dict[str, np.ndarray]:
        gate, up, down = (f"{prefix}.{name}.weight" for name in names)
        return {
            gate: linear(width, HIDDEN),
            up: linear(width, HIDDEN),
            down: linear(HIDDEN, width),
        }

    tensors = {f"{block}.gate.weight": linear(EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        tensors |= mlp(f"{block}.experts.{expert}", expert_names(kind), INNER)
    if kind == "deepseek_v3":
        bias = rng.uniform(0, 0.5, EXPERTS).astype(np.float32)
        tensors[f"{block}.gate.e_score_correction_bias"] = bias
        tensors |= mlp(f"{block}.shared_experts", expert_names(kind), 2 * INNER)
    return tensors


def stack(kind: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors by the names and layout of the modules of transformers 5."""
    block = block_name(kind)
    gate, up, down = (
        np.stack([tensors[f"{block}.experts.{e}.{name}.weight"] for e in range(EXPERTS)])
        for name in expert_names(kind)
    )
    stacked = {name: value for name, value in tensors.items() if ".experts." not in name}
    stacked[f"{block}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
    stacked[f"{block}.experts.down_proj"] = down
    return {name.replace("block_sparse_moe", "mlp"): value for name, value in stacked.items()}


def write(
    folder: pathlib.Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    files: int = 1,
) -> pathlib.Path:
    """A checkpoint in one file or in several and an index, with a tensor that is none of ours."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors | {"model.embed_tokens.weight": np.zeros((5, HIDDEN), np.float32)}
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def choose(kind: str, tensors: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """bool [T, E]: whether a token [T, H] chooses an expert."""
    config, gate = CONFIGS[kind], f"{block_name(kind)}.gate"
    wanted = x @ tensors[f"{gate}.weight"].T
    if kind == "deepseek_v3":
        wanted = 1 / (1 + np.exp(-wanted)) + tensors[f"{gate}.e_score_correction_bias"]
        groups = wanted.reshape(len(x), config["n_group"], -1)  # A view.
        group_scores = np.sort(groups, axis=-1)[..., -2:].sum(-1)
        worst = np.argsort(group_scores, axis=-1)[:, : -config["topk_group"]]
        np.put_along_axis(groups, worst[..., None], -np.inf, axis=1)
    chosen = np.argsort(-wanted, axis=-1)[:, : config["num_experts_per_tok"]]
    return (chosen[..., None] == np.arange(EXPERTS)).any(1)


def by_definition(
    kind: str, tensors: dict[str, jax.Array], x: jax.Array, chosen: np.ndarray
) -> jax.Array:
    """The block's output [T, H] for tokens [T, H]: each expert on all tokens, most weights 0."""
    config, block = CONFIGS[kind], block_name(kind)

    def mlp(prefix: str, names: tuple[str, str, str]) -> jax.Array:
        gate, up, down = (tensors[f"{prefix}.{name}.weight"] for name in names)
        pre = x @ gate.T
        return (pre / (1 + jnp.exp(-pre)) * (x @ up.T)) @ down.T

    logits = x @ tensors[f"{block}.gate.weight"].T
    if kind == "deepseek_v3":
        scores = 1 / (1 + jnp.exp(-logits))
    else:
        scores = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    weights = jnp.where(chosen, scores, 0)
    if config.get("norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * config.get("routed_scaling_factor", 1.0)
    y = jnp.zeros_like(x)
    for expert in range(EXPERTS):
        y += weights[:, [expert]] * mlp(f"{block}.experts.{expert}", expert_names(kind))
    if kind == "deepseek_v3":
        y += mlp(f"{block}.shared_experts", expert_names(kind))
    return y


def run(
    loaded: MoELayerWeights, mesh: Mesh, x: np.ndarray, dy: np.ndarray
) -> tuple[jax.Array, BlockWeights, jax.Array]:
    """Output and gradients of the loaded weights, placed as they are, and of x."""
    block = Block(loaded.router, mesh, "ep", None, None)

    @jax.jit
    def step(weights: BlockWeights, x: jax.Array, dy: jax.Array):
        y, gradients = jax.vjp(lambda weights, x: block(x, weights).y, weights, x)
        return y, *gradients(dy)

    y, gradients, dx = step(loaded.weights, x, dy)
    placed = jax.tree.map(lambda g, w: jax.device_put(g, w.sharding), gradients, loaded.weights)
    return y, placed, dx


def assert_close(actual: Any, desired: Any, name: str = "") -> None:
    """To 1e-5 of the largest value."""
    actual, desired = np.asarray(actual), np.asarray(desired)
    assert actual.shape == desired.shape, name
    difference = np.abs(actual - desired).max()
    assert difference <= 1e-5 * np.abs(desired).max(), f"{name}: {difference}"
