"""BEAM under the policy "fast": kernels that may be rounded are searched before the choice, which is made anew from better chains."""
from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from svod import BeamConfig, PrepareConfig
from svod.compile.plan.compiler import compiler_for
from svod.core.kernel.chain_text import chain_text
from svod.core.machine.target import FAST, FLOAT32
from svod.tune import at_prepare
from svod.tune.db import Rounding, TuningDB, Verdict
from svod.tune.lock import LockedRounding, write_lock
from svod.tune.session import SessionResult
from tests.tune.db.samples import confirmed
from tests.tune.fast.two_products import needs_instructions, of, plan_of, rounded

pytestmark = needs_instructions


class ToldSession:
    """A session that finds, for each kernel, the heuristic's chain without its last opts, as if it took half of the time."""

    searched: ClassVar[list[tuple[str, set[str]]]] = []     # the policy and the kernels of each session
    dropped: ClassVar[int] = 1      # opts that the chain lacks at its end
    is_interrupted: ClassVar[bool] = False

    def __init__(self, tasks: Any, target: Any, *, db: TuningDB, **options: Any) -> None:
        self.tasks, self.target, self.db = tasks, target, db

    def run(self) -> SessionResult:
        compiler = compiler_for(self.target, PrepareConfig())
        self.searched.append((self.target.numerics, {t.key for t in self.tasks}))
        for task in self.tasks:
            chain = compiler.heuristic_choice(task.kernel).chain[:-self.dropped]
            linear = compiler.linear_of(task.kernel, chain)
            found = confirmed(0.5 / self.dropped, linear, task.key, self.target.key, chain=tuple(tuple(o.to_json()) for o in chain),
                              codegen=compiler.pair.revision, compiler=compiler.pair.key)
            self.db.record([found, Verdict(task.key, self.target.key, linear, "verified", compiler.pair.revision)])
        return SessionResult(pending=tuple(t.key for t in self.tasks), interrupted=self.is_interrupted)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ToldSession]]:
    monkeypatch.setattr(at_prepare, "TuneSession", ToldSession)
    monkeypatch.setattr(at_prepare, "cached_ceilings", lambda *args, **kwargs: None)
    monkeypatch.setattr(at_prepare, "settle_at_prepare", lambda unbound, choices, *rest: dict(choices))
    monkeypatch.setattr(at_prepare, "_searching", at_prepare._Clock())
    monkeypatch.setattr(ToldSession, "searched", [])
    yield ToldSession


def beam_of(path: Path | str, most: float | None = 1e-2, **beam: Any) -> PrepareConfig:
    return replace(of(path, most), beam=BeamConfig(width=1, executor="inline", **beam))


def chosen(path: Path) -> dict[str, str]:
    """The chains of the latest choice that a database has."""
    with TuningDB.open(path) as db:
        records = [r for r, _ in db.select(Rounding)]
    latest = max(r.taken_at for r in records)
    return {r.kernel: chain_text(r.chain) for r in records if r.taken_at == latest}


def test_the_choice_is_made_from_searched_chains(tmp_path: Path, told: type[ToldSession], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "svod"):
        plan = plan_of(beam_of(tmp_path / "t.db"))[1]
    products = {k.key for k in plan.kernels}
    assert told.searched == [(FAST, products), (FLOAT32, products)]
    assert "BEAM=1: searching 2 kernels under numerics=fast, for" in caplog.text and "BEAM=1: searching 2 kernels, for" in caplog.text
    assert rounded(plan) == 0
    plan.execute()
    assert rounded(plan) == 2 and {k.key: k.chain for k in plan.kernels} == chosen(tmp_path / "t.db")
    assert all("THREAD" not in k.chain for k in plan.kernels), "the searched chains, not the heuristic's"
    again = plan_of(beam_of(tmp_path / "t.db"))[1]
    assert rounded(again) == 2 and len(told.searched) == 2, "nothing is left to search, and the choice holds"


def test_a_choice_is_made_anew_from_better_chains(tmp_path: Path, told: type[ToldSession], monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(beam_of(tmp_path / "t.db"))[1].execute()
    before = chosen(tmp_path / "t.db")
    assert rounded(plan_of(beam_of(tmp_path / "t.db", ignore_cache=True))[1]) == 2, "a search that finds the same chains changes nothing"
    monkeypatch.setattr(told, "dropped", 2)
    plan = plan_of(beam_of(tmp_path / "t.db", ignore_cache=True))[1]
    assert rounded(plan) == 0
    plan.execute()
    after = {k.key: k.chain for k in plan.kernels}
    assert rounded(plan) == 2 and after == chosen(tmp_path / "t.db") and all(before[k].startswith(after[k] + " ") for k in before)


def test_ctrl_c_ends_all_searches_of_a_prepare(tmp_path: Path, told: type[ToldSession], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "is_interrupted", True)
    plan = plan_of(beam_of(tmp_path / "t.db"))[1]
    assert [policy for policy, _ in told.searched] == [FAST]
    plan.execute()
    assert {k.key: k.chain for k in plan.kernels} == chosen(tmp_path / "t.db")


def test_rounded_chains_are_searched_for_a_choice_alone(tmp_path: Path, told: type[ToldSession]) -> None:
    """Without a limit none is made, and that of a lock file stays as it is: all searches are of float32's chains."""
    plan_of(beam_of(":none:", None))[1].execute()
    assert [policy for policy, _ in told.searched] == [FLOAT32]
    plan_of(of(tmp_path / "t.db", 1e-2))[1].execute()
    with TuningDB.open(tmp_path / "t.db") as db:
        write_lock(tmp_path / "l.jsonl", [], None, [LockedRounding(r) for r, _ in db.select(Rounding)])
    told.searched.clear()
    assert rounded(plan_of(replace(beam_of(tmp_path / "u.db"), lock=str(tmp_path / "l.jsonl")))[1]) == 2 and told.searched == []


def test_a_search_that_fails_leaves_the_choice_to_known_chains(tmp_path: Path, told: type[ToldSession], monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room")
    monkeypatch.setattr("svod.tune.fast.at_prepare.searched", fail)
    plan = plan_of(beam_of(tmp_path / "t.db"))[1]
    plan.execute()
    assert rounded(plan) == 2 and "kernels are not searched with rounded factors" in caplog.text
