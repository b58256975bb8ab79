"""All tests and measurements of a machine: what runs where and when, and what is said of it."""

import json
import pathlib
import sys
import time

import pytest
from test_bench import run

from jax_mok.bench import gpus_jobs, gpus_report
from jax_mok.bench.checksums import RESULTS
from jax_mok.bench.gpus_jobs import CUT_OFF, FAILED, LEFT_OUT, PASSED, Job, Machine, Outcome
from jax_mok.bench.gpus_steps import STEPS, Plan, jobs_of

HERE = pathlib.Path(__file__).parent


def test_steps_run_at_toy_size_on_cpu_devices(tmp_path):
    flags = ["--platform=cpu", "--steps=tests,bits,precision", f"--tests={HERE}", "--rounds=2"]
    finished = run("gpus", *flags, "--out=found", devices=1, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    names = ("tests-2", "tests-1", "bits", "bits-processes", "precision-2")
    for name in names:
        assert f"{name} passed" in finished.stderr
    assert finished.stdout.count("tests collected") == 2
    rows = [
        row
        for name in ("bits", "bits-processes")
        for row in json.loads((tmp_path / "found" / f"{name}.json").read_text())["rows"]
    ]
    assert [(row["devices"], row["processes"]) for row in rows] == [(1, 1), (2, 1), (2, 2)]
    assert all(row["sums"] == rows[0]["sums"] for row in rows)
    assert set(rows[0]["sums"]) == set(RESULTS)
    assert "mxfp8, prepared" in finished.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=test"], "--steps=test; known: tests, bits"),
        (["--shapes="], "--shapes=; known: qwen3-30b-a3b"),
        (["--tests=nowhere"], "--tests=nowhere has no test_gpu_many.py"),
        (["--platform=cuda"], "names an NVIDIA GPU: --platform=cpu tries it"),
        (["--platform=cuda", "--gpus=2"], "names an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, flags, message):
    finished = run(
        "gpus", "--platform=cpu", *flags, devices=1, cwd=tmp_path, CUDA_VISIBLE_DEVICES=""
    )
    assert finished.returncode != 0
    assert message in " ".join((finished.stdout + finished.stderr).split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("devices", [1, 2, 5, 8])
def test_every_number_of_devices_there_are_has_its_jobs(devices, tmp_path):
    plan = Plan(True, devices, ["gpt-oss", "deepseek-v3"], tmp_path, HERE, rounds=2)
    jobs = jobs_of(plan, STEPS)
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert all(job.devices <= devices for job in jobs)
    tested = [job.devices for job in jobs if job.step == "tests"]
    assert sorted(tested) == [count for count in (1, 2, 3, 4, 6, 8) if count <= devices]
    measured = {1: [1], 2: [2], 5: [4, 2], 8: [8, 4, 2]}[devices]
    for name, shape in (("layer", ""), ("peers", "-gpt-oss"), ("peers", "-deepseek-v3")):
        for passes in ("forward", "gradients"):
            for count in measured:
                assert names.count(f"{name}-{count}-{passes}{shape}") == 1
    assert f"precision-{measured[0]}" in names and f"timeline-{devices}" in names
    processes = [len(job.commands) for job in jobs if job.name == "bits-processes"]
    assert processes == {1: [], 2: [2], 5: [4], 8: [8]}[devices]


def job(name: str, devices: int, *codes: str, limit_s: float = 60) -> Job:
    return Job("step", name, devices, [[sys.executable, "-c", code] for code in codes], limit_s)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Of three devices, whose jobs find those that are theirs in the environment."""
    monkeypatch.setattr(gpus_jobs, "_LEAST_S", 0.5)
    running, most = set(), []

    def start(jobs: list[Job], time_s: float = 60) -> list[Outcome]:
        def began(job: Job) -> None:
            running.add(job.name)
            most.append(set(running))

        deadline = time.monotonic() + time_s
        each = Machine(["a", "b", "c"], lambda names: {"MINE": "".join(names)}, tmp_path, deadline)
        return each.run(jobs, began, lambda outcome: running.discard(outcome.job.name))

    start.together = most
    return start


def test_jobs_run_side_by_side_on_devices_of_their_own_and_in_their_order(machine, tmp_path):
    code = "import os, time; time.sleep(0.5); print(os.environ['MINE'])"
    outcomes = machine([job("x", 2, code), job("y", 1, code), job("z", 3, code), job("u", 1, code)])
    assert [outcome.state for outcome in outcomes] == [PASSED] * 4
    on = {outcome.job.name: outcome.note for outcome in outcomes}
    assert {on["x"], on["y"]} == {"ab", "c"}
    assert sorted(on["z"]) == ["a", "b", "c"]
    assert machine.together == [{"x"}, {"x", "y"}, {"z"}, {"u"}]
    assert (tmp_path / "x.log").read_text() == "ab\n"


def test_a_job_fails_with_any_of_its_processes_and_leaves_none_behind(machine, tmp_path):
    forever = "import subprocess, sys; subprocess.run([sys.executable, '-c', '{}'])"
    late = f"import time, pathlib; time.sleep(2); pathlib.Path({str(tmp_path / 'late')!r}).touch()"
    waits = forever.format(late.replace("'", '"'))
    outcomes = machine(
        [
            job("fails", 1, waits, "import time; time.sleep(0.5); print('why'); exit(3)"),
            job("hangs", 1, waits, limit_s=0.5),
        ]
    )
    assert [outcome.state for outcome in outcomes] == [FAILED, FAILED]
    assert "exit status 3" in outcomes[0].note and outcomes[0].note.endswith("fails-1.log: why")
    assert "not ended after 0.5 s" in outcomes[1].note
    time.sleep(2.5)
    assert not (tmp_path / "late").exists()


def test_what_there_is_no_time_for_is_cut_off_or_left_out(machine, tmp_path):
    stale = tmp_path / "figures.json"
    stale.touch()
    sleeps = job("sleeps", 3, "import time; time.sleep(60)")
    outcomes = machine([sleeps, job("waits", 1, "")], time_s=1)
    assert [outcome.state for outcome in outcomes] == [CUT_OFF, LEFT_OUT]
    assert stale.exists()


def test_figures_of_an_earlier_run_are_not_taken_for_those_of_this_one(machine, tmp_path):
    stale = tmp_path / "figures.json"
    stale.touch()
    machine([Job("step", "fails", 1, [[sys.executable, "-c", "exit(1)"]], 60, [stale])])
    assert not stale.exists()


def times(milliseconds: float) -> dict[str, float]:
    return {name: milliseconds * 1e-3 for name in ("median", "low", "high")}


def write(folder: pathlib.Path, name: str, figures: dict) -> None:
    (folder / f"{name}.json").write_text(json.dumps(figures))


def test_tables_are_made_of_what_is_there(tmp_path, capsys):
    for count, milliseconds in ((2, 4.0), (8, 5.0)):
        row = {"layer_s": times(milliseconds), "share": 0.8, "bound_s": 3e-3}
        figures = {"shapes": {"qwen3-30b-a3b": {"burst": row}}}
        write(tmp_path, f"layer-{count}-forward", figures)
    layers = {
        "jax_mok": {"layer_s": times(4.5), "share": 0.75, "times_ours": 1.0},
        "gathered, mosaic": {"times_ours": 3.4},
        "capacity": {"times_ours": 3.1},
        "torch, all-to-all, grouped_mm": {"times_ours": 2.25},
    }
    of_shape = {"layers": layers, "bound_s": 3.6e-3}
    write(tmp_path, "peers-8-forward-qwen3-30b-a3b", {"shapes": {"qwen3-30b-a3b": of_shape}})
    (tmp_path / "precision-8.json").write_text('{"shapes": {')  # ended while it wrote
    left_out = Outcome(job("peers-2", 2, ""), LEFT_OUT, note="no time was left")
    assert not gpus_report.report(tmp_path, ["qwen3-30b-a3b"], [8, 2], [left_out])
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    peers = ["3.10 capacity", "2.25"]
    assert all(row[:2] == ["qwen3-30b-a3b", "forward"] for row in cells[:3])
    assert [row[2:] for row in cells[:3]] == [
        ["2", "burst", "4.000 ± 0.000", "0.800", "0.750", "1.00", "", ""],
        ["8", "burst", "5.000 ± 0.000", "0.800", "0.600", "1.25", "", ""],
        ["8", "burst beside peers", "4.500 ± 0.000", "0.750", "0.800", "1.00", *peers],
    ]
    assert cells[-1] == ["step", "peers-2", "2", LEFT_OUT, "", "no time was left"]


def test_different_bits_are_told(tmp_path, capsys):
    sums = dict.fromkeys(RESULTS, "0123456789ab")
    rows = [{"devices": 1, "processes": 1, "sums": sums}]
    other = [{"devices": 8, "processes": 8, "sums": sums | {"dx": "0123456789ac"}}]
    write(tmp_path, "bits", {"rows": rows})
    write(tmp_path, "bits-processes", {"rows": other})
    assert gpus_report.report(tmp_path, [], [], [])
    told = "8 devices of 8 processes have other bits of dx than 1 of 1"
    assert told in capsys.readouterr().out
    write(tmp_path, "bits-processes", {"rows": rows})
    assert not gpus_report.report(tmp_path, [], [], [])


def test_a_token_is_counted_once_for_each_gpu_it_goes_to():
    assert gpus_report.repeats("4096x1536", 1) == (0.0, 0.0)
    choices, sent = gpus_report.repeats("4096x1536", 8)  # 8 choices of 128 experts, 16 a GPU
    assert choices == pytest.approx(8 * 7 / 8, rel=0.02)
    stays_away = 1.0
    for choice in range(8):
        stays_away *= (112 - choice) / (128 - choice)
    assert sent == pytest.approx(7 * (1 - stays_away), rel=0.02)
