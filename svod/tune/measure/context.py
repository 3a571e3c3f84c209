"""The state of one kernel that a worker keeps between jobs: its programs, its buffers, and its reference results at each size."""
from __future__ import annotations

import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from svod.bench.timer import Contestant
from svod.compile.backend import COLD_RUNS, device_named
from svod.compile.cpu.between_runs import between_runs
from svod.compile.cpu.queue import CpuQueue
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.part import array_at
from svod.core.ir.serialize import data_to_ast
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import chain_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.isa import TF32
from svod.core.machine.target import Target
from svod.system.process.streams import tell
from svod.tune.measure.measurer import Built
from svod.tune.measure.sizes import MOST_VERIFIED, Size, at_size, values_of
from svod.tune.measure.slices import full_run, part_of_run
from svod.tune.measure.verify import KEPT_BYTES, Baseline, GuardedBuffers, InputSet, Reference, make_inputs

CONTEXTS = 6                        # most kernels whose state a worker keeps
PROGRAMS = 256                      # most lowered programs that a compile child keeps between lowering and compiling
LOADED = 64                         # most programs that a bench child keeps in executable memory
KEPT_SIZES = 2 * MOST_VERIFIED      # sizes of a kernel with variables whose references a worker remembers
# bytes of operands from which on a kernel is timed as in a plan; smaller ones take less time than Python between two runs can tell
LEAST_IN_PLAN = 1 << 20
EXIT_OVERRUN = 86                   # exit status of a worker whose memory a kernel has overwritten
# inputs of timed runs: no operation turns them into NaN, infinity or denormals
TIMING_INPUTS = InputSet("timing", "reals", 0.5, 1.5, 17)


@dataclass(frozen=True)
class Setup:
    """The setup payload of every job. `ast`: the kernel as data; `sizes`: the sizes that it is timed at, ((),) for a kernel without
    variables; `device`: the device whose compiler builds the kernel, or "" for the first compiler of the target's backend."""

    ast: Any
    target: Target
    sizes: tuple[Size, ...] = ((),)
    device: str = ""


class KernelContext:
    """A worker's state for one kernel: its programs, its buffers, and its reference results."""

    def __init__(self, setup: Setup) -> None:
        self.kernel = Kernel(data_to_ast(setup.ast))
        self.target, self.sizes = setup.target, setup.sizes
        self.device = device_named(setup.device or self.target.device)
        self.base = Scheduler(self.kernel, self.target)
        self.programs: OrderedDict[str, Program] = OrderedDict()
        self.loaded: OrderedDict[tuple[str, bool], Runner] = OrderedDict()
        self._at: OrderedDict[Size, KernelAtSize] = OrderedDict()
        self._timing_inputs_written = False
        self._opening = 0           # the backend's `opening` when `loaded` was filled; it changes when a lost device is opened anew

    # -- compiling --------------------------------------------------------------------------------------------------------
    def program(self, chain: Sequence[Any], most: int = sys.maxsize) -> Program:
        """The lowered program of a chain, from the cache if it is there. Raises ProgramTooLong for more than `most` instructions."""
        key = repr(chain)
        program = self.programs.get(key)
        if program is None:
            program = lower(apply_opts(self.base, chain_of(chain)), most)
            self.programs[key] = program
            if len(self.programs) > PROGRAMS:
                self.programs.popitem(last=False)
        return program

    # -- running ----------------------------------------------------------------------------------------------------------
    @cached_property
    def buffers(self) -> GuardedBuffers:
        return GuardedBuffers(self.kernel)

    def at(self, size: Size) -> KernelAtSize:
        """The kernel at one size, with its reference results. The KEPT_SIZES latest used sizes are kept."""
        at = self._at.get(size)
        if at is None:
            at = self._at[size] = KernelAtSize(self, size)
            if len(self._at) > KEPT_SIZES:
                self._at.popitem(last=False)
        else:
            self._at.move_to_end(size)
        return at

    def write_timing_inputs(self) -> None:
        """Write the timing inputs into the buffers, unless they hold them already: a verification or an in-place kernel changes them."""
        if not self._timing_inputs_written or self.kernel.written:
            self.buffers.fill(make_inputs(self.kernel, TIMING_INPUTS))
            self._timing_inputs_written = True

    def check_guards(self) -> None:
        """End this process if a kernel wrote outside of its buffers: later results of this process could not be trusted."""
        damage = self.buffers.overrun()
        if damage:
            tell(damage)
            os._exit(EXIT_OVERRUN)

    def inputs_change(self) -> None:
        """Note that the buffers no longer hold the timing inputs."""
        self._timing_inputs_written = False

    def load(self, built: Built) -> Runner:
        """A program in executable memory, from the cache if it is there."""
        opening, key = self.device.backend.opening, (built.digest, built.final)
        if opening != self._opening:        # an earlier candidate broke the device, which was opened anew
            self.loaded.clear()
            self._opening = opening
        runner = self.loaded.get(key)
        if runner is None:
            self.write_timing_inputs()      # a new Runner runs the phases that run only once, and these read the constants
            runner = self.loaded[key] = Runner(self, built)
            if len(self.loaded) > LOADED:
                self.loaded.popitem(last=False)     # not closed, as the race that loads this program may still run it
        else:
            self.loaded.move_to_end(key)
        return runner

    def ready_for_timing(self, programs: Sequence[Built]) -> list[Runner]:
        """Load programs and write the timing inputs into the buffers. Returns the runners of the programs."""
        runners = [self.load(built) for built in programs]
        self.write_timing_inputs()
        return runners

    def close(self) -> None:
        for runner in self.loaded.values():
            runner.close()
        self.loaded.clear()


