"""The parts of an `ExecutionPlan`, and the checks on them.

    PlanBuffer(nbytes, kind, array)   PreparedKernel(spec, loaded code, buffers by slot, level)

A PreparedKernel whose code is a `HostItem` is executed by the thread that runs the plan: it calls a Python function, or copies between
devices. It has parameters like a kernel, and no phases.

Kernels of one level run at the same time, so none of them may write memory that another one reads or writes, whether through the same
buffer or through overlapping buffers. `svod.compile.plan.unbound_plan` derives the levels from the schedule's dependencies. A plan checks
them again, because a wrong level would only show as an occasional wrong result.
"""
from __future__ import annotations

import importlib
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from svod.compile.lower.program import PackedTemporaries, PhaseSpec, ProgramSpec
from svod.compile.plan.host_item import BufferCopy, HostItem
from svod.core.cost.op_count import Work
from svod.core.graph.buffer import Buffer
from svod.core.graph.copies import CopyLog
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.kernel.chain_text import AS_IT_IS
from svod.core.machine.levels import CORE_START_CYCLES
from svod.core.schedule.regions import Region, are_disjoint, find_overlap
from svod.errors import LaunchError

NOTEBOOK = "svod.steps.notebook"      # the module that shows plans and kernels in notebooks; imported by name, because it imports this one

# Rates of one core that most kernels exceed, so that they take fewer cycles than estimated.
BYTES_PER_CYCLE, OPERATIONS_PER_CYCLE = 16, 8
TRANSCENDENTAL_CYCLES = 1.0     # cycles of a transcendental function: 14 instructions for a vector of eight, two per cycle

BufferKind = Literal["input", "output", "constant", "intermediate"]


@dataclass(frozen=True)
class PlanBuffer:
    """A buffer of the plan. Its memory is `array`, a C-contiguous array on the host, or `storage`, the tensor's Buffer, on a device that
    cannot read host memory, and for content at any address in a file. Intermediates have neither (the memory planner places them); an
    input may have neither and must then be bound before the first run. `device`: the device that holds it; "": the plan's device."""

    nbytes: int
    kind: BufferKind
    array: np.ndarray[Any, Any] | None = None
    dtype: DType | None = None          # None: any dtype
    storage: Buffer | None = None
    device: str = ""

    @property
    def has_memory(self) -> bool:
        return self.array is not None or self.storage is not None


def describe_buffer(buffer: PlanBuffer) -> str:
    """Describe a buffer for messages: `float32 4096`, or its size in bytes if its dtype is unknown."""
    if buffer.dtype is None:
        return f"{buffer.nbytes} B"
    return f"{buffer.dtype.name} {buffer.nbytes // buffer.dtype.itemsize}"


