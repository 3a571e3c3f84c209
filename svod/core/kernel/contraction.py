"""Recognizes contractions: stages that are sums of products of two factors. Used by intrinsics, by sketches, by algorithms, and to skip
products that are zero."""
from __future__ import annotations

from collections.abc import Iterable
from math import inf, prod
from typing import NamedTuple

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import Kernel, Node, ResolvedStage, linear_of, own_reduces
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.scheduler import LOOP, Scheduler
from svod.errors import KernelOptError

# A loop skips iterations only if few enough of them remain, as its bounds cost a few instructions.
_MOST_SHARE = 0.75              # largest share of iterations that may remain
_MOST_SHARE_AROUND_LOOPS = 0.95 # the same, for a loop with `_MANY_INSIDE` iterations of other loops in it
_MANY_INSIDE = 8                # iterations of the loops inside


def product_of(r: ResolvedStage) -> Node | None:
    """The product that a stage sums, without conversions around it; None if the stage is not one sum of products."""
    if len(r.reductions) != 1 or r.reductions[0].combiner != "ADD":
        return None
    node, = through_casts(r, r.reductions[0].values)
    return r.nodes[node] if r.nodes[node].kind == "alu" and r.nodes[node].op == "MUL" else None


def summed_product(value: UOp) -> tuple[UOp, tuple[UOp, UOp]]:
    """The sum in a stage's value, and the reads of its two factors. Raises KernelOptError unless it sums products of float32 that stages
    hold."""
    reduces = own_reduces(value)
    if len(reduces) != 1 or reduces[0].arg != ("ADD", 1) or reduces[0].src[0].op is not Ops.MUL:
        raise KernelOptError("its value is not one sum of products")
    first, second = reduces[0].src[0].src
    if any(f.op is not Ops.INDEX or f.src[0].op is not Ops.STAGE or f.dtype != dtypes.float32 for f in (first, second)):
        raise KernelOptError("it does not sum up products of float32 that stages hold")
    return reduces[0], (first, second)


