"""The jobs of worker children: lowering and compiling, timing and verifying one kernel's candidates.

A job is called as `function(item, context)`. The context is made from the setup payload (`svod.tune.measure.context`) and kept by the
process, a few kernels at a time, so that jobs of different names and kernels may alternate. Items and results are plain data
(`svod.tune.workers.jobs`): chains as JSON, machine code as bytes. No arrays are sent: inputs are drawn from a seed.

    compile child    lower_candidate((chain, limit)) → Lowered   compile_candidate((chain, final)) → Built
    bench child      screen_candidate, sample_candidate, race_candidates, verify_candidate, confirm_candidates, machine_facts

A kernel with variables has one code for all its sizes (`svod.tune.measure.sizes`). Each size is timed in races of its own, so that no
sample mixes two sizes. The results are geometric means over the sizes, round by round, and the ratio at each size.
"""
from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from svod.bench.load import MachineLoad, watch_machine
from svod.bench.race import Ratio, confirm, paired_ratio, race
from svod.bench.timer import COLD_SECONDS, SAMPLE_FACTOR, Contestant, Samples, Screening, deadline, sample_again, screen_one
from svod.compile.backend import device_named
from svod.compile.lower.program import Program
from svod.core.kernel.apply import algorithm_of
from svod.core.kernel.chain_text import chain_of
from svod.core.machine.target import HOST, SAME
from svod.errors import ProgramTooLong
from svod.system.process.cores import affinity
from svod.system.process.processor import host_facts
from svod.tune.measure.candidate import Status
from svod.tune.measure.context import KernelContext, kernel_context
from svod.tune.measure.measurer import Built, Confirmed, Failure, Lowered, RaceResult, Screened, Verification
from svod.tune.measure.sizes import Size, describe_size, geometric_mean
from svod.tune.measure.slices import least_part
from svod.tune.measure.verify import Baseline, verify
from svod.tune.workers.child import step_limit
from svod.tune.workers.jobs import machine_name

LOAD_WATCH_SECONDS = 0.05    # seconds for which the first call of `machine_facts` watches the machine's load
# the facts of `host_facts` that `machine_facts` reports
ABOUT = ("model", "vendor", "family", "stepping", "microcode", "os", "kernel", "hypervisor", "smt", "numa")


_load_since_last_look: Callable[[], MachineLoad] | None = None       # set in a bench child by the first call of `machine_facts`


lower_candidate_setup = compile_candidate_setup = screen_candidate_setup = sample_candidate_setup = kernel_context
race_candidates_setup = verify_candidate_setup = confirm_candidates_setup = kernel_context


# -- compile children ---------------------------------------------------------------------------------------------------------
def lower_candidate(item: tuple[Sequence[Any], int], context: KernelContext) -> Lowered | Failure:
    """Lower one chain; its program is kept for `compile_candidate`. Lowering ends with a Failure when the program reaches the limit of
    instructions (0: no limit)."""
    chain, limit = item
    try:
        program = context.program(chain, limit - 1 if limit else sys.maxsize)
    except ProgramTooLong as error:
        return Failure(Status.LIMIT, f"{limit} instructions or more; BEAM_UOPS_MAX is {limit}: {error}")
    return Lowered(program.digest, program.size, executed_operations(program))


def compile_candidate(item: tuple[Sequence[Any], bool], context: KernelContext) -> Built:
    """Generate machine code for a chain. `final`: as plans run it, with more effort. Other code may only be run with buffers
    that are aligned as in `GuardedBuffers`, as its streaming stores fault on others."""
    chain, final = item
    program = context.program(chain)
    started = time.perf_counter()
    code = context.device.pair.binary_of(program, context.target, optimize=final)
    symbols = tuple(p.symbol for p in program.spec.phases)
    algorithm = tuple([tuple(o.to_json()) for o in algorithm_of(chain_of(chain))])
    packed = program.packing.temps if program.packing is not None else ()
    return Built(code, symbols, program.spec, program.digest, time.perf_counter() - started, final, algorithm, packed)


