"""Backends: the interface of a family of devices. A backend is a folder of svod/compile and an entry of `BACKENDS`.

    CPU, CPU:0          LINEAR → LLVM IR → an object
    CPU:interpreter     LINEAR → itself, run in NumPy, to find out whether lowering or LLVM caused a wrong result
    WEBGPU, WEBGPU:1    LINEAR → WGSL → pipelines of wgpu
    CUDA, CUDA:1        LINEAR → LLVM IR → PTX → the driver
    CUDA:0:sm_80        the same, for an older architecture than the device's
    CUDA:sm_90          the same, compiled only: no such device is needed

    target       the machine and its limits                              for opts, the cost model and lowering
    compilers    LINEAR → source → binary → loaded code                  the same for plans and the search
    cost         the predicted cycles of a state                         ranks the proposals of the search
    heuristic    the chain of opts of a kernel without a tuned chain
    allocate     memory owned by a plan                                  for intermediates and temporaries
    copy_in      from host to device memory; copy_out: back              for tensors, if the device cannot read host memory
    copy_from    from another device's memory, if it is accessible       copies between devices
    queue        runs the launches of a plan                             for `plan.execute()`, and every timing of the search
    ceilings     the peak rates of the device                            bounds of kernels in plans, the search and reports

A backend has one or more compilers. The first one is used unless the device's name selects another. The number in a name (CUDA:1)
distinguishes equal devices; they share their code, so keys contain the name without the number.
"""
from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
from svod.core.machine.target import HOST, POLICIES, Target, parse_key, threads_of
from svod.errors import DeviceError, StageMissing, UnsupportedError

MOST_THREADS = 4096     # maximum number of threads in a target's key
COLD_RUNS = 32  # maximum number of runs of one timed sample with a cold cache: filling the cache with other data may take longer than a run
BACKENDS = {HOST: "svod.compile.cpu.backend", "WEBGPU": "svod.compile.webgpu.backend", "CUDA": "svod.compile.cuda.backend"}
"""Device name → the module that defines its `BACKEND`, imported when the device is first used."""


class CompilerPair(ABC):
    """A renderer and a compiler: they make source code from a program, a binary from the source, and code that a queue can launch from the
    binary.

    `key` names the pair and its version in the keys of the object cache and in the tuning database. `revision` must be increased with every
    change of the generated code. `optimize`: False compiles faster, to code that requires buffers aligned to 64 bytes; the search checks
    most candidates this way. `has_first_forms`: whether kernels of large plans are first compiled with that effort (`Choice.own`). Each
    step raises CompileError for input that the previous step cannot have made."""

    name: str
    key: str
    revision: int
    has_first_forms: bool = False

    def legal(self, program: Program, target: Target) -> Program:
        """Reduce a program to instructions that `render` can print; `render` calls this itself. The default is for pairs that run LINEAR
        unchanged; others call `svod.compile.lower.legal.legalize` with the instructions that they support."""
        return program

    @abstractmethod
    def render(self, program: Program, target: Target, optimize: bool = True) -> str:
        """Render the source code of a program."""

    @abstractmethod
    def compile(self, source: str, target: Target, optimize: bool = True) -> bytes:
        """Compile source code to a binary."""

    @abstractmethod
    def load(self, code: bytes, spec: ProgramSpec) -> LoadedCode:
        """Load a binary into memory, ready to be launched."""

    def optimize(self, source: str, target: Target) -> str:
        """Return the source code after the compiler's own passes, for display. Raises StageMissing if it has none."""
        raise StageMissing(f"the compiler {self.name} has no passes of its own to show; linear() shows what it is given")

    def assemble(self, source: str, target: Target) -> str:
        """Return the assembly of the binary, for display. Raises StageMissing if the binary is no machine code."""
        raise StageMissing(f"the compiler {self.name} makes no machine code; linear() shows what it runs")

    def disassemble(self, source: str, target: Target) -> str:
        """Return the disassembled binary of a source, for display, if it is in another language than `assemble` returns (SASS instead of
        PTX); otherwise raise StageMissing."""
        raise StageMissing(f"the compiler {self.name} shows machine code as assembly; asm() has it")

    def resources(self, code: bytes | LoadedCode, spec: ProgramSpec, target: Target) -> tuple[PhaseResources, ...]:
        """Return the resources of each phase of a program on a device with thread groups; () on other devices. `code`: the program's
        binary, loaded or not."""
        return tuple(resources_of(target, p, p.block) for p in spec.phases) if target.has_groups else ()

    def functions(self, code: LoadedCode) -> Sequence[tuple[int, int, str]]:
        """List the functions of loaded code in memory as (address, bytes, symbol); empty if it is not machine code."""
        return ()

    def binary_of(self, program: Program, target: Target, optimize: bool = True) -> bytes:
        """Render and compile a program."""
        return self.compile(self.render(program, target, optimize), target, optimize)


