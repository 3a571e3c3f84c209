"""The schedule cache: a cached schedule equals a newly made one, with the buffers of the current graph."""
from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.origin import scope
from svod.core.ir.uop import UOp
from svod.core.ir.variable import Variable, without_binds
from svod.core.schedule import schedule_cache
from svod.core.schedule.schedule import Schedule, create_schedule
from svod.core.schedule.schedule_cache import normal_form, schedule_of
from svod.errors import ScheduleError
from svod.tensor import Tensor
from svod.tensor.callbacks import custom_function
from tests.core.schedule.test_schedule import RandomGraph
from tests.core.scheduling import run_schedule
from tests.graph_reference import evaluate_graph


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[UOp]:
    """Start with an empty cache; gives the list of SINKs that were scheduled and not found in it."""
    sinks: list[UOp] = []

    def counted(sink: UOp, *args: Any, **more: Any) -> Schedule:
        sinks.append(sink)
        return create_schedule(sink, *args, **more)

    monkeypatch.setattr(schedule_cache, "_schedules", OrderedDict())
    monkeypatch.setattr(schedule_cache, "create_schedule", counted)
    return sinks


def ones(n: int = 4) -> Tensor:
    return Tensor(np.ones(n, np.float32))


def test_other_buffers_share_a_schedule_and_get_their_own_arguments(made: list[UOp]) -> None:
    for seed in range(12):
        first, second = RandomGraph(seed), RandomGraph(seed)
        for g in (first, second):
            g.grow(9)
        before = len(made)
        for g in (first, second):
            g.contents = {b: a + (1 if g is second else 0) for b, a in g.contents.items()}
            outputs = [g.nodes[-1], g.nodes[-2]]
            schedule = schedule_of(graph.sink(*outputs))
            assert schedule == create_schedule(graph.sink(*outputs))
            memory = run_schedule(schedule, g.contents)
            for output, buffer in zip(outputs, schedule.outputs, strict=True):
                np.testing.assert_array_equal(memory[buffer], evaluate_graph(output, g.contents).ravel())
        assert len(made) == before + 1


CHANGES: dict[str, Callable[[], tuple[Tensor, frozenset[UOp]]]] = {
    "as it is": lambda: (ones() + ones() * 2, frozenset()),
    "one buffer for two": lambda: ((x := ones()) + x * 2, frozenset()),
    "another constant": lambda: (ones() + ones() * 3, frozenset()),
    "the same constant of another type": lambda: (ones().cast(dtypes.int32) + ones() * 2, frozenset()),
    "another size": lambda: (ones(5) + ones(5) * 2, frozenset()),
    "another shape": lambda: (ones().reshape(2, 2) + ones().reshape(2, 2) * 2, frozenset()),
    "another order": lambda: (ones() * 2 + ones(), frozenset()),
    "a weight": lambda: ((x := ones()) + ones() * 2, frozenset({base_of(x.uop)})),
}


def test_what_a_schedule_depends_on_makes_another(made: list[UOp]) -> None:
    digests = {}
    for name, build in CHANGES.items():
        pairs = [build() for _ in range(2)]
        found = {normal_form(graph.sink(t.uop), constants).digest for t, constants in pairs}
        assert len(found) == 1, f"{name}: built twice"
        digests[name] = found.pop()
    assert len(set(digests.values())) == len(digests)


def test_calls_say_where_this_graph_comes_from(made: list[UOp]) -> None:
    def origins(path: str) -> list[str]:
        with scope(path):
            y = (ones(8).reshape(2, 4) @ ones(12).reshape(4, 3)).relu()
        return [c.origin for c in schedule_of(graph.sink(y.uop)).calls]

    assert [origins(p) for p in ("encoder", "decoder", "encoder")] == [["encoder"], ["decoder"], ["encoder"]]
    assert len(made) == 1


