"""The changes from one text to another, line by line and word by word.

    before                     after
      for o0 in 0…64           ~ for o0 in 0…64 by [8]
                               + tile o0 8
      acc = 0                  ⇥   acc = 0

A row shows a line of the old text on the left and its counterpart in the new text on the right. If it has both, their unmarked pieces are
the same text.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

Kind = Literal["same", "moved", "changed", "gone", "come", "left out"]

SIGNS: dict[Kind, str] = {"same": " ", "moved": "⇥", "changed": "~", "gone": "−", "come": "+", "left out": "⋯"}
ALIKE = 0.5             # minimum similarity (0 to 1) of two lines shown as one changed line, not as one removed and one added
MOST_PAIRS = 4096       # maximum of removed × added lines searched for changed lines; larger blocks are shown as removed and added
CONTEXT = 3             # unchanged lines shown before and after each change
SHORT = 60              # maximum number of lines of a text that is shown without omissions
_WORD = re.compile(r"\w+|\s|[^\w\s]")


class Piece(NamedTuple):
    """A part of a line. `marked`: the line on the other side does not have it."""

    text: str
    marked: bool


@dataclass(frozen=True)
class Row:
    """A line of the old text and its counterpart in the new text; a side that lacks the line is (). `kind`: "moved" if only the
    indentation differs; "left out" stands for `count` lines that are the same on both sides."""

    kind: Kind
    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()
    count: int = 1

    @property
    def sign(self) -> str:
        return SIGNS[self.kind]


def compare(before: str, after: str) -> list[Row]:
    """Compare two texts; returns a row per line, in order. Indentation is ignored in matching, so that a line that only moves into
    another loop is still recognised."""
    old, new = before.split("\n"), after.split("\n")
    rows: list[Row] = []
    matcher = SequenceMatcher(None, [line.strip() for line in old], [line.strip() for line in new], autojunk=False)
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag == "equal":
            rows.extend(map(_beside, old[a:a_end], new[b:b_end]))
        else:
            rows.extend(_replaced(old[a:a_end], new[b:b_end]))
    return rows


def shortened(rows: Sequence[Row]) -> list[Row]:
    """Replace stretches of equal rows far from any change by one "left out" row each. Short texts stay complete."""
    if len(rows) <= SHORT:
        return list(rows)
    near = {j for i, r in enumerate(rows) if r.kind != "same" for j in range(i - CONTEXT, i + CONTEXT + 1)}
    kept: list[Row] = []
    for i, r in enumerate(rows):
        if i in near:
            kept.append(r)
        elif kept and kept[-1].kind == "left out":
            kept[-1] = Row("left out", count=kept[-1].count + 1)
        else:
            kept.append(Row("left out"))
    return kept


def counts(rows: Sequence[Row]) -> dict[Kind, int]:
    """Count the lines that have come, are gone, changed and moved; kinds that do not occur are missing."""
    kinds: tuple[Kind, ...] = ("come", "gone", "changed", "moved")
    return {kind: n for kind in kinds if (n := sum(r.kind == kind for r in rows))}


def _beside(old: str, new: str) -> Row:
    """Make the row of an old line and the new line that is its counterpart."""
    if old == new:
        return Row("same", (Piece(old, False),), (Piece(new, False),))
    words, others = _WORD.findall(old), _WORD.findall(new)
    before: list[Piece] = []
    after: list[Piece] = []
    for tag, a, a_end, b, b_end in SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        for side, text in ((before, "".join(words[a:a_end])), (after, "".join(others[b:b_end]))):
            if text:
                side.append(Piece(text, tag != "equal"))
    return Row("moved" if old.strip() == new.strip() else "changed", tuple(before), tuple(after))


def _replaced(old: Sequence[str], new: Sequence[str]) -> Iterator[Row]:
    """Make the rows of old lines that were replaced by new ones, in order: similar lines share a row, every other line has a row alone."""
    a = b = 0
    for i, j in [*_pairs(old, new), (len(old), len(new))]:
        yield from (Row("gone", (Piece(line, True),)) for line in old[a:i])
        yield from (Row("come", (), (Piece(line, True),)) for line in new[b:j])
        if i < len(old):
            yield _beside(old[i], new[j])
        a, b = i + 1, j + 1


def _pairs(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs (old position, new position) of similar lines, both ascending: the choice with the largest sum of similarity ratios."""
    if not old or not new or len(old) * len(new) > MOST_PAIRS:
        return []
    words = [_WORD.findall(line.strip()) for line in new]
    # (largest sum so far, step in old, step in new), by position in old and new
    best: list[list[tuple[float, int, int]]] = [[(0.0, 0, 0)] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i, line in enumerate(old):
        matcher = SequenceMatcher(None, autojunk=False)
        matcher.set_seq2(_WORD.findall(line.strip()))
        for j, other in enumerate(words):
            matcher.set_seq1(other)
            ratio = matcher.ratio() if matcher.real_quick_ratio() >= ALIKE else 0.0
            together = best[i][j][0] + ratio if ratio >= ALIKE else -1.0
            best[i + 1][j + 1] = max((together, 1, 1), (best[i][j + 1][0], 1, 0), (best[i + 1][j][0], 0, 1))
    pairs: list[tuple[int, int]] = []
    i, j = len(old), len(new)
    while i and j:
        _, down, right = best[i][j]
        if down and right:
            pairs.append((i - 1, j - 1))
        i, j = i - down, j - right
    return pairs[::-1]
