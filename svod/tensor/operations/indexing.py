"""Indexing: NumPy's basic indexing becomes views, integer tensors become gathers.

An int drops its axis, a slice selects a part of it with any step, None adds an axis, and Ellipsis stands for all axes without an entry.
These are SHRINK, FLIP, and WINDOW with windows of one element: index arithmetic without a copy or a gather.

A NumPy array or list of bools stands for the positions of its True elements (`numpy.nonzero`), whose number is known when the graph is
built. A Tensor mask raises UnsupportedError: use `where`, or `masked_select` with a size.

One integer tensor, list or array in an index is `take` along its axis. Several are broadcast against each other and read one element per
position. Their axes replace the first indexed axis if the indexed axes are adjacent; otherwise they come first. Ints are applied before the
tensors, as in PyTorch; NumPy treats them like tensors. Negative positions count from the end. A position out of range in a list or array,
whose values are known when the graph is built, raises an error; in a tensor it reads 0.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from svod.core.graph import graph
from svod.core.graph.shapes import broadcast_shapes, shape_of
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import Dim
from svod.errors import DTypeError, ShapeError, TensorIndexError, UnsupportedError
from svod.tensor.base import Array, TensorBase
from svod.tensor.creation import array_of_lists
from svod.tensor.operations.elementwise import Operand
from svod.tensor.operations.functions import Functions


class Indexing(Functions):
    """Indexing with `t[…]`, take, gather."""

    __slots__ = ()

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("len() of a tensor without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Self]:
        if not self.shape:
            raise ShapeError("iteration over a tensor without axes")
        return iter(self.unbind(0))

    def __getitem__(self, index: Any) -> Self:
        result, tensors = self._views(index)
        if not tensors:
            return result
        if len(tensors) == 1:
            axis, chosen = tensors[0]
            return result.take(chosen, axis)
        return result._take_points(tensors)

    def _views(self, index: Any) -> tuple[Self, list[tuple[int, Self]]]:
        """(the view that the ints and slices of an index select, the index tensors with their axes in that view)."""
        view, shape, tensors = self._basic(self._entries(index))
        return view.reshape(shape), tensors

    def _entries(self, index: Any) -> list[Any]:
        """The normalised entries of an index: an int, a slice, a tensor or an array of integers for each axis of self, and None for a
        new axis."""
        return self._with_all_axes(self._with_positions(list(index) if isinstance(index, tuple) else [index]))

    def _with_positions(self, entries: list[Any]) -> list[Any]:
        """Convert lists in an index to arrays, and masks of known values to positions."""
        result: list[Any] = []
        arrays = [array_of_lists(e) if isinstance(e, list) else e for e in entries]
        for i, e in enumerate(arrays):
            if not isinstance(e, np.ndarray):
                result.append(e)
            elif e.dtype != bool:
                result.append(e if e.size else e.astype(np.int64))
            else:
                behind = any(x is Ellipsis for x in result)
                result += self._mask_positions(e, self.ndim - _axes_named(arrays[i:]) if behind else _axes_named(result))
        return result

    def _mask_positions(self, mask: Array, first: int) -> list[Array]:
        """The positions of a mask's True elements, where the mask covers the axes from `first` on: an array for each axis of the mask."""
        if first < 0 or mask.ndim == 0 or mask.shape != self.shape[first:first + mask.ndim]:
            raise TensorIndexError(f"a mask of shape {mask.shape} for axes {first} … of {self.shape}: the extents must agree")
        return list(np.nonzero(mask))

    def _positions(self, name: str, index: Operand, n: int) -> Self:
        """Convert an index along an axis of extent n to a tensor. Raises TensorIndexError for a number, list or array with a position
        out of range."""
        chosen = self._as_tensor(np.zeros(0, np.int64) if isinstance(index, (list, tuple)) and not index else index)
        if isinstance(index, TensorBase) or isinstance(n, Dim) or not chosen.dtype.is_int or not chosen.numel():
            return chosen
        known = np.asarray(index)
        for position in (int(known.min()), int(known.max())):
            if not -n <= position < n:
                raise TensorIndexError(f"{name}: position {position} is out of range for an axis of extent {n}, of shape {self.shape}")
        return chosen

    def _with_all_axes(self, entries: list[Any]) -> list[Any]:
        """Replace the Ellipsis of an index, so that there is an entry for every axis of self."""
        dots = [i for i, e in enumerate(entries) if e is Ellipsis]
        named = sum(1 for e in entries if e is not None and e is not Ellipsis)
        if len(dots) > 1:
            raise TensorIndexError("an index can have one '...' only")
        if named > self.ndim:
            raise TensorIndexError(f"{named} indices for a tensor of shape {self.shape}")
        missing: list[Any] = [slice(None)] * (self.ndim - named)
        at = dots[0] if dots else len(entries)
        return entries[:at] + missing + entries[at + 1:]

    def _basic(self, entries: list[Any]) -> tuple[Self, tuple[int, ...], list[tuple[int, Self]]]:
        """Apply ints and slices. Returns (the view with all axes of self, the shape after dropping axes of ints and adding new axes, the
        index tensors with their axes in that shape)."""
        bounds: list[tuple[int, int]] = []
        reversed_axes: list[int] = []
        strides: list[tuple[int, int, int, int]] = []
        shape: list[int] = []
        tensors: list[tuple[int, Self]] = []
        axis = 0
        for e in entries:
            if e is None:
                shape.append(1)
                continue
            n = self.shape[axis]
            if isinstance(e, slice):
                begin, end, step, count = _slice_bounds(e, n)
                bounds.append((begin, end))
                if step < 0:
                    reversed_axes.append(axis)
                if abs(step) > 1 and count:
                    strides.append((axis, 1, abs(step), 1))
                shape.append(count)
            elif isinstance(e, (np.ndarray, type(self))):
                chosen = self._positions("indexing", e, n)
                if not chosen.dtype.is_int:
                    hint = ("; a mask chooses an unknown number of elements: use where(), masked_select(mask, size=…), or a mask of "
                            "known values, mask.numpy()") if chosen.dtype.kind == "b" else ""
                    raise UnsupportedError(f"indexing {self.shape} with a {chosen.dtype.name} tensor: use integers{hint}")
                tensors.append((len(shape), chosen))
                bounds.append((0, n))
                shape.append(n)
            else:
                position = _int_index(e, axis, self.shape)
                bounds.append((position, position + 1))
            axis += 1
        node = graph.flip(graph.shrink(self.uop, bounds), reversed_axes)
        if 0 not in shape_of(node):
            node = graph.window(node, strides)
        return self.from_uop(node), tuple(shape), tensors

    def _take_points(self, tensors: list[tuple[int, Self]]) -> Self:
        """One element (or sub-array) per position of the broadcast index tensors."""
        order, first, index = self._points(tensors)
        moved, last = self.permute(order), first + len(tensors)
        flat = moved.reshape(*moved.shape[:first], math.prod(moved.shape[first:last]), *moved.shape[last:])
        return flat.from_uop(graph.gather(flat.uop, index.uop, first))

    def _points(self, tensors: list[tuple[int, Self]]) -> tuple[list[int], int, Self]:
        """(an order of axes that makes the indexed axes adjacent, the position of the first of them, the positions of all points in the
        indexed axes flattened to one). These positions have the broadcast shape of the index tensors, and are -1 if out of range."""
        axes = [a for a, _ in tensors]
        together = axes == list(range(axes[0], axes[0] + len(axes)))
        first = axes[0] if together else 0
        rest = [a for a in range(self.ndim) if a not in axes]
        flat = self._flat_index("indexing", [t for _, t in tensors], [self.shape[a] for a in axes])
        return rest[:first] + axes + rest[first:], first, self.from_uop(flat)

    def _flat_index(self, name: str, indices: Sequence[TensorBase], extents: Sequence[int]) -> UOp:
        """Row-major positions of points given by one index tensor per axis; a position out of range becomes -1, which reads 0."""
        shape = broadcast_shapes(name, *(t.shape for t in indices))
        dtype = dtypes.int32 if math.prod(extents) < 2 ** 31 and all(t.dtype.bits <= 32 and t.dtype != dtypes.uint32
                                                                     for t in indices) else dtypes.int64
        flat: UOp | None = None
        valid: UOp | None = None
        for t, n in zip(indices, extents, strict=True):
            position = _wrapped(graph.broadcast(graph.cast(t.uop, dtype), shape), n)
            inside = graph.alu(Ops.AND, graph.alu(Ops.CMPLE, graph.full(shape, 0, dtype), position),
                               graph.alu(Ops.CMPLT, position, graph.full(shape, n, dtype)))
            valid = inside if valid is None else graph.alu(Ops.AND, valid, inside)
            flat = position if flat is None else graph.alu(Ops.ADD, graph.alu(Ops.MUL, flat, graph.full(shape, n, dtype)), position)
        assert flat is not None and valid is not None
        return graph.alu(Ops.WHERE, valid, flat, graph.full(shape, -1, dtype))

    def take(self, index: Operand, axis: int | None = None) -> Self:
        """Read elements at integer positions along `axis` (None: of the flattened tensor); the shape is `shape[:axis] + index.shape +
        shape[axis+1:]`. A position out of range raises TensorIndexError in a number, list or array, and reads 0 in a tensor."""
        if axis is None:
            return self.ravel().take(index, 0)
        at = self._axis("take", axis)
        chosen = self._positions("take", index, self.shape[at])
        if not chosen.dtype.is_int:
            raise DTypeError(f"take with an index of {chosen.dtype.name}: give integers")
        wide = graph.cast(chosen.uop, _index_dtype(chosen.dtype, self.shape[at]))
        return self.from_uop(graph.gather(self.uop, _wrapped(wide, self.shape[at]), at))

    def index_select(self, dim: int, index: Operand) -> Self:
        """Read slices with `take` along `dim` at one position or a list of positions."""
        chosen = self._positions("index_select", index, self.shape[self._axis("index_select", dim)])
        if chosen.ndim > 1:
            raise ShapeError(f"index_select of {self.shape} at {chosen.shape}: the index is a list; `take` has any shape")
        return self.take(chosen.ravel(), dim)

    def gather(self, dim: int, index: Operand) -> Self:
        """Read one element along `dim` for each element of `index`: `out[i][j][k] = self[index[i][j][k]][j][k]` for dim 0. `index` has
        as many axes as self and no larger extents along other axes."""
        axis = self._axis("gather", dim)
        chosen = self._positions("gather", index, self.shape[axis])
        fits = chosen.ndim == self.ndim and all(c <= n for i, (c, n) in enumerate(zip(chosen.shape, self.shape, strict=True)) if i != axis)
        if not fits:
            raise ShapeError(f"gather from {self.shape} along {dim} with an index of {chosen.shape}: the index needs as many "
                             "axes, and no larger extents along the others")
        if not chosen.dtype.is_int:
            raise DTypeError(f"gather with an index of {chosen.dtype.name}: give integers")
        if 0 in chosen.shape:
            return self.full(chosen.shape, 0, self.dtype)
        points: list[TensorBase] = []
        for i, n in enumerate(chosen.shape):
            along = graph.reshape(graph.iota(n), tuple(n if a == i else 1 for a in range(chosen.ndim)))
            points.append(chosen if i == axis else self.from_uop(along))
        return self.from_uop(graph.gather(self.ravel().uop, self._flat_index("gather", points, self.shape), 0))

    def take_along_dim(self, indices: Operand, dim: int) -> Self:
        """Read elements with `gather`, after broadcasting self and the indices against each other along the other axes."""
        at = self._axis("take_along_dim", dim)
        chosen = self._positions("take_along_dim", indices, self.shape[at])
        if chosen.ndim != self.ndim:
            raise ShapeError(f"take_along_dim of {self.shape} along {dim} at {chosen.shape}: both need the same number of axes")
        beside = broadcast_shapes("take_along_dim", *(t.shape[:at] + t.shape[at + 1:] for t in (self, chosen)),
                                        given=(self.shape, chosen.shape))
        source, wanted = (t.broadcast_to((*beside[:at], t.shape[at], *beside[at:])) for t in (self, chosen))
        return source.gather(at, wanted)

    def one_hot(self, num_classes: int) -> Self:
        """An int32 tensor with a new last axis: 1 at the position that each integer names, 0 elsewhere."""
        if not self.dtype.is_int:
            raise DTypeError(f"one_hot of {self.dtype.name}: give integers")
        return self.unsqueeze(-1).eq(self.arange(num_classes)).cast(dtypes.int32)


