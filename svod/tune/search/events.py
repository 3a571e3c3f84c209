"""What a search says while it runs. The command line draws these, `prepare` logs two of them, tests compare traces."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchEvent:
    """Root of the events; `kernel` is the key of the kernel concerned, empty for the whole session."""

    kernel: str


@dataclass(frozen=True)
class SessionStarted(SearchEvent):
    """Before anything is searched. Seconds."""

    kernels: int
    budget: float
    executor: str


@dataclass(frozen=True)
class KernelStarted(SearchEvent):
    name: str
    seeds: int
    bound: float              # seconds the roofline allows


@dataclass(frozen=True)
class BaselineTimed(SearchEvent):
    """The heuristic's time, seconds."""

    seconds: float


@dataclass(frozen=True)
class RoundFinished(SearchEvent):
    """One round of one kernel. Counts are of this round, times in seconds."""

    round: int
    proposed: int
    built: int
    timed: int
    wrong: int
    failed: int
    queued: int
    best: float
    chain: str
    elapsed: float
    noisy: bool


@dataclass(frozen=True)
class Improved(SearchEvent):
    """A new verified incumbent, seconds."""

    seconds: float
    before: float
    chain: str


@dataclass(frozen=True)
class CandidateDropped(SearchEvent):
    """A candidate that failed or computed something wrong."""

    status: str
    reason: str
    chain: str


@dataclass(frozen=True)
class KernelFinished(SearchEvent):
    """The search of one kernel is over; `why` says what ended it. Seconds."""

    seconds: float
    heuristic: float
    chain: str
    why: str
    verified: bool


@dataclass(frozen=True)
class SessionFinished(SearchEvent):
    kernels: int
    candidates: int
    elapsed: float
    interrupted: bool


Listener = Callable[[SearchEvent], None]


def nobody(event: SearchEvent) -> None:
    """A listener that ignores everything."""
