"""Recorded code of a few kernels, so that a review shows how a change of the compiler changes the code.

    python -m pytest tests/compile/test_goldens.py --update-goldens        # rewrites tests/compile/goldens

A file has a chain, its loop nest, its LINEAR, and the text for the compiler of the device. The chains are fixed, so a change of the cost
model does not change the files, and their amounts are small, so the files are short.
"""
from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import pytest

from svod.compile.backend import backend_named
from svod.compile.lower.linear import format_linear
from svod.compile.lower.lower import lower
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import chain_words, parse_chain
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


CHAINS: dict[str, dict[str, str]] = {
    "product": {
        "avx2": "UPCAST(o0, 2) UPCAST(o1, 8) LANES(o1.in) STAGE(s0, o0) UNROLL(r0, 2) THREAD(o0, 2)",
        "sm_90": "LOCAL(o1, 16) UPCAST(o0, 2) GROUP(r0, 4) UNROLL(r0, 2)",
        "webgpu": "UPCAST(o0, 2) UPCAST(o1, 2) LANES(o1.in) LOCAL(o1, 5) LOCAL(o0, 6) UNROLL(r0, 2)"},
    "halves": {
        "avx2": "UPCAST(o0, 2) UPCAST(o1, 8) LANES(o1.in) STAGE(s1, o1) STAGE(s0, root) UNROLL(r0, 2) THREAD(o1, 2)",
        "sm_90": "TC(r0, mma_f16,o0,o1) UPCAST(o1, 2) LOCAL(o1, 2) STAGE(s0, r0) STAGE(s1, r0) PIPELINE(r0, 2)",
        "webgpu": "UPCAST(o0, 2) UPCAST(o1, 2) LANES(o1.in) LOCAL(o1, 8) LOCAL(o0, 8) UNROLL(r0, 2)"},
    "softmax": {
        "avx2": "UPCAST(o1, 8) STAGE(s2, o0) UPCAST(s1.r0, 8) UPCAST(s3.r0, 8)",
        "sm_90": "GROUP(s1.r0, 16) GROUP(s3.r0, 16) LOCAL(o1, 16)",
        "webgpu": "GROUP(s1.r0, 4) GROUP(s3.r0, 4) LOCAL(o1, 4)"},
    "convolution": {
        "avx2": "UPCAST(o2, 8) STAGE(s1, o1) UNROLL(r2, 0) THREAD(o1, 2)",
        "sm_90": "UNROLL(r2, 0) LOCAL(o2, 14) LOCAL(o1, 4)",
        "webgpu": "UPCAST(o0, 4) LANES(o0.in) LOCAL(o0, 3) LOCAL(o2, 2) LOCAL(o1, 7)"},
    "sum": {
        "avx2": "UPCAST(r0, 8) THREAD(r0, 2)",
        "sm_90": "GROUP(r0, 32) SPLITK(r0, 128)",
        "webgpu": "GROUP(r0, 8) SPLITK(r0, 2)"},
    "attention": {
        "avx2": "UPCAST(o2, 8) LANES(o2.in) STAGE(s4, o0) UPCAST(s2.o1, 9) LANES(s2.o1.in) STAGE(s0, o0) UPCAST(s3.r0, 9) UPCAST(s5.r0, 9)",
        "sm_90": "UPCAST(s2.r0, 4) LOCAL(o2, 8) LOCAL(o1, 5) UNROLL(r0, 2)",
        "webgpu": "UPCAST(o2, 4) LOCAL(o2, 2) LOCAL(o1, 9) LOCAL(o0, 3)"},
    "cat_part": {"avx2": "UPCAST(o1, 7)", "sm_90": "", "webgpu": "LOCAL(o1, 7) LOCAL(o0, 5)"},
    "gather_rows": {"avx2": "UPCAST(o1, 5)", "sm_90": "", "webgpu": "UPCAST(o1, 0) LOCAL(o0, 7)"},
    "pad": {"avx2": "UPCAST(o1, 9)", "sm_90": "", "webgpu": "LOCAL(o1, 9) LOCAL(o0, 8)"},
    "flip": {"avx2": "UPCAST(o1, 11)", "sm_90": "", "webgpu": "LOCAL(o1, 11) LOCAL(o0, 6)"}}


def generated(name: str, target: str) -> str:
    state = apply_opts(Scheduler(Kernel(kernel_of(KERNELS[name]())), TARGETS[target]), parse_chain(CHAINS[name][target]))
    program, compiler = lower(state), backend_named(TARGETS[target].device).compilers[0]
    parts = (chain_words([o.to_json() for o in state.applied_opts]), print_nest(state), format_linear(program),
             compiler.render(program, TARGETS[target]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_generated_code(name: str, target: str, request: pytest.FixtureRequest) -> None:
    path, made = FOLDER / f"{name}.{target}.txt", generated(name, target)
    if request.config.getoption("--update-goldens"):
        path.write_text(made, encoding="utf-8")
    kept = path.read_text(encoding="utf-8")
    changes = list(difflib.unified_diff(kept.splitlines(), made.splitlines(), "kept", "made", lineterm="", n=1))
    assert not changes, "\n".join([*changes[:60], f"… {len(changes)} lines; --update-goldens writes {path.name} anew"])


def test_no_golden_is_left_over() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {f"{name}.{target}.txt" for name in KERNELS for target in TARGETS}
