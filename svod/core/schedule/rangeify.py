"""Lower the graph of one kernel to an AST of stages. Movement operations become index arithmetic over RANGEs.

    y = REDUCE_AXIS ADD, axis 2 of (EXPAND(RESHAPE(a)) * EXPAND(PERMUTE(RESHAPE(b))))          # a (M,K), b (K,N)

becomes

    A = STAGE(LOAD(a, m'*K + k'), m', k')
    B = STAGE(LOAD(b, k''*N + n''), n'', k'')
    STORE(y, m*N + n, REDUCE(INDEX(A, m, k) * INDEX(B, n, k), k; ADD), m, n)

The pass visits the kernel's nodes twice, without recursion. The first visit goes from the outputs to the leaves and gives every node its
*reads*. A read holds the coordinates (index expressions) of the access, the condition under which it is valid (PAD, GATHER), and the stage
that reads. A node with one read is computed in place. The following nodes become stages with their own ranges:

* a REDUCE_AXIS that is not read under exactly its stage's ranges, or whose stage already reduces over other extents;
* below a REDUCE: the node at which broadcasting starts (the source of the lowest EXPAND or WINDOW on the way down, PADs included), or a
  load that is not broadcast at all;
* an elementwise value read at two coordinates.

The second visit goes from the leaves to the outputs and builds the expressions. A read of a stage may leave the stage's ranges only if a
WHERE discards the value; its coordinates are then clamped. Coordinates of the first visit may contain the index of a GATHER, which only the
second visit builds: a DEFINE_VAR is its placeholder until then.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from svod.core.graph.shapes import Shape, axis_groups, shape_of
from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.param import Param
from svod.core.ir.symbolic import Valid
from svod.core.ir.uop import ELEMENTWISE, MOVEMENT, Ops, UOp, remembered
from svod.core.ir.variable import Dim, dim_of, index_of, number_of, upper
from svod.errors import ScheduleError

Coords = tuple[UOp, ...]


class StoreOutput(NamedTuple):
    """One STORE of a kernel: `value` (a graph node) into `target`, a BUFFER under RESHAPE, PERMUTE, SHRINK and FLIP only."""

    value: UOp
    target: UOp


class Read(NamedTuple):
    """One read of a node's value.

    coords: an index expression per axis. valid: the condition under which the value is used. alt: the CONST to return elsewhere; None
    if the value is unused there. context: number of the reading stage. below: the read is inside a REDUCE of that stage. broadcast:
    the path from the stage's value contains EXPAND, WINDOW or GATHER. anchor: the node further down that must become a stage."""

    coords: Coords
    valid: Valid
    alt: UOp | None
    context: int
    below: bool
    broadcast: bool
    anchor: UOp | None


class PartialStage:
    """A stage under construction."""

    __slots__ = ("ranges", "reduce_extents", "reduce_ranges", "reduces")

    def __init__(self, ranges: Coords):
        self.ranges = ranges
        self.reduce_ranges: Coords | None = None
        self.reduce_extents: Shape = ()
        self.reduces = 0


# -- coordinates through movement ---------------------------------------------------------------------------------------
def reshape_coords(coords: Coords, shape: Shape, source: Shape) -> Coords:
    """Coordinates in `source` of the element at `coords` in its reinterpretation as `shape`. No axis has extent 0."""
    outer = [(c, n) for c, n in zip(coords, shape, strict=True) if n != 1]
    wide = [a for a, n in enumerate(source) if n != 1]
    result = [sy.INDEX_ZERO] * len(source)
    for i0, i1, j0, j1 in axis_groups([n for _, n in outer], [source[a] for a in wide]):
        group, extents = outer[i0:i1], [source[a] for a in wide[j0:j1]]
        if len(group) == len(extents) == 1 or [n for _, n in group] == extents:
            moved = [c for c, _ in group]
        else:
            moved = unflatten(flatten([c for c, _ in group], [n for _, n in group]), extents)
        for axis, c in zip(wide[j0:j1], moved, strict=True):
            result[axis] = c
    return tuple(result)


def flatten(coords: Sequence[UOp], shape: Sequence[int]) -> UOp:
    """The row-major flat index of `coords`."""
    flat, stride = sy.INDEX_ZERO, 1
    for c, n in zip(reversed(coords), reversed(shape), strict=True):
        # only the outermost extent may depend on variables, so every stride is constant
        flat, stride = sy.add(flat, sy.scale(c, stride)), stride * upper(n)
    return flat


