"""A PROGRAM and its compilation stages: the content of each, errors, explicit properties; and runs of kernels over positions of a
launch."""
from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod import PrepareConfig, Tensor
from svod.compile.backend import backend_named, device_named
from svod.compile.cpu.host import host_target
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import PhaseSpec, Program, ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.object_cache import Build, CachedObject, ObjectCache, ObjectKey
from svod.compile.plan.stages import STAGES, add_stage, build, load_program, lower_kernel, make_program, spec_of, stage_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.launch import ONCE, LaunchDims, Sizes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.schedule.thread_indices import launch_of
from svod.errors import ArgumentError, CompileError, LaunchError, ScheduleError, UnsupportedError
from tests.agreement import Case, run_interpreted, run_native
from tests.chains import random_state
from tests.core.schedule.test_thread_indices import core, doubled, position
from tests.draws import a_half, count
from tests.hand_kernels import HAND, Ast, number

TARGET = host_target(2)
DEVICES = [f"CPU:{pair.name}" for pair in backend_named("CPU").compilers]
F32, INDEX = dtypes.float32, dtypes.index
N = UOp(Ops.DEFINE_VAR, INDEX, (), ("v0", 0, 64))
M = UOp(Ops.DEFINE_VAR, INDEX, (), ("v1", 1, 9))


def grid() -> UOp:
    """Make a kernel of z = a·b, and y = a + b in place of y, over groups of 4 positions; the numbers of groups are variables."""
    k = Ast()
    g, h, at = position("g1", M), position("gidx0", N), number(0)
    part = position("l0", 4)
    at = g * 256 + h * 4 + part
    size = 9 * 256
    z, y, b = k.param(0, size), k.param(1, size), k.param(2, size)
    return k.sink(k.store(z, at, k.load(y, at) * k.load(b, at)), k.store(y, at, k.load(y, at) + k.load(b, at)))


# -- properties of a program ----------------------------------------------------------------------------------------------
def test_a_spec_says_globals_outs_ins_variables_and_launch_sorted_and_once() -> None:
    spec = spec_of(build(make_program(grid()), TARGET), TARGET)
    assert (spec.name, spec.globals, spec.outs, spec.ins, spec.variables) == ("kernel", (0, 1, 2), (0, 1), (1, 2), ("v0", "v1"))
    assert spec.launch.variables == ("v0", "v1") and spec.launch.at({"v0": 5, "v1": 2}) == Sizes((5, 2, 1), (4, 1, 1))
    assert spec.params == ((F32, 2304),) * 3
    assert spec_of(build(make_program(HAND["hand_gemm"]()), TARGET), TARGET).launch == ONCE


def test_a_launch_is_made_to_fit_its_target() -> None:
    small = replace(TARGET, global_limits=(16, 16, 16), local_limits=(8, 8, 8))
    ast = doubled((position("g0", 120), 120), (position("l0", 8), 8))
    sizes = spec_of(build(make_program(ast), small), small).launch.at({})
    assert math.prod(sizes.global_size) == 120 and max(sizes.global_size) <= 16 and sizes.local_size == (8, 1, 1)
    with pytest.raises(LaunchError, match="cannot limit dim: a launch of 127 positions does not fit the target's 16 × 16 × 16"):
        build(make_program(doubled((position("g0", 127), 127))), small)


# -- stage by stage -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_a_program_gets_its_stages_one_after_the_other(device: str, tmp_path: Path) -> None:
    """Stages made one by one equal those of `build`; the loaded program runs, and so does one loaded from stored bytes."""
    sink, pair = HAND["hand_softmax"](), device_named(device).pair
    begun = make_program(sink, device)
    assert [s.op for s in begun.src] == [Ops.SINK, Ops.DEVICE] and stage_of(begun, Ops.SINK) is sink
    chain = (Opt("UPCAST", "o1", 8),)
    linear = lower_kernel(Kernel(sink), TARGET, chain)
    by_hand = add_stage(begun, Ops.LINEAR, linear)
    by_hand = add_stage(by_hand, Ops.SOURCE, pair.render(linear, TARGET))
    by_hand = add_stage(by_hand, Ops.BINARY, pair.compile(stage_of(by_hand, Ops.SOURCE).arg, TARGET))
    made = build(begun, TARGET, chain)
    assert made is by_hand and build(made, TARGET) is made and tuple(s.op for s in made.src) == STAGES
    spec, loaded = load_program(made, TARGET)
    assert spec == linear.spec
    cache = ObjectCache(tmp_path)
    key = ObjectKey("k", "c", Build("t", 1, "llvm"))
    cache.put(key, CachedObject(spec, stage_of(made, Ops.BINARY).arg))
    kept = cache.get(key)
    assert kept is not None and kept.spec == spec
    for code in (loaded, pair.load(kept.code, kept.spec)):
        x = np.random.default_rng(1).normal(size=spec.params[1][1]).astype(np.float32)
        y = np.zeros(spec.params[0][1], np.float32)
        ExecutionPlan.of_kernel(spec, code, [y, x]).execute()
        e = np.exp(x.reshape(Kernel(sink).axes[0].extent, -1))
        np.testing.assert_allclose(y.reshape(e.shape), e / e.sum(1, keepdims=True), rtol=1e-5)


