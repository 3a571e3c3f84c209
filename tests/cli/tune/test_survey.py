"""The survey of svod-tune: kernels weighed, what is searched, for which targets."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svod import config
from svod.cli.tune.survey import Foresight, SurveyRow, choose_targets, decide, pick_target, rate_of, survey, work_of
from svod.core.cost.op_count import count_operations
from svod.errors import ConfigError
from svod.tune import capture
from svod.tune.db import Search, TuningDB
from svod.tune.resolved import Resolved
from tests.cli.tune.commands import BEAM, CEILINGS, TARGET, captured, compiler, records_of_winner
from tests.plans import canonical
from tests.tune import search_kernels


def test_workers_are_started_early_for_what_is_worth_a_search() -> None:
    def news(**seconds: float) -> capture.News:
        return capture.News(["big", "small"], [seconds] if seconds else [])
    with TuningDB.open(":none:") as db:
        assert Foresight(db, TARGET, BEAM).needs_search(news()), "where nothing was ever searched the first kernel says so"
        db.record([Search("s", "big", TARGET.key, ended_at=1.0, outcome="done"), *records_of_winner("big", (), "l")])
        foresight = Foresight(db, TARGET, BEAM)
        assert not foresight.needs_search(news()), "times are waited for"
        assert not foresight.needs_search(news(big=1.0, small=0.001)), "what is not known is too small to matter"
        assert foresight.needs_search(news(big=1.0, small=0.1))
        assert not Foresight(db, TARGET, BEAM).needs_search(capture.News(["big"], [{"big": 1.0}]))


def test_survey_weighs_and_decides(tmp_path: Path) -> None:
    found = capture.read_capture(captured(tmp_path, runs=1000))
    assert pick_target(found) == TARGET
    rows = survey(found, TARGET, compiler())
    gemm, softmax, scale = rows
    assert [r.name for r in rows] == ["gemm", "softmax", "scale"] and gemm.origins == ("block.linear",)
    assert gemm.share == pytest.approx(8e-3 / (1e-2 + 8e-6)) and gemm.calls == 1 and scale.calls == pytest.approx(1e-3)
    assert gemm.flops == 2 * 24 * 40 * 16
    with TuningDB.open(tmp_path / "t.db") as db:
        resolved = Resolved.of(config.PrepareConfig(db=str(tmp_path / "t.db"), object_cache=":none:"), TARGET, db)
        decide(rows, resolved, BEAM)
        assert [r.decision for r in rows] == ["search", "search", "small"]
        linear = compiler().linear_of(gemm.kernel, ())
        db.record(records_of_winner(gemm.key, (), linear))
        decide(rows, resolved, BEAM)
        assert gemm.decision == "known" and gemm.winner is not None
        db.record([Search("s1", gemm.key, TARGET.key, ended_at=1.0, outcome="interrupted")])
        decide(rows, resolved, BEAM)
        assert gemm.decision == "search" and gemm.why == "Ctrl-C ended its search"
        db.record([Search("s2", gemm.key, TARGET.key, ended_at=2.0, outcome="2 rounds without a gain", config={"width": 4})])
        decide(rows, resolved, BEAM, top=1)
        assert [r.decision for r in rows] == ["known", "left out", "left out"]
        decide(rows, resolved, BEAM, only=["block.soft", scale.key[:9]])
        assert [r.decision for r in rows] == ["left out", "search", "search"], "a kernel that was named is searched however small"
        db.record(records_of_winner(softmax.key, (), "of another code generator"))
        decide(rows, resolved, BEAM)
        assert softmax.decision == "search" and "other code" in softmax.why
        scale.share, softmax.share = 0.007, 0.003
        decide(rows, resolved, BEAM)
        assert [r.decision for r in rows] == ["known", "small", "small"], "a small kernel alone starts no search"
        scale.share = 0.011
        decide(rows, resolved, BEAM)
        assert scale.decision == "search"
    found.plans[0].seconds.clear()
    assert survey(found, TARGET, compiler())[0].seconds > 0, "what was not timed is timed here"
    found.plans[0].target = "aarch64/other/neon/l1 64k/l2 1m/l3 0k/t4"
    assert pick_target(found) == TARGET


def test_the_bytes_of_a_gather_are_those_that_it_reads() -> None:
    flops, moved = work_of(canonical(search_kernels.gather(5, 1000, 6)), ())
    assert (flops, moved) == (0, 5 * 4 + 2 * 5 * 6 * 4), "positions, rows read and written; not the whole table"


def test_flops_and_rates() -> None:
    def row(kernel: Any, size: float) -> SurveyRow:
        return SurveyRow(kernel, "k", (), 1, 1e-3, 1.0, "", float(count_operations(kernel.ast).flops), size)
    assert row(canonical(search_kernels.gather(4, 5, 6)), 1).flops == 0, "index arithmetic is not counted"
    assert row(canonical(search_kernels.elementwise(10)), 1).flops == 30
    gemm = row(canonical(search_kernels.gemm(512, 512, 512)), 3 * 4 * 512 * 512)
    rate = rate_of(gemm, 2e-3, TARGET, CEILINGS)
    assert rate.unit == "GFLOP/s" and rate.value == pytest.approx(2 * 512**3 / 2e-3)
    assert rate.share == pytest.approx(rate.value / 2e11)
    size = 1 + max(1 << 20, TARGET.l3)
    large = row(canonical(search_kernels.elementwise(size)), 12.0 * size)
    rate = rate_of(large, 12 * size / 1e10, TARGET, CEILINGS)
    assert rate.unit == "GB/s" and rate.share == pytest.approx(0.5)
    small = row(canonical(search_kernels.elementwise(1000)), 8e3)
    assert rate_of(small, 1e-6, TARGET, CEILINGS).share is None, "its cache level was not measured"
    assert rate_of(large, 0.1, TARGET, None).share is None


def test_the_targets_that_are_tuned_for_are_chosen_among_those_present() -> None:
    own, far, wide = search_kernels.TARGET, replace(search_kernels.TARGET, cpu="far"), replace(search_kernels.TARGET, cpu="far", threads=64)
    assert choose_targets((), [far, own], own) == [own] and choose_targets((), [far], own) == [far]
    assert choose_targets(("far", own.key), [far, own], own) == [far, own]
    assert choose_targets((far.key, "far"), [far], own) == [far], "once, however often it is named"
    assert choose_targets(("t64", far.key), [far, wide], own) == [wide, far]
    less = replace(own, threads=1)
    assert choose_targets(("znver4/avx512f,fma/l1 32k/l2 1m/l3 32m/t1",), [own], less) == [less], "own options count where a machine fits"
    for asked, present, words in ((("nobody",), [own, far], "--target nobody fits no target; present: .*/far/.*/znver4/"),
                                  (("far",), [far, wide], "--target far fits several targets; present: .*t2; .*t64"),
                                  ((), [far, wide], "no machine of the cluster times this machine's target .*znver4.*choose with --target"),
                                  (("far",), [], "present: none, no machine of the cluster times")):
        with pytest.raises(ConfigError, match=words):
            choose_targets(asked, present, own)
