"""Candidates that hang, crash, raise, or write nonsense cost themselves and nothing else. Real workers, real machine code."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from svod.compile.codegen import compile_object
from svod.compile.host import host_target
from svod.config import BeamConfig, BenchConfig
from svod.core.kernel import Kernel
from svod.tune.budget import ModelBudget
from svod.tune.candidate import Candidate, Origin
from svod.tune.db import Measurement, TuningDB, Verdict
from svod.tune.executor import Executor, LocalExecutor
from svod.tune.laboratory import Built, Failure
from svod.tune.session import KernelTask, TuneSession
from svod.tune.worker_laboratory import WorkerLaboratory
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


class FaultyLaboratory(WorkerLaboratory):
    """Replaces the code of some candidates; "raise" gives chains that name an axis which is not there."""

    def __init__(self, kernel: Kernel, executor: Executor, config: BeamConfig, faults: Callable[[Candidate], str]) -> None:
        super().__init__(kernel, TARGET, executor, config, BenchConfig(seconds=0.2))
        self.faults = faults
        self.planted: dict[str, set[str]] = {}

    def build(self, candidates: Sequence[Candidate], *, passes: bool, deadline: float) -> list[Built | Failure]:
        found = super().build(candidates, passes=passes, deadline=deadline)
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
    """Processes below this one."""
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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("fault", ["timeout", "crash", "wrong", "overrun", "error"])
def test_a_faulty_candidate_costs_itself_only(fault: str) -> None:
    before = children()
    planted_in: list[FaultyLaboratory] = []

    def faults(c: Candidate) -> str:
        return fault if c.digest[0] % 16 == 3 and c.origin is not Origin.HEURISTIC else ""

    with LocalExecutor(1) as executor, TuningDB.open(":none:") as db:
        config = BeamConfig(width=2, round_size=10)

        def laboratory(kernel: Kernel) -> FaultyLaboratory:
            planted_in.append(FaultyLaboratory(kernel, executor, config, faults))
            return planted_in[-1]
        session = TuneSession([KernelTask(KERNEL)], TARGET, executor=executor, db=db, config=config, budget=ModelBudget(6.0),
                              laboratory=laboratory)
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
