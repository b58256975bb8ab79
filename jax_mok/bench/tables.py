"""What the tables of all measurements have in common."""

from __future__ import annotations

from typing import Any

from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 140


def open_console() -> Console:
    """Where tables are printed, wide enough for them if it is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)


def open_report(measured: dict[str, Any], what: str) -> Console:
    """The console of `open_console`, which says first what the tables are of.

    Args:
      measured: a session's description, and what else it has.
      what: of which calls.
    """
    console = open_console()
    console.print(
        f"{measured['devices']} x {measured['kind']}, JAX {measured['jax']}, {what}; "
        f"median of {measured['rounds']} rounds ± half the interquartile range"
    )
    return console


def passes_of(measured: dict[str, Any]) -> str:
    """Which passes were measured."""
    return "forward and backward" if measured["backward"] else "forward"


def plus_minus(times: dict[str, float], unit: float = 1e3, digits: str = ".3f") -> str:
    """The median of `Times` and half the interquartile range; by default in ms."""
    spread = (times["high"] - times["low"]) / 2
    return f"{times['median'] * unit:{digits}} ± {spread * unit:{digits}}"


def figure(value: float, digits: str) -> str:
    """The value, or a dash where so few digits show nothing of it."""
    shown = f"{value:{digits}}"
    return shown if any(digit in shown for digit in "123456789") else "\N{EN DASH}"


def print_not_measured(console: Console, measured: dict[str, Any]) -> None:
    """What there is not on these devices, a line each."""
    for line in measured["not_measured"]:
        console.print(f"not measured: {line}")
