"""Analyses a plan without running it: `plan.analyze()`.

    a = plan.analyze()
    print(a)                # kernels, then the plan as a whole
    a.to_json()

For each kernel: the work of a direct loop nest (flops, and the bytes of the arguments, each counted once), the memory of its program
(scratch of the workers, temporaries), the number of threads, on a GPU the resources of its groups, and an estimate of its time. The
estimate is the lower bound from the machine's ceilings plus the cost of the launches. For the plan:

    dependencies    data: the kernel reads memory that the other writes.  control: it writes memory that the other used before.
                    Intermediates that the planner placed in the same memory are not listed: their kernels are of different levels
    callbacks       Python functions among the kernels. Their work is unknown; their bytes are the sizes of their arrays
    critical path   the chain of dependent kernels with the largest sum of estimates: no schedule on any number of cores is shorter
    memory          the most bytes alive at once (the lower bound), and the bytes that the planner allocates (the peak)
    fusions         for each intermediate: why its producer and its consumers were not fused into one kernel, and the cost of that
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from svod.bench.roofline import Ceilings, plan_ceilings
from svod.compile.backend import device_named
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.host_item import HostItem
from svod.compile.plan.memory_planner import lower_bound
from svod.compile.plan.plan_parts import PreparedKernel, levels_of, lifetimes_of, region_in, run_together, written_by
from svod.compile.resources import PhaseResources
from svod.core.cost.op_count import Work
from svod.core.machine.target import Target
from svod.core.schedule.regions import Region, are_disjoint
from svod.system.quantities import amount, percent
from svod.system.quantities import seconds as duration
from svod.system.tables import text_table


@dataclass(frozen=True)
class KernelAnalysis:
    """One kernel of the plan, at position `index`. Kernels of the same `level` may run at the same time. `why` names the rule by which the
    schedule made it a separate kernel.

    `flops`, `bytes_read` and `bytes_written` are None if the work is unknown; for a Python function, bytes are the sizes of its arrays.
    `scratch_bytes` is the sum over all workers, `temporary_bytes` the memory between phases, `kept_bytes` temporaries written once, at
    prepare. `threads` is the largest number of threads of a phase, `launches` the number of launches in one run. `seconds` is estimated;
    `bound_by` is compute, memory, launch, or host callback. `resources`: the resources of each phase on a device with groups of threads;
    None on others."""

    index: int
    name: str
    key: str
    origin: str
    why: str
    opts_source: str
    level: int
    flops: int | None
    bytes_read: int | None
    bytes_written: int | None
    scratch_bytes: int
    temporary_bytes: int
    kept_bytes: int
    threads: int
    launches: int
    seconds: float | None
    bound_by: str
    resources: tuple[PhaseResources, ...] | None = None


@dataclass(frozen=True)
class Dependency:
    """Kernel `after` must wait for kernel `before` (positions in the plan), because both use `bytes` of `buffer`."""

    before: int
    after: int
    kind: Literal["data", "control"]
    buffer: int
    bytes: int


@dataclass(frozen=True)
class Fusion:
    """An intermediate of `bytes` that fusing `producer` with `consumers` would remove. That saves `traffic` bytes of reads and writes,
    and `peak_saved` bytes of the lower bound of the plan's memory. `why`: the reason why they were not fused."""

    producer: int
    consumers: tuple[int, ...]
    buffer: int
    bytes: int
    traffic: int
    peak_saved: int
    why: str


@dataclass(frozen=True)
class Transfer:
    """A kernel that only moves data. `kind` "copy": a kernel without arithmetic, in every run, with the `bytes` that it reads and
    writes. "once": weights that a kernel packs at prepare, with the `bytes` that stay in memory."""

    kernel: int
    kind: Literal["copy", "once"]
    bytes: int


@dataclass(frozen=True)
class MemoryAnalysis:
    """The plan's memory in bytes. `peak`: intermediates and temporaries of one run, as the planner in `mode` placed them. `lower_bound`:
    the most bytes alive at one level, which every placement needs. `kept`: packed weights. The other fields are sums over the user's
    arrays."""

    mode: str
    peak: int
    lower_bound: int
    kept: int
    inputs: int
    constants: int
    outputs: int


