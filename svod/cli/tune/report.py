"""The final report of svod-tune: the table of kernels, the whole plan, the next command; and the same as JSON."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from svod.bench.race import Ratio
from svod.bench.roofline import Ceilings
from svod.bench.summary import NOISY
from svod.cli.tune.progress import short_origin
from svod.cli.tune.survey import KernelRate, SurveyRow, rate_of
from svod.compile.plan.unbound_plan import Named
from svod.core.machine.target import Target
from svod.system.quantities import count, gain, percent
from svod.system.quantities import seconds as in_words
from svod.system.tables import text_table
from svod.tune.db.records import Rounding, SizeTime
from svod.tune.plans.check import PlanCheck, name_of
from svod.tune.plans.form_check import TimedForm

KEY_SHOWN = 8
NARROW_TABLE_COLUMNS = 90    # a table for fewer characters per line leaves some of its columns out
NARROW_NAME_CHARACTERS = 16    # most characters of a name in a narrow table; in others names take half of what is beyond that width
MOST_NAMES = 4              # most kernels that a sentence names


@dataclass(frozen=True)
class KernelReport:
    """The result for a kernel. `chain`: the chain that the next `prepare` uses, as plain data; `source`: its origin (database, heuristic,
    …). `heuristic` and `tuned`: seconds of one call, or None; for a winner of the database they are `Winner.heuristic_seconds` and
    `Winner.time`, for a kernel with variables geometric means over `sizes`. A `confirmed` chain was timed against the heuristic at full
    size; it is `noisy` if the machine was busy then. `against`: the digest of the heuristic's LINEAR at that time, "" if it was
    today's."""

    row: SurveyRow
    chain: tuple[Any, ...]
    source: str
    heuristic: float | None
    tuned: float | None
    verified: bool
    confirmed: bool
    speedup: Ratio | None
    linear: str
    why: str
    against: str = ""
    sizes: tuple[SizeTime, ...] = ()
    noisy: bool = False

    @property
    def gain(self) -> float | None:
        """The speed-up over the heuristic, the ratio of the two times as they are shown."""
        return gain(self.heuristic, self.tuned)


def work_lines(rows: Sequence[SurveyRow], beam: int) -> list[str]:
    """A line about the work to do, and a line for each reason why kernels are left out."""
    groups = {d: [r for r in rows if r.decision == d] for d in ("search", "check", "known", "small", "left out")}
    known = sum(r.winner is not None for r in groups["search"])
    on = f" ({known} of them known, with more to try)" if known else ""
    words = [f"{count(len(groups['search']), 'kernel')} to search{on}" if groups["search"] else f"nothing to search with beam {beam}"]
    words += [f"{len(groups['check'])} with chains of others to check"] if groups["check"] else []
    words += [f"{len(groups['known'])} known to the database"] if groups["known"] else []
    if small := groups["small"]:
        words.append(f"{len(small)} too small to matter ({_share(small)} of the time) keep{'s' * (len(small) == 1)} the heuristic")
    left = groups["left out"]
    words += [f"{len(left)} left out"] if left else []
    families = len({r.family for r in rows})
    first = f"{count(len(rows), 'distinct kernel')} in {families} famil{'y' if families == 1 else 'ies'}: {', '.join(words)}"
    return [first, *(f"left out: {_names(some)} ({_share(some)} of the time): {why}"
                     for why in dict.fromkeys(r.why for r in left) if (some := [r for r in left if r.why == why]))]


def _share(rows: Sequence[SurveyRow]) -> str:
    return percent(sum(r.share for r in rows if not r.only_in_form))


def _names(rows: Sequence[SurveyRow]) -> str:
    """The first few kernels of a list by name and key."""
    shown = ", ".join(f"{r.name} {r.key[:KEY_SHOWN]}" for r in rows[:MOST_NAMES])
    return shown + (f" and {len(rows) - MOST_NAMES} more" if len(rows) > MOST_NAMES else "")


