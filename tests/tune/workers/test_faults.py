"""Candidates that hang, crash, raise, or write wrong memory affect nothing but themselves. With real workers and real machine code."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import compile_object
from svod.config import BeamConfig, BenchConfig
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.tune.db import Measurement, TuningDB, Verdict
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.measure.measurer import Built, Failure
from svod.tune.measure.worker_measurer import WorkerMeasurer
from svod.tune.search.confirmation import finish
from svod.tune.search.kernel_search import KernelSearch, SearchedKernel
from svod.tune.session import KernelTask, TuneSession
from svod.tune.workers.executor import Executor
from svod.tune.workers.local_executor import LocalExecutor
from svod.tune.workers.start import make_executor
from tests.draws import a_half
from tests.patience import NEVER, wait_until
from tests.tune.replay import ReplayedMeasurer, Until, made_up_seconds
from tests.tune.search_kernels import gemm

KERNEL = gemm(61, 67, 33)
TARGET = host_target()

BODIES = {
    "timeout": "br label %loop\nloop:\n  br label %loop",
    "crash": "store volatile i8 1, ptr null\n  ret void",
    "wrong": "ret void",
    # it computes nothing and tramples on whatever its arguments point to, far beyond their ends
    "overrun": """%p = load ptr, ptr %args
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%n, %loop]
  %q = getelementptr i8, ptr %p, i64 %i
  store volatile i8 7, ptr %q
  %n = add i64 %i, 1
  %c = icmp ult i64 %n, 20000
  br i1 %c, label %loop, label %done
done:
  ret void""",
}


def planted(body: str, built: Built) -> Built:
    """`built` with machine code that does `body` in every phase."""
    arguments = "ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end"
    functions = [f"define void @{s}({arguments}) {{\nentry:\n  {body}\n}}" for s in built.symbols]
    return replace(built, object=compile_object("\n".join(functions), TARGET))


class FaultyMeasurer(WorkerMeasurer):
    """A measurer that replaces the code of some candidates by faulty code; "error" stands for bytes that the worker cannot load."""

    def __init__(self, kernel: Kernel, executor: Executor, config: BeamConfig, faults: Callable[[Candidate], str]) -> None:
        super().__init__(kernel, TARGET, executor, config, BenchConfig(seconds=0.2))
        self.faults = faults
        self.planted: dict[str, set[str]] = {}

    def build(self, candidates: Sequence[Candidate], *, final: bool, deadline: float) -> list[Built | Failure]:
        found = super().build(candidates, final=final, deadline=deadline)
        for i, (c, b) in enumerate(zip(candidates, found, strict=True)):
            fault = self.faults(c)
            if fault == "error" and isinstance(b, Built):
                found[i] = replace(b, object=b"not an object")
            elif fault and isinstance(b, Built):
                found[i] = planted(BODIES[fault], b)
            if fault:
                self.planted.setdefault(fault, set()).add(c.linear)
        return found


def children() -> set[int]:
    """The descendants of this process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    while new := {p for p, parent in parents.items() if parent in found | {os.getpid()}} - found:
        found |= new
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("fault", ["timeout", "crash", "wrong", "overrun", "error"])
def test_a_faulty_candidate_costs_itself_only(fault: str) -> None:
    before = children()
    planted_in: list[FaultyMeasurer] = []

    def faults(c: Candidate) -> str:
        return fault if c.digest[0] % 5 == 3 and c.origin is not Origin.HEURISTIC else ""

    with LocalExecutor(1) as executor, TuningDB.open(":none:") as db:
        config = BeamConfig(width=2, round_size=10)

        def is_met() -> bool:
            """Whether faulty candidates were run, and one that computes nothing was verified."""
            verdicts = {v.verdict for v, _ in db.select(Verdict, KERNEL.key)}
            return any(m.planted for m in planted_in) and (fault != "wrong" or "wrong" in verdicts)

        def measurer(kernel: Kernel) -> FaultyMeasurer:
            planted_in.append(FaultyMeasurer(kernel, executor, config, faults))
            return planted_in[-1]
        session = TuneSession([KernelTask(KERNEL)], TARGET, executor=executor, db=db, config=config, budget=Until(is_met),
                              measurer_of=measurer)
        found = session.run().findings[KERNEL.key]
        rows = {m.linear: m for m, _ in db.select(Measurement, KERNEL.key) if m.linear in planted_in[0].planted.get(fault, set())}
        wrong = {v.linear for v, _ in db.select(Verdict, KERNEL.key) if v.verdict == "wrong"}
    assert rows, "no candidate was replaced; choose another condition"
    assert found.verified
    assert found.linear not in rows
    statuses = {m.status for m in rows.values()}
    if fault == "wrong":
        # an empty kernel is very fast: some are raced and verified, the others never get a place in a race
        assert any(m.linear in wrong for m in rows.values())
    elif fault == "overrun":
        assert statuses == {"crash"}
        assert all("bytes after the end" in m.reason or "SIG" in m.reason for m in rows.values())
    elif fault == "crash":
        # writing the traceback may take longer than the first run is allowed
        assert "crash" in statuses <= {"crash", "timeout"}
    else:
        assert statuses == {fault}
    assert all(m.reason for m in rows.values() if m.status != "ok")
    assert children() <= before, "nothing is left running"


