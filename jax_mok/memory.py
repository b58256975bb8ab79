"""The memory that a call needs on each GPU, beside its operands and results.

With n ranks, T tokens a rank, K choices a token, E experts of all ranks, widths H and I:

    M  rows that a rank may have to take: ⌊(n·T·K + 63·min(E/n, n·T·K)) / 64⌋ · 64
    R  rows of the ring: `MoEConfig.ring_rows`, at least 256
    S  segments of the plan's sort: ⌈n·T·K / s⌉ of s = 512·⌈⌈n·T·K / 128⌉ / 512⌉ choices
    W  items of work: ⌊M/256⌋·(⌈I/128⌉ + ⌈H/256⌉) + 2·E/n·(⌈I/256⌉ + ⌈H/512⌉)
    V  waves, if composed: 1 if M ≤ R, else ⌈M/64 / (R/64 − g + 1)⌉, g being the largest of 48, 40,
       36, 28, 24, 16 and 12 tiles of which the ring holds two, else 4

The parts and their formulas are those of `_arena` and `_workspace` below; every array is rounded up
to 256 bytes. `cuda/link/arena_layout.h` and `cuda/call/workspace.cc` lay the same parts out.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from jax_mok.config import TILE_ROWS, MoEConfig, config_or_default
from jax_mok.errors import MoEInputError
from jax_mok.gpu import MOST_EXPERTS, WIDTH_MULTIPLE, ring_rows
from jax_mok.layout import make_layout

_ALIGNMENT = 256
_MIB = 2**20
_LEGEND = """\
n ranks of T tokens with K choices each; E experts of all ranks, widths H and I
M most rows of a rank, R rows of the ring, S segments of the plan's sort, W items of work"""


