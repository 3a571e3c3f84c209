"""The toy device as a backend: LINEAR is its machine code, and `GridInterpreter` runs it."""
from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from svod.compile.backend import CompilerPair
from svod.compile.group_backend import GroupBackend
from svod.compile.lower.linear_text import decode_linear, encode_linear, render_linear
from svod.compile.lower.program import Program, ProgramSpec
from svod.compile.plan.launch_records import LaunchRecords
from svod.compile.plan.plan_parts import Launches, PreparedKernel, Variant
from svod.core.graph.buffer import Array
from svod.core.ir.dtype import to_numpy
from svod.core.machine.target import Target
from tests.toy_backend.interpreter import DeviceFault, run_phase
from tests.toy_backend.target import TOY


class ToyCode(NamedTuple):
    """A program in LINEAR, which the interpreter runs."""

    program: Program

    def close(self) -> None:
        """Does nothing, because no code was loaded."""


class Grid(CompilerPair):
    """The program's assembly: LINEAR as text."""

    name, key, revision = "grid", "LINEAR on a grid", 1

    def render(self, program: Program, target: Target, optimize: bool = True) -> str:
        return render_linear(program)

    def compile(self, source: str, target: Target, optimize: bool = True) -> bytes:
        return encode_linear(source)

    def load(self, code: bytes, spec: ProgramSpec) -> ToyCode:
        return ToyCode(decode_linear(code, spec))


_there: weakref.WeakSet[ToyMemory] = weakref.WeakSet()


class ToyMemory:
    """Memory of the toy device in bytes, initially garbage. Kernels reach no other memory."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.full(nbytes + 64, 0xA5, np.uint8)
        self.address, self.nbytes = -(-self.array.ctypes.data // 64) * 64, nbytes
        _there.add(self)


class ToyQueue(LaunchRecords):
    """Runs launches one after the other, each as a grid. A fault is raised by the plan's run."""

    def __init__(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int]) -> None:
        super().__init__(kernels, variants, addresses)
        self.rng = random.Random(0)

    def run(self, launches: Launches, times: int, wait: bool = True) -> None:
        for _ in range(times):
            for kernel, phase in self.recorded[launches.first]:
                self._launch(kernel, phase)

    def _launch(self, number: int, phase: int) -> None:
        kernel = self.kernels[number]
        assert isinstance(kernel.loaded, ToyCode)
        addresses, _ = self.arguments(number)
        args = [_bytes_at(address, size * dtype.itemsize).view(to_numpy(dtype))
                for address, (dtype, size) in zip(addresses, kernel.spec.params, strict=True)]
        temps = [_bytes_at(self.addresses[t], nbytes) for t, nbytes in zip(self.temps[number], kernel.spec.temps, strict=True)]
        run_phase(kernel.loaded.program, phase, args, temps, self.program_values(number), *self.ranges[number, phase], self.rng)

    def run_timed(self, launches: Launches, times: int, cold: bool = True) -> float | None:
        self.run(launches, times)
        return None


def _bytes_at(address: int, nbytes: int) -> Array:
    """Bytes of the device's memory."""
    if not nbytes:
        return np.empty(0, np.uint8)
    if not any(m.address <= address and address + nbytes <= m.address + m.nbytes for m in _there):
        raise DeviceFault(f"{nbytes} bytes at {address:#x} are not in the memory of the device")
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Toy(GroupBackend):
    """A device whose launches are grids of groups of threads."""

    name = TOY.device
    compilers = (Grid(),)

    def target(self, threads: int | None = None) -> Target:
        return TOY

    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        _bytes_at(device, nbytes)[:] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))[:] = _bytes_at(device, nbytes)

    def allocate(self, nbytes: int, touch: bool = True) -> ToyMemory:
        return ToyMemory(nbytes)

    def queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int],
              threads: int | None) -> ToyQueue:
        return ToyQueue(kernels, variants, addresses)


BACKEND = Toy()
