"""The plan of a call: which row of which rank holds which choice of which token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok import ffi, gpu
from jax_mok.call import Call
from jax_mok.config import TILE_ROWS, MoEConfig, config_or_default
from jax_mok.layout import Layout, make_layout
from jax_mok.sharding import find_position, vary, varying_axes
from jax_mok.transforms import guard, refuse_when_lowered
from jax_mok.validate import check_experts, check_ids

_PLAN_OF_GATHERED_ROUTES = "jax_mok_plan_of_gathered_routes"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """One rank's tables; all int32.

    A choice is one of the K experts of one token; its global slot is (rank·T + token)·K + k for T
    tokens a rank. The rows of an expert are its choices in the order of their global slots; experts
    ascend, and each begins at a tile (64 rows). `cuda/core/plan.h` defines the same tables.

    Attributes:
      row_source: [max_rows] global slot whose token fills the row; -1 for padding.
      pull_order: [max_rows] for every chunk, from its first position on, its real rows in the order
        in which they are pulled; -1 after them. Each round takes one row from every rank that has
        any left, the right neighbour first and the own rank last.
      tile_expert: [max_tiles] local expert of each tile; -1 past the last.
      expert_tile: [experts/n + 1] first tile of each local expert, and the number of tiles.
      expert_rows: [experts/n] rows of each local expert.
      slot_rank: [T, K] rank to which this rank's own choice went; -1 if masked.
      slot_row: [T, K] its row there; -1 if masked.
      counts: [5] see the properties.
    """

    row_source: jax.Array
    pull_order: jax.Array
    tile_expert: jax.Array
    expert_tile: jax.Array
    expert_rows: jax.Array
    slot_rank: jax.Array
    slot_row: jax.Array
    counts: jax.Array

    @property
    def rows(self) -> jax.Array:
        """Scalar: real rows on this rank."""
        return self.counts[0]

    @property
    def tiles(self) -> jax.Array:
        """Scalar: tiles on this rank."""
        return self.counts[1]

    @property
    def most_tiles(self) -> jax.Array:
        """Scalar: the largest number of tiles on any rank; it sets the number of waves."""
        return self.counts[2]

    @property
    def masked(self) -> jax.Array:
        """Scalar: this rank's own choices with id -1."""
        return self.counts[3]

    @property
    def out_of_range(self) -> jax.Array:
        """Scalar: this rank's own choices with another id outside 0..experts-1."""
        return self.counts[4]


def tables(layout: Layout) -> list[jax.ShapeDtypeStruct]:
    """The tables in the order of `Plan`."""
    shapes = (
        (layout.max_rows,),
        (layout.max_rows,),
        (layout.max_tiles,),
        (layout.local_experts + 1,),
        (layout.local_experts,),
        (layout.tokens, layout.top_k),
        (layout.tokens, layout.top_k),
        (5,),
    )
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def make_plan(call: Call, expert_ids: jax.Array, place: jax.Array) -> Plan:
    """The plan of a call on CPU devices.

    Args:
      call: the call.
      expert_ids: int32 [T, K].
      place: from `Position.place`.
    """
    layout = call.layout
    attributes: dict[str, np.generic] = {
        "ranks": np.int32(layout.ranks),
        "experts": np.int32(layout.experts),
        "tile_rows": np.int32(TILE_ROWS),
        "chunk_rows": np.int64(layout.chunk_rows),
        "timeout_s": np.float64(call.config.timeout_s),
    }
    if call.ranks_share_memory:
        target, ids = "jax_mok_plan", expert_ids
    else:
        target, ids = _PLAN_OF_GATHERED_ROUTES, _gather(call, expert_ids)
    return Plan(*ffi.call(target, tables(layout), (ids, place), attributes, call.axes))


def gather_plan_on_gpu(call: Call, expert_ids: jax.Array, place: jax.Array) -> Plan:
    """As `make_plan`, of routes that XLA gathers, on GPUs; refused when lowered if none fits."""
    if (reason := gpu.why_not(call.layout, ranks_meet=False)) is not None:
        return refused_plan(call, reason)
    attributes = gpu.plan_sizes(call.layout)
    operands = (_gather(call, expert_ids), place)
    results = _workspace_and_tables(call)
    return Plan(*ffi.call(_PLAN_OF_GATHERED_ROUTES, results, operands, attributes, call.axes)[1:])


