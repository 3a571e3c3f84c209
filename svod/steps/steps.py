"""A kernel from its AST to machine code, step by step, as data.

    canonical AST
    the loops without opts
    the loops after each opt of the chain, with predicted cycles
    the results of the passes `kernel_form.KERNEL_PASSES`: LINEAR, source, assembly

If a step fails, it has the reason (`problem`) instead of a text. Stages that the device's compiler lacks are left out.
"""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from svod.compile.backend import backend_named
from svod.compile.plan.kernel_form import KERNEL_PASSES, KernelForm
from svod.core.ir.text import format_ast
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.chain_text import AS_IT_IS, opt_text
from svod.core.kernel.opts import OPTS
from svod.core.kernel.scheduler import Scheduler
from svod.core.tree.show import print_nest
from svod.errors import StageMissing, SvodError
from svod.steps.changes import Row, compare, counts
from svod.system.quantities import amount

NEST = "loop nest"
UNCHANGED = "no change"
AST = "AST"
MOST_COMPARED = 4000  # maximum number of lines of two texts together that are compared: the time grows with the product of their lengths
_SENTENCE = re.compile(r"(?<=[\w`)]\.) (?=[A-Z`])")


@dataclass(frozen=True)
class PassStep:
    """The result of a pass. `name`: the pass; `about`: what it does; `language`: the language of `text`. `problem`: why there is no
    text, "" if there is one. `cycles`: predicted for this state; None without a prediction."""

    name: str
    title: str
    about: str
    language: str
    text: str
    problem: str = ""
    cycles: float | None = None
    before: PassStep | None = None

    @cached_property
    def rows(self) -> list[Row]:
        """Return the rows that compare this step's text with the text of `before`; [] if either is missing or both are too long."""
        if self.before is None or not self.text or self.text.count("\n") + self.before.text.count("\n") > MOST_COMPARED:
            return []
        return compare(self.before.text, self.text)

    @property
    def summary(self) -> str:
        """The numbers of changed lines, such as `+3 −1 ~2 ⇥4`, or `no change`; "" if the step is not compared with another."""
        if not self.rows:
            return ""
        return " ".join(f"{r}{n}" for r, n in ((Row(kind).sign, n) for kind, n in counts(self.rows).items())) or UNCHANGED

    @property
    def share(self) -> float | None:
        """Predicted cycles divided by the predicted cycles of the step before; None if either is unknown."""
        if self.before is None or self.cycles is None or not self.before.cycles:
            return None
        return self.cycles / self.before.cycles


def steps_of(form: KernelForm, first: Sequence[PassStep] = ()) -> tuple[PassStep, ...]:
    """Make all steps of a kernel under its opt chain, each linked to the step that it is compared with. `first`: steps of earlier
    passes; if empty, the canonical AST is the first step."""
    steps = list(first)
    if not steps:
        steps.append(PassStep("canonical", "canonical AST", "what the kernel computes, in the form that its key is made of", AST,
                          format_ast(form.kernel.ast)))
    if form.kernel.library_kernel is None:
        steps.extend(_opt_steps(form))
    for p in KERNEL_PASSES:
        with suppress(StageMissing):
            text, problem = _made(partial(p.show, form))
            steps.append(PassStep(p.name, p.name, p.what, p.language, text, problem))
    return linked(steps)


def linked(steps: Iterable[PassStep]) -> tuple[PassStep, ...]:
    """Return the steps, each with `before` set to the nearest earlier step that has text. It is None if no step has had text since the
    language last changed."""
    out: list[PassStep] = []
    last: PassStep | None = None
    for s in steps:
        before = last if last is not None and last.language == s.language else None
        out.append(replace(s, before=before))
        last = out[-1] if s.text else before
    return tuple(out)


def _opt_steps(form: KernelForm) -> Iterator[PassStep]:
    """Make the steps of the loops without opts, and after each opt. They end with the first opt that does not apply."""
    state = Scheduler(form.kernel, form.target)
    yield _nest_step(state, AS_IT_IS, "the loops of the kernel without opts")
    for opt in form.chain:
        try:
            state = apply_opt(state, opt)
        except SvodError as e:
            yield PassStep("opts", opt_text(opt), about_opt(opt.op), NEST, "", str(e))
            return
        yield _nest_step(state, opt_text(opt), about_opt(opt.op))


def _nest_step(state: Scheduler, title: str, about: str) -> PassStep:
    text, problem = _made(lambda: print_nest(state))
    try:
        cycles = float(backend_named(state.target.device).cost(state).cycles)
    except SvodError:       # the opts contradict each other until a later one is applied; the printed nest says so, too
        cycles = None
    return PassStep("opts", title, about, NEST, text, problem, cycles)


def about_opt(op: str) -> str:
    """Return the first sentence of an opt's docstring; "" if there is no such opt."""
    doc = " ".join((inspect.getdoc(OPTS[op]) or "").split("\n\n")[0].split()) if op in OPTS else ""
    return _SENTENCE.split(doc)[0].rstrip(".:")


def _made(make: Callable[[], str]) -> tuple[str, str]:
    """Call `make`: returns (its text, ""), or ("", the reason why the text cannot be made). Raises StageMissing."""
    try:
        return make(), ""
    except StageMissing:
        raise
    except SvodError as e:
        return "", str(e)


def as_text(steps: Sequence[PassStep]) -> str:
    """Format the steps for a terminal. A step that is compared with the one before shows changed lines with their signs, others show
    their text."""
    return "\n\n".join(map(_step_text, steps))


def _step_text(step: PassStep) -> str:
    cycles = "" if step.cycles is None else f"  {amount(step.cycles)} cycles"
    head = f"-- {step.name}{f': {step.title}' if step.title != step.name else ''} --{cycles}"
    body = step.problem or ("as before" if step.summary == UNCHANGED else _marked_lines(step.rows) if step.rows else step.text)
    return f"{head}\n{body}"


def _marked_lines(rows: Sequence[Row]) -> str:
    lines = []
    for r in rows:
        if r.kind in ("gone", "changed"):
            lines.append("− " + "".join(p.text for p in r.before))
        if r.kind != "gone":
            sign = "+" if r.kind == "changed" else r.sign
            lines.append(f"{sign} " + "".join(p.text for p in r.after))
    return "\n".join(lines)
