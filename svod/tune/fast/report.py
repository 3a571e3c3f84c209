"""The choice of kernels to round, in a sentence, and as plain data for JSON."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from svod.system.quantities import seconds as duration
from svod.tune.db import Rounding

SHOWN_DIGEST = 12
HOW_TO_CHOOSE = "choose them with svod-tune --numerics fast --max-error E, or by a run with SVOD_MAX_ERROR=E"
OF_FIRST_RUN = "those of the program's first run"


def by_plan(records: Iterable[Rounding]) -> list[list[Rounding]]:
    """The records of each choice, in the order of their times; of several choices for one plan and constants the latest."""
    latest: dict[tuple[str, str, str], list[Rounding]] = {}
    for r in sorted(records, key=lambda r: r.taken_at):
        known = latest.get((r.target, r.plan, r.weights), [])
        latest[r.target, r.plan, r.weights] = [*known, r] if known and known[0].taken_at == r.taken_at else [r]
    return list(latest.values())


def sentence(records: Sequence[Rounding]) -> str:
    """A choice in one line."""
    first, used = records[0], sum(r.used for r in records)
    if not used:
        return (f"numerics=fast: the plan stays in float32: no rounded kernel saves time with an error of at most {first.max_error:g} of "
                f"the largest output; sample inputs: {first.samples}")
    return (f"numerics=fast: {used} of {len(records)} kernels that may be rounded are: the error is {first.plan_error:.1e} of the largest "
            f"output, {first.max_error:g} is allowed, and a run takes {duration(first.plan_after)} instead of "
            f"{duration(first.plan_before)}; sample inputs: {first.samples}")


def rounding_words(r: Rounding) -> str:
    """Why a kernel is rounded in a plan, or why it is not."""
    error = "outputs that are not finite" if r.error is None else f"an error of {r.error:.1e} of the largest output"
    effect = f"rounded alone it costs {error}, and takes {duration(r.after)} of a run instead of {duration(r.before)}"
    verdict = "its factors are rounded to bfloat16" if r.used else f"it stays in float32, as {_why_not(r)}"
    return (f"in plan {r.plan[:SHOWN_DIGEST]} {verdict}: {effect}; the error of the plan as chosen is {r.plan_error:.1e}, "
            f"{r.max_error:g} is allowed; sample inputs: {r.samples or 'not told'}")


def _why_not(r: Rounding) -> str:
    """Why a kernel whose rounding was measured is not rounded."""
    if r.after >= r.before:
        return "rounding it saves no time"
    if r.error is None or r.error > r.max_error:
        return "alone it costs more than the error that is allowed"
    return "the kernels that are rounded leave no room for its error"


def to_data(records: Sequence[Rounding]) -> dict[str, Any]:
    """A choice as plain data."""
    first = records[0]
    return {"plan": first.plan, "target": first.target, "max_error": first.max_error, "error": first.plan_error,
            "float32_seconds": first.plan_before, "seconds": first.plan_after, "samples": first.samples,
            "kernels": [{"kernel": r.kernel, "used": r.used, "error": r.error, "float32_seconds": r.before, "seconds": r.after,
                         "chain": [list(o) for o in r.chain]} for r in records]}
