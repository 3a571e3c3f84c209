"""LINEAR on a grid: groups in any order, the threads of a group in any order between barriers. It reports

    races           two threads of a group touch one element between two barriers, or two groups one element within a phase,
                    and at least one of them writes it
    out of bounds   an access beyond an argument, a temporary, or an area of scratch or shared memory
    barriers        that not all threads of a group reach
    uninitialised   reads of shared memory that no thread of the group has written

Its matrix instructions have the layout that is written here, whatever the data of the instructions say.

Orders are drawn from a seed. What is reported does not depend on them: accesses are logged and compared at every barrier.
"""
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from svod.compile.lower.interpreter import Elements, PhaseInterpreter, Together
from svod.compile.lower.linear import format_instruction
from svod.compile.lower.program import Program
from svod.core.spec.values import hold, matrix_product
from svod.errors import CompileError
from tests.interpreted import poisoned_temporaries

Array = np.ndarray[Any, Any]


class DeviceFault(CompileError):
    """An illegal operation of the program, such as a race or an access out of bounds."""


class Access(NamedTuple):
    """An access of one thread: the instruction, the elements, the thread, and whether it is a write."""

    instruction: int
    elements: Array
    actor: int
    write: bool


class GridInterpreter(PhaseInterpreter):
    """Interprets a phase on the toy device."""

    watched = True

    def __init__(self, program: Program, number: int, args: Sequence[Array], temps: Sequence[Array], variables: Mapping[str, int],
                 rng: random.Random):
        super().__init__(program.spec, program.spec.phases[number], program.code[number], args, temps, variables)
        self.rng = rng
        self.group = 0
        self.since_barrier: dict[str, list[Access]] = {}    # by memory: accesses of the group that runs now
        self.of_phase: dict[str, list[Access]] = {}         # by global memory: accesses of complete groups
        self.memories: dict[str, Elements] = {}
        self.written: dict[str, Array] = {}                 # by shared memory: the elements that the group has written

    def run_grid(self, begin: int, end: int) -> None:
        """Runs the groups begin ≤ i < end of the phase. Raises CompileError with the first fault."""
        groups = list(range(begin, end))
        self.rng.shuffle(groups)
        for group in groups:
            self.group, self.begin, self.end = group, group, group + 1
            self.written.clear()
            self.run_group(self.order(range(self.phase.block)))
            self.at_barrier()
        for name, accesses in self.of_phase.items():
            self._refuse_race(name, accesses, "groups {} and {} of a phase")

    def order(self, threads: Sequence[int]) -> Sequence[int]:
        shuffled = list(threads)
        self.rng.shuffle(shuffled)
        return shuffled

    def touched(self, i: int, memory: Elements, where: Array, write: bool) -> None:
        if memory.is_private or not where.size:
            return
        self.memories[memory.name] = memory
        if memory.name.startswith("shared"):
            self._check_initialised(i, memory, where, write)
        else:
            self.of_phase.setdefault(memory.name, []).append(Access(i, where, self.group, write))
        self.since_barrier.setdefault(memory.name, []).append(Access(i, where, self.thread, write))

    def matrix_product(self, i: int) -> Together:
        def product(given: list[list[Any]]) -> Any:
            acc, a, b = (np.empty((4, 4), given[0][n].dtype) for n in range(3))
            for t, (held, row, column) in enumerate(given):
                y, x = t // 2, t % 2
                for e in range(4):
                    acc[y + 2 * (e // 2), 2 * x + e % 2] = held[e]
                    a[y + 2 * (e // 2), 2 * x + e % 2] = row[e]
                    b[2 * x + e % 2, y + 2 * (e // 2)] = column[e]
            y, x = self.thread % 4 // 2, self.thread % 2
            out = matrix_product(acc, a, b)
            return np.array([out[y + 2 * (e // 2), 2 * x + e % 2] for e in range(4)])
        return product

    def product_in_shared(self, i: int) -> Together:
        left, right = self.code[i].arg[1:]

        def matrix(memory: Elements, at: int, side: tuple[int, int, int, int]) -> Array:
            """A matrix of 8×8 16-bit elements in shared memory, rows by columns. Neighbouring rows are 16·lines bytes apart if `cut`,
            otherwise neighbouring columns are. Bits of the address from 2⁴ on are xored with the bits from 2⁷ on."""
            offset, cut, _, lines = side
            nbytes = 2 * (at + offset) + np.add.outer(16 * lines * np.arange(8), 2 * np.arange(8))
            where = (nbytes ^ (nbytes >> 7 & lines - 1) << 4) >> 1
            values = hold(memory.array[self.checked(i, memory, where.ravel(), None, False)], memory.dtype).reshape(8, 8)
            return values if cut else values.T

        def product(given: list[list[Any]]) -> Any:
            held, *places = given[self.thread % len(given)]
            total = np.zeros((8, 8), np.float32)
            where = [(4 * (self.thread % 8 // 4) + self.thread % 4 // 2 + 2 * (e // 4), 2 * (self.thread % 2) + 4 * (e % 4 // 2) + e % 2)
                     for e in range(8)]
            for (y, x), value in zip(where, held, strict=True):
                total[y, x] = value
            out = matrix_product(total, matrix(places[0], places[1], left), matrix(places[2], places[3], right))
            return np.array([out[y, x] for y, x in where])
        return product

    def in_flight(self, i: int, memory: Elements, where: Array) -> None:
        """Mark the destination of an asynchronous copy: no other thread may touch it until the copy has ended."""
        self.memories[memory.name] = memory
        self.since_barrier.setdefault(memory.name, []).append(Access(i, where, self.thread, True))

    def _check_initialised(self, i: int, memory: Elements, where: Array, write: bool) -> None:
        written = self.written.setdefault(memory.name, np.zeros(memory.size, np.bool_))
        if write:
            written[where] = True
        elif not written[where].all():
            raise DeviceFault(f"{self.failed(i, 'reads')} element {where[~written[where]][0]} of {memory.name}, which no thread of the "
                              "group has written")

    def at_barrier(self) -> None:
        for name, accesses in self.since_barrier.items():
            self._refuse_race(name, accesses, "threads {} and {} of a group, without a barrier between them,")
        self.since_barrier.clear()

    def _refuse_race(self, name: str, accesses: list[Access], who: str) -> None:
        """Raise DeviceFault if two actors touch the same element and one of them writes it."""
        if not any(a.write for a in accesses) or len({a.actor for a in accesses}) == 1:
            return
        writer = np.full(self.memories[name].size, -1)      # the last access that wrote each element
        for k, a in enumerate(accesses):
            if a.write:
                writer[a.elements] = k
        actors = np.array([a.actor for a in accesses])
        for a in accesses:
            last = writer[a.elements]
            raced = (last >= 0) & (actors[last] != a.actor)
            if raced.any():
                other = accesses[int(last[raced][0])]
                lines = " and ".join(format_instruction(x.instruction, self.code[x.instruction]) for x in (a, other))
                raise DeviceFault(f"phase {self.phase.symbol}: {who.format(a.actor, other.actor)} touch element "
                                  f"{a.elements[raced][0]} of {name}: {lines}")


def run_program(program: Program, args: Sequence[Array], variables: Mapping[str, int] | None = None, seed: int = 0) -> None:
    """Runs the phases of a program in order over `args`: flat arrays by slot, outputs written in place. Raises CompileError with the first
    fault."""
    rng, temps, values = random.Random(seed), poisoned_temporaries(program), variables or {}
    for number, phase in enumerate(program.spec.phases):
        run_phase(program, number, args, temps, values, 0, phase.extent_at(values), rng)


def run_phase(program: Program, number: int, args: Sequence[Array], temps: Sequence[Array], variables: Mapping[str, int], begin: int,
              end: int, rng: random.Random) -> None:
    """Runs the groups begin ≤ i < end of one phase over `args` and the program's temporaries, given as bytes."""
    with np.errstate(all="ignore"):
        GridInterpreter(program, number, args, temps, variables, rng).run_grid(begin, end)
