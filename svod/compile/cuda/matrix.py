"""Tiles that a warp holds together as LLVM text: mma.sync, and loads of its operands.

    MMA                                             llvm.nvvm.mma.m16n8k16.row.col.bf16, each thread with its words of the tiles
    MMA of float32                                  its factors by cvt.rna.tf32 before
    LOADMATRIX from shared memory, lines of 16 bytes       ldmatrix: thread t gives the address of line t % 8 of matrix t // 8
    the same, lines across the sum                  ldmatrix.trans, of 16-bit numbers
    any other                                       each thread loads its own elements

A line is as many numbers as a quarter of a warp holds in one register each: ldmatrix takes those that begin at multiples of 16 bytes.
"""
from __future__ import annotations

from math import gcd
from typing import Any

from svod.compile.cuda.alignment import WIDEST
from svod.compile.llvm.memory import Handler, address_of
from svod.compile.llvm.text import SCALAR, Writer, memory_type
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.isa import DOTS, TF32, Digit, Fragment

LINE, LINES = 16, 8     # bytes of a line, and lines of a matrix
WORD = 4                # bytes of a register
ROUND = "llvm.nvvm.f2tf32.rna"


def lane_of(w: Writer) -> str:
    """The number of the thread in its warp, as i32."""
    w.declared.add("declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()")
    return w.temp(f"and i32 {w.temp('call i32 @llvm.nvvm.read.ptx.sreg.tid.x()')}, 31")


def _moved(w: Writer, number: str, steps: list[tuple[int, int]]) -> str:
    """How far a number moves an address, as i32: its digits, each (count, elements), the first one outermost."""
    total, inner = "0", 1
    for count, elements in reversed(steps):
        if count > 1 and elements:
            digit = w.temp(f"udiv i32 {number}, {inner}") if inner > 1 else number
            digit = w.temp(f"urem i32 {digit}, {count}")
            total = w.temp(f"add i32 {total}, {w.temp(f'mul i32 {digit}, {elements}')}")
        inner *= count
    return total


def _steps(digits: tuple[Digit, ...], rows: int, columns: int) -> list[tuple[int, int]]:
    return [(d.extent, d.rows * rows + d.columns * columns) for d in digits]


def _further(w: Writer, elem: str, base: str, elements: str) -> str:
    return w.temp(f"getelementptr {elem}, ptr {base}, i64 {w.temp(f'sext i32 {elements} to i64')}")


