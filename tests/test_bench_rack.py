"""The simulated rack: what must hold whatever its rates are, and what has been measured."""

import dataclasses
import json

import numpy as np
import pytest
from test_bench import run

import jax_mok
from jax_mok.bench.rack_model import BIN_S, H200, MACHINES, MXFP8_BYTES, Case, routes_of, simulate
from jax_mok.bench.shapes import SHAPES, Shape

SMALL = Shape(tokens=300, hidden=320, inner=192, experts=6, top_k=3)
MOVES = [
    jax_mok.MoEConfig(dispatch=dispatch, combine=combine)
    for dispatch in ("pull", "push")
    for combine in ("pull", "push")
]
# Milliseconds on GPU 0 of two in docs/rack.md: the kernel, 95 % of the tokens and the last one.
PULLED = {"qwen3-30b-a3b": (0.96, 0.202, 0.251), "deepseek-v3": (7.53, 0.66, 0.78)}
# Milliseconds in docs/rack.md, in a burst, by shape: two runs of one GPU, and the same two of two.
MEASURED = {
    "qwen3-30b-a3b": ((), (1.131, 1.118)),
    "4096x1536": ((3.414, 3.380), (3.697, 3.669)),
    "deepseek-v3": ((7.899, 7.809), (8.236, 8.189)),
    "mixtral-8x7b": ((7.449, 7.601), (7.496, 8.022)),
    "gpt-oss": ((), (2.346, 2.375)),
    "deepseek-v3-1024": ((1.078, 1.089), (1.172, 1.223)),
}


def pairs_of(shape: Shape, gpus: int) -> tuple[np.ndarray, np.ndarray]:
    """[from, to] tokens that go to the experts' ranks, each once; and rows that come back."""
    routes, experts = routes_of(shape, gpus, 0.0), shape.experts_of(gpus)
    tokens, rows = np.zeros((gpus, gpus)), np.zeros((gpus, gpus))
    for home, ids in enumerate(routes):
        for owners in ids // (experts // gpus):
            tokens[home, np.unique(owners)] += 1
            np.add.at(rows, (owners, home), 1)
    for each in (tokens, rows):
        np.fill_diagonal(each, 0)
    return tokens, rows


@pytest.mark.parametrize("config", MOVES, ids=lambda c: f"{c.dispatch}, {c.combine}")
@pytest.mark.parametrize("gpus", [2, 5])
def test_every_byte_goes_over_the_link_once(gpus, config):
    tokens, rows = pairs_of(SMALL, gpus)
    case = Case(SMALL, gpus, config=config, token_bytes=MXFP8_BYTES)
    kernel = simulate(case).kernel
    for move, count, size in (("dispatch", tokens, MXFP8_BYTES), ("combine", rows, 2.0)):
        expected = count * SMALL.hidden * size
        np.testing.assert_allclose(kernel[move]["bytes"], expected, rtol=1e-9)
        np.testing.assert_allclose(kernel[move]["binned"].sum(0), expected, rtol=1e-4)


@pytest.mark.parametrize("order", ["peers", "rows", "plan"])
def test_all_orders_pull_the_same(order):
    kernel = simulate(Case(SMALL, 5, pull_order=order)).kernel
    assert kernel["dispatch"]["bytes"].sum() == pairs_of(SMALL, 5)[0].sum() * SMALL.hidden * 2
    assert np.all(kernel["tokens_s"] > 0)
    assert np.all(kernel["tokens_s"] <= kernel["kernel_s"])


@pytest.mark.parametrize("config", MOVES, ids=lambda c: f"{c.dispatch}, {c.combine}")
def test_repeated_tokens_come_for_each_choice(config):
    kernel = simulate(Case(SMALL, 5, config=config, repeats_tokens=True)).kernel
    tokens, rows = pairs_of(SMALL, 5)
    assert tokens.sum() < rows.sum()
    np.testing.assert_array_equal(kernel["dispatch"]["bytes"], rows.T * SMALL.hidden * 2)


def test_one_gpu_has_no_link():
    outcome = simulate(Case(SMALL, 1))
    for move in ("dispatch", "combine"):
        assert not outcome.kernel[move]["bytes"].any()
    assert not {"barriers", "routes", "showing tokens"} & set(outcome.parts)
    assert outcome.bound.link_s == 0


def test_a_simulation_is_the_same_every_time():
    first, second = (simulate(Case(SMALL, 5, exponent=0.9)) for _ in range(2))
    assert first.seconds == second.seconds
    np.testing.assert_array_equal(first.kernel["kernel_s"], second.kernel["kernel_s"])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("config", MOVES, ids=lambda c: f"{c.dispatch}, {c.combine}")
