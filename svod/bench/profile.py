"""Measures the time of a plan by kernel and by layer: `svod.profile(plan)`.

    p = svod.profile(f.plans[0])        # f = svod.jit(model), called once
    print(p)                            # kernels by time, then the layers as a tree
    p.to_json()
    svod.profile(f, x)                  # the plan that the call runs, and the time of the call outside of the plan

A pass times each kernel once, in the plan's order, so that each finds the caches as the previous one leaves them. A kernel's time is the
median over passes, by the device's own clock if it has one (events of CUDA, timestamps of WebGPU), minus the time of an empty call by the
same clock. In the plan itself independent kernels may run at the same time, so `plan_seconds` can be less than the sum. `plan_seconds` and
`call_seconds` are wall time on the host, including copies to and from a device.

A layer is a module path (`svod.scope`), or else a file with its lines. Its exclusive time covers the kernels of exactly that layer; its
inclusive time also covers all layers below. A kernel that was fused from several layers counts for the layer that its origin names.
"""
from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from svod.bench.roofline import Ceilings, plan_ceilings
from svod.bench.timer import Clock
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PreparedKernel
from svod.compile.plan.running.background import complete
from svod.core.cost.op_count import Work
from svod.core.machine.target import Target
from svod.errors import ArgumentError, LaunchError
from svod.system.quantities import count, giga, percent
from svod.system.quantities import seconds as duration
from svod.system.tables import text_table

LEAST_PASSES, MOST_PASSES = 5, 1000
NO_ORIGIN = "(no origin)"
_FILE_AND_LINE = re.compile(r"(.+):(\d+)")


@runtime_checkable
class Planned(Protocol):
    """A function whose calls run plans, such as one under `svod.jit`."""

    @property
    def plans(self) -> tuple[ExecutionPlan, ...]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class KernelTime:
    """One kernel of the plan, at position `index`. `seconds` is the median of one run, `share` its part of the sum over all kernels.
    `bound` is the least time in seconds that the machine's ceilings allow (`Ceilings.bound`); None if the work or the ceiling is
    unknown."""

    index: int
    name: str
    key: str
    origin: str
    source: str
    chain: tuple[Any, ...]
    seconds: float
    share: float
    flops: int | None
    bytes: int | None
    bound: float | None

    @property
    def flops_per_second(self) -> float | None:
        """The kernel's flops divided by its time; None if the work is unknown."""
        return self.flops / self.seconds if self.flops is not None and self.seconds else None

    @property
    def bytes_per_second(self) -> float | None:
        """The bytes of the kernel's arguments, each counted once, divided by its time; None if they are unknown."""
        return self.bytes / self.seconds if self.bytes is not None and self.seconds else None

    @property
    def ceiling_share(self) -> float | None:
        """The fraction bound / seconds; it may exceed 1 if a cache holds the operands."""
        return None if self.bound is None or not self.seconds else self.bound / self.seconds


@dataclass(frozen=True)
class LayerTime:
    """One layer. `path` is a module path, a file or file:line; `depth` is the number of layers above it. Times are seconds of one run."""

    path: str
    depth: int
    kernels: int
    exclusive: float
    inclusive: float
    share: float
    bound: float | None

    @property
    def ceiling_share(self) -> float | None:
        """The bound of all kernels of the layer divided by the layer's inclusive time."""
        return None if self.bound is None or not self.inclusive else self.bound / self.inclusive


