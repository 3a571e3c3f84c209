"""The graph level: shapes of nodes, and the constructors that Tensor operations use (docs/ir.md, section 1).

`shape_of(u)` infers the shape of a graph node from its sources and caches it on the node. A shape is a tuple of ints, or of Dims where
extents depend on variables (`svod.core.ir.variable`). `shape_of` does all validation, so the same rules check a node built by hand and a
node built by a constructor. A constructor normalises its argument (negative axes, a -1 in a shape), drops what changes nothing (a reshape
to the same shape, a permutation of a permutation) and returns a valid node or raises ShapeError with the operation and the shapes.

Nodes without elements do not survive: a constructor whose result has an extent 0 returns a zero CONST expanded to that
shape, and one that consumes such a node (a reduction, PAD, GATHER) returns the constant it comes to. So a graph whose
outputs have elements holds no node without elements.
"""
from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import SupportsIndex

from svod.core.graph.callback import CALLBACK, HostFunction
from svod.core.graph.library_kernel import shape_of_library_kernel
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import ALU, COMPARISONS, MOVEMENT, Ops, UOp
from svod.core.ir.variable import Dim, is_symbolic, layout_shape, lower, number_of, upper, upper_shape
from svod.core.machine.target import DISK, HOST
from svod.errors import DeviceError, DTypeError, ScheduleError, ShapeError

Shape = tuple[int, ...]
Pair = tuple[int, int]
Scalar = bool | int | float

_SCALAR_OPS = frozenset({Ops.CONST, Ops.DEFINE_VAR, Ops.BIND})
_SAME_SHAPE_OPS = frozenset({Ops.CONTIGUOUS, Ops.COPY, Ops.DETACH, Ops.CAST, Ops.BITCAST})
_unique_ids = itertools.count()


# -- shapes -------------------------------------------------------------------------------------
def shape_of(u: UOp) -> Shape:
    """The shape of a graph node. Raises ShapeError for a malformed node and for one that has no shape (SINK, DEVICE, …)."""
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
    """Number of elements of a graph node; of the largest, where it depends on variables."""
    return math.prod(upper_shape(shape_of(u)))


def storage_size(u: UOp) -> int:
    """Number of elements of a buffer that holds a graph node (`storage_view`)."""
    return math.prod(layout_shape(shape_of(u)))


