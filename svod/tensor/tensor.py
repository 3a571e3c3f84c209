"""The public lazy Tensor: all operations, and the methods that compute their values."""
from __future__ import annotations

import builtins
import math
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from svod.core.graph import graph
from svod.core.graph.buffer import bfloat16_bits_to_float32, buffer_from_bytes, buffer_of, float32_to_bfloat16_bits, map_file
from svod.core.graph.changes import note_change, share
from svod.core.graph.shapes import broadcast_shapes, storage_size
from svod.core.graph.storage import base_of, content_under
from svod.core.ir.dtype import DType, dtypes, is_dtype_name, to_numpy
from svod.core.ir.origin import origin_of
from svod.core.ir.uop import MOVEMENT, Ops, UOp
from svod.core.ir.variable import is_symbolic, layout_shape, shape_at
from svod.core.machine.target import DISK, HOST
from svod.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from svod.tensor import cuda_arrays, dlpack
from svod.tensor.base import Array, DTypeLike, Scalar, as_dtype, check_integers, extents_argument, live_tensors
from svod.tensor.operations.elementwise import Operand
from svod.tensor.operations.random import Random
from svod.tensor.realize import (
    constant_value,
    device_called,
    is_realized,
    is_writable,
    latest_content,
    note_assignment,
    prepare_tensors,
    realize_tensors,
    space_of,
)
from svod.tensor.ufuncs import apply_ufunc

SHOWN_VALUES = 40   # most values of a tensor that are printed; of larger ones, only the first and last values


