"""The machine svod runs on, as a `Target`, and the facts about it that are recorded but select nothing.

The key of a target must be equal for machines on which the same code is equally fast, and readable. So it holds
LLVM's name of the core (which selects the scheduling model), instruction sets (`svod.core.machine.isa`), cache sizes and threads; model
names and microcode are facts.

Everything is read from files under `root`, so that a recorded tree stands in for a machine; only the name and the
instruction sets come from LLVM, which asks the processor.
"""
from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache
from pathlib import Path

from svod.config import default_threads
from svod.core.machine.isa import MACHINES, isa_features
from svod.core.machine.target import Target
from svod.errors import DeviceError

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux: arch/x86/include/uapi/asm/prctl.h
FALLBACK_CACHES = (32 << 10, 512 << 10, 8 << 20)  # l1, l2, l3 where the system does not tell (macOS, some containers)


def _read(path: Path) -> str:
    """The text of a small file, stripped; empty when it cannot be read: every one of them is optional."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def parse_cpu_list(text: str) -> list[int]:
    """The CPUs of a kernel list such as `0-3,8`; [] for an empty or malformed one."""
    cpus: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            low, _, high = part.partition("-")
            cpus.extend(range(int(low), int(high or low) + 1))
    except ValueError:
        return []
    return cpus


def _parse_size(text: str) -> int:
    """Bytes of `48K`, `1024K`, `32M`; 0 for anything else."""
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper())
    digits = text[:-1] if unit else text
    return int(digits) << (unit or 0) if digits.isdigit() else 0


def cache_sizes(root: Path = Path("/"), cpu: int = 0) -> tuple[int, int, int]:
    """(l1 data, l2, l3) bytes as seen by `cpu`. l1 and l2 are per core: the share of one core where several have one cache. l3 is one
    whole instance, 0 without one. FALLBACK_CACHES stands in for what the system does not tell."""
    base = root / "sys/devices/system/cpu" / f"cpu{cpu}"
    siblings = max(1, len(parse_cpu_list(_read(base / "topology/thread_siblings_list"))))
    sizes: dict[int, int] = {}
    for index in sorted((base / "cache").glob("index*")):
        level = _read(index / "level")
        if _read(index / "type") not in ("Data", "Unified") or not level.isdigit():
            continue
        size = _parse_size(_read(index / "size"))
        sharing = len(parse_cpu_list(_read(index / "shared_cpu_list")))
        if int(level) < 3:
            size //= max(1, sharing // siblings)
        if size:
            sizes[int(level)] = size
    if not sizes:
        return FALLBACK_CACHES
    l1, l2, _ = FALLBACK_CACHES
    return sizes.get(1, l1), sizes.get(2, l2), sizes.get(3, 0)


def _cgroup_dirs(root: Path) -> list[tuple[Path, int]]:
    """The directories whose CPU limits bind this process, with the version of their format, from the innermost outwards."""
    dirs: list[tuple[Path, int]] = []
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, group = parts
        if controllers == "":
            tops, version = [mount, mount / "unified"], 2
        elif "cpu" in controllers.split(","):
            tops, version = [mount / controllers, mount / "cpu"], 1
        else:
            continue
        for top in tops:
            if not top.is_dir():
                continue
            # inside a container the path may be the host's: then the mount's root is the container's group
            here = top / group.lstrip("/")
            while here != top and top in here.parents:
                dirs.append((here, version))
                here = here.parent
            dirs.append((top, version))
    return dirs


def cgroup_cpus(root: Path = Path("/")) -> float | None:
    """CPUs that the tightest cgroup quota (v1 or v2) grants this process, e.g. 1.5; None without a limit."""
    limits: list[float] = []
    for directory, version in _cgroup_dirs(root):
        if version == 2:
            quota, _, period = _read(directory / "cpu.max").partition(" ")
        else:
            quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def affinity() -> tuple[int, ...]:
    """The CPUs this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def usable_threads(limit: int | None = None, root: Path = Path("/"), cpus: int | None = None) -> int:
    """min(affinity, cgroup quota, `limit`), at least 1. A quota is rounded down: spinning threads beyond it are throttled for whole
    periods. `cpus` replaces the affinity's count."""
    count = len(affinity()) if cpus is None else cpus
    quota = cgroup_cpus(root)
    if quota is not None:
        count = min(count, int(quota))
    if limit is not None:
        count = min(count, limit)
    return max(1, count)


