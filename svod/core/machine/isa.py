"""Instruction sets, and the dot and matrix instructions in them, as data: opts, the cost model, code generation and benchmarks read it.

    acc[lane]   += Σ over i < group of a[lane·group + i] · b[lane·group + i]                                         vectors
    acc[m, n]   += Σ over k < depth, i < group of a[m, k·group + i] · b[k, n·group + i]                               tiles

A CPU holds a tile in a register. On a GPU the threads of a subgroup hold a tile together, each a `Fragment` of it. An instruction of
several subgroups reads its operands from shared memory, in lines of `MATRIX_LINE_BYTES` bytes.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.target import Target

ISA: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "sse4": ("cx16", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2"),
        "avx2": ("avx", "avx2", "bmi", "bmi2", "lzcnt", "movbe"),
        "f16c": ("f16c",),
        "fma": ("fma",),
        "avx512f": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        "bf16": ("avx512bf16",),
        "vbmi": ("avx512vbmi", "avx512vbmi2"),
        "vnni": ("avx512vnni",),
        "amx": ("amx-tile", "amx-int8", "amx-bf16"),
    },
    "aarch64": {
        "neon": ("neon",),
        "bf16": ("bf16",),
        "dotprod": ("dotprod",),
        "fp16": ("fullfp16",),
        "i8mm": ("i8mm",),
    },
}
"""Per architecture: the name a target's key shows → the LLVM features code generation switches on for it, all of them or none.

Code uses nothing else, whatever the core's name implies: a virtual machine may hide what its model has, and equal keys give equal code."""

BASELINE = {"x86_64": (), "aarch64": ("neon",)}
"""LLVM features that every processor of an architecture has, whether or not the system names them."""

MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


def isa_features(arch: str, available: Iterable[str]) -> tuple[str, ...]:
    """The names in `ISA` whose LLVM features are all in `available`, or in the baseline of the architecture; sorted."""
    have = {*available, *BASELINE[arch]}
    return tuple(sorted(name for name, needs in ISA[arch].items() if have.issuperset(needs)))


def llvm_features(arch: str, features: Iterable[str]) -> tuple[str, ...]:
    """The LLVM features that the names of a target stand for, sorted. Names that are not in `ISA` are passed on as LLVM features."""
    table = ISA.get(arch, {})
    return tuple(sorted({f for name in features for f in table.get(name, (name,))}))


