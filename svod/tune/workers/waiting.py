"""A queue of items that wait for workers. Each item may name the worker that it prefers, its home."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Homed(Protocol):
    @property
    def home(self) -> str:
        """The name of the worker that should take the item; "" if any may."""


T = TypeVar("T", bound=Homed)


class Waiting(Generic[T]):
    """A queue of items by home; items of one home are served first come, first served. A worker takes the items of its own home first,
    then items without a home, then the last item of the home that has the most. The time to take an item does not grow with their number.
    """

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
        """Remove and return the next item for a worker among the items that `fits` accepts; None where it accepts none."""
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
