"""Backends: what svod asks of a family of devices. A backend is a folder of svod/compile and an entry of `BACKENDS`.

    CPU, CPU:0          LINEAR → LLVM IR → an object
    CPU:interpreter     LINEAR → itself, run instruction by instruction in NumPy: it tells whether lowering or LLVM made a wrong number
    WEBGPU, WEBGPU:1    LINEAR → WGSL → pipelines of wgpu
    CUDA, CUDA:1        LINEAR → LLVM IR → PTX → the driver
    CUDA:0:sm_80        the same, for an older architecture than the device's
    CUDA:sm_90          the same, compiled only: there need be no such device

    target       which machine it is, and its limits                    opts, the cost model and lowering ask it
    compilers    LINEAR → source → binary → loaded code                 a plan and the search take the same way
    cost         the predicted cycles of a state                        the search ranks its proposals by it
    heuristic    the chain of a kernel that nothing is known about
    allocate     memory of a plan's own                                 intermediates and temporaries
    copy_in      from the host's memory to the device's, and back       tensors' memory, where the device does not read the host's
    copy_from    from another device's memory, if it can be reached     copies between devices
    queue        what runs the launches of a plan                       `plan.execute()`, and every timing of the search
    ceilings     the fastest that the device computes and moves data    bounds of kernels in plans, the search and reports

A backend has one or more compilers. The first one is used unless the name of the device says otherwise. The number in a name (CUDA:1) tells
equal devices apart; they share their code, so keys hold the name without it.
"""
from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, Protocol

from svod.compile.lower.program import Program, ProgramSpec
from svod.compile.plan.object_cache import ObjectCache
from svod.compile.plan.plan_parts import Launches, LoadedCode, PreparedKernel, Segment, Variant
from svod.compile.resources import PhaseResources, resources_of
from svod.core.cost.cost import Cost
from svod.core.cost.work import StageWork
from svod.core.graph.buffer import Memory
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import HOST, Target, parse_key, threads_of
from svod.errors import DeviceError, StageMissing, UnsupportedError

MOST_THREADS = 4096     # most threads that a key may ask for
COLD_RUNS = 32          # most runs of a sample that begin with a cache filled with something else: filling may take longer than a run
BACKENDS = {HOST: "svod.compile.cpu.backend", "WEBGPU": "svod.compile.webgpu.backend", "CUDA": "svod.compile.cuda.backend"}
"""Device name → the module whose `BACKEND` it is, imported when the device is first asked for."""


class CompilerPair(ABC):
    """A renderer and a compiler: from a program to its source, its binary, and code that a queue can launch.

    `key` names the pair and its version in the keys of the object cache and in the tuning database. `revision` is raised with every change
    of the code that svod generates. `optimize`: False gives code sooner and for buffers that begin at a multiple of 64 bytes only; the
    search looks at most candidates this way. Each step raises CompileError for input that the step before cannot have made."""

    name: str
    key: str
    revision: int

    def legal(self, program: Program, target: Target) -> Program:
        """The program with the instructions alone that `render` prints, which it makes itself of what it is given. This is for pairs that
        run LINEAR as it is; others call `svod.compile.lower.legal.legalize` with the instructions that they have."""
        return program

    @abstractmethod
    def render(self, program: Program, target: Target, optimize: bool = True) -> str:
        """The source of a program."""

    @abstractmethod
    def compile(self, source: str, target: Target, optimize: bool = True) -> bytes:
        """The binary of a source."""

    @abstractmethod
    def load(self, code: bytes, spec: ProgramSpec) -> LoadedCode:
        """The binary in memory, ready to be launched."""

    def optimize(self, source: str, target: Target) -> str:
        """The source after the compiler's own passes, for people. Raises StageMissing where there are none."""
        raise StageMissing(f"the compiler {self.name} has no passes of its own to show; linear() shows what it is given")

    def assemble(self, source: str, target: Target) -> str:
        """The assembly of the binary, for people. Raises StageMissing where the binary is no machine code."""
        raise StageMissing(f"the compiler {self.name} makes no machine code; linear() shows what it runs")

    def disassemble(self, source: str, target: Target) -> str:
        """The machine code of a source, for people, where it is another language than the assembly. Raises StageMissing."""
        raise StageMissing(f"the compiler {self.name} shows machine code as assembly; asm() has it")

    def resources(self, code: bytes | LoadedCode, spec: ProgramSpec, target: Target) -> tuple[PhaseResources, ...]:
        """The needs of each phase of a program on a device with groups of threads; () on others. `code`: its binary, loaded or not."""
        return tuple(resources_of(target, p, p.block) for p in spec.phases) if target.has_groups else ()

    def functions(self, code: LoadedCode) -> Sequence[tuple[int, int, str]]:
        """The functions of loaded code in memory: (address, bytes, symbol); none where it is no machine code."""
        return ()

    def binary_of(self, program: Program, target: Target, optimize: bool = True) -> bytes:
        """The binary of a program."""
        return self.compile(self.render(program, target, optimize), target, optimize)


