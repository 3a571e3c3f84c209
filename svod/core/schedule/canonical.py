"""The canonical form of a kernel AST and the kernel key.

    STORE(p3[i7*4 + i9], p1[i9] + p0[i7*4 + i9]; i7, i9)   →   STORE(p0[i0*4 + i1], p1[i0*4 + i1] + p2[i1]; i0, i1)

Two ASTs that differ only in RANGE ids, PARAM slots, the order of commutative operands or of the terms of an index have one canonical form
(except that operands which differ in nothing but their slots keep their order). First every node gets a digest of its structure, in which a
RANGE counts as its position in its stage ("output axis 1") and a PARAM as its type and size. Operands are ordered by the axes they depend
on, then by a digest of their form without extents, then by the full digest. So operands, and with them the stages that opt chains name,
keep their order if only extents change. Index sums are ordered by axis. Then RANGEs and PARAMs are numbered in topological order; RANGEs of
a stage follow the RANGEs of the stages it reads, and outputs come first among PARAMs.
"""
from __future__ import annotations

import hashlib
from dataclasses import replace

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import COMMUTATIVE, Ops, UOp, encode
from svod.core.schedule.axes import range_lists
from svod.core.schedule.thread_indices import over_ranges

AST_REVISION = 1
"""Changes when the meaning or the form of kernel ASTs does; enters every kernel key."""
AST_VERSION = b"svod-ast-%d" % AST_REVISION


def _places(ast: UOp) -> dict[UOp, bytes]:
    """The kind and position of each RANGE in its stage."""
    places: dict[UOp, bytes] = {}
    for u in ast.toposort():
        for i, r in enumerate(range_lists(u)):
            places[r] = b"%s%d" % (b"r" if u.op is Ops.REDUCE else b"o", i)
    return places


class _Structure:
    """Digests of nodes without ids and slots. Operands of commutative nodes enter in the order of their digests."""

    def __init__(self, ast: UOp):
        self.places = _places(ast)
        self.digests: dict[UOp, bytes] = {}
        self.forms: dict[UOp, bytes] = {}
        self.free: dict[UOp, tuple[bytes, ...]] = {}

    def axes(self, u: UOp) -> tuple[bytes, ...]:
        """The positions of the ranges that u depends on, sorted: `(o0, r0)`."""
        places = self.free.get(u)
        if places is None:
            if u.op is Ops.RANGE:
                places = (self.places.get(u, b"free"),)
            elif u.op is Ops.STAGE:
                places = ()
            else:
                places = tuple(sorted({place for s in u.src for place in self.axes(s)}))
            self.free[u] = places
        return places

    def form(self, u: UOp) -> bytes:
        """The digest of u without extents: numbers in index expressions and sizes of buffers are left out."""
        form = self.forms.get(u)
        if form is None:
            h = hashlib.blake2b(digest_size=16)
            h.update(u.op.value.encode() + b"|" + u.dtype.name.encode() + b"|")
            if u.op is Ops.RANGE:
                h.update(self.places.get(u, b"free"))
            else:
                if u.op is not Ops.PARAM and not (u.op is Ops.CONST and u.dtype == dtypes.index):
                    h.update(encode(u.arg))
                parts = [self.form(s) for s in u.src]
                for part in sorted(parts) if u.op in COMMUTATIVE else parts:
                    h.update(part)
            form = self.forms[u] = h.digest()
        return form

    def rank(self, u: UOp) -> tuple[tuple[bytes, ...], bytes, bytes]:
        """The sort key of an operand of a commutative operation."""
        return self.axes(u), self.form(u), self.digest(u)

    def digest(self, u: UOp) -> bytes:
        """The digest of u. Its sources must have digests already."""
        digest = self.digests.get(u)
        if digest is None:
            h = hashlib.blake2b(digest_size=16)
            h.update(u.op.value.encode() + b"|" + u.dtype.name.encode() + b"|")
            if u.op is Ops.RANGE:
                h.update(self.places.get(u, b"free"))
            elif u.op is Ops.PARAM:
                h.update(encode(replace(u.arg, slot=0)))
            else:
                h.update(encode(u.arg))
            parts = [self.digests[s] for s in u.src]
            for part in sorted(parts) if u.op in COMMUTATIVE else parts:
                h.update(part)
            digest = self.digests[u] = h.digest()
        return digest

    def order(self, atom: UOp) -> tuple[int, bytes, bytes]:
        """The sort key of a term of an index sum: output axes from the outermost, then reduce axes, then other terms."""
        return (0, self.places.get(atom, b""), b"") if atom.op is Ops.RANGE else (1, b"", self.digest(atom))


