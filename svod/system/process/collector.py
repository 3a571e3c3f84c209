"""Python's garbage collector while svod builds large structures, or imports many modules."""
from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

RARE = 999_983          # new objects after which the collector runs meanwhile; Python's default is 700. No program chooses this number.
MANY_NEW = 10_000       # new objects at the end of a context, above which they become old
ALL_AFTER = 500_000     # objects that became old so, after which the collector visits all objects

_open: set[object] = set()          # one element for each context that is open now, in any thread
_usual = gc.get_threshold()[0]      # number of new objects after which the collector runs outside the contexts
_made_old = 0                       # objects that became old since the collector visited all of them


# The state above has no lock: a signal handler or a finalizer may make a plan at any moment, in the thread that would hold the lock. If two
# threads open and end contexts at the same time, one may run with the usual threshold, which costs time only. If an interrupt leaves the
# rare threshold behind, the end of the next context restores the usual one.
@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector run rarely until the end. Almost all that svod builds stays alive, so the usual collections of new objects visit
    much and free little (`experiments/first_call.py` shows what a first call takes). If many new objects exist at the end, they count as
    old from then on: only collections of all objects visit them, of which one takes place here now and then. A threshold that the program
    sets meanwhile stays as it is, and so does what it disables or freezes; while it keeps objects frozen, none become old here."""
    global _usual
    context = object()
    try:
        if not _open:
            usual, *others = gc.get_threshold()
            if 0 < usual < RARE:
                _usual = usual
                gc.set_threshold(RARE, *others)
        _open.add(context)
        yield
    finally:
        _open.discard(context)
        if not _open and gc.get_threshold()[0] == RARE:
            try:
                _make_old()
            finally:
                _restore()


def _make_old() -> None:
    """Make the new objects old ones if they are many, before a collection of new objects visits them."""
    global _made_old
    count = gc.get_count()[0]
    if count < MANY_NEW or not gc.isenabled() or gc.get_freeze_count():
        return
    _made_old += count
    if _made_old > ALL_AFTER:
        _made_old = 0
        gc.collect()
    else:
        try:
            gc.freeze()
        finally:
            gc.unfreeze()


def _restore() -> None:
    """Set the usual threshold again, unless the program has set another one."""
    rare, *others = gc.get_threshold()
    if rare == RARE:
        gc.set_threshold(_usual, *others)


def _after_fork_in_child() -> None:
    """Let the collector run as usual. A child has no thread but the one that forked it, which may leave a context later."""
    _open.clear()
    _restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
