"""The parts of the memory that a call needs, and their formulas.

`cuda/link/arena_layout.h`, `cuda/call/forward_workspace.cc` and `cuda/call/backward_workspace.cc`
lay the same parts out; the letters are those of `jax_mok.memory`.
"""

from __future__ import annotations

import dataclasses

from jax_mok.config import TILE_ROWS, MoEConfig

_ALIGNMENT = 256
_MOST_WAVES = 2**19  # of which an item's flags say its own
_MOST_ITEMS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Part:
    """Some arrays of one purpose.

    Attributes:
      name: what they hold.
      formula: their bytes before rounding up, in the letters of `jax_mok.memory`.
      bytes: their bytes.
    """

    name: str
    formula: str
    bytes: int


def forward_arena(
    config: MoEConfig, *, n: int, T: int, K: int, H: int, M: int, B: int, **_: int
) -> tuple[Part, ...]:
    """What ranks show each other in a forward pass."""
    return (
        _part("flags", "24·n", 24 * n),
        _part("routes", "4·n·T·K", 4 * n * T * K),
        _shown_rows(config.dispatch, "x", "received tokens", n=n, T=T, B=B),
        _output_rows(config, T=T, K=K, H=H, M=M),
    )


def forward_workspace(
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
    **_: int,
) -> tuple[Part, ...]:
    """What XLA provides while a forward pass runs."""
    e, tiles, composed = E // n, M // TILE_ROWS, bool(V)
    is_mx = config.precision == "mxfp8"
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
        if is_mx:
            parts.append(_part("rounded tokens", "2·T·H", 2 * T * H))
    else:
        parts.append(_part("routes", "4·n·T·K", 4 * n * T * K))
    if composed:
        parts.append(_part("dispatched rows", "2·R·H", 2 * R * H))
    if composed and config.combine == "push":
        parts.append(_part("rows to combine", "2·R·H", 2 * R * H))
    if n > 1 and (config.dispatch == "pull" or is_mx) and not composed:
        parts.append(_part("received tokens", "2·n·T·H", 2 * n * T * H))
        parts.append(_part("tokens to pull of tiles", "12·M/64", 4 * tiles, 8 * tiles))
    return tuple(parts)


