"""The lines of svod-tune's report."""
from __future__ import annotations

from svod.bench.race import Ratio
from svod.cli.tune.report import plan_lines, rounding_lines
from svod.tune.db import Rounding
from svod.tune.plans.check import PlanCheck


def test_the_title_of_a_whole_plan_names_its_baseline() -> None:
    """Under the policy fast a report has two times of a whole plan, over different baselines."""
    check = PlanCheck(2.0, Ratio(0.5, 0.49, 0.51), 1.0, 7, None, 1, 1)
    rounding = Rounding("k" * 32, "t", "p", "w", (), "l", 1, before=2.0, after=1.0, used=True, plan_before=2.0, plan_after=1.0)
    lines = [*plan_lines(check, "", 3), *rounding_lines([rounding], {}, 110)]
    titles = [line for line in lines if line.startswith("whole plan")]
    assert len(set(titles)) == 2 and "over the heuristic's" in titles[0] and "over float32" in titles[1]
    for title in titles:
        baseline = lines[lines.index(title) + 1].split()[0]
        assert baseline in title, "the first row is the baseline that the title names"
