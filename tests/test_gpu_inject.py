"""One flag, push or pull of a rank that comes late or never, in kernels built for that.

What comes late leaves the bits as they are. Of what never comes those who wait for it are told;
their results are NaN, and later calls are right. Run with `pytest -m gpu` after a build with
`JAX_MOK_INJECT_FAULTS=ON`.
"""

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gpu
from gpu_harness import gpus, mesh_of, require_gpus, run_in_two_processes
from jax.experimental import multihost_utils

import jax_mok
from jax_mok import ffi

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not hasattr(ffi.cuda, "start_injection"),
        reason="built without JAX_MOK_INJECT_FAULTS=ON",
    ),
]

TIMEOUT_S = 1.0
DELAY_S = 0.05
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Way:
    direction: str = "push"
    composition: str = "auto"
    precision: str = "operands"

    def config(self, **options: Any) -> jax_mok.MoEConfig:
        moves = ("dispatch", "combine", "reverse_combine", "reverse_dispatch")
        ways = {move: self.direction for move in moves}
        return jax_mok.MoEConfig(
            composition=self.composition,
            precision=self.precision,
            timeout_s=TIMEOUT_S,
            **ways,
            **options,
        )

    def hooks(self, direction_of: str) -> list[str]:
        """All that a rank does to its peer's memory in such a call, or tells it."""
        token = f"{self.direction}_token"
        if token == "pull_token" and self.composition == "composed":
            token = "pull_wave_token"
        if self.precision == "mxfp8":  # all else is the same
            return [token]
        numbers = [f"{self.direction}_number"] if direction_of == "backward" else []
        return ["flag", "push_choices", token, f"{self.direction}_row", *numbers]


PUSH, PULL = Way("push"), Way("pull")
PUSH_COMPOSED, PULL_COMPOSED = Way("push", "composed"), Way("pull", "composed")
IN_MX = [dataclasses.replace(w, precision="mxfp8") for w in (PUSH, PULL, PULL_COMPOSED)]
PUSH_MX, PULL_MX, _ = IN_MX
PASSES = ("forward", "backward")


def meet() -> None:
    """Until all processes have come, if there are several: they compile at different speeds."""
    multihost_utils.sync_global_devices("jax_mok")


@functools.cache
def calls(way: Way) -> dict[str, Call]:
    """Either pass as a program without arguments, of several waves."""
    require_gpus(2)
    mesh, config = mesh_of(2), way.config(ring_rows=256, chunk_rows=64)
    inputs = test_gpu.draw("zipf", tokens=600, hidden=320, choices=3)
    x, ids, *operands, dy = harness.shard(inputs, mesh)

    def differentiate(ids, *operands):
        def layer(x, *rest):
            return jax_mok.moe(x, ids, *rest, mesh=mesh, axis_name="ep", config=config)

        return jax.vjp(layer, *operands)

    forward = jax.jit(differentiate).lower(ids, x, *operands).compile()
    meet()
    _, pull_back = forward(ids, x, *operands)
    backward = jax.jit(lambda pull_back, dy: pull_back(dy)).lower(pull_back, dy).compile()
    meet()
    return {
        "forward": lambda: forward(ids, x, *operands)[0],
        "backward": lambda: backward(pull_back, dy),
    }


@functools.cache
def own_ranks() -> list[int]:
    """Those whose GPUs are this process's."""
    own = jax.process_index()
    return [rank for rank, gpu in enumerate(gpus()[:2]) if gpu.process_index == own]


def parts(results: Any, rank: int) -> list[np.ndarray]:
    """A rank's part of each array."""
    found = [
        np.asarray(shard.data)
        for array in jax.tree.leaves(results)
        for shard in array.addressable_shards
        if shard.device == gpus()[rank]
    ]
    assert len(found) == len(jax.tree.leaves(results)) > 0
    return found


def bits(results: Any, rank: int) -> bytes:
    return b"".join(part.tobytes() for part in parts(results, rank))


def is_nan(results: Any, rank: int) -> bool:
    return all(np.isnan(part.astype(np.float32)).all() for part in parts(results, rank))


@functools.cache
def right_bits(way: Way, which: str) -> dict[int, bytes]:
    """Each rank's, from calls until XLA replays a graph."""
    runs = [jax.block_until_ready(calls(way)[which]()) for _ in range(3)]
    jax_mok.check()
    for rank in own_ranks():
        assert all(np.isfinite(part.astype(np.float32)).all() for part in parts(runs[0], rank))
        assert len({bits(results, rank) for results in runs}) == 1
    return {rank: bits(runs[0], rank) for rank in own_ranks()}


def assert_right(results: Any, want: dict[int, bytes]) -> None:
    for rank in own_ranks():
        assert bits(results, rank) == want[rank], f"rank {rank}"


@dataclasses.dataclass
class Injected:
    happened: int = -1


