"""The rules that choose a winner from measurements and verdicts: each rule, and properties that hold for any records."""
from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.tune.db import OWN, SHIPPED, TEAM, Measurement, Record, Verdict, Winner, derive_winner, rank_winners
from tests.tune.db.samples import confirmed, verdict


def derive(records: Iterable[Record], layers: dict[str, int] | None = None) -> Winner | None:
    records = list(records)
    measurements = [r for r in records if isinstance(r, Measurement)]
    ranks = {m.id: OWN for m in measurements} | (layers or {})
    return derive_winner(measurements, [r for r in records if isinstance(r, Verdict)], ranks)


def test_the_surest_speedup_wins() -> None:
    a, b = confirmed(0.6, "aa"), confirmed(0.5, "bb")
    won = derive([a, b, verdict(linear="aa"), verdict(linear="bb")])
    assert won is not None and won.linear == "bb" and won.speedup == 2.0 and won.measurement == b.id
    lucky = confirmed(0.45, "cc", ratio_low=0.2, ratio_high=0.9)
    won = derive([a, b, lucky, *(verdict(linear=x) for x in ("aa", "bb", "cc"))])
    assert won is not None and won.linear == "bb", "the upper end of the interval counts"


def test_nothing_wins_unverified_or_unconfirmed() -> None:
    assert derive([]) is None
    assert derive([confirmed()]) is None
    assert derive([confirmed(), verdict(codegen=2)]) is None, "verified under another code generator"
    assert derive([confirmed(), verdict(linear="bb")]) is None
    assert derive([confirmed(step="race"), verdict()]) is None
    assert derive([confirmed(status="slow"), verdict()]) is None
    assert derive([confirmed(), verdict()]) is not None


def test_slower_than_the_heuristic_is_not_used_but_the_heuristic_itself_is() -> None:
    assert derive([confirmed(1.2), verdict()]) is None
    heuristic = confirmed(1.0, "hh", ratio_low=1.0, ratio_high=1.0, chain=())
    won = derive([confirmed(1.2), verdict(), heuristic, verdict(linear="hh")])
    assert won is not None and won.linear == "hh" and won.chain == ()


def test_a_chain_that_is_slower_inside_a_plan_is_not_used_however_fast_it_is_alone() -> None:
    alone = [confirmed(r, samples=(r,)) for r in (0.5, 0.51, 0.52)]
    slower = confirmed(1.2, inside="p1")
    assert derive([*alone, slower, verdict()]) is None
    won = derive([*alone, slower, verdict(), confirmed(0.9, "bb"), verdict(linear="bb")])
    assert won is not None and won.linear == "bb", "the next one may be used"
    assert derive([*alone, slower, confirmed(0.9, inside="p1"), verdict()]) is None, "the upper median of those inside"
    both = [slower, confirmed(0.9, inside="p1"), confirmed(0.8, inside="p2")]
    won = derive([*alone, *both, verdict()])
    assert won is not None and won.ratio == 0.51, "what is not slower inside is used for what it gains alone"
    assert derive([confirmed(0.5, inside="p1"), verdict()]) is None, "being fast inside alone is no evidence"


@pytest.mark.parametrize("what", ["wrong", "retracted"])
def test_a_bad_verdict_beats_any_time_up_to_its_revision(what: str) -> None:
    fast, slow = confirmed(0.1, "ff"), confirmed(0.9, "ss")
    good = [fast, slow, verdict(linear="ff"), verdict(linear="ss")]
    won = derive([*good, verdict(what, "ff")])
    assert won is not None and won.linear == "ss"
    assert derive([*good, verdict(what, "ff"), verdict("wrong", "ss")]) is None
    again = confirmed(0.1, "ff", codegen=2)
    won = derive([*good, verdict(what, "ff"), again, verdict(linear="ff", codegen=2)])
    assert won is not None and won.linear == "ff" and won.codegen == 2, "a later code generator, verified anew"
    won = derive([*good, verdict(what, "ff", codegen=2), again, verdict(linear="ff", codegen=2)])
    assert won is not None and won.linear == "ss"


def test_a_measurement_that_ended_wrong_bars_its_linear() -> None:
    won = derive([confirmed(0.1, "ff"), verdict(linear="ff"), confirmed(0.1, "ff", status="wrong", step="race")])
    assert won is None


def test_code_generator_then_ratio_wherever_it_comes_from() -> None:
    own, team, shipped = confirmed(0.9, "oo"), confirmed(0.5, "tt"), confirmed(0.7, "ss")
    records = [own, team, shipped, verdict(linear="oo"), verdict(linear="tt"), verdict(linear="ss")]
    ranks = {own.id: OWN, team.id: TEAM, shipped.id: SHIPPED}
    order = rank_winners([own, team, shipped], [r for r in records if isinstance(r, Verdict)], ranks)
    assert [(w.linear, w.layer) for w in order] == [("tt", TEAM), ("ss", SHIPPED), ("oo", OWN)]
    newer = confirmed(0.95, "nn", codegen=2)
    won = derive([own, newer, verdict(linear="oo"), verdict(linear="nn", codegen=2)])
    assert won is not None and won.linear == "nn"


