"""Generated code of a few kernels, word for word: a review sees how a change of the compiler changes it.

    python -m pytest tests/compile/test_goldens.py --update-goldens        # writes tests/compile/goldens anew

A file has the chain of the heuristic, the loop nest, LINEAR, and the text that the device's own compiler is given.
"""
from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import pytest

from svod.compile.backend import backend_named
from svod.compile.lower.linear import format_linear
from svod.compile.lower.lower import lower
from svod.core.kernel.chain_text import chain_words
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.core.tree.show import print_nest
from tests.compile.cuda.target import card_target
from tests.compile.native import AVX2
from tests.core.corpus import BUILDERS, conv, data, kernel_of
from tests.core.cost.groups.test_group_cost import SOFTWARE

FOLDER = Path(__file__).with_name("goldens")
TARGETS: dict[str, Target] = {"avx2": replace(AVX2, threads=2), "sm_90": card_target("sm_90"), "webgpu": replace(SOFTWARE, device="WEBGPU")}
MORE_BUILDERS = {
    "product": lambda: data(96, 64) @ data(64, 80),
    "halves": lambda: data(64, 64, dtype="float16") @ data(64, 64, dtype="float16"),
    "softmax": lambda: data(48, 100).softmax(-1), "convolution": lambda: conv(16, 12, 14, 3, padding=1),
    "sum": lambda: data(100_000).sum()}
KERNELS = {**{name: BUILDERS[name] for name in ("cat_part", "gather_rows", "pad", "flip", "attention")}, **MORE_BUILDERS}


def generated(name: str, target: Target) -> str:
    device = backend_named(target.device)
    state = device.heuristic(Scheduler(Kernel(kernel_of(KERNELS[name]())), target))
    program = lower(state)
    parts = (chain_words([o.to_json() for o in state.applied_opts]), print_nest(state), format_linear(program),
             device.compilers[0].render(program, target))
    return "\n\n".join(part.strip() for part in parts) + "\n"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_generated_code(name: str, target: str, request: pytest.FixtureRequest) -> None:
    path, made = FOLDER / f"{name}.{target}.txt", generated(name, TARGETS[target])
    if request.config.getoption("--update-goldens"):
        path.write_text(made, encoding="utf-8")
    kept = path.read_text(encoding="utf-8")
    changes = list(difflib.unified_diff(kept.splitlines(), made.splitlines(), "kept", "made", lineterm="", n=1))
    assert not changes, "\n".join([*changes[:60], f"… {len(changes)} lines; --update-goldens writes {path.name} anew"])


def test_no_golden_is_left_over() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {f"{name}.{target}.txt" for name in KERNELS for target in TARGETS}
