"""Whether a peer computes what the layer does."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok.bench.chains import Operands
from jax_mok.reference import reference_moe

_SAMPLE = 64  # tokens of each rank


def errors_of(
    results: Sequence[jax.Array],
    operands: Operands,
    ranks: int,
    keeps: np.ndarray | None = None,
) -> dict[str, float]:
    """Relative errors of a call with the first turn's routes, beside the plain layer.

    Args:
      results: y, and if they are to be compared too the gradients for y as the output's gradient.
      operands: of the call.
      ranks: how many.
      keeps: bool [n·T, K], the choices that the layer does not drop; None: all.

    Returns:
      By name, of some tokens of every rank the error of the outputs, of x's gradient and of the
      router weights', and of every rank's first expert those of its three matrices' gradients.
    """
    x, all_ids, router_weights, *experts, _, _ = operands
    ids = all_ids[0]
    if keeps is not None:
        router_weights = router_weights * keeps
    tokens, local = len(x) // ranks, len(experts[0]) // ranks
    some = np.concatenate(
        [np.arange(min(_SAMPLE, tokens)) + rank * tokens for rank in range(ranks)]
    )
    y, pullback = jax.vjp(
        lambda x, weights: _plain(x, ids[some], weights, *experts), x[some], router_weights[some]
    )
    errors = {"outputs": _error(results[0][some], y)}
    if len(results) == 1:
        return errors
    dy, dx, d_weights, *d_experts = results
    if keeps is not None:
        d_weights = d_weights * keeps
    for name, found, want in zip(
        ("x", "router weights"), (dx, d_weights), pullback(dy[some]), strict=True
    ):
        errors[f"gradients of {name}"] = _error(found[some], want)
    for expert in range(0, ranks * local, local):
        its_ids = jnp.where(ids == expert, 0, -1)
        _, pullback = jax.vjp(
            lambda *matrices, ids=its_ids: _plain(x, ids, router_weights, *matrices),
            *(w[expert : expert + 1] for w in experts),
        )
        for name, found, want in zip(("gate", "up", "down"), d_experts, pullback(dy), strict=True):
            errors[f"gradients of {name} {expert}"] = _error(found[expert : expert + 1], want)
    return errors


_plain = jax.jit(reference_moe)  # one for all layers, so that it is compiled once


def _error(found: jax.Array, want: jax.Array) -> float:
    found64, want64 = (np.asarray(a).astype(np.float64) for a in (found, want))
    return float(np.linalg.norm(found64 - want64) / np.linalg.norm(want64))
