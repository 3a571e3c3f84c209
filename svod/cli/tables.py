"""Tables for people: drawn with rich on a terminal, tab-separated in a pipe, where `cut` and `awk` read them."""
from __future__ import annotations

import sys
from collections.abc import Sequence


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
    """A duration with a unit that keeps three digits: 1.23 ms."""
    if value is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= 0.9995 * size:      # which is 1 in three digits
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def chain_words(chain: Sequence[Sequence[object]]) -> str:
    """`UPCAST(o0, 8) THREAD(o1, 2)`: a chain as people read it; "as it is" for the empty one."""
    def word(x: object) -> str:
        return "[" + " ".join(map(word, x)) + "]" if isinstance(x, (list, tuple)) else str(x)
    return " ".join(f"{opt[0]}({', '.join(word(x) for x in opt[1:] if x is not None)})" for opt in chain) or "as it is"
