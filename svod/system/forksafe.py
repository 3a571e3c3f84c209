"""Locks in processes that fork. A child inherits a lock in its current state, without the thread that holds it.

    _lock = threading.Lock()
    remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)

If a thread forks inside `with _lock`, the child leaves that block, too: it releases the old lock object, and the attribute already holds
a new lock.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_owners: WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = WeakKeyDictionary()


def remake_after_fork(owner: Any, name: str, make: Callable[[], Any]) -> None:
    """Register that a forked child sets attribute `name` of `owner` (a module, a class or an object) to `make()`, if the owner still
    lives."""
    _owners.setdefault(owner, {})[name] = make


def _after_fork_in_child() -> None:
    for owner, attributes in list(_owners.items()):
        for name, make in attributes.items():
            setattr(owner, name, make())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
