"""The kernels by which `bench link` measures: they move what they say. Run with `pytest -m gpu`."""

import functools

import numpy as np
import pytest
from gpu_harness import require_gpus

from jax_mok.bench.link_moves import HOWS, WAYS, Link, Move

pytestmark = pytest.mark.gpu


@functools.cache  # its buffers are large
def link_of_two() -> Link:
    return Link(0, 1)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("blocks", "row_bytes"), [(1, 128), (3, 4096), (132, 14336), (7, 65536)])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", WAYS)
def test_rows_arrive_where_they_belong_and_nothing_else_is_touched(
    way, how, blocks, row_bytes, both_ways
):
    require_gpus(2)
    import cupy

    link = link_of_two()
    move = Move(way, how, blocks, row_bytes, both_ways)
    for side in link.sides:
        with cupy.cuda.Device(side["gpu"]):
            side["source"][:] = cupy.random.randint(1, 256, side["source"].size, cupy.uint8)
            side["target"][:] = 0
            cupy.cuda.runtime.deviceSynchronize()
    rate = link.rate(move, rounds=2)
    assert 0 < rate.low <= rate.median <= rate.high < 1e12
    sources, targets = (
        [cupy.asnumpy(side[what]) for side in link.sides] for what in ("source", "target")
    )
    rows = link.rows_of(move)
    for gpu in range(2):
        # The first GPU alone works if one way is busy: it pulls to itself, or pushes to the other.
        takes = both_ways or gpu == (0 if way == "pull" else 1)
        whole = targets[gpu].size // row_bytes * row_bytes
        found = targets[gpu][:whole].reshape(-1, row_bytes)
        sent = sources[1 - gpu][:whole].reshape(-1, row_bytes)
        want = np.zeros_like(found)
        if takes:
            want[rows] = sent[rows]
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("way", WAYS)
def test_signals_take_some_time_but_not_long(way):
    require_gpus(2)
    seconds = link_of_two().signal(way, rounds=2)
    assert 1e-8 < seconds.median < 1e-3
