"""docs/opts.md describes the opts that exist, in the words of their docstrings."""
from __future__ import annotations

from pathlib import Path

from svod.core.kernel.opts import OPTS

PAGE = Path(__file__).parents[3] / "docs" / "opts.md"


def test_every_opt_is_described() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for name, rule in OPTS.items():
        summary = " ".join((rule.__doc__ or "").split("\n\n")[0].split())
        assert f"### {name} {summary}" in page, f"docs/opts.md does not say what {name} does; its docstring: {summary}"
