"""Bounds inference: the positions of a stage that its readers need in one iteration of the loops around it.

    out reads s1[o1 + r1, r0], STAGE(s1, o1) with o1 in tiles of 8, r1 of 3, r0 of 256
        s1 from (8·o1, 0), of 10 × 256 positions

The terms of a start are loop rows of the state, which the emitter replaces by index values (`Axes.placed_at`).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from svod.core.kernel.kernel import LinearIndex, Node, ResolvedStage, linear_of

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


RegionOf = Callable[[ResolvedStage, int], RequiredDim]
IsEven = Callable[[ResolvedStage, int], bool]


def required_region(reads: Iterable[tuple[ResolvedStage, Node]], dim: int, region_of: RegionOf, is_even: IsEven) -> RequiredDim | None:
    """The smallest region of a dim that holds all `reads` of a stage. Each read is by a stage `r`, which covers `region_of(r, a)` along its
    local axis `a`; `is_even(r, a)`: that region always starts where its loops say, and no tile is moved back. None if the region may be
    anywhere: positions are known only at run time, or starts differ by more than a constant."""
    union: RequiredDim | None = None
    for r, node in reads:
        region = _region_of_index(r, node.dims[dim], region_of, is_even)
        if region is None:
            return None
        (terms, low), extent = region
        high = low + extent - 1
        if union is not None:
            (others, at), extent = union
            if others != terms:
                return None
            low, high = min(low, at), max(high, at + extent - 1)
        union = RequiredDim((terms, low), high - low + 1)
    assert union is not None, "a stage that is computed has readers"
    return union


def _region_of_index(r: ResolvedStage, lin: LinearIndex, region_of: RegionOf, is_even: IsEven) -> RequiredDim | None:
    """The positions of an index expression of a stage, over the regions of its axes."""
    parts = [(region_of(r, a), c) for a, c in lin.coefs]
    for atom, c in lin.atoms:
        quotient = _region_of_quotient(r, r.nodes[atom], region_of, is_even)
        if quotient is None:
            return None
        parts.append((quotient, c))
    start: Lin = ({}, lin.const)
    below = above = 0
    for (first, extent), c in parts:
        start = add_lins(start, first, c)
        if c > 0:
            above += c * (extent - 1)
        else:
            below += c * (extent - 1)
    terms, const = start
    return RequiredDim((terms, const + below), above - below + 1)


def _region_of_quotient(r: ResolvedStage, n: Node, region_of: RegionOf, is_even: IsEven) -> RequiredDim | None:
    """The positions of a quotient by a constant that divides whatever moves the dividend."""
    if n.op != "IDIV" or r.nodes[n.src[1]].kind != "const" or not all(is_even(r, a) for a in n.deps):
        return None
    dividend, by = _region_of_index(r, linear_of(r, n.src[0]), region_of, is_even), r.nodes[n.src[1]].arg
    if dividend is None or any(c % by for c in dividend.start[0].values()):
        return None
    (terms, low), extent = dividend
    return RequiredDim(({v: c // by for v, c in terms.items()}, low // by), (low + extent - 1) // by - low // by + 1)
