"""Routings that broke other systems, each a function from sizes to expert ids [ranks, T, K]."""

from collections.abc import Callable

import numpy as np

Routing = Callable[[np.random.Generator, int, int, int, int], np.ndarray]


def uniform(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """Every choice independently uniform; a token may name an expert more than once."""
    return rng.integers(0, experts, (ranks, tokens, choices), dtype=np.int32)


def zipf(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """Load falls with the expert's place in a random order, as 1 / place."""
    share = 1.0 / np.arange(1, experts + 1)
    order = rng.permutation(experts)
    return order[rng.choice(experts, (ranks, tokens, choices), p=share / share.sum())].astype(
        np.int32
    )


def one_expert(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """Every choice of every rank is the same expert."""
    return np.full((ranks, tokens, choices), rng.integers(experts), np.int32)


def one_rank(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """One rank receives everything."""
    local = experts // ranks
    first = rng.integers(ranks) * local
    return rng.integers(first, first + local, (ranks, tokens, choices), dtype=np.int32)


def starved_rank(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """One rank receives nothing; choices that would go there are masked."""
    ids = uniform(rng, ranks, tokens, choices, experts)
    return np.where(ids // (experts // ranks) == rng.integers(ranks), np.int32(-1), ids)


def silent_rank(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """One rank sends nothing."""
    ids = uniform(rng, ranks, tokens, choices, experts)
    ids[rng.integers(ranks)] = -1
    return ids


def same_expert_twice(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """The first and the last choice of every token name one expert."""
    ids = uniform(rng, ranks, tokens, choices, experts)
    ids[..., -1] = ids[..., 0]
    return ids


def masked_slot(place: float) -> Routing:
    """The choice at this place (0 first, 1 last) of two thirds of the tokens is masked."""

    def routing(
        rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
    ) -> np.ndarray:
        ids = uniform(rng, ranks, tokens, choices, experts)
        masked = rng.random((ranks, tokens)) < 2 / 3
        ids[..., int(place * (choices - 1))][masked] = -1
        return ids

    return routing


def padding_tokens(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """The tokens after a random length on every rank have no expert at all."""
    ids = uniform(rng, ranks, tokens, choices, experts)
    for rank in range(ranks):
        ids[rank, rng.integers(tokens + 1) :] = -1
    return ids


def all_masked(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """Nobody sends anything."""
    return np.full((ranks, tokens, choices), -1, np.int32)


def out_of_range(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """A third of the ids name no expert: just outside, far outside, or masked."""
    ids = uniform(rng, ranks, tokens, choices, experts)
    limits = np.iinfo(np.int32)
    outside = np.array([-1, -2, experts, experts + 7, limits.min, limits.max], np.int32)
    bad = rng.random(ids.shape) < 1 / 3
    return np.where(bad, rng.choice(outside, ids.shape), ids)


def every_third_expert(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """Two experts in three get no row."""
    ids = rng.integers(0, -(-experts // 3), (ranks, tokens, choices), dtype=np.int32)
    return ids * 3


def last_experts_empty(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """Only the first half of the experts gets rows."""
    return uniform(rng, ranks, tokens, choices, -(-experts // 2))


def constant_logits(
    rng: np.random.Generator, ranks: int, tokens: int, choices: int, experts: int
) -> np.ndarray:
    """What top-k gives for ties: every token takes the experts with the lowest ids."""
    ids = np.where(np.arange(choices) < experts, np.arange(choices), -1)
    return np.broadcast_to(ids.astype(np.int32), (ranks, tokens, choices)).copy()


ROUTINGS: dict[str, Routing] = {
    "uniform": uniform,
    "zipf": zipf,
    "one_expert": one_expert,
    "one_rank": one_rank,
    "starved_rank": starved_rank,
    "silent_rank": silent_rank,
    "same_expert_twice": same_expert_twice,
    "masked_first": masked_slot(0.0),
    "masked_middle": masked_slot(0.5),
    "masked_last": masked_slot(1.0),
    "padding_tokens": padding_tokens,
    "all_masked": all_masked,
    "out_of_range": out_of_range,
    "every_third_expert": every_third_expert,
    "last_experts_empty": last_experts_empty,
    "constant_logits": constant_logits,
}


def group_sizes(rng: np.random.Generator, ranks: int, sizes: list[int]) -> np.ndarray:
    """Expert ids [ranks, T, 1] in random order that give expert e exactly sizes[e] rows."""
    ids = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return rng.permutation(ids).reshape(ranks, -1, 1)
