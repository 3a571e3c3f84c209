"""ExecutionPlan: prepared kernels and their buffers as launch records, run by one native call.

    kernels  [k0: phases (a, b), k1: phase (c)]        buffers  [x (input), w (constant), t (intermediate), y (output)]

    words    header | records a, b, c | launches | args k0, args k1 | vars k0, vars k1

The plan owns one block of 64-bit words that the native runtime reads (layout: `runtime.py`). Binding another address or setting a
variable writes into that block; nothing is compiled, and `execute` is one call. Kernels that say they share a level run at the same
time where they are single-core: they become one launch whose iterations are the kernels.

Functions of Python among the kernels cut the list of launches into segments: the launches before one are a native call, then the function
is called in the thread that runs the plan, after the native kernels of its level. A plan without any is one segment.

Where variables have buckets there is a kernel for each, and a list of launches for each combination of them: giving a variable a value
chooses the list that runs. `kernels` are those that run now.
"""
from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from svod.compile.cpu import runtime as rt
from svod.compile.cpu.pool import Arena, Pool, fit_launch
from svod.compile.interpreted import InterpretedProgram
from svod.compile.llvm.codegen import LoadedProgram
from svod.compile.lower.program import ProgramSpec
from svod.compile.plan.host_callback import HostProgram
from svod.compile.plan.memory_planner import PlannerMode, plan_memory
from svod.compile.plan.plan_parts import (
    BufferKind,
    PlanBuffer,
    PreparedKernel,
    Segment,
    VariableSpec,
    Variant,
    address_of,
    check_array,
    check_launches,
    check_plan,
    levels_of,
    lifetimes_of,
    names_of,
    variants_of,
    written_by,
)
from svod.core.graph.buffer import Buffer, aligned_empty
from svod.core.ir.dtype import dtypes
from svod.core.ir.launch import ONCE, check_bounds
from svod.errors import LaunchError

if TYPE_CHECKING:
    from svod.bench.analyze import PlanAnalysis

_GROUP_CHUNKS = 8       # pieces per thread that the kernels of a level are taken in: taking one costs more than a small kernel
_HEADER, _LAUNCH = rt.PLAN_BYTES // 8, rt.LAUNCH_BYTES // 8     # in words


