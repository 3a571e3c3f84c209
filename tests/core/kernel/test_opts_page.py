"""docs/opts.md lists all opts, and its loop nests are the actual ones."""
from __future__ import annotations

import json
import re
from pathlib import Path

from svod.core.kernel.opts import OPTS
from tests.core.corpus import data
from tests.core.tree.test_show import nest

PAGE = Path(__file__).parents[3] / "docs" / "opts.md"


def test_every_opt_is_in_the_table() -> None:
    rows = re.findall(r"^\| ([A-Z, ]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(name for row in rows for name in row.split(", ")) == sorted(OPTS)


def test_nests_are_what_svod_prints() -> None:
    steps = re.findall(r"^\*\*[^*]+:\*\*\s+`([^`]+)`\n\n```nest\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(steps) == 3
    for chain, shown in steps:
        assert nest(data(64, 256) @ data(256, 512), *map(tuple, json.loads(chain))) == shown
