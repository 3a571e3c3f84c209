"""A lowered kernel: what to launch (`ProgramSpec`, plain data) and its code (`Program`, LINEAR per phase).

Every phase becomes one native function with the fixed signature

    void symbol(ptr args, ptr vars, ptr scratch, i64 begin, i64 end)

`args` is an array of pointers: the kernel's parameters by slot, then the program's temporaries. `vars` is an array of i64 in the order of
`ProgramSpec.variables`. `scratch` is the calling worker's private memory, 64-byte aligned, of at least `scratch_bytes`. The function
computes iterations begin ≤ i < end of the phase's `extent` outer iterations, which are independent. If the number of outer iterations
depends on variables, `extent_at` computes it.

On a target with groups of threads an outer iteration is one group: the launch is a grid of `extent` groups of `block` threads, each of
which runs the code with begin = its group and end = begin + 1. `scratch` is then private to a thread, and the threads of a group share
`shared_bytes` bytes. On a CPU the grid is cut into chunks, and a group is one thread without shared memory.
"""
from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from svod.core.ir.dtype import DType
from svod.core.ir.launch import ONCE, LaunchDims
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.target import Target
from svod.core.schedule.thread_indices import launch_of, over_ranges
from svod.errors import LaunchError

DEFAULT_NAME = "kernel"


class Instruction(NamedTuple):
    """An instruction of LINEAR (docs/ir.md, section 4). `src`: the numbers of its operands in its phase."""

    op: str
    dtype: DType
    lanes: int
    src: tuple[int, ...]
    arg: Any


Instruction.__repr__ = tuple.__repr__       # type: ignore[method-assign]  # digests are made of this text


