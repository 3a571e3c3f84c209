"""Functions of Python as items of a plan: `svod.custom_function`."""
from __future__ import annotations

import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod import PrepareConfig, Tensor, Variable
from svod.compile.cpu.host import host_target
from svod.compile.plan.compiler import Choice, compile_all, compiler_for
from svod.compile.plan.memory_planner import PlannerMode
from svod.compile.plan.unbound_plan import build_plan, synthetic_arrays
from svod.config import BeamConfig
from svod.core.graph.buffer import buffer_of
from svod.core.graph.graph import sink
from svod.core.graph.storage import base_of
from svod.core.ir.serialize import ast_to_data
from svod.core.schedule.schedule import create_schedule
from svod.core.schedule.schedule_cache import normal_form
from svod.core.spec.evaluate import evaluate
from svod.errors import ArgumentError, DTypeError, FormatError, LaunchError, ScheduleError, ShapeError, UnsupportedError
from svod.prepare import make_unbound_plan, prepare_graph
from svod.tune import capture
from svod.tune.capture import read_capture
from svod.tune.resolved import resolve

Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng(7)
NONE = PrepareConfig(db=":none:", threads=2)


def values(*shape: int) -> Array:
    return RNG.integers(-9, 9, shape).astype(np.float64)


def twice(x: Array) -> Array:
    return x * 2


class Calls:
    """A function that records its arguments."""

    def __init__(self, of: Any = twice) -> None:
        self.of, self.given = of, []        # type: ignore[var-annotated]

    def __call__(self, *arrays: Array) -> Any:
        self.given.append(arrays)
        return self.of(*arrays)


# -- what is computed -------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", ["arena", "remap", "disabled"])
def test_functions_between_kernels(mode: PlannerMode) -> None:
    """Operands are computed values, views, constants and arrays in memory; some results are read by several kernels, one by none."""
    a, b = values(7, 5), values(5, 3)

    def mixed(product: Array, transposed: Array, number: Array, whole: Array) -> tuple[Array, Array, Array]:
        assert all(x.flags.c_contiguous and not x.flags.writeable for x in (product, transposed, number, whole))
        assert number.shape == () and whole.dtype == np.int32
        return np.sort(product, 0), transposed + number + whole[0], np.argsort(product, 0)
    x, y = Tensor(a), Tensor(b)
    whole = Tensor(np.arange(4, dtype=np.int32))
    first, second, third = svod.custom_function(mixed, x @ y, x.T[1:], Tensor(2.0, "float64"), whole + 1,
                                                shape=((7, 3), (4, 7), (7, 3)), dtype=["float64", float, "int64"])
    assert first.shape == (7, 3) and second.dtype.name == "float64" and not first.is_realized
    out = (first - 1).sum(1) + first.max() + (second * 2)[0]
    again = svod.custom_function(twice, out, shape=(7,), dtype="float64") + out
    plan = again.prepare(PrepareConfig(db=":none:", threads=2, memory_planner=mode))
    for _ in range(2):
        plan.execute()
        product = np.sort(a @ b, 0)
        wanted = 3 * ((product - 1).sum(1) + product.max() + ((a.T[1:] + 2 + 1) * 2)[0])
        np.testing.assert_allclose(plan.output_buffer(), wanted)
        a += 1              # a plan reads the values that its inputs have when it runs
    assert [k.opts_source for k in plan.kernels].count("host callback") == 2 and not third.is_realized


def test_one_call_for_all_results_and_for_equal_calls() -> None:
    qr = Calls(lambda m: tuple(np.linalg.qr(m)))
    a = values(6, 4)
    x = Tensor(a) + 0

    def made() -> Any:
        return svod.custom_function(qr, x, shape=((6, 4), (4, 4)), dtype=("float64", "float64"))
    (q, r), (q2, r2) = made(), made()
    np.testing.assert_allclose(q.numpy() @ r.numpy(), a, atol=1e-12)
    assert len(qr.given) == 1 and r.is_realized and r2.is_realized and q2.numpy() is not None and len(qr.given) == 1
    one, = svod.custom_function(lambda m: [m.sum(0)], Tensor(a), shape=((4,),), dtype=("float64",))
    np.testing.assert_allclose(one.numpy(), a.sum(0))