@pytest.mark.parametrize("keeps", [False, True])
def test_a_script_that_has_moved_or_grown_has_the_same_schedule(made: list[UOp], shelf: Shelf, monkeypatch: pytest.MonkeyPatch,
                                                                keeps: bool) -> None:
    """Origins are numbered: calls name the lines of the graph that asks, also for a schedule that another script left on disk."""
    lines = ["hidden = x @ w", "y = (hidden.tanh() * 2).sum(1, keepdim=True) + (x @ w.exp())"]
    for path, above in (("/a/model.py", 0), ("/a/model.py", 1), ("/elsewhere/b.py", 5)):
        if keeps:
            of_another_process(monkeypatch)
        given = {"x": ones(8).reshape(2, 4), "w": ones(12).reshape(4, 3)}
        exec(compile("\n" * above + "\n".join(lines), path, "exec"), given)
        schedule = schedule_of(graph.sink(given["y"].uop), keeper=shelf if keeps else None)
        assert schedule == create_schedule(graph.sink(given["y"].uop))
        assert {c.origin for c in schedule.calls} == {f"{path}:{above + 1}", f"{path}:{above + 2}"}
    assert len(made) == 1 and not any("model.py" in text for text in shelf.texts.values())


def test_which_calls_share_an_origin_makes_another_schedule(made: list[UOp]) -> None:
    """A call whose kernel may come from either of two lines names the right one."""
    for names in (("a", "a"), ("a", "b"), ("c", "d")):
        with scope(names[0]):
            hidden = ones(8).reshape(2, 4) @ ones(12).reshape(4, 3)
        with scope(names[1]):
            sink = graph.sink((hidden.tanh() @ ones(3)).uop)
        assert schedule_of(sink) == create_schedule(sink)
    assert len(made) == 2


def test_outputs_that_are_buffers_of_the_graph(made: list[UOp]) -> None:
    for _ in range(2):
        x = ones()
        buffer = base_of(x.uop)
        assert schedule_of(graph.sink(x.uop, (x + 1).uop)).outputs[0] is buffer
        y = ones().assign(x)
        assert schedule_of(graph.sink(y.uop)).calls[0].args[1] is buffer
    assert len(made) == 2


def test_off_means_off_and_the_first_in_goes_first(made: list[UOp], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_cache, "MOST_SCHEDULES", 2)
    for n in (2, 2):
        schedule_of(graph.sink((ones(n) + 1).uop), remember=False)
    assert len(made) == 2 and not schedule_cache._schedules
    for n in (2, 3, 2, 4, 3, 2):    # 4 puts out 2, although 2 was used last
        schedule_of(graph.sink((ones(n) + 1).uop))
    assert len(made) - 2 == 4 and len(schedule_cache._schedules) == 2


def test_what_cannot_be_scheduled_is_not_remembered(made: list[UOp]) -> None:
    for _ in range(2):
        with pytest.raises(ScheduleError, match="SINK"):
            schedule_of((ones() + 1).uop)
    assert len(made) == 2 and not schedule_cache._schedules


def test_four_threads_get_schedules_of_their_own_buffers(made: list[UOp]) -> None:
    def work(seed: int) -> None:
        g = RandomGraph(seed % 3)
        g.grow(6)
        schedule = schedule_of(graph.sink(g.nodes[-1]))
        found = run_schedule(schedule, g.contents)[schedule.outputs[0]]
        np.testing.assert_array_equal(found, evaluate_graph(g.nodes[-1], g.contents).ravel())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(40)))
    assert len(schedule_cache._schedules) == 3


