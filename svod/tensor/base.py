"""The base of every tensor: a handle on a graph node, and the rules that give operands a common dtype and shape.

The operations are layers. Each file holds one class, which inherits from the class of the file before, so an operation uses only
operations of the layers below: base → creation → movement → elementwise → functions → indexing → reduction → ordered → scatter →
linalg → products → activations → nn → resample → losses → random → Tensor.
"""
from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Self, TypeGuard

import numpy as np

from svod.core.graph import graph
from svod.core.graph.devices import are_devices_named, device_of, stack_of
from svod.core.graph.memory import node_over
from svod.core.graph.shapes import broadcast_shapes, normalize_axes, shape_of
from svod.core.graph.storage import base_of
from svod.core.ir.dtype import DType, dtypes, promote, to_dtype
from svod.core.ir.origin import record_origin
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import Dim, number_of
from svod.core.machine.target import HOST
from svod.errors import DTypeError, ShapeError
from svod.system.forksafe import remake_after_fork

Scalar = bool | int | float
Shape = tuple[int, ...]
Array = np.ndarray[Any, np.dtype[Any]]
DTypeLike = DType | str | type | np.dtype[Any]  # a svod dtype, its name, or an argument of numpy.dtype()

# Live tensors with a node, by id: `_pending` has tensors that may need computing, `_computed` tensors that were found in memory.
_pending: weakref.WeakValueDictionary[int, TensorBase] = weakref.WeakValueDictionary()
_computed: weakref.WeakValueDictionary[int, TensorBase] = weakref.WeakValueDictionary()
_building = threading.Lock()
remake_after_fork(sys.modules[__name__], "_building", threading.Lock)


def live_tensors() -> list[TensorBase]:
    """All live tensors that have a node. Other threads may create tensors meanwhile."""
    return [*pending_tensors(), *(t for ref in _computed.valuerefs() if (t := ref()) is not None)]


def pending_tensors() -> list[TensorBase]:
    """The live tensors whose values are not in memory: realisation replaces nodes in these only."""
    pending = []
    for t in [t for ref in _pending.valuerefs() if (t := ref()) is not None]:
        key = id(t)
        if base_of(t.uop).op is Ops.BUFFER:
            _computed[key] = t
            # checked again while both tables have the tensor, because another thread may have assigned to it before that
            if base_of(t.uop).op is Ops.BUFFER:
                _pending.pop(key, None)
        else:
            pending.append(t)
    return pending


def forget_pending(tensor: TensorBase) -> None:
    """Remove a tensor from the pending tensors, because it has memory instead of a node now."""
    _pending.pop(id(tensor), None)


def as_dtype(value: DTypeLike) -> DType:
    """The storable DType for a dtype, a name or a NumPy dtype. Raises DTypeError for any other value."""
    try:
        dtype = to_dtype(value)
    except TypeError as err:
        raise DTypeError(str(err)) from err
    if dtype in (dtypes.index, dtypes.void):
        raise DTypeError(f"{dtype.name} is not a dtype a tensor can have")
    return dtype


def is_scalar(value: object) -> TypeGuard[Scalar]:
    """Whether `value` is a Python scalar. Its type does not widen the type of a tensor."""
    return isinstance(value, (bool, int, float))


def without_numpy(value: object) -> object:
    """Convert a NumPy scalar to a Python scalar and return any other value unchanged. So `x / np.sqrt(64)` keeps the dtype of x, as in
    PyTorch. A NumPy array without axes is an array and keeps its dtype."""
    return value.item() if isinstance(value, np.generic) else value


def scalar_dtype(dtype: DType, value: Scalar) -> DType:
    """The dtype of an operation on a tensor of `dtype` and a Python scalar: `dtype`, unless the scalar is of a higher kind."""
    if isinstance(value, bool) or dtype.is_float:
        return dtype
    if isinstance(value, float):
        return dtypes.default_float
    return dtypes.default_int if dtype.kind == "b" else dtype