class LaunchQueue(Protocol):
    """Runs the launches of one plan. A kernel is identified by its number in the plan, memory by the index of a buffer, or of a temporary
    (numbered after the buffers). Arguments and variables keep their value until they are set again. One thread at a time calls it.

    `threads`: host threads that a launch may use. `may_fail`: whether a launch can leave a failure for `take_failure`."""

    threads: int
    may_fail: bool

    def segments(self, variant: Variant) -> tuple[Segment, ...]:
        """The segments that one run of a variant's kernels consists of."""

    def kernel_launches(self, kernel: int) -> Launches:
        """The launches of one kernel, without its phases that run once."""

    def runs_of(self, kernels: Sequence[int]) -> tuple[Launches, ...]:
        """Launches that run kernels one after the other, without their phases that run once: one list or several."""

    def once_launches(self, kernel: int) -> Launches:
        """The launches of a kernel's phases that run once, when the plan is made."""

    def run(self, launches: Launches, times: int, wait: bool = True) -> None:
        """Run launches `times` times, in order, and wait for the last. `wait` False: they need only have begun. A device does what it is
        given in order, so whoever uses what they write comes after them. An error of theirs is raised by the next call that waits."""

    def wait(self) -> None:
        """Wait for everything that was begun on the device. Raises what went wrong there."""

    def run_timed(self, launches: Launches, times: int, cold: bool = True) -> float | None:
        """`run`, and the seconds it took by the device's own clock; None where the device has none. `cold`: a device with a second cache of
        its own has it filled with something else before each run, which is not timed, so that no run finds there what another left. The
        first `COLD_RUNS` runs then stand for all, and no others are done. False: caches are as they are."""

    def take_failure(self) -> BaseException | None:
        """The first failure, since the last call, of code that cannot raise."""

    def bind(self, index: int, address: int) -> None:
        """Set the address of a buffer or temporary."""

    def set_variable(self, name: str, value: int) -> None:
        """Set a variable of the plan in every kernel that has it."""

    def set_range(self, kernel: int, phase: int, begin: int, end: int) -> None:
        """Let a phase run iterations begin ≤ i < end only."""

    def arguments(self, kernel: int) -> tuple[list[int], list[int]]:
        """The addresses and the values of variables that a kernel is given now."""