@dataclass(frozen=True)
class Profile:
    """The measured times of a plan. `kernels` are in the plan's order; `layers` are a tree, depth first. `plan_seconds` is the median of
    a run of the whole plan, `kernel_seconds` the sum over the kernels. `call_seconds` is the median of a call of the function, from
    arguments to results; None if a plan was profiled."""

    kernels: tuple[KernelTime, ...]
    layers: tuple[LayerTime, ...]
    plan_seconds: float
    kernel_seconds: float
    passes: int
    threads: int
    call_seconds: float | None = None
    least: float = 0.0      # seconds of an empty call: shorter kernels cannot be told from 0

    def to_json(self) -> dict[str, Any]:
        """The profile as plain data: seconds, flops, bytes; shares are fractions."""
        def row(item: KernelTime | LayerTime) -> dict[str, Any]:
            rates = {"flops_per_second": item.flops_per_second, "bytes_per_second": item.bytes_per_second} \
                if isinstance(item, KernelTime) else {}
            return {f.name: getattr(item, f.name) for f in fields(item)} | rates | {"ceiling_share": item.ceiling_share}
        return {"format": "svod-profile", "version": 1, "plan_seconds": self.plan_seconds, "kernel_seconds": self.kernel_seconds,
                "call_seconds": self.call_seconds, "passes": self.passes, "threads": self.threads,
                "kernels": [row(k) | {"chain": [list(o) for o in k.chain]} for k in self.kernels],
                "layers": [row(x) for x in self.layers]}

    def table(self, top: int | None = None, width: int = 100) -> str:
        """Two tables as text of at most `width` columns (at least 60): the `top` kernels that take most time, and the layers."""
        ranked = sorted(self.kernels, key=lambda k: -k.seconds)
        shown = ranked[:top]
        rows = [(k.name or k.key[:12], duration(k.seconds) if k.seconds else f"< {duration(self.least)}", percent(k.share),
                 giga(k.flops_per_second), giga(k.bytes_per_second), percent(k.ceiling_share), k.source, k.origin or NO_ORIGIN)
                for k in shown]
        out = [f"plan {duration(self.plan_seconds)}, {len(self.kernels)} kernels {duration(self.kernel_seconds)} one by one, "
               f"{count(self.threads, 'thread')}"]
        if self.call_seconds is not None:
            around = max(0.0, self.call_seconds - self.plan_seconds)
            out.append(f"call {duration(self.call_seconds)} as the caller waits: {duration(around)} "
                       f"({percent(around / self.call_seconds)}) for arguments, checks and results, the rest for the plan")
        out.append("")
        header = ("kernel", "time", "share", "GFLOP/s", "GB/s", "ceiling", "opts", "origin")
        out += text_table(header, rows, right=header[1:6], shrink={"kernel", "opts", "origin"}, width=width)
        if len(shown) < len(ranked):
            rest = sum(k.seconds for k in ranked[len(shown):])
            out.append(f"and {len(ranked) - len(shown)} more kernels, {duration(rest)}")
        names = ("layer", "inclusive", "share", "exclusive", "ceiling", "kernels")
        layers = [("  " * x.depth + (x.path if not x.depth else _last(x.path)), duration(x.inclusive), percent(x.share),
                   duration(x.exclusive), percent(x.ceiling_share), str(x.kernels)) for x in self.layers]
        out += ["", *text_table(names, layers, right=names[1:], shrink={"layer"}, width=width)]
        return "\n".join(out)

    def __str__(self) -> str:
        return self.table()


def profile(what: ExecutionPlan | Planned, *arguments: Any, seconds: float = 1.0, ceilings: Ceilings | None = None,
            clock: Clock = time.perf_counter) -> Profile:
    """Time the kernels of a plan for about `seconds`: of `what`, or, if that is a function under `svod.jit`, of the plan that the call
    `what(*arguments)` runs. In the second case the call is timed too. A function with state is called many times, and its state changes.

    Without `ceilings` it uses the cached ones of this machine, or measures them quickly. Raises ArgumentError if `what` is neither a plan
    nor such a function, LaunchError for a plan without kernels, and the errors of running it."""
    call: Callable[[], object] | None = None
    if isinstance(what, ExecutionPlan) and not arguments:
        plan = what
    elif isinstance(what, Planned):
        call = partial(what, *arguments)
        plan = _plan_of_call(what, arguments)
    else:
        given = f"{type(what).__name__} and arguments" if isinstance(what, ExecutionPlan) else type(what).__name__
        raise ArgumentError(f"svod.profile takes an ExecutionPlan, or a function under svod.jit and its arguments, got {given}; a tensor "
                            "has a plan by plan = t.prepare(), and a function f under svod.jit, once it was called, has them in f.plans")
    if not plan.kernels:
        raise LaunchError("this plan has no kernels: its outputs are inputs or constants, so there is nothing to profile")
    complete()
    target, limits = plan_ceilings(plan, ceilings)
    with plan.lock:
        plan.execute()
        running = plan.kernels
        works = [k.work_at(plan.variable_values()) for k in running]
        passes, times, whole, empty, calls = _time_passes(plan, call, seconds, clock)
    own = [max(0.0, statistics.median(t) - e) for t, e in zip(times, empty, strict=True)]
    total = sum(own)
    kernels = tuple(_kernel_time(i, k, work, t, t / total if total else 0.0, limits, target, plan.threads) for i, (k, work, t) in
                    enumerate(zip(running, works, own, strict=True)))
    return Profile(kernels, roll_up(kernels), statistics.median(whole), total, passes, plan.threads,
                   statistics.median(calls) if calls else None, max(empty))


def _plan_of_call(function: Planned, arguments: Sequence[Any]) -> ExecutionPlan:
    """The plan that the call `function(*arguments)` runs."""
    function(*arguments)                # captures the function, if it was not called before
    before = {id(plan): plan.runs for plan in function.plans}
    function(*arguments)
    return next(plan for plan in function.plans if plan.runs != before.get(id(plan)))


