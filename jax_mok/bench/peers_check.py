"""Whether a peer computes what the layer does."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.bench.chains import AXIS, CUBLAS, Operands, Queue
from jax_mok.reference import reference_moe

_SAMPLE = 64  # tokens of each rank


class Check:
    """Compares calls with the first turn's routes with the plain layer, in f32 and on the devices.

    Moving a gradient to the host and converting it there would take longer than all the rest.
    """

    def __init__(self, operands: Operands, mesh: Mesh, backward: bool) -> None:
        """Prepares it for layers that take these operands, with their gradients or without."""
        self._place = functools.partial(jax.device_put, device=NamedSharding(mesh, P(AXIS)))
        ids = np.asarray(operands.ids)[0]
        chosen = _tokens_of_first_experts(ids, mesh.size, len(operands.gate) // mesh.size)
        self._operands = operands._replace(ids=self._place(ids)), self._place(chosen)
        self._everything = self._place(np.ones(ids.shape, np.float32))
        x, _, *gradients, _, _ = operands
        results = (x, x, *gradients) if backward else (x,)
        errors = jax.shard_map(
            _errors, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
        )
        # One program for all layers; XLA need not look for the fastest products.
        self.queue = Queue(
            errors,
            [(results, self._everything, *self._operands)],
            {**CUBLAS, "xla_gpu_autotune_level": 0},
        )

    def errors_of(
        self, results: Sequence[jax.Array], keeps: np.ndarray | None = None
    ) -> dict[str, float]:
        """Relative errors of a call.

        Args:
          results: y, and if they are to be compared too the gradients for y as the output's
            gradient.
          keeps: bool [n·T, K], the choices that the layer does not drop; None: all.

        Returns:
          By name, of some tokens of every rank the error of the outputs, of x's gradient and of
          the router weights', and of the ranks' first experts the largest of each matrix's
          gradient.
        """
        kept = self._everything if keeps is None else self._place(keeps.astype(np.float32))
        errors = self.queue.program(tuple(results), kept, *self._operands)
        return {name: float(np.max(np.asarray(each))) for name, each in errors.items()}


def _tokens_of_first_experts(ids: np.ndarray, ranks: int, local: int) -> np.ndarray:
    """int32 [n, ·]: the tokens that chose each rank's first expert, -1 behind them."""
    tokens = [np.flatnonzero(np.any(ids == rank * local, axis=1)) for rank in range(ranks)]
    chosen = np.full((ranks, max(1, *map(len, tokens))), -1, np.int32)
    for row, each in zip(chosen, tokens, strict=True):
        row[: len(each)] = each
    return chosen


def _errors(
    results: tuple[jax.Array, ...], kept: jax.Array, operands: Operands, chosen: jax.Array
) -> dict[str, jax.Array]:
    with jax.default_matmul_precision("highest"):
        return _errors_on_a_rank(results, kept, operands, chosen)


def _errors_on_a_rank(
    results: tuple[jax.Array, ...], kept: jax.Array, operands: Operands, chosen: jax.Array
) -> dict[str, jax.Array]:
    x, ids, router_weights, *experts, _, _ = operands
    router_weights = router_weights * kept
    first = jax.lax.axis_index(AXIS) * len(experts[0])

    def of_all(array: jax.Array) -> jax.Array:
        return jax.lax.all_gather(array, AXIS, tiled=True)

    def sample(array: jax.Array) -> jax.Array:
        return of_all(array[:_SAMPLE]).astype(jnp.float32)

    # Every rank has its experts' share of the sampled tokens of all; ids of others' are masked.
    sampled_ids = of_all(ids[:_SAMPLE]) - first
    own_ids = jnp.where(sampled_ids < len(experts[0]), sampled_ids, -1)
    y, pullback = jax.vjp(
        lambda x, weights: reference_moe(x, own_ids, weights, *experts),
        sample(x),
        sample(router_weights),
    )
    errors = {"outputs": _error(sample(results[0]), jax.lax.psum(y, AXIS))}
    if len(results) == 1:
        return errors
    dy, dx, d_weights, *d_experts = results
    want_dx, want_d_weights = jax.lax.psum(pullback(sample(dy)), AXIS)
    errors["gradients of x"] = _error(sample(dx), want_dx)
    errors["gradients of router weights"] = _error(
        sample(d_weights * kept), want_d_weights * sample(kept)
    )
    token = chosen[0]
    picked = [of_all(array)[token] for array in (x, ids, router_weights, dy)]
    picked_x, picked_ids, picked_weights, picked_dy = picked
    its_ids = jnp.where((picked_ids == first) & (token >= 0)[:, None], 0, -1)
    _, pullback = jax.vjp(
        lambda *matrices: reference_moe(
            picked_x.astype(jnp.float32), its_ids, picked_weights, *matrices
        ),
        *(matrix[:1].astype(jnp.float32) for matrix in experts),
    )
    for name, found, want in zip(
        ("gate", "up", "down"), d_experts, pullback(picked_dy.astype(jnp.float32)), strict=True
    ):
        errors[f"gradients of {name}"] = _error(found[:1], want)
    return errors


def _error(found: jax.Array, want: jax.Array) -> jax.Array:
    difference = jnp.linalg.norm((found.astype(jnp.float32) - want).ravel())
    return (difference / jnp.linalg.norm(want.ravel()))[None]
