"""Hand-written kernel ASTs (grammar: docs/ir.md, section 2) of cases that are rare in models but have to be lowered correctly: several
outputs, in-place kernels, stages read backwards, with a stride, transposed, by a gather, and every dtype. `HAND[name]()` makes one.
"""
from __future__ import annotations

from collections.abc import Callable

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.param import Param
from svod.core.ir.uop import Ops, UOp

F32, I32 = dtypes.float32, dtypes.int32


class Ast:
    """Makes the nodes of one kernel: RANGEs are numbered as they are made."""

    def __init__(self) -> None:
        self.ranges = 0

    def axes(self, *extents: int) -> list[UOp]:
        out = []
        for e in extents:
            out.append(UOp(Ops.RANGE, dtypes.index, (UOp.const(dtypes.index, e),), self.ranges))
            self.ranges += 1
        return out

    def param(self, slot: int, size: int, dtype: DType = F32, constant: bool = False, vmin: int | None = None,
              vmax: int | None = None) -> UOp:
        return UOp(Ops.PARAM, dtype, (), Param(slot, size, constant, vmin, vmax))

    def load(self, p: UOp, flat: UOp, gate: UOp | None = None, alt: float = 0) -> UOp:
        extra = () if gate is None else (UOp.const(p.dtype, alt), gate)
        return UOp(Ops.LOAD, p.dtype, (UOp(Ops.INDEX, p.dtype, (p, flat)), *extra))

    def stage(self, value: UOp, *ranges: UOp) -> UOp:
        return UOp(Ops.STAGE, value.dtype, (value, *ranges))

    def read(self, stage: UOp, *coordinates: UOp) -> UOp:
        return UOp(Ops.INDEX, stage.dtype, (stage, *coordinates))

    def reduce(self, combiner: str, value: UOp, *ranges: UOp) -> UOp:
        return UOp(Ops.REDUCE, value.dtype, (value, *ranges), (combiner, 1))

    def store(self, p: UOp, flat: UOp, value: UOp, *ranges: UOp) -> UOp:
        return UOp(Ops.STORE, dtypes.void, (UOp(Ops.INDEX, p.dtype, (p, flat)), value, *ranges))

    def sink(self, *stores: UOp) -> UOp:
        return UOp(Ops.SINK, dtypes.void, stores)


def number(value: int) -> UOp:
    return UOp.const(dtypes.index, value)


def inside(e: UOp, low: int, stop: int) -> UOp:
    """The condition low ≤ e < stop."""
    return number(low).alu(Ops.CMPLE, e) & (e < stop)


def two_outputs(rows: int, columns: int) -> UOp:
    """Sum and product of the same two arrays in two outputs; the second is transposed."""
    k = Ast()
    n = rows * columns
    y, z, a, b = k.param(0, n), k.param(1, n), k.param(2, n), k.param(3, n)
    i, j, p, q = k.axes(rows, columns, rows, columns)
    at, bt = i * columns + j, p * columns + q
    return k.sink(k.store(y, at, k.load(a, at) + k.load(b, at), i, j), k.store(z, q * rows + p, k.load(a, bt) * k.load(b, bt), p, q))


def two_outputs_one_stage(rows: int, columns: int) -> UOp:
    """Row sums, and the array times them: one stage read by two stores."""
    k = Ast()
    y, z, x = k.param(0, rows), k.param(1, rows * columns), k.param(2, rows * columns)
    a, b, c, d, t, i, j = k.axes(rows, columns, rows, columns, rows, rows, columns)
    values = k.stage(k.load(x, a * columns + b), a, b)
    total = k.stage(k.reduce("ADD", k.read(values, c, d), d), c)
    value = k.load(x, i * columns + j) * k.read(total, i)
    return k.sink(k.store(y, t, k.read(total, t), t), k.store(z, i * columns + j, value, i, j))


def in_place(rows: int, columns: int) -> UOp:
    """An in-place update x = x·2 + row number of each element."""
    k = Ast()
    x, y = k.param(0, rows * columns), k.param(1, columns)
    i, j = k.axes(rows, columns)
    at = i * columns + j
    return k.sink(k.store(x, at, k.load(x, at) * 2.0 + k.load(y, j), i, j))


