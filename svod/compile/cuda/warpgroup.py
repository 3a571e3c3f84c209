"""LLVM text for tiles distributed over the four warps of a warpgroup: wgmma, with operands in shared memory.

    MMASHARED …; MMASHARED …; …       one asm statement: wgmma.fence, a wgmma.mma_async for each, commit_group, wait_group 0
    BARRIER in such a phase           preceded by fence.proxy.async, so that wgmma reads the values that threads have stored

Consecutive products are in flight together if nothing between two of them uses a result, stores or waits. They are inline assembly, because
LLVM has no intrinsic for wgmma.mma_async; for LLVM, one asm statement changes the registers of all its products.

An operand is described by a 64-bit descriptor ("Matrix Descriptor Format" and "Strides" in NVIDIA's PTX ISA): its address in shared memory
and two distances, leading and stride, each without its lowest four bits, and the swizzle in bytes (none, 32, 64 or 128). An operand lies in
memory as rows of that many bytes (without swizzle: rows of one line, 16 bytes), along the summed axis or along the other one:

    rows along the summed axis   leading: ignored                               stride: to the next eight rows
      rows of one line           leading: to the next line of a row             stride: to the next eight rows
    rows along the other axis    leading: to the next row of a column           stride: to the next eight summed positions
      rows of one line           leading: to the next eight summed positions    stride: to the next line of a column
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from svod.compile.cuda.matrix import Matrices
from svod.compile.llvm.memory import Handler, address_of
from svod.compile.llvm.text import SCALAR, LlvmWriter, register_type
from svod.compile.lower.linear import NO_VALUE, SUBGROUP_OPS
from svod.compile.lower.program import Instruction
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.isa import DOTS, MATRIX_LINE_BYTES, Dot

SWIZZLES = {1: 0, 8: 1, 4: 2, 2: 3}     # number of 16-byte lines in a row → the swizzle, the highest two bits of a descriptor
WINDOW = (1 << 18) - 1  # mask of the bits of a shared-memory address that a descriptor can represent
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned"
FENCE = "fence.proxy.async.shared::cta;"
_OPERAND_TYPES = {dtypes.bfloat16: "bf16", dtypes.float16: "f16", dtypes.int8: "s8", dtypes.float32: "f32", dtypes.int32: "s32"}
_ENDS = frozenset({"LOOP", "CARRY", "RESULT", *NO_VALUE, *SUBGROUP_OPS})


def products_together(code: Sequence[Instruction]) -> dict[int, tuple[int, ...]]:
    """Group the MMASHARED that can be in flight together, by the last one of each group. Each of their results is used only by the next
    product into the same tile, or after the whole group."""
    users: dict[int, list[int]] = {i: [] for i, x in enumerate(code) if x.op == "MMASHARED"}
    for i, x in enumerate(code):
        for s in x.src:
            if s in users:
                users[s].append(i)
    found: dict[int, tuple[int, ...]] = {}
    open_: list[int] = []

    def close() -> None:
        if open_:
            found[open_[-1]] = tuple(open_)
            open_.clear()
    for i, x in enumerate(code):
        if x.op != "MMASHARED":
            if x.op in _ENDS or any(s in open_ for s in x.src):
                close()
            continue
        if x.src[0] in open_ and users[x.src[0]] != [i]:
            close()
        open_.append(i)
    close()
    return found


def left_under_way(code: Sequence[Instruction], together: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the last products of the groups of `products_together` that need no wait after them, because only MMAWAIT uses their
    results."""
    users: dict[int, list[str]] = {}
    for x in code:
        for s in x.src:
            users.setdefault(s, []).append(x.op)
    return {last for last, members in together.items()
            if all(users.get(m) == ["MMAWAIT"] for m in members if not any(code[n].src[0] == m for n in members))}


class Warpgroups(Matrices):
    """The rendering of a phase with wgmma: the groups of products in flight together, by the last one of each, and the groups that stay in
    flight without a wait."""

    def __init__(self, code: Sequence[Instruction]):
        super().__init__(code)
        self.products = products_together(code)
        self.left = left_under_way(code, self.products)


def _distances(apart: int, lines: int, along_sum: bool) -> tuple[int, int]:
    """Return (leading, stride) of an operand's descriptor, in bytes. `apart`: bytes from one row to the next along the dim that is
    divided into rows; `lines`: 16-byte lines of a row."""
    eight = 8 * lines * MATRIX_LINE_BYTES
    if along_sum:
        return apart if lines == 1 else MATRIX_LINE_BYTES, eight
    return (eight, apart) if lines == 1 else (apart, eight)


