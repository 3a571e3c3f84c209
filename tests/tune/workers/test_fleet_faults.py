"""The short form of `experiments/faults.py`: on a real cluster with failing candidates and nodes, a search requests the same candidates as
without faults."""
from __future__ import annotations

import json
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from svod.compile.cpu.host import host_target
from svod.config import BeamConfig, BenchConfig
from svod.tune.db import Measurement, TuningDB
from svod.tune.search.confirmation import Finding
from svod.tune.session import KernelTask, TuneSession
from svod.tune.workers.executor import Executor, InlineExecutor
from svod.tune.workers.jobs import WorkerConfig
from svod.tune.workers.ray_executor import ITEMS_PER_CALL, TOKEN
from svod.tune.workers.start import make_executor
from tests.patience import NEVER, wait_until
from tests.tune.ray_nodes import PORT, Node, another_version, workers_of
from tests.tune.replay import Until
from tests.tune.search_kernels import gemm
from tests.tune.told_measurer import ToldMeasurer, TraceFile
from tests.tune.workers.test_child import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")]
KERNEL = gemm(96, 128, 80)
CANDIDATES = 120
FREEZE_SECONDS = 6.0
HEAD = "127.0.0.31"
WORKERS = WorkerConfig(job_modules=("tests.tune.told_jobs",), paths=(ROOT,), memory_bytes=1 << 29)


class Trace(TraceFile):
    """A trace that counts built candidates, and calls `events[n]` when the nth one is built."""

    def __init__(self, path: Path, events: dict[int, Callable[[], None]]) -> None:
        super().__init__(path)
        self.path, self.events, self.built, self.repeated = path, events, 0, 0

    def __call__(self, what: str, digests: Sequence[str]) -> None:
        super().__call__(what, digests)
        if what == "build":
            self.built += len(digests)
            for n in [n for n in self.events if n <= self.built]:
                self.events.pop(n)()

    def again(self, items: int) -> None:
        self.repeated += items


def search(executor: Executor, directory: Path, *, faults: bool,
           events: dict[int, Callable[[], None]]) -> tuple[Finding, Trace, list[Measurement]]:
    directory.mkdir()
    trace, config, bench = Trace(directory / "trace", events), BeamConfig(width=16, patience=1000), BenchConfig(seconds=1.0)
    with TuningDB.open(directory / "t.db") as db:
        session = TuneSession([KernelTask(KERNEL)], host_target(), executor=executor, db=db, config=config, bench=bench,
                              budget=Until(lambda: trace.built >= CANDIDATES),
                              measurer_of=lambda k: ToldMeasurer(k, host_target(), executor, config, bench, trace, faults=faults))
        finding = session.run().findings[KERNEL.key]
        return finding, trace, [m for m, _ in db.select(Measurement)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, Node]]:
    found: dict[str, Node] = {}
    # long enough that a node which is slow on a busy machine is not taken for dead
    patience = {"RAY_health_check_timeout_ms": str(int(1000 * NEVER)), "RAY_worker_register_timeout_seconds": str(int(NEVER))}
    paths = {"PYTHONPATH": ROOT, **patience}
    try:
        found["head"] = Node(HEAD, "--num-cpus=0", **paths)
        found["timer"] = Node("127.0.0.32", "--num-cpus=1", '--resources={"bench": 1}', head=HEAD, **paths)
        found["killed"] = Node("127.0.0.33", "--num-cpus=1", head=HEAD, **paths)
        found["frozen"] = Node("127.0.0.34", "--num-cpus=1", head=HEAD, **paths)
        found["other"] = Node("127.0.0.35", "--num-cpus=1", head=HEAD, **patience, **another_version(tmp_path / "other"))
        yield found
    finally:
        for node in reversed(found.values()):
            node.stop()


@pytest.mark.slow
def test_a_search_in_which_everything_fails_is_the_clean_search(tmp_path: Path, nodes: dict[str, Node], monkeypatch: pytest.MonkeyPatch,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    thaws = threading.Timer(FREEZE_SECONDS, lambda: nodes["frozen"].signal(signal.SIGCONT))

    def freeze() -> None:
        nodes["frozen"].signal(signal.SIGSTOP)
        thaws.start()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)         # Ray's workers import from the working directory: no svod may be there
    events = {CANDIDATES // 4: nodes["killed"].kill, CANDIDATES // 2: freeze}
    with caplog.at_level(logging.WARNING), make_executor("ray", f"{HEAD}:{PORT}", WORKERS, "CPU:interpreter", False, NEVER) as executor:
        # the workers of all nodes are up, or refused, before faults begin
        assert wait_until(lambda: all(a.state != "starting" for a in executor.activity())), caplog.text
        found, trace, rows = search(executor, tmp_path / "faulty", faults=True, events=events)
        assert workers_of(nodes.values())
    assert wait_until(lambda: not workers_of(nodes.values())), "no process of a worker is left"
    assert not events and "is another svod" in caplog.text
    with InlineExecutor(WORKERS) as executor:
        clean, expected, _ = search(executor, tmp_path / "clean", faults=False, events={})
    asked, wanted = ([json.loads(line) for line in t.path.read_text().splitlines()] for t in (trace, expected))
    assert asked == wanted
    assert (found.chain, found.seconds) == (clean.chain, clean.seconds)
    screened = Counter(m.linear for m in rows if m.step == "screen")
    assert len(screened) > CANDIDATES // 2 and set(screened.values()) == {1}
    assert {"crash", "timeout", "error"} <= {m.status for m in rows}
    assert trace.repeated <= 2 * 2 * ITEMS_PER_CALL, "what two workers held, each at most once more than once"
    thaws.join()
