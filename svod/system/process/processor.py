"""Cache sizes and facts about the machine, read from /sys and /proc, and the request for tile registers (AMX), which a process has to
make."""
from __future__ import annotations

import ctypes
import platform
from functools import lru_cache
from pathlib import Path

from svod.system.process.cores import parse_cpu_list
from svod.system.process.system_files import SYSTEM_ROOT, entries, read

FALLBACK_CACHES = (32 << 10, 512 << 10, 8 << 20)  # bytes of l1, l2, l3 if the system does not tell (macOS, some containers)
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux: arch/x86/include/uapi/asm/prctl.h


def _parse_size(text: str) -> int:
    """Bytes of `48K`, `1024K`, `32M`; 0 for any other text."""
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper())
    digits = text[:-1] if unit else text
    return int(digits) << (unit or 0) if digits.isdigit() else 0


def cache_sizes(root: Path = SYSTEM_ROOT, cpu: int = 0) -> tuple[int, int, int]:
    """Bytes of (l1 data, l2, l3) as seen by `cpu`. l1 and l2 are per core: a cache of several cores is divided by their number. l3 is
    the size of one instance, 0 without one. FALLBACK_CACHES replaces sizes that the system does not tell."""
    base = root / "sys/devices/system/cpu" / f"cpu{cpu}"
    siblings = max(1, len(parse_cpu_list(read(base / "topology/thread_siblings_list"))))
    sizes: dict[int, int] = {}
    for index in entries(base / "cache", "index*"):
        level = read(index / "level")
        if read(index / "type") not in ("Data", "Unified") or not level.isdigit():
            continue
        size = _parse_size(read(index / "size"))
        sharing = len(parse_cpu_list(read(index / "shared_cpu_list")))
        if int(level) < 3:
            size //= max(1, sharing // siblings)
        if size:
            sizes[int(level)] = size
    if not sizes:
        return FALLBACK_CACHES
    l1, l2, _ = FALLBACK_CACHES
    return sizes.get(1, l1), sizes.get(2, l2), sizes.get(3, 0)


def host_facts(root: Path = SYSTEM_ROOT) -> dict[str, str]:
    """Facts about this machine that are not part of a target's key. Facts that cannot be read are left out."""
    facts = {"os": platform.system(), "kernel": platform.release(), "hostname": platform.node(), "python": platform.python_version()}
    wanted = {"model name": "model", "microcode": "microcode", "cpu family": "family", "stepping": "stepping", "vendor_id": "vendor"}
    first = read(root / "proc/cpuinfo").split("\n\n", 1)[0]
    for line in first.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in wanted:
            facts[wanted[name]] = value
        elif name == "flags":
            facts["hypervisor"] = "yes" if "hypervisor" in value.split() else "no"
    cpu = root / "sys/devices/system/cpu"
    facts["governor"] = read(cpu / "cpu0/cpufreq/scaling_governor")
    facts["smt"] = read(cpu / "smt/active")
    facts["numa"] = read(root / "sys/devices/system/node/online")
    facts["online"] = read(cpu / "online")
    facts["hypervisor_vendor"] = read(root / "sys/hypervisor/type") or read(root / "sys/class/dmi/id/sys_vendor")
    return {name: value for name, value in facts.items() if value}


@lru_cache(maxsize=1)
def may_use_tiles() -> bool:
    """Ask the system to let this process, and children forked from it, use tile registers (AMX). Returns False if it refuses or has none.

    Linux grants the 8 KiB of state per process on request; without that, a tile instruction kills the process."""
    if platform.system() != "Linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return int(call(ctypes.c_long(ARCH_PRCTL), ctypes.c_long(ARCH_REQ_XCOMP_PERM), ctypes.c_long(XFEATURE_XTILEDATA))) == 0