@dataclass(frozen=True)
class PlanAnalysis:
    """The analysis of a plan. `critical_path` and `callbacks` are positions of kernels. `critical_seconds`, and `seconds` (the sum over
    all kernels), are None if the work of a kernel is unknown. One run makes `launches`; `synchronisations` of these use several threads.
    They are distributed over `native_calls`, between which callbacks run."""

    kernels: tuple[KernelAnalysis, ...]
    dependencies: tuple[Dependency, ...]
    fusions: tuple[Fusion, ...]
    transfers: tuple[Transfer, ...]
    memory: MemoryAnalysis
    critical_path: tuple[int, ...]
    critical_seconds: float | None
    seconds: float | None
    launches: int
    synchronisations: int
    threads: int
    native_calls: int = 1
    callbacks: tuple[int, ...] = ()

    @property
    def parallelism(self) -> float | None:
        """The average number of kernels that could run at once: `seconds` over `critical_seconds`."""
        return self.seconds / self.critical_seconds if self.seconds and self.critical_seconds else None

    def to_json(self) -> dict[str, Any]:
        """The analysis as plain data for JSON. The dataclasses of this module are its schema."""
        return {"format": "svod-analysis", "version": 1, **asdict(self), "parallelism": self.parallelism}

    def table(self, width: int = 110, fusions: int = 10) -> str:
        """The analysis as text of at most `width` columns (at least 60), with the `fusions` that would save most."""
        rows = [(f"{k.index} {k.name}".rstrip(), str(k.level), amount(k.flops, "FLOP"), amount(k.bytes_read, "B"),
                 amount(k.bytes_written, "B"), amount(k.scratch_bytes + k.temporary_bytes, "B"), str(k.threads), duration(k.seconds),
                 k.bound_by, k.origin) for k in self.kernels]
        header = ("kernel", "level", "flops", "read", "written", "scratch", "threads", "estimate", "by", "origin")
        out = text_table(header, rows, right=header[1:8], shrink={"kernel", "origin"}, width=width)
        out += self._resources_table(width)
        data = sum(d.kind == "data" for d in self.dependencies)
        m = self.memory
        called = ", ".join(f"{i} {self.kernels[i].name}" for i in self.callbacks)
        at_once = f"; {self.parallelism:.2g} kernels at once" if self.parallelism else ""
        out += ["", f"estimate      {duration(self.seconds)} one by one; critical path {duration(self.critical_seconds)}: "
                f"{_positions(self.critical_path)}{at_once}",
                f"dependencies  {data} of data, {len(self.dependencies) - data} of control",
                f"launches      {self.launches} a run, {self.synchronisations} of them shared between {self.threads} threads",
                *([f"callbacks     {called}; native calls {self.native_calls}"] if called else ()),
                f"memory        peak {amount(m.peak, 'B')} ({m.mode}), lower bound {amount(m.lower_bound, 'B')}",
                f"beside it     arranged weights {amount(m.kept, 'B')}, inputs {amount(m.inputs, 'B')}, "
                f"constants {amount(m.constants, 'B')}, outputs {amount(m.outputs, 'B')}"]
        for kind, what in (("copy", "in every run"), ("once", "at prepare")):
            moved = [t for t in self.transfers if t.kind == kind]
            if moved:
                out.append(f"transfers     {amount(sum(t.bytes for t in moved), 'B')} {what}, by {_positions([t.kernel for t in moved])}")
        if self.fusions:
            most = sorted(self.fusions, key=lambda f: -f.traffic)[:fusions]
            names = ("not fused", "memory", "traffic", "of the peak", "because")
            lost = [(f"{f.producer} → {_positions(f.consumers)}", amount(f.bytes, "B"), amount(f.traffic, "B"), amount(f.peak_saved, "B"),
                     f.why) for f in most]
            out += ["", *text_table(names, lost, right=names[1:4], shrink={"not fused", "because"}, width=width)]
            if len(self.fusions) > fusions:
                out.append(f"and {len(self.fusions) - fusions} more")
        return "\n".join(out)

    def _resources_table(self, width: int) -> list[str]:
        """A table of the resources of each phase's groups; empty for a plan on a device without groups of threads."""
        rows = [(" ".join([str(k.index), k.name, *([p.symbol] if len(k.resources) > 1 else [])]), str(p.threads), amount(p.registers),
                 amount(p.shared, "B"), amount(p.spill_stores, "B"), amount(p.resident), percent(p.occupancy))
                for k in self.kernels if k.resources is not None for p in k.resources]
        header = ("groups", "threads", "registers", "shared", "spilled", "of a unit", "occupancy")
        return ["", *text_table(header, rows, right=header[1:], shrink={"groups"}, width=width)] if rows else []

    def __str__(self) -> str:
        return self.table()


