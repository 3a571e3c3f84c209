"""Detects changes of tensors since they were last read, and replaced parameters or submodules of modules.

For tensors, one native pass compares addresses, forms, versions, and a few sampled words. In Python, the addresses and versions of 244
tensors take 34 µs, because each needs a separate call, on memory that a run has evicted from the caches. For modules, PyTorch's hooks count
registrations.

PyTorch's C interface for compiled models (`aoti_torch_get_data_ptr`, `torch/csrc/inductor/aoti_torch/c/shim.h`) returns addresses and forms
of tensors. It has no versions; `at::TensorBase::_version() const` returns them, and is found by its name in the Itanium C++ ABI. With a
PyTorch that lacks one of these functions, tensors are compared one by one in Python.
"""
from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from string import Template
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.modules import module as hooks

from svod.compile.cpu.runtime import native_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.plan.object_cache import ObjectCache
from svod.config import PrepareConfig, object_cache_dirs
from svod.system.once import once
from svod.system.process.program import package_text
from svod.torch.memory import gpu_of

SAMPLED, MOST_SAMPLED = 16, 1024        # most words of 4 bytes that are compared: per tensor, and for all tensors together
_GOLDEN = (5 ** 0.5 - 1) / 2
_VERSION_OF = "_ZNK2at10TensorBase8_versionEv"

# byte offsets of the fields in the argument of `svod_unchanged`
(TENSORS, HANDLES, ADDRESSES, FORMS, VERSIONS, ADDRESS_OF, TYPE_OF, AXES_OF, SIZES_OF, STRIDES_OF, VERSION_OF, PLACES, WORDS,
 SAMPLES) = (8 * i for i in range(14))
