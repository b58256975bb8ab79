"""The training loop: data in, history, progress and checkpoints out."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
from absl import logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lm.checkpoint import Checkpoints
from lm.corpus import Corpus
from lm.history import History
from lm.inputs import InputError
from lm.stop import StopRequest
from lm.training import Programs, State

VALIDATIONS = 10  # a run, evenly spaced
VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Schedule:
    """How many steps, on how much data each, and how often a checkpoint is saved."""

    steps: int
    batch: int
    context: int
    seed: int
    checkpoint_every: int


def train(
    programs: Programs,
    state: State,
    history: History,
    corpus: Corpus,
    checkpoints: Checkpoints,
    schedule: Schedule,
    stop: StopRequest,
) -> State:
    """Runs the steps that `history` lacks, or until `stop`; appends to `history`.

    Returns:
      The state after the last step; `state` itself is donated.

    Raises:
      InputError: the loss is no longer finite.
    """
    sizes = {"batch": schedule.batch, "context": schedule.context}
    held_out = jax.device_put(
        list(corpus.validation_batches(batches=VALIDATION_BATCHES, **sizes)),
        programs.batch_sharding,
    )
    interval = max(1, schedule.steps // VALIDATIONS)
    first = len(history)
    began = None
    with _progress_bar() as bar:
        task = bar.add_task("compiling", total=schedule.steps, completed=first, note="")
        for step in range(first, schedule.steps):
            if stop.made:
                break
            sequences = corpus.batch(step, seed=schedule.seed, **sizes)
            state, loss, shares = programs.step(
                state, jax.device_put(sequences, programs.batch_sharding)
            )
            # The first step compiles, so the rate counts from its end.
            began = began or time.monotonic()
            done = step + 1
            validation = None
            if done % interval == 0 or done == schedule.steps:
                losses = [float(programs.evaluate(state["params"], batch)) for batch in held_out]
                validation = float(np.mean(losses))
                logging.info(
                    "step %d: training loss %.3f, validation loss %.3f nats/byte",
                    done,
                    loss,
                    validation,
                )
            # Before a checkpoint would keep what cannot be trained any further.
            if not np.isfinite([float(loss), validation or 0.0]).all():
                raise InputError(
                    f"the loss is not finite at step {done}. Give a lower --learning_rate and "
                    "another --checkpoint_dir."
                )
            history.append(float(loss), np.asarray(shares), validation)
            if done % schedule.checkpoint_every == 0:
                checkpoints.save(done, state, history)
            trained = (step - first) * schedule.batch * schedule.context
            note = _note(history, trained / max(time.monotonic() - began, 1e-9))
            bar.update(task, completed=done, description="training", note=note)
    return state


def _note(history: History, rate: float) -> str:
    """The busiest expert of any layer is given as a multiple of an even share."""
    peak = history.shares[-1].max() * history.shares[-1].shape[-1]
    return f"loss {history.losses[-1]:.3f}, {rate:,.0f} tokens/s, peak load {peak:.1f}x"


@contextlib.contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A bar on stderr, which leaves stdout to the results."""
    handler = logging.get_absl_handler().python_handler
    before = handler.stream
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        # On a terminal sys.stderr is now a stream of the bar's that prints above it.
        handler.setStream(sys.stderr)
        try:
            yield bar
        finally:
            handler.setStream(before)
