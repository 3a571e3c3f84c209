"""What this machine can do at best, and what follows for a kernel. The figures come from `ceiling_loops.py` and are kept per machine.

    flops        multiply-adds per second, by type
    bandwidth    bytes per second, by the cache level that a working set is chosen for
    curve        bytes per second over the size of the working set, of all threads: what repeated passes over that many bytes reach

The curve is what kernels are held against: it knows nothing of the sizes that caches are said to have. That matters where a processor
reports a last-level cache that a virtual machine has only a part of.
"""
from __future__ import annotations

import logging
import math
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from svod.bench.ceiling_loops import REVISION, STREAMS, CurvePoint, Figures, measure_figures
from svod.bench.load import Watch, watch_machine
from svod.core.ir.dtype import DType
from svod.core.machine.target import Target
from svod.system.machine_records import add_record, read_records

log = logging.getLogger("svod.bench")


@dataclass(frozen=True)
class Ceilings:
    """`flops[dtype]` and `bandwidth[level][kind]` are (one core, all `threads` threads), per second. bfloat16 and int8 are the best rates
    of their dot and matrix instructions, where the target has them. Levels: l1, l2, l3, memory; kinds: read, write, write_stream, copy,
    copy_stream. A quick measurement has no float64, and memory reads and copies only. `dispatch`: seconds of a launch
    that does nothing inside a plan, (one thread, all threads). `curve`: by size of the working set, ascending; empty where it was not
    measured."""

    target: str
    threads: int
    quick: bool
    flops: dict[str, tuple[float, float]]
    bandwidth: dict[str, dict[str, tuple[float, float]]]
    dispatch: tuple[float, float]
    curve: tuple[CurvePoint, ...] = ()

    def flops_per_second(self, dtype: DType, threads: int | None = None) -> float:
        """Multiply-adds of `dtype` count two. Bytes have one rate, with a sign or without, integers of 16 bits half of it. Types without a
        rate of their own are held against float32: float16 is computed in it. Where float64 was not measured it is half of float32."""
        one, many = self.flops["float32"]
        if dtype.bits == 64:
            one, many = self.flops.get("float64", (one / 2, many / 2))
        elif dtype.is_int and dtype.bits <= 16 and "int8" in self.flops:
            one, many = (rate * 8 / dtype.bits for rate in self.flops["int8"])
        elif dtype.name in self.flops:
            one, many = self.flops[dtype.name]
        return self._scaled(one, many, threads)

    def bytes_per_second(self, kind: str = "read", level: str = "memory", threads: int | None = None) -> float:
        """`kind` is read, write or copy: for the last two the better of ordinary and streaming stores. KeyError if not measured."""
        best = [self.bandwidth[level][k] for k in STREAMS[kind] if k in self.bandwidth[level]]
        if not best:
            raise KeyError(f"{kind} from {level} was not measured")
        return max(self._scaled(one, many, threads) for one, many in best)

    def rate_at(self, size: float, level: str, writes: bool) -> float:
        """Bytes per second of all threads over operands of `size` bytes that were touched shortly before: read, or with `writes` the better
        of read and copy. From the curve, between its points by powers; without a curve the figure of `level`."""
        if not self.curve:
            rate = self.bytes_per_second("read", level)
            return max(rate, self.bytes_per_second("copy", level)) if writes else rate
        points = [(p.bytes, max(p.read, p.copy) if writes else p.read) for p in self.curve]
        if size <= points[0][0]:
            return points[0][1]
        for (below, fast), (above, slow) in pairwise(points):
            if size <= above:
                share = math.log(size / below) / math.log(above / below)
                return math.exp((1.0 - share) * math.log(fast) + share * math.log(slow))
        return points[-1][1]

    def compute_seconds(self, arithmetic: Iterable[tuple[DType, float]], threads: int | None = None) -> float:
        """The least time of operations by type, as `Estimate` has them."""
        return sum(flops / self.flops_per_second(dtype, threads) for dtype, flops in arithmetic)

    def estimate_seconds(self, arithmetic: Iterable[tuple[DType, float]], bytes_read: float, bytes_written: float, threads: int,
                         launches: int) -> float:
        """What a kernel takes that reaches its roof: the larger of arithmetic and traffic, its operands as warm as a working set of their
        size is, and the price of its launches. `threads`: of the kernel; its share of the bandwidth is theirs."""
        compute = self.compute_seconds(arithmetic, threads)
        total = bytes_read + bytes_written
        rate = self.rate_at(total, "memory", bytes_written > 0.01 * total) * min(1.0, threads / self.threads)
        return max(compute, total / rate) + launches * self.dispatch[threads > 1]

    def bound_seconds(self, arithmetic: Iterable[tuple[DType, float]], bytes_read: float, bytes_written: float,
                      threads: int | None = None) -> float:
        """The roofline: no kernel with these operations and this traffic to and from memory can be faster. The traffic of a kernel that
        both reads and writes is held against the better of the copy and the read ceiling."""
        rate = self.bytes_per_second("read", threads=threads)
        if bytes_written:
            rate = max(rate, self.bytes_per_second("copy", threads=threads))
        return max(self.compute_seconds(arithmetic, threads), (bytes_read + bytes_written) / rate)

    def _scaled(self, one: float, many: float, threads: int | None) -> float:
        if threads is None or threads >= self.threads:
            return many
        return min(one * threads, many)


