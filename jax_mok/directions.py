"""Which direction of each move was fastest on this user's GPUs, kept from one process to the next.

`python -m jax_mok.bench link` measures it and `MoEConfig.auto` goes by it. The file is
`directions.json` in `$XDG_CACHE_HOME/jax_mok` (`~/.cache/jax_mok` without the variable): an object
whose keys are kinds of devices, as JAX names them, and whose values give each move its direction.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from absl import logging

MOVES = ("dispatch", "combine", "reverse_combine", "reverse_dispatch")
_DIRECTIONS = ("pull", "push")


def cache_path() -> Path:
    """The file, which need not be there."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jax_mok" / "directions.json"


def recall(device_kind: str) -> dict[str, str]:
    """The direction of each move that was fastest on such devices; empty if it is not known."""
    directions = _read().get(device_kind)
    if directions is None:
        return {}
    if not isinstance(directions, dict) or any(
        directions.get(move) not in _DIRECTIONS for move in MOVES
    ):
        logging.warning("%s: what it says of %s is not understood", cache_path(), device_kind)
        return {}
    return {move: directions[move] for move in MOVES}


def remember(device_kind: str, directions: dict[str, str]) -> Path:
    """Keeps them, beside what is known of other devices; returns where."""
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _read() | {device_kind: directions}
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(known, indent=1))
    unfinished.replace(path)  # no other process ever reads half a file
    return path


def _read() -> dict[str, Any]:
    try:
        known = json.loads(cache_path().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logging.warning("%s cannot be read: %s", cache_path(), error)
        return {}
    return known if isinstance(known, dict) else {}
