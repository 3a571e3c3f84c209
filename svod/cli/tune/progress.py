"""The progress of a search, from the events of `svod.tune.search.events`: a live table on a terminal, lines elsewhere.

    svod-tune: 12 kernels, beam 8, 115 s, 2 Ray workers
    [  14 s] conv layer1.0.conv1      1.46 ms → 0.61 ms   2.39× so far
    [  30 s] 412 candidates, a chain leads in 5 of 12 kernels so far

What leads while a search runs has won races; whether it is faster says the confirmation, whose times are in the table at the end.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from svod.cli.tune.survey import SurveyRow
from svod.config import BeamConfig
from svod.system.quantities import count
from svod.system.quantities import seconds as in_words
from svod.tune.search import events
from svod.tune.search.events import SearchEvent

HEARTBEAT = 15.0        # seconds between lines when nothing improves
QUIET = 2.0             # seconds between two lines about one kernel
REFRESH_PER_SECOND = 4
WIDTH_NAME = 28


@dataclass
class _State:
    """The displayed state of a kernel. Times are seconds of one call."""

    label: str
    share: float
    heuristic: float | None = None
    best: float | None = None
    rounds: int = 0
    status: str = "waiting"
    said: float = float("-inf")
    said_best: float | None = None

    @property
    def leads(self) -> bool:
        """Whether a chain leads over the heuristic's."""
        return self.heuristic is not None and self.best is not None and self.best < 0.99 * self.heuristic

    @property
    def gain(self) -> str:
        return f"{self.heuristic / self.best:.2f}×" if self.heuristic and self.best else ""


class Progress(AbstractContextManager["Progress", None]):
    """A listener of a session, shown while it is entered. It keeps what both forms show."""

    def __init__(self, rows: Sequence[SurveyRow], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.started = clock, clock()
        self.states = {r.key: _State(label(r), r.share) for r in rows}
        self.budget, self.executor, self.candidates = 0.0, "", 0
        self.ending = ""        # what is done after Ctrl-C

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    @property
    def leading(self) -> str:
        return f"a chain leads in {sum(s.leads for s in self.states.values())} of {count(len(self.states), 'kernel')} so far"

    def update(self, event: SearchEvent) -> _State | None:
        """Record an event. Returns the state of its kernel."""
        if isinstance(event, events.SessionStarted):
            self.started, self.budget, self.executor = self.clock(), event.budget, event.executor
        elif isinstance(event, events.SessionEnding):
            self.ending = f"Ctrl-C: confirming what was found in {count(event.kernels, 'kernel')}; Ctrl-C once more skips that"
        state = self.states.get(event.kernel)
        if state is None:
            return None
        if isinstance(event, events.KernelStarted):
            state.status = "heuristic"
        elif isinstance(event, events.BaselineTimed):
            state.heuristic = state.best = event.seconds
            self.candidates += 1
        elif isinstance(event, events.Improved):
            state.best = event.seconds
        elif isinstance(event, events.RoundFinished):
            state.rounds, state.status = event.round, f"round {event.round}"
            self.candidates += event.timed
            if event.best < float("inf"):
                state.best = event.best
        elif isinstance(event, events.KernelFinished):
            state.status = event.why or "done"
            if event.heuristic < float("inf"):
                state.heuristic = event.heuristic
            state.best = event.seconds if event.seconds < float("inf") else None
        return state

    def __call__(self, event: SearchEvent) -> None:
        self.update(event)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class LineProgress(Progress):
    """Plain lines, for logs and pipes."""

    def __init__(self, rows: Sequence[SurveyRow], stream: TextIO, told: BeamConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(rows, clock)
        self.stream, self.told, self.last_line = stream, told, clock()

    def __call__(self, event: SearchEvent) -> None:
        state = self.update(event)
        now = self.clock()
        if isinstance(event, events.SessionEnding):
            self._line(self.ending)
        if state is not None and state.leads and ((isinstance(event, events.Improved) and now - state.said >= QUIET)
                                                   or (isinstance(event, events.KernelFinished) and state.best != state.said_best)):
            self._say_gain(state, now)
        if state is not None and (line := events.debug_line(event, self.told)):
            self._line(f"{state.label}: {line}")
        if now - self.last_line >= HEARTBEAT:
            self._line(f"{self.candidates} candidates, {self.leading}")

    def _say_gain(self, state: _State, now: float) -> None:
        state.said, state.said_best = now, state.best
        times = f"{in_words(state.heuristic):>8} → {in_words(state.best):>8}"
        self._line(f"{state.label:{WIDTH_NAME}.{WIDTH_NAME}} {times}  {state.gain:>6} so far")

    def _line(self, text: str) -> None:
        self.last_line = self.clock()
        print(f"[{self.elapsed:4.0f} s] {text}", file=self.stream, flush=True)


class LiveProgress(Progress):
    """A table that rich redraws, with as many kernels as the terminal has room for."""

    def __init__(self, rows: Sequence[SurveyRow], stream: TextIO) -> None:
        super().__init__(rows)
        from rich.console import Console
        from rich.live import Live

        self.console = Console(file=stream)
        self.live = Live(get_renderable=self.render, console=self.console, refresh_per_second=REFRESH_PER_SECOND, transient=True)

    def render(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        room = max(3, self.console.height - 6)
        shown = list(self.states.values())[:room]
        time_ = f"{self.elapsed:.0f} of {self.budget:.0f} s" if self.budget else f"{self.elapsed:.0f} s"
        table = Table(box=None, pad_edge=False, expand=True, header_style="bold")
        table.add_column("kernel", no_wrap=True, overflow="ellipsis", ratio=3)
        for name in ("share", "heuristic", "leading", "so far"):
            table.add_column(name, justify="right", no_wrap=True, min_width=7)
        table.add_column("", no_wrap=True, overflow="ellipsis", ratio=2)
        for s in shown:
            table.add_row(Text(s.label), f"{100 * s.share:.0f} %", in_words(s.heuristic), in_words(s.best), s.gain, Text(s.status))
        head = self.ending or f"{time_} · {self.candidates} candidates, {self.leading} · {self.executor}"
        more = [Text(f"and {len(self.states) - len(shown)} more")] if len(shown) < len(self.states) else []
        return Group(Text(head, style="italic"), table, *more)

    def __enter__(self) -> LiveProgress:
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.live.stop()


def make_progress(rows: Sequence[SurveyRow], stream: TextIO, told: BeamConfig) -> Progress:
    """A live table where `stream` is a terminal, else lines. `told` gives lines in any case where it asks for rounds, candidates, or those
    that a limit drops (`debug`, `log_surpass_max`)."""
    if stream.isatty() and not told.debug and not told.log_surpass_max:
        return LiveProgress(rows, stream)
    return LineProgress(rows, stream, told)


def label(row: SurveyRow) -> str:
    """The kernel's name and where it first comes from: `conv layer1.0.conv1`."""
    return f"{row.name} {short_origin(row.origins[0])}" if row.origins else f"{row.name} {row.key[:8]}"


def short_origin(origin: str) -> str:
    """A module path unchanged; a file:line without its folders."""
    return origin.rsplit("/", 1)[-1]
