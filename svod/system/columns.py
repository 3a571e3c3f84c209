"""Tables, times and sizes as text of a fixed width: what `svod.profile` and `plan.analyze()` print."""
from __future__ import annotations

from collections.abc import Sequence


def percent(value: float | None) -> str:
    """A part of 1: "9.5 %", "71 %"; nothing for None."""
    return "" if value is None else f"{100 * value:.1f} %" if value < 0.0995 else f"{100 * value:.0f} %"


def duration(seconds: float) -> str:
    """With the unit that keeps three digits: "1.5 ms", "120 µs", "0 ns"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:        # which is 1 in three digits
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def amount(count: float, unit: str) -> str:
    """With a prefix of 1000: "33.6 MFLOP", "1.05 MB", "0 B"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:      # which is 1 in three digits
            return f"{count / size:.3g} {prefix}{unit}"
    return f"{count:.0f} {unit}"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], right: set[int], width: int) -> list[str]:
    """Aligned lines; columns in `right` are aligned there. The first and, if it is text, the last are cut where lines would be longer than
    `width` characters (60 at least)."""
    widths = [max(len(r[i]) for r in (header, *rows)) for i in range(len(header))]
    for i in (len(header) - 1, 0):
        if i not in right:
            widths[i] = max(12, widths[i] - max(0, sum(widths) + 2 * (len(widths) - 1) - max(60, width)))

    def line(cells: Sequence[str]) -> str:
        cut = [c if len(c) <= w else f"{c[:w - 1]}…" for c, w in zip(cells, widths, strict=True)]
        return "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cut, widths, strict=True))).rstrip()
    return [line(header), *map(line, rows)]
