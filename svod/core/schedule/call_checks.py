"""Checks the accesses of a kernel written by hand: none outside its parameters, and none that writes an element twice.

    LOAD(x, r + 3), gate r + 3 < 8      elements 3 to 7: within x of 8
    STORE(y, i*4 + j; i:3, j:4)         each element once
    STORE(y, r % 4; r:8)                refused: element 0 is written for r = 0 and r = 4

The RANGEs of a STORE run in parallel, so no two of their values may give the same element. Both are proved from the expressions. A kernel
for which that fails is refused, as there are no checks at run time.
"""
from __future__ import annotations

from itertools import pairwise
from math import prod

from svod.core.graph.callback import calls_back
from svod.core.graph.library_kernel import library_kernel_of, result_shape
from svod.core.ir import symbolic as sy
from svod.core.ir.symbolic import Valid
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.thread_indices import over_ranges
from svod.errors import ScheduleError


def check_accesses(ast: UOp, variables: str) -> None:
    """Raise ScheduleError for a kernel that may access elements outside its parameters, reads a parameter at other elements than it
    writes, may write an element twice, or has accesses of other dtypes than its parameters. `variables`: the names of its variables for
    the error message, or "". Raises CompileError as `over_ranges` does."""
    ast = over_ranges(ast)
    own = {s.src[0].src[0]: s for s in ast.src}
    if len(own) < len(ast.src):
        raise ScheduleError("a kernel that is called has two STOREs to one parameter; write different parameters")
    direct = {p: set(s.src[1].toposort(gate=lambda n: n.op not in (Ops.STAGE, Ops.REDUCE))) for p, s in own.items()}
    try:
        for u in ast.walk(Ops.LOAD, Ops.STORE):
            param, index = u.src[0].src
            if u.op is Ops.LOAD and param in own and (u not in direct[param] or index is not own[param].src[0].src[1]):
                raise ScheduleError(f"a kernel that is called reads slot {param.arg.slot}, which it writes, at other elements than it "
                                    "writes; read a copy of it")
            _check_access(u, variables)
            if u.op is Ops.STORE and library_kernel_of(ast) is None and not writes_once(_canonical(index), u.src[2:]):
                raise ScheduleError(f"a kernel that is called may write an element of slot {param.arg.slot} for several values of its "
                                    "RANGEs, which run in parallel: every RANGE of a STORE must count in its index, as in i*4 + j with j "
                                    "below 4; sum with a REDUCE")
        _check_stages(ast)
    except (ValueError, OverflowError) as error:
        raise ScheduleError(f"an index of a kernel that is called has no bounds: {error}") from error
    _check_library_kernel(ast)


def _check_access(u: UOp, variables: str) -> None:
    """Check the dtype and the bounds of a LOAD or STORE."""
    param, index = u.src[0].src
    dtype = u.dtype if u.op is Ops.LOAD else u.src[1].dtype
    if dtype != param.dtype:
        raise ScheduleError(f"a kernel that is called has a {u.op.value} of {dtype.name} where slot {param.arg.slot} is of "
                            f"{param.dtype.name}; CAST the value")
    gate = u.src[2] if u.op is Ops.LOAD and len(u.src) == 3 else sy.TRUE
    reached = reached_elements(_canonical(index), _canonical(gate))
    low, high = reached or (0, -1)
    if low < 0 or high >= param.arg.size:
        given = f", for some value of {variables}" if variables else ""
        gated = "" if gate is sy.TRUE else ", as far as its gate shows"
        raise ScheduleError(f"a kernel that is called reaches elements {low} to {high} of slot {param.arg.slot}, which has "
                            f"{param.arg.size}{given}{gated}")


def _check_stages(ast: UOp) -> None:
    """Check that STAGEs are read inside their RANGEs: a stage may be computed at the read, and would then load outside its parameters."""
    for u in ast.walk(Ops.INDEX):
        if u.src[0].op is Ops.STAGE:
            for r, at in zip(u.src[0].src[1:], u.src[1:], strict=True):
                low, high = sy.bounds(_canonical(at))
                if low < 0 or high >= sy.extent_of(r):
                    raise ScheduleError(f"a kernel that is called reads a STAGE at {low} to {high} of a RANGE of {sy.extent_of(r)}; make "
                                        "the STAGE larger, with a gate on what it loads")


def _check_library_kernel(ast: UOp) -> None:
    """Check that the operands of a library kernel, and its result, fit their parameters. The result begins at the index of its STORE."""
    if calls_back(ast):
        raise ScheduleError("a kernel that is called is a function of Python; svod.custom_function calls one")
    node = library_kernel_of(ast)
    if node is None:
        return
    name, options, shapes = node.arg
    param, index = ast.src[0].src[0].src
    first = sy.vmax(_canonical(index))
    result = result_shape(name, options, shapes, [p.dtype for p in node.src])
    for p, needed in ((param, first + prod(result)), *((p, prod(shape)) for p, shape in zip(node.src, shapes, strict=True))):
        if needed > p.arg.size:
            raise ScheduleError(f"a kernel that is called, {name} of {', '.join(map(str, shapes))}, reaches {needed} elements of slot "
                                f"{p.arg.slot}, which has {p.arg.size}")


