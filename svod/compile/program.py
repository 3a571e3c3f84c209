"""A lowered kernel: what to launch (`ProgramSpec`, plain data) and its code (`Program`, LINEAR per phase).

Every phase becomes one native function with the fixed signature

    void symbol(ptr args, ptr vars, ptr scratch, i64 begin, i64 end)

`args` is an array of pointers: the kernel's parameters by slot, then the program's temporaries. `vars` is an array of i64 in
the order of `ProgramSpec.variables`. `scratch` is the calling worker's private memory, 64-byte aligned, of at least
`scratch_bytes`. The function computes iterations begin ≤ i < end of the phase's `extent` outer iterations, which are independent.
"""
from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from svod.core.dtype import DType

Instr = tuple[Any, ...]  # (op, dtype, lanes, src, arg): docs/ir.md, section 4


@dataclass(frozen=True)
class PhaseSpec:
    """One launch over the pool."""

    symbol: str
    extent: int           # iterations that begin/end cut
    threads: int          # cores the phase wants; 1: run by the caller
    scratch_bytes: int    # per worker
    once: bool = False    # reads only constants of the plan: run once at prepare


@dataclass(frozen=True)
class ProgramSpec:
    """Everything but the code: enough to allocate, launch and time a compiled program."""

    name: str
    params: tuple[tuple[DType, int], ...]   # by slot: element type, number of elements
    outs: tuple[int, ...]                   # slots written
    temps: tuple[int, ...]                  # bytes of each temporary
    phases: tuple[PhaseSpec, ...]
    variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A ProgramSpec and, per phase, its LINEAR."""

    spec: ProgramSpec
    code: tuple[tuple[Instr, ...], ...]

    @property
    def size(self) -> int:
        """len(LINEAR): what BEAM_UOPS_MAX limits."""
        return sum(len(c) for c in self.code)

    @cached_property
    def digest(self) -> str:
        """Hex digest of what runs: code, launch sizes and scratch, in emission order; symbol and kernel names excluded."""
        h = hashlib.blake2b(b"svod-linear-1", digest_size=16)
        for phase, code in zip(self.spec.phases, self.code, strict=True):
            h.update(repr((phase.extent, phase.threads, phase.scratch_bytes, phase.once)).encode())
            h.update(repr(code).encode())
        h.update(repr((self.spec.temps, self.spec.params, self.spec.outs, self.spec.variables)).encode())
        return h.hexdigest()