def check_scalar(value: Scalar, dtype: DType, name: str) -> Scalar:
    """Return `value`. Raises DTypeError, which names the operation `name`, if `dtype` is an integer type that cannot represent it."""
    if dtype.is_int and not dtype.min <= value <= dtype.max:
        raise DTypeError(f"{name}: {value} does not fit {dtype.name} ({dtype.min} … {dtype.max}); cast the tensor to a wider type first")
    return value


def check_integers(values: int | list[Any] | tuple[Any, ...] | Array, dtype: DType, name: str) -> None:
    """Raise DTypeError if `dtype` is an integer type and an int of `values` (a number, nested lists, an array) does not fit."""
    array = np.asarray(values)
    if dtype.is_int and array.dtype.kind in "iu" and array.size:
        check_scalar(int(array.min()), dtype, name)
        check_scalar(int(array.max()), dtype, name)


def shape_argument(shape: Sequence[Any]) -> Shape:
    """Parse a shape passed as `f(2, 3)` or `f((2, 3))`."""
    flat = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    try:
        return tuple([n if isinstance(n, Dim) else n.__index__() for n in flat])
    except (AttributeError, TypeError) as err:
        raise ShapeError(f"{tuple(flat)!r} is not a shape: give ints, one by one or as a tuple") from err


def extents_argument(name: str, *shape: Any) -> Shape:
    """Parse the shape of a tensor that the operation `name` makes, as `shape_argument` does. Raises ShapeError for negative extents,
    too."""
    sizes = shape_argument(shape)
    if any(n < 0 for n in sizes):
        raise ShapeError(f"{name} of shape {sizes}: an extent cannot be negative")
    return sizes


