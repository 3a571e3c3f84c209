"""The dispatcher with scripted carriers, whose workers are lost, never come up, or cannot work."""
from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from svod.core.machine.target import Target
from svod.errors import TuneError
from svod.tune.workers.child import Request
from svod.tune.workers.dispatching import DispatchingExecutor
from svod.tune.workers.executor import Kind
from svod.tune.workers.fleet import WorkerLost
from svod.tune.workers.jobs import Outcome, decode
from tests.patience import NEVER, wait_until
from tests.tune.search_kernels import TARGET


class Scripted:
    """A carrier whose start and runs are functions of the test."""

    chunk = 4

    def __init__(self, owner: ScriptedExecutor, name: str, start: Callable[[Scripted], None], run: Callable[[Scripted, int], Outcome],
                 kind: Kind = "compile", host: str = "", cores: int = 64, target: Target | None = None) -> None:
        self.owner, self.name, self.kind, self.host, self.cores, self.target = owner, name, kind, host, cores, target
        self._start, self._run = start, run
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        self._start(self)

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        return [self._run(self, decode(r.item)) for r in requests]

    def idle(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class ScriptedExecutor(DispatchingExecutor):
    def __init__(self, shared_cores: bool | None = None) -> None:
        super().__init__("scripted workers", shared_cores)

    def add(self, *args: object, **more: object) -> Scripted:
        carrier = Scripted(self, *args, **more)  # type: ignore[arg-type]
        self._add(carrier)
        return carrier

    def wait_until_ready(self, seconds: float = math.inf) -> None: ...


@contextmanager
def executing(shared_cores: bool | None = None) -> Iterator[ScriptedExecutor]:
    executor = ScriptedExecutor(shared_cores)
    try:
        yield executor
    finally:
        executor.close()


def up(carrier: Scripted) -> None: ...


def done(carrier: Scripted, item: int) -> Outcome:
    return Outcome("ok", item)


def never_up(carrier: Scripted) -> None:
    """A start that waits for a free place until the executor closes."""
    while not carrier.owner.closing:
        time.sleep(0.01)
    raise WorkerLost("closing")


def other_version(carrier: Scripted) -> None:
    raise TuneError("the worker on far is another svod")


def outcomes_of(executor: ScriptedExecutor, count: int, kind: Kind = "compile", **more: Any) -> list[Outcome]:
    """All outcomes of a batch in the order of its items, after a check that each came once."""
    batch = executor.submit("m:job", list(range(count)), kind=kind, deadline=1.0, **more)
    found: dict[int, Outcome] = {}
    end = time.monotonic() + NEVER
    while not batch.finished and time.monotonic() < end:
        if (answer := batch.poll(0.1)) is not None:
            assert answer[0] not in found
            found[answer[0]] = answer[1]
    assert batch.finished, f"{len(found)} of {count} items have an outcome"
    return [found[i] for i in range(count)]


def test_a_worker_that_is_lost_and_not_replaced_costs_nothing_but_its_items_a_second_try() -> None:
    lost = threading.Event()

    def start(carrier: Scripted) -> None:
        if lost.is_set():
            never_up(carrier)

    def dies(carrier: Scripted, item: int) -> Outcome:
        lost.set()
        raise WorkerLost("its node is gone")
    with executing() as executor:
        executor.add("dying", start, dies)
        executor.add("healthy", up, lambda carrier, item: lost.wait(NEVER) and done(carrier, item))
        outcomes = outcomes_of(executor, 50)
    assert [o.value for o in outcomes] == list(range(50)) and {o.worker for o in outcomes} == {"healthy"}
    assert 1 <= sum(o.attempts == 2 for o in outcomes) <= 4, "what was in flight, and nothing else"


def test_a_worker_that_cannot_work_is_not_fed(caplog: pytest.LogCaptureFixture) -> None:
    with executing() as executor, caplog.at_level(logging.WARNING):
        bad = [executor.add(f"bad {i}", other_version, done) for i in range(3)]
        executor.add("good", up, done)
        assert all(o.ok and o.worker == "good" for o in outcomes_of(executor, 200))
        assert all(c.starts == 1 for c in bad) and executor.workers("compile") == 1
    assert caplog.text.count("is another svod") <= 1, "said once"


@pytest.mark.parametrize("fault", ["start", "run"])
def test_without_any_worker_waiting_items_end_and_the_next_call_says_why(fault: str) -> None:
    def breaks(carrier: Scripted, item: int) -> Outcome:
        raise TuneError("its server does not start")
    with executing() as executor:
        executor.add("one", never_up if fault == "run" else other_version, done)
        if fault == "run":
            executor._fleet.carriers.clear()
            executor.add("two", up, breaks)
        try:
            outcomes = outcomes_of(executor, 9)
        except TuneError:
            assert fault == "start"         # it was set aside before
        else:
            assert {(o.status, o.kind) for o in outcomes} == {("lost", "no worker")}
        with pytest.raises(TuneError, match=r"no worker is left that can compile: .*(another svod|does not start)"):
            executor.submit("m:job", [1], kind="compile", deadline=1.0)


def test_a_worker_that_comes_up_later_works() -> None:
    with executing() as executor:
        executor.add("bad", other_version, done)
        while not executor._fleet.aside:
            time.sleep(0.01)
        executor.add("good", up, done)
        assert all(o.ok for o in outcomes_of(executor, 5))


def test_how_long_no_worker_has_been_up_is_known() -> None:
    with executing() as executor:
        executor.add("waiting", never_up, done)
        time.sleep(0.05)
        assert executor.without_worker("compile") >= 0.05
        executor.add("good", up, done)
        outcomes_of(executor, 1)
        assert executor.without_worker("compile") == 0.0


def test_what_each_worker_does_is_told() -> None:
    go, lost = threading.Event(), threading.Event()

    def work(carrier: Scripted, item: int) -> Outcome:
        if lost.is_set():
            raise WorkerLost("its node is gone")
        go.wait(NEVER)
        return done(carrier, item)

    def start(carrier: Scripted) -> None:
        if lost.is_set():
            never_up(carrier)

    def states() -> dict[str, tuple[str, str, int]]:
        return {a.name: (a.state, a.job, a.items) for a in executor.activity()}

    def wait_for(expected: tuple[str, str, int]) -> None:
        assert wait_until(lambda: states()["good"] == expected), f"{states()}"
    with executing() as executor:
        executor.add("waiting", never_up, done, host="alpha")
        executor.add("bad", other_version, done)
        executor.add("good", start, work, kind="bench")
        wait_for(("idle", "", 0))
        assert states()["waiting"] == ("starting", "", 0)
        assert states()["bad"] == ("set aside", "the worker on far is another svod", 0)
        assert {a.name: (a.kind, a.host) for a in executor.activity()}["waiting"] == ("compile", "alpha")
        batch = executor.submit("m:job", [1], kind="bench", deadline=1.0)
        wait_for(("busy", "job", 1))
        time.sleep(0.05)
        assert next(a.seconds for a in executor.activity() if a.name == "good") >= 0.05
        go.set()
        assert next(batch)[1].ok
        wait_for(("idle", "", 0))
        lost.set()
        executor.submit("m:job", [1], kind="bench", deadline=1.0)
        wait_for(("starting", "", 0))


@pytest.mark.parametrize("cores", [2, 64])
def test_compilers_pause_on_the_machine_that_times_where_it_has_few_cores(cores: int) -> None:
    running: Counter[str] = Counter()
    together: Counter[tuple[str, str]] = Counter()
    lock, away, timed = threading.Lock(), threading.Event(), threading.Event()
    may_run = ("there", *["here"] * (cores == 64))      # compile workers that may run while the bench worker times

    def work(carrier: Scripted, item: int) -> Outcome:
        with lock:
            running[carrier.name] += 1
            for other in (n for n, r in running.items() if r and n != carrier.name):
                together[min(other, carrier.name), max(other, carrier.name)] += 1
        if carrier.name == "there":
            away.set()
        if carrier.kind == "bench":         # the first item is timed until all these compile, and they compile until it is timed
            wait_until(lambda: timed.is_set() or all(running[n] for n in may_run))
            timed.set()
        elif carrier.name in may_run:
            timed.wait(NEVER)
        time.sleep(0.01)
        with lock:
            running[carrier.name] -= 1
        return done(carrier, item)
    with executing() as executor:
        executor.add("bench", up, work, kind="bench", host="small", cores=cores)
        executor.add("here", lambda carrier: away.wait(NEVER), work, host="small", cores=cores)     # it leaves items for the other
        executor.add("there", up, work, host="large")
        compiling = executor.submit("m:job", list(range(60)), kind="compile", deadline=1.0)
        for _ in range(10):
            assert all(o.ok for o in outcomes_of(executor, 2, "bench"))
        assert all(o.ok for _, o in compiling)
    assert together["bench", "there"] > 0, "a machine that times nothing goes on compiling"
    assert (together["bench", "here"] > 0) == (cores == 64)


OTHER = replace(TARGET, cpu="other")


def test_a_target_is_timed_where_it_is_present() -> None:
    with executing() as executor:
        executor.add("one", up, done, kind="bench", host="a", target=TARGET)
        executor.add("two", up, done, kind="bench", host="b", target=OTHER)
        executor.add("compiler", up, done)
        assert {o.worker for o in outcomes_of(executor, 20, "bench", target=OTHER)} == {"two"}
        assert {o.worker for o in outcomes_of(executor, 20, "bench", target=TARGET)} == {"one"}
        assert {o.worker for o in outcomes_of(executor, 20, "compile", target=replace(TARGET, cpu="nobody's"))} == {"compiler"}
        with pytest.raises(TuneError, match=r"no worker is left that can bench for .*nobody.*: those that are left time .*other.*znver4"):
            executor.submit("m:job", [1], kind="bench", deadline=1.0, target=replace(TARGET, cpu="nobody's"))


def test_a_kernel_stays_on_the_machine_that_timed_it_first() -> None:
    """All batches of a kernel run on the machine of the first one, until that is gone; then a whole batch moves to another machine."""
    lost = threading.Event()

    def start(carrier: Scripted) -> None:
        if lost.is_set():
            never_up(carrier)

    def dies(carrier: Scripted, item: int) -> Outcome:
        if lost.is_set():
            raise WorkerLost("its node is gone")
        return done(carrier, item)
    with executing() as executor:
        executor.add("one", start, dies, kind="bench", host="a", target=TARGET)
        two = executor.add("two", start, dies, kind="bench", host="b", target=TARGET)
        executor.add("three", up, done, kind="bench", host="c", target=TARGET)
        [first] = {o.worker for o in outcomes_of(executor, 20, "bench", target=TARGET, homes=["two"] * 20)}
        assert first == "two"
        assert len({o.worker for o in outcomes_of(executor, 50, "bench", target=TARGET)}) == 1
        assert two.starts == 1, "a worker that is up is not started between its items"
        lost.set()
        assert {o.worker for o in outcomes_of(executor, 20, "bench", target=TARGET, homes=["two"] * 20)} == {"three"}


def test_a_closed_executor_has_no_workers() -> None:
    with executing() as executor:
        executor.add("compiler", up, done)
        executor.add("timer", up, done, kind="bench", target=TARGET)
        outcomes_of(executor, 4)
        outcomes_of(executor, 4, "bench", target=TARGET)
        assert executor.workers("compile") == executor.workers("bench") == 1 and len(executor.activity()) == 2
        before = time.monotonic()
    assert executor.workers("compile") == executor.workers("bench") == 0 and not executor.activity()
    assert 0.0 < executor.without_worker("compile") <= time.monotonic() - before
    assert 0.0 < executor.without_worker("bench") <= time.monotonic() - before


def test_a_machine_that_turns_out_to_have_another_target_ends_the_wait_for_it() -> None:
    told = threading.Event()

    def start(carrier: Scripted) -> None:
        told.wait(NEVER)
        carrier.target = OTHER
    with executing() as executor:
        executor.add("one", start, done, kind="bench", host="a")
        batch = executor.submit("m:job", [1], kind="bench", deadline=1.0, target=TARGET)
        assert batch.poll(0.1) is None
        told.set()
        answer = batch.poll(NEVER)
        assert answer is not None and answer[1].kind == "no worker" and OTHER.key in answer[1].message


def test_an_item_on_a_frozen_worker_is_started_elsewhere_too_and_the_first_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svod.tune.workers.items.OVERDUE", -0.9)     # items are overdue 0.1 s after their start
    monkeypatch.setattr("svod.tune.workers.dispatching.OVERDUE_POLL", 0.02)
    thawed, seen = threading.Event(), Counter[int]()

    def freezes(carrier: Scripted, item: int) -> Outcome:
        thawed.wait(NEVER)
        return Outcome("timeout", kind="deadline")

    def works(carrier: Scripted, item: int) -> Outcome:
        seen[item] += 1
        return done(carrier, item)
    with executing() as executor:
        frozen = executor.add("frozen", up, freezes)
        frozen.chunk = 1
        while "frozen" not in executor._fleet.up:
            time.sleep(0.01)
        batch = executor.submit("m:job", [0], kind="compile", deadline=1.0)
        while not executor._items.held:
            time.sleep(0.01)
        executor.add("healthy", up, works)
        answer = batch.poll(NEVER)
        assert answer is not None and answer[1].ok and answer[1].worker == "healthy" and answer[1].attempts == 2
        assert all(o.worker == "healthy" for o in outcomes_of(executor, 5)) and seen[0] == 2, "item 0 of two batches"
        thawed.set()
        assert batch.finished and batch.poll(0.1) is None
        while executor._items.held:
            time.sleep(0.01)
        assert batch._outcomes.empty(), "the late answer is dropped"


def test_a_copy_that_is_lost_too_leaves_the_item_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svod.tune.workers.items.OVERDUE", -0.5)
    monkeypatch.setattr("svod.tune.workers.dispatching.OVERDUE_POLL", 0.02)
    release = threading.Event()
    tries = Counter[str]()

    def first_loses(carrier: Scripted, item: int) -> Outcome:
        tries[carrier.name] += 1
        if tries.total() == 1:
            release.wait(NEVER)
            raise WorkerLost("its node is gone")
        release.set()
        time.sleep(0.05)
        return done(carrier, item)
    with executing() as executor:
        executor.add("one", up, first_loses)
        executor.add("two", up, first_loses)
        [outcome] = outcomes_of(executor, 1)
        assert outcome.ok and tries.total() == 2, "the loss of the first costs no third try while the second has the item"


def test_what_nobody_will_answer_is_abandoned_at_once() -> None:
    """All carriers are abandoned, as when the head of a cluster is gone: items end, the next call says why, and `close` does not wait for
    threads that hang."""
    hanging, waited_for = threading.Event(), threading.Event()

    def hangs(carrier: Scripted, item: int) -> Outcome:
        if not hanging.wait(NEVER):
            waited_for.set()
        return done(carrier, item)
    executor = ScriptedExecutor()
    kinds: tuple[Kind, ...] = ("compile", "bench")
    for kind in kinds:
        executor.add(f"{kind} 0", up, hangs, kind=kind)
    batches = [executor.submit("m:job", [1, 2, 3], kind=kind, deadline=1.0) for kind in kinds]
    while len(executor._items.held) < 2:
        time.sleep(0.01)
    executor._abandon("the head is gone")
    for batch in batches:
        assert [(o.status, o.kind, o.message) for _, o in batch] == [("lost", "no worker", "the head is gone")] * 3
    with pytest.raises(TuneError, match="no worker is left that can bench: the head is gone"):
        executor.submit("m:job", [1], kind="bench", deadline=1.0)
    executor.close()
    assert not waited_for.is_set()
    hanging.set()
