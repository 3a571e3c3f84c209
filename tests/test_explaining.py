"""`svod.explain`: it shows every node and every kernel, with the rule that cut the kernel; the tensors do not change."""
from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.plan.dump import PLAN_PASSES
from svod.core.graph import graph
from svod.core.graph.shapes import size_of
from svod.core.ir.uop import Ops
from svod.core.schedule.schedule import create_schedule, explain_schedule
from svod.errors import ArgumentError, ScheduleError
from tests.bench.example_run import CEILINGS
from tests.core.corpus import data
from tests.steps.pages import Element, kernels_of, read_page, steps_in, title_of

ON_A_CPU = [p.name for p in PLAN_PASSES if p.name not in ("llvm-optimized", "sass")]     # others are of GPUs


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


@pytest.mark.slow
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
    assert all(r is not None and c.args[0].arg == size_of(r) for c, r in zip(plain.calls, found.roots, strict=True))


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


# -- the page -----------------------------------------------------------------------------------------

def page_of(tmp_path: Path, *asked: Any) -> Element:
    file = tmp_path / "steps.html"
    text = svod.explain(*asked, html=file)
    assert text == svod.explain(*asked), "the text is the same"
    return read_page(file.read_text())


def test_a_page_has_every_pass_of_every_kernel(tmp_path: Path) -> None:
    page = page_of(tmp_path, (data(16, 8) @ data(8, 24)).softmax(-1))
    kernels = kernels_of(page)
    assert list(kernels) == ["gemm_0", "softmax_1"]
    of_plan = [title_of(s) for s in steps_in(page.every("section")[0])]
    for name, steps in kernels.items():
        titles = [title_of(s) for s in steps]
        assert [p for p in ON_A_CPU if p in {*titles, *of_plan, "opts"}] == ON_A_CPU
        assert titles[:4] == ["cut", "rangeify", "axes", "canonical"] and titles[4] == "as it is" and titles[-1] == ON_A_CPU[-2], name
    rows = [[cell.text for cell in row.every("td")] for row in page.every("section")[0].every("tbody")[0].every("tr")]
    assert [row[0] for row in rows] == ["gemm_0", "softmax_1"] and all(row[1].startswith("heuristic: ") for row in rows)
    assert [row[7] for row in rows] == ["a reduction read at several places", "it is an output"]


def test_pages_of_a_function_and_of_a_plan(tmp_path: Path) -> None:
    @svod.jit
    def model(x: Tensor) -> Tensor:
        return x @ data(8, 24)
    model(np.ones((16, 8), np.float32))
    model(np.ones((4, 8), np.float32))
    page = page_of(tmp_path, model)
    assert [s.own("h2").text for s in page.every("section")] == ["plan 0 of 2", "plan 1 of 2", "Kernels"]
    alone = page_of(tmp_path, model.plans[0])
    assert [title_of(s) for s in steps_in(alone.every("section")[0])] == ["schedule", "memory"], "the graph is not known any more"
    (steps,) = kernels_of(alone).values()
    assert title_of(steps[0]) == "canonical"


def test_a_page_without_kernels_and_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    page = page_of(tmp_path, data(4).reshape(2, 2))
    assert not kernels_of(page) and "No kernel is needed" in page.text
    with pytest.raises(OSError, match="missing"):
        svod.explain(data(4) + 1, html=tmp_path / "missing" / "steps.html")


def test_names_are_escaped(tmp_path: Path) -> None:
    with svod.scope("<script>alert('1')</script>&"):
        y = data(4) + 1
    page = page_of(tmp_path, y)
    (row,) = page.every("section")[0].every("tbody")[0].every("tr")
    assert "<script>alert('1')</script>&" in row.text and "&amp;amp;" not in (tmp_path / "steps.html").read_text()


def test_a_graph_with_variables_has_its_kernels(tmp_path: Path) -> None:
    """The extent of a variable is printed as its expression."""
    n = svod.Variable("n", 1, 64, buckets=(16, 64))
    page = page_of(tmp_path, data(64, 16)[:n.bind(9)] @ data(16, 8))
    of_plan = {title_of(s): s for s in steps_in(page.every("section")[0])}
    assert "Dim(expr=" in of_plan["normalize"].text and not of_plan["normalize"].every("p", "warning") and "n 1…64" in page.text
    kernels = kernels_of(page)
    assert len(kernels) == 2, "one for each bucket"
    assert all({"canonical", "as it is", "linear", "asm"} <= {title_of(s) for s in steps} for steps in kernels.values())


def test_notebooks() -> None:
    plan = (data(16, 8) @ data(8, 24)).softmax(-1).prepare()
    shown = plan._repr_html_()
    assert read_page(shown).text.count("heuristic: ") == 2 and "gemm_0" in shown and "softmax_1" in shown
    assert [e.text for e in read_page(plan.kernels[0]._repr_html_()).every("pre")] == [plan.kernels[0].nest()]
    k = svod.kernel(plan, 0)
    assert [e.text for e in read_page(k._repr_html_()).every("pre")] == [k.nest()]
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', k.steps()._repr_html_())[1])  # type: ignore[index]
    assert list(kernels_of(read_page(page))) == ["gemm_0"]


def test_a_function_of_python_has_a_line_and_no_steps(tmp_path: Path) -> None:
    page = page_of(tmp_path, svod.custom_function(lambda x: x, data(4) + 1, shape=(4,), dtype="float32") + 1)
    rows = [[cell.text for cell in row.every("td")] for row in page.every("section")[0].every("tbody")[0].every("tr")]
    assert len(rows) == 3 and len(kernels_of(page)) == 1, "both kernels add 1"
    assert ["host callback" in row[1] for row in rows] == [False, True, False]


def test_a_page_stays_small(tmp_path: Path) -> None:
    """Kernels that occur several times are shown once, and a kernel's texts are below 400 kB."""
    x = data(16, 16)
    for _ in range(6):
        x = (x @ data(16, 16)).contiguous()
    page_of(tmp_path, x)
    one = (tmp_path / "steps.html").stat().st_size
    assert one < 400e3
