"""WebGPU as a backend: LINEAR → WGSL → pipelines of wgpu. It runs where there is a driver for Vulkan, Metal or Direct3D 12."""
from __future__ import annotations

from collections.abc import Sequence

from svod.compile.backend import CompilerPair
from svod.compile.group_backend import GroupBackend
from svod.compile.lower.program import Program, ProgramSpec
from svod.compile.plan.object_cache import ObjectCache
from svod.compile.plan.plan_parts import PreparedKernel, Variant
from svod.compile.webgpu.adapter import NAME, adapter_target
from svod.compile.webgpu.code import WebGpuCode
from svod.compile.webgpu.device import GpuMemory, device
from svod.compile.webgpu.queue import WebGpuQueue
from svod.compile.webgpu.render import read_modules, render
from svod.core.graph.buffer import Memory
from svod.core.machine.target import Target
from svod.errors import CompileError, UnsupportedError


class Wgsl(CompilerPair):
    """LINEAR → WGSL. The driver makes code of it where it is loaded, so a process that compiles only needs no device."""

    name, key, revision = "wgsl", "WGSL", 5

    def render(self, program: Program, target: Target, optimize: bool = True) -> str:
        return render(program, target)

    def compile(self, source: str, target: Target, optimize: bool = True) -> bytes:
        read_modules(source)
        return source.encode()

    def load(self, code: bytes, spec: ProgramSpec) -> WebGpuCode:
        try:
            return WebGpuCode(code.decode(), spec)
        except UnicodeDecodeError as error:
            raise CompileError(f"this is no text of WGSL: {error}") from error

    def assemble(self, source: str, target: Target) -> str:
        raise UnsupportedError("the driver makes machine code of WGSL and does not show it; llvm(True) shows the WGSL")

    def disassemble(self, code: bytes, target: Target) -> str:
        return self.assemble("", target)

    def optimize(self, source: str, target: Target) -> str:
        return "\n".join(f"// phase {k}\n{forms.aligned.wgsl}" for k, forms in enumerate(read_modules(source)))


class WebGpu(GroupBackend):
    """The adapter that wgpu finds."""

    name = NAME
    compilers = (Wgsl(),)
    load_seconds = 30.0
    ceilings = "svod.bench.device_ceilings"

    def target(self, threads: int | None = None) -> Target:
        return adapter_target()

    def start(self, cache: ObjectCache) -> None:
        device()

    def allocate(self, nbytes: int, touch: bool = True) -> GpuMemory:
        return GpuMemory(device(), nbytes)

    @property
    def opening(self) -> int:
        return device().first

    def has_lost(self, memory: Memory) -> bool:
        return isinstance(memory, GpuMemory) and bool(memory.device.lost)

    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        _device().write(device, host, nbytes)

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        _device().read(host, device, nbytes)

    def queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int],
              threads: int | None) -> WebGpuQueue:
        return WebGpuQueue(kernels, variants, addresses)


_device = device
BACKEND = WebGpu()