def in_place_accumulate(m: int, n: int, depth: int) -> UOp:
    """An in-place accumulation c += a @ b."""
    k = Ast()
    c, a, b = k.param(0, m * n), k.param(1, m * depth), k.param(2, depth * n)
    p, q, r, s, i, j, t = k.axes(m, depth, depth, n, m, n, depth)
    left, right = k.stage(k.load(a, p * depth + q), p, q), k.stage(k.load(b, r * n + s), r, s)
    at = i * n + j
    return k.sink(k.store(c, at, k.load(c, at) + k.reduce("ADD", k.read(left, i, t) * k.read(right, t, j), t), i, j))


def in_place_part(rows: int, columns: int, first: int) -> UOp:
    """An in-place update of the columns from `first` on; the other columns keep their values."""
    k = Ast()
    x = k.param(0, rows * columns)
    i, j = k.axes(rows, columns - first)
    at = i * columns + j + first
    return k.sink(k.store(x, at, k.load(x, at) + 1.0, i, j))


def correlate_backwards(n: int, width: int) -> UOp:
    """A convolution proper: y[i] = Σ x[i + width-1 - k]·w[k], the signal staged and read with coefficient -1."""
    k = Ast()
    y, x, w = k.param(0, n - width + 1), k.param(1, n), k.param(2, width)
    p, q, i, t = k.axes(n, width, n - width + 1, width)
    signal, taps = k.stage(k.load(x, p), p), k.stage(k.load(w, q), q)
    value = k.read(signal, i + t * -1 + (width - 1)) * k.read(taps, t)
    return k.sink(k.store(y, i, k.reduce("ADD", value, t), i))


def mirrored_gemm(m: int, n: int, depth: int) -> UOp:
    """The product c[i, j] = Σ a[m-1-i, t]·b[2t, j]: a is flipped, b is read at every other row."""
    k = Ast()
    c, a, b = k.param(0, m * n), k.param(1, m * depth), k.param(2, 2 * depth * n)
    p, q, r, s, i, j, t = k.axes(m, depth, 2 * depth, n, m, n, depth)
    left, right = k.stage(k.load(a, p * depth + q), p, q), k.stage(k.load(b, r * n + s), r, s)
    value = k.read(left, i * -1 + (m - 1), t) * k.read(right, t * 2, j)
    return k.sink(k.store(c, i * n + j, k.reduce("ADD", value, t), i, j))


def differences(rows: int, columns: int, apart: int) -> UOp:
    """Row sums minus the sums `apart` rows before: one stage read at two offsets."""
    k = Ast()
    y, x = k.param(0, rows - apart), k.param(1, rows * columns)
    p, t, i = k.axes(rows, columns, rows - apart)
    total = k.stage(k.reduce("ADD", k.load(x, p * columns + t), t), p)
    return k.sink(k.store(y, i, k.read(total, i + apart) - k.read(total, i), i))


def symmetric_part(rows: int, columns: int) -> UOp:
    """Row sums plus the sum of the mirrored row: one stage read from both ends."""
    k = Ast()
    y, x = k.param(0, rows), k.param(1, rows * columns)
    p, t, i = k.axes(rows, columns, rows)
    total = k.stage(k.reduce("ADD", k.load(x, p * columns + t), t), p)
    return k.sink(k.store(y, i, k.read(total, i) + k.read(total, i * -1 + (rows - 1)), i))


def gathered_rows(rows: int, columns: int, picked: int, depth: int) -> UOp:
    """The product y[i, j] = Σ x[index[i], t]·w[t, j]: a gather inside a staged operand; indices out of range give zeros."""
    k = Ast()
    y, x, index, w = (k.param(0, picked * columns), k.param(1, rows * depth), k.param(2, picked, I32, vmin=-2, vmax=rows + 1),
                      k.param(3, depth * columns))
    p, q, r, s, i, j, t = k.axes(picked, depth, depth, columns, picked, columns, depth)
    row = k.load(index, p).cast(dtypes.index)
    left = k.stage(k.load(x, row * depth + q, inside(row, 0, rows)), p, q)
    right = k.stage(k.load(w, r * columns + s), r, s)
    return k.sink(k.store(y, i * columns + j, k.reduce("ADD", k.read(left, i, t) * k.read(right, t, j), t), i, j))