@contextlib.contextmanager
def injected(
    hook: str, *, rank: int, first: int = 0, count: int = 1, delay_s: float | None = None
) -> Iterator[Injected]:
    """Has occurrences of a rank's hook delayed, or else dropped, and counts them."""
    device = gpus()[rank].local_hardware_id
    problem = ffi.cuda.start_injection(
        device=device,
        rank=rank,
        hook=hook,
        first=first,
        count=count,
        delay_ns=int((delay_s or 0) * 1e9),
        drops=delay_s is None,
    )
    assert problem == ""
    injected = Injected()
    try:
        yield injected
    finally:
        injected.happened = ffi.cuda.end_injection(device=device)


def time_outs() -> str:
    """Those recorded since the last look."""
    try:
        jax_mok.check()
    except jax_mok.MoETimeoutError as error:
        return str(error)
    return ""


def assert_right_again(call: Call, want: dict[int, bytes]) -> None:
    """After a flag that never came. Its rank is not waited for until it has shown another one, so
    one more call may fail, but not be wrong."""
    results = jax.block_until_ready(call())
    time_outs()
    for rank in own_ranks():
        assert is_nan(results, rank) or bits(results, rank) == want[rank], f"rank {rank}"
    meet()
    for _ in range(3):
        assert_right(jax.block_until_ready(call()), want)
    jax_mok.check()


def assert_contexts_are_of_use() -> None:
    for rank in own_ranks():
        assert float(jax.device_put(jnp.arange(5.0), gpus()[rank]).sum()) == 10


DELAYS = [
    pytest.param(
        *(way, which, hook),
        id=f"{hook}-{which}-{way.direction}-{way.composition}-{way.precision}",
    )
    for way in (PUSH, PULL, PUSH_COMPOSED, PULL_COMPOSED, *IN_MX)
    for which in PASSES
    for hook in way.hooks(which)
]


@pytest.mark.parametrize(("way", "which", "hook"), DELAYS)
def test_what_comes_late_leaves_the_bits(way: Way, which: str, hook: str):
    want = right_bits(way, which)
    for rank in range(2):
        begin = time.monotonic()
        with injected(hook, rank=rank, count=2, delay_s=DELAY_S) as late:
            results = jax.block_until_ready(calls(way)[which]())
            assert time.monotonic() - begin >= DELAY_S
        assert late.happened == 2
        assert_right(results, want)
        jax_mok.check()


@dataclasses.dataclass(frozen=True)
class Loss:
    """Something that a rank's peer, or its own kernel, waits for in vain."""

    hook: str
    way: Way
    until: str  # where the wait is: entry, exit, kernel
    first: int = 0
    count: int = 1

    def run(self, which: str, rank: int) -> Any:
        """The call's results, in which that rank commits it; of its peer's process just them."""
        call = calls(self.way)[which]
        if rank not in own_ranks():
            return jax.block_until_ready(call())
        with injected(self.hook, rank=rank, first=self.first, count=self.count) as lost:
            results = jax.block_until_ready(call())
        assert lost.happened == self.count
        return results

    def assert_told(self, text: str, results: Any, rank: int) -> None:
        """What the process's own ranks have to say, if that rank has committed it."""
        peer = 1 - rank
        if peer in own_ranks():
            assert is_nan(results, peer)
            if self.until == "kernel":
                assert_missed(text, peer, rank)
            else:
                expected, seen = assert_waited_in_vain(text, peer, rank)
                assert expected % 2 == (1 if self.until == "entry" else 0)  # entries are odd
                assert seen == expected - 1
        if rank not in own_ranks():
            return
        if self.until == "exit":  # the peer's flag has come: the call is over
            assert not is_nan(results, rank)
            assert f"rank {rank} waited" not in text
            return
        assert is_nan(results, rank)
        if self.until == "kernel":
            gpu = gpus()[rank].local_hardware_id
            assert f"a wait within a kernel on GPU {gpu} expired in 1 call" in text
        else:
            assert_missed(text, rank, peer)


def assert_waited_in_vain(text: str, rank: int, peer: int) -> tuple[int, int]:
    told = re.search(
        rf"rank {rank} waited in vain for rank {peer} .*: epoch (\d+), seen (\d+);", text
    )
    assert told is not None, text
    return int(told[1]), int(told[2])


def assert_missed(text: str, rank: int, peer: int) -> None:
    """Waited for in vain, or found to have given up before: it is a race between time-outs."""
    why = f"waited in vain for rank {peer} |came to a call in which rank {peer} had failed"
    assert re.search(rf"rank {rank} ({why}).*: epoch \d+, seen \d+;", text), text


LOSSES = {
    "both_flags": Loss("flag", PULL, "entry", count=2),
    "flag_of_exit": Loss("flag", PULL, "exit", first=1),
    "push_choices": Loss("push_choices", PULL, "entry", first=50),
    "push_token": Loss("push_token", PUSH, "entry", first=20),
    "push_row": Loss("push_row", PUSH, "exit", first=5),
    "push_row_composed": Loss("push_row", PUSH_COMPOSED, "exit", first=5),
    "pull_token": Loss("pull_token", PULL, "kernel", first=3),
    "push_token_in_mx": Loss("push_token", PUSH_MX, "entry", first=20),
    "pull_token_in_mx": Loss("pull_token", PULL_MX, "kernel", first=3),
}
OF_BACKWARD = {"push_number": Loss("push_number", PUSH, "exit", first=7)}
LOST = [
    pytest.param(loss, which, rank, id=f"{name}-{which}-of_rank_{rank}")
    for which in PASSES
    for name, loss in {**LOSSES, **(OF_BACKWARD if which == "backward" else {})}.items()
    for rank in ((0, 1) if loss.hook == "flag" else (1,))
]


