"""Makes a list of work from a capture: the kernels, their shares of the time, and whether they are worth a search.

Plans are weighed by their number of runs, kernels by calls × seconds with the heuristic. Kernels that a plan would have with the other form
of a convolution are weighed as if it had them, so that both forms are timed with their best chains. A kernel below 0.5 % of the time keeps
the heuristic. A kernel for which the database has a valid winner is searched further if its search ended early or was narrower than the
search now asked for (`svod.tune.unfinished`). Winners of other machines are checked before anything is searched (`svod.tune.checks`).
"""
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from svod.bench.roofline import COMPUTE, Ceilings
from svod.compile.backend import device_named, target_with
from svod.compile.plan.compiler import Compiled, Compiler, compile_all
from svod.compile.plan.unbound_plan import build_plan, named_kernels, synthetic_arrays
from svod.config import BeamConfig
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import HOST, Target, unfit
from svod.core.schedule.family import family_key
from svod.errors import ConfigError
from svod.tune.capture import Capture, CapturedPlan, News
from svod.tune.chains import choose, known_chains
from svod.tune.checks import Proposed, to_check
from svod.tune.db import Search, TuningDB
from svod.tune.db.winners import Winner
from svod.tune.measure.plan_sizes import profile_at_sizes
from svod.tune.measure.sizes import Size, merged_sizes, variable_names, work_of
from svod.tune.resolved import Resolved
from svod.tune.session import bound_at
from svod.tune.unfinished import left_to_search, was_cut_short

log = logging.getLogger("svod.cli")

SMALL_SHARE = 0.005         # kernels below this share of the time are not searched
LONE_SHARE = 0.01           # if all kernels to search are below this share, none is: shares vary from capture to capture
PROFILE_RUNS = 2            # runs of a plan by which its kernels are timed, if the capture has no times for this machine

Decision = Literal["search", "check", "known", "small", "left out"]


@dataclass
class SurveyRow:
    """One distinct kernel. `calls`: its calls per run of the main plan; `seconds`: seconds of one call with the heuristic; `share`: its
    part of the captured time. `only_in_form`: only the other form of a convolution has it. For a kernel with variables, seconds, operations
    and bytes are geometric means over its `sizes`, and `variables` maps its names of the variables to the user's. `proposed`: the chains to
    measure, if the decision is "check"."""

    kernel: Kernel
    name: str
    origins: tuple[str, ...]
    calls: float
    seconds: float
    share: float
    family: str
    flops: float
    bytes: float
    decision: Decision = "search"
    why: str = ""
    winner: Winner | None = field(default=None)
    sizes: tuple[Size, ...] = ((),)
    variables: Mapping[str, str] = field(default_factory=dict)
    proposed: Proposed | None = None
    only_in_form: bool = False

    @property
    def key(self) -> str:
        return self.kernel.key


def pick_target(capture: Capture, device: str | None = None) -> Target:
    """The target to tune for: the target of the plans that took most of the time, with their number of threads, if this machine has it and
    it is for `device` (None: any device). Else the target of `device`, by default of the CPU."""
    wanted = None if device is None else device_named(device).backend.target()
    weights: dict[str, float] = {}
    for plan in capture.plans:
        weights[plan.target] = weights.get(plan.target, 0.0) + plan.runs * sum(plan.seconds.values())
    for key in sorted(weights, key=lambda k: -weights[k]):
        target = target_with(key)
        if target is not None and (wanted is None or target.device == wanted.device):
            return target
    return wanted or device_named(HOST).backend.target()


def choose_targets(asked: Sequence[str], present: Sequence[Target], own: Target) -> list[Target]:
    """Choose the targets to tune for among those `present` on machines that time. Each entry of `asked` names a target by its key, or by a
    part of it that no other key has. If `asked` is empty, the target is `own`, this process's; if no machine times that, the only one
    present.

    Raises ConfigError if an entry, or the default, fits no target or several."""
    known = {own.key: own} if any(unfit(t.key, own) is None for t in present) else {}
    known |= {t.key: t for t in present if t.key not in known}
    listed = "present: " + ("; ".join(sorted(known)) or "none, no machine of the cluster times")
    if not asked:
        if own.key not in known and len(known) != 1:
            raise ConfigError(f"no machine of the cluster times this machine's target {own.key}; choose with --target; {listed}")
        return [known.get(own.key) or next(iter(known.values()))]
    chosen = {}
    for text in asked:
        fitting = [text] if text in known else [key for key in known if text in key]
        if len(fitting) != 1:
            raise ConfigError(f"--target {text} fits {'several targets' if fitting else 'no target'}; {listed}")
        chosen[fitting[0]] = known[fitting[0]]
    return list(chosen.values())


