"""One candidate of a search: a kernel state, its origin, its status, and its measurements.

A candidate passes through the steps of a round in this order, and stops at the first that rejects it:

    queued → lowered → built → screened → raced → verified

`status` is the step it has reached, or why it was dropped; `reason` says so in words. A candidate's state never changes after it was
proposed. Only a shorter chain that ends in the same state may replace `chain`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.scheduler import Opt, Scheduler


class Status(StrEnum):
    """The last step that a candidate reached, or the reason why it was dropped. The values are stored: never rename one."""

    QUEUED = "queued"          # proposed, not lowered yet
    LIMIT = "limit"            # exceeds a limit (BEAM_UPCAST_MAX …), or has far more operations than others of its round
    DUPLICATE = "duplicate"    # its LINEAR was seen before
    ERROR = "error"            # lowering, compiling or running raised; the reason holds the message
    CRASH = "crash"            # the worker died; the reason names the signal
    TIMEOUT = "timeout"        # over the compile deadline or the kill deadline
    LOST = "lost"              # infrastructure failed three times
    LATE = "late"              # the budget was over before a worker answered: nothing is known of it, and nothing is stored
    LOWERED = "lowered"
    BUILT = "built"
    SLOW = "slow"              # its screening was stopped because it is far behind; `seconds` has its time so far
    SCREENED = "screened"      # was timed alone, and has samples
    RACED = "raced"
    VERIFIED = "verified"      # raced, and its output is right
    WRONG = "wrong"            # its output is wrong


FAILED = frozenset({Status.ERROR, Status.CRASH, Status.TIMEOUT, Status.LOST, Status.LATE, Status.WRONG})
DROPPED = FAILED | {Status.LIMIT, Status.DUPLICATE, Status.SLOW}


class Origin(StrEnum):
    """The source that proposed a candidate."""

    UNTOUCHED = "untouched"
    HEURISTIC = "heuristic"
    DATABASE = "database"
    RELATIVE = "relative"      # its chain was adapted from a related kernel
    SKETCH = "sketch"
    ACTION = "action"
    MUTATION = "mutation"
    CROSSOVER = "crossover"
    WALK = "walk"
    TRIAL = "trial"


SEEDS = frozenset({Origin.UNTOUCHED, Origin.HEURISTIC, Origin.DATABASE, Origin.SKETCH})


def chain_order(chain: Sequence[Opt]) -> tuple[int, str]:
    """A sort key: shorter chains first, then by text. Of two chains to the same state the first by this key is kept."""
    return len(chain), chain_text(chain)


@dataclass(slots=True, eq=False)
class Candidate:
    """One state of a kernel with its measurements. Times are seconds of one execution of the whole kernel."""

    state: Scheduler
    chain: tuple[Opt, ...]
    origin: Origin
    predicted: float = float("inf")         # cycles, as the analytic cost model predicts
    round: int = 0                          # the round that measured it
    status: Status = Status.QUEUED
    reason: str = ""
    linear: str = ""                        # hex digest of LINEAR
    size: int = 0                           # len(LINEAR)
    work: float | None = None               # operations of one run; None: not known
    built: Any = None                       # svod.tune.measure.measurer.Built, kept while it may be timed again
    samples: tuple[float, ...] = ()
    seconds: float = float("inf")           # the least sample of its screening
    score: float = float("inf")             # seconds by its last race: the incumbent's score × the ratio to the incumbent
    noisy: bool = False
    expanded: bool = False
    known: dict[str, Any] = field(default_factory=dict)  # for the database. "how": the way it was verified; "confirmed": its `Confirmed`

    @property
    def digest(self) -> bytes:
        return self.state.digest

    @property
    def order(self) -> tuple[float, int, str]:
        """A sort key, best candidates first: by score, then by chain."""
        return (self.score, *chain_order(self.chain))

    @property
    def fitness(self) -> float:
        """The candidate's seconds by its last race, or by its screening if it was never raced."""
        return self.score if self.score < float("inf") else self.seconds

    def fail(self, status: Status, reason: str) -> None:
        self.status, self.reason, self.built = status, reason, None
