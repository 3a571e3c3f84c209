"""Making a plan of tensors: the effects of the configuration."""
from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.backend import target_with
from svod.compile.cpu.host import host_target
from svod.compile.plan.unbound_plan import build_plan, synthetic_arrays
from svod.config import OptimizerConfig, PrepareConfig
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.isa import DOTS
from svod.core.schedule import schedule, schedule_cache
from svod.errors import ArgumentError, ConfigError, DeviceError, KernelOptError, LaunchError, ScheduleError, SvodError, UnsupportedError
from tests.plans import gemm_then_softmax
from tests.toy_backend.target import TOY

X = np.ones((300, 300), np.float32)


def test_no_more_threads_than_asked_for() -> None:
    """Independent kernels of one level run at the same time, but not on cores that were not given."""
    x = Tensor(X)
    plan = Tensor.prepare_batch([x.sum(0), x.max(1), x * 3], PrepareConfig(threads=1))
    assert [k.level for k in plan.kernels] == [0, 0, 0]
    assert plan.threads == 1
    plan.execute()
    assert [float(o[0]) for o in plan.outputs] == [300, 1, 3]


@pytest.mark.skipif(not any(d.runs_on(host_target()) for d in DOTS.values()), reason="this machine has no dot or matrix instructions")
def test_without_tc_no_kernel_has_a_dot_or_matrix_instruction() -> None:
    a, b = (Tensor(np.ones(shape, np.int8)).cast("int32") for shape in ((64, 128), (128, 64)))
    chains = {}
    for tc in (True, False):
        plan = (a @ b).prepare(PrepareConfig(optimizer=OptimizerConfig(tc=tc)))
        chains[tc] = [o[0] for k in plan.kernels for o in k.opts]
        plan.execute()
        assert plan.outputs[0].tolist() == [128] * 64 * 64
    assert "TC" in chains[True] and "TC" not in chains[False]
    with pytest.raises(KernelOptError, match="TC=0 keeps"):
        (a @ b).prepare(PrepareConfig(optimizer=OptimizerConfig(tc=False), opts={plan.kernels[0].key: [("TC", "r0", "vnni8")]}))


def test_what_the_configuration_allows_of_a_target() -> None:
    host = host_target()
    assert host.allowing(True, True) == host
    assert host.allowing(False, True).key != host.key, "chains with and without are different records"
    assert target_with(host.allowing(False, True).key) == host.allowing(False, True)
    assert TOY.allowing(True, False).group_threads == 1
    keys = {t.key for t in (TOY, TOY.allowing(True, False), replace(TOY, device="X"), replace(TOY, shared_bytes=1024))}
    assert len(keys) == 4, "what opts may do is a part of the identity"
    assert host.allowing(True, False) == host, "a CPU has no groups"
    assert host.allowing(True, True, True) == host, "nor instructions that round factors of float32"


def test_another_device_than_the_cpu_is_refused() -> None:
    for name, said in (("TPU", "no device 'TPU': use one of CPU, "), ("CPU:1", "no device 'CPU:1': use CPU, CPU:llvm")):
        with pytest.raises(UnsupportedError, match=said):
            (Tensor(X) + 1).prepare(PrepareConfig(device=name))
    (Tensor(X) + 1).prepare(PrepareConfig(device="cpu"))


def test_a_copy_has_memory_of_its_own() -> None:
    x = Tensor(X)
    there = Tensor.from_uop(UOp(Ops.COPY, x.dtype, ((x + 1).uop, UOp(Ops.DEVICE, dtypes.void, (), "nowhere"))))
    with pytest.raises(UnsupportedError, match="no device 'nowhere'"):
        (there * 2).realize()
    here = Tensor.from_uop(UOp(Ops.COPY, x.dtype, ((x + 1).uop, UOp(Ops.DEVICE, dtypes.void, (), "CPU"))))
    plan = (here * 2).prepare()
    plan.execute()
    assert len(plan.kernels) == 2 and (plan.output_buffer() == 4).all()


