"""Sketches of contractions for groups: a register tile per thread and a tile of threads per group; the sum is split if there are few tiles.

    UPCAST(o0, 8) UPCAST(o1, 4) LOCAL(o0, 8) LOCAL(o1, 16) UNROLL(r0, 4)      64 × 64 results a group, 32 a thread
    … STAGE(s1, root)                                                         the weights in the order in which they are read, once
    … TILE(r0, 16) STAGE(s0, r0) STAGE(s1, r0)                                16 columns and rows of the operands in shared memory at a time
    … PIPELINE(r0, 2)                                                         the next ones are copied meanwhile
    … SPLITK(r0, 8)                                                           eight groups share a tile's sum
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from svod.core.cost.groups.device import device_of
from svod.core.cost.groups.spread import amount_for, groups_of, thread_counts
from svod.core.cost.sketch_contractions import lane_choices
from svod.core.cost.sketch_facts import Factor, factors_of, is_constant, try_opt
from svod.core.cost.template import Apply, Choose, Do, Each, Hole, Maybe, Need, Only, Point, Template, fact
from svod.core.kernel.placement import is_derived, place_stages
from svod.core.kernel.scheduler import ROOT, Scheduler

THREAD_TILES = ((8, 8), (8, 4), (4, 8), (4, 4), (2, 4), (4, 2), (2, 2), (1, 4), (4, 1), (1, 1))     # rows × columns of contiguous memory
UNROLLED = 4            # unrolled iterations of the innermost reduce loop
SHORT_SUM = 4           # iterations; a shorter reduce loop becomes straight-line code
BLOCK_POSITIONS = (16, 32)     # positions of the sum whose operands are in shared memory at a time
BUFFERS = 2             # buffers of an operand that is copied ahead
STAGED_RESULTS = 8      # results; a group stages operands if each of its threads has at least so many
STAGED_THREADS = 65     # threads; a group stages operands if it has at least so many
PARTS = (2, 4, 8, 16)   # parts of a split sum
ENOUGH_GROUPS_PER_UNIT = 2      # groups; no sum is split if there are at least so many for each unit


class _ThreadTile(NamedTuple):
    """The register tile of a thread: `rows` positions of one local axis times `columns` positions of another, along which vectors run."""

    row_axis: int
    column_axis: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows} × {self.columns}"


def _thread_tiles(p: Point) -> Iterator[_ThreadTile]:
    """Tiles that fit half of a thread's registers, for each axis along which an operand can be read contiguously."""
    registers = device_of(p.state.target).registers_per_thread
    for _, lane, x, _ in lane_choices(p.state, p.stage, p[OPERANDS])[:2]:
        others = [a for a in p.outs if a != lane and p.extent(a) > 1]
        tile = min((a for a in others if a not in x.axes), key=lambda a: (-min(p.extent(a), 64), -a),
                   default=others[-1] if others else -1)
        for m, n in THREAD_TILES if tile >= 0 else ():
            if m * n * max(1, p.stage.lanes_bytes // 4) <= registers // 2 and m <= p.extent(tile) and n <= p.extent(lane):
                yield _ThreadTile(tile, lane, m, n)


def _local_tile(p: Point) -> Scheduler:
    """Bind about `_THREADS` threads to the tile's axes, in a square as far as there are positions; spare threads go to further axes."""
    state, threads, (row_axis, column_axis, *_) = p.state, p[_THREADS], p[_TILE]
    side = 1
    while side * side * 2 <= threads:
        side *= 2
    order = [(column_axis, max(side, threads // side)), (row_axis, side)]
    order += [(a, threads) for a in reversed(p.outs) if a not in (column_axis, row_axis)]
    budget = threads
    for a, most in order:
        left = state.rows[state.row_id(p.name(a))].extent
        if budget < 2 or left < 2:
            continue
        n = amount_for(left, min(most, budget), 1)
        after = try_opt(state, "LOCAL", p.name(a), n)
        if after is not state:
            state, budget = after, budget // n
    return state


def _derived_operands(p: Point) -> list[Factor]:
    return [x for x in p[OPERANDS] if x.stage >= 0 and is_derived(p.state.kernel.stages[x.stage])]


def _packed_operands(p: Point) -> list[str]:
    """The names of two operands that can be packed, "" for each that is missing. Constants come first, as they are packed before a plan
    runs."""
    derived = sorted(_derived_operands(p), key=lambda x: not is_constant(p.state, x.stage))
    return [*[p.state.kernel.stages[x.stage].name for x in derived], "", ""][:2]


def _reuses_operands(p: Point) -> bool:
    return p[_TILE].rows * p[_TILE].columns >= STAGED_RESULTS


def _is_staged(p: Point) -> bool:
    return _reuses_operands(p) and p[_THREADS] >= STAGED_THREADS and p.state.target.shared_bytes > 0


def has_copies(p: Point) -> bool:
    """Whether any stage is placed in a loop."""
    return any(isinstance(place, int) for place in p.state.place)


def _first_sum(p: Point) -> str:
    reds = p.stage.stage.reds
    return p.state.kernel.axes[reds[0]].name


def _blocked_sum(p: Point) -> str:
    """The outer loop of the sum, if a block is shorter than the sum; else ""."""
    return _first_sum(p) if p.left(_first_sum(p)) > p[_BLOCK] else ""


def _longest_sum(p: Point) -> str:
    axes = p.state.kernel.axes
    return axes[max(p.stage.stage.reds, key=lambda a: axes[a].extent)].name


def _unroll_amount(p: Point) -> int:
    return 0 if p.state.kernel.axes[p.stage.stage.reds[-1]].extent <= SHORT_SUM else UNROLLED


def _innermost_sum(p: Point) -> str:
    """The innermost reduce loop, inside a block if the sum is blocked; "" without one."""
    axes, reds = p.state.kernel.axes, p.stage.stage.reds
    return p.state.rows[p.state.axis_rows[reds[0]][-1]].name if len(reds) == 1 else axes[reds[-1]].name if reds else ""


def parts_of_sum(p: Point) -> list[int]:
    """Numbers of parts for a sum with too few tiles for the units: the two largest that are useful; [] if there are enough tiles."""
    few = ENOUGH_GROUPS_PER_UNIT * device_of(p.state.target).units // max(1, groups_of(p.state, p.stage.stage.index))
    return [n for n in PARTS if n <= few][-2:] if few >= 2 and p.stage.stage.is_output and p.stage.stage.reds else []


def _sizes(p: Point) -> tuple[int, ...]:
    """Sizes of a group to try: fewer if the kernel has several phases, and only one for phases before the last."""
    sizes = thread_counts(p.state)
    roots = [s for s in place_stages(p.state).roots if not is_derived(p.state.kernel.stages[s])]
    return (sizes if len(roots) == 1 else sizes[1:] if roots[-1] == p.stage.stage.index else sizes[1:2]) or sizes


OPERANDS = fact(lambda p: factors_of(p.state, p.stage))
CUT = Hole("parts", parts_of_sum)
_TILE = Hole("results of a thread", _thread_tiles)
_THREADS = Hole("threads", _sizes)
_LOCAL_TILE = fact(_local_tile)         # the state after binding threads to the tile
_PACKED = fact(_packed_operands)
_BLOCK = Hole("positions in shared memory", lambda p: BLOCK_POSITIONS)
_OPERAND = Hole("", lambda p: [p.state.kernel.stages[x.stage].name for x in _derived_operands(p)])
_UNROLL = Apply("UNROLL", _innermost_sum, _unroll_amount)

CONTRACTION = Template(
    "CONTRACTION", OPERANDS, _TILE,
    Apply("UPCAST", lambda p: p[_TILE].row_axis, lambda p: p[_TILE].rows),
    Apply("UPCAST", lambda p: p[_TILE].column_axis, lambda p: p[_TILE].columns),
    Apply("LANES", lambda p: f"{p.name(p[_TILE].column_axis)}.in" if p[_TILE].columns > 1 else ""),
    _THREADS, _LOCAL_TILE, Choose(
        [Do(lambda p: p[_LOCAL_TILE]), _UNROLL, Maybe(CUT, Apply("SPLITK", _longest_sum, CUT))],
        # stage one operand, or both, at the root, in the order in which it is read
        [Only(_reuses_operands), _PACKED,
         Need(Apply("STAGE", lambda p: p[_PACKED][0], ROOT), Maybe(Apply("STAGE", lambda p: p[_PACKED][1], ROOT))),
         Do(_local_tile), _UNROLL],
        [Only(_is_staged), Do(lambda p: p[_LOCAL_TILE]), _BLOCK, Apply("TILE", _blocked_sum, _BLOCK),
         Each(_OPERAND, Apply("STAGE", _OPERAND, _first_sum)), Only(has_copies), _UNROLL,
         Maybe(Apply("PIPELINE", _first_sum, BUFFERS), Maybe(CUT, Apply("SPLITK", _longest_sum, CUT)))]))
