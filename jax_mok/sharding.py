"""Where a call stands in its mesh, and how its values are typed there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_mok.errors import MoEInputError


@dataclasses.dataclass(frozen=True)
class Position:
    """A `shard_map` body's place in its mesh.

    Attributes:
      axis_name: the mesh axis over which experts are partitioned.
      ranks: its size.
      other_axes: the other mesh axes; each of their positions is a group of ranks of its own.
      groups: the groups of ranks one after the other, as positions in `mesh.devices.flat`.
    """

    axis_name: str
    ranks: int
    other_axes: tuple[str, ...]
    groups: tuple[int, ...]

    def place(self) -> jax.Array:
        """int32 [2]: which group of ranks this device belongs to, and its rank there."""
        group = jax.lax.axis_index(self.other_axes) if self.other_axes else np.int32(0)
        return jnp.stack([jnp.int32(group), jnp.int32(jax.lax.axis_index(self.axis_name))])


def check_axis_name(axis_name: object) -> None:
    """Refuses what names no single axis."""
    if not isinstance(axis_name, str):
        raise MoEInputError(f"axis_name={axis_name!r} must be the name of one mesh axis, a string")


def check_mesh(mesh: object) -> None:
    """Refuses what is no mesh."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MoEInputError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}: make one with "
            "jax.make_mesh"
        )


def check_axis(mesh: Mesh | AbstractMesh, axis_name: object) -> None:
    """Refuses what names no axis of the mesh."""
    check_axis_name(axis_name)
    if axis_name not in mesh.axis_names:
        raise MoEInputError(
            f"axis_name={axis_name!r} is not an axis of the mesh; "
            f"its axes are {', '.join(map(repr, mesh.axis_names))}"
        )


def find_mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    """The mesh, or for None that of `jax.set_mesh`: with its devices unless JAX is tracing.

    Raises:
      MoEInputError: if it is no mesh, or there is none.
    """
    if mesh is not None:
        check_mesh(mesh)
        return mesh
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        raise MoEInputError(
            "mesh was not given, and no jax.set_mesh says which one to use: give mesh=..., or call "
            "moe within `with jax.set_mesh(mesh):`"
        )
    concrete = _mesh_with_devices()
    return concrete if concrete is not None and concrete.abstract_mesh == abstract else abstract


def check_committed(mesh: Mesh | AbstractMesh, operands: dict[str, tuple[object, P]]) -> None:
    """Refuses operands of an eager call that are committed to other devices than the mesh's.

    Args:
      mesh: of the call.
      operands: by name, the operand and where it belongs.
    """
    # While JAX traces, devices of constants do not matter, and those of operands are not known.
    if isinstance(mesh, AbstractMesh) or _mesh_with_devices() is None:
        return
    devices = set(mesh.devices.flat)
    for name, (operand, spec) in operands.items():
        for array in jax.tree.leaves(operand):
            is_placed = isinstance(array, jax.Array) and array.committed
            if is_placed and array.devices() != devices:
                found = [*map(str, array.devices())]
                where = f"device {found[0]}" if len(found) == 1 else f"{len(found)} devices"
                axes = spec[0]
                raise MoEInputError(
                    f"{name} is committed to {where}, not to the {mesh.size} of the mesh: place it "
                    f"with jax.device_put({name}, NamedSharding(mesh, PartitionSpec({axes!r})))"
                )


def _mesh_with_devices() -> Mesh | None:
    """That of `jax.set_mesh`, which may be empty; None while JAX traces, which hides it."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        return None


def find_position(axis_name: str, caller: str) -> Position:
    """The position of the surrounding `shard_map` body; messages name the caller.

    Raises:
      MoEInputError: outside `shard_map`, for an unknown axis, or if an axis is not manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(mesh.manual_axes)
    if not manual:
        or_else = (
            ", or use jax_mok.moe(..., mesh=mesh, axis_name=...) on global arrays"
            if caller == "moe_ffn"
            else ""
        )
        raise MoEInputError(
            f"{caller} was called outside jax.shard_map, where XLA would gather every operand on "
            f"every device: call it inside jax.shard_map over the mesh axis {axis_name!r}{or_else}"
        )
    check_axis_name(axis_name)
    if axis_name not in manual:
        raise MoEInputError(
            f"axis_name={axis_name!r} is not a manual axis of the surrounding shard_map; "
            f"its manual axes are {', '.join(map(repr, manual))}"
        )
    shape = dict(mesh.shape)
    automatic = _automatic_axes(mesh)
    if automatic:
        raise MoEInputError(
            f"the mesh axes {', '.join(map(repr, automatic))} are not manual inside this "
            "shard_map, so XLA would gather every operand over them: leave out shard_map's "
            "axis_names, or name all mesh axes there"
        )
    others = tuple(name for name in manual if name != axis_name and shape[name] > 1)
    positions = np.arange(mesh.size).reshape(tuple(shape.values()))
    groups = np.moveaxis(positions, mesh.axis_names.index(axis_name), -1)
    return Position(axis_name, shape[axis_name], others, tuple(groups.ravel().tolist()))


def is_in_shard_map() -> bool:
    """Whether the values here are one device's, in a `shard_map` over all mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and not _automatic_axes(mesh)


def _automatic_axes(mesh: jax.sharding.AbstractMesh) -> list[str]:
    """Those along which there are several devices that `shard_map` does not tell apart."""
    return [
        name
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis_type != AxisType.Manual and dict(mesh.shape)[name] > 1
    ]


def check_partitioned(axis_name: str, **weights: jax.Array) -> None:
    """Refuses weights that `shard_map(check_vma=True)` knows to be the same on every rank."""
    if jax.sharding.get_abstract_mesh().shape[axis_name] == 1:
        return
    types_are_checked = varying_axes(jax.lax.axis_index(axis_name))
    for name, weight in weights.items():
        if types_are_checked and axis_name not in varying_axes(weight):
            raise MoEInputError(
                f"{name} is the same on every rank of mesh axis {axis_name!r}: partition its "
                f"experts, shard_map(..., in_specs=PartitionSpec({axis_name!r}))"
            )


def varying_axes(value: jax.Array) -> frozenset[str]:
    """Mesh axes along which the type system of `shard_map(check_vma=True)` sees value differ."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def vary(value: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Value, typed as differing along the axes too.

    FFI results and constants are typed as replicated, which is not what they are.
    """
    missing = tuple(sorted(axes - varying_axes(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def vary_all(values: Sequence[jax.Array], axes: frozenset[str]) -> list[jax.Array]:
    """`vary` for each of the values."""
    return [vary(value, axes) for value in values]


def sum_replicas(cotangent: jax.Array, primal_axes: frozenset[str]) -> jax.Array:
    """Sum of a cotangent over the axes along which it differs and its primal does not."""
    axes = tuple(sorted(varying_axes(cotangent) - primal_axes))
    return jax.lax.psum(cotangent, axes) if axes else cotangent
