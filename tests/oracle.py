"""The layer and its plan, written a second time as plain loops in float64 NumPy.

Nothing here comes from jax_mok: a mistake in the package cannot repeat itself in the oracle.
"""

from typing import NamedTuple

import numpy as np

ERROR_BLOCK = 64


class Inputs(NamedTuple):
    """One step of the layer on global arrays; T counts the tokens of all ranks."""

    x: np.ndarray  # [T, H]
    expert_ids: np.ndarray  # [T, K] int32
    expert_weights: np.ndarray  # [T, K] float32
    w_gate: np.ndarray  # [E, H, I]
    w_up: np.ndarray  # [E, H, I]
    w_down: np.ndarray  # [E, I, H]
    dy: np.ndarray  # [T, H]


class Outputs(NamedTuple):
    """The layer's result and the gradient of sum(y * dy) for each differentiable input."""

    y: np.ndarray
    dx: np.ndarray
    d_expert_weights: np.ndarray
    d_w_gate: np.ndarray
    d_w_up: np.ndarray
    d_w_down: np.ndarray


def layer(inputs: Inputs, clamp: float | None = None) -> Outputs:
    """Forward and backward of the whole layer, one choice of one token at a time."""
    limit = np.inf if clamp is None else clamp
    x, ids, weights, w_gate, w_up, w_down, dy = inputs
    x, weights, dy = x.astype(np.float64), weights.astype(np.float64), dy.astype(np.float64)
    w_gate, w_up, w_down = (w.astype(np.float64) for w in (w_gate, w_up, w_down))
    out = Outputs(*(np.zeros(a.shape) for a in (x, x, weights, w_gate, w_up, w_down)))

    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if not 0 <= e < len(w_gate):
                continue
            gate_in, up_in = x[t] @ w_gate[e], x[t] @ w_up[e]
            gate, up = np.minimum(gate_in, limit), np.clip(up_in, -limit, limit)
            sigmoid = 1.0 / (1.0 + np.exp(-gate))
            hidden = gate * sigmoid * up
            row = hidden @ w_down[e]
            out.y[t] += weights[t, k] * row

            d_row = weights[t, k] * dy[t]
            d_hidden = w_down[e] @ d_row
            d_gate = d_hidden * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * (gate_in < limit)
            d_up = d_hidden * gate * sigmoid * (np.abs(up_in) < limit)
            out.d_expert_weights[t, k] = dy[t] @ row
            out.dx[t] += w_gate[e] @ d_gate + w_up[e] @ d_up
            out.d_w_gate[e] += np.outer(x[t], d_gate)
            out.d_w_up[e] += np.outer(x[t], d_up)
            out.d_w_down[e] += np.outer(hidden, d_row)
    return out


def block_errors(actual: np.ndarray, expected: np.ndarray, rows: int) -> np.ndarray:
    """Relative Frobenius error of each block of `rows` leading rows.

    A row whose true value is zero must be exactly zero: otherwise its block's error is infinite.
    """
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    actual = actual.astype(np.float64)
    errors = []
    for start in range(0, len(expected), rows):
        a, b = actual[start : start + rows], expected[start : start + rows]
        zero_rows = ~b.reshape(len(b), -1).any(axis=1)
        if np.any(a[zero_rows]):
            errors.append(np.inf)
        elif zero_rows.all():
            errors.append(0.0)
        else:
            errors.append(np.linalg.norm(a - b) / np.linalg.norm(b))
    return np.array(errors)


def assert_close(actual: Outputs, expected: Outputs, tolerance: float, context: str = "") -> None:
    """Holds every expert's weight gradient and every row block of the rest to the tolerance."""
    for name in Outputs._fields:
        rows = 1 if name.startswith("d_w") else ERROR_BLOCK
        errors = block_errors(getattr(actual, name), getattr(expected, name), rows)
        bad = np.flatnonzero(~(errors <= tolerance))
        what = "experts" if rows == 1 else f"blocks of {rows} rows"
        assert not len(bad), (
            f"{context} {name}: relative error {errors[bad]} > {tolerance} in {what} {bad}"
        )


def plan(
    routes: np.ndarray, rank: int, num_experts: int, tile_rows: int, chunk_rows: int
) -> dict[str, np.ndarray]:
    """The plan of one rank for routes [ranks, T, K], from the definition of its fields."""
    ranks, tokens, choices = routes.shape
    local = num_experts // ranks
    slots = routes.reshape(-1).tolist()

    slots_of_expert: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(slots):
        if 0 <= expert < num_experts:
            slots_of_expert[expert].append(slot)

    place_of_slot: dict[int, tuple[int, int]] = {}
    tiles_of_rank = []
    for owner in range(ranks):
        tile = 0
        for expert in range(owner * local, (owner + 1) * local):
            for i, slot in enumerate(slots_of_expert[expert]):
                place_of_slot[slot] = (owner, tile * tile_rows + i)
            tile += -(-len(slots_of_expert[expert]) // tile_rows)
        tiles_of_rank.append(tile)

    max_tiles = (len(slots) + min(local, len(slots)) * (tile_rows - 1)) // tile_rows
    max_rows = max_tiles * tile_rows
    row_source = np.full(max_rows, -1, np.int32)
    for slot, (owner, row) in place_of_slot.items():
        if owner == rank:
            row_source[row] = slot

    tile_expert = np.full(max_tiles, -1, np.int32)
    expert_tile = np.zeros(local + 1, np.int32)
    expert_rows = np.zeros(local, np.int32)
    for e in range(local):
        expert_rows[e] = len(slots_of_expert[rank * local + e])
        expert_tile[e + 1] = expert_tile[e] - (-expert_rows[e] // tile_rows)
        tile_expert[expert_tile[e] : expert_tile[e + 1]] = e

    own = routes[rank].reshape(-1).tolist()
    first_own = rank * tokens * choices
    places = [place_of_slot.get(first_own + i, (-1, -1)) for i in range(len(own))]
    slot_rank, slot_row = np.array(places, np.int32).reshape(tokens, choices, 2).transpose(2, 0, 1)

    masked = own.count(-1)
    outside = sum(not 0 <= expert < num_experts for expert in own) - masked
    counts = [expert_rows.sum(), tiles_of_rank[rank], max(tiles_of_rank), masked, outside]
    return {
        "row_source": row_source,
        "tile_expert": tile_expert,
        "expert_tile": expert_tile,
        "expert_rows": expert_rows,
        "pull_order": _pull_order(row_source, rank, routes.shape, chunk_rows),
        "slot_rank": slot_rank,
        "slot_row": slot_row,
        "counts": np.array(counts, np.int32),
    }


def _pull_order(
    row_source: np.ndarray, rank: int, routes_shape: tuple[int, int, int], chunk_rows: int
) -> np.ndarray:
    """Rows of each chunk, one per source and round, the right neighbour first and itself last."""
    ranks, tokens, choices = routes_shape
    order = np.full(len(row_source), -1, np.int32)
    for start in range(0, len(row_source), chunk_rows):
        queues: list[list[int]] = [[] for _ in range(ranks)]
        for row in range(start, min(start + chunk_rows, len(row_source))):
            if row_source[row] >= 0:
                queues[row_source[row] // (tokens * choices)].append(row)
        position = start
        while any(queues):
            for step in range(1, ranks + 1):
                queue = queues[(rank + step) % ranks]
                if queue:
                    order[position] = queue.pop(0)
                    position += 1
    return order
