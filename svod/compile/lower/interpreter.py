"""An interpreter of LINEAR: phases run instruction by instruction with NumPy.

    run_phase(program, number, args, …)      runs a phase over the given flat arrays, in place
    PhaseInterpreter                         one phase; a subclass decides the order of threads and is told of every access

The interpreter is the emulated device: lowering is tested on it without LLVM, and machine code against it. Every access that is not masked
off is checked against its buffer. Scratch, shared memory and temporaries start as NaN (floats) or 0xA5 bytes, scratch again for every slice
of a phase, so that code that reads memory it did not write gives visibly wrong numbers. The threads of a group run one after another, each
up to the next BARRIER.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from svod.compile.lower.linear import BOOL, INDEX, LEGAL_INTEGER, LOADS_OPS, POINTERS, STORE_OPS, SUBGROUP_OPS, format_instruction
from svod.compile.lower.program import Instruction, PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.uop import Ops
from svod.core.machine.isa import DOTS, MATRIX_LINE_BYTES
from svod.core.spec.values import (
    OPERATION_VALUES,
    Array,
    apply_alu,
    bitcast,
    cast,
    constant,
    dot,
    held_dtype,
    hold,
    matrix_product,
    round_to,
    scaleb,
    tile_dot,
    unhold,
)
from svod.errors import CompileError


def run_phase(program: Program, number: int, args: Sequence[Array], temps: Sequence[Array], variables: Mapping[str, int], begin: int,
              end: int) -> None:
    """Run iterations begin ≤ i < end of one phase. `args`: flat arrays in memory form by slot; `temps`: the bytes of each temporary."""
    with np.errstate(all="ignore"):
        PhaseInterpreter(program.spec, program.spec.phases[number], program.code[number], args, temps, variables)(begin, end)


def poison(raw: Array, dtype: DType) -> None:
    """Fill bytes with NaNs of a float dtype, or with 0xA5 for other dtypes."""
    if dtype.is_float:
        whole = raw[:raw.size - raw.size % dtype.itemsize].view(to_numpy(dtype))
        whole[:] = unhold(constant(dtype, float("nan")), dtype)
    else:
        raw[:] = 0xA5


def _aligned(nbytes: int) -> Array:
    """Allocate `nbytes` bytes at a multiple of 64."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + nbytes]


Areas = dict[int, tuple[DType, Array]]      # first byte → element type, and the bytes up to the next area


def _areas(code: Sequence[Instruction], op: str, memory: Array) -> Areas:
    """Return the areas of scratch or shared memory that code points to."""
    types = {i.arg: i.dtype for i in code if i.op == op}
    return {a: (types[a], memory[a:b]) for a, b in pairwise([*sorted(types), memory.size])}


def _poison_areas(areas: Areas) -> None:
    for dtype, raw in areas.values():
        poison(raw, dtype)


class Elements:
    """The elements of the memory that a pointer points to, in memory form. `is_private`: no other thread has access to it."""

    def __init__(self, array: Array, dtype: DType, name: str, is_private: bool):
        self.array, self.dtype, self.name, self.size, self.is_private = array, dtype, name, array.size, is_private


Step = Callable[[], None]
Together = Callable[[list[list[Any]]], Any]     # the operands of each thread of a subgroup → the result of the current thread


class Barrier(NamedTuple):
    """A point where a thread waits: the instruction, and the positions of the loops around it. `visible`: whether the point makes
    earlier stores visible to other threads, as BARRIER does; an exchange of registers does not."""

    instruction: int
    positions: tuple[int, ...]
    visible: bool = True


class Pause(NamedTuple):
    """A step at which a thread waits for the others: a BARRIER, or a loop with one inside."""

    run: Callable[[], Iterator[Barrier]]


Body = list[Step | Pause]


def run_steps(body: Body) -> Iterator[Barrier]:
    """Run steps in order; yields whenever the thread has to wait."""
    for step in body:
        if isinstance(step, Pause):
            yield from step.run()
        else:
            step()

_INDEX_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ADD": operator.add, "SUB": operator.sub, "MUL": operator.mul, "MIN": min, "MAX": max, "NEG": operator.neg, "ABS": abs,
    "IDIV": lambda a, b: a // b if b else 0, "MOD": lambda a, b: a % b if b else 0, "MULACC": lambda a, b, c: a * b + c,
    "AND": operator.and_, "OR": operator.or_, "XOR": operator.xor, "NOT": operator.invert, "SHL": operator.lshift, "SHR": operator.rshift,
}