class Digit(NamedTuple):
    """One digit of a mixed-radix number, which numbers the threads of a subgroup or the elements that a thread holds. `extent`: the number
    of its values; `rows`, `columns`: how far one step of the digit moves in the tile."""

    extent: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Fragment:
    """The elements of a tile that each thread of a subgroup holds. `threads`, `elements`: the digits of the thread's and of the element's
    number, most significant first.

        threads (8, 1, 0) (4, 0, 2), elements (2, 8, 0) (2, 0, 1)       thread t has rows t//4 and t//4 + 8
                                                                        of columns 2·(t%4) and 2·(t%4) + 1
    """

    threads: tuple[Digit, ...]
    elements: tuple[Digit, ...]

    @property
    def num_threads(self) -> int:
        return prod(d.extent for d in self.threads)

    @property
    def num_elements(self) -> int:
        """Elements that one thread holds."""
        return prod(d.extent for d in self.elements)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(row, column) of each element of thread 0. The elements of any other thread are these, moved by its `origins` entry."""
        return _places(self.elements)

    @cached_property
    def origins(self) -> tuple[tuple[int, int], ...]:
        """(row, column) of the first element of each thread."""
        return _places(self.threads)

    @property
    def run(self) -> Digit:
        """The innermost digit of elements, which are neighbours in the tile."""
        return self.elements[-1]


def _places(digits: tuple[Digit, ...]) -> tuple[tuple[int, int], ...]:
    places = [(0, 0)]
    for d in digits:
        places = [(row + k * d.rows, column + k * d.columns) for row, column in places for k in range(d.extent)]
    return tuple(places)


@dataclass(frozen=True)
class Dot:
    """A dot or matrix instruction.

    `sources`: the element types of operands that it accepts, either directly or after conversion by the copy.

    `operands`: the types it multiplies, in order. If they differ in signedness, an operand of the other signedness is converted by flipping
    its sign bits, which adds or subtracts 128; the resulting error of the sum is summed separately and subtracted. This is done to the
    operand that is not the vector. The result is exact modulo 2^32."""

    name: str
    arch: str
    features: tuple[str, ...]          # names of Target.features
    accumulator: DType
    operands: tuple[DType, DType]
    sources: tuple[DType, ...]
    group: int
    llvm: str                          # LLVM's intrinsic; for vectors, the bits of a register are appended to the name
    rows: int = 1                      # rows of a tile of results; 1: vectors
    columns: int = 1
    depth: int = 1                     # groups along the sum of one instruction
    base_cost: float = 1.0             # time of one instruction in vector multiply-adds, if it was not measured
    fragments: tuple[Fragment, ...] | None = None      # fragments of results, then of the row and column operands, if threads hold them
    # significant bits to which factors are rounded, to nearest, ties away from 0; 0: they are not rounded
    significand: int = 0

    @property
    def is_tile(self) -> bool:
        return self.rows > 1

    @property
    def reads_shared(self) -> bool:
        """Whether the instruction reads its operands from shared memory."""
        return self.fragments is not None and len(self.fragments) == 1

    @property
    def threads(self) -> int:
        """Number of threads that hold a tile together."""
        return self.fragments[0].num_threads if self.fragments else 1

    @property
    def positions(self) -> int:
        """Positions along the sum of one instruction: groups times elements of a group."""
        return self.group * self.depth

    def cost(self, target: Target) -> float:
        """Time of one instruction, in vector multiply-adds."""
        return self.base_cost if self.is_tile or target.dot_cost is None else target.dot_cost(self.name)

    def runs_on(self, target: Target) -> bool:
        has = target.uses_intrinsics and target.arch == self.arch and set(self.features) <= set(target.features)
        has = has and (not self.significand or target.rounds_factors)
        if not has or self.fragments is None or not target.subgroup:
            return has and self.fragments is None
        subgroups, rest = divmod(self.threads, target.subgroup)
        return not rest and (subgroups == 1 or self.reads_shared) and self.threads <= target.group_threads


def _mma(name: str, feature: str, accumulator: DType, operand: DType, depth: int, llvm: str, significand: int = 0, rows: int = 16,
         base_cost: float = 8.0) -> Dot:
    """An mma.sync of 16 or 8 rows, 8 columns and `depth` positions along the sum, with the layouts of "Matrix Fragments for mma" in
    NVIDIA's PTX ISA. With 16 rows it takes as long as 8 multiply-adds of each thread of a warp."""
    word = 4 // operand.itemsize       # operands in one register, which are neighbours along the sum
    registers = depth // (4 * word)    # registers along the sum
    line, part, further = Digit(8, 1, 0), Digit(4, 0, word), Digit(rows // 8, 8, 0)
    left = Fragment((line, part), (Digit(registers, 0, 4 * word), further, Digit(word, 0, 1)))
    right = Fragment((Digit(8, 0, 1), Digit(4, word, 0)), (Digit(registers, 4 * word, 0), Digit(word, 1, 0)))
    results = Fragment((line, Digit(4, 0, 2)), (further, Digit(2, 0, 1)))
    return Dot(name, "nvptx64", (feature,), accumulator, (operand, operand), (operand,), 1, llvm, rows=rows, columns=8, depth=depth,
               base_cost=base_cost, fragments=(results, left, right), significand=significand)


def _wgmma(name: str, accumulator: DType, operand: DType, columns: int) -> Dot:
    """A wgmma.mma_async of 64 rows and 32 bytes of depth, with the layouts of "Register Fragments for wgmma" in NVIDIA's PTX ISA. An
    H100 computes 2048 products of 16-bit numbers per cycle and unit, so the instruction takes as long as columns / 2 multiply-adds of
    each thread of a warpgroup."""
    results = Fragment((Digit(4, 16, 0), Digit(8, 1, 0), Digit(4, 0, 2)), (Digit(columns // 8, 0, 8), Digit(2, 8, 0), Digit(2, 0, 1)))
    return Dot(name, "nvptx64", ("wgmma",), accumulator, (operand, operand), (operand,), 1, "", rows=64, columns=columns,
               depth=32 // operand.itemsize, base_cost=columns / 2, fragments=(results,))


MATRIX_LINE_BYTES = 16    # bytes
_I8, _U8, _I16 = dtypes.int8, dtypes.uint8, dtypes.int16
TF32 = 11           # significant bits, the first of which is not stored
DOTS: dict[str, Dot] = {d.name: d for d in (
    Dot("vnni8", "x86_64", ("avx512f", "vnni"), dtypes.int32, (_U8, _I8), (_I8, _U8), 4, "llvm.x86.avx512.vpdpbusd"),
    Dot("vnni16", "x86_64", ("avx512f", "vnni"), dtypes.int32, (_I16, _I16), (_I8, _U8, _I16), 2,
        "llvm.x86.avx512.vpdpwssd"),
    Dot("bf16", "x86_64", ("avx512f", "bf16"), dtypes.float32, (dtypes.bfloat16, dtypes.bfloat16), (dtypes.bfloat16,), 2,
        "llvm.x86.avx512bf16.dpbf16ps"),
    # 16 cycles for a product of 16 rows and 16 columns of 64 bytes each, for all types
    *(Dot("amx8" + suffix, "x86_64", ("amx", "avx512f"), dtypes.int32, (a, b), (a, b), 4, f"llvm.x86.tdpb{suffix or 'ss'}d",
          rows=16, columns=16, depth=16, base_cost=32.0)
      for suffix, a, b in (("", _I8, _I8), ("uu", _U8, _U8), ("su", _I8, _U8), ("us", _U8, _I8))),
    Dot("amxbf16", "x86_64", ("amx", "avx512f"), dtypes.float32, (dtypes.bfloat16, dtypes.bfloat16), (dtypes.bfloat16,), 2,
        "llvm.x86.tdpbf16ps", rows=16, columns=16, depth=16, base_cost=32.0),
    _mma("mma_bf16", "mma.bf16", dtypes.float32, dtypes.bfloat16, 16, "llvm.nvvm.mma.m16n8k16.row.col.bf16"),
    _mma("mma_f16", "mma.f16", dtypes.float32, dtypes.float16, 16, "llvm.nvvm.mma.m16n8k16.row.col.f32.f32"),
    _mma("mma_f16k8", "mma.f16k8", dtypes.float32, dtypes.float16, 8, "llvm.nvvm.mma.m16n8k8.row.col.f32.f32"),
    _mma("mma_s8", "mma.s8", dtypes.int32, _I8, 32, "llvm.nvvm.mma.m16n8k32.row.col.s8"),
    # mma_s8k16 has as many products as mma_f16k8, but a T4 computes only half as many of them per second.
    _mma("mma_s8k16", "mma.s8k16", dtypes.int32, _I8, 16, "llvm.nvvm.mma.m8n8k16.row.col.s8", rows=8, base_cost=4.0),
    *(_mma(f"mma_tf32{suffix}", "mma.tf32", dtypes.float32, dtypes.float32, depth, f"llvm.nvvm.mma.m16n8k{depth}.row.col.tf32", TF32)
      for suffix, depth in (("", 8), ("k4", 4))),
    *(_wgmma(f"wgmma_{kind}n{columns}", accumulator, operand, columns) for columns in (64, 128, 256)
      for kind, accumulator, operand in (("bf16", dtypes.float32, dtypes.bfloat16), ("f16", dtypes.float32, dtypes.float16),
                                         ("s8", dtypes.int32, _I8))),
)}
TILE_REGISTERS = 8           # tile registers of a CPU core
