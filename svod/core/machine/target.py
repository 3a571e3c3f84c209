"""What a target can do: data, and what was measured. `svod.compile.cpu.host` fills it in for the machine at hand."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from svod.core.ir.dtype import DType

NO_LIMIT = (1 << 63) - 1


@dataclass(frozen=True)
class Target:
    """Capabilities that opts, heuristics and lowering ask for, and the readable key the database uses.

    Sizes are bytes; caches are per core except `l3`, which is shared. `threads` is what svod may use:
    min(affinity, cgroup quota, SVOD_THREADS). `dot_cost`: vector multiply-adds that take as long as a dot instruction of this name, where
    that was measured; it ranks states, is no part of the target's identity, and stays where it is when a target is sent elsewhere."""

    arch: str                       # "x86_64", "aarch64", "nvptx64"
    cpu: str                        # LLVM's CPU name, e.g. "znver5"
    features: tuple[str, ...]       # LLVM features that code generation asks for, sorted, e.g. ("avx2", "avx512f", "fma")
    vector_bytes: int               # widest vector register: 64 for AVX-512, 32 for AVX2, 16 for SSE and NEON
    vector_registers: int           # 32 for AVX-512 and NEON, 16 for AVX2 and SSE
    l1: int
    l2: int
    l3: int
    threads: int
    has_fma: bool = True
    uses_intrinsics: bool = True    # opts may choose dot and matrix instructions
    has_scaleb: bool = False        # a float times a power of two is one instruction
    has_masked_memory: bool = True  # masked vector loads and stores are single instructions
    group_threads: int = 0          # most threads of a group; 0: the target has no groups
    shared_bytes: int = 0           # memory that the threads of a group share
    device: str = "CPU"
    global_limits: tuple[int, int, int] = (NO_LIMIT, NO_LIMIT, NO_LIMIT)    # groups that a launch may have along its dimensions
    local_limits: tuple[int, int, int] = (NO_LIMIT, NO_LIMIT, NO_LIMIT)     # positions that a group may have along its dimensions
    dot_cost: Callable[[str], float] | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "dot_cost": None}

    def lanes(self, dtype: DType) -> int:
        """Elements of `dtype` in one vector register."""
        return max(1, self.vector_bytes // dtype.itemsize)

    @property
    def has_groups(self) -> bool:
        """Whether a phase is launched as a grid of groups of threads."""
        return self.group_threads > 0

    @property
    def key(self) -> str:
        """The readable identity under which winners are stored, e.g. `x86_64/znver5/avx512f,bf16/l1 48k/l2 1m/l3 32m/t2`."""
        def size(n: int) -> str:
            return f"{n >> 20}m" if n and n % (1 << 20) == 0 else f"{n >> 10}k"
        features = (*self.features, *(() if self.uses_intrinsics else ("tc=0",)))
        return (f"{self.arch}/{self.cpu}/{','.join(features)}/l1 {size(self.l1)}/l2 {size(self.l2)}"
                f"/l3 {size(self.l3)}/t{self.threads}")
