"""Why a kernel has its chain, or none."""
from __future__ import annotations

import pytest

from svod.tune.db import Kernel, Record, TuningDB
from svod.tune.db.why import first_difference
from tests.tune.db.samples import OTHER, TARGET, confirmed, screened, verdict, winning

K = "k" * 32


def why(*records: Record, kernel: str = K, target: str = TARGET, linear: str = "", structure: str = "") -> tuple[str, str]:
    with TuningDB.open(":none:") as db:
        db.record(records)
        found = db.why(kernel, target, linear, structure)
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
    ([screened("aa", status="crash", reason="SIGSEGV")], "status crash: SIGSEGV"),
    ([confirmed(), verdict(), confirmed(status="wrong")], "wrong numbers"),
])
def test_measured_but_not_usable(records: list[Record], reason: str) -> None:
    field, text = why(*records)
    assert field == "verdict" and reason in text


def test_another_target_names_the_first_field_that_differs() -> None:
    field, text = why(*winning(), target=OTHER)
    assert field == "threads" and "its threads are 2, here 8" in text
    near, far = TARGET, OTHER.replace("znver5", "znver4").replace("t8", "t2")
    field, text = why(*winning(target=near), *winning(target=far), target=near.replace("l2 1m", "l2 2m"))
    assert field == "l2 cache" and near in text, "the record of the same CPU is nearer"


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
    assert why(Kernel(K, structure="s1"), kernel=K, structure="s1")[0] == "kernel", "described, never measured"
