"""Growth of the work of a chain of steps with its length, counted in calls of functions: the same on every machine, busy or not."""
from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

FIRST, SHORT, LONG = 2, 40, 120     # steps
MOST_CALLS = 12_000_000     # for a short chain, which takes a twentieth of them: work that doubles with each step ends here


class TooMuchWork(Exception):
    """A function called more functions than it may."""


def calls_of(function: Callable[[], Any], most: int) -> int:
    """The number of calls, of Python functions and of those of C, that `function` makes. Raises TooMuchWork at more than `most`."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" or event == "c_call"
        if calls > most:
            sys.setprofile(None)
            raise TooMuchWork(f"more than {most} calls, in {frame.f_code.co_qualname} of {frame.f_code.co_filename}")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def check_growth(run: Callable[[int], Any]) -> None:
    """Run chains of `FIRST`, `SHORT` and `LONG` steps: the work may grow as the length squared, and no faster. The first run of all does
    more, which would hide growth: it is not counted."""
    run(FIRST)
    short = calls_of(lambda: run(SHORT), MOST_CALLS)
    calls_of(lambda: run(LONG), short * (LONG // SHORT) ** 2)
