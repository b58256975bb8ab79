"""Compiled temporaries stay in proportion to rows times width."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from harness import draw_inputs, layer_step, mesh_of, shard
from routings import uniform

import jax_mok

RANKS = 4
TILE = 64
F32 = 4


@functools.cache
def temporary_bytes(
    *,
    tokens: int = 512,
    choices: int = 2,
    hidden: int = 128,
    inner: int = 64,
    experts: int = 16,
    dtype: str = "float32",
    **options: int | str,
) -> int:
    """Bytes of temporaries of one device for forward and backward; `tokens` is per rank."""
    rng = np.random.default_rng(0)
    routes = uniform(rng, RANKS, tokens, choices, experts)
    inputs = draw_inputs(
        rng, routes, hidden=hidden, inner=inner, experts=experts, dtype=jnp.dtype(dtype)
    )
    step = layer_step(mesh_of(RANKS), jax_mok.MoEConfig(**options))
    compiled = step.lower(shard(inputs, mesh_of(RANKS))).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def allowance(
    *,
    tokens: int = 512,
    choices: int = 2,
    hidden: int = 128,
    inner: int = 64,
    experts: int = 16,
    ring_rows: int,
    saved_rows: int,
) -> int:
    """What those temporaries may add up to, all of it in f32."""
    local = experts // RANKS
    rows = tokens * choices
    worst_rows = RANKS * rows + min(local, RANKS * rows) * TILE
    values = (
        ring_rows * (2 * hidden + 2 * inner)  # x and dy of a wave, and what is made of them
        + saved_rows * 2 * inner  # pre-activations
        + 2 * rows * hidden  # the home slots of y or dx, and a copy
        + 2 * 3 * local * hidden * inner  # sums of the weight gradients, and a copy
        + 4 * worst_rows  # the plan's tables: a few integers a row
        + 16 * TILE * (hidden + inner)  # one tile
    )
    return values * F32


@pytest.mark.parametrize(
    ("dtype", "composition"),
    [("float32", "composed"), ("bfloat16", "composed"), ("float32", "collective")],
)
@pytest.mark.parametrize(
    ("sizes", "ring_rows", "saved_rows"),
    [
        ({}, 1024, 1024),
        ({"hidden": 512}, 1024, 0),
        ({"inner": 512}, 256, 512),
        ({"choices": 8}, 256, 0),
        ({"experts": 256}, 256, 0),
        # A mask of tokens x experts alone would be twelve times what is allowed here.
        ({"tokens": 4096, "choices": 1, "hidden": 8, "inner": 8, "experts": 1024}, 64, 0),
    ],
)
def test_temporaries_are_rows_times_width(
    sizes: dict[str, int], ring_rows: int, saved_rows: int, dtype: str, composition: str
) -> None:
    used = temporary_bytes(
        **sizes,
        dtype=dtype,
        ring_rows=ring_rows,
        chunk_rows=64,
        saved_rows=saved_rows,
        composition=composition,
    )
    assert used <= allowance(**sizes, ring_rows=ring_rows, saved_rows=saved_rows)


def test_temporaries_grow_no_faster_than_the_tokens() -> None:
    assert temporary_bytes(tokens=4096) <= 8 * temporary_bytes(tokens=512)


def test_temporaries_grow_no_faster_than_the_choices() -> None:
    assert temporary_bytes(choices=8, chunk_rows=64) <= 8 * temporary_bytes(
        choices=1, chunk_rows=64
    )


def test_a_smaller_ring_has_smaller_temporaries() -> None:
    sizes = [
        temporary_bytes(ring_rows=rows, chunk_rows=64, saved_rows=0) for rows in (512, 1024, 4096)
    ]
    per_row = 2 * 128 * F32  # x and dy
    assert sizes[1] - sizes[0] >= 0.5 * 512 * per_row
    assert sizes[2] - sizes[1] >= 0.5 * 3072 * per_row


def test_saved_rows_cost_their_pre_activations_and_no_more() -> None:
    none, some = (temporary_bytes(saved_rows=rows, ring_rows=64) for rows in (0, 4096))
    assert some - none <= 1.01 * 4096 * 2 * 64 * F32
