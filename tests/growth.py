"""Measures how the work of a chain of steps grows with its length, in function calls, which are the same on every machine, busy or not."""
from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

FIRST, SHORT, LONG = 2, 8, 24     # numbers of steps
# most calls for a short chain, which normally takes a fiftieth of this: work that doubles with each step is stopped here
MOST_CALLS = 12_000_000


class TooMuchWork(Exception):
    """Raised if a function makes more calls than allowed."""


def calls_of(function: Callable[[], Any], most: int) -> int:
    """The number of calls that `function` makes, of Python functions and of C functions. Raises TooMuchWork above `most`."""
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
    """Run chains of `FIRST`, `SHORT` and `LONG` steps: the work may grow at most as the square of the length. The very first run, which
    does additional work, is not counted, since it would hide growth."""
    run(FIRST)
    short = calls_of(lambda: run(SHORT), MOST_CALLS)
    calls_of(lambda: run(LONG), short * (LONG // SHORT) ** 2)
