"""The layer beside what a JAX user could write instead, in one run on the same devices.

The peers are those of `jax_mok.bench.peer_layers`, each checked against the plain layer before it
is timed. Times are those of a burst, see `jax_mok.bench.layer`. Every layer is one program, whose
calls wait in the devices' queues.
"""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_mok.bench.session
from jax_mok.bench import chains, torch_peer
from jax_mok.bench.chains import Chain, Operands, Queue, compile_side_by_side, layer_queue
from jax_mok.bench.peer_layers import grouped
from jax_mok.bench.peer_layers.capacity import capacity_layer, capacity_of, choices_kept
from jax_mok.bench.peer_layers.exchanged import exchanged_layer
from jax_mok.bench.peer_layers.gathered import gathered_layer
from jax_mok.bench.peer_layers.grouped import GroupedProduct, Layer, with_product
from jax_mok.bench.peers_check import Check
from jax_mok.bench.session import (
    NOTHING_OF_USE,
    Rates,
    Session,
    expect_writable,
    measure_shapes,
    open_session,
    write_json,
)
from jax_mok.bench.shapes import Shape
from jax_mok.bench.tables import figure, open_report, passes_of, plus_minus, print_not_measured
from jax_mok.bench.tiles import best_tiles
from jax_mok.bench.timing import Times
from jax_mok.config import MoEConfig
from jax_mok.faults import check
from jax_mok.moe import moe_ffn

flags.adopt_module_key_flags(jax_mok.bench.session)
_PLOT = flags.DEFINE_string("plot", None, "also draw the times to this PNG")
_TORCH_PEER = flags.DEFINE_bool("torch", True, "also measure torch, if it can be imported")

OURS = "jax_mok"
_MOSAIC = "mosaic"
_TORCH = "torch, all-to-all, grouped_mm"
_CAPACITY_FACTOR = 1.25
_ROOM_MULTIPLE = 128
_SLOW_S = 0.05  # a layer whose call takes longer is timed in few rounds
_SLOW_ROUNDS = 3
# The products of `lax.ragged_dot` take so long that to try many kinds of each takes minutes.
_UNTRIED = {**chains.CUBLAS, "xla_gpu_autotune_level": 0}
_MEMORY = 0.9  # of what is free, a program may ask for
_TOLERANCE = 2e-2  # of bf16


class Peer(NamedTuple):
    """What is timed.

    Attributes:
      layer: as `moe_ffn`.
      keeps: bool [n·T, K], the choices in the first turn that it does not drop; None: all.
      options: of XLA's compiler.
    """

    layer: Layer
    keeps: np.ndarray | None = None
    options: Mapping[str, Any] = chains.CUBLAS


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
        rates = session.rates()
        scale = session.scale
        product = chains.product_chain(
            session.mesh, scale.product_width, scale.product_flops / scale.flops_per_s
        )
        run = functools.partial(measure, session, rates, product, left_out)
        measure_shapes(session, measured, run, _summary)
        if session.on_gpus and torch_peer.is_there() and _TORCH_PEER.value:
            _add_torch(session, measured)
    check()
    _report(measured)
    if _PLOT.value:
        peers_plot.draw(Path(_PLOT.value), measured)


