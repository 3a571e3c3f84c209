"""The recorded times of a convolution's two forms decide about its form, travel between databases and in lock files, and are made by timing
both in their plan."""
from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from svod import PrepareConfig, Tensor
from svod.compile.plan.compiler import compile_all
from svod.compile.plan.unbound_plan import UnboundPlan, build_plan
from svod.core.convolution.by_fourier import ConvolutionSizes
from svod.core.convolution.price import block_lengths
from svod.tune import at_prepare
from svod.tune.capture import Capture, CapturedForm, plan_digest, read_capture, write_capture
from svod.tune.chains import choose_each
from svod.tune.db import OWN, TEAM, FormTimes, RecordError, TuningDB
from svod.tune.db.moving import export, import_file, merge
from svod.tune.lock import LockedTimes, check_whole, read_lock, write_lock
from svod.tune.plans.form_check import BothForms, time_forms
from svod.tune.plans.forms import decided_form, decided_words
from svod.tune.plans.predicted_forms import Predicted, rough_forms
from svod.tune.resolved import resolve
from tests.core.convolution.test_by_fourier import convolved, direct
from tests.tune.db.samples import form_times
from tests.tune.test_convolutions import is_close, transforms

RNG = np.random.default_rng(0)
IMAGES = [RNG.standard_normal((1, 6, *size)).astype(np.float32) for size in ((37, 41), (90, 97))]
TAPS = RNG.standard_normal((6, 1, 41, 41)).astype(np.float32)
PADDING = 2


class Case:
    """A convolution of each channel of an image with the first `count` of TAPS along each axis, and its form as it was captured."""

    def __init__(self, image: np.ndarray[Any, Any], count: int) -> None:
        self.image = image
        self.taps = np.ascontiguousarray(TAPS[..., :count, :count])
        with TemporaryDirectory() as directory:
            self.run(PrepareConfig(capture=directory))
            self.capture = replace(read_capture(directory), graphs={})      # its plan has no alternatives

    def run(self, config: PrepareConfig) -> int:
        """Prepare and run it, check its numbers, and return the number of its kernels that transform."""
        w = Tensor(self.taps)
        y = convolved(Tensor(self.image), w, PADDING, 6).relu()
        plan = y.prepare(config, constants=[w])
        plan.execute()
        assert is_close(y.numpy(), self.want)
        return transforms(plan)

    @property
    def want(self) -> np.ndarray[Any, Any]:
        return np.asarray(np.maximum(direct(self.image, self.taps, PADDING, 6), 0))

    @property
    def found(self) -> CapturedForm:
        (found,) = self.capture.forms
        return found

    def times(self, ratio: float, **changes: Any) -> FormTimes:
        """A record of the times of its forms on this machine."""
        resolved, form = resolve(PrepareConfig(db=":none:")), self.found.form
        fields = {"lengths": form.lengths, "codegen": resolved.compiler.pair.revision, "described": form.described, **changes}
        return form_times(ratio, form.key, **{"target": resolved.target.key, **fields})

    def both(self) -> BothForms:
        assert self.found.other is not None
        return BothForms.of(self.found.form, self.capture.plans[0].unbound, self.found.other.unbound)


@cache
def predicted(transformed: bool) -> Case:
    """A convolution whose forms are close, of which this one is predicted to be the faster one."""
    for image, count in product(IMAGES, range(7, TAPS.shape[-1], 2)):
        case = Case(image, count)
        if case.capture.forms and case.found.form.is_open and case.found.form.is_transformed == transformed:
            return case
    raise AssertionError("the forms of no convolution are predicted to be close")


def stored(path: Path, records: list[FormTimes], layer: int = OWN) -> PrepareConfig:
    with TuningDB.open(path) as db:
        db.record(records, layer=layer)
    return PrepareConfig(db=str(path))


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize(("ratio", "is_faster"), [(0.8, True), (1.3, False), (0.995, False), (1.005, False)])
def test_times_go_before_the_prediction_and_ties_to_the_direct_form(transformed: bool, ratio: float, is_faster: bool,
                                                                    tmp_path: Path) -> None:
    case = predicted(transformed)
    assert bool(case.run(PrepareConfig(db=":none:"))) == transformed
    assert bool(case.run(stored(tmp_path / "t.db", [case.times(ratio)]))) == is_faster


