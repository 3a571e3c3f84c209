"""The check of the policy "same": each stage of a state adds in its canonical order (`svod.core.kernel.numerics`).

    canonical of r0 (96), r1 (4)            allowed: TILE(r0, 32), UNROLL(r1, 0), loops over outputs anywhere, also between these
      for r0: for r1: acc += …              refused: SWAP(r0, r1), UPCAST(r0, 4), THREAD(r0, 2), PADTO(r0, 5), UNROLL(r0, 2)

The order of a state is the sequence of its reduce loops, then of its unrolled ones. It is canonical if the axes come one after the other,
as in the AST, with the parts of an axis nested as they were split. Blocks begin at canonical positions, so each has to end with an
iteration of a loop, and no loop around a block may leave a remainder."""
from __future__ import annotations

from collections.abc import Sequence

from svod.core.kernel.kernel import Axis
from svod.core.kernel.numerics import CanonicalSum, canonical_sum
from svod.core.kernel.placement import EmittedLoop, fit
from svod.core.kernel.scheduler import LOOP, UNROLL, UPCAST, Scheduler
from svod.errors import KernelOptError


def check_sums(state: Scheduler) -> None:
    """Raises KernelOptError if a stage adds in another order than its canonical one."""
    for stage in state.kernel.stages:
        canonical = canonical_sum(state.kernel, stage.index)
        if canonical is None:
            continue
        reason = "the kernel is another one" if state.rewrites else _reason(state, stage.index, canonical)
        if reason:
            raise KernelOptError(f"stage {stage.name} adds in another order than `numerics=same` allows: {reason}")


def _reason(state: Scheduler, s: int, canonical: CanonicalSum) -> str:
    """Why the order of a stage is not the canonical one; "" if it is."""
    reds, rows = state.kernel.stages[s].reds, state.rows
    if state.dots[s] is not None:
        return "an instruction adds several products"
    if state.split_reduce is not None and state.split_reduce.axis in reds:
        if state.split_reduce.parts != canonical.parts:
            return "its parts are added later"
        step = fit(state, state.axis_rows[reds[0]], state.kernel.axes[reds[0]].extent)[0].stride
        if -(-state.kernel.axes[reds[0]].extent // (canonical.parts * step)) * step != canonical.chunk:
            return "its parts do not end with an iteration"
    if any(state.pads[a] for a in reds):
        return "it adds padding"
    pieces = [fit(state, state.axis_rows[a], state.kernel.axes[a].extent) for a in reds]
    for number, (a, own) in enumerate(zip(reds, pieces, strict=True)):
        if reason := _reason_of_axis(state.kernel.axes[a], own, canonical.unit(number), bool(canonical.blocks[number])):
            return reason
    order = [reds.index(rows[row].axis) for row in state.order[s] if rows[row].axis in reds]
    order += [number for number, own in enumerate(pieces) for p in own if p.role == UNROLL and p.extent > 1]
    if order != sorted(order):
        return "its axes are exchanged"
    if not all(_is_nested(own) for own in pieces):
        return "an unrolled part is around a loop"
    if block_sizes(canonical, pieces) is None:
        return "blocks of the sum end within an iteration"
    return ""


def _reason_of_axis(axis: Axis, pieces: Sequence[EmittedLoop], unit: int, has_blocks: bool) -> str:
    """Why the loops of a reduce axis change the order; "" if they do not. `unit`: positions that are added side by side."""
    if any(p.role not in (LOOP, UNROLL) and (p.role, p.extent, p.stride) != (UPCAST, unit, 1) for p in pieces):
        return f"{axis.name} has other accumulators"
    if axis.bound is not None and any(p.stride > unit for p in pieces):
        return f"the end of {axis.name} depends on a variable"
    if has_blocks and axis.extent // unit % max([1, *[p.stride // unit for p in pieces if p.role != UPCAST]]):
        return f"a remainder of {axis.name} is added by itself"
    return ""


def _is_nested(pieces: Sequence[EmittedLoop]) -> bool:
    """Whether all loops of an axis are around its unrolled parts."""
    roles = [p.role for p in pieces if p.extent > 1 and p.role != UPCAST]
    return roles == sorted(roles)


def block_sizes(canonical: CanonicalSum, pieces: Sequence[Sequence[EmittedLoop]]) -> dict[int, tuple[int, ...]] | None:
    """The blocks of a canonical sum in a state: row of a loop → iterations of a block, of each level, innermost first. `pieces`: the loops
    of each reduce axis. None if a block does not end with an iteration of a loop."""
    found: dict[int, tuple[int, ...]] = {}
    for sizes, own in zip(canonical.blocks, pieces, strict=True):
        loops = [p for p in own if p.role == LOOP]
        for size in sizes:
            at = next((i for i, p in enumerate(loops) if p.stride <= size), None)
            if at is None or size % loops[at].stride or (at and loops[at - 1].stride % size):
                return None
            row, n = loops[at].row, size // loops[at].stride
            found[row] = (*found.get(row, ()), n)
    return found
