"""The machine that a benchmark run ran on, and the versions of everything but the peers."""
from __future__ import annotations

import os
import platform

import numpy as np

from svod import __version__
from svod.bench.results import Machine
from svod.bench.timer import BENCH_PROTOCOL
from svod.compile.backend import device_named
from svod.compile.cpu.host import host_facts
from svod.core.machine.target import HOST, Target


def machine_of(target: Target) -> Machine:
    """This machine, which `target` describes."""
    facts = host_facts()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):       # unknown to this system
        memory = 0
    system = f"{platform.system()} {platform.release()}"
    return Machine(platform.node(), facts.get("model", target.cpu), system, target.key, os.cpu_count() or 1, target.threads,
                   target.l1, target.l2, target.l3, memory)


def versions(device: str = HOST) -> dict[str, str]:
    """The versions that decide which code runs and how it is timed."""
    pair = device_named(device).pair
    return {"svod": __version__, "codegen": str(pair.revision), "compiler": pair.key, "protocol": str(BENCH_PROTOCOL),
            "python": platform.python_version(), "numpy": np.__version__}
