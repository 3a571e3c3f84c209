"""Records: the JSON form and the row form keep the content and its digest, and malformed data is refused."""
from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.tune.db import KernelRecord, Measurement, OriginRecord, Record, RecordError, Search, TargetFacts, Verdict
from svod.tune.db.records import BY_KIND, canonical, parse_json, record_from_json
from tests.tune.db.samples import CHAIN, TARGET, confirmed, verdict

RECORDS: list[Record] = [
    confirmed(), verdict("wrong", reason="row 3: 1.5 instead of 1.25"), KernelRecord("k1", ast=[1, {"a": None}], flops=1, bytes=2.5),
    OriginRecord("k1", "model.py:3"),
    TargetFacts(TARGET, {"model": "EPYC", "cores": 2}), Search("s1", "k1", TARGET, config={"width": 8}, started_at=1.5, ended_at=2)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.kind)
def test_both_forms_keep_content_and_digest(record: Record) -> None:
    again = record_from_json(json.loads(json.dumps(record.to_json())))
    assert again == record and again.id == record.id
    row = type(record).from_row(record.to_row())
    assert row == record and row.id == record.id


def test_the_digest_is_frozen() -> None:
    """Databases store records under this digest: if it changed, none of their records would be valid."""
    assert confirmed().id == "632d92824ecdcb9f2154be56cfae9121"
    assert verdict().id == "f56a6a1dcb46c92915e577aa5957c471"


@pytest.mark.parametrize("change", [
    {"kernel": "other"}, {"target": "other"}, {"linear": "bb"}, {"codegen": 2}, {"compiler": "LLVM 23"}, {"protocol": 2},
    {"status": "slow"},
    {"reason": "x"}, {"time": 2e-5}, {"samples": (1.0,)}, {"ratio": 0.4999}, {"noisy": True}, {"search": "s"}, {"taken_at": 2.0},
    {"host": {"load": 1}}, {"chain": ()}], ids=lambda c: next(iter(c)))
def test_every_field_is_in_the_digest(change: dict[str, Any]) -> None:
    fields = {**confirmed().content(), **change}
    assert Measurement(**fields).id != confirmed().id


def test_a_field_with_its_default_is_not_in_the_digest() -> None:
    assert "reason" not in confirmed().content() and confirmed(reason="", noisy=False, anchor=None).id == confirmed().id
    assert confirmed(extra={"power": 65.0}).id != confirmed().id
    with pytest.raises(RecordError, match="known one among them"):
        confirmed(extra={"ratio": 0.1})


@pytest.mark.parametrize("value", [10 ** 400, -10 ** 400, "\ud800", {"a": "\udfff"}, [[[]]] * 3, 1e400, float("nan"), object()])
@pytest.mark.parametrize("field", ["time", "host", "reason", "codegen", "samples", "chain", "noisy", "extra"])
def test_no_value_of_any_field_raises_anything_else(field: str, value: Any) -> None:
    try:
        record = Measurement(**{**confirmed().content(), field: value})
        assert len(record.id) == 32
    except RecordError:
        pass


def test_numbers_that_are_equal_are_one_record() -> None:
    assert confirmed(taken_at=5).id == confirmed(taken_at=5.0).id
    assert confirmed(chain=[["UPCAST", "o0", 8]]).id == confirmed(chain=(("UPCAST", "o0", 8),)).id


@pytest.mark.parametrize(("field", "value"), [
    ("time", float("nan")), ("time", float("inf")), ("time", -1.0), ("time", "1"), ("codegen", -1), ("codegen", 1.0), ("codegen", True),
    ("status", "fast"), ("step", None), ("kernel", ""), ("kernel", 3), ("samples", "abc"), ("samples", [None]), ("chain", "UPCAST"),
    ("chain", [["UPCAST", "o0", 1.5]]), ("chain", [[]]), ("chain", [[3]]), ("chain", [["UPCAST", "o0", {"a": 1}]]), ("noisy", 3),
    ("noisy", "no"),
    ("host", []), ("host", {"x": float("nan")}), ("target", None)])
def test_a_field_that_does_not_fit_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RecordError, match=field):
        Measurement(**{**confirmed().content(), field: value})


def test_altered_incomplete_and_unknown_records_are_refused() -> None:
    data = confirmed().to_json()
    with pytest.raises(RecordError, match="altered"):
        record_from_json({**data, "ratio": 0.1})
    with pytest.raises(RecordError, match="lacks chain, linear"):
        record_from_json({k: v for k, v in data.items() if k not in ("chain", "linear")})
    with pytest.raises(RecordError, match="altered"):
        record_from_json({**data, "os": "rm"})
    with pytest.raises(RecordError, match="altered"):
        record_from_json({k: v for k, v in data.items() if k != "ratio"})
    bads: list[Any] = [[], None, {}, {"kind": "pickle"}, {"kind": ["measurement"]}]
    for bad in bads:
        with pytest.raises(RecordError):
            record_from_json(bad)
    with pytest.raises(RecordError, match="verdict: Invalid enum value"):
        Verdict("k", TARGET, "l", "fine", 1)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=10))
def test_arbitrary_data_is_a_record_error_or_a_record(data: Any) -> None:
    for kind in BY_KIND:
        with pytest.raises(RecordError):
            record_from_json({"kind": kind, "x": data})
    try:
        record = confirmed(chain=data)
    except RecordError:
        return
    assert confirmed(chain=json.loads(canonical(record.chain))) == record


def test_json_that_is_none() -> None:
    for text in ("", "{", "NaN", '{"a": Infinity}', "[" * 100_000):
        with pytest.raises(RecordError):
            parse_json(text, "it")


def test_chain_keeps_its_shape() -> None:
    assert confirmed(chain=json.loads(json.dumps(CHAIN))).chain == CHAIN
    assert confirmed().chain_key == '[["UPCAST","o0",8],["ORDER","o0",["o0","r0"]],["NOLOCALS",null,null]]'
