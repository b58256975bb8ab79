"""The memory that a call needs on each GPU, beside its operands and results.

With n ranks, T tokens a rank, K choices a token, E experts of all ranks, widths H and I:

    M  rows that a rank may have to take: ⌊(n·T·K + 63·min(E/n, n·T·K)) / 64⌋ · 64
    R  rows of the ring: `MoEConfig.ring_rows`, at least 256
    S  segments of the plan's sort: ⌈n·T·K / s⌉ of s = 512·⌈⌈n·T·K / 128⌉ / 512⌉ choices
    B  bytes of a row of x or dy that goes from rank to rank: 2·H; in MXFP8 33·H/32, rounded up to
       16
    W  items of work: ⌊M/256⌋·(⌈I/128⌉ + ⌈H/256⌉) + 2·E/n·(⌈I/256⌉ + ⌈H/512⌉)
    V  waves, if composed: 1 if M ≤ R, else ⌈M/64 / (R/64 − g + 1)⌉, g being the largest of 48, 40,
       36, 28, 24, 16 and 12 tiles of which the ring holds two, else 4

and for a backward pass, which has waves always:

    P  rows whose pre-activations are kept: `MoEConfig.saved_rows`
    R  rows of the ring: if not composed, and `MoEConfig.ring_rows` does not say it, those of the
       forward pass divided by ⌈2·R·I / 384 MiB⌉, or by
       max(1, ⌊E/n / 2⌋) if that is less; rounded up to 64, at least 256
    C  blocks of 128 of I: ⌈I/128⌉
    A  items of the weights' gradients of an expert: ⌈H/256⌉·(C + ⌈I/256⌉)
    V  waves: 1 if M ≤ R, else 2·⌊M/64 / (R/64 − g + 2)⌋ + 1, or E/n + X if that is less
    X  waves whose end splits an expert: 0 if M ≤ R, else ⌊M/64 / (R/64 − g + 1)⌋
    W  items of work: (⌊M/256⌋ + 2·E/n)·(C + ⌈I/256⌉ + ⌈H/256⌉) + (E/n + X)·A

The parts and their formulas are those of `jax_mok.memory_parts`; every array is rounded up to 256
bytes.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from jax_mok.config import TILE_ROWS, MoEConfig, config_or_default
from jax_mok.errors import MoEInputError
from jax_mok.gpu import MOST_EXPERTS, WIDTH_MULTIPLE, backward_ring_rows, ring_rows
from jax_mok.layout import make_layout
from jax_mok.memory_parts import (
    Part,
    backward_arena,
    backward_counts,
    backward_workspace,
    ceil,
    forward_arena,
    forward_workspace,
    kept,
    row_bytes,
    segments,
    too_many,
    waves,
)

_MIB = 2**20
_LEGEND = {
    "n": "ranks",
    "T": "tokens of each",
    "K": "choices of a token",
    "E": "experts of all ranks",
    "H": "width of a token",
    "I": "width of an expert",
    "M": "most rows of a rank",
    "R": "rows of the ring",
    "B": "bytes of a token on the link",
    "S": "segments of the plan's sort",
    "P": "rows kept",
    "C": "blocks of 128 of I",
    "A": "items of an expert's gradients",
    "V": "waves",
    "X": "waves whose end splits an expert",
    "W": "items of work",
}


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one rank needs; `print` it for a table.

    Attributes:
      what: it is for.
      sizes: the values of the formulas' letters.
      kept: from the forward pass to the backward pass, by XLA.
      arena: what ranks show each other, nothing for one rank. Taken outside XLA's pool when the
        first call of such sizes is run, and kept by the process for all calls of these sizes. That
        of a backward pass is also that of the forward passes under a gradient.
      workspace: XLA's, while a call runs; the calls of a program can share it.
    """

    what: str
    sizes: dict[str, int]
    kept: tuple[Part, ...]
    arena: tuple[Part, ...]
    workspace: tuple[Part, ...]

    @property
    def kept_bytes(self) -> int:
        """Of all parts that are kept."""
        return sum(part.bytes for part in self.kept)

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
        """Of all of these."""
        return self.kept_bytes + self.arena_bytes + self.workspace_bytes

    def __str__(self) -> str:
        """A table of the parts in MiB, with their formulas in bytes and what their letters mean."""
        rows = [(f"{self.what}, on each GPU", "MiB", "bytes, each array rounded up to 256")]
        groups = {"kept": self.kept, "arena": self.arena, "workspace": self.workspace}
        for name, parts in groups.items():
            rows += [(f"  {part.name}", _mib(part.bytes), part.formula) for part in parts]
            if parts or name != "kept":
                rows.append((name, _mib(sum(part.bytes for part in parts)), ""))
        rows.append(("total", _mib(self.total_bytes), ""))
        names, mibs = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"{name:<{names}}  {mib:>{mibs}}  {formula}" for name, mib, formula in rows]
        sizes = " ".join(f"{letter}={value}" for letter, value in self.sizes.items())
        legend = ", ".join(f"{letter} {_LEGEND[letter]}" for letter in self.sizes)
        return "\n".join([sizes, legend, *(line.rstrip() for line in lines)])


