"""Ranks many states of a kernel by price. Each phase is priced once, and most states are excluded by a lower bound.

    softmax, 40 sketches of the phase of its sums      the other phases of all 40 are priced once
    GEMM, 1014 sketches                                ranked by lower bounds; sketches whose bound exceeds the best price are never priced

The bound counts the loops of the stage that a phase stores, and the bytes that copies inside these loops load. All else is free. A part of
a split sum costs at least its share of the whole sum.
"""
from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from math import ceil, inf, prod
from typing import Any, NamedTuple

from svod.core.cost.cost import Cost, total
from svod.core.cost.groups.device import device_of
from svod.core.cost.groups.group_cost import Phase, PhasePricer, StageCounter, combining_phase, group_cost, phase_cost
from svod.core.cost.groups.spread import distinct
from svod.core.cost.groups.stage_shape import StageShape
from svod.core.cost.runs import StageRuns, stage_runs
from svod.core.kernel.groups import check_groups, group_of, phase_of, phase_threads
from svod.core.kernel.kernel import Node, ResolvedStage
from svod.core.kernel.layout import layouts
from svod.core.kernel.loop_nest import LoopNest, LoopNestMaker, stored_bytes
from svod.core.kernel.placement import is_computed_once, is_derived, place_stages
from svod.core.kernel.scheduler import Derived, ReductionParts, Scheduler, cut_of
from svod.core.tree.build import TreeMaker
from svod.core.tree.passes import made_tree
from svod.errors import KernelOptError


class GroupPrices:
    """Prices states on one target, and caches the prices of their phases."""

    def __init__(self) -> None:
        self._phases: dict[tuple[Any, ...], Cost | KernelOptError] = {}
        self._least: dict[tuple[Any, ...], _Least] = {}

    def cheapest(self, states: Iterable[Scheduler], most: int, tie: float = 0.0, limit: float = inf) -> list[tuple[float, Scheduler]]:
        """The `most` distinct states that are predicted fastest, with their cycles, the fastest first. `tie`: include further states that
        are slower than the last one by at most this share of its cycles without the launch. `limit`: cycles; slower states are left out,
        as are states that are illegal or fit no group."""
        candidates, bounds = distinct(states), list[tuple[float, int]]()
        for i, s in enumerate(candidates):
            self._push(bounds, s, i)
        found = list[tuple[float, int]]()
        while bounds and bounds[0][0] <= limit:
            bound, i = heappop(bounds)
            try:
                # a phase of this state has got its price since, so the bound is higher now
                if len(place_stages(candidates[i]).roots) > 1 and (least := self.least(candidates[i])) > bound:
                    heappush(bounds, (least, i))
                    continue
                insort(found, (self.cost(candidates[i]).cycles, i))
            except KernelOptError:
                continue
            if len(found) >= most:
                last, _ = found[most - 1]
                limit = min(limit, last + tie * max(0.0, last - device_of(candidates[i].target).launch_cycles))
        return [(cycles, candidates[i]) for cycles, i in found if cycles <= limit][:None if tie else most]

    def _push(self, bounds: list[tuple[float, int]], state: Scheduler, i: int) -> None:
        try:
            check_groups(state)
            heappush(bounds, (self.least(state), i))
        except KernelOptError:
            pass    # The state cannot be placed, or fits no group.

    def cost(self, state: Scheduler) -> Cost:
        """`group_cost` of a state, computed with the cached prices of phases."""
        return group_cost(state, self._cost)

    def _cost(self, state: Scheduler) -> Cost:
        return total([self._phase(state, root) for root in place_stages(state).roots])

    def _phase(self, state: Scheduler, root: int) -> Cost:
        key = _whole_key(state, _key(state, root), root)
        if key not in self._phases:
            try:
                nest, split = _maker(state).make(_needed(state, root)), cut_of(state, root)
                self._phases[key] = PhasePricer(state, nest, root, _runs(state, nest, root, split)).price()
            except KernelOptError as e:
                self._phases[key] = e
        found = self._phases[key]
        if isinstance(found, KernelOptError):
            raise found
        return found

    def least(self, state: Scheduler) -> float:
        """A lower bound of a state's cycles; phases that are priced already count with their price. Raises KernelOptError if a phase is
        known to be illegal."""
        placement, least = place_stages(state), 0.0
        is_several = len(placement.roots) > 1       # of a single phase, the bound excludes most states before they are priced
        for root in placement.roots:
            key = _key(state, root)
            is_single = is_several and len(phase_threads(state, placement, root).stages) == 1 and cut_of(state, root) is None
            # the price of a stage without others inside it takes no longer than its bound
            if is_single or _whole_key(state, key, root) in self._phases:
                least += self._phase(state, root).cycles
            elif not is_computed_once(state, placement, root):
                least += self._least_of_phase(state, root, key)
        return least

    def _least_of_phase(self, state: Scheduler, root: int, key: tuple[Any, ...]) -> float:
        if key not in self._least:
            self._least[key] = _count_least(_maker(state), root)
        own, stored, times = self._least[key]
        device, split, (instructions, first, latency) = device_of(state.target), cut_of(state, root), _copies_at_least(state, root, times)
        drained = own.drained if state.pipeline is None else 0.0    # products of a pipelined loop may run into the next iteration
        whole = replace(own, instructions=own.instructions + instructions, first=own.first + first, latency=own.latency + latency,
                        drained=drained)
        if split is None:
            return phase_cost(device, whole).cycles
        iterations = times.get(state.axis_rows[split.axis][0], 1.0)
        parts = ceil(iterations / ceil(iterations / split.parts))       # the last parts may be empty
        part = replace(whole, groups=own.groups * parts, instructions=(whole.instructions - stored) / parts, turns=own.turns / parts,
                       drained=drained / parts, first=own.first + first / parts, latency=latency / parts)
        combining = combining_phase(state, place_stages(state).stage(root), parts)
        return phase_cost(device, part).cycles + phase_cost(device, combining).cycles


