"""Cost of a stage's accesses beyond the first cache: which bytes they touch, where these come from, and how often."""
from __future__ import annotations

from typing import NamedTuple

from svod.core.cost.compute_cost import iterations
from svod.core.cost.memory_traffic import ANYWHERE, LINE, Access, Tile, Traffic, levels, traffic
from svod.core.kernel.kernel import Node
from svod.core.kernel.loop_nest import LoopNest, StageNest, stored_bytes
from svod.core.kernel.placement import is_computed_once, is_derived
from svod.core.kernel.scheduler import LOOP, Scheduler


class _Read(NamedTuple):
    access: Access
    is_shared: bool             # a neighbour inside the same loops brings the data


class DataCost:
    """Counts the accesses of the stages of a state, readers before what they read.

    `kept`: bytes of the arguments that pass through the caches from one run to the next."""

    def __init__(self, state: Scheduler, nest: LoopNest, kept: float) -> None:
        self.state, self.nest, self.kept = state, nest, kept
        self.threads = state.thread.cores if state.thread else 1
        self.readers: dict[int, list[tuple[int, ...]]] = {}     # argument → loops of the stages that read it

    def of_stage(self, s: int, reads: list[Node], non_temporal: float) -> Traffic:
        """The accesses of a stage over all its runs. `reads`: its loads; `non_temporal`: bytes that it stores non-temporally."""
        stage = self.nest.stages[s]
        accesses = [self._load(stage, n) if n.linear is not None else _Read(self._staged(stage, n), False) for n in reads]
        turned_over = sum([self._turned_over(stage, n, f.access) for n, f in zip(reads, accesses, strict=True) if n.linear is None])
        store = self._store(stage, non_temporal)
        if store is not None:
            accesses.append(_Read(store, False))
        loops = [*((loop.moves, float(loop.iterations)) for loop in stage.around),
                 *((a, iterations(self.state, stage, a, loop)) for a, loop in stage.loops)]
        cost = traffic(self.state.target, loops, len(stage.around), _body(stage), [a.access for a in accesses],
                       [a.is_shared for a in accesses], self.kept)
        _, near, far = levels(self.state.target)
        # what a phase before has written lies in the caches of all cores
        cost = cost._replace(second=cost.second + turned_over * near.unforeseen * (1.0 - 1.0 / self.threads))
        if not non_temporal:
            return cost
        # to memory, and from there when it is read again; a line whose neighbour is stored much later is a place of its own
        size = stored_bytes(self.state, self.nest.layouts, s)
        alone = stage.num_lanes * size <= LINE and (not stage.loops or stage.innermost != stage.vector)
        of_line = 2.0 * far.streamed - near.streamed + (far.unforeseen - far.streamed) * alone
        return cost._replace(memory=cost.memory + non_temporal / LINE * of_line, moved=cost.moved + non_temporal)

    def _load(self, stage: StageNest, n: Node) -> _Read:
        """A load of an argument."""
        assert n.linear is not None
        steps = {a: abs(c) * n.dtype.itemsize for a, c in n.linear.coefs}
        for atom, _ in n.linear.atoms:
            for a in stage.r.nodes[atom].deps:
                steps.setdefault(a, ANYWHERE)
        around = tuple([loop.row for loop in stage.around])
        seen = self.readers.setdefault(n.arg, [])
        is_shared = any(rows[:len(around)] == around for rows in seen)
        seen.append((*around, *_own_rows(stage)))
        size = self.state.kernel.params[n.arg].arg.size * n.dtype.itemsize
        return _Read(Access(tuple(steps.items()), n.dtype.itemsize, float(size)), is_shared)

    def _staged(self, stage: StageNest, n: Node) -> Access:
        """A read of a staged value, from where it lies."""
        path = self.nest.placement.paths[n.arg] or ()
        outer = frozenset([row for t, depth in path for row in self.state.order[t][:depth]])
        layout = self.nest.stages[n.arg].layout
        assert layout is not None
        size = stored_bytes(self.state, self.nest.layouts, n.arg)
        steps = dict[int, int]()
        for lin, stride in zip(n.dims, layout.strides, strict=True):
            for a, c in lin.coefs:
                steps[a] = steps.get(a, 0) + abs(c) * stride * size
        fixed = sum([row in outer for row in (*[loop.row for loop in stage.around], *_own_rows(stage))])
        tile = None
        if layout.tiled >= 0:
            (axis, _), *_ = n.dims[layout.tiled].coefs
            tile = Tile(axis, layout.tile, layout.outer * size)
        return Access(tuple(steps.items()), size, float(layout.size * size), local=True, fixed=fixed, tile=tile)

    def _turned_over(self, stage: StageNest, n: Node, access: Access) -> float:
        """Lines of an earlier phase's result that lie in another core's cache when this stage reads them."""
        if self.nest.placement.paths[n.arg] != () or self.threads < 2 or is_computed_once(self.state, self.nest.placement, n.arg):
            return 0.0
        size = stored_bytes(self.state, self.nest.layouts, n.arg)
        for a in self.state.kernel.stages[n.arg].outs:
            size *= self.state.axis_extent(a)
        parallel = None
        if self.state.thread is not None:
            shared = self.state.rows[self.state.thread.row].axis
            parallel = next((i for i, a in enumerate(stage.r.axes) if a == shared), None)
        return size / LINE * (1.0 if any(a == parallel for a, _ in access.steps) else self.threads)

    def _store(self, stage: StageNest, non_temporal: float) -> Access | None:
        """The store of a stage's value; None for values in registers and for non-temporal stores."""
        r = stage.r
        size = stored_bytes(self.state, self.nest.layouts, r.stage.index)
        if r.store is not None:
            if non_temporal:
                return None
            steps = tuple((a, abs(c) * size) for a, c in r.store.coefs)
            return Access(steps, size, float(self.state.kernel.params[r.store_slot].arg.size * size), 2.0)
        if not stage.around and is_derived(r.stage):
            return None
        layout = stage.layout
        assert layout is not None
        tile = Tile(layout.tiled, layout.tile, layout.outer * size) if layout.tiled >= 0 else None
        return Access(tuple((a, n * size) for a, n in enumerate(layout.strides)), size, float(layout.size * size), 2.0, bool(stage.around),
                      len(stage.around), tile)


def _own_rows(stage: StageNest) -> tuple[int, ...]:
    """The loop rows of a stage; a copy has none of its own."""
    return () if is_derived(stage.r.stage) else tuple([loop.row for _, loop in stage.loops])


def _body(stage: StageNest) -> list[float]:
    """Positions of each axis in one iteration of the innermost loop."""
    positions = [1.0] * len(stage.axes)
    for a, group in enumerate(stage.axes):
        for p in group:
            if p.role != LOOP:
                positions[a] *= p.extent
    return positions
