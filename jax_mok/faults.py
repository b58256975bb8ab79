"""What compiled calls recorded, raised when the caller asks."""

from __future__ import annotations

import collections

from jax_mok import _native, ffi
from jax_mok.errors import MoEError, MoEInputError, MoETimeoutError

_MOST_LINES = 8


def check() -> None:
    """Raises what the calls that have finished recorded since the last check.

    Faults inside a compiled call cannot raise where they happen. A time-out fails the XLA program
    on CPU devices; on GPUs it turns the output to NaN, and makes `build_plan`'s tables empty.
    Expert ids out of range are treated as masked. All leave a record, and this function (or the
    next call that is traced) raises it. Wait for the results (for instance with
    `jax.block_until_ready`) before checking.

    Raises:
      MoETimeoutError: if a rank did not come within `MoEConfig.timeout_s`, or a GPU's kernel took
        longer.
      MoEError: if ranks made different calls at the same time.
      MoEInputError: if expert ids were out of range.
    """
    faults, dropped = _native.take_faults()
    if ffi.cuda is not None:
        faults += ffi.cuda.take_faults()
    if not faults:
        return
    times = collections.Counter(map(_describe, faults))
    lines = [f"{line}, {n} times" if n > 1 else line for line, n in times.items()]
    more = dropped + sum(n for n in list(times.values())[_MOST_LINES:])
    if more:
        lines = [*lines[:_MOST_LINES], f"and {more} more faults"]
    kinds = {fault["kind"] for fault in faults}
    error: type[MoEError] = MoETimeoutError
    if not kinds & {"timeout", "kernel_timeout"}:
        error = MoEError if "other_call" in kinds else MoEInputError
    raise error("\n".join(lines))


def _describe(fault: _native.Fault) -> str:
    group = f" of group {fault['group']}" if fault["group"] else ""
    if fault["kind"] == "other_call":
        return (
            f"rank {fault['rank']} came to a call, and rank {fault['peer']} to one of other sizes "
            f"or directions: epoch {fault['expected']}, seen {fault['seen']}; their outputs "
            "are NaN (of build_plan: empty). All ranks have to run the same program"
        )
    if fault["operation"] == "meeting":
        late = fault["seen"] < fault["expected"]
        what = (
            f"waited in vain for rank {fault['peer']} (MoEConfig.timeout_s)"
            if late
            else f"came to a call in which rank {fault['peer']} had failed"
        )
        return (
            f"rank {fault['rank']} {what}: epoch {fault['expected']}, seen {fault['seen']}; its "
            "output is NaN (of build_plan: empty). Later calls are right once all ranks have "
            "caught up; if they stay NaN, a rank has left a call out: restart the processes"
        )
    if fault["kind"] == "timeout":
        return (
            f"{fault['operation']}: rank {fault['rank']}{group} waited for rank {fault['peer']}; "
            f"{fault['seen']} of {fault['expected']} ranks came within MoEConfig.timeout_s"
        )
    if fault["kind"] == "kernel_timeout":
        return (
            f"a wait within a kernel on GPU {fault['device']} expired in {fault['seen']} call(s); "
            "their outputs are NaN. MoEConfig.timeout_s includes the kernel's own time: raise it; "
            "if such a call takes much less, report a bug"
        )
    who = f"rank {fault['rank']}{group}" if fault["rank"] >= 0 else f"GPU {fault['device']}"
    return (
        f"{who} had {fault['seen']} expert id(s) outside "
        f"0..{fault['expected'] - 1}; they were treated as masked: mend the router, or use -1 for "
        "masked choices"
    )