def test_arrays_without_elements_and_without_axes() -> None:
    calls = Calls(lambda nothing, number: (np.float64(nothing.size + 1) * number, np.empty((2, 0), np.float32)))
    number, empty = svod.custom_function(calls, Tensor(np.empty((0, 3))), Tensor(np.float64(4)), shape=((), (2, 0)),
                                         dtype=("float64", "float32"))
    assert empty.numpy().shape == (2, 0) and not calls.given, "nothing to compute"
    assert (number + 1).numpy() == 5 and calls.given[0][0].shape == (0, 3)
    assert svod.custom_function(lambda: np.arange(3), shape=(3,), dtype="int64").sum().numpy() == 3
    flags = svod.custom_function(lambda x: x > 1, Tensor(np.float32([0, 2])), shape=(2,), dtype=bool)
    assert svod.where(flags, Tensor(1), Tensor(5)).numpy().tolist() == [5, 1]


def test_arrays_are_the_memory_of_the_plan() -> None:
    """Operands are not copied; arrays kept from a run stay readable after the plan is gone."""
    a = values(8, 3)
    keep = Calls()
    x = Tensor(a)
    y = svod.custom_function(keep, x, shape=(8, 3), dtype="float64")
    z = svod.custom_function(keep, x * 3, shape=(8, 3), dtype="float64")
    plan = (y + z).prepare(NONE)
    plan.execute()
    operand, computed = (given for given, in keep.given)
    assert np.shares_memory(operand, a) or operand.ctypes.data == buffer_of(base_of(x.uop)).address
    with pytest.raises(ValueError, match="read-only"):
        operand[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        operand.flags.writeable = True
    found = computed.copy()
    plan.release_intermediate_buffers()
    del plan, x, y, z
    gc.collect()
    np.testing.assert_array_equal(computed, found)


def test_variables() -> None:
    """Arrays have the extents of the run, outer and inner ones, within buffers as large as they get."""
    n, m = Variable("n", 1, 17, buckets=(4,)), Variable("m", 2, 11)
    a = values(17, 11)
    calls = Calls(lambda x, flat: (np.cumsum(x, 1), flat[::-1].copy()))

    def graph(x: Tensor, rows: Any, columns: Any) -> Any:
        parts = x[:rows, :columns]
        sums, back = svod.custom_function(calls, parts, (parts * 1).reshape(rows, 1, columns)[:, 0, 0], shape=((rows, columns), (rows,)),
                                          dtype=("float64", "float64"))
        return sums + back.reshape(rows, 1)
    plan = graph(Tensor(a), n, m).prepare(NONE)
    jitted = svod.jit(graph, config=NONE)
    for rows, columns in ((17, 11), (1, 2), (4, 7), (5, 11)):
        part = a[:rows, :columns]
        wanted = np.cumsum(part, 1) + part[::-1, :1]
        plan.execute(n=rows, m=columns)
        assert [x.shape for x in calls.given[-1]] == [(rows, columns), (rows,)]
        np.testing.assert_array_equal(plan.output_buffer().reshape(18, 11)[:rows, :columns], wanted)
        np.testing.assert_array_equal(graph(Tensor(a), n.bind(rows), m.bind(columns)).numpy(), wanted)
        np.testing.assert_array_equal(jitted(Tensor(a), n.bind(rows), m.bind(columns)).numpy(), wanted)
    assert len(jitted.plans) == 1


def test_assignments_are_ordered_around_calls() -> None:
    state = Tensor(values(4)).realize()
    before = state.numpy().copy()
    seen = Calls()
    y = svod.custom_function(seen, state, shape=(4,), dtype="float64")
    state.assign(state + y)                 # after the call has read it
    z = svod.custom_function(seen, state, shape=(4,), dtype="float64")
    np.testing.assert_array_equal(z.numpy(), before * 6)
    np.testing.assert_array_equal(state.numpy(), before * 3)
    np.testing.assert_array_equal(y.numpy(), before * 2)
    assert len(seen.given) == 2


# -- plans --------------------------------------------------------------------------------------------

def test_a_plan_is_native_calls_between_the_functions() -> None:
    a = values(4, 4)
    x = Tensor(a)
    y, z = x + 1, x * 2
    u = svod.custom_function(twice, y, shape=(4, 4), dtype="float64")
    v = svod.custom_function(np.negative, z, shape=(4, 4), dtype="float64")
    plan = Tensor.prepare_batch([(u @ v) + 1, y.sum()], NONE)
    assert [(s.launches.size > 0, [plan.every[i].name.rsplit("_", 1)[0] for i in s.items]) for s in plan.segments] == [
        (True, ["twice", "negative"]), (True, [])]
    plan.repeat(2)
    assert plan.runs == 2
    np.testing.assert_array_equal(plan.outputs[0].reshape(4, 4), (2 * (a + 1)) @ (a * -2) + 1)
    assert len((x + 3).prepare(NONE).segments) == 1


def test_jit_calls_in_every_run() -> None:
    """Functions of weights alone are called too; replicas call from their own threads."""
    calls = Calls(lambda w: w + len(calls.given))
    w = Tensor(np.zeros(3))
    f = svod.jit(lambda x: svod.custom_function(calls, w, shape=(3,), dtype="float64") * 2 + x, config=NONE)
    assert [f(np.full(3, float(i))).numpy()[0] for i in range(3)] == [2, 5, 8]
    threads = set()

    def noted(x: Array) -> Array:
        threads.add(threading.get_ident())
        return x + 1
    plan = (svod.custom_function(noted, Tensor(values(5)) + 1, shape=(5,), dtype="float64") * 2).prepare(NONE)
    plan.execute()
    plans = [plan.replicate(1) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda p: [p.execute() for _ in range(20)], plans))
    assert all((p.output_buffer() == plan.output_buffer()).all() for p in plans) and threading.get_ident() in threads


