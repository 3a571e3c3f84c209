"""svod's threads and PyTorch's on the same cores.

GNU OpenMP's threads, which PyTorch's operations run on, look for more work for milliseconds after each operation: 300,000 turns. svod's
kernels that follow find the cores taken, and the other way round. Where there are more OpenMP threads than cores, libgomp looks 1,000 turns
only (its manual, under GOMP_SPINCOUNT). So a thread here has an OpenMP team of its own, which never works again. OMP_WAIT_POLICY and
GOMP_SPINCOUNT in the environment go before that.
"""
from __future__ import annotations

import threading

import torch

_lock = threading.Lock()
_sharing: list[threading.Thread] = []


def share_cores() -> None:
    """Have PyTorch's threads leave the cores soon after each operation, from now on."""
    with _lock:
        if not _sharing and torch.get_num_threads() > 1:
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
