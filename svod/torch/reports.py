"""Reports which parts of this process's PyTorch models svod runs, and which parts PyTorch: `svod.torch.report()`."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._dynamo.utils import counters

from svod.system.quantities import seconds as duration
from svod.system.tables import text_table
from svod.torch.functions import GraphFunction, functions
from svod.torch.translate import Missing


@dataclass(frozen=True)
class GraphReport:
    """One graph. `missing`: the operations that PyTorch runs inside plans; `refused`: the reasons of calls that were left to PyTorch.
    `operations`, `weights`, `plans`, `kernels` and `calls` are counts. `run_seconds`: the fastest run; `host_seconds`: the time of all
    runs in operations that PyTorch runs."""

    name: str
    entry: str
    operations: int
    weights: int
    plans: int
    kernels: int
    calls: int
    prepare_seconds: float
    run_seconds: float
    host_seconds: float
    missing: tuple[Missing, ...]
    refused: tuple[str, ...]
    function: GraphFunction

    @property
    def is_whole(self) -> bool:
        """Whether svod runs the graph without PyTorch."""
        return not self.missing and not self.refused


@dataclass(frozen=True)
class GraphsReport:
    """The live graphs of this process by name, and Dynamo's reasons for leaving code out of graphs (of any backend). `print` shows both;
    `graphs` and `breaks` are the data."""

    graphs: tuple[GraphReport, ...]
    breaks: tuple[str, ...] = ()

    def __str__(self) -> str:
        broken = [f"Dynamo breaks the graph, and PyTorch runs what stands there: {reason}" for reason in self.breaks]
        if not self.graphs:
            return "\n".join(["svod runs no PyTorch graph in this process", *broken])
        rows = [(g.name, str(g.operations), str(g.weights), str(g.plans), str(g.kernels), str(g.calls), duration(g.prepare_seconds),
                 duration(g.run_seconds), "-" if g.is_whole else f"{sum(m.times for m in g.missing)}") for g in self.graphs]
        header = ("graph", "operations", "weights", "plans", "kernels", "calls", "prepared in", "a run", "in PyTorch")
        lines = text_table(header, rows, right=header[1:], width=140)
        for g in self.graphs:
            lines += [f"{g.name}: PyTorch runs {m.name} ×{m.times}, first at {m.place}: {m.why}" for m in g.missing]
            lines += [f"{g.name}: PyTorch runs it as it is: {why}" for why in g.refused]
        return "\n".join([*lines, *broken])


def report() -> GraphsReport:
    """A report on the PyTorch models of this process: graphs, plans, kernels, times, and the operations that PyTorch runs, with reasons.
    `svod.profile(graph.function.plans[0].captured.plan)` has the time of each kernel."""
    return GraphsReport(tuple(sorted(map(_of, list(functions)), key=lambda g: g.name)), tuple(graph_breaks()))


def graph_breaks() -> dict[str, str]:
    """Dynamo's reasons for leaving code out of graphs in this process, each with its message and, if there is one, a hint."""
    found: dict[str, str] = {}
    for text in [*counters["graph_break"], *counters["unimplemented"]]:
        reason, *more = [line.strip() for line in str(text).splitlines() if line.strip()] or [""]
        found.setdefault(reason, min(more, key=lambda line: not line.startswith("Hint: "), default="").partition(": ")[2])
    return found


def _of(f: GraphFunction) -> GraphReport:
    plans: list[Any] = f.plans
    kernels = sum(len(p.captured.plan.kernels) for p in plans if p.captured is not None)
    latest = max((p for p in plans if p.runs), key=lambda p: p.runs, default=None)
    return GraphReport(f.name, f.entry, f.operations, len(f.static), len(plans), kernels, f.calls, f.prepare_seconds,
                       0.0 if latest is None else latest.seconds, sum(p.clock.seconds for p in plans), tuple(f.missing),
                       tuple(dict.fromkeys(f.refused.values())), f)
