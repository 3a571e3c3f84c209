"""The search over a plan's alternatives takes what is faster, and its record decides about the plan until it no longer counts."""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from svod import BeamConfig, OptimizerConfig, PrepareConfig, Tensor
from svod.bench.race import Ratio
from svod.core.graph.graph import sink
from svod.core.machine.target import FAST, SAME
from svod.prepare import plan_with, prepare_tensors
from svod.tune import capture
from svod.tune.at_prepare import begin_budget
from svod.tune.capture import plan_digest, read_capture, write_capture
from svod.tune.db import PlanTimes, TuningDB
from svod.tune.db.moving import export, import_file
from svod.tune.lock import LockedTimes, read_lock, write_lock
from svod.tune.plans import plan_search
from svod.tune.plans.alternatives import Alternative, PlanGraph, alternatives_of
from svod.tune.plans.plan_search import PlanSearch, can_be_searched, plan_record
from svod.tune.resolved import Resolved, resolve
from tests.core.convolution.test_by_fourier import direct

RNG = np.random.default_rng(0)
IMAGE, *TAPS = (RNG.standard_normal(shape).astype(np.float32) for shape in ((1, 3, 9, 7), (16, 3, 3, 3), (16, 16, 1, 1), (4, 16, 3, 3)))
WANT = direct(np.maximum(direct(np.maximum(direct(IMAGE, TAPS[0], 1, 1), 0), TAPS[1], 0, 1), 0), TAPS[2], 1, 1)