def analyze(plan: ExecutionPlan, ceilings: Ceilings | None = None) -> PlanAnalysis:
    """Analyse a plan (`ExecutionPlan.analyze`). Without `ceilings` it uses the cached ones of this machine, or measures them quickly.
    Kernels have no estimates if the device has no ceilings."""
    target, limits = plan_ceilings(plan, ceilings)
    with plan.lock:     # a lock, because another thread may set a variable, which may select other kernels
        return _analyze(plan, limits, target)


def _analyze(plan: ExecutionPlan, limits: Ceilings | None, target: Target) -> PlanAnalysis:
    groups = levels_of(plan.kernels)
    level_of = {i: level for level, group in enumerate(groups) for i in group}
    kernels = tuple(_analyze_kernel(i, k, level_of[i], plan, limits, target) for i, k in enumerate(plan.kernels))
    dependencies = dependencies_of(plan)
    path, critical = critical_path([k.seconds for k in kernels], dependencies)
    known = [k.seconds for k in kernels if k.seconds is not None]
    launches, synchronisations = _launches(plan, groups)
    sizes: dict[str, int] = {}
    for b in plan.buffers:
        sizes[b.kind] = sizes.get(b.kind, 0) + b.nbytes
    memory = MemoryAnalysis(plan.memory.mode, plan.memory.shared, plan.memory.lower_bound, plan.memory.kept, sizes.get("input", 0),
                            sizes.get("constant", 0), sizes.get("output", 0))
    return PlanAnalysis(kernels, dependencies, fusions_of(plan), _transfers(kernels), memory, path, critical,
                        sum(known) if len(known) == len(kernels) else None, launches, synchronisations, plan.threads,
                        sum(s.launches.size > 0 for s in plan.segments), tuple(i for i, k in enumerate(plan.kernels) if k.is_host_item))


def _estimate(work: Work, limits: Ceilings, target: Target, threads: int, phases: int) -> tuple[float, str]:
    """The lower bound of a kernel's seconds, and the limit that it comes from. A cache level that was not measured has the rate of
    memory."""
    bound = limits.bound(work.arithmetic, work.bytes_read, work.bytes_written, target, threads)
    launches = phases * limits.dispatch[threads > 1]
    roof = bound.seconds if bound.is_measured else (work.bytes_read + work.bytes_written) / limits.bytes_per_second("read", threads=threads)
    return roof + launches, "launch" if launches > roof else bound.by


def _analyze_kernel(index: int, k: PreparedKernel, level: int, plan: ExecutionPlan, limits: Ceilings | None,
                    target: Target) -> KernelAnalysis:
    most, phases = plan.threads, [p for p in k.spec.phases if not p.once]
    threads = min(most, max((p.threads for p in phases), default=1))
    once = len(phases) < len(k.spec.phases)
    temporary = sum(k.spec.temps)
    flops = read = written = seconds = None
    by = ""
    work = k.work
    if work is not None:
        flops, read, written = work.flops, work.bytes_read, work.bytes_written
        if limits is not None:
            seconds, by = _estimate(work, limits, target, threads, len(phases))
    elif k.is_host_item:
        moved = [size * dtype.itemsize for dtype, size in k.spec.params]
        written, by = sum(moved[s] for s in k.spec.outs), k.opts_source
        read = sum(moved) - written
    return KernelAnalysis(index, k.name, k.key, k.origin, k.cut, k.opts_source, level, flops, read, written,
                          max((p.scratch_bytes * min(most, p.threads) for p in k.spec.phases), default=0), 0 if once else temporary,
                          temporary if once else 0, threads, len(phases), seconds, by, _resources(k, plan.device))


def _resources(k: PreparedKernel, device: str) -> tuple[PhaseResources, ...] | None:
    """The resources of a kernel's phases on its device; None on a device without groups of threads, and for a callback or a copy."""
    if isinstance(k.loaded, HostItem):
        return None
    backend, pair = device_named(k.device or device)
    target = backend.target()
    if not target.has_groups:
        return None
    once = {p.symbol for p in k.spec.phases if p.once}
    return tuple(r for r in pair.resources(k.loaded, k.spec, target) if r.symbol not in once)


