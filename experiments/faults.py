"""A search on a Ray cluster in which everything fails, against the same search in which nothing does.

    python experiments/faults.py             # 2,000 candidates, times from a recorded table
    python experiments/faults.py --real      # times of this machine: the winners of both searches are timed against each other

A head and three nodes on this machine; the first node times. The search is of one matrix product. What fails:

    candidates    5 % hang, 5 % end with a segmentation fault, 2 % use up their memory: half while compiled, half in their first run
    nodes         a fourth one has another svod; at a quarter of the candidates the second is killed for good, at a half the third
                  stands still for 30 s
    the driver    is killed at three quarters, and started again

The table is recorded first: a search in which nothing fails compiles and times its candidates on this machine, each LINEAR once, and is
then told the recorded time, as the searches after it are. The clean search is told these times, and told which candidates fail. It has no
workers. All three are killed and started again at the same candidate. Compared are all that the clean search and the one with faults
asked for, in order, and their winners. A search that is started again screens the chains that it starts from once more, at most as many
as its beam is wide, and tries once more what crashed, hung or failed before, as that may have been the machine's fault. Every other LINEAR
is screened once.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# isort: split
from svod.compile.cpu.host import host_target
from svod.config import BeamConfig, BenchConfig
from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.kernel import Kernel
from svod.tune.db import Measurement, TuningDB
from svod.tune.measure.candidate import Candidate
from svod.tune.measure.measurer import Built, Screened
from svod.tune.measure.worker_measurer import WorkerMeasurer
from svod.tune.search.budget import ModelBudget
from svod.tune.session import KernelTask, TuneSession
from svod.tune.workers.executor import InlineExecutor
from svod.tune.workers.jobs import WorkerConfig
from svod.tune.workers.ray_executor import TOKEN
from svod.tune.workers.start import make_executor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests import patience  # noqa: E402
from tests.tune.ray_nodes import PORT, Node, another_version, is_alive, workers_of  # noqa: E402
from tests.tune.search_kernels import gemm  # noqa: E402
from tests.tune.told_measurer import FaultyMeasurer, ToldMeasurer, TraceFile  # noqa: E402

HEAD = "127.0.0.21"
FREEZE_SECONDS = 30.0
NO_PROCESS_AFTER = 90.0
NEVER = 1 << 60
UNTIMED = 1.0
WORKERS = WorkerConfig(job_modules=("tests.tune.told_jobs",), paths=(str(ROOT),), memory_bytes=1 << 29)
BENCH = BenchConfig(seconds=1.0)


class Candidates(ModelBudget):
    """Ends with the round in which so many candidates have been built, however long that takes."""

    def __init__(self, candidates: int, trace: CountingTrace) -> None:
        super().__init__(math.inf, math.inf)
        self.candidates, self.trace = candidates, trace

    def next(self, kernels: Sequence[Any]) -> Any:
        return None if self.trace.built >= self.candidates else super().next(kernels)


class CountingTrace(TraceFile):
    """Ends this process by SIGKILL when the candidate `end_at` is among those that are about to be built. `built`: candidates so far, those
    of earlier processes among them."""

    def __init__(self, path: Path, end_at: int) -> None:
        self.built = sum(len(line) - 1 for line in read_trace(path) if line[0] == "build") if path.exists() else 0
        self.end_at = end_at
        super().__init__(path)
        self.repeats = path.with_name("again")
        self.repeats.touch()

    def again(self, items: int) -> None:
        with self.repeats.open("a") as file:
            file.write(f"{items}\n")

    def __call__(self, what: str, digests: Sequence[str]) -> None:
        super().__call__(what, digests)
        if what == "build":
            before, self.built = self.built, self.built + len(digests)
            if before < self.end_at <= self.built:
                os.kill(os.getpid(), signal.SIGKILL)


def read_trace(path: Path) -> list[list[str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- the table ---------------------------------------------------------------------------------------------------------------
class Table:
    """Recorded seconds by LINEAR digest, in a file that outlives the process: a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.seconds: dict[str, float] = dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}
        self.path = path

    def __call__(self, candidate: Candidate) -> float:
        """Raises KeyError for what was not recorded."""
        return self.seconds[candidate.linear]

    def add(self, linear: str, seconds: float) -> None:
        self.seconds[linear] = seconds
        with self.path.open("a") as file:
            file.write(json.dumps([linear, seconds]) + "\n")


