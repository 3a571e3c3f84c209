"""LLVM text for tiles distributed over the threads of a warp: mma.sync, and loads of its operands.

    MMA                                             llvm.nvvm.mma.m16n8k16.row.col.bf16, each thread passes its words of the tiles
    MMA of float32                                  cvt.rna.tf32 of both factors, then mma
    LOADMATRIX from shared memory, lines of 16 bytes       ldmatrix: thread t gives the address of line t % 8 of matrix t // 8
    the same, lines across the summed axis          ldmatrix.trans, for 16-bit numbers only
    two LOADMATRIX that differ only in the offset   one ldmatrix, if it supports that many matrices
    any other LOADMATRIX                            each thread loads its elements

A line is 16 bytes: one 32-bit register in each of four threads. ldmatrix requires lines that begin at multiples of 16 bytes.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from svod.compile.cuda.targets import WIDEST_BYTES
from svod.compile.llvm.memory import Handler, address_of
from svod.compile.llvm.text import SCALAR, Family, LlvmWriter, memory_type
from svod.compile.lower.linear import NO_VALUE
from svod.compile.lower.program import Instruction
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.isa import DOTS, MATRIX_LINE_BYTES, TF32, Digit, Fragment

LDMATRIX_LINES = 8      # number of lines of a matrix
REGISTER_BYTES = 4
ROUND = "llvm.nvvm.f2tf32.rna"
THREAD = "llvm.nvvm.read.ptx.sreg.tid.x"        # the number of a thread in its block
MOST_MATRICES = 4       # maximum number of matrices that one ldmatrix loads
LINES_TOGETHER = 8      # number of lines after which the swizzle pattern of a row changes
_COPIES_BEGIN = {"COPY_ASYNC", "COPY_BULK", "COMMIT"}          # operations whose results are not read before a WAIT
_ENDS = frozenset({"LOOP", "CARRY", "RESULT", "SHFL_XOR", *(NO_VALUE - _COPIES_BEGIN)})


def loads_together(code: Sequence[Instruction]) -> dict[int, int]:
    """Return the pairs of LOADMATRIX that one ldmatrix can do, as first → second: nothing is written between the two, and they differ
    only in the offset."""
    pairs: dict[int, int] = {}
    single: dict[tuple[object, ...], int] = {}
    for i, x in enumerate(code):
        if x.op in _ENDS:
            single.clear()
        elif x.op == "LOADMATRIX" and 2 * x.lanes * x.dtype.itemsize <= MOST_MATRICES * REGISTER_BYTES:
            key = (x.src, x.arg[1:])
            first = single.pop(key, -1)
            if first < 0:
                single[key] = i
            else:
                pairs[first] = i
    return pairs


class Matrices(Family):
    """The rendering of one phase with matrix instructions. `pairs`: the first of two LOADMATRIX that become one instruction → the
    second."""

    def __init__(self, code: Sequence[Instruction]):
        self.pairs = loads_together(code)


def _moved(w: LlvmWriter, number: str, steps: list[tuple[int, int]], kind: str = "i32") -> str:
    """Compute a distance in elements that depends on a 32-bit number, as type `kind`. `steps`: the digits of the number as (count,
    elements per step), the most significant first; the distance is the sum of digit × elements."""
    total, inner = "0", 1
    for count, elements in reversed(steps):
        if count > 1 and elements:
            digit = w.temp(f"udiv i32 {number}, {inner}") if inner > 1 else number
            digit = w.temp(f"urem i32 {digit}, {count}")
            digit = digit if kind == "i32" else w.temp(f"zext i32 {digit} to {kind}")
            total = w.temp(f"add {kind} {total}, {w.temp(f'mul {kind} {digit}, {elements}')}")
        inner *= count
    return total


def _steps(digits: tuple[Digit, ...], rows: int, columns: int) -> list[tuple[int, int]]:
    return [(d.extent, d.rows * rows + d.columns * columns) for d in digits]


class OperandTile:
    """The location of an operand's tile in memory. `arg`: the argument of its LOADMATRIX."""

    def __init__(self, w: LlvmWriter, src: tuple[int, ...], arg: Any, elem: str, size: int):
        self.w, self.elem = w, elem
        offset, *_, self.lines = arg
        self.line = MATRIX_LINE_BYTES // size
        period = LDMATRIX_LINES * self.line * self.lines
        self.rest = offset % period if self.lines > 1 else 0  # elements from `base`, where a swizzle period begins, to the tile
        self.base = address_of(w, src[0], src[1], offset - self.rest)
        self.inner = "0"
        if self.lines > 1:
            index = w.value[src[2]]
            self.inner = index if w.code[src[2]].dtype.bits == 32 else w.temp(f"trunc i64 {index} to i32")

    def pointer(self, moved: str, kind: str = "i32") -> str:
        """Return the address of the element `moved` elements after the tile's first one; in swizzled lines, `moved` is an i32."""
        w = self.w
        if self.lines > 1:
            at = w.temp(f"add i32 {w.temp(f'add i32 {moved}, {self.inner}')}, {self.rest}")
            row = w.temp(f"and i32 {w.temp(f'udiv i32 {at}, {LINES_TOGETHER * self.line}')}, {self.lines - 1}")
            moved = w.temp(f"xor i32 {at}, {w.temp(f'mul i32 {row}, {self.line}')}")
        moved = moved if kind == "i64" else w.temp(f"sext {kind} {moved} to i64")
        return w.temp(f"getelementptr {self.elem}, ptr {self.base}, i64 {moved}")


