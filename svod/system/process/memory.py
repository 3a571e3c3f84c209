"""The memory that this process may use: the machine's, and the limits of its control groups."""
from __future__ import annotations

import os
from pathlib import Path

from svod.system.process.system_files import SYSTEM_ROOT, control_groups, read

# Files with a control group's memory limits in bytes, by version of the format. Above memory.high, the system throttles a group severely.
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}


def machine_memory() -> int:
    """Bytes of memory of this machine; 0 if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def group_memory(root: Path = SYSTEM_ROOT) -> int | None:
    """The lowest memory limit in bytes of this process's control groups (v1 or v2), from its own to the outermost; None without a limit."""
    texts = [read(directory / name) for directory, version in control_groups("memory", root) for name in _LIMITS[version]]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def usable_memory(root: Path = SYSTEM_ROOT) -> int:
    """Bytes of memory that this process may use: the lower of its groups' limit and the machine's memory; 0 if neither is known."""
    known = [n for n in (machine_memory(), group_memory(root)) if n]
    return min(known, default=0)
