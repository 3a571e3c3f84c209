"""Text tables. rich draws them for a terminal or a given width; in a pipe they are tab-separated for `cut` and `awk`."""
from __future__ import annotations

import io
import sys
from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from svod.system.process.streams import is_terminal

# Replaces control characters except newlines: a terminal would obey escape sequences in text from other people's files.
_CONTROL = {n: "\ufffd" for n in (*range(32), *range(127, 160)) if n != 10}
LEAST_COLUMN = 10       # minimum width in characters of a column that may shrink


def printable(text: str) -> str:
    """Replace control characters except newlines, for showing other people's records on a terminal."""
    return text.translate(_CONTROL)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str], shrink: Collection[str],
           fold: Collection[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for name in header:
        table.add_column(Text(name, no_wrap=True), justify="right" if name in right else "left", no_wrap=name not in (*shrink, *fold))
    for row in (map(printable, cells) for cells in rows):
        # as Text: rich would interpret brackets in a name as markup
        table.add_row(*(Text(cell, overflow="fold") if name in fold else Text(cell, no_wrap=True, overflow="ellipsis")
                        for name, cell in zip(header, row, strict=True)))
    return table


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), shrink: Collection[str] = (),
               width: int) -> list[str]:
    """Return the lines of a table. Columns in `right` are right-aligned. If lines would exceed `width`, columns in `shrink` are cut to
    at least `LEAST_COLUMN` characters."""
    widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
    least = sum(min(w, LEAST_COLUMN) if name in shrink else w for name, w in zip(header, widths, strict=True)) + 2 * (len(header) - 1)
    out = io.StringIO()
    Console(file=out, width=max(least, width), color_system=None).print(_table(header, rows, right, shrink, ()))
    return [line.rstrip() for line in out.getvalue().rstrip("\n").split("\n")]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), fold: Collection[str] = ()) -> None:
    """Print a table to the standard output. On a terminal, cells of columns in `fold` may wrap."""
    if is_terminal(sys.stdout):
        Console().print(_table(header, rows, right, (), fold))
        return
    for row in (header, *rows):
        print("\t".join(printable(cell.replace("\t", " ").replace("\n", " ")) for cell in row))