def executed_operations(program: Program) -> float | None:
    """Number of operations, each lane of a vector counted, that one run of a program executes; None if LINEAR does not tell the length of a
    loop."""
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


def machine_facts(item: str | None, context: None) -> dict[str, Any]:
    """Facts about the machine that this process times on: its name, its target, its load and stolen time since the last call, cores and
    governor. `about` has the facts that do not change. Item: the device; None: the CPU."""
    global _load_since_last_look
    if _load_since_last_look is None:
        _load_since_last_look = watch_machine()
        time.sleep(LOAD_WATCH_SECONDS)
    load = _load_since_last_look()
    _load_since_last_look = watch_machine()
    host = host_facts()
    facts = {"machine": machine_name(), "target": device_named(item or HOST).backend.target().key,
             "load": round(load.load_average, 2), "steal": round(load.steal, 3),
             "cores": len(affinity()), "about": {name: host[name] for name in ABOUT if name in host}}
    return facts | ({"governor": host["governor"]} if "governor" in host else {})


# -- bench children -----------------------------------------------------------------------------------------------------------
def screen_candidate(item: tuple[Built, Sequence[float] | None, bool], context: KernelContext) -> tuple[
        Screened, tuple[float, ...], tuple[int, ...]]:
    """Time a candidate by itself: one run under the kill deadline and one sample at each size. Item: the candidate, the incumbent's seconds
    per size or None, whether slices may be timed. Returns the screening, and for each size the seconds and the repeats of the sample.

    Ends the process (outcome `timeout`, kind "step") when the first run at a size takes longer than its deadline."""
    built, incumbent, shrink = item
    [runner] = context.ready_for_timing([built])
    part = 1.0
    if shrink:
        part = least_part(context.kernel, runner.spec, context.target, incumbent[0] if incumbent else None, runner.plan,
                          context.device.pair.resources(built.object, runner.spec, context.target))
    # With several sizes the first slow run ends the screening: a candidate that takes several times the incumbent's time at one size cannot
    # make up for it at the others.
    cold = COLD_SECONDS if len(context.sizes) == 1 else math.inf
    seconds, repeats = [], []
    for number, size in enumerate(context.sizes):
        limit = incumbent[number] if incumbent else None
        screening = screen_one(_with_deadline(runner.contestant(size, part), limit), limit, cold=cold)
        context.check_guards()
        if screening.verdict == "slow first run":
            return Screened((screening.first,), True, part), (), ()
        seconds.append(screening.score)
        repeats.append(screening.samples.repeats)
    score = geometric_mean(seconds)
    cut = incumbent is not None and score > SAMPLE_FACTOR * geometric_mean(incumbent)
    return Screened((score,), cut, part), tuple(seconds), tuple(repeats)


def _with_deadline(contestant: Contestant, seconds: float | None) -> Contestant:
    """The contestant with a deadline for its first run, which depends on the incumbent's `seconds` and ends the process."""
    first = True

    def run(times: int) -> float | None:
        nonlocal first
        if first:
            first = False
            with step_limit(deadline(None if seconds is None else seconds * contestant.unit)):
                return contestant.run(times)
        return contestant.run(times)
    return Contestant(run, unit=contestant.unit)


def sample_candidate(item: tuple[Built, float, Sequence[float], Sequence[int], int], context: KernelContext) -> tuple[
        Screened, tuple[float, ...]]:
    """Take more samples of a candidate that was screened. Item: the candidate, the part of the kernel that is timed, seconds and repeats of
    its sample per size, the total number of samples. Returns the screening and the least seconds per size."""
    built, part, seconds, repeats, runs = item
    [runner] = context.ready_for_timing([built])
    columns = []
    for size, s, r in zip(context.sizes, seconds, repeats, strict=True):
        before = Screening("ok", s, s, Samples((s,), r))
        columns.append(sample_again(runner.contestant(size, part), before, runs).samples.seconds)
    return Screened(tuple(geometric_mean(row) for row in zip(*columns, strict=True)), False, part), tuple(min(c) for c in columns)


