"""Variables: sizes and positions that get their value when a plan runs.

    n = Variable("n", 1, 512)              a name, and the smallest and largest value
    x[:n.bind(100)]                        shape (n=100, …); the same kernels run for every value
    n + 1, 2 * n                           extents computed from n

    Variable("n", 1, 512, buckets=(64, 512))        the same, with kernels for 1 … 64 and others for 65 … 512

An extent of a shape is an int or a `Dim`: an index expression (`svod.core.ir.symbolic`) over DEFINE_VAR and BIND(DEFINE_VAR, CONST). A Dim
supports the operations of an integer whose result is the same expression for all values of the variables: sums, products, and comparisons
that the bounds decide. An operation whose result depends on the value (`range(n)`, `n < 5`) raises ShapeError.

A tensor with such extents is stored with the strides of its largest shape (`layout_shape`), so no stride depends on a variable: of an axis
of extent n the first n positions are used.

DEFINE_VAR has the arg `(name, min, max, hints, buckets)` in a graph and `(name, min, max)` in a kernel.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.launch import check_bounds, evaluate_extent
from svod.core.ir.origin import inherit_origin
from svod.core.ir.serialize import ARG_TYPES
from svod.core.ir.uop import Ops, UOp
from svod.errors import ArgumentError, LaunchError, ScheduleError, ShapeError

if TYPE_CHECKING:
    _Integer = int      # type checkers then accept a shape with Dims as a tuple of ints
else:
    _Integer = object

_SIGNIFICANT_BITS = 4   # significant bits of a rounded bound, which is at most 1/8 larger or smaller than the bound
_declared_any: set[bool] = set()    # not empty once a Variable exists; until then no graph needs to be searched for variables


@dataclass(frozen=True, eq=False, repr=False)
class Dim(_Integer):
    """An integer whose value depends on variables. `expr`: its canonical index expression, which is not a constant."""

    expr: UOp

    def __post_init__(self) -> None:
        if not isinstance(self.expr, UOp) or self.expr.dtype != dtypes.index or self.expr.op is Ops.CONST:
            raise TypeError("a Dim needs an expression of indices that is not a constant")

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest value."""
        return sy.bounds(self.expr)

    # -- operations with the same result for all values of the variables -----------------------------
    def __hash__(self) -> int:
        return hash(self.expr)

    def __eq__(self, other: object) -> bool:
        if hasattr(other, "uop"):       # a tensor compares its elements
            return NotImplemented
        return isinstance(other, Dim) and other.expr is self.expr

    def __ne__(self, other: object) -> bool:
        return NotImplemented if hasattr(other, "uop") else not self == other

    def __bool__(self) -> bool:
        return self._decided("!= 0", lower(self) > 0 or upper(self) < 0, False)

    def __add__(self, other: Any) -> Any: return self._made(sy.add, other)
    def __radd__(self, other: Any) -> Any: return self._made(sy.add, other)
    def __sub__(self, other: Any) -> Any: return self._made(sy.sub, other)
    def __rsub__(self, other: Any) -> Any: return self._made(lambda a, b: sy.sub(b, a), other)
    def __mul__(self, other: Any) -> Any: return self._made(sy.mul, other)
    def __rmul__(self, other: Any) -> Any: return self._made(sy.mul, other)
    def __neg__(self) -> Any: return dim_of(sy.scale(self.expr, -1))

    def __floordiv__(self, other: Any) -> Any:
        return self._made(sy.idiv, other) if type(other) is int and other > 0 else NotImplemented

    def __mod__(self, other: Any) -> Any:
        return self._made(sy.mod, other) if type(other) is int and other > 0 else NotImplemented

    def __lt__(self, other: Any) -> Any: return self._compared(other, "<")
    def __le__(self, other: Any) -> Any: return self._compared(other, "<=")
    def __gt__(self, other: Any) -> Any: return self._compared(other, ">")
    def __ge__(self, other: Any) -> Any: return self._compared(other, ">=")

    def _made(self, rule: Any, other: Any) -> Any:
        if not isinstance(other, Dim) and type(other) is not int:
            return NotImplemented
        return dim_of(rule(self.expr, index_of(other)))

    def _compared(self, other: Any, how: str) -> Any:
        if hasattr(other, "uop"):
            return NotImplemented
        if not isinstance(other, Dim) and not isinstance(other, int):
            raise ShapeError(f"the extent {self} is compared with {type(other).__name__}; extents are compared with ints and extents")
        lo, hi = sy.bounds(sy.sub(self.expr, index_of(other)))
        holds = {"<": hi < 0, "<=": hi <= 0, ">": lo > 0, ">=": lo >= 0}[how]
        fails = {"<": lo >= 0, "<=": lo > 0, ">": hi <= 0, ">=": hi < 0}[how]
        cases = ""
        if type(other) is int and self.expr.op in (Ops.DEFINE_VAR, Ops.BIND):
            name = (self.expr.src[0] if self.expr.op is Ops.BIND else self.expr).arg[0]
            at = other if how in ("<=", ">") else other - 1
            cases = f", here ({name!r}, {lower(self)}, {at}) or ({name!r}, {at + 1}, {upper(self)})"
        return self._decided(f"{how} {other}", holds, fails, cases)

    def _decided(self, what: str, holds: bool, fails: bool, cases: str = "") -> bool:
        if holds or fails:
            return holds
        lo, hi = self.bounds
        names = sorted({u.arg[0] for u in self.expr.toposort() if u.op is Ops.DEFINE_VAR})
        raise ShapeError(f"whether {self} {what} depends on the value of a variable: {self} is {lo} … {hi}, and a plan is one for all of "
                         f"it; declare {' and '.join(names)} with bounds for which the answer is always the same{cases}, or use a tensor "
                         "of a constant shape here")

    # -- operations that need the value, which raise ShapeError -------------------------------------
    def __index__(self) -> int:
        raise ShapeError(f"the number {self} is needed where a graph is built, and it is known only when a plan runs; this operation "
                         "takes constant sizes only; a NumPy array is sliced as a tensor: svod.Tensor(a)[:n]")

    __int__ = __float__ = __index__

    def __repr__(self) -> str:
        return show(self.expr)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce__(self) -> Any:
        return Dim, (self.expr,)


