"""Bounds inference: the positions of a stage that its readers need in one iteration of the loops around it.

    out reads s1[o1 + r1, r0], STAGE(s1, o1) with o1 in tiles of 8, r1 of 3, r0 of 256
        s1 from (8·o1, 0), of 10 × 256 positions

The terms of a start are loop rows of the state, which the emitter replaces by index values (`Axes.placed_at`).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from svod.core.kernel.kernel import Node, ResolvedStage

Terms = dict[int, int]          # a loop row or an index value → coefficient
Lin = tuple[Terms, int]         # Σ coefficient·term + constant


class RequiredDim(NamedTuple):
    """The region of one dim: contiguous positions."""

    start: Lin
    extent: int


def sum_lins(values: list[Lin]) -> Lin:
    total: Lin = ({}, 0)
    for v in values:
        total = add_lins(total, v, 1)
    return total


def add_lins(a: Lin, b: Lin, k: int) -> Lin:
    """a + k·b, without terms that cancel."""
    (terms, const), (more, added) = a, b
    terms = dict(terms)
    for v, c in more.items():
        n = terms.get(v, 0) + k * c
        if n:
            terms[v] = n
        else:
            terms.pop(v, None)
    return terms, const + k * added


def required_region(reads: Iterable[tuple[ResolvedStage, Node]], dim: int, region_of: Callable[[ResolvedStage, int], RequiredDim]) \
        -> RequiredDim | None:
    """The smallest region of a dim that holds all `reads` of a stage. Each read is by a stage `r`, which covers `region_of(r, a)` along its
    local axis `a`. None if the region may be anywhere: positions are known only at run time, or starts differ by more than a constant."""
    union: RequiredDim | None = None
    for r, node in reads:
        lin = node.dims[dim]
        if lin.atoms:
            return None
        start: Lin = ({}, lin.const)
        below = above = 0
        for a, c in lin.coefs:
            first, extent = region_of(r, a)
            start = add_lins(start, first, c)
            if c > 0:
                above += c * (extent - 1)
            else:
                below += c * (extent - 1)
        terms, const = start
        low, high = const + below, const + above
        if union is not None:
            (others, at), extent = union
            if others != terms:
                return None
            low, high = min(low, at), max(high, at + extent - 1)
        union = RequiredDim((terms, low), high - low + 1)
    assert union is not None, "a stage that is computed has readers"
    return union
