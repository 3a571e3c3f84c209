"""The kernel cut: which nodes of a graph get a buffer, and why.

A kernel computes buffers from buffers. The cut starts with one kernel per forced node (outputs, CONTIGUOUS, COPY, ASSIGN) and fuses
everything below it greedily, by fixed rules that know no target:

* an elementwise value is computed in the kernel that reads it. A value that several kernels read is recomputed in each if it is cheap
  (`CHEAP_COST` operations besides conversions of floats, `CHEAP_BUFFERS` buffers, no reduction), and gets a buffer otherwise;
* a value that one kernel would compute at more than `MAX_READS` places gets a buffer, so that views of views do not multiply the work;
  so does one that is read at shifted positions, as in a stencil, if computing it anew costs more than `MOST_RECOMPUTED` operations;
* a reduction stays in the kernel of its only reader where nothing repeats it: read once per element of the output (epilogue), or again
  along its own row (softmax, layer norm: at most `ROW_LIMIT` elements);
* a value that a GATHER reads more often than it has elements gets a buffer if computing it anew costs more than `MOST_RECOMPUTED`
  operations per element: one axis of an image is resized, then the other;
* a contraction (sum of products with reuse) stays only as an epilogue, one per kernel; two are fused only with a row reduction between
  them: attention;
* an expression deeper than `MAX_DEPTH` operations is cut at a value that is not broadcast, because passes over a kernel are recursive and
  its registers and compile time are limited;
* a reduction that a broadcast, WINDOW, PAD or GATHER would repeat is cut at that node. So elementwise work after a GEMM stays with the
  GEMM, and a layer norm and the GEMM that reads it are two kernels.

A plan may decide otherwise where both ways are right (`Deviations`): which way is faster depends on the kernels on both sides of a buffer.

The cut visits nodes from the outputs to the leaves and tracks, for each node, *which* ranges its coordinates depend on, not how. A node
that breaks a rule names the node that needs a buffer. That may be a node visited before; the visit then restarts from it.
"""
from __future__ import annotations

import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from svod.core.graph.shapes import axis_groups, shape_of, size_of
from svod.core.ir.uop import ELEMENTWISE, MOVEMENT, TRANSCENDENTAL, Ops, UOp, encode, remembered, widens
from svod.core.ir.variable import count_of, index_of, upper
from svod.core.schedule.rangeify import is_tuple_reduce, reads_memory, reduce_extents, repeats

ROW_LIMIT = 1 << 16       # largest row, in elements, that a kernel may read twice
CHEAP_COST = 4            # largest number of operations of a value that is recomputed in each kernel
CHEAP_BUFFERS = 3         # largest number of buffers that such a value reads
MAX_WALKS = 3             # most visits of the whole graph; repeated ones find shared values that have become cheap
MAX_DEPTH = 128           # longest chain of operations in one kernel, between reductions
MAX_READS = 8             # largest number of places at which one kernel computes an elementwise value
# largest number of operations per element of a value that is computed anew, at other positions or at each read of a GATHER; a buffer costs
# a store, loads and a launch
MOST_RECOMPUTED = 32
COSTLIEST = 6 * MAX_DEPTH  # operations of a value beyond which costs are not compared
MAX_POSITIONS = 64        # MAX_READS for a value that reads no memory, such as a mask or a table of angles

SECOND_CONTRACTION = "a second contraction in one kernel"

_SLOW = frozenset({Ops.FDIV, Ops.IDIV, Ops.MOD, Ops.SQRT, Ops.RECIPROCAL})
_CAN_END = ELEMENTWISE | {Ops.GATHER, Ops.PERMUTE, Ops.FLIP, Ops.SHRINK, Ops.PAD}      # operations that may end a deep expression
Ids = frozenset[int]
NO_IDS: Ids = frozenset()


class Tag(NamedTuple):
    """How a coordinate is computed from the ranges that it depends on, so that different reads can be told apart. `offset` is added to a
    range, or to the expression of which `made` is a digest; a digest does not grow with the number of movements. `gathered`: a GATHER
    looks the coordinate up."""

    offset: int = 0
    made: bytes = b""
    gathered: bool = False

    def shifted(self, steps: int) -> Tag:
        """The coordinate with an int or Dim added."""
        return self._replace(offset=self.offset + steps) if steps != 0 else self


