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


def constant(value: float, u: UOp, c: UOp) -> UOp | None:
    return u if c.arg == value else None


ADD_ZERO = (Pattern(Ops.ADD, (X, Pattern(Ops.CONST, name="c"))), lambda x, c: constant(0.0, x, c))


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
        (Pattern(Ops.MUL, (X, Pattern(Ops.CONST, name="c"))), lambda x, c: constant(2.0, x + x, c)),
        (Pattern(Ops.ADD, (X, X)), lambda x: x.alu(Ops.EXP2)),
    ])
    assert graph_rewrite((leaf(1) * 2.0) * 2.0, double) is leaf(1).alu(Ops.EXP2).alu(Ops.EXP2)


def test_one_pattern_for_several_operations() -> None:
    constants = (Pattern(Ops.CONST, name="a"), Pattern(Ops.CONST, name="b"))
    rules = PatternMatcher([(Pattern(frozenset({Ops.ADD, Ops.MUL}), constants), lambda a, b: UOp.const(f32, a.arg + b.arg))])
    one, two = UOp.const(f32, 1), UOp.const(f32, 2)
    assert graph_rewrite(one + two, rules) is graph_rewrite(one * two, rules) is UOp.const(f32, 3)
    assert graph_rewrite(leaf(1) + two, rules) is leaf(1) + two
    assert graph_rewrite(one - two, rules) is one - two


def test_a_rule_that_declines_leaves_the_node_to_the_next() -> None:
    seen: list[UOp] = []
    rules = PatternMatcher([(Pattern(Ops.DEFINE_VAR, name="x"), lambda x: seen.append(x)),
                            (Pattern(Ops.DEFINE_VAR, name="x"), lambda x: UOp.const(f32, x.arg[2]))])
    assert graph_rewrite(leaf(1) + leaf(2), rules) is UOp.const(f32, 1) + UOp.const(f32, 2)
    assert seen == [leaf(1), leaf(2)]


def test_the_first_rule_that_applies_counts() -> None:
    rules = PatternMatcher([(Pattern(Ops.DEFINE_VAR, name="x"), lambda x: UOp.const(f32, 1)),
                            (Pattern(Ops.DEFINE_VAR, name="x"), lambda x: UOp.const(f32, 2))])
    assert graph_rewrite(leaf(1), rules) is UOp.const(f32, 1)


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
