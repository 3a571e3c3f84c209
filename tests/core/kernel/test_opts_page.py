"""docs/opt_reference.md describes the opts that exist, in the words of their docstrings; docs/opts.md shows real loop nests."""
from __future__ import annotations

import json
import re
from pathlib import Path

from svod.core.kernel.opts import OPTS
from tests.core.corpus import data
from tests.core.kernel.test_show import nest

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE, PAGE = (DOCS / name for name in ("opt_reference.md", "opts.md"))


def test_every_opt_is_described() -> None:
    page = " ".join(REFERENCE.read_text(encoding="utf-8").split())
    for name, rule in OPTS.items():
        summary = " ".join((rule.__doc__ or "").split("\n\n")[0].split())
        assert f"### {name} {summary}" in page, f"docs/opt_reference.md does not say what {name} does; its docstring: {summary}"


def test_every_opt_is_in_the_table() -> None:
    rows = re.findall(r"^\| ([A-Z, ]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(name for row in rows for name in row.split(", ")) == sorted(OPTS)


def test_nests_are_what_svod_prints() -> None:
    steps = re.findall(r"^\*\*[^*\n]+:\*\* `([^`\n]+)`\n\n```nest\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(steps) == 4
    for chain, shown in steps:
        assert nest(data(64, 256) @ data(256, 512), *map(tuple, json.loads(chain))) == shown
