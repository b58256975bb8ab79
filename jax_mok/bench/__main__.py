"""Chooses a measurement by name."""

from __future__ import annotations

import importlib
import sys

from absl import app, flags

_NAMES = ("cpu", "layer", "link", "peers")


def main() -> None:
    """Runs `python -m jax_mok.bench <name> [flags]`."""
    usage = f"python -m jax_mok.bench {{{','.join(_NAMES)}}} [--help] [flags]"
    if sys.argv[1:] == ["--help"]:
        print(usage)
        return
    if len(sys.argv) < 2 or sys.argv[1] not in _NAMES:
        found = f"got {sys.argv[1]!r}; " if len(sys.argv) > 1 else ""
        sys.exit(f"{found}name a measurement: {usage}")
    try:
        measurement = importlib.import_module(f"jax_mok.bench.{sys.argv.pop(1)}")
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: install what the measurements need with pip install '.[bench]'")
    flags.adopt_module_key_flags(measurement)
    app.run(measurement.main)


if __name__ == "__main__":
    main()
