"""What runs inside worker children: lowering and compiling, timing and verifying one kernel's candidates.

A job is called as `function(item, context)`; the context is made from the setup payload and kept by the process, a few kernels at a
time, so that jobs of different names and kernels may alternate without making inputs anew. Items and results are plain data
(svod.tune.workers.jobs): chains as JSON, machine code as bytes. No arrays travel: inputs are drawn from a seed.

    compile child    lower_candidate(chain) → Lowered            compile_candidate((chain, passes)) → Built
    bench child      screen_candidate, sample_candidate, race_candidates, verify_candidate, confirm_candidates
"""
from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from svod.bench.race import Ratio, confirm, paired_ratio, race
from svod.bench.timer import Contestant, Samples, Screening, deadline, sample_again, screen_one
from svod.compile.backend import device_named
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.ir.serialize import data_to_ast
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.tune.measure.measurer import Built, Confirmed, Lowered, Race, Screened, Verdict
from svod.tune.measure.slices import full_run, least_part, part_of_run
from svod.tune.measure.verify import Baseline, GuardedBuffers, InputSet, Reference, make_inputs, verify
from svod.tune.workers.child import step_limit

CONTEXTS = 6                 # kernels a worker remembers
PROGRAMS = 256               # lowered programs a compile child keeps between lowering and compiling
LOADED = 64                  # programs a bench child keeps in executable memory
EXIT_OVERRUN = 86            # exit status of a worker whose memory a kernel has overwritten
VERIFY_RUN_SECONDS = 5.0     # one run of a program that is verified
# what is timed reads values that no operation turns into NaN, infinity or denormals
TIMING_INPUTS = InputSet("timing", "reals", 0.5, 1.5, 17)


@dataclass(frozen=True)
class Setup:
    """The payload of every job's setup: a kernel as data and the target it is built for."""

    ast: Any
    target: Target


class Context:
    """One kernel in a worker."""

    def __init__(self, setup: Setup) -> None:
        self.kernel = Kernel(data_to_ast(setup.ast))
        self.target = setup.target
        self.device = device_named(self.target.device)
        self.base = Scheduler(self.kernel, self.target)
        self.programs: OrderedDict[str, Program] = OrderedDict()
        self.loaded: OrderedDict[tuple[str, bool], Runner] = OrderedDict()
        self.baselines: dict[tuple[str, bool], Baseline] = {}
        self._buffers: GuardedBuffers | None = None
        self._reference: Reference | None = None
        self._fresh = False              # the buffers hold the timing inputs

    # -- compiling --------------------------------------------------------------------------------------------------------
    def program(self, chain: Sequence[Any]) -> Program:
        key = repr(chain)
        found = self.programs.get(key)
        if found is None:
            found = lower(apply_opts(self.base, (Opt.from_json(o) for o in chain)))
            self.programs[key] = found
            if len(self.programs) > PROGRAMS:
                self.programs.popitem(last=False)
        return found

    # -- running ----------------------------------------------------------------------------------------------------------
    @property
    def buffers(self) -> GuardedBuffers:
        if self._buffers is None:
            self._buffers = GuardedBuffers(self.kernel)
        return self._buffers

    @property
    def reference(self) -> Reference:
        if self._reference is None:
            self._reference = Reference(self.kernel)
        return self._reference

    def ready_for_timing(self) -> None:
        """The buffers hold the timing inputs; written again where a verification or an in-place kernel has changed them."""
        if not self._fresh or self.kernel.written:
            self.buffers.fill(make_inputs(self.kernel, TIMING_INPUTS))
            self._fresh = True

    def check_guards(self) -> None:
        """End this process if a kernel wrote outside of its buffers: whatever it computes from now on would be the fault of others."""
        damage = self.buffers.overrun()
        if damage:
            print(damage, file=sys.stderr, flush=True)
            os._exit(EXIT_OVERRUN)

    def changed(self) -> None:
        self._fresh = False

    def load(self, built: Built) -> Runner:
        key = (built.digest, built.passes)
        found = self.loaded.get(key)
        if found is None:
            self.ready_for_timing()      # phases that run once read the constants now
            found = self.loaded[key] = Runner(self, built)
            if len(self.loaded) > LOADED:
                self.loaded.popitem(last=False)     # not closed: the race that asks for this one may run that one too
        else:
            self.loaded.move_to_end(key)
        return found

    def close(self) -> None:
        for runner in self.loaded.values():
            runner.close()
        self.loaded.clear()


