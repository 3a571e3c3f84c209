"""Shares memory with other libraries through DLPack (https://dmlc.github.io/dlpack). NumPy implements the protocol for host memory except
bfloat16, which it lacks; this module reads and writes the C structure for bfloat16 and for memory of other devices.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from svod.core.graph.buffer import Array
from svod.core.ir.dtype import STORABLE, DType, dtypes, is_dtype_name
from svod.errors import DeviceError, DTypeError

CPU_KIND, CUDA_KIND = 1, 2      # kDLCPU, kDLCUDA
CPU_DEVICE = (CPU_KIND, 0)             # the device kDLCPU with number 0
DEFAULT_STREAM, UNTOLD = 1, -1  # DLPack's stream numbers: CUDA's default stream, and "no stream", which requests no synchronisation
_BFLOAT = 4                     # kDLBfloat
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}       # kDLInt, kDLUInt, kDLFloat, kDLBool, by the kind of a dtype
_REFUSED = (BufferError, RuntimeError, TypeError, ValueError)      # errors that libraries raise for memory that they cannot share
_CAPSULE_NAME = b"dltensor"   # the name of a capsule that no consumer has taken yet


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.argtypes, _is_capsule.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes, _pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object

_exported: dict[int, tuple[Any, ...]] = {}      # key: address of an exported structure; value: the objects that keep it alive


def _forget(address: int) -> None:
    _exported.pop(address, None)


_release = _Deleter(_forget)


class Shared(NamedTuple):
    """Memory of another library on a device. `strides` count elements. `owner`: an object that keeps the memory alive."""

    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: Any

    @property
    def order(self) -> tuple[int, ...]:
        """The axes from the outermost in memory to the innermost. Raises DeviceError for memory with gaps or repetitions."""
        axes = tuple(sorted(range(len(self.shape)), key=lambda a: (-self.strides[a], a)))
        expected = 1
        for a in reversed([a for a in axes if self.shape[a] != 1]):
            if self.strides[a] != expected:
                raise DeviceError(f"from_dlpack of shape {self.shape} with strides {self.strides}: memory of a device is shared without "
                                  "gaps and repetitions; make it contiguous first")
            expected *= self.shape[a]
        return axes


def is_shareable(value: Any) -> bool:
    """Whether an object offers memory that `Tensor.from_dlpack` accepts."""
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def device_of(source: Any) -> str:
    """The device of an object with `__dlpack__`: "CPU" or "CUDA:1". Raises DTypeError for an object without it, and DeviceError for a
    device of another kind."""
    if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
        raise DTypeError(f"from_dlpack of {type(source).__name__}: it has no __dlpack__")
    try:
        kind, number = map(int, source.__dlpack_device__())
    except _REFUSED as error:
        raise DeviceError(f"from_dlpack of {type(source).__name__}: {error}; svod shares memory of the CPU and of CUDA") from error
    if kind not in (CPU_KIND, CUDA_KIND):
        raise DeviceError(f"from_dlpack of memory on DLPack device {kind, number}: svod shares memory of the CPU and of CUDA; move it "
                          "there first")
    return "CPU" if kind == CPU_KIND else f"CUDA:{number}"


def stream_of(asked: Any) -> int | None:
    """The number of a stream, given as DLPack numbers it (1 is the default stream), as CUDA does (0 is), or as an object of pycuda,
    PyTorch, CuPy or cuda.core; None if it is unknown. Raises DTypeError for an object that is no stream."""
    number = asked if asked is None or isinstance(asked, int) else _handle_of(asked)
    return None if number == UNTOLD else number or DEFAULT_STREAM


def _handle_of(stream: Any) -> int:
    if hasattr(stream, "__cuda_stream__"):      # this method returns the protocol's version and the handle
        return int(stream.__cuda_stream__()[1])
    for attribute in ("handle", "cuda_stream", "ptr"):      # the attribute's name in pycuda, PyTorch, CuPy
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise DTypeError(f"stream={stream!r}: give a stream's number, or a stream of pycuda, PyTorch or CuPy")


def memory_of(source: Any, stream: int | None) -> Shared:
    """Get the memory of an object with `__dlpack__`. The other library makes `stream`, on which svod works, wait for its own work.
    Raises DTypeError for a dtype that svod lacks."""
    capsule = source.__dlpack__() if stream is None else source.__dlpack__(stream=stream)
    if not _is_capsule(capsule, _CAPSULE_NAME):
        raise DTypeError(f"from_dlpack of {type(source).__name__}: its __dlpack__ returns no capsule of the name dltensor")
    tensor, shape, strides = _contents(capsule)
    dtype = _dtype_of(tensor)
    if dtype is None:
        raise DTypeError(f"from_dlpack of {type(source).__name__}: svod has no dtype of DLPack's code {tensor.code}, {tensor.bits} bits "
                         f"and {tensor.lanes} lanes")
    return Shared((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, capsule)


def _contents(capsule: Any) -> tuple[_DLTensor, tuple[int, ...], tuple[int, ...]]:
    """(the structure in a capsule that no consumer has taken, its shape, its strides in elements)."""
    tensor = ctypes.cast(_pointer_of(capsule, _CAPSULE_NAME), ctypes.POINTER(_DLManagedTensor)).contents.tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    return tensor, shape, tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else row_major(shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of row-major contiguous memory."""
    return tuple(math.prod(shape[a + 1:]) for a in range(len(shape)))


