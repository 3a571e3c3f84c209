"""The steps as one HTML file that opens offline, and as HTML in notebooks.

    parts (svod.steps.plan_steps)  →  templates/: overview, graph, kernels step by step

The page has no scripts and loads no other files. A changed line is marked by a sign as well as by colour.
"""
from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment

from svod.steps.changes import SHORT, shortened
from svod.steps.plan_steps import KernelPart, PlanPart
from svod.steps.steps import NEST, UNCHANGED, PassStep, as_text
from svod.system import quantities as q
from svod.system.pages import environment, write_page

MOST_LINES = 4000       # maximum number of lines shown of one text; the page says how many are left out
OPEN_KERNELS = 1        # number of kernels whose steps are unfolded when the page opens
NOTEBOOK_PIXELS = 640   # height in pixels of the page in a notebook


def render_plans(title: str, plans: Sequence[PlanPart], *, now: datetime | None = None) -> str:
    """Render the HTML page of several plans. `now`: the date in its footer; None: the current time."""
    return _render(title, plans, [k for plan in plans for k in plan.kernels], now)


def render_kernel(kernel: KernelPart, *, now: datetime | None = None) -> str:
    """Render the HTML page of one kernel. `now`: the date in its footer; None: the current time."""
    return _render(f"Steps of {kernel.name}", (), [kernel], now)


@dataclass(frozen=True)
class KernelSteps:
    """The steps of one kernel. As text they show what each opt and each pass changed; in a notebook, they are the page."""

    part: KernelPart

    @property
    def steps(self) -> tuple[PassStep, ...]:
        return self.part.steps

    def __str__(self) -> str:
        return as_text(self.steps)

    def __repr__(self) -> str:
        return f"<steps of {self.part.name}: {', '.join(s.title for s in self.steps)}>"

    def _repr_html_(self) -> str:
        return in_notebook(render_kernel(self.part))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, whole or not at all, and return its path. Raises FileError."""
        return write_page(path, render_kernel(self.part))


def in_notebook(page: str) -> str:
    """Wrap a page in an iframe for a notebook, so that its style does not affect the notebook's."""
    return (f'<iframe srcdoc="{html.escape(page)}" sandbox title="steps" '
            f'style="width: 100%; height: {NOTEBOOK_PIXELS}px; border: 0"></iframe>')


def _render(title: str, plans: Sequence[PlanPart], kernels: Sequence[KernelPart], now: datetime | None) -> str:
    made = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    template = templates().get_template("steps.html")
    return template.render(title=title, plans=plans, kernels=kernels, made=made).strip() + "\n"


@lru_cache
def templates() -> Environment:
    """Return the Jinja environment of the templates in svod/steps, with the functions and constants that they call."""
    env = environment("svod.steps")
    env.globals.update(q=q, shortened=shortened, cut=_cut, is_open=_is_open, OPEN_KERNELS=OPEN_KERNELS, SHORT=SHORT, UNCHANGED=UNCHANGED)
    return env


def _cut(text: str) -> tuple[str, int]:
    """Return (the first `MOST_LINES` lines of a text, the number of lines left out)."""
    lines = text.split("\n")
    return ("\n".join(lines[:MOST_LINES]), max(0, len(lines) - MOST_LINES))


def _is_open(step: PassStep) -> bool:
    """Whether a step is unfolded when the page opens: a loop nest, or an opt that could not be applied."""
    return step.language == NEST or (bool(step.problem) and step.name == "opts")
