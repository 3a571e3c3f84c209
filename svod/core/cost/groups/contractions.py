"""Options of contractions on groups: a register tile of each thread times a tile of threads, the sum cut where there are few tiles.

    UPCAST(o0, 8) UPCAST(o1, 4) LOCAL(o0, 8) LOCAL(o1, 16) UNROLL(r0, 4)      64 × 64 results a group, 32 a thread
    … STAGE(s1, root)                                                         the weights in the order in which they are read, once
    … TILE(r0, 16) STAGE(s0, r0) STAGE(s1, r0)                                16 columns and rows of the operands in shared memory at a time
    … PIPELINE(r0, 2)                                                         the next ones are copied meanwhile
    … SPLITK(r0, 8)                                                           eight groups share a tile's sum
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from svod.core.cost.groups.device import device_of
from svod.core.cost.groups.spread import amount_for, groups_of
from svod.core.cost.sketch_contractions import lane_choices
from svod.core.cost.sketch_facts import Factor, extent_of, name_of, resolved, try_opt
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import ROOT, Scheduler

_TILES = ((8, 8), (8, 4), (4, 8), (4, 4), (2, 4), (4, 2), (2, 2), (1, 4), (4, 1), (1, 1))     # of a thread: others × along memory
_UNROLLED = 4
_BLOCKS = (16, 32)      # positions of the sum in shared memory at a time
_BUFFERS = 2            # buffers of an operand that is copied ahead
_STAGED_TILE = 8        # results of a thread from which its group stages operands
_FEW_THREADS = 64
_WHOLE = 4              # iterations of a reduce loop that become straight-line code
PARTS = (2, 4, 8, 16)   # of a sum
_FILL = 2               # groups per unit with which no sum is cut


def contraction_options(state: Scheduler, r: ResolvedStage, operands: tuple[Factor, Factor], sizes: Sequence[int]) -> Iterator[Scheduler]:
    """Tiles of the stage, for each axis that can be read along memory, in groups of about `sizes` threads."""
    registers = device_of(state.target).registers_per_thread
    for _, lane, x, _ in lane_choices(state, r, operands)[:2]:
        others = [a for a in range(len(r.stage.outs)) if a != lane and extent_of(state, r, a) > 1]
        tile = min((a for a in others if a not in x.axes), key=lambda a: (-min(extent_of(state, r, a), 64), -a),
                   default=others[-1] if others else -1)
        if tile < 0:
            continue
        for m, n in _TILES:
            if m * n * max(1, r.lanes_bytes // 4) > registers // 2 or m > extent_of(state, r, tile) or n > extent_of(state, r, lane):
                continue
            base = state
            for axis, amount in ((tile, m), (lane, n)):
                base = try_opt(base, "UPCAST", name_of(state, r, axis), amount) if amount > 1 else base
            if n > 1 and base is not state:
                base = try_opt(base, "LANES", f"{name_of(state, r, lane)}.in")
            for threads in sizes:
                spread = _thread_tile(base, r, lane, tile, threads)
                done = _unrolled(spread, r)
                yield done
                yield from _cut(done, r)
                if m * n >= _STAGED_TILE:
                    yield from _packed(base, r, operands, lane, tile, threads)
                if m * n >= _STAGED_TILE and threads > _FEW_THREADS and state.target.shared_bytes:
                    for blocked in _staged(spread, r, operands):
                        yield blocked
                        if blocked.pipeline is not None:
                            yield from _cut(blocked, r)


def _packed(state: Scheduler, r: ResolvedStage, operands: tuple[Factor, Factor], lane: int, tile: int, threads: int) -> Iterator[Scheduler]:
    """Operands in buffers of their own, in the order in which they are read: weights, which costs nothing, and the other operand too."""
    derived = [x for x in operands if x.stage >= 0 and is_derived(state.kernel.stages[x.stage])]
    done = state
    for x in sorted(derived, key=lambda x: not _is_weight(state, x)):
        last, done = done, try_opt(done, "STAGE", state.kernel.stages[x.stage].name, ROOT)
        if done is not last:
            yield _unrolled(_thread_tile(done, r, lane, tile, threads), r)


def _is_weight(state: Scheduler, x: Factor) -> bool:
    """Whether an operand is computed from constants alone, before a plan runs."""
    loads = [n.arg for n in resolved(state, x.stage).nodes if n.kind == "load"]
    return bool(loads) and all(state.kernel.params[slot].arg.constant for slot in loads)


def _staged(state: Scheduler, r: ResolvedStage, operands: tuple[Factor, Factor]) -> Iterator[Scheduler]:
    """A block of the sum at a time, with the part of the operands that a group reads for it in shared memory."""
    axis = state.kernel.axes[r.stage.reds[0]]
    for block in _BLOCKS:
        done = try_opt(state, "TILE", axis.name, block) if axis.extent > block else state
        for x in operands:
            if x.stage >= 0 and is_derived(state.kernel.stages[x.stage]):
                done = try_opt(done, "STAGE", state.kernel.stages[x.stage].name, axis.name)
        if any(isinstance(place, int) for place in done.place):
            inner = done.rows[done.axis_rows[axis.index][-1]].name
            last = state.kernel.axes[r.stage.reds[-1]]
            unrolled = try_opt(done, "UNROLL", inner if last is axis else last.name, 0 if last.extent <= _WHOLE else _UNROLLED)
            yield unrolled
            ahead = try_opt(unrolled, "PIPELINE", axis.name, _BUFFERS)
            if ahead is not unrolled:
                yield ahead


def _thread_tile(state: Scheduler, r: ResolvedStage, lane: int, tile: int, threads: int) -> Scheduler:
    """About `threads` threads, as many along both axes as there are results; what is left goes to further axes."""
    side = 1
    while side * side * 2 <= threads:
        side *= 2
    order = [(lane, max(side, threads // side)), (tile, side)]
    order += [(a, threads) for a in range(len(r.stage.outs) - 1, -1, -1) if a not in (lane, tile)]
    budget = threads
    for a, most in order:
        left = state.rows[state.row_id(name_of(state, r, a))].extent
        if budget < 2 or left < 2:
            continue
        n = amount_for(left, min(most, budget), 1)
        done = try_opt(state, "LOCAL", name_of(state, r, a), n)
        if done is not state:
            state, budget = done, budget // n
    return state


def _unrolled(state: Scheduler, r: ResolvedStage) -> Scheduler:
    """The innermost reduce loop unrolled: a short one whole."""
    if not r.stage.reds:
        return state
    axis = state.kernel.axes[r.stage.reds[-1]]
    return try_opt(state, "UNROLL", axis.name, 0 if axis.extent <= _WHOLE else _UNROLLED)


def _cut(state: Scheduler, r: ResolvedStage) -> Iterator[Scheduler]:
    """The sum cut into parts where the tiles are too few for the units."""
    few = _FILL * device_of(state.target).units // max(1, groups_of(state, r.stage.index))
    if few < 2 or not r.stage.is_output or not r.stage.reds:
        return
    axis = max(r.stage.reds, key=lambda a: state.kernel.axes[a].extent)
    for parts in [n for n in PARTS if n <= few][-2:]:
        done = try_opt(state, "SPLITK", state.kernel.axes[axis].name, parts)
        if done is not state:
            yield done
