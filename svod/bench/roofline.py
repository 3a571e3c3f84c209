"""The ceilings of this machine, and the roofline bound of a kernel. `ceiling_loops.py` measures the ceilings; a file stores them.

    flops        multiply-adds per second, by type
    bandwidth    bytes per second, by the cache level that the working set fits in
    curve        bytes per second of all threads, by the size of the working set of repeated passes

The bound of a kernel uses the curve, which does not depend on the cache sizes that a processor reports: a virtual machine may own only a
part of the last-level cache that it sees.
"""
from __future__ import annotations

import importlib
import logging
import math
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from svod.bench.ceiling_loops import LOOPS_REVISION, STREAMS, CurvePoint, MeasuredCeilings
from svod.bench.load import Watch, watch_machine
from svod.compile.backend import backend_named
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.config import data_dir
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.target import Target
from svod.errors import UnsupportedError
from svod.system.machine_records import add_record, read_records

log = logging.getLogger("svod.bench")

COMPUTE = "compute"         # `Bound.by` of a kernel whose arithmetic takes longer than its traffic
WRITES_SHARE = 0.01         # traffic with a larger share of writes has the faster of the rates of read and copy
AS_MEMORY = 1.1             # a working set read at up to this multiple of memory's rate counts as memory


@dataclass(frozen=True)
class Bound:
    """The least time in seconds that the ceilings allow. `by` is compute, or the level that holds the operands: l2, l3 or memory.
    `flops_per_second` is the machine's rate, measured in the same rounds for a kernel bound by compute. `bytes_per_second` is None if
    the level was not measured; then the bound is the arithmetic's alone. `intensity` is in flops per byte."""

    seconds: float
    by: str
    flops_per_second: float
    bytes_per_second: float | None
    intensity: float

    @property
    def is_measured(self) -> bool:
        """Whether the ceiling that limits the kernel was measured."""
        return self.by == COMPUTE or self.bytes_per_second is not None


@dataclass(frozen=True)
class Ceilings:
    """The peak rates of a machine. `flops[dtype]` and `bandwidth[level][kind]` are (one core, all `threads` threads), per second. Narrow
    types have the best rates of their dot and matrix instructions, if the target has any. Levels are l1, l2, l3, memory; kinds are read,
    write, write_stream, copy, copy_stream. A quick measurement has no float64, and only memory reads and copies. `dispatch` is seconds
    of an empty launch inside a plan, (one thread, all threads). `curve` has ascending sizes of the working set; it is empty if it was
    not measured. `busy`: if the machine was busy during the measurement, why the rates may be too low, else None."""

    target: str
    threads: int
    quick: bool
    flops: dict[str, tuple[float, float]]
    bandwidth: dict[str, dict[str, tuple[float, float]]]
    dispatch: tuple[float, float]
    curve: tuple[CurvePoint, ...] = ()
    busy: str | None = None

    def flops_per_second(self, dtype: DType, threads: int | None = None) -> float:
        """The arithmetic rate of `dtype`; a multiply-add counts as two. int8 and uint8 have one rate, integers of 16 bits half of it. A
        type without a measured rate has the rate of float32, in which float16 is computed; float64 has half of it."""
        one, many = self.flops["float32"]
        if dtype.bits == 64:
            one, many = self.flops.get("float64", (one / 2, many / 2))
        elif dtype.is_int and dtype.bits <= 16 and "int8" in self.flops:
            one, many = (rate * 8 / dtype.bits for rate in self.flops["int8"])
        elif dtype.name in self.flops:
            one, many = self.flops[dtype.name]
        return self._scaled(one, many, threads)

    def bytes_per_second(self, kind: str = "read", level: str = "memory", threads: int | None = None) -> float:
        """The rate of `kind` (read, write or copy), with the better of ordinary and streaming stores. Raises KeyError if it was not
        measured."""
        best = [self.bandwidth[level][k] for k in STREAMS[kind] if k in self.bandwidth[level]]
        if not best:
            raise KeyError(f"{kind} from {level} was not measured")
        return max(self._scaled(one, many, threads) for one, many in best)

    def rate_at(self, size: float, writes: bool) -> float:
        """Bytes per second of all threads over a warm working set of `size` bytes: the rate of reads, or with `writes` the better of
        read and copy. It is interpolated on the curve, on a logarithmic scale. Raises ValueError without a curve."""
        if not self.curve:
            raise ValueError("these ceilings have no curve, so the rate of a working set is unknown")
        points = [(p.bytes, max(p.read, p.copy) if writes else p.read) for p in self.curve]
        (least, fast), (_, slowest) = points[0], points[-1]
        if size <= least:
            return fast
        for (below, fast), (above, slow) in pairwise(points):
            if size <= above:
                share = math.log(size / below) / math.log(above / below)
                return math.exp((1.0 - share) * math.log(fast) + share * math.log(slow))
        return slowest

    def compute_seconds(self, arithmetic: Iterable[tuple[DType, float]], threads: int | None = None) -> float:
        """The least time in seconds of operations, given as numbers by type (`Work.arithmetic`)."""
        return sum(flops / self.flops_per_second(dtype, threads) for dtype, flops in arithmetic)

    def bound(self, arithmetic: Iterable[tuple[DType, float]], bytes_read: float, bytes_written: float, target: Target,
              threads: int | None = None) -> Bound:
        """The roofline: the least time of a kernel with these operations, by type, on these operands. Every tool uses this bound.

        The operands are warm, because a previous run used them. Their rate is the curve's for a working set of their size, or of half the
        L2 caches if that is larger, for `threads` of the machine's threads. The cache sizes of `target` determine the level's name; a level
        that is no faster than memory is called memory."""
        operations = tuple(arithmetic)
        dtype = next((dtype for dtype, _ in operations), dtypes.float32)
        flops, compute = sum(count for _, count in operations), self.compute_seconds(operations, threads)
        total = bytes_read + bytes_written
        level, rate = self._traffic(total, bytes_written > WRITES_SHARE * total, target, threads)
        traffic = total / (self.bytes_per_second("read", threads=threads) if rate is None else rate)
        return Bound(compute if rate is None else max(compute, traffic), COMPUTE if compute >= traffic else level,
                     flops / compute if flops else self.flops_per_second(dtype, threads),
                     rate, flops / total if total else 0.0)

    def _traffic(self, total: float, writes: bool, target: Target, threads: int | None) -> tuple[str, float | None]:
        """The level that holds `total` bytes, and its rate, or None if that was not measured."""
        room = {"l2": target.l2 * self.threads / 2, "l3": target.l3 / 2}
        level = next((name for name, size in room.items() if total <= size), "memory")
        if self.curve:
            rate = self.rate_at(max(total, min(room.values())), writes)
            if rate <= AS_MEMORY * self.rate_at(math.inf, writes):
                level = "memory"
        elif total > target.l3:
            rate = max(self.bytes_per_second(kind) for kind in (("read", "copy") if writes else ("read",)))
        else:
            return level, None
        named = level if level in self.bandwidth else "memory"
        return level, rate * self.bytes_per_second("read", named, threads) / self.bytes_per_second("read", named)

    def _scaled(self, one: float, many: float, threads: int | None) -> float:
        if threads is None or threads >= self.threads:
            return many
        return min(one * threads, many)