class RecordingMeasurer(ToldMeasurer):
    """Compiles and times what the table lacks, and adds it. What cannot be timed gets `UNTIMED` seconds."""

    def __init__(self, *args: Any, table: Table) -> None:
        super().__init__(*args, faults=False, seconds_of=self.recorded)
        self.table = table

    def recorded(self, candidate: Candidate) -> float:
        if candidate.linear not in self.table.seconds:
            [made] = WorkerMeasurer.build(self, [candidate], final=False, deadline=patience.NEVER)
            self.table.add(candidate.linear, self._timed(candidate, made) if isinstance(made, Built) else UNTIMED)
        return self.table(candidate)

    def _timed(self, candidate: Candidate, made: Built) -> float:
        before, candidate.built = candidate.built, made
        [timed] = WorkerMeasurer.screen(self, [candidate], None)
        candidate.built = before
        return timed.seconds if isinstance(timed, Screened) else UNTIMED


# -- the driver: a process of its own ----------------------------------------------------------------------------------------
def drive(args: argparse.Namespace) -> None:
    """Search; the last line of stdout has the result as JSON."""
    kernel, target, where = gemm(*args.shape), host_target(), Path(args.directory)
    config = BeamConfig(width=args.width, seed=args.seed, patience=1000)
    trace = CountingTrace(where / "trace", args.end_at or NEVER)
    if args.kind == "clean":
        executor: Any = InlineExecutor(WORKERS)
    elif args.kind in ("local", "record"):
        executor = make_executor("local", None, WORKERS)
    else:
        executor = make_executor("ray", f"{HEAD}:{args.port}", WORKERS, "CPU" if args.real else "CPU:interpreter", args.real, 60.0)

    def measurer(k: Kernel) -> FaultyMeasurer:
        common = (k, target, executor, config, BENCH, trace)
        if args.real:
            return FaultyMeasurer(*common)
        table = Table(where.parent / "table")
        return RecordingMeasurer(*common, table=table) if args.kind == "record" else \
            ToldMeasurer(*common, faults=args.kind != "clean", seconds_of=table)
    with executor, TuningDB.open(where / "tuning.db") as db:
        started = time.monotonic()
        session = TuneSession([KernelTask(kernel, name="gemm")], target, executor=executor, db=db, config=config, bench=BENCH,
                              budget=Candidates(args.candidates, trace), measurer_of=measurer)
        finding = session.run().findings[kernel.key]
        seconds = time.monotonic() - started
    closing = time.monotonic()
    print(json.dumps({"chain": [o.to_json() for o in finding.chain], "seconds": finding.seconds, "why": finding.why, "took": seconds,
                      "text": chain_text(finding.chain), "closed": time.monotonic() - closing}))


class Driver:
    """The process of `drive`."""

    def __init__(self, args: argparse.Namespace, kind: str, directory: Path, end_at: int = 0) -> None:
        directory.mkdir(exist_ok=True)
        self.trace = directory / "trace"
        command = [sys.executable, __file__, "--drive", kind, "--directory", str(directory), "--candidates", str(args.candidates),
                   "--seed", str(args.seed), "--width", str(args.width), "--port", str(PORT), "--end-at", str(end_at),
                   "--shape", *map(str, args.shape), *["--real"] * args.real]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        # elsewhere, because Ray lets workers import from the driver's directory, and another svod has to stay another one
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=directory)

    @property
    def built(self) -> int:
        return sum(len(line) - 1 for line in read_trace(self.trace) if line[0] == "build") if self.trace.exists() else 0

    def wait_for(self, built: int) -> bool:
        """Whether so many candidates were built before it ended."""
        while self.process.poll() is None:
            if self.built >= built:
                return True
            time.sleep(0.2)
        return False

    def result(self) -> dict[str, Any]:
        out, _ = self.process.communicate()
        if self.process.returncode:
            raise RuntimeError(f"the driver ended with {self.process.returncode}")
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