class LaunchQueue(Protocol):
    """Runs the launches of one plan. A kernel is identified by its number in the plan, memory by the index of a buffer, or of a temporary
    (numbered after the buffers). Arguments and variables keep their value until they are set again. Only one thread may call it at a time.

    `threads`: host threads that a launch may use. `may_fail`: whether a launch can leave a failure for `take_failure`."""

    threads: int
    may_fail: bool

    def segments(self, variant: Variant) -> tuple[Segment, ...]:
        """Return the segments of one run of a variant's kernels: launches that run together, each time followed by host items."""

    def kernel_launches(self, kernel: int) -> Launches:
        """Return the launches of one kernel, without its once phases, which run only when the plan is made."""

    def runs_of(self, kernels: Sequence[int]) -> tuple[Launches, ...]:
        """Return launches that run kernels one after the other, without their once phases: one list, or several to run in order."""

    def once_launches(self, kernel: int) -> Launches:
        """Return the launches of a kernel's once phases, which run when the plan is made."""

    def run(self, launches: Launches, times: int, wait: bool = True) -> None:
        """Run launches `times` times, in order, and wait for the last. `wait` False: return when they are issued. A device runs its work in
        order, so later work sees their results. Their errors are raised by the next call that waits."""

    def wait(self) -> None:
        """Wait for all work issued to the device. Raises its errors."""

    def run_timed(self, launches: Launches, times: int, cold: bool = True) -> float | None:
        """Do `run`, and return the seconds it took by the device's own clock; None if the device has no clock. `cold`: fill the device's L2
        cache with other data before each run (not timed), so that no run reads cached data of the previous one. Only the first `COLD_RUNS`
        runs are then done, and their time is scaled to `times`. False: caches are left unchanged."""

    def take_failure(self) -> BaseException | None:
        """Return the first failure of a launch since the last call, from code that cannot raise exceptions; None if nothing failed."""

    def bind(self, index: int, address: int) -> None:
        """Set the address of a buffer or temporary."""

    def set_variable(self, name: str, value: int) -> None:
        """Set a variable of the plan in every kernel that has it."""

    def set_range(self, kernel: int, phase: int, begin: int, end: int) -> None:
        """Restrict a phase to iterations begin ≤ i < end."""

    def vary(self, phases: Sequence[tuple[int, int]]) -> None:
        """Declare the phases (kernel, phase) whose numbers of iterations `at_extents` sets. Called once."""

    def at_extents(self, extents: tuple[int, ...]) -> Callable[[], None]:
        """Return a function that sets the numbers of iterations of the phases of `vary` to these; it may be called many times, also after
        they were set to others."""

    def arguments(self, kernel: int) -> tuple[list[int], list[int]]:
        """Return the current addresses of a kernel's arguments and the current values of its variables."""