def make_target(arch: str, cpu: str, features: tuple[str, ...], caches: tuple[int, int, int], threads: int) -> Target:
    """A CPU target from its parts; register sizes follow from `features` (names of `ISA`)."""
    wide, avx = "avx512f" in features, "avx2" in features
    x86 = arch == "x86_64"
    l1, l2, l3 = caches
    return Target(
        arch=arch, cpu=cpu, features=features,
        vector_bytes=64 if wide else 32 if avx else 16,
        vector_registers=32 if wide or not x86 else 16,
        l1=l1, l2=l2, l3=l3, threads=threads,
        has_fma="fma" in features if x86 else True,
        has_scaleb=wide,
        has_masked_memory=avx,
    )


@lru_cache(maxsize=1)
def may_use_tiles() -> bool:
    """Ask the system to let this process, and those forked from it, use tile registers (AMX). False where it does not, or has none.

    Linux grants their 8 KiB of state per process on request; an instruction without it ends the process."""
    if platform.system() != "Linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return int(call(ctypes.c_long(ARCH_PRCTL), ctypes.c_long(ARCH_REQ_XCOMP_PERM), ctypes.c_long(XFEATURE_XTILEDATA))) == 0


@lru_cache(maxsize=1)
def _processor() -> tuple[str, str, tuple[str, ...]]:
    """(arch, LLVM's CPU name, names of `ISA`) of this machine."""
    machine = platform.machine().lower()
    if machine not in MACHINES:
        raise DeviceError(f"svod generates code for x86_64 and aarch64; this machine is {machine!r}")
    import llvmlite.binding as llvm  # here: importing svod must not load LLVM

    arch = MACHINES[machine]
    available = {name for name, on in llvm.get_host_cpu_features().items() if on}
    if not may_use_tiles():
        available = {name for name in available if not name.startswith("amx")}
    return arch, str(llvm.get_host_cpu_name()), isa_features(arch, available)


@lru_cache(maxsize=64)
def _target(cpus: tuple[int, ...], limit: int | None) -> Target:
    arch, cpu, features = _processor()
    return make_target(arch, cpu, features, cache_sizes(cpu=cpus[0]), usable_threads(limit, cpus=len(cpus)))


def host_target(threads: int | None = None) -> Target:
    """This machine as a target, without `dot_cost`, which the backend adds. `threads` caps the threads, None: SVOD_THREADS does; affinity
    and cgroup quota always do.

    Cached per affinity mask and cap. Raises DeviceError on an architecture without a code generator."""
    if threads is not None and threads < 1:
        raise DeviceError(f"threads must be at least 1, got {threads}")
    return _target(affinity(), default_threads() if threads is None else threads)


def host_facts(root: Path = Path("/")) -> dict[str, str]:
    """Facts about this machine that are not part of a target's key. Facts that cannot be read are left out."""
    facts = {"os": platform.system(), "kernel": platform.release(), "hostname": platform.node(), "python": platform.python_version()}
    wanted = {"model name": "model", "microcode": "microcode", "cpu family": "family", "stepping": "stepping", "vendor_id": "vendor"}
    first = _read(root / "proc/cpuinfo").split("\n\n", 1)[0]
    for line in first.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in wanted:
            facts[wanted[name]] = value
        elif name == "flags":
            facts["hypervisor"] = "yes" if "hypervisor" in value.split() else "no"
    cpu = root / "sys/devices/system/cpu"
    facts["governor"] = _read(cpu / "cpu0/cpufreq/scaling_governor")
    facts["smt"] = _read(cpu / "smt/active")
    facts["numa"] = _read(root / "sys/devices/system/node/online")
    facts["online"] = _read(cpu / "online")
    facts["hypervisor_vendor"] = _read(root / "sys/hypervisor/type") or _read(root / "sys/class/dmi/id/sys_vendor")
    return {name: value for name, value in facts.items() if value}
