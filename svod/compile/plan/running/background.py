"""The thread that prepares in the background what makes later runs faster: kernels' own forms (`exchange.py`), and plans for single sets of
sizes (`svod.tracing.own_plans`). The process has one such thread; it takes the steps of one piece of work after the other. A step is one
kernel's compilation, or a whole plan.

The thread ends when no step is left, and with the program: the step that it takes then is finished, and the rest is not begun.

A fork waits for the step in progress, FORK_SECONDS at most, so that a child seldom inherits a compiler in the middle of its work. After a
longer step the child is as if another thread of the parent had compiled during the fork.

Who makes a piece of work calls `register`, once the piece is whole, and `enqueue`, now or later.
"""
from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress

from svod.system.forksafe import remake_after_fork
from svod.system.optional import reason

log = logging.getLogger("svod")

FORK_SECONDS = 1.0      # longest time that a fork waits for a step
LOCK_SECONDS = 10.0     # longest time that `complete` waits for a plan that another thread uses

_forking = threading.local()
# held during a step; a thread that waits for it may hold the lock of a plan, and one that holds it waits for no such lock
step_lock = threading.RLock()


class BackgroundWork(ABC):
    """A piece of work in steps, which any thread may take; each waits for the one before."""

    @abstractmethod
    def step(self) -> bool:
        """Take the next step. Returns whether there is another one."""

    @abstractmethod
    def finish(self, lock_seconds: float = -1.0) -> None:
        """Take all steps; wait at most `lock_seconds` for a plan that another thread uses (-1: however long)."""

    @abstractmethod
    def go_on_after_fork(self) -> None:
        """Let a forked child, which has an empty queue, take the steps that are left after the fork, or drop them."""


class _Background:
    """The thread that takes the steps of all pieces of work, one after the other."""

    def __init__(self) -> None:
        self._queue: deque[BackgroundWork] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ends = False

    def enqueue(self, work: BackgroundWork) -> None:
        with self._lock:
            self._queue.append(work)
            if self._thread is None and not self._ends:
                thread = threading.Thread(target=self._work, name="svod-background", daemon=True)
                with suppress(RuntimeError):        # no thread can be started now: the next piece tries it again
                    thread.start()
                    self._thread = thread

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._ends or not self._queue:
                    self._thread = None
                    return
                work = self._queue[0]
            try:
                goes_on = work.step()
            except Exception as e:      # a border between threads: other pieces go on
                log.warning("a plan keeps the code that it has (%s)", reason(e))
                goes_on = False
            if not goes_on:
                self._queue.popleft()

    def end(self) -> None:
        """Let the thread end after its present step, and wait for it."""
        with self._lock:
            self._ends, thread = True, self._thread
        if thread is not None:
            thread.join()


_background = _Background()
_registered: weakref.WeakSet[BackgroundWork] = weakref.WeakSet()     # the pieces of work that live, whether they are queued or not
_registered_lock = threading.Lock()      # held while the set is extended or listed


def register(work: BackgroundWork) -> None:
    """Let `complete`, and forks, know a piece of work as long as it lives. Its steps may be taken from now on."""
    with _registered_lock:
        _registered.add(work)


def enqueue(work: BackgroundWork) -> None:
    """Let the background thread take the steps of a piece of work, after those of the pieces before it."""
    _background.enqueue(work)


def complete() -> None:
    """Wait until all that this process prepares in the background is ready: the plans run their kernels' own forms. For the time before
    measurements, or before a server answers. A plan that another thread uses for 10 s on end, or that waits for this thread, changes
    later."""
    with _registered_lock:
        found = list(_registered)
    for work in found:
        work.finish(LOCK_SECONDS)


def _before_fork() -> None:
    _forking.holds_step = step_lock.acquire(timeout=FORK_SECONDS)


def _after_fork_in_parent() -> None:
    if _forking.holds_step:
        step_lock.release()


def _after_fork_in_child() -> None:
    for work in list(_registered):
        work.go_on_after_fork()


remake_after_fork(sys.modules[__name__], "step_lock", threading.RLock)
remake_after_fork(sys.modules[__name__], "_registered_lock", threading.Lock)
remake_after_fork(sys.modules[__name__], "_background", _Background)
atexit.register(lambda: _background.end())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
