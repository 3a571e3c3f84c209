"""The top of the report (title, warnings, key figures, first sentence), and the list of missing parts."""
from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from svod.bench.report.data import Overview, Tuning
from svod.bench.report.words import FASTER, NEAR_CEILING, kernel_title, listed, over_best_peer, over_heuristic, peer_names
from svod.bench.results import MODEL_SUITES, SVOD
from svod.bench.roofline import Ceilings
from svod.bench.suites.cases import REFERENCE
from svod.bench.suites.suites import SUITES
from svod.bench.summary import geometric_mean, group_results
from svod.core.machine.target import threads_of
from svod.system import quantities as q


class KeyFigure(NamedTuple):
    """A figure in words, its name, and details."""

    figure: str
    what: str
    detail: str


def title(view: Overview, tuning: Tuning | None) -> str:
    """The title: `Core, odd on AMD EPYC`, or `2 of 24 kernels of core on AMD EPYC` if the runs have only a part of a suite."""
    if view.latest is not None:
        suites = ", ".join(_suite_words(view, suite) for suite in dict.fromkeys(c.suite for c in view.cases))
        return f"{suites[0].upper()}{suites[1:]} on {view.latest.machine.cpu}"
    assert tuning is not None, "there is something to show"
    return f"Tuned kernels on {tuning.target.split('/')[1] if '/' in tuning.target else tuning.target}"


def _suite_words(view: Overview, suite: str) -> str:
    """The name of a suite, preceded by the number of its kernels in the runs if some are missing."""
    own = [c.name for c in view.cases if c.suite == suite]
    total = len(SUITES[suite]) if suite in SUITES else max(view.source[name].settings.count or 0 for name in own)
    return suite if len(own) >= total else f"{len(own)} of {q.count(total, 'model' if suite in MODEL_SUITES else 'kernel')} of {suite}"


