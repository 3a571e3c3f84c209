"""Targets for tests: cards of each architecture, with groups small enough to be run on a CPU."""
from __future__ import annotations

from dataclasses import replace

from svod.compile.cuda.targets import ARCHITECTURES, target_of
from svod.core.machine.target import Target


def card_target(arch: str, group_threads: int = 1024) -> Target:
    """Return a typical card of an architecture as a target for compiling only."""
    return replace(target_of(ARCHITECTURES[arch], ARCHITECTURES[arch].card, f"CUDA:{arch}"), group_threads=group_threads)
