"""Which ranks can read and write each other's memory, as the GPU kernels do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_mok import ffi
from jax_mok.text import spans

_MOST_NAMED = 4
"""So many runs of ranks, or of devices, make a message; of more it says how many."""


def out_of_reach(groups: np.ndarray) -> str | None:
    """Which ranks cannot reach each other's memory, for a message; None if all of a group can.

    None too if that is not known: for devices that are no GPUs, and for GPUs of one host or NVLink
    domain that several processes drive. All processes get the same answer, as they have to: they
    compile the same program.

    Args:
      groups: [groups, ranks] devices; the ranks of a group have to reach each other.

    Returns:
      As "0-3 not that of 4-7 (of devices 0-7)", ranks being positions in their group.
    """
    devices = groups.ravel().tolist()
    if ffi.cuda is None or any(device.platform != "gpu" for device in devices):
        return None
    are_local = all(device.process_index == jax.process_index() for device in devices)
    can_reach = ffi.cuda.can_reach if are_local else None
    apart = {
        index: pairs
        for index, group in enumerate(groups.tolist())
        if (pairs := _pairs_apart(group, can_reach))
    }
    if not apart:
        return None
    first, pairs = next(iter(apart.items()))
    text = f"{_list(pairs)} (of devices {spans([d.id for d in groups[first]], _MOST_NAMED)})"
    others = len(apart) - 1
    return f"{text}; and ranks in {others} more groups" if others else text


def _pairs_apart(
    group: list[Any], can_reach: Callable[[int, int], bool] | None
) -> list[tuple[int, int]]:
    """Pairs of ranks, ascending; without `can_reach` those of different domains only."""
    domains = [_domain(device) for device in group]
    if can_reach is None and len(set(domains)) == 1:
        return []

    def are_apart(rank: int, peer: int) -> bool:
        if domains[rank] != domains[peer]:
            return True
        if can_reach is None:
            return False
        ordinals = group[rank].local_hardware_id, group[peer].local_hardware_id
        return not (can_reach(*ordinals) and can_reach(*reversed(ordinals)))

    return [pair for pair in itertools.combinations(range(len(group)), 2) if are_apart(*pair)]


def _domain(device: Any) -> int | None:
    """Of NVLink, as XLA numbers them: by the fabric's id, or by host where some GPU has none."""
    # XLA's name for it now, and the one before.
    return getattr(device, "partition_index", getattr(device, "slice_index", None))


def _list(pairs: list[tuple[int, int]]) -> str:
    """In short: "0-3 not that of 4-11; 4-7 not that of 8-11" for three times four ranks apart."""
    peers_of: dict[int, set[int]] = {}
    for rank, peer in pairs:
        peers_of.setdefault(rank, set()).add(peer)
        peers_of.setdefault(peer, set()).add(rank)
    alike: dict[frozenset[int], list[int]] = {}
    for rank, peers in sorted(peers_of.items()):
        alike.setdefault(frozenset(peers), []).append(rank)
    parts, told = [], set[int]()
    for others, ranks in alike.items():
        if left := others - told:
            parts.append(f"{spans(ranks, _MOST_NAMED)} not that of {spans(left, _MOST_NAMED)}")
        told.update(ranks)
    more = len(parts) - _MOST_NAMED
    return "; ".join([*parts[:_MOST_NAMED], *([f"and {more} more such"] if more > 0 else [])])
