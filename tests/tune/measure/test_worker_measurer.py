"""Failed outcomes in the worker measurer: crashes, deadlines, lost workers, another machine."""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from svod.config import BeamConfig, BenchConfig
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.measure.context import KernelContext, Setup
from svod.tune.measure.measurer import Built, Confirmed, Failure, Lowered, MachineChanged, Verification
from svod.tune.measure.work import lower_candidate
from svod.tune.measure.worker_measurer import WorkerMeasurer
from svod.tune.workers.executor import Activity, Batch, Executor, InlineExecutor
from svod.tune.workers.jobs import Outcome, decode, machine_name
from tests.tune.search_kernels import TARGET, gemm

KERNEL = gemm(48, 64, 40)
Answer = Callable[[str, Any, float], Outcome]


class Told(Executor):
    """An executor that answers each item by calling a function with the job's name, the item and the deadline."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any, float]] = []

    def submit(self, job: str, items: Any, *, kind: Any, deadline: float, setup: Any = None, cpus: Sequence[int] = (),
               homes: Sequence[str] = (), target: Target | None = None) -> Batch:
        batch = Batch(job, [], kind, deadline, setup, cpus)
        self.add(batch, items)
        return batch

    def add(self, batch: Batch, items: Any, homes: Sequence[str] = ()) -> range:
        new = batch.extend(items, homes)
        for i in new:
            self.asked.append((batch.job.partition(":")[2], decode(batch.payloads[i]), batch.deadline))
            batch.deliver(i, self.answer(*self.asked[-1]))
        return new

    def workers(self, kind: Any) -> int:
        return 1

    def wait_until_ready(self, seconds: float = math.inf) -> None: ...

    def activity(self) -> list[Activity]:
        return []

    def close(self) -> None: ...


def measurer(answer: Answer) -> tuple[WorkerMeasurer, Told]:
    executor = Told(answer)
    return WorkerMeasurer(KERNEL, TARGET, executor, BeamConfig(), BenchConfig(seconds=0.1)), executor


def candidate(linear: str, seconds: float = 1e-3) -> Candidate:
    c = Candidate(Scheduler(KERNEL, TARGET), (), Origin.SKETCH, linear=linear, seconds=seconds)
    c.built = Built(linear.encode(), (), None, linear, 0.01, False)
    return c


@pytest.mark.parametrize("status", ["crash", "timeout", "lost"])
def test_a_verification_without_a_comparison_is_tried_once_more_and_is_never_wrong(status: Any) -> None:
    outcomes = [Outcome(status, kind="SIGKILL"), Outcome("ok", Verification(True, "every element"))]
    m, executor = measurer(lambda job, item, deadline: outcomes.pop(0))
    [verdict] = m.verify([candidate("aa")])
    assert verdict.right is True and [deadline for _, _, deadline in executor.asked] == [pytest.approx(60.1), pytest.approx(120.2)]
    m, executor = measurer(lambda job, item, deadline: Outcome(status, kind="SIGKILL"))
    [verdict] = m.verify([candidate("aa")])
    assert verdict.right is None and verdict.status is Status(status) and len(executor.asked) == 2


def test_a_comparison_of_numbers_is_not_repeated() -> None:
    m, executor = measurer(lambda job, item, deadline: Outcome("ok", Verification(False, "every element", "row 3")))
    assert m.verify([candidate("aa")])[0].right is False and len(executor.asked) == 1


def test_a_long_kernel_has_the_time_that_it_needs_in_a_verification() -> None:
    m, executor = measurer(lambda job, item, deadline: Outcome("ok", Verification(True, "")))
    m.verify([candidate("aa", seconds=7.0)])
    assert executor.asked[0][1][3] == pytest.approx(75.0) and executor.asked[0][2] == pytest.approx(760.0)


def test_one_flaky_finalist_does_not_cost_the_others_their_confirmation() -> None:
    def answer(job: str, item: Any, deadline: float) -> Outcome:
        names = [b.digest for b in item[0]]
        if "bad" in names:
            return Outcome("crash", kind="SIGSEGV")
        return Outcome("ok", [Confirmed(1e-3, 1.0, 1.0, 1.0), *(Confirmed(5e-4, 0.49, 0.5, 0.51) for _ in names[1:])])
    m, executor = measurer(answer)
    answers = m.confirm([candidate(name) for name in ("heuristic", "aa", "bad", "bb")], 0.3)
    assert [isinstance(a, Confirmed) for a in answers] == [True, True, False, True]
    assert isinstance(answers[2], Failure) and answers[2].status is Status.CRASH
    assert len(executor.asked) == 4, "all, then each beside the first"
    answers = m.confirm([candidate("bad"), candidate("aa")], 0.3)
    assert all(isinstance(a, Failure) for a in answers), "without the heuristic's time there is no ratio"


def test_times_of_two_machines_are_not_compared() -> None:
    host = "alpha"
    m, _ = measurer(lambda job, item, deadline: Outcome("ok", Verification(True, ""), host=host))
    m.verify([candidate("aa")])
    m.verify([candidate("bb")])
    host = "beta"
    with pytest.raises(MachineChanged, match="timed on alpha, and now on beta"):
        m.verify([candidate("cc")])
    m.verify([candidate("cc")])         # does not raise: from now on times are those of the new machine


def test_a_machine_that_does_not_answer_has_no_facts() -> None:
    m, _ = measurer(lambda job, item, deadline: Outcome("lost"))
    assert m.machine() == {}


def test_what_is_not_answered_in_time_is_late_and_no_failure_of_a_worker() -> None:
    """Every answer that is missing at the end is LATE. If the end is moved to a later time, answers are waited for again."""
    end = 0.0
    executor = Told(lambda job, item, deadline: Outcome("ok", Verification(True, "")))
    m = WorkerMeasurer(KERNEL, TARGET, executor, BeamConfig(), BenchConfig(seconds=0.1), end=lambda: end)
    [verdict] = m.verify([candidate("aa")])
    assert verdict.right is None and verdict.status is Status.LATE and verdict.reason == "the budget was over before a worker answered"
    [built] = m.build([candidate("aa")], final=True, deadline=1.0)
    assert isinstance(built, Failure) and built.status is Status.LATE
    end = float("inf")
    assert m.verify([candidate("aa")])[0].right


def test_candidates_are_timed_for_their_target_by_the_worker_that_timed_before() -> None:
    asked: list[tuple[Any, Any]] = []

    class Noting(Told):
        def submit(self, job: str, items: Any, **more: Any) -> Batch:
            asked.append((tuple(more["homes"]), more["target"]))
            return super().submit(job, items, **more)
    m = WorkerMeasurer(KERNEL, TARGET, Noting(lambda job, item, deadline: Outcome("ok", {}, worker="bench 7")), BeamConfig())
    m.machine()
    m.machine()
    assert asked == [(("",), TARGET), (("bench 7",), TARGET)]


def test_a_worker_tells_what_it_is() -> None:
    with InlineExecutor() as executor:
        facts = WorkerMeasurer(KERNEL, TARGET, executor, BeamConfig()).machine()
    assert facts["machine"] == machine_name() and facts["cores"] >= 1 and 0.0 <= facts["steal"] <= 1.0 and facts["load"] >= 0.0
    assert facts["target"].count("/") == TARGET.key.count("/")


def test_candidates_are_lowered_while_more_are_proposed_and_answered_in_any_order() -> None:
    proposed: list[Candidate] = []

    def propose() -> Iterator[Candidate]:
        for n in (2, 4, 8, 16):
            state = apply_opt(Scheduler(KERNEL, TARGET), Opt("UPCAST", "o1", n))
            proposed.append(Candidate(state, state.applied_opts, Origin.WALK))
            yield proposed[-1]

    class Backwards(Told):
        """A batch that answers after every second item, the second item first."""
        def add(self, batch: Batch, items: Any, homes: Sequence[str] = ()) -> range:
            new = batch.extend(items, homes)
            if len(batch) % 2 == 0 and new:
                for i in (new[-1], new[-1] - 1):
                    batch.deliver(i, Outcome("ok", decode(batch.payloads[i]), worker=f"worker {i}"))
            return new
    m = WorkerMeasurer(KERNEL, TARGET, Backwards(lambda job, item, deadline: Outcome("lost")), BeamConfig())
    found = [(c, answer, len(proposed)) for c, answer in m.lower(propose(), 77)]
    assert [proposed.index(c) for c, _, _ in found] == [1, 0, 3, 2] and [known for _, _, known in found] == [2, 2, 4, 4]
    assert all(answer == ([o.to_json() for o in c.chain], 77) for c, answer, _ in found)
    assert [m.lowered_by[c.digest] for c in proposed] == [f"worker {i}" for i in range(4)]


def test_a_program_is_given_up_where_it_reaches_the_limit() -> None:
    def answer(limit: int) -> Lowered | Failure:
        return lower_candidate(([], limit), KernelContext(Setup(ast_to_data(KERNEL.ast), TARGET)))
    whole = answer(0)
    assert isinstance(whole, Lowered) and answer(whole.size + 1) == whole
    failure = answer(whole.size)
    assert isinstance(failure, Failure) and failure.status is Status.LIMIT and f"BEAM_UOPS_MAX is {whole.size}: " in failure.reason
    assert re.search(r"this phase has \d+ [A-Z]+, \d+ [A-Z]+.* so far", failure.reason), failure.reason


def test_a_compilation_that_was_expected_is_not_done_again() -> None:
    """Each candidate gets its own code, whether its compilation began early or not; early compilations that are unused at the next race
    are abandoned."""
    def answer(job: str, item: Any, deadline: float) -> Outcome:
        if job == "race_candidates":
            return Outcome("lost")
        return Outcome("ok", Built(str(item[0]).encode(), (), None, "", 0.01, item[1]), worker="one")
    m, executor = measurer(answer)
    base = Scheduler(KERNEL, TARGET)
    states = [apply_opt(base, Opt("UPCAST", "o1", n)) for n in (2, 4, 8)]
    one, two, three = (Candidate(s, s.applied_opts, Origin.ACTION, linear=name) for s, name in zip(states, ("aa", "bb", "cc"), strict=True))
    m.expect(two, 1.0)
    m.expect(three, 1.0)
    codes = [b.object for b in m.build([one, two], final=False, deadline=1.0) if isinstance(b, Built)]
    assert codes == [str([o.to_json() for o in c.chain]).encode() for c in (one, two)]
    assert [item[0] for _, item, _ in executor.asked] == [[o.to_json() for o in c.chain] for c in (two, three, one)]
    assert all(isinstance(b, Built) and b.final for b in m.build([three], final=True, deadline=1.0)), "final code is another compilation"
    unnamed = [Candidate(s, s.applied_opts, Origin.ACTION) for s in states]
    assert len({b.object for b in m.build(unnamed, final=True, deadline=1.0) if isinstance(b, Built)}) == 3
    begun = m.begun
    assert begun is not None and len(m.expected) == 1
    m.race([candidate("heuristic")])
    assert begun.cancelled and m.begun is None and not m.expected and not m.compiled
