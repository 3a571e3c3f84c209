"""Decides which values stay in registers, spread over threads in tiles: results of matrix instructions, and stages to which HOLD gives the
layout of such results.

    s2[q, k] = Σ …              TC(s2.r0, (mma_bf16,s2.o1,s2.o2)) LOCAL(s2.o1, 4)
    s3[q] = max over k of s2    HOLD(s3, (mma_bf16,s3.o1,s3.r0)) LOCAL(s3.o1, 4)        each thread reads the elements that it has itself
    s6[q, k] = exp(s2 - s3)     an operand of TC, in rows: computed where it is multiplied, as its fragments lie like those of results

A stage stays in registers if every reader needs, in each thread, only elements that this thread has computed. An operand of an instruction
is computed in place, without memory, if it reads nothing but such stages and its elements belong to the same threads.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from svod.core.kernel.groups import BLOCK_ROLES, StageThreads
from svod.core.kernel.intrinsics import TensorizePlan
from svod.core.kernel.kernel import LinearIndex, Node, ResolvedStage
from svod.core.kernel.layout import Layouts
from svod.core.kernel.placement import EmittedLoop, Placement, is_derived
from svod.core.kernel.scheduler import DOT, LOOP, Scheduler
from svod.core.machine.isa import DOTS, Fragment

Pieces = tuple[tuple[EmittedLoop, ...], ...]


class HeldProduct(NamedTuple):
    """A product that has a stage as an operand. `r`: the stage that sums the product; `read`: its read of the operand; `plan`: the
    instruction; `number`: 0 for the first operand, 1 for the second."""

    r: ResolvedStage
    read: Node
    plan: TensorizePlan
    number: int

    @property
    def fragment(self) -> Fragment | None:
        """The elements of the operand that each thread has; None if the instruction reads the operand from memory."""
        fragments = self.plan.dot.fragments
        return None if fragments is None or self.plan.dot.reads_shared else fragments[1 + self.number]

    def tile_axes(self, along: int) -> tuple[int, int]:
        """The local axes of the rows and columns of the operand's tiles. `along`: the axis that is summed."""
        return (self.plan.rows, along) if self.number == 0 else (along, self.plan.columns)


def product_with(placement: Placement, layouts: Layouts, s: int) -> HeldProduct | None:
    """The product that has stage `s` as an operand, if that is the stage's only reader; else None."""
    reads = list(placement.reads_of(s))
    if s not in layouts.packed or len(reads) != 1:
        return None
    (r, node), = reads
    plan = layouts.dots[r.stage.index]
    return HeldProduct(r, node, plan, next(k for k, o in enumerate(plan.operands) if o.stage == s))


def is_computed_in_place(state: Scheduler, placement: Placement, layouts: Layouts, s: int) -> bool:
    """Whether an operand is computed where it is multiplied, by the threads that multiply it."""
    product = product_with(placement, layouts, s)
    if product is None or product.fragment is None or not placement.paths[s]:
        return False
    r, dot = placement.stage(s), product.plan.dot
    assert dot.fragments is not None
    packed = layouts.packed[s]
    if packed.padded != state.kernel.axes[r.stage.outs[packed.dim]].extent:
        return False
    if product.fragment.threads != dot.fragments[0].threads or any(n.kind == "load" for n in r.nodes):
        return False
    chosen = [state.dots[q] for q in r.reads]
    return bool(chosen) and all(c is not None and c.name == dot.name for c in chosen) and all(placement.paths[q] for q in r.reads)


class _Reading(NamedTuple):
    """A read, expressed over the axes of the stage `r` that computes in tiles. `fragment`: the elements of a tile that each thread has;
    `tile`: the local axes of the tile's rows and columns; `dims`: the position read."""

    r: ResolvedStage
    instruction: str
    fragment: Fragment
    tile: tuple[int, int]
    dims: tuple[LinearIndex, ...]