def _descriptor(w: LlvmWriter, pointer: int, index: int, side: tuple[int, int, int, int], along_sum: bool) -> str:
    """Compute the descriptor of an operand, as i64. `along_sum`: whether the dim that is divided into rows is the one that is summed."""
    offset, _, apart, lines = side
    nbytes = w.code[pointer].dtype.itemsize
    leading, stride = _distances(apart * nbytes, lines, along_sum)
    bits = leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLES[lines] << 62
    start = w.temp(f"addrspacecast ptr {address_of(w, pointer, index, 0)} to ptr addrspace(3)")
    low = w.temp(f"and i64 {w.temp(f'ptrtoint ptr addrspace(3) {start} to i64')}, {WINDOW}")
    base = w.temp(f"add i64 {w.temp(f'lshr i64 {low}, 4')}, {bits - (bits >> 63 << 64)}")
    return w.temp(f"add i64 {base}, {offset * nbytes >> 4}")


def _instruction(dot: Dot, registers: str, a: str, b: str, across: tuple[bool, bool]) -> str:
    kind = _OPERAND_TYPES[dot.operands[0]]
    shape = f"m{dot.rows}n{dot.columns}k{dot.depth}.{_OPERAND_TYPES[dot.accumulator]}.{kind}.{kind}"
    signs = f", 1, 1, {int(across[0])}, {int(across[1])}" if dot.accumulator.is_float else ""
    return f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, {a}, {b}, p{signs};"


def _product(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    """Write all products of a group of `products_together` if instruction i is the last one of them; otherwise write nothing."""
    assert isinstance(w.family, Warpgroups)
    members = w.family.products.get(i, ())
    if not members:
        return
    tiles: dict[int, int] = {}      # product → the number of the tile that it updates
    first: list[int] = []           # the initial value of each tile
    for m in members:
        before = w.code[m].src[0]
        if before not in tiles:
            first.append(before)
        tiles[m] = tiles[before] if before in tiles else len(first) - 1
    count, scalar = lanes * len(first), SCALAR[dtype.name]
    vec = register_type(dtype.name, lanes)
    statements, descriptors = [".reg .pred p; setp.eq.u32 p, 0, 0; wgmma.fence.sync.aligned;"], list[str]()
    for m in members:
        name, *sides = w.code[m].arg
        _, *places = w.code[m].src
        across = (sides[0][1] == 0, sides[1][1] == 1)
        descriptors += [_descriptor(w, places[2 * k], places[2 * k + 1], sides[k], not across[k]) for k in range(2)]
        registers = ", ".join(f"${tiles[m] * lanes + k}" for k in range(lanes))
        a, b = (f"${count + len(descriptors) - k}" for k in (2, 1))
        statements.append(_instruction(DOTS[name], registers, a, b, across))
    statements.append(COMMIT + ("" if i in w.family.left else f" {WAIT} 0;"))
    held = [f"{scalar} {w.temp(f'extractelement {vec} {w.value[v]}, i64 {k}')}" for v in first for k in range(lanes)]
    constraints = [f"={'f' if dtype.is_float else 'r'}"] * count + ["l"] * len(descriptors) + [str(k) for k in range(count)]
    result = "{" + ", ".join([scalar] * count) + "}"
    operands = ", ".join([*(f"i64 {d}" for d in descriptors), *held])
    done = w.temp(f'call {result} asm sideeffect "{{ {" ".join(statements)} }}", "{",".join(constraints)}"({operands})')
    for m in members:
        if not any(w.code[other].src[0] == m for other in members):
            own = range(tiles[m] * lanes, (tiles[m] + 1) * lanes)
            w.value[m] = w.vector(scalar, lanes, (w.temp(f"extractvalue {result} {done}, {register}") for register in own))


def _wait(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    """Wait until at most `arg` groups of products are in flight. If `arg` is 0, the registers of the tile are operands of the wait;
    otherwise they stay in place, because products may still change them."""
    held = w.value[src[0]]
    if arg:
        w.value[i] = held
        if w.code[i - 1].op != "MMAWAIT":
            w.lines.append(f'  call void asm sideeffect "{WAIT} {arg};", "~{{memory}}"()')
        return
    scalar, vec = SCALAR[dtype.name], register_type(dtype.name, lanes)
    result = "{" + ", ".join([scalar] * lanes) + "}"
    registers = [f"{scalar} {w.temp(f'extractelement {vec} {held}, i64 {k}')}" for k in range(lanes)]
    constraints = [f"={'f' if dtype.is_float else 'r'}"] * lanes + [str(k) for k in range(lanes)]
    done = w.temp(f'call {result} asm sideeffect "{WAIT} 0;", "{",".join(constraints)}"({", ".join(registers)})')
    w.value[i] = w.vector(scalar, lanes, (w.temp(f"extractvalue {result} {done}, {k}") for k in range(lanes)))


HANDLERS: dict[str, Handler] = {"MMASHARED": _product, "MMAWAIT": _wait}
