"""What runs inside bench children for kernels with variables: as `svod.tune.measure.work`, at several sizes (`svod.tune.measure.sizes`).

Code is lowered and compiled by the jobs of `svod.tune.measure.work`: it is one for all sizes. Each size is timed in races of its own, so
that no
sample is mixed of two, and what is reported is the geometric mean over the sizes, round by round, beside the ratio at each. A size is
verified as a kernel of its own: the AST with values for its variables, over the same memory, so that what is written beyond the values
shows as well.
"""
from __future__ import annotations

import math
import random
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from svod.bench.race import confirm, paired_ratio, race
from svod.bench.timer import SAMPLE_FACTOR, Contestant, Samples, Screening, deadline, sample_again, screen_one
from svod.tune.measure.measurer import Built, Confirmed, Race, Screened, Verdict
from svod.tune.measure.sizes import MOST_VERIFIED, Size, at_size, describe_size, geometric_mean, values_of
from svod.tune.measure.verify import KEPT_BYTES, Baseline, GuardedBuffers, Reference, verify
from svod.tune.measure.work import VERIFY_RUN_SECONDS, Context, Runner, Setup, error_of_median, latest
from svod.tune.workers.child import step_limit

KEPT_SIZES = 2 * MOST_VERIFIED      # whose references a worker remembers


class SizedContext(Context):
    """One kernel with variables in a worker."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._sizes: OrderedDict[Size, _AtSize] = OrderedDict()

    def at(self, size: Size) -> _AtSize:
        """What the kernel is and must compute at a size."""
        found = self._sizes.get(size)
        if found is None:
            found = self._sizes[size] = _AtSize(self, size)
            if len(self._sizes) > KEPT_SIZES:
                self._sizes.popitem(last=False)
        else:
            self._sizes.move_to_end(size)
        return found

    def runners(self, programs: Sequence[Built]) -> list[Runner]:
        found = [self.load(built) for built in programs]
        self.ready_for_timing()
        return found

    def contestants(self, runners: Sequence[Runner], size: Size) -> list[Contestant]:
        """The programs at a size: nothing of that is left to do while they are timed."""
        for r in runners:
            r.plan.set_variables(values_of(self.kernel, size))
        return [Contestant(r.plan.repeat) for r in runners]


class _AtSize:
    """A kernel with values for its variables."""

    def __init__(self, context: SizedContext, size: Size) -> None:
        kernel = at_size(context.kernel, size)
        self.reference = Reference(kernel, keep=KEPT_BYTES // KEPT_SIZES)
        self.buffers: GuardedBuffers = context.buffers.for_size(kernel)
        self.baselines: dict[tuple[str, bool], Baseline] = {}


_context = latest(SizedContext)
screen_sizes_setup = sample_sizes_setup = race_sizes_setup = verify_sizes_setup = confirm_sizes_setup = _context


def screen_sizes(item: tuple[Built, Sequence[float] | None, Sequence[Size]], context: SizedContext) -> tuple[Screened, tuple[float, ...],
                                                                                                            tuple[int, ...]]:
    """(what became of a candidate, seconds and repeats of its sample per size). Item: the candidate, the incumbent's seconds per size or
    None, the sizes.

    Ends the process (outcome `timeout`, kind "step") when the first run at a size takes longer than its deadline."""
    built, incumbent, sizes = item
    runners = context.runners([built])
    seconds, repeats = [], []
    for number, size in enumerate(sizes):
        limit = incumbent[number] if incumbent is not None else None
        found = screen_one(_with_deadline(context.contestants(runners, size)[0], limit), limit, cold=math.inf)
        if found.verdict == "slow first run":
            # at one size it takes several times what the incumbent does: no other size makes up for that
            context.check_guards()
            return Screened((found.first,), True), (), ()
        seconds.append(found.score)
        repeats.append(found.samples.repeats)
    context.check_guards()
    score = geometric_mean(seconds)
    cut = incumbent is not None and score > SAMPLE_FACTOR * geometric_mean(incumbent)
    return Screened((score,), cut), tuple(seconds), tuple(repeats)


def _with_deadline(contestant: Contestant, limit: float | None) -> Contestant:
    """A contestant whose first run is ended by its deadline."""
    first = True

    def run(times: int) -> None:
        nonlocal first
        if first:
            first = False
            with step_limit(deadline(limit)):
                contestant.run(times)
        else:
            contestant.run(times)
    return Contestant(run)


def sample_sizes(item: tuple[Built, Sequence[float], Sequence[int], int, Sequence[Size]], context: SizedContext) -> tuple[
        Screened, tuple[float, ...]]:
    """More samples of a candidate that was screened, and its least seconds per size. Item: the candidate, seconds and repeats of its sample
    per size, samples in all, the sizes."""
    built, seconds, repeats, runs, sizes = item
    runners = context.runners([built])
    columns = []
    for size, s, r in zip(sizes, seconds, repeats, strict=True):
        before = Screening("ok", s, s, Samples((s,), r))
        columns.append(sample_again(context.contestants(runners, size)[0], before, runs).samples.seconds)
    return Screened(tuple(geometric_mean(row) for row in zip(*columns, strict=True)), False), tuple(min(c) for c in columns)


def race_sizes(item: tuple[Sequence[Built], int, int, Sequence[Size], int], context: SizedContext) -> tuple[Race, list[list[float]]]:
    """A race at each size: all of it, and per candidate its ratio to the first at each size. Item: candidates, rounds, seed, sizes, how
    often void rounds are repeated."""
    programs, rounds, seed, sizes, void_repeats = item
    runners = context.runners(programs)
    rng = random.Random(seed)
    ratios: list[list[float]] = [[] for _ in programs]
    anchors, errors, noisy = [], [], False
    for size in sizes:
        found = race(context.contestants(runners, size), rounds, anchor=0, rng=rng, void_repeats=void_repeats)
        for column, score in zip(ratios, found.scores, strict=True):
            column.append(math.exp(score - found.scores[0]))
        anchors.append(found.seconds(0))
        errors.append(error_of_median([math.log(r[0] / found.seconds(0)) for r in found.rounds]))
        noisy = noisy or found.noisy is not None
    noise = math.sqrt(math.fsum(e * e for e in errors)) / len(sizes)
    return Race(tuple(geometric_mean(c) for c in ratios), geometric_mean(anchors), noise, noisy), ratios


def verify_sizes(item: tuple[Built, Built | None, Sequence[Size]], context: SizedContext) -> Verdict:
    """Compare a candidate's outputs with the reference at each size. Item: the candidate; a verified baseline, or None; the sizes."""
    built, baseline, sizes = item
    how = ""
    for size in sizes:
        where = describe_size(context.kernel, size)
        right, how, reason = _verify_at(context, built, baseline, size)
        if right is not True:
            return Verdict(right, f"{how}, at {where}", f"at {where}: {reason}")
    values = "; ".join(" ".join(str(size[i]) for size in sizes) for i in range(len(context.kernel.variables)))
    return Verdict(True, f"{how}, at {', '.join(context.kernel.variables)} = {values}")


