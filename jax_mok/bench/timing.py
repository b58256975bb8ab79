"""Timing of compiled calls beside each other."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class Times(NamedTuple):
    """Seconds: the median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float


def time_interleaved(calls: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, Times]:
    """Times calls in shuffled order within each round, so that drifts hit all of them alike.

    Args:
      calls: by name, a function of the round's number that returns JAX arrays to wait for.
      rounds: how many rounds to time, at least 2, after one that is not counted.

    Returns:
      The times of each call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    for turn in range(rounds + 1):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(calls[name](turn))
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: _summarise(values) for name, values in seconds.items()}


def _summarise(values: list[float]) -> Times:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Times(median, low, high)
