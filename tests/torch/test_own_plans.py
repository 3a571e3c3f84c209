"""Own plans of sets of sizes beside a plan for all sizes: PyTorch's numbers, strides and memory before, during and after the turns."""
from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

import svod  # noqa: E402
import svod.torch  # noqa: E402
import tests.own_plans  # noqa: E402
from svod import Tensor  # noqa: E402
from svod.compile.plan.running import background  # noqa: E402
from svod.torch.functions import GraphFunction, functions  # noqa: E402
from svod.torch.varying import own  # noqa: E402
from svod.tracing.own_plans import _Preparation  # noqa: E402
from tests.own_plans import RUNS, decide  # noqa: E402
from tests.patience import NEVER  # noqa: E402
from tests.torch.test_sizes import MODELS, Block, strides_of  # noqa: E402


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[background.BackgroundWork]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return tests.own_plans.by_hand(monkeypatch)


def compiled(model: Any) -> tuple[Any, GraphFunction]:
    """(a compiled function whose sizes vary, its graph, once it was called)."""
    before, run = set(functions), torch.compile(model, backend="svod", dynamic=True)
    run(torch.randn(2, 3, 16))
    (function,) = set(functions) - before
    return run, function


def prepared(works: list[background.BackgroundWork]) -> list[background.BackgroundWork]:
    """The preparations of own plans."""
    return [work for work in works if isinstance(work, _Preparation)]


def check(run: Any, model: Any, *given: Any) -> Any:
    got, wanted = run(*given), model(*given)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert strides_of(got) == strides_of(wanted)
    return got


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("name", "n", "m"), [("causal", 3, 17), ("by hand", 2, 31), ("images", 5, 8), ("classifier", 7, 13)])
def test_results_are_pytorchs_before_while_and_after_runs_take_turns(name: str, n: int, m: int, kept: bool, monkeypatch: pytest.MonkeyPatch,
                                                                     by_hand: list[background.BackgroundWork]) -> None:
    decide(monkeypatch, kept)
    make, inputs = MODELS[name]
    model, before = make().eval(), set(functions)
    run = torch.compile(model, backend="svod", dynamic=True)
    check(run, model, *inputs(n, m))
    (function,) = set(functions) - before
    assert len(prepared(by_hand)) == 1
    svod.complete()
    common, one = function.plans
    assert common.sizes is not None and one.sizes is None
    for _ in range(RUNS):
        check(run, model, *inputs(n, m))
    assert function.plans == ([common, one] if kept else [common]) and one.runs == RUNS // 2
    for sizes in ((n, m), (n + 1, m), (n, m + 1), (n, m)):
        check(run, model, *inputs(*sizes))
    assert one.runs == RUNS // 2 + 2 * kept


def test_arguments_in_another_layout_do_not_run_in_an_own_plan(by_hand: list[background.BackgroundWork],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, True)
    model = Block(16, 2, False).eval()
    run, function = compiled(model)
    svod.complete()
    for _ in range(RUNS):
        check(run, model, torch.randn(2, 3, 16))
    _, one = function.plans
    ran = one.runs
    for x in (torch.randn(2, 16, 3).mT, torch.randn(2, 6, 16)[:, ::2], torch.randn(3, 2, 16).transpose(0, 1)):
        check(run, model, x)
    assert one.runs == ran
    check(run, model, torch.randn(2, 3, 16))
    assert one.runs == ran + 1


def test_results_have_memory_of_their_own(by_hand: list[background.BackgroundWork], monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, True)
    model = Block(16, 2, False).eval()
    run, _ = compiled(model)
    svod.complete()
    given = [torch.randn(2, 3, 16) for _ in range(RUNS + 5)]
    got = [run(x) for x in given]
    for x, y in zip(given, got, strict=True):
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
    assert len({y.data_ptr() for y in got}) == len(got)