@dataclass(frozen=True)
class Count:
    """The number of iterations of a loop: ceil((const + Σ factor·variable) / stride), at most `most`."""

    terms: tuple[tuple[str, int], ...]      # (variable, factor)
    const: int
    stride: int
    most: int

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def at(self, variables: Mapping[str, int]) -> int:
        """Return the number of iterations for these values of the variables."""
        return max(0, min(self.most, -(-(self.const + sum(k * variables[name] for name, k in self.terms)) // self.stride)))


@dataclass(frozen=True)
class PhaseSpec:
    """One launch of the worker threads of a CPU, or of a grid of groups of threads on a GPU."""

    symbol: str
    extent: int           # number of outer iterations, or of groups of a grid; the maximum, if it depends on variables
    threads: int          # number of cores that the phase asks for; 1: the calling thread runs it
    scratch_bytes: int    # per worker, or per thread of a group
    once: bool = False    # reads only constants, so it runs once, when the plan is made
    counts: tuple[Count, ...] = ()      # the loops of the launch, if their number of iterations depends on variables
    block: int = 1        # threads of a group
    shared_bytes: int = 0   # shared memory of a group
    subgroup: int = 0     # threads that run in lockstep, if the code depends on their number; otherwise 0

    def extent_at(self, variables: Mapping[str, int]) -> int:
        """Return the number of outer iterations for these values of the variables."""
        return min(self.extent, prod(c.at(variables) for c in self.counts)) if self.counts else self.extent


@dataclass(frozen=True)
class ProgramSpec:
    """A program without its code: all data needed to allocate, launch and time it. `derive_spec` computes it from a kernel."""

    name: str
    params: tuple[tuple[DType, int], ...]   # per slot: element type, number of elements
    outs: tuple[int, ...]                   # slots written
    temps: tuple[int, ...]                  # bytes of each temporary
    phases: tuple[PhaseSpec, ...]
    variables: tuple[str, ...] = ()     # names, in the order of `vars`
    ins: tuple[int, ...] = ()           # slots read, including those that are written as well
    launch: LaunchDims = ONCE           # the launch that the kernel's author wrote; phases are loops of the generated code

    @property
    def globals(self) -> tuple[int, ...]:
        """The slots of all parameters."""
        return tuple(range(len(self.params)))

    def check(self) -> None:
        """Raise LaunchError for a description that no program can have. Every program is checked before it runs, also one that was read
        from a file. Launch dimensions that depend on variables are checked when these have values."""
        self._check_slots()
        self._check_variables()
        self._check_phases()

    def _refuse(self, what: str) -> None:
        raise LaunchError(f"program {self.name}: {what}; it was not made by svod's lowering, or the file that it is from was changed")

    def _check_slots(self) -> None:
        refuse = self._refuse
        if not self.params:
            refuse("it has no parameters, so it can compute nothing")
        if not self.outs:
            refuse("it writes none of its parameters")
        if list(self.outs) != sorted(set(self.outs)) or not 0 <= self.outs[0] <= self.outs[-1] < len(self.params):
            refuse(f"the slots it writes are {self.outs}; they must be different, in order, and of its {len(self.params)} parameters")
        if list(self.ins) != sorted(set(self.ins)) or not set(self.ins) <= set(self.globals):
            refuse(f"the slots it reads are {self.ins}; they must be different, in order, and of its {len(self.params)} parameters")
        if any(size < 0 for _, size in self.params) or any(size < 0 for size in self.temps):
            refuse("a parameter or a temporary has a negative size")

    def _check_variables(self) -> None:
        refuse = self._refuse
        if list(self.variables) != sorted(set(self.variables)):
            refuse(f"its variables are {', '.join(self.variables)}; they must be different and in order")
        if not set(self.launch.variables) <= set(self.variables):
            refuse(f"its launch depends on {', '.join(self.launch.variables)}; its variables are {', '.join(self.variables) or 'none'}")
        if not self.launch.variables:
            self.launch.at({})

    def _check_phases(self) -> None:
        refuse = self._refuse
        if not self.phases:
            refuse("it has no phases")
        for phase in self.phases:
            if phase.extent < 0 or phase.threads < 1 or phase.scratch_bytes < 0:
                refuse(f"phase {phase.symbol} has {phase.extent} iterations on {phase.threads} threads and {phase.scratch_bytes} bytes of "
                       "scratch")
            if phase.block < 1 or phase.shared_bytes < 0 or phase.subgroup < 0 or (phase.subgroup and phase.block % phase.subgroup):
                refuse(f"phase {phase.symbol} has groups of {phase.block} threads, in subgroups of {phase.subgroup}, with "
                       f"{phase.shared_bytes} bytes of shared memory")
            names = {name for count in phase.counts for name, _ in count.terms}
            if not names <= set(self.variables) or any(count.stride < 1 for count in phase.counts):
                refuse(f"phase {phase.symbol} has iterations {phase.counts}; its variables are {self.variables}")
        if any(later.once and not phase.once for phase, later in pairwise(self.phases)):
            refuse("phases that run once must come before the others")
        if len({phase.symbol for phase in self.phases}) != len(self.phases):
            refuse(f"two of its phases have one symbol: {', '.join(phase.symbol for phase in self.phases)}")


@dataclass(frozen=True)
class Interface:
    """The interface of a kernel AST: parameters by slot, slots written and read, and variables; sorted, without duplicates."""

    params: tuple[tuple[DType, int], ...]
    outs: tuple[int, ...]
    ins: tuple[int, ...]
    variables: tuple[str, ...]


def interface_of(ast: UOp) -> Interface:
    """Return the interface of a kernel, cached on its node. Raises LaunchError if parameters leave a slot out."""
    interface: Interface = ast.cached("interface", _interface_of)
    return interface


def _interface_of(ast: UOp) -> Interface:
    params: dict[int, tuple[DType, int]] = {}
    outs, ins, variables = set(), set(), set()
    for u in over_ranges(ast).toposort():
        if u.op is Ops.PARAM:
            params[u.arg.slot] = u.dtype, u.arg.size
        elif u.op is Ops.STORE:
            outs.add(u.src[0].src[0].arg.slot)
        elif u.op is Ops.LOAD:
            ins.add(u.src[0].src[0].arg.slot)
        elif u.op is Ops.CUSTOM_FUNCTION:
            ins.update(p.arg.slot for p in u.src)
        elif u.op is Ops.DEFINE_VAR:
            variables.add(u.arg[0])
    if sorted(params) != list(range(len(params))):
        raise LaunchError(f"the kernel's parameters are at the slots {sorted(params)}; slots are 0, 1, … without gaps")
    return Interface(tuple(params[slot] for slot in sorted(params)), tuple(sorted(outs)), tuple(sorted(ins)), tuple(sorted(variables)))


class PackedTemporaries(NamedTuple):
    """The result of the phases that run once: they fill the temporaries `temps` from the constant parameters `slots`. Programs with the
    same `digest` fill them with the same bytes."""

    temps: tuple[int, ...]
    slots: tuple[int, ...]
    digest: str


def derive_spec(ast: UOp, target: Target, temps: tuple[int, ...], phases: tuple[PhaseSpec, ...]) -> ProgramSpec:
    """Return the description of a program: the interface and launch of its kernel, with the temporaries and phases that lowering has
    decided.

    Raises LaunchError for a launch that does not fit the target, CompileError for a malformed one."""
    kernel = interface_of(ast)
    launch = launch_of(ast, target.global_limits, target.local_limits)
    return ProgramSpec(DEFAULT_NAME, kernel.params, kernel.outs, temps, phases, kernel.variables, kernel.ins, launch)


@dataclass(frozen=True, eq=False)
class Program:
    """A ProgramSpec and, per phase, its LINEAR. Programs are equal if their text is equal: 0.0 differs from -0.0, and 1 from True."""

    spec: ProgramSpec
    code: tuple[tuple[Instruction, ...], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.spec == other.spec and repr(self.code) == repr(other.code)

    def __hash__(self) -> int:
        return hash((self.spec, self.size))

    @property
    def size(self) -> int:
        """The number of LINEAR instructions, which BEAM_UOPS_MAX limits."""
        return sum(len(c) for c in self.code)

    @cached_property
    def digest(self) -> str:
        """Hex digest of the code, launch sizes and scratch, in emission order. Names of symbols and of the kernel do not change it."""
        h = hashlib.blake2b(b"svod-linear-1", digest_size=16)
        for phase, code in zip(self.spec.phases, self.code, strict=True):
            h.update(repr((phase.extent, phase.threads, phase.scratch_bytes, phase.once)).encode())
            if phase.counts:
                h.update(repr(phase.counts).encode())
            if phase.block > 1 or phase.shared_bytes:
                h.update(repr(("group", phase.block, phase.shared_bytes)).encode())
            if phase.subgroup:
                h.update(repr(("subgroup", phase.subgroup)).encode())
            h.update(repr(code).encode())
        h.update(repr((self.spec.temps, self.spec.params, self.spec.outs, self.spec.variables)).encode())
        return h.hexdigest()

    @property
    def packing(self) -> PackedTemporaries | None:
        """The result of the phases that run once; None if there are none."""
        phases = [(phase.extent, code) for phase, code in zip(self.spec.phases, self.code, strict=True) if phase.once]
        pointers = {(i.op, i.arg) for _, code in phases for i in code if i.op in ("ARG", "TEMP")}
        temps = tuple(sorted(number for op, number in pointers if op == "TEMP"))
        slots = tuple(sorted(slot for op, slot in pointers if op == "ARG"))
        text = repr((phases, [self.spec.temps[t] for t in temps], [self.spec.params[s] for s in slots]))
        return PackedTemporaries(temps, slots, hashlib.blake2b(text.encode(), digest_size=16).hexdigest()) if phases else None
