"""Steps whose failure must not stop the program, such as a measurement, reading another process's results, or filling a cache.

Any exception of such a step, svod's or another, becomes one line in the log. KeyboardInterrupt passes through.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from svod.errors import SvodError

T = TypeVar("T")


def reason(error: BaseException) -> str:
    """An error as one line of text: svod's errors as they are, others after the name of their class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SvodError) and text else f"{type(error).__name__}: {text}" if text else type(error).__name__


def optional(log: logging.Logger, failed: str, step: Callable[[], T], otherwise: T, level: int = logging.WARNING) -> T:
    """The result of `step`. If it raises, log one line, `failed` with the reason in brackets, and return `otherwise`. At level DEBUG,
    the log also has the traceback."""
    try:
        return step()
    except Exception as e:
        log.log(level, "%s (%s)", failed, reason(e))
        log.debug("%s", failed, exc_info=True)
        return otherwise