def _dtype_of(tensor: _DLTensor) -> DType | None:
    if tensor.lanes != 1:
        return None
    if tensor.code == _BFLOAT:
        return dtypes.bfloat16 if tensor.bits == 16 else None
    known = [d for d in STORABLE if d != dtypes.bfloat16 and _CODES.get(d.kind) == tensor.code and 8 * d.itemsize == tensor.bits]
    return known[0] if known else None


def array_of(source: Any) -> tuple[Array, bool]:
    """(an array over the host memory of an object with `__dlpack__`, whether it has bfloat16 as uint16 with its bits). Raises
    DTypeError."""
    try:
        return np.from_dlpack(source), False
    except _REFUSED as error:
        bits = _bfloat16_bits(source)
        if bits is None:
            dtype = str(getattr(source, "dtype", "")).removeprefix("torch.")
            known = "" if not dtype or is_dtype_name(dtype) else (f"; svod has no {dtype}, convert the values to one of "
                                                                  f"{', '.join(d.name for d in STORABLE)} first")
            raise DTypeError(f"from_dlpack of {type(source).__name__}: {error}{known}") from error
        return bits, True


def _bfloat16_bits(source: Any) -> Array | None:
    """The bits of a bfloat16 tensor as uint16; the array keeps the capsule alive. None for any other object."""
    try:
        capsule = source.__dlpack__()
    except _REFUSED:
        return None
    if not _is_capsule(capsule, _CAPSULE_NAME):
        return None
    tensor, shape, strides = _contents(capsule)
    if (tensor.code, tensor.bits, tensor.lanes) != (_BFLOAT, 16, 1):
        return None
    if 0 in shape:
        return np.zeros(shape, np.uint16)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory: Any = (ctypes.c_uint16 * span).from_address(tensor.data + tensor.byte_offset)
    memory.capsule = capsule      # the destructor of the capsule returns the memory to its owner
    return np.asarray(np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.uint16), shape, tuple(2 * s for s in strides)))


def bfloat16_capsule(bits: Array) -> Any:
    """A capsule over bfloat16 bits, given as uint16."""
    return capsule_over(Shared(bits.ctypes.data, dtypes.bfloat16, bits.shape, tuple(s // 2 for s in bits.strides), bits), CPU_DEVICE)


def capsule_over(memory: Shared, device: tuple[int, int]) -> Any:
    """A capsule over memory of a DLPack device. The memory's owner is kept alive until the capsule's consumer releases it, and forever
    if there is no consumer."""
    ndim = len(memory.shape)
    shape = (ctypes.c_int64 * max(1, ndim))(*memory.shape)
    strides = (ctypes.c_int64 * max(1, ndim))(*memory.strides)
    code = _BFLOAT if memory.dtype == dtypes.bfloat16 else _CODES[memory.dtype.kind]
    tensor = _DLTensor(memory.address, *device, ndim, code, 8 * memory.dtype.itemsize, 1, shape, strides, 0)
    managed = _DLManagedTensor(tensor, None, _release)
    _exported[ctypes.addressof(managed)] = (managed, memory.owner, shape, strides)
    return _new_capsule(ctypes.addressof(managed), _CAPSULE_NAME, None)
