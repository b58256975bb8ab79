"""`jax_mok.memory`: every byte that the GPU kernels take has a name and a formula."""

import dataclasses
import math
import re

import numpy as np
import pytest

import jax_mok
from jax_mok import ffi, plan
from jax_mok.gpu import LEAST_RING_ROWS, MOST_EXPERTS
from jax_mok.layout import make_layout

SIZES = dict(ranks=2, tokens=8192, top_k=8, experts=128, hidden=2048, inner=768)
CASES = [
    (None, SIZES),
    (None, SIZES | dict(ranks=1)),
    (None, dict(ranks=72, tokens=1, top_k=1, experts=72, hidden=64, inner=64)),
    (None, dict(ranks=3, tokens=777, top_k=5, experts=9, hidden=2880, inner=2880)),
    (jax_mok.MoEConfig(ring_rows=4096), SIZES | dict(tokens=17)),
    (jax_mok.MoEConfig(ring_rows=64), SIZES | dict(ranks=1, hidden=7168, top_k=1)),
    (jax_mok.MoEConfig(chunk_rows=192), SIZES | dict(ranks=4, experts=4, inner=14336)),
    (jax_mok.MoEConfig(composition="composed"), SIZES | dict(ranks=1, tokens=128, experts=16)),
    *(
        (
            jax_mok.MoEConfig(dispatch=dispatch, combine=combine, composition=composition),
            SIZES | dict(ranks=ranks),
        )
        for dispatch in ("pull", "push")
        for combine in ("pull", "push")
        for composition in ("auto", "composed")
        for ranks in (1, 4)
    ),
    *(
        (
            jax_mok.MoEConfig(dispatch=dispatch, composition=composition, precision="mxfp8"),
            SIZES | dict(ranks=ranks, hidden=2880),
        )
        for dispatch in ("pull", "push")
        for composition in ("auto", "composed")
        for ranks in (1, 4)
    ),
    *(
        (jax_mok.MoEConfig(ring_rows=rows, chunk_rows=64, composition="composed"), SIZES)
        for rows in (64, 256, 320, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192)
    ),
]


built_with_kernels = pytest.mark.skipif(ffi.cuda is None, reason="built without GPU kernels")


@built_with_kernels
@pytest.mark.parametrize(("config", "sizes"), CASES)
def test_bytes_are_those_of_the_kernels(config, sizes):
    shared = {name: sizes[name] for name in ("ranks", "tokens", "top_k", "experts")}
    options = config or jax_mok.MoEConfig()
    layout = make_layout(options, **shared)
    memory = jax_mok.memory(config, **sizes)
    arguments = dict(
        **sizes,
        tile_rows=64,
        chunk_rows=layout.chunk_rows,
        ring_rows=max(layout.ring_rows, LEAST_RING_ROWS),
        dispatch_push=options.dispatch == "push",
        combine_push=options.combine == "push",
        reverse_combine_push=options.reverse_combine == "push",
        reverse_dispatch_push=options.reverse_dispatch == "push",
        composed=options.composition == "composed",
        keeps_plan=False,
        mxfp8=options.precision == "mxfp8",
    )
    assert memory.workspace_bytes == ffi.cuda.workspace_bytes(**arguments)
    assert memory.arena_bytes == ffi.cuda.arena_bytes(**arguments)
    kept = [f"{what} of the plan" for what in ("rows", "tiles", "experts", "choices")]
    tables = sum(part.bytes for part in memory.workspace if part.name in kept)
    tables += 256  # its counts, one of the single words
    arguments["keeps_plan"] = True
    assert memory.workspace_bytes - tables == ffi.cuda.workspace_bytes(**arguments)


