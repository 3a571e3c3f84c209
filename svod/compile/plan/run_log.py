"""A log of the times of kernels while a program runs: a line for each run, a table at the end, and a trace for chrome://tracing and
Perfetto.

    SVOD_PROFILE=2    gemm_0  1.21 ms  222 GFLOP/s  2.60 GB/s  model.py:12
    SVOD_PROFILE=1    only the table
    SVOD_TRACE=t.json {"traceEvents": [{"name": "gemm_0", "cat": "kernel", "ph": "X", "ts": …, "dur": …, "args": {…}},
                                       {"name": "CPU → CUDA", "cat": "copy", …, "args": {"bytes": 4096, "from": "CPU", "to": "CUDA", …}}]}

Kernels run one by one, and caches are not cleared between them. Times are from the device's own clock (CUDA events, WebGPU timestamps). If
it has none, they are from the host's clock and include the launch: about a microsecond on the CPU. Times of `svod.profile` are medians
without the launch. Copies between the host and devices are timed by the host, which waits for them.
"""
from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from svod.compile.plan.plan_parts import PreparedKernel, kernel_name
from svod.core.cost.op_count import Work
from svod.core.machine.target import HOST
from svod.system.files import write_text
from svod.system.forksafe import remake_after_fork
from svod.system.process.streams import errors
from svod.system.quantities import bytes_rate, count, flops_rate, giga, percent
from svod.system.quantities import seconds as duration
from svod.system.tables import text_table

FIRST_TRACK = 1 << 30       # number of the first device's track, larger than all thread ids
MOST_EVENTS = 1_000_000     # maximum number of events of a trace: later ones are counted and left out
WIDTH = 120                 # columns of the table


