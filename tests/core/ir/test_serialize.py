"""Serialization of ASTs: a round trip through JSON text gives the same object, and damaged data raises only FormatError."""
from __future__ import annotations

import contextlib
import copy
import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svod.core.ir.dtype import dtypes
from svod.core.ir.param import Param
from svod.core.ir.serialize import ARG_TYPES, ast_to_data, data_to_ast
from svod.core.ir.uop import Ops, UOp
from svod.errors import FormatError


def const(n: int) -> UOp:
    return UOp.const(dtypes.index, n)


def travelled(u: UOp) -> UOp:
    return data_to_ast(json.loads(json.dumps(ast_to_data(u), allow_nan=False)))


def gemm(m: int = 3, n: int = 5, k: int = 7) -> UOp:
    """Make the GEMM of docs/ir.md with staged operands."""
    def rng(extent: int, i: int) -> UOp:
        return UOp(Ops.RANGE, dtypes.index, (const(extent),), i)

    def load(slot: int, size: int, flat: UOp) -> UOp:
        param = UOp(Ops.PARAM, dtypes.float32, (), Param(slot, size, constant=slot == 2))
        return UOp(Ops.LOAD, dtypes.float32, (UOp(Ops.INDEX, dtypes.float32, (param, flat)),))

    i, j, r, a0, a1, b0, b1 = (rng(e, x) for x, e in enumerate((m, n, k, m, k, k, n)))
    a = UOp(Ops.STAGE, dtypes.float32, (load(1, m * k, a0 * k + a1), a0, a1))
    b = UOp(Ops.STAGE, dtypes.float32, (load(2, k * n, b0 * n + b1), b0, b1))
    product = UOp(Ops.INDEX, dtypes.float32, (a, i, r)) * UOp(Ops.INDEX, dtypes.float32, (b, r, j))
    total = UOp(Ops.REDUCE, dtypes.float32, (product, r), (Ops.ADD, 1))
    out = UOp(Ops.INDEX, dtypes.float32, (UOp(Ops.PARAM, dtypes.float32, (), Param(0, m * n)), i * n + j))
    return UOp(Ops.SINK, dtypes.void, (UOp(Ops.STORE, dtypes.void, (out, total, i, j)),))


def test_gemm_comes_back_as_the_same_object() -> None:
    ast = gemm()
    assert data_to_ast(ast_to_data(ast)) is ast
    assert travelled(ast) is ast
    assert ast_to_data(ast) == ast_to_data(travelled(ast))


@pytest.mark.slow
def test_a_graph_deeper_than_the_recursion_limit() -> None:
    u = UOp.const(dtypes.float32, 1.0)
    for _ in range(50_000):
        u = u.alu(Ops.NEG)
    assert travelled(u) is u


ARGS = [None, True, False, 0, 1, -1, 2**70, 1.0, -0.0, 1e-320, math.inf, -math.inf, math.nan, "", "ü\n", b"", b"\x00\xff", (),
        (1, 1.0, True, (None, "x")), Ops.ADD, (Ops.MAX, 2), dtypes.bfloat16, Param(0, 4), Param(3, 4, True, -2, 9),
        UOp.const(dtypes.int32, 4), (UOp.const(dtypes.int32, 4), (gemm(),))]


@pytest.mark.parametrize("arg", ARGS, ids=[repr(a)[:40] for a in ARGS])
def test_every_kind_of_arg(arg: object) -> None:
    u = UOp(Ops.CUSTOM_FUNCTION, dtypes.void, (), arg)
    back = travelled(u)
    assert back is u and back.key == u.key


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))


@pytest.mark.slow
@settings(max_examples=100)
@given(st.recursive(scalars, lambda s: st.lists(s, max_size=4).map(tuple), max_leaves=8))
def test_random_args(arg: object) -> None:
    u = UOp(Ops.CUSTOM_FUNCTION, dtypes.void, (), arg)
    assert travelled(u).key == u.key


def test_nan_payloads_are_kept() -> None:
    nan = struct.unpack(">d", bytes.fromhex("7ff8000000001234"))[0]
    u = UOp(Ops.CONST, dtypes.float64, (), nan)
    assert travelled(u).key == u.key != UOp(Ops.CONST, dtypes.float64, (), math.nan).key


