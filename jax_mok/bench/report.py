"""The table of `python -m jax_mok.bench layer`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from jax_mok.bench.tables import figure, open_report, passes_of, plus_minus, print_not_measured

_CAPTION = """\
share: of the product's TFLOP/s; bound: the larger of arithmetic and link, and its share of the
layer's time; plan: its kernels' share of it; weights: it over reading this GPU's experts once;
GiB: memory of a call beside its operands"""


def report(measured: dict[str, Any]) -> None:
    """Prints what `jax_mok.bench.layer` has measured, as it writes it to --json."""
    what = f"{measured['routes']} routes, composition {measured['composition']}"
    what += f", {passes_of(measured)}"
    if measured["apart"]:
        what += ", every GPU by itself"
    if measured["backward"]:
        what += f", residuals {measured['residuals']}"
    console = open_report(measured, what)
    table = Table(caption=_CAPTION, caption_justify="left")
    for column in ("shape", "mode", "ms", "TFLOP/s", measured["product"], "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("bound, ms", "of it", "plan", "weights", "GiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, modes in measured["shapes"].items():
        for mode, row in modes.items():
            table.add_row(name, mode, *_cells(row))
    console.print(table)
    for name in ("link", "memory"):
        rate = measured[f"{name}_bytes_per_s"]
        if rate is not None:
            console.print(f"{name}: {plus_minus(rate, 1e-9, '.0f')} GB/s a GPU")
    print_not_measured(console, measured)


def summary(name: str, modes: dict[str, Any]) -> str:
    """A line about one shape, for those who cannot wait for the table."""
    parts = [
        f"{mode} {row['layer_s']['median'] * 1e3:.3f} ms, share {row['share']:.3f}"
        for mode, row in modes.items()
    ]
    return f"{name}: {'; '.join(parts)}"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        plus_minus(row["layer_s"]),
        figure(row["tflops"], ".0f"),
        figure(row["product_tflops"], ".0f"),
        f"{row['share']:.3f}",
        "" if row["bound_s"] is None else f"{row['bound_s'] * 1e3:.3f}",
        "" if row["bound_s"] is None else f"{row['share_of_bound']:.3f}",
        f"{row['plan_share']:.1%}" if "plan_share" in row else "",
        f"{row['over_reading_weights']:.2f}" if "over_reading_weights" in row else "",
        f"{row['memory_bytes'] / 2**30:.2f}" if "memory_bytes" in row else "",
    ]
