"""Copies between the memory of the host and of devices, and the logs that are told of them.

    with noted("CPU", "CUDA:1", nbytes):        told to every log that has asked: what the body takes by the host's clock, which it waits by
        ...
"""
from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class CopyLog(Protocol):
    """A log that is told of copies (`svod.compile.plan.run_log.RunLog`)."""

    def add_copy(self, source: str, to: str, start: float, seconds: float, nbytes: int) -> None:
        """A copy that was made from the memory of one device to that of another: when it began, on the clock `time.perf_counter`, what it
        took, and its bytes."""


_logs: weakref.WeakSet[CopyLog] = weakref.WeakSet()


def log_copies(log: CopyLog) -> None:
    """Tell `log` of all copies of this process from now on, as long as it lives."""
    _logs.add(log)


class Waiting(Protocol):
    """A device with asynchronous copies."""

    def wait(self) -> None: ...


@contextmanager
def noted(source: str, to: str, nbytes: int, device: Waiting | None = None) -> Iterator[None]:
    """Log the copy that is made inside the context, unless it fails. `device`: waited for before and after, so that only the copy is
    timed."""
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