def mixed(c: Candidate) -> str:
    """The fault of a candidate: an endless loop, a crash or an exception for three of sixteen candidates, "" for the others."""
    return {3: "timeout", 7: "crash", 11: "error"}.get(c.digest[0] % 16, "") if c.origin is not Origin.HEURISTIC else ""


def often(c: Candidate) -> str:
    """Like `mixed`, but with faults in half of the candidates, so that each kind also occurs on a slow machine."""
    return {1: "timeout", 3: "crash", 5: "error"}.get(c.digest[0] % 6, "") if c.origin is not Origin.HEURISTIC else ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("workers", ["local:1", pytest.param("ray:1", marks=pytest.mark.ray)])
def test_candidates_that_hang_crash_and_raise_in_one_search(workers: str) -> None:
    """With any kind of workers: each failure is recorded with its reason, a right candidate wins, and no process is left."""
    before = children()
    measurers: list[FaultyMeasurer] = []
    said: list[str] = []
    config = BeamConfig(width=2, round_size=10)
    with make_executor(workers, start_deadline=NEVER, say=said.append) as executor, TuningDB.open(":none:") as db:
        def measurer(kernel: Kernel) -> FaultyMeasurer:
            measurers.append(FaultyMeasurer(kernel, executor, config, often))
            return measurers[-1]
        session = TuneSession([KernelTask(KERNEL)], TARGET, executor=executor, db=db, config=config,
                              budget=Until(lambda: any(len(m.planted) == 3 for m in measurers)), measurer_of=measurer)
        found = session.run().findings[KERNEL.key]
        rows = {m.linear: m for m, _ in db.select(Measurement, KERNEL.key)}
    assert said == [], "the workers that were asked for did the work"
    planted_in = measurers[0].planted
    faulty = set().union(*planted_in.values())
    assert found.verified and found.linear not in faulty
    for fault in ("timeout", "crash", "error"):
        recorded = [rows[linear] for linear in planted_in.get(fault, ()) if linear in rows]
        assert recorded, f"no {fault} was recorded"
        # writing the traceback of a crash may take longer than the first run is allowed
        assert {m.status for m in recorded} <= ({"crash", "timeout"} if fault == "crash" else {fault})
        assert all(m.reason for m in recorded)
    assert any(m.status == "ok" for linear, m in rows.items() if linear not in faulty)
    assert wait_until(lambda: children() <= before), "nothing is left running"


@pytest.mark.parametrize("seed", a_half([1, 2, 3]))
def test_the_winner_is_that_of_a_search_without_the_faulty_candidates(seed: int) -> None:
    """With times from a table. In the search without faults the same candidates run, and are too slow to be kept."""
    base = Scheduler(KERNEL, TARGET)
    heuristic = apply_opt(base, Opt("UPCAST", "o1", 16))
    statuses = {"timeout": Status.TIMEOUT, "crash": Status.CRASH, "error": Status.ERROR}
    dropped: list[str] = []

    def fault(c: Candidate) -> Failure | None:
        what = mixed(c)
        if what:
            dropped.append(what)
        return Failure(statuses[what], "planted") if what else None

    clean = ReplayedMeasurer(seconds=lambda c: 1.0 if mixed(c) else made_up_seconds(c))
    winners = []
    for measurer in (clean, ReplayedMeasurer(running=fault)):
        search = KernelSearch(SearchedKernel("key", "gemm", base, heuristic), BeamConfig(width=2, round_size=12, seed=seed), measurer)
        while not search.finished:
            search.step()
        winners.append(finish(search))
    assert set(dropped) == set(statuses)
    assert winners[0].source == "beam" and winners[0].verified
    assert (winners[1].chain, winners[1].seconds) == (winners[0].chain, winners[0].seconds)
