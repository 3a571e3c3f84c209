"""The end of a kernel's search: the best candidates are raced side by side once more, compiled to their final code, verified, and timed at
full size together with the heuristic's chain and stored winners. The database's rules choose the winner (`svod.tune.db.winners`)."""
from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from svod.bench.race import Ratio
from svod.core.cost.cost import tiling_family
from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.scheduler import Opt
from svod.tune.db.records import BUDGET_SPENT, canonical
from svod.tune.db.winners import WORST_RATIO, Standing, best_of, fits_its_times, is_slower
from svod.tune.measure.candidate import FAILED, Candidate, Origin, Status
from svod.tune.measure.measurer import Confirmed, Failure
from svod.tune.search.events import KernelFinished
from svod.tune.search.kernel_search import KernelSearch

log = logging.getLogger("svod.tune")

FINALISTS = 3                  # The least number of finalists; a wider beam has as many as it is wide.
# Final code may be faster than code in the search by this factor: a tiling family's best may be a finalist if it is no slower than this
# times the fastest.
FINAL_GAIN = 1.25
SEMIFINAL = 4                  # The finalists are chosen by a semifinal, a race of at most this many candidates for each finalist.
SEMIFINAL_SHARE = 0.25         # The semifinal takes at most this share of the seconds of a confirmation.
RACE_RUNS = 10                 # A race runs each candidate about this many times.
CONFIRM_SECONDS = 3.0          # A confirmation takes at most this many seconds.
CONFIRM_SHARE = 0.2            # A confirmation after a short search takes at most this share of the search's seconds.
CONFIRM_LEAST_SECONDS = 1.0    # CONFIRM_SHARE never limits a confirmation to fewer seconds than this.
CONFIRM_FLOOR_SECONDS = 0.5    # A confirmation may take at least this many seconds, even after the deadline.
CONFIRM_ROUNDS = 15            # The number of finalists is limited so that there is time for about this many rounds.
WIND_UP_SECONDS = 0.5          # Storing the results and ending the workers takes about this long.


@dataclass(frozen=True)
class Finding:
    """The result of a search for one kernel. Times are seconds of one call; infinite where nothing was measured.

    source        what proposed the chain: 'beam', 'database' or 'heuristic'
    confirmed     timed at full size against the heuristic, with final code
    why           the reason why the search ended
    linear        digest of the winner's LINEAR
    speedup       heuristic's time over the winner's
    failure       how the heuristic's candidate failed, if no candidate was verified; otherwise ""
    finalists     the candidates that were confirmed, and their times
    refuted       candidates whose outputs were right in the search and wrong with final code
    unconfirmed   why no finalist could be confirmed
    """

    chain: tuple[Opt, ...]
    source: str
    seconds: float
    heuristic_seconds: float
    verified: bool
    confirmed: bool
    why: str
    linear: str
    speedup: Ratio
    winner: Candidate | None
    baseline: Candidate | None
    failure: str = ""
    finalists: Sequence[tuple[Candidate, Confirmed]] = ()
    refuted: Sequence[Candidate] = ()
    unconfirmed: str = ""


def closing_seconds(search: KernelSearch) -> float:
    """The expected seconds for building and verifying the finalists of a search, without timing them."""
    count = 1 + _most_finalists(search, CONFIRM_SECONDS) + len(search.stored)
    return count * (search.pace.building + search.pace.verifying)


def finish(search: KernelSearch, seconds: float = CONFIRM_SECONDS, deadline: float = float("inf")) -> Finding:
    """Confirm the finalists within about `seconds`, or less after a short search, and by about `deadline` on the search's clock. Where no
    finalist can be confirmed, returns the finding of `result`."""
    search.stop(BUDGET_SPENT)
    seconds = min(seconds, max(CONFIRM_LEAST_SECONDS, CONFIRM_SHARE * search.spent))
    verified = _race_the_best(search, SEMIFINAL_SHARE * seconds)
    most = _most_finalists(search, seconds)
    finalists = _finalists(verified, min(_places(search), most), most)
    # stored winners are always confirmed
    finalists += [c for c in search.stored if c.status is Status.VERIFIED and c not in finalists]
    baseline = search.lead.verified_baseline
    built, unconfirmed = _build(search, [*([baseline] if baseline else []), *finalists])
    # the final code is another binary, which is verified before it can win
    right, refuted = [], []
    for c, v in zip(built, search.measurer.verify(built), strict=True):
        if v.right:
            right.append(c)
        elif v.right is False:
            c.fail(Status.WRONG, f"final code: {v.reason}")
            refuted.append(c)
            _forget(search, c)
        else:
            unconfirmed = v.reason
    left = max(CONFIRM_FLOOR_SECONDS, deadline - search.clock() - WIND_UP_SECONDS)
    answers = search.measurer.confirm(right, min(seconds, left)) if right else []
    timed = [(c, t) for c, t in zip(right, answers, strict=True) if isinstance(t, Confirmed)]
    if not timed:
        unconfirmed = next((t.reason for t in answers if isinstance(t, Failure)), unconfirmed)
    found = _decide(search, timed, baseline if baseline in right else None) if timed else result(search)
    return replace(found, finalists=timed, refuted=refuted, unconfirmed=unconfirmed)


def _places(search: KernelSearch) -> int:
    """The number of finalists chosen by time alone; the best of other tiling families may join them."""
    return max(FINALISTS, search.config.width)