def measure(
    session: Session,
    rates: Rates,
    product: Chain,
    left_out: list[str],
    name: str,
    shape: Shape,
) -> dict[str, Any]:
    """The figures of one shape, per GPU.

    Returns:
      "layers": by name, seconds as median and quartiles, TFLOP/s, share of the plain product's
      speed. "product_s": of that. "bound_s" and "bound_share": what no layer can beat, None on CPU
      devices.

    Peers that fail or are wrong are told to `left_out` instead.

    Raises:
      RuntimeError: if our layer is among them.
    """
    session.say(f"{name}: draws operands")
    operands = chains.make_operands(shape, session.routes, session.mesh, 1)
    peers, notes = _peers(session, name, shape, operands)
    queues = {
        peer_name: layer_queue(operands, session.mesh, peer.layer, session.backward, peer.options)
        for peer_name, peer in peers.items()
    }
    right = Check(operands, session.mesh, session.backward)
    session.say(f"{name}: compiles {len(queues)} layers and the plain one")
    compile_side_by_side([*queues.values(), right.queue])
    quick: dict[str, Chain] = {"product": product}
    slow: dict[str, Chain] = {}
    for peer_name, peer in peers.items():
        session.say(f"{name}: checks {peer_name}")
        if problem := _problem(queues[peer_name], right, session, peer.keeps):
            if peer_name == OURS:
                raise RuntimeError(f"{name}: {problem}")
            left_out.append(f"{name}, {peer_name}: {problem}")
            session.say(left_out[-1])
            continue
        call_s = min(_call_s(queues[peer_name]) for _ in range(3))
        chains_of_its_kind = slow if call_s > _SLOW_S and peer_name != OURS else quick
        chains_of_its_kind[peer_name] = Chain(queues[peer_name], call_s)
    session.say(f"{name}: times {', '.join(quick)}")
    seconds = session.stopwatch(name, 1, warm_up=1).burst(quick)
    if slow:
        session.say(f"{name}: times {', '.join(slow)}")
        watch = session.stopwatch(f"{name}, slow", 1, rounds=_SLOW_ROUNDS, warm_up=0)
        seconds |= watch.burst(slow)
        notes |= {peer_name: f"{_SLOW_ROUNDS} rounds" for peer_name in slow}
    least = session.bound(shape, np.asarray(operands.ids), seconds["product"], rates)
    product_rate = session.scale.product_flops / seconds["product"].median
    figures: dict[str, Any] = {
        "layers": {},
        "product_s": seconds["product"]._asdict(),
        "bound_s": least and least.seconds,
        "bound_share": least and session.flops(shape) / least.seconds / product_rate,
    }
    for peer_name in (each for each in peers if each in seconds):
        _add_row(session, shape, figures, peer_name, seconds[peer_name], notes.get(peer_name, ""))
    return figures


def _add_row(
    session: Session,
    shape: Shape,
    figures: dict[str, Any],
    name: str,
    seconds: Times,
    note: str,
) -> None:
    layers, product_s = figures["layers"], figures["product_s"]["median"]
    rate = session.flops(shape) / seconds.median
    ours_s = layers[OURS]["layer_s"]["median"] if layers else seconds.median
    layers[name] = {
        "layer_s": seconds._asdict(),
        "tflops": rate / 1e12,
        "share": rate * product_s / session.scale.product_flops,
        "times_ours": seconds.median / ours_s,
        "note": note,
    }