class Holders:
    """Finds the stages of a phase that stay in registers. `axes`: the loops of stages that are readers; `opened`: the loop rows around the
    stages in question; `digits`: `thread_digits` of the loop rows bound to threads."""

    def __init__(self, state: Scheduler, placement: Placement, layouts: Layouts, axes: Mapping[int, Pieces], opened: frozenset[int],
                 threads: Mapping[int, StageThreads], digits: Mapping[int, tuple[int, int]]) -> None:
        self.state, self.placement, self.layouts, self.axes = state, placement, layouts, axes
        self.opened, self.threads, self.digits = opened, threads, digits

    def keep(self, s: int, pieces: Pieces) -> bool:
        """Whether the values of stage `s` stay in the registers of the threads that compute them. `pieces`: the loops of its outputs."""
        chosen = self.state.dots[s]
        if chosen is None or not self.placement.paths[s]:
            return False
        outs = len(self.placement.stage(s).stage.outs)
        if any(p.role == LOOP and p.extent > 1 for own in pieces[:outs] for p in own):
            return False
        return all(self._reads_its_own(s, pieces[:outs], q, node) for q, node in self.placement.reads_of(s))

    def _reads_its_own(self, s: int, pieces: Pieces, q: ResolvedStage, node: Node) -> bool:
        """Whether each thread reads only elements of stage `s` that it has computed."""
        chosen, reading = self.state.dots[s], self._reading(q, node)
        if chosen is None or reading is None or reading.instruction != chosen.name:
            return False
        own, results = self.placement.stage(s), DOTS[chosen.name].fragments
        assert results is not None
        reader = reading.r.stage.index
        if self.threads[s].threads != self.threads[reader].threads:
            return False
        tiles, axes = (own.axes.index(chosen.rows), own.axes.index(chosen.columns)), self.axes[reader]
        for d, lin in enumerate(reading.dims):
            side = tiles.index(d) if d in tiles else -1
            tile = reading.tile[side] if side >= 0 else -1
            moving = [(a, p) for a, _ in lin.coefs for p in axes[a] if p.extent > 1 and p.row not in self.opened]
            if lin.atoms or any(p.role == LOOP or a != tile for a, p in moving):
                return False
            if tile >= 0 and (lin.coef(tile) != 1 or lin.const):
                return False
            if tile >= 0 and not self._alike(pieces[d], results[0], axes[tile], reading.fragment, side):
                return False
        return True

    def _reading(self, q: ResolvedStage, node: Node) -> _Reading | None:
        """A read by stage `q` as `_Reading`: over the axes of `q` if it computes in tiles, or of the product that has `q` as an operand
        computed in place. None in other cases."""
        s = q.stage.index
        if not is_derived(q.stage):
            chosen = self.state.dots[s]
            fragments = DOTS[chosen.name].fragments if chosen is not None else None
            if chosen is None or fragments is None:
                return None
            return _Reading(q, chosen.name, fragments[0], (q.axes.index(chosen.rows), q.axes.index(chosen.columns)), node.dims)
        product = product_with(self.placement, self.layouts, s)
        if product is None or product.fragment is None or not is_computed_in_place(self.state, self.placement, self.layouts, s):
            return None
        chosen = self.state.dots[product.r.stage.index]
        assert chosen is not None
        return _Reading(product.r, chosen.name, product.fragment, product.tile_axes(product.r.axes.index(chosen.axis)),
                        tuple([_composed(lin, product.read.dims) for lin in node.dims]))

    def _alike(self, own: tuple[EmittedLoop, ...], results: Fragment, of_reader: tuple[EmittedLoop, ...], fragment: Fragment,
               side: int) -> bool:
        """Whether computing stage and reader bind the same threads to an axis, and each thread reads only positions that it has. `side`: 0
        for rows, 1 for columns."""
        threads = [[(self.digits[p.row], p.stride) for p in loops if p.role in BLOCK_ROLES and p.extent > 1]
                   for loops in (own, of_reader)]
        return threads[0] == threads[1] and _positions(of_reader, fragment, side) <= _positions(own, results, side)


def _positions(loops: tuple[EmittedLoop, ...], fragment: Fragment, side: int) -> set[int]:
    """The positions of an axis that one thread has, relative to its first one. Loops over the axis are not counted."""
    steps = [(p.extent, p.stride) for p in loops if p.role not in (*BLOCK_ROLES, LOOP, DOT)]
    steps += [(d.extent, (d.rows, d.columns)[side]) for d in fragment.elements if (d.rows, d.columns)[side]]
    at = {0}
    for extent, stride in steps:
        at = {x + k * stride for x in at for k in range(extent)}
    return at


def _composed(lin: LinearIndex, dims: tuple[LinearIndex, ...]) -> LinearIndex:
    """Substitute: an index over the dims of a stage becomes one over the axes of the reader, which reads the stage at `dims`."""
    const, coefs = lin.const, dict[int, int]()
    for d, c in lin.coefs:
        const += c * dims[d].const
        for a, k in dims[d].coefs:
            coefs[a] = coefs.get(a, 0) + c * k
    atoms: tuple[Any, ...] = (*lin.atoms, *[x for d, _ in lin.coefs for x in dims[d].atoms])
    return LinearIndex(tuple(sorted((a, c) for a, c in coefs.items() if c)), const, atoms)
