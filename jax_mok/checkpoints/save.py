"""From arrays on a mesh to a checkpoint; a process writes the experts of its own devices only."""

from __future__ import annotations

import os

import jax
import numpy as np

from jax_mok.block import BlockWeights
from jax_mok.checkpoints.files import (
    check_absent,
    extend_index,
    find_folder,
    read_json,
    write,
)
from jax_mok.checkpoints.formats import PROJECTIONS, Layout, Model, read_model
from jax_mok.errors import MoEInputError


def save_moe_layer(path: str | os.PathLike[str], layer: int, weights: BlockWeights) -> None:
    """Saves a layer under its names on the Hub. Every process of the mesh calls it.

    The experts of each device are a file, all else is another, and process 0 makes or extends
    model.safetensors.index.json: wait for all processes before reading. Several layers go into one
    folder by several calls. Dtypes are kept, so loading gives the same bits; the router's is then
    float32, which it is not in most checkpoints.

    Args:
      path: folder with the config.json of the model.
      layer: which of the model's layers, from 0.
      weights: a module's `weights()`, or what `load_moe_layer` returned.

    Raises:
      MoEInputError: if the model is none of those that can be loaded, the weights are not those
        that config.json calls for, or are partitioned otherwise than over experts, or the folder
        has weights that would not be overwritten.
    """
    folder = find_folder(path, "make it, and copy the model's config.json there")
    model = read_model(read_json(folder / "config.json"))
    layout = Layout(model, f"model.layers.{layer}", stacked=False)
    _check_shapes(model, weights)
    experts = [getattr(weights, projection) for projection in PROJECTIONS]
    others = {layout.router: weights.router}
    if layout.bias is not None and weights.bias is not None:
        others[layout.bias] = weights.bias
    if weights.shared is not None:
        others |= {layout.shared(name): weights.shared[name] for name in PROJECTIONS}

    names = f"moe-layer-{layer:05d}"
    file_of = dict.fromkeys(others, f"{names}.safetensors")
    for held in _parts(*experts):
        file = f"{names}-experts-{held[0]:05d}-{held[-1]:05d}.safetensors"
        file_of |= dict.fromkeys(_tensors(layout, held), file)
    check_absent(folder, file_of)

    for shards in zip(*(array.addressable_shards for array in experts), strict=True):
        if shards[0].replica_id == 0:
            tensors = _tensors(layout, range(*shards[0].index[0].indices(model.experts)))
            matrices = [matrix.T for shard in shards for matrix in np.asarray(shard.data)]
            write(folder / file_of[tensors[0]], dict(zip(tensors, matrices, strict=True)))
    if jax.process_index() == 0:
        matrices = [np.asarray(array).T for array in others.values()]
        write(folder / f"{names}.safetensors", dict(zip(others, matrices, strict=True)))
        extend_index(folder, file_of)


def _tensors(layout: Layout, experts: range) -> list[str]:
    """Names of their tensors: those of gate of all of them, then of up, then of down."""
    return [
        layout.expert(projection, expert).tensor for projection in PROJECTIONS for expert in experts
    ]


def _parts(*experts: jax.Array) -> list[range]:
    """Which experts are together on a device, of all processes.

    Raises:
      MoEInputError: if the arrays are not partitioned in the same way, over their first dimension.
    """
    parts = []
    for array in experts:
        indices = array.sharding.devices_indices_map(array.shape)
        whole = [range(length) for length in array.shape[1:]]
        ranges = {
            device: [range(*dim.indices(n)) for dim, n in zip(index, array.shape, strict=True)]
            for device, index in indices.items()
        }
        parts.append({device: found[0] for device, found in ranges.items()})
        if parts[-1] != parts[0] or any(found[1:] != whole for found in ranges.values()):
            raise MoEInputError(
                f"gate, up and down have shardings {[array.sharding for array in experts]}; they "
                "must be partitioned over experts, their first dimension, and not otherwise: place "
                "them with jax.device_put first"
            )
    return sorted(set(parts[0].values()), key=lambda held: held.start)


def _check_shapes(model: Model, weights: BlockWeights) -> None:
    """Refuses weights that are not those of the model."""
    _, router, hidden, inner, experts, shared = model
    wanted: dict[str, tuple[int, ...]] = {
        "router": (hidden, experts),
        "gate": (experts, hidden, inner),
        "up": (experts, hidden, inner),
        "down": (experts, inner, hidden),
    }
    if router.kind == "sigmoid":
        wanted["bias"] = (experts,)
    if shared:
        inward, outward = (hidden, shared), (shared, hidden)
        wanted |= {"shared gate": inward, "shared up": inward, "shared down": outward}
    named = {name: array for name, array in weights._asdict().items() if name != "shared"}
    named |= {f"shared {name}": array for name, array in (weights.shared or {}).items()}
    given = {name: array.shape for name, array in named.items() if array is not None}
    for name in wanted | given:
        if given.get(name) != wanted.get(name):
            has, fits = (
                f"of shape {list(shapes[name])}" if name in shapes else "none"
                for shapes in (given, wanted)
            )
            raise MoEInputError(
                f"the weights' {name} is {has}; {fits} fits what config.json says: both must be "
                "those of one model"
            )
