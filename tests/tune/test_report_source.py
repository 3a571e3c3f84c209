"""`read_tuning`: the data of a report from the records of a tuning database, which is made by the tests without a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from svod.bench.report.data import START
from svod.bench.report.page import render_html, render_markdown
from svod.bench.roofline import Ceilings
from svod.compile.cpu.host import host_target
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.tune.db import KernelRecord, Measurement, OriginRecord, Search, TargetFacts, TuningDB, Verdict, layers
from svod.tune.db.moving import export
from svod.tune.report_source import read_tuning
from tests.bench.example_run import CEILINGS
from tests.core.corpus import data, kernel_of

CHAIN = (("UPCAST", "o0", 4), ("UPCAST", "o1", 16), ("STAGE", "s1", "root"))


@pytest.fixture
def db(tmp_path: Path) -> Iterator[TuningDB]:
    with TuningDB.open(tmp_path / "tuning.db") as opened:
        yield opened


def kernel() -> Kernel:
    return Kernel(kernel_of(data(32, 48).linear(data(64, 48))))


def measured(
    key: str,
    target: str,
    linear: str,
    at: float,
    seconds: float,
    step: str = "race",
    status: str = "ok",
    chain: tuple[tuple[object, ...], ...] = (),
    search: str = "",
    **more: object,
) -> Measurement:
    return Measurement(
        key,
        target,
        chain,
        linear,
        status,
        1,
        "LLVM",
        1,
        step=step,
        time=seconds,
        samples=(seconds,),
        baseline=4e-3,  # type: ignore[arg-type]
        baseline_linear="h",
        search=search,
        taken_at=at,
        **more,
    )


def fill(db: TuningDB, target: str, ast: Kernel, chain: tuple[tuple[object, ...], ...] = CHAIN) -> str:
    """A search of five candidates: the heuristic, the winner, one slow, one wrong, one screened."""
    search = db.begin_search(ast.key, target, executor="inline", config={"width": 4, "budget": 10})
    began = next(s.started_at for s, _ in db.select(Search) if s.search == search)
    tile = (("UPCAST", "o0", 4),)
    db.record(
        [
            KernelRecord(ast.key, name="gemm", ast=ast_to_data(ast.ast), flops=1.0, bytes=1.0),
            OriginRecord(ast.key, "layers.0"),
            OriginRecord(ast.key, "head"),
            TargetFacts(target, {"governor": "performance"}),
            measured(ast.key, target, "h", began + 1, 4e-3, chain=tile, search=search),
            measured(ast.key, target, "slow", began + 2, 9e-2, "screen", "slow", search=search),
            measured(ast.key, target, "wrong", began + 2, 1e-3, "race", "wrong", chain=(("UPCAST", "o0", 8),), search=search),
            measured(ast.key, target, "screened", began + 2.5, 5e-3, "screen", chain=(*tile, ("UNROLL", "r0", 4)), search=search),
            measured(ast.key, target, "w", began + 3, 2e-3, chain=chain, search=search),
            measured(ast.key, target, "h", began + 5, 4e-3, "confirm", chain=tile, search=search, ratio=1.0, ratio_low=1.0, ratio_high=1.0),
            measured(
                ast.key, target, "w", began + 5, 2e-3, "confirm", chain=chain, search=search, ratio=0.5, ratio_low=0.48, ratio_high=0.52
            ),
            *(Verdict(ast.key, target, linear, "verified", 1, method="every element") for linear in ("h", "w")),
        ]
    )
    db.end_search(search, "finished", {"proposed": 20, "limited": 2, "duplicate": 5, "seconds": 4.5, "best": 2e-3, "heuristic": 4e-3})
    return search


def test_winner_course_and_loops(db: TuningDB) -> None:
    target, ast = host_target(), kernel()
    fill(db, target.key, ast)
    found = read_tuning(db)
    assert found is not None and found.target == target.key and found.facts == {"governor": "performance"} and len(found.kernels) == 1
    k = found.kernels[0]
    assert (k.name, k.shape, k.dtype, k.origins) == ("gemm", "32×64 over 48", "float32", ("head", "layers.0"))
    assert k.flops == 2 * 32 * 64 * 48 and k.bytes == 4 * (32 * 48 + 64 * 48 + 32 * 64), "by counting, not as recorded"
    assert k.gain == pytest.approx(2.0) and k.saved == pytest.approx(2e-3) and k.verified == "every element"
    assert k.chain == ("UPCAST(o0, 4)", "UPCAST(o1, 16)", "STAGE(s1, root)")
    assert k.nest.startswith("phase 0: s1 → temporary") and not k.problem
    (course,) = k.courses
    assert course.ended_by == "finished" and course.spent == 4.5 and "width 4" in course.settings
    assert {n: c for n, c in course.fates.items() if c} == {
        "over a limit": 2,
        "duplicate": 5,
        "not built": 9,
        "wrong": 1,
        "slow": 1,
        "screened": 1,
        "confirmed": 2,
    }
    assert course.candidates == 21 and [t.number for t in course.trials] == [1, 3, 4, 5]
    assert course.trials[0].kind == START and course.trials[-1].at == pytest.approx(3.0)
    page = render_html([], found)
    assert "layers.0" in page and "phase 0" in page and "2.00×" in page and "2.00×" in render_markdown([], found)


def test_an_empty_database_is_none(db: TuningDB) -> None:
    assert read_tuning(db) is None


def test_records_of_another_machine(db: TuningDB) -> None:
    ast = kernel()
    fill(db, "aarch64/other/neon/l1 32k/l2 1m/l3 8m/t4", ast)
    fill(db, host_target().key, ast)
    mine = read_tuning(db, host_target().key)
    assert mine is not None and mine.other_targets == ("aarch64/other/neon/l1 32k/l2 1m/l3 8m/t4",)
    theirs = read_tuning(db, mine.other_targets[0])
    assert theirs is not None and not theirs.kernels[0].nest and "another kind of machine" in theirs.kernels[0].problem
    assert theirs.kernels[0].gain == pytest.approx(2.0)
    assert read_tuning(db, "x86_64/nobody/t1") is None


def test_ceilings_of_this_machine_come_from_the_cache(db: TuningDB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of a database alone shows ceilings if `svod-bench ceilings` has run on this machine before, and never those of another
    machine."""
    monkeypatch.setattr("svod.tune.report_source.data_dir", lambda: tmp_path)
    other = "aarch64/other/neon/l1 32k/l2 1m/l3 8m/t4"
    fill(db, host_target().key, kernel())
    fill(db, other, kernel())
    asked: list[tuple[Path, str]] = []

    def known(path: Path, target: Target) -> Ceilings:
        asked.append((path, target.key))
        return CEILINGS
    monkeypatch.setattr("svod.tune.report_source.known_ceilings", known)
    mine, theirs = read_tuning(db, host_target().key), read_tuning(db, other)
    assert mine is not None and mine.ceilings is CEILINGS and theirs is not None and theirs.ceilings is None
    assert asked == [(tmp_path / "ceilings.json", host_target().key)]
    assert "f32 FMA" in render_html([], mine) and "f32 FMA" not in render_html([], theirs)
    given = replace(CEILINGS, quick=True)
    again = read_tuning(db, host_target().key, given)
    assert again is not None and again.ceilings is given