@dataclasses.dataclass(frozen=True)
class Part:
    """Some arrays of one purpose.

    Attributes:
      name: what they hold.
      formula: their bytes before rounding up, in the letters of this module.
      bytes: their bytes.
    """

    name: str
    formula: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one rank needs; `print` it for a table.

    Attributes:
      sizes: the values of the formulas' letters.
      arena: what ranks show each other, nothing for one rank. Taken outside XLA's pool when the
        first call of such sizes is run, and kept by the process for all calls of these sizes.
      workspace: XLA's, while a call runs; the calls of a program can share it.
    """

    sizes: dict[str, int]
    arena: tuple[Part, ...]
    workspace: tuple[Part, ...]

    @property
    def arena_bytes(self) -> int:
        """Of all parts of the arena."""
        return sum(part.bytes for part in self.arena)

    @property
    def workspace_bytes(self) -> int:
        """Of all parts of the workspace."""
        return sum(part.bytes for part in self.workspace)

    @property
    def total_bytes(self) -> int:
        """Of arena and workspace."""
        return self.arena_bytes + self.workspace_bytes

    def __str__(self) -> str:
        """A table of the parts in MiB, with their formulas in bytes and what their letters mean."""
        rows = [("forward pass, on each GPU", "MiB", "bytes, each array rounded up to 256")]
        for name, parts in (("arena", self.arena), ("workspace", self.workspace)):
            rows += [(f"  {part.name}", _mib(part.bytes), part.formula) for part in parts]
            rows.append((name, _mib(sum(part.bytes for part in parts)), ""))
        rows.append(("total", _mib(self.total_bytes), ""))
        names, mibs = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"{name:<{names}}  {mib:>{mibs}}  {formula}" for name, mib, formula in rows]
        sizes = " ".join(f"{letter}={value}" for letter, value in self.sizes.items())
        return "\n".join([sizes, _LEGEND, *(line.rstrip() for line in lines)])


def memory(
    config: MoEConfig | None = None,
    *,
    ranks: int,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
) -> Memory:
    """The memory that the layer's forward pass needs on each GPU, beside operands and results.

    It is that of the fused composition; all that the collective one needs is XLA's. And that of a
    call outside `jax.grad`: under a gradient rows, tiles, experts and choices of the plan are no
    part of the workspace but results, kept for the backward pass, as are the order of pulls (4·M)
    and the pre-activations. The function runs anywhere: neither GPUs nor their kernels are asked.

    Args:
      config: the layer's options; `ring_rows`, `chunk_rows`, `dispatch`, `combine` and
        `composition` change the memory.
      ranks: size of the mesh axis over which experts are partitioned.
      tokens: tokens of each rank.
      top_k: choices of each token.
      experts: experts of all ranks.
      hidden: width H of a token, a multiple of 64.
      inner: width I of an expert, a multiple of 64.

    Returns:
      The bytes of every part.

    Raises:
      MoEInputError: for sizes that the GPU kernels cannot take.
    """
    n, T, K = _whole("ranks", ranks), _whole("tokens", tokens), _whole("top_k", top_k)
    E = _whole("experts", experts)
    H, I = _whole("hidden", hidden, WIDTH_MULTIPLE), _whole("inner", inner, WIDTH_MULTIPLE)
    if E % n:
        raise MoEInputError(f"{E} experts cannot be divided among {n} ranks: use a multiple of {n}")
    if E > MOST_EXPERTS:
        raise MoEInputError(
            f"the plan of {E} experts does not fit a block's shared memory: use at most "
            f"{MOST_EXPERTS}"
        )
    config = config_or_default(config)
    layout = make_layout(config, ranks=n, tokens=T, top_k=K, experts=E)
    M, R = layout.max_rows, ring_rows(layout)
    S = _segments(n * T * K)
    W = M // 256 * (_ceil(I, 128) + _ceil(H, 256)) + 2 * E // n * (_ceil(I, 256) + _ceil(H, 512))
    sizes = {"n": n, "T": T, "K": K, "E": E, "H": H, "I": I, "M": M, "R": R, "S": S, "W": W}
    if config.composition == "composed":
        sizes["V"] = _waves(M // TILE_ROWS, R // TILE_ROWS)
    arena = _arena(config, **sizes) if n > 1 else ()
    return Memory(sizes, arena, _workspace(config, **sizes))


def _arena(
    config: MoEConfig, *, n: int, T: int, K: int, H: int, M: int, **_: int
) -> tuple[Part, ...]:
    return (
        _part("flags", "16·n", 16 * n),
        _part("routes", "4·n·T·K", 4 * n * T * K),
        _part("x", "2·T·H", 2 * T * H)
        if config.dispatch == "pull"
        else _part("received tokens", "2·n·T·H", 2 * n * T * H),
        _output_rows(config, T=T, K=K, H=H, M=M),
    )


def _workspace(
    config: MoEConfig,
    *,
    n: int,
    T: int,
    K: int,
    E: int,
    H: int,
    I: int,
    M: int,
    R: int,
    S: int,
    W: int,
    V: int = 0,
) -> tuple[Part, ...]:
    e, tiles, composed = E // n, M // TILE_ROWS, bool(V)
    parts = [
        _part("rows of the plan", "4·M", 4 * M),
        _part("tiles of the plan", "4·M/64", 4 * tiles),
        _part("experts of the plan", "4·(2·E/n + 1)", 4 * (e + 1), 4 * e),
        _part("choices of the plan", "8·T·K", 4 * T * K, 4 * T * K),
        _part("scratch of the plan", "4·S·(E + 2)", 4 * S * (E + 2)),
        _part("work list", "16·W", 16 * W),
        _part("counters of tiles", "8·M/64", 4 * tiles, 4 * tiles),
        _part("hidden ring", "2·R·I", 2 * R * I),
        _part("row of zeros", "2·H", 2 * H),
        _part("single words", "40", 20, 8, 4, 4, 4),
        _part("waves", "32·V", 24 * V, 8 * V) if composed else _part("next item", "4", 4),
    ]
    if n == 1:
        parts.append(_output_rows(config, T=T, K=K, H=H, M=M))
    else:
        parts.append(_part("routes", "4·n·T·K", 4 * n * T * K))
    if composed:
        parts.append(_part("dispatched rows", "2·R·H", 2 * R * H))
    if composed and config.combine == "push":
        parts.append(_part("rows to combine", "2·R·H", 2 * R * H))
    if n > 1 and config.dispatch == "pull" and not composed:
        parts.append(_part("received tokens", "2·n·T·H", 2 * n * T * H))
        parts.append(_part("tokens to pull of tiles", "12·M/64", 4 * tiles, 8 * tiles))
    return tuple(parts)


def _output_rows(config: MoEConfig, *, T: int, K: int, H: int, M: int) -> Part:
    if config.combine == "push":
        return _part("home slots", "2·T·K·H", 2 * T * K * H)
    return _part("output rows", "2·M·H", 2 * M * H)


def _part(name: str, formula: str, *arrays: int) -> Part:
    return Part(name, formula, sum(_ceil(array, _ALIGNMENT) * _ALIGNMENT for array in arrays))


def _segments(choices: int) -> int:
    return _ceil(choices, 512 * _ceil(_ceil(choices, 128), 512))


def _waves(tiles: int, ring_tiles: int) -> int:
    """`wave_shape` in `cuda/sm90/work.h`: a step's last group of tiles may reach beyond it."""
    if tiles <= ring_tiles:
        return 1
    group = next((g for g in (48, 40, 36, 28, 24, 16, 12) if 2 * g <= ring_tiles), 4)
    return _ceil(tiles, ring_tiles - group + 1)


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _mib(count: int) -> str:
    return f"{count / _MIB:.2f}"


def _whole(name: str, value: Any, multiple: int = 1) -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or int(value) < 1 or int(value) % multiple:
        kind = "a positive integer" if multiple == 1 else f"a positive multiple of {multiple}"
        raise MoEInputError(f"{name}={value!r} must be {kind} on GPUs")
    return int(value)
