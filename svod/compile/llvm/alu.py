"""Elementwise instructions of LINEAR as LLVM text.

No operation may become a call of a library function, trap, or have undefined behaviour:

* integer division rounds to minus infinity; by zero it gives 0, as does the remainder; MIN // -1 wraps, as in NumPy;
* shifts by the width or more give 0, or the sign;
* float → integer truncates; what the target type cannot hold becomes some value of that type (LLVM's poison, frozen): what is to wrap goes
  by way of a wider type in LINEAR (`Builder.cast`);
* MAX and MIN return NaN if one operand is NaN: one instruction where an operand is a constant, else an ordered select and a fix;
* 16-bit floats are computed in float32 and rounded after every instruction, to nearest even. float32 has more than twice
  their precision, so +, -, *, / and sqrt are correctly rounded. float64 → 16 bits goes through float32 rounded to odd, which
  avoids rounding twice.
  float32 → bfloat16 is integer arithmetic but on GPUs that have an instruction: that of x86 flushes subnormals to zero;
* floats are never reassociated; a multiplication and an addition are fused only where LINEAR says MULACC.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.compile.llvm.memory import Handler
from svod.compile.llvm.text import SCALAR, Writer, constant, overload, refuse, register_type, splat
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.isa import DOTS

F32 = dtypes.float32
FENCED_LEVELS = 2                   # levels of shuffles of shuffles that are fenced
Core = Callable[[Writer, DType, int, list[str], tuple[int, ...]], str]
"""Writes one operation on operands of one dtype and returns the right-hand side of its last instruction."""


# -- 16-bit floats ----------------------------------------------------------------------------------
def _is_narrow(dtype: DType) -> bool:
    return dtype.kind == "f" and dtype.bits == 16


def widen(w: Writer, dtype: DType, lanes: int, operand: str) -> str:
    """A 16-bit float's bits as float32; exact."""
    bits, wide = register_type(dtype.name, lanes), register_type("float32", lanes)
    if dtype.name == "float16":
        half = "half" if lanes == 1 else f"<{lanes} x half>"
        return w.temp(f"fpext {half} {w.temp(f'bitcast {bits} {operand} to {half}')} to {wide}")
    word = register_type("uint32", lanes)
    high = w.temp(f"shl {word} {w.temp(f'zext {bits} {operand} to {word}')}, {splat(dtypes.uint32, 16, lanes)}")
    return w.temp(f"bitcast {word} {high} to {wide}")


def narrow(w: Writer, dtype: DType, lanes: int, operand: str) -> str:
    """float32 rounded to a 16-bit float, to nearest even: the right-hand side that gives its bits."""
    bits, wide = register_type(dtype.name, lanes), register_type("float32", lanes)
    if dtype.name == "float16":
        half = "half" if lanes == 1 else f"<{lanes} x half>"
        return f"bitcast {half} {w.temp(f'fptrunc {wide} {operand} to {half}')} to {bits}"
    if w.family.rounds_bfloat16(w.target):
        short = "bfloat" if lanes == 1 else f"<{lanes} x bfloat>"
        return f"bitcast {short} {w.temp(f'fptrunc {wide} {operand} to {short}')} to {bits}"
    # add half of the last place, and one more where the result would be odd; a NaN keeps its sign and gets its quiet bit
    u32, word = dtypes.uint32, register_type("uint32", lanes)
    raw = w.temp(f"bitcast {wide} {operand} to {word}")
    odd = w.temp(f"and {word} {w.temp(f'lshr {word} {raw}, {splat(u32, 16, lanes)}')}, {splat(u32, 1, lanes)}")
    half_up = w.temp(f"add {word} {raw}, {splat(u32, 0x7FFF, lanes)}")
    rounded = w.temp(f"add {word} {half_up}, {odd}")
    quiet = w.temp(f"or {word} {raw}, {splat(u32, 0x400000, lanes)}")
    cond = register_type("bool", lanes)
    nan = w.temp(f"fcmp uno {wide} {operand}, {splat(F32, 0.0, lanes)}")
    chosen = w.temp(f"select {cond} {nan}, {word} {quiet}, {word} {rounded}")
    return f"trunc {word} {w.temp(f'lshr {word} {chosen}, {splat(u32, 16, lanes)}')} to {bits}"


