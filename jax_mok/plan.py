"""The plan of a call: which row of which rank holds which choice of which token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok import ffi
from jax_mok.call import Call
from jax_mok.config import TILE_ROWS, MoEConfig, config_or_default
from jax_mok.layout import make_layout
from jax_mok.sharding import find_position, vary, varying_axes
from jax_mok.transforms import guard, refuse_when_lowered
from jax_mok.validate import check_experts, check_ids

_NO_GPU_PLAN = (
    "build_plan runs on CPU devices only in this version: the layer makes its own plan on GPUs; to "
    "look at one, set JAX_PLATFORMS=cpu"
)


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


def make_plan(call: Call, expert_ids: jax.Array, place: jax.Array) -> Plan:
    """The plan of a call. expert_ids is int32 [T, K]; place is from `Position.place`."""
    layout = call.layout
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
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
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
        target = "jax_mok_plan_of_gathered_routes"
        ids = jax.lax.all_gather(expert_ids, call.position.axis_name)
    return Plan(*ffi.call(target, results, (ids, place), attributes, call.axes))


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
      config: the layer's options; only `chunk_rows` and `ring_rows` change the plan.

    Returns:
      The tables of this rank.

    Raises:
      MoEInputError: for arguments that do not fit each other or the mesh.
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
    ids = refuse_when_lowered(guard(expert_ids), _NO_GPU_PLAN, except_on="cpu")
    return make_plan(call, vary(ids, call.axes), vary(position.place(), call.axes))