BACKWARD_CASES = [
    *((jax_mok.MoEConfig(saved_rows=rows), SIZES) for rows in (0, 64, 2**30)),
    (None, SIZES),
    (None, SIZES | dict(ranks=1)),
    (None, SIZES | dict(ranks=1, tokens=64)),
    (None, dict(ranks=72, tokens=1, top_k=1, experts=72, hidden=64, inner=64)),
    (jax_mok.MoEConfig(ring_rows=64), SIZES | dict(hidden=7168, top_k=1)),
    (jax_mok.MoEConfig(chunk_rows=192), SIZES | dict(ranks=4, experts=4, inner=14336)),
    *(
        (None, SIZES | dict(ranks=ranks, experts=8, hidden=hidden, inner=14336, top_k=2))
        for ranks in (1, 2, 4, 8)
        for hidden in (64, 4096)
    ),
    *(
        (jax_mok.MoEConfig(combine=combine, reverse_dispatch=reverse_dispatch), SIZES)
        for combine in ("pull", "push")
        for reverse_dispatch in ("pull", "push")
    ),
    *(
        (
            jax_mok.MoEConfig(
                dispatch=dispatch,
                reverse_combine=reverse_combine,
                reverse_dispatch=reverse_dispatch,
                composition=composition,
                ring_rows=ring_rows,
                precision=precision,
            ),
            SIZES | dict(ranks=ranks),
        )
        for precision in ("operands", "mxfp8")
        for dispatch in ("pull", "push")
        for reverse_combine in ("pull", "push")
        for reverse_dispatch in ("pull", "push")
        for composition in ("auto", "composed")
        for ring_rows in (4096, None)
        for ranks in (1, 4)
    ),
]


@built_with_kernels
@pytest.mark.parametrize(("config", "sizes"), BACKWARD_CASES)
def test_bytes_of_the_backward_pass_are_those_of_the_kernels(config, sizes):
    shared = {name: sizes[name] for name in ("ranks", "tokens", "top_k", "experts")}
    options = config or jax_mok.MoEConfig()
    layout = make_layout(options, **shared)
    memory = jax_mok.memory(config, **sizes, backward=True)
    arguments = dict(
        **sizes,
        tile_rows=64,
        chunk_rows=layout.chunk_rows,
        ring_rows=memory.sizes["R"],
        saved_rows=layout.saved_rows,
        dispatch_push=options.dispatch == "push",
        combine_push=options.combine == "push",
        reverse_combine_push=options.reverse_combine == "push",
        reverse_dispatch_push=options.reverse_dispatch == "push",
        composed=options.composition == "composed",
        mxfp8=options.precision == "mxfp8",
    )
    assert memory.workspace_bytes == ffi.cuda.backward_workspace_bytes(**arguments)
    assert memory.arena_bytes == ffi.cuda.backward_arena_bytes(**arguments)
    tables = sum(math.prod(t.shape) * t.dtype.itemsize for t in plan.tables(layout))
    values = eval("+".join(p.formula for p in memory.kept).replace("·", "*"), {}, memory.sizes)
    assert values == tables + (layout.saved_rows + 64) * 2 * sizes["inner"] * 2


@built_with_kernels
def test_the_most_experts_are_those_of_the_kernels():
    sizes = dict(ranks=1, tokens=8, top_k=1, tile_rows=64, chunk_rows=64)
    assert ffi.cuda.plan_fits(experts=MOST_EXPERTS, **sizes)
    assert not ffi.cuda.plan_fits(experts=MOST_EXPERTS + 1, **sizes)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("config", "sizes"), CASES)
def test_formulas_say_what_the_bytes_are(config, sizes, backward):
    memory = jax_mok.memory(config, **sizes, backward=backward)
    for part in (*memory.kept, *memory.arena, *memory.workspace):
        value = eval(part.formula.replace("·", "*"), {}, memory.sizes)
        assert value <= part.bytes < value + 8 * 256, part


@pytest.mark.parametrize("backward", [False, True])
def test_table_names_every_part_and_adds_up(backward):
    memory = jax_mok.memory(**SIZES, backward=backward)
    first, *lines = str(memory).splitlines()
    assert first.startswith("n=2 T=8192 K=8 E=128 H=2048 I=768 M=")
    for part in (*memory.kept, *memory.arena, *memory.workspace):
        assert any(line.split("  ")[1] == part.name for line in lines if line[0] == " "), part
    totals = dict(re.findall(r"^(arena|workspace|total) +([\d.]+)$", "\n".join(lines), re.M))
    assert math.isclose(float(totals["total"]) * 2**20, memory.total_bytes, abs_tol=2**14)
    parts = memory.kept_bytes, memory.arena_bytes, memory.workspace_bytes
    assert memory.total_bytes == sum(parts)
    columns = {line.index(".") for line in lines if "." in line}
    assert len(columns) == 1, "aligned"


