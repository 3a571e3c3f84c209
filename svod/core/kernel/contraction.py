"""Recognizes contractions: stages that are sums of products of two factors. Used by intrinsics, by sketches, and to skip products that are
zero."""
from __future__ import annotations

from typing import NamedTuple

from svod.core.kernel.kernel import Kernel, Node, ResolvedStage
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.scheduler import LOOP, Scheduler

_WORTH = 0.75       # a loop skips iterations only if at most this share of them remains, as the bounds cost a few instructions


def product_of(r: ResolvedStage) -> Node | None:
    """The product that a stage sums, without conversions around it; None if the stage is not one sum of products."""
    if len(r.reductions) != 1 or r.reductions[0].combiner != "ADD":
        return None
    node, = through_casts(r, r.reductions[0].values)
    return r.nodes[node] if r.nodes[node].kind == "alu" and r.nodes[node].op == "MUL" else None


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
    reduce axis. `step` and `apart` are positive."""

    output: int         # local axes: `output` has the positions o, `summed` the positions q
    summed: int
    step: int
    apart: int
    low: int
    high: int

    def used(self, tile: int, outputs: int, summed: int) -> float:
        """The share of reduce positions that are not skipped, on average over the tiles. `tile`: output positions of a tile; `outputs`,
        `summed`: extents of both axes."""
        starts = range(0, outputs, tile)
        kept = 0
        for start in starts:
            first = -(-(self.low - self.step * (start + tile - 1)) // self.apart)
            last = (self.high - 1 - self.step * start) // self.apart
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
    return windows_of(state.kernel, s).get(summed)


def windows_of(kernel: Kernel, s: int) -> dict[int, Window]:
    """The windows that let loops over reduce axes of a stage skip iterations: reduce axis → the window that leaves the fewest. Axes
    whose loops would skip too few iterations are left out. Cached on the kernel."""
    found: dict[int, Window] | None = kernel.windows.get(s)
    if found is None:
        def share(window: Window) -> float:
            return window.used(1, extents[window.output], extents[window.summed])

        stage, windows = kernel.stages[s], _windows_of(kernel, s)
        extents = [kernel.axes[a].extent for a in (*stage.outs, *stage.reds)]
        best = [min((w for w in windows if w.summed == q), key=share) for q in dict.fromkeys([w.summed for w in windows])]
        found = kernel.windows[s] = {w.summed: w for w in best if share(w) <= _WORTH}
    return found


def _windows_of(kernel: Kernel, s: int) -> tuple[Window, ...]:
    """All windows of the factors of a stage."""
    r = kernel.resolve(frozenset())[s]
    product = product_of(r) if r is not None else None
    if r is None or product is None:
        return ()
    outs, found = len(r.stage.outs), []
    for node in (r.nodes[n] for n in through_casts(r, product.src)):
        if node.kind != "read":
            continue
        inner = kernel.resolve(frozenset())[node.arg]
        assert inner is not None        # nothing is inlined
        for dim, (low, high) in _nonzero_range(kernel, inner).items():
            lin = node.dims[dim]
            if len(lin.coefs) != 2 or lin.atoms or any(kernel.axes[r.axes[a]].bound is not None for a, _ in lin.coefs):
                continue
            (a, step), (q, apart) = lin.coefs       # in order of the axes: outputs come first
            if a < outs <= q and step > 0 and apart > 0:
                found.append(Window(a, q, step, apart, low - lin.const, high - lin.const))
    return tuple(found)


def _nonzero_range(kernel: Kernel, r: ResolvedStage) -> dict[int, tuple[int, int]]:
    """Dims of a stage with a range outside of which its value is 0: dim → (first position, end)."""
    value = r.nodes[through_casts(r, (r.value,))[0]]
    gate, other = (value.gate, value.alt) if value.kind == "load" else (value.src[0], value.src[2]) if value.op == "WHERE" else (-1, -1)
    if gate < 0 or r.nodes[other].kind != "const" or r.nodes[other].arg != 0:
        return {}
    ranges: dict[int, tuple[int, int]] = {}
    todo = [gate]
    while todo:
        n = r.nodes[todo.pop()]
        if n.op == "AND":
            todo += n.src
            continue
        if n.op not in ("CMPLT", "CMPLE"):
            continue
        x, y = (r.nodes[i] for i in n.src)
        equal = n.op == "CMPLE"
        if x.kind == "axis" and y.kind == "const":
            low, high = ranges.get(x.arg, (0, kernel.axes[r.axes[x.arg]].extent))
            ranges[x.arg] = low, min(high, y.arg + equal)
        elif x.kind == "const" and y.kind == "axis":
            low, high = ranges.get(y.arg, (0, kernel.axes[r.axes[y.arg]].extent))
            ranges[y.arg] = max(low, x.arg + 1 - equal), high
    return ranges
