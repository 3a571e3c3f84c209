"""Random graphs, of constant and of symbolic sizes, through the whole pipeline: NumPy's results under every planner mode, with and without
the schedule cache, run after run and from four threads at once. `--random-plans 200` for more of them."""
from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor, Variable
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.memory_planner import PlannerMode
from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.buffer import buffer_of
from svod.core.graph.callback import host_function
from svod.core.graph.shapes import shape_of, size_of
from svod.core.ir.uop import UOp
from svod.core.ir.variable import layout_shape
from svod.prepare import Prepared, prepare_graph
from svod.tune.resolved import resolve
from tests.core.schedule.test_schedule import RandomGraph
from tests.core.schedule.test_schedule_order import Program
from tests.graph_reference import evaluate_graph

Array = np.ndarray[Any, np.dtype[Any]]
MODES: tuple[PlannerMode, ...] = ("arena", "remap", "disabled")
THREADS = 4


def rolled_and_sorted(x: Array, y: Array) -> tuple[Array, Array]:
    """A Python function with two results."""
    return np.roll(x, 1).astype(np.int32), np.sort(y, axis=None)


def grown(seed: int) -> tuple[RandomGraph, list[UOp]]:
    """A random graph over real buffers, and its outputs: the last node and up to two before it, views and inputs among them. In every third
    one a function of Python is called on the way."""
    g = RandomGraph(seed)
    g.grow(2 + seed % 7)
    if seed % 3 == 0:
        x, y = g.pick(), g.pick()
        results = ((x.dtype, shape_of(x)), (y.dtype, (size_of(y),)))
        g.nodes += graph.callback(host_function(rolled_and_sorted), results, True, x, y)[::seed % 2 + 1]     # one result or both
    g.grow(3 + seed % 5)
    for b, content in g.contents.items():
        buffer_of(b).bind(content)
    return g, [g.nodes[-1], *g.rng.sample(g.nodes, min(len(g.nodes), seed % 3))]


def expected(outputs: list[UOp]) -> list[Array]:
    return [evaluate_graph(u).ravel().copy() for u in outputs]


def assert_outputs(prepared: Prepared, wanted: list[Array], what: str) -> None:
    for i, (found, want) in enumerate(zip(prepared.plan.outputs, wanted, strict=True)):
        np.testing.assert_array_equal(found, want, f"output {i}, {what}")


def run_from_threads(prepared: Prepared, contents: list[dict[UOp, Array]], wanted: list[list[Array]], what: str) -> None:
    """Every thread fills the inputs in its own way, runs the plan and compares the results as one step; then all threads run freely."""
    failures: list[str] = []
    together = threading.Barrier(THREADS)

    def work(i: int) -> None:
        together.wait()
        try:
            for _ in range(3):
                with prepared.plan.lock:
                    for b, values in contents[i].items():
                        buffer_of(b).array[:] = values
                    prepared.plan.execute()
                    assert_outputs(prepared, wanted[i], f"{what}, thread {i}")
            together.wait()
            prepared.plan.execute()
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
            together.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]
    values = [i for i in range(THREADS) if all((buffer_of(b).array == v).all() for b, v in contents[i].items())]
    assert_outputs(prepared, wanted[values[0]], f"{what}, four at once")


def test_random_plans(random_plan: int) -> None:
    seed = random_plan
    rng = np.random.default_rng(seed)
    for cached in (True, True, False):          # the second time the schedule is found, over other buffers
        g, outputs = grown(seed)
        fillings = [{b: rng.integers(-9, 9, a.size).astype(a.dtype) for b, a in g.contents.items()} for _ in range(THREADS)]
        wanted = []
        for filling in fillings:
            for b, values in filling.items():
                buffer_of(b).array[:] = values
            wanted.append(expected(outputs))
        memory = {}
        for mode in MODES:
            what = f"seed {seed}, {mode}, {'with' if cached else 'without'} the schedule cache"
            prepared = prepare_graph(outputs, resolve(PrepareConfig(memory_planner=mode, disable_schedule_cache=not cached, threads=2)))
            memory[mode] = prepared.plan.memory
            for filling, want in zip(fillings, wanted, strict=True):
                for b, values in filling.items():
                    buffer_of(b).array[:] = values
                prepared.plan.execute()
                assert_outputs(prepared, want, what)
            run_from_threads(prepared, fillings, wanted, what)
            prepared.plan.release_intermediate_buffers()
            prepared.plan.repeat(2)
        assert memory["arena"].lower_bound <= memory["arena"].shared <= memory["disabled"].shared


def grown_of_sizes(rng: random.Random, parts: list[Any], concatenate: Any, where: Any) -> list[Any]:
    """A random graph of shape (n, m) throughout, over tensors or over arrays: branches, shared values, views, reductions."""
    values = list(parts)
    for _ in range(rng.randint(3, 8)):
        x, y, kind = rng.choice(values), rng.choice(values), rng.randrange(8)
        n, m = x.shape
        if kind == 0:
            values.append(x * 2 - y)
        elif kind == 1:
            values.append(x.max(1).reshape(n, 1) - y)
        elif kind == 2:
            values.append(x + y.sum(0))
        elif kind == 3:
            values.append(x[::1].reshape(1, n, m).reshape(n, m) * 3)
        elif kind == 4:
            values.append(concatenate(x, y)[:, 1:m + 1])
        elif kind == 5:
            values.append(where(x, y))
        elif kind == 6:
            values.append((x @ y.T) @ y)
        else:
            values.append(x.T.reshape(m, n, 1).max(2).T + y)
    return [values[-1], *rng.sample(values, 2)]