def measure_ceilings(target: Target, threads: int | None = None, *, quick: bool = False) -> Ceilings:
    """Measure this machine, which must be what `target` describes. Quick: float32 and memory, in less than half a second;
    else some ten seconds. `threads`: default the target's."""
    count = target.threads if threads is None else threads
    found: Figures = measure_figures(target, count, quick=quick)
    return Ceilings(target.key, count, quick, found.flops, found.bandwidth, found.dispatch, found.curve)


def known_ceilings(path: Path, target: Target, threads: int | None = None) -> Ceilings | None:
    """The figures of this machine in the JSON file at `path`, quick ones too; None where there are none. Measures nothing."""
    record = read_records(path).get(_machine(target, target.threads if threads is None else threads))
    return None if record is None else _from_json(record)


def cached_ceilings(path: Path, target: Target, threads: int | None = None, *, quick: bool = False, refresh: bool = False,
                    watch: Watch = watch_machine) -> Ceilings:
    """The figures of this machine from the JSON file at `path`, measured and added to it if they are missing or `refresh` is set. A full
    record answers a quick question too; one that was measured while the machine was busy is used and not kept, which is logged. A file that
    cannot be read or written is logged and does no harm."""
    count = target.threads if threads is None else threads
    machine, known = _machine(target, count), read_records(path)
    if not refresh and machine in known:
        ceilings = _from_json(known[machine])
        if ceilings is not None and (quick or not ceilings.quick):
            return ceilings
    seen = watch()
    ceilings = measure_ceilings(target, count, quick=quick)
    busy = seen().busy
    if busy is not None:
        log.log(logging.INFO if quick else logging.WARNING,
                "the machine was busy while its ceilings were measured (%s): they are too low, and not kept; the next command that "
                "needs them measures them again", busy)
        return ceilings
    add_record(path, machine, asdict(ceilings))
    return ceilings


def _machine(target: Target, threads: int) -> str:
    return f"{platform.node()}/{target.key}/{threads} threads/revision {REVISION}"


def _from_json(data: Any) -> Ceilings | None:
    """None for a record that is not one of ours."""
    try:
        return Ceilings(str(data["target"]), int(data["threads"]), bool(data["quick"]),
                        {str(k): _pair(v) for k, v in data["flops"].items()},
                        {str(level): {str(k): _pair(v) for k, v in kinds.items()} for level, kinds in data["bandwidth"].items()},
                        _pair(data["dispatch"]),
                        tuple(CurvePoint(int(p["bytes"]), float(p["read"]), float(p["copy"])) for p in data["curve"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _pair(value: Any) -> tuple[float, float]:
    one, many = value
    return float(one), float(many)