def test_the_interpreter_calls_them_too() -> None:
    config = PrepareConfig(db=":none:", device="CPU:interpreter", object_cache=":none:")
    y = (svod.custom_function(twice, Tensor(np.arange(4.0)) + 1, shape=(4,), dtype="float64") - 1)
    y.prepare(config).execute()
    assert y.numpy().tolist() == [1, 3, 5, 7]


def test_schedules_are_of_a_function_and_keep_it_not_alive() -> None:
    """A schedule is reused for the same function or method, and not for another function with the same code."""
    def graph(fn: Any) -> Tensor:
        return svod.custom_function(fn, Tensor(np.arange(3.0)), shape=(3,), dtype="float64") + 1

    class Adder:
        def __init__(self, by: int) -> None:
            self.by = by

        def add(self, x: Array) -> Array:
            return x + self.by
    one, two = Adder(1), Adder(2)
    tensors = [graph(fn) for fn in (one.add, one.add, two.add)]
    first, again, other = (normal_form(sink(t.uop)).digest for t in tensors)
    assert first == again != other
    assert [t.numpy()[0] for t in tensors] == [2, 2, 3]
    gone = weakref.ref(two)
    del two, tensors
    gc.collect()
    assert gone() is None


# -- what goes wrong -------------------------------------------------------------------------------

def test_what_a_function_raises_is_raised_unchanged() -> None:
    class Wrong(Exception):
        pass

    def fail(x: Array) -> Array:
        if raised:
            raise raised[0]
        return x + 1
    x = Tensor(values(3)).realize()
    plan = (svod.custom_function(fail, x * 2, shape=(3,), dtype="float64") * 2).prepare(NONE)
    for error in (Wrong("lost"), KeyboardInterrupt()):
        raised = [error]
        with pytest.raises(type(error)) as found:
            plan.execute()
        assert found.value is error
    raised = []
    plan.execute()
    np.testing.assert_array_equal(plan.output_buffer(), (x.numpy() * 2 + 1) * 2)

    state = Tensor(np.zeros(3)).realize()
    y = svod.custom_function(fail, state.assign(state + 1) * 1, shape=(3,), dtype="float64")
    plan = Tensor.prepare_batch([state, y], NONE)
    raised = [Wrong("lost")]
    with pytest.raises(Wrong):
        plan.execute()
    raised = []
    with pytest.raises(LaunchError, match="stopped half-way"):
        plan.execute()


