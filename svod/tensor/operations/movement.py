"""Operations that only move elements. They are views in the graph and cost index arithmetic at most."""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar

from svod.core.graph import graph
from svod.core.graph.shapes import normalize_axes
from svod.core.ir.uop import Ops
from svod.errors import ArgumentError, ShapeError, UnsupportedError
from svod.tensor.base import Scalar, TensorBase, check_scalar, common_dtype, shape_argument
from svod.tensor.creation import Creation, coordinates

TensorT = TypeVar("TensorT", bound=TensorBase)


class Movement(Creation):
    """Views, joins and splits."""

    __slots__ = ()

    # -- shape -----------------------------------------------------------------------------------
    def reshape(self, *shape: int | Sequence[int]) -> Self:
        """Change the shape; elements keep their row-major order, and one entry may be -1."""
        return self.from_uop(graph.reshape(self.uop, shape_argument(shape)))

    def view(self, *shape: int | Sequence[int]) -> Self: return self.reshape(*shape)
    def reshape_as(self, other: TensorBase) -> Self: return self.reshape(other.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Merge the axes start_dim … end_dim into one."""
        if self.ndim == 0:
            return self.reshape(1).flatten(start_dim, end_dim)
        first, last = self._axis("flatten", start_dim), self._axis("flatten", end_dim)
        if first > last:
            raise ShapeError(f"flatten of {self.shape} from axis {start_dim} to {end_dim}: the first comes after the last")
        return self.reshape(*self.shape[:first], math.prod(self.shape[first:last + 1]), *self.shape[last + 1:])

    def ravel(self) -> Self:
        """Merge all axes into one."""
        return self.reshape(self.numel())

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Split axis `dim` into axes of extents `sizes`; one may be -1."""
        axis, sizes = self._axis("unflatten", dim), shape_argument(sizes)
        known = math.prod(n for n in sizes if n != -1)
        if sizes.count(-1) > 1 or (-1 in sizes and (known == 0 or self.shape[axis] % known)):
            raise ShapeError(f"unflatten of axis {dim} of {self.shape} into {sizes}: cannot work out the -1")
        whole = tuple(self.shape[axis] // known if n == -1 else n for n in sizes)
        return self.reshape(*self.shape[:axis], *whole, *self.shape[axis + 1:])

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Self:
        """Drop axes of extent 1: all of them, or only those among `dim`."""
        axes = normalize_axes("squeeze", dim, self.ndim)
        return self.reshape(tuple(n for i, n in enumerate(self.shape) if not (n == 1 and i in axes)))

    def unsqueeze(self, dim: int) -> Self:
        """Add an axis of extent 1 at `dim`; -1 adds it after the last one."""
        axis = normalize_axes("unsqueeze", dim, self.ndim + 1)[0]
        return self.reshape((*self.shape[:axis], 1, *self.shape[axis:]))

    # -- order -----------------------------------------------------------------------------------
    def permute(self, *dims: int | Sequence[int]) -> Self:
        """Reorder the axes: axis i of the result is axis `dims[i]` of self."""
        return self.from_uop(graph.permute(self.uop, shape_argument(dims)))

    def transpose(self, dim0: int = 1, dim1: int = 0) -> Self:
        """Exchange two axes."""
        order = list(range(self.ndim))
        a, b = self._axis("transpose", dim0), self._axis("transpose", dim1)
        order[a], order[b] = order[b], order[a]
        return self.permute(order)

    def swapaxes(self, axis0: int, axis1: int) -> Self: return self.transpose(axis0, axis1)

    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Self:
        """Move axis `source` to position `destination`, or several axes to one position each."""
        a, b = ([self._axis("movedim", i) for i in ([axes] if isinstance(axes, int) else axes)] for axes in (source, destination))
        if len(a) != len(b) or len(set(a)) < len(a) or len(set(b)) < len(b):
            raise ShapeError(f"movedim of {self.shape} from {source} to {destination}: give as many positions as axes, each once")
        order = [i for i in range(self.ndim) if i not in a]
        for to, axis in sorted(zip(b, a, strict=True)):
            order.insert(to, axis)
        return self.permute(order)

    @property
    def T(self) -> Self:
        """The tensor with its axes in reverse order."""
        return self.permute(tuple(range(self.ndim))[::-1])

    @property
    def mT(self) -> Self:
        """The tensor with its last two axes exchanged."""
        return self.transpose(-2, -1)

    def t(self) -> Self:
        """The transpose of a matrix; a vector or scalar is returned unchanged. Raises ShapeError for more than two axes."""
        if self.ndim > 2:
            raise ShapeError(f"t of {self.shape}: it takes at most two axes; use T, mT or transpose")
        return self.T

    def flip(self, *axes: int | Sequence[int], dims: int | Sequence[int] = ()) -> Self:
        """Reverse axes, given as arguments, a sequence, or `dims`."""
        return self.from_uop(graph.flip(self.uop, shape_argument(axes or (dims,))))

    # -- repetition ------------------------------------------------------------------------------
    def expand(self, *sizes: int | Sequence[int]) -> Self:
        """Repeat axes of extent 1 and add new leading axes; -1 keeps an extent."""
        wanted = shape_argument(sizes)
        missing = len(wanted) - self.ndim
        kept = tuple(self.shape[i - missing] if n == -1 and i >= missing else n for i, n in enumerate(wanted))
        return self._broadcast("expand", kept)

    def expand_as(self, other: TensorBase) -> Self:
        """Expand to the shape of `other`."""
        return self.from_uop(graph.broadcast(self.uop, other.shape, "expand_as"))

    def broadcast_to(self, shape: Sequence[int]) -> Self:
        """Broadcast the tensor to `shape`."""
        return self._broadcast("broadcast_to", shape_argument(shape))

    def _broadcast(self, name: str, shape: tuple[int, ...]) -> Self:
        if any(n < 0 for n in shape):
            hint = "; -1 keeps the extent of an existing axis" if name == "expand" else "; expand takes -1 to keep an extent"
            raise ShapeError(f"{name} of {self.shape} to {shape}: an extent cannot be negative{hint}")
        return self.from_uop(graph.broadcast(self.uop, shape, name))

    def repeat(self, *repeats: int | Sequence[int]) -> Self:
        """Repeat the tensor `repeats[i]` times along axis i. More counts than axes add leading axes."""
        counts = shape_argument(repeats)
        missing = len(counts) - self.ndim
        if missing < 0 or any(n < 0 for n in counts):
            raise ShapeError(f"repeat of {self.shape} by {counts}: give a non-negative count for each axis")
        shape = (1,) * missing + self.shape
        pairs = self.reshape(tuple(n for s in shape for n in (1, s)))
        wide = pairs.expand(tuple(n for c, s in zip(counts, shape, strict=True) for n in (c, s)))
        return wide.reshape(tuple(c * s for c, s in zip(counts, shape, strict=True)))

    def tile(self, *repeats: int | Sequence[int]) -> Self:
        """Repeat the tensor; as in NumPy, fewer counts than axes apply to the last axes."""
        counts = shape_argument(repeats)
        return self.repeat((1,) * (self.ndim - len(counts)) + counts)

    def repeat_interleave(self, repeats: int, dim: int | None = None) -> Self:
        """Repeat each element `repeats` times in a row along `dim`; None flattens first."""
        if dim is None:
            return self.ravel().repeat_interleave(repeats, 0)
        axis = self._axis("repeat_interleave", dim)
        if repeats < 0:
            raise ShapeError(f"repeat_interleave of {self.shape} by {repeats}: the number cannot be negative")
        before, n, after = self.shape[:axis], self.shape[axis], self.shape[axis + 1:]
        wide = self.reshape(*before, n, 1, *after).expand(*before, n, repeats, *after)
        return wide.reshape(*before, n * repeats, *after)

    # -- edges -----------------------------------------------------------------------------------
    def pad(self, pad: Sequence[int] | Sequence[tuple[int, int] | None], mode: str = "constant", value: Scalar = 0) -> Self:
        """Add elements before and after each axis; negative counts remove elements.

        `pad` is flat as in PyTorch, `(before, after)` of the last axis, then of the axis before it, …, or, as in NumPy, one pair or None
        for each axis in order. `mode`: 'constant' (`value`), 'reflect' (mirrored without the edge), 'symmetric' (mirrored with the edge),
        'replicate' or 'edge' (the edge repeated), 'circular' or 'wrap' (from the other end). Raises ShapeError, UnsupportedError."""
        pairs = self._pad_pairs(tuple(pad))
        if mode != "constant":
            return self._pad_from_within(pairs, mode)
        cut = tuple((max(0, -lo), n - max(0, -hi)) for n, (lo, hi) in zip(self.shape, pairs, strict=True))
        if any(b > e for b, e in cut):
            raise ShapeError(f"pad of {self.shape} by {pairs}: it cuts more than there is")
        inner = graph.shrink(self.uop, cut)
        check_scalar(value, self.dtype, "pad")
        return self.from_uop(graph.pad(inner, tuple((max(0, lo), max(0, hi)) for lo, hi in pairs), value))

    def _pad_from_within(self, pairs: tuple[tuple[int, int], ...], mode: str) -> Self:
        """Pad with the tensor's own elements: axis by axis, concatenate the elements before, the tensor, and the elements after."""
        names = {"reflect": 1, "symmetric": 0, "replicate": None, "edge": None, "circular": -1, "wrap": -1}
        if mode not in names:
            raise UnsupportedError(f"pad with mode {mode!r}: use 'constant', {', '.join(map(repr, names))}")
        skip = names[mode]
        result = self
        for axis, (before, after) in enumerate(pairs):
            n = result.shape[axis]
            most = n if skip in (0, -1) else n - 1
            if min(before, after) < 0 or (skip is not None and max(before, after) > most) or (skip is None and n == 0 and before + after):
                raise ShapeError(f"pad of {self.shape} by {pairs} with mode {mode!r}: axis {axis} has {n} elements to take from")
            if skip is None:
                ends = [result.narrow(axis, at, 1).expand([count if i == axis else -1 for i in range(self.ndim)]) if count else None
                        for at, count in ((0, before), (n - 1, after))]
            elif skip == -1:
                ends = [result.narrow(axis, n - before, before), result.narrow(axis, 0, after)]
            else:
                ends = [result.narrow(axis, skip, before).flip(axis), result.narrow(axis, n - skip - after, after).flip(axis)]
            parts = [p for p, count in ((ends[0], before), (result, 1), (ends[1], after)) if p is not None and count]
            result = result.cat(parts, axis) if len(parts) > 1 else result
        return result

    def _pad_pairs(self, pad: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
        if pad and all(isinstance(p, int) for p in pad):
            if len(pad) % 2 or len(pad) > 2 * self.ndim:
                raise ShapeError(f"pad of {self.shape} by {pad}: a flat list has two ints for each axis, last axis first")
            last_first = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
            return ((0, 0),) * (self.ndim - len(last_first)) + tuple(reversed(last_first))
        if len(pad) != self.ndim or not all(p is None or len(p) == 2 for p in pad):
            raise ShapeError(f"pad of {self.shape} by {pad}: give a pair for each of the {self.ndim} axes, or a flat list, last axis first")
        return tuple((0, 0) if p is None else (int(p[0]), int(p[1])) for p in pad)

    def shrink(self, bounds: Sequence[tuple[int, int] | None]) -> Self:
        """Select the positions `begin <= i < end` of each axis; None keeps a whole axis."""
        if len(bounds) != self.ndim:
            raise ShapeError(f"shrink of {self.shape} to {tuple(bounds)}: give bounds or None for each axis")
        whole = tuple((0, n) if b is None else b for n, b in zip(self.shape, bounds, strict=True))
        return self.from_uop(graph.shrink(self.uop, whole))

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Select `length` positions of one axis from `start` on."""
        axis = self._axis("narrow", dim)
        first = start + self.shape[axis] if start < 0 else start
        return self.shrink([(first, first + length) if i == axis else None for i in range(self.ndim)])

    def unfold(self, dimension: int, size: int, step: int) -> Self:
        """Windows of `size` elements, one at every `step`-th position of an axis, as a new last axis. A view."""
        return self.from_uop(graph.window(self.uop, ((self._axis("unfold", dimension), size, step, 1),)))

    def roll(self, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Self:
        """Shift elements cyclically along axes; without `dims`, in the flattened tensor."""
        if dims is None:
            if not isinstance(shifts, int):
                raise ShapeError(f"roll by {shifts} without axes: give one shift, or name the axes")
            return self.ravel().roll(shifts, 0).reshape(self.shape)
        pairs = [(shifts, dims)] if isinstance(shifts, int) and isinstance(dims, int) else list(
            zip(shifts, dims, strict=True))  # type: ignore[arg-type]
        result = self
        for shift, dim in pairs:
            axis = self._axis("roll", dim)
            n = self.shape[axis]
            k = shift % n if n else 0
            if k:
                result = result.cat([result.narrow(axis, n - k, k), result.narrow(axis, 0, n - k)], axis)
        return result

    # -- joining and splitting -------------------------------------------------------------------
    @classmethod
    def cat(cls, tensors: Sequence[Self], dim: int = 0) -> Self:
        """Concatenate tensors along `dim`, in their common dtype. The other extents must agree.

        The kernel that reads the result selects from a few tensors directly; many tensors are first stored into parts of one buffer
        (`svod.core.graph.join`). Either way, each element is loaded once and copied without arithmetic: NaN, -0.0 and bools stay."""
        parts = _list_of_tensors("cat", tensors)
        if not parts:
            raise ShapeError("cat of no tensors: give at least one")
        rank = parts[0].ndim
        if rank == 0:
            raise ShapeError("cat of tensors without axes: use stack")
        axis = parts[0]._axis("cat", dim)
        first = parts[0].shape
        for t in parts:
            if t.ndim != rank or any(a != b for i, (a, b) in enumerate(zip(t.shape, first, strict=True)) if i != axis):
                raise ShapeError(f"cat of shapes {' and '.join(str(t.shape) for t in parts)} along axis {dim}: other extents must agree")
        dtype = common_dtype("cat", *parts)
        return cls.from_uop(graph.cat([t.cast(dtype).uop for t in parts], axis))

    @classmethod
    def stack(cls, tensors: Sequence[Self], dim: int = 0) -> Self:
        """Stack tensors of the same shape along a new axis `dim`."""
        parts = _list_of_tensors("stack", tensors)
        if not parts or any(t.shape != parts[0].shape for t in parts):
            raise ShapeError(f"stack of shapes {' and '.join(str(t.shape) for t in parts)}: give tensors of one shape, at least one")
        return cls.cat([t.unsqueeze(dim) for t in parts], dim)

    @classmethod
    def vstack(cls, tensors: Sequence[Self]) -> Self:
        """Concatenate along the first axis; a vector is a row."""
        return cls.cat([t if t.ndim > 1 else t.reshape(1, -1) for t in _list_of_tensors("vstack", tensors)])

    @classmethod
    def hstack(cls, tensors: Sequence[Self]) -> Self:
        """Concatenate along the second axis; vectors are concatenated along their only axis."""
        parts = [t if t.ndim else t.reshape(1) for t in _list_of_tensors("hstack", tensors)]
        return cls.cat(parts, min(1, parts[0].ndim - 1) if parts else 0)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Split into parts of `split_size` along `dim` (the last may be smaller), or of the given sizes."""
        axis = self._axis("split", dim)
        n = self.shape[axis]
        if isinstance(split_size, int):
            if split_size < 1:
                raise ShapeError(f"split of {self.shape} into parts of {split_size}: the size must be positive")
            sizes = [min(split_size, n - i) for i in range(0, n, split_size)] or [0]
        else:
            sizes = list(split_size)
        if sum(sizes) != n or any(s < 0 for s in sizes):
            raise ShapeError(f"split of {self.shape} along axis {dim} into {sizes}: the sizes must add up to {n}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self.narrow(axis, b, s) for b, s in zip(starts, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        """Split into at most `chunks` parts of equal size (the last may be smaller) along `dim`."""
        if chunks < 1:
            raise ShapeError(f"chunk of {self.shape} into {chunks}: the number must be positive")
        n = self.shape[self._axis("chunk", dim)]
        return self.split(-(-n // chunks), dim) if n else self.split([0] * chunks, dim)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """The slices of the tensor along `dim`, which is dropped."""
        axis = self._axis("unbind", dim)
        rest = self.shape[:axis] + self.shape[axis + 1:]
        return tuple(self.narrow(axis, i, 1).reshape(rest) for i in range(self.shape[axis]))

    def tril(self, diagonal: int = 0) -> Self:
        """Set elements above the given diagonal of the last two axes to zero."""
        return self._triangle("tril", diagonal, lower=True)

    def triu(self, diagonal: int = 0) -> Self:
        """Set elements below the given diagonal of the last two axes to zero."""
        return self._triangle("triu", diagonal, lower=False)

    def _triangle(self, name: str, diagonal: int, lower: bool) -> Self:
        if self.ndim < 2:
            raise ShapeError(f"{name} of {self.shape}: it needs two axes")
        rows, columns = self.shape[-2:]
        row, column = coordinates(rows, columns, diagonal)
        keep = graph.alu(Ops.CMPLE, column, row) if lower else graph.alu(Ops.CMPLE, row, column)
        mask = graph.broadcast(keep, self.shape)
        return self.from_uop(graph.alu(Ops.WHERE, mask, self.uop, graph.full(self.shape, 0, self.dtype)))


def _list_of_tensors(name: str, tensors: Sequence[TensorT]) -> list[TensorT]:
    """The tensors as a list. Raises ShapeError for a single tensor (`a.cat(b)`), which would be split along its first axis."""
    if isinstance(tensors, TensorBase):
        raise ShapeError(f"{name} of one tensor of shape {tensors.shape}: give a list, Tensor.{name}([a, b])")
    given = list(tensors) if isinstance(tensors, Iterable) else [tensors]
    for t in given:
        if not isinstance(t, TensorBase):
            raise ArgumentError(f"{name} of {type(t).__name__}: give a list of tensors, Tensor.{name}([a, b])")
    return given
