"""The tests and the measurements on all GPUs of a machine, within ten minutes.

Steps, in this order, but for layer, timeline and precision, of which those on most GPUs come first:

    tests      `tests/test_gpu_many.py` on 1, 2, 3, 4, 6 and 8 GPUs, side by side where there are
               enough; one process with all of them, and a process for each
    bits       checksums of the results for one batch on all those numbers, and of a process a GPU
    layer      `bench layer`, forward and with gradients, on 8, 4 and 2 GPUs, each GPU with as many
               tokens and experts
    timeline   `bench timeline` on all
    precision  `bench precision`, MXFP8 beside bfloat16, on 8, 4 and 2
    peers      `bench peers`, a shape at a time, forward, then with gradients, on 8, 4 and 2; torch
               among them where it is installed

What there is no time for is said, and can be run by another call with --steps and --shapes: a call
adds to the figures of its folder, and the tables are made of all that lie there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import Progress

from jax_mok.bench.gpus_jobs import FAILED, PASSED, Job, Machine, Outcome
from jax_mok.bench.gpus_report import report
from jax_mok.bench.gpus_steps import STEPS, TESTS, Plan, jobs_of
from jax_mok.bench.shapes import SHAPES, TOY

_TOKENS = 8192

_PLATFORM = flags.DEFINE_enum(
    "platform", "cuda", ["cuda", "cpu"], "cpu only tries it, at toy size, tests not run"
)
_GPUS = flags.DEFINE_integer(
    "gpus", None, "devices to use; default: all, on CPU devices two", lower_bound=1
)
_STEPS = flags.DEFINE_list("steps", list(STEPS), f"some of {', '.join(STEPS)}")
_SHAPES = flags.DEFINE_list(
    "shapes",
    None,
    f"some of {', '.join(SHAPES | TOY)}; default: those of {_TOKENS} tokens, on CPU devices toy",
)
_LIMIT_S = flags.DEFINE_float("limit_s", 570, "seconds, after which all has ended", lower_bound=30)
_OUT = flags.DEFINE_string("out", "gpus", "folder for figures and logs")
_TESTS = flags.DEFINE_string("tests", "tests", "the folder of the repository's tests")
_ROUNDS = flags.DEFINE_integer("rounds", 4, "timed rounds of each measurement", lower_bound=2)


def main(argv: Sequence[str]) -> None:
    """Prints the tables; the exit status is 1 if anything failed."""
    deadline = time.monotonic() + _LIMIT_S.value
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    _expect_known("steps", _STEPS.value, STEPS)
    devices = _devices()
    on_gpus = _PLATFORM.value == "cuda"
    shapes = _SHAPES.value
    if shapes is None:
        of_all = [name for name, shape in SHAPES.items() if shape.tokens == _TOKENS]
        shapes = of_all if on_gpus else list(TOY)
    _expect_known("shapes", shapes, tuple(SHAPES | TOY))
    if "tests" in _STEPS.value and not (Path(_TESTS.value) / TESTS).is_file():
        raise app.UsageError(
            f"--tests={_TESTS.value} has no {TESTS}: name the folder of the repository's "
            "tests, or leave them out of --steps"
        )
    folder = Path(_OUT.value).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(on_gpus, len(devices), shapes, folder, Path(_TESTS.value), _ROUNDS.value)
    jobs = jobs_of(plan, _STEPS.value)
    environment = _gpu_environment if on_gpus else _cpu_environment
    machine = Machine(devices, environment, folder, deadline)
    # Drawn between jobs only, so that nothing runs beside what they time.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        outcomes = _run(machine, jobs, progress)
    failed = report(plan.folder, plan.shapes, plan.measured, outcomes)
    if failed or any(outcome.state == FAILED for outcome in outcomes):
        sys.exit(1)


def _run(machine: Machine, jobs: Sequence[Job], progress: Progress) -> list[Outcome]:
    opened, task = time.monotonic(), progress.add_task("jobs", total=len(jobs))

    def say(text: str) -> None:
        seconds = time.monotonic() - opened
        progress.console.print(
            f"{seconds:7.1f} s  {text}", highlight=False, markup=False, soft_wrap=True
        )

    def ended(outcome: Outcome) -> None:
        progress.update(task, advance=1, refresh=True)
        note = "" if outcome.state == PASSED else f": {outcome.note}"
        say(f"{outcome.job.name} {outcome.state} in {outcome.seconds:.0f} s{note}")

    return machine.run(jobs, lambda job: say(f"{job.name} on {job.devices}"), ended)


def _expect_known(flag: str, given: Sequence[str], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown or not given:
        raise app.UsageError(f"--{flag}={','.join(given)}; known: {', '.join(known)}")


def _devices() -> list[str]:
    """Names of those to use. JAX is not asked: it would take their memory from the jobs."""
    if _PLATFORM.value == "cpu":
        return [f"cpu{number}" for number in range(_GPUS.value or 2)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = [name for name in visible.split(",") if name]
    elif shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        finished = subprocess.run(command, capture_output=True, text=True)
        found = finished.stdout.split() if finished.returncode == 0 else []
    else:
        found = []
    if not found:
        raise app.UsageError(
            "neither nvidia-smi nor CUDA_VISIBLE_DEVICES names an NVIDIA GPU: --platform=cpu tries "
            "it without"
        )
    if _GPUS.value and _GPUS.value > len(found):
        raise app.UsageError(f"--gpus={_GPUS.value}, and there are {len(found)}")
    return found[: _GPUS.value]


def _gpu_environment(devices: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def _cpu_environment(devices: Sequence[str]) -> dict[str, str]:
    flag = f"--xla_force_host_platform_device_count={len(devices)}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