def network() -> Tensor:
    """Three convolutions, so that two images lie between kernels."""
    x = Tensor(IMAGE)
    for i, w in enumerate(TAPS):
        x = x.conv2d(Tensor(w), padding=w.shape[-1] // 2)
        x = x.relu() if i < 2 else x
    return x


def kernels(**named: Any) -> list[str]:
    """The keys of the kernels of the network's plan, whose numbers are checked."""
    y = network()
    plan = prepare_tensors([y], PrepareConfig(**named))
    plan.execute()
    assert np.abs(y.numpy() - WANT).max() < 1e-5 * np.abs(WANT).max()
    return [k.key for k in plan.kernels]


GRAPH = PlanGraph(sink(network().uop))
ALTERNATIVES = alternatives_of(GRAPH)
IMAGES = frozenset(key for key, a in ALTERNATIVES.items() if a.is_image)
BY_RULES = kernels(db=":none:")


def keys_with(chosen: frozenset[str]) -> list[str]:
    resolved = resolve(PrepareConfig(db=":none:"))
    return [c.kernel for c in plan_with(GRAPH, resolved, plan_search.together(ALTERNATIVES[k] for k in chosen)).calls]


def searching(resolved: Resolved, monkeypatch: pytest.MonkeyPatch, speed: Callable[[frozenset[str]], float], *, seconds: float = 60.0,
              begun: PlanTimes | None = None) -> PlanSearch:
    """A search in which a plan takes `speed(chosen)` times the time of the plan by the rules."""
    search = PlanSearch(ALTERNATIVES, partial(plan_with, GRAPH, resolved), resolved, seconds, begun)
    monkeypatch.setattr(search, "is_faster", lambda found, best: speed(found.chosen) < speed(best.chosen))

    def confirm(contestants: list[Any], **_: Any) -> Any:
        found = search.best_chosen if len(contestants) > 1 else frozenset()     # type: ignore[attr-defined]
        ratios = [Ratio(1.0, 1.0, 1.0), Ratio(r := speed(found), 0.99 * r, 1.01 * r)][:len(contestants)]
        return SimpleNamespace(ratios=ratios, seconds=lambda i: 1e-3 * ratios[i].median, noisy=None)
    times_of = search.times_of

    def final(first: Any, best: Any, untried: int) -> PlanTimes:
        search.best_chosen = best.chosen        # type: ignore[attr-defined]
        monkeypatch.setattr(plan_search, "confirm", confirm)
        return times_of(first, best, untried)
    monkeypatch.setattr(search, "times_of", final)
    monkeypatch.setattr(plan_search, "LEAST_KERNELS_SHARE", 0.0)
    return search


def found(resolved: Resolved, monkeypatch: pytest.MonkeyPatch, speed: Callable[[frozenset[str]], float], **named: Any) -> PlanTimes:
    times = searching(resolved, monkeypatch, speed, **named).run()
    assert times is not None
    return times


def with_images(chosen: frozenset[str]) -> float:
    """Each image with channels last makes a plan a tenth faster, all else slower."""
    return float(0.9 ** len(chosen & IMAGES) * 1.1 ** len(chosen - IMAGES))


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "t.db"


@pytest.fixture
def resolved(db: Path) -> Resolved:
    return resolve(PrepareConfig(db=str(db)))


def test_faster_alternatives_are_taken_and_slower_ones_are_not(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    times = found(resolved, monkeypatch, with_images)
    assert times.chosen == IMAGES and len(IMAGES) == 2 and not times.untried
    assert times.is_faster and times.ratio == pytest.approx(0.81)
    one = min(IMAGES)
    assert found(resolved, monkeypatch, lambda chosen: 1.0 - 0.1 * (chosen == {one})).chosen == {one}


def test_where_no_alternative_is_faster_the_rules_are_kept_and_not_searched_again(resolved: Resolved,
                                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    times = found(resolved, monkeypatch, lambda chosen: 1.0 + len(chosen))
    assert not times.alternatives and not times.is_faster and times.ratio == 1.0
    resolved.db.record([times])
    assert plan_record(plan_with(GRAPH, resolved, plan_search.BY_RULES), resolved) == times
    assert kernels(db=str(resolved.db.path)) == BY_RULES


def test_a_search_whose_time_is_over_goes_on_with_its_record(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(resolved, monkeypatch, with_images)
    tried, new = list[frozenset[str]](), search.new

    def once(chosen: frozenset[str]) -> Any:
        tried.append(chosen)
        search.ends = 0.0
        return new(chosen)
    monkeypatch.setattr(search, "new", once)
    first = search.run()
    assert first is not None and tried == [IMAGES] and first.chosen == IMAGES and first.untried == len(ALTERNATIVES)
    later = found(resolved, monkeypatch, with_images, begun=first)
    assert later.chosen == IMAGES and not later.untried


def test_without_time_for_the_rules_there_is_no_record(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    assert searching(resolved, monkeypatch, with_images, seconds=0.0).run() is None


def test_ctrl_c_ends_a_search_and_keeps_what_it_found(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(resolved, monkeypatch, with_images)
    new = search.new

    def interrupted(chosen: frozenset[str]) -> Any:
        if chosen != IMAGES:
            raise KeyboardInterrupt
        return new(chosen)
    monkeypatch.setattr(search, "new", interrupted)
    times = search.run()
    assert search.is_interrupted and times is not None and times.chosen == IMAGES and times.untried == len(ALTERNATIVES)


def test_an_alternative_that_cannot_be_compiled_is_left_out(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(resolved, monkeypatch, with_images)
    made, broken = search.made, min(IMAGES)

    def fails(chosen: frozenset[str]) -> Any:
        if broken in chosen:
            raise plan_search.SvodError("no such instruction")
        return made(chosen)
    monkeypatch.setattr(search, "made", fails)
    times = search.run()
    assert times is not None and times.chosen == IMAGES - {broken}


def test_prepare_uses_the_record(resolved: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved.db.record([found(resolved, monkeypatch, with_images)])
    db = str(resolved.db.path)
    assert kernels(db=db) == kernels(db=db, disable_schedule_cache=True) == keys_with(IMAGES) != BY_RULES
    assert kernels(db=db, numerics=SAME) != keys_with(IMAGES)
    assert kernels(db=db, optimizer=OptimizerConfig(noopt=True)) == BY_RULES


def test_a_record_made_under_the_policy_fast_decides_there(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PrepareConfig(db=str(db), numerics=FAST, max_error=1e-2)
    fast = resolve(config)
    times = found(fast, monkeypatch, with_images)
    assert times.target == fast.target.key
    fast.db.record([times])
    assert plan_record(plan_with(GRAPH, fast, plan_search.BY_RULES), resolve(config)) == times


@pytest.mark.parametrize("change", [{"codegen": 1}, {"alternatives": ("0123456789abcdef no such alternative",)}, {"ratio_high": 1.2}])
def test_a_record_that_does_not_count_leaves_the_plan_by_the_rules(change: dict[str, Any], resolved: Resolved,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    resolved.db.record([replace(found(resolved, monkeypatch, with_images), **change)])
    assert kernels(db=str(resolved.db.path)) == BY_RULES


def test_a_record_travels_and_is_retracted(resolved: Resolved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = found(resolved, monkeypatch, with_images)
    resolved.db.record([times])
    export(resolved.db, tmp_path / "e.jsonl")
    with TuningDB.open(str(tmp_path / "other.db")) as other:
        import_file(other, tmp_path / "e.jsonl")
        assert [r for r, _ in other.select(PlanTimes)] == [times]
    assert kernels(db=str(tmp_path / "other.db")) == keys_with(IMAGES)
    write_lock(tmp_path / "m.lock.jsonl", [], None, times=[LockedTimes(times)])
    assert [x.record for x in read_lock(tmp_path / "m.lock.jsonl").times] == [times]
    assert kernels(db=":none:", lock=str(tmp_path / "m.lock.jsonl")) == keys_with(IMAGES)
    resolved.db.retract(times.kernel, None, None, "a test")
    assert kernels(db=str(resolved.db.path)) == BY_RULES


def test_beam_searches_the_alternatives_and_keeps_the_record(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    beam = BeamConfig(width=1, budget=12.0, executor="inline")
    begin_budget()      # other tests of this process have searched, too
    with caplog.at_level(logging.WARNING):
        used = kernels(db=str(db), beam=beam)
    assert f"trying {len(ALTERNATIVES)} alternatives of a plan" in caplog.text
    with TuningDB.open(str(db)) as opened:
        ((times, _),) = opened.select(PlanTimes)
    assert used == (keys_with(times.chosen) if times.is_faster else BY_RULES) == kernels(db=str(db))


def test_plans_that_cannot_be_timed_have_no_alternatives(resolved: Resolved) -> None:
    plan = plan_with(GRAPH, resolved, plan_search.BY_RULES)
    assert can_be_searched(plan, resolved)
    assert not can_be_searched(plan, resolve(PrepareConfig(db=":none:", numerics=SAME)))
    assert not can_be_searched(plan, resolve(PrepareConfig(db=":none:", optimizer=OptimizerConfig(noopt=True))))
    assert not can_be_searched(plan, resolve(PrepareConfig(db=":none:", opts={"conv_0": []})))
    assert not can_be_searched(replace(plan, calls=plan.calls[:1]), resolved)


def test_a_capture_has_the_graph_of_a_plan(tmp_path: Path) -> None:
    kernels(db=":none:", capture=str(tmp_path / "c"))
    first = read_capture(tmp_path / "c")
    write_capture(tmp_path / "c.jsonl", first)
    for content in (first, read_capture(tmp_path / "c.jsonl")):
        (plan,) = content.plans
        graph, resolved = content.graphs[plan.digest], resolve(PrepareConfig(db=":none:"))
        assert plan_digest(plan_with(graph, resolved, plan_search.BY_RULES), plan.target) == plan.digest
        assert alternatives_of(graph).keys() == ALTERNATIVES.keys() and not content.problems


@pytest.mark.parametrize("line", ['{"graph": {"format": 1, "nodes": []}, "of": "00", "constants": []}',
                                  '{"graph": 3, "of": "00", "constants": []}',
                                  '{"graph": {"format": 1, "nodes": [["CONST", "float32", [], 1]]}, "of": "00", "constants": []}'])
def test_a_line_that_is_no_graph_is_skipped(line: str, tmp_path: Path) -> None:
    kernels(db=":none:", capture=str(tmp_path / "c"))
    write_capture(tmp_path / "c.jsonl", read_capture(tmp_path / "c"))
    with (tmp_path / "c.jsonl").open("a") as f:
        f.write(line + "\n")
    content = capture.read_capture(tmp_path / "c.jsonl")
    assert len(content.plans) == len(content.graphs) == len(content.problems) == 1


def test_alternatives_name_themselves() -> None:
    assert all(isinstance(a, Alternative) and a.key == key and a.described.startswith("float32 1×") for key, a in ALTERNATIVES.items())