def kernel_table(outcomes: Sequence[KernelReport], target: Target, ceilings: Ceilings | None, width: int) -> list[str]:
    """The lines of the table of kernels with a verified chain, and below it lines about the others with the reasons. Below the width
    NARROW_TABLE_COLUMNS the table has no rates, so that names and keys stay readable."""
    verified = [o for o in outcomes if o.verified]
    rows: list[tuple[str, ...]] = []
    marks: set[str] = set()
    for o in verified:
        shown = rate_of(o.row, o.tuned, target, ceilings) if o.tuned else KernelRate(0.0, "", None)
        giga = shown.value / 1e9
        rate = f"{giga:.{0 if giga >= 10 else 1}f} {shown.unit}" if o.tuned else ""
        gained = "" if o.gain is None else f"{o.gain:.2f}×{_doubt(o)}"
        mark = _share_mark(o, ceilings) if shown.share is not None else ""
        marks.add(mark)
        rows.append((_named(o.row, width), _origin_words(o.row), in_words(o.heuristic), in_words(o.tuned), gained, rate,
                     f"{mark} {percent(shown.share)}".strip()))
    lines = _fitting(("kernel", "from", "heuristic", "tuned", "gain", "rate", "ceiling"), rows, width, text=(), without=("rate",))
    return [*lines, *([f"~ known to worse than ±{100 * NOISY:.0f} %"] if any(map(_doubt, verified)) else []),
            *(f"{mark} {words}" for mark, words in _MARKS.items() if mark in marks), *_unverified(outcomes)]


_MARKS = {"≥": "of the ceiling at least: the machine was busy while the kernel was timed",
          "≤": "of the ceiling at most: the machine was busy while its ceilings were measured, and they are higher",
          "≈": "of the ceiling about: the machine was busy while the kernel was timed, and while its ceilings were measured"}


def _share_mark(o: KernelReport, ceilings: Ceilings | None) -> str:
    """The mark of a share of the ceiling, one of `_MARKS`, or "" for undisturbed measurements."""
    low, high = o.noisy, ceilings is not None and ceilings.busy is not None
    return "≈" if low and high else "≥" if low else "≤" if high else ""


def _named(row: SurveyRow, width: int) -> str:
    """A kernel's name and the beginning of its key. The name is cut if the table is too narrow for it, the key never."""
    most = NARROW_NAME_CHARACTERS + max(0, width - NARROW_TABLE_COLUMNS) // 2
    name = row.name if len(row.name) <= most else f"{row.name[:most - 1]}…"
    return f"{name} {row.key[:KEY_SHOWN]}"


def _fitting(header: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, text: Collection[str],
             without: Collection[str]) -> list[str]:
    """The lines of a table of kernels; none without rows. All columns are numbers, aligned to the right, except the first two and those in
    `text`. The columns in `without` are left out if the width is below NARROW_TABLE_COLUMNS."""
    kept = [i for i, name in enumerate(header) if width >= NARROW_TABLE_COLUMNS or name not in without]
    right = {name for name in header[2:] if name not in text}
    return text_table([header[i] for i in kept], [[r[i] for i in kept] for r in rows], right=right, width=width, shrink=("from",)) \
        if rows else []


def _unverified(outcomes: Sequence[KernelReport]) -> list[str]:
    """The kernels without a verified chain: a line for each reason."""
    groups: dict[str, list[SurveyRow]] = {}
    for o in outcomes:
        if not o.verified:
            groups.setdefault(o.why, []).append(o.row)
    return [f"keep{'s' * (len(rows) == 1)} the heuristic: {_names(rows)} ({_share(rows)} of the time): {why}"
            for why, rows in groups.items()]


def _origin_words(row: SurveyRow) -> str:
    more = f" +{len(row.origins) - 1}" if len(row.origins) > 1 else ""
    return (short_origin(row.origins[0]) if row.origins else "") + more + ("; other form" if row.only_in_form else "")


