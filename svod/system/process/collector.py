"""Python's garbage collector while svod builds large structures, or imports many modules."""
from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 1_000_000     # number of new objects after which the collector runs meanwhile; Python's default is 700


class _Collector:
    """The collector's state before the first of the contexts that are open now, in any thread."""

    def __init__(self) -> None:
        self.lock, self.open = threading.Lock(), 0
        self.threshold, self.has_frozen = gc.get_threshold(), False

    def begin(self) -> None:
        with self.lock:
            self.open += 1
            if self.open > 1:
                return
            self.threshold, self.has_frozen = gc.get_threshold(), not gc.get_freeze_count()
            if 0 < self.threshold[0] < NEW_OBJECTS:
                gc.set_threshold(NEW_OBJECTS, *self.threshold[1:])
            if self.has_frozen:
                gc.freeze()

    def end(self) -> None:
        with self.lock:
            self.open -= 1
            if not self.open:
                self.restore()

    def restore(self) -> None:
        gc.set_threshold(*self.threshold)
        if self.has_frozen:
            gc.freeze()         # with `unfreeze`, makes the new objects old ones, which the next collection of new objects would visit
            gc.unfreeze()


_collector = _Collector()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector run rarely until the end, and not over objects that exist at the start. Almost all that svod builds stays alive,
    and Python's usual collections take a sixth of the time in which a plan is prepared; a full one visits the whole program, for 0.2 s
    where PyTorch is imported. What is built counts as old afterwards: only full collections visit it. Objects that the program has frozen
    itself (`gc.freeze`) stay frozen; nothing else is exempted then."""
    before = _collector
    before.begin()
    try:
        yield
    finally:
        if before is _collector:        # not in a child that was forked meanwhile
            before.end()


def _after_fork_in_child() -> None:
    """Let the collector run as before. A child has no thread but the one that forked it, which may leave a context later."""
    global _collector
    if _collector.open:
        _collector.restore()
    _collector = _Collector()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
