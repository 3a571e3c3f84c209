"""The public lazy Tensor: all operations, and the ways from a graph to numbers."""
from __future__ import annotations

import builtins
from collections.abc import Iterable
from typing import Any

import numpy as np

from svod.core.graph import graph
from svod.core.graph.buffer import bfloat16_bits_to_float32, buffer_from_numpy, buffer_of, float32_to_bfloat16_bits
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.origin import origin_of
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import is_symbolic, layout_shape, shape_at
from svod.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from svod.tensor import dlpack
from svod.tensor.base import Array, DTypeLike, Scalar, check_integers, live_tensors
from svod.tensor.operations.elementwise import Operand
from svod.tensor.operations.random import Random
from svod.tensor.realize import constant_value, is_realized, is_writable, latest_content, note_assignment, prepare_tensors, realize_tensors
from svod.tensor.ufuncs import apply_ufunc

SHOWN_VALUES = 40   # of a tensor that is printed; of more the first and last


class Tensor(Random):
    """A lazy n-dimensional array.

        a, b = Tensor(x), Tensor(w)             # NumPy arrays, not copied where they are contiguous
        y = (a @ b).relu().softmax(-1)          # nothing runs yet
        y.numpy()                               # compute

    A tensor is a value: operations never change it, except `assign` and `t[…] = x`. Its memory, once computed, is kept for as
    long as the tensor lives."""

    __slots__ = ()

    # -- numbers ---------------------------------------------------------------------------------
    @property
    def is_realized(self) -> builtins.bool:
        """Whether the values are in memory."""
        return is_realized(self)

    def realize(self, config: Any = None) -> Tensor:
        """Compute the values now, if they are not in memory; returns self. `config`: a PrepareConfig; what it leaves open, and None, is as
        the environment says."""
        realize_tensors([self], config)
        return self

    @staticmethod
    def realize_batch(tensors: Iterable[Tensor], config: Any = None) -> None:
        """Compute several tensors in one schedule: what they share is computed once."""
        realize_tensors(tensors, config)

    def prepare(self, config: Any = None, *, constants: Iterable[Tensor] = ()) -> Any:
        """An ExecutionPlan that computes this tensor, again with each `execute()`; it is the plan's output from then on. `constants`:
        tensors that keep their values while the plan lives, as weights do: kernels may arrange them once, and what is written to them later
        may not be seen. Raises ScheduleError, and ArgumentError for what is no tensor."""
        return prepare_tensors([self], config, constants)

    @staticmethod
    def prepare_batch(tensors: Iterable[Tensor], config: Any = None, *, constants: Iterable[Tensor] = ()) -> Any:
        """`prepare` for several outputs."""
        return prepare_tensors(tensors, config, constants)

    def _values(self) -> Array:
        """The values as an array over the tensor's own memory, bfloat16 as its bits."""
        const = constant_value(self.uop)
        if const is not None:
            if self.dtype == dtypes.bfloat16:
                return float32_to_bfloat16_bits(np.full(shape_at(self.shape), const.arg, np.float32))
            return np.full(shape_at(self.shape), const.arg, to_numpy(self.dtype))
        self.realize()
        base = graph.base_of(self.uop)
        array = buffer_of(base).array
        if not is_symbolic(self.shape):
            return array.reshape(self.shape)
        used = tuple(slice(0, n) for n in shape_at(self.shape))
        return array.reshape(layout_shape(self.shape))[used]

    def numpy(self) -> Array:
        """The values as an array of its own. bfloat16 comes as float32, which holds it exactly."""
        values = self._values()
        return bfloat16_bits_to_float32(values) if self.dtype == dtypes.bfloat16 else values.copy()

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: builtins.bool | None = None) -> Array:
        """For numpy.asarray: a copy, or with copy=False the tensor's memory."""
        if copy is False and self.dtype != dtypes.bfloat16 and dtype in (None, to_numpy(self.dtype)):
            return self._values()
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy's functions of arrays take a tensor as its values, computed now, and give arrays: `np.mean(t)`, `np.concatenate([t, a])`.
        Its functions of elements, `np.exp(t)`, give tensors: see `__array_ufunc__`."""
        if function in (np.shape, np.ndim) and not kwargs:      # nothing has to be computed for them
            return self.shape if function is np.shape else self.ndim
        return function(*_as_arrays(args), **_as_arrays(kwargs))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's functions of elements, and its operators with a tensor on the right, are the tensor's: `np.exp(t)` is `t.exp()`, lazy,
        and `array + t` a tensor. Raises UnsupportedError for those that tensors do not have, and for `out=`: `array += t.numpy()`."""
        return apply_ufunc(Tensor, ufunc, method, inputs, options)

    # -- memory shared with other libraries -------------------------------------------------------
    def __dlpack_device__(self) -> tuple[builtins.int, builtins.int]:
        return dlpack.CPU

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: builtins.bool | None = None) -> Any:
        """A DLPack capsule over the tensor's memory, computed now: what `torch.from_dlpack(t)` and `numpy.from_dlpack(t)` call. Raises
        DeviceError for another device than the CPU and BufferError for read-only memory that the caller could not tell."""
        if dl_device is not None and (builtins.int(dl_device[0]), builtins.int(dl_device[1])) != dlpack.CPU:
            raise DeviceError(f"__dlpack__ for DLPack device {tuple(dl_device)}: tensors live on the CPU, {dlpack.CPU}")
        values = self._values().copy() if copy else self._values()
        if self.dtype == dtypes.bfloat16:
            return dlpack.bfloat16_capsule(values)
        # NumPy 1 has no max_version; who asks for one is told by its TypeError, and asks again without
        return values.__dlpack__() if max_version is None else values.__dlpack__(max_version=max_version)

    @classmethod
    def from_dlpack(cls, source: Any) -> Tensor:
        """The tensor of an object with `__dlpack__` on the CPU (a PyTorch tensor, a NumPy or JAX array), sharing its memory where that is
        C-contiguous. Raises DeviceError and DTypeError."""
        array, is_bfloat16 = dlpack.array_of(source)
        if not is_bfloat16:
            return cls(array)
        if 0 in array.shape:
            return cls.full(array.shape, 0, dtypes.bfloat16)
        return cls.from_uop(graph.reshape(buffer_from_numpy(array, dtypes.bfloat16), array.shape))

    def item(self) -> Scalar:
        """The value of a tensor of one element, as a Python scalar."""
        if self.numel() != 1:
            raise ShapeError(f"item() of a tensor of shape {self.shape}: it needs exactly one element")
        value: Scalar = self.numpy().reshape(()).item()
        return value

    def tolist(self) -> Any:
        """The values as nested lists of Python scalars."""
        return self.numpy().tolist()

    def __bool__(self) -> builtins.bool:
        if self.numel() != 1:
            raise ShapeError(f"the truth of a tensor of shape {self.shape} is ambiguous: use any() or all()")
        return builtins.bool(self.item())

    def __contains__(self, value: Operand) -> builtins.bool:
        """Whether any element equals `value`."""
        return builtins.bool(self.eq(value).any())

    def equal(self, other: Operand) -> builtins.bool:
        """Whether `other` has the same shape and the same values, computed now."""
        given = self._as_tensor(other)
        return given.shape == self.shape and builtins.bool(self.eq(given).all())

    def allclose(self, other: Operand, rtol: builtins.float = 1e-05, atol: builtins.float = 1e-08,
                 equal_nan: builtins.bool = False) -> builtins.bool:
        """Whether all elements are close (`isclose`), computed now."""
        return builtins.bool(self.isclose(other, rtol, atol, equal_nan).all())

    def __index__(self) -> builtins.int:
        if not self.dtype.is_int:
            raise DTypeError(f"a tensor of {self.dtype.name} is no index, nor a number of times: use int(t)")
        return builtins.int(self.item())

    def __round__(self, digits: builtins.int | None = None) -> Scalar: return builtins.round(self.item(), digits)
    def __int__(self) -> builtins.int: return builtins.int(self.item())
    def __float__(self) -> builtins.float: return builtins.float(self.item())

    # -- storage ---------------------------------------------------------------------------------
    def contiguous(self) -> Tensor:
        """The same values in a buffer of their own, in row-major order; self if that is what it is."""
        return self if is_realized(self) else self.from_uop(graph.contiguous(self.uop))

    def clone(self) -> Tensor:
        """The same values in another buffer."""
        return self.from_uop(graph.copy(self.uop, self.device) if self.numel() else self.uop)

    def detach(self) -> Tensor:
        """A tensor of the same value, sharing memory: there are no gradients to cut off."""
        return self.from_uop(self.uop)

    def __copy__(self) -> Tensor:
        """As `detach`: `copy.copy` shares memory."""
        return self.detach()

    def __deepcopy__(self, memo: Any) -> Tensor:
        """The same values, computed now, in other memory."""
        make, arguments = self.__reduce__()
        made: Tensor = make(*(a.copy() if isinstance(a, np.ndarray) else a for a in arguments))
        return made

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickled are the values, computed now: what is read elsewhere is a tensor in memory, or the constant that it was."""
        const = constant_value(self.uop)
        if const is not None:
            return Tensor.full, (self.shape, const.arg, self.dtype)
        return _in_memory, (self._values(), self.dtype)

    def assign(self, value: Operand) -> Tensor:
        """Write `value` (broadcast, cast to this dtype) into this tensor's memory when it is realised; returns self.

        A part of a tensor, `t[1:3].assign(x)`, is written in the memory of `t`. Tensors that share the memory as a reshape see the new
        content; lazy tensors written down before, and parts among them, keep the old. A tensor without memory of its own, or over a
        read-only array, gets new memory. Raises UnsupportedError for a part of a read-only array."""
        node = graph.broadcast(self._given(value).uop, self.shape, "assign")
        if 0 in self.shape or not self._is_in_memory():
            self._hold(graph.copy(node, self.device) if 0 not in self.shape else node)
        else:
            self._write(self.uop, node)
        return self

    def __setitem__(self, index: Any, value: Operand) -> None:
        """`t[1:3] = x`, `t[:, ::2] = x`: write a part (ints, slices, None, …) when the tensor is realised, with `x` broadcast and cast as
        in NumPy; all of `x` is read before anything is written. Who sees it, and what gets new memory: as for `assign`.
        `t[mask] = x` with a mask of bools over the first axes, and an `x` that broadcasts to the elements it chooses whatever their number,
        is `t.assign(where(mask, x, t))`. With tensors, lists, arrays or a mask of known values among other indices, all of the part that
        ints and slices name is written anew; where positions repeat the last value stays. Raises UnsupportedError for a mask that is a
        tensor and not alone, and for a part of a read-only array."""
        given = self._given(value)
        mask = self._as_mask(index)
        rest = self.shape[mask.ndim:] if mask is not None else ()
        spread = _without_leading_ones(given, len(rest))
        if mask is not None and (spread.ndim <= len(rest) or isinstance(index, Tensor)):
            if mask.shape != self.shape[:mask.ndim] or spread.ndim > len(rest):
                raise ShapeError(f"t[mask] = value of {given.shape} with a mask of {mask.shape} into {self.shape}: the mask has the first "
                                 f"extents of the tensor, and the value broadcasts to {rest}; a value for each element chosen needs a mask "
                                 "of known values, mask.numpy()")
            self.assign(spread.broadcast_to(rest).where(mask.reshape(*mask.shape, *(1,) * len(rest)), self))
            return
        part, tensors = self._views(index)
        if tensors:
            places = len(graph.broadcast_shapes("indexing", *(t.shape for _, t in tensors)))
            new = part._put(tensors, _without_leading_ones(given, part.ndim - len(tensors) + places))
            if part.uop is self.uop:
                self.assign(new)
            else:
                self[tuple(slice(None) if isinstance(e, (Tensor, np.ndarray)) else e for e in self._entries(index))] = new
            return
        node = graph.broadcast(_without_leading_ones(given, part.ndim).uop, part.shape, "t[…] = value")
        if 0 in part.shape:
            return
        if not self._is_in_memory():
            self._take_memory()
            part, _ = self._views(index)
        self._write(part.uop, node)

    def _as_mask(self, index: Any) -> Tensor | None:
        """An index that is a mask, as a tensor; None for any other."""
        if not isinstance(index, (Tensor, np.ndarray, list)):
            return None
        mask = Tensor(index)
        return mask if mask.dtype == dtypes.bool and mask.ndim else None

    def _given(self, value: Operand) -> Tensor:
        """What is assigned, in the dtype of self. A Python float is rounded once; Python ints must fit."""
        if isinstance(value, builtins.float) and not isinstance(value, np.generic):
            return Tensor(value, dtype=self.dtype if self.dtype.is_float else dtypes.float64).cast(self.dtype)
        if isinstance(value, (builtins.int, list, tuple)) and not isinstance(value, builtins.bool):
            check_integers(value, self.dtype, "t[…] = value")
        return self._as_tensor(value).cast(self.dtype)

    def _is_in_memory(self) -> builtins.bool:
        """Whether an assignment goes to memory that is there; if not, the tensor gets its own. Raises UnsupportedError for a part of a
        read-only array: who holds the array would not see it."""
        content = graph.content_under(self.uop)
        if content is None:
            return False
        if is_writable(content):
            return True
        if graph.base_of(self.uop) is content:
            return False
        raise UnsupportedError(f"assignment to a part, of shape {self.shape}, of a read-only array: assign to the tensor that holds the "
                               "array, t[…] = value, and it gets memory of its own; or make the part a tensor of its own with clone()")

    def _take_memory(self) -> None:
        """Hold the content in memory of its own."""
        memory = _as_held(graph.new_memory(self.dtype, graph.storage_size(self.uop), self.device), self.shape)
        base = graph.base_of(self.uop)
        # a copy of its own is what it gets now
        value = graph.reshape(base.src[0], self.shape) if base.op in (Ops.COPY, Ops.CONTIGUOUS) else self.uop
        self._become(_as_held(graph.assign(memory, value), self.shape))

    def _write(self, view: UOp, value: UOp) -> None:
        """Write `value` through `view`, self or a part of it, into the memory under both: self, and every tensor that holds the memory as a
        reshape, become its content after that."""
        older = graph.content_under(view)
        assert older is not None
        content = latest_content(older) if graph.base_of(self.uop) is not older else older
        new = graph.assign(view.substitute({older: content}), value)
        if graph.base_of(self.uop) is not content:
            self._become(self.uop.substitute({older: new}))
        self._replace_content(content, new)

    @staticmethod
    def _replace_content(content: UOp, new: UOp) -> None:
        """Every tensor that holds the memory of `content` as a reshape becomes what is in it now."""
        for t in live_tensors():
            if isinstance(t, Tensor) and graph.base_of(t.uop) is content:
                t._become(_as_held(new, t.shape))

    def _become(self, node: UOp) -> None:
        """What an assignment makes of self."""
        note_assignment(self)
        self._hold(node)

    # -- conversions by name (they shadow the builtins inside this class) -------------------------------
    def cpu(self) -> Tensor:
        """self: tensors are on the CPU."""
        return self

    def to(self, target: DTypeLike) -> Tensor:
        """Cast to a dtype; or `to("cpu")`, which is where tensors are."""
        if isinstance(target, str) and target.lower() == "cpu":
            return self
        if isinstance(target, str) and target.split(":")[0].lower() in ("cuda", "gpu"):
            raise DeviceError(f"to({target!r}): tensors live on the CPU")
        return self.cast(target)

    def type(self, dtype: DTypeLike) -> Tensor:
        """`cast`."""
        return self.cast(dtype)

    def astype(self, dtype: DTypeLike) -> Tensor:
        """`cast`."""
        return self.cast(dtype)

    def float(self) -> Tensor: return self.cast(dtypes.float32)
    def double(self) -> Tensor: return self.cast(dtypes.float64)
    def half(self) -> Tensor: return self.cast(dtypes.float16)
    def bfloat16(self) -> Tensor: return self.cast(dtypes.bfloat16)
    def int(self) -> Tensor: return self.cast(dtypes.int32)
    def long(self) -> Tensor: return self.cast(dtypes.int64)
    def bool(self) -> Tensor: return self.cast(dtypes.bool)

    def __format__(self, spec: str) -> str:
        """`f"{loss:.3f}"`: a tensor of one element is formatted as its value."""
        if not spec:
            return str(self)
        if self.numel() != 1:
            raise ShapeError(f"{spec!r} formats one number, and this is a tensor of shape {self.shape}: format its elements, t.tolist()")
        return format(self.item(), spec)

    def __getattr__(self, name: str) -> Any:
        """Called for what there is not: says what there is instead."""
        own = type(self)
        if name.endswith("_") and not name.startswith("_") and hasattr(own, name[:-1]):
            hint = f"; operations change no tensor: x = x.{name[:-1]}(…), or x.assign(x.{name[:-1]}(…)) to keep it in x's memory"
        elif name in ("backward", "grad", "requires_grad", "retain_grad"):
            hint = "; svod runs models, it does not train them"
        elif name == "cuda":
            hint = "; tensors live on the CPU"
        else:
            hint = ""
        raise AttributeError(f"{own.__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        """What it is, and the values where they are in memory: nothing is computed to be shown."""
        const = constant_value(self.uop)
        if const is not None:
            state = f"constant {const.arg}"
        elif is_realized(self):
            state = f"realized {self._shown()}".rstrip()
        else:
            origin = origin_of(self.uop)
            state = f"lazy {graph.base_of(self.uop).op.value}" + (f" from {origin}" if origin else "")
        return f"<Tensor {self.dtype.name}{list(self.shape)} {state}>"

    def _shown(self) -> str:
        """Values in memory as text, of many the first and last; empty where there are none yet, or their number depends on a variable."""
        memory = buffer_of(graph.base_of(self.uop))
        if not memory.is_allocated or is_symbolic(self.shape):
            return ""
        values = memory.array.reshape(self.shape)
        if self.dtype == dtypes.bfloat16:
            if self.numel() > SHOWN_VALUES:
                return ""
            values = bfloat16_bits_to_float32(values)
        return np.array2string(values, threshold=SHOWN_VALUES, edgeitems=2, separator=", ")


def _as_held(content: UOp, shape: tuple[int, ...]) -> UOp:
    """The content of a memory as the value of `shape` that lies in it."""
    return graph.storage_view(content, shape) if is_symbolic(shape) else graph.reshape(content, shape)


def _without_leading_ones(value: Tensor, ndim: int) -> Tensor:
    """`value` without those of its first axes that NumPy lets an assignment to `ndim` axes have."""
    while value.ndim > ndim and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    return value


def _as_arrays(given: Any) -> Any:
    """What a NumPy function was given, with arrays for tensors in it."""
    if isinstance(given, Tensor):
        return given.numpy()
    if isinstance(given, dict):
        return {name: _as_arrays(value) for name, value in given.items()}
    return type(given)(map(_as_arrays, given)) if type(given) in (list, tuple) else given


def _in_memory(values: Array, dtype: DType) -> Tensor:
    """The tensor over an array, which of bfloat16 holds the bits."""
    if 0 in values.shape or dtype != dtypes.bfloat16:
        return Tensor(values, dtype)
    return Tensor.from_uop(graph.reshape(buffer_from_numpy(values, dtype), values.shape))


def where(condition: Operand, x: Operand, y: Operand) -> Tensor:
    """x where `condition` holds, y elsewhere: numpy.where and torch.where, with tensors or numbers."""
    chooser = condition if isinstance(condition, Tensor) else Tensor(condition)
    return chooser._select(chooser, x, y)
