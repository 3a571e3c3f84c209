"""`svod.explain`: every node and every kernel is told, with the rule that cut it; the tensors stay as they are."""
from __future__ import annotations

import re

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.core.graph import graph
from svod.core.ir.uop import Ops
from svod.core.schedule.schedule import create_schedule, explain_schedule
from svod.errors import ArgumentError, ScheduleError
from tests.bench.example_run import CEILINGS
from tests.core.corpus import data


@pytest.fixture(autouse=True)
def _nothing_known_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOD_TUNE_DB", ":none:")
    monkeypatch.setattr("svod.bench.roofline.cached_ceilings", lambda *args, **options: CEILINGS)


def test_two_kernels_and_why() -> None:
    y = data(16, 8) @ data(8, 24)
    both = y.softmax(-1)
    text = svod.explain(both, y)
    assert repr(text) == str(text) == text
    kernels = text[text.index("kernels: "):text.index("\nplan\n")]
    assert kernels.startswith("kernels: 2, each") and kernels.count("because: it is an output") == 2
    product = next(line for line in text.split("\n") if "reduce add over 2" in line)
    assert product.split()[0] in kernels and "kernel 0" in product and "float32 16×24×1" in product
    assert re.search(r"1  softmax  float32 16×24  stores \d+, from \d+", kernels)
    assert "critical path" in text and both.uop.op is not Ops.BUFFER, "explaining computes nothing"


def test_a_value_that_two_kernels_compute_is_told_for_both() -> None:
    x = data(6, 5)
    shared = x * 2
    text = svod.explain(shared.sum(0), shared.max(1))
    assert "kernel 0, 1" in next(line for line in text.split("\n") if "mul" in line and "float32 6×5" in line)


def test_what_needs_no_kernel() -> None:
    x = Tensor(np.ones((3, 4), np.float32))
    text = svod.explain(x.reshape(4, 3))
    assert "kernels: none" in text and "buffer" in text and "critical path" not in text
    assert "because: it is an output" in svod.explain(x.transpose(0, 1)), "in another order it is a copy"
    with pytest.raises(ScheduleError, match="at least one"):
        svod.explain()
    with pytest.raises(ArgumentError, match="explain takes tensors, one by one"):
        svod.explain([data(3)])  # type: ignore[arg-type]


def test_arguments_are_shown() -> None:
    x = data(1, 2, 9, 9)
    text = svod.explain(x.pad(((0, 0), (0, 0), (1, 2), (0, 0))).max_pool2d(3, stride=2, dilation=2) + 1.5)
    assert "pad 0+0, 0+0, 1+2, 0+0 with 0" in text and "axis 2: 3 by 2, dilated 2" in text and "1.5" in text
    assert "flip 0" in svod.explain(data(4).flip(0) + 1)


def test_roots_of_calls() -> None:
    """A swap of two buffers needs a copy that stores no node of the graph; everything else stores one."""
    y = (data(16, 8) @ data(8, 24)).softmax(-1)
    found = explain_schedule(graph.sink(y.uop))
    plain = create_schedule(graph.sink(y.uop))
    assert [c.ast for c in found.schedule.calls] == [c.ast for c in plain.calls]
    assert len(found.roots) == len(plain.calls) and found.roots[-1] is found.graph.outputs[0]
    assert all(r is not None and c.args[0].arg == graph.size_of(r) for c, r in zip(plain.calls, found.roots, strict=True))


def test_a_function_and_a_plan() -> None:
    @svod.jit
    def model(x: Tensor) -> Tensor:
        return (x @ data(8, 24)).softmax(-1)
    with pytest.raises(ArgumentError, match=r"model has no plan yet: .*call it with its arguments"):
        svod.explain(model)
    model(np.ones((16, 8), np.float32))
    model(np.ones((4, 8), np.float32))
    text = svod.explain(model)
    assert text.startswith("plan 0 of 2: <ExecutionPlan 2 kernels, inputs ") and "plan 1 of 2: " in text
    assert text.count("critical path") == 2
    for plan in model.plans:
        assert svod.explain(plan) in text
        assert all(k.chain in text and f"because: {k.cut}" in text for k in plan.kernels if k.cut != "output")
    with pytest.raises(ArgumentError, match=r"or one function under svod\.jit, or one plan; got Jit"):
        svod.explain(model, data(3))
