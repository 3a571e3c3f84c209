"""Many processes tune overlapping kernels into one database, and some of them are killed: is anything lost, refused, or done twice at once?

    python experiments/eight_processes.py --processes 8 --seconds 300 --kill-every 20

Each process runs one session after the other. The searches are real, and store what a search stores. Times are made up from a candidate's
digest, so that nothing is compiled and the processes meet as often as possible. All of them search the same kernels, each in an order of
its own: six new ones in each round, and six of the round before. Every so many seconds one of them is killed with SIGKILL and replaced.

A process writes to a journal what `record` has stored, and when it held which kernel. From the journals and the database follow

    lost        records that `record` reported as stored, and that the database does not have: 0
    refused     problems and warnings of the database ("database is locked", …): 0
    twice       pairs of searches of one kernel at the same time by two processes: 0

The exit status is 0 where all three are 0 and SQLite finds the file intact.
"""
from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from svod.config import BeamConfig  # noqa: E402
from svod.core.kernel.kernel import Kernel  # noqa: E402
from svod.tune.db import TuningDB  # noqa: E402
from svod.tune.db.records import RECORDS, Record  # noqa: E402
from svod.tune.search.budget import ModelBudget  # noqa: E402
from svod.tune.session import KernelTask, TuneSession  # noqa: E402
from svod.tune.workers.executor import InlineExecutor  # noqa: E402
from tests.tune.replay import ReplayedMeasurer  # noqa: E402
from tests.tune.search_kernels import TARGET, elementwise, gemm, row_reduce  # noqa: E402


def kernels_of_round(number: int) -> list[Kernel]:
    """Six kernels of this round and six of the one before."""
    made = []
    for n in (number, number + 1):
        made += [gemm(16 + n, 32, 24), gemm(32, 16 + n, 8), row_reduce(20 + n, 64), row_reduce(64, 20 + n), elementwise(500 + n),
                 elementwise(9000 + n)]
    return made


class Journaled(TuningDB):
    """A database that notes what it has stored, and which kernels are being searched."""

    journal: Any

    def note(self, **facts: Any) -> None:
        os.write(self.journal, (json.dumps({"at": time.monotonic(), **facts}) + "\n").encode())

    def record(self, records: Iterable[Record], **more: Any) -> int:
        records, started = list(records), time.monotonic()
        added = super().record(records, **more)
        self.note(stored=[[r.table, r.id] for r in records], seconds=time.monotonic() - started)
        return added

    def begin_search(self, kernel: str, target: str, **more: Any) -> str:
        self.note(begun=kernel)
        return super().begin_search(kernel, target, **more)

    def end_search(self, search: str, outcome: str, result: Mapping[str, Any] | None = None) -> None:
        kernel = self._searches[search].kernel
        super().end_search(search, outcome, result)
        self.note(ended=kernel)


def child(directory: Path, number: int, end: float) -> None:
    """One process, until `end` on the monotonic clock."""
    journal = os.open(directory / f"{number}.journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    class Journal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            os.write(journal, (json.dumps({"at": time.monotonic(), "refused": record.getMessage()}) + "\n").encode())
    logging.getLogger("svod").addHandler(Journal(logging.WARNING))
    rng, turn = random.Random(number), 0
    with Journaled.open(directory / "shared.db") as db, InlineExecutor() as executor:
        db.journal = journal
        while time.monotonic() < end:
            tasks = [KernelTask(k, share=rng.random()) for k in kernels_of_round(turn)]
            measurers: dict[str, ReplayedMeasurer] = {}
            TuneSession(tasks, TARGET, executor=executor, db=db, config=BeamConfig(width=2, round_size=6),
                        budget=ModelBudget(max(1.0, end - time.monotonic())),
                        measurer_of=lambda k, made=measurers: made.setdefault(k.key, ReplayedMeasurer())).run()  # type: ignore[misc]
            turn += 1
        if db.problem:
            db.note(refused=db.problem)
        db.note(turns=turn)


@dataclass
class Report:
    """What happened. `slowest_write`: seconds that one `record` took, the wait for its turn among them."""

    processes: int
    seconds: float
    killed: int = 0
    rounds: int = 0
    searches: int = 0
    stored: int = 0
    in_database: int = 0
    lost: int = 0
    twice: int = 0
    slowest_write: float = 0.0
    intact: bool = False
    refused: list[str] | None = None
    failed: list[str] | None = None

    @property
    def good(self) -> bool:
        return self.intact and self.searches > 0 and not (self.lost or self.twice or self.refused or self.failed)


def run(directory: Path, processes: int, seconds: float, kill_every: float | None) -> Report:
    """Run the processes over `directory`, which is empty, and look at what they left."""
    end, next_kill = time.monotonic() + seconds, time.monotonic() + (kill_every or seconds)
    report, rng, deaths = Report(processes, seconds), random.Random(0), dict[int, float]()
    live: dict[int, subprocess.Popen[str]] = {}
    failed: list[str] = []
    started = 0
    while time.monotonic() < end or live:
        while len(live) < processes and time.monotonic() < end:
            live[started] = subprocess.Popen([sys.executable, __file__, "--child", str(started), "--directory", str(directory), "--until",
                                              str(end)], stderr=subprocess.PIPE, text=True)
            started += 1
        if kill_every is not None and next_kill < time.monotonic() < end - 1:
            victim = rng.choice(sorted(live))
            deaths[victim] = time.monotonic()
            live[victim].send_signal(signal.SIGKILL)
            next_kill += kill_every
        for number, process in list(live.items()):
            if process.poll() is not None:
                _, errors = process.communicate()
                del live[number]
                if process.returncode and number not in deaths:
                    failed.append(errors[-2000:])
        time.sleep(0.05)
    report.killed, report.failed = len(deaths), failed
    _judge(report, directory, deaths)
    return report


def _journal(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:      # the last line of a process that was killed
            return


def _judge(report: Report, directory: Path, deaths: Mapping[int, float]) -> None:
    stored: set[tuple[str, str]] = set()
    held: dict[str, list[tuple[float, float, int]]] = {}
    refused: list[str] = []
    for path in sorted(directory.glob("*.journal")):
        number, begun = int(path.stem), dict[str, float]()
        for line in _journal(path):
            stored |= {(table, i) for table, i in line.get("stored", ())}
            report.slowest_write = max(report.slowest_write, line.get("seconds", 0.0))
            report.rounds += line.get("turns", 0)
            refused += [line["refused"]] if "refused" in line else []
            if "begun" in line:
                begun[line["begun"]] = line["at"]
                report.searches += 1
            if "ended" in line:
                held.setdefault(line["ended"], []).append((begun.pop(line["ended"]), line["at"], number))
        for kernel, since in begun.items():
            held.setdefault(kernel, []).append((since, deaths.get(number, float("inf")), number))
    report.twice = sum(a[2] != b[2] and a[0] < b[1] and b[0] < a[1] for of_kernel in held.values() for a, b in combinations(of_kernel, 2))
    with closing(sqlite3.connect(directory / "shared.db")) as conn:
        report.intact = conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        there = {(r.table, i) for r in RECORDS for (i,) in conn.execute(f"SELECT id FROM {r.table}")}
    report.stored, report.in_database, report.lost, report.refused = len(stored), len(there), len(stored - there), refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kill-every", type=float, help="seconds; without it none is killed")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given.directory, given.child, given.until)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        report = run(Path(directory), given.processes, given.seconds, given.kill_every)
    print(json.dumps(asdict(report), indent=1))
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
