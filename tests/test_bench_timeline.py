"""The timeline's records: what is made of them. The kernel that writes them runs on GPUs only."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from test_bench import run

from jax_mok.bench import records, timeline_plot
from jax_mok.bench.records import MULTIPLY, PULL, RECORD, SCHEDULE

SMS, ITEMS = 4, 6


def a_kernel(zero: int, backward: bool = False) -> np.ndarray:
    """Every SM multiplies two products by turns, 8 of 10 µs, and sends the results in 1; pulls."""
    rows = []
    for sm in range(SMS):
        for item in range(ITEMS):
            begin = zero + item * 10_000
            flags = (1 + item % 2) << 8 if backward else item % 2
            place = (item, 0, flags, sm, sm)
            rows.append((begin, 0, begin + 500, *place, SCHEDULE))
            rows.append((begin, begin + 8_000, begin + 9_000, *place, MULTIPLY))
        rows.append((zero + 1_000, 0, zero + 3_000, 0, 1, 0, sm, sm, PULL))
    return np.array(rows, RECORD)


def test_a_record_is_as_long_as_the_kernels():
    assert RECORD.itemsize == 48


@pytest.mark.parametrize("backward", [False, True])
def test_states_are_times_of_sms(backward):
    states = records.spans(a_kernel(10**15, backward), backward)
    first, second = ("hidden gradient", "input gradient") if backward else ("gate and up", "down")
    assert len(states[first]) == len(states[second]) == SMS * ITEMS // 2
    np.testing.assert_array_equal(states[first][0], [0, 0, 8])
    np.testing.assert_array_equal(states[second][0], [0, 10, 18])
    np.testing.assert_array_equal(states[records.SENDING][0], [0, 8, 9])
    np.testing.assert_array_equal(states[records.PULLING][0], [0, 1, 3])
    shares = records.shares(states)
    assert shares[first] == pytest.approx(24 / 59)
    assert shares[records.SENDING] == pytest.approx(6 / 59)
    assert shares[records.PULLING] == pytest.approx(2 / 59)
    assert shares[records.IDLE] == pytest.approx(5 / 59)


def test_the_last_kernel_begins_after_the_longest_pause():
    earlier, last = a_kernel(10**15), a_kernel(10**15 + 100_000)
    found = records.of_last_kernel(np.concatenate([last, earlier]))
    assert sorted(found.tolist()) == sorted(last.tolist())
    assert len(records.of_last_kernel(last)) < len(last), "it has pauses of its own"


def test_a_trace_has_every_record_and_names_its_lanes():
    taken = [a_kernel(10**15), a_kernel(5 * 10**14)]
    events = records.trace(taken, backward=False)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * SMS * (3 * ITEMS + 1)
    assert {event["pid"] for event in spans} == {0, 1}
    assert min(event["ts"] for event in spans) == 0
    assert [event["args"] for event in spans if event["name"] == "tokens"] == 2 * SMS * [
        {"tile": 0, "tokens": 1}
    ]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "SM 3 multiplies" in names
    lanes = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} <= lanes


def test_a_picture_is_drawn(tmp_path):
    timeline_plot.draw(tmp_path / "t.png", records.spans(a_kernel(0), False), "title")
    assert (tmp_path / "t.png").stat().st_size > 10_000


# As on a GPU, whose records are made up; in a process of its own, since measurements share flags.
MADE_UP = """
import dataclasses, sys
from absl import app
from test_bench_timeline import a_kernel
from jax_mok.bench import timeline

open_session = timeline.open_session
timeline.record = lambda session: [a_kernel(10**15)]
timeline.open_session = lambda *given: dataclasses.replace(open_session(*given), on_gpus=True)
app.run(timeline.main, ["timeline", "--platform=cpu", "--shapes=toy", *sys.argv[1:]])
"""


def test_shares_are_printed_and_written(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MADE_UP, f"--json={tmp_path / 't.json'}"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "│ gate and up   │" in finished.stdout
    shapes = json.loads((tmp_path / "t.json").read_text())["shapes"]
    assert shapes["toy"]["shares"][records.IDLE] == pytest.approx(5 / 59)


def test_without_gpus_it_says_so(tmp_path):
    finished = run("timeline", "--platform=cpu", devices=2, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("not measured: the timeline")