@Derived
def _maker(state: Scheduler) -> LoopNestMaker:
    """Makes the nests of the stages of a state, for its bound and its price."""
    return LoopNestMaker(state)


class _Least(NamedTuple):
    """The resources that the stage at the root of a phase uses at least, as if its sum were not split."""

    phase: Phase
    stored: float               # instructions that store its value
    times: dict[int, float]     # loop row → iterations of each of its loops that is not in the grid


def _runs(state: Scheduler, nest: LoopNest, root: int, split: ReductionParts | None) -> dict[int, StageRuns]:
    """How often the loops of one phase run, for the stages of the phase that are in `nest`."""
    maker = TreeMaker(state, nest)
    return stage_runs(state.kernel, nest.stages, made_tree(maker, None, maker.phases_of(root, split)))


def _count_least(maker: LoopNestMaker, root: int) -> _Least:
    state, placement = maker.state, maker.placement
    nest = maker.make([root, *[s for s in placement.stage(root).reads if placement.paths[s] == ()]])
    runs = _runs(state, nest, root, None)
    shape = StageShape(state, nest, runs[root], root, group_of(state, placement, root))
    phase, counter = Phase(shape.groups, shape.num_threads), _LeastCounter(state, nest, shape)
    PhasePricer(state, nest, root, runs).count(phase, shape, counter)
    times = {loop.row: loop.times for loop in runs[root].own if not loop.is_launched}
    return _Least(phase, shape.num_threads * counter.stored, times)


def _copies_at_least(state: Scheduler, root: int, times_of: Mapping[int, float]) -> tuple[float, float, float]:
    """The least (`instructions`, `first`, `latency`) of a phase for the copies and sums placed in loops of the stage at its root. The
    region of each has at least the positions that the reader's loops inside that place move. `times_of`: as `_Least.times`."""
    placement, target, device = place_stages(state), state.target, device_of(state.target)
    instructions, first, latency = 0.0, 0.0, 0.0
    for s in phase_threads(state, placement, root).stages:
        path, r = placement.paths[s], placement.stage(s)
        if s == root or not path or path[0][0] != root or len(path) > 1:
            continue
        opened = state.order[root][:path[0][1]]
        region = _region_at_least(state, placement.stage(root), s, opened)
        times = prod([times_of.get(x, 1.0) for x in opened])
        if not is_derived(r.stage):
            # sums computed by matrix instructions count as free, as one instruction computes many
            sums = sum([len(red.values) == 1 for red in r.reductions]) if state.dots[s] is None else 0
            instructions += times * sums * prod(region) * prod([state.kernel.axes[a].extent for a in r.stage.reds])
            continue
        # arguments, and values of other phases, each with the bytes of an element
        loads = [(n, n.dtype.itemsize) for n in r.nodes if n.kind == "load"]
        loads += [(n, stored_bytes(state, layouts(state), n.arg)) for n in r.read_nodes if placement.paths[n.arg] == ()]
        if not loads:
            continue
        ahead = state.pipeline is not None and opened[-1:] == (state.pipeline.row,)
        for n, itemsize in loads:
            nbytes = times * prod([extent for d, extent in enumerate(region) if d in n.deps]) * itemsize
            first += nbytes
            if not (ahead and target.bulk_row):
                instructions += nbytes / target.vector_bytes * device.access(max(1.0, target.vector_bytes / itemsize))
        wait = device.far_cycles if any(n.kind == "load" for n, _ in loads) else device.near_cycles
        latency += 0.0 if ahead else times * wait
    return instructions, first, latency


