"""The one bound on waits of tests. Tests wait for what happens, and no machine is too slow or too busy for them: the bound only ends a test
that would otherwise hang."""
from __future__ import annotations

import time
from collections.abc import Callable

NEVER = 600.0       # seconds after which what should happen is taken never to happen


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether a condition has come true, within NEVER seconds."""
    end = time.monotonic() + NEVER
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
