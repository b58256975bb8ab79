"""Routes of a measurement."""

from __future__ import annotations

import numpy as np

KINDS = ("uniform", "balanced", "zipf")
ZIPF_EXPONENT = 0.9
"""Of kind "zipf": the i-th of the most wanted experts is chosen as i to the minus this."""


def draw_routes(
    kind: str,
    generator: np.random.Generator,
    tokens: int,
    experts: int,
    top_k: int,
    *,
    exponent: float = ZIPF_EXPONENT,
) -> np.ndarray:
    """int32 [tokens, top_k]: distinct experts per token, their load of one of the KINDS.

    `exponent` is that of kind "zipf".
    """
    if kind == "balanced":
        first = np.arange(tokens) * top_k % experts
        columns = (first[:, None] + np.arange(top_k)) % experts
        return generator.permutation(experts)[columns].astype(np.int32)
    scores = generator.gumbel(size=(tokens, experts))
    if kind == "zipf":
        scores -= exponent * np.log(1 + generator.permutation(experts))
    return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32)
