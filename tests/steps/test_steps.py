"""The steps of one kernel: every pass that dumps know, each opt with the loops after it, and errors of steps that cannot be made."""
from __future__ import annotations

from dataclasses import replace

import pytest

import svod
from svod.compile.backend import backend_named
from svod.compile.plan.kernel_form import KERNEL_PASSES, KernelForm, KernelPass
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.tree.show import print_nest
from svod.errors import CompileError
from svod.steps import steps as steps_module
from svod.steps.page import render_kernel
from svod.steps.plan_steps import part_of_kernel
from svod.steps.steps import NEST, as_text, steps_of
from svod.tune.hand_kernel import HandKernel
from tests.core.corpus import data
from tests.steps.pages import kernels_of, read_page, sides_of, title_of

CHAIN = "UPCAST(o0, 4) UPCAST(o1, 8) ORDER(out, o1,o0)"
ON_A_CPU = tuple(p.name for p in KERNEL_PASSES if p.name not in ("llvm-optimized", "sass"))   # others are of GPUs


@pytest.fixture
def gemm() -> HandKernel:
    return svod.kernel(data(16, 8) @ data(8, 24), config=svod.PrepareConfig(db=":none:", threads=1)).apply(CHAIN)


def form_of(k: HandKernel) -> KernelForm:
    return KernelForm(k.kernel, k.state.target, k.opts, k.state.target.device)


def test_each_opt_and_each_pass_is_a_step(gemm: HandKernel) -> None:
    steps = gemm.steps().steps
    assert [s.title for s in steps] == ["canonical AST", "as it is", *map(str, gemm.opts), *ON_A_CPU]
    states = [apply_opts(gemm.untouched().state, gemm.opts[:n]) for n in range(len(gemm.opts) + 1)]
    nests = [s for s in steps if s.language == NEST]
    assert [s.text for s in nests] == [print_nest(state) for state in states]
    assert [s.cycles for s in nests] == [backend_named("CPU").cost(state).cycles for state in states]
    assert [s.before for s in nests] == [None, *nests[:-1]]
    assert nests[1].share == nests[1].cycles / nests[0].cycles  # type: ignore[operator]
    assert next(s for s in steps if s.name == "linear").text == gemm.linear()


def test_a_pass_that_is_added_shows_up_and_is_compared(gemm: HandKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass added between the loops and LINEAR, in the language of the loops: exactly its change is marked."""
    peeled = KernelPass("peel", "a loop's first turn", None, NEST, lambda form: form.nest().replace("acc = 0", "acc = first"))
    monkeypatch.setattr(steps_module, "KERNEL_PASSES", (peeled, *KERNEL_PASSES))
    page = read_page(render_kernel(part_of_kernel(form_of(gemm), gemm.name)))
    step = next(s for s in kernels_of(page)[gemm.name] if title_of(s) == "peel")
    assert [row for row in sides_of(step) if row[1] != " "] == [("      acc = 0", "~", "      acc = first")]
    assert [m.text for m in step.every("mark")] == ["0", "first"]


def test_text_for_a_terminal(gemm: HandKernel) -> None:
    text = str(gemm.steps())
    assert text == as_text(gemm.steps().steps) and "-- opts: UPCAST(o0, 4) --" in text
    assert "−   for o0 in 0…16\n+   for o0 in 0…16 by 4\n" in text and "\n+       tile o0 4\n" in text
    opts, tree = text.split("-- tree --")
    assert "as before" not in opts and "as before" in str(gemm.apply("LANES(o1.in)").steps()).split("-- tree --")[0]
    assert "-- skips --\nas before" in tree


def test_an_opt_that_does_not_apply_and_what_follows(gemm: HandKernel) -> None:
    form = replace(form_of(gemm), chain=parse_chain("UPCAST(o0, 4) UPCAST(o0.in, 4) THREAD(o1, 2)"))
    steps = steps_of(form)
    refused = next(s for s in steps if s.title.startswith("UPCAST(o0.in"))
    assert refused.problem and not refused.text and not [s for s in steps if s.title.startswith("THREAD")]
    assert all(s.problem == refused.problem for s in steps if s.name in ("linear", "llvm", "asm"))
    page = read_page(render_kernel(part_of_kernel(form, "k")))
    assert page.every("p", "warning")[0].text == refused.problem


def test_a_compiler_that_fails_and_tools_that_are_missing(gemm: HandKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(form: KernelForm) -> str:
        raise CompileError("no such <tool> & no other")
    monkeypatch.setattr(steps_module, "KERNEL_PASSES", tuple(replace(p, show=fails) if p.name == "asm" else p for p in KERNEL_PASSES))
    page = read_page(render_kernel(part_of_kernel(form_of(gemm), gemm.name)))
    steps = {title_of(s): s for s in kernels_of(page)[gemm.name]}
    assert steps["asm"].every("p", "warning")[0].text == "no such <tool> & no other"
    assert "sass" not in steps and not steps["llvm"].every("p", "warning")      # no processor has that stage


def test_targets_that_are_not_there() -> None:
    k = svod.kernel(data(32, 32) @ data(32, 32), config=svod.PrepareConfig(db=":none:", device="CUDA:sm_90")).heuristic()
    steps = {s.name: s for s in k.steps().steps}
    assert ".visible .entry" in steps["asm"].text and "define " in steps["llvm"].text
    facts = dict(k.steps().part.facts)
    assert any(name.startswith("groups") for name in facts) and "sm_90" in facts["target"]


def test_a_library_kernel_has_no_opts() -> None:
    plan = data(64).sort()[0].prepare(config=svod.PrepareConfig(db=":none:"))
    form = next(k.form for k in plan.kernels if isinstance(k.form, KernelForm) and k.form.kernel.library_kernel is not None)
    assert [s.name for s in steps_of(form)] == ["canonical", *ON_A_CPU]


def test_opts_are_described(gemm: HandKernel) -> None:
    assert all(s.about for s in gemm.steps().steps)
    assert steps_module.about_opt("UPCAST") == "Compute n positions of an axis side by side in registers"
    assert steps_module.about_opt("NONE") == ""


