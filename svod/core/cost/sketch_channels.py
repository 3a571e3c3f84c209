"""Sketches of sums of products for CPUs whose vectors run along an axis of both factors, along which neither is contiguous: the channels of
a convolution in which each has its own weights. Both factors are copied, so that the channels of a vector lie side by side.

    UPCAST(o0, 16) UPCAST(o2, 7) LANES(o0.in) STAGE(s1, root) STAGE(s0, o0)
    … UNROLL(r1, 0)                                                        elements that neighbouring windows share are read once

Rows of an image may be shorter than a vector, or strided; channels fill every vector, and need no masks."""
from __future__ import annotations

from svod.core.cost.sketch_facts import contiguous_axes, is_constant, tile_amounts, try_opt
from svod.core.cost.template import Apply, Do, Hole, Maybe, Need, Only, Point, Template, fact
from svod.core.kernel.contraction import product_of, through_casts
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import ROOT, UPCAST, Scheduler

MOST_POSITIONS = 16         # most positions side by side, each with a vector of sums
STRAIGHT_LINE_TAPS = 8      # most iterations of the innermost reduce loop that become straight-line code


def _factors(p: Point) -> tuple[int, ...] | None:
    """The nodes of the two factors, if both read values that can be copied."""
    product = product_of(p.stage)
    nodes = () if product is None else through_casts(p.stage, product.src)
    reads = [p.stage.nodes[n] for n in nodes]
    return nodes if reads and all(n.kind == "read" and is_derived(p.state.kernel.stages[n.arg]) for n in reads) else None


def _channels(p: Point) -> list[int]:
    """The output axes that fill a vector, along which both factors move and neither is contiguous."""
    return [a for a in p.outs if p.extent(a) >= p.width and all(
        a in p.stage.nodes[n].deps and a not in contiguous_axes(p.state, p.stage, n).direct for n in p[_FACTORS])]


def _neighbours(p: Point) -> list[int]:
    """The two innermost other output axes: the positions along one of them are computed side by side."""
    return [a for a in reversed(p.outs) if a != p[_CHANNELS] and p.extent(a) > 1][:2]


def _lanes(p: Point) -> str:
    """The name of the vector loop."""
    axis = p.stage.axes[p[_CHANNELS]]
    return next(row.name for row in reversed(p.state.rows) if row.axis == axis and row.role == UPCAST)


def _copied(p: Point) -> Scheduler:
    """STAGE both factors: constants at the root, once at prepare; others for the channels of a vector."""
    state, kernel = p.state, p.state.kernel
    loop = state.rows[state.row_id(p.name(p[_CHANNELS]))]
    for s in dict.fromkeys([p.stage.nodes[n].arg for n in p[_FACTORS]]):
        at = ROOT if loop.extent == 1 or loop.role == UPCAST or is_constant(state, s) else loop.name
        state = try_opt(state, "STAGE", kernel.stages[s].name, at)
    return state


_FACTORS = fact(_factors)
_CHANNELS, _NEIGHBOURS = Hole("", _channels), Hole("", _neighbours)
_POSITIONS = Hole("positions", lambda p: tile_amounts(p.extent(p[_NEIGHBOURS]), MOST_POSITIONS)[:1])

CHANNELS = Template(
    "CHANNELS", _FACTORS, _CHANNELS, _NEIGHBOURS, _POSITIONS, Need(Apply("UPCAST", _CHANNELS, lambda p: p.width)),
    Apply("UPCAST", _NEIGHBOURS, _POSITIONS), Apply("LANES", _lanes), Need(Do(_copied)),
    Maybe(Only(lambda p: p.extent(p.reds[-1]) <= STRAIGHT_LINE_TAPS), Apply("UNROLL", lambda p: p.reds[-1], 0)))
