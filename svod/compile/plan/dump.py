"""Dumps of the output of each pass over a plan: `SVOD_DUMP_AFTER=PASS`, `DEBUG=1…5`.

    $ SVOD_DUMP_AFTER=cut,linear python model.py
    -- cut --
    …
    -- linear: gemm_0 (1a64f5090b25) --
    program gemm…

The passes, in the order in which they run, are `PLAN_PASSES`; the ones after a kernel's loop nest are `kernel_form.KERNEL_PASSES`.
Everything is computed again for printing, so the dump does not depend on caches; kernels that occur several times are printed once. Graphs
and ASTs are printed in a form that `svod.core.ir.text` reads. If a device does not have a stage, the reason is printed instead.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.kernel_form import KERNEL_PASSES, KernelForm, KernelPass
from svod.compile.plan.plan_parts import PreparedKernel
from svod.config import PrepareConfig
from svod.core.graph.callback import without_functions
from svod.core.ir.text import format_ast
from svod.core.ir.uop import UOp
from svod.core.kernel.chain_text import AS_IT_IS
from svod.core.schedule.cut import BY_RULES, Deviations
from svod.core.schedule.schedule import Explained, explain_schedule
from svod.errors import ConfigError, UnsupportedError
from svod.system.process.streams import errors
from svod.system.quantities import amount


class Section(NamedTuple):
    """A section of a dump. `kernel`: the key of the kernel it describes; "" if it describes the plan."""

    title: str
    text: str
    kernel: str = ""


@dataclass(frozen=True)
class DumpedPlan:
    """The plan that is dumped. `explained`: how its graph was divided into kernels; None: unknown, so passes over the graph have nothing to
    show. `first`: key of each kernel that svod compiled → its first use in the plan."""

    explained: Explained | None
    plan: ExecutionPlan

    @property
    def cut(self) -> Explained:
        assert self.explained is not None, "passes over the graph are left out where it is not known"
        return self.explained

    @property
    def first(self) -> Mapping[str, PreparedKernel]:
        out: dict[str, PreparedKernel] = {}
        for k in self.plan.every:
            if isinstance(k.form, KernelForm):
                out.setdefault(k.key, k)
        return out


@dataclass(frozen=True)
class Pass:
    """A pass that can be dumped. `debug`: the lowest level of DEBUG at which it is printed; None: only when it is named. `reads_graph`:
    whether it needs to know how the graph was divided into kernels."""

    name: str
    what: str
    debug: int | None
    show: Callable[[DumpedPlan], Iterator[Section]]
    reads_graph: bool = False


def dump(config: PrepareConfig, sink: UOp, constants: frozenset[UOp], plan: ExecutionPlan, deviations: Deviations = BY_RULES,
         file: TextIO | None = None) -> None:
    """Print the output of the passes that a configuration asks for, for the graph under `sink`, to `file` (default: standard error).
    `deviations`: what the plan does otherwise than by the rules."""
    subject = DumpedPlan(explain_schedule(sink, constants, deviations), plan)
    out = errors() if file is None else file
    for p in passes_of(config):
        for section in p.show(subject):
            print(f"-- {p.name}{': ' if section.title else ''}{section.title} --\n{section.text}\n", file=out)


def passes_of(config: PrepareConfig) -> list[Pass]:
    """Return the passes that a configuration asks for, in their order. Raises ConfigError for an unknown pass."""
    names = [n.strip() for n in (config.dump_after or "").split(",") if n.strip()]
    known = {p.name for p in PLAN_PASSES}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise ConfigError(f"SVOD_DUMP_AFTER: there is no pass {unknown[0]!r}; the passes are {', '.join(p.name for p in PLAN_PASSES)}")
    return [p for p in PLAN_PASSES if p.name in names or (p.debug is not None and p.debug <= (config.debug or 0))]


# -- passes -------------------------------------------------------------------------------------------

def _normalize(s: DumpedPlan) -> Iterator[Section]:
    yield Section("", format_ast(without_functions(s.cut.graph.sink)))


def _cut(s: DumpedPlan) -> Iterator[Section]:
    keys = {_form(k).kernel.ast: key for key, k in s.first.items()}
    for call, root in zip(s.cut.schedule.calls, s.cut.roots, strict=True):
        text = "; called, or a copy that the order needs" if root is None else format_ast(without_functions(root))
        yield Section(f"{call.name_hint}, {call.why}", text, keys.get(call.ast, ""))


def _of_kernels(text: Callable[[DumpedPlan, PreparedKernel, KernelForm], str]) -> Callable[[DumpedPlan], Iterator[Section]]:
    """Make a section for each kernel. `text` returns its text; if the device does not have the stage, the section holds the reason."""
    def show(s: DumpedPlan) -> Iterator[Section]:
        for key, k in s.first.items():
            try:
                shown = text(s, k, _form(k))
            except UnsupportedError as e:
                shown = f"; {e}"
            yield Section(f"{k.name} ({k.key[:12]})", shown, key)
    return show


def _ast_after(name: str) -> Callable[[DumpedPlan], Iterator[Section]]:
    def text(s: DumpedPlan, k: PreparedKernel, form: KernelForm) -> str:
        made = s.cut.passes.get(form.kernel.ast, {})
        return format_ast(made[name]) if name in made else "; not a pass of this kernel: it was put together later"
    return _of_kernels(text)


def _stage(p: KernelPass) -> Callable[[DumpedPlan], Iterator[Section]]:
    return _of_kernels(lambda s, k, form: p.show(form))


def _opts(s: DumpedPlan, k: PreparedKernel, form: KernelForm) -> str:
    return f"{k.opts_source}: {k.chain or AS_IT_IS}\n{k.nest()}"


def _form(k: PreparedKernel) -> KernelForm:
    assert isinstance(k.form, KernelForm), "`DumpedPlan.first` has no others"
    return k.form


def _schedule(s: DumpedPlan) -> Iterator[Section]:
    lines = []
    for k in s.plan.every:
        read = [f"b{b}" for slot, b in enumerate(k.buffers) if slot not in k.spec.outs]
        written = [f"b{k.buffers[slot]}" for slot in k.spec.outs]
        lines.append(f"{k.name}: level {k.level}, {', '.join(written)} ← {', '.join(read) or 'nothing'}; {k.opts_source}; {k.cut}"
                     + (f"; {k.origin}" if k.origin else ""))
    yield Section("", "\n".join(lines) or "no kernels")


def _memory(s: DumpedPlan) -> Iterator[Section]:
    m = s.plan.memory
    lines = [f"b{i}: {b.kind}, {amount(b.nbytes, 'B')}" for i, b in enumerate(s.plan.buffers)]
    yield Section("", "\n".join([*lines, f"{m.mode}: {amount(m.shared, 'B')} for intermediates, lower bound {amount(m.lower_bound, 'B')}"]))


PLAN_PASSES = (
    Pass("normalize", "the graph without markers and chains of movement", None, _normalize, reads_graph=True),
    Pass("cut", "the node that each kernel stores, and why it gets a buffer", None, _cut, reads_graph=True),
    Pass("rangeify", "each kernel's AST: movement as index arithmetic", None, _ast_after("rangeify"), reads_graph=True),
    Pass("axes", "each kernel's AST with ranges split and merged", None, _ast_after("axes"), reads_graph=True),
    Pass("canonical", "each kernel's AST in its canonical form", 3, _of_kernels(lambda s, k, form: format_ast(form.kernel.ast))),
    Pass("schedule", "the kernels of the plan in order: level, buffers, source of the chain, rule of the cut, origin", 1, _schedule),
    Pass("opts", "each kernel's chain and the loops it makes", 2, _of_kernels(_opts)),
    *(Pass(p.name, f"each kernel's {p.what}", p.debug, _stage(p)) for p in KERNEL_PASSES),
    Pass("memory", "the buffers of the plan, and what the memory planner made of them", None, _memory),
)
