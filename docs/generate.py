"""Makes the parts of docs/ that consist of docstrings.

    python docs/generate.py files       every file of the package and its purpose, by folder (docs/layout.md)
    python docs/generate.py opts        every opt, its loop nest before and after (docs/opts.md)

`mkdocs build` loads this module as a hook and puts each part where its page has the line `<!-- generated: NAME -->`."""
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
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.M)
#: Rooms in the order in which data flows; each comes with its folders.
ROOMS = ("system", "tensor", "nn", "onnx", "torch", "tracing", "core", "compile", "bench", "tune", "cli")


def summary(file: Path) -> str:
    """The first sentence of a module's docstring, without its period."""
    doc = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
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
    from svod.core.kernel.opts import OPTS  # the package is needed for this part alone
    parts = []
    for name, rule in OPTS.items():
        paragraphs = (inspect.getdoc(rule) or "").split("\n\n")
        nests = "".join(f"\n\n```\n{textwrap.dedent(p)}\n```" for p in paragraphs[1:])
        parts.append(f"### {name}\n\n{' '.join(paragraphs[0].split())}{nests}\n")
    return "\n".join(parts)


PARTS: dict[str, Callable[[], str]] = {"files": described_files, "opts": described_opts}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), markdown)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PARTS:
        raise SystemExit(__doc__)
    print(PARTS[sys.argv[1]](), end="")
