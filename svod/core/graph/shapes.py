"""Shape inference and validation of graph nodes (docs/ir.md, section 1): one rule for each operation.

`shape_of(u)` infers the shape of a graph node from its sources and caches it on the node. A shape is a tuple of ints; an extent that
depends on variables is a Dim (`svod.core.ir.variable`). `shape_of` does all validation, so the same rules check a node built by hand and a
node built by a constructor of `graph`.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import SupportsIndex

from svod.core.graph.devices import stack_of
from svod.core.graph.library_kernel import shape_of_library_kernel
from svod.core.graph.storage import content_under, is_kernel_store, unassignable
from svod.core.ir.combiner import get_combiner
from svod.core.ir.uop import ALU, Ops, UOp
from svod.core.ir.variable import Dim, is_symbolic, layout_shape, lower, upper, upper_shape
from svod.errors import DTypeError, ScheduleError, ShapeError

Shape = tuple[int, ...]

_SCALAR_OPS = frozenset({Ops.CONST, Ops.DEFINE_VAR, Ops.BIND})
_SAME_SHAPE_OPS = frozenset({Ops.CONTIGUOUS, Ops.COPY, Ops.DETACH, Ops.CAST, Ops.BITCAST})


def shape_of(u: UOp) -> Shape:
    """Return the shape of a graph node. Raises ShapeError for a malformed node and for a node that has no shape (SINK, DEVICE, …)."""
    cache = u._cache
    if cache is not None:
        shape: Shape | None = cache.get("shape")
        if shape is not None:
            return shape
    if u.op not in _INFER or not any(map(_has_no_shape_yet, u.src)):
        return u.cached("shape", _infer)  # type: ignore[no-any-return]
    # without recursion: graphs built in a loop are deeper than Python's stack
    for node in u.toposort(gate=lambda n: _has_no_shape_yet(n) and not is_kernel_store(n)):
        if node.op in _INFER:
            node.cached("shape", _infer)
    return u.cached("shape", _infer)  # type: ignore[no-any-return]


def size_of(u: UOp) -> int:
    """Return the number of elements of a graph node; the maximum if it depends on variables."""
    return math.prod(upper_shape(shape_of(u)))


def storage_size(u: UOp) -> int:
    """Return the number of elements of a buffer that stores a graph node's value (`storage_view`)."""
    return math.prod(layout_shape(shape_of(u)))


def _has_no_shape_yet(u: UOp) -> bool:
    return u._cache is None or "shape" not in u._cache


def _infer(u: UOp) -> Shape:
    rule = _INFER.get(u.op)
    if rule is None:
        raise ShapeError(f"{u.op.value} has no shape: it is not a value of the graph level")
    return rule(u)


def _buffer_shape(u: UOp) -> Shape:
    return (u.arg,)


def _first_shape(u: UOp) -> Shape:
    if u.op is Ops.BITCAST and u.dtype.itemsize != u.src[0].dtype.itemsize:
        raise DTypeError(f"BITCAST from {u.src[0].dtype.name} to {u.dtype.name}: elements of {u.src[0].dtype.itemsize} and "
                         f"{u.dtype.itemsize} bytes; only equal sizes can be reinterpreted")
    return shape_of(u.src[0])


def _alu_shape(u: UOp) -> Shape:
    first = shape_of(u.src[0])
    for s in u.src[1:]:
        if shape_of(s) != first:
            raise ShapeError(f"{u.op.value} of shapes {_shapes(u.src)}: the operands of an elementwise node have one shape; "
                             "expand them first")
    return first


def _assign_shape(u: UOp) -> Shape:
    target, value = u.src
    if shape_of(target) != shape_of(value) or target.dtype != value.dtype:
        raise ShapeError(f"assign of {value.dtype.name}{list(shape_of(value))} to {target.dtype.name}{list(shape_of(target))}: "
                         "shape and dtype must agree")
    if content_under(target) is None:
        raise ScheduleError(f"{u.op.value} to {unassignable(target)} of shape {shape_of(target)}: the target must be a buffer, or a view "
                            "of one made of reshape, permute, shrink, flip and windows that do not overlap; realize the tensor first")
    return shape_of(target)


