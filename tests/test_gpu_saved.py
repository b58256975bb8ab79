"""What a forward pass on GPUs keeps for the backward pass: run with `pytest -m gpu`."""

import jax
import numpy as np
import pytest
from gpu_harness import MoEConfig, mesh_of, poison_memory, rank_counts
from jax.sharding import PartitionSpec as P
from oracle import Inputs
from test_gpu import draw, forward, on_gpus, run

import jax_mok

pytestmark = pytest.mark.gpu

TILE = 64
TOLERANCE = 6e-3


def keep(inputs: Inputs, ranks: int, config: jax_mok.MoEConfig) -> tuple[np.ndarray, ...]:
    """y, and by rank the kept pre-activations, row sources and experts of tiles."""
    experts = inputs.w_gate.shape[0]

    def body(x, ids, *rest):
        def layer(x):
            return jax_mok.moe_ffn(x, ids, *rest, axis_name="ep", config=config)

        y, pullback = jax.vjp(layer, x)
        (kept,) = (a for a in jax.tree.leaves(pullback) if a.ndim == 4 and a.shape[2] == TILE)
        plan = jax_mok.build_plan(ids, num_experts=experts, axis_name="ep", config=config)
        return y, kept[None], plan.row_source[None], plan.tile_expert[None]

    mesh = mesh_of(ranks)
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    return tuple(map(np.asarray, step(*on_gpus(inputs, mesh))))


def rows_of(tile: np.ndarray) -> np.ndarray:
    """[2, 64, I] gate and up of a kept tile; see `ForwardParams::saved`."""
    inner = tile.size // (2 * TILE)
    parts = tile.reshape(inner // 64, 2, 4, 4, 8, 4, 2, 2, 2)
    columns, which, warp, group, row, quad, eighth, below, pair = range(9)
    order = (which, warp, below, row, columns, group, eighth, quad, pair)
    return parts.transpose(order).reshape(2, TILE, inner)


@pytest.mark.parametrize("saved_rows", [0, 64, 448, None])
@pytest.mark.parametrize("inner", [64, 192])
def test_pre_activations_of_the_first_rows_are_kept(saved_rows, inner):
    inputs = draw("zipf", tokens=600, hidden=128, inner=inner, choices=3)
    poison_memory(np.float32(np.nan))
    for ranks in rank_counts():
        config = MoEConfig(saved_rows=saved_rows, ring_rows=256, chunk_rows=64)
        y, kept, sources, tile_experts = keep(inputs, ranks, config)
        assert y.tobytes() == run(inputs, 1).tobytes()
        x = inputs.x.astype(np.float64)
        local_experts = inputs.w_gate.shape[0] // ranks
        compared = 0
        for rank in range(ranks):
            assert kept[rank].shape[0] == (256 if saved_rows is None else saved_rows) // TILE + 1
            for tile, values in enumerate(kept[rank][:-1]):
                if tile_experts[rank][tile] < 0:
                    continue
                rows = sources[rank][tile * TILE : (tile + 1) * TILE]
                real = rows >= 0
                tokens = x[rows[real] // 3]
                expert = rank * local_experts + tile_experts[rank][tile]
                for got, weights in zip(rows_of(values), (inputs.w_gate, inputs.w_up), strict=True):
                    want = tokens @ weights[expert].astype(np.float64)
                    error = np.linalg.norm(got[real].astype(np.float64) - want)
                    assert error <= TOLERANCE * np.linalg.norm(want)
                    compared += 1
        assert compared or not saved_rows


@pytest.mark.parametrize("clamp", [0.3, 1.7])
def test_rounding_never_crosses_the_clamp(clamp):
    inputs = draw(tokens=400, hidden=64, inner=128)
    limit = np.float32(clamp)
    _, kept, sources, tile_experts = keep(inputs, 1, MoEConfig(clamp=clamp))
    near = 0
    for tile, values in enumerate(kept[0][:-1]):
        expert = tile_experts[0][tile]
        if expert < 0:
            continue
        rows = sources[0][tile * TILE : (tile + 1) * TILE]
        real = rows >= 0
        gate, up = rows_of(values).astype(np.float32)
        tokens = inputs.x[rows[real] // 2].astype(np.float64)
        exact_gate = tokens @ inputs.w_gate[expert].astype(np.float64)
        exact_up = np.abs(tokens @ inputs.w_up[expert].astype(np.float64))
        for got, exact in ((gate[real], exact_gate), (np.abs(up[real]), exact_up)):
            sure = np.abs(exact - limit) > 1e-4 * limit  # f32 sums differ from exact ones
            np.testing.assert_array_equal((got < limit)[sure], (exact < limit)[sure])
            near += np.count_nonzero(np.abs(exact - limit)[sure] < 4e-3 * limit)
    assert near > 20  # closer than bf16 numbers are to each other


def test_keeping_compiles_only_under_a_gradient():
    inputs, mesh = draw(), mesh_of(1)
    layer = forward(1, MoEConfig())
    text = layer.lower(*on_gpus(inputs, mesh)).as_text()
    assert "x2x64x192xbf16" not in text

    def through_vjp(x, *rest):
        return jax.vjp(lambda x: layer(x, *rest), x)[0]

    text = jax.jit(through_vjp).lower(*on_gpus(inputs, mesh)).as_text()
    assert "x2x64x192xbf16" in text
