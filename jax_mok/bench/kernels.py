"""How long a program's kernels take on the GPUs, as JAX's profiler records it."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

PLAN_KERNELS = (
    "count_choices",
    "place_choices",
    "list_work_kernel",
    "find_waves_kernel",
    "place_items_kernel",
)
"""Those that make the plan, and from it the lists of work, of a forward and a backward pass."""

NO_GRAPHS: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": "1000"}
"""Compiler options of a program whose kernels are launched, and recorded, one by one."""


def record(run: Callable[[], Any], calls: int) -> list[dict[str, Any]]:
    """The trace events of so many calls, in Chrome's format.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def kernel_seconds(events: Iterable[dict[str, Any]], names: Iterable[str]) -> float:
    """Seconds that all GPUs together spend in kernels of these names.

    Raises:
      LookupError: if there is none.
    """
    events = list(events)
    gpus = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "GPU" in event["args"]["name"]
    }
    wanted = tuple(f"::{name}(" for name in names)
    durations = [
        event["dur"]
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in gpus
        and any(name in event["name"] for name in wanted)
    ]
    if not durations:
        raise LookupError(f"the profiler has recorded none of the kernels {', '.join(names)}")
    return float(sum(durations)) * 1e-6
