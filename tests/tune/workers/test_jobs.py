"""The encoding of plain data, which refuses anything else; jobs by name; the identity of both ends."""
from __future__ import annotations

import importlib
import os
import pickle
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.core.ir.dtype import dtypes
from svod.core.ir.launch import ONCE, ONE, LaunchDims
from svod.core.ir.param import Param
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.target import Target
from svod.errors import FormatError, TuneError
from svod.system.process.program import package_roots
from svod.tune.measure.candidate import Status
from svod.tune.workers.jobs import (
    WORK_MODULE,
    Outcome,
    WorkerConfig,
    decode,
    encode,
    enum_member,
    identity,
    mismatch,
    resolve_job,
)

plain = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
                     lambda s: st.one_of(st.lists(s), st.dictionaries(st.text(), s), s.map(lambda v: (v,))), max_leaves=20)


@given(plain)
def test_plain_data_comes_back(value: Any) -> None:
    assert decode(encode(value)) == value


def test_dataclasses_and_enums_of_svod_come_back() -> None:
    target = Target("x86_64", "znver5", ("avx2",), 32, 16, 1 << 15, 1 << 20, 1 << 24, 2)
    value = [target, Param(0, 3), dtypes.float32, Ops.ADD, Outcome("ok", {"t": (1, 2)}), WorkerConfig()]
    assert decode(encode(value)) == value


def _enums() -> list[type[Enum]]:
    """Every enum of svod in the modules that a worker imports."""
    importlib.import_module(WORK_MODULE)
    return sorted((c for m, module in list(sys.modules.items()) if m.startswith("svod.") for c in vars(module).values()
                   if isinstance(c, type) and issubclass(c, Enum) and c.__module__ == m), key=lambda c: c.__qualname__)


@pytest.mark.parametrize("reduced", [lambda e, protocol: (type(e), (e.value,)), lambda e, protocol: (getattr, (type(e), e.name)),
                                     lambda e, protocol: e.name], ids=["by value", "by attribute", "by global name"])
def test_members_of_enums_come_back_however_this_python_reduces_them(monkeypatch: pytest.MonkeyPatch, reduced: Any) -> None:
    classes = _enums()
    assert {Ops, Status} <= set(classes)
    for cls in classes:
        for base in cls.__mro__:        # CPython 3.11.2 puts its own method into each class
            if issubclass(base, Enum) and "__reduce_ex__" in vars(base):
                monkeypatch.setattr(base, "__reduce_ex__", reduced)
    members = [member for cls in classes for member in cls]
    assert all(a is b for a, b in zip(decode(encode(members)), members, strict=True))
    assert decode(encode({Status.SLOW: frozenset(members)})) == {Status.SLOW: frozenset(members)}


def test_a_message_makes_members_of_enums_only() -> None:
    for cls, name in ((Param, "slot"), (Status, "NOTHING")):
        with pytest.raises(FormatError):
            decode(pickle.dumps(_Reduced(enum_member, (cls, name))))


class _Reduced:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


def test_launches_come_back() -> None:
    """Launch extents are expressions, and are part of the description of every program that is sent."""
    extent = UOp(Ops.DEFINE_VAR, dtypes.index, (), ("n", 1, 64)) * 2
    for launch in (ONCE, LaunchDims((extent, ONE, ONE), None), LaunchDims((extent, ONE, ONE), (ONE, extent, ONE))):
        assert decode(encode(launch)) == launch


def test_what_a_target_measures_stays_where_it_is() -> None:
    target = Target("x86_64", "znver5", ("avx2",), 32, 16, 1 << 15, 1 << 20, 1 << 24, 2, dot_cost=lambda name: 2.0)
    sent = decode(encode(target))
    assert sent == target and sent.dot_cost is None and target.dot_cost is not None


@pytest.mark.parametrize("value", [lambda: None, object(), print, os.system, int, Path("x"), ValueError("x"),
                                   UOp.const(dtypes.int32, 1), [1, {"x": (object(),)}]], ids=lambda v: type(v).__name__)
def test_anything_else_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(FormatError, match="not plain data"):
        encode(value)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, pickle.dumps(Evil()), pickle.dumps(print), pickle.dumps(Path), pickle.dumps([1])[:-3],
                                  b"csvod.tune.jobs\nresolve_job\n.", b"csvod.tune.jobs\nos.system\n."])
def test_decoding_anything_else_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode(data)


@given(st.binary(max_size=60))
def test_no_bytes_do_anything_but_decode_or_raise_format_error(data: bytes) -> None:
    try:
        decode(data)
    except FormatError as e:
        assert "message" in str(e)


def test_jobs_come_from_the_registry_only() -> None:
    for name in ("os:system", "svod.tune.workers.jobs:encode", "svod.tune.worker:x", "print", ""):
        with pytest.raises(TuneError, match="jobs are functions of"):
            resolve_job(name)
    with pytest.raises(TuneError, match="has no function"):
        resolve_job("tests.tune.fault_jobs:nothing", ("tests.tune.fault_jobs",))
    run, setup = resolve_job("tests.tune.fault_jobs:add_state", ("tests.tune.fault_jobs",))
    assert run.__name__ == "add_state" and setup is not None and setup.__name__ == "add_state_setup"


def test_a_different_end_is_named() -> None:
    ours = identity()
    assert mismatch(ours, dict(ours)) == ""
    assert mismatch(ours, {**ours, "LLVM": "1.0"}) == f"LLVM {ours['LLVM']} here, 1.0 there"
    assert "unknown there" in mismatch(ours, {})


def test_package_roots_lead_to_the_packages() -> None:
    assert any((Path(r) / "svod" / "errors.py").is_file() for r in package_roots()[:1])
    assert any((Path(r) / "numpy").is_dir() for r in package_roots())


@pytest.mark.parametrize(("outcome", "text"), [
    (Outcome("ok", 1), "ok"), (Outcome("error", kind="ValueError", message="no\nmore"), "error ValueError: no"),
    (Outcome("crash", kind="SIGSEGV"), "crash SIGSEGV"), (Outcome("timeout", kind="deadline", seconds=2.0), "timeout after 2 s"),
    (Outcome("lost", kind="closed"), "lost closed")])
def test_outcomes_describe_themselves(outcome: Outcome, text: str) -> None:
    assert outcome.describe() == text and outcome.ok is (text == "ok")
