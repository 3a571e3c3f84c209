"""The events of a running search. The command line shows them, `prepare` counts finished kernels, and tests compare traces."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from svod.system.quantities import seconds as in_words


@dataclass(frozen=True)
class SearchEvent:
    """Base of the events. `kernel` is the key of the kernel concerned, empty for the whole session. All times are seconds."""

    kernel: str


@dataclass(frozen=True)
class SessionStarted(SearchEvent):
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
    seconds: float            # of the heuristic


@dataclass(frozen=True)
class RoundFinished(SearchEvent):
    """The counts are of this round."""

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
    """There is a new verified incumbent."""

    seconds: float
    before: float
    chain: str


@dataclass(frozen=True)
class CandidateDropped(SearchEvent):
    """A candidate failed, or its output is wrong."""

    status: str
    reason: str
    chain: str


@dataclass(frozen=True)
class KernelFinished(SearchEvent):
    """The search of one kernel is over; `why` says what ended it."""

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


def debug_line(event: SearchEvent, level: int) -> str | None:
    """What BEAM_DEBUG=`level` prints of an event: at 1 each round and the end of each kernel, at 2 each dropped candidate too."""
    if level >= 1 and isinstance(event, RoundFinished):
        return (f"round {event.round}: {event.proposed} proposed, {event.timed} timed, {event.failed} failed, best {in_words(event.best)}: "
                f"{event.chain or 'as it is'}{' (noisy)' if event.noisy else ''}")
    if level >= 1 and isinstance(event, KernelFinished):
        return f"ended, {event.why}: {event.chain or 'as it is'}"
    if level >= 2 and isinstance(event, CandidateDropped):
        return f"{event.chain or 'as it is'} dropped, {event.status}: {event.reason}"
    return None
