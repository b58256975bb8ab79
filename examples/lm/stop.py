"""Ends a run between two steps when the user or the machine asks for it."""

import signal
from types import FrameType

from absl import logging


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a request; a second one acts at once.

    Attributes:
      made: whether there was one.
    """

    def __init__(self) -> None:
        """Takes over the two signals."""
        self.made = False
        self._previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.made = True
        logging.warning("Stopping after this step; then a checkpoint is saved.")
        for number, handler in self._previous.items():
            signal.signal(number, handler)
