"""Plans of the toy device, from tensors to results: its folder and one entry of the registry are all that svod has of it."""
from __future__ import annotations

import io
import json
import random
import sqlite3
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import svod
from svod import Tensor, Variable
from svod.cli.tune.script import script_environment
from svod.cli.tune.survey import pick_target
from svod.compile.backend import BACKENDS, device_named
from svod.compile.plan.compiler import compiler_for
from svod.compile.plan.run_log import RunLog
from svod.compile.resources import PhaseResources
from svod.config import BeamConfig, OptimizerConfig, PrepareConfig
from svod.core.cost.groups.group_cost import group_cost
from svod.core.graph.buffer import Array
from svod.core.graph.graph import sink
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import HOST
from svod.errors import CompileError, UnsupportedError
from svod.prepare import plan_with
from svod.tune.capture import Capture
from svod.tune.measure.candidate import Candidate, Origin
from svod.tune.plans.alternatives import PlanGraph, alternatives_of
from svod.tune.plans.plan_search import PlanSearch
from svod.tune.resolved import resolve
from svod.tune.search.strategies.beam import Beam
from svod.tune.workers.executor import InlineExecutor
from tests.call_trees import Loop, do, interpret, random_arrays, random_tree
from tests.hand_kernels import gemm
from tests.toy_backend.backend import BACKEND, ToyQueue
from tests.toy_backend.target import TOY

RNG = np.random.default_rng(0)
X, W, V = (RNG.standard_normal(shape).astype(np.float32) for shape in ((11, 18), (18, 13), (13, 7)))
CONFIG = PrepareConfig(device=TOY.device, object_cache=":none:", db=":none:")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, TOY.device, BACKEND.__module__)


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    rows: Array = e / e.sum(-1, keepdims=True)
    return rows


def test_a_network_of_several_kernels() -> None:
    plan = ((Tensor(X) @ Tensor(W)).relu() @ Tensor(V)).softmax(-1).prepare(CONFIG)
    assert len(plan.kernels) > 1 and isinstance(plan._devices.queue, ToyQueue)
    for _ in range(2):
        plan.execute()
        np.testing.assert_allclose(plan.outputs[0].reshape(11, 7), softmax(np.maximum(X @ W, 0) @ V), rtol=1e-4, atol=1e-6)
    phases = [p for k in plan.kernels for p in k.spec.phases]
    assert any(p.block > 1 for p in phases), "the heuristic binds loops to threads"


@pytest.mark.parametrize("seed", range(6))
def test_loops_of_calls_in_loops_of_calls(seed: int) -> None:
    rng = random.Random(seed)
    tree, start = (Loop(2, (Loop(3, random_tree(rng, 2)), *random_tree(rng, 1))),), random_arrays(rng)
    state = [Tensor(a.copy()) for a in start]
    do(tree, state)
    plan = Tensor.prepare_batch(state, CONFIG)
    wanted = [a.copy() for a in start]
    for _ in range(2):
        plan.execute()
        calls = interpret(tree, wanted)
    assert len(plan.kernels) == calls and isinstance(plan._devices.queue, ToyQueue)
    for found, want in zip(state, wanted, strict=True):
        np.testing.assert_array_equal(found.numpy(), want, str(tree))


def test_inputs_are_bound_anew() -> None:
    x = Tensor(X.copy())
    plan = (x.sum(1) * 2).prepare(CONFIG)
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0], X.sum(1) * 2, rtol=1e-4, atol=1e-5)


def test_weights_are_arranged_once() -> None:
    w = Tensor(W)
    key = (Tensor(X) @ w).prepare(CONFIG, constants=[w]).kernels[0].key
    plan = (Tensor(X) @ w).prepare(replace(CONFIG, opts={key: (("STAGE", "s1", "root"), ("LOCAL", "o1", 4))}), constants=[w])
    assert [p.once for p in plan.kernels[0].spec.phases] == [True, False]
    assert plan.analyze().kernels[0].resources == (PhaseResources("svod_p1", 4, 0),), "of a run; the compiler does not say more"
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(11, 13), X @ W, rtol=1e-4, atol=1e-5)