def test_a_function_may_compute_with_svod_but_not_run_its_own_plan() -> None:
    others = (Tensor(values(4, 4)) @ Tensor(values(4, 4))).prepare(NONE)

    def busy(x: Array) -> Array:
        others.execute()
        inner = svod.custom_function(twice, Tensor(x.copy()).cumsum(0) @ Tensor(np.eye(4)), shape=(4, 4), dtype="float64")
        return (inner + 1).numpy()
    a = values(4, 4)
    y = svod.custom_function(busy, Tensor(a) + 1, shape=(4, 4), dtype="float64") * 2
    np.testing.assert_allclose(y.numpy(), (np.cumsum(a + 1, 0) * 2 + 1) * 2)

    def change(x: Array) -> Any:
        return changes.pop()()
    plan = svod.custom_function(change, Tensor(a) + 1, shape=(4, 4), dtype="float64").prepare(NONE)
    changes = [plan.execute, partial(plan.repeat, 2), partial(plan.set_variables, {}), partial(plan.repeat_kernel, 0, 1),
               partial(plan.bind_array, 0, a), plan.release_intermediate_buffers, plan.profile]
    while changes:
        with pytest.raises(LaunchError, match="change_1, a function that this plan calls, runs or changes the plan itself"):
            plan.execute()
    itself: Any = svod.jit(lambda x: svod.custom_function(lambda v: itself(v).numpy(), x + 1, shape=(4, 4), dtype="float64"), config=NONE)
    with pytest.raises(LaunchError, match="runs or changes the plan itself"):
        itself(a)


def test_a_plan_forked_while_it_calls_refuses_in_the_child() -> None:
    def split(x: Array) -> Array:
        nonlocal child
        child = os.fork()
        return x + 1
    child = -1
    y = svod.custom_function(split, Tensor(np.zeros(3)) + 1, shape=(3,), dtype="float64") * 2
    plan = y.prepare(NONE)
    try:
        plan.execute()
    except LaunchError as error:
        os._exit(7 if "forked while it ran" in str(error) and child == 0 else 1)
    assert child > 0, "only the parent goes on"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (plan.output_buffer() == 4).all()


@pytest.mark.parametrize(("returned", "error", "message"), [
    (np.zeros(4), ShapeError, r"wrong returned shape \(4,\); declared is \(3,\)"),
    (np.zeros(3, np.float32), DTypeError, r"returned float32; declared is float64: return result.astype\('float64'\)"),
    ([0.0] * 3, ArgumentError, r"returned list; return a NumPy array of float64\[3\]"),
    ((np.zeros(3),), ArgumentError, "returned tuple; return a NumPy array")])
def test_results_must_be_as_declared(returned: Any, error: type[Exception], message: str) -> None:
    def wrong(x: Array) -> Any:
        return returned
    with pytest.raises(error, match=message):
        svod.custom_function(wrong, Tensor(np.zeros(3)), shape=(3,), dtype="float64").numpy()
    with pytest.raises(ArgumentError, match=r"returned .*; declared are 2 results: return a tuple of them"):
        svod.custom_function(wrong, Tensor(np.zeros(3)), shape=((3,), (3,)), dtype=("float64",) * 2)[0].numpy()


def test_what_cannot_be_declared_is_refused() -> None:
    x = Tensor(np.zeros(3))
    for build, error, message in (
            (lambda: svod.custom_function(x, x, shape=(3,), dtype="float32"), ArgumentError, "a function of NumPy arrays first, then tens"),
            (lambda: svod.custom_function(twice, np.zeros(3), shape=(3,), dtype="float32"), ArgumentError, "twice takes tensors, got nda"),
            (lambda: svod.custom_function(twice, x), ArgumentError, "the result must be declared, as in shape="),
            (lambda: svod.custom_function(twice, x, shape=(3,), dtype=("float32", "int8")), ArgumentError, "give a tuple for each result"),
            (lambda: svod.custom_function(twice, x, shape=(), dtype=()), ArgumentError, "give a tuple for each result"),
            (lambda: svod.custom_function(twice, x, shape=(3.5,), dtype="float32"), ShapeError, "is not a shape"),
            (lambda: svod.custom_function(twice, x, shape=(-1,), dtype="float32"), ShapeError, "is not a shape"),
            (lambda: svod.custom_function(twice, x, shape=(3,), dtype="complex64"), DTypeError, "complex64"),
            (lambda: svod.custom_function(twice, x.cast("bfloat16"), shape=(3,), dtype="float32"), DTypeError, "NumPy has no bfloat16")):
        with pytest.raises(error, match=message):       # type: ignore[call-overload]
            build()     # type: ignore[no-untyped-call]


