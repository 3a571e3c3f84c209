"""The contract of executors, tested for inline, local and Ray; below, tests of the local executor only."""
from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from svod.errors import ConfigError, FormatError, TuneError
from svod.tune.workers import dispatching, forkserver
from svod.tune.workers import start as start_module
from svod.tune.workers.executor import Executor, InlineExecutor, Kind
from svod.tune.workers.jobs import WorkerConfig
from svod.tune.workers.local_executor import LocalExecutor
from svod.tune.workers.machine_lock import MachineLock
from svod.tune.workers.start import ExecutorStart, make_executor, parse_workers
from tests.draws import a_half
from tests.patience import NEVER, wait_until
from tests.tune.fault_jobs import PRELOADED
from tests.tune.workers.test_child import CONFIG, JOBS, is_gone

ISOLATING = ["local:2", pytest.param("ray:2", marks=pytest.mark.ray)]


def is_busy(executor: Executor, kind: str, job: str) -> bool:
    """Wait until a worker runs the given job."""
    return wait_until(lambda: any((a.kind, a.state, a.job) == (kind, "busy", job) for a in executor.activity()))


@pytest.fixture(scope="module")
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with make_executor(request.param, config=CONFIG, device="TEST", shared_cores=True, start_deadline=NEVER) as e:
        assert e.description
        yield e


@pytest.mark.parametrize("executor", ["inline", *ISOLATING], indirect=True, scope="module")
class TestEveryExecutor:
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["compile", "bench"])
    def test_every_item_gets_one_outcome(self, executor: Executor, kind: Kind) -> None:
        batch = executor.submit(f"{JOBS}:echo", range(20), kind=kind, deadline=NEVER)
        assert len(batch) == 20 and not batch.finished
        found = dict(batch)
        assert {i: o.value for i, o in found.items()} == {i: i for i in range(20)}
        assert all(o.ok and o.worker and o.attempts == 1 for o in found.values())
        assert batch.finished and list(batch) == [] and batch.poll() is None

    @pytest.mark.parametrize("kind", a_half(["compile", "bench"]))
    def test_a_batch_gets_more_items(self, executor: Executor, kind: Kind) -> None:
        batch = executor.submit(f"{JOBS}:echo", [], kind=kind, deadline=NEVER)
        assert batch.finished and batch.poll() is None
        assert executor.add(batch, "ab") == range(2)
        first = next(batch)
        assert executor.add(batch, [], []) == range(2, 2) and executor.add(batch, ["c"]) == range(2, 3) and len(batch) == 3
        assert {i: o.value for i, o in [first, *batch]} == {0: "a", 1: "b", 2: "c"} and batch.finished
        batch.cancel()
        executor.add(batch, ["d"])
        assert [(i, o.kind) for i, o in batch] == [(3, "cancelled")]

    def test_no_items(self, executor: Executor) -> None:
        assert executor.run(f"{JOBS}:echo", [], kind="compile", deadline=NEVER) == []

    def test_run_keeps_the_order(self, executor: Executor) -> None:
        outcomes = executor.run(f"{JOBS}:sleep", [0.02, 0.0, 0.01, 0.0], kind="compile", deadline=NEVER)
        assert [o.value for o in outcomes] == [0.02, 0.0, 0.01, 0.0]

    def test_an_exception_is_an_outcome(self, executor: Executor) -> None:
        outcomes = executor.run(f"{JOBS}:fault", ["raise", "print", "object", "raise"], kind="compile", deadline=NEVER)
        assert [(o.status, o.kind) for o in outcomes] == [("error", "ValueError"), ("ok", ""), ("error", "FormatError"),
                                                          ("error", "ValueError")]
        assert outcomes[0].message == "no such tile"

    def test_setup_is_shared_by_the_items(self, executor: Executor) -> None:
        outcomes = executor.run(f"{JOBS}:add_state", [1, 2, 3], kind="bench", deadline=NEVER, setup=10)
        assert [o.value["sum"] for o in outcomes] == [11, 12, 13] and [o.value["count"] for o in outcomes] == [1, 2, 3]
        refused = executor.run(f"{JOBS}:add_state", [1, 2], kind="bench", deadline=NEVER, setup=-1)
        assert [(o.status, o.kind) for o in refused] == [("error", "ValueError")] * 2

    def test_what_the_workers_do(self, executor: Executor, tmp_path: Path) -> None:
        batch = executor.submit(f"{JOBS}:wait_for", [str(tmp_path / "go")], kind="bench", deadline=NEVER)
        thread = threading.Thread(target=lambda: [batch.poll(NEVER)])
        thread.start()
        assert is_busy(executor, "bench", "wait_for") and all(a.name and a.seconds >= 0 for a in executor.activity())
        (tmp_path / "go").touch()
        thread.join()

    def test_items_must_be_plain_data(self, executor: Executor) -> None:
        with pytest.raises(FormatError, match="plain data"):
            executor.submit(f"{JOBS}:echo", [object()], kind="compile", deadline=NEVER)

    def test_jobs_outside_the_registry(self, executor: Executor) -> None:
        assert executor.run("os:getpid", [None], kind="compile", deadline=NEVER)[0].kind == "TuneError"

    def test_cancelled_items_do_not_start(self, executor: Executor) -> None:
        batch = executor.submit(f"{JOBS}:sleep", [0.05] * 30, kind="compile", deadline=NEVER)
        assert next(batch)[1].ok
        batch.cancel()
        rest = [o for _, o in batch]
        assert len(rest) == 29 and {o.kind for o in rest} <= {"", "cancelled"} and sum(o.status == "lost" for o in rest) >= 10

    def test_workers_are_counted(self, executor: Executor) -> None:
        assert executor.workers("compile") in (1, 2) and executor.workers("bench") == 1

    def test_waiting_for_a_ready_executor_returns(self, executor: Executor) -> None:
        executor.run(f"{JOBS}:echo", [1], kind="compile", deadline=NEVER)
        executor.wait_until_ready()


