"""Elementwise instructions of LINEAR as LLVM text, after legalisation (`LLVM_INSTRUCTIONS`).

No operation may become a call of a library function, trap, or have undefined behaviour:

* float → integer truncates; a float outside the range of the integer type becomes an unspecified value of that type (LLVM's poison,
  frozen). A conversion that has to wrap goes through a wider type in LINEAR (`Builder.cast`);
* a shift by the width or more is poison, and a select discards it;
* MAX and MIN return NaN if one operand is NaN: one instruction if an operand is a constant, otherwise an ordered select and a correction;
* 16-bit floats are only converted from and to float32. On x86 the conversion to bfloat16 is done in integer arithmetic, because the
  instruction flushes subnormals to zero;
* floats are never reassociated; a multiplication and an addition are fused only in a MULACC of LINEAR.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from svod.compile.llvm.memory import Handler
from svod.compile.llvm.text import SCALAR, LlvmWriter, constant, overload, refuse, register_type, splat
from svod.compile.lower.legal.instructions import Instructions
from svod.compile.lower.linear import COMPARES
from svod.compile.lower.program import Instruction
from svod.core.ir.dtype import DType
from svod.core.machine.isa import DOTS
from svod.core.machine.target import Target

LLVM_INSTRUCTIONS = Instructions(has_short_integers=True, keeps_nans=True, compares_nans=True, compares_bools=True, compares_int64=True,
                            extends_by_source=True, rounds_float64=True, splits_lanes=True)
"""The instructions that LLVM compiles for every target."""
_ADDED_TO = {"MULACC": 2, "DOT": 0}     # operations that add to one of their operands → the index of that operand
FENCED_LEVELS = 2                   # number of levels of nested shuffles that LLVM must not merge (`_fenced`)
Core = Callable[[LlvmWriter, DType, int, list[str], tuple[int, ...]], str]
"""A function that writes one operation on operands of one dtype, and returns the expression of its last instruction."""


def instructions(target: Target) -> Instructions:
    """Return the instructions that `render` prints for a CPU target."""
    halves = frozenset({"float16"}) if target.arch != "x86_64" or "f16c" in target.features else frozenset[str]()
    return replace(LLVM_INSTRUCTIONS, half_casts=halves, widened=halves)


# -- the operations ---------------------------------------------------------------------------------
def _instruction(by_kind: dict[str, str]) -> Core:
    """Return the writer of an operation that is one LLVM instruction. `by_kind`: the instruction for each kind of operands."""
    def core(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        text = by_kind.get(dtype.kind)
        if text is None:
            raise refuse("ALU", dtype, f"defined for the kinds {', '.join(by_kind)} only")
        return f"{text} {register_type(dtype.name, lanes)} {x[0]}, {x[1]}"
    return core


def _call(name: str, extra: str = "") -> Core:
    """Return the writer of an operation that is one call of an LLVM intrinsic. `extra`: further arguments of the call."""
    def core(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        ty = register_type(dtype.name, lanes)
        args = ", ".join(f"{ty} {operand}" for operand in x)
        return f"call {ty} @llvm.{name}.{overload(SCALAR[dtype.name], lanes)}({args}{extra})"
    return core


def _neg(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    return f"fneg {register_type(dtype.name, lanes)} {x[0]}"


def _abs(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    return (_call("fabs") if dtype.kind == "f" else _call("abs", ", i1 false"))(w, dtype, lanes, x, src)


def _not(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    ones = splat(dtype, True if dtype.kind == "b" else -1, lanes)
    return f"xor {register_type(dtype.name, lanes)} {x[0]}, {ones}"


def _extremum(ordered: str, signed: str, unsigned: str) -> Core:
    """Return the writer of MAX or MIN. The arguments are the names of LLVM's intrinsics for floats, signed and unsigned integers."""
    def core(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        if dtype.kind != "f":
            return _call(signed if dtype.kind == "i" else unsigned)(w, dtype, lanes, x, src)
        # The result is the larger operand, or NaN if one is NaN; for 0 and -0 either may result. On x86 this is one maxps, which keeps a
        # NaN of its second operand, and a test of the first operand, which LLVM omits for a constant. So the first operand should be a
        # constant, or the operand that is not on the critical path of a reduction.
        if w.code[src[0]].op == "CARRY" or w.code[src[1]].op == "CONST":
            x = x[::-1]
        return _call(ordered)(w, dtype, lanes, x, src).replace("call ", "call nsz ", 1)
    return core


def _comparison(float_pred: str, signed_pred: str, unsigned_pred: str) -> Core:
    def core(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
        ty = register_type(dtype.name, lanes)
        if dtype.kind == "f":
            return f"fcmp {float_pred} {ty} {x[0]}, {x[1]}"
        return f"icmp {signed_pred if dtype.kind == 'i' else unsigned_pred} {ty} {x[0]}, {x[1]}"
    return core


def _mulacc(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    ty, (a, b, c) = register_type(dtype.name, lanes), x
    if dtype.kind == "f":
        if w.target.has_fma:
            return f"call {ty} @llvm.fma.{overload(SCALAR[dtype.name], lanes)}({ty} {a}, {ty} {b}, {ty} {c})"
        return f"fadd contract {ty} {w.temp(f'fmul contract {ty} {a}, {b}')}, {c}"
    return f"add {ty} {w.temp(f'mul {ty} {a}, {b}')}, {c}"


def _pow2(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    """Write 2^x as ex2.approx.ftz (NVIDIA's PTX ISA), lane by lane."""
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


def _scaleb(w: LlvmWriter, dtype: DType, lanes: int, x: list[str], src: tuple[int, ...]) -> str:
    """Write x · 2^n as VSCALEFPS or VSCALEFPD (Intel SDM volume 2C) on registers of 128 to 512 bits; unused lanes are undefined."""
    if not w.target.has_scaleb:
        raise refuse("SCALEB", dtype, f"{w.target.arch} with {', '.join(w.target.features)} has no such instruction")
    scalar, most = SCALAR[dtype.name], 512 // dtype.bits
    words = max(128 // dtype.bits, 1 << (lanes - 1).bit_length()) if lanes <= most else -(-lanes // most) * most
    size = min(words, most)
    whole, part = f"<{words} x {scalar}>", f"<{size} x {scalar}>"
    # a mask of all lanes; the 512-bit form also takes a rounding mode: 4 selects the current mode of the processor
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


_SHIFTS = {"SHL": _instruction({"i": "shl", "u": "shl"}), "SHR": _instruction({"i": "ashr", "u": "lshr"})}
CORES: dict[str, Core] = {
    "ADD": _instruction({"f": "fadd", "i": "add", "u": "add"}), "SUB": _instruction({"f": "fsub", "i": "sub", "u": "sub"}),
    "MUL": _instruction({"f": "fmul", "i": "mul", "u": "mul"}), "FDIV": _instruction({"f": "fdiv"}),
    "QUOTIENT": _instruction({"i": "sdiv", "u": "udiv"}), "REMAINDER": _instruction({"i": "srem", "u": "urem"}),
    **_SHIFTS, **{f"{op}_BELOW": core for op, core in _SHIFTS.items()},
    **{op: _instruction(dict.fromkeys("iub", op.lower())) for op in ("AND", "OR", "XOR")},
    "NEG": _neg, "ABS": _abs, "NOT": _not,
    "SQRT": _call("sqrt"), "FLOOR": _call("floor"), "CEIL": _call("ceil"), "TRUNC": _call("trunc"), "ROUND": _call("roundeven"),
    "MAX": _extremum("maximum", "smax", "umax"), "MIN": _extremum("minimum", "smin", "umin"),
    "CMPLT": _comparison("olt", "slt", "ult"), "CMPLE": _comparison("ole", "sle", "ule"),
    "CMPEQ": _comparison("oeq", "eq", "eq"), "CMPNE": _comparison("une", "ne", "ne"),
    "MULACC": _mulacc, "SCALEB": _scaleb, "POW2": _pow2,
}


def _alu(op: str) -> Handler:
    core, compares = CORES[op], op in COMPARES

    def handler(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        of = w.code[src[0]].dtype if compares else dtype
        w.lines.append(f"  %v{i} = {core(w, of, lanes, [w.value[s] for s in src], src)}")
        w.value[i] = f"%v{i}"
    return handler


def _where(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    c, a, b = src
    ty, cond, mask, on = register_type(dtype.name, lanes), register_type("bool", w.code[c].lanes), w.value[c], w.code[c].arg
    if w.code[c].op == "VCONST" and w.target.has_mask_registers and lanes in (8, 16, 32, 64) and not any(on[sum(on):]):
        mask = w.first_lanes(lanes, sum(on))
    w.lines.append(f"  %v{i} = select {cond} {mask}, {ty} {w.value[a]}, {ty} {w.value[b]}")
    w.value[i] = f"%v{i}"


# -- conversions ------------------------------------------------------------------------------------
_HALVES = {"float16": "half", "bfloat16": "bfloat"}


def _half(dtype: DType, lanes: int) -> str:
    """Return LLVM's floating-point type of a 16-bit float, which registers hold as an integer of the same bits."""
    return _HALVES[dtype.name] if lanes == 1 else f"<{lanes} x {_HALVES[dtype.name]}>"


def _cast(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    of, operand = w.code[src[0]].dtype, w.value[src[0]]
    given, wanted = register_type(of.name, lanes), register_type(dtype.name, lanes)
    if of.kind in "iu" and dtype.kind in "iu" and of.bits == dtype.bits:
        w.value[i] = operand
    elif of.name in _HALVES:
        w.value[i] = w.temp(f"fpext {_half(of, lanes)} {w.temp(f'bitcast {given} {operand} to {_half(of, lanes)}')} to {wanted}")
    elif dtype.name in _HALVES:
        half = w.temp(f"fptrunc {given} {operand} to {_half(dtype, lanes)}")
        w.value[i] = w.temp(f"bitcast {_half(dtype, lanes)} {half} to {wanted}")
    elif of.kind == "f" != dtype.kind:
        raw = w.temp(f"{'fptosi' if dtype.kind == 'i' else 'fptoui'} {given} {operand} to {wanted}")
        w.value[i] = w.temp(f"freeze {wanted} {raw}")
    else:
        w.value[i] = w.temp(f"{_conversion(of, dtype)} {given} {operand} to {wanted}")


def _conversion(of: DType, dtype: DType) -> str:
    """Return LLVM's name of a conversion to a float, or between integers of different widths."""
    if of.kind == "f":
        return "fpext" if dtype.bits > of.bits else "fptrunc"
    if dtype.kind == "f":
        return "sitofp" if of.kind == "i" else "uitofp"
    return "trunc" if dtype.bits < of.bits else "sext" if of.kind == "i" else "zext"


def _bitcast(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    _, of, width, _, _ = w.code[src[0]]
    if of.itemsize * width != dtype.itemsize * lanes:
        raise refuse("BITCAST", dtype, f"{of.name}x{width} and {dtype.name}x{lanes} differ in width")
    a, b = register_type(of.name, width), register_type(dtype.name, lanes)
    w.value[i] = w.value[src[0]] if a == b else w.temp(f"bitcast {a} {w.value[src[0]]} to {b}")


def ends_of_rounds(code: Sequence[Instruction], is_split: Callable[[Instruction], bool]) -> frozenset[int]:
    """Return the last instruction of each round that is directly followed by another round. A round is the code of one unrolled iteration,
    which adds to each accumulator once.

    The writer puts an empty statement between two rounds that LLVM does not move memory accesses across. Without it LLVM moves the loads of
    several rounds before the first round, and then lacks registers for the accumulators (14×32 accumulators, two rounds: 18.8 ms instead of
    8.9 ms). `is_split`: whether a LOOP or ENDLOOP ends a block of code."""
    ends, rounds, current, last = set[int](), dict[int, int](), 0, -1
    for i, instruction in enumerate(code):
        op, _, lanes, src, _ = instruction
        if op in _ADDED_TO:
            before = src[_ADDED_TO[op]]
            number = rounds[i] = rounds.get(before, 0) + 1 if code[before].op == op and lanes > 1 else 1
            if number > current and last >= 0:
                ends.add(last)
            current, last = number, i
        elif op in ("LOOP", "ENDLOOP") and is_split(instruction):
            last = -1
    return frozenset(ends)


# -- lanes and constants ----------------------------------------------------------------------------
def _const(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = splat(dtype, arg, lanes)


def _vconst(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    scalar = SCALAR[dtype.name]
    w.value[i] = "<" + ", ".join(f"{scalar} {constant(dtype, x)}" for x in arg) + ">" if lanes > 1 else constant(dtype, arg[0])


def _splat(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = w.broadcast(SCALAR[dtype.name], lanes, w.value[src[0]])


def _extract(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    n = w.code[src[0]].lanes
    operand = w.value[src[0]]
    w.value[i] = operand if n == 1 else w.temp(f"extractelement {register_type(dtype.name, n)} {operand}, i64 {arg}")


def _shuffle(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    n, scalar = w.code[src[0]].lanes, SCALAR[dtype.name]
    vec = f"<{n} x {scalar}>"
    operands = [w.value[s] for s in src]
    if n == 1:
        operands = [w.temp(f"insertelement {vec} poison, {scalar} {x}, i64 0") for x in operands]
    b = operands[1] if len(operands) > 1 else "poison"
    result = w.temp(f"shufflevector {vec} {operands[0]}, {vec} {b}, {_order(arg)}")
    w.value[i] = result if lanes > 1 else w.temp(f"extractelement <1 x {scalar}> {result}, i64 0")
    if len(src) == 2 and dtype.kind != "b" and w.family.fences:
        depth = 1 + max(w.shuffles.get(s, 0) for s in src)
        size = lanes * dtype.itemsize
        if depth >= FENCED_LEVELS and size >= 16 and size & (size - 1) == 0:
            w.value[i] = _fenced(w, f"<{lanes} x {scalar}>", size // 4, w.value[i])
        else:
            w.shuffles[i] = depth


@lru_cache(maxsize=4096)
def _order(lanes: tuple[int, ...]) -> str:
    """Return the mask of a shuffle that takes these lanes of its operands; any element where -1 stands. The few masks of a transposition
    are its longest text."""
    return f"<{len(lanes)} x i32> <" + ", ".join([f"i32 {k}" if k >= 0 else "i32 poison" for k in lanes]) + ">"


def _fenced(w: LlvmWriter, vec: str, words: int, operand: str) -> str:
    """Hide the definition of a vector of `words` 32-bit words from LLVM, without generating code. Otherwise LLVM tries to merge each
    shuffle with all shuffles before it, which takes longer than the rest of compiling a transposition and gives the same instructions
    (`experiments/search_compiler.py`)."""
    fence = f"<{words} x float>"
    w.declared.add(f"declare {fence} @llvm.arithmetic.fence.v{words}f32({fence})")
    if vec == fence:
        return w.temp(f"call {fence} @llvm.arithmetic.fence.v{words}f32({fence} {operand})")
    cast = w.temp(f"bitcast {vec} {operand} to {fence}")
    return w.temp(f"bitcast {fence} {w.temp(f'call {fence} @llvm.arithmetic.fence.v{words}f32({fence} {cast})')} to {vec}")


# -- dot instructions -------------------------------------------------------------------------------
def _dot(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    kinds = tuple(w.code[s].dtype for s in src[1:])
    dot = next((d for d in DOTS.values() if not d.is_tile and (d.accumulator, d.operands, d.group) == (dtype, kinds, arg)), None)
    if dot is None or not dot.runs_on(w.target):
        raise refuse("DOT", dtype, f"{w.target.arch} with {', '.join(w.target.features)} has no such instruction")
    # the instruction has registers of 4, 8 or 16 words; unused lanes are undefined
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


def _widened(w: LlvmWriter, operand: str, scalar: str, lanes: int, wanted: int) -> str:
    """Pad a vector of `lanes` elements with undefined ones to `wanted` elements."""
    if lanes == wanted:
        return operand
    vec = f"<{lanes} x {scalar}>"
    if lanes == 1:
        operand = w.temp(f"insertelement {vec} poison, {scalar} {operand}, i64 0")
    order = ", ".join(f"i32 {k}" if k < lanes else "i32 poison" for k in range(wanted))
    return w.temp(f"shufflevector {vec} {operand}, {vec} poison, <{wanted} x i32> <{order}>")


def _narrowed(w: LlvmWriter, text: str, scalar: str, lanes: int, wanted: int) -> str:
    """Return an expression for the first `wanted` elements of a vector of `lanes` elements. `text`: the expression of that vector."""
    if lanes == wanted:
        return text
    vec = f"<{lanes} x {scalar}>"
    if wanted == 1:
        return f"extractelement {vec} {w.temp(text)}, i64 0"
    order = ", ".join(f"i32 {k}" for k in range(wanted))
    return f"shufflevector {vec} {w.temp(text)}, {vec} poison, <{wanted} x i32> <{order}>"


HANDLERS: dict[str, Handler] = {
    **{op: _alu(op) for op in CORES}, "DOT": _dot, "WHERE": _where, "CAST": _cast, "BITCAST": _bitcast, "CONST": _const,
    "VCONST": _vconst, "SPLAT": _splat, "EXTRACT": _extract, "SHUFFLE": _shuffle,
}
