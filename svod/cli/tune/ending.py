"""The end of svod-tune: storing results that the database could not take, printing the report, and writing the file of --json."""
from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from svod import config
from svod.cli.tune.capturing import CapturedPlans
from svod.cli.tune.ceilings import MachineCeilings
from svod.cli.tune.next_steps import Ended, after_dry_run, next_steps
from svod.cli.tune.options import REPORT_FORMAT, TuneOptions
from svod.cli.tune.plans.alternatives import choice_lines
from svod.cli.tune.plans.checks import ChosenRoundings
from svod.cli.tune.report import (
    dry_table,
    form_lines,
    kernel_table,
    outcome_json,
    plan_json,
    plan_lines,
    rounding_lines,
    row_json,
    size_lines,
)
from svod.cli.tune.searching import Searches
from svod.cli.tune.setting import EXIT_NOT_STORED, Setting, TargetWork, has_wider
from svod.cli.tune.waiting import say, waiting
from svod.compile.plan.unbound_plan import named_kernels
from svod.core.kernel.chain_text import chain_of
from svod.errors import FileError
from svod.system.files import write_text
from svod.system.process.directories import temporary, working_directory
from svod.system.process.streams import columns, drop, was_closed
from svod.system.quantities import count
from svod.tune.db import PlanTimes, Rounding
from svod.tune.db.moving import export_unstored
from svod.tune.fast.report import to_data
from svod.tune.lock import Locked, LockedRounding, LockedTimes, write_lock
from svod.tune.session import SessionResult, bound_at

PIPE_WIDTH = 110            # width, in characters, of a table that does not go to a terminal


class ReportOutput:
    """The destinations of a command's report and of its JSON."""

    def __init__(self, options: TuneOptions) -> None:
        self._options = options

    @property
    def stream(self) -> TextIO:
        """The stream of the report: stdout, or stderr where the program or the JSON uses stdout."""
        return sys.stderr if self._options.program or self._options.json_path == "-" else sys.stdout

    @property
    def width(self) -> int:
        return columns(self.stream, PIPE_WIDTH)

    def print(self, lines: Sequence[str]) -> None:
        print("\n".join(lines), file=self.stream, flush=True)

    def dump(self, status: int, content: dict[str, Any]) -> int:
        """Write the file of --json. Returns `status`, or EXIT_NOT_STORED where that fails."""
        path = self._options.json_path
        if path is None:
            return status
        text = json.dumps({"format": REPORT_FORMAT, "version": 1, "status": status, **content}, indent=1, default=str)
        try:
            if path == "-":
                if was_closed(sys.stdout):
                    raise OSError(errno.EBADF, "it is closed")
                print(text, flush=True)
            else:
                write_text(Path(path), text + "\n")
        except BrokenPipeError:
            raise
        except OSError as e:
            if path == "-":
                drop(sys.stdout)
            say(f"svod-tune: {e if isinstance(e, FileError) else f'the standard output cannot be written: {e.strerror}'}")
            return EXIT_NOT_STORED
        return status


class ResultsPlace:
    """The place of a command's results: its database, or `saved`, a file with the records that could not be stored."""

    def __init__(self, setting: Setting) -> None:
        self.saved: Path | None = None
        self.db = setting.db
        self._has_database = setting.config.db != config.NONE

    def save(self, result: SessionResult | None) -> None:
        """Write results that the database could not take to a file for `svod-db import`, in the current directory, or in the directory for
        temporary files if that fails."""
        if result is None or result.rows == 0 or not self._has_database or self.db.path is not None or self.db.storage.store_again():
            return
        name = time.strftime("svod-tuned-%Y%m%d-%H%M%S.jsonl")
        for folder in (working_directory, temporary):
            try:
                directory = folder() or Path()
                export_unstored(self.db, directory / name)
            except FileError as e:
                say(f"svod-tune: {e}")
            else:
                self.saved = directory / name
                return

    def is_missing(self, result: SessionResult | None) -> bool:
        """Whether there were results that the database could not take."""
        return result is not None and result.rows > 0 and self._has_database and self.db.path is None

    def after_early_end(self, result: SessionResult | None) -> str:
        """Save the results after an early end, and say in words where they are."""
        self.save(result)
        if self.saved is not None:
            return f"what was found is kept in {self.saved}, as the database could not be written: {self.db.problem}"
        if self.db.path is None:
            return "nothing was stored" + (f": {self.db.problem}" if self.db.problem else "")
        rows = result.rows if result is not None else 0
        return f"{count(rows, 'measurement')} kept in {self.db.path}" if rows else f"nothing was added to {self.db.path}"

    def lines(self, result: SessionResult | None) -> list[str]:
        """The lines of the report that say where the results are."""
        if result is None:
            return []
        if self.db.path is not None:
            return [f"{count(result.rows, 'measurement')} stored in {self.db.path}"]
        if not self._has_database:
            return ["the results are not stored: the database is :none:"]
        if not self.is_missing(result):
            return ["nothing was to be stored"]
        where = f"they are in {self.saved}" if self.saved is not None else "they are lost"
        return [f"the results could not be stored: {self.db.problem or 'the database cannot be written'}", where]