def kept(*, n: int, T: int, K: int, E: int, I: int, M: int, P: int, **_: int) -> tuple[Part, ...]:
    """What a forward pass under a gradient hands to the backward pass, beside operands."""
    e = E // n
    return (
        _part("rows of the plan", "8·M", 4 * M, 4 * M),
        _part("tiles of the plan", "4·M/64", 4 * M // TILE_ROWS),
        _part("experts of the plan", "4·(2·E/n + 1)", 4 * (e + 1), 4 * e),
        _part("choices of the plan", "8·T·K", 4 * T * K, 4 * T * K),
        _part("counts of the plan", "20", 20),
        _part("pre-activations", "4·I·(P + 64)", 4 * I * (P + TILE_ROWS)),
    )


def backward_arena(
    config: MoEConfig, *, n: int, T: int, K: int, H: int, M: int, B: int, **_: int
) -> tuple[Part, ...]:
    """What ranks show each other under a gradient, in both passes."""
    pushed = config.combine == config.reverse_dispatch == "push"
    rows, letters = (T * K, "T·K") if pushed else (M, "M")
    return (
        _part("flags", "24·n", 24 * n),
        _part("routes, then router weights", "4·n·T·K", 4 * n * T * K),
        _shown_rows(config.dispatch, "x", "received tokens", n=n, T=T, B=B),
        _shown_rows(config.reverse_combine, "dy", "received dy", n=n, T=T, B=B),
        _part("output rows, then rows of dx", f"2·{letters}·H", 2 * rows * H),
        _part("gradients of router weights", f"4·{letters}", 4 * rows),
    )


def backward_workspace(
    config: MoEConfig,
    *,
    n: int,
    T: int,
    K: int,
    H: int,
    I: int,
    M: int,
    R: int,
    P: int,
    W: int,
    V: int,
    A: int,
    C: int,
    **_: int,
) -> tuple[Part, ...]:
    """What XLA provides while a backward pass runs."""
    tiles, composed = M // TILE_ROWS, config.composition == "composed"
    is_mx = config.precision == "mxfp8"
    parts = [
        _part("work list", "16·W", 16 * W),
        _part("waves", "32·(V + 1) + 36·V", 32 * (V + 1), 32 * V, 4 * V),
        _part("places of tokens", "16·M", 8 * M, 8 * M),
        _part("hidden ring", "2·R·I", 2 * R * I),
        _part("parts of router weights' gradients", "4·R·C", 4 * R * C),
        _part("counters of tiles", "8·M/64", 4 * tiles, 4 * tiles),
        _part("row of zeros", "2·H", 2 * H),
        _part("single words", "44", 8, 4, 4, 4, 4, 20),
        _part("next items", "16·V", 16 * V) if composed else _part("next item", "4", 4),
    ]
    if min(R, M) > P:  # else the gradients replace the pre-activations that are kept
        parts.append(_part("gradient ring", "4·R·I", 4 * R * I))
    if V > 1 and not _halves_are_in_kept(R=R, P=P, I=I, A=A):
        parts.append(_part("lower halves of partial sums", "131072·A", 2**17 * A))
    if n > 1:
        parts.append(_part("router weights", "4·n·T·K", 4 * n * T * K))
    else:
        rows, letters = _gradient_rows(config, T=T, K=K, M=M)
        parts.append(_part("rows of dx", f"2·{letters}·H", 2 * rows * H))
        parts.append(_part("gradients of router weights", f"4·{letters}", 4 * rows))
        if is_mx:
            parts.append(_part("rounded tokens and dy", "4·T·H", 2 * T * H, 2 * T * H))
    if composed:
        parts.append(_part("dispatched rows", "4·R·H", 2 * R * H, 2 * R * H))
    if composed and config.reverse_dispatch == "push":
        parts.append(_part("rows to push", "2·R·H", 2 * R * H))
    if n > 1 and not composed:
        pulled = [
            what
            for what, way in (("tokens", config.dispatch), ("dy", config.reverse_combine))
            if way == "pull" or is_mx
        ]
        parts += [_part(f"received {what}", "2·n·T·H", 2 * n * T * H) for what in pulled]
        if pulled:
            parts += [_part(f"pulled {what} of tiles", "4·M/64", 4 * tiles) for what in pulled]
            parts.append(_part("tokens to pull of tiles", "8·M/64", 8 * tiles))
            parts.append(_part("first rows of tokens", "4·n·T", 4 * n * T))
    return tuple(parts)


def row_bytes(config: MoEConfig, H: int) -> int:
    """Of a row of x or dy, as it goes from rank to rank; `token_bytes` of the arena's layout."""
    return 2 * H if config.precision == "operands" else ceil(H + H // 32, 16) * 16


def may_replay(*, M: int, P: int, R: int, I: int, A: int, V: int, **_: int) -> bool:
    """Whether a load may be such that a backward pass computes pre-activations anew."""
    return P < M or (V > 1 and _halves_are_in_kept(R=R, P=P, I=I, A=A))


def _halves_are_in_kept(*, R: int, P: int, I: int, A: int) -> bool:
    """Whether lower halves of partial sums replace pre-activations, which are then replayed."""
    return R + ceil(2**17 * A, 256 * I) * TILE_ROWS <= P


def _shown_rows(direction: str, pulled: str, pushed: str, *, n: int, T: int, B: int) -> Part:
    if direction == "pull":
        return _part(pulled, "T·B", T * B)
    return _part(pushed, "n·T·B", n * T * B)


def _gradient_rows(config: MoEConfig, *, T: int, K: int, M: int) -> tuple[int, str]:
    """Rows of dx that a rank keeps: its choices', or its experts'; and their formula."""
    return (T * K, "T·K") if config.reverse_dispatch == "push" else (M, "M")


def _output_rows(config: MoEConfig, *, T: int, K: int, H: int, M: int) -> Part:
    if config.combine == "push":
        return _part("home slots", "2·T·K·H", 2 * T * K * H)
    return _part("output rows", "2·M·H", 2 * M * H)


def _part(name: str, formula: str, *arrays: int) -> Part:
    return Part(name, formula, sum(ceil(array, _ALIGNMENT) * _ALIGNMENT for array in arrays))


def segments(choices: int) -> int:
    """Of the plan's sort of so many choices; `segments_of` in `cuda/sm90/plan.cu`."""
    return ceil(choices, 512 * ceil(ceil(choices, 128), 512))


def waves(tiles: int, ring_tiles: int) -> int:
    """The most of the forward pass; `wave_shape` in `cuda/sm90/work.h`."""
    return 1 if tiles <= ring_tiles else ceil(tiles, _step_tiles(ring_tiles))


def backward_counts(*, M: int, R: int, e: int, H: int, I: int) -> dict[str, int]:
    """C, V, X, A and W of a backward pass with `e` experts on a rank.

    Its waves are bounded as `cuda/sm90/backward_work.h` says.
    """
    tiles, ring_tiles = M // TILE_ROWS, R // TILE_ROWS
    V, X = 1, 0
    if tiles > ring_tiles:
        least = _step_tiles(ring_tiles)
        X = tiles // least
        V = min(2 * (tiles // (least + 1)) + 1, X + e)
    C = ceil(I, 128)
    columns = C + ceil(I, 256)
    A = ceil(H, 256) * columns
    W = (M // 256 + 2 * e) * (columns + ceil(H, 256)) + (e + X) * A
    return {"C": C, "V": V, "X": X, "A": A, "W": W}


def too_many(*, V: int, W: int, **_: int) -> str | None:
    """Why no kernel can number so many waves or items, as a message to the user; or None."""
    if V <= _MOST_WAVES and W <= _MOST_ITEMS:
        return None
    return (
        f"the backward pass might take {V} waves and {W} items of work, of {_MOST_WAVES} and "
        f"{_MOST_ITEMS} at most: use a larger MoEConfig.ring_rows, or fewer tokens a call"
    )


def _step_tiles(ring_tiles: int) -> int:
    """Of a step, whose last group of tiles may reach beyond it."""
    group = next((g for g in (48, 40, 36, 28, 24, 16, 12) if 2 * g <= ring_tiles), 4)
    return ring_tiles - group + 1


def ceil(value: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-value // divisor)
