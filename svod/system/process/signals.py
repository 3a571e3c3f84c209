"""Signal handlers and masks, which a process inherits from its parent: `nohup` ignores SIGHUP, a shell ignores SIGINT in background
jobs, and a supervisor may ignore SIGCHLD, after which a parent cannot learn how its child ended."""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


def _may_handle() -> bool:
    """Whether this is the main thread, the only one that may set handlers."""
    return threading.current_thread() is threading.main_thread()


def handle(number: signal.Signals, handler: Handler) -> bool:
    """Set the handler of a signal, unless the process inherited that it is ignored, or this is not the main thread. Returns whether it
    is set."""
    if not _may_handle() or signal.getsignal(number) is signal.SIG_IGN:
        return False
    signal.signal(number, handler)
    return True


@contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Set handlers, as `handle` does, within the context; restores the previous ones afterwards."""
    before = {number: signal.getsignal(number) for number in handlers}
    ours = [number for number, handler in handlers.items() if handle(number, handler)]
    try:
        yield
    finally:
        for number in ours:
            if (handler := before[number]) is not None:     # None: set by native code, which Python cannot restore
                signal.signal(number, handler)


def default(number: signal.Signals) -> None:
    """Restore the default action of a signal, even if it was ignored. Call it in the main thread."""
    signal.signal(number, signal.SIG_DFL)


def end_by(number: signal.Signals) -> None:
    """Let a signal end the process again (the default action), unless the parent has it ignored."""
    if _may_handle() and signal.getsignal(number) is not signal.SIG_IGN:
        default(number)


def learn_of_children() -> None:
    """Stop ignoring SIGCHLD, so that the system keeps each child's exit status until it is read; with SIGCHLD ignored, every child seems
    to have succeeded. Only for processes that svod itself started."""
    if _may_handle() and hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        default(signal.SIGCHLD)


def begin_as_worker() -> None:
    """Set up signals in a worker of a search: SIGINT is ignored, because the searching process decides about it. All other signals get
    their default action, regardless of inherited handlers, and none is blocked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        default(number)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextmanager
def interrupt_blocked() -> Iterator[None]:
    """Block SIGINT within the context, in this thread and in the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
