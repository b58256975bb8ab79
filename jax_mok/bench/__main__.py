"""Chooses a measurement by name."""

from __future__ import annotations

import importlib
import sys

from absl import app, flags

_MEASUREMENTS = {
    "cpu": "the layer on eight CPU devices beside plain products",
    "layer": "the layer on GPUs, as shares of cuBLAS and of what no layer can beat",
    "link": "the link between two GPUs, and the layer with each move turned round",
    "peers": "the layer beside what one could write in JAX instead",
    "rack": "the layer on up to 72 GPUs, simulated",
    "scaling": "the layer by tokens, experts, imbalance and ring, beside the bound",
    "train": "training steps of a decoder with the layer, and with its peers",
    "timeline": "which SM of a GPU does what when inside the kernel",
}


def main() -> None:
    """Runs `python -m jax_mok.bench <name> [flags]`."""
    usage = f"python -m jax_mok.bench {{{','.join(_MEASUREMENTS)}}} [--help] [flags]"
    if sys.argv[1:] == ["--help"]:
        print(usage, *(f"{name:>8}: {what}" for name, what in _MEASUREMENTS.items()), sep="\n")
        return
    if len(sys.argv) < 2 or sys.argv[1] not in _MEASUREMENTS:
        found = f"got {sys.argv[1]!r}; " if len(sys.argv) > 1 else ""
        sys.exit(f"{found}name a measurement: {usage}")
    try:
        measurement = importlib.import_module(f"jax_mok.bench.{sys.argv.pop(1)}")
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: install what the measurements need with pip install '.[bench]'")
    flags.adopt_module_key_flags(measurement)
    sys.modules["__main__"].__doc__ = measurement.__doc__  # what --help begins with
    app.run(measurement.main)


if __name__ == "__main__":
    main()
