"""The measurements run, and their arithmetic is right. What they measure is not looked at."""

import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jax_mok.bench import __main__ as bench_main
from jax_mok.bench import bound, kernels, tables, timing
from jax_mok.bench.chains import Chain
from jax_mok.bench.routes import KINDS, draw_routes
from jax_mok.bench.shapes import Shape
from jax_mok.bench.stopwatch import Stopwatch
from jax_mok.bench.timing import Times, difference, time_rounds


def run(
    name: str, *flags: str, devices: int, cwd: os.PathLike, **variables: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jax_mok.bench", name, *flags],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            **variables,
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(("devices", "apart"), [(1, False), (2, False), (2, True)])
def test_layer_is_measured_at_toy_size_on_cpu_devices(tmp_path, devices, apart):
    flags = ("--platform=cpu", "--shapes=toy", "--rounds=2", "--json=figures.json")
    flags += ("--composition=composed", f"--apart={apart}")
    finished = run("layer", *flags, devices=devices, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert f"{devices} x cpu" in finished.stdout
    assert ("every GPU by itself" in finished.stdout) == apart
    assert "composition composed" in finished.stdout
    assert finished.stderr.startswith("layer: the layer on GPUs, as shares of cuBLAS")
    assert "half a minute at toy size" in finished.stderr.splitlines()[0]
    assert "\N{EN DASH}" in finished.stdout
    assert "not measured: link and memory" in finished.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["link_bytes_per_s"] is None
    assert set(figures["shapes"]["toy"]) == {"burst", "sustained"}
    for row in figures["shapes"]["toy"].values():
        assert row["bound_s"] is None
        assert set(row["layer_s"]) == {"median", "low", "high"}


def test_conversions_are_measured_at_toy_size_on_cpu_devices(tmp_path):
    flags = ("--platform=cpu", "--rounds=2", "--json=figures.json")
    finished = run("conversions", *flags, devices=1, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "round float32 to bfloat16, both axes" in finished.stdout
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]["toy"]
    assert rows["de-quantise to bfloat16, axis -1"]["bytes"] == 2 * 64 * 96 * (33 / 32 + 2)


@pytest.mark.parametrize("backward", [False, True])
def test_precisions_are_measured_at_toy_size_on_cpu_devices(tmp_path, backward):
    flags = ("--platform=cpu", "--rounds=2", "--json=f.json", f"--backward={backward}")
    finished = run("precision", *flags, devices=2, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    forms = json.loads((tmp_path / "f.json").read_text())["shapes"]["toy"]
    others = [] if backward else ["mxfp8, stored", "mxfp8, prepared"]
    assert list(forms) == ["bfloat16", "mxfp8, converted", *others]
    assert forms["bfloat16"]["over_bfloat16"] == 1.0


def test_directions_are_tried_on_cpu_devices_and_not_kept(tmp_path):
    flags = ["--platform=cpu", "--rounds=2", "--json=f.json", "--plot=p.png"]
    finished = run("link", *flags, devices=2, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert finished.returncode == 0, finished.stderr
    assert "not measured: rates and signals between GPUs: CPU devices have no link" in (
        finished.stdout
    )
    moves = {"dispatch", "combine", "reverse_combine", "reverse_dispatch"}
    assert set(json.loads((tmp_path / "f.json").read_text())["shapes"]["toy"]) == {
        "default",
        *moves,
    }
    assert not (tmp_path / "cache" / "jax_mok").exists()


def test_training_steps_are_measured_beside_the_peers(tmp_path):
    flags = ["--platform=cpu", "--rounds=2", "--layers=1", "--steps=2", "--json=f.json"]
    finished = run("train", *flags, devices=2, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    layers = json.loads((tmp_path / "f.json").read_text())["shapes"]["toy"]
    assert set(layers) == {"jax_mok", "without experts", "gathered", "padded all-to-all"}
    ours, nothing = (layers[name]["first_losses"] for name in ("jax_mok", "without experts"))
    assert layers["gathered"]["first_losses"] == pytest.approx(ours, rel=1e-2)
    assert nothing != pytest.approx(ours, rel=1e-2)
    assert layers["jax_mok"]["times_ours"] == 1.0


def test_curves_are_measured_and_drawn(tmp_path):
    flags = ["--platform=cpu", "--rounds=2", "--json=f.json", "--plot=p.png"]
    finished = run("scaling", *flags, devices=2, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    curves = json.loads((tmp_path / "f.json").read_text())["shapes"]["toy"]
    assert set(curves) == {"tokens", "experts", "zipf exponent", "ring rows"}
    for points in curves.values():
        values = [point["value"] for point in points]
        assert len(values) > 1
        assert values == sorted(set(values))
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", bench_main._MEASUREMENTS)
def test_what_is_measured_is_said_at_once(name, monkeypatch, capsys):
    def stop(module):
        raise ModuleNotFoundError(module)

    monkeypatch.setattr(bench_main.importlib, "import_module", stop)
    monkeypatch.setattr(sys, "argv", ["bench", name])
    with pytest.raises(SystemExit):
        bench_main.main()
    assert re.match(rf"{name}: the|{name}: training|{name}: which", capsys.readouterr().err)
    monkeypatch.setattr(sys, "argv", ["bench", name, "--helpfull"])
    with pytest.raises(SystemExit):
        bench_main.main()
    assert capsys.readouterr().err == ""


def test_figures_of_which_no_digit_is_left_are_dashes():
    shown = [tables.figure(value, ".1f") for value in (0.0, 0.04, -0.04, 0.05001, 10.0)]
    assert shown == ["\N{EN DASH}"] * 3 + ["0.1", "10.0"]


def test_the_gpu_with_most_rows_is_found():
    shape = Shape(tokens=3, hidden=64, inner=64, experts=4, top_k=2)
    balanced = np.array([[[0, 2], [1, 3], [0, 3], [1, 2], [0, 2], [1, 3]]], np.int32)
    assert bound.busiest(shape, balanced, 2) == 1.0
    assert bound.busiest(shape, np.zeros_like(balanced), 2) == 2.0
    both = np.concatenate([balanced, np.zeros_like(balanced)])
    assert bound.busiest(shape, both, 2) == 1.5


@pytest.mark.parametrize("backward", [False, True])
def test_peers_are_measured_beside_the_layer(tmp_path, backward):
    flags = ["--platform=cpu", "--shapes=toy", "--rounds=2", "--json=f.json", "--plot=p.png"]
    finished = run("peers", *flags, f"--backward={backward}", devices=2, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "not measured: ragged all-to-all, the Mosaic kernels and torch" in finished.stdout
    peers = json.loads((tmp_path / "f.json").read_text())["shapes"]["toy"]["layers"]
    assert set(peers) == {"jax_mok", "gathered, lax", "padded all-to-all, lax", "capacity"}
    assert peers["jax_mok"]["times_ours"] == 1.0
    assert peers["capacity"]["note"].startswith("drops ")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("residuals", ["replayed", "checkpointed"])
def test_gradients_are_measured_with_other_residuals(tmp_path, residuals):
    flags = ("--platform=cpu", "--shapes=toy", "--rounds=2", f"--residuals={residuals}")
    finished = run("layer", *flags, "--backward", devices=2, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert f"forward and backward, residuals {residuals}" in finished.stdout
    refused = run("layer", *flags, devices=2, cwd=tmp_path)
    assert f"--residuals={residuals} is for --backward" in refused.stdout + refused.stderr


def test_kernels_are_found_by_name_on_gpus_only():
    def event(pid, name, microseconds):
        return {"ph": "X", "pid": pid, "tid": 1, "name": name, "ts": 0, "dur": microseconds}

    def process(pid, name):
        return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}

    events = [
        process(1, "/device:GPU:0"),
        process(2, "/device:GPU:1"),
        process(3, "/host:CPU"),
        event(1, "mok::sm90::(anonymous namespace)::count_choices(mok::sm90::Call)", 3.0),
        event(2, "mok::sm90::(anonymous namespace)::place_choices(mok::sm90::Call)", 4.5),
        event(1, "void mok::sm90::(anonymous namespace)::persistent_kernel<R>(R::P)", 900.0),
        event(3, "mok::count_choices(host)", 50.0),
        {"ph": "C", "pid": 1, "name": "a counter"},
    ]
    assert kernels.kernel_seconds(events, kernels.PLAN_KERNELS) == pytest.approx(7.5e-6)
    with pytest.raises(LookupError, match="none of the kernels order_pulls"):
        kernels.kernel_seconds(events, ["order_pulls"])


def test_the_profiler_records_what_runs():
    assert kernels.record(lambda: jnp.ones(3) + 1, 2)


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("layer", "--shapes=tiny", "unknown --shapes tiny; known: qwen3-30b-a3b"),
        ("layer", "--shapes=", "--shapes is empty; known: qwen3-30b-a3b"),
        ("layer", "--json=no/such/f", "--json=no/such/f cannot be written: No such file"),
        ("peers", "--plot=no/such/f", "--plot=no/such/f cannot be written: No such file"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_measuring(tmp_path, name, flag, message):
    finished = run(name, flag, "--platform=cpu", devices=1, cwd=tmp_path)
    assert finished.returncode != 0
    assert message in finished.stdout + finished.stderr


def test_link_carries_a_token_once_to_a_rank_and_every_output_row_home():
    shape = Shape(tokens=2, hidden=10, inner=1, experts=4, top_k=2)
    routes = np.array([[0, 1], [0, 2], [0, 1], [3, 2]])  # two tokens a GPU, two experts a GPU
    unique_tokens = (1 + 1) / 2  # token 1 to GPU 1, token 2 to GPU 0
    rows = 2 * 2 / 2
    assert bound.link_bytes(shape, routes, 2) == 2 * 10 * (unique_tokens + rows)
    assert bound.link_bytes(shape, np.stack([routes, routes]), 2) == 60
    rates = {"flops_per_s": 1e3, "link_bytes_per_s": 1e2}
    least = bound.bound_of(shape, routes, 2, backward=True, **rates)
    assert least == (
        3 * 6 * 2 * 2 * 10 * 5 / 4 / 1e3,
        2 * 10 * (3 * unique_tokens + 2 * rows) / 1e2,
    )
    assert least.seconds == least.link_s


def test_one_gpu_has_no_link_and_reads_all_its_experts():
    shape = Shape(tokens=3, hidden=10, inner=7, experts=4, top_k=1)
    assert bound.link_bytes(shape, np.array([[0], [1], [1]]), 1) == 0
    assert bound.weight_bytes(shape) == 2 * 3 * 10 * 7 * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_goes_to_distinct_experts(kind):
    routes = draw_routes(kind, np.random.default_rng(0), 100, 12, 5)
    assert (routes.shape, routes.dtype) == ((100, 5), np.int32)
    assert all(len(set(row)) == 5 for row in routes.tolist())
    assert 0 <= routes.min() <= routes.max() < 12


def test_every_call_is_timed_in_every_round_but_those_that_warm_up():
    turns = {"a": [], "b": []}
    rounds = []
    calls = {name: list_of.append for name, list_of in turns.items()}
    seconds = time_rounds(calls, 5, warm_up=2, after_round=lambda: rounds.append(0))
    assert turns == {"a": list(range(7)), "b": list(range(7))}
    assert [len(seconds[name]) for name in "ab"] == [5, 5]
    assert len(rounds) == 7


def test_a_difference_of_programs_is_taken_round_by_round():
    assert difference([9.0, 14.0, 23.0], [1.0, 2.0, 3.0], 4) == Times(3.0, 2.5, 4.0)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes in sleep alone."""

    class Clock:
        now = 0.0

        def sleep(self, seconds: float) -> None:
            self.now += seconds

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_a_burst_leaves_out_what_starting_a_program_costs(clock):
    watch = Stopwatch(burst_s=0.02, sustained_s=0.1, rounds=3)
    chains = {
        "short": Chain(lambda calls: clock.sleep(0.5 + calls * 0.001), 0.001),
        "long": Chain(lambda calls: clock.sleep(0.5 + calls * 0.030), 0.030),
    }
    seconds = watch.burst(chains)
    assert seconds["short"].median == pytest.approx(0.001)
    assert seconds["long"].median == pytest.approx(0.030)


@pytest.mark.parametrize(("first_s", "second_s"), [(0.025, 0.001), (0.0004, 0.0013)])
def test_sustained_turns_give_the_times_of_both_calls(clock, first_s, second_s):
    watch = Stopwatch(burst_s=0.02, sustained_s=0.1, rounds=3)
    took = {"layer": first_s, "product": second_s}
    orders = set()

    def run(order: tuple[str, ...]) -> None:
        orders.add(order)
        clock.sleep(0.5 + sum(took[name] for name in order))

    seconds = watch.sustained(run, "layer", "product", (first_s, second_s))
    assert {name: times.median for name, times in seconds.items()} == pytest.approx(took)
    assert all(0.05 < sum(took[name] for name in order) < 0.3 for order in orders)
