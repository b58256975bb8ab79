"""Times of chained calls in the two states of a GPU: after a pause, and without any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax_mok.bench.chains import Chain
from jax_mok.bench.timing import Times, difference, time_rounds

_WARM_UP = 4  # XLA replays a program without the host from the fourth run on
_PAUSE_S = 0.015


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """How long to measure.

    Attributes:
      burst_s: what the longer program of a burst takes, about.
      sustained_s: what the shortest of the sustained programs takes, about.
      rounds: timed rounds.
      after_round: called after each round.
    """

    burst_s: float
    sustained_s: float
    rounds: int
    after_round: Callable[[], None] = lambda: None

    @property
    def all_rounds(self) -> int:
        """Rounds of one measurement, those included that are not counted."""
        return _WARM_UP + self.rounds

    def burst(self, repeated: Mapping[str, Chain]) -> dict[str, Times]:
        """Seconds of one call of each chain, after a pause."""
        programs: dict[tuple[str, int], Callable[[int], Any]] = {}
        counts = {}
        for name, chain in repeated.items():
            many = max(2, round(self.burst_s / chain.guess_s))
            # A third of the calls, so that the shorter program runs in the same state of the chip.
            counts[name] = many, max(1, many // 3)
            for calls in counts[name]:
                programs[name, calls] = _bind(chain.run, calls)
        seconds = time_rounds(
            programs,
            self.rounds,
            warm_up=_WARM_UP,
            pause_s=_PAUSE_S,
            after_round=self.after_round,
        )
        return {
            name: difference(seconds[name, many], seconds[name, few], many - few)
            for name, (many, few) in counts.items()
        }

    def sustained(
        self, run: Callable[[tuple[str, ...]], Any], guesses_s: Mapping[str, float]
    ) -> dict[str, Times]:
        """Seconds of calls of two kinds in turn without a pause.

        Args:
          run: makes the named calls in that order and returns arrays to wait for.
          guesses_s: of both, a guess at the seconds of one call.

        Returns:
          By name, how much longer the turns take if all of them have its calls twice. A turn has
          as many calls of the shorter kind as take the time of one of the longer, so that both
          differences stand out of the scatter alike.
        """
        longest_s = max(guesses_s.values())
        calls = {name: round(longest_s / guess_s) for name, guess_s in guesses_s.items()}
        first, second = ((name,) * count for name, count in calls.items())
        orders = dict(zip(calls, (first + first + second, first + second + second), strict=True))
        turns = max(2, round(self.sustained_s / (2 * longest_s)))
        programs = {twice: _bind(run, order * turns) for twice, order in orders.items()}
        programs[""] = _bind(run, (first + second) * turns)
        seconds = time_rounds(programs, self.rounds, warm_up=_WARM_UP, after_round=self.after_round)
        return {
            name: difference(seconds[name], seconds[""], turns * count)
            for name, count in calls.items()
        }


def _bind(function: Callable[[Any], Any], argument: Any) -> Callable[[int], Any]:
    return lambda _: function(argument)
