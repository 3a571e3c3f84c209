"""Reads the tuning database and returns the plain data that a report shows (`read_tuning`).

It is in a module of its own because `svod.bench`, which draws reports, must not import `svod.tune`. Winning chains are replayed with
today's opts to show their loop nests; a chain that does not apply any more is shown with the reason.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from svod.bench.report.data import NEXT_WIDTH, Course, TimedSize, Trial, TunedKernel, Tuning, fates_of, kind_of_step
from svod.bench.roofline import Ceilings, known_ceilings
from svod.compile.backend import target_with
from svod.config import BeamConfig, data_dir
from svod.core.ir.serialize import data_to_ast
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import chain_words, opt_text
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.core.tree.show import print_nest
from svod.errors import SvodError
from svod.tune.db import LAYER_NAMES, KernelRecord, Measurement, Search, TargetFacts, TuningDB, Verdict, described, origins_of
from svod.tune.db.winners import Winner
from svod.tune.measure.sizes import Size, work_of
from svod.tune.session import bound_at
from svod.tune.unfinished import what_is_left

UNLIMITED_SECONDS = 1e6     # a budget of at least this many seconds counts as no budget
_STATUS_FATE = {"timeout": "timeout", "crash": "failed", "error": "failed", "lost": "failed", "wrong": "wrong", "slow": "slow"}
_STEP_FATE = {"screen": "screened", "race": "raced", "confirm": "confirmed"}
# a candidate with several fates counts under the last of them
_FURTHEST = ("failed", "timeout", "slow", "screened", "raced", "confirmed", "wrong")


def read_tuning(db: TuningDB, target: str | None = None, ceilings: Ceilings | None = None) -> Tuning | None:
    """Read the results for `target` (a key; None: the target that was searched or measured last) from `db`; None where it has none.
    `ceilings`: the ceilings of the target's machine; None: the cached ones, if there are any."""
    measurements = [m for m, _ in db.select(Measurement)]
    searches = [s for s, _ in db.select(Search)]
    last: dict[str, float] = {}
    for key, at in [(m.target, m.taken_at) for m in measurements] + [(s.target, s.started_at) for s in searches]:
        last[key] = max(at, last.get(key, 0.0))
    chosen = target if target is not None else max(last, key=lambda k: last[k], default=None)
    if chosen is None or chosen not in last:
        return None
    machine = target_with(chosen)
    mine = [m for m in measurements if m.target == chosen]
    if ceilings is None and machine is not None:
        ceilings = known_ceilings(data_dir() / "ceilings.json", machine)
    kernels = _kernels(db, chosen, machine, mine, [s for s in searches if s.target == chosen], ceilings)
    newest = max(mine, key=lambda m: m.taken_at, default=None)
    remarks = tuple(f"{s.where}: {s.reason}" for s in db.skipped[:5]) + ((db.problem,) if db.problem else ())
    return Tuning(str(db.plan.write or ":none:"), chosen, newest.compiler if newest else "", _facts_of(db, chosen), tuple(kernels),
                  tuple(k for k in last if k != chosen), remarks, ceilings)


def _facts_of(db: TuningDB, target: str) -> dict[str, str]:
    """The facts that the machines with this target key have recorded about themselves."""
    facts: dict[str, str] = {}
    for t, _ in db.select(TargetFacts):
        if t.target == target:
            facts |= {str(k): str(v) for k, v in t.facts.items()}
    return facts


def _kernels(db: TuningDB, target: str, machine: Target | None, measurements: Sequence[Measurement],
             searches: Sequence[Search], ceilings: Ceilings | None) -> list[TunedKernel]:
    """The kernels that were measured or searched on a target, sorted by their gain, largest first."""
    records, origins = described(db), origins_of(db)
    verified = {(v.kernel, v.linear): v.method for v, _ in db.select(Verdict) if v.target == target and v.verdict == "verified"}
    by_kernel: dict[str, list[Measurement]] = {}
    for m in measurements:
        by_kernel.setdefault(m.kernel, []).append(m)
    asked = BeamConfig.from_env(width=NEXT_WIDTH)       # settings of the search that the report recommends
    kernels = []
    for key in dict.fromkeys([*by_kernel, *(s.kernel for s in searches)]):
        winner = db.winner(key, target)
        own = [s for s in searches if s.kernel == key]
        evidence = next((m for m in by_kernel.get(key, ()) if winner is not None and m.id == winner.measurement), None)
        if winner is not None and evidence is None:     # the winner's measurement ships with svod
            evidence = next((m for m, _ in db.select(Measurement, key, target, shipped=True) if m.id == winner.measurement), None)
        found = _kernel(records.get(key) or KernelRecord(key), origins[key], winner, evidence, machine, ceilings)
        kernels.append(replace(found, courses=tuple(_courses(own, by_kernel.get(key, []))), left=what_is_left(own, asked),
                               layer=LAYER_NAMES[winner.layer] if winner else "",
                               verified=verified.get((key, winner.linear), "") if winner else ""))
    return sorted(kernels, key=lambda k: (-k.saved, -(k.heuristic or 0.0), k.key))