def dependencies_of(plan: ExecutionPlan) -> tuple[Dependency, ...]:
    """The dependencies between kernels, one for each buffer. Kernels that use different parts of a buffer do not depend on each other."""
    out: list[Dependency] = []
    writers: dict[int, list[_Use]] = {}
    readers: dict[int, list[_Use]] = {}
    for i, k in enumerate(plan.kernels):
        written = written_by(k)
        for b in dict.fromkeys(k.buffers):
            use = _Use(i, k.level, region_in(k, b, plan.buffers[b].nbytes))
            before, read = writers.setdefault(b, []), readers.setdefault(b, [])
            reads = b not in written or any(own == b and slot not in k.spec.outs for slot, own in enumerate(k.buffers))
            if reads:
                out += [Dependency(w.kernel, i, "data", b, w.region.size) for w in before if w.meets(use)]
            if b in written:
                waited = [r for r in read if r.meets(use)]
                out += [Dependency(r.kernel, i, "control", b, use.region.size) for r in waited]
                if not waited and not reads:
                    out += [Dependency(w.kernel, i, "control", b, w.region.size) for w in before if w.meets(use)]
                writers[b] = [w for w in before if not use.region.covers(w.region)] + [use]
                readers[b] = [r for r in read if not use.region.covers(r.region)]
            else:
                read.append(use)
    return tuple(out)


class _Use(NamedTuple):
    """The part (`region`) of a buffer that a kernel of `level` uses."""

    kernel: int
    level: int | None
    region: Region

    def meets(self, other: _Use) -> bool:
        """Whether two uses have a common byte and different levels: kernels of one level never conflict."""
        return (self.level is None or self.level != other.level) and not are_disjoint(self.region, other.region)


def critical_path(seconds: Sequence[float | None], dependencies: Sequence[Dependency]) -> tuple[tuple[int, ...], float | None]:
    """The chain of dependent kernels with the largest sum of `seconds`, and that sum. Kernels are in topological order. An unknown time
    counts as 0 and makes the sum None."""
    before: dict[int, set[int]] = {}
    for d in dependencies:
        before.setdefault(d.after, set()).add(d.before)
    end: list[float] = []
    previous: list[int | None] = []
    for i, own in enumerate(seconds):
        best = max(sorted(before.get(i, ())), key=lambda j: end[j], default=None)
        end.append((own or 0.0) + (end[best] if best is not None else 0.0))
        previous.append(best)
    at: int | None = max(range(len(end)), key=lambda i: end[i], default=None)
    total = end[at] if at is not None else 0.0
    path: list[int] = []
    while at is not None:
        path.append(at)
        at = previous[at]
    return tuple(reversed(path)), None if any(s is None for s in seconds) else total


def fusions_of(plan: ExecutionPlan) -> tuple[Fusion, ...]:
    """A Fusion for each intermediate that no callback uses, in the order in which intermediates are written."""
    alive = lifetimes_of(plan.kernels, plan.buffers)
    bound = plan.memory.lower_bound
    out = []
    seen: set[int] = set()
    for i, k in enumerate(plan.kernels):
        for b in sorted(written_by(k) - seen):
            seen.add(b)
            consumers = tuple(j for j, other in enumerate(plan.kernels) if j > i and b in other.buffers and b not in written_by(other))
            if plan.buffers[b].kind != "intermediate" or not consumers or any(plan.kernels[j].is_host_item for j in (i, *consumers)):
                continue
            rest = {n: size for n, size in alive.sizes.items() if n != b}
            size = plan.buffers[b].nbytes
            saved = bound - lower_bound(rest, alive.first, alive.last)
            out.append(Fusion(i, consumers, b, size, size * (1 + len(consumers)), saved, k.cut))
    return tuple(out)


def _transfers(kernels: Sequence[KernelAnalysis]) -> tuple[Transfer, ...]:
    copies = [Transfer(k.index, "copy", (k.bytes_read or 0) + (k.bytes_written or 0)) for k in kernels if k.flops == 0]
    return (*copies, *(Transfer(k.index, "once", k.kept_bytes) for k in kernels if k.kept_bytes))


def _launches(plan: ExecutionPlan, groups: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The launches of one run, and the number of these that use several threads."""
    launches = shared = 0
    for group in groups:
        together = run_together(plan.kernels, group, plan.threads)
        launches += bool(together)
        shared += bool(together)
        for phase in (p for i in group if i not in together for p in plan.kernels[i].spec.phases if not p.once):
            launches += 1
            shared += min(plan.threads, phase.threads, phase.extent) > 1
    return launches, shared


def _positions(numbers: Sequence[int], most: int = 12) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, … ({len(numbers)} kernels)"
