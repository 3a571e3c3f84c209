"""Observation of a program's plans: times of kernels (SVOD_PROFILE, SVOD_TRACE), names of code in memory (SVOD_PERF_MAP).

Compiled kernels are in no file. For their names, `perf record python model.py; perf report` reads `/tmp/perf-PID.map`, which has a line
for each function of a kernel:

    7f51c0a02000 3c8 svod gemm_0 1a64f5090b25 svod_p0
"""
from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from svod.compile.backend import CompilerPair
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.host_item import HostItem
from svod.compile.plan.plan_parts import kernel_name
from svod.config import PrepareConfig
from svod.errors import ConfigError, FileError
from svod.system.forksafe import remake_after_fork

if TYPE_CHECKING:
    from svod.compile.plan.run_log import RunLog

_lock = threading.Lock()
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)
_logs: dict[tuple[int, str | None], RunLog] = {}
_named: set[tuple[int, int, str]] = set()       # (process, address, name) of the functions already in a map


def observe(plan: ExecutionPlan, config: PrepareConfig, pair: CompilerPair) -> None:
    """Set up the observation of a plan that a configuration asks for; `pair` compiled its code. Raises ConfigError for a trace that cannot
    be written."""
    if config.perf_map:
        add_to_perf_map(plan, pair)
    if config.profile or config.trace is not None:
        plan.log_runs(run_log(config.profile or 0, None if config.trace is None else os.fspath(config.trace)))


def run_log(level: int, trace: str | None) -> RunLog:
    """Return the log of this process for a level of SVOD_PROFILE and a file of SVOD_TRACE. It is finished when the process ends."""
    from svod.compile.plan.run_log import RunLog  # it prints tables, which takes 50 ms to import

    with _lock:
        log = _logs.get((level, trace))
        if log is None or log.pid != os.getpid():
            log = RunLog(level, trace is not None)
            try:
                log.write_trace(trace)
            except FileError as e:
                raise ConfigError(f"SVOD_TRACE={trace!r} is not usable: {e}") from None
            _logs[level, trace] = log
            atexit.register(log.finish, trace)
        return log


def add_to_perf_map(plan: ExecutionPlan, pair: CompilerPair, directory: Path = Path("/tmp")) -> None:
    """Append the functions of a plan's kernels to the map file of this process, each once."""
    lines = []
    with _lock:
        for k in plan.every:
            if isinstance(k.loaded, HostItem) or k.device:
                continue
            for address, size, symbol in pair.functions(k.loaded):
                name = f"svod {kernel_name(k)} {k.key[:12]} {symbol}"
                if (os.getpid(), address, symbol) not in _named:
                    _named.add((os.getpid(), address, symbol))
                    lines.append(f"{address:x} {size:x} {name}\n")
        if lines:
            with open(directory / f"perf-{os.getpid()}.map", "a", encoding="utf-8") as file:
                file.writelines(lines)
