"""Elementwise instructions of LINEAR as WGSL expressions, chunk by chunk.

WGSL leaves much open: an implementation may assume that there are no NaNs, and regroup sums, and drivers do. So

* operands are hidden where a compiler could cancel or fold them (`hidden.py`);
* whether a float is NaN is read from its bits; MAX and MIN return NaN if one operand is NaN; CMPNE is the negation of an equality;
* integer division rounds to minus infinity, and by zero it gives 0, as does the remainder;
* shifts by the width or more give 0, or the sign;
* narrow integers and floats are computed in 32 bits, and wrapped or rounded after every operation that may leave their range;
* MULACC is fma(), which WGSL allows to round twice: `Target.has_fma` is False, and what needs one rounding is expanded otherwise.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.compile.webgpu.text import (
    REGISTERS,
    WIDEST,
    Writer,
    is_narrow_float,
    lane,
    refuse,
    register,
    splat,
    vector,
    widths,
    word,
)
from svod.core.ir.dtype import DType, dtypes
from svod.core.spec.values import cast, constant

F32, F64, BOOL = dtypes.float32, dtypes.float64, dtypes.bool
Core = Callable[[Writer, DType, int, list[str], int], str]
"""Writes one operation on chunks of one dtype and width, of the instruction with this number, and returns an expression."""
Handler = Callable[[Writer, int, DType, int, tuple[int, ...], Any], None]


# -- rounding and wrapping ----------------------------------------------------------------------------
def fit(w: Writer, dtype: DType, width: int, text: str) -> str:
    """The result of an operation in 32 bits as a number of a narrower type."""
    if dtype.name == "index" or dtype.bits >= 32 or dtype.kind == "b":
        return text
    if dtype.kind == "i":
        return f"extractBits({text}, 0u, {dtype.bits}u)"
    if dtype.kind == "u":
        return f"({text} & {word((1 << dtype.bits) - 1, width)})"
    if dtype.name == "float16" and w.has("float16"):
        w.uses_half = w.hides = True
        half = w.let(f"{vector('f16', width)}({text})")
        return f"{vector('f32', width)}(select({half}, -{half}, unknown != 0u))"      # without, a rounding there and back could be left out
    return f"{_round_function(w, dtype, width)}({text})"


def _round_function(w: Writer, dtype: DType, width: int) -> str:
    """A function that rounds f32 to a 16-bit float, to nearest even."""
    name, v, u = f"round_{dtype.name}_{width}", vector("f32", width), vector("u32", width)
    if dtype.name == "float16":
        lanes = [f"unpack2x16float(pack2x16float(vec2<f32>({lane(['x'], width, k)}, 0.0f))).x" for k in range(width)]
        return w.helper(name, lambda: f"fn {name}(x: {v}) -> {v} {{ return {v}({', '.join(lanes)}); }}")
    nan = is_nan(w, F32, width, "x")
    return w.helper(name, lambda: (
        f"fn {name}(x: {v}) -> {v} {{\n  let b = bitcast<{u}>(x);\n"
        f"  let r = b + {word(0x7FFF, width)} + ((b >> {word(16, width)}) & {word(1, width)});\n"
        f"  return bitcast<{v}>(select(r, b | {word(0x400000, width)}, {nan}) & {word(0xFFFF0000, width)});\n}}"))


def is_nan(w: Writer, dtype: DType, width: int, text: str) -> str:
    """Whether a float is NaN, from its bits."""
    if dtype.bits == 64:
        largest = splat("f64", width, "1.7976931348623157e308lf")
        return f"(!(abs({text}) <= {largest}) & !(abs({text}) > {largest}))"
    return f"((bitcast<{vector('u32', width)}>({text}) & {word(0x7FFFFFFF, width)}) > {word(0x7F800000, width)})"


# -- the operations -----------------------------------------------------------------------------------
def _binary(by_kind: dict[str, str]) -> Core:
    """An operator of WGSL, by the kind of its operands."""
    def core(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
        text = by_kind.get(dtype.kind)
        if text is None:
            raise refuse(w.code[i].op, dtype, f"defined for the kinds {', '.join(by_kind)} only")
        return f"({x[0]} {text} {x[1]})"
    return core


def _call(name: str, kinds: str = "f") -> Core:
    """A function of WGSL; of other kinds the result is the operand."""
    def core(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
        return f"{name}({', '.join(x)})" if dtype.kind in kinds else x[0]
    return core


def _neg(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
    if dtype.kind == "f" or dtype.kind == "i":
        return f"(-{x[0]})"
    return f"({w.constant(dtype, width, 0)} - {x[0]})"


def _not(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
    return f"(!{x[0]})" if dtype.kind == "b" else f"(~{x[0]})"


def _reciprocal(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
    return f"({w.constant(dtype, width, 1.0)} / {x[0]})"


def _extremum(largest: bool) -> Core:
    """MAX or MIN."""
    compare, function, boolean = (">", "max", "|") if largest else ("<", "min", "&")

    def core(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
        a, b = x
        if dtype.kind == "b":
            return f"({a} {boolean} {b})"
        if dtype.kind != "f":
            return f"{function}({a}, {b})"
        first, second = w.code[i].src
        if _is_number(w, first):
            a, b, first, second = b, a, second, first
        if _is_number(w, second):       # a comparison with NaN is false, so NaN stays
            return f"select({a}, {b}, {b} {compare} {a})"
        name, v = f"{function}_{dtype.bits if dtype.bits == 64 else 32}_{width}", register(dtype, width)
        nan = is_nan(w, dtype, width, "a")
        return w.helper(name, lambda: f"fn {name}(a: {v}, b: {v}) -> {v} {{ return select(b, a, (a {compare} b) | {nan}); }}") \
            + f"({a}, {b})"
    return core


def _is_number(w: Writer, s: int) -> bool:
    """Whether a value is a constant that is not NaN."""
    return w.code[s].op == "CONST" and w.code[s].arg == w.code[s].arg


def _whole(function: str) -> Core:
    """ROUND, halves to even, or TRUNC. Those of float64 are written out: Mesa 22.3 rounds its halves down and loses the sign of zeros."""
    def core(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
        if dtype != F64:
            return f"{function}({x[0]})"
        name, v, half = f"{function}_f64_{width}", register(F64, width), splat("f64", width, "0.5lf")
        zero, one = splat("f64", width, "0.0lf"), splat("f64", width, "1.0lf")
        up = f"((a - down) > {half}) | (((a - down) == {half}) & (floor(down * {half}) != down * {half}))"
        size = f"select(down, down + {one}, {up})" if function == "round" else "down"
        return w.helper(name, lambda: (
            f"fn {name}(x: {v}) -> {v} {{\n  let a = abs(x);\n  let down = floor(a);\n  let size = {size};\n"
            f"  return select(select(size, -size, x < {zero}), x, size == a);\n}}")) + f"({x[0]})"
    return core


def _division(remainder: bool) -> Core:
    """IDIV, or MOD."""
    def core(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
        if dtype.kind not in "iu":
            raise refuse(w.code[i].op, dtype, "defined for integers only")
        first, second = w.code[i].src
        known = w.code[second].arg if w.code[second].op == "CONST" else None
        a, b = x
        if known == 0:
            return w.constant(dtype, width, 0)
        if known is not None and known > 0 and known & (known - 1) == 0:
            if remainder:
                return f"({a} & {w.constant(dtype, width, known - 1)})"
            return f"({a} >> {word(known.bit_length() - 1, width)})"
        if dtype.name == "index" and w.facts.nonneg[first] and w.facts.nonneg[second]:
            u, operator = vector("u32", width), "%" if remainder else "/"
            if known is not None:
                return f"{vector('i32', width)}({u}({a}) {operator} {word(known, width)})"
            name = f"u{'mod' if remainder else 'div'}_{width}"
            v = vector("i32", width)
            return _divide_unsigned(w, name, v, u, operator, width) + f"({a}, {b})"
        return _divide(w, dtype, width, remainder) + f"({a}, {b})"
    return core


def _divide_unsigned(w: Writer, name: str, v: str, u: str, operator: str, width: int) -> str:
    zero, one = splat("i32", width, "0i"), word(1, width)
    return w.helper(name, lambda: f"fn {name}(a: {v}, b: {v}) -> {v} {{ return select({v}({u}(a) {operator} max({u}(b), {one})), {zero}, "
                                  f"b == {zero}); }}")


def _divide(w: Writer, dtype: DType, width: int, remainder: bool) -> str:
    """The name of a function that divides integers; by zero it gives 0."""
    kind = REGISTERS[dtype.name]
    v, zero, one = vector(kind, width), w.constant(dtype, width, 0), w.constant(dtype, width, 1)
    name = f"{'modulo' if remainder else 'divide'}_{kind}_{width}"

    def text() -> str:
        lines = [f"fn {name}(a: {v}, b: {v}) -> {v} {{", f"  let d = select(b, {one}, b == {zero});", "  let q = a / d;"]
        if dtype.kind == "u":
            result = "a - q * d" if remainder else "q"
        else:
            lines += ["  let r = a - q * d;", f"  let off = (r != {zero}) & ((r < {zero}) != (d < {zero}));"]
            result = "select(r, r + d, off)" if remainder else f"select(q, q - {one}, off)"
        return "\n".join([*lines, f"  return select({result}, {zero}, b == {zero});", "}"])
    return w.helper(name, text)


def _shift(left: bool) -> Core:
    """SHL, or SHR: arithmetic for signed integers."""
    def core(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
        amount = w.code[w.code[i].src[1]]
        wide, operator, u = 64 if dtype.bits == 64 and dtype.name != "index" else 32, "<<" if left else ">>", vector("u32", width)
        if amount.op == "CONST" and 0 <= amount.arg < min(dtype.bits, wide):
            return f"({x[0]} {operator} {word(amount.arg, width)})"
        by = f"{u}({x[1]})"
        if wide == 64:      # an amount beyond 32 bits, or a negative one, is as 64
            unsigned = f"bitcast<{vector('u64', width)}>({x[1]})" if dtype.kind == "i" else x[1]
            by = w.let(f"{u}(min({unsigned}, {splat('u64', width, '64lu')}))")
        shift = f"min({by}, {word(wide - 1, width)})"
        if not left and dtype.kind == "i":
            return f"({x[0]} >> {shift})"
        inside = f"{by} < {word(wide, width)}"
        return f"select({w.constant(dtype, width, 0)}, {x[0]} {operator} {shift}, {inside})"
    return core


def _comparison(operator: str, of_bools: str, of_wide: str) -> Core:
    def core(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
        if dtype.kind == "b":
            return of_bools.format(*x)
        if dtype == dtypes.int64 and any(w.code[s].op == "CONST" for s in w.code[i].src):
            return of_wide.format(*x)       # Mesa 22.3 takes i64(a) < 5 for false, whatever a is
        return f"({x[0]} {operator} {x[1]})"
    return core


def _unequal(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
    if dtype.kind != "f":
        return f"({x[0]} != {x[1]})"
    first, second = w.code[i].src
    if first == second:
        return is_nan(w, dtype, width, x[0])
    return f"(!({x[0]} == {x[1]}))"


def _equal(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
    first, second = w.code[i].src
    if dtype.kind == "f" and first == second:
        return f"(!{is_nan(w, dtype, width, x[0])})"
    return f"({x[0]} == {x[1]})"


def _mulacc(w: Writer, dtype: DType, width: int, x: list[str], i: int) -> str:
    if dtype.kind == "f":
        return f"fma({x[0]}, {x[1]}, {x[2]})"
    if dtype.kind == "b":
        raise refuse("MULACC", dtype, "defined for numbers only")
    return f"({x[0]} * {x[1]} + {x[2]})"


CORES: dict[str, Core] = {
    "ADD": _binary({"f": "+", "i": "+", "u": "+", "b": "|"}), "SUB": _binary({"f": "-", "i": "-", "u": "-"}),
    "MUL": _binary({"f": "*", "i": "*", "u": "*", "b": "&"}), "FDIV": _binary({"f": "/"}),
    "AND": _binary({"i": "&", "u": "&", "b": "&"}), "OR": _binary({"i": "|", "u": "|", "b": "|"}),
    "XOR": _binary({"i": "^", "u": "^", "b": "!="}),
    "NEG": _neg, "ABS": _call("abs", "fi"), "NOT": _not, "RECIPROCAL": _reciprocal,
    "SQRT": _call("sqrt"), "FLOOR": _call("floor"), "CEIL": _call("ceil"), "TRUNC": _whole("trunc"), "ROUND": _whole("round"),
    "MAX": _extremum(True), "MIN": _extremum(False), "IDIV": _division(False), "MOD": _division(True),
    "SHL": _shift(True), "SHR": _shift(False),
    "CMPLT": _comparison("<", "(!{0} & {1})", "(max({0}, {1}) != {0})"),
    "CMPLE": _comparison("<=", "(!{0} | {1})", "(min({0}, {1}) == {0})"), "CMPEQ": _equal, "CMPNE": _unequal,
    "MULACC": _mulacc,
}
COMPARED = frozenset({"CMPLT", "CMPLE", "CMPEQ", "CMPNE"})
STAYS = frozenset({"AND", "OR", "XOR", "MAX", "MIN", "MOD", "FLOOR", "CEIL", "TRUNC", "ROUND", "SHR"})
"""Operations whose results are of the operands' type without wrapping or rounding."""


