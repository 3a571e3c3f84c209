"""What changed that a captured function may have read: memory that svod wrote, and attributes that were replaced.

A buffer counts the writes to it (`Buffer.version`). `changes.count` grows with every write to a buffer that somebody watches, and with
every other change that svod sees. So a caller that remembers the count knows by one comparison that nothing changed.
"""
from __future__ import annotations

from collections.abc import Iterable

from svod.core.graph.buffer import Buffer


class _Changes:
    """The number of changes so far. It may grow twice for one change, and never stays for one."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


changes = _Changes()


def note_change() -> None:
    """A value that a captured function may have read was replaced."""
    changes.count += 1


def note_writes(buffers: Iterable[Buffer]) -> None:
    """The content of the buffers was written."""
    for buffer in buffers:
        buffer.version += 1
        if buffer.watched:
            changes.count += 1


def share(buffer: Buffer) -> None:
    """From now on others than svod can write to the memory of a buffer."""
    buffer.shared, buffer.given = True, None
    note_writes([buffer])