def gathered_stage(n: int, picked: int) -> UOp:
    """A gather y[i] = exp(x)[index[i]]: a stage read at gathered coordinates."""
    k = Ast()
    y, x, index = k.param(0, picked), k.param(1, n), k.param(2, picked, I32, vmin=0, vmax=n - 1)
    p, i = k.axes(n, picked)
    values = k.stage(k.load(x, p).alu(Ops.EXP), p)
    return k.sink(k.store(y, i, k.read(values, k.load(index, i).cast(dtypes.index)), i))


def padded_window(rows: int, columns: int, size: int, dtype: DType = F32) -> UOp:
    """Sums of windows over an image with a border of zeros: a masked stage read by overlapping windows."""
    k = Ast()
    pad = size // 2
    y, x = k.param(0, rows * columns, dtype), k.param(1, rows * columns, dtype)
    p, q, i, j, a, b = k.axes(rows + 2 * pad, columns + 2 * pad, rows, columns, size, size)
    gate = inside(p, pad, rows + pad) & inside(q, pad, columns + pad)
    image = k.stage(k.load(x, p * columns + q + (-pad * columns - pad), gate), p, q)
    return k.sink(k.store(y, i * columns + j, k.reduce("ADD", k.read(image, i + a, j + b), a, b), i, j))


def argmax_rows(rows: int, columns: int, dtype: DType, combiner: str = "ARGMAX") -> UOp:
    """Extremum and its index per row into two outputs, from one stage."""
    k = Ast()
    best, where, x = k.param(0, rows, dtype), k.param(1, rows, dtypes.int64), k.param(2, rows * columns, dtype)
    p, q, i, t, j, u = k.axes(rows, columns, rows, columns, rows, columns)
    values = k.stage(k.load(x, p * columns + q), p, q)

    def arg(row: UOp, column: UOp) -> UOp:
        return UOp(Ops.REDUCE, dtype, (k.read(values, row, column), column.cast(dtypes.int64), column), (combiner, 2))

    def component(reduce: UOp, n: int, to: DType) -> UOp:
        return UOp(Ops.GEP, to, (reduce,), n)
    return k.sink(k.store(best, i, component(arg(i, t), 0, dtype), i), k.store(where, j, component(arg(j, u), 1, dtypes.int64), j))


def several_reductions(rows: int, columns: int) -> UOp:
    """Four reductions of one stage over the same range: max + 3·min + sum·product of each row."""
    k = Ast()
    y, x = k.param(0, rows), k.param(1, rows * columns)
    p, q, i, t = k.axes(rows, columns, rows, columns)
    values = k.stage(k.load(x, p * columns + q), p, q)
    v = k.read(values, i, t)
    total = k.reduce("MAX", v, t) + k.reduce("MIN", v, t) * 3.0 + k.reduce("ADD", v * v, t) + k.reduce("ADD", v, t)
    return k.sink(k.store(y, i, total, i))


def integer_sums(rows: int, columns: int, dtype: DType, accumulate: DType) -> UOp:
    """Row sums of narrow integers in a wider type, stored narrow again (they wrap)."""
    k = Ast()
    y, x = k.param(0, rows, dtype), k.param(1, rows * columns, dtype)
    p, q, i, t = k.axes(rows, columns, rows, columns)
    values = k.stage(k.load(x, p * columns + q).cast(accumulate), p, q)
    return k.sink(k.store(y, i, k.reduce("ADD", k.read(values, i, t), t).cast(dtype), i))


def any_of(rows: int, columns: int) -> UOp:
    """Whether any element of a row is set, and whether all elements of a column are: reductions of bools."""
    k = Ast()
    y, z, x = k.param(0, rows, dtypes.bool), k.param(1, columns, dtypes.bool), k.param(2, rows * columns, dtypes.bool)
    p, q, i, t, j, u = k.axes(rows, columns, rows, columns, columns, rows)
    values = k.stage(k.load(x, p * columns + q), p, q)
    return k.sink(k.store(y, i, k.reduce("OR", k.read(values, i, t), t), i), k.store(z, j, k.reduce("AND", k.read(values, u, j), u), j))