def test_an_arg_without_a_stable_form_is_refused() -> None:
    for arg in (frozenset({1}), (1, frozenset()), object()):
        with pytest.raises(FormatError, match="no stable form"):
            ast_to_data(UOp(Ops.CUSTOM_FUNCTION, dtypes.void, (), arg))


BAD: list[tuple[object, str]] = [
    (None, "format"), ({}, "format"), ({"format": 2, "nodes": []}, "format"), ({"format": 1}, "nodes"),
    ({"format": 1, "nodes": []}, "nodes"),
    ([["CONST", "int32", [], 1], ["NEG", "int32", [1], None]], "before"),
    ([["NEG", "int32", [-1], None]], "before"), ([["NEG", "int32", [True], None]], "before"), ([["NEG", "int32", 0, None]], "before"),
    ([["NEG", "int32", [], None]], "sources"), ([["EVAL", "int32", [], None]], "unknown"), ([["CONST", "int33", [], None]], "unknown"),
    ([["CONST", ["int32"], [], None]], "unknown"), ([["CONST", "int32", []]], r"not \[op"), (["CONST"], r"not \[op"),
    ([["CONST", "int32", [], 1.0]], "constant"), ([["CONST", "int32", [], True]], "constant"), ([["CONST", "float32", [], 1]], "constant"),
    ([["CONST", "bool", [], 1]], "constant"),
    ([["CUSTOM_FUNCTION", "void", [], {}]], "arg"), ([["CUSTOM_FUNCTION", "void", [], []]], "arg"),
    ([["CUSTOM_FUNCTION", "void", [], ["z", 1]]], "arg"),
    ([["CUSTOM_FUNCTION", "void", [], ["o", "EVAL"]]], "arg"), ([["CUSTOM_FUNCTION", "void", [], ["u", 0]]], "arg"),
    ([["CUSTOM_FUNCTION", "void", [], ["y", "0g"]]], "arg"),
    ([["CUSTOM_FUNCTION", "void", [], ["f", "00"]]], "arg"), ([["CUSTOM_FUNCTION", "void", [], ["c", "Popen", {}]]], "arg"),
    ([["CUSTOM_FUNCTION", "void", [], ["f", "zz00000000000000"]]], "hex"), ([["CUSTOM_FUNCTION", "void", [], [["t"]]]], "arg"),
    ([["CUSTOM_FUNCTION", "void", [], math.inf]], "arg"),
    ([["PARAM", "int8", [], ["c", "Param", {"slot": 0}]]], "size"),
    ([["PARAM", "int8", [], ["c", "Param", {"slot": 0, "x": 1}]]], "fields"),
    ([["PARAM", "int8", [], ["c", "Param", {"slot": "0", "size": 1}]]], "integers"),
    ([["PARAM", "int8", [], ["c", "Param", {"slot": 0, "size": -1}]]], "integers"),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_damaged_data_is_a_format_error(data: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        data_to_ast({"format": 1, "nodes": data} if isinstance(data, list) else data)


def test_nesting_without_end_is_a_format_error() -> None:
    deep: list[object] = ["t"]
    for _ in range(100):
        deep = ["t", deep]
    with pytest.raises(FormatError):
        data_to_ast({"format": 1, "nodes": [["CUSTOM_FUNCTION", "void", [], deep]]})


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_any_change_to_the_data_gives_a_graph_or_a_format_error(data: st.DataObject) -> None:
    doc = json.loads(json.dumps(ast_to_data(gemm())))
    nodes = copy.deepcopy(doc["nodes"])
    row = data.draw(st.integers(0, len(nodes) - 1))
    column = data.draw(st.integers(0, 3))
    junk = st.recursive(st.one_of(scalars.filter(lambda v: not isinstance(v, bytes)), st.sampled_from(["t", "u", "c", "ADD"])),
                        lambda s: st.one_of(st.lists(s, max_size=3), st.dictionaries(st.text(max_size=3), s, max_size=2)), max_leaves=5)
    nodes[row][column] = data.draw(junk)
    with contextlib.suppress(FormatError):
        assert isinstance(data_to_ast({"format": 1, "nodes": nodes}), UOp)


def test_every_registered_arg_type_is_a_frozen_dataclass() -> None:
    for cls in ARG_TYPES.values():
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