def subtitle(view: Overview, tuning: Tuning | None) -> str:
    """The number of threads, the date, the version, and the command or the database."""
    run = view.latest
    if run is not None:
        parts = [q.count(run.machine.threads, "thread"), run.settings.started.split("T")[0], f"svod {run.versions.get('svod', '')}".strip(),
                 run.settings.command]
    else:
        assert tuning is not None, "there is something to show"
        when = max((c.started for c in tuning.courses), default=0.0)
        threads = threads_of(tuning.target)
        parts = [q.count(threads, "thread") if threads is not None else "",
                 datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d") if when else "", tuning.compiler, tuning.database]
    return " · ".join(p for p in parts if p)


def warnings(view: Overview, tuning: Tuning | None) -> Iterator[str]:
    """Warnings that a reader needs before the figures."""
    if len(view.targets) > 1:
        yield (f"These runs are from {len(view.targets)} kinds of machine: ratios can be compared, times cannot. "
               "The ceilings shown are the latest run's.")
    busy = list(dict.fromkeys(r.load.busy for r in view.runs if r.load.busy))
    if busy:
        yield f"The machine was busy: {'; '.join(busy)}. Take small differences with care."
    if (ceilings := ceilings_of(view, tuning)) is not None and ceilings.busy:
        yield f"The machine was busy while its ceilings were measured ({ceilings.busy}): they are too low, and shares of them too high."
    wrong = [f"{c.title} ({o.name}): {o.why}" for c in view.cases for o in c.contestants if o.status == "wrong" and o.name in SVOD]
    if wrong:
        yield f"Wrong results of svod: {'; '.join(wrong)}"


def ceilings_of(view: Overview, tuning: Tuning | None) -> Ceilings | None:
    """The ceilings that a report shows: of the latest run, else of the database's machine."""
    return view.ceilings or (tuning.ceilings if tuning is not None else None)


def tiles(view: Overview, tuning: Tuning | None) -> list[KeyFigure]:
    """The key figures, at most five."""
    tiles = (_gain(view, tuning), _peers(view), _ceiling(view, tuning), _kernels(view, tuning), _time(view, tuning))
    return [t for t in tiles if t is not None]


def _gain(view: Overview, tuning: Tuning | None) -> KeyFigure | None:
    means = group_results(view.cases)[-1].speedups if view.cases else {}
    if view.cases:
        gains = [s.median for c in view.cases if (s := over_heuristic(c)) is not None]
    else:
        gains = [k.gain for k in tuning.kernels if k.gain is not None] if tuning is not None else []
    if not gains:
        return None
    detail = f"geometric mean; {sum(g >= FASTER for g in gains)} of {q.count(len(gains), 'kernel')} gained, the most {q.times(max(gains))}"
    return KeyFigure(q.times(means.get("tuned/heuristic", geometric_mean(gains))), "tuned over heuristic", detail)


def _peers(view: Overview) -> KeyFigure | None:
    peers = [s for c in view.cases if (s := over_best_peer(c)) is not None]
    if not peers:
        return None
    won = sum(s.median > 1 and not s.is_none for s in peers)
    lost = sum(s.median < 1 and not s.is_none for s in peers)
    names = listed(peer_names(view, competing=True))
    detail = f"the fastest of {names} for each kernel: {won} won, {lost} lost, {len(peers) - won - lost} level"
    return KeyFigure(q.times(geometric_mean([s.median for s in peers])), "over the best peer", detail)


def _ceiling(view: Overview, tuning: Tuning | None) -> KeyFigure | None:
    if view.cases:
        shares = [c.svod.ceiling_share for c in view.cases if c.svod is not None and c.svod.ceiling_share]
    else:
        shares = [k.share for k in tuning.kernels if k.share] if tuning is not None else []
    if not shares:
        return None
    ceilings = ceilings_of(view, tuning)
    detail = f"geometric mean; {sum(s >= NEAR_CEILING for s in shares)} of {len(shares)} above {q.percent(NEAR_CEILING)}"
    if ceilings is not None and ceilings.busy:
        detail += "; the ceilings are those of a busy machine"
    return KeyFigure(q.percent(geometric_mean(shares)), "of the ceiling", detail)


def _reference(view: Overview) -> str:
    """The reference of the results: NumPy, or a library that runs whole models."""
    compared = {REFERENCE.get(c.suite, "NumPy") for c in view.cases}
    return " or ".join(sorted(compared))


def _kernels(view: Overview, tuning: Tuning | None) -> KeyFigure | None:
    if view.cases:
        noisy = sum(c.noisy is not None for c in view.cases)
        wrong = sum(o.status == "wrong" for c in view.cases for o in c.contestants if o.name in SVOD)
        what = "kernels measured" if any(c.suite not in MODEL_SUITES for c in view.cases) else "models measured"
        return KeyFigure(str(len(view.cases)), what,
                         f"each checked against {_reference(view)}{f'; {wrong} WRONG' if wrong else ''}; {noisy or 'none'} noisy")
    if tuning is None or not tuning.kernels:
        return None
    verified = sum(bool(k.verified) for k in tuning.kernels)
    return KeyFigure(str(len(tuning.kernels)), "kernels known", f"{verified} with a winner whose numbers were verified")


def _time(view: Overview, tuning: Tuning | None) -> KeyFigure | None:
    if not view.runs and tuning is not None and tuning.courses:
        tried = f"{sum(c.candidates for c in tuning.courses):,}".replace(",", " ")
        timed = sum(c.timed for c in tuning.courses)
        return KeyFigure(q.seconds(sum(c.spent for c in tuning.courses)), "spent searching",
                         f"{q.count(len(tuning.kernels), 'kernel')}, {tried} candidates, {timed} of them timed")
    if not view.runs:
        return None
    return KeyFigure(q.seconds(sum(r.settings.seconds for r in view.runs)), "spent measuring", f"in {q.count(len(view.runs), 'run')}")


def verdict(view: Overview, tuning: Tuning | None) -> str:
    """The page's first sentence."""
    sentences = []
    gains = [(s.median, c.title) for c in view.cases if (s := over_heuristic(c)) is not None]
    gain, best = max(gains, default=(0.0, ""))
    if gain >= FASTER:
        sentences.append(f"Tuning gained most for {best}: {q.times(gain)} the heuristic.")
    elif not view.cases and tuning is not None and tuning.kernels and (tuning.kernels[0].gain or 0) >= FASTER:
        k = tuning.kernels[0]
        sentences.append(f"The search saved most in {kernel_title(k)}: from {q.seconds(k.heuristic)} to {q.seconds(k.seconds)}, "
                         f"{q.times(k.gain)}.")
    below = sum(c.svod is not None and c.svod.ceiling_share is not None and c.svod.ceiling_share < NEAR_CEILING for c in view.cases)
    if below:
        sentences.append(f"{q.count(below, 'kernel')} {'is' if below == 1 else 'are'} below {q.percent(NEAR_CEILING)} of what the "
                         "machine can do.")
    elif not view.cases and tuning is not None:
        unfinished = sum(k.left is not None for k in tuning.kernels)
        if unfinished:
            sentences.append(f"{q.count(unfinished, 'search')} ended with more to try.")
    return " ".join(sentences)


def gaps(view: Overview, tuning: Tuning | None) -> Iterator[str]:
    """The missing parts of the report, with the commands that add them."""
    if not view.cases:
        yield "comparisons with peers and shares of ceilings (no run was given: svod-bench run --json run.json)."
    else:
        if not peer_names(view):
            yield "peers (none took part: svod-bench run --peers numpy,torch,onnxruntime,jax)."
        if ceilings_of(view, tuning) is None:
            yield "ceilings (the run has none: svod-bench ceilings)."
        if not any(over_heuristic(c) is not None for c in view.cases):
            yield "gains of tuning in these runs (they hold no tuned contestant: svod-bench run --beam 8)."
    if tuning is None or not tuning.kernels:
        yield "searches and winning chains (--with-db adds those of SVOD_TUNE_DB, --db PATH those of another database)."
    elif tuning.other_targets:
        yield f"records of {q.count(len(tuning.other_targets), 'other kind')} of machine in the database."
