"""The state of one kernel that a worker keeps between jobs: its programs, its buffers, and its reference results at each size."""
from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from svod.bench.timer import Contestant
from svod.compile.backend import device_named
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.ir.serialize import data_to_ast
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import TF32
from svod.core.machine.target import Target
from svod.system.process.streams import tell
from svod.tune.measure.measurer import Built
from svod.tune.measure.sizes import MOST_VERIFIED, Size, at_size, values_of
from svod.tune.measure.slices import full_run, part_of_run
from svod.tune.measure.verify import KEPT_BYTES, Baseline, GuardedBuffers, InputSet, Reference, make_inputs

CONTEXTS = 6                        # kernels a worker remembers
PROGRAMS = 256                      # lowered programs a compile child keeps between lowering and compiling
LOADED = 64                         # programs a bench child keeps in executable memory
KEPT_SIZES = 2 * MOST_VERIFIED      # sizes of a kernel with variables whose references a worker remembers
EXIT_OVERRUN = 86                   # exit status of a worker whose memory a kernel has overwritten
# inputs of timed runs: no operation turns them into NaN, infinity or denormals
TIMING_INPUTS = InputSet("timing", "reals", 0.5, 1.5, 17)


@dataclass(frozen=True)
class Setup:
    """The payload of every job: a kernel as data, its target, the sizes it is timed at (one without values for no variables), and the
    device, where its name selects another compiler than the first of the target's backend."""

    ast: Any
    target: Target
    sizes: tuple[Size, ...] = ((),)
    device: str = ""


class KernelContext:
    """One kernel in a worker."""

    def __init__(self, setup: Setup) -> None:
        self.kernel = Kernel(data_to_ast(setup.ast))
        self.target, self.sizes = setup.target, setup.sizes
        self.device = device_named(setup.device or self.target.device)
        self.base = Scheduler(self.kernel, self.target)
        self.programs: OrderedDict[str, Program] = OrderedDict()
        self.loaded: OrderedDict[tuple[str, bool], Runner] = OrderedDict()
        self._at: OrderedDict[Size, KernelAtSize] = OrderedDict()
        self._timing_inputs_written = False
        self._opening = 0           # the device's `opening` number when the loaded programs were loaded

    # -- compiling --------------------------------------------------------------------------------------------------------
    def program(self, chain: Sequence[Any], most: int = sys.maxsize) -> Program:
        """The program of a chain, lowered now or kept. Raises ProgramTooLong where it has more than `most` instructions."""
        key = repr(chain)
        program = self.programs.get(key)
        if program is None:
            program = lower(apply_opts(self.base, (Opt.from_json(o) for o in chain)), most)
            self.programs[key] = program
            if len(self.programs) > PROGRAMS:
                self.programs.popitem(last=False)
        return program

    # -- running ----------------------------------------------------------------------------------------------------------
    @cached_property
    def buffers(self) -> GuardedBuffers:
        return GuardedBuffers(self.kernel)

    def at(self, size: Size) -> KernelAtSize:
        """The kernel at one size, with its reference results; kept for the latest sizes."""
        at = self._at.get(size)
        if at is None:
            at = self._at[size] = KernelAtSize(self, size)
            if len(self._at) > KEPT_SIZES:
                self._at.popitem(last=False)
        else:
            self._at.move_to_end(size)
        return at

    def write_timing_inputs(self) -> None:
        """Let the buffers hold the timing inputs: they are written again where a verification or an in-place kernel has changed them."""
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
        """A program in executable memory, loaded now or kept."""
        opening, key = self.device.backend.opening, (built.digest, built.passes)
        if opening != self._opening:        # a candidate before has cost the device
            self.loaded.clear()
            self._opening = opening
        runner = self.loaded.get(key)
        if runner is None:
            self.write_timing_inputs()      # phases that run once read the constants now
            runner = self.loaded[key] = Runner(self, built)
            if len(self.loaded) > LOADED:
                self.loaded.popitem(last=False)     # not closed: the race that loads this program may still run that one
        else:
            self.loaded.move_to_end(key)
        return runner

    def ready_for_timing(self, programs: Sequence[Built]) -> list[Runner]:
        """The runners of programs, with the timing inputs in the buffers."""
        runners = [self.load(built) for built in programs]
        self.write_timing_inputs()
        return runners

    def close(self) -> None:
        for runner in self.loaded.values():
            runner.close()
        self.loaded.clear()


class KernelAtSize:
    """A kernel with values for its variables: a kernel of its own over the same memory, so that a write beyond the values shows as well."""

    def __init__(self, context: KernelContext, size: Size) -> None:
        self._kernel = at_size(context.kernel, size) if size else context.kernel
        self._kept_bytes = KEPT_BYTES // (KEPT_SIZES if size else 1)
        self._significand = TF32 if context.target.rounds_factors else 0
        self.buffers = context.buffers.for_size(self._kernel)
        self.baseline: tuple[tuple[str, bool], Baseline] | None = None      # (digest, passes) of a verified program and its outputs

    @cached_property
    def reference(self) -> Reference:
        return Reference(self._kernel, keep=self._kept_bytes, significand=self._significand)


class Runner:
    """A program in executable memory over the context's buffers."""

    def __init__(self, context: KernelContext, built: Built) -> None:
        self.context, self.spec = context, built.spec
        self.code = context.device.pair.load(built.object, built.spec)
        self.constants = [p.arg.slot for p in context.kernel.params if p.arg.constant]
        self.plan = self._make_plan()

    def _make_plan(self) -> ExecutionPlan:
        return ExecutionPlan.of_kernel(self.spec, self.code, self.context.buffers.arrays, threads=self.context.target.threads,
                                       constants=self.constants, device=self.context.target.device)

    def run_whole(self, size: Size) -> None:
        """Run the kernel once at a size. A plan reads its constants when it is made: those of phases that run once, and on a device with
        memory of its own all of them. Such a plan is made anew."""
        self._set_whole(size)
        copied = bool(self.constants) and not self.context.device.backend.reads_host_memory
        plan = self._make_plan() if copied or any(p.once for p in self.spec.phases) else self.plan
        plan.execute(**values_of(self.context.kernel, size))

    def contestant(self, size: Size = (), part: float = 1.0) -> Contestant:
        """The kernel at a size, ready to run, or a slice of about `part` of it (kernels without variables only)."""
        self.plan.load_inputs()
        run = partial(self.plan.repeat_timed, cold=True)
        if part < 1.0:
            return Contestant(run, unit=part_of_run(self.plan, self.spec, part))
        self._set_whole(size)
        return Contestant(run)

    def _set_whole(self, size: Size) -> None:
        if size:
            self.plan.set_variables(values_of(self.context.kernel, size))
        else:
            full_run(self.plan, self.spec)

    def close(self) -> None:
        self.code.close()


_kept: OrderedDict[str, KernelContext] = OrderedDict()


def kernel_context(setup: Setup) -> KernelContext:
    """The context of a setup. The latest `CONTEXTS` ones are kept; older ones are closed."""
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