def test_an_unbound_plan_without_code_for_one_of_its_kernels_is_refused() -> None:
    unbound = gemm_then_softmax()
    with pytest.raises(LaunchError, match=f"call gemm is of kernel {unbound.calls[0].kernel[:12]}, which has no code"):
        build_plan(unbound, {}, synthetic_arrays(unbound))


def arranged(plan: Any) -> int:
    """The phases of a plan that ran while it was made."""
    return sum(phase.once for k in plan.kernels for phase in k.spec.phases)


def conv_of(x: Tensor, w: Tensor) -> Tensor:
    return x.conv2d(w, padding=1).relu()


@pytest.mark.parametrize(("weight", "given", "build", "stage"), [
    ((256, 512), (67, 256), lambda x, w: x @ w, "s1"), ((64, 32, 3, 3), (1, 32, 29, 31), conv_of, "s0")], ids=["linear", "conv"])
def test_weights_are_arranged_while_the_plan_is_made(weight: Any, given: Any, build: Any, stage: str) -> None:
    """Weights are arranged while the plan is made: for a jitted function the tensors that it closes over, for `prepare` the tensors in
    constants=. This is the default; constants "none" turns it off."""
    rng = np.random.default_rng(3)
    weights, array = (rng.standard_normal(shape).astype(np.float32) for shape in (weight, given))
    w, x = Tensor(weights), Tensor(array)
    want = build(Tensor(array), Tensor(weights)).numpy()
    chain = {"": [["STAGE", stage, "root"]]}
    for config, some in ((PrepareConfig(opts=chain), True), (PrepareConfig(opts=chain, constants="none"), False)):
        f = svod.jit(lambda x: build(x, w), config=config)
        assert np.allclose(f(array).numpy(), want, rtol=1e-4, atol=1e-4)
        plan = build(x, w).prepare(config, constants=[w])
        plan.execute()
        assert np.allclose(plan.outputs[0].reshape(want.shape), want, rtol=1e-4, atol=1e-4)
        assert [arranged(p) for p in (f.plans[0], plan, build(x, w).prepare(config))] == [some, some, False]


def test_constants_are_computed_with_the_database_while_a_program_is_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, prepared = svod.prepare.prepare_graph, list[tuple[str | None, object]]()

    def noted(outputs: Any, resolved: Any, *more: Any) -> Any:
        prepared.append((resolved.config.capture, resolved.db.plan.write))
        return made(outputs, resolved, *more)
    monkeypatch.setattr(svod.prepare, "prepare_graph", noted)
    w = Tensor(X).realize()
    (Tensor(X) @ w.T.contiguous()).prepare(
        PrepareConfig(capture=str(tmp_path / "kernels"), db=str(tmp_path / "tuning.db"), object_cache=":none:"), constants=[w])
    assert (None, tmp_path / "tuning.db") in prepared, "kernels of constants run once, and are no part of the capture"
    assert all(database is None for captured, database in prepared if captured is not None)


@pytest.mark.parametrize("output", [lambda w: w.T.contiguous(), lambda w: w.T.contiguous().reshape(2, 6),
                                    lambda w: w.T.contiguous().T], ids=["turned", "reshaped", "turned_back"])
def test_who_writes_to_an_output_changes_no_constant(output: Any) -> None:
    """An output that depends on constants only has separate memory, which each run fills, so that writes to it do not change the
    constants."""
    w = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4)).realize()
    want = output(w).numpy().ravel()
    first = output(w).prepare(PrepareConfig(), constants=[w])
    first.execute()
    first.outputs[0][:] = 7
    second = output(w).prepare(PrepareConfig(), constants=[w])
    for plan in (second, first):
        plan.execute()
        np.testing.assert_array_equal(plan.outputs[0], want)


def test_other_inputs_than_constants_may_be_rewritten() -> None:
    x, w = np.ones((64, 256), np.float32), np.ones((256, 512), np.float32)
    first = Tensor(x)
    plan = (first @ Tensor(w)).prepare(constants=[Tensor(np.ones(3, np.float32))])
    plan.execute()
    x[:], w[:] = 2, 3
    plan.execute()
    assert float(plan.outputs[0].flat[0]) == 2 * 3 * 256


