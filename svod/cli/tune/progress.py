"""The display of a search's progress: a live view on a terminal, lines elsewhere, and JSON Lines with --log-json. Its sources are the
events of `svod.tune.search.events` and the activity of the executor's workers.

    svod-tune: 12 kernels, beam 8, 115 s, 2 Ray workers
    [  14 s] conv layer1.0.conv1      1.46 ms → 0.61 ms   2.39× so far
    [  30 s] 412 candidates, 14 a second, a chain leads in 5 of 12 kernels so far, 85 s left, 2.1 % less time expected in another minute;
             2 workers compile, 1 idle

A chain that leads while a search runs has only won races. The confirmation tells whether it is faster; its times are in the table at the
end.
"""
from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO

from svod.cli.tune.event_log import EventLog
from svod.cli.tune.survey import SurveyRow
from svod.config import BeamConfig
from svod.system.process.streams import is_terminal
from svod.system.quantities import NOTHING, count, digits
from svod.system.quantities import seconds as in_words
from svod.tune.measure.candidate import Status
from svod.tune.search import events
from svod.tune.search.budget import gain_within
from svod.tune.search.events import SearchEvent
from svod.tune.workers.executor import Activity

HEARTBEAT = 15.0        # seconds between lines when nothing improves
QUIET = 2.0             # seconds between two lines about one kernel
TICK = 1.0              # seconds between looks at the workers
RATE_OVER = 30.0        # the rate of candidates is the mean over this many seconds
SAMPLE = 5.0            # seconds between samples of the workers' activity in the log
MINUTE = 60.0
REFRESH_PER_SECOND = 4  # number of times per second that the live view is redrawn
WIDTH_NAME = 28         # characters of a kernel's label in a line
NARROW_TERMINAL_COLUMNS = 60    # in a terminal with fewer columns only a kernel's name, best time and gain are shown
FEWEST_WORKER_ROWS = 3  # rows that the live view always has for workers, however low the terminal is

# status of dropped candidates → words for it; other statuses are shown unchanged
WENT: dict[str, str] = {
    Status.LIMIT: "over a limit", Status.DUPLICATE: "duplicate", Status.ERROR: "failed", Status.CRASH: "crashed",
    Status.TIMEOUT: "over a deadline", Status.LOST: "lost with their workers",
    Status.LATE: "not measured in time", Status.WRONG: "wrong"}


@dataclass
class _State:
    """The displayed state of a kernel. It has the interface `svod.tune.search.budget.Budgeted`. Times are seconds of one call."""

    label: str
    share: float
    calls: float = 1.0
    heuristic: float | None = None
    best: float | None = None
    status: str = "waiting"
    said: float = float("-inf")
    said_best: float | None = None
    history: list[float] = field(default_factory=list)
    bound: float = 0.0
    spent: float = 0.0
    widened: int = 0
    finished: bool = False

    @property
    def leads(self) -> bool:
        """Whether a chain leads over the heuristic's."""
        return self.heuristic is not None and self.best is not None and self.best < 0.99 * self.heuristic

    @property
    def gain(self) -> str:
        return f"{self.heuristic / self.best:.2f}×" if self.heuristic and self.best else ""