def test_level_chains_go_to_the_shortest_then_to_the_text() -> None:
    long = confirmed(0.500, "aa", chain=[["UPCAST", "o0", 8], ["THREAD", "o0", 2]])
    short = confirmed(0.501, "bb", chain=[["UPCAST", "o0", 8]])
    won = derive([long, short, verdict(linear="aa"), verdict(linear="bb")])
    assert won is not None and won.linear == "bb"
    other = confirmed(0.501, "cc", chain=[["LANES", "o0", 8]])
    won = derive([long, short, other, *(verdict(linear=x) for x in ("aa", "bb", "cc"))])
    assert won is not None and won.linear == "cc"
    behind = confirmed(0.502, "bb", chain=[])
    won = derive([long, behind, verdict(linear="aa"), verdict(linear="bb")])
    assert won is not None and won.linear == "aa"


def heuristics(linear: str = "hh", **changes: object) -> Measurement:
    """A confirmed measurement of the heuristic's own chain, which is long."""
    fields = {"ratio_low": 1.0, "ratio_high": 1.0, "baseline_linear": linear, "chain": [["UPCAST", f"o{i}", 2] for i in range(9)]}
    return confirmed(1.0, linear, **{**fields, **changes})


@pytest.mark.parametrize("high, kept", [(1.0, True), (0.998, True), (0.996, False)])
def test_the_heuristics_chain_is_kept_unless_a_gain_is_sure(high: float, kept: bool) -> None:
    rival = confirmed(0.95, "rr", ratio_low=0.9, ratio_high=high, baseline_linear="hh", chain=[])
    records = [heuristics(), rival, verdict(linear="hh"), verdict(linear="rr")]
    won = derive(records)
    assert won is not None and won.own is kept and won.linear == ("hh" if kept else "rr")
    assert derive([*records, confirmed(0.996, "tt", chain=[], baseline_linear="oo"), verdict(linear="tt")]) == won, "of another heuristic"
    won = derive([*records, verdict("wrong", "hh")])
    assert won is not None and won.linear == "rr", "a heuristic that is wrong is not kept"


def test_the_heuristic_of_another_day_is_what_it_was_beside_todays() -> None:
    """`old` was the heuristic's chain once, with the ratio 1 to itself; compared with today's heuristic it was slower."""
    old, new = heuristics("old", chain=[]), heuristics("new")
    verdicts = [verdict(linear="old"), verdict(linear="new")]
    won = derive([old, new, *verdicts])
    assert won is not None and won.linear == "old", "nothing tells them apart, so the shorter"
    again = confirmed(1.2, "old", baseline_linear="new", chain=[])
    won = derive([old, new, again, *verdicts])
    assert won is not None and won.linear == "new"
    assert [w.linear for w in rank_winners([old, new, again], verdicts, {})] == ["new"]


FORGED = [
    {"ratio": None, "ratio_low": None, "ratio_high": None},                         # only an absolute time
    {"ratio": 0.6, "ratio_low": 0.59, "ratio_high": 0.61},                          # a ratio that does not fit its times
    {"ratio": 1e-5, "ratio_low": 1e-5, "ratio_high": 1e-5},                         # fits, and is not plausible
    {"ratio": 1e-5, "ratio_low": 1e-5, "ratio_high": 1e-6},                         # outside of its own interval
    {"ratio": 0.01, "ratio_low": 0.01, "ratio_high": 0.01, "baseline": None},
]


@pytest.mark.parametrize("lie", FORGED)
def test_a_forged_nanosecond_does_not_win(lie: dict[str, float | None]) -> None:
    honest = confirmed(0.8, "hh")
    forged = replace(confirmed(0.5, "ff"), time=1e-9, samples=(1e-9,) * 15, **lie)  # type: ignore[arg-type]
    won = derive([honest, forged, verdict(linear="hh"), verdict(linear="ff")])
    assert won is not None and won.linear == "hh"


def test_one_lie_among_honest_measurements_of_a_chain_decides_nothing() -> None:
    rival = confirmed(0.7, "rr")
    honest = [confirmed(0.9, "ll", taken_at=float(i)) for i in range(2)]
    lie = confirmed(0.002, "ll")
    won = derive([rival, *honest, lie, verdict(linear="rr"), verdict(linear="ll")])
    assert won is not None and won.linear == "rr"
    won = derive([rival, honest[0], lie, verdict(linear="rr"), verdict(linear="ll")])
    assert won is not None and won.linear == "rr", "of two the worse"
    slow = [confirmed(1.1, "ll", taken_at=float(i)) for i in range(2)]
    assert derive([*slow, lie, verdict(linear="ll")]) is None, "those that say slower count as well"