class KernelAtSize:
    """A kernel with values for its variables. It uses the memory of the largest size, so that a write beyond these values is detected."""

    def __init__(self, context: KernelContext, size: Size) -> None:
        self._kernel = at_size(context.kernel, size) if size else context.kernel
        self._kept_bytes = KEPT_BYTES // (KEPT_SIZES if size else 1)
        self._significand = TF32 if context.target.rounds_factors else 0
        self._target = context.target
        self._references: dict[tuple[Any, ...], Reference] = {}
        self.buffers = context.buffers.for_size(self._kernel)
        self.baseline: tuple[tuple[str, bool], Baseline] | None = None      # (digest, final) of a verified program and its outputs

    def reference(self, algorithm: tuple[Any, ...] = ()) -> Reference:
        """The right outputs, and how far those of a program may be from them that computes by an algorithm: the opts that rewrite the
        kernel, as JSON. All algorithms are compared on the same inputs."""
        found = self._references.get(algorithm)
        if found is None:
            plain = self.reference() if algorithm else None
            computed = apply_opts(Scheduler(self._kernel, self._target), chain_of(algorithm)).kernel.ast
            found = self._references[algorithm] = Reference(
                self._kernel, keep=self._kept_bytes, significand=self._significand, computed=computed, sets=plain.sets if plain else ())
        return found


class Runner:
    """A program in executable memory, with a plan that runs it on the context's buffers."""

    def __init__(self, context: KernelContext, built: Built) -> None:
        self.context, self.spec, self._packed = context, built.spec, built.packed
        self.code = context.device.pair.load(built.object, built.spec)
        self.constants = [p.arg.slot for p in context.kernel.params if p.arg.constant]
        self.plan = self._make_plan()

    def _make_plan(self) -> ExecutionPlan:
        return ExecutionPlan.of_kernel(self.spec, self.code, self.context.buffers.arrays, threads=self.context.target.threads,
                                       constants=self.constants, device=self.context.target.device)

    def run_whole(self, size: Size) -> None:
        """Run the kernel once at a size. A new plan is made where the existing one keeps results of phases that run once, or copies of
        constants in a device's own memory: the constants may have changed since it was made."""
        self._set_whole(size)
        copied = bool(self.constants) and not self.context.device.backend.reads_host_memory
        plan = self._make_plan() if copied or any(p.once for p in self.spec.phases) else self.plan
        plan.execute(**values_of(self.context.kernel, size))

    def contestant(self, size: Size = (), part: float = 1.0) -> Contestant:
        """A contestant for a race: the kernel at a size, or for kernels without variables a slice of about `part` of it."""
        self.plan.load_inputs()
        run = partial(self.plan.repeat_timed, cold=True) if self.between is None else self._run_as_in_plan
        if part < 1.0:
            return Contestant(run, unit=part_of_run(self.plan, self.spec, part))
        self._set_whole(size)
        return Contestant(run)

    @cached_property
    def between(self) -> ExecutionPlan | None:
        """The plan that runs before each timed run, and leaves the caches as in a plan of many kernels; None for small kernels, which
        take too little time for it, and on other devices than CPUs, which do that themselves."""
        queue = self.plan.queue_of(0)
        if not isinstance(queue, CpuQueue) or self.context.kernel.nbytes < LEAST_IN_PLAN:
            return None
        arrays, target = self.context.buffers.arrays, self.context.target
        packed = [array_at(address, nbytes) for address, nbytes in zip(queue.temporaries(0), self.spec.temps, strict=True)]
        constants = [*[packed[t] for t in self._packed], *[arrays[slot] for slot in self.constants]]
        others = [array for slot, array in enumerate(arrays) if slot in self.spec.ins and slot not in self.constants]
        return between_runs(constants, others, target.threads)

    def _run_as_in_plan(self, times: int) -> float:
        """Seconds of `times` runs, of which COLD_RUNS at most are done, each after the caches were left as in a plan."""
        assert self.between is not None
        runs, seconds = min(times, COLD_RUNS), 0.0
        for _ in range(runs):
            self.between.repeat(1)
            start = time.perf_counter()
            self.plan.repeat(1)
            seconds += time.perf_counter() - start
        return seconds * times / runs

    def _set_whole(self, size: Size) -> None:
        if size:
            self.plan.set_variables(values_of(self.context.kernel, size))
        else:
            full_run(self.plan, self.spec)

    def close(self) -> None:
        self.code.close()


_kept: OrderedDict[str, KernelContext] = OrderedDict()


def kernel_context(setup: Setup) -> KernelContext:
    """The context for a setup, made now or kept. The CONTEXTS latest used ones are kept; the others are closed."""
    key = repr(setup)
    context = _kept.get(key)
    if context is None:
        context = _kept[key] = KernelContext(setup)
        if len(_kept) > CONTEXTS:
            _, oldest = _kept.popitem(last=False)
            oldest.close()
    else:
        _kept.move_to_end(key)
    return context
