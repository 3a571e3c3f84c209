"""Steps that a program goes on without: measuring, looking for what others found, keeping what may be made again.

Whatever such a step raises, be it an error of svod's or of the system it runs on, becomes one line. KeyboardInterrupt is raised.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from svod.errors import SvodError

T = TypeVar("T")


def reason(error: BaseException) -> str:
    """An error in words, on one line: svod's errors as they are, others after their class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SvodError) and text else f"{type(error).__name__}: {text}" if text else type(error).__name__


def optional(log: logging.Logger, failed: str, step: Callable[[], T], otherwise: T, level: int = logging.WARNING) -> T:
    """The result of `step`. Where it raises, `otherwise`, and one line: `failed`, and why in brackets. The log has the traceback at
    level DEBUG."""
    try:
        return step()
    except Exception as e:
        log.log(level, "%s (%s)", failed, reason(e))
        log.debug("%s", failed, exc_info=True)
        return otherwise
