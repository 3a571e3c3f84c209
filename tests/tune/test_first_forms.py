"""First forms: which kernels have them, that they and the own forms compute right, and the exchange, taken step by step."""
from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.plan import compiler as compiler_module
from svod.compile.plan.running import background as background_module
from svod.compile.plan.running.exchange import Exchange
from svod.config import PrepareConfig
from svod.core.cost.sketch import quick_choice
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.errors import CompileError
from svod.tune import first_forms
from svod.tune.first_forms import LEAST_KERNELS, FirstForms, has_first_forms
from svod.tune.resolved import resolve
from tests.locks import held_elsewhere
from tests.patience import NEVER

# Widths of the layers, among them 1, primes, and numbers that no vector divides.
SIZES = (17, 31, 64, 1, 13, 40, 97, 8, 23, 50, 3)
LAYERS_KERNELS = 8      # least number of distinct kernels of `Layers`
Array = np.ndarray[Any, Any]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """The exchanges that the background thread would work on, which no thread does here."""
    found: list[Exchange] = []
    monkeypatch.setattr(background_module._background, "enqueue", found.append)
    return found


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A compiler that knows no kernel yet, and first forms for the kernels of `Layers`."""
    monkeypatch.setattr(first_forms, "LEAST_KERNELS", LAYERS_KERNELS)
    monkeypatch.setenv("SVOD_FIRST_FORMS", "1")
    objects = tmp_path / "objects"
    objects.mkdir()     # a directory that is missing is warned of
    monkeypatch.setenv("SVOD_OBJECT_CACHE", str(objects))
    monkeypatch.setattr(compiler_module, "_compilers", {})
    yield
    for left in list(background_module._registered):
        background_module._registered.discard(left)


class Layers:
    """Layers of the widths SIZES: products with weights, a bias and a maximum with zero; a kernel each."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.weights = [rng.standard_normal((a, b)).astype(np.float32) / np.float32(a) ** 0.5 for a, b in pairwise(SIZES)]
        self.biases = [rng.standard_normal(b).astype(np.float32) for b in SIZES[1:]]
        self.tensors = [Tensor(w) for w in self.weights]

    def __call__(self, x: Tensor) -> Tensor:
        for w, b in zip(self.tensors, self.biases, strict=True):
            x = (x @ w + Tensor(b)).relu()
        return x

    def expected(self, x: Array) -> Array:
        y = x.astype(np.float64)
        for w, b in zip(self.weights, self.biases, strict=True):
            y = np.maximum(y @ w + b, 0)
        return y

    def check(self, f: Callable[[Array], Tensor], rows: int = 5) -> None:
        x = np.random.default_rng(rows).standard_normal((rows, SIZES[0])).astype(np.float32)
        np.testing.assert_allclose(f(x).numpy(), self.expected(x), rtol=1e-4, atol=1e-4)


def sources(f: Any) -> set[str]:
    return {k.opts_source for plan in f.plans for k in plan.every}


def test_results_are_right_before_between_and_after_the_steps(by_hand: list[Exchange]) -> None:
    layers = Layers()
    f = svod.jit(layers)
    layers.check(f)
    assert len(by_hand) == 1 and sources(f) == {"first"}
    chains = [k.opts for k in f.plans[0].kernels]
    steps = 0
    while by_hand[0].step():
        steps += 1
        assert sources(f) == {"first"}, "all kernels change at once, in the last step"
        layers.check(f)
    assert steps == len({k.key for k in f.plans[0].kernels}) + 1
    assert sources(f) == {"heuristic"} and f.plans[0].finish is None
    assert chains != [k.opts for k in f.plans[0].kernels], "some kernels had a relative's chain"
    for rows in (5, 1, 7):
        layers.check(f, rows)


@pytest.mark.parametrize(("kernels", "source"), [(LEAST_KERNELS - 1, "heuristic"), (LEAST_KERNELS, "first")])
def test_plans_of_few_kernels_have_no_first_forms(kernels: int, source: str, by_hand: list[Exchange],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_forms, "LEAST_KERNELS", LEAST_KERNELS)
    given = [np.full(n, n, np.float32) for n in range(1, kernels + 1)]
    f = svod.jit(lambda *rows: [row + 1 for row in rows])
    for n, got in enumerate(f(*given), 1):
        np.testing.assert_array_equal(got.numpy(), np.full(n, n + 1, np.float32))
    assert len({k.key for k in f.plans[0].kernels}) == kernels
    assert sources(f) == {source} and len(by_hand) == (source == "first")


