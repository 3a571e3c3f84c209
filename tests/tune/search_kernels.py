"""Small kernel ASTs written by hand (grammar: docs/ir.md), and a made-up target for tests that run no kernel."""
from __future__ import annotations

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.param import Param
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target

TARGET = Target(arch="x86_64", cpu="znver4", features=("avx512f", "fma"), vector_bytes=64, vector_registers=32, l1=32 << 10, l2=1 << 20,
                l3=32 << 20, threads=2, has_mask_registers=True)


def axis(number: int, extent: int) -> UOp:
    return UOp(Ops.RANGE, dtypes.index, (UOp.const(dtypes.index, extent),), number)


def param(slot: int, size: int, dtype: DType = dtypes.float32, **bounds: int) -> UOp:
    return UOp(Ops.PARAM, dtype, (), Param(slot, size, **bounds))


def load(p: UOp, flat: UOp) -> UOp:
    return UOp(Ops.LOAD, p.dtype, (UOp(Ops.INDEX, p.dtype, (p, flat)),))


def store(p: UOp, flat: UOp, value: UOp, *ranges: UOp) -> UOp:
    return UOp(Ops.STORE, dtypes.void, (UOp(Ops.INDEX, p.dtype, (p, flat)), value, *ranges))


def stage(value: UOp, *ranges: UOp) -> UOp:
    return UOp(Ops.STAGE, value.dtype, (value, *ranges))


def read(s: UOp, *coordinates: UOp) -> UOp:
    return UOp(Ops.INDEX, s.dtype, (s, *coordinates))


def reduce(value: UOp, combiner: str, *ranges: UOp) -> UOp:
    return UOp(Ops.REDUCE, value.dtype, (value, *ranges), (combiner, 1))


def kernel(*stores: UOp) -> Kernel:
    return Kernel(UOp(Ops.SINK, dtypes.void, stores))


def gemm(m: int, n: int, k: int, dtype: DType = dtypes.float32, accumulate: DType | None = None) -> Kernel:
    """c[m, n] = Σ a[m, k]·b[k, n], accumulated in `accumulate` and stored in `dtype`."""
    acc = accumulate or dtype
    c, a, b = param(0, m * n, dtype), param(1, m * k, dtype), param(2, k * n, dtype)
    r = [axis(i, e) for i, e in enumerate((m, k, k, n, m, n, k))]
    left, right = stage(load(a, r[0] * k + r[1]).cast(acc), r[0], r[1]), stage(load(b, r[2] * n + r[3]).cast(acc), r[2], r[3])
    total = reduce(read(left, r[4], r[6]) * read(right, r[6], r[5]), "ADD", r[6])
    return kernel(store(c, r[4] * n + r[5], total.cast(dtype), r[4], r[5]))


def row_reduce(rows: int, columns: int, combiner: str = "ADD", dtype: DType = dtypes.float32) -> Kernel:
    """y[i] = combine over j of x[i, j]."""
    y, x = param(0, rows, dtype), param(1, rows * columns, dtype)
    r = [axis(i, e) for i, e in enumerate((rows, columns, rows, columns))]
    whole = stage(load(x, r[0] * columns + r[1]), r[0], r[1])
    return kernel(store(y, r[2], reduce(read(whole, r[2], r[3]), combiner, r[3]), r[2]))


def elementwise(n: int, dtype: DType = dtypes.float32) -> Kernel:
    """y[i] = max(x[i]·2 - z[i], 0)."""
    y, x, z = (param(slot, n, dtype) for slot in range(3))
    i = axis(0, n)
    value = (load(x, i) * 2 - load(z, i)).alu(Ops.MAX, 0)
    return kernel(store(y, i, value, i))


def softmax(rows: int, columns: int, *, causal: bool = False) -> Kernel:
    """y[r, c] = softmax of x[r] over c; `causal`: only over c ≤ r, with the elements beyond taken as -∞."""
    y, x = param(0, rows * columns), param(1, rows * columns)
    r = [axis(i, rows if i % 2 == 0 else columns) for i in range(10)]
    value = load(x, r[0] * columns + r[1])
    if causal:
        value = r[1].alu(Ops.CMPLE, r[0]).alu(Ops.WHERE, value * 0.25, UOp.const(dtypes.float32, float("-inf")))
    whole = stage(value, r[0], r[1])
    top = stage(reduce(read(whole, r[2], r[3]), "MAX", r[3]), r[2])
    grown = stage((read(whole, r[4], r[5]) - read(top, r[4])).alu(Ops.EXP), r[4], r[5])
    total = stage(reduce(read(grown, r[6], r[7]), "ADD", r[7]), r[6])
    value = read(grown, r[8], r[9]) * read(total, r[8]).alu(Ops.RECIPROCAL)
    return kernel(store(y, r[8] * columns + r[9], value, r[8], r[9]))


def gather(rows: int, table: int, width: int) -> Kernel:
    """y[i, j] = table[index[i], j], 0 ≤ index < `table`."""
    y, t = param(0, rows * width), param(1, table * width)
    index = param(2, rows, dtypes.int32, vmin=0, vmax=table - 1)
    i, j = axis(0, rows), axis(1, width)
    return kernel(store(y, i * width + j, load(t, load(index, i).cast(dtypes.index) * width + j), i, j))
