"""Which positions of a stage are known to be inside of an extent that a variable ends, at a place of the tree."""
from __future__ import annotations

from collections.abc import Mapping

from svod.core.kernel.kernel import ResolvedStage
from svod.core.tree.build import Nests, TreeMaker

Safe = Mapping[int, frozenset[int]]     # by open stage its local axes all of whose positions are inside


def safe_axes(maker: TreeMaker, nests: Nests, safe: Safe, s: int) -> frozenset[int]:
    """The local output axes of a stage of which only positions inside are computed: a region of all positions is wider than what is
    read."""
    region = nests[s].region
    return frozenset([i for i, e in enumerate(region) if e < readable(maker, s, i) and is_read_inside(maker, nests, safe, s, i)])


def readable(maker: TreeMaker, s: int, dim: int) -> int:
    """The positions of a dim of a staged value that may be read: whole groups for a dot instruction."""
    packed = maker.layouts.packed.get(s)
    return (packed.padded_to(dim) if packed is not None else 0) or maker.kernel.axes[maker.kernel.stages[s].outs[dim]].extent


def is_read_inside(maker: TreeMaker, nests: Nests, safe: Safe, s: int, dim: int) -> bool:
    """Whether the readers of a stage ask only for positions inside its dim, which variables end."""
    if maker.kernel.axes[maker.kernel.stages[s].outs[dim]].bound is None:
        return False
    return all(not lin.atoms and all(_stays_inside(maker, nests, safe, r, a) for a, _ in lin.coefs)
               for r, node in maker.placement.reads_of(s) for lin in (node.dims[dim],))


def is_read_beyond(maker: TreeMaker, nests: Nests, safe: Safe, s: int, dim: int) -> bool:
    """Whether readers of a stage may ask for positions outside of its region: it is the whole dim and they go beyond its end, or the last
    iteration of a reduce loop, that variables end, covers more than there is."""
    if any(a >= len(r.stage.outs) and maker.kernel.axes[r.axes[a]].bound is not None
           for r, node in maker.placement.reads_of(s) for a, _ in node.dims[dim].coefs):
        return True
    packed = maker.layouts.packed.get(s)
    is_padded = packed is not None and packed.padded_to(dim) > 0
    is_unsafe = maker.kernel.stages[s].outs[dim] in maker.checks.unsafe and not is_padded
    return is_unsafe and dim in nests[s].anywhere and not is_read_inside(maker, nests, safe, s, dim)


def _stays_inside(maker: TreeMaker, nests: Nests, safe: Safe, r: ResolvedStage, a: int) -> bool:
    """Whether a stage, open or not, has only positions of local axis `a` that are inside."""
    if r.axes[a] not in maker.checks.unsafe:
        return True
    q = r.stage.index
    if q in safe:
        return a in safe[q]
    return a < len(r.stage.outs) and nests[q].region[a] < readable(maker, q, a) and is_read_inside(maker, nests, safe, q, a)
