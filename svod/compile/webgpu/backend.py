"""WebGPU as a backend: LINEAR → WGSL → pipelines of wgpu. It needs a driver for Vulkan, Metal or Direct3D 12. WEBGPU is the first adapter,
WEBGPU:1 the second."""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from svod.compile.backend import Backend, CompilerPair
from svod.compile.group_backend import GroupBackend
from svod.compile.lower.program import Program, ProgramSpec
from svod.compile.plan.object_cache import ObjectCache
from svod.compile.plan.plan_parts import PreparedKernel, Variant
from svod.compile.webgpu.adapter import NAME, adapter_target, adapters, device_name
from svod.compile.webgpu.code import WebGpuCode
from svod.compile.webgpu.device import GpuMemory, WebGpuDevice
from svod.compile.webgpu.queue import WebGpuQueue
from svod.compile.webgpu.render import legal, read_modules, render
from svod.core.graph.buffer import Memory
from svod.core.machine.target import Target
from svod.errors import CompileError, StageMissing
from svod.system.forksafe import remake_after_fork


class Wgsl(CompilerPair):
    """LINEAR → WGSL. The driver compiles it when it is loaded, on the device that `opened` returns, so a process that only compiles needs
    no device."""

    name, key, revision = "wgsl", "WGSL", 10

    def __init__(self, opened: Callable[[], WebGpuDevice]) -> None:
        self._opened = opened

    def legal(self, program: Program, target: Target) -> Program:
        return legal(program, target)

    def render(self, program: Program, target: Target, optimize: bool = True) -> str:
        return render(program, target)

    def compile(self, source: str, target: Target, optimize: bool = True) -> bytes:
        read_modules(source)
        return source.encode()

    def load(self, code: bytes, spec: ProgramSpec) -> WebGpuCode:
        try:
            return WebGpuCode(code.decode(), spec, self._opened())
        except UnicodeDecodeError as error:
            raise CompileError(f"this is no text of WGSL: {error}") from error

    def assemble(self, source: str, target: Target) -> str:
        raise StageMissing("the driver makes machine code of WGSL and does not show it; llvm() shows the WGSL")

    def disassemble(self, source: str, target: Target) -> str:
        return self.assemble("", target)


class WebGpu(GroupBackend):
    """An adapter that wgpu finds."""

    name = NAME
    load_seconds = 30.0
    ceilings = "svod.bench.device_ceilings"

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.compilers = (Wgsl(lambda: self.gpu),)
        self._device: WebGpuDevice | None = None
        self._others: dict[int, WebGpu] = {}
        self._lock = threading.Lock()
        remake_after_fork(self, "_lock", threading.Lock)

    def device(self, rest: str) -> Backend | None:
        if rest in ("", str(self.number)):
            return self
        if not rest.isdecimal():
            return None
        with self._lock:
            return self._others.setdefault(int(rest), WebGpu(int(rest)))

    @property
    def label(self) -> str:
        return device_name(self.number)

    @property
    def names(self) -> str:
        return f"{NAME}, {NAME}:1, … for the adapters of this machine"

    def count(self) -> int:
        return len(adapters())

    @property
    def gpu(self) -> WebGpuDevice:
        """The device, opened at its first use in this process, and again after it was lost. Raises DeviceError if there is none, and in a
        fork of the process that opened it."""
        with self._lock:
            self._device = WebGpuDevice(self.number) if self._device is None else self._device.reopened()
            return self._device

    def target(self, threads: int | None = None) -> Target:
        return adapter_target(self.number)

    def start(self, cache: ObjectCache) -> None:
        self.gpu.check_process()

    def allocate(self, nbytes: int, touch: bool = True) -> GpuMemory:
        return GpuMemory(self.gpu, nbytes)

    @property
    def opening(self) -> int:
        return self.gpu.first

    def has_lost(self, memory: Memory) -> bool:
        return isinstance(memory, GpuMemory) and bool(memory.device.lost)

    def wait(self) -> None:
        self.gpu.wait()

    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        self.gpu.write(device, host, nbytes)

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        self.gpu.read(host, device, nbytes)

    def copy_from(self, device: int, other: Backend, address: int, nbytes: int) -> bool:
        return other is self and self.gpu.copy(device, address, nbytes)

    def queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int],
              threads: int | None) -> WebGpuQueue:
        return WebGpuQueue(self.gpu, kernels, variants, addresses)


BACKEND = WebGpu()
