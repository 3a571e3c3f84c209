"""Native threads, also in programs that replace threads by greenlets.

gevent and eventlet replace threads by greenlets, which all run in one native thread: a greenlet in native code blocks all others. A fresh
copy of the module `_thread` starts native threads even if the original was patched.
"""
from __future__ import annotations

import _thread
import threading
import types
from collections.abc import Callable
from importlib.machinery import BuiltinImporter
from importlib.util import module_from_spec
from typing import Any, Protocol


class Joinable(Protocol):
    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, or for `timeout` seconds."""


def are_greenlets() -> bool:
    """Whether the module threading starts greenlets instead of native threads."""
    return not isinstance(_thread.start_new_thread, types.BuiltinFunctionType)


def start_native(name: str, work: Callable[..., object], *args: object) -> Joinable:
    """Start a native thread for work that stays in native code. It does not keep the process alive. Raises RuntimeError if the system
    allows no further thread."""
    if are_greenlets():
        return _Native(work, args)
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    thread.start()
    return thread


class _Native:
    """A native thread that the module threading does not know."""

    def __init__(self, work: Callable[..., object], args: tuple[object, ...]) -> None:
        spec = BuiltinImporter.find_spec("_thread")
        assert spec is not None and spec.loader is not None
        threads: Any = module_from_spec(spec)
        spec.loader.exec_module(threads)
        self._running = threads.allocate_lock()
        self._running.acquire()

        def run() -> None:
            try:
                work(*args)
            finally:
                self._running.release()
        threads.start_new_thread(run, ())

    def join(self, timeout: float | None = None) -> None:
        if self._running.acquire(True, -1 if timeout is None else timeout):
            self._running.release()
