"""The layer beside what a JAX user could write instead, in one run on the same devices.

The peers are those of `jax_mok.bench.peer_layers`, each checked against the plain layer before it
is timed. Times are those of a burst, see `jax_mok.bench.layer`.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_mok.bench.session
from jax_mok.bench import chains, torch_peer
from jax_mok.bench.chains import Chain, Operands, Programs, compile_side_by_side
from jax_mok.bench.peer_layers import grouped
from jax_mok.bench.peer_layers.capacity import capacity_layer, capacity_of, drop_rate, places_of
from jax_mok.bench.peer_layers.exchanged import exchanged_layer
from jax_mok.bench.peer_layers.gathered import gathered_layer
from jax_mok.bench.peer_layers.grouped import GroupedProduct, Layer, with_product
from jax_mok.bench.peers_check import errors_of
from jax_mok.bench.session import (
    NOTHING_OF_USE,
    Rates,
    Session,
    expect_writable,
    measure_shapes,
    open_session,
)
from jax_mok.bench.shapes import Shape
from jax_mok.bench.tables import open_report, passes_of, plus_minus, print_not_measured
from jax_mok.bench.tiles import best_tiles
from jax_mok.config import MoEConfig
from jax_mok.faults import check
from jax_mok.moe import moe_ffn

flags.adopt_module_key_flags(jax_mok.bench.session)
_PLOT = flags.DEFINE_string("plot", None, "also draw the times to this PNG")

OURS = "jax_mok"
_MOSAIC = "mosaic"
_TORCH = "torch, all-to-all, grouped_mm"
_CAPACITY_FACTOR = 1.25
_ROOM_MULTIPLE = 128
_TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}


class Peer(NamedTuple):
    """What is timed.

    Attributes:
      layer: as `moe_ffn`.
      slowness: a guess, how many times as long as our layer it takes.
      keeps: bool [n·T, K], the choices in the first turn that it does not drop; None: all.
    """

    layer: Layer
    slowness: float = 2.0
    keeps: np.ndarray | None = None


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if _PLOT.value:
        from jax_mok.bench import peers_plot  # before all measuring, if Matplotlib is missing

        expect_writable("--plot", _PLOT.value)
    # Drawn between rounds only, so that nothing runs beside what is timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        session = open_session(argv, progress)
        left_out = _not_measured(session)
        measured: dict[str, Any] = {**session.description(), "not_measured": left_out}
        run = functools.partial(measure, session, session.rates(), left_out)
        measure_shapes(session, measured, run, _summary)
    check()
    _report(measured)
    if _PLOT.value:
        peers_plot.draw(Path(_PLOT.value), measured)


def measure(
    session: Session, rates: Rates, left_out: list[str], name: str, shape: Shape
) -> dict[str, Any]:
    """The figures of one shape, per GPU.

    Returns:
      "layers": by name, seconds as median and quartiles, TFLOP/s, share of the plain product's
      speed. "bound_s" and "bound_share": what no layer can beat, None on CPU devices.

    Peers that fail or are wrong are told to `left_out` instead.

    Raises:
      RuntimeError: if our layer is among them.
    """
    mesh, scale = session.mesh, session.scale
    operands = chains.make_operands(shape, session.routes, mesh, scale.product_width)
    peers, notes = _peers(session, name, shape, operands)
    layer_s = scale.call_s + session.flops(shape) / scale.flops_per_s
    stopwatch = session.stopwatch(name, 1)
    programs = {
        peer_name: Programs(chains.run_layer, (operands,), (mesh, peer.layer, session.backward))
        for peer_name, peer in peers.items()
    }
    # Pallas's kernels take seconds each. Other programs, of which XLA may time variants, alone.
    compile_side_by_side(
        (programs[peer_name], calls)
        for peer_name in peers
        if peer_name.endswith(_MOSAIC)
        for calls in (1, *stopwatch.counts(layer_s * peers[peer_name].slowness))
    )
    for peer_name in list(peers):
        if problem := _problem(programs[peer_name], operands, mesh.size, peers[peer_name].keeps):
            if peer_name == OURS:
                raise RuntimeError(f"{name}: {problem}")
            del peers[peer_name]
            left_out.append(f"{name}, {peer_name}: {problem}")
    product = functools.partial(chains.run_in_order, operands, mesh, MoEConfig())
    repeated = {
        "product": Chain(
            lambda calls: product(("product",) * calls), scale.product_flops / scale.flops_per_s
        )
    }
    for peer_name, peer in peers.items():
        repeated[peer_name] = Chain(programs[peer_name], layer_s * peer.slowness)
    seconds = stopwatch.burst(repeated)
    product_rate = scale.product_flops / seconds["product"].median
    if session.on_gpus and torch_peer.is_there():
        try:
            seconds[_TORCH] = torch_peer.measure(
                shape, np.asarray(operands.ids), mesh.size, session.backward, session.rounds
            )
            notes[_TORCH] = "in processes of its own, ten calls a round"
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            left_out.append(f"{name}, {_TORCH}: {error}")
    least = session.bound(shape, np.asarray(operands.ids), seconds["product"], rates)
    figures = {}
    for peer_name in (each for each in (*peers, _TORCH) if each in seconds):
        rate = session.flops(shape) / seconds[peer_name].median
        figures[peer_name] = {
            "layer_s": seconds[peer_name]._asdict(),
            "tflops": rate / 1e12,
            "share": rate / product_rate,
            "times_ours": seconds[peer_name].median / seconds[OURS].median,
            "note": notes.get(peer_name, ""),
        }
    return {
        "layers": figures,
        "bound_s": least and least.seconds,
        "bound_share": least and session.flops(shape) / least.seconds / product_rate,
    }


def _peers(
    session: Session, name: str, shape: Shape, operands: Operands
) -> tuple[dict[str, Peer], dict[str, str]]:
    """What can be measured on these devices, and what is to be said of some."""
    ranks = session.mesh.size
    experts = shape.experts_of(ranks)
    ids = np.asarray(operands.ids)
    config = MoEConfig(timeout_s=20.0)
    peers = {OURS: Peer(functools.partial(moe_ffn, config=config), slowness=1.0)}
    products: dict[str, tuple[GroupedProduct, float]] = {"lax": (grouped.lax_product, 2.0)}
    notes: dict[str, str] = {}
    if session.on_gpus:
        tiles = best_tiles(session, name, shape, operands)
        products[_MOSAIC] = grouped.mosaic_product(tiles), 2.0
        products["lax"] = grouped.lax_product, 30.0
        notes[f"gathered, {_MOSAIC}"] = "tiles {}x{}, {}".format(*tiles)
    received_rows, pair_rows = _rooms(ids, ranks, experts)
    for product_name, (product, slowness) in products.items():
        exchanged = functools.partial(
            with_product(exchanged_layer, product), received_rows=received_rows
        )
        peers[f"gathered, {product_name}"] = Peer(with_product(gathered_layer, product), slowness)
        padded = functools.partial(exchanged, pair_rows=pair_rows)
        peers[f"padded all-to-all, {product_name}"] = Peer(padded, slowness)
        if session.on_gpus:
            peers[f"ragged all-to-all, {product_name}"] = Peer(exchanged, slowness)
    capacity = capacity_of(_CAPACITY_FACTOR, shape.tokens, shape.top_k, experts)
    ids_of_ranks = jnp.asarray(ids).reshape(-1, shape.tokens, shape.top_k)
    first = [places_of(ids_of_ranks[rank], experts) < capacity for rank in range(ranks)]
    peers["capacity"] = Peer(
        functools.partial(capacity_layer, capacity=capacity),
        keeps=np.concatenate(first).reshape(-1, shape.top_k),
    )
    dropped = np.mean([drop_rate(each, experts, capacity) for each in ids_of_ranks])
    notes["capacity"] = f"drops {dropped:.1%} of the choices"
    return peers, notes


def _rooms(ids: np.ndarray, ranks: int, experts: int) -> tuple[int, int]:
    """Rows that any rank receives, and that go from any rank to any other, at most; rounded up."""
    owners = ids.reshape(len(ids), ranks, -1) // (experts // ranks)
    counts = np.stack([np.count_nonzero(owners == rank, axis=2) for rank in range(ranks)], axis=2)
    return tuple(  # type: ignore[return-value]
        -(-int(most) // _ROOM_MULTIPLE) * _ROOM_MULTIPLE
        for most in (counts.sum(1).max(), counts.max())
    )


def _problem(programs: Programs, operands: Operands, ranks: int, keeps: np.ndarray | None) -> str:
    """Why not to time it, if anything."""
    try:
        errors = errors_of(programs(1), operands, ranks, keeps)
    except Exception as error:  # whatever the peer's code raises: the others are measured still
        return f"fails: {repr(error)[:200]}"
    tolerance = _TOLERANCE[str(operands.x.dtype)]
    wrong = [f"{what} by {error:.1e}" for what, error in errors.items() if not error < tolerance]
    return f"wrong: {', '.join(wrong)}" if wrong else ""


def _not_measured(session: Session) -> list[str]:
    if session.on_gpus:
        return []
    return [
        "ragged all-to-all, the Mosaic kernels and torch, which need GPUs",
        NOTHING_OF_USE,
    ]


def _summary(name: str, figures: dict[str, Any]) -> str:
    layers = figures["layers"].items()
    parts = [f"{peer} {row['layer_s']['median'] * 1e3:.3f} ms" for peer, row in layers]
    return f"{name}: {', '.join(parts)}"


def _report(measured: dict[str, Any]) -> None:
    console = open_report(measured, f"{measured['routes']} routes, {passes_of(measured)}")
    table = Table(
        caption=f"share: of {measured['product']}'s TFLOP/s; bound: see jax_mok.bench.bound",
        caption_justify="left",
    )
    for column in ("shape", "layer", "ms", "TFLOP/s", "share", "x ours", ""):
        table.add_column(column, justify="left" if column in ("layer", "") else "right")
    for name, figures in measured["shapes"].items():
        for peer, row in figures["layers"].items():
            seconds = row["layer_s"]
            table.add_row(
                name,
                peer,
                plus_minus(seconds),
                f"{row['tflops']:.0f}",
                f"{row['share']:.3f}",
                f"{row['times_ours']:.2f}",
                row["note"],
            )
        if figures["bound_s"]:
            bound_ms, share = f"{figures['bound_s'] * 1e3:.3f}", f"{figures['bound_share']:.3f}"
            times_ours = figures["bound_s"] / figures["layers"][OURS]["layer_s"]["median"]
            table.add_row(name, "bound", bound_ms, "", share, f"{times_ours:.2f}", "")
    console.print(table)
    print_not_measured(console, measured)