# -- what people and files see of it -----------------------------------------------------------------

def test_it_is_shown_with_its_name_and_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    def middle(x: Array) -> tuple[Array, Array]:
        return x * 2, x[0]
    first, second = svod.custom_function(middle, Tensor(values(6, 4)) + 1, shape=((6, 4), (4,)), dtype=("float64", "float64"))
    y = (first + second).sum(0)
    shown = svod.explain(y)
    assert "custom_function middle %" in shown and "because: host callback" in shown and "1 middle_1; native calls 2" in shown
    plan = y.prepare(PrepareConfig(db=":none:", dump_after="normalize,cut,canonical,schedule,linear,memory"))
    assert 'CUSTOM_FUNCTION float64' in (dumped := capsys.readouterr().err) and '"middle"' in dumped and "middle_1: level 1" in dumped
    found = plan.analyze()
    k = found.kernels[1]
    assert (k.name, k.bound_by, k.flops, k.bytes_read, k.bytes_written, k.seconds) == ("middle_1", "host callback", None, 192, 224, None)
    assert found.callbacks == (1,) and found.native_calls == 2 and found.critical_seconds is None and 1 in found.critical_path
    assert not any(1 in (f.producer, *f.consumers) for f in found.fusions), "no fusion would do without memory that a function reads"
    timed = svod.profile(plan, seconds=0.0).kernels[1]
    assert (timed.name, timed.source, timed.flops, timed.bytes) == ("middle_1", "host callback", None, 416) and timed.seconds > 0


def test_a_capture_has_the_other_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture's files never mention the function; the remaining kernels can be built, timed and tuned."""
    recorders: dict[Path, Any] = {}
    monkeypatch.setattr(capture, "_recorders", recorders)
    calls = Calls()
    y = svod.custom_function(calls, Tensor(values(6, 4)) + 1, shape=(6, 4), dtype="float64")
    plan = (y.sum(0) * 2).prepare(PrepareConfig(db=":none:", capture=tmp_path))
    assert not calls.given, "a function is not called to time kernels"
    plan.execute()
    for r in recorders.values():
        r.flush()
    [kept] = read_capture(tmp_path).plans
    assert [c.name for c in kept.unbound.calls] == ["elementwise", "reduce"]
    assert kept.unbound.kernels.keys() == {c.kernel for c in kept.unbound.calls}
    compiler = compiler_for(host_target(), PrepareConfig(object_cache=":none:"))
    compiled = compile_all(kept.unbound.kernels, {k: Choice((), "none", "") for k in kept.unbound.kernels}, compiler)
    build_plan(kept.unbound, compiled, synthetic_arrays(kept.unbound), threads=1).execute()
    with pytest.raises(FormatError, match="cannot be stored"):
        ast_to_data(y.uop)
    schedule = create_schedule(sink(y.uop))
    with pytest.raises(ScheduleError, match="calls Calls, a function of Python that is not given with it"):
        make_unbound_plan(schedule, frozenset())
    with pytest.raises(UnsupportedError, match=r"Calls, a function of Python, is called by the plan"):
        evaluate(schedule.calls[1].ast, [np.zeros(24), np.zeros(24)])
    with pytest.raises(ScheduleError, match=r"is a function of Python; svod\.custom_function calls one"):
        svod.call_kernel(schedule.calls[1].ast, Tensor(np.zeros(24)), Tensor(np.zeros(24)))


@pytest.mark.slow
def test_a_search_is_of_the_other_kernels(tmp_path: Path) -> None:
    y = svod.custom_function(twice, Tensor(values(5, 3)) + 1, shape=(5, 3), dtype="float64").sum(0)
    beam = BeamConfig(width=1, budget=0.5, executor="inline", kernel_budget=0.1)
    prepared = prepare_graph([y.uop], resolve(PrepareConfig(db=str(tmp_path / "x.db"), beam=beam, threads=1)))
    assert [k.opts_source for k in prepared.plan.kernels][1] == "host callback"
    prepared.plan.execute()
