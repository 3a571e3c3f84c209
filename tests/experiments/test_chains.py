"""The hand-written chains of experiments: right numbers at small and odd extents, and valid for the core suite on every kind of target."""
from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod.bench.suites import cases as kinds
from svod.bench.suites.cases import Case
from svod.bench.suites.reference import largest_error, reference, widen
from svod.bench.suites.suites import select_cases
from svod.cli.bench.contestants import SvodContestant
from svod.compile.cpu.host import host_target
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.config import NONE, PrepareConfig
from svod.core.graph import graph
from svod.core.ir.uop import Ops
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor
from tests.compile.native import AVX2, AVX512, BASELINE
from tests.draws import a_half

CHAINS = Path(__file__).resolve().parents[2] / "experiments" / "chains"
SMALL: list[tuple[str, Case]] = [       # (the chain's case, the small case on which it is tried)
    ("gemm_1024", kinds.matmul("a", "", (13, 37), (37, 197))),
    ("gemm_1024", kinds.matmul("a", "", (67, 8), (8, 129))),
    ("gemm_bias_gelu", kinds.linear_gelu("a", "", 11, 23, 191)),
    ("bmm_12", kinds.matmul("a", "", (3, 17, 19), (3, 19, 131))),
    ("gemm_1024_float16", kinds.matmul("a", "", (19, 33), (33, 131), "float16")),
    ("gemm_1024_bfloat16", kinds.matmul("a", "", (67, 33), (33, 131), "bfloat16")),
    ("gemm_1024_int8", kinds.matmul("a", "", (67, 71), (71, 131), "int8")),
    ("conv3x3_64_56", kinds.conv2d("a", "", 5, 37, 3, 17)),
    ("conv7x7_s2_224", kinds.conv2d("a", "", 3, 35, 7, 41, 2)),
    ("conv1x1_256_56", kinds.conv2d("a", "", 7, 13, 1, 17)),
    ("conv_depthwise_112", kinds.conv2d("a", "", 5, 5, 3, 29, groups=5)),
    ("softmax_4096x1024", kinds.softmax("a", "", 5, 197)),
    ("layer_norm_4096x768", kinds.layer_norm("a", "", 7, 131)),
    ("attention_12x512x64", kinds.attention("a", "", 2, 97, 67)),
    ("sum_16m", kinds.reduction("a", "", "sum", (4099,), 0)),
    ("row_sum_4096", kinds.reduction("a", "", "sum", (13, 197), 1)),
    ("column_sum_4096", kinds.reduction("a", "", "sum", (37, 197), 0)),
    ("gemv_4096", kinds.matmul("a", "", (13, 197), (197,))),
    ("max_pool_64_112", kinds.max_pool2d("a", "", 5, 31)),
    ("gelu_4m", kinds.gelu("a", "", 1021)),
    ("axpy_16m", kinds.axpy("a", "", 1021)),
    ("transpose_4096", kinds.transpose("a", "", 71, 67)),
]

DOTS = replace(AVX512, threads=4, features=tuple(sorted({*AVX512.features, "bf16", "vnni"})))
TILES = replace(DOTS, features=("amx", *DOTS.features))


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the table of chains, with the script's folder on the import path, as when it is run."""
    monkeypatch.syspath_prepend(CHAINS)
    return importlib.import_module("run_chains")


def kernel_of(case: Case) -> Kernel:
    """The only kernel of a case, with its weights as constants of the plan. No memory is allocated."""
    tensors = [Tensor(np.empty(o.shape, np.uint16)).bitcast(o.dtype) if o.dtype == "bfloat16" else Tensor(np.empty(o.shape, o.dtype))
               for o in case.operands]
    constants = frozenset(u for t, o in zip(tensors, case.operands, strict=True) if o.weight for u in t.uop.walk() if u.op is Ops.BUFFER)
    call, = create_schedule(graph.sink(case.build(*tensors).uop), constants).calls
    return Kernel(call.ast)


@pytest.mark.parametrize(("name", "case"), a_half(SMALL), ids=[f"{n}-{c.shapes}" for n, c in SMALL])
def test_chains_compute_what_numpy_does(name: str, case: Case, chains: Any) -> None:
    chain = chains.CHAINS[name](case, host_target())
    operands = case.draw(1)
    prepared = SvodContestant("chain", PrepareConfig(opts={"": chain}, db=NONE)).prepare(case, operands)
    prepared.run(2)
    assert largest_error(widen(prepared.output(), case.out_dtype), reference(case, operands)) <= case.tolerance
    assert {k.source for k in prepared.kernels} == {"explicit"}


def test_every_kernel_of_the_suite_has_a_chain(chains: Any) -> None:
    assert set(chains.CHAINS) == {c.name for c in select_cases("core")}
    assert set(chains.GOALS) <= set(chains.CHAINS)


@pytest.mark.parametrize("target", a_half(
    [replace(BASELINE, threads=1), replace(AVX2, threads=3), replace(AVX512, threads=4), DOTS, TILES]),
    ids=["sse", "avx2", "avx512", "dots", "tiles"])
def test_chains_are_valid_on_every_kind_of_target(target: Target, chains: Any) -> None:
    for case in select_cases("core"):
        state = apply_opts(Scheduler(kernel_of(case), target), [Opt.from_json(o) for o in chains.CHAINS[case.name](case, target)])
        program = lower(state)
        validate(program)
        if target in (DOTS, TILES) and case.dtype in ("int8", "bfloat16"):
            assert ("TILEDOT" if target is TILES else "DOT") in {i[0] for phase in program.code for i in phase}, case.name
        assert max(p.threads for p in program.spec.phases) == target.threads, case.name


def test_the_scores_of_attention_are_never_turned(chains: Any) -> None:
    """Scores keep their order of axes: the only strided accesses pack the keys, which are square tiles here."""
    target = replace(AVX512, threads=2)
    case = kinds.attention("a", "", 2, 96, 64)
    state = apply_opts(Scheduler(kernel_of(case), target), [Opt.from_json(o) for o in chains.CHAINS["attention_12x512x64"](case, target)])
    code = [i for phase in lower(state).code for i in phase]
    assert not [i for i in code if i[0] in ("LOADS", "STORES", "GATHER", "SCATTER")]
