"""NVIDIA's GPUs as targets: the features of each architecture, and a typical card for compiling without a device.

The limits come from "Compute Capabilities" in NVIDIA's CUDA C++ Programming Guide 13.0, the rates from the data sheets of the cards. For a
GPU of this machine, the driver is asked for all properties that its architecture does not determine.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from svod.core.machine.target import Target
from svod.errors import DeviceError

DEVICE = "CUDA"
WARP = 32
MOST_THREAD_REGISTERS = 255                 # maximum number of registers of one thread
BULK_ROW = 2048     # minimum bytes of a row that is copied in bulk: a guess; 512 are too few on an H200, more were not timed
WIDEST_BYTES = 16               # bytes of the widest access; arguments are assumed to be aligned to it
STATIC_SHARED = 48 << 10        # bytes of shared memory that a kernel may declare; more must be requested by the launch
GRID = ((1 << 31) - 1, 65535, 65535)
MOST_BLOCK_THREADS = (1024, 1024, 64)
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that matter to compiled code. Sizes are bytes. A unit is a streaming multiprocessor, a group is a block of
    threads."""

    name: str
    units: int
    unit_threads: int
    unit_groups: int
    unit_shared: int
    group_shared: int           # maximum bytes of shared memory of one group
    unit_cache: int
    l2: int
    clock: float                # cycles per second
    memory_rate: float          # bytes per second
    group_threads: int = 1024
    unit_registers: int = 65536
    group_reserved: int = KIB   # additional bytes of unit_shared that each group takes


@dataclass(frozen=True)
class Architecture:
    """An architecture: its PTX version, its instruction features, and a typical card.

    `ptx`: 10 × the PTX version that svod writes for it; a driver of CUDA 12.0 accepts version 8.0, one of CUDA 11.0 version 7.0."""

    name: str
    ptx: int
    features: tuple[str, ...]
    card: Card
    llvm: str = ""

    @property
    def llvm_cpu(self) -> str:
        """The processor that LLVM generates code for: the architecture, or an older one whose PTX also runs on it."""
        return self.llvm or self.name


_AMPERE = ("cp.async", "ldmatrix", "mma.bf16", "mma.f16", "mma.s8", "mma.tf32", "redux")
_HOPPER = (*_AMPERE, "stmatrix", "tma")
_H100 = Card("H100 SXM", 132, 2048, 32, 228 * KIB, 227 * KIB, 256 * KIB, 50 * MIB, 1.83e9, 3.35e12)
ARCHITECTURES: Mapping[str, Architecture] = {a.name: a for a in (
    Architecture("sm_75", 70, ("ldmatrix", "mma.f16k8", "mma.s8k16"),
                 Card("T4", 40, 1024, 16, 64 * KIB, 64 * KIB, 96 * KIB, 4 * MIB, 1.59e9, 320e9, group_reserved=0)),
    Architecture("sm_80", 80, _AMPERE, Card("A100 40 GB", 108, 2048, 32, 164 * KIB, 163 * KIB, 192 * KIB, 40 * MIB, 1.41e9, 1.555e12)),
    Architecture("sm_86", 80, _AMPERE, Card("RTX 3090", 82, 1536, 16, 100 * KIB, 99 * KIB, 128 * KIB, 6 * MIB, 1.70e9, 936e9)),
    Architecture("sm_89", 80, _AMPERE, Card("RTX 4090", 128, 1536, 24, 100 * KIB, 99 * KIB, 128 * KIB, 72 * MIB, 2.52e9, 1.008e12)),
    Architecture("sm_90", 80, _HOPPER, _H100),
    Architecture("sm_90a", 80, (*_HOPPER, "wgmma"), _H100),
    # LLVM 22 aborts the process on some vectors of 32 integers for sm_100, which has registers for pairs of them
    Architecture("sm_100", 80, _HOPPER, Card("B200", 148, 2048, 32, 228 * KIB, 227 * KIB, 256 * KIB, 126 * MIB, 1.85e9, 7.7e12), "sm_90"),
    Architecture("sm_120", 80, _HOPPER,
                 Card("RTX 5090", 170, 1536, 24, 100 * KIB, 99 * KIB, 128 * KIB, 96 * MIB, 2.41e9, 1.792e12), "sm_90"),
)}


def capability_of(name: str) -> tuple[int, int]:
    """Return the compute capability of an architecture, e.g. (9, 0) for sm_90 and sm_90a."""
    return divmod(int(name.removeprefix("sm_").removesuffix("a")), 10)


def architecture_of(major: int, minor: int) -> Architecture:
    """Return the best architecture for a device of a compute capability. Raises DeviceError if the device is too old."""
    known = [a for a in ARCHITECTURES.values() if not a.name.endswith("a")]
    exact = next((a for a in known if capability_of(a.name) == (major, minor)), None)
    if exact is not None:
        return ARCHITECTURES.get(exact.name + "a", exact)
    fitting = [a for a in known if capability_of(a.name) <= (major, minor)]
    if not fitting:
        raise DeviceError(f"the GPU has compute capability {major}.{minor}; svod needs 7.5 or later (Turing, 2018): use the CPU, "
                          "unset SVOD_DEVICE")
    same = [a for a in fitting if capability_of(a.name)[0] == major]
    return (same or fitting)[-1]


def runs(architecture: Architecture, capability: tuple[int, int]) -> bool:
    """Whether a device of a compute capability runs the code of an architecture. Code for sm_90a runs on 9.0 only."""
    least = capability_of(architecture.name)
    return capability == least if architecture.name.endswith("a") else least <= capability


def target_of(architecture: Architecture, card: Card, device: str) -> Target:
    """Return a card of an architecture as a target; `device`: its name, as in SVOD_DEVICE."""
    return Target(
        arch="nvptx64", cpu=architecture.name, features=tuple(sorted(architecture.features)),
        vector_bytes=16, vector_registers=(MOST_THREAD_REGISTERS - 31) // 4,
        l1=card.unit_cache, l2=card.l2, l3=0, threads=1,
        has_non_temporal=False, has_pow2=True, has_async_copies="cp.async" in architecture.features,
        bulk_row=BULK_ROW if "tma" in architecture.features else 0,
        group_threads=card.group_threads, shared_bytes=card.group_shared, subgroup=WARP,
        registers_per_thread=MOST_THREAD_REGISTERS, group_registers=card.unit_registers, units=card.units, unit_threads=card.unit_threads,
        unit_groups=card.unit_groups, unit_shared_bytes=card.unit_shared, group_reserved_bytes=card.group_reserved,
        clock=card.clock, memory_rate=card.memory_rate, device=device, global_limits=GRID, local_limits=MOST_BLOCK_THREADS)
