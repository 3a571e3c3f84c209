"""How often something is launched: an expression over variables, worked out when they have their values.

    n*2 + 1, n in [1, 64]        {"n": 5} → 11        {"n": 0} → error: outside its bounds

The turns of a loop of calls are one, what variables of calls are bound to (`svod.core.calls`), and what an extent comes to
(`svod.core.variable`). It consists of the operations below and nothing else: what decides how much memory is touched is kept so small that
it can be read. Arithmetic is that of 64-bit integers, and what leaves them, or the integers that it is CAST to, is an error instead of
another number. How often compiled loops run is plain data, made from such expressions (`svod.compile.program.Count`).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from svod.core.uop import BINARY_OPS, Ops, UOp
from svod.errors import LaunchError, SvodError

_BINARY: Mapping[Ops, Callable[[int, int], int]] = {
    Ops.ADD: lambda a, b: a + b, Ops.SUB: lambda a, b: a - b, Ops.MUL: lambda a, b: a * b,
    Ops.IDIV: lambda a, b: a // b, Ops.MOD: lambda a, b: a % b, Ops.MAX: max,
}
_UNARY: Mapping[Ops, Callable[[int], int]] = {Ops.NEG: lambda a: -a, Ops.ABS: abs}
_CASTS = (Ops.CAST, Ops.BITCAST)
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


def evaluate_extent(extent: UOp, values: Mapping[str, int]) -> int:
    """The value of a launch-size expression, of any sign. IDIV and MOD are floor division and its remainder, as everywhere in svod.

    Raises LaunchError for an operation that has no place in one, a constant or a CAST that is of no integers, a variable without a value or
    out of its bounds, a division by zero, and what does not fit 64 bits or what it is CAST to."""
    done: dict[UOp, int] = {}
    todo = [extent]
    while todo:
        u = todo[-1]
        operands = _operands(u)
        waiting = [s for s in operands if s not in done]
        if waiting:
            todo += reversed(waiting)
        else:
            done[todo.pop()] = _compute(u, [done[s] for s in operands], values)
    return done[extent]


def check_bounds(name: str, value: int, low: int, high: int, error: type[SvodError] = LaunchError) -> None:
    """Raise `error` for a value of a variable outside its bounds, which are inclusive."""
    if not low <= value <= high:
        raise error(f"variable {name}={value} is outside bounds [{low}, {high}]")


def _operands(u: UOp) -> tuple[UOp, ...]:
    """What the value of a node is computed of."""
    if u.op in (Ops.CONST, Ops.DEFINE_VAR):
        return ()
    if u.op is Ops.BIND:
        return u.src[1:]
    if u.op in _CASTS or u.op is Ops.AFTER:     # what comes before does not matter
        return u.src[:1]
    if u.op in _UNARY or u.op in _BINARY:
        return u.src
    kind = "binary op" if u.op in BINARY_OPS else "op"
    allowed = ", ".join(op.value for op in (*_BINARY, *_UNARY))
    raise LaunchError(f"unsupported {kind} in launch-size expression: {u.op.value}; it may use {allowed} of constants and variables")


def _compute(u: UOp, operands: Sequence[int], values: Mapping[str, int]) -> int:
    if u.op is Ops.CONST:
        return _constant(u)
    if u.op is Ops.DEFINE_VAR:
        name, low, high = u.arg[:3]
        if name not in values:
            raise LaunchError(f"missing runtime value for launch-size variable {name}; bind it, as in {name}.bind({low})")
        check_bounds(name, values[name], low, high)
        return values[name]
    if u.op is Ops.BIND:
        if u.src[0].op is Ops.DEFINE_VAR:
            name, low, high = u.src[0].arg[:3]
            check_bounds(name, operands[0], low, high)
        return operands[0]
    if u.op is Ops.AFTER:
        return operands[0]
    said = f"invalid launch-size arithmetic: {u.op.value} of {' and '.join(map(str, operands))}"
    if u.op in _CASTS:
        if u.dtype.is_float or not u.dtype.min <= operands[0] <= u.dtype.max:
            raise LaunchError(f"{said} does not fit {u.dtype.name}" if not u.dtype.is_float else
                              f"launch-size expression must be integer, got {u.op.value} to {u.dtype.name}")
        return operands[0]
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
