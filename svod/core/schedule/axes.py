"""Two passes over a kernel AST that change its ranges: split_ranges, then merge_ranges.

`split_ranges`: a range that accesses divide by a constant is split into two, if the constant divides its extent.

    STORE(y, i, LOAD(x, (i // 4)*8 + i % 4); i:12)            →   STORE(y, i*4 + j, LOAD(x, i*8 + j); i:3, j:4)

`merge_ranges`: adjacent ranges of a stage are merged if every access uses them only as one number. The accesses of a stage are its loads,
gates, its STORE, and the coordinates at which it is read. A pair (c, d) of a stage is merged only together with the pair (i, j) of its
reader.

    X = STAGE(LOAD(x, c*5 + d), c:4, d:5)                          X = STAGE(LOAD(x, c), c:20)
    STORE(y, i*5 + j, INDEX(X, i, j); i:4, j:5)                →   STORE(y, i, INDEX(X, i); i:20)

Both run after rangeify, which turns RESHAPEs into division and modulo, and before the canonical form.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp

Coords = tuple[UOp, ...]


def range_lists(u: UOp) -> tuple[UOp, ...]:
    """The ranges that a STAGE, STORE or REDUCE names; () for other nodes."""
    if u.op is Ops.STAGE:
        return u.src[1:]
    if u.op is Ops.STORE:
        return u.src[2:]
    return u.src[u.arg[1]:] if u.op is Ops.REDUCE else ()


def _rebuild(ast: UOp, mapping: dict[UOp, UOp], lists: Callable[[Coords], Coords], recoordinate: Callable[[UOp, Coords], Coords]) -> UOp:
    """Rebuild `ast` with other RANGEs (and DEFINE_VARs). In expressions `mapping` replaces them, and the result is simplified. `lists` maps
    the RANGEs that a node names; `recoordinate` maps the coordinates at which an (old) STAGE is read."""
    done: dict[UOp, UOp] = {}
    for u in ast.toposort():
        if u.op is Ops.RANGE or u.op is Ops.DEFINE_VAR:
            done[u] = mapping.get(u, u)
            continue
        named = range_lists(u)
        if named:
            values = tuple([done[s] for s in u.src[:len(u.src) - len(named)]])
            done[u] = u.replace(src=values + lists(named))
            continue
        src = tuple([done[s] for s in u.src])
        if u.op is Ops.INDEX and u.src[0].op is Ops.STAGE:
            done[u] = u.replace(src=(src[0], *recoordinate(u.src[0], src[1:])))
        elif src == u.src:
            done[u] = u
        elif u.op in sy.SIMPLIFIERS and (src[0].dtype == dtypes.index or (u.op is Ops.AND and u.dtype == dtypes.bool)):
            done[u] = sy.SIMPLIFIERS[u.op](*src)
        elif u.op is Ops.WHERE and src[0] in (sy.TRUE, sy.FALSE):
            done[u] = src[1] if src[0] is sy.TRUE else src[2]
        elif u.op is Ops.LOAD and len(src) == 3 and src[2] in (sy.TRUE, sy.FALSE):
            done[u] = u.replace(src=src[:1]) if src[2] is sy.TRUE else src[1]
        else:
            done[u] = u.replace(src=src)
    return done[ast]


def replace_leaves(ast: UOp, mapping: dict[UOp, UOp]) -> UOp:
    """`ast` with DEFINE_VARs replaced by index expressions, also in extents of RANGEs; all expressions are simplified."""
    ranges = {r: r.replace(src=(sy.simplify(r.src[0], mapping), *r.src[1:])) for r in ast.walk(Ops.RANGE) if sy.is_symbolic(r)}

    def lists(named: Coords) -> Coords:
        return tuple([ranges.get(r, r) for r in named])

    return _rebuild(ast, {**ranges, **mapping}, lists, lambda _, coords: coords)


def replace_ranges(value: UOp, mapping: dict[UOp, UOp]) -> UOp:
    """`value` with RANGEs replaced by index expressions; all expressions are simplified."""
    return _rebuild(value, mapping, lambda named: named, lambda _, coords: coords)


def next_range(nodes: Sequence[UOp]) -> int:
    """The first unused axis id of a RANGE."""
    return max((u.arg for u in nodes if u.op is Ops.RANGE), default=-1) + 1


# -- split ----------------------------------------------------------------------------------------------------------------
def _cut_points(nodes: Sequence[UOp]) -> dict[UOp, int]:
    """RANGE → the smallest constant that an access divides it by, among the constants that divide its extent."""
    factors: dict[UOp, int] = {}
    for u in nodes:
        if u.op in (Ops.IDIV, Ops.MOD) and u.dtype == dtypes.index and u.src[0].op is Ops.RANGE and u.src[1].op is Ops.CONST:
            r, c = u.src[0], int(u.src[1].arg)
            if not sy.is_symbolic(r) and 1 < c < sy.extent_of(r) and sy.extent_of(r) % c == 0:
                factors[r] = min(c, factors.get(r, c))
    return factors


def _is_affine(u: UOp) -> bool:
    return not sy.affine(u).atoms


def split_ranges(ast: UOp) -> UOp:
    """Split ranges; see the module's docstring. A stage is split only if the coordinates of its reads stay affine, or are ranges that can
    be split in turn."""
    while True:
        nodes = ast.toposort()
        cuts = _cut_points(nodes)
        for u in nodes:
            if u.op is Ops.INDEX and u.src[0].op is Ops.STAGE:
                for r, e in zip(u.src[0].src[1:], u.src[1:], strict=True):
                    c = cuts.get(r)
                    if c is not None and not (e.op is Ops.RANGE or (_is_affine(sy.floordiv(e, c)) and _is_affine(sy.floormod(e, c)))):
                        del cuts[r]
        if not cuts:
            return ast
        number = next_range(nodes)
        parts: dict[UOp, Coords] = {}
        for r, c in cuts.items():
            parts[r] = (sy.make_range(sy.extent_of(r) // c, number), sy.make_range(c, number + 1))
            number += 2
        mapping = {r: sy.add(sy.scale(hi, cuts[r]), lo) for r, (hi, lo) in parts.items()}

        def lists(ranges: Coords, parts: dict[UOp, Coords] = parts) -> Coords:
            return tuple([p for r in ranges for p in parts.get(r, (r,))])

        def recoordinate(stage: UOp, coords: Coords, cuts: dict[UOp, int] = cuts) -> Coords:
            result: list[UOp] = []
            for r, e in zip(stage.src[1:], coords, strict=True):
                result += [sy.floordiv(e, cuts[r]), sy.floormod(e, cuts[r])] if r in cuts else [e]
            return tuple(result)

        ast = _rebuild(ast, mapping, lists, recoordinate)


# -- merge ----------------------------------------------------------------------------------------------------------------
def _index_uses(nodes: Sequence[UOp]) -> Iterator[UOp]:
    """The outermost index expressions of an AST: index operands of nodes that are no index arithmetic themselves. Coordinates at which
    stages are read are left out."""
    for u in nodes:
        if (u.dtype == dtypes.index and u.op is not Ops.CAST) or u.op in (Ops.STAGE, Ops.REDUCE):
            continue
        if u.op is Ops.INDEX and u.src[0].op is Ops.STAGE:
            continue
        last = 2 if u.op is Ops.STORE else len(u.src)
        for s in u.src[:last]:
            if s.dtype == dtypes.index and s.op not in (Ops.CONST, Ops.CAST):
                yield s


def _as_one(expr: UOp, a: UOp, b: UOp) -> bool:
    """Whether `expr` depends on the ranges a and b only as extent(b)*a + b."""
    extent = sy.extent_of(b)
    todo, seen = [expr], set[UOp]()
    while todo:
        part = todo.pop()
        if part in seen:
            continue
        seen.add(part)
        terms, _ = sy.linear(part)
        if terms.get(a, 0) != extent * terms.get(b, 0):
            return False
        for atom in terms:
            if atom.op not in (Ops.RANGE, Ops.CAST, Ops.DEFINE_VAR):
                todo += atom.src
    return True


Pair = tuple[UOp, UOp]


def _mergeable(nodes: Sequence[UOp]) -> set[Pair]:
    """The largest set of adjacent pairs of RANGEs that can all be merged: start with every pair, and drop pairs that an access forbids
    until nothing changes."""
    pairs = {pair for u in nodes for pair in pairwise(range_lists(u)) if not any(map(sy.is_symbolic, pair))}
    if not pairs:
        return pairs
    by_range: dict[UOp, list[Pair]] = {}
    for pair in pairs:
        for r in pair:
            by_range.setdefault(r, []).append(pair)

    def touching(expr: UOp) -> list[Pair]:
        return [p for r in sy.ranges_of(expr) for p in by_range.get(r, ())]

    for expr in _index_uses(nodes):
        for pair in touching(expr):
            if pair in pairs and not _as_one(expr, *pair):
                pairs.discard(pair)
    reads = [u for u in nodes if u.op is Ops.INDEX and u.src[0].op is Ops.STAGE]
    before = -1
    while pairs and len(pairs) != before:
        before = len(pairs)
        for u in reads:
            aligned = _aligned_pairs(u, pairs)
            for i, e in enumerate(u.src[1:]):
                inside = {aligned[j] for j in (i - 1, i) if j in aligned}
                pairs -= {pair for pair in touching(e) if pair in pairs and pair not in inside and not _as_one(e, *pair)}
    return pairs


def _aligned_pairs(read: UOp, pairs: set[Pair]) -> dict[int, Pair]:
    """Compare a read of a stage with the stage's pairs of RANGEs: number of a coordinate → the reader's pair of RANGEs that is read
    there and at the next coordinate, position by position along a pair of the stage. Pairs of the stage that are read in another way are
    dropped from `pairs`."""
    ranges, coords = read.src[0].src[1:], read.src[1:]
    aligned: dict[int, Pair] = {}
    for i in range(len(ranges) - 1):
        if (ranges[i], ranges[i + 1]) not in pairs:
            continue
        if (coords[i], coords[i + 1]) in pairs and coords[i + 1].src[0] is ranges[i + 1].src[0]:
            aligned[i] = coords[i], coords[i + 1]
        elif not (coords[i].op is Ops.CONST and coords[i + 1].op is Ops.CONST):
            pairs.discard((ranges[i], ranges[i + 1]))
    return aligned


def _marked(merged: UOp, run: Coords) -> UOp:
    """A merged RANGE that keeps the launch positions of the RANGEs in it, with their extents (`svod.core.schedule.thread_indices`)."""
    marks = tuple(m if m.src else m.replace(src=r.src[:1]) for r in run for m in r.src[1:])
    return merged.replace(src=(*merged.src, *marks))


def merge_ranges(ast: UOp) -> UOp:
    """Merge ranges; see the module's docstring."""
    nodes = ast.toposort()
    pairs = _mergeable(nodes)
    if not pairs:
        return ast
    number = next_range(nodes)
    groups: dict[Coords, list[Coords]] = {}
    merged: dict[Coords, UOp] = {}
    mapping: dict[UOp, UOp] = {}
    for u in nodes:
        named = range_lists(u)
        if not named or named in groups:
            continue
        runs: list[list[UOp]] = [[named[0]]]
        for a, b in pairwise(named):
            if (a, b) in pairs:
                runs[-1].append(b)
            else:
                runs.append([b])
        groups[named] = [tuple(run) for run in runs]
        for run in groups[named]:
            if len(run) > 1:
                extent = 1
                for r in run:
                    extent *= sy.extent_of(r)
                    mapping[r] = sy.INDEX_ZERO
                # every access uses the ranges of the run as one number, so the last range can represent them all
                merged[run] = mapping[run[-1]] = _marked(sy.make_range(extent, number), run)
                number += 1

    def lists(ranges: Coords) -> Coords:
        return tuple([merged.get(run, run[0]) for run in groups[ranges]])

    def recoordinate(stage: UOp, coords: Coords) -> Coords:
        result: list[UOp] = []
        at = 0
        for run in groups[stage.src[1:]] if len(stage.src) > 1 else ():
            flat = coords[at]
            for r, e in zip(run[1:], coords[at + 1:at + len(run)], strict=True):
                flat = sy.add(sy.scale(flat, sy.extent_of(r)), e)
            result.append(flat)
            at += len(run)
        return tuple(result)

    return _rebuild(ast, mapping, lists, recoordinate)


