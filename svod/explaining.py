"""Defines `svod.explain(tensor)`: shows a person how a tensor's graph becomes kernels, and analyses the plan that runs them.

    print(svod.explain((x @ w).softmax(-1)))

    graph: 15 nodes, as the schedule sees it
       …
       7  mul %3, %6             float32 16×24×8  kernel 0
       8  reduce add over 2 %7   float32 16×24×1  kernel 0
       9  reshape %8             float32 16×24
      10  reduce max over 1 %9   float32 16×1     kernel 1
       …
    kernels: 2, each what is computed between buffers
      0  gemm  float32 16×24×1  stores 8, from 0, 4  model.py:12
         because: a reduction read at several places
       …
    plan: the table of `plan.analyze()`

Views (reshape, permute, …) are nodes of the graph and cost nothing. A value that several kernels compute is listed with all of them.
Kernels are compiled with the chains known so far (nothing is searched). Nothing is run, and the tensors stay as they are.

`svod.explain(tensor, html="steps.html")` also writes a page: every kernel step by step, down to machine code.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from svod.bench.analyze import PlanAnalysis
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.kernel_form import KernelForm
from svod.core.graph import graph
from svod.core.graph.callback import call_of, is_callback
from svod.core.graph.shapes import shape_of
from svod.core.ir.origin import origin_of
from svod.core.ir.uop import MOVEMENT, Ops, UOp
from svod.core.ir.variable import without_binds
from svod.core.kernel.chain_text import AS_IT_IS, chain_text
from svod.core.schedule.schedule import Explained, explain_schedule
from svod.errors import ArgumentError, ScheduleError
from svod.prepare import arranged, complete_config, prepare_graph
from svod.steps.page import render_plans
from svod.steps.plan_steps import KernelSeconds, PlanPart, part_of_plan
from svod.steps.steps import PassStep
from svod.system.pages import write_page
from svod.tensor import Tensor
from svod.tracing import Jit
from svod.tune.plans.alternatives import PlanGraph, deviations_of
from svod.tune.resolved import database, resolve

_HIDDEN = frozenset({Ops.UNIQUE, Ops.LUNIQUE, Ops.DEVICE, Ops.CONST, Ops.SINK, Ops.RANGE, Ops.BIND, Ops.DEFINE_VAR})
Told = tuple[str, Callable[[], list[PlanPart]]]      # the explanation as text, and a function that makes the steps of the HTML page
_READ_OPS = (Ops.BUFFER, Ops.CALL, Ops.END)    # nodes that a kernel reads from memory instead of computing them


class Explanation(str):
    """A string that an interactive prompt shows as `print` does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(*asked: Tensor | Jit | ExecutionPlan, html: str | os.PathLike[str] | None = None) -> Explanation:
    """Explain how tensors, a function under `svod.jit`, or a plan are computed; returns text: `print(svod.explain(t))`.

    For tensors: their graph, its kernels with the rule that cut each, and the analysis of their plan. For a function that has been called,
    and for a plan: the kernels with their chains and the analysis, plan by plan.

    html: a file to write as well, one page that opens offline: each kernel step by step, from its AST over the loops after each opt and
    each later pass to machine code. Changed lines are shown next to the previous ones.

    Raises ScheduleError without an argument, ArgumentError for an argument of another kind and for a function that was not called yet, the
    errors of preparing the tensors, and OSError for a file that cannot be written. A step that cannot be made shows its error instead."""
    if not asked:
        raise ScheduleError("explain needs at least one tensor")
    if len(asked) == 1 and isinstance(asked[0], Jit):
        text, parts = _explain_function(asked[0])
    elif len(asked) == 1 and isinstance(asked[0], ExecutionPlan):
        text, parts = _explain_plan(asked[0])
    else:
        tensors = [t for t in asked if isinstance(t, Tensor)]
        if len(tensors) != len(asked):
            other = next(type(t).__name__ for t in asked if not isinstance(t, Tensor))
            raise ArgumentError("explain takes tensors, one by one: explain(a, b); or one function under svod.jit, or one plan; "
                                f"got {other}")
        text, parts = _explain_tensors(tensors)
    if html is not None:
        write_page(html, render_plans("From a graph to machine code", parts()))
    return Explanation(text)