class ProgressListener(AbstractContextManager["ProgressListener", None]):
    """A listener of a session, and the base of the displays: it collects the facts that all of them show. It is a context manager, and
    shows them while it is entered. `activity` returns the activity of the workers; a thread calls it once a second. `log` gets every event,
    and a sample of the workers' activity every few seconds."""

    def __init__(self, rows: Sequence[SurveyRow], activity: Callable[[], Sequence[Activity]] = tuple, log: EventLog | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.started = clock, clock()
        self.states = {r.key: _State(label(r), r.share, r.calls) for r in rows}
        self.budget, self.executor, self.candidates = 0.0, "", 0
        self.went: Counter[str] = Counter()     # numbers of dropped candidates by status
        self.workers: Sequence[Activity] = ()
        self.ending = ""        # a line about the confirmations after Ctrl-C; "" before
        self.driver = ""        # the work of this process that the workers wait for
        self._activity, self._log, self._sampled = activity, log, clock()
        self._counts: deque[tuple[float, int]] = deque([(self.started, 0)])     # (time, number of candidates until then)
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._keep_ticking, name="svod-progress", daemon=True)

    # -- knowledge ---------------------------------------------------------------------------------------------------------
    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    @property
    def left(self) -> float:
        return max(0.0, self.budget - self.elapsed)

    @property
    def per_second(self) -> float:
        """The number of candidates timed per second, over the last RATE_OVER seconds."""
        then, before = self._counts[0]
        return (self.candidates - before) / max(TICK, self.clock() - then)

    @property
    def minute_gain(self) -> float | None:
        """Seconds of a run of the model that another minute of search is expected to save; None while that is unknown."""
        return gain_within(self.states.values(), MINUTE)

    @property
    def leading(self) -> str:
        return f"a chain leads in {sum(s.leads for s in self.states.values())} of {count(len(self.states), 'kernel')} so far"

    @property
    def expected(self) -> str:
        """Words about the expected gain of another minute of search, as a share of the kernels' time; "" while that is unknown."""
        gain, whole = self.minute_gain, sum(s.calls * s.best for s in self.states.values() if s.best)
        return f"{digits(100 * gain / whole, 2)} % less time expected in another minute" if gain is not None and whole else ""

    @property
    def destinations(self) -> str:
        """The numbers of candidates that were timed and that were dropped, by the reason, in words."""
        slow = self.went[Status.SLOW]
        timed = f"{self.candidates} timed" + (f" ({slow} slow)" if slow else "")
        return ", ".join([timed, *(f"{n} {WENT.get(s, s)}" for s, n in self.went.most_common() if s != Status.SLOW)])

    # -- events -------------------------------------------------------------------------------------------------------------
    def update(self, event: SearchEvent) -> _State | None:
        """Record an event. Returns the state of its kernel."""
        self.driver = event.what if isinstance(event, events.DriverBusy) else ""
        if isinstance(event, events.SessionStarted):
            self.started, self.budget, self.executor = self.clock(), event.budget, event.executor
            self._counts = deque([(self.started, 0)])
        elif isinstance(event, events.SessionEnding):
            self.ending = f"Ctrl-C: confirming what was found in {count(event.kernels, 'kernel')}; Ctrl-C once more skips that"
        elif isinstance(event, events.CandidateTimed):
            self.candidates += 1
        elif isinstance(event, events.CandidateDropped):
            self.went[event.status] += 1
            self.candidates += event.status == Status.SLOW      # a slow candidate was timed, though not to the end
        state = self.states.get(event.kernel)
        if state is not None:
            _update_kernel(state, event)
        return state

    def __call__(self, event: SearchEvent) -> None:
        with self._lock:
            state = self.update(event)
            if self._log is not None:
                self._log.write(event)
            self.show(event, state)

    def show(self, event: SearchEvent, state: _State | None) -> None:
        """Print an event, if it is one that this display shows at once. `state`: the state of its kernel."""

    def tick(self) -> None:
        """Update the workers' activity and the rate of candidates. Called once a second."""
        with self._lock:
            now = self.clock()
            self.workers = self._activity()
            self._counts.append((now, self.candidates))
            while self._counts[0][0] < now - RATE_OVER:
                self._counts.popleft()
            if self._log is not None and now - self._sampled >= SAMPLE:
                self._sampled = now
                self._log.write(events.FleetSampled("", tuple(self.workers), self.candidates, self.per_second, self.left, self.minute_gain,
                                                    dict(self.went)))

    def _keep_ticking(self) -> None:
        while not self._over.wait(TICK):
            self.tick()

    def __enter__(self) -> ProgressListener:
        self.workers = self._activity()
        self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._ticker.join()
        if self._log is not None:
            self._log.close()


def _update_kernel(state: _State, event: SearchEvent) -> None:
    if isinstance(event, events.KernelStarted):
        state.status, state.bound, state.history, state.finished = "heuristic", event.bound, [], False
    elif isinstance(event, events.BaselineTimed):
        state.heuristic = state.best = event.seconds
        state.history = [event.seconds]
    elif isinstance(event, events.Improved):
        state.best = event.seconds
    elif isinstance(event, events.RoundFinished):
        state.status = f"round {event.round}"
        state.history.append(event.best)
        state.spent += event.elapsed
        if event.best < float("inf"):
            state.best = event.best
    elif isinstance(event, events.KernelFinished):
        state.status, state.finished = event.why or "done", True
        if event.heuristic < float("inf"):
            state.heuristic = event.heuristic
        state.best = event.seconds if event.seconds < float("inf") else None