class Runner:
    """A program in executable memory over the context's buffers."""

    def __init__(self, context: Context, built: Built) -> None:
        self.context, self.spec = context, built.spec
        self.code = context.device.pair.load(built.object, built.spec)
        self.plan = self.make_plan()

    def make_plan(self) -> ExecutionPlan:
        constants = [p.arg.slot for p in self.context.kernel.params if p.arg.constant]
        return ExecutionPlan.of_kernel(self.spec, self.code, self.context.buffers.arrays, threads=self.context.target.threads,
                                       constants=constants, device=self.context.target.device)

    @property
    def runs_once(self) -> bool:
        return any(p.once for p in self.spec.phases)

    def contestant(self, part: float, name: str = "") -> Contestant:
        """The whole kernel, or the slice of it that `part` says."""
        if part >= 1.0:
            full_run(self.plan, self.spec)
            return Contestant(self.plan.repeat, name)
        return Contestant(self.plan.repeat, name, part_of_run(self.plan, self.spec, part))

    def close(self) -> None:
        self.code.close()


class Closable(Protocol):
    """What a kernel's jobs keep from one to the next."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


def latest(make: Callable[[Setup], C]) -> Callable[[Setup], C]:
    """`make`, with the results of the latest `CONTEXTS` kernels kept; one that is no longer kept is closed."""
    kept: OrderedDict[str, C] = OrderedDict()

    def context(setup: Setup) -> C:
        key = repr((setup.ast, setup.target))
        found = kept.get(key)
        if found is None:
            found = kept[key] = make(setup)
            if len(kept) > CONTEXTS:
                kept.popitem(last=False)[1].close()
        else:
            kept.move_to_end(key)
        return found
    return context


_context = latest(Context)
lower_candidate_setup = compile_candidate_setup = screen_candidate_setup = sample_candidate_setup = _context
race_candidates_setup = verify_candidate_setup = confirm_candidates_setup = _context


# -- compile children ---------------------------------------------------------------------------------------------------------
def lower_candidate(chain: Sequence[Any], context: Context) -> Lowered:
    """Lower one chain; its program is kept for `compile_candidate`."""
    program = context.program(chain)
    return Lowered(program.digest, program.size, executed_operations(program))


def compile_candidate(item: tuple[Sequence[Any], bool], context: Context) -> Built:
    """Machine code for a chain; `passes`: with LLVM's pass pipeline. Without, it is for the buffers of this module, which are aligned."""
    chain, passes = item
    program = context.program(chain)
    started = time.perf_counter()
    code = context.device.pair.binary_of(program, context.target, optimize=passes)
    symbols = tuple(p.symbol for p in program.spec.phases)
    return Built(code, symbols, program.spec, program.digest, time.perf_counter() - started, passes)


def executed_operations(program: Program) -> float | None:
    """Lane operations that one run of a program executes; None where a loop's length is not known from LINEAR."""
    total = 0.0
    for phase, code in zip(program.spec.phases, program.code, strict=True):
        known: dict[int, float] = {}          # values of index constants and of the bounds of the phase
        times, stack = 1.0, []
        for i, (op, _, lanes, src, arg) in enumerate(code):
            if op == "CONST":
                known[i] = arg
            elif op == "BEGIN":
                known[i] = 0
            elif op == "END_":
                known[i] = phase.extent
            elif op == "MIN":
                bounds = [known[s] for s in src if s in known]
                if bounds:
                    known[i] = min(bounds)     # an upper bound is enough for a loop's end
            elif op == "LOOP":
                if src[0] not in known or src[1] not in known:
                    return None
                stack.append(times)
                times *= max(0, math.ceil((known[src[1]] - known[src[0]]) / arg))
            elif op == "ENDLOOP":
                times = stack.pop()
            else:
                total += times * lanes
    return total