def storage_view(buffer: UOp, shape: Shape) -> UOp:
    """A BUFFER of `storage_size` elements as a value of `shape`, row-major; where extents vary with the strides of the largest shape."""
    if shape_of(buffer) == shape:
        return buffer
    whole = UOp(Ops.RESHAPE, buffer.dtype, (buffer,), layout_shape(shape))
    return UOp(Ops.SHRINK, buffer.dtype, (whole,), tuple((0, n) for n in shape)) if is_symbolic(shape) else whole


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
        raise ScheduleError(f"{u.op.value} to {_unassignable(target)} of shape {shape_of(target)}: the target must be a buffer, or a view "
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
    """Raise ScheduleError for a source of an AFTER that is not an ASSIGN, a whole STORE, a CALL or the END of one."""
    if d.op is Ops.END and (not d.src or d.src[0].op not in (Ops.CALL, Ops.END)):
        raise ScheduleError(f"AFTER names a BUFFER and an END that must wrap a CALL, found {d.src[0].op.value if d.src else 'nothing'}")
    if d.op not in (Ops.ASSIGN, Ops.STORE, Ops.CALL, Ops.END):
        raise ScheduleError(f"AFTER names a BUFFER and, as what was done to it, ASSIGNs or STOREs to it or a CALL, END(CALL) or AFTER; "
                            f"found {d.op.value}")
    if d.op is Ops.STORE:
        if len(d.src) != 2:
            raise ScheduleError(f"STORE under an AFTER takes a view of the buffer and a value, found {len(d.src)} sources")
        _assign_shape(d)


def is_kernel_store(u: UOp) -> bool:
    """Whether u is a STORE of a kernel, to an element of a PARAM. Under an AFTER it orders nothing: whoever calls the kernel does."""
    return u.op is Ops.STORE and bool(u.src) and u.src[0].op is Ops.INDEX and u.src[0].src[0].op is Ops.PARAM


def _cat_shape(u: UOp) -> Shape:
    first, axis = shape_of(u.src[0]), u.arg
    if not 0 <= axis < len(first) or any(_beside(shape_of(s), axis) != _beside(first, axis) or s.dtype != u.dtype for s in u.src):
        raise ShapeError(f"CAT of shapes {_shapes(u.src)} along axis {axis}: all other extents and the dtypes must agree")
    return (*first[:axis], sum(shape_of(s)[axis] for s in u.src), *first[axis + 1:])


def _beside(shape: Shape, axis: int) -> tuple[int, ...]:
    """The extents of all axes except `axis`, and the number of axes."""
    return (len(shape), *shape[:axis], *shape[axis + 1:])


def _reshape_shape(u: UOp) -> Shape:
    old = shape_of(u.src[0])
    if any(n < 0 for n in u.arg) or math.prod(old) != math.prod(u.arg):
        raise ShapeError(f"reshape of shape {old} to {u.arg}: {math.prod(old)} elements do not make {math.prod(u.arg)}")
    if is_symbolic(old) or is_symbolic(u.arg):
        _check_symbolic_reshape(old, u.arg)
    return tuple(u.arg)


def _check_symbolic_reshape(old: Shape, new: Shape) -> None:
    """Refuse a reshape that splits or merges axes other than outside an extent that depends on variables."""
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
    """Smallest groups of axes (begin, end in shape; begin, end in source) with the same number of elements; 1s go anywhere.

    Raises IndexError where there are none."""
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


def _made(u: UOp) -> UOp:
    """Check `u` and return it, or a constant of the same shape if it has no elements."""
    shape = shape_of(u)
    return u if 0 not in shape else full(shape, 0, u.dtype)


def _axis(name: str, axis: int, rank: int) -> int:
    if not isinstance(axis, SupportsIndex):
        raise ShapeError(f"{name}: {axis!r} is not an axis: give ints")
    axis = operator.index(axis)
    if not -rank <= axis < rank:
        raise ShapeError(f"{name}: axis {axis} of a tensor with {rank} axes" + (f"; use {-rank} … {rank - 1}" if rank else ""))
    return axis % rank


def normalize_axes(name: str, axes: int | Sequence[int] | None, rank: int) -> Shape:
    """Axes as a sorted tuple of ints ≥ 0; None means all. Raises ShapeError with `name` for an axis out of range or given twice."""
    if axes is None:
        return tuple(range(rank))
    given = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    normalized = sorted(_axis(name, a, rank) for a in given)
    if len(set(normalized)) != len(normalized):
        raise ShapeError(f"{name}: axes {given} of a tensor with {rank} axes name an axis twice")
    return tuple(normalized)


# -- devices ------------------------------------------------------------------------------------
class _Devices:
    """Whether any node of this process is on another device than the host: before, there is nothing to check."""

    are_named = False


_NO_VALUE = frozenset({Ops.DEVICE, Ops.UNIQUE, Ops.LUNIQUE})


def device_of(u: UOp) -> str | None:
    """The device that a graph node's value is on: that of the memory that it is computed from. None for a value that reads no memory, which
    can be computed anywhere. Raises DeviceError for a node that is computed from values of two devices."""
    cache = u._cache
    if cache is None or "device" not in cache:
        for node in u.toposort(gate=_has_no_device_yet):
            node.cached("device", _infer_device)
    return u.cached("device", _infer_device)      # type: ignore[no-any-return]


def _has_no_device_yet(u: UOp) -> bool:
    return u._cache is None or "device" not in u._cache


def _infer_device(u: UOp) -> str | None:
    if u.op is Ops.BUFFER or u.op is Ops.COPY:
        name: str = u.src[1].arg
        return name
    if u.op is Ops.MSTACK or u.op is Ops.SINK:      # values side by side
        return device_of(u.src[0]) if u.src else None
    if u.op is Ops.MSELECT and (stack := stack_of(u.src[0])) is not None and 0 <= u.arg < len(stack.src):
        return device_of(stack.src[u.arg])
    found = None
    for s in u.src:
        other = device_of(s) if s.op not in _NO_VALUE else None
        if other is not None and other != found:
            if found is not None:
                name = u.arg[0].lower() if u.op is Ops.CUSTOM_FUNCTION else u.op.value
                computing = [device for device in (found, other) if not device.startswith(DISK)]
                which = "one of them" if len(computing) == 2 else "what lies in a file"
                where = " or ".join(f".to({device!r})" for device in computing or [HOST])
                raise DeviceError(f"{name} of values on {found} and on {other}: an operation computes on one device; copy {which}, {where}")
            found = other
    return found


def readers_devices(sink: UOp) -> dict[UOp, set[str]]:
    """The devices of what is computed from each value that reads no memory; of what nobody computes with, the host."""
    found: dict[UOp, set[str]] = {}
    for u in reversed(list(sink.toposort())):
        own = device_of(u) if u.op is not Ops.SINK else HOST
        for s in u.src:
            if s.op not in _NO_VALUE and device_of(s) is None:
                found.setdefault(s, set()).update((own,) if own is not None else found.get(u, ()))
    return found


def stack_of(u: UOp) -> UOp | None:
    """An MSTACK that a value of several devices is computed from, part by part; None for a value of one device."""
    for node in u.toposort(gate=lambda n: n._cache is None or "stack" not in n._cache):
        node.cached("stack", _infer_stack)
    found: UOp | None = u.cached("stack", _infer_stack)
    return found


def _infer_stack(u: UOp) -> UOp | None:
    if u.op is Ops.MSTACK:
        return u
    return None if u.op in (Ops.MSELECT, Ops.CALL, Ops.END) else next((found for s in u.src if (found := stack_of(s)) is not None), None)


def part_of_memory(u: UOp) -> tuple[UOp, int] | None:
    """The BUFFER or AFTER of which u is a contiguous part, in its order, and the element at which it begins; None for any other node."""
    first = 0
    while u.op not in (Ops.BUFFER, Ops.AFTER):
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


def is_transfer(copy: UOp) -> bool:
    """Whether a COPY moves a value from one device to another. What reads no memory is computed where the copy is to be."""
    return device_of(copy.src[0]) not in (None, copy.src[1].arg)


def _on_one_device(u: UOp) -> UOp:
    """Return u. Raises DeviceError if its operands are on two devices."""
    if _Devices.are_named:
        device_of(u)
    return u


# -- sources ------------------------------------------------------------------------------------
def buffer(dtype: DType, size: int, device: str = HOST) -> UOp:
    """A new BUFFER, different from every other: storage of `size` elements. Shape `(size,)`."""
    unique = UOp(Ops.UNIQUE, dtypes.void, (), next(_unique_ids))
    return UOp(Ops.BUFFER, dtype, (unique, _device(device)), size)


def _device(name: str) -> UOp:
    if name != HOST:
        _Devices.are_named = True
    return UOp(Ops.DEVICE, dtypes.void, (), name)


def new_memory(dtype: DType, size: int, device: str = HOST) -> UOp:
    """A BUFFER for `assign`, different from every other. Each computation of the assigned value gets new memory for it."""
    unique = UOp(Ops.LUNIQUE, dtypes.void, (), f"memory{next(_unique_ids)}")
    return UOp(Ops.BUFFER, dtype, (unique, _device(device)), size)


def full(shape: Sequence[int], value: Scalar, dtype: DType) -> UOp:
    """A constant of `shape`: nothing is stored."""
    shape = tuple(shape)
    if value and not isinstance(value, Dim):        # 0.0 equals -0.0
        return _filled(shape, value, dtype)
    return expand(reshape(number_of(value, dtype) if isinstance(value, Dim) else UOp.const(dtype, value), (1,) * len(shape)), shape)


@functools.lru_cache(1024, typed=True)
def _filled(shape: Shape, value: Scalar, dtype: DType) -> UOp:
    return expand(reshape(UOp.const(dtype, value), (1,) * len(shape)), shape)


def iota(n: int, dtype: DType = dtypes.int32) -> UOp:
    """0, 1, … n-1. Shape `(n,)`."""
    return full((0,), 0, dtype) if n == 0 else UOp(Ops.IOTA, dtype, (), n)


# -- movement -----------------------------------------------------------------------------------
def reshape(x: UOp, shape: Sequence[int]) -> UOp:
    """Row-major reinterpretation; one entry may be -1 and is worked out."""
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
    """`new` with its -1 worked out: extents that depend on variables are those of `old`, but for the unknown one."""
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
    """Axis i of the result is axis `axes[i]` of x."""
    rank = len(shape_of(x))
    order = tuple(_axis("permute", a, rank) for a in axes)
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
        # built by hand: full() comes here, too
        zero = UOp.const(x.dtype, 0)
        return UOp(Ops.EXPAND, x.dtype, (reshape(zero, (1,) * len(new)),), new)
    return expand(x.src[0], new) if x.op is Ops.EXPAND else result


def broadcast(x: UOp, shape: Sequence[int], name: str = "expand") -> UOp:
    """x to `shape` by NumPy's rule: missing leading axes are added, axes of extent 1 repeated. Errors name `name`."""
    new, old = tuple(shape), shape_of(x)
    if new == old:
        return x
    if not can_broadcast(old, new):
        axis = next((-i for i in range(1, len(new) + 1) if i <= len(old) and old[-i] not in (1, new[-i])), None)
        why = f"{len(old)} axes do not become {len(new)}" if axis is None else \
            f"axis {axis} has extents {old[axis]} and {new[axis]}, which do not broadcast"
        raise ShapeError(f"{name} of shape {old} to {new}: {why}")
    return expand(reshape(x, (1,) * (len(new) - len(old)) + old), new)


def can_broadcast(old: Shape, new: Shape) -> bool:
    """Whether `old` broadcasts to `new` by NumPy's rule."""
    return len(old) <= len(new) and all(o in (1, n) for o, n in zip(reversed(old), reversed(new), strict=False))


def broadcast_shapes(name: str, *shapes: Shape, given: Sequence[Shape] | None = None) -> Shape:
    """The common shape by NumPy's broadcasting rule; ShapeError naming `name` and all shapes where there is none.

    `given`: the operands' shapes in full, where `shapes` are only their leading axes: the error shows them."""
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


def pad(x: UOp, pads: Sequence[Pair], fill: Scalar = 0) -> UOp:
    """`(before, after)` elements of `fill` around each axis."""
    pairs = tuple((lo, hi) for lo, hi in pads)
    const = UOp.const(x.dtype, fill)
    result = UOp(Ops.PAD, x.dtype, (x,), (pairs, const.arg))
    shape = shape_of(result)
    if 0 in shape_of(x):
        return full(shape, const.arg, x.dtype)
    return x if not any(lo != 0 or hi != 0 for lo, hi in pairs) else result


def shrink(x: UOp, bounds: Sequence[Pair]) -> UOp:
    """The part `begin <= i < end` of each axis."""
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
    """Sliding windows `(axis, size, stride, dilation)`: one axis of `size` per entry is appended; see docs/ir.md."""
    rank = len(shape_of(x))
    entries = tuple((_axis("window", a, rank), size, stride, dilation) for a, size, stride, dilation in windows)
    return _made(UOp(Ops.WINDOW, x.dtype, (x,), entries)) if entries else x


def gather(x: UOp, index: UOp, axis: int) -> UOp:
    """`numpy.take(x, index, axis)`; an index outside `[0, n)` reads 0."""
    axis = _axis("gather", axis, len(shape_of(x)))
    result = UOp(Ops.GATHER, x.dtype, (x, index), axis)
    shape = shape_of(result)
    return full(shape, 0, x.dtype) if 0 in shape_of(x) or 0 in shape else _on_one_device(result)


def cat(nodes: Sequence[UOp], axis: int) -> UOp:
    """Concatenate nodes of one dtype along `axis`. Nodes without elements are left out."""
    axis = _axis("CAT", axis, len(shape_of(nodes[0])))
    result = UOp(Ops.CAT, nodes[0].dtype, tuple(nodes), axis)
    if 0 in shape_of(result):
        return full(shape_of(result), 0, result.dtype)
    parts = tuple(n for n in nodes if shape_of(n)[axis])
    return parts[0] if len(parts) == 1 else _on_one_device(UOp(Ops.CAT, result.dtype, parts, axis))


# -- computation --------------------------------------------------------------------------------
def alu(op: Ops, *operands: UOp) -> UOp:
    """An elementwise node over operands of one shape and, but for the condition of a WHERE, one dtype. Comparisons give bool.

    Raises ShapeError and DTypeError."""
    values = operands[1:] if op is Ops.WHERE else operands
    if any(v.dtype != values[0].dtype for v in values):
        raise DTypeError(f"{op.value} of dtypes {' and '.join(o.dtype.name for o in operands)}: cast the operands to one dtype first")
    if op is Ops.WHERE and operands[0].dtype != dtypes.bool:
        raise DTypeError(f"WHERE with a condition of {operands[0].dtype.name}: the condition must be bool")
    return _on_one_device(_made(UOp(op, dtypes.bool if op in COMPARISONS else values[0].dtype, operands)))


def cast(x: UOp, dtype: DType) -> UOp:
    """Convert elements; x itself where it has that dtype."""
    if dtype == x.dtype:
        return x
    return _made(UOp(Ops.CAST, dtype, (x,)))


def bitcast(x: UOp, dtype: DType) -> UOp:
    """Reinterpret the bits of elements of the same size."""
    return x if dtype == x.dtype else _made(UOp(Ops.BITCAST, dtype, (x,)))


def reduce_axis(x: UOp, combiner: str, axes: Sequence[int]) -> UOp:
    """Reduce `axes` by a combiner of one component (`svod.core.ir.combiner`); they stay with extent 1. The result has x's dtype.

    No elements give the combiner's identity."""
    order = normalize_axes(f"REDUCE_AXIS {combiner}", tuple(axes), len(shape_of(x)))
    if not order:
        return x
    result = UOp(Ops.REDUCE_AXIS, x.dtype, (x,), (combiner, order))
    shape = shape_of(result)
    if 0 in shape_of(x):
        return full(shape, get_combiner(combiner).identity(x.dtype)[0], x.dtype)
    return result


def arg_reduce(value: UOp, index: UOp, combiner: str, axes: Sequence[int]) -> UOp:
    """ARGMAX or ARGMIN over pairs (value, index): the index of the first extreme value. NaN counts as the extreme.

    The axes stay with extent 1; the result has the index's dtype. Raises ShapeError where there is nothing to choose from."""
    shape = shape_of(value)
    order = normalize_axes(f"REDUCE_AXIS {combiner}", tuple(axes), len(shape))
    result = UOp(Ops.REDUCE_AXIS, value.dtype, (value, index), (combiner, order))
    if 0 in shape_of(result):
        return full(shape_of(result), 0, index.dtype)
    if 0 in shape:
        raise ShapeError(f"{combiner.lower()} of shape {shape} over axes {order}: there is no element to choose")
    return UOp(Ops.GEP, index.dtype, (result,), 1)


def library_kernel(name: str, options: tuple[bool | int | str, ...], dtype: DType, *operands: UOp) -> UOp:
    """A library kernel (`svod.core.graph.library_kernel`) over operands that get buffers of their own. The result has `dtype`.

    Raises ShapeError for operands whose extents depend on variables."""
    for x in operands:
        if is_symbolic(shape_of(x)):
            raise ShapeError(f"{name.lower()} of shape {shape_of(x)}: a library kernel takes constant extents only; pad its operands to "
                             "the largest shape and take the part of the result, as the operations of Tensor do")
    device = next((d for x in operands if (d := device_of(x)) is not None), HOST)
    stored = [contiguous(x) if device == HOST or device_of(x) is not None else copy(x, device) for x in operands]
    return _on_one_device(_made(UOp(Ops.CUSTOM_FUNCTION, dtype, tuple(stored), (name, options))))


def callback(function: HostFunction, results: Sequence[tuple[DType, Shape]], several: bool, *operands: UOp) -> tuple[UOp, ...]:
    """The results of a function of Python (`svod.core.graph.callback`), called when they are computed. Operands get buffers of their own,
    with the strides of their largest shapes; results without elements are constants."""
    given = tuple([(x.dtype, shape_of(x)) for x in operands])
    sources = tuple([x if is_padding_view(x) else copy(x, device_of(x) or HOST) if is_symbolic(shape_of(x)) else contiguous(x)
                     for x in operands if 0 not in shape_of(x)])
    nodes = [UOp(Ops.CUSTOM_FUNCTION, dtype, sources, (CALLBACK, (function, tuple(results), given, several, i)))
             for i, (dtype, _) in enumerate(results)]
    return tuple([_on_one_device(_made(u)) for u in nodes])


# -- storage ------------------------------------------------------------------------------------
def contiguous(x: UOp) -> UOp:
    """A buffer of its own with x's elements in row-major order."""
    return x if x.op is Ops.CONTIGUOUS or 0 in shape_of(x) else UOp(Ops.CONTIGUOUS, x.dtype, (x,))


def detach(x: UOp) -> UOp:
    """Identity."""
    return UOp(Ops.DETACH, x.dtype, (x,))


def copy(x: UOp, device: str) -> UOp:
    """x in memory of its own on a device, its own or another."""
    return UOp(Ops.COPY, x.dtype, (x, _device(device)))


def assign(target: UOp, value: UOp) -> UOp:
    """What a buffer holds, flat, after `value` was written to `target`, a view of it. A read of the buffer that does not go through
    this node, in the same schedule, is of the old content. Raises ScheduleError for a target that is not a view of a buffer."""
    written = _on_one_device(UOp(Ops.ASSIGN, target.dtype, (target, value)))
    shape_of(written)
    content = content_under(target)
    assert content is not None
    return UOp(Ops.AFTER, target.dtype, (content, written))


def content_under(view: UOp) -> UOp | None:
    """The BUFFER or AFTER of which `view` shows elements, each once; None for any other node."""
    while _shows_once(view):
        view = view.src[0]
    return view if view.op in (Ops.BUFFER, Ops.AFTER) else None


def _shows_once(u: UOp) -> bool:
    """Whether u is a view that shows elements of its source, none of them twice."""
    if u.op is Ops.WINDOW:
        return all(dilation * (size - 1) < stride for _, size, stride, dilation in u.arg)
    return u.op is Ops.DETACH or (u.op in MOVEMENT and u.op not in (Ops.EXPAND, Ops.PAD))


def _unassignable(view: UOp) -> str:
    while _shows_once(view):
        view = view.src[0]
    return view.op.value


def storage_of(content: UOp) -> UOp:
    """The BUFFER of which a BUFFER or AFTER denotes a version of the content."""
    storage, _ = history_of(content)
    return storage


def is_made_anew(storage: UOp) -> bool:
    """Whether each computation of the content of a BUFFER gets new memory for it."""
    return storage.src[0].op is Ops.LUNIQUE


def history_of(content: UOp) -> tuple[UOp, int]:
    """(storage, how many AFTERs led to this content). Remembered on the node."""
    later: list[UOp] = []
    node = content
    while node.op is Ops.AFTER and not (node._cache and "history" in node._cache):
        later.append(node)
        node = node.src[0]
    storage, number = node._cache["history"] if node._cache and "history" in node._cache else (node, 0)
    for node in reversed(later):
        number += 1
        node.cached("history", lambda _, history=(storage, number): history)  # type: ignore[misc]
    return storage, number


def sink(*outputs: UOp) -> UOp:
    """The roots of one schedule."""
    return UOp(Ops.SINK, dtypes.void, outputs)


def base_of(u: UOp) -> UOp:
    """What lies under the RESHAPEs and DETACHes of u, and under a `storage_view`: the BUFFER of a realised tensor, the AFTER of one that
    was assigned to, or the node that computes it."""
    while u.op is Ops.RESHAPE or u.op is Ops.DETACH or is_padding_view(u):
        u = u.src[0]
    return u


def is_padding_view(u: UOp) -> bool:
    """Whether u is the used part of a buffer that has room for the largest shape, or of what an assignment leaves of one."""
    return (u.op is Ops.SHRINK and is_symbolic([e for _, e in u.arg]) and u.src[0].op is Ops.RESHAPE
            and u.src[0].src[0].op in (Ops.BUFFER, Ops.AFTER)
            and all(type(b) is int and b == 0 for b, _ in u.arg)
            and u.src[0].arg == layout_shape([e for _, e in u.arg]))

