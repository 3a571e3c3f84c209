"""The commands that svod-tune recommends at its end, each with a remark about its effect. A test runs them."""
from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from svod.cli.installation import interpreter, program
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.report import KernelReport
from svod.cli.tune.survey import SurveyRow
from svod.cli.tune.workers import kind_of
from svod.config import PrepareConfig
from svod.core.machine.target import FAST
from svod.system.process.directories import working_directory
from svod.system.quantities import count
from svod.tune.db.records import BUDGET_SPENT

SOME_ERROR = 1e-2   # share of the largest output; the error that a recommended command allows
MAX_REASONS = 3     # most kernels for which the last line of --dry-run gives the reasons


@dataclass(frozen=True)
class Ended:
    """Facts about the end of a command. `not_stored`: the database could not take the results; `saved`: the file that has them instead.
    `stored`: there is a database that keeps results. `here`: this machine's target was among the targets that were tuned for. `wider`: a
    beam of twice the width has something left to search. `fell_short`: a whole plan gained less than its kernels promised. `had_no_time`:
    the budget was over before the first search, which began after `seconds_before_search`."""

    interrupted: bool
    not_stored: bool
    saved: Path | None
    stored: bool
    here: bool
    wider: bool
    fell_short: bool
    had_no_time: bool = False
    seconds_before_search: float = 0.0


def after_dry_run(options: TuneOptions, rows: Sequence[SurveyRow], wider: bool) -> str:
    """The last line of --dry-run."""
    decisions = {r.decision for r in rows}
    if decisions & {"search", "check"}:
        return f"next: {options.command_line(**({'fresh': True} if options.fresh else {}))}"
    if "known" in decisions:
        again = {"beam": 2 * options.beam} if wider else {"fresh": True}
        what = "to search further" if wider else "to search anew, without what is known"
        return f"nothing to search with beam {options.beam}; {what}: {options.command_line(**again)}"
    reasons = "; ".join(dict.fromkeys(r.why for r in rows if r.why)) if len(rows) <= MAX_REASONS else "see the last column"
    return f"nothing to search ({reasons})" + (": --only KEY searches a kernel however small it is" if "small" in decisions else "")


def next_steps(options: TuneOptions, outcomes: Sequence[KernelReport], ended: Ended) -> list[str]:
    """The commands to try next, each with its effect."""
    if ended.interrupted:
        return _numbered([(options.command_line(), "goes on where this one was ended")])
    if ended.not_stored and ended.saved is not None:
        beside = Path() if ended.saved.parent == working_directory() else ended.saved.parent
        words = ["--db", str(beside / "tuning.db"), "import", str(beside / ended.saved.name)]
        return _numbered([(f"{program('svod-db')} {shlex.join(words)}", "into a database that can be written")])
    if ended.not_stored:
        return _numbered([(options.command_line(db="tuning.db"), "a database that can be written")])
    if outcomes and all(x.source == "pending" for x in outcomes):
        return _numbered([(options.command_line(), "when the other search has ended")])
    return _numbered([*_use(options, outcomes, ended), *_more(options, outcomes, ended)])


def _use(options: TuneOptions, outcomes: Sequence[KernelReport], ended: Ended) -> list[tuple[str, str]]:
    """The command that uses the result, if there is one."""
    if not ended.stored:
        return [(options.command_line(db="tuning.db"), "a database that keeps what is found")]
    if not options.program or not ended.here or not any(x.source == "database" for x in outcomes):
        return []
    is_fast = (options.numerics or PrepareConfig.env_value("numerics")) == FAST
    if is_fast and options.max_error is None:
        return [(options.command_line(max_error=SOME_ERROR), "chooses which of these kernels to round; without a choice none are")]
    given = {"SVOD_DEVICE": options.device, "SVOD_NUMERICS": options.numerics, "SVOD_TUNE_DB": options.db}
    variables = [f"{name}={shlex.quote(value)}" for name, value in given.items() if value]
    remark = "starts with the kernels that were chosen to be rounded" if is_fast else "starts with these kernels"
    return [(" ".join([*variables, interpreter(), shlex.join(options.launched)]), remark)]


def _more(options: TuneOptions, outcomes: Sequence[KernelReport], ended: Ended) -> list[tuple[str, str]]:
    """The command that searches further, if something is left to search; else the command that shows the result."""
    if not ended.stored:
        return []
    cut_short = [x for x in outcomes if BUDGET_SPENT in x.why]
    if cut_short:
        remark = f"goes on with {count(len(cut_short), 'kernel')} for which the budget was too short"
        with_ray = ended.had_no_time and options.address is None and kind_of(options).startswith("ray")
        sooner = [(options.command_line(workers="local"), "workers that start sooner than Ray")] if with_ray else []
        budget = 2 * max(options.budget, math.ceil(ended.seconds_before_search))
        return [(options.command_line(budget=f"{budget:g}"), remark), *sooner]
    if ended.wider and (ended.fell_short or not options.program):
        return [(options.command_line(beam=2 * options.beam), "a wider beam searches on")]
    if not outcomes:
        return []
    database = ["--db", options.db] if options.db else []
    return [(f"{program('svod-db')} {shlex.join([*database, 'show', outcomes[0].row.key[:8]])}", "everything about the first kernel")]


def _numbered(steps: Sequence[tuple[str, str]]) -> list[str]:
    return ["", *(f"{'next:' if i == 0 else 'or:  '} {command}    # {remark}" for i, (command, remark) in enumerate(steps))]


def why_no_graph(options: TuneOptions) -> str:
    """The reason why svod has run nothing of a script that imports PyTorch, and a remedy."""
    if options.torch == "modules":
        return ("svod ran none of its modules: it compiles those in evaluation mode without gradients, so module.eval(), and "
                "torch.inference_mode() around the call; what Dynamo leaves out of graphs, such as print, runs in PyTorch")
    if options.calls_compile:
        return ("svod ran none of its graphs: those that need gradients run in PyTorch, so call the model under torch.inference_mode(); "
                "so does what Dynamo leaves out of graphs, such as print; torch.compile with another backend keeps that backend")
    return "it never calls torch.compile: --torch modules compiles its outermost modules"
