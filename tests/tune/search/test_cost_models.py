"""The learned cost model: its features, its predictions, and its training data."""
from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite, log

import numpy as np
import pytest

from svod.compile.backend import Backend, backend_named
from svod.config import BeamConfig
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.errors import KernelOptError, TuneError
from svod.tune.db import KernelRecord, Measurement, Search, TuningDB
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.search.actions import default_actions
from svod.tune.search.cost_models import LEAST_SAMPLES, LearnedCost, evidence_of, make_cost_model
from svod.tune.search.evidence import MOST_OF_A_KERNEL, evidence_from
from svod.tune.search.features import NAMES, NUM_COST_FEATURES, features
from svod.tune.search.strategies.registry import check_strategy
from svod.tune.workers.executor import InlineExecutor
from tests.compile.cuda.target import card_target
from tests.core.cost.groups.test_group_cost import SOFTWARE
from tests.draws import a_half
from tests.tune.replay import BASE, ReplayedMeasurer, make_search, run
from tests.tune.search_kernels import TARGET, elementwise, gather, gemm, row_reduce, softmax
from tests.tune.sessions import replayed_session

BACKEND = backend_named(TARGET.device)
OTHER = gemm(96, 80, 72)


def states(kernel: Kernel, count: int) -> list[Scheduler]:
    """Distinct valid states at the ends of random walks."""
    base, chance, found = Scheduler(kernel, TARGET), random.Random(0), dict[bytes, Scheduler]()
    for _ in range(100 * count):
        if len(found) >= count:
            break
        state = base
        for _ in range(chance.randint(1, 5)):
            try:
                state = apply_opt(state, chance.choice(list(default_actions(state, 16))))
                BACKEND.cost(state)
            except KernelOptError:
                break
            found[state.digest] = state
    assert len(found) >= count
    return list(found.values())[:count]


def cycles(state: Scheduler) -> float:
    return backend_named(state.target.device).cost(state).cycles


def seconds(state: Scheduler) -> float:
    """A made-up time for which the analytic model is wrong: by a factor if cores share the work or loops are tiled, and by up to a tenth
    that depends on the state's digest."""
    tiles = sum(len(ids) - 1 for ids in state.axis_rows)
    return 1e-9 * cycles(state) * (10.0 if state.thread is not None else 1.0) * 3.0**tiles * (1 + 0.1 * state.digest[0] / 255)


def measured(state: Scheduler) -> Candidate:
    time = seconds(state)
    return Candidate(state, state.applied_opts, Origin.ACTION, predicted=cycles(state), status=Status.SCREENED, samples=(time,),
                     seconds=time)


def order(model: LearnedCost, candidates: Sequence[Candidate]) -> float:
    """The rank correlation of the model's predictions with the true times."""
    predicted, truth = np.argsort(np.argsort(model.predictions(candidates))), np.argsort(np.argsort([c.seconds for c in candidates]))
    return float(np.corrcoef(predicted, truth)[0, 1])


@pytest.mark.parametrize("kernel", [gemm(48, 64, 40), row_reduce(100, 64), elementwise(1000), softmax(64, 96), gather(10, 20, 30)],
                         ids=["gemm", "sum", "pointwise", "softmax", "gather"])
def test_every_state_of_every_kernel_has_the_same_features(kernel: Kernel) -> None:
    rows = [features(s) for s in states(kernel, 30)]
    assert all(len(row) == len(NAMES) and all(map(isfinite, row)) for row in rows)
    assert len(set(rows)) > 20, "states differ in them"


@pytest.mark.parametrize("kernel", a_half([row_reduce(100, 640), gemm(512, 512, 512), elementwise(1000), softmax(64, 96)]),
                         ids=["sum", "gemm", "pointwise", "softmax"])
@pytest.mark.parametrize("target", [card_target("sm_90", 256), replace(SOFTWARE, device="WEBGPU")], ids=["CUDA", "WEBGPU"])
def test_states_on_groups_have_the_costs_of_their_device(target: Target, kernel: Kernel) -> None:
    """Training data is made from states that are rebuilt from records, for which no cost was computed before."""
    base, device = Scheduler(kernel, target), backend_named(target.device)
    heuristic, model = device.heuristic(base), LearnedCost(base, seed=0)
    own = []
    for state in device.sketches(base)[:10]:
        fresh, anchor = (apply_opts(Scheduler(kernel, target), s.applied_opts) for s in (state, heuristic))
        evidence = evidence_of(fresh, anchor, 2.0)
        assert evidence is not None and isfinite(evidence.error) and len(evidence.features) == len(NAMES)
        ratio = device.cost(fresh).cycles / device.cost(anchor).cycles
        assert evidence.error == log(2.0 / ratio) and device.cost(fresh) == device.cost(state)
        own.append(measured(fresh))
    model.learn(own)
    assert all(map(isfinite, model.predictions(own)))


