"""The machine svod runs on, as a `Target`.

The key of a target must be readable, and equal for machines on which the same code is equally fast. So it consists of LLVM's name of the
core (which selects the scheduling model), the instruction sets (`svod.core.machine.isa`), the cache sizes and the number of threads. It has
no model name and no microcode version. LLVM reads the name and the instruction sets from the processor; the rest comes from
`svod.system.process`.
"""
from __future__ import annotations

import platform
from functools import lru_cache

from svod.config import default_threads
from svod.core.machine.isa import MACHINES, isa_features
from svod.core.machine.target import Target
from svod.errors import DeviceError
from svod.system.process.cores import affinity, usable_cores
from svod.system.process.processor import cache_sizes, may_use_tiles


def make_target(arch: str, cpu: str, features: tuple[str, ...], caches: tuple[int, int, int], threads: int) -> Target:
    """Make a CPU target. Vector sizes and registers follow from `features` (names of `ISA`); `caches`: bytes of L1, L2 and L3."""
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
        has_mask_registers=wide,
        has_masked_memory=avx,
    )


@lru_cache(maxsize=1)
def _processor() -> tuple[str, str, tuple[str, ...]]:
    """Return (arch, LLVM's CPU name, names of `ISA`) of this machine."""
    machine = platform.machine().lower()
    if machine not in MACHINES:
        raise DeviceError(f"svod generates code for x86_64 and aarch64; this machine is {machine!r}")
    import llvmlite.binding as llvm  # imported here because importing svod must not load LLVM

    arch = MACHINES[machine]
    available = {name for name, on in llvm.get_host_cpu_features().items() if on}
    if not may_use_tiles():
        available = {name for name in available if not name.startswith("amx")}
    return arch, str(llvm.get_host_cpu_name()), isa_features(arch, available)


@lru_cache(maxsize=64)
def _target(first: int, threads: int) -> Target:
    arch, cpu, features = _processor()
    return make_target(arch, cpu, features, cache_sizes(cpu=first), threads)


def host_target(threads: int | None = None) -> Target:
    """Return this machine as a target, without `dot_cost`, which the backend adds. `threads`: an upper limit of the number of threads
    (None: SVOD_THREADS); the affinity mask and the cgroup quota limit it further.

    Each call reads affinity and quota again, because both may change. Raises DeviceError on an architecture without a code generator."""
    if threads is not None and threads < 1:
        raise DeviceError(f"threads must be at least 1, got {threads}")
    cpus, limit = affinity(), default_threads() if threads is None else threads
    cores = usable_cores(len(cpus))
    return _target(cpus[0], cores if limit is None else min(cores, limit))
