"""Shows plans and kernels in notebooks: their facts and loop nests, without the compilation steps, which need a compiler.

`ExecutionPlan` and `PreparedKernel` import this module by name when they are displayed, because they belong to a lower layer.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PreparedKernel, kernel_name
from svod.core.kernel.chain_text import AS_IT_IS
from svod.errors import SvodError
from svod.steps.page import templates
from svod.steps.plan_steps import call_of


def plan_html(plan: ExecutionPlan) -> str:
    """Render a plan as HTML: the table of its kernels in order, with their opt chains."""
    return _macro("plan_table")(repr(plan), [call_of(i, k) for i, k in enumerate(plan.every)])


def prepared_html(kernel: PreparedKernel) -> str:
    """Render a kernel of a plan as HTML: its opt chain, and its loop nest or the reason why it has none."""
    facts = [("chain", f"{kernel.opts_source}: {kernel.chain or AS_IT_IS}"), ("why", kernel.why), ("from", kernel.origin)]
    return kernel_html(kernel_name(kernel), [(name, value) for name, value in facts if value], kernel.nest)


def kernel_html(title: str, facts: Iterable[tuple[str, str]], nest: Callable[[], str]) -> str:
    """Render a kernel as HTML: `facts` (name, value), and its loop nest, or the error that `nest` raises."""
    try:
        text, problem = nest(), ""
    except SvodError as e:
        text, problem = "", str(e)
    return _macro("kernel_summary")(title, list(facts), text, problem)


def _macro(name: str) -> Callable[..., str]:
    macro: Callable[..., Any] = getattr(templates().get_template("notebook.html").module, name)
    return lambda *args: str(macro(*args)).strip()