class TensorBase:
    """A lazy array: a graph node with a `shape` and a `dtype`. Nothing runs before the tensor is realised.

    A tensor over an array gets its node at the first use of `uop`: a call of a captured function needs the array only."""

    __slots__ = ("__weakref__", "_memory", "_memory_dtype", "_node", "_shared", "_user_array")
    _node: UOp | None           # None: the tensor consists of `_memory` only
    _memory: Array | None       # C-contiguous and aligned, in the tensor's shape; bfloat16 as its bits
    _memory_dtype: DType        # dtype of `_memory`
    _shared: bool               # whether code outside svod can write to `_memory`
    _user_array: Array | None   # the caller's own array if `_memory` is that array, not a copy

    @classmethod
    def from_uop(cls, uop: UOp) -> Self:
        """Make the tensor of a graph node and record the origin of the node."""
        tensor = object.__new__(cls)
        tensor._hold(uop)
        return tensor

    @classmethod
    def _over(cls, array: Array, dtype: DType, shared: bool) -> Self:
        """The tensor over the memory of `array`: C-contiguous, aligned, with at least one element; bfloat16 as its bits. `shared`: code
        outside svod can write to that memory."""
        tensor = object.__new__(cls)
        tensor._become_memory(array, dtype, shared)
        return tensor

    @property
    def uop(self) -> UOp:
        """The graph node; a tensor over an array gets its node here."""
        node = self._node
        return self._build() if node is None else node

    @uop.setter
    def uop(self, node: UOp) -> None:
        self._node, self._memory, self._user_array = node, None, None
        _pending[id(self)] = self

    def _become_memory(self, array: Array, dtype: DType, shared: bool, given: Array | None = None) -> None:
        """Replace the node by the memory of `array`, to which no graph refers yet."""
        self._memory_dtype, self._shared, self._user_array, self._memory, self._node = dtype, shared, given, array, None

    def _build(self) -> UOp:
        """Make the node of a tensor over an array, unless another thread has made it."""
        with _building:
            if self._node is None:
                assert self._memory is not None
                self.uop = node_over(self._memory, self._memory_dtype, shared=self._shared, given=self._user_array)
        assert self._node is not None
        return self._node

    def _hold(self, uop: UOp) -> None:
        """Set the node and register this tensor among the live tensors."""
        self.uop = uop
        record_origin(uop)

    # -- facts -----------------------------------------------------------------------------------
    @property
    def shape(self) -> Shape:
        memory = self._memory
        return shape_of(self.uop) if memory is None else memory.shape

    @property
    def dtype(self) -> DType:
        return self.uop.dtype if self._memory is None else self._memory_dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Shape | int:
        """The shape, or the extent of one axis, as in PyTorch."""
        return self.shape if dim is None else self.shape[self._axis("size", dim)]

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    @property
    def device(self) -> str:
        """The device that holds the values: "CPU" unless `to` named another. Values are computed on their device; values on the CPU are
        computed on the device that a configuration or SVOD_DEVICE names. A value with parts on several devices (an MSTACK) has all their
        names: "CPU, WEBGPU"."""
        if self._memory is not None or not are_devices_named():
            return HOST
        stack = stack_of(self.uop)
        parts = (self.uop,) if stack is None else stack.src
        return ", ".join(dict.fromkeys(device_of(p) or HOST for p in parts))

    def _axis(self, name: str, axis: int) -> int:
        if isinstance(axis, Sequence):
            raise ShapeError(f"{name} of {self.shape} along {axis}: name one axis")
        return normalize_axes(name, axis, self.ndim)[0]

    # -- conversions -----------------------------------------------------------------------------
    def cast(self, dtype: DTypeLike) -> Self:
        """Convert the elements. float → int truncates toward zero; anything → bool is `!= 0`."""
        wanted = as_dtype(dtype)
        if wanted == self.dtype:
            return self
        if wanted == dtypes.bool:
            return self.from_uop(graph.alu(Ops.CMPNE, self.uop, graph.full(self.shape, 0, self.dtype)))
        return self.from_uop(graph.cast(self.uop, wanted))

    def bitcast(self, dtype: DTypeLike) -> Self:
        """Reinterpret the bits as another dtype of the same size."""
        return self.from_uop(graph.bitcast(self.uop, as_dtype(dtype)))

    def _float(self) -> Self:
        """Return this tensor with a float dtype: integers become the default float."""
        return self if self.dtype.is_float else self.cast(dtypes.default_float)

    def _float_dtype(self) -> DType:
        """The dtype of a float function's result."""
        return self.dtype if self.dtype.is_float else dtypes.default_float

    def _number(self, n: int) -> Self | float:
        """An extent, or a product of extents, as an operand: a float, or a tensor without axes if the extent depends on variables. The
        tensor has the dtype of `self` if that is a float dtype, and the default float otherwise."""
        return self.from_uop(number_of(n, self._float_dtype())) if isinstance(n, Dim) else float(n)

    def _value(self, n: Dim) -> Self:
        """The run-time value of a Dim, as an operand. Like a Python int, it does not widen the dtype and must fit it."""
        dtype = scalar_dtype(self.dtype, 1)
        for bound in n.bounds:
            check_scalar(bound, dtype, f"{n} as an operand")
        return self.from_uop(number_of(n, dtype))

    def _full_like(self, value: Scalar, dtype: DType | None = None) -> Self:
        return self.from_uop(graph.full(self.shape, value, dtype or self.dtype))


def common_dtype(name: str, *operands: TensorBase | Scalar) -> DType:
    """The common dtype of tensors and Python scalars. `svod.core.ir.dtype.promote` combines the tensors; scalars do not widen their
    dtype. Scalars without a tensor have their default dtypes. Raises DTypeError for a scalar that does not fit."""
    tensors = [o.dtype for o in operands if isinstance(o, TensorBase)]
    result = tensors[0] if tensors else dtypes.bool
    for dtype in tensors[1:]:
        result = promote(result, dtype)
    for o in operands:
        if not isinstance(o, TensorBase):
            result = scalar_dtype(result, o)
    for o in operands:
        if not isinstance(o, TensorBase):
            check_scalar(o, result, name)
    return result


def operand_uops(name: str, dtype: DType, *operands: TensorBase | Scalar) -> tuple[UOp, ...]:
    """The nodes of operands cast to `dtype` and broadcast to their common shape. Errors name the operation `name`."""
    shapes = [shape_of(o.uop) for o in operands if isinstance(o, TensorBase)]
    shape = shapes[0] if shapes else ()
    if any(s != shape for s in shapes):
        shape = broadcast_shapes(name, *shapes)
    return tuple([graph.broadcast(o.cast(dtype).uop, shape, name) if isinstance(o, TensorBase) else graph.full(shape, o, dtype)
                  for o in operands])
