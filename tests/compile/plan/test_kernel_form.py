"""Text and object files of a plan's kernels; Python functions in a plan have none."""
from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

import svod
from svod.config import NONE, PrepareConfig
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.scheduler import Opt
from svod.errors import ConfigError, LaunchError, UnsupportedError
from svod.tensor import Tensor
from tests.core.corpus import data

CHAIN = "UPCAST(o0, 4) UPCAST(o1, 8) LANES(o1.in)"


def product(**options: object) -> svod.ExecutionPlan:
    return (data(16, 8) @ data(8, 24)).prepare(PrepareConfig(db=NONE, threads=1, **options))  # type: ignore[arg-type]


def test_the_views_of_a_prepared_kernel(tmp_path: Path) -> None:
    (kernel,) = product(opts={"gemm_0": CHAIN}).kernels
    assert kernel.chain == CHAIN and kernel.opts_source == "explicit"
    assert "tile o0 4 × o1 8 (vector)" in kernel.nest()
    assert "LOOP" in kernel.linear()
    assert "define void @svod_p0" in kernel.llvm()
    with pytest.raises(UnsupportedError, match="no passes of its own"):
        kernel.llvm(optimized=True)
    assert "svod_p0:" in kernel.asm() and "ret" in kernel.asm()
    path = kernel.object(tmp_path / "k.o")
    listing = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "<svod_p0>:" in listing and "ret" in listing


def test_chains_are_given_by_name_and_key_and_as_text_or_data() -> None:
    key = product().kernels[0].key
    as_data = [o.to_json() for o in parse_chain(CHAIN)]
    several = {"": "UPCAST(o0, 2)", key[:4]: "UNROLL(r0, 2)", "gemm_0": CHAIN}      # the name wins
    for opts in ({"gemm_0": CHAIN}, {key: CHAIN}, {key[:8]: as_data}, {"": CHAIN}, several):
        (kernel,) = product(opts=opts).kernels
        assert [Opt.from_json(list(o)) for o in kernel.opts] == list(parse_chain(CHAIN))


def test_chains_that_fit_no_kernel_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'gemm_7' fits no kernel of the plan; its kernels are gemm_0 \(\w{12}\)$"):
        product(opts={"gemm_7": CHAIN})
    y = data(4, 4) * 2
    y.prepare(PrepareConfig(db=NONE)).execute()
    with pytest.raises(ConfigError, match=r"computed already.*build the graph anew"):
        y.prepare(PrepareConfig(db=NONE, opts={"": CHAIN}))


def test_plans_and_kernels_say_what_they_are() -> None:
    plan = product(opts={"gemm_0": CHAIN})
    assert repr(plan) == "<ExecutionPlan 1 kernel, inputs b1 float32 128, b2 float32 192, outputs b0 float32 384>"
    assert repr(plan.kernels[0]).startswith(f"<PreparedKernel gemm_0: float32 384; explicit; {CHAIN}")
    y = data(4, 4) * 2
    y.prepare(PrepareConfig(db=NONE)).execute()
    again = y.prepare(PrepareConfig(db=NONE))
    assert repr(again).startswith("<ExecutionPlan no kernels: what it was prepared for was computed before") and not again.kernels
    n = svod.Variable("n", 1, 8)
    assert repr((data(8, 4)[:n] * 2).prepare(PrepareConfig(db=NONE))).endswith("variables n>")


def test_inputs_of_a_captured_function_have_its_names() -> None:
    @svod.jit
    def model(x: Tensor, pair: list[Tensor], *more: Tensor, scale: Tensor) -> Tensor:
        return (x + pair[0] * pair[1] + more[0]) * scale

    rows = [np.full((4, 2), i, np.float32) for i in range(5)]
    np.testing.assert_array_equal(model(rows[0], [rows[1], rows[2]], rows[3], scale=rows[4]).numpy(), np.full((4, 2), 20))
    (plan,) = model.plans
    shown = repr(plan)
    assert all(f"{name} float32 8" in shown for name in ("x", "pair[0]", "pair[1]", "more[0]", "scale"))
    plan.bind_array(next(i for i, name in plan.names.items() if name == "x"), np.full((4, 2), 5, np.float32))


def test_what_has_no_views() -> None:
    x = Tensor(np.ones(4, np.float32))
    plan = svod.custom_function(np.sin, x, dtype="float32", shape=(4,)).prepare(PrepareConfig(db=NONE))
    with pytest.raises(LaunchError, match="a function of Python; it has no loop nest"):
        next(k for k in plan.kernels if k.is_host_item).nest()
    (interpreted,) = product(device="CPU:interpreter").kernels
    with pytest.raises(UnsupportedError, match="makes no machine code"):
        interpreted.asm()
    with pytest.raises(UnsupportedError, match="no passes of its own"):
        interpreted.llvm(optimized=True)
