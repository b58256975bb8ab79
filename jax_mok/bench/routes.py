"""Routes of a measurement."""

from __future__ import annotations

import numpy as np

KINDS = ("uniform", "balanced", "zipf")
_ZIPF_EXPONENT = 0.9


def draw_routes(
    kind: str, generator: np.random.Generator, tokens: int, experts: int, top_k: int
) -> np.ndarray:
    """int32 [tokens, top_k]: distinct experts per token, their load of one of the KINDS."""
    if kind == "balanced":
        first = np.arange(tokens) * top_k % experts
        columns = (first[:, None] + np.arange(top_k)) % experts
        return generator.permutation(experts)[columns].astype(np.int32)
    scores = generator.gumbel(size=(tokens, experts))
    if kind == "zipf":
        scores -= _ZIPF_EXPONENT * np.log(1 + generator.permutation(experts))
    return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32)