def test_what_can_be_no_constant_of_a_plan_is_refused() -> None:
    x, w = Tensor(X), Tensor(X.copy())
    for y, said in ((w + 1, r"to be computed \(ADD\); call its realize"), (w.T, "is a view"), (w[:, :300:2], "is a view")):
        with pytest.raises(ScheduleError, match=said):
            (x @ y).prepare(constants=[y])
    with pytest.raises(ArgumentError, match="constants= takes tensors in a list, got ndarray"):
        (x @ w).prepare(constants=[X])      # type: ignore[list-item]
    before = w.numpy()
    w.assign(w + 1)
    with pytest.raises(ScheduleError, match="an assignment still to be done"):
        (x @ w).prepare(constants=[w])
    assert np.array_equal(w.numpy(), before + 1)
    plan = Tensor.prepare_batch([x @ w], constants=[w, Tensor.ones(3)])      # the plan reads one of them
    plan.execute()
    assert float(plan.outputs[0].flat[0]) == 600


def test_an_output_cannot_be_read_before_its_plan_ran() -> None:
    x = Tensor(X)
    y, three = x + 1, Tensor(3.0)
    after = y * 2
    plan = Tensor.prepare_batch([y, three])
    for read in (y.numpy, after.numpy, (y + 1).prepare):
        with pytest.raises(DeviceError, match=r"call plan\.execute\(\) first"):
            read()
    assert (Tensor([1.0]) * 3.0).tolist() == [3]        # the constant that was prepared is still one elsewhere
    plan.execute()
    assert y.numpy().min() == y.numpy().max() == 2 and float(after.max()) == 4 and three.item() == 3
    assert np.shares_memory(np.asarray(y, copy=False), plan.outputs[0])
    again = x - 1
    again.prepare().repeat(2)
    assert not again.numpy().any()


def test_memory_that_is_assigned_to_lies_under_one_buffer_only() -> None:
    x = np.arange(1000, dtype=np.float32)
    s = Tensor(x)
    s.assign(Tensor(x).flip(0))
    with pytest.raises(ScheduleError, match="share 4000 bytes"):
        s.realize()
    np.testing.assert_array_equal(x, np.arange(1000))
    t = Tensor(x)
    t.assign(Tensor(x[500:]).sum() + t)
    with pytest.raises(ScheduleError, match="share 2000 bytes"):
        t.realize()
    # one tensor for both, a copy, parts that lie apart, and reading alone
    u = Tensor(x)
    np.testing.assert_array_equal(u.assign(u.flip(0)).numpy(), np.arange(1000)[::-1])
    np.testing.assert_array_equal(u.assign(Tensor(x.copy()).flip(0)).numpy(), np.arange(1000))
    np.testing.assert_array_equal(Tensor(x[:500]).assign(Tensor(x[500:])).numpy(), np.arange(500, 1000))
    np.testing.assert_array_equal((Tensor(x) + Tensor(x)).numpy(), 2 * x)


def test_without_a_schedule_cache_nothing_is_looked_up_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asts = lru_cache(schedule._made_ast)
    monkeypatch.setattr(schedule, "_remembered_ast", asts)
    plan = (Tensor(X).sum(0) + 3).prepare(PrepareConfig(disable_schedule_cache=True))
    assert not asts.cache_info().currsize
    plan.execute()
    assert float(plan.outputs[0][0]) == 303
    (Tensor(X).sum(0) + 3).prepare(PrepareConfig())
    assert asts.cache_info().currsize