# -- bench children -----------------------------------------------------------------------------------------------------------
def screen_candidate(item: tuple[Built, float | None, bool], context: Context) -> tuple[Screened, int]:
    """(one run under the kill deadline and one sample, repeats of that sample) of a candidate. Item: the candidate, the incumbent's
    seconds or None, whether slices may be used.

    Ends the process (outcome `timeout`, kind "step") when the first run takes longer than its deadline."""
    built, incumbent, shrink = item
    runner = context.load(built)
    context.ready_for_timing()
    part = least_part(context.kernel, runner.spec, context.target, incumbent, runner.plan) if shrink else 1.0
    contestant = runner.contestant(part)
    first = True

    def limited(times: int) -> None:
        nonlocal first
        if first:
            first = False
            with step_limit(deadline(None if incumbent is None else incumbent * part)):
                contestant.run(times)
        else:
            contestant.run(times)

    found = screen_one(Contestant(limited, unit=contestant.unit), incumbent)
    context.check_guards()
    samples = found.samples.seconds or (found.first,)
    return Screened(samples, found.verdict != "ok", part), found.samples.repeats


def sample_candidate(item: tuple[Built, Screened, int, int], context: Context) -> Screened:
    """More samples of a candidate that was screened. Item: candidate, its screening, repeats of its sample, samples in all."""
    built, screened, repeats, runs = item
    runner = context.load(built)
    context.ready_for_timing()
    before = Screening("ok", screened.seconds, screened.seconds, Samples(screened.samples, repeats))
    found = sample_again(runner.contestant(screened.part), before, runs)
    return Screened(found.samples.seconds, False, screened.part)


def race_candidates(item: tuple[Sequence[tuple[Built, float]], int, int, int], context: Context) -> Race:
    """Interleaved rounds over candidates, each with the part it is timed on; the first is the anchor. Item: candidates, rounds, seed, how
    often void rounds are repeated."""
    entries, rounds, seed, void_repeats = item
    runners = [context.load(built) for built, _ in entries]
    context.ready_for_timing()
    contestants = [r.contestant(part) for r, (_, part) in zip(runners, entries, strict=True)]
    found = race(contestants, rounds, anchor=0, rng=random.Random(seed), void_repeats=void_repeats)
    ratios = tuple(math.exp(s - found.scores[0]) for s in found.scores)
    logs = [math.log(r[0] / found.seconds(0)) for r in found.rounds]
    return Race(ratios, found.seconds(0), error_of_median(logs), found.noisy is not None)


def error_of_median(deviations: Sequence[float]) -> float:
    """The standard error of the median of normal values with these deviations from it. The spread comes from the median of the absolute
    deviations: one sample that something disturbed moves neither the median nor this."""
    spread = 1.4826 * statistics.median(map(abs, deviations))
    return 1.25 * spread / math.sqrt(len(deviations))


def verify_candidate(item: tuple[Built, Built | None, bool], context: Context) -> Verdict:
    """Compare a candidate's outputs with the reference. Item: the candidate; a verified baseline, or None; whether this one may serve
    as the baseline of others."""
    built, baseline, keep = item
    reference = context.reference
    key = (baseline.digest, baseline.passes) if baseline is not None and not reference.full else None
    if key is not None and key not in context.baselines and baseline is not None:
        right, how, reason = _verify(context, baseline, None, True)
        if not right:
            return Verdict(None, how, f"the baseline is wrong: {reason}")
    kept = context.baselines.get(key) if key is not None else None
    right, how, reason = _verify(context, built, kept, keep and not reference.full)
    return Verdict(right, how, reason)


