"""Steps whose failure must not stop the program, such as a measurement, reading another process's results, or filling a cache.

Any exception of such a step, svod's or another, becomes one line in the log. KeyboardInterrupt passes through.
"""
from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from svod.errors import SvodError


def reason(error: BaseException) -> str:
    """Describe an error in one line: the text of svod's errors; for others, the name of the class and the text."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SvodError) and text else f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def optional(log: logging.Logger, failed: str, level: int = logging.WARNING) -> Iterator[None]:
    """Run the block of a `with`. If it raises, log one line, `failed` with the reason in brackets, and continue after the block. At level
    DEBUG, the log also has the traceback."""
    try:
        yield
    except Exception as e:
        log.log(level, "%s (%s)", failed, reason(e))
        log.debug("%s", failed, exc_info=True)
