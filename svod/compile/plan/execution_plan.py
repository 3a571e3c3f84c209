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
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from svod.compile.backend import LaunchQueue
from svod.compile.lower.program import ProgramSpec
from svod.compile.plan.host_item import HostProgram, Transfer
from svod.compile.plan.memory_planner import PlannerMode, plan_memory
from svod.compile.plan.packed import PackedMemory, packed_memory
from svod.compile.plan.part import Part, array_at, buffer_over, copy_between, devices_of
from svod.compile.plan.plan_parts import (
    NOTEBOOK,
    BufferKind,
    KernelLog,
    Launches,
    LoadedCode,
    PlanBuffer,
    PreparedKernel,
    Segment,
    Variant,
    address_of,
    check_array,
    check_launches,
    check_plan,
    describe_buffer,
    is_shared,
    lifetimes_of,
    names_of,
    ranges_of,
    temporary_numbers,
    variables_of,
    variants_of,
    written_by,
)
from svod.core.graph.buffer import Buffer, aligned_empty, give_back
from svod.core.graph.changes import note_writes
from svod.core.graph.copies import log_copies, noted
from svod.core.ir.dtype import dtypes
from svod.core.ir.launch import ONCE, check_bounds
from svod.core.machine.target import HOST
from svod.errors import LaunchError

log = logging.getLogger("svod")
MUCH = 1 << 20          # bytes of packed weights that are worth a line in the log
ANALYSIS = "svod.bench.analyze"     # the module behind `ExecutionPlan.analyze`: bench stands above plans, and is imported when asked for


