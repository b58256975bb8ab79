"""What no layer can beat: the arithmetic at the rate of cuBLAS, the bytes at that of the link.

With T tokens a GPU, K choices a token, widths H and I, n GPUs, bf16:

    compute = 6·T·K·H·I·B / (cuBLAS's FLOP/s in the same mode)
    link    = 2·H·(U + T·K·(n−1)/n) / (the link's bytes/s each way, both ways busy)
    bound   = max(compute, link)

B is the load of the busiest GPU over that of a balanced one; the link's term is a mean over GPUs.
With the backward pass three times the arithmetic; over the link x and dy go once more each, and the
rows of dx back: 2·H·(3·U + 2·T·K·(n−1)/n).

A GPU takes in U unique tokens of its peers (each once, however many of its experts they chose) and
the output rows of its own tokens' choices that went to peers; as much goes out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_mok.bench.shapes import Shape

_BYTES = 2  # of a bf16


class Bound(NamedTuple):
    """Seconds of the two terms; the link's is zero for one GPU."""

    compute_s: float
    link_s: float

    @property
    def seconds(self) -> float:
        """The larger."""
        return max(self)


def bound_of(
    shape: Shape,
    routes: np.ndarray,
    gpus: int,
    *,
    backward: bool,
    flops_per_s: float,
    link_bytes_per_s: float | None,
) -> Bound:
    """The formula above, `routes` as for `link_bytes`; link_bytes_per_s None: there is no link."""
    flops = (3 if backward else 1) * shape.flops() * busiest(shape, routes, gpus)
    sent = link_bytes(shape, routes, gpus, backward=backward)
    return Bound(flops / flops_per_s, sent / link_bytes_per_s if link_bytes_per_s else 0.0)


def link_bytes(shape: Shape, routes: np.ndarray, gpus: int, *, backward: bool = False) -> float:
    """Bytes each way over a GPU's link.

    Args:
      shape: the layer.
      routes: int32 [..., n·T, K], experts of all tokens, those of one GPU after the other.
      gpus: n.
      backward: whether the backward pass counts too.

    Returns:
      The formula above, U being the mean over GPUs and leading dimensions.
    """
    owners = routes.reshape(-1, gpus, shape.tokens, shape.top_k) // (shape.experts_of(gpus) // gpus)
    goes_to = np.any(owners[..., None] == np.arange(gpus), axis=-2)  # [·, home, token, rank]
    remote = goes_to & ~np.eye(gpus, dtype=bool)[:, None, :]
    unique_tokens = np.count_nonzero(remote) / (len(owners) * gpus)
    rows = shape.tokens * shape.top_k * (gpus - 1) / gpus
    token_moves, row_moves = (3, 2) if backward else (1, 1)
    return _BYTES * shape.hidden * (token_moves * unique_tokens + row_moves * rows)


def busiest(shape: Shape, routes: np.ndarray, gpus: int) -> float:
    """Rows of the GPU that has most of them, over those of a balanced load; `routes` as above."""
    owners = routes.reshape(-1, gpus * shape.tokens * shape.top_k) // (
        shape.experts_of(gpus) // gpus
    )
    rows = np.stack([np.count_nonzero(owners == rank, axis=1) for rank in range(gpus)])
    return float(np.mean(rows.max(axis=0))) / (shape.tokens * shape.top_k)


def weight_bytes(shape: Shape) -> int:
    """Bytes of the experts' weights on one GPU."""
    return _BYTES * 3 * shape.hidden * shape.inner * shape.experts_of(1)
