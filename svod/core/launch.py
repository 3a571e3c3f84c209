"""How often something is launched: an expression over variables, worked out when they have their values.

    n*2 + 1, n in [1, 64]        {"n": 5} → 11        {"n": 0} → error: outside its bounds

The turns of a loop of calls are one, and what variables of calls are bound to (`svod.core.calls`). It consists of the operations below and
nothing else: what decides how much memory is touched is kept so small that it can be read. Arithmetic is that of 64-bit integers, and what
leaves them is an error instead of another number.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from svod.core.uop import BINARY_OPS, Ops, UOp
from svod.errors import LaunchError

_BINARY: Mapping[Ops, Callable[[int, int], int]] = {
    Ops.ADD: lambda a, b: a + b, Ops.SUB: lambda a, b: a - b, Ops.MUL: lambda a, b: a * b,
    Ops.IDIV: lambda a, b: a // b, Ops.MOD: lambda a, b: a % b, Ops.MAX: max,
}
_UNARY: Mapping[Ops, Callable[[int], int]] = {Ops.NEG: lambda a: -a, Ops.ABS: abs}
_TRANSPARENT = (Ops.CAST, Ops.BITCAST, Ops.AFTER)      # an AFTER is its first source
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


def evaluate_extent(extent: UOp, values: Mapping[str, int]) -> int:
    """The value of a launch-size expression, of any sign. IDIV and MOD are floor division and its remainder, as everywhere in svod.

    Raises LaunchError for an operation that has no place in one, a constant that is no integer, a variable without a value or out of its
    bounds, a division by zero, and what does not fit 64 bits."""
    return _evaluate(extent, values, {})


def check_bounds(name: str, value: int, low: int, high: int) -> None:
    """Raise LaunchError for a value of a variable outside its bounds, which are inclusive."""
    if not low <= value <= high:
        raise LaunchError(f"variable {name}={value} is outside bounds [{low}, {high}]")


def _evaluate(u: UOp, values: Mapping[str, int], done: dict[UOp, int]) -> int:
    if u not in done:
        done[u] = _compute(u, values, done)
    return done[u]


def _compute(u: UOp, values: Mapping[str, int], done: dict[UOp, int]) -> int:
    if u.op is Ops.CONST:
        return _constant(u)
    if u.op is Ops.DEFINE_VAR:
        name, low, high = u.arg
        if name not in values:
            raise LaunchError(f"missing runtime value for launch-size variable {name}; give it when the plan is executed")
        check_bounds(name, values[name], low, high)
        return values[name]
    if u.op is Ops.BIND:
        value = _evaluate(u.src[1], values, done)
        if u.src[0].op is Ops.DEFINE_VAR:
            check_bounds(u.src[0].arg[0], value, *u.src[0].arg[1:])
        return value
    if u.op in _TRANSPARENT:
        return _evaluate(u.src[0], values, done)
    if u.op not in _UNARY and u.op not in _BINARY:
        kind = "binary op" if u.op in BINARY_OPS else "op"
        allowed = ", ".join(op.value for op in (*_BINARY, *_UNARY))
        raise LaunchError(f"unsupported {kind} in launch-size expression: {u.op.value}; it may use {allowed} of constants and variables")
    operands = [_evaluate(s, values, done) for s in u.src]
    said = f"invalid launch-size arithmetic: {u.op.value} of {' and '.join(map(str, operands))}"
    if u.op in (Ops.IDIV, Ops.MOD) and not operands[1]:
        raise LaunchError(f"{said}: division by zero")
    value = _UNARY[u.op](*operands) if u.op in _UNARY else _BINARY[u.op](*operands)
    if not _LOWEST <= value <= _HIGHEST:
        raise LaunchError(f"{said} does not fit 64 bits")
    return value


def _constant(u: UOp) -> int:
    if isinstance(u.arg, float):
        raise LaunchError(f"launch-size expression must be integer, got float constant {u.arg}")
    value = int(u.arg)
    if not _LOWEST <= value <= _HIGHEST:
        raise LaunchError(f"launch-size constant {value} does not fit 64 bits")
    return value
