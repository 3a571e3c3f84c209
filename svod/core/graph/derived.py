"""A cache, shared by all plans, of results computed from the content of buffers: weights rearranged for a kernel, folded constants.

A result is cached on the first of its buffers by a weak reference, so it lives only as long as a plan holds it. It is found as long as the
contents are unchanged: svod has not written to the buffers since, and code outside svod cannot write to them without svod noticing.
"""
from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from svod.core.graph.buffer import Buffer
from svod.system.forksafe import remake_after_fork

Result = TypeVar("Result")

_lock = threading.Lock()
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)


def find_derived(buffers: Sequence[Buffer], what: Hashable) -> Any:
    """Return the result of kind `what` that was computed from the content of `buffers` and still exists, or None."""
    with _lock:
        return _known(buffers).get(_key(buffers, what))


def remember_derived(buffers: Sequence[Buffer], what: Hashable, result: Result) -> Result:
    """Cache `result` for `find_derived`. Returns the cached one: the first, if two threads computed it at the same time."""
    with _lock:
        first: Result = _known(buffers).setdefault(_key(buffers, what), result)
        return first


def _known(buffers: Sequence[Buffer]) -> Any:
    """Return the results that are cached on the first buffer; an empty dictionary if the content can change without svod's knowledge."""
    if not buffers or any(b.shared and not b.watched for b in buffers):
        return {}
    first = buffers[0]
    if first.derived is None:
        first.derived = weakref.WeakValueDictionary()
    return first.derived


def _key(buffers: Sequence[Buffer], what: Hashable) -> Hashable:
    return what, tuple([(b, b.version) for b in buffers])