def _after_shape(u: UOp) -> Shape:
    content, *done = u.src
    if content.op not in (Ops.BUFFER, Ops.AFTER) or not done:
        raise ScheduleError("AFTER names a BUFFER, or what an AFTER leaves of one, and what was done to it")
    written = [d for d in done if d.op is not Ops.AFTER and not is_kernel_store(d)]
    for d in written:
        _check_written_under_after(d)
    parts = [d for d in written if d.op is Ops.ASSIGN or d.op is Ops.STORE]
    ordered = any(d.op is Ops.AFTER for d in done)
    if any(content_under(a.src[0]) is not content for a in parts):
        raise ScheduleError("AFTER names a BUFFER, or what an AFTER leaves of one, and the ASSIGNs or STOREs to it: one is to something "
                            "else")
    if (parts and (ordered or len(parts) < len(written))) or (not parts and len(written) != 1 and (written or ordered)):
        raise ScheduleError("AFTER names a BUFFER and either ASSIGNs or one CALL or END(CALL), beside AFTERs that come before it; several "
                            "calls are several AFTERs")
    return shape_of(content)


def _check_written_under_after(d: UOp) -> None:
    """Check a source of an AFTER. Raises ScheduleError unless it is an ASSIGN, a STORE of a view and a value, a CALL, or the END of a
    CALL."""
    if d.op is Ops.END and (not d.src or d.src[0].op not in (Ops.CALL, Ops.END)):
        raise ScheduleError(f"AFTER names a BUFFER and an END that must wrap a CALL, found {d.src[0].op.value if d.src else 'nothing'}")
    if d.op not in (Ops.ASSIGN, Ops.STORE, Ops.CALL, Ops.END):
        raise ScheduleError(f"AFTER names a BUFFER and, as what was done to it, ASSIGNs or STOREs to it or a CALL, END(CALL) or AFTER; "
                            f"found {d.op.value}")
    if d.op is Ops.STORE:
        if len(d.src) != 2:
            raise ScheduleError(f"STORE under an AFTER takes a view of the buffer and a value, found {len(d.src)} sources")
        _assign_shape(d)


def _cat_shape(u: UOp) -> Shape:
    first, axis = shape_of(u.src[0]), u.arg
    if not 0 <= axis < len(first) or any(_beside(shape_of(s), axis) != _beside(first, axis) or s.dtype != u.dtype for s in u.src):
        raise ShapeError(f"CAT of shapes {_shapes(u.src)} along axis {axis}: all other extents and the dtypes must agree")
    return (*first[:axis], sum(shape_of(s)[axis] for s in u.src), *first[axis + 1:])


def _beside(shape: Shape, axis: int) -> tuple[int, ...]:
    """Return the extents of all axes except `axis`, and the number of axes."""
    return (len(shape), *shape[:axis], *shape[axis + 1:])


def _reshape_shape(u: UOp) -> Shape:
    old = shape_of(u.src[0])
    if any(n < 0 for n in u.arg) or math.prod(old) != math.prod(u.arg):
        raise ShapeError(f"reshape of shape {old} to {u.arg}: {math.prod(old)} elements do not make {math.prod(u.arg)}")
    if is_symbolic(old) or is_symbolic(u.arg):
        _check_symbolic_reshape(old, u.arg)
    return tuple(u.arg)


def _check_symbolic_reshape(old: Shape, new: Shape) -> None:
    """Raise ShapeError for a reshape that merges or splits a group of axes in which an extent that depends on variables is not
    outermost."""
    outer, inner = ([n for n in shape if n != 1] for shape in (new, old))
    try:
        for i0, i1, j0, j1 in axis_groups(outer, inner):
            if outer[i0:i1] != inner[j0:j1] and (is_symbolic(outer[i0 + 1:i1]) or is_symbolic(inner[j0 + 1:j1])):
                raise ShapeError(f"reshape of shape {old} to {new}: an axis is merged with one outside of it, or split, whose extent "
                                 "depends on a variable; keep that axis apart, or permute it outwards first")
    except IndexError:
        raise ShapeError(f"reshape of shape {old} to {new}: an axis whose extent depends on a variable stays whole, or is split and "
                         "merged as the outermost of its group") from None


