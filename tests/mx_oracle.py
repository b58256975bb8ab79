"""MXFP8, and the layer with it, from their definitions in float64 and ml_dtypes' own types."""

import ml_dtypes
import numpy as np
from oracle import Inputs, Outputs

BLOCK = 32
CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
POSITIVE = np.unique(CODES[np.isfinite(CODES) & (CODES >= 0)])  # in the order of their codes


def blocks_in_mx(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elements and scales of float64 [count, 32], both as numbers."""
    finite = np.isfinite(blocks)
    flushed = np.where(np.abs(blocks) < 2.0**-126, 0, blocks)
    largest = np.max(np.where(finite, np.abs(flushed), 0), axis=1)
    scales = np.full(len(blocks), 2.0**-127)
    for exponent in range(-126, 128):
        scales = np.where(largest > 448 * scales, 2.0**exponent, scales)
    values = np.abs(np.where(finite, flushed, 0)) / scales[:, None]
    above = np.searchsorted(POSITIVE, values).clip(1, len(POSITIVE) - 1)
    low, high = POSITIVE[above - 1], POSITIVE[above]
    middle = (low + high) / 2
    low_is_even = (above - 1) % 2 == 0
    nearest = np.where((values > middle) | ((values == middle) & ~low_is_even), high, low)
    nearest = np.where(values == high, high, nearest)
    return np.where(finite, np.copysign(nearest, blocks), np.nan), scales


def rounded(x: np.ndarray, axis: int) -> np.ndarray:
    """x in float64 as MXFP8 has it, with blocks along the axis."""
    moved = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    elements, scales = blocks_in_mx(moved.reshape(-1, BLOCK))
    return np.moveaxis((elements * scales[:, None]).reshape(moved.shape), -1, axis)


def layer(inputs: Inputs, clamp: float | None = None) -> Outputs:
    """The layer and its gradients as `jax_mok.precision` defines them, expert by expert.

    Rounded to MXFP8 are the operands of products over H and I, to x's dtype gate and up, but not
    across the clamp; all else is float64.
    """
    limit = np.inf if clamp is None else clamp
    x, ids, weights, *matrices, dy = inputs
    x_rows, dy_rows = rounded(x, -1), rounded(dy, -1)
    w_gate, w_up, w_down = (rounded(matrix, -2) for matrix in matrices)
    gate_back, up_back, down_back = (rounded(matrix, -1) for matrix in matrices)
    out = Outputs(*(np.zeros(a.shape) for a in (x, x, weights, *matrices)))
    for e in range(len(w_gate)):
        t, k = np.nonzero(ids == e)
        if not len(t):
            continue
        weight = weights[t, k].astype(np.float64)[:, None]
        gate_in, up_in = x_rows[t] @ w_gate[e], x_rows[t] @ w_up[e]
        gate = np.minimum(gate_in.astype(x.dtype).astype(np.float64), limit)
        up = np.clip(up_in.astype(x.dtype).astype(np.float64), -limit, limit)
        sigmoid = 1.0 / (1.0 + np.exp(-gate))
        hidden = rounded(gate * sigmoid * up, -1)
        np.add.at(out.y, t, weight * (hidden @ w_down[e]))

        d_hidden = dy_rows[t] @ down_back[e].T
        out.d_expert_weights[t, k] = np.sum(hidden * d_hidden, axis=1)
        d_hidden *= weight
        d_gate = d_hidden * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * (gate_in < limit)
        d_up = d_hidden * gate * sigmoid * (np.abs(up_in) < limit)
        d_gate, d_up = rounded(d_gate, -1), rounded(d_up, -1)
        np.add.at(out.dx, t, d_gate @ gate_back[e].T + d_up @ up_back[e].T)
        out.d_w_gate[e] = x_rows[t].T @ d_gate
        out.d_w_up[e] = x_rows[t].T @ d_up
        out.d_w_down[e] = (weight * hidden).T @ dy_rows[t]
    return out
