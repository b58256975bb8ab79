"""What the kernels' timelines hold, and what follows from it: states over time, a trace."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_mok import ffi

# `TimelineRecord` of cuda/core/timeline.h. Times are nanoseconds of each GPU's own clock.
RECORD = np.dtype(
    [
        ("begin", "u8"),
        ("middle", "u8"),
        ("end", "u8"),
        ("tile", "i4"),
        ("column", "i4"),
        ("flags", "i4"),
        ("sm", "i4"),
        ("block", "i4"),
        ("role", "i4"),
    ]
)
SCHEDULE, PULL, MULTIPLY = range(3)  # roles
_FORWARD_PRODUCTS = ("gate and up", "down")
_BACKWARD_PRODUCTS = ("replay", "hidden gradient", "input gradient", "weights", "weights")
_DOWN_FLAG, _PRODUCT_SHIFT = 1, 8  # of WorkItem in cuda/sm90/work.h, and backward_work.h
SENDING, PULLING, IDLE = "results leave", "tokens pulled", "idle"


def start(devices: list[jax.Device]) -> None:
    """Has the kernels of these GPUs keep timelines; each has run a call of the layer.

    Raises:
      RuntimeError: if a GPU cannot.
    """
    assert ffi.cuda is not None
    for device in devices:
        if problem := ffi.cuda.start_timeline(device.local_hardware_id):
            raise RuntimeError(problem)


def take(devices: list[jax.Device]) -> list[np.ndarray]:
    """Ends them; of each GPU the records since, of type RECORD."""
    assert ffi.cuda is not None
    return [
        np.frombuffer(ffi.cuda.take_timeline(device.local_hardware_id), RECORD)
        for device in devices
    ]


def of_last_kernel(records: np.ndarray) -> np.ndarray:
    """Those of the kernel that ran last: from the end of the longest time in which none worked."""
    records = records[np.argsort(records["begin"], kind="stable")]
    covered = np.maximum.accumulate(records["end"])
    gaps = records["begin"][1:].astype(np.int64) - covered[:-1].astype(np.int64)
    if not len(gaps) or gaps.max() <= 0:
        return records
    return records[int(np.argmax(gaps)) + 1 :]


def products_of(backward: bool) -> tuple[str, ...]:
    """What the multiplying warps of a kernel do, in the order in which it begins."""
    return tuple(dict.fromkeys(_BACKWARD_PRODUCTS)) if backward else _FORWARD_PRODUCTS


def product_names(records: np.ndarray, backward: bool) -> np.ndarray:
    """Of each record of a multiplying warp, what it multiplies."""
    if backward:
        return np.array(_BACKWARD_PRODUCTS)[records["flags"] >> _PRODUCT_SHIFT & 0xF]
    return np.array(_FORWARD_PRODUCTS)[records["flags"] & _DOWN_FLAG]


def spans(records: np.ndarray, backward: bool) -> dict[str, np.ndarray]:
    """By state, float64 [count, 3]: SM, begin and end in µs since the kernel's first record."""
    zero = records["begin"].min()

    def rows(chosen: np.ndarray, begin: str, end: str) -> np.ndarray:
        times = [(chosen[name] - zero).astype(np.float64) * 1e-3 for name in (begin, end)]
        return np.stack([chosen["sm"].astype(np.float64), *times], axis=1)

    multiplied = records[records["role"] == MULTIPLY]
    names = product_names(multiplied, backward)
    states = {
        name: rows(multiplied[names == name], "begin", "middle") for name in products_of(backward)
    }
    states[SENDING] = rows(multiplied, "middle", "end")
    states[PULLING] = rows(records[records["role"] == PULL], "begin", "end")
    return states


def shares(states: dict[str, np.ndarray]) -> dict[str, float]:
    """By state, the share of the kernel's time that an SM spends in it, on average.

    "idle" is what the multiplying warps do beside: wait for an item, or until the kernel ends.
    """
    last = max(each[:, 2].max() for each in states.values() if len(each))
    sms = len(np.unique(np.concatenate([each[:, 0] for each in states.values()])))
    busy = {
        name: float(np.sum(each[:, 2] - each[:, 1])) / (last * sms) for name, each in states.items()
    }
    return busy | {IDLE: 1 - sum(share for name, share in busy.items() if name != PULLING)}


def trace(records_of_gpus: list[np.ndarray], backward: bool) -> dict[str, Any]:
    """All records as events in Chrome's trace format, which Perfetto shows too.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

    Each GPU's times begin with its own first record: their clocks are not the same.
    """
    roles = {SCHEDULE: "schedules", PULL: "pulls", MULTIPLY: "multiplies"}
    events: list[dict[str, Any]] = []
    for gpu, records in enumerate(records_of_gpus):
        zero = int(records["begin"].min())
        events.append(_named("process_name", gpu, 0, f"GPU {gpu}"))
        for sm in np.unique(records["sm"]).tolist():
            for role, what in roles.items():
                events.append(_named("thread_name", gpu, 3 * sm + role, f"SM {sm} {what}"))
        names = product_names(records, backward)
        for record, name in zip(records, names, strict=True):
            role = int(record["role"])
            place = {"pid": gpu, "tid": 3 * int(record["sm"]) + role}
            begin, middle, end = (
                (int(record[each]) - zero) * 1e-3 for each in ("begin", "middle", "end")
            )
            tile, column = int(record["tile"]), int(record["column"])
            if role == PULL:
                arguments = {"tile": tile, "tokens": column}
                events.append(_event("tokens", begin, end, arguments, place))
                continue
            arguments = {"tile": tile, "column block": column}
            if role == SCHEDULE:
                events.append(_event(f"waits for {name}", begin, end, arguments, place))
                continue
            events.append(_event(str(name), begin, middle, arguments, place))
            events.append(_event(SENDING, middle, end, arguments, place))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(
    name: str, begin: float, end: float, arguments: dict[str, int], place: dict[str, int]
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "args": arguments, **place}