# -- the cluster ---------------------------------------------------------------------------------------------------------------
def start_nodes(directory: Path) -> dict[str, Node]:
    """The head; `timer`, which times and compiles; `killed`; `frozen`; `other`, which has another svod."""
    paths = {"PYTHONPATH": str(ROOT)}
    nodes = {"head": Node(HEAD, "--num-cpus=0", **paths)}
    nodes["timer"] = Node("127.0.0.22", "--num-cpus=1", '--resources={"bench": 1}', head=HEAD, **paths)
    for i, name in enumerate(("killed", "frozen")):
        nodes[name] = Node(f"127.0.0.{23 + i}", "--num-cpus=1", head=HEAD, **paths)
    nodes["other"] = Node("127.0.0.25", "--num-cpus=2", '--resources={"bench": 1}', head=HEAD, **another_version(directory / "other"))
    return nodes


def break_things(driver: Driver, nodes: dict[str, Node], args: argparse.Namespace, say: Any) -> None:
    """Kill one node and freeze another, when the driver is there."""
    if driver.wait_for(args.candidates // 4):
        nodes.pop("killed").kill()
        say(f"{driver.built} candidates: a node was killed")
    if driver.wait_for(args.candidates // 2):
        nodes["frozen"].signal(signal.SIGSTOP)
        say(f"{driver.built} candidates: a node stands still")
        time.sleep(FREEZE_SECONDS)
        nodes["frozen"].signal(signal.SIGCONT)
        say(f"{driver.built} candidates: it goes on")


def watch_end(nodes: dict[str, Node], say: Any) -> None:
    """Processes of svod's workers that outlive the driver, and any that outlive the nodes."""
    started = time.monotonic()
    while (left := workers_of(nodes.values())) and time.monotonic() - started < NO_PROCESS_AFTER:
        time.sleep(0.05)
    say(f"{len(left)} processes of workers are left {time.monotonic() - started:.2f} s after the driver's end")


def faulty(args: argparse.Namespace, directory: Path, say: Any) -> tuple[dict[str, Any], Path]:
    """The search in which everything fails."""
    seen: set[int] = set()
    nodes = start_nodes(directory)
    try:
        driver = Driver(args, "ray", directory / "faulty", 0 if args.real else 3 * args.candidates // 4)
        break_things(driver, nodes, args, say)
        if not args.real:
            driver.process.wait()
            say(f"{driver.built} candidates: the driver was killed ({driver.process.returncode})")
            watch_end(nodes, say)
            driver = Driver(args, "ray", directory / "faulty")
        result = driver.result()
        watch_end(nodes, say)
    finally:
        for node in nodes.values():
            node.processes()
        for node in reversed(nodes.values()):
            node.stop()
            seen |= node.seen
    started = time.monotonic()
    while (alive := [p for p in seen if is_alive(p)]) and time.monotonic() - started < NO_PROCESS_AFTER:
        time.sleep(0.1)
    say(f"{len(alive)} of {len(seen)} processes are left {time.monotonic() - started:.1f} s after the nodes' end")
    return result, directory / "faulty"


def clean(args: argparse.Namespace, directory: Path, kind: str, name: str, end_at: int) -> tuple[dict[str, Any], Path]:
    """A search in which nothing fails, killed when candidate `end_at` is built and started again; 0: not killed."""
    if end_at:
        Driver(args, kind, directory / name, end_at).process.wait()
    return Driver(args, kind, directory / name).result(), directory / name


class Recorded(NamedTuple):
    """What the database has: the number of LINEARs; of these screened in both searches, how many had a time and how many had failed in the
    first; of those screened twice in one search; the statuses."""

    linears: int
    timed_again: int
    failed_again: int
    twice_in_one: int
    statuses: Counter[str]


def recorded(directory: Path) -> Recorded:
    with TuningDB.open(directory / "tuning.db", read_only=True) as db:
        rows = [m for m, _ in db.select(Measurement)]
    screened: dict[str, list[Measurement]] = {}
    for m in sorted((m for m in rows if m.step == "screen"), key=lambda m: m.taken_at):
        screened.setdefault(m.linear or m.chain_text, []).append(m)
    again = [of for of in screened.values() if len(of) > 1]
    failed = sum(of[0].status in ("crash", "timeout", "error") for of in again)
    return Recorded(len({m.linear for m in rows}), len(again) - failed, failed,
                    sum(len({m.search for m in of}) < len(of) for of in again), Counter(m.status for of in screened.values() for m in of))


def compare(args: argparse.Namespace, directory: Path, say: Any) -> bool:
    end_at = 3 * args.candidates // 4
    _, recorded_in = clean(args, directory, "record", "recorded", end_at)
    times = sorted(Table(directory / "table").seconds.values())
    say(f"{len(times)} LINEARs timed: {times[0] * 1e6:.2f} to {times[-1] * 1e6:.2f} µs, {sum(t == UNTIMED for t in times)} not to be timed")
    (found, there), (told, here) = faulty(args, directory, say), clean(args, directory, "clean", "clean", end_at)
    say("the search that recorded the table " + ("asked for the same" if read_trace(recorded_in / "trace") == read_trace(here / "trace")
                                                 else "asked for something else") + " as the clean search that was told it")
    theirs, ours = read_trace(there / "trace"), read_trace(here / "trace")
    same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    ok = same == len(theirs) == len(ours) and found["chain"] == told["chain"]
    kept = recorded(there)
    say(f"asked for: the first {same} of {len(theirs)} steps are those of the clean search, which has {len(ours)}")
    for name, one in (("winner", found), ("winner of the clean search", told)):
        say(f"{name}: {one['text']} at {one['seconds'] * 1e6:.2f} µs")
    say(f"{kept.linears} LINEARs recorded; screened again after the new start: {kept.timed_again} that it began from, "
        f"{kept.failed_again} that had failed; screened twice in one search: {kept.twice_in_one}; statuses {dict(kept.statuses)}; "
        f"{sum(map(int, (there / 'again').read_text().split()))} items were given to a second worker")
    uninterrupted, _ = clean(args, directory, "record", "uninterrupted", 0)
    say(f"winner of a clean search that is not ended in between: {uninterrupted['text']} at {uninterrupted['seconds'] * 1e6:.2f} µs")
    return ok and kept.timed_again <= args.width and not kept.twice_in_one


def compare_real(args: argparse.Namespace, directory: Path, say: Any) -> bool:
    from paired import in_a_process, time_chains

    from svod.core.ir.serialize import ast_to_data
    (found, _), (local, _) = faulty(args, directory, say), clean(args, directory, "local", "clean", 0)
    for name, one in (("winner", found), ("winner of the clean search", local)):
        say(f"{name}: {one['text']} at {one['seconds'] * 1e6:.2f} µs")
    ratios = []
    for seed in range(3):
        _, (_, ratio) = in_a_process(time_chains, ast_to_data(gemm(*args.shape).ast), [local["chain"], found["chain"]], seed)
        ratios.append(ratio)
        say(f"the clean search's winner takes {ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) times what the other's does")
    return sorted(r.median for r in ratios)[1] >= 0.97


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=2000)
    parser.add_argument("--shape", type=int, nargs=3, default=[96, 128, 80], metavar=("M", "N", "K"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=64, help="of the beam: a narrow one has tried all it proposes too soon")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--drive", dest="kind", help=argparse.SUPPRESS)
    for name in ("--directory", "--port", "--end-at"):
        parser.add_argument(name, type=str if name == "--directory" else int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        drive(args)
        return
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)
    with tempfile.TemporaryDirectory(prefix="svod-faults-", dir="/tmp") as directory:
        ok = (compare_real if args.real else compare)(args, Path(directory), say)
    print("as in the clean search" if ok else "NOT as in the clean search")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