PLAIN = Tag()
Coordinate = tuple[Ids, Tag]
Place = tuple[Coordinate, ...]
"""Per axis: the ranges its coordinate depends on, and how it is made of them."""


def made_of(coordinates: Sequence[Coordinate], *movement: Any) -> Coordinate:
    """The coordinate that a movement, described by its numbers, computes from other coordinates."""
    parts = tuple([(tuple(sorted(ids)), index_of(tag.offset), tag.made) for ids, tag in coordinates])
    digest = hashlib.blake2b(encode((parts, movement)), digest_size=16).digest()
    return ids_of(coordinates), Tag(made=digest, gathered=any(tag.gathered for _, tag in coordinates))


class Use(NamedTuple):
    """One way in which a kernel reads a node. `active`: all ranges around the read. `rows`: the ranges among them that belong to
    reductions. `entries`: range dropped by a broadcast → the node below the first such broadcast. `barrier`: the node below the nearest
    WINDOW, PAD or GATHER. `reduced`: the operand of the nearest reduction on the way from the output."""

    kernel: UOp
    place: Place
    active: Ids
    rows: Ids
    entries: tuple[tuple[int, UOp], ...]
    barrier: UOp | None
    reduced: UOp | None


def operations(u: UOp) -> int:
    """How many operations a node adds to the longest chain of an expression: its own operation, or the operations of its index
    arithmetic. A RESHAPE of memory adds no more than one."""
    if u.op is Ops.GATHER:
        return 8        # a position counted from the end, two bounds checks, two loads
    if u.op is not Ops.RESHAPE or u.src[0].op is Ops.BUFFER:
        return 1
    shape, source = ([n for n in shape_of(t) if n != 1] for t in (u, u.src[0]))
    return 1 if shape == source else 4


def ids_of(place: Iterable[Coordinate]) -> Ids:
    """All ranges on which the coordinates of a place depend."""
    return NO_IDS.union(*(ids for ids, _ in place))


def most_places(uses: Sequence[Use]) -> int:
    """The largest number of different places at which any one kernel reads a node."""
    if len(uses) <= MAX_READS:
        return len(uses)
    places: dict[UOp, set[Place]] = defaultdict(set)
    for use in uses:
        places[use.kernel].add(use.place)
    return max(map(len, places.values()))


def most_shifts(uses: Sequence[Use]) -> int:
    """The largest number of places, in any one kernel, whose coordinates differ only in how they are made of the same ranges."""
    if len(uses) == 1:
        return 1
    made: dict[tuple[UOp, tuple[Ids, ...]], set[tuple[Tag, ...]]] = defaultdict(set)
    for use in uses:
        ids, tags = zip(*use.place, strict=True) if use.place else ((), ())
        made[use.kernel, ids].add(tags)
    return max(map(len, made.values()))


def is_reduction(u: UOp) -> bool:
    """Whether u is a REDUCE_AXIS (or its GEP) that reduces more than one element."""
    return (u.op is Ops.REDUCE_AXIS or is_tuple_reduce(u)) and bool(reduce_extents(u))


def compute_node(u: UOp) -> UOp:
    """The node below any movement nodes."""
    while u.op in MOVEMENT:
        u = u.src[0]
    return u


# -- structure of reductions ---------------------------------------------------------------------------------------------
@remembered("varying", lambda u: u.op is not Ops.BUFFER)
def varying_axes(u: UOp) -> frozenset[int]:
    """The axes of extent > 1 along which a value may vary; it does not vary along a broadcast axis. Cached on the node."""
    if u.op is Ops.DEVICE:
        return frozenset()
    shape = shape_of(u)
    if u.op in ELEMENTWISE or u.op in (Ops.CONTIGUOUS, Ops.COPY, Ops.DETACH, Ops.REDUCE_AXIS, Ops.GEP):
        return frozenset[int]().union(*map(varying_axes, u.src)) - {a for a, n in enumerate(shape) if n == 1}
    if u.op in MOVEMENT:
        below = varying_axes(u.src[0])
        place: Place = tuple((frozenset((a,)), PLAIN) for a in range(len(shape)))
        moved = [ids for a, (ids, _) in enumerate(move_place(u, place)) if a in below]
        return frozenset[int]().union(*moved) & frozenset(a for a, n in enumerate(shape) if n != 1)
    return frozenset(a for a, n in enumerate(shape) if n != 1)