class Shelf:
    """Keeps data as JSON text, as a file would."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def lacks(self, name: str) -> bool:
        return name not in self.texts

    def kept(self, name: str) -> Any:
        text = self.texts.get(name)
        return None if text is None else json.loads(text)

    def keep(self, name: str, data: Any) -> None:
        self.texts[name] = json.dumps(data)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(schedule_cache, "LEAST_BUFFERS", 1)
    return Shelf()


def of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_cache, "_schedules", OrderedDict())


@pytest.mark.parametrize("seed", range(12))
def test_a_kept_schedule_equals_a_new_one(made: list[UOp], shelf: Shelf, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for _ in range(2):
        of_another_process(monkeypatch)
        g = RandomGraph(seed)
        g.grow(9)
        sink = graph.sink(g.nodes[-1], g.nodes[-2])
        schedule = schedule_of(sink, keeper=shelf)
        assert schedule == create_schedule(sink)
        memory = run_schedule(schedule, g.contents)
        np.testing.assert_array_equal(memory[schedule.outputs[0]], evaluate_graph(g.nodes[-1], g.contents).ravel())
    assert len(made) == len(shelf.texts) == 1


def test_a_kept_schedule_has_variables_origins_and_the_order_of_its_calls(made: list[UOp], shelf: Shelf,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    n = Variable("n", 1, 12)

    def sink() -> UOp:
        with scope("layer"):
            x = Tensor(np.ones(12, np.float32))[:n.bind(5)]
            memory = ones(12)
            memory[:3] = memory[3:6] + x.sum()
            return graph.sink((x * 2).uop, memory.uop, (memory + 1).uop)
    for _ in range(2):
        of_another_process(monkeypatch)
        nodes = without_binds(sink())[0]
        assert schedule_of(nodes, keeper=shelf) == create_schedule(nodes)
    assert len(made) == 1 and any(c.variables for c in create_schedule(nodes).calls)


def test_what_a_schedule_depends_on_is_kept_apart(made: list[UOp], shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    for build in CHANGES.values():
        for _ in range(2):
            of_another_process(monkeypatch)
            t, constants = build()
            schedule_of(graph.sink(t.uop), constants, keeper=shelf)
    assert len(made) == len(shelf.texts) == len(CHANGES)


def test_schedules_of_small_graphs_and_without_the_cache_are_not_kept(made: list[UOp], shelf: Shelf,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_of(graph.sink((ones() + 1).uop), remember=False, keeper=shelf)
    monkeypatch.setattr(schedule_cache, "LEAST_BUFFERS", 2)
    schedule_of(graph.sink((ones() + 1).uop), keeper=shelf)
    assert not shelf.texts
    schedule_of(graph.sink((ones() + ones()).uop), keeper=shelf)
    assert len(shelf.texts) == 1


def test_a_schedule_in_memory_is_kept_where_it_is_not(made: list[UOp], shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, second = graph.sink((ones() + ones() * 2).uop), Shelf()
    for keeper in (None, shelf, second, shelf):
        schedule_of(sink, keeper=keeper)
    assert len(made) == 1 and shelf.texts == second.texts and len(shelf.texts) == 1
    monkeypatch.setattr(Shelf, "keep", None)        # it is there, and not written again
    schedule_of(sink, keeper=shelf)
    of_another_process(monkeypatch)
    assert schedule_of(sink, keeper=shelf) == create_schedule(sink) and len(made) == 1


def test_schedules_that_call_functions_of_python_are_not_kept(made: list[UOp], shelf: Shelf) -> None:
    """The numbers of functions identify them in one process only."""
    def doubled(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return a * 2
    for _ in range(2):
        y = custom_function(doubled, ones(), shape=(4,), dtype="float32")
        schedule_of(graph.sink(y.uop), keeper=shelf)
    assert len(made) == 1 and not shelf.texts


@pytest.mark.parametrize("wrong", [7, [], {}, {"nodes": {}}, {"nodes": None, "outputs": [], "calls": []}, "outputs", "calls", "nodes",
                                   "row", "buffer", "origin"])
def test_data_that_is_no_schedule_is_replaced(made: list[UOp], shelf: Shelf, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    sink = graph.sink((ones() + ones() * 2).uop)
    schedule_of(sink, keeper=shelf)
    (name, text), = shelf.texts.items()
    data = json.loads(text)
    if wrong == "row":
        data["calls"][0].pop()
    elif wrong in ("buffer", "origin"):
        data["calls"][0][1 if wrong == "buffer" else 4] = [99] if wrong == "buffer" else 99
    elif isinstance(wrong, str):
        data[wrong] = [[99]] if wrong == "outputs" else [*data[wrong][:-1], [99]] if wrong == "calls" else {"format": 0}
    shelf.keep(name, data if isinstance(wrong, str) else wrong)
    of_another_process(monkeypatch)
    assert schedule_of(sink, keeper=shelf) == create_schedule(sink)
    assert len(made) == 2 and shelf.texts[name] == text