def test_variables() -> None:
    n = Variable("n", 1, 11)
    plan = Tensor(X)[:n].sum(1).prepare(CONFIG)
    for rows in (11, 3):
        plan.set_variables({"n": rows})
        plan.execute()
        np.testing.assert_allclose(plan.outputs[0][:rows], X[:rows].sum(1), rtol=1e-4, atol=1e-5)


def test_a_function_of_python_has_copies_of_what_lies_on_the_device() -> None:
    """Its operand is an intermediate, its result another one."""
    half = svod.custom_function(lambda m: m / 2, Tensor(X) @ Tensor(W), shape=(11, 13), dtype="float32")
    plan = (half + 1).prepare(CONFIG)
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(11, 13), X @ W / 2 + 1, rtol=1e-4, atol=1e-5)


def test_a_trace_has_a_track_of_the_device_with_its_copies() -> None:
    """The inputs' uploads, the kernels, and the result that is fetched."""
    half = svod.custom_function(lambda m: m / 2, Tensor(X) @ Tensor(W), shape=(11, 13), dtype="float32")
    plan = (half + 1).prepare(CONFIG)
    log = RunLog(1, True, out := io.StringIO())
    plan.log_runs(log)
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(11, 13), X @ W / 2 + 1, rtol=1e-4, atol=1e-5)
    names, events = ([e for e in json.loads(log.trace_json())["traceEvents"] if e["ph"] == phase] for phase in "MX")
    track, = [e["tid"] for e in names if e["args"]["name"] == TOY.device]
    copies = [e for e in events if e["cat"] == "copy"]
    found = Counter((e["args"]["from"], e["args"]["to"], e["args"]["bytes"]) for e in copies)
    middle = 4 * 11 * 13        # bytes of the function's arguments, its results in both directions, and the plan's result
    assert found == {("CPU", TOY.device, X.nbytes): 1, ("CPU", TOY.device, W.nbytes): 1, ("CPU", TOY.device, middle): 1,
                     (TOY.device, "CPU", middle): 3}
    assert {e["tid"] for e in copies} == {track} and all(e["name"] == f"{e['args']['from']} → {e['args']['to']}" for e in copies)
    kernels = [e for e in events if e["cat"] == "kernel"]
    assert [e["tid"] == track for e in kernels] == [not k.is_host_item for k in plan.kernels] == [True, False, True]
    begun = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == track)
    assert all(a + length <= b + 1e-3 for (a, length), (b, _) in pairwise(begun)), "events of a track do not overlap"
    log.finish(None)
    assert "svod: 3 runs of 3 kernels and 6 copies" in out.getvalue() and f"{TOY.device} → CPU" in out.getvalue()


def test_what_a_plan_changes_is_copied_back() -> None:
    x = Tensor(X.copy()).realize()
    x[2:4] = Tensor(X[:2]) * 3
    plan = x.prepare(CONFIG)
    plan.execute()
    expected = X.copy()
    expected[2:4] = X[:2] * 3
    np.testing.assert_array_equal(plan.outputs[0].reshape(X.shape), expected)


def test_the_work_of_a_plan_is_known_and_its_ceilings_are_not() -> None:
    plan = (Tensor(X[:2, :5].copy()) @ Tensor(W[:5, :3].copy())).prepare(CONFIG)
    kernel, = plan.analyze().kernels
    assert kernel.flops == 2 * 2 * 5 * 3 and kernel.seconds is None
    timed, = svod.profile(plan, seconds=0.01).kernels
    assert timed.seconds > 0 and timed.bound is None


