"""The pass that replaces each CAT by selects in the kernel that reads it, or by one buffer that each part is stored into.

    CAT(x (3), y (2)) * z   →   WHERE(i < 3, PAD(x, after 2), PAD(y, before 3)) * z

    CONTIGUOUS(CAT(x, y))   →   AFTER(BUFFER b, ASSIGN(SHRINK(b, 0…3), x), ASSIGN(SHRINK(b, 3…5), y))

Selects cost each element a select per part and no memory; they are fused as any elementwise operation. A buffer needs a kernel per part,
which writes its slice of the buffer (svod.core.schedule.schedule), and costs each element one store, however many parts there are. So a CAT
is stored if it gets a buffer anyway (an output, the source of a CONTIGUOUS), or if a read would pass through more than MOST_SELECTS nested
selects; all others become selects. No parts are added up, so NaN, -0.0 and bools keep their bits.

The pass comes first in `normalize`, because later rules simplify its selects and paddings.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from svod.core.graph import graph
from svod.core.graph.devices import device_of
from svod.core.graph.graph import Pair
from svod.core.graph.shapes import shape_of
from svod.core.graph.storage import base_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.origin import inherit_origin
from svod.core.ir.uop import ELEMENTWISE, MOVEMENT, Ops, UOp
from svod.core.ir.variable import is_symbolic
from svod.core.machine.target import HOST

MOST_SELECTS = 8      # most parts that one kernel selects between

Box = tuple[Pair, ...]      # position of a part: (begin, end) along each axis


def expand_joins(sink: UOp) -> UOp:
    """Return `sink` with every CAT replaced."""
    order = sink.toposort()
    if not any(u.op is Ops.CAT for u in order):
        return sink
    stored, inside = _forms(order)
    done: dict[UOp, UOp] = {}
    buffers = 0
    for u in order:
        if u.op is Ops.CAT and u not in inside:
            parts = [(done[part], box) for part, box in boxes_of(u, inside)]
            if u in stored:
                unique = UOp(Ops.LUNIQUE, dtypes.void, (), f"joined{buffers}")
                buffers += 1
                device = UOp(Ops.DEVICE, dtypes.void, (), device_of(u) or HOST)
                done[u] = store_parts(parts, UOp(Ops.BUFFER, u.dtype, (unique, device), math.prod(shape_of(u))), u)
            else:
                done[u] = select_parts(parts, u)
        elif u.op is not Ops.CAT:
            src = tuple([done[s] for s in u.src])
            done[u] = u if src == u.src else u.replace(src=src)
        if done.get(u, u) is not u:
            inherit_origin(done[u], u)
    return done[sink]


def _forms(order: Sequence[UOp]) -> tuple[set[UOp], set[UOp]]:
    """Return (the CATs that are stored, the CATs that are merged into the CAT that is their only reader)."""
    readers: dict[UOp, list[UOp]] = {}
    buffered: set[UOp] = set()
    for u in order:
        for s in u.src:
            if s.op is Ops.CAT:
                readers.setdefault(s, []).append(u)
        if u.op is Ops.SINK or u.op is Ops.CONTIGUOUS:
            buffered.update(map(base_of, u.src))

    def extends(u: UOp) -> bool:
        return u not in buffered and len(readers[u]) == 1 and readers[u][0].op is Ops.CAT and readers[u][0].arg == u.arg
    stored: set[UOp] = set()
    selects: dict[UOp, int] = {}     # parts that a read of the node selects between
    for u in order:
        if u.op is Ops.CAT:
            selects[u] = sum(selects[s] for s in u.src)
            if is_symbolic(shape_of(u)):
                continue    # never stored: the offsets of its parts depend on variables
            if u in buffered or (selects[u] > MOST_SELECTS and not extends(u)):
                stored.add(u)
                selects[u] = 1
        elif u.op in ELEMENTWISE or u.op in MOVEMENT:
            selects[u] = max((selects[s] for s in u.src), default=1)
        else:
            selects[u] = 1
    inside: set[UOp] = set()
    goes_to: dict[UOp, UOp] = {}     # the outermost CAT that a merged CAT becomes a part of
    for u in reversed(order):
        if u.op is Ops.CAT and u not in buffered:
            reader = readers[u][0]
            if extends(u) or (len(readers[u]) == 1 and goes_to.get(reader, reader) in stored):
                inside.add(u)
                goes_to[u] = goes_to.get(reader, reader)
    return stored - inside, inside


def boxes_of(cat: UOp, inside: set[UOp]) -> list[tuple[UOp, Box]]:
    """List the parts of a CAT, and of the CATs inside it, with their positions."""
    parts: list[tuple[UOp, Box]] = []
    todo: list[tuple[UOp, Box]] = [(cat, tuple((0, n) for n in shape_of(cat)))]
    while todo:
        u, box = todo.pop()
        if u is not cat and u not in inside:
            parts.append((u, box))
            continue
        inner, at = [], box[u.arg][0]
        for s in u.src:
            end = at + shape_of(s)[u.arg]
            inner.append((s, (*box[:u.arg], (at, end), *box[u.arg + 1:])))
            at = end
        todo.extend(reversed(inner))
    return parts


def select_parts(parts: Sequence[tuple[UOp, Box]], cat: UOp) -> UOp:
    """Write the concatenation as nested selects between padded parts by the position along the axis of `cat`, the first part outermost."""
    shape, axis = shape_of(cat), cat.arg
    position = graph.iota(shape[axis], dtypes.int32)
    position = graph.expand(graph.reshape(position, [n if i == axis else 1 for i, n in enumerate(shape)]), shape)
    result: UOp | None = None
    for node, box in reversed(parts):
        padded = graph.pad(node, [(begin, n - end) for (begin, end), n in zip(box, shape, strict=True)])
        if result is None:
            result = padded
        else:
            inside = graph.alu(Ops.CMPLT, position, graph.full(shape, box[axis][1], dtypes.int32))
            result = graph.alu(Ops.WHERE, inside, padded, result)
    assert result is not None
    return result


def store_parts(parts: Sequence[tuple[UOp, Box]], buffer: UOp, cat: UOp) -> UOp:
    """Write the concatenation as the content of `buffer` after an ASSIGN of each part to its box."""
    whole = graph.reshape(buffer, shape_of(cat))
    assigns = []
    for node, box in parts:
        assigns.append(UOp(Ops.ASSIGN, node.dtype, (graph.shrink(whole, box), node)))
        inherit_origin(assigns[-1], cat)
    return graph.reshape(UOp(Ops.AFTER, buffer.dtype, (buffer, *assigns)), shape_of(cat))