def test_changed_weights_count(by_hand: list[background.BackgroundWork], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weights, all plans are made anew, and so are those of single sizes."""
    decide(monkeypatch, True)
    model = Block(16, 2, False).eval()
    run, function = compiled(model)
    for turns in (1, 2):
        svod.complete()
        for _ in range(RUNS):
            check(run, model, torch.randn(2, 3, 16))
        assert len(function.plans) == 2 and len(prepared(by_hand)) == turns
        with torch.no_grad():
            model.out.weight.mul_(-2)
        check(run, model, torch.randn(2, 3, 16))


def test_preparations_leave_the_assignments_of_other_threads_alone(by_hand: list[background.BackgroundWork],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """A pending assignment is computed once, by the thread that asks for it."""
    decide(monkeypatch, True)
    total = Tensor.zeros((5,)).contiguous().realize()
    _, function = compiled(Block(16, 2, False).eval())
    total.assign(total + 1)
    before = total.uop
    svod.complete()
    assert len(function.plans) == 2 and total.uop is before
    assert total.realize().numpy().tolist() == [1] * 5


class Counting(torch.nn.Module):
    """A module with state: it adds up what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x: Any) -> Any:
        self.total.add_(x.sum((0, 1)))
        return x * self.total


class Written(torch.nn.Module):
    """A module that writes its argument."""

    def forward(self, x: Any) -> Any:
        return x.mul_(2).sum(-1)


@pytest.mark.parametrize("module", [Counting, Written])
def test_graphs_that_write_have_no_own_plans(module: Any, by_hand: list[background.BackgroundWork]) -> None:
    model, other = module(), module()
    run, function = compiled(model)
    other(torch.zeros(2, 3, 16))
    model.load_state_dict(other.state_dict())
    for _ in range(5):
        x = torch.randn(2, 5, 16)
        y = x.clone()
        torch.testing.assert_close((run(x), x, model.state_dict()), (other(y), y, other.state_dict()))
    assert not prepared(by_hand) and all(p.own is None for p in function.plans)


def test_where_every_run_computes_the_same_bits_there_are_no_own_plans(by_hand: list[background.BackgroundWork],
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOD_FIRST_FORMS", "0")
    _, function = compiled(Block(16, 2, False).eval())
    assert [p.own for p in function.plans] == [None] and not prepared(by_hand)


def test_a_preparation_that_fails_is_said_once(by_hand: list[background.BackgroundWork], monkeypatch: pytest.MonkeyPatch,
                                               caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError("no memory")
    monkeypatch.setattr(own, "make_plan", fail)
    caplog.set_level(logging.INFO, "svod.torch")
    model = Block(16, 2, False).eval()
    run, function = compiled(model)
    svod.complete()
    for m in (3, 5, 7, 3):
        check(run, model, torch.randn(2, m, 16))
        svod.complete()
    assert len(prepared(by_hand)) == 1 and len(function.plans) == 1
    assert [m for m in caplog.messages if "no memory" in m] and len([m for m in caplog.messages if "plan of its own" in m]) == 1


def test_threads_that_call_meanwhile_get_right_results(by_hand: list[background.BackgroundWork], monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, True)
    model, wrong = Block(16, 2, True).eval(), list[BaseException]()
    run, function = compiled(model)

    def serve(m: int) -> None:
        try:
            for _ in range(RUNS):
                with torch.no_grad():
                    check(run, model, torch.randn(2, m, 16))
        except BaseException as e:
            wrong.append(e)
    threads = [threading.Thread(target=serve, args=(m,)) for m in (3, 3, 5)]
    for t in threads:
        t.start()
    svod.complete()
    for t in threads:
        t.join(NEVER)
    svod.complete()
    assert not wrong and 1 < len(function.plans) <= 3


PROGRAM = """
import os
import torch
from svod.tracing import own_plans
from tests.own_plans import RUNS
from tests.torch.test_sizes import Block
own_plans.LEAST_RUN_SECONDS, own_plans.PAYS_BACK, own_plans.LEAST_RUNS = 0.0, 0, 0
torch.set_grad_enabled(False)
torch.set_num_threads(1)        # a child of a process in which GNU OpenMP has threads waits for these
model = Block(16, 2, False).eval()
run = torch.compile(model, backend="svod", dynamic=True)
def check():
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
check()
"""
FORKS = """
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for _ in range(RUNS):
                check()
            code = 0
        finally:
            os._exit(code)
    children.append(pid)
for _ in range(RUNS):
    check()
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["", FORKS], ids=["ends", "forks"])
def test_a_program_ends_and_forks_while_an_own_plan_is_prepared(rest: str) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM + rest], capture_output=True, text=True, timeout=NEVER,
                          check=False, env={**os.environ, "SVOD_FIRST_FORMS": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