def _canonical(expr: UOp) -> UOp:
    """The canonical form of an index expression or gate; variables with a single value are replaced by it."""
    return sy.simplify(expr, {v: sy.const(v.arg[1]) for v in expr.toposort() if v.op is Ops.DEFINE_VAR and v.arg[1] == v.arg[2]})


# -- elements that an access reaches ------------------------------------------------------------------------------------------
def reached_elements(index: UOp, gate: UOp) -> tuple[int, int] | None:
    """Bounds of a canonical index for positions at which a canonical gate is true; None if it never is."""
    valid: Valid | None = ()
    for part in sy.conjuncts(gate):
        if part is sy.FALSE:
            return None
        if part.op in (Ops.CMPLT, Ops.CMPLE) and part.src[0].dtype == index.dtype and valid is not None:
            valid = sy.constrain(valid, sy.sub(part.src[1], part.src[0]), 1 if part.op is Ops.CMPLT else 0, None)
    if valid is None:
        return None
    leaves = {c.expr: (f"gated{k}", *_limits(c)) for k, c in enumerate(valid) if c.expr.op in (Ops.RANGE, Ops.CAST, Ops.DEFINE_VAR)}
    narrowed = {u: UOp(Ops.DEFINE_VAR, u.dtype, (), arg) for u, arg in leaves.items()}
    low, high = sy.bounds(sy.simplify(index, narrowed))
    terms, constant = sy.linear(index)
    terms = dict(terms)
    sums = {c: parts for c in valid for parts, _ in (sy.linear(c.expr),)}
    for n, c in enumerate(sorted(valid, key=lambda c: -len(sums[c]))):
        parts = sums[c]
        factor, rest = divmod(terms.get(next(iter(parts)), 0), next(iter(parts.values())))
        if factor and not rest and all(terms.get(a) == factor * k for a, k in parts.items()):
            terms = {a: k for a, k in terms.items() if a not in parts}
            terms[UOp(Ops.DEFINE_VAR, index.dtype, (), (f"sum{n}", *_limits(c)))] = factor
    least, most = sy.interval(terms, constant)
    return max(low, least), min(high, most)


def _limits(c: sy.Constraint) -> tuple[int, int]:
    low, high = sy.bounds(c.expr)
    return low if c.lo is None else c.lo, high if c.hi is None else c.hi


# -- elements written once ----------------------------------------------------------------------------------------------------
def writes_once(index: UOp, ranges: tuple[UOp, ...]) -> bool:
    """Whether a canonical index provably has another value for each combination of values of the ranges. It has if the coefficient of
    each digit (a RANGE, or a part of one by divisions by constants) is larger than the maximum of the sum of all smaller digits."""
    digits = {r: _cuts(r, index) for r in ranges if sy.extent_of(r) > 1}
    terms, _ = sy.linear(index)
    factors: dict[tuple[UOp, int], int] = {}
    for atom, k in terms.items():
        if not sy.ranges_of(atom) and all(u.op is not Ops.CAST for u in atom.toposort()):
            continue        # the term has one value during a whole run of the kernel
        weights = _weights(atom, digits)
        if weights is None:
            return False
        for place, weight in weights.items():
            factors[place] = factors.get(place, 0) + k * weight
    if any(not factors.get((r, at)) for r, cuts in digits.items() for at in cuts):
        return False
    reached = 0
    for r, at in sorted(factors, key=lambda place: abs(factors[place])):
        k = factors[r, at]
        if abs(k) <= reached:
            return False
        later = [c for c in digits[r] if c > at]
        times = later[0] // at if later else -(-sy.extent_of(r) // at)
        reached += abs(k) * (times - 1)
    return True


def _cuts(r: UOp, index: UOp) -> list[int]:
    """The constants at which divisions split a RANGE into digits, from 1 up, each dividing the next; [1] if they do not divide each
    other."""
    cuts = {1}
    for u in index.toposort():
        if u.op in (Ops.IDIV, Ops.MOD) and u.src[1].op is Ops.CONST:
            x, c = u.src[0], int(u.src[1].arg)
            if x is r:
                cuts.add(c)
            elif x.op is Ops.IDIV and x.src[0] is r and x.src[1].op is Ops.CONST:
                cuts.add(c * int(x.src[1].arg))
    factors = sorted(c for c in cuts if 0 < c < sy.extent_of(r))
    return factors if all(b % a == 0 for a, b in pairwise(factors)) else [1]


def _weights(atom: UOp, digits: dict[UOp, list[int]]) -> dict[tuple[UOp, int], int] | None:
    """Match an atom as a sum of digits: (RANGE, first constant of the digit) → weight. None if it is no such sum."""
    below, divisor, x = None, 1, atom       # atom = (x // divisor) % below
    if x.op is Ops.MOD and x.src[1].op is Ops.CONST:
        x, below = x.src[0], int(x.src[1].arg)
    if x.op is Ops.IDIV and x.src[1].op is Ops.CONST:
        x, divisor = x.src[0], int(x.src[1].arg)
    if x not in digits or divisor < 1:
        return {} if x.op is Ops.RANGE and sy.extent_of(x) == 1 else None
    stop = sy.extent_of(x) if below is None else divisor * below
    if divisor not in digits[x] or (stop < sy.extent_of(x) and stop not in digits[x]):
        return None
    return {(x, at): at // divisor for at in digits[x] if divisor <= at < stop}
