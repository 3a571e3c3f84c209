"""ONLINE: computes a row's maximum, the sum of exponentials relative to it, and a sum weighted by them in one pass over blocks of the row.

    M[c]      = max_k X[c, k]                          MB[c, b] = max_i X[c, b*B + i]
    S[c]      = Σ_k exp(X[c, k] - M[c])                PB[c, b, i] = exp(X[c, b*B + i] - MB[c, b])
    y[c, n]   = Σ_k exp(X[c, k] - M[c]) / S[c]         SB[c, b] = Σ_i PB[c, b, i]
                    · V[k, n]                          YB[c, n, b] = Σ_i PB[c, b, i] · V[b*B + i, n]
                                                       (m, s, a) = EXPSUM over b of (MB[c, b], SB[c, b], YB[c, n, b]);  y[c, n] = a / s

If the graph rounds weights to 16 bits before it multiplies them, they are rounded block by block: relative to the block's maximum, before
the division. Maxima and sums use the unrounded weights, and a rounding of the scores to 16 bits is left out. The factors of the product
become stages, [c, b, i] and [n, b, i], so that the sum over a block is a contraction for matrix instructions.

Results of a block are relative to its own maximum. The combiner EXPSUM scales them to the larger maximum when it combines two blocks, so
blocks are independent: a REDUCE over them may be serial, side by side, or shared among cores. If the maximum is read outside of such a sum
(softmax, log-softmax), (m, s) of a row are a stage R[c, j] of two elements, and M[c], S[c] become R[c, 0], R[c, 1].

The result is an AST of the same grammar with the same parameters, whose stages the other opts place and tile. A row that B does not divide
is padded: its stages become longer and their loads gated, with -inf for X and 0 for the weighted values. A row that is -inf throughout
gives 0/0 = NaN, as it does without ONLINE.

After M. Milakov and N. Gimelshein, arXiv:1805.02867, and T. Dao et al., arXiv:2205.14135.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.algorithms.extension import Extension, Ranges
from svod.core.kernel.intrinsics import LEAST_POWER
from svod.core.kernel.kernel import Kernel, Stage, expand_reads, own_reduces, reduce_parts
from svod.errors import KernelOptError

PAIR = 2        # elements of a row's (maximum, sum)
PER_LN2 = 1.4426950216293335    # 1/ln 2, rounded to float32
SCALES = 1e-30, 1e30            # a constant factor of the scores is taken out of them only between these bounds


def online(kernel: Kernel, name: str, block: int) -> Kernel:
    """Rewrite a kernel: the rows of the maximum stage `name` are computed in blocks of `block` positions. Raises KernelOptError with the
    reason."""
    return kernel.rewritten("ONLINE", name, block, lambda: _rewrite(kernel, name, block))


def _rewrite(kernel: Kernel, name: str, block: int) -> UOp:
    rows = _match_rows(kernel, name)
    if not 1 < block < rows.extent:
        raise KernelOptError(f"a block is 2 to {rows.extent - 1} of the {rows.extent} positions of the row, not {block}")
    kernel = _with_bare_sum(kernel, rows)
    sums, readers = _find_sums(kernel, rows)
    weighted = _match_weighted(kernel, rows, sums, readers[0]) if len(readers) == 1 else None
    if weighted is not None:
        exact = rows if weighted.rounded is None else _unscaled(rows._replace(source=_unrounded(rows.source)))
        return _Rewriter(kernel, exact, block).weighted_sum(readers[0], weighted, sums)
    if sums is None:
        raise KernelOptError(f"stage {name} is a maximum, and no stage sums up exp(x - maximum) over the same row")
    below = set(rows.source.toposort())
    if any(s.has_reduce and s.node in below for s in kernel.stages):
        raise KernelOptError(f"what stage {name} is the maximum of is a sum itself, and something other than one weighted sum reads it "
                             f"again after the row: it would be computed twice")
    return _Rewriter(kernel, rows, block).pair(sums)


def is_pair(kernel: Kernel, axis: int) -> bool:
    """Whether an axis distinguishes the two elements of a (maximum, sum) stage."""
    stage = kernel.stages[kernel.axes[axis].stage]
    return stage.has_reduce and not stage.is_output and stage.outs[-1:] == (axis,) and stage.value.op is Ops.WHERE \
        and [r.arg[0] for r in own_reduces(stage.value)] == ["EXPSUM"]


# -- the stages of the kernel -----------------------------------------------------------------------

class _RowMaximum(NamedTuple):
    """A maximum over rows: M[c] = max_k X[…]."""

    stage: UOp                      # the stage: STAGE(REDUCE(INDEX(X, …), k; MAX), c…)
    source: UOp                     # X, the stage that has the rows
    at: tuple[int | UOp, ...]       # per dim of X: the number of a coordinate c, -1 for k, or a constant
    extent: int                     # number of positions k
    scale: float = 1.0              # factor by which X still has to be multiplied

    def read(self, coords: tuple[UOp, ...], k: UOp) -> UOp:
        """The read of X at position `k` of the row with these coordinates."""
        return UOp(Ops.INDEX, self.source.dtype, (self.source, *self.dims(coords, k)))

    def dims(self, coords: tuple[UOp, ...], k: UOp) -> tuple[UOp, ...]:
        return tuple(a if isinstance(a, UOp) else k if a < 0 else coords[a] for a in self.at)


def _match_rows(kernel: Kernel, name: str) -> _RowMaximum:
    stage = kernel.stage_named(name)
    value = stage.value
    if stage.is_output or value.op is not Ops.REDUCE or value.arg != ("MAX", 1) or len(stage.reds) != 1 or not stage.dtype.is_float:
        raise KernelOptError(f"stage {name} is not the maximum of floats over one reduce axis")
    if any(kernel.axes[a].bound is not None for a in stage.outs + stage.reds):
        raise KernelOptError(f"how many positions stage {name} has depends on a variable; ONLINE cuts rows of a constant extent")
    (read,), (k,) = reduce_parts(value)
    own = stage.node.src[1:]
    if read.op is not Ops.INDEX or read.src[0].op is not Ops.STAGE:
        raise KernelOptError(f"stage {name} is not the maximum of values of one stage")
    at: list[int | UOp] = []
    for e in read.src[1:]:
        if e is k:
            at.append(-1)
        elif e in own:
            at.append(own.index(e))
        elif e.op is Ops.CONST:
            at.append(e)
        else:
            raise KernelOptError(f"stage {name} does not read its row position by position")
    if at.count(-1) != 1 or sorted(a for a in at if isinstance(a, int) and a >= 0) != list(range(len(own))):
        raise KernelOptError(f"stage {name} does not read each position of its row once")
    return _RowMaximum(stage.node, read.src[0], tuple(at), kernel.axes[stage.reds[0]].extent)


def _touching(kernel: Kernel, members: tuple[UOp, ...]) -> tuple[set[UOp], list[Stage]]:
    """The readers of the stages in `members`, directly or through elementwise stages: (the elementwise readers; the readers with loops
    of their own)."""
    through: set[UOp] = set()
    readers = []
    for s in kernel.stages:
        if s.node in members:
            continue
        reads = {u.src[0] for u in s.value.toposort(gate=lambda n: n.op is not Ops.STAGE) if u.op is Ops.INDEX}
        if reads & (through | set(members)):
            if s.is_output or s.has_reduce:
                readers.append(s)
            else:
                through.add(s.node)
    return through, readers


def _weight(rows: _RowMaximum, u: UOp) -> tuple[tuple[UOp, ...], UOp] | None:
    """Match exp(X[…] - M[…]): (coordinates of the row, position in it); None if `u` is something else."""
    if u.op is not Ops.EXP or u.src[0].op is not Ops.SUB:
        return None
    x, m = u.src[0].src
    if x.op is not Ops.INDEX or x.src[0] is not rows.source or m.op is not Ops.INDEX or m.src[0] is not rows.stage:
        return None
    coords = m.src[1:]
    k = x.src[1 + rows.at.index(-1)]
    return (coords, k) if rows.dims(coords, k) == x.src[1:] else None


def _find_sums(kernel: Kernel, rows: _RowMaximum) -> tuple[Stage | None, list[Stage]]:
    """Find the stage that sums exp(X - M) over each row: (that stage or None, the other stages with loops that read M or the sum)."""
    through, readers = _touching(kernel, (rows.stage,))
    for s in readers:
        if s.is_output or len(s.reds) != 1 or [r.arg for r in own_reduces(s.value)] != [("ADD", 1)]:
            continue
        reduce, = own_reduces(s.value)
        weight = _weight(rows, expand_reads(reduce.src[0], through.__contains__))
        if weight is not None and weight == (s.node.src[1:], reduce.src[1]):
            _, readers = _touching(kernel, (rows.stage, s.node))
            return s, readers
    return None, readers


def _with_bare_sum(kernel: Kernel, rows: _RowMaximum) -> Kernel:
    """Rewrite the kernel so that the sum of exp(X - M) is a separate stage. Needed if its stage computes further with the sum, such as 1
    / sum."""
    sums, _ = _find_sums(kernel, rows)
    if sums is None or sums.value.op is Ops.REDUCE:
        return kernel
    reduce, = own_reduces(sums.value)
    bare = UOp(Ops.STAGE, reduce.dtype, (reduce, *sums.node.src[1:]))
    number = 1 + max(u.arg for u in kernel.ast.toposort() if u.op is Ops.RANGE)
    fresh = {r: r.replace(arg=number + i) for i, r in enumerate(sums.node.src[1:])}
    read = UOp(Ops.INDEX, bare.dtype, (bare, *fresh.values()))
    rest = sums.value.substitute({**fresh, reduce: read})
    return Kernel(kernel.ast.substitute({sums.node: UOp(Ops.STAGE, rest.dtype, (rest, *fresh.values()))}))


def _unrounded(stage: UOp) -> UOp:
    """Remove the rounding of a stage's sums to 16 bits and back, so that weights are computed from exact scores."""
    rounded = {u: u.src[0].src[0] for u in stage.src[0].toposort(gate=lambda n: n.op is not Ops.STAGE)
               if u.op is Ops.CAST and u.src[0].op is Ops.CAST and u.src[0].src[0].op is Ops.REDUCE and u.src[0].src[0].dtype == u.dtype
               and u.src[0].dtype.is_float and u.src[0].dtype.bits == 16}
    return stage.replace(src=(stage.src[0].substitute(rounded), *stage.src[1:])) if rounded else stage


