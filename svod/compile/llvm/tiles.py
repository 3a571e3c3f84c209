"""Tile instructions of LINEAR as LLVM text: x86's AMX, whose eight registers hold up to 16 rows of 64 bytes each.

    TILEZERO, TILELOAD, TILEDOT, TILESTORE    →    llvm.x86.tilezero, tileloadd64, tdpbssd …, tilestored64 on numbered registers

Tile registers are allocated here and not by LLVM: a TILEDOT modifies the register of its accumulator in place, and a loop carries a tile in
its register without a phi. A function that uses tiles configures their shapes once, at its start (ldtilecfg), and releases them before it
returns (tilerelease).
"""
from __future__ import annotations

from typing import Any

from svod.compile.llvm.memory import Handler, address_of
from svod.compile.llvm.text import LlvmWriter, refuse
from svod.core.ir.dtype import DType
from svod.core.machine.isa import DOTS, TILE_REGISTERS
from svod.errors import CompileError

Shape = tuple[int, int]         # rows, bytes of a row
X86_PREFIX = "llvm.x86."


class _Lifetimes:
    """The tiles of a function and their lifetimes. A tile is identified by the number of the TILEZERO or TILELOAD that makes it."""

    def __init__(self, w: LlvmWriter) -> None:
        self.tile_of: dict[int, int] = {}       # value → its tile
        self.shapes: dict[int, Shape] = {}      # tile → its shape
        self.last: dict[int, int] = {}          # tile → the last instruction that needs it
        self.changes: dict[int, int] = {}       # value → number of instructions that add to it
        self.around: list[list[int]] = []       # per instruction: the loops it is in, outermost first
        self.ends: dict[int, int] = {}          # LOOP → its ENDLOOP
        open_loops: list[int] = []
        for i, (op, dtype, lanes, src, arg) in enumerate(w.code):
            self.around.append(list(open_loops))
            if op == "LOOP":
                open_loops.append(i)
            elif op == "ENDLOOP":
                self.ends[src[0]] = i
                open_loops.pop()
            elif op == "TILEZERO":
                self.tile_of[i], self.shapes[i] = i, (arg[0], arg[1] * dtype.itemsize)
            elif op == "TILELOAD":
                self.tile_of[i], self.shapes[i] = i, (arg[1], lanes // arg[1] * dtype.itemsize)
            elif op == "TILEDOT":
                self.tile_of[i] = self.tile_of[src[0]]
            elif op in ("CARRY", "RESULT") and (init := w.code[src[0]].src[2 + arg]) in self.tile_of:
                self.tile_of[i] = self.tile_of[init]
            self._use(i, op, src)
        self._extend_over_loops(w)

    def _use(self, i: int, op: str, src: tuple[int, ...]) -> None:
        for s in src:
            if s in self.tile_of:
                self.last[self.tile_of[s]] = i
                if op in ("LOOP", "ENDLOOP") or (op == "TILEDOT" and s == src[0]):
                    self.changes[s] = self.changes.get(s, 0) + 1

    def _extend_over_loops(self, w: LlvmWriter) -> None:
        """Extend lifetimes over loops: a tile that is made outside of a loop and used inside is needed until the loop ends."""
        for i, (_, _, _, src, _) in enumerate(w.code):
            for s in src:
                if s in self.tile_of:
                    tile = self.tile_of[s]
                    outside = [loop for loop in self.around[i] if loop not in self.around[tile]]
                    if outside:
                        self.last[tile] = max(self.last[tile], self.ends[outside[0]])


def assign_registers(w: LlvmWriter) -> None:
    """Give every tile of a function a register. Raises CompileError if there are too few."""
    tiles = _Lifetimes(w)
    if any(n > 1 for n in tiles.changes.values()):
        raise CompileError("LINEAR adds to one tile twice, and tiles change in place; lowering must not emit it")
    busy: dict[int, int] = {}           # register → the last instruction that needs its content
    given: dict[int, int] = {}
    for i, shape in tiles.shapes.items():
        free = [r for r in range(TILE_REGISTERS) if busy.get(r, -1) < i and w.tiles.get(r, shape) == shape]
        if not free:
            raise CompileError(f"a phase needs more than {TILE_REGISTERS} tiles at once; fewer of them side by side (UPCAST) would do")
        register = next((r for r in free if r in w.tiles), free[0])
        w.tiles[register] = shape
        busy[register] = tiles.last.get(i, i)
        given[i] = register
    w.in_tiles.update(tiles.tile_of)
    for i, r in tiles.tile_of.items():
        w.value[i] = str(given[r])


def configuration(w: LlvmWriter) -> str:
    """Declare a constant with the shapes of a function's tiles, and return its name."""
    content = bytearray(64)
    content[0] = 1
    for register, (rows, nbytes) in w.tiles.items():
        content[16 + 2 * register] = nbytes
        content[48 + register] = rows
    name = f"@tiles.{content.hex()}"
    text = ", ".join(f"i8 {n}" for n in content)
    w.declared.add(f"{name} = private unnamed_addr constant [64 x i8] [{text}], align 64")
    return name


def begin_tiles(w: LlvmWriter) -> str:
    """Return the statement that configures the tile registers, for the start of a function."""
    w.declared.add(f"declare void @{X86_PREFIX}ldtilecfg(ptr)")
    return f"  call void @{X86_PREFIX}ldtilecfg(ptr {configuration(w)})"


def end_tiles(w: LlvmWriter) -> None:
    """Write the statement that releases the tile registers, at the end of a function."""
    w.call("void", f"{X86_PREFIX}tilerelease")


def _zero(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.call("void", f"{X86_PREFIX}tilezero", ("i8", w.value[i]))


def _memory(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, _, stride = arg
    name, tile = ("tileloadd64", i) if w.code[i].op == "TILELOAD" else ("tilestored64", src[2])
    address, step = address_of(w, src[0], src[1], offset), str(stride * dtype.itemsize)
    w.call("void", X86_PREFIX + name, ("i8", w.value[tile]), ("ptr", address), ("i64", step))


def _dot(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    kinds = tuple(w.code[s].dtype for s in src[1:])
    dot = next((d for d in DOTS.values() if d.is_tile and (d.accumulator, d.operands, d.group) == (dtype, kinds, arg[2])), None)
    if dot is None or not dot.runs_on(w.target):
        raise refuse("TILEDOT", dtype, f"{w.target.arch} with {', '.join(w.target.features)} has no such instruction")
    w.call("void", dot.llvm, *(("i8", w.value[s]) for s in src))


HANDLERS: dict[str, Handler] = {"TILEZERO": _zero, "TILELOAD": _memory, "TILESTORE": _memory, "TILEDOT": _dot}