def _load_matrix(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, name, number, rows, columns = arg
    fragments = DOTS[name].fragments
    assert fragments is not None
    fragment, size = fragments[1 + number], dtype.itemsize
    base, lane = address_of(w, src[0], src[1], offset), lane_of(w)
    start = gcd(w.family.alignment(w, src[0], src[1], offset, WIDEST // size), WIDEST)
    across, along = (rows, columns) if number == 0 else (columns, rows)      # from line to line, and in a line along the sum
    if w.code[src[0]].op == "SHARED" and start == LINE:
        if along == 1 and across * size % LINE == 0:
            _load_lines(w, i, dtype, lanes, fragment, base, lane, across, (rows, columns), "")
            return
        if across == 1 and size == 2 and along * size % LINE == 0:
            _load_lines(w, i, dtype, lanes, fragment, base, lane, along, (rows, columns), ".trans")
            return
    own = _further(w, SCALAR[dtype.name], base, _moved(w, lane, _steps(fragment.threads, rows, columns)))
    step, run = _steps((fragment.run,), rows, columns)[0][1], fragment.run.extent
    together = run if step == 1 else 1
    moves = [n for _, n in (*_steps(fragment.threads, rows, columns), *_steps(fragment.elements[:-1], rows, columns))]
    align = gcd(start, WORD, *[n * size for n in moves]) if together > 1 else size
    if align < together * size:
        together, align = 1, size
    vec, part, whole = memory_type(dtype.name, lanes), memory_type(dtype.name, together), "poison"
    for k in range(0, lanes, together):
        row, column = fragment.places[k]
        at = w.temp(f"getelementptr {SCALAR[dtype.name]}, ptr {own}, i64 {row * rows + column * columns}")
        loaded = w.temp(f"load {part}, ptr {at}, align {align}")
        if lanes == 1:
            whole = loaded
            continue
        for e in range(together):
            one = loaded if together == 1 else w.temp(f"extractelement {part} {loaded}, i64 {e}")
            whole = w.temp(f"insertelement {vec} {whole}, {SCALAR[dtype.name]} {one}, i64 {k + e}")
    w.value[i] = whole


def _load_lines(w: Writer, i: int, dtype: DType, lanes: int, fragment: Fragment, base: str, lane: str, line: int,
                strides: tuple[int, int], kind: str) -> None:
    """The words of a thread, each of one matrix, whose lines are `line` elements apart."""
    count = lanes * dtype.itemsize // WORD
    matrices = _steps(fragment.elements[:-1], *strides)
    moved = _moved(w, lane, [*matrices, (LINES, line)])
    pointer = w.temp(f"addrspacecast ptr {_further(w, SCALAR[dtype.name], base, moved)} to ptr addrspace(3)")
    name = f"llvm.nvvm.ldmatrix.sync.aligned.m8n8.x{count}{kind}.b16.p3"
    result = "i32" if count == 1 else "{" + ", ".join(["i32"] * count) + "}"
    w.declared.add(f"declare {result} @{name}(ptr addrspace(3))")
    loaded = w.temp(f"call {result} @{name}(ptr addrspace(3) {pointer})")
    words = [loaded] if count == 1 else [w.temp(f"extractvalue {result} {loaded}, {k}") for k in range(count)]
    w.value[i] = _joined(w, words, "i32", memory_type(dtype.name, lanes))


def _joined(w: Writer, parts: list[str], kind: str, vec: str) -> str:
    """Registers as one vector."""
    whole = "poison"
    for k, part in enumerate(parts):
        whole = w.temp(f"insertelement <{len(parts)} x {kind}> {whole}, {kind} {part}, i64 {k}")
    return whole if vec == f"<{len(parts)} x {kind}>" else w.temp(f"bitcast <{len(parts)} x {kind}> {whole} to {vec}")


def _words(w: Writer, s: int) -> list[tuple[str, str]]:
    """(type, operand) of the registers that hold a fragment, as mma takes them."""
    dtype, lanes = w.code[s].dtype, w.code[s].lanes
    if lanes == 1:
        return [(SCALAR[dtype.name], w.value[s])]
    count, vec = lanes * dtype.itemsize // WORD, memory_type(dtype.name, lanes)
    kind = SCALAR[dtype.name] if dtype.itemsize == WORD else "i32"
    whole = w.value[s] if dtype.itemsize == WORD else w.temp(f"bitcast {vec} {w.value[s]} to <{count} x i32>")
    words = [w.temp(f"extractelement <{count} x {kind}> {whole}, i64 {k}") for k in range(count)]
    if dtype == dtypes.float16:
        return [("<2 x half>", w.temp(f"bitcast i32 {word} to <2 x half>")) for word in words]
    return [(kind, word) for word in words]


def _rounded(w: Writer, words: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Factors of float32 as TF32."""
    w.declared.add(f"declare i32 @{ROUND}(float)")
    return [("i32", w.temp(f"call i32 @{ROUND}(float {word})")) for _, word in words]


def _mma(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    name = DOTS[arg].llvm
    acc, a, b = (_words(w, s) for s in src)
    if DOTS[arg].significand == TF32:
        a, b = _rounded(w, a), _rounded(w, b)
    kind = SCALAR[dtype.name]
    result = "{" + ", ".join([kind] * lanes) + "}"
    operands = [*a, *b, *acc]
    w.declared.add(f"declare {result} @{name}({', '.join(t for t, _ in operands)})")
    total = w.temp(f"call {result} @{name}({', '.join(f'{t} {x}' for t, x in operands)})")
    w.value[i] = _joined(w, [w.temp(f"extractvalue {result} {total}, {k}") for k in range(lanes)], kind, memory_type(dtype.name, lanes))


HANDLERS: dict[str, Handler] = {"LOADMATRIX": _load_matrix, "MMA": _mma}