def node(op: Ops, arg: Any = None) -> UOp:
    return UOp(op, dtypes.void, (), arg)


SINK, DEVICE, LINEAR, SOURCE, BINARY = (build(make_program(doubled((core(4), 5))), TARGET).src[k] for k in range(5))


def program(*stages: UOp, said: Any = None) -> UOp:
    return UOp(Ops.PROGRAM, dtypes.void, stages, said)


BAD: dict[str, tuple[UOp, str]] = {
    "not PROGRAM": (SINK, "expected PROGRAM op, got SINK"),
    "sink": (program(DEVICE, DEVICE, LINEAR, SOURCE, BINARY), "PROGRAM sink stage must be SINK op, got DEVICE"),
    "no sink": (program(), "PROGRAM missing SINK stage"),
    "device": (program(SINK, SOURCE, LINEAR, SOURCE, BINARY), "PROGRAM device must be DEVICE op, got SOURCE"),
    "no device": (program(SINK), "PROGRAM missing DEVICE stage"),
    "linear": (program(SINK, DEVICE, SOURCE), "PROGRAM linear stage must be LINEAR op, got SOURCE"),
    "linear of nothing": (program(SINK, DEVICE, node(Ops.LINEAR)), "PROGRAM linear stage must hold Program, got None"),
    "no linear": (program(SINK, DEVICE), "PROGRAM missing LINEAR stage"),
    "source": (program(SINK, DEVICE, LINEAR, BINARY), "PROGRAM source stage must be SOURCE op, got BINARY"),
    "source of bytes": (program(SINK, DEVICE, LINEAR, node(Ops.SOURCE, b"")), "PROGRAM source stage must hold str, got bytes"),
    "no source": (program(SINK, DEVICE, LINEAR), "PROGRAM missing SOURCE stage"),
    "binary": (program(SINK, DEVICE, LINEAR, SOURCE, SOURCE), "PROGRAM binary stage must be BINARY op, got SOURCE"),
    "no binary": (program(SINK, DEVICE, LINEAR, SOURCE), "PROGRAM missing BINARY stage"),
    "metadata": (program(SINK, DEVICE, LINEAR, SOURCE, BINARY, said="gemm"), "PROGRAM says str of itself"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_stage_that_is_missing_or_another_one(name: str) -> None:
    made, said = BAD[name]
    with pytest.raises(CompileError, match=said):
        load_program(made, TARGET)


def test_what_a_stage_holds_is_refused_by_the_next() -> None:
    """Errors: code outside LINEAR, code that writes other arguments than the kernel, an unknown device, stages in the wrong order."""
    with pytest.raises(UnsupportedError, match="no device 'METAL'"):
        make_program(SINK, "METAL")
    with pytest.raises(CompileError, match="PROGRAM sink stage must be SINK op, got PROGRAM"):
        make_program(node(Ops.PROGRAM))
    with pytest.raises(CompileError, match="PROGRAM linear stage must be LINEAR op, got SOURCE"):
        add_stage(make_program(SINK), Ops.SOURCE, "")
    with pytest.raises(CompileError, match="PROGRAM source stage must hold str, got bytes"):
        add_stage(add_stage(make_program(SINK), Ops.LINEAR, LINEAR.arg), Ops.SOURCE, b"")
    lowered: Program = LINEAR.arg
    for linear, said in ((Program(lowered.spec, ()), "describes 1 phases and has code for 0"),
                         (Program(lowered.spec, (lowered.code[0][1:],)), "phase svod_p0"),
                         (lower_kernel(Kernel(HAND["two_outputs"]()), TARGET), "phase svod_p0.*[Ss]lot|ARG|argument")):
        with pytest.raises(CompileError, match=said):
            build(add_stage(make_program(SINK), Ops.LINEAR, linear), TARGET)
    k = Ast()
    r, = k.axes(5)
    with pytest.raises(LaunchError, match=r"at the slots \[0, 2\]; slots are 0, 1, … without gaps"):
        spec_of(add_stage(make_program(k.sink(k.store(k.param(0, 5), r, k.load(k.param(2, 5), r), r))), Ops.LINEAR, lowered), TARGET)


# -- explicit properties --------------------------------------------------------------------------------------------------
def test_what_is_said_explicitly_wins_where_it_is_not_empty() -> None:
    empty = ProgramSpec("", (), (), (), ())
    derived = spec_of(build(make_program(grid(), DEVICES[1]), TARGET), TARGET)
    assert spec_of(build(make_program(grid(), DEVICES[1], explicit=empty), TARGET), TARGET) == derived and derived.name == "kernel"
    launch = LaunchDims((N, UOp.const(INDEX, 9), UOp.const(INDEX, 1)), None)
    said = replace(empty, name="grid", params=((F32, 2304), (F32, 2304), (F32, 4000)), ins=(0, 1, 2), temps=(64,), launch=launch)
    assert spec_of(build(make_program(grid(), DEVICES[1], explicit=said), TARGET), TARGET) == replace(
        derived, name="grid", params=said.params, ins=(0, 1, 2), temps=(64,), launch=launch)
    spec, loaded = load_program(build(make_program(grid(), DEVICES[1], explicit=said), TARGET), TARGET)
    with pytest.raises(LaunchError, match="kernel grid, slot 2: 4000 elements of float32 need 16000 bytes; buffer 2 has 9216"):
        ExecutionPlan.of_kernel(spec, loaded, [np.zeros(2304, np.float32) for _ in range(3)])


@pytest.mark.parametrize(("changes", "error", "said"), [
    ({"outs": (0,)}, CompileError, "phase svod_p1"),                                # the code writes slot 1
    ({"outs": (7,)}, LaunchError, r"slots it writes are \(7,\)"),
    ({"ins": (2, 1)}, LaunchError, r"slots it reads are \(2, 1\)"),
    ({"ins": (3,)}, LaunchError, r"slots it reads are \(3,\)"),
    ({"variables": ("v1",)}, LaunchError, "its launch depends on v0, v1; its variables are v1"),
    ({"launch": LaunchDims((number(0), number(1), number(1)))}, LaunchError, "launch dimension 0 evaluated to non-positive value 0"),
    ({"phases": (PhaseSpec("a", 1, 1, 0),)}, CompileError, "describes 1 phases and has code for 2"),
])
def test_what_is_said_explicitly_must_fit_the_code(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        build(make_program(grid(), DEVICES[1], explicit=replace(ProgramSpec("", (), (), (), ()), **changes)), TARGET)


# -- launched -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_a_launch_by_variables_runs_at_every_size_and_refuses_none(device: str) -> None:
    spec, loaded = load_program(build(make_program(grid(), device), TARGET), TARGET)
    rng = np.random.default_rng(2)
    z, y, b = (rng.integers(-3, 4, 2304).astype(np.float32) for _ in range(3))
    plan = ExecutionPlan.of_kernel(spec, loaded, [z, y, b])
    for n, m in ((64, 9), (1, 1), (7, 3)):
        want_z, want_y = z.reshape(9, 64, 4).copy(), y.reshape(9, 64, 4).copy()
        part = np.s_[:m, :n]
        factor = b.reshape(9, 64, 4)[part]
        want_z[part] = want_y[part] * factor
        want_y[part] += factor
        plan.execute(v0=n, v1=m)
        np.testing.assert_array_equal(z, want_z.reshape(-1))
        np.testing.assert_array_equal(y, want_y.reshape(-1))
    for values, said in (({"v0": 0}, "launch dimension 0 evaluated to non-positive value 0"),
                         ({"v0": 65}, r"variable v0=65 is outside bounds \[0, 64\]")):
        with pytest.raises(LaunchError, match=said):
            plan.execute(**values)
    assert plan.variable_values() == {"v0": 7, "v1": 3}     # refused values have changed nothing


SIZES: dict[str, tuple[UOp, Callable[[int, int], int]]] = {
    "less": (N - 5, lambda n, m: n - 5), "more": (N * 2 + 1, lambda n, m: 2 * n + 1), "quarters": (N // 4, lambda n, m: n // 4),
    "rounded up": ((N + 3) // 4, lambda n, m: -(-n // 4)), "remainder": (N % 7, lambda n, m: n % 7), "product": (N * M, lambda n, m: n * m),
    "larger": (N.alu(Ops.MAX, M), lambda n, m: max(n, m)), "distance": (UOp(Ops.ABS, INDEX, (N - 30,)), lambda n, m: abs(n - 30)),
    "negated": (UOp(Ops.NEG, INDEX, (M - 20,)), lambda n, m: 20 - m), "bound": (UOp(Ops.BIND, INDEX, (N, number(9))), lambda n, m: 9),
    "converted": (UOp(Ops.CAST, dtypes.int16, (UOp(Ops.AFTER, INDEX, (N + M, UOp(Ops.STORE))),)), lambda n, m: n + m),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_launch_of_every_kind_of_size_covers_what_it_says(name: str) -> None:
    """The launch computes y[:size] = x·2 + n·m and no further element, for sizes made of every allowed operation."""
    extent, size = SIZES[name]
    k = Ast()
    at = position("g0", extent)
    ast = k.sink(k.store(k.param(0, 600), at, k.load(k.param(1, 600), at) * 2.0 + (N * M).cast(F32)))
    spec, loaded = load_program(build(make_program(ast, DEVICES[1]), TARGET), TARGET)
    x = np.arange(600, dtype=np.float32)
    rng = random.Random(name)
    for n, m in ((64, 9), (0, 1), *((rng.randint(0, 64), rng.randint(1, 9)) for _ in range(6))):
        y = np.zeros(600, np.float32)
        plan = ExecutionPlan.of_kernel(spec, loaded, [y, x])
        if size(n, m) <= 0:
            with pytest.raises(LaunchError, match=f"launch dimension 0 evaluated to non-positive value {size(n, m)}"):
                plan.execute(v0=n, v1=m)
        else:
            plan.execute(v0=n, v1=m)
        np.testing.assert_array_equal(y, np.where(np.arange(600) < size(n, m), x * 2 + n * m, 0))


EXTENTS = (1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17)
NAMES = ("g0", "gidx1", "l0", "lidx1", "g2", "l2", "g3")


def random_kernel(rng: random.Random) -> tuple[UOp, list[int], tuple[int, ...], tuple[int, ...], int, str]:
    """Draw a kernel y[positions in one order] = f(x[positions in another order, r]), where f is elementwise, a sum over r, or a sum over r
    of a stage of x. Returns it with the extents of the positions, both orders, the extent of r and the kind of f."""
    k = Ast()
    names = rng.sample(NAMES, rng.randint(1, 4))
    extents = [rng.choice(EXTENTS) for _ in names]
    if rng.random() < 0.3:
        names = [f"i{n}" for n in range(len(names))]
    nodes = [position(name, e) for name, e in zip(names, extents, strict=True)]
    if rng.random() < 0.3 and names[0][0] != "i" and "g0" not in names:
        nodes[0] = core(extents[0] - 1)
    kind, depth = rng.choice(("elements", "sums", "stage")), 1
    if kind != "elements":
        depth = rng.choice(EXTENTS)
    orders = [tuple(rng.sample(range(len(nodes)), len(nodes))) for _ in range(2)]

    def flat(order: tuple[int, ...]) -> UOp:
        at = number(0)
        for n in order:
            at = at * extents[n] + nodes[n]
        return at
    size = math.prod(extents)
    y, x = k.param(0, size), k.param(1, size * depth)
    r, q = k.axes(depth, depth)
    if kind == "elements":
        value = k.load(x, flat(orders[1])) * 2.0 + nodes[0].cast(F32)
    elif kind == "sums":
        value = k.reduce("ADD", k.load(x, flat(orders[1]) * depth + r), r)
    else:
        value = k.reduce("ADD", k.read(k.stage(k.load(x, flat(orders[1]) * depth + q) + nodes[0].cast(F32), q), r), r)
    return k.sink(k.store(y, flat(orders[0]), value)), extents, orders[0], orders[1], depth, kind


def in_numpy(extents: list[int], to: tuple[int, ...], of: tuple[int, ...], depth: int, kind: str, x: Any) -> Any:
    """Compute the results of a random kernel with NumPy."""
    first = np.arange(extents[0], dtype=np.float32).reshape([extents[0] if n == 0 else 1 for n in of])
    x = x.reshape([*(extents[n] for n in of), depth])
    values = x[..., 0] * 2 + first if kind == "elements" else (x + first[..., None] * (kind == "stage")).sum(-1)
    return values.transpose([of.index(n) for n in to]).reshape(-1)


@pytest.mark.parametrize("seed", a_half(range(count(24))))
def test_random_kernels_over_positions_agree_with_numpy_under_random_opts(seed: int) -> None:
    """Interpreted and as machine code, random chains give NumPy's results; also if the kernel is called in a graph, with both compilers."""
    rng = random.Random(seed)
    ast, extents, to, of, depth, kind = random_kernel(rng)
    case = Case(Kernel(ast), seed)
    want = in_numpy(extents, to, of, depth, kind, case.args[1])
    np.testing.assert_array_equal(case.want[0], want)
    sizes = launch_of(ast).at({})
    assert math.prod((*sizes.global_size, *(sizes.local_size or ()))) == math.prod(extents)
    state = random_state(rng, Scheduler(case.kernel, TARGET), rng.randint(1, 6))
    lowered = lower(state)
    validate(lowered)
    assert lowered.spec.launch.at({}) == sizes
    if lowered.size < 500:
        run_interpreted(case, lowered, rng.randint(1, 3))
        run_native(case, lowered, TARGET, rng.randint(1, 3))
    if seed % 6 == 0:
        for device in DEVICES:
            y, = svod.call_kernel(ast, Tensor(np.zeros(want.size, np.float32)), Tensor(case.args[1]))
            plan = y.prepare(PrepareConfig(device=device, db=":none:", object_cache=":none:"))
            assert plan.kernels[0].spec.launch.at({}) == sizes
            plan.execute()
            np.testing.assert_array_equal(y.numpy(), want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_over_positions_is_called_by_variables_and_in_loops(device: str) -> None:
    """For each i the kernel is called with row i of x; the number of groups of its launch is the variable m."""
    k = Ast()
    turn, rows = UOp(Ops.DEFINE_VAR, INDEX, (), ("i", 0, 3)), UOp(Ops.DEFINE_VAR, INDEX, (), ("m", 0, 6))
    g, part = position("g0", rows), position("l0", 5)
    at = g * 5 + part
    ast = k.sink(k.store(k.param(0, 30), at, k.load(k.param(0, 30), at) * 2.0 + k.load(k.param(1, 20), turn * 5 + part)))
    x, want = np.random.default_rng(4).integers(-4, 5, (4, 5)).astype(np.float32), np.ones((6, 5), np.float32)
    y = Tensor(want.copy())
    with svod.call_loop(4) as i:
        svod.call_kernel(ast, y, Tensor(x), i=i, m=3)
    for row in x:
        want[:3] = want[:3] * 2 + row
    plan = y.prepare(PrepareConfig(device=device, db=":none:", object_cache=":none:"))
    assert len(plan.kernels) == 4 and {p.spec.launch.at({}) for p in plan.kernels} == {Sizes((3, 1, 1), (5, 1, 1))}
    plan.execute()
    np.testing.assert_array_equal(y.numpy(), want.reshape(-1) if y.ndim == 1 else want)


def copy(at: UOp, value: UOp | None = None) -> UOp:
    """Make the kernel y[at] = x[at] times a value."""
    k = Ast()
    loaded = k.load(k.param(1, 8), at)
    return k.sink(k.store(k.param(0, 8), at, loaded if value is None else loaded * value.cast(F32)))


ROWS, GROUP, PART = UOp(Ops.DEFINE_VAR, INDEX, (), ("m", 0, 4)), position("g0", 4), position("l0", 2)
CALLS: dict[str, tuple[UOp, dict[str, Any], type[Exception], str]] = {
    "no groups": (copy(position("g0", ROWS) * 2 + PART), {"m": 0}, ScheduleError,
                  "cannot be launched: launch dimension 0 evaluated to non-positive value 0"),
    "no value of a variable": (copy(position("g0", ROWS) * 2 + PART), {}, ScheduleError, "reads the variable m, which has no BIND"),
    "a core is given": (copy(core(7)), {"core_id": 1}, ArgumentError, "reads no variable core_id; it reads none"),
    "outside": (copy(GROUP * 3 + PART), {}, ScheduleError, "reaches elements 0 to 10 of slot 1, which has 8"),
    "twice": (copy(GROUP + PART), {}, ScheduleError, "may write an element of slot 0 for several values"),
    "not counted": (copy(GROUP, PART), {}, CompileError, "does not count position l0"),     # y[g] = x[g]·l0: for which l0?
    "another name": (copy(position("warp", 8)), {}, CompileError, "no position of a launch"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_kernels_over_positions_that_are_refused(name: str) -> None:
    ast, variables, error, said = CALLS[name]
    x, y = Tensor(np.ones(8, np.float32)), Tensor(np.ones(8, np.float32))
    with pytest.raises(error, match=said):
        svod.call_kernel(ast, x, y, **variables)
    np.testing.assert_array_equal(x.numpy(), np.ones(8, np.float32))     # nothing was assigned