def _add_torch(session: Session, measured: dict[str, Any]) -> None:
    """The rows of torch, after all others: its processes take long to begin."""
    for name, shape in session.shapes.items():
        session.say(f"{name}: times torch")
        routes = chains.draw_turns(shape, session.routes, session.mesh.size)
        try:
            seconds = torch_peer.measure(
                shape, routes, session.mesh.size, session.backward, session.rounds
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            measured["not_measured"].append(f"{name}, {_TORCH}: {error}")
            continue
        note = "in processes of its own, ten calls a round"
        _add_row(session, shape, measured["shapes"][name], _TORCH, seconds, note)
        write_json(measured)


def _peers(
    session: Session, name: str, shape: Shape, operands: Operands
) -> tuple[dict[str, Peer], dict[str, str]]:
    """What can be measured on these devices, and what is to be said of some."""
    ranks = session.mesh.size
    experts = shape.experts_of(ranks)
    ids = np.asarray(operands.ids)
    config = MoEConfig(timeout_s=20.0)
    peers = {OURS: Peer(functools.partial(moe_ffn, config=config))}
    notes: dict[str, str] = {}
    received_rows, pair_rows = _rooms(ids, ranks, experts)

    def add(product_name: str, product: GroupedProduct, kinds: Sequence[str], **more: Any) -> None:
        ragged = functools.partial(
            with_product(exchanged_layer, product), received_rows=received_rows
        )
        layers: dict[str, Layer] = {
            "gathered": with_product(gathered_layer, product),
            "padded all-to-all": functools.partial(ragged, pair_rows=pair_rows),
            "ragged all-to-all": ragged,
        }
        for kind in kinds:
            peers[f"{kind}, {product_name}"] = Peer(layers[kind], **more)

    if session.on_gpus:
        tiles = best_tiles(session, name, shape, operands)
        kinds = ("gathered", "padded all-to-all", "ragged all-to-all")
        add(_MOSAIC, grouped.mosaic_product(tiles), kinds)
        notes = {
            f"{kind}, {_MOSAIC}": "tiles {}x{}, {}, {}x{}".format(*tiles) for kind in kinds[:1]
        }
    else:
        add("lax", grouped.lax_product, ("gathered", "padded all-to-all"))
    capacity = capacity_of(_CAPACITY_FACTOR, shape.tokens, shape.top_k, experts)
    kept = np.stack(
        [
            choices_kept(of_rank, experts, capacity)
            for of_rank in ids.reshape(-1, shape.tokens, shape.top_k)
        ]
    )
    peers["capacity"] = Peer(
        functools.partial(capacity_layer, capacity=capacity),
        keeps=kept[:ranks].reshape(-1, shape.top_k),
    )
    notes["capacity"] = f"drops {1 - kept.mean():.1%} of the choices"
    if session.on_gpus:
        # Every row with every expert of the rank, so with the fewest rows only.
        add("lax", grouped.lax_product, ("ragged all-to-all",), options=_UNTRIED)
    return peers, notes


def _rooms(ids: np.ndarray, ranks: int, experts: int) -> tuple[int, int]:
    """Rows that any rank receives, and that go from any rank to any other, at most; rounded up."""
    owners = ids.reshape(len(ids), ranks, -1) // (experts // ranks)
    counts = np.stack([np.count_nonzero(owners == rank, axis=2) for rank in range(ranks)], axis=2)
    return tuple(  # type: ignore[return-value]
        -(-int(most) // _ROOM_MULTIPLE) * _ROOM_MULTIPLE
        for most in (counts.sum(1).max(), counts.max())
    )


def _problem(queue: Queue, right: Check, session: Session, keeps: np.ndarray | None) -> str:
    """Why not to time it, if anything."""
    try:
        if problem := _lacks_memory(queue.program, session.mesh):
            return problem
        results = jax.block_until_ready(queue(1))
        errors = right.errors_of(results, keeps)
    except Exception as error:  # whatever the peer's code raises: the others are measured still
        return f"fails: {repr(error)[:200]}"
    wrong = [f"{what} by {error:.1e}" for what, error in errors.items() if not error < _TOLERANCE]
    return f"wrong: {', '.join(wrong)}" if wrong else ""


def _call_s(queue: Queue) -> float:
    """What a call takes, with its start on the host: a guess."""
    start = time.perf_counter()
    jax.block_until_ready(queue(1))
    return time.perf_counter() - start


def _lacks_memory(program: jax.stages.Compiled, mesh: Mesh) -> str:
    """Why not to run it, if anything: a device without room would let the others wait for it."""
    needs = program.memory_analysis()
    if needs is None:
        return ""
    bytes_needed = needs.temp_size_in_bytes + needs.output_size_in_bytes
    for device in mesh.devices.flat:
        memory = device.memory_stats()
        if memory and bytes_needed > _MEMORY * (memory["bytes_limit"] - memory["bytes_in_use"]):
            return f"needs {bytes_needed / 2**30:.0f} GiB"
    return ""


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
                figure(row["tflops"], ".0f"),
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
