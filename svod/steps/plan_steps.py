"""The steps of a plan: the result of each pass for the graph and for each distinct kernel, as data.

Passes and their order are the same as in dumps (`svod.compile.plan.dump.PLAN_PASSES`). A pass's text about the whole plan goes into the
plan's part, its text about a kernel into the kernel's part. A kernel that occurs several times is shown once.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from svod.compile.plan.dump import PLAN_PASSES, DumpedPlan
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.kernel_form import KERNEL_PASSES, KernelForm
from svod.compile.plan.plan_parts import PreparedKernel, kernel_name
from svod.core.kernel.chain_text import AS_IT_IS
from svod.core.schedule.schedule import Explained
from svod.errors import SvodError
from svod.steps.steps import PassStep, linked, steps_of
from svod.system.quantities import amount
from svod.system.quantities import seconds as duration

_LATER = {"opts", *(p.name for p in KERNEL_PASSES)}     # passes whose steps `steps_of` makes


class PlanCall(NamedTuple):
    """A kernel of the plan, at position `number` in the plan's order. `part`: the id of the page's part about it; "" if svod has no code
    of it. `cycles`: predicted cycles, or None. `estimate`: the minimum seconds that the machine's ceilings allow; `measured`: seconds of
    a run."""

    number: int
    name: str
    part: str
    source: str
    chain: str
    cycles: float | None
    estimate: float | None
    measured: float | None
    moved: float | None
    level: int | None
    cut: str
    origin: str


@dataclass(frozen=True)
class KernelPart:
    """A kernel on a page of steps. `id`: the HTML id of its part of the page."""

    id: str
    name: str
    facts: tuple[tuple[str, str], ...]
    steps: tuple[PassStep, ...]

    @property
    def cycles(self) -> float | None:
        """The cycles predicted after the last opt; None if there is no prediction."""
        return next((s.cycles for s in reversed(self.steps) if s.name == "opts"), None)


@dataclass(frozen=True)
class PlanPart:
    """A plan on a page of steps. `steps`: texts of passes about the whole plan; `calls`: its kernels in order; `kernels`: distinct ones."""

    title: str
    facts: tuple[tuple[str, str], ...]
    calls: tuple[PlanCall, ...]
    steps: tuple[PassStep, ...]
    kernels: tuple[KernelPart, ...]


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of one run of each kernel, by its key: the minimum that the machine's ceilings allow, and the measured time."""

    estimates: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)


def part_of_plan(plan: ExecutionPlan, explained: Explained | None = None, *, figures: KernelSeconds | None = None, title: str = "plan",
                 prefix: str = "", first: tuple[PassStep, ...] = ()) -> PlanPart:
    """Make the part of a page about a plan, step by step. `explained`: how its graph was cut into kernels; if None, passes over the
    graph are left out. `prefix`: prepended to the HTML ids of its kernels, for pages with several plans. `first`: steps to show before
    the steps of the passes."""
    subject, figures = DumpedPlan(explained, plan), figures or KernelSeconds()
    of_plan: list[PassStep] = list(first)
    of_kernels: dict[str, list[PassStep]] = {}
    for p in PLAN_PASSES:
        if p.name in _LATER or (p.reads_graph and explained is None):
            continue
        try:
            for section in p.show(subject):
                steps = of_kernels.setdefault(section.kernel, []) if section.kernel else of_plan
                if not section.kernel or all(s.name != p.name for s in steps):      # a kernel that occurs again is shown once
                    steps.append(PassStep(p.name, p.name, p.what, f"text after {p.name}", section.text))
        # the pass cannot show the graph: a graph with variables, for example, cannot be printed as text that can be parsed
        except SvodError as e:
            of_plan.append(PassStep(p.name, p.name, p.what, "", "", str(e)))
    parts = {key: _part(k, f"{prefix}kernel-{i}", plan, of_kernels.get(key, []), figures)
             for i, (key, k) in enumerate(subject.first.items())}
    calls = tuple(call_of(i, k, parts.get(k.key), figures) for i, k in enumerate(plan.every))
    return PlanPart(title, tuple(_plan_facts(plan)), calls, linked(of_plan), tuple(parts.values()))


def _plan_facts(plan: ExecutionPlan) -> Iterator[tuple[str, str]]:
    yield "device", plan.device
    distinct = len({k.key for k in plan.every})
    yield "kernels", f"{len(plan.every)}" + (f", {distinct} of them distinct" if distinct < len(plan.every) else "")
    yield "memory", f"{amount(plan.memory.shared, 'B')} for intermediates ({plan.memory.mode}), {amount(plan.memory.kept, 'B')} kept"
    if plan.variables:
        yield "variables", ", ".join(f"{v.name} {v.min}…{v.max}" for v in plan.variables.values())


def call_of(number: int, k: PreparedKernel, part: KernelPart | None = None, figures: KernelSeconds | None = None) -> PlanCall:
    """Make the overview's row of a kernel. `number`: its position in the plan."""
    figures = figures or KernelSeconds()
    work = k.work
    return PlanCall(number, kernel_name(k), part.id if part is not None else "", k.opts_source, k.chain or AS_IT_IS,
                part.cycles if part is not None else None, figures.estimates.get(k.key), figures.measured.get(k.key),
                work.bytes_moved if work is not None else None, k.level, _cut_words(k.cut), k.origin)


def _cut_words(cut: str) -> str:
    return "it is an output" if cut == "output" else cut


def part_of_kernel(form: KernelForm, name: str) -> KernelPart:
    """Make the part of a page about one kernel that belongs to no plan."""
    facts = [("key", form.kernel.key[:16]), ("target", form.target.key), *group_facts(form)]
    return KernelPart("kernel-0", name, tuple(facts), steps_of(form))


def _part(k: PreparedKernel, id_: str, plan: ExecutionPlan, first: list[PassStep], figures: KernelSeconds) -> KernelPart:
    form = k.form
    assert isinstance(form, KernelForm), "the plan was prepared of kernel ASTs"
    return KernelPart(id_, kernel_name(k), tuple(_facts(k, form, plan, figures)), steps_of(form, first))


def _facts(k: PreparedKernel, form: KernelForm, plan: ExecutionPlan, figures: KernelSeconds) -> Iterator[tuple[str, str]]:
    outs = [f"{dtype.name} {size}" for dtype, size in (k.spec.params[slot] for slot in k.spec.outs)]
    yield "stores", ", ".join(outs)
    yield "cut because", _cut_words(k.cut)
    alike = [kernel_name(other) for other in plan.every if other.key == k.key and other is not k]
    if alike:
        yield "runs as", ", ".join([kernel_name(k), *alike])
    if k.origin:
        yield "from", k.origin
    yield "key", k.key[:16]
    yield "target", form.target.key
    yield "chain", f"{k.opts_source}: {k.why}" if k.why else k.opts_source
    for what, known in (("at least", figures.estimates), ("measured", figures.measured)):
        if k.key in known:
            yield what, duration(known[k.key])
    yield from group_facts(form)


def group_facts(form: KernelForm) -> Iterator[tuple[str, str]]:
    """Yield facts about each phase of a kernel on a device with thread groups: threads, registers, shared memory, or the error that
    explains why they are unknown. Yields nothing for other devices."""
    if not form.target.has_groups:
        return
    try:
        phases = form.resources()
    except SvodError as e:
        yield "groups", str(e)
        return
    for p in phases:
        registers = "" if p.registers is None else f", {p.registers} registers"
        yield f"groups {p.symbol}", f"{p.threads} threads{registers}, {amount(p.shared, 'B')} shared memory"
