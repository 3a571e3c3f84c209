"""Rows of two texts: no line is lost, unmarked pieces are the same on both sides, and only changed words are marked."""
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from svod.steps.changes import CONTEXT, SHORT, Piece, Row, compare, counts, shortened

LINES = ["for o0 in 0…64", "  for o0 in 0…64 by 8", "acc = 0", "    acc = 0", "acc += p1[o0]", "acc += p1[o1]", "", "tile o0 8"]
lines = st.lists(st.sampled_from(LINES), max_size=9).map("\n".join)


def text_of(pieces: tuple[Piece, ...]) -> str:
    return "".join(p.text for p in pieces)


def kept(pieces: tuple[Piece, ...]) -> str:
    return "".join(p.text for p in pieces if not p.marked)


@given(lines, lines)
def test_both_texts_can_be_read_off_the_rows(before: str, after: str) -> None:
    rows = compare(before, after)
    assert "\n".join(text_of(r.before) for r in rows if r.kind != "come") == before
    assert "\n".join(text_of(r.after) for r in rows if r.kind != "gone") == after
    for r in rows:
        if r.kind in ("same", "moved", "changed"):
            assert kept(r.before) == kept(r.after)
        marked = [p for p in (*r.before, *r.after) if p.marked]
        assert bool(marked) == (r.kind != "same") or text_of((*r.before, *r.after)) == ""
        if r.kind == "moved":
            assert all(p.text.strip() == "" for p in marked)


def test_a_word_that_changed_is_marked_and_no_other() -> None:
    (row,) = compare("for o1 in 0…96", "for o1 in 0…96 by 24")
    assert row == Row("changed", (Piece("for o1 in 0…96", False),), (Piece("for o1 in 0…96", False), Piece(" by 24", True)))
    (row,) = compare("acc += p1[8·o0 + r0]", "acc += p1[16·o0 + r0]")
    assert [p.text for p in (*row.before, *row.after) if p.marked] == ["8", "16"]


def test_a_loop_around_others_is_new_and_they_move() -> None:
    rows = compare("for a\n  x = 1\n  y = 2", "parallel b\n  for a\n    x = 1\n    y = 2")
    assert [r.kind for r in rows] == ["come", "moved", "moved", "moved"] and counts(rows) == {"come": 1, "moved": 3}
    assert [r.sign for r in rows] == ["+", "⇥", "⇥", "⇥"]


def test_lines_that_have_nothing_in_common_do_not_stand_for_each_other() -> None:
    assert [r.kind for r in compare("acc = 0", "tile o1 24 (vector)")] == ["gone", "come"]
    assert counts(compare("a\nb", "a\nb")) == {}


def test_a_long_text_is_shown_around_what_changed() -> None:
    before = [f"line {i}" for i in range(3 * SHORT)]
    after = [*before[:100], "another", *before[100:]]
    rows = shortened(compare("\n".join(before), "\n".join(after)))
    assert [r.kind for r in rows] == ["left out", *["same"] * CONTEXT, "come", *["same"] * CONTEXT, "left out"]
    assert sum(r.count for r in rows) == len(after) and rows[0].count == 100 - CONTEXT
    short = compare("\n".join(before[:9]), "\n".join([*before[:8], "new"]))
    assert shortened(short) == short