def _time_passes(plan: ExecutionPlan, call: Callable[[], object] | None, seconds: float,
                 clock: Clock) -> tuple[int, list[list[float]], list[float], list[float], list[float]]:
    """Returns (number of passes, seconds of each kernel by pass, seconds of the whole plan by pass, for each kernel the seconds of an
    empty call, seconds of `call` by pass)."""
    times: list[list[float]] = [[] for _ in plan.kernels]
    whole: list[float] = []
    calls: list[float] = []
    sorts = [(k.device, k.is_host_item) for k in plan.kernels]      # kernels with the same pair share the cost of an empty call
    empty: dict[tuple[str, bool], list[float]] = {sort: [] for sort in sorts}
    begin = clock()
    while len(whole) < LEAST_PASSES or (len(whole) < MOST_PASSES and clock() - begin < seconds):
        for i, t in enumerate(times):
            t.append(_time_kernel(plan, i, 1, clock))
        for sort, e in empty.items():
            e.append(_time_kernel(plan, sorts.index(sort), 0, clock))
        start = clock()
        plan.execute()
        plan.wait()
        whole.append(clock() - start)
        if call is not None:
            start = clock()
            call()
            plan.wait()
            calls.append(clock() - start)
    return len(whole), times, whole, [statistics.median(empty[sort]) for sort in sorts], calls


def _time_kernel(plan: ExecutionPlan, index: int, times: int, clock: Clock) -> float:
    """Seconds of `times` runs of a kernel, by the device's clock if it has one, else by `clock`."""
    start = clock()
    seconds = plan.repeat_kernel(index, times)
    return clock() - start if seconds is None else seconds


def _kernel_time(index: int, k: PreparedKernel, work: Work | None, seconds: float, share: float, limits: Ceilings | None,
                 target: Target, threads: int) -> KernelTime:
    flops = moved = bound = None
    if work is not None:
        flops, moved = work.flops, work.bytes_moved
        if limits is not None:
            roof = limits.bound(work.arithmetic, work.bytes_read, work.bytes_written, target, threads)
            bound = roof.seconds if roof.is_measured else None
    elif k.is_host_item:
        moved = sum(size * dtype.itemsize for dtype, size in k.spec.params)
    return KernelTime(index, k.name or k.spec.name, k.key, k.origin, k.opts_source, tuple(k.opts), seconds, share, flops, moved, bound)


# -- layers -----------------------------------------------------------------------------------------

def layer_path(origin: str) -> tuple[str, ...]:
    """The layers of a kernel from the outermost to its own: "layer1.0.conv1" → ("layer1", "layer1.0", "layer1.0.conv1");
    "/home/me/model.py:12" → ("model.py", "model.py:12")."""
    if not origin:
        return (NO_ORIGIN,)
    match = _FILE_AND_LINE.fullmatch(origin)
    if match is not None:
        file = Path(match[1]).name
        return file, f"{file}:{match[2]}"
    parts = origin.split(".")
    return tuple(".".join(parts[:i + 1]) for i in range(len(parts)))


def roll_up(kernels: Sequence[KernelTime]) -> tuple[LayerTime, ...]:
    """The times of every layer that a kernel's origin names, and of all layers above it."""
    exclusive: dict[tuple[str, ...], float] = {}
    inclusive: dict[tuple[str, ...], float] = {}
    bounds: dict[tuple[str, ...], float | None] = {}
    counts: dict[tuple[str, ...], int] = {}
    for k in kernels:
        path = layer_path(k.origin)
        exclusive[path] = exclusive.get(path, 0.0) + k.seconds
        for i in range(1, len(path) + 1):
            above = path[:i]
            inclusive[above] = inclusive.get(above, 0.0) + k.seconds
            counts[above] = counts.get(above, 0) + 1
            known = bounds.get(above, 0.0)
            bounds[above] = None if known is None or k.bound is None else known + k.bound
    total = sum(k.seconds for k in kernels)
    return tuple(LayerTime(p[-1], len(p) - 1, counts[p], exclusive.get(p, 0.0), inclusive[p], inclusive[p] / total if total else 0.0,
                           bounds[p]) for p in _depth_first(inclusive))


def _depth_first(paths: Mapping[tuple[str, ...], object]) -> list[tuple[str, ...]]:
    """All paths, each before the paths below it; siblings are in order of first appearance."""
    below: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for p in paths:
        below.setdefault(p[:-1], []).append(p)
    out: list[tuple[str, ...]] = []
    todo = list(reversed(below.get((), [])))
    while todo:
        p = todo.pop()
        out.append(p)
        todo += reversed(below.get(p, []))
    return out


# -- text -------------------------------------------------------------------------------------------

def _last(path: str) -> str:
    match = _FILE_AND_LINE.fullmatch(path)
    return f"line {match[2]}" if match is not None else path.rsplit(".", 1)[-1]
