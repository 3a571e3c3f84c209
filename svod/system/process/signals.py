"""Dispositions and masks of signals, which a process inherits: `nohup` ignores SIGHUP, a shell ignores SIGINT for what it starts in the
background, and a supervisor may ignore SIGCHLD, after which nobody learns how a child ended."""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


def _may_handle() -> bool:
    """Whether this is the thread that may set handlers."""
    return threading.current_thread() is threading.main_thread()


def handle(number: signal.Signals, handler: Handler) -> bool:
    """Handle a signal from now on, unless the parent of this process has it ignored. Returns whether it is handled."""
    if not _may_handle() or signal.getsignal(number) is signal.SIG_IGN:
        return False
    signal.signal(number, handler)
    return True


@contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """`handle` within the context; afterwards the handlers are as before."""
    before = {number: signal.getsignal(number) for number in handlers}
    ours = [number for number, handler in handlers.items() if handle(number, handler)]
    try:
        yield
    finally:
        for number in ours:
            if (handler := before[number]) is not None:     # None: it was set by other code than Python's
                signal.signal(number, handler)


def default(number: signal.Signals) -> None:
    """Restore the effect of a signal on a program without a handler, also where it was ignored. For the main thread."""
    signal.signal(number, signal.SIG_DFL)


def end_by(number: signal.Signals) -> None:
    """`default`, unless the parent of this process has the signal ignored."""
    if _may_handle() and signal.getsignal(number) is not signal.SIG_IGN:
        default(number)


def learn_of_children() -> None:
    """Have the system keep the status of children until it is asked for: where SIGCHLD is ignored, every child counts as one that ended
    well. For a process that is svod's own."""
    if _may_handle() and hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        default(signal.SIGCHLD)


def begin_as_worker() -> None:
    """In a process that serves a search: SIGINT is ignored, as the searching process decides; every other signal does what it does by
    default, whatever was inherited, and none is blocked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        default(number)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextmanager
def interrupt_blocked() -> Iterator[None]:
    """Within the context SIGINT is blocked in this thread, and in processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
