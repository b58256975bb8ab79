"""Ranks that come late, never, or to another call: the others are told who, and go on.

On one rank an operand passes through a Python function, which holds it, raises, or lets it through.
"""

import concurrent.futures
import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routings
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracle import Inputs, Outputs

import jax_mok

RANKS, TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 4, 8, 16, 24, 8, 2
LATE = 2
TIMEOUT_S = 1.0
CONFIG = jax_mok.MoEConfig(timeout_s=TIMEOUT_S)
# Not the same bits on a mesh of two axes: XLA sums over groups.
SUMS = dict.fromkeys(("d_w_gate", "d_w_up", "d_w_down"), np.zeros(0))


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    rng = np.random.default_rng(13)
    routes = routings.uniform(rng, RANKS, TOKENS, TOP_K, EXPERTS)
    return harness.draw_inputs(rng, routes, hidden=HIDDEN, inner=INNER, experts=EXPERTS)


@pytest.fixture(scope="module")
def expected(inputs: Inputs) -> Outputs:
    return harness.run_layer(inputs, 1)


class Gate:
    """What one rank passes on its way to a call."""

    def __init__(self) -> None:
        self.raises = False
        self._is_open = threading.Event()
        self._is_open.set()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Meanwhile that rank waits here."""
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

    def before(self, values: jax.Array, is_guarded: jax.Array) -> jax.Array:
        """The values, once their rank has passed."""
        kind = jax.ShapeDtypeStruct(values.shape, values.dtype)
        return jax.lax.cond(
            is_guarded,
            lambda values: jax.pure_callback(self._pass, kind, values),
            lambda values: values,
            values,
        )

    def _pass(self, values: jax.Array) -> np.ndarray:
        assert self._is_open.wait(timeout=60)
        if self.raises:
            raise ValueError("this rank does not come")
        return np.asarray(values)


Step = Callable[[Inputs], Outputs]


def make_step(gate: Gate, guarded: str = "expert_ids", mesh: Mesh | None = None) -> Step:
    """Forward and backward; of the last group's late rank one operand passes the gate."""
    mesh = mesh or harness.mesh_of(RANKS)
    last_place = {name: size - 1 for name, size in mesh.shape.items()} | {"ep": LATE}

    def body(inputs: Inputs) -> Outputs:
        def layer(*floats: jax.Array) -> jax.Array:
            x, *others = floats
            return jax_mok.moe_ffn(x, inputs.expert_ids, *others, axis_name="ep", config=CONFIG)

        is_late = jnp.all(
            jnp.array([jax.lax.axis_index(name) == n for name, n in last_place.items()])
        )
        inputs = inputs._replace(**{guarded: gate.before(getattr(inputs, guarded), is_late)})
        x, _, *others, dy = inputs
        y, pullback = jax.vjp(layer, x, *others)
        return Outputs(y, *pullback(dy))

    tokens, experts = P(mesh.axis_names), P("ep")
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(Inputs(*(tokens,) * 3, *(experts,) * 3, tokens),),
        out_specs=Outputs(*(tokens,) * 3, *(experts,) * 3),
        check_vma=False,
    )
    return jax.jit(mapped)


def run(step: Step, inputs: Inputs) -> Outputs:
    return Outputs(*map(np.asarray, step(inputs)))


def assert_goes_on(step: Step, inputs: Inputs, expected: Outputs) -> None:
    """Nothing is left of the failure: not in this program, nor in another one."""
    jax_mok.check()
    harness.assert_same_bits(run(step, inputs), expected)
    harness.assert_same_bits(harness.run_layer(inputs, RANKS), expected)
    jax_mok.check()


def expect_time_out(started: float) -> str:
    """What `check` says of a call that is going on, as soon as it says it."""
    while time.monotonic() - started < TIMEOUT_S + 2:
        try:
            jax_mok.check()
        except jax_mok.MoETimeoutError as error:
            return str(error)
        time.sleep(0.01)
    pytest.fail("no rank was told in time")


