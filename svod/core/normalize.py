"""What a graph means, without the ways of saying it: the first pass of `create_schedule`.

    CONTIGUOUS(RESHAPE(x + y))            →   RESHAPE(x + y), and x + y is a root: it gets a buffer
    DETACH(x)                             →   x
    sum of a sum over other axes          →   one sum over all of them
    RESHAPE(RESHAPE(x))                   →   RESHAPE(x)

It stands first so that later passes meet neither markers nor chains that rewriting makes.
"""
from __future__ import annotations

from typing import NamedTuple

from svod.core.dtype import dtypes
from svod.core.graph import base_of, permute, reshape, shape_of, shrink
from svod.core.origin import inherit_origin
from svod.core.rewrite import Pattern, PatternMatcher, graph_rewrite
from svod.core.uop import MOVEMENT, Ops, UOp
from svod.errors import ScheduleError


class Normalized(NamedTuple):
    """`sink`: the rewritten SINK. `outputs`: for each of its sources what holds its value under RESHAPEs. `roots`: the nodes that
    must have a buffer, and why."""

    sink: UOp
    outputs: tuple[UOp, ...]
    roots: dict[UOp, str]


def _merge_reductions(outer: UOp, inner: UOp) -> UOp | None:
    if outer.arg[0] != inner.arg[0] or outer.arg[0] not in ("ADD", "MUL", "MAX", "MIN", "AND", "OR"):
        return None
    axes = tuple(sorted({*outer.arg[1], *inner.arg[1]}))
    return UOp(Ops.REDUCE_AXIS, outer.dtype, inner.src, (outer.arg[0], axes))


def _merge_reductions_reshaped(outer: UOp, inner: UOp, between: UOp) -> UOp | None:
    """As `_merge_reductions`, where the axes of extent 1 that the inner one left were dropped in between."""
    kept = [a for a, n in enumerate(shape_of(inner)) if n != 1]
    named = [a for a, n in enumerate(between.arg) if n != 1]
    if [shape_of(inner)[a] for a in kept] != [between.arg[a] for a in named]:
        return None
    place = dict(zip(named, kept, strict=True))
    axes = tuple(sorted(place[a] for a in outer.arg[1] if a in place))
    if not axes:
        return None
    merged = _merge_reductions(UOp(Ops.REDUCE_AXIS, outer.dtype, (inner,), (outer.arg[0], axes)), inner)
    return None if merged is None else reshape(merged, shape_of(outer))


def _reshape_again(outer: UOp, inner: UOp) -> UOp:
    return reshape(inner.src[0], outer.arg)


def _permute_again(outer: UOp, inner: UOp) -> UOp:
    return permute(inner.src[0], [inner.arg[a] for a in outer.arg])


def _shrink_again(outer: UOp, inner: UOp) -> UOp:
    return shrink(inner.src[0], [(b0 + b, b0 + e) for (b0, _), (b, e) in zip(inner.arg, outer.arg, strict=True)])


def _without_change(u: UOp) -> UOp | None:
    """A movement that moves nothing."""
    if shape_of(u) != shape_of(u.src[0]):
        return None
    moves_nothing = {Ops.RESHAPE: True, Ops.EXPAND: True, Ops.PERMUTE: u.op is Ops.PERMUTE and u.arg == tuple(range(len(u.arg))),
                     Ops.SHRINK: True, Ops.PAD: True, Ops.FLIP: not u.arg, Ops.WINDOW: not u.arg}
    return u.src[0] if moves_nothing[u.op] else None


def _under(op: Ops) -> Pattern:
    return Pattern(op, (Pattern(op, name="inner"),), name="outer")