def _round_to_odd(w: Writer, lanes: int, operand: str) -> str:
    """float64 → float32 rounded to odd: an inexact result has its last bit set, so that rounding it again is as rounding once.

    (Boldo and Melquiond, "When double rounding is odd", 2005.)"""
    wide, single, word = (register_type(n, lanes) for n in ("float64", "float32", "uint32"))
    cond, one = register_type("bool", lanes), splat(dtypes.uint32, 1, lanes)
    fabs = f"call {wide} @llvm.fabs.{overload('double', lanes)}({wide} "
    near = w.temp(f"fptrunc {wide} {operand} to {single}")
    back = w.temp(f"fpext {single} {near} to {wide}")
    inexact = w.temp(f"fcmp one {wide} {back}, {operand}")
    raw = w.temp(f"bitcast {single} {near} to {word}")
    low = w.temp(f"and {word} {raw}, {one}")
    even = w.temp(f"icmp eq {word} {low}, {splat(dtypes.uint32, 0, lanes)}")
    fix = w.temp(f"and {cond} {inexact}, {even}")
    grow = w.temp(f"fcmp ogt {wide} {w.temp(f'{fabs}{operand})')}, {w.temp(f'{fabs}{back})')}")
    up, down = w.temp(f"add {word} {raw}, {one}"), w.temp(f"sub {word} {raw}, {one}")
    moved = w.temp(f"select {cond} {grow}, {word} {up}, {word} {down}")
    return w.temp(f"bitcast {word} {w.temp(f'select {cond} {fix}, {word} {moved}, {word} {raw}')} to {single}")


