"""Sketches for matrix instructions: a block of tiles that reads its operands as rarely as the registers allow, and where each is packed.

    TC(r0, (amx8, o0, o1)) UPCAST(o0, 2) UPCAST(o1, 2)                     4 tiles of results, 2 + 2 of operands
    … TILE(o0, 8)                                                          as many rows as stay near pass over all columns
    … STAGE(s0, o0)                                                        rows packed by the core that uses them, a TILE or all
    … ORDER(out, (o1, o0)) STAGE(s1, o1)                                   columns packed by the core that uses them
"""
from __future__ import annotations

from collections.abc import Iterator

from svod.core.cost.sketch_facts import try_opt
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.isa import DOTS

BLOCKS = ((2, 2), (1, 3), (3, 1), (1, 2), (2, 1), (1, 1))


def tile_sketches(state: Scheduler, r: ResolvedStage) -> Iterator[Scheduler]:
    """Blocks of tiles of a stage that TC gave an instruction with tiles, to be shared among the cores."""
    chosen = state.dots[r.stage.index]
    assert chosen is not None
    axes = state.kernel.axes
    if r.store is not None and r.store.coef(r.axes.index(chosen.columns)) != 1 and any(
            r.store.coef(a) == 1 and axes[r.axes[a]].extent >= DOTS[chosen.name].columns for a in range(len(r.stage.outs))):
        return      # with that axis as columns the rows of a tile are those of the output
    rows, columns, along = (axes[a].name for a in (chosen.rows, chosen.columns, chosen.axis))
    operands = {}
    product = r.nodes[r.nodes[r.reductions[0].values[0]].src[0]], r.nodes[r.nodes[r.reductions[0].values[0]].src[1]]
    for node in product:
        operands[r.axes.index(chosen.rows) in node.deps] = state.kernel.stages[node.arg].name
    for m, n in BLOCKS:
        block = state
        for name, amount in ((rows, m), (columns, n)):
            if amount > 1:
                block = try_opt(block, "UPCAST", name, amount)
        if len(block.applied_opts) - len(state.applied_opts) != (m > 1) + (n > 1):
            continue    # too few tiles along an axis
        for base in (block, try_opt(block, "UNROLL", along, 2)):
            turned = try_opt(base, "ORDER", r.stage.name, (columns, rows))
            yield base
            near = _near(base, rows, along)
            yield near
            yield try_opt(near, "STAGE", operands[True], rows)
            yield _near(turned, columns, along)
            yield try_opt(base, "STAGE", operands[True], rows)
            yield try_opt(turned, "STAGE", operands[False], columns)


def _near(state: Scheduler, axis: str, along: str) -> Scheduler:
    """A loop over blocks of `axis` whose operand takes a quarter of the second cache; each core gets two blocks at least."""
    row = state.rows[state.row_id(axis)]
    summed = state.kernel.axes[state.rows[state.row_id(along)].axis].extent
    stage = state.kernel.axes[row.axis].stage
    chosen = state.dots[stage]
    assert chosen is not None
    dtype, _ = DOTS[chosen.name].operands
    near = state.target.l2 // 4 // max(1, row.stride * summed * dtype.itemsize)
    n = min(near, row.extent // (2 * state.target.threads))
    return try_opt(state, "TILE", axis, n) if n >= 2 else state
