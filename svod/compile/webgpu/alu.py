"""Elementwise instructions of LINEAR as WGSL expressions, chunk by chunk, after legalisation (`WGSL_INSTRUCTIONS`).

WGSL allows an implementation to assume that there are no NaNs and to reassociate sums, and drivers do so. Therefore

* operands that a compiler could cancel or fold are hidden from it (`hidden.py`);
* a float is tested for NaN by its bits; CMPNE is the negation of an equality;
* narrow integers and floats are in 32-bit registers, and a CAST wraps or rounds them;
* MULACC is fma(), which may round twice in WGSL: `Target.has_fma` is False, so lowering expands operations that need a single rounding in
  another way.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.compile.lower.legal.instructions import Instructions
from svod.compile.webgpu.text import (
    CHUNK_LANES,
    REGISTER_TYPES,
    WgslWriter,
    lane,
    refuse,
    register,
    vector,
    widths,
    word,
)
from svod.core.ir.dtype import DType

WGSL_INSTRUCTIONS = Instructions(holds_wide=True, half_casts=frozenset({"float16"}), widened=frozenset({"float16", "bfloat16"}),
                                 index_bits=32)
"""The instructions that are printed for every adapter. Mesa 22.3 rounds halves of float64 down, and takes i64(a) < 5 for false; naga
extends integers by the sign of the result's type."""
Core = Callable[[WgslWriter, DType, int, list[str], int], str]
"""A function that writes one operation on chunks of one dtype and width, for the instruction with a number; returns an expression."""
Handler = Callable[[WgslWriter, int, DType, int, tuple[int, ...], Any], None]


# -- rounding and wrapping ----------------------------------------------------------------------------
def fit(w: WgslWriter, dtype: DType, width: int, text: str) -> str:
    """Round or wrap a 32-bit number to a narrower type."""
    if dtype.name == "index" or dtype.bits >= 32 or dtype.kind == "b":
        return text
    if dtype.kind == "i":
        return f"extractBits({text}, 0u, {dtype.bits}u)"
    if dtype.kind == "u":
        return f"({text} & {word((1 << dtype.bits) - 1, width)})"
    if w.has("float16"):
        w.uses_half = w.hides = True
        half = w.let(f"{vector('f16', width)}({text})")
        # the select keeps compilers from removing a conversion to half and back
        return f"{vector('f32', width)}(select({half}, -{half}, unknown != 0u))"
    name, v = f"round_{dtype.name}_{width}", vector("f32", width)
    lanes = [f"unpack2x16float(pack2x16float(vec2<f32>({lane(['x'], width, k)}, 0.0f))).x" for k in range(width)]
    return w.helper(name, lambda: f"fn {name}(x: {v}) -> {v} {{ return {v}({', '.join(lanes)}); }}") + f"({text})"


# -- the operations -----------------------------------------------------------------------------------
def _binary(by_kind: dict[str, str]) -> Core:
    """Return the writer of a binary operator of WGSL. `by_kind`: the operator for each kind of operands."""
    def core(w: WgslWriter, dtype: DType, width: int, x: list[str], i: int) -> str:
        text = by_kind.get(dtype.kind)
        if text is None:
            raise refuse(w.code[i].op, dtype, f"defined for the kinds {', '.join(by_kind)} only")
        return f"({x[0]} {text} {x[1]})"
    return core


def _call(name: str) -> Core:
    """Return the writer of a call of a WGSL function."""
    return lambda w, dtype, width, x, i: f"{name}({', '.join(x)})"


def _prefix(operator: str, of_bools: str = "") -> Core:
    return lambda w, dtype, width, x, i: f"({of_bools if dtype.kind == 'b' else operator}{x[0]})"


def _shift(operator: str) -> Core:
    """Return the writer of a shift, whose amount must be u32 in WGSL."""
    def core(w: WgslWriter, dtype: DType, width: int, x: list[str], i: int) -> str:
        amount = w.code[w.code[i].src[1]]
        by = word(amount.arg, width) if amount.op == "CONST" else f"{vector('u32', width)}({x[1]})"
        return f"({x[0]} {operator} {by})"
    return core


def _comparison(operator: str) -> Core:
    return lambda w, dtype, width, x, i: f"({x[0]} {operator} {x[1]})"


def _unequal(w: WgslWriter, dtype: DType, width: int, x: list[str], i: int) -> str:
    return f"(!({x[0]} == {x[1]}))" if dtype.kind == "f" else f"({x[0]} != {x[1]})"


def _mulacc(w: WgslWriter, dtype: DType, width: int, x: list[str], i: int) -> str:
    return f"fma({x[0]}, {x[1]}, {x[2]})" if dtype.kind == "f" else f"({x[0]} * {x[1]} + {x[2]})"


_SHIFTS = {"SHL": _shift("<<"), "SHR": _shift(">>")}
CORES: dict[str, Core] = {
    **{op: _binary(dict.fromkeys("fiu", sign)) for op, sign in (("ADD", "+"), ("SUB", "-"), ("MUL", "*"), ("FDIV", "/"))},
    "QUOTIENT": _binary({"i": "/", "u": "/"}), "REMAINDER": _binary({"i": "%", "u": "%"}),
    **_SHIFTS, **{f"{op}_BELOW": core for op, core in _SHIFTS.items()},
    "AND": _binary(dict.fromkeys("iub", "&")), "OR": _binary(dict.fromkeys("iub", "|")), "XOR": _binary({"i": "^", "u": "^", "b": "!="}),
    "NEG": _prefix("-"), "NOT": _prefix("~", "!"),
    **{op: _call(op.lower()) for op in ("ABS", "SQRT", "FLOOR", "CEIL", "TRUNC", "ROUND", "MAX", "MIN")},
    "CMPLT": _comparison("<"), "CMPLE": _comparison("<="), "CMPEQ": _comparison("=="), "CMPNE": _unequal, "MULACC": _mulacc,
}