def test_features_say_what_opts_did() -> None:
    def of(*opts: Opt) -> dict[str, float]:
        state = BASE
        for opt in opts:
            state = apply_opt(state, opt)
        return dict(zip(NAMES, features(state), strict=True))
    plain, tiled = of(), of(Opt("UPCAST", "o1", 16), Opt("UNROLL", "r0", 4), Opt("THREAD", "o0", 2))
    assert [plain[x] for x in ("lanes", "results", "summed_together", "tiles", "cores", "chain")] == [0, 0, 0, 0, 0, 0]
    assert [tiled[x] for x in ("lanes", "results", "summed_together", "tiles", "cores", "chain")] == [4, 0, 2, 2, 2, 3]
    assert tiled["iterations"] == pytest.approx(plain["iterations"] - 6) and tiled["summed"] == pytest.approx(plain["summed"] - 2)
    assert tiled["cycles"] < plain["cycles"]


@pytest.mark.slow
def test_a_model_learns_where_the_analytic_one_is_wrong() -> None:
    known, unseen = states(BASE.kernel, 300)[:150], states(BASE.kernel, 300)[150:]
    model = LearnedCost(BASE, seed=0)
    candidates = sorted(map(measured, unseen), key=lambda c: c.seconds)[:50]       # the order of the fast ones is what matters
    before = order(model, candidates)
    model.learn([measured(s) for s in known])
    assert order(model, candidates) > before + 0.2
    again = LearnedCost(BASE, seed=0)
    again.learn([measured(s) for s in known])
    assert list(again.predictions(candidates)) == list(model.predictions(candidates))


def test_with_too_few_measurements_it_ranks_as_the_analytic_one() -> None:
    candidates = [measured(s) for s in states(BASE.kernel, 60)]
    model = LearnedCost(BASE, seed=0)
    model.learn(candidates[:LEAST_SAMPLES - 1])
    assert list(model.predictions(candidates)) == [c.predicted for c in candidates]
    assert model.predictions([]) == []


@pytest.mark.slow
def test_measurements_of_another_kernel_help_before_there_are_any() -> None:
    heuristic = BACKEND.heuristic(Scheduler(OTHER, TARGET))
    evidence = [e for s in states(OTHER, 80) if (e := evidence_of(s, heuristic, seconds(s) / seconds(heuristic)))]
    candidates = [measured(s) for s in states(BASE.kernel, 60)]
    model = LearnedCost(BASE, seed=0, evidence=evidence)
    before = order(model, candidates)
    model.learn([])
    assert order(model, candidates) > before + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["beam", "evolve"])
def test_a_search_with_a_learned_model_has_one_trace_and_is_no_worse(strategy: str) -> None:
    def best(cost_model: str) -> tuple[float, list[tuple[str, tuple[str, ...]]]]:
        measurer = ReplayedMeasurer(seconds=lambda c: seconds(c.state))
        search = run(make_search(measurer, width=4, strategy=strategy, cost_model=cost_model, patience=100), 8)
        return search.lead.best, measurer.trace
    learned = best("learned")
    assert learned == best("learned")
    assert learned[1] != best("analytic")[1] and learned[0] <= 1.02 * best("analytic")[0]


# -- the database -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def db() -> Iterator[TuningDB]:
    with TuningDB.open(":none:") as found:
        yield found


@pytest.mark.slow
def test_a_search_leaves_evidence_that_the_next_one_begins_with(db: TuningDB) -> None:
    assert evidence_from(db, TARGET, BACKEND) == []
    with InlineExecutor() as executor:
        replayed_session(db, executor, OTHER).run()
        session = replayed_session(db, executor, BASE.kernel, cost_model="learned")
        found = session._evidence
        assert 10 < len(found) <= MOST_OF_A_KERNEL
        assert all(len(e.features) == len(NAMES) and e.ratio > 0 for e in found)
        assert any(all(abs(x) < 1e-9 for x in e.features[:NUM_COST_FEATURES]) and e.ratio == pytest.approx(1)
                   for e in found), "the heuristic's chain"
        session.run()
        assert {s.config["cost_model"] for s, _ in db.select(Search, BASE.kernel.key)} == {"learned"}
        assert replayed_session(db, executor, BASE.kernel)._evidence == [], "the analytic model reads none"
        assert replayed_session(db, executor, BASE.kernel, cost_model="learned", ignore_cache=True)._evidence == []


def test_records_that_cannot_be_replayed_teach_nothing(db: TuningDB) -> None:
    with InlineExecutor() as executor:
        replayed_session(db, executor, OTHER).run()
    before = len(evidence_from(db, TARGET, BACKEND))
    one = next(m for m, _ in db.select(Measurement, OTHER.key) if m.status == "ok")
    db.record([replace(one, chain=(("FOLD", "o0", 2),), linear="0" * 32), replace(one, status="crash", linear="1" * 32),
               KernelRecord("k" * 32, name="broken", ast={"format": 0}), replace(one, kernel="k" * 32)])
    assert len(evidence_from(db, TARGET, BACKEND)) == before


# -- the package --------------------------------------------------------------------------------------------------------------
def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    for make in (lambda: make_cost_model(BeamConfig(cost_model="learned"), BASE), lambda: check_strategy("beam", "", "learned")):
        with pytest.raises(TuneError, match=re.escape("pip install 'svod[tune]'")):
            make()
    assert not isinstance(make_cost_model(BeamConfig(), BASE), LearnedCost)


def test_evidence_of_a_state_whose_opts_contradict_each_other_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def contradict(self: Backend, state: Scheduler) -> None:
        raise KernelOptError("they contradict each other")
    monkeypatch.setattr(type(BACKEND), "cost", contradict)
    assert evidence_of(BASE, BASE, 1.0) is None