class VariableSpec(NamedTuple):
    """A variable of a plan: its range and the typical values (hints). `bucket`: the smallest and the largest value that a kernel is
    compiled for, if other kernels cover the remaining values."""

    name: str
    min: int
    max: int
    hints: tuple[int, ...] = ()
    bucket: tuple[int, int] | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """The range of values that the kernel runs with."""
        return self.bucket or (self.min, self.max)

    @property
    def points(self) -> tuple[int, ...]:
        """The values to time the kernel at: the hints in its range, otherwise the smallest, the middle and the largest value."""
        low, high = self.bounds
        return tuple(h for h in self.hints if low <= h <= high) or tuple(sorted({low, (low + high) // 2, high}))


class LoadedCode(Protocol):
    """A program that a device's queue can launch. Its other methods are a private matter of the compiler and the queue of one device."""

    def close(self) -> None:
        """Free the code. It must not be launched afterwards. Closing twice is allowed."""


class KernelViews(Protocol):
    """The output of each compiler stage for a kernel, as text (`svod.compile.plan.kernel_form.KernelForm`)."""

    @property
    def device(self) -> str: ...
    @property
    def chain_text(self) -> str: ...
    def work(self, values: Mapping[str, int]) -> Work: ...
    def nest(self) -> str: ...
    def linear(self) -> str: ...
    def legal(self) -> str: ...
    def llvm(self, optimized: bool = False) -> str: ...
    def asm(self) -> str: ...
    def object(self, path: str | os.PathLike[str]) -> Path: ...


@dataclass(frozen=True, repr=False)
class PreparedKernel:
    """An item of a plan: a compiled program or a `HostItem`, the buffers it is applied to, and information about its origin. `device`: the
    program's device; "": the plan's."""

    spec: ProgramSpec
    loaded: LoadedCode | HostItem
    buffers: tuple[int, ...]            # per slot of spec.params: index into the plan's buffers
    name: str = ""
    key: str = ""                       # kernel key of the tuning database
    opts: tuple[Any, ...] = ()          # the chain as plain data
    opts_source: str = "none"           # database, beam, transfer, heuristic, explicit, none, pending; first; library, host callback
    why: str = ""
    origin: str = ""                    # module path or file:line
    level: int | None = None            # kernels of one level are independent; None: this kernel alone is a level
    cut: str = ""                       # the scheduler's rule that made it a separate kernel
    offsets: tuple[int, ...] = ()       # per slot: offset in bytes of the kernel's argument within the buffer; (): all 0
    regions: tuple[Region, ...] = ()    # per slot: the bytes of the buffer that the kernel can access; (): all
    variables: tuple[VariableSpec, ...] = ()    # the plan's variable for each variable of the program; (): the ones of the same names
    packing: PackedTemporaries | None = None    # the output of the phases that run once
    form: KernelViews | None = field(default=None, compare=False)   # the kernel and its chain; None: compiled elsewhere, or not a program
    device: str = ""

    def __repr__(self) -> str:
        shapes = ", ".join(f"{dtype.name} {size}" for dtype, size in (self.spec.params[slot] for slot in self.spec.outs))
        parts = [f"{self.name or self.spec.name}: {shapes}", self.opts_source, self.chain or AS_IT_IS, self.origin]
        return f"<PreparedKernel {'; '.join(p for p in parts if p)}>"

    def _repr_html_(self) -> str:
        shown: str = importlib.import_module(NOTEBOOK).prepared_html(self)
        return shown

    @property
    def chain(self) -> str:
        """The chain of opts as text, as `PrepareConfig.opts` and `svod.kernel` take it."""
        return self.form.chain_text if self.form is not None else ""

    @property
    def work(self) -> Work | None:
        """The operations and bytes of one run; None if they are unknown."""
        return self.form.work({}) if self.form is not None else None

    def work_at(self, values: Mapping[str, int]) -> Work | None:
        """Count the work of one run with these values of the plan's variables; None if it is unknown."""
        if self.form is None or not self.variables:
            return self.work
        return self.form.work({own: values[name] for own, name in names_of(self).items()})

    @property
    def views(self) -> KernelViews:
        """The kernel's loop nest, LINEAR, LLVM IR and assembly. Raises LaunchError for an item that svod did not compile from a kernel
        AST."""
        if self.form is None:
            item = "a copy between devices" if isinstance(self.loaded, BufferCopy) else "a function of Python"
            what = item if self.is_host_item else "made of code that was compiled elsewhere"
            raise LaunchError(f"kernel {kernel_name(self)} is {what}; it has no loop nest and no LLVM IR")
        return self.form

    def nest(self) -> str:
        """Print the loop nest after its chain. This and the following methods raise LaunchError like `views`."""
        return self.views.nest()

    def linear(self) -> str:
        """Print the kernel's LINEAR."""
        return self.views.linear()

    def legal(self) -> str:
        """Print the kernel's LINEAR, reduced to instructions that the device's renderer can print."""
        return self.views.legal()

    def llvm(self, optimized: bool = False) -> str:
        """Print the kernel's LLVM IR, before or after LLVM's passes."""
        return self.views.llvm(optimized)

    def asm(self) -> str:
        """Print the kernel's assembly."""
        return self.views.asm()

    def object(self, path: str | os.PathLike[str]) -> Path:
        """Write the kernel's object file, which `objdump -d` reads, and return the path. Raises FileError."""
        return self.views.object(path)

    @property
    def single_core(self) -> bool:
        return bool(self.spec.phases) and all(phase.threads <= 1 for phase in self.spec.phases)

    @property
    def is_host_item(self) -> bool:
        """Whether the thread that runs the plan executes the item: a Python function, or a copy between devices."""
        return isinstance(self.loaded, HostItem)


class KernelLog(CopyLog, Protocol):
    """A log of kernel times and copies while plans run (`svod.compile.plan.run_log.RunLog`)."""

    def add(self, kernel: PreparedKernel, device: str, start: float, seconds: float, values: Mapping[str, int]) -> None:
        """Record a run of a kernel: its device, its start on the clock `time.perf_counter`, its duration in seconds, and the values of the
        plan's variables."""


@dataclass(frozen=True, eq=False)
class Variant:
    """The kernels of a plan that run while the variables are within `buckets`: their numbers among all kernels, and the kernels
    themselves."""

    buckets: tuple[tuple[str, int, int], ...]       # (variable, smallest value, largest value)
    kernels: tuple[int, ...]
    chosen: tuple[PreparedKernel, ...]

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether this variant is the one for these values."""
        return all(name in values and low <= values[name] <= high for name, low, high in self.buckets)


def variants_of(kernels: Sequence[PreparedKernel]) -> list[Variant]:
    """Make a variant for each combination of the buckets of the kernels' variables, the largest last; a single variant if no variable has
    buckets."""
    buckets: dict[str, set[tuple[int, int]]] = {}
    for v in (v for k in kernels for v in k.variables if v.bucket is not None):
        buckets.setdefault(v.name, set()).add(v.bounds)
    variants = []
    for choice in product(*(sorted(b) for b in buckets.values())):
        limits = dict(zip(buckets, choice, strict=True))
        numbers = tuple(i for i, k in enumerate(kernels) if all(v.bucket is None or v.bucket == limits[v.name] for v in k.variables))
        chosen = tuple(kernels) if len(numbers) == len(kernels) else tuple(kernels[i] for i in numbers)
        variants.append(Variant(tuple((name, *b) for name, b in limits.items()), numbers, chosen))
    return variants


class Launches(NamedTuple):
    """Consecutive launches in a queue, from `first` on. The queue defines the meaning of `first`."""

    first: int
    size: int


class Segment(NamedTuple):
    """A part of a run: `launches`, followed by host items, as numbers among all kernels. `kernels`: the numbers of all items that run in
    it."""

    launches: Launches
    items: tuple[int, ...]
    kernels: tuple[int, ...]


def levels_of(kernels: Sequence[PreparedKernel]) -> list[list[int]]:
    """Group the kernel numbers by level, in order."""
    keys = [("own", i) if k.level is None else ("level", k.level) for i, k in enumerate(kernels)]
    return [list(group) for _, group in groupby(range(len(keys)), key=keys.__getitem__)]


def run_together(kernels: Sequence[PreparedKernel], group: Sequence[int], threads: int) -> list[int]:
    """Return the kernels of a level that run at the same time, each on one of `threads` cores: its single-core kernels, unless they are
    known to be so short that the other cores' start takes longer than what they save. Fewer than two: none."""
    alone = [i for i in group if kernels[i].single_core]
    if threads < 2 or len(alone) < 2:
        return []
    work = [w for i in alone if (w := kernels[i].work) is not None]
    if len(work) < len(alone):
        return alone
    computed = [w.flops / OPERATIONS_PER_CYCLE + w.transcendental * TRANSCENDENTAL_CYCLES for w in work]
    cycles = [max(c, w.bytes_moved / BYTES_PER_CYCLE) for c, w in zip(computed, work, strict=True)]
    return alone if sum(cycles) - max(max(cycles), sum(cycles) / threads) > CORE_START_CYCLES else []


def written_by(kernel: PreparedKernel) -> set[int]:
    return {kernel.buffers[slot] for slot in kernel.spec.outs}


def names_of(kernel: PreparedKernel) -> dict[str, str]:
    """Map each variable of the kernel's program to the plan's variable. If the kernel lists its variables, the program calls the i-th one
    v«i»."""
    if not kernel.variables:
        return {name: name for name in kernel.spec.variables}
    return {name: kernel.variables[int(name[1:])].name for name in kernel.spec.variables}


class VariableRange(NamedTuple):
    """Phases with one number of iterations, which depends on variables. `names`: the plan's variable for each of the program's that it
    depends on. `places`: the numbers of the phases' kernels, and those of the phases in them."""

    phase: PhaseSpec
    names: dict[str, str]
    places: list[tuple[int, int]]


def ranges_of(kernels: Sequence[PreparedKernel]) -> list[VariableRange]:
    """List the numbers of iterations that depend on a plan's variables."""
    ranges: dict[Hashable, VariableRange] = {}
    for number, kernel in enumerate(kernels):
        known = names_of(kernel)
        for p, phase in enumerate(kernel.spec.phases):
            names = {name: known[name] for count in phase.counts for name, _ in count.terms}
            if phase.counts:
                same = phase.extent, phase.counts, tuple(names.items())
                ranges.setdefault(same, VariableRange(phase, names, [])).places.append((number, p))
    return list(ranges.values())


def variables_of(kernels: Sequence[PreparedKernel]) -> dict[str, VariableSpec]:
    """Return the variables of a plan by name, without buckets. Raises LaunchError if a variable has different bounds in two kernels."""
    specs: dict[str, VariableSpec] = {}
    for known in (v for k in kernels for v in k.variables):
        other = specs.setdefault(known.name, known._replace(bucket=None))
        if (other.min, other.max) != (known.min, known.max):
            raise LaunchError(f"variable {known.name} has bounds [{known.min}, {known.max}] in one kernel of the plan and "
                              f"[{other.min}, {other.max}] in another")
    return specs


def check_launches(kernels: Sequence[PreparedKernel], values: Mapping[str, int]) -> None:
    """Raise LaunchError if a launch is impossible with these values of the plan's variables."""
    for kernel in kernels:
        names = names_of(kernel)
        if all(name in values for name in names.values()):
            kernel.spec.launch.at({name: values[known] for name, known in names.items()})


def region_in(kernel: PreparedKernel, buffer: int, nbytes: int) -> Region:
    """Return the bytes of a buffer of `nbytes` that a kernel can access."""
    regions = [kernel.regions[slot] for slot, b in enumerate(kernel.buffers) if b == buffer] if kernel.regions else []
    return regions[0] if len(regions) == 1 else Region(0, nbytes)


def temporary_numbers(kernels: Sequence[PreparedKernel], end: int) -> list[range]:
    """Return the indices of each kernel's temporaries: they follow the buffers' indices, in order of level. `end` is one past the last
    index."""
    number = end - sum(len(k.spec.temps) for k in kernels)
    numbers = [range(0)] * len(kernels)
    for group in levels_of(kernels):
        for i in group:
            numbers[i] = range(number, number + len(kernels[i].spec.temps))
            number = numbers[i].stop
    return numbers


@dataclass(frozen=True)
class Lifetimes:
    """The buffers that the memory planner places, with their sizes in bytes and the first and last level that uses them: intermediates (by
    buffer number) and temporaries (numbered after the buffers, in order of level). `kept`: the sizes of temporaries that outlive a run."""

    sizes: dict[int, int]
    first: dict[int, int]
    last: dict[int, int]
    kept: dict[int, int]


def outlives_run(kernel: PreparedKernel, temp: int) -> bool:
    """Whether a phase that runs once fills a temporary. It may be any temporary of a kernel whose `packing` is unknown."""
    if kernel.packing is not None:
        return temp in kernel.packing.temps
    return any(phase.once for phase in kernel.spec.phases)


def lifetimes_of(kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer]) -> Lifetimes:
    """Compute when each intermediate and temporary of a plan is in use. A temporary that a once phase writes must survive every run."""
    out = Lifetimes({}, {}, {}, {})
    number = len(buffers)
    for level, group in enumerate(levels_of(kernels)):
        for kernel in (kernels[i] for i in group):
            for index in kernel.buffers:
                if buffers[index].kind == "intermediate":
                    out.sizes[index] = buffers[index].nbytes
                    out.first.setdefault(index, level)
                    out.last[index] = level
            for temp, size in enumerate(kernel.spec.temps):
                if outlives_run(kernel, temp):
                    out.kept[number] = size
                else:
                    out.sizes[number], out.first[number], out.last[number] = size, level, level
                number += 1
    return out


def check_plan(kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer], *, is_new: bool = True) -> None:
    """Raise LaunchError if kernels and buffers do not fit together, or if the kernels of a level are not independent. `is_new`: whether
    outputs need memory, as those of a plan need that has not released it."""
    last_level = -1
    written: set[int] = set()
    for kernel in kernels:
        if kernel.level is not None:
            if kernel.level < last_level:
                raise LaunchError(f"kernel {kernel_name(kernel)} of level {kernel.level} comes after one of level {last_level}; order them "
                                  "by level")
            last_level = kernel.level
        _check_arguments(kernel, buffers)
        written |= written_by(kernel)
    for index, buffer in enumerate(buffers):
        if buffer.kind not in get_args(BufferKind):
            raise LaunchError(f"buffer {index}: kind {buffer.kind!r} is not known; use one of {', '.join(get_args(BufferKind))}")
        if buffer.array is not None:
            check_array(index, buffer.array, buffer, index in written)
        elif is_new and buffer.kind in ("output", "constant") and buffer.storage is None:
            raise LaunchError(f"buffer {index} is {buffer.kind} and has no array")
    for variant in variants_of(kernels):
        _check_order(variant.chosen, buffers)


def _check_arguments(kernel: PreparedKernel, buffers: Sequence[PlanBuffer]) -> None:
    """Check that a kernel has a large enough buffer for each parameter, and writes no constant."""
    spec, name = kernel.spec, kernel_name(kernel)
    if not kernel.is_host_item:
        spec.check()
    if len(kernel.buffers) != len(spec.params):
        raise LaunchError(f"kernel {name} takes {len(spec.params)} buffers and was given {len(kernel.buffers)}")
    for slot, index in enumerate(kernel.buffers):
        if not 0 <= index < len(buffers):
            raise LaunchError(f"kernel {name}, slot {slot}: buffer {index} was asked for; the plan has {len(buffers)}")
        dtype, size = spec.params[slot]
        offset = kernel.offsets[slot] if kernel.offsets else 0
        # in a kernel, variables may have wider bounds than in a plan
        end = kernel.regions[slot].end if kernel.variables and kernel.regions else offset + size * dtype.itemsize
        if offset < 0 or buffers[index].nbytes < end:
            after = f" after byte {offset}" if offset else ""
            raise LaunchError(f"kernel {name}, slot {slot}: {size} elements of {dtype.name} need {size * dtype.itemsize} bytes{after}; "
                              f"buffer {index} has {buffers[index].nbytes}")
    for index in written_by(kernel):
        if buffers[index].kind == "constant":
            raise LaunchError(f"kernel {name} writes buffer {index}, a constant of the plan")


def _check_order(kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer]) -> None:
    """Check that intermediates are written before they are read, and that no kernel of a level accesses a buffer that another one
    writes."""
    written: set[int] = set()
    for group in levels_of(kernels):
        writer = {index: i for i in reversed(group) for index in written_by(kernels[i])}
        users: dict[int, set[int]] = {}
        for i in group:
            outs = written_by(kernels[i])
            for index in kernels[i].buffers:
                if index not in outs and index not in written and buffers[index].kind == "intermediate":
                    raise LaunchError(f"kernel {kernel_name(kernels[i])} reads buffer {index}, an intermediate that no kernel before it "
                                      "writes")
                users.setdefault(index, set()).add(i)
        written.update(writer)
        for index in writer:
            if len(users[index]) > 1:
                _check_parts(kernels, index, users[index], buffers[index].nbytes)
        if len(group) > 1:
            _check_overlap(kernels, buffers, users, writer)