@dataclass
class _Total:
    """The totals of one kernel called from one line of the program, or of all copies from one device to another."""

    name: str
    source: str
    origin: str
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
        self._totals: dict[tuple[str, ...], _Total] = {}       # key of a kernel → totals of its runs
        self._copies: dict[tuple[str, str], _Total] = {}       # (source, destination) of copies → their totals
        self._tracks: dict[str, int] = {}                       # device → number of its track; the CPU has none
        self._events: list[dict[str, Any]] = []
        self._works: dict[tuple[Any, ...], Work | None] = {}
        self._lock = threading.Lock()
        remake_after_fork(self, "_lock", threading.Lock)

    def add(self, kernel: PreparedKernel, device: str, start: float, seconds: float, values: Mapping[str, int]) -> None:
        """Record a run of a kernel on a device: its start on the clock `time.perf_counter`, its duration in seconds, and the values of the
        plan's variables."""
        with self._lock:
            work = self._work(kernel, values)
            key = kernel.key, kernel.chain, kernel.origin, kernel.device
            total = self._totals.setdefault(key, _Total(kernel_name(kernel), kernel.opts_source, kernel.origin))
            total.runs += 1
            total.seconds += seconds
            if work is not None:
                total.flops += work.flops
                total.bytes += work.bytes_moved
            if self.trace:
                self._add_event(kernel_name(kernel), "kernel", device, start, seconds, self._told(kernel, seconds, work, values))
        if self.level > 1:
            rates = "" if work is None else f"  {flops_rate(_rate(work.flops, seconds))}  {bytes_rate(_rate(work.bytes_moved, seconds))}"
            print(f"{kernel_name(kernel)}  {duration(seconds)}{rates}  {kernel.origin}".rstrip(), file=self._file or errors())

    def add_copy(self, source: str, to: str, start: float, seconds: float, nbytes: int) -> None:
        """Record a copy from the memory of one device to another, timed by the host's clock."""
        name = f"{source} → {to}"
        with self._lock:
            total = self._copies.setdefault((source, to), _Total(name, "copy", ""))
            total.runs, total.seconds, total.bytes = total.runs + 1, total.seconds + seconds, total.bytes + nbytes
            if self.trace:
                told = {"bytes": nbytes, "from": source, "to": to} | ({"GB/s": nbytes / seconds / 1e9} if seconds else {})
                self._add_event(name, "copy", source if to == HOST else to, start, seconds, told)
        if self.level > 1:
            print(f"{name}  {duration(seconds)}  {bytes_rate(_rate(nbytes, seconds))}", file=self._file or errors())

    def _work(self, kernel: PreparedKernel, values: Mapping[str, int]) -> Work | None:
        own = tuple(values[v.name] for v in kernel.variables)
        key = kernel.key, kernel.variables, own
        if key not in self._works:
            self._works[key] = kernel.work_at(values)
        return self._works[key]

    @staticmethod
    def _told(kernel: PreparedKernel, seconds: float, work: Work | None, values: Mapping[str, int]) -> dict[str, Any]:
        """Return the arguments of a kernel's event in the trace."""
        told: dict[str, Any] = {"kernel": kernel.key[:12], "opts": kernel.chain, "from": kernel.opts_source, "origin": kernel.origin}
        if kernel.form is not None:
            told["device"] = kernel.form.device
        if work is not None and seconds:
            told |= {"GFLOP/s": work.flops / seconds / 1e9, "GB/s": work.bytes_moved / seconds / 1e9}
        return told | {v.name: values[v.name] for v in kernel.variables}

    def _add_event(self, name: str, category: str, device: str, start: float, seconds: float, told: dict[str, Any]) -> None:
        """Add an event to the track of a device. Events of the CPU are in the tracks of the threads that ran them."""
        if len(self._events) >= MOST_EVENTS:
            self.left_out += 1
            return
        track = threading.get_native_id() if device == HOST else self._tracks.setdefault(device, FIRST_TRACK + len(self._tracks))
        self._events.append({"name": name, "cat": category, "ph": "X", "ts": start * 1e6, "dur": seconds * 1e6, "pid": self.pid,
                             "tid": track, "args": told})

    def table(self, width: int = WIDTH) -> str:
        """Format the table of kernels, sorted by time."""
        totals = sorted([*self._totals.values(), *self._copies.values()], key=lambda t: -t.seconds)
        everything = sum(t.seconds for t in totals)
        runs, copies = (sum(t.runs for t in found.values()) for found in (self._totals, self._copies))
        header = ("kernel", "runs", "time", "share", "of one run", "GFLOP/s", "GB/s", "opts", "origin")
        rows = [(t.name, str(t.runs), duration(t.seconds), percent(_rate(t.seconds, everything)), duration(t.seconds / t.runs),
                 giga(_rate(t.flops, t.seconds)), giga(_rate(t.bytes, t.seconds)), t.source, t.origin) for t in totals]
        copied = f" and {copies} cop{'y' if copies == 1 else 'ies'}" if copies else ""
        lines = [f"svod: {count(runs, 'run')} of {count(len(self._totals), 'kernel')}{copied}, {duration(everything)}", ""]
        return "\n".join(lines + text_table(header, rows, right=header[1:7], shrink={"kernel", "opts", "origin"}, width=width))

    def trace_json(self) -> str:
        """Return the trace in Chrome's format: complete events with times in microseconds, and the names of the devices' tracks."""
        names = [{"name": "thread_name", "ph": "M", "pid": self.pid, "tid": track, "args": {"name": device}}
                 for device, track in self._tracks.items()]
        return json.dumps({"traceEvents": [*names, *self._events], "displayTimeUnit": "ns",
                           "otherData": {"events left out": self.left_out}})

    def finish(self, path: str | os.PathLike[str] | None) -> None:
        """Print the table and write the trace. A child that was forked from the process that began the log does nothing."""
        if os.getpid() != self.pid:
            return
        if self.level and (self._totals or self._copies):
            print(self.table(), file=self._file or errors())
        self.write_trace(path)

    def write_trace(self, path: str | os.PathLike[str] | None) -> None:
        """Write the trace so far to `path`; nothing for None. Raises FileError."""
        if path is not None:
            write_text(Path(path), self.trace_json())


def _rate(amount: float, seconds: float) -> float | None:
    """Return the amount per second; None if the time is 0."""
    return amount / seconds if seconds else None
