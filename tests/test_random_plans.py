"""Random graphs through the whole pipeline: NumPy's results under every planner mode, with and without the schedule cache, run after run
and from four threads at once. `--random-plans 200` for more of them."""
from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from svod import Tensor
from svod.compile.planner import PlannerMode
from svod.config import PrepareConfig
from svod.core.buffer import buffer_of
from svod.core.uop import UOp
from svod.prepare import Prepared, prepare_graph
from tests.core.test_schedule import RandomGraph
from tests.core.test_schedule_order import Program
from tests.graph_reference import evaluate_graph

Array = np.ndarray[Any, np.dtype[Any]]
MODES: tuple[PlannerMode, ...] = ("arena", "remap", "disabled")
THREADS = 4


def grown(seed: int) -> tuple[RandomGraph, list[UOp]]:
    """A random graph over real buffers, and its outputs: the last node and up to two before it, views and inputs among them."""
    g = RandomGraph(seed)
    g.grow(5 + seed % 13)
    for b, content in g.contents.items():
        buffer_of(b).bind(content)
    return g, [g.nodes[-1], *g.rng.sample(g.nodes, min(len(g.nodes), seed % 3))]


def expected(outputs: list[UOp]) -> list[Array]:
    return [evaluate_graph(u).ravel().copy() for u in outputs]


def assert_outputs(prepared: Prepared, wanted: list[Array], what: str) -> None:
    for i, (found, want) in enumerate(zip(prepared.plan.outputs, wanted, strict=True)):
        np.testing.assert_array_equal(found, want, f"output {i}, {what}")


def run_from_threads(prepared: Prepared, contents: list[dict[UOp, Array]], wanted: list[list[Array]], what: str) -> None:
    """Every thread fills the inputs its own way, runs and compares as one step; then all run at will."""
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
            prepared = prepare_graph(outputs, PrepareConfig(memory_planner=mode, disable_schedule_cache=not cached, threads=2))
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


def test_random_statements(random_plan: int) -> None:
    """Plans with state: every run goes on from what the one before assigned, whole arrays and parts of them."""
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