def race_candidates(item: tuple[Sequence[tuple[Built, float]], int, int, int], context: KernelContext) -> tuple[
        RaceResult, list[list[float]]]:
    """Time candidates in interleaved rounds, size by size; the first candidate is the anchor. Item: candidates, each with the part of
    the kernel that is timed; the number of rounds; the seed; the most repetitions of disturbed rounds. Returns the result, and for each
    candidate its ratio to the first at each size."""
    entries, rounds, seed, void_repeats = item
    runners = context.ready_for_timing([built for built, _ in entries])
    rng = random.Random(seed)
    ratios: list[list[float]] = [[] for _ in entries]
    anchors, errors, noisy = [], [], False
    for size in context.sizes:
        contestants = [r.contestant(size, part) for r, (_, part) in zip(runners, entries, strict=True)]
        raced = race(contestants, rounds, anchor=0, rng=rng, void_repeats=void_repeats)
        for column, score in zip(ratios, raced.scores, strict=True):
            column.append(math.exp(score - raced.scores[0]))
        anchors.append(raced.seconds(0))
        errors.append(error_of_median([math.log(r[0] / raced.seconds(0)) for r in raced.rounds]))
        noisy = noisy or raced.noisy is not None
    noise = math.sqrt(math.fsum(e * e for e in errors)) / len(errors)
    return RaceResult(tuple(geometric_mean(c) for c in ratios), geometric_mean(anchors), noise, noisy), ratios


def error_of_median(deviations: Sequence[float]) -> float:
    """The standard error of a median, from the deviations of normally distributed values from it. Their spread is estimated from the median
    of the absolute deviations, so a single disturbed sample changes the result little."""
    spread = 1.4826 * statistics.median(map(abs, deviations))
    return 1.25 * spread / math.sqrt(len(deviations))


def verify_candidate(item: tuple[Built, Built | None, Sequence[Size], float], context: KernelContext) -> Verification:
    """Compare a candidate's outputs with the reference at each size. Item: the candidate; a verified baseline, or None for a candidate
    that becomes the baseline of others when it is right; the sizes; the most seconds of one run, after which the process is ended."""
    built, baseline, sizes, limit = item
    how = ""
    for size in sizes:
        verification = _verify_at(context, built, baseline, size, limit)
        how = verification.how
        if not verification.right:
            where = f"at {describe_size(context.kernel, size)}" if size else ""
            return Verification(verification.right, f"{how}, {where}", f"{where}: {verification.reason}") if where else verification
    variables = context.kernel.variables
    if variables:
        values = "; ".join(" ".join(str(size[i]) for size in sizes) for i in range(len(variables)))
        how += f", at {', '.join(variables)} = {values}"
    return Verification(True, how)


def _verify_at(context: KernelContext, built: Built, baseline: Built | None, size: Size, limit: float) -> Verification:
    """Verify a candidate at one size. If the reference is known only at sampled points, the whole output is compared with the baseline's.
    Under the policy "same" it always is, bit for bit."""
    at = context.at(size)
    if at.reference().full and context.target.numerics != SAME:
        return _run_and_compare(context, built, size, None, None, limit)
    first = baseline or built
    key = first.digest, first.final
    known, outputs = at.baseline or (None, Baseline([]))
    if known != key or baseline is None:
        outputs = Baseline([])
        verification = _run_and_compare(context, first, size, None, outputs, limit)
        if verification.right:
            at.baseline = key, outputs
        if baseline is None:
            return verification
        if not verification.right:
            verdict = "is wrong" if verification.right is False else "cannot be judged"
            return Verification(None, verification.how, f"the baseline {verdict}: {verification.reason}")
    return _run_and_compare(context, built, size, outputs, None, limit)


def _run_and_compare(context: KernelContext, built: Built, size: Size, baseline: Baseline | None, keep: Baseline | None,
                     limit: float) -> Verification:
    runner, at = context.load(built), context.at(size)
    context.inputs_change()

    def run(arrays: Sequence[Any]) -> None:
        with step_limit(limit):
            runner.run_whole(size)

    verification = verify(at.reference(built.algorithm), run, at.buffers, baseline, keep, context.target.numerics == SAME)
    context.check_guards()
    return verification