class Backend(ABC):
    """A family of devices."""

    name: str
    compilers: tuple[CompilerPair, ...]
    compiled_only: str | None = None    # why kernels can only be compiled for the device but not run; None: they can run
    reads_host_memory = True            # kernels read and write NumPy arrays in place
    dlpack_device: tuple[int, int] | None = None    # DLPack's type and number of its memory; None: other libraries cannot use it
    load_seconds = 5.0                  # maximum time to load a program, in seconds: the driver may compile it
    ceilings: str | None = None         # the module whose `measure_figures` measures the device's peak rates; None: they are unknown

    @property
    def dlpack_stream(self) -> int | None:
        """The stream that another library makes wait for its own work on memory that it shares with svod; None: the device has no
        streams."""
        return None

    def follow(self, stream: int | None) -> None:       # noqa: B027 a backend without streams has nothing to order
        """Make operations issued from now on wait for the work on another library's stream. None: the stream is unknown, and that library
        has waited for its work itself."""

    def lead(self, stream: int | None) -> None:
        """Make work that another library issues to its stream from now on wait for the operations issued here. None: the stream is unknown,
        so the host waits."""
        self.wait()

    def lend(self, memory: Memory, stream: int | None) -> int | None:
        """Do `lead` for memory that the other library uses from now on. When that library releases the memory, the memory's next user
        waits for the library's work. Returns the stream if it outlives the buffer, otherwise None, because the stream may no longer
        exist when the buffer is used again."""
        self.lead(stream)
        return None

    def device(self, rest: str) -> Backend | None:
        """Return the backend of the device for the part of a name after the colon ('', '0', '1', …); None if there is no such device."""
        return self if rest in ("", "0") else None

    def count(self) -> int:
        """Return how many devices of the family this machine has; they are numbered from 0. Raises DeviceError if it cannot be
        determined."""
        return 1

    def check_runs(self) -> None:
        """Raise DeviceError if kernels cannot run on the device."""
        if self.compiled_only is not None:
            raise DeviceError(self.compiled_only)

    @property
    def label(self) -> str:
        """The name of this device, including its number."""
        return self.name

    @property
    def names(self) -> str:
        """The names that select this device, alone and with each of its compilers, for messages."""
        return ", ".join((self.name, *(f"{self.name}:{p.name}" for p in self.compilers)))

    @abstractmethod
    def target(self, threads: int | None = None) -> Target:
        """Return the Target of this machine's device. `threads` limits the host threads that its launches use. Raises DeviceError if there
        is no device."""

    @abstractmethod
    def cost(self, state: Scheduler) -> Cost:
        """Predict the cost of a state, by which states are ranked. Raises KernelOptError if the placements of a state contradict each
        other."""

    @abstractmethod
    def work(self, state: Scheduler) -> Sequence[StageWork]:
        """Return the work of each stage of a state for one core or thread. Raises KernelOptError as `cost` does."""

    @abstractmethod
    def heuristic(self, state: Scheduler) -> Scheduler:
        """Return the state for a kernel without a tuned chain."""

    def quick_choice(self, state: Scheduler) -> Scheduler:
        """Return a state for a kernel's first form, found sooner than the heuristic's."""
        return self.heuristic(state)

    @abstractmethod
    def sketches(self, state: Scheduler) -> Sequence[Scheduler]:
        """Return the states that a search starts from, in addition to the heuristic's."""

    @abstractmethod
    def allocate(self, nbytes: int, touch: bool = True) -> Memory:
        """Allocate memory on the device. `touch`: whether to touch its pages, so that no launch that is timed waits for the system; False
        for memory that is written before, or of which most runs use a part."""

    @property
    def opening(self) -> int:
        """A number that changes when the device was lost and reopened: earlier plans and memory are then invalid."""
        return 0

    def has_lost(self, memory: Memory) -> bool:
        """Whether the content of memory is lost, because its device was lost and reopened."""
        return False

    def wait(self) -> None:     # noqa: B027 a backend whose calls all finish before they return has nothing to wait for
        """Wait for all work issued to the device. Raises its errors, with the names of the kernels that ran."""

    def copy_in(self, device: int, host: int, nbytes: int) -> None:
        """Copy from an address of the host to one of the device, after all work issued there. The host memory has been read when this
        returns, but the device may still be copying. Only for backends that cannot read host memory."""
        raise NotImplementedError(f"{self.name} has no memory of its own")

    def copy_out(self, host: int, device: int, nbytes: int) -> None:
        """Copy from an address of the device to one of the host, after all work issued there, and wait for it. Only for backends that
        cannot read host memory."""
        raise NotImplementedError(f"{self.name} has no memory of its own")

    def copy_from(self, device: int, other: Backend, address: int, nbytes: int) -> bool:
        """Copy from an address of a device, this one or another, after all work issued there. Returns False, and copies nothing, if the
        only way is through host memory."""
        return False

    @abstractmethod
    def queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int],
              threads: int | None) -> LaunchQueue:
        """Make the queue of a plan. `addresses`: the address of every buffer (0: bound later), then of every temporary in the order of
        `temporary_numbers`. Raises LaunchError if code does not fit its kernel."""

    @abstractmethod
    def start(self, cache: ObjectCache) -> Callable[[], object] | None:
        """Prepare the process for plans; called before a plan is made. Returns a function that loads the code that queues need, from the
        object cache if possible, and that another thread may call meanwhile; queues also work without it. None: there is no such code."""


def target_with(key: str) -> Target | None:
    """Return the Target of this machine's device with this key, with the number of threads and the instructions that the key names; None
    if no device of this machine has such a target."""
    threads = threads_of(key)
    named = [f.removeprefix("device=") for f in parse_key(key).get("features", "").split(",") if f.startswith("device=")]
    allowed = threads if threads is not None and 0 < threads <= MOST_THREADS else None
    for name in BACKENDS.keys() & (named or [HOST]):
        with contextlib.suppress(DeviceError):
            for number in range(backend_named(name).count()):
                target = backend_named(f"{name}:{number}").target(allowed)
                for intrinsics, groups, rounding, numerics in product((True, False), (True, False), (True, False), POLICIES):
                    if (found := target.allowing(intrinsics, groups, rounding, numerics)).key == key:
                        return found
    return None


class Device(NamedTuple):
    """A backend and the compiler that a device's name selects."""

    backend: Backend
    pair: CompilerPair


def device_named(name: str) -> Device:
    """Return the device of a name: 'CPU', 'cpu:0', 'CPU:interpreter', 'CUDA:1'. Raises UnsupportedError if there is none."""
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
    """Return the backend of a device."""
    return device_named(name).backend
