"""Turns a sum of products of two stages into a product of two matrices.

    out[n, o, y, x] = Σ c, i, j of A[n, c, y, x, i, j] · B[o, c, i, j]          A[n, c, y, x, i, j] = p[n, y + i, x + j, c]

becomes, with m for (n, y, x) and k for (i, j, c)

    out[m, o] = Σ k of A[m, k] · B[o, k]                                       A[m, k] = p[m // YX, m // X % Y + k // JC, …, k % C]

All output axes that only one factor has become one axis, and so do the summed axes. Of these, the axis along which the loads of most
factors are contiguous comes last, so that both factors are copied in vectors. Axes that both factors have (the groups of a convolution, a
batch) and axes whose extents vary stay. Indices of the store, and of other work on the sum, are recovered by division. A factor that is
read as A[n, c, y + i, x + j] first becomes a stage over the axes that it depends on. A factor that copies another stage
position by position is merged together with it.
"""
from __future__ import annotations

from typing import NamedTuple

from svod.core.ir import symbolic as sy
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.axes import MergedRanges, merge_apart, next_range, range_lists, replace_ranges
from svod.errors import KernelOptError

Coords = tuple[UOp, ...]


class SumOfProducts(NamedTuple):
    """A sum of products. `factors`: two reads of stages; `own`: per factor, the output RANGEs of constant extent that only it has;
    `summed`: the reduce RANGEs."""

    factors: tuple[UOp, UOp]
    own: tuple[Coords, Coords]
    summed: Coords


def flatten(ast: UOp, stage: UOp) -> UOp:
    """`ast` with the axes of the sum in `stage`, a STORE or STAGE, merged. Raises KernelOptError with the reason."""
    read = set(ast.walk(Ops.PARAM))
    ast, stage = _over_own_ranges(ast, stage)
    product = _product(stage)
    summed = _contiguous_last(product)
    runs = [run for run in (*product.own, summed) if len(run) > 1]
    if not runs:
        raise KernelOptError("it is a product of two matrices already")
    merged = [MergedRanges(stage, run) for run in runs]
    for f in product.factors:
        if sum(f.src[0] in u.src for u in ast.toposort() if u.op is Ops.INDEX) != 1:
            raise KernelOptError("a factor is read by other stages too")
        merged += _merged_in(f, runs)
    flat = merge_apart(ast, merged)
    if set(flat.walk(Ops.PARAM)) != read:
        raise KernelOptError("all that it reads of a parameter is padding")
    return flat


def _merged_in(read: UOp, runs: list[Coords]) -> list[MergedRanges]:
    """The RANGEs to be merged in the stage that `read` reads position by position; if that is a copy, in the stage that it copies too."""
    stage = read.src[0]
    at = dict(zip(read.src[1:], stage.src[1:], strict=True))
    inside = [tuple([at[r] for r in run]) for run in runs if all(r in at for r in run)]
    is_copy = stage.src[0].op is Ops.INDEX and stage.src[0].src[0].op is Ops.STAGE and _is_by_position(stage.src[0])
    return [MergedRanges(stage, run) for run in inside] + (_merged_in(stage.src[0], inside) if is_copy else [])


def _factors(stage: UOp) -> tuple[UOp, UOp, Coords]:
    """(first factor, second factor, summed RANGEs) of the products that a stage sums."""
    value = stage.src[1] if stage.op is Ops.STORE else stage.src[0]
    reduces = [u for u in value.toposort(gate=lambda n: n.op is not Ops.STAGE) if u.op is Ops.REDUCE]
    if len(reduces) != 1 or reduces[0].arg != ("ADD", 1):
        raise KernelOptError("its value is not one sum")
    product = _uncast(reduces[0].src[0])
    factors = [_uncast(s) for s in product.src] if product.op is Ops.MUL else []
    if any(f.op is not Ops.INDEX or f.src[0].op is not Ops.STAGE for f in factors) or len({f.src[0] for f in factors}) != 2:
        raise KernelOptError("it does not sum up products of two stages")
    return factors[0], factors[1], reduces[0].src[1:]


def _is_by_position(f: UOp) -> bool:
    return all(e.op is Ops.RANGE for e in f.src[1:]) and len(set(f.src[1:])) == len(f.src) - 1


def _over_own_ranges(ast: UOp, stage: UOp) -> tuple[UOp, UOp]:
    """(kernel, stage) rewritten so that both factors are read position by position."""
    first, second, _ = _factors(stage)
    number, made = next_range(ast.toposort()), dict[UOp, UOp]()
    for f in (first, second):
        source = f.src[0]
        if _is_by_position(f):
            continue
        if any(u.op is Ops.REDUCE for u in source.src[0].toposort(gate=lambda n: n.op is not Ops.STAGE)) \
                or any(sy.affine(e).atoms for e in f.src[1:]):
            raise KernelOptError("a factor is a sum itself, or looks positions up")
        used = sorted({r for e in f.src[1:] for r in sy.ranges_of(e)}, key=lambda r: int(r.arg))
        fresh = {r: r.replace(arg=number + i) for i, r in enumerate(used)}
        number += len(used)
        at = {r: sy.simplify(e, fresh) for r, e in zip(source.src[1:], f.src[1:], strict=True)}
        made[f] = UOp(Ops.INDEX, f.dtype, (UOp(Ops.STAGE, f.dtype, (replace_ranges(source.src[0], at), *fresh.values())), *used))
    if not made:
        return ast, stage
    new = stage.substitute(made)
    return ast.substitute({stage: new}), new


def _product(stage: UOp) -> SumOfProducts:
    first, second, summed = _factors(stage)
    if any(sy.is_symbolic(r) for r in summed):
        raise KernelOptError("how many positions it sums up depends on a variable")
    if not set(summed) <= set(first.src[1:]) & set(second.src[1:]):
        raise KernelOptError("it sums up along an axis that one factor does not have")
    own = [tuple([r for r in range_lists(stage) if r in one.src[1:] and r not in other.src[1:] and not sy.is_symbolic(r)])
           for one, other in ((first, second), (second, first))]
    return SumOfProducts((first, second), (own[0], own[1]), summed)


def _uncast(u: UOp) -> UOp:
    while u.op is Ops.CAST:
        u = u.src[0]
    return u


def _contiguous_last(product: SumOfProducts) -> Coords:
    """The summed RANGEs; the one along which the loads of most factors are contiguous comes last."""
    def contiguous(r: UOp) -> int:
        found = 0
        for f in product.factors:
            own = f.src[0].src[f.src.index(r)]
            loads = [u for u in f.src[0].src[0].toposort(gate=lambda n: n.op is not Ops.STAGE) if u.op is Ops.LOAD]
            found += bool(loads) and all(sy.linear(u.src[0].src[1])[0].get(own) == 1 for u in loads)
        return found
    last = max(product.summed, key=lambda r: (contiguous(r), product.summed.index(r)))
    return (*[r for r in product.summed if r is not last], last)