def test_the_block_lengths_of_the_record_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from svod.core.convolution.by_fourier import by_fourier
    used = []

    def spy(*given: Any) -> Any:
        used.append(given[-1])
        return by_fourier(*given)
    monkeypatch.setattr("svod.tune.plans.convolutions.by_fourier", spy)
    case = predicted(True)
    results = [side + 2 * PADDING - case.taps.shape[-1] + 1 for side in case.image.shape[2:]]
    sizes = ConvolutionSizes(1, 6, 1, 1, case.taps.shape[2:], tuple(results))
    other = next(n for n in block_lengths(sizes) if n != case.found.form.lengths)
    case.run(stored(tmp_path / "t.db", [case.times(0.5, lengths=other)]))
    assert used == [other]


@pytest.mark.parametrize("changes", [{"lengths": (37, 40)}, {"lengths": (40,)}, {"lengths": (4, 4)}, {"lengths": (4096, 4096)},
                                     {"codegen": 0}, {"codegen": 10**6}, {"target": "x86_64/other"}, {"kernel": "0" * 32}], ids=str)
def test_a_record_that_does_not_fit_is_ignored(changes: dict[str, Any], tmp_path: Path) -> None:
    case = predicted(True)
    assert case.run(stored(tmp_path / "t.db", [replace(case.times(2.0), **changes)]))


@pytest.mark.parametrize("changes", [{"lengths": ()}, {"lengths": (-1,)}, {"direct": 0.0}, {"ratio": float("nan")}, {"ratio_low": 3.0},
                                     {"ratio_high": 1.0}, {"kernel": ""}], ids=str)
def test_a_record_without_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        replace(form_times(2.0), **changes)


def test_of_several_records_the_newest_quiet_one_decides(tmp_path: Path) -> None:
    case = predicted(True)
    old, new, tie = case.times(0.5, taken_at=1.0), case.times(1.5, taken_at=2.0), case.times(1.0, taken_at=3.0)
    assert not case.run(stored(tmp_path / "a.db", [old, new]))
    assert case.run(stored(tmp_path / "b.db", [replace(old, taken_at=2.5), new]))
    assert case.run(stored(tmp_path / "c.db", [old, replace(new, noisy=True)])), "times of a busy machine count after others"
    assert not case.run(stored(tmp_path / "d.db", [old, tie])), "the direct form"
    assert case.run(stored(tmp_path / "e.db", [replace(old, noisy=True), replace(tie, noisy=True)])), "a busy machine's tie says nothing"


def test_an_own_quiet_tie_goes_before_others_times_of_busy_machines(tmp_path: Path) -> None:
    case = predicted(True)
    others = case.times(0.5, noisy=True, taken_at=9.0)
    assert case.run(stored(tmp_path / "t.db", [others], TEAM))
    assert not case.run(stored(tmp_path / "t.db", [case.times(1.0)]))


def test_this_machines_records_go_before_others(tmp_path: Path) -> None:
    case = predicted(True)
    config = stored(tmp_path / "t.db", [case.times(1.5, taken_at=9.0)], TEAM)
    assert not case.run(config)
    assert case.run(replace(config, imported="ignore")), "the prediction"
    assert case.run(stored(tmp_path / "t.db", [case.times(0.5, taken_at=1.0)]))


def test_transforms_of_others_that_cannot_be_faster_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, far = predicted(False), Predicted((40, 40), 1.0, 3.5, False)
    config = stored(tmp_path / "team.db", [case.times(0.5)], TEAM)
    assert case.run(config)
    monkeypatch.setattr("svod.tune.plans.convolutions.predicted_forms", lambda *_, **__: far)
    assert not case.run(config)
    assert case.run(stored(tmp_path / "own.db", [case.times(0.5)])), "what was measured here is"


def test_a_lock_line_that_is_not_believed_leaves_the_choice_to_own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, far = predicted(False), Predicted((40, 40), 1.0, 3.5, False)
    monkeypatch.setattr("svod.tune.plans.convolutions.predicted_forms", lambda *_, **__: far)
    write_lock(tmp_path / "l.jsonl", [], None, times=[LockedTimes(case.times(0.4))])
    assert not case.run(PrepareConfig(db=":none:", lock=str(tmp_path / "l.jsonl")))
    assert case.run(replace(stored(tmp_path / "own.db", [case.times(0.5)]), lock=str(tmp_path / "l.jsonl")))


@pytest.mark.parametrize(("changes", "reason"), [
    ({}, "transforms, which it found faster, are predicted to be far slower"), ({"ratio": 1.5}, None), ({"target": "x86_64/other"}, None),
    ({"codegen": 0}, "it was measured with code generator 0"), ({"lengths": (4, 4)}, "its block lengths are none")], ids=str)
