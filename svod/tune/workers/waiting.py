"""Items that wait for a worker, by the worker that is to have them."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Homed(Protocol):
    @property
    def home(self) -> str:
        """The worker that is preferred; "": none."""


T = TypeVar("T", bound=Homed)


class Waiting(Generic[T]):
    """First come, first served among the items of one home. A worker takes its own items first, then those without a home, then what
    another one would take last: from the one that has most of them. None of this takes longer where more items wait."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._by_home: dict[str, deque[T]] = {}
        self.extend(items)

    def __len__(self) -> int:
        return sum(map(len, self._by_home.values()))

    def __iter__(self) -> Iterator[T]:
        for items in self._by_home.values():
            yield from items

    def extend(self, items: Iterable[T]) -> None:
        for item in items:
            self._by_home.setdefault(item.home, deque()).append(item)

    def extend_left(self, items: Iterable[T]) -> None:
        """Put items, in this order, before all others of their homes."""
        for item in reversed(list(items)):
            self._by_home.setdefault(item.home, deque()).appendleft(item)

    def take(self, worker: str, fits: Callable[[T], bool]) -> T | None:
        """Remove the item that a worker takes next of those that fit it; None where none does."""
        for home in (worker, ""):
            items = self._by_home.get(home, deque())
            at = next((i for i, item in enumerate(items) if fits(item)), None)
            if at is not None:
                return self._remove(home, at)
        for home in sorted(self._by_home, key=lambda h: len(self._by_home[h]), reverse=True):
            items = self._by_home[home]
            at = next((i for i in reversed(range(len(items))) if fits(items[i])), None)
            if at is not None:
                return self._remove(home, at)
        return None

    def _remove(self, home: str, at: int) -> T:
        items = self._by_home[home]
        item = items[at]
        del items[at]
        if not items:
            del self._by_home[home]
        return item
