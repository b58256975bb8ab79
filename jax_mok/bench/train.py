"""Training steps of a decoder with our layer, and with what a JAX user could write instead.

Attention is that of Qwen3-30B-A3B through cuDNN; weights and Adam's moments are float32,
activations bfloat16; the experts are those of --shapes. All runs begin with the same weights and
see the same tokens, so their first losses must agree. What a step takes with something free in the
place of the layer is what is not the layer's; the rest is its share.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_mok.bench.session
from jax_mok.bench import chains, train_model
from jax_mok.bench.peer_layers import grouped
from jax_mok.bench.peer_layers.exchanged import exchanged_layer
from jax_mok.bench.peer_layers.gathered import gathered_layer
from jax_mok.bench.peer_layers.grouped import GroupedProduct, Layer, with_product
from jax_mok.bench.session import NOTHING_OF_USE, Session, measure_shapes, open_session
from jax_mok.bench.shapes import Shape
from jax_mok.bench.tables import open_report, plus_minus, print_not_measured
from jax_mok.bench.tiles import best_tiles
from jax_mok.bench.timing import Times, summarise
from jax_mok.bench.train_model import Decoder, Programs
from jax_mok.config import MoEConfig
from jax_mok.faults import check
from jax_mok.moe import moe_ffn

flags.adopt_module_key_flags(jax_mok.bench.session)
_LAYERS = flags.DEFINE_integer("layers", 4, "layers of the decoder", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 10, "steps of a round", lower_bound=1)

OURS, NOTHING = "jax_mok", "without experts"
_FIRST_LOSSES = 4
_TOLERANCE = 2e-2  # of the first losses, relative; products round differently
_ROOM = 1.5  # of the peers' buffers, times a balanced load


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    # Drawn between rounds only, so that nothing runs beside what is timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        session = open_session(argv, progress)
        measured: dict[str, Any] = {
            **session.description(),
            "layers": _LAYERS.value,
            "not_measured": _not_measured(session),
        }
        measure_shapes(session, measured, functools.partial(measure, session), _summary)
    check()
    _report(measured)


def measure(session: Session, name: str, shape: Shape) -> dict[str, Any]:
    """By layer: seconds of a step, tokens a second, the layer's share of the step, first losses.

    Raises:
      RuntimeError: if the losses with our layer and with a peer's do not agree.
    """
    decoder = (train_model.qwen3 if session.on_gpus else train_model.toy)(shape, _LAYERS.value)
    layers = _layers(session, name, shape)
    task = session.progress.add_task(name, total=len(layers) * (1 + session.rounds))
    built = train_model.build(decoder, session.mesh, layers)
    session.say(f"{name}: compiles {len(layers)} decoders")
    with ThreadPoolExecutor() as pool:  # Pallas's kernels take seconds each; nothing runs meanwhile
        compiled = list(pool.map(Programs.compiled, built.values()))
    figures: dict[str, Any] = {}
    for layer_name, programs in zip(layers, compiled, strict=True):
        advance = functools.partial(session.progress.update, task, advance=1, refresh=True)
        session.say(f"{name}: trains with {layer_name}")
        losses, step_s = _train(session, decoder, programs, advance)
        session.say(f"{name}: {step_s.median * 1e3:.1f} ms a step, first losses {losses}")
        figures[layer_name] = {
            "step_s": step_s._asdict(),
            "tokens_per_s": shape.tokens * session.mesh.size / step_s.median,
            "first_losses": losses,
        }
    rest_s = figures[NOTHING]["step_s"]["median"]
    ours = np.array(figures[OURS]["first_losses"])
    for layer_name, each in figures.items():
        each["share_of_layer"] = 1 - rest_s / each["step_s"]["median"]
        each["times_ours"] = each["step_s"]["median"] / figures[OURS]["step_s"]["median"]
        difference = float(np.max(np.abs(np.array(each["first_losses"]) / ours - 1)))
        if layer_name != NOTHING and not difference <= _TOLERANCE:
            raise RuntimeError(
                f"{name}: the first losses are {each['first_losses']} with {layer_name} and "
                f"{ours.tolist()} with {OURS}"
            )
    return figures


def _layers(session: Session, name: str, shape: Shape) -> dict[str, Layer]:
    """What is measured, by name."""
    ranks = session.mesh.size
    rows = int(_ROOM * shape.tokens * shape.top_k)
    layers: dict[str, Layer] = {
        OURS: functools.partial(moe_ffn, config=MoEConfig(timeout_s=20.0)),
        NOTHING: train_model.without_experts,
    }
    product: GroupedProduct = grouped.lax_product
    if session.on_gpus:
        width = session.scale.product_width
        operands = chains.make_operands(shape, session.routes, session.mesh, width)
        product = grouped.mosaic_product(best_tiles(session, name, shape, operands))
    layers["gathered"] = _of_rounded(with_product(gathered_layer, product))
    exchanged = functools.partial(with_product(exchanged_layer, product), received_rows=rows)
    layers["padded all-to-all"] = _of_rounded(
        functools.partial(exchanged, pair_rows=int(_ROOM * shape.tokens * shape.top_k / ranks))
    )
    if session.on_gpus:
        layers["ragged all-to-all"] = _of_rounded(exchanged)
    return layers


def _of_rounded(layer: Layer) -> Layer:
    """The layer on weights rounded to bf16, as ours rounds them itself."""

    def rounded(
        x: jax.Array, ids: jax.Array, weights: jax.Array, *experts: jax.Array, axis_name: str
    ) -> jax.Array:
        narrow = (each.astype(jnp.bfloat16) for each in experts)
        return layer(x, ids, weights, *narrow, axis_name=axis_name)

    return rounded


def _train(
    session: Session, decoder: Decoder, programs: Programs, advance: Any
) -> tuple[list[float], Times]:
    """The first losses, and seconds of a step."""
    generator = np.random.default_rng(0)

    def tokens() -> jax.Array:
        drawn = generator.integers(0, decoder.vocabulary, programs.tokens.shape)
        return jax.device_put(drawn.astype(np.int32), programs.tokens.sharding)

    state = programs.init(0)
    losses = []
    for _ in range(_FIRST_LOSSES):
        state, loss = programs.step(state, tokens())
        losses.append(float(loss))
    advance()
    seconds = []
    for _ in range(session.rounds):
        batches = [tokens() for _ in range(_STEPS.value)]
        jax.block_until_ready((state, batches))
        start = time.perf_counter()
        for batch in batches:
            state, loss = programs.step(state, batch)
        jax.block_until_ready((state, loss))
        seconds.append((time.perf_counter() - start) / _STEPS.value)
        advance()
    return losses, summarise(seconds)


def _not_measured(session: Session) -> list[str]:
    if session.on_gpus:
        return []
    return [
        "ragged all-to-all and the Mosaic kernels, which need GPUs",
        NOTHING_OF_USE,
    ]


def _summary(name: str, figures: dict[str, Any]) -> str:
    parts = [f"{layer} {row['step_s']['median'] * 1e3:.1f} ms" for layer, row in figures.items()]
    return f"{name}: {', '.join(parts)}"


def _report(measured: dict[str, Any]) -> None:
    what = f"a decoder of {measured['layers']} layers, forward, backward and Adam"
    console = open_report(measured, what)
    table = Table()
    for column in ("experts", "layer", "ms a step", "tokens/s", "layer's share", "x ours"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for name, figures in measured["shapes"].items():
        for layer, row in figures.items():
            seconds = row["step_s"]
            table.add_row(
                name,
                layer,
                plus_minus(seconds, digits=".2f"),
                f"{row['tokens_per_s']:,.0f}",
                f"{row['share_of_layer']:.1%}",
                f"{row['times_ours']:.2f}",
            )
    console.print(table)
    print_not_measured(console, measured)
