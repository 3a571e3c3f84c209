"""Turns strided accesses that cover a square into contiguous accesses and a transposition in registers: a pass over the LINEAR of a phase.

    a = LOADS x, i [0, s]        (lane l: x[i + l*s])           r0 = LOAD x, i [0];  r1 = LOAD x, i [s];  …
    b = LOADS x, i [1, s]        (lane l: x[i + 1 + l*s])  →    a, b, … = the transposition of r0, r1, …, by SHUFFLEs
    …                            as many as there are lanes

STORES are replaced in the same way, in reverse. If all accesses of a square have the same condition, its rows get that condition. If the
target has masked vector accesses (`ragged`), fewer than `lanes` accesses form a part of a square, whose rows are loaded and stored under a
mask: 14 columns of 16 channels become 16 masked stores of 14 elements. Loads with one mask per lane form a square in which each row is
loaded under the mask of its lane.
The pass runs on instructions and not on the loop tree, because it changes values and no loop: accesses of several nodes form a square, and
their addresses show that they differ by constants only. It runs late, on straight-line code, in which unrolled positions are next to each
other; it serves copies that pack a matrix, transpose kernels, and convolutions that store channels as lanes. Loads move up to the first of
their group, stores down to the last, so groups whose memory is also accessed in the other direction are left alone.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from svod.compile.lower.program import Instruction
from svod.core.ir.dtype import DType, dtypes

# minimum number of lanes of a square: on CPUs, and on devices with groups of threads, where a register holds one element
MIN_LANES, PAIR = 4, 2
MIN_SHARE = 3                   # a part of a square has more than `lanes` / MIN_SHARE rows; fewer rows are accessed lane by lane
_STRIDED = ("LOADS", "STORES")
_LOADS = ("LOAD", "LOADS", "GATHER")
_STORES = ("STORE", "STORES", "SCATTER")


def transpose_squares(code: list[Instruction], ragged: bool = False, least: int = MIN_LANES) -> list[Instruction]:
    """Replace squares of strided accesses in the code; returns the same list if there are none. `least`: minimum number of lanes of a
    square. `ragged`: replace parts of squares as well."""
    if not any(i.op in _STRIDED for i in code):
        return code
    loads, stores = _squares(code, ragged, least)
    if not loads and not stores:
        return code
    return _rebuild(code, loads, stores)


class _StridedGroup(NamedTuple):
    """The key of strided accesses that differ only in their constant offset."""

    block: int
    op: str
    pointer: int
    place: int
    dtype: str
    lanes: int
    stride: int
    mask: tuple[int, ...]       # gate and alternative of masked loads; condition of stores


def _squares(code: list[Instruction], ragged: bool, lanes: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of accesses that form a square, in the order of their offsets: (loads, stores)."""
    block = 0
    groups: dict[_StridedGroup, dict[int, int]] = {}
    loaded: set[tuple[int, int]] = set()     # (block, pointer) of loads; a block is straight-line code between loops
    stored: set[tuple[int, int]] = set()
    twice: set[_StridedGroup] = set()               # groups that store to one element twice, so that the order of their stores matters
    for at, (op, _, _, src, arg) in enumerate(code):
        if op in ("LOOP", "ENDLOOP"):
            block += 1
        elif op in _LOADS:
            loaded.add((block, src[0]))
        elif op in _STORES:
            stored.add((block, src[0]))
        group = _group_of(code, at, block, ragged, lanes) if op in _STRIDED else None
        if group is not None:
            members = groups.setdefault(group, {})
            if arg[0] in members and op == "STORES":
                twice.add(group)
            members.setdefault(arg[0], at)
    anywhere_stored = {p for _, p in stored}
    runs: dict[str, list[list[int]]] = {"LOADS": [], "STORES": []}
    for group, members in groups.items():
        here = group.block, group.pointer
        if group.op == "LOADS" and (group.pointer in anywhere_stored if code[group.pointer].op != "SCRATCH" else here in stored):
            continue
        if group.op == "STORES" and (here in loaded or group in twice):
            continue
        least = group.lanes // MIN_SHARE + 1 if ragged and not group.mask else group.lanes
        runs[group.op] += _runs(members, group.lanes, group.stride, least)
    return runs["LOADS"], runs["STORES"]


