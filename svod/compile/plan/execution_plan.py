"""ExecutionPlan: prepared kernels over buffers. The launch queue of the device runs them.

    kernels  [k0: phases (a, b), k1: phase (c)]        buffers  [x (input), w (constant), t (intermediate), y (output)]

Binding another address or setting a variable compiles nothing; `execute` is one call of the queue.

Functions of Python among the kernels, copies between devices and kernels of a second device cut a run into segments: the launches before
such an item are one call of the queue; then the thread that runs the plan does the item, after the other kernels of its level. A plan
without them is one segment.

A plan on a device that does not read the host's memory uses the tensors' memory there. `execute` has what was written on the host since
copied there, and results stay there until the host asks for them (`svod.core.graph.buffer`). It returns when everything has begun on the
device, which does it in order; whoever reads a result waits for it.

Where variables have buckets there is a kernel for each bucket, and a variant of the plan for each combination of buckets. Giving a variable
a value chooses the variant that runs. `kernels` are those of this variant.
"""
from __future__ import annotations

import importlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from svod.compile.lower.program import ProgramSpec
from svod.compile.plan.memory_planner import PlannerMode
from svod.compile.plan.plan_parts import (
    NOTEBOOK,
    BufferKind,
    KernelLog,
    LoadedCode,
    PlanBuffer,
    PreparedKernel,
    Segment,
    check_plan,
    describe_buffer,
    variants_of,
)
from svod.compile.plan.running.bindings import Bindings
from svod.compile.plan.running.devices import PlanDevices
from svod.compile.plan.running.runs import Runs
from svod.compile.plan.running.values import PlanValues
from svod.core.graph.buffer import Buffer
from svod.core.graph.changes import note_writes
from svod.core.graph.copies import log_copies
from svod.core.machine.target import HOST
from svod.errors import LaunchError

log = logging.getLogger("svod")
MUCH = 1 << 20          # bytes of packed weights that are worth a line in the log
ANALYSIS = "svod.bench.analyze"     # the module behind `ExecutionPlan.analyze`: bench stands above plans, and is imported when asked for


