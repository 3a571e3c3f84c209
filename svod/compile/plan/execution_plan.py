"""ExecutionPlan: prepared kernels over buffers. The launch queue of the device runs them.

    kernels  [k0: phases (a, b), k1: phase (c)]        buffers  [x (input), w (constant), t (intermediate), y (output)]

Binding another address or setting a variable compiles nothing. `execute` is one call of the queue.

Python functions among the kernels, copies between devices and kernels of a second device divide a run into segments: the launches before
such an item are one call of the queue; then the thread that runs the plan executes the item, after the other kernels of its level. A plan
without such items is one segment.

A plan on a device that cannot read host memory uses the tensors' memory on the device. `execute` first copies the data that was written on
the host since the last run, and results stay on the device until the host asks for them (`svod.core.graph.buffer`). It returns when all
work has been issued to the device, which runs it in order; reading a result waits for it.

If variables have buckets, there is a kernel for each bucket, and a variant of the plan for each combination of buckets. Setting a variable
chooses the variant that runs. `kernels` are the kernels of this variant.
"""
from __future__ import annotations

import importlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from svod.compile.backend import LaunchQueue
from svod.compile.lower.program import ProgramSpec
from svod.compile.plan.memory_planner import PlannerMode
from svod.compile.plan.part import DevicePart
from svod.compile.plan.plan_parts import (
    NOTEBOOK,
    BufferKind,
    KernelLog,
    LoadedCode,
    PlanBuffer,
    PreparedKernel,
    Segment,
    VariableSpec,
    check_plan,
    describe_buffer,
)
from svod.compile.plan.running.bindings import Bindings
from svod.compile.plan.running.devices import PlanDevices, PlanMemory
from svod.compile.plan.running.equipment import Equipment
from svod.compile.plan.running.runs import Runs
from svod.compile.plan.running.values import PlanValues
from svod.core.graph.buffer import Buffer
from svod.core.graph.changes import note_writes
from svod.core.graph.copies import log_copies
from svod.core.machine.target import HOST
from svod.errors import LaunchError

log = logging.getLogger("svod")
MUCH = 1 << 20          # bytes of packed weights from which on the log mentions them
# the module behind `ExecutionPlan.analyze`: svod.bench imports plans, so it is imported only when needed
ANALYSIS = "svod.bench.analyze"