def unflatten(flat: UOp, shape: Sequence[int]) -> list[UOp]:
    """Row-major coordinates of a flat index below the number of elements."""
    coords: list[UOp] = []
    for k, n in enumerate(reversed(shape)):
        last = k == len(shape) - 1
        coords.append(flat if last else sy.floormod(flat, n))
        flat = flat if last else sy.floordiv(flat, n)
    return coords[::-1]


def moved_by(c: UOp, n: int, sign: int) -> UOp:
    """c + sign·n, where n is an int or a Dim."""
    return sy.add(c, sy.scale(n.expr, sign)) if isinstance(n, Dim) else sy.shift(c, sign * n)


def move_coords(u: UOp, coords: Coords) -> Coords:
    """Coordinates in the source of a movement node. For PAD they may fall outside."""
    source, arg = shape_of(u.src[0]), u.arg
    if u.op is Ops.RESHAPE:
        return reshape_coords(coords, shape_of(u), source)
    if u.op is Ops.PERMUTE:
        moved = [sy.INDEX_ZERO] * len(arg)
        for i, axis in enumerate(arg):
            moved[axis] = coords[i]
        return tuple(moved)
    if u.op is Ops.EXPAND:
        return tuple(sy.INDEX_ZERO if n == 1 else c for c, n in zip(coords, source, strict=True))
    if u.op is Ops.PAD:
        return tuple(moved_by(c, lo, -1) for c, (lo, _) in zip(coords, arg[0], strict=True))
    if u.op is Ops.SHRINK:
        return tuple(moved_by(c, begin, 1) for c, (begin, _) in zip(coords, arg, strict=True))
    if u.op is Ops.FLIP:
        return tuple(sy.sub(index_of(n - 1), c) if i in arg else c for i, (c, n) in enumerate(zip(coords, source, strict=True)))
    assert u.op is Ops.WINDOW, u
    moved = list(coords[:len(source)])
    for k, (axis, _, stride, dilation) in enumerate(arg):
        moved[axis] = sy.add(sy.scale(moved[axis], stride), sy.scale(coords[len(source) + k], dilation))
    return tuple(moved)


def repeats(u: UOp) -> bool:
    """Whether a movement node reads elements of its source more than once."""
    return u.op is Ops.WINDOW or (u.op is Ops.EXPAND and shape_of(u) != shape_of(u.src[0]))


def is_tuple_reduce(u: UOp) -> bool:
    """Whether u is the GEP of a REDUCE_AXIS. The two nodes form one reduction."""
    return u.op is Ops.GEP and u.src[0].op is Ops.REDUCE_AXIS


@remembered("reads_memory")
def reads_memory(u: UOp) -> bool:
    """Whether a graph node depends on a BUFFER. Cached on the node."""
    return u.op is Ops.BUFFER or any(map(reads_memory, u.src))


def find_anchor(u: UOp) -> UOp | None:
    """The node that must become a stage for an operand `u` of a REDUCE, or of elementwise work below the REDUCE. None if no stage is needed
    for `u`: elementwise work that is not broadcast treats its own operands, a REDUCE decides for itself, and constants are free."""
    anchor: UOp | None = None
    node = u
    while node.op in MOVEMENT:
        if node.op is Ops.PAD:
            break
        if repeats(node):
            anchor = node.src[0]
        node = node.src[0]
    if node.op is Ops.CONST or node.op is Ops.IOTA or node.op is Ops.REDUCE_AXIS or is_tuple_reduce(node) or not reads_memory(node):
        return None
    if anchor is None:
        if node.op in ELEMENTWISE:
            return None
        anchor = u
    # axes of extent 1 are ignored, so the same stage is found under any number of them
    while anchor.op is Ops.RESHAPE and [n for n in shape_of(anchor) if n != 1] == [n for n in shape_of(anchor.src[0]) if n != 1]:
        anchor = anchor.src[0]
    return anchor