def _alu(op: str) -> Handler:
    core = CORES[op]

    def handler(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        of = w.code[src[0]].dtype
        operands = [w.value[s] for s in src]
        if all(w.code[s].op in ("CONST", "VCONST") for s in src):       # what is constant to WGSL must not overflow
            operands[0] = [w.let(text) for text in operands[0]]
        for k in range(len(src)):
            if (i, k) in w.facts.hidden:
                operands[k] = [w.hide(of, width, text) for text, width in zip(operands[k], widths(lanes), strict=True)]
        exact = op in COMPARED or op in STAYS or (of.kind == "f" and op in ("NEG", "ABS"))
        chunks = []
        for k, width in enumerate(widths(lanes)):
            text = core(w, of, width, [x[k] for x in operands], i)
            chunks.append(w.let(text if exact else fit(w, dtype, width, text)))
        w.value.append(chunks)
    return handler


def _where(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    c, a, b = src
    condition = w.value[c] if w.code[c].lanes == lanes else w.value[c] * len(w.value[a])
    w.value.append([w.let(f"select({y}, {x}, {t})") for x, y, t in zip(w.value[a], w.value[b], condition, strict=True)])


# -- conversions --------------------------------------------------------------------------------------
def convert(w: Writer, of: DType, to: DType, width: int, text: str) -> str:
    """A chunk of one dtype as another, by the rules of CAST."""
    if of == to:
        return text
    v = register(to, width)
    if to.kind == "b":
        zero = w.constant(of, width, 0)
        return f"(!({text} == {zero}))" if of.kind == "f" else f"({text} != {zero})"
    if of.kind == "b":
        return f"{v}({text})"
    if to.kind == "f":
        if is_narrow_float(to) and of == F64:
            text = f"{_to_odd(w, width)}({text})"
        text = f"{v}({text})" if REGISTERS[of.name] != REGISTERS[to.name] else text
        return text if is_narrow_float(of) and not is_narrow_float(to) else fit(w, to, width, text)
    if to.name == "index":
        return _as_index(w, of, width, text)
    return _as_integer(w, of, to, width, text)


def _as_integer(w: Writer, of: DType, to: DType, width: int, text: str) -> str:
    """A number as an integer type other than index."""
    if REGISTERS[of.name] in ("i32", "u32") and to.bits == 64 and of.kind != to.kind:      # naga extends by the sign of the result's type
        of, kind = (dtypes.int64, "i64") if of.kind == "i" else (dtypes.uint64, "u64")
        text = f"{vector(kind, width)}({text})"
    kept = of.kind in "iu" and of.bits <= to.bits and (of.kind == to.kind or of.kind == "u") and of.name != "index"
    text = f"{register(to, width)}({text})" if REGISTERS[of.name] != REGISTERS[to.name] else text
    return text if kept else fit(w, to, width, text)


def _as_index(w: Writer, of: DType, width: int, text: str) -> str:
    """A number that may not fit 32 bits as an index: as the nearest that does, which lies outside of everything, too."""
    kind, v = REGISTERS[of.name], vector("i32", width)
    if kind in ("i64", "u64", "u32"):
        most = splat(kind, width, w.literal(of, (1 << 31) - 1))
        least = splat(kind, width, w.literal(of, -1 << 31)) if kind == "i64" else ""
        text = f"clamp({text}, {least}, {most})" if least else f"min({text}, {most})"
    return f"{v}({text})" if kind != "i32" else text


def _to_odd(w: Writer, width: int) -> str:
    """A function float64 → float32 rounded to odd, so that rounding again is as rounding once (Boldo and Melquiond 2005)."""
    name, v, d, u = f"to_odd_{width}", vector("f32", width), vector("f64", width), vector("u32", width)
    return w.helper(name, lambda: (
        f"fn {name}(x: {d}) -> {v} {{\n  let near = {v}(x);\n  let b = bitcast<{u}>(near);\n"
        f"  let beyond = abs({d}(near)) > abs(x);\n  let down = select(b, b - {word(1, width)}, beyond);\n"
        f"  let inexact = ({d}(near) < x) | ({d}(near) > x);\n"
        f"  return bitcast<{v}>(select(b, down | {word(1, width)}, inexact));\n}}"))


def _cast(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    _, of, _, _, value = w.code[src[0]]
    if w.code[src[0]].op == "CONST":        # WGSL refuses conversions of constants that do not fit
        value = cast(constant(of, value), of, dtype).item()
        w.value.append([w.constant(dtype, width, value) for width in widths(lanes)])
        return
    w.value.append([w.let(convert(w, of, dtype, width, text)) for text, width in zip(w.value[src[0]], widths(lanes), strict=True)])


# -- bits ---------------------------------------------------------------------------------------------
def bits_of(dtype: DType, text: str) -> str:
    """The bits of a scalar of at most 32 bits as u32, zeros above."""
    if dtype.kind == "b":
        return f"u32({text})"
    if dtype.name == "bfloat16":
        return f"(bitcast<u32>({text}) >> 16u)"
    if dtype.name == "float16":
        return f"(pack2x16float(vec2<f32>({text}, 0.0f)) & 0xffffu)"
    if dtype.kind == "u":
        return text
    bits = f"bitcast<u32>({text})"
    return bits if dtype.bits == 32 else f"({bits} & {(1 << dtype.bits) - 1}u)"


def from_bits(dtype: DType, text: str) -> str:
    """A scalar of at most 32 bits from its bits, zeros above."""
    if dtype.kind == "b":
        return f"({text} != 0u)"
    if dtype.name == "bfloat16":
        return f"bitcast<f32>({text} << 16u)"
    if dtype.name == "float16":
        return f"unpack2x16float({text}).x"
    if dtype.kind == "u":
        return text
    if dtype.bits == 32:
        return f"bitcast<{REGISTERS[dtype.name]}>({text})"
    return f"extractBits(bitcast<i32>({text}), 0u, {dtype.bits}u)"


def _words(w: Writer, dtype: DType, lanes: int, chunks: list[str]) -> list[str]:
    """The bytes of a value as words, the first in the low bits."""
    scalars = [lane(chunks, lanes, k) for k in range(lanes)]
    if dtype.bits == 64:
        halves = []
        for x in scalars:
            whole = w.let(f"bitcast<u64>({x})" if dtype.name != "uint64" else x)
            halves += [w.let(f"u32({whole} & 0xfffffffflu)"), w.let(f"u32({whole} >> 32u)")]
        return halves
    each = 32 // (8 * dtype.itemsize)
    groups = [scalars[k:k + each] for k in range(0, lanes, each)]
    return [w.let(" | ".join(f"({bits_of(dtype, x)} << {k * 8 * dtype.itemsize}u)" if k else bits_of(dtype, x) for k, x in enumerate(g)))
            for g in groups]


def _bitcast(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    _, of, width, _, _ = w.code[src[0]]
    chunks = w.value[src[0]]
    simple = ("f32", "i32", "u32")
    if of.bits == dtype.bits and (of.bits == 32 or of.kind + dtype.kind in ("iu", "ui")):
        made = []
        for text, n in zip(chunks, widths(lanes), strict=True):
            cast = f"bitcast<{register(dtype, n)}>({text})" if REGISTERS[of.name] in simple else f"{register(dtype, n)}({text})"
            made.append(w.let(fit(w, dtype, n, cast)))
        w.value.append(made)
        return
    if of.bits == dtype.bits == 64:
        w.value.append([w.let(f"bitcast<{register(dtype, n)}>({text})") for text, n in zip(chunks, widths(lanes), strict=True)])
        return
    if of.itemsize == dtype.itemsize:
        scalars = [from_bits(dtype, bits_of(of, lane(chunks, width, k))) for k in range(width)]
    else:
        words = _words(w, of, width, chunks)
        if dtype.bits == 64:
            pairs = [f"(u64({a}) | (u64({b}) << 32u))" for a, b in zip(words[::2], words[1::2], strict=True)]
            scalars = [p if dtype.name == "uint64" else f"bitcast<{REGISTERS[dtype.name]}>({p})" for p in pairs]
        else:
            size = 8 * dtype.itemsize
            scalars = [from_bits(dtype, f"(({words[k * size // 32]} >> {k * size % 32}u) & {(1 << size) - 1}u)") for k in range(lanes)]
    w.value.append(gathered(w, dtype, scalars))


def gathered(w: Writer, dtype: DType, scalars: list[str]) -> list[str]:
    """The chunks of a value that is given lane by lane."""
    chunks, at = [], 0
    for width in widths(len(scalars)):
        part = scalars[at:at + width]
        chunks.append(w.let(part[0] if width == 1 else f"{register(dtype, width)}({', '.join(part)})"))
        at += width
    return chunks


# -- lanes and constants ------------------------------------------------------------------------------
def _const(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value.append([w.constant(dtype, width, arg) for width in widths(lanes)])


def _vconst(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value.append(gathered(w, dtype, [w.literal(dtype, x) for x in arg]))


def _splat(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    x, made = w.value[src[0]][0], {}
    for width in widths(lanes):
        if width not in made:
            made[width] = w.let(f"{register(dtype, width)}({x})") if width > 1 else x
    w.value.append([made[width] for width in widths(lanes)])


def _extract(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value.append([lane(w.value[src[0]], w.code[src[0]].lanes, arg)])


def _shuffle(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    n = w.code[src[0]].lanes
    chunks, at = [], 0
    for width in widths(lanes):
        wanted = [k if k >= 0 else 0 for k in arg[at:at + width]]
        operand = w.value[src[wanted[0] // n]]
        first = wanted[0] % n
        same = first % WIDEST == 0 and wanted == list(range(wanted[0], wanted[0] + width)) and wanted[-1] // n == wanted[0] // n
        if same and min(WIDEST, n - first) == width:
            chunks.append(operand[first // WIDEST])
        else:
            parts = [lane(w.value[src[k // n]], n, k % n) for k in wanted]
            chunks.append(parts[0] if width == 1 else w.let(f"{register(dtype, width)}({', '.join(parts)})"))
        at += width
    w.value.append(chunks)


def _exchange(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    """The value of the thread of the subgroup whose number differs in the bits of the mask. Truth values go as numbers."""
    made = []
    for text, width in zip(w.value[src[0]], widths(lanes), strict=True):
        kind = vector("u32", width) if dtype.kind == "b" else ""
        made.append(w.let(f"{register(dtype, width) if kind else ''}(subgroupShuffleXor({kind}({text}), {arg}u))"))
    w.value.append(made)


HANDLERS: dict[str, Handler] = {
    **{op: _alu(op) for op in CORES}, "WHERE": _where, "CAST": _cast, "BITCAST": _bitcast, "CONST": _const, "VCONST": _vconst,
    "SPLAT": _splat, "EXTRACT": _extract, "SHUFFLE": _shuffle,
    "SHFL_XOR": _exchange,
}
