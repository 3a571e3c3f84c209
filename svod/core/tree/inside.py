"""Decides which positions of a stage are known to be inside an extent that depends on a variable, at one point of the loop tree."""
from __future__ import annotations

from collections.abc import Mapping

from svod.core.kernel.kernel import ResolvedStage
from svod.core.tree.build import Nests, TreeMaker

Safe = Mapping[int, frozenset[int]]     # open stage → its local axes all of whose positions are inside their extents


def safe_axes(maker: TreeMaker, nests: Nests, safe: Safe, s: int) -> frozenset[int]:
    """The local output axes of a stage that are computed inside their extents only. An axis whose region spans all positions is never among
    them: the region may be wider than the extent."""
    region = nests[s].region
    return frozenset([i for i, e in enumerate(region) if e < readable(maker, s, i) and is_read_inside(maker, nests, safe, s, i)])


def readable(maker: TreeMaker, s: int, dim: int) -> int:
    """How many positions of a dim of a staged value may be read: its extent, which is padded to whole groups in operands of dot
    instructions."""
    packed = maker.layouts.packed.get(s)
    return (packed.padded_to(dim) if packed is not None else 0) or maker.kernel.axes[maker.kernel.stages[s].outs[dim]].extent


def is_read_inside(maker: TreeMaker, nests: Nests, safe: Safe, s: int, dim: int) -> bool:
    """Whether a dim's extent depends on variables and all readers stay inside it."""
    if maker.kernel.axes[maker.kernel.stages[s].outs[dim]].bound is None:
        return False
    return all(not lin.atoms and all(_stays_inside(maker, nests, safe, r, a) for a, _ in lin.coefs)
               for r, node in maker.placement.reads_of(s) for lin in (node.dims[dim],))


def is_read_beyond(maker: TreeMaker, nests: Nests, safe: Safe, s: int, dim: int) -> bool:
    """Whether readers of a stage may ask for positions outside its region. Two cases: the region is the whole dim and readers go beyond its
    end; or the last iteration of a reduce loop whose extent depends on variables covers more than is left."""
    if any(a >= len(r.stage.outs) and maker.kernel.axes[r.axes[a]].bound is not None
           for r, node in maker.placement.reads_of(s) for a, _ in node.dims[dim].coefs):
        return True
    packed = maker.layouts.packed.get(s)
    is_padded = packed is not None and packed.padded_to(dim) > 0
    is_unsafe = maker.kernel.stages[s].outs[dim] in maker.checks.unsafe and not is_padded
    return is_unsafe and dim in nests[s].anywhere and not is_read_inside(maker, nests, safe, s, dim)


def _stays_inside(maker: TreeMaker, nests: Nests, safe: Safe, r: ResolvedStage, a: int) -> bool:
    """Whether a stage computes only positions of local axis `a` that are inside its extent. If the stage's loops are open, `safe` says
    so; else it follows from the positions that its readers read."""
    if r.axes[a] not in maker.checks.unsafe:
        return True
    q = r.stage.index
    if q in safe:
        return a in safe[q]
    return a < len(r.stage.outs) and nests[q].region[a] < readable(maker, q, a) and is_read_inside(maker, nests, safe, q, a)