class Rangeifier:
    """Visits the nodes of one kernel twice. `params`: BUFFER → PARAM."""

    def __init__(self, outputs: Sequence[StoreOutput], params: dict[UOp, UOp]):
        self.outputs, self.params = outputs, params
        self.reads: dict[UOp, dict[Read, None]] = {}
        self.children: dict[tuple[UOp, Read], tuple[tuple[UOp, Read], ...]] = {}
        self.bodies: dict[UOp, Read] = {}          # stage → the read of its own value
        self.inline: dict[UOp, list[Read]] = {}    # reads at which a node is computed in place
        self.contexts: list[PartialStage] = []
        self.next_range = 0
        self.gathered: dict[tuple[UOp, Read], UOp] = {}   # (index of a GATHER, its read) → the placeholder
        self.values: dict[tuple[UOp, Read], UOp] = {}
        root = UOp(Ops.SINK, dtypes.void, tuple(o.value for o in outputs))
        self.order = root.toposort(gate=lambda n: n.op is not Ops.BUFFER)[:-1]

    # -- outputs to leaves ------------------------------------------------------------------
    def fresh(self, shape: Shape) -> Coords:
        """A new RANGE per axis; 0 for an axis of extent 1."""
        coords = []
        for n in shape:
            if n == 1:
                coords.append(sy.INDEX_ZERO)
            else:
                coords.append(sy.make_range(n.expr if isinstance(n, Dim) else n, self.next_range))
                self.next_range += 1
        return tuple(coords)

    def open_stage(self, shape: Shape) -> Read:
        coords = self.fresh(shape)
        self.contexts.append(PartialStage(tuple(c for c in coords if c.op is Ops.RANGE)))
        return Read(coords, (), None, len(self.contexts) - 1, False, False, None)

    def want(self, u: UOp, read: Read) -> tuple[UOp, Read]:
        self.reads.setdefault(u, {})[read] = None
        return u, read

    def run(self) -> UOp:
        roots = [self.want(o.value, self.open_stage(shape_of(o.value))) for o in self.outputs]
        for u in reversed(self.order):
            if u in self.reads:
                self.place(u)
        for u in self.order:
            if u in self.reads:
                self.build(u)
        stores = []
        for output, (value, read) in zip(self.outputs, roots, strict=True):
            node, coords = output.target, read.coords
            while node.op is not Ops.BUFFER:
                coords, node = move_coords(node, coords), node.src[0]
            where = UOp(Ops.INDEX, node.dtype, (self.params[node], coords[0]))
            stores.append(UOp(Ops.STORE, dtypes.void, (where, self.values[value, read], *self.contexts[read.context].ranges)))
        ast = UOp(Ops.SINK, dtypes.void, tuple(stores))
        while self.gathered:
            # the value of one index may contain the placeholder of another
            stand_ins = {v: self.values[k] for k, v in self.gathered.items()}
            replaced = ast.substitute(stand_ins)
            if replaced is ast:
                break
            ast = replaced
        return bound_indices(ast)

    def place(self, u: UOp) -> None:
        """Decide where u is computed, once all its reads are known, and add the reads of its sources."""
        reads = list(self.reads[u])
        if u.op is Ops.CONST or u.op is Ops.IOTA or u.dtype == dtypes.index:
            staged: list[Read] = []
        elif u.op is Ops.REDUCE_AXIS or is_tuple_reduce(u):
            staged = [] if len(reads) == 1 and self.fits_in_place(u, reads[0]) else reads
        elif any(r.anchor is u for r in reads):
            staged = [r for r in reads if r.anchor is u or not r.valid]
        elif (u.op in ELEMENTWISE and not any(r.valid for r in reads) and len({(r.coords, r.context) for r in reads}) > 1
              and reads_memory(u)):
            staged = reads
        else:
            staged = []
        inline = [r for r in reads if r not in staged] if staged else reads
        if staged:
            self.bodies[u] = self.open_stage(shape_of(u))
            inline = [*inline, self.bodies[u]]
        self.inline[u] = inline
        for r in inline:
            self.children[u, r] = self.expand(u, r)

    def fits_in_place(self, u: UOp, read: Read) -> bool:
        """Whether a REDUCE_AXIS can stay in the expression that reads it."""
        context = self.contexts[read.context]
        return not (read.below or read.valid or read.broadcast) and (
            context.reduce_ranges is None or context.reduce_extents == reduce_extents(u))

    def expand(self, u: UOp, r: Read) -> tuple[tuple[UOp, Read], ...]:
        """The reads of u's sources that one read of u requires."""
        if u.dtype == dtypes.index:     # an expression over variables
            return ()
        if u.op is Ops.PAD:
            return self.expand_pad(u, r)
        if u.op in MOVEMENT:
            return (self.want(u.src[0], r._replace(coords=move_coords(u, r.coords), broadcast=r.broadcast or repeats(u))),)
        if u.op in ELEMENTWISE:
            child = r._replace(alt=None, anchor=None)
            if not r.below:
                return tuple([self.want(s, child) for s in u.src])
            return tuple([self.want(s, child._replace(anchor=find_anchor(s))) for s in u.src])
        if u.op is Ops.REDUCE_AXIS or is_tuple_reduce(u):
            return self.expand_reduce(u.src[0] if u.op is Ops.GEP else u, r)
        if u.op is Ops.GATHER:
            return self.expand_gather(u, r)
        if u.op in (Ops.CONST, Ops.IOTA, Ops.BUFFER):
            return ()
        raise ScheduleError(f"{u.op.value} cannot stand inside a kernel; the kernel cut has to end the kernel there")

    def masked(self, u: UOp, r: Read, coords: Coords, inside: Valid | None, fill: UOp) -> tuple[tuple[UOp, Read], ...]:
        """The read of u's first source, under the condition of `r` and the condition `inside`, with the value `fill` elsewhere; () if
        they never hold together."""
        valid = None if inside is None else sy.conjoin(r.valid, inside)
        if valid is None:
            return ()
        # outside r.valid the value is r.alt: if that is another constant than fill, build() adds a WHERE
        plain = not r.valid or r.alt is None or r.alt is fill
        return (self.want(u.src[0], r._replace(coords=coords, valid=valid, alt=fill if plain and valid else None)),)

    def expand_pad(self, u: UOp, r: Read) -> tuple[tuple[UOp, Read], ...]:
        coords = move_coords(u, r.coords)
        return self.masked(u, r, coords, pad_valid(u, coords), UOp.const(u.dtype, u.arg[1]))

    def expand_gather(self, u: UOp, r: Read) -> tuple[tuple[UOp, Read], ...]:
        x, index = u.src
        end = u.arg + len(shape_of(index))
        wanted = self.want(index, r._replace(coords=r.coords[u.arg:end], alt=None, below=False, broadcast=True, anchor=None))
        if wanted not in self.gathered:
            name = (f"gathered{len(self.gathered)}", int(index.dtype.min), int(index.dtype.max))
            self.gathered[wanted] = UOp(Ops.DEFINE_VAR, index.dtype, (), name)
        at = UOp(Ops.CAST, dtypes.index, (self.gathered[wanted],))
        inside = within((), at, shape_of(x)[u.arg], True, True)
        child = r._replace(broadcast=True)
        read = self.masked(u, child, (*r.coords[:u.arg], at, *r.coords[end:]), inside, UOp.const(u.dtype, 0))
        return (*read, wanted)

    def expand_reduce(self, reduce: UOp, r: Read) -> tuple[tuple[UOp, Read], ...]:
        context = self.contexts[r.context]
        axes, shape = reduce.arg[1], shape_of(reduce.src[0])
        if context.reduce_ranges is None:
            context.reduce_extents = reduce_extents(reduce)
            context.reduce_ranges = self.fresh(context.reduce_extents)
        context.reduces += 1
        reduced = iter(context.reduce_ranges)
        coords = tuple(sy.INDEX_ZERO if n == 1 else next(reduced) if a in axes else c
                       for a, (c, n) in enumerate(zip(r.coords, shape, strict=True)))
        child = r._replace(coords=coords, below=bool(context.reduce_ranges))
        return tuple([self.want(s, child._replace(anchor=find_anchor(s) if child.below else None)) for s in reduce.src])

    # -- leaves to outputs --------------------------------------------------------------------
    def build(self, u: UOp) -> None:
        for r in self.inline[u]:
            self.values[u, r] = self.value(u, r)
        body = self.bodies.get(u)
        if body is None:
            return
        value = self.values[u, body]
        stage = UOp(Ops.STAGE, value.dtype, (value, *self.contexts[body.context].ranges))
        shape = shape_of(u)
        for r in self.reads[u]:
            if (u, r) in self.values:
                continue
            coords = [c for c, n in zip(r.coords, shape, strict=True) if n != 1]
            if r.valid:
                extents = [n for n in shape if n != 1]
                coords = [sy.minimum(sy.maximum(c, sy.INDEX_ZERO), index_of(n - 1)) for c, n in zip(coords, extents, strict=True)]
            self.values[u, r] = outside(r, UOp(Ops.INDEX, u.dtype, (stage, *coords)))

    def value(self, u: UOp, r: Read) -> UOp:
        """The expression of u at one read. The sources of u are already built."""
        made = [self.values[child] for child in self.children[u, r]]
        if u.op is Ops.CONST:
            return outside(r, u)
        if u.dtype == dtypes.index:
            return u
        if u.op is Ops.IOTA:
            return outside(r, r.coords[0].cast(u.dtype))
        if u.op is Ops.BUFFER:
            return self.load(u, r)
        if u.op is Ops.PAD:
            fill = UOp.const(u.dtype, u.arg[1])
            return self.fill_in(r, made, pad_valid(u, move_coords(u, r.coords)), fill)
        if u.op is Ops.GATHER:
            at = UOp(Ops.CAST, dtypes.index, (self.gathered[self.children[u, r][-1]],))
            return self.fill_in(r, made[:-1], within((), at, shape_of(u.src[0])[u.arg], True, True), UOp.const(u.dtype, 0))
        if u.op in MOVEMENT:
            return made[0]
        if u.op in ELEMENTWISE:
            return outside(r, elementwise(u, made))
        return self.reduction(u, r, made)

    def fill_in(self, r: Read, made: list[UOp], inside: Valid | None, fill: UOp) -> UOp:
        """The value of a PAD or GATHER: the value of its source where `inside` holds, else `fill`; r.alt where the read is not valid."""
        if r.alt is None or r.alt is fill or not r.valid:
            # the source's own read has `fill` as its alternative
            return made[0] if made else fill
        if not made:
            return outside(r, fill)
        gate = sy.gate_of(inside or ())
        return outside(r, made[0] if gate is sy.TRUE else UOp(Ops.WHERE, fill.dtype, (gate, made[0], fill)))

    def load(self, u: UOp, r: Read) -> UOp:
        index = sy.assuming(r.coords[0], r.valid) if r.valid else r.coords[0]
        where = UOp(Ops.INDEX, u.dtype, (self.params[u], index))
        if not r.valid or (r.alt is None and _is_inside(index, self.params[u].arg.size)):  # the value is unused where the read is not valid
            return UOp(Ops.LOAD, u.dtype, (where,))
        alt = UOp.const(u.dtype, 0) if r.alt is None else r.alt
        return UOp(Ops.LOAD, u.dtype, (where, alt, sy.gate_of(r.valid)))

    def reduction(self, u: UOp, r: Read, made: list[UOp]) -> UOp:
        reduce = u.src[0] if u.op is Ops.GEP else u
        context = self.contexts[r.context]
        ranges = context.reduce_ranges or ()
        combiner = reduce.arg[0]
        if context.reduces == 1 and len(made) == 1:
            used = sy.ranges_of(made[0])
            free = [x for x in ranges if x not in used]
            if combiner in ("MAX", "MIN", "AND", "OR"):
                ranges = tuple(x for x in ranges if x in used)
            elif combiner == "ADD" and free:
                count = math.prod(dim_of(x.src[0]) for x in free)
                ranges = tuple(x for x in ranges if x in used)
                made = [UOp(Ops.MUL, u.dtype, (made[0], number_of(count, u.dtype)))]
        component = u.arg if u.op is Ops.GEP else 0
        if not ranges:
            return made[component]
        node = UOp(Ops.REDUCE, made[0].dtype, (*made, *ranges), (combiner, len(made)))
        return UOp(Ops.GEP, u.dtype, (node,), component) if u.op is Ops.GEP else node


