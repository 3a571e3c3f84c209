"""Makes the parts of docs/ that consist of docstrings and declarations.

    python docs/generate.py             writes docs/generated, which a test compares with the source
    python docs/generate.py files       prints every file of the package and its purpose, by folder

`mkdocs build` loads this module as a hook, which puts the list of files where docs/layout.md has the line `<!-- generated: files -->`."""
from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "docs" / "generated"
MARK = "<!-- generated: files -->"
WIDTH = 120     # columns of a paragraph
#: Rooms in the order in which data flows; each comes with its folders.
ROOMS = ("system", "tensor", "nn", "onnx", "torch", "tracing", "core", "compile", "bench", "steps", "tune", "cli")


def summary(file: Path) -> str:
    """The first sentence of the docstring that a module begins with, without its period."""
    text = file.read_text(encoding="utf-8")
    doc = " ".join((ast.get_docstring(ast.parse(text[:text.index('"""', 3) + 3])) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[\w`)]\.) (?=[A-Z`])", doc)[0].rstrip(".:")


def folders() -> Iterator[Path]:
    """The folders of the package, rooms in their order, each before the folders in it."""
    package = ROOT / "svod"
    yield package
    for room in ROOMS:
        yield from sorted({p.parent for p in (package / room).rglob("*.py")})


def described_files() -> str:
    """A table for each folder: its files, and the first sentence of each."""
    parts = []
    for folder in folders():
        files = sorted(p for p in folder.glob("*.py") if p.name not in ("__init__.py", "__main__.py"))
        name = folder.relative_to(ROOT).as_posix()
        rows = "".join(f"| `{p.name}` | {summary(p).replace('|', chr(92) + '|')} |\n" for p in files)
        table = f"\n| file | purpose |\n| --- | --- |\n{rows}" if rows else ""
        parts.append(f"### {name}\n\n{summary(folder / '__init__.py')}.\n{table}")
    return "\n".join(parts)


def described_opts() -> str:
    """A section for each opt: its docstring, loop nests as code."""
    from svod.core.kernel.opts import OPTS  # the list of files needs no package
    parts = ["# Each opt, before and after\n\nDocstrings of `svod/core/kernel/opts`. [opts.md](../opts.md) has rules of single opts.\n"]
    for name, rule in OPTS.items():
        paragraphs = (inspect.getdoc(rule) or "").split("\n\n")
        nests = "".join(f"\n\n```\n{textwrap.dedent(p)}\n```" for p in paragraphs[1:])
        parts.append(f"## {name}\n\n{textwrap.fill(' '.join(paragraphs[0].split()), WIDTH, break_on_hyphens=False)}{nests}\n")
    return "\n".join(parts)


def described_options() -> str:
    """The tables of all options and environment variables."""
    from svod.config import options_table  # the list of files needs no package
    return f"# All options\n\nDeclarations of `svod/config.py`. [configuration.md](../configuration.md) has rules.\n\n{options_table()}"


PAGES: dict[str, Callable[[], str]] = {"options.md": described_options, "opts.md": described_opts}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return markdown.replace(MARK, described_files())


if __name__ == "__main__":
    if sys.argv[1:] == ["files"]:
        print(described_files(), end="")
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    else:
        for name, page in PAGES.items():
            (GENERATED / name).write_text(page(), encoding="utf-8")