@dataclass(frozen=True)
class PlanMemory:
    """Bytes that a plan allocates. `shared`: intermediates and temporaries of one run, as the planner placed them; its peak. `lower_bound`:
    the largest sum of those that are alive at one level. `kept`: what stays from run to run (weights in the order that a kernel wants)."""

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

    A function of Python that the plan calls (`PreparedKernel.is_callback`) may run other plans and realize tensors; it must not change or
    run the plan that calls it.

    Raises LaunchError for buffers, variables and symbols that do not fit the programs."""

    def __init__(self, kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer], outputs: Sequence[int] = (), *,
                 threads: int | None = None, planner: PlannerMode = "arena") -> None:
        self.every = tuple(kernels)
        self._interpreted = {k.loaded: k.loaded.copy() for k in kernels if isinstance(k.loaded, InterpretedProgram)}
        if self._interpreted:
            self.every = tuple(replace(k, loaded=self._interpreted[k.loaded]) if isinstance(k.loaded, InterpretedProgram) else k
                                 for k in kernels)
        self._over_positions = tuple(k for k in self.every if k.spec.launch != ONCE)     # whose launch values can make impossible
        self.buffers = tuple(buffers)
        self.lock = threading.RLock()       # hold it to bind and execute as one step
        self._outputs = tuple(outputs)
        self._failure: str | None = None    # why the plan refuses to run
        self._running = False               # native code does, or segments are being gone through
        self._calling = ""                  # the function of Python that is being called
        self.keep: object = None            # what has to live as long as the plan: owners of memory that it uses
        self.carried: frozenset[int] = frozenset()      # buffers whose content is the state that a run starts from and changes
        self._released = False              # the memory of intermediates was given back
        self._closed: list[tuple[Buffer, np.ndarray[Any, Any]]] = []    # outputs not computed yet
        self.runs = 0                       # of all kernels: what a capture weighs plans by
        self._native = rt.runtime()
        self._run = self._native.run_plan
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}      # bound later; kept alive here
        check_plan(self.every, self.buffers)
        self._written = frozenset(index for k in self.every for index in written_by(k))
        for index in self._outputs:
            if self.buffers[index].array is None:
                raise LaunchError(f"buffer {index} is an output of the plan and has no memory")
        wanted = max((phase.threads for k in self.every for phase in k.spec.phases), default=1)
        self._variants = variants_of(self.every)
        if any(len(g) > 1 for v in self._variants for g in _groups(self.every, v.kernels)):
            wanted = max(wanted, threads or os.cpu_count() or 1)
        self.threads = max(1, wanted if threads is None else min(wanted, threads))
        self._pool = Pool.get(self.threads)
        self._scratch_bytes = max((phase.scratch_bytes for k in self.every for phase in k.spec.phases), default=0)
        if self.threads > 1:
            self._pool.prepare(self._scratch_bytes)
        self._shared: Arena | None = None   # the memory of intermediates and temporaries
        self._addresses = self._allocate(planner)
        self._lay_out()
        self._select(self._variants[-1])
        self.prepare_seconds = self._run_once_phases()
        _plans.add(self)

    @classmethod
    def of_kernel(cls, spec: ProgramSpec, loaded: LoadedProgram | InterpretedProgram, arrays: Sequence[np.ndarray[Any, Any]], *,
                  threads: int | None = None, constants: Sequence[int] = ()) -> ExecutionPlan:
        """A plan of one kernel over `arrays`, one per slot: what benchmarks and checks run."""
        kinds: list[BufferKind] = ["output" if slot in spec.outs else "constant" if slot in constants else "input"
                                   for slot in range(len(arrays))]
        buffers = [PlanBuffer(array.nbytes, kind, array) for array, kind in zip(arrays, kinds, strict=True)]
        return cls([PreparedKernel(spec, loaded, tuple(range(len(arrays))), spec.name)], buffers, spec.outs, threads=threads)

    @property
    def outputs(self) -> tuple[np.ndarray[Any, Any], ...]:
        """The outputs' memory, flat, in the order of the tensors the plan was made for; what is bound now, rewritten by every run."""
        return tuple(self.output_buffer(i) for i in range(len(self._outputs)))

    def output_buffer(self, position: int = 0) -> np.ndarray[Any, Any]:
        """The memory of one output, flat. Raises LaunchError for a position that the plan does not have."""
        if not 0 <= position < len(self._outputs):
            raise LaunchError(f"output {position} was asked for; the plan has {len(self._outputs)}")
        index = self._outputs[position]
        array = self._arrays.get(index, self.buffers[index].array)
        assert array is not None
        return array

    def release_intermediate_buffers(self) -> int:
        """Give back the memory that intermediates share, until the next run allocates it anew. Outputs, and weights that kernels keep in an
        order of their own, stay. The number of bytes given back."""
        with self.lock:
            if self._calling:
                self._refuse()
            if self._shared is None:
                return 0
            self._shared = None
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
                array = self._arrays.get(index, b.array)
                if array is not None and index in self._written:
                    array = aligned_empty(array.nbytes, dtypes.uint8).view(array.dtype)
                buffers.append(PlanBuffer(b.nbytes, b.kind, array))
            plan = ExecutionPlan(self.every, buffers, self._outputs, threads=threads or self.threads, planner=self.memory.mode)
            plan.keep = self.keep
            plan.set_variables(self.variable_values())
            return plan

    # What is run.

    def execute(self, **variables: int) -> None:
        """Run all kernels once. Variables keep their value until it is given anew."""
        with self.lock:
            if variables:
                self.set_variables(variables)
            if self._is_plain:
                self._enter(self._launches, self._launch_count, 1)
            else:
                self._run_segments(1)
            self.runs += 1

    def repeat(self, times: int) -> None:
        """Run all kernels `times` times, in one native call where no function of Python is among them: what a timer calls when one run is
        too short to be seen."""
        with self.lock:
            if self._is_plain:
                self._enter(self._launches, self._launch_count, times)
            else:
                self._run_segments(times)
            self.runs += times

    def open_after_run(self, buffers: Sequence[tuple[Buffer, np.ndarray[Any, Any]]]) -> None:
        """Bind the arrays, memory of outputs, to their (closed) Buffers when the plan has run for the first time."""
        with self.lock:
            self._closed.extend(buffers)
            self._is_plain = False

    def _open(self) -> None:
        for buffer, array in self._closed:
            buffer.bind(array)
        self._closed.clear()
        self._is_plain = not self.segments[0].callbacks

    def repeat_kernel(self, kernel: int, times: int) -> None:
        """Run the phases of one of `kernels` `times` times, without those that run once."""
        with self.lock:
            self._check_ready()
            if self.kernels[kernel].is_callback:
                for _ in range(times):
                    self._call(self.running[kernel])
                return
            first, count = self._spans[self.running[kernel]]
            once = sum(phase.once for phase in self.kernels[kernel].spec.phases)
            self._enter(self._base + 8 * (first + once * _LAUNCH), count - once, times)

    def analyze(self, ceilings: Any = None) -> PlanAnalysis:
        """What the plan does, kernel by kernel and as a whole: work, memory, dependencies, the critical path, fusions that were not taken.
        `ceilings` (`svod.bench.roofline.Ceilings`): what times are estimated with; None: this machine's, measured quickly if they are not
        known. Runs nothing."""
        from svod.bench.analyze import analyze

        return analyze(self, ceilings)

    def profile(self, runs: int = 5) -> list[float]:
        """Seconds of each of `kernels`, run in order and timed one by one; the least of `runs` runs of the plan. Each
        includes about half a microsecond of the call."""
        with self.lock:
            best = [float("inf")] * len(self.kernels)
            for _ in range(runs):
                for i in range(len(best)):
                    start = time.perf_counter()
                    try:
                        self.repeat_kernel(i, 1)
                    except BaseException:
                        self._stopped_after(self.kernels[:i + 1])
                        raise
                    best[i] = min(best[i], time.perf_counter() - start)
        return best

    def _stopped_after(self, kernels: Iterable[PreparedKernel]) -> None:
        """A run was given up after `kernels`: another one repairs that, unless it would start from what this one has written."""
        changed = self.carried & {index for k in kernels for index in written_by(k)}
        if changed:
            self.poison(f"a run stopped half-way, after buffer {min(changed)}, which runs go on from, was written")

    def _run_segments(self, times: int) -> None:
        """Run all kernels, functions of Python among them, and open the outputs if this was the first time."""
        self._check_ready()
        begun: set[int] = set()
        self._running = True
        try:
            for _ in range(times):
                for begin, launches, callbacks, kernels in self.segments:
                    begun.update(kernels)
                    if launches or not callbacks:
                        self._enter(begin, launches, 1)
                        self._running = True
                    for number in callbacks:
                        self._call(number)
        except BaseException:
            if self.segments[0].callbacks:      # a single native call runs to its end
                self._stopped_after(self.every[i] for i in begun)
            raise
        finally:
            self._running = False
        if self._closed and times:
            self._open()

    def _call(self, number: int) -> None:
        """Call the function of Python that a kernel, by its number among all, is."""
        k = self.every[number]
        assert isinstance(k.loaded, HostProgram)
        args_at, vars_at = self._words_of[number]
        addresses = self._words[args_at:args_at + len(k.buffers)].tolist()
        values = {v.name: self._words[vars_at + i] for i, v in enumerate(k.variables)}
        owners = [self._arrays.get(b, self.buffers[b].array) for b in k.buffers]
        self._calling = k.name or k.spec.name
        try:
            k.loaded.run(addresses, [self._shared if o is None else o for o in owners], values)
        finally:
            self._calling = ""

    def _check_ready(self) -> None:
        if self._failure is not None or self._unbound or self._unset or self._calling:
            self._refuse()
        if self._released:
            self._allocate_again()

    def _enter(self, records: int, count: int, repeats: int) -> None:
        if self._failure is not None or self._unbound or self._unset:
            self._refuse()
        if self._released:
            self._allocate_again()
        words = self._words
        words[0] = records
        words[1] = count
        words[4] = repeats
        if self.threads > 1 and not self._pool.ready:
            self._pool.prepare(self._scratch_bytes)
        if self._scratch_bytes:
            words[3] = self._pool.caller_scratch(self._scratch_bytes)
        self._running = True
        try:
            self._run(self._base)
        finally:
            # An exception here is a signal that arrived during the run; native code runs to its end.
            self._running = False
            if self._interpreted:
                self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what went wrong in an interpreted kernel, which could not raise it itself."""
        failures = [failure for loaded in self._interpreted.values() if (failure := loaded.take_failure()) is not None]
        if failures:
            if self.carried:
                self.poison("a kernel failed, and runs go on from what the one before left")
            raise failures[0]

    def _refuse(self) -> None:
        if self._failure is not None:
            raise LaunchError(f"this plan cannot be run any more: {self._failure}; prepare it again")
        if self._calling:
            raise LaunchError(f"{self._calling}, a function that this plan calls, runs or changes the plan itself; run another one, "
                              "made by prepare() or replicate() before")
        if self._unbound:
            raise LaunchError(f"inputs {sorted(self._unbound)} of the plan have no memory; bind them before the first run")
        raise LaunchError(f"variables {', '.join(sorted(self._unset))} have no value; pass them to execute()")

    def poison(self, reason: str) -> None:
        """Make the plan refuse to run: its buffers are in a state that no run would leave."""
        self._failure = reason

    # What it is applied to.

    def bind(self, buffer: int, address: int) -> None:
        """Use the memory at `address` for an input or output. The caller answers for its size and keeps it alive (`bind_array` does)."""
        with self.lock:
            words = self._words
            try:
                positions = self._bindable[buffer]
            except KeyError:
                raise LaunchError(f"buffer {buffer} cannot be bound: the plan's inputs and outputs are {sorted(self._bindable)}") from None
            for position, offset in positions:
                words[position] = address + offset
            if self._unbound:
                self._unbound.discard(buffer)

    def bind_array(self, buffer: int, array: np.ndarray[Any, Any]) -> None:
        """Use `array` for an input or output: C-contiguous, of at least the buffer's bytes. Raises LaunchError."""
        with self.lock:
            if self._calling:
                self._refuse()
            check_array(buffer, array, self.buffers[buffer].nbytes, buffer in self._written)
            self.bind(buffer, address_of(array))
            self._arrays[buffer] = array

    def set_variables(self, values: Mapping[str, int]) -> None:
        """Set variables of the kernels; they keep their value. Raises LaunchError for an unknown name."""
        with self.lock:
            if self._calling:
                self._refuse()
            unknown = sorted(set(values) - set(self._variables))
            if unknown:
                known = ", ".join(sorted(self._variables)) or "none"
                raise LaunchError(f"variables {', '.join(unknown)} were given; the plan has {known}")
            for name, value in values.items():
                limits = self.variables.get(name)
                if not isinstance(value, (int, np.integer)):
                    raise LaunchError(f"variable {name}={value} is outside the integers")
                if limits is not None:
                    check_bounds(name, int(value), limits.min, limits.max)
            if self._over_positions:
                check_launches(self._over_positions, {**self.variable_values(), **values})
            for name, value in values.items():
                for position in self._variables[name]:
                    self._words[position] = value
                self._unset.discard(name)
            if values:
                self._fit_launches(set(values))
                if len(self._variants) > 1:
                    now = self.variable_values()
                    self._select(next((v for v in self._variants if v.holds(now)), self._variants[-1]))

    def _select(self, variant: Variant) -> None:
        """Run the kernels that are there for the present values of the variables."""
        self.running = variant.kernels
        self.kernels = variant.chosen
        self.segments = self._segments_of[variant]
        self._launches, self._launch_count, callbacks, _ = self.segments[0]
        self._is_plain = not callbacks and not self._closed     # a run is one native call, and nothing else

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
        return {name: int(self._words[at[0]]) for name, at in self._variables.items() if name not in self._unset}

    def _fit_launches(self, changed: set[str]) -> None:
        """Launches of as many iterations as the variables say."""
        values = self.variable_values()
        for number, kernel in enumerate(self.every):
            if not any(phase.counts for phase in kernel.spec.phases):
                continue
            names = names_of(kernel)
            if changed.isdisjoint(names.values()) or not values.keys() >= set(names.values()):
                continue
            own = {name: values[known] for name, known in names.items()}
            for p, phase in enumerate(kernel.spec.phases):
                if phase.counts:
                    self._set_range(number, p, 0, phase.extent_at(own))

    def set_range(self, kernel: int, phase: int, begin: int, end: int) -> None:
        """Let a phase compute iterations begin ≤ i < end only, for timing a slice. Raises LaunchError outside 0 … extent."""
        spec = self.kernels[kernel].spec.phases[phase]
        if not 0 <= begin <= end <= spec.extent:
            raise LaunchError(f"iterations {begin} to {end} of {spec.symbol} were asked for; it has 0 to {spec.extent}")
        self._set_range(self.running[kernel], phase, begin, end)

    def _set_range(self, number: int, phase: int, begin: int, end: int) -> None:
        """`set_range`, for a kernel by its number among all."""
        spec = self.every[number].spec.phases[phase]
        with self.lock:
            first, _ = self._spans[number]
            for position in (first + phase * _LAUNCH, *self._copies.get(first + phase * _LAUNCH, ())):
                threads, chunks = fit_launch(end - begin, spec.threads, 0, self.threads)
                self._words[position + 3] = begin
                self._words[position + 4] = end
                self._words[position + 5] = threads
                self._words[position + 6] = chunks

    # Building the block of words.

    def _allocate(self, planner: PlannerMode) -> list[int]:
        """Address of every buffer (0: unbound), then of every temporary in order of kernel and number."""
        alive = lifetimes_of(self.every, self.buffers)
        end = len(self.buffers) + sum(len(k.spec.temps) for k in self.every)
        shared = plan_memory(alive.sizes, alive.first, alive.last, planner)
        always = plan_memory(alive.kept, dict.fromkeys(alive.kept, 0), dict.fromkeys(alive.kept, 0), "disabled")
        self.memory = PlanMemory(planner, shared.total, shared.lower_bound, always.total)
        addresses = [address_of(b.array) if b.array is not None else 0 for b in self.buffers] + [0] * (end - len(self.buffers))
        self._shared = Arena(shared.total, 0) if shared.total else None
        self._kept = Arena(always.total, 0, touch=False) if always.total else None     # once phases fill it
        for arena, placement in ((self._shared, shared), (self._kept, always)):
            for index, offset in placement.offsets.items():
                addresses[index] = offset + (arena.address if arena is not None else 0)
        self._offsets = shared.offsets
        return addresses

    def _allocate_again(self) -> None:
        arena = Arena(self.memory.shared, 0)
        for position, offset in self._shared_at:
            self._words[position] = arena.address + offset
        self._shared = arena
        self._released = False

    def _lay_out(self) -> None:
        kernels = self.every
        records = sum(len(k.spec.phases) for k in kernels)
        groups = levels_of(kernels)
        # Launches, for each variant: its records once more in order of level, some of them behind a group record each.
        variants = [(v, _groups(kernels, v.kernels)) for v in self._variants]
        together = {v: [self._together(group) for group in own] for v, own in variants}
        launches = sum(sum(len(kernels[i].spec.phases) for i in v.kernels) + sum(map(len, together[v])) + len(own) for v, own in variants)
        args_at = _HEADER + _LAUNCH * (records + launches)
        vars_at = args_at + sum(len(k.spec.params) + len(k.spec.temps) for k in kernels)
        block = np.zeros(vars_at + sum(len(k.spec.variables) for k in kernels) + 8, np.int64)
        skip = -address_of(block) % 64 // 8
        self._block = block[skip:]
        self._base = base = address_of(self._block)
        self._words = words = self._block.data
        words[2] = self._pool.address if self.threads > 1 else 0

        positions: list[list[tuple[int, int]]] = [[] for _ in self.buffers]     # words that hold an argument, and its offset in the buffer
        self._shared_at: list[tuple[int, int]] = []             # words that hold an address of shared memory, and its offset there
        self._variables: dict[str, list[int]] = {}
        self.variables: dict[str, VariableSpec] = {}            # bounds of those that have some
        self._spans: list[tuple[int, int]] = []                 # per kernel: first word and number of its records
        position, temporary = _HEADER, [0] * len(kernels)
        number = len(self.buffers)
        for group in groups:                                    # temporaries are numbered in the order `_allocate` met them
            for i in group:
                temporary[i] = number
                number += len(kernels[i].spec.temps)
        self._words_of: dict[int, tuple[int, int]] = {}         # per function of Python: first words of its arguments and of its variables
        for i, kernel in enumerate(kernels):
            spec = kernel.spec
            if kernel.is_callback:
                self._words_of[i] = args_at, vars_at
            self._spans.append((position, len(spec.phases)))
            for phase, entry in zip(spec.phases, kernel.loaded.addresses, strict=True):
                threads, chunks = fit_launch(phase.extent, phase.threads, 0, self.threads)
                words[position] = entry
                words[position + 1] = base + 8 * args_at
                words[position + 2] = base + 8 * vars_at
                words[position + 4] = phase.extent
                words[position + 5] = threads
                words[position + 6] = chunks
                position += _LAUNCH
            temps = range(temporary[i], temporary[i] + len(spec.temps))
            offsets = (*(kernel.offsets or (0,) * len(kernel.buffers)), *(0,) * len(temps))
            for index, offset in zip((*kernel.buffers, *temps), offsets, strict=True):
                words[args_at] = self._addresses[index] + offset
                if index < len(positions):
                    positions[index].append((args_at, offset))
                if index in self._offsets:
                    self._shared_at.append((args_at, self._offsets[index] + offset))
                args_at += 1
            names = names_of(kernel)
            for name in spec.variables:
                self._variables.setdefault(names[name], []).append(vars_at)
                vars_at += 1
            for known in kernel.variables:
                if self.variables.setdefault(known.name, known._replace(bucket=None))[:3] != known[:3]:
                    raise LaunchError(f"variable {known.name} has bounds [{known.min}, {known.max}] in one kernel of the plan and "
                                      f"{list(self.variables[known.name][1:3])} in another")

        self._copies: dict[int, list[int]] = {}                 # record → its copies among the launches
        self._segments_of: dict[Variant, tuple[Segment, ...]] = {}
        for variant, own in variants:
            segments: list[Segment] = []
            begin, count, ran = base + 8 * position, 0, []
            inner_at = position + _LAUNCH * (sum(len(kernels[i].spec.phases) for i in variant.kernels) + len(own))
            for group, at_once in zip(own, together[variant], strict=True):
                ran += group
                for i in group:
                    if i not in at_once:
                        position = self._copy_phases(i, position)
                        count = (8 * position + base - begin) // rt.LAUNCH_BYTES
                if at_once:
                    position = self._group(at_once, position, inner_at)
                    inner_at += _LAUNCH * len(at_once)
                    count += 1
                callbacks = tuple(i for i in group if kernels[i].is_callback)
                if callbacks:
                    segments.append(Segment(begin, count, callbacks, tuple(ran)))
                    begin, count, ran = base + 8 * position, 0, []
            if count or not segments:
                segments.append(Segment(begin, count, (), tuple(ran)))
            self._segments_of[variant] = tuple(segments)
            position = inner_at
        self._unset = set(self._variables)
        self._bindable = {i: positions[i] for i, b in enumerate(self.buffers) if b.kind in ("input", "output")}
        self._unbound = {i for i, at in self._bindable.items() if self.buffers[i].array is None and at}

    def _together(self, group: list[int]) -> list[int]:
        """The kernels of a level that become one launch."""
        found = [i for i in group if self.every[i].single_core] if self.threads > 1 else []
        return found if len(found) > 1 else []

    def _group(self, kernels: list[int], position: int, inner_at: int) -> int:
        """One launch at `position` whose iterations are kernels: a kernel of several phases is a serial group in itself. The
        next free position."""
        words, base = self._words, self._base
        for n, i in enumerate(kernels):
            first, _ = self._spans[i]
            phases = self.every[i].spec.phases
            once = sum(phase.once for phase in phases)
            record = inner_at + n * _LAUNCH
            words[record] = self._native.run_group
            words[record + 1] = base + 8 * (first + once * _LAUNCH)
            words[record + 4] = len(phases) - once
            words[record + 5] = words[record + 6] = 1
        words[position] = self._native.run_group
        words[position + 1] = base + 8 * inner_at
        words[position + 4] = len(kernels)
        words[position + 5], words[position + 6] = fit_launch(len(kernels), self.threads, _GROUP_CHUNKS * self.threads, self.threads)
        return position + _LAUNCH

    def _copy_phases(self, kernel: int, position: int) -> int:
        """Copy the records of a kernel, without those of once phases, to `position`. The next free position."""
        first, _ = self._spans[kernel]
        for p, phase in enumerate(self.every[kernel].spec.phases):
            if not phase.once:
                source = first + p * _LAUNCH
                self._block[position:position + _LAUNCH] = self._block[source:source + _LAUNCH]
                self._copies.setdefault(source, []).append(position)
                position += _LAUNCH
        return position

    def _run_once_phases(self) -> float:
        """Run the phases that read only constants (weights packed for a kernel). Seconds it took."""
        start = time.perf_counter()
        ran = False
        unbound, self._unbound = self._unbound, set()           # a once phase reads constants only
        unset, self._unset = self._unset, set()
        for kernel, (first, _) in zip(self.every, self._spans, strict=True):
            for p, phase in enumerate(kernel.spec.phases):
                if phase.once:
                    self._enter(self._base + 8 * (first + p * _LAUNCH), 1, 1)
                    ran = True
        self._unbound, self._unset = unbound, unset
        return time.perf_counter() - start if ran else 0.0


def _groups(kernels: Sequence[PreparedKernel], numbers: Sequence[int]) -> list[list[int]]:
    """The kernels of a variant by level."""
    return [[numbers[i] for i in group] for group in levels_of([kernels[n] for n in numbers])]


_plans: weakref.WeakSet[ExecutionPlan] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for plan in list(_plans):
        plan.lock = threading.RLock()       # its holder may not exist here
        if plan._running or plan._calling:
            plan._running = False
            plan.poison("the process was forked while it ran")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
