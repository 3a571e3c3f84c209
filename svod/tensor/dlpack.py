"""Memory shared with other libraries through DLPack (https://dmlc.github.io/dlpack). NumPy speaks the protocol for all dtypes but bfloat16,
which it lacks; this module reads and writes the C structure for bfloat16.
"""
from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from svod.core.graph.buffer import Array
from svod.errors import DeviceError, DTypeError

CPU_KIND = 1            # kDLCPU
CPU = (CPU_KIND, 0)     # its device 0
_BFLOAT = 4           # kDLBfloat
_REFUSED = (BufferError, RuntimeError, TypeError)      # what libraries raise for memory that they cannot share
_NAME = b"dltensor"   # the name of a capsule that no consumer has taken


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

_exported: dict[int, tuple[Any, ...]] = {}      # the objects that keep an exported structure alive, by its address


def _forget(address: int) -> None:
    _exported.pop(address, None)


_release = _Deleter(_forget)


def array_of(source: Any) -> tuple[Array, bool]:
    """An array over the CPU memory of an object with `__dlpack__`, and whether the array holds bfloat16 as its bits. Raises DeviceError and
    DTypeError."""
    if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
        raise DTypeError(f"from_dlpack of {type(source).__name__}: it has no __dlpack__")
    kind, number = map(int, source.__dlpack_device__())
    if kind != CPU_KIND:
        raise DeviceError(f"from_dlpack of memory on DLPack device {kind, number}: tensors live on the CPU; move it there first")
    try:
        return np.from_dlpack(source), False
    except _REFUSED as error:
        bits = _bfloat16_bits(source)
        if bits is None:
            raise DTypeError(f"from_dlpack of {type(source).__name__}: {error}") from error
        return bits, True


def _bfloat16_bits(source: Any) -> Array | None:
    """The bits of a bfloat16 tensor as uint16; the array keeps the capsule alive. None for any other object."""
    try:
        capsule = source.__dlpack__()
    except _REFUSED:
        return None
    if not _is_capsule(capsule, _NAME):
        return None
    tensor = ctypes.cast(_pointer_of(capsule, _NAME), ctypes.POINTER(_DLManagedTensor)).contents.tensor
    if (tensor.code, tensor.bits, tensor.lanes) != (_BFLOAT, 16, 1):
        return None
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if 0 in shape:
        return np.zeros(shape, np.uint16)
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if strides is not None else int(np.prod(shape))
    memory: Any = (ctypes.c_uint16 * span).from_address(tensor.data + tensor.byte_offset)
    memory.capsule = capsule      # the end of the capsule gives the memory back to its owner
    flat = np.frombuffer(memory, np.uint16)
    if strides is None:
        return flat.reshape(shape)
    return np.asarray(np.lib.stride_tricks.as_strided(flat, shape, tuple(2 * s for s in strides)))


def bfloat16_capsule(bits: Array) -> Any:
    """A capsule over bfloat16 bits, given as uint16. The array lives until the consumer of the capsule releases it, and forever if there is
    no consumer."""
    shape = (ctypes.c_int64 * max(1, bits.ndim))(*bits.shape)
    strides = (ctypes.c_int64 * max(1, bits.ndim))(*(s // 2 for s in bits.strides))
    tensor = _DLTensor(bits.ctypes.data, *CPU, bits.ndim, _BFLOAT, 16, 1, shape, strides, 0)
    managed = _DLManagedTensor(tensor, None, _release)
    _exported[ctypes.addressof(managed)] = (managed, bits, shape, strides)
    return _new_capsule(ctypes.addressof(managed), _NAME, None)
