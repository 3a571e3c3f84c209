"""The pace of a search: estimates of how long the parts of a round take, from the latest rounds."""
from __future__ import annotations

import statistics
from collections import deque

CHUNK_CANDIDATES = 24          # Candidates are built and screened in chunks of this size.
FIRST_CHUNK = 6                # The first chunk is smaller if the time is limited, as the pace is not known yet.
ROUND_ENDS = 3                 # The end of the next round is predicted from the ends of this many latest rounds.
COMPILE_FLOOR_SECONDS, COMPILE_FACTOR = 1.0, 20   # The compile deadline is max(1 s, 20 × the median so far).


class Pace:
    """Seconds that the parts of a round took. `timeout`: the most seconds that a compilation may take.

    building        seconds to build and screen one candidate, in the latest chunk
    verifying       seconds to verify one candidate, in the latest verification
    compilations    seconds of the compilation of each candidate so far
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.building = self.verifying = 0.0
        self.compilations: list[float] = []
        self._round_ends: deque[float] = deque(maxlen=ROUND_ENDS)

    @property
    def compile_deadline(self) -> float:
        """The seconds that one candidate may compile."""
        usual = COMPILE_FACTOR * statistics.median(self.compilations) if self.compilations else self.timeout
        return min(self.timeout, max(COMPILE_FLOOR_SECONDS, usual))

    @property
    def round_end(self) -> float:
        """The expected seconds from the last chunk of candidates in the next round to the round's end: as many as in the longest of the
        latest rounds, because rounds whose races are repeated take several times as long as others."""
        return max(self._round_ends, default=0.0)

    def end_round(self, seconds: float) -> None:
        """Remember the seconds from the last chunk of candidates in a round to the round's end."""
        self._round_ends.append(seconds)

    def chunk_size(self, seconds: float) -> int:
        """The number of candidates that can be built within `seconds`."""
        if seconds == float("inf"):
            return CHUNK_CANDIDATES
        if self.building == 0.0:
            return FIRST_CHUNK
        return max(1, min(CHUNK_CANDIDATES, int(seconds / self.building)))
