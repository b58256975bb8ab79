"""Reading parts of the tensors of a checkpoint in safetensors files, and writing such files.

The format, and that of the index over several files: https://huggingface.co/docs/safetensors and
the files `model.safetensors.index.json` that `transformers` writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jax_mok.checkpoints.formats import Matrix
from jax_mok.errors import MoEInputError

try:
    import safetensors
    import safetensors.numpy
except ImportError as error:
    raise ImportError(
        "jax_mok.checkpoints needs safetensors: run `pip install safetensors`, or install the "
        "package with its extra `checkpoints`"
    ) from error

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


class Tensors:
    """The tensors of a folder with one safetensors file, or several and an index.

    A context manager, which closes the files. Files are opened when a tensor of theirs is asked
    for, and of them no more is read than their headers and the parts that `read` returns.
    """

    def __init__(self, folder: pathlib.Path):
        """Reads the names.

        Raises:
          MoEInputError: if there is neither an index nor a single file, or it cannot be read.
        """
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._opened: dict[str, Any] = {}
        if (folder / _INDEX).is_file():
            self._file_of = _weight_map(folder)
        elif (folder / _SINGLE).is_file():
            self._file_of = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        else:
            raise MoEInputError(
                f"{folder} has neither {_INDEX} nor {_SINGLE}: give the folder of a checkpoint in "
                "the safetensors format"
            )

    def __enter__(self) -> Tensors:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the files."""
        self._stack.close()

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self._file_of.keys()

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compares with these, by the files' headers.

        Raises:
          MoEInputError: naming the first tensor of another shape.
        """
        for name, wanted in shapes.items():
            shape = tuple(self._slice(name).get_shape())
            if shape != wanted:
                raise MoEInputError(
                    f"{name} has shape {list(shape)}; {list(wanted)} fits what config.json says: "
                    "both must be those of one model"
                )

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of a tensor.

        Raises:
          MoEInputError: if it is not one of those that weights may have.
        """
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise MoEInputError(
                f"{name} has dtype {stored}; weights must be {', '.join(_DTYPES)}: convert the "
                "checkpoint to one of these first"
            )
        return np.dtype(_DTYPES[stored])

    def read(self, matrix: Matrix) -> np.ndarray:
        """A part of a tensor, and only that, from the file."""
        return self._slice(matrix.tensor)[matrix.part]

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            return self._open(file).get_slice(name)
        except safetensors.SafetensorError as error:
            raise MoEInputError(
                f"{self._folder / file} has no tensor {name!r}, though {_INDEX} says so: fetch the "
                "checkpoint again"
            ) from error

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self._folder / file
            try:
                opened = safetensors.safe_open(path, framework="np")
            except (OSError, safetensors.SafetensorError) as error:
                raise MoEInputError(
                    f"{path} cannot be read as a safetensors file ({error}): fetch it again"
                ) from error
            self._opened[file] = self._stack.enter_context(opened)
        return self._opened[file]


def find_folder(path: str | os.PathLike[str], advice: str) -> pathlib.Path:
    """The folder.

    Raises:
      MoEInputError: with the advice, if there is none.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise MoEInputError(f"path={str(path)!r} is no local folder: {advice}")
    return folder


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """An object in a JSON file.

    Raises:
      MoEInputError: if there is no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoEInputError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise MoEInputError(f"{path} has no JSON object but a {type(value).__name__}")
    return value


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file; `transformers` asks for the format's name in it."""
    dense = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(dense, path, metadata={"format": "pt"})


def check_absent(folder: pathlib.Path, file_of: Mapping[str, str]) -> None:
    """Refuses a folder whose tensors of these names are in other files already.

    Raises:
      MoEInputError: naming the file.
    """
    present = _weight_map(folder) if (folder / _INDEX).is_file() else {}
    others = {
        present[name] for name in file_of if present.get(name, file_of[name]) != file_of[name]
    }
    if (folder / _SINGLE).is_file():
        others.add(_SINGLE)
    if others:
        raise MoEInputError(
            f"{folder} has a checkpoint already, in {', '.join(sorted(others))}, which would go on "
            "holding the old weights: delete them, or save into a folder with no weights but those "
            "saved so before"
        )


def extend_index(folder: pathlib.Path, file_of: Mapping[str, str]) -> None:
    """Adds tensors to the folder's index, or makes it."""
    present = _weight_map(folder) if (folder / _INDEX).is_file() else {}
    index = {"metadata": {}, "weight_map": dict(sorted((present | dict(file_of)).items()))}
    # Replaced at once: another process may be reading it.
    new = folder / f"{_INDEX}.new"
    new.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    new.replace(folder / _INDEX)


def _weight_map(folder: pathlib.Path) -> dict[str, str]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise MoEInputError(f"{folder / _INDEX} has no object 'weight_map': fetch it again")
    return weight_map
