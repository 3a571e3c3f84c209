"""Reference evaluation of small graphs (docs/ir.md, section 1) with NumPy, node by node and without kernels.

    GraphValues(content_of, most).of(node)      the array of a node, or None if its value is not known

`content_of` returns the content of a BUFFER, flat and in memory form, or None if it is not known. The value of an integer node may also
depend on Variables: then it is an array of objects, ints and Dims. Such values arise when a program computes shapes from the extents of
its operands.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from svod.core.graph.shapes import shape_of
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import ALU, TRANSCENDENTAL, Ops, UOp
from svod.core.ir.variable import Dim, dim_of, is_symbolic
from svod.core.spec.evaluate import reduce_axes
from svod.core.spec.library_kernels import apply_library_kernel
from svod.core.spec.values import Array, apply_alu, bitcast, cast, constant, held_dtype, hold, round_to, unhold
from svod.errors import ShapeError

MOST_NODES = 4096       # most nodes of a graph that is evaluated


class _NotKnown(Exception):
    """Raised for a node whose value is not known before a plan runs, or is not computed here."""


Contents = Callable[[UOp], Array | None]


class GraphValues:
    """The values of graph nodes. Each node is computed once, also if several graphs contain it."""

    def __init__(self, content_of: Contents, most: int, *, bit_exact: bool = True) -> None:
        """`most`: nodes with more elements are not computed.

        `bit_exact`: leave out operations for which a kernel may give other bits than NumPy: transcendental functions, reductions by sum or
        product of floats, extrema of 0 and -0, and casts of floats to integer types that cannot represent them."""
        self._content_of, self._most, self._bit_exact = content_of, most, bit_exact
        self._known: dict[UOp, Any] = {}        # values in held form; a tuple for a node with several components
        self._unknown: set[UOp] = set()

    def of(self, node: UOp) -> Array | None:
        """Compute the value of a node in memory form (`svod.core.spec.values`), in the node's shape; an array of ints and Dims if it
        depends on Variables. None if it depends on memory with unknown content, or on a node that is not computed."""
        order = node.toposort(gate=lambda u: u.op is not Ops.BUFFER and u.dtype != dtypes.index and not self._is_done(u))
        if len(order) > MOST_NODES:
            return None
        with np.errstate(all="ignore"):
            for u in order:
                if u.op is not Ops.UNIQUE and u.op is not Ops.DEVICE and u.dtype != dtypes.index and not self._is_done(u):
                    self._compute(u)
        if node in self._unknown:
            return None
        found = self._known[node]
        if found.dtype != object:
            return np.ascontiguousarray(unhold(found, node.dtype)).reshape(found.shape)
        return None if any(n is None for n in found.reshape(-1)) else found

    def forget_unknown(self) -> None:
        """Forget which nodes are unknown, so that they are tried again, because `content_of` may know more contents now."""
        self._unknown.clear()

    def _is_done(self, u: UOp) -> bool:
        return u in self._known or u in self._unknown

    def _compute(self, u: UOp) -> None:
        try:
            if any(s in self._unknown for s in u.src):
                raise _NotKnown
            self._known[u] = _value(u, self._known, self._content_of, self._most, self._bit_exact)
        except _NotKnown:
            self._unknown.add(u)


def _value(u: UOp, values: Mapping[UOp, Any], content_of: Contents, most: int, bit_exact: bool) -> Any:
    """Compute the value of one node in held form; a tuple for a node with several components. Raises _NotKnown."""
    shape = shape_of(u)
    if is_symbolic(shape) or math.prod(shape) > most:
        raise _NotKnown
    if u.op is Ops.BUFFER:
        content = content_of(u)
        if content is None:
            raise _NotKnown
        return hold(content, u.dtype)
    if u.op is Ops.CAST and u.src[0].dtype == dtypes.index:
        return _simplest(np.array(dim_of(u.src[0]), object), u.dtype)
    rule = _RULES.get(u.op) or (_elementwise if u.op in ALU else None)
    if rule is None:
        raise _NotKnown
    return rule(u, [values[s] for s in u.src if s in values], bit_exact)


def _simplest(x: Array, dtype: DType) -> Array:
    """Convert an array of objects to numbers of `dtype`, unless one of them depends on a Variable."""
    return x if any(isinstance(n, Dim) for n in x.reshape(-1)) else x.astype(held_dtype(dtype))


def _reduced(u: UOp, src: list[Array], bit_exact: bool) -> Any:
    combiner, axes = u.arg
    x = src[0]
    if combiner in ("ADD", "MUL"):
        if u.dtype.is_float and bit_exact:
            raise _NotKnown
        function = np.add if combiner == "ADD" else np.multiply
        wide = np.dtype(np.float64) if u.dtype.is_float else x.dtype
        total = np.asarray(function.reduce(x.astype(wide, copy=False), axis=axes, keepdims=True, dtype=wide))
        return round_to(total, u.dtype) if u.dtype.is_float else total
    if any(s.dtype == object for s in src):
        raise _NotKnown
    if bit_exact and u.dtype.is_float and _zeros_differ(x, x):
        raise _NotKnown
    parts = [part.reshape(shape_of(u)) for part in reduce_axes(get_combiner(combiner), src, axes, False)]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _zeros_differ(x: Array, y: Array) -> bool:
    """Whether an extremum of elements of x and y may compare 0 with -0, for which either result is allowed."""
    signs = [np.signbit(v[v == 0]) for v in (x, y)]
    return any(s.any() for s in signs) and not all(s.all() for s in signs)


def _windows(u: UOp, src: list[Array], bit_exact: bool) -> Array:
    x = src[0]
    for axis, size, stride, dilation in u.arg:
        count = (x.shape[axis] - dilation * (size - 1) - 1) // stride + 1
        x = np.stack([np.take(x, k * dilation + stride * np.arange(count), axis) for k in range(size)], -1)
    return x


def _taken(u: UOp, src: list[Array], bit_exact: bool) -> Array:
    x, index = src
    if index.dtype == object:
        raise _NotKnown
    n, axis = x.shape[u.arg], u.arg
    inside = (index >= 0) & (index < n)
    taken = np.take(x, np.where(inside, index, 0).astype(np.int64), axis)
    return np.where(inside.reshape(inside.shape + (1,) * (x.ndim - axis - 1)), taken, np.zeros((), x.dtype))


def _converted(u: UOp, src: list[Array], bit_exact: bool) -> Array:
    x, source = src[0], u.src[0].dtype
    if x.dtype == object:
        if u.dtype.bits < 32 or not u.dtype.is_int:
            raise _NotKnown
        out = np.empty(x.size, object)
        out[:] = [_held(int(n) if isinstance(n, bool) else n, u.dtype) for n in x.reshape(-1)]
        return out.reshape(x.shape)
    if bit_exact and source.is_float and u.dtype.is_int and x.size and not ((x > u.dtype.min - 1.0) & (x < u.dtype.max + 1.0)).all():
        raise _NotKnown
    return cast(x, source, u.dtype)


def _bits(u: UOp, src: list[Array], bit_exact: bool) -> Array:
    if src[0].dtype == object:
        raise _NotKnown
    return bitcast(src[0], u.src[0].dtype, u.dtype)


def _library_kernel(u: UOp, src: list[Array], bit_exact: bool) -> Array:
    name, options = u.arg
    adds = name in ("SCAN", "SCATTER") and options[0] in ("ADD", "MUL", "LOGADDEXP")
    if name == "CALLBACK" or any(s.dtype == object for s in src) or (bit_exact and adds and u.dtype.is_float):
        raise _NotKnown
    return apply_library_kernel(name, options, src, [s.dtype for s in u.src], u.dtype, True).reshape(shape_of(u))


def _elementwise(u: UOp, src: list[Array], bit_exact: bool) -> Array:
    if any(s.dtype == object for s in src):
        return _of_objects(u, src)
    if bit_exact and u.dtype.is_float and (u.op in TRANSCENDENTAL or (u.op in (Ops.MAX, Ops.MIN) and _zeros_differ(*src))):
        raise _NotKnown
    return apply_alu(u.op, u.dtype, src)


# -- numbers that depend on Variables --------------------------------------------------------------------------------------------
def _of_objects(u: UOp, src: list[Array]) -> Array:
    """Compute an elementwise operation on arrays of ints and Dims. The result has None for an element that is not one number or one
    expression for all values of the Variables; a WHERE may still leave such an element out."""
    function = _ON_DIMS.get(u.op)
    if function is None:
        raise _NotKnown
    shape = np.broadcast_shapes(*(s.shape for s in src))
    flat = [np.broadcast_to(s, shape).reshape(-1).tolist() for s in src]
    out = np.empty(len(flat[0]), object)
    out[:] = [_held(_decided(function, operands), u.dtype) for operands in zip(*flat, strict=True)]
    return out.reshape(shape) if any(n is None for n in out) else _simplest(out.reshape(shape), u.dtype)


def _decided(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    try:
        return function(*operands)
    except (ShapeError, TypeError):     # a comparison that depends on a Variable's value, or an operation that None or a Dim lacks
        return None


def _held(value: Any, dtype: DType) -> Any:
    """Wrap an int to the range of `dtype`. A Dim is returned if all its values are in the range; otherwise None."""
    if isinstance(value, Dim):
        low, high = value.bounds
        return value if dtype.min <= low and high <= dtype.max else None
    return (value - dtype.min) % (1 << dtype.bits) + dtype.min if type(value) is int else value


def _equal(a: Any, b: Any) -> bool | None:
    difference = a - b
    if not isinstance(difference, Dim):
        return bool(difference == 0)
    low, high = difference.bounds
    return None if low <= 0 <= high else False


def _unequal(a: Any, b: Any) -> bool | None:
    same = _equal(a, b)
    return None if same is None else not same


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    if condition is None:
        return a if a is not None and b is not None and _equal(a, b) else None
    return a if condition else b


def _both(a: Any, b: Any) -> Any:
    return False if a is False or b is False else a & b


def _either(a: Any, b: Any) -> Any:
    return True if a is True or b is True else a | b


_ON_DIMS: dict[Ops, Callable[..., Any]] = {
    Ops.ADD: lambda a, b: a + b, Ops.SUB: lambda a, b: a - b, Ops.MUL: lambda a, b: a * b, Ops.NEG: lambda a: -a,
    Ops.IDIV: lambda a, b: a // b if b else 0, Ops.MOD: lambda a, b: a % b if b else 0, Ops.ABS: lambda a: a if a >= 0 else -a,
    Ops.MAX: lambda a, b: a if a >= b else b, Ops.MIN: lambda a, b: a if a <= b else b,
    Ops.CMPLT: lambda a, b: bool(a < b), Ops.CMPLE: lambda a, b: bool(a <= b), Ops.CMPEQ: _equal, Ops.CMPNE: _unequal,
    Ops.AND: _both, Ops.OR: _either, Ops.NOT: lambda a: not a if isinstance(a, bool) else ~a, Ops.WHERE: _chosen}

_RULES: dict[Ops, Callable[[UOp, list[Any], bool], Any]] = {
    Ops.CONST: lambda u, src, bit_exact: constant(u.dtype, u.arg),
    Ops.IOTA: lambda u, src, bit_exact: np.arange(u.arg, dtype=held_dtype(u.dtype)),
    Ops.RESHAPE: lambda u, src, bit_exact: src[0].reshape(u.arg),
    Ops.PERMUTE: lambda u, src, bit_exact: src[0].transpose(u.arg),
    Ops.EXPAND: lambda u, src, bit_exact: np.broadcast_to(src[0], u.arg),
    Ops.PAD: lambda u, src, bit_exact: np.pad(src[0], u.arg[0], constant_values=u.arg[1]) if u.arg[0] else src[0],
    Ops.SHRINK: lambda u, src, bit_exact: src[0][tuple(slice(b, e) for b, e in u.arg)],
    Ops.FLIP: lambda u, src, bit_exact: np.flip(src[0], u.arg),
    Ops.WINDOW: _windows, Ops.GATHER: _taken, Ops.REDUCE_AXIS: _reduced, Ops.CUSTOM_FUNCTION: _library_kernel,
    Ops.GEP: lambda u, src, bit_exact: src[0][u.arg], Ops.CAT: lambda u, src, bit_exact: np.concatenate(src, u.arg),
    Ops.CAST: _converted, Ops.BITCAST: _bits,
    Ops.CONTIGUOUS: lambda u, src, bit_exact: src[0], Ops.DETACH: lambda u, src, bit_exact: src[0]}
