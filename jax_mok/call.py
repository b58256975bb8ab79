"""The static description of one call, shared by its forward and backward pass."""

from __future__ import annotations

import dataclasses
import enum
import functools

import jax
from absl import logging

from jax_mok.config import MoEConfig
from jax_mok.layout import Layout
from jax_mok.sharding import Position


class Operation(enum.IntEnum):
    """The four moves of rows, numbered as in `cuda/core/fault.h`."""

    DISPATCH = 1
    COMBINE = 2
    REVERSE_COMBINE = 3
    REVERSE_DISPATCH = 4


@dataclasses.dataclass(frozen=True)
class Call:
    """All that is known of a call when it is traced.

    Attributes:
      config: the caller's options.
      layout: static sizes.
      position: the place in the mesh.
      operand_axes: mesh axes along which `shard_map`'s type system sees x, the router weights and
        the three weights differ.
      axes: the same for everything that the call computes.
    """

    config: MoEConfig
    layout: Layout
    position: Position
    operand_axes: tuple[frozenset[str], ...]
    axes: frozenset[str]

    @property
    def ranks_share_memory(self) -> bool:
        """Whether rows move on CPU devices through memory, not through XLA's collectives."""
        if self.config.composition in ("auto", "fused"):
            several = jax.process_count() > 1
            if several:
                say_once("several processes: on CPU devices rows move through XLA's collectives")
            return not several
        return self.config.composition == "composed"


@functools.cache
def say_once(message: str) -> None:
    """Logs the message, if this process has not done so before."""
    logging.info("jax_mok: %s", message)


@functools.cache
def warn_once(message: str) -> None:
    """As `say_once`, of what a user should know without asking for it."""
    logging.warning("jax_mok: %s", message)