def test_nothing_is_faster_than_the_bound(config, machine):
    small = SHAPES["qwen3-30b-a3b"]._replace(tokens=1024)
    for exponent in (0.0, 1.2):
        case = Case(small, 6, config=config, exponent=exponent, machine=MACHINES[machine])
        outcome = simulate(case)
        assert outcome.seconds > outcome.bound.seconds
        assert outcome.share_of_link(case.machine) < 1
        port = case.machine.link_bytes_per_s
        for side in (0, 1):
            moved = sum(outcome.kernel[move]["bytes"].sum(side) for move in ("dispatch", "combine"))
            assert moved.max() / port < outcome.seconds


def test_less_work_and_faster_parts_take_less_time():
    usual = Case(SHAPES["qwen3-30b-a3b"]._replace(tokens=1024), 4)
    seconds = simulate(usual).seconds
    for machine in (
        H200.with_pulls_as_fast(4),
        H200._replace(link_bytes_per_s=4 * H200.link_bytes_per_s),
        H200._replace(product_flops_per_s=4 * H200.product_flops_per_s),
    ):
        assert simulate(dataclasses.replace(usual, machine=machine)).seconds < seconds
    assert simulate(dataclasses.replace(usual, output_bytes=MXFP8_BYTES)).seconds < seconds


@pytest.mark.parametrize("name", MEASURED)
def test_one_and_two_gpus_take_what_has_been_measured(name):
    for gpus, runs in enumerate(MEASURED[name], 1):
        seconds = simulate(Case(SHAPES[name], gpus)).seconds
        for milliseconds in runs:
            assert seconds == pytest.approx(milliseconds * 1e-3, rel=0.1)


@pytest.mark.parametrize("name", PULLED)
def test_tokens_are_here_when_they_have_been_measured_to_be(name):
    kernel = simulate(Case(SHAPES[name], 2)).kernel
    whole, most, last = (milliseconds * 1e-3 for milliseconds in PULLED[name])
    assert kernel["kernel_s"][0] == pytest.approx(whole, rel=0.05)
    assert kernel["tokens_s"][0] == pytest.approx(last, rel=0.1)
    # Bytes count when the link has carried them, and then a pull may have yet to end.
    come = kernel["dispatch"]["binned"][:, :, 0].sum(1).cumsum()
    here = BIN_S * (1 + np.searchsorted(come, 0.95 * come[-1]))
    assert here == pytest.approx(most, rel=0.2)


def test_what_is_copied_together_waits_once():
    """Of rows so small that the latency is all, three take what one takes."""
    shape = Shape(tokens=3000, hidden=64, inner=64, experts=2, top_k=1)
    tokens = pairs_of(shape, 2)[0].max()
    machine = H200._replace(sms=4, pull_latency_s=1e-3, look_s=0.0)
    pulls = simulate(Case(shape, 2, machine=machine)).kernel["tokens_s"].max() / 1e-3
    # A warp looks at 32 rows: ten times three, and two.
    assert pulls == pytest.approx(tokens / 4 * 11 / 32, abs=3)


def test_two_gpus_pull_and_push_as_has_been_measured():
    """Figures of docs: the profiler's of the kernel, and what turning a move round costs."""
    qwen = simulate(Case(SHAPES["qwen3-30b-a3b"], 2))
    assert qwen.parts["kernel"] == pytest.approx(0.99e-3, rel=0.1)
    # Of both passes, whose other pass does not change.
    usual = simulate(Case(SHAPES["4096x1536"], 2)).seconds
    for config, difference in (
        (jax_mok.MoEConfig(dispatch="push"), 11.250 - 11.042),
        (jax_mok.MoEConfig(combine="pull"), 11.846 - 11.042),
    ):
        turned = simulate(Case(SHAPES["4096x1536"], 2, config=config)).seconds
        assert turned - usual == pytest.approx(difference * 1e-3, abs=0.2e-3)


def test_a_rack_is_simulated_and_drawn(tmp_path):
    flags = ["--shapes=toy", "--gpus=1,2,5", "--json=f.json", "--plot=p.png"]
    finished = run("rack", *flags, devices=1, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "simulated, not measured" in finished.stdout
    points = json.loads((tmp_path / "f.json").read_text())["shapes"]["toy"]
    assert [point["value"] for point in points if point["varied"] == "gpus"] == [1, 2, 5]
    varied = {point["varied"] for point in points}
    assert {"pull order", "pull speed", "repeats", "direction", "MXFP8", "zipf exponent"} < varied
    assert {"gpus", "ring"} < varied
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_simulated_is_refused(tmp_path):
    for flag, message in (("--shapes=tiny", "known: qwen3"), ("--gpus=0", "positive numbers")):
        finished = run("rack", flag, devices=1, cwd=tmp_path)
        assert finished.returncode != 0
        assert message in finished.stdout + finished.stderr