_ASKED = ("aoti_torch_get_data_ptr", "aoti_torch_get_dtype", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_strides")


class _NativePass(NamedTuple):
    """The native pass, and the addresses of PyTorch's functions that it calls."""

    unchanged: Callable[[int], int]
    asked: tuple[int, ...]      # addresses of the functions named in _ASKED, by which the pass reads the address and the form of a tensor
    version_of: int
    code: object        # keeps the machine code alive


@once
def native() -> _NativePass | None:
    """The native pass; None for a PyTorch without the functions that it needs."""
    functions = ctypes.CDLL(torch._C.__file__)      # also finds functions of the libraries it depends on
    try:
        *asked, version_of = (ctypes.cast(getattr(functions, name), ctypes.c_void_p).value or 0 for name in (*_ASKED, _VERSION_OF))
        torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors      # noqa: B018
    except AttributeError:
        return None
    offsets = {name: value for name, value in globals().items() if isinstance(value, int)}
    ir = Template(package_text("svod.torch", "watch.ll")).substitute(offsets)
    cache = ObjectCache(*object_cache_dirs(PrepareConfig.of_environment().object_cache))
    code = LoadedProgram(native_object("watch", ir, cache), ("svod_unchanged",))
    # PYFUNCTYPE keeps the interpreter lock, so that no other thread changes a tensor during the pass
    return _NativePass(ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(code.addresses[0]), tuple(asked), version_of, code)


class TensorWatch:
    """The recorded state of tensors: their addresses and forms and, if `numbers`, their content, except on a GPU. It keeps the tensors
    alive, but not memory that they have given up since."""

    def __init__(self, tensors: Sequence[Any], *, numbers: bool = True) -> None:
        self._tensors = list(tensors)
        self._is_counted = numbers and not any(t.is_inference() for t in tensors)  # tensors made in inference mode have no version counter
        self._addresses = np.array(list(map(_address, tensors)), np.int64)
        self.forms = list(map(form_of, tensors))
        self._versions = np.array(list(map(_version, tensors)) if self._is_counted else [], np.int64)
        content = [t for t in tensors if numbers and not gpu_of(t)]
        most = max(1, min(SAMPLED, MOST_SAMPLED // max(1, len(content))))
        self._places = 4 * np.concatenate([np.zeros(0, np.int64), *(sampled(t, most) for t in content)])
        self._words = np.array([ctypes.c_uint32.from_address(a).value for a in self._places.tolist()], np.uint32)
        found = self._native = native()     # kept, with its machine code, as long as this object may call it
        # a function that tells whether the tensors are unchanged; valid as long as this object lives
        self.is_unchanged: Callable[[], object] = self._in_python
        if found is not None and all(t.layout is torch.strided for t in tensors):
            self.is_unchanged = functools.partial(found.unchanged, self._block(found))

    def _in_python(self) -> bool:
        """The comparisons of the native pass in Python. Content comes last, when it is known that the tensors still have their memory."""
        return (np.array_equal(list(map(_address, self._tensors)), self._addresses)
                and list(map(form_of, self._tensors)) == self.forms
                and (not self._is_counted or np.array_equal(list(map(_version, self._tensors)), self._versions))
                and all(ctypes.c_uint32.from_address(a).value == w
                        for a, w in zip(self._places.tolist(), self._words.tolist(), strict=True)))

    def _block(self, found: _NativePass) -> int:
        """The address of the native pass's argument, which is built here."""
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(self._tensors)
        weakref.finalize(self, torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs, capsules).atexit = False
        self._handles = np.array([_pointer_in(c, None) for c in capsules], np.int64)
        type_of, number = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(found.asked[1]), ctypes.c_int32()
        records = []
        for handle, (shape, strides, *_) in zip(self._handles.tolist(), self.forms, strict=True):
            type_of(handle, ctypes.addressof(number))
            records += [number.value, len(shape), *shape, *strides]
        self._records = np.array(records, np.int64)
        arrays = self._handles, self._addresses, self._records, self._versions, self._places, self._words
        handles, addresses, forms, versions, places, words = (a.ctypes.data for a in arrays)
        self._words_of_block = np.array([len(self._tensors), handles, addresses, forms, versions, *found.asked,
                                         found.version_of if self._is_counted else 0, places, words, len(self._places)], np.int64)
        return int(self._words_of_block.ctypes.data)


class Registrations:
    """Counts the parameters, buffers and submodules that modules of this process received since this object was made. PyTorch calls
    hooks for each: an assigned attribute, `register_parameter`, `load_state_dict(assign=True)`. Code that Dynamo traces is not counted,
    because Dynamo would guard on the count."""

    def __init__(self) -> None:
        self.count = 0
        for register in (hooks.register_module_parameter_registration_hook, hooks.register_module_buffer_registration_hook,
                         hooks.register_module_module_registration_hook):
            register(self._note)

    def _note(self, module: Any, name: str, value: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.count += 1


@once
def registrations() -> Registrations:
    """The only Registrations of this process."""
    return Registrations()


_version, _address = attrgetter("_version"), torch.Tensor.data_ptr
_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def form_of(t: Any) -> tuple[Any, ...]:
    """Shape, strides (or the layout, if not strided), dtype and device of a tensor."""
    return t.shape, t.stride() if t.layout is torch.strided else t.layout, t.dtype, t.device


def sampled(t: Any, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The addresses, divided by 4, of up to `most` 4-byte words spread over a tensor. From doubles, the half with the exponent is
    chosen."""
    address, size = t.data_ptr(), t.element_size()
    span = size * (1 + sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True))) if t.numel() else 0
    step = max(1, size // 4)        # words from one sampled element to the next
    places = span // 4 // step
    if address % 4 or not places:
        return np.zeros(0, np.int64)
    chosen = np.arange(places) if places <= most else (places * ((np.arange(most) * _GOLDEN) % 1)).astype(np.int64)
    half = step - 1 if t.dtype.is_floating_point else 0
    found: np.ndarray[Any, np.dtype[np.int64]] = address // 4 + step * chosen + half
    return found