class ExecutionPlan:
    """Kernels and buffers, run by `execute`. A plan runs once at a time: concurrent calls wait for each other, because the plan owns its
    intermediates and its outputs. Threads that share a plan must hold `lock` from binding to reading. Two plans may run at the same time.

    `every`: all kernels in order, whatever the variables are. `kernels`: the kernels that run with the current values of the variables, and
    `running`: their positions in `every`; all of them if no variable has buckets. `segments`: the segments of a run. `variables`: by name,
    with their bounds. Hold `lock` to read several of these consistently while other threads set variables.

    A Python function that the plan calls (`PreparedKernel.is_host_item`) may run other plans and realize tensors; it must not change or run
    the plan that calls it.

    Raises LaunchError for buffers, variables and symbols that do not fit the programs."""

    every: tuple[PreparedKernel, ...]
    bindings: Bindings
    memory: PlanMemory
    parts: dict[str, DevicePart]
    is_local: bool
    threads: int
    variables: dict[str, VariableSpec]
    _devices: PlanDevices
    _equipment: Equipment
    _values: PlanValues
    _runs: Runs

    def __init__(self, kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer], outputs: Sequence[int] = (), *,
                 threads: int | None = None, planner: PlannerMode = "arena", device: str = HOST) -> None:
        self.device = device
        self.lock = threading.RLock()       # hold it to bind and execute as one step
        self.keep: object = None            # owners of memory that the plan uses, kept alive with the plan
        self.writes: tuple[Buffer, ...] = ()        # the tensors' memory that a run writes
        self.runs = 0                       # number of runs so far; a capture weighs plans by it
        self.names: Mapping[int, str] = {}  # buffer → name of the function's argument that it holds
        self.finish: Callable[[], None] | None = None       # compiles the kernels' own forms (`complete`); None: they run already
        self._outputs, self._most_threads = tuple(outputs), threads
        check_plan(kernels, buffers)
        for index in self._outputs:
            if not buffers[index].has_memory:
                raise LaunchError(f"buffer {index} is an output of the plan and has no memory")
        self.use(Equipment.of(kernels, buffers, device, threads, planner))
        self.prepare_seconds = self._runs.run_once_phases()
        if self.prepare_seconds:
            _say_packed(self)
        _plans.add(self)

    def use(self, equipment: Equipment) -> None:
        """Run this equipment from now on: a single step, so that neither an interrupt nor a fork finds the plan half-changed."""
        devices = equipment.devices
        self.__dict__.update(_equipment=equipment, every=equipment.every, _devices=devices, _values=equipment.values,
                             bindings=equipment.bindings, _runs=equipment.runs, memory=devices.memory, parts=devices.parts,
                             is_local=devices.is_local, threads=devices.queue.threads, variables=equipment.values.bounds)

    @classmethod
    def of_kernel(cls, spec: ProgramSpec, loaded: LoadedCode, arrays: Sequence[np.ndarray[Any, Any]], *, threads: int | None = None,
                  constants: Sequence[int] | None = None, device: str = HOST) -> ExecutionPlan:
        """Make a plan of one kernel over `arrays`, one per slot, for benchmarks and checks. `constants`: the slots that are constant in the
        kernel's AST.

        Raises LaunchError if `constants` is None and the kernel has phases that run once, because they read the constants before the first
        run."""
        if constants is None and any(phase.once for phase in spec.phases):
            raise LaunchError(f"program {spec.name} has phases that run once, when the plan is made; "
                              "tell of_kernel which slots are constants")
        kinds: list[BufferKind] = ["output" if slot in spec.outs else "constant" if slot in (constants or ()) else "input"
                                   for slot in range(len(arrays))]
        buffers = [PlanBuffer(array.nbytes, kind, array, dtype) for array, kind, (dtype, _) in zip(arrays, kinds, spec.params, strict=True)]
        return cls([PreparedKernel(spec, loaded, tuple(range(len(arrays))), spec.name)], buffers, spec.outs, threads=threads, device=device)

    def __repr__(self) -> str:
        def listed(kind: str, numbers: Iterable[int]) -> str:
            found = [f"{self.names.get(i, f'b{i}')} {describe_buffer(self.buffers[i])}" for i in numbers]
            return f", {kind} {', '.join(found[:8])}{', …' if len(found) > 8 else ''}" if found else ""
        inputs = [i for i, b in enumerate(self.buffers) if b.kind == "input"]
        count = len(self.every)
        what = f"{count} kernel{'s' * (count != 1)}" if count else "no kernels: what it was prepared for was computed before"
        variables = f", variables {', '.join(self.variables)}" if self.variables else ""
        return f"<ExecutionPlan {what}{listed('inputs', inputs)}{listed('outputs', dict.fromkeys(self._outputs))}{variables}>"

    def _repr_html_(self) -> str:
        shown: str = importlib.import_module(NOTEBOOK).plan_html(self)
        return shown

    @property
    def buffers(self) -> tuple[PlanBuffer, ...]:
        return self.bindings.buffers

    @property
    def kernels(self) -> tuple[PreparedKernel, ...]:
        """The kernels that run with the current values of the variables."""
        return self._runs.kernels

    @property
    def running(self) -> tuple[int, ...]:
        """The positions of `kernels` in `every`."""
        return self._runs.numbers

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._runs.segments

    @property
    def outputs(self) -> tuple[np.ndarray[Any, Any], ...]:
        """The memory of the outputs as flat arrays, in the order of the tensors the plan was made for. These are the arrays bound now, and
        every run overwrites them."""
        return tuple(self.output_buffer(i) for i in range(len(self._outputs)))

    def output_buffer(self, position: int = 0) -> np.ndarray[Any, Any]:
        """Return the memory of one output as a flat array. Raises LaunchError for a position that the plan does not have."""
        if not 0 <= position < len(self._outputs):
            raise LaunchError(f"output {position} was asked for; the plan has {len(self._outputs)}")
        array = self.bindings.newest(self._outputs[position])
        if array is None:
            raise LaunchError(f"output {position} has no memory: it is bound before each run")
        return array

    def release_intermediate_buffers(self) -> int:
        """Free the memory that intermediates share; the next run allocates it again. Outputs and packed weights stay. Returns the number of
        bytes freed."""
        with self.lock:
            self._runs.check_not_calling()
            return self._devices.release()

    def replicate(self, threads: int | None = None) -> ExecutionPlan:
        """Make an independent plan over the same code, inputs and constants, with its own outputs and intermediates: the two can run at the
        same time. `threads`: by default as many as this plan has; use 1 for one replica per thread of a server. The replica starts with
        this plan's bound arrays and variables.

        Raises LaunchError for a plan whose runs continue from the results of the previous run, because its state cannot be shared."""
        self.complete()
        with self.lock:
            self._runs.check_not_calling()
            self._runs.check_usable()
            if carried := self.bindings.carried:
                raise LaunchError(f"a plan that goes on from what it wrote to buffer {min(carried)} cannot run twice at a time; "
                                  "prepare one for each state")
            plan = ExecutionPlan(self.every, self.bindings.of_replica(), self._outputs, threads=threads or self.threads,
                                 planner=self.memory.mode, device=self.device)
            plan.keep = self.keep
            plan.set_variables(self.variable_values())
            return plan

    # -- other code ---------------------------------------------------------------------------------
    def complete(self) -> None:
        """Compile what is still being compiled in the background, and run it from now on. All methods that time kernels do this first, so
        that no first form (`PrepareConfig.first_forms`) is timed. Inside a function that the plan calls, the change follows the run."""
        if (finish := self.finish) is not None:
            finish()

    def exchange(self, kernels: Sequence[PreparedKernel]) -> Callable[[], bool]:
        """Prepare other code for the same kernels: allocate its memory, and pack its constants. Returns the function that lets all runs
        from then on use it; it waits for a run in progress, and returns False, without a change, inside a run of the same thread. For
        plans whose memory all is on the host."""
        buffers = self.buffers
        check_plan(kernels, buffers, is_new=False)
        made = Equipment.of(kernels, buffers, self.device, self._most_threads, self.memory.mode)
        seconds = made.runs.run_once_phases()

        def exchanged() -> bool:
            with self.lock:
                if self.is_running:
                    return False
                if self.failure is None:
                    made.go_on_from(self._equipment)
                    self.use(made)
                    self.prepare_seconds += seconds
                return True
        return exchanged

    def call_after_run(self, function: Callable[[], None]) -> None:
        """Call a function once, after the next run."""
        with self.lock:
            self._runs.call_after_run(function)

    # -- runs ---------------------------------------------------------------------------------------
    def execute(self, **variables: int) -> None:
        """Run all kernels once. Variables keep their value until they are set again.

        On a GPU the run may still be in progress when this returns, but the arrays that it reads may be changed. Everything that reads its
        results waits for it: `numpy()`, `outputs`, copies, other libraries; so does `wait`. An error in a kernel is raised at that point,
        with the kernel's name."""
        with self.lock:
            if variables:
                self.set_variables(variables)
            if not self.is_local:
                self.load_inputs()
            self._runs.run(1, wait=False)
            note_writes(self.writes)
            if not self.is_local:
                self._devices.note_written(self.bindings.written, copy=True)
                self._devices.lead()
            self.runs += 1

    def execute_with_vars(self, values: Mapping[str, int]) -> None:
        """Do `execute` with the variables in a mapping."""
        self.execute(**values)

    def wait(self) -> None:
        """Wait until the devices of the plan have finished all their work. Raises the errors that occurred there."""
        self._devices.wait()

    def load_inputs(self) -> None:
        """Copy the current inputs of a run to devices with their own memory, unless they are there already."""
        self._devices.load(self.bindings.bindable)

    def repeat(self, times: int) -> None:
        """Run all kernels `times` times, in one call of the queue if there are no host items between launches, as a sample for timing. A
        device with its own memory uses the data that the last `execute` or `load_inputs` left there, and copies nothing back; only arrays
        bound since then are copied to it."""
        self.repeat_timed(times, cold=None)

    def repeat_timed(self, times: int, *, cold: bool | None = False) -> float | None:
        """Do `repeat`, and return the seconds it took by the device's own clock; None if the device has no clock, or if Python functions
        run. `cold`: empty the device's L2 cache of the previous run's data before each run (`LaunchQueue.run_timed`); None: the time is not
        needed."""
        self.complete()
        with self.lock:
            self._devices.load_rest()
            seconds = self._runs.run(times, cold=cold)
            note_writes(self.writes)
            if not self.is_local:
                self._devices.note_written(self.bindings.written, copy=False)
            self.runs += times
            return seconds

    def queue_of(self, kernel: int) -> LaunchQueue:
        """Return the queue of the device that runs one of `every`."""
        return self._devices.queue_of(kernel)

    def repeat_kernel(self, kernel: int, times: int) -> float | None:
        """Run the phases of one of `kernels` `times` times, except the once phases. Returns the seconds by the device's own clock, without
        clearing its caches; None if the device has no clock, and for host items."""
        self.complete()
        with self.lock:
            return self._runs.run_kernel(kernel, times)

    def profile(self, runs: int = 5) -> list[float]:
        """Time each of `kernels` separately; returns the minimum of `runs` runs in seconds. The times are from the device's own clock, or
        from the host's, which includes about half a microsecond for the call."""
        self.complete()
        with self.lock:
            return self._runs.profile(runs)

    def analyze(self, ceilings: Any = None) -> Any:
        """Analyse the plan, kernel by kernel and as a whole (`svod.bench.analyze.PlanAnalysis`): work, memory, dependencies, the critical
        path, fusions that were not done. `ceilings` (`svod.bench.roofline.Ceilings`): the peak rates for the estimated times; None: this
        machine's, measured quickly if they are unknown. Runs nothing."""
        return importlib.import_module(ANALYSIS).analyze(self, ceilings)

    def open_after_run(self, buffers: Iterable[Buffer], reason: str) -> None:
        """Make outputs of the plan unreadable, for `reason`, until it has run for the first time."""
        with self.lock:
            self._runs.close_until_run(buffers, reason)

    def log_runs(self, log: KernelLog) -> None:
        """Time each kernel in every run from now on and report it to `log`, as well as all copies in this process. Kernels then run one
        after the other, even in the same level."""
        with self.lock:
            self._runs.log_to(log)
        log_copies(log)

    @property
    def failure(self) -> str | None:
        """Why the plan cannot be run any more; None if it can."""
        return self._runs.failure

    @property
    def is_running(self) -> bool:
        """Whether the plan, or a function that it calls, is running."""
        return self._runs.is_going_on

    # -- arguments ----------------------------------------------------------------------------------
    def bind_array(self, buffer: int, array: np.ndarray[Any, Any]) -> None:
        """Use `array` for an input or output from now on: C-contiguous, of the buffer's dtype and number of elements (bfloat16 as the
        uint16 of its bits), aligned to its elements, writable if the plan writes it. Memory that the plan writes must not overlap another
        buffer. Raises LaunchError."""
        with self.lock:
            self._runs.check_not_calling()
            self.bindings.bind_array(buffer, array)

    def set_variables(self, values: Mapping[str, int]) -> None:
        """Set variables of the kernels; they keep their value. Raises LaunchError for an unknown name."""
        with self.lock:
            self._runs.check_not_calling()
            if self._values.set(values):
                self._runs.choose()

    @contextmanager
    def at(self, values: Mapping[str, int]) -> Iterator[None]:
        """Set variables inside the context, and restore their previous values (or none) afterwards. Raises the errors of
        `set_variables`."""
        with self.lock:
            before, unset = self.variable_values(), self._values.unset & values.keys()
            self.set_variables(values)
            try:
                yield
            finally:
                self.set_variables({name: before[name] for name in values if name in before})
                self._values.unset |= unset

    def variable_values(self) -> dict[str, int]:
        """Return the variables that have a value, with their values."""
        return self._values.known()

    def set_range(self, kernel: int, phase: int, begin: int, end: int) -> None:
        """Restrict a phase to iterations begin ≤ i < end, to time a slice of it. Raises LaunchError outside 0 … extent."""
        self.complete()
        spec = self.kernels[kernel].spec.phases[phase]
        if not 0 <= begin <= end <= spec.extent:
            raise LaunchError(f"iterations {begin} to {end} of {spec.symbol} were asked for; it has 0 to {spec.extent}")
        with self.lock:
            self._values.slice(self.running[kernel], phase, begin, end)


def _say_packed(plan: ExecutionPlan) -> None:
    packing = [k for k in plan.every if k.packing is not None]
    originals = {k.buffers[slot] for k in packing for slot in k.packing.slots}      # type: ignore[union-attr]
    nbytes, kept = sum(plan.buffers[i].nbytes for i in originals), plan.memory.kept
    if kept >= MUCH:
        log.info("%d MB of weights are packed for %d kernels, in %d MB beside them", nbytes >> 20, len(packing), kept >> 20)


_plans: weakref.WeakSet[ExecutionPlan] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for plan in list(_plans):
        plan.lock = threading.RLock()       # the thread that holds the old lock may not exist in this process
        plan._runs.note_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