def test_plans_of_many_constants_have_first_forms(by_hand: list[Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_forms, "LEAST_KERNELS", LEAST_KERNELS)
    layers = Layers()
    constants = sum(a.nbytes for a in (*layers.weights, *layers.biases))
    for least, expected in ((constants + 1, {"heuristic"}), (constants, {"first"})):
        monkeypatch.setattr(first_forms, "LEAST_CONSTANT_BYTES", least)
        monkeypatch.setattr(compiler_module, "_compilers", {})
        f = svod.jit(layers, config=PrepareConfig(object_cache=":none:"))
        layers.check(f)
        assert sources(f) == expected


def test_own_forms_are_those_of_a_plan_without_first_forms(by_hand: list[Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    f = svod.jit(Layers())
    x = np.ones((3, SIZES[0]), np.float32)
    f(x)
    svod.complete()
    monkeypatch.setattr(compiler_module, "_compilers", {})
    g = svod.jit(Layers(), config=PrepareConfig(first_forms=False, object_cache=":none:"))
    np.testing.assert_array_equal(f(x).numpy(), g(x).numpy())
    assert [(k.opts, k.opts_source, k.why) for k in f.plans[0].kernels] == [(k.opts, k.opts_source, k.why) for k in g.plans[0].kernels]


def test_kept_objects_need_no_first_form(by_hand: list[Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process, which here is another compiler over the same object cache."""
    f, layers = svod.jit(Layers()), Layers()
    layers.check(f)
    for _ in range(LAYERS_KERNELS // 2):
        by_hand[0].step()
    monkeypatch.setattr(compiler_module, "_compilers", {})
    compiled = []
    pair = svod.compile.cpu.backend.Llvm
    compile_source = pair.compile
    monkeypatch.setattr(pair, "compile", lambda *args, **more: compiled.append(1) or compile_source(*args, **more))
    g = svod.jit(layers)
    layers.check(g)
    assert sources(g) == {"first", "heuristic"} and not compiled, "first forms are kept, too"
    svod.complete()
    assert compiled and sources(g) == {"heuristic"}
    monkeypatch.setattr(compiler_module, "_compilers", {})
    compiled.clear()
    h = svod.jit(layers)
    layers.check(h)
    assert sources(h) == {"heuristic"} and not compiled and h.plans[0].finish is None


def test_a_kernel_whose_own_form_cannot_be_compiled_keeps_its_first_form(by_hand: list[Exchange], monkeypatch: pytest.MonkeyPatch,
                                                                         caplog: pytest.LogCaptureFixture) -> None:
    layers = Layers()
    f = svod.jit(layers)
    layers.check(f)
    keys = [k.key for k in f.plans[0].kernels]
    compile_kernel = compiler_module.Compiler.compile

    def failing(self: Any, kernel: Kernel, choice: compiler_module.Choice) -> compiler_module.Compiled:
        if kernel.key in keys[2:4]:
            raise CompileError("the disk is full")
        return compile_kernel(self, kernel, choice)
    monkeypatch.setattr(compiler_module.Compiler, "compile", failing)
    with caplog.at_level(logging.WARNING, "svod"):
        svod.complete()
        layers.check(f)
    assert [k.opts_source for k in f.plans[0].kernels] == ["first" if k in keys[2:4] else "heuristic" for k in keys]
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and "2 kernels" in said[0] and "the disk is full" in said[0]


def test_a_first_form_that_cannot_be_compiled_is_replaced_by_the_own_one(by_hand: list[Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = svod.compile.cpu.backend.Llvm
    compile_source = pair.compile

    def failing(self: Any, source: str, target: Any, optimize: bool = True) -> bytes:
        if not optimize:
            raise CompileError("no")
        return compile_source(self, source, target, optimize)
    monkeypatch.setattr(pair, "compile", failing)
    layers = Layers()
    f = svod.jit(layers)
    layers.check(f)
    assert sources(f) == {"heuristic"} and not by_hand


def test_a_chain_that_makes_much_more_code_than_the_relative_is_not_used(by_hand: list[Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_forms, "MOST_CODE", 0.0)
    f, layers = svod.jit(Layers()), Layers()
    layers.check(f)
    for k in f.plans[0].kernels:
        assert k.form is not None
        assert k.form.chain == quick_choice(Scheduler(k.form.kernel, k.form.target)).applied_opts
        assert k.packing is None, "packing constants would take longer than the first run gains"
    svod.complete()
    layers.check(f)


def test_what_times_kernels_runs_own_forms(by_hand: list[Exchange]) -> None:
    for time in (lambda plan: plan.repeat(2), lambda plan: plan.profile(1), lambda plan: plan.repeat_timed(1),
                 lambda plan: plan.repeat_kernel(0, 1), lambda plan: plan.replicate(1), lambda plan: svod.profile(plan, seconds=0.0)):
        compiler_module._compilers.clear()
        f = svod.jit(Layers(), config=PrepareConfig(object_cache=":none:"))
        f(np.ones((2, SIZES[0]), np.float32))
        assert sources(f) == {"first"}
        plan = f.plans[0]
        plan.bind_array(next(i for i, b in enumerate(plan.buffers) if b.kind == "input"), np.ones(2 * SIZES[0], np.float32))
        plan.bind_array(next(i for i, b in enumerate(plan.buffers) if b.kind == "output"), np.empty(2 * SIZES[-1], np.float32))
        time(plan)
        assert sources(f) == {"heuristic"}


@pytest.mark.parametrize("given", [{"first_forms": False}, {"debug": 2}, {"profile": 1}, {"trace": "t.json"}, {"dump_after": "linear"},
                                   {"beam": svod.BeamConfig(width=1)}, {"capture": "c"}])
def test_a_plan_that_is_searched_or_observed_has_none(given: dict[str, Any]) -> None:
    assert has_first_forms(PrepareConfig()) and not has_first_forms(replace(PrepareConfig(), **given))


def test_chains_that_are_given_have_none(by_hand: list[Exchange]) -> None:
    layers = Layers()
    f = svod.jit(layers, config=PrepareConfig(optimizer=svod.OptimizerConfig(noopt=True)))
    layers.check(f)
    assert sources(f) == {"none"} and not by_hand


def test_variables_keep_their_values(by_hand: list[Exchange]) -> None:
    layers = Layers()
    n = svod.Variable("n", 1, 30)
    x = np.random.default_rng(2).standard_normal((30, SIZES[0])).astype(np.float32)
    y = layers(Tensor(x)[:n.bind(7)])
    plan = y.prepare(PrepareConfig(first_forms=True))
    for rows in (7, 1, 13):
        plan.execute(n=rows)
        np.testing.assert_allclose(plan.outputs[0].reshape(30, -1)[:rows], layers.expected(x[:rows]), rtol=1e-4, atol=1e-4)
    assert {k.opts_source for k in plan.kernels} == {"first"}
    plan.complete()
    assert {k.opts_source for k in plan.kernels} == {"heuristic"} and plan.variable_values() == {"n": 13}
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(30, -1)[:13], layers.expected(x[:13]), rtol=1e-4, atol=1e-4)
    plan.execute(n=30)
    np.testing.assert_allclose(plan.outputs[0].reshape(30, -1), layers.expected(x), rtol=1e-4, atol=1e-4)


def test_within_a_function_that_the_plan_calls_the_exchange_follows_the_run(by_hand: list[Exchange]) -> None:
    layers, seen = Layers(), list[set[str]]()

    def doubled(given: Array) -> Array:
        svod.complete()
        seen.append(sources(f))
        return 2 * given

    def model(x: Tensor) -> Tensor:
        return svod.custom_function(doubled, layers(x), shape=(4, SIZES[-1]), dtype="float32") + 1
    f = svod.jit(model)
    x = np.random.default_rng(3).standard_normal((4, SIZES[0])).astype(np.float32)
    for _ in range(3):
        np.testing.assert_allclose(f(x).numpy(), 2 * layers.expected(x) + 1, rtol=1e-4, atol=1e-4)
        for waiting in by_hand:
            waiting.finish()
    assert len(seen) == 3 and "first" in seen[0] and "first" not in sources(f)


def test_threads_that_run_the_plan_meanwhile_get_right_results() -> None:
    layers = Layers()
    f, done, wrong = svod.jit(layers), threading.Event(), list[BaseException]()
    layers.check(f)

    def run(rows: int) -> None:
        while not done.is_set():
            try:
                layers.check(f, rows)
            except BaseException as e:
                wrong.append(e)
                return
    threads = [threading.Thread(target=run, args=(5,)) for _ in range(3)]
    for t in threads:
        t.start()
    svod.complete()
    done.set()
    for t in threads:
        t.join()
    assert not wrong and sources(f) == {"heuristic"}


def test_own_forms_of_a_plan_that_is_dropped_serve_the_next_one(by_hand: list[Exchange]) -> None:
    layers = Layers()
    f = svod.jit(layers)
    layers.check(f)
    del f
    gc.collect()
    while by_hand[0].step():
        pass
    assert by_hand[0].plan is None
    f = svod.jit(layers)
    layers.check(f)
    assert sources(f) == {"heuristic"}


def wait_for(background: background_module._Background) -> None:
    if (thread := background._thread) is not None:
        thread.join(NEVER)


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_threads_the_first_call_answers_and_a_later_plan_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    background = background_module._Background()
    monkeypatch.setattr(background_module, "_background", background)
    layers = Layers()
    f = svod.jit(layers)
    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", no_thread)
        layers.check(f)
    assert sources(f) == {"first"}
    other = svod.jit(Layers())
    other(np.ones((2, SIZES[0]), np.float32))
    wait_for(background)
    layers.check(f)
    assert sources(f) == {"heuristic"}


def test_an_exchange_that_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    background, layers = background_module._Background(), Layers()
    monkeypatch.setattr(background_module, "_background", background)
    f = svod.jit(layers)

    class Failing:
        def step(self) -> bool:
            raise MemoryError("no memory")
    background._queue.append(Failing())         # type: ignore[arg-type]
    layers.check(f)
    wait_for(background)
    assert "no memory" in caplog.text and sources(f) == {"heuristic"}


def test_threads_that_have_a_plan_each_do_not_wait_for_each_other(by_hand: list[Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "LOCK_SECONDS", 0.05)
    functions = [svod.jit(Layers()) for _ in range(2)]
    for f in functions:
        f(np.ones((2, SIZES[0]), np.float32))
    both = threading.Barrier(2, timeout=NEVER)

    def complete(waiting: Exchange) -> None:
        with waiting.plan.lock:         # type: ignore[union-attr]
            both.wait()
            svod.complete()
            both.wait()
    threads = [threading.Thread(target=complete, args=(waiting,)) for waiting in by_hand[:2]]
    for t in threads:
        t.start()
    for t in threads:
        t.join(NEVER)
    assert not any(t.is_alive() for t in threads)
    for waiting in list(by_hand):
        waiting.finish()
    assert all(sources(f) == {"heuristic"} for f in functions)


def test_a_kept_chain_whose_code_is_wrong_is_not_used(by_hand: list[Exchange]) -> None:
    layers = Layers()
    f = svod.jit(layers)
    layers.check(f)
    plan = by_hand[0].plan
    assert plan is not None
    kernel = next(k.form.kernel for k in plan.every if k.form is not None)
    resolved = resolve(PrepareConfig.of_environment())
    kept = resolved.compiler.first_chain(kernel)
    assert kept is not None and FirstForms(resolved)._kept_chain(kernel) == kept[0]
    revision = resolved.compiler.pair.revision
    for barred, chain in (({kept[1]: revision}, None), ({kept[1]: revision - 1}, kept[0]), ({"other": revision}, kept[0])):
        given = replace(resolved, db=SimpleNamespace(barred=lambda *names, barred=barred: barred))  # type: ignore[arg-type,misc]
        assert FirstForms(given)._kept_chain(kernel) == chain


PROGRAM = """
import sys
import numpy as np
from tests.tune.test_first_forms import LAYERS_KERNELS, Layers, sources
import svod
from svod.tune import first_forms
first_forms.LEAST_KERNELS = LAYERS_KERNELS
layers = Layers()
f = svod.jit(layers)
layers.check(f)
assert sources(f) == {"first"}
"""


def run_program(text: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM + text], capture_output=True, text=True, timeout=NEVER, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("end", ["", "sys.exit()", "import threading; threading.Thread(target=lambda: layers.check(f)).start()",
                                 "import os; os._exit(0)"])
def test_a_program_ends_while_own_forms_are_compiled(end: str) -> None:
    run_program(end)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_child_goes_on_after_its_next_run() -> None:
    """The parent forks while its background thread compiles; both come to run the own forms."""
    run_program("""
import os, time
def wait():
    while "first" in sources(f):
        layers.check(f)
        time.sleep(0.005)
    layers.check(f)
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            wait()
            code = 0
        finally:
            os._exit(code)
    children.append(pid)
wait()
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_fork_goes_on_where_a_step_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "FORK_SECONDS", 0.01)
    with held_elsewhere(background_module.step_lock):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if background_module.step_lock.acquire(blocking=False) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not background_module.step_lock.acquire(blocking=False), "the parent's is as it was"