def test_a_search_ranks_by_the_cost_of_the_backend() -> None:
    base = Scheduler(Kernel(gemm(8, 8, 8)), TOY)
    shared = apply_opts(base, [Opt("LOCAL", "o0", 4)])
    candidate = Candidate(shared, shared.applied_opts, Origin.UNTOUCHED)
    assert Beam(base, BeamConfig()).predict(candidate)
    assert candidate.predicted == group_cost(shared).cycles, "the CPU's cost does not know threads"


def test_what_is_timed_reads_the_inputs_that_were_loaded_last() -> None:
    x = Tensor(X.copy()).realize()
    plan = (x + 1).prepare(CONFIG)
    plan.execute()
    np.asarray(x, copy=False)[...] = 5
    for load, expected in ((False, X + 1), (True, np.full_like(X, 6))):
        if load:
            plan.load_inputs()
        plan.repeat(2)
        np.testing.assert_array_equal(plan.outputs[0].reshape(X.shape), expected)


@pytest.mark.slow
def test_a_search_uses_the_compiler_that_the_device_names(tmp_path: Path) -> None:
    db = tmp_path / "tune.db"
    beam = BeamConfig(width=1, executor="inline", budget=60.0, kernel_budget=60.0, patience=1)
    (Tensor(X[:3, :6]) @ Tensor(W[:6, :5])).prepare(PrepareConfig(device="CPU:interpreter", object_cache=":none:", beam=beam, db=str(db)))
    with sqlite3.connect(db) as found:
        compilers = found.execute("SELECT DISTINCT compiler FROM measurements").fetchall()
    assert compilers == [(device_named("CPU:interpreter").pair.key,)]


def test_nolocals_keeps_groups_at_one_thread() -> None:
    plan = (Tensor(X) @ Tensor(W)).prepare(replace(CONFIG, optimizer=OptimizerConfig(nolocals=True)))
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(11, 13), X @ W, rtol=1e-4, atol=1e-5)
    assert all(p.block == 1 for k in plan.kernels for p in k.spec.phases)


def test_a_fault_is_raised_where_the_plan_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svod.compile.lower.emit.threads.shared.SharedMemory.barrier", lambda self: None)
    config = replace(CONFIG, opts={"": (("GROUP", "r0", 3),)}, opt_cache_max=1)     # forces a separate compiler
    plan = (Tensor(X[:7]) @ Tensor(W)).prepare(config)
    with pytest.raises(CompileError, match="shared memory"):
        plan.execute()


def test_without_its_entry_there_is_no_such_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(BACKENDS, TOY.device)
    with pytest.raises(UnsupportedError, match="TOY"):
        (Tensor(X) + 1).prepare(CONFIG)


@pytest.mark.slow
def test_a_search_measures_on_the_device(tmp_path: Path) -> None:
    db = tmp_path / "tune.db"
    beam = BeamConfig(width=1, executor="inline", budget=60.0, kernel_budget=60.0, patience=1)
    plan = (Tensor(X[:3, :6]) @ Tensor(W[:6, :5])).prepare(replace(CONFIG, beam=beam, db=str(db)))
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(3, 5), X[:3, :6] @ W[:6, :5], rtol=1e-4, atol=1e-5)
    with sqlite3.connect(db) as found:
        rows = found.execute("SELECT chain, status FROM measurements").fetchall()
    ran = [chain for chain, status in rows if status in ("ok", "slow")]
    assert any(f'"{op}"' in chain for chain in ran for op in ("LOCAL", "GROUP", "GROUPTOP", "SPLITK"))
    assert {status for _, status in rows} <= {"ok", "slow", "limit"}, "nothing that is proposed is wrong or fails"


@pytest.mark.slow
def test_a_search_verifies_kernels_with_constants(tmp_path: Path) -> None:
    """Each set of inputs reaches the device, including the constants."""
    db, w = tmp_path / "tune.db", Tensor(W[:6, :5].copy()).realize()
    beam = BeamConfig(width=1, executor="inline", budget=60.0, kernel_budget=60.0, patience=1)
    (Tensor(X[:3, :6]) @ w).prepare(replace(CONFIG, beam=beam, db=str(db)), constants=[w])
    with sqlite3.connect(db) as found:
        statuses = {status for status, in found.execute("SELECT status FROM measurements")}
    assert "ok" in statuses and statuses <= {"ok", "slow", "limit"}


