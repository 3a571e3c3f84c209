"""Tables for people: drawn with rich on a terminal, tab-separated in a pipe, where `cut` and `awk` read them."""
from __future__ import annotations

import sys
from collections.abc import Sequence

from svod.system.columns import duration


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset(),
                fold: frozenset[str] = frozenset()) -> None:
    """Print rows under columns. Columns in `right` are aligned to the right; those in `fold` may be broken over lines."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            print("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in row))
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name not in fold,
                         overflow="fold" if name in fold else "ellipsis")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: what looks like markup in a record is not markup
    Console().print(table)


def seconds(value: float | None) -> str:
    """A duration, 1.23 ms; nothing for None."""
    return "" if value is None else duration(value)


def chain_words(chain: Sequence[Sequence[object]]) -> str:
    """`UPCAST(o0, 8) THREAD(o1, 2)`: a chain as people read it; "as it is" for the empty one."""
    def word(x: object) -> str:
        return "[" + " ".join(map(word, x)) + "]" if isinstance(x, (list, tuple)) else str(x)
    return " ".join(f"{opt[0]}({', '.join(word(x) for x in opt[1:] if x is not None)})" for opt in chain) or "as it is"