def _explain_function(f: Jit) -> Told:
    plans = f.plans
    if not plans:
        raise ArgumentError(f"{getattr(f, '__name__', 'the function')} has no plan yet: it is captured when it is called; call it with its "
                            "arguments, then explain it")
    told = {f"plan {i} of {len(plans)}": _explain_plan(plan, f"plan {i} of {len(plans)}", f"{i}-") for i, plan in enumerate(plans)}
    return ("\n\n".join(f"{title}: {text}" for title, (text, _) in told.items()),
            lambda: [part for _, parts in told.values() for part in parts()])


def _explain_plan(plan: ExecutionPlan, title: str = "plan", prefix: str = "") -> Told:
    """Explain a plan. `title` and `prefix` distinguish it and its HTML ids on a page with several plans."""
    lines = [repr(plan)]
    for k in plan.every:
        read = ", ".join(f"b{b}" for slot, b in enumerate(k.buffers) if slot not in k.spec.outs)
        written = ", ".join(f"b{k.buffers[slot]}" for slot in k.spec.outs)
        lines.append(f"  {k.name}  {written} ← {read or 'nothing'}  {k.origin}".rstrip())
        lines.append(f"     because: {'it is an output' if k.cut == 'output' else k.cut}")
        lines.append(f"     {k.opts_source}: {k.chain or AS_IT_IS}")
    if not plan.every:
        return "\n".join(lines), lambda: [part_of_plan(plan, title=title)]
    analysis = plan.analyze()
    return ("\n".join([*lines, "", str(analysis)]),
            lambda: [part_of_plan(plan, figures=_figures(plan, analysis), title=title, prefix=prefix)])


def _figures(plan: ExecutionPlan, analysis: PlanAnalysis) -> KernelSeconds:
    """Return the seconds of a plan's kernels: the lower bounds of the analysis, and the times in the tuning database for their chains."""
    db = database(complete_config(None))
    measured = {}
    for k in plan.every:
        if isinstance(k.form, KernelForm):
            times = [w.time for w in db.ranking(k.key, k.form.target.key) if chain_text(w.chain) == k.chain and w.time is not None]
            measured.update({k.key: times[0]} if times else {})
    return KernelSeconds({k.key: k.seconds for k in analysis.kernels if k.seconds is not None}, measured)


def _explain_tensors(tensors: Sequence[Tensor]) -> Told:
    nodes = [t.uop for t in tensors]
    sink, _, _ = without_binds(graph.sink(*nodes))
    resolved = resolve(replace(complete_config(None), beam=None, capture=None))
    sink = arranged(sink, resolved)
    explained = explain_schedule(sink)
    numbers = {u: i for i, u in enumerate(n for n in explained.graph.sink.toposort() if n.op not in _HIDDEN)}
    if not explained.schedule.calls:
        nodes_alone = _graph_lines(explained, numbers, {})
        step = _graph_step(nodes_alone)
        return ("\n".join([*nodes_alone, "", "kernels: none; the tensors are buffers, views of them or constants"]),
                lambda: [PlanPart("graph", (), (), (step,), ())])
    prepared = prepare_graph(nodes, resolved)
    plan = prepared.plan
    if prepared.chosen:
        explained = explain_schedule(sink, deviations=deviations_of(PlanGraph(sink), prepared.chosen))
    order = _plan_order(explained)
    kernels = {explained.roots[i]: position for position, i in enumerate(order)}
    calls = {call_of(u): position for u, position in kernels.items() if u is not None and is_callback(u)}
    kernels.update({u: calls[call_of(u)] for u in numbers if is_callback(u)})
    of_graph, of_kernels = _graph_lines(explained, numbers, kernels), _kernel_lines(explained, numbers, kernels, order)
    analysis = plan.analyze()
    first = (_graph_step(of_graph),
             PassStep("kernels", "kernels", "the nodes that each kernel stores and reads, and why it was cut there", "kernels",
                  "\n".join(of_kernels)))
    return ("\n".join([*of_graph, "", *of_kernels, "", "plan", str(analysis)]),
            lambda: [part_of_plan(plan, explained, figures=_figures(plan, analysis), first=first)])


def _graph_step(lines: Sequence[str]) -> PassStep:
    return PassStep("graph", "graph", "the nodes as the schedule sees them, and the kernels that compute each", "nodes", "\n".join(lines))


def _plan_order(explained: Explained) -> list[int]:
    """Return the positions of the schedule's calls, sorted by level as in the plan."""
    levels = explained.schedule.levels()
    return sorted(range(len(levels)), key=lambda i: (levels[i], i))


