"""Brings equivalent graphs into one form: the first pass of `create_schedule`.

    CONTIGUOUS(RESHAPE(x + y))            →   RESHAPE(x + y), and x + y is a root: it gets a buffer
    CAT(x, y)                             →   selects, or stores into the parts of a buffer (svod.core.graph.join)
    DETACH(x)                             →   x
    sum of a sum over other axes          →   one sum over all of them
    sum over axes of extent 1             →   its operand
    RESHAPE(RESHAPE(x))                   →   RESHAPE(x)
    PAD(CAST(x))                          →   CAST(PAD(x)), for a 16-bit x: values that are copied or multiplied have 16 bits
    AFTER(b, STORE(b, x))                 →   AFTER(b, ASSIGN(b, x))
    SORT(x) beside ARGSORT(x)             →   GATHER(x, ARGSORT(x))

It runs first, so that later passes see neither markers nor removable chains of movements.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from svod.core.graph.callback import is_callback
from svod.core.graph.devices import is_transfer
from svod.core.graph.graph import alu, cast, expand, full, gather, iota, is_memory, part_of_memory, permute, reshape, shrink
from svod.core.graph.join import expand_joins
from svod.core.graph.shapes import shape_of
from svod.core.graph.stacks import take_stacks_apart
from svod.core.graph.storage import base_of, is_kernel_store
from svod.core.graph.widening import WIDEN_LAST, few_reads_widened_first
from svod.core.ir.dtype import dtypes
from svod.core.ir.origin import inherit_origin
from svod.core.ir.rewrite import Pattern, PatternMatcher, graph_rewrite
from svod.core.ir.uop import MOVEMENT, Ops, UOp
from svod.core.schedule.calls import arguments_of
from svod.core.schedule.rangeify import reduce_extents
from svod.errors import ScheduleError

_MEMORY = (Ops.BUFFER, Ops.AFTER)


class Normalized(NamedTuple):
    """A normalized graph. `sink`: the rewritten SINK. `outputs`: per source, the node below RESHAPEs that holds its value. `roots`: nodes
    that need a buffer, with the reason."""

    sink: UOp
    outputs: tuple[UOp, ...]
    roots: dict[UOp, str]


def _merge_reductions(outer: UOp, inner: UOp) -> UOp | None:
    if outer.arg[0] != inner.arg[0] or outer.arg[0] not in ("ADD", "MUL", "MAX", "MIN", "AND", "OR"):
        return None
    axes = tuple(sorted({*outer.arg[1], *inner.arg[1]}))
    return UOp(Ops.REDUCE_AXIS, outer.dtype, inner.src, (outer.arg[0], axes))


def _merge_reductions_reshaped(outer: UOp, inner: UOp, between: UOp) -> UOp | None:
    """`_merge_reductions` across a RESHAPE that drops the axes of extent 1 that the inner reduction has left."""
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


def _shrink_again(outer: UOp, inner: UOp) -> UOp:
    return shrink(inner.src[0], [(b0 + b, b0 + e) for (b0, _), (b, e) in zip(inner.arg, outer.arg, strict=True)])


def _without_change(u: UOp) -> UOp | None:
    """Remove a movement that moves nothing; None for other movements."""
    if shape_of(u) != shape_of(u.src[0]):
        return None
    moves_nothing = {Ops.RESHAPE: True, Ops.EXPAND: True, Ops.PERMUTE: u.op is Ops.PERMUTE and u.arg == tuple(range(len(u.arg))),
                     Ops.SHRINK: True, Ops.PAD: True, Ops.FLIP: not u.arg, Ops.WINDOW: not u.arg}
    return u.src[0] if moves_nothing[u.op] else None


def _reduced_alone(u: UOp) -> UOp | None:
    """The operand of a REDUCE_AXIS, or of its GEP, that reduces one element; None for others, and where the operand is memory or constant,
    as an output needs a kernel that stores it."""
    made = u.src[0].src[u.arg] if u.op is Ops.GEP else u.src[0]
    is_computed = base_of(made).op not in (*_MEMORY, Ops.CONST)
    return made if is_computed and not reduce_extents(u) and made.dtype == u.dtype else None


def _stores_as_assigns(u: UOp) -> UOp | None:
    """Rewrite an AFTER: a STORE to its buffer becomes an ASSIGN, STOREs of kernels are dropped. None if it has no STORE."""
    if all(s.op is not Ops.STORE for s in u.src):
        return None
    shape_of(u)     # checks the STOREs before they are gone
    done = [UOp(Ops.ASSIGN, s.src[0].dtype, s.src) if s.op is Ops.STORE else s for s in u.src[1:] if not is_kernel_store(s)]
    return u.replace(src=(u.src[0], *done)) if done else u.src[0]


def _under(op: Ops) -> Pattern:
    return Pattern(op, (Pattern(op, name="inner"),), name="outer")


NORMALIZATIONS = PatternMatcher([
    (Pattern(Ops.DETACH, (Pattern(name="x"),)), lambda x: x),
    (Pattern(MOVEMENT, name="u"), _without_change),
    (Pattern(Ops.GEP, (Pattern(Ops.REDUCE_AXIS),), name="u"), _reduced_alone),
    (Pattern(Ops.REDUCE_AXIS, name="u"), lambda u: _reduced_alone(u) if len(u.src) == 1 else None),
    WIDEN_LAST,
    (_under(Ops.RESHAPE), lambda outer, inner: reshape(inner.src[0], outer.arg)),
    (_under(Ops.PERMUTE), lambda outer, inner: permute(inner.src[0], [inner.arg[a] for a in outer.arg])),
    (_under(Ops.SHRINK), _shrink_again),
])
STORES = PatternMatcher([(Pattern(Ops.AFTER, name="u"), _stores_as_assigns)])
_INNER_SUM = Pattern(Ops.REDUCE_AXIS, name="inner")
MERGE_REDUCTIONS = PatternMatcher([
    (Pattern(Ops.REDUCE_AXIS, (_INNER_SUM,), name="outer"), _merge_reductions),
    (Pattern(Ops.REDUCE_AXIS, (Pattern(Ops.RESHAPE, (_INNER_SUM,), name="between"),), name="outer"), _merge_reductions_reshaped),
])


def _roots_at(node: UOp, roots: Mapping[UOp, str]) -> Iterator[tuple[UOp, str]]:
    """The nodes that must have a buffer because of `node`, each with the reason. `roots`: those that have one already."""
    if node.op is Ops.CUSTOM_FUNCTION:
        kind = "host callback" if is_callback(node) else "library kernel"
        for s in node.src:
            if base_of(s).op not in _MEMORY and (is_callback(node) or part_of_memory(s, lambda u: is_memory(u) or u in roots) is None):
                yield base_of(s), f"operand of a {kind}"
        yield node, kind
    elif node.op is Ops.COPY:
        if is_transfer(node) and base_of(node.src[0]).op not in _MEMORY and part_of_memory(node.src[0]) is None:
            yield base_of(node.src[0]), "copied to another device"
        yield node, "copy"
    elif node.op is Ops.CALL:
        for s in arguments_of(node):
            if s.op not in _MEMORY:
                yield s, "argument of a call"
        yield node, "called"


def _roots_of_after(after: UOp) -> dict[UOp, str]:
    """An AFTER and the ASSIGNs and calls that it names, each with the reason why it must have a buffer."""
    parts = sum(s.op is Ops.ASSIGN for s in after.src)
    why = f"put together from {parts} parts" if parts > 1 else "assigned"
    roots = {after: why if parts else "called"}
    roots.update({s: why if s.op is Ops.ASSIGN else "called" for s in after.src[1:] if s.op is not Ops.AFTER})
    return roots


def _outputs(sink: UOp, roots: dict[UOp, str]) -> list[UOp]:
    """Per source of the SINK, the node below RESHAPEs that holds its value. Values without a buffer are added to `roots`."""
    outputs = []
    for s in sink.src:
        base = base_of(s)
        if base.op not in (Ops.BUFFER, Ops.AFTER) and 0 not in shape_of(base):
            roots.setdefault(base, "output")
        outputs.append(base)
    return outputs


def _values_at_positions(sink: UOp) -> UOp:
    """Read sorted values at their positions where a graph has these as well: one sort for both, and equal elements in one order."""
    orders = {(u.arg[1], u.src): u for u in sink.toposort() if u.op is Ops.CUSTOM_FUNCTION and u.arg[0] == "ARGSORT"}
    if not orders:
        return sink

    def at_positions(u: UOp) -> UOp | None:
        order = orders.get((u.arg[1], u.src)) if u.arg[0] == "SORT" else None
        if order is None:
            return None
        rows, n = shape_of(u)
        dtype = dtypes.int32 if rows * n < 2 ** 31 else dtypes.int64
        begins = expand(reshape(alu(Ops.MUL, iota(rows, dtype), full((rows,), n, dtype)), (rows, 1)), (rows, n))
        return gather(reshape(u.src[0], (rows * n,)), alu(Ops.ADD, begins, cast(order, dtype)), 0)
    return graph_rewrite(sink, PatternMatcher([(Pattern(Ops.CUSTOM_FUNCTION, name="u"), at_positions)]))


def normalize(sink: UOp) -> Normalized:
    """Normalize a graph; see the module's docstring. Raises ScheduleError for an output that is not a graph node."""
    roots: dict[UOp, str] = {}
    done: dict[UOp, UOp] = {}
    if any(u.op is Ops.STORE for u in sink.toposort()):
        sink = graph_rewrite(sink, STORES)
    expanded = expand_joins(take_stacks_apart(_values_at_positions(sink)))
    simplified = few_reads_widened_first(graph_rewrite(expanded, NORMALIZATIONS))
    readers = Counter(s for u in simplified.toposort() for s in set(u.src))
    for u in simplified.toposort():
        src = tuple([done[s] for s in u.src])
        node = u if src == u.src else u.replace(src=src)
        if any(s.op is Ops.ASSIGN for s in src) and u.op is not Ops.AFTER:
            raise ScheduleError(f"{u.op.value} of an ASSIGN, which has no value of its own: read the AFTER of it, what it leaves")
        if u.op is Ops.REDUCE_AXIS and readers[u.src[0]] == 1 and (u.src[0].op is not Ops.RESHAPE or readers[u.src[0].src[0]] == 1):
            node = MERGE_REDUCTIONS.rewrite(node) or node
        if node.op is Ops.CONTIGUOUS:
            node = node.src[0]
            if base_of(node).op not in (*_MEMORY, Ops.CONST):
                roots.setdefault(base_of(node), "contiguous")
        elif node.op is Ops.AFTER:
            roots.update(_roots_of_after(node))
        else:
            for root, why in [*_roots_at(node, roots)]:
                roots.setdefault(root, why)
        if node is not u:
            inherit_origin(node, u)
        done[u] = node
    outputs = _outputs(done[sink if sink in done else simplified], roots)
    live = tuple(o for o in outputs if 0 not in shape_of(o))
    return Normalized(UOp(Ops.SINK, dtypes.void, live), tuple(outputs), roots)