def test_a_chain_that_does_not_apply_any_more_is_told(db: TuningDB) -> None:
    chain = (("UPCAST", "o9", 4),)
    with pytest.raises(Exception, match="o9"):
        apply_opts(Scheduler(kernel(), host_target()), (Opt.from_json(list(o)) for o in chain))
    fill(db, host_target().key, kernel(), chain)
    found = read_tuning(db)
    assert found is not None and "cannot be replayed" in found.kernels[0].problem and found.kernels[0].chain == ("UPCAST(o9, 4)",)
    assert "cannot be replayed" in render_html([], found)


def test_a_search_without_an_end_or_measurements(db: TuningDB) -> None:
    db.begin_search(kernel().key, host_target().key)
    found = read_tuning(db)
    assert found is not None and found.kernels[0].courses[0].ended_by == "not ended" and found.kernels[0].gain is None
    assert "no winner yet" in render_html([], found)


def test_a_report_has_the_users_kernels_and_says_where_a_winner_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = kernel(), Kernel(kernel_of(data(16, 48).linear(data(64, 48))))
    target = host_target()

    def won(k: Kernel, linear: str, ratio: float) -> list[Measurement | Verdict | KernelRecord]:
        interval = {"ratio": ratio, "ratio_low": ratio, "ratio_high": ratio}
        return [measured(k.key, target.key, linear, 5.0, 4e-3 * ratio, "confirm", **interval),
                Verdict(k.key, target.key, linear, "verified", 1), KernelRecord(k.key, name="gemm", ast=ast_to_data(k.ast), ast_version=1)]
    with TuningDB.open(tmp_path / "shipped.db") as made:
        made.record([*won(mine, "ss", 0.5), *won(theirs, "tt", 0.5)])
        export(made, tmp_path / "shipped.jsonl")
    monkeypatch.setattr(layers, "shipped_files", lambda: (tmp_path / "shipped.jsonl",))
    with TuningDB.open(tmp_path / "own.db") as opened:
        assert read_tuning(opened) is None, "the user has nothing"
        opened.record(won(mine, "oo", 0.9))
        tuning = read_tuning(opened)
    assert tuning is not None and [(k.key, k.layer, k.gain) for k in tuning.kernels] == [(mine.key, "shipped", pytest.approx(2.0))]
    assert "elsewhere: shipped layer" in render_html([], tuning)