_ON_INDEX = {op: sy.SIMPLIFIERS[op] for op in (Ops.ADD, Ops.SUB, Ops.MUL, Ops.CMPLT, Ops.CMPLE)}


def elementwise(u: UOp, made: list[UOp]) -> UOp:
    """The node u over the expressions `made`. Integers that come from IOTA stay index arithmetic while they cannot overflow, so that
    a causal mask is a gate over ranges: CAST(i) ≤ CAST(j) → i ≤ j. Beyond 32 bits they are numbers: devices have indices of 32 bits."""
    rule = _ON_INDEX.get(u.op)
    if rule is not None and made[0].dtype.is_int and any(m.op is Ops.CAST for m in made):
        operands = [as_index(m) for m in made]
        if None not in operands:
            a, b = (o for o in operands if o is not None)
            result = rule(a, b)
            if result.dtype == dtypes.bool:
                return result
            lo, hi = sy.bounds(result)
            if max(u.dtype.min, dtypes.int32.min) <= lo and hi <= min(u.dtype.max, dtypes.int32.max):
                return UOp.const(u.dtype, result.arg) if result.op is Ops.CONST else result.cast(u.dtype)
    return UOp(u.op, u.dtype, tuple(made))


def as_index(value: UOp) -> UOp | None:
    """The index expression of an integer value; None if the value is not an index expression."""
    if value.op is Ops.CONST:
        return sy.const(int(value.arg))
    if value.op is not Ops.CAST or value.src[0].dtype != dtypes.index:
        return None
    lo, hi = sy.bounds(value.src[0])
    return value.src[0] if value.dtype.min <= lo and hi <= value.dtype.max else None