def test_workers_time_on_the_device_they_were_made_for() -> None:
    with InlineExecutor(device=TOY.device) as executor:
        assert executor.targets() == [TOY]
        outcome, = executor.run("svod.tune.measure.work:machine_facts", [TOY.device], kind="bench", deadline=5.0)
    assert outcome.value["target"] == TOY.key


def test_the_device_that_is_asked_for_is_tuned() -> None:
    """A capture of plans for the CPU, tuned for another device."""
    assert pick_target(Capture(), TOY.device) == TOY
    assert pick_target(Capture()).device == HOST
    environment = script_environment(Path("captures"), "TOY", "CUDA:sm_80")
    assert (environment["SVOD_DEVICE"], environment["SVOD_CAPTURE_DEVICE"]) == ("TOY", "CUDA:sm_80")


def test_a_compiler_is_the_targets_whatever_device_is_configured() -> None:
    """Tools look at the records of several devices."""
    cpu = device_named(HOST).backend.target()
    assert compiler_for(cpu, CONFIG).backend.name == HOST
    assert compiler_for(TOY, CONFIG).backend.name == TOY.device


def test_an_onnx_model_on_a_device() -> None:
    helper = pytest.importorskip("onnx.helper")
    x, y = (helper.make_tensor_value_info(name, 1, [3, 5]) for name in "xy")
    proto = helper.make_model(helper.make_graph([helper.make_node("Softmax", ["x"], ["y"])], "g", [x], [y]),
                              opset_imports=[helper.make_opsetid("", 17)])
    model = svod.onnx.load(proto, config=replace(CONFIG, device=None), device=TOY.device)
    given = np.ascontiguousarray(X[:3, :5])
    got = model(given)
    np.testing.assert_allclose(np.asarray(got), softmax(given), rtol=1e-4, atol=1e-6)
    plan, = model.plans
    assert plan.device == TOY.device


@pytest.mark.slow
def test_a_pytorch_model_on_a_device() -> None:
    torch = pytest.importorskip("torch", reason="the package torch is not installed")
    compiler = pytest.importorskip("svod.torch")
    model, given = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Softmax(-1)).eval(), torch.from_numpy(X[:3, :5].copy())
    compiled = compiler.compile(model, given, options={"device": TOY.device})
    with torch.no_grad():
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-4, atol=1e-6)
    assert {plan.device for plan in compiled.plans} == {TOY.device}


def test_the_alternatives_of_a_plan_are_timed_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that does not read host memory, every plan of the search has buffers of its own."""
    config = replace(CONFIG, db=str(tmp_path / "t.db"))
    y, resolved = (Tensor(X) @ Tensor(W)).relu() @ Tensor(V), resolve(config)
    graph = PlanGraph(sink(y.uop))
    search = PlanSearch(alternatives_of(graph), partial(plan_with, graph, resolved), resolved, 60.0)
    monkeypatch.setattr(search, "is_faster", lambda found, best: len(found.chosen) > len(best.chosen))
    times = search.run()
    assert times is not None and times.target == TOY.key and times.alternatives
    resolved.db.record([replace(times, ratio=0.5, ratio_low=0.5, ratio_high=0.5)])
    plan = ((Tensor(X) @ Tensor(W)).relu() @ Tensor(V)).prepare(config)
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(11, 7), np.maximum(X @ W, 0) @ V, rtol=1e-4, atol=1e-5)
    by_rules = ((Tensor(X) @ Tensor(W)).relu() @ Tensor(V)).prepare(CONFIG)
    assert [k.key for k in plan.kernels] != [k.key for k in by_rules.kernels]
