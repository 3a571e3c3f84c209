"""Loads the first operands of the next iteration before the last products of this one.

    LOOP r (acc):                                              WAIT;  BARRIER;  x = LOADMATRIX of r = 0
      WAIT;  BARRIER;  x = LOADMATRIX                          LOOP r (acc, x):
      acc = MMA acc, x;  y = LOADMATRIX;  acc = MMA acc, y       acc = MMA acc, x;  y = LOADMATRIX
                                                                 WAIT;  BARRIER;  x = LOADMATRIX of r + 1;  acc = MMA acc, y

Matrix units would idle during the barrier and the loads after it; so the last products are issued meanwhile. Before the barrier all copies
are committed, and all reads of shared memory are done. The last iteration loads operands that are never used, from a buffer that is
filled. An operand that lies whole beside the buffers of the copies has no such buffer: its loop loads nothing early."""
from __future__ import annotations

from collections.abc import Container, Iterable

from svod.compile.lower.builder import Builder
from svod.compile.lower.linear import ARITY

_WAITS = ["WAIT", "BARRIER"]
_PURE = frozenset({*ARITY, "CAST", "LOADMATRIX"})       # operations without side effects, which may move to another place
_BESIDE = frozenset({*_PURE, *_WAITS, "MMA", "LOOP", "CARRY", "COPY_ASYNC", "COMMIT"})


def load_early(b: Builder, loop: int, start: int, stride: int, following: list[int], areas: Container[int]) -> list[int]:
    """Change the innermost loop, which begins at `start` and copies into `areas` of shared memory, so that it loads operands early; returns
    the values that it carries to the next iteration. These are the sums `following` and the operands; only the sums if the loop is of
    another form, which leaves it unchanged."""
    code, level, count = b.code[b.level], b.level, len(following)
    products = [n for n in code if b.op[n] == "MMA"]
    if not count or len(products) < 2 * count or not _is_known(b, code, products, following):
        return following
    last = products[-count:]
    at, waits = code.index(last[0]), [n for n in code if b.op[n] in _WAITS]
    loads = list(dict.fromkeys(s for n in products[:count] for s in b.src[n][1:]))
    if not set(loads) <= set(code[:at]):
        return following
    needed = _needed(b, code, loads)
    if not all(b.arg[b.src[n][0]] in areas for n in needed if b.op[n] == "LOADMATRIX"):
        return following
    first = _copied(b, [*waits, *needed], {loop: start}, level - 1)
    head, tail, size = code[:at], code[at:], len(code)
    carried = [b.carry(loop, first[n], len(b.src[loop]) - 2 + k) for k, n in enumerate(loads)]
    b.src[loop] = (*b.src[loop], *[first[n] for n in loads])
    ahead = b.add(loop, b.index(stride))
    later = _copied(b, [*waits, *needed], {loop: ahead}, level)
    made = [n for n in code[size:] if n not in carried]
    given = dict(zip(loads, carried, strict=True))
    for n in (*head, *tail):
        b.src[n] = tuple([given.get(s, s) for s in b.src[n]])
    begins = [n for n in head if b.op[n] in ("LOOP", "CARRY")]
    left_out = {*begins, *waits, *loads}
    code[:] = [*begins, *carried, *[n for n in head if n not in left_out], *[n for n in tail if b.op[n] != "MMA"], *made, *last]
    return [*following, *[later[n] for n in loads]]


def _is_known(b: Builder, code: list[int], products: list[int], following: list[int]) -> bool:
    """Whether a loop has one wait and one barrier, computes nothing but products of operands in shared memory, and ends with the products
    that give `following`."""
    last = products[-len(following):]
    waits = [b.op[n] for n in code if b.op[n] in _WAITS]
    behind = {b.op[n] for n in code[code.index(last[0]):]}
    return set(last) == set(following) and waits == _WAITS and behind <= {"MMA", *_PURE} and {b.op[n] for n in code} <= _BESIDE


def _needed(b: Builder, code: list[int], values: Iterable[int]) -> list[int]:
    """The instructions of the loop that compute some values, these included, in program order."""
    found, open_ = set[int](), list(values)
    inside = {n for n in code if b.op[n] in _PURE}
    while open_:
        n = open_.pop()
        if n in inside and n not in found:
            found.add(n)
            open_ += b.src[n]
    return [n for n in code if n in found]


def _copied(b: Builder, nodes: Iterable[int], given: dict[int, int], level: int) -> dict[int, int]:
    """Repeat instructions at the end of a loop level; returns old value → new value. `given`: operands to replace."""
    done = dict(given)
    for n in nodes:
        done[n] = b.again(n, tuple([done.get(s, s) for s in b.src[n]]), level)
    return done
