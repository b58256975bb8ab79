"""Real text as bytes: the standard library's sources, or any file or directory."""

import random
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.inputs import InputError

# Ends the default corpus, so that it is about the same on every machine; a --corpus has no cap.
DEFAULT_MIB = 8
VALIDATION_SHARE = 0.05
# Test suites are left out: some distributions ship them and some do not.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from (`train`) and to be judged by (`validation`), both uint8 [N]."""

    name: str
    train: np.ndarray
    validation: np.ndarray

    @property
    def size(self) -> int:
        """Bytes in both parts."""
        return len(self.train) + len(self.validation)

    @property
    def fingerprint(self) -> int:
        """CRC-32 of all bytes: tells whether a checkpoint was trained on this corpus."""
        return zlib.crc32(self.validation.data, zlib.crc32(self.train.data))

    @property
    def unigram_entropy(self) -> float:
        """Nats per byte of the best model that ignores context."""
        counts = np.bincount(self.train, minlength=256) + np.bincount(
            self.validation, minlength=256
        )
        shares = counts[counts > 0] / self.size
        return float(-(shares * np.log(shares)).sum())

    def batch(self, step: int, *, batch: int, context: int, seed: int) -> np.ndarray:
        """Returns the sequences [batch, context + 1] of a step: a pure function of its arguments,
        which makes a resumed run see exactly the data an uninterrupted one would have seen."""
        generator = np.random.default_rng((seed, step))
        starts = generator.integers(0, len(self.train) - context, size=batch)
        return _windows(self.train, starts, context)

    def validation_batches(self, *, batches: int, batch: int, context: int) -> np.ndarray:
        """Returns [batches, batch, context + 1], evenly spread over the validation part."""
        starts = np.linspace(0, len(self.validation) - context - 1, batches * batch).astype(int)
        windows = _windows(self.validation, starts, context)
        return windows.reshape(batches, batch, context + 1)


def load(path: str | None, *, context: int) -> Corpus:
    """Reads the corpus and cuts off its last twentieth for validation.

    Files of a directory come in an order that is shuffled by a fixed seed, so that the cap and the
    validation part fall on a mixture of the packages and not on the end of the alphabet.

    Args:
      path: a file, a directory, or None for the standard library's sources.
      context: bytes a sequence predicts; each part must hold one sequence of `context + 1` bytes.

    Raises:
      InputError: the path does not exist or cannot be read, or the text is empty or too short.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        name = f"Python standard library ({root})"
        files, cap = _standard_library(root), DEFAULT_MIB * 2**20
    else:
        root, name = Path(path), path
        files, cap = _files(root), None
    data = np.frombuffer(_read(files, cap), dtype=np.uint8)
    if not len(data):
        raise InputError(
            f"the corpus {name} is empty ({len(files)} files, 0 bytes). "
            "Give --corpus a text file, or a directory that holds some."
        )
    sequence = context + 1
    held_out = max(int(len(data) * VALIDATION_SHARE), sequence)
    if len(data) - held_out < sequence:
        raise InputError(
            f"the corpus {name} has {len(data)} bytes; training and validation each need one "
            f"sequence of --context + 1 = {sequence} bytes, so {2 * sequence} together. "
            "Give a longer --corpus or a smaller --context."
        )
    return Corpus(name=name, train=data[:-held_out], validation=data[-held_out:])


def _windows(data: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def _standard_library(root: Path) -> list[Path]:
    sources = root.rglob("*.py")
    return _shuffled(
        (file for file in sources if SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts)),
        root,
    )


def _files(root: Path) -> list[Path]:
    if root.is_dir():
        return _shuffled((file for file in root.rglob("*") if file.is_file()), root)
    if root.exists():
        return [root]
    raise InputError(
        f"--corpus={root} does not exist. Give a text file or a directory, "
        "or leave --corpus out to train on the Python standard library's sources."
    )


def _shuffled(files: Iterable[Path], root: Path) -> list[Path]:
    ordered = sorted(files, key=lambda file: file.relative_to(root).as_posix())
    random.Random(0).shuffle(ordered)
    return ordered


def _read(files: list[Path], cap: int | None) -> bytes:
    parts, size = [], 0
    for file in files:
        try:
            parts.append(file.read_bytes())
        except OSError as error:
            raise InputError(
                f"cannot read {file} of the corpus: {error.strerror}. "
                "Make it readable or give another --corpus."
            ) from error
        size += len(parts[-1])
        if cap is not None and size >= cap:
            break
    return b"".join(parts)[:cap]
