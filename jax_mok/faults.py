"""What compiled calls recorded, raised when the caller asks."""

from __future__ import annotations

import collections
from typing import NamedTuple

from jax_mok import _native, ffi
from jax_mok.errors import MoEError, MoEInputError, MoETimeoutError
from jax_mok.text import spans

_MOST_LINES = 8


class _Told(NamedTuple):
    """A fault in words: `before`, then the rank or GPU and the group it is of, then `after`."""

    before: str
    noun: str
    number: int
    group: str
    after: str


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
    # What differs in its rank or GPU only is one line.
    numbers = collections.defaultdict(list)
    for told, n in collections.Counter(map(_describe, faults)).items():
        numbers[told._replace(number=-1), n].append(told.number)
    lines = []
    for (told, n), places in numbers.items():
        several = len(places) > 1
        who = f"{told.noun}{'s' if several else ''} {spans(places)}{told.group}"
        line = f"{told.before}{who}{' each' if several else ''} {told.after}"
        lines.append(f"{line}, {n} times" if n > 1 else line)
    more = dropped + sum(n * len(places) for (_, n), places in [*numbers.items()][_MOST_LINES:])
    if more:
        lines = [*lines[:_MOST_LINES], f"and {more} more faults"]
    kinds = {fault["kind"] for fault in faults}
    error: type[MoEError] = MoETimeoutError
    if not kinds & {"timeout", "kernel_timeout"}:
        error = MoEError if "other_call" in kinds else MoEInputError
    raise error("\n".join(lines))


def _describe(fault: _native.Fault) -> _Told:
    group = f" of group {fault['group']}" if fault["group"] else ""
    if fault["kind"] == "other_call":
        return _Told(
            "",
            "rank",
            fault["rank"],
            "",
            f"came to a call, and rank {fault['peer']} to one of other sizes or directions: epoch "
            f"{fault['expected']}, seen {fault['seen']}; their outputs are NaN (of build_plan: "
            "empty). All ranks have to run the same program",
        )
    if fault["operation"] == "meeting":
        late = fault["seen"] < fault["expected"]
        what = (
            f"waited in vain for rank {fault['peer']} (MoEConfig.timeout_s)"
            if late
            else f"came to a call in which rank {fault['peer']} had failed"
        )
        return _Told(
            "",
            "rank",
            fault["rank"],
            "",
            f"{what}: epoch {fault['expected']}, seen {fault['seen']}; its output is NaN (of "
            "build_plan: empty). Later calls are right once all ranks have caught up; if they stay "
            "NaN, a rank has left a call out: restart the processes",
        )
    if fault["kind"] == "timeout":
        return _Told(
            f"{fault['operation']}: ",
            "rank",
            fault["rank"],
            group,
            f"waited for rank {fault['peer']}; {fault['seen']} of {fault['expected']} "
            "ranks came within MoEConfig.timeout_s",
        )
    if fault["kind"] == "kernel_timeout":
        return _Told(
            "a wait within a kernel on ",
            "GPU",
            fault["device"],
            "",
            f"expired in {fault['seen']} call(s); the outputs are NaN. MoEConfig.timeout_s "
            "includes the kernel's own time: raise it; if such a call takes much less, report a "
            "bug",
        )
    knows_rank = fault["rank"] >= 0
    return _Told(
        "",
        "rank" if knows_rank else "GPU",
        fault["rank"] if knows_rank else fault["device"],
        group if knows_rank else "",
        f"had {fault['seen']} expert id(s) outside "
        f"0..{fault['expected'] - 1}; they were treated as masked: mend the router, or use -1 for "
        "masked choices",
    )
