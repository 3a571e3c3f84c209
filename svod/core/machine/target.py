"""The abilities of a target, as data, and measured rates. The backend of a device fills it in for the machine at hand."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from svod.core.ir.dtype import DType

NO_LIMIT = (1 << 63) - 1
DISK = "DISK"    # devices named DISK:path are mapped files, which hold values and compute nothing
HOST = "CPU"     # the device whose memory holds NumPy arrays, and on which values are computed unless another one is named


FLOAT32, SAME, FAST = "float32", "same", "fast"     # numerics policies: docs/numerics.md
POLICIES = SAME, FLOAT32, FAST


class FloatRules(NamedTuple):
    """The rules that expansions of functions may rely on: SCALEB is an instruction; MULACC rounds once, and sums and products are computed
    as they are written; there is float64; POW2 is an instruction; instructions with subnormal numbers may take a hundred times as long."""

    scales: bool = False
    is_strict: bool = True
    has_float64: bool = True
    has_pow2: bool = False
    has_slow_subnormals: bool = False


@dataclass(frozen=True)
class Target:
    """The capabilities that opts, heuristics and lowering depend on; also the readable part of the database's key.

    Sizes are bytes. Caches are per core except `l3`, which is shared. On a device with groups `l1` belongs to a unit, `l2` to the device,
    and `l3` is 0. `threads`: min(affinity, cgroup quota, SVOD_THREADS). `dot_cost`: durations of dot instructions in vector multiply-adds,
    by name, where they were measured. `dot_cost`, `software_lanes`, `clock` and `memory_rate` rank states and are no part of the target's
    identity."""

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
    rounds_factors: bool = False    # opts may also choose instructions that round factors of float32
    numerics: str = FLOAT32     # the policy by which the results of chains may differ
    has_scaleb: bool = False        # a float times a power of two is one instruction
    has_pow2: bool = False          # a power of two of float32 is one instruction, of two units in the last place: NVIDIA's ex2.approx.ftz
    has_mask_registers: bool = False    # lanes are masked by separate registers, as in AVX-512, so a constant mask costs nothing
    has_strict_floats: bool = True  # float operations are neither reassociated nor fused unless LINEAR says so
    has_float64: bool = True
    has_masked_memory: bool = True  # masked vector loads and stores are single instructions, at least for whole vectors
    has_non_temporal: bool = True   # stores can go past the caches
    group_threads: int = 0          # most threads of a group; 0: the target has no groups
    shared_bytes: int = 0           # memory that the threads of a group share
    subgroup: int = 0               # threads of a group that run in lockstep and exchange registers; 0: none do
    has_async_copies: bool = False  # copies from arguments to shared memory bypass registers, and a thread waits for them later
    bulk_row: int = 0               # least bytes of a row for a bulk copy, counted by a barrier in shared memory; 0: no bulk copies
    registers_per_thread: int = 0   # most 32-bit registers of a thread; this and all following figures are 0 if unknown
    group_registers: int = 0        # registers of a unit, shared by the groups on it; also the most of one group
    units: int = 0                  # streaming multiprocessors, compute units or Xe cores of the device; each runs several groups at a time
    unit_threads: int = 0           # most threads on a unit
    unit_groups: int = 0            # most groups on a unit
    unit_shared_bytes: int = 0      # shared memory of a unit, shared by the groups on it
    group_reserved_bytes: int = 0   # shared memory that each group takes in addition to its own
    software_lanes: int = field(default=0, compare=False)   # threads that a software driver runs in lockstep on a CPU; 0: hardware
    clock: float = field(default=0.0, compare=False)        # cycles per second of the units
    memory_rate: float = field(default=0.0, compare=False)  # highest rate of the device's memory, in bytes per second
    device: str = HOST
    global_limits: tuple[int, int, int] = (NO_LIMIT, NO_LIMIT, NO_LIMIT)    # groups that a launch may have along its dimensions
    local_limits: tuple[int, int, int] = (NO_LIMIT, NO_LIMIT, NO_LIMIT)     # positions that a group may have along its dimensions
    dot_cost: Callable[[str], float] | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "dot_cost": None}

    def lanes(self, dtype: DType) -> int:
        """Elements of `dtype` in one vector register."""
        return max(1, self.vector_bytes // dtype.itemsize)

    @property
    def float_rules(self) -> FloatRules:
        """The rules that expansions of functions may rely on. Under the policy "same" they name no instruction that other CPUs lack."""
        scales = self.has_scaleb and self.numerics != SAME
        return FloatRules(scales, self.has_strict_floats, self.has_float64, self.has_pow2, not self.has_groups)

    @property
    def has_groups(self) -> bool:
        """Whether a phase is launched as a grid of groups of threads."""
        return self.group_threads > 0

    def allowing(self, intrinsics: bool, locals: bool, rounding: bool = False, numerics: str = FLOAT32) -> Target:
        """The target with permissions for opts: `intrinsics`, to choose dot and matrix instructions; `locals`, to make groups of several
        threads; `rounding`, to choose matrix instructions that round factors of float32; `numerics`: the policy of results."""
        rounds = intrinsics and rounding and any(f.endswith(".tf32") for f in self.features)
        return replace(self, uses_intrinsics=intrinsics, rounds_factors=rounds, numerics=numerics,
                       group_threads=self.group_threads if locals else min(1, self.group_threads))

    @property
    def key(self) -> str:
        """The readable identity under which winners are stored, e.g. `x86_64/znver5/avx512f,bf16/l1 48k/l2 1m/l3 32m/t2`."""
        features = (*self.features, *(() if self.uses_intrinsics else ("tc=0",)), *(("tf32=1",) if self.rounds_factors else ()))
        features += (f"numerics={self.numerics}",) if self.numerics != FLOAT32 else ()
        if self.device != HOST:
            name, _, rest = self.device.partition(":")
            features += (f"device={name if rest.isdecimal() else self.device}",)     # equal devices share their winners
        if self.has_groups:
            features += (f"groups={self.group_threads}", f"shared={_size(self.shared_bytes)}")
            features += (f"subgroup={self.subgroup}",) if self.subgroup else ()
            features += (f"units={self.units}",) if self.units else ()
        parts = (self.arch, self.cpu, ",".join(features), _size(self.l1), _size(self.l2), _size(self.l3), str(self.threads))
        return "/".join(prefix + part for prefix, part in zip(KEY_FIELDS.values(), parts, strict=True))


def _size(n: int) -> str:
    """Bytes in the unit of a key: 48k, 1m."""
    return f"{n >> 20}m" if n and n % (1 << 20) == 0 else f"{n >> 10}k"


KEY_FIELDS = {"architecture": "", "CPU": "", "features": "", "l1 cache": "l1 ", "l2 cache": "l2 ", "l3 cache": "l3 ", "threads": "t"}
"""The fields of a target's key in their order, each with the prefix of its value."""


def parse_key(key: str) -> dict[str, str]:
    """The fields of a target's key: name → value without its prefix. A key of another form gives the fields that it has."""
    return {name: part.removeprefix(prefix) for (name, prefix), part in zip(KEY_FIELDS.items(), key.split("/"), strict=False)}


def unfit(key: str, target: Target) -> str | None:
    """The reason why a machine with this target key cannot time programs for `target`; None if it can. It may have more threads, and
    instructions that the programs do not use."""
    theirs, ours = parse_key(key), parse_key(target.key)
    same = ("architecture", "CPU", "l1 cache", "l2 cache", "l3 cache")
    if any(theirs.get(name) != ours.get(name) for name in same):
        return f"its target is {key}, the search is for {target.key}"
    lacks = {f for f in target.features if "=" not in f} - set(theirs.get("features", "").split(","))
    if lacks:
        return f"it lacks {', '.join(sorted(lacks))}"
    threads = threads_of(key) or 0
    return f"it runs {threads} threads, the search is for {target.threads}" if threads < target.threads else None


def threads_of(key: str) -> int | None:
    """The number of threads in a target's key, or None."""
    threads = parse_key(key).get("threads", "")
    return int(threads) if threads.isdecimal() else None
