"""Text of graphs and kernel ASTs: printed text is read back as the same node; other text is refused with its line number."""
from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svod import Variable
from svod.core.graph import graph
from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.param import Param
from svod.core.ir.serialize import ast_to_data
from svod.core.ir.text import format_ast, parse_ast
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import dim_of
from svod.errors import FormatError
from tests.core.corpus import CORPUS, data
from tests.draws import a_quarter


@pytest.mark.parametrize("name", a_quarter(CORPUS))
def test_kernels_are_read_back(name: str) -> None:
    ast = CORPUS[name]()
    text = format_ast(ast)
    assert parse_ast(text) is ast and text == format_ast(ast)
    assert text.count("\n") + 1 == len(ast_to_data(ast)["nodes"])


def test_how_it_reads() -> None:
    x = UOp(Ops.PARAM, dtypes.float32, (), Param(1, 7, constant=True))
    extent = UOp.const(dtypes.index, 7)
    r = UOp(Ops.RANGE, dtypes.index, (extent,), 0)
    load = UOp(Ops.LOAD, dtypes.float32, (UOp(Ops.INDEX, dtypes.float32, (x, r)),))
    root = UOp(Ops.REDUCE, dtypes.float32, (load, r), ("ADD", 1))
    assert format_ast(root) == """\
%0 = PARAM float32 [Param(slot=1, size=7, constant=true)]
%1 = CONST index [7]
%2 = RANGE index %1 [0]
%3 = INDEX float32 %0, %2
%4 = LOAD float32 %3
%5 = REDUCE float32 %4, %2 [("ADD", 1)]"""
    assert parse_ast(f"; a sum\n{format_ast(root).replace('[7]', '[7]   ; the extent')}\n\n") is root


def test_graphs_are_read_back() -> None:
    y = (data(1, 3, 8, 8).pad(((0, 0), (0, 0), (1, 1), (1, 1))).conv2d(data(5, 3, 3, 3)).relu().softmax(-1)).cast("float16")
    assert parse_ast(format_ast(graph.sink(y.uop))) is graph.sink(y.uop)


def test_graphs_with_variables_are_read_back() -> None:
    n = Variable("n", 1, 100).bind(50)
    sink = graph.sink((data(200)[:2 * n] * 2).sum().uop)
    text = format_ast(sink)
    assert "Dim(expr=%" in text and parse_ast(text) is sink
    alone = UOp(Ops.CUSTOM_FUNCTION, dtypes.float32, (), dim_of(sy.add(n.expr, sy.const(1))))
    assert parse_ast(format_ast(alone)) is alone
    with pytest.raises(FormatError, match="a Dim needs an expression of indices that is not a constant"):
        parse_ast("%0 = CONST index [7]\n%1 = CUSTOM_FUNCTION float32 %0 [(Dim(expr=%0),)]")


NAN = struct.unpack(">d", bytes.fromhex("7ff800000000beef"))[0]
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.floats(allow_nan=False), st.binary(max_size=5),
                  st.sampled_from([Ops.ADD, dtypes.bfloat16, math.inf, -math.inf, -0.0, NAN, Param(3, 4, vmin=-1, vmax=2), "a;b]\"\\ %1"]))


@settings(max_examples=60)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8))
def test_any_argument_is_read_back(arg: object) -> None:
    u = UOp(Ops.CUSTOM_FUNCTION, dtypes.float32, (UOp.const(dtypes.float32, 1e-5),), arg)
    assert parse_ast(format_ast(u)) is u


def test_an_argument_may_hold_a_node() -> None:
    inner = UOp.const(dtypes.int32, 5)
    u = UOp(Ops.CUSTOM_FUNCTION, dtypes.int32, (), (inner, ("x", inner)))
    assert "(%0, (\"x\", %0))" in format_ast(u) and parse_ast(format_ast(u)) is u


@pytest.mark.parametrize(("text", "words"), [
    ("", "1 to"),
    ("%0 = CONST", "line 1 is not a node"),
    ("%0 = CONST index [1]\n%2 = NEG index %0", "line 2: %1 is the next node, found %2"),
    ("%0 = NEG index %1", "do not come before it"),
    ("%0 = CONST index %0 [1]", "do not come before it"),
    ("%0 = FROB index", "unknown operation"),
    ("%0 = CONST floatx [1.0]", "unknown operation or dtype"),
    ("%0 = CONST index [1.0]", "constant with value"),
    ("%0 = CONST index [1 2]", "line 1, argument [1 2]: '2' follows"),
    ("%0 = CONST index [(1, 2]", "a ')' or ',' is missing"),
    ("%0 = CONST index []", "it ends too early"),
    ("%0 = CONST index [maybe]", "'maybe' is not known here"),
    ("%0 = CONST index [#]", "cannot be read"),
    ("%0 = PARAM float32 [Param(slot=0, slot=1)]", "given twice"),
    ("%0 = PARAM float32 [Param(slot=0, width=1)]", "no fields"),
    ("%0 = PARAM float32 [Param]", "'(' is missing"),
    ('%0 = CUSTOM_FUNCTION float32 ["a\\q"]', "as JSON has them"),
    ("%0 = CUSTOM_FUNCTION float32 [op:NOTHING]", "does not write"),
    ("%0 = CUSTOM_FUNCTION float32 [" + "(" * 40 + "]", "nested too deeply"),
])
def test_what_is_not_such_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(FormatError) as e:
        parse_ast(text)
    assert words in str(e.value)