def factors_of(u: UOp) -> tuple[UOp, UOp] | None:
    """The two operands of a contraction: a sum of products of two different values that vary along the summed axes, at least one of which
    is reused along an axis that is kept. None for any other node."""
    if u.op is not Ops.REDUCE_AXIS or u.arg[0] != "ADD":
        return None
    x = u.src[0]
    while x.op is Ops.CAST:
        x = x.src[0]
    if x.op is not Ops.MUL or x.src[0] is x.src[1] or not (reads_memory(x.src[0]) and reads_memory(x.src[1])):
        return None
    shape = shape_of(x)
    summed = {a for a in u.arg[1] if shape[a] != 1}
    kept = {a for a, n in enumerate(shape) if n != 1} - summed
    first, second = varying_axes(x.src[0]), varying_axes(x.src[1])
    if not summed or not summed & first & second or (kept <= first and kept <= second):
        return None
    return x.src[0], x.src[1]


def is_contraction(u: UOp) -> bool:
    """Whether `factors_of(u)` finds factors. Cached on the node."""
    result: bool = u.cached("is_contraction", lambda n: factors_of(n) is not None)
    return result


def attention_region(u: UOp, stops: Container[UOp], consumers: Mapping[UOp, Sequence[UOp]]) -> frozenset[UOp]:
    """Match attention: a contraction with an operand that is the softmax of another contraction. Returns the other contraction and the
    reductions between both; empty if the pattern does not match, or nodes outside read values between them. `stops`: nodes that have
    buffers."""
    factors = factors_of(u)
    row = count_of(reduce_extents(u))
    if factors is None or row > ROW_LIMIT:
        return frozenset()
    above = {u}
    todo = [u.src[0]]
    while todo:
        n = todo.pop()
        above.add(n)
        todo += [s for s in n.src if n.op is Ops.CAST]
    for factor in factors:
        below = _walk_below(factor, stops)
        if below is None:
            continue
        inner, rows, seen = below
        if (inner.op is Ops.REDUCE_AXIS and rows and all(count_of(reduce_extents(r)) == row for r in rows)
                and any(n.op in (Ops.EXP, Ops.EXP2) for n in seen)
                and all(c in seen or c in above for n in (*rows, inner) for c in consumers.get(n, ()))):
            return frozenset((inner, *rows))
    return frozenset()


class Below(NamedTuple):
    """The nodes below a factor of a contraction. `inner`: the one contraction, WINDOW, PAD or GATHER at the lower end. `rows`: the
    reductions in between. `seen`: all nodes in between."""

    inner: UOp
    rows: list[UOp]
    seen: set[UOp]


def _walk_below(factor: UOp, stops: Container[UOp]) -> Below | None:
    """The nodes below `factor` down to `stops`; None unless they end at exactly one contraction, WINDOW, PAD or GATHER."""
    inner: list[UOp] = []
    rows: list[UOp] = []
    seen: set[UOp] = set()
    todo = [factor]
    while todo:
        n = todo.pop()
        if n in seen or n in stops or n.op is Ops.BUFFER or not reads_memory(n):
            continue
        seen.add(n)
        if n.op in (Ops.WINDOW, Ops.PAD, Ops.GATHER) or (n.op is Ops.REDUCE_AXIS and is_contraction(n)):
            inner.append(n)
            if len(inner) > 1:
                return None
            continue
        if is_reduction(n):
            rows.append(n)
        todo += n.src
    return Below(inner[0], rows, seen) if inner else None


# -- places through movement --------------------------------------------------------------------------------------------------
def move_place(u: UOp, place: Place) -> Place:
    """Like `svod.core.schedule.rangeify.move_coords`, for places: which ranges the coordinates in the source depend on."""
    source, arg = shape_of(u.src[0]), u.arg
    if u.op is Ops.RESHAPE:
        return _reshape_place(place, shape_of(u), source)
    if u.op is Ops.PERMUTE:
        moved = [_NOTHING] * len(arg)
        for i, axis in enumerate(arg):
            moved[axis] = place[i]
        return tuple(moved)
    if u.op is Ops.EXPAND:
        return tuple(_NOTHING if n == 1 else p for p, n in zip(place, source, strict=True))
    if u.op is Ops.PAD or u.op is Ops.SHRINK:
        steps = [-lo for lo, _ in arg[0]] if u.op is Ops.PAD else [b for b, _ in arg]
        return tuple((ids, tag.shifted(k)) for (ids, tag), k in zip(place, steps, strict=True))
    if u.op is Ops.FLIP:
        return tuple(made_of((c,), "flip") if a in arg else c for a, c in enumerate(place))
    moved = list(place[:len(source)])
    for k, (axis, *step) in enumerate(arg):
        moved[axis] = made_of((moved[axis], place[len(source) + k]), "window", *step)
    return tuple(moved)