def measure_ceilings(target: Target, threads: int | None = None, *, quick: bool = False) -> Ceilings:
    """Measure this machine, which `target` must describe, with `threads` (default: the target's). A full measurement takes about ten
    seconds; a quick one covers float32 and memory in less than half a second. Raises UnsupportedError for a device whose backend has no
    loops for it."""
    count = target.threads if threads is None else threads
    loops = backend_named(target.device).ceilings
    if loops is None:
        raise UnsupportedError(f"nothing measures what the device {target.device} can do at best; pass ceilings")
    figures: MeasuredCeilings = importlib.import_module(loops).measure_figures(target, count, quick=quick)
    return Ceilings(target.key, count, quick, figures.flops, figures.bandwidth, figures.dispatch, figures.curve)


def plan_ceilings(plan: ExecutionPlan, given: Ceilings | None) -> tuple[Target, Ceilings | None]:
    """The target that a plan runs on, and its ceilings: `given`, or the cached ones, which are measured quickly if they are missing.
    None for a device whose backend cannot measure them."""
    backend = backend_named(plan.device)
    target = backend.target()
    if given is None and backend.ceilings is not None:
        given = cached_ceilings(Path(data_dir()) / "ceilings.json", target, quick=True)
    return target, given


def known_ceilings(path: Path, target: Target, threads: int | None = None) -> Ceilings | None:
    """The ceilings of this machine in the JSON file at `path`, quick ones included; None if there are none. Nothing is measured."""
    record = read_records(path).get(_machine(target, target.threads if threads is None else threads))
    return None if record is None else _from_json(record)


def cached_ceilings(path: Path, target: Target, threads: int | None = None, *, quick: bool = False, refresh: bool = False,
                    watch: Watch = watch_machine) -> Ceilings:
    """The ceilings of this machine from the JSON file at `path`. They are measured and added if they are missing or `refresh` is set. A
    full record also answers a quick request. A measurement on a busy machine is marked and stored only if there is no other, so that
    reports can show it, and the next call measures again; this is logged. A file that cannot be read or written is logged and causes no
    error."""
    count = target.threads if threads is None else threads
    machine, known = _machine(target, count), read_records(path)
    if not refresh and machine in known:
        ceilings = _from_json(known[machine])
        if ceilings is not None and ceilings.busy is None and (quick or not ceilings.quick):
            return ceilings
    seen = watch()
    ceilings = measure_ceilings(target, count, quick=quick)
    busy = seen().busy
    if busy is not None:
        log.log(logging.INFO if quick else logging.WARNING,
                "the machine was busy while its ceilings were measured (%s): they are too low; the next command that needs them measures "
                "them again", busy)
        ceilings = replace(ceilings, busy=busy)
    before = _from_json(known.get(machine))
    if busy is None or before is None or before.busy is not None:
        add_record(path, machine, asdict(ceilings))
    return ceilings


def _machine(target: Target, threads: int) -> str:
    return f"{platform.node()}/{target.key}/{threads} threads/revision {LOOPS_REVISION}"


def _from_json(data: Any) -> Ceilings | None:
    try:
        return msgspec.convert(data, Ceilings)
    except msgspec.ValidationError:
        return None