def through_casts(r: ResolvedStage, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Replace each node that is a conversion by the node that it converts."""
    out = []
    for n in nodes:
        while r.nodes[n].kind == "cast":
            n = r.nodes[n].src[0]
        out.append(n)
    return tuple(out)


class Window(NamedTuple):
    """The positions where a factor of a sum may be nonzero: low ≤ step·o + apart·q < high, with position o of an output axis and q of a
    reduce axis. `apart` is positive."""

    output: int         # local axes: `output` has the positions o, `summed` the positions q
    summed: int
    step: int
    apart: int
    low: int
    high: int
    share: float = 1.0  # share of the pairs of positions that may be nonzero

    @property
    def is_small(self) -> bool:
        """Whether skipping pays whatever the loop contains."""
        return self.share <= _MOST_SHARE

    def reach(self, tile: int) -> tuple[int, int]:
        """The least and the largest step·(o - start) of a tile of output positions that begins at `start`."""
        ends = 0, self.step * (tile - 1)
        return min(ends), max(ends)

    def used(self, tile: int, outputs: int, summed: int) -> float:
        """The share of reduce positions that are not skipped, on average over the tiles. `tile`: output positions of a tile; `outputs`,
        `summed`: extents of both axes."""
        starts = range(0, outputs, tile)
        kept, (least, most) = 0, self.reach(tile)
        for start in starts:
            first = -(-(self.low - self.step * start - most) // self.apart)
            last = (self.high - 1 - self.step * start - least) // self.apart
            kept += max(0, min(last, summed - 1) - max(first, 0) + 1)
        return kept / (len(starts) * summed)


def skipping_window(state: Scheduler, r: ResolvedStage, summed: int, pieces: tuple[EmittedLoop, ...]) -> Window | None:
    """The window outside of which the loop over a reduce axis may skip iterations, because they add zeros: in a convolution with wide
    padding, taps that lie in the padding. None if the axis is split (`pieces`), or too few iterations would be skipped."""
    assert r.axes[summed] >= 0, "the parts of a sum are no axis of the kernel, and none of them is skipped"
    s, axis = r.stage.index, state.kernel.axes[r.axes[summed]]
    if state.dots[s] is not None or state.target.has_groups or any(state.pads) \
            or (state.split_reduce is not None and state.split_reduce.axis == axis.index) \
            or sum(p.extent > 1 for p in pieces) != 1 or not any(p.role == LOOP and p.extent == axis.extent for p in pieces):
        return None
    window = windows_of(state.kernel, s).get(summed)
    if window is None or window.is_small:
        return window
    rows = [state.rows[row] for row in state.order[s]]
    inside = rows[max(i for i, row in enumerate(rows) if row.axis == axis.index) + 1:]
    return window if prod([row.extent for row in inside]) >= _MANY_INSIDE else None


def windows_of(kernel: Kernel, s: int) -> dict[int, Window]:
    """The windows that let loops over reduce axes of a stage skip iterations: reduce axis → the window that leaves the fewest. Axes
    whose loops would skip too few iterations are left out. Cached on the kernel."""
    found: dict[int, Window] | None = kernel.windows.get(s)
    if found is None:
        stage = kernel.stages[s]
        extents = [kernel.axes[a].extent for a in (*stage.outs, *stage.reds)]
        windows = [w._replace(share=w.used(1, extents[w.output], extents[w.summed])) for w in _windows_of(kernel, s)]
        best = [min((w for w in windows if w.summed == q), key=lambda w: w.share) for q in dict.fromkeys([w.summed for w in windows])]
        found = kernel.windows[s] = {w.summed: w for w in best if w.share <= _MOST_SHARE_AROUND_LOOPS}
    return found


def _windows_of(kernel: Kernel, s: int) -> tuple[Window, ...]:
    """All windows of the factors of a stage."""
    r = kernel.resolve(frozenset())[s]
    product = product_of(r) if r is not None else None
    if r is None or product is None:
        return ()
    outs, found = len(r.stage.outs), []
    extents = [kernel.axes[a].extent for a in r.axes]
    for node in (r.nodes[n] for n in through_casts(r, product.src)):
        if node.kind != "read":
            continue
        inner = kernel.resolve(frozenset())[node.arg]
        assert inner is not None        # nothing is inlined
        for form, (low, high) in _nonzero_ranges(inner).items():
            if any(node.dims[dim].atoms for dim, _ in form):
                continue
            shift = sum(c * node.dims[dim].const for dim, c in form)
            moved = _added([(node.dims[dim].coefs, c) for dim, c in form])
            if len(moved) != 2 or any(kernel.axes[r.axes[a]].bound is not None for a in moved):
                continue
            (a, step), (q, apart) = sorted(moved.items())       # outputs come first
            if apart < 0:
                step, apart, low, high, shift = -step, -apart, 1 - high, 1 - low, -shift
            if a < outs <= q:
                least, most = min(0, step * (extents[a] - 1)), max(0, step * (extents[a] - 1)) + apart * (extents[q] - 1)
                found.append(Window(a, q, step, apart, int(max(low - shift, least)), int(min(high - shift, most + 1))))
    return tuple(found)


Coefs = tuple[tuple[int, int], ...]     # (local axis, factor) of the terms of a sum of axes


def _added(forms: Iterable[tuple[Coefs, int]]) -> dict[int, int]:
    """The sum of sums of axes, each times a number: local axis → factor."""
    total: dict[int, int] = {}
    for form, times in forms:
        for a, c in form:
            total[a] = total.get(a, 0) + c * times
    return {a: c for a, c in sorted(total.items()) if c}


def _nonzero_ranges(r: ResolvedStage) -> dict[Coefs, tuple[float, float]]:
    """Sums of dims of a stage with a range outside of which its value is 0: sum → (first value, end). The first factor is positive."""
    value = r.nodes[through_casts(r, (r.value,))[0]]
    gate, other = (value.gate, value.alt) if value.kind == "load" else (value.src[0], value.src[2]) if value.op == "WHERE" else (-1, -1)
    if gate < 0 or r.nodes[other].kind != "const" or r.nodes[other].arg != 0:
        return {}
    ranges: dict[Coefs, tuple[float, float]] = {}
    todo = [gate]
    while todo:
        n = r.nodes[todo.pop()]
        if n.op == "AND":
            todo += n.src
        if n.op not in ("CMPLT", "CMPLE"):
            continue
        x, y = [linear_of(r, i) for i in n.src]
        form, end = tuple(_added([(x.coefs, 1), (y.coefs, -1)]).items()), y.const - x.const + (n.op == "CMPLE")     # form < end
        if not form or x.atoms or y.atoms:
            continue
        is_upper = form[0][1] > 0
        form = form if is_upper else tuple([(a, -c) for a, c in form])
        low, high = ranges.get(form, (-inf, inf))
        ranges[form] = (low, min(high, end)) if is_upper else (max(low, 1 - end), high)
    return ranges