@pytest.mark.parametrize("other", ["nothing", "threads", "a weight's shape", "the graph"])
def test_a_later_process_reads_the_schedule_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    made: list[UOp] = []

    def counted(sink: UOp, *args: Any, **more: Any) -> schedule.Schedule:
        made.append(sink)
        return schedule.create_schedule(sink, *args, **more)
    monkeypatch.setattr(schedule_cache, "create_schedule", counted)
    for changed in ("nothing", other):
        monkeypatch.setattr(schedule_cache, "_schedules", OrderedDict())
        rng = np.random.default_rng(1)
        width = 7 if changed == "a weight's shape" else 5
        sizes = [*(5,) * 9, width, *(5,) * 9]
        x = y = rng.standard_normal((3, 5)).astype(np.float32)
        t, weights = Tensor(x), []
        for n, m in pairwise(sizes):
            w = rng.standard_normal((n, m)).astype(np.float32) / 2
            weights.append(Tensor(w))
            t, y = (t @ weights[-1]).tanh(), np.tanh(y @ w)
        if changed == "the graph":
            t, y = t + 1, y + 1
        config = PrepareConfig(object_cache=str(tmp_path), threads=2 if changed == "threads" else 1)
        plan = t.prepare(config, constants=weights)
        plan.execute()
        np.testing.assert_allclose(t.numpy(), y, rtol=1e-4, atol=1e-5)
    assert len(made) == (1 if other in ("nothing", "threads") else 2)


@pytest.mark.parametrize(("act", "said"), [
    (lambda: svod.profile(Tensor(X)), "and its arguments, got Tensor; a tensor has a plan by plan = t.prepare()"),
    (lambda: Tensor.realize_batch([Tensor(X), 3]), "realize_batch takes tensors in a list, got int"),
    (lambda: Tensor.prepare_batch(3), "prepare_batch takes tensors in a list, got int"),
    (lambda: Tensor.cat(3), "cat of int"), (lambda: Tensor.stack([Tensor(X), "b"]), "stack of str"),
    (lambda: Tensor(X).sum("x"), "'x' is not an axis"), (lambda: Tensor(X).sum(1.5), "1.5 is not an axis"),
    (lambda: Tensor.full((2,), "a"), "a constant of str"), (lambda: Tensor.arange("a"), "arange of str"),
])
def test_arguments_of_another_kind_are_named(act: Any, said: str) -> None:
    with pytest.raises(SvodError, match=re.escape(said)):
        act()


def test_numbers_of_numpy_are_numbers() -> None:
    assert Tensor.full((2,), np.float32(1.5)).tolist() == [1.5, 1.5] and Tensor.arange(np.int64(3)).dtype.name == "int32"
    assert Tensor(X).sum(np.int64(0)).shape == Tensor(X).sum(0).shape


def test_an_unusable_variable_is_one_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAM", "abc")
    with pytest.raises(ConfigError, match="BEAM='abc' is not usable; accepted: an integer") as caught:
        (Tensor(X) + 1).numpy()
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert not any("config.py" in str(entry.path) for entry in caught.traceback), "how the environment is read is no news"
    plan = (Tensor(X) + 1).prepare(PrepareConfig(beam=None))
    assert plan.kernels, "who says what to do is not asked for BEAM"


def test_arrays_that_a_plan_is_given_must_fit() -> None:
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    plan = (Tensor(x) * 2).prepare(PrepareConfig())
    given = next(i for i, b in enumerate(plan.buffers) if b.kind == "input")
    made = next(i for i, b in enumerate(plan.buffers) if b.kind == "output")
    raw = np.zeros(65, np.uint8)
    for array, said in ((x.astype(np.float64), "holds float32; .* has another type"), (x.astype(np.int32), "has another type"),
                        (x[:2], "needs 64 bytes"), (x.T, "not C-contiguous"), (raw[1:].view(np.float32), "multiple of its 4 bytes"),
                        (plan.outputs[0], f"in memory of buffer {made}")):
        with pytest.raises(LaunchError, match=said):
            plan.bind_array(given, array)
    with pytest.raises(LaunchError, match=f"in memory of buffer {given}"):
        plan.bind_array(made, x)
    with pytest.raises(LaunchError, match="cannot be bound"):
        plan.bind_array(99, x)
    plan.bind_array(given, x + 1)
    plan.execute()
    np.testing.assert_array_equal(plan.outputs[0], (x.reshape(-1) + 1) * 2)
