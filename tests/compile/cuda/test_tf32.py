"""TF32: sums of float32 on tensor cores, whose factors are rounded to 11 significant bits, and only where the user allows it."""
from __future__ import annotations

import re

import numpy as np
import pytest

from svod.compile.cuda import ptxas
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.render import render
from svod.compile.lower.lower import lower
from svod.config import OptimizerConfig
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.intrinsics import applicable
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.spec.values import Array, round_factor
from svod.errors import KernelOptError
from svod.tune.measure.verify import Reference, compare
from tests.compile.cuda.emulator import run_program
from tests.compile.cuda.target import card_target
from tests.compile.lower.test_intrinsics import gemm
from tests.draws import a_half
from tests.interpreted import interpret

F32 = dtypes.float32
ALLOWED = card_target("sm_80", group_threads=128).allowing(True, True, True)
EDGES = np.array([1 + 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-11 - 2.0**-23, 1 + 3 * 2.0**-11, 0.0, -0.0, 3.0e38, np.inf, -np.inf, np.nan],
                 np.float32)


def rounded(x: Array, bits: int = 11) -> Array:
    """Round numbers to this many significant bits, to nearest, ties away from zero, by arithmetic and not by bits."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.where(np.isfinite(x), np.ldexp(np.trunc(mantissa * 2.0**bits + np.copysign(0.5, mantissa)) / 2.0**bits, exponent), x)


def product(a: Array, b: Array, m: int, n: int, k: int) -> Array:
    return (a.reshape(m, k).astype(np.float64) @ b.reshape(k, n).astype(np.float64)).ravel()


def test_rounding_of_factors() -> None:
    numbers = np.concatenate([EDGES, np.random.default_rng(0).normal(size=1000).astype(np.float32)])
    np.testing.assert_array_equal(round_factor(numbers, 11), rounded(numbers))
    np.testing.assert_array_equal(rounded(EDGES)[:4], [1 + 2.0**-10, -1 - 2.0**-10, 1, 1 + 2.0**-9])
    assert round_factor(numbers, 0) is numbers


@pytest.mark.parametrize("name", a_half(["mma_tf32", "mma_tf32k4"]))
@pytest.mark.parametrize("staged", [False, True])
def test_products_are_those_of_rounded_factors(name: str, staged: bool) -> None:
    m, n, k = 17, 24, 20
    chain = [Opt("LOCAL", "o0", 2), Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"), Opt("PIPELINE", "r0", 2)] if staged else []
    program = lower(apply_opts(Scheduler(gemm(m, n, k, F32, F32), ALLOWED), [Opt("TC", "r0", (name, "o0", "o1")), *chain]))
    rng = np.random.default_rng(1)
    a, b = (rng.uniform(-1, 1, size).astype(np.float32) for size in (m * k, k * n))
    a[:4] = EDGES[:4]
    results = [np.full(m * n, np.nan, np.float32) for _ in range(2)]
    run_program(program, ALLOWED, [results[0], a, b])
    interpret(program, [results[1], a, b])
    for got in results:
        np.testing.assert_allclose(got, product(rounded(a), rounded(b), m, n, k), rtol=0, atol=4e-6)
        assert np.abs(got - product(a, b, m, n, k)).max() > 1e-4


def test_it_is_off_unless_the_user_allows_it() -> None:
    kernel, plain = gemm(64, 64, 64, F32, F32), card_target("sm_80")
    allowed = plain.allowing(*OptimizerConfig(tf32=True).allowed)
    assert plain.allowing(*OptimizerConfig().allowed) == plain and not applicable(kernel, plain, kernel.output)
    with pytest.raises(KernelOptError, match="rounds factors to 11 significant bits, which TF32=1 allows"):
        apply_opt(Scheduler(kernel, plain), Opt("TC", "r0", ("mma_tf32", "o0", "o1")))
    assert "tf32=1" in allowed.key and applicable(kernel, allowed, kernel.output)
    for without in (OptimizerConfig(tf32=True, tc=False).allowed, OptimizerConfig(tc=False).allowed):
        assert plain.allowing(*without).key == plain.allowing(False, True).key, "nothing rounds without matrix instructions"
    older = card_target("sm_75")
    assert older.allowing(True, True, True) == older, "no such instruction"


def test_verification_allows_for_the_rounding_and_no_more() -> None:
    m, n, k = 8, 8, 64
    kernel = gemm(m, n, k, F32, F32)

    def differs(bits: int, significand: int) -> list[bool]:
        """Return for the two sets of inputs, integers and reals, whether the check refuses products whose factors have this many bits."""
        reference, found = Reference(kernel, significand=significand), []
        for number, inputs in enumerate(reference.sets):
            _, a, b = (x.whole() for x in reference.given(number))
            got = product(rounded(a, bits), rounded(b, bits), m, n, k).astype(np.float32)
            expected, = reference.expected(number)
            assert inputs.kind == "reals" or expected.tolerance is None, "integers are exact"
            found.append(compare(got, expected.want, expected.tolerance, F32) is not None)
        return found
    assert differs(11, 11) == [False, False]
    assert differs(11, 0) == [False, True]
    assert differs(6, 11) == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_the_heuristics_matmul(transposed: bool) -> None:
    """The heuristic uses TF32; the machine code has the product and asynchronous copies, and nothing is spilled."""
    target = card_target("sm_80").allowing(True, True, True)
    state = group_heuristic(Scheduler(gemm(1024, 1024, 1024, F32, F32, transposed=transposed), target))
    chosen = state.dots[state.kernel.output]
    assert chosen is not None and chosen.name == "mma_tf32"
    if ptxas.ptxas_version() is None or ptxas.tool("nvdisasm") is None:
        pytest.skip("there is no ptxas or no nvdisasm: the CUDA toolkit has both, the package nvidia-cuda-nvdisasm the latter")
    cubin, (report,) = ptxas.assemble(emit_ptx(render(lower(state), target), "sm_80"), "sm_80")
    text = ptxas.disassemble(cubin)
    assert not report.spill_stores and not report.spill_loads
    assert "HMMA.1688.F32.TF32" in text and "LDGSTS" in text and "LDSM" in text
    assert not re.search(r"\b(LDL|STL)\b", text)
