"""Resources that a process makes once. `functools.cache` lets two threads that call at once make two, and one is freed while a thread still
uses it.

    @once
    def driver() -> Driver: ...
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from svod.system.forksafe import remake_after_fork

T = TypeVar("T")


class _Once:
    """The lock under which a resource is made."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        remake_after_fork(self, "lock", threading.RLock)


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls `make` at its first call and returns this result at every call. Other threads wait meanwhile; after an
    exception the next call makes it anew."""
    made: list[T] = []
    guard = _Once()

    @functools.wraps(make)
    def get() -> T:
        if not made:
            with guard.lock:
                if not made:
                    made.append(make())
        return made[0]
    return get