def confirm_candidates(item: tuple[Sequence[Built], int, float, float, int, float], context: KernelContext) -> list[Confirmed]:
    """Time finalists at full size, without slices. Item: candidates, least number of rounds, precision, most seconds, seed, and the ratio
    up to which times are a tie.

    Candidates that cannot win any more are left out after the least number of rounds, and again each time the race has taken twice as
    long. The remaining time is spent on the first candidate, with which all are compared, and on the candidates that may still win."""
    programs, rounds, precision, seconds, seed, tie = item
    runners = context.ready_for_timing(programs)
    rng, started = random.Random(seed), time.perf_counter()
    by_size: list[list[list[float]]] = [[[] for _ in programs] for _ in context.sizes]      # [size][candidate][round]
    times: list[list[float]] = [[] for _ in programs]                                       # geometric means over the sizes

    noise: list[bool] = []

    def take_rounds(running: Sequence[int], least: int, budget: float) -> None:
        timed = [confirm([runners[i].contestant(size) for i in running], min_rounds=least, precision=precision,
                         budget_seconds=budget / len(context.sizes), rng=rng) for size in context.sizes]
        noise.extend(t.noisy is not None for t in timed)
        # one round of each size at a time; surplus rounds of a size are left out
        for together in zip(*(t.rounds for t in timed), strict=False):
            for i, column in zip(running, zip(*together, strict=True), strict=True):
                for at, value in zip(by_size, column, strict=True):
                    at[i].append(value)
                times[i].append(geometric_mean(column))

    take_rounds(range(len(programs)), rounds, 0.0)
    running = may_win(times, range(len(programs)), tie)
    while (len(running) > 1 and (spent := time.perf_counter() - started) < seconds
           and any(paired_ratio(times[i], times[0]).half_width > precision for i in running)):
        take_rounds(running, 1, min(spent, seconds - spent))
        running = may_win(times, running, tie)
    sizes: list[list[tuple[Size, float, float]]] = [[] for _ in programs]
    for size, at in zip(context.sizes, by_size, strict=True) if context.kernel.variables else ():
        for i, ratio in enumerate(against_first(at, running)):
            sizes[i].append((size, statistics.median(at[i]), ratio.median))
    return [Confirmed(statistics.median(times[i]), ratio.low, ratio.median, ratio.high, tuple(times[i]), tuple(sizes[i]), any(noise))
            for i, ratio in enumerate(against_first(times, running))]


def against_first(times: Sequence[Sequence[float]], running: Sequence[int]) -> list[Ratio]:
    """The ratio of each contestant's time to the first's. A contestant that left the race early has fewer rounds than the contestants in
    `running`, and in these rounds the first may have been faster or slower than later. So its ratio is a product: its ratio to the
    fastest of `running` in the rounds that it has, times the ratio of the fastest to the first in all rounds. The ends of its interval
    are computed in the same way."""
    direct = {i: paired_ratio(times[i], times[0]) for i in running}
    fastest = min(running, key=lambda i: direct[i].median)
    ratios = []
    for i, t in enumerate(times):
        if i in direct:
            ratios.append(direct[i])
        else:
            there, on = paired_ratio(t, times[fastest][:len(t)]), direct[fastest]
            ratios.append(Ratio(there.median * on.median, there.low * on.low, there.high * on.high))
    return ratios


def may_win(times: Sequence[Sequence[float]], running: Sequence[int], tie: float) -> list[int]:
    """The first contestant, and each of `running` that the database's rules (`svod.tune.db.winners`) may still choose: a contestant that
    is not certainly slower than the first, and not certainly slower, beyond a tie, than the fastest so far. `times[i]`: seconds of
    contestant i in each round; all of `running` took part in the same rounds. Contestants are compared directly with the fastest, because
    unsteady times of the first would blur the ratios to it."""
    fastest = min(running, key=lambda i: paired_ratio(times[i], times[0]).median)
    return [i for i in running if i == 0 or (paired_ratio(times[i], times[0]).low <= 1.0
                                             and paired_ratio(times[i], times[fastest]).low <= tie)]