def compile_heuristics(kernels: Mapping[str, Kernel], compiler: Compiler) -> dict[str, Compiled]:
    """Compile every kernel with the heuristic's chain. Usually the code is in the object cache, as the script has just used it."""
    return compile_all(kernels, {k: compiler.heuristic_choice(v) for k, v in kernels.items()}, compiler)


def kernel_seconds(plan: CapturedPlan, target: Target, compiler: Compiler) -> dict[str, float]:
    """Seconds of one call of each kernel of a plan: the captured times if they are for this target, else times measured now."""
    if plan.target == target.key and plan.unbound.kernels.keys() <= plan.seconds.keys():
        return plan.seconds
    timed: dict[str, float] = {}
    compiled = compile_heuristics(plan.unbound.kernels, compiler)
    built = build_plan(plan.unbound, compiled, synthetic_arrays(plan.unbound), threads=target.threads, device=target.device)
    for call, seconds in zip(plan.unbound.calls, profile_at_sizes(built, PROFILE_RUNS), strict=True):
        timed[call.kernel] = min(seconds, timed.get(call.kernel, seconds))
    return timed


def survey(capture: Capture, target: Target, compiler: Compiler) -> list[SurveyRow]:
    """A row for each distinct kernel of a capture, sorted by the share of the time, largest first."""
    calls: dict[str, float] = {}
    seconds: dict[str, float] = {}
    weights: list[float] = []
    for plan in capture.plans:
        times = kernel_seconds(plan, target, compiler)
        for key, n in plan.unbound.counts.items():
            calls[key] = calls.get(key, 0.0) + n * plan.runs
            seconds[key] = min(times[key], seconds.get(key, times[key]))
        weights.append(plan.runs * sum(times[k] * n for k, n in plan.unbound.counts.items()))
    total = sum(calls[k] * seconds[k] for k in calls) or 1.0
    in_other_forms = capture.in_other_forms
    others = {key: (plan, n) for plan in in_other_forms for key, n in plan.unbound.counts.items() if key not in calls}
    timed = {plan.digest: kernel_seconds(plan, target, compiler) for plan, _ in others.values()}
    for key, (plan, n) in others.items():
        calls[key], seconds[key] = float(n * plan.runs), timed[plan.digest][key]
    main = max(range(len(weights)), key=weights.__getitem__, default=None)
    runs = capture.plans[main].runs if main is not None else 1
    plans = [*capture.plans, *in_other_forms]
    kernels = {key: kernel for plan in plans for key, kernel in plan.unbound.kernels.items()}
    named = named_kernels(c for plan in plans for c in plan.unbound.calls)
    rows = []
    for k in calls:
        called = [v for plan in plans for v in plan.unbound.variables_of(k)]
        sizes = merged_sizes(kernels[k], called)
        rows.append(SurveyRow(kernels[k], named[k].name or "kernel", named[k].origins, calls[k] / runs, seconds[k],
                              calls[k] * seconds[k] / total, family_key(kernels[k].ast), *work_of(kernels[k], sizes), sizes=sizes,
                              variables=variable_names(kernels[k], called), only_in_form=k in others))
    return sorted(rows, key=lambda r: (-r.share, r.key))


def _is_named(row: SurveyRow, only: Sequence[str]) -> bool:
    """Whether --only names a kernel: by the beginning of its key, or by a part of its name or origin."""
    return any(row.key.startswith(o) or o in row.name or any(o in origin for origin in row.origins) for o in only)


