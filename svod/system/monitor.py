"""A condition whose lock stays free after a Ctrl-C.

    changed = Monitor()
    with changed.lock:
        changed.wait_for(...)

`with condition:` runs Python code, `Condition.__enter__`. A KeyboardInterrupt that comes between its `acquire` and the body leaves the lock
taken, and the other threads wait forever. `with` over the lock itself, which is written in C, has no such gap.
"""
from __future__ import annotations

import threading
from typing import Any


class Monitor(threading.Condition):
    """A condition with its lock, by default an RLock, as the attribute `lock`."""

    def __init__(self, lock: Any = None) -> None:
        self.lock = threading.RLock() if lock is None else lock
        super().__init__(self.lock)