def converts_floats(u: UOp) -> bool:
    """Whether u converts a float to another float type. Such conversions count as free, as arithmetic on 16-bit floats converts its
    operands in any case."""
    return u.op is Ops.CAST and u.dtype.is_float and u.src[0].dtype.is_float


def _before_widening(u: UOp) -> UOp:
    """The value under conversions to a wider type: the narrow value is stored, and readers convert it."""
    while widens(u):
        u = compute_node(u.src[0])
    return u


_NOTHING: Coordinate = (NO_IDS, PLAIN)    # the place of an axis of extent 1


def _reshape_place(place: Place, shape: Sequence[int], source: Sequence[int]) -> Place:
    """The place in `source` of `place` in its reinterpretation as `shape`: an axis that is merged or split depends on its whole group."""
    outer = [a for a, n in enumerate(shape) if n != 1]
    inner = [a for a, n in enumerate(source) if n != 1]
    moved = [_NOTHING] * len(source)
    for i0, i1, j0, j1 in axis_groups(tuple(shape[a] for a in outer), tuple(source[a] for a in inner)):
        if i1 - i0 == j1 - j0 == 1:
            moved[inner[j0]] = place[outer[i0]]
            continue
        parts = [place[a] for a in outer[i0:i1]]
        extents = [tuple([index_of(n) for n in group]) for group in ([shape[a] for a in outer[i0:i1]], [source[a] for a in inner[j0:j1]])]
        for j in range(j0, j1):
            moved[inner[j]] = made_of(parts, "reshape", *extents, j - j0)
    return tuple(moved)


class _Cost(NamedTuple):
    """The cost of one element of a value: operations, where slow ones count several times, the buffers that it reads, and whether it holds
    a reduction."""

    operations: int
    buffers: int
    has_reduction: bool


class Deviations(NamedTuple):
    """What a plan does otherwise than the rules say, by nodes of its normalised graph. `kept`: values that get a buffer; `recomputed`:
    values that every kernel which reads them computes anew; `orders`: realised value → its axes in the order in which they are stored."""

    kept: frozenset[UOp] = frozenset()
    recomputed: frozenset[UOp] = frozenset()
    orders: Mapping[UOp, tuple[int, ...]] = MappingProxyType({})


BY_RULES = Deviations()