def _check_parts(kernels: Sequence[PreparedKernel], index: int, users: Iterable[int], nbytes: int) -> None:
    """Check that the regions that kernels write in a buffer are accessed by no other kernel of the level."""
    ordered = sorted(users)
    reached = [(i, slot) for i in ordered for slot, b in enumerate(kernels[i].buffers) if b == index]
    regions = [kernels[i].regions[slot] if kernels[i].regions else Region(0, nbytes) for i, slot in reached]
    written = [slot in kernels[i].spec.outs for i, slot in reached]
    if all(written):
        overlap = find_overlap(regions)
        pairs = [overlap] if overlap is not None else []
    else:
        pairs = [(a, b) for a in range(len(reached)) if written[a] for b in range(len(reached)) if not are_disjoint(regions[a], regions[b])]
    for a, b in pairs:
        (first, _), (second, _) = reached[a], reached[b]
        if first != second:
            raise _conflict(kernels, first, second, f"buffer {index}")


def _check_overlap(kernels: Sequence[PreparedKernel], buffers: Sequence[PlanBuffer], users: Mapping[int, set[int]],
                   writer: Mapping[int, int]) -> None:
    """Check that no kernel writes memory that another kernel of its level accesses through an overlapping buffer. In order of address,
    each buffer is compared with the buffers that begin before it ends."""
    spans = sorted((address_of(a), address_of(a) + buffers[index].nbytes, index) for index in users
                   if (a := buffers[index].array) is not None and buffers[index].nbytes)
    reaching: list[tuple[int, int]] = []        # (end, buffer) of the earlier buffers that overlap this one
    for start, end, index in spans:
        reaching = [(until, other) for until, other in reaching if until > start]
        for _, other in reaching:
            apart = users[other] ^ users[index] or len(users[index]) > 1
            if apart and (index in writer or other in writer):
                first, second = (other, index) if other in writer else (index, other)
                reader = next(iter(users[second] - {writer[first]}), writer[first])
                raise _conflict(kernels, writer[first], reader, f"the memory under buffers {first} and {second}")
        reaching.append((end, index))