def _verify_at(context: SizedContext, built: Built, baseline: Built | None, size: Size) -> tuple[bool | None, str, str]:
    at = context.at(size)
    if baseline is None or at.reference.full:
        return _run_at(context, built, size, None, None)
    key = baseline.digest, baseline.passes
    if key not in at.baselines:
        outputs = Baseline([])
        right, how, reason = _run_at(context, baseline, size, None, outputs)
        if not right:
            return None, how, f"the baseline is wrong: {reason}"
        at.baselines = {key: outputs}
    return _run_at(context, built, size, at.baselines[key], None)


def _run_at(context: SizedContext, built: Built, size: Size, baseline: Baseline | None, keep: Baseline | None) -> tuple[bool, str, str]:
    runner, at = context.load(built), context.at(size)
    context.changed()

    def run(arrays: Sequence[Any]) -> None:
        with step_limit(VERIFY_RUN_SECONDS):
            # constants are read when a plan is made, so a plan that keeps something of them is made anew
            plan = runner.make_plan() if runner.runs_once else runner.plan
            plan.execute(**values_of(context.kernel, size))

    found = verify(at.reference, run, at.buffers, baseline, keep)
    context.check_guards()
    return found


def confirm_sizes(item: tuple[Sequence[Built], int, float, float, int, Sequence[Size]], context: SizedContext) -> list[Confirmed]:
    """Time finalists at each size. Item: candidates, least rounds, precision, seconds in all, seed, sizes."""
    programs, rounds, precision, seconds, seed, sizes = item
    runners = context.runners(programs)
    rng = random.Random(seed)
    found = [confirm(context.contestants(runners, size), min_rounds=rounds, precision=precision, budget_seconds=seconds / len(sizes),
                     rng=rng) for size in sizes]
    count = min(len(c.rounds) for c in found)
    times = [[geometric_mean([c.rounds[r][i] for c in found]) for r in range(count)] for i in range(len(programs))]
    out = []
    for i, own in enumerate(times):
        ratio = paired_ratio(own, times[0])
        out.append(Confirmed(statistics.median(own), ratio.low, ratio.median, ratio.high, tuple(own),
                             tuple((tuple(size), c.seconds(i), c.ratios[i].median) for size, c in zip(sizes, found, strict=True))))
    return out
