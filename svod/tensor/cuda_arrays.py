"""Shares memory on CUDA with other libraries through `__cuda_array_interface__`
(https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3), which pycuda, Numba and CuPy support.

The interface describes an address and a stream, but no device. The object that offers it owns the memory.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from svod.core.ir.dtype import STORABLE, DType, dtypes, to_numpy
from svod.errors import DeviceError, DTypeError
from svod.tensor.dlpack import DEFAULT_STREAM, Shared, row_major

INTERFACE_VERSION = 3
BFLOAT16 = "|V2"        # NumPy's name for two bytes without a type, which arrays of ml_dtypes use for bfloat16
_BY_TYPESTR = {BFLOAT16: dtypes.bfloat16, **{to_numpy(d).str: d for d in STORABLE if d != dtypes.bfloat16}}


def is_cuda_array(source: Any) -> bool:
    """Whether an object offers memory on CUDA through this interface and not through DLPack, which is preferred because it names the
    device."""
    return not isinstance(source, type) and not hasattr(source, "__dlpack__") and hasattr(source, "__cuda_array_interface__")


def memory_of(source: Any) -> tuple[Shared, int, bool]:
    """(an object's memory, the stream of its last work on it, whether it is read-only). Without a stream in the interface, it is the
    default stream, on which pycuda works. Raises DTypeError and DeviceError for memory that svod cannot use."""
    name, about = type(source).__name__, source.__cuda_array_interface__
    if about.get("mask") is not None:
        raise DTypeError(f"{name}: its __cuda_array_interface__ has a mask; give the values and the mask as two arrays")
    dtype, shape = _dtype_of(name, str(about["typestr"])), tuple(int(n) for n in about["shape"])
    steps = about.get("strides")
    if steps is not None and any(s % dtype.itemsize for s in steps):
        raise DeviceError(f"{name} of shape {shape} with strides of {tuple(steps)} bytes: they are no multiples of an element's "
                          f"{dtype.itemsize} bytes; make it contiguous first")
    strides = row_major(shape) if steps is None else tuple(int(s) // dtype.itemsize for s in steps)
    address, read_only = about["data"]
    return Shared(int(address or 0), dtype, shape, strides, source), int(about.get("stream") or DEFAULT_STREAM), bool(read_only)


def interface_of(memory: Shared, stream: int) -> dict[str, Any]:
    """Describe memory for a consumer, whose work on it has to follow the work queued on `stream`."""
    typestr = BFLOAT16 if memory.dtype == dtypes.bfloat16 else to_numpy(memory.dtype).str
    return {"version": INTERFACE_VERSION, "shape": memory.shape, "typestr": typestr, "strides": None, "data": (memory.address, False),
            "stream": stream}


def _dtype_of(name: str, typestr: str) -> DType:
    kind = np.dtype(typestr)
    dtype = _BY_TYPESTR.get(kind.str)
    if dtype is None:
        raise DTypeError(f"{name}: svod has no dtype for {kind} ({typestr}) of its __cuda_array_interface__")
    return dtype