def _conflict(kernels: Sequence[PreparedKernel], writer: int, other: int, what: str) -> LaunchError:
    names = f"{kernel_name(kernels[writer])} and {kernel_name(kernels[other])}"
    return LaunchError(f"kernels {names} share level {kernels[writer].level} and {what}, "
                       "which the first writes; kernels of one level run at the same time: give them different levels")


def kernel_name(kernel: PreparedKernel) -> str:
    return kernel.name or kernel.spec.name


def check_array(index: int, array: np.ndarray[Any, Any], buffer: PlanBuffer, written: bool) -> None:
    """Raise LaunchError for an array that cannot be the memory of buffer `index`."""
    flags, kind = array.flags, None if buffer.dtype is None else to_numpy(buffer.dtype)
    if flags.c_contiguous and flags.aligned and array.nbytes == buffer.nbytes and kind in (None, array.dtype) \
            and (flags.writeable or not written):
        return
    what = f"the array of shape {array.shape} and type {array.dtype}"
    if kind is not None and array.dtype != kind:
        assert buffer.dtype is not None
        bits = " (the bits of bfloat16)" if buffer.dtype == dtypes.bfloat16 else ""
        raise LaunchError(f"buffer {index} holds {kind}{bits}; {what} has another type; convert it, array.astype({kind.name!r})")
    if not flags.c_contiguous:
        raise LaunchError(f"buffer {index}: {what} has strides {array.strides} and is not C-contiguous; copy it first")
    if array.nbytes != buffer.nbytes:
        raise LaunchError(f"buffer {index} needs {buffer.nbytes} bytes; {what} has {array.nbytes}")
    if not flags.aligned:
        raise LaunchError(f"buffer {index}: {what} does not begin at a multiple of its {array.itemsize} bytes per element; copy it first")
    raise LaunchError(f"buffer {index} is written by the plan; {what} is read-only")


def is_shared(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two C-contiguous arrays have bytes in common."""
    first, second = address_of(a), address_of(b)
    return first < second + b.nbytes and second < first + a.nbytes


def address_of(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