@dataclass(frozen=True)
class PlanMemory:
    """Bytes that a plan allocates. `shared`: intermediates and temporaries of one run, as the planner placed them; its peak. `lower_bound`:
    the largest sum of those that are alive at one level. `kept`: what stays from run to run (weights in the order that a kernel wants);
    plans that keep the same share it."""

    mode: PlannerMode
    shared: int
    lower_bound: int
    kept: int


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
        self.buffers = tuple(buffers)
        self.device = device
        self.lock = threading.RLock()       # hold it to bind and execute as one step
        self.keep: object = None            # what has to live as long as the plan: owners of memory that it uses
        self.carried: frozenset[int] = frozenset()      # buffers whose content is the state that a run starts from and changes
        self.writes: tuple[Buffer, ...] = ()        # the tensors' memory that a run writes
        self.runs = 0                       # runs of all kernels, by which a capture weighs plans
        self.bindings = 0                   # how often an input or output got memory: who bound one last can tell
        self._outputs = tuple(outputs)
        self.names: Mapping[int, str] = {}  # of inputs, by buffer, where they are arguments of a function
        self._log: KernelLog | None = None     # what is told the time of each kernel
        self._failure: str | None = None    # why the plan refuses to run
        self._running = False               # launches do, or segments are being gone through
        self._calling = ""                  # the function of Python that is being called
        self._closed: list[tuple[Buffer, np.ndarray[Any, Any] | None]] = []     # outputs not computed yet
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}      # bound later; kept alive here
        check_plan(self.every, self.buffers)
        for index in self._outputs:
            if not self.buffers[index].has_memory:
                raise LaunchError(f"buffer {index} is an output of the plan and has no memory")
        self._over_positions = tuple(k for k in self.every if k.spec.launch != ONCE)     # whose launch values can make impossible
        self._written = frozenset(index for k in self.every for index in written_by(k))
        self.variables = variables_of(self.every)               # bounds of those that have some
        self._values: dict[str, int | None] = {name: None for k in self.every for name in names_of(k).values()}
        self._unset = set(self._values)
        self._is_sliced = False             # a phase computes a part of its iterations
        self._ranges = ranges_of(self.every)
        used = {index for k in self.every for index in k.buffers}
        self._bindable = {i for i, b in enumerate(self.buffers) if b.kind in ("input", "output")}
        self._without_memory = frozenset(i for i in self._bindable & used if not self.buffers[i].has_memory)
        self._unbound = set(self._without_memory)       # those of them that were not bound yet
        self._variants = variants_of(self.every)
        self.parts = {name: Part(name) for name in devices_of(self.every, self.buffers, device)}
        self.is_local = not any(p.is_remote for p in self.parts.values())      # all memory is the host's
        self._released = False              # the memory of intermediates and temporaries was given back
        self._packed: dict[int, PackedMemory]       # of kernels whose constants other plans may have packed
        addresses = self._allocate(planner)
        running = {device, *(k.device or device for k in self.every if not k.is_host_item)}
        self._queues = {name: p.make_queue(self.every, self._variants, addresses, device, threads) for name, p in self.parts.items()
                        if name in running}
        self._queue = self._queues[device]
        self.threads = self._queue.threads
        self._elsewhere: dict[int, tuple[LaunchQueue, tuple[Launches, ...]]] = {}   # of other devices: by the first of kernels in a row
        self._select(self._variants[-1])
        self.prepare_seconds = self._run_once_phases()
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
    def outputs(self) -> tuple[np.ndarray[Any, Any], ...]:
        """The outputs' memory, flat, in the order of the tensors the plan was made for; what is bound now, rewritten by every run."""
        return tuple(self.output_buffer(i) for i in range(len(self._outputs)))

    def output_buffer(self, position: int = 0) -> np.ndarray[Any, Any]:
        """The memory of one output, flat. Raises LaunchError for a position that the plan does not have."""
        if not 0 <= position < len(self._outputs):
            raise LaunchError(f"output {position} was asked for; the plan has {len(self._outputs)}")
        index = self._outputs[position]
        held = self._part_of(index).held.get(index)
        newest = held.array if held is not None else None       # where the run left it on a device, an array that was given is written now
        array = self._arrays.get(index, self.buffers[index].array)
        if array is None and newest is None:
            raise LaunchError(f"output {position} has no memory: it is bound before each run")
        return newest if array is None else array     # type: ignore[return-value]

    def _part_of(self, index: int) -> Part:
        """The device that a buffer lies on."""
        return self.parts[self.buffers[index].device or self.device]

    def release_intermediate_buffers(self) -> int:
        """Give back the memory that intermediates share, until the next run allocates it anew. Outputs, and weights that kernels keep in an
        order of their own, stay. The number of bytes given back."""
        with self.lock:
            if self._calling:
                self._refuse()
            if self._released or not self.memory.shared:
                return 0
            for part in self.parts.values():
                part.shared = None
            self._released = True
            return self.memory.shared

    def replicate(self, threads: int | None = None) -> ExecutionPlan:
        """A plan of its own over the same code, inputs and constants, with its own outputs and intermediates: the two run at the same time.
        `threads`: as many as this one has by default; 1 for one replica per thread of a server. What is bound and set here is so there.

        Raises LaunchError for a plan whose runs go on from what they wrote: its state is in one place."""
        with self.lock:
            if self._failure is not None:
                self._refuse()
            if self.carried:
                raise LaunchError(f"a plan that goes on from what it wrote to buffer {min(self.carried)} cannot run twice at a time; "
                                  "prepare one for each state")
            buffers = []
            for index, b in enumerate(self.buffers):
                array, storage = self._arrays.get(index, b.array), self._part_of(index).held.get(index, b.storage)
                if index in self._written and array is not None:
                    array, storage = aligned_empty(array.nbytes, dtypes.uint8).view(array.dtype), None
                elif index in self._written and storage is not None:
                    storage = Buffer(storage.dtype, storage.size, storage.device)
                buffers.append(replace(b, array=array, storage=storage))
            plan = ExecutionPlan(self.every, buffers, self._outputs, threads=threads or self.threads, planner=self.memory.mode,
                                 device=self.device)
            plan.keep = self.keep
            plan.set_variables(self.variable_values())
            return plan

    # What is run.

    def execute(self, **variables: int) -> None:
        """Run all kernels once. Variables keep their value until it is given anew.

        On a GPU the run has begun when this returns, and the arrays that it reads may be changed. What reads its results waits for it:
        `numpy()`, `outputs`, copies, other libraries; so does `wait`. An error in a kernel is raised there, with its name."""
        with self.lock:
            if variables:
                self.set_variables(variables)
            if not self.is_local:
                self.load_inputs()
            if self._is_plain:
                self._run(self._launches, 1, wait=False)
            else:
                self._run_segments(1, wait=False)
            note_writes(self.writes)
            if not self.is_local:
                self._note_written(copy=True)
                for part in self.parts.values():
                    part.lead()
            self.runs += 1

    def wait(self) -> None:
        """Wait until the devices of the plan have done what they were given. Raises what went wrong there."""
        for queue in self._queues.values():
            queue.wait()

    def load_inputs(self) -> None:
        """Copy what a run reads, as it is now, to devices with memory of their own, unless it is there."""
        self._load(self._bindable)

    def _load(self, numbers: Iterable[int] | None) -> None:
        for part in self.parts.values():
            part.load(numbers, self._bind_everywhere)

    def _note_written(self, *, copy: bool) -> None:
        for part in self.parts.values():
            part.note_written(self._written, copy=copy)

    def _bind_everywhere(self, index: int, address: int) -> None:
        for queue in self._queues.values():
            queue.bind(index, address)

    def repeat(self, times: int) -> None:
        """Run all kernels `times` times, in one call of the queue where there are no items between launches: a timer's sample. A device
        with memory of its own runs over what the last `execute` or `load_inputs` left there, and copies nothing back; only what was bound
        since is copied there."""
        with self.lock:
            if not self.is_local:
                self._load(None)
            if self._is_plain:
                self._run(self._launches, times)
            else:
                self._run_segments(times)
            note_writes(self.writes)
            if not self.is_local:
                self._note_written(copy=False)
            self.runs += times

    def repeat_timed(self, times: int, *, cold: bool = False) -> float | None:
        """`repeat`, and the seconds it took by the device's own clock; None where it has none, or functions of Python run. `cold`: no run
        finds in the device's second cache what another left (`LaunchQueue.run_timed`)."""
        with self.lock:
            seconds = None
            if not self.is_local:
                self._load(None)
            if self._is_plain:
                seconds = self._run(self._launches, times, cold=cold)
            else:
                self._run_segments(times)
            note_writes(self.writes)
            if not self.is_local:
                self._note_written(copy=False)
            self.runs += times
            return seconds

    def open_after_run(self, buffers: Iterable[Buffer], reason: str) -> None:
        """Close the Buffers, outputs of the plan, for `reason`, until it has run for the first time."""
        with self.lock:
            for buffer in buffers:
                self._closed.append((buffer, buffer.host))
                buffer.close(reason)
            self._is_plain = False

    def _open(self) -> None:
        for buffer, array in self._closed:
            buffer.open(array)
        self._closed.clear()
        self._is_plain = not self.segments[0].items and self._log is None

    def log_runs(self, log: KernelLog) -> None:
        """Time each kernel in every run from now on, and tell `log`; tell it of all copies of this process too. Kernels then run one after
        the other, those of one level too."""
        with self.lock:
            self._log, self._is_plain = log, False
        log_copies(log)

    def repeat_kernel(self, kernel: int, times: int) -> float | None:
        """Run the phases of one of `kernels` `times` times, without those that run once. Returns the seconds by the device's own clock,
        with its caches as they were; None where it has none, and for what the host does."""
        with self.lock:
            self._check_ready()
            if not self.is_local:
                self._load(None)
            if self.kernels[kernel].is_host_item:
                for _ in range(times):
                    self._do(self.running[kernel])
                return None
            queue = self._queue_of(self.running[kernel])
            return self._run(queue.kernel_launches(self.running[kernel]), times, queue, cold=False)

    def _queue_of(self, number: int) -> LaunchQueue:
        """The queue that runs a kernel, by its number among all."""
        return self._queues[self.every[number].device or self.device]

    def analyze(self, ceilings: Any = None) -> Any:
        """What the plan does, kernel by kernel and as a whole (`svod.bench.analyze.PlanAnalysis`): work, memory, dependencies, the critical
        path, fusions that were not taken. `ceilings` (`svod.bench.roofline.Ceilings`): what times are estimated with; None: this machine's,
        measured quickly if they are not known. Runs nothing."""
        return importlib.import_module(ANALYSIS).analyze(self, ceilings)

    def profile(self, runs: int = 5) -> list[float]:
        """Seconds of each of `kernels`, timed one by one; the least of `runs` runs. They are of the device's own clock, or of the host's
        with about half a microsecond of the call."""
        with self.lock:
            best = [float("inf")] * len(self.kernels)
            for _ in range(runs):
                for i in range(len(best)):
                    start = time.perf_counter()
                    try:
                        seconds = self.repeat_kernel(i, 1)
                    except BaseException:
                        self._stopped_after(self.kernels[:i + 1])
                        raise
                    best[i] = min(best[i], time.perf_counter() - start if seconds is None else seconds)
        return best

    def _stopped_after(self, kernels: Iterable[PreparedKernel]) -> None:
        """A run was given up after `kernels`: another one repairs that, unless it would start from what this one has written."""
        changed = self.carried & {index for k in kernels for index in written_by(k)}
        if changed:
            self.poison(f"a run stopped half-way, after buffer {min(changed)}, which runs go on from, was written")

    def _run_segments(self, times: int, wait: bool = True) -> None:
        """Run all kernels and the items among them, and open the outputs if this was the first time. `wait`: for the last kernel."""
        self._check_ready()
        begun: set[int] = set()
        self._running = True
        try:
            for _ in range(times):
                if self._log is not None:
                    self._run_logged(self._log, begun)
                    continue
                for launches, items, kernels in self.segments:
                    begun.update(kernels)
                    if launches.size or not items:
                        self._run(launches, 1, wait=False)
                        self._running = True
                    for number in items:
                        self._do(number)
            if wait:
                self.wait()
        except BaseException:
            if self.segments[0].items or self._log is not None:     # a single call of the queue runs to its end
                self._stopped_after(self.every[i] for i in begun)
            raise
        finally:
            self._running = False
        if self._closed and times:
            self._open()

    def _run_logged(self, log: KernelLog, begun: set[int]) -> None:
        """Run the kernels one by one, and tell the log what each took. `begun` gets their numbers."""
        values = self.variable_values()
        for number, kernel in zip(self.running, self.kernels, strict=True):
            begun.add(number)
            start, seconds = time.perf_counter(), None
            if kernel.is_host_item:
                self._do(number)
            else:
                queue = self._queue_of(number)
                seconds = self._run(queue.kernel_launches(number), 1, queue, cold=False)
                self._running = True
            end = time.perf_counter()
            if seconds is None:
                seconds = end - start
            if not isinstance(kernel.loaded, Transfer):     # which is told as a copy
                device = HOST if kernel.is_host_item else self.parts[kernel.device or self.device].backend.label
                log.add(kernel, device, max(start, end - seconds), seconds, values)     # on a device it ended when the host saw it

    def _do(self, number: int) -> None:
        """Do an item that the plan's queue does not run, by its number among all: call a function of Python, copy from device to device, or
        have another device run its kernels."""
        k = self.every[number]
        if isinstance(k.loaded, HostProgram):
            self._call(number, k, k.loaded)
        elif isinstance(k.loaded, Transfer):
            addresses, _ = self._queue.arguments(number)
            to, source = (self._part_of(b) for b in k.buffers)
            read = self._arrays.get(k.buffers[1], self.buffers[k.buffers[1]].array)
            with noted(source.backend.label, to.backend.label, k.loaded.nbytes, to.backend):
                copy_between(to, addresses[0], source, addresses[1], k.loaded.nbytes, None if source.is_remote else read)
        else:
            queue, runs = self._elsewhere[number]
            for launches in runs:
                self._run(launches, 1, queue, wait=False)
                self._running = True

    def _call(self, number: int, k: PreparedKernel, function: HostProgram) -> None:
        addresses, numbers = self._queue.arguments(number)
        values = {v.name: n for v, n in zip(k.variables, numbers, strict=True)}
        owners = [self._arrays.get(b, self.buffers[b].array) for b in k.buffers]
        self._calling = k.name or k.spec.name
        try:
            part = self.parts[k.device or self.device]
            if part.is_remote:
                part.call(function, addresses, [size * dtype.itemsize for dtype, size in k.spec.params], k.spec.outs, values)
            else:
                function.run(addresses, [part.shared if o is None else o for o in owners], values)
        finally:
            self._calling = ""

    def _check_ready(self) -> None:
        if self._failure is not None or self._unbound or self._unset or self._calling:
            self._refuse()
        if self._released:
            self._allocate_again()

    def _run(self, launches: Launches, times: int, queue: LaunchQueue | None = None, *, cold: bool | None = None,
             wait: bool = True) -> float | None:
        """Have a queue, the plan's own unless another is given, run launches. Seconds by the device's clock, where they are asked for
        (`cold`, see `LaunchQueue.run_timed`, is not None) and it has one. `wait`: see `LaunchQueue.run`. Raises what went wrong in a
        kernel that could not raise it itself."""
        if self._failure is not None or self._unbound or self._unset:
            self._refuse()
        if self._released:
            self._allocate_again()
        queue = queue or self._queue
        self._running = True
        try:
            if cold is not None:
                return queue.run_timed(launches, times, cold)
            queue.run(launches, times, wait)
            return None
        finally:
            self._running = False
            if queue.may_fail:
                self._raise_failure(queue)

    def _raise_failure(self, queue: LaunchQueue) -> None:
        failure = queue.take_failure()
        if failure is not None:
            if self.carried:
                self.poison("a kernel failed, and runs go on from what the one before left")
            raise failure

    def _refuse(self) -> None:
        if self._failure is not None:
            raise LaunchError(f"this plan cannot be run any more: {self._failure}; prepare it again")
        if self._calling:
            raise LaunchError(f"{self._calling}, a function that this plan calls, runs or changes the plan itself; run another one, "
                              "made by prepare() or replicate() before")
        if self._unbound:
            raise LaunchError(f"inputs {sorted(self._unbound)} of the plan have no memory; bind them before the first run")
        raise LaunchError(f"variables {', '.join(sorted(self._unset))} have no value; pass them to execute()")

    @property
    def failure(self) -> str | None:
        """Why it cannot be run any more; None: it can."""
        return self._failure

    @property
    def is_running(self) -> bool:
        """Whether it runs, or a function that it calls does."""
        return self._running or bool(self._calling)

    def poison(self, reason: str) -> None:
        """Make the plan refuse to run: its buffers are in a state that no run would leave."""
        self._failure = reason

    # What it is applied to.

    def bind(self, buffer: int, address: int) -> None:
        """Use the memory at `address`, of the host, for an input or output. The caller answers for its size and keeps it alive
        (`bind_array` does)."""
        with self.lock:
            if buffer not in self._bindable:
                raise LaunchError(f"buffer {buffer} cannot be bound: the plan's inputs and outputs are {sorted(self._bindable)}")
            self._bind_address(buffer, address)
            self.bindings += 1

    @property
    def bound_arrays(self) -> Mapping[int, np.ndarray[Any, Any]]:
        """The arrays that were bound later, by buffer."""
        return self._arrays

    def bind_new(self, buffer: int, array: np.ndarray[Any, Any], address: int) -> None:
        """`bind_array` for memory that svod has just allocated, at a known address: it fits, and nothing else lies there."""
        with self.lock:
            if self.is_local:
                self._queue.bind(buffer, address)
                if self._unbound:
                    self._unbound.discard(buffer)
            else:
                self._bind_address(buffer, address)
            self._arrays[buffer] = array
            self.bindings += 1

    def _bind_address(self, index: int, address: int) -> None:
        """Use the host's memory at an address for a buffer, or a copy of it on the buffer's device."""
        part = self._part_of(index)
        if part.is_remote:
            address = part.hold(index, buffer_over(array_at(address, self.buffers[index].nbytes)))
        self._bind_everywhere(index, address)
        self._unbound.discard(index)

    def bind_buffer(self, index: int, buffer: Buffer) -> None:
        """Use a tensor's memory for an input or output: what `bind_new` is for arrays."""
        with self.lock:
            part = self._part_of(index)
            if not part.is_remote:
                self.bind_new(index, buffer.array, buffer.address)
                return
            self._arrays.pop(index, None)
            self._bind_everywhere(index, part.hold(index, buffer))
            self._unbound.discard(index)
            self.bindings += 1

    def release_arrays(self, numbers: Collection[int] = ()) -> None:
        """Let go of the arrays that were bound, and of the memory that the inputs and outputs of these `numbers` came with: they are bound
        before the next run."""
        with self.lock:
            self._arrays.clear()
            self.bindings += 1
            if numbers:
                self.buffers = tuple([replace(b, array=None, storage=None) if i in numbers else b for i, b in enumerate(self.buffers)])
                self._without_memory |= frozenset(numbers)
            self._unbound = set(self._without_memory)
            for part in self.parts.values():
                part.release(self._without_memory)

    def bind_array(self, buffer: int, array: np.ndarray[Any, Any]) -> None:
        """Use `array` for an input or output from now on: C-contiguous, of the buffer's dtype and number of elements (bfloat16 as the
        uint16 of its bits), aligned to its elements, writable if the plan writes it. Memory that the plan writes must not lie under another
        buffer too. Raises LaunchError."""
        with self.lock:
            if self._calling:
                self._refuse()
            if buffer not in self._bindable:
                raise LaunchError(f"buffer {buffer} cannot be bound: the plan's inputs and outputs are {sorted(self._bindable)}")
            check_array(buffer, array, self.buffers[buffer], buffer in self._written)
            for i, other in enumerate(self.buffers):
                held = self._arrays.get(i, other.array)
                if i != buffer and held is not None and (buffer in self._written or i in self._written) and is_shared(held, array):
                    raise LaunchError(f"buffer {buffer}: the array lies in memory of buffer {i}, and the plan writes one of them; copy it")
            self.bind_new(buffer, array, address_of(array))

    def set_variables(self, values: Mapping[str, int]) -> None:
        """Set variables of the kernels; they keep their value. Raises LaunchError for an unknown name."""
        with self.lock:
            if self._calling:
                self._refuse()
            own, again = self._values, self._is_sliced or self._unset
            new = {}
            for name, value in values.items():
                if again or own.get(name) != value:
                    new[name] = number = value if type(value) is int and name in own else self._checked(name, value, values)
                    limits = self.variables.get(name)
                    if limits is not None and not limits.min <= number <= limits.max:
                        check_bounds(name, number, limits.min, limits.max)
            if not new:
                return
            if self._over_positions:
                check_launches(self._over_positions, {**self.variable_values(), **new})
            for name, value in new.items():
                for queue in self._queues.values():
                    queue.set_variable(name, value)
                own[name] = value
            if self._unset:
                self._unset -= new.keys()
            self._is_sliced = False
            if self._ranges:
                self._fit_launches(new)
            if len(self._variants) > 1:
                now = self.variable_values()
                self._select(next((v for v in self._variants if v.holds(now)), self._variants[-1]))

    def _checked(self, name: str, value: Any, given: Iterable[str]) -> int:
        """The value of a variable. Raises LaunchError for an unknown name in `given`, and for a value that is not an integer."""
        unknown = sorted(set(given) - set(self._values))
        if unknown:
            known = ", ".join(sorted(self._values)) or "none"
            raise LaunchError(f"variables {', '.join(unknown)} were given; the plan has {known}")
        if not isinstance(value, (int, np.integer)):
            raise LaunchError(f"variable {name}={value} is outside the integers")
        return int(value)

    def _select(self, variant: Variant) -> None:
        """Run the kernels that are there for the present values of the variables."""
        self.running = variant.kernels
        self.kernels = variant.chosen
        self.segments = self._queue.segments(self.parts[self.device].variant(variant))
        if len(self._queues) > 1:
            self.segments = self._joined(self.segments)
        self._launches, items, _ = self.segments[0]
        self._is_plain = not items and not self._closed and self._log is None       # a run is one call of the queue, and nothing else

    def _joined(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """Segments with the kernels of another device that come in a row as one item, the first of them."""
        joined: list[Segment] = []
        for s in segments:
            if joined and not s.launches.size:
                before = joined.pop()
                s = Segment(before.launches, (*before.items, *s.items), (*before.kernels, *s.kernels))
            joined.append(s)
        found = []
        for s in joined:
            items: list[int] = []
            for (is_item, device), run in groupby(s.items, lambda n: (self.every[n].is_host_item, self.every[n].device)):
                numbers = list(run)
                if not is_item:
                    queue = self._queues[device or self.device]
                    self._elsewhere[numbers[0]] = queue, queue.runs_of(numbers)
                items += numbers if is_item else numbers[:1]
            found.append(s._replace(items=tuple(items)))
        return tuple(found)

    def execute_with_vars(self, values: Mapping[str, int]) -> None:
        """`execute`, with the variables in a mapping."""
        self.execute(**values)

    @contextmanager
    def at(self, values: Mapping[str, int]) -> Iterator[None]:
        """Inside, variables have these values; then they have those of before, or none again. Raises as `set_variables` does."""
        with self.lock:
            before, unset = self.variable_values(), self._unset & values.keys()
            self.set_variables(values)
            try:
                yield
            finally:
                self.set_variables({name: before[name] for name in values if name in before})
                self._unset |= unset

    def variable_values(self) -> dict[str, int]:
        """The variables that have a value, and what it is."""
        return {name: value for name, value in self._values.items() if value is not None and name not in self._unset}

    def _fit_launches(self, changed: Iterable[str]) -> None:
        """Launches of as many iterations as the variables say."""
        for number, p, phase, names in {id(r): r for name in changed for r in self._ranges.get(name, ())}.values():
            if self._unset.isdisjoint(names.values()):
                extent = phase.extent_at({name: self._values[known] for name, known in names.items()})     # type: ignore[misc]
                self._queue_of(number).set_range(number, p, 0, extent)

    def set_range(self, kernel: int, phase: int, begin: int, end: int) -> None:
        """Let a phase compute iterations begin ≤ i < end only, for timing a slice. Raises LaunchError outside 0 … extent."""
        spec = self.kernels[kernel].spec.phases[phase]
        if not 0 <= begin <= end <= spec.extent:
            raise LaunchError(f"iterations {begin} to {end} of {spec.symbol} were asked for; it has 0 to {spec.extent}")
        with self.lock:
            self._is_sliced = True      # giving variables their values undoes it
            self._queue_of(self.running[kernel]).set_range(self.running[kernel], phase, begin, end)

    # Memory of its own.

    def _allocate(self, planner: PlannerMode) -> list[int]:
        """Address of every buffer (0: unbound), then of every temporary in order of kernel and number."""
        alive = lifetimes_of(self.every, self.buffers)
        end = len(self.buffers) + sum(len(k.spec.temps) for k in self.every)
        place = [b.device or self.device for b in self.buffers] + [""] * (end - len(self.buffers))     # the device of each number
        addresses = [self._address_of(i) for i in range(len(self.buffers))] + [0] * (end - len(self.buffers))
        packed: set[int] = set()            # temporaries that plans share
        self._packed = {}
        for number, (k, temps) in enumerate(zip(self.every, temporary_numbers(self.every, end), strict=True)):
            part = self.parts[k.device or self.device]
            for t in temps:
                place[t] = part.device
            memory = packed_memory(k, self.buffers, part.backend, part.device)
            if memory is not None:
                self._packed[number] = memory
                for t, address in memory.addresses.items():
                    addresses[temps[t]] = address
                    packed.add(temps[t])
        shared, bound, kept = 0, 0, sum(m.nbytes for m in set(self._packed.values()))
        for part in self.parts.values():
            here = {n: size for n, size in alive.sizes.items() if place[n] == part.device}
            placement = plan_memory(here, alive.first, alive.last, planner)
            own = {n: size for n, size in alive.kept.items() if n not in packed and place[n] == part.device}
            made, always = part.allocate(placement, own)
            shared, bound, kept = shared + placement.total, bound + placement.lower_bound, kept + always
            for n, address in made.items():
                addresses[n] = address
        self.memory = PlanMemory(planner, shared, bound, kept)
        return addresses

    def _address_of(self, index: int) -> int:
        """Where kernels find a buffer that has memory; 0 for any other."""
        b, part = self.buffers[index], self._part_of(index)
        if not b.has_memory:
            return 0
        if not part.is_remote:
            assert b.array is not None
            return address_of(b.array)
        return part.hold(index, b.storage if b.storage is not None else buffer_over(b.array),       # type: ignore[arg-type]
                         content=b.kind == "constant")

    def _allocate_again(self) -> None:
        for part in self.parts.values():
            if part.shared_bytes:
                for index, address in part.allocate_again().items():
                    self._bind_everywhere(index, address)
        self._released = False

    def _run_once_phases(self) -> float:
        """Run the phases that read only constants (weights packed for a kernel). Seconds it took."""
        start = time.perf_counter()
        ran = False
        unbound, self._unbound = self._unbound, set()           # a once phase reads constants only
        unset, self._unset = self._unset, set()
        for number in range(len(self.every)):
            if self.every[number].is_host_item:
                continue
            queue = self._queue_of(number)
            launches = queue.once_launches(number)
            if not launches.size:
                continue
            packed = self._packed.get(number)
            with packed.lock if packed is not None else nullcontext():
                if packed is None or not packed.filled:
                    self._run(launches, 1, queue)
                    _give_back_packed(self.every[number], self.buffers)
                    ran = True
                if packed is not None:
                    packed.filled = True
        if ran:
            self._say_packed()
        self._unbound, self._unset = unbound, unset
        return time.perf_counter() - start if ran else 0.0

    def _say_packed(self) -> None:
        packing = [k for k in self.every if k.packing is not None]
        originals = {k.buffers[slot] for k in packing for slot in k.packing.slots}      # type: ignore[union-attr]
        nbytes = sum(self.buffers[i].nbytes for i in originals)
        if self.memory.kept >= MUCH:
            log.info("%d MB of weights are packed for %d kernels, in %d MB beside them", nbytes >> 20, len(packing), self.memory.kept >> 20)


def _give_back_packed(kernel: PreparedKernel, buffers: Sequence[PlanBuffer]) -> None:
    """Give the pages of files back that a kernel has packed: what still reads them in place gets them from the file again."""
    for slot in kernel.packing.slots if kernel.packing is not None else ():
        if (array := buffers[kernel.buffers[slot]].array) is not None:
            give_back(array)


_plans: weakref.WeakSet[ExecutionPlan] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for plan in list(_plans):
        plan.lock = threading.RLock()       # its holder may not exist here
        if plan._running or plan._calling:
            plan._running = False
            plan.poison("the process was forked while it ran")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