def _kernel(record: KernelRecord, origins: Sequence[str], winner: Winner | None, evidence: Measurement | None, machine: Target | None,
            ceilings: Ceilings | None) -> TunedKernel:
    """The report's data about a kernel, without its searches. `evidence`: the measurement that confirmed the winner."""
    shape = dtype = nest = problem = ""
    flops, moved = record.flops, record.bytes
    share: float | None = None
    timed: tuple[TimedSize, ...] = ()
    seconds = winner.time if winner else None
    heuristic = winner.heuristic_seconds if winner else None
    try:
        kernel = Kernel(data_to_ast(record.ast))
        sizes = _sizes(kernel, evidence)
        if sizes:
            flops, moved = work_of(kernel, sizes)
            timed = _timed(kernel, sizes, evidence, seconds, heuristic)
            share = _share(kernel, sizes, machine, ceilings, seconds)
        out = kernel.stages[kernel.output]
        shape = "×".join(str(kernel.axes[a].extent) for a in out.outs) or "scalar"
        if out.reds:
            shape += " over " + "×".join(str(kernel.axes[a].extent) for a in out.reds)
        dtype = out.dtype.name
        if winner is None:
            problem = "no chain is confirmed and verified: the heuristic's is used"
        elif machine is None:
            problem = "the chain belongs to another kind of machine: make the report there to see its loops"
        else:
            nest = print_nest(apply_opts(Scheduler(kernel, machine), winner.opts))
    except SvodError as e:
        problem = f"the stored chain or kernel cannot be replayed by this svod: {e}"
    chain = tuple(map(opt_text, winner.chain)) if winner else ()
    return TunedKernel(record.kernel, record.name or "kernel", shape, dtype, tuple(origins), flops, moved, chain, seconds, heuristic,
                       winner.interval if winner else None, "", nest, problem, (), timed, share)


def _sizes(kernel: Kernel, evidence: Measurement | None) -> tuple[Size, ...]:
    """The sizes that the winner of a kernel was confirmed at; () where they are unknown. A kernel without variables has the one size ()."""
    if not kernel.variables:
        return ((),)
    times = evidence.sizes if evidence is not None else ()
    if any(s.at.keys() != set(kernel.variables) for s in times):
        return ()
    return tuple(tuple(s.at[name] for name in kernel.variables) for s in times)


def _timed(kernel: Kernel, sizes: Sequence[Size], evidence: Measurement | None, seconds: float | None,
           heuristic: float | None) -> tuple[TimedSize, ...]:
    """The winner's time at each of the sizes, with the heuristic's time, the operations and the bytes at that size."""
    if evidence is None or seconds is None or heuristic is None:
        return ()
    if not kernel.variables:
        return (TimedSize("", seconds, heuristic, *work_of(kernel, sizes)),)
    return tuple(TimedSize(str(s.named(evidence.variables)), s.seconds, s.seconds / s.ratio, *work_of(kernel, (size,)))
                 for s, size in zip(evidence.sizes, sizes, strict=True))


def _share(kernel: Kernel, sizes: Sequence[Size], machine: Target | None, ceilings: Ceilings | None, seconds: float | None) -> float | None:
    """The share of the machine's ceiling that a kernel of `seconds` reaches; None where the ceiling was not measured."""
    bound = bound_at(kernel, sizes, machine, ceilings) if machine is not None else None
    return bound.seconds / seconds if bound is not None and bound.is_measured and seconds else None


def _courses(searches: Sequence[Search], measurements: Sequence[Measurement]) -> list[Course]:
    """The searches of one kernel, oldest first. A search may have two records, from its start and from its end: then the second is used."""
    ids: dict[str, Search] = {}
    for s in searches:
        if s.search not in ids or s.ended_at is not None:
            ids[s.search] = s
    by_search: dict[str, list[Measurement]] = {}
    for m in measurements:
        by_search.setdefault(m.search, []).append(m)
    return [_course(s, sorted(by_search.get(s.search, ()), key=lambda m: (m.taken_at, m.step != "race")))
            for s in sorted(ids.values(), key=lambda s: s.started_at)]


def _course(search: Search, measurements: Sequence[Measurement]) -> Course:
    trials: list[Trial] = []
    numbers: dict[str, int] = {}
    kinds: dict[str, str] = {}
    chains: list[tuple[str, ...]] = []
    fates: dict[str, str] = {}
    for m in measurements:
        candidate = m.linear or m.chain_key
        fate = _STATUS_FATE.get(m.status) or _STEP_FATE[m.step]
        if candidate not in fates or _FURTHEST.index(fate) > _FURTHEST.index(fates[candidate]):
            fates[candidate] = fate
        words = tuple(map(opt_text, m.chain))
        if candidate not in numbers:
            numbers[candidate] = len(numbers) + 1
            kinds[candidate] = kind_of_step(words, chains)
            chains.append(words)
        if m.time is not None and m.status in ("ok", "slow") and m.step != "confirm":
            trials.append(Trial(numbers[candidate], max(0.0, m.taken_at - search.started_at), m.time, kinds[candidate], m.step == "race",
                                chain_words(m.chain)))
    result: Mapping[str, Any] = search.result
    counts = {k: int(v) for k, v in result.items() if isinstance(v, int)}
    baseline = next((m.baseline for m in reversed(measurements) if m.baseline is not None), None)
    best = min((t.seconds for t in trials if t.raced), default=None)
    return Course(search.search, search.started_at, _number(result.get("seconds")) or 0.0, search.outcome or "not ended",
                  _settings(search), _number(result.get("heuristic")) or baseline, _number(result.get("best")) or best,
                  fates_of(counts, Counter(fates.values())), tuple(trials), counts.get("timed", len({t.number for t in trials})))


def _settings(search: Search) -> str:
    parts = [search.strategy]
    if (width := search.config.get("width")) is not None:
        parts.append(f"width {width}")
    budget = _number(search.config.get("budget"))
    if budget is not None and budget < UNLIMITED_SECONDS:
        parts.append(f"budget {budget:g} s")
    return ", ".join(p for p in [*parts, search.executor] if p)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
