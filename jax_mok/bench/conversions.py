"""Conversions to MXFP8 and from it on a GPU, in bytes per second of its memory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from rich.table import Table

from jax_mok import codec
from jax_mok.bench.tables import open_console, plus_minus
from jax_mok.bench.timing import difference, time_rounds
from jax_mok.quantize import MXArray

_PLATFORM = flags.DEFINE_enum(
    "platform", "cuda", ["cuda", "cpu"], "cpu only tries the measurement, at toy size"
)
_ROUNDS = flags.DEFINE_integer("rounds", 20, "timed rounds", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "also write the figures to this file")

# Experts of one of two GPUs, H and I: those of `shapes.SHAPES`, as many as give a gigabyte or so.
_SIZES = {
    "cuda": {"7168x2048": (16, 7168, 2048), "2048x768": (128, 2048, 768)},
    "cpu": {"toy": (2, 64, 96)},
}
_MANY, _FEW = 24, 8  # calls in a row
_NO_AXES: frozenset[str] = frozenset()


class Conversion(NamedTuple):
    """What is measured.

    Attributes:
      run: jitted, of one operand.
      operand: an array, or an MXArray.
    """

    run: Callable[[Any], Any]
    operand: Any


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    device = jax.devices(_PLATFORM.value)[0]
    measured: dict[str, Any] = {"kind": device.device_kind, "jax": jax.__version__, "rows": {}}
    with jax.default_device(device):
        for name, sizes in _SIZES[_PLATFORM.value].items():
            measured["rows"][name] = measure(sizes)
    report(measured)
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(measured, file)


def measure(sizes: tuple[int, int, int]) -> dict[str, dict[str, Any]]:
    """Seconds of each conversion of an array of the sizes, beside those of an addition."""
    wide = jax.random.normal(jax.random.key(0), sizes, jnp.float32)
    conversions = conversions_of(wide, wide.astype(jnp.bfloat16))
    programs = {
        (name, calls): functools.partial(_repeat, conversion, calls)
        for name, conversion in conversions.items()
        for calls in (_MANY, _FEW)
    }
    seconds = time_rounds(programs, _ROUNDS.value, warm_up=2)
    rows = {}
    for name, (run, operand) in conversions.items():
        arrays = jax.tree.leaves((operand, jax.eval_shape(run, operand)))
        moved = sum(array.size * array.dtype.itemsize for array in arrays)
        times = difference(seconds[name, _MANY], seconds[name, _FEW], _MANY - _FEW)
        rows[name] = {
            "seconds": times._asdict(),
            "bytes": moved,
            "bytes_per_s": moved / times.median,
        }
    return rows


def conversions_of(wide: jax.Array, half: jax.Array) -> dict[str, Conversion]:
    """By name; of a float32 array and the same one in bfloat16."""
    found = {"bfloat16 + 1": Conversion(jax.jit(lambda x: x + 1), half)}
    for axis in (-2, -1):
        array = jax.jit(functools.partial(codec.encode, axis=axis, axes=_NO_AXES))(half)
        for x in (wide, half):
            found[f"quantise {x.dtype}, axis {axis}"] = Conversion(
                jax.jit(functools.partial(codec.encode, axis=axis, axes=_NO_AXES)), x
            )
            found[f"round {x.dtype} to bfloat16, axis {axis}"] = Conversion(
                jax.jit(_round_to_bfloat16(axis)), x
            )
        found[f"de-quantise to bfloat16, axis {axis}"] = Conversion(jax.jit(_to_bfloat16), array)
    for x in (wide, half):
        found[f"round {x.dtype} to bfloat16, both axes"] = Conversion(jax.jit(_both_to_bfloat16), x)
    return found


def report(measured: dict[str, Any]) -> None:
    """Prints what was measured, as it is written to --json."""
    console = open_console()
    console.print(f"{measured['kind']}, JAX {measured['jax']}")
    table = Table()
    for column in ("experts' sizes", "conversion", "ms", "GB", "TB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, rows in measured["rows"].items():
        for conversion, row in rows.items():
            table.add_row(
                name,
                conversion,
                plus_minus(row["seconds"]),
                f"{row['bytes'] * 1e-9:.2f}",
                f"{row['bytes_per_s'] * 1e-12:.2f}",
            )
    console.print(table)


def _repeat(conversion: Conversion, calls: int, _: int) -> Any:
    result = None
    for _call in range(calls):
        result = conversion.run(conversion.operand)
    return result


def _round_to_bfloat16(axis: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: codec.rounded(x, axis, jnp.bfloat16, _NO_AXES)


def _both_to_bfloat16(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return codec.rounded_along_both(x, jnp.bfloat16, _NO_AXES)


def _to_bfloat16(array: MXArray) -> jax.Array:
    return codec.decode(array, jnp.bfloat16, _NO_AXES)