def _unscaled(rows: _RowMaximum) -> _RowMaximum:
    """Move a positive constant factor of `rows.source` to `rows.scale`, so that it multiplies each maximum instead of every element."""
    value = rows.source.src[0]
    masked = value.op is Ops.WHERE and value.src[2].op is Ops.CONST and value.src[2].arg == -math.inf
    product = value.src[1] if masked else value
    if product.op is not Ops.MUL or product.src[1].op is not Ops.CONST or not SCALES[0] < product.src[1].arg < SCALES[1]:
        return rows
    bare = value.replace(src=(value.src[0], product.src[0], value.src[2])) if masked else product.src[0]
    return rows._replace(source=rows.source.replace(src=(bare, *rows.source.src[1:])), scale=float(product.src[1].arg))


class Limit(NamedTuple):
    """A bound on the blocks that a mask leaves: block b is completely masked for every row q with const + step·q + apart·b < 0. `output`:
    the local axis of the output stage along which q runs."""

    output: int
    const: int
    step: int
    apart: int

    def blocks(self, first: int, last: int, count: int) -> tuple[int, int]:
        """The range of blocks (start, stop) outside of which all of `count` blocks are masked, for all rows from `first` to `last`."""
        reach = self.const + max(self.step * first, self.step * last)
        if self.apart < 0:
            return 0, min(count, max(0, reach - self.apart) // -self.apart)
        return min(count, (max(0, -reach) + self.apart - 1) // self.apart), count


def masked_limits(kernel: Kernel) -> tuple[Limit, ...]:
    """The bounds on the blocks of keys that a mask leaves (causal masks, windows), cached on the kernel. A block whose scores are all -inf
    adds nothing. Masks are recognized as comparisons of the row with the key."""
    if kernel.limits is None:
        kernel.limits = tuple(_limits_of(kernel))
    return kernel.limits


def _limits_of(kernel: Kernel) -> Iterator[Limit]:
    resolved = kernel.resolve(frozenset())
    out = resolved[kernel.output]
    if out is None or [red.combiner for red in out.reductions] != ["EXPSUM"]:
        return
    peak = out.nodes[out.reductions[0].values[0]]
    blocks = resolved[peak.arg] if peak.kind == "read" else None
    read = next((n for n in blocks.nodes if n.kind == "read"), None) if blocks is not None else None
    if blocks is None or read is None:
        return
    source, inside = kernel.stages[read.arg].node, len(blocks.stage.outs)
    if any(lin.atoms for lin in (*peak.dims, *read.dims)):
        return
    for terms, const in _kept_where(source.src[0]):
        total: dict[int, int] = {}          # local axis of the output stage → coefficient
        for dim, r in enumerate(source.src[1:]):
            k = terms.pop(r, 0)
            const += k * read.dims[dim].const
            for a, c in read.dims[dim].coefs:
                if a >= inside:             # take the position of a block that is unmasked for the most rows
                    const += max(0, k * c) * (kernel.axes[blocks.axes[a]].extent - 1)
                    continue
                const += k * c * peak.dims[a].const
                for q, of_output in peak.dims[a].coefs:
                    total[q] = total.get(q, 0) + k * c * of_output
        apart = total.pop(len(out.stage.outs), 0)
        rows = [(q, c) for q, c in total.items() if c]
        if apart and len(rows) == 1 and not terms:
            yield Limit(rows[0][0], const, rows[0][1], apart)


def kept_blocks(kernel: Kernel, limits: Iterable[Limit], count: int, tiles: Sequence[int]) -> float:
    """The average number of blocks, out of `count`, that limits leave. `tiles`: per local axis of the output stage, the rows computed
    together."""
    kept = float(count)
    for limit in limits:
        rows = tiles[limit.output]
        extent = kernel.axes[kernel.stages[kernel.output].outs[limit.output]].extent
        ranges = [limit.blocks(first, first + rows - 1, count) for first in range(0, extent, rows)]
        kept *= sum(max(0, stop - start) for start, stop in ranges) / (count * len(ranges))
    return kept


def _kept_where(value: UOp) -> Iterator[tuple[dict[UOp, int], int]]:
    """Linear expressions (coefficient of each range, constant) that are not negative wherever a value is not -inf."""
    if value.op is not Ops.WHERE or value.src[2].op is not Ops.CONST or value.src[2].arg != -math.inf:
        return
    todo = [value.src[0]]
    while todo:
        u = todo.pop()
        if u.op is Ops.AND:
            todo += u.src
        elif u.op in (Ops.CMPLT, Ops.CMPLE) and u.src[0].dtype is dtypes.index:
            low, high = (_sum_of_ranges(x) for x in u.src)
            if low is not None and high is not None:
                terms = {r: high[0].get(r, 0) - low[0].get(r, 0) for r in (*low[0], *high[0])}
                yield terms, high[1] - low[1] - (u.op is Ops.CMPLT)
    yield from _kept_where(value.src[1])


def _sum_of_ranges(u: UOp) -> tuple[dict[UOp, int], int] | None:
    """Match Σ coefficient·range + constant: (coefficients, constant); None for other expressions."""
    terms: dict[UOp, int] = {}
    const, todo = 0, [(u, 1)]
    while todo:
        e, k = todo.pop()
        if e.op is Ops.CONST:
            const += k * e.arg
        elif e.op is Ops.RANGE:
            terms[e] = terms.get(e, 0) + k
        elif e.op in (Ops.ADD, Ops.SUB):
            todo += [(e.src[0], k), (e.src[1], k if e.op is Ops.ADD else -k)]
        elif e.op is Ops.MUL and e.src[1].op is Ops.CONST:
            todo.append((e.src[0], k * e.src[1].arg))
        else:
            return None
    return terms, const


class _Weighted(NamedTuple):
    """A weighted sum: Σ_k exp(X[c, k] - M[c]) · Π inner · Π outer."""

    value: UOp                      # the stage's value, with the stages that it reads in place expanded
    coords: tuple[UOp, ...]         # coordinates c of the row, over the ranges of the stage
    inner: tuple[UOp, ...]          # factors that depend on k
    outer: tuple[UOp, ...]          # factors that do not depend on k
    rounded: DType | None           # dtype to which the weights are rounded before they are multiplied, or None


def _match_weighted(kernel: Kernel, rows: _RowMaximum, sums: Stage | None, stage: Stage) -> _Weighted | None:
    """Match the only reader of a maximum as a weighted sum over the row; None if it is something else."""
    if len(stage.reds) != 1 or len(own_reduces(stage.value)) != 1 or kernel.axes[stage.reds[0]].extent != rows.extent:
        return None
    members = (rows.stage,) if sums is None else (rows.stage, sums.node)
    through, _ = _touching(kernel, members)
    value = expand_reads(stage.value, through.__contains__)
    reduce, = own_reduces(value)
    k = kernel.axes[stage.reds[0]].node
    if reduce.arg != ("ADD", 1) or reduce.dtype != rows.source.dtype:
        return None
    weights, inner, outer = [], [], []
    rounded, factors = _without_rounding(reduce.src[0], rows)
    for f in factors:
        coords, along = _weight(rows, f) or ((), None)
        if along is k:
            weights.append(coords)
        elif k in f.toposort(gate=lambda n: n.op is not Ops.STAGE):
            inner.append(f)
        else:
            outer.append(f)
    if len(weights) != 1 or not inner:
        return None
    coords = weights[0]
    ranges = stage.node.src[2:] if stage.is_output else stage.node.src[1:]
    if not all(c in ranges or c.op is Ops.CONST for c in coords):
        return None
    rest = value.substitute({reduce: UOp.const(reduce.dtype, 0)})
    if _reads_of(inner, members) or any(u.src[1:] != coords for u in _reads_of((rest, *outer), members)):
        return None
    return _Weighted(value, coords, tuple(inner), tuple(outer), rounded)


def _without_rounding(product: UOp, rows: _RowMaximum) -> tuple[DType | None, list[UOp]]:
    """(the dtype to which the factor with the weight is rounded, or None; all factors of the product, with the rounded one split into its
    own factors)."""
    rounded: DType | None = None
    factors = []
    for f in _factors(product):
        own = _factors(f.src[0].src[0]) if f.op is Ops.CAST and f.src[0].op is Ops.CAST and f.src[0].src[0].dtype == f.dtype else []
        if any(_weight(rows, x) for x in own):
            rounded = f.src[0].dtype
            factors += own
        else:
            factors.append(f)
    return rounded, factors


def _reads_of(values: Iterable[UOp], stages: tuple[UOp, ...]) -> list[UOp]:
    """The reads of any of these stages in some values."""
    return [u for v in values for u in v.toposort(gate=lambda n: n.op is not Ops.STAGE) if u.op is Ops.INDEX and u.src[0] in stages]


def _factors(u: UOp) -> list[UOp]:
    if u.op is Ops.MUL:
        return _factors(u.src[0]) + _factors(u.src[1])
    if u.op is Ops.FDIV:
        return [*_factors(u.src[0]), UOp(Ops.RECIPROCAL, u.dtype, (u.src[1],))]
    return [u]


# -- the stages in blocks ---------------------------------------------------------------------------

class _Rewriter:
    """Builds the stages that compute in blocks."""

    def __init__(self, kernel: Kernel, rows: _RowMaximum, block: int):
        self.kernel, self._old, self.rows, self.block = kernel, rows, rows, block
        self.count = -(-rows.extent // block)
        self.ranges = Ranges(kernel.ast)
        self.ragged = rows.extent % block != 0
        self.extension = Extension(self.ranges, rows.extent, self.count * block)
        if self.ragged:
            self.rows = rows._replace(source=self.extension.stage(rows.source, rows.at.index(-1), -math.inf))

    def _index(self, stage: UOp, *dims: UOp) -> UOp:
        return UOp(Ops.INDEX, stage.dtype, (stage, *dims))

    def _position(self, b: UOp, i: UOp) -> UOp:
        return b * self.block + i

    def _blocks(self, rounded: bool) -> tuple[UOp, Callable[[tuple[UOp, ...], UOp, UOp], UOp]]:
        """(the stage MB of block maxima, a function that builds exp(X - MB) at a row, block and position). `rounded`: weights are
        rounded to 16 bits later, so they may be computed as 2^(X/ln 2 - MB/ln 2), one operation less, with an error of 2^-24 of the
        larger term. Weights too small for a normal number then become 0, which is exact enough, as the largest weight of a block is 1."""
        rows = self.rows
        coords, b, i = self.ranges.like(*rows.stage.src[1:]), self.ranges.new(self.count), self.ranges.new(self.block)
        peak = UOp(Ops.REDUCE, rows.source.dtype, (rows.read(coords, self._position(b, i)), i), ("MAX", 1))
        if rows.scale != 1.0:
            peak = UOp(Ops.MUL, peak.dtype, (peak, UOp.const(peak.dtype, rows.scale)))
        peaks = UOp(Ops.STAGE, peak.dtype, (peak, *coords, b))
        low = UOp.const(peak.dtype, -math.inf)

        def weight(coords: tuple[UOp, ...], b: UOp, i: UOp) -> UOp:
            m = self._index(peaks, *coords, b)
            # exp(-inf - 0) is 0: a block whose scores are all -inf weighs nothing
            m = UOp(Ops.WHERE, m.dtype, (UOp(Ops.CMPEQ, dtypes.bool, (m, low)), UOp.const(m.dtype, 0), m))
            if rounded:
                per_ln2 = UOp.const(m.dtype, PER_LN2)
                apart = UOp(Ops.NEG, m.dtype, (UOp(Ops.MUL, m.dtype, (m, per_ln2)),))
                x = rows.read(coords, self._position(b, i))
                power = UOp(Ops.MULACC, m.dtype, (x, UOp.const(m.dtype, rows.scale * PER_LN2), apart))
                tiny = UOp(Ops.CMPLT, dtypes.bool, (power, UOp.const(m.dtype, LEAST_POWER)))
                return UOp(Ops.WHERE, m.dtype, (tiny, UOp.const(m.dtype, 0), UOp(Ops.EXP2, m.dtype, (power,))))
            return UOp(Ops.EXP, m.dtype, (UOp(Ops.SUB, m.dtype, (rows.read(coords, self._position(b, i)), m)),))
        return peaks, weight

    def _sum(self, dtype: DType, value: UOp, i: UOp, ranges: tuple[UOp, ...]) -> UOp:
        return UOp(Ops.STAGE, dtype, (UOp(Ops.REDUCE, dtype, (value, i), ("ADD", 1)), *ranges))

    def _rounded(self, weights: UOp, dtype: DType) -> UOp:
        """A stage with the weights rounded to a narrower dtype, and widened again."""
        ranges = self.ranges.like(*weights.src[1:])
        narrow = UOp(Ops.CAST, dtype, (self._index(weights, *ranges),))
        return UOp(Ops.STAGE, weights.dtype, (UOp(Ops.CAST, weights.dtype, (narrow,)), *ranges))

    def _of_blocks(self, factor: UOp, k: UOp, b: UOp, i: UOp) -> UOp:
        """Make a factor of the weights a separate stage with dims for block and position, and return the read of it at block `b`, position
        `i`."""
        value = expand_reads(factor, lambda s: s.op is Ops.STAGE and not own_reduces(s.src[0]))
        own = [r for r in value.toposort(gate=lambda n: n.op is not Ops.STAGE) if r.op is Ops.RANGE and r is not k]
        at, inside = self.ranges.new(self.count), self.ranges.new(self.block)
        fresh = {r: self.ranges.new(r.src[0].arg) for r in own}
        value = value.substitute({**fresh, k: self._position(at, inside)})
        return self._index(UOp(Ops.STAGE, value.dtype, (value, *fresh.values(), at, inside)), *own, b, i)

    def weighted_sum(self, stage: Stage, weighted: _Weighted, sums: Stage | None) -> UOp:
        """Rewrite attention: maximum, sum and weighted sum become one reduction, in `stage`. Returns the new AST."""
        dtype = self.rows.source.dtype
        peaks, weight = self._blocks(weighted.rounded is not None)
        coords, b, i = self.ranges.like(*self.rows.stage.src[1:]), self.ranges.new(self.count), self.ranges.new(self.block)
        weights = UOp(Ops.STAGE, dtype, (weight(coords, b, i), *coords, b, i))
        coords, b, i = self.ranges.like(*self.rows.stage.src[1:]), self.ranges.new(self.count), self.ranges.new(self.block)
        totals = self._sum(dtype, self._index(weights, *coords, b, i), i, (*coords, b))
        k = self.kernel.axes[stage.reds[0]].node
        outs = [self.kernel.axes[a].node for a in stage.outs]
        fresh = {r: self.ranges.new(r.src[0].arg) for r in outs}
        b, i = self.ranges.new(self.count), self.ranges.new(self.block)
        factors = [self.extension.filled(f, k, 0) if self.ragged else f for f in weighted.inner]
        if weighted.rounded is not None:
            weights = self._rounded(weights, weighted.rounded)
            factors = [self._of_blocks(f, k, b, i) for f in factors]
        product = self._index(weights, *[fresh.get(c, c) for c in weighted.coords], b, i)
        fresh[k] = self._position(b, i)
        for f in factors:
            product = UOp(Ops.MUL, dtype, (product, f.substitute(fresh)))
        parts = self._sum(dtype, product, i, (*[fresh[r] for r in outs], b))
        b = self.ranges.new(self.count)
        values = (self._index(peaks, *weighted.coords, b), self._index(totals, *weighted.coords, b), self._index(parts, *outs, b))
        reduce = UOp(Ops.REDUCE, dtype, (*values, b), ("EXPSUM", 3))
        m, s, a = (UOp(Ops.GEP, dtype, (reduce,), j) for j in range(3))
        for f in weighted.outer:
            a = UOp(Ops.MUL, dtype, (a, f))
        old, = own_reduces(weighted.value)
        value = weighted.value.substitute({old: a})
        replaced = {u: m if u.src[0] is self._old.stage else s for u in value.toposort(gate=lambda n: n.op is not Ops.STAGE)
                    if u.op is Ops.INDEX and (u.src[0] is self._old.stage or (sums is not None and u.src[0] is sums.node))}
        value = value.substitute(replaced)
        node = stage.node
        new = node.replace(src=(node.src[0], value, *node.src[2:])) if stage.is_output else node.replace(src=(value, *node.src[1:]))
        return self.kernel.ast.substitute({node: new})

    def pair(self, sums: Stage) -> UOp:
        """Rewrite softmax: maximum and sum of a row become a stage of two elements, which all other stages read. Returns the new AST."""
        dtype = self.rows.source.dtype
        peaks, weight = self._blocks(False)
        coords, b, i = self.ranges.like(*self.rows.stage.src[1:]), self.ranges.new(self.count), self.ranges.new(self.block)
        totals = self._sum(dtype, weight(coords, b, i), i, (*coords, b))
        coords, j, b = self.ranges.like(*self.rows.stage.src[1:]), self.ranges.new(PAIR), self.ranges.new(self.count)
        total = self._index(totals, *coords, b)
        reduce = UOp(Ops.REDUCE, dtype, (self._index(peaks, *coords, b), total, total, b), ("EXPSUM", 3))
        first = UOp(Ops.CMPEQ, dtypes.bool, (j, UOp.const(dtypes.index, 0)))
        m, s = (UOp(Ops.GEP, dtype, (reduce,), n) for n in range(PAIR))
        both = UOp(Ops.STAGE, dtype, (UOp(Ops.WHERE, dtype, (first, m, s)), *coords, j))
        done: dict[UOp, UOp] = {}
        for u in self.kernel.ast.toposort():
            src = tuple(done[x] for x in u.src)
            if u.op is Ops.INDEX and u.src[0] in (self._old.stage, sums.node):
                which = UOp.const(dtypes.index, int(u.src[0] is sums.node))
                done[u] = self._index(both, *src[1:], which)
            else:
                done[u] = u if src == u.src else u.replace(src=src)
        return done[self.kernel.ast]
