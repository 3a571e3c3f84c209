"""NVIDIA's driver through pycuda, in a program that has imported `pycuda.driver`; calls that pycuda lacks go through ctypes.

    contexts        pycuda's context stack of the thread, so that pycuda's calls and svod's use the same current context
    memory          pycuda's allocator, which collects the program's garbage before it reports that memory is exhausted
    streams         pycuda.driver.Stream for svod's stream; a stream of another library is a number, for ctypes
    modules         pycuda.driver.Module, and prepared calls of its functions
    by ctypes       events (also recorded on streams of other libraries), graphs, copies between devices

pycuda destroys an object that has no references, so this driver keeps a reference to each object, by its number, until svod frees it.
"""
from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from svod.compile.cuda.driver import LOST, Driver, OutOfMemory, library_of_driver
from svod.errors import DeviceError, DeviceLost
from svod.system.once import once


def _translated(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of `PycudaDriver` raise svod's errors instead of pycuda's."""
    @wraps(call)
    def method(self: PycudaDriver, *args: Any) -> Any:
        try:
            return call(self, *args)
        except self._cuda.MemoryError as error:
            raise OutOfMemory(str(error)) from error
        except self._cuda.Error as error:
            kind = DeviceLost if int(self.library.cuCtxSynchronize()) in LOST else DeviceError
            raise kind(f"CUDA: {error}") from error
    return method


class PycudaDriver(Driver):
    """The driver through `cuda`, the module `pycuda.driver`. `library`: NVIDIA's library, for ctypes."""

    def __init__(self, library: Any, cuda: Any) -> None:
        self._cuda = cuda
        self._held: dict[int, Any] = {}         # number → pycuda's context, memory, stream, module or function
        self._ordinals: dict[int, int] = {}     # handle of a device → ordinal
        self._functions: dict[int, list[int]] = {}      # module → numbers of its functions
        super().__init__(library)

    def _hold(self, number: int, held: Any) -> int:
        self._held[number] = held
        return number

    # -- devices and contexts -----------------------------------------------------------------------
    def count(self) -> int:
        return int(self._cuda.Device.count())

    def device(self, ordinal: int) -> int:
        handle = super().device(ordinal)
        self._ordinals[handle] = ordinal
        return handle

    def name(self, device: int) -> str:
        return str(self._cuda.Device(self._ordinals[device]).name())

    def retain_context(self, device: int) -> int:
        context = self._cuda.Device(self._ordinals[device]).retain_primary_context()
        return self._hold(int(context.handle), context)

    def current_context(self) -> int:
        """Return the thread's current context if pycuda made it current; 0 if there is none or another library did."""
        context = self._cuda.Context.get_current()
        current = super().current_context()
        return current if context is not None and int(context.handle) == current else 0

    def adopt_context(self) -> int:
        context = self._cuda.Context.get_current()
        return self._hold(int(context.handle), context)

    def enter_context(self, context: int) -> None:
        self._held[context].push()

    def leave_context(self) -> None:
        self._cuda.Context.pop()

    def wait_for_all(self) -> None:
        self._cuda.Context.synchronize()

    # -- memory -------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> int:
        memory = self._cuda.mem_alloc(nbytes)
        return self._hold(int(memory), memory)

    def free(self, address: int) -> None:
        self._held.pop(address).free()

    def allocate_pinned(self, nbytes: int) -> int:
        memory = self._cuda.pagelocked_empty(nbytes, np.uint8)
        return self._hold(int(memory.ctypes.data), memory)

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._cuda.memcpy_htod_async(device, _bytes_at(host, nbytes), self._held[stream])

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._cuda.memcpy_dtoh_async(_bytes_at(host, nbytes), device, self._held[stream])

    # -- streams ------------------------------------------------------------------------------------
    def create_stream(self) -> int:
        stream = self._cuda.Stream(1)       # CU_STREAM_NON_BLOCKING
        return self._hold(int(stream.handle), stream)

    def is_done(self, stream: int) -> bool:
        return bool(self._held[stream].is_done())

    def wait(self, stream: int) -> None:
        self._held[stream].synchronize()

    # -- code ---------------------------------------------------------------------------------------
    def load_module(self, image: bytes) -> int:
        module = self._cuda.module_from_buffer(image)
        return self._hold(id(module), module)

    def unload_module(self, module: int) -> None:
        for held in (*self._functions.pop(module, ()), module):
            del self._held[held]

    def function(self, module: int, symbol: str) -> int:
        function = self._held[module].get_function(symbol)
        self._functions.setdefault(module, []).append(id(function))     # a module stays loaded as long as its functions are referenced
        return self._hold(id(function), function)

    def allow_shared(self, function: int, nbytes: int) -> None:
        self._held[function].set_attribute(self._cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes)

    def launch(self, function: int, grid: Sequence[int], block: int, shared: int, stream: int, arguments: Sequence[int]) -> None:
        prepared = self._held[function].prepare("Q" * len(arguments))
        prepared.prepared_async_call((*grid, 1), (block, 1, 1), self._held[stream], *[a & 0xFFFF_FFFF_FFFF_FFFF for a in arguments],
                                     shared_size=shared)


for _name, _call in list(vars(PycudaDriver).items()):
    if not _name.startswith("_"):
        setattr(PycudaDriver, _name, _translated(_call))


def _bytes_at(address: int, nbytes: int) -> Any:
    """Return a buffer over `nbytes` bytes at a host address."""
    return (ctypes.c_ubyte * nbytes).from_address(address)


@once
def open_driver() -> Driver:
    """Open the driver of this machine, through pycuda if the program has imported it. Raises DeviceError, which says what is missing and
    what to do."""
    library, cuda = library_of_driver(), sys.modules.get("pycuda.driver")
    driver = Driver(library) if cuda is None else PycudaDriver(library, cuda)
    if not driver.count():
        raise DeviceError("the NVIDIA driver finds no GPU (CUDA_VISIBLE_DEVICES hides some): only compile, as with SVOD_DEVICE=CUDA:sm_90")
    return driver
