"""Python's garbage collector while svod builds large structures."""
from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_is_sparing = False     # whether objects are exempt now


@contextmanager
def older_objects_spared() -> Iterator[None]:
    """Exempt the objects that exist at the start from garbage collection until the end. A full collection during the preparation of a plan
    otherwise visits the whole program: 0.2 s where PyTorch is imported. Objects that the program has frozen itself (`gc.freeze`) stay
    frozen; nothing else is exempted then."""
    global _is_sparing
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    _is_sparing = True
    try:
        yield
    finally:
        _end()


def _end() -> None:
    """Let the collector visit the exempted objects again. A child that another thread forks meanwhile does so at once."""
    global _is_sparing
    if _is_sparing:
        gc.unfreeze()
    _is_sparing = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end)