def _alu(op: str) -> Handler:
    core = CORES[op]

    def handler(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        of = w.code[src[0]].dtype
        operands = [w.value[s] for s in src]
        if all(w.code[s].op in ("CONST", "VCONST") for s in src):       # a constant expression of WGSL must not overflow
            operands[0] = [w.let(text) for text in operands[0]]
        for k in range(len(src)):
            if (i, k) in w.facts.hidden:
                operands[k] = [w.hide(of, width, text) for text, width in zip(operands[k], widths(lanes), strict=True)]
        w.value.append([w.let(core(w, of, width, [x[k] for x in operands], i)) for k, width in enumerate(widths(lanes))])
    return handler


def _where(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    c, a, b = src
    condition = w.value[c] if w.code[c].lanes == lanes else w.value[c] * len(w.value[a])
    w.value.append([w.let(f"select({y}, {x}, {t})") for x, y, t in zip(w.value[a], w.value[b], condition, strict=True)])


# -- conversions --------------------------------------------------------------------------------------
def _cast(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    of = w.code[src[0]].dtype
    is_same = REGISTER_TYPES[of.name] == REGISTER_TYPES[dtype.name]
    holds_all = of.is_float == dtype.is_float and (of.bits <= dtype.bits if of.is_float else of.min >= dtype.min and of.max <= dtype.max)
    made = []
    for given, width in zip(w.value[src[0]], widths(lanes), strict=True):
        text = given if is_same else f"{register(dtype, width)}({given})"
        text = text if holds_all else fit(w, dtype, width, text)
        made.append(given if text == given else w.let(text))
    w.value.append(made)


# -- bits ---------------------------------------------------------------------------------------------
def bits_of(dtype: DType, text: str) -> str:
    """Return the bits of a scalar of at most 32 bits as a u32; higher bits are 0."""
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
    """Return a scalar of at most 32 bits from its bits, given as a u32 whose higher bits are 0."""
    if dtype.kind == "b":
        return f"({text} != 0u)"
    if dtype.name == "bfloat16":
        return f"bitcast<f32>({text} << 16u)"
    if dtype.name == "float16":
        return f"unpack2x16float({text}).x"
    if dtype.kind == "u":
        return text
    if dtype.bits == 32:
        return f"bitcast<{REGISTER_TYPES[dtype.name]}>({text})"
    return f"extractBits(bitcast<i32>({text}), 0u, {dtype.bits}u)"


def _bitcast(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    of, chunks = w.code[src[0]].dtype, w.value[src[0]]
    if (of.name, dtype.name) in (("uint16", "bfloat16"), ("bfloat16", "uint16")):
        form = "bitcast<{v}>({x} << {n})" if dtype.is_float else "(bitcast<{v}>({x}) >> {n})"
        w.value.append([w.let(form.format(v=register(dtype, n), x=x, n=word(16, n))) for x, n in zip(chunks, widths(lanes), strict=True)])
    elif of.bits < 32 and "f" in of.kind + dtype.kind:
        w.value.append(gathered(w, dtype, [from_bits(dtype, bits_of(of, lane(chunks, lanes, k))) for k in range(lanes)]))
    else:
        w.value.append([w.let(fit(w, dtype, width, f"bitcast<{register(dtype, width)}>({text})"))
                        for text, width in zip(chunks, widths(lanes), strict=True)])


def gathered(w: WgslWriter, dtype: DType, scalars: list[str]) -> list[str]:
    """Combine lanes into the chunks of a value."""
    chunks, at = [], 0
    for width in widths(len(scalars)):
        part = scalars[at:at + width]
        chunks.append(w.let(part[0] if width == 1 else f"{register(dtype, width)}({', '.join(part)})"))
        at += width
    return chunks


# -- lanes and constants ------------------------------------------------------------------------------
def _const(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value.append([w.constant(dtype, width, arg) for width in widths(lanes)])


def _vconst(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value.append(gathered(w, dtype, [w.literal(dtype, x) for x in arg]))


def _splat(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    x, made = w.value[src[0]][0], {}
    for width in widths(lanes):
        if width not in made:
            made[width] = w.let(f"{register(dtype, width)}({x})") if width > 1 else x
    w.value.append([made[width] for width in widths(lanes)])


def _extract(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value.append([lane(w.value[src[0]], w.code[src[0]].lanes, arg)])


def _shuffle(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    n = w.code[src[0]].lanes
    chunks, at = [], 0
    for width in widths(lanes):
        wanted = [k if k >= 0 else 0 for k in arg[at:at + width]]
        operand = w.value[src[wanted[0] // n]]
        first = wanted[0] % n
        same = first % CHUNK_LANES == 0 and wanted == list(range(wanted[0], wanted[0] + width)) and wanted[-1] // n == wanted[0] // n
        if same and min(CHUNK_LANES, n - first) == width:
            chunks.append(operand[first // CHUNK_LANES])
        else:
            parts = [lane(w.value[src[k // n]], n, k % n) for k in wanted]
            chunks.append(parts[0] if width == 1 else w.let(f"{register(dtype, width)}({', '.join(parts)})"))
        at += width
    w.value.append(chunks)


def _exchange(w: WgslWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    """Read the value of the thread of the subgroup whose number differs from this thread's in the bits of the mask. Booleans are
    exchanged as numbers."""
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
