"""From a router's logits to expert ids and weights for the layer, and what keeps their load even.

Everything is computed in float32. Among equal scores the expert with the lower id is chosen, so
routes are the same wherever they are computed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_mok.errors import MoEInputError

RouterKind = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """Choices of experts.

    Attributes:
      ids: int32 [T, K], the chosen experts, the best first: `expert_ids` of the layer.
      weights: float32 [T, K], `expert_weights` of the layer.
      scores: float32 [T, E], of all experts: probabilities if the kind is "softmax".
    """

    ids: jax.Array
    weights: jax.Array
    scores: jax.Array


@dataclasses.dataclass(frozen=True)
class Router:
    """How experts are chosen. Immutable and hashable, so it can be a static argument.

    | model | kind | renormalise | scale | groups, groups_per_token |
    |---|---|---|---|---|
    | Mixtral, Qwen3-MoE, gpt-oss | softmax | yes | 1 | 1, 1 |
    | OLMoE | softmax | no | 1 | 1, 1 |
    | DeepSeek-V2 | softmax | no | 16 | 8, 3 |
    | DeepSeek-V3 | sigmoid | yes | 2.5 | 8, 4 |

    Attributes:
      top_k: experts per token.
      kind: "softmax" over all experts (Shazeer et al., arXiv:1701.06538), or "sigmoid" of each by
        itself, which a bias may help to be chosen (Wang et al., arXiv:2408.15664).
      renormalise: divide a token's weights by their sum.
      scale: factor of all weights, after that.
      groups: experts are in so many groups of equal size, in the order of their ids.
      groups_per_token: a token chooses among the experts of so many groups only, the best ones: by
        their best expert if the kind is "softmax" (DeepSeek-V2, arXiv:2405.04434), by the sum of
        their two best if it is "sigmoid" (DeepSeek-V3, arXiv:2412.19437).
    """

    top_k: int
    kind: RouterKind = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1

    def __post_init__(self) -> None:
        """Checks the options against each other.

        Raises:
          MoEInputError: for what no router can do.
        """
        if self.kind not in get_args(RouterKind):
            kinds = ", ".join(map(repr, get_args(RouterKind)))
            raise MoEInputError(f"Router.kind={self.kind!r} is not one of {kinds}")
        for name in ("top_k", "groups", "groups_per_token"):
            if getattr(self, name) < 1:
                raise MoEInputError(f"Router.{name}={getattr(self, name)} must be at least 1")
        if self.groups_per_token > self.groups:
            raise MoEInputError(
                f"Router.groups_per_token={self.groups_per_token} is more than "
                f"Router.groups={self.groups}"
            )

    def __call__(self, logits: jax.Array, bias: jax.Array | None = None) -> Routing:
        """Chooses experts.

        Args:
          logits: [T, E], of any float dtype.
          bias: [E], added to the scores for the choice only, not in the weights; has no gradient.
            See `update_bias`.

        Returns:
          The choices; gradients flow through the weights and the scores.

        Raises:
          MoEInputError: if there are fewer experts to choose from than a token chooses, or they are
            no groups of equal size.
        """
        experts = logits.shape[-1]
        self._check_experts(experts)
        logits = logits.astype(jnp.float32)
        scores = jax.nn.softmax(logits) if self.kind == "softmax" else jax.nn.sigmoid(logits)
        wanted = jax.lax.stop_gradient(scores)
        if bias is not None:
            wanted = wanted + jax.lax.stop_gradient(bias.astype(jnp.float32))
        if self.groups > 1:
            wanted = jnp.where(self._in_best_groups(wanted), wanted, -jnp.inf)
        _, ids = jax.lax.top_k(wanted, self.top_k)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if self.renormalise:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            weights = weights / jnp.maximum(total, float(np.finfo(np.float32).tiny))
        return Routing(ids, self.scale * weights, scores)

    def _in_best_groups(self, scores: jax.Array) -> jax.Array:
        """bool [T, E]: whether the expert's group is one of those the token chooses among."""
        tokens, experts = scores.shape
        grouped = scores.reshape(tokens, self.groups, experts // self.groups)
        best = min(1 if self.kind == "softmax" else 2, grouped.shape[-1])
        group_scores = jnp.sum(jax.lax.top_k(grouped, best)[0], axis=-1)
        _, chosen = jax.lax.top_k(group_scores, self.groups_per_token)
        is_chosen = jnp.any(chosen[..., None] == jnp.arange(self.groups), axis=1)
        return jnp.repeat(is_chosen, experts // self.groups, axis=1)

    def _check_experts(self, experts: int) -> None:
        if experts % self.groups:
            raise MoEInputError(
                f"{experts} experts cannot be divided into Router.groups={self.groups}"
            )
        available = experts // self.groups * self.groups_per_token
        if self.top_k > available:
            raise MoEInputError(
                f"Router.top_k={self.top_k} is more than the {available} experts that a token can "
                "choose from"
            )


def jitter(x: jax.Array, key: jax.Array, epsilon: float) -> jax.Array:
    """The router's input times uniform noise of 1 ± epsilon, while training.

    Fedus et al., "Switch Transformers", arXiv:2101.03961, section 2.4.
    """
    noise = jax.random.uniform(key, x.shape, x.dtype, 1.0 - epsilon, 1.0 + epsilon)
    return x * noise


class Load(NamedTuple):
    """How the choices are spread, over all devices of the axes that were given.

    Attributes:
      counts: int32 [E], choices of each expert.
      shares: float32 [E], of all choices.
      peak: the largest share, as a multiple of an even one.
      idle: how many experts nobody has chosen.
    """

    counts: jax.Array
    shares: jax.Array
    peak: jax.Array
    idle: jax.Array


def load_of(ids: jax.Array, experts: int, axis_name: str | tuple[str, ...] = ()) -> Load:
    """Statistics of choices; masked ones (ids outside 0..experts-1) do not count.

    Args:
      ids: int32 [T, K].
      experts: E.
      axis_name: inside `shard_map`, the mesh axes over which tokens are partitioned.

    Returns:
      The same on all devices of these axes.
    """
    masked = jnp.where((ids >= 0) & (ids < experts), ids, experts)
    counts = jnp.bincount(masked.reshape(-1), length=experts + 1)[:experts].astype(jnp.int32)
    counts = jax.lax.psum(counts, axis_name)
    shares = counts / jnp.maximum(jnp.sum(counts), 1)
    return Load(counts, shares, jnp.max(shares) * experts, jnp.sum(counts == 0))


def load_balancing_loss(routing: Routing, axis_name: str | tuple[str, ...] = ()) -> jax.Array:
    """E · Σ over experts of (share of choices) · (mean probability); 1 for an even load.

    Fedus et al., "Switch Transformers", arXiv:2101.03961, equations 4 to 6, for any number of
    choices. Scores of the "sigmoid" kind are made probabilities by dividing by their sum
    (DeepSeek-V3, arXiv:2412.19437, equation 18). Gradients flow through the probabilities only.

    Args:
      routing: of this device's tokens.
      axis_name: inside `shard_map`, the mesh axes over which tokens are partitioned; shares and
        means are then those of all tokens.

    Returns:
      A float32 scalar, the same on all devices of these axes.
    """
    experts = routing.scores.shape[-1]
    probabilities = routing.scores / jnp.sum(routing.scores, axis=-1, keepdims=True)
    mean = jax.lax.pmean(jnp.mean(probabilities, axis=0), axis_name)
    return experts * jnp.sum(load_of(routing.ids, experts, axis_name).shares * mean)


def z_loss(logits: jax.Array, axis_name: str | tuple[str, ...] = ()) -> jax.Array:
    """Mean square of the logits' log-sum-exp, which keeps them small.

    Zoph et al., "ST-MoE", arXiv:2202.08906, equation 5.

    Args:
      logits: [T, E].
      axis_name: as for `load_balancing_loss`.

    Returns:
      A float32 scalar.
    """
    total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return jax.lax.pmean(jnp.mean(total**2), axis_name)


def update_bias(bias: jax.Array, counts: jax.Array, rate: float = 1e-3) -> jax.Array:
    """The bias of a "sigmoid" router after a step: up for experts chosen too rarely, else down.

    Wang et al., "Auxiliary-Loss-Free Load Balancing", arXiv:2408.15664, algorithm 1.

    Args:
      bias: float32 [E].
      counts: [E], choices of each expert in the step, by all devices; see `load_of`.
      rate: by how much.

    Returns:
      The new bias.
    """
    counts = counts.astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(counts) - counts)