@pytest.mark.parametrize(("loss", "which", "rank"), LOST)
def test_of_what_never_comes_those_who_need_it_are_told(loss: Loss, which: str, rank: int):
    want = right_bits(loss.way, which)
    begin = time.monotonic()
    results = loss.run(which, rank)
    text = time_outs()
    assert TIMEOUT_S <= time.monotonic() - begin < TIMEOUT_S + 2
    loss.assert_told(text, results, rank)
    if loss.until == "exit":
        assert bits(results, rank) == want[rank]
    assert_contexts_are_of_use()
    assert_right_again(calls(loss.way)[which], want)


@pytest.mark.parametrize("which", PASSES)
def test_a_flag_that_is_lost_alone_is_replaced_by_the_next(which: str):
    """Epochs only grow: the exit's says that the rank has been at the entry."""
    want = right_bits(PUSH, which)
    for rank in range(2):
        with injected("flag", rank=rank) as lost:
            results = jax.block_until_ready(calls(PUSH)[which]())
        assert lost.happened == 1
        assert_right(results, want)
        jax_mok.check()


@pytest.mark.parametrize("which", PASSES)
def test_a_flag_later_than_the_time_out_fails_the_call_on_both_ranks(which: str):
    want = right_bits(PULL, which)
    call = calls(PULL)[which]
    with injected("flag", rank=1, delay_s=TIMEOUT_S + 0.6) as late:
        results = jax.block_until_ready(call())
    text = time_outs()
    assert late.happened == 1
    assert is_nan(results, 0) and is_nan(results, 1)
    expected, seen = assert_waited_in_vain(text, 0, 1)
    assert expected % 2 == 1 and seen == expected - 1
    assert "rank 1 came to a call in which rank 0 had failed" in text
    for _ in range(3):
        assert_right(jax.block_until_ready(call()), want)
    jax_mok.check()


def first_call(tokens: int) -> tuple[Call, bytes]:
    """A call for whose sizes the ranks have yet to set up memory, and its result's bits."""
    inputs, mesh = test_gpu.draw("zipf", tokens=tokens), mesh_of(2)
    operands = test_gpu.on_gpus(inputs, mesh)
    step = test_gpu.forward(2, PUSH.config()).lower(*operands).compile()
    return lambda: step(*operands), test_gpu.run(inputs, 1).tobytes()


def test_flags_of_the_set_up_that_come_late_do_no_harm():
    require_gpus(2)
    call, want = first_call(tokens=270)
    with injected("set_up_flag", rank=1, count=4, delay_s=DELAY_S) as late:
        results = jax.block_until_ready(call())
    assert late.happened == 4
    assert np.asarray(results).tobytes() == want


@pytest.mark.parametrize("which", range(4))
def test_one_lost_flag_of_the_set_up_leaves_both_ranks_agreed(which: int):
    """That of an entry is replaced by that of the exit; without that of an exit one rank gives up
    waiting, but the other has decided that both go on."""
    require_gpus(2)
    call, want = first_call(tokens=278 + 4 * which)
    with injected("set_up_flag", rank=1, first=which) as lost:
        results = jax.block_until_ready(call())
    assert lost.happened == 1
    assert np.asarray(results).tobytes() == want


def test_without_flags_of_the_set_up_both_ranks_fail_and_can_try_again():
    require_gpus(2)
    call, want = first_call(tokens=274)
    begin = time.monotonic()
    told = r"rank [01] (has not reached the set-up|could not go on)"
    with (
        injected("set_up_flag", rank=1, count=1000) as lost,
        pytest.raises(jax.errors.JaxRuntimeError, match=told),
    ):
        jax.block_until_ready(call())
    assert time.monotonic() - begin < 3  # of which the time-out is one
    assert lost.happened > 0
    assert np.asarray(call()).tobytes() == want


def lose_in_turn() -> None:
    """Losses of rank 1, in one of two processes."""
    for loss, which in [
        (LOSSES["both_flags"], "forward"),
        (LOSSES["flag_of_exit"], "backward"),
        (LOSSES["pull_token"], "forward"),
    ]:
        want = right_bits(loss.way, which)
        meet()
        results = loss.run(which, rank=1)
        text = time_outs()
        meet()  # a next call would show the flag that the peer waits for
        loss.assert_told(text, results, rank=1)
        assert_contexts_are_of_use()
        meet()
        assert_right_again(calls(loss.way)[which], want)


PROCESS = """
import test_gpu_inject
test_gpu_inject.lose_in_turn()
"""


def test_two_processes_are_told_as_well():
    require_gpus(2)
    run_in_two_processes(PROCESS, within_s=120)
