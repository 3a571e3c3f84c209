"""The events of a running search. The command line shows them, `prepare` counts finished kernels, and tests compare traces."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from svod.config import BeamConfig
from svod.core.kernel.chain_text import AS_IT_IS
from svod.system.quantities import seconds as in_words
from svod.tune.workers.executor import Activity

LIMIT = "limit"             # the status of a candidate that exceeds a limit of the search


@dataclass(frozen=True)
class SearchEvent:
    """Base of the events. `kernel` is the key of the kernel concerned, empty for the whole session. All times are seconds."""

    kernel: str


@dataclass(frozen=True)
class SessionStarted(SearchEvent):
    kernels: int
    budget: float
    executor: str
    target: str = ""          # the key of the target


@dataclass(frozen=True)
class DriverBusy(SearchEvent):
    """The workers wait for this process, which does `what`, until the next event."""

    what: str


@dataclass(frozen=True)
class KernelStarted(SearchEvent):
    name: str
    seeds: int
    bound: float              # the roofline bound of a call


@dataclass(frozen=True)
class BaselineTimed(SearchEvent):
    seconds: float            # time of the heuristic's code


@dataclass(frozen=True)
class RoundFinished(SearchEvent):
    """A round has ended. The counts are of the round's candidates; `best` and `chain` are the time and the chain of the incumbent."""

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
    """A new verified incumbent was found."""

    seconds: float
    before: float
    chain: str


@dataclass(frozen=True)
class CandidateTimed(SearchEvent):
    """A candidate was timed alone, and is fast enough to be raced."""

    seconds: float
    chain: str


@dataclass(frozen=True)
class CandidateDropped(SearchEvent):
    """A candidate exceeds a limit of the search (status `limit`), is known (`duplicate`), is far slower than the best, failed, or its
    output is wrong. `status` is a `svod.tune.measure.candidate.Status`."""

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
class FleetSampled(SearchEvent):
    """The current activity of the workers and the progress of the session. The session's watcher thread sends it every few seconds, not
    the search. `per_second`: recent rate of timed candidates. `left`: seconds of the budget that are left. `minute_gain`: seconds of a run
    of the model that another minute of search is expected to save; None while that is unknown. `went`: number of dropped candidates by
    status."""

    workers: tuple[Activity, ...]
    candidates: int
    per_second: float
    left: float
    minute_gain: float | None
    went: Mapping[str, int]


@dataclass(frozen=True)
class SessionEnding(SearchEvent):
    """Ctrl-C has ended the search. The best chains of `kernels` kernels are being confirmed."""

    kernels: int


@dataclass(frozen=True)
class SessionFinished(SearchEvent):
    kernels: int
    candidates: int
    elapsed: float
    interrupted: bool


Listener = Callable[[SearchEvent], None]


def nobody(event: SearchEvent) -> None:
    """A listener that ignores everything."""


def debug_line(event: SearchEvent, config: BeamConfig) -> str | None:
    """The line to print for an event, or None. BEAM_DEBUG=1 prints each round and the end of each kernel, 2 also the outcome of each
    candidate; BEAM_LOG_SURPASS_MAX prints the candidates that exceed a limit."""
    level = config.debug
    if level >= 1 and isinstance(event, RoundFinished):
        return (f"round {event.round}: {event.proposed} proposed, {event.timed} timed, {event.failed} failed, best {in_words(event.best)}: "
                f"{event.chain or AS_IT_IS}{' (noisy)' if event.noisy else ''}")
    if level >= 1 and isinstance(event, KernelFinished):
        return f"ended, {event.why}: {event.chain or AS_IT_IS}"
    if level >= 2 and isinstance(event, CandidateTimed):
        return f"{event.chain or AS_IT_IS}: {in_words(event.seconds)}"
    if isinstance(event, CandidateDropped) and (level >= 2 or (config.log_surpass_max and event.status == LIMIT)):
        return f"{event.chain or AS_IT_IS} dropped, {event.status}: {event.reason}"
    return None