# -- the cut --------------------------------------------------------------------------------------------------------------
class Cut:
    """Finds the nodes of one graph that need a buffer. `roots`: nodes that need one in any case, with the reason."""

    def __init__(self, sink: UOp, roots: dict[UOp, str], deviations: Deviations = BY_RULES):
        self.deviations = deviations
        self.order = sink.toposort(gate=lambda n: n.op is not Ops.BUFFER)
        self.position = {u: i for i, u in enumerate(self.order)}
        self.consumers: dict[UOp, list[UOp]] = {}
        for u in self.order:
            for s in dict.fromkeys(u.src):
                self.consumers.setdefault(s, []).append(u)
        self.hard: dict[UOp, str] = {**dict.fromkeys(deviations.kept, "kept by a choice of the plan"), **roots}

    def run(self) -> dict[UOp, str]:
        """The nodes that get a buffer, with the reason of each, in topological order."""
        forced = dict(self.hard)
        self.settle()
        while deep := self.find_deep():
            forced |= deep
            self.hard = dict(forced)
            self.settle()
        return {u: self.why[u] for u in self.order if u in self.why}

    def find_deep(self) -> dict[UOp, str]:
        """The values at which expressions of `MAX_DEPTH` operations are cut: the next value that is no larger than its sources; after
        `MAX_DEPTH` more operations, any value."""
        depth: dict[UOp, int] = {}
        deep: dict[UOp, str] = {}
        for u in self.order:
            if u in self.why or is_reduction(u):
                depth[u] = 0
                continue
            depth[u] = operations(u) + max((depth.get(s, 0) for s in u.src), default=-1)     # the sources of a BUFFER have no depth
            if depth[u] >= MAX_DEPTH and u.op in _CAN_END and (
                    depth[u] >= 2 * MAX_DEPTH or any(size_of(compute_node(s)) >= size_of(u) for s in u.src)):
                deep[u] = f"an expression of {MAX_DEPTH} operations"
                depth[u] = 0
        return deep

    def settle(self) -> None:
        """Repeat the visit until the decision on each shared value has been made with the final set of buffers below it. Sets
        `recomputable`, the values with a buffer that are only too expensive to recompute in several kernels."""
        shared: set[UOp] = set()
        for _ in range(MAX_WALKS):
            self.walk()
            shared |= self.shared
            # shared values were judged before the nodes below them, so judge them again from the sources up
            settled = {u: why for u, why in self.why.items() if u not in self.shared}
            for u in sorted(self.shared, key=self.position.__getitem__):
                if self.expensive(u, settled):
                    settled[u] = self.why[u]
            if len(settled) == len(self.why):
                break
            self.hard = settled
        self.recomputable = shared & self.why.keys()        # a later walk finds shared values of an earlier one in `hard`

    def layout_of(self, u: UOp) -> UOp:
        """The layout in which a realised node is best stored: the RESHAPE at the end of u's only path of PERMUTEs and RESHAPEs, if it
        merges axes that a PERMUTE brought together (the heads of an attention, before the next GEMM reads them); else u."""
        best = node = u
        permuted = False
        while True:
            after = self.consumers.get(node, [])
            if len(after) != 1 or after[0].op not in (Ops.RESHAPE, Ops.PERMUTE) or after[0] in self.why:
                return best
            wide = sum(n != 1 for n in shape_of(node))
            node = after[0]
            permuted = permuted or node.op is Ops.PERMUTE
            if permuted and node.op is Ops.RESHAPE and sum(n != 1 for n in shape_of(node)) < wide:
                best = node

    # -- one walk -----------------------------------------------------------------------------
    def walk(self) -> None:
        """Visit all nodes once, with buffers for the nodes in `hard`. Sets `why`, all nodes that need a buffer, and `shared`, the nodes
        among them that are only too expensive to recompute in several kernels. If a rule needs a buffer for a node visited before, the
        visit restarts from that node."""
        self.why: dict[UOp, str] = dict(self.hard)
        self.shared: set[UOp] = set()
        self.uses: dict[UOp, dict[Use, int]] = {}     # node → use → number of readers with this use
        self.given: dict[UOp, list[tuple[UOp, Use]]] = {}
        self.extents: list[int] = []
        self.contraction_of: dict[UOp, UOp] = {}      # kernel → its contraction
        self.anew: set[UOp] = set()                   # values that all readers compute anew, and those that only these read
        self.exempt: dict[UOp, tuple[UOp, UOp]] = {}  # reduction of an attention → (kernel, the contraction that reads it)
        i = len(self.order) - 1
        while i >= 0:
            u = self.order[i]
            if u in self.why:
                self.open_kernel(u)
            elif self.uses.get(u):
                problem = self.visit(u, self.merged(list(self.uses[u])))
                if problem is not None:
                    target, why = problem
                    self.why[target] = why
                    for k in range(i, self.position[target] + 1):
                        self.undo(self.order[k])
                    i = self.position[target]
                    continue
            i -= 1

    def undo(self, u: UOp) -> None:
        """Undo the effects of the visit of u."""
        for s, use in self.given.pop(u, ()):
            count = self.uses[s]
            count[use] -= 1
            if not count[use]:
                del count[use]
        self.shared.discard(u)
        self.contraction_of = {k: c for k, c in self.contraction_of.items() if c is not u}
        self.exempt = {r: (kernel, reader) for r, (kernel, reader) in self.exempt.items() if reader is not u}

    def open_kernel(self, u: UOp) -> None:
        if u.op in (Ops.AFTER, Ops.CALL, Ops.END):   # their kernels are ASSIGNs and calls, whose arguments need buffers anyway
            return
        shape = shape_of(u)
        place = tuple((self.new_range(n), PLAIN) if n != 1 else _NOTHING for n in shape)
        use = Use(u, place, ids_of(place), NO_IDS, (), None, None)
        if u.op is Ops.ASSIGN or u.op is Ops.COPY:
            self.want(u, u.src[-1] if u.op is Ops.ASSIGN else u.src[0], use)
        elif u.op is not Ops.CUSTOM_FUNCTION:   # the operands of a library kernel are roots
            if u.op is Ops.REDUCE_AXIS and is_contraction(u):
                self.claim(u, u)
            self.descend(u, use)

    def claim(self, kernel: UOp, contraction: UOp) -> None:
        """Record the contraction of a kernel, and the reductions of the attention that ends in this contraction, if there is one."""
        self.contraction_of[kernel] = contraction
        for r in attention_region(contraction, self.why, self.consumers):
            self.exempt[r] = kernel, contraction

    def new_range(self, extent: int) -> Ids:
        self.extents.append(extent)
        return frozenset((len(self.extents) - 1,))

    def want(self, reader: UOp, u: UOp, use: Use) -> None:
        if u.op is not Ops.CONST and u.op is not Ops.BUFFER:
            uses = self.uses.setdefault(u, {})
            uses[use] = uses.get(use, 0) + 1
            self.given.setdefault(reader, []).append((u, use))

    def visit(self, u: UOp, uses: list[Use]) -> tuple[UOp, str] | None:
        """Pass the uses of u on to its sources. If a rule needs a buffer for u, or for a node visited before, return that node with the
        reason instead."""
        problem: tuple[UOp, str] | None = None
        if u in self.deviations.recomputed or (self.anew and self.anew.issuperset(self.consumers[u])):
            self.anew.add(u)
        if is_reduction(u):
            problem = self.check_reduction(u, uses)
            if problem is not None:
                problem = _before_widening(problem[0]), problem[1]
        elif u.op not in MOVEMENT and u.op is not Ops.IOTA and not widens(u):
            kernels = {use.kernel for use in uses}
            places = most_places(uses)
            if places > MAX_READS and (places > MAX_POSITIONS or reads_memory(u)):
                problem = u, f"read at {places} places of one kernel"
            elif reads_memory(u) and self.is_recomputed(u, most_shifts(uses)):
                problem = u, "read at shifted positions, and costly to compute at each"
            elif self.is_gathered_often(u, uses):
                problem = u, "read through a gather more often than it has elements, and costly to compute at each read"
            elif len(kernels) > 1 and u not in self.anew:
                reason = self.expensive(u, self.why)
                if reason:
                    self.why[u] = f"read by several kernels and {reason}"
                    self.shared.add(u)
                    self.open_kernel(u)
                    return None
        if problem is None:
            # a reduction is computed once for all its readers
            for use in [self.common_use(uses)] if is_reduction(u) else uses:
                self.descend(u, use)
        return problem

    def merged(self, uses: list[Use]) -> list[Use]:
        """Merge uses that read the same elements along different paths. Rules need only the lowest nodes over all paths, and the number of
        paths would double with each value that is read directly and through a movement."""
        if len(uses) == 1:
            return uses
        groups: dict[Hashable, list[Use]] = {}
        for use in uses:
            groups.setdefault((use.kernel, use.place, use.active, use.rows), []).append(use)
        return [group[0] if len(group) == 1 else self.lowest_of(group) for group in groups.values()]

    def lowest_of(self, uses: list[Use]) -> Use:
        """The first of the uses, with the lowest nodes of all of them as its entries, barrier and operand of a reduction."""
        entries: dict[int, UOp] = {}
        for i, node in (entry for use in uses for entry in use.entries):
            entries[i] = self.lowest((entries.get(i, node), node))
        barriers = [use.barrier for use in uses if use.barrier is not None]
        reduced = [use.reduced for use in uses if use.reduced is not None]
        return uses[0]._replace(entries=tuple(entries.items()), barrier=self.lowest(barriers) if barriers else None,
                                reduced=self.lowest(reduced) if reduced else None)

    def common_use(self, uses: list[Use]) -> Use:
        """One use that combines all uses of a reduction, for the nodes below it."""
        return uses[0]._replace(rows=NO_IDS.union(*(use.rows for use in uses)))

    def descend(self, u: UOp, use: Use) -> None:
        """Pass one use of u on to its sources."""
        if u.op in MOVEMENT:
            below = compute_node(u)
            entries = use.entries
            barrier = below if u.op is Ops.PAD or u.op is Ops.WINDOW else use.barrier
            if u.op is Ops.EXPAND and repeats(u):
                dropped = dict.fromkeys(
                    i for (ids, _), n, m in zip(use.place, shape_of(u), shape_of(u.src[0]), strict=True) if n != m for i in ids)
                known = {i for i, _ in entries}
                entries = (*entries, *((i, below) for i in dropped if i not in known))
            self.want(u, u.src[0], use._replace(place=move_place(u, use.place), entries=entries, barrier=barrier))
        elif is_reduction(u):
            reduce = u.src[0] if u.op is Ops.GEP else u
            shape = shape_of(reduce.src[0])
            place = list(use.place)
            own = NO_IDS
            for a in reduce.arg[1]:
                if shape[a] != 1:
                    ids = self.new_range(shape[a])
                    place[a] = ids, PLAIN
                    own |= ids
            # below the reduction only the ranges of its own position and the reduced ranges count, not the reader's other ranges
            used = ids_of(use.place)
            below_use = use._replace(place=tuple(place), active=used | own, rows=(use.rows & used) | own, entries=(),
                                     reduced=compute_node(reduce.src[0]))
            for s in reduce.src:
                self.want(u, s, below_use)
        elif u.op is Ops.GATHER:
            x, index = u.src
            end = u.arg + len(shape_of(index))
            ids, tag = made_of(use.place[u.arg:end], "gather", self.position[index])
            looked_up = ids, tag._replace(gathered=True)
            self.want(u, x, use._replace(place=(*use.place[:u.arg], looked_up, *use.place[end:]), barrier=compute_node(x)))
            self.want(u, index, use._replace(place=use.place[u.arg:end], barrier=compute_node(index)))
        else:
            for s in u.src:
                self.want(u, s, use)

    # -- rules --------------------------------------------------------------------------------
    def check_reduction(self, u: UOp, uses: list[Use]) -> tuple[UOp, str] | None:
        """The node that needs a buffer, with the reason, if the reduction u cannot stay in the kernel that reads it; else None."""
        kernel = uses[0].kernel
        if any(use.kernel is not kernel for use in uses):
            return self.lift(u), "a reduction read by several kernels"
        exempt_in, _ = self.exempt.get(u, (None, None))
        if exempt_in is kernel:
            return None
        barriers = [use.barrier for use in uses if use.barrier is not None]
        if barriers:
            return self.lowest(barriers), "a reduction read through a window, padding or gather"
        if len({use.place for use in uses}) > 1:
            return self.lift(u), "a reduction read at several places"
        row = count_of(reduce_extents(u))
        contraction = u.op is Ops.REDUCE_AXIS and is_contraction(u)
        used = ids_of(uses[0].place)
        problems: dict[UOp, str] = {}
        for use in uses:
            repeated = self.repeated(u, use, used, contraction)
            if repeated is not None:
                problems[repeated] = "a reduction that a broadcast in its consumer would repeat"
            elif use.rows and contraction:
                problems[use.reduced or u] = "a contraction whose consumer is another reduction"
            elif (use.active != used or use.rows) and row > ROW_LIMIT:
                problems[self.lift(u)] = f"a row of {row} elements, more than {ROW_LIMIT}, would be read again"
            elif math.prod(upper(self.extents[i]) for i in use.rows) > ROW_LIMIT:
                problems[use.reduced or u] = f"more than {ROW_LIMIT} elements would be reduced further"
        if problems:
            target = self.lowest(problems)
            return target, problems[target]
        if contraction:
            if kernel in self.contraction_of:
                return self.lift(u), SECOND_CONTRACTION
            self.claim(kernel, u)
        return None

    def repeated(self, u: UOp, use: Use, used: Ids, contraction: bool) -> UOp | None:
        """The node below a broadcast that repeats the reduction u, unless the broadcast is along u's own row; None if no broadcast repeats
        it."""
        entry = dict(use.entries)
        # if a RESHAPE spreads a range over a broadcast axis and another axis, the range is both dropped and used
        extra = use.active - used | ({i for i in entry if i in used} if contraction else NO_IDS)
        own = [] if contraction else list(reduce_extents(u))
        offending = []
        # the broadcast nearest to the reduction may be the one along its row
        for i in sorted(extra, key=lambda i: (self.position[entry[i]] if i in entry else len(self.order), i)):
            if self.extents[i] in own:
                own.remove(self.extents[i])
            else:
                offending.append(i)
        if not offending:
            return None
        return self.lowest([entry[i] for i in offending if i in entry] or [u])

    def lowest(self, nodes: Iterable[UOp]) -> UOp:
        """The first of `nodes` in topological order."""
        return min(nodes, key=self.position.__getitem__)

    def lift(self, u: UOp) -> UOp:
        """The last node of the elementwise chain after the reduction u, which the kernel of u stores."""
        best = node = u
        while True:
            after = self.consumers.get(node, [])
            if len(after) != 1:
                return best
            node = after[0]
            if node in self.why or size_of(u) != (0 if node.op is Ops.SINK else size_of(node)):
                return best
            if node.op in ELEMENTWISE:
                if any(self.holds_reduction(s) for s in node.src if compute_node(s) is not compute_node(best) and s is not best):
                    return best
                best = node
            elif node.op not in (Ops.RESHAPE, Ops.PERMUTE, Ops.FLIP):
                return best

    def holds_reduction(self, u: UOp) -> bool:
        """Whether a kernel that computes u in place would contain a reduction."""
        return any(is_reduction(n) for n in self.cone(u, self.why) if n not in self.why)

    def cone(self, u: UOp, realised: dict[UOp, str]) -> Iterator[UOp]:
        """The nodes below u, down to buffers, nodes with buffers and reductions; the nearest first. The cone of a chain of steps is
        deep, so readers stop as soon as they know enough."""
        seen, todo = {u}, deque([u])
        while todo:
            n = todo.popleft()
            yield n
            if not (n.op is Ops.BUFFER or (n in realised and n is not u) or is_reduction(n)):
                fresh = [s for s in dict.fromkeys(n.src) if s not in seen]
                seen.update(fresh)
                todo += fresh

    def is_gathered_often(self, u: UOp, uses: list[Use]) -> bool:
        """Whether a GATHER reads u so often that computing it at each read costs too much."""
        places = {use.place for use in uses if any(tag.gathered for _, tag in use.place)}
        reads = sum(math.prod(upper(self.extents[i]) for i in ids_of(place)) for place in places)
        if reads <= size_of(u) or not self.expensive(u, self.why):
            return False
        most = MOST_RECOMPUTED * size_of(u) // (reads - size_of(u))
        return most <= COSTLIEST and self.cost_of(u, self.why, most).operations > most

    def cost_of(self, u: UOp, realised: dict[UOp, str], most: int) -> _Cost:
        """The cost of computing u anew from the buffers below it, or a part of it: up to the nearest reduction, or, of a value with many
        nodes below it, more than `most` operations."""
        operations, buffers = 0, 0
        for visited, n in enumerate(self.cone(u, realised)):
            if visited > MAX_DEPTH and buffers and operations > most:
                break
            if n.op is Ops.BUFFER or (n is not u and n in realised):
                buffers += 1
            elif is_reduction(n):
                return _Cost(operations, buffers, True)
            elif n.op in ELEMENTWISE and not converts_floats(n):
                operations += 6 if n.op in TRANSCENDENTAL else 3 if n.op in _SLOW else 1
            elif n.op is Ops.GATHER:
                operations += 3
        return _Cost(operations, buffers, False)

    def is_recomputed(self, u: UOp, shifts: int) -> bool:
        """Whether it costs too much to compute u at `shifts` positions of one kernel."""
        return shifts > 1 and (shifts - 1) * self.cost_of(u, self.why, MOST_RECOMPUTED).operations > MOST_RECOMPUTED

    def expensive(self, u: UOp, realised: dict[UOp, str]) -> str:
        """The reason why several kernels should not each recompute u; "" if they should."""
        cost = self.cost_of(u, realised, CHEAP_COST)
        if cost.has_reduction:
            return "holds a reduction"
        if not cost.buffers:
            return ""
        if cost.operations > CHEAP_COST:
            return f"costs more than {CHEAP_COST} operations"
        return f"reads more than {CHEAP_BUFFERS} buffers" if cost.buffers > CHEAP_BUFFERS else ""
