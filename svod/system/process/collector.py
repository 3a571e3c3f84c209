"""Python's garbage collector while svod builds large structures."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def older_objects_spared() -> Iterator[None]:
    """Exempt the objects that exist at the start from garbage collection until the end. A full collection during the preparation of a plan
    otherwise visits the whole program: 0.2 s where PyTorch is imported. Objects that the program has frozen itself (`gc.freeze`) stay
    frozen; nothing else is exempted then."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
