"""What `python -m jax_mok.bench gpus` runs, step by step."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jax_mok.bench.gpus_jobs import Job

STEPS = ("tests", "bits", "layer", "timeline", "precision", "peers")
TESTS = "test_gpu_many.py"
_TESTED = (8, 6, 2, 4, 3, 1)  # numbers of TESTS, in an order that fills eight GPUs
_MEASURED = (8, 4, 2)
_TIMELINE_OF = "deepseek-v3"


class Plan(NamedTuple):
    """What the jobs are made of.

    Attributes:
      on_gpus: else on CPU devices.
      devices: how many there are.
      shapes: names of the layers that are measured.
      folder: for what the jobs write.
      tests: the folder of the repository's tests.
      rounds: of each measurement.
    """

    on_gpus: bool
    devices: int
    shapes: Sequence[str]
    folder: Path
    tests: Path
    rounds: int

    @property
    def measured(self) -> list[int]:
        """Numbers of devices that are measured, the largest first."""
        return [count for count in _MEASURED if count <= self.devices] or [1]


def jobs_of(plan: Plan, steps: Sequence[str]) -> list[Job]:
    """In the order to run them in: of each step's the most important first.

    Of the measurements but the peers' those on most devices begin, so that the others can go side
    by side.
    """
    jobs = [job for step in STEPS if step in steps for job in _MAKERS[step](plan)]
    first, last = ("tests", "bits"), ("peers",)
    middle = [job for job in jobs if job.step not in first + last]
    return [
        *(job for job in jobs if job.step in first),
        *sorted(middle, key=lambda job: -job.devices),
        *(job for job in jobs if job.step in last),
    ]


def _bench(plan: Plan, measurement: str, *more: str) -> list[str]:
    platform = "cuda" if plan.on_gpus else "cpu"
    return [sys.executable, "-m", "jax_mok.bench", measurement, f"--platform={platform}", *more]


def _tests(plan: Plan) -> Iterator[Job]:
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    if not plan.on_gpus:
        run.append("--collect-only")
    for count in (count for count in _TESTED if count <= plan.devices):
        command = [*run, str(plan.tests / TESTS), "-k", f"{count}gpus"]
        yield Job("tests", f"tests-{count}", count, [command], 240)


def _bits(plan: Plan) -> Iterator[Job]:
    most = max(count for count in _TESTED if count <= plan.devices)
    result = plan.folder / "bits.json"
    command = _bench(plan, "bits", f"--json={result}")
    yield Job("bits", "bits", most, [command], 150, [result])
    if most == 1:
        return
    result = plan.folder / "bits-processes.json"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    run = _bench(plan, "bits", f"--processes={most}", f"--coordinator={address}")
    if not plan.on_gpus:
        # A device of each process is one of `most`.
        run = ["env", "XLA_FLAGS=--xla_force_host_platform_device_count=1", *run]
    commands = [[*run, f"--process={number}", f"--json={result}"] for number in range(most)]
    yield Job("bits", "bits-processes", most, commands, 150, [result])


def _measurement(
    plan: Plan, name: str, count: int, limit_s: float, *more: str, suffix: str = ""
) -> Job:
    label = f"{name}-{count}{suffix}"
    result = plan.folder / f"{label}.json"
    command = _bench(plan, name, *more, f"--json={result}", f"--rounds={plan.rounds}")
    return Job(name, label, count, [command], limit_s, [result])


def _layer(plan: Plan) -> Iterator[Job]:
    shapes = f"--shapes={','.join(plan.shapes)}"
    for count in plan.measured:
        for suffix, backward in (("-forward", "--nobackward"), ("-gradients", "--backward")):
            yield _measurement(plan, "layer", count, 300, shapes, backward, suffix=suffix)


def _timeline(plan: Plan) -> Iterator[Job]:
    if not plan.on_gpus:
        return  # which alone record one
    shape = _TIMELINE_OF if _TIMELINE_OF in plan.shapes else plan.shapes[0]
    files = [f"--plot={plan.folder / 'timeline.png'}", f"--trace={plan.folder / 'timeline.trace'}"]
    yield _measurement(plan, "timeline", plan.devices, 120, f"--shapes={shape}", *files)


def _precision(plan: Plan) -> Iterator[Job]:
    shapes = f"--shapes={','.join(plan.shapes)}"
    for count in plan.measured:
        yield _measurement(plan, "precision", count, 240, shapes)


def _peers(plan: Plan) -> Iterator[Job]:
    for passes, backward in (("forward", "--nobackward"), ("gradients", "--backward")):
        for count in plan.measured:
            for shape in plan.shapes:
                suffix = f"-{passes}-{shape}"
                more = (f"--shapes={shape}", backward)
                yield _measurement(plan, "peers", count, 240, *more, suffix=suffix)


_MAKERS: dict[str, Callable[[Plan], Iterator[Job]]] = {
    "tests": _tests,
    "bits": _bits,
    "layer": _layer,
    "timeline": _timeline,
    "precision": _precision,
    "peers": _peers,
}
