"""What kernels took while a program ran: a line for each, a table at the end, a trace for chrome://tracing and Perfetto.

    SVOD_PROFILE=2    gemm_0  1.21 ms  222 GFLOP/s  2.60 GB/s  model.py:12
    SVOD_PROFILE=1    the table alone
    SVOD_TRACE=t.json {"traceEvents": [{"name": "gemm_0", "ph": "X", "ts": …, "dur": …, "args": {…}}]}

Kernels run one by one and find the caches as the program leaves them. A time is of the device's own clock (events of CUDA, timestamps of
WebGPU); where it has none it is of the host's, and includes the launch: about a microsecond on the CPU. Times of `svod.profile` are medians
without the launch.
"""
from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from svod.compile.plan.plan_parts import PreparedKernel, kernel_name
from svod.core.cost.op_count import Work
from svod.system.files import write_text
from svod.system.forksafe import remake_after_fork
from svod.system.quantities import bytes_rate, count, flops_rate, giga, percent
from svod.system.quantities import seconds as duration
from svod.system.tables import text_table

MOST_EVENTS = 1_000_000     # of a trace: what comes later is counted and left out
WIDTH = 120                 # columns of the table


@dataclass
class _Total:
    """All runs of one kernel from one place of the program."""

    kernel: PreparedKernel
    runs: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class RunLog:
    """Collects times from any thread. `level`: 2 prints each kernel as it runs. `trace`: whether events are kept for `trace_json`."""

    def __init__(self, level: int, trace: bool, file: TextIO | None = None) -> None:
        self.level, self.trace, self._file = level, trace, file
        self.pid = os.getpid()
        self.left_out = 0               # events beyond `MOST_EVENTS`
        self._totals: dict[tuple[str, ...], _Total] = {}
        self._events: list[dict[str, Any]] = []
        self._works: dict[tuple[Any, ...], Work | None] = {}
        self._lock = threading.Lock()
        remake_after_fork(self, "_lock", threading.Lock)

    def add(self, kernel: PreparedKernel, start: float, seconds: float, values: Mapping[str, int]) -> None:
        """A run of a kernel: when it began, on the clock `time.perf_counter`, what it took, and the values of the plan's variables."""
        with self._lock:
            work = self._work(kernel, values)
            key = kernel.key, kernel.chain, kernel.origin, kernel.device
            total = self._totals.setdefault(key, _Total(kernel))
            total.runs += 1
            total.seconds += seconds
            if work is not None:
                total.flops += work.flops
                total.bytes += work.bytes_moved
            if self.trace:
                self._add_event(kernel, start, seconds, work, values)
        if self.level > 1:
            rates = "" if work is None else f"  {flops_rate(_rate(work.flops, seconds))}  {bytes_rate(_rate(work.bytes_moved, seconds))}"
            print(f"{kernel_name(kernel)}  {duration(seconds)}{rates}  {kernel.origin}".rstrip(), file=self._file or sys.stderr)

    def _work(self, kernel: PreparedKernel, values: Mapping[str, int]) -> Work | None:
        own = tuple(values[v.name] for v in kernel.variables)
        key = kernel.key, kernel.variables, own
        if key not in self._works:
            self._works[key] = kernel.work_at(values)
        return self._works[key]

    def _add_event(self, kernel: PreparedKernel, start: float, seconds: float, work: Work | None, values: Mapping[str, int]) -> None:
        if len(self._events) >= MOST_EVENTS:
            self.left_out += 1
            return
        told: dict[str, Any] = {"kernel": kernel.key[:12], "opts": kernel.chain, "from": kernel.opts_source, "origin": kernel.origin}
        if kernel.form is not None:
            told["device"] = kernel.form.device
        if work is not None and seconds:
            told |= {"GFLOP/s": work.flops / seconds / 1e9, "GB/s": work.bytes_moved / seconds / 1e9}
        if kernel.variables:
            told |= {v.name: values[v.name] for v in kernel.variables}
        self._events.append({"name": kernel_name(kernel), "cat": "kernel", "ph": "X", "ts": start * 1e6, "dur": seconds * 1e6,
                             "pid": self.pid, "tid": threading.get_native_id(), "args": told})

    def table(self, width: int = WIDTH) -> str:
        """The kernels by time, as text."""
        totals = sorted(self._totals.values(), key=lambda t: -t.seconds)
        everything = sum(t.seconds for t in totals)
        runs = sum(t.runs for t in totals)
        header = ("kernel", "runs", "time", "share", "of one run", "GFLOP/s", "GB/s", "opts", "origin")
        rows = [(kernel_name(t.kernel), str(t.runs), duration(t.seconds), percent(_rate(t.seconds, everything)),
                 duration(t.seconds / t.runs), giga(_rate(t.flops, t.seconds)), giga(_rate(t.bytes, t.seconds)),
                 t.kernel.opts_source, t.kernel.origin) for t in totals]
        lines = [f"svod: {count(runs, 'run')} of {count(len(totals), 'kernel')}, {duration(everything)}", ""]
        return "\n".join(lines + text_table(header, rows, right=header[1:7], shrink={"kernel", "opts", "origin"}, width=width))

    def trace_json(self) -> str:
        """The trace in Chrome's format: complete events, times in microseconds."""
        return json.dumps({"traceEvents": self._events, "displayTimeUnit": "ns", "otherData": {"events left out": self.left_out}})

    def finish(self, path: str | os.PathLike[str] | None) -> None:
        """Print the table and write the trace. A child that was forked from the process that began the log does nothing."""
        if os.getpid() != self.pid:
            return
        if self.level and self._totals:
            print(self.table(), file=self._file or sys.stderr)
        self.write_trace(path)

    def write_trace(self, path: str | os.PathLike[str] | None) -> None:
        """Write the trace so far to `path`; nothing for None. Raises OSError."""
        if path is not None:
            write_text(Path(path), self.trace_json())


def _rate(amount: float, seconds: float) -> float | None:
    """An amount by the second; None where a clock counted nothing."""
    return amount / seconds if seconds else None