def test_copies_of_a_measurement_count_once() -> None:
    """A copy without names, as `export --anonymous` writes it, adds no weight."""
    slow, lie = confirmed(0.9, "ll", taken_at=5.0), confirmed(0.002, "ll", taken_at=6.0)
    copies = [replace(lie, host={"n": n}) for n in range(5)]
    rival = confirmed(0.7, "rr")
    won = derive([rival, slow, lie, *copies, verdict(linear="rr"), verdict(linear="ll")])
    assert won is not None and won.linear == "rr"


def test_a_bar_is_lifted_by_name() -> None:
    bars = [verdict("retracted", "aa", taken_at=1.0), verdict("retracted", "aa", taken_at=2.0), verdict("wrong", "aa", taken_at=3.0)]
    good = [confirmed(0.5, "aa"), verdict(linear="aa")]
    assert derive([*good, *bars]) is None
    assert derive([*good, *bars, verdict("restored", "aa", lifts=(bars[0].id, bars[1].id))]) is None
    assert derive([*good, *bars, verdict("restored", "aa", lifts=tuple(b.id for b in bars))]) is not None
    wrong = confirmed(0.1, "aa", status="wrong", step="race")
    assert derive([*good, wrong, verdict("restored", "aa", lifts=(wrong.id,))]) is not None


@st.composite
def a_measurement(draw: st.DrawFn) -> Measurement:
    linear, baseline = draw(st.sampled_from(["aa", "bb", "cc", ""])), draw(st.sampled_from(["aa", "aa", "dd"]))
    ratio = draw(st.sampled_from([0.0001, 0.4, 0.5, 0.501, 0.9, 0.996, 0.998, 1.0, 1.1])) if linear != baseline else 1.0
    spread = draw(st.sampled_from([1.0, 1.01, 1.5])) if linear != baseline else 1.0
    return confirmed(ratio, linear, codegen=draw(st.integers(1, 2)), status=draw(st.sampled_from(["ok", "ok", "ok", "wrong", "crash"])),
                     step=draw(st.sampled_from(["confirm", "confirm", "race"])), taken_at=float(draw(st.integers(0, 3))),
                     chain=[["UPCAST", "o0", n] for n in draw(st.lists(st.integers(1, 3), max_size=2))],
                     ratio_low=ratio / spread, ratio_high=ratio * spread, baseline_linear=baseline)


MEASUREMENTS = a_measurement()
VERDICTS = st.builds(lambda what, linear, codegen: verdict(what, linear, codegen=codegen),
                     st.sampled_from(["verified", "verified", "verified", "wrong", "retracted"]), st.sampled_from(["aa", "bb", "cc"]),
                     st.integers(1, 2))
EVIDENCE = st.tuples(st.lists(MEASUREMENTS, max_size=8), st.lists(VERDICTS, max_size=8),
                     st.lists(st.integers(0, 2), min_size=8, max_size=8))


@given(EVIDENCE, st.integers(0, 1000))
def test_order_and_repetition_do_not_matter(evidence: tuple[list[Measurement], list[Verdict], list[int]], seed: int) -> None:
    measurements, verdicts, layers = evidence
    ranks = {m.id: r for m, r in zip(measurements, layers, strict=False)}
    first = rank_winners(measurements, verdicts, ranks)
    rng = random.Random(seed)
    shuffled = rng.sample(measurements, len(measurements)) + measurements[:3]
    assert rank_winners(shuffled, rng.sample(verdicts, len(verdicts)) + verdicts[:3], ranks) == first
    assert derive_winner(iter(measurements), iter(verdicts), ranks) == (first[0] if first else None)


@given(EVIDENCE)
def test_a_winner_is_confirmed_verified_not_barred_and_a_gain(evidence: tuple[list[Measurement], list[Verdict], list[int]]) -> None:
    measurements, verdicts, layers = evidence
    order = rank_winners(measurements, verdicts, {m.id: r for m, r in zip(measurements, layers, strict=False)})
    for w in order:
        assert any(v.verdict == "verified" and (v.linear, v.codegen) == (w.linear, w.codegen) for v in verdicts)
        assert not any(v.verdict != "verified" and v.linear == w.linear and v.codegen >= w.codegen for v in verdicts)
        assert not any(m.status == "wrong" and m.linear == w.linear and m.codegen >= w.codegen for m in measurements)
        assert w.ratio >= 1e-3 and w.ratio_low <= 1.0
    for kept in (w for w in order if w.own and w.ratio_high == 1.0):
        before = [w for w in order[:order.index(kept)] if w.codegen == kept.codegen]
        assert all(w.own or w.ratio_high * 1.003 < 1.0 for w in before), "it is carried although it gains nothing for sure"


@given(EVIDENCE)
def test_more_bad_verdicts_never_bring_a_chain_back(evidence: tuple[list[Measurement], list[Verdict], list[int]]) -> None:
    measurements, verdicts, layers = evidence
    ranks = {m.id: r for m, r in zip(measurements, layers, strict=False)}
    before = {(w.linear, w.codegen) for w in rank_winners(measurements, [v for v in verdicts if v.verdict == "verified"], ranks)}
    after = {(w.linear, w.codegen) for w in rank_winners(measurements, verdicts, ranks)}
    assert after <= before
