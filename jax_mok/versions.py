"""The version of this package, and refusal of those of JAX that it was not built for."""

from __future__ import annotations

import importlib.metadata

import jax

_OLDEST = (0, 10, 2)
_FIRST_TOO_NEW = (0, 13, 0)


def check_jax_version(version: tuple[int, ...] = jax.__version_info__) -> None:
    """Raises ImportError unless 0.10.2 <= version < 0.13."""
    if not _OLDEST <= version < _FIRST_TOO_NEW:
        found = ".".join(map(str, version))
        raise ImportError(
            f"jax_mok works with JAX 0.10.2 up to 0.12, found {found}: "
            "pip install 'jax>=0.10.2,<0.13' and reinstall jax_mok"
        )


def package_version() -> str:
    """That of the installed package; "0+unknown" of a source tree that pip has not installed."""
    try:
        return importlib.metadata.version("jax_mok")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