def _doubt(o: KernelReport) -> str:
    """The mark of a gain with a wide interval."""
    return " ~" if o.speedup is not None and o.speedup.half_width > NOISY else ""


def dry_table(rows: Sequence[SurveyRow], estimates: Mapping[str, float], width: int) -> list[str]:
    """The lines of the table of --dry-run: the decision for each kernel, and the gain that the database knows. The times are of calls in
    their plan, with the caches as other kernels leave them. `estimates`: key → roofline bound in seconds, by the machine's ceilings."""
    families = {f: i for i, f in enumerate(dict.fromkeys(r.family for r in rows), 1)}
    lines = []
    for r in rows:
        known = None if r.winner is None else gain(r.winner.heuristic_seconds, r.winner.time)
        database = "nothing" if known is None else f"{known:.2f}×"
        lines.append((_named(r, width), _origin_words(r), f"{r.calls:g}", percent(r.share), str(families[r.family]),
                      in_words(r.seconds), in_words(estimates.get(r.key)), database, r.decision))
    return _fitting(("kernel", "from", "calls", "share", "family", "in plan", "bound", "database", "decision"), lines, width,
                    text=("decision",), without=("family", "bound"))


def size_lines(outcomes: Sequence[KernelReport]) -> list[str]:
    """The gains of the kernels with variables at each timed size."""
    return [f"{o.row.name} {o.row.key[:KEY_SHOWN]}: " + "; ".join(f"{s.named(o.row.variables)} {in_words(s.seconds)}, {1 / s.ratio:.2f}×"
                                                                  for s in o.sizes) for o in outcomes if o.sizes]


def plan_lines(check: PlanCheck, name: str, kernels: int) -> list[str]:
    """The times of the whole plan with heuristic and with tuned chains."""
    r = check.ratio
    bounded = r.low > 0.0 and r.high < float("inf")
    interval = f", 95 % interval {1 / r.high:.2f}–{1 / r.low:.2f}×" if bounded else ", too few for an interval"
    predicted = f"{in_words(check.predicted):>8}   {check.heuristic / check.predicted:.2f}×   the sum of what its kernels gained" \
        if check.predicted > 0 else f"{'–':>8}           more than it takes now: its kernels were tuned on a slower machine"
    at = ", ".join(f"{name}={value}" for name, value in check.at.items())
    lines = [f"whole plan{name} ({count(kernels, 'kernel')}{f', at {at}' * bool(at)}): tuned chains over the heuristic's",
             f"  heuristic  {in_words(check.heuristic):>8}"]
    if not check.changed and not check.given_up:
        return [*lines, "  tuned      the same: every kernel keeps the heuristic's chain"]
    rounds = count(check.rounds, "interleaved round")
    lines += [f"  predicted  {predicted}",
              f"  measured   {in_words(check.measured):>8}   {1 / r.median:.2f}×   {rounds}{interval}"]
    if check.differs:
        promised = f"{in_words(check.promised)} were promised" if check.promised > 0 else "nothing was promised"
        way = "gained" if check.gained >= 0 else "lost"
        lines += [f"  {in_words(abs(check.gained))} {way}, {promised}:", *(f"    {line}" for line in check.explanation)]
    if check.given_up:
        lines += ["  given up, as they lose here what they gain alone:", *(f"    {line}" for line in check.given_up)]
    if check.noisy:
        lines.append(f"  the machine was busy ({check.noisy}): take these figures with care")
    return lines


