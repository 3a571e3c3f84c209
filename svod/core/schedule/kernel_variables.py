"""Variables of kernel ASTs: replaced by values, given other bounds, renamed, divided into buckets."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from svod.core.ir import symbolic as sy
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import narrowed, widened
from svod.core.schedule.axes import replace_leaves
from svod.core.schedule.regions import reached_sizes


def specialize(ast: UOp, values: Mapping[str, int]) -> UOp:
    """A kernel AST with its variables replaced by values: extents become constants, and index expressions are simplified."""
    constants = {u: sy.const(values[u.arg[0]]) for u in ast.walk(Ops.DEFINE_VAR) if u.arg[0] in values}
    return replace_leaves(ast, constants) if constants else ast


def with_bounds(ast: UOp, limits: Mapping[str, tuple[int, int]]) -> UOp:
    """A kernel AST whose variables have the bounds `limits`, such as the bounds in the plan that calls it."""
    if not limits:
        return ast
    return _with_variables(ast, {u: u.replace(arg=(u.arg[0], *limits[u.arg[0]])) for u in ast.walk(Ops.DEFINE_VAR) if u.arg[0] in limits})


def kernel_variables(ast: UOp) -> dict[str, tuple[int, int]]:
    """The variables of a kernel AST and their bounds, in the order of their names."""
    return {u.arg[0]: (u.arg[1], u.arg[2]) for u in sorted(ast.walk(Ops.DEFINE_VAR), key=lambda u: int(u.arg[0][1:]))}


def rename_variables(ast: UOp) -> tuple[UOp, tuple[UOp, ...]]:
    """(kernel AST with its variables renamed to v0, v1, … in order of appearance, the original variables). Bounds are widened, so that
    kernels with nearly equal bounds become one."""
    given = list(dict.fromkeys(ast.walk(Ops.DEFINE_VAR)))
    if not given:
        return ast, ()
    wide = {}
    for i, u in enumerate(given):
        _, low, high = u.arg[:3]
        wide[u] = UOp(Ops.DEFINE_VAR, u.dtype, (), (f"v{i}", min(low, 1), widened(high)))
    return _with_variables(ast, wide), tuple(given)


def buckets_of(variable: UOp) -> tuple[tuple[int, int], ...]:
    """(least, largest) value of each bucket of a graph's DEFINE_VAR; () if it has no buckets."""
    _, low, high, _, ends = variable.arg
    if not ends:
        return ()
    ends = ends if ends[-1] == high else (*ends, high)
    return tuple((first, last) for first, last in zip((low, *(e + 1 for e in ends)), ends, strict=False))


def in_bucket(ast: UOp, bounds: Mapping[str, tuple[int, int]]) -> UOp:
    """A kernel AST for variables within `bounds`, which are widened as in `rename_variables`. A variable with a single value left is
    replaced by it."""
    wide = {name: (low if low <= 1 else narrowed(low), widened(high)) for name, (low, high) in bounds.items()}
    one = {name: low for name, (low, high) in wide.items() if low == high}
    return with_bounds(specialize(ast, one), {name: b for name, b in wide.items() if name not in one})


def _with_variables(ast: UOp, mapping: dict[UOp, UOp]) -> UOp:
    """A kernel AST with its variables replaced by others. The sizes of PARAMs change by as much as the bounds of their indices."""
    made = replace_leaves(ast, mapping)
    before, after = reached_sizes(ast), reached_sizes(made)
    sizes = {p: p.replace(arg=replace(p.arg, size=p.arg.size + after[p] - size)) for p, size in before.items()
             if after.get(p, size) != size}
    return made.substitute(sizes) if sizes else made
