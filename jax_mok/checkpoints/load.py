"""From a checkpoint to arrays on a mesh; a process reads the experts of its own devices only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_mok.block import Block, BlockWeights
from jax_mok.checkpoints.files import Tensors, find_folder, read_json
from jax_mok.checkpoints.formats import (
    PROJECTIONS,
    Layout,
    Matrix,
    Projection,
    find_layout,
    read_model,
)
from jax_mok.errors import MoEInputError
from jax_mok.router import Router


class MoELayerWeights(NamedTuple):
    """A layer, as `from_weights` of `jax_mok.flax.MoE` and `jax_mok.equinox.MoE` takes it.

    Attributes:
      router: how experts are chosen, as the model's config.json says.
      weights: gate and up [E, H, I] and down [E, I, H], partitioned over the mesh axis; the same on
        every device: router float32 [H, E], bias float32 [E] of DeepSeek-V3, else None, and the
        shared expert's gate and up [H, S] and down [S, H], if the model has shared experts.
    """

    router: Router
    weights: BlockWeights


def load_moe_layer(
    path: str | os.PathLike[str],
    layer: int,
    *,
    mesh: Mesh,
    axis_name: str,
    dtype: DTypeLike | None = None,
) -> MoELayerWeights:
    """Loads a layer. Every process of the mesh calls it.

    Beside what its devices hold, a process needs host memory for one device's part of one array
    and for one matrix.

    Args:
      path: folder with config.json and either model.safetensors or several files and
        model.safetensors.index.json.
      layer: which of the model's layers, from 0.
      mesh: the devices that the layer will run on.
      axis_name: the mesh axis over which experts are partitioned.
      dtype: of the experts and the shared expert, float32 or bfloat16; None: that of the tensors.

    Returns:
      The router, and its and the experts' weights.

    Raises:
      MoEInputError: if there is no such folder, the model is none that the layer computes, there is
        no such MoE layer, its tensors are not those that config.json calls for, or the mesh axis
        does not divide the experts.
    """
    folder = find_folder(path, _how_to_download(os.fspath(path)))
    model = read_model(read_json(folder / "config.json"))
    Block(model.router, mesh, axis_name, None, None).check(model.experts)
    with Tensors(folder) as tensors:
        layout = find_layout(model, layer, tensors.names)
        tensors.check_shapes(layout.shapes())
        reader = _Reader(tensors, layout, mesh, axis_name, _choose_dtype(dtype, tensors, layout))
        gate, up, down = map(reader.experts, PROJECTIONS)
        shared: dict[str, jax.Array] | None = None
        if model.shared:
            shared = {name: reader.whole(layout.shared(name)) for name in PROJECTIONS}
        weights = BlockWeights(
            router=reader.whole(layout.router, np.float32),
            bias=None if layout.bias is None else reader.whole(layout.bias, np.float32),
            gate=gate,
            up=up,
            down=down,
            shared=shared,
        )
    return MoELayerWeights(model.router, weights)


def _how_to_download(path: str) -> str:
    """Advice to whoever gave the Hub's name of a model, perhaps, instead of a folder."""
    name = path if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else "ORGANISATION/MODEL"
    folder = name.rpartition("/")[2]
    return (
        f"download it first, for example `hf download {name} --local-dir {folder}`, and give that "
        "folder"
    )


class _Reader(NamedTuple):
    """Reads tensors of a layer onto the devices that need them."""

    tensors: Tensors
    layout: Layout
    mesh: Mesh
    axis_name: str
    dtype: np.dtype[Any]

    def experts(self, projection: Projection) -> jax.Array:
        """[E, in, out], partitioned."""
        model = self.layout.model
        rows, columns = model.hidden, model.inner
        if projection == "down":
            rows, columns = columns, rows

        def read(experts: range) -> np.ndarray:
            part = np.empty((len(experts), rows, columns), self.dtype)
            for matrix, expert in zip(part, experts, strict=True):
                matrix[...] = self.tensors.read(self.layout.expert(projection, expert)).T
            return part

        return self._placed((model.experts, rows, columns), PartitionSpec(self.axis_name), read)

    def whole(self, name: str, dtype: DTypeLike | None = None) -> jax.Array:
        """A matrix [in, out] or a vector, the same on every device."""
        host = np.ascontiguousarray(self.tensors.read(Matrix(name)).T, dtype or self.dtype)
        return self._placed(host.shape, PartitionSpec(), lambda _: host)

    def _placed(
        self, shape: tuple[int, ...], spec: PartitionSpec, read: Callable[[range], np.ndarray]
    ) -> jax.Array:
        """An array of this sharding; `read` gives its parts along the first dimension, once each.

        `jax.make_array_from_callback` would ask again for every device that holds the same part.
        """
        sharding = NamedSharding(self.mesh, spec)
        holders: dict[range, list[jax.Device]] = {}
        for device, (index, *_) in sharding.devices_indices_map(shape).items():
            if device in sharding.addressable_devices:
                holders.setdefault(range(*index.indices(shape[0])), []).append(device)
        parts: list[jax.Array] = []
        for indices, devices in holders.items():
            host = read(indices)
            # Waited for, so that no two parts are in host memory at a time.
            parts += jax.block_until_ready([jax.device_put(host, device) for device in devices])
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _choose_dtype(dtype: DTypeLike | None, tensors: Tensors, layout: Layout) -> np.dtype[Any]:
    """That of the experts; refuses what they cannot have."""
    stored = {name: tensors.dtype(name) for name in layout.shapes()}
    allowed = {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    if dtype is not None:
        if jnp.dtype(dtype) not in allowed:
            raise MoEInputError(
                f"dtype={jnp.dtype(dtype)} must be float32, bfloat16, or None for that of the "
                "tensors"
            )
        return jnp.dtype(dtype)
    of_experts = {stored[name] for name in stored if name not in (layout.router, layout.bias)}
    if len(of_experts) > 1 or not of_experts <= allowed:
        raise MoEInputError(
            f"the experts' tensors have dtype {', '.join(sorted(map(str, of_experts)))}; the "
            "layer's are all float32 or all bfloat16: choose one with dtype="
        )
    return of_experts.pop()
