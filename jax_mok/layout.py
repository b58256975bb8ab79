"""The static sizes of a call; the formulas of `cuda/core/plan.h`."""

from __future__ import annotations

import dataclasses
import math

from jax_mok.config import TILE_ROWS, MoEConfig
from jax_mok.errors import MoEInputError

_DEFAULT_CHUNK_ROWS = 4096
_HEAD_ROOM = 1.125
# Below this the ring costs little, and a small load never waits for room, however skewed.
_LEAST_DEFAULT_RING_ROWS = 4096
_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static sizes of one call on one rank.

    Attributes:
      ranks: size of the mesh axis.
      tokens: tokens per rank.
      top_k: choices per token.
      experts: experts of all ranks.
      max_tiles: tiles of 64 rows a rank may have to take.
      chunk_rows: rows of a chunk of the ring.
      ring_rows: rows of the ring.
      saved_rows: rows whose pre-activations are kept.
    """

    ranks: int
    tokens: int
    top_k: int
    experts: int
    max_tiles: int
    chunk_rows: int
    ring_rows: int
    saved_rows: int

    @property
    def local_experts(self) -> int:
        """Experts on each rank."""
        return self.experts // self.ranks

    @property
    def choices(self) -> int:
        """Choices per rank."""
        return self.tokens * self.top_k

    @property
    def max_rows(self) -> int:
        """Rows a rank may have to take, padding included."""
        return self.max_tiles * TILE_ROWS


def make_layout(config: MoEConfig, *, ranks: int, tokens: int, top_k: int, experts: int) -> Layout:
    """Sizes for a config: its defaults filled in, and nothing larger than the worst load.

    Raises:
      MoEInputError: if a rank may have to take more rows than int32 can number.
    """
    choices, local_experts = tokens * top_k, experts // ranks
    worst_rows = ranks * choices
    max_tiles = (worst_rows + min(local_experts, worst_rows) * (TILE_ROWS - 1)) // TILE_ROWS
    max_rows = max_tiles * TILE_ROWS
    if max_rows > _MAX_INT32:
        raise MoEInputError(
            f"{ranks} ranks of {tokens} tokens with {top_k} choices may send {worst_rows} rows to "
            "one rank; row numbers are 32-bit: split the batch into several calls"
        )
    # A balanced load ends each expert in a half-empty tile, on average.
    padding = min(local_experts, choices) * TILE_ROWS // 2
    balanced_rows = _round_up(math.ceil(choices * _HEAD_ROOM) + padding, TILE_ROWS)
    default_rows = max(balanced_rows, _LEAST_DEFAULT_RING_ROWS)
    chunk_rows, ring_rows = _ring(config, default_rows, max(max_rows, TILE_ROWS))
    saved_rows = config.saved_rows
    if saved_rows is None:
        saved_rows = ring_rows
    return Layout(
        ranks=ranks,
        tokens=tokens,
        top_k=top_k,
        experts=experts,
        max_tiles=max_tiles,
        chunk_rows=chunk_rows,
        ring_rows=ring_rows,
        saved_rows=min(saved_rows, max_rows),
    )


def _ring(config: MoEConfig, default_rows: int, worst_rows: int) -> tuple[int, int]:
    """Rows of a chunk, and of the ring."""
    wanted = min(config.ring_rows or default_rows, worst_rows)
    if config.chunk_rows is not None:
        chunk_rows = min(config.chunk_rows, worst_rows)
    else:
        chunks = -(-wanted // _DEFAULT_CHUNK_ROWS)
        chunk_rows = _round_up(-(-wanted // chunks), TILE_ROWS)
        if config.ring_rows is not None and wanted % chunk_rows:
            chunk_rows = math.gcd(wanted, _DEFAULT_CHUNK_ROWS)
    ring_rows = _round_up(wanted, chunk_rows)
    if ring_rows > _MAX_INT32:
        ring_rows -= chunk_rows  # the rows past it take another wave
    return chunk_rows, ring_rows


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