class Variable(Dim):
    """A named integer from `min` to `max`, whose value a plan gets when it runs. As an extent of a shape, its `min` must be at least 1.

    `hint`: one or several typical values, with which a search times kernels; None: the smallest, the middle and the largest value.

    `buckets`: the largest value of each part of the range, in order; the values from there to `max` are the last part. Each part has
    separate kernels with separate opts, and a plan runs the kernels of the part in which the value lies. Without buckets the same kernels
    serve all values, with opts that suit all sizes.

    Two variables of one name must have equal bounds, hints and buckets. Raises ArgumentError for invalid arguments."""

    def __init__(self, name: str, min: int, max: int, hint: int | Sequence[int] | None = None, buckets: Sequence[int] = ()):
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(f"Variable({name!r}): the name must be an identifier")
        if type(min) is not int or type(max) is not int or not 0 <= min < max:
            raise ArgumentError(f"Variable({name!r}, {min!r}, {max!r}): two ints 0 <= min < max are needed")
        hints = () if hint is None else tuple(hint) if isinstance(hint, Iterable) else (hint,)
        if any(type(v) is not int or not min <= v <= max for v in hints):
            raise ArgumentError(f"Variable({name!r}, {min}, {max}): hint {hints} must be ints within the bounds")
        ends = tuple(buckets) if isinstance(buckets, Iterable) and not isinstance(buckets, str) else (buckets,)
        if any(type(v) is not int or not min <= v <= max for v in ends) or any(a >= b for a, b in pairwise(ends)):
            raise ArgumentError(f"Variable({name!r}, {min}, {max}): buckets {buckets!r} must be ints within the bounds, in increasing "
                                "order: the largest value of each")
        object.__setattr__(self, "expr", UOp(Ops.DEFINE_VAR, dtypes.index, (), (name, min, max, hints, ends)))
        _declared_any.add(True)

    @property
    def name(self) -> str:
        return str(self.expr.arg[0])

    @property
    def min(self) -> int:
        return int(self.expr.arg[1])

    @property
    def max(self) -> int:
        return int(self.expr.arg[2])

    def bind(self, value: int) -> Dim:
        """Return the variable bound to `value`, for use in the shapes of tensors. Raises ArgumentError for a value outside the bounds."""
        declared = self.expr
        name, low, high = declared.arg[:3]
        if type(value) is not int:
            raise ArgumentError(f"variable {name} is bound to an int, got {value!r}")
        if not low <= value <= high:
            check_bounds(name, value, low, high, ArgumentError)
        return BoundVariable(declared, name, value)


