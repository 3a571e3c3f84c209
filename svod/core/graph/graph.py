"""The constructors that Tensor operations build graphs with (docs/ir.md, section 1).

A constructor normalises its arguments (negative axes, a -1 in a shape), makes no node for an operation without effect (a reshape to the
same shape) and merges a movement with the same movement below it (a permutation of a permutation). It returns a valid node, which
`svod.core.graph.shapes` checks, or raises ShapeError with the operation and the shapes.

A graph whose outputs have elements contains no node without elements: a constructor whose result has an extent 0 returns a zero CONST
expanded to that shape, and one whose operand has no elements (a reduction, PAD, GATHER) returns the constant that it equals.
"""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

from svod.core.graph.callback import CALLBACK, HostFunction
from svod.core.graph.devices import device_node, device_of, on_one_device
from svod.core.graph.shapes import Shape, axis_of, can_broadcast, normalize_axes, shape_of
from svod.core.graph.storage import content_under, is_padding_view
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import COMPARISONS, Ops, UOp
from svod.core.ir.variable import Dim, is_symbolic, layout_shape, number_of, upper
from svod.core.machine.target import HOST
from svod.errors import DTypeError, ShapeError

Pair = tuple[int, int]
Scalar = bool | int | float

_unique_ids = itertools.count()


def _made(u: UOp) -> UOp:
    """Check `u` and return it, or a constant of the same shape if it has no elements."""
    shape = shape_of(u)
    return u if 0 not in shape else full(shape, 0, u.dtype)


# -- sources ------------------------------------------------------------------------------------
def buffer(dtype: DType, size: int, device: str = HOST) -> UOp:
    """Make a BUFFER with new storage of `size` elements. Shape `(size,)`. Each call makes a different node."""
    unique = UOp(Ops.UNIQUE, dtypes.void, (), next(_unique_ids))
    return UOp(Ops.BUFFER, dtype, (unique, device_node(device)), size)


def new_memory(dtype: DType, size: int, device: str = HOST) -> UOp:
    """Make a BUFFER to `assign` to that gets new memory each time the assigned value is computed. Each call makes a different node."""
    unique = UOp(Ops.LUNIQUE, dtypes.void, (), f"memory{next(_unique_ids)}")
    return UOp(Ops.BUFFER, dtype, (unique, device_node(device)), size)


def full(shape: Sequence[int], value: Scalar, dtype: DType) -> UOp:
    """Make a constant of `shape`, without memory."""
    shape = tuple(shape)
    if value and not isinstance(value, Dim):        # 0.0 equals -0.0
        return _filled(shape, value, dtype)
    return expand(reshape(number_of(value, dtype) if isinstance(value, Dim) else UOp.const(dtype, value), (1,) * len(shape)), shape)


@functools.lru_cache(1024, typed=True)
def _filled(shape: Shape, value: Scalar, dtype: DType) -> UOp:
    return expand(reshape(UOp.const(dtype, value), (1,) * len(shape)), shape)


def iota(n: int, dtype: DType = dtypes.int32) -> UOp:
    """Make the vector 0, 1, … n-1. Shape `(n,)`."""
    return full((0,), 0, dtype) if n == 0 else UOp(Ops.IOTA, dtype, (), n)


