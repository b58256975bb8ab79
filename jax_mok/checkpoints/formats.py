"""Which tensors of a Hugging Face checkpoint make an MoE layer, and what config.json says of it.

The names are those of the checkpoints on the Hub, one tensor for each matrix of an expert, and
those of the modules of `transformers` 5, whose experts are stacked with gate above up: its files
`conversion_mapping.py` and `models/{mixtral,qwen3_moe,olmoe,deepseek_v3}/modeling_*.py`. Every
matrix there is [out, in], one of `torch.nn.Linear`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from jax_mok.errors import MoEInputError
from jax_mok.router import Router
from jax_mok.text import spans

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")

_NAMES: dict[Projection, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_ITS_OWN = "the model's own config.json, unchanged, has it"


class _Family(NamedTuple):
    """How models of one type are written.

    Attributes:
      experts: names that config.json may have for the number of experts.
      inner: its name for an expert's width.
      router: from config.json to the router.
      block: the MoE block's name within a layer on the Hub.
      projections: the names of an expert's matrices there.
    """

    experts: tuple[str, ...]
    inner: str
    router: Callable[[Mapping[str, Any]], Router]
    block: str = "mlp"
    projections: Mapping[Projection, str] = _NAMES


class Model(NamedTuple):
    """What config.json says of a model's MoE layers.

    Attributes:
      kind: the model's type, one of those in `_FAMILIES`.
      router: how experts are chosen.
      hidden: width H of a token.
      inner: width I of an expert.
      experts: how many, E.
      shared: width S of all shared experts together, which act as one; 0: there is none.
    """

    kind: str
    router: Router
    hidden: int
    inner: int
    experts: int
    shared: int


class Matrix(NamedTuple):
    """Where a matrix [out, in] lies: a tensor's name, and the part of the tensor."""

    tensor: str
    part: tuple[int | slice, ...] = (slice(None),)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tensors of one layer.

    Attributes:
      model: the model.
      layer: what the names of the layer's tensors begin with.
      stacked: whether all experts are in one tensor.
    """

    model: Model
    layer: str
    stacked: bool

    @property
    def router(self) -> str:
        """Name of the router's matrix."""
        return f"{self._block}.gate.weight"

    @property
    def bias(self) -> str | None:
        """Name of the selection bias [E], if the model has one."""
        is_biased = self.model.router.kind == "sigmoid"
        return f"{self._block}.gate.e_score_correction_bias" if is_biased else None

    def expert(self, projection: Projection, expert: int) -> Matrix:
        """One of an expert's matrices."""
        if not self.stacked:
            name = _FAMILIES[self.model.kind].projections[projection]
            return Matrix(f"{self._block}.experts.{expert}.{name}.weight")
        if projection == "down":
            return Matrix(f"{self._block}.experts.down_proj", (expert,))
        inner = self.model.inner
        half = slice(0, inner) if projection == "gate" else slice(inner, 2 * inner)
        return Matrix(f"{self._block}.experts.gate_up_proj", (expert, half))

    def shared(self, projection: Projection) -> str:
        """Name of one of the shared expert's matrices."""
        return f"{self._block}.shared_experts.{_NAMES[projection]}.weight"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of the layer."""
        _, _, hidden, inner, experts, shared = self.model
        shapes: dict[str, tuple[int, ...]] = {self.router: (experts, hidden)}
        if self.bias is not None:
            shapes[self.bias] = (experts,)
        if self.stacked:
            shapes[self.expert("gate", 0).tensor] = (experts, 2 * inner, hidden)
            shapes[self.expert("down", 0).tensor] = (experts, hidden, inner)
        for projection in PROJECTIONS:
            is_down = projection == "down"
            for expert in range(0 if self.stacked else experts):
                name = self.expert(projection, expert).tensor
                shapes[name] = (hidden, inner) if is_down else (inner, hidden)
            if shared:
                shapes[self.shared(projection)] = (hidden, shared) if is_down else (shared, hidden)
        return shapes

    @property
    def _block(self) -> str:
        return f"{self.layer}.{'mlp' if self.stacked else _FAMILIES[self.model.kind].block}"


def read_model(config: Mapping[str, Any]) -> Model:
    """What config.json says, of which more than the layer may be there.

    Raises:
      MoEInputError: for a model that the layer cannot compute, or an entry that is missing.
    """
    kind = _entry(config, "model_type")
    if kind == "gpt_oss":
        raise MoEInputError(
            "config.json has model_type 'gpt_oss': its router and its experts have biases, and its "
            "activation is (up + 1) · gate · sigmoid(1.702 · gate), none of which the layer has; "
            f"models that it computes are {_listed(_FAMILIES)}"
        )
    if kind not in _FAMILIES:
        raise MoEInputError(
            f"config.json has model_type {kind!r}, which is not one of {_listed(_FAMILIES)}: if "
            "its MoE layers are like those of one of them in names and mathematics, write that one"
        )
    if config.get("quantization_config"):
        raise MoEInputError(
            f"config.json has quantization_config {config['quantization_config']!r}; weights must "
            "be float32, bfloat16 or float16: convert the checkpoint to bfloat16 first, and leave "
            "the entry out"
        )
    family = _FAMILIES[kind]
    _check_entry(config, "hidden_act", "silu")
    inner = _integer(config, family.inner)
    shared = config.get("n_shared_experts") if kind == "deepseek_v3" else None
    return Model(
        kind=kind,
        router=family.router(config),
        hidden=_integer(config, "hidden_size"),
        inner=inner,
        experts=_integer(config, *family.experts),
        shared=inner * _integer(config, "n_shared_experts") if shared else 0,
    )


def find_layout(model: Model, layer: int, names: Collection[str]) -> Layout:
    """How a checkpoint with tensors of these names holds the layer.

    Raises:
      MoEInputError: if it holds no such MoE layer, or lacks tensors of it or has more.
    """
    blocks = {"mlp", _FAMILIES[model.kind].block}
    pattern = re.compile(rf"((?:model\.)?layers\.(\d+))\.(?:{'|'.join(blocks)})\.experts\.(\d+\.)?")
    found = [match for name in names if (match := pattern.match(name))]
    ours = [match for match in found if int(match[2]) == layer]
    if not ours:
        numbers = {int(match[2]) for match in found}
        which = f"layer{'s' if len(numbers) > 1 else ''} {spans(numbers)}" if numbers else "none"
        raise MoEInputError(
            f"the checkpoint has no experts of layer={layer} under the names of {model.kind!r}: "
            f"it has {which}"
        )
    layout = Layout(model, ours[0][1], stacked=any(match[3] is None for match in ours))
    beginnings = tuple(f"{layout.layer}.{block}." for block in blocks)
    _check_names(layout, {name for name in names if name.startswith(beginnings)})
    return layout


def _check_names(layout: Layout, found: set[str]) -> None:
    scales = {name for name in found if name.endswith("weight_scale_inv")}
    if scales:
        raise MoEInputError(
            f"the checkpoint's weights are fp8 with scales beside them, {_listed(scales)}; they "
            "must be float32, bfloat16 or float16: convert it to bfloat16 first"
        )
    wanted = layout.shapes().keys()
    missing, extra = wanted - found, found - wanted
    biases = {name for name in extra if name.endswith("bias")}
    if biases:
        raise MoEInputError(
            f"the checkpoint has biases, {_listed(biases)}, and the layer has none: only models "
            "without them can be loaded"
        )
    if missing or extra:
        problems = [
            f"{what} {_listed(names)}"
            for what, names in (("lacks", missing), ("has also", extra))
            if names
        ]
        raise MoEInputError(
            f"the MoE block of {layout.layer} does not have the tensors of {layout.model.kind!r} "
            f"with {layout.model.experts} experts: the checkpoint {' and '.join(problems)}; "
            "config.json and tensors must be those of one model"
        )


def _softmax_router(config: Mapping[str, Any]) -> Router:
    renormalise = _entry(config, "norm_topk_prob")
    return Router(_integer(config, "num_experts_per_tok"), "softmax", bool(renormalise))


def _mixtral_router(config: Mapping[str, Any]) -> Router:
    return Router(_integer(config, "num_experts_per_tok"), "softmax")


def _deepseek_v3_router(config: Mapping[str, Any]) -> Router:
    _check_entry(config, "scoring_func", "sigmoid")
    _check_entry(config, "topk_method", "noaux_tc")
    return Router(
        _integer(config, "num_experts_per_tok"),
        "sigmoid",
        renormalise=bool(_entry(config, "norm_topk_prob")),
        scale=float(_entry(config, "routed_scaling_factor")),
        groups=_integer(config, "n_group"),
        groups_per_token=_integer(config, "topk_group"),
    )


def _entry(config: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise MoEInputError(f"config.json has no {_listed(names, ' or ')}: {_ITS_OWN}")


def _integer(config: Mapping[str, Any], *names: str) -> int:
    value = _entry(config, *names)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise MoEInputError(
            f"config.json has {_listed(names, ' or ')} {value!r}; it must be an integer of at "
            f"least 1: {_ITS_OWN}"
        )
    return value


def _check_entry(config: Mapping[str, Any], name: str, wanted: str) -> None:
    value = config.get(name, wanted)
    if value != wanted:
        raise MoEInputError(
            f"config.json has {name} {value!r}; the layer computes {wanted!r} only: use a model "
            "that has it"
        )


def _listed(names: Iterable[str], joint: str = ", ", most: int = 4) -> str:
    quoted = [repr(name) for name in sorted(names)]
    more = f" and {len(quoted) - most} more" if len(quoted) > most else ""
    return joint.join(quoted[:most]) + more


_FAMILIES: dict[str, _Family] = {
    "mixtral": _Family(
        ("num_local_experts", "num_experts"),
        "intermediate_size",
        _mixtral_router,
        block="block_sparse_moe",
        projections={"gate": "w1", "up": "w3", "down": "w2"},
    ),
    "qwen3_moe": _Family(
        ("num_experts", "num_local_experts"), "moe_intermediate_size", _softmax_router
    ),
    "olmoe": _Family(("num_experts", "num_local_experts"), "intermediate_size", _softmax_router),
    "deepseek_v3": _Family(
        ("n_routed_experts", "num_local_experts"), "moe_intermediate_size", _deepseek_v3_router
    ),
}