def _verify(context: Context, built: Built, baseline: Baseline | None, keep: bool) -> tuple[bool, str, str]:
    runner = context.load(built)
    full_run(runner.plan, runner.spec)
    context.changed()
    outputs = Baseline([])

    def run(arrays: Sequence[Any]) -> None:
        with step_limit(VERIFY_RUN_SECONDS):
            # constants are read when a plan is made, so a plan that keeps something of them is made anew
            plan = runner.make_plan() if runner.runs_once else runner.plan
            plan.execute()

    right, how, reason = verify(context.reference, run, context.buffers, baseline, outputs if keep else None)
    context.check_guards()
    if right and keep:
        context.baselines[built.digest, built.passes] = outputs
    return right, how, reason


def confirm_candidates(item: tuple[Sequence[Built], int, float, float, int, float], context: Context) -> list[Confirmed]:
    """Time finalists at full size. Item: candidates, least rounds, precision, most seconds, seed, ratio up to which times are a tie.

    Those that cannot win any more are left out after the least rounds, and again each time the race has taken twice as long: the time goes
    to the first, which is the measure of all, and to those that still may."""
    entries, rounds, precision, seconds, seed, tie = item
    runners = [context.load(built) for built in entries]
    context.ready_for_timing()
    rng, started = random.Random(seed), time.perf_counter()
    contestants = [r.contestant(1.0) for r in runners]
    first = confirm(contestants, min_rounds=rounds, precision=precision, budget_seconds=0.0, rng=rng)
    times = [[r[i] for r in first.rounds] for i in range(len(entries))]
    open_, known = may_win(times, range(len(times)), tie), first.reached
    while not known and len(open_) > 1 and (spent := time.perf_counter() - started) < seconds:
        again = confirm([contestants[i] for i in open_], min_rounds=1, precision=precision, budget_seconds=min(spent, seconds - spent),
                        rng=rng)
        for i, column in zip(open_, zip(*again.rounds, strict=True), strict=True):
            times[i] += column
        open_ = may_win(times, open_, tie)
        known = all(paired_ratio(times[i], times[0]).half_width <= precision for i in open_)
    return [Confirmed(statistics.median(t), r.low, r.median, r.high, tuple(t))
            for t, r in zip(times, against_first(times, open_), strict=True)]


def against_first(times: Sequence[Sequence[float]], open_: Sequence[int]) -> list[Ratio]:
    """Per contestant its time over that of the first. What left early took part in fewer rounds than those of `open_`, which ran on,
    and the first may have been faster or slower then: its ratio is that to the fastest of `open_`, times that one's, and so are the ends
    of its interval."""
    direct = {i: paired_ratio(times[i], times[0]) for i in open_}
    fastest = min(open_, key=lambda i: direct[i].median)
    found = []
    for i, t in enumerate(times):
        if i in direct:
            found.append(direct[i])
        else:
            there, on = paired_ratio(t, times[fastest][:len(t)]), direct[fastest]
            found.append(Ratio(there.median * on.median, there.low * on.low, there.high * on.high))
    return found


def may_win(times: Sequence[Sequence[float]], open_: Sequence[int], tie: float) -> list[int]:
    """The first contestant, and those of `open_` that the rule of the database (`svod.tune.db.winners`) may still choose: not surely slower
    than the first, nor by more than a tie than the one that is fastest so far. `times[i]`: of contestant i per round; those of `open_`
    took part in the same ones. Pairs of finalists are compared with each other, as a first one that is restless blurs all ratios to it."""
    fastest = min(open_, key=lambda i: paired_ratio(times[i], times[0]).median)
    return [i for i in open_ if i == 0 or (paired_ratio(times[i], times[0]).low <= 1.0
                                           and paired_ratio(times[i], times[fastest]).low <= tie)]


