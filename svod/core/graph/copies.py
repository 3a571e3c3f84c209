"""Timing of copies between the memory of the host and of devices, for the logs that registered for it.

    with noted("CPU", "CUDA:1", nbytes):        every registered log gets the seconds that the body took by the host's clock
        ...
"""
from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class CopyLog(Protocol):
    """A log that receives an entry for each copy (`svod.compile.plan.run_log.RunLog`)."""

    def add_copy(self, source: str, to: str, start: float, seconds: float, nbytes: int) -> None:
        """Record a finished copy of `nbytes` bytes from device `source` to device `to`. `start`: its begin on the clock
        `time.perf_counter`; `seconds`: its duration."""


_logs: weakref.WeakSet[CopyLog] = weakref.WeakSet()


def log_copies(log: CopyLog) -> None:
    """Register `log`: all copies of this process are recorded in it from now on, as long as it lives."""
    _logs.add(log)


class CopyingDevice(Protocol):
    """A device with asynchronous copies."""

    def wait(self) -> None: ...


@contextmanager
def noted(source: str, to: str, nbytes: int, device: CopyingDevice | None = None) -> Iterator[None]:
    """Time the copy in the body and record it in every log, unless the body raises. `device`: a device whose queued work is waited for
    before and after the body, so that only the copy is timed."""
    if not _logs:
        yield
        return
    if device is not None:
        device.wait()
    start = time.perf_counter()
    yield
    if device is not None:
        device.wait()
    seconds = time.perf_counter() - start
    for log in list(_logs):
        log.add_copy(source, to, start, seconds, nbytes)
