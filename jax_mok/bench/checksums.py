"""Checksums of a layer's results, and what differs between them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

RESULTS = ("y", "dx", "d_router", "d_gate", "d_up", "d_down")
_DIGITS = 12


def checksums(results: Iterable[np.ndarray]) -> dict[str, str]:
    """The first digits of each one's SHA-256, by the names of RESULTS."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(RESULTS, pool.map(_checksum, results), strict=True))


def _checksum(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:_DIGITS]


def difference(rows: Sequence[dict[str, Any]]) -> str:
    """In which results which rows differ from the first, a line each; empty if none does.

    A row has "devices", "processes" and "sums", which are `checksums`.
    """
    different = [
        f"{row['devices']} devices of {row['processes']} processes have other bits of {result} "
        f"than {rows[0]['devices']} of {rows[0]['processes']}"
        for row in rows
        for result, checksum in row["sums"].items()
        if checksum != rows[0]["sums"][result]
    ]
    return "\n".join(different)
