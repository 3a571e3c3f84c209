"""The stages of a state as they will be emitted: `loop_nest(state)`, computed once per state.

Placement decides at which loop each stage is computed. This module derives the rest: the region of a stage that its readers need in one
iteration of the loops around it (bounds inference), the loops per axis that compute the region, the vector loop, and the memory. The loop
tree (`svod.core.tree`) puts these loops in order, and inside each other.

    s1 read by out as s1[o1, r0], STAGE(s1, o1) with o1 in tiles of 32 and r0 of 256
        region (32, 256), which starts at 32·o1      loops 256 × 32, the 32 in vectors      scratch
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import NamedTuple

from svod.core.kernel.copy_loops import CopyLoops, copy_loops, packing_loops, single_loops
from svod.core.kernel.group_memory.banks import THREADS_SERVED_TOGETHER, SharedRead, ThreadDigit, matrix_read, padded_rows
from svod.core.kernel.group_memory.copy import GroupCopy, group_copy, rows_in_bulk
from svod.core.kernel.group_memory.held import Holders, is_computed_in_place
from svod.core.kernel.groups import (
    BLOCK_ROLES,
    group_of,
    has_block_rows,
    is_covered,
    phase_of,
    space_of,
    spanned,
    stage_threads,
    thread_digits,
    whole_extent,
)
from svod.core.kernel.intrinsics import WORD, held_threads, stored_node
from svod.core.kernel.kernel import LinearIndex, ResolvedStage, Stage
from svod.core.kernel.layout import Layout, Layouts, is_exact, lay_out, layouts, swizzled_lines
from svod.core.kernel.placement import (
    NO_ROW,
    EmittedLoop,
    Path,
    Placement,
    fit,
    is_derived,
    place_stages,
    reads_constants,
    span,
    vector_width,
)
from svod.core.kernel.required import Lin, RequiredDim, add_lins, required_region, sum_lins
from svod.core.kernel.scheduler import LOOP, Derived, Scheduler
from svod.core.machine.levels import OF_GROUP, MemorySpace
from svod.errors import KernelOptError

NO_START: Lin = ({}, 0)


class StageNest(NamedTuple):
    """A stage as it is emitted: its region, its loops, and its memory."""

    r: ResolvedStage
    region: tuple[int, ...]                         # per output axis: positions that one computation of the stage covers
    # per output axis: the first of these positions, in terms of the loop rows around the stage
    starts: tuple[Lin, ...]
    axes: tuple[tuple[EmittedLoop, ...], ...]       # per local axis: its loops, outermost first
    vector: int                                     # the local axis that is the vector, or -1
    vector_loop: EmittedLoop | None                 # the loop whose positions are the lanes
    layout: Layout | None                           # memory layout of the region; None for the output
    space: MemorySpace                              # memory in which the value is stored
    copy: GroupCopy | None = None                   # the copy into shared memory by all threads of a group, if the stage is one
    buffers: int = 1                                # number of buffers that a copy uses in turn, as it starts iterations before its readers
    # per output axis, in shared memory: positions that threads compute beyond those that are read
    beyond: tuple[int, ...] = ()
    bulk_rows: int = 0                              # rows of the region if each is one bulk copy; 0: threads copy smaller parts
    # if each thread has a value of its own: the region of it that all threads of a group need together
    of_group: tuple[RequiredDim, ...] = ()
    anywhere: frozenset[int] = frozenset()          # dims that are read at loaded positions, so that readers may ask for any position
    # the region rounded up to whole groups and tiles of packed operands; () without such operands
    padded: tuple[RequiredDim, ...] = ()

    @property
    def written(self) -> tuple[RequiredDim, ...]:
        """The positions that one computation of the stage writes, per output axis."""
        return self.padded or tuple(map(RequiredDim, self.starts, self.region))

    def reached(self, state: Scheduler, axis: int, extent: int) -> int:
        """Positions of an output axis that threads compute if `extent` of them are required."""
        if not self.beyond:
            return extent
        return max(whole_extent(state, self.r.stage.index, axis, extent), extent + self.beyond[axis])

    @property
    def num_lanes(self) -> int:
        """Positions of the vector loop; 1 without one."""
        return self.vector_loop.extent if self.vector_loop is not None and self.vector_loop.role != LOOP else 1


class LoopNest(NamedTuple):
    """The nests of all stages of a state that are not inlined, by stage number."""

    placement: Placement
    layouts: Layouts
    stages: dict[int, StageNest]


@Derived
def loop_nest(state: Scheduler) -> LoopNest:
    """The loop nest of a state. Raises KernelOptError if its placements contradict each other."""
    return LoopNestMaker(state).make()


def stage_copy(state: Scheduler, r: ResolvedStage, extents: list[int], layouts: Layouts, layout: Layout,
               is_root: bool = False) -> CopyLoops:
    """The loops of a copy stage over `extents` positions that are stored in `layout`. `is_root`: it is a phase of its own. On a GPU such a
    copy computes no position twice. On a CPU an iteration of it transposes one square, or moves one element if it runs once, at prepare; a
    copy inside loops has as many loops for a part of its region as for all of it, whatever divides them."""
    packed = layouts.packed.get(r.stage.index)
    if packed is not None and not packed.is_held:
        return packing_loops(r, extents, layout, packed, max(1, state.target.vector_bytes // WORD.itemsize))
    tile, width = layout.tile if layout.tiled >= 0 else 0, copied_width(state, layouts, r)
    if is_root and not state.target.has_groups and reads_constants(state, r):
        singles = single_loops(r, extents, layout.order, width, tile)
        if singles is not None:
            return singles
    return copy_loops(r, extents, layout.order, width, tile, exact=is_root and state.target.has_groups,
                      single=is_root and not state.target.has_groups)


def copied_width(state: Scheduler, layouts: Layouts, r: ResolvedStage) -> int:
    """Lanes of the vectors in which a stage is copied. For packed operands they are lanes of the narrow type."""
    packed = layouts.packed.get(r.stage.index)
    return vector_width(state, r) if packed is None else state.target.lanes(packed.dtype)


def stored_bytes(state: Scheduler, layouts: Layouts, s: int) -> int:
    """Bytes of one element of a stage as it is stored."""
    return layouts.packed[s].dtype.itemsize if s in layouts.packed else state.kernel.stages[s].dtype.itemsize


def _axes_of_copy(copy: GroupCopy, region: tuple[int, ...]) -> tuple[tuple[EmittedLoop, ...], ...]:
    """Per dim, the loop over its parts that threads copy."""
    counts = [e // copy.width if d == copy.vector else e for d, e in enumerate(region)]
    return tuple([(EmittedLoop(NO_ROW, LOOP, n, e // n),) for n, e in zip(counts, region, strict=True)])


class Cut(NamedTuple):
    """The shorter loops of a local axis in a tail."""

    pieces: tuple[EmittedLoop, ...]
    bound: int          # positions that the loops span


Cuts = Mapping[int, Mapping[int, Cut]]      # stage → local axis → its shorter loops


class LoopNestMaker:
    """Builds the nests of stages. Readers come before the stages that they read, since they decide their regions; phases are independent
    of each other. `cuts`: loops that are shorter than the state says, by stage and local axis; `whole`: the nests without these cuts,
    which decide the memory of the values."""

    def __init__(self, state: Scheduler, cuts: Cuts | None = None, whole: Mapping[int, StageNest] | None = None) -> None:
        self.state, self.cuts, self.uncut = state, cuts or {}, whole or {}
        self.placement = place_stages(state)
        self.layouts = layouts(state)
        self.stages: dict[int, StageNest] = {}
        roots = self.placement.roots if has_block_rows(state) else ()
        # stage that a phase stores → threads of the phase's group
        self.threads = {s: group_of(state, self.placement, s).threads for s in roots}
        # stage in shared memory → per dim, positions that threads compute beyond those required
        self.beyond: dict[int, tuple[int, ...]] = {}
        self.whole: dict[int, list[RequiredDim]] = {}       # stage inside a phase with threads → the region that all threads together need
        self.required: dict[tuple[int, Path, bool, bool], list[RequiredDim]] = {}     # cache of `_of_reader`
        self.padded_dims: dict[int, list[RequiredDim]] = {}     # stage → `StageNest.padded`
        # (stage, whether for the whole group) → dims that are read at loaded positions, so that any position may be needed
        self.anywhere: dict[tuple[int, bool], set[int]] = {}
        self.padded: set[int] = set()       # axes whose loops cover positions beyond the extent: loops cover whole tiles, values are masked
        self.computed = [s.index for s in reversed(state.kernel.stages) if self.placement.paths[s.index] is not None]
        if any(state.pads) or state.target.has_groups:
            for s in self.computed:
                self._find_padded(self.placement.stage(s))

    def make(self, wanted: Collection[int] | None = None) -> LoopNest:
        """The nests of all stages, or only of those in `wanted`, which must be whole phases or stages at the root."""
        for s in self.computed if wanted is None else sorted(wanted, reverse=True):
            path = self.placement.paths[s]
            assert path is not None
            if s not in self.stages:
                self.stages[s] = self._stage(self.placement.stage(s), path)
        return LoopNest(self.placement, self.layouts, self.stages if wanted is None else {s: self.stages[s] for s in wanted})

    def _stage(self, r: ResolvedStage, path: Path) -> StageNest:
        state, stage = self.state, r.stage
        starts, region, space = self._region(stage, path)
        positions = region if path else tuple([state.kernel.axes[a].extent for a in stage.outs])
        layout = self._layout(r, positions) if not stage.is_output else None
        copy, packed = None, self.layouts.packed.get(stage.index)
        if packed is not None and packed.line and space is not MemorySpace.SHARED:
            raise KernelOptError(f"stage {stage.name} is an operand of an instruction that reads shared memory; STAGE it "
                                 "at a loop of the sum")
        if space is MemorySpace.SHARED and layout is not None:
            copy, layout = self._in_shared_memory(r, starts, region, layout, self._buffers(r, path) > 1)
        axes: tuple[tuple[EmittedLoop, ...], ...]
        if space is MemorySpace.HELD and is_derived(stage):
            axes, vector, vector_loop = tuple([(EmittedLoop(NO_ROW, LOOP, n, 1),) for n in region]), -1, None
        elif copy is not None and layout is not None:
            axes, vector, vector_loop = _axes_of_copy(copy, region), copy.vector, None
        elif is_derived(stage):
            assert layout is not None
            axes, vector, vector_loop = self._copy(r, layout, not path)
        else:
            axes, vector, vector_loop = self._rows(r, region)
        buffers = self._buffers(r, path) if copy is not None else 1
        rows = self._bulk_rows(r, region, starts, copy, layout) if copy is not None and layout is not None and buffers > 1 else 0
        if path:
            self._check_tiles(r, path, starts, region)
        return StageNest(r, region, starts, axes, vector, vector_loop, layout,
                         space, copy, buffers, self.beyond.get(stage.index, ()), rows,
                         tuple(self.whole.get(stage.index, ())), frozenset(self.anywhere.get((stage.index, False), ())),
                         self._padded(r.stage, path, space))

    def _check_tiles(self, r: ResolvedStage, path: Path, starts: tuple[Lin, ...], region: tuple[int, ...]) -> None:
        """Raises KernelOptError if tiles that a subgroup holds reach beyond the end of an operand at the root. The tiles start where the
        loops around their stage do; the operand is padded only to whole tiles counted from the start of the axis."""
        plan, axes = self.layouts.dots.get(r.stage.index), self.state.kernel.axes
        if plan is None:
            return
        opened = {row for q, depth in path for row in self.state.order[q][:depth]}
        times = {p.row: p.extent for q, _ in path for pieces in self.stages[q].axes for p in pieces if p.row in opened}
        for o, packed, a in zip(plan.operands, plan.packed, (plan.rows, plan.columns), strict=True):
            if not packed.is_held or self.placement.paths[o.stage] != ():
                continue
            terms, const = starts[a]
            end = const + sum([c * (times.get(row, 1) - 1) for row, c in terms.items() if c > 0]) + region[a]
            operand, axis = self.state.kernel.stages[o.stage], axes[r.axes[a]]
            room = packed.row_padded - axes[operand.outs[packed.row_dim]].extent + axis.extent
            if end > room:
                name = r.stage.name
                raise KernelOptError(f"tiles of {name} reach to position {end} of {axis.name}, and {operand.name} ends at {room}: "
                                     f"STAGE it at a loop around {name}, or choose amounts that tiles divide")

    def _bulk_rows(self, r: ResolvedStage, region: tuple[int, ...], starts: tuple[Lin, ...], copy: GroupCopy, layout: Layout) -> int:
        """The number of rows that are bulk copies (`rows_in_bulk`), for a copy that runs ahead; 0 if any of its positions needs a check."""
        state, packed = self.state, self.layouts.packed.get(r.stage.index)
        most = [max(extent, packed.padded_to(d) if packed is not None else 0) for d, extent in enumerate(region)]
        checked = any(a in self.padded or state.kernel.axes[a].bound is not None or n > state.kernel.axes[a].extent
                      for a, n in zip(r.stage.outs, most, strict=True))
        if not state.target.bulk_row or copy.vector < 0 or checked:
            return 0
        terms, first = starts[copy.vector]
        node = r.nodes[stored_node(r, packed)]
        return rows_in_bulk(node, copy, layout, region, [first, *terms.values()], state.target.bulk_row)

    def _region(self, stage: Stage, path: Path) -> tuple[tuple[Lin, ...], tuple[int, ...], MemorySpace]:
        """(starts, extents, memory) of the region of a stage that is computed at a time: the region that one thread needs, or, in shared
        memory, the one that all threads need."""
        state, s = self.state, stage.index
        if not path:
            region = tuple([spanned(state, self.placement, s, a) for a in stage.outs])
            return (NO_START,) * len(region), region, MemorySpace.GLOBAL
        required = self._required(s, path)
        positions, threads = prod([extent for _, extent in required]), self.threads.get(phase_of(self.placement, s), 1)
        uncut = self.uncut.get(s)
        space = space_of(state, self.placement, s, positions, positions, 1) if uncut is None else uncut.space
        if threads > 1:
            of_group = self.whole[s] = self._required(s, path, of_group=True)
            needed = tuple([extent for _, extent in of_group])
            if uncut is None:
                space = space_of(state, self.placement, s, positions, prod(needed), threads)
            if is_computed_in_place(state, self.placement, self.layouts, s):
                return tuple([start for start, _ in of_group]), needed, MemorySpace.HELD
            if space in OF_GROUP:
                region = tuple([whole_extent(state, s, dim, extent) for dim, extent in enumerate(needed)])
                self.beyond[s] = tuple([more - extent for more, extent in zip(region, needed, strict=True)])
                self.whole[s] = [RequiredDim(start, extent) for (start, _), extent in zip(of_group, region, strict=True)]
                if uncut is None and self._is_held(stage, path, region):
                    space = MemorySpace.HELD
                return tuple([start for start, _ in of_group]), region, space
        return tuple([start for start, _ in required]), tuple([extent for _, extent in required]), space

    def _padded(self, stage: Stage, path: Path, space: MemorySpace) -> tuple[RequiredDim, ...]:
        """`StageNest.padded` of a stage inside a phase; () at the root. Its readers may be padded for dot instructions, and so need a
        larger region."""
        if not path or not self.layouts.packed:
            return ()
        s, of_group = stage.index, space in OF_GROUP
        dims = self._required(s, path, of_group, padded=True)
        if of_group:
            dims = [RequiredDim(start, whole_extent(self.state, s, d, extent)) for d, (start, extent) in enumerate(dims)]
        self.padded_dims[s] = dims
        return tuple(dims)

    def _is_held(self, stage: Stage, path: Path, region: tuple[int, ...]) -> bool:
        """Whether the values of a stage stay in the registers of the threads that compute them."""
        state, root = self.state, phase_of(self.placement, stage.index)
        if held_threads(state, stage.index) == 1:
            return False
        threads = stage_threads(state, self.placement, root)
        opened = frozenset([row for q, depth in path for row in state.order[q][:depth]])
        holders = Holders(state, self.placement, self.layouts, {q: nest.axes for q, nest in self.stages.items()}, opened, threads,
                          thread_digits(state, threads))
        return holders.keep(stage.index, tuple([fit(state, state.axis_rows[a], n) for a, n in zip(stage.outs, region, strict=True)]))

    def _rows(self, r: ResolvedStage, region: tuple[int, ...]) -> tuple[tuple[tuple[EmittedLoop, ...], ...], int, EmittedLoop | None]:
        """The loops of a stage that is no copy, as the opts have scheduled them: (loops per axis, the vector axis, its vector loop)."""
        state, s = self.state, r.stage.index
        extents = (*region, *[spanned(state, self.placement, s, a) for a in r.stage.reds])
        axes = tuple([fit(state, state.axis_rows[a], e) for a, e in zip(r.axes, extents, strict=True)])
        cuts = self.cuts.get(s, {})
        axes = tuple([cuts[a].pieces if a in cuts else own for a, own in enumerate(axes)]) if cuts else axes
        row, vector = self.layouts.vector_rows[s], self.layouts.vector_axes[s]
        vector_loop = next((p for p in axes[vector] if p.row == row), None) if vector >= 0 else None
        return axes, vector, vector_loop

    def _in_shared_memory(self, r: ResolvedStage, starts: tuple[Lin, ...], region: tuple[int, ...], layout: Layout,
                          ahead: bool) -> tuple[GroupCopy | None, Layout]:
        """(the copy by all threads, layout) of a stage in shared memory; the copy is None for a stage that is no copy. `ahead`: whether the
        copy starts iterations before its readers."""
        state, s = self.state, r.stage.index
        packed, copy = self.layouts.packed.get(s), None
        if is_derived(r.stage):
            full = tuple([state.kernel.axes[a].extent for a in r.stage.outs])
            copy = group_copy(r, layout.extents, starts, full, layout.order, copied_width(state, self.layouts, r), self._staged_sources(r))
        if packed is not None and packed.line:
            return copy, layout
        threads = min(self.threads[phase_of(self.placement, s)], THREADS_SERVED_TOGETHER)
        padded = padded_rows(layout, copy, self._shared_reads(s, layout), threads, stored_bytes(state, self.layouts, s))
        if packed is not None and packed.is_held and copy is not None:
            swizzled = swizzled_lines(self.layouts, s, layout.extents)
            if swizzled is not None and not (ahead and self._bulk_rows(r, region, starts, copy, padded)):
                return copy, swizzled
        return copy, padded

    def _staged_sources(self, r: ResolvedStage) -> dict[int, LinearIndex]:
        """The flat indices at which a stage reads values of other phases, by node; without values whose layout is in tiles or packed."""
        found, axes = dict[int, LinearIndex](), self.state.kernel.axes
        for i, n in enumerate(r.nodes):
            if n.kind != "read" or self.placement.paths[n.arg] != () or n.arg in self.layouts.packed:
                continue
            source = self.placement.stage(n.arg)
            layout = self._layout(source, tuple([axes[a].extent for a in source.stage.outs]))
            if layout.tiled < 0:
                found[i] = layout.flat(n.dims)
        return found

    def _shared_reads(self, s: int, layout: Layout) -> tuple[SharedRead, ...]:
        """The reads of a stage in shared memory, as accesses of the threads of a group."""
        state, itemsize = self.state, stored_bytes(self.state, self.layouts, s)
        digits = thread_digits(state, stage_threads(state, self.placement, phase_of(self.placement, s)))
        reads = []
        for q, node in self.placement.reads_of(s):
            reader = self.stages.get(q.stage.index)
            if reader is None or any(lin.atoms for lin in node.dims):
                continue
            if s in self.layouts.packed:
                reads.append(matrix_read(layout, itemsize, self.layouts.packed[s].dim))
                continue
            own = [{**reader.starts[a][0]} if a < len(reader.starts) else {} for a in range(len(q.axes))]
            for a, pieces in enumerate(reader.axes):
                own[a].update({p.row: p.stride for p in pieces if p.role in BLOCK_ROLES})
            terms = tuple([sum_lins([({row: k * c for row, k in own[a].items()}, 0) for a, c in lin.coefs])[0] for lin in node.dims])
            apart = tuple([tuple([ThreadDigit(*digits[row], c) for row, c in of_dim.items() if row in digits]) for of_dim in terms])
            vector = layout.order and reader.vector >= 0 and node.dims[layout.order[-1]].coef(reader.vector) == 1
            reads.append(SharedRead(apart, min(reader.num_lanes, max(1, state.target.vector_bytes // itemsize)) if vector else 1))
        return tuple(reads)

    def _buffers(self, r: ResolvedStage, path: Path) -> int:
        """The number of buffers of a copy: the number given by PIPELINE if the copy is placed in the pipelined loop and reads no other
        stage placed there; else 1."""
        state, (t, depth) = self.state, path[-1]
        chosen = state.pipeline
        if chosen is None or state.order[t][:depth][-1:] != (chosen.row,):
            return 1
        alone = all(path[-1] not in (self.placement.paths[q] or ()) for q in r.reads)
        return chosen.buffers if alone else 1

    def _layout(self, r: ResolvedStage, region: tuple[int, ...]) -> Layout:
        """The layout of the region that readers need. It has whole groups of a packed operand, and tiles only if the region has all
        positions of the tiled dim."""
        extents = [self.state.kernel.axes[a].extent for a in r.stage.outs]
        tiled, packed = self.layouts.tiles[r.stage.index].dim, self.layouts.packed.get(r.stage.index)
        whole = tiled >= 0 and not self.state.target.has_groups and region[tiled] == extents[tiled]
        if packed is not None:
            stored = region[packed.dim]
            stored = packed.padded if stored >= extents[packed.dim] else -(-stored // packed.group) * packed.group
            region = (*region[:packed.dim], stored, *region[packed.dim + 1:])
            if packed.is_held and self.placement.paths[r.stage.index] == ():
                region = (*region[:packed.row_dim], packed.row_padded, *region[packed.row_dim + 1:])
        return lay_out(self.state, self.layouts, r.stage.index, region, whole)

    def _copy(self, r: ResolvedStage, layout: Layout, is_root: bool) -> tuple[tuple[tuple[EmittedLoop, ...], ...], int, EmittedLoop | None]:
        """The loops of a copy stage: (loops per axis, the vector axis, its vector loop)."""
        copy = stage_copy(self.state, r, list(layout.extents), self.layouts, layout, is_root)
        vector_loop = copy.axes[copy.vector][-1] if copy.vector >= 0 else None
        return tuple(copy.axes), copy.vector, vector_loop

    def _required(self, s: int, path: Path, of_group: bool = False, padded: bool = False) -> list[RequiredDim]:
        """Per dim of stage `s`, the region that its readers need in one iteration of the loops around it; starts are in terms of these
        loops. `of_group`: for all threads of a group together, not for one thread. `padded`: with the positions beyond an extent that dot
        instructions read."""
        opened = {q: frozenset(self.state.order[q][:depth]) for q, depth in path}

        def region_of(r: ResolvedStage, a: int) -> RequiredDim:
            q = r.stage.index
            reader = self.stages[q]
            if q not in opened:
                if a >= len(r.stage.outs):
                    return RequiredDim(NO_START, self._spanned(q, r, a))
                own = self._of_reader(q, path, of_group or reader.space in OF_GROUP, padded)[a]
                return RequiredDim(own.start, reader.reached(self.state, a, own.extent))
            may_move = self._starts_anywhere(q, r, a)
            moving = {p.row: p.stride for p in reader.axes[a] if (p.extent > 1 and p.role in BLOCK_ROLES and not of_group)
                      or ((p.extent > 1 or may_move) and p.row in opened[q])}
            extent = span([p for p in reader.axes[a] if p.row not in moving])
            if a >= len(r.stage.outs):
                return RequiredDim((moving, 0), min(extent, self._spanned(q, r, a)))
            start, region = self.whole[q][a] if of_group and q in self.whole else (reader.starts[a], reader.region[a])
            if padded and q in self.padded_dims:
                start, region = self.padded_dims[q][a]
            # the last tile is moved back or cut, so no more positions than the region are needed
            return RequiredDim(add_lins(start, (moving, 0), 1) if moving else start, min(extent, self._cut_to(q, a, region)))

        def is_even(r: ResolvedStage, a: int) -> bool:
            pieces, extent = self.stages[r.stage.index].axes[a], state.axis_extent(r.axes[a])
            return not self._starts_anywhere(r.stage.index, r, a) and (r.stage.index not in opened or is_exact(pieces, extent))

        state, reads, out = self.state, list(self.placement.reads_of(s)), []
        for dim in range(len(self.state.kernel.stages[s].outs)):
            region = required_region(reads, dim, region_of, is_even)
            if region is None and not of_group and self.threads.get(phase_of(self.placement, s), 1) > 1:
                # if the positions that one thread reads are known only at run time, take the region that all threads need
                out.append(self._of_reader(s, path, True, padded)[dim])
                if dim in self.anywhere.get((s, True), ()):
                    self.anywhere.setdefault((s, False), set()).add(dim)
            elif region is None or self._is_whole(s, dim, region.extent, padded):
                out.append(RequiredDim(NO_START, self._readable(s, dim, padded)))
                if region is None:
                    self.anywhere.setdefault((s, of_group), set()).add(dim)
            else:
                out.append(region)
        return out

    def _readable(self, s: int, dim: int, padded: bool) -> int:
        """The number of positions of a dim that may be read. `padded`: with the padding for dot instructions."""
        extent = self.state.kernel.axes[self.state.kernel.stages[s].outs[dim]].extent
        return max(extent, self.layouts.packed[s].padded_to(dim)) if padded and s in self.layouts.packed else extent

    def _is_whole(self, s: int, dim: int, extent: int, padded: bool) -> bool:
        """Whether a region of `extent` positions is the whole dim, so that it starts at 0. Never true for tiles that a subgroup holds,
        which may begin anywhere and end beyond the dim."""
        packed = self.layouts.packed.get(s) if padded else None
        in_tiles = packed is not None and packed.is_held and dim == packed.row_dim
        return extent >= self._readable(s, dim, padded) and not in_tiles and self.state.kernel.stages[s].outs[dim] not in self.padded

    def _spanned(self, s: int, r: ResolvedStage, a: int) -> int:
        """Positions of reduce axis `a` that its loops span."""
        return self._cut_to(s, a, spanned(self.state, self.placement, s, r.axes[a]))

    def _starts_anywhere(self, s: int, r: ResolvedStage, a: int) -> bool:
        """Whether even a loop of one iteration over an axis has a start that is known only at run time: in a tail, or if the extent depends
        on a variable."""
        return a in self.cuts.get(s, {}) or self.state.kernel.axes[r.axes[a]].bound is not None

    def _cut_to(self, s: int, a: int, positions: int) -> int:
        """`positions`, the positions of a local axis; in a tail, the positions that the axis' shorter loops span."""
        cuts = self.cuts.get(s, {})
        return cuts[a].bound if a in cuts else positions

    def _of_reader(self, s: int, path: Path, of_group: bool, padded: bool) -> list[RequiredDim]:
        """`_required` of a stage, cached: every stage that it reads asks for the same region again."""
        key = s, path, of_group, padded
        if key not in self.required:
            self.required[key] = self._required(s, path, of_group, padded)
        return self.required[key]

    def _find_padded(self, r: ResolvedStage) -> None:
        """Collect the padded axes of a stage, and the axes of stages that it reads at padded positions."""
        dot = self.state.dots[r.stage.index]
        if not is_derived(r.stage):
            s, inside = r.stage.index, bool(self.placement.paths[r.stage.index])
            self.padded.update(a for a in r.axes if (self.state.pads[a] and not (dot and dot.axis == a))
                               or spanned(self.state, self.placement, s, a) > self.state.axis_extent(a)
                               or (inside and is_covered(self.state, self.placement, s, a)))
        for node in r.read_nodes if self.padded else ():
            for axis, lin in zip(self.state.kernel.stages[node.arg].outs, node.dims, strict=True):
                if any(r.axes[a] in self.padded for a, _ in lin.coefs):
                    self.padded.add(axis)