class BulkBuffer:
    """A buffer that rows are copied into. `filled`: how often all rows have arrived."""

    def __init__(self, expected: int):
        self.expected, self.filled = expected, 0
        self.copies: list[Step] = []    # copies that have started and not ended


class ThreadState(NamedTuple):
    """The private state of a thread that waits."""

    registers: list[Any]
    carried: dict[int, list[Any]]
    scratch: Array
    waiting: Iterator[Barrier]
    copies: list[list[Step]]


class PhaseInterpreter:
    """A phase translated to closures over one register file, which the threads of a group use in turn.

    Registers hold arrays of `lanes` elements in held form (svod.core.spec.values), scalar indices Python ints, pointers Memory. A subclass
    that is `watched` is told of every access."""

    watched = False

    def __init__(self, spec: ProgramSpec, phase: PhaseSpec, code: Sequence[Instruction], args: Sequence[Array], temps: Sequence[Array],
                 variables: Mapping[str, int]):
        self.spec, self.phase, self.code, self.args, self.temps, self.variables = spec, phase, code, args, temps, variables
        self.regs: list[Any] = [None] * len(code)
        self.carried: dict[int, list[Any]] = {}
        self.scratch, self.shared = (_aligned(n) for n in (phase.scratch_bytes, phase.shared_bytes))
        self.scratch_areas, self.shared_areas = _areas(code, "SCRATCH", self.scratch), _areas(code, "SHARED", self.shared)
        self.begin = self.end = self.thread = 0
        self.copies: list[list[Step]] = [[]]    # asynchronous copies of the current thread, grouped by COMMIT; the last group is open
        self.rows: list[BulkBuffer] = []        # bulk copies of rows of the current group, by buffer
        self.sent: dict[int, Any] = {}          # thread → values that it has given to others since it last resumed
        self.received: dict[int, Any] = {}      # thread → values that it gave before it last resumed
        self.steps: Body = []
        self.translate()

    def __call__(self, begin: int, end: int) -> None:
        """Run iterations begin ≤ i < end, each as a group of threads if the phase has groups."""
        if self.phase.block == 1:
            self.begin, self.end = begin, end
            self.run_group(range(1))
        else:
            for group in range(begin, end):
                self.begin, self.end = group, group + 1
                self.run_group(range(self.phase.block))

    def run_group(self, threads: Sequence[int]) -> None:
        """Run the threads of a group in the given order, each up to the next barrier. Raises CompileError if some do not reach it."""
        start = list(self.regs)
        _poison_areas(self.shared_areas)
        waiting: dict[int, ThreadState] = {}
        reached: dict[int, Barrier] = {}
        for thread in threads:
            _poison_areas(self.scratch_areas)
            self.regs[:], self.copies = start, [[]]
            self._resume(thread, run_steps(self.steps), waiting, reached)
        while waiting:
            self.check_barrier(reached)
            if next(iter(reached.values())).visible:
                self.at_barrier()
            self.received, self.sent = self.sent, {}
            states, waiting, reached = waiting, {}, {}
            for thread in self.order(threads):
                state = states[thread]
                self.regs[:], self.scratch[:] = state.registers, state.scratch
                self.carried.clear()
                self.carried.update(state.carried)
                self.copies = state.copies
                self._resume(thread, state.waiting, waiting, reached)
        self.regs[:] = start

    def _resume(self, thread: int, steps: Iterator[Barrier], waiting: dict[int, ThreadState], reached: dict[int, Barrier]) -> None:
        """Run a thread up to its next barrier, or to its end."""
        self.thread = thread
        barrier = next(steps, None)
        if barrier is not None:
            reached[thread] = barrier
            waiting[thread] = ThreadState(list(self.regs), dict(self.carried), self.scratch.copy(), steps, self.copies)

    def check_barrier(self, reached: Mapping[int, Barrier]) -> None:
        """Raise CompileError unless every thread of the group waits at the same barrier."""
        first = next(iter(reached.values()))
        if len(reached) < self.phase.block or any(b != first for b in reached.values()):
            others = self.phase.block - sum(b == first for b in reached.values())
            raise self.failed(first.instruction, f"{others} of the {self.phase.block} threads of the group do not reach it")

    def order(self, threads: Sequence[int]) -> Sequence[int]:
        """Return the order in which the threads of a group resume after a barrier."""
        return threads

    def at_barrier(self) -> None:
        """Hook for subclasses, called when all threads of a group have reached a barrier."""

    def touched(self, i: int, memory: Elements, where: Array, write: bool) -> None:
        """Hook for subclasses, called for every access that is not masked off, after its elements were checked against the buffer."""

    def in_flight(self, i: int, memory: Elements, where: Array) -> None:
        """Hook for subclasses, called when an asynchronous copy begins; `touched` is called when it ends."""

    def failed(self, i: int, why: str) -> CompileError:
        return CompileError(f"phase {self.phase.symbol}: {format_instruction(i, self.code[i])}: {why}")

    def translate(self) -> None:
        nest: list[Body] = [self.steps]
        open_loops: list[int] = []
        for i, (op, _, _, src, _) in enumerate(self.code):
            if op == "LOOP":
                nest.append([])
                open_loops.append(i)
            elif op == "ENDLOOP":
                body = nest.pop()
                open_loops.pop()
                nest[-1].append(self.loop(src[0], body, src[1:]))
            elif op == "BARRIER":
                nest[-1].append(self.barrier(i, tuple(open_loops)))
            elif op == "BULK_WAIT":
                nest[-1].append(self.bulk_wait(i, tuple(open_loops)))
            elif op in SUBGROUP_OPS:
                nest[-1].append(self.exchange(i, tuple(open_loops)))
            elif (step := self.step(i)) is not None:
                nest[-1].append(step)

    def barrier(self, i: int, loops: tuple[int, ...]) -> Pause:
        return Pause(lambda: iter([_reached(self, i, loops, True)]))

    def exchange(self, i: int, loops: tuple[int, ...]) -> Pause:
        """Make the step of an instruction that a whole subgroup executes: each thread gives its operands, and computes its result from
        the operands of all threads."""
        op, _, _, src, _ = self.code[i]
        result: Together = getattr(self, _TOGETHER[op])(i)

        def wait() -> Iterator[Barrier]:
            self.sent[self.thread] = [self.regs[s] for s in src]
            yield _reached(self, i, loops, False)
            first = self.thread - self.thread % self.phase.subgroup
            self.regs[i] = result([self.received[t] for t in range(first, first + self.phase.subgroup)])
        return Pause(wait)

    def shuffle(self, i: int) -> Together:
        """Make the function of SHFL_XOR: it returns the value of the thread whose number differs in the bits of the mask."""
        mask = self.code[i].arg
        return lambda given: given[self.thread % len(given) ^ mask][0]

    def load_matrix(self, i: int) -> Together:
        """Make the function of LOADMATRIX: it returns the elements of a tile in memory that this thread holds."""
        _, dtype, _, src, (offset, name, number, rows, columns, lines) = self.code[i]
        fragments = DOTS[name].fragments
        assert fragments is not None
        fragment, memory = fragments[1 + number], self.regs[src[0]]
        spread = np.array([row * rows + column * columns for row, column in fragment.places]) + offset
        origins = [row * rows + column * columns for row, column in fragment.origins]

        def load(given: list[Any]) -> Any:
            _, *at = given[0]
            if any(other[1:] != at for other in given):
                raise self.failed(i, "the threads of a subgroup give different addresses of one tile")
            where = origins[self.thread % len(origins)] + spread
            where = at[0] + (where if lines == 1 else swizzled(where + at[1], lines, MATRIX_LINE_BYTES // dtype.itemsize))
            return hold(memory.array[self.checked(i, memory, where, None, False)], dtype)
        return load

    def matrix_product(self, i: int) -> Together:
        """Make the function of MMA: it returns the elements of the sum that this thread holds."""
        dot = DOTS[self.code[i].arg]
        assert dot.fragments is not None
        shapes = (dot.rows, dot.columns), (dot.rows, dot.depth), (dot.depth, dot.columns)
        places = [np.array([[(r0 + r) * columns + c0 + c for r, c in f.places] for r0, c0 in f.origins])
                  for f, (_, columns) in zip(dot.fragments, shapes, strict=True)]

        def product(given: list[Any]) -> Any:
            tiles = []
            for number, ((rows, columns), where) in enumerate(zip(shapes, places, strict=True)):
                tile = np.empty(rows * columns, given[0][number].dtype)
                tile[where] = [of_thread[number] for of_thread in given]
                tiles.append(tile.reshape(rows, columns))
            acc, a, b = tiles
            return matrix_product(acc, a, b, dot.significand).ravel()[places[0][self.thread % len(given)]]
        return product

    def product_in_shared(self, i: int) -> Together:
        """Make the function of MMASHARED, whose operands are in shared memory: it returns the elements of the sum that this thread
        holds."""
        name, *sides = self.code[i].arg
        dot = DOTS[name]
        assert dot.fragments is not None
        result = dot.fragments[0]
        held = [np.array([(r0 + r, c0 + c) for r, c in result.places]) for r0, c0 in result.origins]
        spread = [in_rows(shape, side, MATRIX_LINE_BYTES // dtype.itemsize)
                  for shape, side, dtype in zip(((dot.rows, dot.depth), (dot.depth, dot.columns)), sides, dot.operands, strict=True)]

        def product(given: list[Any]) -> Any:
            acc, *places = given[self.thread % len(given)]
            if any(other[2] != places[1] or other[4] != places[3] for other in given):
                raise self.failed(i, "the threads of a subgroup give different addresses of one tile")
            lie = [swizzled(at + where, side[3], MATRIX_LINE_BYTES // dtype.itemsize)
                   for at, where, side, dtype in zip(places[1::2], spread, sides, dot.operands, strict=True)]
            a, b = (hold(memory.array[self.checked(i, memory, where.ravel(), None, False)].reshape(where.shape), dtype)
                    for memory, where, dtype in zip(places[::2], lie, dot.operands, strict=True))
            rows, columns = held[self.thread % dot.threads].T
            total = np.zeros((dot.rows, dot.columns), acc.dtype)
            total[rows, columns] = acc
            return matrix_product(total, a, b)[rows, columns]
        return product

    def loop(self, head: int, body: Body, following: tuple[int, ...]) -> Step | Pause:
        regs, carried = self.regs, self.carried
        start, stop, *init = self.code[head].src
        stride = self.code[head].arg
        steps: list[Step] = [step for step in body if not isinstance(step, Pause)]

        def run() -> None:
            carried[head] = [regs[s] for s in init]
            for position in range(regs[start], regs[stop], stride):
                regs[head] = position
                for step in steps:
                    step()
                carried[head] = [regs[s] for s in following]

        def pausing() -> Iterator[Barrier]:
            carried[head] = [regs[s] for s in init]
            for position in range(regs[start], regs[stop], stride):
                regs[head] = position
                yield from run_steps(body)
                carried[head] = [regs[s] for s in following]
        return run if len(steps) == len(body) else Pause(pausing)

    def is_index(self, s: int) -> bool:
        return self.code[s].dtype is INDEX and self.code[s].lanes == 1

    def step(self, i: int) -> Step | None:
        """Make the step of one instruction. Constants and pointers have none: their registers are set here, once."""
        op, dtype, lanes, src, arg = self.code[i]
        regs, carried = self.regs, self.carried
        if op == "CONST":
            regs[i] = arg if self.is_index(i) else np.broadcast_to(constant(dtype, arg), (lanes,))
        elif op == "VCONST":
            array = np.array([constant(dtype, v) for v in arg])
            regs[i] = int(array[0]) if self.is_index(i) else array
        elif op == "VAR":
            regs[i] = int(self.variables[arg])
        elif op in POINTERS:
            regs[i] = self.memory(op, dtype, arg)
        elif op in ("BEGIN", "END_"):
            def bounds() -> None: regs[i] = self.begin if op == "BEGIN" else self.end
            return bounds
        elif op == "LOCAL_ID":
            def thread() -> None: regs[i] = self.thread
            return thread
        elif op in ("CARRY", "RESULT"):
            head = src[0]
            def carry() -> None: regs[i] = carried[head][arg]
            return carry
        elif op in ("TILELOAD", "TILESTORE"):
            return self.tile_memory(i)
        elif op == "TILEZERO":
            def zero() -> None: regs[i] = np.zeros(lanes, held_dtype(dtype))
            return zero
        elif op in STORE_OPS:
            return self.store(i)
        elif op in ("COPY_ASYNC", "COMMIT", "WAIT"):
            return self.copy_async(i)
        elif op in ("BULK_BEGIN", "COPY_BULK", "BULK_END"):
            return self.copy_bulk(i)
        elif op in LOADS_OPS:
            return self.load(i)
        elif op != "PREFETCH":      # a prefetch changes no value
            return self.compute(i)
        return None

    def memory(self, op: str, dtype: DType, arg: int) -> Elements:
        if op == "ARG":
            _, size = self.spec.params[arg]
            return Elements(self.args[arg][:size], dtype, f"argument {arg}", False)
        if op == "TEMP":
            raw, name = self.temps[arg], f"temporary {arg}"
        else:
            areas, memory = (self.scratch_areas, "scratch") if op == "SCRATCH" else (self.shared_areas, "shared memory")
            (_, raw), name = areas[arg], f"{memory} from byte {arg}"
        return Elements(raw[:raw.size - raw.size % dtype.itemsize].view(to_numpy(dtype)), dtype, name, op == "SCRATCH")

    def compute(self, i: int) -> Step:
        """Make the step of an instruction that computes a value from other values."""
        op, _, _, src, _ = self.code[i]
        regs, get = self.regs, operator.itemgetter(*src)
        function = _INDEX_FUNCTIONS[op] if self.is_index(i) and op in _INDEX_FUNCTIONS and all(map(self.is_index, src)) else _boxed(self, i)
        if len(src) == 1:
            def unary() -> None: regs[i] = function(get(regs))
            return unary
        def nary() -> None: regs[i] = function(*get(regs))
        return nary

    def vector_function(self, i: int) -> Callable[..., Any]:
        """Return the instruction as a function of arrays."""
        op, dtype, lanes, src, arg = self.code[i]
        of = self.code[src[0]].dtype
        if op == "CAST":
            return lambda x: cast(x, of, dtype)
        if op == "MMAWAIT":
            return lambda x: x
        if op == "BITCAST":
            return lambda x: bitcast(x, of, dtype)
        if op == "TILEDOT":
            return lambda acc, x, y: tile_dot(acc, x, y, *arg)
        if op == "DOT":
            return lambda acc, x, y: dot(acc, x, y, arg)
        if op == "SPLAT":
            return lambda x: np.broadcast_to(x, (lanes,))
        if op == "EXTRACT":
            return lambda x: x[arg:arg + 1]
        if op == "SHUFFLE":
            take, undefined = np.maximum(np.array(arg), 0), np.array(arg) < 0
            rubbish = constant(dtype, float("nan")) if dtype.is_float else np.array(True if dtype == BOOL else 0x5A, held_dtype(dtype))
            if undefined.any():
                return lambda *v: np.where(undefined, rubbish, np.concatenate(v)[take])
            return lambda *v: np.concatenate(v)[take]
        if op == "SCALEB":
            return lambda x, n: round_to(scaleb(x, n), dtype)
        if op in LEGAL_INTEGER:
            return lambda x, y: self.defined_integer(i, x, y)
        uop = Ops[op]
        if (dtype.is_float and dtype.bits == 16) or dtype == dtypes.void:
            return lambda *v: apply_alu(uop, dtype, v)
        return OPERATION_VALUES[uop]

    def defined_integer(self, i: int, x: Array, y: Array) -> Array:
        """Compute an integer operation that machines define only for some operands. Raises CompileError for a division at which a
        machine may trap; a shift by the width or more gives an arbitrary value."""
        op, dtype, _, _, _ = self.code[i]
        if op in ("QUOTIENT", "REMAINDER"):
            if np.any((y == 0) | ((x == dtype.min) & (y == -1) & (dtype.kind == "i"))):
                raise self.failed(i, "divides by 0, or the least number by -1")
            rest = np.fmod(x, y)
            return np.asarray(rest if op == "REMAINDER" else (x - rest) // y)
        inside = (y >= 0) & (y < dtype.bits)
        shifted = OPERATION_VALUES[Ops.SHL if op == "SHL_BELOW" else Ops.SHR](x, np.where(inside, y, 0).astype(y.dtype))
        return np.where(inside, shifted, np.array(0x5A, x.dtype))

    # -- memory ---------------------------------------------------------------------------------------
    def addresses(self, i: int) -> Callable[[], Array]:
        """Return a function that computes the positions of an access, one per lane."""
        op, _, lanes, src, arg = self.code[i]
        regs, index = self.regs, src[1]
        if op in ("GATHER", "SCATTER"):
            return lambda: np.atleast_1d(np.asarray(regs[index])) + arg
        stride = arg[1] if op in ("LOADS", "STORES") else 1
        spread = np.arange(lanes) * stride + (arg if op == "LOAD" else arg[0])
        return lambda: regs[index] + spread

    def checked(self, i: int, memory: Elements, where: Array, mask: Array | None, write: bool) -> Array:
        """Check the positions of an access against its buffer; returns them, with masked-off lanes set to 0."""
        used = where if mask is None else where[mask]
        if used.size and (used.min() < 0 or used.max() >= memory.size):
            bad = used[(used < 0) | (used >= memory.size)]
            raise self.failed(i, f"touches element {bad[0]} of {memory.name}, which has {memory.size}")
        self.touched(i, memory, used, write)
        return where if mask is None else np.where(mask, where, 0)

    def load(self, i: int) -> Step:
        op, dtype, lanes, src, arg = self.code[i]
        regs, memory, addresses = self.regs, self.regs[src[0]], self.addresses(i)
        array, size, index = memory.array, memory.size, src[1]
        if len(src) == 2 and op == "LOAD" and not self.watched:
            def contiguous() -> None:
                at = regs[index] + arg
                if at < 0 or at + lanes > size:
                    self.checked(i, memory, addresses(), None, False)
                regs[i] = hold(array[at:at + lanes].copy(), dtype)
            return contiguous
        if len(src) == 2:
            def spread() -> None:
                regs[i] = hold(array[self.checked(i, memory, addresses(), None, False)], dtype)
            return spread
        gate, alt = src[2], src[3]

        def masked() -> None:
            mask = np.broadcast_to(regs[gate], (lanes,))
            where = self.checked(i, memory, addresses(), mask, False)
            regs[i] = np.where(mask, hold(array[where], dtype), regs[alt]) if mask.any() else regs[alt]
        return masked

    def copy_async(self, i: int) -> Step:
        """Make the step of an asynchronous copy. The copy is performed as late as allowed: at the WAIT for it."""
        op, dtype, lanes, src, arg = self.code[i]
        regs, elements = self.regs, np.arange(lanes)
        if op == "COMMIT":
            return lambda: self.copies.append([])
        if op == "WAIT":
            def wait() -> None:
                done = max(0, len(self.copies) - 1 - arg)
                for copy in [copy for group in self.copies[:done] for copy in group]:
                    copy()
                self.copies = self.copies[done:]
            return wait
        to, source = regs[src[0]], regs[src[2]]

        def begin() -> None:
            if not bool(np.all(regs[src[4]])):
                return
            where, at, inside = regs[src[1]] + arg[0] + elements, regs[src[3]] + arg[1] + elements, bool(np.all(regs[src[5]]))
            _begin_copy(self, i, to, where)
            here = self.checked(i, source, at, None, False) if inside else at

            def end() -> None:
                self.touched(i, to, where, True)
                to.array[where] = source.array[here] if inside else unhold(np.zeros(lanes, held_dtype(dtype)), dtype)
            self.copies[-1].append(end)
        return begin

    def copy_bulk(self, i: int) -> Step:
        """Make the step of a bulk copy of a row. The copy is performed as late as allowed: when a thread waits for its buffer."""
        op, _, lanes, src, arg = self.code[i]
        regs, elements = self.regs, np.arange(lanes)
        if op != "COPY_BULK":
            def all_of_them() -> None:
                if self.thread == 0:
                    if any(buffer.copies for buffer in self.rows):
                        raise self.failed(i, "copies are under way")
                    self.rows = [BulkBuffer(arg[1]) for _ in range(arg[0])] if op == "BULK_BEGIN" else []
            return all_of_them
        to, source = regs[src[0]], regs[src[2]]

        def begin() -> None:
            if not bool(np.all(regs[src[4]])):
                return
            where, number = regs[src[1]] + arg[0] + elements, regs[src[6]]
            if not 0 <= number < len(self.rows):
                raise self.failed(i, f"buffer {number} of {len(self.rows)}")
            _begin_copy(self, i, to, where)
            here, began = self.checked(i, source, regs[src[3]] + arg[1] + elements, None, False), self.thread

            def end() -> None:
                waits, self.thread = self.thread, began
                self.touched(i, to, where, True)
                self.thread = waits
                to.array[where] = source.array[here]
            self.rows[number].copies.append(end)
        return begin

    def bulk_wait(self, i: int, loops: tuple[int, ...]) -> Pause:
        _, number, parity = self.code[i].src

        def wait() -> Iterator[Barrier]:
            yield _reached(self, i, loops, False)
            if not 0 <= self.regs[number] < len(self.rows):
                raise self.failed(i, f"buffer {self.regs[number]} of {len(self.rows)}")
            buffer = self.rows[self.regs[number]]
            if len(buffer.copies) == buffer.expected:
                for copy in buffer.copies:
                    copy()
                buffer.copies.clear()
                buffer.filled += 1
            if buffer.filled % 2 == self.regs[parity]:
                raise self.failed(i, f"waits for ever: {len(buffer.copies)} of {buffer.expected} copies have begun")
        return Pause(wait)

    def tile_memory(self, i: int) -> Step:
        op, dtype, lanes, src, (offset, rows, stride) = self.code[i]
        regs, memory, index = self.regs, self.regs[src[0]], src[1]
        spread = (np.arange(rows)[:, None] * stride + np.arange(lanes // rows)).ravel() + offset

        def load() -> None:
            regs[i] = hold(memory.array[self.checked(i, memory, regs[index] + spread, None, False)], dtype)

        def store() -> None:
            memory.array[self.checked(i, memory, regs[index] + spread, None, True)] = unhold(regs[src[2]], dtype)
        return load if op == "TILELOAD" else store

    def store(self, i: int) -> Step:
        op, dtype, lanes, src, arg = self.code[i]
        regs, memory, addresses = self.regs, self.regs[src[0]], self.addresses(i)
        array, size, index, value = memory.array, memory.size, src[1], src[2]
        if len(src) == 3 and op == "STORE" and not self.watched:
            offset = arg[0]

            def contiguous() -> None:
                at = regs[index] + offset
                if at < 0 or at + lanes > size:
                    self.checked(i, memory, addresses(), None, True)
                array[at:at + lanes] = unhold(regs[value], dtype)
            return contiguous
        gate = src[3] if len(src) == 4 else None

        def spread() -> None:
            mask = None if gate is None else np.broadcast_to(regs[gate], (lanes,))
            where, stored = self.checked(i, memory, addresses(), mask, True), unhold(regs[value], dtype)
            if mask is not None:
                where, stored = where[mask], stored[mask]
            array[where] = stored
        return spread


#: Operations of a subgroup → names of methods, so that an interpreter of another machine can override these.
_TOGETHER = {"SHFL_XOR": "shuffle", "LOADMATRIX": "load_matrix", "MMA": "matrix_product", "MMASHARED": "product_in_shared"}


def _reached(phase: PhaseInterpreter, i: int, loops: tuple[int, ...], visible: bool) -> Barrier:
    """Return the point at which the current thread waits."""
    return Barrier(i, tuple([phase.regs[head] for head in loops]), visible)


def _boxed(phase: PhaseInterpreter, i: int) -> Callable[..., Any]:
    """Return `vector_function` of an instruction, adapted to scalar indices that are Python ints."""
    vector, unbox, scalar = phase.vector_function(i), phase.is_index(i), [phase.is_index(s) for s in phase.code[i].src]
    if not unbox and not any(scalar):
        return vector

    def function(*operands: Any) -> Any:
        result = vector(*[np.array([x], np.int64) if box else x for x, box in zip(operands, scalar, strict=True)])
        return int(result[0]) if unbox else result
    return function


def _begin_copy(phase: PhaseInterpreter, i: int, to: Elements, where: Array) -> None:
    """Report to the hook that a copy has started. Raises the instruction's error if the copy goes beyond its memory."""
    if where[0] < 0 or where[-1] >= to.size:
        raise phase.failed(i, f"touches element {where[0]} of {to.name}, which has {to.size}")
    phase.in_flight(i, to, where)


def in_rows(shape: tuple[int, int], side: tuple[int, int, int, int], line: int) -> Array:
    """Return the element numbers of a matrix that is stored in rows of lines, before swizzling. `side`: (offset, dim that is cut into
    rows, elements from one such row to the next, lines of a row). Rows of neighbouring positions of the other dim follow one another."""
    offset, cut, apart, lines = side
    places, row = np.indices(shape), lines * line
    return np.asarray(offset + places[cut] // row * apart + places[cut] % row + places[1 - cut] * row)


def swizzled(elements: Array, lines: int, line: int) -> Array:
    """Return the positions that the swizzle gives to elements of an area whose rows have `lines` lines of `line` elements."""
    return np.asarray(elements ^ elements // (8 * line) % lines * line)