def rounding_lines(records: Sequence[Rounding], names: Mapping[str, Named], width: int) -> list[str]:
    """A choice of kernels to round: those that save most first, then the whole plan."""
    first, used = records[0], [r for r in records if r.used]
    total = sum(r.before - r.after for r in used)
    rows = [[f"{names[r.kernel].name if r.kernel in names else ''} {r.kernel[:8]}".strip(), "bfloat16" if r.used else "float32",
             "–" if r.error is None else f"{r.error:.1e}", in_words(r.before), in_words(r.after),
             f"{100 * (r.before - r.after) / total:.0f} %" if r.used and total > 0 else ""]
            for r in sorted(records, key=lambda r: (not r.used, r.after - r.before))]
    header = ["kernel", "factors", "error alone", "float32", "rounded", "of the gain"]
    end = f"{in_words(first.plan_after):>8}   {first.plan_before / first.plan_after:.2f}×" if used and first.plan_after > 0 else \
        "the same: no rounded kernel saves time within that error"
    return [f"numerics=fast: an error of at most {first.max_error:g} of the largest output is allowed; sample inputs: {first.samples}", "",
            *text_table(header, rows, right=header[2:], shrink=header[:1], width=width), "",
            "whole plan: rounded kernels over float32, each with its best known chain",
            f"  float32    {in_words(first.plan_before):>8}", f"  as chosen  {end}",
            f"  error      {first.plan_error:>8.1e}   measured, all outputs, over the sample inputs"]


def form_lines(forms: Sequence[TimedForm]) -> list[str]:
    """The forms of convolutions, by prediction or by the times of both, and what the next `prepare` uses."""
    return ["convolutions directly or by transforms", *(f"  {f.words}" for f in forms)] if forms else []


# -- JSON ---------------------------------------------------------------------------------------------------------------

def outcome_json(o: KernelReport, target: Target, ceilings: Ceilings | None) -> dict[str, Any]:
    rate = rate_of(o.row, o.tuned, target, ceilings) if o.tuned else None
    interval = None if o.speedup is None else [o.speedup.low, o.speedup.median, o.speedup.high]
    return {**row_json(o.row), "chain": o.chain, "source": o.source, "heuristic_seconds": o.heuristic, "tuned_seconds": o.tuned,
            "gain": o.gain, "verified": o.verified, "confirmed": o.confirmed, "speedup": interval, "linear": o.linear, "why": o.why,
            "sizes": [asdict(s) for s in o.sizes],
            "rate": None if rate is None else {"per_second": rate.value, "unit": rate.unit, "ceiling_share": rate.share, "noisy": o.noisy}}


def row_json(row: SurveyRow) -> dict[str, Any]:
    return {"kernel": row.key, "name": row.name, "origins": list(row.origins), "calls": row.calls, "captured_seconds": row.seconds,
            "share": row.share, "family": row.family, "flops": row.flops, "bytes": round(row.bytes), "decision": row.decision,
            "why": row.why, "database": None if row.winner is None else {
                "chain": row.winner.chain, "speedup": row.winner.speedup, "time": row.winner.time, "baseline": row.winner.baseline,
                "linear": row.winner.linear, "codegen": row.winner.codegen, "layer": row.winner.layer}}


def plan_json(check: PlanCheck, plan: str, unbound: Any) -> dict[str, Any]:
    r = check.ratio
    finite = r.high < float("inf")
    return {"plan": plan, "heuristic_seconds": check.heuristic, "predicted_seconds": check.predicted,
            "measured_seconds": check.measured, "gain": 1 / r.median,
            "promised_gain": check.promised, "measured_gain": check.gained, "ratio": r.median, "ratio_low": r.low if finite else None,
            "ratio_high": r.high if finite else None, "rounds": check.rounds, "changed": check.changed, "noisy": check.noisy,
            "bytes_touched": check.bytes_touched, "at": dict(check.at), "differs": check.differs, "explanation": list(check.explanation),
        "given_up": list(check.given_up),
            "kernels": [{"kernel": k.kernel, "name": name_of(unbound, k.kernel), "calls": k.calls, "promised_gain": k.promised,
                         "measured_gain": k.measured, "low": k.low, "high": k.high, "reason": k.reason, "inside": asdict(k.inside),
                         "alone": None if k.alone is None else asdict(k.alone)} for k in check.kernels]}