def _axes_named(entries: list[Any]) -> int:
    """The number of axes that entries of an index refer to. A mask refers to as many axes as it has."""
    return sum(e.ndim if isinstance(e, np.ndarray) and e.dtype == bool else 1 for e in entries if e is not None and e is not Ellipsis)


def _slice_bounds(s: slice, n: int) -> tuple[int, int, int, int]:
    """The interval (begin, end, step, number of positions) of a slice, with begin < end in either direction.

    A negative step reads the interval from its end. The interval is cut so that its last element is the first one read."""
    if any(isinstance(v, Dim) for v in (s.start, s.stop, s.step, n)):
        return _symbolic_bounds(s, n)
    try:
        start, stop, step = s.indices(n)
    except (TypeError, ValueError) as err:
        raise TensorIndexError(f"slice {s}: {err}") from err
    count = len(range(start, stop, step))
    if count == 0:
        return 0, 0, step, 0
    last = start + (count - 1) * step
    return (start, last + 1, step, count) if step > 0 else (last, start + 1, step, count)


def _symbolic_bounds(s: slice, n: int) -> tuple[int, int, int, int]:
    """Like `_slice_bounds`, with variables. Bounds are not clamped to the extent: they must be in range for all values of the variables."""
    if s.step not in (None, 1):
        raise UnsupportedError(f"slice {s} of an axis of extent {n}: where an extent depends on a variable the step is 1")
    start, stop = 0 if s.start is None else s.start, n if s.stop is None else s.stop
    begin, end = (v if isinstance(v, Dim) or v >= 0 else n + v for v in (start, stop))
    if isinstance(end, Dim) and not isinstance(n, Dim) and end.bounds[0] <= n < end.bounds[1]:
        raise ShapeError(f"slice :{end} of an axis of extent {n}: {end} is {end.bounds[0]} … {end.bounds[1]}, and a plan is one for all of "
                         f"it; slice a tensor whose extent is {end.bounds[1]} at least, declare a variable of smaller bounds, or use "
                         "svod.jit(…, dynamic=\"auto\"), which takes arrays of any length")
    if not begin <= end <= n:
        raise TensorIndexError(f"slice {s} of an axis of extent {n} ends before it begins, or goes beyond the end")
    return begin, end, 1, end - begin