def test_a_smaller_ring_needs_less_and_one_rank_shows_nothing():
    whole = jax_mok.memory(**SIZES)
    small = jax_mok.memory(jax_mok.MoEConfig(ring_rows=4096), **SIZES)
    saved = whole.workspace_bytes - small.workspace_bytes
    assert saved == 2 * 768 * (whole.sizes["R"] - 4096)
    assert jax_mok.memory(**SIZES | dict(ranks=1)).arena == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        whole.arena = ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks=0 must be a positive integer"),
        ({"tokens": 8.0}, r"tokens=8\.0 must be a positive integer"),
        ({"top_k": True}, "top_k=True must be"),
        ({"hidden": 100}, "hidden=100 must be a positive multiple of 64"),
        ({"inner": -64}, "inner=-64 must be a positive multiple of 64"),
        ({"experts": 129}, "129 experts cannot be divided among 2 ranks: use a multiple of 2"),
        ({"experts": 3060}, "3060 experts does not fit .* use at most 3058"),
        ({"tokens": 2**30}, "split the batch into several calls"),
        (
            {"config": jax_mok.MoEConfig(ring_rows=256), "tokens": 2**24, "backward": True},
            "might take .* waves and .* items of work, .*: use a larger MoEConfig.ring_rows",
        ),
        ({"backward": "yes"}, "backward='yes' must be True or False"),
        ({"config": {}}, "config must be a MoEConfig or None, got dict"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        jax_mok.memory(**SIZES | changes)


@pytest.mark.parametrize(
    ("changes", "config", "parts"),
    [
        ({}, None, 1),
        (dict(experts=8), None, 2),
        (dict(experts=4), None, 1),  # two experts, for which the ring has room
        (dict(experts=32, tokens=65536), None, 8),
        (dict(experts=8), jax_mok.MoEConfig(composition="composed"), 1),
        (dict(experts=8), jax_mok.MoEConfig(ring_rows=16384), 1),
        (dict(experts=8), jax_mok.MoEConfig(ring_rows=256), 1),
    ],
)
def test_the_ring_of_wide_experts_is_a_part_of_the_forward_passes(changes, config, parts):
    wide = SIZES | dict(hidden=4096, inner=14336, top_k=2) | changes
    if not changes:
        wide |= dict(inner=768)
    whole = jax_mok.memory(config, **wide).sizes["R"]
    ring = jax_mok.memory(config, **wide, backward=True).sizes["R"]
    assert whole <= parts * ring < whole + parts * 64


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("hidden", [1600, 2048, 2880, 4096, 7168])
def test_tokens_take_half_the_link_in_mxfp8(hidden, direction, backward):
    def memory(precision):
        config = jax_mok.MoEConfig(
            dispatch=direction, reverse_combine=direction, precision=precision
        )
        return jax_mok.memory(config, **SIZES | dict(hidden=hidden), backward=backward)

    whole, half = memory("operands"), memory("mxfp8")
    assert half.sizes["B"] <= 0.52 * whole.sizes["B"] == 0.52 * 2 * hidden
    for was, now in zip(whole.arena, half.arena, strict=True):
        is_shown = was.name in ("x", "dy", "received tokens", "received dy")
        assert now.name == was.name
        assert now.bytes <= 0.52 * was.bytes if is_shown else now.bytes == was.bytes
    assert re.search(r"^n=2 .* B=\d+ ", str(half))
    assert "B bytes of a token on the link" in str(half)


def test_numpy_numbers_are_numbers():
    assert jax_mok.memory(**{k: np.int64(v) for k, v in SIZES.items()}) == jax_mok.memory(**SIZES)


def test_a_balanced_load_of_deepseek_v3_widths_needs_little_beside_the_arena():
    sizes = {"ranks": 2, "tokens": 8192, "top_k": 8, "experts": 32, "hidden": 7168, "inner": 2048}
    default = jax_mok.memory(None, **sizes)
    assert default.workspace_bytes < 1.5 * 2**30
    one_chunk = jax_mok.MoEConfig(ring_rows=4096, chunk_rows=4096)
    assert jax_mok.memory(one_chunk, **sizes).workspace_bytes < default.workspace_bytes