class Tensor(Random):
    """A lazy n-dimensional array.

        a, b = Tensor(x), Tensor(w)             # NumPy arrays, not copied if they are contiguous
        y = (a @ b).relu().softmax(-1)          # nothing runs yet
        y.numpy()                               # compute

    A tensor is a value: only `assign` and `t[…] = x` change it. Its memory, once computed, lives as long as the tensor."""

    __slots__ = ()

    def __init__(self, data: Any, dtype: DTypeLike | None = None) -> None:
        """A tensor of a scalar, a variable, nested lists, a NumPy array, another tensor, or an array of another library, whose memory it
        shares (`from_dlpack`). Its values are converted to `dtype` if given. Raises DTypeError and ShapeError for data that no tensor can
        hold."""
        is_foreign = not isinstance(data, (Tensor, np.ndarray, np.generic)) and dlpack.is_shareable(data)
        super().__init__(self.from_dlpack(data) if is_foreign else data, dtype)

    # -- numbers ---------------------------------------------------------------------------------
    @property
    def is_realized(self) -> builtins.bool:
        """Whether the values are in memory."""
        return is_realized(self)

    def realize(self, config: Any = None) -> Tensor:
        """Compute the values now, unless they are in memory; returns self. Open fields of `config` come from the environment."""
        realize_tensors([self], config)
        return self

    @staticmethod
    def realize_batch(tensors: Iterable[Tensor], config: Any = None) -> None:
        """Compute several tensors in one schedule. Shared nodes are computed once."""
        realize_tensors(tensors, config)

    def prepare(self, config: Any = None, *, constants: Iterable[Tensor] = ()) -> Any:
        """Make an ExecutionPlan; each `execute()` computes this tensor again. The tensor becomes the plan's output.

        `constants`: tensors whose values do not change while the plan lives, such as weights. The plan may rearrange their values once; it
        may not see later writes to them. Raises ScheduleError, and ArgumentError for a value that is not a tensor."""
        return prepare_tensors([self], config, constants)

    @staticmethod
    def prepare_batch(tensors: Iterable[Tensor], config: Any = None, *, constants: Iterable[Tensor] = ()) -> Any:
        """Make one ExecutionPlan with several outputs; see `prepare`."""
        return prepare_tensors(tensors, config, constants)

    def _values(self, away: builtins.bool = False) -> Array:
        """The values as an array over the tensor's own memory; bfloat16 as uint16 with its bits. `away`: values on a device may be
        copied to a temporary array, so that the device's memory does not need a permanent copy on the host."""
        if self._memory is not None:
            return self._memory
        const = constant_value(self.uop)
        if const is not None:
            if self.dtype == dtypes.bfloat16:
                return float32_to_bfloat16_bits(np.full(shape_at(self.shape), const.arg, np.float32))
            return np.full(shape_at(self.shape), const.arg, to_numpy(self.dtype))
        if base_of(self.uop).op in MOVEMENT and self.device.startswith(DISK):      # a part of a file
            return self.cpu()._values(away)
        node = None
        while self._memory is None and (base := base_of(self.uop)).op is not Ops.BUFFER and self.uop is not node:
            node = self.uop
            self.realize()      # again where another thread has assigned meanwhile
        if self._memory is not None:
            return self._memory
        buffer = buffer_of(base)
        array = buffer.read() if away and buffer.is_away else buffer.array
        if not is_symbolic(self.shape):
            return array.reshape(self.shape)
        used = tuple(slice(0, n) for n in shape_at(self.shape))
        return array.reshape(layout_shape(self.shape))[used]

    def _shared_values(self) -> Array:
        """Return `_values` as memory that code outside svod can write to from now on."""
        values = self._values()
        if self._memory is not None:
            self._shared, self._user_array = True, None
        elif is_realized(self):
            share(buffer_of(base_of(self.uop)))
        return values

    def numpy(self) -> Array:
        """A new array with the values. bfloat16 values are returned as float32, which represents them exactly."""
        memory = self._memory
        if memory is not None and self._memory_dtype is not dtypes.bfloat16:
            return memory.copy()
        values = self._values(away=True)
        return bfloat16_bits_to_float32(values) if self.dtype == dtypes.bfloat16 else values.copy()

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: builtins.bool | None = None) -> Array:
        """Support numpy.asarray: return a copy, or with copy=False the tensor's memory."""
        if copy is False and self.dtype != dtypes.bfloat16 and dtype in (None, to_numpy(self.dtype)):
            return self._shared_values()
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Support NumPy's array functions, such as `np.mean(t)` and `np.concatenate([t, a])`: compute the tensor now and return arrays.
        NumPy's ufuncs, such as `np.exp(t)`, return tensors: see `__array_ufunc__`."""
        if function in (np.shape, np.ndim) and not kwargs:      # these need no values
            return self.shape if function is np.shape else self.ndim
        return function(*_as_arrays(args), **_as_arrays(kwargs))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Map NumPy's ufuncs to tensor operations: `np.exp(t)` is the lazy `t.exp()`, and `array + t` is a tensor. Raises UnsupportedError
        for a ufunc without a tensor operation, and for `out=`; write `array += t.numpy()` instead of `array += t`."""
        return apply_ufunc(Tensor, ufunc, method, inputs, options)

    # -- memory shared with other libraries -------------------------------------------------------
    def __dlpack_device__(self) -> tuple[builtins.int, builtins.int]:
        """DLPack's type and number of the device. Raises DeviceError for memory that other libraries cannot use."""
        if self.device == HOST:
            return dlpack.CPU_DEVICE
        kind: tuple[builtins.int, builtins.int] | None = space_of(self.device).dlpack_device
        if kind is None:
            raise DeviceError(f"__dlpack__ of a tensor on {self.device}: other libraries cannot use memory there; share t.to('CPU')")
        return kind

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: builtins.bool | None = None) -> Any:
        """Compute the tensor now and return a DLPack capsule over its memory. `torch.from_dlpack(t)` and `numpy.from_dlpack(t)` call it.
        On CUDA, work that is queued on `stream` from now on runs after svod's work; None: the default stream; -1: the host waits for
        svod. Raises DeviceError for a device other than the tensor's and the CPU, and BufferError for read-only memory that the protocol
        cannot mark."""
        own = self.__dlpack_device__()
        wanted = own if dl_device is None else (builtins.int(dl_device[0]), builtins.int(dl_device[1]))
        if wanted != own:
            if wanted != dlpack.CPU_DEVICE or copy is False:
                raise DeviceError(f"__dlpack__ for DLPack device {wanted}: the tensor is on {self.device}, {own}")
            return self.cpu().__dlpack__(max_version=max_version)
        if own != dlpack.CPU_DEVICE:
            return dlpack.capsule_over((self.clone() if copy else self)._lent(dlpack.stream_of(stream)), own)
        values = self._values().copy() if copy else self._shared_values()
        if self.dtype == dtypes.bfloat16:
            return dlpack.bfloat16_capsule(values)
        # NumPy 1 does not accept max_version: it raises TypeError, and the caller tries again without
        return values.__dlpack__() if max_version is None else values.__dlpack__(max_version=max_version)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Compute the tensor now and describe its memory on CUDA for pycuda, Numba and CuPy, which may write there as long as the tensor
        lives. Their work on the default stream, or on a stream that waits for it, starts after svod's work, and svod's later runs that
        use the tensor start after theirs. Raises AttributeError for a tensor that is not on CUDA."""
        kind = None if self.device == HOST else space_of(self.device).dlpack_device
        if kind is None or kind[0] != dlpack.CUDA_KIND:
            raise AttributeError(f"__cuda_array_interface__ of a tensor on {self.device}: only memory on CUDA has it; use t.to('CUDA')")
        return cuda_arrays.interface_of(self._lent(dlpack.DEFAULT_STREAM), dlpack.DEFAULT_STREAM)

    def _lent(self, stream: builtins.int | None) -> dlpack.Shared:
        """The tensor's memory on its device, to which another library can write from now on, on `stream`."""
        buffer = buffer_of(base_of(self.realize().contiguous().realize().uop))
        memory = buffer.share_on(space_of(self.device), stream)
        share(buffer)
        shape, strides = shape_at(self.shape), dlpack.row_major(layout_shape(self.shape))
        return dlpack.Shared(memory.address, self.dtype, shape, strides, (buffer, memory))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], dtype: DTypeLike = dtypes.uint8, shape: tuple[builtins.int, ...] | None = None,
                  offset: builtins.int = 0) -> Tensor:
        """The content of a file from byte `offset` on, little-endian, on the device DISK:path: the file is mapped, and nothing is read.

        A copy of the tensor, or of a contiguous part of it, `t[2:4].to("CUDA")`, reads the bytes that it needs, in pieces. `shape`: by
        default all of the file from `offset` on. The file must not change while the tensor lives. Raises DeviceError for a file that cannot
        be mapped or is too short, ShapeError if its size is no whole number of elements."""
        mapped, kind, name = map_file(path), as_dtype(dtype), os.path.abspath(path)
        left, rest = divmod(mapped.size - offset, kind.itemsize)
        if shape is None and (rest or left < 0):
            raise ShapeError(f"from_file of {name}: {mapped.size - offset} bytes are no whole number of {kind.name}; give a shape")
        extents = extents_argument("from_file", (left,) if shape is None else shape)
        if 0 in extents:
            return cls.zeros(extents, dtype=kind)
        return cls.from_uop(graph.reshape(buffer_from_bytes(mapped, offset, kind, math.prod(extents), f"{DISK}:{name}"), extents))

    @classmethod
    def from_dlpack(cls, source: Any, *, stream: Any = None) -> Tensor:
        """Make a tensor of an object with `__dlpack__` (a PyTorch tensor, a NumPy or JAX array) on the CPU or on CUDA, or with
        `__cuda_array_interface__` (an array of pycuda or Numba). The tensor shares its memory; on the CPU it copies memory that is not
        C-contiguous. On CUDA the axes may be in any order, without gaps.

        `stream`: the CUDA stream on which the other library works with the memory as long as the tensor lives: a number (0 or 1 for the
        default stream), or a stream of pycuda, PyTorch or CuPy. Runs of svod that use the tensor start after the work on that stream, and
        later work on the stream starts after them. Without a stream, svod's work starts after the work that the library has queued so far.
        After later writes, the library itself must wait for their end before svod reads them, and each run of svod waits until the device
        is idle. Raises DeviceError and DTypeError."""
        known = None if stream is None else dlpack.stream_of(stream)
        if cuda_arrays.is_cuda_array(source):
            return cls._from_cuda_array(source, known)
        device = dlpack.device_of(source)
        if device != HOST:
            space = space_of(device_called(device))
            return cls._over_shared(dlpack.memory_of(source, space.dlpack_stream if known is None else dlpack.UNTOLD), space, known)
        array, is_bfloat16 = dlpack.array_of(source)
        return _in_memory(array, dtypes.bfloat16) if is_bfloat16 else cls(array)

    @classmethod
    def _from_cuda_array(cls, source: Any, stream: builtins.int | None) -> Tensor:
        shared, last, read_only = cuda_arrays.memory_of(source)
        if 0 in shared.shape:
            return cls.zeros(shared.shape, dtype=shared.dtype)
        space = space_of(space_of("CUDA").device_at(shared.address))
        if stream is None:
            space.follow(last)
        return cls._over_shared(shared, space, stream, read_only)

    @classmethod
    def _over_shared(cls, shared: dlpack.Shared, space: Any, stream: builtins.int | None, read_only: builtins.bool = False) -> Tensor:
        """A tensor over a device's memory that belongs to another library. `stream`: the stream of that library's work; None: unknown."""
        if 0 in shared.shape:
            return cls.zeros(shared.shape, dtype=shared.dtype)
        order = shared.order
        space.check_memory(shared.address)
        node = graph.buffer(shared.dtype, math.prod(shared.shape), space.label)
        buffer_of(node).place(space, shared, stream)
        buffer_of(node).read_only = read_only
        view = graph.reshape(node, [shared.shape[a] for a in order])
        return cls.from_uop(graph.permute(view, sorted(range(len(order)), key=order.__getitem__)))

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
            raise DTypeError(f"a tensor of {self.dtype.name} is neither an index nor a count: use int(t)")
        return builtins.int(self.item())

    def __round__(self, digits: builtins.int | None = None) -> Scalar: return builtins.round(self.item(), digits)
    def __int__(self) -> builtins.int: return builtins.int(self.item())
    def __float__(self) -> builtins.float: return builtins.float(self.item())

    # -- storage ---------------------------------------------------------------------------------
    def contiguous(self) -> Tensor:
        """Return the values in a separate row-major buffer; self if it already has one."""
        return self if is_realized(self) else self.from_uop(graph.contiguous(self.uop))

    def clone(self) -> Tensor:
        """Copy the values to another buffer."""
        return self.from_uop(graph.copy(self.uop, self.device) if self.numel() else self.uop)

    def detach(self) -> Tensor:
        """A tensor with the same values and the same memory. svod computes no gradients, so nothing else changes."""
        return self.from_uop(self.uop)

    __copy__ = detach      # for `copy.copy`

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Compute the values now and copy them to new memory."""
        make, arguments = self.__reduce__()
        made: Tensor = make(*(a.copy() if isinstance(a, np.ndarray) else a for a in arguments))
        return made

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the values, which are computed now. Unpickling returns a tensor in memory, or the constant that was pickled."""
        const = constant_value(self.uop)
        if const is not None:
            return Tensor.full, (self.shape, const.arg, self.dtype)
        return _in_memory, (self._values(away=True), self.dtype, HOST if self.device.startswith(DISK) else self.device)

    def assign(self, value: Operand) -> Tensor:
        """Write `value` (broadcast, cast to this dtype) into this tensor's memory when it is realised; returns self.

        `t[1:3].assign(x)` writes a part of the memory of `t`. Tensors that reshape the same memory see the new content. Lazy tensors made
        before the assignment, including parts, keep the old content. A tensor without its own memory, or over a read-only array, gets
        new memory. Raises UnsupportedError for a part of a read-only array, and DeviceError for the content of a file."""
        self._check_writable("assign")
        node = graph.broadcast(self._given(value).uop, self.shape, "assign")
        if 0 in self.shape or not self._is_in_memory():
            note_change()
            self._hold(graph.copy(node, self.device) if 0 not in self.shape else node)
        else:
            self._write(self.uop, node)
        return self

    def __setitem__(self, index: Any, value: Operand) -> None:
        """`t[1:3] = x`, `t[:, ::2] = x`: write a part (ints, slices, None, …) when the tensor is realised. `x` is broadcast and cast as in
        NumPy, and read completely before the write. Other tensors and memory are affected as by `assign`.

        `t[mask] = x` is `t.assign(where(mask, x, t))` for a bool mask over the first axes and an `x` that broadcasts to any number of
        chosen elements. An index with tensors, lists, arrays or a mask of known values rewrites the complete part that its ints and slices
        name; the last value for a repeated position stays. Raises UnsupportedError for a tensor mask that is not the only index, and for
        a part of a read-only array."""
        self._check_writable("t[…] = value")
        given = self._given(value)
        mask = self._as_mask(index)
        rest = self.shape[mask.ndim:] if mask is not None else ()
        spread = _without_leading_ones(given, len(rest))
        if mask is not None and (spread.ndim <= len(rest) or isinstance(index, Tensor)):
            if mask.shape != self.shape[:mask.ndim] or spread.ndim > len(rest):
                raise ShapeError(f"t[mask] = value of {given.shape} with a mask of {mask.shape} into {self.shape}: the mask must have the "
                                 f"first extents of the tensor, and the value must broadcast to {rest}; a value for each element chosen "
                                 "needs a mask of known values, mask.numpy()")
            self.assign(spread.broadcast_to(rest).where(mask.reshape(*mask.shape, *(1,) * len(rest)), self))
            return
        part, tensors = self._views(index)
        if tensors:
            places = len(broadcast_shapes("indexing", *(t.shape for _, t in tensors)))
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
        """Convert an index that is a mask to a tensor; None for any other index."""
        if not isinstance(index, (Tensor, np.ndarray, list)):
            return None
        mask = Tensor(index)
        return mask if mask.dtype == dtypes.bool and mask.ndim else None

    def _check_writable(self, name: str) -> None:
        """Raise DeviceError for the content of a file."""
        if self.device.startswith(DISK):
            raise DeviceError(f"{name} of a tensor on {self.device}: files are read only; write to a copy, "
                              "t.to('CPU'), and svod.nn.state.save writes files")

    def _given(self, value: Operand) -> Tensor:
        """Convert the assigned value to the dtype of this tensor. A Python float is rounded once; a Python int must fit."""
        if isinstance(value, builtins.float) and not isinstance(value, np.generic):
            return Tensor(value, dtype=self.dtype if self.dtype.is_float else dtypes.float64).cast(self.dtype)
        if isinstance(value, (builtins.int, list, tuple)) and not isinstance(value, builtins.bool):
            check_integers(value, self.dtype, "t[…] = value")
        return self._as_tensor(value).cast(self.dtype)

    def _is_in_memory(self) -> builtins.bool:
        """Whether an assignment writes existing memory; otherwise the tensor gets new memory. Raises UnsupportedError for a part of a
        read-only array, because the tensor of the whole array would not see the write."""
        content = content_under(self.uop)
        if content is None:
            return False
        if is_writable(content):
            return True
        if base_of(self.uop) is content:
            return False
        raise UnsupportedError(f"assignment to a part, of shape {self.shape}, of a read-only array: assign to the tensor that holds the "
                               "array, t[…] = value, and it gets memory of its own; or make the part a tensor of its own with clone()")

    def _take_memory(self) -> None:
        """Move the content to memory that this tensor owns."""
        memory = _as_held(graph.new_memory(self.dtype, storage_size(self.uop), self.device), self.shape)
        base = base_of(self.uop)
        # the assignment is a copy already, so a pending COPY or CONTIGUOUS is skipped
        value = graph.reshape(base.src[0], self.shape) if base.op in (Ops.COPY, Ops.CONTIGUOUS) else self.uop
        self._become(_as_held(graph.assign(memory, value), self.shape))

    def _write(self, view: UOp, value: UOp) -> None:
        """Write `value` through `view`, which is this tensor or a part of it, into the memory that it views. Afterwards this tensor and
        all tensors that reshape the memory have the new content."""
        older = content_under(view)
        assert older is not None
        content = latest_content(older) if base_of(self.uop) is not older else older
        new = graph.assign(view.substitute({older: content}), value)
        if base_of(self.uop) is not content:
            self._become(self.uop.substitute({older: new}))
        self._replace_content(content, new)

    @staticmethod
    def _replace_content(content: UOp, new: UOp) -> None:
        """Set the new content in every tensor that reshapes the memory of `content`."""
        for t in live_tensors():
            if isinstance(t, Tensor) and base_of(t.uop) is content:
                t._become(_as_held(new, t.shape))

    def _become(self, node: UOp) -> None:
        """Set the node to the result of an assignment."""
        note_assignment(self)
        note_change()
        self._hold(node)

    # -- conversions by name (they shadow the builtins inside this class) -------------------------------
    def cpu(self) -> Tensor:
        """The values on the CPU, copied if they are on another device."""
        return self.to(HOST)

    def to(self, target: DTypeLike) -> Tensor:
        """The values on a device ("CPU", "WEBGPU", "CUDA:1"), copied when they are needed; self if they are there. Or a cast to a dtype.

        Values computed from the result are computed on that device and stay there. A constant is on every device. Raises UnsupportedError
        for a device without a backend in svod, and DeviceError for a device that this machine lacks."""
        if not isinstance(target, str) or is_dtype_name(target):
            return self.cast(target)
        device = device_called(target)
        if device == self.device or constant_value(self.uop) is not None:
            return self
        return self.from_uop(graph.copy(self.uop, device))

    def type(self, dtype: DTypeLike) -> Tensor: return self.cast(dtype)
    def astype(self, dtype: DTypeLike) -> Tensor: return self.cast(dtype)
    def float(self) -> Tensor: return self.cast(dtypes.float32)
    def double(self) -> Tensor: return self.cast(dtypes.float64)
    def half(self) -> Tensor: return self.cast(dtypes.float16)
    def bfloat16(self) -> Tensor: return self.cast(dtypes.bfloat16)
    def int(self) -> Tensor: return self.cast(dtypes.int32)
    def long(self) -> Tensor: return self.cast(dtypes.int64)
    def bool(self) -> Tensor: return self.cast(dtypes.bool)

    def __format__(self, spec: str) -> str:
        """Format a tensor of one element as its value: `f"{loss:.3f}"`."""
        if not spec:
            return str(self)
        if self.numel() != 1:
            raise ShapeError(f"{spec!r} formats one number, and this is a tensor of shape {self.shape}: format its elements, t.tolist()")
        return format(self.item(), spec)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for a missing attribute, with a hint that names svod's equivalent."""
        own = type(self)
        if name.endswith("_") and not name.startswith("_") and hasattr(own, name[:-1]):
            hint = f"; operations change no tensor: x = x.{name[:-1]}(…), or x.assign(x.{name[:-1]}(…)) to keep it in x's memory"
        elif name in ("backward", "grad", "requires_grad", "retain_grad"):
            hint = "; svod runs models, it does not train them"
        elif name == "cuda":
            hint = '; use to("CUDA")'
        else:
            hint = ""
        raise AttributeError(f"{own.__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        """The shape and dtype, and the values if they are in memory. Nothing is computed for display."""
        const = constant_value(self.uop)
        if const is not None:
            state = f"constant {const.arg}"
        elif is_realized(self):
            state = f"realized {self._shown()}".rstrip() if self.device == HOST else f"realized on {self.device}"
        else:
            origin = origin_of(self.uop)
            state = f"lazy {base_of(self.uop).op.value}" + (f" from {origin}" if origin else "")
        return f"<Tensor {self.dtype.name}{list(self.shape)} {state}>"

    def _shown(self) -> str:
        """The values in memory as text, shortened if they are many; "" if nothing is computed yet or an extent depends on a variable."""
        memory = buffer_of(base_of(self.uop))
        if not memory.is_allocated or memory.is_away or is_symbolic(self.shape):
            return ""
        values = memory.array.reshape(self.shape)
        if self.dtype == dtypes.bfloat16:
            if self.numel() > SHOWN_VALUES:
                return ""
            values = bfloat16_bits_to_float32(values)
        return np.array2string(values, threshold=SHOWN_VALUES, edgeitems=2, separator=", ")


def _as_held(content: UOp, shape: tuple[int, ...]) -> UOp:
    """View the content of a buffer as a value of `shape`."""
    return graph.storage_view(content, shape) if is_symbolic(shape) else graph.reshape(content, shape)


def _without_leading_ones(value: Tensor, ndim: int) -> Tensor:
    """Remove leading axes of extent 1 from `value`, which NumPy ignores in an assignment to `ndim` axes."""
    while value.ndim > ndim and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    return value


def _as_arrays(given: Any) -> Any:
    """Replace tensors by arrays in the arguments of a NumPy function."""
    if isinstance(given, Tensor):
        return given.numpy()
    if isinstance(given, dict):
        return {name: _as_arrays(value) for name, value in given.items()}
    return type(given)(map(_as_arrays, given)) if type(given) in (list, tuple) else given


def _in_memory(values: Array, dtype: DType, device: str = HOST) -> Tensor:
    """Make a tensor over an array, or with a copy of its values on another device. For bfloat16 the array has the bits."""
    if 0 in values.shape or dtype != dtypes.bfloat16:
        return Tensor(values, dtype).to(device)
    return Tensor._over(np.require(values, np.uint16, ("C", "A")), dtype, shared=True).to(device)


def where(condition: Operand, x: Operand, y: Operand) -> Tensor:
    """Select x where `condition` is True, else y, elementwise as numpy.where and torch.where. Operands are tensors or numbers."""
    chooser = condition if isinstance(condition, Tensor) else Tensor(condition)
    return chooser._select(chooser, x, y)