def _region_at_least(state: Scheduler, reader: ResolvedStage, s: int, opened: tuple[int, ...]) -> list[int]:
    """Per dim of stage `s`, the positions that a reader reads in its loops other than those in `opened`: a lower bound of the region."""
    inside = [prod([state.rows[x].extent for x in state.axis_rows[a] if x not in opened]) for a in reader.axes]
    node, outs = next((n for n in reader.read_nodes if n.arg == s), None), state.kernel.stages[s].outs
    if node is None:        # a stage inside the reader's loops reads it instead
        return [1] * len(outs)
    return [min(max([inside[a] for a, _ in lin.coefs], default=1), state.kernel.axes[axis].extent)
            for axis, lin in zip(outs, node.dims, strict=True)]


def _needed(state: Scheduler, root: int) -> set[int]:
    """The stages whose loop nests the price of a phase depends on: its own, and the stages at the root that they read."""
    placement = place_stages(state)
    own = phase_threads(state, placement, root).stages
    return {*own, *[s for q in own for s in placement.stage(q).reads if placement.paths[s] == ()]}


@Derived
def _keys(state: Scheduler) -> dict[int, tuple[Any, ...]]:
    """The cache of `_key`, by root."""
    return {}


def _key(state: Scheduler, root: int) -> tuple[Any, ...]:
    """The key of a phase's price, without SPLITK and PIPELINE: the loops and places of its stages. If the state has several phases, loops
    of other phases matter only as far as they decide layouts and padding."""
    keys = _keys(state)
    if root not in keys:
        keys[root] = _key_of_several(state, root) if len(place_stages(state).roots) > 1 else \
            (state.kernel, root, state.rows, state.order, state.place, state.vector_rows, state.dots)
    return keys[root]


def _key_of_several(state: Scheduler, root: int) -> tuple[Any, ...]:
    maker, placement, memory, kernel = _maker(state), place_stages(state), layouts(state), state.kernel
    own = phase_threads(state, placement, root).stages
    key: list[Any] = [kernel, root, state.inlined]
    for s in own:
        axes = (*kernel.stages[s].outs, *kernel.stages[s].reds)
        key += [s, state.order[s], placement.paths[s], state.vector_rows[s], state.dots[s]]
        for a in axes:
            rows = state.axis_rows[a]
            key += [rows, [state.rows[x][2:] for x in rows], state.pads[a], a in maker.padded]
    for s in sorted(_needed(state, root).difference(own) | {root}):
        key += [s, memory.orders.get(s), memory.tiles.get(s), memory.packed.get(s), s in memory.rows]
    return tuple([tuple(x) if isinstance(x, list) else x for x in key])


def _whole_key(state: Scheduler, key: tuple[Any, ...], root: int) -> tuple[Any, ...]:
    """The key of the price of the phase that stores stage `root`: `key`, with SPLITK and PIPELINE if they apply to that phase."""
    ahead = state.pipeline
    is_own = ahead is not None and phase_of(place_stages(state), state.stage_of_row(ahead.row)) == root
    return key, cut_of(state, root), ahead if is_own else None


class _LeastCounter(StageCounter):
    """Counts the resources that a stage uses at least, without the costs of the stages computed inside it."""

    def _read(self, number: int, n: Node, operand: int) -> None:
        work = self.work
        if self.nest.placement.paths[n.arg] == ():
            super()._read(number, n, operand)
        elif None not in (self.state.dots[n.arg], self.state.dots[self.r.stage.index]):
            return      # it may stay in registers, so the read may be free
        elif self.tiles is not None and operand >= 0:
            self.instructions += 0.0 if self.tiles.dot.reads_shared else work.runs(n.deps)
        elif prod([work.positions[a] for a in n.deps]) > 1:     # with a single position, a thread may have it in a register
            share = prod([work.distinct(n.deps, lin.coefs) for lin in n.dims])
            if self.stage.vector in n.deps:
                share = min([share, *(1.0 / w for w in (self.width, self.width // 2, self.width // 4) if w > 1 and self.lanes % w == 0)])
            reads = self._runs(n.deps) * share
            self.instructions += reads * self.device.access(1.0, shared=True)
            # an access takes at least a turn of shared memory, or the cycles of the first cache for the elements of a subgroup
            lanes = min(self.state.target.group_threads, self.device.subgroup, self.shape.num_threads)
            row = lanes * stored_bytes(self.state, self.nest.layouts, n.arg)
            self.turns += reads * self.subgroups * min(1.0, row / self.device.first_bytes)
