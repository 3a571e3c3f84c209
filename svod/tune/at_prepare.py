"""BEAM= at prepare time: kernels that the database does not know, or whose search is unfinished, are searched before the plan is built,
within a budget, and remembered.

One warning says so before it starts (kernels, budget, how to stop) and one when it ends; Ctrl-C ends the search, keeps what it found and
goes on with the best known. A terminal shows a bar of progress.
"""
from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from svod.bench.roofline import cached_ceilings
from svod.compile.plan.compiler import Choice, Compiler
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.config import BenchConfig, PrepareConfig, data_dir
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt
from svod.errors import SvodError, TuneError
from svod.system.forksafe import remake_after_fork
from svod.tune.chains import choose
from svod.tune.db import TuningDB
from svod.tune.measure.sizes import merged_sizes, variable_names
from svod.tune.search.budget import ModelBudget
from svod.tune.search.events import KernelFinished, SearchEvent, debug_line
from svod.tune.session import KernelTask, TuneSession
from svod.tune.workers.start import make_executor

log = logging.getLogger("svod")

_lock = threading.Lock()          # one search at a time in a process
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)
_spent = 0.0                      # seconds this process has searched
_spent_before = 0.0               # those that count for no budget any more
_interrupted = 0                  # searches of this process that Ctrl-C ended


def seconds_searched() -> float:
    """Seconds of wall time that searches at prepare time have taken in this process, the start of their workers included."""
    return _spent


def begin_budget() -> None:
    """Let the budget of `BeamConfig.budget` begin anew: what this process has searched so far does not count."""
    global _spent_before
    with _lock:
        _spent_before = _spent


def searches_interrupted() -> int:
    """Number of prepare-time searches that Ctrl-C has ended in this process. Such a search returns what it found and raises nothing."""
    return _interrupted


def search_at_prepare(unbound: UnboundPlan, unknown: Mapping[str, Kernel], compiler: Compiler, config: PrepareConfig,
                      db: TuningDB) -> dict[str, Choice]:
    """Search kernels and return the chains to use; those that are missing stay as they are known. Never raises for a search that fails:
    the log says why."""
    global _spent, _interrupted
    beam = config.beam
    assert beam is not None
    count = f"{len(unknown)} kernel{'s' * (len(unknown) != 1)}"
    with _lock:
        left = beam.budget - (_spent - _spent_before)
        if left <= 0:
            log.info("the search budget of this process, %g s, is used up; %s not searched", beam.budget,
                     f"{count} {'are' if len(unknown) > 1 else 'is'}")
            return {}
        workers = "inline" if beam.executor == "inline" else f"{beam.executor}:{beam.workers}" if beam.workers else beam.executor
        known = sum(choose(k, compiler, config, db).source == "database" for k in unknown.values())
        goes_on = f" ({known} of them known, and with more to try)" if known else ""
        log.warning("BEAM=%d: searching %s%s, for at most %.0f s; Ctrl-C stops and keeps what was found", beam.width, count, goes_on, left)
        started = time.monotonic()
        try:
            chosen, said, interrupted = _run(unbound, unknown, compiler, config, db, left, workers)
        except (TuneError, KeyboardInterrupt) as e:
            # a Ctrl-C during the search itself is the session's; this one came before, while the workers started
            why = "Ctrl-C" if isinstance(e, KeyboardInterrupt) else str(e)
            _interrupted += isinstance(e, KeyboardInterrupt)
            log.warning("BEAM=%d: the search could not be run (%s); %s without it", beam.width, why,
                        f"{count} {'go' if len(unknown) > 1 else 'goes'}")
            return {}
        finally:
            _spent += time.monotonic() - started
        _interrupted += interrupted
        log.warning("BEAM=%d: %s", beam.width, said)
        return chosen


def _run(unbound: UnboundPlan, unknown: Mapping[str, Kernel], compiler: Compiler, config: PrepareConfig, db: TuningDB, seconds: float,
         workers: str) -> tuple[dict[str, Choice], str, bool]:
    """The chains, what is to be said about the search, and whether Ctrl-C ended it."""
    beam, started = config.beam, time.monotonic()
    assert beam is not None
    counts = unbound.counts
    names = {c.kernel: c.name for c in reversed(unbound.calls)}
    named = {k.key: names[key] for key, k in unknown.items()}
    origins: dict[str, list[str]] = {}
    for c in unbound.calls:
        if c.origin:
            origins.setdefault(c.kernel, []).append(c.origin)
    tasks = [KernelTask(k, calls=counts[key], name=names[key], origins=tuple(dict.fromkeys(origins.get(key, ()))),
                        sizes=merged_sizes(k, unbound.variables_of(key)), variables=variable_names(k, unbound.variables_of(key)))
             for key, k in unknown.items()]
    try:
        ceilings = cached_ceilings(Path(data_dir()) / "ceilings.json", compiler.target, compiler.target.threads, quick=True)
    except (SvodError, OSError, MemoryError) as e:
        log.info("what this machine can do at best was not measured: %s", e)
        ceilings = None     # the search goes on without bounds
    with make_executor(workers, device=compiler.target.device, say=log.warning) as executor, Progress(
            TextColumn("kernels searched"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True),
            transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=len(tasks))

        def listen(event: SearchEvent) -> None:
            progress.advance(bar, isinstance(event, KernelFinished))
            if line := debug_line(event, beam):
                progress.console.print(f"{named.get(event.kernel, '')}: {line}", highlight=False, markup=False, soft_wrap=True)

        session = TuneSession(tasks, compiler.target, executor=executor, db=db, config=beam, bench=BenchConfig.from_env(),
                              budget=ModelBudget(max(0.0, seconds - (time.monotonic() - started)), per_kernel=beam.kernel_budget),
                              ceilings=ceilings, listener=listen, device=compiler.device)
        result = session.run()
    chosen: dict[str, Choice] = {}
    better = 0
    for key, finding in result.findings.items():
        if finding.source == "heuristic" or finding.winner is None:
            stored = choose(unknown[key], compiler, config, db)
            chosen[key] = stored if stored.source == "database" else Choice(stored.chain, "heuristic",
                                                                            f"no faster chain was found: {finding.why}")
            continue
        better += 1
        chain = tuple(Opt.from_json(list(o)) for o in finding.chain)
        chosen[key] = Choice(chain, "beam", f"{finding.speedup.median:.2f}× the heuristic, {finding.why}")
    for key in result.pending:
        stored = choose(unknown[key], compiler, config, db)
        chosen[key] = stored if stored.source == "database" else Choice(stored.chain, "pending", "another process is searching this kernel")
    where = f"{'kept in' if result.rows else 'nothing was added to'} {db.path}" if db.path is not None else "the database is in memory only"
    text = (f"{'interrupted after' if result.interrupted else 'searched'} {result.seconds:.1f} s, {result.candidates} candidates: {better} "
            f"of {len(tasks)} kernel{'s' * (len(tasks) != 1)} found a faster chain; {where}")
    unmeasured = [f.why for f in result.findings.values() if f.winner is None]
    if unmeasured:
        text += f"; {len(unmeasured)} {'were' if len(unmeasured) > 1 else 'was'} not measured: {unmeasured[0]}"
    return chosen, text, result.interrupted