def axis_groups(shape: Sequence[int], source: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Match runs of axes of two shapes that have the same number of elements, as short as possible: a list of (begin, end in `shape`,
    begin, end in `source`). An axis of extent 1 may be in any run, or in none.

    Raises IndexError if the shapes cannot be matched."""
    groups = []
    i = j = 0
    while i < len(shape) and j < len(source):
        first_i, first_j = i, j
        a, b, i, j = shape[i], source[j], i + 1, j + 1
        while a != b:
            if upper(a) < upper(b):
                a, i = a * shape[i], i + 1
            else:
                b, j = b * source[j], j + 1
        groups.append((first_i, i, first_j, j))
    return groups


def _permute_shape(u: UOp) -> Shape:
    old = shape_of(u.src[0])
    if sorted(u.arg) != list(range(len(old))):
        raise ShapeError(f"permute of shape {old} by {u.arg}: name each of the {len(old)} axes once")
    return tuple(old[a] for a in u.arg)


def _expand_shape(u: UOp) -> Shape:
    old = shape_of(u.src[0])
    if len(old) != len(u.arg) or any(o not in (1, n) for o, n in zip(old, u.arg, strict=False)):
        raise ShapeError(f"expand of shape {old} to {u.arg}: only axes of extent 1 are repeated, and the number of axes stays")
    return tuple(u.arg)


def _pad_shape(u: UOp) -> Shape:
    old, pads = shape_of(u.src[0]), u.arg[0]
    if len(old) != len(pads) or any(lo < 0 or hi < 0 for lo, hi in pads):
        raise ShapeError(f"pad of shape {old} by {pads}: one pair (before, after) of non-negative ints per axis")
    return tuple(n + lo + hi for n, (lo, hi) in zip(old, pads, strict=True))


def _shrink_shape(u: UOp) -> Shape:
    old = shape_of(u.src[0])
    if len(old) != len(u.arg) or any(not 0 <= b <= e <= n for n, (b, e) in zip(old, u.arg, strict=True)):
        raise ShapeError(f"shrink of shape {old} to {u.arg}: one pair 0 <= begin <= end <= extent per axis")
    shape = tuple(e - b for b, e in u.arg)
    if any(isinstance(n, Dim) and lower(n) < 1 for n in shape):
        raise ShapeError(f"shrink of shape {old} to {u.arg}: an extent that depends on a variable must be at least 1 for all its values; "
                         "give the variable a larger min")
    return shape


def _flip_shape(u: UOp) -> Shape:
    old = shape_of(u.src[0])
    if len(set(u.arg)) != len(u.arg) or any(not 0 <= a < len(old) for a in u.arg):
        raise ShapeError(f"flip of shape {old} along {u.arg}: distinct axes below {len(old)}")
    return old


def _window_shape(u: UOp) -> Shape:
    old = shape_of(u.src[0])
    new, seen = list(old), set()
    for axis, size, stride, dilation in u.arg:
        if not 0 <= axis < len(old) or axis in seen or size < 1 or stride < 1 or dilation < 1:
            raise ShapeError(f"window of shape {old} by {u.arg}: each entry is (axis, size, stride, dilation) with a distinct axis and "
                             "positive numbers")
        span = dilation * (size - 1) + 1
        if span > old[axis]:
            raise ShapeError(f"window of {old}: a window of {size} with dilation {dilation} spans {span} and does not fit axis {axis} "
                             f"of extent {old[axis]}")
        seen.add(axis)
        new[axis] = (old[axis] - span) // stride + 1
    return (*new, *(size for _, size, _, _ in u.arg))


def _gather_shape(u: UOp) -> Shape:
    x, index, axis = shape_of(u.src[0]), shape_of(u.src[1]), u.arg
    if not 0 <= axis < len(x):
        raise ShapeError(f"gather along axis {axis} of {x}: there is no such axis")
    if not u.src[1].dtype.is_int:
        raise DTypeError(f"GATHER from {x} with an index {index} of {u.src[1].dtype.name}: the index must have an integer dtype")
    return x[:axis] + index + x[axis + 1:]


def _reduce_shape(u: UOp) -> Shape:
    combiner, axes = u.arg
    shape = shape_of(u.src[0])
    wanted = get_combiner(combiner).components
    if len(u.src) != wanted or any(shape_of(s) != shape for s in u.src):
        raise ShapeError(f"REDUCE_AXIS {combiner} of shapes {_shapes(u.src)}: it takes {wanted} operand(s) of one shape")
    if any(not 0 <= a < len(shape) for a in axes) or sorted(set(axes)) != list(axes):
        raise ShapeError(f"REDUCE_AXIS {combiner} of {shape} over {axes}: distinct axes below {len(shape)}, in ascending order")
    return tuple(1 if a in axes else n for a, n in enumerate(shape))


def _stack_shape(u: UOp) -> Shape:
    parts = u.src
    if not parts or any(shape_of(p) != shape_of(parts[0]) or p.dtype != parts[0].dtype for p in parts):
        raise ShapeError(f"MSTACK of shapes {_shapes(parts)}: a value of several devices has parts of one shape and one dtype")
    return shape_of(parts[0])


def _part_shape(u: UOp) -> Shape:
    stack = stack_of(u.src[0]) if u.src else None
    if stack is None or not isinstance(u.arg, int) or not 0 <= u.arg < len(stack.src):
        found = 0 if stack is None else len(stack.src)
        raise ShapeError(f"MSELECT has no shape: it is not a value of the graph level unless it names a part; {u.arg} of {found} is none")
    return shape_of(u.src[0])


_INFER: dict[Ops, Callable[[UOp], Shape]] = {
    Ops.MSTACK: _stack_shape, Ops.MSELECT: _part_shape,
    Ops.BUFFER: _buffer_shape, Ops.IOTA: _buffer_shape,
    Ops.RESHAPE: _reshape_shape, Ops.PERMUTE: _permute_shape, Ops.EXPAND: _expand_shape, Ops.PAD: _pad_shape,
    Ops.SHRINK: _shrink_shape, Ops.FLIP: _flip_shape, Ops.WINDOW: _window_shape, Ops.GATHER: _gather_shape,
    Ops.REDUCE_AXIS: _reduce_shape, Ops.GEP: _first_shape, Ops.ASSIGN: _assign_shape, Ops.AFTER: _after_shape, Ops.CAT: _cat_shape,
    Ops.CUSTOM_FUNCTION: lambda u: shape_of_library_kernel(u, [shape_of(s) for s in u.src]),
    **dict.fromkeys(_SCALAR_OPS, lambda u: ()),
    **dict.fromkeys(_SAME_SHAPE_OPS, _first_shape),
    **dict.fromkeys(ALU, _alu_shape),
}


def _shapes(nodes: Sequence[UOp]) -> str:
    return " and ".join(str(shape_of(s)) for s in nodes)


def axis_of(name: str, axis: int, rank: int) -> int:
    """Return an axis as a number ≥ 0. Raises ShapeError, which names the operation `name`, for an axis out of range."""
    if type(axis) is not int:       # far faster than isinstance with a protocol
        if not isinstance(axis, SupportsIndex):
            raise ShapeError(f"{name}: {axis!r} is not an axis: give ints")
        axis = operator.index(axis)
    if not -rank <= axis < rank:
        raise ShapeError(f"{name}: axis {axis} of a tensor with {rank} axes" + (f"; use {-rank} … {rank - 1}" if rank else ""))
    return axis % rank


def normalize_axes(name: str, axes: int | Sequence[int] | None, rank: int) -> Shape:
    """Return axes as a sorted tuple of ints ≥ 0; None means all axes. Raises ShapeError, which names the operation `name`, for an axis out
    of range or given twice."""
    if axes is None:
        return tuple(range(rank))
    given = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    normalized = sorted(axis_of(name, a, rank) for a in given)
    if len(set(normalized)) != len(normalized):
        raise ShapeError(f"{name}: axes {given} of a tensor with {rank} axes name an axis twice")
    return tuple(normalized)


def can_broadcast(old: Shape, new: Shape) -> bool:
    """Whether `old` broadcasts to `new` by NumPy's rule."""
    return len(old) <= len(new) and all(o in (1, n) for o, n in zip(reversed(old), reversed(new), strict=False))


def broadcast_shapes(name: str, *shapes: Shape, given: Sequence[Shape] | None = None) -> Shape:
    """Return the common shape by NumPy's broadcasting rule. Raises ShapeError, which names the operation `name` and all shapes, if there is
    none.

    `given`: the full shapes of the operands for the error, if `shapes` has only their leading axes."""
    rank = max((len(s) for s in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for i, n in enumerate(shape, rank - len(shape)):
            if n != 1:
                if result[i] not in (1, n):
                    axis = i - rank if given is None else i - rank - len(given[0]) + len(shapes[0])
                    raise ShapeError(f"{name} of shapes {' and '.join(map(str, given or shapes))}: axis {axis} has extents {result[i]} and "
                                     f"{n}, which do not broadcast")
                result[i] = n
    return tuple(result)