class BoundVariable(Dim):
    """A variable with a value. Its BIND node is made at the first use of `expr`, as a call of a captured function needs only the value.

    `declared`: the DEFINE_VAR of the variable."""

    __slots__ = ("_expr", "declared", "name", "value")
    _expr: UOp | None
    declared: UOp
    name: str
    value: int

    def __init__(self, declared: UOp, name: str, value: int) -> None:
        put = object.__setattr__
        put(self, "declared", declared)
        put(self, "name", name)
        put(self, "value", value)
        put(self, "_expr", None)

    @property
    def expr(self) -> UOp:
        made = self._expr
        if made is None:
            made = UOp(Ops.BIND, dtypes.index, (self.declared, sy.const(self.value)))
            object.__setattr__(self, "_expr", made)
        return made

    def __reduce__(self) -> Any:
        return BoundVariable, (self.declared, self.name, self.value)


# -- functions of ints and Dims -----------------------------------------------------------------------
ARG_TYPES["Dim"] = Dim


def dim_of(expr: UOp) -> Any:
    """Convert an index expression to an int, or to a Dim if it is not constant."""
    return int(expr.arg) if expr.op is Ops.CONST else Dim(expr)


def index_of(n: int) -> UOp:
    """Convert an int or Dim to an index expression."""
    return n.expr if isinstance(n, Dim) else sy.const(int(n))


def is_symbolic(shape: Iterable[Any]) -> bool:
    """Whether any extent of a shape depends on a variable."""
    return any(isinstance(n, Dim) for n in shape)


def upper(n: int) -> int:
    """Return the largest value of an int or Dim."""
    return sy.vmax(n.expr) if isinstance(n, Dim) else n


def lower(n: int) -> int:
    """Return the smallest value of an int or Dim."""
    return sy.vmin(n.expr) if isinstance(n, Dim) else n


def upper_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with every extent at its largest value."""
    return tuple([upper(n) for n in shape])


def layout_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the constant shape whose strides a tensor of `shape` has in memory. Upper bounds are rounded up (`widened`), so that nearly
    equal bounds have the same layout and share kernels."""
    return tuple([widened(upper(n)) if isinstance(n, Dim) else n for n in shape])


