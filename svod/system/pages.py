"""HTML pages that open offline: the environment of their templates, their common style sheet `templates/look.css`, and their files."""
from __future__ import annotations

import os
import re
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from svod.errors import FileError
from svod.system.files import open_file, write_text

PAGE_MARK = Markup('<meta name="generator" content="svod">')      # every page that svod writes has it in its first MARKED_BYTES bytes
TITLE_END = " · svod</title>".encode()       # the end of the title of pages that have no PAGE_MARK yet
MARKED_BYTES = 1024

# Matches spaces that must not become line breaks: between a number and its unit, and within a number.
_IN_QUANTITY = re.compile(r"(?<=\d) (?=[GMkTµmn]?(?:FLOP|B|iB|s|min|h|%)|\d{3}\b)")


def environment(package: str, escape: bool = True) -> Environment:
    """A Jinja environment with the `templates` folders of a package and of svod.system. `escape`: for HTML; values are escaped, and
    quantities have no line breaks. Undefined names in a template raise an error."""
    made = Environment(loader=ChoiceLoader([PackageLoader(package), PackageLoader("svod.system")]), autoescape=escape,
                       undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_no_break if escape else None)
    made.globals["PAGE_MARK"] = PAGE_MARK
    return made


def check_page(path: str | os.PathLike[str]) -> None:
    """Raise FileError if a page written to `path` would replace a file that is neither a page of svod's nor empty."""
    file = Path(path)
    if not file.is_file():
        return
    with open_file(file) as opened:
        start = opened.read(MARKED_BYTES)
    if start and not any(mark in start for mark in (PAGE_MARK.encode(), TITLE_END)):
        raise FileError(f"{file} is no page of svod's, and would be lost; name another file, or remove it first")


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write a page to a file, whole or not at all, and return its path. Raises FileError, as `check_page` does too."""
    check_page(path)
    write_text(Path(path), page)
    return Path(path)


def _no_break(value: object) -> object:
    """The text of an expression in a page: "" for None, and without line breaks within a quantity."""
    if value is None:
        return ""
    return _IN_QUANTITY.sub("\u00a0", value) if isinstance(value, str) and not isinstance(value, Markup) else value