def _starts_lines(w: LlvmWriter, i: int) -> bool:
    """Whether the lines of a tile are known to begin at multiples of 16 bytes."""
    _, dtype, _, src, (offset, *_) = w.code[i]
    most = WIDEST_BYTES // dtype.itemsize
    return all(gcd(w.family.alignment(w, src[0], s, offset, most), WIDEST_BYTES) == MATRIX_LINE_BYTES for s in src[1:])


def _load_matrix(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    if w.value[i]:      # the matrix was loaded together with another one
        return
    offset, name, number, rows, columns, lines = arg
    fragments = DOTS[name].fragments
    assert fragments is not None and isinstance(w.family, Matrices)
    fragment, size, lane = fragments[1 + number], dtype.itemsize, w.temp(f"and i32 {w.call('i32', THREAD)}, 31")
    tile = OperandTile(w, src, arg, SCALAR[dtype.name], size)
    # elements from one line to the next, and from one element of a line to the next along the summed axis
    across, along = (rows, columns) if number == 0 else (columns, rows)
    line, kind = (across, "") if along == 1 else (along, ".trans")
    members = tuple(dict.fromkeys((i, w.family.pairs.get(i, i))))
    if w.code[src[0]].op == "SHARED" and 1 in (along, across if size == 2 else 0) and line * size % MATRIX_LINE_BYTES == 0 and \
            all(_starts_lines(w, m) for m in members):
        _load_lines(w, members, fragment, tile, lane, line, kind)
        return
    steps = [*_steps(fragment.threads, rows, columns), *_steps(fragment.elements, rows, columns)]
    # 64 bits only for tiles that span 2³¹ elements or more
    kind = "i64" if sum([(n - 1) * abs(apart) for n, apart in steps]) >> 31 else "i32"
    own = _moved(w, lane, steps[:len(fragment.threads)], kind)
    step, run = _steps((fragment.run,), rows, columns)[0][1], fragment.run.extent
    together = run if step == 1 and lines == 1 else 1
    moves = [n for _, n in steps[:-1]]
    known = w.family.alignment(w, src[0], src[1], offset, WIDEST_BYTES // size)
    align = gcd(known, REGISTER_BYTES, *[n * size for n in moves]) if together > 1 else size
    if align < together * size:
        together, align = 1, size
    vec, part, whole = memory_type(dtype.name, lanes), memory_type(dtype.name, together), "poison"
    for k in range(0, lanes, together):
        row, column = fragment.places[k]
        at = tile.pointer(w.temp(f"add {kind} {own}, {row * rows + column * columns}"), kind)
        loaded = w.temp(f"load {part}, ptr {at}, align {align}")
        if lanes == 1:
            whole = loaded
            continue
        for e in range(together):
            one = loaded if together == 1 else w.temp(f"extractelement {part} {loaded}, i64 {e}")
            whole = w.temp(f"insertelement {vec} {whole}, {SCALAR[dtype.name]} {one}, i64 {k + e}")
    w.value[i] = whole


def _load_lines(w: LlvmWriter, members: tuple[int, ...], fragment: Fragment, tile: OperandTile, lane: str, line: int, kind: str) -> None:
    """Load, in one instruction, this thread's words of the matrices, one word of each. `line`: the distance between lines in elements."""
    _, dtype, lanes, _, (offset, _, _, rows, columns, _) = w.code[members[0]]
    each = lanes * dtype.itemsize // REGISTER_BYTES
    count = each * len(members)
    matrices = [(len(members), w.code[members[-1]].arg[0] - offset), *_steps(fragment.elements[:-1], rows, columns)]
    pointer = w.temp(f"addrspacecast ptr {tile.pointer(_moved(w, lane, [*matrices, (LDMATRIX_LINES, line)]))} to ptr addrspace(3)")
    name = f"llvm.nvvm.ldmatrix.sync.aligned.m8n8.x{count}{kind}.b16.p3"
    result = "i32" if count == 1 else "{" + ", ".join(["i32"] * count) + "}"
    loaded = w.call(result, name, ("ptr addrspace(3)", pointer))
    words = [loaded] if count == 1 else [w.temp(f"extractvalue {result} {loaded}, {k}") for k in range(count)]
    for k, m in enumerate(members):
        w.value[m] = _joined(w, words[k * each:(k + 1) * each], "i32", memory_type(dtype.name, lanes))


def _joined(w: LlvmWriter, parts: list[str], kind: str, vec: str) -> str:
    """Combine registers of the LLVM type `kind` into one vector of type `vec`."""
    of = kind if len(parts) == 1 else f"<{len(parts)} x {kind}>"
    whole = w.vector(kind, len(parts), parts)
    return whole if vec == of else w.temp(f"bitcast {of} {whole} to {vec}")


def _words(w: LlvmWriter, s: int) -> list[tuple[str, str]]:
    """Return (type, operand) of each register of a fragment, in the form that mma expects."""
    dtype, lanes = w.code[s].dtype, w.code[s].lanes
    if lanes == 1:
        return [(SCALAR[dtype.name], w.value[s])]
    count, vec = lanes * dtype.itemsize // REGISTER_BYTES, memory_type(dtype.name, lanes)
    kind = SCALAR[dtype.name] if dtype.itemsize == REGISTER_BYTES else "i32"
    whole = w.value[s] if dtype.itemsize == REGISTER_BYTES else w.temp(f"bitcast {vec} {w.value[s]} to <{count} x i32>")
    words = [w.temp(f"extractelement <{count} x {kind}> {whole}, i64 {k}") for k in range(count)]
    if dtype == dtypes.float16:
        return [("<2 x half>", w.temp(f"bitcast i32 {word} to <2 x half>")) for word in words]
    return [(kind, word) for word in words]


def _rounded(w: LlvmWriter, words: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Round float32 factors to TF32."""
    return [("i32", w.call("i32", ROUND, word)) for word in words]


def _mma(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    name = DOTS[arg].llvm
    acc, a, b = (_words(w, s) for s in src)
    if DOTS[arg].significand == TF32:
        a, b = _rounded(w, a), _rounded(w, b)
    kind = SCALAR[dtype.name]
    result = "{" + ", ".join([kind] * lanes) + "}"
    total = w.call(result, name, *a, *b, *acc)
    w.value[i] = _joined(w, [w.temp(f"extractvalue {result} {total}, {k}") for k in range(lanes)], kind, memory_type(dtype.name, lanes))


HANDLERS: dict[str, Handler] = {"LOADMATRIX": _load_matrix, "MMA": _mma}
