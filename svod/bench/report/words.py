"""Names and thresholds that the report's sections and templates share."""
from __future__ import annotations

import re
from collections.abc import Sequence

from svod.bench.report.data import Overview, TunedKernel
from svod.bench.results import CaseResult, Speedup

FASTER = 1.02           # least speed-up that counts as a gain
NEAR_CEILING = 0.8      # share of the ceiling above which another search is not worthwhile


def case_id(case: CaseResult) -> str:
    """The HTML id of a case's row."""
    return "case-" + re.sub(r"\W+", "-", case.name)


def peer_names(view: Overview, *, competing: bool = False) -> list[str]:
    """The peers that have a time in any case, in order of appearance. `competing`: without those that compute in a lower precision."""
    return list(dict.fromkeys(o.name for c in view.cases for o in c.peers if o.median is not None and not (competing and o.precision)))


def over_best_peer(case: CaseResult) -> Speedup | None:
    """The speed-up of the best svod contestant over the fastest peer."""
    return case.svod.speedups.get(case.best_peer) if case.svod is not None and case.best_peer is not None else None


def over_heuristic(case: CaseResult) -> Speedup | None:
    """The speed-up of tuned over heuristic; 1 if both have the same chain."""
    tuned = case.outcome("tuned")
    if tuned is None or tuned.status != "ok":
        return None
    return Speedup(1.0, 1.0, 1.0) if tuned.same_as == "heuristic" else tuned.speedups.get("heuristic")


def side_of(speedup: Speedup) -> str:
    """The CSS class of a speed-up: ahead or behind, or level if its interval contains 1."""
    return "level" if speedup.is_none else "ahead" if speedup.median > 1 else "behind"


def search_seconds(case: CaseResult) -> float | None:
    """Seconds of the search of a case; None if nothing was searched."""
    return next((o.search_seconds for o in case.contestants if o.search_seconds is not None), None)


def listed(names: Sequence[str]) -> str:
    """Join names: `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1] if names else "")))


def short_name(k: TunedKernel) -> str:
    """The first origin of a kernel without folders, and the number of further origins: `layer1.0.conv1 +1`. The kernel's name if it has
    no origin."""
    origin = k.origins[0] + (f" +{len(k.origins) - 1}" if len(k.origins) > 1 else "") if k.origins else k.name
    return origin.rsplit("/", 1)[-1]


def kernel_title(k: TunedKernel) -> str:
    """A kernel's origin, name and shape, which together are unique in a model."""
    return f"{short_name(k)} ({k.name} {k.shape})" if k.shape else short_name(k)


def opt_words(opt: Sequence[object]) -> str:
    """An opt as text: `UPCAST(o0, 8)`."""
    args = (x for x in opt[1:] if x is not None)
    return f"{opt[0]}({', '.join(','.join(map(str, x)) if isinstance(x, (list, tuple)) else str(x) for x in args)})"