# -- movement -----------------------------------------------------------------------------------
def reshape(x: UOp, shape: Sequence[int]) -> UOp:
    """View x's elements, in row-major order, in another shape. One extent may be -1: it is computed from the others."""
    new, old = tuple(shape), shape_of(x)
    if -1 in new:
        if is_symbolic(old) or is_symbolic(new):
            return reshape(x, _with_known(old, new))
        known = math.prod(n for n in new if n != -1)
        if new.count(-1) > 1 or known == 0 or math.prod(old) % known:
            raise ShapeError(f"reshape of shape {old} to {new}: cannot work out the -1")
        new = tuple(math.prod(old) // known if n == -1 else n for n in new)
    if new == old:
        return x
    result = _made(UOp(Ops.RESHAPE, x.dtype, (x,), new))
    if x.op is Ops.RESHAPE and result.op is Ops.RESHAPE:
        return reshape(x.src[0], new)
    return result


def _with_known(old: Shape, new: Shape) -> Shape:
    """Return `new` with its -1 computed: extents that depend on variables are taken from `old`, except the unknown one."""
    left, rest = list(old), []
    for n in new:
        if n in left:
            left.remove(n)
        elif n != -1:
            rest.append(n)
    numbers = [n for n in left if not isinstance(n, Dim)]
    known = math.prod(rest)
    if new.count(-1) > 1 or is_symbolic(rest) or math.prod(numbers) % known:
        raise ShapeError(f"reshape of shape {old} to {new}: cannot work out the -1")
    missing = math.prod(n for n in left if isinstance(n, Dim)) * (math.prod(numbers) // known)
    return tuple(missing if n == -1 else n for n in new)


def permute(x: UOp, axes: Sequence[int]) -> UOp:
    """Permute the axes of x: axis i of the result is axis `axes[i]` of x."""
    rank = len(shape_of(x))
    order = tuple(axis_of("permute", a, rank) for a in axes)
    result = _made(UOp(Ops.PERMUTE, x.dtype, (x,), order))
    if x.op is Ops.PERMUTE:
        return permute(x.src[0], tuple(x.arg[a] for a in order))
    return x if order == tuple(range(rank)) else result


def expand(x: UOp, shape: Sequence[int]) -> UOp:
    """Repeat axes of extent 1; the number of axes stays."""
    new = tuple(shape)
    if new == shape_of(x):
        return x
    result = UOp(Ops.EXPAND, x.dtype, (x,), new)
    shape_of(result)
    if 0 in new:
        # not by full(), which calls this function
        zero = UOp.const(x.dtype, 0)
        return UOp(Ops.EXPAND, x.dtype, (reshape(zero, (1,) * len(new)),), new)
    return expand(x.src[0], new) if x.op is Ops.EXPAND else result


def broadcast(x: UOp, shape: Sequence[int], name: str = "expand") -> UOp:
    """Broadcast x to `shape` by NumPy's rule: missing leading axes are added, axes of extent 1 repeated. `name`: the operation, for
    error messages."""
    new, old = tuple(shape), shape_of(x)
    if new == old:
        return x
    if not can_broadcast(old, new):
        axis = next((-i for i in range(1, len(new) + 1) if i <= len(old) and old[-i] not in (1, new[-i])), None)
        why = f"{len(old)} axes do not become {len(new)}" if axis is None else \
            f"axis {axis} has extents {old[axis]} and {new[axis]}, which do not broadcast"
        raise ShapeError(f"{name} of shape {old} to {new}: {why}")
    return expand(reshape(x, (1,) * (len(new) - len(old)) + old), new)


def pad(x: UOp, pads: Sequence[Pair], fill: Scalar = 0) -> UOp:
    """Pad each axis: `pads` has a pair (before, after) for each, the numbers of elements `fill` to add."""
    pairs = tuple((lo, hi) for lo, hi in pads)
    const = UOp.const(x.dtype, fill)
    result = UOp(Ops.PAD, x.dtype, (x,), (pairs, const.arg))
    shape = shape_of(result)
    if 0 in shape_of(x):
        return full(shape, const.arg, x.dtype)
    return x if not any(lo != 0 or hi != 0 for lo, hi in pairs) else result


def shrink(x: UOp, bounds: Sequence[Pair]) -> UOp:
    """Take the part `begin <= i < end` of each axis."""
    pairs, old = tuple((b, e) for b, e in bounds), shape_of(x)
    if pairs == tuple((0, n) for n in old):
        return x
    result = _made(UOp(Ops.SHRINK, x.dtype, (x,), pairs))
    if x.op is Ops.SHRINK and result.op is Ops.SHRINK:
        return shrink(x.src[0], tuple((b0 + b, b0 + e) for (b0, _), (b, e) in zip(x.arg, pairs, strict=True)))
    return result


def flip(x: UOp, axes: int | Sequence[int]) -> UOp:
    """Reverse the given axes."""
    shape = shape_of(x)
    order = tuple(a for a in normalize_axes("flip", axes, len(shape)) if upper(shape[a]) > 1)
    return _made(UOp(Ops.FLIP, x.dtype, (x,), order)) if order else x


def window(x: UOp, windows: Sequence[tuple[int, int, int, int]]) -> UOp:
    """Take sliding windows of x. Each entry `(axis, size, stride, dilation)` of `windows` appends an axis of extent `size`; see
    docs/ir.md."""
    rank = len(shape_of(x))
    entries = tuple((axis_of("window", a, rank), size, stride, dilation) for a, size, stride, dilation in windows)
    return _made(UOp(Ops.WINDOW, x.dtype, (x,), entries)) if entries else x


def gather(x: UOp, index: UOp, axis: int) -> UOp:
    """Take elements of x as `numpy.take(x, index, axis)` does, but an index outside `[0, n)` gives 0."""
    axis = axis_of("gather", axis, len(shape_of(x)))
    result = UOp(Ops.GATHER, x.dtype, (x, index), axis)
    shape = shape_of(result)
    return full(shape, 0, x.dtype) if 0 in shape_of(x) or 0 in shape else on_one_device(result)


def cat(nodes: Sequence[UOp], axis: int) -> UOp:
    """Concatenate nodes of one dtype along `axis`. Nodes without elements are left out."""
    axis = axis_of("CAT", axis, len(shape_of(nodes[0])))
    result = UOp(Ops.CAT, nodes[0].dtype, tuple(nodes), axis)
    if 0 in shape_of(result):
        return full(shape_of(result), 0, result.dtype)
    parts = tuple(n for n in nodes if shape_of(n)[axis])
    return parts[0] if len(parts) == 1 else on_one_device(UOp(Ops.CAT, result.dtype, parts, axis))


# -- computation --------------------------------------------------------------------------------
def alu(op: Ops, *operands: UOp) -> UOp:
    """Make an elementwise node. The operands have one shape and one dtype, except the bool condition of a WHERE. Comparisons give bool.

    Raises ShapeError and DTypeError."""
    values = operands[1:] if op is Ops.WHERE else operands
    if any(v.dtype != values[0].dtype for v in values):
        raise DTypeError(f"{op.value} of dtypes {' and '.join(o.dtype.name for o in operands)}: cast the operands to one dtype first")
    if op is Ops.WHERE and operands[0].dtype != dtypes.bool:
        raise DTypeError(f"WHERE with a condition of {operands[0].dtype.name}: the condition must be bool")
    return on_one_device(_made(UOp(op, dtypes.bool if op in COMPARISONS else values[0].dtype, operands)))


def cast(x: UOp, dtype: DType) -> UOp:
    """Convert elements; returns x itself if it has that dtype."""
    if dtype == x.dtype:
        return x
    return _made(UOp(Ops.CAST, dtype, (x,)))


def bitcast(x: UOp, dtype: DType) -> UOp:
    """Reinterpret the bits of elements of the same size."""
    return x if dtype == x.dtype else _made(UOp(Ops.BITCAST, dtype, (x,)))


def reduce_axis(x: UOp, combiner: str, axes: Sequence[int]) -> UOp:
    """Reduce `axes` by a combiner of one component (`svod.core.ir.combiner`). Reduced axes keep extent 1; the result has x's dtype.

    A reduction over no elements gives the combiner's identity."""
    order = normalize_axes(f"REDUCE_AXIS {combiner}", tuple(axes), len(shape_of(x)))
    if not order:
        return x
    result = UOp(Ops.REDUCE_AXIS, x.dtype, (x,), (combiner, order))
    shape = shape_of(result)
    if 0 in shape_of(x):
        return full(shape, get_combiner(combiner).identity(x.dtype)[0], x.dtype)
    return result


def arg_reduce(value: UOp, index: UOp, combiner: str, axes: Sequence[int]) -> UOp:
    """Reduce pairs (value, index) by ARGMAX or ARGMIN: gives the index of the first extreme value; NaN counts as the extreme.

    Reduced axes keep extent 1; the result has the index's dtype. Raises ShapeError for a reduction over no elements."""
    shape = shape_of(value)
    order = normalize_axes(f"REDUCE_AXIS {combiner}", tuple(axes), len(shape))
    result = UOp(Ops.REDUCE_AXIS, value.dtype, (value, index), (combiner, order))
    if 0 in shape_of(result):
        return full(shape_of(result), 0, index.dtype)
    if 0 in shape:
        raise ShapeError(f"{combiner.lower()} of shape {shape} over axes {order}: there is no element to choose")
    return UOp(Ops.GEP, index.dtype, (result,), 1)


def library_kernel(name: str, options: tuple[bool | int | str, ...], dtype: DType, *operands: UOp) -> UOp:
    """Make a library kernel (`svod.core.graph.library_kernel`). Each operand is stored in a buffer first, unless it is a contiguous part of
    one. The result has `dtype`.

    Raises ShapeError for operands whose extents depend on variables."""
    for x in operands:
        if is_symbolic(shape_of(x)):
            raise ShapeError(f"{name.lower()} of shape {shape_of(x)}: a library kernel takes constant extents only; pad its operands to "
                             "the largest shape and take the part of the result, as the operations of Tensor do")
    device = next((d for x in operands if (d := device_of(x)) is not None), HOST)
    stored = [copy(x, device) if device != HOST and device_of(x) is None else
              contiguous(x) if part_of_memory(x, _gets_memory) is None else x for x in operands]
    return on_one_device(_made(UOp(Ops.CUSTOM_FUNCTION, dtype, tuple(stored), (name, options))))


def callback(function: HostFunction, results: Sequence[tuple[DType, Shape]], several: bool, *operands: UOp) -> tuple[UOp, ...]:
    """Make the results of a Python function (`svod.core.graph.callback`) that a plan calls when it computes them. Each operand is stored in
    a buffer first, with the strides of its largest shape; a result without elements is a constant."""
    given = tuple([(x.dtype, shape_of(x)) for x in operands])
    sources = tuple([x if is_padding_view(x) else copy(x, device_of(x) or HOST) if is_symbolic(shape_of(x)) else contiguous(x)
                     for x in operands if 0 not in shape_of(x)])
    nodes = [UOp(Ops.CUSTOM_FUNCTION, dtype, sources, (CALLBACK, (function, tuple(results), given, several, i)))
             for i, (dtype, _) in enumerate(results)]
    return tuple([on_one_device(_made(u)) for u in nodes])


# -- storage ------------------------------------------------------------------------------------
def is_memory(u: UOp) -> bool:
    """Whether a node is memory that a graph begins with, or what a write leaves there."""
    return u.op in (Ops.BUFFER, Ops.AFTER)


def _gets_memory(u: UOp) -> bool:
    """Whether a node is in memory before a library kernel reads it."""
    return is_memory(u) or u.op in (Ops.CONTIGUOUS, Ops.CUSTOM_FUNCTION)


def contiguous(x: UOp) -> UOp:
    """Copy x's elements in row-major order to a new buffer."""
    return x if x.op is Ops.CONTIGUOUS or 0 in shape_of(x) else UOp(Ops.CONTIGUOUS, x.dtype, (x,))


def detach(x: UOp) -> UOp:
    """Make a DETACH of x: the same value; DETACH is the identity."""
    return UOp(Ops.DETACH, x.dtype, (x,))


def copy(x: UOp, device: str) -> UOp:
    """Copy x to new memory on the same or another device."""
    return UOp(Ops.COPY, x.dtype, (x, device_node(device)))


def assign(target: UOp, value: UOp) -> UOp:
    """Write `value` to `target`, a view of a buffer; returns the flat content of the buffer after the write. In the same schedule, reads of
    the buffer that do not go through the returned node see the old content. Raises ScheduleError for a target that is not a view of a
    buffer."""
    written = on_one_device(UOp(Ops.ASSIGN, target.dtype, (target, value)))
    shape_of(written)
    content = content_under(target)
    assert content is not None
    return UOp(Ops.AFTER, target.dtype, (content, written))


def sink(*outputs: UOp) -> UOp:
    """Make the SINK of the roots of one schedule."""
    return UOp(Ops.SINK, dtypes.void, outputs)


def storage_view(buffer: UOp, shape: Shape) -> UOp:
    """View a BUFFER of `storage_size` elements as a row-major value of `shape`. If extents depend on variables, the strides are those of
    the largest shape."""
    if shape_of(buffer) == shape:
        return buffer
    whole = UOp(Ops.RESHAPE, buffer.dtype, (buffer,), layout_shape(shape))
    if not is_symbolic(shape):
        return whole
    view = UOp(Ops.SHRINK, buffer.dtype, (whole,), tuple([(0, n) for n in shape]))
    view.remarks.update({"shape": shape, "padding view": True})      # the results of `shape_of` and `is_padding_view`
    return view


def part_of_memory(u: UOp, is_stored: Callable[[UOp], bool] = is_memory) -> tuple[UOp, int] | None:
    """Return (the BUFFER or AFTER of which u is a contiguous part in the same order, u's first element in it); None if u is no such
    part. `is_stored`: tells which nodes are in memory, if others are as well."""
    first = 0
    while not is_stored(u):
        if u.op not in (Ops.RESHAPE, Ops.DETACH, Ops.SHRINK) or is_symbolic(shape_of(u)) or is_symbolic(shape_of(u.src[0])):
            return None
        if u.op is Ops.SHRINK:
            outer = shape_of(u.src[0])
            cut = [a for a, (begin, end) in enumerate(u.arg) if end - begin != outer[a]]
            if cut and any(end - begin != 1 for begin, end in u.arg[:cut[-1]]):
                return None
            first += sum(begin * math.prod(outer[a + 1:]) for a, (begin, _) in enumerate(u.arg))
        u = u.src[0]
    return u, first
