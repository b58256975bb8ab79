"""Chooses a measurement by name."""

from __future__ import annotations

import importlib
import sys

from absl import app, flags

_MEASUREMENTS = {
    "bits": "the checksums of the layer's results on any number of devices",
    "cpu": "the layer on eight CPU devices beside plain products",
    "conversions": "the conversions to MXFP8 and back on a GPU, in bytes per second",
    "gpus": "the tests and the measurements on all GPUs of a machine within ten minutes",
    "layer": "the layer on GPUs, as shares of cuBLAS and of what no layer can beat",
    "link": "the link between two GPUs, and the layer with each move turned round",
    "peers": "the layer beside what one could write in JAX instead",
    "precision": "the layer in MXFP8 beside itself in bfloat16",
    "rack": "the layer on up to 72 GPUs, simulated",
    "scaling": "the layer by tokens, experts, imbalance and ring, beside the bound",
    "train": "training steps of a decoder with the layer, and with its peers",
    "timeline": "which SM of a GPU does what when inside the kernel",
}

# On two cores of an AMD EPYC with other jobs beside them.
_AT_TOY_SIZE = {
    "bits": "some seconds at toy size (--platform=cpu) on two cores",
    "cpu": "half a minute on two cores",
    "gpus": "two minutes at toy size (--platform=cpu) on two cores",
    "layer": "half a minute at toy size (--platform=cpu) on two cores",
    "link": "a minute at toy size (--platform=cpu) on two cores",
    "peers": "a minute at toy size (--platform=cpu) on two cores",
    "precision": "half a minute at toy size (--platform=cpu) on two cores",
    "rack": "some seconds at toy size (--shapes=toy) on two cores, at its own many minutes",
    "scaling": "three minutes at toy size (--platform=cpu) on two cores",
    "train": "three minutes at toy size (--platform=cpu) on two cores",
}


def main() -> None:
    """Runs `python -m jax_mok.bench <name> [flags]`."""
    usage = f"python -m jax_mok.bench {{{','.join(_MEASUREMENTS)}}} [--help] [flags]"
    if sys.argv[1:] == ["--help"]:
        print(usage, *(f"{name:>11}: {what}" for name, what in _MEASUREMENTS.items()), sep="\n")
        return
    if len(sys.argv) < 2 or sys.argv[1] not in _MEASUREMENTS:
        found = f"got {sys.argv[1]!r}; " if len(sys.argv) > 1 else ""
        sys.exit(f"{found}name a measurement: {usage}")
    if not any(flag.lstrip("-").startswith("help") for flag in sys.argv[2:]):
        # Before the imports, which take seconds themselves; the table comes at the end.
        takes = _AT_TOY_SIZE.get(sys.argv[1], "on a GPU only")
        print(f"{sys.argv[1]}: {_MEASUREMENTS[sys.argv[1]]}; {takes}", file=sys.stderr, flush=True)
    try:
        measurement = importlib.import_module(f"jax_mok.bench.{sys.argv.pop(1)}")
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: install what the measurements need with pip install '.[bench]'")
    flags.adopt_module_key_flags(measurement)
    sys.modules["__main__"].__doc__ = measurement.__doc__  # what --help begins with
    app.run(measurement.main)


if __name__ == "__main__":
    main()
