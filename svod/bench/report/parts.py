"""What several parts of the report share: how things are called, what counts as a gain, and the frame of a section."""

from __future__ import annotations

import re
from collections.abc import Sequence

from svod.bench.report.data import Overview, TunedKernel
from svod.bench.report.markup import Markup, tag
from svod.bench.results import CaseResult, Speedup

FASTER = 1.02  # a gain worth calling one
NEAR_CEILING = 0.8  # of the ceiling: nothing worth a search is left
CUT_SHORT = ("budget spent", "interrupted")  # how searches end that had more to try


def case_id(case: CaseResult) -> str:
    """The name of a case's row in the page."""
    return "case-" + re.sub(r"\W+", "-", case.name)


def peer_names(view: Overview) -> list[str]:
    """Peers that have a time in some case, in order of appearance."""
    return list(dict.fromkeys(o.name for c in view.cases for o in c.peers if o.median is not None))


def over_best_peer(case: CaseResult) -> Speedup | None:
    """svod at its best over the fastest peer."""
    return case.svod.speedups.get(case.best_peer) if case.svod is not None and case.best_peer is not None else None


def over_heuristic(case: CaseResult) -> Speedup | None:
    """Tuned over heuristic; one chain for both is the speed-up 1."""
    tuned = case.outcome("tuned")
    if tuned is None or tuned.status != "ok":
        return None
    return Speedup(1.0, 1.0, 1.0) if tuned.same_as == "heuristic" else tuned.speedups.get("heuristic")


def search_seconds(case: CaseResult) -> float | None:
    """Seconds that the search of a case took; None where nothing was searched."""
    return next((o.search_seconds for o in case.contestants if o.search_seconds is not None), None)


def count(n: int, what: str) -> str:
    """`3 kernels`, `1 search`, `2 searches`."""
    return f"{n} {what}{'' if n == 1 else 'es' if what.endswith('ch') else 's'}"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1] if names else "")))


def origin_of(k: TunedKernel) -> str:
    """Where a kernel comes from, and how many more places there are: `layer1.0.conv1 +1`; its name where that is not known."""
    return (k.origins[0] + (f" +{len(k.origins) - 1}" if len(k.origins) > 1 else "")) if k.origins else k.name


def short_name(k: TunedKernel) -> str:
    """Its origin without folders."""
    return origin_of(k).rsplit("/", 1)[-1]


def kernel_title(k: TunedKernel) -> str:
    """Origin, kind and shape: unlike the others of a model."""
    return f"{short_name(k)} ({k.name} {k.shape})" if k.shape else short_name(k)


def chain_of(words: Sequence[str]) -> Markup:
    """A chain as a row of opts."""
    return tag("span", *(tag("code", w) for w in words), class_="chain") if words else tag("span", "as it is", class_="muted")


def section(id_: str, title: str, *content: object) -> Markup:
    """A section that the page's navigation can name."""
    return tag("section", tag("h2", title, id=f"{id_}-title"), *content, id=id_, aria_labelledby=f"{id_}-title")


def lead(*content: object) -> Markup:
    """The sentence under a section's title."""
    return tag("p", *content, class_="lead")


def note(text: str) -> Markup:
    """A remark; `words` between backquotes are code."""
    parts = text.split("`")
    return tag("p", *(tag("code", p) if i % 2 else p for i, p in enumerate(parts)), class_="note")
