"""Tile instructions of LINEAR as LLVM text: x86's AMX, whose eight registers hold up to 16 rows of 64 bytes each.

    TILEZERO, TILELOAD, TILEDOT, TILESTORE    →    llvm.x86.tilezero, tileloadd64, tdpbssd …, tilestored64 on numbered registers

The registers are given out here: a TILEDOT changes that of its accumulator, a loop carries it without a phi. A function that uses them
sets their shapes once, at its start, and gives them back before it returns.
"""
from __future__ import annotations

from typing import Any

from svod.compile.llvm.memory import Handler, address_of
from svod.compile.llvm.text import Writer, refuse
from svod.core.ir.dtype import DType
from svod.core.machine.isa import DOTS, TILES
from svod.errors import CompileError

Shape = tuple[int, int]         # rows, bytes of a row
PREFIX = "llvm.x86."


def assign_registers(w: Writer) -> None:
    """Give every tile of a function a register. Raises CompileError where there are too few."""
    root: dict[int, int] = {}
    shapes: dict[int, Shape] = {}
    last: dict[int, int] = {}
    used: dict[int, int] = {}
    ends: dict[int, int] = {}
    around: list[list[int]] = []         # per instruction: the loops it is in, outermost first
    open_loops: list[int] = []
    for i, (op, dtype, lanes, src, arg) in enumerate(w.code):
        if op == "ENDLOOP":
            ends[src[0]] = i
        around.append(list(open_loops))
        if op == "LOOP":
            open_loops.append(i)
        elif op == "ENDLOOP":
            open_loops.pop()
        if op == "TILEZERO":
            root[i], shapes[i] = i, (arg[0], arg[1] * dtype.itemsize)
        elif op == "TILELOAD":
            root[i], shapes[i] = i, (arg[1], lanes // arg[1] * dtype.itemsize)
        elif op == "TILEDOT":
            root[i] = root[src[0]]
        elif op in ("CARRY", "RESULT") and (init := w.code[src[0]][3][2 + arg]) in root:
            root[i] = root[init]
        for s in src:
            if s in root:
                last[root[s]] = i
                if op in ("LOOP", "ENDLOOP") or (op == "TILEDOT" and s == src[0]):
                    used[s] = used.get(s, 0) + 1
    if any(n > 1 for n in used.values()):
        raise CompileError("LINEAR adds to one tile twice, and tiles change in place; lowering must not emit it")
    for i, (_, _, _, src, _) in enumerate(w.code):
        for s in src:
            if s in root:
                # needed again in the next iteration of a loop that it was made outside of
                outside = [loop for loop in around[i] if loop not in around[root[s]]]
                if outside:
                    last[root[s]] = max(last[root[s]], ends[outside[0]])
    busy: dict[int, int] = {}           # register → the last instruction that needs what it holds
    given: dict[int, int] = {}
    for i, shape in shapes.items():
        free = [r for r in range(TILES) if busy.get(r, -1) < i and w.tiles.get(r, shape) == shape]
        if not free:
            raise CompileError(f"a phase needs more than {TILES} tiles at once; fewer of them side by side (UPCAST) would do")
        register = next((r for r in free if r in w.tiles), free[0])
        w.tiles[register] = shape
        busy[register] = last.get(i, i)
        given[i] = register
    w.in_tiles.update(root)
    for i, r in root.items():
        w.value[i] = str(given[r])


def configuration(w: Writer) -> str:
    """The name of a constant with the shapes of a function's tiles, declared."""
    content = bytearray(64)
    content[0] = 1
    for register, (rows, nbytes) in w.tiles.items():
        content[16 + 2 * register] = nbytes
        content[48 + register] = rows
    name = f"@tiles.{content.hex()}"
    text = ", ".join(f"i8 {n}" for n in content)
    w.declared.add(f"{name} = private unnamed_addr constant [64 x i8] [{text}], align 64")
    return name


def _call(w: Writer, name: str, types: tuple[str, ...], *operands: str) -> None:
    w.declared.add(f"declare void @{PREFIX}{name}({', '.join(types)})")
    w.lines.append(f"  call void @{PREFIX}{name}({', '.join(f'{t} {o}' for t, o in zip(types, operands, strict=True))})")


def begin_tiles(w: Writer) -> str:
    """What a function starts with."""
    w.declared.add(f"declare void @{PREFIX}ldtilecfg(ptr)")
    return f"  call void @{PREFIX}ldtilecfg(ptr {configuration(w)})"


def end_tiles(w: Writer) -> None:
    """What a function ends with."""
    _call(w, "tilerelease", ())


def _zero(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    _call(w, "tilezero", ("i8",), w.value[i])


def _load(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, _, stride = arg
    _call(w, "tileloadd64", ("i8", "ptr", "i64"), w.value[i], address_of(w, src[0], src[1], offset), str(stride * dtype.itemsize))


def _store(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, _, stride = arg
    _call(w, "tilestored64", ("i8", "ptr", "i64"), w.value[src[2]], address_of(w, src[0], src[1], offset), str(stride * dtype.itemsize))


def _dot(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    kinds = tuple(w.code[s][1] for s in src[1:])
    found = next((d for d in DOTS.values() if d.is_tile and (d.accumulator, d.operands, d.group) == (dtype, kinds, arg[2])), None)
    if found is None or not found.runs_on(w.target):
        raise refuse("TILEDOT", dtype, f"{w.target.arch} with {', '.join(w.target.features)} has no such instruction")
    _call(w, found.llvm.removeprefix(PREFIX), ("i8", "i8", "i8"), *(w.value[s] for s in src))


HANDLERS: dict[str, Handler] = {"TILEZERO": _zero, "TILELOAD": _load, "TILESTORE": _store, "TILEDOT": _dot}
