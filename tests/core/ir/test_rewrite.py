"""The rewrite engine on small rule sets."""
from __future__ import annotations

import pytest

from svod.core.ir import rewrite
from svod.core.ir.dtype import dtypes
from svod.core.ir.rewrite import Pattern, PatternMatcher, graph_rewrite
from svod.core.ir.uop import Ops, UOp
from svod.errors import ScheduleError

f32 = dtypes.float32


def leaf(n: int) -> UOp:
    return UOp(Ops.DEFINE_VAR, f32, (), ("x", 0, n))


X = Pattern(name="x")
ADD_ZERO = (Pattern(Ops.ADD, (X, Pattern(Ops.CONST, arg=0.0))), lambda x: x)


def test_commutative_operands_match_in_both_orders() -> None:
    rules = PatternMatcher([ADD_ZERO])
    x, zero = leaf(1), UOp.const(f32, 0)
    assert graph_rewrite(x + zero, rules) is x
    assert graph_rewrite(zero + x, rules) is x
    assert graph_rewrite(x - zero, rules) is x - zero


def test_equal_names_are_one_node() -> None:
    rules = PatternMatcher([(Pattern(Ops.SUB, (X, X)), lambda x: UOp.const(x.dtype, 0))])
    assert graph_rewrite(leaf(1) - leaf(1), rules) is UOp.const(f32, 0)
    assert graph_rewrite(leaf(1) - leaf(2), rules) is leaf(1) - leaf(2)


def test_rules_apply_to_what_they_make() -> None:
    double = PatternMatcher([
        (Pattern(Ops.MUL, (X, Pattern(Ops.CONST, arg=2.0))), lambda x: x + x),
        (Pattern(Ops.ADD, (X, X)), lambda x: x.alu(Ops.EXP2)),
    ])
    assert graph_rewrite((leaf(1) * 2.0) * 2.0, double) is leaf(1).alu(Ops.EXP2).alu(Ops.EXP2)


def test_one_pattern_for_all_sources_dtype_and_condition() -> None:
    constants = Pattern(Ops.CONST)
    rules = PatternMatcher([(Pattern(frozenset({Ops.ADD, Ops.MUL}), constants, name="u", dtype=f32, where=lambda u: len(u.src) == 2),
                             lambda u: UOp.const(f32, u.src[0].arg + u.src[1].arg))])
    two = UOp.const(f32, 2)
    assert graph_rewrite(two + two, rules) is UOp.const(f32, 4)
    assert graph_rewrite(leaf(1) + two, rules) is leaf(1) + two
    one = UOp.const(dtypes.int32, 1)
    assert graph_rewrite(one + one, rules) is one + one


def test_context_and_decline() -> None:
    seen: list[UOp] = []

    def note(ctx: list[UOp], x: UOp) -> None:
        ctx.append(x)

    graph_rewrite(leaf(1) + leaf(2), PatternMatcher([(Pattern(Ops.DEFINE_VAR, name="x"), note)]), seen)
    assert seen == [leaf(1), leaf(2)]


def test_matchers_add_in_order() -> None:
    first = PatternMatcher([(Pattern(Ops.DEFINE_VAR, name="x"), lambda x: UOp.const(f32, 1))])
    second = PatternMatcher([(Pattern(Ops.DEFINE_VAR, name="x"), lambda x: UOp.const(f32, 2))])
    assert graph_rewrite(leaf(1), first + second) is UOp.const(f32, 1)


def test_deep_graphs_need_no_recursion() -> None:
    node = x = leaf(1)
    for _ in range(5000):
        node = node + UOp.const(f32, 0)
    assert graph_rewrite(node, PatternMatcher([ADD_ZERO])) is x


def test_rules_that_undo_each_other_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "REWRITE_LIMIT", 50)
    count = iter(range(1000))
    rules = PatternMatcher([(Pattern(Ops.DEFINE_VAR, name="x"), lambda x: leaf(next(count) + 2))])
    with pytest.raises(ScheduleError, match="does not come to an end"):
        graph_rewrite(leaf(1), rules)