RULES = PatternMatcher([
    (Pattern(Ops.DETACH, (Pattern(name="x"),)), lambda x: x),
    (Pattern(MOVEMENT, name="u"), _without_change),
    (_under(Ops.RESHAPE), _reshape_again),
    (_under(Ops.PERMUTE), _permute_again),
    (_under(Ops.SHRINK), _shrink_again),
])
_INNER = Pattern(Ops.REDUCE_AXIS, name="inner")
MERGE_REDUCTIONS = PatternMatcher([
    (Pattern(Ops.REDUCE_AXIS, (_INNER,), name="outer"), _merge_reductions),
    (Pattern(Ops.REDUCE_AXIS, (Pattern(Ops.RESHAPE, (_INNER,), name="between"),), name="outer"), _merge_reductions_reshaped),
])


def normalize(sink: UOp) -> Normalized:
    """See the module. Raises ScheduleError for an output that is no graph node."""
    roots: dict[UOp, str] = {}
    done: dict[UOp, UOp] = {}
    simplified = graph_rewrite(sink, RULES)
    readers: dict[UOp, int] = {}
    for u in simplified.toposort():
        for s in set(u.src):
            readers[s] = readers.get(s, 0) + 1
    for u in simplified.toposort():
        src = tuple([done[s] for s in u.src])
        node = u if src == u.src else u.replace(src=src)
        if u.op is Ops.REDUCE_AXIS and readers[u.src[0]] == 1 and (u.src[0].op is not Ops.RESHAPE or readers[u.src[0].src[0]] == 1):
            node = MERGE_REDUCTIONS.rewrite(node) or node
        if node.op is Ops.CONTIGUOUS:
            node = node.src[0]
            base = base_of(node)
            if base.op is not Ops.BUFFER and base.op is not Ops.ASSIGN and base.op is not Ops.CONST:
                roots.setdefault(base, "contiguous")
        elif node.op is Ops.CUSTOM_FUNCTION:
            node = _with_buffers(node, roots)
            roots.setdefault(node, "routine")
        elif node.op is Ops.COPY:
            roots.setdefault(node, "copy to a device")
        elif node.op is Ops.ASSIGN:
            _check_target(node)
            roots.setdefault(node, "assigned")
        if node is not u:
            inherit_origin(node, u)
        done[u] = node
    outputs = []
    for s in done[sink if sink in done else simplified].src:
        base = base_of(s)
        shape_of(base)
        if base.op is Ops.ASSIGN and base_of(base.src[0]).op not in (Ops.BUFFER, Ops.ASSIGN):
            # the content of a part of a buffer: a copy of that part
            base = UOp(Ops.COPY, base.dtype, (base, UOp(Ops.DEVICE, dtypes.void, (), "CPU")))
            roots.setdefault(base, "output that is a part of a buffer")
        elif base.op is not Ops.BUFFER and 0 not in shape_of(base):
            roots.setdefault(base, "output")
        outputs.append(base)
    live = tuple(o for o in outputs if 0 not in shape_of(o))
    return Normalized(UOp(Ops.SINK, dtypes.void, live), tuple(outputs), roots)


def _with_buffers(routine: UOp, roots: dict[UOp, str]) -> UOp:
    """The routine, whose operands are whole buffers, reshaped."""
    operands = []
    for s in routine.src:
        base = base_of(s)
        if base.op is Ops.ASSIGN and base_of(base.src[0]).op not in (Ops.BUFFER, Ops.ASSIGN):
            base = UOp(Ops.COPY, base.dtype, (base, UOp(Ops.DEVICE, dtypes.void, (), "CPU")))
            s = reshape(base, shape_of(s))
        if base.op is not Ops.BUFFER and base.op is not Ops.ASSIGN:
            roots.setdefault(base, "operand of a routine")
        operands.append(s)
    return routine if tuple(operands) == routine.src else routine.replace(src=tuple(operands))


def _check_target(assign: UOp) -> None:
    node = assign.src[0]
    while node.op is not Ops.BUFFER:
        if node.op not in (Ops.RESHAPE, Ops.PERMUTE, Ops.SHRINK, Ops.FLIP, Ops.ASSIGN):
            raise ScheduleError(f"ASSIGN to {node.op.value} of shape {shape_of(assign.src[0])}: the target must be a buffer, or a view "
                                "of one made of reshape, permute, shrink and flip; realize the tensor first")
        node = node.src[0]
