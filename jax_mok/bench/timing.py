"""Timing of compiled calls beside each other."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

_Name = TypeVar("_Name", bound=Hashable)


class Times(NamedTuple):
    """Seconds: the median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float


def time_rounds(
    calls: Mapping[_Name, Callable[[int], Any]],
    rounds: int,
    *,
    warm_up: int = 1,
    pause_s: float = 0.0,
    after_round: Callable[[], None] = lambda: None,
) -> dict[_Name, list[float]]:
    """Times calls in shuffled order within each round, so that drifts hit all of them alike.

    Args:
      calls: by name, a function of the round's number that returns JAX arrays to wait for.
      rounds: how many rounds to time.
      warm_up: how many rounds come before them, not counted.
      pause_s: seconds of rest before each call.
      after_round: called after each round.

    Returns:
      The seconds of each call, round by round.
    """
    seconds: dict[_Name, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    for turn in range(warm_up + rounds):
        shuffle(order)
        for name in order:
            time.sleep(pause_s)
            start = time.perf_counter()
            jax.block_until_ready(calls[name](turn))
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
        after_round()
    return seconds


def time_interleaved(calls: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, Times]:
    """`time_rounds` with at least 2 rounds, summarised."""
    return {name: summarise(values) for name, values in time_rounds(calls, rounds).items()}


def difference(longer: list[float], shorter: list[float], calls: int) -> Times:
    """Seconds of one of the `calls` calls that a program has more than another, round by round."""
    return summarise([(a - b) / calls for a, b in zip(longer, shorter, strict=True)])


def summarise(samples: list[float]) -> Times:
    """Median and quartiles of at least 2 samples."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Times(median, low, high)
