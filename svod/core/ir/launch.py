"""Integer expressions over variables that are evaluated before a launch, when the variables have their values.

    n*2 + 1, n in [1, 64]        {"n": 5} → 11        {"n": 0} → error: outside its bounds

Such an expression gives the iterations of a loop of calls and the values that calls bind to variables (`svod.core.schedule.calls`), the
extents of shapes (`svod.core.ir.variable`), and the dimensions of a launch (`LaunchDims`, made by `svod.core.schedule.thread_indices`).
Because these numbers decide how much memory a launch touches, only the few operations below are allowed, so that the code can be checked by
reading. Arithmetic is that of 64-bit integers; a value that overflows them, or the integer type that it is CAST to, is an error and does
not wrap. The iteration counts of compiled loops are plain data made from such expressions (`svod.compile.lower.program.Count`).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import BINARY_OPS, Ops, UOp
from svod.errors import FormatError, LaunchError, SvodError

_BINARY_FUNCTIONS: Mapping[Ops, Callable[[int, int], int]] = {
    Ops.ADD: lambda a, b: a + b, Ops.SUB: lambda a, b: a - b, Ops.MUL: lambda a, b: a * b,
    Ops.IDIV: lambda a, b: a // b, Ops.MOD: lambda a, b: a % b, Ops.MAX: max,
}
_UNARY_FUNCTIONS: Mapping[Ops, Callable[[int], int]] = {Ops.NEG: lambda a: -a, Ops.ABS: abs}
CASTS = (Ops.CAST, Ops.BITCAST)
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
ONE = UOp.const(dtypes.index, 1)
Dims = tuple[UOp, UOp, UOp]


class Sizes(NamedTuple):
    """Launch dimensions as numbers. `local_size` None: the launch has no groups, and `global_size` counts positions."""

    global_size: tuple[int, int, int]
    local_size: tuple[int, int, int] | None


@dataclass(frozen=True)
class LaunchDims:
    """The dimensions of a launch as expressions over variables. `global_size`: the number of groups, or of positions if `local_size` is
    None; `local_size`: the number of positions in a group. With all dimensions 1 a launch is one call, whose code contains all loops."""

    global_size: Dims = (ONE, ONE, ONE)
    local_size: Dims | None = (ONE, ONE, ONE)

    def to_data(self) -> dict[str, Any]:
        """Convert to JSON-able data, in which form it is sent between processes as part of a program's description."""
        from svod.core.ir.serialize import ast_to_data  # a late import, which avoids an import cycle
        return ast_to_data(UOp(Ops.SINK, dtypes.void, (*self.global_size, *(self.local_size or ()))))

    @staticmethod
    def from_data(data: object) -> LaunchDims:
        """Rebuild a launch from the data of `to_data`. Raises FormatError for any other data."""
        from svod.core.ir.serialize import data_to_ast
        extents = data_to_ast(data).src
        if len(extents) not in (3, 6):
            raise FormatError(f"a launch has 3 or 6 dimensions, found {len(extents)}")
        x, y, z, *local = extents
        return LaunchDims((x, y, z), (local[0], local[1], local[2]) if local else None)

    def __getstate__(self) -> dict[str, Any]:
        return self.to_data()

    def __setstate__(self, data: object) -> None:
        launch = LaunchDims.from_data(data)
        object.__setattr__(self, "global_size", launch.global_size)
        object.__setattr__(self, "local_size", launch.local_size)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables on whose values the dimensions depend, sorted; a variable that a BIND gives a value is left out."""
        todo = [*self.global_size, *(self.local_size or ())]
        seen: set[UOp] = set()
        while todo:
            u = todo.pop()
            if u not in seen:
                seen.add(u)
                todo += _operands(u)
        return tuple(sorted({u.arg[0] for u in seen if u.op is Ops.DEFINE_VAR}))

    def at(self, values: Mapping[str, int]) -> Sizes:
        """Compute the dimensions from the values of the variables. Raises LaunchError for a dimension below 1, and as `evaluate_extent`
        does."""
        def numbers(dims: Dims) -> tuple[int, int, int]:
            x, y, z = (evaluate_dimension(k, extent, values) for k, extent in enumerate(dims))
            return x, y, z
        return Sizes(numbers(self.global_size), None if self.local_size is None else numbers(self.local_size))


ONCE = LaunchDims()


def evaluate_dimension(index: int, extent: UOp, values: Mapping[str, int]) -> int:
    """Compute launch dimension number `index`. Raises LaunchError if it is not positive, and as `evaluate_extent` does."""
    value = evaluate_extent(extent, values)
    if value <= 0:
        raise LaunchError(_not_positive(index, value))
    return value


def _not_positive(index: int, value: int) -> str:
    return f"launch dimension {index} evaluated to non-positive value {value}; a launch has at least one position"


def fit_dimensions(extents: Sequence[UOp], most: Sequence[int | None], limits: Sequence[int]) -> Dims:
    """Arrange `extents` as three launch dimensions within `limits`, with the same number of positions. `most`: the largest value of each
    extent; None if it has no bound.

    If there are more than three extents, or one exceeds its limit, neighbouring extents are multiplied; among the fitting ways the one
    whose largest dimension is smallest is taken. If none fits and all extents are constants, their prime factors are redistributed, with
    dimension 0 as large as possible. Raises LaunchError if that fails too; an extent that depends on variables is never split."""
    for k, m in enumerate(most):
        if m is not None and m <= 0:
            raise LaunchError(_not_positive(k, m))
    sizes = [_HIGHEST if m is None else m for m in most]
    if len(extents) <= 3 and all(size <= limit for size, limit in zip(sizes, limits, strict=False)):
        return _three(list(extents))
    ways = sorted(_runs(len(extents), 3), key=lambda way: (max(math.prod(sizes[a:b]) for a, b in way), len(way)))
    for way in ways:
        if all(math.prod(sizes[a:b]) <= limit for (a, b), limit in zip(way, limits, strict=False)):
            return _three([reduce(UOp.__mul__, extents[a:b]) for a, b in way])
    if all(e.op is Ops.CONST for e in extents) and (split := _split(sizes, limits)) is not None:
        return _three([UOp.const(dtypes.index, size) for size in split])
    raise LaunchError(f"cannot limit dim: a launch of {' × '.join('?' if m is None else str(m) for m in most)} positions does not fit the "
                      f"target's {' × '.join(map(str, limits))}; give it other extents, or loop inside the kernel")


def _three(extents: list[UOp]) -> Dims:
    x, y, z = (extents + [ONE] * 3)[:3]
    return x, y, z


def _runs(count: int, parts: int, start: int = 0) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield each way to cut 0 … count-1 into at most `parts` runs (first, end)."""
    if start == count:
        yield ()
    elif parts:
        for end in range(start + 1, count + 1):
            for rest in _runs(count, parts - 1, end):
                yield ((start, end), *rest)


