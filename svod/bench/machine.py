"""Describes the machine of a benchmark run, and the versions of all software except the peers."""
from __future__ import annotations

import platform

import numpy as np

from svod import __version__
from svod.bench.results import Machine
from svod.bench.timer import BENCH_PROTOCOL
from svod.compile.backend import device_named
from svod.core.machine.target import HOST, Target
from svod.system.process.cores import machine_cores
from svod.system.process.memory import machine_memory
from svod.system.process.processor import host_facts


def machine_of(target: Target) -> Machine:
    """The machine that this process runs on. `target` describes its processor."""
    facts = host_facts()
    system = f"{platform.system()} {platform.release()}"
    return Machine(platform.node(), facts.get("model", target.cpu), system, target.key, machine_cores(), target.threads,
                   target.l1, target.l2, target.l3, machine_memory())


def versions(device: str = HOST) -> dict[str, str]:
    """The versions of software that affect the generated code or the timing."""
    pair = device_named(device).pair
    return {"svod": __version__, "codegen": str(pair.revision), "compiler": pair.key, "protocol": str(BENCH_PROTOCOL),
            "python": platform.python_version(), "numpy": np.__version__}
