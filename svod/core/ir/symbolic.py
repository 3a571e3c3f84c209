"""Integer arithmetic on index expressions: bounds, the canonical form, division and modulo, and conditions on their values.

An index expression is a UOp of dtype index over the leaves RANGE, DEFINE_VAR, BIND and CAST(integer value → index). Its canonical
form is a sum `ADD(MUL(atom, const), …, const)`: equal atoms collected, atoms in a fixed order, the constant last. An
atom is a leaf or something that is not a sum: IDIV, MOD, MIN, MAX, a product of two variables. Because nodes are
hash-consed, two expressions that have the same canonical form are the same object.

    ((i*12 + j*3 + k) // 3) % 4        with  j < 4, k < 3     becomes     j

Division is Python's: IDIV rounds down, and MOD has the sign of the divisor. The rules for `x // c` and `x % c` with constant c > 0:
terms that are multiples of c are divided separately; a common factor of all terms and c is cancelled; and if x = d*a + r with d | c and
0 ≤ r < d, then `x // c = a // (c/d)` and `x % c = d*(a % (c/d)) + r`. In sums, `c*(x // c) + x % c` becomes x.

The arg of a DEFINE_VAR begins with `(name, vmin, vmax)`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from math import gcd
from typing import NamedTuple

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp, remembered

Terms = dict[UOp, int]
INDEX_ZERO = UOp.const(dtypes.index, 0)
TRUE = UOp.const(dtypes.bool, True)
FALSE = UOp.const(dtypes.bool, False)


@lru_cache(maxsize=1 << 16)
def const(value: int) -> UOp:
    """The index constant `value`."""
    return UOp(Ops.CONST, dtypes.index, (), value)


def make_range(extent: int | UOp, axis: int) -> UOp:
    """Make a RANGE 0 … extent-1 with axis id `axis`. `extent`: an int, or an index expression if it depends on variables."""
    return UOp(Ops.RANGE, dtypes.index, (extent if isinstance(extent, UOp) else const(extent),), axis)


def is_symbolic(r: UOp) -> bool:
    """Whether the extent of a RANGE depends on variables."""
    return r.src[0].op is not Ops.CONST


def extent_of(r: UOp) -> int:
    """Return the extent of a RANGE; its largest value if it depends on variables."""
    end = r.src[0]
    return int(end.arg) if end.op is Ops.CONST else vmax(end)


# -- bounds -----------------------------------------------------------------------------------------------------------
@remembered("bounds", lambda u: u.op is not Ops.CAST and u.op is not Ops.RANGE)
def bounds(u: UOp) -> tuple[int, int]:
    """Return (lower bound, upper bound) of the values of `u`, by interval arithmetic over its leaves. Cached on the node."""
    op = u.op
    if op is Ops.CONST:
        return int(u.arg), int(u.arg)
    if op is Ops.RANGE:
        return 0, bounds(u.src[0])[1] - 1
    if op is Ops.DEFINE_VAR:
        return int(u.arg[1]), int(u.arg[2])
    if op is Ops.BIND:
        return bounds(u.src[0])
    if op is Ops.CAST:
        source = u.src[0].dtype
        return int(source.min), int(source.max)
    (al, ah), (bl, bh) = bounds(u.src[0]), bounds(u.src[1])
    if op is Ops.ADD:
        return al + bl, ah + bh
    if op is Ops.SUB:
        return al - bh, ah - bl
    if op is Ops.MUL:
        corners = (al * bl, al * bh, ah * bl, ah * bh)
        return min(corners), max(corners)
    if op is Ops.MIN:
        return min(al, bl), min(ah, bh)
    if op is Ops.MAX:
        return max(al, bl), max(ah, bh)
    if op is Ops.IDIV and (bl > 0 or bh < 0):
        corners = (al // bl, al // bh, ah // bl, ah // bh)
        return min(corners), max(corners)
    if op is Ops.MOD and bl == bh and bl > 0:
        return (al % bl, ah % bl) if al // bl == ah // bl else (0, bl - 1)
    if op is Ops.MOD and bl > 0:
        return 0, bh - 1
    if op is Ops.MOD and bh < 0:
        return bl + 1, 0
    raise ValueError(f"no bounds for {u!r}: it is not an index expression, or its divisor may be zero")


def vmin(u: UOp) -> int:
    """Lower bound of an index expression."""
    low, _ = bounds(u)
    return low


def vmax(u: UOp) -> int:
    """Upper bound of an index expression."""
    _, high = bounds(u)
    return high


# -- canonical sums ---------------------------------------------------------------------------------------------------
def linear(u: UOp) -> tuple[Terms, int]:
    """Return (the coefficient of each atom, the constant) of a *canonical* expression. The dict is cached on the node: do not change it."""
    cache = u._cache
    if cache is not None and "linear" in cache:
        linear_form: tuple[Terms, int] = cache["linear"]
        return linear_form
    result: tuple[Terms, int] = u.cached("linear", _compute_linear)
    return result


def _compute_linear(u: UOp) -> tuple[Terms, int]:
    if u.op is Ops.CONST:
        return {}, int(u.arg)
    if u.op is Ops.ADD:
        # a canonical sum is a left-leaning tree of ADDs: collect its right operands
        terms: Terms = {}
        constant = 0
        node = u
        while True:
            last = node.src[1] if node.op is Ops.ADD else node
            part, c = ({}, int(last.arg)) if last.op is Ops.CONST else (linear(last) if last.op is Ops.ADD else (_term(last), 0))
            constant += c
            for atom, k in part.items():
                terms[atom] = terms.get(atom, 0) + k
            if node.op is not Ops.ADD:
                break
            node = node.src[0]
        return terms, constant
    return _term(u), 0


def _term(u: UOp) -> Terms:
    if u.op is Ops.MUL and u.src[1].op is Ops.CONST:
        return {u.src[0]: int(u.src[1].arg)}
    return {u: 1}


def _order(atom: UOp) -> tuple[int, int, bytes]:
    return (0, atom.arg, b"") if atom.op is Ops.RANGE else (1, 0, atom.key)


def build(terms: Mapping[UOp, int], constant: int = 0) -> UOp:
    """Make the canonical expression of Σ coefficient*atom + constant. The atoms must be canonical."""
    live = {a: k for a, k in terms.items() if k}
    if len(live) > 1 and any(a.op is Ops.MOD for a in live):
        live, constant = _recombine(live, constant)
    result: UOp | None = None
    for atom in sorted(live, key=_order) if len(live) > 1 else live:
        k = live[atom]
        term = atom if k == 1 else UOp(Ops.MUL, dtypes.index, (atom, const(k)))
        result = term if result is None else UOp(Ops.ADD, dtypes.index, (result, term))
    if result is None:
        return const(constant)
    return UOp(Ops.ADD, dtypes.index, (result, const(constant))) if constant else result


def _recombine(terms: Terms, constant: int) -> tuple[Terms, int]:
    """Replace k*c*(x // c) + k*(x % c) by k*x wherever it occurs among the terms."""
    changed = True
    while changed:
        changed = False
        for m, k in terms.items():
            if m.op is not Ops.MOD or m.src[1].op is not Ops.CONST:
                continue
            quotient = idiv(m.src[0], m.src[1])
            c = int(m.src[1].arg)
            q_terms, q_constant = linear(quotient)
            if len(q_terms) != 1 or q_constant:
                continue
            (q, q_factor), = q_terms.items()
            if terms.get(q) != k * c * q_factor or q is m:
                continue
            rest = {a: v for a, v in terms.items() if a is not m and a is not q}
            x_terms, x_constant = linear(m.src[0])
            for a, v in x_terms.items():
                rest[a] = rest.get(a, 0) + k * v
            terms, constant, changed = {a: v for a, v in rest.items() if v}, constant + k * x_constant, True
            break
    return terms, constant


def interval(terms: Mapping[UOp, int], constant: int = 0) -> tuple[int, int]:
    """Return (lower bound, upper bound) of Σ coefficient*atom + constant."""
    lo = hi = constant
    for atom, k in terms.items():
        a, b = bounds(atom)
        if k >= 0:
            lo, hi = lo + k * a, hi + k * b
        else:
            lo, hi = lo + k * b, hi + k * a
    return lo, hi


# -- constructors: canonical operands in, canonical result out ----------------------------------------------------------------
def add(a: UOp, b: UOp) -> UOp:
    """a + b."""
    (at, ac), (bt, bc) = linear(a), linear(b)
    if not bt and not bc:
        return a
    if not at and not ac:
        return b
    terms = dict(at)
    for atom, k in bt.items():
        terms[atom] = terms.get(atom, 0) + k
    return build(terms, ac + bc)


def scale(a: UOp, k: int) -> UOp:
    """a * k for a Python integer k."""
    if k == 1:
        return a
    terms, constant = linear(a)
    return build({atom: v * k for atom, v in terms.items()}, constant * k)


def sub(a: UOp, b: UOp) -> UOp:
    """a - b."""
    return add(a, scale(b, -1))


def shift(a: UOp, k: int) -> UOp:
    """a + k for a Python integer k."""
    if not k:
        return a
    terms, constant = linear(a)
    return build(terms, constant + k)


def mul(a: UOp, b: UOp) -> UOp:
    """a * b. A product with a constant is distributed over the sum; any other product is a multiple of an atom, which has its factors in
    canonical order."""
    if b.op is Ops.CONST:
        return scale(a, int(b.arg))
    if a.op is Ops.CONST:
        return scale(b, int(a.arg))
    multiple, factors, left = 1, list[UOp](), [a, b]
    while left:
        factor = left.pop()
        if factor.op is Ops.MUL and factor.src[1].op is Ops.CONST:
            multiple *= int(factor.src[1].arg)
            left.append(factor.src[0])
        elif factor.op is Ops.MUL:
            left += factor.src
        else:
            factors.append(factor)
    first, *others = sorted(factors, key=_order)
    return scale(reduce(lambda x, y: UOp(Ops.MUL, dtypes.index, (x, y)), others, first), multiple)


def _divide(terms: Terms, constant: int, c: int) -> tuple[Terms, int, Terms, int]:
    """Split Σ coefficient*atom + constant into c*quotient + remainder, term by term.

    Returns (terms of the quotient, its constant, terms of the remainder, its constant in [0, c)). Coefficients of the remainder are smaller
    than c in absolute value."""
    quotient: Terms = {}
    remainder: Terms = {}
    for atom, k in terms.items():
        if -c < k < c:
            remainder[atom] = k
        else:
            quotient[atom] = k // c
            if k % c:
                remainder[atom] = k % c
    return quotient, constant // c, remainder, constant % c


def _peel(terms: Terms, constant: int, c: int) -> tuple[int, Terms, int, Terms, int] | None:
    """Find the largest divisor d of c, 1 < d < c, such that the sum is d*a + r with 0 ≤ r < d.

    Returns (d, terms of a, constant of a, terms of r, constant of r); None if there is no such divisor."""
    for d in sorted({gcd(k, c) for k in terms.values()}, reverse=True):
        if d <= 1 or d >= c:
            continue
        a_terms, a_constant, r_terms, r_constant = _divide(terms, constant, d)
        lo, hi = interval(r_terms, r_constant)
        if lo >= 0 and hi < d:
            return d, a_terms, a_constant, r_terms, r_constant
    return None


def idiv(a: UOp, b: UOp) -> UOp:
    """a // b, rounded down. Raises ZeroDivisionError for the constant 0."""
    if b.op is not Ops.CONST:
        return UOp(Ops.IDIV, dtypes.index, (a, b))
    c = int(b.arg)
    if c == 0:
        raise ZeroDivisionError("an index expression is divided by the constant 0")
    return floordiv(a, c) if c > 0 else floordiv(scale(a, -1), -c)


def floordiv(a: UOp, c: int) -> UOp:
    """a // c for a positive Python integer c."""
    if c == 1:
        return a
    lo, hi = bounds(a)
    if lo // c == hi // c:
        return const(lo // c)
    terms, constant = linear(a)
    q, qc, r, rc = _divide(terms, constant, c)
    lo, hi = interval(r, rc)
    if lo // c == hi // c:
        return build(q, qc + lo // c)
    inner = _floordiv_rest(r, rc, c)
    if not q and not qc:
        return inner
    return add(build(q, qc), inner)


def _floordiv_rest(r: Terms, rc: int, c: int) -> UOp:
    common = gcd(c, *r.values())
    if common > 1:
        # every term is a multiple of `common`, so dividing the constant by it, rounded down, does not change the quotient
        return floordiv(build({a: k // common for a, k in r.items()}, rc // common), c // common)
    peeled = _peel(r, rc, c)
    if peeled is not None:
        d, a_terms, a_constant, _, _ = peeled
        return floordiv(build(a_terms, a_constant), c // d)
    if len(r) == 1 and rc == 0:
        (atom, k), = r.items()
        if k == 1 and atom.op is Ops.IDIV and atom.src[1].op is Ops.CONST and atom.src[1].arg > 0:
            return floordiv(atom.src[0], int(atom.src[1].arg) * c)
        if k == 1 and atom.op is Ops.MOD and atom.src[1].op is Ops.CONST and atom.src[1].arg % c == 0 and atom.src[1].arg > 0:
            return floormod(floordiv(atom.src[0], c), int(atom.src[1].arg) // c)
    return UOp(Ops.IDIV, dtypes.index, (build(r, rc), const(c)))


def mod(a: UOp, b: UOp) -> UOp:
    """a % b, with the sign of b. Raises ZeroDivisionError for the constant 0."""
    if b.op is not Ops.CONST:
        return UOp(Ops.MOD, dtypes.index, (a, b))
    c = int(b.arg)
    if c == 0:
        raise ZeroDivisionError("an index expression is taken modulo the constant 0")
    return floormod(a, c) if c > 0 else scale(floormod(scale(a, -1), -c), -1)


def floormod(a: UOp, c: int) -> UOp:
    """a % c for a positive Python integer c."""
    if c == 1:
        return INDEX_ZERO
    lo, hi = bounds(a)
    if lo // c == hi // c:
        return shift(a, -(lo // c) * c)
    terms, constant = linear(a)
    _, _, r, rc = _divide(terms, constant, c)
    lo, hi = interval(r, rc)
    if lo // c == hi // c:
        return build(r, rc - (lo // c) * c)
    common = gcd(c, *r.values())
    if common > 1:
        inner = floormod(build({a: k // common for a, k in r.items()}, rc // common), c // common)
        return shift(scale(inner, common), rc % common)
    peeled = _peel(r, rc, c)
    if peeled is not None:
        d, a_terms, a_constant, r_terms, r_constant = peeled
        return add(scale(floormod(build(a_terms, a_constant), c // d), d), build(r_terms, r_constant))
    if len(r) == 1 and rc == 0:
        (atom, k), = r.items()
        if k == 1 and atom.op is Ops.MOD and atom.src[1].op is Ops.CONST and atom.src[1].arg > 0 and atom.src[1].arg % c == 0:
            return floormod(atom.src[0], c)
    return UOp(Ops.MOD, dtypes.index, (build(r, rc), const(c)))


def minimum(a: UOp, b: UOp) -> UOp:
    """min(a, b)."""
    return _extremum(Ops.MIN, a, b)


def maximum(a: UOp, b: UOp) -> UOp:
    """max(a, b)."""
    return _extremum(Ops.MAX, a, b)


def _extremum(op: Ops, a: UOp, b: UOp) -> UOp:
    lo, hi = bounds(sub(a, b))
    if hi <= 0 or lo >= 0:
        return a if (hi <= 0) == (op is Ops.MIN) else b
    return UOp(op, dtypes.index, tuple(sorted((a, b), key=lambda u: (u.op is Ops.CONST, u.key))))


# -- comparisons ------------------------------------------------------------------------------------------------------
def _compare(op: Ops, a: UOp, b: UOp) -> UOp:
    """Make a < b or a ≤ b. If the bounds do not decide it, the result is `terms < constant` or `constant ≤ terms`, with the first
    coefficient of the terms positive."""
    terms, constant = linear(sub(a, b))
    lo, hi = interval(terms, constant)
    slack = 0 if op is Ops.CMPLT else 1  # a ≤ b is a < b + 1
    if hi < slack:
        return TRUE
    if lo >= slack:
        return FALSE
    common = gcd(*terms.values())
    limit = slack - constant  # Σ < limit
    if common > 1:
        terms, limit = {k: v // common for k, v in terms.items()}, -(-limit // common)
    first = min(terms, key=_order)
    if terms[first] > 0:
        return UOp(Ops.CMPLT, dtypes.bool, (build(terms), const(limit)))
    # -Σ' < limit  ⇔  1 - limit ≤ Σ'
    return UOp(Ops.CMPLE, dtypes.bool, (const(1 - limit), build({k: -v for k, v in terms.items()})))


def less(a: UOp, b: UOp) -> UOp:
    """Make a < b as a bool UOp; CONST if the bounds decide it."""
    return _compare(Ops.CMPLT, a, b)


def less_equal(a: UOp, b: UOp) -> UOp:
    """Make a ≤ b as a bool UOp; CONST if the bounds decide it."""
    return _compare(Ops.CMPLE, a, b)


def logical_and(a: UOp, b: UOp) -> UOp:
    """a and b."""
    if a is FALSE or b is FALSE:
        return FALSE
    return b if a is TRUE else a if b is TRUE or a is b else UOp(Ops.AND, dtypes.bool, (a, b))


def logical_or(a: UOp, b: UOp) -> UOp:
    """a or b."""
    if a is TRUE or b is TRUE:
        return TRUE
    return b if a is FALSE else a if b is FALSE or a is b else UOp(Ops.OR, dtypes.bool, (a, b))


def logical_not(a: UOp) -> UOp:
    """not a. The negation of a comparison is the opposite comparison: not a < b becomes b ≤ a."""
    if a is TRUE or a is FALSE:
        return FALSE if a is TRUE else TRUE
    if a.op is Ops.CMPLT:
        return less_equal(a.src[1], a.src[0])
    if a.op is Ops.CMPLE:
        return less(a.src[1], a.src[0])
    return a.src[0] if a.op is Ops.NOT else UOp(Ops.NOT, dtypes.bool, (a,))


# -- whole expressions --------------------------------------------------------------------------------------------------
SIMPLIFIERS: dict[Ops, Callable[[UOp, UOp], UOp]] = {
    Ops.ADD: add, Ops.SUB: sub, Ops.MUL: mul, Ops.IDIV: idiv, Ops.MOD: mod, Ops.MIN: minimum, Ops.MAX: maximum,
    Ops.CMPLT: less, Ops.CMPLE: less_equal, Ops.AND: logical_and, Ops.OR: logical_or,
}
"""By operation of two operands the function that makes its canonical form."""


def _is_index(u: UOp) -> bool:
    return u.dtype == dtypes.index


def simplify(u: UOp, mapping: Mapping[UOp, UOp] | None = None) -> UOp:
    """Return the canonical form of an index expression or a gate, after the nodes in `mapping` were replaced.

    CAST(value → index) is a leaf: the value below it is not simplified. In a gate, comparisons of values are not simplified either."""
    replaced: Mapping[UOp, UOp] = mapping or {}
    done: dict[UOp, UOp] = {}
    for n in u.toposort(gate=lambda n: n not in replaced and n.op is not Ops.CAST):
        if n in replaced:
            done[n] = replaced[n]
            continue
        op = n.op
        if op in (Ops.RANGE, Ops.CAST, Ops.CONST, Ops.DEFINE_VAR, Ops.BIND) or len(n.src) not in (1, 2):
            done[n] = n
        elif op is Ops.NOT and n.dtype == dtypes.bool:
            done[n] = logical_not(done[n.src[0]])
        elif op is Ops.NEG and _is_index(n):
            done[n] = scale(done[n.src[0]], -1)
        elif op in SIMPLIFIERS and (_is_index(n.src[0]) or (op in (Ops.AND, Ops.OR) and n.dtype == dtypes.bool)):
            done[n] = SIMPLIFIERS[op](done[n.src[0]], done[n.src[1]])
        elif n.dtype == dtypes.bool:
            src = tuple(done[s] for s in n.src)
            done[n] = n if src == n.src else n.replace(src=src)
        else:
            raise ValueError(f"{n!r} is not part of an index expression")
    return done[u]


class Affine(NamedTuple):
    """The sum `Σ coefficients[leaf]*leaf + Σ atoms[atom]*atom + constant`. Leaves are RANGEs and DEFINE_VARs; atoms are all other nodes."""

    coefficients: dict[UOp, int]
    constant: int
    atoms: dict[UOp, int]


def affine(u: UOp) -> Affine:
    """Split a canonical index expression into its affine part and its other atoms (see `Affine`). Cached on the node."""
    result: Affine = u.cached("affine", _compute_affine)
    return result


def _compute_affine(u: UOp) -> Affine:
    terms, constant = linear(u)
    leaves = {a: k for a, k in terms.items() if a.op in (Ops.RANGE, Ops.DEFINE_VAR)}
    return Affine(leaves, constant, {a: k for a, k in terms.items() if a not in leaves})


@remembered("ranges", lambda u: u.op is not Ops.STAGE)
def ranges_of(u: UOp) -> frozenset[UOp]:
    """Return the RANGEs that an expression depends on, without the ranges of the stages that it reads. Cached on the node."""
    if u.op is Ops.RANGE:
        return frozenset((u,))
    if u.op is Ops.STAGE or not u.src:
        return frozenset()
    if u.op is Ops.REDUCE:
        n_values = u.arg[1]
        inner = frozenset[UOp]().union(*(ranges_of(s) for s in u.src[:n_values]))
        return inner.difference(u.src[n_values:])
    if len(u.src) == 1:
        return ranges_of(u.src[0])
    return frozenset[UOp]().union(*(ranges_of(s) for s in u.src))


# -- validity -----------------------------------------------------------------------------------------------------------
class Constraint(NamedTuple):
    """The condition lo ≤ expr ≤ hi; None as `lo` or `hi` means no limit on that side.

    `expr`: a canonical sum without constant, whose first coefficient is positive and whose coefficients have no common factor."""

    expr: UOp
    lo: int | None
    hi: int | None


Valid = tuple[Constraint, ...]
"""A conjunction of constraints, one per expression, in order of first appearance. () is always true."""


def constrain(valid: Valid, expr: UOp, lo: int | None, hi: int | None) -> Valid | None:
    """Add the condition lo ≤ expr ≤ hi to `valid`. Returns None if the conjunction is never true. A limit that the bounds of `expr` imply
    is dropped."""
    terms, constant = linear(expr)
    lo = None if lo is None else lo - constant
    hi = None if hi is None else hi - constant
    if not terms:
        return valid if (lo is None or lo <= 0) and (hi is None or hi >= 0) else None
    terms, lo, hi = _primitive(terms, lo, hi)
    base = build(terms)
    known = next((c for c in valid if c.expr is base), None)
    if known is not None:
        lo, hi = _tighter(known.lo, lo, max), _tighter(known.hi, hi, min)
    least, most = interval(terms)
    lo = None if lo is not None and lo <= least else lo
    hi = None if hi is not None and hi >= most else hi
    if (least if lo is None else lo) > (most if hi is None else hi):
        return None
    if lo is None and hi is None:
        return valid
    constraint = Constraint(base, lo, hi)
    return (*valid, constraint) if known is None else tuple(constraint if c is known else c for c in valid)


def _primitive(terms: dict[UOp, int], lo: int | None, hi: int | None) -> tuple[dict[UOp, int], int | None, int | None]:
    """Normalise lo ≤ Σ terms ≤ hi: coefficients without a common factor, the first one positive."""
    common = gcd(*terms.values())
    if common > 1:
        terms = {a: k // common for a, k in terms.items()}
        lo = None if lo is None else -(-lo // common)
        hi = None if hi is None else hi // common
    if terms[min(terms, key=_order)] < 0:
        terms = {a: -k for a, k in terms.items()}
        lo, hi = (None if hi is None else -hi), (None if lo is None else -lo)
    return terms, lo, hi


def _tighter(a: int | None, b: int | None, choose: Callable[[int, int], int]) -> int | None:
    """Combine two limits by `choose` (min or max); None stands for no limit."""
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)


def conjoin(a: Valid, b: Valid) -> Valid | None:
    """Return the conjunction of two conditions; None if they exclude each other."""
    result: Valid | None = a
    for c in b:
        if result is None:
            return None
        result = constrain(result, c.expr, c.lo, c.hi)
    return result


def conjuncts(gate: UOp) -> list[UOp]:
    """List the operands of a tree of ANDs, each once."""
    seen: dict[UOp, None] = {}
    todo = [gate]
    while todo:
        n = todo.pop()
        if n not in seen:
            seen[n] = None
            todo += n.src if n.op is Ops.AND else ()
    return [n for n in seen if n.op is not Ops.AND]


def gate_of(valid: Valid) -> UOp:
    """Make the bool UOp of a conjunction; TRUE for ()."""
    gate = TRUE
    for c in valid:
        if c.lo is not None:
            gate = logical_and(gate, UOp(Ops.CMPLE, dtypes.bool, (const(c.lo), c.expr)))
        if c.hi is not None:
            gate = logical_and(gate, UOp(Ops.CMPLT, dtypes.bool, (c.expr, const(c.hi + 1))))
    return gate


def assuming(u: UOp, valid: Valid) -> UOp:
    """Simplify `u` under the condition `valid`: divisions are simplified with the narrower bounds that `valid` gives RANGEs and positions
    that are looked up."""
    narrowed: dict[UOp, UOp] = {}
    for c in valid:
        terms, _ = linear(c.expr)
        if len(terms) == 1 and c.expr.op in (Ops.RANGE, Ops.CAST):
            least, most = bounds(c.expr)
            lo, hi = least if c.lo is None else c.lo, most if c.hi is None else c.hi
            narrowed[c.expr] = UOp(Ops.DEFINE_VAR, dtypes.index, (), (f"assumed{len(narrowed)}", lo, hi))
    if not narrowed or not any(n.op in (Ops.IDIV, Ops.MOD, Ops.MIN, Ops.MAX) for n in u.toposort(gate=lambda n: n.op is not Ops.CAST)):
        return u
    return simplify(simplify(u, narrowed), {v: k for k, v in narrowed.items()})