def _gather(call: Call, expert_ids: jax.Array) -> jax.Array:
    """[ranks, T, K] the routes of all ranks of this one's group."""
    return jax.lax.all_gather(expert_ids, call.position.axis_name)


def _workspace_and_tables(call: Call) -> list[jax.ShapeDtypeStruct]:
    """The results of a GPU call that makes a plan."""
    assert ffi.cuda is not None
    sizes = gpu.arguments(gpu.plan_sizes(call.layout))
    workspace_bytes = ffi.cuda.plan_workspace_bytes(**sizes)
    return [jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8), *tables(call.layout)]


def _make_plan_on_gpu(call: Call, expert_ids: jax.Array) -> Plan:
    """As `make_plan`; ranks that do not meet in time get the plan of masked choices only."""
    if (reason := gpu.why_not(call.layout)) is not None:
        return refused_plan(call, reason)
    results = _workspace_and_tables(call)
    target = "jax_mok_plan_alone" if call.layout.ranks == 1 else "jax_mok_plan_peers"
    attributes = {**gpu.plan_sizes(call.layout), **gpu.meeting(call)}
    return Plan(*ffi.call(target, results, (expert_ids,), attributes, call.axes)[1:])


def refused_plan(call: Call, reason: str) -> Plan:
    """A plan whose program is refused when it is lowered."""
    refused = (
        refuse_when_lowered(jnp.zeros(table.shape, table.dtype), reason)
        for table in tables(call.layout)
    )
    return Plan(*(vary(table, call.axes) for table in refused))


def build_plan(
    expert_ids: jax.Array,
    *,
    num_experts: int,
    axis_name: str,
    config: MoEConfig | None = None,
) -> Plan:
    """The plan that `moe_ffn` would make for these routes, for inspection and load statistics.

    Call it inside `jax.shard_map`.

    Args:
      expert_ids: int32 [T, K], this rank's choices; -1 is a masked choice.
      num_experts: experts of all ranks, a multiple of the mesh axis' size.
      axis_name: the mesh axis over which experts are partitioned.
      config: the layer's options; only `chunk_rows` and `ring_rows` change the plan. With
        `composition="collective"` the ranks meet in XLA's collectives for it.

    Returns:
      The tables of this rank. On GPUs those of ranks that do not meet within
      `MoEConfig.timeout_s` are the tables of masked choices only, and `jax_mok.check` raises.

    Raises:
      MoEInputError: for arguments that do not fit each other or the mesh.
      MoEError: under `jax.vmap`; or when it is lowered for a platform that cannot run it.
    """
    config = config_or_default(config)
    position = find_position(axis_name, "build_plan")
    check_ids(expert_ids)
    check_experts(num_experts, position.ranks, axis_name)
    tokens, top_k = expert_ids.shape
    num_experts = int(num_experts)
    call = Call(
        config=config,
        layout=make_layout(
            config, ranks=position.ranks, tokens=tokens, top_k=top_k, experts=num_experts
        ),
        position=position,
        operand_axes=(),
        axes=varying_axes(expert_ids) | {axis_name},
    )

    def on_cpu(ids: jax.Array) -> Plan:
        return make_plan(call, ids, vary(position.place(), call.axes))

    def on_gpu(ids: jax.Array) -> Plan:
        if config.composition == "collective":
            return gather_plan_on_gpu(call, ids, vary(position.place(), call.axes))
        return _make_plan_on_gpu(call, ids)

    def elsewhere(_: jax.Array) -> Plan:
        return refused_plan(call, "build_plan runs on CPU devices and on NVIDIA GPUs only")

    ids = vary(guard(expert_ids), call.axes)
    return jax.lax.platform_dependent(ids, cpu=on_cpu, cuda=on_gpu, default=elsewhere)
