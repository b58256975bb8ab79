"""Commands that share the devices of a machine and end in time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

PASSED, FAILED, CUT_OFF, LEFT_OUT = "passed", "failed", "cut off", "left out"
_LEAST_S = 20.0  # a job that has less is not begun
_POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Job:
    """What runs on some devices.

    Attributes:
      step: what it is a part of.
      name: of its files.
      devices: how many, no other job's meanwhile.
      commands: processes that run side by side.
      limit_s: after which something must be wrong with it.
      results: files that it writes.
    """

    step: str
    name: str
    devices: int
    commands: Sequence[Sequence[str]]
    limit_s: float
    results: Sequence[Path] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job went; `note` says more, as far as there is something to say."""

    job: Job
    state: str
    seconds: float = 0.0
    note: str = ""


@dataclasses.dataclass
class _Running:
    job: Job
    devices: list[str]
    processes: list[subprocess.Popen[bytes]]
    began: float


class Machine:
    """Runs jobs in their order, several at once where devices for them are free."""

    def __init__(
        self,
        devices: Sequence[str],
        environment: Callable[[Sequence[str]], dict[str, str]],
        folder: Path,
        deadline: float,
    ) -> None:
        """Prepares it.

        Args:
          devices: their names.
          environment: of processes that see just these devices.
          folder: for the jobs' logs.
          deadline: on the clock of `time.monotonic`, when all must have ended.
        """
        self._free, self._environment = list(devices), environment
        self._folder, self._deadline = folder, deadline

    def run(
        self,
        jobs: Sequence[Job],
        began: Callable[[Job], None],
        ended: Callable[[Outcome], None],
    ) -> list[Outcome]:
        """How they went, in their order; `began` and `ended` are told meanwhile."""
        waiting, running = deque(jobs), list[_Running]()
        outcomes: dict[str, Outcome] = {}

        def end(outcome: Outcome) -> None:
            outcomes[outcome.job.name] = outcome
            ended(outcome)

        try:
            while waiting or running:
                while waiting and self._deadline - time.monotonic() < _LEAST_S:
                    end(Outcome(waiting.popleft(), LEFT_OUT, note="no time was left"))
                # None overtakes: those on all devices would wait for the last of the small ones.
                while waiting and waiting[0].devices <= len(self._free):
                    began(waiting[0])
                    running.append(self._start(waiting.popleft()))
                for each in list(running):
                    if outcome := self._outcome(each):
                        running.remove(each)
                        self._free += each.devices
                        end(outcome)
                time.sleep(_POLL_S)
        finally:
            for each in running:
                _end(each)
        return [outcomes[job.name] for job in jobs]

    def _start(self, job: Job) -> _Running:
        for result in job.results:
            result.unlink(missing_ok=True)  # of a run before
        devices, self._free = self._free[: job.devices], self._free[job.devices :]
        running = _Running(job, devices, [], time.monotonic())
        for number, command in enumerate(job.commands):
            with self._log(job, number).open("wb") as log:
                process = subprocess.Popen(
                    command,
                    env=os.environ | self._environment(devices),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # what it starts ends with it
                )
            running.processes.append(process)
        return running

    def _log(self, job: Job, number: int) -> Path:
        suffix = f"-{number}" if len(job.commands) > 1 else ""
        return self._folder / f"{job.name}{suffix}.log"

    def _outcome(self, running: _Running) -> Outcome | None:
        """None while it goes on."""
        now, job = time.monotonic(), running.job
        seconds = now - running.began
        codes = [process.poll() for process in running.processes]
        failed = [number for number, code in enumerate(codes) if code]
        if None in codes and not failed and now < self._deadline and seconds < job.limit_s:
            return None
        _end(running)
        if failed:
            log = self._log(job, failed[0])
            note = f"exit status {codes[failed[0]]}, see {log}: {_last_line(log)}"
            return Outcome(job, FAILED, seconds, note)
        if None not in codes:
            return Outcome(job, PASSED, seconds, _last_line(self._log(job, 0)))
        if seconds >= job.limit_s:
            note = f"not ended after {job.limit_s:g} s, see {self._log(job, codes.index(None))}"
            return Outcome(job, FAILED, seconds, note)
        return Outcome(job, CUT_OFF, seconds, "at the time limit of all")


def _end(running: _Running) -> None:
    for process in running.processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
        process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]