ROWS, COLUMNS = 37, 21
Sizes = tuple[int, int]


@pytest.mark.slow
def test_random_plans_of_symbolic_sizes(symbolic_plan: int) -> None:
    """One plan at one size after the other; at four sizes from four threads, which hold its lock until they have read; replicas of it, and
    the same tensors with bound variables and a jitted function, at four sizes at once."""
    seed = symbolic_plan
    numbers, chosen = np.random.default_rng(seed), random.Random(seed)
    arrays = [numbers.integers(-3, 3, (ROWS, COLUMNS)).astype(np.float64) for _ in range(2)]
    n, m = Variable("n", 1, ROWS), Variable("m", 2, COLUMNS)

    def graphs(parts: list[Tensor], rows: Any, columns: Any) -> list[Tensor]:
        return list(grown_of_sizes(random.Random(seed), [t[:rows, :columns] for t in parts], lambda x, y: Tensor.cat([x, y], 1),
                                   lambda x, y: svod.where(x < y, x, y)))
    tensors = [Tensor(a) for a in arrays]
    outputs = graphs(tensors, n, m)
    shape = layout_shape((n, m))
    sizes: list[Sizes] = [(1, 2), (ROWS, COLUMNS), *[(chosen.randint(2, ROWS), chosen.randint(2, COLUMNS)) for _ in range(THREADS - 2)]]
    wanted = {(r, c): grown_of_sizes(random.Random(seed), [a[:r, :c] for a in arrays], lambda x, y: np.concatenate([x, y], 1),
                                     lambda x, y: np.where(x < y, x, y)) for r, c in sizes}

    def check(found: Any, size: Sizes, what: str) -> None:
        for i, (got, want) in enumerate(zip(found, wanted[size], strict=True)):
            if got.ndim == 1:       # a plan's output is as large as its upper bound, or it is an input
                got = got.reshape((ROWS, COLUMNS) if got.size == ROWS * COLUMNS else shape)[:size[0], :size[1]]
            np.testing.assert_allclose(got, want, rtol=1e-12, err_msg=f"seed {seed}, output {i}, {what}, n, m = {size}")

    def from_threads(work: Any) -> None:
        together = threading.Barrier(THREADS)

        def started(i: int) -> None:
            together.wait()
            for k in range(2):
                work(i, sizes[(i + k) % THREADS])
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(started, i) for i in range(THREADS)]:
                done.result()

    for mode, cached in (("arena", True), ("remap", False), ("disabled", True)):
        config = PrepareConfig(memory_planner=mode, disable_schedule_cache=not cached, threads=2)
        plan = prepare_graph([t.uop for t in outputs], resolve(config)).plan
        for size in sizes:
            plan.execute(n=size[0], m=size[1])
            check(plan.outputs, size, mode)

        def shared(_: int, size: Sizes, plan: ExecutionPlan = plan, mode: str = mode) -> None:
            with plan.lock:
                plan.execute(n=size[0], m=size[1])
                check(plan.outputs, size, f"{mode}, from four threads")
        from_threads(shared)
    replicas = [plan, *[plan.replicate() for _ in range(THREADS - 1)]]

    def replica(i: int, size: Sizes) -> None:
        replicas[i].execute(n=size[0], m=size[1])
        check(replicas[i].outputs, size, "replicas")
    from_threads(replica)
    jitted = svod.jit(lambda x, y, rows, columns: graphs([x, y], rows, columns), config=config)
    from_threads(lambda _, size: check([t.numpy() for t in graphs(tensors, n.bind(size[0]), m.bind(size[1]))], size, "realized"))
    from_threads(lambda _, size: check([t.numpy() for t in jitted(*tensors, n.bind(size[0]), m.bind(size[1]))], size, "jit"))


def test_random_statements(random_plan: int) -> None:
    """Plans with state: every run continues from the assignments of the run before, to whole arrays and parts of them."""
    program = Program(random_plan, 4 + random_plan % 8)
    state = [Tensor(a.copy()) for a in program.start]
    memory = [np.asarray(t, copy=False) for t in state]
    config = PrepareConfig(memory_planner=MODES[random_plan % 3], threads=2)
    plan = Tensor.prepare_batch(program.with_svod(state), config)
    before = [program.start]

    def run() -> None:
        with plan.lock:         # the state is one: each run is compared before the next
            plan.execute()
            wanted = program.with_numpy(before[-1])
            before.append(wanted[-3:])
            for i, (found, want) in enumerate(zip([*plan.outputs[:-3], *memory], wanted, strict=True)):
                np.testing.assert_array_equal(found, want, f"output {i}, run {len(before) - 1}")

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run) for _ in range(2 * THREADS)]:
            done.result()