# -- merge what accesses take apart ---------------------------------------------------------------------------------------
class MergedRanges(NamedTuple):
    """RANGEs of a stage (a STAGE or STORE) to be merged, the last one innermost."""

    stage: UOp
    run: Coords


def merge_apart(ast: UOp, merged: Sequence[MergedRanges]) -> UOp:
    """`ast` with RANGEs merged, however accesses use them: each old RANGE is computed from the new one by division. The new RANGE is placed
    where the first one was.

    STORE(y, i*9 + j*8, LOAD(x, j*4 + i); i:4, j:5), run (j, i) → STORE(y, k%4*9 + k//4*8, LOAD(x, k); k:20)
    """
    number = next_range(ast.toposort())
    made: dict[UOp, tuple[Coords, UOp]] = {}        # RANGE of a run → (the run, the merged RANGE)
    mapping: dict[UOp, UOp] = {}
    for i, (_, run) in enumerate(merged):
        whole = sy.make_range(prod(sy.extent_of(r) for r in run), number + i)
        inside = 1
        for r in reversed(run):
            mapping[r] = sy.floormod(sy.floordiv(whole, inside), sy.extent_of(r))
            inside *= sy.extent_of(r)
            made[r] = run, whole

    def lists(ranges: Coords) -> Coords:
        return tuple(dict.fromkeys(made[r][1] if r in made else r for r in ranges))

    def recoordinate(stage: UOp, coords: Coords) -> Coords:
        at = dict(zip(stage.src[1:], coords, strict=True))
        result: dict[UOp, UOp] = {}
        for r, e in at.items():
            run, whole = made.get(r, ((r,), r))
            if len(run) == 1:
                result[whole] = e
                continue
            flat = sy.INDEX_ZERO
            for one in run:
                flat = sy.add(sy.scale(flat, sy.extent_of(one)), at[one])
            result[whole] = flat
        return tuple(result.values())

    return _rebuild(ast, mapping, lists, recoordinate)
