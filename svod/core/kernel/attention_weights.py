"""Finds the weights of an attention: exponentials relative to the maximum of their row that only sums over that row read, the largest of
which is 1.

    M[c] = max_k X[c, k]       W[c, k] = exp(X[c, k] - M[c])       S[c] = Σ_k W[c, k]       y[c, n] = Σ_k W[c, k] / S[c] · V[k, n]

Where W is tiny, W, W·V and the first partial sums of y are subnormal numbers, with which some processors compute slowly (an Intel Xeon of
2023: about 150 cycles for a multiply-add of one vector). On CPUs lowering sets weights below 2^-100 to 0, which changes y by no more than
2^-100 · Σ_k |V[k, n]| where V is finite. Kernels that compute logarithms of y, or divide by it, keep their weights; exp(y), and y plus a
constant, round so small a change away. ONLINE sets weights that are rounded to 16 bits to 0 below 2^-126.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any, NamedTuple

from svod.core.ir.dtype import dtypes
from svod.core.kernel.kernel import Kernel, LinearIndex, Node, ResolvedStage, node_sources

FLOATS = dtypes.float32, dtypes.float64
NEEDS_TINY = frozenset({"LOG", "LOG2", "POW", "RECIPROCAL"})      # operations whose results differ much where tiny operands do
ROUNDS_TINY = frozenset({"EXP", "EXP2", "COS"})     # operations whose result is 1 for all tiny operands
LEAST_ADDED = 2.0 ** -64        # least constant to which adding a tiny number changes nothing

Resolved = Sequence[ResolvedStage | None]


class _Value(NamedTuple):
    """A value that has the elements of a row of exponentials: a node of a stage, and the local axes along which the row runs."""

    r: ResolvedStage
    node: int
    along: tuple[int, ...]


def attention_weights(kernel: Kernel, inlined: frozenset[int]) -> frozenset[tuple[int, int]]:
    """The weights of a kernel with some stages inlined: (stage, number of the node that is the exponent). If a stage is inlined, its
    exponentials have copies, of which all are weights or none."""
    known = kernel.attention_weights.get(inlined)
    if known is None:
        resolved, found = kernel.resolve(inlined), dict[int, list[_Value | None]]()     # stage of a maximum → exponentials relative to it
        for r in resolved:
            for n, node in enumerate(r.nodes if r is not None else ()):
                if r is not None and node.op == "EXP" and (row := _maximum_of(resolved, r, node.src[0])) is not None:
                    along = _row_of(kernel, row, r, node.src[0]) if node.dtype in FLOATS else None
                    found.setdefault(row.stage.index, []).append(_Value(r, n, along) if along is not None else None)
        groups = [[v for v in values if v is not None] for values in found.values() if None not in values]
        weights = [v for group in groups if _only_weigh(kernel, resolved, group) for v in group]
        known = kernel.attention_weights[inlined] = frozenset((v.r.stage.index, v.r.nodes[v.node].src[0]) for v in weights)
    return known


# -- exponents --------------------------------------------------------------------------------------
def _maximum_of(resolved: Resolved, r: ResolvedStage, exponent: int) -> ResolvedStage | None:
    """The stage of a maximum that a node subtracts, or None."""
    node = r.nodes[exponent]
    read = r.nodes[_without_guard(r, node.src[1])] if node.op == "SUB" else None
    row = resolved[read.arg] if read is not None and read.kind == "read" else None
    return row if row is not None and row.nodes[row.value].kind == "reduce" and row.reductions[0].combiner == "MAX" else None


def _row_of(kernel: Kernel, row: ResolvedStage, r: ResolvedStage, exponent: int) -> tuple[int, ...] | None:
    """The local axes along which the row of an exponent runs, if the maximum that it subtracts, `row`, is that of its own row; else
    None."""
    value, peak = r.nodes[exponent].src
    read = r.nodes[_without_guard(r, peak)]
    if any(lin.atoms for lin in read.dims):
        return None
    reds = row.axes[len(row.stage.outs):]
    for along in permutations([a for a in r.nodes[value].deps if a not in read.deps], len(reds)):
        at = (*read.dims, *[LinearIndex(((a, 1),), 0, ()) for a in along])
        if all(_are_as_long(kernel, a, r.axes[b]) for a, b in zip(reds, along, strict=True)) \
                and _are_same(row, r, at, (row.reductions[0].values[0], value)):
            return along
    return None


def _without_guard(r: ResolvedStage, peak: int) -> int:
    """The node m of `where(m == -inf, 0, m)`, which keeps rows without a finite value from being NaN; any other node as it is."""
    node = r.nodes[peak]
    if node.op != "WHERE" or (r.nodes[node.src[1]].kind, r.nodes[node.src[1]].arg) != ("const", 0):
        return peak
    test, m = r.nodes[node.src[0]], node.src[2]
    return m if test.op == "CMPEQ" and test.src[0] == m and r.nodes[test.src[1]].arg == -math.inf else peak


def _are_as_long(kernel: Kernel, a: int, b: int) -> bool:
    first, second = kernel.axes[a], kernel.axes[b]
    return first.extent == second.extent and first.bound is second.bound


def _are_same(first: ResolvedStage, second: ResolvedStage, at: tuple[LinearIndex, ...], nodes: tuple[int, int]) -> bool:
    """Whether a node of one stage has the value of a node of another one. `at`: the axes of the first stage over those of the second,
    without atoms."""
    todo, seen = [nodes], set[tuple[int, int]]()
    while todo:
        nodes = todo.pop()
        if nodes in seen:
            continue
        seen.add(nodes)
        x, y = first.nodes[nodes[0]], second.nodes[nodes[1]]
        if x.kind == "axis":
            if y.kind != "axis" or at[x.arg] != LinearIndex(((y.arg, 1),), 0, ()):
                return False
            continue
        if _signature(x) != _signature(y) or [_over_axes(lin, at) for lin in _indices(x)] != [_over_axes(lin, ()) for lin in _indices(y)]:
            return False
        todo += zip(node_sources(x), node_sources(y), strict=True)
    return True


def _signature(n: Node) -> tuple[Any, ...]:
    """What two nodes of the same value have in common apart from operands and indices. The result of a reduction is like no other."""
    return n.kind, n.op, n.dtype, n.arg if n.kind not in ("reduce", "part") else id(n), len(n.src), n.gate < 0, n.alt < 0


def _indices(n: Node) -> tuple[LinearIndex, ...]:
    return n.dims if n.linear is None else (n.linear,)


def _over_axes(index: LinearIndex, at: tuple[LinearIndex, ...]) -> tuple[Any, ...]:
    """An index over the axes that `at` stands for: (coefficients, constant, coefficients of atoms). Without `at`, over its own."""
    coefs, const = dict[int, int](), index.const
    for axis, times in index.coefs:
        moved = at[axis] if at else LinearIndex(((axis, 1),), 0, ())
        const += times * moved.const
        for local, c in moved.coefs:
            coefs[local] = coefs.get(local, 0) + times * c
    return sorted((local, c) for local, c in coefs.items() if c), const, [c for _, c in index.atoms]


# -- readers ----------------------------------------------------------------------------------------
def _only_weigh(kernel: Kernel, resolved: Resolved, exponentials: list[_Value]) -> bool:
    """Whether nothing but sums over the whole row reads some values, at least one of them a sum of products with a matrix."""
    weighs, seen = False, set[tuple[int, int, bool]]()
    todo = [(v, False) for v in exponentials]
    while todo:
        v, is_product = todo.pop()
        if (v.r.stage.index, v.node, is_product) in seen:
            continue
        seen.add((v.r.stage.index, v.node, is_product))
        for red in v.r.reductions:
            if v.node in red.values:
                if red.combiner != "ADD" or any(a < len(v.r.stage.outs) for a in v.along):
                    return False
                if is_product and _needs_tiny(resolved, v.r, v.node):
                    return False
                weighs = weighs or is_product
        for n, node in enumerate(v.r.nodes):
            if v.node in node_sources(node):
                others = [s for s in node.src if s != v.node]
                if not _keeps_row(node, v, others):
                    return False
                todo.append((v._replace(node=n), is_product or any(_depends(v, s) for s in others)))
        if v.node == v.r.value:
            readers = [] if v.r.stage.is_output else list(_readers(kernel, resolved, v))
            if not readers or None in readers:
                return False
            todo += [(reader, is_product) for reader in readers if reader is not None]
    return weighs


def _needs_tiny(resolved: Resolved, r: ResolvedStage, summed: int) -> bool:
    """Whether the kernel computes logarithms of the sums over a node, or divides by them, so that tiny differences count."""
    todo, seen = [(r, n) for n in _sums_over(r, summed)], set[tuple[int, int]]()
    while todo:
        r, n = todo.pop()
        if (r.stage.index, n) in seen:
            continue
        seen.add((r.stage.index, n))
        users = [(i, node) for i, node in enumerate(r.nodes) if n in node.src]
        if any(node.op in NEEDS_TINY or (node.op == "FDIV" and node.src[1] == n) for _, node in users):
            return True
        todo += [(r, i) for i in (*[i for i, node in users if not _rounds_tiny(r, node)], *_sums_over(r, n))]
        if n == r.value:
            todo += [(q, i) for q in resolved if q is not None for i, node in enumerate(q.nodes)
                     if node.kind == "read" and node.arg == r.stage.index]
    return False


def _rounds_tiny(r: ResolvedStage, node: Node) -> bool:
    """Whether an operation has the same result for all tiny operands."""
    added = [abs(r.nodes[s].arg) for s in node.src if r.nodes[s].kind == "const"] if node.op in ("ADD", "SUB") else []
    return node.op in ROUNDS_TINY or max(added, default=0.0) >= LEAST_ADDED


def _sums_over(r: ResolvedStage, n: int) -> list[int]:
    """The results of reductions over a node. The first value of a reduction is part of all its results."""
    return [i for i, node in enumerate(r.nodes) if node.kind == "reduce"
            if n in (r.reductions[node.arg[0]].values[0], r.reductions[node.arg[0]].values[node.arg[1]])]


def _depends(v: _Value, node: int) -> bool:
    return not set(v.along).isdisjoint(v.r.nodes[node].deps)


def _keeps_row(node: Node, v: _Value, others: list[int]) -> bool:
    """Whether a node is `v` times one factor for the whole row, or times the elements of a matrix. `others`: its operands but `v`."""
    if node.kind == "cast":
        return node.dtype.is_float
    if node.op == "WHERE":
        return v.node != node.src[0] and not any(_depends(v, s) for s in others)
    if node.op == "FDIV":
        return v.node != node.src[1] and not _depends(v, node.src[1])
    if node.op != "MUL" or len(others) != 1:
        return False
    columns = set(v.r.nodes[others[0]].deps) - set(v.r.nodes[v.node].deps)
    return not _depends(v, others[0]) or any(a < len(v.r.stage.outs) for a in columns)


def _readers(kernel: Kernel, resolved: Resolved, v: _Value) -> Iterator[_Value | None]:
    """The reads of a stage's value; None for one that does not go along the whole row."""
    for r in resolved:
        for n, node in enumerate(r.nodes if r is not None else ()):
            if r is None or node.kind != "read" or node.arg != v.r.stage.index:
                continue
            dims = [node.dims[a] for a in v.along]
            along = tuple(lin.coefs[0][0] for lin in dims if len(lin.coefs) == 1 and lin.coefs[0][1] == 1 and not (lin.const or lin.atoms))
            elsewhere = [a for i, lin in enumerate(node.dims) if i not in v.along for a, _ in lin.coefs]
            is_whole = len({*along}) == len(v.along) and not {*along} & {*elsewhere} and not any(lin.atoms for lin in node.dims) \
                and all(_are_as_long(kernel, v.r.axes[a], r.axes[b]) for a, b in zip(v.along, along, strict=True))
            yield _Value(r, n, along) if is_whole else None