def _sum(structure: _Structure, u: UOp) -> UOp:
    """An index sum with its terms in canonical order, and the constant last."""
    terms, constant = sy.linear(u)
    result: UOp | None = None
    for atom in sorted(terms, key=structure.order):
        k = terms[atom]
        term = atom if k == 1 else UOp(Ops.MUL, dtypes.index, (atom, sy.const(k)))
        structure_of(structure, term)
        result = term if result is None else UOp(Ops.ADD, dtypes.index, (result, term))
        structure_of(structure, result)
    if result is None:
        return sy.const(constant)
    return UOp(Ops.ADD, dtypes.index, (result, sy.const(constant))) if constant else result


def structure_of(structure: _Structure, u: UOp) -> None:
    """Compute digest, form and axes of u, and of constants among its sources that may be new; sources come first, so that recursion stays
    shallow."""
    for n in (*u.src, u):
        structure.digest(n)
        structure.axes(n)
        structure.form(n)


def _ordered(structure: _Structure, u: UOp) -> UOp:
    """u with commutative operands in canonical order. Its sources must be ordered already."""
    if u.op is Ops.ADD and u.dtype == dtypes.index:
        return _sum(structure, u)
    if u.op is Ops.MUL and u.dtype == dtypes.index and u.src[1].op is Ops.CONST:
        return u
    if u.op is Ops.AND and u.dtype == dtypes.bool:
        parts = sorted(sy.conjuncts(u), key=structure.rank)
        result = parts[0]
        for p in parts[1:]:
            result = UOp(Ops.AND, dtypes.bool, (result, p))
            structure.digest(result)
        return result
    if u.op in COMMUTATIVE:
        a, b = u.src
        # a constant is the right operand, as in an index
        ranks = [(s.op is Ops.CONST, structure.rank(s)) for s in (a, b)]
        return u if ranks[0] <= ranks[1] else u.replace(src=(b, a))
    return u


def canonicalize(ast: UOp) -> tuple[UOp, tuple[int, ...]]:
    """(canonical AST, permutation): slot i of the result is slot `permutation[i]` of `ast`. Positions of a launch become RANGEs."""
    ast = over_ranges(ast)
    structure = _Structure(ast)
    done: dict[UOp, UOp] = {}
    for u in ast.toposort():
        src = tuple([done[s] for s in u.src])
        node = u if src == u.src else u.replace(src=src)
        if u.op is Ops.RANGE:
            structure.places.setdefault(node, structure.places.get(u, b"free"))
        structure_of(structure, node)
        node = _ordered(structure, node)
        structure_of(structure, node)
        done[u] = node
    return _number(done[ast])


def _number(ast: UOp) -> tuple[UOp, tuple[int, ...]]:
    """Number RANGEs and PARAMs in topological order."""
    order = ast.toposort()
    ranges: dict[UOp, UOp] = {}
    slots: dict[int, None] = dict.fromkeys(s.src[0].src[0].arg.slot for s in ast.src)
    for u in order:
        for r in range_lists(u):
            if r not in ranges:
                ranges[r] = r.replace(arg=len(ranges))
        if u.op is Ops.PARAM:
            slots.setdefault(u.arg.slot)
    number = {old: new for new, old in enumerate(slots)}
    params = {u: u.replace(arg=replace(u.arg, slot=number[u.arg.slot])) for u in order if u.op is Ops.PARAM}
    return ast.substitute(ranges | params), tuple(slots)


def key_of_canonical(ast: UOp) -> str:
    """The kernel key of a canonical AST: 32 hex digits, the same in every process and on every machine."""
    return hashlib.blake2b(AST_VERSION + ast.key, digest_size=16).hexdigest()