def _left_out(row: SurveyRow, rank: int, *, top: int | None, only: Sequence[str]) -> str | None:
    """Why a kernel is left out of the work; None if it is not. `rank`: its index among the kernels sorted by time."""
    if row.kernel.library_kernel is not None:
        return "a library kernel has one form"
    if only and not _is_named(row, only):
        return "not among --only"
    if top is not None and rank >= top:
        return f"not among the {top} that take most of the time"
    return None


def decide(rows: Sequence[SurveyRow], resolved: Resolved, beam: BeamConfig, *, top: int | None = None, only: Sequence[str] = (),
           resume: bool = False) -> None:
    """Set the decision for each kernel, with the reason. `beam`: the settings of the search that the user asked for."""
    db, target = resolved.db, resolved.target
    for rank, row in enumerate(rows):
        choice = choose(row.kernel, resolved)
        row.winner, row.proposed = None, None
        if choice.source == "database":
            row.winner = known_chains(row.kernel, resolved).winner
        if (reason := _left_out(row, rank, top=top, only=only)) is not None:
            row.decision, row.why = "left out", reason
        elif resume and not was_cut_short(db, row.key, target.key):
            begun = row.winner is not None or bool(db.select(Search, row.key, target.key))
            row.decision = "known" if row.winner else "left out"
            row.why = "its search was not cut short (--resume)" if begun else "its search has not begun; it does without --resume"
        elif row.share < SMALL_SHARE and not only:
            row.decision, row.why = "small", f"{100 * row.share:.2f} % of the time"
        elif (proposed := to_check(row.kernel, resolved)) is not None:
            row.decision, row.why, row.proposed = "check", "others have found chains for it", proposed
        elif row.winner is None:
            row.decision, row.why = "search", choice.why
        elif (left := left_to_search(db, row.key, target.key, beam)) is not None:
            row.decision, row.why = "search", left
        else:
            row.decision, row.why = "known", choice.why
    wanted = [r for r in rows if r.decision == "search"]
    if not only and any(r.decision in ("known", "check") for r in rows) and all(r.share < LONE_SHARE and r.winner is None for r in wanted):
        for row in wanted:
            row.decision, row.why = "small", f"{100 * row.share:.2f} % of the time, and nothing else is left to search"


class Foresight:
    """Predicts, while the script still runs, whether there will be something to search, because workers take seconds to start.

    If the database has no search on this target, the first kernel starts the workers. Otherwise the kernels' times decide: kernels that the
    database lacks because they were too small to be searched must not start workers."""

    def __init__(self, db: TuningDB, target: Target, beam: BeamConfig) -> None:
        self.db, self.target, self.beam = db, target, beam
        self.new_here = not db.select(Search, target=target.key)
        self.unknown: set[str] = set()
        self.seconds: dict[str, float] = {}

    def needs_search(self, news: News) -> bool:
        """Take note of new kernels and plans. Returns whether a kernel with something left to search takes a share of the time that is
        worth a search."""
        self.unknown.update(k for k in news.kernels if self.db.winner(k, self.target.key) is None
                            or left_to_search(self.db, k, self.target.key, self.beam) is not None)
        for plan in news.plans:
            for key, seconds in plan.items():
                self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        if self.new_here and self.unknown:
            return True
        total = sum(self.seconds.values())
        return any(self.seconds[k] >= LONE_SHARE * total for k in self.unknown & self.seconds.keys())


@dataclass(frozen=True)
class KernelRate:
    """The rate of a kernel. `value`: operations or bytes per second, whichever bounds it; `unit`: the unit for display; `share`: its share
    of the machine's ceiling, or None."""

    value: float
    unit: str
    share: float | None


def rate_of(row: SurveyRow, seconds: float, target: Target, ceilings: Ceilings | None) -> KernelRate:
    """The rate of a kernel that takes `seconds`. It has no share of the ceiling if it exceeds a ceiling that was measured on a busy
    machine, as that ceiling is then wrong."""
    bound = bound_at(row.kernel, row.sizes, target, ceilings)
    share = bound.seconds / seconds if bound is not None and bound.is_measured else None
    if share is not None and share > 1.0 and ceilings is not None and ceilings.busy is not None:
        share = None
    if bound is not None and bound.by == COMPUTE:
        return KernelRate(row.flops / seconds, "GFLOP/s", share)
    return KernelRate(row.bytes / seconds, "GB/s", share)