# -- workers in words -------------------------------------------------------------------------------------------------------
def doing(worker: Activity) -> str:
    """The activity of a worker in a word or two: `race`, `idle`, `set aside: another svod`."""
    if worker.state == "busy":
        return re.sub(r"_candidates?$", "", worker.job).replace("_", " ") or "busy"
    return f"{worker.state}: {worker.job}" if worker.job else worker.state


def in_flight(workers: Sequence[Activity]) -> int:
    return sum(w.items for w in workers)


def workers_in_words(workers: Sequence[Activity]) -> str:
    """Count workers by their activity, busy ones first: `2 workers compile, 1 idle`."""
    ranked = sorted(workers, key=lambda w: w.state != "busy")
    counted = Counter(doing(w).partition(":")[0] for w in ranked)
    parts = [f"{n} {what}" for what, n in counted.items()]
    if parts:
        first, _, rest = parts[0].partition(" ")
        parts[0] = f"{count(int(first), 'worker')} {rest}"
    return ", ".join(parts)


def _since(seconds: float) -> str:
    """The words for a duration, with tenths of seconds below two minutes, so that it visibly grows."""
    return in_words(seconds) if seconds >= 120 else f"{seconds:.1f} s"


def worker_rows(workers: Sequence[Activity], room: int) -> list[tuple[str, str, str, str]]:
    """A row for each worker: machine, worker, activity and its duration. If there are more than `room`, a row stands for all workers of a
    machine with the same activity, with their number and the longest duration; the last row then counts workers that have no row."""
    rows = [(w.host or "here", w.name, doing(w), _since(w.seconds)) for w in workers]
    if len(rows) <= room:
        return rows
    alike: dict[tuple[str, str, str], list[float]] = {}
    for w in workers:
        alike.setdefault((w.host or "here", w.kind, doing(w)), []).append(w.seconds)
    rows = [(host, f"{len(times)} × {kind}", what, _since(max(times))) for (host, kind, what), times in alike.items()]
    if len(rows) > room:
        rest = list(alike.values())[room - 1:]
        rows = [*rows[:room - 1], ("…", f"{sum(map(len, rest))} more", "", "")]
    return rows


