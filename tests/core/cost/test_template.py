"""Templates: the chains that they generate, their order, and their names."""
from __future__ import annotations

import numpy as np
import pytest

import svod
from svod import PrepareConfig, Tensor
from svod.core.cost import sketch
from svod.core.cost.template import (
    Apply,
    Cheaper,
    Choose,
    Do,
    Each,
    Hole,
    Maybe,
    Need,
    Only,
    Prefer,
    Steps,
    Template,
    fact,
    made_by,
    schedule,
)
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from tests.compile.native import AVX512
from tests.hand_kernels import gemm

COLUMNS, ROWS = Hole("columns", lambda p: (32, 16)), Hole("rows", lambda p: (6, 4))
TOY = Template("TOY", COLUMNS, Apply("UPCAST", "o1", COLUMNS), ROWS, Apply("UPCAST", "o0", ROWS), Maybe(Apply("UNROLL", "r0", 2)))


def base() -> Scheduler:
    return Scheduler(Kernel(gemm(48, 64, 32)), AVX512)


def chains(*steps: Steps) -> list[str]:
    return [chain_text(s.applied_opts) for s in schedule(steps, base())]


def test_the_example_of_the_docstring() -> None:
    states = list(schedule(TOY, base()))
    assert [(chain_text(s.applied_opts), made_by(s)) for s in states] == [
        (f"UPCAST(o1, {columns}) UPCAST(o0, {rows}){unrolled}", f"TOY: columns {columns}, rows {rows}")
        for columns in (32, 16) for rows in (6, 4) for unrolled in ("", " UNROLL(r0, 2)")]


def test_a_further_opt_and_the_untouched_kernel_have_no_template() -> None:
    first = next(schedule(TOY, base()))
    assert made_by(apply_opt(first, Opt("UNROLL", "r0", 4))) == "" == made_by(base())


def test_templates_that_follow_one_another_are_named_in_order() -> None:
    unrolled = Template("UNROLLED", Apply("UNROLL", "r0", 4))
    assert made_by(next(schedule(unrolled, next(schedule(TOY, base()))))) == "TOY: columns 32, rows 6; UNROLLED"


AXES = Hole("", lambda p: ("o0", "o1"))
TILE, AGAIN, ABSENT = Apply("UPCAST", "o0", 4), Apply("UNROLL", "r0", 2), Apply("UPCAST", "o7", 4)


@pytest.mark.parametrize(("steps", "wanted"), [
    ([ABSENT, TILE], ["UPCAST(o0, 4)"]),                                        # an opt that does not apply is left out
    ([Apply("UPCAST", "o7", 4, must=True), TILE], []),
    ([Apply("UPCAST", 0, 1), Apply("UPCAST", -1, 4), Apply("UPCAST", 1, 16)], ["UPCAST(o1, 16)"]),      # local axes; none; an amount of 1
    ([Choose(TILE, [AGAIN, TILE], [])], ["UPCAST(o0, 4)", "UNROLL(r0, 2) UPCAST(o0, 4)", ""]),
    ([Maybe(TILE), Maybe(ABSENT)], ["", "UPCAST(o0, 4)"]),
    ([Prefer(TILE)], ["UPCAST(o0, 4)", ""]),
    ([Choose(Need(ABSENT), Need(ABSENT, TILE))], ["UPCAST(o0, 4)"]),
    ([COLUMNS, Only(lambda p: p[COLUMNS] == 16), Apply("UPCAST", 1, COLUMNS)], ["UPCAST(o1, 16)"]),
    ([fact(lambda p: None), TILE], []),
    ([Each(AXES, Apply("UPCAST", AXES, 4))], ["UPCAST(o0, 4) UPCAST(o1, 4)"]),
    ([Each(Hole("", lambda p: ()), ABSENT), TILE], ["UPCAST(o0, 4)"]),
    ([Do(lambda p: apply_opt(p.state, Opt("UNROLL", "r0", 4))), Do(lambda p: None)], []),
])
def test_steps(steps: list[Steps], wanted: list[str]) -> None:
    assert chains(*steps) == wanted


def test_a_bound_prunes_within_its_template() -> None:
    costs = Hole("", lambda p: (5, 7, 3, 3, 2, 9))
    bounded = Template("T", costs, Cheaper(lambda p: p[costs], lambda p: p[costs] == 9), Apply("UPCAST", "o1", lambda p: p[costs] + 1))
    assert chains(Choose(bounded, bounded)) == 2 * [f"UPCAST(o1, {n + 1})" for n in (5, 3, 2, 9)]


def test_a_template_that_is_added_is_enumerated_and_why_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [s.digest for s in sketch.sketches(base())]
    monkeypatch.setattr(sketch, "TEMPLATES", (TOY, *sketch.TEMPLATES))
    added = [s for s in sketch.sketches(base()) if made_by(s).startswith("TOY: ")]
    assert len(added) == 8 and all(s.digest not in plain for s in added)
    monkeypatch.setattr(sketch, "TEMPLATES", (TOY,))
    x = [Tensor(np.ones((48, 32), np.float32)), Tensor(np.ones((32, 64), np.float32))]
    hand = svod.kernel(x[0] @ x[1], config=PrepareConfig(db=":none:"))
    assert hand.heuristic().template.startswith("TOY: columns ") and {k.template for k in hand.sketches()} >= {"TOY: columns 16, rows 4"}
    [kernel] = (x[0] @ x[1]).prepare(PrepareConfig(db=":none:", object_cache=":none:")).kernels
    assert kernel.why.endswith(f"; {hand.heuristic().template}")
