"""Lets svod's threads and PyTorch's share the same cores, and has svod use no more of them than PyTorch was told to.

PyTorch's operations run on GNU OpenMP's threads, which spin for milliseconds after each operation (300,000 iterations) to wait for more
work. Meanwhile they occupy the cores that svod's next kernels need, and vice versa. If there are more OpenMP threads than cores, libgomp
spins for 1,000 iterations only (its manual, under GOMP_SPINCOUNT). So a thread started here creates a second OpenMP team, which never works
again. OMP_WAIT_POLICY and GOMP_SPINCOUNT in the environment have priority.
"""
from __future__ import annotations

import logging
import sys
import threading
from dataclasses import replace

import torch

from svod.config import PrepareConfig, default_threads
from svod.system.forksafe import remake_after_fork
from svod.system.optional import optional
from svod.system.process.cores import affinity, physical_core

log = logging.getLogger("svod")
_lock = threading.Lock()
_sharing: list[threading.Thread] = []
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)


def share_cores() -> None:
    """Make PyTorch's threads release the cores soon after each operation, from now on."""
    with _lock:
        if not _sharing and torch.get_num_threads() > 1:
            with optional(log, "PyTorch's threads keep the cores between operations", logging.INFO):
                _start_team()


def with_threads_of_torch(config: PrepareConfig | None) -> PrepareConfig | None:
    """The configuration with PyTorch's number of threads, if torch.set_num_threads or OMP_NUM_THREADS has set it below PyTorch's
    default, the number of physical cores, and svod's number is not set. Otherwise returns it unchanged."""
    threads = torch.get_num_threads()
    base = config or PrepareConfig.of_environment()
    if base.threads is not None or default_threads() is not None or threads >= len({physical_core(core) for core in affinity()}):
        return config
    return replace(base, threads=threads)


def _start_team() -> None:
    made = threading.Event()
    thread = threading.Thread(target=_hold_team, args=(made,), name="svod: idle OpenMP team", daemon=True)
    thread.start()
    made.wait()
    _sharing.append(thread)


def _hold_team(made: threading.Event) -> None:
    """Create this thread's OpenMP team with a first operation, then wait for as long as the process lives."""
    torch.ones(1 << 20).add(1)
    made.set()
    threading.Event().wait()
