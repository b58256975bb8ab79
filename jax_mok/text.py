"""What messages have in common."""

from __future__ import annotations

from collections.abc import Iterable


def spans(numbers: Iterable[int], most: int | None = None) -> str:
    """Different numbers, and runs of them in short: "0-2, 5".

    With `most`, of more runs than that only the first: "0-2, 5 and 7 more".
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    left = sum(map(len, runs[most:])) if most is not None else 0
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:most])
    return f"{text} and {left} more" if left else text
