"""NVIDIA's GPUs as a backend: devices of this machine (CUDA, CUDA:1), architectures to compile for (CUDA:sm_90), and devices that run the
code of an older architecture (CUDA:0:sm_80)."""
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from svod.compile.backend import Backend
from svod.compile.cuda.code import Nvptx
from svod.compile.cuda.device import DEFAULT_STREAM, DeviceMemory, GpuDevice
from svod.compile.cuda.driver import Driver
from svod.compile.cuda.pycuda_driver import open_driver
from svod.compile.cuda.queue import CudaQueue, NoDeviceQueue
from svod.compile.cuda.targets import ARCHITECTURES, DEVICE, Architecture, target_of
from svod.compile.group_backend import GroupBackend
from svod.compile.plan.plan_parts import PreparedKernel, Variant
from svod.core.graph.buffer import Memory
from svod.core.machine.target import Target
from svod.system.forksafe import remake_after_fork


class _Nvidia(GroupBackend):
    """A backend of NVIDIA's GPUs, with or without a device."""

    name = DEVICE

    def __init__(self, pair: Nvptx) -> None:
        self.pair = pair
        self.compilers = (pair,)


class CompileOnly(_Nvidia):
    """An architecture for which plans are only compiled."""

    def __init__(self, architecture: Architecture, pair: Nvptx) -> None:
        super().__init__(pair)
        label = f"{DEVICE}:{architecture.name}"
        self.compiled_only = (f"svod compiles for {label}, which is no device: nothing runs there. On a machine with such a GPU use "
                              f"SVOD_DEVICE={DEVICE}; svod-tune --compile-only shows what its kernels need")
        self._target = target_of(architecture, architecture.card, label)

    def target(self, threads: int | None = None) -> Target:
        return self._target

    def allocate(self, nbytes: int, touch: bool = True) -> Memory:
        return _NoAddresses(nbytes)

    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        """Do nothing: plans are made without a device, so there is no memory to copy to."""

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        self.check_runs()

    def queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int],
              threads: int | None) -> NoDeviceQueue:
        return NoDeviceQueue(self.check_runs, kernels, variants, addresses)


class _NoAddresses:
    """A stand-in for device memory, with a distinct address that must never be accessed."""

    _next = itertools.count(1)

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.address = nbytes, next(self._next) << 40


class Cuda(_Nvidia):
    """A GPU of this machine. The driver is loaded when the device is first used."""

    ceilings = "svod.bench.device_ceilings"

    def __init__(self, ordinal: int = 0, open_driver: Callable[[], Driver] = open_driver, pair: Nvptx | None = None,
                 architecture: Architecture | None = None) -> None:
        super().__init__(pair or Nvptx())
        self.ordinal, self._open, self._architecture = ordinal, open_driver, architecture
        self.dlpack_device = (2, ordinal)       # kDLCUDA
        self._device: GpuDevice | None = None
        self._others: dict[str, Backend] = {}
        self._lock = threading.Lock()
        remake_after_fork(self, "_lock", threading.Lock)

    def device(self, rest: str) -> Backend | None:
        if rest in ("", "0"):
            return self
        with self._lock:
            if rest not in self._others:
                number, colon, older = rest.partition(":")
                if rest in ARCHITECTURES:
                    self._others[rest] = CompileOnly(ARCHITECTURES[rest], self.pair)
                elif number.isdecimal() and (not colon or older in ARCHITECTURES):
                    self._others[rest] = Cuda(int(number), self._open, self.pair, ARCHITECTURES.get(older))
            return self._others.get(rest)

    @property
    def label(self) -> str:
        return f"{DEVICE}:{self.ordinal}" if self.ordinal else DEVICE

    @property
    def names(self) -> str:
        compiled = ", ".join(f"{DEVICE}:{a}" for a in ARCHITECTURES)
        return f"{DEVICE}, {DEVICE}:1, … for the GPUs of this machine, {DEVICE}:0:sm_80 for one with older code, {compiled} to compile only"

    def count(self) -> int:
        return self._open().count()

    @property
    def gpu(self) -> GpuDevice:
        """The device. Raises DeviceError if there is none, with one sentence that says what to do."""
        with self._lock:
            if self._device is None:
                self._device = GpuDevice(self._open(), self.ordinal, self._architecture)
            return self._device

    @property
    def dlpack_stream(self) -> int:
        return self.gpu.stream

    def target(self, threads: int | None = None) -> Target:
        return self.gpu.target()

    def allocate(self, nbytes: int, touch: bool = True) -> DeviceMemory:
        return DeviceMemory(self.gpu.pool, nbytes)

    def wait(self) -> None:
        self.gpu.wait()

    def follow(self, stream: int | None) -> None:
        if stream is not None:
            self.gpu.follow(stream)

    def lead(self, stream: int | None) -> None:
        if stream is not None:
            self.gpu.lead(stream)
        else:
            self.gpu.wait()

    def device_at(self, address: int) -> str:
        """Return the label of the device that holds memory."""
        with self.gpu.current() as driver:
            ordinal, _ = driver.place_of(address)
        return f"{DEVICE}:{ordinal}" if ordinal else DEVICE

    def check_memory(self, address: int) -> None:
        self.gpu.check_memory(address)

    def lend(self, memory: Memory, stream: int | None) -> int | None:
        self.lead(stream)
        lasting = stream if stream in (DEFAULT_STREAM, self.gpu.stream) else None
        if isinstance(memory, DeviceMemory) and stream != self.gpu.stream:
            memory.lent.add(lasting)
        return lasting

    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        self.gpu.copy_in(device, host, nbytes)

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        self.gpu.copy_out(host, device, nbytes)

    def copy_from(self, device: int, other: Backend, address: int, nbytes: int) -> bool:
        return isinstance(other, Cuda) and self.gpu.copy_from(device, other.gpu, address, nbytes)

    def queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int],
              threads: int | None) -> CudaQueue:
        return CudaQueue(self.gpu, self.pair, kernels, variants, addresses)


BACKEND = Cuda()