def reduce_extents(u: UOp) -> Shape:
    """Extents of the reduced axes of a REDUCE_AXIS (or of its GEP), without extents of 1."""
    reduce = u.src[0] if u.op is Ops.GEP else u
    shape = shape_of(reduce.src[0])
    return tuple(shape[a] for a in reduce.arg[1] if shape[a] != 1)


def bound_indices(ast: UOp) -> UOp:
    """`ast` with bounds on the PARAMs that hold indices of GATHERs. The bounds come from the gates 0 ≤ CAST(value) < n around the
    accesses that use the indices."""
    limits: dict[UOp, int] = {}
    for u in ast.walk(Ops.CMPLT):
        index, limit = u.src
        if index.op is Ops.CAST and index.dtype == dtypes.index and limit.op is Ops.CONST:
            for load in index.src[0].walk(Ops.LOAD):
                param = load.src[0].src[0]
                if param.dtype.is_int:
                    limits[param] = min(int(limit.arg), limits.get(param, int(limit.arg)))
    bounded = {p: p.replace(arg=replace(p.arg, vmin=0, vmax=n - 1)) for p, n in limits.items()}
    return ast.substitute(bounded) if bounded else ast


def pad_valid(u: UOp, coords: Coords) -> Valid | None:
    """The condition under which a PAD reads its source, at `coords` in the source; None if it never does."""
    valid: Valid | None = ()
    for c, n, (lo, hi) in zip(coords, shape_of(u.src[0]), u.arg[0], strict=True):
        if valid is not None and (lo != 0 or hi != 0):
            valid = within(valid, c, n, lo != 0, hi != 0)
    return valid