def elementwise(n: int, dtype: DType, *, more: DType | None = None) -> UOp:
    """An elementwise expression y = (x + x·x), converted, with a comparison and a selection."""
    k = Ast()
    to = more or dtype
    y, x = k.param(0, n, to), k.param(1, n, dtype)
    i, = k.axes(n)
    v = k.load(x, i)
    value = (v < v.alu(Ops.MUL, v)).alu(Ops.WHERE, v + v, v) if dtype != dtypes.bool else v.alu(Ops.NOT)
    return k.sink(k.store(y, i, value.cast(to), i))


def wide_and_narrow(n: int) -> UOp:
    """A value with both float64 and int8 operands: vectors of different widths."""
    k = Ast()
    y, a, b, c = k.param(0, n, dtypes.float16), k.param(1, n, dtypes.float64), k.param(2, n, dtypes.int8), k.param(3, n, dtypes.bool)
    i, = k.axes(n)
    chosen = k.load(c, i).alu(Ops.WHERE, k.load(a, i), k.load(b, i).cast(dtypes.float64))
    return k.sink(k.store(y, i, chosen.cast(dtypes.float16), i))


def chained_rows(rows: int, columns: int) -> UOp:
    """The variance in three stages with reductions, each read within the row; an exponential is read twice."""
    k = Ast()
    y, x = k.param(0, rows * columns), k.param(1, rows * columns)
    a, b, c, d, e, f, g, h, m, n, i, j = k.axes(rows, columns, rows, columns, rows, columns, rows, columns, rows, columns, rows, columns)
    values = k.stage(k.load(x, a * columns + b), a, b)
    top = k.stage(k.reduce("MAX", k.read(values, c, d), d), c)
    exps = k.stage((k.read(values, e, f) - k.read(top, e)).alu(Ops.EXP), e, f)
    total = k.stage(k.reduce("ADD", k.read(exps, g, h), h), g)
    squares = k.stage(k.reduce("ADD", k.read(exps, m, n) * k.read(exps, m, n), n), m)
    value = k.read(exps, i, j) * k.read(total, i).alu(Ops.RECIPROCAL) + k.read(squares, i)
    return k.sink(k.store(y, i * columns + j, value, i, j))


def constants_only(m: int, n: int, depth: int) -> UOp:
    """A product of two constants of the plan, contracted with an input: stages that only read constants may run once."""
    k = Ast()
    y, x, w, v = k.param(0, m * n), k.param(1, m * depth), k.param(2, depth * depth, constant=True), k.param(3, depth * n, constant=True)
    a, b, c, d, e, f, g, h, u, i, j, t = k.axes(depth, depth, depth, n, depth, n, depth, m, depth, m, n, depth)
    left, right = k.stage(k.load(w, a * depth + b), a, b), k.stage(k.load(v, c * n + d), c, d)
    weights = k.stage(k.reduce("ADD", k.read(left, e, g) * k.read(right, g, f), g), e, f)
    rows = k.stage(k.load(x, h * depth + u), h, u)
    return k.sink(k.store(y, i * n + j, k.reduce("ADD", k.read(rows, i, t) * k.read(weights, t, j), t), i, j))


