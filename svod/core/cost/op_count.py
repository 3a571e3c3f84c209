"""Counts the operations and unique bytes of a kernel AST as a plain loop nest, in closed form.

    GEMM of (m, k) and (k, n):   flops = 2*m*n*k,   bytes_read = (m*k + k*n)*4,   bytes_written = m*n*4

Every stage counts once per element of its ranges, however often it is read; recomputation is up to the opts. A multiply-add counts as two
operations. Index arithmetic, conversions and loads count as none."""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from svod.core.graph.library_kernel import library_kernel_of, operations
from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import ALU, TRANSCENDENTAL, Ops, UOp
from svod.core.schedule.axes import range_lists


@dataclass(frozen=True)
class Work:
    """Work of one kernel. `arithmetic`: (dtype of the operands, operations), for floating point and integers; a transcendental function is
    one operation. Products of widened numbers count as products of the narrow ones, as dot instructions compute them. `transcendental`:
    number of transcendental functions. `bytes_read`, `bytes_written`: unique bytes of arguments, each PARAM at most once."""

    arithmetic: tuple[tuple[DType, int], ...]
    transcendental: int
    bytes_read: int
    bytes_written: int

    @property
    def flops(self) -> int:
        return sum(count for _, count in self.arithmetic)

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written


def count_operations(ast: UOp) -> Work:
    """The work of a kernel AST (docs/ir.md, section 2), cached on the node."""
    result: Work = ast.cached("estimate", _estimate)
    return result


def _points(ranges: tuple[UOp, ...]) -> int:
    return math.prod(sy.extent_of(r) for r in ranges)


def _estimate(ast: UOp) -> Work:
    node = library_kernel_of(ast)
    if node is not None:
        params = {p: p.arg.size * p.dtype.itemsize for p in node.src}
        out = ast.src[0].src[0].src[0]
        flops, transcendental = operations(node)
        return Work(((out.dtype, flops),), transcendental, sum(params.values()), out.arg.size * out.dtype.itemsize)
    transcendental = 0
    done: Counter[DType] = Counter()
    touched: dict[UOp, int] = {}
    written: dict[UOp, int] = {}
    for stage in ast.toposort():
        if stage.op not in (Ops.STAGE, Ops.STORE):
            continue
        ranges = range_lists(stage)
        outer = _points(ranges)
        value = stage.src[0] if stage.op is Ops.STAGE else stage.src[1]
        if stage.op is Ops.STORE:
            param = stage.src[0].src[0]
            written[param] = min(param.arg.size, written.get(param, 0) + outer)
        inside, narrow = _below_reduce(value), _narrow_products(value)
        # visit index expressions as well: positions that a gather looks up are loads
        for u in value.toposort(gate=lambda n: n.op is not Ops.STAGE):
            if u.op is Ops.LOAD:
                param = u.src[0].src[0]
                touched[param] = min(param.arg.size, touched.get(param, 0) + _footprint(u))
        for u in value.toposort(gate=lambda n: n.op is not Ops.STAGE and n.dtype != dtypes.index):
            # a node inside a REDUCE also runs for each reduced range that it depends on
            times = outer * (_points(tuple(sy.ranges_of(u) - frozenset(ranges))) if u in inside else 1)
            if u.op is Ops.REDUCE:
                count = u.arg[1]
                done[narrow.get(u, u.dtype)] += outer * _points(u.src[count:]) * count
            elif u.op in ALU and u.dtype != dtypes.index and not _is_gate(u):
                done[narrow.get(u, u.src[-1].dtype)] += times * (2 if u.op is Ops.MULACC else 1)
                transcendental += times if u.op in TRANSCENDENTAL else 0
    return Work(tuple(done.items()), transcendental, sum(n * p.dtype.itemsize for p, n in touched.items()),
                    sum(n * p.dtype.itemsize for p, n in written.items()))


def _below_reduce(value: UOp) -> set[UOp]:
    """The nodes in a stage's value that are operands of one of its REDUCEs, directly or not."""
    nodes: set[UOp] = set()
    for r in value.toposort(gate=lambda n: n.op is not Ops.STAGE):
        if r.op is Ops.REDUCE:
            for v in r.src[:r.arg[1]]:
                nodes.update(v.toposort(gate=lambda n: n.op is not Ops.STAGE))
    return nodes


def _narrow_products(value: UOp) -> dict[UOp, DType]:
    """Map each sum that dot instructions may compute (`svod.core.kernel.intrinsics`), and its product, to the dtype that the factors had
    before they were widened; the wider one of the two."""
    dtypes_of: dict[UOp, DType] = {}
    for r in value.toposort(gate=lambda n: n.op is not Ops.STAGE):
        if r.op is Ops.REDUCE and r.arg == ("ADD", 1) and r.src[0].op is Ops.MUL and r.dtype in (dtypes.int32, dtypes.float32):
            a, b = (_before_cast(factor) for factor in r.src[0].src)
            if a is not None and b is not None and a.is_float == b.is_float == r.dtype.is_float and (a == b or not a.is_float):
                dtypes_of[r] = dtypes_of[r.src[0]] = a if a.bits > b.bits else b
    return dtypes_of


def _before_cast(factor: UOp) -> DType | None:
    """The 8- or 16-bit dtype of a factor before a stage widened it; None if it was not widened."""
    if factor.op is not Ops.INDEX or factor.src[0].op is not Ops.STAGE or factor.src[0].src[0].op is not Ops.CAST:
        return None
    cast = factor.src[0].src[0]
    return cast.src[0].dtype if cast.src[0].dtype.bits in (8, 16) else None


def _is_gate(u: UOp) -> bool:
    """Whether an ALU node is index arithmetic: a comparison of index expressions, or logic on such comparisons. Cached on the node."""
    result: bool = u.cached("is_gate", lambda n: n.dtype == dtypes.bool and all(
        s.dtype == dtypes.index or (s.dtype == dtypes.bool and s.op in ALU and _is_gate(s)) for s in n.src))
    return result


def _footprint(load: UOp) -> int:
    """An upper bound of the elements that a LOAD touches: the points of the ranges it depends on, without positions that a gate over a
    single range excludes; or the span of its index, if that is smaller."""
    index = load.src[0].src[1]
    extents = {r: sy.extent_of(r) for r in sy.ranges_of(index)}
    if len(load.src) == 3:
        for part in sy.conjuncts(load.src[2]):
            a, b = part.src if len(part.src) == 2 else (part, part)
            if part.op is Ops.CMPLT and a in extents and b.op is Ops.CONST:
                extents[a] -= max(0, sy.extent_of(a) - int(b.arg))
            elif part.op is Ops.CMPLE and b in extents and a.op is Ops.CONST:
                extents[b] -= max(0, int(a.arg))
    lo, hi = sy.bounds(index)
    return max(0, min(math.prod(extents.values()), hi - lo + 1))