def _split(sizes: Sequence[int], limits: Sequence[int]) -> tuple[int, int, int] | None:
    """Find three numbers within `limits` whose product is the product of `sizes`; None if there are none."""
    total = math.prod(sizes)
    divisors = {1}
    for size in sizes:
        for f in _factors(size):
            divisors |= {d * f for d in divisors}
    ordered = sorted(divisors, reverse=True)
    for x in (d for d in ordered if d <= limits[0]):
        for y in (d for d in ordered if d <= limits[1] and total // x % d == 0):
            if total // x // y <= limits[2]:
                return x, y, total // x // y
    return None


def _factors(n: int) -> Iterator[int]:
    """Yield the prime factors of n with their multiplicity."""
    f = 2
    while f * f <= n:
        while n % f == 0:
            yield f
            n //= f
        f += 1
    if n > 1:
        yield n


def evaluate_extent(extent: UOp, values: Mapping[str, int]) -> int:
    """Compute the value of a launch-size expression; it may be negative. IDIV and MOD are floor division and its remainder, as everywhere
    in svod.

    Raises LaunchError for an operation that launch sizes do not have, a constant that is not an integer, a CAST between types that are not
    integers, a variable without a value or outside its bounds, a division by zero, and a value that does not fit 64 bits or its type."""
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
    """Check the value of variable `name`. Raises `error` unless low ≤ value ≤ high."""
    if not low <= value <= high:
        raise error(f"variable {name}={value} is outside bounds [{low}, {high}]")


def _operands(u: UOp) -> tuple[UOp, ...]:
    """Return the sources from which the value of a node is computed. Raises LaunchError for an operation that launch sizes do not have."""
    if u.op in (Ops.CONST, Ops.DEFINE_VAR):
        return ()
    if u.op is Ops.BIND:
        return u.src[1:]
    if u.op in CASTS or u.op is Ops.AFTER:     # The value does not depend on the other sources.
        return u.src[:1]
    if u.op in _UNARY_FUNCTIONS or u.op in _BINARY_FUNCTIONS:
        return u.src
    kind = "binary op" if u.op in BINARY_OPS else "op"
    allowed = ", ".join(op.value for op in (*_BINARY_FUNCTIONS, *_UNARY_FUNCTIONS))
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
    if u.op in CASTS:
        if u.dtype.is_float or not u.dtype.min <= operands[0] <= u.dtype.max:
            raise LaunchError(f"{said} does not fit {u.dtype.name}" if not u.dtype.is_float else
                              f"launch-size expression must be integer, got {u.op.value} to {u.dtype.name}")
        return operands[0]
    if u.op in (Ops.IDIV, Ops.MOD) and not operands[1]:
        raise LaunchError(f"{said}: division by zero")
    value = _UNARY_FUNCTIONS[u.op](*operands) if u.op in _UNARY_FUNCTIONS else _BINARY_FUNCTIONS[u.op](*operands)
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