def fail_while_closed(gate: Gate, step: Step, inputs: Inputs) -> str:
    """What `check` says of a call while the late rank still waits before it."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with gate.closed():
            call = pool.submit(run, step, inputs)
            text = expect_time_out(time.monotonic())
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"for rank {LATE} of {RANKS}; 3 came"):
            call.result(timeout=60)
    return text


@pytest.mark.parametrize(
    ("guarded", "operation"), [("expert_ids", "plan"), ("dy", "dispatch|reverse combine")]
)
def test_a_rank_held_up_before_a_call_is_named_while_it_is_held(
    inputs: Inputs, expected: Outputs, guarded: str, operation: str
) -> None:
    gate = Gate()
    step = make_step(gate, guarded)
    harness.assert_same_bits(run(step, inputs), expected)
    text = fail_while_closed(gate, step, inputs)
    wanted = f"({operation}): rank [013] waited for rank {LATE}; 3 of {RANKS} ranks came"
    assert re.match(wanted, text), text
    assert_goes_on(step, inputs, expected)


def test_a_rank_that_is_late_by_less_than_the_time_out_is_waited_for(
    inputs: Inputs, expected: Outputs
) -> None:
    gate = Gate()
    step = make_step(gate)
    run(step, inputs)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with gate.closed():
            call = pool.submit(run, step, inputs)
            time.sleep(TIMEOUT_S / 4)
            assert not call.done()
        harness.assert_same_bits(call.result(timeout=60), expected)
    assert_goes_on(step, inputs, expected)


def test_a_late_rank_of_one_group_is_told_with_its_group(inputs: Inputs, expected: Outputs) -> None:
    devices = np.array(jax.devices()[: 2 * RANKS])
    gate = Gate()
    step = make_step(gate, mesh=Mesh(devices.reshape(2, RANKS), ("dp", "ep")))
    harness.assert_same_bits(run(step, inputs)._replace(**SUMS), expected._replace(**SUMS))
    text = fail_while_closed(gate, step, inputs)
    wanted = f"plan: rank [013] of group 1 waited for rank {LATE}; 3 of {RANKS} ranks came"
    assert re.match(wanted, text), text
    assert "\n" not in text
    harness.assert_same_bits(run(step, inputs)._replace(**SUMS), expected._replace(**SUMS))


def test_a_rank_that_raises_before_a_call_is_named(inputs: Inputs, expected: Outputs) -> None:
    gate = Gate()
    step = make_step(gate)
    run(step, inputs)
    gate.raises = True
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(run, step, inputs)
        text = expect_time_out(time.monotonic())
        with pytest.raises(jax.errors.JaxRuntimeError):
            call.result(timeout=60)
    assert re.match(f"plan: rank [013] waited for rank {LATE}; 3 of {RANKS} ranks came", text)
    gate.raises = False
    assert_goes_on(step, inputs, expected)


def test_a_rank_in_another_call_is_named_by_both(inputs: Inputs, expected: Outputs) -> None:
    other = dataclasses.replace(CONFIG, ring_rows=64)

    def body(inputs: Inputs, is_led_astray: jax.Array) -> jax.Array:
        operands = inputs[:-1]
        return jax.lax.cond(
            is_led_astray & (jax.lax.axis_index("ep") == LATE),
            lambda *operands: jax_mok.moe_ffn(*operands, axis_name="ep", config=other),
            lambda *operands: jax_mok.moe_ffn(*operands, axis_name="ep", config=CONFIG),
            *operands,
        )

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=harness.mesh_of(RANKS),
            in_specs=(P("ep"), P()),
            out_specs=P("ep"),
            check_vma=False,
        )
    )
    np.testing.assert_array_equal(step(inputs, False), expected.y)
    started = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"plan waited {TIMEOUT_S:g} s for rank"):
        jax.block_until_ready(step(inputs, True))
    with pytest.raises(jax_mok.MoETimeoutError) as error:
        jax_mok.check()
    assert time.monotonic() - started < TIMEOUT_S + 2
    text = str(error.value)
    assert len(text.splitlines()) == 2, text
    assert f"plan: rank {LATE} waited for rank 0; 1 of {RANKS} ranks came" in text
    assert re.search(f"plan: rank [013] waited for rank {LATE}; 3 of {RANKS} ranks came", text)
    np.testing.assert_array_equal(step(inputs, False), expected.y)
