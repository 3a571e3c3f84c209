"""svod's threads and PyTorch's on the same cores.

GNU OpenMP's threads, which PyTorch's operations run on, look for more work for milliseconds after each operation: 300,000 turns. svod's
kernels that follow find the cores taken, and the other way round. Where there are more OpenMP threads than cores, libgomp looks 1,000 turns
only (its manual, under GOMP_SPINCOUNT). So a thread here has an OpenMP team of its own, which never works again. OMP_WAIT_POLICY and
GOMP_SPINCOUNT in the environment go before that.
"""
from __future__ import annotations

import logging
import sys
import threading

import torch

from svod.system.forksafe import remake_after_fork
from svod.system.optional import optional

log = logging.getLogger("svod")
_lock = threading.Lock()
_sharing: list[threading.Thread] = []
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)


def share_cores() -> None:
    """Have PyTorch's threads leave the cores soon after each operation, from now on."""
    with _lock:
        if not _sharing and torch.get_num_threads() > 1:
            optional(log, "PyTorch's threads keep the cores between operations", _start_team, None, logging.INFO)


def _start_team() -> None:
    made = threading.Event()
    thread = threading.Thread(target=_hold_team, args=(made,), name="svod: idle OpenMP team", daemon=True)
    thread.start()
    made.wait()
    _sharing.append(thread)


def _hold_team(made: threading.Event) -> None:
    """Make this thread's OpenMP team by a first operation, and wait as long as the process lives."""
    torch.ones(1 << 20).add(1)
    made.set()
    threading.Event().wait()