def keep_lock(path: str, works: Sequence[TargetWork], choices: Sequence[Sequence[Rounding]]) -> bool:
    """Write to a lock file the chains, the choices of kernels to round and the times of convolutions and of plans that the next `prepare`
    then uses. A kernel whose chain was not confirmed gets no line, which would pin a chain that nobody has measured; chains of the lock
    file in use are written as they are. Returns False if the file cannot be written."""
    names = {r.key: r.name for w in works for r in w.rows}
    roundings = [LockedRounding(r, names.get(r.kernel, "")) for records in choices for r in records]
    lines = [Locked(o.row.key, w.target.key, chain_of(o.chain), o.row.name, next(iter(o.row.origins), ""),
                    o.heuristic / o.tuned if o.heuristic and o.tuned else None)
             for w in works for o in w.outcomes if o.confirmed or o.source == "lock"]
    unknown = sum(len(w.outcomes) for w in works) - len(lines)
    compared = [LockedTimes(times) for w in works for times in w.pair_times]
    of_model = {w.target.key: {(key, w.resolved.compiler.pair.revision) for key in w.compared_keys} for w in works if w.here}
    try:
        written = write_lock(Path(path), lines, {w.target.key: {r.key for r in w.rows} for w in works}, roundings, compared, of_model)
    except FileError as e:
        say(f"svod-tune: {e}")
        return False
    rounded = f", and which of them are rounded in {count(len(choices), 'plan')}," if choices else ""
    say(f"svod-tune: the chains of {count(written, 'kernel')}{rounded}{_compared_words(compared)} are in {path}; SVOD_LOCK={path} uses them"
        + (f"; {count(unknown, 'kernel')} without a confirmed chain {'has' if unknown == 1 else 'have'} no new line" if unknown else ""))
    return True


def _compared_words(compared: Sequence[LockedTimes]) -> str:
    """The lines of a lock file about convolutions and plans, in words; "" if there are none."""
    plans = sum(isinstance(x.record, PlanTimes) for x in compared)
    convolutions = f", and the forms of {count(len(compared) - plans, 'convolution')}," if len(compared) > plans else ""
    return convolutions + (f", and the alternatives of {count(plans, 'plan')}," if plans else "")


def end_dry_run(setting: Setting, works: Sequence[TargetWork], untried: int, ceilings: MachineCeilings, output: ReportOutput,
                status: int) -> int:
    """Print the kernels that a search would tune, and write the file of --json. `untried`: the number of alternatives of plans that it
    would try. Returns the exit status."""
    lines, kernels = [], []
    for w in works:
        known = None
        if w.here:
            with waiting("measuring what this machine can do"):
                known = ceilings.of(w.target)
        roofs = {r.key: bound_at(r.kernel, r.sizes, w.target, known) for r in w.rows}
        bounds = {key: b.seconds for key, b in roofs.items() if b is not None and b.is_measured and b.seconds}
        lines += ["", *w.title, *dry_table(w.rows, bounds, output.width)]
        kernels += [{**row_json(r), "target": w.target.key, "bound_seconds": bounds.get(r.key)} for r in w.rows]
    rows = [r for w in works for r in w.rows]
    if untried:
        lines += ["", f"a search would first try {count(untried, 'alternative')} of whole plans, as far as its budget reaches"]
    output.print([*lines, "", after_dry_run(setting.options, rows, has_wider(setting, works))])
    return output.dump(status, {"target": works[0].target.key, "kernels": kernels})


