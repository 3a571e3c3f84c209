"""Why a kernel has its chain, or none."""
from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from svod.tune.db import KernelRecord, Measurement, Record, Search, TuningDB, explain
from svod.tune.db.why import differing_policies, first_difference, measured_algorithms
from svod.tune.fast.report import rounding_words
from tests.tune.db.samples import OTHER, TARGET, choice, confirmed, screened, verdict, winning

K = "k" * 32


def why(*records: Record, kernel: str = K, target: str = TARGET, linear: str = "", structure: str = "") -> tuple[str, str]:
    with TuningDB.open(":none:") as db:
        db.record(records)
        found = explain(db, kernel, target, linear, structure)
        return found.field, found.text


def test_a_winner_and_a_winner_whose_code_changed() -> None:
    assert why(*winning(), linear="aa") == ("", "the database has a winner: 2.00x the heuristic, own layer, code generator 1")
    field, text = why(*winning(), linear="zz")
    assert field == "LINEAR" and "only a seed" in text


@pytest.mark.parametrize(("records", "reason"), [
    ([confirmed(), verdict("wrong", reason="row 3")], "found wrong: row 3"),
    ([confirmed(), verdict(), verdict("retracted", by="a@b")], "found retracted by a@b"),
    ([confirmed()], "nobody verified"),
    ([screened("aa"), verdict()], "only timed in the screen"),
    ([confirmed(1.5), verdict()], "slower than the heuristic"),
    ([screened("aa", status="crash", reason="SIGSEGV")], "every candidate failed: 1 crash (SIGSEGV)"),
    ([confirmed(), verdict(), confirmed(status="wrong")], "wrong numbers"),
])
def test_measured_but_not_usable(records: list[Record], reason: str) -> None:
    field, text = why(*records)
    assert field == "verdict" and reason in text


def searched(outcome: str = "", ended: bool = True, **result: Any) -> list[Record]:
    """The two records of a search, from its start and from its end."""
    begun = Search("s" * 32, K, TARGET, strategy="beam", executor="2 local workers", by="a@b", started_at=1e9)
    return [begun, replace(begun, ended_at=1e9 + 12, outcome=outcome, result=result)] if ended else [begun]


FAILED = [screened("aa", status="crash", reason="SIGSEGV"), screened("bb", status="crash", reason="SIGSEGV"),
          screened("cc", status="error", reason="it does not lower")]


@pytest.mark.parametrize(("records", "reasons"), [
    (searched("interrupted", timed=0, failed=0), ["ended before anything was measured (interrupted)", "0 timed, 0 failed; interrupted"]),
    (searched(ended=False), ["has not ended, or was killed", "without an end"]),
    ([*searched("every candidate failed", failed=3), *FAILED],
     ["3 measurements", "every candidate failed: 2 crash (SIGSEGV), 1 error (it does not lower)", "3 failed"]),
    ([*searched("budget spent", timed=40, best=2e-5, heuristic=2e-5), screened("aa")],
     ["the heuristic stayed best", "only timed in the screen", "candidates: 40 timed; budget spent", "for 12 s", "a@b", "2 local workers"]),
    ([*searched("budget spent", timed=40, best=1e-5, heuristic=2e-5), screened("aa"), *FAILED],
     ["4 measurements", "only timed in the screen"]),
])
def test_searched_without_a_winner(records: list[Record], reasons: list[str]) -> None:
    field, text = why(*records)
    assert field == "verdict" and all(r in text for r in reasons), text
    assert "not known" not in text and re.search(r"searched 2001-09-0[89] \d\d:\d\d", text)
    assert ("every candidate failed:" in text) == (len([r for r in records if isinstance(r, Measurement)]) == 3)


def test_another_target_names_the_first_field_that_differs() -> None:
    field, text = why(*winning(), target=OTHER)
    assert field == "threads" and "its threads are 2, here 8" in text
    near, far = TARGET, OTHER.replace("znver5", "znver4").replace("t8", "t2")
    field, text = why(*winning(target=near), *winning(target=far), target=near.replace("l2 1m", "l2 2m"))
    assert field == "l2 cache" and near in text, "the record of the same CPU is nearer"


@pytest.mark.parametrize(("asked", "stored", "policies"), [
    ("", "numerics=fast", ("float32", "fast")), ("numerics=same", "", ("same", "float32")),
    ("numerics=same", "numerics=fast", ("same", "fast")), ("fma", "numerics=fast", None),
    ("", "avx2,numerics=fast", None), ("2", "8", None)])
def test_targets_that_differ_in_their_policy_alone(asked: str, stored: str, policies: tuple[str, str] | None) -> None:
    assert differing_policies(asked, stored) == policies


@pytest.mark.parametrize(("record", "said"), [
    ({"used": 2}, "its factors are rounded to bfloat16: "), ({"after": 3e-4}, "it stays in float32, as rounding it saves no time: "),
    ({"error": 0.02}, "as alone it costs more than the error that is allowed: "), ({"error": None}, "outputs that are not finite"),
    ({}, "as the kernels that are rounded leave no room for its error: ")])
def test_why_a_kernel_is_rounded_or_not(record: dict[str, Any], said: str) -> None:
    assert said in rounding_words(choice("a" * 32, "b" * 32, **record)[1])


def test_first_difference() -> None:
    assert first_difference(TARGET, OTHER) == ("threads", "2", "8")
    assert first_difference(TARGET, TARGET.replace("avx2,avx512f", "avx2,fma")) == ("features", "avx512f", "fma")
    assert first_difference(TARGET, TARGET.replace("l3 32m", "l3 8m")) == ("l3 cache", "32m", "8m")
    assert first_difference("gpu", "cpu") == ("architecture", "gpu", "cpu")
    assert first_difference("same", "same/more") == ("target", "same", "same/more")


def test_an_unknown_kernel() -> None:
    assert why()[1] == "the database is empty"
    assert "knows 1 others" in why(*winning(), kernel="new")[1]
    field, text = why(*winning(), kernel="new", structure="s1")
    assert field == "extents" and "gemm_512" in text
    assert "none of the 1 known" in why(*winning(), kernel="new", structure="s9")[1]
    assert why(KernelRecord(K, structure="s1"), kernel=K, structure="s1")[0] == "kernel", "described, never measured"


def test_the_fastest_chain_of_each_algorithm_is_named() -> None:
    def measured(ratio: float, *opts: tuple[Any, ...]) -> Any:
        return confirmed(ratio, chain=opts)
    tile = ("UPCAST", "o0", 8)
    found = [measured(0.9, tile), measured(0.7, tile), measured(0.5, ("WINOGRAD", "out", 4), tile), measured(0.6, ("WINOGRAD", "out", 4))]
    assert measured_algorithms(found) == "measured: WINOGRAD(out, 4) 0.50, direct 0.70 of the heuristic's time"
    assert measured_algorithms(found[:2]) == measured_algorithms([]) == "", "they compute alike"