# -- the forms --------------------------------------------------------------------------------------------------------------
class LineProgress(ProgressListener):
    """Plain lines, for logs and pipes."""

    def __init__(self, rows: Sequence[SurveyRow], stream: TextIO, told: BeamConfig, activity: Callable[[], Sequence[Activity]] = tuple,
                 log: EventLog | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(rows, activity, log, clock)
        self.stream, self.told, self.last_line = stream, told, clock()

    def show(self, event: SearchEvent, state: _State | None) -> None:
        now = self.clock()
        if isinstance(event, events.SessionEnding):
            self._line(self.ending)
        elif isinstance(event, events.SessionFinished):
            self._line(f"candidates: {self.destinations}")
        if state is not None and state.leads and ((isinstance(event, events.Improved) and now - state.said >= QUIET)
                                                   or (isinstance(event, events.KernelFinished) and state.best != state.said_best)):
            self._say_gain(state, now)
        if state is not None and (line := events.debug_line(event, self.told)):
            self._line(f"{state.label}: {line}")

    def tick(self) -> None:
        super().tick()
        with self._lock:
            if self.clock() - self.last_line >= HEARTBEAT:
                parts = [f"{self.candidates} candidates", f"{digits(self.per_second, 2)} a second", self.leading,
                         f"{self.left:.0f} s left", *filter(None, [self.expected])]
                self._line("; ".join(filter(None, [", ".join(parts), workers_in_words(self.workers), self.driver])))

    def _say_gain(self, state: _State, now: float) -> None:
        state.said, state.said_best = now, state.best
        times = f"{in_words(state.heuristic):>8} → {in_words(state.best):>8}"
        self._line(f"{state.label:{WIDTH_NAME}.{WIDTH_NAME}} {times}  {state.gain:>6} so far")

    def _line(self, text: str) -> None:
        self.last_line = self.clock()
        print(f"[{self.elapsed:4.0f} s] {text}", file=self.stream, flush=True)


class LiveProgress(ProgressListener):
    """A view that rich redraws: facts about the search, as many kernels as the terminal has room for, and the workers."""

    def __init__(self, rows: Sequence[SurveyRow], stream: TextIO, activity: Callable[[], Sequence[Activity]] = tuple,
                 log: EventLog | None = None) -> None:
        super().__init__(rows, activity, log)
        from rich.console import Console
        from rich.live import Live

        self.console = Console(file=stream)
        self.live = Live(get_renderable=self.render, console=self.console, refresh_per_second=REFRESH_PER_SECOND, transient=True)

    def show(self, event: SearchEvent, state: _State | None) -> None:
        if isinstance(event, events.SessionFinished):
            self.live.console.print(f"svod-tune: candidates: {self.destinations}", markup=False, highlight=False, soft_wrap=True)

    def render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        with self._lock:
            head = [Text(line, style="italic", no_wrap=True, overflow="ellipsis") for line in self._head()]
            workers = worker_rows(self.workers, max(FEWEST_WORKER_ROWS, self.console.height // 4))
            room = max(3, self.console.height - len(head) - len(workers) - 5)
            kernels = self._kernel_table(room)
            more = [Text(f"and {len(self.states) - room} more")] if room < len(self.states) else []
            return Group(*head, kernels, *more, self._worker_table(workers))

    def _head(self) -> list[str]:
        if self.ending:
            return [self.ending]
        time_ = f"{self.elapsed:.0f} of {self.budget:.0f} s" if self.budget else f"{self.elapsed:.0f} s"
        flying = in_flight(self.workers)
        lines = [" · ".join(filter(None, [time_, self.leading, self.executor])),
                 " · ".join(filter(None, [f"{digits(self.per_second, 2)} candidates a second, {flying} in flight",
                                          self.driver or self.expected]))]
        return [*lines, self.destinations] if self.candidates or self.went else lines

    def _kernel_table(self, room: int) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, expand=True, header_style="bold")
        table.add_column("kernel", no_wrap=True, overflow="ellipsis", ratio=3)
        narrow = self.console.width < NARROW_TERMINAL_COLUMNS
        for name in ("leading", "so far") if narrow else ("share", "heuristic", "leading", "so far"):
            table.add_column(name, justify="right", no_wrap=True, min_width=7)
        if not narrow:
            table.add_column("", no_wrap=True, overflow="ellipsis", ratio=2)
        for s in list(self.states.values())[:room]:
            row = (Text(s.label), f"{100 * s.share:.0f} %", in_words(s.heuristic), in_words(s.best), s.gain, Text(s.status))
            table.add_row(*(row[0], *row[3:5]) if narrow else row)
        return table

    def _worker_table(self, rows: Sequence[tuple[str, str, str, str]]) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, expand=True, header_style="bold")
        for name, ratio in (("machine", 2), ("worker", 2), ("does", 3)):
            table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=ratio)
        table.add_column("for", justify="right", no_wrap=True, min_width=8)
        for row in rows or [(NOTHING, NOTHING, NOTHING, NOTHING)]:
            table.add_row(*map(Text, row))
        return table

    def __enter__(self) -> LiveProgress:
        super().__enter__()
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.live.stop()
        super().__exit__(kind, error, trace)


def make_progress(rows: Sequence[SurveyRow], stream: TextIO, told: BeamConfig, activity: Callable[[], Sequence[Activity]] = tuple,
                  log: EventLog | None = None) -> ProgressListener:
    """A live view if `stream` is a terminal, else lines. Also lines if `told` asks for lines about rounds or candidates (`debug`,
    `log_surpass_max`), or if the log goes to stderr."""
    if is_terminal(stream) and not told.debug and not told.log_surpass_max and (log is None or log.path != "-"):
        return LiveProgress(rows, stream, activity, log)
    return LineProgress(rows, stream, told, activity, log)


def label(row: SurveyRow) -> str:
    """A kernel's name with its first origin, such as `conv layer1.0.conv1`, or with its key if it has none."""
    return f"{row.name} {short_origin(row.origins[0])}" if row.origins else f"{row.name} {row.key[:8]}"


def short_origin(origin: str) -> str:
    """Shorten an origin: a module path stays as it is, a file:line loses its folders."""
    return origin.rsplit("/", 1)[-1]
