"""HTML and SVG as text that is escaped exactly once: `tag("td", name)` escapes `name` unless it is Markup already."""
from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Elements without content; `use`, `line` … are written so too, which both HTML and SVG parsers read.
VOID = frozenset({"meta", "br", "hr", "col"})
#: The space within a quantity: between a number and its unit, or within a number.
IN_QUANTITY = re.compile(r"(?<=\d) (?=[GMkTµmn]?(?:FLOP|B|iB|s|min|h|%)|\d{3}\b)")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def esc(text: object) -> Markup:
    """`text` as HTML, with no-break spaces between numbers and units; Markup stays as it is."""
    return text if isinstance(text, Markup) else Markup(IN_QUANTITY.sub("\u00a0", html.escape(str(text), quote=True)))


def join(*parts: object) -> Markup:
    """The parts one after another, each escaped unless it is Markup; None is nothing."""
    return Markup("".join(esc(p) for p in parts if p is not None))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is class, other underscores in names are hyphens; None and False leave it out, True writes its name."""
    written = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written.append(key if value is True else f'{key}="{html.escape(str(value), quote=True)}"')
    opening = f"<{' '.join(written)}>"
    return Markup(opening if name in VOID else f"{opening}{join(*children)}</{name}>")


@dataclass(frozen=True)
class Column:
    """A column of a table. `number`: right-aligned, sorted by value. `minor`: left out on narrow screens. `help`: what it means."""

    title: str
    number: bool = False
    minor: bool = False
    help: str = ""


@dataclass(frozen=True)
class Cell:
    """What a cell shows and what it is sorted by (None: always last)."""

    shown: object
    value: float | str | None = None


@dataclass(frozen=True)
class Line:
    """A row of a table: the first cell names it."""

    cells: Sequence[Cell]
    id: str | None = None


def table(columns: Sequence[Column], lines: Iterable[Line], *, caption: str, sortable: bool = True) -> Markup:
    """A table that scrolls by itself when it is too wide. Its headers become buttons where scripts run."""
    def classes(c: Column) -> str | None:
        return " ".join(["num"] * c.number + ["minor"] * c.minor) or None
    head = join(*(tag("th", c.title, scope="col", class_=classes(c), title=c.help or None) for c in columns))
    rows = []
    for line in lines:
        cells = []
        for i, (c, cell) in enumerate(zip(columns, line.cells, strict=True)):
            value = None if cell.value is None and not c.number else "" if cell.value is None else cell.value
            cells.append(tag("th" if i == 0 else "td", cell.shown, scope="row" if i == 0 else None, class_=classes(c), data_v=value))
        rows.append(tag("tr", *cells, id=line.id))
    kind = "sortable" if sortable else None
    body = tag("table", tag("caption", tag("span", caption)), tag("thead", tag("tr", head)), tag("tbody", *rows), class_=kind)
    return tag("div", body, class_="scroll", tabindex="0", role="region", aria_label=caption)