def _int_index(e: Any, axis: int, shape: tuple[int, ...]) -> int:
    if isinstance(e, (bool, np.bool_)) or not hasattr(e, "__index__"):
        raise TensorIndexError(f"{e!r} cannot index a tensor: use ints, slices, None, ..., or integer tensors")
    n = shape[axis]
    if isinstance(e, Dim) or isinstance(n, Dim):
        at: int = e if isinstance(e, Dim) or e >= 0 else n + e
        if not 0 <= at < n:
            raise TensorIndexError(f"index {e} is out of range for axis {axis} of shape {shape}")
        return at
    position = e.__index__()
    if not -n <= position < n:
        raise TensorIndexError(f"index {position} is out of range for axis {axis} of shape {shape}")
    return int(position % n)


def _index_dtype(dtype: DType, n: int) -> DType:
    """The dtype that can represent an index of `dtype` after n has been added to a negative one."""
    if dtype.bits < 32 and n < 2 ** 31:
        return dtypes.int32
    return dtype if dtype.bits == 64 or n < 2 ** 31 else dtypes.int64


def _wrapped(index: UOp, n: int) -> UOp:
    """Add n to negative positions."""
    if not index.dtype.is_signed:
        return index
    shape = shape_of(index)
    negative = graph.alu(Ops.CMPLT, index, graph.full(shape, 0, index.dtype))
    return graph.alu(Ops.WHERE, negative, graph.alu(Ops.ADD, index, graph.full(shape, n, index.dtype)), index)