class Backend(ABC):
    """A family of devices."""

    name: str
    compilers: tuple[CompilerPair, ...]
    compiled_only: str | None = None    # why kernels can be compiled for the device and not run, in words; None: they run
    reads_host_memory = True            # kernels read and write NumPy arrays where they lie
    dlpack_device: tuple[int, int] | None = None    # DLPack's type and number of its memory; None: other libraries cannot use it
    load_seconds = 5.0                  # most seconds that a program may take to load: the driver may compile it
    ceilings: str | None = None         # the module whose `measure_figures` measures them; None: they are not known

    @property
    def dlpack_stream(self) -> int | None:
        """The stream that another library has wait for its work on memory that it shares; None: there are no streams."""
        return None

    def follow(self, stream: int | None) -> None:       # noqa: B027    as for `wait`
        """Let what is begun from now on come after what is on another library's stream. None: on one that is not known; that library has
        waited."""

    def lead(self, stream: int | None) -> None:
        """Let what another library puts on its stream from now on come after what was begun here. None: on one that is not known, so the
        host waits."""
        self.wait()

    def lend(self, memory: Memory, stream: int | None) -> int | None:
        """`lead`, for memory that the other library then uses: when that lets go of it, its next user comes after what the library did.
        The stream if it outlives the buffer, else None: it may be gone when the buffer is used again."""
        self.lead(stream)
        return None

    def device(self, rest: str) -> Backend | None:
        """The backend of the device that a name means with what follows the colon ('', '0', '1', …); None where there is no such device."""
        return self if rest in ("", "0") else None

    def count(self) -> int:
        """How many devices of the family this machine has; their numbers are below it. Raises DeviceError where it cannot be told."""
        return 1

    def check_runs(self) -> None:
        """Raise DeviceError where nothing runs on the device."""
        if self.compiled_only is not None:
            raise DeviceError(self.compiled_only)

    @property
    def label(self) -> str:
        """The name of this device, its number included."""
        return self.name

    @property
    def names(self) -> str:
        """How its devices are called, for people."""
        return ", ".join((self.name, *(f"{self.name}:{p.name}" for p in self.compilers)))

    @abstractmethod
    def target(self, threads: int | None = None) -> Target:
        """The device of this machine. `threads` caps the host threads that its launches use. Raises DeviceError where there is none."""

    @abstractmethod
    def cost(self, state: Scheduler) -> Cost:
        """The predicted cost of a state. It ranks states. Raises KernelOptError when the placements of a state contradict each other."""

    @abstractmethod
    def work(self, state: Scheduler) -> Sequence[StageWork]:
        """The work of each stage of a state, as one core or thread does it. Raises as `cost` does."""

    @abstractmethod
    def heuristic(self, state: Scheduler) -> Scheduler:
        """The state that a kernel runs in when nothing is known about it."""

    @abstractmethod
    def sketches(self, state: Scheduler) -> Sequence[Scheduler]:
        """The states that a search starts from, beside the heuristic's."""

    @abstractmethod
    def allocate(self, nbytes: int, touch: bool = True) -> Memory:
        """Memory on the device. `touch`: False for memory that is written before any launch is timed."""

    @property
    def opening(self) -> int:
        """A number that is another one where the device was lost and opened anew: plans and memory of before are gone."""
        return 0

    def has_lost(self, memory: Memory) -> bool:
        """Whether the content of memory is gone with the device that it was on; another has taken its place."""
        return False

    def wait(self) -> None:     # noqa: B027    there is nothing to wait for where nothing goes on after a call
        """Wait for everything that was begun on the device. Raises what went wrong there, with the names of the kernels that ran."""

    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        """Copy from an address of the host to one of the device, after everything that was begun there. The memory of the host has been
        read when this returns; the device may not be done. Asked only of backends that do not read host memory."""
        raise NotImplementedError(f"{self.name} has no memory of its own")

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        """Copy from an address of the device to one of the host, after everything that was begun there, and wait for it. Asked only of
        backends that do not read host memory."""
        raise NotImplementedError(f"{self.name} has no memory of its own")

    def copy_from(self, device: int, other: Backend, address: int, nbytes: int) -> bool:
        """Copy from an address of a device, this one or another, after everything that was begun there; False where there is no way but by
        the host's memory, and nothing was copied."""
        return False

    @abstractmethod
    def queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int],
              threads: int | None) -> LaunchQueue:
        """The queue of a plan. `addresses`: of every buffer (0: bound later), then of every temporary in the order of
        `temporary_numbers`. Raises LaunchError for code that does not fit its kernel."""

    @abstractmethod
    def start(self, cache: ObjectCache) -> None:
        """Load what queues need, from the object cache where it is there. Called before a plan is made; queues work without."""


def target_with(key: str) -> Target | None:
    """The device of this machine that a target's key stands for, with the threads and the instructions that the key allows; None where
    there is none."""
    threads = threads_of(key)
    named = [f.removeprefix("device=") for f in parse_key(key).get("features", "").split(",") if f.startswith("device=")]
    allowed = threads if threads is not None and 0 < threads <= MOST_THREADS else None
    for name in BACKENDS.keys() & (named or [HOST]):
        with contextlib.suppress(DeviceError):
            for number in range(backend_named(name).count()):
                target = backend_named(f"{name}:{number}").target(allowed)
                for switches in product((True, False), repeat=3):
                    if (found := target.allowing(*switches)).key == key:
                        return found
    return None


class Device(NamedTuple):
    """A backend and the compiler that a device's name selects."""

    backend: Backend
    pair: CompilerPair


def device_named(name: str) -> Device:
    """The device that a name means: 'CPU', 'cpu:0', 'CPU:interpreter', 'CUDA:1'. Raises UnsupportedError for one that there is not."""
    base, *rest = name.split(":")
    if base.upper() not in BACKENDS:
        raise UnsupportedError(f"there is no device {name!r}: use one of {', '.join(BACKENDS)}")
    family: Backend = importlib.import_module(BACKENDS[base.upper()]).BACKEND
    pair = next((k for k, p in enumerate(family.compilers) if rest and rest[-1].lower() == p.name), None)
    backend = family.device(":".join(rest if pair is None else rest[:-1]).lower())
    if backend is None:
        raise UnsupportedError(f"there is no device {name!r}: use {family.names}")
    return Device(backend, backend.compilers[pair or 0])


def backend_named(name: str) -> Backend:
    """The backend of a device."""
    return device_named(name).backend
