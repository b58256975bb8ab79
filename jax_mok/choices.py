"""The choices of a call that no expert computes, counted."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ChoiceCounts(NamedTuple):
    """How many choices add nothing to a result; int32 scalars.

    Attributes:
      masked: those with id -1.
      out_of_range: those with another id outside 0..experts-1; `jax_mok.check` raises for them.
    """

    masked: jax.Array
    out_of_range: jax.Array


def count_choices(expert_ids: jax.Array, experts: int) -> ChoiceCounts:
    """Of these ids, int32 of any shape, among so many experts."""
    outside = (expert_ids < 0) | (expert_ids >= experts)
    masked = expert_ids == -1
    return ChoiceCounts(
        jnp.sum(masked, dtype=jnp.int32), jnp.sum(outside & ~masked, dtype=jnp.int32)
    )
