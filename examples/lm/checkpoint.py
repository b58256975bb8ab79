"""Orbax checkpoints of a run: state, history, and the settings they belong to."""

import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from lm.history import History
from lm.inputs import InputError, check_writable

KEPT = 2


class Checkpoints:
    """The checkpoints in one directory, made with one set of settings.

    A save becomes visible by a rename when it is complete, so a run that dies while it saves
    leaves the checkpoint before.
    """

    def __init__(self, directory: str, settings: dict[str, Any]):
        """Opens the directory, which is made if need be.

        Args:
          directory: where the checkpoints lie.
          settings: what must agree for a run to be resumed, by flag name; values of JSON types.

        Raises:
          InputError: the directory cannot be written, or holds a run with other settings.
        """
        self._directory = Path(os.path.abspath(directory))
        self._settings = settings
        check_writable(self._directory, f"--checkpoint_dir={directory}")
        self._manager = ocp.CheckpointManager(
            self._directory, options=ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        )
        self._check_settings()

    @property
    def latest(self) -> int | None:
        """Steps done by the latest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, history: History) -> None:
        """Saves the state after `step` steps unless it is there; returns when it is on disk."""
        if step in (0, self.latest):
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                history=ocp.args.StandardSave(history.arrays()),
                settings=ocp.args.JsonSave(self._settings),
            ),
        )
        self._manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[Any, History]:
        """Returns the latest state, placed like `like` (arrays of the same tree), and history."""
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
        )
        restored = self._manager.restore(
            self.latest,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target), history=ocp.args.StandardRestore()
            ),
        )
        return restored["state"], History.from_arrays(restored["history"])

    def _check_settings(self) -> None:
        if self.latest is None:
            return
        found = self._manager.restore(
            self.latest, args=ocp.args.Composite(settings=ocp.args.JsonRestore())
        )["settings"]
        different = [
            f"{name} was {found.get(name)} and is now {value}"
            for name, value in self._settings.items()
            if found.get(name) != value
        ]
        if different:
            raise InputError(
                f"--checkpoint_dir={self._directory} holds a run with other settings: "
                f"{'; '.join(different)}. A run resumes with the settings it began with: "
                "give those, or another --checkpoint_dir to start anew."
            )