def _inside(root: UOp, realised: Iterable[UOp]) -> list[UOp]:
    """Return the nodes that the kernel of `root` computes, up to buffers and the nodes in `realised`, which other kernels store."""
    ends = set(realised) - {root}
    return [n for n in root.toposort(gate=lambda n: n not in ends and n.op not in _READ_OPS) if n not in ends and n.op not in _READ_OPS]


def _graph_lines(explained: Explained, numbers: dict[UOp, int], kernels: dict[UOp | None, int]) -> list[str]:
    computed: dict[UOp, list[int]] = {}
    for root, position in kernels.items():
        if root is not None:
            for n in _inside(root, (r for r in kernels if r is not None)):
                computed.setdefault(n, []).append(position)
    rows = []
    for u, number in numbers.items():
        where = ", ".join(map(str, sorted(computed.get(u, ())))) if u.op not in MOVEMENT else ""
        rows.append((str(number), _what(u, numbers), _type(u), f"kernel {where}" if where else "", origin_of(u) or ""))
    widths = [max((len(r[i]) for r in rows), default=0) for i in range(5)]
    lines = [f"  {n:>{widths[0]}}  {what:<{widths[1]}}  {kind:<{widths[2]}}  {where:<{widths[3]}}  {origin}".rstrip()
             for n, what, kind, where, origin in rows]
    return [f"graph: {len(rows)} nodes, as the schedule sees it", *lines]


def _kernel_lines(explained: Explained, numbers: dict[UOp, int], kernels: dict[UOp | None, int], order: Sequence[int]) -> list[str]:
    realised = [r for r in kernels if r is not None]
    lines = [f"kernels: {len(order)}, each what is computed between buffers"]
    for position, i in enumerate(order):
        call, root = explained.schedule.calls[i], explained.roots[i]
        if root is None:
            lines.append(f"  {position}  {call.name_hint}")
        else:
            inside = set(_inside(root, realised))
            reads = sorted({numbers[s] for n in inside for s in n.src if s not in inside and s in numbers})
            stored = ", ".join(str(numbers[r]) for r in realised if kernels[r] == position)
            sources = f", from {', '.join(map(str, reads))}" if reads else ""
            lines.append(f"  {position}  {call.name_hint}  {_type(root)}  stores {stored}{sources}  {call.origin}".rstrip())
        lines.append(f"     because: {'it is an output' if call.why == 'output' else call.why}")
    return lines


def _type(u: UOp) -> str:
    if u.op is Ops.BUFFER:
        return f"{u.dtype.name} {u.arg}"
    if u.op in (Ops.CALL, Ops.END):
        return ""
    shape = "×".join(map(str, shape_of(u)))
    return f"{u.dtype.name} {shape or 'scalar'}"


def _what(u: UOp, numbers: dict[UOp, int]) -> str:
    """Describe a node: its operation with parameters, and its operands by number, constants by value."""
    name = u.op.name.lower().removesuffix("_axis")
    told = ""
    if u.op is Ops.REDUCE_AXIS:
        told = f" {u.arg[0].lower()} over {', '.join(map(str, u.arg[1]))}"
    elif u.op in (Ops.PERMUTE, Ops.FLIP):
        told = f" {', '.join(map(str, u.arg))}"
    elif u.op is Ops.PAD:
        told = " " + ", ".join(f"{lo}+{hi}" for lo, hi in u.arg[0]) + f" with {u.arg[1]}"
    elif u.op is Ops.SHRINK:
        told = " to " + ", ".join(f"{begin}…{end}" for begin, end in u.arg)
    elif u.op is Ops.WINDOW:
        told = " " + ", ".join(f"axis {axis}: {size} by {stride}" + (f", dilated {dilation}" if dilation != 1 else "")
                               for axis, size, stride, dilation in u.arg)
    elif u.op is Ops.CUSTOM_FUNCTION:
        told = f" {u.arg[1][0].name}" if is_callback(u) else f" {u.arg[0].lower()}"
    elif u.op in (Ops.GATHER, Ops.GEP, Ops.IOTA):
        told = f" {u.arg}"
    operands = [str(s.arg) if s.op is Ops.CONST else f"%{numbers[s]}" for s in u.src if s in numbers or s.op is Ops.CONST]
    return f"{name}{told} {', '.join(operands)}".rstrip()