def _group_of(code: list[Instruction], at: int, block: int, ragged: bool, least: int) -> _StridedGroup | None:
    """Return the group of a strided access that may be part of a square; None for any other access. `ragged`: loads under masks may be
    part of a square."""
    op, dtype, lanes, src, arg = code[at]
    plain = 2 if op == "LOADS" else 3
    mask = src[plain:]
    if mask and not (code[mask[0]].lanes == 1 or (ragged and op == "LOADS" and code[mask[0]].lanes == lanes)):
        return None
    if mask and op == "LOADS" and code[mask[1]].op != "CONST":
        return None
    _, stride = arg
    if lanes < least or abs(stride) <= 1:
        return None
    return _StridedGroup(block, op, src[0], src[1], dtype.name, lanes, stride, mask)


def _runs(members: dict[int, int], lanes: int, stride: int, least: int) -> Iterable[list[int]]:
    """Yield runs of accesses at consecutive offsets: of `lanes` accesses each, or fewer at the end of a run, but at least `least`."""
    offsets = sorted(members)
    i = 0
    while i < len(offsets):
        n = 1
        while n < lanes and i + n < len(offsets) and offsets[i + n] == offsets[i] + n:
            n += 1
        if least <= n <= abs(stride):
            yield [members[o] for o in offsets[i:i + n]]
        i += n


def _zero(dtype: DType) -> float | int | bool:
    return 0.0 if dtype.is_float else False if dtype.kind == "b" else 0


def _rebuild(code: list[Instruction], loads: list[list[int]], stores: list[list[int]]) -> list[Instruction]:
    earliest = {min(group): group for group in loads}
    last = {max(group): group for group in stores}
    dropped = {p for group in (*loads, *stores) for p in group}
    out: list[Instruction] = []
    number: dict[int, int] = {}

    def emit(op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int:
        out.append(Instruction(op, dtype, lanes, src, arg))
        return len(out) - 1

    def transposed(rows: list[int], dtype: DType, lanes: int) -> list[int]:
        """Transpose a square in registers: `rows` are its first rows, the result is its columns. Elements of missing rows are undefined."""
        square: list[int | None] = [*rows, *[None] * (lanes - len(rows))]
        h = 1
        while h < lanes:
            low = tuple(j if not j & h else lanes + j - h for j in range(lanes))
            high = tuple(j + h if not j & h else lanes + j for j in range(lanes))
            alone = tuple(j + h if not j & h else -1 for j in range(lanes))
            for i in range(lanes):
                a, b = square[i], square[i + h] if not i & h else None
                if i & h or a is None:
                    continue
                if b is None:
                    square[i + h] = emit("SHUFFLE", dtype, lanes, (a,), alone)
                else:
                    square[i] = emit("SHUFFLE", dtype, lanes, (a, b), low)
                    square[i + h] = emit("SHUFFLE", dtype, lanes, (a, b), high)
            h *= 2
        return [v for v in square if v is not None]

    def first(n: int, lanes: int) -> tuple[int, ...]:
        """Return the mask of the first n lanes; () if these are all lanes."""
        return () if n == lanes else (emit("VCONST", dtypes.bool, lanes, (), tuple(j < n for j in range(lanes))),)

    for at, (op, dtype, lanes, src, arg) in enumerate(code):
        if at in earliest:
            group = earliest[at]
            offset, stride = code[group[0]].arg
            pointer, index = (number[s] for s in src[:2])
            given = code[group[0]].src[2:]
            if given:
                alt, gate = emit("CONST", dtype, lanes, (), code[given[1]].arg), number[given[0]]
                gates = [gate] * lanes if out[gate].lanes == 1 else [emit("EXTRACT", dtypes.bool, 1, (gate,), n) for n in range(lanes)]
                rows = [emit("LOAD", dtype, lanes, (pointer, index, gates[n], alt), offset + n * stride) for n in range(lanes)]
                for p, v in zip(group, transposed(rows, dtype, lanes), strict=True):
                    number[p] = v
                continue
            mask = first(len(group), lanes)
            extra = (*mask, emit("CONST", dtype, lanes, (), _zero(dtype))) if mask else ()
            rows = [emit("LOAD", dtype, lanes, (pointer, index, *extra), offset + n * stride) for n in range(lanes)]
            for p, v in zip(group, transposed(rows, dtype, lanes), strict=False):
                number[p] = v
        elif at in last:
            group = last[at]
            offset, stride = code[group[0]].arg
            pointer, index = (number[s] for s in src[:2])
            mask = tuple([number[s] for s in code[group[0]].src[3:]]) or first(len(group), lanes)
            for n, v in enumerate(transposed([number[code[p].src[2]] for p in group], dtype, lanes)):
                emit("STORE", dtype, lanes, (pointer, index, v, *mask), (offset + n * stride, False))
        if at not in dropped:
            number[at] = emit(op, dtype, lanes, tuple([number[s] for s in src]), arg)
    return out
