"""What a run remembers of every step; it is stored in the checkpoint and drawn at the end."""

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class History:
    """One entry a step in each list; losses in nats per byte."""

    losses: list[float] = field(default_factory=list)
    shares: list[np.ndarray] = field(default_factory=list)  # of the routed choices: [layers, E]
    validation: list[float] = field(default_factory=list)  # NaN where it was not measured

    def __len__(self) -> int:
        """Steps done."""
        return len(self.losses)

    def append(self, loss: float, shares: np.ndarray, validation: float | None) -> None:
        """Adds a step; `validation` is None where it was not measured."""
        self.losses.append(loss)
        self.shares.append(shares)
        self.validation.append(math.nan if validation is None else validation)

    def measured(self) -> tuple[list[int], list[float]]:
        """Returns the numbers of steps after which the validation loss is known, and the losses."""
        known = [
            (step, loss) for step, loss in enumerate(self.validation, 1) if not math.isnan(loss)
        ]
        return [step for step, _ in known], [loss for _, loss in known]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the history as f32 arrays, for a checkpoint."""
        return {name: np.asarray(values, np.float32) for name, values in vars(self).items()}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> "History":
        """The inverse of `arrays`."""
        return cls(
            losses=[float(loss) for loss in arrays["losses"]],
            shares=list(np.asarray(arrays["shares"])),
            validation=[float(loss) for loss in arrays["validation"]],
        )
