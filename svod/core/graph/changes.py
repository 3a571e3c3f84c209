"""A process-wide count of changes that may outdate a captured function: writes to memory by svod, and replaced attributes.

Each buffer counts the writes to it (`Buffer.version`). `changes.count` grows with every write to a buffer that a capture watches, and with
every other change that svod sees. So a caller that stored the count learns by one comparison that nothing has changed since.
"""
from __future__ import annotations

from collections.abc import Iterable

from svod.core.graph.buffer import Buffer


class _Changes:
    """The number of changes so far. Each change raises it by at least one."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


changes = _Changes()


def note_change() -> None:
    """Count the replacement of a value that a captured function may have read."""
    changes.count += 1


def note_writes(buffers: Iterable[Buffer]) -> None:
    """Count a write to the content of each buffer."""
    for buffer in buffers:
        buffer.version += 1
        if buffer.watched:
            changes.count += 1


def share(buffer: Buffer) -> None:
    """Mark the memory of a buffer as writable by code outside svod from now on."""
    buffer.shared, buffer.given = True, None
    note_writes([buffer])