def widened(n: int) -> int:
    """Round a non-negative bound up to four significant bits: 500 → 512, 1025 → 1152."""
    unit = _rounding_unit(n)
    return -(-n // unit) * unit


def narrowed(n: int) -> int:
    """Round a non-negative bound down to four significant bits: 65 → 64."""
    unit = _rounding_unit(n)
    return n // unit * unit


def _rounding_unit(n: int) -> int:
    return 1 << max(0, n.bit_length() - _SIGNIFICANT_BITS)


def number_of(n: int, dtype: DType) -> UOp:
    """Make a scalar graph node whose value is an int or Dim."""
    return UOp(Ops.CAST, dtype, (n.expr,)) if isinstance(n, Dim) else UOp.const(dtype, n)


def show(expr: UOp) -> str:
    """Write an index expression over variables as text: `n`, `n=5`, `2*n+1`."""
    texts: dict[UOp, str] = {}
    for u in expr.toposort():
        texts[u] = _shown(u, texts)
    return texts[expr]


def _shown(u: UOp, texts: Mapping[UOp, str]) -> str:
    """Return the text of an expression; `texts` has the texts of its operands."""
    if u.op is Ops.DEFINE_VAR:
        return str(u.arg[0])
    if u.op is Ops.BIND:
        return f"{texts[u.src[0]]}={u.src[1].arg}"
    if u.op is Ops.CONST:
        return str(u.arg)
    if u.op is Ops.MUL and u.src[1].op is Ops.CONST:
        return f"{u.src[1].arg}*{texts[u.src[0]]}"
    signs = {Ops.MUL: "*", Ops.IDIV: "//", Ops.MOD: "%"}
    if u.op is Ops.ADD:
        return f"{texts[u.src[0]]}+{texts[u.src[1]]}"
    if u.op in signs:
        left, right = (f"({texts[s]})" if s.op is Ops.ADD else texts[s] for s in u.src)
        return f"({left}{signs[u.op]}{right})"
    return f"{u.op.value.lower()}({', '.join(texts[s] for s in u.src)})"


# -- values -------------------------------------------------------------------------------------------
def value_of(n: int, values: Mapping[str, int] | None = None) -> int:
    """Compute the value of an int or Dim from the bound values of its variables and, for unbound ones, from `values`. Raises ShapeError for
    a variable that has neither."""
    if not isinstance(n, Dim):
        return n
    try:
        return evaluate_extent(n.expr, values or {})
    except LaunchError as error:
        raise ShapeError(f"the extent {n} has no value; bind its variables, as in x[:n.bind(5)], or give them to plan.execute(): "
                         f"{error}") from error


def shape_at(shape: Sequence[int], values: Mapping[str, int] | None = None) -> tuple[int, ...]:
    """Compute a shape as ints: `value_of` of each extent."""
    return tuple([value_of(n, values) for n in shape])


def rebound(shape: Sequence[int], values: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with its bound variables bound to `values` instead; variables that `values` does not name keep their values."""
    def bound(expr: UOp) -> UOp:
        return sy.simplify(expr, {u: u.replace(src=(u.src[0], sy.const(values[u.src[0].arg[0]])))
                                  for u in expr.toposort() if u.op is Ops.BIND and u.src[0].arg[0] in values})
    return tuple([dim_of(bound(n.expr)) if isinstance(n, Dim) else n for n in shape])


def bound_values(n: Dim) -> dict[str, int]:
    """Return the bound value of each variable in a Dim, by name. Raises ScheduleError for an unbound variable, and for one bound to two
    values."""
    _, values, declared = without_binds(number_of(n, dtypes.int64))
    unbound = sorted(declared.keys() - values.keys())
    if unbound:
        raise ScheduleError(f"variable {unbound[0]} has no value here; bind it: {unbound[0]}.bind(…)")
    return values


def without_binds(sink: UOp) -> tuple[UOp, dict[str, int], dict[str, UOp]]:
    """Replace every BIND in a graph by its variable. Returns (graph, bound value by name, DEFINE_VAR by name).

    Raises ScheduleError for a variable bound to two values, and for two different variables of one name."""
    values: dict[str, int] = {}
    declared: dict[str, UOp] = {}

    def plain(expr: UOp) -> UOp:
        unbound: dict[UOp, UOp] = {}
        for u in expr.toposort():
            if u.op is Ops.BIND:
                unbound[u] = u.src[0]
                name, value = u.src[0].arg[0], int(u.src[1].arg)
                if values.setdefault(name, value) != value:
                    raise ScheduleError(f"bind mismatch on {name}, {values[name]} != {value} (in one schedule)")
            elif u.op is Ops.DEFINE_VAR:
                name = u.arg[0]
                if declared.setdefault(name, u) is not u:
                    raise ScheduleError(f"two variables are called {name}: {declared[name].arg[1:]} and {u.arg[1:]}; use one Variable, or "
                                        "two names")
        return sy.simplify(expr, unbound) if unbound else expr

    def bare(arg: Any) -> Any:
        if isinstance(arg, Dim):
            return Dim(plain(arg.expr))
        return tuple([bare(a) for a in arg]) if type(arg) is tuple else arg

    if not _declared_any:
        return sink, values, declared
    done: dict[UOp, UOp] = {}
    for u in sink.toposort():
        if u.dtype == dtypes.index:
            done[u] = u     # `plain` rewrites an operand of a CAST below; an argument of a CALL stays as it is
            continue
        src = tuple([plain(s) if s.dtype == dtypes.index and u.op is Ops.CAST else done[s] for s in u.src])
        arg = bare(u.arg) if type(u.arg) is tuple or isinstance(u.arg, Dim) else u.arg
        if src == u.src and arg == u.arg:
            done[u] = u
        else:
            done[u] = u.replace(src=src, arg=arg)
            inherit_origin(done[u], u)
    return done[sink], values, declared


def count_of(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape with every extent at its largest value."""
    return math.prod(upper_shape(shape))