@pytest.mark.parametrize("is_plausible", [True, False])
def test_lines_of_a_lock_file_that_do_not_count_are_said_once(changes: dict[str, Any], reason: str | None, is_plausible: bool,
                                                              tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    """`is_plausible`: whether rough cycles let transforms be considered at all."""
    case, far = predicted(False), Predicted((40, 40), 1.0, 3.5, False)
    if is_plausible:
        monkeypatch.setattr("svod.tune.plans.convolutions.predicted_forms", lambda *_, **__: far)
    else:
        for module in ("convolutions", "predicted_forms"):
            monkeypatch.setattr(f"svod.tune.plans.{module}.rough_forms", lambda *given: rough_forms(*given)._replace(most_direct=1e-9))
        monkeypatch.setattr("svod.tune.plans.predicted_forms._predicted", {})
    write_lock(tmp_path / "l.jsonl", [], None, times=[LockedTimes(case.times(**{"ratio": 0.4, **changes}))])
    for _ in range(2):
        assert not case.run(PrepareConfig(db=":none:", lock=str(tmp_path / "l.jsonl")))
    said = "\n".join(r.getMessage() for r in caplog.records if "the times of a convolution's forms" in r.getMessage())
    assert said.count("is not used: ") == (reason is not None)
    assert reason is None or (f"{tmp_path / 'l.jsonl'}: a line with" in said and f"is not used: {reason}" in said)


@pytest.mark.parametrize(("changes", "layer", "config", "is_transformed"), [
    ({}, OWN, {}, True), ({}, TEAM, {}, True), ({"is_open": False}, OWN, {}, True), ({"is_open": False}, TEAM, {}, False),
    ({"is_open": False}, OWN, {"transformed_mb": 0}, False), ({}, OWN, {"numerics": "same"}, False)], ids=str)
def test_the_form_of_a_captured_convolution_is_said_as_prepare_decides_it(changes: dict[str, Any], layer: int, config: dict[str, Any],
                                                                          is_transformed: bool, tmp_path: Path) -> None:
    case = predicted(False)
    same = resolve(PrepareConfig(numerics="same")).target.key
    given = replace(stored(tmp_path / "t.db", [case.times(0.5), case.times(0.5, target=same)], layer), **config)
    assert decided_form(case.found.form._replace(**changes), resolve(given)).form.is_transformed == is_transformed


def test_a_capture_under_the_policy_same_says_why_a_convolution_is_direct(tmp_path: Path) -> None:
    case = predicted(True)
    config = stored(tmp_path / "t.db", [case.times(0.5, target=resolve(PrepareConfig(numerics="same")).target.key)])
    config = replace(config, numerics="same")
    assert not case.run(replace(config, capture=str(tmp_path / "c")))
    (found,) = read_capture(tmp_path / "c").forms
    assert found.form.key == case.found.form.key and found.other is None
    assert decided_words(found.form, decided_form(found.form, resolve(config))) == \
        f"{case.found.form.described}: directly, numerics=same, and transforms round otherwise"


def test_policies_and_limits_go_before_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = predicted(True)
    config = stored(tmp_path / "t.db", [case.times(0.5), case.times(0.5, target=resolve(PrepareConfig(numerics="same")).target.key)])
    assert case.run(config)
    assert not case.run(replace(config, numerics="same"))
    with caplog.at_level(logging.WARNING, logger="svod"):
        assert not case.run(replace(config, transformed_mb=0))
    assert "1 convolution of a plan computes directly" in caplog.text


@pytest.mark.parametrize("options", [{}, {"winners_only": True}, {"winners_only": True, "anonymous": True}, None], ids=str)
def test_records_travel(options: dict[str, bool] | None, tmp_path: Path) -> None:
    """`options`: those of an export; None: the databases are merged."""
    case = predicted(True)
    stored(tmp_path / "made.db", [case.times(1.5)])
    with TuningDB.open(tmp_path / "made.db") as db, TuningDB.open(tmp_path / "empty.db") as empty:
        if options is None:
            merge(empty, tmp_path / "made.db")
        else:
            assert export(db, tmp_path / "none.jsonl", ["0" * 32], **options) == 0
            export(db, tmp_path / "out.jsonl", [case.found.form.key], **options)
            import_file(empty, tmp_path / "out.jsonl")
        assert empty.select(FormTimes) == [(case.times(1.5), TEAM)]
    assert not case.run(PrepareConfig(db=str(tmp_path / "empty.db")))


def test_a_record_is_retracted_and_restored(tmp_path: Path) -> None:
    case = predicted(True)
    config = stored(tmp_path / "t.db", [case.times(1.5)])
    assert not case.run(config)
    with TuningDB.open(tmp_path / "t.db") as db:
        assert db.retract(case.found.form.key, None, None, "the machine was busy") == 1
    assert case.run(config)
    with TuningDB.open(tmp_path / "t.db") as db:
        assert db.restore(case.found.form.key, None, None, "it was not") == 1
    assert not case.run(config)


def test_a_lock_file_goes_before_the_database(tmp_path: Path) -> None:
    case, path = predicted(True), tmp_path / "m.lock.jsonl"
    config = stored(tmp_path / "t.db", [case.times(0.5)])
    write_lock(path, [], None, times=[LockedTimes(case.times(1.5))])
    check_whole(path)
    assert not case.run(replace(config, lock=str(path)))
    write_lock(path, [], None, times=[LockedTimes(case.times(1.5, codegen=0))])
    assert case.run(replace(config, lock=str(path))), "a line that does not count leaves the choice to the database"


def test_lines_of_a_lock_file_are_kept_until_they_are_made_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "m.lock.jsonl", LockedTimes(form_times(0.4, "d" * 32))
    write_lock(path, [], None, times=[LockedTimes(form_times(0.5)), other])
    assert json.loads(path.read_text().splitlines()[0])["version"] == 2
    write_lock(path, [], {}, times=[LockedTimes(form_times(0.6))])
    assert [x.record.ratio for x in read_lock(path).times] == [0.6, 0.4]
    target = other.record.target
    told: list[tuple[dict[str, set[tuple[str, int]]], int]] = [
        ({}, 2), ({"elsewhere": set()}, 2), ({target: {("d" * 32, 1)}}, 2), ({target: {("d" * 32, 2)}}, 1), ({target: set()}, 1)]
    for convolutions, kept in told:
        write_lock(path, [], None, times=[LockedTimes(form_times(0.6)), other])
        write_lock(path, [], {}, times=[LockedTimes(form_times(0.6))], timed=convolutions)
        assert len(read_lock(path).times) == kept
    write_lock(path, [], None, times=[LockedTimes(form_times(0.6)), other])
    with path.open("a") as f:
        f.write(json.dumps({**other.to_json(), "lengths": "many"}) + "\n")
    assert len(read_lock(path).times) == 2


def run_of(unbound: UnboundPlan, image: np.ndarray[Any, Any], taps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The output of a plan that transforms its weights itself, or has none that are transformed."""
    resolved = resolve(PrepareConfig(db=":none:"))
    arrays: list[Any] = [None if b.kind == "intermediate" else np.zeros(b.size, np.float32) for b in unbound.buffers]
    for given in (image, taps):
        (at,) = [i for i, b in enumerate(unbound.buffers) if b.kind != "intermediate" and b.size == given.size and b.kind != "output"]
        arrays[at] = given.reshape(-1).copy()
    for i, b in enumerate(unbound.buffers):
        if b.kind == "output":
            made = arrays[i]
    build_plan(unbound, compile_all(unbound.kernels, choose_each(unbound.kernels, resolved), resolved.compiler), arrays).execute()
    return np.asarray(made)


def test_the_direct_form_of_a_captured_plan_computes_the_same() -> None:
    case = predicted(True)
    both = case.both()
    transforming = [any(k.library_kernel is not None for k in unbound.kernels.values()) for unbound in (both.direct, both.transformed)]
    assert transforming == [False, True]
    assert is_close(run_of(both.direct, case.image, case.taps).reshape(case.want.shape), case.want)


@pytest.mark.parametrize("transformed", [False, True])
def test_both_forms_are_timed_as_whole_plans(transformed: bool) -> None:
    case, resolved = predicted(transformed), resolve(PrepareConfig(db=":none:"))
    made = time_forms(case.both(), resolved, 0.05)
    assert made is not None and (made.kernel, made.described) == (case.found.form.key, case.found.form.described)
    assert made.lengths == case.found.form.lengths and made.target == resolved.target.key
    assert made.codegen == resolved.compiler.pair.revision and 0 < made.ratio_low <= made.ratio <= made.ratio_high
    assert time_forms(case.both(), resolved, 1e-9) is None, "there is no time for an interval"


def test_a_capture_keeps_forms(tmp_path: Path) -> None:
    case = predicted(True)
    write_capture(tmp_path / "c.jsonl", case.capture)
    again = read_capture(tmp_path / "c.jsonl")
    assert not again.problems and [f.form for f in again.forms] == [case.found.form]
    assert again.forms[0].other is not None and case.found.other is not None
    assert again.forms[0].other.digest == case.found.other.digest
    assert again.in_other_forms[0].runs == again.plans[0].runs
    text = (tmp_path / "c.jsonl").read_text().replace('"is_open":true', '"is_open":2')
    (tmp_path / "d.jsonl").write_text(text)
    damaged: Capture = read_capture(tmp_path / "d.jsonl")
    assert not damaged.forms and len(damaged.problems) == 1 and len(damaged.plans) == 1


def test_an_altered_description_is_reported(tmp_path: Path) -> None:
    case = predicted(True)
    write_capture(tmp_path / "c.jsonl", case.capture)
    text = (tmp_path / "c.jsonl").read_text().replace("float32 convolution", "float64 convolution")
    (tmp_path / "c.jsonl").write_text(text)
    found = read_capture(tmp_path / "c.jsonl")
    assert not found.forms and "was altered" in found.problems[0]


def test_a_search_at_prepare_times_the_forms_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from svod import BeamConfig
    case, timed = predicted(True), []

    def slower(both: BothForms, *_: Any) -> FormTimes:
        assert at_prepare._lock.locked(), "no other thread measures at the same time"
        timed.append(both.form.key)
        return case.times(1.5)
    monkeypatch.setattr(at_prepare, "time_forms", slower)
    monkeypatch.setattr(at_prepare, "search_at_prepare", lambda *_: at_prepare.Searched({}, False))
    monkeypatch.setattr("svod.tune.plan_chains.searched", lambda *_: {})
    config = PrepareConfig(db=str(tmp_path / "t.db"), beam=BeamConfig(width=2, budget=60.0))
    assert not case.run(config) and not case.run(config)
    assert timed == [case.found.form.key]
    assert not case.run(PrepareConfig(db=str(tmp_path / "t.db")))


def test_only_the_plan_in_the_faster_form_is_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from svod import BeamConfig
    case, settled = predicted(True), []

    def settle(unbound: UnboundPlan, *_: Any) -> dict[str, Any]:
        settled.append(plan_digest(unbound, resolve(PrepareConfig(db=":none:")).target.key))
        return {}
    monkeypatch.setattr(at_prepare, "time_forms", lambda *_: case.times(1.5))
    monkeypatch.setattr(at_prepare, "search_at_prepare", lambda *_: at_prepare.Searched({}, True))
    monkeypatch.setattr(at_prepare, "settle_at_prepare", settle)
    monkeypatch.setattr("svod.tune.plan_chains.searched", lambda *_: {})
    assert not case.run(PrepareConfig(db=str(tmp_path / "t.db"), beam=BeamConfig(width=2, budget=60.0)))
    assert case.found.other is not None and settled == [case.found.other.digest]


def test_no_plan_is_built_for_forms_once_the_budget_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from svod import BeamConfig
    case, built = predicted(True), []

    def plan_in(other: str) -> UnboundPlan:
        built.append(other)
        return case.capture.plans[0].unbound
    resolved, beam = resolve(PrepareConfig(db=":none:")), BeamConfig(width=2, budget=60.0)
    monkeypatch.setattr(at_prepare, "_searching", at_prepare._Clock(spent=beam.budget))
    assert not at_prepare.forms_at_prepare([case.found.form], plan_in, resolved, beam)
    assert built == []
    monkeypatch.setattr(at_prepare, "_searching", at_prepare._Clock())
    monkeypatch.setattr(at_prepare, "MOST_TIMED", 0)
    assert not at_prepare.forms_at_prepare([case.found.form] * 2, plan_in, resolved, beam)
    assert built == [""]


def test_a_capture_gives_the_plans_with_the_forms_that_won() -> None:
    case = predicted(True)
    assert case.found.other is not None
    turned = case.capture.with_other_forms({case.found.form.key})
    assert [(p.digest, p.runs) for p in turned.plans] == [(case.found.other.digest, case.capture.plans[0].runs)]
    assert case.capture.with_other_forms({"0" * 32}).plans == case.capture.plans