# -- the operations ---------------------------------------------------------------------------------
def _instruction(by_kind: dict[str, str]) -> Core:
    """Operations that are one LLVM instruction, by the kind of their operands."""
    def core(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        text = by_kind.get(dtype.kind)
        if text is None:
            raise refuse("ALU", dtype, f"defined for the kinds {', '.join(by_kind)} only")
        return f"{text} {register_type(dtype.name, lanes)} {x[0]}, {x[1]}"
    return core


def _call(name_by_kind: dict[str, str], extra: str = "") -> Core:
    """Operations that are one call of an LLVM intrinsic; kinds that are missing return the first operand (rounding an integer)."""
    def core(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        name, ty = name_by_kind.get(dtype.kind), register_type(dtype.name, lanes)
        if name is None:
            return f"freeze {ty} {x[0]}"
        args = ", ".join(f"{ty} {operand}" for operand in x)
        return f"call {ty} @llvm.{name}.{overload(SCALAR[dtype.name], lanes)}({args}{extra})"
    return core


def _neg(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    ty = register_type(dtype.name, lanes)
    return f"fneg {ty} {x[0]}" if dtype.kind == "f" else f"sub {ty} {splat(dtype, 0, lanes)}, {x[0]}"


def _abs(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    ty, suffix = register_type(dtype.name, lanes), overload(SCALAR[dtype.name], lanes)
    if dtype.kind == "f":
        return f"call {ty} @llvm.fabs.{suffix}({ty} {x[0]})"
    return f"call {ty} @llvm.abs.{suffix}({ty} {x[0]}, i1 false)" if dtype.kind == "i" else f"freeze {ty} {x[0]}"


def _not(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    ones = splat(dtype, True if dtype.kind == "b" else -1, lanes)
    return f"xor {register_type(dtype.name, lanes)} {x[0]}, {ones}"


def _reciprocal(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    if dtype.kind != "f":
        raise refuse("RECIPROCAL", dtype, "defined for floats only")
    return f"fdiv {register_type(dtype.name, lanes)} {splat(dtype, 1.0, lanes)}, {x[0]}"


def _extremum(ordered: str, signed: str, unsigned: str, boolean: str) -> Core:
    """MAX or MIN, by LLVM's names for them."""
    def core(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        ty, (a, b) = register_type(dtype.name, lanes), x
        if dtype.kind == "b":
            return f"{boolean} {ty} {a}, {b}"
        if dtype.kind != "f":
            name = signed if dtype.kind == "i" else unsigned
            return f"call {ty} @llvm.{name}.{overload(SCALAR[dtype.name], lanes)}({ty} {a}, {ty} {b})"
        # the larger, or what is NaN; which zero is chosen is left open. On x86 one maxps, which keeps a NaN of its second operand, and a
        # test of the first, left away where that is known: a should be what is not on a reduction's critical path
        if w.code[src[0]].op == "CARRY" or w.code[src[1]].op == "CONST":
            a, b = b, a
        return f"call nsz {ty} @llvm.{ordered}.{overload(SCALAR[dtype.name], lanes)}({ty} {a}, {ty} {b})"
    return core


def _divisor_guard(w: Writer, dtype: DType, lanes: int, a: str, b: str) -> tuple[str, str]:
    """(divisor that cannot trap, "is zero" condition) for a divisor that is not a constant."""
    ty, cond = register_type(dtype.name, lanes), register_type("bool", lanes)
    zero = w.temp(f"icmp eq {ty} {b}, {splat(dtype, 0, lanes)}")
    bad = zero
    if dtype.kind == "i":
        # MIN / -1 overflows, and traps on x86; divided by 1 it gives the wrapped quotient
        least = w.temp(f"icmp eq {ty} {a}, {splat(dtype, dtype.min, lanes)}")
        minus = w.temp(f"icmp eq {ty} {b}, {splat(dtype, -1, lanes)}")
        bad = w.temp(f"or {cond} {zero}, {w.temp(f'and {cond} {least}, {minus}')}")
    return w.temp(f"select {cond} {bad}, {ty} {splat(dtype, 1, lanes)}, {ty} {b}"), zero


def _division(remainder: bool) -> Core:
    """IDIV, or MOD."""
    def core(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        if dtype.kind not in "iu":
            raise refuse("MOD" if remainder else "IDIV", dtype, "defined for integers only")
        ty, cond, (a, b) = register_type(dtype.name, lanes), register_type("bool", lanes), x
        divisor = w.code[src[1]]
        known = int(divisor.arg) if divisor.op == "CONST" else None
        unsigned = dtype.kind == "u" or (known is not None and known > 0 and w.nonneg[src[0]])
        zero = splat(dtype, 0, lanes)
        if known is not None and known > 0 and known & (known - 1) == 0:
            # rounding to minus infinity is what an arithmetic shift does
            if remainder:
                return f"and {ty} {a}, {splat(dtype, known - 1, lanes)}"
            return f"{'lshr' if unsigned else 'ashr'} {ty} {a}, {splat(dtype, known.bit_length() - 1, lanes)}"
        if known == 0:
            return f"and {ty} {a}, {zero}"
        is_zero = None
        if known is None or known == -1:
            b, is_zero = _divisor_guard(w, dtype, lanes, a, b)
        if unsigned:
            plain = f"{'urem' if remainder else 'udiv'} {ty} {a}, {b}"
            return plain if is_zero is None else f"select {cond} {is_zero}, {ty} {zero}, {ty} {w.temp(plain)}"
        quotient = w.temp(f"sdiv {ty} {a}, {b}")
        rest = w.temp(f"sub {ty} {a}, {w.temp(f'mul {ty} {quotient}, {b}')}")
        if known is not None and known > 0:
            # all ones where the remainder is negative
            sign = w.temp(f"ashr {ty} {rest}, {splat(dtype, dtype.bits - 1, lanes)}")
            if not remainder:
                return f"add {ty} {quotient}, {sign}"
            return f"add {ty} {rest}, {w.temp(f'and {ty} {sign}, {b}')}"
        mixed = w.temp(f"icmp slt {ty} {w.temp(f'xor {ty} {rest}, {b}')}, {zero}")
        some = w.temp(f"icmp ne {ty} {rest}, {zero}")
        fix = w.temp(f"and {cond} {mixed}, {some}")
        if remainder:
            step = w.temp(f"select {cond} {fix}, {ty} {b}, {ty} {zero}")
            plain = f"add {ty} {rest}, {step}"
        else:
            plain = f"add {ty} {quotient}, {w.temp(f'sext {cond} {fix} to {ty}')}"
        return plain if is_zero is None else f"select {cond} {is_zero}, {ty} {zero}, {ty} {w.temp(plain)}"
    return core


def _shift(left: bool) -> Core:
    """SHL, or SHR: arithmetic for signed integers."""
    def core(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        if dtype.kind not in "iu":
            raise refuse("SHL" if left else "SHR", dtype, "defined for integers only")
        ty, cond, (a, b) = register_type(dtype.name, lanes), register_type("bool", lanes), x
        text = "shl" if left else "ashr" if dtype.kind == "i" else "lshr"
        amount = w.code[src[1]]
        known = amount.op == "CONST" and 0 <= amount.arg < dtype.bits
        if known:
            return f"{text} {ty} {a}, {b}"
        if text == "ashr":
            most = splat(dtype, dtype.bits - 1, lanes)
            capped = w.temp(f"call {ty} @llvm.umin.{overload(SCALAR[dtype.name], lanes)}({ty} {b}, {ty} {most})")
            return f"ashr {ty} {a}, {capped}"
        # the poison of an amount that is too large is not selected
        inside = w.temp(f"icmp ult {ty} {b}, {splat(dtype, dtype.bits, lanes)}")
        return f"select {cond} {inside}, {ty} {w.temp(f'{text} {ty} {a}, {b}')}, {ty} {splat(dtype, 0, lanes)}"
    return core


def _comparison(float_pred: str, signed_pred: str, unsigned_pred: str) -> Core:
    def core(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        ty = register_type(dtype.name, lanes)
        if dtype.kind == "f":
            return f"fcmp {float_pred} {ty} {x[0]}, {x[1]}"
        return f"icmp {signed_pred if dtype.kind == 'i' else unsigned_pred} {ty} {x[0]}, {x[1]}"
    return core


def _mulacc(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    ty, (a, b, c) = register_type(dtype.name, lanes), x
    if dtype.kind == "f":
        if w.target.has_fma:
            return f"call {ty} @llvm.fma.{overload(SCALAR[dtype.name], lanes)}({ty} {a}, {ty} {b}, {ty} {c})"
        return f"fadd contract {ty} {w.temp(f'fmul contract {ty} {a}, {b}')}, {c}"
    if dtype.kind == "b":
        raise refuse("MULACC", dtype, "defined for numbers only")
    return f"add {ty} {w.temp(f'mul {ty} {a}, {b}')}, {c}"


def _pow2(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    """2^x by ex2.approx.ftz (NVIDIA's PTX ISA), lane by lane."""
    if dtype.name != "float32" or not w.target.has_pow2:
        raise refuse("POW2", dtype, f"{w.target.arch} has an instruction for it of float32, or none")
    w.declared.add("declare float @llvm.nvvm.ex2.approx.ftz.f32(float)")
    if lanes == 1:
        return f"call float @llvm.nvvm.ex2.approx.ftz.f32(float {x[0]})"
    vec, whole = f"<{lanes} x float>", "poison"
    for k in range(lanes):
        power = w.temp(f"call float @llvm.nvvm.ex2.approx.ftz.f32(float {w.temp(f'extractelement {vec} {x[0]}, i64 {k}')})")
        text = f"insertelement {vec} {whole}, float {power}, i64 {k}"
        whole = w.temp(text) if k < lanes - 1 else text
    return whole


def _scaleb(w: Writer, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    """x · 2^n by VSCALEFPS and VSCALEFPD (Intel SDM volume 2C), on registers of 128 to 512 bits, with undefined lanes behind the last."""
    if dtype.kind != "f":
        raise refuse("SCALEB", dtype, "defined for floats only")
    if not w.target.has_scaleb:
        raise refuse("SCALEB", dtype, f"{w.target.arch} with {', '.join(w.target.features)} has no such instruction")
    scalar, most = SCALAR[dtype.name], 512 // dtype.bits
    words = max(128 // dtype.bits, 1 << (lanes - 1).bit_length()) if lanes <= most else -(-lanes // most) * most
    size = min(words, most)
    whole, part = f"<{words} x {scalar}>", f"<{size} x {scalar}>"
    # every lane, and at 512 bits: rounded as the processor is set to
    mask = "i16" if size == 16 else "i8"
    type_of_rounding, rounding = (", i32", ", i32 4") if size == most else ("", "")
    name = f"@llvm.x86.avx512.mask.scalef.p{'s' if dtype.bits == 32 else 'd'}.{size * dtype.bits}"
    w.declared.add(f"declare {part} {name}({part}, {part}, {part}, {mask}{type_of_rounding})")

    def scaled(a: str, n: str) -> str:
        return f"call {part} {name}({part} {a}, {part} {n}, {part} zeroinitializer, {mask} -1{rounding})"
    wide = [_widened(w, operand, scalar, lanes, words) for operand in x]
    if words == size:
        return _narrowed(w, scaled(*wide), scalar, words, lanes)
    text, kind = "", f"f{dtype.bits}"
    insert = f"@llvm.vector.insert.v{words}{kind}.v{size}{kind}"
    w.declared.add(f"declare {whole} {insert}({whole}, {part}, i64)")
    for begin in range(0, words, size):
        order = ", ".join(f"i32 {begin + k}" for k in range(size))
        cut = [w.temp(f"shufflevector {whole} {v}, {whole} poison, <{size} x i32> <{order}>") for v in wide]
        before, value = w.temp(text) if text else "poison", w.temp(scaled(*cut))
        text = f"call {whole} {insert}({whole} {before}, {part} {value}, i64 {begin})"
    return _narrowed(w, text, scalar, words, lanes)


CORES: dict[str, Core] = {
    "ADD": _instruction({"f": "fadd", "i": "add", "u": "add", "b": "or"}),
    "SUB": _instruction({"f": "fsub", "i": "sub", "u": "sub"}),
    "MUL": _instruction({"f": "fmul", "i": "mul", "u": "mul", "b": "and"}),
    "FDIV": _instruction({"f": "fdiv"}),
    "AND": _instruction({"i": "and", "u": "and", "b": "and"}),
    "OR": _instruction({"i": "or", "u": "or", "b": "or"}),
    "XOR": _instruction({"i": "xor", "u": "xor", "b": "xor"}),
    "NEG": _neg, "ABS": _abs, "NOT": _not, "RECIPROCAL": _reciprocal,
    "SQRT": _call({"f": "sqrt"}), "FLOOR": _call({"f": "floor"}), "CEIL": _call({"f": "ceil"}), "TRUNC": _call({"f": "trunc"}),
    "ROUND": _call({"f": "roundeven"}),
    "MAX": _extremum("maximum", "smax", "umax", "or"), "MIN": _extremum("minimum", "smin", "umin", "and"),
    "IDIV": _division(False), "MOD": _division(True), "SHL": _shift(True), "SHR": _shift(False),
    "CMPLT": _comparison("olt", "slt", "ult"), "CMPLE": _comparison("ole", "sle", "ule"),
    "CMPEQ": _comparison("oeq", "eq", "eq"), "CMPNE": _comparison("une", "ne", "ne"),
    "MULACC": _mulacc, "SCALEB": _scaleb, "POW2": _pow2,
}
COMPARED = frozenset({"CMPLT", "CMPLE", "CMPEQ", "CMPNE"})
KEEPS_NONNEG = frozenset({"ADD", "MUL", "IDIV", "MOD", "MIN", "MAX", "MULACC"})
SIGN_BIT = {"NEG": "xor", "ABS": "and"}


def _alu(op: str) -> Handler:
    core, keeps_nonneg, compares, sign_bit = CORES[op], op in KEEPS_NONNEG, op in COMPARED, SIGN_BIT.get(op)

    def handler(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        value = w.value
        operands = [value[s] for s in src]
        of = w.code[src[0]].dtype if compares else dtype
        if of.kind != "f" or of.bits != 16:
            w.lines.append(f"  %v{i} = {core(w, of, lanes, operands, src)}")
        elif sign_bit is not None:
            pattern = 0x8000 if sign_bit == "xor" else 0x7FFF
            w.lines.append(f"  %v{i} = {sign_bit} {register_type(of.name, lanes)} {operands[0]}, {splat(dtypes.uint16, pattern, lanes)}")
        else:
            wide = core(w, F32, lanes, [widen(w, of, lanes, x) for x in operands], src)
            w.lines.append(f"  %v{i} = {wide if compares else narrow(w, dtype, lanes, w.temp(wide))}")
        value[i] = f"%v{i}"
        if keeps_nonneg and of.name == "index":
            w.nonneg[i] = all(w.nonneg[s] for s in src)
    return handler


def _where(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    c, a, b = src
    ty, cond = register_type(dtype.name, lanes), register_type("bool", w.code[c].lanes)
    w.lines.append(f"  %v{i} = select {cond} {w.value[c]}, {ty} {w.value[a]}, {ty} {w.value[b]}")
    w.value[i] = f"%v{i}"
    w.nonneg[i] = w.nonneg[a] & w.nonneg[b]


# -- conversions ------------------------------------------------------------------------------------
def convert(w: Writer, of: DType, to: DType, lanes: int, operand: str) -> str:
    """`operand` of dtype `of` as dtype `to`: a register or constant, by the rules of this module's docstring."""
    if of.name == to.name or (of.kind in "iu" and to.kind in "iu" and of.bits == to.bits):
        return operand
    if _is_narrow(of):
        return convert(w, F32, to, lanes, widen(w, of, lanes, operand))
    if _is_narrow(to):
        single = _round_to_odd(w, lanes, operand) if of.name == "float64" else convert(w, of, F32, lanes, operand)
        return w.temp(narrow(w, to, lanes, single))
    src, dst = register_type(of.name, lanes), register_type(to.name, lanes)
    if to.kind == "b":
        zero = splat(of, 0, lanes)
        return w.temp(f"fcmp une {src} {operand}, {zero}" if of.kind == "f" else f"icmp ne {src} {operand}, {zero}")
    if of.kind == "f":
        if to.kind == "f":
            return w.temp(f"{'fpext' if to.bits > of.bits else 'fptrunc'} {src} {operand} to {dst}")
        raw = w.temp(f"{'fptosi' if to.kind == 'i' else 'fptoui'} {src} {operand} to {dst}")
        return w.temp(f"freeze {dst} {raw}")
    signed = of.kind == "i"
    if to.kind == "f":
        return w.temp(f"{'sitofp' if signed else 'uitofp'} {src} {operand} to {dst}")
    if to.bits < of.bits:
        return w.temp(f"trunc {src} {operand} to {dst}")
    return w.temp(f"{'sext' if signed else 'zext'} {src} {operand} to {dst}")


def _cast(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    of = w.code[src[0]].dtype
    w.value[i] = convert(w, of, dtype, lanes, w.value[src[0]])
    w.nonneg[i] = w.nonneg[src[0]] or (dtype.name == "index" and of.kind in "bu" and of.bits < 64)


def _bitcast(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    _, of, width, _, _ = w.code[src[0]]
    operand = w.value[src[0]]
    if of.itemsize * width != dtype.itemsize * lanes:
        raise refuse("BITCAST", dtype, f"{of.name}x{width} and {dtype.name}x{lanes} differ in width")
    a, b = register_type(of.name, width), register_type(dtype.name, lanes)
    if a == b:
        w.value[i] = operand
    elif dtype.kind == "b":
        w.value[i] = convert(w, of, dtype, lanes, operand)
    elif of.kind == "b":
        w.value[i] = w.temp(f"zext {a} {operand} to {b}")
    else:
        w.value[i] = w.temp(f"bitcast {a} {operand} to {b}")


def _in_rounds(op: str, write: Handler, accumulator: int) -> Handler:
    """`write`, for an operation that adds to its operand number `accumulator`.

    Unrolled iterations add to the same accumulators, round after round. Between two rounds goes an empty statement that memory accesses do
    not pass: LLVM gathers neighbouring loads, those of several rounds before the first, and then lacks registers for the accumulators
    (14×32 accumulators, two rounds: 18.8 ms for 8.9 ms)."""
    def handler(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        if not w.family.fences:
            write(w, i, dtype, lanes, src, arg)
            return
        before = w.code[src[accumulator]]
        number = w.round_of.get(src[accumulator], 0) + 1 if before.op == op and lanes > 1 else 1
        if number > w.round and w.round_block == w.block:
            w.lines.insert(w.round_end, '  call void asm sideeffect "", ""()')
        w.round_of[i], w.round, w.round_block = number, number, w.block
        write(w, i, dtype, lanes, src, arg)
        w.round_end = len(w.lines)
    return handler


# -- lanes and constants ----------------------------------------------------------------------------
def _const(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = splat(dtype, arg, lanes)
    w.nonneg[i] = dtype.name == "index" and arg >= 0


def _vconst(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    scalar = SCALAR[dtype.name]
    w.value[i] = "<" + ", ".join(f"{scalar} {constant(dtype, x)}" for x in arg) + ">" if lanes > 1 else constant(dtype, arg[0])
    w.nonneg[i] = dtype.name == "index" and min(arg) >= 0


def _splat(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = w.broadcast(SCALAR[dtype.name], lanes, w.value[src[0]])
    w.nonneg[i] = w.nonneg[src[0]]


def _extract(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    n = w.code[src[0]].lanes
    operand = w.value[src[0]]
    w.value[i] = operand if n == 1 else w.temp(f"extractelement {register_type(dtype.name, n)} {operand}, i64 {arg}")
    w.nonneg[i] = w.nonneg[src[0]]


def _shuffle(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    n, scalar = w.code[src[0]].lanes, SCALAR[dtype.name]
    vec = f"<{n} x {scalar}>"
    operands = [w.value[s] for s in src]
    if n == 1:
        operands = [w.temp(f"insertelement {vec} poison, {scalar} {x}, i64 0") for x in operands]
    b = operands[1] if len(operands) > 1 else "poison"
    order = ", ".join(f"i32 {k}" if k >= 0 else "i32 poison" for k in arg)
    result = w.temp(f"shufflevector {vec} {operands[0]}, {vec} {b}, <{len(arg)} x i32> <{order}>")
    w.value[i] = result if lanes > 1 else w.temp(f"extractelement <1 x {scalar}> {result}, i64 0")
    if len(src) == 2 and dtype.kind != "b" and w.family.fences:
        depth = 1 + max(w.shuffles.get(s, 0) for s in src)
        size = lanes * dtype.itemsize
        if depth >= FENCED_LEVELS and size >= 16 and size & (size - 1) == 0:
            w.value[i] = _fenced(w, f"<{lanes} x {scalar}>", size // 4, w.value[i])
        else:
            w.shuffles[i] = depth


def _fenced(w: Writer, vec: str, words: int, operand: str) -> str:
    """A vector of this many 32-bit words behind which LLVM does not look: no code. It tries to merge each shuffle with all that lead to
    it, which takes longer than the rest of a transposition and ends in the same instructions (`experiments/search_compiler.py`)."""
    fence = f"<{words} x float>"
    w.declared.add(f"declare {fence} @llvm.arithmetic.fence.v{words}f32({fence})")
    if vec == fence:
        return w.temp(f"call {fence} @llvm.arithmetic.fence.v{words}f32({fence} {operand})")
    cast = w.temp(f"bitcast {vec} {operand} to {fence}")
    return w.temp(f"bitcast {fence} {w.temp(f'call {fence} @llvm.arithmetic.fence.v{words}f32({fence} {cast})')} to {vec}")


# -- dot instructions -------------------------------------------------------------------------------
def _dot(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    kinds = tuple(w.code[s].dtype for s in src[1:])
    dot = next((d for d in DOTS.values() if not d.is_tile and (d.accumulator, d.operands, d.group) == (dtype, kinds, arg)), None)
    if dot is None or not dot.runs_on(w.target):
        raise refuse("DOT", dtype, f"{w.target.arch} with {', '.join(w.target.features)} has no such instruction")
    # a register of 4, 8 or 16 words; lanes beyond those in use hold anything
    words = max(4, lanes)
    if words & (words - 1) or words * 4 > w.target.vector_bytes:
        raise refuse("DOT", dtype, f"{lanes} lanes are no register")
    wide = f"<{words * arg} x bfloat>" if dot.accumulator.is_float else f"<{words} x i32>"
    acc_type = f"<{words} x {SCALAR[dtype.name]}>"
    operands = [f"{acc_type} {_widened(w, w.value[src[0]], SCALAR[dtype.name], lanes, words)}"]
    for s, k in zip(src[1:], kinds, strict=True):
        scalar = SCALAR[k.name]
        value = _widened(w, w.value[s], scalar, lanes * arg, words * arg)
        operands.append(f"{wide} {w.temp(f'bitcast <{words * arg} x {scalar}> {value} to {wide}')}")
    name = f"{dot.llvm}.{words * 32}"
    w.declared.add(f"declare {acc_type} @{name}({acc_type}, {wide}, {wide})")
    w.value[i] = w.temp(_narrowed(w, f"call {acc_type} @{name}({', '.join(operands)})", SCALAR[dtype.name], words, lanes))


def _widened(w: Writer, operand: str, scalar: str, lanes: int, wanted: int) -> str:
    """A vector of `lanes` elements, padded with undefined ones."""
    if lanes == wanted:
        return operand
    vec = f"<{lanes} x {scalar}>"
    if lanes == 1:
        operand = w.temp(f"insertelement {vec} poison, {scalar} {operand}, i64 0")
    order = ", ".join(f"i32 {k}" if k < lanes else "i32 poison" for k in range(wanted))
    return w.temp(f"shufflevector {vec} {operand}, {vec} poison, <{wanted} x i32> <{order}>")


def _narrowed(w: Writer, text: str, scalar: str, lanes: int, wanted: int) -> str:
    """The right-hand side for the first `wanted` elements of a vector of `lanes`, of which `text` is the right-hand side."""
    if lanes == wanted:
        return text
    vec = f"<{lanes} x {scalar}>"
    if wanted == 1:
        return f"extractelement {vec} {w.temp(text)}, i64 0"
    order = ", ".join(f"i32 {k}" for k in range(wanted))
    return f"shufflevector {vec} {w.temp(text)}, {vec} poison, <{wanted} x i32> <{order}>"


HANDLERS: dict[str, Handler] = {
    **{op: _alu(op) for op in CORES}, "MULACC": _in_rounds("MULACC", _alu("MULACC"), 2), "DOT": _in_rounds("DOT", _dot, 0),
    "WHERE": _where, "CAST": _cast, "BITCAST": _bitcast, "CONST": _const, "VCONST": _vconst, "SPLAT": _splat, "EXTRACT": _extract,
    "SHUFFLE": _shuffle,
}
