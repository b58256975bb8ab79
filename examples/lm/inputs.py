"""How the training run refuses bad input: a message instead of a traceback."""

import tempfile
from pathlib import Path


class InputError(ValueError):
    """Bad input: says what was given, what is allowed and what to do."""


def check_writable(directory: Path, given: str) -> None:
    """Makes the directory if need be; raises InputError if no file can be made in it.

    Args:
      directory: where files are to be written.
      given: the flag as the user gave it, for the message.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise InputError(
            f"{given} cannot be written: {error.strerror} ({directory}). "
            "Give a place that this user may create or write."
        ) from error