class ExecutionPlan:
    """Run with `execute`. One run at a time: concurrent calls wait for each other, as the plan owns its intermediates and its outputs; who
    shares a plan between threads holds `lock` from binding to reading. Two plans may run at the same time.

    `every`: all kernels in order, whatever the variables are. `kernels`: those of them that run with the values that variables have now,
    and `running` their positions in `every`; all of them where no variable has buckets. `segments`: what a run of them consists of.
    `variables`: by name, with their bounds. Who reads several of these of a plan that others give values to holds `lock`.

    A function of Python that the plan calls (`PreparedKernel.is_host_item`) may run other plans and realize tensors; it must not change or
    run the plan that calls it.

    Raises LaunchError for buffers, variables and symbols that do not fit the programs."""

    def __init__(self, kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer], outputs: Sequence[int] = (), *,
                 threads: int | None = None, planner: PlannerMode = "arena", device: str = HOST) -> None:
        self.every = tuple(kernels)
        self.device = device
        self.lock = threading.RLock()       # hold it to bind and execute as one step
        self.keep: object = None            # owners of memory that the plan uses: they live as long as it
        self.writes: tuple[Buffer, ...] = ()        # the tensors' memory that a run writes
        self.runs = 0                       # runs of all kernels, by which a capture weighs plans
        self.names: Mapping[int, str] = {}  # buffer → name of the function's argument that it is
        self._outputs = tuple(outputs)
        check_plan(self.every, buffers)
        for index in self._outputs:
            if not buffers[index].has_memory:
                raise LaunchError(f"buffer {index} is an output of the plan and has no memory")
        variants = variants_of(self.every)
        self._devices = PlanDevices(self.every, buffers, variants, device, threads, planner)
        self._values = PlanValues(self.every, self._devices)
        self.bindings = Bindings(self.every, buffers, self._devices)
        self._runs = Runs(self.every, variants, self._devices, self._values, self.bindings)
        self.memory = self._devices.memory
        self.parts = self._devices.parts
        self.is_local = self._devices.is_local
        self.threads = self._devices.queue.threads
        self.variables = self._values.bounds
        self.prepare_seconds = self._runs.run_once_phases()
        if self.prepare_seconds:
            _say_packed(self)
        _plans.add(self)

    @classmethod
    def of_kernel(cls, spec: ProgramSpec, loaded: LoadedCode, arrays: Sequence[np.ndarray[Any, Any]], *, threads: int | None = None,
                  constants: Sequence[int] | None = None, device: str = HOST) -> ExecutionPlan:
        """A plan of one kernel over `arrays`, one per slot: what benchmarks and checks run. `constants`: the slots that the kernel's AST
        calls constant.

        Raises LaunchError where they are not told and phases run once: those read constants before the first run."""
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
        """The kernels that run with the values that variables have now."""
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
        """The outputs' memory, flat, in the order of the tensors the plan was made for; what is bound now, rewritten by every run."""
        return tuple(self.output_buffer(i) for i in range(len(self._outputs)))

    def output_buffer(self, position: int = 0) -> np.ndarray[Any, Any]:
        """The memory of one output, flat. Raises LaunchError for a position that the plan does not have."""
        if not 0 <= position < len(self._outputs):
            raise LaunchError(f"output {position} was asked for; the plan has {len(self._outputs)}")
        array = self.bindings.newest(self._outputs[position])
        if array is None:
            raise LaunchError(f"output {position} has no memory: it is bound before each run")
        return array

    def release_intermediate_buffers(self) -> int:
        """Give back the memory that intermediates share, until the next run allocates it anew. Outputs, and weights that kernels keep in an
        order of their own, stay. The number of bytes given back."""
        with self.lock:
            self._runs.check_not_calling()
            return self._devices.release()

    def replicate(self, threads: int | None = None) -> ExecutionPlan:
        """A plan of its own over the same code, inputs and constants, with its own outputs and intermediates: the two run at the same time.
        `threads`: as many as this one has by default; 1 for one replica per thread of a server. What is bound and set here is so there.

        Raises LaunchError for a plan whose runs go on from what they wrote: its state is in one place."""
        with self.lock:
            self._runs.check_usable()
            if carried := self.bindings.carried:
                raise LaunchError(f"a plan that goes on from what it wrote to buffer {min(carried)} cannot run twice at a time; "
                                  "prepare one for each state")
            plan = ExecutionPlan(self.every, self.bindings.of_replica(), self._outputs, threads=threads or self.threads,
                                 planner=self.memory.mode, device=self.device)
            plan.keep = self.keep
            plan.set_variables(self.variable_values())
            return plan

    # -- runs ---------------------------------------------------------------------------------------
    def execute(self, **variables: int) -> None:
        """Run all kernels once. Variables keep their value until it is given anew.

        On a GPU the run has begun when this returns, and the arrays that it reads may be changed. What reads its results waits for it:
        `numpy()`, `outputs`, copies, other libraries; so does `wait`. An error in a kernel is raised there, with its name."""
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
        """`execute`, with the variables in a mapping."""
        self.execute(**values)

    def wait(self) -> None:
        """Wait until the devices of the plan have done what they were given. Raises what went wrong there."""
        self._devices.wait()

    def load_inputs(self) -> None:
        """Copy what a run reads, as it is now, to devices with memory of their own, unless it is there."""
        self._devices.load(self.bindings.bindable)

    def repeat(self, times: int) -> None:
        """Run all kernels `times` times, in one call of the queue where there are no items between launches: a timer's sample. A device
        with memory of its own runs over what the last `execute` or `load_inputs` left there, and copies nothing back; only what was bound
        since is copied there."""
        self.repeat_timed(times, cold=None)

    def repeat_timed(self, times: int, *, cold: bool | None = False) -> float | None:
        """`repeat`, and the seconds it took by the device's own clock; None where it has none, or functions of Python run. `cold`: no run
        finds in the device's second cache what another left (`LaunchQueue.run_timed`); None: the seconds are not asked for."""
        with self.lock:
            self._devices.load_rest()
            seconds = self._runs.run(times, cold=cold)
            note_writes(self.writes)
            if not self.is_local:
                self._devices.note_written(self.bindings.written, copy=False)
            self.runs += times
            return seconds

    def repeat_kernel(self, kernel: int, times: int) -> float | None:
        """Run the phases of one of `kernels` `times` times, without those that run once. Returns the seconds by the device's own clock,
        with its caches as they were; None where it has none, and for what the host does."""
        with self.lock:
            return self._runs.run_kernel(kernel, times)

    def profile(self, runs: int = 5) -> list[float]:
        """Seconds of each of `kernels`, timed one by one; the least of `runs` runs. They are of the device's own clock, or of the host's
        with about half a microsecond of the call."""
        with self.lock:
            return self._runs.profile(runs)

    def analyze(self, ceilings: Any = None) -> Any:
        """Analyse the plan, kernel by kernel and as a whole (`svod.bench.analyze.PlanAnalysis`): work, memory, dependencies, the critical
        path, fusions that were not taken. `ceilings` (`svod.bench.roofline.Ceilings`): what times are estimated with; None: this machine's,
        measured quickly if they are not known. Runs nothing."""
        return importlib.import_module(ANALYSIS).analyze(self, ceilings)

    def open_after_run(self, buffers: Iterable[Buffer], reason: str) -> None:
        """Close the Buffers, outputs of the plan, for `reason`, until it has run for the first time."""
        with self.lock:
            self._runs.close_until_run(buffers, reason)

    def log_runs(self, log: KernelLog) -> None:
        """Time each kernel in every run from now on, and tell `log`; tell it of all copies of this process too. Kernels then run one after
        the other, those of one level too."""
        with self.lock:
            self._runs.log_to(log)
        log_copies(log)

    @property
    def failure(self) -> str | None:
        """Why it cannot be run any more; None: it can."""
        return self._runs.failure

    @property
    def is_running(self) -> bool:
        """Whether it runs, or a function that it calls does."""
        return self._runs.is_going_on

    # -- what it is applied to ----------------------------------------------------------------------
    def bind_array(self, buffer: int, array: np.ndarray[Any, Any]) -> None:
        """Use `array` for an input or output from now on: C-contiguous, of the buffer's dtype and number of elements (bfloat16 as the
        uint16 of its bits), aligned to its elements, writable if the plan writes it. Memory that the plan writes must not lie under another
        buffer too. Raises LaunchError."""
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
        """Inside, variables have these values; then they have those of before, or none again. Raises as `set_variables` does."""
        with self.lock:
            before, unset = self.variable_values(), self._values.unset & values.keys()
            self.set_variables(values)
            try:
                yield
            finally:
                self.set_variables({name: before[name] for name in values if name in before})
                self._values.unset |= unset

    def variable_values(self) -> dict[str, int]:
        """The variables that have a value, and what it is."""
        return self._values.known()

    def set_range(self, kernel: int, phase: int, begin: int, end: int) -> None:
        """Let a phase compute iterations begin ≤ i < end only, for timing a slice. Raises LaunchError outside 0 … extent."""
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
        plan.lock = threading.RLock()       # its holder may not exist here
        plan._runs.note_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