def iota(n: int) -> UOp:
    """The sequence y[i] = 3·i as int64: an axis used as a value, and divided."""
    k = Ast()
    y = k.param(0, n, dtypes.int64)
    i, = k.axes(n)
    return k.sink(k.store(y, i, ((i // 3) * 5 + i % 4).cast(dtypes.int64), i))


def gemm(m: int, n: int, depth: int, dtype: DType = F32, *, transposed: bool = False, constant: bool = False) -> UOp:
    """The product c[i, j] = max(Σ a[i, t]·b[t, j], -1) with axes o0, o1, r0 and operands s0 and s1. `transposed`: a is stored as [t, i]."""
    k = Ast()
    c, a, b = k.param(0, m * n, dtype), k.param(1, m * depth, dtype), k.param(2, depth * n, dtype, constant=constant)
    p, q, r, s, i, j, t = k.axes(m, depth, depth, n, m, n, depth)
    left, right = k.stage(k.load(a, q * m + p if transposed else p * depth + q), p, q), k.stage(k.load(b, r * n + s), r, s)
    total = k.reduce("ADD", k.read(left, i, t) * k.read(right, t, j), t)
    return k.sink(k.store(c, i * n + j, total.alu(Ops.MAX, -1), i, j))


def row_sums(rows: int, columns: int, dtype: DType = F32, *, by_column: bool = False) -> UOp:
    """Row sums y[i] = Σ x[i, t] (or x[t, i]) with axes o0, r0 and operand s0."""
    k = Ast()
    y, x = k.param(0, rows, dtype), k.param(1, rows * columns, dtype)
    p, q, i, t = k.axes(rows, columns, rows, columns)
    values = k.stage(k.load(x, q * rows + p if by_column else p * columns + q), p, q)
    return k.sink(k.store(y, i, k.reduce("ADD", k.read(values, i, t), t), i))


def dot(n: int) -> UOp:
    """The dot product Σ x[t]·y[t] with the only axis r0 and operands s0 and s1."""
    k = Ast()
    z, x, y = k.param(0, 1), k.param(1, n), k.param(2, n)
    p, q, t = k.axes(n, n, n)
    left, right = k.stage(k.load(x, p), p), k.stage(k.load(y, q), q)
    return k.sink(k.store(z, number(0), k.reduce("ADD", k.read(left, t) * k.read(right, t), t)))


def softmax(rows: int, columns: int, *, down: bool = False) -> UOp:
    """Softmax over rows (`down`: over columns) of [rows, columns]: input s0, maxima s1, exponentials s2, sums s3, output axes o0, o1."""
    k = Ast()
    y, x = k.param(0, rows * columns), k.param(1, rows * columns)
    a, b, c, d, e, f, g, h, i, j = k.axes(*(rows, columns) * 5)

    def at(row: UOp, column: UOp) -> UOp:
        return column * rows + row if down else row * columns + column
    values = k.stage(k.load(x, at(a, b)), a, b)
    top = k.stage(k.reduce("MAX", k.read(values, c, d), d), c)
    exps = k.stage((k.read(values, e, f) - k.read(top, e)).alu(Ops.EXP), e, f)
    total = k.stage(k.reduce("ADD", k.read(exps, g, h), h), g)
    return k.sink(k.store(y, at(i, j), k.read(exps, i, j) * k.read(total, i).alu(Ops.RECIPROCAL), i, j))


def variance(rows: int, columns: int, *, again: bool = False) -> UOp:
    """The sum Σ (x - mean)² of each row: input s0, sums s1, axes o0, r0. `again`: the sum is also added to the result."""
    k = Ast()
    y, x = k.param(0, rows), k.param(1, rows * columns)
    a, b, c, d, i, t = k.axes(*(rows, columns) * 3)
    values = k.stage(k.load(x, a * columns + b), a, b)
    total = k.stage(k.reduce("ADD", k.read(values, c, d), d), c)
    off = k.read(values, i, t) - k.read(total, i) * (1.0 / columns)
    squares = k.reduce("ADD", off * off, t)
    return k.sink(k.store(y, i, squares + k.read(total, i) if again else squares, i))


def lines(n: int, dtype: DType = F32) -> UOp:
    """The expression y = x + 1 with the only axis o0."""
    k = Ast()
    y, x = k.param(0, n, dtype), k.param(1, n, dtype)
    i, = k.axes(n)
    return k.sink(k.store(y, i, k.load(x, i) + 1, i))


def rows_plus(rows: int, columns: int, dtype: DType = F32) -> UOp:
    """Each row of x plus one and the same row."""
    k = Ast()
    y, x, z = k.param(0, rows * columns, dtype), k.param(1, rows * columns, dtype), k.param(2, columns, dtype)
    i, j = k.axes(rows, columns)
    at = i * columns + j
    return k.sink(k.store(y, at, k.load(x, at) + k.load(z, j), i, j))


HAND: dict[str, Callable[[], UOp]] = {
    "hand_gemm": lambda: gemm(17, 19, 23),
    "hand_gemm_tn": lambda: gemm(11, 16, 18, transposed=True),
    "hand_gemm_constant": lambda: gemm(6, 32, 12, constant=True),
    "hand_gemm_i64": lambda: gemm(5, 10, 13, dtypes.int64),
    "hand_row_sums": lambda: row_sums(21, 34),
    "hand_column_sums": lambda: row_sums(21, 34, by_column=True),
    "hand_dot": lambda: dot(101),
    "hand_long_dot": lambda: dot(315),
    "hand_softmax": lambda: softmax(5, 37),
    "hand_softmax_down": lambda: softmax(6, 19, down=True),
    "variance": lambda: variance(8, 40),
    "variance_again": lambda: variance(7, 33, again=True),
    "line": lambda: lines(100),
    "two_outputs": lambda: two_outputs(5, 13),
    "two_outputs_one_stage": lambda: two_outputs_one_stage(7, 19),
    "in_place": lambda: in_place(3, 37),
    "in_place_line": lambda: in_place(1, 53),
    "in_place_accumulate": lambda: in_place_accumulate(7, 21, 11),
    "in_place_part": lambda: in_place_part(5, 19, 6),
    "correlate_backwards": lambda: correlate_backwards(41, 5),
    "mirrored_gemm": lambda: mirrored_gemm(11, 18, 7),
    "differences": lambda: differences(37, 11, 3),
    "symmetric_part": lambda: symmetric_part(29, 13),
    "gathered_rows": lambda: gathered_rows(9, 20, 13, 8),
    "gathered_stage": lambda: gathered_stage(23, 35),
    "padded_window": lambda: padded_window(9, 17, 3),
    "padded_window_int": lambda: padded_window(7, 11, 5, dtypes.int32),
    "argmax_rows": lambda: argmax_rows(7, 33, F32),
    "argmin_int8": lambda: argmax_rows(6, 41, dtypes.int8, "ARGMIN"),
    "argmax_f16": lambda: argmax_rows(3, 29, dtypes.float16),
    "several_reductions": lambda: several_reductions(9, 34),
    "sums_int8": lambda: integer_sums(5, 70, dtypes.int8, I32),
    "sums_uint16": lambda: integer_sums(4, 37, dtypes.uint16, dtypes.uint32),
    "sums_int64": lambda: integer_sums(6, 23, dtypes.int64, dtypes.int64),
    "any_of": lambda: any_of(11, 67),
    "elementwise_bool": lambda: elementwise(131, dtypes.bool, more=dtypes.int8),
    "elementwise_int8": lambda: elementwise(150, dtypes.int8, more=dtypes.bool),
    "elementwise_uint8": lambda: elementwise(67, dtypes.uint8, more=F32),
    "elementwise_f16": lambda: elementwise(77, dtypes.float16),
    "elementwise_bf16": lambda: elementwise(61, dtypes.bfloat16),
    "elementwise_i64": lambda: elementwise(43, dtypes.int64, more=dtypes.float64),
    "wide_and_narrow": lambda: wide_and_narrow(83),
    "chained_rows": lambda: chained_rows(6, 21),
    "constants_only": lambda: constants_only(6, 14, 9),
    "iota": lambda: iota(59),
}


# name → (number of extents to draw, builder)
SIZED: dict[str, tuple[int, Callable[..., UOp]]] = {
    "gemm": (3, gemm),
    "gemm_tn": (3, lambda m, n, depth: gemm(m, n, depth, transposed=True)),
    "row_sums": (2, row_sums),
    "column_sums": (2, lambda rows, columns: row_sums(rows, columns, by_column=True)),
    "softmax": (2, softmax),
    "softmax_down": (2, lambda rows, columns: softmax(rows, columns, down=True)),
    "variance": (2, lambda rows, columns: variance(rows, columns, again=True)),
    "chained_rows": (2, chained_rows),
    "in_place": (2, in_place),
    "in_place_accumulate": (3, in_place_accumulate),
    "mirrored_gemm": (3, mirrored_gemm),
    "differences": (3, lambda rows, columns, apart: differences(rows + apart, columns, apart)),
    "symmetric_part": (2, symmetric_part),
    "padded_window": (2, lambda rows, columns: padded_window(rows, columns, 3)),
    "gathered_rows": (4, gathered_rows),
    "argmax_rows": (2, lambda rows, columns: argmax_rows(rows, columns, F32)),
    "several_reductions": (2, several_reductions),
    "constants_only": (3, constants_only),
    "two_outputs_one_stage": (2, two_outputs_one_stage),
}