def _most_finalists(search: KernelSearch, seconds: float) -> int:
    """The number of finalists, at least one, that a confirmation of `seconds` has time for."""
    return max(1, min(2 * _places(search), int(seconds / (CONFIRM_ROUNDS * max(search.lead.best, 1e-9))) - 1))


def _finalists(ranked: Sequence[Candidate], count: int, most: int) -> list[Candidate]:
    """The best `count` of `ranked`, and the best of up to `count` other tiling families, as final code may change the order. If that
    makes more than `most`, fewer families are added."""
    chosen = list(ranked[:count])
    families = {tiling_family(c.state) for c in chosen}
    for c in ranked[count:]:
        if len(chosen) < min(2 * count, most) and c.score <= FINAL_GAIN * ranked[0].score and tiling_family(c.state) not in families:
            families.add(tiling_family(c.state))
            chosen.append(c)
    return chosen


def _race_the_best(search: KernelSearch, seconds: float) -> list[Candidate]:
    """All verified candidates, best first. Their scores come from different races, so the best few of hundreds may only have been the
    luckiest: as many as `seconds` allow are raced side by side, and their old and new scores are averaged."""
    verified = sorted((c for c in search.pool if c.status is Status.VERIFIED and c is not search.lead.baseline), key=lambda c: c.order)
    count = min(SEMIFINAL * _places(search), int(seconds / (RACE_RUNS * max(search.lead.best, 1e-9))))
    if min(count, len(verified)) <= _places(search):
        return verified
    ratios = search.measurer.race(verified[:count]).ratios
    raced = []
    for c, r in zip(verified[:count], ratios, strict=True):
        if isinstance(r, Failure):
            search.drop(c, r)
            _forget(search, c)
        else:
            raced.append((c, math.log(c.score), math.log(r)))
    shift = statistics.fmean(known - told for _, known, told in raced) if raced else 0.0
    for c, known, told in raced:
        c.score = math.exp((known + told + shift) / 2)
    return sorted((c for c in verified if c.status is Status.VERIFIED), key=lambda c: c.order)


def _build(search: KernelSearch, candidates: Sequence[Candidate]) -> tuple[list[Candidate], str]:
    """Compile to final code. Returns the candidates that compile, and the reason of the last failure, "" without failures."""
    built, problem = [], ""
    for c, answer in zip(candidates, search.measurer.build(candidates, final=True, deadline=search.config.timeout_sec), strict=True):
        if isinstance(answer, Failure):
            log.info("%s: %s does not compile to final code: %s", search.name, chain_text(c.chain), answer.reason)
            problem = answer.reason
        else:
            c.built = answer
            built.append(c)
    return built, problem


def _forget(search: KernelSearch, c: Candidate) -> None:
    """Remove `c`, which turned out wrong, from the pool and from the lead."""
    search.pool = [x for x in search.pool if x is not c]
    search.lead.forget(c, search.pool)


def _decide(search: KernelSearch, timed: Sequence[tuple[Candidate, Confirmed]], baseline: Candidate | None) -> Finding:
    """Choose among the confirmed finalists by the database's rules, so that later runs, which apply these rules, use the same chain."""
    for c, t in timed:
        c.score, c.known["confirmed"] = t.seconds, t
    reference = next((t for c, t in timed if c is baseline), None)
    usable = [(c, t) for c, t in timed if (not is_slower(t.low, t.ratio) and t.worst <= WORST_RATIO and (
        reference is None or fits_its_times(t.ratio, t.seconds, reference.seconds))) or baseline is None]
    winner, time_ = usable[best_of([Standing(t.high, c is baseline, len(c.chain), canonical([o.to_json() for o in c.chain]), c.linear)
                                    for c, t in usable])]
    speedup = Ratio(time_.ratio, time_.low, time_.high).inverse if reference is not None else Ratio(1.0, 1.0, 1.0)
    return _found(search, winner, time_.seconds, reference.seconds if reference else float("inf"), True, speedup)


def result(search: KernelSearch) -> Finding:
    """The finding without a confirmation: the best verified candidate so far, or the heuristic's chain where none was verified."""
    baseline, counts = search.lead.baseline, search.counts
    best = search.lead.incumbent or search.lead.verified_baseline
    if best is None:
        failed = baseline.status in FAILED and baseline.status is not Status.LATE
        failure = (baseline.reason or str(baseline.status)) if failed else ""
        if failed or counts.failed + counts.wrong:
            why = "every candidate failed" + (f" ({failure})" if failure else "")
        else:
            why = f"{search.why or 'ended'} before anything was measured"
        why += ", the heuristic is used unverified"
        return Finding(baseline.chain, "heuristic", float("inf"), float("inf"), False, False, why, baseline.linear,
                       Ratio(1.0, 1.0, 1.0), None, None, failure)
    base = baseline.score if search.lead.verified_baseline else float("inf")
    ratio = base / best.score if base < float("inf") else 1.0
    return _found(search, best, best.score, base, False, Ratio(ratio, ratio, ratio))


def _found(search: KernelSearch, winner: Candidate, seconds: float, heuristic: float, confirmed: bool, speedup: Ratio) -> Finding:
    source = "heuristic" if winner is search.lead.baseline else "database" if winner.origin is Origin.DATABASE else "beam"
    search.listener(KernelFinished(search.key, seconds, heuristic, chain_text(winner.chain), search.why, True))
    return Finding(winner.chain, source, seconds, heuristic, True, confirmed, search.why, winner.linear, speedup, winner,
                   search.lead.verified_baseline)