def within(valid: Valid, c: UOp, n: int, above: bool, below: bool) -> Valid | None:
    """`valid`, joined with 0 ≤ c if `above` and with c < n if `below`. n is an int or a Dim."""
    if not isinstance(n, Dim):
        return sy.constrain(valid, c, 0 if above else None, n - 1 if below else None)
    lower = sy.constrain(valid, c, 0, None) if above else valid
    return sy.constrain(lower, sy.sub(c, n.expr), None, -1) if below and lower is not None else lower


def outside(r: Read, value: UOp) -> UOp:
    """`value` where the read is valid, its alternative elsewhere."""
    if r.alt is None or not r.valid or r.alt is value:
        return value
    return UOp(Ops.WHERE, value.dtype, (sy.gate_of(r.valid), value, r.alt))


def _is_inside(index: UOp, size: int) -> bool:
    """Whether an index lies in a buffer of `size` elements, whatever the ranges are."""
    least, most = sy.bounds(index)
    return least >= 0 and most < size


def rangeify(outputs: Sequence[StoreOutput], constants: frozenset[UOp] = frozenset()) -> tuple[UOp, tuple[UOp, ...]]:
    """(AST, buffers by slot) of the kernel that stores `outputs`: targets first, then the BUFFERs read in topological order.

    The nodes between `outputs` and BUFFERs must be of the graph level without CONTIGUOUS, COPY, ASSIGN, DETACH, and have no
    extent 0. A BUFFER in `constants` becomes a PARAM marked constant. The AST is not yet canonical. Raises ScheduleError."""
    buffers: dict[UOp, None] = {}
    for o in outputs:
        node = o.target
        while node.op is not Ops.BUFFER:
            node = node.src[0]
        buffers[node] = None
    root = UOp(Ops.SINK, dtypes.void, tuple(o.value for o in outputs))
    for u in root.toposort(gate=lambda n: n.op is not Ops.BUFFER):
        if u.op is Ops.BUFFER:
            buffers[u] = None
    params = {b: UOp(Ops.PARAM, b.dtype, (), Param(slot, b.arg, b in constants)) for slot, b in enumerate(buffers)}
    return Rangeifier(outputs, params).run(), tuple(buffers)
