"""tests/contracts.md is true as far as a test can tell: every test and case it names exists, every row has a test or says why not."""
from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)(?:\[([^`]+)\])?`")


def rows() -> list[tuple[str, str]]:
    """(behaviour, test) of every row of the page."""
    found = []
    for line in (ROOT / "tests" / "contracts.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not line.startswith(("| behaviour |", "| --- |")):
            behaviour, _, test = line.strip("| ").partition(" | ")
            found.append((behaviour, test))
    return found


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))


def test_every_test_named_exists() -> None:
    named = [found for _, test in rows() for found in NAMED.findall(test)]
    assert len(named) > 80
    missing = [f"{file}::{name}" for file, name, _ in named if not (ROOT / file).exists() or name not in functions_of(file)]
    assert not missing, missing


def test_every_case_named_is_written_in_the_file_of_its_test() -> None:
    cases = [(file, case) for _, test in rows() for file, _, case in NAMED.findall(test) if case]
    assert len(cases) > 30
    missing = [f"{file}: {case}" for file, case in cases if f'"{case}"' not in (ROOT / file).read_text(encoding="utf-8")
               and not re.search(r'match=r?f?"[^"]*' + re.escape(case), (ROOT / file).read_text(encoding="utf-8"))]
    assert not missing, missing


def test_every_row_has_a_test_or_a_reason() -> None:
    assert len({b for b, _ in rows()}) == len(rows()), "a behaviour stands twice"
    for behaviour, test in rows():
        assert NAMED.search(test) or re.match(r"not built( as \w+)?: \S.{20,}", test), behaviour
        assert test.count("::") == len(NAMED.findall(test)), f"a test of {behaviour!r} is misspelt"
