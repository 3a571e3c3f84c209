"""The choice of a waiting item by a worker."""
from __future__ import annotations

import random
from dataclasses import dataclass

from svod.tune.workers.waiting import Waiting


@dataclass(eq=False)
class Item:
    number: int
    home: str = ""


def test_a_worker_takes_its_own_then_what_nobody_has_then_what_others_take_last() -> None:
    waiting = Waiting([Item(0, "a"), Item(1), Item(2, "b"), Item(3, "a"), Item(4), Item(5, "b"), Item(6, "b")])
    waiting.extend_left([Item(7), Item(8, "a")])
    assert len(waiting) == 9 and {i.number for i in waiting} == set(range(9))
    taken = [waiting.take("a", lambda item: True) for _ in range(9)]
    assert [i.number for i in taken if i is not None] == [8, 0, 3, 7, 1, 4, 6, 5, 2]
    assert waiting.take("a", lambda item: True) is None and len(waiting) == 0


def test_what_does_not_fit_stays_where_it_is() -> None:
    waiting = Waiting([Item(0, "a"), Item(1, "a"), Item(2), Item(3, "b")])
    assert [item.number for n in (1, 3, 2) if (item := waiting.take("a", lambda i, n=n: i.number == n)) is not None] == [1, 3, 2]
    assert waiting.take("a", lambda item: item.number == 9) is None and [i.number for i in waiting] == [0]


def test_every_item_is_taken_once_whoever_asks() -> None:
    rng = random.Random(0)
    waiting = Waiting(Item(i, rng.choice(["", "a", "b", "c"])) for i in range(200))
    taken = [waiting.take(rng.choice("abcd"), lambda item: True) for _ in range(200)]
    assert sorted(i.number for i in taken if i is not None) == list(range(200))