def memory(
    config: MoEConfig | None = None,
    *,
    ranks: int,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    backward: bool = False,
) -> Memory:
    """The memory that a pass of the layer needs on each GPU, beside operands and results.

    It is that of the kernels; all that the collective composition needs is XLA's, and so are the
    weights that are rounded to MXFP8, unless they come so from `jax_mok.prepare_weights`. The
    forward pass is that outside `jax.grad`: under a gradient rows, tiles, experts and choices of
    the plan are no part of its workspace but results, kept for the backward pass, as is more, see
    `Memory.kept`; and its arena is that of the backward pass.
    The function runs anywhere: neither GPUs nor their kernels are asked.

    Args:
      config: the layer's options; `ring_rows`, `chunk_rows`, the directions, `precision` and
        `composition` change the memory, of the backward pass also `saved_rows`.
      ranks: size of the mesh axis over which experts are partitioned.
      tokens: tokens of each rank.
      top_k: choices of each token.
      experts: experts of all ranks.
      hidden: width H of a token, a multiple of 64.
      inner: width I of an expert, a multiple of 64.
      backward: the backward pass is meant.

    Returns:
      The bytes of every part.

    Raises:
      MoEInputError: for sizes that the GPU kernels cannot take.
    """
    n, T, K = _whole("ranks", ranks), _whole("tokens", tokens), _whole("top_k", top_k)
    E = _whole("experts", experts)
    H, I = _whole("hidden", hidden, WIDTH_MULTIPLE), _whole("inner", inner, WIDTH_MULTIPLE)
    if not isinstance(backward, bool):
        raise MoEInputError(f"backward={backward!r} must be True or False")
    if E % n:
        raise MoEInputError(f"{E} experts cannot be divided among {n} ranks: use a multiple of {n}")
    if E > MOST_EXPERTS:
        raise MoEInputError(
            f"the plan of {E} experts does not fit a block's shared memory: use at most "
            f"{MOST_EXPERTS}"
        )
    config = config_or_default(config)
    layout = make_layout(config, ranks=n, tokens=T, top_k=K, experts=E)
    M, R, e = layout.max_rows, ring_rows(layout), E // n
    sizes = {"n": n, "T": T, "K": K, "E": E, "H": H, "I": I, "M": M, "R": R}
    if n > 1:
        sizes["B"] = row_bytes(config, H)
    if backward:
        R = backward_ring_rows(config, layout, I)
        counts = backward_counts(M=M, R=R, e=e, H=H, I=I)
        if problem := too_many(**counts):
            raise MoEInputError(problem)
        sizes |= {"R": R, "P": layout.saved_rows, **counts}
        arena = backward_arena(config, **sizes) if n > 1 else ()
        return Memory(
            "backward pass", sizes, kept(**sizes), arena, backward_workspace(config, **sizes)
        )
    W = M // 256 * (ceil(I, 128) + ceil(H, 256)) + 2 * e * (ceil(I, 256) + ceil(H, 512))
    sizes |= {"S": segments(n * T * K), "W": W}
    if config.composition == "composed":
        sizes["V"] = waves(M // TILE_ROWS, R // TILE_ROWS)
    arena = forward_arena(config, **sizes) if n > 1 else ()
    return Memory("forward pass", sizes, (), arena, forward_workspace(config, **sizes))


def _whole(name: str, value: Any, multiple: int = 1) -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or int(value) < 1 or int(value) % multiple:
        kind = "a positive integer" if multiple == 1 else f"a positive multiple of {multiple}"
        raise MoEInputError(f"{name}={value!r} must be {kind} on GPUs")
    return int(value)


def _mib(count: int) -> str:
    return f"{count / _MIB:.2f}"
