"""Checks that docs/ is complete: every page is in the site, its API page names only existing objects, and parts generated from
docstrings are complete."""
from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from svod.core.kernel.opts import OPTS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
API = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"^ +- (\S+\.md)$", navigation, re.M)
    assert sorted(listed) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", API)
def test_what_the_api_page_names_is_there(name: str) -> None:
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(module), last, None) or importlib.import_module(name)
    assert found.__doc__, f"{name} has no docstring"


def test_generated_pages_are_current() -> None:
    pages = {p.name: p.read_text(encoding="utf-8") for p in (DOCS / "generated").glob("*.md")}
    assert pages == {name: page() for name, page in GENERATE["PAGES"].items()}, "run: python docs/generate.py"
    linked = "".join(p.read_text(encoding="utf-8") for p in DOCS.glob("*.md"))
    assert all(f"](generated/{name})" in linked for name in pages)


def test_the_list_of_files_has_its_place_on_the_site() -> None:
    page = (DOCS / "layout.md").read_text(encoding="utf-8")
    assert f"\n{GENERATE['MARK']}\n" in page and "| `config.py` |" in GENERATE["on_page_markdown"](page, page=None)
    assert "docs/generate.py" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nhooks:")[1].splitlines()[0]


def test_every_file_is_listed_once_under_its_folder() -> None:
    folder, listed = "", []
    for line in GENERATE["described_files"]().splitlines():
        if line.startswith("### "):
            folder = line[4:]
        elif row := re.match(r"\| `(\w+\.py)` \| \S", line):
            listed.append(f"{folder}/{row[1]}")
    there = [p.relative_to(ROOT).as_posix() for p in (ROOT / "svod").rglob("*.py") if p.name not in ("__init__.py", "__main__.py")]
    assert sorted(listed) == sorted(there)


def test_every_opt_is_described_and_those_with_loops_show_them() -> None:
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", GENERATE["described_opts"](), re.M | re.S))
    assert sections.keys() == OPTS.keys()
    for name, rule in OPTS.items():
        summary = " ".join((rule.__doc__ or "").split("\n\n")[0].split())
        assert summary and " ".join(sections[name].split()).startswith(summary)
        assert ("```" in sections[name]) == ("\n\n" in (rule.__doc__ or "")), name


def test_the_picture_of_the_terminal_shows_its_text() -> None:
    """Check that tune.svg shows the text of tune.txt and loads no other files, and that the README shows it."""
    make = runpy.run_path(str(DOCS / "pictures" / "make.py"))
    lines = (DOCS / "pictures" / "tune.txt").read_text(encoding="utf-8").splitlines()
    for picture in ((DOCS / "pictures" / "tune.svg").read_text(encoding="utf-8"), make["terminal"](lines)):
        texts = [e.text or "" for e in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
        shown = "".join("".join(texts).split())
        for line in lines:
            assert "".join(line[:make["WIDTH"] - 1].split()) in shown, "run: python docs/pictures/make.py"
        assert "url(http" not in picture
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"](docs/pictures/{name})" in readme for name in ("tune.svg", "report.png"))
    assert f"{' '.join(make['TUNE'])}\n```" in readme, "the picture is of the README's first command"


def test_the_output_of_a_search_is_shortened_to_its_beginning_and_its_table() -> None:
    make = runpy.run_path(str(DOCS / "pictures" / "make.py"))
    progress = [f"[{s:4d} s] conv" for s in range(9)]
    table = ["kernel  gain", "────", *(f"conv {n}" for n in range(20))]
    assert make["shortened"](["begin", *progress, *table, "", "end"]) == [
        "begin", *progress[:make["PROGRESS_LINES"]], "…", *table[:2 + make["TABLE_LINES"]], "…", "", "end"]


WIDTH = 120     # columns of a paragraph


def test_paragraphs_have_one_width() -> None:
    """Paragraphs are filled to one width, except tables, code, headings and lines of a single word."""
    wide, ragged = [], []
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "experiments").glob("*.md")):
        text = re.sub(r"^( *)```.*?^\1```$", lambda code: "\n" * code[0].count("\n"), page.read_text(encoding="utf-8"), flags=re.M | re.S)
        lines = text.splitlines()
        for i, (line, after) in enumerate(zip(lines, [*lines[1:], ""], strict=True)):
            if re.match(r"\s*(\||#|<|!\[)|    |$", line):
                continue
            if len(line) > WIDTH and " " in line.strip():
                wide.append(f"{page.name}:{i + 1}")
            word = after.split(" ")[0]
            if re.match(r"[A-Za-z]", after) and len(f"{line} {word}") <= WIDTH and "`" not in line + after:
                ragged.append(f"{page.name}:{i + 1}")
    assert not wide, "longer than a paragraph's width"
    assert not ragged, "the next word would fit"