@dataclass(frozen=True)
class CommandReport:
    """The results of a command, to be printed and written as JSON. `workers`: a description of the workers that searched.
    `roundings`: the choices of kernels to round."""

    setting: Setting
    captured: CapturedPlans
    works: Sequence[TargetWork]
    searches: Searches
    kept: ResultsPlace
    workers: str
    roundings: ChosenRoundings

    def print(self, output: ReportOutput) -> None:
        lines = []
        for w in self.works:
            lines += ["", *w.title, *kernel_table(w.outcomes, w.target, w.ceilings, output.width), *size_lines(w.outcomes), "",
                      *choice_lines(w.plans)]
            for number, (plan, check) in enumerate(w.checks, 1):
                name = f" {number} of {len(w.checks)}" if len(w.checks) > 1 else ""
                lines += plan_lines(check, name, len(plan.unbound.calls))
            lines += form_lines(w.forms)
        named = named_kernels(c for plan in self.captured.content.plans for c in plan.unbound.calls)
        for records in self.roundings.records:
            lines += ["", *rounding_lines(records, named, output.width)]
        if self.setting.options.max_error is not None and not self.roundings.records:
            why = self.roundings.failure or "no kernel of the program may be rounded, or its plans did not run"
            lines += ["", f"numerics=fast: {why}: it stays in float32"]
        result = self.searches.result
        output.print([*lines, "", self._summary(result), *self.kept.lines(result), *self._next(result)])

    def _summary(self, r: SessionResult | None) -> str:
        elapsed, script = self.setting.clock.elapsed, self.captured.script
        long = f", {script.seconds:.0f} of them the script" if script is not None and script.seconds > self.setting.clock.budget / 2 else ""
        if r is None:
            return f"nothing was left to search with beam {self.setting.options.beam} ({elapsed:.1f} s{long})"
        if self.searches.had_no_time:
            return f"nothing was searched: {self.setting.clock.words_before_search}"
        rate = f", {r.timed / r.seconds:.0f} per second" if r.seconds > 0 else ""
        text = f"{count(r.timed, 'candidate')} timed in {r.seconds:.0f} s{rate}, on {self.workers}; {elapsed:.0f} s in all{long}"
        return text + (", ended early by Ctrl-C" if r.interrupted else "")

    def _next(self, result: SessionResult | None) -> list[str]:
        setting = self.setting
        ended = Ended(result is not None and result.interrupted, self.kept.is_missing(result), self.kept.saved,
                      setting.db.plan.write is not None, any(w.here for w in self.works), has_wider(setting, self.works),
                      any(c.fell_short for w in self.works for _, c in w.checks), self.searches.had_no_time,
                      setting.clock.seconds_before_search)
        return next_steps(setting.options, [o for w in self.works for o in w.outcomes], ended)

    def say_failures(self) -> None:
        """If no candidate of a target could be measured, say on stderr that this is an error of svod and no result of the search."""
        for w in self.works:
            if w.failure:
                say(f"svod-tune: {w.label}nothing could be measured: every candidate of {count(len(w.wanted), 'kernel')} failed "
                    f"({w.failure}). That is an error of svod's own or of its installation, and not of the program")

    def to_data(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        r, db, script = self.searches.result, self.setting.db, self.captured.script
        ceilings = next((w.ceilings for w in self.works if w.here), None)
        return {
            "target": self.works[0].target.key, "options": asdict(self.setting.options), "elapsed_seconds": self.setting.clock.elapsed,
            "phases_end_seconds": self.setting.clock.phases,
            "script": None if script is None else asdict(script),
            "kernels": [{"target": w.target.key, **kernel} for w in self.works for kernel in _kernels_json(w)],
            "plans": [plan_json(check, plan.digest, plan.unbound) for w in self.works for plan, check in w.checks],
            "forms": [f.to_data() for w in self.works for f in w.forms],
            "alternatives": [c.to_data() for w in self.works for c in w.plans],
            "roundings": [to_data(records) for records in self.roundings.records], "rounding_failure": self.roundings.failure,
            "search": None if r is None else {"executor": self.workers, "proposed": r.candidates, "timed": r.timed,
                                              "searches": r.searches, "seconds": r.seconds,
                                              "measurements": r.rows, "pending": list(r.pending), "interrupted": r.interrupted},
            "database": {"path": None if db.path is None else str(db.path), "problem": db.problem,
                         "saved": None if self.kept.saved is None else str(self.kept.saved)},
            "ceilings": None if ceilings is None else asdict(ceilings)}


def _kernels_json(work: TargetWork) -> list[dict[str, Any]]:
    done = {o.row.key for o in work.outcomes}
    return [outcome_json(o, work.target, work.ceilings) for o in work.outcomes] + [row_json(x) for x in work.rows if x.key not in done]