@pytest.mark.parametrize("executor", ISOLATING, indirect=True, scope="module")
class TestIsolation:
    """Tests of outcomes for which items must run in a process of their own, so that the inline executor cannot have them."""

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["compile", "bench"])
    def test_hangs_and_crashes_cost_only_themselves(self, executor: Executor, kind: Kind) -> None:
        items = [1, "segfault", 2, "spin native", 3, "raise", "spin python", "abort", 4, "exit"]
        batches = [executor.submit(f"{JOBS}:fault_or_add", [item], kind=kind, deadline=0.5 if "spin" in str(item) else NEVER, setup=100)
                   for item in items]
        outcomes = [next(batch)[1] for batch in batches]
        assert [o.kind or o.status for o in outcomes] == ["ok", "SIGSEGV", "ok", "deadline", "ok", "ValueError", "deadline", "SIGABRT",
                                                          "ok", "exit 7"]
        assert [o.value["sum"] for o in outcomes if o.ok] == [101, 102, 103, 104]
        assert all(o.attempts == 1 for o in outcomes)

    def test_items_run_elsewhere_and_in_parallel(self, executor: Executor, tmp_path: Path) -> None:
        outcomes = executor.run(f"{JOBS}:meet", [(str(tmp_path / "both"), 2)] * 2, kind="compile", deadline=NEVER)
        assert all(o.ok for o in outcomes) and len({o.worker for o in outcomes}) == 2
        pids = {o.value["pid"] for o in executor.run(f"{JOBS}:facts", [None] * 4, kind="bench", deadline=NEVER)}
        assert os.getpid() not in pids and len(pids) == 1

    def test_items_go_to_the_worker_that_knows_them_and_wait_for_none(self, executor: Executor, tmp_path: Path) -> None:
        """Each item ends only when its counterpart has begun on the other worker."""
        def run(pairs: str, homes: Sequence[str] = ()) -> list[str]:
            items = [(str(tmp_path / pair), 2) for pair in pairs]
            return [o.worker for _, o in sorted(executor.submit(f"{JOBS}:meet", items, kind="compile", deadline=NEVER, homes=homes))]
        one, other = run("aa")
        homes = [one, one, one, other, other, other]
        assert run("bcdbcd", homes) == homes, "in their order only half of them would be there"
        assert set(run("ee", [one, one])) == {one, other}, "a worker with nothing of its own takes from others"

    def test_compilers_are_idle_while_timing(self, executor: Executor) -> None:
        """The phase barrier: with both kinds queued at once, no bench item overlaps a compile item, and bench items do not overlap."""
        first = executor.submit(f"{JOBS}:interval", [0.03] * 6, kind="compile", deadline=NEVER)
        bench = executor.submit(f"{JOBS}:interval", [0.03] * 4, kind="bench", deadline=NEVER)
        second = executor.submit(f"{JOBS}:interval", [0.03] * 6, kind="compile", deadline=NEVER)
        compiles = [o.value for b in (first, second) for _, o in b]
        benches = sorted(o.value for _, o in bench)
        assert not [(b, c) for b in benches for c in compiles if b[0] < c[1] and c[0] < b[1]]
        assert all(a[1] <= b[0] for a, b in pairwise(benches))

    @pytest.mark.slow
    def test_timing_waits_for_the_machine_lock_and_its_deadline_does_not(self, executor: Executor) -> None:
        lock = MachineLock("TEST")
        assert lock.acquire()
        batch = executor.submit(f"{JOBS}:echo", [1], kind="bench", deadline=3.0)
        assert batch.poll(3.3) is None
        lock.release()
        assert [o.value for _, o in batch] == [1]
        assert lock.acquire(), "the lock is let go when no bench item waits"
        lock.release()

    def test_a_changed_deadline_holds_for_items_that_start_later(self, executor: Executor, tmp_path: Path) -> None:
        go = str(tmp_path / "go")
        batch = executor.submit(f"{JOBS}:wait_for", [go, go + " later"], kind="bench", deadline=NEVER)
        assert is_busy(executor, "bench", "wait_for")
        batch.deadline = 0.2
        (tmp_path / "go").touch()
        assert [o.status for _, o in batch] == ["ok", "timeout"]

    def test_two_threads_may_submit(self, executor: Executor) -> None:
        sums: list[int] = []

        def search() -> None:
            sums.append(sum(o.value for o in executor.run(f"{JOBS}:echo", range(20), kind="compile", deadline=NEVER)))
        threads = [threading.Thread(target=search) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sums == [190] * 3


class TestLocal:
    def test_close_ends_everything_and_is_idempotent(self) -> None:
        before = set(threading.enumerate())
        executor = LocalExecutor(2, CONFIG, "TEST")
        facts = executor.run(f"{JOBS}:facts", [None], kind="bench", deadline=NEVER)[0].value
        batch = executor.submit(f"{JOBS}:fault", ["spin native"] * 6, kind="compile", deadline=NEVER)
        time.sleep(0.05)
        executor.close()
        executor.close()
        assert [(o.status, o.kind) for _, o in batch] == [("lost", "closed")] * 6
        assert is_gone(facts["pid"]) and is_gone(facts["ppid"])
        with pytest.raises(TuneError, match="closed"):
            executor.submit(f"{JOBS}:echo", [1], kind="compile", deadline=NEVER)
        assert set(threading.enumerate()) == before

    def test_close_while_waiting_for_the_lock(self) -> None:
        lock = MachineLock("TEST")
        assert lock.acquire()
        executor = LocalExecutor(1, CONFIG, "TEST")
        batch = executor.submit(f"{JOBS}:echo", [1], kind="bench", deadline=NEVER)
        assert batch.poll(0.2) is None
        executor.close()
        assert [o.kind for _, o in batch] == ["closed"]
        lock.release()

    @pytest.mark.slow
    def test_a_killed_fork_server_costs_nothing_but_time(self, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        with LocalExecutor(2, CONFIG, "TEST") as executor, caplog.at_level(logging.INFO, "svod.tune"):
            outcomes = executor.run(f"{JOBS}:kill_parent_once", [str(tmp_path / "done")] * 4, kind="compile", deadline=NEVER)
            assert [o.status for o in outcomes] == ["ok"] * 4 and sum(o.attempts > 1 for o in outcomes) >= 1
            assert "starting another" in caplog.text

    @pytest.mark.slow
    def test_an_item_that_loses_three_workers_is_lost(self) -> None:
        with LocalExecutor(1, CONFIG, "TEST") as executor:
            # the item kills the fork server, which stands for a failure of the infrastructure
            outcome = executor.run(f"{JOBS}:kill_parent", [None], kind="compile", deadline=NEVER)[0]
            assert (outcome.status, outcome.kind, outcome.attempts) == ("lost", "worker", 3)
            assert executor.run(f"{JOBS}:echo", [7], kind="compile", deadline=NEVER)[0].value == 7

    def test_a_fork_server_that_stands_still_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatching, "WORKER_END_SECONDS", 0.2)
        monkeypatch.setattr(forkserver, "CLOSE_DEADLINE", 0.2)
        with LocalExecutor(1, CONFIG, "TEST") as executor:
            executor.wait_until_ready()
            stopped = executor.server().pid
            os.kill(stopped, signal.SIGSTOP)
            batch = executor.submit(f"{JOBS}:echo", [1], kind="compile", deadline=NEVER)
            assert batch.poll(0.2) is None, "it waits for a child"
        assert batch.poll(0.0) is not None and is_gone(stopped)

    def test_it_ends_where_no_thread_can_be_started_any_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An executor can be closed although no thread can be started, as at the exit of Python 3.12 and later."""
        executor = LocalExecutor(1, CONFIG, "TEST")
        executor.wait_until_ready()
        server = executor.server().pid
        monkeypatch.setattr(threading.Thread, "start", None)
        executor.close()
        assert is_gone(server)

    @pytest.mark.slow
    def test_a_fork_server_that_does_not_answer_makes_room_for_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(forkserver, "REQUEST_DEADLINE", 3.0)
        with LocalExecutor(1, CONFIG, "TEST") as executor:
            executor.wait_until_ready()
            stopped = executor.server().pid
            os.kill(stopped, signal.SIGSTOP)
            [outcome] = executor.run(f"{JOBS}:echo", [7], kind="compile", deadline=NEVER)
            assert (outcome.value, outcome.attempts) == (7, 2) and executor.server().pid != stopped

    def test_a_fork_server_that_does_not_start_is_waited_for_no_longer_than_asked(self) -> None:
        with LocalExecutor(1, CONFIG, "TEST") as executor:
            os.kill(executor.server().pid, signal.SIGSTOP)
            with pytest.raises(TuneError, match=r"could not start.* does not answer"):
                executor.wait_until_ready(0.2)

    def test_workers_that_cannot_start_are_an_error_that_says_why(self) -> None:
        import dataclasses
        with LocalExecutor(1, dataclasses.replace(CONFIG, preload=("no_such_module",)), "TEST") as executor:
            with pytest.raises(TuneError, match="no_such_module"):
                executor.wait_until_ready()
            outcome = executor.run(f"{JOBS}:echo", [1], kind="compile", deadline=NEVER)[0]
            assert outcome.status == "lost" and "no_such_module" in outcome.message

    def test_where_no_worker_can_start_the_end_of_python_says_nothing_more(self) -> None:
        code = ("import sys; sys.executable = ''\nfrom svod.errors import TuneError\n"
                "from svod.tune.workers.local_executor import LocalExecutor\n"
                "try: LocalExecutor(1)\nexcept TuneError as e: print(e)")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "") and "sys.executable is empty" in done.stdout

    def test_the_default_workers_have_svods_jobs_loaded(self) -> None:
        with LocalExecutor(1) as executor:
            executor.wait_until_ready()
            outcome = executor.run("svod.tune.measure.work:no_such_job", [None], kind="compile", deadline=NEVER)[0]
            assert (outcome.kind, "has no function 'no_such_job'" in outcome.message) == ("TuneError", True)

    @pytest.mark.slow
    def test_the_default_workers_have_the_hosts_compiler_loaded(self) -> None:
        """The fork server imports the compiler once; otherwise each child would take a tenth of a second to do so."""
        with LocalExecutor(1, WorkerConfig(job_modules=CONFIG.job_modules, paths=CONFIG.paths)) as executor:
            [outcome] = executor.run(f"{JOBS}:facts", [None], kind="compile", deadline=NEVER)
            assert set(PRELOADED) <= set(outcome.value["modules"])

    def test_an_exception_in_the_search_closes(self) -> None:
        pids: list[int] = []
        with pytest.raises(KeyboardInterrupt), LocalExecutor(1, CONFIG, "TEST") as executor:
            pids.append(executor.run(f"{JOBS}:facts", [None], kind="compile", deadline=NEVER)[0].value["pid"])
            executor.submit(f"{JOBS}:fault", ["spin native"], kind="compile", deadline=NEVER)
            raise KeyboardInterrupt
        assert wait_until(lambda: is_gone(pids[0]))


class TestChoosing:
    @pytest.mark.parametrize(("spec", "parsed"), [("local", ("local", None)), ("local:3", ("local", 3)), ("ray", ("ray", None)),
                                                  ("ray:16", ("ray", 16)), ("inline", ("inline", None))])
    def test_specs(self, spec: str, parsed: tuple[str, int | None]) -> None:
        assert parse_workers(spec) == parsed

    @pytest.mark.parametrize("spec", ["", "local:", "local:0", "local:-1", "local:two", "ray:1.5", "inline:2", "dask:3", "local:99999"])
    def test_bad_specs_say_what_is_possible(self, spec: str) -> None:
        with pytest.raises(ConfigError, match="ray:N, local:N"):
            make_executor(spec)

    @pytest.mark.slow
    @pytest.mark.parametrize(("spec", "address", "message"), [
        ("local:2", "auto", "needs ray workers"), ("ray:2", "ray://head:10001", "host:port"), ("ray:2", "head", "auto or host:port")])
    def test_bad_addresses(self, spec: str, address: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            make_executor(spec, address)

    def test_without_ray_the_local_executor_takes_over_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "ray", None)
        said: list[str] = []
        with make_executor("ray:1", config=CONFIG, say=said.append) as executor:
            assert isinstance(executor, LocalExecutor) and executor.description == "1 local worker"
        assert len(said) == 1 and "local workers instead of Ray" in said[0] and "svod[tune]" in said[0]

    def test_a_cluster_that_cannot_be_used_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "ray", None)
        with pytest.raises(TuneError, match=r"127\.0\.0\.1:1"):
            make_executor("ray:1", "127.0.0.1:1", config=CONFIG)

    def test_starting_in_the_background(self) -> None:
        start = ExecutorStart("local:1", config=CONFIG)
        assert start.result().run(f"{JOBS}:echo", [3], kind="compile", deadline=NEVER)[0].value == 3
        start.close()
        failing = ExecutorStart("nothing")
        with pytest.raises(ConfigError):
            failing.result()
        failing.close()

    def test_a_start_that_ctrl_c_interrupts_is_still_waited_for_and_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, go = InlineExecutor(CONFIG), threading.Event()
        monkeypatch.setattr(start_module, "make_executor", lambda: [go.wait(NEVER), made][1])
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            start = ExecutorStart()
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                start.result(NEVER)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(TuneError, match="have not started"):
            start.result(0.0)
        go.set()
        start.close()
        assert made.closed

    def test_inline_closes(self) -> None:
        executor = InlineExecutor(CONFIG)
        batch = executor.submit(f"{JOBS}:echo", [1, 2], kind="compile", deadline=NEVER)
        assert next(batch)[1].value == 1
        executor.close()
        assert [o.kind for _, o in batch] == ["closed"]
        with pytest.raises(TuneError, match="closed"):
            executor.submit(f"{JOBS}:echo", [1], kind="compile", deadline=NEVER)


def test_threads_take_turns_quickly_while_workers_work() -> None:
    """Python's default switch interval would delay each item by milliseconds. The process gets its own interval back at the end, and keeps
    it if it is shorter."""
    before = sys.getswitchinterval()
    try:
        for own in (0.005, 1e-4):
            sys.setswitchinterval(own)
            with LocalExecutor(1, CONFIG) as local:
                assert sys.getswitchinterval() == pytest.approx(min(own, dispatching.SWITCH_SECONDS), rel=0.02)
            local.close()
            assert sys.getswitchinterval() == pytest.approx(own, rel=0.02)
    finally:
        sys.setswitchinterval(before)
