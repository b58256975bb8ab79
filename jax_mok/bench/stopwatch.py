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
      warm_up: rounds before those.
    """

    burst_s: float
    sustained_s: float
    rounds: int
    after_round: Callable[[], None] = lambda: None
    warm_up: int = _WARM_UP

    @property
    def all_rounds(self) -> int:
        """Rounds of one measurement, those included that are not counted."""
        return self.warm_up + self.rounds

    def counts(self, guess_s: float) -> tuple[int, int]:
        """How many calls, of so many seconds, a burst's longer and shorter program make."""
        many = max(2, round(self.burst_s / guess_s))
        # A third of the calls, so that the shorter program runs in the same state of the chip.
        return many, max(1, many // 3)

    def burst(self, repeated: Mapping[str, Chain]) -> dict[str, Times]:
        """Seconds of one call of each chain, after a pause."""
        programs: dict[tuple[str, int], Callable[[int], Any]] = {}
        counts = {}
        for name, chain in repeated.items():
            counts[name] = self.counts(chain.guess_s)
            for calls in counts[name]:
                programs[name, calls] = _bind(chain.run, calls)
        seconds = time_rounds(
            programs,
            self.rounds,
            warm_up=self.warm_up,
            pause_s=_PAUSE_S,
            after_round=self.after_round,
        )
        return {
            name: difference(seconds[name, many], seconds[name, few], many - few)
            for name, (many, few) in counts.items()
        }

    def sustained(
        self,
        run: Callable[[tuple[str, ...]], Any],
        first: str,
        second: str,
        guesses_s: tuple[float, float],
    ) -> dict[str, Times]:
        """Seconds of two calls in turn without a pause.

        Args:
          run: makes the named calls in that order and returns arrays to wait for.
          first: name of a call.
          second: name of the other, of which a turn has as many as take the time of the first, but
            at least one: their difference would drown in the scatter of a longer turn.
          guesses_s: guesses at the seconds of both.

        Returns:
          By name, how much longer the turns take if all of them have its calls twice.
        """
        counts = {first: 1, second: max(1, round(guesses_s[0] / guesses_s[1]))}
        firsts, seconds = (first,), (second,) * counts[second]
        orders = {"": firsts + seconds, first: 2 * firsts + seconds, second: firsts + 2 * seconds}
        turns = max(2, round(self.sustained_s / (guesses_s[0] + counts[second] * guesses_s[1])))
        programs = {twice: _bind(run, order * turns) for twice, order in orders.items()}
        times = time_rounds(
            programs, self.rounds, warm_up=self.warm_up, after_round=self.after_round
        )
        return {
            name: difference(times[name], times[""], turns * count)
            for name, count in counts.items()
        }


def _bind(function: Callable[[Any], Any], argument: Any) -> Callable[[int], Any]:
    return lambda _: function(argument)
